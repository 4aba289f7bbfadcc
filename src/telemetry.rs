//! What the daemon tells its operators while it runs: logs, traces, metrics.
//!
//! `docs/telemetry.md` and `docs/metrics.md` say what it looks like from outside.

mod export;
pub mod metrics;
pub mod repeats;
pub mod trace;

pub use metrics::{Metrics, PolicyMetrics};

use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use repeats::{Repeats, RepeatsFilter};
use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, SystemTime};
use tracing_subscriber::filter::{FilterExt as _, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, reload};

/// Log filter where neither the environment nor the configuration has one.
pub const FILTER_DEFAULT: &str = "info";
/// What is in force before a filter says otherwise, by name. Libraries tell a lot, and warn of what is their users' to judge: what
/// fred says of a connection, `store::redis` says, too.
const LIBRARIES: &str = "openraft=error,chunked_wal=warn,raft_log=warn,fred=off,hyper=error,hyper_util=error,h2=error,tonic=error,\
                         tower=error,reqwest=error,rustls=error,opentelemetry=off,opentelemetry_sdk=off,opentelemetry_otlp=off";
/// Variables that hold the log filter; the first that is not empty counts.
const FILTER_VARIABLES: [&str; 2] = ["QUORATE_LOG", "RUST_LOG"];
/// How long the last spans may take to leave.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long one batch of spans may take.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the counts of repeated lines are looked at.
const TELL_EVERY: Duration = Duration::from_secs(1);

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
    /// The cluster's name, put on every span.
    pub cluster: String,
    /// How logs are written.
    pub log: LogFormat,
    /// What is written: levels, by module. `QUORATE_LOG` (or `RUST_LOG`) counts before it.
    pub log_filter: Option<String>,
    /// Where traces go (OTLP over gRPC); `None`: nowhere.
    pub otlp: Option<String>,
    /// How many requests in a million are traced that no caller decides about.
    pub sampling_ppm: u32,
}

/// Why logging could not be set up, or changed.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The log filter cannot be read.
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
    /// A thread could not be started.
    #[error("telemetry: cannot start a thread: {0}; the machine may be out of threads")]
    Thread(#[from] std::io::Error),
    /// A subscriber has been installed already.
    #[error("logging has already been set up in this process")]
    AlreadySet,
    /// None has been installed.
    #[error("logging has not been set up in this process")]
    NotSet,
}

/// Logging and tracing as they run. One a process.
#[derive(Debug)]
pub struct Telemetry {
    tracer: Option<SdkTracerProvider>,
    /// Carries the spans away; never a caller's request.
    exporting: Option<tokio::runtime::Runtime>,
    repeats: Arc<Repeats>,
    /// Dropped, it ends the thread that tells of repeats.
    telling: Option<mpsc::Sender<()>>,
    teller: Option<std::thread::JoinHandle<()>>,
}

/// The log filter in force, as text, and how to change it.
static FILTER: OnceLock<(reload::Handle<EnvFilter, Registry>, Mutex<String>)> = OnceLock::new();

/// Sets up logging and tracing for the process.
///
/// # Errors
/// See [`TelemetryError`].
pub fn init(options: &Options) -> Result<Telemetry, TelemetryError> {
    let text = filter_text(options.log_filter.as_deref());
    let (filter, handle) = reload::Layer::new(parse_filter(&text)?);
    let repeats = Arc::new(Repeats::default());
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colour);
    let lines = match options.log {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => {
            lines.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
        }
    };
    // Filters of its own for each: what is logged does not decide what is traced. Spans are no part of log lines.
    let lines = lines.with_filter(
        filter.and(RepeatsFilter(Arc::clone(&repeats))).and(
            Targets::new()
                .with_default(tracing::Level::TRACE)
                .with_target(trace::TARGET, tracing_subscriber::filter::LevelFilter::OFF),
        ),
    );
    let (exporting, tracer) = match &options.otlp {
        Some(endpoint) => {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .thread_name("traces")
                .enable_all()
                .build()?;
            let entered = runtime.enter();
            let tracer = tracer(endpoint, options)?;
            drop(entered);
            (Some(runtime), Some(tracer))
        }
        None => (None, None),
    };
    let spans = tracer.as_ref().map(|provider| {
        tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("quorate"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_level(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_target(trace::TARGET, tracing::Level::INFO))
    });
    tracing_subscriber::registry()
        .with(lines)
        .with(spans)
        .try_init()
        .map_err(|_| TelemetryError::AlreadySet)?;
    if tracer.is_some() {
        trace::turn_on(options.sampling_ppm);
    }
    FILTER.set((handle, Mutex::new(text))).map_err(|_| TelemetryError::AlreadySet)?;
    let (telling, stopped) = mpsc::channel::<()>();
    let told = Arc::clone(&repeats);
    let tell = move || {
        while stopped.recv_timeout(TELL_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
            told.tell(false);
        }
    };
    let teller = std::thread::Builder::new().name("log".into()).spawn(tell)?;
    Ok(Telemetry { tracer, exporting, repeats, telling: Some(telling), teller: Some(teller) })
}

