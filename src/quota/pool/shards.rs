//! The books of all buckets, in shards of leaves that copies of the pool share until one of them writes.
//!
//! A snapshot is written from a copy. To copy a million books one by one would keep entries from being applied for a second; a copy
//! of the shards is some thousand counters. Who writes to a shard that is shared copies its sixteen counters, and of its leaves the
//! one alone that is written to: some fifteen books, of a million.

use super::ledger::Ledger;
use crate::quota::policy::BucketId;
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A bucket's shard is its first twelve bits.
type Number = u16;
/// A bucket's leaf in its shard is the next four bits; `None`: no books.
type Shard = [Option<Arc<Leaf>>; LEAVES];

const LEAVES: usize = 16;

/// A map from buckets to their books, in the order of the buckets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Shards {
    /// None of them is empty.
    shards: BTreeMap<Number, Arc<Shard>>,
    len: usize,
}

/// Books in the order of their buckets; at least one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Leaf(Vec<(BucketId, Ledger)>);

impl Leaf {
    fn find(&self, bucket: &BucketId) -> Result<usize, usize> {
        self.0.binary_search_by(|(id, _)| id.cmp(bucket))
    }

    /// Where those behind `after` begin.
    fn behind(&self, after: Option<BucketId>) -> usize {
        after.map_or(0, |after| self.0.partition_point(|(id, _)| *id <= after))
    }

    fn has(&self, of: impl Fn(u32) -> bool) -> bool {
        self.0.iter().any(|(_, ledger)| of(ledger.policy))
    }

    fn insert(&mut self, at: usize, bucket: BucketId, ledger: Ledger) {
        if self.0.len() == self.0.capacity() {
            // Twice as much would be a third of all memory, for nothing.
            self.0.reserve_exact(2);
        }
        self.0.insert(at, (bucket, ledger));
    }
}

