//! Who is in the Raft group, and who of them votes. Each change is one membership change, made by the leader, and refused
//! where it would leave no majority of voters within reach.

use super::RaftError;
use super::network::client::{CallError, Lane};
use super::network::wire::{MemberChange, MemberFault, MemberReply, WhoReply, path};
use super::node::Node;
use super::types::{PeerNode, TypeConfig};
use crate::quota::policy::RegionName;
use crate::quota::pool::Standing;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError as OpenRaftError};
use openraft::{ChangeMembers, Instant as _, RaftMetrics};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// More voters than this make every commit wait for more regions, and hardly anything safer.
pub const VOTERS_MAX: usize = 5;
/// A learner with more entries than this to go is not made a voter.
const LAG_MAX: u64 = 1_000;
/// For the leader to make a change, once it has been asked.
const CHANGE_WITHIN: Duration = Duration::from_secs(6);

type Metrics = RaftMetrics<TypeConfig>;

impl Node {
    /// Makes a change, wherever the leader is, until `deadline`.
    pub async fn change_members(&self, change: MemberChange, deadline: Instant) -> MemberReply {
        let nobody = || MemberFault::NotNow("nobody leads at the moment".into());
        let Some((leader, region)) = self.leader() else { return Err(nobody()) };
        if leader == self.client.peers.me.node_id {
            return self.change_members_here(change).await;
        }
        let peer = self.client.peers.get(&region).ok_or_else(nobody)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let limits = (left, super::network::wire::CALL_BYTES_MAX);
        let called: Result<MemberReply, CallError> =
            self.client.call(&peer, Lane::Control, path::MEMBERS, &change, limits).await;
        called.unwrap_or_else(|fault| {
            let what = format!("the leader, `{region}`, gave no answer: {fault}");
            Err(if fault.nothing_happened() { MemberFault::NotNow(what) } else { MemberFault::Unknown(what) })
        })
    }

    /// Makes a change, if this node leads.
    pub async fn change_members_here(&self, change: MemberChange) -> MemberReply {
        let metrics = self.raft.metrics().borrow_watched().clone();
        if metrics.current_leader != Some(metrics.id) {
            return Err(MemberFault::NotNow("leadership has just changed".into()));
        }
        let members = metrics.membership_config.membership();
        if members.get_joint_config().len() > 1 {
            return Err(MemberFault::NotNow("another change of members is under way".into()));
        }
        tracing::info!(?change, "changing the members");
        let change = match change {
            MemberChange::Learn { node, region, url } => {
                return self.learn(&metrics, node, region, url).await;
            }
            MemberChange::Lead { node } => return self.hand_over(&metrics, node).await,
            MemberChange::Promote { node } => self.promotion(&metrics, node)?,
            MemberChange::Demote { node } => self.demotion(&metrics, node).await?,
            MemberChange::Forget { node } => self.forgetting(&metrics, node).await?,
        };
        let Some((change, retain)) = change else { return Ok(()) };
        self.make(self.raft.change_membership(change, retain)).await
    }

    /// What this node knows of a region, and of all.
    pub fn who(&self, region: &RegionName) -> WhoReply {
        let metrics = self.raft.metrics().borrow_watched().clone();
        let (index, members) = listed(&metrics);
        let seat = {
            let pool = self.replica.pool();
            let pool = pool.read();
            match pool.region(region).and_then(|id| pool.member(id)) {
                Some(member) => (member.standing == Standing::In).then_some(member.node),
                None if pool.regions().is_empty() => {
                    members.iter().find(|(_, name, _)| name == region).map(|(node, ..)| *node)
                }
                None => None,
            }
        };
        let applied = metrics.last_applied.map_or(0, |log_id| log_id.index);
        // What is not committed may never be.
        let members = if index <= applied { members } else { Vec::new() };
        WhoReply { initialized: self.initialized(), seat, applied, index, members }
    }

