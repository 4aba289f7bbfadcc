//! `on_store_failure: local`: an embedded bucket takes over while the store is down, and its spending is paid back.
//!
//! The bound holds through it: the embedded buckets are empty when the outage begins and refill at the region's own rate, so
//! they never hold more than the store's would have gained meanwhile (where idle reserve is lent to other regions, they refill from when
//! the last loan is over); and what was spent from them is taken out of the store's bucket before it is used again. A limit that counts is
//! taken for used up until the outage is a span old: then all that the store counted before it would have been forgotten. Permits that are in
//! use when the store is back are taken there, under the same lease.

use super::{Held, Limiter, take_of};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::bucket::Unseen;
use crate::quota::counted::{Act, Allowance, Kind};
use crate::quota::policy::{BucketId, LOAN, OnStoreFailure};
use crate::quota::verdict::{LimitVerdict, Reason, Sight};
use crate::store::memory::MemoryStore;
use crate::store::{CHARGES_MAX, CountCharge, Store, StoreError, Take, TakeCharge, Taken};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most buckets that may owe something; a charge on one more is refused while the store is down.
const DEBTS_MAX: usize = 100_000;

pub struct Fallback {
    local: MemoryStore,
    /// Local time at which the outage began; 0: the store answers.
    since: AtomicI64,
    owing: AtomicUsize,
    debts: Mutex<HashMap<BucketId, Debt>>,
}

/// What was taken from embedded buckets.
#[derive(Clone)]
enum Debt {
    Bucket(Tokens),
    /// What was counted; or the permits in use, each lease by itself.
    Counts(Vec<CountCharge>),
}

impl Fallback {
    pub fn new(local: MemoryStore) -> Self {
        let (since, owing) = (AtomicI64::new(0), AtomicUsize::new(0));
        // What is lent of reserves is seen to bucket by bucket.
        if let Some(session) = local.session().borrow().session() {
            let _ = local.mark_known(session);
        }
        Self { local, since, owing, debts: Mutex::default() }
    }

    /// The store has answered: the next outage starts afresh.
    pub fn store_is_back(&self) {
        if self.since.load(Ordering::Relaxed) != 0 {
            self.since.store(0, Ordering::Relaxed);
        }
    }

    /// Takes from the embedded buckets. `None`: there is nothing to be had of them. `lent`: what these buckets' reserves bring may be lent.
    pub async fn take(&self, take: Take, lent: &HashSet<BucketId>) -> Option<Taken> {
        if take.is_empty() {
            return None;
        }
        let now = self.local.now();
        let began = self.since.compare_exchange(0, now.0, Ordering::Relaxed, Ordering::Relaxed);
        let began = Micros(began.map_or_else(|since| since, |_| now.0));
        if self.debts().len().saturating_add(take.len()) > DEBTS_MAX {
            return None;
        }
        let charges = take.charges.iter().map(|charge| {
            let at = if lent.contains(&charge.bucket) { began + LOAN } else { began };
            let unseen = Some(Unseen { level: Tokens::ZERO, at });
            TakeCharge { bucket: of_outage(charge.bucket, began), unseen, ..*charge }
        });
        let counts = take.counts.iter().map(|charge| {
            let until = (began + charge.allowance.span).max(charge.allowance.until);
            let allowance = Allowance { held: 0, until, ..charge.allowance };
            CountCharge { bucket: of_outage(charge.bucket, began), allowance, ..*charge }
        });
        let local = Take { charges: charges.collect(), counts: counts.collect() };
        let taken = self.local.take(local).await.ok()?;
        if taken.allowed {
            self.owe(&take, &taken);
        }
        Some(taken)
    }

    fn owe(&self, take: &Take, taken: &Taken) {
        let mut debts = self.debts();
        for (charge, _) in take.charges.iter().zip(&taken.charges).filter(|(_, seen)| seen.fits) {
            if let Debt::Bucket(owed) = debts.entry(charge.bucket).or_insert(Debt::Bucket(Tokens::ZERO)) {
                *owed += charge.cost;
            }
        }
        for (charge, _) in take.counts.iter().zip(&taken.counts).filter(|(_, seen)| seen.fits) {
            let none = || Debt::Counts(Vec::new());
            if let Debt::Counts(all) = debts.entry(charge.bucket).or_insert_with(none) {
                owe_count(all, charge);
            }
        }
        debts.retain(|_, debt| !matches!(debt, Debt::Counts(all) if all.is_empty()));
        self.owing.store(debts.len(), Ordering::Relaxed);
    }

