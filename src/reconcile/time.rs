//! The time of day: says what this region's clock reads when the cluster does not know, and hears what the cluster agrees on.

use super::{REPEAT, Reconcile};
use crate::clock;
use crate::limiter::time_of_day::Anchor;
use crate::quota::amount::Micros;
use crate::quota::pool::{Op, TimeOfDay};
use crate::raft::Log;
use crate::store::RegionStore;
use std::collections::VecDeque;

/// What the cluster believes this region's clock to read may be off by this, and by the time that saying so takes.
const OFF: Micros = Micros::millis(250);
/// A clock that is off is corrected no more often than this.
const CORRECT: Micros = Micros::seconds(5);
/// What was said is said again after this long (by the Raft clock), so that an error of the leader's clock does not add up.
const AGAIN: Micros = Micros::seconds(600);
/// So many things that were said may still be on their way.
const SAID_MAX: usize = 8;

/// What this daemon has said.
#[derive(Debug, Default)]
pub(super) struct Said {
    readings: VecDeque<Micros>,
    at: Option<Micros>,
    /// It has heard something of it back: its replica is not one of the past, in which other windows were open.
    heard: bool,
}

impl<L: Log, S: RegionStore> Reconcile<L, S> {
    /// Another life, or seat: what was said is another's word.
    pub(super) fn forget_time(&mut self) {
        self.said = Said::default();
        self.core.time.agree(None);
    }

    /// Only while there are quotas with windows.
    pub(super) fn keep_time(&mut self, now: Micros) -> Option<Op> {
        let me = self.me?;
        if !self.core.active.load().has_windows {
            return None;
        }
        let (mine, day, run, tau) = {
            let pool = self.raft.pool();
            let pool = pool.read();
            let tau = self.raft.applied_at().tau(&pool, now);
            (pool.reading(me), pool.wall(tau), pool.wall_run(tau), tau)
        };
        self.said.heard |= mine.is_some_and(|mine| self.said.readings.contains(&mine.wall));
        let agreed = day.zip(run).filter(|_| self.said.heard);
        let agreed = agreed.map(|(wall, run)| Anchor { wall, run, mono: now });
        self.core.time.agree(agreed);
        let wall = clock::wall();
        let off = |said: Micros| Micros((said - wall).0.saturating_abs()) > OFF + self.rtt;
        let wrong = mine.is_none_or(|mine| off(mine.at(tau)) || tau - mine.tau > AGAIN);
        let pause = if self.said.heard { CORRECT } else { REPEAT };
        let due = self.said.at.is_none_or(|at| now >= at + pause);
        if !due || self.said.heard && !wrong {
            return None;
        }
        self.said.at = Some(now);
        self.said.readings.push_back(wall);
        if self.said.readings.len() > SAID_MAX {
            self.said.readings.pop_front();
        }
        Some(Op::TimeOfDay(TimeOfDay { region: me, wall }))
    }
}
