//! What the made-up worlds are made of: chance, an exact meter, a store.

use crate::quota::amount::{Level, MICROS_PER_SECOND, Micros, Rate, Tokens};
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

/// One bucket in a region's store, as `store.rs` describes it. Rates are discounted already.
#[derive(Clone, Default)]
pub struct StoreBucket {
    pub level: Level,
    pub at: Micros,
    pub lease: Option<StoreLease>,
    /// Of the record installed last, whether or not its lease is live: seq, push, granted.
    pub installed: (u64, u32, Tokens),
    /// Grants of an older seq are void.
    pub fence: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct StoreLease {
    pub burst: Tokens,
    pub rate: Rate,
    pub deadline: Micros,
}

/// What the bucket is without a lease, and what it was at most at a time in the past.
#[derive(Clone, Copy, Default)]
pub struct Bare {
    pub rate: Rate,
    pub cap: Tokens,
    /// At that store time a bucket that was not touched since had at most so many tokens.
    pub unseen: Option<(Tokens, Micros)>,
}

impl StoreBucket {
    /// A bucket that the store has never seen.
    pub fn unseen(reserve: &Bare, now: Micros) -> Self {
        let (tokens, at) = reserve.unseen.unwrap_or((reserve.cap, now));
        Self { level: Level::new(tokens.min(reserve.cap)), at, ..Self::default() }
    }

    pub fn advance(&mut self, reserve: &Bare, now: Micros) {
        if let Some((most, at)) = reserve.unseen.filter(|(_, at)| self.at < *at && *at <= now) {
            // Not touched since the reserve was raised: what accrued before is not known.
            self.at = at;
            self.drop_lease(reserve);
            let lease = self.lease.map_or(Tokens::ZERO, |l| l.burst);
            self.level.clip(most.min(reserve.cap) + lease);
        }
        while self.at < now {
            let lease =
                self.lease.unwrap_or(StoreLease { burst: Tokens::ZERO, rate: Rate::ZERO, deadline: now });
            let to = lease.deadline.clamp(self.at, now);
            self.level.accrue(reserve.rate + lease.rate, to - self.at, reserve.cap + lease.burst);
            self.at = to;
            self.drop_lease(reserve);
        }
        self.drop_lease(reserve);
        let lease = self.lease.map_or(Tokens::ZERO, |l| l.burst);
        self.level.clip(reserve.cap + lease);
    }

    fn drop_lease(&mut self, reserve: &Bare) {
        if self.lease.is_some_and(|l| l.deadline <= self.at) {
            self.lease = None;
            self.level.clip(reserve.cap);
        }
    }

    pub fn peek(&self, reserve: &Bare, now: Micros) -> Tokens {
        let mut copy = self.clone();
        copy.advance(reserve, now);
        copy.level.tokens
    }

    pub fn take(&mut self, reserve: &Bare, cost: Tokens, now: Micros) -> bool {
        self.advance(reserve, now);
        let fits = self.level.tokens >= cost;
        if fits {
            self.level.tokens -= cost;
        }
        fits
    }

    /// Was a lease live, and which tokens no longer fit.
    pub fn prepare(
        &mut self,
        reserve: &Bare,
        burst: Tokens,
        rate: Rate,
        fence: u64,
        now: Micros,
    ) -> (bool, Tokens) {
        self.advance(reserve, now);
        self.fence = self.fence.max(fence);
        let before = self.level.tokens;
        let leased = self.lease.is_some();
        if let Some(lease) = &mut self.lease {
            lease.burst = lease.burst.min(burst);
            lease.rate = lease.rate.min(rate);
        }
        self.advance(reserve, now);
        (leased, before - self.level.tokens)
    }

    pub fn install(&mut self, reserve: &Bare, grant: &StoreGrant, now: Micros) {
        self.advance(reserve, now);
        let (seq, push, granted) = self.installed;
        if grant.deadline <= now || grant.seq < self.fence || (grant.seq, grant.push) < (seq, push) {
            return;
        }
        let before = if grant.seq == seq { granted } else { Tokens::ZERO };
        self.lease = Some(StoreLease { burst: grant.burst, rate: grant.rate, deadline: grant.deadline });
        self.level.tokens += (grant.granted - before).or_zero();
        self.installed = (grant.seq, grant.push, granted.max(grant.granted));
        if grant.seq != seq {
            self.installed.2 = grant.granted;
        }
        self.advance(reserve, now);
    }
}

/// A grant as the store gets it.
#[derive(Clone, Copy, Debug)]
pub struct StoreGrant {
    pub seq: u64,
    pub push: u32,
    pub granted: Tokens,
    pub burst: Tokens,
    pub rate: Rate,
    pub deadline: Micros,
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
