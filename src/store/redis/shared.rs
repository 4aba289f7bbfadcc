//! What the control task and the workers of one store have in common.

use super::clock::{Clock, TOLERANCE};
use super::fault::Fault;
use super::server::{Address, Server};
use super::wire::Beaten;
use super::wire::{Keys, Stem};
use crate::quota::amount::{DRIFT_PPM, Micros};
use crate::quota::bucket::Generation;
use crate::store::{Health, Session, SessionState};
use crate::telemetry::metrics::{StoreCall, StoreMetrics};
use arc_swap::ArcSwapOption;
use fred::clients::Client;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, SetOnce, watch};
use tokio::time::Instant;

/// One store's state.
pub(super) struct Region {
    pub(super) server: Arc<Server>,
    /// One, or the shards of a Redis Cluster.
    pub(super) shards: Vec<Arc<Shared>>,
    pub(super) state: watch::Sender<SessionState>,
    pub(super) closed: watch::Sender<bool>,
    pub(super) lost: Arc<AtomicBool>,
    pub(super) metrics: Arc<OnceLock<StoreMetrics>>,
    /// How far the store's clock is ahead of the daemon's, where it is that of no one server.
    ahead: OnceLock<Micros>,
    rtt_us: AtomicU64,
}

/// The state of one shard: what one meta key is the fence of.
pub(super) struct Shared {
    /// A decision never waits longer than this.
    pub(super) timeout: Duration,
    /// Where Redis is, with its secrets.
    pub(super) server: Arc<Server>,
    pub(super) keys: Keys,
    /// The session that the workers run under. It outlives the control task's connection; it ends where the data does.
    pub(super) attached: watch::Sender<Option<Arc<Attached>>>,
    /// Someone saw something that the control task should look at at once.
    pub(super) doubt: Notify,
    /// The server was a replica for a while: what it holds now may be older than what it held then.
    pub(super) lost: Arc<AtomicBool>,
    pub(super) metrics: Arc<OnceLock<StoreMetrics>>,
    /// Links that wait for an answer that is overdue.
    overdue: Arc<AtomicUsize>,
    clock: Mutex<Option<Clock>>,
    health: Mutex<Health>,
}

/// A session in force.
pub(super) struct Attached {
    pub(super) session: Session,
    pub(super) stem: Stem,
    /// The server that it is on ...
    pub(super) run_id: String,
    /// ... and where that is.
    pub(super) address: Address,
    start: Micros,
    /// How far its clock was ahead of the daemon's when the session began.
    pub(super) ahead: Micros,
    full: AtomicBool,
    known: AtomicBool,
    over: AtomicBool,
}

impl Attached {
    pub(super) fn new(
        session: Session,
        stem: Stem,
        (run_id, address): (String, Address),
        (generation, ahead): (Generation, Micros),
    ) -> Self {
        let Generation { start, full, known } = generation;
        let (full, known) = (AtomicBool::new(full), AtomicBool::new(known));
        Self { session, stem, run_id, address, start, ahead, full, known, over: AtomicBool::new(false) }
    }

    /// Nothing more may be sent under it. Whoever asks has taken the time before.
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub(super) fn generation(&self) -> Generation {
        let (full, known) = (self.full.load(Ordering::SeqCst), self.known.load(Ordering::SeqCst));
        Generation { start: self.start, full, known }
    }

    /// Notes what has been said of this generation.
    pub(super) fn heard(&self, beaten: Beaten) {
        self.full.fetch_or(beaten.full, Ordering::SeqCst);
        self.known.fetch_or(beaten.known, Ordering::SeqCst);
    }
}

/// A connection that has been checked to lead to the session's buckets.
pub(super) struct Live {
    pub(super) client: Client,
    pub(super) attached: Arc<Attached>,
    /// Its owner should drop it.
    pub(super) broken: Notify,
}

/// The end of a link that calls look at.
#[derive(Default)]
pub(super) struct Link {
    pub(super) live: ArcSwapOption<Live>,
    /// The first connection has been there.
    pub(super) opened: SetOnce<()>,
    /// A call has been out for longer than a decision may wait: until it is answered, nothing more is sent.
    pub(super) overdue: AtomicBool,
}

impl Link {
    /// Calls may use this connection from now on.
    pub(super) fn open(&self, live: Arc<Live>) {
        self.live.store(Some(live));
        // Set already: it was not the first.
        let _ = self.opened.set(());
    }
}

impl Region {
    pub(super) fn new(timeout: Duration, server: Server, keys: impl Fn(usize) -> Keys) -> Self {
        let (server, lost) = (Arc::new(server), Arc::<AtomicBool>::default());
        let (metrics, overdue) = (Arc::<OnceLock<StoreMetrics>>::default(), Arc::<AtomicUsize>::default());
        let shard = |index| Shared {
            timeout,
            server: Arc::clone(&server),
            keys: keys(index),
            attached: watch::Sender::new(None),
            doubt: Notify::new(),
            lost: Arc::clone(&lost),
            metrics: Arc::clone(&metrics),
            overdue: Arc::clone(&overdue),
            clock: Mutex::new(None),
            health: Mutex::default(),
        };
        let shards = (0..server.shards()).map(|index| Arc::new(shard(index))).collect();
        let why = "not connected to Redis yet".to_owned();
        Self {
            server,
            shards,
            state: watch::Sender::new(SessionState::Detached { why }),
            closed: watch::Sender::new(false),
            lost,
            metrics,
            ahead: OnceLock::new(),
            rtt_us: AtomicU64::new(0),
        }
    }

