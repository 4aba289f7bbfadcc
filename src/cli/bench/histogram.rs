//! Times to three figures: like an HDR histogram, each power of two is divided into as many steps.

use std::time::Duration;

/// Steps in each power of two: no time is told more than 1/128 too long.
const STEPS: u64 = 128;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Powers of two above the first [`STEPS`], of 64 bits.
const POWERS: usize = 64 - STEP_BITS as usize;

/// Counts of times, in nanoseconds.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum: u128,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; (POWERS + 1) * STEPS as usize], total: 0, sum: 0, max: 0 }
    }
}

impl Histogram {
    /// Counts a time.
    pub fn record(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.counts.get_mut(index(nanos)) {
            *count += 1;
        }
        self.total += 1;
        self.sum += u128::from(nanos);
        self.max = self.max.max(nanos);
    }

    /// Adds what another one has counted.
    pub fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, its)| *mine += its);
        self.total += other.total;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// How many were counted.
    #[cfg(test)]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The longest.
    #[must_use]
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max)
    }

    /// The mean; zero if nothing was counted.
    #[must_use]
    pub fn mean(&self) -> Duration {
        let mean = self.sum.checked_div(u128::from(self.total)).unwrap_or(0);
        Duration::from_nanos(u64::try_from(mean).unwrap_or(u64::MAX))
    }

    /// The time that so many in a thousand do not exceed; zero if nothing was counted.
    #[must_use]
    pub fn per_mille(&self, share: u64) -> Duration {
        let rank = (u128::from(self.total) * u128::from(share)).div_ceil(1_000).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= rank {
                return Duration::from_nanos(longest(index).min(self.max));
            }
        }
        Duration::ZERO
    }
}

/// Where a time is counted: below [`STEPS`] each by itself, above by its power of two and the bits behind the first.
fn index(nanos: u64) -> usize {
    if nanos < STEPS {
        return usize::try_from(nanos).unwrap_or(0);
    }
    let power = u64::from(nanos.ilog2() - STEP_BITS);
    usize::try_from((power + 1) * STEPS + (nanos >> power) - STEPS).unwrap_or(usize::MAX)
}

/// The longest time that is counted there.
fn longest(index: usize) -> u64 {
    let index = u64::try_from(index).unwrap_or(u64::MAX);
    if index < STEPS {
        return index;
    }
    let (power, step) = (index / STEPS - 1, index % STEPS);
    ((STEPS + step) << power) + ((1 << power) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_has_a_place_that_tells_it_closely() {
        let mut last = 0;
        for nanos in (0..2_000).chain((11..63).flat_map(|bits| [(1 << bits) - 1, 1 << bits, (1 << bits) + 7]))
        {
            let place = index(nanos);
            assert!(place >= last, "{nanos}");
            last = place;
            let told = longest(place);
            assert!(told >= nanos && told - nanos <= nanos / STEPS, "{nanos}: {told}");
        }
        assert!(index(u64::MAX) < Histogram::default().counts.len());
    }

    #[test]
    fn shares() {
        let mut times = Histogram::default();
        assert_eq!((times.per_mille(500), times.mean()), (Duration::ZERO, Duration::ZERO));
        for n in 1..=1_000 {
            times.record(Duration::from_micros(n));
        }
        for (share, micros) in [(500, 500), (900, 900), (990, 990), (999, 999), (1_000, 1_000)] {
            let told = times.per_mille(share).as_nanos();
            let exact = u128::from(micros * 1_000_u64);
            assert!(told >= exact && told <= exact + exact / 128, "{share}: {told}");
        }
        assert_eq!(times.max(), Duration::from_millis(1));
        assert_eq!(times.mean(), Duration::from_nanos(500_500));
        let mut two = times.clone();
        two.add(&times);
        assert_eq!((two.total(), two.per_mille(900)), (2_000, times.per_mille(900)));
    }
}
