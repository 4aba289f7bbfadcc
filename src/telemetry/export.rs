//! Spans on their way out: a bounded queue, and a receiver that may be gone for hours without anybody waiting for it, or the
//! log filling up.

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Spans that wait to be sent; further ones are lost.
const QUEUE_MAX: usize = 2_048;
/// Spans in one call.
const BATCH_MAX: usize = 512;
/// How long spans wait for company.
const DELAY: Duration = Duration::from_secs(1);

static EXPORTED: AtomicU64 = AtomicU64::new(0);
static LOST: AtomicU64 = AtomicU64::new(0);

/// How many spans of this process were exported, and how many were lost.
#[must_use]
pub fn counts() -> (u64, u64) {
    (EXPORTED.load(Ordering::Relaxed), LOST.load(Ordering::Relaxed))
}

/// Sends spans with `exporter`, in batches.
pub fn processor<E: SpanExporter + 'static>(exporter: E, endpoint: &str) -> impl SpanProcessor + use<E> {
    let waiting = Arc::<AtomicUsize>::default();
    let exporter = Counted {
        exporter,
        endpoint: endpoint.to_owned(),
        waiting: Arc::clone(&waiting),
        failing: AtomicBool::new(false),
        lost: AtomicU64::new(0),
    };
    let config = BatchConfigBuilder::default()
        .with_max_queue_size(QUEUE_MAX)
        .with_max_export_batch_size(BATCH_MAX)
        .with_scheduled_delay(DELAY)
        .build();
    let batches = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
    Bounded { batches, waiting }
}

/// Lets no more spans wait than there is room for, and knows how many were lost.
#[derive(Debug)]
struct Bounded {
    batches: BatchSpanProcessor,
    waiting: Arc<AtomicUsize>,
}

impl SpanProcessor for Bounded {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.batches.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= QUEUE_MAX {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            LOST.fetch_add(1, Ordering::Relaxed);
        } else {
            self.batches.on_end(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// Counts what leaves, and says when the receiver goes and comes back.
#[derive(Debug)]
struct Counted<E> {
    exporter: E,
    endpoint: String,
    waiting: Arc<AtomicUsize>,
    failing: AtomicBool,
    /// Since it fails.
    lost: AtomicU64,
}

impl<E: SpanExporter> SpanExporter for Counted<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let (size, spans) = (batch.len(), u64::try_from(batch.len()).unwrap_or(u64::MAX));
        self.waiting.fetch_sub(size, Ordering::Relaxed);
        let result = self.exporter.export(batch).await;
        let endpoint = self.endpoint.as_str();
        match &result {
            Ok(()) => {
                EXPORTED.fetch_add(spans, Ordering::Relaxed);
                if self.failing.swap(false, Ordering::Relaxed) {
                    let lost = self.lost.swap(0, Ordering::Relaxed);
                    tracing::info!(endpoint, lost, "traces are sent again");
                }
            }
            Err(error) => {
                LOST.fetch_add(spans, Ordering::Relaxed);
                self.lost.fetch_add(spans, Ordering::Relaxed);
                if !self.failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!(endpoint, %error, "traces cannot be sent; they are lost until they can be");
                }
            }
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
