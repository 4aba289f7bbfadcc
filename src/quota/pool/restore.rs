//! A pool goes on in a new cluster, from a copy that may be older than what the old one had decided last.
//!
//! What the copy does not know: leases, spending, resets, and changes of policies or of regions that came after it. What is promised
//! to it: no daemon of the old cluster admits anything any more. So
//!
//! - **token buckets** begin empty, the pool's and the reserves: what was spent before is covered by the refill from then on;
//! - nobody uses a reserve until every region has said that it goes by the new version of the policies and one longest lease has
//!   passed (as after a change that takes everything from everyone and gives it back: that is how it is done);
//! - of **windows** that have begun nothing is left, neither in the pool nor in reserves. They are those that have begun by the
//!   time of day of a majority of the *new* members: what the old ones said does not count;
//! - **loans** of idle reserve are void;
//! - what **counts** (logs, counters, permits) is taken for used until the restore is a window old; permits that are lent stay with one
//!   region until it has settled: by then those that holders have of the old cluster have ended;
//! - epochs and node ids leap ahead of any that the old cluster can have given out: what it says is not heard.

use super::entry::{Applied, LEVEL, RegionId, SetPolicies};
use super::loans::Loans;
use super::members::Standing;
use super::windows::Windows;
use super::{PolicyOutcome, Pool, REGIONS_MAX};
use crate::quota::amount::Tokens;
use crate::quota::bucket::Unseen;
use crate::quota::counted::Kind;
use crate::quota::policy::{Mode, Policy, RegionName};

/// What is assumed of quotas' windows that have begun, and of limits that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spent {
    /// They are used up: then the limits hold, whatever happened after the copy was made.
    All,
    /// What the copy and the regions' stores know of. What was lent and spent after the copy was made may be spent once more.
    AsKnown,
}

impl Pool {
    /// See above. `members` are those of the new cluster, sorted; some of them are `witnesses`. Depends on nothing else, so that each
    /// of them comes to the same. `None`: it cannot go on so (nobody would serve, there are too many members, or the copy is of a
    /// cluster that was never founded or has too many changes of policies under way).
    #[must_use]
    pub fn restored(
        mut self,
        members: &[RegionName],
        witnesses: &[RegionName],
        spent: Spent,
    ) -> Option<Self> {
        let serving = members.iter().filter(|name| !witnesses.contains(name)).count();
        if self.regions().is_empty() || serving == 0 || members.len() > REGIONS_MAX {
            return None;
        }
        self.level = self.level.max(LEVEL);
        let policies: Vec<Policy> = self.policies().map(|view| (**view.policy).clone()).collect();
        self.reseat(members, witnesses)?;
        self.resets.clear();
        self.windows.walls.forget();
        // They were measured by the clocks of other leaders.
        self.loans = Loans::default();
        // Counts are the stores' own; a window's books are kept if what they know is to count.
        let stays = |policy: &Policy| match Kind::of(&policy.limit) {
            Some(_) => true,
            None => policy.window().is_some() && spent == Spent::AsKnown,
        };
        let first = members.iter().find(|name| !witnesses.contains(name))?;
        let kept = policies.iter().filter(|policy| stays(policy)).map(|policy| {
            match policy.lends_permits() && spent == Spent::All {
                true => all_of(policy, first),
                false => policy.clone(),
            }
        });
        let kept = kept.collect();
        self.must_set(kept)?;
        self.must_set(policies)?;
        self.advance(|_| true);
        let before = Windows::before(&self.policies);
        self.policies.share_anew(&self.members, self.tau);
        self.windows.hold(before, &self.policies);
        self.advance(|_| true);
        if spent == Spent::All {
            self.policies.hold_counts(Unseen { level: Tokens::ZERO, at: self.tau });
        }
        Some(self)
    }

    /// All are new nodes, in a new epoch; who is not among them is out.
    fn reseat(&mut self, members: &[RegionName], witnesses: &[RegionName]) -> Option<()> {
        self.advance(|_| true);
        self.members.leap();
        let gone: Vec<RegionId> =
            self.members.all().filter(|m| !members.contains(&m.name)).map(|m| m.id).collect();
        for region in gone {
            self.members.dismiss(region);
            self.policies.retire(region, self.tau);
        }
        for name in members {
            // One that was leaving comes back; who was in is as good as new.
            if let Some(known) = self.members.find(name) {
                self.members.dismiss(known);
            }
            if !self.members.has_room(name) {
                return None;
            }
            let region = self.members.add(name, witnesses.contains(name))?;
            debug_assert_eq!(self.members.standing(region), Standing::In);
            if witnesses.contains(name) {
                self.policies.seat_witness(region);
                self.policies.retire(region, self.tau);
            } else {
                self.policies.hear_again(region);
            }
        }
        self.advance(|_| true);
        Some(())
    }

    fn must_set(&mut self, policies: Vec<Policy>) -> Option<()> {
        let set = SetPolicies { expected: None, policies };
        let outcome = self.set_policies(&set, &mut Applied::default());
        matches!(outcome, PolicyOutcome::Set(_)).then_some(())
    }
}

/// The same limit, as one region's alone: there is nothing to lend.
fn all_of(policy: &Policy, region: &RegionName) -> Policy {
    Policy { mode: Mode::Split, weights: [(region.clone(), 1)].into(), ..policy.clone() }
}
