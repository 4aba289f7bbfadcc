//! The fast loop: a request becomes charges, the region's store takes them or does not, and a verdict comes of it.
//!
//! One trip to the store at most (see [`denials`]), one direction. Nothing here waits for another region, but a strict request that
//! may: it waits for its own bucket's news, for as long as an ask is under way and its policy lets it.

pub mod active;
pub mod denials;
mod fallback;
pub mod leases;
pub mod meter;
pub mod newcomers;
mod permits;
pub mod table;
pub mod time_of_day;
mod waits;

use crate::quota::amount::{DRIFT_PPM, Micros, Tokens};
use crate::quota::bucket::Shape;
use crate::quota::calendar::Turn;
use crate::quota::counted::{Act, Kind, Seen};
use crate::quota::matching::{Charge, ChargeLimit, Matched, Request, RequestFault, Subject, window_bucket};
use crate::quota::policy::{BucketId, Limit, Mode, Quota, RegionName, TokenBucket, ValueMatch};
use crate::quota::redaction::Redaction;
use crate::quota::verdict::{Elsewhere, LimitVerdict, QuotaSight, Reason, Sight, Terms, Verdict};
use crate::store::memory::MemoryStore;
use crate::store::{CountCharge, Store, StoreError, Take, TakeCharge, Taken, TakenCharge};
use crate::telemetry::metrics::{Check, Waited};
use crate::telemetry::{Metrics, trace};
use crate::trace_span;
use active::{Active, ActivePolicy};
use arc_swap::ArcSwap;
use denials::Denials;
use fallback::Fallback;
use leases::{Lease, LeaseFault};
use meter::{Answered, Chosen, Meter};
use newcomers::{Caller, NewBuckets, Newcomers};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;
use table::{Asking, Table, Tally};
use time_of_day::{Present, TimeOfDay};
use tokio::time::Instant;
use tracing::Instrument as _;

/// The most requests that wait for a lease at a time, in one daemon.
pub const WAITING_MAX: usize = 10_000;
/// How long a lease is assumed to take until one has been seen.
const LEASE_TAKES: Micros = Micros::millis(250);

/// Looks at what is left in the pool of a bucket, as this region's replica knows it. `None`: not now.
pub type Peek = dyn Fn(u32, BucketId) -> Option<Tokens> + Send + Sync;

/// What all threads of a daemon share.
pub struct Core {
    /// The policies in force.
    pub active: ArcSwap<Active>,
    /// Demand by bucket.
    pub table: Table,
    /// The time of day, for windows of quotas.
    pub time: TimeOfDay,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// What passes, by policy and by the busiest buckets.
    pub meter: Meter,
    /// Buckets that nobody has asked for before.
    pub newcomers: Newcomers,
    /// What the store denied a moment ago.
    pub denials: Denials,
    /// Values that are not stored, logged or shown.
    pub redaction: Redaction,
    region: RegionName,
    fallback: Fallback,
    peek: Box<Peek>,
    waiting: AtomicUsize,
    lease_takes: AtomicI64,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("fallback", &self.fallback).finish_non_exhaustive()
    }
}

impl Core {
    /// Without policies yet: see [`Self::active`]. `local` takes over for policies that say so while the store is down.
    #[must_use]
    pub fn new(active: Active, metrics: Arc<Metrics>, local: MemoryStore, peek: Box<Peek>) -> Self {
        Self {
            active: ArcSwap::from_pointee(active),
            table: Table::default(),
            time: TimeOfDay::default(),
            metrics,
            meter: Meter::default(),
            newcomers: Newcomers::new(NewBuckets::default()),
            denials: Denials::default(),
            redaction: Redaction::default(),
            region: RegionName::default(),
            fallback: Fallback::new(local),
            peek,
            waiting: AtomicUsize::new(0),
            lease_takes: AtomicI64::new(LEASE_TAKES.0),
        }
    }

    /// With another meter.
    #[must_use]
    pub fn with_meter(self, meter: Meter) -> Self {
        Self { meter, ..self }
    }

