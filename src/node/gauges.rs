//! Figures that somebody has to look for: about all buckets of the pool and of this region.
//!
//! Looked for bit by bit in the background, so that it costs the same however many buckets there are, and a scrape costs
//! nothing: it shows what the last whole walk has found.

use super::Inner;
use crate::clock;
use crate::limiter::active::{Active, ActivePolicy};
use crate::limiter::meter::Reading;
use crate::quota::amount::{Level, Micros, Rate, Tokens};
use crate::quota::policy::{BucketId, Cut, RegionName};
use crate::quota::pool::{Books, Pool};
use crate::raft::{RaftStatus, Role};
use crate::store::RegionStore as _;
use crate::telemetry::Metrics;
use crate::telemetry::metrics::{Check, PolicyLabel, PolicyOf, PolicyPart, RegionLabel};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

/// Between two steps.
const TICK: Duration = Duration::from_millis(250);
/// Every so many of them an embedded store is asked how much it holds.
const TICKS_A_COUNT: u32 = 4;
/// Buckets looked at under one lock on the pool (a few hundred microseconds) ...
const BUCKETS_A_LOCK: usize = 256;
/// ... and so many locks a step: 8,000 buckets a second.
const LOCKS_A_TICK: usize = 8;
/// Tallies looked at in one step, at least.
const TALLIES_A_TICK: usize = 4_096;

/// Keeps the figures up to date until `stopping`.
pub async fn keep(inner: Arc<Inner>, mut stopping: watch::Receiver<bool>) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut number, mut leader) = (0_u32, None);
    let (mut pool, mut overdrafts) = (PoolWalk::begin(), OverdraftWalk::default());
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = stopping.wait_for(|stop| *stop) => return,
        }
        let active = inner.core.active.load_full();
        pool.step(&inner, &active).await;
        overdrafts.step(&inner, &active);
        if number.is_multiple_of(TICKS_A_COUNT) {
            inner.store.count(&inner.core.metrics.store);
        }
        number = number.wrapping_add(1);
        let now = inner.raft.status().leader;
        if now.is_some() && now != leader {
            if leader.is_some() {
                inner.core.metrics.raft_leader_changes.inc();
            }
            if let Some(leader) = &now {
                tracing::info!(%leader, "a leader is known");
            }
            leader = now;
        }
    }
}

/// The hottest buckets, from what the meter has read.
pub fn show_hot(inner: &Inner, reading: &Reading) {
    let settled = inner.raft.pool().read().settled();
    let active = inner.core.active.load();
    inner.hot.gather(reading, &active, settled, clock::now(), &inner.core.metrics);
}

/// What Raft says of itself, shown as it is now.
pub fn show_raft(metrics: &Metrics, status: &RaftStatus) {
    let index = |index: Option<u64>| i64::try_from(index.unwrap_or(0)).unwrap_or(i64::MAX);
    let leads = status.role == Role::Leader;
    metrics.raft_term.set(index(Some(status.term)));
    metrics.raft_leader.set(i64::from(leads));
    metrics.raft_last.set(index(status.last_log));
    metrics.raft_committed.set(index(status.committed));
    metrics.raft_applied.set(index(status.applied));
    metrics.raft_snapshot.set(index(status.snapshot));
    metrics.raft_lag.set(index(status.committed).saturating_sub(index(status.applied)).max(0));
    let age = status.since_quorum_ack.filter(|_| leads);
    metrics.raft_quorum_age.set(age.map(|age| age.as_secs_f64()));
    let peer = |region: &RegionName| RegionLabel { peer: region.to_string() };
    let peers = || status.peers.iter();
    metrics.peers.set(peers().map(|p| (peer(&p.region), f64::from(u8::from(p.reachable)))).collect());
    metrics.peer_rtt.set(peers().filter_map(|p| Some((peer(&p.region), p.rtt?.as_secs_f64()))).collect());
    let last = status.last_log.unwrap_or(0);
    let behind = |matched: Option<u64>| last.saturating_sub(matched.unwrap_or(0)) as f64;
    let lags = peers().filter(|_| leads).map(|p| (peer(&p.region), behind(p.matched)));
    metrics.raft_follower_lag.set(lags.collect());
}

/// A walk through all buckets that have books.
#[derive(Debug)]
struct PoolWalk {
    began: Micros,
    /// When the last one that came to its end began.
    shown: Micros,
    after: Option<BucketId>,
    sums: BTreeMap<u32, Sums>,
}

/// The buckets of one policy.
#[derive(Clone, Debug, Default)]
struct Sums {
    buckets: u32,
    frozen: u32,
    level: f64,
    free: (f64, f64),
    /// By region.
    lent: Vec<(f64, f64)>,
    /// By region: what it lends of its reserve.
    on_loan: Vec<f64>,
    /// The most of any bucket, of its rate and of its burst.
    committed: (f64, f64),
}

