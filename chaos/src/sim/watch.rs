//! Watches the bound, with what only the simulation can know: every token that leaves a store, at its true time.
//!
//! - S1: what was spent never exceeds the bound in any window (a virtual bucket that everything is poured into and that drains
//!   at the limit's rate exceeds the burst if and only if some window did);
//! - S2: ... nor would it if every region spent what it has at this instant, what was granted to it and is on its way, and what is
//!   in the pool besides;
//! - S3: no region's lease exceeds, or outlives, its liability in the committed pool;
//! - S4: the pool's own books balance;
//! - S5: no region uses what it has lent of its reserve, as long as an entry might be stamped that counts on it.

use super::Broken;
use crate::oracle::Edition;
use quorate::quota::amount::{MICROS_PER_SECOND, Micros, Rate, Tokens};
use quorate::quota::policy::{BucketId, Part, RegionName};
use quorate::quota::pool::{Entry, Op, Pool, Stamp};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Until every region has learnt that a change is through, and a longest lease has passed.
const NARROW_AFTER: Micros = Micros::seconds(100);

/// Until every region has learnt that a change is through, if it can.
const LEARNT_AFTER: Micros = Micros::seconds(5);

/// Whoever spends more than this share of a burst at once gives cause to look at everything.
const MUCH_PERCENT: i64 = 5;

/// What a policy promises, as the committed entries say.
#[derive(Clone, Debug, Default)]
struct Terms {
    /// What the pool calls the policy.
    id: Option<u32>,
    /// Rate and burst (with overshoot) of every edition that may be in force.
    editions: Vec<(Rate, Tokens)>,
    settled_since: Option<Micros>,
    /// For the oracle: everything that was promised so far.
    told: Vec<Edition>,
}

impl Terms {
    fn rate(&self) -> Rate {
        self.editions.iter().map(|(rate, _)| *rate).max().unwrap_or_default()
    }

    fn burst(&self) -> Tokens {
        self.editions.iter().map(|(_, burst)| *burst).max().unwrap_or_default()
    }
}

/// Everything poured in, drained at the limit's rate: in micro-tokens times a million, so that nothing is rounded.
#[derive(Clone, Copy, Debug, Default)]
struct Meter {
    level: i128,
    at: Micros,
}

impl Meter {
    fn drain(&mut self, rate: Rate, now: Micros) {
        self.drain_for(rate, now - self.at);
        self.at = self.at.max(now);
    }

    fn drain_for(&mut self, rate: Rate, time: Micros) {
        self.level = (self.level - i128::from(rate.0) * i128::from(time.0.max(0))).max(0);
    }

    fn level(self) -> Tokens {
        let micro = (self.level + i128::from(MICROS_PER_SECOND) - 1) / i128::from(MICROS_PER_SECOND);
        Tokens(i64::try_from(micro).unwrap_or(i64::MAX))
    }
}

/// What a region has of a bucket.
#[derive(Clone, Debug)]
pub struct Held {
    /// The region's name.
    pub region: RegionName,
    /// What it could spend at this instant.
    pub spendable: Tokens,
    /// What it has been granted besides, has not got yet, and still may get.
    pub coming: Tokens,
    /// What of it is lent: rate and burst.
    pub lease: (Rate, Tokens),
    /// How much of its reserve's rate it does not use.
    pub idle: Rate,
}

/// The watch.
#[derive(Debug)]
pub struct Watch(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    /// The pool of everything that was committed.
    pool: Pool,
    by_policy: BTreeMap<String, Terms>,
    buckets: BTreeMap<BucketId, (String, Meter)>,
    spent: BTreeMap<BucketId, Tokens>,
    /// The longest lease that was ever lent under these policies.
    lease_max: Micros,
    /// When the version changed last.
    changed: Micros,
    broken: Option<Broken>,
    counts: Counts,
}

