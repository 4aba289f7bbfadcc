//! Builds, runs and drains one region: the only file that knows all rooms.

mod admin;
mod files;
mod gauges;
mod hot;
mod live;
mod overview;
mod regions;
mod resets;
mod waiting;

use crate::config::{Config, RedisTls, Secret, StoreConfig, Unmatched};
use crate::limiter::active::Active;
use crate::limiter::meter::Meter;
use crate::limiter::newcomers::NewBuckets;
use crate::limiter::{Core, Limiter};
use crate::quota::amount::Micros;
use crate::quota::policy::{Mode, Policy};
use crate::quota::pool::{LEVEL, Standing};
use crate::quota::redaction::Redaction;
use crate::raft::{self, Raft, RaftConfig, RaftError, RaftStatus};
use crate::reconcile::{Progress, Reconcile};
use crate::server::listen::bind;
use crate::server::{self, Listeners, Server, ServerError};
use crate::store::memory::MemoryStore;
use crate::store::redis::{RedisConfig, RedisConfigError, RedisStore};
use crate::store::{AnyStore, RegionStore as _, Store as _};
use crate::telemetry::{Metrics, wall_clock};
use crate::tls::ClientFiles;
use live::{Live, LiveError};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// How often readiness is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A replica with more committed entries than this to apply is not ready.
const LAG_MAX: u64 = 1_000;
/// A start that takes longer than this is worth a warning.
const SLOW_START: Duration = Duration::from_secs(10);
/// So much longer than [`Config::drain_within`] the slow loop may take to end: it finishes what it is at.
const RECONCILE_DRAIN: Duration = Duration::from_secs(5);

