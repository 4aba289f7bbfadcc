//! What a policy promises for a list of regions, and what it can carry: for `quorate validate` and the console.

pub mod counted;

use super::amount::{DRIFT_PPM, MICROS_PER_SECOND, MICROS_PER_TOKEN, Micros, Rate, Tokens};
use super::policy::{Cut, Limit, Part, Policy, Quota, RegionName, TokenBucket};

/// The round trip between regions that is assumed where none is known.
pub const RTT_ASSUMED: Micros = Micros::millis(250);
/// How often a region asks for one bucket at most, while requests do not wait: see the allocation protocol.
pub const ASK_GAP: Micros = Micros::millis(200);

/// What a policy promises. Amounts are those of one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guarantee {
    /// The limit as it was written.
    pub limit: TokenBucket,
    /// Its rate as it is enforced: in whole micro-tokens a second, rounded down.
    pub rate: Rate,
    /// Its burst.
    pub burst: Tokens,
    /// How far above, all regions together (approximate mode).
    pub overshoot: Tokens,
    /// What each region keeps in a partition, before the discount for clock drift.
    pub parts: Vec<(RegionName, Part)>,
    /// What the pool can carry; none in split mode.
    pub pool: Option<Reach>,
}

/// What a pool can carry, under the assumption of a [`Self::move_time`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// What is lent: rate ...
    pub rate: Rate,
    /// ... and burst.
    pub burst: Tokens,
    /// The longest that a lease lasts, and so how long a region that was cut off may still have some of it.
    pub lease: Micros,
    /// How long tokens are on their way from one region to another: a round trip and the gap between two asks.
    pub move_time: Micros,
    /// The highest rate that the worst-placed region can have when all demand is there: all but the others'
    /// reserves, less 1% for clock drift.
    pub alone_max: Rate,
    /// The highest rate that is carried whatever way demand moves, by tokens alone: in a `move_time` every region uses
    /// up what it holds, and together they hold the burst (and the overshoot), so `(burst + overshoot) / move_time`; no
    /// more than the rate less 1% for clock drift, and no less than the reserves. Demand that stays where it is gets
    /// more, since rate is lent too.
    pub moving_max: Rate,
    /// The burst (with the overshoot) from which on `moving_max` is the whole rate: `rate x move_time`.
    pub burst_needed: Tokens,
}

/// What a quota in fixed windows promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaGuarantee {
    /// The limit as it was written.
    pub quota: Quota,
    /// What a window has.
    pub whole: Tokens,
    /// How far above, all regions together (approximate mode).
    pub overshoot: Tokens,
    /// Each region's reserve of a window (split mode: its part).
    pub parts: Vec<(RegionName, Part)>,
    /// What is lent; none in split mode.
    pub pool: Option<Loans>,
}

/// How the pool of a quota is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loans {
    /// What is lent in a window.
    pub pool: Tokens,
    /// The largest loan, where no request costs more.
    pub largest: Tokens,
    /// How long a region may keep one without asking again.
    pub lease: Micros,
}

impl QuotaGuarantee {
    /// What a quota promises in these regions; `None` if the policy has none in fixed windows.
    #[must_use]
    pub fn of(policy: &Policy, regions: &[RegionName]) -> Option<Self> {
        let Limit::Quota(quota) = policy.limit else { return None };
        policy.window()?;
        let cut = policy.cut(regions)?;
        let reserved: Tokens = cut.parts.iter().map(|part| part.burst).sum();
        let loans = Loans {
            pool: (cut.burst - reserved).or_zero(),
            largest: Tokens::whole(cut.burst.percent(1).floor().max(1)).min(cut.burst),
            lease: cut.lease,
        };
        Some(Self {
            quota,
            whole: cut.burst,
            overshoot: cut.overshoot(),
            pool: cut.pooled.then_some(loans),
            parts: regions.iter().cloned().zip(cut.parts).collect(),
        })
    }

    /// What may pass in a short time, where one window ends and the next begins.
    #[must_use]
    pub fn around_a_turn(&self) -> Tokens {
        let window = self.whole + self.overshoot;
        window + window
    }

    /// Is the window so short that moving tokens between regions takes a good part of it?
    #[must_use]
    pub fn is_short_for_a_pool(&self, rtt: Micros) -> bool {
        let move_time = rtt.or_zero() + ASK_GAP;
        self.pool.is_some() && self.quota.per.shortest() < Micros(move_time.0.saturating_mul(10))
    }
}

impl Guarantee {
    /// What a policy promises in these regions, with this round trip between them; `None` if it is unlimited.
    #[must_use]
    pub fn of(policy: &Policy, regions: &[RegionName], rtt: Micros) -> Option<Self> {
        let Limit::TokenBucket(limit) = policy.limit else { return None };
        let cut = policy.cut(regions)?;
        Some(Self {
            limit,
            rate: cut.rate,
            burst: cut.burst,
            overshoot: cut.overshoot(),
            pool: cut.pooled.then(|| Reach::of(&cut, rtt)),
            parts: regions.iter().cloned().zip(cut.parts).collect(),
        })
    }

    /// The most that all regions together admit in any window of this length: `burst + overshoot + rate x window`.
    #[must_use]
    pub fn bound(&self, window: Micros) -> Tokens {
        self.burst + self.overshoot + self.rate.during(window)
    }

    /// How much of the written rate is lost to whole micro-tokens a second, in parts per million.
    #[must_use]
    pub fn rounding_ppm(&self) -> i64 {
        let written = i128::from(self.limit.amount).saturating_mul(i128::from(MICROS_PER_TOKEN));
        let enforced = i128::from(self.rate.0).saturating_mul(i128::from(self.limit.per.seconds()));
        let lost = written.saturating_sub(enforced).saturating_mul(1_000_000);
        lost.checked_div(written).and_then(|ppm| i64::try_from(ppm).ok()).unwrap_or(0)
    }
}

