//! The books of one bucket: its pool's level, and a record for each region that has asked.
//!
//! Conservation, at every log index: reserves (as counted) + liabilities + ghosts + free = the whole, and free >= 0 (except
//! while a policy shrinks: then nothing is granted until it is back).

use super::entry::{Ask, RegionId};
use super::permits;
use super::policies::Terms;
use crate::bugs::{Bug, planted};
use crate::quota::amount::{Level, Micros, Rate, Tokens};
use serde::{Deserialize, Serialize};

/// Asks that are older than this (Raft time) are dropped, and a record is kept this long after its ask, so that a late
/// copy finds it.
pub const MAX_AGE: Micros = Micros::seconds(30);

/// What the pool has granted a region for a bucket. The record *is* the reply to the ask: the region reads it in its own
/// replica, any number of times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Whose.
    pub region: RegionId,
    /// The slice is out. Once it has run out, the record is a tombstone.
    pub live: bool,
    /// Later records under the same [`Self::seq`] have greater numbers.
    pub push: u32,
    /// The region's epoch.
    pub epoch: u64,
    /// The ask that this answers.
    pub seq: u64,
    /// Liability: the most burst of the pool that the region may hold or come to hold ...
    pub burst: Tokens,
    /// ... and the most rate.
    pub rate: Rate,
    /// The burst that it is to hold once it has read this (at most the liability) ...
    pub offer_burst: Tokens,
    /// ... and the rate.
    pub offer_rate: Rate,
    /// Tokens granted under `seq` so far: reading twice adds nothing.
    pub granted: Tokens,
    /// How long the slice is lent for. The region counts it from before it sent its ask, the pool from the commit.
    pub lease: Micros,
    /// Raft time at which the pool takes the slice back.
    pub expires: Micros,
    /// Raft time of the ask: how long its advice and its tombstone are kept counts from here.
    pub asked: Micros,
    /// Advice of the region: see [`Ask`].
    pub demand: Rate,
    /// See [`Self::demand`].
    pub want: Tokens,
    /// See [`Self::demand`]. At least one token.
    pub quantum: Tokens,
    /// The slice of an older epoch of this region.
    pub ghost: Option<Box<Ghost>>,
}

/// A slice of an older epoch: its successor cannot give it up, so it is presumed in use until it has run out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ghost {
    /// Burst that may be in use.
    pub burst: Tokens,
    /// Rate that may be in use.
    pub rate: Rate,
    /// Until this Raft time.
    pub until: Micros,
}

impl Record {
    /// Raft time from which this record is of no use to anyone.
    fn gone(&self, advice: Micros) -> Micros {
        let ghost = self.ghost.as_ref().map_or(Micros(i64::MIN), |g| g.until);
        if planted(Bug::TombstoneDroppedEarly) {
            return self.expires.max(ghost);
        }
        self.expires.max(ghost).max(self.asked + advice.max(MAX_AGE))
    }

    /// Everything of the pool that may be in use under it: rate and burst.
    #[must_use]
    pub fn liable(&self) -> (Rate, Tokens) {
        let ghost = self.ghost.as_deref().copied().unwrap_or_default();
        (self.rate + ghost.rate, self.burst + ghost.burst)
    }

    /// The slice is over: unspent tokens are presumed spent, the share comes back.
    fn end(&mut self) {
        self.live = false;
        (self.burst, self.rate, self.offer_burst, self.offer_rate) = Default::default();
    }
}

/// Books that do not balance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breach {
    /// An ask was granted more than was free.
    Overlent,
    /// The level is negative, or above what is free.
    Level,
    /// A record offers more than it counts.
    Offer,
    /// An ask made tokens.
    Tokens,
}

/// The books of one bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ledger {
    /// Of which policy.
    pub(super) policy: u32,
    /// They did not balance: nothing is granted until everything lent has run out.
    pub(super) frozen: bool,
    /// Tokens that may be lent, at Raft time [`Self::at`].
    pub(super) level: Level,
    pub(super) at: Micros,
    /// One a region; mostly there is one region, and many buckets.
    pub(super) records: Box<[Record]>,
}

impl Ledger {
    /// Empty books.
    pub(super) fn new(policy: u32, at: Micros) -> Self {
        Self { policy, at, ..Self::default() }
    }

    /// What is not lent: rate and burst. Negative while a policy shrinks.
    pub(super) fn free(&self, terms: &Terms<'_>) -> (Rate, Tokens) {
        let whole = (terms.rate + terms.lent.rate(self.at), terms.burst);
        if planted(Bug::OutstandingNotCounted) {
            return whole;
        }
        let lent = self.records.iter().map(Record::liable);
        lent.fold(whole, |(rate, burst), (r, b)| (rate - r, burst - b))
    }

    /// What could be lent to the region of this record until Raft time `end`, with what it holds already.
    pub(super) fn free_for(&self, terms: &Terms<'_>, record: &Record, end: Micros) -> (Rate, Tokens) {
        let (_, burst) = self.free(terms);
        let rate = self.free_rate_until(terms, record.region, end.max(record.expires));
        (rate, burst + record.burst)
    }

