//! Policies: what they match, what they allow, and how regions share it.
//!
//! Values of these types are valid by construction: `config::policies` makes them out of YAML and refuses
//! everything else. They travel through the Raft log, so fields and variants are only ever appended.

mod limit;

pub use limit::{
    Algorithm, Concurrent, LENGTH_MAX_S, LOG_QUOTA_MAX, Limit, PERMITS_MAX, Quota, TTL_DEFAULT, TTL_MAX,
    TTL_MIN, TokenBucket, Unit, Window,
};

use super::amount::{DRIFT_PPM, Micros, Rate, Tokens};
use super::bucket::Shape;
use super::counted::lent;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Shortest and usual lease of a slice of a pool.
pub const LEASE_MIN: Micros = Micros::seconds(10);
/// A bucket that takes long to fill lends for longer, up to this.
pub const LEASE_MAX: Micros = Micros::seconds(60);
/// A region lends of its reserve for so long, by the clock of its store.
pub const LOAN: Micros = Micros::seconds(30);
/// The reserve where a policy names none: of the rate (what an idle region keeps, nobody else can use) ...
pub const RESERVE_RATE_DEFAULT: Share = Share::percent(2);
/// ... and of the burst.
pub const RESERVE_BURST_DEFAULT: Share = Share::percent(5);

/// A region's name, as in `region.yaml`.
pub type RegionName = Arc<str>;

/// One rule: what it matches, its limit, its mode. The same in every region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Unique among the policies of the cluster.
    pub name: Arc<str>,
    /// Envoy's domain: a namespace of descriptors.
    pub domain: Arc<str>,
    /// The keys that a descriptor must have, in this order (attributes: all of them, in any order).
    pub matches: Vec<KeyMatch>,
    /// What it allows.
    pub limit: Limit,
    /// How regions share it.
    pub mode: Mode,
    /// What each region may spend with no word from anyone (ignored in split mode: all of it).
    pub reserve: Reserve,
    /// Shares of the reserve (split: of the limit) by region; a region that is not named has weight 1
    /// where the map is empty, else 0.
    pub weights: BTreeMap<RegionName, u32>,
    /// Strict mode: how long a request may wait for a lease.
    pub wait: Micros,
    /// What to answer while the region's store gives no answer.
    pub on_store_failure: OnStoreFailure,
    /// Count and report, never deny.
    pub shadow: bool,
}

/// One key of a policy's `match`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KeyMatch {
    /// The descriptor entry's key.
    pub key: Arc<str>,
    /// Which of its values.
    pub value: ValueMatch,
}

/// Which values of a key match.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ValueMatch {
    /// `value: x`
    Exact(Arc<str>),
    /// `value: x*`
    Prefix(Arc<str>),
    /// No `value`: a bucket for each value.
    Any,
    /// `value: x*` (or none) and `shared: true`: one bucket for all values that begin with it. As exact as the same without `shared`.
    Shared(Arc<str>),
}

impl std::fmt::Display for KeyMatch {
    /// As people write it: `tenant=*`, `op=search`, `path=/api/*`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.value {
            ValueMatch::Exact(value) => write!(f, "{}={value}", self.key),
            ValueMatch::Prefix(prefix) => write!(f, "{}={prefix}*", self.key),
            ValueMatch::Any => write!(f, "{}=*", self.key),
            ValueMatch::Shared(prefix) => write!(f, "{}={prefix}* (shared)", self.key),
        }
    }
}

/// How regions share a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Never more than the limit, all regions together.
    Strict,
    /// Never more than the limit and `max_overshoot` (a share of the burst).
    Approximate {
        /// How far above, as a share of the burst.
        max_overshoot: Share,
    },
    /// A fixed part of the limit for each region; no coordination.
    Split,
}

impl Mode {
    /// Its name in YAML and in answers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Approximate { .. } => "approximate",
            Self::Split => "split",
        }
    }
}

/// The part of a limit that regions keep for themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserve {
    /// Of the rate.
    pub rate: Share,
    /// Of the burst.
    pub burst: Share,
}

impl Default for Reserve {
    fn default() -> Self {
        Self { rate: RESERVE_RATE_DEFAULT, burst: RESERVE_BURST_DEFAULT }
    }
}

/// A share of a whole, in parts per million (0 to 1,000,000).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Share(pub u32);

