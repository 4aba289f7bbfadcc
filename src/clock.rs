//! Time that goes on while a machine sleeps: the one place that reads a clock for leases, levels and Raft time. Deadlines of
//! calls and waits are tokio's, which tests can pause.

use crate::quota::amount::Micros;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_clock_goes_on() {
        let (a, b) = (now(), now());
        assert!(a > Micros::ZERO && b >= a);
    }
}
