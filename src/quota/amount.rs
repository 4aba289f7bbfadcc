//! Integer amounts, with the rounding in the name.
//!
//! Everything that the replicated pool computes must come out the same on every machine, and
//! everything that a store computes must come out the same in Lua. So amounts are integers in fixed
//! units, small enough that a double holds them exactly (below 2^53), and rounding always errs
//! towards admitting less.

use crate::bugs::{Bug, planted};
use serde::{Deserialize, Serialize};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Neg, Sub, SubAssign};

/// Micro-tokens in one token.
pub const MICROS_PER_TOKEN: i64 = 1_000_000;
/// Microseconds in one second.
pub const MICROS_PER_SECOND: i64 = 1_000_000;
/// The largest burst, quota or rate a second that a limit may have, in whole tokens. Twice this
/// (a limit and an overshoot of the same size) in micro-tokens is still below 2^53, so that Lua's
/// doubles hold it exactly.
pub const TOKENS_MAX: i64 = 1 << 32;
/// How far a clock's *speed* may be off, in parts per million: the 1% of the promise.
pub const DRIFT_PPM: i64 = 10_000;

macro_rules! amount {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub i64);

        impl $name {
            /// Nothing.
            pub const ZERO: Self = Self(0);
            /// More than any limit.
            pub const MAX: Self = Self(i64::MAX);

            /// `self * num / den`, rounded down (towards minus infinity); saturates. `den` must be positive;
            /// a `den` of 0 or less gives 0.
            #[must_use]
            pub fn mul_div(self, num: i64, den: i64) -> Self {
                Self(mul_div(self.0, num, den))
            }

            /// The same less `ppm` parts per million, rounded down: never more than the truth.
            #[must_use]
            pub fn discount(self, ppm: i64) -> Self {
                if planted(Bug::NoDriftDiscount) {
                    return self;
                }
                self.mul_div(1_000_000_i64.saturating_sub(ppm), 1_000_000)
            }

            /// `percent` of it, rounded down.
            #[must_use]
            pub fn percent(self, percent: i64) -> Self {
                self.mul_div(percent, 100)
            }

            /// Zero if it is negative.
            #[must_use]
            pub fn or_zero(self) -> Self {
                self.max(Self::ZERO)
            }

            /// Is it more than nothing?
            #[must_use]
            pub fn is_positive(self) -> bool {
                self.0 > 0
            }
        }

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }
        impl Neg for $name {
            type Output = Self;
            fn neg(self) -> Self {
                Self(self.0.saturating_neg())
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }
        impl SubAssign for $name {
            fn sub_assign(&mut self, other: Self) {
                *self = *self - other;
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self::ZERO, Add::add)
            }
        }
    };
}

amount! {
    /// An amount of tokens, in micro-tokens (1 token = 1,000,000). Arithmetic saturates.
    Tokens
}
amount! {
    /// Tokens per time, in micro-tokens a second. Arithmetic saturates.
    Rate
}
amount! {
    /// A time or a duration, in microseconds; which clock it belongs to is said where it is used.
    /// Arithmetic saturates.
    Micros
}

impl Tokens {
    /// So many whole tokens; saturates.
    #[must_use]
    pub const fn whole(tokens: i64) -> Self {
        Self(tokens.saturating_mul(MICROS_PER_TOKEN))
    }

    /// The same, rounded up to whole tokens; saturates.
    #[must_use]
    pub fn up_to_whole(self) -> Self {
        Self::whole((self + Self(MICROS_PER_TOKEN.saturating_sub(1))).floor())
    }

    /// Whole tokens in it, rounded down.
    #[must_use]
    pub fn floor(self) -> i64 {
        self.0.div_euclid(MICROS_PER_TOKEN)
    }
}

impl Rate {
    /// So many whole tokens a second; saturates.
    #[must_use]
    pub const fn per_second(tokens: i64) -> Self {
        Self(tokens.saturating_mul(MICROS_PER_TOKEN))
    }

    /// Tokens that flow in `time`, rounded down.
    #[must_use]
    pub fn during(self, time: Micros) -> Tokens {
        Tokens(mul_div(self.0, time.0, MICROS_PER_SECOND))
    }

    /// How long until `tokens` have flowed, rounded up; `None` at rate zero (or less), where they never do.
    #[must_use]
    pub fn time_for(self, tokens: Tokens) -> Option<Micros> {
        if tokens.0 <= 0 {
            return Some(Micros::ZERO);
        }
        if self.0 <= 0 {
            return None;
        }
        let num = i128::from(tokens.0).saturating_mul(i128::from(MICROS_PER_SECOND));
        let den = i128::from(self.0);
        let up = num.saturating_add(den.saturating_sub(1)).checked_div(den)?;
        Some(Micros(i64::try_from(up).unwrap_or(i64::MAX)))
    }
}

