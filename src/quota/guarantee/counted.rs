//! What a limit that counts what it admits promises.

use crate::quota::amount::Micros;
use crate::quota::counted::Kind;
use crate::quota::policy::{Policy, RegionName};

/// What a policy promises whose limit counts, for one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// How it counts.
    pub kind: Kind,
    /// The limit, in whole tokens or permits.
    pub limit: i64,
    /// The window's length, or how long a permit is lent for.
    pub span: Micros,
    /// Each region's part (strict permits: its reserve); with the pool they add up to the limit.
    pub parts: Vec<(RegionName, i64)>,
    /// Permits that are lent, and for how long at most a region that is cut off keeps them; `None`: none are.
    pub pool: Option<(i64, Micros)>,
}

impl Counted {
    /// What a policy promises in these regions; `None`: it is a token bucket, a fixed window, or unlimited.
    #[must_use]
    pub fn of(policy: &Policy, regions: &[RegionName]) -> Option<Self> {
        let (kind, span) = Kind::of(&policy.limit)?;
        let span = policy.permits().map_or(span, |permits| permits.ttl);
        let cut = policy.cut(regions)?;
        let parts = cut.parts.iter().map(|part| part.burst.floor());
        let parts: Vec<_> = regions.iter().cloned().zip(parts).collect();
        let reserved = parts.iter().map(|(_, part)| *part).fold(0, i64::saturating_add);
        let limit = cut.burst.floor();
        let pool = cut.pooled.then(|| (limit.saturating_sub(reserved), cut.lease));
        Some(Self { kind, limit, span, parts, pool })
    }

    /// The most that all regions together admit in any window of this length (permits: have in use at any time).
    #[must_use]
    pub fn bound(&self, window: Micros) -> i64 {
        match self.kind {
            Kind::Permits => self.limit,
            Kind::Log => {
                let spans = window.0.saturating_add(self.span.0.saturating_sub(1)).checked_div(self.span.0);
                self.limit.saturating_mul(spans.unwrap_or(1).max(1))
            }
            Kind::Counters => {
                let more =
                    i128::from(self.limit).saturating_mul(window.0.into()).checked_div(self.span.0.into());
                self.limit.saturating_add(more.and_then(|more| i64::try_from(more).ok()).unwrap_or(i64::MAX))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::policy::{Algorithm, Concurrent, Limit, Mode, OnStoreFailure, Quota, Reserve, Window};

    #[test]
    fn parts_are_whole_and_add_up_and_bounds_are_those_of_the_algorithm() {
        let quota =
            |algorithm| Limit::Quota(Quota { quota: 5, per: Window::Length { seconds: 60 }, algorithm });
        let policy = |limit| Policy {
            name: "p".into(),
            domain: "d".into(),
            matches: Vec::new(),
            limit,
            mode: Mode::Split,
            reserve: Reserve::default(),
            weights: [("a".into(), 3), ("b".into(), 1)].into(),
            wait: Micros::ZERO,
            on_store_failure: OnStoreFailure::Deny,
            shadow: false,
        };
        let regions: Vec<RegionName> = ["a", "b"].map(Into::into).to_vec();
        let of = |limit| Counted::of(&policy(limit), &regions);
        let bounds = |limit| {
            let counted = of(limit).unwrap();
            assert_eq!(counted.parts.iter().map(|(_, part)| part).sum::<i64>(), counted.limit);
            [1, 60, 61, 120].map(|seconds| counted.bound(Micros::seconds(seconds)))
        };
        assert_eq!(bounds(quota(Algorithm::SlidingLog)), [5, 5, 10, 10]);
        assert_eq!(bounds(quota(Algorithm::SlidingWindow)), [5, 10, 10, 15]);
        let permits = Concurrent { permits: 3, ttl: Micros::seconds(60) };
        assert_eq!(bounds(Limit::Concurrent(permits)), [3; 4]);
        assert_eq!(of(quota(Algorithm::FixedWindow)), None);
        assert_eq!(of(Limit::Unlimited), None);
    }
}
