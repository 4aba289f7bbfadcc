//! What the daemon tells its operators while it runs: logs, traces, metrics.

pub mod metrics;

pub use metrics::{Metrics, PolicyMetrics};

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use std::io::IsTerminal as _;
use std::time::{Duration, SystemTime};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

/// Log filter where neither `QUORATE_LOG` nor `RUST_LOG` is set.
pub const FILTER_DEFAULT: &str = "info,openraft=warn,chunked_wal=warn,raft_log=warn,fred=warn";
/// How long the last spans may take to leave.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long one batch of spans may take.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// How logs are written (always to stderr).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// What [`init`] needs to know.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The region's name, put on every span.
    pub region: String,
    /// How logs are written.
    pub log: LogFormat,
    /// Where traces go (OTLP over gRPC); `None`: nowhere.
    pub otlp: Option<String>,
}

/// Why logging could not be set up, or changed.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// `QUORATE_LOG` (or `RUST_LOG`) cannot be read.
    #[error("log filter `{filter}`: {why}; write levels like `info` or `quorate::raft=debug,info`")]
    Filter {
        /// What it was.
        filter: String,
        /// What is wrong with it.
        why: String,
    },
    /// `telemetry.otlp` cannot be used.
    #[error("telemetry.otlp `{endpoint}`: {why}; give the http:// address of an OTLP/gRPC collector")]
    Otlp {
        /// What it was.
        endpoint: String,
        /// What is wrong with it.
        why: String,
    },
    /// A subscriber has been installed already.
    #[error("logging has already been set up in this process")]
    AlreadySet,
}

/// Logging and tracing as they run. One a process.
#[derive(Debug)]
pub struct Telemetry {
    filter: reload::Handle<EnvFilter, Registry>,
    tracer: Option<SdkTracerProvider>,
}

/// Sets up logging and tracing for the process. With `otlp`, call it inside a tokio runtime that lives as long.
///
/// # Errors
/// See [`TelemetryError`].
pub fn init(options: &Options) -> Result<Telemetry, TelemetryError> {
    let (filter, handle) = reload::Layer::new(filter_from_env()?);
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colour);
    let lines = match options.log {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let tracer = options.otlp.as_deref().map(|endpoint| tracer(endpoint, &options.region)).transpose()?;
    // Only our own spans: those of the exporter's HTTP client would beget more of their kind.
    let spans = tracer.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("quorate"))
            .with_filter(Targets::new().with_target("quorate", tracing::Level::DEBUG))
    });
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .with(spans)
        .try_init()
        .map_err(|_| TelemetryError::AlreadySet)?;
    Ok(Telemetry { filter: handle, tracer })
}

impl Telemetry {
    /// Reads the log filter from the environment again.
    ///
    /// # Errors
    /// The filter cannot be read; the old one stays.
    pub fn reload(&self) -> Result<(), TelemetryError> {
        self.replace(filter_from_env()?)
    }

    /// Changes the log filter.
    ///
    /// # Errors
    /// The filter cannot be read; the old one stays.
    pub fn set_filter(&self, filter: &str) -> Result<(), TelemetryError> {
        self.replace(parse_filter(filter)?)
    }

    /// Sends what is still to be sent, for at most two seconds. Blocks: call it off the runtimes.
    pub fn shutdown(self) {
        if let Some(tracer) = self.tracer
            && let Err(error) = tracer.shutdown_with_timeout(FLUSH_TIMEOUT)
        {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }

    fn replace(&self, filter: EnvFilter) -> Result<(), TelemetryError> {
        self.filter.reload(filter).map_err(|_| TelemetryError::AlreadySet)
    }
}

/// The wall clock, for what people read (never for decisions: it steps).
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the one place")]
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}

fn filter_from_env() -> Result<EnvFilter, TelemetryError> {
    let text = std::env::var("QUORATE_LOG").or_else(|_| std::env::var("RUST_LOG"));
    parse_filter(text.as_deref().ok().filter(|t| !t.trim().is_empty()).unwrap_or(FILTER_DEFAULT))
}

fn parse_filter(filter: &str) -> Result<EnvFilter, TelemetryError> {
    EnvFilter::builder()
        .parse(filter)
        .map_err(|e| TelemetryError::Filter { filter: filter.into(), why: e.to_string() })
}

fn tracer(endpoint: &str, region: &str) -> Result<SdkTracerProvider, TelemetryError> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .map_err(|e| TelemetryError::Otlp { endpoint: endpoint.into(), why: e.to_string() })?;
    let resource = Resource::builder()
        .with_service_name("quorate")
        .with_attribute(KeyValue::new("service.instance.id", region.to_owned()))
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bad_filter_is_named() {
        let error = parse_filter("quorate=loud").unwrap_err().to_string();
        assert!(error.starts_with("log filter `quorate=loud`: "), "{error}");
        assert!(parse_filter("quorate::raft=debug,info").is_ok());
    }
}
