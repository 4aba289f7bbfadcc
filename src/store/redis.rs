//! Buckets in a region's Redis, read and written by atomic scripts.
//!
//! **Sessions.** A meta key says which daemon holds the region's buckets, on which run of which server, and since when there is
//! data. Every script checks it first. A control task attaches (`control.rs`): where the server, the data or the clock is not what
//! it was, the old buckets are never read again and a new session begins with empty ones.
//!
//! **Connections.** One for the control task, and one for each worker thread, driven by the thread's own runtime
//! (`worker.rs`). A lost connection is replaced, never mended (`connect.rs`). Requests that meet share a call (`pump.rs`).
//!
//! **Shards.** A Redis Cluster holds the buckets in a fixed number of shards (`shards.rs`), each with a meta key of its own in the
//! slot of its buckets, and a link of its own. They have one session together. One server is one shard.
//!
//! **Time** is Redis' own. Each call carries the window in which it must run (`clock.rs`): a call that Redis runs later, because it
//! was frozen, or at another time of day, because its clock stepped, changes nothing.

mod clock;
mod connect;
mod control;
mod fault;
mod pump;
mod sample;
mod scripts;
mod server;
mod shards;
mod shared;
#[cfg(test)]
mod twin_test;
mod wire;
mod worker;

use super::{
    CHARGES_MAX, Health, Install, Prepare, Prepared, Session, SessionState, Store, StoreError, Take, Taken,
};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::bucket::Generation;
use crate::quota::policy::BucketId;
use crate::telemetry::metrics::{StoreCall, StoreMetrics};
use crate::tls::ClientFiles;
use fault::Fault;
use fred::types::scripts::Script;
use futures::future::join_all;
use scripts::{Call, SCRIPTS, run};
use server::Server;
use shared::{Link, Live, Region, Shared};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout, timeout_at};
use wire::Say;

/// The slow loop's calls may take this long; they are on no request's path.
const SLOW_TIMEOUT: Duration = Duration::from_millis(500);
/// The most buckets in one call of the slow loop.
const BUCKETS_A_CALL: usize = 256;

/// Where a region's Redis is.
#[derive(Clone)]
pub struct RedisConfig {
    /// `redis://`, `redis-sentinel://`, `redis-cluster://`, the same with `rediss`, or `redis+unix://`; with user and password: a
    /// secret.
    pub url: String,
    /// With TLS: instead of the system's authorities, and a certificate to show.
    pub tls: Option<ClientFiles>,
    /// A decision never waits longer than this.
    pub timeout: Duration,
    /// The cluster's name; part of every key.
    pub cluster: String,
    /// The region's name; part of every key.
    pub region: String,
}

impl std::fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisConfig")
            .field("url", &"(secret)")
            .field("tls", &self.tls)
            .field("timeout", &self.timeout)
            .field("cluster", &self.cluster)
            .field("region", &self.region)
            .finish()
    }
}

/// Why a [`RedisConfig`] is of no use. None of them shows the URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RedisConfigError {
    /// Not a URL that leads to a Redis.
    #[error("store.redis.url: {0}")]
    Url(String),
    /// A name that would make keys ambiguous.
    #[error("{what} {name:?}: use letters, digits, '.', '_' and '-' only, 1 to 64 of them")]
    Name {
        /// Which name.
        what: &'static str,
        /// As it was given.
        name: String,
    },
    /// No decision could ever be made.
    #[error("store.redis.timeout: must be 1ms to 10s")]
    Timeout,
}

/// A handle to a region's Redis. Clones share its connection; [`RedisStore::worker`] makes one for another thread.
#[derive(Clone)]
pub struct RedisStore {
    region: Arc<Region>,
    /// One for each shard.
    lanes: Arc<[Lane]>,
}

/// A handle's way to one shard.
struct Lane {
    shared: Arc<Shared>,
    link: Arc<Link>,
    jobs: mpsc::Sender<pump::Job>,
}