impl Telemetry {
    /// The configuration has been read again: its log filter comes into force, unless the environment has one.
    ///
    /// # Errors
    /// The filter cannot be read; the old one stays.
    pub fn reload(&self, log_filter: Option<&str>) -> Result<(), TelemetryError> {
        set_log_filter(&filter_text(log_filter))
    }

    /// Sends what is still to be sent, for at most two seconds. Blocks: call it off the runtimes.
    pub fn shutdown(mut self) {
        if let Some(tracer) = self.tracer.take()
            && let Err(error) = tracer.shutdown_with_timeout(FLUSH_TIMEOUT)
        {
            tracing::warn!(%error, "the last spans were not sent");
        }
        if let Some(exporting) = self.exporting.take() {
            exporting.shutdown_background();
        }
        drop(self.telling.take());
        // It ends at once; a panic in it has been reported.
        let _ = self.teller.take().map(std::thread::JoinHandle::join);
        self.repeats.tell(true);
    }
}

/// The log filter in force.
#[must_use]
pub fn log_filter() -> Option<String> {
    FILTER.get().map(|(_, text)| text.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// Changes the log filter of this process, until it is changed again or the process ends.
///
/// # Errors
/// The filter cannot be read; the old one stays.
pub fn set_log_filter(filter: &str) -> Result<(), TelemetryError> {
    let parsed = parse_filter(filter)?;
    let (handle, text) = FILTER.get().ok_or(TelemetryError::NotSet)?;
    let mut text = text.lock().unwrap_or_else(PoisonError::into_inner);
    handle.reload(parsed).map_err(|_| TelemetryError::NotSet)?;
    filter.clone_into(&mut text);
    Ok(())
}

/// The wall clock, for what people read (never for decisions: it steps).
#[must_use]
#[expect(clippy::disallowed_methods, reason = "this is the one place")]
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}

fn filter_text(configured: Option<&str>) -> String {
    let given = |text: &String| !text.trim().is_empty();
    let mut variables = FILTER_VARIABLES.iter().filter_map(|name| std::env::var(name).ok().filter(given));
    variables.next().or_else(|| configured.map(str::to_owned)).unwrap_or_else(|| FILTER_DEFAULT.to_owned())
}

fn parse_filter(filter: &str) -> Result<EnvFilter, TelemetryError> {
    // Of two that say the same, the later counts.
    EnvFilter::builder()
        .parse(format!("{LIBRARIES},{filter}"))
        .map_err(|e| TelemetryError::Filter { filter: filter.into(), why: e.to_string() })
}

fn tracer(endpoint: &str, options: &Options) -> Result<SdkTracerProvider, TelemetryError> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .with_timeout(EXPORT_TIMEOUT)
        .build()
        .map_err(|e| TelemetryError::Otlp { endpoint: endpoint.into(), why: e.to_string() })?;
    // Names as in OpenTelemetry's semantic conventions for resources.
    let resource = Resource::builder()
        .with_service_name("quorate")
        .with_attribute(KeyValue::new("service.namespace", options.cluster.clone()))
        .with_attribute(KeyValue::new("service.instance.id", options.region.clone()))
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_attribute(KeyValue::new("quorate.cluster", options.cluster.clone()))
        .with_attribute(KeyValue::new("quorate.region", options.region.clone()))
        .build();
    Ok(SdkTracerProvider::builder()
        .with_span_processor(export::processor(exporter, endpoint))
        // What is to be traced has been decided before a span is made.
        .with_sampler(Sampler::AlwaysOn)
        .with_resource(resource)
        .build())
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

    #[test]
    fn libraries_are_quiet_unless_they_are_named() {
        let enabled = |filter: &str, target: &str| parse_filter(filter).unwrap().to_string().contains(target);
        assert!(enabled("debug", "openraft=error") && enabled("debug", "debug"));
        assert!(
            enabled("info,openraft=debug", "openraft=debug")
                && !enabled("info,openraft=debug", "openraft=error")
        );
    }
}
