//! Denials that are still true: what cannot have refilled since the store denied it is denied again without asking.
//!
//! Who is denied and comes back at once is most of what a spent bucket hears. For each bucket that the store denied last
//! it is remembered what it held. Until a later request's cost can have flowed in, by the fastest that clocks and rates may run,
//! the store could say nothing else; unless the bucket gains tokens by other means, and then it is forgotten:
//!
//! | tokens come | |
//! | --- | --- |
//! | by refill, of the reserve and a lease | what may have come since is worked out; where reserve is lent, as if that ended at once |
//! | with a lease, or a reset | the slow loop forgets the bucket once they are in the store, and before anybody is told |
//! | by a caller who gives back | the bucket is forgotten once the store has them |
//! | with other policies, or another part of them | a remembered answer holds for the same question only: shape, and what an unseen bucket is |
//! | with a store that begins anew, or knows more of what it does not hold | all is forgotten, as it is when the store gives no answer |
//!
//! An answer that was under way meanwhile is not remembered. Some things this daemon does not see: what another daemon of the region
//! does to the bucket (one takes over from the other), what the store does after its answer was given up, a clock of the store that is set
//! forward, keys that it evicts. So nothing is remembered for longer than [`REMEMBERED`]; by so much an outage of the store may show
//! later, too. No limit is widened by any of it: it only ever denies.

use super::{Bound, Held, Limiter};
use crate::clock;
use crate::quota::amount::{DRIFT_PPM, Micros, Rate, Tokens};
use crate::quota::bucket::{Shape, Unseen};
use crate::quota::policy::BucketId;
use crate::store::{Store, StoreError, TakeCharge, Taken, TakenCharge};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Nothing is remembered for longer.
pub const REMEMBERED: Micros = Micros::millis(100);
const SHARDS: usize = 64;
/// Places in a shard: 2,048 of them are 272 KiB. Buckets that share one take it from each other.
const PLACES: usize = 32;
/// Two clocks, each off by as much as it may be, one fast and one slow; and a little.
const APART_PPM: i64 = 3 * DRIFT_PPM;
/// What reading clocks and remainders of tokens may be rounded by.
const ROUNDED: Micros = Micros(10);

/// What the store denied last, bucket by bucket.
#[derive(Debug)]
pub struct Denials {
    shards: Vec<Mutex<[Place; PLACES]>>,
    /// What was remembered under another one is forgotten.
    epoch: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// How often something was forgotten here.
    forgotten: u64,
    denial: Option<Denial>,
}

#[derive(Clone, Copy, Debug)]
struct Denial {
    bucket: BucketId,
    /// The question that it answers.
    shape: Shape,
    unseen: Option<Unseen>,
    /// The store's answer, and its time.
    seen: TakenCharge,
    at: Micros,
    /// This machine's time before the store was asked, and after it answered.
    asked: Micros,
    answered: Micros,
    /// The bucket fills no faster.
    fastest: Rate,
    epoch: u64,
}

/// What is known of a charge.
#[derive(Debug)]
enum Recalled {
    /// It is denied.
    Denied(Taken),
    /// The store must say.
    Ask(Ticket),
}

/// When the store is asked: what is forgotten from then on, its answer says nothing of.
#[derive(Clone, Copy, Debug)]
struct Ticket {
    asked: Micros,
    epoch: u64,
    forgotten: u64,
}

impl Default for Denials {
    fn default() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { shards, epoch: AtomicU64::new(0) }
    }
}

impl Denials {
    /// The bucket may have gained tokens. To be called once that has happened.
    pub fn forget(&self, bucket: &BucketId) {
        if let Some(place) = self.shard(bucket).get_mut(place_of(bucket)) {
            *place = Place { forgotten: place.forgotten.wrapping_add(1), denial: None };
        }
    }

