//! What goes wrong, and its end.

use super::machine::pass;
use super::net::Line;
use super::{FAULTS, Phase, World, policies};
use crate::oracle::FaultSpan;
use quorate::quota::amount::Micros;
use quorate::quota::policy::Policy;
use quorate::quota::pool::{Op, SetPolicies};
use quorate::raft::Log as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A store that has lost its data starts with empty buckets: so long at least it has less than its reserve.
const EMPTY: Micros = Micros::seconds(10);

/// What a fault does to the regions that it touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing that callers must notice.
    None,
    /// Requests fail, or the reserve is out of use.
    Disables,
    /// A quorum may be out of reach.
    Isolates,
}

impl World {
    /// Breaks one thing after the other, until the time is over.
    pub(super) async fn break_things(self: Arc<Self>) {
        let calm = self.weather.calm(&self.chance);
        while self.phase() == Phase::Faults {
            pass(self.chance.time(Micros::millis(100), Micros::millis(calm))).await;
            if self.phase() == Phase::Faults {
                self.break_one();
            }
        }
    }

    fn break_one(self: &Arc<Self>) {
        let n = self.regions.len();
        let (a, b) = (self.chance.index(n), self.chance.index(n));
        // So that some leases run out and others do not.
        let longest = Micros::seconds(self.chance.pick(&[2, 25, 25, 80]));
        let long = self.chance.time(Micros::millis(200), longest);
        match self.chance.int(0, 27) {
            0 => self.cut(&[a], false, long),
            1 => self.cut(&[a], true, long),
            2 => {
                let mut side: Vec<usize> = (0..n).collect();
                self.chance.shuffle(&mut side);
                side.truncate(n / 2);
                self.cut(&side, false, long);
            }
            3 if a != b => {
                self.change_lines(&[(a, b)], long, &format!("r{a} cannot reach r{b}"), |l| l.cut = true)
            }
            4 | 5 => {
                let (lost, doubled, late) =
                    (self.chance.int(0, 60), self.chance.int(0, 30), self.chance.int(0, 15));
                let what = format!("lines of r{a}: {lost}% lost, {doubled}% doubled, {late}% very late");
                self.change_lines(&self.lines_of(a), long, &what, move |l| {
                    (l.lost, l.doubled, l.late) = (lost, doubled, late);
                });
            }
            6 => {
                let most = self.chance.time(Micros::millis(200), Micros::seconds(3));
                let what = format!("lines of r{a} take up to {} ms", most.0 / 1_000);
                self.change_lines(&self.lines_of(a), long, &what, move |l| l.most = most);
            }
            7 | 8 => {
                let time = self.chance.time(Micros::millis(10), Micros::seconds(20));
                self.regions[a].machine.pause(time);
                self.note(time, &[a], Effect::Disables, format!("r{a}'s daemon stands still"));
            }
            9 | 10 => self.crash(a, long),
            11 => self.restart(a),
            12 | 13 => {
                self.regions[a].shelf.lose_data();
                self.note(EMPTY, &[a], Effect::Disables, format!("r{a}'s store loses its data"));
            }
            14 => {
                self.regions[a].shelf.roll_back();
                self.note(EMPTY, &[a], Effect::Disables, format!("r{a}'s store goes back to an older state"));
            }
            15 => self.take_down(a, long.min(Micros::seconds(8))),
            16 => {
                let slow = Micros::millis(self.chance.pick(&[2, 15, 40, 400]));
                let lossy = self.chance.pick(&[0, 5, 30]);
                self.slow_store(a, long, slow, lossy);
            }
            17 => {
                let by = Micros::seconds(self.chance.int(-7_200, 7_200));
                self.regions[a].shelf.step_clock(by);
                self.note(
                    EMPTY,
                    &[a],
                    Effect::Disables,
                    format!("r{a}'s store's clock is set by {} s", by.0 / 1_000_000),
                );
            }
            18 => self.bend(a),
            19 => {
                let by = Micros::seconds(self.chance.int(-7_200, 7_200));
                let now = self.time.now();
                self.regions[a].machine.clocks().wall.step(now, by);
                self.note(
                    Micros::ZERO,
                    &[a],
                    Effect::None,
                    format!("r{a}'s wall clock is set by {} s", by.0 / 1_000_000),
                );
            }
            20 | 21 => {
                self.logs.stand(a);
                self.note(Micros::ZERO, &[a], Effect::None, format!("r{a} stands for election"));
            }
            22..25 => self.change_policies(a),
            25 | 26 => self.change_members(a),
            _ => self.regions[a].shelf.save(),
        }
    }

    pub(super) fn lines_of(&self, a: usize) -> Vec<(usize, usize)> {
        (0..self.regions.len()).filter(|b| *b != a).flat_map(|b| [(a, b), (b, a)]).collect()
    }

    /// These cannot reach the others (one way: but hear of them).
    pub(super) fn cut(self: &Arc<Self>, side: &[usize], one_way: bool, time: Micros) {
        let mut lines = Vec::new();
        for a in side {
            for b in (0..self.regions.len()).filter(|b| !side.contains(b)) {
                lines.push((*a, b));
                if !one_way {
                    lines.push((b, *a));
                }
            }
        }
        let how = if one_way { "cannot reach the others" } else { "cut off from the others" };
        self.change_lines(&lines, time, &format!("regions {side:?} {how}"), |line| line.cut = true);
    }

