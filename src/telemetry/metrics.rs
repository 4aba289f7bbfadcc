//! Metrics: one registry a daemon (many daemons fit in one process), every name in [`TABLE`].
//!
//! No metric has a label for each bucket or tenant: what callers choose freely must not grow a registry.

use crate::quota::policy::Mode;
use crate::quota::verdict::{LimitVerdict, Reason};
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Metric, Registry, Unit};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A metric's name (without the suffixes of its kind) and what it tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// Its name.
    pub name: &'static str,
    /// What it tells.
    pub help: &'static str,
}

macro_rules! table {
    ($($constant:ident: $name:literal, $help:literal;)*) => {
        $(const $constant: Described = Described { name: $name, help: $help };)*
        /// Every metric of a daemon.
        pub const TABLE: &[Described] = &[$($constant),*];
    };
}

table! {
    DECISIONS: "quorate_decisions", "Answers of limits, by policy, result and reason";
    UNMATCHED: "quorate_unmatched", "Descriptors that no policy matched, by domain (the first 100 domains; then `other`)";
    BAD_REQUESTS: "quorate_bad_requests", "Requests that could not be checked as they were, by protocol";
    DECISION: "quorate_decision", "Time from a request read to its answer";
    CONNECTIONS: "quorate_connections", "Open connections of callers, by protocol";
    CONNECTIONS_REFUSED: "quorate_connections_refused", "Connections of callers that were hung up on because their address had too many, by protocol";
    UNAUTHENTICATED: "quorate_unauthenticated", "Requests of callers without a token that may ask, by protocol";
    REQUESTS_TIMED_OUT: "quorate_requests_timed_out", "Requests that were not answered in time, by protocol";
    STORE_ERRORS: "quorate_store_errors", "Store calls that gave no answer, by kind (unavailable, unknown, fenced)";
    STORE_CALL: "quorate_store_call", "Time of a store call";
    STORE_ATTACHED: "quorate_store_attached", "1: the store serves this daemon";
    STORE_SESSIONS: "quorate_store_sessions", "Sessions begun with the store: the daemon started, or the store lost its data";
    WAITS: "quorate_waits", "Requests that waited for a lease, by outcome (met, denied)";
    WAITING: "quorate_waiting", "Requests that wait for a lease now";
    ASKS: "quorate_asks", "Asks sent to the pool";
    PROPOSALS: "quorate_proposals", "Proposals to the log, by outcome (applied, refused, unknown)";
    RECORDS: "quorate_records", "The pool's records installed in buckets";
    RAFT_TERM: "quorate_raft_term", "The current term";
    RAFT_LEADER: "quorate_raft_leader", "1: this region leads";
    RAFT_APPLIED: "quorate_raft_applied", "Index of the last applied entry";
    RAFT_AGE: "quorate_raft_stamp_age", "Age of the newest stamp of the Raft clock";
    PEER_REACHABLE: "quorate_peer_reachable", "1: the last exchange with the region succeeded";
    POOL_BREACHES: "quorate_pool_breaches", "Buckets whose books did not balance: a person must look";
    POLICIES_VERSION: "quorate_policies_version", "Version of the policies in force";
    NEW_BUCKETS_REFUSED: "quorate_new_buckets_refused", "Buckets that were not made because a caller brought too many, or the store holds too many keys";
    STORED: "quorate_stored_keys", "Keys in the store, as it said last";
    BUCKETS: "quorate_buckets", "Buckets that the slow loop follows";
    READY: "quorate_ready", "1: ready";
}

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

/// All metrics of one daemon. Share it in an `Arc`.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    decisions: Family<DecisionLabels, Counter>,
    unmatched: Family<DomainLabel, Counter>,
    domains: Mutex<HashSet<Box<str>>>,
    bad_requests: [Counter; 3],
    timed_out: [Counter; 3],
    connections: [Gauge; 3],
    connections_refused: [Counter; 3],
    unauthenticated: [Counter; 3],
    store_errors: Family<KindLabel, Counter>,
    waits: Family<OutcomeLabel, Counter>,
    proposals: Family<OutcomeLabel, Counter>,
    peers: Family<RegionLabel, Gauge>,
    /// Time from a request read to its answer.
    pub decision: Latency,
    /// Time of a store call.
    pub store_call: Latency,
    /// 1: the store serves this daemon.
    pub store_attached: Gauge,
    /// Sessions begun with the store.
    pub store_sessions: Counter,
    /// Requests that wait for a lease now.
    pub waiting: Gauge,
    /// Asks sent to the pool.
    pub asks: Counter,
    /// Records installed in buckets.
    pub records: Counter,
    /// The current term.
    pub raft_term: Gauge,
    /// 1: this region leads.
    pub raft_leader: Gauge,
    /// Index of the last applied entry.
    pub raft_applied: Gauge,
    /// Age of the Raft clock's newest stamp, in seconds.
    pub raft_age: Gauge<f64, AtomicU64>,
    /// Buckets whose books did not balance.
    pub pool_breaches: Counter,
    /// Version of the policies in force.
    pub policies_version: Gauge,
    new_buckets_refused: Counter,
    /// Keys in the store, as it said last.
    pub stored: Gauge,
    /// Buckets that the slow loop follows.
    pub buckets: Gauge,
    /// 1: ready.
    pub ready: Gauge,
}