/// What happened; a run in which nothing did proves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Entries committed.
    pub commits: u64,
    /// Entries that were refused for their stamp.
    pub refused: u64,
    /// Records written.
    pub records: u64,
    /// Changes of policies (or of members).
    pub changes: u64,
    /// Tokens spent.
    pub spent: Tokens,
    /// Windows of quotas that were spent from.
    pub windows: u64,
    /// Permits that were taken.
    pub permits: u64,
    /// Loans of idle reserve.
    pub loans: u64,
}

impl Counts {
    /// Both together.
    pub fn add(&mut self, other: &Self) {
        self.commits += other.commits;
        self.refused += other.refused;
        self.records += other.records;
        self.changes += other.changes;
        self.spent += other.spent;
        self.windows += other.windows;
        self.permits += other.permits;
        self.loans += other.loans;
    }
}

impl Watch {
    /// Watches these buckets, of policies by name.
    #[must_use]
    pub fn new(pool: Pool, buckets: impl IntoIterator<Item = (BucketId, String)>) -> Self {
        let meters = buckets.into_iter().map(|(id, policy)| (id, (policy, Meter::default())));
        let mut inner = Inner {
            pool,
            by_policy: BTreeMap::new(),
            buckets: meters.collect(),
            spent: BTreeMap::new(),
            lease_max: Micros::ZERO,
            changed: Micros::ZERO,
            broken: None,
            counts: Counts::default(),
        };
        inner.read_terms(Micros::ZERO, Micros::ZERO);
        Self(Mutex::new(inner))
    }

    /// Tokens of a bucket were spent. Says whether they were so many that a look at everything is due.
    pub fn spent(&self, now: Micros, bucket: BucketId, cost: Tokens) -> bool {
        let mut inner = self.inner();
        inner.counts.spent += cost.or_zero();
        *inner.spent.entry(bucket).or_default() += cost;
        let Inner { by_policy, buckets, .. } = &mut *inner;
        let Some((policy, meter)) = buckets.get_mut(&bucket) else { return false };
        let Some(terms) = by_policy.get(policy) else { return false };
        meter.drain(terms.rate(), now);
        meter.level += i128::from(cost.0) * i128::from(MICROS_PER_SECOND);
        let (level, most) = (meter.level(), terms.burst() + slack(terms.rate()));
        if level > most {
            let what = format!("S1: {policy}: {} in a window, where {} may be", show(level), show(most));
            inner.break_promise(now, what);
        }
        cost > most.percent(MUCH_PERCENT)
    }

    /// An entry was committed; it was stamped at true time `stamped`.
    pub fn committed(&self, now: Micros, term: u64, entry: &Entry, stamped: Micros) {
        let mut inner = self.inner();
        inner.read_between(now, term, entry, stamped);
        let version = inner.pool.version();
        let applied = inner.pool.apply(term, entry);
        let lends = |op: &&Op| matches!(op, Op::Lend(_));
        inner.counts.loans += entry.ops.iter().filter(lends).count() as u64;
        inner.counts.commits += 1;
        inner.counts.refused += u64::from(applied.refused);
        inner.counts.records += applied.records.len() as u64;
        if inner.pool.version() != version {
            inner.counts.changes += 1;
            inner.changed = now;
            inner.read_terms(now, stamped);
        }
        if !applied.breached.is_empty() {
            let what = format!("S4: the pool reports a breach: {:?}", inner.pool.check());
            inner.break_promise(now, what);
        }
    }

