//! What the made-up worlds are made of: chance, an exact meter, a store.

use crate::quota::amount::{MICROS_PER_SECOND, Micros, Rate, Tokens};
use crate::quota::borrower::{InStore, Plan};
use crate::quota::bucket::{self, Bucket, Charge, Generation, Moment, Shape, Unseen};
use crate::quota::policy::*;
use std::collections::BTreeMap;

/// Seeded chance (splitmix64).
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }
    /// Of `lo..=hi`.
    pub fn int(&mut self, lo: i64, hi: i64) -> i64 {
        lo + (self.next() % (hi - lo + 1) as u64) as i64
    }
    pub fn percent(&mut self, p: i64) -> bool {
        self.int(0, 99) < p
    }
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.int(0, from.len() as i64 - 1) as usize]
    }
}

/// A virtual bucket that everything admitted is poured into and that drains at the limit's rate: its level never exceeds
/// the burst if and only if in *every* window no more than burst + rate x time was admitted.
#[derive(Clone, Default)]
pub struct Meter {
    /// Micro-tokens times 1,000,000.
    level: i128,
    at: i64,
}

impl Meter {
    pub fn level(&mut self, rate: Rate, now: Micros) -> Tokens {
        self.level = (self.level - i128::from(rate.0) * i128::from(now.0 - self.at)).max(0);
        self.at = now.0;
        Tokens(((self.level + 999_999) / 1_000_000) as i64)
    }
    pub fn add(&mut self, cost: Tokens, rate: Rate, now: Micros) {
        self.level(rate, now);
        self.level += i128::from(cost.0) * 1_000_000;
    }
    /// Drains at an extra rate for a time that is past already.
    pub fn drain(&mut self, rate: Rate, time: Micros) {
        self.level = (self.level - i128::from(rate.0) * i128::from(time.0)).max(0);
    }
    pub fn empty(&mut self) {
        self.level = 0;
    }
}

/// A region's store with one bucket. Rates are discounted already.
#[derive(Clone, Default)]
pub struct StoreBucket(Option<Bucket>);

/// What the bucket is without a lease, and what is known of one that the store does not hold.
#[derive(Clone, Copy, Default)]
pub struct Bare {
    pub shape: Shape,
    pub unseen: Option<Unseen>,
    pub generation: Generation,
    pub session: u64,
}

impl StoreBucket {
    fn bucket(&mut self, bare: &Bare, now: Micros) -> &mut Bucket {
        let bucket =
            self.0.get_or_insert_with(|| Bucket::unseen(bare.shape, bare.unseen, bare.generation, now));
        bucket.settle(bare.shape, bare.session, Moment::at(now));
        bucket
    }

    /// What is there at `now`.
    pub fn peek(&self, bare: &Bare, now: Micros) -> Bucket {
        *self.clone().bucket(bare, now)
    }

    pub fn level(&self, bare: &Bare, now: Micros) -> Tokens {
        self.peek(bare, now).level()
    }

    pub fn take(&mut self, bare: &Bare, cost: Tokens, now: Micros) -> bool {
        let bucket = self.bucket(bare, now);
        bucket::take(std::slice::from_mut(bucket), &[Charge { bucket: 0, cost, enforce: true }]).0
    }

    /// Stops using what is given up. `fence`: the number of the ask that this is for.
    pub fn prepare(&mut self, bare: &Bare, plan: &Plan, rate: Rate, fence: u64, now: Micros) -> InStore {
        let bucket = self.bucket(bare, now);
        let shrunk = bucket.shrink(plan.hold_burst, rate);
        bucket.fence(fence, bare.session, Moment::at(now));
        let length = if plan.lend.is_positive() { LOAN } else { Micros::ZERO };
        let lent = bucket.lend(plan.lend, length, Moment::at(now));
        let (leased, returned) = (shrunk.leased, shrunk.returned);
        InStore { leased, returned, level: bucket.level(), held: None, lent }
    }

    pub fn install(&mut self, bare: &Bare, grant: &bucket::Grant, now: Micros) {
        self.bucket(bare, now).install(grant, bare.session, Moment::at(now));
    }

    /// Stores it as it is.
    pub fn touch(&mut self, bare: &Bare, now: Micros) {
        self.bucket(bare, now);
    }

    /// Forgets the bucket if that makes no difference.
    pub fn expire(&mut self, now: Micros) {
        self.0 = self.0.filter(|bucket| bucket.keep_until() > now);
    }
}

/// A policy of this name that allows `amount`/`per` with `burst`.
pub fn policy(name: &str, amount: u64, per: Unit, burst: u64, mode: Mode, reserve: Reserve) -> Policy {
    Policy {
        name: name.into(),
        domain: "test".into(),
        matches: vec![KeyMatch { key: "k".into(), value: ValueMatch::Any }],
        limit: Limit::TokenBucket(TokenBucket { amount, per, burst }),
        mode,
        reserve,
        weights: BTreeMap::new(),
        wait: Micros::ZERO,
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    }
}

pub fn regions(n: usize) -> Vec<RegionName> {
    (0..n).map(|i| RegionName::from(format!("r{i}"))).collect()
}

/// A clock of any offset that runs fast or slow by some parts per million.
#[derive(Clone, Copy)]
pub struct Clock {
    pub real: i64,
    pub shown: i64,
    pub ppm: i64,
}

impl Clock {
    pub fn at(&self, real: Micros) -> Micros {
        let passed = i128::from(real.0 - self.real);
        Micros(self.shown + (passed * i128::from(MICROS_PER_SECOND + self.ppm) / 1_000_000) as i64)
    }
    pub fn bend(&mut self, real: Micros, ppm: i64) {
        (self.shown, self.real, self.ppm) = (self.at(real).0, real.0, ppm);
    }
}