impl Share {
    /// Nothing of it.
    pub const NONE: Self = Self(0);
    /// All of it.
    pub const ALL: Self = Self(1_000_000);

    /// A share in percent.
    #[must_use]
    pub const fn percent(p: u32) -> Self {
        Self(p.saturating_mul(10_000))
    }

    /// This share of some tokens, rounded down.
    #[must_use]
    pub fn of_tokens(self, whole: Tokens) -> Tokens {
        whole.mul_div(i64::from(self.0), 1_000_000)
    }

    /// This share of a rate, rounded down.
    #[must_use]
    pub fn of_rate(self, whole: Rate) -> Rate {
        whole.mul_div(i64::from(self.0), 1_000_000)
    }
}

/// What to answer while the region's store (its Redis) gives no answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnStoreFailure {
    /// Let requests through (never in strict mode).
    Allow,
    /// Refuse, with 503 and `store_unavailable`.
    #[default]
    Deny,
    /// The embedded bucket takes over, empty at first (never in strict mode).
    Local,
}

/// What one region has of a limit without asking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Refill rate.
    pub rate: Rate,
    /// Capacity, without the overdraft.
    pub burst: Tokens,
    /// How far below zero the region may go (approximate mode).
    pub overdraft: Tokens,
}

impl Part {
    /// The capacity of the region's bucket: its burst and the overdraft below it. (A bucket whose level may go
    /// down to `-overdraft` is one that holds `overdraft` more, and is kept so.)
    #[must_use]
    pub fn cap(&self) -> Tokens {
        self.burst + self.overdraft
    }

    /// This part, or as much of it as the other has. The overdraft is a part of the capacity: only their sum is compared.
    #[must_use]
    pub fn least(&self, other: &Self) -> Self {
        let cap = self.cap().min(other.cap());
        let overdraft = self.overdraft.min(cap);
        Self { rate: self.rate.min(other.rate), burst: self.burst.min(cap - overdraft), overdraft }
    }

    /// The region's bucket as its store keeps it: the rate discounted for clock drift.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape { rate: self.rate.discount(DRIFT_PPM), cap: self.cap() }
    }
}

/// How a limit is cut up among the regions of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// The whole limit's rate.
    pub rate: Rate,
    /// The whole limit's burst, without the overshoot.
    pub burst: Tokens,
    /// What each region has, in the order of the cluster's regions. The overdrafts add up to at most the overshoot,
    /// rates and bursts to at most the whole; the rest is the pool's.
    pub parts: Vec<Part>,
    /// How long a slice of the pool is lent for.
    pub lease: Micros,
    /// Is there a pool at all? (Not in split mode.)
    pub pooled: bool,
}

impl Cut {
    /// All overdrafts together.
    #[must_use]
    pub fn overshoot(&self) -> Tokens {
        self.parts.iter().map(|p| p.overdraft).sum()
    }
}

impl Policy {
    /// The windows of its quota; `None`: it has no quota, or one whose windows slide.
    #[must_use]
    pub fn window(&self) -> Option<Window> {
        match self.limit {
            Limit::Quota(Quota { per, algorithm: Algorithm::FixedWindow, .. }) => Some(per),
            Limit::Quota(_) | Limit::Concurrent(_) | Limit::TokenBucket(_) | Limit::Unlimited => None,
        }
    }

    /// The permits of its limit; `None`: it is on something else.
    #[must_use]
    pub fn permits(&self) -> Option<Concurrent> {
        match self.limit {
            Limit::Concurrent(permits) => Some(permits),
            Limit::Quota(_) | Limit::TokenBucket(_) | Limit::Unlimited => None,
        }
    }

    /// Are its permits lent between regions?
    #[must_use]
    pub fn lends_permits(&self) -> bool {
        self.permits().is_some() && self.mode != Mode::Split
    }

    /// Is the other one the same but for the size of its quota?
    #[must_use]
    pub fn differs_in_quota_alone(&self, other: &Self) -> bool {
        let (Limit::Quota(mine), Limit::Quota(theirs)) = (&self.limit, &other.limit) else { return false };
        let limit = Limit::Quota(Quota { quota: theirs.quota, ..*mine });
        Self { limit, ..self.clone() } == *other
    }

