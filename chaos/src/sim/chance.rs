//! Seeded chance: everything that a run leaves to it comes from one stream, so a seed repeats.

use quorate::quota::amount::Micros;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::sync::{Arc, Mutex, PoisonError};

/// A stream of chance. Clones share it.
#[derive(Clone, Debug)]
pub struct Chance(Arc<Mutex<ChaCha8Rng>>);

impl Chance {
    /// The stream of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(ChaCha8Rng::seed_from_u64(seed))))
    }

    /// A whole number from `lo` to `hi`, both included.
    #[must_use]
    pub fn int(&self, lo: i64, hi: i64) -> i64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).random_range(lo..=hi.max(lo))
    }

    /// One of `0..n`.
    #[must_use]
    pub fn index(&self, n: usize) -> usize {
        let last = i64::try_from(n).unwrap_or(i64::MAX).saturating_sub(1);
        usize::try_from(self.int(0, last)).unwrap_or(0)
    }

    /// Yes, in so many of a hundred cases.
    #[must_use]
    pub fn percent(&self, p: i64) -> bool {
        self.int(0, 99) < p
    }

    /// One of these; there must be one.
    #[must_use]
    pub fn pick<T: Copy>(&self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// A time between two.
    #[must_use]
    pub fn time(&self, lo: Micros, hi: Micros) -> Micros {
        Micros(self.int(lo.0, hi.0))
    }

    /// Another order of these.
    pub fn shuffle<T>(&self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}
