//! Listeners, worker threads and connections, with a limit on each of them.

use super::ServerError;
use super::callers::{Addresses, CallerTls, Connected, Place, Tokens};
use crate::telemetry::metrics::Protocol;
use futures::FutureExt as _;
use hyper::body::{Body, Incoming};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use prometheus_client::metrics::counter::Counter;
use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Connections that wait for `accept`, in the kernel.
const BACKLOG: i32 = 1024;
/// Accepted connections that wait for a worker.
const QUEUE: usize = 256;
/// How long to leave a listener alone that cannot accept (too many open files, mostly).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often that is worth a line in the log.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

/// Limits on one connection.
#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    /// How long it may take until the first request is here, and (HTTP/1) from one request to the head of the next.
    pub head_timeout: Duration,
    /// How long nothing may be asked on it.
    pub idle_timeout: Duration,
    /// The head of a request, in bytes.
    pub head_max: usize,
    /// Fields in the head of a request (HTTP/1).
    pub fields_max: usize,
    /// Requests at once on one connection (HTTP/2).
    pub streams_max: u32,
    /// How often a silent peer is asked whether it lives (HTTP/2) ...
    pub ping_interval: Duration,
    /// ... and how long it may take to answer.
    pub ping_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            head_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(600),
            head_max: 16 * 1024,
            fields_max: 100,
            streams_max: 1024,
            ping_interval: Duration::from_secs(30),
            ping_timeout: Duration::from_secs(20),
        }
    }
}

/// Listens on an address; port 0 takes a free one.
///
/// # Errors
/// [`ServerError::Bind`]
pub fn bind(address: SocketAddr) -> Result<TcpListener, ServerError> {
    let listen = || {
        let kind = socket2::Type::STREAM;
        let socket = socket2::Socket::new(socket2::Domain::for_address(address), kind, None)?;
        // A restarted daemon must not wait for the old one's connections to be forgotten.
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    };
    listen().map_err(|source| ServerError::Bind { address, source })
}

/// A connection that has been accepted.
#[derive(Debug)]
pub struct Accepted {
    /// What is spoken on it.
    pub protocol: Protocol,
    /// Who is at the other end.
    pub peer: SocketAddr,
    stream: TcpStream,
    permit: OwnedSemaphorePermit,
    place: Option<Place>,
}

/// Takes connections from a listener, as long as there are permits.
#[derive(Debug)]
pub struct Acceptor {
    listener: tokio::net::TcpListener,
    protocol: Protocol,
    permits: Arc<Semaphore>,
    stopping: watch::Receiver<bool>,
    addresses: Option<(Arc<Addresses>, Counter)>,
    complained: Option<Instant>,
}