impl Micros {
    /// So many milliseconds; saturates.
    #[must_use]
    pub const fn millis(ms: i64) -> Self {
        Self(ms.saturating_mul(1_000))
    }

    /// So many seconds; saturates.
    #[must_use]
    pub const fn seconds(s: i64) -> Self {
        Self(s.saturating_mul(MICROS_PER_SECOND))
    }

    /// Whole seconds, rounded up; negative times are 0.
    #[must_use]
    pub fn ceil_seconds(self) -> i64 {
        ceil_div(self.0, MICROS_PER_SECOND)
    }

    /// Whole milliseconds, rounded up; negative times are 0.
    #[must_use]
    pub fn ceil_millis(self) -> i64 {
        ceil_div(self.0, 1_000)
    }

    /// As a [`std::time::Duration`]; negative times are zero.
    #[must_use]
    pub fn to_duration(self) -> std::time::Duration {
        std::time::Duration::from_micros(u64::try_from(self.0).unwrap_or(0))
    }

    /// From a [`std::time::Duration`], rounded down to microseconds; saturates.
    #[must_use]
    pub fn from_duration(d: std::time::Duration) -> Self {
        Self(i64::try_from(d.as_micros()).unwrap_or(i64::MAX))
    }
}

fn ceil_div(x: i64, den: i64) -> i64 {
    if x <= 0 {
        return 0;
    }
    x.saturating_sub(1).div_euclid(den).saturating_add(1)
}

/// `x * num / den`, rounded down, in 128 bits; saturates; 0 where `den` is not positive.
fn mul_div(x: i64, num: i64, den: i64) -> i64 {
    if den <= 0 {
        return 0;
    }
    let wide = i128::from(x).saturating_mul(i128::from(num)).div_euclid(i128::from(den));
    i64::try_from(wide).unwrap_or(if wide > 0 { i64::MAX } else { i64::MIN })
}

/// A token level that refills lazily, with an exact remainder: reading it often loses nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Level {
    /// What is in it.
    pub tokens: Tokens,
    /// What has accrued below one micro-token, in millionths of it (below 1,000,000).
    pub rem: i64,
}

impl Level {
    /// A level with nothing in the remainder.
    #[must_use]
    pub const fn new(tokens: Tokens) -> Self {
        Self { tokens, rem: 0 }
    }

    /// Lets `rate` flow in for `time` and stops at `cap`. A negative time or rate adds nothing; a level
    /// above `cap` is clipped to it.
    pub fn accrue(&mut self, rate: Rate, time: Micros, cap: Tokens) {
        if rate.0 > 0 && time.0 > 0 {
            let flow =
                i128::from(rate.0).saturating_mul(i128::from(time.0)).saturating_add(i128::from(self.rem));
            let whole = flow.div_euclid(i128::from(MICROS_PER_SECOND));
            let rem = flow.rem_euclid(i128::from(MICROS_PER_SECOND));
            self.tokens += Tokens(i64::try_from(whole).unwrap_or(i64::MAX));
            self.rem = i64::try_from(rem).unwrap_or(0);
        }
        self.clip(cap);
    }

    /// Cuts what is above `cap`.
    pub fn clip(&mut self, cap: Tokens) {
        if self.tokens >= cap {
            self.tokens = cap;
            self.rem = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_errs_towards_less() {
        assert_eq!(Tokens(10).mul_div(1, 3), Tokens(3));
        assert_eq!(Tokens(-10).mul_div(1, 3), Tokens(-4));
        assert_eq!(Tokens(10).mul_div(1, 0), Tokens(0));
        assert_eq!(Tokens(i64::MAX).mul_div(3, 1), Tokens(i64::MAX));
        assert_eq!(Rate(3).time_for(Tokens(1)), Some(Micros(333_334)));
        assert_eq!(Rate(0).time_for(Tokens(1)), None);
        assert_eq!(Micros(1).ceil_seconds(), 1);
        assert_eq!(Micros(1_000_000).ceil_seconds(), 1);
        assert_eq!(Micros(1_000_001).ceil_seconds(), 2);
        assert_eq!(Micros(-5).ceil_seconds(), 0);
    }

    #[test]
    fn reading_often_loses_nothing() {
        let cap = Tokens::whole(100);
        let (mut often, mut once) = (Level::default(), Level::default());
        for _ in 0..1_000_000 {
            often.accrue(Rate(7), Micros(1), cap);
        }
        once.accrue(Rate(7), Micros(1_000_000), cap);
        assert_eq!(often, once);
        assert_eq!(often.tokens, Tokens(7));
    }

    #[test]
    fn a_level_never_passes_its_cap() {
        let mut level = Level::new(Tokens::whole(5));
        level.accrue(Rate::MAX, Micros::MAX, Tokens::whole(6));
        assert_eq!(level, Level::new(Tokens::whole(6)));
        level.accrue(Rate::per_second(1), Micros(0), Tokens::whole(4));
        assert_eq!(level, Level::new(Tokens::whole(4)));
    }
}
