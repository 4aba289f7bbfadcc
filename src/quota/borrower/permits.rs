//! When to ask for more permits, and when to give some back.
//!
//! A permit that nobody has is of use to nobody, and costs nothing to give back. So a region borrows what it waits for and a little
//! more, and gives up what it does not use as soon as another waits. What its holders have it cannot give up: the store keeps
//! it, whatever the plan says, so a plan only says what to keep *beside* it (see [`crate::quota::counted::lent`]).

use super::{Borrower, LOW_PERCENT, Plan, Situation};
use crate::quota::amount::{Micros, Rate, Tokens};

/// To hold for those who come next: so much time's demand ...
const HORIZON: Micros = Micros::seconds(1);
/// ... and no more than this part of the limit (or one request).
const SPARE_PERCENT: i64 = 10;
/// Leases that end by themselves are not told: while another waits, look into the store this often.
const LOOK_AGAIN: Micros = Micros::seconds(1);
/// What is not used goes back to the pool after this.
const UNUSED: Micros = Micros::seconds(5);

impl Borrower {
    /// [`Borrower::consider`] for a bucket of permits. [`Plan::want`] is what it would like to have beside what is in use.
    pub(super) fn consider_permits(&mut self, s: &Situation<'_>, limit: Tokens) -> Option<Plan> {
        let quantum = self.quantum(s);
        let rate = self.demand.rate(s.now, quantum);
        let slice = self.slice.filter(|slice| slice.until > s.now);
        let held = slice.map_or(Tokens::ZERO, |slice| slice.burst);
        let starved = s.queued.is_positive();
        let active = starved || rate.is_positive();
        let low = rate.during(s.rtt.mul_div(LOW_PERCENT, 100)) + quantum;
        (self.low_water, self.on_demand) = (low, true);
        if !active && !held.is_positive() {
            return None;
        }
        let p = s.pool.permits(s.policy, s.bucket, s.tau_of_ask(), s.region)?;
        let left = s.level.or_zero();
        let most = limit.percent(SPARE_PERCENT).max(quantum);
        let spare = rate.during(HORIZON).up_to_whole().max(quantum).min(most);
        let may_ask_for_more = s.now >= self.last_ask + self.gap;
        let plan = |hold_burst: Tokens, want: Tokens| Plan {
            hold_burst: Tokens::whole(hold_burst.or_zero().floor()),
            hold_rate: Rate::ZERO,
            demand: if active { rate.max(Rate(1)) } else { Rate::ZERO },
            want: want.up_to_whole(),
            short: (s.queued - left).or_zero().up_to_whole(),
            quantum,
            lend: Rate::ZERO,
        };
        if starved && left < s.queued {
            // Others may have some to spare, and give it back when they hear that a request waits here.
            let of_use = p.free.is_positive() || p.elsewhere.is_positive();
            return (of_use && may_ask_for_more).then(|| plan(held, s.queued));
        }
        let renew_due = slice.is_some_and(|slice| s.now >= self.renew_at(&slice));
        let unused = left.min(held);
        let look = unused.is_positive() || s.now >= self.last_ask + LOOK_AGAIN;
        if held.is_positive() && p.missing.is_positive() && look {
            return Some(plan(held - p.missing, Tokens::ZERO));
        }
        if active && left < low && p.free.is_positive() && may_ask_for_more {
            return Some(plan(held, spare.min(left + p.free)));
        }
        if held.is_positive() && renew_due {
            let keep = if active { spare } else { Tokens::ZERO };
            return Some(plan(keep, keep));
        }
        let idle = unused > spare + spare && s.now >= self.last_ask + UNUSED;
        idle.then(|| plan(held - unused + spare, spare))
    }
}
