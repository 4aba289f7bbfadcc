//! When to ask for more of a quota, and when to give some back.
//!
//! A token bucket refills whatever becomes of its tokens; of a quota every token is there once. So a region borrows little at a
//! time, gives back what it does not need before the lease takes it, and keeps half of its reserve for the time when nobody can be
//! asked, as long as there is something to be had of the pool.

use super::{Borrower, Hold, Outlook, Plan, Situation};
use crate::quota::amount::Micros;
use crate::quota::pool::{Inquiry, Preview};

/// Tokens to hold: so much time's demand.
const HORIZON: Micros = Micros::seconds(2);
/// While there is nothing to be had, look so often. (News of the pool wake it before.)
const REST: Micros = Micros::millis(100);
/// This part of the reserve is not touched while there is something in the pool.
const KEPT_PERCENT: i64 = 50;

impl Borrower {
    /// [`Borrower::consider`] for a bucket of a quota's window that is not over.
    pub(super) fn consider_window(&mut self, s: &Situation<'_>) -> Option<Plan> {
        let o = self.outlook(s, HORIZON);
        let kept = s.part.burst.percent(KEPT_PERCENT);
        let low = (o.ahead + o.quantum).max(kept);
        self.low_water = s.part.overdraft + low;
        if !o.active && !o.leased() {
            return None;
        }
        let want = o.demand.during(HORIZON).max(o.quantum).max(s.queued) + kept;
        let inquiry = Inquiry { want, ..o.inquiry(s.region) };
        let p = s.pool.preview(s.policy, s.bucket, s.tau_of_ask(), &inquiry)?;
        let Some(hold) = self.reason_in_window(s, &o, &p, o.available < low) else {
            if !p.tokens.is_positive() {
                self.next_look = s.now + REST;
            }
            return None;
        };
        Some(Plan {
            hold_burst: hold.burst,
            hold_rate: hold.rate,
            demand: o.demand,
            want,
            short: o.short,
            quantum: o.quantum,
            ..Plan::default()
        })
    }

    /// Is there reason to ask? Then this is what it may hold on to.
    fn reason_in_window(&self, s: &Situation<'_>, o: &Outlook, p: &Preview, low: bool) -> Option<Hold> {
        let keeps = Hold { burst: o.keep_burst, ..Hold::default() };
        let nothing = Hold::default();
        let may_ask_for_more = s.now >= self.last_ask + self.gap;
        let unspent = o.leased() && o.over.is_positive();
        if o.starved || o.active && low {
            if p.tokens.is_positive() && (o.starved || may_ask_for_more) {
                return Some(keeps);
            }
            // Others may have some to spare, and give it back when they hear that a request waits here.
            let lent = s.pool.lent_elsewhere(s.bucket, s.region);
            return (o.starved && may_ask_for_more && lent.is_positive()).then_some(keeps);
        }
        if unspent && (p.others_wait || !o.active && o.renew_due) {
            return Some(nothing);
        }
        // The lease would take what is left of it: spent or not, it would not come back.
        (unspent && o.renew_due).then_some(keeps)
    }
}
