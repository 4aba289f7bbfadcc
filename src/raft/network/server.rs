//! The answering end of the wire.

use super::certificate::Shown;
use super::client::STREAM_WINDOW;
use super::peers::{Peers, level_of};
use super::wire::{
    self, APPLIED_BYTES_MAX, CALL_BYTES_MAX, Frames, HelloReply, PROPOSE_BYTES_MAX, Propose, ProposeFault,
    ProposeReply, Refusal, SnapshotHead, WireError, header, path,
};
use crate::raft::gate::Call;
use crate::raft::node::Node;
use crate::raft::task::blocking;
use crate::raft::types::{AppendRequest, TypeConfig};
use crate::telemetry::trace;
use crate::trace_span;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures::{Stream, StreamExt};
use http::{HeaderMap, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use openraft::raft::{TransferLeaderRequest, VoteRequest};
use openraft::storage::Snapshot;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tracing::Instrument as _;
use tracing::field::Empty;

/// Connections at once: a few for each region, with room for reconnecting.
const CONNECTIONS_MAX: usize = 256;
/// Streams at once on one of them.
const STREAMS_MAX: u32 = 512;
/// For a TLS handshake, and for the body of a small call to arrive.
const ARRIVAL: Duration = Duration::from_secs(10);
/// For the next bytes of a snapshot.
const STALL: Duration = Duration::from_secs(15);
/// A proposal waits no longer than this, whatever its caller says.
const PROPOSE_WAIT_MAX: Duration = Duration::from_secs(30);
/// A question from another region waits, and is answered, within this.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Connections finish what they do within this when the node stops.
const DRAIN: Duration = Duration::from_secs(2);

/// The routes, each behind a look at who calls.
pub(crate) fn router(node: Arc<Node>) -> Router {
    Router::new()
        .route(path::HELLO, post(hello))
        .route(path::VOTE, post(vote))
        .route(path::PRE_VOTE, post(pre_vote))
        .route(path::APPEND, post(append))
        .route(path::APPEND_STREAM, post(append_stream))
        .route(path::SNAPSHOT, post(snapshot))
        .route(path::TRANSFER, post(transfer_leader))
        .route(path::PROPOSE, post(propose))
        .route(path::WHO, post(who))
        .route(path::MEMBERS, post(members))
        .route(path::QUESTION, post(question))
        .layer(middleware::from_fn_with_state(Arc::clone(&node), admit))
        .with_state(node)
}

/// Accepts connections until the node stops.
pub(crate) async fn serve(node: Arc<Node>, listener: TcpListener) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut stopping = node.stopping();
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let accepted = tokio::select! {
            accepted = accept(&listener, &permits) => accepted,
            _ = stopping.wait_for(|stop| *stop) => break,
        };
        let Some((stream, peer, permit)) = accepted else {
            // Out of file descriptors, or the caller has gone again: do not spin.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let node = Arc::clone(&node);
        connections.spawn(async move {
            connection(node, stream, peer).await;
            drop(permit);
        });
    }
    let _ = timeout(DRAIN, async { while connections.join_next().await.is_some() {} }).await;
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> Option<(TcpStream, SocketAddr, tokio::sync::OwnedSemaphorePermit)> {
    let permit = Arc::clone(permits).acquire_owned().await.ok()?;
    let (stream, peer) = listener.accept().await.ok()?;
    Some((stream, peer, permit))
}

async fn connection(node: Arc<Node>, stream: TcpStream, peer: SocketAddr) {
    let _ = stream.set_nodelay(true);
    match node.tls() {
        Some(config) => {
            match timeout(ARRIVAL, tokio_rustls::TlsAcceptor::from(config).accept(stream)).await {
                Ok(Ok(stream)) => {
                    let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
                    let shown = shown.map(|leaf| Arc::new(Shown::new(leaf.clone().into_owned())));
                    http2(node, stream, shown).await;
                }
                Ok(Err(fault)) if is_refusal(&fault) => {
                    if node.client.peers.may_log_refusal("handshake") {
                        tracing::error!(%peer, %fault, "a peer's TLS handshake failed");
                    }
                }
                Ok(Err(fault)) => tracing::debug!(%peer, %fault, "the line broke in a peer's TLS handshake"),
                Err(_) => tracing::debug!(%peer, "a peer's TLS handshake took too long"),
            }
        }
        None if peer.ip().to_canonical().is_loopback() => http2(node, stream, None).await,
        None => {
            if node.client.peers.may_log_refusal("plaintext") {
                tracing::error!(%peer, "refused a peer: without peer_tls only loopback peers are let in");
            }
        }
    }
}

/// TLS itself said no (a certificate that is not trusted, or no TLS at all), which a person must look at; a line that breaks
/// is the network's business.
fn is_refusal(fault: &std::io::Error) -> bool {
    fault.kind() == std::io::ErrorKind::InvalidData
}

async fn http2(node: Arc<Node>, stream: impl AsyncRead + AsyncWrite + Unpin, shown: Option<Arc<Shown>>) {
    let mut stopping = node.stopping();
    let timing = node.client.timing;
    let service = TowerToHyperService::new(router(node).layer(axum::Extension(shown)));
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW * 2)
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(16 * 1_024)
        .keep_alive_interval(timing.ping() * 5)
        .keep_alive_timeout(timing.keep_alive() * 2)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        ended = connection.as_mut() => {
            if let Err(fault) = ended {
                tracing::debug!(%fault, "a peer's connection ended");
            }
            return;
        }
        _ = stopping.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
    }
    let _ = timeout(DRAIN, connection).await;
}

