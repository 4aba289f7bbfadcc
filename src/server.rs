//! Front ends: what callers, operators and probes talk to.
//!
//! Callers' connections are served by worker threads, one a core, each with a runtime of its own: a connection stays on
//! the worker that it was handed to, so a request never hops between threads. The admin listener runs on the control
//! runtime. Both go through [`listen`], where the limits on connections are.

pub mod admin;
pub mod callers;
pub mod grpc;
pub mod http;
pub mod listen;
pub mod problem;
pub mod reading;
pub mod state;

pub use crate::limiter::Decide;

use crate::config::ForwardAuth;
use crate::quota::verdict::Verdict;
use crate::telemetry::metrics::Protocol;
use crate::telemetry::{Metrics, trace};
use ::http::{HeaderValue, Request, Response, Version, header};
use bytes::Bytes;
use callers::{Addresses, Callers};
use futures::TryFutureExt as _;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use listen::{Acceptor, ConnectionLimits, Worker};
use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

/// The largest body of a request, in bytes (HTTP and gRPC).
pub const BODY_MAX: usize = 64 * 1024;
/// See [`Options::able`].
pub const ABLE_WITHIN: Duration = Duration::from_secs(2);
/// Where callers connect; see [`listen::bind`].
#[derive(Debug)]
pub struct Listeners {
    /// Decisions over HTTP.
    pub http: TcpListener,
    /// Decisions over gRPC.
    pub grpc: TcpListener,
}

/// Limits of the callers' front ends.
#[derive(Clone, Debug)]
pub struct Options {
    /// Worker threads.
    pub workers: usize,
    /// Connections at once, on each of the listeners; more wait in its backlog.
    pub connections_max: usize,
    /// Connections at once from one address, on each of the listeners; more are hung up on.
    pub connections_per_address_max: usize,
    /// What callers must show.
    pub callers: Callers,
    /// Limits on each connection.
    pub connection: ConnectionLimits,
    /// How long a request may take, its body included.
    pub request_timeout: Duration,
    /// What `/v1/forward-auth` asks about; `None`: it is not served.
    pub forward_auth: Option<Arc<ForwardAuth>>,
    /// Callers' first connections wait in the backlog until this says that the region can decide, for at most
    /// [`ABLE_WITHIN`]: a restart is a short delay to them, not a burst of refusals. `None`: it can.
    pub able: Option<watch::Receiver<bool>>,
    /// How long requests in flight may still take when the server stops.
    pub drain_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workers: std::thread::available_parallelism().map_or(1, Into::into),
            connections_max: 16_384,
            connections_per_address_max: 16_384,
            callers: Callers::default(),
            connection: ConnectionLimits::default(),
            request_timeout: Duration::from_secs(10),
            forward_auth: None,
            able: None,
            drain_timeout: Duration::from_secs(10),
        }
    }
}

