//! A region's store as it may be: answers late or never, loses its data, goes back to an older state, is set to another time.
//!
//! Arithmetic is the product's ([`Bucket`]); the rules of sessions are those of its Redis scripts: whoever attached last is served,
//! everyone else is fenced, and a store that lost data starts a generation whose buckets are empty.

use super::chance::Chance;
use super::machine::{Clock, TrueTime, pass};
use quorate::bugs::{Bug, planted};
use quorate::quota::amount::{DRIFT_PPM, Micros, Rate, Tokens};
use quorate::quota::bucket::{self, Bucket, Charge, Generation, Grant, Moment, Shape, Unseen};
use quorate::quota::counted::lent::{self, LENT_LEASE_MAX, Slice};
use quorate::quota::counted::{self, Allowance, Counted, Kind};
use quorate::quota::policy::{BucketId, RegionName};
use quorate::quota::pool::Pool;
use quorate::store::{
    Asked, AskedCount, Install, Prepare, Prepared, RegionStore, Session, SessionState, Store, StoreError,
    Take, Taken, TakenCharge,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot, watch};

/// A caller waits no longer than this for an answer ...
const TIMEOUT: Duration = Duration::from_millis(20);
/// ... and a command that arrives later than this after it was sent does nothing.
const STALE: Micros = Micros::millis(500);

/// Hears of every token that is spent: true time, bucket, cost.
pub type OnSpent = Arc<dyn Fn(Micros, BucketId, Tokens) + Send + Sync>;

/// The store of a region. It outlives daemons.
pub struct Shelf {
    time: TrueTime,
    chance: Chance,
    state: Mutex<State>,
    /// Rung when whoever is attached should look again.
    pub disturbed: Notify,
    on_spent: OnSpent,
}

#[derive(Debug)]
struct State {
    clock: Clock,
    data: Data,
    saved: Data,
    /// The session in force; `None`: nobody is attached (any more).
    session: Option<Session>,
    sessions: u64,
    up: bool,
    slow: Micros,
    lossy: i64,
    /// Of each bucket's newest ask: its number, and the store's time that the daemon was told when it was prepared.
    prepared: BTreeMap<BucketId, (u64, Micros)>,
    /// For [`Bug::OverdraftForgottenOnLoss`].
    overdrafts: BTreeMap<BucketId, Tokens>,
}

/// What it holds.
#[derive(Clone, Debug, Default)]
struct Data {
    buckets: BTreeMap<BucketId, Bucket>,
    counts: BTreeMap<BucketId, Counted>,
    /// `None`: nothing at all.
    generation: Option<Generation>,
}