    /// The same with these limits on new buckets.
    #[must_use]
    pub fn with_new_buckets(self, limits: NewBuckets) -> Self {
        Self { newcomers: Newcomers::new(limits), ..self }
    }

    /// The same, redacting these values.
    #[must_use]
    pub fn with_redaction(self, redaction: Redaction) -> Self {
        Self { redaction, ..self }
    }

    /// The region's name goes into what it gives out, so that others know whose it is.
    #[must_use]
    pub fn of(self, region: RegionName) -> Self {
        Self { region, ..self }
    }

    /// Tokens in the pool of a bucket that is not tallied: other regions may have spent them.
    fn in_pool(&self, held: &Held<'_>) -> Tokens {
        (self.peek)(held.policy.id, held.bucket()).unwrap_or(held.policy.pool_full)
    }

    /// How many requests wait for a lease now.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// How long it takes from an ask to its lease, as measured; for hints in answers.
    pub fn set_lease_takes(&self, time: Micros) {
        self.lease_takes.store(time.0, Ordering::Relaxed);
    }
}

/// What decides about requests. Each worker thread has its own (see [`crate::server::start`]).
pub trait Decide: Clone + Send + Sync + 'static {
    /// Decides about one request. With a `deadline`, an answer after that time is of no use to the caller: so what
    /// waits (for a lease, for the store) stops waiting before it.
    ///
    /// # Errors
    /// A request that cannot be checked as it is. Everything else that goes wrong becomes a verdict.
    fn check(
        &self,
        request: &Request<'_>,
        deadline: Option<Duration>,
    ) -> impl Future<Output = Result<Verdict, RequestFault>> + Send;

    /// Decides about one request, and takes the permits of the `concurrent` limits that it matches, under a lease; `None`: it was
    /// denied. Where nothing is limited the lease is of nothing. By default there are no permits to lend: it only decides.
    ///
    /// # Errors
    /// As [`Self::check`].
    fn acquire(
        &self,
        request: &Request<'_>,
    ) -> impl Future<Output = Result<(Verdict, Option<Lease>), RequestFault>> + Send {
        async { Ok((self.check(request, None).await?, None)) }
    }

    /// Renews a lease; returns how long it lasts now.
    ///
    /// # Errors
    /// See [`LeaseFault`].
    fn renew(&self, lease: &str) -> impl Future<Output = Result<Micros, LeaseFault>> + Send {
        let _ = lease;
        std::future::ready(Err(LeaseFault::Unknown))
    }

    /// Gives a lease's permits back.
    ///
    /// # Errors
    /// See [`LeaseFault`].
    fn release(&self, lease: &str) -> impl Future<Output = Result<(), LeaseFault>> + Send {
        let _ = lease;
        std::future::ready(Err(LeaseFault::Unknown))
    }

    /// The same, for requests of this caller. By default it makes no difference who asks.
    #[must_use]
    fn on_behalf_of(&self, caller: Caller) -> Self {
        let _ = caller;
        self.clone()
    }
}

/// Decides about requests. Each worker thread has its own, with its own way to the store.
#[derive(Clone, Debug)]
pub struct Limiter<S> {
    store: S,
    core: Arc<Core>,
    caller: Caller,
}

/// What a charge is held against.
#[derive(Clone, Copy, Debug)]
enum Bound {
    Bucket(TokenBucket),
    /// A quota, in the window that it is now; the charge is on that window's bucket.
    Quota(Quota, Present),
}

/// A charge with what is needed to judge it.
#[derive(Clone)]
struct Held<'a> {
    charge: Charge,
    /// The bucket's name: of a quota in all windows.
    name: BucketId,
    policy: &'a ActivePolicy,
    /// `None`: it counts, or is unlimited.
    limit: Option<Bound>,
    /// How it counts, and over what span.
    count: Option<(Kind, Micros)>,
    /// What is done with what it counts.
    act: Act,
    /// An override's bucket is this region's alone.
    own: bool,
    tally: Option<Arc<Tally>>,
    /// It has waited as long as it may for the pool to answer.
    unanswered: bool,
    /// How long the permits last that were taken.
    lasts: Option<Micros>,
}