impl RedisStore {
    /// Starts the control task on the current runtime, and returns its handle at once: whether and when it is attached is
    /// told by [`Self::session`].
    ///
    /// # Errors
    /// If the configuration is of no use.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn connect(config: &RedisConfig) -> Result<Self, RedisConfigError> {
        // Only the first provider that a process installs counts; this is the one that main installs as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = Server::read(config)?;
        for (what, name) in [("cluster.name", &config.cluster), ("region", &config.region)] {
            let legal = |b: u8| b.is_ascii_alphanumeric() || b".-_".contains(&b);
            if name.is_empty() || name.len() > 64 || !name.bytes().all(legal) {
                return Err(RedisConfigError::Name { what, name: name.clone() });
            }
        }
        if config.timeout < Duration::from_millis(1) || config.timeout > Duration::from_secs(10) {
            return Err(RedisConfigError::Timeout);
        }
        let tagged = server.shards() > 1;
        let tag = |shard| tagged.then(|| shards::tag(shard));
        let keys = |shard| wire::Keys::new(&config.cluster, &config.region, tag(shard));
        let (store, pumps) = Self::with(Arc::new(Region::new(config.timeout, server, keys)));
        let region = store.region.clone();
        let links: Vec<Arc<Link>> = store.lanes.iter().map(|lane| lane.link.clone()).collect();
        tokio::spawn(async move {
            tokio::select! {
                () = control::supervise(&region, &links) => {}
                _ = join_all(pumps) => {}
                () = region.until_closed() => {}
            }
            links.iter().for_each(|link| link.live.store(None));
        });
        Ok(store)
    }

    /// A handle whose connections are made and driven by the runtime on which this is called. They end with its last clone.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    #[must_use]
    pub fn worker(&self) -> Self {
        let (store, pumps) = Self::with(self.region.clone());
        for (lane, pump) in store.lanes.iter().zip(pumps) {
            let (region, shared, link) = (store.region.clone(), lane.shared.clone(), lane.link.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = worker::supervise(&shared, &link) => {}
                    () = pump => {}
                    () = region.until_closed() => {}
                }
                link.live.store(None);
            });
        }
        store
    }

    fn with(region: Arc<Region>) -> (Self, Vec<impl Future<Output = ()> + Send + 'static>) {
        let (mut lanes, mut pumps) = (Vec::new(), Vec::new());
        for shared in &region.shards {
            let (jobs, queue) = mpsc::channel(pump::QUEUE_MAX);
            let (shared, link) = (shared.clone(), Arc::<Link>::default());
            lanes.push(Lane { shared: shared.clone(), link: link.clone(), jobs });
            pumps.push(async move { pump::pump(&shared, &link, queue).await });
        }
        (Self { region, lanes: lanes.into() }, pumps)
    }

    /// The session, and why there is none. While it is detached because of the control task's connection alone, workers
    /// still serve requests.
    #[must_use]
    pub fn session(&self) -> watch::Receiver<SessionState> {
        self.region.state.subscribe()
    }

    /// What it knows about buckets that it does not hold; before it was ever attached, that nothing is known to be left. Of several
    /// shards, what holds for all.
    #[must_use]
    pub fn generation(&self) -> Generation {
        let known: Option<Vec<Generation>> = self.lanes.iter().map(|lane| lane.generation(self)).collect();
        let start = known.iter().flatten().map(|generation| generation.start).max();
        let all = |says: fn(&Generation) -> bool| known.as_ref().is_some_and(|known| known.iter().all(says));
        let (full, known) = (all(|generation| generation.full), all(|generation| generation.known));
        Generation { start: start.unwrap_or_else(|| self.now()), full, known }
    }

    /// See [`RegionStore::mark_full`](super::RegionStore::mark_full).
    ///
    /// # Errors
    /// See there.
    pub async fn mark_full(&self, session: Session) -> Result<(), StoreError> {
        self.say(session, Say::Full).await
    }

    /// See [`RegionStore::mark_known`](super::RegionStore::mark_known).
    ///
    /// # Errors
    /// See there.
    pub async fn mark_known(&self, session: Session) -> Result<(), StoreError> {
        self.say(session, Say::Known).await
    }

    /// Of the data of all shards.
    async fn say(&self, session: Session, what: Say) -> Result<(), StoreError> {
        for lane in &*self.lanes {
            lane.say(session, what).await?;
        }
        Ok(())
    }

    /// About what Redis' clock reads, never ahead of it by more than drift; zero before it was first read. Several servers have
    /// several clocks: then it is the daemon's own, told from where the first of them was.
    #[must_use]
    pub fn now(&self) -> Micros {
        match &*self.lanes {
            [lane] => {
                lane.shared.window(crate::clock::now(), Duration::ZERO).map_or(Micros::ZERO, |(low, _)| low)
            }
            _ => self.region.ahead().map_or(Micros::ZERO, |ahead| crate::clock::now() + ahead),
        }
    }

    /// Measures with these from now on.
    pub fn measure(&self, metrics: StoreMetrics) {
        // Whoever was first counts.
        let _ = self.region.metrics.set(metrics);
    }

    /// The smoothed round trip of the control task's heartbeat.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        self.region.rtt()
    }

    /// For `/readyz`.
    #[must_use]
    pub fn health(&self) -> Health {
        self.region.health()
    }

    /// Closes all connections of this handle and of its workers.
    pub async fn close(&self) {
        self.region.closed.send_replace(true);
        // Each task holds a receiver until it has ended.
        let _ = timeout(Duration::from_secs(1), self.region.closed.closed()).await;
    }

    fn timeout(&self) -> Duration {
        self.lanes.first().map_or(Duration::ZERO, |lane| lane.shared.timeout)
    }
}

