//! What an operator has reset: this region's part of it goes into its store.

use super::{REPEAT, Reconcile};
use crate::clock;
use crate::quota::amount::{Micros, Tokens};
use crate::quota::policy::BucketId;
use crate::quota::pool::{Op, TakeReset};
use crate::raft::Log;
use crate::store::{RegionStore, StoreError};
use std::collections::{BTreeMap, BTreeSet};

/// The resets that this region has taken, by bucket: their numbers. What is in here has been filled in, or is not to be any more.
#[derive(Debug, Default)]
pub(super) struct Taken {
    filled: BTreeMap<BucketId, u64>,
    said_at: Option<Micros>,
}

/// A reset whose tokens are to go into this region's bucket.
struct Due {
    bucket: BucketId,
    number: u64,
    policy: u32,
    tokens: Tokens,
    by: String,
    reason: String,
}

impl<L: Log, S: RegionStore> Reconcile<L, S> {
    /// Says that this region has heard of resets. Nothing is filled in before that is committed.
    pub(super) fn resets_to_take(&mut self, now: Micros) -> Vec<Op> {
        let (Some(region), Some(epoch)) = (self.me, self.epoch) else { return Vec::new() };
        if self.resets.said_at.is_some_and(|said| now < said + REPEAT) {
            return Vec::new();
        }
        let pool = self.raft.pool();
        let pool = pool.read();
        let owed = pool.resets().filter(|(_, reset)| reset.owed().any(|owed| owed == region));
        let take = |(bucket, number)| Op::TakeReset(TakeReset { region, epoch, bucket, number });
        let ops: Vec<Op> = owed.map(|(bucket, reset)| take((bucket, reset.number))).collect();
        if !ops.is_empty() {
            self.resets.said_at = Some(now);
        }
        ops
    }

    /// Fills in what this region has taken under its present epoch: once, whatever becomes of it. Only where it is certain that
    /// nothing has happened it is tried again.
    pub(super) async fn fill_reset(&mut self) {
        for due in self.resets_due() {
            let active = self.core.active.load_full();
            let Some(policy) = active.policy(due.policy) else { continue };
            self.resets.filled.insert(due.bucket, due.number);
            // (Permits do not come back so: whoever has them gives them back.)
            let filled = self.store.take(policy.take(due.bucket, -due.tokens)).await;
            self.core.denials.forget(&due.bucket);
            let name = &policy.policy.name;
            let Due { bucket, number, by, reason, .. } = due;
            match filled {
                Ok(taken) => {
                    tracing::info!(policy = %name, %bucket, number, by, reason, "an operator has reset a bucket");
                    let level = taken.charges.first().map(|charge| charge.level);
                    if let (Some(tally), Some(level)) = (self.core.table.get(policy.id, &bucket), level) {
                        tally.saw(level, taken.now);
                    }
                    self.book.wake(bucket, clock::now());
                }
                Err(StoreError::Unavailable) => {
                    self.resets.filled.remove(&bucket);
                    return;
                }
                Err(error @ (StoreError::Unknown | StoreError::Fenced)) => tracing::warn!(
                    policy = %name, %bucket, number, by, reason, %error,
                    "an operator has reset a bucket, and this region's part of it may be lost"
                ),
            }
        }
    }

    fn resets_due(&mut self) -> Vec<Due> {
        let (Some(me), Some(epoch)) = (self.me, self.epoch) else { return Vec::new() };
        let pool = self.raft.pool();
        let pool = pool.read();
        let filled = &mut self.resets.filled;
        let known: BTreeSet<BucketId> = pool.resets().map(|(bucket, _)| bucket).collect();
        filled.retain(|bucket, _| known.contains(bucket));
        let taken = pool.resets().filter_map(|(bucket, reset)| {
            let tokens = reset.taken(me, epoch)?;
            let news = filled.get(&bucket).is_none_or(|number| *number < reset.number);
            news.then(|| Due {
                bucket,
                number: reset.number,
                policy: reset.policy,
                tokens,
                by: reset.by.clone(),
                reason: reset.reason.clone(),
            })
        });
        taken.collect()
    }
}
