//! The replicated state machine: for each bucket, one pool, cut out of the policy's rate and burst, and lent to regions in
//! slices. Learnt from escrow accounts (O'Neil, 1986), bounded counters (Balegas et al., 2015) and leases (Gray and
//! Cheriton, 1989).
//!
//! [`Pool::apply`] is the only door to the state, and every replica goes through it with the same entries; a region reads
//! what it was granted in its own replica. Nothing in an entry can make it panic, or lend more than there is.

mod clock;
mod decide;
pub mod entry;
mod former;
mod ledger;
mod loans;
mod members;
mod permits;
mod policies;
mod resets;
mod restore;
mod shards;
mod view;
mod walk;
mod wall;
mod windows;

#[cfg(test)]
mod tests;

pub use clock::RaftClock;
pub use decide::SLOW;
pub use entry::{
    Ack, AddRegion, Applied, Ask, AskInWindow, Entry, FoundWith, Join, LEVEL, Lend, NoReset, Op,
    PolicyOutcome, RegionId, RemoveRegion, ResetBucket, SetPolicies, Stamp, TakeReset, TimeOfDay,
};
pub use former::{PoolV1, PoolV2, PoolV3, PoolV4, PoolV5};
pub use ledger::{Breach, Ghost, MAX_AGE, Record};
pub use loans::{LENT_MAX_PERCENT, LOANS_MAX, Loan};
pub use members::{Member, NAMES_MAX, NODE_IDS, REGIONS_MAX, Standing};
pub use permits::PermitsView;
pub use policies::{POLICIES_MAX, VERSIONS_MAX};
pub use resets::{RESET_TEXT_MAX, RESETS_MAX, Reset};
pub use restore::Spent;
pub use view::{Books, BucketView, Inquiry, Preview};
pub use wall::Reading;

use self::decide::Decision;
use self::ledger::Ledger;
use self::loans::{Loans, terms};
use self::members::Members;
use self::policies::{Policies, Slot, Terms};
use self::resets::Resets;
use self::shards::Shards;
use self::windows::Windows;
use super::amount::{MICROS_PER_TOKEN, Micros, Rate, Tokens};
use super::bucket::Unseen;
use super::calendar::Turn;
use super::policy::{BucketId, Cut, Part, Policy, RegionName, Window};
use crate::bugs::{Bug, planted};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Operations of one entry beyond this many are ignored: whoever proposed them asks again.
pub const OPS_MAX: usize = 16_384;
/// Buckets that have books. Asks for one more are refused: regions go on with their reserves there.
pub const BUCKETS_MAX: usize = 4_000_000;
/// Buckets looked at for eviction by an entry, besides one for each of its operations.
const EVICT_STEP: usize = 16;

/// The pool of a cluster. Snapshots hold it as it is: change its layout, or that of anything in it, and they need a new
/// format (see [`PoolV1`] to [`PoolV5`]).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    members: Members,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: Shards,
    /// Where the search for buckets to forget goes on.
    evict_after: Option<BucketId>,
    resets: Resets,
    windows: Windows,
    /// See [`Pool::level`]; 0: it has never been raised.
    level: u32,
    loans: Loans,
}

/// A policy in force.
#[derive(Clone, Copy, Debug)]
pub struct PolicyView<'a> {
    /// What asks call it. No other policy of this cluster ever has the same.
    pub id: u32,
    /// The policy.
    pub policy: &'a Arc<Policy>,
    /// How it is cut up; `None`: unlimited.
    pub cut: Option<&'a Cut>,
}

impl Pool {
    /// Applies one committed log entry, of Raft term `term`; the only door to the state.
    pub fn apply(&mut self, term: u64, entry: &Entry) -> Applied {
        let mut applied = Applied::default();
        self.term = term;
        let stale = entry.stamp.term != term;
        if stale && !planted(Bug::StaleStampAccepted) && !planted(Bug::StaleStampOpsApplied) {
            // Stamped by an earlier leadership of the same node: the stamp may run ahead of this term's clock, and without
            // a stamp a lease has no start. Refuse; the region asks again.
            applied.refused = true;
            return applied;
        }
        if !(stale && planted(Bug::StaleStampOpsApplied)) {
            self.tau = self.tau.max(entry.stamp.tau);
        }
        self.settle(&mut applied);
        for op in entry.ops.iter().take(OPS_MAX) {
            self.apply_op(op, &mut applied);
        }
        self.windows.walls.advance(&self.members, self.tau);
        let step = EVICT_STEP.saturating_add(entry.ops.len().min(OPS_MAX));
        self.evict(step);
        self.loans.sweep(step, self.tau);
        applied
    }

