//! What a borrower sees when it looks at a bucket, and what it may hold on to.

use super::Situation;
use crate::quota::amount::{Rate, Tokens};
use crate::quota::pool::{Inquiry, Preview, RegionId};

/// What a region has, needs and lacks of the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outlook {
    pub(super) demand: Rate,
    /// Rate beyond the reserve, with headroom.
    pub(super) need: Rate,
    pub(super) want: Tokens,
    pub(super) short: Tokens,
    pub(super) quantum: Tokens,
    /// The level without the overdraft; less than zero where that is in use.
    pub(super) available: Tokens,
    /// The level above the reserve's cap; less than zero: room in the reserve.
    pub(super) over: Tokens,
    /// What will be spent before an ask is answered.
    pub(super) ahead: Tokens,
    /// The slice that it has ...
    pub(super) burst: Tokens,
    pub(super) rate: Rate,
    /// ... and what it keeps of that in any case.
    pub(super) keep_burst: Tokens,
    pub(super) keep_rate: Rate,
    pub(super) active: bool,
    pub(super) starved: bool,
    pub(super) renew_due: bool,
}

/// What a region may hold on to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hold {
    pub(super) burst: Tokens,
    pub(super) rate: Rate,
}

impl Outlook {
    pub(super) fn leased(&self) -> bool {
        self.burst.is_positive() || self.rate.is_positive()
    }

    pub(super) fn inquiry(&self, region: RegionId) -> Inquiry {
        Inquiry {
            region,
            demand: self.demand,
            want: self.want,
            level: self.over,
            short: self.short,
            quantum: self.quantum,
            held_burst: self.keep_burst,
            held_rate: self.rate,
        }
    }

    /// Tokens on demand do not keep where the reserve does not hold a request: then only requests that wait count.
    pub(super) fn only_waiting(&self, preview: &Preview, s: &Situation<'_>) -> bool {
        preview.on_demand && s.part.burst < self.quantum
    }

    pub(super) fn short_for(&self, preview: &Preview, s: &Situation<'_>) -> Tokens {
        if self.only_waiting(preview, s) { (s.queued - self.available).or_zero() } else { self.short }
    }
}

pub(super) fn above_by_a_third(rate: Rate) -> Rate {
    rate + rate.mul_div(1, 3)
}
