//! One copy of the pool: entries go in, readers are told, and where this node leads, stamps come out.

use super::changes::Feeds;
use super::{ChangeFeed, SharedPool};
use crate::bugs::{Bug, planted};
use crate::clock;
use crate::quota::amount::{DRIFT_PPM, Micros};
use crate::quota::pool::{Applied, Entry, Pool, RaftClock, Stamp};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Notify, watch};

/// A replica of the pool. What orders the entries is somebody else's business: openraft's, or a simulation's.
#[derive(Debug)]
pub struct Replica {
    /// Told when enough has been applied for a snapshot.
    pub(super) snapshot_due: Notify,
    pool: SharedPool,
    /// The pool's level, to be read without waiting for entries.
    level: AtomicU32,
    feeds: Feeds,
    /// The Raft clock of the newest leadership of this node's.
    clock: watch::Sender<Option<RaftClock>>,
    applied_at: Mutex<AppliedAt>,
}

impl Replica {
    /// One that has come as far as `pool`.
    #[must_use]
    pub fn new(pool: Pool) -> Self {
        Self {
            applied_at: Mutex::new(AppliedAt::from_here(&pool)),
            snapshot_due: Notify::new(),
            level: AtomicU32::new(pool.level()),
            pool: SharedPool::new(pool),
            feeds: Feeds::default(),
            clock: watch::Sender::new(None),
        }
    }

    /// The pool, to be read.
    #[must_use]
    pub fn pool(&self) -> SharedPool {
        self.pool.clone()
    }

    /// See [`Pool::level`].
    #[must_use]
    pub fn level(&self) -> u32 {
        self.level.load(Ordering::Relaxed)
    }

    /// What is applied from now on.
    #[must_use]
    pub fn changes(&self) -> ChangeFeed {
        self.feeds.subscribe()
    }

    /// The newest stamp that was applied, and when. While the pool is being read, it is that pool's.
    #[must_use]
    pub fn applied_at(&self) -> AppliedAt {
        *self.applied_at_mut()
    }

    /// Applies the next entry of the log, which was written under leadership `term`.
    pub fn apply(&self, term: u64, entry: &Entry) -> Arc<Applied> {
        let mut pool = self.pool.write();
        let applied = pool.apply(term, entry);
        self.level.store(pool.level(), Ordering::Relaxed);
        if !applied.refused {
            *self.applied_at_mut() = AppliedAt { stamp: entry.stamp, at: clock::now() };
        }
        drop(pool);
        self.feeds.applied(&applied);
        Arc::new(applied)
    }

    /// Goes on from a snapshot.
    pub fn restore(&self, pool: Pool) {
        self.level.store(pool.level(), Ordering::Relaxed);
        let mut was = self.pool.write();
        *was = pool;
        *self.applied_at_mut() = AppliedAt::from_here(&was);
        drop(was);
        self.feeds.everything();
    }

    /// This node leads, under leadership `term`, and everything of earlier leaders has been applied: its Raft clock starts
    /// from there. Only the first call for a leadership counts.
    pub fn lead(&self, term: u64) {
        let begun = self.clock.borrow().is_some_and(|clock| clock.term() >= term);
        if !begun {
            let tau = self.pool.read().tau();
            self.clock.send_replace(Some(RaftClock::begin(term, tau, clock::now())));
        }
    }

    /// The stamp of an entry that is closed now; `None` if the clock of `term` has not begun, or another has.
    #[must_use]
    pub fn stamp(&self, term: u64) -> Option<Stamp> {
        let mut stamp = None;
        self.clock.send_if_modified(|clock| {
            let clock = clock.as_mut().filter(|clock| clock.term() == term);
            stamp = clock.map(|clock| clock.stamp(clock::now()));
            // Nobody waits for the clock's hands.
            false
        });
        if planted(Bug::LeaderWallClock) {
            return stamp.map(|stamp| Stamp { tau: clock::wall(), ..stamp });
        }
        stamp
    }

    /// Tells when this node's Raft clock has begun, and for which leadership.
    pub(super) fn clock(&self) -> watch::Receiver<Option<RaftClock>> {
        self.clock.subscribe()
    }

    fn applied_at_mut(&self) -> MutexGuard<'_, AppliedAt> {
        self.applied_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The newest stamp applied on this replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppliedAt {
    /// The stamp.
    pub stamp: Stamp,
    /// When it was applied, on [`crate::clock::now`]'s clock.
    pub at: Micros,
}

impl AppliedAt {
    /// A pool that came from a disk or a peer. How old it is nobody knows: its time counts from now on, as if it were new, since whoever
    /// goes by Raft time may believe that less has passed than has, and never more. And by whose clock it was stamped nobody knows either
    /// (an entry that was refused changes the pool's term and not its time): term 0, which no leadership has.
    fn from_here(pool: &Pool) -> Self {
        Self { stamp: Stamp { term: 0, tau: pool.tau() }, at: clock::now() }
    }

    /// Raft time at this moment, at the least. `pool` must have been held (for reading) since before this was asked for: it is of
    /// one instant with it then.
    #[must_use]
    pub fn tau(&self, pool: &Pool, now: Micros) -> Micros {
        pool.tau() + (now - self.at).or_zero().discount(DRIFT_PPM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool_at(tau: i64) -> Pool {
        let replica = Replica::new(Pool::default());
        let stamp = Stamp { term: 1, tau: Micros(tau) };
        replica.apply(1, &Entry { stamp, ops: Vec::new() });
        replica.pool().read().clone()
    }

    /// The machine may have run for months: that is not how long ago the last entry was.
    #[test]
    fn no_time_has_passed_for_a_pool_that_comes_from_a_disk_or_a_peer() {
        let since = |replica: &Replica, began: Micros| {
            let pool = replica.pool();
            let pool = pool.read();
            let (seen, now) = (replica.applied_at(), clock::now());
            assert_eq!(seen.stamp, Stamp { term: 0, tau: pool.tau() }, "by no leader's clock");
            assert!(seen.tau(&pool, now) - pool.tau() <= now - began);
        };
        let began = clock::now();
        let replica = Replica::new(pool_at(70_000_000));
        since(&replica, began);
        replica.restore(pool_at(90_000_000));
        since(&replica, began);
    }

    #[test]
    fn raft_time_goes_on_between_entries_and_never_too_fast() {
        let replica = Replica::new(pool_at(70_000_000));
        let pool = replica.pool();
        let pool = pool.read();
        let seen = replica.applied_at();
        assert_eq!(seen.tau(&pool, seen.at + Micros::seconds(100)), Micros(70_000_000 + 99_000_000));
        assert_eq!(seen.tau(&pool, seen.at - Micros::seconds(1)), pool.tau(), "it never goes back");
    }
}