    /// The weight of a region.
    #[must_use]
    pub fn weight(&self, region: &str) -> u32 {
        if self.weights.is_empty() { 1 } else { self.weights.get(region).copied().unwrap_or(0) }
    }

    /// Cuts the limit up for these regions; `None` if it is unlimited.
    #[must_use]
    pub fn cut(&self, regions: &[RegionName]) -> Option<Cut> {
        let (rate, burst) = match &self.limit {
            Limit::TokenBucket(bucket) => (bucket.rate(), bucket.burst()),
            Limit::Quota(quota) => (Rate::ZERO, quota.tokens()),
            Limit::Concurrent(concurrent) => (Rate::ZERO, concurrent.tokens()),
            Limit::Unlimited => return None,
        };
        let (reserve, overshoot) = match self.mode {
            Mode::Strict => (self.reserve, Tokens::ZERO),
            Mode::Approximate { max_overshoot } => (self.reserve, max_overshoot.of_tokens(burst)),
            Mode::Split => (Reserve { rate: Share::ALL, burst: Share::ALL }, Tokens::ZERO),
        };
        let weights: Vec<u32> = regions.iter().map(|region| self.weight(region)).collect();
        let shares = |whole: Tokens| match self.limit {
            Limit::TokenBucket(_) | Limit::Unlimited => shares_of(whole.0, &weights).map(Tokens).collect(),
            Limit::Quota(_) | Limit::Concurrent(_) => whole_shares(whole, &weights),
        };
        let rates = shares_of(reserve.rate.of_rate(rate).0, &weights).map(Rate);
        let bursts = shares(reserve.burst.of_tokens(burst));
        let overdrafts = shares(overshoot);
        let parts = rates.zip(bursts).zip(overdrafts).map(|((rate, burst), overdraft)| {
            let part = Part { rate, burst, overdraft };
            // A reserve that cannot hold one request is of no use to anyone; in the pool it is.
            let useless = self.mode != Mode::Split && part.cap() < Tokens::whole(1);
            if useless { Part { overdraft: part.overdraft, ..Part::default() } } else { part }
        });
        let parts = parts.collect();
        let fill = match &self.limit {
            // What is lent of a quota does not come back before the window's end.
            Limit::Quota(quota) => quota.per.shortest(),
            // Long enough for what holders are told: see there.
            Limit::Concurrent(permits) if self.mode != Mode::Split => {
                return Some(Cut { rate, burst, parts, lease: lent::lease(permits.ttl), pooled: true });
            }
            _ => rate.time_for(burst).unwrap_or(LEASE_MAX),
        };
        let lease = fill.clamp(LEASE_MIN, LEASE_MAX);
        Some(Cut { rate, burst, parts, lease, pooled: self.mode != Mode::Split })
    }
}

/// Shares of a whole by weight, rounded down.
fn shares_of(whole: i64, weights: &[u32]) -> impl Iterator<Item = i64> {
    let total = total(weights);
    weights.iter().map(move |weight| Tokens(whole).mul_div(i64::from(*weight), total).0)
}

/// The same in whole tokens that add up to the whole (rounded down to whole tokens), by Jefferson's method (d'Hondt's): each
/// token that rounding left over goes to the region with the largest weight per token that it would then have. So no share
/// gets smaller when the whole gets larger (Balinski and Young, *Fair Representation*, 1982), which a raise of a quota counts on.
fn whole_shares(whole: Tokens, weights: &[u32]) -> Vec<Tokens> {
    let tokens = whole.floor();
    let mut shares: Vec<i64> = shares_of(tokens, weights).collect();
    if total(weights) > 0 {
        for _ in sum(&shares)..tokens {
            // Weight / (share + 1), the first one of the largest.
            let claims = shares.iter_mut().zip(weights).rev();
            let first = claims.max_by(|(a, weight_a), (b, weight_b)| {
                let claim = |weight: u32, other: i64| {
                    i128::from(weight).saturating_mul(i128::from(other).saturating_add(1))
                };
                claim(**weight_a, **b).cmp(&claim(**weight_b, **a))
            });
            if let Some((share, _)) = first {
                *share = share.saturating_add(1);
            }
        }
    }
    shares.into_iter().map(Tokens::whole).collect()
}

fn sum(shares: &[i64]) -> i64 {
    shares.iter().copied().fold(0, i64::saturating_add)
}

