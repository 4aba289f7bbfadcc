//! Sliding logs: the time of everything that was admitted. Exact: no more than the limit in any span, wherever it begins.
//!
//! What is admitted at the same time is one entry, so there are never more of them than the limit has tokens. Each
//! has a running sum, so that what counts, and when enough of it will have been forgotten, is found without adding up.

use crate::quota::amount::Micros;
use crate::quota::bucket::Moment;
use std::collections::VecDeque;

/// One bucket's log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    /// Oldest first.
    entries: VecDeque<Entry>,
}

/// What was admitted at a time: from a sum of `before` to one of `after`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    at: Micros,
    before: i64,
    after: i64,
}

impl Log {
    pub(super) fn entries(&self) -> usize {
        self.entries.len()
    }

    /// What was admitted within a span.
    pub(super) fn used(&self, span: Micros, now: Micros) -> i64 {
        let (oldest, newest) = (self.entries.get(self.live(span, now)), self.entries.back());
        oldest.zip(newest).map_or(0, |(oldest, newest)| newest.after.saturating_sub(oldest.before))
    }

    /// How long until `need` of it has been forgotten.
    pub(super) fn until_gone(&self, need: i64, span: Micros, now: Micros) -> Micros {
        let Some(oldest) = self.entries.get(self.live(span, now)) else { return Micros::ZERO };
        if need <= 0 {
            return Micros::ZERO;
        }
        let sum = oldest.before.saturating_add(need);
        let last = self.entries.partition_point(|entry| entry.after < sum);
        self.entries.get(last).map_or(span, |entry| entry.at + span - now)
    }

    /// Keeps the oldest `stored` of what counts, and adds `added`, now (no earlier than what is there).
    pub(super) fn change(&mut self, stored: i64, added: i64, span: Micros, when: Moment) {
        self.entries.drain(..self.live(span, when.now));
        let sum = self.entries.front().map_or(0, |oldest| oldest.before.saturating_add(stored));
        while self.entries.back().is_some_and(|newest| newest.before >= sum) {
            self.entries.pop_back();
        }
        if let Some(newest) = self.entries.back_mut() {
            newest.after = newest.after.min(sum);
        }
        if added <= 0 {
            return;
        }
        match self.entries.back_mut() {
            Some(newest) if newest.at >= when.late => newest.after = newest.after.saturating_add(added),
            newest => {
                let before = newest.map_or(0, |newest| newest.after);
                let after = before.saturating_add(added);
                self.entries.push_back(Entry { at: when.late, before, after });
            }
        }
    }

    /// When nothing counts any more; `None`: there is nothing.
    pub(super) fn over(&self, span: Micros) -> Option<Micros> {
        self.entries.back().map(|newest| newest.at + span)
    }

    /// The number of the oldest entry that counts.
    fn live(&self, span: Micros, now: Micros) -> usize {
        self.entries.partition_point(|entry| entry.at <= now - span)
    }
}