    /// The Raft clock: the newest stamp that counted.
    #[must_use]
    pub fn tau(&self) -> Micros {
        self.tau
    }

    /// The term of the last entry.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term
    }

    /// The level of operations that all members apply, as the log says: there may be such in it, and a member that does not apply
    /// them has no place in the cluster any more. See [`LEVEL`].
    #[must_use]
    pub fn level(&self) -> u32 {
        self.level.max(1)
    }

    /// The names of the regions that are or ever were in the cluster; [`RegionId`] indexes into it.
    #[must_use]
    pub fn regions(&self) -> &[RegionName] {
        self.members.names()
    }

    /// The id of a region that is or was in the cluster.
    #[must_use]
    pub fn region(&self, name: &str) -> Option<RegionId> {
        self.members.find(name)
    }

    /// The id of a region, as far as it is this node's to speak for it: not before the cluster has it under this Raft node
    /// id, nor once it has left or come back under another. While a replica catches up it passes through the past, in which the
    /// region's former life had a part: that is not this life's to use.
    #[must_use]
    pub fn seat(&self, name: &str, node: u64) -> Option<RegionId> {
        let member = self.member(self.region(name)?)?;
        (member.node == node && member.standing != Standing::Out).then_some(member.id)
    }

    /// One of [`Self::members`].
    #[must_use]
    pub fn member(&self, region: RegionId) -> Option<Member> {
        self.members.get(region)
    }

    /// The regions that are in the cluster, are leaving it, or have left.
    pub fn members(&self) -> impl Iterator<Item = Member> {
        self.members.all()
    }

    /// A region's epoch, and the nonce of the [`Join`] that began it (0: none did); (0, 0) before its first.
    #[must_use]
    pub fn epoch(&self, region: RegionId) -> (u64, u64) {
        self.members.epoch(region)
    }

    /// What a region was granted for a bucket.
    #[must_use]
    pub fn record(&self, bucket: BucketId, region: RegionId) -> Option<&Record> {
        self.buckets.get(&bucket)?.records.iter().find(|r| r.region == region)
    }

    /// The version of the policies; 0 before the cluster was founded.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.policies.version()
    }

    /// The policies in force, in the order in which their author wrote them.
    pub fn policies(&self) -> impl Iterator<Item = PolicyView<'_>> {
        self.policies.iter().map(|(id, policy, cut)| PolicyView { id, policy, cut })
    }

    /// How the limit of a policy in force is cut up; `None`: it is unlimited, or there is no such policy.
    #[must_use]
    pub fn cut(&self, policy: u32) -> Option<&Cut> {
        self.policies.slot(policy)?.terms().map(|terms| terms.cut)
    }

    /// What a region may use of a policy's reserve at this moment: its part, or less while a change is under way. `None`:
    /// the policy is unlimited, or there is no such policy or region.
    #[must_use]
    pub fn usable(&self, policy: u32, region: RegionId) -> Option<Part> {
        self.policies.slot(policy)?.usable(region)
    }

    /// What a bucket that the region's store does not hold is (overdraft included), in Raft time; `None`: it is full. Not full
    /// for some time after a policy changed the reserve: nobody gains tokens by that (see [`Unseen::after_change`]).
    #[must_use]
    pub fn unseen(&self, policy: u32, region: RegionId) -> Option<Unseen> {
        self.policies.slot(policy)?.unseen_part(region, self.tau)
    }

    /// The windows of a policy's quota; `None`: it has none.
    #[must_use]
    pub fn window(&self, policy: u32) -> Option<Window> {
        self.policies.slot(policy)?.policy()?.window()
    }

    /// What a region may use of its reserve in windows that began before a time of day, instead of [`Self::usable`]; `None`: no
    /// change is so recent that it makes a difference.
    #[must_use]
    pub fn held_back(&self, policy: u32, region: RegionId) -> Option<(Micros, Part)> {
        self.windows.held(policy, region)
    }

    /// The time of day at Raft time `tau`: microseconds since 1970-01-01T00:00:00Z. `None`: no majority of the regions has said
    /// what time it is.
    #[must_use]
    pub fn wall(&self, tau: Micros) -> Option<Micros> {
        self.windows.walls.at(&self.members, tau.max(self.tau))
    }

    /// What [`Self::wall`] would be if it had never stood still (for clocks that were set back). `None` as there.
    #[must_use]
    pub fn wall_run(&self, tau: Micros) -> Option<Micros> {
        self.windows.walls.run_at(&self.members, tau.max(self.tau))
    }

    /// What a region has said last about the time of day.
    #[must_use]
    pub fn reading(&self, region: RegionId) -> Option<Reading> {
        self.windows.walls.reading(region)
    }

    /// Will this region have a part of a limit once changes that are under way have settled, and has it none yet?
    #[must_use]
    pub fn usable_later(&self, region: RegionId) -> bool {
        let none = |part: Option<&Part>| part.is_none_or(|part| *part == Part::default());
        let later = |view: PolicyView<'_>| {
            let part = view.cut.and_then(|cut| cut.parts.get(usize::from(region.0)));
            !none(part) && none(self.usable(view.id, region).as_ref())
        };
        !self.settled() && self.policies().any(later)
    }

    /// Regions that have not acknowledged this version of the policies.
    pub fn unacked(&self, version: u64) -> impl Iterator<Item = RegionId> {
        self.policies.unacked(version)
    }

    /// Is only one version of the policies in play? If not, somebody must propose entries (empty ones will do) for Raft
    /// time to go on, until it is.
    #[must_use]
    pub fn settled(&self) -> bool {
        self.policies.is_settled()
    }

    /// The Raft time from which the oldest change of policies can settle, given all acknowledgements.
    #[must_use]
    pub fn settles_at(&self) -> Option<Micros> {
        self.policies.clear_at()
    }

    fn apply_op(&mut self, op: &Op, applied: &mut Applied) {
        match op {
            Op::Found { regions, policies } => {
                applied.policies = self.found(regions, &[], policies).or(applied.policies);
                self.raise_to(op);
            }
            Op::FoundWith(FoundWith { members, witnesses, policies }) => {
                applied.policies = self.found(members, witnesses, policies).or(applied.policies);
                self.raise_to(op);
            }
            Op::Level(level) => self.level = self.level.max(*level),
            Op::AddWitness(add) => applied.policies = Some(self.add_witness(add)),
            Op::Ask(ask) => self.ask(ask, None, applied),
            Op::AskInWindow(AskInWindow { start, ask }) => self.ask(ask, Some(*start), applied),
            Op::TimeOfDay(told) => self.time_of_day(told),
            Op::Lend(lend) => {
                self.raise_to(op);
                self.lend(lend, applied);
            }
            Op::Join(join) => self.join(join, applied),
            Op::SetPolicies(set) => applied.policies = Some(self.set_policies(set, applied)),
            Op::Ack(ack) => self.ack(ack, applied),
            Op::AddRegion(add) => applied.policies = Some(self.add_region(add, applied)),
            Op::RemoveRegion(remove) => applied.policies = Some(self.remove_region(remove, applied)),
            Op::ResetBucket(reset) => {
                let outcome = self.reset_bucket(reset, applied);
                applied.policies = Some(outcome.map_or_else(PolicyOutcome::NotReset, PolicyOutcome::Reset));
            }
            Op::TakeReset(take) => self.take_reset(take, applied),
        }
    }

    fn raise_to(&mut self, op: &Op) {
        let level = op.level();
        if level > 1 {
            self.level = self.level.max(level);
        }
    }

    fn found(
        &mut self,
        regions: &[RegionName],
        witnesses: &[RegionName],
        policies: &[Policy],
    ) -> Option<PolicyOutcome> {
        if !self.regions().is_empty() {
            return None;
        }
        let mut names = regions.to_vec();
        names.sort_unstable();
        names.dedup();
        if regions.is_empty() || regions.len() > REGIONS_MAX || names.len() != regions.len() {
            return Some(PolicyOutcome::Refused);
        }
        let members = Members::found(regions.to_vec(), witnesses);
        if members.serving() == 0 {
            return Some(PolicyOutcome::Refused);
        }
        let Some(policies) = Policies::found(&members, policies, self.tau) else {
            return Some(PolicyOutcome::Refused);
        };
        (self.policies, self.members) = (policies, members);
        Some(PolicyOutcome::Set(self.policies.version()))
    }

    fn join(&mut self, join: &Join, applied: &mut Applied) {
        if self.members.join(join.region, join.previous, join.nonce) {
            applied.joined.push(join.region);
        }
    }

    fn set_policies(&mut self, set: &SetPolicies, applied: &mut Applied) -> PolicyOutcome {
        let version = self.policies.version();
        if set.expected.is_some_and(|expected| expected != version) {
            return PolicyOutcome::Conflict(version);
        }
        if self.regions().is_empty() || !self.policies.accepts(&set.policies) {
            return PolicyOutcome::Refused;
        }
        self.advance(|_| true);
        let before = Windows::before(&self.policies);
        let version = self.policies.set(&self.members, &set.policies, self.tau);
        self.windows.hold(before, &self.policies);
        self.advance(|_| true); // clips the levels to the new caps
        self.settle(applied);
        PolicyOutcome::Set(version)
    }

    fn add_region(&mut self, add: &AddRegion, applied: &mut Applied) -> PolicyOutcome {
        let before = self.region(&add.name).and_then(|region| self.member(region));
        let welcome = match &before {
            Some(member) if member.standing == Standing::In && member.witness => {
                return PolicyOutcome::Refused;
            }
            Some(member) if member.standing == Standing::In => {
                return PolicyOutcome::Set(self.policies.version());
            }
            // One that is leaving may still use its part, unless it is presumed dead.
            Some(member) => member.node == add.previous && !self.policies.is_awaited(member.id),
            None => add.previous == 0 && !self.regions().is_empty(),
        };
        if !welcome || !self.members.has_room(&add.name) || !self.policies.has_room() {
            return PolicyOutcome::Refused;
        }
        self.advance(|_| true);
        let before = Windows::before(&self.policies);
        let Some(region) = self.members.add(&add.name, false) else {
            return PolicyOutcome::Refused;
        };
        let version = self.policies.share_anew(&self.members, self.tau);
        self.policies.welcome(region);
        self.windows.hold(before, &self.policies);
        self.advance(|_| true);
        self.settle(applied);
        PolicyOutcome::Set(version)
    }

    fn add_witness(&mut self, add: &AddRegion) -> PolicyOutcome {
        let before = self.region(&add.name).and_then(|region| self.member(region));
        let done = PolicyOutcome::Set(self.policies.version());
        let welcome = match &before {
            Some(member) if member.standing == Standing::In && member.witness => return done,
            // As a region it must leave first, and be through with it.
            Some(member) => member.node == add.previous && member.standing == Standing::Out,
            None => add.previous == 0 && !self.regions().is_empty(),
        };
        if !welcome || !self.members.has_room(&add.name) {
            return PolicyOutcome::Refused;
        }
        let Some(region) = self.members.add(&add.name, true) else { return PolicyOutcome::Refused };
        self.policies.seat_witness(region);
        done
    }

    fn remove_region(&mut self, remove: &RemoveRegion, applied: &mut Applied) -> PolicyOutcome {
        let Some(member) = self.member(remove.region) else { return PolicyOutcome::Refused };
        let done = PolicyOutcome::Set(self.policies.version());
        if member.node != remove.node || member.standing == Standing::Out {
            return done;
        }
        if member.witness {
            // It has no part that others could get.
            self.members.dismiss(member.id);
            applied.joined.push(member.id);
            return done;
        }
        if member.standing == Standing::In {
            // A region that is presumed dead may be the one that all those versions wait for.
            if self.members.serving() < 2 || !remove.presume_dead && !self.policies.has_room() {
                return PolicyOutcome::Refused;
            }
            self.advance(|_| true);
            let next = self.policies.version().saturating_add(1);
            let before = Windows::before(&self.policies);
            self.members.leave(member.id, next);
            self.policies.share_anew(&self.members, self.tau);
            self.windows.hold(before, &self.policies);
            self.ledgers_forget_demand(member.id);
        }
        if remove.presume_dead && self.policies.is_awaited(member.id) {
            self.advance(|_| true);
            self.members.retire(member.id);
            self.policies.retire(member.id, self.tau);
            self.windows.hold_back(&self.policies, None);
            applied.joined.push(member.id);
        }
        self.advance(|_| true);
        self.settle(applied);
        PolicyOutcome::Set(self.policies.version())
    }

    /// A region that leaves is given nothing any more.
    fn ledgers_forget_demand(&mut self, region: RegionId) {
        let records = self.buckets.of_mut(&|_| true).flat_map(|(_, ledger)| ledger.records.iter_mut());
        for record in records.filter(|record| record.region == region) {
            (record.demand, record.want) = Default::default();
        }
    }

    fn ack(&mut self, ack: &Ack, applied: &mut Applied) {
        if !self.policies.awaits(ack.region, ack.version) {
            return;
        }
        let in_motion = self.policies.in_motion();
        self.advance(&in_motion);
        self.policies.ack(ack.region, ack.version, self.tau);
        self.windows.hold_back(&self.policies, None);
        self.advance(&in_motion);
        self.settle(applied);
        applied.acknowledged = true;
    }

    /// Versions settle; and regions whose leaving has settled are out, so that nothing waits for them any more.
    fn settle(&mut self, applied: &mut Applied) {
        loop {
            let gone = self.policies.settle(self.tau).ids;
            if !gone.is_empty() {
                self.buckets.forget(|policy| gone.binary_search(&policy).is_ok());
                self.windows.retain(|bucket| self.buckets.contains_key(bucket));
            }
            // What a majority says now, not what one has said some time: it may have been that of another cluster.
            let wall = match self.level() {
                1 => Some(self.wall(self.tau).unwrap_or_default()),
                _ => self.windows.walls.agreed(&self.members, self.tau).and_then(|_| self.wall(self.tau)),
            };
            self.windows.hold_back(&self.policies, wall);
            let out = self.members.complete(self.policies.settled());
            if out.is_empty() {
                return;
            }
            self.resets.forget(|region| out.contains(&region));
            for region in out {
                if self.policies.is_awaited(region) {
                    self.members.retire(region);
                    // Its parts are nothing in every version that is left: no bucket notices.
                    self.policies.retire(region, self.tau);
                    applied.joined.push(region);
                }
            }
        }
    }

    fn time_of_day(&mut self, told: &TimeOfDay) {
        if self.members.standing(told.region) != Standing::In {
            return;
        }
        self.windows.walls.read(told.region, told.wall, self.tau);
        self.windows.walls.advance(&self.members, self.tau);
        if let Some(wall) = self.wall(self.tau) {
            self.windows.let_go(&self.policies, wall);
        }
    }

    /// The window that an ask is about, if its policy has windows and this one is open. `Err`: the ask is refused.
    fn open_window(&self, slot: &Slot, start: Option<Micros>) -> Result<Option<Turn>, ()> {
        match (slot.policy().and_then(|policy| policy.window()), start) {
            (None, None) => Ok(None),
            (Some(window), Some(start)) => {
                let turn = window.turn_from(start).ok_or(())?;
                let wall = self.wall(self.tau).ok_or(())?;
                if Windows::is_open(turn, wall) { Ok(Some(turn)) } else { Err(()) }
            }
            _ => Err(()),
        }
    }

    fn ask(&mut self, ask: &Ask, window: Option<Micros>, applied: &mut Applied) {
        if !self.counts(ask, window) {
            return;
        }
        let standing = self.members.standing(ask.region);
        let Some(slot) = self.policies.slot(ask.policy) else { return };
        let Some(terms) = slot.terms() else { return };
        let Ok(turn) = self.open_window(slot, window) else { return };
        let terms = match turn {
            Some(turn) => self.windows.terms_in(slot.id, turn, terms),
            None => Terms { lent: self.loans.of(ask.bucket, slot.id, self.term), ..terms },
        };
        if self.buckets.len() >= BUCKETS_MAX && !self.buckets.contains_key(&ask.bucket) {
            return;
        }
        let windows = &mut self.windows;
        let ledger = self.buckets.get_or_insert_with(ask.bucket, || match turn {
            Some(turn) => windows.open(ask.bucket, turn, &terms, slot.unseen.clone()),
            None => slot.unseen.clone(),
        });
        let Some(ledger) = ledger else { return };
        let booked = windows.booked_mut(&ask.bucket);
        if ledger.policy != ask.policy || booked.as_ref().map(|booked| booked.turn) != turn {
            return;
        }
        Windows::reckon(booked, &terms, ledger);
        ledger.advance(&terms, self.tau);
        let Some(written) = answer(&terms, ledger, ask, standing) else { return };
        applied.records.extend(written.regions.into_iter().map(|region| (region, ask.bucket)));
        if written.balance.and_then(|()| ledger.check(&terms)).is_err() {
            ledger.frozen = true;
            applied.breached.push(ask.bucket);
        }
    }

    /// Does this ask say anything that may count, newer than its record or not?
    fn counts(&self, ask: &Ask, window: Option<Micros>) -> bool {
        let sent = ask.seen.tau + ask.age.or_zero();
        let of_old = ask.epoch != self.members.epoch(ask.region).0 && !planted(Bug::NoEpoch);
        let too_late = self.tau - sent > MAX_AGE;
        if self.members.standing(ask.region) == Standing::Out || of_old || too_late {
            return false;
        }
        let slot = self.policies.slot(ask.policy);
        let slot = slot.filter(|slot| slot.terms().is_some_and(|terms| terms.cut.pooled));
        slot.is_some_and(|slot| self.open_window(slot, window).is_ok())
    }

    /// Brings the buckets of these policies to the pool's Raft time, under the terms in force.
    fn advance(&mut self, of: impl Fn(u32) -> bool) {
        let of = &of;
        self.loans.cut_down(&self.policies);
        for (id, ledger) in self.buckets.of_mut(of) {
            let slot = self.policies.slot(ledger.policy);
            let terms = slot.and_then(|slot| terms(&self.windows, &self.loans, self.term, slot, *id));
            if let Some(terms) = terms {
                Windows::reckon(self.windows.booked_mut(id), &terms, ledger);
                ledger.advance(&terms, self.tau);
            }
        }
    }

    /// Looks at the next `many` buckets, and forgets those that are no worse off than a bucket never seen, and those whose window is
    /// over.
    fn evict(&mut self, many: usize) {
        let wall = self.wall(self.tau).unwrap_or_default();
        let mut idle = Vec::new();
        let mut last = None;
        for (id, ledger) in self.buckets.after_mut(self.evict_after).take(many) {
            last = Some(*id);
            let Some(slot) = self.policies.slot(ledger.policy) else { continue };
            let terms = terms(&self.windows, &self.loans, self.term, slot, *id);
            let Some(terms) = terms else { continue };
            Windows::reckon(self.windows.booked_mut(id), &terms, ledger);
            ledger.advance(&terms, self.tau);
            if let Some(booked) = self.windows.booked(*id) {
                let ended = booked.turn.end <= wall;
                let over = ended || ledger.level.tokens >= terms.burst;
                let at_once = ended && planted(Bug::EndedWindowAccepted);
                if at_once || ledger.records.is_empty() && over && !ledger.frozen {
                    idle.push(*id);
                }
                continue;
            }
            let mut unseen = slot.unseen.clone();
            unseen.advance(&Terms { lent: loans::Lent::default(), ..terms }, self.tau);
            let full = (ledger.level.tokens, ledger.level.rem) >= (unseen.level.tokens, unseen.level.rem);
            if ledger.records.is_empty() && full && !ledger.frozen {
                idle.push(*id);
            }
        }
        self.evict_after = last;
        for id in idle {
            self.buckets.remove(&id);
            self.windows.forget(&id);
        }
    }
}

