//! The lines between simulated regions: requests, answers and streams of frames, as HTTP would carry them.
//!
//! A call needs a connection, which takes a round trip to make and is gone with the first message that is lost on it: what
//! was sent over one may have arrived, what never got one has not. Streams are in order: a message that is lost is sent
//! again for a while, and then the stream breaks. A process that ends resets its connections.

use super::{Home, Network, on};
use crate::quota::policy::RegionName;
use crate::raft::network::client::{CallError, Lane};
use crate::raft::network::wire::path;
use crate::raft::timing::Timing;
use axum::Router;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http_body_util::BodyExt;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower::ServiceExt;

/// A message of a stream that is lost is sent again after this, then after twice as long, and so on.
const RESEND: Duration = Duration::from_millis(200);

/// All lines of one simulation.
pub struct Wires {
    network: Arc<dyn Network>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    sites: BTreeMap<RegionName, Site>,
    /// From whom, to whom, for what; and to which life of it.
    connections: BTreeMap<(RegionName, RegionName, Lane), u64>,
    lives: u64,
}

/// One life of a region's process.
#[derive(Clone)]
struct Site {
    life: u64,
    home: Arc<dyn Home>,
    /// There once it listens.
    router: Option<Router>,
    /// Closed when the process ends. (A semaphore wakes those who wait in their order.)
    alive: Arc<Semaphore>,
}

impl std::fmt::Debug for Wires {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wires").finish_non_exhaustive()
    }
}

impl Wires {
    /// Lines that do to messages what `network` says.
    #[must_use]
    pub fn new(network: Arc<dyn Network>) -> Arc<Self> {
        Arc::new(Self { network, state: Mutex::default() })
    }

    /// The region's process has ended: its connections are reset, and nobody listens there.
    pub fn unplug(&self, region: &RegionName) {
        let mut state = self.state();
        state.connections.retain(|(from, to, _), _| from != region && to != region);
        if let Some(site) = state.sites.remove(region) {
            site.alive.close();
        }
    }

    /// A process of the region begins.
    pub(super) fn begin(&self, region: &RegionName, home: &Arc<dyn Home>) {
        self.unplug(region);
        let mut state = self.state();
        state.lives = state.lives.saturating_add(1);
        let (life, home) = (state.lives, Arc::clone(home));
        let site = Site { life, home, router: None, alive: Arc::new(Semaphore::new(0)) };
        state.sites.insert(region.clone(), site);
    }

    /// It listens.
    pub(super) fn listen(&self, region: &RegionName, router: Router) {
        if let Some(site) = self.state().sites.get_mut(region) {
            site.router = Some(router);
        }
    }

    fn site(&self, region: &RegionName) -> Option<Site> {
        self.state().sites.get(region).cloned()
    }

    /// Is this life of the region not over?
    fn living(&self, region: &RegionName, life: u64) -> Option<Site> {
        self.site(region).filter(|site| site.life == life)
    }

    /// How long a message that is sent once takes, if it arrives.
    fn once(&self, from: &RegionName, to: &RegionName) -> Option<Duration> {
        self.network.fate(from, to).into_iter().flatten().next()
    }

