//! The hottest buckets, named: at most so many series, however many buckets there are, and ones that stay.
//!
//! The meter ([`crate::limiter::meter`]) finds them; what is kept here is which of them are shown, and what each was given since it
//! was found.

use crate::limiter::active::Active;
use crate::limiter::meter::{BucketReading, Reading};
use crate::quota::amount::{Level, Micros, Tokens};
use crate::quota::policy::BucketId;
use crate::telemetry::Metrics;
use crate::telemetry::metrics::{BucketResult, Check};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Buckets that are shown.
const SHOWN: usize = 20;
/// Buckets that are remembered.
const REMEMBERED: usize = 256;
/// An admission may be counted this long after the store has decided on it.
const COUNTED_WITHIN: Micros = Micros::seconds(2);

/// See above.
#[derive(Debug, Default)]
pub struct Hot(Mutex<Ranking>);

#[derive(Debug, Default)]
struct Ranking {
    /// By policy and bucket.
    known: HashMap<(u32, BucketId), Ranked>,
    version: u64,
    at: Micros,
}

#[derive(Debug, Default)]
struct Ranked {
    /// Micro-tokens that were asked for; old ones fade.
    weight: u64,
    shown: bool,
    admitted: Tokens,
    denied: Tokens,
    /// What it may still admit, had this region the whole limit; see [`Hot::gather`].
    left: Option<Level>,
}

impl Hot {
    /// Takes a reading, shows the hottest buckets, and holds what each of them was given against the whole limit of its policy:
    /// more than that nobody may admit, this region alone least of all. `settled`: no change of policies is under way (while one
    /// is, there are two limits). What was let through because the store was away is not the limit's.
    pub fn gather(&self, reading: &Reading, active: &Active, settled: bool, now: Micros, metrics: &Metrics) {
        let mut ranking = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = (now - ranking.at).or_zero();
        ranking.at = now;
        let steady = settled && ranking.version == active.version;
        ranking.version = active.version;
        ranking.fade();
        for bucket in &reading.buckets {
            ranking.add(bucket);
        }
        let news: HashMap<_, _> = reading.buckets.iter().map(|b| ((b.policy, b.bucket), b)).collect();
        for (key, ranked) in &mut ranking.known {
            let net = |b: &&BucketReading| b.admitted - b.unchecked - b.given_back;
            let admitted = news.get(key).map_or(Tokens::ZERO, net);
            if !ranked.holds(active, key.0, admitted, passed, steady) {
                metrics.breached(Check::Admitted);
                let (policy, bucket) =
                    (active.policy(key.0).map_or("", |policy| &*policy.policy.name), key.1);
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

    fn add(&mut self, bucket: &BucketReading) {
        let asked = u64::try_from((bucket.admitted + bucket.denied).0).unwrap_or(0);
        if asked == 0 && !self.known.contains_key(&(bucket.policy, bucket.bucket)) {
            return;
        }
        let ranked = self.known.entry((bucket.policy, bucket.bucket)).or_default();
        ranked.weight = ranked.weight.saturating_add(asked);
        ranked.admitted += bucket.admitted - bucket.unchecked;
        ranked.denied += bucket.denied;
    }

    /// Which are shown: who is stays, until another has twice its weight or it has none; a series that comes and goes tells nobody
    /// anything.
    fn choose(&mut self) {
        self.known.retain(|_, ranked| ranked.weight > 0);
        let rank = |r: &Ranked| if r.shown { r.weight.saturating_mul(2) } else { r.weight };
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
        let mut values = Vec::new();
        for ((policy, bucket), ranked) in self.known.iter().filter(|(_, ranked)| ranked.shown) {
            let Some(policy) = active.policy(*policy) else { continue };
            for (result, count) in [("admitted", ranked.admitted), ("denied", ranked.denied)] {
                let policy = policy.policy.name.to_string();
                values.push((
                    BucketResult { policy, bucket: bucket.to_string(), result },
                    count.0 as f64 / 1e6,
                ));
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
        let bound =
            active.policy(policy).filter(|policy| policy.count.is_none()).and_then(|policy| policy.bound());
        let Some((rate, burst)) = bound.filter(|_| steady) else {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::active::ActivePolicy;
    use crate::limiter::meter::{Answered, Meter};
    use crate::quota::policy::{Limit, Mode, OnStoreFailure, Part, Policy, Reserve, TokenBucket, Unit};
    use std::collections::BTreeMap;
    use std::sync::Arc;

    fn bucket(n: u32) -> BucketId {
        BucketId(*blake3::hash(&n.to_le_bytes()).as_bytes().first_chunk().unwrap())
    }

    fn ask(meter: &Meter, n: u32, cost: i64, fits: bool) {
        let cost = Tokens::whole(cost);
        let (bucket, admitted) = (bucket(n), fits);
        let answered = Answered { policy: 1, bucket, cost, fits, admitted, checked: true, remaining: 0 };
        meter.count(&answered, std::iter::empty());
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
        let (hot, active, meter) = (Hot::default(), active(&metrics), Meter::default());
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
                ask(&meter, n, 1, false);
            }
            hot.gather(&meter.read(), &active, true, Micros::seconds(second), &metrics);
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
        let (hot, active, meter) = (Hot::default(), active(&metrics), Meter::default());
        let round = |second: i64, from: u32, cost: i64| {
            (from..from + 20).for_each(|n| ask(&meter, n, cost, false));
            hot.gather(&meter.read(), &active, true, Micros::seconds(second), &metrics);
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
        let (hot, active, meter) = (Hot::default(), active(&metrics), Meter::default());
        for second in 1..=60 {
            // The burst at once, then the rate; and tokens that were given back and taken again.
            ask(&meter, 7, if second == 1 { 100 } else { 10 }, true);
            ask(&meter, 7, -5, true);
            ask(&meter, 7, 5, true);
            ask(&meter, 7, 1_000, false);
            hot.gather(&meter.read(), &active, true, Micros::seconds(second), &metrics);
        }
        assert!(!breaches(&metrics), "{}", metrics.encode().unwrap());
        for second in 61..=70 {
            ask(&meter, 7, 14, true);
            hot.gather(&meter.read(), &active, second != 66, Micros::seconds(second), &metrics);
        }
        assert!(!breaches(&metrics), "within what may be counted late, or while policies change");
        for second in 71..=80 {
            ask(&meter, 7, 14, true);
            hot.gather(&meter.read(), &active, true, Micros::seconds(second), &metrics);
        }
        assert!(!breaches(&metrics), "the burst is full again after the change: 100 + 20 + 10 x 10 > 140");
        for second in 81..=120 {
            ask(&meter, 7, 14, true);
            hot.gather(&meter.read(), &active, true, Micros::seconds(second), &metrics);
        }
        assert!(breaches(&metrics));
    }

    #[test]
    fn what_was_let_through_without_the_store_is_not_the_limits() {
        let metrics = Metrics::new("r");
        let (hot, active, meter) = (Hot::default(), active(&metrics), Meter::default());
        for second in 1..=20 {
            ask(&meter, 7, 1, true);
            let (cost, bucket) = (Tokens::whole(500), bucket(7));
            let open = Answered {
                policy: 1,
                bucket,
                cost,
                fits: true,
                admitted: true,
                checked: false,
                remaining: 0,
            };
            meter.count(&open, std::iter::empty());
            hot.gather(&meter.read(), &active, true, Micros::seconds(second), &metrics);
        }
        assert!(!breaches(&metrics));
        let line = shown(&metrics).into_iter().find(|line| line.contains("admitted")).unwrap();
        assert!(line.ends_with(" 20.0"), "{line}");
    }
}
