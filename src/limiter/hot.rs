//! The hottest buckets: a few names for what is busy, however many buckets there are.
//!
//! Each worker thread counts in a sketch of its own, of fixed size: eight places for each of 64 classes of buckets. A bucket
//! that finds its class full wears the weakest of the eight down, and takes its place when nothing is left of it (Misra and
//! Gries, "Finding repeated elements", 1982): so the few that have most of the demand stay, and what is seen once hardly gets in.
//! Once a second all sketches are put together; what was counted since a bucket came in is exact.

use super::active::Active;
use crate::quota::amount::{Level, Micros, Tokens};
use crate::quota::policy::BucketId;
use crate::telemetry::Metrics;
use crate::telemetry::metrics::{BucketResult, Check};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Buckets that are shown.
pub const SHOWN: usize = 20;
/// Buckets that are remembered when sketches are put together.
const REMEMBERED: usize = 256;
const CLASSES: usize = 64;
const PLACES: usize = 8;
/// A bucket of a limit that came with its descriptor; as a policy's id.
const OWN: u32 = u32::MAX;
/// An admission may be counted this long after the store has decided on it.
const COUNTED_WITHIN: Micros = Micros::seconds(2);

/// What one request asked of one bucket.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The policy's id in the pool; `None`: the limit came with the descriptor.
    pub policy: Option<u32>,
    /// The bucket.
    pub bucket: BucketId,
    /// The cost; below zero, it was given back.
    pub cost: Tokens,
    /// It was taken (or given back).
    pub admitted: bool,
}

/// One worker's counts.
#[derive(Debug)]
pub struct Sketch(Mutex<Vec<Place>>);

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    policy: u32,
    bucket: BucketId,
    weight: u64,
    counts: Counts,
}

/// Micro-tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    admitted: u64,
    denied: u64,
    given_back: u64,
}

impl Sketch {
    fn new() -> Self {
        Self(Mutex::new(vec![Place::default(); CLASSES * PLACES]))
    }

    /// Counts. The lock is this worker's own; [`Hot`] takes it for some microseconds, once a second.
    pub fn count(&self, asked: Asked) {
        let mut places = lock(&self.0);
        let cost = asked.cost.0.unsigned_abs();
        let policy = asked.policy.unwrap_or(OWN);
        let class = usize::from(asked.bucket.0.last().copied().unwrap_or(0)) % CLASSES;
        let Some(class) = places.get_mut(class * PLACES..(class + 1) * PLACES) else { return };
        let same = |p: &&mut Place| p.weight > 0 && p.bucket == asked.bucket && p.policy == policy;
        if let Some(place) = class.iter_mut().find(same) {
            place.weight = place.weight.saturating_add(cost);
            place.counts.add(asked, cost);
            return;
        }
        let Some(weakest) = class.iter_mut().min_by_key(|place| place.weight) else { return };
        if weakest.weight >= cost.max(1) {
            weakest.weight -= cost;
            return;
        }
        let counts = Counts::default();
        *weakest = Place { policy, bucket: asked.bucket, weight: cost.max(1), counts };
        weakest.counts.add(asked, cost);
    }

    /// Takes the counts; old weight fades.
    fn take(&self) -> Vec<Place> {
        let mut places = lock(&self.0);
        let taken =
            places.iter().filter(|p| p.weight > 0 && p.counts != Counts::default()).copied().collect();
        for place in places.iter_mut() {
            place.weight -= place.weight.div_ceil(8);
            place.counts = Counts::default();
        }
        taken
    }
}

impl Counts {
    fn add(&mut self, asked: Asked, cost: u64) {
        let count = match (asked.admitted, asked.cost < Tokens::ZERO) {
            (true, false) => &mut self.admitted,
            (true, true) => &mut self.given_back,
            (false, _) => &mut self.denied,
        };
        *count = count.saturating_add(cost);
    }
}

/// All sketches of a daemon, and what came of them.
#[derive(Debug, Default)]
pub struct Hot {
    sketches: Mutex<Vec<Weak<Sketch>>>,
    ranking: Mutex<Ranking>,
}

#[derive(Debug, Default)]
struct Ranking {
    known: HashMap<(u32, BucketId), Ranked>,
    version: u64,
    at: Micros,
}

#[derive(Debug, Default)]
struct Ranked {
    weight: u64,
    shown: bool,
    total: Counts,
    /// What it may still admit, had this region the whole limit; see [`Hot::gather`].
    left: Option<Level>,
}

impl Hot {
    /// A sketch for one worker; it counts for as long as the worker has it.
    pub fn sketch(&self) -> Arc<Sketch> {
        let sketch = Arc::new(Sketch::new());
        let mut sketches = lock(&self.sketches);
        sketches.retain(|sketch| sketch.strong_count() > 0);
        sketches.push(Arc::downgrade(&sketch));
        sketch
    }

