//! What was applied, coalesced for readers that may be slow.

use crate::quota::policy::BucketId;
use crate::quota::pool::{Applied, PolicyOutcome, RegionId};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::Notify;

/// Different records that a feed remembers; beyond, its reader is told that everything may have changed.
pub const RECORDS_MAX: usize = 65_536;

/// What has changed since the last look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Anything may have changed (a snapshot was installed, or there were too many changes to list): look at all.
    pub everything: bool,
    /// Records that were written, each once.
    pub records: BTreeSet<(RegionId, BucketId)>,
    /// Regions whose epoch changed.
    pub joined: BTreeSet<RegionId>,
    /// The cluster was founded, or other policies are in force.
    pub policies: bool,
    /// A region's acknowledgement of the policies, or of a reset, counted.
    pub acknowledged: bool,
    /// Buckets that were frozen because their books did not balance.
    pub breached: BTreeSet<BucketId>,
    /// A bucket was reset.
    pub resets: bool,
}

impl Changes {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn add(&mut self, applied: &Applied) {
        self.policies |= matches!(applied.policies, Some(PolicyOutcome::Set(_)));
        self.acknowledged |= applied.acknowledged;
        self.resets |= matches!(applied.policies, Some(PolicyOutcome::Reset(_)));
        if self.everything {
            return;
        }
        self.records.extend(&applied.records);
        self.joined.extend(&applied.joined);
        self.breached.extend(&applied.breached);
        if self.records.len() > RECORDS_MAX || self.breached.len() > RECORDS_MAX {
            self.add_everything();
        }
    }

    fn add_everything(&mut self) {
        *self =
            Self { everything: true, policies: true, acknowledged: true, resets: true, ..Self::default() };
    }
}

/// The reading end of a subscription.
#[derive(Debug)]
pub struct ChangeFeed(Arc<Slot>);

#[derive(Debug, Default)]
struct Slot {
    pending: Mutex<Changes>,
    news: Notify,
}

impl ChangeFeed {
    /// Waits until something has changed, and takes all of it. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Changes {
        loop {
            let news = self.0.news.notified();
            let changes = std::mem::take(&mut *lock(&self.0.pending));
            if !changes.is_empty() {
                return changes;
            }
            news.await;
        }
    }
}

/// The writing end: all feeds of one replica.
#[derive(Debug, Default)]
pub(super) struct Feeds(Mutex<Vec<Weak<Slot>>>);

impl Feeds {
    pub fn subscribe(&self) -> ChangeFeed {
        let slot = Arc::<Slot>::default();
        let mut feeds = lock(&self.0);
        feeds.retain(|feed| feed.strong_count() > 0);
        feeds.push(Arc::downgrade(&slot));
        ChangeFeed(slot)
    }

    pub fn applied(&self, applied: &Applied) {
        self.tell(|changes| changes.add(applied));
    }

    pub fn everything(&self) {
        self.tell(Changes::add_everything);
    }

    fn tell(&self, change: impl Fn(&mut Changes)) {
        for slot in lock(&self.0).iter().filter_map(Weak::upgrade) {
            let empty = {
                let mut pending = lock(&slot.pending);
                change(&mut pending);
                pending.is_empty()
            };
            if !empty {
                slot.news.notify_one();
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(n: u64) -> (RegionId, BucketId) {
        (RegionId(0), BucketId(u128::from(n).to_be_bytes()))
    }

    #[tokio::test]
    async fn a_slow_reader_is_told_each_change_once() {
        let feeds = Feeds::default();
        let (mut a, mut b) = (feeds.subscribe(), feeds.subscribe());
        for n in [1, 2, 1] {
            feeds.applied(&Applied { records: vec![record(n)], ..Applied::default() });
        }
        feeds.applied(&Applied::default());
        for feed in [&mut a, &mut b] {
            let changes = feed.next().await;
            assert_eq!(changes.records, BTreeSet::from([record(1), record(2)]));
            assert!(!changes.everything);
        }
        let nothing = tokio::time::timeout(std::time::Duration::from_millis(10), a.next()).await;
        assert!(nothing.is_err());
    }

    #[tokio::test]
    async fn a_slow_reader_costs_bounded_memory() {
        let feeds = Feeds::default();
        let mut feed = feeds.subscribe();
        for n in 0..u64::try_from(RECORDS_MAX).unwrap() + 10 {
            feeds.applied(&Applied { records: vec![record(n)], ..Applied::default() });
        }
        let changes = feed.next().await;
        assert!(changes.everything && changes.records.is_empty());
        feeds.everything();
        assert!(feed.next().await.everything);
        drop(feed);
        feeds.subscribe();
        assert_eq!(lock(&feeds.0).len(), 1, "feeds that nobody reads are forgotten");
    }
}
