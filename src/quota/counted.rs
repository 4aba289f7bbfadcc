//! Limits that count what they admit: sliding windows, sliding logs, and permits that are in use.
//!
//! A token bucket has a level that flows; these keep what was admitted, and forget it when it is a span old (permits: when
//! they are given back, or end). One region's part of such a limit is an [`Allowance`]; what its store keeps for one bucket is a
//! [`Counted`]. Amounts are whole tokens, at most [`COUNT_MAX`].
//!
//! The Lua in `store/redis/counted.lua` does the same, number for number; a test holds them against each other.

pub mod counters;
pub mod lent;
pub mod log;
pub mod permits;

use super::amount::{Micros, TOKENS_MAX, Tokens};
use super::bucket::{Generation, KEEP_MARGIN, Moment};
use super::policy::{Algorithm, BucketId, Limit, Quota};
use crate::bugs::{Bug, planted};
use counters::Counters;
use lent::Slice;
use log::Log;
use permits::{LeaseId, Permits};
use serde::{Deserialize, Serialize};

/// The largest limit that is counted, in whole tokens.
pub const COUNT_MAX: i64 = TOKENS_MAX;

/// How a limit is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Two counters, the older one weighted by how much of its window still counts.
    Counters,
    /// The time of everything that was admitted.
    Log,
    /// What is in use at the same time.
    Permits,
}

impl Kind {
    /// How a limit is counted, and over what span (permits: how long a store keeps one, which is longer than the `ttl` that its holder is
    /// told, see [`lent::kept`]); `None`: it is a token bucket (or one for each window), or there is none.
    #[must_use]
    pub fn of(limit: &Limit) -> Option<(Self, Micros)> {
        match limit {
            Limit::Quota(Quota { algorithm: Algorithm::SlidingWindow, per, .. }) => {
                Some((Self::Counters, Micros::seconds(per.seconds())))
            }
            Limit::Quota(Quota { algorithm: Algorithm::SlidingLog, per, .. }) => {
                Some((Self::Log, Micros::seconds(per.seconds())))
            }
            Limit::Concurrent(concurrent) => Some((Self::Permits, lent::kept(concurrent.ttl))),
            Limit::Quota(Quota { algorithm: Algorithm::FixedWindow, .. })
            | Limit::TokenBucket(_)
            | Limit::Unlimited => None,
        }
    }

    /// Its number in scripts.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Counters => 1,
            Self::Log => 2,
            Self::Permits => 3,
        }
    }

    /// The bucket of a policy that counts in this way, over this span. A policy that is changed to count in another way, or over
    /// another span, begins new buckets: what the old ones hold would mean nothing. (Permits go on when their
    /// span changes: they are in use all the same.)
    #[must_use]
    pub fn bucket(self, id: BucketId, span: Micros) -> BucketId {
        let salt = match self {
            Self::Permits => Micros::ZERO,
            Self::Counters | Self::Log => span,
        };
        let salt = std::iter::once(self.number()).chain(salt.0.to_le_bytes());
        let mut salted = id;
        salted.0.iter_mut().zip(salt).for_each(|(byte, salt)| *byte ^= salt);
        salted
    }
}

/// What a region may use of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allowance {
    /// At most so much ...
    pub limit: i64,
    /// ... within any span of this length (permits: so many at a time, each lent for this long).
    pub span: Micros,
    /// Before this store time ...
    pub until: Micros,
    /// ... no more than this: what may be used by others, or was used by this region and forgotten, still counts.
    pub held: i64,
    /// What a store has forgotten may count for so long, if that is longer than the span.
    pub life: Micros,
    /// Permits of which more may be lent to the region, and what of them is: which its store alone knows. `None`: there are none.
    pub lent: Option<Slice>,
}

impl Allowance {
    /// The same for a store of this generation: one that has lost its data takes all of it for used, until that is a span ago.
    #[must_use]
    pub fn under(self, generation: Generation, now: Micros) -> Self {
        let known = generation.start + self.span.max(self.life);
        if generation.full || now >= known || self.lent.is_some() && planted(Bug::ReserveAfterLoss) {
            return self;
        }
        Self { held: 0, until: self.until.max(known), ..self }
    }