    /// Looks at everything. `stamp` is what an entry would be stamped with now, `None` if nobody could; `held` says what each region has of a bucket at this instant.
    pub fn look(&self, now: Micros, stamp: Option<Stamp>, held: impl Fn(&Pool, BucketId) -> Vec<Held>) {
        let mut inner = self.inner();
        inner.narrow(now);
        inner.tell_settled(now);
        if let Err((bucket, breach)) = inner.pool.check() {
            let what = format!("S4: the books of {bucket} do not balance: {breach:?}");
            inner.break_promise(now, what);
        }
        let ids: Vec<BucketId> = inner.buckets.keys().copied().collect();
        for id in ids {
            let held = held(&inner.pool, id);
            if let Some(what) = held.iter().find_map(|held| inner.overheld(id, held)) {
                inner.break_promise(now, what);
            }
            if let Some(what) = held.iter().find_map(|held| inner.uses_what_it_lent(id, held, stamp)) {
                inner.break_promise(now, what);
            }
            let parts: Vec<(Tokens, Tokens)> =
                held.iter().map(|held| (held.spendable, held.coming)).collect();
            let pooled = inner.pooled(id, stamp);
            let Inner { by_policy, buckets, .. } = &mut *inner;
            let Some((policy, meter)) = buckets.get_mut(&id) else { continue };
            let Some(terms) = by_policy.get(policy) else { continue };
            meter.drain(terms.rate(), now);
            let (level, most) = (meter.level(), terms.burst() + slack(terms.rate()));
            let all = level + parts.iter().map(|(has, coming)| *has + *coming).sum() + pooled;
            if all > most {
                let part = |(has, coming)| match coming {
                    Tokens::ZERO => show(has),
                    _ => format!("{} and {} on their way", show(has), show(coming)),
                };
                let parts: Vec<String> = parts.into_iter().map(part).collect();
                let parts = parts.join(" + ");
                let what = format!(
                    "S2: {policy}: {} in a window, {parts} to be spent at this instant and {} in the pool, where {} may be",
                    show(level),
                    show(pooled),
                    show(most)
                );
                inner.break_promise(now, what);
            }
        }
    }

    /// What was promised of a policy, from the beginning.
    #[must_use]
    pub fn editions(&self, policy: &str) -> Vec<Edition> {
        self.inner().by_policy.get(policy).map(|terms| terms.told.clone()).unwrap_or_default()
    }

    /// The first promise that was broken.
    #[must_use]
    pub fn broken(&self) -> Option<Broken> {
        self.inner().broken.clone()
    }

    /// Until when, had everything been well since `healed`, something may be lent that was lent before, or before policies or members
    /// changed last.
    #[must_use]
    pub fn clear_at(&self, healed: Micros) -> Micros {
        let inner = self.inner();
        inner.changed.max(healed) + inner.lease_max + Micros::seconds(2)
    }

    /// All that was spent of a bucket.
    #[must_use]
    pub fn spent_of(&self, bucket: BucketId) -> Tokens {
        self.inner().spent.get(&bucket).copied().unwrap_or_default()
    }

