//! The policies in force in this region, compiled for the fast loop.

use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::bucket::{Shape, Unseen};
use crate::quota::calendar::Turn;
use crate::quota::counted::lent::Slice;
use crate::quota::counted::{Act, Allowance, Kind};
use crate::quota::matching::Matcher;
use crate::quota::policy::{
    BucketId, Cut, Limit, Mode, OnStoreFailure, Part, Policy, Reserve, TokenBucket, Unit, Window,
};
use crate::quota::redaction::Redaction;
use crate::store::names::PolicyMap;
use crate::store::{CountCharge, Take, TakeCharge};
use crate::telemetry::{Metrics, PolicyMetrics};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The policies in force.
#[derive(Debug)]
pub struct Active {
    /// The cluster's version of them; 0: none has been read yet.
    pub version: u64,
    /// From requests to charges.
    pub matcher: Matcher,
    /// Is what no policy matches let through?
    pub unmatched_allowed: bool,
    /// What charges that come with their own limit (Envoy overrides) and match no policy go by.
    pub overrides: ActivePolicy,
    /// Has any of them windows?
    pub has_windows: bool,
    /// They were read before the store's clock was: what its buckets are that it does not hold, nobody can say yet. Nothing may be
    /// taken from it by them.
    pub blind: bool,
    policies: PolicyMap<ActivePolicy>,
}

/// One policy in force.
#[derive(Debug)]
pub struct ActivePolicy {
    /// Its id in the pool.
    pub id: u32,
    /// As it was written.
    pub policy: Arc<Policy>,
    /// What this region may use of it right now with no word from anyone.
    pub part: Part,
    /// The same as a bucket: the rate discounted for drift.
    pub shape: Shape,
    /// How it counts what it admits, and over what span; `None`: it is no such limit.
    pub count: Option<(Kind, Micros)>,
    /// What its buckets are that the store does not hold; `None`: full. (Of windows see
    /// [`TimeOfDay::unseen`](super::time_of_day::TimeOfDay::unseen).) Of a limit that counts: that until a span after then no more
    /// than this may be used.
    pub unseen: Option<Unseen>,
    /// The windows of its quota; `None`: it has none.
    pub window: Option<Window>,
    /// For how long holders may have permits that the store has lost.
    pub life: Micros,
    /// In windows that began before this time of day, this is what the region may use instead of [`Self::part`].
    pub held: Option<(Micros, Part)>,
    /// Is there a pool?
    pub pooled: bool,
    /// May something of this region's reserve be lent to others, or was it not long ago?
    pub lends: bool,
    /// What a bucket's pool holds when it is full.
    pub pool_full: Tokens,
    /// What all regions together may admit of a bucket; `None`: anything.
    bound: Option<(Rate, Tokens)>,
    /// Its counters.
    pub metrics: PolicyMetrics,
}

impl Active {
    /// None has been read yet: see [`Self::is_known`].
    #[must_use]
    pub fn none(unmatched_allowed: bool, metrics: &Metrics) -> Self {
        Self::new(0, Vec::new(), unmatched_allowed, metrics)
    }

    /// Have the cluster's policies been read? Until then nobody can say what is limited, so nothing may pass as unmatched.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.version > 0
    }

    /// These policies.
    #[must_use]
    pub fn new(
        version: u64,
        policies: Vec<ActivePolicy>,
        unmatched_allowed: bool,
        metrics: &Metrics,
    ) -> Self {
        let matcher = Matcher::new(policies.iter().map(|p| (p.id, &*p.policy)));
        let has_windows = policies.iter().any(|policy| policy.window.is_some());
        let policies = policies.into_iter().map(|p| (p.id, p)).collect();
        let overrides = overrides(metrics);
        Self { version, matcher, unmatched_allowed, overrides, has_windows, blind: false, policies }
    }

    /// The same, but buckets are named after what stands for redacted values.
    #[must_use]
    pub fn redacting(self, redaction: &Redaction) -> Self {
        Self { matcher: self.matcher.redacting(redaction.clone()), ..self }
    }

    /// A policy by its id in the pool.
    #[must_use]
    pub fn policy(&self, id: u32) -> Option<&ActivePolicy> {
        self.policies.get(&id)
    }

    /// All of them.
    pub fn policies(&self) -> impl Iterator<Item = &ActivePolicy> {
        self.policies.values()
    }
}