impl std::fmt::Debug for Shelf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shelf").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Shelf {
    /// An empty store with a clock of its own. Session numbers start after `sessions`.
    #[must_use]
    pub fn new(time: TrueTime, chance: Chance, clock: Clock, sessions: u64, on_spent: OnSpent) -> Arc<Self> {
        let state = State {
            clock,
            data: Data::default(),
            saved: Data::default(),
            session: None,
            sessions,
            up: true,
            slow: Micros::ZERO,
            lossy: 0,
            prepared: BTreeMap::new(),
            overdrafts: BTreeMap::new(),
        };
        Arc::new(Self { time, chance, state: Mutex::new(state), disturbed: Notify::new(), on_spent })
    }

    /// Everything is gone.
    pub fn lose_data(&self) {
        let mut state = self.state();
        state.data = Data::default();
        state.session = None;
        drop(state);
        self.disturbed.notify_one();
    }

    /// Keeps a copy of what there is.
    pub fn save(&self) {
        let mut state = self.state();
        state.saved = state.data.clone();
    }

    /// Goes back to the copy. The product notices (its heartbeat is older than it remembers, or the server is another one), and takes
    /// it for a loss of all data.
    pub fn roll_back(&self) {
        if planted(Bug::RollbackUndetected) {
            let mut state = self.state();
            state.data.buckets = state.saved.buckets.clone();
            return;
        }
        self.lose_data();
    }

    /// Its clock is set: the product takes that for a loss of data.
    pub fn step_clock(&self, by: Micros) {
        let now = self.time.now();
        self.state().clock.step(now, by);
        self.lose_data();
    }

    /// Its clock runs off true speed by so much.
    pub fn bend_clock(&self, ppm: i64) {
        let now = self.time.now();
        self.state().clock.bend(now, ppm);
    }

    /// Gives no answers, or does again.
    pub fn set_up(&self, up: bool) {
        self.state().up = up;
        self.disturbed.notify_one();
    }

    /// Takes up to so long each way, and loses so many of a hundred commands or answers.
    pub fn set_slow(&self, slow: Micros, lossy: i64) {
        let mut state = self.state();
        (state.slow, state.lossy) = (slow, lossy);
    }

    /// The overdraft that this region has for a bucket; only a deliberate bug goes by it.
    pub fn set_overdraft(&self, bucket: BucketId, overdraft: Tokens) {
        self.state().overdrafts.insert(bucket, overdraft);
    }

    /// Forgets buckets whose time has come, as Redis does.
    pub fn expire(&self) {
        let mut state = self.state();
        let now = state.clock.at(self.time.now());
        state.data.buckets.retain(|_, bucket| bucket.keep_until() > now);
    }

    /// What a request could take of this bucket now.
    #[must_use]
    pub fn spendable(&self, bucket: BucketId, shape: Shape, unseen: Option<Unseen>) -> Tokens {
        let state = self.state();
        let Some(session) = state.session else { return Tokens::ZERO };
        state.settled(bucket, shape, unseen, session.nonce, state.clock.at(self.time.now())).level()
    }

    /// What its clock reads.
    #[must_use]
    pub fn now(&self) -> Micros {
        self.state().clock.at(self.time.now())
    }

    /// What is lent to this bucket, as the store has it now: rate and burst.
    #[must_use]
    pub fn lease(&self, bucket: BucketId, shape: Shape, unseen: Option<Unseen>) -> (Rate, Tokens) {
        let state = self.state();
        let Some(session) = state.session else { return Default::default() };
        let now = state.clock.at(self.time.now());
        let bucket = state.settled(bucket, shape, unseen, session.nonce, now);
        bucket.borrowed()
    }

    /// How much of the rate of this bucket's reserve is not used at this moment, as the store has it: what is lent of it; all of it, where
    /// it does not refill yet.
    #[must_use]
    pub fn idle(&self, bucket: BucketId, shape: Shape, unseen: Option<Unseen>) -> Rate {
        let state = self.state();
        // What nobody is attached to, nobody uses.
        let Some(session) = state.session else { return Rate::MAX };
        let now = state.clock.at(self.time.now());
        let bucket = state.settled(bucket, shape, unseen, session.nonce, now);
        if bucket.refills_from() > now {
            return Rate::MAX;
        }
        bucket.on_loan().map_or(Rate::ZERO, |lent| lent.rate)
    }

    /// What the region of this store has been granted of a bucket, its store has not got yet, and still may get: its daemon has not
    /// read the record, or what it read is on its way. `pool` is the committed one.
    #[must_use]
    pub fn coming(
        &self,
        id: BucketId,
        shape: Shape,
        unseen: Option<Unseen>,
        pool: &Pool,
        region: &RegionName,
    ) -> Tokens {
        let state = self.state();
        let (Some(session), Some(region)) = (state.session, pool.region(region)) else { return Tokens::ZERO };
        let record = pool.record(id, region).filter(|record| {
            pool.epoch(region) == (record.epoch, session.nonce) && record.granted.is_positive()
        });
        let prepared = state.prepared.get(&id);
        let Some((record, (_, asked))) =
            record.and_then(|record| Some((record, prepared.filter(|(seq, _)| *seq == record.seq)?)))
        else {
            return Tokens::ZERO;
        };
        let now = state.clock.at(self.time.now());
        let grant = Grant {
            seq: record.seq,
            push: record.push,
            granted: record.granted,
            burst: record.offer_burst,
            rate: record.offer_rate.discount(DRIFT_PPM),
            deadline: *asked + record.lease.discount(DRIFT_PPM),
        };
        // Were everything spent that is there, and it came now.
        let mut bucket = [state.settled(id, shape, unseen, session.nonce, now)];
        let all = Charge { bucket: 0, cost: bucket[0].level(), enforce: true };
        bucket::take(&mut bucket, &[all]);
        bucket[0].install(&grant, session.nonce, Moment::at(now));
        bucket[0].level()
    }

    /// Does this bucket's reserve not refill yet?
    pub fn is_held(&self, bucket: BucketId) -> bool {
        let now = self.now();
        self.state().data.buckets.get(&bucket).is_some_and(|bucket| bucket.refills_from() > now)
    }

    /// The bucket as it is stored, for messages.
    #[must_use]
    pub fn describe(&self, bucket: BucketId) -> String {
        let state = self.state();
        let now = state.clock.at(self.time.now());
        format!("at {now:?} {:?}, {:?}", state.data.buckets.get(&bucket), state.data.generation)
    }

    /// A daemon attaches: a new session, under which whoever was attached before is fenced. `None`: it gives no answer.
    fn attach(&self) -> Option<Session> {
        let mut state = self.state();
        if !state.up {
            return None;
        }
        let kept = state.data.generation.is_some();
        if !kept {
            let start = state.clock.at(self.time.now());
            state.data.generation = Some(Generation { start, ..Generation::default() });
        }
        state.sessions += 1;
        let session = Session { nonce: state.sessions, kept };
        state.session = Some(session);
        Some(session)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a command, which does its work when it arrives, and waits for the answer.
    async fn call<T: Send + 'static>(
        self: &Arc<Self>,
        session: Option<Session>,
        work: impl FnOnce(&mut State, Session, Micros) -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let session = session.ok_or(StoreError::Unavailable)?;
        let (slow, lossy) = {
            let state = self.state();
            (state.slow, state.lossy)
        };
        if slow == Micros::ZERO && lossy == 0 {
            return self.execute(session, work);
        }
        let sent = self.time.now();
        let (there, back) = (self.chance.time(Micros::ZERO, slow), self.chance.time(Micros::ZERO, slow));
        let (lost, unanswered) = (self.chance.percent(lossy), self.chance.percent(lossy));
        let (reply, answer) = oneshot::channel();
        let shelf = Arc::clone(self);
        tokio::spawn(async move {
            pass(there).await;
            if lost || shelf.time.now() - sent > STALE {
                return;
            }
            let done = shelf.execute(session, work);
            pass(back).await;
            if !unanswered {
                // Whoever asked may have given up.
                let _ = reply.send(done);
            }
        });
        match tokio::time::timeout(TIMEOUT, answer).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) | Err(_) => Err(StoreError::Unknown),
        }
    }

    fn execute<T>(
        &self,
        session: Session,
        work: impl FnOnce(&mut State, Session, Micros) -> T,
    ) -> Result<T, StoreError> {
        let mut state = self.state();
        if !state.up {
            return Err(StoreError::Unavailable);
        }
        if state.session != Some(session) {
            return Err(StoreError::Fenced);
        }
        let now = state.clock.at(self.time.now());
        Ok(work(&mut state, session, now))
    }
}

