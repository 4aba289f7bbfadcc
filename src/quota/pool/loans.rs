//! Loans of idle reserve: a region that does not use the rate of its reserve lends some of it to the pool, for a fixed time,
//! where others are short. (Never of the burst: what is in its bucket stays there.)
//!
//! # Why it is safe
//!
//! Let d be the drift: every clock runs between 1 - d and 1 + d of true speed. The lender reads, in this order, the stamp (term T,
//! time s) that its replica applied last, `age` before; then its store stops using the rate, and goes on for [`LOAN`] of its own
//! time. In true time: s was stamped at t_s; the store stops at t_0, no earlier than t_s + age / (1 + d); and uses the rate again no
//! earlier than **t_s + X**, with X = (age + LOAN) / (1 + d).
//!
//! The pool counts the loan until Raft time u = s + (1 - 3d) (age + LOAN), and not at all in another term than T ([`Lend::until`]).
//! Of a lease (l long, granted by an entry that was stamped τ at true time t) that it backs, it demands τ + l ≤ u. The borrower is done with it
//! at t + l: its lease counts from before it asked, which was before t. Within a term the Raft clock runs no slower than (1 - d)² of true
//! speed: its own discount, and the leader's clock. So t ≤ t_s + (τ - s) / (1 - d)², and
//!
//! > t + l ≤ t_s + (τ + l - s) / (1 - d)² ≤ t_s + (u - s) / (1 - d)² ≤ t_s + X, since 1 - 3d ≤ (1 - d)² / (1 + d).
//!
//! A push at τ' in term T that a loan backs, of a record that was answered at τ at true time t in any term, keeps that record's lease: the
//! borrower is done by t + l ≤ t' + (τ + l - τ'), since the Raft clock is never fast, in whatever terms; and t' ≤ t_s + (τ' - s) / (1 - d)²
//! as above. So what counts is the record's end at the pool, no later than u.
//!
//! **Another term.** Its clock starts from what the last entry said, and what passed since is lost: how far it is behind, nobody can say, so
//! u means nothing by it. A loan is void from then on: it backs nothing new. What it has backed keeps its end, which true time sets, and
//! not the Raft clock: the borrower is done before the lender goes on. The pool counts that lease for longer, and has less than
//! nothing free meanwhile: it lends nothing until that is over.
//!
//! (A replica that came from a disk or a peer does not know by whose clock its time is: it lends nothing before it has applied an entry. And a
//! leader that starts again begins another term, [`enable_leader_restore`]: within one, its clock has run all the time.)
//!
//! **Loss of data.** The store does not know any more what is lent. Until somebody does ([`Generation::known`]) none of the reserve refills, for
//! [`LOAN`] after the new data began: whatever was lent has ended by then, by the same X. The pool knows sooner: once the region has
//! joined under a new epoch, no ask of an older one counts, so its own replica has every loan that ever will. A loan is kept until its
//! end by the pool's clock, be it void or cut down by a change of policy, for just that: see [`Pool::lender_of`].
//!
//! **Changes of policy.** A loan never counts for more than what the pool counts of the lender's reserve, and stays cut down to that: the
//! lender uses the rest, if anything is left, of what it may use, which is no more. What a bucket holds that a store has forgotten is reckoned
//! as that of a lender ([`Unseen::after_change`]) while a version is in play under which reserve is lent, and a limit that is lent no more
//! settles when the last loans are over.
//!
//! [`Generation::known`]: crate::quota::bucket::Generation::known
//! [`Unseen::after_change`]: crate::quota::bucket::Unseen::after_change
//! [`enable_leader_restore`]: openraft::Config::enable_leader_restore

use super::entry::{Applied, Lend, RegionId, Stamp};
use super::ledger::Ledger;
use super::members::Standing;
use super::policies::{Policies, Slot, Terms};
use super::windows::Windows;
use super::{Pool, decide};
use crate::bugs::{Bug, planted};
use crate::quota::amount::{DRIFT_PPM, Micros, Rate};
use crate::quota::policy::{BucketId, LOAN};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A region lends at most this much of its reserve's rate, so that it always has some.
pub const LENT_MAX_PERCENT: i64 = 90;
/// The most buckets of which something is lent.
pub const LOANS_MAX: usize = 1_000_000;
/// Others are short when they need more than this much of what the pool has of its own.
const SHORT_PERCENT: i64 = 97;

/// What a region lends of its reserve of a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// Who lends.
    pub region: RegionId,
    /// Of the reserve that it has of this policy. (One that was removed and comes back is another, with the same buckets.)
    pub policy: u32,
    /// So much of the rate ...
    pub rate: Rate,
    /// ... until this Raft time ...
    pub until: Micros,
    /// ... of this term: in another it is void.
    pub term: u64,
    /// Until this Raft time a lease may be in use that it has backed, in whatever term.
    pub kept: Micros,
}

