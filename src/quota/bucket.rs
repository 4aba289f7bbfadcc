//! Token bucket arithmetic of one region: reserve and lease in one bucket.
//!
//! A bucket's level lies in `0..=cap`. While a lease is live, rate and capacity are the reserve's and the lease's
//! together; when it ends, the level is clipped to what is left. Tokens come from refill and from grants alone, never
//! from a capacity that grew.
//!
//! A bucket of a quota's window never refills ([`Shape::windowed`]): it counts what was spent, by what is left. So where its
//! capacity changes, its level changes by as much, if need be to below zero: a raise of the quota brings just the difference,
//! and what was spent before a cut counts.
//!
//! The Lua in `store/redis/` does the same, number for number; a test holds them against each other. So all amounts
//! are kept at or below [`EXACT_MAX`], up to which a double is exact.

use super::amount::{Level, Micros, Rate, Tokens};
use super::calendar::Turn;
use super::policy::{LEASE_MAX, LOAN};
use crate::bugs::{Bug, planted};
use serde::{Deserialize, Serialize};

/// The largest amount in a bucket, 2^53 - 1: Lua's doubles hold it exactly.
pub const EXACT_MAX: i64 = 9_007_199_254_740_991;
/// The longest that a store must keep a bucket. Only buckets that refill more slowly than this (or, at rate 0, never) are
/// forgotten before they are full, a hundred years after their last use. A shorter limit would hand an old quota
/// out a second time; so a key always has an expiry, but not always a near one.
pub const KEEP_MAX: Micros = Micros::seconds(100 * 365 * 86_400);
/// Kept for this much longer than arithmetic asks for: more than any tolerance of clocks.
pub const KEEP_MARGIN: Micros = Micros::seconds(5);

/// What a region's bucket is without a lease: its reserve (rate discounted for clock drift, capacity with the overdraft).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Refill rate.
    pub rate: Rate,
    /// Capacity.
    pub cap: Tokens,
}

impl Shape {
    /// What the rate of a bucket of a quota's window is.
    const WINDOWED: Rate = Rate(-1);

    /// A bucket of a quota's window, which never refills.
    #[must_use]
    pub const fn windowed(cap: Tokens) -> Self {
        Self { rate: Self::WINDOWED, cap }
    }

    /// See [`Self::windowed`].
    #[must_use]
    pub fn is_windowed(&self) -> bool {
        self.rate < Rate::ZERO
    }

    /// The same within `0..=EXACT_MAX`.
    #[must_use]
    pub fn exact(self) -> Self {
        // In one clamp: rustc 1.95 takes a choice between -1 and a clamp to `0..` for never negative (at `opt-level = 1`).
        Self { rate: Rate(self.rate.0.clamp(Self::WINDOWED.0, EXACT_MAX)), cap: Tokens(exact(self.cap.0)) }
    }
}

/// When an operation happens: one reading of the store's clock, as an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// No later than the true time: refill counts up to here.
    pub now: Micros,
    /// No earlier than `now` and the true time: leases end by it.
    pub late: Micros,
}

impl Moment {
    /// A clock that is beyond doubt.
    #[must_use]
    pub const fn at(now: Micros) -> Self {
        Self { now, late: now }
    }
}

/// What a store knows about the buckets that it does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Generation {
    /// Store time at which this generation of data began.
    pub start: Micros,
    /// Nothing was spent before it began: buckets that were never seen are full. Otherwise they are empty at `start`,
    /// and refill from [`Self::refills_from`] on.
    pub full: bool,
    /// Buckets whose reserve was lent before this generation began are stored: the others were not lent.
    pub known: bool,
}

impl Generation {
    /// When what the store does not hold begins to refill. A store that has lost its data does not know what its region had lent
    /// of its reserve: until somebody who does has seen to it ([`Self::known`]), all of it is presumed to have been lent at the
    /// last moment.
    #[must_use]
    pub fn refills_from(self) -> Micros {
        let known = self.known || planted(Bug::LoansForgottenOnLoss);
        if known { self.start } else { self.start + LOAN }
    }

    /// What a bucket that the store does not hold is at `now`, all told; `None`: full.
    ///
    /// A change of policy works this out under the *old* shape, before it calls [`Unseen::after_change`].
    #[must_use]
    pub fn unseen(self, shape: Shape, unseen: Option<Unseen>, now: Micros) -> Option<Unseen> {
        if self.full {
            return unseen;
        }
        let from = self.refills_from();
        match unseen {
            Some(u) if u.at > from => {
                let refilled = shape.rate.during(u.at.min(now) - from).or_zero();
                Some(Unseen { level: u.level.min(refilled), at: u.at })
            }
            _ => Some(Unseen { level: Tokens::ZERO, at: from }),
        }
    }
}

