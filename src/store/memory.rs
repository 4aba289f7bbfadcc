//! The embedded store: buckets in this process, behind sharded locks.
//!
//! Nothing outlives the process: each start is a new session that has kept nothing.

use super::names::BucketMap;
use super::{
    AskedCount, CHARGES_MAX, Install, Prepare, Prepared, Session, SessionState, Store, StoreError, Take,
    Taken, TakenCharge,
};
use crate::clock;
use crate::quota::amount::{Micros, Tokens};
use crate::quota::bucket::{self, Bucket, Generation, Moment, Shape, Unseen};
use crate::quota::counted::lent::{self, Slice};
use crate::quota::counted::{self, Allowance, Counted, Kind};
use crate::quota::policy::BucketId;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

const SHARDS: usize = 64;
/// What a bucket takes, about, in bytes.
pub const BUCKET_BYTES: usize = 160;
/// The most buckets that it holds, about [`BUCKET_BYTES`] each: beyond, requests for new ones find the store unavailable.
/// (To forget one that is in use would hand its tokens out a second time.)
pub const BUCKETS_MAX: usize = 1 << 22;
/// So many entries of a log, or leases, take about as much memory as a bucket.
const ENTRIES_A_BUCKET: usize = 4;
/// Every use of a shard looks at this many of its buckets, to drop those that are full again.
const SWEEP: usize = 2;

/// Buckets in memory. Clones share them.
#[derive(Clone)]
pub struct MemoryStore {
    inner: Arc<Inner>,
}

struct Inner {
    clock: Box<dyn Fn() -> Micros + Send + Sync>,
    shards: Vec<Mutex<Shard>>,
    session: Session,
    state: watch::Sender<SessionState>,
    start: Micros,
    full: AtomicBool,
    known: AtomicBool,
}

#[derive(Default)]
struct Shard {
    buckets: BucketMap<Bucket>,
    /// Limits that count; the other things that a shard needs to know of them are their span and how many entries they have.
    counts: BucketMap<(Counted, Micros)>,
    /// Entries of all counts.
    entries: usize,
    /// Each bucket once, in the order in which the sweep looks at them.
    round: VecDeque<BucketId>,
}

