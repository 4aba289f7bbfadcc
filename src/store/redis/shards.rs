//! A store in shards: a Redis Cluster.
//!
//! A script may only touch keys of one slot. So there is a fixed number of slots, spread evenly, each with a meta key and with the buckets that
//! fall to it by their names; a slot that moves takes all of them along. Which bucket is in which shard never changes: else a
//! bucket would be looked for where it is not, and be full.
//!
//! **All or none** over several shards is in steps: the charges are taken shard by shard, in order; where one denies, the others are only
//! looked at, and what was taken is given back. Meanwhile it is missing to others: too little is admitted for a moment, never too
//! much. It is given back under the session that it was taken under, or not at all. What a request itself gives back comes last, when
//! nothing can be denied any more. A call without an answer may have taken something; that is not given back.
//!
//! **Time** between shards is the daemon's own: deadlines and beginnings are put onto each server's clock by the bounds of its offset,
//! towards the side on which less is admitted.

use super::shared::Live;
use super::wire::Batch;
use super::{Lane, RedisStore, pump};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::bucket::{EXACT_MAX, Generation, Shape, Unseen};
use crate::quota::counted::{Act, Allowance, Seen};
use crate::quota::policy::BucketId;
use crate::store::{
    CountCharge, Install, Prepare, Prepared, StoreError, Take, TakeCharge, Taken, TakenCharge,
};
use futures::future::{join_all, try_join_all};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// How many there are. Part of what is stored.
pub(super) const SHARDS: usize = 12;
/// Each shard's hash tag: the smallest number that leads to the middle fifth of its twelfth of the slots. Part of what is stored.
const TAGS: [u16; SHARDS] = [117, 69, 58, 116, 68, 59, 111, 9, 56, 110, 39, 57];
/// Beginnings on a shard's clock are rounded up to this, so that they are the same for all requests of a while.
const GRAIN: Micros = Micros::millis(100);

/// The hash tag that leads to a shard's slot.
pub(super) fn tag(shard: usize) -> u16 {
    TAGS.get(shard).copied().unwrap_or_default()
}

/// A shard's slot.
pub(super) fn slot(shard: usize) -> u16 {
    fred::util::redis_keyslot(tag(shard).to_string().as_bytes())
}

/// The shard of a bucket; names of buckets are digests.
fn shard_of(bucket: &BucketId) -> usize {
    let [first, second, ..] = bucket.0;
    usize::from(u16::from_le_bytes([first, second])) % SHARDS
}

/// The places of a request's charges that are on one shard.
#[derive(Clone, Debug, Default)]
struct Part {
    charges: Vec<usize>,
    counts: Vec<usize>,
}

/// A request's charges by shard, in order.
fn parts(take: &Take) -> BTreeMap<usize, Part> {
    let mut parts: BTreeMap<usize, Part> = BTreeMap::new();
    for (place, charge) in take.charges.iter().enumerate() {
        parts.entry(shard_of(&charge.bucket)).or_default().charges.push(place);
    }
    for (place, charge) in take.counts.iter().enumerate() {
        parts.entry(shard_of(&charge.bucket)).or_default().counts.push(place);
    }
    parts
}

impl Part {
    /// Its charges, changed by these.
    fn of(
        &self,
        take: &Take,
        charge: impl Fn(TakeCharge) -> TakeCharge,
        count: impl Fn(CountCharge) -> CountCharge,
    ) -> Take {
        let charges = self.charges.iter().filter_map(|place| take.charges.get(*place).copied().map(&charge));
        let counts = self.counts.iter().filter_map(|place| take.counts.get(*place).copied().map(&count));
        Take { charges: charges.collect(), counts: counts.collect() }
    }

    /// Puts its answer where it belongs.
    fn put(&self, answer: &Taken, all: &mut Taken) {
        all.now = answer.now;
        for (place, seen) in self.charges.iter().zip(&answer.charges) {
            if let Some(all) = all.charges.get_mut(*place) {
                *all = *seen;
            }
        }
        for (place, seen) in self.counts.iter().zip(&answer.counts) {
            if let Some(all) = all.counts.get_mut(*place) {
                *all = *seen;
            }
        }
    }
}