/// The state of a bucket that the store does not hold: `level` at store time `at`, refilling from then on
/// (not before: `at` may lie in the future).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unseen {
    /// Tokens in it ...
    pub level: Tokens,
    /// ... at this store time.
    pub at: Micros,
}

impl Unseen {
    /// What a bucket that the store does not hold is after a policy changed at `now`; `None`: full.
    ///
    /// Such a bucket may have been in use and have expired, which it does once it would be full under the rate of its
    /// last use. Under a lower rate it would not be full yet, and under a higher cap neither. So after a change, from rate `r0`
    /// and cap `c0` to `r1` and `c1`, it is taken to be where the worst bucket is that expires early: one that was empty at the
    /// change, expires `c0/r0` later, and by then holds `c0 * r1/r0` (a cut) or at least `c0` (a raise: it gains room, no
    /// tokens).
    ///
    /// Where something of the reserve may be `lent`, that bucket has not refilled for up to [`LOAN`] more, and neither has what is
    /// worked out here.
    ///
    /// `before` is what this function returned for the change before (see also [`Generation::unseen`]).
    #[must_use]
    pub fn after_change(
        old: Shape,
        new: Shape,
        lent: bool,
        before: Option<Self>,
        now: Micros,
    ) -> Option<Self> {
        if old == new {
            return before;
        }
        // At rate 0 a bucket that is not full does not expire.
        let fill = old.rate.time_for(old.cap).map_or(Micros::ZERO, |t| t.min(KEEP_MAX));
        let fill = if lent && old.rate.is_positive() { fill + LOAN } else { fill };
        let scaled = |level: Tokens| {
            if new.rate < old.rate { level.mul_div(new.rate.0, old.rate.0) } else { level }
        };
        let (level, from) = match before {
            None => (scaled(old.cap), now),
            // Everything that could expire under the change before has done so.
            Some(u) if u.at <= now => {
                let mut level = Level::new(u.level.min(old.cap));
                level.accrue(old.rate, now - u.at, old.cap);
                (level.tokens.min(scaled(old.cap)), now)
            }
            Some(u) => (scaled(u.level.min(old.cap)), u.at),
        };
        (level < new.cap).then_some(Self { level, at: from + fill })
    }
}

impl Unseen {
    /// What the store is told of a bucket of a quota's window that it may not hold: when the window began and ends, by the
    /// daemon's monotonic clock (see [`Self::in_store`]). If that was after this generation of data began, nothing can have been spent of it before, and it is
    /// full; else nobody can say, and it is empty (unless the store knows that nothing was ever spent, and the beginning is after
    /// 1970 by its clock: it may have forgotten the bucket of a window that has lasted too long). Its end is also when the store may
    /// forget it.
    #[must_use]
    pub const fn of_window(turn: Turn) -> Self {
        Self { level: Tokens(turn.end.0), at: turn.start }
    }

    /// The same as the store sees it, whose clock is `ahead` of the daemon's monotonic one. Only windows are told by the
    /// daemon's clock: they may be older than the session with the store, whose clock may be another in the next.
    #[must_use]
    pub fn in_store(self, shape: Shape, ahead: Micros) -> Self {
        if !shape.is_windowed() {
            return self;
        }
        Self { level: Tokens(self.level.0.saturating_add(ahead.0)), at: self.at + ahead }
    }

    /// The same on another clock, which reads `to` when this one reads `from`.
    #[must_use]
    pub fn on_clock(self, from: Micros, to: Micros) -> Self {
        Self { level: self.level, at: to + (self.at - from) }
    }

