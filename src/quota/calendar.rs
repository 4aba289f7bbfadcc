//! The windows of quotas: which one a moment is in, when it began and when it ends. Pure integers; UTC; no leap seconds, as on
//! every Unix clock.
//!
//! Days and dates are those of the proleptic Gregorian calendar, in which a year is taken to begin in March, so that the leap
//! day is its last (Hinnant, *chrono-Compatible Low-Level Date Algorithms*, 2013). Weeks begin on Monday (ISO 8601).

use super::amount::{MICROS_PER_SECOND, Micros};
use super::policy::{Unit, Window};
use serde::{Deserialize, Serialize};

/// No clock reads more than this (the year 9999): what says more is wrong.
pub const WALL_MAX: Micros = Micros::seconds(253_402_300_799);

const DAY_S: i64 = 86_400;
const WEEK_DAYS: i64 = 7;
/// 1970-01-01 was a Thursday: the Monday before it was three days earlier.
const MONDAY: i64 = 3;
/// Days from 0000-03-01 to 1970-01-01.
const EPOCH_DAYS: i64 = 719_468;
const ERA_YEARS: i64 = 400;
const ERA_DAYS: i64 = 146_097;

/// One window: from `start` (included) to `end` (not included), in microseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Turn {
    /// When it begins.
    pub start: Micros,
    /// When the next one does.
    pub end: Micros,
}

impl Turn {
    /// How long it is.
    #[must_use]
    pub fn length(&self) -> Micros {
        self.end - self.start
    }
}

impl Window {
    /// The window that `wall` (since 1970-01-01T00:00:00Z) is in. Times before 1970 and after [`WALL_MAX`] are taken for those.
    #[must_use]
    pub fn turn_at(self, wall: Micros) -> Turn {
        let second = wall.max(Micros::ZERO).min(WALL_MAX).0.div_euclid(MICROS_PER_SECOND);
        let (start, end) = match self {
            Self::Length { seconds } => every(second, i64::from(seconds), 0),
            Self::Calendar(unit @ (Unit::Second | Unit::Minute | Unit::Hour | Unit::Day)) => {
                every(second, unit.seconds(), 0)
            }
            Self::Calendar(Unit::Week) => {
                every(second, WEEK_DAYS.saturating_mul(DAY_S), MONDAY.saturating_mul(DAY_S))
            }
            Self::Calendar(Unit::Month) => {
                let (year, month) = month_of(second.div_euclid(DAY_S));
                let next =
                    if month == 12 { (year.saturating_add(1), 1) } else { (year, month.saturating_add(1)) };
                (
                    first_day(year, month).saturating_mul(DAY_S),
                    first_day(next.0, next.1).saturating_mul(DAY_S),
                )
            }
            Self::Calendar(Unit::Year) => {
                let (year, _) = month_of(second.div_euclid(DAY_S));
                let first = |year| first_day(year, 1).saturating_mul(DAY_S);
                (first(year), first(year.saturating_add(1)))
            }
        };
        Turn { start: Micros::seconds(start), end: Micros::seconds(end) }
    }

    /// The window that begins at `start`; `None`: none does.
    #[must_use]
    pub fn turn_from(self, start: Micros) -> Option<Turn> {
        Some(self.turn_at(start)).filter(|turn| turn.start == start)
    }

    /// The length of its shortest window.
    #[must_use]
    pub fn shortest(self) -> Micros {
        match self {
            Self::Length { seconds } => Micros::seconds(i64::from(seconds)),
            Self::Calendar(Unit::Month) => Micros::seconds(28 * DAY_S),
            Self::Calendar(unit) => Micros::seconds(unit.seconds()),
        }
    }
}

/// The span of `length` seconds that `second` is in, where one begins `shift` seconds before 1970.
fn every(second: i64, length: i64, shift: i64) -> (i64, i64) {
    let length = length.max(1);
    let into = second.saturating_add(shift).rem_euclid(length);
    let start = second.saturating_sub(into);
    (start, start.saturating_add(length))
}

/// Year and month (1 to 12) of a day, counted from 1970-01-01.
fn month_of(day: i64) -> (i64, i64) {
    let day = day.saturating_add(EPOCH_DAYS);
    let (era, of_era) = (day.div_euclid(ERA_DAYS), day.rem_euclid(ERA_DAYS));
    // Leap days do not count: one each 4 years, but each 100, but each 400.
    let plain = of_era
        .saturating_sub(of_era.div_euclid(1_460))
        .saturating_add(of_era.div_euclid(36_524))
        .saturating_sub(of_era.div_euclid(ERA_DAYS.saturating_sub(1)));
    let year_of_era = plain.div_euclid(365);
    let of_year = of_era.saturating_sub(days_before(year_of_era));
    // Months from March on: 153 days every five.
    let from_march = of_year.saturating_mul(5).saturating_add(2).div_euclid(153);
    let year = era.saturating_mul(ERA_YEARS).saturating_add(year_of_era);
    if from_march < 10 {
        (year, from_march.saturating_add(3))
    } else {
        (year.saturating_add(1), from_march.saturating_sub(9))
    }
}