/// What was taken on one shard, and on which connection.
struct Done<'p> {
    shard: usize,
    live: Option<Arc<Live>>,
    part: &'p Part,
    asked: Take,
    taken: Taken,
}

/// What gives back waits until nothing can be denied any more.
fn gives(cost: Tokens) -> bool {
    cost < Tokens::ZERO
}

/// Of a count, what frees something.
fn frees(charge: &CountCharge) -> bool {
    gives(charge.cost) || matches!(charge.act, Act::Release(_))
}

/// A charge that asks what there is.
fn asking(charge: CountCharge) -> CountCharge {
    CountCharge { cost: Tokens::ZERO, act: Act::Count, ..charge }
}

/// What undoes what was taken; `fits` says which charges were.
fn undo(take: &Take, taken: &Taken) -> Take {
    let charges = take.charges.iter().zip(&taken.charges).map(|(charge, seen)| {
        let cost = if seen.fits { Tokens::ZERO - charge.cost.or_zero() } else { Tokens::ZERO };
        TakeCharge { cost, enforce: false, ..*charge }
    });
    let counts = take.counts.iter().zip(&taken.counts).map(|(charge, seen)| {
        let undone = match charge.act {
            Act::Count if seen.fits => CountCharge { cost: Tokens::ZERO - charge.cost.or_zero(), ..*charge },
            Act::Acquire(lease) if seen.fits => CountCharge { act: Act::Release(lease), ..*charge },
            _ => asking(*charge),
        };
        CountCharge { enforce: false, ..undone }
    });
    Take { charges: charges.collect(), counts: counts.collect() }
}

/// The same, but nothing of it is taken: it comes with a charge that never fits.
fn looking(mut take: Take) -> Take {
    let (bucket, cost) = (BucketId([255; 16]), Tokens(EXACT_MAX.saturating_add(1)));
    take.charges.push(TakeCharge { bucket, shape: Shape::default(), unseen: None, cost, enforce: true });
    take
}

impl RedisStore {
    pub(super) async fn take_sharded(&self, take: Take, until: Instant) -> Result<Taken, StoreError> {
        let parts: Vec<(usize, Part)> = parts(&take).into_iter().collect();
        let mut all = Taken {
            allowed: true,
            now: self.now(),
            charges: vec![TakenCharge::default(); take.charges.len()],
            counts: vec![Seen::default(); take.counts.len()],
        };
        let single = parts.len() <= 1;
        let hold = |charge: TakeCharge| {
            let cost = if single { charge.cost } else { charge.cost.or_zero() };
            TakeCharge { cost, ..charge }
        };
        let hold_count =
            |charge: CountCharge| if !single && frees(&charge) { asking(charge) } else { charge };
        let mut done: Vec<Done<'_>> = Vec::new();
        for (at, (shard, part)) in parts.iter().enumerate() {
            let asked = part.of(&take, hold, hold_count);
            // Before it is taken: a session that begins later is another.
            let live = self.lanes.get(*shard).and_then(|lane| lane.link.live.load_full());
            match self.take_on(*shard, asked.clone(), until).await {
                Ok(taken) if taken.allowed => {
                    part.put(&taken, &mut all);
                    done.push(Done { shard: *shard, live, part, asked, taken });
                }
                Ok(taken) => {
                    all.allowed = false;
                    part.put(&taken, &mut all);
                    let rest = parts.get(at + 1..).unwrap_or_default();
                    self.look_at(&take, rest, until, &mut all).await;
                    self.give_back(done, until, &mut all).await;
                    return Ok(all);
                }
                Err(error) => {
                    self.give_back(done, until, &mut all).await;
                    return Err(error);
                }
            }
        }
        let freeing = take.charges.iter().any(|c| gives(c.cost)) || take.counts.iter().any(frees);
        if !single && freeing {
            self.free(&take, &parts, until, &mut all).await;
        }
        Ok(all)
    }