    /// The same, with what the store knows to be lent.
    #[must_use]
    pub fn with(self, slice: Slice) -> Self {
        Self { lent: self.lent.map(|_| slice), ..self }
    }

    /// What counts at this time, without what is lent.
    #[must_use]
    pub fn at(&self, now: Micros) -> i64 {
        if now < self.until { self.limit.min(self.held) } else { self.limit }
    }

    /// What new permits may be given out against, of what is lent.
    fn lent_for_new(&self, when: Moment) -> i64 {
        self.lent.map_or(0, |slice| slice.for_new(self.span, when.late))
    }

    /// What permits may be in use against, of what is lent.
    fn lent_now(&self, when: Moment) -> i64 {
        self.lent.map_or(0, |slice| slice.live(when.late))
    }

    /// How long until `wanted` fits, where `until_at_most` says how long it takes until no more than so much counts; `None`: never.
    fn wait(&self, wanted: i64, when: Moment, until_at_most: impl Fn(i64) -> Micros) -> Option<Micros> {
        let (now, lent) = (when.now, self.lent_for_new(when));
        let under = |limit: i64| {
            let limit = limit.saturating_add(lent);
            (wanted <= limit).then(|| until_at_most(limit.saturating_sub(wanted)))
        };
        if now >= self.until {
            return under(self.limit);
        }
        let hold = self.until - now;
        let sooner = under(self.at(now)).filter(|wait| *wait < hold);
        sooner.or_else(|| under(self.limit).map(|wait| wait.max(hold)))
    }
}

/// What a charge on a counted limit does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Act {
    /// Counts the cost; less than 0 gives back what was counted last. On permits it asks, and takes none.
    #[default]
    Count,
    /// Takes permits, under this lease.
    Acquire(LeaseId),
    /// Lends this lease's permits for another span.
    Renew(LeaseId),
    /// Gives this lease's permits back.
    Release(LeaseId),
}

impl Act {
    /// Its number in scripts, and the lease that it is about.
    #[must_use]
    pub const fn parts(&self) -> (u8, Option<&LeaseId>) {
        match self {
            Self::Count => (0, None),
            Self::Acquire(lease) => (1, Some(lease)),
            Self::Renew(lease) => (2, Some(lease)),
            Self::Release(lease) => (3, Some(lease)),
        }
    }
}

/// What one of a request's charges does to the count at `bucket` in the list.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    /// Which one.
    pub bucket: usize,
    /// How much, in whole tokens.
    pub cost: i64,
    /// What is done with it.
    pub act: Act,
    /// Does all depend on it?
    pub enforce: bool,
}

/// What became of one charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Did it fit (whatever became of the others)? A lease: is it there?
    pub fits: bool,
    /// What is left afterwards.
    pub left: i64,
    /// It did not fit: how long until it does, if nothing else is admitted meanwhile; `None`: it never does (a lease: it is not
    /// there). A lease that may not be renewed: how long it still lasts.
    pub wait: Option<Micros>,
    /// How long until all of what is counted has been forgotten.
    pub reset: Micros,
    /// Permits that were taken or renewed: how long they last.
    pub lasts: Micros,
}

/// What a store keeps for one bucket of a counted limit. Every operation wants it settled first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counted {
    /// See [`Counters`].
    Counters(Counters),
    /// See [`Log`].
    Log(Log),
    /// See [`Permits`].
    Permits(Permits),
}

