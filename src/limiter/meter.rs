//! What passes and what is refused, in tokens: by policy, and by bucket for those with most demand.
//!
//! Buckets are as many as callers like, so only the busiest are followed, as in the *Frequent* algorithm (Misra and Gries,
//! 1982): a bucket that is not followed wears down the least busy one of those that are, and takes its place once that one
//! is worn out. What is followed is counted exactly from then on. Memory and the time for a count are bounded.

use crate::quota::amount::{Micros, Tokens};
use crate::quota::policy::BucketId;
use crate::quota::redaction::Redaction;
use crate::store::names::{BucketMap, PolicyMap};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most buckets that are followed.
pub const FOLLOWED_MAX: usize = SHARDS * SHARD_MAX;
/// A bucket without demand for so many readings is followed no more.
const IDLE_READINGS: u32 = 60;
/// The most bytes of a bucket's description.
pub const WHAT_BYTES_MAX: usize = 128;
/// The most bytes of one value in it.
const VALUE_BYTES_MAX: usize = 64;
const SHARDS: usize = 16;
const SHARD_MAX: usize = 32;

/// Counts what the limits of a daemon answered. All threads share it.
#[derive(Debug)]
pub struct Meter {
    shards: Vec<Mutex<Shard>>,
    /// Keys whose values are shown only as a hash, and the hash's key.
    redaction: Redaction,
}

/// One answer.
#[derive(Clone, Copy, Debug)]
pub struct Answered {
    /// The policy's id in the pool.
    pub policy: u32,
    /// Which bucket.
    pub bucket: BucketId,
    /// What it cost. What only asks is not counted; less than 0: it gave back.
    pub cost: Tokens,
    /// The limit let it through (a shadow policy: would have).
    pub fits: bool,
    /// The whole request was let through: only then was anything taken.
    pub admitted: bool,
    /// The store has looked; it was not let through because the store is away.
    pub checked: bool,
    /// Whole tokens that are left, as the caller was told.
    pub remaining: u64,
}

/// One of the keys that chose a bucket, and its value.
#[derive(Clone, Copy, Debug)]
pub struct Chosen<'e> {
    /// The key.
    pub key: &'e str,
    /// The value, or what all values of the bucket begin with ...
    pub value: &'e str,
    /// ... if they share it.
    pub shared: bool,
}

#[derive(Debug, Default)]
struct Shard {
    policies: PolicyMap<Counts>,
    buckets: BucketMap<Followed>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    admitted: Tokens,
    denied: Tokens,
    /// Of what was admitted: without the store.
    unchecked: Tokens,
    given_back: Tokens,
    fallbacks: u64,
}

#[derive(Debug)]
struct Followed {
    policy: u32,
    what: Box<str>,
    weight: u64,
    counts: Counts,
    remaining: u64,
    idle: u32,
    total: Counts,
}

/// What was counted since the last reading.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// By the policy's id.
    pub policies: HashMap<u32, PolicyReading>,
    /// The buckets that are followed, the busiest first.
    pub buckets: Vec<BucketReading>,
}

/// One policy since the last reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyReading {
    /// Tokens let through.
    pub admitted: Tokens,
    /// Tokens refused.
    pub denied: Tokens,
    /// Requests that the store gave no answer for, and that went by `on_store_failure`.
    pub fallbacks: u64,
}

/// One bucket since the last reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketReading {
    /// Which.
    pub bucket: BucketId,
    /// Its policy's id.
    pub policy: u32,
    /// What it is for: `tenant=42`.
    pub what: Box<str>,
    /// Tokens let through.
    pub admitted: Tokens,
    /// Tokens refused.
    pub denied: Tokens,
    /// Of those let through: because the store gave no answer.
    pub unchecked: Tokens,
    /// Tokens given back.
    pub given_back: Tokens,
    /// All of both since it is followed.
    pub total: Tokens,
    /// Whole tokens that were left, as the last caller was told.
    pub remaining: u64,
    /// Readings since the last request.
    pub idle: u32,
}

impl Default for Meter {
    fn default() -> Self {
        Self::new(Redaction::default())
    }
}

