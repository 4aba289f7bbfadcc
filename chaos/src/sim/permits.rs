//! Permits that are lent between regions, their holders, and a watch that knows what each holder believes to have.
//!
//! - P1: at no instant more permits are held, by their holders' own view, than the largest limit that is in force or was so lately.
//!
//! A holder counts from before it sent its request, on a clock of its own that is off by as much as any; it acts from when it has its answer
//! until it has stopped, and it stops in time. It renews in the region that it has its permit of, whatever becomes of that.

use super::chance::Chance;
use super::faults::Effect;
use super::machine::pass;
use super::net::Line;
use super::policies::plain;
use super::{Broken, Phase, World};
use quorate::quota::amount::Micros;
use quorate::quota::policy::*;
use quorate::quota::pool::Pool;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The name of the one policy of permits, and of its key.
pub const NAME: &str = "permits";
/// The longest `ttl` of those that there are here.
const TTL_MAX: Micros = Micros::seconds(20);
/// What was in force may be held for so long after it has settled that it is less: a little more than the longest `ttl`, since clocks
/// are off.
const LATELY: Micros = Micros::seconds(22);
/// The same after a time without the policy, when holders are told the usual `ttl`.
const LATELY_FREE: Micros = Micros::seconds(64);
/// Holders in each region.
const HOLDERS: usize = 4;

/// Any number of them, for any time.
pub fn any(chance: &Chance, names: &[RegionName]) -> Policy {
    let permits = number(chance.pick(&[1, 2, 3, 3, 4, 5, 5, 8, 12]));
    let limit = Limit::Concurrent(Concurrent { permits, ttl: ttl(chance) });
    let (mode, reserve, weights) = (mode(chance), reserve(chance), weights(chance, names));
    let wait = Micros::millis(chance.pick(&[0, 250, 250, 1_000]));
    Policy { reserve, weights, wait, ..plain(NAME, limit, mode) }
}

fn mode(chance: &Chance) -> Mode {
    chance.pick(&[Mode::Strict, Mode::Strict, Mode::Strict, Mode::Split])
}

/// Changes whose they are; now and then how many there are, for how long, or whether they are lent.
fn change(chance: &Chance, policy: &mut Policy, names: &[RegionName]) {
    let Limit::Concurrent(permits) = &mut policy.limit else { return };
    match chance.int(0, 10) {
        0..4 => policy.reserve = reserve(chance),
        10 => policy.mode = mode(chance),
        4..8 => policy.weights = weights(chance, names),
        8 => permits.ttl = ttl(chance),
        _ => permits.permits = number(chance.pick(&[0, 1, 2, 3, 5, 8, 12])),
    }
}

fn ttl(chance: &Chance) -> Micros {
    Micros::seconds(chance.pick(&[1_i64, 2, 5, 5, 10])).max(chance.pick(&[
        Micros::ZERO,
        Micros::ZERO,
        TTL_MAX,
    ]))
}

fn reserve(chance: &Chance) -> Reserve {
    let share = Share::percent(chance.pick(&[0_u32, 0, 5, 30, 60, 100]));
    Reserve { rate: share, burst: share }
}

fn weights(chance: &Chance, names: &[RegionName]) -> BTreeMap<RegionName, u32> {
    let weight = || u32::try_from(chance.pick(&[0, 1, 1, 5])).unwrap_or(1);
    let weights: BTreeMap<RegionName, u32> = names.iter().map(|name| (name.clone(), weight())).collect();
    if weights.values().all(|weight| *weight == 0) { BTreeMap::new() } else { weights }
}

fn number(n: i64) -> u64 {
    u64::try_from(n).unwrap_or(0)
}

/// How a region's holders are for a while: where all wait for permits, each region's own needs hide what it may have too many of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    /// Any way.
    Any,
    /// They want all that there is, always.
    Greedy,
    /// They take permits, are never heard of again, and nobody else comes for long.
    Once,
}

impl Mood {
    fn any(chance: &Chance) -> Self {
        chance.pick(&[Self::Any, Self::Greedy, Self::Greedy, Self::Once])
    }
}

/// The watch.
#[derive(Debug, Default)]
pub struct PermitWatch(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// What is held now, by region.
    held: BTreeMap<usize, i64>,
    /// What may be, and until when it counts after it has become less: the end of time for what is in force.
    limits: Vec<(i64, Micros)>,
    taken: u64,
    broken: Option<Broken>,
}