impl Acceptor {
    /// An acceptor on the current runtime.
    ///
    /// # Errors
    /// The listener cannot be used.
    pub fn new(
        listener: TcpListener,
        protocol: Protocol,
        permits: Arc<Semaphore>,
        stopping: watch::Receiver<bool>,
    ) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        Ok(Self { listener, protocol, permits, stopping, addresses: None, complained: None })
    }

    /// Hangs up on addresses that have too many connections already, and counts how often.
    #[must_use]
    pub fn with_addresses(self, addresses: Arc<Addresses>, refused: Counter) -> Self {
        Self { addresses: Some((addresses, refused)), ..self }
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system does not say.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Hands connections to workers in turn, until it is stopped.
    pub async fn hand_out(mut self, queues: Vec<mpsc::Sender<Accepted>>) {
        for queue in queues.iter().cycle() {
            let Some(accepted) = self.next().await else { return };
            if queue.send(accepted).await.is_err() {
                tracing::error!("a worker thread is gone: its connections are refused");
            }
        }
    }

    /// The next connection; `None`: stopped.
    pub async fn next(&mut self) -> Option<Accepted> {
        let Self { listener, protocol, permits, stopping, addresses, complained } = self;
        let next = async {
            // The permit comes first: a connection that cannot be served yet stays in the backlog.
            let permit = Arc::clone(permits).acquire_owned().await.ok()?;
            loop {
                match listener.accept().await.and_then(|(stream, peer)| Ok((detach(stream)?, peer))) {
                    Ok((stream, peer)) => {
                        let place = match addresses {
                            None => None,
                            Some((addresses, refused)) => match addresses.enter(peer.ip()) {
                                Some(place) => Some(place),
                                None => {
                                    refused.inc();
                                    if is_due(complained) {
                                        tracing::warn!(address = %peer.ip(), ?protocol, "hanging up: the address has as many connections as it may");
                                    }
                                    continue;
                                }
                            },
                        };
                        return Some(Accepted { protocol: *protocol, peer, stream, permit, place });
                    }
                    Err(error) => {
                        if is_due(complained) {
                            tracing::warn!(%error, ?protocol, "cannot accept connections; raise the limit of open files?");
                        }
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        };
        tokio::select! {
            biased;
            _ = stopping.wait_for(|stop| *stop) => None,
            accepted = next => accepted,
        }
    }
}

/// Is it time for another line in the log?
fn is_due(complained: &mut Option<Instant>) -> bool {
    let due = complained.is_none_or(|at| at.elapsed() > COMPLAIN_EVERY);
    if due {
        *complained = Some(Instant::now());
    }
    due
}

/// Takes a stream off this runtime.
fn detach(stream: tokio::net::TcpStream) -> std::io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.into_std()
}

/// A thread that serves connections, with a runtime of its own.
#[derive(Debug)]
pub struct Worker {
    queue: mpsc::Sender<Accepted>,
    finished: oneshot::Receiver<bool>,
}

impl Worker {
    /// Starts worker `index`. `build` runs on its thread, inside its runtime, and makes what serves a connection.
    /// When `drain.0` says so it finishes, within `drain.1`.
    ///
    /// # Errors
    /// The system has no thread, or no files, for it.
    pub fn start<B, S, F>(
        index: usize,
        drain: (watch::Receiver<bool>, Duration),
        build: B,
    ) -> std::io::Result<Self>
    where
        B: FnOnce() -> S + Send + 'static,
        S: Fn(Accepted, watch::Receiver<bool>) -> F,
        F: Future<Output = ()> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (queue, connections) = mpsc::channel(QUEUE);
        let (done, finished) = oneshot::channel();
        std::thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
            let clean = runtime.block_on(async move { work(connections, drain, build()).await });
            // Nobody listens if the server was dropped without draining.
            let _ = done.send(clean);
        })?;
        Ok(Self { queue, finished })
    }

    /// Where connections are put for it.
    #[must_use]
    pub fn queue(&self) -> mpsc::Sender<Accepted> {
        self.queue.clone()
    }

    /// Waits for its end; `false`: it had to cut connections, or died.
    pub async fn finished(self) -> bool {
        drop(self.queue);
        self.finished.await.unwrap_or(false)
    }
}

/// Serves connections until told to stop; `false`: some had to be cut.
async fn work<S, F>(
    mut connections: mpsc::Receiver<Accepted>,
    (mut stopping, drain_timeout): (watch::Receiver<bool>, Duration),
    serve: S,
) -> bool
where
    S: Fn(Accepted, watch::Receiver<bool>) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let mut open = JoinSet::new();
    let for_each = stopping.clone();
    loop {
        tokio::select! {
            biased;
            _ = stopping.wait_for(|stop| *stop) => break,
            Some(ended) = open.join_next() => report(ended),
            accepted = connections.recv() => match accepted {
                Some(accepted) => { open.spawn(serve(accepted, for_each.clone())); }
                None => break,
            },
        }
    }
    connections.close();
    let all = async {
        while let Some(ended) = open.join_next().await {
            report(ended);
        }
    };
    let in_time = tokio::time::timeout(drain_timeout, all).await.is_ok();
    if !in_time {
        tracing::warn!(connections = open.len(), "the drain timeout has passed: cutting what is left");
    }
    in_time
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection's task died: please report this");
    }
}