impl Lane {
    fn live(&self) -> Result<Arc<Live>, StoreError> {
        self.link.live.load_full().ok_or(StoreError::Unavailable)
    }

    /// Says this of the generation of data that the session began. (What it has kept is not full.)
    async fn say(&self, session: Session, what: Say) -> Result<(), StoreError> {
        let live = self.live()?;
        if live.attached.session != session || session.kept && what == Say::Full {
            return Err(StoreError::Fenced);
        }
        let call = live.attached.stem.beat(control::META_LIFE, what);
        let beaten = self.slow(&live, StoreCall::Beat, call, wire::beaten).await?;
        live.attached.heard(beaten);
        Ok(())
    }

    /// A request's charges on this shard.
    async fn take(&self, take: Take, until: Instant) -> Result<Taken, StoreError> {
        if !self.link.opened.initialized() && self.shared.attached.borrow().is_some() {
            // A worker's first connection is only moments behind the session: worth waiting for.
            timeout_at(until, self.link.opened.wait()).await.map_err(|_| StoreError::Unavailable)?;
        }
        if self.link.live.load().is_none() || self.link.overdue.load(Ordering::Relaxed) {
            return Err(StoreError::Unavailable);
        }
        let (reply, answer) = oneshot::channel();
        self.jobs.try_send(pump::Job { take, reply }).map_err(|_| StoreError::Unavailable)?;
        match timeout_at(until, answer).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) | Err(_) => Err(StoreError::Unknown),
        }
    }

    /// A call of the slow loop.
    async fn slow<T>(
        &self,
        live: &Arc<Live>,
        kind: StoreCall,
        call: Call,
        read: impl FnOnce(bytes::Bytes) -> Result<T, Fault>,
    ) -> Result<T, StoreError> {
        let script = match kind {
            StoreCall::Take => &SCRIPTS.take,
            StoreCall::Known => &SCRIPTS.known,
            StoreCall::Prepare => &SCRIPTS.prepare,
            StoreCall::Install => &SCRIPTS.install,
            StoreCall::Beat => &SCRIPTS.beat,
        };
        self.slow_by(script, live, kind, call, read).await
    }

    /// The same by another script than the usual.
    async fn slow_by<T>(
        &self,
        script: &Script,
        live: &Arc<Live>,
        kind: StoreCall,
        call: Call,
        read: impl FnOnce(bytes::Bytes) -> Result<T, Fault>,
    ) -> Result<T, StoreError> {
        let began = Instant::now();
        let answer = timeout(SLOW_TIMEOUT, run(&live.client, script, call)).await;
        self.shared.called(kind, began);
        let Ok(answer) = answer else { return Err(StoreError::Unknown) };
        answer.and_then(read).map_err(|fault| {
            if fault.ends_connection() {
                pump::retire(&self.link, live);
            }
            self.shared.met(&fault, live);
            fault.error()
        })
    }

    /// How far Redis' clock is ahead of the daemon's monotonic one, at least.
    fn ahead(&self) -> Result<Micros, StoreError> {
        let sent = crate::clock::now();
        let window = self.shared.window(sent, Duration::ZERO).ok_or(StoreError::Unavailable)?;
        Ok(window.0 - sent)
    }

    fn window(&self) -> Result<(Micros, Micros), StoreError> {
        self.shared.window(crate::clock::now(), SLOW_TIMEOUT).ok_or(StoreError::Unavailable)
    }

    async fn known(&self, buckets: &[BucketId]) -> Result<(u64, Vec<bool>), StoreError> {
        // On a request's path: it waits no longer than for a decision, and not at all where Redis is late already.
        if self.link.overdue.load(Ordering::Relaxed) {
            return Err(StoreError::Unavailable);
        }
        let live = self.live()?;
        let window = self.shared.window(crate::clock::now(), self.shared.timeout);
        let call = live.attached.stem.known(window.ok_or(StoreError::Unavailable)?, buckets);
        let read = |answer| wire::known(answer, buckets.len());
        let asked = self.slow(&live, StoreCall::Known, call, read);
        timeout(self.shared.timeout, asked).await.map_err(|_| StoreError::Unknown)?
    }

    /// The time is this shard's, and that of the first call.
    async fn prepare(&self, mut asks: Vec<Prepare>) -> Result<(Option<Micros>, Vec<Prepared>), StoreError> {
        let live = self.live()?;
        let ahead = self.ahead()?;
        for ask in &mut asks {
            ask.unseen = ask.unseen.map(|unseen| unseen.in_store(ask.shape, ahead));
        }
        let mut first = None;
        let mut all = Vec::with_capacity(asks.len());
        for asks in chunks(&asks, |ask| ask.permits.is_some()) {
            let (stem, window) = (&live.attached.stem, self.window()?);
            let (now, prepared) = if asks.iter().any(|ask| ask.permits.is_some()) {
                let call = stem.prepare_permits(window, asks);
                let read = |answer| wire::prepared_permits(answer, asks.len());
                self.slow_by(&SCRIPTS.prepare_permits, &live, StoreCall::Prepare, call, read).await?
            } else {
                let call = stem.prepare(window, asks);
                let read = |answer| wire::prepared(answer, asks.len());
                self.slow(&live, StoreCall::Prepare, call, read).await?
            };
            first.get_or_insert(now);
            all.extend(prepared);
        }
        Ok((first, all))
    }

    async fn install(&self, mut records: Vec<Install>) -> Result<Vec<Tokens>, StoreError> {
        let live = self.live()?;
        let ahead = self.ahead()?;
        for record in &mut records {
            record.unseen = record.unseen.map(|unseen| unseen.in_store(record.shape, ahead));
        }
        let mut all = Vec::with_capacity(records.len());
        for records in chunks(&records, |record| record.permits.is_some()) {
            let (stem, window) = (&live.attached.stem, self.window()?);
            let read = |answer| wire::installed(answer, records.len());
            all.extend(if records.iter().any(|record| record.permits.is_some()) {
                let call = stem.install_permits(window, records);
                self.slow_by(&SCRIPTS.install_permits, &live, StoreCall::Install, call, read).await?
            } else {
                let call = stem.install(window, records);
                self.slow(&live, StoreCall::Install, call, read).await?
            });
        }
        Ok(all)
    }
}

