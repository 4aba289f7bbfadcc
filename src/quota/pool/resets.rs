//! Resets: an operator gives a bucket back what it has spent.
//!
//! One operation is the decision. The pool is full again, and every slice that is out gets its burst once more, as a push of its
//! record; each region gives its own bucket what its reserve holds, once, when it hears of it. For that it says first that it will
//! ([`TakeReset`]), and does so only after that is committed: if it ends in between, its part is lost, and nobody's comes twice.
//!
//! So a reset makes at most one burst (and overshoot) of tokens, all regions together: what the pool has free, what its
//! slices hold and what the reserves of those who are in the cluster hold add up to no more than the whole.

use super::entry::{Applied, NoReset, RegionId, ResetBucket, TakeReset};
use super::ledger::{Ledger, MAX_AGE};
use super::members::{Member, Standing};
use super::policies::Terms;
use super::{BUCKETS_MAX, Pool};
use crate::quota::amount::{Level, Micros, Tokens};
use crate::quota::policy::BucketId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The most resets that regions may still have to hear of. One more is refused.
pub const RESETS_MAX: usize = 1_000;
/// The longest text, in bytes, that says who or why.
pub const RESET_TEXT_MAX: usize = 512;

/// A bucket's newest reset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reset {
    /// Grows from reset to reset, of whatever bucket.
    pub number: u64,
    /// Of which policy.
    pub policy: u32,
    /// Raft time of the decision.
    pub at: Micros,
    /// Who decided.
    pub by: String,
    /// Why.
    pub reason: String,
    /// Regions that have not taken it yet, and what their bucket's reserve is to get.
    owed: Vec<(RegionId, Tokens)>,
    /// Those that have, under which epoch, and what.
    taken: Vec<(RegionId, u64, Tokens)>,
}

impl Reset {
    /// The regions that have not heard of it.
    pub fn owed(&self) -> impl Iterator<Item = RegionId> {
        self.owed.iter().map(|(region, _)| *region)
    }

    /// What this region's bucket is to get, if it has taken the reset under this epoch.
    #[must_use]
    pub fn taken(&self, region: RegionId, epoch: u64) -> Option<Tokens> {
        self.taken.iter().find(|(r, e, _)| (*r, *e) == (region, epoch)).map(|(.., tokens)| *tokens)
    }
}

impl Pool {
    /// The newest reset of each bucket that a region has still to hear of, or has just heard of.
    pub fn resets(&self) -> impl Iterator<Item = (BucketId, &Reset)> {
        self.resets.iter()
    }

    pub(super) fn reset_bucket(
        &mut self,
        reset: &ResetBucket,
        applied: &mut Applied,
    ) -> Result<u64, NoReset> {
        let ResetBucket { policy, bucket, by, reason } = reset;
        if by.len() > RESET_TEXT_MAX || reason.len() > RESET_TEXT_MAX {
            return Err(NoReset::TooLong);
        }
        let slot = self.policies.slot(*policy).ok_or(NoReset::NoLimit)?;
        if slot.policy().is_some_and(|policy| policy.window().is_some()) {
            // A quota is given back by raising it: that brings just the difference.
            return Err(NoReset::NoLimit);
        }
        let terms = slot.terms().ok_or(NoReset::NoLimit)?;
        if !self.resets.has_room(*bucket, self.tau, |policy| self.policies.slot(policy).is_some()) {
            return Err(NoReset::TooMany);
        }
        if terms.cut.pooled {
            if self.buckets.len() >= BUCKETS_MAX && !self.buckets.contains_key(bucket) {
                return Err(NoReset::TooMany);
            }
            let ledger = self.buckets.get_or_insert_with(*bucket, || slot.unseen.clone());
            let ledger = ledger.ok_or(NoReset::TooMany)?;
            if ledger.policy != *policy {
                return Err(NoReset::NoLimit);
            }
            ledger.advance(&terms, self.tau);
            if ledger.frozen {
                return Err(NoReset::Frozen);
            }
            let pushed = ledger.reset(&terms);
            applied.records.extend(pushed.into_iter().map(|region| (region, *bucket)));
        }
        let present = self.members.all().filter(|member| member.standing != Standing::Out);
        let part = |member: Member| (member.id, slot.usable(member.id).unwrap_or_default().cap());
        let owed = present.map(part).filter(|(_, part)| part.is_positive()).collect();
        Ok(self.resets.add(reset, owed, self.tau))
    }

    pub(super) fn take_reset(&mut self, take: &TakeReset, applied: &mut Applied) {
        let of_old = take.epoch != self.members.epoch(take.region).0;
        if of_old || self.members.standing(take.region) == Standing::Out {
            return;
        }
        self.resets.take(take);
        applied.acknowledged = true;
    }
}

/// The newest reset of each bucket, until every region has taken it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Resets {
    last: u64,
    of: BTreeMap<BucketId, Reset>,
}

impl Resets {
    pub(super) fn iter(&self) -> impl Iterator<Item = (BucketId, &Reset)> {
        self.of.iter().map(|(bucket, reset)| (*bucket, reset))
    }

    /// Is there room for one of this bucket, once what is over has gone? `lives`: is this policy still there?
    pub(super) fn has_room(&mut self, bucket: BucketId, tau: Micros, lives: impl Fn(u32) -> bool) -> bool {
        // A region reads in its own replica what it has taken: it gets some time for that.
        self.of
            .retain(|_, reset| lives(reset.policy) && (!reset.owed.is_empty() || tau - reset.at < MAX_AGE));
        self.of.len() < RESETS_MAX || self.of.contains_key(&bucket)
    }

    /// Notes a reset, in the place of the bucket's last; `owed`: what each region's reserve holds. Its number.
    pub(super) fn add(&mut self, op: &ResetBucket, owed: Vec<(RegionId, Tokens)>, tau: Micros) -> u64 {
        self.last = self.last.saturating_add(1);
        let reset = Reset {
            number: self.last,
            policy: op.policy,
            at: tau,
            by: op.by.clone(),
            reason: op.reason.clone(),
            owed,
            taken: Vec::new(),
        };
        self.of.insert(op.bucket, reset);
        self.last
    }

    /// A region takes what it is owed, once.
    pub(super) fn take(&mut self, op: &TakeReset) {
        let Some(reset) = self.of.get_mut(&op.bucket).filter(|reset| reset.number == op.number) else {
            return;
        };
        let Some(at) = reset.owed.iter().position(|(region, _)| *region == op.region) else { return };
        let (region, tokens) = reset.owed.swap_remove(at);
        reset.taken.push((region, op.epoch, tokens));
    }

    /// Nobody is owed anything any more.
    pub(super) fn clear(&mut self) {
        self.of.clear();
    }

    /// A region that is gone is owed nothing.
    pub(super) fn forget(&mut self, gone: impl Fn(RegionId) -> bool) {
        for reset in self.of.values_mut() {
            reset.owed.retain(|(region, _)| !gone(*region));
        }
    }
}

impl Ledger {
    /// The pool is full, and each slice's burst comes once more: what was granted counts up, so that it is installed once. Returns the
    /// regions whose records were written.
    pub(super) fn reset(&mut self, terms: &Terms<'_>) -> Vec<RegionId> {
        let mut pushed = Vec::new();
        if terms.permits {
            // Whoever has them gives them back.
            return pushed;
        }
        for record in self.records.iter_mut().filter(|r| r.live && r.offer_burst.is_positive()) {
            record.granted += record.offer_burst;
            record.push = record.push.saturating_add(1);
            pushed.push(record.region);
        }
        let (_, burst) = self.free(terms);
        self.level = Level::new(burst.or_zero());
        pushed
    }
}
