//! Token bucket arithmetic of one region: reserve and lease in one bucket.
//!
//! The Lua in `store/redis/` does the same, number for number; a test holds them against each other.

use super::amount::{Micros, Rate, Tokens};

/// What a region's bucket is without a lease: its reserve (rate discounted for clock drift, capacity with the overdraft).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Refill rate.
    pub rate: Rate,
    /// Capacity.
    pub cap: Tokens,
}

/// The state of a bucket that the store does not hold: `level` at store time `at`, refilling from then on
/// (not before: `at` may lie in the future).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unseen {
    /// Tokens in it ...
    pub level: Tokens,
    /// ... at this store time.
    pub at: Micros,
}