impl Store for RedisStore {
    async fn take(&self, take: Take) -> Result<Taken, StoreError> {
        let until = Instant::now() + self.timeout();
        if take.len() > CHARGES_MAX {
            return Err(StoreError::Unavailable);
        }
        match &*self.lanes {
            [lane] => lane.take(take, until).await,
            _ => self.take_sharded(take, until).await,
        }
    }

    async fn known(&self, buckets: Vec<BucketId>) -> Result<(u64, Vec<bool>), StoreError> {
        match &*self.lanes {
            [lane] => lane.known(&buckets).await,
            _ => self.known_sharded(&buckets).await,
        }
    }

    async fn prepare(&self, asks: Vec<Prepare>) -> Result<(Micros, Vec<Prepared>), StoreError> {
        match &*self.lanes {
            [lane] => {
                let (now, prepared) = lane.prepare(asks).await?;
                Ok((now.unwrap_or_else(|| self.now()), prepared))
            }
            _ => self.prepare_sharded(asks).await,
        }
    }

    async fn install(&self, records: Vec<Install>) -> Result<Vec<Tokens>, StoreError> {
        match &*self.lanes {
            [lane] => lane.install(records).await,
            _ => self.install_sharded(records).await,
        }
    }
}

/// In their order, in calls of one kind.
fn chunks<T>(all: &[T], kind: impl Fn(&T) -> bool) -> impl Iterator<Item = &[T]> {
    let runs = all.chunk_by(move |a, b| kind(a) == kind(b));
    runs.flat_map(|run| run.chunks(BUCKETS_A_CALL))
}
