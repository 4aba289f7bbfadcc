//! When a region lends of its reserve: see `quota::pool`'s loans.

use super::{Borrower, HEADROOM_PERCENT, IDLE, Outlook, Situation};
use crate::quota::amount::{Micros, Rate};
use crate::quota::pool::LENT_MAX_PERCENT;

/// A loan is renewed when less than this is left of it: leases that it backs can be as long as the usual ones then.
const RENEW: Micros = Micros::seconds(15);
/// Less than this part of the reserve's rate is not worth a proposal ...
const LEAST_PERCENT: i64 = 25;
/// ... nor is less than this part of the limit's.
const CRUMB_PPM: i64 = 1_000;
/// Noise in the demand, in parts of the reserve's rate.
const NOISE_PERCENT: i64 = 2;
/// Whoever has heard nothing for so long may be cut off.
const NEWS: Micros = Micros::seconds(1);

impl Borrower {
    /// How much of its reserve's rate to lend now; zero: nothing, or nothing more.
    pub(super) fn to_lend(&self, s: &Situation<'_>, o: &Outlook) -> Rate {
        let tau = s.tau();
        let loan = s.pool.loan(s.bucket, s.region, tau);
        if !s.may_lend
            || self.may_be_cut_off(s)
            || loan.is_some_and(|loan| loan.until - tau >= RENEW)
            || !s.pool.wants_loan(s.policy, s.bucket, s.region, tau)
        {
            return Rate::ZERO;
        }
        // Where the level has to recover, the rate is not idle.
        let full = o.available >= s.part.burst.percent(50);
        let idle =
            (s.part.rate - o.demand.percent(HEADROOM_PERCENT)).min(s.part.rate.percent(LENT_MAX_PERCENT));
        let whole = s.pool.cut(s.policy).map_or(Rate::ZERO, |cut| cut.rate);
        let worth = idle >= s.part.rate.percent(LEAST_PERCENT) && idle >= whole.mul_div(CRUMB_PPM, 1_000_000);
        // What is lent already stays lent for as long as what is lent now. So if that is more than what is idle by now, it is not renewed.
        let lent = self.lent(s.now).max(loan.map_or(Rate::ZERO, |loan| loan.rate));
        let no_less = idle >= lent - s.part.rate.percent(NOISE_PERCENT);
        if worth && no_less && full && idle.is_positive() && s.part.rate.is_positive() {
            idle
        } else {
            Rate::ZERO
        }
    }

    /// A region that is cut off needs its reserve, and nobody would hear of the loan. So there must be news, and an answer to the last
    /// ask; or nothing was asked for so long that one attempt more does little harm.
    fn may_be_cut_off(&self, s: &Situation<'_>) -> bool {
        s.tau_age > NEWS || self.out.is_some_and(|out| !out.void && s.now < out.sent.mono + IDLE)
    }

    /// What it may use of its reserve's rate.
    pub(super) fn reserve_rate(&self, s: &Situation<'_>) -> Rate {
        (s.part.rate - self.lent(s.now)).or_zero()
    }

    fn lent(&self, now: Micros) -> Rate {
        self.lent.filter(|(_, until)| *until > now).map_or(Rate::ZERO, |(rate, _)| rate)
    }
}