/// Why the front ends could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An address could not be listened on.
    #[error("listen on {address}: {source}; is another process there, or is the address not this machine's?")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// A worker thread could not be started.
    #[error("start worker thread {worker}: {source}; the machine may be out of threads or files")]
    Worker {
        /// Which.
        worker: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// The listener could not be used.
    #[error("listener: {0}")]
    Listener(#[from] std::io::Error),
    /// The descriptors for gRPC reflection do not fit together.
    #[error("gRPC reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// The running front ends.
#[derive(Debug)]
pub struct Server {
    http: SocketAddr,
    grpc: SocketAddr,
    drain_timeout: Duration,
    leaving: Arc<AtomicBool>,
    stop: watch::Sender<bool>,
    acceptors: Vec<tokio::task::JoinHandle<()>>,
    workers: Vec<Worker>,
}

/// Starts the workers and their listeners. `build` makes a worker's own `Decide`: it runs on the worker's thread, inside
/// its runtime. `ready` is what gRPC health says.
///
/// # Errors
/// See [`ServerError`].
pub async fn start<D: Decide>(
    listeners: Listeners,
    options: Options,
    metrics: Arc<Metrics>,
    ready: watch::Receiver<bool>,
    build: impl Fn(usize) -> D + Send + Sync + 'static,
) -> Result<Server, ServerError> {
    let (stop, stopping) = watch::channel(false);
    let routes = grpc::side_services(ready, stopping.clone()).await?;
    let (build, options) = (Arc::new(build), Arc::new(options));
    let leaving = Arc::new(AtomicBool::new(false));
    let connections_max = options.connections_max.clamp(1, Semaphore::MAX_PERMITS);
    let mut workers = Vec::new();
    for index in 0..options.workers.max(1) {
        let (build, routes, options, metrics) =
            (Arc::clone(&build), routes.clone(), Arc::clone(&options), Arc::clone(&metrics));
        let (drain, leaving) = ((stopping.clone(), options.drain_timeout), Arc::clone(&leaving));
        let worker = Worker::start(index, drain, move || {
            let decide = build(index);
            let (forward_auth, timeout) = (options.forward_auth.clone(), options.request_timeout);
            let http = http::Http::new(decide.clone(), forward_auth, timeout, Arc::clone(&metrics));
            let grpc = grpc::Grpc::new(decide, routes, timeout, Arc::clone(&metrics));
            move |accepted, stopping| {
                let (options, http) = (Arc::clone(&options), (http.clone(), Arc::clone(&leaving)));
                serve(accepted, http, grpc.clone(), options, Arc::clone(&metrics), stopping)
            }
        });
        workers.push(worker.map_err(|source| ServerError::Worker { worker: index, source })?);
    }
    let accept = |listener, protocol| -> Result<_, ServerError> {
        let permits = Arc::new(Semaphore::new(connections_max));
        let addresses = Addresses::new(options.connections_per_address_max.max(1));
        let refused = metrics.connections_refused(protocol).clone();
        let acceptor = Acceptor::new(listener, protocol, permits, stopping.clone())?;
        let acceptor = acceptor.with_addresses(addresses, refused);
        let address = acceptor.address()?;
        let queues = workers.iter().map(Worker::queue).collect();
        let (able, mut stopping) = (options.able.clone(), stopping.clone());
        let serve = async move {
            if let Some(mut able) = able {
                tokio::select! {
                    _ = tokio::time::timeout(ABLE_WITHIN, able.wait_for(|able| *able)) => {}
                    _ = stopping.wait_for(|stop| *stop) => return,
                }
            }
            acceptor.hand_out(queues).await;
        };
        Ok((address, tokio::spawn(serve)))
    };
    let (http, http_acceptor) = accept(listeners.http, Protocol::Http)?;
    let (grpc, grpc_acceptor) = accept(listeners.grpc, Protocol::Grpc)?;
    let acceptors = vec![http_acceptor, grpc_acceptor];
    Ok(Server { http, grpc, drain_timeout: options.drain_timeout, leaving, stop, acceptors, workers })
}

impl Server {
    /// Where HTTP is served.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        self.http
    }

    /// Where gRPC is served.
    #[must_use]
    pub fn grpc(&self) -> SocketAddr {
        self.grpc
    }

    /// Serves on, and asks callers to connect anew: over HTTP/1 an answer closes its connection (RFC 9112, section 9.6). One that is
    /// closed later, unasked, may meet a request that is on its way; over HTTP/2 it would be told so.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// Stops: takes no more connections, lets requests in flight finish, for at most [`Options::drain_timeout`], and
    /// then cuts what is left. Returns `false` if something had to be cut.
    pub async fn drain(self) -> bool {
        self.stop.send_replace(true);
        for acceptor in self.acceptors {
            // It ends by itself, at once; a panic in it has been reported.
            let _ = acceptor.await;
        }
        let mut clean = true;
        let all = async {
            for worker in self.workers {
                clean &= worker.finished().await;
            }
        };
        // Workers keep to their own deadline; this one is for a worker that hangs.
        let in_time = tokio::time::timeout(self.drain_timeout + Duration::from_secs(1), all).await;
        in_time.is_ok() && clean
    }
}

/// Serves one connection of a caller to its end.
async fn serve<D: Decide>(
    accepted: listen::Accepted,
    (http, leaving): (http::Http<D>, Arc<AtomicBool>),
    grpc: grpc::Grpc<D>,
    options: Arc<Options>,
    metrics: Arc<Metrics>,
    stopping: watch::Receiver<bool>,
) {
    let protocol = accepted.protocol;
    let open = metrics.connections(protocol);
    open.inc();
    let limits = &options.connection;
    let shown = (options.callers.tls.as_deref(), options.callers.tokens.clone());
    match protocol {
        Protocol::Grpc => listen::connection(accepted, shown, |c| grpc.of(c), limits, stopping).await,
        Protocol::Http | Protocol::Admin => {
            let service = |c| until_leaving(http.of(c), leaving);
            listen::connection(accepted, shown, service, limits, stopping).await;
        }
    }
    open.dec();
}

/// The service, whose answers close their connection once `leaving` says so.
fn until_leaving<D: Decide>(
    http: http::Http<D>,
    leaving: Arc<AtomicBool>,
) -> impl Service<Request<Incoming>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send> {
    service_fn(move |request: Request<Incoming>| {
        let leaving = Arc::clone(&leaving);
        let has_connection_fields = request.version() < Version::HTTP_2;
        http.call(request).map_ok(move |mut response| {
            if has_connection_fields && leaving.load(Ordering::Relaxed) {
                response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response
        })
    })
}

/// Says in the request's span, if it has one, what was answered.
fn describe(domain: &str, verdict: &Verdict) {
    if !trace::is_traced() {
        return;
    }
    let span = tracing::Span::current();
    span.record("domain", domain);
    span.record("allowed", verdict.allowed);
    if let Some(limit) = verdict.binding() {
        span.record("policy", &*limit.policy);
        span.record("reason", limit.reason.name());
    }
}