/// Serves one connection to its end, over TLS if there is any. `service` gets to know who is at the other end.
pub async fn connection<S, B>(
    accepted: Accepted,
    (tls, tokens): (Option<&CallerTls>, Option<Arc<Tokens>>),
    service: impl FnOnce(Connected) -> S,
    limits: &ConnectionLimits,
    mut stopping: watch::Receiver<bool>,
) where
    S: Service<hyper::Request<Incoming>, Response = hyper::Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    // Both are held until the connection ends.
    let Accepted { protocol, stream, peer, permit: _permit, place: _place } = accepted;
    let stream = match tokio::net::TcpStream::from_std(stream) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::warn!(%error, %peer, "cannot take a connection over");
            return;
        }
    };
    let Some(tls) = tls else {
        let service = service(Connected::new(peer.ip(), None, tokens));
        return speak((protocol, peer), stream, service, limits, stopping).await;
    };
    let shaken = tokio::select! {
        shaken = tokio::time::timeout(limits.head_timeout, tls.acceptor(protocol).accept(stream)) => shaken,
        _ = stopping.wait_for(|stop| *stop) => return,
    };
    match shaken {
        Ok(Ok(stream)) => {
            let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
            let service = service(Connected::new(peer.ip(), shown.map(AsRef::as_ref), tokens));
            speak((protocol, peer), stream, service, limits, stopping).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, %peer, ?protocol, "a caller's TLS handshake failed"),
        Err(_) => tracing::debug!(%peer, ?protocol, "a caller's TLS handshake took too long"),
    }
}

/// HTTP and admin speak HTTP/1.1 and HTTP/2, gRPC only HTTP/2.
async fn speak<S, B>(
    (protocol, peer): (Protocol, SocketAddr),
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    service: S,
    limits: &ConnectionLimits,
    mut stopping: watch::Receiver<bool>,
) where
    S: Service<hyper::Request<Incoming>, Response = hyper::Response<B>, Error = Infallible> + Send + 'static,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    let activity = Arc::new(Activity::default());
    let counted = {
        let activity = Arc::clone(&activity);
        service_fn(move |request| {
            let running = Running::begin(&activity);
            service.call(request).inspect(move |_| drop(running))
        })
    };
    let builder = builder(protocol, limits);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), counted));
    let (mut wait, mut seen, mut closing) = (limits.head_timeout, 0, false);
    loop {
        tokio::select! {
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(%error, %peer, ?protocol, "a connection broke");
                }
                break;
            }
            _ = stopping.wait_for(|stop| *stop), if !closing => {
                closing = true;
                connection.as_mut().graceful_shutdown();
            }
            () = tokio::time::sleep(wait) => {
                let started = activity.started.load(Ordering::Relaxed);
                if started != seen || activity.running.load(Ordering::Relaxed) > 0 {
                    (seen, wait) = (started, limits.idle_timeout);
                } else if closing {
                    tracing::debug!(%peer, ?protocol, "cutting an idle connection");
                    break;
                } else {
                    (closing, wait) = (true, limits.head_timeout);
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

fn builder(protocol: Protocol, limits: &ConnectionLimits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_headers(limits.fields_max)
        .max_buf_size(limits.head_max.max(8 * 1024));
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams_max)
        .max_header_list_size(u32::try_from(limits.head_max).unwrap_or(u32::MAX))
        .initial_connection_window_size(1 << 20)
        .keep_alive_interval(limits.ping_interval)
        .keep_alive_timeout(limits.ping_timeout);
    match protocol {
        Protocol::Grpc => builder.http2_only(),
        Protocol::Http | Protocol::Admin => builder,
    }
}

/// What goes on on a connection; tells idle ones.
#[derive(Debug, Default)]
struct Activity {
    started: AtomicU64,
    running: AtomicU64,
}

/// A request that runs.
struct Running(Arc<Activity>);

impl Running {
    fn begin(activity: &Arc<Activity>) -> Self {
        activity.started.fetch_add(1, Ordering::Relaxed);
        activity.running.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}