    /// What was denied elsewhere is shown as it is here.
    async fn look_at(&self, take: &Take, parts: &[(usize, Part)], until: Instant, all: &mut Taken) {
        let looks = parts.iter().map(|(shard, part)| async move {
            let asked = looking(part.of(take, |charge| charge, |count| count));
            (part, self.take_on(*shard, asked, until).await)
        });
        for (part, looked) in join_all(looks).await {
            if let Ok(looked) = looked {
                part.put(&looked, all);
            }
        }
    }

    /// Gives back what was taken. It goes on where the request cannot wait for it.
    async fn give_back(&self, done: Vec<Done<'_>>, until: Instant, all: &mut Taken) {
        let given = done.into_iter().map(|Done { shard, live, part, asked, taken }| async move {
            let store = self.clone();
            let back = undo(&asked, &taken);
            let given = tokio::spawn(async move { store.give_back_on(shard, live?, back).await });
            (part, timeout_at(until, given).await)
        });
        for (part, given) in join_all(given).await {
            let Ok(Ok(Some(given))) = given else { continue };
            // It had fitted; what is left now is what counts.
            let fitted = |place: &usize| all.charges.get(*place).is_some_and(|seen| seen.fits);
            let fits: Vec<bool> = part.charges.iter().map(fitted).collect();
            let counted: Vec<bool> = part
                .counts
                .iter()
                .map(|place| all.counts.get(*place).is_some_and(|seen| seen.fits))
                .collect();
            part.put(&given, all);
            for (place, fits) in part.charges.iter().zip(fits) {
                if let Some(seen) = all.charges.get_mut(*place) {
                    seen.fits = fits;
                }
            }
            for (place, fits) in part.counts.iter().zip(counted) {
                if let Some(seen) = all.counts.get_mut(*place) {
                    seen.fits = fits;
                }
            }
        }
    }

    /// The charges that free something, once everything else has been taken.
    async fn free(&self, take: &Take, parts: &[(usize, Part)], until: Instant, all: &mut Taken) {
        let freed = parts.iter().map(|(shard, part)| {
            let charges = part.charges.iter().copied();
            let counts = part.counts.iter().copied();
            let part = Part {
                charges: charges.filter(|at| take.charges.get(*at).is_some_and(|c| gives(c.cost))).collect(),
                counts: counts.filter(|at| take.counts.get(*at).is_some_and(frees)).collect(),
            };
            async move {
                let asked = part.of(take, |charge| charge, |count| count);
                let freed =
                    if asked.is_empty() { None } else { Some(self.take_on(*shard, asked, until).await) };
                (part, freed)
            }
        });
        for (part, freed) in join_all(freed).await {
            if let Some(Ok(freed)) = freed {
                part.put(&freed, all);
            }
        }
    }

    /// On one shard, and only while the session lasts that `live` is for. `None`: it may be lost.
    async fn give_back_on(&self, shard: usize, live: Arc<Live>, mut back: Take) -> Option<Taken> {
        let (lane, clock) = self.lane(shard).ok()?;
        clock.put_times(&mut back);
        let mut batch = if back.counts.is_empty() { Batch::default() } else { Batch::counted() };
        if !batch.push(&back) {
            return None;
        }
        match pump::take(&lane.shared, &live, batch).await {
            Ok(taken) => taken.into_iter().next(),
            Err(fault) => {
                tracing::debug!(%fault, "what was taken cannot be given back");
                None
            }
        }
    }

    /// On one shard, with times put onto its clock.
    async fn take_on(&self, shard: usize, mut take: Take, until: Instant) -> Result<Taken, StoreError> {
        let (lane, clock) = self.lane(shard)?;
        clock.put_times(&mut take);
        let began = lane.shared.attached.borrow().as_ref().map(|attached| attached.ahead);
        let began = began.ok_or(StoreError::Unavailable)?;
        let mut taken = lane.take(take, until).await?;
        // By one and the same offset as long as the session lasts, so that times of answers are as far apart as they were.
        taken.now = taken.now - began + self.region.ahead().unwrap_or_default();
        Ok(taken)
    }