    /// What a region takes its buckets for that the store does not hold, when it begins to use `new` of a policy's reserve: no
    /// more than what it knows itself, nor than `in_pool`, which the replicas know (both by the store's clock).
    ///
    /// `before` is what it used until now. A daemon that has just started does not know: if the store has lost data meanwhile, and a
    /// change is not long past, nobody can say what such a bucket holds, and it is taken to be empty. `lent`: something of the
    /// reserve may be.
    #[must_use]
    pub fn adopt(
        before: Option<(Shape, Option<Self>)>,
        new: Shape,
        lent: bool,
        in_pool: Option<Self>,
        generation: Generation,
        now: Micros,
    ) -> Option<Self> {
        let known = match before {
            Some((old, unseen)) if old == new => unseen,
            Some((old, unseen)) => {
                Self::after_change(old, new, lent, generation.unseen(old, unseen, now), now)
            }
            None if in_pool.is_some() && !generation.full => {
                Some(Self { level: Tokens::ZERO, at: if lent { now + LOAN } else { now } })
            }
            None => None,
        };
        match (known, in_pool) {
            (Some(a), Some(b)) => Some(Self { level: a.level.min(b.level), at: a.at.max(b.at) }),
            (one, other) => one.or(other),
        }
    }
}

/// A record of the pool, as it is put into a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    /// The ask that it answers.
    pub seq: u64,
    /// Later records under the same `seq` have greater numbers.
    pub push: u32,
    /// Tokens granted under `seq` so far.
    pub granted: Tokens,
    /// The lease's burst.
    pub burst: Tokens,
    /// The lease's rate.
    pub rate: Rate,
    /// Store time at which the lease ends.
    pub deadline: Micros,
}

/// What a bucket gave up: see [`Bucket::shrink`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shrunk {
    /// Was a lease live before?
    pub leased: bool,
    /// Tokens that no longer fitted.
    pub returned: Tokens,
    /// The lease's burst afterwards.
    pub burst: Tokens,
    /// The lease's rate afterwards.
    pub rate: Rate,
}

/// One bucket of a region. Every operation wants it settled first: see [`Bucket::settle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    shape: Shape,
    level: Level,
    at: Micros,
    /// The reserve refills from here on (see [`Unseen::at`]); what is lent does so all the time.
    hold: Micros,
    lease: Option<Lease>,
    /// When its window ends, if it has one.
    ends: Option<Micros>,
    lent: Option<Lent>,
}

/// A part of the reserve's rate that the region has lent to the pool: it does not refill with it. No session matters here: it
/// stays lent, whoever attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// So much ...
    pub rate: Rate,
    /// ... until this store time.
    pub until: Micros,
}

/// The record that was installed last, and what is left of its slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lease {
    session: u64,
    seq: u64,
    push: u32,
    granted: Tokens,
    burst: Tokens,
    rate: Rate,
    deadline: Micros,
    /// The latest deadline of any record of this session: once it has passed, none of them can come again, and
    /// what guards against that may be forgotten.
    guard: Micros,
}

impl Bucket {
    /// A bucket that the store does not hold.
    #[must_use]
    pub fn unseen(shape: Shape, unseen: Option<Unseen>, generation: Generation, now: Micros) -> Self {
        let shape = shape.exact();
        if shape.is_windowed() {
            let since = unseen.map_or(Micros::ZERO, |u| u.at);
            let unspent = since > Micros::ZERO && (generation.full || since > generation.start);
            let level = if unspent { shape.cap } else { Tokens::ZERO };
            let ends = unseen.map(|u| Micros(exact(u.level.0)));
            return Self {
                shape,
                level: Level::new(level),
                at: now,
                hold: now,
                lease: None,
                ends,
                lent: None,
            };
        }
        let (level, from) = match generation.unseen(shape, unseen, now) {
            None => (shape.cap, now),
            Some(u) => (Tokens(exact(u.level.0)).min(shape.cap), u.at),
        };
        let (level, at) = (Level::new(level), from.min(now));
        Self { shape, level, at, hold: from, lease: None, ends: None, lent: None }
    }

    /// Brings it to `when`, under this shape and session.
    ///
    /// Until the lease's end it refills with both rates, then it is clipped, then the reserve alone is left. If the
    /// shape has changed since the last time, the time since then counts under the lower rate and the lower cap (a bucket that
    /// sleeps through two changes does not notice the first; it never holds more than the last cap all the same). A lease of
    /// another session is void from the beginning. Time that runs backwards does nothing.
    pub fn settle(&mut self, shape: Shape, session: u64, when: Moment) {
        let shape = shape.exact();
        if shape.is_windowed() && self.shape.is_windowed() {
            self.level.tokens += shape.cap - self.shape.cap;
            self.shape.cap = shape.cap;
        }
        let (rate, cap) = (self.shape.rate.min(shape.rate), self.shape.cap.min(shape.cap));
        self.lease = self.lease.filter(|lease| lease.session == session);
        if let Some(lease) = &mut self.lease {
            let until = when.now.min(lease.deadline);
            let (borrowed, burst) = (lease.rate, lease.burst);
            if lease.deadline <= when.late {
                (lease.burst, lease.rate) = (Tokens::ZERO, Rate::ZERO);
            }
            let held = until.min(self.hold);
            self.level.accrue(borrowed, held - self.at, cap_sum(cap, burst));
            self.at = self.at.max(held);
            self.refill(rate, borrowed, until, cap_sum(cap, burst));
        }
        self.lease = self.lease.filter(|lease| lease.guard > when.late);
        let burst = self.lease.map_or(Tokens::ZERO, |lease| lease.burst);
        self.at = self.at.max(self.hold.min(when.now));
        self.refill(rate, Rate::ZERO, when.now, cap_sum(cap, burst));
        self.lent = self.lent.filter(|lent| lent.until > when.now);
        self.shape = shape;
    }