    /// Peers are the members.
    pub async fn follow_members(self: std::sync::Arc<Self>) {
        let mut metrics = self.raft.server_metrics();
        loop {
            let (index, members) = {
                let now = metrics.borrow_watched();
                let index = now.membership_config.log_id().map_or(0, |log_id| log_id.index);
                let nodes = now.membership_config.nodes();
                let members: Vec<_> = nodes.map(|(id, n)| (*id, n.region.clone(), n.url.clone())).collect();
                (index, members)
            };
            self.client.peers.follow(index, &members, true);
            if metrics.changed().await.is_err() {
                return;
            }
        }
    }

    async fn learn(&self, metrics: &Metrics, node: u64, region: RegionName, url: String) -> MemberReply {
        let mut members = metrics.membership_config.nodes();
        if let Some((id, member)) = members.find(|(_, member)| member.region == region) {
            if *id == node && member.url == url {
                return Ok(());
            }
            if *id == node {
                return Err(MemberFault::Refused(format!(
                    "`{region}` is there already, at {}; to move it, remove it and add it again",
                    member.url
                )));
            }
            return Err(MemberFault::Refused(format!(
                "`{region}` is still there as node {id}; run `quorate region remove {region}` to its end first"
            )));
        }
        self.make(self.raft.add_learner(node, PeerNode { region, url }, false)).await
    }

    fn promotion(&self, metrics: &Metrics, node: u64) -> Result<Change, MemberFault> {
        let members = metrics.membership_config.membership();
        let voters: BTreeSet<u64> = members.voter_ids().collect();
        if voters.contains(&node) {
            return Ok(None);
        }
        let region = region_of(metrics, node)?;
        if voters.len() >= VOTERS_MAX {
            return Err(MemberFault::Refused(format!(
                "{VOTERS_MAX} regions vote already; `{region}` stays a learner, which has its full part of every limit"
            )));
        }
        let matched = metrics.replication.as_ref().and_then(|all| all.get(&node).copied().flatten());
        let lag =
            metrics.last_log_index.unwrap_or(0).saturating_sub(matched.map_or(0, |log_id| log_id.index));
        if lag > LAG_MAX || matched.is_none() {
            return Err(MemberFault::NotNow(format!(
                "`{region}` has {lag} entries of the log to catch up with"
            )));
        }
        if !self.reaches(metrics, node) {
            return Err(MemberFault::NotNow(format!("`{region}` does not answer")));
        }
        let mut after = voters;
        after.insert(node);
        self.keeps_quorum(metrics, &after)?;
        Ok(Some((ChangeMembers::AddVoterIds([node].into()), true)))
    }

    async fn demotion(&self, metrics: &Metrics, node: u64) -> Result<Change, MemberFault> {
        let mut after: BTreeSet<u64> = metrics.membership_config.voter_ids().collect();
        if !after.remove(&node) {
            return region_of(metrics, node).map(|_| None);
        }
        self.keeps_quorum(metrics, &after)?;
        self.hand_over_first(metrics, node).await?;
        Ok(Some((ChangeMembers::RemoveVoters([node].into()), true)))
    }

    async fn forgetting(&self, metrics: &Metrics, node: u64) -> Result<Change, MemberFault> {
        if metrics.membership_config.membership().get_node(&node).is_none() {
            return Ok(None);
        }
        let mut after: BTreeSet<u64> = metrics.membership_config.voter_ids().collect();
        if !after.remove(&node) {
            return Ok(Some((ChangeMembers::RemoveNodes([node].into()), true)));
        }
        self.keeps_quorum(metrics, &after)?;
        self.hand_over_first(metrics, node).await?;
        Ok(Some((ChangeMembers::RemoveVoters([node].into()), false)))
    }

    /// A leader is not taken the vote that it leads by.
    async fn hand_over_first(&self, metrics: &Metrics, node: u64) -> Result<(), MemberFault> {
        if node != metrics.id {
            return Ok(());
        }
        let matched = |id: &u64| {
            let all = metrics.replication.as_ref();
            all.and_then(|all| all.get(id).copied().flatten()).map(|log_id| log_id.index)
        };
        let others =
            metrics.membership_config.voter_ids().filter(|id| *id != node && self.reaches(metrics, *id));
        let Some(next) = others.max_by_key(matched) else {
            return Err(MemberFault::NotNow("it leads, and no other voter can be reached".into()));
        };
        self.hand_over(metrics, next).await?;
        Err(MemberFault::NotNow(format!(
            "leadership has been handed over to `{}`",
            region_of(metrics, next)?
        )))
    }

