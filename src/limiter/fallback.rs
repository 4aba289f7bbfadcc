//! `on_store_failure: local`: an embedded bucket takes over while the store is down, and its spending is paid back.
//!
//! The bound holds through it: the embedded buckets are empty when the outage begins and refill at the region's own rate, so
//! they never hold more than the store's would have gained meanwhile; and what was spent from them is taken out of the store's
//! bucket before it is used again.

use crate::quota::amount::{Micros, Tokens};
use crate::quota::bucket::Unseen;
use crate::quota::policy::BucketId;
use crate::store::memory::MemoryStore;
use crate::store::{Store, StoreError, Take, TakeCharge, Taken};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most buckets that may owe something; a charge on one more is refused while the store is down.
const DEBTS_MAX: usize = 100_000;

pub struct Fallback {
    local: MemoryStore,
    /// Local time at which the outage began; 0: the store answers.
    since: AtomicI64,
    owing: AtomicUsize,
    debts: Mutex<HashMap<BucketId, TakeCharge>>,
}

impl Fallback {
    pub fn new(local: MemoryStore) -> Self {
        let (since, owing) = (AtomicI64::new(0), AtomicUsize::new(0));
        Self { local, since, owing, debts: Mutex::default() }
    }

    /// The store has answered: the next outage starts afresh.
    pub fn store_is_back(&self) {
        if self.since.load(Ordering::Relaxed) != 0 {
            self.since.store(0, Ordering::Relaxed);
        }
    }

    /// Takes from the embedded buckets. `None`: there is nothing to be had of them.
    pub async fn take(&self, charges: Vec<TakeCharge>) -> Option<Taken> {
        if charges.is_empty() {
            return None;
        }
        let now = self.local.now();
        let began = self.since.compare_exchange(0, now.0, Ordering::Relaxed, Ordering::Relaxed);
        let began = Micros(began.map_or_else(|since| since, |_| now.0));
        if self.debts().len().saturating_add(charges.len()) > DEBTS_MAX {
            return None;
        }
        let local = charges.iter().map(|charge| TakeCharge {
            bucket: of_outage(charge.bucket, began),
            unseen: Some(Unseen { level: Tokens::ZERO, at: began }),
            ..*charge
        });
        let taken = self.local.take(Take { charges: local.collect() }).await.ok()?;
        if taken.allowed {
            let mut debts = self.debts();
            for (charge, _) in charges.into_iter().zip(&taken.charges).filter(|(_, seen)| seen.fits) {
                let debt = debts.entry(charge.bucket).or_insert(TakeCharge { cost: Tokens::ZERO, ..charge });
                debt.cost += charge.cost;
            }
            self.owing.store(debts.len(), Ordering::Relaxed);
        }
        Some(taken)
    }

    /// Pays what these buckets owe, out of the store's buckets, as far as they go.
    pub async fn settle<S: Store>(
        &self,
        store: &S,
        buckets: impl Iterator<Item = BucketId>,
    ) -> Result<(), StoreError> {
        if self.owing.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        for bucket in buckets {
            let Some(mut debt) = self.debts().get(&bucket).copied() else { continue };
            debt.unseen = None;
            debt.enforce = true;
            let ask = TakeCharge { cost: Tokens::ZERO, ..debt };
            let level = store.take(Take { charges: vec![ask] }).await?.charges.first().map(|c| c.level);
            let pay = TakeCharge { cost: debt.cost.min(level.unwrap_or_default()), ..debt };
            let paid = store.take(Take { charges: vec![pay] }).await?;
            // If somebody else was quicker, the rest is paid next time.
            if paid.allowed {
                let mut debts = self.debts();
                debts.remove(&bucket);
                self.owing.store(debts.len(), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn debts(&self) -> MutexGuard<'_, HashMap<BucketId, TakeCharge>> {
        self.debts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Each outage has buckets of its own: what one left over must not refill until the next.
fn of_outage(bucket: BucketId, began: Micros) -> BucketId {
    let mut id = bucket.0;
    for (byte, salt) in id.iter_mut().zip(began.0.to_le_bytes()) {
        *byte ^= salt;
    }
    BucketId(id)
}

impl std::fmt::Debug for Fallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fallback")
            .field("since", &self.since)
            .field("owing", &self.owing)
            .finish_non_exhaustive()
    }
}
