//! Metrics: one registry a daemon (many daemons fit in one process), every name in [`TABLE`] and in `docs/metrics.md`.
//!
//! Counting never takes a lock or looks a label up: whoever counts holds the counter. No metric has a label for each bucket or
//! tenant without a bound: what callers choose freely must not grow a registry.

mod kinds;
mod labels;
mod process;
mod table;
#[cfg(test)]
mod tests;

pub use kinds::{Histogram, Reading, Reported, TokenCounter};
pub use labels::{BucketResult, PolicyLabel, PolicyOf, PolicyPart, RegionLabel};
pub use table::{Described, TABLE};

use super::repeats;
use crate::quota::amount::Tokens;
use crate::quota::policy::{Mode, OnStoreFailure};
use crate::quota::verdict::{LimitVerdict, Reason};
use labels::{
    ActionLabel, AnswerLabels, CheckLabel, CostLabels, DecisionLabels, DomainLabel, KindLabel, LevelLabel,
    OperationLabel, OutcomeLabel, ProtocolLabel, VersionLabel, WaitLabels,
};
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};
use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use table::*;

/// How many domains [`Metrics::unmatched`] tells apart.
const DOMAINS_MAX: usize = 100;

/// Who called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// HTTP.
    Http,
    /// gRPC.
    Grpc,
    /// The admin listener.
    Admin,
}

/// What a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answered {
    /// Yes.
    Allowed,
    /// No.
    Denied,
    /// It could not be checked as it was.
    Refused,
}

/// The checks of the promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Check {
    /// The pool's own, at every entry: the books of a bucket.
    Books,
    /// The live walk through the pool: what regions may hold of a bucket, against its limit.
    Committed,
    /// What the store says of a bucket: its level, against its overdraft.
    Level,
    /// What this region admitted of a bucket, against the whole limit.
    Admitted,
}

/// How a wait for a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Waited {
    /// With a lease that was enough.
    Granted,
    /// There was nothing to be had.
    Denied,
    /// Nothing came in time.
    TimedOut,
}

impl Waited {
    /// Its name in metrics and spans.
    #[must_use]
    pub fn name(self) -> &'static str {
        OUTCOMES[self as usize]
    }
}

/// The calls of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StoreCall {
    /// Requests take tokens.
    Take,
    /// Which of some buckets are there, and how many in all.
    Known,
    /// The slow loop gives up what it is about to hand back.
    Prepare,
    /// The slow loop puts leases into buckets.
    Install,
    /// The session's heartbeat.
    Beat,
}

/// All metrics of one daemon. Share it in an `Arc`.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    decisions: Family<DecisionLabels, Counter>,
    cost: Family<CostLabels, TokenCounter>,
    waits: Family<WaitLabels, Histogram, fn() -> Histogram>,
    fallbacks: Family<ActionLabel, Counter>,
    unmatched: Family<DomainLabel, Counter>,
    domains: Mutex<HashSet<Box<str>>>,
    bad_requests: [Counter; 3],
    timed_out: [Counter; 3],
    connections: [Gauge; 3],
    connections_refused: [Counter; 3],
    unauthenticated: [Counter; 3],
    decision: [[Histogram; 3]; 2],
    breaches: [Counter; 4],
    store_errors: Family<KindLabel, Counter>,
    proposals: Family<OutcomeLabel, Counter>,
    process: process::Process,
    log_events: Reported<LevelLabel>,
    log_suppressed: Reading,
    spans: Reported<OutcomeLabel>,
    /// The store's own; see [`StoreMetrics`].
    pub store: StoreMetrics,
    /// The log's own; see [`RaftMetrics`].
    pub raft: RaftMetrics,
    /// About the pool's buckets; see [`PoolMetrics`].
    pub pool: PoolMetrics,
    /// Tokens of the hottest buckets.
    pub hot: Reported<BucketResult>,
    /// Could another region be reached?
    pub peers: Reported<RegionLabel>,
    /// Round trips to other regions, in seconds.
    pub peer_rtt: Reported<RegionLabel>,
    /// Entries that other regions' logs are behind.
    pub raft_follower_lag: Reported<RegionLabel>,
    /// 1: the store serves this daemon.
    pub store_attached: Gauge,
    /// Sessions begun with the store.
    pub store_sessions: Counter,
    /// Requests that wait for a lease now.
    pub waiting: Gauge,
    /// Asks sent to the pool.
    pub asks: Counter,
    /// From an ask to its lease.
    pub ask: Histogram,
    /// Records installed in buckets.
    pub records: Counter,
    /// From a proposal of this region to its answer.
    pub proposal: Histogram,
    /// The current term.
    pub raft_term: Gauge,
    /// 1: this region leads.
    pub raft_leader: Gauge,
    /// Times that another leader was seen than before.
    pub raft_leader_changes: Counter,
    /// Index of the last entry.
    pub raft_last: Gauge,
    /// Index of the last entry known to be committed.
    pub raft_committed: Gauge,
    /// Index of the last applied entry.
    pub raft_applied: Gauge,
    /// Index of the last entry in the newest snapshot.
    pub raft_snapshot: Gauge,
    /// Committed entries that are still to be applied.
    pub raft_lag: Gauge,
    /// Leader only: seconds since a quorum acknowledged it.
    pub raft_quorum_age: Reading,
    /// Age of the Raft clock's newest stamp, in seconds.
    pub raft_age: Gauge<f64, AtomicU64>,
    /// Version of the policies in force.
    pub policies_version: Gauge,
    new_buckets_refused: Counter,
    /// Requests that were denied without asking the store.
    pub denials_from_memory: Counter,
    /// 1: no change of policies or regions is under way.
    pub policies_settled: Gauge,
    /// Buckets that the slow loop follows.
    pub buckets: Gauge,
    /// 1: ready.
    pub ready: Gauge,
}