    /// The reserve, less what of it is lent, and what is borrowed flow in until then.
    fn refill(&mut self, reserve: Rate, borrowed: Rate, until: Micros, cap: Tokens) {
        if let Some(lent) = self.lent {
            let end = until.min(lent.until);
            let left = (reserve - lent.rate).or_zero();
            self.level.accrue(rate_sum(left, borrowed), end - self.at, cap);
            self.at = self.at.max(end);
        }
        self.level.accrue(rate_sum(reserve, borrowed), until - self.at, cap);
        self.at = self.at.max(until);
    }

    /// The reserve that it was settled under last.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What is in it.
    #[must_use]
    pub fn level(&self) -> Tokens {
        self.level.tokens
    }

    /// Store time from which its reserve refills: later than now for a while after some changes of policies.
    #[must_use]
    pub fn refills_from(&self) -> Micros {
        self.hold
    }

    /// Its capacity now, with a live lease's.
    #[must_use]
    pub fn cap(&self) -> Tokens {
        cap_sum(self.shape.cap, self.lease.map_or(Tokens::ZERO, |lease| lease.burst))
    }

    /// Its refill rate now, with a live lease's and without what of the reserve is lent.
    #[must_use]
    pub fn rate(&self) -> Rate {
        let reserve = self.lent.map_or(self.shape.rate, |lent| (self.shape.rate - lent.rate).or_zero());
        rate_sum(reserve, self.borrowed().0)
    }

    /// What it has on lease: rate and burst.
    #[must_use]
    pub fn borrowed(&self) -> (Rate, Tokens) {
        self.lease.map_or_else(Default::default, |lease| (lease.rate, lease.burst))
    }

    /// What of the reserve is lent now.
    #[must_use]
    pub fn on_loan(&self) -> Option<Lent> {
        self.lent
    }

    /// From now on this much of the reserve's rate is lent, for so long. What is lent already stays lent, and for as long:
    /// the pool may go on counting the one or the other. Returns what is lent now.
    pub fn lend(&mut self, rate: Rate, length: Micros, when: Moment) -> Rate {
        let before = self.lent;
        if length > Micros::ZERO && !planted(Bug::ReserveUsedWhileLent) {
            let rate = before.map_or(Rate::ZERO, |lent| lent.rate).max(Rate(exact(rate.0)));
            let until = before.map_or(Micros::ZERO, |lent| lent.until).max(when.late + length);
            self.lent = Some(Lent { rate, until });
        }
        if planted(Bug::ReserveUsedWhileLent) { rate } else { self.lent.map_or(Rate::ZERO, |lent| lent.rate) }
    }

    /// The burst of a live lease, and store time of its end.
    #[must_use]
    pub fn lent(&self) -> (Tokens, Micros) {
        self.lease.map_or_else(Default::default, |lease| (lease.burst, lease.deadline))
    }

    /// Keeps at most this much of the lease, and gives up the tokens that no longer fit. Idempotent.
    pub fn shrink(&mut self, hold_burst: Tokens, hold_rate: Rate) -> Shrunk {
        let Some(lease) = &mut self.lease else { return Shrunk::default() };
        let leased = lease.burst.is_positive() || lease.rate.is_positive();
        lease.burst = lease.burst.min(hold_burst.or_zero());
        lease.rate = lease.rate.min(hold_rate.or_zero());
        let (burst, rate) = (lease.burst, lease.rate);
        let before = self.level.tokens;
        self.level.clip(self.cap());
        Shrunk { leased, returned: before - self.level.tokens, burst, rate }
    }

