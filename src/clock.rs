//! Time that goes on while a machine sleeps: the one place that reads a clock for leases, levels and Raft time. Deadlines of
//! calls and waits are tokio's, which tests can pause.

use crate::quota::amount::Micros;

#[cfg(feature = "sim")]
pub use simulated::{Reading, is_simulated, simulate};

/// Microseconds on this machine's monotonic clock, from an arbitrary start. On Linux it counts the time that the
/// machine was suspended too (`CLOCK_BOOTTIME`): a lease must not come back to life after a pause.
#[must_use]
pub fn now() -> Micros {
    #[cfg(feature = "sim")]
    if let Some(reading) = simulated::reading() {
        return reading.monotonic;
    }
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let id = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let id = rustix::time::ClockId::Monotonic;
    read(id)
}

/// Microseconds since the Unix epoch, by a clock that anyone may set. Nothing in the protocol goes by it alone: regions tell each
/// other what theirs read, and a majority of them says when windows of quotas turn.
#[must_use]
pub(crate) fn wall() -> Micros {
    #[cfg(feature = "sim")]
    if let Some(reading) = simulated::reading() {
        return reading.wall;
    }
    read(rustix::time::ClockId::Realtime)
}

fn read(id: rustix::time::ClockId) -> Micros {
    let time = rustix::time::clock_gettime(id);
    Micros::seconds(time.tv_sec) + Micros(time.tv_nsec.div_euclid(1_000))
}

/// Clocks that `quorate-chaos` sets.
#[cfg(feature = "sim")]
mod simulated {
    use crate::quota::amount::Micros;
    use std::cell::Cell;

    /// What a machine's clocks read.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Reading {
        /// See [`super::now`].
        pub monotonic: Micros,
        /// The time of day.
        pub wall: Micros,
    }

    thread_local! {
        static READING: Cell<Option<Reading>> = const { Cell::new(None) };
    }

    /// From now on clocks read so on this thread; `None`: as the machine's do. Returns what they read until now.
    pub fn simulate(reading: Option<Reading>) -> Option<Reading> {
        READING.replace(reading)
    }

    /// Does the simulation set the clocks at the moment?
    #[must_use]
    pub fn is_simulated() -> bool {
        reading().is_some()
    }

    pub(super) fn reading() -> Option<Reading> {
        READING.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_clock_goes_on() {
        let (a, b) = (now(), now());
        assert!(a > Micros::ZERO && b >= a);
        assert!(wall() > Micros::seconds(1_700_000_000));
    }
}