    /// Why it gives no answers, or not all of them; why it may forget.
    pub(super) fn health(&self) -> Health {
        let mut all = Health::default();
        for shard in &self.shards {
            let health = shard.health();
            all.down = all.down.or_else(|| health.down.clone());
            all.evicts = all.evicts.or_else(|| health.evicts.clone());
        }
        match &*self.state.borrow() {
            SessionState::Detached { why } => Health { down: Some(why.clone()), ..all },
            SessionState::Attached(_) => all,
        }
    }

    /// How far the store's clock is ahead of the daemon's: what the first shard's was when it was first asked for, as long as the
    /// daemon lives. [`Shared::offset`] is a shard's own.
    pub(super) fn ahead(&self) -> Option<Micros> {
        if let Some(ahead) = self.ahead.get() {
            return Some(*ahead);
        }
        let (low, _) = self.shards.first()?.offset()?;
        Some(*self.ahead.get_or_init(|| low))
    }

    pub(super) fn rtt(&self) -> Duration {
        Duration::from_micros(self.rtt_us.load(Ordering::Relaxed))
    }

    /// Smooths over about eight exchanges.
    pub(super) fn observe_rtt(&self, rtt: Duration) {
        let new = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX).min(60_000_000);
        let old = self.rtt_us.load(Ordering::Relaxed);
        let smooth = if old == 0 { new } else { (old * 7 + new).div_ceil(8) };
        self.rtt_us.store(smooth, Ordering::Relaxed);
    }

    /// Resolves when the store is closed.
    pub(super) async fn until_closed(&self) {
        let mut closed = self.closed.subscribe();
        // The sender is in `self`: it cannot be gone.
        let _ = closed.wait_for(|closed| *closed).await;
    }
}

impl Shared {
    /// Bounds of how far this server's clock is ahead of the daemon's.
    pub(super) fn offset(&self) -> Option<(Micros, Micros)> {
        let now = crate::clock::now();
        self.window(now, Duration::ZERO).map(|(low, high)| (low - now, high - now))
    }

    /// Bounds of Redis' clock for a call that is sent at `sent`; `None` before the first exchange.
    pub(super) fn window(&self, sent: Micros, within: Duration) -> Option<(Micros, Micros)> {
        self.clock().map(|clock| clock.window(sent, Micros::from_duration(within)))
    }

    pub(super) fn clock(&self) -> MutexGuard<'_, Option<Clock>> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the session, also for workers that have not heard of it yet. Returns how long calls may still run that were sent
    /// before.
    pub(super) fn end_session(&self) -> Micros {
        if let Some(attached) = self.attached.send_replace(None) {
            attached.over.store(true, Ordering::SeqCst);
        }
        let Some((low, high)) = self.window(crate::clock::now(), self.timeout) else { return Micros::ZERO };
        let longest = high - low + TOLERANCE;
        longest + longest.mul_div(DRIFT_PPM, 1_000_000)
    }

    /// A link's oldest call is overdue, or no more: nothing is sent meanwhile.
    pub(super) fn set_overdue(&self, link: &Link, overdue: bool) {
        if link.overdue.swap(overdue, Ordering::Relaxed) == overdue {
            return;
        }
        let metrics = self.metrics.get();
        if overdue {
            let others = self.overdue.fetch_add(1, Ordering::Relaxed);
            metrics.inspect(|m| m.breaker_opened());
            if others == 0 {
                tracing::warn!(timeout = ?self.timeout, "Redis does not answer in time: requests are answered without it");
            }
        } else {
            let open = self.overdue.fetch_sub(1, Ordering::Relaxed);
            metrics.inspect(|m| m.breaker_closed());
            if open == 1 {
                tracing::info!("Redis answers again, or its connection has been given up");
            }
        }
    }

    /// A call that began then has been answered, or given up.
    pub(super) fn called(&self, call: StoreCall, began: Instant) {
        if let Some(metrics) = self.metrics.get() {
            metrics.called(call, began.elapsed());
        }
    }

    /// A call over `live` met a fault: who needs to know?
    pub(super) fn met(&self, fault: &Fault, live: &Live) {
        if let Fault::NotPrimary(_) = fault {
            self.lost.store(true, Ordering::SeqCst);
        }
        if matches!(fault, Fault::NotPrimary(_) | Fault::Fenced | Fault::Clock) {
            self.doubt.notify_one();
        }
        if fault.ends_connection() {
            live.broken.notify_one();
        }
    }
}

/// Growing pauses between attempts, with jitter.
pub(super) struct Backoff {
    next: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(50);
    const LONGEST: Duration = Duration::from_secs(2);

    pub(super) fn new() -> Self {
        Self { next: Self::FIRST }
    }

    pub(super) fn reset(&mut self) {
        self.next = Self::FIRST;
    }

    pub(super) async fn pause(&mut self) {
        let pause = self.next.mul_f64(rand::random_range(0.5..1.0));
        self.next = (self.next * 2).min(Self::LONGEST);
        tokio::time::sleep(pause).await;
    }
}
