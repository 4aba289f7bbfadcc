//! Policies of every kind and size, how they change, and what is known of what they can carry.

use super::World;
use super::chance::Chance;
use super::region::DOMAIN;
use super::weather::Weather;
use crate::oracle::Watched;
use quorate::quota::amount::{Micros, Rate, Tokens};
use quorate::quota::guarantee::Guarantee;
use quorate::quota::matching::bucket_id;
use quorate::quota::policy::*;
use quorate::quota::pool::Standing;

/// One bucket that callers ask for.
#[derive(Clone, Debug)]
pub struct Target {
    /// The policy's name; the key of its descriptors has the same.
    pub policy: String,
    /// The value.
    pub value: String,
    /// The bucket.
    pub bucket: BucketId,
}

impl Target {
    /// One or two of each policy.
    pub fn of(chance: &Chance, policies: &[Policy]) -> Vec<Self> {
        let mut targets = Vec::new();
        for policy in policies {
            for value in 0..chance.int(1, 2) {
                let (policy, value) = (policy.name.to_string(), format!("v{value}"));
                let bucket = bucket_id(&policy, [(policy.as_str(), value.as_str())]);
                targets.push(Self { policy, value, bucket });
            }
        }
        targets
    }
}

/// A policy with this limit on each value of the key of its name, and otherwise as it is by default.
pub(super) fn plain(name: &str, limit: Limit, mode: Mode) -> Policy {
    Policy {
        name: name.into(),
        domain: DOMAIN.into(),
        matches: vec![KeyMatch { key: name.into(), value: ValueMatch::Any }],
        limit,
        mode,
        reserve: Reserve::default(),
        weights: std::collections::BTreeMap::new(),
        wait: Micros::ZERO,
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    }
}

/// A policy of any kind.
pub(super) fn any(chance: &Chance, weather: Weather, name: &str, regions: &[RegionName]) -> Policy {
    let burst = weather.burst(chance);
    let (percent, per) = weather.pace(chance);
    let amount = (burst * percent / 100).max(1);
    let amount = if chance.percent(5) { 0 } else { amount };
    let mode = match chance.int(0, 9) {
        0..3 => Mode::Approximate { max_overshoot: share(chance.int(1, 100)) },
        3 => Mode::Split,
        _ => Mode::Strict,
    };
    let mut weights = std::collections::BTreeMap::new();
    if chance.percent(30) {
        weights = regions.iter().map(|r| (r.clone(), weight(chance))).collect();
    }
    let limit = Limit::TokenBucket(TokenBucket { amount: positive(amount), per, burst: positive(burst) });
    let (reserve, wait) = (reserve(chance), Micros::millis(chance.pick(&[0, 250, 1_000])));
    Policy { reserve, weights, wait, ..plain(name, limit, mode) }
}

/// The same, changed in one way or another; rarely it goes.
pub(super) fn changed(
    chance: &Chance,
    weather: Weather,
    policies: &[Policy],
    regions: &[RegionName],
) -> Vec<Policy> {
    let mut policies = policies.to_vec();
    // Those of permits change by themselves.
    if let Some(at) = policies.iter().position(|policy| policy.permits().is_some()) {
        let permits = policies.remove(at);
        policies = changed(chance, weather, &policies, regions);
        policies.push(permits);
        return policies;
    }
    if policies.is_empty() || chance.percent(10) {
        return vec![any(chance, weather, "p0", regions)];
    }
    if chance.percent(5) {
        policies.pop();
        return policies;
    }
    let at = chance.index(policies.len());
    let policy = &mut policies[at];
    if policy.window().is_some() {
        super::quotas::change(chance, policy, regions);
        return policies;
    }
    if let Some(reserve) = weather.reserve(chance) {
        policy.reserve = reserve;
        return policies;
    }
    match chance.int(0, 5) {
        0 | 1 => policy.reserve = reserve(chance),
        2 => policy.weights = regions.iter().map(|r| (r.clone(), weight(chance))).collect(),
        3 => *policy = any(chance, weather, &policy.name.clone(), regions),
        _ => {
            if let Limit::TokenBucket(bucket) = &mut policy.limit {
                let percent = positive(chance.int(50, 200));
                bucket.amount = bucket.amount * percent / 100;
                bucket.burst = (bucket.burst * percent / 100).max(1);
            }
        }
    }
    policies
}

fn reserve(chance: &Chance) -> Reserve {
    if chance.percent(50) {
        return Reserve { rate: RESERVE_RATE_DEFAULT, burst: RESERVE_BURST_DEFAULT };
    }
    Reserve {
        rate: share(chance.pick(&[0, 10, 20, 50, 100])),
        burst: share(chance.pick(&[0, 10, 50, 80, 100])),
    }
}

fn share(percent: i64) -> Share {
    Share::percent(u32::try_from(percent).unwrap_or(0))
}

fn weight(chance: &Chance) -> u32 {
    u32::try_from(chance.int(0, 10)).unwrap_or(1)
}

fn positive(n: i64) -> u64 {
    u64::try_from(n).unwrap_or(0)
}

/// What one request costs, so that no more than some twenty a second fit.
pub fn request_of(rate: Rate) -> Tokens {
    Tokens::whole((rate.0 / 1_000_000 / 20).max(1))
}

impl World {
    /// The policies that are committed.
    pub(super) fn committed(&self) -> Vec<Policy> {
        self.watch.with_pool(|pool| pool.policies().map(|p| Policy::clone(p.policy)).collect())
    }

    /// The members of the cluster.
    pub(super) fn names(&self) -> Vec<RegionName> {
        self.watch.with_pool(|pool| {
            let members = pool.members().filter(|member| member.standing == Standing::In);
            members.map(|member| member.name).collect()
        })
    }

    /// The rate of a target's limit, and what of it can be carried when there is demand everywhere; `None` where a limit is so small
    /// or so slow that chance decides.
    pub(super) fn carries(&self, target: &Target) -> Option<(Rate, Rate)> {
        let policies = self.committed();
        let policy = policies.iter().find(|p| *p.name == *target.policy)?;
        let promise = Guarantee::of(policy, &self.names(), self.delay + self.delay)?;
        let roomy = promise.rate >= Rate::per_second(5)
            && promise.burst >= promise.rate.during(Micros::seconds(1))
            && promise.burst >= Tokens::whole(40)
            // Reserves as most people have them: others may keep more than they can use.
            && policy.reserve == Reserve { rate: RESERVE_RATE_DEFAULT, burst: RESERVE_BURST_DEFAULT };
        let carried = match &promise.pool {
            Some(reach) => reach.moving_max,
            None => {
                // A part that cannot hold a request carries nothing.
                let unit = request_of(promise.rate);
                let parts = promise.parts.iter().map(|(_, part)| part);
                parts.filter(|part| part.cap() >= unit + unit).map(|part| part.rate).sum::<Rate>()
            }
        };
        roomy.then_some((promise.rate, carried.min(promise.rate).percent(97)))
    }

    /// What was promised, for the oracle.
    pub(super) fn watched(&self) -> Vec<Watched> {
        let watched = self.targets.iter().map(|target| Watched {
            name: format!("{} {}", target.policy, target.value),
            // A quota is no token bucket: it is judged by the watch.
            editions: if target.policy == super::quotas::NAME {
                Vec::new()
            } else {
                self.watch.editions(&target.policy)
            },
        });
        watched.collect()
    }
}