/// The counters of one policy, looked up once: counting is one atomic addition.
#[derive(Clone, Debug)]
pub struct PolicyMetrics {
    allowed: [Counter; Reason::ALL.len()],
    denied: [Counter; Reason::ALL.len()],
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
        Self {
            decisions: add(r, DECISIONS, Family::default()),
            unmatched: add(r, UNMATCHED, Family::default()),
            domains: Mutex::default(),
            bad_requests: PROTOCOLS.map(|p| bad_requests.get_or_create_owned(&p)),
            timed_out: PROTOCOLS.map(|p| timed_out.get_or_create_owned(&p)),
            connections: PROTOCOLS.map(|p| connections.get_or_create_owned(&p)),
            connections_refused: PROTOCOLS.map(|p| refused.get_or_create_owned(&p)),
            unauthenticated: PROTOCOLS.map(|p| unauthenticated.get_or_create_owned(&p)),
            store_errors: add(r, STORE_ERRORS, Family::default()),
            waits: add(r, WAITS, Family::default()),
            proposals: add(r, PROPOSALS, Family::default()),
            peers: add(r, PEER_REACHABLE, Family::default()),
            decision: add_seconds(r, DECISION, Latency::default()),
            store_call: add_seconds(r, STORE_CALL, Latency::default()),
            store_attached: add(r, STORE_ATTACHED, Gauge::default()),
            store_sessions: add(r, STORE_SESSIONS, Counter::default()),
            waiting: add(r, WAITING, Gauge::default()),
            asks: add(r, ASKS, Counter::default()),
            records: add(r, RECORDS, Counter::default()),
            raft_term: add(r, RAFT_TERM, Gauge::default()),
            raft_leader: add(r, RAFT_LEADER, Gauge::default()),
            raft_applied: add(r, RAFT_APPLIED, Gauge::default()),
            raft_age: add_seconds(r, RAFT_AGE, Gauge::default()),
            pool_breaches: add(r, POOL_BREACHES, Counter::default()),
            policies_version: add(r, POLICIES_VERSION, Gauge::default()),
            new_buckets_refused: add(r, NEW_BUCKETS_REFUSED, Counter::default()),
            stored: add(r, STORED, Gauge::default()),
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
        PolicyMetrics { allowed: counters(ALLOWED), denied: counters(DENIED) }
    }

