//! The pool, looked at: what an ask would bring, and what people want to see.

use super::decide::{self, Decision};
use super::entry::RegionId;
use super::ledger::{Breach, Ledger, Record};
use super::members::Standing;
use super::policies::{Slot, Terms};
use super::windows::Windows;
use super::{Pool, advise};
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::calendar::Turn;
use crate::quota::policy::BucketId;

/// One bucket's pool, for people to look at.
#[derive(Clone, Debug)]
pub struct BucketView {
    /// Which bucket.
    pub bucket: BucketId,
    /// Of which policy.
    pub policy: u32,
    /// Its window, if it is a quota's.
    pub window: Option<Turn>,
    /// Tokens that may be lent, at the pool's own Raft time (negative after a quota was cut below what is spent).
    pub level: Tokens,
    /// Rate that is not lent (negative while a policy shrinks).
    pub free_rate: Rate,
    /// Burst that is not lent (negative while a policy shrinks).
    pub free_burst: Tokens,
    /// The books did not balance: nothing is granted.
    pub frozen: bool,
    /// By region: what is lent, and tombstones.
    pub records: Vec<Record>,
}

/// One bucket's books, for whoever wants to check that they balance: `reserved + lent + free = whole`. Rates, and bursts with
/// the overshoot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Books {
    /// The whole limit.
    pub whole: (Rate, Tokens),
    /// All regions' reserves as they are counted, less what they lend of them: while a change is under way, the larger of old and new.
    pub reserved: (Rate, Tokens),
    /// By region: the rate of its reserve that it lends (a part of neither [`Self::reserved`] nor [`Self::lent`]).
    pub on_loan: Vec<Rate>,
    /// By region: the most of the pool that it may hold or come to hold, under older epochs too.
    pub lent: Vec<(Rate, Tokens)>,
    /// What could be lent (negative while a policy shrinks).
    pub free: (Rate, Tokens),
    /// Tokens that could be lent.
    pub level: Tokens,
    /// The books did not balance: nothing is granted.
    pub frozen: bool,
}

/// What a region would ask: see [`Pool::preview`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Inquiry {
    /// Who.
    pub region: RegionId,
    /// As in [`Ask`](super::Ask).
    pub demand: Rate,
    /// As in [`Ask`](super::Ask).
    pub want: Tokens,
    /// As in [`Ask`](super::Ask).
    pub level: Tokens,
    /// As in [`Ask`](super::Ask).
    pub short: Tokens,
    /// As in [`Ask`](super::Ask).
    pub quantum: Tokens,
    /// What it would keep: burst ...
    pub held_burst: Tokens,
    /// ... and rate.
    pub held_rate: Rate,
}

/// What an ask would get, were it applied now, and whether others wait for what the region holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preview {
    /// It would hold this rate ...
    pub rate: Rate,
    /// ... and this burst ...
    pub burst: Tokens,
    /// ... and get so many tokens.
    pub tokens: Tokens,
    /// For so long.
    pub lease: Micros,
    /// The most of the rate that it could have for the longest lease that there is: the rest is backed by loans that end sooner.
    pub steady: Rate,
    /// Another region is entitled to more than it holds.
    pub others_short: bool,
    /// ... to more than twice of it.
    pub others_starve: bool,
    /// Another region has just asked for the tokens of a request, and got none.
    pub others_wait: bool,
    /// The needs on record exceed the pool.
    pub contended: bool,
    /// Some region has asked about this bucket not long ago.
    pub known: bool,
    /// What this region said last about its demand.
    pub demand_on_record: Rate,
    /// It would be served by tokens on demand, not by a share of the rate.
    pub on_demand: bool,
}

impl Pool {
    /// What would this region get if its ask were applied at Raft time `tau`? `None`: there is nothing to be had (split,
    /// unlimited, or no such policy).
    #[must_use]
    pub fn preview(&self, policy: u32, bucket: BucketId, tau: Micros, inquiry: &Inquiry) -> Option<Preview> {
        let slot = self.policies.slot(policy)?;
        let terms = self.terms(slot, bucket).filter(|terms| terms.cut.pooled)?;
        let mut ledger = self.ledger_at(slot, &terms, bucket, tau);
        let known = ledger.records.iter().any(|r| r.live || r.demand.is_positive());
        let contended = decide::contended(&terms, &ledger);
        let lack = decide::others_lack(&terms, &ledger, inquiry.region);
        let others_wait = decide::others_wait(&terms, &ledger, inquiry.region);
        let now = ledger.at;
        let record = ledger.record_mut(inquiry.region)?;
        let demand_on_record = record.demand;
        record.burst = inquiry.held_burst.or_zero().min(record.burst);
        record.rate = inquiry.held_rate.or_zero().min(record.rate);
        record.live = true;
        advise(record, &terms, now, inquiry.demand, inquiry.want, inquiry.quantum);
        let steady = ledger.free_rate_until(&terms, inquiry.region, now + terms.cut.lease).or_zero();
        let d = if self.members.standing(inquiry.region) == Standing::In {
            decide::decide(&terms, &ledger, inquiry.region, inquiry.level, inquiry.short)
        } else {
            Decision::default()
        };
        Some(Preview {
            rate: d.rate,
            burst: d.burst,
            tokens: d.tokens,
            lease: d.lease,
            steady,
            others_short: lack.some,
            others_starve: lack.most,
            others_wait,
            contended,
            known,
            demand_on_record,
            on_demand: d.on_demand,
        })
    }