/// How often the store is asked how many keys it holds.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// Why a region could not start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A listener or a worker.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The replicated pool.
    #[error(transparent)]
    Raft(#[from] RaftError),
    /// The store's configuration.
    #[error(transparent)]
    Store(#[from] RedisConfigError),
    /// A certificate or a token.
    #[error(transparent)]
    Live(#[from] LiveError),
}

/// One running region.
#[derive(Debug)]
pub struct Node {
    inner: Arc<Inner>,
    /// `None`: a witness serves nobody.
    server: Option<Server>,
    reconcile: JoinHandle<()>,
    stop_reconcile: watch::Sender<bool>,
    stop_rest: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
    failed: watch::Receiver<Option<String>>,
}

/// What the admin listener looks at, too.
struct Inner {
    config: Config,
    raft: Raft,
    store: AnyStore,
    core: Arc<Core>,
    live: Arc<Live>,
    progress: watch::Receiver<Progress>,
    /// What is shown of the whole cluster.
    overview: overview::Overview,
    /// What metrics show of the busiest buckets.
    hot: hot::Hot,
    /// It has been told to stop.
    stopping: AtomicBool,
    /// It has joined once: whatever happens to the quorum later, it serves what it holds.
    joined: AtomicBool,
    began: Instant,
}

impl Node {
    /// Starts a region on the current runtime (callers get worker threads of their own). It listens when this returns,
    /// and answers callers once it is able to, or after two seconds: see [`Self::not_ready`]. A region whose data directory is
    /// empty and that is not in the cluster waits here until an operator has added it. `first_policies` count if the cluster has none yet.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn start(config: Config, first_policies: Vec<Policy>) -> Result<Self, NodeError> {
        let live = Arc::new(Live::new(&config)?);
        let (peer, admin) = (bind(config.listen.peer)?, bind(config.listen.admin)?);
        if config.redact_key.is_none() && !config.redact.is_empty() {
            tracing::warn!(
                "`redact` has no `redact_key_file`: whoever sees the names of buckets can try values until one fits"
            );
        }
        let redaction = redaction(&config);
        let mut raft_config = raft_config(&config);
        raft_config.seat = waiting::for_seat(&raft_config, &admin, live.admin_tls.clone()).await?;
        let listeners = match config.is_witness() {
            true => None,
            false => Some(Listeners { http: bind(config.listen.http)?, grpc: bind(config.listen.grpc)? }),
        };
        let metrics = Arc::new(Metrics::new(&config.region));
        let unmatched_allowed = config.unmatched == Unmatched::Allow;
        let raft = Raft::start(raft_config, first_policies).await?;
        let store = store(&config)?;
        raft.measure(metrics.raft.clone());
        store.measure(&metrics.store);
        let local = MemoryStore::monotonic(wall_micros());
        let active = Active::none(unmatched_allowed, &metrics);
        let pool = raft.pool();
        // A request does not wait for a replica that is applying something.
        let peek = move |policy, bucket| pool.try_read().map(|pool| pool.free(policy, bucket, pool.tau()));
        let limits = config.caller_limits;
        let new_buckets =
            NewBuckets { per_second: limits.new_buckets_per_second, stored_max: limits.buckets };
        let core = Core::new(active, Arc::clone(&metrics), local, Box::new(peek))
            .with_meter(Meter::new(redaction.clone()))
            .with_new_buckets(new_buckets)
            .with_redaction(redaction)
            .of(config.region.clone());
        let core = Arc::new(core);
        let reconcile = Reconcile::new(
            raft.clone(),
            store.clone(),
            Arc::clone(&core),
            config.region.clone(),
            unmatched_allowed,
        )
        .draining_within(config.drain_within);
        let inner = Arc::new(Inner {
            progress: reconcile.progress(),
            raft: raft.clone(),
            store: store.clone(),
            core: Arc::clone(&core),
            overview: overview::Overview::default(),
            hot: hot::Hot::default(),
            live: Arc::clone(&live),
            stopping: AtomicBool::new(false),
            joined: AtomicBool::new(false),
            began: Instant::now(),
            config,
        });
        let (stop_reconcile, stopping) = watch::channel(false);
        let reconcile = tokio::spawn(reconcile.run(stopping));
        let (stop_rest, stopping) = watch::channel(false);
        let (fail, failed) = watch::channel(None);
        let (ready, is_ready) = watch::channel(false);
        let (able, is_able) = watch::channel(false);
        let mut tasks = vec![
            tokio::spawn(live::follow(Arc::clone(&live), raft.clone(), stopping.clone())),
            tokio::spawn(count_keys(Arc::clone(&inner), stopping.clone())),
            tokio::spawn(serve_peers(raft, peer, fail.clone())),
            tokio::spawn(admin::serve(Arc::clone(&inner), admin, stopping.clone(), fail.clone())),
        ];
        tasks.push(tokio::spawn(overview::keep(Arc::clone(&inner), stopping.clone())));
        tasks.push(tokio::spawn(until_able(Arc::clone(&inner), able, stopping.clone())));
        tasks.push(tokio::spawn(gauges::keep(Arc::clone(&inner), stopping.clone())));
        tasks.push(tokio::spawn(watch_over(Arc::clone(&inner), ready, stopping, fail)));
        let Some(listeners) = listeners else {
            tracing::info!("this is a witness: it votes, and serves nobody");
            return Ok(Self { inner, server: None, reconcile, stop_reconcile, stop_rest, tasks, failed });
        };
        let build = move |_| Limiter::new(store.worker(), Arc::clone(&core));
        let forward_auth = inner.config.forward_auth.clone().map(Arc::new);
        let mut options = server::Options { forward_auth, able: Some(is_able), ..server::Options::default() };
        let many = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        options.connections_max = many(limits.connections).min(files::connections_max(2));
        options.connections_per_address_max = many(limits.connections_per_address);
        options.connection.streams_max = limits.streams;
        options.callers = live.callers.clone();
        let server = Some(server::start(listeners, options, metrics, is_ready, build).await?);
        Ok(Self { inner, server, reconcile, stop_reconcile, stop_rest, tasks, failed })
    }

    /// What keeps it from being ready; empty: it is.
    #[must_use]
    pub fn not_ready(&self) -> Vec<String> {
        self.inner.not_ready()
    }

    /// Reads what can change live again: certificates and tokens.
    ///
    /// # Errors
    /// One cannot be used: then the old one stays in use.
    pub fn reload(&self) -> Result<(), NodeError> {
        Ok(self.inner.live.reload(&self.inner.raft)?)
    }

    /// Waits until it cannot go on, and says why.
    pub async fn failed(&self) -> String {
        let mut failed = self.failed.clone();
        loop {
            if let Some(why) = failed.borrow_and_update().clone() {
                return why;
            }
            if failed.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Says that it is not ready for [`Config::drain_wait`], and serves, on connections that end with their next answer; then takes no more
    /// connections, answers what is in flight, gives back what is borrowed (for at most [`Config::drain_within`]), and stops.
    pub async fn drain(self) {
        tracing::info!("draining");
        self.inner.stopping.store(true, Ordering::Relaxed);
        if let Some(server) = &self.server {
            server.leave();
        }
        tokio::time::sleep(self.inner.config.drain_wait).await;
        if let Some(server) = self.server
            && !server.drain().await
        {
            tracing::warn!("some connections did not end in time and were cut");
        }
        self.stop_reconcile.send_replace(true);
        let within = self.inner.config.drain_within + RECONCILE_DRAIN;
        if tokio::time::timeout(within, self.reconcile).await.is_err() {
            tracing::warn!("leases were not given back in time; they end by themselves");
        }
        self.stop_rest.send_replace(true);
        self.inner.raft.shutdown().await;
        self.inner.store.close().await;
        for task in self.tasks {
            // It has been told to stop, or the listener it served is gone.
            let _ = tokio::time::timeout(Duration::from_secs(3), task).await;
        }
        tracing::info!("stopped");
    }
}

impl Inner {
    fn not_ready(&self) -> Vec<String> {
        let mut why = Vec::new();
        if self.stopping.load(Ordering::Relaxed) {
            why.push("it has been told to stop".into());
        }
        let health = self.store.health();
        if let Some(down) = health.down {
            why.push(format!("store: {down}"));
        } else if self.store.session().borrow().session().is_none() {
            why.push("store: not attached yet".into());
        }
        let status = self.raft.status();
        if let Some(fault) = &status.fault {
            why.push(format!("raft: {fault}"));
        }
        if let Some(gone) = self.standing(&status) {
            why.push(gone);
            return why;
        }
        let progress = self.progress.borrow().clone();
        if progress.policies == 0 {
            why.push(
                "raft: no policies yet; a quorum of regions must be up once to found the cluster".into(),
            );
        }
        if progress.epoch.is_some() {
            self.joined.store(true, Ordering::Relaxed);
        } else if !self.joined.load(Ordering::Relaxed) && self.store.session().borrow().session().is_some() {
            why.push("raft: the region has not joined the cluster yet; is there a leader?".into());
        }
        let lag = status.committed.unwrap_or(0).saturating_sub(status.applied.unwrap_or(0));
        if lag > LAG_MAX {
            why.push(format!("raft: {lag} committed entries are still to be applied"));
        }
        if self.core.active.load().has_windows && self.core.time.now().is_none() {
            why.push("raft: nobody knows the time of day yet, which quotas go by; a majority of the regions has to say what time it is".into());
        }
        if let Some(evicts) = health.evicts
            && self.core.active.load().policies().any(|p| p.policy.mode == Mode::Strict)
        {
            why.push(format!("store: {evicts}; strict policies need a Redis that never evicts"));
        }
        why
    }
}

impl Inner {
    /// Why the region is no full member of the cluster, if it is not one any more.
    fn standing(&self, status: &RaftStatus) -> Option<String> {
        let region = &self.config.region;
        let pool = self.raft.pool();
        let pool = pool.read();
        let member = pool.region(region).and_then(|id| pool.member(id));
        let mine = member.as_ref().is_some_and(|member| member.node == status.id);
        let gone = member.as_ref().is_some_and(|m| m.node > status.id || mine && m.standing == Standing::Out);
        if gone || status.removed {
            return Some(format!(
                "raft: region `{region}` has been removed from the cluster; stop this daemon (to come back: empty its data_dir, `quorate region add {region} --url URL`, start it)"
            ));
        }
        if let Some(member) = member.as_ref().filter(|_| mine)
            && member.witness != self.config.is_witness()
        {
            let (is, is_not) = ("a witness, which serves nobody", "a region that serves callers");
            let (is, here) = if member.witness { (is, is_not) } else { (is_not, is) };
            return Some(format!(
                "raft: to the cluster `{region}` is {is}, and `cluster.witnesses` here makes it {here}; change the file, or remove it and add it again as what it is to be"
            ));
        }
        let leaves = mine && member.is_some_and(|m| matches!(m.standing, Standing::Leaving { .. }));
        leaves.then(|| format!("raft: region `{region}` is leaving the cluster"))
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("region", &self.config.region).finish_non_exhaustive()
    }
}

/// How a region takes part in Raft, as its file says.
#[must_use]
pub fn raft_config(config: &Config) -> RaftConfig {
    RaftConfig {
        region: config.region.clone(),
        cluster: config.cluster.name.to_string(),
        regions: config.cluster.regions.iter().map(|p| (p.name.clone(), p.url.to_string())).collect(),
        witnesses: config.cluster.witnesses.clone(),
        data_dir: config.data_dir.clone(),
        seat: None,
        tls: config.peer_tls.as_ref().map(|tls| raft::PeerTls {
            cert: tls.cert.clone(),
            key: tls.key.clone(),
            ca: tls.ca.clone(),
        }),
        rtt_max: config.cluster.rtt_max,
        redaction: redaction(config).fingerprint(),
        level: LEVEL,
    }
}

/// Without a key of its own it takes the cluster's name: then values can be tried by whoever knows that.
fn redaction(config: &Config) -> Redaction {
    let secret = config.redact_key.as_ref().map(Secret::expose);
    Redaction::new(config.redact.clone(), secret.unwrap_or(&config.cluster.name))
}

fn store(config: &Config) -> Result<AnyStore, NodeError> {
    match &config.store {
        // Of a witness nothing is ever in it.
        StoreConfig::Embedded | StoreConfig::None => {
            Ok(AnyStore::Memory(MemoryStore::monotonic(wall_micros())))
        }
        StoreConfig::Redis(redis) => {
            let config = RedisConfig {
                url: redis.url.expose().to_owned(),
                tls: redis.tls.clone().map(|RedisTls { ca, own }| ClientFiles { ca, own }),
                timeout: redis.timeout,
                cluster: config.cluster.name.to_string(),
                region: config.region.to_string(),
            };
            Ok(AnyStore::Redis(RedisStore::connect(&config)?))
        }
    }
}

fn wall_micros() -> Micros {
    Micros::from_duration(wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default())
}

async fn serve_peers(raft: Raft, listener: std::net::TcpListener, fail: watch::Sender<Option<String>>) {
    match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => raft.serve_peers(listener).await,
        Err(error) => {
            fail.send_replace(Some(format!("peer listener: {error}")));
        }
    }
}

/// Says when the region can decide about requests for the first time: it knows the policies and has a store. It need not
/// have joined the cluster for that: what it holds is its to spend.
async fn until_able(inner: Arc<Inner>, able: watch::Sender<bool>, mut stopping: watch::Receiver<bool>) {
    let (mut progress, mut session) = (inner.progress.clone(), inner.store.session());
    let both = async {
        let _ = progress.wait_for(|p| p.policies > 0).await;
        let _ = session.wait_for(|s| s.session().is_some()).await;
    };
    tokio::select! {
        () = both => { able.send_replace(true); }
        _ = stopping.wait_for(|stop| *stop) => {}
    }
}

/// Keeps track of how full the store is.
async fn count_keys(inner: Arc<Inner>, mut stopping: watch::Receiver<bool>) {
    loop {
        // One that does not answer counts as it did last; callers find out by themselves.
        if let Ok((stored, _)) = inner.store.known(Vec::new()).await {
            inner.core.newcomers.set_stored(stored);
        }
        tokio::select! {
            () = tokio::time::sleep(COUNT_EVERY) => {}
            _ = stopping.wait_for(|stop| *stop) => return,
        }
    }
}

/// Keeps readiness and gauges up to date, and notices when Raft has stopped for good.
async fn watch_over(
    inner: Arc<Inner>,
    ready: watch::Sender<bool>,
    mut stopping: watch::Receiver<bool>,
    fail: watch::Sender<Option<String>>,
) {
    let mut last: Option<Vec<String>> = None;
    let (mut was_ready, mut told) = (false, false);
    loop {
        let why = inner.not_ready();
        if last.as_ref() != Some(&why) {
            if why.is_empty() {
                let after_ms = u64::try_from(inner.began.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(after_ms, "ready");
            } else if last.is_none() {
                tracing::info!(waits_for = why.join("; "), "starting");
            } else if last.is_some_and(|last| last.is_empty()) {
                tracing::warn!(why = why.join("; "), "not ready");
            }
            was_ready |= why.is_empty();
            ready.send_replace(why.is_empty());
            inner.core.metrics.ready.set(i64::from(why.is_empty()));
            last = Some(why);
        } else if !was_ready && !told && inner.began.elapsed() > SLOW_START {
            tracing::warn!(why = why.join("; "), "still not ready");
            told = true;
        }
        if let Some(fault) = inner.raft.status().fault {
            fail.send_replace(Some(format!("raft has stopped: {fault}")));
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            _ = stopping.wait_for(|stop| *stop) => return,
        }
    }
}