    /// Changes lines for some time; then they are good again.
    pub(super) fn change_lines(
        self: &Arc<Self>,
        lines: &[(usize, usize)],
        time: Micros,
        what: &str,
        change: impl Fn(&mut Line),
    ) {
        for (from, to) in lines {
            self.net.change(*from, *to, &change);
        }
        let mut touched: Vec<usize> = lines.iter().flat_map(|(a, b)| [*a, *b]).collect();
        touched.sort_unstable();
        touched.dedup();
        self.note(time, &touched, Effect::Isolates, what.to_owned());
        let (world, lines) = (Arc::clone(self), lines.to_vec());
        tokio::spawn(async move {
            pass(time).await;
            for (from, to) in lines {
                world.net.change(from, to, |line| *line = Line::good(world.delay));
            }
        });
    }

    fn crash(self: &Arc<Self>, a: usize, time: Micros) {
        self.regions[a].crash(&self.logs);
        self.note(time, &[a], Effect::Disables, format!("r{a}'s daemon crashes"));
        let world = Arc::clone(self);
        tokio::spawn(async move {
            pass(time).await;
            world.regions[a].start(&world.logs);
        });
    }

    fn restart(self: &Arc<Self>, a: usize) {
        let world = Arc::clone(self);
        self.note(Micros::seconds(3), &[a], Effect::Disables, format!("r{a}'s daemon is restarted"));
        tokio::spawn(async move {
            world.regions[a].drain(&world.logs).await;
            world.regions[a].start(&world.logs);
        });
    }

    fn take_down(self: &Arc<Self>, a: usize, time: Micros) {
        self.regions[a].shelf.set_up(false);
        self.note(time, &[a], Effect::Disables, format!("r{a}'s store is down"));
        let world = Arc::clone(self);
        tokio::spawn(async move {
            pass(time).await;
            world.regions[a].shelf.set_up(true);
        });
    }

    pub(super) fn slow_store(self: &Arc<Self>, a: usize, time: Micros, slow: Micros, lossy: i64) {
        self.regions[a].shelf.set_slow(slow, lossy);
        let what = format!("r{a}'s store takes up to {} ms each way, {lossy}% lost", slow.0 / 1_000);
        self.note(time, &[a], Effect::Disables, what);
        let world = Arc::clone(self);
        tokio::spawn(async move {
            pass(time).await;
            world.regions[a].shelf.set_slow(Micros::ZERO, 0);
        });
    }

    /// One of the region's clocks runs at another speed, within the promise.
    fn bend(&self, a: usize) {
        let (now, drift) = (self.time.now(), self.drift);
        let ppm = self.chance.int(-1, 1) * drift;
        let region = &self.regions[a];
        match self.chance.int(0, 2) {
            0 => region.machine.clocks().monotonic.bend(now, ppm),
            1 => region.shelf.bend_clock(ppm),
            _ => {
                // The worst: a lease that runs long at the region, and short at the leader.
                region.machine.clocks().monotonic.bend(now, drift);
                region.shelf.bend_clock(-drift);
            }
        }
        self.note(Micros::ZERO, &[a], Effect::None, format!("r{a}'s clocks change their speed"));
    }

    pub(super) fn change_policies(self: &Arc<Self>, a: usize) {
        let next = policies::changed(&self.chance, self.weather, &self.committed(), &self.names());
        self.propose_policies(a, next);
    }

    /// Region `a` proposes these.
    pub(super) fn propose_policies(self: &Arc<Self>, a: usize, next: Vec<Policy>) {
        let expected = self.chance.percent(50).then(|| self.watch.with_pool(|pool| pool.version()));
        let region = &self.regions[a];
        if !region.is_up() {
            return;
        }
        self.note(Micros::ZERO, &[a], Effect::None, "policies change".to_owned());
        let Some(log) = self.logs.log(a, 0) else { return };
        tokio::spawn(async move {
            let ops = vec![Op::SetPolicies(SetPolicies { expected, policies: next })];
            // Whatever becomes of it.
            let _ = log.propose(ops, Instant::now() + Duration::from_secs(3)).await;
        });
    }

    /// Everything is well again.
    pub(super) fn heal(&self) {
        let n = self.regions.len();
        for from in 0..n {
            for to in (0..n).filter(|to| *to != from) {
                self.net.change(from, to, |line| *line = Line::good(self.delay));
            }
        }
        for region in &self.regions {
            region.shelf.set_up(true);
            region.shelf.set_slow(Micros::ZERO, 0);
            region.machine.resume();
            region.start(&self.logs);
        }
    }

    /// For the report.
    pub(super) fn note(&self, time: Micros, regions: &[usize], effect: Effect, what: String) {
        if !self.record {
            return;
        }
        let from = self.time.now();
        let to = (from + time).min(FAULTS);
        self.history().faults.push(FaultSpan {
            from,
            to: Some(to),
            what,
            regions: regions.to_vec(),
            disables: effect == Effect::Disables,
            isolates: effect == Effect::Isolates,
        });
    }
}
