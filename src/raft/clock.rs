//! Time that goes on while a machine sleeps, and the leader's stamping of entries with it.

use crate::quota::amount::{DRIFT_PPM, Micros};
use crate::quota::pool::Stamp;

/// Microseconds on this machine's monotonic clock, from an arbitrary start. On Linux it counts the time that the
/// machine was suspended too (`CLOCK_BOOTTIME`): a lease must not come back to life after a pause.
#[must_use]
pub fn now() -> Micros {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let id = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let id = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(id);
    Micros::seconds(time.tv_sec) + Micros(time.tv_nsec.div_euclid(1_000))
}

/// The Raft clock of one term, in its leader's hands: `tau = base + (1 - drift) x (mono - anchor)`. It never runs
/// faster than true time as long as the machine's clock is within the drift; a change of leader loses credit only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TermClock {
    term: u64,
    base: Micros,
    anchor: Micros,
}

impl TermClock {
    /// Begins when the leader applies the first entry of its own term, at `mono`, with the pool's Raft clock at `tau`.
    pub fn begin(term: u64, tau: Micros, mono: Micros) -> Self {
        Self { term, base: tau, anchor: mono }
    }

    pub fn term(&self) -> u64 {
        self.term
    }

    /// The stamp of an entry that is closed at `mono`.
    pub fn stamp(&self, mono: Micros) -> Stamp {
        let elapsed = (mono - self.anchor).or_zero().discount(DRIFT_PPM);
        Stamp { term: self.term, tau: self.base + elapsed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_slow_and_never_back() {
        let clock = TermClock::begin(3, Micros::seconds(100), Micros::seconds(7));
        assert_eq!(clock.stamp(Micros::seconds(7)), Stamp { term: 3, tau: Micros::seconds(100) });
        assert_eq!(clock.stamp(Micros::seconds(107)).tau, Micros::seconds(199));
        assert_eq!(
            clock.stamp(Micros::ZERO).tau,
            Micros::seconds(100),
            "a clock that stepped back gives nothing"
        );
        assert_eq!(clock.term(), 3);
    }

    #[test]
    fn the_machine_clock_goes_on() {
        let (a, b) = (now(), now());
        assert!(a > Micros::ZERO && b >= a);
    }
}