    /// What has happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.inner().counts
    }

    /// Reads the pool of everything that was committed.
    pub fn with_pool<T>(&self, read: impl FnOnce(&Pool) -> T) -> T {
        read(&self.inner().pool)
    }

    /// The reserves of a policy by region, as committed.
    #[must_use]
    pub fn parts(&self, policy: &str) -> Vec<Part> {
        let inner = self.inner();
        let view = inner.pool.policies().find(|view| &*view.policy.name == policy);
        view.and_then(|view| view.cut).map(|cut| cut.parts.clone()).unwrap_or_default()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// What the pool could lend of a bucket now.
    fn pooled(&self, id: BucketId, stamp: Option<Stamp>) -> Tokens {
        let tau = self.pool.tau();
        // (A leader that was deposed does not know how much time the next one's clock has lost, and commits nothing any more.)
        let stamp = stamp.filter(|stamp| stamp.term >= self.pool.term());
        let tau = stamp.map_or(tau, |stamp| stamp.tau.max(tau));
        let Some((policy, _)) = self.buckets.get(&id) else { return Tokens::ZERO };
        let view = self.pool.policies().find(|view| *view.policy.name == **policy);
        let pooled = view.filter(|view| view.cut.is_some_and(|cut| cut.pooled));
        // Loans count for entries of the term in which they were made, as long as one can be stamped.
        let term = stamp.map_or(u64::MAX, |stamp| stamp.term);
        pooled.map_or(Tokens::ZERO, |view| self.pool.free_in(term, view.id, id, tau))
    }

    /// S5.
    fn uses_what_it_lent(&self, id: BucketId, held: &Held, stamp: Option<Stamp>) -> Option<String> {
        let stamp = stamp.filter(|stamp| stamp.term == self.pool.term())?;
        let loan = self.pool.loan(id, self.pool.region(&held.region)?, stamp.tau)?;
        (loan.rate > held.idle).then(|| {
            let policy = self.buckets.get(&id).map_or("?", |(policy, _)| policy);
            format!(
                "S5: {policy}: {} has {:?} idle, where the pool counts on {loan:?}",
                held.region, held.idle
            )
        })
    }

    /// S3.
    fn overheld(&self, id: BucketId, held: &Held) -> Option<String> {
        let (rate, burst) = held.lease;
        if rate == Rate::ZERO && burst == Tokens::ZERO {
            return None;
        }
        let region = self.pool.region(&held.region);
        let record = region.and_then(|region| self.pool.record(id, region));
        let covered = record.is_some_and(|record| {
            let liable = record.liable();
            liable.0 >= rate && liable.1 >= burst
        });
        (!covered).then(|| {
            let policy = self.buckets.get(&id).map_or("?", |(policy, _)| policy);
            format!(
                "S3: {policy}: {} has {burst:?}, {rate:?} on loan, where the pool says {record:?}",
                held.region
            )
        })
    }

    /// Policies that another operation of the same entry replaces were in force for what stands between the two.
    fn read_between(&mut self, now: Micros, term: u64, entry: &Entry, stamped: Micros) {
        let changes = |op: &Op| matches!(op, Op::SetPolicies(_));
        let Some(last) = entry.ops.iter().rposition(changes) else { return };
        for at in (0..last).filter(|at| entry.ops.get(*at).is_some_and(changes)) {
            let mut between = self.pool.clone();
            between.apply(term, &Entry { stamp: entry.stamp, ops: entry.ops[..=at].to_vec() });
            if between.version() != self.pool.version() {
                let before = std::mem::replace(&mut self.pool, between);
                self.read_terms(now, stamped);
                self.pool = before;
            }
        }
    }

    /// In force from the stamp on: meters drain at the new rate from there.
    fn read_terms(&mut self, now: Micros, stamped: Micros) {
        let mut newest: BTreeMap<String, (Rate, Tokens, Edition)> = BTreeMap::new();
        let ids: BTreeMap<String, u32> =
            self.pool.policies().map(|view| (view.policy.name.to_string(), view.id)).collect();
        for view in self.pool.policies() {
            self.lease_max = self.lease_max.max(view.cut.map_or(Micros::ZERO, |cut| cut.lease));
            let promised = match view.cut {
                Some(cut) => {
                    (cut.rate, cut.burst + cut.overshoot(), Edition::of(stamped, view.policy.mode, cut))
                }
                None => (Rate::MAX, Tokens::MAX, Edition::unlimited(stamped)),
            };
            newest.insert(view.policy.name.to_string(), promised);
        }
        let known: Vec<String> = self.by_policy.keys().chain(newest.keys()).cloned().collect();
        for name in known {
            // What a policy matched that was removed is let through from then on, and costs nothing here.
            let gone = || (Rate::ZERO, Tokens::ZERO, Edition::unlimited(stamped));
            let (rate, burst, edition) = newest.get(&name).cloned().unwrap_or_else(gone);
            let terms = self.by_policy.entry(name.clone()).or_default();
            // The change before had just settled, and not everyone may have learnt that: they are under way together.
            while terms.told.len() > 1 && terms.told.last().is_some_and(|last| last.from > stamped) {
                terms.told.pop();
            }
            terms.told.push(match terms.told.last() {
                Some(last) => last.changing_to(stamped, &edition),
                None => edition,
            });
            if let Some(id) = ids.get(&name)
                && terms.id.replace(*id).is_some_and(|was| was != *id)
            {
                // It comes back after its removal was through, and everything was let through meanwhile: another policy, which
                // starts full.
                terms.editions.clear();
                for (_, meter) in self.buckets.values_mut().filter(|(policy, _)| *policy == name) {
                    *meter = Meter { level: 0, at: now };
                }
            }
            if terms.editions.last() == Some(&(rate, burst)) {
                continue;
            }
            let before = terms.rate();
            for (_, meter) in self.buckets.values_mut().filter(|(policy, _)| *policy == name) {
                meter.drain(before, now);
                meter.drain_for((rate - before).or_zero(), now - stamped);
            }
            terms.editions.push((rate, burst));
            terms.settled_since = None;
        }
    }

    /// A change is through: from soon on its edition counts alone.
    fn tell_settled(&mut self, now: Micros) {
        if !self.pool.settled() {
            return;
        }
        for (name, terms) in
            self.by_policy.iter_mut().filter(|(_, t)| t.told.last().is_some_and(|e| e.changing))
        {
            let from = now + LEARNT_AFTER;
            let view = self.pool.policies().find(|view| *view.policy.name == **name);
            let cut = view.and_then(|view| Some((view.policy.mode, view.cut?)));
            terms.told.push(cut.map_or(Edition::unlimited(from), |(mode, cut)| Edition::of(from, mode, cut)));
        }
    }

    /// Once a change is through, only the newest edition is in force.
    fn narrow(&mut self, now: Micros) {
        for (name, terms) in &mut self.by_policy {
            if terms.editions.len() < 2 {
                continue;
            }
            if !self.pool.settled() {
                terms.settled_since = None;
                continue;
            }
            let since = *terms.settled_since.get_or_insert(now);
            if now >= since + NARROW_AFTER {
                terms.editions.drain(..terms.editions.len() - 1);
                terms.settled_since = None;
                for (_, meter) in self.buckets.values_mut().filter(|(policy, _)| policy == name) {
                    *meter = Meter { level: 0, at: now };
                }
            }
        }
    }

    fn break_promise(&mut self, at: Micros, what: String) {
        self.broken.get_or_insert(Broken { at, what });
    }
}