impl Shards {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, bucket: &BucketId) -> Option<&Ledger> {
        let (number, leaf) = place(bucket);
        let leaf = self.shards.get(&number)?.get(leaf)?.as_deref()?;
        leaf.0.get(leaf.find(bucket).ok()?).map(|(_, ledger)| ledger)
    }

    pub(super) fn contains_key(&self, bucket: &BucketId) -> bool {
        self.get(bucket).is_some()
    }

    pub(super) fn get_mut(&mut self, bucket: &BucketId) -> Option<&mut Ledger> {
        let (number, leaf) = place(bucket);
        let shard = self.shards.get_mut(&number)?;
        let at = shard.get(leaf)?.as_ref()?.find(bucket).ok()?;
        let leaf = Arc::make_mut(shard).get_mut(leaf)?.as_mut()?;
        Arc::make_mut(leaf).0.get_mut(at).map(|(_, ledger)| ledger)
    }

    /// Never `None`.
    pub(super) fn get_or_insert_with(
        &mut self,
        bucket: BucketId,
        new: impl FnOnce() -> Ledger,
    ) -> Option<&mut Ledger> {
        let (number, leaf) = place(&bucket);
        let shard = Arc::make_mut(self.shards.entry(number).or_default());
        let leaf = Arc::make_mut(shard.get_mut(leaf)?.get_or_insert_default());
        let at = leaf.find(&bucket).unwrap_or_else(|at| {
            leaf.insert(at, bucket, new());
            self.len = self.len.saturating_add(1);
            at
        });
        leaf.0.get_mut(at).map(|(_, ledger)| ledger)
    }

    pub(super) fn remove(&mut self, bucket: &BucketId) {
        if !self.contains_key(bucket) {
            return;
        }
        let (number, leaf) = place(bucket);
        let Some(shard) = self.shards.get_mut(&number).map(Arc::make_mut) else { return };
        if let Some(leaf) = shard.get_mut(leaf) {
            keep(leaf, |id, _| id != bucket);
            self.len = self.len.saturating_sub(1);
        }
        if shard.iter().all(Option::is_none) {
            self.shards.remove(&number);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&BucketId, &Ledger)> {
        self.after(None)
    }

    /// Those behind `after`.
    pub(super) fn after(&self, after: Option<BucketId>) -> impl Iterator<Item = (&BucketId, &Ledger)> {
        let shards = self.shards.range(after.as_ref().map_or(0, |after| place(after).0)..);
        let leaves = shards.flat_map(|(_, shard)| shard.iter().flatten());
        leaves.flat_map(move |leaf| leaf.0.iter().skip(leaf.behind(after)).map(|(id, ledger)| (id, ledger)))
    }

    /// The same, to be written to. No further leaf is copied than the iterator is taken.
    pub(super) fn after_mut(
        &mut self,
        after: Option<BucketId>,
    ) -> impl Iterator<Item = (&BucketId, &mut Ledger)> {
        let shards = self.shards.range_mut(after.as_ref().map_or(0, |after| place(after).0)..);
        let leaves = shards.flat_map(|(_, shard)| Arc::make_mut(shard).iter_mut().flatten());
        leaves
            .flat_map(move |leaf| {
                let first = leaf.behind(after);
                let books = if first == leaf.0.len() { &mut [] } else { &mut *Arc::make_mut(leaf).0 };
                books.iter_mut().skip(first)
            })
            .map(|(id, ledger)| (&*id, ledger))
    }

    /// All that are of such a policy, to be written to. Leaves without are not copied.
    pub(super) fn of_mut<'a>(
        &'a mut self,
        of: &'a dyn Fn(u32) -> bool,
    ) -> impl Iterator<Item = (&'a BucketId, &'a mut Ledger)> {
        let leaves =
            self.shards.values_mut().filter(move |shard| shard.iter().flatten().any(|leaf| leaf.has(of)));
        let leaves = leaves.flat_map(|shard| Arc::make_mut(shard).iter_mut().flatten());
        let books = leaves.filter(move |leaf| leaf.has(of)).flat_map(|leaf| Arc::make_mut(leaf).0.iter_mut());
        books.filter(move |(_, ledger)| of(ledger.policy)).map(|(id, ledger)| (&*id, ledger))
    }

    /// Forgets all that are of such a policy.
    pub(super) fn forget(&mut self, of: impl Fn(u32) -> bool) {
        for shard in self.shards.values_mut() {
            if !shard.iter().flatten().any(|leaf| leaf.has(&of)) {
                continue;
            }
            for leaf in Arc::make_mut(shard) {
                if leaf.as_ref().is_some_and(|leaf| leaf.has(&of)) {
                    keep(leaf, |_, ledger| !of(ledger.policy));
                }
            }
        }
        self.shards.retain(|_, shard| shard.iter().any(Option::is_some));
        self.len =
            self.shards.values().flat_map(|shard| shard.iter().flatten()).map(|leaf| leaf.0.len()).sum();
    }
}

/// Keeps these books alone.
fn keep(leaf: &mut Option<Arc<Leaf>>, which: impl Fn(&BucketId, &Ledger) -> bool) {
    let Some(books) = leaf.as_mut().map(Arc::make_mut) else { return };
    books.0.retain(|(id, ledger)| which(id, ledger));
    books.0.shrink_to_fit();
    if books.0.is_empty() {
        *leaf = None;
    }
}

/// The number of a bucket's shard, and of its leaf there.
fn place(bucket: &BucketId) -> (Number, usize) {
    let [first, second, ..] = bucket.0;
    (Number::from(first) << 4 | Number::from(second >> 4), usize::from(second) % LEAVES)
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
        let leaves = |shards: &Shards| -> Vec<Arc<Leaf>> {
            shards.shards.values().flat_map(|shard| shard.iter().flatten().cloned()).collect()
        };
        let (left, right) = (leaves(&shards), leaves(&copy));
        assert!(copy.shards.len() > 4_000 && right.len() > 9_000);
        let shared = left.iter().filter(|leaf| right.iter().any(|other| Arc::ptr_eq(leaf, other))).count();
        // One was written to; the other was the only one in its leaf.
        assert_eq!((shared, left.len()), (right.len() - 2, right.len() - 1));
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