/// The first day of a month, counted from 1970-01-01.
fn first_day(year: i64, month: i64) -> i64 {
    let (year, from_march) = if month > 2 {
        (year, month.saturating_sub(3))
    } else {
        (year.saturating_sub(1), month.saturating_add(9))
    };
    let (era, of_era) = (year.div_euclid(ERA_YEARS), year.rem_euclid(ERA_YEARS));
    let of_year = from_march.saturating_mul(153).saturating_add(2).div_euclid(5);
    era.saturating_mul(ERA_DAYS)
        .saturating_add(days_before(of_era))
        .saturating_add(of_year)
        .saturating_sub(EPOCH_DAYS)
}

/// Days in the first `years` years of an era.
fn days_before(years: i64) -> i64 {
    years.saturating_mul(365).saturating_add(years.div_euclid(4)).saturating_sub(years.div_euclid(100))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn day(day: i64) -> Micros {
        Micros::seconds(day * DAY_S)
    }

    fn is_leap(year: i64) -> bool {
        year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
    }

    /// Every day of 430 years, by counting them one by one: an era and more, so every month and year that there is.
    #[test]
    fn every_day_is_in_its_month_year_and_week() {
        let (mut today, mut weekday) = (0_i64, 3); // Thursday
        let mut year_began = 0;
        for year in 1970..2400 {
            let days = if is_leap(year) { 366 } else { 365 };
            let year_turn = Turn { start: day(year_began), end: day(year_began + days) };
            let mut month_began = year_began;
            for month in 1..=12 {
                let length = match month {
                    2 if is_leap(year) => 29,
                    2 => 28,
                    4 | 6 | 9 | 11 => 30,
                    _ => 31,
                };
                let month_turn = Turn { start: day(month_began), end: day(month_began + length) };
                for _ in 0..length {
                    let monday = today - weekday;
                    for at in [day(today), day(today + 1) - Micros(1)] {
                        assert_eq!(Window::Calendar(Unit::Month).turn_at(at), month_turn, "{year}-{month}");
                        assert_eq!(Window::Calendar(Unit::Year).turn_at(at), year_turn, "{year}");
                        let week = Window::Calendar(Unit::Week).turn_at(at);
                        assert_eq!(week, Turn { start: day(monday), end: day(monday + 7) });
                        let all_day = Window::Calendar(Unit::Day).turn_at(at);
                        assert_eq!(all_day, Turn { start: day(today), end: day(today + 1) });
                    }
                    today += 1;
                    weekday = (weekday + 1) % 7;
                }
                month_began += length;
            }
            year_began += days;
        }
    }

    #[test]
    fn known_dates_are_right() {
        let month = Window::Calendar(Unit::Month);
        // date -ud @1709164800: 2024-02-29; 951782400: 2000-02-29; 4107542400: 2100-03-01.
        let leap = month.turn_at(Micros::seconds(1_709_164_800));
        assert_eq!(leap, Turn { start: Micros::seconds(1_706_745_600), end: Micros::seconds(1_709_251_200) });
        assert_eq!(month.turn_at(Micros::seconds(951_782_400)).length(), day(29));
        assert_eq!(month.turn_at(Micros::seconds(4_107_542_400)).start, Micros::seconds(4_107_542_400));
        let last = Window::Calendar(Unit::Year).turn_at(Micros::MAX);
        assert_eq!(last.end, WALL_MAX + Micros::seconds(1), "the year 9999 is the last");
    }

    #[test]
    fn windows_follow_one_another_without_gaps() {
        let windows = Unit::ALL.map(Window::Calendar);
        let lengths = [1, 7, 60, 90, 900, 86_400, 31_622_400].map(|seconds| Window::Length { seconds });
        for window in windows.into_iter().chain(lengths) {
            let mut at = Micros::seconds(1_700_000_000) + Micros(123);
            for _ in 0..500 {
                let turn = window.turn_at(at);
                assert!(
                    turn.start <= at && at < turn.end && turn.length() >= window.shortest(),
                    "{window:?}"
                );
                assert_eq!(window.turn_from(turn.start), Some(turn));
                assert_eq!(window.turn_from(turn.start + Micros(1)), None);
                assert_eq!(window.turn_at(turn.end).start, turn.end, "{window:?}");
                assert_eq!(window.turn_at(turn.end - Micros(1)), turn);
                at = turn.end + Micros(turn.length().0 / 3);
            }
        }
        assert_eq!(Window::Length { seconds: 60 }.turn_at(Micros(-5)).start, Micros::ZERO);
    }
}