/// Clocks tick in whole microseconds: a few of those, and rounding.
fn slack(rate: Rate) -> Tokens {
    Tokens(10_000) + rate.during(Micros(5))
}

fn show(tokens: Tokens) -> String {
    format!("{}.{:06}", tokens.0 / 1_000_000, tokens.0.unsigned_abs() % 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::super::policies::plain;
    use super::*;
    use quorate::quota::policy::{Limit, Mode, Policy, TokenBucket, Unit};
    use quorate::quota::pool::SetPolicies;

    fn of(burst: u64) -> Policy {
        plain("p", Limit::TokenBucket(TokenBucket { amount: 30, per: Unit::Second, burst }), Mode::Strict)
    }

    #[test]
    fn what_is_replaced_in_the_same_entry_was_promised_too() {
        let mut pool = Pool::default();
        let stamp = |tau| Stamp { term: 1, tau: Micros::seconds(tau) };
        let found = Op::Found { regions: ["a", "b"].map(RegionName::from).to_vec(), policies: vec![of(3)] };
        pool.apply(1, &Entry { stamp: stamp(0), ops: vec![found] });
        let watch = Watch::new(pool, [(BucketId([1; 16]), "p".to_owned())]);
        let to = |burst| Op::SetPolicies(SetPolicies { expected: None, policies: vec![of(burst)] });
        let entry = Entry { stamp: stamp(1), ops: vec![to(100), to(3)] };
        watch.committed(Micros::seconds(1), 1, &entry, Micros::seconds(1));
        let inner = watch.inner();
        let bursts: Vec<Tokens> = inner.by_policy["p"].editions.iter().map(|(_, burst)| *burst).collect();
        assert_eq!(bursts, [3, 100, 3].map(Tokens::whole));
    }
}