impl Meter {
    /// One that shows values as this redaction has them.
    #[must_use]
    pub fn new(redaction: Redaction) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { shards, redaction }
    }

    /// Counts an answer. `entries` are the keys and values that chose the bucket; they are looked at when it is followed from
    /// now on.
    pub fn count<'e>(&self, answered: &Answered, entries: impl Iterator<Item = Chosen<'e>>) {
        let Answered { policy, bucket, cost, fits, admitted, checked, remaining } = *answered;
        if cost == Tokens::ZERO {
            return;
        }
        let mut shard = self.shard(&bucket);
        if cost < Tokens::ZERO {
            if let Some(followed) = shard.buckets.get_mut(&bucket).filter(|f| f.policy == policy && admitted)
            {
                followed.counts.given_back -= cost;
            }
            return;
        }
        let add = |counts: &mut Counts| match (fits, admitted) {
            (true, true) => {
                counts.admitted += cost;
                counts.unchecked += if checked { Tokens::ZERO } else { cost };
            }
            (false, _) => counts.denied += cost,
            // Another limit refused it: nothing was taken here.
            (true, false) => {}
        };
        add(shard.policies.entry(policy).or_default());
        if let Some(followed) = shard.follow(bucket, policy, || self.describe(entries)) {
            add(&mut followed.counts);
            (followed.remaining, followed.idle) = (remaining, 0);
        }
    }

    /// The store gave no answer: a request went by the policy's `on_store_failure`.
    pub fn fell_back(&self, policy: u32, bucket: &BucketId) {
        let mut shard = self.shard(bucket);
        let counts = shard.policies.entry(policy).or_default();
        counts.fallbacks = counts.fallbacks.saturating_add(1);
    }

    /// What was counted since the last call. To be called about once a second: what was busy once fades by these calls.
    #[must_use]
    pub fn read(&self) -> Reading {
        let mut reading = Reading::default();
        for shard in &self.shards {
            lock(shard).read(&mut reading);
        }
        let busy = |b: &BucketReading| (std::cmp::Reverse(b.admitted + b.denied), b.idle, b.bucket);
        reading.buckets.sort_unstable_by_key(busy);
        reading
    }

    /// `key=value, key=value`; long values are cut, redacted ones hashed.
    fn describe<'e>(&self, entries: impl Iterator<Item = Chosen<'e>>) -> Box<str> {
        let mut what = String::new();
        for Chosen { key, value, shared } in entries {
            if !what.is_empty() {
                what.push_str(", ");
            }
            what.push_str(cut(key, VALUE_BYTES_MAX));
            what.push('=');
            if shared {
                push_cut(&mut what, value, VALUE_BYTES_MAX);
                what.push('*');
            } else {
                push_cut(&mut what, &self.redaction.shown(key, value), VALUE_BYTES_MAX);
            }
            if what.len() > WHAT_BYTES_MAX {
                let whole = what;
                what = cut(&whole, WHAT_BYTES_MAX).to_owned();
                what.push('…');
                break;
            }
        }
        what.into()
    }

    fn shard(&self, bucket: &BucketId) -> MutexGuard<'_, Shard> {
        let at = usize::from(bucket.0.first().copied().unwrap_or(0)) % SHARDS;
        lock(self.shards.get(at).unwrap_or(&self.shards[0]))
    }
}

impl Shard {
    fn follow(
        &mut self,
        bucket: BucketId,
        policy: u32,
        what: impl FnOnce() -> Box<str>,
    ) -> Option<&mut Followed> {
        let known = self.buckets.get(&bucket).is_some_and(|followed| followed.policy == policy);
        if !known {
            self.buckets.remove(&bucket);
            if self.buckets.len() >= SHARD_MAX {
                let (least, followed) = self.buckets.iter_mut().min_by_key(|(id, f)| (f.weight, **id))?;
                if followed.weight > 0 {
                    followed.weight -= 1;
                    return None;
                }
                let least = *least;
                self.buckets.remove(&least);
            }
            let (counts, total) = Default::default();
            let new = Followed { policy, what: what(), weight: 0, counts, remaining: 0, idle: 0, total };
            self.buckets.insert(bucket, new);
        }
        let followed = self.buckets.get_mut(&bucket)?;
        followed.weight = followed.weight.saturating_add(1);
        Some(followed)
    }

    fn read(&mut self, reading: &mut Reading) {
        for (policy, counts) in &mut self.policies {
            let counts = std::mem::take(counts);
            let policy = reading.policies.entry(*policy).or_default();
            policy.admitted += counts.admitted;
            policy.denied += counts.denied;
            policy.fallbacks = policy.fallbacks.saturating_add(counts.fallbacks);
        }
        // Policies come and go: those without traffic are not kept.
        self.policies.retain(|policy, _| reading.policies.get(policy).is_some_and(PolicyReading::is_busy));
        self.buckets.retain(|bucket, followed| {
            let counts = std::mem::take(&mut followed.counts);
            followed.total.admitted += counts.admitted;
            followed.total.denied += counts.denied;
            // Half of it is gone after five or so readings.
            followed.weight -= followed.weight.div_ceil(8);
            let idle = followed.idle;
            followed.idle = idle.saturating_add(1);
            reading.buckets.push(BucketReading {
                bucket: *bucket,
                policy: followed.policy,
                what: followed.what.clone(),
                admitted: counts.admitted,
                denied: counts.denied,
                unchecked: counts.unchecked,
                given_back: counts.given_back,
                total: followed.total.admitted + followed.total.denied,
                remaining: followed.remaining,
                idle,
            });
            idle < IDLE_READINGS
        });
    }
}

impl PolicyReading {
    fn is_busy(&self) -> bool {
        *self != Self::default()
    }
}

/// An amount over a time as an amount a second.
#[must_use]
pub fn per_second(amount: Tokens, time: Micros) -> Tokens {
    amount.mul_div(crate::quota::amount::MICROS_PER_SECOND, time.0.max(1))
}

fn push_cut(what: &mut String, value: &str, most: usize) {
    let short = cut(value, most);
    what.push_str(short);
    if short.len() < value.len() {
        what.push('…');
    }
}