    /// The level of a bucket's pool, were an entry stamped `tau` applied now.
    #[must_use]
    pub fn free(&self, policy: u32, bucket: BucketId, tau: Micros) -> Tokens {
        self.free_in(self.term, policy, bucket, tau)
    }

    /// The same for an entry of another term than the last one's, in which loans of idle reserve are void.
    #[must_use]
    pub fn free_in(&self, term: u64, policy: u32, bucket: BucketId, tau: Micros) -> Tokens {
        let Some(slot) = self.policies.slot(policy) else { return Tokens::ZERO };
        let terms = super::terms(&self.windows, &self.loans, term, slot, bucket);
        let Some(terms) = terms else { return Tokens::ZERO };
        self.ledger_at(slot, &terms, bucket, tau).level.tokens
    }

    /// The burst that other regions hold of a bucket's pool, or may come to hold: what they have to spare may yet come.
    #[must_use]
    pub fn lent_elsewhere(&self, bucket: BucketId, region: RegionId) -> Tokens {
        let records = self.buckets.get(&bucket).map_or(&[][..], |ledger| &*ledger.records);
        records.iter().filter(|r| r.region != region && r.live).map(|r| r.burst).sum()
    }

    /// How many buckets have books.
    #[must_use]
    pub fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// The buckets that have books, for status pages, at the pool's own Raft time.
    pub fn buckets(&self) -> impl Iterator<Item = BucketView> {
        self.buckets.iter().filter_map(|(id, _)| self.bucket(*id))
    }

    /// One of [`Self::buckets`].
    #[must_use]
    pub fn bucket(&self, bucket: BucketId) -> Option<BucketView> {
        let policy = self.buckets.get(&bucket)?.policy;
        let slot = self.policies.slot(policy)?;
        let terms = self.terms(slot, bucket)?;
        let ledger = self.ledger_at(slot, &terms, bucket, self.tau);
        let window = self.windows.booked(bucket).map(|booked| booked.turn);
        let (free_rate, free_burst) = ledger.free(&terms);
        let (level, frozen, records) = (ledger.level.tokens, ledger.frozen, ledger.records.into_vec());
        Some(BucketView { bucket, policy, window, level, free_rate, free_burst, frozen, records })
    }

    /// The books of a bucket (of one that nobody has asked about, too), were an entry stamped `tau` applied now. `None`: there
    /// is no pool.
    #[must_use]
    pub fn books(&self, policy: u32, bucket: BucketId, tau: Micros) -> Option<Books> {
        let slot = self.policies.slot(policy)?;
        let terms = self.terms(slot, bucket).filter(|terms| terms.cut.pooled)?;
        let ledger = self.ledger_at(slot, &terms, bucket, tau);
        let mut lent = vec![(Rate::ZERO, Tokens::ZERO); self.regions().len()];
        for record in &ledger.records {
            let Some(lent) = lent.get_mut(usize::from(record.region.0)) else { continue };
            let (rate, burst) = record.liable();
            *lent = (lent.0 + rate, lent.1 + burst);
        }
        let mut on_loan = vec![Rate::ZERO; self.regions().len()];
        for loan in terms.lent.kept(ledger.at) {
            if let Some(sum) = on_loan.get_mut(usize::from(loan.region.0)) {
                *sum += loan.rate;
            }
        }
        let void = on_loan.iter().copied().sum::<Rate>() - terms.lent.rate(ledger.at);
        let (free, free_burst) = ledger.free(&terms);
        let (reserved, reserved_burst) = self.policies.reserved(policy)?;
        Some(Books {
            whole: (terms.cut.rate, terms.cut.burst + terms.cut.overshoot()),
            reserved: (reserved - on_loan.iter().copied().sum(), reserved_burst),
            on_loan,
            lent,
            free: (free + void, free_burst),
            level: ledger.level.tokens,
            frozen: ledger.frozen,
        })
    }

    /// Checks the books of every bucket.
    ///
    /// # Errors
    /// The first bucket whose books do not balance.
    pub fn check(&self) -> Result<(), (BucketId, Breach)> {
        self.buckets.iter().try_for_each(|(id, ledger)| {
            let slot = self.policies.slot(ledger.policy);
            let terms = slot.and_then(|slot| self.terms(slot, *id));
            terms.map_or(Ok(()), |terms| ledger.check(&terms)).map_err(|breach| (*id, breach))
        })
    }

    /// A copy of a bucket's books at Raft time `tau`.
    pub(super) fn ledger_at(&self, slot: &Slot, terms: &Terms<'_>, bucket: BucketId, tau: Micros) -> Ledger {
        let kept = self.buckets.get(&bucket).filter(|ledger| ledger.policy == slot.id);
        let mut ledger = kept.unwrap_or(&slot.unseen).clone();
        match self.windows.booked(bucket) {
            Some(booked) => Windows::reckon(Some(&mut booked.clone()), terms, &mut ledger),
            None if terms.windowed => ledger.level.tokens = terms.burst,
            None => {}
        }
        ledger.advance(terms, tau);
        ledger
    }
}
