//! Calls to peers.

use super::append;
use super::peers::{Peer, Peers};
use super::wire::{self, Refusal, SnapshotHead, WireError, header, path};
use crate::raft::gate::Gate;
use crate::raft::snapshot::SnapshotFile;
use crate::raft::task::blocking;
use crate::raft::timing::Timing;
use crate::raft::types::{AppendReply, AppendRequest, LeaderId, PeerNode, TypeConfig, Vote};
use crate::raft::{PeerTls, RaftError};
use crate::telemetry::trace;
use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable};
use openraft::network::{RPCOption, RPCTypes, RaftNetworkFactory, RaftNetworkV2, stream_append_sequential};
use openraft::raft::{
    AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse, VoteRequest,
    VoteResponse,
};
use openraft::storage::Snapshot;
use openraft::{OptionalSend, base::BoxFuture, base::BoxStream};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A snapshot is read and sent in pieces of this size.
const SNAPSHOT_CHUNK: usize = 256 * 1_024;
/// Flow control windows: what may be under way to one peer before it says that it has read it.
pub(crate) const STREAM_WINDOW: u32 = 8 * 1_024 * 1_024;

/// The calling end of the wire. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub peers: Arc<Peers>,
    pub timing: Timing,
    /// Closed once this node stops.
    pub gate: Gate,
    lanes: Arc<ArcSwap<Lanes>>,
    /// What carries requests in a simulation.
    #[cfg(feature = "sim")]
    line: Option<crate::raft::sim::Line>,
}

/// One connection a peer for each kind of traffic, so that a heartbeat does not queue behind a snapshot.
#[derive(Debug)]
struct Lanes {
    control: reqwest::Client,
    entries: reqwest::Client,
    bulk: reqwest::Client,
}

/// Which connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    /// Votes, heartbeats, pings: small and urgent.
    Control,
    /// Log entries and proposals.
    Entries,
    /// Snapshots.
    Bulk,
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// No connection: the peer has not seen it.
    #[error("cannot connect: {0}")]
    NotSent(String),
    /// The peer has refused it before doing anything.
    #[error("refused: {}", .0.name())]
    Refused(Refusal),
    /// The peer cannot do it now, and has not begun.
    #[error("the peer is busy or stopping")]
    Busy,
    /// It was sent, and no answer came in time.
    #[error("no answer in time")]
    TimedOut,
    /// It was sent, and then the connection broke or the answer made no sense.
    #[error("no usable answer: {0}")]
    Lost(String),
}

impl CallError {
    /// Has the peer certainly not acted on it?
    pub fn nothing_happened(&self) -> bool {
        matches!(self, Self::NotSent(_) | Self::Refused(_) | Self::Busy)
    }
}

impl From<reqwest::Error> for CallError {
    fn from(error: reqwest::Error) -> Self {
        if error.is_connect() || error.is_builder() {
            Self::NotSent(chain(&error))
        } else if error.is_timeout() {
            Self::TimedOut
        } else {
            Self::Lost(chain(&error))
        }
    }
}

impl From<WireError> for CallError {
    fn from(error: WireError) -> Self {
        Self::Lost(error.to_string())
    }
}

/// reqwest says the cause only in the sources of its errors.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

impl Client {
    pub fn new(peers: Arc<Peers>, timing: Timing, tls: Option<&PeerTls>) -> Result<Self, RaftError> {
        let lanes = Arc::new(ArcSwap::from_pointee(Lanes::new(&timing, tls)?));
        Ok(Self {
            peers,
            timing,
            gate: Gate::default(),
            lanes,
            #[cfg(feature = "sim")]
            line: None,
        })
    }

    /// The same, but requests go through simulated lines.
    #[cfg(feature = "sim")]
    pub fn through(self, wires: &Arc<crate::raft::sim::Wires>) -> Self {
        let line = crate::raft::sim::Line::new(wires, &self.peers.me.region, self.timing);
        Self { line: Some(line), ..self }
    }

    /// Uses other TLS files for connections from now on.
    pub fn reload(&self, tls: Option<&PeerTls>) -> Result<(), RaftError> {
        self.lanes.store(Arc::new(Lanes::new(&self.timing, tls)?));
        Ok(())
    }