impl<S: Store> Decide for Limiter<S> {
    async fn check(
        &self,
        request: &Request<'_>,
        deadline: Option<Duration>,
    ) -> Result<Verdict, RequestFault> {
        let begun = Instant::now();
        let active = self.core.active.load_full();
        let matched = active.matcher.charges(request)?;
        let Some(mut held) = hold(&active, &matched, &self.core.time) else {
            // Nobody can say yet which window of a quota it is.
            return Ok(Verdict::undecided(request.descriptors()));
        };
        Ok(self.decide(&active, request, &matched, &mut held, deadline.map(|d| begun + d)).await)
    }

    async fn acquire(&self, request: &Request<'_>) -> Result<(Verdict, Option<Lease>), RequestFault> {
        self.acquire_lease(request).await
    }

    async fn renew(&self, lease: &str) -> Result<Micros, LeaseFault> {
        self.renew_lease(lease).await
    }

    async fn release(&self, lease: &str) -> Result<(), LeaseFault> {
        self.release_lease(lease).await
    }

    fn on_behalf_of(&self, caller: Caller) -> Self {
        Self { caller, ..self.clone() }
    }
}

impl<S: Store> Limiter<S> {
    /// One with its own way to the store.
    #[must_use]
    pub fn new(store: S, core: Arc<Core>) -> Self {
        Self { store, core, caller: Caller::ANYONE }
    }