    pub(super) async fn known_sharded(&self, buckets: &[BucketId]) -> Result<(u64, Vec<bool>), StoreError> {
        let mut known = vec![false; buckets.len()];
        let mut servers: BTreeMap<String, u64> = BTreeMap::new();
        let asked = self.lanes.iter().enumerate().map(|(shard, lane)| async move {
            let places: Vec<usize> = (0..buckets.len())
                .filter(|place| buckets.get(*place).is_some_and(|bucket| shard_of(bucket) == shard))
                .collect();
            let here: Vec<BucketId> =
                places.iter().filter_map(|place| buckets.get(*place).copied()).collect();
            let server = lane.live()?.attached.run_id.clone();
            Ok::<_, StoreError>((places, server, lane.known(&here).await?))
        });
        for (places, server, (keys, here)) in try_join_all(asked).await? {
            let most = servers.entry(server).or_default();
            *most = keys.max(*most);
            for (place, here) in places.into_iter().zip(here) {
                if let Some(known) = known.get_mut(place) {
                    *known = here;
                }
            }
        }
        Ok((servers.into_values().sum(), known))
    }

    pub(super) async fn prepare_sharded(
        &self,
        asks: Vec<Prepare>,
    ) -> Result<(Micros, Vec<Prepared>), StoreError> {
        // Read before anything is sent.
        let now = self.now();
        let mut all = vec![Prepared::default(); asks.len()];
        let by_shard = by_shard(asks, |ask| &ask.bucket);
        let prepared = by_shard.into_iter().map(|(shard, (places, mut asks))| async move {
            let (lane, clock) = self.lane(shard)?;
            for ask in &mut asks {
                ask.unseen = ask.unseen.map(|unseen| clock.unseen(ask.shape, unseen));
                ask.permits = ask.permits.map(|allowance| clock.allowance(allowance));
            }
            Ok::<_, StoreError>((places, lane.prepare(asks).await?.1))
        });
        for (places, prepared) in try_join_all(prepared).await? {
            for (place, prepared) in places.into_iter().zip(prepared) {
                if let Some(all) = all.get_mut(place) {
                    *all = prepared;
                }
            }
        }
        Ok((now, all))
    }

    pub(super) async fn install_sharded(&self, records: Vec<Install>) -> Result<Vec<Tokens>, StoreError> {
        let mut all = vec![Tokens::ZERO; records.len()];
        let by_shard = by_shard(records, |record| &record.bucket);
        let installed = by_shard.into_iter().map(|(shard, (places, mut records))| async move {
            let (lane, clock) = self.lane(shard)?;
            for record in &mut records {
                record.unseen = record.unseen.map(|unseen| clock.unseen(record.shape, unseen));
                record.permits = record.permits.map(|allowance| clock.allowance(allowance));
                record.grant.deadline = clock.sooner(record.grant.deadline);
            }
            Ok::<_, StoreError>((places, lane.install(records).await?))
        });
        for (places, levels) in try_join_all(installed).await? {
            for (place, level) in places.into_iter().zip(levels) {
                if let Some(all) = all.get_mut(place) {
                    *all = level;
                }
            }
        }
        Ok(all)
    }

    fn lane(&self, shard: usize) -> Result<(&Lane, ShardClock), StoreError> {
        let lane = self.lanes.get(shard).ok_or(StoreError::Unavailable)?;
        let clock = ShardClock::of(self, lane).ok_or(StoreError::Unavailable)?;
        Ok((lane, clock))
    }
}

impl Lane {
    /// What this shard knows about buckets that it does not hold, by the store's clock; `None`: nothing yet.
    pub(super) fn generation(&self, store: &RedisStore) -> Option<Generation> {
        let attached = self.shared.attached.borrow().clone()?;
        let generation = attached.generation();
        if store.lanes.len() == 1 {
            return Some(generation);
        }
        let clock = ShardClock::of(store, self)?;
        Some(Generation { start: clock.back(generation.start), ..generation })
    }
}

/// What asks and records are sorted into: their places and themselves.
type ByShard<T> = BTreeMap<usize, (Vec<usize>, Vec<T>)>;