    /// One request and its answer, which has at most `reply_max` bytes.
    pub async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        peer: &Peer,
        lane: Lane,
        path: &str,
        request: &Q,
        limits: (Duration, usize),
    ) -> Result<A, CallError> {
        let (timeout, reply_max) = limits;
        let body = wire::encode(request)?;
        // The body is drawn once there is a connection: before that, nothing has happened at the peer, whatever the
        // error looks like.
        let drawn = Arc::new(AtomicBool::new(false));
        let draw = Arc::clone(&drawn);
        let body = futures::stream::once(async move {
            draw.store(true, Ordering::Release);
            Ok::<_, Infallible>(body)
        });
        let body = reqwest::Body::wrap_stream(body);
        let sent = self.send(peer, lane, self.post(peer, lane, path).timeout(timeout).body(body)).await;
        let reply = sent.map_err(|error| {
            if drawn.load(Ordering::Acquire) { error } else { CallError::NotSent(error.to_string()) }
        })?;
        let reply = self.check(peer, reply)?;
        Ok(wire::decode(&read(reply, reply_max).await?)?)
    }

    /// A request to `peer` with this node's name on it.
    pub fn post(&self, peer: &Peer, lane: Lane, path: &str) -> reqwest::RequestBuilder {
        let lanes = self.lanes.load();
        let client = match lane {
            Lane::Control => &lanes.control,
            Lane::Entries => &lanes.entries,
            Lane::Bulk => &lanes.bulk,
        };
        let me = &self.peers.me;
        let request = client
            .post(format!("{}{path}", peer.url))
            .header(header::PROTOCOL, wire::PROTOCOL)
            .header(header::CLUSTER, &me.cluster)
            .header(header::REGION, &*me.region)
            .header(header::INSTANCE, me.instance)
            .header(header::NODE, me.node_id)
            .header(header::TO, &*peer.region);
        let request = match self.peers.level {
            1 => request,
            level => request.header(header::LEVEL, level),
        };
        let request = match self.peers.redaction {
            Some(sum) => request.header(header::REDACTION, sum.to_string()),
            None => request,
        };
        let request = match trace::traceparent() {
            Some(parent) => request.header(trace::PARENT_HEADER, parent),
            None => request,
        };
        let request = match self.peers.meant(&peer.region) {
            Some(node) => request.header(header::TO_NODE, node),
            None => request,
        };
        match self.peers.instance(&peer.region) {
            Some(instance) => request.header(header::TO_INSTANCE, instance),
            None => request,
        }
    }

    /// Sends what [`Self::post`] has begun, and waits for the head of the answer.
    pub async fn send(
        &self,
        peer: &Peer,
        lane: Lane,
        request: reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, CallError> {
        #[cfg(feature = "sim")]
        if let Some(line) = &self.line {
            return line.send(&peer.region, lane, request).await;
        }
        let _ = lane;
        request.send().await.map_err(|error| {
            let fault = chain(&error);
            // rustls says so of certificates, its own and the other side's.
            let tls = fault.contains("certificate") || fault.contains("received fatal alert");
            if error.is_connect() && tls && self.peers.may_log_refusal("TLS") {
                tracing::error!(region = %peer.region, url = %peer.url, fault, "no TLS with a peer: one of the two does not accept the other's certificate");
            }
            error.into()
        })
    }

    /// Looks at who answers, and what.
    pub fn check(&self, peer: &Peer, reply: reqwest::Response) -> Result<reqwest::Response, CallError> {
        let get = |name| reply.headers().get(name).and_then(|value| value.to_str().ok());
        if let Some(refusal) = get(header::REFUSED).and_then(Refusal::named) {
            self.peers.refused_by(&peer.region, refusal);
            if refusal != Refusal::Removed && self.peers.may_log_refusal(refusal.name()) {
                tracing::error!(region = %peer.region, url = %peer.url, refusal = refusal.name(), why = refusal.means(), "a peer refuses this node");
            }
            return Err(CallError::Refused(refusal));
        }
        let region = get(header::REGION);
        let instance = get(header::INSTANCE).and_then(|n| n.parse().ok());
        let node = get(header::NODE).and_then(|n| n.parse().ok());
        let (Some(region), Some(instance)) = (region, instance) else {
            return Err(CallError::Lost(format!("{} is not a peer of this cluster", peer.url)));
        };
        if region != &*peer.region {
            return Err(CallError::Refused(Refusal::Target));
        }
        if !self.peers.redacts_alike(reply.headers()) {
            let refusal = Refusal::Redaction;
            if self.peers.may_log_refusal(refusal.name()) {
                tracing::error!(region = %peer.region, url = %peer.url, refusal = refusal.name(), why = refusal.means(), "refused a peer's answer");
            }
            return Err(CallError::Refused(refusal));
        }
        if !self.peers.meet(&peer.region, node, instance) {
            if self.peers.may_log_refusal("other data") {
                tracing::error!(region = %peer.region, url = %peer.url, "a peer answers with other data than it had; it is ignored");
            }
            return Err(CallError::Refused(Refusal::TargetInstance));
        }
        peer.applies(reply.headers());
        match reply.status() {
            status if status.is_success() => Ok(reply),
            http::StatusCode::SERVICE_UNAVAILABLE => Err(CallError::Busy),
            status => Err(CallError::Lost(format!("it answers {status}"))),
        }
    }
}