impl Counted {
    /// A count of nothing.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        match kind {
            Kind::Counters => Self::Counters(Counters::default()),
            Kind::Log => Self::Log(Log::default()),
            Kind::Permits => Self::Permits(Permits::default()),
        }
    }

    /// How it counts.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Self::Counters(_) => Kind::Counters,
            Self::Log(_) => Kind::Log,
            Self::Permits(_) => Kind::Permits,
        }
    }

    /// Brings it to now. Time that runs backwards does nothing.
    pub fn settle(&mut self, span: Micros, now: Micros) {
        if let Self::Counters(counters) = self {
            counters.settle(span, now);
        }
    }

    /// What counts now.
    #[must_use]
    pub fn in_use(&self, now: Micros) -> i64 {
        match self {
            Self::Permits(permits) => permits.used(now),
            // (Not settled: nobody asks.)
            Self::Counters(_) | Self::Log(_) => 0,
        }
    }

    /// Entries that take memory.
    #[must_use]
    pub fn entries(&self) -> usize {
        match self {
            Self::Counters(_) => 0,
            Self::Log(log) => log.entries(),
            Self::Permits(permits) => permits.leases(),
        }
    }

    /// Store time from which on it is no different from one that was never stored.
    #[must_use]
    pub fn keep_until(&self, span: Micros) -> Micros {
        self.over(span) + KEEP_MARGIN
    }

    /// Store time at which all of what is counted has been forgotten.
    fn over(&self, span: Micros) -> Micros {
        let over = match self {
            Self::Counters(counters) => counters.over(span),
            Self::Log(log) => log.over(span),
            Self::Permits(permits) => permits.over(),
        };
        over.unwrap_or(Micros::ZERO)
    }

    /// What counts now and cannot be given back, and what counts and can.
    fn used(&self, span: Micros, now: Micros) -> (i64, i64) {
        match self {
            Self::Counters(counters) => (counters.carried(span, now), counters.current()),
            Self::Log(log) => (0, log.used(span, now)),
            Self::Permits(permits) => (0, permits.used(now)),
        }
    }

    /// How long until at most `room` counts, when `stored` is what is left of what can be given back.
    fn until_at_most(&self, room: i64, stored: i64, span: Micros, now: Micros) -> Micros {
        match self {
            Self::Counters(counters) => counters.until_at_most(room, stored, span, now),
            Self::Log(log) => log.until_gone(stored.saturating_sub(room), span, now),
            Self::Permits(permits) => permits.until_gone(stored.saturating_sub(room), now),
        }
    }
}

/// A request's charges on counted limits, checked but not yet made.
#[derive(Clone, Debug)]
pub struct Checked {
    /// Did everything fit that had to?
    pub allowed: bool,
    /// In the order of the charges: did it fit, and how long until it does?
    fits: Vec<(bool, Option<Micros>)>,
    drafts: Vec<Draft>,
}

/// A count as the charges so far leave it.
#[derive(Clone, Copy, Debug, Default)]
struct Draft {
    /// Cannot be given back.
    carried: i64,
    /// Was there before, and can.
    stored: i64,
    /// Of this request.
    added: i64,
    touched: bool,
}

impl Draft {
    fn used(&self) -> i64 {
        self.carried.saturating_add(self.stored).saturating_add(self.added)
    }

    fn give_back(&mut self, back: i64) {
        let own = back.min(self.added);
        self.added = self.added.saturating_sub(own);
        self.stored = self.stored.saturating_sub(back.saturating_sub(own)).max(0);
    }
}

/// Checks a request's charges in their order, each against what those before it leave. The counts are settled; each comes with
/// what the region may use of it. To make the charges (if all else fits, too), see [`Checked::commit`].
#[must_use]
pub fn check(counts: &[(Counted, Allowance)], charges: &[Charge], when: Moment) -> Checked {
    let draft = |(count, allowance): &(Counted, Allowance)| {
        let (carried, stored) = count.used(allowance.span, when.now);
        Draft { carried, stored, ..Draft::default() }
    };
    let mut drafts: Vec<Draft> = counts.iter().map(draft).collect();
    let mut allowed = true;
    let fits = charges.iter().map(|charge| {
        let found = counts.get(charge.bucket).zip(drafts.get_mut(charge.bucket));
        let (fits, wait) = found.map_or((false, None), |((count, allowance), draft)| {
            check_one(count, allowance, draft, charge, when)
        });
        allowed &= fits || !charge.enforce;
        (fits, wait)
    });
    let fits = fits.collect();
    Checked { allowed, fits, drafts }
}