    /// Drops the counters of a policy that is no more.
    pub fn forget_policy(&self, name: &str, mode: Mode) {
        for reason in Reason::ALL {
            self.decisions.remove(&labels(name, mode, ALLOWED, reason));
            self.decisions.remove(&labels(name, mode, DENIED, reason));
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

    /// A request waited for a lease: `met` or `denied`.
    pub fn waited(&self, outcome: &'static str) {
        self.waits.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// A proposal was `applied`, `refused`, or its outcome is `unknown`.
    pub fn proposed(&self, outcome: &'static str) {
        self.proposals.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// So many buckets were not made.
    pub fn new_buckets_refused(&self, count: usize) {
        self.new_buckets_refused.inc_by(u64::try_from(count).unwrap_or(u64::MAX));
    }

    /// Could another region be reached?
    pub fn peer(&self, peer: &str, reachable: bool) {
        self.peers.get_or_create(&RegionLabel { peer: peer.to_owned() }).set(i64::from(reachable));
    }

    /// Everything, as OpenMetrics text.
    ///
    /// # Errors
    /// A metric could not be written: a bug.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::with_capacity(16 * 1024);
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

impl PolicyMetrics {
    /// Counts an answer.
    pub fn count(&self, verdict: &LimitVerdict) {
        let counters = if verdict.allowed { &self.allowed } else { &self.denied };
        counters[verdict.reason as usize].inc();
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

/// Upper bounds of the buckets of [`Latency`], in microseconds; above the last there is one more.
const BOUNDS_US: [u64; 12] =
    [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 50_000, 100_000, 250_000, 1_000_000];
/// Threads that observe at once spread over so many copies.
const SHARDS: usize = 8;

/// A coarse histogram of durations. Observing costs two atomic additions on memory that (usually) no other thread
/// writes: a lock here would be the only one that all workers share.
#[derive(Clone, Debug)]
pub struct Latency(Arc<[Shard; SHARDS]>);

#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    counts: [AtomicU64; BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl Latency {
    /// Counts one.
    pub fn observe(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.iter().position(|&bound| us <= bound).unwrap_or(BOUNDS_US.len());
        let shard = &self.0[MY_SHARD.with(|s| *s) % SHARDS];
        shard.counts[bucket].fetch_add(1, Ordering::Relaxed);
        shard.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// How many were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().flat_map(|s| &s.counts).map(|c| c.load(Ordering::Relaxed)).sum()
    }
}

impl Default for Latency {
    fn default() -> Self {
        Self(Arc::new(std::array::from_fn(|_| Shard::default())))
    }
}

impl TypedMetric for Latency {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Latency {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        let bound = |i: usize| BOUNDS_US.get(i).map_or(f64::INFINITY, |&us| us as f64 / 1e6);
        let buckets: [(f64, u64); BOUNDS_US.len() + 1] = std::array::from_fn(|i| {
            (bound(i), self.0.iter().map(|s| s.counts[i].load(Ordering::Relaxed)).sum())
        });
        let sum_us: u64 =
            self.0.iter().map(|s| s.sum_us.load(Ordering::Relaxed)).fold(0, u64::saturating_add);
        let count = buckets.iter().map(|(_, n)| n).sum();
        encoder.encode_histogram::<NoLabelSet>(sum_us as f64 / 1e6, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

static NEXT_SHARD: AtomicUsize = AtomicUsize::new(0);
thread_local! {
    static MY_SHARD: usize = NEXT_SHARD.fetch_add(1, Ordering::Relaxed);
}

const ALLOWED: &str = "allowed";
const DENIED: &str = "denied";
const PROTOCOLS: [ProtocolLabel; 3] = [
    ProtocolLabel { protocol: "http" },
    ProtocolLabel { protocol: "grpc" },
    ProtocolLabel { protocol: "admin" },
];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    policy: String,
    mode: &'static str,
    result: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DomainLabel {
    domain: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProtocolLabel {
    protocol: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RegionLabel {
    peer: String,
}

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

fn add<M: Metric + Clone>(registry: &mut Registry, described: Described, metric: M) -> M {
    registry.register(described.name, described.help, metric.clone());
    metric
}

fn add_seconds<M: Metric + Clone>(registry: &mut Registry, described: Described, metric: M) -> M {
    registry.register_with_unit(described.name, described.help, Unit::Seconds, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::policy::{OnStoreFailure, Policy, Reserve};
    use crate::quota::verdict::LimitVerdict;

    #[test]
    fn every_metric_is_in_the_text() {
        let metrics = Metrics::new("us-east");
        // Families are not in the text before something has been counted.
        metrics.unmatched("d");
        metrics.store_error("unknown");
        metrics.waited("met");
        metrics.proposed("applied");
        metrics.peer("eu-west", true);
        let _ = metrics.policy("p", Mode::Strict);
        let text = metrics.encode().unwrap();
        for described in TABLE {
            assert!(text.contains(&format!("# HELP {}", described.name)), "{}", described.name);
        }
        assert!(text.ends_with("# EOF\n"));
        assert!(text.contains("quorate_raft_term{region=\"us-east\"} 0"), "{text}");
    }

    #[test]
    fn decisions_are_counted_by_reason() {
        let policy = Policy {
            name: "p".into(),
            domain: "d".into(),
            matches: Vec::new(),
            limit: crate::quota::policy::Limit::Unlimited,
            mode: Mode::Split,
            reserve: Reserve::default(),
            weights: std::collections::BTreeMap::new(),
            wait: crate::quota::amount::Micros::ZERO,
            on_store_failure: OnStoreFailure::Deny,
            shadow: false,
        };
        let metrics = Metrics::new("r");
        let counters = metrics.policy("p", Mode::Split);
        let ok = LimitVerdict::unlimited((&policy).into(), 0);
        counters.count(&ok);
        counters.count(&LimitVerdict { allowed: false, reason: Reason::OverLimit, ..ok.clone() });
        counters.count(&LimitVerdict { allowed: false, reason: Reason::OverLimit, ..ok });
        assert_eq!((counters.admitted(), counters.denied()), (1, 2));
        let line = "quorate_decisions_total{region=\"r\",policy=\"p\",mode=\"split\",result=\"denied\",reason=\"over_limit\"} 2";
        assert!(metrics.encode().unwrap().contains(line));
        metrics.forget_policy("p", Mode::Split);
        assert!(!metrics.encode().unwrap().contains("policy=\"p\""));
    }

    #[test]
    fn callers_cannot_grow_the_registry() {
        let metrics = Metrics::new("r");
        for i in 0..10_000 {
            metrics.unmatched(&format!("domain-{i}"));
        }
        let text = metrics.encode().unwrap();
        assert_eq!(text.matches("quorate_unmatched_total{").count(), DOMAINS_MAX + 1);
        assert!(text.contains("domain=\"other\"} 9900"));
    }

    #[test]
    fn latencies_fall_into_their_buckets() {
        let metrics = Metrics::new("r");
        for us in [50, 100, 101, 30_000, 5_000_000] {
            metrics.decision.observe(Duration::from_micros(us));
        }
        let text = metrics.encode().unwrap();
        for line in [
            "quorate_decision_seconds_bucket{region=\"r\",le=\"0.0001\"} 2",
            "quorate_decision_seconds_bucket{region=\"r\",le=\"0.00025\"} 3",
            "quorate_decision_seconds_bucket{region=\"r\",le=\"0.05\"} 4",
            "quorate_decision_seconds_bucket{region=\"r\",le=\"+Inf\"} 5",
            "quorate_decision_seconds_count{region=\"r\"} 5",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
        assert_eq!(metrics.decision.count(), 5);
    }
}
