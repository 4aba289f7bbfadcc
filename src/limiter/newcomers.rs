//! Buckets that are new to this daemon: how many there may be a second, for whom, and how many in all.
//!
//! Whoever chooses the values of descriptors chooses how many buckets there are; each costs a key in the store, and under
//! pressure a tally and records in the pool. So a bucket that this daemon has not met lately needs a permit. Permits
//! come at a steady rate, and callers share them fairly (`Budget`). Without a permit the store is only asked whether it holds
//! the bucket: if it does, the request goes on as ever; if not, it is answered [`Reason::TooManyBuckets`], and nothing is
//! stored, tallied or asked of the pool. No limit is widened by that: it only ever denies, and buckets that exist do not notice.
//!
//! [`Reason::TooManyBuckets`]: crate::quota::verdict::Reason::TooManyBuckets

use super::{Held, Limiter};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::counted::Act;
use crate::quota::policy::BucketId;
use crate::quota::verdict::LimitVerdict;
use crate::store::{Store, StoreError};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use tokio::time::Instant;

/// Permits of so many seconds are kept for a crowd that comes all at once.
pub const BURST_SECONDS: u32 = 10;
/// The most callers that are told apart; the rest share one part.
const CALLERS_MAX: usize = 4_096;
/// A caller that has met no new bucket for this long has no part of the permits any more.
const IDLE: Micros = Micros::seconds(10);
/// One permit, in the unit in which they are counted: at a rate of one a second, one unit comes each microsecond.
const PERMIT: i64 = 1_000_000;
/// Between two lines in the log that say that new buckets are refused.
const COMPLAIN_EVERY: Micros = Micros::seconds(10);

/// How many buckets callers may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewBuckets {
    /// So many a second, all callers together; [`BURST_SECONDS`] times as many at once.
    pub per_second: u32,
    /// None while the store holds so many keys.
    pub stored_max: u64,
}

impl Default for NewBuckets {
    fn default() -> Self {
        Self { per_second: 10_000, stored_max: 4_000_000 }
    }
}

/// Who asks, as far as sharing goes: a token, a certificate, or an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Caller(u64);

impl Caller {
    /// Nobody in particular; all of these are one.
    pub const ANYONE: Self = Self(0);

    /// The owner of the token of this name.
    #[must_use]
    pub fn token(name: &str) -> Self {
        Self::of(b"token", name.as_bytes())
    }

    /// Who showed this certificate (DER).
    #[must_use]
    pub fn certificate(der: &[u8]) -> Self {
        Self::of(b"certificate", der)
    }

    /// Whoever is at this address. Of IPv6 the network (/64) counts: a single machine has all of its addresses to choose from.
    #[must_use]
    pub fn address(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(v4) => Self::of(b"v4", &v4.octets()),
            IpAddr::V6(v6) => Self::of(b"v6", v6.octets().first_chunk::<8>().unwrap_or(&[0; 8])),
        }
    }

    fn of(kind: &[u8], what: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(kind).update(&[0]).update(what);
        let mut id = [0; 8];
        hasher.finalize_xof().fill(&mut id);
        Self(u64::from_le_bytes(id))
    }
}

/// What all threads of a daemon know of new buckets.
#[derive(Debug)]
pub struct Newcomers {
    limits: NewBuckets,
    began: Instant,
    seen: Seen,
    budget: Mutex<Budget>,
    stored: AtomicU64,
    complained: AtomicI64,
}

impl Newcomers {
    /// With these limits.
    #[must_use]
    pub fn new(limits: NewBuckets) -> Self {
        Self {
            limits,
            began: Instant::now(),
            seen: Seen::default(),
            budget: Mutex::new(Budget::new(limits.per_second)),
            stored: AtomicU64::new(0),
            complained: AtomicI64::new(-COMPLAIN_EVERY.0),
        }
    }

    /// The store holds so many keys.
    pub fn set_stored(&self, keys: u64) {
        self.stored.store(keys, Ordering::Relaxed);
    }