/// What a store measures itself. Clones are the same.
#[derive(Clone, Debug)]
pub struct StoreMetrics {
    calls: [Histogram; 5],
    /// Worker threads that do without the store now.
    pub breakers: Gauge,
    /// Times that one began to.
    pub breaker_opened: Counter,
    /// Requests in one call that takes tokens.
    pub batch: Histogram,
    /// Keys of this region, estimated.
    pub keys: Reading,
    /// Bytes that they take, estimated.
    pub memory: Reading,
    /// Keys in Redis' database.
    pub redis_keys: Reading,
    /// Bytes that Redis uses.
    pub redis_memory: Reading,
    /// Bytes that Redis may use.
    pub redis_memory_max: Reading,
    /// Keys that Redis has evicted.
    pub redis_evicted: Reading,
}

/// What the replicated log measures itself. Clones are the same.
#[derive(Clone, Debug)]
pub struct RaftMetrics {
    /// Leader: from closing an entry to its being applied.
    pub commit: Histogram,
    /// Leader: operations in one entry.
    pub operations: Histogram,
}

/// What the live walk through the pool and the region's buckets finds. Clones are the same.
#[derive(Clone, Debug)]
pub struct PoolMetrics {
    /// Most of any bucket that regions may hold, of its limit.
    pub committed: Reported<PolicyOf>,
    /// Buckets whose books did not balance.
    pub frozen: Reported<PolicyLabel>,
    /// Burst and overshoot of a bucket.
    pub bound: Reported<PolicyLabel>,
    /// Rate of a bucket.
    pub bound_rate: Reported<PolicyLabel>,
    /// The most that any bucket here is below zero.
    pub overdraft: Reported<PolicyLabel>,
    /// The most that it may be.
    pub overdraft_bound: Reported<PolicyLabel>,
    /// Buckets with books.
    pub buckets: Reported<PolicyLabel>,
    /// Their burst.
    pub tokens: Reported<PolicyPart>,
    /// Their rate.
    pub rates: Reported<PolicyPart>,
    /// What could be lent.
    pub level: Reported<PolicyLabel>,
    /// Age of the oldest of these figures, in seconds.
    pub walk_age: Gauge<f64, AtomicU64>,
}

/// The counters of one policy, looked up once: counting is a few atomic additions.
#[derive(Clone, Debug)]
pub struct PolicyMetrics {
    allowed: [Counter; Reason::ALL.len()],
    denied: [Counter; Reason::ALL.len()],
    cost: [TokenCounter; 2],
    fallbacks: [Counter; ACTIONS.len()],
    /// Only strict requests wait.
    waits: Option<[Histogram; OUTCOMES.len()]>,
}