impl PermitWatch {
    /// An entry was committed (or none: time has passed).
    pub fn committed(&self, now: Micros, pool: &Pool) {
        let cut = pool.policies().find(|view| &*view.policy.name == NAME).and_then(|view| view.cut);
        // Without the policy anything may be held; one that comes back is a change like any other.
        self.limit(now, cut.map_or(i64::MAX, |cut| cut.burst.floor()), pool.settled());
    }

    /// This is in force. Until it has settled, and for a while after, so is what was before.
    fn limit(&self, now: Micros, whole: i64, settled: bool) {
        let mut inner = self.inner();
        for (limit, end) in &mut inner.limits {
            let lately = if *limit == i64::MAX { LATELY_FREE } else { LATELY };
            if *limit != whole && (*end == Micros::MAX || !settled) {
                *end = if settled { now + lately } else { Micros::MAX };
            }
        }
        inner.limits.retain(|(limit, end)| *limit != whole && *end > now);
        inner.limits.push((whole, Micros::MAX));
        inner.look(now);
    }

    /// A holder in this region has so many more, or fewer.
    pub fn held(&self, now: Micros, region: usize, more: i64) {
        let mut inner = self.inner();
        *inner.held.entry(region).or_default() += more;
        inner.taken += number(more.max(0));
        inner.look(now);
    }

    /// The first promise that was broken.
    #[must_use]
    pub fn broken(&self) -> Option<Broken> {
        self.inner().broken.clone()
    }

    /// How many were taken.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.inner().taken
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// P1.
    fn look(&mut self, now: Micros) {
        let all: i64 = self.held.values().sum();
        let Some(most) = self.limits.iter().map(|(limit, _)| *limit).max() else { return };
        if all > most {
            let what = format!("P1: {all} of {most} permits are held at once, by region {:?}", self.held);
            self.broken.get_or_insert(Broken { at: now, what });
        }
    }
}

impl World {
    /// The holders of one region.
    pub(super) fn hold_permits(self: &Arc<Self>, region: usize) {
        let mood = Arc::new(Mutex::new(Mood::any(&self.chance)));
        for _ in 0..HOLDERS {
            tokio::spawn(Arc::clone(self).holder(region, Arc::clone(&mood)));
        }
        let world = Arc::clone(self);
        tokio::spawn(async move {
            while world.phase() != Phase::Over {
                pass(world.chance.time(Micros::seconds(3), Micros::seconds(30))).await;
                *mood.lock().unwrap_or_else(PoisonError::into_inner) = Mood::any(&world.chance);
            }
        });
    }

    /// Cuts regions off for longer than slices are lent, whatever other faults do to the lines meanwhile: what was given out of a slice
    /// must end with it.
    pub(super) async fn isolate(self: Arc<Self>) {
        while self.phase() == Phase::Faults {
            pass(self.chance.time(Micros::seconds(2), Micros::seconds(15))).await;
            let alone = self.chance.index(self.regions.len());
            let long = self.chance.time(Micros::seconds(12), Micros::seconds(45));
            let end = self.time.now() + long;
            self.note(long, &[alone], Effect::Isolates, format!("r{alone} stays cut off from the others"));
            while self.phase() == Phase::Faults && self.time.now() < end {
                for (from, to) in self.lines_of(alone) {
                    self.net.change(from, to, |line| line.cut = true);
                }
                pass(Micros::millis(50)).await;
            }
            for (from, to) in self.lines_of(alone) {
                self.net.change(from, to, |line| *line = Line::good(self.delay));
            }
        }
    }

    /// Gives regions other parts of the permits again and again, while holders have them. Rarely the policy goes, and comes back.
    pub(super) async fn share_anew(self: Arc<Self>) {
        // While a change is not settled, little is lent.
        let calm = Micros::seconds(self.chance.pick(&[12_i64, 40, 200]));
        loop {
            pass(self.chance.time(Micros::seconds(2), calm)).await;
            if self.phase() != Phase::Faults {
                return;
            }
            let (mut next, names) = (self.committed(), self.names());
            match next.iter().position(|policy| &*policy.name == NAME) {
                Some(at) if self.chance.percent(4) => drop(next.remove(at)),
                Some(at) => change(&self.chance, &mut next[at], &names),
                None => next.push(any(&self.chance, &names)),
            }
            self.propose_policies(self.chance.index(self.regions.len()), next);
        }
    }