    /// Puts the sketches together, shows the hottest buckets, and holds what each of them was given against the whole limit
    /// of its policy: more than that nobody may admit, this region alone least of all. `settled`: no change of policies is
    /// under way (while one is, there are two limits).
    pub fn gather(&self, active: &Active, settled: bool, now: Micros, metrics: &Metrics) {
        let sketches: Vec<_> = lock(&self.sketches).iter().filter_map(Weak::upgrade).collect();
        let mut ranking = lock(&self.ranking);
        let passed = (now - ranking.at).or_zero();
        ranking.at = now;
        let steady = settled && ranking.version == active.version;
        ranking.version = active.version;
        ranking.fade();
        let mut news: HashMap<(u32, BucketId), Counts> = HashMap::new();
        for place in sketches.iter().flat_map(|sketch| sketch.take()) {
            let sum = news.entry((place.policy, place.bucket)).or_default();
            sum.admitted = sum.admitted.saturating_add(place.counts.admitted);
            sum.denied = sum.denied.saturating_add(place.counts.denied);
            sum.given_back = sum.given_back.saturating_add(place.counts.given_back);
        }
        for (key, counts) in &news {
            ranking.add(*key, counts);
        }
        for ((policy, bucket), ranked) in &mut ranking.known {
            let admitted = news.get(&(*policy, *bucket)).map_or(Tokens::ZERO, net);
            if !ranked.holds(active, *policy, admitted, passed, steady) {
                metrics.breached(Check::Admitted);
                let policy = active.policy(*policy).map_or("", |policy| &*policy.policy.name);
                tracing::error!(policy, %bucket, "this region has admitted more of a bucket than the whole limit allows");
            }
        }
        ranking.choose();
        metrics.hot.set(ranking.shown(active));
    }
}

impl Ranking {
    fn fade(&mut self) {
        for ranked in self.known.values_mut() {
            ranked.weight -= ranked.weight.div_ceil(8);
        }
    }

    fn add(&mut self, key: (u32, BucketId), counts: &Counts) {
        let ranked = self.known.entry(key).or_default();
        let asked = counts.admitted.saturating_add(counts.denied);
        ranked.weight = ranked.weight.saturating_add(asked);
        ranked.total.admitted = ranked.total.admitted.saturating_add(counts.admitted);
        ranked.total.denied = ranked.total.denied.saturating_add(counts.denied);
    }

    /// Which are shown: who is stays, until another has twice its weight or it has none; a series that comes and goes tells nobody
    /// anything.
    fn choose(&mut self) {
        self.known.retain(|_, ranked| ranked.weight > 0);
        let rank =
            |ranked: &Ranked| if ranked.shown { ranked.weight.saturating_mul(2) } else { ranked.weight };
        let mut order: Vec<_> = self.known.iter().map(|(key, ranked)| (rank(ranked), *key)).collect();
        order.sort_unstable_by(|a, b| b.cmp(a));
        for (_, key) in order.iter().skip(REMEMBERED) {
            self.known.remove(key);
        }
        for (place, (_, key)) in order.iter().take(REMEMBERED).enumerate() {
            if let Some(ranked) = self.known.get_mut(key) {
                ranked.shown = place < SHOWN;
            }
        }
    }

    fn shown(&self, active: &Active) -> Vec<(BucketResult, f64)> {
        let shown = self.known.iter().filter(|(_, ranked)| ranked.shown);
        let mut values = Vec::new();
        for ((policy, bucket), ranked) in shown {
            let policy = match active.policy(*policy) {
                Some(policy) => policy,
                None if *policy == OWN => &active.overrides,
                None => continue,
            };
            for (result, count) in [("admitted", ranked.total.admitted), ("denied", ranked.total.denied)] {
                let policy = policy.policy.name.to_string();
                values
                    .push((BucketResult { policy, bucket: bucket.to_string(), result }, count as f64 / 1e6));
            }
        }
        values
    }
}

impl Ranked {
    /// Was no more admitted than the whole limit allows since the last look (and before it)?
    fn holds(
        &mut self,
        active: &Active,
        policy: u32,
        admitted: Tokens,
        passed: Micros,
        steady: bool,
    ) -> bool {
        let Some((rate, burst)) = active.policy(policy).and_then(|policy| policy.bound()).filter(|_| steady)
        else {
            self.left = None;
            return true;
        };
        // Some of it may have been decided on before the last look.
        let burst = burst + rate.during(COUNTED_WITHIN);
        let left = self.left.get_or_insert(Level::new(burst));
        left.accrue(rate, passed, burst);
        left.tokens -= admitted;
        left.clip(burst);
        let holds = left.tokens >= Tokens::ZERO;
        if !holds {
            // It has been said; the next time counts anew.
            self.left = None;
        }
        holds
    }
}

