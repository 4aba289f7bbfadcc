//! Quotas in short windows, and a watch over them that knows every token that leaves a store.
//!
//! Each window of a quota has buckets of its own, under names that no other limit's buckets have, so that
//!
//! - Q1: of no such bucket more is ever spent, in all regions together, than the largest quota that was in force since it was
//!   first used; and
//! - Q2: the cluster's time of day is never ahead of all that the clocks of a majority of the regions have read (each at its time: a
//!   region that is cut off cannot say that its clock was set back).

use super::Broken;
use super::chance::Chance;
use super::policies::plain;
use quorate::quota::amount::{Micros, Tokens};
use quorate::quota::policy::*;
use quorate::quota::pool::{Pool, Standing};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The name of the one policy that has a quota.
pub const NAME: &str = "quota";
/// A reading of a clock is on its way for so long at most, and is carried on by clocks that are 1% off for ten minutes.
const AHEAD: Micros = Micros::seconds(20);

/// A quota of any size, in windows that turn often.
pub fn any(chance: &Chance, names: &[RegionName]) -> Policy {
    let quota = positive(chance.pick(&[0, 1, 5, 20, 100, 100, 1_000]));
    let per = Window::Length { seconds: chance.pick(&[10_u32, 20, 40, 90]) };
    let limit = Limit::Quota(Quota { quota, per, algorithm: Algorithm::FixedWindow });
    let mode = match chance.int(0, 3) {
        0 => Mode::Split,
        1 => Mode::Approximate { max_overshoot: Share::percent(20) },
        _ => Mode::Strict,
    };
    let (reserve, weights) = (reserve(chance), weights(chance, names));
    Policy { reserve, weights, wait: Micros::millis(250), ..plain(NAME, limit, mode) }
}

/// Changes its size, or whose it is.
pub fn change(chance: &Chance, policy: &mut Policy, names: &[RegionName]) {
    let Limit::Quota(quota) = &mut policy.limit else { return };
    match chance.int(0, 3) {
        0 => policy.reserve = reserve(chance),
        1 => policy.weights = weights(chance, names),
        _ => quota.quota = quota.quota * positive(chance.int(30, 250)) / 100,
    }
}

fn reserve(chance: &Chance) -> Reserve {
    let share = Share::percent(chance.pick(&[0_u32, 5, 5, 30, 80, 100]));
    Reserve { rate: share, burst: share }
}

fn weights(chance: &Chance, names: &[RegionName]) -> BTreeMap<RegionName, u32> {
    let weight = || u32::try_from(chance.pick(&[0, 0, 1, 5])).unwrap_or(1);
    let mut weights: BTreeMap<RegionName, u32> = names.iter().map(|name| (name.clone(), weight())).collect();
    if weights.values().all(|weight| *weight == 0) {
        weights.clear();
    }
    weights
}

fn positive(n: i64) -> u64 {
    u64::try_from(n).unwrap_or(0)
}

/// The watch.
#[derive(Debug, Default)]
pub struct QuotaWatch(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    on: bool,
    /// Buckets of other limits.
    others: BTreeSet<BucketId>,
    /// The largest that is in play now.
    whole: Tokens,
    windows: BTreeMap<BucketId, Spent>,
    /// By how much each region's clock has ever been ahead of true time, at most.
    ahead: BTreeMap<RegionName, Micros>,
    /// How far ahead of true time a majority of the clocks has ever been: what it has read once, Raft time carries on, whoever
    /// leaves the majority later.
    majority: Option<Micros>,
    /// Whose clocks counted after the last entry. In an entry that says the time and lets a region go, the one may come before the other.
    members: Vec<RegionName>,
    broken: Option<Broken>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    all: Tokens,
    most: Tokens,
}

impl QuotaWatch {
    /// Every other bucket is one of a quota's window.
    pub fn begin(&self, pool: &Pool, others: impl IntoIterator<Item = BucketId>) {
        let mut inner = self.inner();
        (inner.on, inner.others) = (true, others.into_iter().collect());
        inner.read(pool);
        inner.members = members(pool);
    }