impl PoolWalk {
    fn begin() -> Self {
        let began = clock::now();
        Self { began, shown: began, after: None, sums: BTreeMap::new() }
    }

    async fn step(&mut self, inner: &Inner, active: &Active) {
        for _ in 0..LOCKS_A_TICK {
            let ended = self.look(inner, active);
            if ended {
                self.shown = std::mem::replace(&mut self.began, clock::now());
                (self.after, self.sums) = (None, BTreeMap::new());
                break;
            }
            tokio::task::yield_now().await;
        }
        let age = (clock::now() - self.shown).or_zero();
        inner.core.metrics.pool.walk_age.set(age.to_duration().as_secs_f64());
    }

    /// Looks at the next buckets; shows what was found if these were the last.
    fn look(&mut self, inner: &Inner, active: &Active) -> bool {
        let pool = inner.raft.pool();
        let pool = pool.read();
        let (tau, settled) = (pool.tau(), pool.settled());
        let mut looked_at = 0;
        for (bucket, policy) in pool.buckets_after(self.after).take(BUCKETS_A_LOCK) {
            looked_at += 1;
            self.after = Some(bucket);
            let Some(books) = pool.books(policy, bucket, tau) else { continue };
            let over = self.sums.entry(policy).or_default().add(&books);
            if over && settled {
                inner.core.metrics.breached(Check::Committed);
                let policy = active.policy(policy).map_or("", |policy| &*policy.policy.name);
                tracing::error!(policy, %bucket, "regions may hold more of a bucket than its limit");
            }
        }
        let ended = looked_at < BUCKETS_A_LOCK;
        if ended {
            show(&self.sums, &pool, active, &inner.core.metrics);
        }
        ended
    }
}

impl Sums {
    /// Is more lent of the bucket than there is?
    fn add(&mut self, books: &Books) -> bool {
        self.buckets = self.buckets.saturating_add(1);
        self.frozen = self.frozen.saturating_add(u32::from(books.frozen));
        self.level += tokens(books.level);
        self.free.0 += per_second(books.free.0);
        self.free.1 += tokens(books.free.1);
        self.lent.resize(self.lent.len().max(books.lent.len()), (0.0, 0.0));
        self.on_loan.resize(self.on_loan.len().max(books.on_loan.len()), 0.0);
        for (sum, rate) in self.on_loan.iter_mut().zip(&books.on_loan) {
            *sum += per_second(*rate);
        }
        let mut committed = books.reserved;
        for (sum, (rate, burst)) in self.lent.iter_mut().zip(&books.lent) {
            sum.0 += per_second(*rate);
            sum.1 += tokens(*burst);
            committed = (committed.0 + *rate, committed.1 + *burst);
        }
        let parts = parts_of(committed, books.whole);
        self.committed = (self.committed.0.max(parts.0), self.committed.1.max(parts.1));
        committed.0 > books.whole.0 || committed.1 > books.whole.1
    }
}

fn show(sums: &BTreeMap<u32, Sums>, pool: &Pool, active: &Active, metrics: &Metrics) {
    let none = Sums::default();
    let (mut bound, mut bound_rate) = (Vec::new(), Vec::new());
    let (mut committed, mut frozen, mut buckets, mut level) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut bursts, mut rates) = (Vec::new(), Vec::new());
    for policy in active.policies() {
        let Some((rate, burst)) = policy.bound() else { continue };
        bound.push((label(policy), tokens(burst)));
        bound_rate.push((label(policy), per_second(rate)));
        let (Some(cut), Some(reserved)) = (pool.cut(policy.id), pool.reserved(policy.id)) else { continue };
        if !cut.pooled {
            continue;
        }
        let sums = sums.get(&policy.id).unwrap_or(&none);
        // A bucket that nobody has asked about has its reserves all the same.
        let at_least = parts_of(reserved, (cut.rate, cut.burst + cut.overshoot()));
        let of = |of| PolicyOf { policy: policy.policy.name.to_string(), of };
        committed.push((of("rate"), sums.committed.0.max(at_least.0)));
        committed.push((of("burst"), sums.committed.1.max(at_least.1)));
        frozen.push((label(policy), f64::from(sums.frozen)));
        buckets.push((label(policy), f64::from(sums.buckets)));
        level.push((label(policy), sums.level));
        for (part, holder, (rate, burst)) in parts(sums, cut, pool.regions()) {
            let policy = policy.policy.name.to_string();
            bursts.push((PolicyPart { policy: policy.clone(), part, holder: holder.clone() }, burst));
            rates.push((PolicyPart { policy, part, holder }, rate));
        }
    }
    let shown = &metrics.pool;
    shown.bound.set(bound);
    shown.bound_rate.set(bound_rate);
    shown.committed.set(committed);
    shown.frozen.set(frozen);
    shown.buckets.set(buckets);
    shown.level.set(level);
    shown.tokens.set(bursts);
    shown.rates.set(rates);
    metrics.policies_settled.set(i64::from(pool.settled()));
}