    /// Any bucket may have gained tokens, or the store is gone.
    pub fn forget_all(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    fn recall(&self, charge: &TakeCharge, now: Micros) -> Recalled {
        let epoch = self.epoch.load(Ordering::SeqCst);
        let place = self.shard(&charge.bucket).get(place_of(&charge.bucket)).copied().unwrap_or_default();
        let denied = place.denial.filter(|d| d.epoch == epoch).and_then(|d| d.still(charge, now));
        let forgotten = place.forgotten;
        denied.map_or(Recalled::Ask(Ticket { asked: now, epoch, forgotten }), Recalled::Denied)
    }

    /// Remembers the store's answer, if it is a denial. `may_be_lent`: reserve that is lent now may fill the bucket again.
    fn remember(
        &self,
        ticket: Ticket,
        charge: &TakeCharge,
        may_be_lent: bool,
        taken: &Taken,
        answered: Micros,
    ) {
        let [seen] = taken.charges[..] else { return };
        if taken.allowed || seen.fits {
            return;
        }
        let (bucket, shape, unseen) = (charge.bucket, charge.shape, charge.unseen);
        let fastest = if may_be_lent { seen.rate + shape.rate } else { seen.rate.max(shape.rate) };
        let Ticket { asked, epoch, forgotten } = ticket;
        let at = taken.now;
        let denial = Denial { bucket, shape, unseen, seen, at, asked, answered, fastest, epoch };
        let mut shard = self.shard(&bucket);
        if let Some(place) = shard.get_mut(place_of(&bucket)).filter(|place| place.forgotten == forgotten) {
            place.denial = Some(denial);
        }
    }

    fn shard(&self, bucket: &BucketId) -> MutexGuard<'_, [Place; PLACES]> {
        let at = usize::from(bucket.0[0]) % SHARDS;
        self.shards[at].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn place_of(bucket: &BucketId) -> usize {
    usize::from(bucket.0[1]) % PLACES
}

impl Denial {
    /// What the store would say of this charge, if that is certain to be a denial.
    fn still(&self, charge: &TakeCharge, now: Micros) -> Option<Taken> {
        let same = (self.bucket, self.shape, self.unseen) == (charge.bucket, charge.shape, charge.unseen);
        let age = (now - self.asked).or_zero();
        if !same || age > REMEMBERED {
            return None;
        }
        let longest = age.mul_div(1_000_000 + APART_PPM, 1_000_000) + ROUNDED;
        let most = self.seen.level + self.fastest.during(longest) + Tokens(ROUNDED.0);
        if charge.cost <= most {
            return None;
        }
        // No later than the store's answer was, so that nobody is told to come back too early.
        let since = (now - self.answered).or_zero();
        let level = (self.seen.level + self.seen.rate.during(since)).min(self.seen.cap);
        let charges = vec![TakenCharge { level, ..self.seen }];
        Some(Taken { allowed: false, now: self.at + since, charges, counts: Vec::new() })
    }
}

impl<S: Store> Limiter<S> {
    /// Takes what a request is charged; of a single charge on a token bucket, from memory what is certain to be denied.
    pub(super) async fn take_or_recall(&self, held: &[Held<'_>]) -> Result<Taken, StoreError> {
        let denials = &self.core.denials;
        let ticket = match held {
            [only] if only.may_be_remembered() => match denials.recall(&only.take(), clock::now()) {
                Recalled::Denied(taken) => {
                    self.core.metrics.denials_from_memory.inc();
                    return Ok(taken);
                }
                Recalled::Ask(ticket) => Some((only, ticket)),
            },
            _ => None,
        };
        let taken = self.take_traced(held).await;
        for held in held.iter().filter(|h| h.limit.is_some() && h.charge.cost < Tokens::ZERO) {
            denials.forget(&held.bucket());
        }
        let taken = taken?;
        self.core.fallback.store_is_back();
        if !taken.allowed
            && let Some((only, ticket)) = ticket
        {
            let lent = only.policy.pooled || only.policy.lends;
            denials.remember(ticket, &only.take(), lent, &taken, clock::now());
        }
        Ok(taken)
    }
}

impl Held<'_> {
    fn may_be_remembered(&self) -> bool {
        let bucket = matches!(self.limit, Some(Bound::Bucket(_))) && self.count.is_none();
        bucket && !self.own && self.enforced() && self.charge.cost.is_positive()
    }
}

#[cfg(test)]
mod tests;