impl State {
    fn settled(
        &self,
        bucket: BucketId,
        shape: Shape,
        unseen: Option<Unseen>,
        session: u64,
        now: Micros,
    ) -> Bucket {
        let mut generation = self.data.generation.unwrap_or_default();
        let stored = self.data.buckets.get(&bucket).copied();
        let mut unseen = unseen;
        if planted(Bug::OverdraftForgottenOnLoss) && !generation.full {
            let level = self.overdrafts.get(&bucket).copied().unwrap_or_default();
            unseen = Some(Unseen { level, at: generation.start });
            generation.full = true;
        }
        let mut bucket = stored.unwrap_or_else(|| Bucket::unseen(shape, unseen, generation, now));
        bucket.settle(shape, session, Moment::at(now));
        bucket
    }

    fn take(&mut self, take: &Take, session: Session, now: Micros) -> Taken {
        let (asked, charges) = take.numbered();
        let when = Moment::at(now);
        let (asked_counts, claims) = take.numbered_counts();
        let looked_at = |(id, kind, allowance): &AskedCount| {
            let mut count = self.data.counts.get(id).cloned().unwrap_or_else(|| Counted::new(*kind));
            count.settle(allowance.span, now);
            let slice = Slice::of(&self.settled(*id, Shape::default(), None, session.nonce, now));
            (count, allowance.under(self.data.generation.unwrap_or_default(), now).with(slice))
        };
        let mut counts: Vec<_> = asked_counts.iter().map(looked_at).collect();
        let checked = counted::check(&counts, &claims, when);
        let settled = |(id, shape, unseen): &Asked| self.settled(*id, *shape, *unseen, session.nonce, now);
        let mut buckets: Vec<Bucket> = asked.iter().map(settled).collect();
        let before = buckets.clone();
        let (fitted, fits) = bucket::take(&mut buckets, &charges);
        let allowed = fitted && checked.allowed;
        if !allowed {
            buckets = before;
        }
        let (counted, changed) = checked.commit(allowed, &mut counts, &claims, when);
        for (((id, ..), (count, _)), _) in
            asked_counts.iter().zip(counts).zip(changed).filter(|(_, changed)| *changed)
        {
            self.data.counts.insert(*id, count);
        }
        let seen = charges.iter().zip(fits).map(|(charge, fits)| {
            let bucket = &buckets[charge.bucket];
            TakenCharge { fits, level: bucket.level(), rate: bucket.rate(), cap: bucket.cap() }
        });
        let taken = Taken { allowed, now, charges: seen.collect(), counts: counted };
        for ((id, ..), bucket) in asked.into_iter().zip(buckets) {
            // What is stored is written back in any case: it may have come under another shape.
            if allowed || self.data.buckets.contains_key(&id) {
                self.data.buckets.insert(id, bucket);
            }
        }
        taken
    }