/// Whose the rates and bursts of a policy's buckets are.
fn parts(sums: &Sums, cut: &Cut, regions: &[RegionName]) -> Vec<(&'static str, String, (f64, f64))> {
    let mut parts = vec![("free", String::new(), sums.free)];
    for (index, region) in regions.iter().enumerate() {
        if let Some(part) = cut.parts.get(index) {
            let n = f64::from(sums.buckets);
            let on_loan = sums.on_loan.get(index).copied().unwrap_or_default();
            let reserve = (per_second(part.rate) * n - on_loan, tokens(part.cap()) * n);
            parts.push(("reserve", region.to_string(), reserve));
        }
        parts.push(("leased", region.to_string(), sums.lent.get(index).copied().unwrap_or_default()));
    }
    parts
}

/// A walk through this region's tallies.
#[derive(Debug, Default)]
struct OverdraftWalk {
    part: usize,
    most: BTreeMap<u32, Tokens>,
}

impl OverdraftWalk {
    fn step(&mut self, inner: &Inner, active: &Active) {
        let now = inner.store.now();
        let mut looked_at = 0;
        while looked_at < TALLIES_A_TICK {
            let Some(tallies) = inner.core.table.part(self.part) else {
                self.show(active, &inner.core.metrics);
                *self = Self::default();
                return;
            };
            self.part += 1;
            looked_at += tallies.len();
            for tally in tallies {
                let Some(policy) = active.policy(tally.policy) else { continue };
                let (level, at) = tally.level();
                let used = overdraft(policy, level, if at == Micros::ZERO { at } else { now - at });
                let most = self.most.entry(tally.policy).or_default();
                *most = (*most).max(used);
            }
        }
    }

    fn show(&self, active: &Active, metrics: &Metrics) {
        let approximate = || active.policies().filter(|policy| policy.part.overdraft.is_positive());
        let most = |policy: &ActivePolicy| self.most.get(&policy.id).copied().unwrap_or_default();
        metrics.pool.overdraft.set(approximate().map(|p| (label(p), tokens(most(p)))).collect());
        let bounds = approximate().map(|p| (label(p), tokens(p.part.overdraft)));
        metrics.pool.overdraft_bound.set(bounds.collect());
    }
}

/// How far below zero a bucket is that was at `level` so long ago. (Levels are kept above the overdraft's floor.)
fn overdraft(policy: &ActivePolicy, level: Tokens, ago: Micros) -> Tokens {
    let mut level = Level::new(level);
    level.accrue(policy.shape.rate, ago, Tokens::MAX);
    (policy.part.overdraft - level.tokens).or_zero()
}

fn label(policy: &ActivePolicy) -> PolicyLabel {
    PolicyLabel { policy: policy.policy.name.to_string() }
}

fn parts_of(part: (Rate, Tokens), whole: (Rate, Tokens)) -> (f64, f64) {
    let of = |part: i64, whole: i64| if whole > 0 { part as f64 / whole as f64 } else { 0.0 };
    (of(part.0.0, whole.0.0), of(part.1.0, whole.1.0))
}

fn tokens(tokens: Tokens) -> f64 {
    tokens.0 as f64 / 1e6
}

fn per_second(rate: Rate) -> f64 {
    rate.0 as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    fn books(lent: i64) -> Books {
        let amounts = |n: i64| (Rate::per_second(n), Tokens::whole(10 * n));
        Books {
            whole: amounts(100),
            reserved: amounts(10),
            on_loan: Vec::new(),
            lent: vec![amounts(lent), amounts(20)],
            free: amounts(70 - lent),
            level: Tokens::whole(5),
            frozen: lent > 70,
        }
    }

    #[test]
    fn what_is_committed_is_counted_apart_from_what_is_free() {
        let mut sums = Sums::default();
        assert!(!sums.add(&books(0)));
        assert!(!sums.add(&books(70)), "all of it is not too much");
        assert_eq!(sums.committed, (1.0, 1.0));
        assert!(sums.add(&books(71)));
        assert!(sums.committed.0 > 1.0 && sums.committed.1 > 1.0);
        assert_eq!((sums.buckets, sums.frozen, sums.level), (3, 1, 15.0));
        assert_eq!(sums.lent, [(141.0, 1_410.0), (60.0, 600.0)]);
    }

    #[test]
    fn nothing_of_nothing_is_nothing() {
        assert_eq!(parts_of((Rate::ZERO, Tokens::ZERO), (Rate::ZERO, Tokens::ZERO)), (0.0, 0.0));
    }
}
