//! The pool's side of quotas: which window a bucket belongs to, and what changes of policy mean for windows that have begun.
//!
//! A bucket's name tells its window (see [`window_bucket`](crate::quota::matching::window_bucket)), so each window has books of
//! its own: nothing of another window is spent, returned or counted in it. Asks for a window that has ended, or not begun, are
//! refused, whatever the region's clock says; the books of one that has ended go once all that was lent has run out.
//!
//! **Changes.** In a window a token that is spent is gone: so books count what was spent, by what is left. Where the pool's part
//! of a quota changes, the level of each window's pool changes by as much (below zero if need be), as do regions' buckets in
//! their stores. Of a change of the quota alone, which makes every part larger or every part smaller, so comes: a raise brings
//! just the difference, and a cut binds at once. Any other change (weights, reserve, mode, regions) takes a part of the
//! quota from some and gives it to others, and what some had they may have spent. So in windows that have begun before such a
//! change has settled nobody's part grows: everyone has the smallest part of all versions since; the next window begins afresh.

use super::entry::RegionId;
use super::ledger::Ledger;
use super::policies::{Policies, Slot, Terms};
use super::wall::Walls;
use crate::bugs::{Bug, planted};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::calendar::Turn;
use crate::quota::policy::{BucketId, Cut, Part, Policy};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A region may turn a window this long before the pool does.
const EARLY: Micros = Micros::seconds(1);

/// All that the pool knows of windows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Windows {
    pub(super) walls: Walls,
    /// The buckets with books that are a window's.
    turns: BTreeMap<BucketId, Booked>,
    /// By policy.
    held: BTreeMap<u32, Held>,
}

/// A window with books.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Booked {
    pub(super) turn: Turn,
    /// The pool's part of the quota that its level has been reckoned with last.
    pool: Tokens,
}

/// In windows that began before a change of policy settled, nobody has more than this.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Held {
    /// When it did; the end of time until it does.
    before: Micros,
    parts: Vec<Part>,
    pool: Tokens,
}

/// What a policy was before a change.
pub(super) struct Before {
    id: u32,
    policy: Arc<Policy>,
    cut: Cut,
    parts: Vec<Part>,
    pool: Tokens,
}

impl Windows {
    /// The window of a bucket, if its books are a window's.
    pub(super) fn booked(&self, bucket: BucketId) -> Option<&Booked> {
        self.turns.get(&bucket)
    }

    /// The terms of a bucket, which are narrower in a window that began before a change.
    pub(super) fn terms<'a>(&self, slot: &'a Slot, bucket: BucketId) -> Option<Terms<'a>> {
        let terms = slot.terms()?;
        Some(match self.booked(bucket) {
            Some(booked) => self.terms_in(slot.id, booked.turn, terms),
            None => terms,
        })
    }

    /// The same for a bucket of this window.
    pub(super) fn terms_in<'a>(&self, policy: u32, turn: Turn, terms: Terms<'a>) -> Terms<'a> {
        let held = self.held.get(&policy).filter(|held| turn.start < held.before);
        let burst = held.map_or(terms.burst, |held| held.pool.min(terms.burst));
        // Of a policy that has been removed, too.
        Terms { burst, windowed: true, ..terms }
    }

    /// What a region may use of a quota in windows that began before a time; `None`: no change is so recent.
    pub(super) fn held(&self, policy: u32, region: RegionId) -> Option<(Micros, Part)> {
        let held = self.held.get(&policy)?;
        Some((held.before, held.parts.get(usize::from(region.0)).copied().unwrap_or_default()))
    }

    /// May anybody ask about this window, at this time of day?
    pub(super) fn is_open(turn: Turn, wall: Micros) -> bool {
        turn.start <= wall + EARLY && (turn.end > wall || planted(Bug::EndedWindowAccepted))
    }

    /// New books, of a window of which nothing is spent.
    pub(super) fn open(
        &mut self,
        bucket: BucketId,
        turn: Turn,
        terms: &Terms<'_>,
        mut ledger: Ledger,
    ) -> Ledger {
        ledger.level.tokens = terms.burst;
        self.turns.insert(bucket, Booked { turn, pool: terms.burst });
        ledger
    }

    /// What was spent stays spent when the pool's part has changed.
    pub(super) fn reckon(booked: Option<&mut Booked>, terms: &Terms<'_>, ledger: &mut Ledger) {
        let Some(booked) = booked.filter(|_| terms.windowed) else { return };
        ledger.level.tokens += terms.burst - booked.pool;
        booked.pool = terms.burst;
    }

    pub(super) fn booked_mut(&mut self, bucket: &BucketId) -> Option<&mut Booked> {
        self.turns.get_mut(bucket)
    }

    /// Its books are closed.
    pub(super) fn forget(&mut self, bucket: &BucketId) {
        self.turns.remove(bucket);
    }

    /// Forgets those without books.
    pub(super) fn retain(&mut self, has_books: impl Fn(&BucketId) -> bool) {
        self.turns.retain(|bucket, _| has_books(bucket));
    }

    /// To be called before policies or regions change ...
    pub(super) fn before(policies: &Policies) -> Vec<Before> {
        let windowed = policies.iter().filter(|(_, policy, _)| policy.window().is_some());
        let before = windowed.filter_map(|(id, policy, _)| {
            let slot = policies.slot(id)?;
            let terms = slot.terms()?;
            let (cut, parts, pool) = (terms.cut.clone(), slot.all_usable().to_vec(), terms.burst);
            Some(Before { id, policy: policy.clone(), cut, parts, pool })
        });
        before.collect()
    }

    /// ... and this after: what takes from some and gives to others is held back.
    pub(super) fn hold(&mut self, before: Vec<Before>, policies: &Policies) {
        if planted(Bug::QuotaMovedMidWindow) {
            return;
        }
        for Before { id, policy, cut, parts, pool } in before {
            let Some(slot) = policies.slot(id) else { continue };
            let same = slot.terms().is_some_and(|terms| *terms.cut == cut);
            let alone = |now: &Arc<Policy>| *now != policy && now.differs_in_quota_alone(&policy);
            if same || slot.policy().is_some_and(alone) {
                continue;
            }
            let held = self.held.entry(id).or_insert(Held { before: Micros::ZERO, parts, pool });
            held.before = Micros::MAX;
        }
        self.hold_back(policies, None);
    }

    /// Whatever parts become, those that are held back do not grow. What has settled ends with the windows that have begun at
    /// the time of day `wall`.
    pub(super) fn hold_back(&mut self, policies: &Policies, wall: Option<Micros>) {
        self.held.retain(|id, _| policies.slot(*id).is_some());
        for (id, held) in &mut self.held {
            let Some(slot) = policies.slot(*id) else { continue };
            let now = slot.all_usable();
            held.parts.resize(now.len(), Part::default());
            for (part, now) in held.parts.iter_mut().zip(now) {
                *part = part.least(now);
            }
            if let Some(terms) = slot.terms() {
                held.pool = held.pool.min(terms.burst);
            }
            if let Some(wall) = wall.filter(|_| held.before == Micros::MAX && slot.is_settled()) {
                held.before = wall + EARLY + Micros(1);
            }
        }
    }

    /// Forgets changes that concern no window any more.
    pub(super) fn let_go(&mut self, policies: &Policies, wall: Micros) {
        self.held.retain(|id, held| {
            let window = policies.slot(*id).and_then(|slot| slot.policy()?.window());
            window.is_some_and(|window| held.before > window.turn_at(wall).start)
        });
    }
}