impl Metrics {
    /// All at zero, for one region's daemon.
    #[must_use]
    pub fn new(region: &str) -> Self {
        let mut registry = Registry::with_labels([("region".into(), region.to_owned().into())].into_iter());
        let r = &mut registry;
        let bad_requests = add(r, BAD_REQUESTS, Family::<ProtocolLabel, Counter>::default());
        let timed_out = add(r, REQUESTS_TIMED_OUT, Family::<ProtocolLabel, Counter>::default());
        let refused = add(r, CONNECTIONS_REFUSED, Family::<ProtocolLabel, Counter>::default());
        let unauthenticated = add(r, UNAUTHENTICATED, Family::<ProtocolLabel, Counter>::default());
        let connections = add(r, CONNECTIONS, Family::<ProtocolLabel, Gauge>::default());
        let breaches = add(r, BREACHES, Family::<CheckLabel, Counter>::default());
        let decision = add_seconds(r, DECISION, family::<AnswerLabels>(Histogram::times));
        let store_errors = add(r, STORE_ERRORS, Family::<KindLabel, Counter>::default());
        let proposals = add(r, PROPOSALS, Family::<OutcomeLabel, Counter>::default());
        for kind in ["unavailable", "timeout", "fenced"] {
            drop(store_errors.get_or_create(&KindLabel { kind }));
        }
        for outcome in ["applied", "not_sent", "unknown", "refused", "too_large"] {
            drop(proposals.get_or_create(&OutcomeLabel { outcome }));
        }
        let build = add(r, BUILD, Reported::gauges());
        build.set(vec![(VersionLabel { version: env!("CARGO_PKG_VERSION") }, 1.0)]);
        Self {
            decisions: add(r, DECISIONS, Family::default()),
            cost: add(r, COST, Family::default()),
            waits: add_seconds(r, WAIT, family(Histogram::rare_times)),
            fallbacks: add(r, FALLBACKS, Family::default()),
            unmatched: add(r, UNMATCHED, Family::default()),
            domains: Mutex::default(),
            bad_requests: PROTOCOLS.map(|p| bad_requests.get_or_create_owned(&p)),
            timed_out: PROTOCOLS.map(|p| timed_out.get_or_create_owned(&p)),
            connections: PROTOCOLS.map(|p| connections.get_or_create_owned(&p)),
            connections_refused: PROTOCOLS.map(|p| refused.get_or_create_owned(&p)),
            unauthenticated: PROTOCOLS.map(|p| unauthenticated.get_or_create_owned(&p)),
            decision: ["http", "grpc"].map(|protocol| {
                ANSWERS.map(|result| decision.get_or_create_owned(&AnswerLabels { protocol, result }))
            }),
            breaches: CHECKS.map(|check| breaches.get_or_create_owned(&CheckLabel { check })),
            store_errors,
            proposals,
            process: process::Process::register(r),
            log_events: add(r, LOG_EVENTS, Reported::counters()),
            log_suppressed: add(r, LOG_SUPPRESSED, Reading::counter()),
            spans: add(r, SPANS, Reported::counters()),
            store: StoreMetrics::register(r),
            raft: RaftMetrics::register(r),
            pool: PoolMetrics::register(r),
            hot: add(r, HOT, Reported::counters()),
            peers: add(r, PEER_REACHABLE, Reported::gauges()),
            peer_rtt: add_seconds(r, PEER_RTT, Reported::gauges()),
            raft_follower_lag: add(r, RAFT_FOLLOWER_LAG, Reported::gauges()),
            store_attached: add(r, STORE_ATTACHED, Gauge::default()),
            store_sessions: add(r, STORE_SESSIONS, Counter::default()),
            waiting: add(r, WAITING, Gauge::default()),
            asks: add(r, ASKS, Counter::default()),
            ask: add_seconds(r, ASK, Histogram::rare_times()),
            records: add(r, RECORDS, Counter::default()),
            proposal: add_seconds(r, PROPOSAL, Histogram::rare_times()),
            raft_term: add(r, RAFT_TERM, Gauge::default()),
            raft_leader: add(r, RAFT_LEADER, Gauge::default()),
            raft_leader_changes: add(r, RAFT_LEADER_CHANGES, Counter::default()),
            raft_last: add(r, RAFT_LAST, Gauge::default()),
            raft_committed: add(r, RAFT_COMMITTED, Gauge::default()),
            raft_applied: add(r, RAFT_APPLIED, Gauge::default()),
            raft_snapshot: add(r, RAFT_SNAPSHOT, Gauge::default()),
            raft_lag: add(r, RAFT_LAG, Gauge::default()),
            raft_quorum_age: add_seconds(r, RAFT_QUORUM_AGE, Reading::gauge()),
            raft_age: add_seconds(r, RAFT_AGE, Gauge::default()),
            policies_version: add(r, POLICIES_VERSION, Gauge::default()),
            new_buckets_refused: add(r, NEW_BUCKETS_REFUSED, Counter::default()),
            denials_from_memory: add(r, DENIALS_FROM_MEMORY, Counter::default()),
            policies_settled: add(r, POLICIES_SETTLED, Gauge::default()),
            buckets: add(r, BUCKETS, Gauge::default()),
            ready: add(r, READY, Gauge::default()),
            registry,
        }
    }

