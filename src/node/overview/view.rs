//! The whole cluster, as this region knows it, for `/v1/state`.

use super::super::Inner;
use super::super::admin::{BucketsSeen, books_state};
use super::journal::{Observed, ObservedRegion};
use super::report::bucket_in_hex;
use super::{OLD, Seen};
use crate::quota::policy::{BucketId, OnStoreFailure};
use crate::quota::pool::{Member, PolicyView, Pool, Reset, Standing};
use crate::raft::RaftStatus;
use crate::server::state::{
    BooksState, HotBucket, HotRegion, LentState, PartState, PeerHot, PeerReport, RegionReport, RegionView,
    State, TrafficState,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Buckets that are shown ...
const HOTTEST_SHOWN: usize = 24;
/// ... with so many of each policy besides ...
const HOTTEST_OF_POLICY: usize = 3;
/// ... but no more than these.
const HOTTEST_MAX: usize = 64;
/// Buckets of one policy whose books are added up.
const BOOKS_MAX: usize = 32;

impl Inner {
    /// The part of the state that is about all regions.
    pub(in crate::node) fn describe_cluster(
        &self,
        state: &mut State,
        mine: RegionReport,
        status: &RaftStatus,
        seen: &BucketsSeen<'_>,
    ) {
        let overview = self.overview.seen();
        state.regions = self.region_views(status, seen.pool, &overview);
        if let Some(me) = state.regions.get_mut(&*self.config.region) {
            (me.said, me.age_ms) = (mine, Some(0));
        }
        let reports = self.reports(&overview);
        let mut hottest = hottest(&reports);
        let policies: HashMap<&str, PolicyView<'_>> =
            seen.pool.policies().map(|view| (&*view.policy.name, view)).collect();
        hottest.retain(|hot| policies.contains_key(hot.policy.as_str()));
        state.traffic = traffic(&reports, &hottest, &policies, seen);
        let mut of_policy: HashMap<String, usize> = HashMap::new();
        let mut shown = 0_usize;
        hottest.retain(|hot| {
            let of_policy = of_policy.entry(hot.policy.clone()).or_default();
            *of_policy = of_policy.saturating_add(1);
            shown = shown.saturating_add(1);
            shown <= HOTTEST_SHOWN || *of_policy <= HOTTEST_OF_POLICY
        });
        hottest.truncate(HOTTEST_MAX);
        for hot in &mut hottest {
            let (Some(view), Some(bucket)) = (policies.get(hot.policy.as_str()), bucket_in_hex(&hot.bucket))
            else {
                continue;
            };
            let bucket = seen.pool.booked_as(view.id, bucket);
            let books = seen.pool.books(view.id, bucket, seen.tau);
            hot.books = books.map(|books| books_state(&books, seen.pool.regions()));
            for Member { id, name, .. } in present(seen.pool) {
                let lease = seen.lease(bucket, id);
                if lease.is_some() || hot.regions.contains_key(&*name) {
                    hot.regions.entry(name.to_string()).or_default().lease = lease;
                }
            }
        }
        state.hottest = hottest;
    }

    fn region_views(
        &self,
        status: &RaftStatus,
        pool: &Pool,
        overview: &Seen,
    ) -> BTreeMap<String, RegionView> {
        let members: BTreeMap<String, Member> = present(pool).map(|m| (m.name.to_string(), m)).collect();
        let mut names: BTreeSet<String> = members.keys().cloned().collect();
        names.extend(status.members.iter().map(|member| member.region.to_string()));
        names.extend(status.peers.iter().map(|peer| peer.region.to_string()));
        names.insert(self.config.region.to_string());
        let view = |name: String| {
            let me = *name == *self.config.region;
            let member = members.get(&name);
            let node = status.members.iter().find(|node| *node.region == *name);
            let peer = status.peers.iter().find(|peer| *peer.region == *name);
            let heard = overview.heard.get(&name);
            let leads = status.leader.as_deref() == Some(name.as_str());
            let view = RegionView {
                me,
                standing: member.map_or("", |member| standing(member.standing)).into(),
                role: match node {
                    _ if leads => "leader",
                    Some(node) if node.voter => "voter",
                    Some(_) => "learner",
                    None => "none",
                }
                .into(),
                reachable: me || peer.is_some_and(|peer| peer.reachable),
                rtt_us: peer
                    .and_then(|p| p.rtt)
                    .map(|rtt| u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX)),
                witness: member.is_some_and(|member| member.witness),
                epoch: member.map_or(0, |member| pool.epoch(member.id).0),
                age_ms: heard.map(|(at, _)| u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX)),
                said: heard.map(|(_, report)| report.region.clone()).unwrap_or_default(),
            };
            (name, view)
        };
        names.into_iter().map(view).collect()
    }

    /// What all regions said last, this one first.
    fn reports<'s>(&'s self, overview: &'s Seen) -> Vec<Said<'s>> {
        let others = overview.heard.iter().map(|(region, (at, report))| Said {
            region,
            report,
            fresh: at.elapsed() < OLD,
        });
        let mine = Said { region: &self.config.region, report: &overview.mine, fresh: true };
        std::iter::once(mine).chain(others).collect()
    }

    /// What each region may always use of a policy's limit.
    pub(in crate::node) fn parts(pool: &Pool, policy: u32) -> Vec<PartState> {
        let part = |Member { id, name, .. }: Member| {
            let part = pool.usable(policy, id)?;
            Some(PartState {
                region: name.to_string(),
                rate: part.rate.0,
                burst: part.burst.0,
                overdraft: part.overdraft.0,
            })
        };
        present(pool).filter(|member| !member.witness).filter_map(part).collect()
    }

    /// What the journal goes by.
    pub(super) fn observe(&self) -> Observed {
        let status = self.raft.status();
        let (policies, settled, resets, mut regions) = {
            let pool = self.raft.pool();
            let pool = pool.read();
            let region = |member: Member| {
                let peer = status.peers.iter().find(|peer| peer.region == member.name);
                let me = member.name == self.config.region;
                let observed = ObservedRegion {
                    me,
                    standing: standing(member.standing).into(),
                    epoch: pool.epoch(member.id).0,
                    reachable: me || peer.is_some_and(|peer| peer.reachable),
                    ..ObservedRegion::default()
                };
                (member.name.to_string(), observed)
            };
            let regions: BTreeMap<_, _> = present(&pool).map(region).collect();
            let names: HashMap<u32, &str> =
                pool.policies().map(|view| (view.id, &*view.policy.name)).collect();
            let reset = |(_, reset): (BucketId, &Reset)| {
                let policy = names.get(&reset.policy).copied().unwrap_or_default();
                (reset.number, format!("`{policy}`: a bucket was reset by {}: {}", reset.by, reset.reason))
            };
            let resets: BTreeMap<_, _> = pool.resets().map(reset).collect();
            (pool.version(), pool.settled(), resets, regions)
        };
        let mine = self.report_region();
        let overview = self.overview.seen();
        let mut fallbacks = BTreeSet::new();
        let active = self.core.active.load();
        let failure = |name: &str| {
            let policy = active.policies().find(|policy| &*policy.policy.name == name);
            policy.map_or("deny", |policy| on_store_failure(policy.policy.on_store_failure))
        };
        for (name, region) in &mut regions {
            let heard =
                overview.heard.get(name).filter(|(at, _)| at.elapsed() < OLD).map(|(_, report)| report);
            let (said, traffic) = match heard {
                _ if region.me => (&mine, &overview.mine.policies),
                Some(report) => (&report.region, &report.policies),
                None => continue,
            };
            let why = said.store.why.clone().unwrap_or_else(|| "not attached".into());
            region.store = Some(if said.store.attached { Ok(()) } else { Err(why) });
            let ready = said.not_ready.is_empty();
            region.ready = Some(if ready { Ok(()) } else { Err(said.not_ready.join("; ")) });
            let fell = traffic.iter().filter(|(_, rate)| rate.fallbacks > 0);
            fallbacks.extend(fell.map(|(policy, _)| (name.clone(), policy.clone(), failure(policy))));
        }
        Observed {
            leader: status.leader.as_deref().map(str::to_owned),
            term: status.term,
            policies,
            settled,
            resets,
            breaches: self.core.metrics.breaches(),
            regions,
            fallbacks,
        }
    }
}