/// What an ask wrote.
struct Written {
    regions: Vec<RegionId>,
    /// Did no more come out than went in?
    balance: Result<(), Breach>,
}

/// Answers an ask: takes back what it gives up, decides, writes the record, and offers what became free to others. A region
/// that leaves gets nothing, and needs nothing.
fn answer(terms: &Terms<'_>, ledger: &mut Ledger, ask: &Ask, standing: Standing) -> Option<Written> {
    let now = ledger.at;
    let before = ledger.level.tokens;
    let given_up = ledger.give_up(terms, ask)?;
    let (free_before, least_before) = (ledger.free(terms), ledger.least_free_rate(terms));
    let record = ledger.record_mut(ask.region)?;
    (record.epoch, record.seq, record.push, record.live) = (ask.epoch, ask.seq, 0, true);
    record.granted = Tokens::ZERO;
    let stays = standing == Standing::In;
    let (demand, want) = if stays { (ask.demand, ask.want) } else { Default::default() };
    advise(record, terms, now, demand, want, ask.quantum);
    let granted_before: Tokens = ledger.records.iter().map(|r| r.granted).sum();
    let decision = match stays {
        true => decide::decide(terms, ledger, ask.region, ask.level, ask.short),
        false => Decision::default(),
    };
    write(ledger.record_mut(ask.region)?, now, given_up.expires, &decision);
    ledger.level.tokens -= decision.tokens;
    ledger.clip(terms);
    let mut regions = vec![ask.region];
    regions.extend(decide::distribute(terms, ledger, ask.region));
    let granted = ledger.records.iter().map(|r| r.granted).sum::<Tokens>() - granted_before;
    let (rate, burst) = ledger.free(terms);
    // A lease that a loan backs ends before the loan does.
    let least = ledger.least_free_rate(terms);
    let balance = if !terms.permits && ledger.level.tokens + granted > before + given_up.back {
        Err(Breach::Tokens)
    } else if rate < free_before.0.min(Rate::ZERO)
        || burst < free_before.1.min(Tokens::ZERO)
        || least < least_before.min(Rate::ZERO)
    {
        Err(Breach::Overlent)
    } else {
        Ok(())
    };
    Some(Written { regions, balance })
}

