//! Changes of policies whose limits count what they admit.
//!
//! What was admitted within a span before it may have been admitted under the parts of before. Where only the limit changed, every
//! part grew or none did, and what is used of the old parts and the new ones is no more than the larger of both limits.
//! Where the change took from some and gave to others, what others had still counts: a part that has grown is used only when the
//! change is a span old. (Who counts in another way has begun anew.)

use super::{Edition, Slot};
use crate::quota::amount::Micros;
use crate::quota::bucket::Unseen;
use crate::quota::counted::Kind;

impl Slot {
    /// Has it just become a limit that counts, or one that counts in another way?
    pub(super) fn counts_anew(&self) -> bool {
        let mut last = self.editions.iter().rev();
        let (Some(now), before) = (last.next(), last.next()) else { return false };
        now.counts().is_some() && before.is_some_and(|before| !same_counts(before, now))
    }

    /// What it means for a limit that counts that version `settled` settles; `None`: it is none.
    pub(super) fn counted_change(&self, settled: u64) -> Option<CountedChange> {
        let (_, span) = self.editions.last()?.counts()?;
        let over = self.editions.iter().filter(|edition| edition.from <= settled);
        let over: Vec<&Edition> = over.collect();
        let pairs: Vec<(&Edition, &Edition)> =
            over.iter().copied().zip(over.iter().copied().skip(1)).collect();
        let begun = pairs.iter().rposition(|(before, after)| !same_counts(before, after));
        let pairs = pairs.get(begun.map_or(0, |at| at.saturating_add(1))..).unwrap_or_default();
        let moved = pairs.iter().any(|(before, after)| !before.differs_in_quota_alone(after));
        let longest = pairs.iter().filter_map(|(before, _)| before.counts()).map(|(_, span)| span).max();
        Some(CountedChange {
            moved: moved.then(|| (longest.unwrap_or(span) - span).or_zero()),
            before: if begun.is_some() { Vec::new() } else { self.unseen_parts.clone() },
        })
    }
}

impl Edition {
    /// How it counts what it admits, and over what span; `None`: it is no such limit.
    pub(super) fn counts(&self) -> Option<(Kind, Micros)> {
        Kind::of(&self.policy.as_ref()?.limit)
    }

    /// Is there no other difference than a larger or smaller limit, so that every region's part gets larger or none does?
    fn differs_in_quota_alone(&self, other: &Self) -> bool {
        let (Some(a), Some(b)) = (&self.policy, &other.policy) else { return false };
        a.weights == b.weights && a.mode == b.mode && (a.limit != b.limit || self.cut == other.cut)
    }
}

/// What a change means for what is held back.
pub(super) struct CountedChange {
    /// It took from some and gave to others; so much longer was the longest span of what it replaces.
    moved: Option<Micros>,
    /// What was held back before.
    before: Vec<Option<Unseen>>,
}

impl CountedChange {
    /// What is held back from now on; `recounted`: if parts moved.
    pub(super) fn hold(self, recounted: Vec<Option<Unseen>>) -> Vec<Option<Unseen>> {
        let regions = recounted.len();
        let mut hold = match self.moved {
            Some(longer) => {
                let later = |unseen: Unseen| Unseen { at: unseen.at + longer, ..unseen };
                recounted.into_iter().map(|unseen| unseen.map(later)).collect()
            }
            None => self.before,
        };
        hold.resize(regions, None);
        hold
    }
}

/// Do both count, and in one way? (Permits are in use however long they are lent for.)
fn same_counts(a: &Edition, b: &Edition) -> bool {
    match (a.counts(), b.counts()) {
        (Some((Kind::Permits, _)), Some((Kind::Permits, _))) => true,
        (Some(a), Some(b)) => a == b,
        _ => false,
    }
}