impl Lend {
    /// What a member must be able to apply (see [`LEVEL`](super::LEVEL)) before anything is lent.
    pub const LEVEL: u32 = 4;

    /// The Raft time until which the pool may count on what a store has stopped using for [`LOAN`] from now on, if the stamp `seen`
    /// was applied at least `age` before it stopped.
    #[must_use]
    pub fn until(seen: Stamp, age: Micros) -> Micros {
        seen.tau + (age.or_zero() + LOAN).discount(DRIFT_PPM.saturating_mul(3))
    }
}

/// All loans.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Loans {
    of: BTreeMap<BucketId, Vec<Loan>>,
    /// Where the search for loans to forget goes on.
    swept: Option<BucketId>,
}

/// What is lent to the pool of one bucket, as an entry of this term sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lent<'a> {
    loans: &'a [Loan],
    policy: u32,
    term: u64,
}

impl Loans {
    pub(super) fn of(&self, bucket: BucketId, policy: u32, term: u64) -> Lent<'_> {
        Lent { loans: self.of.get(&bucket).map_or(&[], Vec::as_slice), policy, term }
    }

    /// Notes a loan, in the place of the same region's last.
    fn put(&mut self, bucket: BucketId, loan: Loan) {
        if self.of.len() >= LOANS_MAX && !self.of.contains_key(&bucket) {
            return;
        }
        let loans = self.of.entry(bucket).or_default();
        match loans.iter_mut().find(|known| known.region == loan.region) {
            Some(known) => {
                let kept = loan.kept.max(known.kept);
                let same = (known.term, known.policy) == (loan.term, loan.policy);
                let until = if same { loan.until.max(known.until) } else { loan.until };
                *known = Loan { until, kept, ..loan };
            }
            None => loans.push(loan),
        }
    }

    /// Looks at some, and forgets those that have ended.
    pub(super) fn sweep(&mut self, many: usize, tau: Micros) {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = self.swept.map_or(Unbounded, Excluded);
        let mut over = Vec::new();
        let mut last = None;
        for (bucket, loans) in self.of.range_mut((from, Unbounded)).take(many) {
            last = Some(*bucket);
            loans.retain(|loan| loan.kept > tau);
            if loans.is_empty() {
                over.push(*bucket);
            }
        }
        self.swept = last;
        for bucket in over {
            self.of.remove(&bucket);
        }
    }

    /// No loan counts for more than its lender's reserve.
    pub(super) fn cut_down(&mut self, policies: &Policies) {
        for loan in self.of.values_mut().flatten() {
            loan.rate = loan.rate.min(policies.reserved_of(loan.policy, loan.region));
        }
    }
}

impl<'a> Lent<'a> {
    /// Those that count after Raft time `at`.
    pub(super) fn after(self, at: Micros) -> impl Iterator<Item = &'a Loan> {
        let counts =
            move |loan: &&Loan| loan.until > at && (loan.term == self.term || planted(Bug::LoanOutlivesTerm));
        self.kept(at).filter(counts)
    }

    /// What is lent after Raft time `at`.
    pub(super) fn rate(self, at: Micros) -> Rate {
        self.after(at).map(|loan| loan.rate).sum()
    }

    /// What may still back leases, be it void or not.
    pub(super) fn kept(self, at: Micros) -> impl Iterator<Item = &'a Loan> {
        self.loans.iter().filter(move |loan| loan.policy == self.policy && loan.kept > at)
    }

    /// What this region lends.
    pub(super) fn by(self, region: RegionId, at: Micros) -> Option<Loan> {
        self.after(at).find(|loan| loan.region == region).copied()
    }
}

impl Ledger {
    /// The rate that could be lent to `me` (besides what it holds) until Raft time `end`: what is lent to the pool backs a lease only if it
    /// lasts as long.
    pub(super) fn free_rate_until(&self, terms: &Terms<'_>, me: RegionId, end: Micros) -> Rate {
        let end = if planted(Bug::LoanBacksLongerLease) { self.at } else { end };
        let ends = terms.lent.after(self.at).map(|loan| loan.until).filter(|until| *until < end);
        let free = |at: Micros| terms.rate + terms.lent.rate(at) - self.lent_after(at, Some(me));
        ends.map(free).fold(free(self.at), Rate::min)
    }

    /// The least rate that is free now, or will be when loans to the pool end.
    pub(super) fn least_free_rate(&self, terms: &Terms<'_>) -> Rate {
        let free = |at: Micros| terms.rate + terms.lent.rate(at) - self.lent_after(at, None);
        terms.lent.after(self.at).map(|loan| free(loan.until)).fold(free(self.at), Rate::min)
    }

