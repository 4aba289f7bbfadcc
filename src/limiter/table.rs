//! What the fast loop tells the slow one, bucket by bucket, and what it hears back.
//!
//! A tally is made for a bucket of a pooled policy when its reserve runs low, not before: sparse demand that its
//! reserve serves costs nothing here either. Everything in it is advisory but [`Tally::news`].

use crate::quota::amount::{Micros, Tokens};
use crate::quota::calendar::Turn;
use crate::quota::policy::BucketId;
use crate::store::names::BucketMap;
use crate::telemetry::trace::Cause;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::Notify;

/// The most buckets that are tallied at a time. Beyond it a bucket has its reserve, and no lease.
pub const TALLIES_MAX: usize = 1_000_000;
const SHARDS: usize = 64;

/// Is an ask for this bucket under way?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asking {
    /// No: a request that finds too little need not wait.
    No,
    /// The slow loop has been told and has not looked yet.
    Poked,
    /// An ask is out.
    Out,
}

/// One bucket's demand and what is known of its pool.
#[derive(Debug)]
pub struct Tally {
    /// Which bucket.
    pub bucket: BucketId,
    /// The policy's id in the pool.
    pub policy: u32,
    /// The window that it is of, if the policy has a quota.
    pub turn: Option<Turn>,
    offered: AtomicI64,
    largest: AtomicI64,
    denied: AtomicI64,
    queued: AtomicI64,
    admitted: AtomicI64,
    refused: AtomicI64,
    level: AtomicI64,
    level_at: AtomicI64,
    low_water: AtomicI64,
    elsewhere: AtomicI64,
    asking: AtomicU8,
    cut_off: AtomicBool,
    permits: AtomicBool,
    installs: AtomicU64,
    /// A traced request that lacks something: see [`crate::telemetry::trace`].
    cause: Mutex<Option<Box<Cause>>>,
    /// Rung when a lease was installed, or when no ask will come of a poke.
    pub news: Notify,
}

/// Demand since the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offered {
    /// Cost of all requests, admitted or not.
    pub cost: Tokens,
    /// The largest cost of one.
    pub largest: Tokens,
    /// Cost of those that were denied and are gone.
    pub denied: Tokens,
    /// Cost of those that wait now.
    pub queued: Tokens,
}

impl Offered {
    /// The largest cost among those that wait is not known by itself; what waits at all is a bound.
    pub fn largest_waiting(&self) -> Tokens {
        self.largest.min(self.queued + self.denied)
    }
}

impl Tally {
    fn new(policy: u32, bucket: BucketId, turn: Option<Turn>, elsewhere: Tokens) -> Self {
        Self {
            bucket,
            policy,
            turn,
            offered: AtomicI64::new(0),
            largest: AtomicI64::new(0),
            denied: AtomicI64::new(0),
            queued: AtomicI64::new(0),
            admitted: AtomicI64::new(0),
            refused: AtomicI64::new(0),
            level: AtomicI64::new(0),
            level_at: AtomicI64::new(0),
            low_water: AtomicI64::new(i64::MAX),
            elsewhere: AtomicI64::new(elsewhere.0),
            asking: AtomicU8::new(0),
            cut_off: AtomicBool::new(false),
            permits: AtomicBool::new(false),
            installs: AtomicU64::new(0),
            cause: Mutex::default(),
            news: Notify::new(),
        }
    }

    /// Counts a request; `level` is what the bucket held afterwards, at store time `at`.
    pub fn count(&self, cost: Tokens, fits: bool, level: Tokens, at: Micros) {
        self.offered.fetch_add(cost.0.max(0), Ordering::Relaxed);
        self.largest.fetch_max(cost.0, Ordering::Relaxed);
        if fits {
            self.admitted.fetch_add(cost.0, Ordering::Relaxed);
        } else {
            self.refused.fetch_add(cost.0, Ordering::Relaxed);
            self.denied.fetch_add(cost.0, Ordering::Relaxed);
        }
        self.saw(level, at);
    }

    /// Counts a request that was refused, has waited, and was tried again.
    pub fn retried(&self, cost: Tokens, fits: bool, level: Tokens, at: Micros) {
        if fits {
            self.admitted.fetch_add(cost.0, Ordering::Relaxed);
            self.refused.fetch_sub(cost.0, Ordering::Relaxed);
        }
        self.saw(level, at);
    }

    /// Notes what the bucket holds at store time `at`.
    pub fn saw(&self, level: Tokens, at: Micros) {
        self.level.store(level.0, Ordering::Relaxed);
        self.level_at.store(at.0, Ordering::Relaxed);
    }

    /// The level last seen, and the store time of it (0: never).
    pub fn level(&self) -> (Tokens, Micros) {
        (Tokens(self.level.load(Ordering::Relaxed)), Micros(self.level_at.load(Ordering::Relaxed)))
    }