    /// Pays what the buckets of this charge owe, out of the store's buckets, as far as they go.
    pub async fn settle<S: Store>(&self, store: &S, take: impl FnOnce() -> Take) -> Result<(), StoreError> {
        if self.owing.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let take = take();
        let charges = take.charges.iter().map(|charge| (charge.bucket, Some(charge)));
        let counts = take.counts.iter().map(|count| (count.bucket, None));
        for (bucket, charge) in charges.chain(counts) {
            let debt = self.debts().get(&bucket).cloned();
            let paid = match (debt, charge) {
                (Some(Debt::Bucket(owed)), Some(now)) => pay(store, *now, owed).await?,
                (Some(Debt::Counts(debts)), None) => pay_counts(store, debts).await?,
                _ => continue,
            };
            // If somebody else was quicker, the rest is paid next time.
            if paid {
                let mut debts = self.debts();
                debts.remove(&bucket);
                self.owing.store(debts.len(), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn debts(&self) -> MutexGuard<'_, HashMap<BucketId, Debt>> {
        self.debts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Store> Limiter<S> {
    /// The one place where a failure of the store becomes a verdict.
    pub(super) async fn without_store(&self, held: &[Held<'_>], error: StoreError) -> Vec<LimitVerdict> {
        self.core.metrics.store_error(error.name());
        self.core.denials.forget_all();
        let limited = || held.iter().filter(|h| h.is_limited());
        let denied =
            limited().any(|h| h.policy.policy.on_store_failure == OnStoreFailure::Deny && h.enforced());
        let is_local = |h: &&Held<'_>| h.policy.policy.on_store_failure == OnStoreFailure::Local;
        let local = || limited().filter(is_local);
        let lent = local().filter(|h| h.may_be_lent()).map(Held::bucket).collect();
        let taken = if denied { None } else { self.core.fallback.take(take_of(local()), &lent).await };
        let (charges, counts) = taken.map(|t| (t.charges, t.counts)).unwrap_or_default();
        let (mut charges, mut counts) = (charges.into_iter(), counts.into_iter());
        let verdict = |h: &Held<'_>| {
            let (at, cost) = (h.charge.descriptor, h.charge.cost);
            if h.is_limited() {
                self.core.meter.fell_back(h.policy.id, &h.charge.bucket);
                h.policy.metrics.fell_back(h.policy.policy.on_store_failure);
            }
            let gone = |allow| LimitVerdict::unavailable(h.terms(), at, cost, allow);
            match (h.policy.policy.on_store_failure, h.is_limited()) {
                (_, false) => h.unlimited(),
                (OnStoreFailure::Allow, _) => gone(true),
                (OnStoreFailure::Deny, _) => gone(false),
                (OnStoreFailure::Local, _) if h.count.is_some() => {
                    counts.next().map_or_else(|| gone(false), |seen| h.counted(&seen))
                }
                (OnStoreFailure::Local, _) => charges.next().map_or_else(
                    || gone(false),
                    |s| {
                        let sight = Sight { fits: s.fits, level: s.level, rate: s.rate, cap: s.cap };
                        LimitVerdict::seen(h.terms(), at, cost, sight, None, Reason::OverLimit)
                    },
                ),
            }
        };
        held.iter().map(verdict).collect()
    }
}

/// The bucket is what it would be for a charge of this moment: its policy may have changed since.
async fn pay<S: Store>(store: &S, now: TakeCharge, owed: Tokens) -> Result<bool, StoreError> {
    let take = |cost| Take { charges: vec![TakeCharge { cost, enforce: true, ..now }], ..Take::default() };
    let level = store.take(take(Tokens::ZERO)).await?.charges.first().map(|c| c.level);
    Ok(store.take(take(owed.min(level.unwrap_or_default()))).await?.allowed)
}

async fn pay_counts<S: Store>(store: &S, mut debts: Vec<CountCharge>) -> Result<bool, StoreError> {
    let take = |counts: &[CountCharge]| Take { counts: counts.to_vec(), ..Take::default() };
    if let [debt @ CountCharge { act: Act::Count, .. }] = &mut debts[..] {
        let ask = CountCharge { cost: Tokens::ZERO, ..*debt };
        let left = store.take(take(&[ask])).await?.counts.first().map_or(0, |seen| seen.left);
        (debt.cost, debt.enforce) = (debt.cost.min(Tokens::whole(left)), true);
        return Ok(store.take(take(&debts)).await?.allowed);
    }
    // Of a lease's permits all are taken, or none: then its holder will not find it.
    debts.iter_mut().for_each(|debt| debt.enforce = false);
    for leases in debts.chunks(CHARGES_MAX) {
        store.take(take(leases)).await?;
    }
    Ok(true)
}

/// Adds what was done to what is owed of one bucket.
fn owe_count(all: &mut Vec<CountCharge>, charge: &CountCharge) {
    match charge.act {
        Act::Count if charge.kind == Kind::Permits => {}
        Act::Count => match all.first_mut() {
            Some(debt) => debt.cost = (debt.cost + charge.cost).or_zero(),
            None => all.push(CountCharge { cost: charge.cost.or_zero(), ..*charge }),
        },
        Act::Acquire(_) => all.push(*charge),
        Act::Renew(_) => {}
        Act::Release(lease) => all.retain(|debt| debt.act != Act::Acquire(lease)),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::amount::Rate;
    use crate::quota::bucket::Shape;
    use std::sync::Arc;

    #[tokio::test]
    async fn embedded_buckets_are_empty_at_first_and_do_not_bring_what_may_be_lent() {
        let clock = Arc::new(AtomicI64::new(Micros::seconds(1_000).0));
        let now = Arc::clone(&clock);
        let fallback = Fallback::new(MemoryStore::new(move || Micros(now.load(Ordering::Relaxed))));
        let shape = Shape { rate: Rate::per_second(10), cap: Tokens::whole(100) };
        let (own, lent) = (BucketId([1; 16]), BucketId([2; 16]));
        let charge = |bucket| TakeCharge { bucket, shape, unseen: None, cost: Tokens::ZERO, enforce: true };
        let levels = async |outage: &Fallback| {
            let take = Take { charges: [own, lent].map(charge).to_vec(), ..Take::default() };
            let taken = outage.take(take, &[lent].into()).await.unwrap();
            [0, 1].map(|i| taken.charges[i].level.floor())
        };
        let pass = |time: Micros| clock.fetch_add(time.0, Ordering::Relaxed);
        assert_eq!(levels(&fallback).await, [0, 0]);
        pass(Micros::seconds(5));
        assert_eq!(levels(&fallback).await, [50, 0]);
        pass(LOAN);
        assert_eq!(levels(&fallback).await, [100, 50]);
        fallback.store_is_back();
        assert_eq!(levels(&fallback).await, [0, 0], "each outage begins anew");
    }
}