    /// The counters of a policy. Look them up when policies change, not for each request.
    #[must_use]
    pub fn policy(&self, name: &str, mode: Mode) -> PolicyMetrics {
        let counters = |result: &'static str| {
            Reason::ALL.map(|reason| {
                if !can_be(result, reason) {
                    return Counter::default();
                }
                self.decisions.get_or_create_owned(&labels(name, mode, result, reason))
            })
        };
        let policy = || name.to_owned();
        PolicyMetrics {
            allowed: counters(ALLOWED),
            denied: counters(DENIED),
            cost: RESULTS.map(|result| self.cost.get_or_create_owned(&cost_labels(name, mode, result))),
            fallbacks: ACTIONS
                .map(|action| self.fallbacks.get_or_create_owned(&ActionLabel { policy: policy(), action })),
            waits: (mode == Mode::Strict).then(|| {
                OUTCOMES
                    .map(|outcome| self.waits.get_or_create_owned(&WaitLabels { policy: policy(), outcome }))
            }),
        }
    }

    /// Drops the counters of a policy that is no more.
    pub fn forget_policy(&self, name: &str, mode: Mode) {
        for reason in Reason::ALL {
            self.decisions.remove(&labels(name, mode, ALLOWED, reason));
            self.decisions.remove(&labels(name, mode, DENIED, reason));
        }
        let policy = || name.to_owned();
        for result in RESULTS {
            self.cost.remove(&cost_labels(name, mode, result));
        }
        for action in ACTIONS {
            self.fallbacks.remove(&ActionLabel { policy: policy(), action });
        }
        for outcome in OUTCOMES {
            self.waits.remove(&WaitLabels { policy: policy(), outcome });
        }
    }

    /// A descriptor of this domain matched no policy.
    pub fn unmatched(&self, domain: &str) {
        let mut domains = self.domains.lock().unwrap_or_else(PoisonError::into_inner);
        let known = domains.contains(domain)
            || (domains.len() < DOMAINS_MAX && domain.len() <= 128 && domains.insert(domain.into()));
        drop(domains);
        let domain = if known { domain } else { "other" };
        self.unmatched.get_or_create(&DomainLabel { domain: domain.to_owned() }).inc();
    }

    /// A request was answered so, so long after it had been read.
    pub fn decided(&self, protocol: Protocol, answer: Answered, time: Duration) {
        if let Some(histograms) = self.decision.get(protocol as usize) {
            histograms[answer as usize].observe(time);
        }
    }

    /// A check of the promise failed.
    pub fn breached(&self, check: Check) {
        self.breaches[check as usize].inc();
    }

    /// How many checks of the promise have failed.
    #[must_use]
    pub fn breaches(&self) -> u64 {
        self.breaches.iter().map(Counter::get).sum()
    }

    /// A request could not be checked as it was.
    pub fn bad_request(&self, protocol: Protocol) {
        self.bad_requests[protocol as usize].inc();
    }

    /// A request was not answered in time.
    pub fn timed_out(&self, protocol: Protocol) {
        self.timed_out[protocol as usize].inc();
    }

    /// How many connections are open.
    #[must_use]
    pub fn connections(&self, protocol: Protocol) -> &Gauge {
        &self.connections[protocol as usize]
    }

    /// Connections that were hung up on because their address had too many.
    #[must_use]
    pub fn connections_refused(&self, protocol: Protocol) -> &Counter {
        &self.connections_refused[protocol as usize]
    }

    /// A request came without a token that may ask.
    pub fn unauthenticated(&self, protocol: Protocol) {
        self.unauthenticated[protocol as usize].inc();
    }

    /// A store call gave no answer.
    pub fn store_error(&self, kind: &'static str) {
        self.store_errors.get_or_create(&KindLabel { kind }).inc();
    }

    /// A proposal was `applied`, `refused`, or its outcome is `unknown`.
    pub fn proposed(&self, outcome: &'static str) {
        self.proposals.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// So many buckets were not made.
    pub fn new_buckets_refused(&self, count: usize) {
        self.new_buckets_refused.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
    }

    /// Everything, as OpenMetrics text.
    ///
    /// # Errors
    /// A metric could not be written: a bug.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        self.write(text::encode)
    }

    /// Everything, in the Prometheus text format 0.0.4, for those who do not read OpenMetrics.
    ///
    /// # Errors
    /// A metric could not be written: a bug.
    pub fn encode_plain(&self) -> Result<String, std::fmt::Error> {
        self.write(prometheus_text::encode)
    }

    fn write(
        &self,
        encode: impl FnOnce(&mut String, &Registry) -> std::fmt::Result,
    ) -> Result<String, std::fmt::Error> {
        self.process.read();
        let process = repeats::counts();
        let level = |level, count| (LevelLabel { level }, count as f64);
        self.log_events.set(vec![level("warn", process.warnings), level("error", process.errors)]);
        self.log_suppressed.set(Some(process.suppressed as f64));
        let (exported, lost) = super::export::counts();
        let span = |outcome, count| (OutcomeLabel { outcome }, count as f64);
        self.spans.set(vec![span("exported", exported), span("lost", lost)]);
        let mut out = String::with_capacity(32 * 1024);
        encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

impl StoreMetrics {
    fn register(r: &mut Registry) -> Self {
        let calls = add_seconds(r, STORE_CALL, family::<OperationLabel>(Histogram::times));
        let operations = ["take", "known", "prepare", "install", "beat"];
        Self {
            calls: operations.map(|operation| calls.get_or_create_owned(&OperationLabel { operation })),
            breakers: add(r, STORE_BREAKERS, Gauge::default()),
            breaker_opened: add(r, STORE_BREAKER_OPENED, Counter::default()),
            batch: add(r, STORE_BATCH, Histogram::sizes()),
            keys: add(r, STORE_KEYS, Reading::gauge()),
            memory: add_bytes(r, STORE_MEMORY, Reading::gauge()),
            redis_keys: add(r, REDIS_KEYS, Reading::gauge()),
            redis_memory: add_bytes(r, REDIS_MEMORY, Reading::gauge()),
            redis_memory_max: add_bytes(r, REDIS_MEMORY_MAX, Reading::gauge()),
            redis_evicted: add(r, REDIS_EVICTED, Reading::counter()),
        }
    }

    /// A worker thread does without the store from now on ...
    pub fn breaker_opened(&self) {
        self.breakers.inc();
        self.breaker_opened.inc();
    }

    /// ... and with it again.
    pub fn breaker_closed(&self) {
        self.breakers.dec();
    }

    /// A call took so long.
    pub fn called(&self, call: StoreCall, time: Duration) {
        self.calls[call as usize].observe(time);
    }
}

impl RaftMetrics {
    fn register(r: &mut Registry) -> Self {
        Self {
            commit: add_seconds(r, RAFT_COMMIT, Histogram::rare_times()),
            operations: add(r, RAFT_OPERATIONS, Histogram::sizes()),
        }
    }
}

impl PoolMetrics {
    fn register(r: &mut Registry) -> Self {
        Self {
            committed: add(r, COMMITTED, Reported::gauges()),
            frozen: add(r, FROZEN, Reported::gauges()),
            bound: add(r, BOUND, Reported::gauges()),
            bound_rate: add(r, BOUND_RATE, Reported::gauges()),
            overdraft: add(r, OVERDRAFT, Reported::gauges()),
            overdraft_bound: add(r, OVERDRAFT_BOUND, Reported::gauges()),
            buckets: add(r, POOL_BUCKETS, Reported::gauges()),
            tokens: add(r, POOL_TOKENS, Reported::gauges()),
            rates: add(r, POOL_RATE, Reported::gauges()),
            level: add(r, POOL_LEVEL, Reported::gauges()),
            walk_age: add_seconds(r, POOL_WALK_AGE, Gauge::default()),
        }
    }
}

impl PolicyMetrics {
    /// Counts an answer to a request of this cost.
    pub fn count(&self, verdict: &LimitVerdict, cost: Tokens) {
        let counters = if verdict.allowed { &self.allowed } else { &self.denied };
        counters[verdict.reason as usize].inc();
        self.cost[usize::from(!verdict.allowed)].add(u64::try_from(cost.0).unwrap_or(0));
    }

    /// It answered without the store, as it says.
    pub fn fell_back(&self, action: OnStoreFailure) {
        let action = match action {
            OnStoreFailure::Allow => 0,
            OnStoreFailure::Deny => 1,
            OnStoreFailure::Local => 2,
        };
        self.fallbacks[action].inc();
    }

    /// A request waited for a lease.
    pub fn waited(&self, outcome: Waited, time: Duration) {
        if let Some(waits) = &self.waits {
            waits[outcome as usize].observe(time);
        }
    }

    /// How many answers let the request through.
    #[must_use]
    pub fn admitted(&self) -> u64 {
        self.allowed.iter().map(Counter::get).fold(0, u64::saturating_add)
    }

    /// How many did not.
    #[must_use]
    pub fn denied(&self) -> u64 {
        self.denied.iter().map(Counter::get).fold(0, u64::saturating_add)
    }
}

const ALLOWED: &str = "allowed";
const DENIED: &str = "denied";
const RESULTS: [&str; 2] = [ALLOWED, DENIED];
const ANSWERS: [&str; 3] = [ALLOWED, DENIED, "refused"];
const ACTIONS: [&str; 3] = ["allow", "deny", "local"];
const OUTCOMES: [&str; 3] = ["granted", "denied", "timed_out"];
const CHECKS: [&str; 4] = ["books", "committed", "level", "admitted"];
const PROTOCOLS: [ProtocolLabel; 3] = [
    ProtocolLabel { protocol: "http" },
    ProtocolLabel { protocol: "grpc" },
    ProtocolLabel { protocol: "admin" },
];

/// Which answers there are.
fn can_be(result: &str, reason: Reason) -> bool {
    match reason {
        Reason::Ok | Reason::Shadow => result == ALLOWED,
        Reason::OverLimit | Reason::NoLease | Reason::TooManyBuckets => result == DENIED,
        Reason::StoreUnavailable => true,
    }
}

fn labels(name: &str, mode: Mode, result: &'static str, reason: Reason) -> DecisionLabels {
    DecisionLabels { policy: name.to_owned(), mode: mode.name(), result, reason: reason.name() }
}

fn cost_labels(name: &str, mode: Mode, result: &'static str) -> CostLabels {
    CostLabels { policy: name.to_owned(), mode: mode.name(), result }
}

fn family<L: Clone + std::hash::Hash + Eq>(
    make: fn() -> Histogram,
) -> Family<L, Histogram, fn() -> Histogram> {
    Family::new_with_constructor(make)
}

fn add<M: Metric + Clone>(registry: &mut Registry, described: Described, metric: M) -> M {
    registry.register(described.name, described.help, metric.clone());
    metric
}

fn add_seconds<M: Metric + Clone>(registry: &mut Registry, described: Described, metric: M) -> M {
    registry.register_with_unit(described.name, described.help, Unit::Seconds, metric.clone());
    metric
}

fn add_bytes<M: Metric + Clone>(registry: &mut Registry, described: Described, metric: M) -> M {
    registry.register_with_unit(described.name, described.help, Unit::Bytes, metric.clone());
    metric
}
