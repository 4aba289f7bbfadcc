//! Regions come and go: each step is one operation on the pool or one change of Raft's members, and changes nothing where
//! it has been taken already, so an operator (or `quorate region`) may ask again until all is done.

use super::Inner;
use super::admin::unanswered;
use crate::config;
use crate::quota::amount::Micros;
use crate::quota::policy::RegionName;
use crate::quota::pool::{
    AddRegion, Member, NAMES_MAX, Op, PolicyOutcome, REGIONS_MAX, RemoveRegion, Standing,
};
use crate::raft::{MemberError, MemberStatus, RaftStatus};
use crate::server::admin::{ApplyError, RegionAction};
use crate::server::state::{RegionState, RegionStep, RegionsState};
use std::time::Duration;
use tokio::time::Instant;

/// How long one step may take. (`quorate` waits 10 s for an answer.)
const STEP_WITHIN: Duration = Duration::from_secs(7);
/// How long this region's replica may take to apply what the leader has.
const SEEN_WITHIN: Duration = Duration::from_secs(2);
/// Between two looks at it.
const LOOK_EVERY: Duration = Duration::from_millis(20);

impl Inner {
    /// Who is in the cluster, and what each of them waits for.
    pub(super) fn list_regions(&self) -> RegionsState {
        let status = self.raft.status();
        let regions = self.members().into_iter().filter_map(|member| {
            let node = status.members.iter().find(|m| m.node == member.node);
            if member.standing == Standing::Out && node.is_none() {
                return None;
            }
            let standing = match member.standing {
                Standing::In => "in",
                Standing::Leaving { .. } => "leaving",
                Standing::Out => "out",
            };
            Some(RegionState {
                region: member.name.to_string(),
                node: member.node,
                url: node.map(|node| node.url.clone()),
                standing: standing.into(),
                role: role(node).into(),
                witness: member.witness,
                leads: status.leader.as_ref() == Some(&member.name),
                reachable: self.reaches(&status, &member.name),
                waits_for: self.waits_for(&member),
            })
        });
        RegionsState { region: self.config.region.to_string(), regions: regions.collect() }
    }

    /// Takes the next step.
    pub(super) async fn step_region(
        &self,
        name: &str,
        action: RegionAction,
    ) -> Result<RegionStep, ApplyError> {
        let until = Instant::now() + STEP_WITHIN;
        match action {
            RegionAction::Add { url, witness } => self.add_region(name, &url, witness, until).await,
            RegionAction::Remove { presume_dead } => self.remove_region(name, presume_dead, until).await,
            RegionAction::Promote => {
                let node = self.node_of(name)?;
                self.took(name, node, self.raft.promote(node, until).await)
            }
            RegionAction::Demote => {
                let node = self.node_of(name)?;
                self.took(name, node, self.raft.demote(node, until).await)
            }
            RegionAction::Lead => {
                let node = self.node_of(name)?;
                self.took(name, node, self.raft.lead(node, until).await)
            }
        }
    }

    async fn add_region(
        &self,
        name: &str,
        url: &str,
        witness: bool,
        until: Instant,
    ) -> Result<RegionStep, ApplyError> {
        let tls = self.config.peer_tls.is_some();
        let peer = config::peer(name, url, tls).map_err(|fault| ApplyError::Invalid(vec![fault]))?;
        let known = self.member(name);
        if let Some(member) = known.as_ref().filter(|m| m.standing == Standing::In && m.witness != witness) {
            let is = if member.witness { "as a witness" } else { "as a region that serves callers" };
            return Err(ApplyError::Refused(format!("`{name}` is in already, {is}; remove it first")));
        }
        if known.as_ref().is_none_or(|member| member.standing != Standing::In) {
            // Its former life has to be forgotten first: one region is one member.
            if let Some(node) = self.raft.status().members.iter().find(|m| m.region == peer.name) {
                return Err(ApplyError::Refused(format!(
                    "`{name}` is still there as node {}; run `quorate region remove {name}` to its end first",
                    node.node
                )));
            }
            let add = AddRegion { name: peer.name.clone(), previous: known.map_or(0, |member| member.node) };
            let op = if witness { Op::AddWitness(add) } else { Op::AddRegion(add) };
            self.commit(op, until, || self.why_not_added(name)).await?;
        }
        let Some(member) = self.member(name).filter(|member| member.standing == Standing::In) else {
            return Err(ApplyError::Unavailable(format!("`{name}` is not seen here yet")));
        };
        let learns = self.raft.add_learner(member.node, &peer.name, &peer.url.to_string(), until).await;
        self.took(name, member.node, learns)
    }

    async fn remove_region(
        &self,
        name: &str,
        presume_dead: bool,
        until: Instant,
    ) -> Result<RegionStep, ApplyError> {
        let member = self.member(name).ok_or_else(|| no_region(name))?;
        let stays = member.standing == Standing::In;
        if stays {
            self.would_lose_quorum(&member)?;
        }
        if stays || presume_dead && member.standing != Standing::Out {
            let remove = RemoveRegion { region: member.id, node: member.node, presume_dead };
            self.commit(Op::RemoveRegion(remove), until, || self.why_not_removed()).await?;
        }
        let Some(member) = self.member(name).filter(|now| now.node == member.node) else {
            return Err(ApplyError::Refused(format!("`{name}` has come back meanwhile")));
        };
        if member.standing != Standing::Out {
            let waits_for = self.waits_for(&member).or_else(|| Some("the log".into()));
            return Ok(RegionStep { region: name.into(), node: member.node, done: false, waits_for });
        }
        self.took(name, member.node, self.raft.forget(member.node, until).await)
    }