fn total(weights: &[u32]) -> i64 {
    weights.iter().map(|weight| i64::from(*weight)).fold(0, i64::saturating_add)
}

/// Names one bucket: a policy and the values that a request had for its keys. Made in `matching`, as a hash of
/// both that nobody can make collide; the same in every region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BucketId(pub [u8; 16]);

impl std::fmt::Display for BucketId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(mode: Mode) -> Policy {
        Policy {
            name: "p".into(),
            domain: "d".into(),
            matches: vec![KeyMatch { key: "k".into(), value: ValueMatch::Any }],
            limit: Limit::TokenBucket(TokenBucket { amount: 100, per: Unit::Second, burst: 200 }),
            mode,
            reserve: Reserve { rate: Share::percent(10), burst: Share::percent(10) },
            weights: BTreeMap::new(),
            wait: Micros::ZERO,
            on_store_failure: OnStoreFailure::Deny,
            shadow: false,
        }
    }

    #[test]
    fn parts_never_exceed_the_whole() {
        let regions: Vec<RegionName> = ["a", "b", "c"].map(Into::into).to_vec();
        let mut p = policy(Mode::Split);
        p.weights = [("a".into(), 2), ("b".into(), 1)].into();
        let cut = p.cut(&regions).unwrap();
        assert_eq!(cut.parts[0].burst, Tokens(133_333_333));
        assert_eq!(cut.parts[2], Part::default());
        assert!(cut.parts.iter().map(|p| p.burst).sum::<Tokens>() <= cut.burst);
        assert!(!cut.pooled);

        let cut = policy(Mode::Approximate { max_overshoot: Share::percent(30) }).cut(&regions).unwrap();
        assert_eq!(cut.overshoot(), Tokens::whole(60));
        assert_eq!(cut.parts[1].rate, Rate(3_333_333));
        assert_eq!(cut.lease, LEASE_MIN);

        let mut tiny = policy(Mode::Strict);
        tiny.limit = Limit::TokenBucket(TokenBucket { amount: 1, per: Unit::Second, burst: 1 });
        assert_eq!(tiny.cut(&regions).unwrap().parts, vec![Part::default(); 3]);
    }

    #[test]
    fn quotas_and_permits_are_cut_into_whole_tokens_that_add_up() {
        let regions: Vec<RegionName> = ["a", "b", "c"].map(Into::into).to_vec();
        let bursts = |p: &Policy| -> Vec<i64> {
            p.cut(&regions).unwrap().parts.iter().map(|part| part.burst.0 / 1_000_000).collect()
        };
        let month = Window::Calendar(Unit::Month);
        let mut p = policy(Mode::Split);
        p.limit = Limit::Quota(Quota { quota: 1000, per: month, algorithm: Algorithm::FixedWindow });
        assert_eq!(bursts(&p), [334, 333, 333]);
        assert_eq!(p.cut(&regions).unwrap().rate, Rate::ZERO);
        p.weights = [("a".into(), 1), ("b".into(), 3), ("c".into(), 0)].into();
        p.limit = Limit::Concurrent(Concurrent { permits: 3, ttl: TTL_DEFAULT });
        assert_eq!(bursts(&p), [1, 2, 0]);
        for permits in 0..50 {
            p.limit = Limit::Concurrent(Concurrent { permits, ttl: TTL_DEFAULT });
            assert_eq!(bursts(&p).iter().sum::<i64>(), permits as i64);
        }
        let mut last = vec![0; 3];
        p.weights = [("a".into(), 53), ("b".into(), 24), ("c".into(), 23)].into();
        for quota in 0..2000 {
            p.limit = Limit::Quota(Quota { quota, per: month, algorithm: Algorithm::FixedWindow });
            let next = bursts(&p);
            assert!(next.iter().zip(&last).all(|(n, l)| n >= l), "{quota}: {last:?}, {next:?}");
            assert_eq!(next.iter().sum::<i64>(), quota as i64);
            last = next;
        }
        p.weights = [("a".into(), 1), ("b".into(), 3), ("c".into(), 0)].into();
        p.mode = Mode::Strict;
        p.limit = Limit::Quota(Quota { quota: 205, per: month, algorithm: Algorithm::FixedWindow });
        assert_eq!(bursts(&p), [5, 15, 0], "10% are reserved");
    }
}