/// What a region says about itself, within reason.
fn advise(record: &mut Record, terms: &Terms<'_>, now: Micros, demand: Rate, want: Tokens, quantum: Tokens) {
    let one = Tokens(MICROS_PER_TOKEN);
    record.asked = now;
    record.demand = demand.or_zero();
    record.want = want.or_zero();
    record.quantum = quantum.clamp(one, terms.cut.burst.max(one));
}

/// The liability keeps the larger of held and offered until the region's next ask says that it has shrunk. Tokens on their
/// way count on top of what is held: while they travel the region can refill to its old cap and spend it. And until it
/// reads this record, the region may hold on to its older, perhaps longer lease.
fn write(record: &mut Record, now: Micros, older: Micros, decision: &Decision) {
    record.offer_burst = decision.burst;
    record.offer_rate = decision.rate;
    record.granted = decision.tokens;
    record.burst = (record.burst + decision.tokens).max(decision.burst);
    record.rate = record.rate.max(decision.rate);
    if planted(Bug::TransitNotCounted) {
        record.burst = (record.burst - decision.tokens).max(decision.burst);
    }
    if planted(Bug::ShrinkAtOnce) {
        (record.burst, record.rate) = (decision.burst, decision.rate);
    }
    record.lease = decision.lease;
    record.expires = (now + decision.lease).max(older);
    if planted(Bug::ShorterLeaseAtOnce) {
        record.expires = now + decision.lease;
    }
}