/// Nothing is done for a caller that is not a peer of this cluster, or not the one that it was.
async fn admit(State(node): State<Arc<Node>>, request: Request, next: Next) -> Response {
    let peers = &node.client.peers;
    let mut response = match refusal_of(peers, node.replica.level(), &request) {
        None => next.run(request).await,
        Some(refused) => refused,
    };
    let headers = response.headers_mut();
    headers.insert(header::INSTANCE, peers.me.instance.into());
    headers.insert(header::NODE, peers.me.node_id.into());
    if let Ok(region) = peers.me.region.parse() {
        headers.insert(header::REGION, region);
    }
    if peers.level > 1 {
        headers.insert(header::LEVEL, peers.level.into());
    }
    if let Some(sum) = peers.redaction {
        headers.insert(header::REDACTION, sum.into());
    }
    response
}

/// What is answered to a caller that is not who it says, may not call now, or does not apply what the log may hold (operations up to
/// `level`); `None`: it may.
fn refusal_of<B>(peers: &Peers, level: u32, request: &http::Request<B>) -> Option<Response> {
    let headers = request.headers();
    let from = text(headers, header::REGION);
    let anyone = request.uri().path() == path::WHO;
    let certified = || {
        // Plain lines, on loopback, have no certificates.
        let shown = request.extensions().get::<Option<Arc<Shown>>>().and_then(Option::as_deref);
        let url = peers.get(from).map(|peer| peer.url.clone());
        shown.map_or(Ok(()), |shown| shown.is_of(&peers.me.cluster, from, url.as_deref()))
    };
    let admitted = peers.admit(headers, anyone).map_err(|refusal| (refusal, None));
    let admitted = admitted.and_then(|()| certified().map_err(|why| (Refusal::Certificate, Some(why))));
    let admitted = admitted.and_then(|()| {
        let too_old =
            || "its version is too old: the cluster uses what only newer ones know; upgrade it".to_owned();
        if level_of(headers) < level { Err((Refusal::Protocol, Some(too_old()))) } else { Ok(()) }
    });
    if let Err((refusal, why)) = admitted {
        if peers.may_log_refusal(refusal.name()) {
            log_refusal(headers, refusal, why.as_deref());
        }
        return Some((StatusCode::CONFLICT, [(header::REFUSED, refusal.name())]).into_response());
    }
    if let Some(peer) = peers.get(from).filter(|_| !anyone) {
        peer.applies(headers);
    }
    if !peers.count_call(from) {
        if peers.may_log_refusal("rate") {
            tracing::warn!(region = from, "a peer calls too often; some of its calls are refused");
        }
        return Some(Fault::Busy.into_response());
    }
    None
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> &'h str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("?")
}

fn log_refusal(headers: &HeaderMap, refusal: Refusal, why: Option<&str>) {
    let text = |name| text(headers, name);
    if refusal == Refusal::Removed {
        tracing::warn!(
            region = text(header::REGION),
            "a region that was removed still runs: stop its daemon"
        );
        return;
    }
    tracing::error!(
        refusal = refusal.name(),
        region = text(header::REGION),
        cluster = text(header::CLUSTER),
        protocol = text(header::PROTOCOL),
        meant_for = text(header::TO),
        why = why.unwrap_or(refusal.means()),
        "refused a peer"
    );
}

async fn hello(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let _: wire::Hello = read(body, CALL_BYTES_MAX).await?;
    answer(&HelloReply {
        founding: node.founding,
        initialized: node.initialized(),
        leader: node.leader().map(|(_, region)| region),
    })
}