impl MemoryStore {
    /// An empty store that reads its time from `clock`, which must not step.
    pub fn new(clock: impl Fn() -> Micros + Send + Sync + 'static) -> Self {
        let session = Session { nonce: super::new_nonce(), kept: false };
        let inner = Inner {
            start: clock(),
            clock: Box::new(clock),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            session,
            state: watch::Sender::new(SessionState::Attached(session)),
            full: AtomicBool::new(false),
            known: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }

    /// An empty store whose clock reads `epoch` now and runs with the process' monotonic clock.
    #[must_use]
    pub fn monotonic(epoch: Micros) -> Self {
        let origin = clock::now();
        Self::new(move || epoch + (clock::now() - origin))
    }

    /// Always attached, to the one session that it has.
    #[must_use]
    pub fn session(&self) -> watch::Receiver<SessionState> {
        self.inner.state.subscribe()
    }

    /// How many buckets it holds.
    #[must_use]
    pub fn buckets(&self) -> usize {
        self.inner.shards.iter().map(|shard| guard(shard).buckets.len()).sum()
    }

    /// What it knows about buckets that it does not hold.
    #[must_use]
    pub fn generation(&self) -> Generation {
        let Inner { start, full, known, .. } = &*self.inner;
        let (full, known) = (full.load(Ordering::SeqCst), known.load(Ordering::SeqCst));
        Generation { start: *start, full, known }
    }

    /// See [`RegionStore::mark_full`](super::RegionStore::mark_full).
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if `session` is not its own.
    pub fn mark_full(&self, session: Session) -> Result<(), StoreError> {
        self.mark(session, &self.inner.full)
    }

    /// See [`RegionStore::mark_known`](super::RegionStore::mark_known).
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if `session` is not its own.
    pub fn mark_known(&self, session: Session) -> Result<(), StoreError> {
        self.mark(session, &self.inner.known)
    }

    fn mark(&self, session: Session, as_said: &AtomicBool) -> Result<(), StoreError> {
        if session != self.inner.session {
            return Err(StoreError::Fenced);
        }
        as_said.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// What its clock reads.
    #[must_use]
    pub fn now(&self) -> Micros {
        (self.inner.clock)()
    }

    fn take_now(&self, take: &Take) -> Result<Taken, StoreError> {
        if take.len() > CHARGES_MAX {
            return Err(StoreError::Unavailable);
        }
        let ((asked, charges), (asked_counts, claims)) = (take.numbered(), take.numbered_counts());
        let buckets = asked.iter().map(|(id, ..)| id).chain(asked_counts.iter().map(|(id, ..)| id));
        let mut shards = self.lock(buckets.map(shard_of).collect());
        let when = Moment::at(self.now());
        let crowded =
            |(id, ..): &AskedCount| locked(&mut shards, id).is_some_and(|shard| !shard.has_room(id));
        if asked_counts.iter().any(crowded) {
            return Err(StoreError::Unavailable);
        }
        let mut counts = self.counts(&mut shards, &asked_counts, when);
        let checked = counted::check(&counts, &claims, when);
        let mut settled: Vec<Bucket> = asked
            .iter()
            .map(|(id, shape, unseen)| {
                let stored = locked(&mut shards, id).and_then(|shard| shard.buckets.get(id).copied());
                self.settle(stored, *shape, *unseen, when)
            })
            .collect();
        let before = settled.clone();
        let (fitted, fits) = bucket::take(&mut settled, &charges);
        let allowed = fitted && checked.allowed;
        if !allowed {
            settled.clone_from(&before);
        }
        let (seen, changed) = checked.commit(allowed, &mut counts, &claims, when);
        for (((id, ..), (count, allowance)), changed) in asked_counts.iter().zip(counts).zip(changed) {
            if let Some(shard) = locked(&mut shards, id) {
                shard.put_count(*id, count, allowance.span, changed, when.now);
            }
        }
        for ((id, ..), (old, new)) in asked.iter().zip(before.iter().zip(&settled)) {
            if let Some(shard) = locked(&mut shards, id) {
                shard.put(*id, *new, old != new, when.now)?;
            }
        }
        let charges = charges
            .iter()
            .zip(fits)
            .filter_map(|(charge, fits)| settled.get(charge.bucket).map(|bucket| (bucket, fits)))
            .map(|(b, fits)| TakenCharge { fits, level: b.level(), rate: b.rate(), cap: b.cap() });
        Ok(Taken { allowed, now: when.now, charges: charges.collect(), counts: seen })
    }

    /// Takes counts out of their shards, settled, each with what may be used of it.
    fn counts(
        &self,
        shards: &mut [(usize, MutexGuard<'_, Shard>)],
        asked: &[AskedCount],
        when: Moment,
    ) -> Vec<(Counted, Allowance)> {
        let generation = self.generation();
        let one = |(id, kind, allowance): &AskedCount| {
            let shard = locked(shards, id);
            let slice = shard.as_ref().and_then(|shard| shard.buckets.get(id).copied());
            let stored = shard.and_then(|shard| shard.take_count(id));
            let mut count = stored.unwrap_or_else(|| Counted::new(*kind));
            count.settle(allowance.span, when.now);
            let slice = slice.map(|slice| self.settle(Some(slice), Shape::default(), None, when));
            let slice = slice.as_ref().map_or_else(Slice::default, Slice::of);
            (count, allowance.under(generation, when.now).with(slice))
        };
        asked.iter().map(one).collect()
    }

    fn prepare_one(&self, ask: &Prepare, when: Moment) -> Result<Prepared, StoreError> {
        let mut shard = self.shard(&ask.bucket);
        let stored = shard.buckets.get(&ask.bucket).copied();
        if let Some(allowance) = &ask.permits {
            let mut bucket = self.settle(stored, Shape::default(), None, when);
            let (count, allowance) = shard.look_at(&ask.bucket, allowance, self.generation(), when);
            let kept = lent::shrink(&mut bucket, &count, &allowance, ask.hold_burst, when.now);
            bucket.fence_for(lent::LENT_LEASE_MAX, ask.seq, self.inner.session.nonce, when);
            shard.put(ask.bucket, bucket, true, when.now)?;
            let (leased, level, burst) = (kept.leased, kept.left, kept.held);
            return Ok(Prepared { leased, level, burst, ..Prepared::default() });
        }
        let mut bucket = self.settle(stored, ask.shape, ask.unseen, when);
        let shrunk = bucket.shrink(ask.hold_burst, ask.hold_rate);
        bucket.fence(ask.seq, self.inner.session.nonce, when);
        let lent = bucket.lend(ask.lend_rate, ask.lend_for, when);
        shard.put(ask.bucket, bucket, true, when.now)?;
        Ok(Prepared {
            leased: shrunk.leased,
            level: bucket.level(),
            returned: shrunk.returned,
            burst: shrunk.burst,
            rate: shrunk.rate,
            lent,
        })
    }

    fn install_one(&self, record: &Install, when: Moment) -> Result<Tokens, StoreError> {
        let mut shard = self.shard(&record.bucket);
        let stored = shard.buckets.get(&record.bucket).copied();
        let shape = if record.permits.is_some() { Shape::default() } else { record.shape };
        let mut bucket = self.settle(stored, shape, record.unseen, when);
        let before = bucket;
        bucket.install(&record.grant, self.inner.session.nonce, when);
        shard.put(record.bucket, bucket, bucket != before, when.now)?;
        let Some(allowance) = &record.permits else { return Ok(bucket.level()) };
        let (count, allowance) = shard.look_at(&record.bucket, allowance, self.generation(), when);
        Ok(lent::left(&bucket, &count, &allowance, when.now))
    }

    fn settle(&self, stored: Option<Bucket>, shape: Shape, unseen: Option<Unseen>, when: Moment) -> Bucket {
        let mut bucket = stored.unwrap_or_else(|| {
            let ahead = when.now - clock::now();
            let unseen = unseen.map(|unseen| unseen.in_store(shape, ahead));
            Bucket::unseen(shape, unseen, self.generation(), when.now)
        });
        bucket.settle(shape, self.inner.session.nonce, when);
        bucket
    }

    /// Locks these shards, each once and in ascending order, so that no two requests wait for each other.
    fn lock(&self, mut numbers: Vec<usize>) -> Vec<(usize, MutexGuard<'_, Shard>)> {
        numbers.sort_unstable();
        numbers.dedup();
        let shard = |n: usize| self.inner.shards.get(n).map(|shard| (n, guard(shard)));
        numbers.into_iter().filter_map(shard).collect()
    }

    fn shard(&self, id: &BucketId) -> MutexGuard<'_, Shard> {
        guard(&self.inner.shards[shard_of(id)])
    }
}

impl Store for MemoryStore {
    async fn take(&self, take: Take) -> Result<Taken, StoreError> {
        self.take_now(&take)
    }

    async fn known(&self, buckets: Vec<BucketId>) -> Result<(u64, Vec<bool>), StoreError> {
        let stored: usize = self.inner.shards.iter().map(|shard| guard(shard).round.len()).sum();
        let known = buckets.iter().map(|id| self.shard(id).holds(id)).collect();
        Ok((u64::try_from(stored).unwrap_or(u64::MAX), known))
    }

    async fn prepare(&self, asks: Vec<Prepare>) -> Result<(Micros, Vec<Prepared>), StoreError> {
        let when = Moment::at(self.now());
        let prepared = asks.iter().map(|ask| self.prepare_one(ask, when)).collect::<Result<_, _>>()?;
        Ok((when.now, prepared))
    }

    async fn install(&self, records: Vec<Install>) -> Result<Vec<Tokens>, StoreError> {
        let when = Moment::at(self.now());
        records.iter().map(|record| self.install_one(record, when)).collect()
    }
}

impl Shard {
    /// Writes a bucket back: one that is stored already in any case, another only if it is `changed`.
    fn put(&mut self, id: BucketId, bucket: Bucket, changed: bool, now: Micros) -> Result<(), StoreError> {
        self.sweep(now);
        if let Some(stored) = self.buckets.get_mut(&id) {
            *stored = bucket;
        } else if changed {
            if self.is_full() {
                return Err(StoreError::Unavailable);
            }
            self.buckets.insert(id, bucket);
            self.round.push_back(id);
        }
        Ok(())
    }

    fn holds(&self, id: &BucketId) -> bool {
        self.buckets.contains_key(id) || self.counts.contains_key(id)
    }

    /// Can this count be kept, and grow?
    fn has_room(&self, id: &BucketId) -> bool {
        let grows = self.counts.get(id).is_none_or(|(count, _)| !matches!(count, Counted::Counters(_)));
        !grows || !self.is_full()
    }

    fn take_count(&mut self, id: &BucketId) -> Option<Counted> {
        let (count, _) = self.counts.get_mut(id)?;
        self.entries = self.entries.saturating_sub(count.entries());
        Some(std::mem::replace(count, Counted::new(count.kind())))
    }

    /// A copy of some permits, and what may be used of them.
    fn look_at(
        &self,
        id: &BucketId,
        allowance: &Allowance,
        generation: Generation,
        when: Moment,
    ) -> (Counted, Allowance) {
        let stored = self.counts.get(id).map(|(count, _)| count.clone());
        let count = stored.unwrap_or_else(|| Counted::new(Kind::Permits));
        (count, allowance.under(generation, when.now))
    }

    /// Writes a count back: see [`Self::put`].
    fn put_count(&mut self, id: BucketId, count: Counted, span: Micros, changed: bool, now: Micros) {
        self.entries += count.entries();
        if let Some(stored) = self.counts.get_mut(&id) {
            *stored = (count, span);
        } else if changed {
            self.counts.insert(id, (count, span));
            self.round.push_back(id);
        }
        self.sweep(now);
    }

    fn is_full(&self) -> bool {
        let all = self.buckets.len() + self.counts.len() + self.entries / ENTRIES_A_BUCKET;
        all >= BUCKETS_MAX / SHARDS
    }

    fn sweep(&mut self, now: Micros) {
        for _ in 0..SWEEP {
            let Some(id) = self.round.pop_front() else { return };
            if self.buckets.get(&id).is_some_and(|bucket| bucket.keep_until() <= now) {
                self.buckets.remove(&id);
            } else if self.counts.get(&id).is_some_and(|(count, span)| count.keep_until(*span) <= now) {
                self.counts.remove(&id).inspect(|(count, _)| self.entries -= count.entries());
            } else {
                self.round.push_back(id);
            }
        }
    }
}

fn shard_of(id: &BucketId) -> usize {
    usize::from(id.0[0]) % SHARDS
}

/// The shard of this bucket among those that are locked.
fn locked<'a>(shards: &'a mut [(usize, MutexGuard<'_, Shard>)], id: &BucketId) -> Option<&'a mut Shard> {
    let number = shard_of(id);
    let at = shards.binary_search_by_key(&number, |(n, _)| *n).ok()?;
    shards.get_mut(at).map(|(_, shard)| &mut **shard)
}

/// A panic elsewhere leaves a shard whole: it is only ever written in single steps.
fn guard(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::amount::Rate;
    use crate::store::TakeCharge;
    use std::sync::atomic::AtomicI64;

    fn take(id: u8) -> Take {
        let shape = Shape { rate: Rate::per_second(1), cap: Tokens::whole(10) };
        // All in one shard.
        let bucket = BucketId([0, id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let charge = TakeCharge { bucket, shape, unseen: None, cost: Tokens::whole(5), enforce: true };
        Take { charges: vec![charge], ..Take::default() }
    }

    #[test]
    fn buckets_that_are_full_again_are_forgotten() {
        let now = Arc::new(AtomicI64::new(0));
        let clock = now.clone();
        let store = MemoryStore::new(move || Micros(clock.load(Ordering::SeqCst)));
        store.mark_full(store.inner.session).unwrap();
        let stored = || guard(&store.inner.shards[0]).buckets.len();
        for id in 0..100 {
            assert!(store.take_now(&take(id)).unwrap().allowed);
        }
        assert_eq!(stored(), 100);
        now.store(Micros::seconds(9).0, Ordering::SeqCst);
        (0..100).for_each(|_| assert!(store.take_now(&take(100)).is_ok()));
        assert_eq!(stored(), 101, "too early: five seconds to fill, and a margin");
        now.store(Micros::seconds(30).0, Ordering::SeqCst);
        (0..100).for_each(|_| assert!(store.take_now(&take(100)).is_ok()));
        assert_eq!(stored(), 1);
        assert!(store.take_now(&take(0)).unwrap().allowed, "and are full when they come back");
    }

    #[test]
    fn what_is_refused_is_not_stored() {
        let store = MemoryStore::new(|| Micros::ZERO);
        assert!(!store.take_now(&take(0)).unwrap().allowed);
        assert_eq!(guard(&store.inner.shards[0]).buckets.len(), 0);
    }
}