impl Lanes {
    fn new(timing: &Timing, tls: Option<&PeerTls>) -> Result<Self, RaftError> {
        let config = crate::tls::client(tls.map(PeerTls::files).as_ref())?;
        let client = || {
            reqwest::Client::builder()
                .tls_backend_preconfigured(config.clone())
                .http2_prior_knowledge()
                .no_proxy()
                .redirect(reqwest::redirect::Policy::none())
                .connect_timeout(timing.connect())
                .pool_idle_timeout(None)
                .tcp_nodelay(true)
                .http2_initial_stream_window_size(STREAM_WINDOW)
                .http2_initial_connection_window_size(STREAM_WINDOW * 2)
                .http2_keep_alive_interval(timing.ping())
                .http2_keep_alive_timeout(timing.keep_alive())
                .http2_keep_alive_while_idle(true)
                .build()
                .map_err(|e| RaftError::Config(format!("the HTTP client cannot be made: {}", chain(&e))))
        };
        Ok(Self { control: client()?, entries: client()?, bulk: client()? })
    }
}

async fn read(mut reply: reqwest::Response, max: usize) -> Result<Bytes, CallError> {
    let mut body = BytesMut::new();
    while let Some(chunk) = reply.chunk().await? {
        if body.len().saturating_add(chunk.len()) > max {
            return Err(WireError::TooLarge(body.len().saturating_add(chunk.len()), max).into());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

impl RaftNetworkFactory<TypeConfig> for Client {
    type Network = Target;

    async fn new_client(&mut self, target: u64, node: &PeerNode) -> Target {
        Target::new(self, target, node, false)
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &PeerNode) -> Target {
        Target::new(self, target, node, true)
    }
}

/// A follower's answers, as they come.
type Replies<'s> = BoxStream<'s, Result<AppendReply, RPCError<TypeConfig>>>;

/// One peer, as openraft calls it.
#[derive(Debug)]
pub(crate) struct Target {
    client: Client,
    id: u64,
    node: PeerNode,
    heartbeats: bool,
}

impl Target {
    fn new(client: &Client, id: u64, node: &PeerNode, heartbeats: bool) -> Self {
        client.peers.add(id, &node.region, &node.url);
        Self { client: client.clone(), id, node: node.clone(), heartbeats }
    }

    fn peer(&self) -> Result<Arc<Peer>, RPCError<TypeConfig>> {
        self.client.peers.get(&self.node.region).ok_or_else(|| {
            Unreachable::from_string(format!("region {} is not known", self.node.region)).into()
        })
    }

    /// One heartbeat and its answer. openraft's worker calls it an error (and says so) if there is no core any more to take what
    /// it was answered: so the core is stopped after the heartbeats that are under way, and none begins once this node stops.
    fn heartbeat<'s, S>(
        &'s mut self,
        input: S,
        option: RPCOption,
    ) -> BoxFuture<'s, Result<Replies<'s>, RPCError<TypeConfig>>>
    where
        S: Stream<Item = AppendRequest> + OptionalSend + Unpin + 'static,
    {
        let gate = self.client.gate.clone();
        Box::pin(async move {
            let Some(call) = gate.enter() else { return std::future::pending().await };
            let replies = stream_append_sequential(self, input, option).await?;
            let replies: Replies<'s> = Box::pin(replies.inspect(move |_| {
                let _until_it_is_dropped = &call;
            }));
            Ok(replies)
        })
    }

    async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        rpc: RPCTypes,
        path: &str,
        request: &Q,
        timeout: Duration,
    ) -> Result<A, RPCError<TypeConfig>> {
        let peer = self.peer()?;
        let limits = (timeout, wire::CALL_BYTES_MAX);
        let answer = self.client.call(&peer, Lane::Control, path, request, limits).await;
        answer.map_err(|error| self.fault(rpc, timeout, error))
    }

    fn fault(&self, action: RPCTypes, timeout: Duration, error: CallError) -> RPCError<TypeConfig> {
        match error {
            CallError::TimedOut => {
                Timeout { action, id: self.client.peers.me.node_id, target: self.id, timeout }.into()
            }
            CallError::Lost(why) => NetworkError::from_string(why).into(),
            other => Unreachable::from_string(other.to_string()).into(),
        }
    }
}

