//! Kinds of metrics that the library does not have: histograms without locks, and values that are reported as a whole.

use arc_swap::ArcSwap;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

const BOUNDS: usize = 14;
/// Upper bounds of histograms of times, in microseconds; above the last there is one more.
const TIMES_US: [u64; BOUNDS] = [
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 20_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000,
];
/// Upper bounds of histograms of sizes.
const SIZES: [u64; BOUNDS] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 16_384];
/// Threads that observe at once spread over so many copies.
const SHARDS: usize = 8;

/// A coarse histogram. Observing costs two atomic additions, on memory that (usually) no other thread writes: a lock here
/// would be the only one that all workers share.
#[derive(Clone, Debug)]
pub struct Histogram {
    bounds: &'static [u64; BOUNDS],
    /// So many of what is counted are one of what is shown.
    unit: f64,
    shards: Arc<[Shard]>,
}

#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    counts: [AtomicU64; BOUNDS + 1],
    sum: AtomicU64,
}

impl Histogram {
    /// Of times, in seconds, for a path that every worker takes all the time.
    #[must_use]
    pub fn times() -> Self {
        Self::new(&TIMES_US, 1e6, SHARDS)
    }

    /// Of times, in seconds, where there are many such histograms, or few observations.
    #[must_use]
    pub fn rare_times() -> Self {
        Self::new(&TIMES_US, 1e6, 1)
    }

    /// Of sizes.
    #[must_use]
    pub fn sizes() -> Self {
        Self::new(&SIZES, 1.0, 1)
    }

    fn new(bounds: &'static [u64; BOUNDS], unit: f64, shards: usize) -> Self {
        Self { bounds, unit, shards: (0..shards).map(|_| Shard::default()).collect() }
    }

    /// Counts a time.
    pub fn observe(&self, time: Duration) {
        self.count(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    /// Counts a size.
    pub fn observe_size(&self, size: usize) {
        self.count(u64::try_from(size).unwrap_or(u64::MAX));
    }

    fn count(&self, value: u64) {
        let bucket = self.bounds.iter().position(|&bound| value <= bound).unwrap_or(BOUNDS);
        let shard = MY_SHARD.with(|s| *s) % self.shards.len();
        let Some(shard) = self.shards.get(shard) else { return };
        shard.counts[bucket].fetch_add(1, Ordering::Relaxed);
        shard.sum.fetch_add(value, Ordering::Relaxed);
    }
}

impl TypedMetric for Histogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        let bound = |i: usize| self.bounds.get(i).map_or(f64::INFINITY, |&b| b as f64 / self.unit);
        let buckets: [(f64, u64); BOUNDS + 1] = std::array::from_fn(|i| {
            (bound(i), self.shards.iter().map(|s| s.counts[i].load(Ordering::Relaxed)).sum())
        });
        let sums = self.shards.iter().map(|s| s.sum.load(Ordering::Relaxed));
        let sum = sums.fold(0, u64::saturating_add) as f64 / self.unit;
        let count = buckets.iter().map(|(_, n)| n).sum();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

static NEXT_SHARD: AtomicUsize = AtomicUsize::new(0);
thread_local! {
    static MY_SHARD: usize = NEXT_SHARD.fetch_add(1, Ordering::Relaxed);
}

/// Tokens that were counted, kept in micro-tokens and shown in tokens.
#[derive(Clone, Debug, Default)]
pub struct TokenCounter(Arc<AtomicU64>);

impl TokenCounter {
    /// Adds micro-tokens.
    pub fn add(&self, micro_tokens: u64) {
        self.0.fetch_add(micro_tokens, Ordering::Relaxed);
    }
}

impl TypedMetric for TokenCounter {
    const TYPE: MetricType = MetricType::Counter;
}

impl EncodeMetric for TokenCounter {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        let tokens = self.0.load(Ordering::Relaxed) as f64 / 1e6;
        encoder.encode_counter::<NoLabelSet, _, u64>(&tokens, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// Values that somebody else keeps: all label sets are replaced at once, so that what is gone is gone.
#[derive(Clone, Debug)]
pub struct Reported<L> {
    kind: MetricType,
    values: Arc<ArcSwap<Vec<(L, f64)>>>,
}

impl<L> Reported<L> {
    /// Values that go up and down.
    #[must_use]
    pub fn gauges() -> Self {
        Self { kind: MetricType::Gauge, values: Arc::default() }
    }

    /// Values that grow, until they start over.
    #[must_use]
    pub fn counters() -> Self {
        Self { kind: MetricType::Counter, values: Arc::default() }
    }

    /// These are the values from now on.
    pub fn set(&self, values: Vec<(L, f64)>) {
        self.values.store(Arc::new(values));
    }
}

impl<L: EncodeLabelSet + std::fmt::Debug + Send + Sync> EncodeMetric for Reported<L> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        for (labels, value) in self.values.load().iter() {
            let mut encoder = encoder.encode_family(labels)?;
            match self.kind {
                MetricType::Counter => encoder.encode_counter::<NoLabelSet, _, u64>(value, None)?,
                _ => encoder.encode_gauge(value)?,
            }
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        self.kind
    }

    fn is_empty(&self) -> bool {
        self.values.load().is_empty()
    }
}

/// One value without labels that somebody else keeps; not shown before it is known.
#[derive(Clone, Debug)]
pub struct Reading(Reported<Unlabelled>);

impl Reading {
    /// One that goes up and down.
    #[must_use]
    pub fn gauge() -> Self {
        Self(Reported::gauges())
    }

    /// One that grows, until it starts over.
    #[must_use]
    pub fn counter() -> Self {
        Self(Reported::counters())
    }

    /// It is this now; `None`: nobody knows.
    pub fn set(&self, value: Option<f64>) {
        self.0.set(value.map(|value| (Unlabelled {}, value)).into_iter().collect());
    }
}

impl EncodeMetric for Reading {
    fn encode(&self, encoder: MetricEncoder<'_>) -> std::fmt::Result {
        self.0.encode(encoder)
    }

    fn metric_type(&self) -> MetricType {
        self.0.metric_type()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Unlabelled {}

impl EncodeLabelSet for Unlabelled {
    fn encode(&self, _: &mut prometheus_client::encoding::LabelSetEncoder<'_>) -> std::fmt::Result {
        Ok(())
    }
}