    async fn decide(
        &self,
        active: &Active,
        request: &Request<'_>,
        matched: &Matched,
        held: &mut [Held<'_>],
        deadline: Option<Instant>,
    ) -> Verdict {
        let descriptors = request.descriptors();
        if !active.is_known() {
            return Verdict::undecided(descriptors);
        }
        if !matched.unmatched.is_empty() {
            self.core.metrics.unmatched(request.domain);
        }
        let limits = match held.iter().any(Held::is_limited) {
            true if active.blind => self.without_store(held, StoreError::Unavailable).await,
            true => self.take_known(held, deadline).await,
            false => held.iter().map(|h| h.unlimited()).collect(),
        };
        for (held, verdict) in held.iter().zip(&limits) {
            held.policy.metrics.count(verdict, held.charge.cost);
        }
        self.meter(request, held, &limits);
        Verdict::new(limits, descriptors, active.unmatched_allowed)
    }

    async fn take(&self, held: &mut [Held<'_>], deadline: Option<Instant>) -> Vec<LimitVerdict> {
        if let Err(error) = self.core.fallback.settle(&self.store, || take_of(held.iter())).await {
            return self.without_store(held, error).await;
        }
        let mut taken = match self.take_or_recall(held).await {
            Ok(taken) => taken,
            Err(error) => return self.without_store(held, error).await,
        };
        self.count(held, &taken);
        if !taken.allowed
            && let Some((waited, later)) = self.wait(held, &taken, deadline).await
        {
            taken = later.unwrap_or(taken);
            if waited == Waited::TimedOut {
                for held in held.iter_mut().filter(|h| h.enforced() && h.wait().is_positive()) {
                    held.unanswered = held.tally.as_ref().is_some_and(|tally| tally.asking() != Asking::No);
                }
            }
        }
        for (held, seen) in held.iter_mut().filter(|h| h.count.is_some()).zip(&taken.counts) {
            held.lasts = Some(seen.lasts);
        }
        self.judge(held, &taken)
    }

    async fn take_traced(&self, held: &[Held<'_>]) -> Result<Taken, StoreError> {
        let span = trace::child(|| {
            trace_span!(
                "store take",
                "otel.kind" = "client",
                "db.operation.name" = "take",
                charges = held.len()
            )
        });
        self.store.take(take_of(held.iter())).instrument(span).await
    }

    /// Counts what passes, for people who look at it.
    fn meter(&self, request: &Request<'_>, held: &[Held<'_>], limits: &[LimitVerdict]) {
        let admitted = limits.iter().all(|limit| limit.allowed);
        for (held, verdict) in held.iter().zip(limits).filter(|(held, _)| !held.own) {
            let answered = Answered {
                policy: held.policy.id,
                bucket: held.charge.bucket,
                cost: held.charge.cost,
                fits: verdict.allowed && verdict.reason != Reason::Shadow,
                admitted,
                checked: verdict.reason != Reason::StoreUnavailable,
                remaining: verdict.remaining,
            };
            self.core.meter.count(&answered, held.entries(request));
        }
    }

    /// Tells the slow loop about demand and low buckets.
    fn count(&self, held: &mut [Held<'_>], taken: &Taken) {
        for (held, seen) in held.iter_mut().filter(|h| h.count.is_some()).zip(&taken.counts) {
            if held.is_lent() {
                held.tally =
                    self.count_permits(held.policy, held.bucket(), held.charge.cost, seen, taken.now);
            }
        }
        for (held, seen) in held.iter_mut().filter(|h| h.limit.is_some()).zip(&taken.charges) {
            if seen.level < Tokens::ZERO {
                self.core.metrics.breached(Check::Level);
            }
            if !held.policy.pooled || held.own {
                continue;
            }
            let cap = held.shape().cap;
            let low = !seen.fits || seen.level < cap.mul_div(1, 2) || seen.cap > cap;
            let (id, bucket) = (held.policy.id, held.bucket());
            held.tally = match self.core.table.get(id, &bucket) {
                None if low => self.core.table.get_or_make(id, bucket, held.turn(), self.core.in_pool(held)),
                known => known,
            };
            let Some(tally) = &held.tally else { continue };
            if !seen.fits && !held.fits_ever() {
                // It is no demand that could be met: what it would take is left to those that fit.
                tally.saw(seen.level, taken.now);
                continue;
            }
            self.count_one(tally, held.charge.cost, seen.fits, seen.level, taken.now);
        }
    }

    /// Counts one request. The slow loop hears at once of what was refused or has left little.
    fn count_one(&self, tally: &Arc<Tally>, cost: Tokens, fits: bool, level: Tokens, at: Micros) {
        tally.count(cost, fits, level, at);
        if !fits || tally.is_low(level) {
            if let Some(cause) = trace::cause() {
                tally.set_cause(cause);
            }
            self.core.table.poke(tally);
        }
    }

    fn judge(&self, held: &[Held<'_>], taken: &Taken) -> Vec<LimitVerdict> {
        let (mut seen, mut counted) = (taken.charges.iter(), taken.counts.iter());
        held.iter()
            .enumerate()
            .map(|(index, h)| match &h.limit {
                None if h.count.is_some() => {
                    let seen = counted.next().copied().unwrap_or_default();
                    if h.is_lent() { self.judge_permits(h, seen) } else { h.counted(&seen) }
                }
                None => h.unlimited(),
                Some(bound) => {
                    let seen = seen.next().copied().unwrap_or_default();
                    // Two descriptors may share a bucket: what has to fit is all of it so far.
                    let others = held.iter().take(index).filter(|other| other.bucket() == h.bucket());
                    let before = others.map(|other| other.charge.cost.or_zero()).sum::<Tokens>();
                    let cost = h.charge.cost + before;
                    match bound {
                        Bound::Bucket(limit) => self.judge_one(h, limit, cost, seen),
                        Bound::Quota(quota, present) => self.judge_quota(h, quota, *present, cost, seen),
                    }
                }
            })
            .collect()
    }

    fn judge_one(
        &self,
        held: &Held<'_>,
        limit: &TokenBucket,
        cost: Tokens,
        seen: TakenCharge,
    ) -> LimitVerdict {
        let policy = held.policy;
        let mut sight = Sight { fits: seen.fits, level: seen.level, rate: seen.rate, cap: seen.cap };
        let mut elsewhere = None;
        let mut denial = Reason::OverLimit;
        if policy.pooled && !held.own {
            let pool = held.tally.as_ref().map_or_else(|| self.core.in_pool(held), |t| t.elsewhere());
            let whole = limit.rate().discount(DRIFT_PPM);
            if seen.fits {
                // What is left of the limit as this region knows it: its own, and what it might be lent.
                sight.level = (seen.level - policy.part.overdraft).or_zero() + pool;
                sight.rate = whole;
                sight.cap = limit.burst();
                sight.level = sight.level.min(sight.cap);
            } else if held.tally.as_ref().is_some_and(|t| t.is_cut_off()) {
                if policy.policy.mode == Mode::Strict {
                    denial = Reason::NoLease;
                }
            } else {
                let after = Micros(self.core.lease_takes.load(Ordering::Relaxed));
                if held.unanswered && cost <= seen.level + pool {
                    // They are there, as far as this region knows, and did not come in time.
                    return LimitVerdict::unanswered(held.terms(), held.charge.descriptor, seen.level, after);
                }
                elsewhere = Some(Elsewhere { rate: whole, cap: policy.shape.cap + policy.pool_full, after });
            }
        }
        LimitVerdict::seen(held.terms(), held.charge.descriptor, cost, sight, elsewhere, denial)
    }

    fn judge_quota(
        &self,
        held: &Held<'_>,
        quota: &Quota,
        Present { turn, now, .. }: Present,
        cost: Tokens,
        seen: TakenCharge,
    ) -> LimitVerdict {
        let policy = held.policy;
        let mut sight = QuotaSight { fits: seen.fits, left: seen.level, turn, now, lent_after: None };
        let mut denial = Reason::OverLimit;
        if policy.pooled {
            let pool = held.tally.as_ref().map_or_else(|| self.core.in_pool(held), |t| t.elsewhere());
            let overdraft = policy.part_in(turn).overdraft;
            let own = if seen.fits { (seen.level - overdraft).or_zero() } else { seen.level };
            if held.tally.as_ref().is_some_and(|t| t.is_cut_off()) {
                sight.left = own;
                if policy.policy.mode == Mode::Strict && pool >= cost {
                    denial = Reason::NoLease;
                }
            } else {
                sight.left = (own + pool.or_zero()).min(quota.tokens());
                if held.unanswered && cost <= sight.left {
                    denial = Reason::NoLease;
                }
                sight.lent_after = Some(Micros(self.core.lease_takes.load(Ordering::Relaxed)));
            }
        }
        LimitVerdict::in_window(held.terms(), held.charge.descriptor, cost, &sight, denial)
    }
}

impl Held<'_> {
    fn bucket(&self) -> BucketId {
        let bucket = self.charge.bucket;
        self.count.map_or(bucket, |(kind, span)| kind.bucket(bucket, span))
    }

    /// Is it permits that are lent between regions?
    fn is_lent(&self) -> bool {
        self.policy.pooled && self.count.is_some() && !self.own
    }

    /// May what this region's reserve brings be another's for now?
    fn may_be_lent(&self) -> bool {
        self.policy.lends && !self.own
    }

    fn is_limited(&self) -> bool {
        self.limit.is_some() || self.count.is_some()
    }

    /// The keys and values that chose the bucket.
    fn entries<'r>(&'r self, request: &Request<'r>) -> impl Iterator<Item = Chosen<'r>> {
        let all = match request.subject {
            Subject::Attributes(attributes) => attributes,
            Subject::Descriptors(all) => all.get(self.charge.descriptor).map_or(&[][..], |d| d.entries),
        };
        let value = |key: &str| all.iter().find(|(k, _)| *k == key).map(|(_, value)| *value);
        self.policy.policy.matches.iter().filter_map(move |m| {
            Some(match &m.value {
                ValueMatch::Shared(prefix) => Chosen { key: &m.key, value: prefix, shared: true },
                _ => Chosen { key: &m.key, value: value(&m.key)?, shared: false },
            })
        })
    }

    fn enforced(&self) -> bool {
        !self.policy.policy.shadow
    }

    /// How long it may wait for a lease; 0: it may not.
    fn wait(&self) -> Micros {
        let strict = self.policy.policy.mode == Mode::Strict && self.tally.is_some() && !self.own;
        if strict && self.fits_ever() { self.policy.policy.wait } else { Micros::ZERO }
    }

    /// Could this region ever hold as much?
    fn fits_ever(&self) -> bool {
        self.charge.cost <= self.most()
    }

    /// The most that this region could ever hold: its reserve full, and all of the pool.
    fn most(&self) -> Tokens {
        self.shape().cap + self.policy.pool_full
    }

    fn unlimited(&self) -> LimitVerdict {
        LimitVerdict::unlimited(Terms::from(&*self.policy.policy), self.charge.descriptor)
    }

    fn counted(&self, seen: &Seen) -> LimitVerdict {
        LimitVerdict::counted(self.terms(), self.charge.descriptor, seen, Reason::OverLimit)
    }

    /// As the policy says it, unless the limit came with the descriptor.
    fn terms(&self) -> Terms<'_> {
        let terms = Terms::from(&*self.policy.policy);
        match self.limit {
            Some(Bound::Bucket(limit)) if self.own => Terms { limit: Some(limit.into()), ..terms },
            _ => terms,
        }
    }

    /// The window that it is charged in.
    fn turn(&self) -> Option<Turn> {
        match self.limit {
            Some(Bound::Quota(_, present)) => Some(present.turn),
            Some(Bound::Bucket(_)) | None => None,
        }
    }

    /// Its bucket in this region, without a lease.
    fn shape(&self) -> Shape {
        self.turn().map_or(self.policy.shape, |turn| self.policy.shape_in(turn))
    }

    fn take(&self) -> TakeCharge {
        let (shape, unseen) = match &self.limit {
            Some(Bound::Bucket(limit)) if self.own => {
                (Shape { rate: limit.rate().discount(DRIFT_PPM), cap: limit.burst() }, None)
            }
            Some(Bound::Quota(_, present)) => (self.shape(), Some(present.unseen)),
            _ => (self.policy.shape, self.policy.unseen),
        };
        let (bucket, cost) = (self.charge.bucket, self.charge.cost);
        TakeCharge { bucket, shape, unseen, cost, enforce: self.enforced() }
    }

    fn take_count(&self) -> Option<CountCharge> {
        let (kind, span) = self.count?;
        Some(CountCharge {
            bucket: self.bucket(),
            kind,
            allowance: self.policy.allowance(span),
            cost: self.charge.cost,
            act: self.act,
            enforce: self.enforced(),
        })
    }
}

/// Finds the policies of a request's charges, and the windows that they are in. A charge whose policy is not among the active
/// ones cannot be: they are compiled together. `None`: nobody can say which window it is.
fn hold<'a>(active: &'a Active, matched: &Matched, time: &TimeOfDay) -> Option<Vec<Held<'a>>> {
    let mut all = Vec::with_capacity(matched.charges.len());
    for charge in &matched.charges {
        let policy = charge.policy().map_or(Some(&active.overrides), |id| active.policy(id));
        let Some(policy) = policy else { continue };
        let (mut charge, name) = (*charge, charge.bucket);
        let (limit, own) = match (charge.limit, &policy.policy.limit) {
            (ChargeLimit::Override { limit, .. }, _) => (Some(Bound::Bucket(limit)), true),
            (ChargeLimit::Policy(_), Limit::TokenBucket(bucket)) => (Some(Bound::Bucket(*bucket)), false),
            (ChargeLimit::Policy(_), Limit::Quota(quota)) if policy.window.is_some() => {
                let present = time.present(quota.per)?;
                charge.bucket = window_bucket(charge.bucket, quota.per, present.turn.start);
                (Some(Bound::Quota(*quota, present)), false)
            }
            (ChargeLimit::Policy(_), Limit::Unlimited | Limit::Quota(_) | Limit::Concurrent(_)) => {
                (None, false)
            }
        };
        let count = policy.count.filter(|_| !own);
        all.push(Held {
            charge,
            name,
            policy,
            limit,
            count,
            act: Act::Count,
            own,
            tally: None,
            unanswered: false,
            lasts: None,
        });
    }
    Some(all)
}

fn take_of<'h, 'a: 'h>(held: impl Iterator<Item = &'h Held<'a>> + Clone) -> Take {
    Take {
        charges: held.clone().filter(|h| h.limit.is_some()).map(Held::take).collect(),
        counts: held.filter_map(Held::take_count).collect(),
    }
}