impl RaftNetworkV2<TypeConfig> for Target {
    type SnapshotData = SnapshotFile;

    async fn append_entries(
        &mut self,
        request: AppendRequest,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(RPCTypes::AppendEntries, path::APPEND, &request, option.hard_ttl()).await
    }

    fn stream_append<'s, S>(
        &'s mut self,
        input: S,
        option: RPCOption,
    ) -> BoxFuture<'s, Result<BoxStream<'s, Result<AppendReply, RPCError<TypeConfig>>>, RPCError<TypeConfig>>>
    where
        S: Stream<Item = AppendRequest> + OptionalSend + Unpin + 'static,
    {
        if self.heartbeats {
            return self.heartbeat(input, option);
        }
        let this: &'s Self = self;
        Box::pin(async move {
            let peer = this.peer()?;
            let timeout = this.client.timing.append();
            let fault = move |error| this.fault(RPCTypes::AppendEntries, timeout, error);
            let replies = append::open(&this.client, &peer, input).await.map_err(&fault)?;
            let replies: BoxStream<'s, _> = Box::pin(replies.map(move |reply| reply.map_err(&fault)));
            Ok(replies)
        })
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(RPCTypes::Vote, path::VOTE, &request, self.client.timing.call()).await
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        self.call(RPCTypes::Vote, path::PRE_VOTE, &request, self.client.timing.call()).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot<LeaderId, u64, PeerNode, SnapshotFile>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let peer = self.peer()?;
        let timeout = option.hard_ttl();
        let file = snapshot.snapshot;
        let head = SnapshotHead { vote, meta: snapshot.meta, bytes: file.bytes() };
        let head = wire::frame(&head).map_err(|e| NetworkError::<TypeConfig>::from_string(e.to_string()))?;
        let body = futures::stream::once(async { Ok(head) }).chain(chunks(file));
        let send = async {
            let request = self.client.post(&peer, Lane::Bulk, path::SNAPSHOT).timeout(timeout);
            let request = request.body(reqwest::Body::wrap_stream(body));
            let reply = self.client.send(&peer, Lane::Bulk, request).await?;
            let reply = self.client.check(&peer, reply)?;
            Ok(wire::decode(&read(reply, wire::CALL_BYTES_MAX).await?)?)
        };
        tokio::select! {
            biased;
            sent = send => {
                sent.map_err(|error| self.fault(RPCTypes::InstallSnapshot, timeout, error).into())
            }
            closed = cancel => Err(closed.into()),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        // The other side waits for its disk first.
        let timeout = self.client.timing.append();
        self.call(RPCTypes::TransferLeader, path::TRANSFER, &request, timeout).await
    }
}

/// A snapshot file's bytes, read as they are sent.
fn chunks(file: SnapshotFile) -> impl Stream<Item = std::io::Result<Bytes>> + Send + 'static {
    futures::stream::try_unfold(0_u64, move |offset| {
        let file = file.clone();
        async move {
            let read = move || {
                let mut chunk = vec![0; SNAPSHOT_CHUNK];
                let read = file.read_at(&mut chunk, offset)?;
                chunk.truncate(read);
                Ok::<_, std::io::Error>(Bytes::from(chunk))
            };
            let chunk = blocking(read).await??;
            let next = offset.saturating_add(u64::try_from(chunk.len()).map_err(std::io::Error::other)?);
            Ok((!chunk.is_empty()).then_some((chunk, next)))
        }
    })
}
