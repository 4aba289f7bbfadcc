//! The books of all buckets, in shards that copies of the pool share until one of them writes.
//!
//! A snapshot is written from a copy. To copy a million books one by one would keep entries from being applied for a second; a copy
//! of the shards is some thousand counters, and who writes to a shard that is shared copies that shard alone.

use super::ledger::Ledger;
use crate::quota::policy::BucketId;
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

/// A bucket's shard is its first twelve bits: a few hundred books each, of a million.
type Number = u16;
type Shard = BTreeMap<BucketId, Ledger>;

/// A map from buckets to their books, in the order of the buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Shards {
    /// None of them is empty.
    shards: BTreeMap<Number, Arc<Shard>>,
    len: usize,
}

impl Shards {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, bucket: &BucketId) -> Option<&Ledger> {
        self.shards.get(&number(bucket))?.get(bucket)
    }

    pub(super) fn contains_key(&self, bucket: &BucketId) -> bool {
        self.get(bucket).is_some()
    }

    pub(super) fn get_mut(&mut self, bucket: &BucketId) -> Option<&mut Ledger> {
        let shard = self.shards.get_mut(&number(bucket)).filter(|shard| shard.contains_key(bucket))?;
        Arc::make_mut(shard).get_mut(bucket)
    }

    pub(super) fn get_or_insert_with(
        &mut self,
        bucket: BucketId,
        new: impl FnOnce() -> Ledger,
    ) -> &mut Ledger {
        let shard = Arc::make_mut(self.shards.entry(number(&bucket)).or_default());
        let len = &mut self.len;
        shard.entry(bucket).or_insert_with(|| {
            *len = len.saturating_add(1);
            new()
        })
    }

    pub(super) fn remove(&mut self, bucket: &BucketId) {
        let at = number(bucket);
        let Some(shard) = self.shards.get_mut(&at).filter(|shard| shard.contains_key(bucket)) else { return };
        let shard = Arc::make_mut(shard);
        shard.remove(bucket);
        self.len = self.len.saturating_sub(1);
        if shard.is_empty() {
            self.shards.remove(&at);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&BucketId, &Ledger)> {
        self.shards.values().flat_map(|shard| shard.iter())
    }

    /// Those behind `after`.
    pub(super) fn after(&self, after: Option<BucketId>) -> impl Iterator<Item = (&BucketId, &Ledger)> {
        let shards = self.shards.range(after.as_ref().map_or(0, number)..);
        shards.flat_map(move |(_, shard)| shard.range((behind(after), Bound::Unbounded)))
    }

    /// The same, to be written to. No further shard is copied than the iterator is taken.
    pub(super) fn after_mut(
        &mut self,
        after: Option<BucketId>,
    ) -> impl Iterator<Item = (&BucketId, &mut Ledger)> {
        let shards = self.shards.range_mut(after.as_ref().map_or(0, number)..);
        shards.flat_map(move |(_, shard)| Arc::make_mut(shard).range_mut((behind(after), Bound::Unbounded)))
    }

    /// All that are of such a policy, to be written to. Shards without are not copied.
    pub(super) fn of_mut<'a>(
        &'a mut self,
        of: &'a dyn Fn(u32) -> bool,
    ) -> impl Iterator<Item = (&'a BucketId, &'a mut Ledger)> {
        let shards = self.shards.values_mut();
        let shards = shards.filter(|shard| shard.values().any(|ledger| of(ledger.policy)));
        shards.flat_map(|shard| Arc::make_mut(shard).iter_mut()).filter(|(_, ledger)| of(ledger.policy))
    }

    /// Forgets all that are of such a policy.
    pub(super) fn forget(&mut self, of: impl Fn(u32) -> bool) {
        for shard in self.shards.values_mut().filter(|shard| shard.values().any(|ledger| of(ledger.policy))) {
            Arc::make_mut(shard).retain(|_, ledger| !of(ledger.policy));
        }
        self.shards.retain(|_, shard| !shard.is_empty());
        self.len = self.shards.values().map(|shard| shard.len()).sum();
    }
}

fn number(bucket: &BucketId) -> Number {
    let [first, second, ..] = bucket.0;
    Number::from(first) << 4 | Number::from(second >> 4)
}

fn behind(after: Option<BucketId>) -> Bound<BucketId> {
    after.map_or(Bound::Unbounded, Bound::Excluded)
}

impl Serialize for Shards {
    /// As a [`BTreeMap`], which it was before.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len))?;
        for (bucket, ledger) in self.iter() {
            map.serialize_entry(bucket, ledger)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Shards {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Shards;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("books by bucket")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Shards, A::Error> {
        let mut shards = Shards::default();
        while let Some((bucket, ledger)) = entries.next_entry()? {
            shards.get_or_insert_with(bucket, || ledger);
        }
        Ok(shards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::amount::Micros;

    fn bucket(n: u16) -> BucketId {
        let mut id = [0; 16];
        id[..2].copy_from_slice(&n.wrapping_mul(40_503).to_be_bytes());
        BucketId(id)
    }

    fn filled() -> Shards {
        let mut shards = Shards::default();
        for n in 0..10_000 {
            shards.get_or_insert_with(bucket(n), || Ledger::new(u32::from(n % 3), Micros::ZERO));
        }
        shards
    }

    #[test]
    fn it_is_stored_as_a_map_in_order() {
        let shards = filled();
        let map: BTreeMap<BucketId, Ledger> = shards.iter().map(|(id, l)| (*id, l.clone())).collect();
        assert_eq!(map.len(), shards.len());
        assert!(shards.iter().map(|(id, _)| *id).eq(map.keys().copied()));
        let bytes = postcard::to_stdvec(&map).unwrap();
        assert_eq!(postcard::to_stdvec(&shards).unwrap(), bytes);
        assert_eq!(postcard::from_bytes::<Shards>(&bytes).unwrap(), shards);
        let from = bucket(5);
        assert!(shards.after(Some(from)).map(|(id, _)| *id).eq(map.keys().copied().filter(|id| *id > from)));
    }

    #[test]
    fn a_copy_shares_what_nobody_writes_to() {
        let mut shards = filled();
        let copy = shards.clone();
        shards.get_mut(&bucket(7)).unwrap().policy = 9;
        shards.remove(&bucket(8));
        assert!(shards.get_mut(&bucket(10_001)).is_none());
        let shared = |a: &Shards, b: &Shards| {
            a.shards.values().zip(b.shards.values()).filter(|(a, b)| Arc::ptr_eq(a, b)).count()
        };
        assert!(copy.shards.len() > 4_000);
        assert_eq!(shared(&shards, &copy), copy.shards.len() - 2);
        assert_eq!(
            (copy.get(&bucket(7)).unwrap().policy, shards.get(&bucket(7)).unwrap().policy),
            (7 % 3, 9)
        );
        assert!(copy.contains_key(&bucket(8)) && !shards.contains_key(&bucket(8)));
        assert_eq!((shards.len(), copy.len()), (9_999, 10_000));
        shards.forget(|policy| policy == 9);
        assert_eq!(shards.len(), 9_998);
        assert_eq!(
            shards.clone().of_mut(&|policy| policy == 1).count(),
            shards.iter().filter(|(_, l)| l.policy == 1).count()
        );
    }
}
