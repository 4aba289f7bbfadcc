//! Permits: how many are in use at the same time, each lent under a lease that ends by itself.
//!
//! A holder that dies stops renewing, and its permits are free when its lease has ended.

use super::{Act, Allowance};
use crate::bugs::{Bug, planted};
use crate::quota::amount::Micros;
use crate::quota::bucket::Moment;
use std::collections::{BTreeMap, HashMap};

/// Names a lease; nobody can guess it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub [u8; 16]);

/// One bucket's permits that are in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permits {
    /// By when they end.
    ends: BTreeMap<(Micros, LeaseId), i64>,
    leases: HashMap<LeaseId, Micros>,
    total: i64,
}

impl Permits {
    pub(super) fn leases(&self) -> usize {
        self.leases.len()
    }

    pub(super) fn used(&self, now: Micros) -> i64 {
        let over = self.ends.iter().take_while(|((end, _), _)| *end <= now).map(|(_, count)| *count);
        over.fold(self.total, i64::saturating_sub)
    }

    /// How long the lease lasts, if it is there with so many permits.
    pub(super) fn left(&self, lease: &LeaseId, count: i64, now: Micros) -> Option<Micros> {
        let end = *self.leases.get(lease)?;
        let same = self.ends.get(&(end, *lease)) == Some(&count);
        (same && end > now).then(|| end - now)
    }

    /// How long until `need` of those in use have ended.
    pub(super) fn until_gone(&self, need: i64, now: Micros) -> Micros {
        let mut gone = 0_i64;
        let live = self.ends.iter().skip_while(|((end, _), _)| *end <= now);
        let mut ends = live.map(|((end, _), count)| {
            gone = gone.saturating_add(*count);
            (gone, *end)
        });
        if need <= 0 {
            return Micros::ZERO;
        }
        ends.find(|(gone, _)| *gone >= need).map_or(Micros::ZERO, |(_, end)| end - now)
    }

    /// When permits end that are taken or renewed now: see rule 2 of [`super::lent`].
    fn end_of(&self, act: Act, count: i64, allowance: &Allowance, when: Moment) -> Micros {
        let end = when.late + allowance.span;
        let Some(slice) = allowance.lent.filter(|slice| slice.live(when.late) > 0) else { return end };
        let before = match act {
            Act::Renew(lease) => self.leases.get(&lease).copied(),
            _ => None,
        };
        let own = before.filter(|end| *end > slice.until).map_or(0, |_| count);
        let later = self.ends.iter().rev().take_while(|((end, _), _)| *end > slice.until);
        let others = later.map(|(_, count)| *count).fold(0, i64::saturating_add).saturating_sub(own);
        if others.saturating_add(count) <= allowance.at(when.now) || planted(Bug::PermitOutlivesLease) {
            return end;
        }
        end.min(slice.until).max(before.unwrap_or(Micros::ZERO))
    }

    /// Takes, renews or gives back. If anything has changed: when these permits end (or have just ended).
    pub(super) fn act(
        &mut self,
        act: Act,
        count: i64,
        allowance: &Allowance,
        when: Moment,
    ) -> Option<Micros> {
        let (lease, end) = match act {
            Act::Count => return None,
            Act::Acquire(lease) | Act::Renew(lease) => {
                (lease, Some(self.end_of(act, count, allowance, when)))
            }
            Act::Release(lease) => (lease, None),
        };
        while let Some((&(end, lease), _)) =
            self.ends.first_key_value().filter(|((end, _), _)| *end <= when.now)
        {
            self.remove(lease, end);
        }
        if let Some(old) = self.leases.get(&lease).copied() {
            self.remove(lease, old);
        }
        if let Some(end) = end.filter(|_| count > 0) {
            self.leases.insert(lease, end);
            self.ends.insert((end, lease), count);
            self.total = self.total.saturating_add(count);
        }
        Some(end.unwrap_or(when.late))
    }

    /// When all of them have ended; `None`: none is in use.
    pub(super) fn over(&self) -> Option<Micros> {
        self.ends.last_key_value().map(|((end, _), _)| *end)
    }

    fn remove(&mut self, lease: LeaseId, end: Micros) {
        self.leases.remove(&lease);
        self.total = self.total.saturating_sub(self.ends.remove(&(end, lease)).unwrap_or(0));
    }
}
