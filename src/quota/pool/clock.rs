//! How a leader stamps entries with Raft time.
//!
//! A lease counts at the pool from the commit of its entry, on a clock that never runs fast: leases (Gray and Cheriton,
//! 1989) need clocks whose *speed* is bounded, not clocks that agree. A change of leader loses credit, never gains it.

use super::entry::Stamp;
use crate::quota::amount::{DRIFT_PPM, Micros};

/// The Raft clock of one leadership: tau = base + (1 - drift) x (the leader's own monotonic time since).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaftClock {
    term: u64,
    base: Micros,
    anchor: Micros,
    last: Micros,
}

impl RaftClock {
    /// The leadership of `term` begins at the leader's monotonic time `now`. `base` is the Raft time of its applied pool
    /// *after everything from earlier terms has been applied* (that is, once its own first entry has).
    #[must_use]
    pub fn begin(term: u64, base: Micros, now: Micros) -> Self {
        Self { term, base, anchor: now, last: base }
    }

    /// The stamp for an entry that is closed at the leader's monotonic time `now`. No request may be added to the entry
    /// after this. Stamps of one leadership never go back, whatever `now` does.
    pub fn stamp(&mut self, now: Micros) -> Stamp {
        let elapsed = (now - self.anchor).or_zero();
        self.last = self.last.max(self.base + elapsed.discount(DRIFT_PPM));
        Stamp { term: self.term, tau: self.last }
    }

    /// The term that this clock stamps for.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_slow_and_never_back() {
        let mut clock = RaftClock::begin(3, Micros::seconds(7), Micros::seconds(100));
        assert_eq!(clock.stamp(Micros::seconds(100)).tau, Micros::seconds(7));
        assert_eq!(clock.stamp(Micros::seconds(200)), Stamp { term: 3, tau: Micros::seconds(106) });
        assert_eq!(clock.stamp(Micros::seconds(150)).tau, Micros::seconds(106));
        assert_eq!(clock.stamp(Micros::seconds(-5)).tau, Micros::seconds(106));
    }
}