    /// Commits a change of the pool, and waits until this replica has it.
    async fn commit(
        &self,
        op: Op,
        until: Instant,
        why_refused: impl Fn() -> String,
    ) -> Result<(), ApplyError> {
        let applied = self.raft.propose(vec![op], until).await.map_err(unanswered)?;
        match applied.policies {
            Some(PolicyOutcome::Set(version)) => {
                let seen = Instant::now() + SEEN_WITHIN;
                while self.raft.pool().read().version() < version {
                    if Instant::now() >= seen {
                        let what = "it is done, and not seen here yet".into();
                        return Err(ApplyError::Unavailable(what));
                    }
                    tokio::time::sleep(LOOK_EVERY).await;
                }
                Ok(())
            }
            _ => Err(ApplyError::Refused(why_refused())),
        }
    }

    /// What became of a change of Raft's members.
    fn took(&self, name: &str, node: u64, took: Result<(), MemberError>) -> Result<RegionStep, ApplyError> {
        let step = |waits_for: Option<String>| {
            Ok(RegionStep { region: name.into(), node, done: waits_for.is_none(), waits_for })
        };
        match took {
            Ok(()) => step(None),
            Err(MemberError::NotNow(why)) => step(Some(why)),
            Err(MemberError::Refused(why)) => Err(ApplyError::Refused(why)),
            Err(MemberError::Unknown(why)) => Err(ApplyError::Unknown(why)),
        }
    }

    /// Refused early, before the pool takes its part away: without it a majority of voters would be out of reach.
    fn would_lose_quorum(&self, member: &Member) -> Result<(), ApplyError> {
        let status = self.raft.status();
        let rest: Vec<&MemberStatus> =
            status.members.iter().filter(|m| m.voter && m.node != member.node).collect();
        let away: Vec<&str> =
            rest.iter().filter(|m| !self.reaches(&status, &m.region)).map(|m| &*m.region).collect();
        let there = rest.len().saturating_sub(away.len());
        if there > rest.len() / 2 {
            return Ok(());
        }
        Err(ApplyError::Refused(match rest.len() {
            0 => format!("`{}` is the only voter", member.name),
            many => format!(
                "it would lose quorum: of the {many} other voters only {there} can be reached from `{}` (not: {})",
                self.config.region,
                away.join(", ")
            ),
        }))
    }

    fn why_not_added(&self, name: &str) -> String {
        let known = self.member(name);
        let pool = self.raft.pool();
        let pool = pool.read();
        let is_in = |member: &Member| member.standing == Standing::In;
        match known {
            Some(member) if matches!(member.standing, Standing::Leaving { .. }) => format!(
                "`{name}` is still leaving; wait for it, or run `quorate region remove {name} --presume-dead` if its daemon has stopped for good"
            ),
            _ if pool.members().filter(is_in).count() >= REGIONS_MAX => {
                format!("the cluster has {REGIONS_MAX} regions already")
            }
            None if pool.regions().len() >= NAMES_MAX => {
                format!("the cluster has had {NAMES_MAX} names; take one of them")
            }
            _ => "the cluster did not take it: it has not been founded, or too many changes wait for regions to acknowledge them".into(),
        }
    }

    fn why_not_removed(&self) -> String {
        "the cluster did not take it: it is the last region, or too many changes wait for regions to acknowledge them".into()
    }

    /// What a change of a region waits for, if it is not through.
    fn waits_for(&self, member: &Member) -> Option<String> {
        let pool = self.raft.pool();
        let pool = pool.read();
        let version = match member.standing {
            Standing::Leaving { version } => version,
            Standing::In if pool.usable_later(member.id) => pool.version(),
            _ => return None,
        };
        let late: Vec<String> = pool
            .unacked(version)
            .filter_map(|id| pool.member(id))
            .map(|member| member.name.to_string())
            .collect();
        if !late.is_empty() {
            return Some(format!("{} to acknowledge", late.join(", ")));
        }
        let left = pool.settles_at().map_or(Micros::ZERO, |at| (at - pool.tau()).or_zero());
        Some(format!("older leases to run out: {} s", left.ceil_millis().saturating_add(999) / 1_000))
    }

    fn members(&self) -> Vec<Member> {
        self.raft.pool().read().members().collect()
    }

    fn member(&self, name: &str) -> Option<Member> {
        let pool = self.raft.pool();
        let pool = pool.read();
        pool.member(pool.region(name)?)
    }

    fn node_of(&self, name: &str) -> Result<u64, ApplyError> {
        let member = self.member(name).filter(|member| member.standing != Standing::Out);
        member.map(|member| member.node).ok_or_else(|| no_region(name))
    }

    fn reaches(&self, status: &RaftStatus, region: &RegionName) -> bool {
        *region == self.config.region || status.peers.iter().any(|p| p.region == *region && p.reachable)
    }
}

fn role(node: Option<&MemberStatus>) -> &'static str {
    match node {
        Some(node) if node.voter => "voter",
        Some(_) => "learner",
        None => "none",
    }
}

fn no_region(name: &str) -> ApplyError {
    ApplyError::Refused(format!("there is no region `{name}`; `quorate region list` shows them"))
}