async fn who(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let wire::Who { region } = read(body, CALL_BYTES_MAX).await?;
    answer(&node.who(&region))
}

async fn members(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let change: wire::MemberChange = read(body, CALL_BYTES_MAX).await?;
    let reply: wire::MemberReply = node.change_members_here(change).await;
    answer(&reply)
}

/// Answered one at a time: they are for people to look at, and must not be in the way of anything.
async fn question(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let wire::Question { body } = read(body, CALL_BYTES_MAX).await?;
    let answers = node.answers.get().ok_or(Fault::Busy)?;
    let _one = timeout(ANSWER_WITHIN, node.answering.acquire()).await.map_err(|_| Fault::Busy)?;
    let body = timeout(ANSWER_WITHIN, answers(body)).await.map_err(|_| Fault::Busy)?.ok_or(Fault::Busy)?;
    answer(&wire::QuestionReply { body })
}

async fn vote(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let request: VoteRequest<TypeConfig> = read(body, CALL_BYTES_MAX).await?;
    let _call = running(&node)?;
    answer(&node.raft.vote(request).await.map_err(|_| Fault::Stopped)?)
}

async fn pre_vote(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let request: VoteRequest<TypeConfig> = read(body, CALL_BYTES_MAX).await?;
    let _call = running(&node)?;
    answer(&node.raft.pre_vote(request).await.map_err(|_| Fault::Stopped)?)
}

async fn append(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let request: AppendRequest = read(body, wire::APPEND_BYTES_MAX).await?;
    let _call = running(&node)?;
    answer(&node.raft.append_entries(request).await.map_err(|_| Fault::Stopped)?)
}

async fn transfer_leader(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let request: TransferLeaderRequest<TypeConfig> = read(body, CALL_BYTES_MAX).await?;
    let _call = running(&node)?;
    answer(&node.raft.handle_transfer_leader(request).await.map_err(|_| Fault::Stopped)?)
}

/// Only a node that goes on has answers for its peers; it waits for those that it owes before it stops.
fn running(node: &Node) -> Result<Call, Fault> {
    node.call().ok_or(Fault::Stopped)
}

/// Batches come in, answers go out, in order, for as long as both sides like.
async fn append_stream(State(node): State<Arc<Node>>, body: Body) -> Result<Response, Fault> {
    let call = running(&node)?;
    let mut stopping = node.stopping();
    let batches = batches(Frames::new(body.into_data_stream(), wire::APPEND_BYTES_MAX))
        .take_until(async move { stopping.wait_for(|stop| *stop).await.is_ok() });
    let answers = node.raft.stream_append(batches).map(move |reply| {
        let _call = &call;
        match reply {
            Ok(reply) => wire::frame(&reply).map_err(std::io::Error::other),
            Err(stopped) => Err(std::io::Error::other(stopped)),
        }
    });
    Ok(Body::from_stream(answers).into_response())
}

fn batches<S, E>(frames: Frames<S>) -> impl Stream<Item = AppendRequest>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
    E: std::fmt::Display,
{
    futures::stream::unfold(frames, |mut frames| async {
        match frames.next().await?.and_then(|body| wire::decode(&body)) {
            Ok(batch) => Some((batch, frames)),
            Err(WireError::Broken(fault)) => {
                tracing::debug!(fault, "a stream of entries broke");
                None
            }
            Err(fault) => {
                tracing::error!(%fault, "a peer sent entries that make no sense; the stream is closed");
                None
            }
        }
    })
}

async fn propose(State(node): State<Arc<Node>>, headers: HeaderMap, body: Body) -> Result<Bytes, Fault> {
    let from = headers.get(header::REGION).and_then(|region| region.to_str().ok()).unwrap_or_default();
    let span = trace::from_peer(&headers, || {
        trace_span!("propose for a peer", "otel.kind" = "server", peer = from, operations = Empty)
    });
    let reading = node.reading.try_acquire().map_err(|_| Fault::Busy)?;
    let Propose { ops, wait_ms, hops } = read(body, PROPOSE_BYTES_MAX).await?;
    drop(reading);
    let deadline = Instant::now() + Duration::from_millis(wait_ms).min(PROPOSE_WAIT_MAX);
    span.record("operations", ops.len());
    let outcome = node.propose_once(&Arc::new(ops), deadline, hops).instrument(span).await;
    let reply: ProposeReply = outcome.map_err(ProposeFault::from);
    let encoded = answer(&reply)?;
    if encoded.len() > APPLIED_BYTES_MAX {
        // It has happened; the caller learns the rest from its own replica.
        return answer::<ProposeReply>(&Err(ProposeFault::Unknown));
    }
    Ok(encoded)
}

