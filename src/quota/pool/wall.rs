//! The time of day, as far as the cluster agrees on it: for windows of quotas, which begin and end by the calendar.
//!
//! Each region says now and then what its wall clock reads ([`TimeOfDay`](super::TimeOfDay)); between two readings the Raft
//! clock carries each of them on. The pool's time of day is the latest that **a majority of the regions' clocks have
//! reached**, and it never goes back. So
//!
//! - a clock that has jumped ahead, the leader's too, turns no window early, and one that is behind turns none late, as long as
//!   a majority of the clocks is right;
//! - after a change of leader, or with all regions down for a day, the Raft clock has lost time, and the time of day is behind:
//!   it is right again as soon as a majority has spoken, which regions do by themselves when what they said last is off;
//! - no entry needs a time of day, and an idle cluster writes none but a reading of each region every ten minutes.
//!
//! The Raft clock is a hundredth slow by design, which is taken back here: a reading that has been carried on for t is off by what
//! the leaders' clocks are (in truth some millionths, by the promise a hundredth) of t.

use super::entry::RegionId;
use super::members::{Members, Standing};
use crate::bugs::{Bug, planted};
use crate::quota::amount::{DRIFT_PPM, Micros};
use crate::quota::calendar::WALL_MAX;
use serde::{Deserialize, Serialize};

/// What regions have said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Walls {
    /// By region.
    readings: Vec<Option<Reading>>,
    /// The latest that it has ever been; `None`: no majority has spoken yet.
    reached: Option<Micros>,
    /// The same if it had never had to wait for clocks that were set back: see [`Walls::run_at`].
    run: Reading,
}

/// A region's wall clock, read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// What it read ...
    pub wall: Micros,
    /// ... in the entry of this Raft time.
    pub tau: Micros,
}

impl Reading {
    /// What that clock reads at Raft time `tau`.
    #[must_use]
    pub fn at(&self, tau: Micros) -> Micros {
        self.wall + (tau - self.tau).or_zero().mul_div(1_000_000, 1_000_000_i64.saturating_sub(DRIFT_PPM))
    }
}

impl Walls {
    /// A region's clock reads `wall` in an entry of Raft time `tau`.
    pub(super) fn read(&mut self, region: RegionId, wall: Micros, tau: Micros) {
        let at = usize::from(region.0);
        if at >= self.readings.len() {
            self.readings.resize(at.saturating_add(1), None);
        }
        if let Some(reading) = self.readings.get_mut(at) {
            *reading = Some(Reading { wall: wall.max(Micros::ZERO).min(WALL_MAX), tau });
        }
    }

    /// What a region said last.
    pub(super) fn reading(&self, region: RegionId) -> Option<Reading> {
        self.readings.get(usize::from(region.0)).copied()?
    }

    /// What was said does not count any more; the time of day does not go back all the same.
    pub(super) fn forget(&mut self) {
        self.readings.clear();
    }

    /// The time of day at Raft time `tau`; `None`: nobody knows yet.
    pub(super) fn at(&self, members: &Members, tau: Micros) -> Option<Micros> {
        self.reached.max(self.agreed(members, tau))
    }

    /// The latest that a majority of the clocks has reached at Raft time `tau`, by what they have said; `None`: no majority has said
    /// anything.
    pub(super) fn agreed(&self, members: &Members, tau: Micros) -> Option<Micros> {
        let present = || members.all().filter(|member| member.standing == Standing::In);
        let majority = present().count().div_euclid(2).saturating_add(1);
        let mut clocks: Vec<Micros> =
            present().filter_map(|member| Some(self.reading(member.id)?.at(tau))).collect();
        clocks.sort_unstable_by_key(|clock| std::cmp::Reverse(*clock));
        let nth = if planted(Bug::FirstClockCounts) { 0 } else { majority.saturating_sub(1) };
        clocks.get(nth).copied()
    }

    /// What the time of day would be at Raft time `tau` if it had never stood still: it was `t` ago what this was less `t`. So
    /// it says how long ago a window began, and how long its buckets have been there.
    pub(super) fn run_at(&self, members: &Members, tau: Micros) -> Option<Micros> {
        self.reached?;
        Some(self.run.at(tau).max(self.at(members, tau)?))
    }

    /// It does not go back behind Raft time `tau`.
    pub(super) fn advance(&mut self, members: &Members, tau: Micros) {
        if self.readings.is_empty() {
            return;
        }
        let now = self.at(members, tau);
        if let Some(now) = now {
            let run = if self.reached.is_some() { self.run.at(tau).max(now) } else { now };
            self.run = Reading { wall: run, tau };
        }
        self.reached = now;
    }
}
