//! How much is asked of a bucket: two moving averages of what was offered, admitted or not. Integers only.

use super::amount::{MICROS_PER_SECOND, Micros, Rate, Tokens};

/// The fast average's time constant: this, or a tenth of the time in which the limit fills its burst.
const FAST_MIN: Micros = Micros::millis(500);
/// The slow average's: this, or the time in which the limit fills its burst.
const SLOW_MIN: Micros = Micros::seconds(3);
/// A limit that fills more slowly is not averaged over more than this.
const FILL_MAX: Micros = Micros::seconds(864_000);
/// The largest cost of a request is forgotten after one to two of these.
const COST_WINDOW: Micros = Micros::seconds(15);
/// Up to this, what was offered since the last time is taken to have come in all at once.
const LUMP: Micros = Micros::seconds(1);
/// No spell of traffic is taken to be younger than this.
const AGE_MIN: Micros = Micros::millis(20);

/// An estimate of the demand on one bucket in one region. Time is the daemon's monotonic clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    fast: Average,
    slow: Average,
    /// When the present spell of traffic began, and what it has cost so far: a young average is scaled up to its age.
    since: Micros,
    last: Micros,
    seen: Tokens,
    /// When it was told last of what came in over a longer time, and what has come in since then.
    fresh: Micros,
    lately: Tokens,
    /// When it was told last, if only of nothing.
    told: Micros,
    /// The largest cost of one request in this window and in the one before.
    largest: [Tokens; 2],
    window: Micros,
}

impl Demand {
    /// No demand, as of `now`.
    #[must_use]
    pub fn new(now: Micros) -> Self {
        Self {
            fast: Average::new(now, FAST_MIN),
            slow: Average::new(now, SLOW_MIN),
            since: now,
            last: Micros(i64::MIN),
            seen: Tokens::ZERO,
            fresh: now,
            lately: Tokens::ZERO,
            told: now,
            largest: [Tokens::ZERO; 2],
            window: now,
        }
    }

    /// Fits the averages to a limit.
    pub fn tune(&mut self, rate: Rate, burst: Tokens) {
        let fill = rate.time_for(burst).unwrap_or(FILL_MAX).min(FILL_MAX);
        self.fast.span = FAST_MIN.max(fill.mul_div(1, 10));
        self.slow.span = SLOW_MIN.max(fill);
    }

    /// `offered` tokens were asked for since the last time, `largest` of them by one request.
    pub fn add(&mut self, now: Micros, offered: Tokens, largest: Tokens) {
        self.note_cost(now, largest);
        let untold = now - self.told;
        self.told = self.told.max(now);
        if !offered.is_positive() {
            return;
        }
        // What came in over a longer time came in evenly, as far as anyone can tell.
        let over = if untold > LUMP { untold } else { Micros::ZERO };
        let new = now - self.last > Micros(self.fast.span.0.saturating_mul(5));
        if new {
            self.since = now - over;
            self.seen = Tokens::ZERO;
            self.fast.forget(now);
        }
        self.last = now;
        self.seen += offered;
        if over.is_positive() {
            (self.fresh, self.lately) = (now, Tokens::ZERO);
        } else {
            self.lately += offered;
        }
        // While traffic goes on it came in evenly too: taken as a lump at its end, each would count for more than it is until the next.
        let over = if new { over } else { untold };
        self.fast.add(now, offered, over);
        self.slow.add(now, offered, over);
    }

    /// The demand at `now`: the slow average, unless the fast one is further from it than chance explains with requests of
    /// cost `quantum`.
    #[must_use]
    pub fn rate(&self, now: Micros, quantum: Tokens) -> Rate {
        let rate = self.averaged(now, quantum);
        // A spell may begin with what is told of a long time, of which nearly all came in without any rush. What comes in just after that may
        // be a rush that the averages will take a while to show.
        let age = (now - self.fresh).max(AGE_MIN);
        let young = self.lately > Tokens(quantum.0.saturating_mul(8)) && age < self.fast.span;
        let rush = Rate(self.lately.mul_div(MICROS_PER_SECOND, age.0).0);
        if young && rush > rate + rate { rush } else { rate }
    }

    fn averaged(&self, now: Micros, quantum: Tokens) -> Rate {
        let (fast, slow) = (self.fast.at(now), self.slow.at(now));
        let age = (now - self.since).max(AGE_MIN);
        let span = self.fast.span;
        if self.seen > Tokens(quantum.0.saturating_mul(8)) && age < span + span {
            return fast.mul_div(ONE, ONE.saturating_sub(decay(age, span)).max(1));
        }
        // Of arrivals at random, an average over `span` deviates by sqrt(rate * cost / (2 * span)). Three of those, and two
        // requests.
        let few = Rate(quantum.mul_div(2 * MICROS_PER_SECOND, span.0).0);
        let off = Rate(fast.0.abs_diff(slow.0).try_into().unwrap_or(i64::MAX)) - few;
        let variance = i128::from(slow.0)
            .saturating_mul(i128::from(quantum.0))
            .saturating_mul(i128::from(MICROS_PER_SECOND))
            .checked_div(i128::from(span.0).saturating_mul(2))
            .unwrap_or(0);
        let square = i128::from(off.0).saturating_mul(i128::from(off.0));
        let far = off.is_positive() && square > variance.saturating_mul(9);
        if far { fast } else { slow }
    }