/// Takes a whole snapshot into a file of its own, then gives it to openraft.
async fn snapshot(State(node): State<Arc<Node>>, body: Body) -> Result<Bytes, Fault> {
    let _one = node.receiving.try_acquire().map_err(|_| Fault::Busy)?;
    let mut frames = Frames::new(body.into_data_stream(), CALL_BYTES_MAX);
    let head = stalled(frames.next()).await?.ok_or(WireError::Short)??;
    let head: SnapshotHead = wire::decode(&head)?;
    let (mut chunk, mut rest) = frames.into_rest();
    let mut incoming = node.snapshots.incoming().map_err(Fault::disk)?;
    let mut bytes = 0_u64;
    loop {
        bytes = bytes.saturating_add(u64::try_from(chunk.len()).unwrap_or(u64::MAX));
        if bytes > head.bytes {
            return Err(WireError::Malformed(postcard::Error::DeserializeBadEncoding).into());
        }
        let write = move || incoming.write_all(&chunk).map(|()| incoming);
        incoming = blocking(write).await.map_err(|_| Fault::Stopped)?.map_err(Fault::disk)?;
        match stalled(rest.next()).await? {
            Some(next) => chunk = next.map_err(|e| WireError::Broken(e.to_string()))?,
            None => break,
        }
    }
    if bytes != head.bytes {
        return Err(WireError::Short.into());
    }
    // Checked here, so that a damaged one is the sender's trouble and does not stop this node.
    let check = move || {
        let file = incoming.complete()?;
        let (meta, _) = file.decode()?;
        Ok::<_, std::io::Error>((file, meta))
    };
    let checked = blocking(check).await.map_err(|_| Fault::Stopped)?;
    let (snapshot, meta) = checked.map_err(Fault::disk)?;
    if meta != head.meta {
        return Err(WireError::Malformed(postcard::Error::DeserializeBadEncoding).into());
    }
    let installed = node.raft.install_full_snapshot(head.vote, Snapshot { meta, snapshot }).await;
    answer(&installed.map_err(|_| Fault::Stopped)?)
}

async fn stalled<T>(next: impl Future<Output = T>) -> Result<T, Fault> {
    timeout(STALL, next).await.map_err(|_| Fault::Slow)
}

async fn read<T: DeserializeOwned>(body: Body, max: usize) -> Result<T, Fault> {
    let body = timeout(ARRIVAL, axum::body::to_bytes(body, max)).await.map_err(|_| Fault::Slow)?;
    let body = body.map_err(|e| WireError::Broken(e.to_string()))?;
    Ok(wire::decode(&body)?)
}

fn answer<T: Serialize>(value: &T) -> Result<Bytes, Fault> {
    Ok(wire::encode(value)?)
}

/// Why a peer gets no answer.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("the request did not arrive in time")]
    Slow,
    #[error("this node is busy")]
    Busy,
    #[error("this node has stopped")]
    Stopped,
    #[error("the disk: {0}")]
    Disk(std::io::Error),
}

impl Fault {
    fn disk(fault: std::io::Error) -> Self {
        tracing::error!(%fault, "cannot take a snapshot from a peer");
        Self::Disk(fault)
    }
}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Wire(WireError::TooLarge(..)) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Wire(_) => StatusCode::BAD_REQUEST,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::Busy | Self::Stopped => StatusCode::SERVICE_UNAVAILABLE,
            Self::Disk(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, self.to_string()).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt as _;

    /// What the acceptor says to a caller who sends this and hangs up.
    async fn said_to(bytes: &[u8]) -> std::io::Error {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let key = rcgen::generate_simple_self_signed(vec!["peer".to_owned()]).unwrap();
        let private = rustls::pki_types::PrivateKeyDer::try_from(key.signing_key.serialize_der()).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![key.cert.der().clone()], private)
            .unwrap();
        let (mut caller, stream) = tokio::io::duplex(1_024);
        caller.write_all(bytes).await.unwrap();
        drop(caller);
        tokio_rustls::TlsAcceptor::from(Arc::new(config)).accept(stream).await.unwrap_err()
    }

    #[tokio::test]
    async fn a_broken_line_is_no_refusal_and_a_stranger_is() {
        assert!(!is_refusal(&said_to(b"").await));
        assert!(is_refusal(&said_to(b"GET / HTTP/1.1\r\n\r\n").await));
    }
}
