//! Maps by bucket, or by a policy's number.
//!
//! A bucket's name is a hash already, of which anybody can compute as many as he likes: what a map needs on top is a secret, so
//! that nobody can tell which names meet in it. The two halves of a name, each with a secret of this process, are multiplied, and the
//! halves of the product folded together, twice. That is a tenth of the work of the standard library's hash, which every decision
//! would do a dozen times.

use crate::quota::policy::BucketId;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

/// The golden ratio's fraction, in 64 bits.
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// A map by bucket.
pub type BucketMap<V> = HashMap<BucketId, V, Seeded>;
/// A map by a policy's number.
pub type PolicyMap<V> = HashMap<u32, V, Seeded>;

/// This process' secrets.
#[derive(Clone, Copy, Debug)]
pub struct Seeded {
    low: u64,
    high: u64,
}

impl Default for Seeded {
    fn default() -> Self {
        static SECRETS: LazyLock<(u64, u64)> = LazyLock::new(|| {
            let random = RandomState::new();
            (random.hash_one(0), random.hash_one(1))
        });
        Self { low: SECRETS.0, high: SECRETS.1 }
    }
}

impl BuildHasher for Seeded {
    type Hasher = Folded;

    fn build_hasher(&self) -> Folded {
        Folded { seeds: *self, state: 0 }
    }
}

/// The hash of one name. Names are all of one length, so that their length says nothing.
#[derive(Clone, Debug)]
pub struct Folded {
    seeds: Seeded,
    state: u64,
}

impl Folded {
    fn fold(&mut self, low: u64, high: u64) {
        let wide = u128::from(low ^ self.seeds.low ^ self.state) * u128::from(high ^ self.seeds.high);
        self.state = wide as u64 ^ (wide >> 64) as u64;
    }
}

impl Hasher for Folded {
    fn finish(&self) -> u64 {
        // Names that differ in few bits would come to lie in a pattern after one multiplication.
        let wide = u128::from(self.state ^ self.seeds.low) * u128::from(ODD);
        wide as u64 ^ (wide >> 64) as u64
    }

    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(16) {
            let mut room = [0; 16];
            room.iter_mut().zip(part).for_each(|(to, from)| *to = *from);
            let both = u128::from_le_bytes(room);
            self.fold(both as u64, (both >> 64) as u64);
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.fold(u64::from(number), 0);
    }

    fn write_usize(&mut self, _length: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn hash(seeds: Seeded, n: u64) -> u64 {
        // Names that differ in a few bits alone: as bad as it gets.
        seeds.hash_one(BucketId((u128::from(n) << 40).to_le_bytes()))
    }

    #[test]
    fn names_spread_over_the_bits_that_a_map_looks_at() {
        let seeds = Seeded::default();
        let hashes: Vec<u64> = (0..4_096).map(|n| hash(seeds, n)).collect();
        // A map takes the lowest bits for the place and the highest seven to tell apart what is there. Of 4,096 in as many places about
        // 63% are taken.
        let places: HashSet<u64> = hashes.iter().map(|h| h % 4_096).collect();
        assert!(places.len() > 2_300, "{}", places.len());
        let tags: HashSet<u64> = hashes.iter().map(|h| h >> 57).collect();
        assert_eq!(tags.len(), 128);
        let numbers: HashSet<u64> = (0..4_096_u32).map(|n| seeds.hash_one(n) % 4_096).collect();
        assert!(numbers.len() > 2_000, "{}", numbers.len());
    }

    #[test]
    fn which_names_meet_is_a_secret() {
        let mine = Seeded { low: 0x0123_4567_89ab_cdef, high: 0x0fed_cba9_8765_4321 };
        let other = Seeded { low: 0x1357_9bdf_0246_8ace, ..mine };
        // Those that share a place under one secret ...
        let meet: Vec<u64> = (0..100_000).filter(|n| hash(mine, *n).is_multiple_of(1_024)).collect();
        assert!(meet.len() > 50);
        // ... are spread under another.
        let places: HashSet<u64> = meet.iter().map(|n| hash(other, *n) % 1_024).collect();
        assert!(places.len() * 4 > meet.len() * 3, "{} of {}", places.len(), meet.len());
    }
}