    /// How long a message takes that is sent until it arrives, or until the sender's patience ends.
    fn again(&self, from: &RegionName, to: &RegionName, patience: Duration) -> Option<Duration> {
        let (mut waited, mut pause) = (Duration::ZERO, RESEND);
        while waited < patience {
            if let Some(takes) = self.once(from, to) {
                return Some(waited + takes);
            }
            waited += pause;
            pause *= 2;
        }
        None
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A region's end of all of its lines.
#[derive(Clone, Debug)]
pub(in crate::raft) struct Line {
    wires: Arc<Wires>,
    from: RegionName,
    timing: Timing,
}

impl Line {
    pub fn new(wires: &Arc<Wires>, from: &RegionName, timing: Timing) -> Self {
        Self { wires: Arc::clone(wires), from: from.clone(), timing }
    }

    /// As [`reqwest::RequestBuilder::send`].
    pub async fn send(
        &self,
        to: &RegionName,
        lane: Lane,
        request: reqwest::RequestBuilder,
    ) -> Result<reqwest::Response, CallError> {
        let request = request.build()?;
        let patience = request.timeout().copied();
        let request = http::Request::<reqwest::Body>::try_from(request)?;
        let sent = async {
            let there = self.connect(to, lane).await?;
            if request.uri().path() == path::APPEND_STREAM {
                self.stream(to, there, request).await
            } else {
                self.exchange(to, lane, there, request).await
            }
        };
        match patience {
            Some(patience) => timeout(patience, sent).await.unwrap_or(Err(CallError::TimedOut)),
            None => sent.await,
        }
    }

    /// The process at the other end of the connection; makes one if there is none.
    async fn connect(&self, to: &RegionName, lane: Lane) -> Result<Site, CallError> {
        let key = (self.from.clone(), to.clone(), lane);
        let connected = self.wires.state().connections.get(&key).copied();
        if let Some(there) = connected.and_then(|life| self.wires.living(to, life)) {
            return Ok(there);
        }
        let handshake = async {
            self.cross(&self.from, to).await;
            let there = self.wires.site(to).filter(|site| site.router.is_some());
            self.cross(to, &self.from).await;
            there
        };
        let refused = || CallError::NotSent("connection refused".into());
        let made = timeout(self.timing.connect(), handshake).await;
        let there = made.map_err(|_| CallError::NotSent("timed out".into()))?.ok_or_else(refused)?;
        self.wires.state().connections.insert(key, there.life);
        Ok(there)
    }

    /// One request, one answer.
    async fn exchange(
        &self,
        to: &RegionName,
        lane: Lane,
        there: Site,
        request: http::Request<reqwest::Body>,
    ) -> Result<reqwest::Response, CallError> {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let (reply, answer) = oneshot::channel();
        let mut reply = Some(reply);
        for takes in self.copies(to, lane, head.uri.path()) {
            let request = http::Request::from_parts(head.clone(), axum::body::Body::from(body.clone()));
            // What is on its way arrives, whatever becomes of the sender.
            tokio::spawn(self.clone().deliver(to.clone(), lane, there.clone(), takes, request, reply.take()));
        }
        if reply.take().is_some() {
            self.lose(to, lane);
        }
        let answered = async {
            match answer.await {
                Ok(answer) => Ok(answer.into()),
                // The message or its answer is lost: so is the connection, as pings will show.
                Err(_) => {
                    sleep(self.patience()).await;
                    Err(CallError::Lost("the connection is dead".into()))
                }
            }
        };
        let reset = async {
            let _ = there.alive.acquire().await;
            self.cross(to, &self.from).await;
        };
        tokio::select! {
            biased;
            answer = answered => answer,
            () = reset => Err(CallError::Lost("connection reset".into())),
        }
    }

    /// How long each copy of a request takes to arrive. Nothing is proposed twice by a network: that would make *not sent* a
    /// lie of its own.
    fn copies(&self, to: &RegionName, lane: Lane, called: &str) -> Vec<Duration> {
        match lane {
            // As a file takes many messages, the loss of one does not matter.
            Lane::Bulk => self.wires.again(&self.from, to, self.patience()).into_iter().collect(),
            _ if called == path::PROPOSE => self.wires.once(&self.from, to).into_iter().collect(),
            _ => self.wires.network.fate(&self.from, to).into_iter().flatten().collect(),
        }
    }

    /// A request arrives, and its answer goes back.
    async fn deliver(
        self,
        to: RegionName,
        lane: Lane,
        there: Site,
        takes: Duration,
        request: http::Request<axum::body::Body>,
        reply: Option<oneshot::Sender<http::Response<reqwest::Body>>>,
    ) {
        sleep(takes).await;
        let Some(router) = self.wires.living(&to, there.life).and_then(|site| site.router) else { return };
        let (done, answer) = oneshot::channel();
        let answering = async move {
            // It cannot fail: faults are answers.
            let Ok(answer) = router.oneshot(request).await;
            let (head, body) = answer.into_parts();
            if let Ok(body) = body.collect().await {
                let _ = done.send(http::Response::from_parts(head, reqwest::Body::from(body.to_bytes())));
            }
        };
        tokio::spawn(on(&there.home, answering));
        let (Ok(answer), Some(reply)) = (answer.await, reply) else { return };
        match self.wires.once(&to, &self.from) {
            Some(takes) => {
                sleep(takes).await;
                // The caller may have gone.
                let _ = reply.send(answer);
            }
            None => self.lose(&to, lane),
        }
    }

    /// One request and one answer whose bodies go on and on.
    async fn stream(
        &self,
        to: &RegionName,
        there: Site,
        request: http::Request<reqwest::Body>,
    ) -> Result<reqwest::Response, CallError> {
        let here = self.wires.site(&self.from).ok_or(CallError::Busy)?;
        let (head, body) = request.into_parts();
        let (up, arriving) = mpsc::unbounded_channel();
        let upward = self.clone().pump(body.into_data_stream(), up, (self.from.clone(), to.clone()));
        tokio::spawn(on(&here.home, upward));
        let body = axum::body::Body::from_stream(parcels(arriving, Arc::clone(&here.alive)));
        let request = http::Request::from_parts(head, body);
        let (reply, answer) = oneshot::channel();
        let (down, returning) = mpsc::unbounded_channel();
        tokio::spawn(self.clone().open(to.clone(), there.clone(), request, reply, down));
        let answered = async {
            match answer.await {
                Ok((at, head)) => {
                    sleep_until(at).await;
                    head
                }
                Err(_) => std::future::pending().await,
            }
        };
        let reset = async {
            let _ = there.alive.acquire().await;
            self.cross(to, &self.from).await;
        };
        let head: http::response::Parts = tokio::select! {
            biased;
            head = answered => head,
            () = reset => return Err(CallError::Lost("connection reset".into())),
        };
        let body = reqwest::Body::wrap_stream(parcels(returning, there.alive));
        Ok(http::Response::from_parts(head, body).into())
    }

    /// A stream's request arrives; the head of its answer goes back, and then its frames.
    async fn open(
        self,
        to: RegionName,
        there: Site,
        request: http::Request<axum::body::Body>,
        reply: oneshot::Sender<(Instant, http::response::Parts)>,
        down: mpsc::UnboundedSender<Parcel>,
    ) {
        let Some(takes) = self.wires.again(&self.from, &to, self.patience()) else { return };
        sleep(takes).await;
        let Some(router) = self.wires.living(&to, there.life).and_then(|site| site.router) else { return };
        tokio::spawn(on(&there.home, async move {
            let Ok(answer) = router.oneshot(request).await;
            let (head, body) = answer.into_parts();
            if let Some(takes) = self.wires.again(&to, &self.from, self.patience()) {
                // The caller may have gone.
                let _ = reply.send((Instant::now() + takes, head));
                let back = (to, self.from.clone());
                self.pump(body.into_data_stream(), down, back).await;
            }
        }));
    }

    /// Sends what a stream brings, in order.
    async fn pump<E>(
        self,
        frames: impl Stream<Item = Result<Bytes, E>>,
        pipe: mpsc::UnboundedSender<Parcel>,
        (from, to): (RegionName, RegionName),
    ) {
        let mut frames = std::pin::pin!(frames);
        let mut last = Instant::now();
        loop {
            let frame = tokio::select! {
                biased;
                () = pipe.closed() => return,
                frame = frames.next() => frame,
            };
            let mut content = match frame {
                Some(Ok(bytes)) => Content::Frame(bytes),
                Some(Err(_)) => Content::Broken,
                None => Content::End,
            };
            let takes = self.wires.again(&from, &to, self.patience());
            if takes.is_none() {
                content = Content::Broken;
            }
            last = last.max(Instant::now() + takes.unwrap_or(self.patience()));
            let over = !matches!(content, Content::Frame(_));
            if pipe.send(Parcel { at: last, content }).is_err() || over {
                return;
            }
        }
    }

    /// How long a connection without a sign of life lasts.
    fn patience(&self) -> Duration {
        self.timing.ping() + self.timing.keep_alive()
    }

    async fn cross(&self, from: &RegionName, to: &RegionName) {
        match self.wires.once(from, to) {
            Some(takes) => sleep(takes).await,
            None => std::future::pending().await,
        }
    }

    fn lose(&self, to: &RegionName, lane: Lane) {
        self.wires.state().connections.remove(&(self.from.clone(), to.clone(), lane));
    }
}

/// A piece of a stream on its way.
struct Parcel {
    at: Instant,
    content: Content,
}

enum Content {
    Frame(Bytes),
    End,
    Broken,
}

/// The receiving end of a stream, for as long as its sender is `alive`.
fn parcels(
    pipe: mpsc::UnboundedReceiver<Parcel>,
    alive: Arc<Semaphore>,
) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    futures::stream::unfold(Some((pipe, alive)), |open| async {
        let (mut pipe, alive) = open?;
        let parcel = tokio::select! {
            biased;
            Some(parcel) = pipe.recv() => parcel,
            _ = alive.acquire() => Parcel { at: Instant::now(), content: Content::Broken },
        };
        sleep_until(parcel.at).await;
        match parcel.content {
            Content::Frame(bytes) => Some((Ok(bytes), Some((pipe, alive)))),
            Content::End => None,
            Content::Broken => Some((Err(io::ErrorKind::ConnectionReset.into()), None)),
        }
    })
}