    /// An ask with this number is about to be made: records with smaller ones, which may still be on their way, have no effect
    /// from now on.
    pub fn fence(&mut self, seq: u64, session: u64, when: Moment) {
        self.fence_for(LEASE_MAX, seq, session, when);
    }

    /// The same where no lease is longer than `longest`.
    pub fn fence_for(&mut self, longest: Micros, seq: u64, session: u64, when: Moment) {
        if planted(Bug::NoFence) {
            return;
        }
        let before = seq.saturating_sub(1);
        let guard = when.now + longest;
        let none = Lease {
            session,
            seq: 0,
            push: 0,
            granted: Tokens::ZERO,
            burst: Tokens::ZERO,
            rate: Rate::ZERO,
            deadline: when.now,
            guard,
        };
        let lease = self.lease.get_or_insert(none);
        if seq > lease.seq {
            (lease.seq, lease.push) = (before, u32::MAX);
        }
        lease.guard = lease.guard.max(guard);
    }

    /// Puts a record of the pool in. A record that has ended, or is no newer than the one installed last under this session,
    /// changes nothing.
    pub fn install(&mut self, grant: &Grant, session: u64, when: Moment) {
        if grant.deadline <= when.late {
            return;
        }
        let last = self.lease;
        if last.is_some_and(|last| (grant.seq, grant.push) <= (last.seq, last.push)) {
            return;
        }
        let counted = last.filter(|last| last.seq == grant.seq).map_or(Tokens::ZERO, |last| last.granted);
        let granted = Tokens(exact(grant.granted.0));
        self.lease = Some(Lease {
            session,
            seq: grant.seq,
            push: grant.push,
            granted: granted.max(counted),
            burst: Tokens(exact(grant.burst.0)),
            rate: Rate(exact(grant.rate.0)),
            deadline: grant.deadline,
            guard: last.map_or(grant.deadline, |last| last.guard.max(grant.deadline)),
        });
        self.level.tokens += (granted - counted).or_zero();
        self.level.clip(self.cap());
    }

    /// Store time until which it must be kept: from then on it is no different from one that was never seen.
    /// (Not counting [`Unseen`]: see [`Unseen::after_change`].)
    #[must_use]
    pub fn keep_until(&self) -> Micros {
        let fill = self.shape.rate.time_for(self.shape.cap - self.level.tokens);
        let lent = self.lent.map_or(self.at, |lent| lent.until);
        let full = self.at.max(self.hold).max(lent) + fill.map_or(KEEP_MAX, |t| t.min(KEEP_MAX));
        let full = self.ends.unwrap_or(full);
        self.lease.map_or(full, |lease| full.max(lease.guard)) + KEEP_MARGIN
    }
}

/// What one of a request's charges does to the bucket at `bucket` in the list.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    /// Which one.
    pub bucket: usize,
    /// Tokens to take; less than 0 gives back.
    pub cost: Tokens,
    /// Does all depend on it?
    pub enforce: bool,
}

/// Checks a request's charges in their order, each against what those before it leave; then takes all that fitted, or
/// (if one did not that had to) nothing. Returns whether all went well, and whether each charge fitted. The buckets are settled.
pub fn take(buckets: &mut [Bucket], charges: &[Charge]) -> (bool, Vec<bool>) {
    let mut after: Vec<Level> = buckets.iter().map(|bucket| bucket.level).collect();
    let mut allowed = true;
    let mut fits = Vec::with_capacity(charges.len());
    for charge in charges {
        let fit = match (buckets.get(charge.bucket), after.get_mut(charge.bucket)) {
            (Some(bucket), Some(level)) if charge.cost <= level.tokens => {
                level.tokens -= charge.cost;
                level.clip(bucket.cap());
                true
            }
            _ => false,
        };
        allowed &= fit || !charge.enforce;
        fits.push(fit);
    }
    if allowed {
        for (bucket, level) in buckets.iter_mut().zip(after) {
            bucket.level = level;
        }
    }
    (allowed, fits)
}

/// Within `0..=EXACT_MAX`.
fn exact(x: i64) -> i64 {
    x.clamp(0, EXACT_MAX)
}

fn cap_sum(a: Tokens, b: Tokens) -> Tokens {
    (a + b).min(Tokens(EXACT_MAX))
}

fn rate_sum(a: Rate, b: Rate) -> Rate {
    (a + b).min(Rate(EXACT_MAX))
}

#[cfg(test)]
mod tests;
