//! Which key a request is about.

use anyhow::{Context as _, ensure};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most keys.
pub const KEYS_MAX: u64 = 1_000_000_000;
/// As skewed as a web site's pages.
const ZIPF_EXPONENT: f64 = 0.99;
const EXPONENT_MAX: f64 = 10.0;

/// How requests are spread over keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// Each as often as any other.
    Uniform,
    /// The n-th as often as one over n to the power of this.
    Zipf(f64),
    /// One after the other, and from the beginning again.
    Sequential,
}

impl std::str::FromStr for Distribution {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text.split_once(':').map_or((text, None), |(name, exponent)| (name, Some(exponent))) {
            ("uniform", None) => Ok(Self::Uniform),
            ("sequential", None) => Ok(Self::Sequential),
            ("zipf", None) => Ok(Self::Zipf(ZIPF_EXPONENT)),
            ("zipf", Some(exponent)) => {
                let exponent: f64 = exponent.parse().context("the exponent of zipf is a number: zipf:1.1")?;
                ensure!(
                    exponent > 0.0 && exponent <= EXPONENT_MAX,
                    "the exponent of zipf is above 0 and at most 10"
                );
                Ok(Self::Zipf(exponent))
            }
            _ => anyhow::bail!("want uniform, zipf, zipf:EXPONENT or sequential"),
        }
    }
}

/// Keys for one caller, the same from run to run.
#[derive(Clone, Debug)]
pub struct Keys {
    count: u64,
    random: SplitMix,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Uniform,
    Zipf(Zipf),
    /// All callers together go through them.
    Sequential(Arc<AtomicU64>),
}

impl Keys {
    /// Keys from 0 to `count - 1`; `next` is where callers that go through them in turn are.
    #[must_use]
    pub fn new(distribution: Distribution, count: u64, seed: u64, next: &Arc<AtomicU64>) -> Self {
        let count = count.max(1);
        let kind = match distribution {
            Distribution::Uniform => Kind::Uniform,
            Distribution::Zipf(exponent) => Kind::Zipf(Zipf::new(count, exponent)),
            Distribution::Sequential => Kind::Sequential(Arc::clone(next)),
        };
        Self { count, random: SplitMix(seed), kind }
    }

    /// The next one.
    pub fn next(&mut self) -> u64 {
        match &self.kind {
            Kind::Uniform => self.random.below(self.count),
            Kind::Zipf(zipf) => zipf.sample(&mut self.random) - 1,
            Kind::Sequential(next) => next.fetch_add(1, Ordering::Relaxed) % self.count,
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `count`; the bias of a multiplication by 2^-64 is of no matter here.
    fn below(&mut self, count: u64) -> u64 {
        u64::try_from((u128::from(self.next()) * u128::from(count)) >> 64).unwrap_or(0)
    }

    /// From 0 to less than 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Zipf's law by rejection-inversion (Hörmann and Derflinger, *Rejection-inversion to generate variates from monotone discrete
/// distributions*, 1996): no table, however many keys there are.
#[derive(Clone, Debug)]
struct Zipf {
    count: f64,
    exponent: f64,
    first: f64,
    last: f64,
    shortcut: f64,
}

impl Zipf {
    fn new(count: u64, exponent: f64) -> Self {
        let mut zipf = Self { count: count as f64, exponent, first: 0.0, last: 0.0, shortcut: 0.0 };
        zipf.first = zipf.area(1.5) - 1.0;
        zipf.last = zipf.area(zipf.count + 0.5);
        zipf.shortcut = 2.0 - zipf.area_inverse(zipf.area(2.5) - zipf.weight(2.0));
        zipf
    }

    /// From 1 to the count.
    fn sample(&self, random: &mut SplitMix) -> u64 {
        loop {
            let u = self.last + random.unit() * (self.first - self.last);
            let x = self.area_inverse(u);
            let k = x.round().clamp(1.0, self.count);
            if k - x <= self.shortcut || u >= self.area(k + 0.5) - self.weight(k) {
                return k as u64;
            }
        }
    }

    fn weight(&self, x: f64) -> f64 {
        (-self.exponent * x.ln()).exp()
    }

    /// The integral of the weight: (x^(1-s) - 1) / (1-s), or its limit, the logarithm.
    fn area(&self, x: f64) -> f64 {
        let (log, one_less) = (x.ln(), 1.0 - self.exponent);
        if (one_less * log).abs() < 1e-8 { log } else { (one_less * log).exp_m1() / one_less }
    }

    fn area_inverse(&self, area: f64) -> f64 {
        let one_less = 1.0 - self.exponent;
        let t = (area * one_less).max(-1.0);
        if t.abs() < 1e-8 { area.exp() } else { (t.ln_1p() / one_less).exp() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DRAWS: usize = 200_000;

    /// How often each of so many keys comes up.
    fn drawn(distribution: &str, count: u64) -> Vec<usize> {
        let mut keys = Keys::new(distribution.parse().unwrap(), count, 7, &Arc::default());
        let mut drawn = vec![0; usize::try_from(count).unwrap()];
        (0..DRAWS).for_each(|_| drawn[usize::try_from(keys.next()).unwrap()] += 1);
        drawn
    }

    /// Is it about this share of all draws?
    fn is_share(drawn: usize, share: f64) -> bool {
        (drawn as f64 / DRAWS as f64 - share).abs() < 0.1 * share + 0.001
    }

    #[test]
    fn zipf_follows_its_law() {
        for (text, exponent) in [("zipf:0.5", 0.5), ("zipf", 0.99), ("zipf:1", 1.0), ("zipf:2.5", 2.5)] {
            let drawn = drawn(text, 100);
            let weight = |key: usize| ((key + 1) as f64).powf(-exponent);
            let all: f64 = (0..100).map(weight).sum();
            for key in [0, 1, 2, 9, 99] {
                assert!(is_share(drawn[key], weight(key) / all), "{text} {key}: {}", drawn[key]);
            }
        }
        assert_eq!(drawn("zipf", 1), [DRAWS]);
    }

    #[test]
    fn uniform_is_even_and_sequential_complete() {
        assert!(drawn("uniform", 50).iter().all(|count| is_share(*count, 0.02)));
        assert_eq!(drawn("sequential", 50), [DRAWS / 50; 50]);
        assert_eq!(drawn("uniform", 1), [DRAWS]);
    }

    #[test]
    fn callers_differ_and_runs_do_not() {
        let first = |seed| {
            let mut keys = Keys::new(Distribution::Uniform, KEYS_MAX, seed, &Arc::default());
            [keys.next(), keys.next(), keys.next()]
        };
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn what_is_no_distribution() {
        for bad in ["", "zipf:", "zipf:0", "zipf:-1", "zipf:nan", "zipf:11", "normal", "uniform:1"] {
            assert!(bad.parse::<Distribution>().is_err(), "{bad}");
        }
    }
}
