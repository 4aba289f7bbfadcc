//! A limiter for one process: exact token buckets in a map, a clock that tests move, and switches for trouble.

use quorate::quota::amount::{Micros, Tokens};
use quorate::quota::matching::{Request, RequestFault, Subject};
use quorate::quota::policy::{
    KeyMatch, Limit, Mode, OnStoreFailure, Policy, Reserve, TokenBucket, Unit, ValueMatch,
};
use quorate::quota::verdict::{LimitVerdict, Reason, Sight, Verdict};
use quorate::server::Decide;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;

/// See the module.
#[derive(Clone)]
pub struct Limiter(Arc<Inner>);

struct Inner {
    policies: Vec<Policy>,
    unmatched: bool,
    state: Mutex<State>,
    /// Requests of domain `gated` wait for a permit (until their deadline).
    gate: Semaphore,
}

#[derive(Default)]
struct State {
    now: Micros,
    down: bool,
    buckets: HashMap<(usize, Vec<String>), (Tokens, Micros)>,
    deadlines: Vec<Option<Duration>>,
}

struct Charge {
    policy: usize,
    values: Vec<String>,
    descriptor: usize,
    cost: Tokens,
    limit: Option<TokenBucket>,
}

impl Limiter {
    pub fn new(policies: Vec<Policy>) -> Self {
        Self::with_unmatched(policies, true)
    }

    pub fn with_unmatched(policies: Vec<Policy>, unmatched: bool) -> Self {
        let (state, gate) = (Mutex::default(), Semaphore::new(0));
        Self(Arc::new(Inner { policies, unmatched, state, gate }))
    }

    /// Moves the clock.
    pub fn pass(&self, time: Micros) {
        self.0.state.lock().unwrap().now += time;
    }

    /// Takes the store away, or gives it back.
    pub fn store_is_down(&self, down: bool) {
        self.0.state.lock().unwrap().down = down;
    }

    /// Lets so many gated requests through.
    pub fn open_gate(&self, requests: usize) {
        self.0.gate.add_permits(requests);
    }

    /// The deadlines of all requests so far.
    pub fn deadlines(&self) -> Vec<Option<Duration>> {
        self.0.state.lock().unwrap().deadlines.clone()
    }

    fn charges(&self, request: &Request<'_>) -> (Vec<Charge>, usize) {
        let mut charges = Vec::new();
        let policies = self.0.policies.iter().enumerate().filter(|(_, p)| &*p.domain == request.domain);
        match request.subject {
            Subject::Attributes(attributes) => {
                for (policy, p) in policies {
                    let value =
                        |key: &str| attributes.iter().find(|(k, _)| *k == key).map(|(_, v)| (*v).to_owned());
                    if let Some(values) = p.matches.iter().map(|m| value(&m.key)).collect() {
                        let (cost, limit) = (Tokens::whole(request.cost), bucket(p));
                        charges.push(Charge { policy, values, descriptor: 0, cost, limit });
                    }
                }
                (charges, 1)
            }
            Subject::Descriptors(descriptors) => {
                for (descriptor, d) in descriptors.iter().enumerate() {
                    let keys: Vec<_> = d.entries.iter().map(|(k, _)| *k).collect();
                    let matching =
                        policies.clone().find(|(_, p)| p.matches.iter().map(|m| &*m.key).eq(keys.clone()));
                    if let Some((policy, p)) = matching {
                        let values = d.entries.iter().map(|(_, v)| (*v).to_owned()).collect();
                        let cost = Tokens::whole(d.cost.unwrap_or(request.cost));
                        let limit = d.limit.or_else(|| bucket(p));
                        charges.push(Charge { policy, values, descriptor, cost, limit });
                    }
                }
                (charges, descriptors.len())
            }
        }
    }

    fn decide(&self, request: &Request<'_>) -> Verdict {
        let (charges, descriptors) = self.charges(request);
        let mut state = self.0.state.lock().unwrap();
        let State { now, down, buckets, .. } = &mut *state;
        let mut seen = Vec::new();
        for charge in &charges {
            let Some(limit) = charge.limit else { continue };
            let key = (charge.policy, charge.values.clone());
            let (level, at) = buckets.entry(key).or_insert((limit.burst(), *now));
            *level = (*level + limit.rate().during(*now - *at)).min(limit.burst());
            *at = *now;
            seen.push(charge.cost <= *level);
        }
        let all = seen.iter().all(|fits| *fits) && !*down;
        let mut seen = seen.into_iter();
        let verdicts = charges.iter().map(|charge| {
            let policy = &self.0.policies[charge.policy];
            let Some(limit) = charge.limit else { return LimitVerdict::unlimited(policy, charge.descriptor) };
            if *down {
                let allow = policy.on_store_failure == OnStoreFailure::Allow;
                return LimitVerdict::unavailable((policy, &limit), charge.descriptor, charge.cost, allow);
            }
            let (level, _) = buckets.get_mut(&(charge.policy, charge.values.clone())).unwrap();
            if all {
                *level = (*level - charge.cost).min(limit.burst());
            }
            let fits = seen.next().unwrap();
            let sight = Sight { fits, level: *level, rate: limit.rate(), cap: limit.burst() };
            let place = (policy, &limit);
            LimitVerdict::seen(place, charge.descriptor, charge.cost, sight, None, Reason::OverLimit)
        });
        Verdict::new(verdicts.collect(), descriptors, self.0.unmatched)
    }
}

impl Decide for Limiter {
    async fn check(
        &self,
        request: &Request<'_>,
        deadline: Option<Duration>,
    ) -> Result<Verdict, RequestFault> {
        self.0.state.lock().unwrap().deadlines.push(deadline);
        if request.domain == "gated" {
            let permit = self.0.gate.acquire();
            match deadline {
                // Too late: decide with what is there.
                Some(deadline) => drop(tokio::time::timeout(deadline, permit).await),
                None => permit.await.unwrap().forget(),
            }
        }
        Ok(self.decide(request))
    }
}

/// A split policy over any values of these keys.
pub fn policy(name: &str, keys: &[&str], amount: u64, per: Unit, burst: u64) -> Policy {
    let any = |key: &&str| KeyMatch { key: (*key).into(), value: ValueMatch::Any };
    Policy {
        name: name.into(),
        domain: "api".into(),
        matches: keys.iter().map(any).collect(),
        limit: Limit::TokenBucket(TokenBucket { amount, per, burst }),
        mode: Mode::Split,
        reserve: Reserve::default(),
        weights: BTreeMap::new(),
        wait: Micros::ZERO,
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    }
}

fn bucket(policy: &Policy) -> Option<TokenBucket> {
    match policy.limit {
        Limit::TokenBucket(bucket) => Some(bucket),
        Limit::Unlimited => None,
    }
}