fn check_one(
    count: &Counted,
    allowance: &Allowance,
    draft: &mut Draft,
    charge: &Charge,
    when: Moment,
) -> (bool, Option<Micros>) {
    let (now, cost) = (when.now, charge.cost);
    if let (Counted::Permits(permits), Act::Renew(lease) | Act::Release(lease)) = (count, charge.act) {
        let Some(left) = permits.left(&lease, cost, now) else { return (false, None) };
        if matches!(charge.act, Act::Renew(_)) {
            // More are in use than may be: the limit was lowered, and those that are not renewed bring it down.
            let limit = allowance.at(now).saturating_add(allowance.lent_now(when));
            return if draft.used() <= limit { (true, None) } else { (false, Some(left)) };
        }
        draft.stored = draft.stored.saturating_sub(cost).max(0);
        return (true, None);
    }
    let limit = allowance.at(now).saturating_add(allowance.lent_for_new(when));
    if cost > 0 && draft.used().saturating_add(cost) > limit {
        let wanted = draft.added.saturating_add(cost);
        let until_at_most = |room| count.until_at_most(room, draft.stored, allowance.span, now);
        return (false, allowance.wait(wanted, when, until_at_most));
    }
    let takes = !matches!((count, charge.act), (Counted::Permits(_), Act::Count));
    if takes && cost != 0 {
        draft.touched = true;
        draft.give_back(cost.saturating_neg().max(0));
        draft.added = draft.added.saturating_add(cost.max(0));
    }
    (true, None)
}

impl Checked {
    /// Makes the charges that fitted, if `allowed`; returns what became of each, and which counts have changed.
    pub fn commit(
        &self,
        allowed: bool,
        counts: &mut [(Counted, Allowance)],
        charges: &[Charge],
        when: Moment,
    ) -> (Vec<Seen>, Vec<bool>) {
        let mut changed = vec![false; counts.len()];
        let mut lasts = vec![Micros::ZERO; charges.len()];
        if allowed {
            let all = counts.iter_mut().zip(&self.drafts).zip(&mut changed);
            for (((count, allowance), draft), changed) in all {
                *changed = draft.touched;
                match count {
                    Counted::Counters(counters) if draft.touched => {
                        counters.set_current(draft.stored.saturating_add(draft.added));
                    }
                    Counted::Log(log) if draft.touched => {
                        log.change(draft.stored, draft.added, allowance.span, when);
                    }
                    Counted::Counters(_) | Counted::Log(_) | Counted::Permits(_) => {}
                }
            }
            for ((charge, (fits, _)), lasts) in charges.iter().zip(&self.fits).zip(&mut lasts) {
                let Some((Counted::Permits(permits), allowance)) = counts.get_mut(charge.bucket) else {
                    continue;
                };
                let end = if *fits { permits.act(charge.act, charge.cost, allowance, when) } else { None };
                if let (Some(end), Some(changed)) = (end, changed.get_mut(charge.bucket)) {
                    *changed = true;
                    *lasts = (end - when.late).or_zero();
                }
            }
        }
        let seen = charges.iter().zip(&self.fits).zip(lasts).map(|((charge, (fits, wait)), lasts)| {
            let Some((count, allowance)) = counts.get(charge.bucket) else { return Seen::default() };
            let (carried, stored) = count.used(allowance.span, when.now);
            let limit = allowance.at(when.now).saturating_add(allowance.lent_now(when));
            let left = limit.saturating_sub(carried).saturating_sub(stored).max(0);
            let reset = (count.over(allowance.span) - when.now).or_zero();
            Seen { fits: *fits, left, wait: *wait, reset, lasts }
        });
        (seen.collect(), changed)
    }
}

/// Tokens as they are counted: whole ones, and a part of one counts as one.
#[must_use]
pub fn whole(cost: Tokens) -> i64 {
    cost.0.saturating_neg().div_euclid(super::amount::MICROS_PER_TOKEN).saturating_neg()
}

#[cfg(test)]
mod tests;
