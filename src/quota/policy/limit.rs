//! What a policy allows: a rate, a quota in each window, or so many at a time.

use crate::quota::amount::{Micros, Rate, Tokens};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Display, Formatter};

/// The longest window that is given by its length: 366 days.
pub const LENGTH_MAX_S: u32 = 366 * 86_400;
/// The largest quota of a sliding log, which keeps an entry for each request that it has admitted.
pub const LOG_QUOTA_MAX: u64 = 10_000;
/// The most permits: each that is in use is an entry in the store.
pub const PERMITS_MAX: u64 = 10_000;
/// The shortest, longest and usual life of a permit that nobody renews.
pub const TTL_MIN: Micros = Micros::seconds(1);
/// See [`TTL_MIN`].
pub const TTL_MAX: Micros = Micros::seconds(86_400);
/// See [`TTL_MIN`].
pub const TTL_DEFAULT: Micros = Micros::seconds(60);

/// What a policy allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Limit {
    /// `rate` and `burst`.
    TokenBucket(TokenBucket),
    /// Matches and never denies.
    Unlimited,
    /// `quota` and `per`.
    Quota(Quota),
    /// `concurrent` and `ttl`.
    Concurrent(Concurrent),
}

/// A token bucket limit as its author wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenBucket {
    /// Tokens a [`Self::per`].
    pub amount: u64,
    /// The unit of time of the rate.
    pub per: Unit,
    /// What the bucket holds, in whole tokens.
    pub burst: u64,
}

/// So many tokens in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// Whole tokens.
    pub quota: u64,
    /// Which windows.
    pub per: Window,
    /// Where windows begin and how they are counted.
    pub algorithm: Algorithm,
}

/// What a quota is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Window {
    /// A unit of the (proleptic Gregorian) calendar in UTC; weeks begin on Monday (ISO 8601).
    Calendar(Unit),
    /// So many whole seconds, counted from 1970-01-01T00:00:00Z; 1 to [`LENGTH_MAX_S`].
    Length {
        /// Its length.
        seconds: u32,
    },
}

/// How a quota is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Algorithm {
    /// Windows follow one another, each with the quota to itself: around a turn up to twice the quota passes in less than
    /// a window's length.
    #[default]
    FixedWindow,
    /// The last window's count fades while the present one's grows: an estimate, from two counters.
    SlidingWindow,
    /// At any moment the window is the time just before it: exact, with an entry for each request.
    SlidingLog,
}

/// So many at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Concurrent {
    /// Permits.
    pub permits: u64,
    /// A permit that is not renewed ends after this.
    pub ttl: Micros,
}

impl Display for Limit {
    /// As people write it: `10/s, burst 100`; `1000 per month`; `5 per 15m, sliding_log`; `3 at a time, ttl 60s`.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::TokenBucket(TokenBucket { amount, per, burst }) => {
                write!(f, "{amount}/{}, burst {burst}", per.suffix())
            }
            Self::Unlimited => f.write_str("unlimited"),
            Self::Quota(Quota { quota, per, algorithm: Algorithm::FixedWindow }) => {
                write!(f, "{quota} per {per}")
            }
            Self::Quota(Quota { quota, per, algorithm }) => {
                write!(f, "{quota} per {per}, {}", algorithm.name())
            }
            Self::Concurrent(Concurrent { permits, ttl }) => {
                write!(f, "{permits} at a time, ttl {}s", ttl.ceil_seconds())
            }
        }
    }
}

impl TokenBucket {
    /// The refill rate, rounded down to micro-tokens a second.
    #[must_use]
    pub fn rate(&self) -> Rate {
        Rate(whole(self.amount).mul_div(1, self.per.seconds()).0)
    }

    /// The capacity.
    #[must_use]
    pub fn burst(&self) -> Tokens {
        whole(self.burst)
    }
}

impl Quota {
    /// What a window has.
    #[must_use]
    pub fn tokens(&self) -> Tokens {
        whole(self.quota)
    }
}

impl Concurrent {
    /// The permits, each a token.
    #[must_use]
    pub fn tokens(&self) -> Tokens {
        whole(self.permits)
    }
}

fn whole(tokens: u64) -> Tokens {
    Tokens::whole(i64::try_from(tokens).unwrap_or(i64::MAX))
}

impl Algorithm {
    /// Its name in YAML.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindow => "sliding_window",
            Self::SlidingLog => "sliding_log",
        }
    }
}

impl Window {
    /// Its length in seconds; of the calendar's months and years, which differ in length, about that.
    #[must_use]
    pub fn seconds(self) -> i64 {
        match self {
            Self::Calendar(unit) => unit.seconds(),
            Self::Length { seconds } => seconds.into(),
        }
    }
}

impl Display for Window {
    /// As in YAML: `month`, or `15m` in the largest unit that says it exactly.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let seconds = match *self {
            Self::Calendar(unit) => return f.write_str(unit.name()),
            Self::Length { seconds } => seconds,
        };
        for unit in [Unit::Day, Unit::Hour, Unit::Minute] {
            let length = u32::try_from(unit.seconds()).unwrap_or(u32::MAX);
            if seconds >= length && seconds.is_multiple_of(length) {
                return write!(f, "{}{}", seconds.div_euclid(length), unit.suffix());
            }
        }
        write!(f, "{seconds}s")
    }
}

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Unit {
    /// `s`
    Second,
    /// `m`
    Minute,
    /// `h`
    Hour,
    /// `d`: in a rate 86,400 s
    Day,
    /// In a rate (Envoy's overrides only) 604,800 s
    Week,
    /// In a rate (Envoy's overrides only) 2,592,000 s
    Month,
    /// In a rate (Envoy's overrides only) 31,536,000 s
    Year,
}

impl Unit {
    /// All of them, the shortest first.
    pub const ALL: [Self; 7] =
        [Self::Second, Self::Minute, Self::Hour, Self::Day, Self::Week, Self::Month, Self::Year];

    /// How it is written in a rate.
    #[must_use]
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Second => "s",
            Self::Minute => "m",
            Self::Hour => "h",
            Self::Day => "d",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// How it is written in a quota's `per`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Second => "second",
            Self::Minute => "minute",
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Year => "year",
        }
    }

    /// Its length in seconds, in a rate; months and years of the calendar differ in length.
    #[must_use]
    pub const fn seconds(self) -> i64 {
        match self {
            Self::Second => 1,
            Self::Minute => 60,
            Self::Hour => 3_600,
            Self::Day => 86_400,
            Self::Week => 604_800,
            Self::Month => 2_592_000,
            Self::Year => 31_536_000,
        }
    }
}
