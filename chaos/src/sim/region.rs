//! A region: its machine, its store, and its daemon, which is the product's own [`Limiter`] and [`Reconcile`].

use super::logs::{AnyLog, Logs};
use super::machine::Machine;
use super::store::{Shelf, SimStore};
use quorate::limiter::active::Active;
use quorate::limiter::{Core, Decide as _, Limiter};
use quorate::quota::amount::{Micros, Tokens};
use quorate::quota::bucket::{Shape, Unseen};
use quorate::quota::matching::{Request, Subject};
use quorate::quota::policy::RegionName;
use quorate::quota::verdict::Verdict;
use quorate::reconcile::Reconcile;
use quorate::store::memory::MemoryStore;
use quorate::telemetry::Metrics;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// The domain of all policies here.
pub const DOMAIN: &str = "sim";
/// The longest that a caller waits for an answer.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// A region.
pub struct Region {
    /// Its number, and Raft's.
    pub number: usize,
    /// Its name in the cluster.
    pub name: RegionName,
    /// What its daemon runs on.
    pub machine: Arc<Machine>,
    /// Its store.
    pub shelf: Arc<Shelf>,
    daemon: Mutex<Option<Daemon>>,
    draining: AtomicBool,
    /// The Raft node id that the pool gave it; 0: it is no member.
    node: AtomicU64,
    /// The life of the machine in which its daemon was started last.
    starting: AtomicU64,
}

/// One life of a daemon.
#[derive(Clone)]
struct Daemon {
    limiter: Limiter<SimStore>,
    core: Arc<Core>,
    stop: Arc<watch::Sender<bool>>,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Region").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Region {
    /// One without a daemon yet.
    #[must_use]
    pub fn new(number: usize, name: RegionName, machine: Arc<Machine>, shelf: Arc<Shelf>) -> Self {
        let (daemon, draining) = (Mutex::default(), AtomicBool::new(false));
        let starting = AtomicU64::new(u64::MAX);
        let node = AtomicU64::new(0);
        Self { number, name, machine, shelf, daemon, draining, node, starting }
    }

    /// Starts its daemon, if none runs.
    pub fn start(self: &Arc<Self>, logs: &Logs) {
        if self.daemon().is_some() || self.draining.load(Ordering::Relaxed) || !self.is_member() {
            return;
        }
        let life = self.machine.life();
        if self.starting.swap(life, Ordering::Relaxed) == life {
            return;
        }
        let region = Arc::clone(self);
        logs.start(self.number, self.node.load(Ordering::Relaxed), move |log| {
            if region.machine.life() == life {
                let store = SimStore::new(Arc::clone(&region.shelf));
                let daemon = region.machine.with_clocks(|| region.build(log, store.clone()));
                tokio::spawn(region.machine.run(store.supervise()));
                *region.lock() = Some(daemon);
            }
        });
    }

    fn build(&self, log: AnyLog, store: SimStore) -> Daemon {
        use quorate::raft::Log as _;
        let metrics = Arc::new(Metrics::new(&self.name));
        let pool = log.pool();
        let peek = move |policy, bucket| pool.try_read().map(|pool| pool.free(policy, bucket, pool.tau()));
        let local = MemoryStore::monotonic(Micros::seconds(1_000_000));
        let active = Active::none(true, &metrics);
        let core = Core::new(active, metrics, local, Box::new(peek)).of(self.name.clone());
        let core = Arc::new(core);
        let limiter = Limiter::new(store.clone(), Arc::clone(&core));
        let loop_ = Reconcile::new(log, store, Arc::clone(&core), self.name.clone(), true);
        let (stop, stopping) = watch::channel(false);
        tokio::spawn(self.machine.run(loop_.run(stopping)));
        Daemon { limiter, core, stop: Arc::new(stop) }
    }

    /// Ends its daemon without a word.
    pub fn crash(&self, logs: &Logs) {
        self.machine.crash();
        logs.crash(self.number, false);
        *self.lock() = None;
    }

    /// Ends its daemon in good order: it gives back what it has borrowed.
    pub async fn drain(&self, logs: &Logs) {
        let Some(daemon) = self.lock().take() else { return };
        self.draining.store(true, Ordering::Relaxed);
        daemon.stop.send_replace(true);
        tokio::time::sleep(Duration::from_secs(3)).await;
        self.machine.crash();
        logs.crash(self.number, true);
        self.draining.store(false, Ordering::Relaxed);
    }

    /// Is it a member of the cluster?
    #[must_use]
    pub fn is_member(&self) -> bool {
        self.node.load(Ordering::Relaxed) != 0
    }

    /// It is a member under this Raft node id (0: it is none), from its next start on.
    pub fn set_node(&self, node: u64) {
        self.node.store(node, Ordering::Relaxed);
    }

    /// Does a daemon run?
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.daemon().is_some()
    }

    /// Asks the daemon about a bucket; `None`: no answer.
    pub async fn check(&self, key: &str, value: &str, cost: Tokens) -> Option<Verdict> {
        let daemon = self.daemon()?;
        let attributes = [(key, value)];
        let request = Request { domain: DOMAIN, subject: Subject::Attributes(&attributes), cost };
        let decided = self.machine.run(daemon.limiter.check(&request, Some(PATIENCE)));
        tokio::time::timeout(PATIENCE, decided).await.ok()??.ok()
    }

    /// Takes permits; `None`: there are none, or no answer. The lease, and how long its holder is told that it lasts.
    pub async fn acquire(&self, key: &str, value: &str, cost: i64) -> Option<(String, Micros)> {
        let daemon = self.daemon()?;
        let attributes = [(key, value)];
        let subject = Subject::Attributes(&attributes);
        let request = Request { domain: DOMAIN, subject, cost: Tokens::whole(cost) };
        let acquired = self.machine.run(daemon.limiter.acquire(&request));
        let (_, lease) = tokio::time::timeout(PATIENCE, acquired).await.ok()??.ok()?;
        lease.map(|lease| (lease.token, lease.expires))
    }

    /// Renews a lease; `None`: it was not, or there was no answer. How long it lasts.
    pub async fn renew(&self, lease: &str) -> Option<Micros> {
        let daemon = self.daemon()?;
        let renewed = self.machine.run(daemon.limiter.renew(lease));
        tokio::time::timeout(PATIENCE, renewed).await.ok()??.ok()
    }

    /// Gives a lease's permits back, if that can be.
    pub async fn release(&self, lease: &str) {
        let Some(daemon) = self.daemon() else { return };
        let released = self.machine.run(daemon.limiter.release(lease));
        // Else they end by themselves.
        let _ = tokio::time::timeout(PATIENCE, released).await;
    }

    /// What this region may use now of a policy: its shape, and what buckets are that its store does not hold.
    #[must_use]
    pub fn part(&self, policy: &str) -> Option<(Shape, Option<Unseen>)> {
        let daemon = self.daemon()?;
        let active = daemon.core.active.load();
        active.policies().find(|p| &*p.policy.name == policy).map(|p| (p.shape, p.unseen))
    }

    /// The version of the policies that its daemon goes by.
    #[must_use]
    pub fn version(&self) -> Option<u64> {
        Some(self.daemon()?.core.active.load().version)
    }

    fn daemon(&self) -> Option<Daemon> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Daemon>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