    /// Takes the demand since the last call.
    pub fn take_offered(&self) -> Offered {
        Offered {
            cost: Tokens(self.offered.swap(0, Ordering::Relaxed)),
            largest: Tokens(self.largest.swap(0, Ordering::Relaxed)),
            denied: Tokens(self.denied.swap(0, Ordering::Relaxed)).or_zero(),
            queued: Tokens(self.queued.load(Ordering::Relaxed)),
        }
    }

    /// All that was admitted and refused here since the tally was made.
    pub fn totals(&self) -> (Tokens, Tokens) {
        (Tokens(self.admitted.load(Ordering::Relaxed)), Tokens(self.refused.load(Ordering::Relaxed)))
    }

    /// A request of this cost begins to wait; it ends when the guard is dropped. `None` if so much waits already that
    /// more could not be served together (`most`).
    pub fn wait(self: &Arc<Self>, cost: Tokens, most: Tokens) -> Option<Waiting> {
        // Until now it counted as denied.
        self.denied.fetch_sub(cost.0, Ordering::Relaxed);
        let before = self.queued.fetch_add(cost.0, Ordering::Relaxed);
        let waiting = Waiting { tally: self.clone(), cost };
        (before.saturating_add(cost.0) <= most.0).then_some(waiting)
    }

    /// Tokens in the pool that this region might be lent, as its replica knew it last.
    pub fn elsewhere(&self) -> Tokens {
        Tokens(self.elsewhere.load(Ordering::Relaxed))
    }

    /// See [`Self::elsewhere`].
    pub fn set_elsewhere(&self, tokens: Tokens) {
        self.elsewhere.store(tokens.0, Ordering::Relaxed);
    }

    /// Asks for this bucket are not being answered: the pool is out of reach.
    pub fn is_cut_off(&self) -> bool {
        self.cut_off.load(Ordering::Relaxed)
    }

    /// See [`Self::is_cut_off`].
    pub fn set_cut_off(&self, cut_off: bool) {
        self.cut_off.store(cut_off, Ordering::Relaxed);
    }

    /// Is it one of permits? (A policy that becomes one, or another, has other buckets then.)
    pub fn is_of_permits(&self) -> bool {
        self.permits.load(Ordering::Acquire)
    }

    /// See [`Self::is_of_permits`]. Before it is poked for the first time.
    pub fn set_of_permits(&self) {
        self.permits.store(true, Ordering::Release);
    }

    /// A level below which the slow loop wants to hear of it.
    pub fn set_low_water(&self, level: Tokens) {
        self.low_water.store(level.0, Ordering::Relaxed);
    }

    /// Is this level worth a poke?
    pub fn is_low(&self, level: Tokens) -> bool {
        level.0 < self.low_water.load(Ordering::Relaxed)
    }

    /// Is an ask under way?
    pub fn asking(&self) -> Asking {
        match self.asking.load(Ordering::Acquire) {
            0 => Asking::No,
            1 => Asking::Poked,
            _ => Asking::Out,
        }
    }

    /// See [`Self::asking`]. Whoever waits is told by [`Self::news`] when none is under way any more.
    pub fn set_asking(&self, asking: Asking) {
        let to = match asking {
            Asking::No => 0,
            Asking::Poked => 1,
            Asking::Out => 2,
        };
        self.asking.store(to, Ordering::Release);
        if asking == Asking::No {
            self.news.notify_waiters();
        }
    }

    /// A traced request waits for what this bucket is to get. (The first that does: its trace gets the ask.)
    pub fn set_cause(&self, cause: Cause) {
        lock(&self.cause).get_or_insert_with(|| Box::new(cause));
    }

    /// The traced request that the next ask is for, if there is one.
    pub fn take_cause(&self) -> Option<Cause> {
        lock(&self.cause).take().map(|cause| *cause)
    }

    /// A record of the pool was installed.
    pub fn installed(&self) {
        self.installs.fetch_add(1, Ordering::Release);
        self.news.notify_waiters();
    }

    /// How many records were installed: who waits compares it, so that none is missed.
    pub fn installs(&self) -> u64 {
        self.installs.load(Ordering::Acquire)
    }
}

/// A request that waits for a lease.
#[derive(Debug)]
pub struct Waiting {
    tally: Arc<Tally>,
    cost: Tokens,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.tally.queued.fetch_sub(self.cost.0, Ordering::Relaxed);
    }
}

/// All tallies of a region.
#[derive(Debug)]
pub struct Table {
    shards: Vec<Mutex<BucketMap<Arc<Tally>>>>,
    poked: Mutex<Vec<Arc<Tally>>>,
    wake: Notify,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            poked: Mutex::default(),
            wake: Notify::new(),
        }
    }
}

impl Table {
    /// The bucket's tally under this policy, if it has one. (A policy that was removed and comes back is another, with the same
    /// buckets.)
    pub fn get(&self, policy: u32, bucket: &BucketId) -> Option<Arc<Tally>> {
        self.shard(bucket).get(bucket).filter(|tally| tally.policy == policy).cloned()
    }

