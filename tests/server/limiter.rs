//! A limiter for one process: exact token buckets in a map, a clock that tests move, and switches for trouble.

use quorate::limiter::newcomers::Caller;
use quorate::quota::amount::{Micros, Tokens};
use quorate::quota::matching::{Charge, ChargeLimit, Matched, Matcher, Request, RequestFault};
use quorate::quota::policy::{
    BucketId, KeyMatch, Limit, Mode, OnStoreFailure, Policy, Reserve, TokenBucket, Unit, ValueMatch,
};
use quorate::quota::verdict::{LimitVerdict, Reason, Sight, Terms, Verdict};
use quorate::server::Decide;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::Semaphore;

/// See the module.
#[derive(Clone)]
pub struct Limiter(Arc<Inner>, Caller);

struct Inner {
    policies: Vec<Policy>,
    matcher: Matcher,
    unmatched: bool,
    state: Mutex<State>,
    /// Requests of domain `gated` wait for a permit (until their deadline).
    gate: Semaphore,
}

#[derive(Default)]
struct State {
    now: Micros,
    down: bool,
    buckets: HashMap<BucketId, (Tokens, Micros)>,
    deadlines: Vec<Option<Duration>>,
    callers: Vec<Caller>,
}

impl Limiter {
    pub fn new(policies: Vec<Policy>) -> Self {
        Self::with_unmatched(policies, true)
    }

    pub fn with_unmatched(policies: Vec<Policy>, unmatched: bool) -> Self {
        let matcher = Matcher::new((0..).zip(&policies));
        let (state, gate) = (Mutex::default(), Semaphore::new(0));
        Self(Arc::new(Inner { policies, matcher, unmatched, state, gate }), Caller::ANYONE)
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

    /// Who has asked so far.
    pub fn callers(&self) -> Vec<Caller> {
        self.0.state.lock().unwrap().callers.clone()
    }

    fn decide(&self, request: &Request<'_>) -> Result<Verdict, RequestFault> {
        let Inner { policies, matcher, unmatched, state, .. } = &*self.0;
        let Matched { charges, .. } = matcher.charges(request)?;
        let mut state = state.lock().unwrap();
        let State { now, down, buckets, .. } = &mut *state;
        // Check all, ...
        let mut seen = Vec::new();
        for charge in &charges {
            let Some(limit) = bucket(policies, charge) else { continue };
            let (level, at) = buckets.entry(charge.bucket).or_insert((limit.burst(), *now));
            *level = (*level + limit.rate().during(*now - *at)).min(limit.burst());
            *at = *now;
            seen.push(charge.cost <= *level);
        }
        // ... then take all or none.
        let all = seen.iter().all(|fits| *fits) && !*down;
        let mut seen = seen.into_iter();
        let answer = |charge: &Charge| {
            let (terms, descriptor, cost) = (terms(policies, charge), charge.descriptor, charge.cost);
            let Some(limit) = bucket(policies, charge) else {
                return LimitVerdict::unlimited(terms, descriptor);
            };
            if *down {
                let policy = charge.policy().map(|id| &policies[id as usize]);
                let allow = policy.is_some_and(|p| p.on_store_failure == OnStoreFailure::Allow);
                return LimitVerdict::unavailable(terms, descriptor, cost, allow);
            }
            let (level, _) = buckets.get_mut(&charge.bucket).unwrap();
            if all {
                *level = (*level - cost).min(limit.burst());
            }
            let fits = seen.next().unwrap();
            let sight = Sight { fits, level: *level, rate: limit.rate(), cap: limit.burst() };
            LimitVerdict::seen(terms, descriptor, cost, sight, None, Reason::OverLimit)
        };
        let limits = charges.iter().map(answer).collect();
        let descriptors = request.descriptors();
        Ok(Verdict::new(limits, descriptors, *unmatched))
    }
}

fn terms<'a>(policies: &'a [Policy], charge: &Charge) -> Terms<'a> {
    match charge.limit {
        ChargeLimit::Policy(id) => (&policies[id as usize]).into(),
        ChargeLimit::Override { limit, policy } => {
            let policy = &policies[policy.expect("tests override policies") as usize];
            Terms { limit: Some(limit.into()), ..policy.into() }
        }
    }
}

fn bucket(policies: &[Policy], charge: &Charge) -> Option<TokenBucket> {
    match (charge.limit, charge.policy().map(|id| &policies[id as usize].limit)) {
        (ChargeLimit::Override { limit, .. }, _) => Some(limit),
        (_, Some(Limit::TokenBucket(bucket))) => Some(*bucket),
        _ => None,
    }
}

impl Decide for Limiter {
    async fn check(
        &self,
        request: &Request<'_>,
        deadline: Option<Duration>,
    ) -> Result<Verdict, RequestFault> {
        {
            let mut state = self.0.state.lock().unwrap();
            state.deadlines.push(deadline);
            state.callers.push(self.1);
        }
        if request.domain == "gated" {
            let permit = self.0.gate.acquire();
            match deadline {
                // Too late: decide with what is there.
                Some(deadline) => drop(tokio::time::timeout(deadline, permit).await),
                None => permit.await.unwrap().forget(),
            }
        }
        self.decide(request)
    }

    fn on_behalf_of(&self, caller: Caller) -> Self {
        Self(Arc::clone(&self.0), caller)
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