impl ActivePolicy {
    /// What this region may use in a window.
    #[must_use]
    pub fn part_in(&self, turn: Turn) -> Part {
        self.held.filter(|(before, _)| turn.start < *before).map_or(self.part, |(_, part)| part)
    }

    /// Its buckets in that window.
    #[must_use]
    pub fn shape_in(&self, turn: Turn) -> Shape {
        Shape::windowed(self.part_in(turn).cap())
    }

    /// A policy, as regions share it (`cut`; `None`: it is unlimited), of which this region may use `part`.
    #[must_use]
    pub fn new(
        id: u32,
        policy: Arc<Policy>,
        cut: Option<&Cut>,
        part: Part,
        unseen: Option<Unseen>,
        metrics: &Metrics,
    ) -> Self {
        let window = policy.window();
        let pool_full = cut.filter(|c| c.pooled).map_or(Tokens::ZERO, |c| {
            (c.burst + c.overshoot() - c.parts.iter().map(Part::cap).sum()).or_zero()
        });
        let pooled = cut.is_some_and(|c| c.pooled);
        Self {
            id,
            part,
            shape: if window.is_some() { Shape::windowed(part.cap()) } else { part.shape() },
            unseen,
            window,
            life: Micros::ZERO,
            held: None,
            pooled,
            lends: false,
            pool_full,
            bound: cut.map(|c| (c.rate, c.burst + c.overshoot())),
            count: Kind::of(&policy.limit),
            metrics: metrics.policy(&policy.name, policy.mode),
            policy,
        }
    }

    /// What all regions together may admit of a bucket: a rate, and a burst with the overshoot. `None`: it is unlimited.
    #[must_use]
    pub fn bound(&self) -> Option<(Rate, Tokens)> {
        self.bound
    }
}

impl ActivePolicy {
    /// What this region may use of a bucket, if it counts what it admits over this span.
    #[must_use]
    pub fn allowance(&self, span: Micros) -> Allowance {
        let limit = self.part.burst.floor();
        let (held, until) = self.unseen.map_or((limit, Micros::ZERO), |u| (u.level.floor(), u.at + span));
        let lent = self.pooled.then(Slice::default);
        Allowance { limit, span, until, held, life: self.life, lent }
    }

    /// What takes so much of one of its buckets, whatever else is charged.
    #[must_use]
    pub fn take(&self, bucket: BucketId, cost: Tokens) -> Take {
        let enforce = true;
        let Some((kind, span)) = self.count else {
            let (shape, unseen) = (self.shape, self.unseen);
            let charges = vec![TakeCharge { bucket, shape, unseen, cost, enforce }];
            return Take { charges, ..Take::default() };
        };
        let (bucket, allowance, act) = (kind.bucket(bucket, span), self.allowance(span), Act::Count);
        let counts = vec![CountCharge { bucket, kind, allowance, cost, act, enforce }];
        Take { counts, ..Take::default() }
    }
}

fn overrides(metrics: &Metrics) -> ActivePolicy {
    let policy = Policy {
        name: "override".into(),
        domain: "".into(),
        matches: Vec::new(),
        limit: Limit::TokenBucket(TokenBucket { amount: 0, per: Unit::Second, burst: 0 }),
        mode: Mode::Split,
        reserve: Reserve::default(),
        weights: BTreeMap::new(),
        wait: Micros::ZERO,
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    };
    ActivePolicy::new(u32::MAX, Arc::new(policy), None, Part::default(), None, metrics)
}