    fn prepare(&mut self, ask: &Prepare, session: Session, now: Micros) -> Prepared {
        if let Some(allowance) = &ask.permits {
            let mut bucket = self.settled(ask.bucket, Shape::default(), None, session.nonce, now);
            let (count, allowance) = self.permits(&ask.bucket, allowance, now);
            let kept = lent::shrink(&mut bucket, &count, &allowance, ask.hold_burst, now);
            bucket.fence_for(LENT_LEASE_MAX, ask.seq, session.nonce, Moment::at(now));
            self.data.buckets.insert(ask.bucket, bucket);
            let (leased, level, burst) = (kept.leased, kept.left, kept.held);
            return Prepared { leased, level, burst, ..Prepared::default() };
        }
        let mut bucket = self.settled(ask.bucket, ask.shape, ask.unseen, session.nonce, now);
        let shrunk = bucket.shrink(ask.hold_burst, ask.hold_rate);
        bucket.fence(ask.seq, session.nonce, Moment::at(now));
        let lent = bucket.lend(ask.lend_rate, ask.lend_for, Moment::at(now));
        self.data.buckets.insert(ask.bucket, bucket);
        let (leased, returned) = (shrunk.leased, shrunk.returned);
        Prepared { leased, level: bucket.level(), returned, burst: shrunk.burst, rate: shrunk.rate, lent }
    }

    fn install(&mut self, record: &Install, session: Session, now: Micros) -> Tokens {
        let shape = if record.permits.is_some() { Shape::default() } else { record.shape };
        let mut bucket = self.settled(record.bucket, shape, record.unseen, session.nonce, now);
        bucket.install(&record.grant, session.nonce, Moment::at(now));
        self.data.buckets.insert(record.bucket, bucket);
        let Some(allowance) = &record.permits else { return bucket.level() };
        let (count, allowance) = self.permits(&record.bucket, allowance, now);
        lent::left(&bucket, &count, &allowance, now)
    }

    /// Permits, and what may be used of them.
    fn permits(&self, id: &BucketId, allowance: &Allowance, now: Micros) -> (Counted, Allowance) {
        let count = self.data.counts.get(id).cloned().unwrap_or_else(|| Counted::new(Kind::Permits));
        (count, allowance.under(self.data.generation.unwrap_or_default(), now))
    }
}

/// A daemon's way to its region's store, for one life of the daemon.
#[derive(Clone, Debug)]
pub struct SimStore {
    shelf: Arc<Shelf>,
    session: Arc<watch::Sender<SessionState>>,
}

impl SimStore {
    /// Not attached yet: see [`Self::supervise`].
    #[must_use]
    pub fn new(shelf: Arc<Shelf>) -> Self {
        let detached = SessionState::Detached { why: "not yet".into() };
        Self { shelf, session: Arc::new(watch::Sender::new(detached)) }
    }