/// What a region said last.
struct Said<'s> {
    region: &'s str,
    report: &'s PeerReport,
    /// Not long ago.
    fresh: bool,
}

/// As a policy file has it.
pub(in crate::node) fn on_store_failure(failure: OnStoreFailure) -> &'static str {
    match failure {
        OnStoreFailure::Allow => "allow",
        OnStoreFailure::Deny => "deny",
        OnStoreFailure::Local => "local",
    }
}

fn present(pool: &Pool) -> impl Iterator<Item = Member> {
    pool.members().filter(|member| member.standing != Standing::Out)
}

fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::In => "in",
        Standing::Leaving { .. } => "leaving",
        Standing::Out => "out",
    }
}

/// The buckets of all regions, those with most demand in all of them together first.
fn hottest(reports: &[Said<'_>]) -> Vec<HotBucket> {
    let mut all: HashMap<&str, HotBucket> = HashMap::new();
    for Said { region, report, fresh } in reports {
        for peer in &report.buckets {
            let hot = all.entry(&peer.bucket).or_insert_with(|| HotBucket {
                policy: peer.policy.clone(),
                bucket: peer.bucket.clone(),
                what: peer.what.clone(),
                ..HotBucket::default()
            });
            if *fresh {
                hot.admitted = hot.admitted.saturating_add(peer.admitted);
                hot.denied = hot.denied.saturating_add(peer.denied);
            }
            hot.regions.insert((*region).to_owned(), hot_region(peer));
        }
    }
    let mut all: Vec<HotBucket> = all.into_values().collect();
    let busy = |hot: &HotBucket| std::cmp::Reverse(hot.admitted.saturating_add(hot.denied));
    all.sort_unstable_by(|a, b| busy(a).cmp(&busy(b)).then_with(|| a.bucket.cmp(&b.bucket)));
    all
}

fn hot_region(peer: &PeerHot) -> HotRegion {
    HotRegion {
        admitted: peer.admitted,
        denied: peer.denied,
        remaining: Some(peer.remaining),
        level: peer.holds.map(|holds| holds.level),
        rate: peer.holds.map(|holds| holds.rate),
        lease: None,
    }
}

/// What passes, policy by policy, and the books of its buckets together.
fn traffic(
    reports: &[Said<'_>],
    hottest: &[HotBucket],
    policies: &HashMap<&str, PolicyView<'_>>,
    seen: &BucketsSeen<'_>,
) -> BTreeMap<String, TrafficState> {
    let mut traffic: BTreeMap<String, TrafficState> = BTreeMap::new();
    for Said { region, report, .. } in reports {
        for (policy, rate) in
            report.policies.iter().filter(|(policy, _)| policies.contains_key(policy.as_str()))
        {
            let state = traffic.entry(policy.clone()).or_default();
            state.regions.insert((*region).to_owned(), *rate);
        }
    }
    for (name, state) in &mut traffic {
        let Some(view) = policies.get(name.as_str()) else { continue };
        let complete = reports.iter().all(|Said { report, .. }| {
            !report.policies.contains_key(name) || report.complete.iter().any(|complete| complete == name)
        });
        let hot = hottest.iter().filter(|hot| hot.policy == *name);
        state.buckets = complete.then(|| u64::try_from(hot.clone().count()).unwrap_or(u64::MAX));
        let ids = hot.filter_map(|hot| bucket_in_hex(&hot.bucket)).take(BOOKS_MAX);
        let all: Vec<BooksState> = ids.filter_map(|id| books(seen, view.id, id)).collect();
        state.books = all.into_iter().reduce(sum).or_else(|| books(seen, view.id, BucketId::default()));
    }
    traffic
}

fn books(seen: &BucketsSeen<'_>, policy: u32, bucket: BucketId) -> Option<BooksState> {
    let books = seen.pool.books(policy, seen.pool.booked_as(policy, bucket), seen.tau)?;
    Some(books_state(&books, seen.pool.regions()))
}

fn sum(a: BooksState, b: BooksState) -> BooksState {
    let lent = a.lent.into_iter().zip(b.lent).map(|(a, b)| LentState {
        region: a.region,
        rate: a.rate.saturating_add(b.rate),
        burst: a.burst.saturating_add(b.burst),
    });
    BooksState {
        whole_rate: a.whole_rate.saturating_add(b.whole_rate),
        whole_burst: a.whole_burst.saturating_add(b.whole_burst),
        reserved_rate: a.reserved_rate.saturating_add(b.reserved_rate),
        reserved_burst: a.reserved_burst.saturating_add(b.reserved_burst),
        free_rate: a.free_rate.saturating_add(b.free_rate),
        free_burst: a.free_burst.saturating_add(b.free_burst),
        lent: lent.collect(),
        frozen: a.frozen || b.frozen,
    }
}