    async fn hand_over(&self, metrics: &Metrics, node: u64) -> MemberReply {
        let region = region_of(metrics, node)?;
        if node == metrics.id {
            return Ok(());
        }
        if !metrics.membership_config.voter_ids().any(|voter| voter == node) {
            return Err(MemberFault::Refused(format!(
                "`{region}` has no vote; run `quorate region promote {region}`"
            )));
        }
        if !self.reaches(metrics, node) {
            return Err(MemberFault::Refused(format!("`{region}` cannot be reached")));
        }
        self.transfer_leader(node).await.map_err(|fault| match fault {
            RaftError::Transfer(why) => MemberFault::NotNow(why),
            other => MemberFault::Unknown(other.to_string()),
        })
    }

    /// Would a majority of these voters be there?
    fn keeps_quorum(&self, metrics: &Metrics, voters: &BTreeSet<u64>) -> Result<(), MemberFault> {
        let name = |id: &u64| region_of(metrics, *id).unwrap_or_else(|_| id.to_string());
        let (there, away): (Vec<&u64>, Vec<&u64>) = voters.iter().partition(|id| self.reaches(metrics, **id));
        let needed = voters.len() / 2 + 1;
        if there.len() >= needed {
            return Ok(());
        }
        let list = |ids: &[&u64]| ids.iter().map(|id| name(id)).collect::<Vec<_>>().join(", ");
        let (is, is_not) = (list(&there), list(&away));
        Err(MemberFault::Refused(match voters.len() {
            0 => "the last voter cannot go".into(),
            many => format!(
                "it would lose quorum: of the {many} voters that there would be, {needed} are needed, and only {} can be reached ({is}; not: {is_not})",
                there.len()
            ),
        }))
    }

    /// Does it answer? The leader's own heartbeats tell sooner than pings do, of who has just come and of who has just gone.
    fn reaches(&self, metrics: &Metrics, node: u64) -> bool {
        let timing = &self.client.timing;
        if node == metrics.id {
            return true;
        }
        match metrics.heartbeat.as_ref().and_then(|all| all.get(&node)?.as_ref()) {
            Some(answered) => answered.elapsed() < timing.election_max(),
            None => {
                let peer = region_of(metrics, node).ok().and_then(|region| self.client.peers.get(&region));
                peer.is_some_and(|peer| peer.reachable(timing.silence()))
            }
        }
    }

    async fn make<T>(
        &self,
        change: impl Future<Output = Result<T, OpenRaftError<TypeConfig, ClientWriteError<TypeConfig>>>>,
    ) -> MemberReply {
        match timeout_at(Instant::now() + CHANGE_WITHIN, change).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(OpenRaftError::APIError(ClientWriteError::ForwardToLeader(_)))) => {
                Err(MemberFault::NotNow("leadership has just changed".into()))
            }
            Ok(Err(OpenRaftError::APIError(ClientWriteError::ChangeMembershipError(why)))) => {
                Err(MemberFault::NotNow(why.to_string()))
            }
            Ok(Err(fault)) => Err(MemberFault::Unknown(fault.to_string())),
            Err(_) => Err(MemberFault::Unknown("it was not committed in time".into())),
        }
    }
}

/// A change, and whether voters that it removes stay as learners; `None`: nothing is to be done.
type Change = Option<(ChangeMembers<u64, PeerNode>, bool)>;

fn region_of(metrics: &Metrics, node: u64) -> Result<String, MemberFault> {
    let member = metrics.membership_config.membership().get_node(&node);
    let region = member.map(|member| member.region.to_string());
    region.ok_or_else(|| {
        MemberFault::Refused(format!("node {node} does not follow the log; run `quorate region add`"))
    })
}

/// The members, and the index of the entry that says so.
fn listed(metrics: &Metrics) -> (u64, Vec<(u64, RegionName, String)>) {
    let index = metrics.membership_config.log_id().map_or(0, |log_id| log_id.index);
    let nodes = metrics.membership_config.nodes();
    (index, nodes.map(|(id, node)| (*id, node.region.clone(), node.url.clone())).collect())
}