/// The start of a text, at most so many bytes.
fn cut(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.split_at(end).0
}

/// A lock that a panic elsewhere does not take away: what it guards is advisory.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> BucketId {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&n.to_le_bytes());
        BucketId(id)
    }

    fn chosen<'e>(entries: &'e [(&'e str, &'e str)]) -> impl Iterator<Item = Chosen<'e>> {
        entries.iter().map(|(key, value)| Chosen { key, value, shared: false })
    }

    fn ask(meter: &Meter, n: u32, cost: i64, fits: bool, admitted: bool) {
        let answered = Answered {
            policy: 1,
            bucket: id(n),
            cost: Tokens::whole(cost),
            fits,
            admitted,
            checked: true,
            remaining: 7,
        };
        let value = n.to_string();
        meter.count(&answered, chosen(&[("tenant", &value)]));
    }

    #[test]
    fn what_was_taken_is_admitted_and_what_did_not_fit_is_denied() {
        let meter = Meter::default();
        ask(&meter, 1, 3, true, true);
        ask(&meter, 1, 2, false, false);
        ask(&meter, 1, 5, true, false); // another limit refused it
        ask(&meter, 1, 0, true, true);
        ask(&meter, 1, -4, true, true);
        let reading = meter.read();
        let policy = reading.policies[&1];
        assert_eq!((policy.admitted, policy.denied), (Tokens::whole(3), Tokens::whole(2)));
        let bucket = &reading.buckets[0];
        assert_eq!((bucket.given_back, bucket.unchecked), (Tokens::whole(4), Tokens::ZERO));
        assert_eq!((&*bucket.what, bucket.remaining), ("tenant=1", 7));
        assert_eq!((bucket.admitted, bucket.denied), (Tokens::whole(3), Tokens::whole(2)));
        let next = meter.read();
        assert_eq!((next.buckets[0].admitted, next.buckets[0].total), (Tokens::ZERO, Tokens::whole(5)));
        assert!(!next.policies.contains_key(&1) || next.policies[&1] == PolicyReading::default());
    }

    #[test]
    fn the_busiest_are_followed_exactly_through_a_flood_of_others() {
        let meter = Meter::default();
        for round in 0..20_u32 {
            for n in 0..5_000 {
                ask(&meter, 1_000 + round * 5_000 + n, 1, true, true);
                if n % 5 == 0 {
                    ask(&meter, 1, 1, true, true);
                }
            }
            let reading = meter.read();
            assert!(reading.buckets.len() <= FOLLOWED_MAX);
            assert_eq!(
                (reading.buckets[0].bucket, reading.buckets[0].admitted),
                (id(1), Tokens::whole(1_000))
            );
            assert_eq!(reading.policies[&1].admitted, Tokens::whole(6_000), "nothing is lost by policy");
        }
    }

    #[test]
    fn idle_buckets_and_policies_are_forgotten() {
        let meter = Meter::default();
        ask(&meter, 1, 1, true, true);
        for _ in 0..=IDLE_READINGS {
            assert_eq!(meter.read().buckets.len(), 1);
        }
        let reading = meter.read();
        assert!(reading.buckets.is_empty() && reading.policies.is_empty());
    }

    #[test]
    fn descriptions_are_bounded_and_redacted() {
        let meter = Meter::new(Redaction::new(["api_key".into()].into(), "secret"));
        let long = "é".repeat(500);
        let what = meter.describe(chosen(&[("api_key", "s3cret"), ("tenant", &long)]));
        assert!(what.starts_with("api_key=#") && !what.contains("s3cret"), "{what}");
        assert!(what.len() <= WHAT_BYTES_MAX + '…'.len_utf8() && what.ends_with('…'), "{what}");
        let again = meter.describe(chosen(&[("api_key", "s3cret")]));
        assert!(what.starts_with(&*again), "the same value has the same hash");
        let many: Vec<(&str, &str)> = (0..32).map(|_| ("key", "value")).collect();
        assert!(meter.describe(chosen(&many)).len() <= WHAT_BYTES_MAX + '…'.len_utf8());
        let shared = Chosen { key: "path", value: "/api/", shared: true };
        assert_eq!(&*meter.describe([shared].into_iter()), "path=/api/*");
    }

    #[test]
    fn a_policy_that_comes_back_has_counts_of_its_own() {
        let meter = Meter::default();
        ask(&meter, 1, 1, true, true);
        let answered = Answered {
            policy: 2,
            bucket: id(1),
            cost: Tokens::whole(1),
            fits: true,
            admitted: true,
            checked: true,
            remaining: 0,
        };
        meter.count(&answered, std::iter::empty());
        let reading = meter.read();
        assert_eq!(reading.buckets.len(), 1);
        assert_eq!((reading.buckets[0].policy, reading.buckets[0].admitted), (2, Tokens::whole(1)));
    }

    #[test]
    fn fallbacks_are_counted_by_policy() {
        let meter = Meter::default();
        meter.fell_back(3, &id(1));
        meter.fell_back(3, &id(2));
        assert_eq!(meter.read().policies[&3].fallbacks, 2);
    }
}