    /// The fast average alone: right where nothing is held back.
    #[must_use]
    pub fn fast(&self, now: Micros) -> Rate {
        self.fast.at(now)
    }

    /// The largest cost of one request in the last 15 to 30 seconds.
    #[must_use]
    pub fn largest(&self) -> Tokens {
        let [this, before] = self.largest;
        this.max(before)
    }

    /// When something was offered last; long ago if never.
    #[must_use]
    pub fn last(&self) -> Micros {
        self.last
    }

    fn note_cost(&mut self, now: Micros, largest: Tokens) {
        let [this, _] = self.largest;
        let passed = now - self.window;
        if passed >= COST_WINDOW {
            let before = if passed < COST_WINDOW + COST_WINDOW { this } else { Tokens::ZERO };
            self.largest = [largest.or_zero(), before];
            self.window = now;
        } else {
            let [_, before] = self.largest;
            self.largest = [this.max(largest), before];
        }
    }
}

/// An exponential moving average of a flow of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Average {
    /// In 1/[`FINE`] of a rate, at time `at`.
    rate: Rate,
    at: Micros,
    /// The time constant: it falls to 1/e in this time. Positive.
    span: Micros,
}

/// Slow flows need more digits than a rate has.
const FINE: i64 = 256;

impl Average {
    fn new(at: Micros, span: Micros) -> Self {
        Self { rate: Rate::ZERO, at, span }
    }

    fn forget(&mut self, now: Micros) {
        self.rate = Rate::ZERO;
        self.at = now;
    }

    /// Tokens that came in all at once, or evenly over a time.
    fn add(&mut self, now: Micros, tokens: Tokens, over: Micros) {
        self.rate = self.fine_at(now);
        self.at = self.at.max(now);
        let fine = MICROS_PER_SECOND.saturating_mul(FINE);
        self.rate += if over.is_positive() {
            let flow = Rate(tokens.mul_div(fine, over.0).0);
            flow.mul_div(ONE.saturating_sub(decay(over, self.span)), ONE)
        } else {
            Rate(tokens.mul_div(fine, self.span.0).0)
        };
    }

    fn at(&self, now: Micros) -> Rate {
        self.fine_at(now).mul_div(1, FINE)
    }

    fn fine_at(&self, now: Micros) -> Rate {
        self.rate.mul_div(decay(now - self.at, self.span), ONE)
    }
}

/// 1 in the fixed point of [`decay`].
const ONE: i64 = 1 << 32;
/// ln 2, in millionths.
const LN_2: i64 = 693_147;

/// exp(-time / span), as a part of [`ONE`]; 1 for times that are not positive. Off by less than 2 parts in 100,000.
fn decay(time: Micros, span: Micros) -> i64 {
    // Halvings, in units of 2^-16 / 64.
    let unit = i128::from(time.0).saturating_mul(64 << 16).saturating_mul(i128::from(MICROS_PER_SECOND));
    let per = i128::from(span.0.max(1)).saturating_mul(i128::from(LN_2));
    let units = i64::try_from(unit.checked_div(per).unwrap_or(0)).unwrap_or(i64::MAX);
    if units <= 0 {
        return ONE;
    }
    let halvings = units.div_euclid(64 << 16);
    let step = usize::try_from(units.div_euclid(1 << 16).rem_euclid(64)).unwrap_or(0);
    let part = units.rem_euclid(1 << 16);
    let Some([from, to]) = POWERS.get(step..).and_then(|powers| powers.first_chunk::<2>()) else { return 0 };
    let fall = Tokens(from.saturating_sub(*to)).mul_div(part, 1 << 16);
    let whole = u32::try_from(halvings).unwrap_or(u32::MAX);
    from.saturating_sub(fall.0).checked_shr(whole).unwrap_or(0)
}