    /// See [`Self::set_stored`].
    #[must_use]
    pub fn stored(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    fn is_full(&self) -> bool {
        self.stored() >= self.limits.stored_max
    }

    fn now(&self) -> Micros {
        Micros::from_duration(self.began.elapsed())
    }

    /// May this caller make these buckets, all of them?
    fn permit(&self, caller: Caller, buckets: &[BucketId], now: Micros) -> bool {
        if self.is_full() {
            return false;
        }
        let mut budget = self.budget.lock().unwrap_or_else(PoisonError::into_inner);
        budget.take(caller, buckets.len(), now)
    }

    fn complain(&self, now: Micros) {
        let last = self.complained.load(Ordering::Relaxed);
        let due = now.0.saturating_sub(last) >= COMPLAIN_EVERY.0;
        let mine = due
            && self.complained.compare_exchange(last, now.0, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if mine && self.is_full() {
            let (stored, max) = (self.stored(), self.limits.stored_max);
            tracing::warn!(
                stored,
                max,
                "requests for new buckets are denied: the store holds as many keys as it may"
            );
        } else if mine {
            let a_second = self.limits.per_second;
            tracing::warn!(
                a_second,
                "requests for new buckets are denied: a caller brings more of them than its part"
            );
        }
    }
}

impl<S: Store> Limiter<S> {
    /// Takes what the request is charged, but nothing from buckets that may not be made.
    pub(super) async fn take_known(
        &self,
        held: &mut [Held<'_>],
        deadline: Option<Instant>,
    ) -> Vec<LimitVerdict> {
        let refused = match self.refused(held).await {
            Ok(refused) if refused.is_empty() => return self.take(held, deadline).await,
            Ok(refused) => refused,
            Err(error) => return self.without_store(held, error).await,
        };
        let is_refused = |h: &Held<'_>| h.is_limited() && refused.contains(&h.bucket());
        let denied = held.iter().any(|h| is_refused(h) && h.enforced());
        let mut rest: Vec<Held<'_>> = held.iter().filter(|h| !is_refused(h)).cloned().collect();
        if denied {
            // Nothing is charged; the other limits say what they have.
            rest.iter_mut().for_each(|h| (h.charge.cost, h.act) = (Tokens::ZERO, Act::Count));
        }
        let rest = if rest.iter().any(Held::is_limited) {
            self.take(&mut rest, deadline).await
        } else {
            rest.iter().map(Held::unlimited).collect()
        };
        let mut rest = rest.into_iter();
        let verdict = |h: &Held<'_>| {
            if is_refused(h) {
                return Some(LimitVerdict::no_room(h.terms(), h.charge.descriptor, h.charge.cost));
            }
            rest.next()
        };
        held.iter().filter_map(verdict).collect()
    }

    /// The buckets of these charges that do not exist and may not be made.
    async fn refused(&self, held: &[Held<'_>]) -> Result<Vec<BucketId>, StoreError> {
        let newcomers = &self.core.newcomers;
        let now = newcomers.now();
        // A quota's bucket is met under the name that it has in all windows: it is not new again at every turn.
        let (mut names, mut new): (Vec<BucketId>, Vec<BucketId>) = Default::default();
        for held in held.iter().filter(|h| h.is_limited()) {
            if !newcomers.seen.contains(&held.name, now) && !names.contains(&held.name) {
                names.push(held.name);
                new.push(held.bucket());
            }
        }
        if new.is_empty() {
            return Ok(new);
        }
        if newcomers.permit(self.caller, &new, now) {
            names.iter().for_each(|name| newcomers.seen.insert(name, now));
            return Ok(Vec::new());
        }
        let (stored, known) = self.store.known(new.clone()).await?;
        newcomers.set_stored(stored);
        let mut known = names.iter().zip(known);
        new.retain(|_| {
            let Some((name, known)) = known.next() else { return true };
            if known {
                newcomers.seen.insert(name, now);
            }
            !known
        });
        if !new.is_empty() {
            self.core.metrics.new_buckets_refused(new.len());
            newcomers.complain(now);
        }
        Ok(new)
    }
}

/// Permits for new buckets, shared by callers.
///
/// All draw from one bucket of permits. One half of it is for everybody. The other half is divided: each of the `n` callers that
/// are about has a part of its own, which fills at a `n`-th of the rate. So a caller that wants no more than a `n`-th is served
/// whatever the others want, and what it does not use is theirs.
#[derive(Debug)]
struct Budget {
    rate: i64,
    level: i64,
    at: Micros,
    parts: HashMap<Caller, Part>,
    swept: Micros,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    level: i64,
    at: Micros,
}

impl Budget {
    fn new(per_second: u32) -> Self {
        let (rate, parts) = (i64::from(per_second), HashMap::new());
        let mut budget = Self { rate, level: 0, at: Micros::ZERO, parts, swept: Micros::ZERO };
        budget.level = budget.cap();
        budget
    }

    fn cap(&self) -> i64 {
        self.rate.saturating_mul(i64::from(BURST_SECONDS)).saturating_mul(PERMIT)
    }

    /// Takes so many permits, or none.
    fn take(&mut self, caller: Caller, count: usize, now: Micros) -> bool {
        self.sweep(now);
        let (rate, cap) = (self.rate, self.cap());
        self.level = refilled(self.level, rate, now - self.at, cap);
        self.at = self.at.max(now);
        let caller = if self.parts.len() < CALLERS_MAX || self.parts.contains_key(&caller) {
            caller
        } else {
            Caller::ANYONE
        };
        self.parts.entry(caller).or_insert(Part { level: 0, at: now });
        let n = i64::try_from(self.parts.len()).unwrap_or(i64::MAX);
        let Some(part) = self.parts.get_mut(&caller) else { return false };
        // Rounded down: the parts must not grow faster than the whole.
        let grown = rate.saturating_mul((now - part.at).or_zero().0) / n;
        part.level = part.level.saturating_add(grown).min(cap / 2 / n);
        part.at = part.at.max(now);
        let need = i64::try_from(count).unwrap_or(i64::MAX).saturating_mul(PERMIT);
        if part.level >= need && self.level >= need {
            part.level -= need;
        } else if self.level.saturating_sub(need) < cap / 2 {
            return false;
        }
        self.level -= need;
        true
    }

    fn sweep(&mut self, now: Micros) {
        if now - self.swept >= Micros::seconds(1) {
            self.parts.retain(|_, part| now - part.at < IDLE);
            self.swept = now;
        }
    }
}

fn refilled(level: i64, rate: i64, time: Micros, cap: i64) -> i64 {
    level.saturating_add(rate.saturating_mul(time.or_zero().0)).min(cap)
}

/// The buckets that this daemon has met: about the last million of them. Who is forgotten needs another permit, no more.
#[derive(Debug)]
struct Seen {
    chunks: Vec<OnceLock<Box<[AtomicU64]>>>,
}

/// Buckets whose names begin alike share so many places.
const WAYS: usize = 4;
const CHUNKS: usize = 64;
/// Places in a chunk: 64 of these are eight MiB, taken as they are used.
const PLACES: usize = 1 << 14;

impl Default for Seen {
    fn default() -> Self {
        Self { chunks: (0..CHUNKS).map(|_| OnceLock::new()).collect() }
    }
}

impl Seen {
    fn contains(&self, bucket: &BucketId, now: Micros) -> bool {
        let (places, print) = self.places(bucket);
        for place in places {
            let there = place.load(Ordering::Relaxed);
            if there >> 16 == print {
                let fresh = print << 16 | minute(now);
                if there != fresh {
                    place.store(fresh, Ordering::Relaxed);
                }
                return true;
            }
        }
        false
    }

    /// Takes the place of the one that has not been met for longest.
    fn insert(&self, bucket: &BucketId, now: Micros) {
        let (places, print) = self.places(bucket);
        let age = |place: &&AtomicU64| match place.load(Ordering::Relaxed) {
            0 => u64::MAX,
            there => minute(now).wrapping_sub(there) & 0xffff,
        };
        if let Some(oldest) = places.iter().max_by_key(age) {
            oldest.store(print << 16 | minute(now), Ordering::Relaxed);
        }
    }

    /// Where a bucket may be, and what it is known by there (48 bits, never 0).
    fn places(&self, bucket: &BucketId) -> (&[AtomicU64], u64) {
        let id = u128::from_le_bytes(bucket.0);
        let at = |shift: u32, size: usize| usize::try_from(id >> shift & 0xffff).unwrap_or(0) % size;
        let print = u64::try_from(id >> 64 & 0xffff_ffff_ffff).unwrap_or(0) | 1;
        let Some(chunk) = self.chunks.get(at(0, CHUNKS)) else { return (&[], print) };
        let chunk = chunk.get_or_init(|| (0..PLACES).map(|_| AtomicU64::new(0)).collect());
        let first = at(16, PLACES / WAYS) * WAYS;
        (chunk.get(first..first + WAYS).unwrap_or(&[]), print)
    }
}

/// Sixteen bits of the number of this minute.
fn minute(now: Micros) -> u64 {
    u64::try_from(now.0 / Micros::seconds(60).0).unwrap_or(0) & 0xffff
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Caller = Caller(1);
    const B: Caller = Caller(2);

    /// Who gets how many permits in a minute if each wants so many every millisecond?
    fn minute_of(budget: &mut Budget, wants: &[(Caller, usize)]) -> Vec<usize> {
        let mut got = vec![0; wants.len()];
        for ms in 1..=60_000 {
            for (got, (caller, want)) in got.iter_mut().zip(wants) {
                *got += (0..*want).filter(|_| budget.take(*caller, 1, Micros::millis(ms))).count();
            }
        }
        got
    }

    #[test]
    fn one_caller_has_all_permits_and_no_more() {
        let mut budget = Budget::new(100);
        let got = minute_of(&mut budget, &[(A, 3)]);
        // The half that is everybody's, its own part of the other, and what comes in a minute.
        assert!((6_400..=7_000).contains(&got[0]), "{got:?}");
    }

    #[test]
    fn who_wants_little_gets_it_whatever_others_want() {
        let mut budget = Budget::new(2_000);
        // One a millisecond is an even part for two, and three in all are more than there are.
        let got = minute_of(&mut budget, &[(A, 9), (B, 1)]);
        assert!(got[1] >= 59_900, "{got:?}");
        assert!(got[0] >= 59_900, "what is left is used: {got:?}");
        assert!(got.iter().sum::<usize>() <= 2_000 * 70, "{got:?}");
    }

    #[test]
    fn a_latecomer_finds_its_part() {
        let mut budget = Budget::new(1_000);
        let greedy = |budget: &mut Budget, ms| {
            for _ in 0..100 {
                budget.take(A, 1, Micros::millis(ms));
            }
        };
        (1..20_000).for_each(|ms| greedy(&mut budget, ms));
        let mut got = 0;
        for ms in 20_000..21_000 {
            greedy(&mut budget, ms);
            // Four hundred a second are less than half of a thousand.
            got += usize::from(ms % 5 < 2 && budget.take(B, 1, Micros::millis(ms)));
        }
        assert!(got >= 395, "{got}");
    }

    #[test]
    fn callers_by_the_thousand_share_one_part() {
        let mut budget = Budget::new(10);
        for caller in 1..100_000 {
            budget.take(Caller(caller), 1, Micros::ZERO);
        }
        assert!(budget.parts.len() <= CALLERS_MAX + 1, "{}", budget.parts.len());
        budget.take(A, 1, Micros::seconds(60));
        assert_eq!(budget.parts.len(), 1, "who is gone has no part");
    }

    #[test]
    fn all_or_none() {
        let mut budget = Budget::new(10);
        assert!(!budget.take(A, 51, Micros::ZERO), "one half is not for one caller alone");
        assert!(budget.take(A, 50, Micros::ZERO));
        assert!(!budget.take(A, 1, Micros::ZERO));
        assert!(budget.take(A, 1, Micros::millis(100)));
    }

    /// Spreads numbers as a hash does, cheaply.
    fn id(n: u64) -> BucketId {
        let wide = (u128::from(n) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        BucketId((wide ^ wide >> 61).to_le_bytes())
    }

    #[test]
    fn what_was_seen_is_remembered() {
        let seen = Seen::default();
        let (early, late) = (Micros::seconds(600), Micros::seconds(1_200));
        (0..300_000).for_each(|n| seen.insert(&id(n), early));
        let kept = (0..300_000).filter(|n| seen.contains(&id(*n), early)).count();
        assert!(kept > 290_000, "{kept}");
        assert_eq!((300_000..400_000).filter(|n| seen.contains(&id(*n), early)).count(), 0);
        // Those that are met again stay where others come and go.
        let regulars: Vec<u64> = (0..1_000).filter(|n| seen.contains(&id(*n), late)).collect();
        (400_000..700_000).for_each(|n| seen.insert(&id(n), late));
        let stayed = regulars.iter().filter(|n| seen.contains(&id(**n), late)).count();
        assert!(stayed * 100 > regulars.len() * 95, "{stayed} of {}", regulars.len());
    }

    #[test]
    fn addresses() {
        let address = |text: &str| Caller::address(text.parse().unwrap());
        assert_eq!(address("127.0.0.1"), address("::ffff:127.0.0.1"));
        assert_ne!(address("127.0.0.1"), address("127.0.0.2"));
        assert_eq!(address("2001:db8::1"), address("2001:db8::ffff:2"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_ne!(Caller::token("a"), Caller::certificate(b"a"));
    }
}