    /// Brings the books to Raft time `tau`: slices run out in order, the level refills in between.
    pub(super) fn advance(&mut self, terms: &Terms<'_>, tau: Micros) {
        while let Some(end) = self.next_end(terms)
            && end <= tau
        {
            let end = end.max(self.at);
            self.accrue(terms, end);
            for record in &mut self.records {
                if record.live && record.expires <= end {
                    if planted(Bug::UnspentPresumed) {
                        self.level.tokens += record.granted;
                    }
                    record.end();
                }
                if record.ghost.as_ref().is_some_and(|g| g.until <= end) {
                    record.ghost = None;
                }
            }
        }
        self.accrue(terms, tau.max(self.at));
        let (now, advice) = (self.at, terms.cut.lease);
        for record in self.records.iter_mut().filter(|r| r.asked + advice <= now) {
            (record.demand, record.want) = Default::default();
        }
        self.forget_gone(advice);
        if self.frozen && self.records.is_empty() {
            self.frozen = false;
            self.level = Level::default();
        }
    }

    fn forget_gone(&mut self, advice: Micros) {
        let now = self.at;
        if self.records.iter().any(|r| r.gone(advice) <= now) {
            let mut records = std::mem::take(&mut self.records).into_vec();
            records.retain(|r| r.gone(advice) > now);
            self.records = records.into_boxed_slice();
        }
    }

    /// Cuts the level to what is free.
    pub(super) fn clip(&mut self, terms: &Terms<'_>) {
        let (_, burst) = self.free(terms);
        if terms.permits {
            self.level = Level::new(burst.or_zero());
        }
        self.level.clip(burst.or_zero());
    }

    /// The record of this region, made if there is none.
    pub(super) fn record_mut(&mut self, region: RegionId) -> Option<&mut Record> {
        if !self.records.iter().any(|r| r.region == region) {
            let mut records = std::mem::take(&mut self.records).into_vec();
            records.reserve_exact(1);
            records.push(Record { region, ..Record::default() });
            self.records = records.into_boxed_slice();
        }
        self.records.iter_mut().find(|r| r.region == region)
    }

    /// Takes back what an ask gives up. `None`: the ask is not newer than the record.
    pub(super) fn give_up(&mut self, terms: &Terms<'_>, ask: &Ask) -> Option<GivenUp> {
        let now = self.at;
        let record = self.record_mut(ask.region)?;
        let same_epoch = record.epoch == ask.epoch || planted(Bug::NoEpoch);
        if same_epoch && ask.seq <= record.seq && !planted(Bug::NoSeqCheck) {
            return None;
        }
        let mut expires = if record.live && same_epoch { record.expires } else { now };
        if !same_epoch && record.live {
            let ghost = record.ghost.get_or_insert_default();
            ghost.burst += record.burst;
            ghost.rate += record.rate;
            ghost.until = ghost.until.max(record.expires);
            record.end();
        }
        if terms.permits
            && let Some(until) = permits::adopt(record, ask)
        {
            expires = expires.max(until);
        }
        let held = ask.held_burst.or_zero().min(record.burst);
        // Tokens that the region has not read, and with this newer seq has vowed never to read. (If it says that it has
        // read something newer than the record, it has forgotten what became of this one: presumed spent.)
        let unread = match (same_epoch && record.live, ask.read_seq.cmp(&record.seq)) {
            (false, _) | (true, std::cmp::Ordering::Greater) => Tokens::ZERO,
            (true, std::cmp::Ordering::Equal) => record.granted - ask.read_granted,
            (true, std::cmp::Ordering::Less) => record.granted,
        };
        // A slice gives back no more than it counts for: a copy that comes when nobody knows its ask any more brings nothing.
        let most = if planted(Bug::TombstoneDroppedEarly) { Tokens::MAX } else { record.burst - held };
        let back = (ask.returned.or_zero() + unread.or_zero()).min(most);
        record.burst = held;
        record.rate = ask.held_rate.or_zero().min(record.rate);
        self.level.tokens += back;
        self.clip(terms);
        Some(GivenUp { back, expires })
    }

    /// Do the books balance?
    pub(super) fn check(&self, terms: &Terms<'_>) -> Result<(), Breach> {
        let (_, burst) = self.free(terms);
        let negative = self.level.tokens < Tokens::ZERO && !terms.windowed;
        if negative || self.level.tokens > burst.or_zero() {
            return Err(Breach::Level);
        }
        let bad = |r: &Record| {
            r.offer_burst > r.burst
                || r.offer_rate > r.rate
                || r.offer_burst.min(r.granted) < Tokens::ZERO
                || r.offer_rate < Rate::ZERO
        };
        if self.records.iter().any(bad) { Err(Breach::Offer) } else { Ok(()) }
    }

    fn accrue(&mut self, terms: &Terms<'_>, to: Micros) {
        let (rate, burst) = self.free(terms);
        self.level.accrue(rate.or_zero(), to - self.at, burst.or_zero());
        self.at = to;
        if terms.permits {
            self.clip(terms);
        }
    }

    /// The next Raft time at which something that was lent comes back.
    fn next_end(&self, terms: &Terms<'_>) -> Option<Micros> {
        let loans = terms.lent.after(self.at).map(|loan| loan.until);
        let slices = self.records.iter().filter(|r| r.live).map(|r| r.expires);
        let ghosts = self.records.iter().filter_map(|r| r.ghost.as_ref()).map(|g| g.until);
        slices.chain(ghosts).chain(loans).min()
    }
}

/// What an ask gave up.
#[derive(Clone, Copy, Debug)]
pub(super) struct GivenUp {
    /// Tokens that went back into the pool, at most.
    pub(super) back: Tokens,
    /// The region may hold on to its older lease until then, whatever it is told.
    pub(super) expires: Micros,
}