impl Reach {
    fn of(cut: &Cut, rtt: Micros) -> Self {
        let reserved: Rate = cut.parts.iter().map(|part| part.rate).sum();
        let mut rate = (cut.rate - reserved).or_zero();
        let burst = (cut.burst - cut.parts.iter().map(|part| part.burst).sum()).or_zero();
        let least = cut.parts.iter().map(|part| part.rate).min().unwrap_or(Rate::ZERO);
        let move_time = rtt.or_zero() + ASK_GAP;
        let mut held = cut.burst + cut.overshoot();
        if burst == Tokens::ZERO {
            // Reserves hold all of the burst: a slice has nothing to be lent in.
            (rate, held) = Default::default();
        }
        let by_tokens = Rate(held.mul_div(MICROS_PER_SECOND, move_time.0).0);
        Self {
            rate,
            burst,
            lease: cut.lease,
            move_time,
            alone_max: (rate + least).discount(DRIFT_PPM),
            moving_max: by_tokens.min(cut.rate).max(reserved).discount(DRIFT_PPM),
            burst_needed: cut.rate.during(move_time),
        }
    }

    /// Is the burst too small for demand that moves to get the whole rate?
    #[must_use]
    pub fn is_short_of_burst(&self, guarantee: &Guarantee) -> bool {
        guarantee.burst + guarantee.overshoot < self.burst_needed
    }
}

#[cfg(test)]
mod tests {
    use super::super::policy::{Mode, OnStoreFailure, Reserve, Share, Unit};
    use super::*;

    fn policy(amount: u64, per: Unit, burst: u64, mode: Mode) -> Policy {
        Policy {
            name: "p".into(),
            domain: "d".into(),
            matches: Vec::new(),
            limit: Limit::TokenBucket(TokenBucket { amount, per, burst }),
            mode,
            reserve: Reserve { rate: Share::percent(10), burst: Share::percent(10) },
            weights: [("a".into(), 3), ("b".into(), 1)].into(),
            wait: Micros::ZERO,
            on_store_failure: OnStoreFailure::Deny,
            shadow: false,
        }
    }

    fn regions() -> Vec<RegionName> {
        ["a", "b"].map(Into::into).to_vec()
    }

    #[test]
    fn a_pool_without_burst_carries_nothing() {
        let mut all_reserved = policy(100, Unit::Second, 100, Mode::Strict);
        all_reserved.reserve = Reserve { rate: Share::percent(10), burst: Share::ALL };
        let reach = Guarantee::of(&all_reserved, &regions(), RTT_ASSUMED).unwrap().pool.unwrap();
        assert_eq!((reach.rate, reach.burst), (Rate::ZERO, Tokens::ZERO));
        assert_eq!(reach.moving_max, Rate::per_second(10).discount(DRIFT_PPM));
    }

    #[test]
    fn the_bound_counts_burst_overshoot_and_rate() {
        let mode = Mode::Approximate { max_overshoot: Share::percent(20) };
        let guarantee = Guarantee::of(&policy(100, Unit::Second, 50, mode), &regions(), RTT_ASSUMED).unwrap();
        assert_eq!(guarantee.bound(Micros::seconds(10)), Tokens::whole(50 + 10 + 1000));
        assert_eq!(guarantee.rounding_ppm(), 0);
    }

    #[test]
    fn a_small_burst_carries_less_than_the_rate() {
        let guarantee =
            Guarantee::of(&policy(100, Unit::Second, 20, Mode::Strict), &regions(), RTT_ASSUMED).unwrap();
        let reach = guarantee.pool.unwrap();
        assert!(reach.is_short_of_burst(&guarantee));
        assert_eq!(reach.burst_needed, Tokens::whole(45));
        // 20 tokens each 450 ms, less 1%.
        assert_eq!(reach.moving_max, Rate(20_000_000 * 100 / 45).discount(DRIFT_PPM));
        // All but `a`'s reserve of 7.5/s, less 1%.
        assert_eq!(reach.alone_max, Rate(92_500_000).discount(DRIFT_PPM));

        let guarantee =
            Guarantee::of(&policy(100, Unit::Second, 45, Mode::Strict), &regions(), RTT_ASSUMED).unwrap();
        let reach = guarantee.pool.unwrap();
        assert!(!reach.is_short_of_burst(&guarantee));
        assert_eq!(reach.moving_max, Rate::per_second(99));
        assert_eq!(reach.rate, Rate::per_second(90));
    }

    #[test]
    fn slow_limits_lose_to_rounding() {
        let guarantee =
            Guarantee::of(&policy(1, Unit::Day, 1, Mode::Split), &regions(), RTT_ASSUMED).unwrap();
        assert_eq!(guarantee.rounding_ppm(), 49_600);
        assert!(guarantee.pool.is_none());
        let nothing = Guarantee::of(&policy(0, Unit::Day, 0, Mode::Strict), &regions(), RTT_ASSUMED).unwrap();
        assert_eq!(nothing.rounding_ppm(), 0);
        assert_eq!(nothing.bound(Micros::MAX), Tokens::ZERO);
        let mut unlimited = policy(1, Unit::Day, 1, Mode::Split);
        unlimited.limit = Limit::Unlimited;
        assert_eq!(Guarantee::of(&unlimited, &regions(), RTT_ASSUMED), None);
        assert!(Guarantee::of(&policy(1, Unit::Second, 1, Mode::Strict), &[], Micros::MAX).is_some());
    }
}