    async fn holder(self: Arc<Self>, region: usize, mood: Arc<Mutex<Mood>>) {
        while self.phase() != Phase::Over {
            let mood = *mood.lock().unwrap_or_else(PoisonError::into_inner);
            let longest = match mood {
                Mood::Any => self.chance.pick(&[20, 300, 3_000]),
                Mood::Greedy => 20,
                Mood::Once => 20_000,
            };
            pass(self.chance.time(Micros::millis(5), Micros::millis(longest))).await;
            if self.regions[region].is_member() {
                self.hold_one(region, mood).await;
            }
        }
    }

    /// Takes permits, holds them, and stops in time.
    async fn hold_one(&self, region: usize, mood: Mood) {
        let there = &self.regions[region];
        let cost = self.chance.pick(&[1, 1, 1, 2]);
        // A slow clock believes for longer.
        let slow = self.chance.pick(&[-self.drift, 0, self.drift]);
        // It stops a moment before: timers wake it a moment after.
        let believes = |told: Micros| told.mul_div(1_000_000, 1_000_000 - slow) - Micros::millis(2);
        let sent = self.time.now();
        let Some((lease, told)) = there.acquire(NAME, "v0", cost).await else { return };
        let mut until = sent + believes(told);
        if self.time.now() >= until {
            return;
        }
        self.permits.held(self.time.now(), region, cost);
        let done =
            self.time.now() + self.chance.time(Micros::ZERO, Micros::seconds(self.chance.pick(&[1, 8, 60])));
        // Never a word again: they end by themselves.
        let silent = mood == Mood::Once || self.chance.percent(20);
        loop {
            let now = self.time.now();
            if now >= done || now >= until {
                break;
            }
            let renew = now + (until - now).mul_div(1, 3).max(Micros::millis(20));
            pass(renew.min(done).min(until) - now + Micros(1)).await;
            let sent = self.time.now();
            if sent >= done || silent {
                continue;
            }
            // While it waits for the answer its time may be up.
            let left = (until - sent).or_zero().to_duration();
            match tokio::time::timeout(left, there.renew(&lease)).await {
                Ok(Some(told)) => until = sent + believes(told),
                Ok(None) => pass(Micros::millis(50).min(until - self.time.now())).await,
                Err(_) => break,
            }
        }
        let now = self.time.now();
        let last = if silent { until } else { until.min(done) };
        if now < last {
            pass(last - now).await;
        }
        self.permits.held(self.time.now(), region, -cost);
        if !silent {
            there.release(&lease).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_sees_a_permit_too_many_and_lets_an_older_limit_run_out() {
        let (watch, s) = (PermitWatch::default(), Micros::seconds);
        watch.held(s(0), 0, 9);
        watch.held(s(0), 0, -9);
        watch.limit(s(1), 3, true);
        watch.held(s(1), 0, 2);
        watch.held(s(1), 1, 1);
        assert!(watch.broken().is_none(), "all three");
        watch.limit(s(2), 2, false);
        watch.limit(s(3), 2, true);
        watch.held(s(4), 1, -1);
        watch.held(s(4), 1, 1);
        assert!(watch.broken().is_none(), "they were told so");
        let free = PermitWatch::default();
        free.limit(s(1), i64::MAX, true);
        free.held(s(1), 0, 9);
        free.limit(s(2), 2, true);
        free.limit(s(1) + LATELY_FREE, 2, true);
        assert!(free.broken().is_none(), "as if there were no limit");
        free.held(s(1) + LATELY_FREE, 0, -7);
        free.limit(s(2) + LATELY_FREE, 2, true);
        free.held(s(3) + LATELY_FREE, 1, 1);
        assert!(free.broken().is_some_and(|broken| broken.what.starts_with("P1: 3 of 2")));
        watch.limit(s(2) + LATELY, 2, true);
        assert!(watch.broken().is_none());
        watch.limit(s(3) + LATELY, 2, true);
        let broken = watch.broken().expect("three of two");
        assert!(broken.what.starts_with("P1: 3 of 2") && broken.at == s(3) + LATELY, "{broken:?}");
    }
}