    /// The rate of all that may be in use after Raft time `at` (not before [`Self::at`]), but for one region's slice.
    fn lent_after(&self, at: Micros, but: Option<RegionId>) -> Rate {
        let one = |record: &super::Record| {
            let slice = record.live && record.expires > at && Some(record.region) != but;
            let ghost = record.ghost.as_deref().filter(|ghost| ghost.until > at);
            let slice = if slice { record.rate } else { Rate::ZERO };
            slice + ghost.map_or(Rate::ZERO, |ghost| ghost.rate)
        };
        self.records.iter().map(one).sum()
    }
}

/// The terms of a bucket for an entry of this term: its part of a quota's window, or what is lent to it of idle reserve.
pub(super) fn terms<'a>(
    windows: &Windows,
    loans: &'a Loans,
    term: u64,
    slot: &'a Slot,
    bucket: BucketId,
) -> Option<Terms<'a>> {
    let terms = windows.terms(slot, bucket)?;
    let none = terms.windowed || terms.permits;
    let lent = if none { Lent::default() } else { loans.of(bucket, slot.id, term) };
    Some(Terms { lent, ..terms })
}

impl Pool {
    pub(super) fn lend(&mut self, lend: &Lend, applied: &mut Applied) {
        let Lend { ask, rate, seen_term, until } = lend;
        let sound = *seen_term == self.term || planted(Bug::LoanOutlivesTerm);
        let standing = self.members.standing(ask.region);
        let known = self.buckets.contains_key(&ask.bucket);
        let newer = self.record(ask.bucket, ask.region).is_none_or(|record| {
            record.epoch != ask.epoch && ask.epoch == self.members.epoch(ask.region).0 || ask.seq > record.seq
        });
        let counts = self.counts(ask, None) && newer;
        let until = (*until).min(self.tau + LOAN);
        if counts && sound && known && standing == Standing::In && until > self.tau {
            let most = self.policies.reserved_of(ask.policy, ask.region);
            let (policy, term) = (ask.policy, self.term);
            let rate = rate.or_zero().min(most);
            let loan = Loan { region: ask.region, policy, rate, until, term, kept: until };
            // What the ledger has come to by now counts as before.
            self.advance_one(ask.bucket);
            self.loans.put(ask.bucket, loan);
        }
        self.ask(ask, None, applied);
    }

    /// The terms of a bucket at this moment.
    pub(super) fn terms<'a>(&'a self, slot: &'a Slot, bucket: BucketId) -> Option<Terms<'a>> {
        terms(&self.windows, &self.loans, self.term, slot, bucket)
    }

    /// Brings a bucket to the pool's Raft time, under the terms in force.
    fn advance_one(&mut self, bucket: BucketId) {
        let Some(ledger) = self.buckets.get_mut(&bucket) else { return };
        let Some(slot) = self.policies.slot(ledger.policy) else { return };
        let terms = terms(&self.windows, &self.loans, self.term, slot, bucket);
        if let Some(terms) = terms.filter(|terms| !terms.windowed) {
            ledger.advance(&terms, self.tau);
        }
    }

    /// May something of a policy's reserves be lent (or was, not long ago)?
    #[must_use]
    pub fn may_lend(&self, policy: u32) -> bool {
        self.policies.slot(policy).is_some_and(Slot::may_lend)
    }

    /// What this region lends of a bucket, as far as the pool counts on it at Raft time `tau`.
    #[must_use]
    pub fn loan(&self, bucket: BucketId, region: RegionId, tau: Micros) -> Option<Loan> {
        let policy = self.policy_of(bucket)?;
        self.loans.of(bucket, policy, self.term).by(region, tau)
    }

    /// The buckets of whose reserve this region has lent something that may not be over, and their policies.
    pub fn lender_of(&self, region: RegionId) -> impl Iterator<Item = (BucketId, u32)> {
        let all = self.loans.of.iter().flat_map(|(bucket, loans)| loans.iter().map(move |l| (*bucket, l)));
        let lent = all.filter(move |(_, loan)| loan.region == region && loan.kept > self.tau);
        lent.map(|(bucket, loan)| (bucket, loan.policy))
    }

    /// The policy of a bucket that has books.
    #[must_use]
    pub fn policy_of(&self, bucket: BucketId) -> Option<u32> {
        self.buckets.get(&bucket).map(|ledger| ledger.policy)
    }

    /// Are other regions than this one short of what the pool has by itself at Raft time `tau`, so that a loan would be of use? What
    /// they have not said for a lease does not count.
    #[must_use]
    pub fn wants_loan(&self, policy: u32, bucket: BucketId, region: RegionId, tau: Micros) -> bool {
        let Some(ledger) = self.buckets.get(&bucket).filter(|ledger| ledger.policy == policy) else {
            return false;
        };
        let Some(slot) = self.policies.slot(policy) else { return false };
        let terms =
            self.terms(slot, bucket).filter(|terms| terms.cut.pooled && !terms.windowed && !terms.permits);
        terms.is_some_and(|terms| {
            let needed = decide::needed_by_others(&terms, ledger, region, tau);
            !ledger.frozen && needed > terms.rate.percent(SHORT_PERCENT)
        })
    }
}