    /// Attaches, and again whenever the store has lost what it had.
    pub async fn supervise(self) {
        loop {
            let mine = self.session.borrow().session();
            let in_force = self.shelf.state().session;
            if mine.is_none() || mine != in_force {
                pass(self.shelf.chance.time(Micros::ZERO, Micros::millis(300))).await;
                match self.shelf.attach() {
                    Some(session) => drop(self.session.send_replace(SessionState::Attached(session))),
                    None => pass(Micros::millis(50)).await,
                }
                continue;
            }
            self.shelf.disturbed.notified().await;
        }
    }

    /// How far its clock is ahead of the machine's monotonic one.
    fn ahead(&self) -> Micros {
        self.shelf.now() - quorate::clock::now()
    }

    fn attached(&self) -> Option<Session> {
        self.session.borrow().session()
    }
}

impl Store for SimStore {
    async fn take(&self, mut take: Take) -> Result<Taken, StoreError> {
        let ahead = self.ahead();
        for charge in &mut take.charges {
            charge.unseen = charge.unseen.map(|unseen| unseen.in_store(charge.shape, ahead));
        }
        let (shelf, on_spent) = (Arc::clone(&self.shelf), Arc::clone(&self.shelf.on_spent));
        let work = move |state: &mut State, session, now| {
            let taken = state.take(&take, session, now);
            if taken.allowed {
                let real = shelf.time.now();
                let spent = take.charges.iter().zip(&taken.charges).filter(|(_, seen)| seen.fits);
                spent.for_each(|(charge, _)| on_spent(real, charge.bucket, charge.cost));
            }
            taken
        };
        self.shelf.call(self.attached(), work).await
    }

    async fn known(&self, buckets: Vec<BucketId>) -> Result<(u64, Vec<bool>), StoreError> {
        let work = move |state: &mut State, _: Session, _: Micros| {
            let held = &state.data.buckets;
            (held.len() as u64, buckets.iter().map(|id| held.contains_key(id)).collect())
        };
        self.shelf.call(self.attached(), work).await
    }

    async fn prepare(&self, mut asks: Vec<Prepare>) -> Result<(Micros, Vec<Prepared>), StoreError> {
        let ahead = self.ahead();
        for ask in &mut asks {
            ask.unseen = ask.unseen.map(|unseen| unseen.in_store(ask.shape, ahead));
        }
        let numbers: Vec<_> = asks.iter().map(|ask| (ask.bucket, ask.seq)).collect();
        let work = move |state: &mut State, session, now| {
            (now, asks.iter().map(|ask| state.prepare(ask, session, now)).collect())
        };
        let prepared = self.shelf.call(self.attached(), work).await;
        if let Ok((now, _)) = &prepared {
            self.shelf.state().prepared.extend(numbers.into_iter().map(|(id, seq)| (id, (seq, *now))));
        }
        prepared
    }

    async fn install(&self, mut records: Vec<Install>) -> Result<Vec<Tokens>, StoreError> {
        let ahead = self.ahead();
        for record in &mut records {
            record.unseen = record.unseen.map(|unseen| unseen.in_store(record.shape, ahead));
        }
        let work = move |state: &mut State, session, now| {
            records.iter().map(|record| state.install(record, session, now)).collect()
        };
        self.shelf.call(self.attached(), work).await
    }
}

impl RegionStore for SimStore {
    fn session(&self) -> watch::Receiver<SessionState> {
        self.session.subscribe()
    }

    fn generation(&self) -> Generation {
        let known = self.attached().and_then(|_| self.shelf.state().data.generation);
        known.unwrap_or_default()
    }

    async fn mark_full(&self, session: Session) -> Result<(), StoreError> {
        let work = move |state: &mut State, _: Session, _: Micros| {
            if let Some(generation) = state.data.generation.as_mut().filter(|_| !session.kept) {
                generation.full = true;
            }
        };
        self.shelf.call(Some(session), work).await
    }

    async fn mark_known(&self, session: Session) -> Result<(), StoreError> {
        let work = move |state: &mut State, _: Session, _: Micros| {
            if let Some(generation) = state.data.generation.as_mut() {
                generation.known = true;
            }
        };
        self.shelf.call(Some(session), work).await
    }

    fn now(&self) -> Micros {
        // A daemon that was never attached has not read the store's clock.
        if self.attached().is_none() { Micros::ZERO } else { self.shelf.now() }
    }
}