/// 2^32 * 2^(-i/64).
const POWERS: [i64; 65] = [
    4294967296, 4248701965, 4202935003, 4157661043, 4112874773, 4068570940, 4024744348, 3981389855,
    3938502376, 3896076880, 3854108391, 3812591987, 3771522796, 3730896002, 3690706840, 3650950594,
    3611622603, 3572718252, 3534232978, 3496162267, 3458501653, 3421246719, 3384393094, 3347936457,
    3311872529, 3276197082, 3240905930, 3205994934, 3171459999, 3137297074, 3103502151, 3070071267,
    3037000500, 3004285971, 2971923842, 2939910317, 2908241642, 2876914102, 2845924021, 2815267765,
    2784941738, 2754942382, 2725266179, 2695909648, 2666869345, 2638141863, 2609723834, 2581611923,
    2553802834, 2526293303, 2499080105, 2472160047, 2445529972, 2419186755, 2393127307, 2367348571,
    2341847524, 2316621173, 2291666561, 2266980759, 2242560872, 2218404036, 2194507417, 2170868212,
    2147483648,
];

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: Tokens = Tokens::whole(1);

    #[test]
    #[allow(clippy::float_arithmetic)]
    fn decay_is_the_exponential() {
        let span = Micros::millis(500);
        for us in (0..8_000_000).step_by(777) {
            let exact = (-(us as f64) / 500_000.0).exp();
            let got = decay(Micros(us), span) as f64 / ONE as f64;
            assert!((got - exact).abs() < 2e-5, "{us}: {got} {exact}");
        }
        assert_eq!(decay(Micros(-1), span), ONE);
        assert_eq!(decay(Micros::MAX, span), 0);
        assert_eq!(decay(Micros::MAX, Micros(0)), 0);
    }

    #[test]
    fn steady_demand_is_seen_as_it_is() {
        let mut demand = Demand::new(Micros::ZERO);
        demand.tune(Rate::per_second(1_000), Tokens::whole(2_000));
        for ms in 0..30_000 {
            demand.add(Micros::millis(ms), TOKEN, TOKEN);
        }
        let rate = demand.rate(Micros::seconds(30), TOKEN);
        assert!((rate.0 - Rate::per_second(1_000).0).abs() < Rate::per_second(10).0, "{rate:?}");
        assert_eq!(demand.rate(Micros::seconds(300), TOKEN), Rate::ZERO);
    }

    #[test]
    fn a_burst_is_seen_at_once() {
        let mut demand = Demand::new(Micros::ZERO);
        demand.tune(Rate::per_second(10), Tokens::whole(100));
        demand.add(Micros::seconds(49), Tokens::ZERO, Tokens::ZERO);
        demand.add(Micros::seconds(50), Tokens::whole(100), TOKEN);
        assert!(demand.rate(Micros::seconds(50), TOKEN) > Rate::per_second(1_000));
        // ... and what follows it decides what it is taken for.
        assert!(demand.rate(Micros::seconds(53), TOKEN) < Rate::per_second(20));
    }

    #[test]
    fn being_told_rarely_changes_little() {
        let mut demand = Demand::new(Micros::ZERO);
        demand.tune(Rate::per_second(1_000), Tokens::whole(2_000));
        demand.add(Micros::seconds(120), Tokens::whole(120), TOKEN);
        let rate = demand.rate(Micros::seconds(120), TOKEN);
        assert!((rate.0 - Rate::per_second(1).0).abs() < 10_000, "{rate:?}");
    }

    #[test]
    fn how_often_it_is_told_makes_no_difference() {
        for every in [1, 10, 250, 500, 1_000] {
            let mut demand = Demand::new(Micros::ZERO);
            demand.tune(Rate::per_second(1_000), Tokens::whole(2_000));
            for k in 1..=30_000 / every {
                demand.add(Micros::millis(k * every), Tokens::whole(every), TOKEN);
            }
            let rate = demand.rate(Micros::seconds(30), TOKEN);
            assert!((rate.0 - Rate::per_second(1_000).0).abs() < Rate::per_second(10).0, "{every}: {rate:?}");
        }
    }

    #[test]
    fn a_rush_after_a_while_of_nothing_is_seen_at_once() {
        let mut demand = Demand::new(Micros::ZERO);
        demand.tune(Rate::per_second(1_000), Tokens::whole(2_000));
        let from = Micros::seconds(90);
        demand.add(from, TOKEN, TOKEN);
        assert!(demand.rate(from, TOKEN) < Rate::per_second(1));
        for ms in 1..=10 {
            demand.add(from + Micros::millis(ms), Tokens::whole(5), TOKEN);
        }
        let rate = demand.rate(from + Micros::millis(10), TOKEN);
        assert!(rate > Rate::per_second(2_000) && rate < Rate::per_second(6_000), "{rate:?}");
        // What goes on as it was is none.
        let mut demand = Demand::new(Micros::ZERO);
        demand.add(Micros::seconds(20), Tokens::whole(200), TOKEN);
        for ms in 1..=20 {
            demand.add(Micros::seconds(20) + Micros::millis(ms * 100), TOKEN, TOKEN);
            let rate = demand.rate(Micros::seconds(20) + Micros::millis(ms * 100), TOKEN);
            assert!(rate < Rate::per_second(15), "{rate:?}");
        }
    }

    #[test]
    fn the_largest_cost_is_forgotten_after_a_while() {
        let mut demand = Demand::new(Micros::ZERO);
        demand.add(Micros::ZERO, Tokens::whole(10), Tokens::whole(10));
        demand.add(Micros::seconds(14), TOKEN, TOKEN);
        assert_eq!(demand.largest(), Tokens::whole(10));
        demand.add(Micros::seconds(16), TOKEN, TOKEN);
        assert_eq!(demand.largest(), Tokens::whole(10));
        demand.add(Micros::seconds(32), TOKEN, TOKEN);
        assert_eq!(demand.largest(), TOKEN);
    }
}