    /// The bucket's tally, made if need be; `None` when there are too many.
    pub fn get_or_make(
        &self,
        policy: u32,
        bucket: BucketId,
        turn: Option<Turn>,
        elsewhere: Tokens,
    ) -> Option<Arc<Tally>> {
        let mut shard = self.shard(&bucket);
        let known = shard.get(&bucket);
        if let Some(tally) = known.filter(|tally| tally.policy == policy) {
            return Some(tally.clone());
        }
        if known.is_none() && shard.len() >= TALLIES_MAX / SHARDS {
            return None;
        }
        let tally = Arc::new(Tally::new(policy, bucket, turn, elsewhere));
        shard.insert(bucket, tally.clone());
        Some(tally)
    }

    /// Forgets a bucket that the slow loop has no more interest in, unless somebody else holds its tally right now.
    pub fn forget(&self, bucket: &BucketId) -> bool {
        let mut shard = self.shard(bucket);
        // One in the map, one at the caller.
        let unused = shard.get(bucket).is_some_and(|tally| Arc::strong_count(tally) <= 2);
        if unused {
            shard.remove(bucket);
        }
        unused
    }

    /// Tells the slow loop to look at a bucket soon.
    pub fn poke(&self, tally: &Arc<Tally>) {
        if tally.asking.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            lock(&self.poked).push(tally.clone());
            self.wake.notify_one();
        }
    }

    /// The buckets with most demand so far, at most `most`, and whether there are more.
    pub fn busiest(&self, most: usize) -> (Vec<Arc<Tally>>, bool) {
        let mut all: Vec<Arc<Tally>> = Vec::new();
        for shard in &self.shards {
            all.extend(lock(shard).values().cloned());
        }
        let more = all.len() > most;
        let busy = |tally: &Arc<Tally>| {
            let (admitted, refused) = tally.totals();
            std::cmp::Reverse((admitted + refused, tally.bucket))
        };
        if more {
            all.select_nth_unstable_by_key(most, busy);
            all.truncate(most);
        }
        all.sort_unstable_by_key(busy);
        (all, more)
    }

    /// A part of all tallies, for those who look at all of them bit by bit; `None`: there are no more parts.
    pub fn part(&self, number: usize) -> Option<Vec<Arc<Tally>>> {
        self.shards.get(number).map(|shard| lock(shard).values().cloned().collect())
    }

    /// Takes the buckets that were poked.
    pub fn take_poked(&self) -> Vec<Arc<Tally>> {
        std::mem::take(&mut *lock(&self.poked))
    }

    /// Resolves when something was poked since the last call.
    pub async fn poked(&self) {
        self.wake.notified().await;
    }

    /// How many buckets are tallied.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Is none?
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn shard(&self, bucket: &BucketId) -> MutexGuard<'_, BucketMap<Arc<Tally>>> {
        let at = usize::from(bucket.0.first().copied().unwrap_or(0)) % SHARDS;
        lock(self.shards.get(at).unwrap_or(&self.shards[0]))
    }
}

/// A lock that a panic elsewhere does not take away: what it guards is advisory.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poke_is_heard_once() {
        let table = Table::default();
        let tally = table.get_or_make(1, BucketId([7; 16]), None, Tokens::ZERO).expect("room");
        table.poke(&tally);
        table.poke(&tally);
        assert_eq!(table.take_poked().len(), 1);
        tally.set_asking(Asking::No);
        table.poke(&tally);
        assert_eq!(table.take_poked().len(), 1);
    }

    #[test]
    fn a_tally_in_use_is_not_forgotten() {
        let table = Table::default();
        let bucket = BucketId([7; 16]);
        let tally = table.get_or_make(1, bucket, None, Tokens::ZERO).expect("room");
        let other = table.get(1, &bucket).expect("it is there");
        assert!(!table.forget(&bucket));
        drop(other);
        assert!(table.forget(&bucket));
        drop(tally);
        assert!(table.is_empty());
    }

    #[test]
    fn a_policy_that_comes_back_has_tallies_of_its_own() {
        let table = Table::default();
        let bucket = BucketId([7; 16]);
        let old = table.get_or_make(1, bucket, None, Tokens::ZERO).expect("room");
        assert!(table.get(2, &bucket).is_none());
        let new = table.get_or_make(2, bucket, None, Tokens::ZERO).expect("room");
        assert_eq!((old.policy, new.policy, table.len()), (1, 2, 1));
        assert!(table.get(2, &bucket).is_some() && table.get(1, &bucket).is_none());
    }

    #[test]
    fn waiting_ends_with_its_guard() {
        let table = Table::default();
        let tally = table.get_or_make(1, BucketId([1; 16]), None, Tokens::ZERO).expect("room");
        let first = tally.wait(Tokens(6), Tokens(10));
        assert!(first.is_some());
        assert!(tally.wait(Tokens(6), Tokens(10)).is_none());
        assert_eq!(tally.take_offered().queued, Tokens(6));
        drop(first);
        assert_eq!(tally.take_offered().queued, Tokens(0));
    }
}