    /// Tokens of a bucket were spent.
    pub fn spent(&self, now: Micros, bucket: BucketId, cost: Tokens) {
        let mut inner = self.inner();
        if !inner.on || inner.others.contains(&bucket) {
            return;
        }
        let whole = inner.whole;
        let spent = inner.windows.entry(bucket).or_default();
        spent.all += cost;
        spent.most = spent.most.max(whole);
        let Spent { all, most } = *spent;
        if all > most {
            let what = format!(
                "Q1: {} of {} tokens of a quota spent in one window ({bucket})",
                all.floor(),
                most.floor()
            );
            inner.broken.get_or_insert(Broken { at: now, what });
        }
    }

    /// What the regions' wall clocks read; often enough that no setting of a clock is missed.
    pub fn clocks(&self, now: Micros, clocks: impl Iterator<Item = (RegionName, Micros)>) {
        let mut inner = self.inner();
        for (name, clock) in clocks {
            let ahead = inner.ahead.entry(name).or_insert(Micros(i64::MIN / 2));
            *ahead = (*ahead).max(clock - now);
        }
    }

    /// An entry was committed.
    pub fn committed(&self, now: Micros, pool: &Pool) {
        let mut inner = self.inner();
        if !inner.on {
            return;
        }
        inner.read(pool);
        let before = std::mem::replace(&mut inner.members, members(pool));
        let agreed = inner.agreed(&before).max(inner.agreed(&inner.members));
        inner.majority = inner.majority.max(agreed);
        let (Some(wall), Some(ahead)) = (pool.wall(pool.tau()), inner.majority) else { return };
        let majority = now + ahead;
        if wall > majority + AHEAD {
            let what = format!(
                "Q2: the time of day is {} s ahead of a majority of the clocks",
                (wall - majority).ceil_seconds()
            );
            inner.broken.get_or_insert(Broken { at: now, what });
        }
    }

    /// The first promise that was broken.
    #[must_use]
    pub fn broken(&self) -> Option<Broken> {
        self.inner().broken.clone()
    }

    /// How many windows were spent from.
    #[must_use]
    pub fn windows(&self) -> u64 {
        self.inner().windows.len() as u64
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn members(pool: &Pool) -> Vec<RegionName> {
    pool.members().filter(|member| member.standing == Standing::In).map(|member| member.name).collect()
}

impl Inner {
    /// How far ahead of true time a majority of these regions' clocks has been.
    fn agreed(&self, members: &[RegionName]) -> Option<Micros> {
        let mut ahead: Vec<Micros> =
            members.iter().filter_map(|name| self.ahead.get(name).copied()).collect();
        ahead.sort_unstable();
        ahead.len().checked_sub(members.len() / 2 + 1).and_then(|at| ahead.get(at).copied())
    }

    /// What may be spent of a window while this is in force: a change counts for all windows that are used while it does.
    fn read(&mut self, pool: &Pool) {
        let cut = pool.policies().find(|view| &*view.policy.name == NAME).and_then(|view| view.cut);
        let whole = cut.map_or(Tokens::ZERO, |cut| cut.burst + cut.overshoot());
        // Until a change has settled, a region that has not heard of it goes by what was before.
        let whole = if pool.settled() { whole } else { whole.max(self.whole) };
        if whole == self.whole {
            return;
        }
        for spent in self.windows.values_mut() {
            spent.most = spent.most.max(self.whole).max(whole);
        }
        self.whole = whole;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_sees_a_token_too_many_and_a_clock_that_leads() {
        let watch = QuotaWatch::default();
        let (bucket, other) = (BucketId([1; 16]), BucketId([2; 16]));
        watch.spent(Micros::ZERO, bucket, Tokens::whole(9));
        assert!(watch.broken().is_none(), "it has not begun");
        watch.begin(&Pool::default(), [other]);
        watch.inner().whole = Tokens::whole(5);
        watch.spent(Micros::ZERO, other, Tokens::whole(9));
        watch.spent(Micros::ZERO, bucket, Tokens::whole(3));
        watch.spent(Micros::ZERO, bucket, Tokens::whole(2));
        assert!(watch.broken().is_none());
        watch.spent(Micros(7), bucket, Tokens::whole(1));
        assert!(
            watch.broken().is_some_and(|broken| broken.at == Micros(7) && broken.what.contains("6 of 5"))
        );
    }
}
