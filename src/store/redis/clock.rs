//! Where Redis' clock must be, as bounds that every exchange narrows and time widens.
//!
//! A reading TIME of an exchange sent at `s` and received at `r` (this machine's clock, see [`crate::clock`]) was taken between them, so
//! the offset of Redis' clock lies in `[TIME - r, TIME - s]`. However late a reading comes, that holds: lateness makes the
//! bounds wide, never wrong. Only a clock that stepped leaves bounds that do not meet.

use crate::quota::amount::{DRIFT_PPM, Micros};

/// A step up to this is followed slowly, at the speed of drift; a longer one is a loss of data. The scripts have the same
/// figure.
pub(super) const TOLERANCE: Micros = Micros::millis(250);

/// The bounds of the offset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    low: Micros,
    high: Micros,
    at: Micros,
}

/// What a reading says of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// It runs.
    Fits,
    /// It stepped by at least this (less than 0: back).
    Step(Micros),
}

impl Clock {
    /// After the first exchange.
    pub(super) fn new(sent: Micros, received: Micros, time: Micros) -> Self {
        Self { low: time - received, high: time - sent, at: received }
    }

    /// After another exchange. A step leaves the bounds as they were.
    pub(super) fn observe(&mut self, sent: Micros, received: Micros, time: Micros) -> Reading {
        let (low, high) = self.bounds(received);
        let (seen_low, seen_high) = (time - received, time - sent);
        if seen_low > high + TOLERANCE {
            return Reading::Step(seen_low - high);
        }
        if seen_high < low - TOLERANCE {
            return Reading::Step(seen_high - low);
        }
        self.low = low.max(seen_low.min(high));
        self.high = high.min(seen_high.max(low));
        self.at = received;
        Reading::Fits
    }

    /// The store times between which a call that is sent at `sent` runs, if it is done within `within`.
    pub(super) fn window(&self, sent: Micros, within: Micros) -> (Micros, Micros) {
        let (low, high) = self.bounds(sent);
        (low + sent, high + sent + within)
    }

    fn bounds(&self, at: Micros) -> (Micros, Micros) {
        let drift = (at - self.at).or_zero().mul_div(DRIFT_PPM, 1_000_000);
        (self.low - drift, self.high + drift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const EPOCH: Micros = Micros::seconds(1_700_000_000);

    fn ms(ms: i64) -> Micros {
        Micros::millis(ms)
    }

    /// A clock that was read at the origin with a round trip of 2 ms, and the origin.
    fn clock() -> (Clock, Micros) {
        let origin = Micros::seconds(77);
        (Clock::new(origin, origin + ms(2), EPOCH + Micros::millis(1)), origin)
    }

    #[test]
    fn the_truth_is_inside_and_drift_widens() {
        let (mut clock, origin) = clock();
        let (low, high) = clock.window(origin + ms(1_002), Micros::ZERO);
        assert_eq!((low, high), (EPOCH + Micros::millis(991), EPOCH + Micros::millis(1_013)));
        let reading = clock.observe(origin + ms(1_000), origin + ms(1_001), EPOCH + Micros::millis(1_000));
        assert_eq!(reading, Reading::Fits);
        let (low, high) = clock.window(origin + ms(1_001), Micros::millis(20));
        assert_eq!((low, high), (EPOCH + Micros::millis(1_000), EPOCH + Micros::millis(1_021)));
    }

    #[test]
    fn a_late_answer_is_no_step() {
        let (mut clock, origin) = clock();
        for (ran, received) in [(1_000, 60_000), (60_900, 61_000)] {
            let time = EPOCH + Micros::millis(ran);
            let sent = origin + ms(ran).min(ms(1_000));
            assert_eq!(clock.observe(sent, origin + ms(received), time), Reading::Fits);
        }
        let (low, high) = clock.window(origin + ms(61_000), Micros::ZERO);
        assert!(low <= EPOCH + Micros::millis(61_000) && EPOCH + Micros::millis(61_000) <= high);
    }

    #[test]
    fn a_small_step_is_followed_at_the_speed_of_drift() {
        let (mut clock, origin) = clock();
        let mut before = clock.window(origin + ms(2), Micros::ZERO).1;
        for i in 1..=100 {
            let t = origin + ms(2 + 100 * i);
            let time = EPOCH + Micros::millis(2 + 100 * i) + Micros::millis(200);
            assert_eq!(clock.observe(t, t, time), Reading::Fits);
            let now = clock.window(t, Micros::ZERO).1;
            assert!(now - before <= Micros::millis(101) && now <= time, "{i}");
            before = now;
        }
        let late = origin + ms(40_002);
        let time = EPOCH + Micros::millis(40_202);
        assert_eq!(clock.observe(late, late, time), Reading::Fits);
        assert_eq!(clock.window(late, Micros::ZERO), (time, time), "and caught up with");
    }

    #[test]
    fn a_step_is_seen_either_way() {
        let (mut clock, origin) = clock();
        let t = origin + ms(202);
        for step in
            [Micros::seconds(-7_200), Micros::millis(-300), Micros::millis(300), Micros::seconds(7_200)]
        {
            let time = EPOCH + Micros::millis(202) + step;
            assert!(matches!(clock.observe(t, t, time), Reading::Step(by) if (by.0 > 0) == (step.0 > 0)));
        }
        assert_eq!(
            clock.observe(t, t, EPOCH + Micros::millis(202)),
            Reading::Fits,
            "bounds are as they were"
        );
    }
}