fn by_shard<T>(all: Vec<T>, bucket: impl Fn(&T) -> &BucketId) -> ByShard<T> {
    let mut sorted: ByShard<T> = BTreeMap::new();
    for (place, item) in all.into_iter().enumerate() {
        let (places, items) = sorted.entry(shard_of(bucket(&item))).or_default();
        places.push(place);
        items.push(item);
    }
    sorted
}

/// How a shard's clock is to the store's: between these, ahead.
#[derive(Clone, Copy, Debug)]
struct ShardClock {
    low: Micros,
    high: Micros,
}

impl ShardClock {
    fn of(store: &RedisStore, lane: &Lane) -> Option<Self> {
        let (low, high) = lane.shared.offset()?;
        let ahead = store.region.ahead()?;
        Some(Self { low: low - ahead, high: high - ahead })
    }

    /// The latest that a time of the store can be on the shard's clock: for what begins then.
    fn later(self, at: Micros) -> Micros {
        let at = at + self.high;
        Micros(at.0.div_euclid(GRAIN.0).saturating_add(1).saturating_mul(GRAIN.0))
    }

    /// The soonest: for what ends then.
    fn sooner(self, at: Micros) -> Micros {
        at + self.low
    }

    /// The latest that a time of the shard can be on the store's clock.
    fn back(self, at: Micros) -> Micros {
        at - self.low
    }

    fn put_times(self, take: &mut Take) {
        for charge in &mut take.charges {
            charge.unseen = charge.unseen.map(|unseen| self.unseen(charge.shape, unseen));
        }
        for charge in &mut take.counts {
            charge.allowance = self.allowance(charge.allowance);
        }
    }

    fn allowance(self, allowance: Allowance) -> Allowance {
        let held = allowance.until > Micros::ZERO;
        Allowance { until: if held { self.later(allowance.until) } else { allowance.until }, ..allowance }
    }

    /// Windows are told by the daemon's clock, and put onto the shard's later on.
    fn unseen(self, shape: Shape, unseen: Unseen) -> Unseen {
        if shape.is_windowed() { unseen } else { Unseen { at: self.later(unseen.at), ..unseen } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_spread_evenly_and_do_not_change() {
        let slots: Vec<u16> = (0..SHARDS).map(slot).collect();
        assert_eq!(slots, [645, 2121, 3387, 4772, 6248, 7450, 8771, 10106, 11509, 12898, 14268, 15572]);
        let mut buckets = [0; SHARDS];
        for i in 0..6_000_u32 {
            let mut id = [0; 16];
            id.copy_from_slice(&blake3::hash(&i.to_le_bytes()).as_bytes()[..16]);
            buckets[shard_of(&BucketId(id))] += 1;
        }
        assert!(buckets.iter().all(|n| (400..600).contains(n)), "{buckets:?}");
    }

    #[test]
    fn times_are_put_where_less_is_admitted() {
        let clock = ShardClock { low: Micros::millis(-30), high: Micros::millis(20) };
        let at = Micros::seconds(1_000);
        assert_eq!(clock.sooner(at), at - Micros::millis(30));
        assert_eq!(clock.later(at), at + Micros::millis(100));
        assert_eq!(clock.later(at + Micros::millis(79)), clock.later(at), "the same for a while");
        assert_eq!(clock.back(at), at + Micros::millis(30));
    }

    #[test]
    fn undoing_gives_back_what_was_taken_and_nothing_else() {
        let charge = |cost| TakeCharge {
            bucket: BucketId([1; 16]),
            shape: Shape::default(),
            unseen: None,
            cost: Tokens::whole(cost),
            enforce: true,
        };
        let seen = |fits| TakenCharge { fits, ..TakenCharge::default() };
        let take = Take { charges: vec![charge(3), charge(4), charge(0)], ..Take::default() };
        let taken = Taken { charges: vec![seen(true), seen(false), seen(true)], ..Taken::default() };
        let costs: Vec<i64> = undo(&take, &taken).charges.iter().map(|charge| charge.cost.floor()).collect();
        assert_eq!(costs, [-3, 0, 0]);
    }
}