/// What was admitted and not given back.
fn net(counts: &Counts) -> Tokens {
    let tokens = |count: u64| Tokens(i64::try_from(count).unwrap_or(i64::MAX));
    tokens(counts.admitted) - tokens(counts.given_back)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::active::ActivePolicy;
    use crate::quota::policy::{Limit, Mode, OnStoreFailure, Part, Policy, Reserve, TokenBucket, Unit};
    use std::collections::BTreeMap;

    fn bucket(n: u32) -> BucketId {
        BucketId(*blake3::hash(&n.to_le_bytes()).as_bytes().first_chunk().unwrap())
    }

    fn asked(n: u32, cost: i64, admitted: bool) -> Asked {
        Asked { policy: Some(1), bucket: bucket(n), cost: Tokens::whole(cost), admitted }
    }

    /// One policy: 10 a second, burst 100.
    fn active(metrics: &Metrics) -> Active {
        let policy = Policy {
            name: "p".into(),
            domain: "d".into(),
            matches: Vec::new(),
            limit: Limit::TokenBucket(TokenBucket { amount: 10, per: Unit::Second, burst: 100 }),
            mode: Mode::Strict,
            reserve: Reserve::default(),
            weights: BTreeMap::new(),
            wait: Micros::ZERO,
            on_store_failure: OnStoreFailure::Deny,
            shadow: false,
        };
        let cut = policy.cut(&["r".into()]);
        let policy = ActivePolicy::new(1, Arc::new(policy), cut.as_ref(), Part::default(), None, metrics);
        Active::new(1, vec![policy], true, metrics)
    }

    fn shown(metrics: &Metrics) -> Vec<String> {
        let text = metrics.encode().unwrap();
        text.lines()
            .filter(|line| line.starts_with("quorate_hot_bucket_tokens_total{"))
            .map(str::to_owned)
            .collect()
    }

    fn breaches(metrics: &Metrics) -> bool {
        !metrics.encode().unwrap().contains("check=\"admitted\"} 0")
    }

    #[test]
    fn the_busiest_are_found_among_a_million_and_their_number_is_bounded() {
        let metrics = Metrics::new("r");
        let (hot, active) = (Hot::default(), active(&metrics));
        let sketches = [hot.sketch(), hot.sketch()];
        let mut noise = 1_000;
        for second in 1..=5 {
            for i in 0..20_000_u32 {
                // Ten buckets have a third of the demand, the others are seen once.
                let n = if i.is_multiple_of(3) {
                    i / 3 % 10
                } else {
                    noise += 1;
                    noise
                };
                sketches[usize::try_from(i % 2).unwrap()].count(asked(n, 1, false));
            }
            hot.gather(&active, true, Micros::seconds(second), &metrics);
        }
        let lines = shown(&metrics);
        assert!(lines.len() <= 2 * SHOWN, "{}", lines.len());
        for n in 0..10 {
            let line = lines.iter().find(|l| l.contains(&bucket(n).to_string()) && l.contains("denied"));
            let line = line.unwrap_or_else(|| panic!("{n} is not among {lines:#?}"));
            let count: f64 = line.rsplit_once(' ').unwrap().1.parse().unwrap();
            // 667 a second; what came before it had a place is not counted.
            assert!((3_000.0..=3_340.0).contains(&count), "{line}");
        }
    }

    #[test]
    fn who_is_shown_stays_for_a_while() {
        let metrics = Metrics::new("r");
        let (hot, active) = (Hot::default(), active(&metrics));
        let sketch = hot.sketch();
        let round = |second: i64, from: u32, cost: i64| {
            (from..from + 20).for_each(|n| sketch.count(asked(n, cost, false)));
            hot.gather(&active, true, Micros::seconds(second), &metrics);
        };
        round(1, 0, 100);
        let before = shown(&metrics);
        round(2, 100, 110);
        assert_eq!(before.len(), shown(&metrics).len());
        let stays = |n: u32| shown(&metrics).iter().any(|l| l.contains(&bucket(n).to_string()));
        assert!((0..20).all(stays), "a little more is no reason to change");
        for second in 3..60 {
            round(second, 100, 110);
        }
        assert!((100..120).all(stays) && !stays(0), "what is over goes");
    }

    #[test]
    fn more_than_the_whole_limit_is_a_breach_and_just_that_much_is_none() {
        let metrics = Metrics::new("r");
        let (hot, active) = (Hot::default(), active(&metrics));
        let sketch = hot.sketch();
        for second in 1..=60 {
            // The burst at once, then the rate; and tokens that were given back and taken again.
            sketch.count(asked(7, if second == 1 { 100 } else { 10 }, true));
            sketch.count(asked(7, -5, true));
            sketch.count(asked(7, 5, true));
            sketch.count(asked(7, 1_000, false));
            hot.gather(&active, true, Micros::seconds(second), &metrics);
        }
        assert!(!breaches(&metrics), "{}", metrics.encode().unwrap());
        for second in 61..=70 {
            sketch.count(asked(7, 14, true));
            hot.gather(&active, second != 66, Micros::seconds(second), &metrics);
        }
        assert!(!breaches(&metrics), "within what may be counted late, or while policies change");
        for second in 71..=80 {
            sketch.count(asked(7, 14, true));
            hot.gather(&active, true, Micros::seconds(second), &metrics);
        }
        assert!(!breaches(&metrics), "the burst is full again after the change: 100 + 20 + 10 x 10 > 140");
        for second in 81..=120 {
            sketch.count(asked(7, 14, true));
            hot.gather(&active, true, Micros::seconds(second), &metrics);
        }
        assert!(breaches(&metrics));
    }
}
