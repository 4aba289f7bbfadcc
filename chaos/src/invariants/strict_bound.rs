//! The promise that the product is there for.

use super::{Invariant, Verdict, bound};
use crate::oracle::{History, Mode, Watched};

/// In any window of T seconds all regions together admit at most `burst + rate·T`.
///
/// It judges limits that were strict all the time; one that was approximate for a while is judged by
/// [`ApproximateBound`](super::ApproximateBound), whose overshoot is 0 while it is strict.
#[derive(Clone, Copy, Debug)]
pub struct StrictBound;

impl Invariant for StrictBound {
    fn name(&self) -> &'static str {
        "strict-bound"
    }

    fn promise(&self) -> &'static str {
        "In any window of T seconds, all regions together admit at most burst + rate × T tokens."
    }

    fn check(&self, history: &History) -> Verdict {
        bound::check(history, always_strict, "no limit was strict all the time")
    }
}

fn always_strict(watched: &Watched) -> bool {
    !watched.editions.is_empty() && watched.editions.iter().all(|edition| edition.mode == Mode::Strict)
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;
    use crate::oracle::Outcome;

    /// 100/s with a burst of 50.
    fn history() -> History {
        history_of(3, vec![edition(0, Mode::Strict, 100, 50)])
    }

    #[test]
    fn burst_and_rate_hold_and_it_says_how_close() {
        let mut history = history();
        (0..50).for_each(|i| history.ask(i % 3, ms(0), ms(0), Outcome::Allowed));
        (1..=200).for_each(|i| history.ask(0, ms(i * 10 + 1), ms(i * 10 + 1), Outcome::Allowed));
        let verdict = StrictBound.check(&history);
        assert!(!verdict.is_broken(), "{verdict:?}");
        assert!(verdict.detail().contains("0 to spare"), "{}", verdict.detail());
        assert!(verdict.detail().contains("250 requests"), "{}", verdict.detail());
    }

    #[test]
    fn two_regions_that_spend_the_burst_twice_break_it() {
        let mut history = history();
        (0..60).for_each(|i| history.ask(i % 2, ms(1_000), ms(1_010), Outcome::Allowed));
        let verdict = StrictBound.check(&history);
        let [breach] = verdict.breaches() else { panic!("{verdict:?}") };
        assert_eq!((breach.span, breach.limit), ((ms(1_000), ms(1_010)), Some(0)));
        assert!(breach.detail.contains("admitted 60 tokens within 0.01 s"), "{}", breach.detail);
        assert!(breach.detail.contains("allow 51: 9 too many"), "{}", breach.detail);
    }

    #[test]
    fn one_percent_too_fast_for_long_enough_breaks_it() {
        let mut history = history();
        // 101/s for 60 s: 60 too many, ten more than the burst allows.
        (0..6_060)
            .for_each(|i| history.ask(0, ms(i * 60_000 / 6_060), ms(i * 60_000 / 6_060), Outcome::Allowed));
        assert!(StrictBound.check(&history).is_broken());
    }

    #[test]
    fn a_lowered_limit_counts_from_when_it_is_in_force() {
        let editions = vec![
            edition(0, Mode::Strict, 100, 50),
            Edition { changing: true, ..edition(1_000, Mode::Strict, 100, 50) },
            edition(5_000, Mode::Strict, 1, 5),
        ];
        let mut history = history_of(1, editions);
        (0..50).for_each(|_| history.ask(0, ms(4_900), ms(4_900), Outcome::Allowed));
        assert!(!StrictBound.check(&history).is_broken(), "the old one may be in force");
        (0..7).for_each(|_| history.ask(0, ms(6_000), ms(6_001), Outcome::Allowed));
        let verdict = StrictBound.check(&history);
        assert_eq!(verdict.breaches()[0].span, (ms(6_000), ms(6_001)), "{verdict:?}");
    }

    #[test]
    fn no_limit_bounds_nothing_while_there_is_none() {
        let editions = vec![
            edition(0, Mode::Strict, 1, 5),
            Edition::unlimited(ms(1_000)),
            edition(9_000, Mode::Strict, 1, 5),
        ];
        let mut history = history_of(1, editions);
        (0..500).for_each(|i| history.ask(0, ms(2_000 + i), ms(2_001 + i), Outcome::Allowed));
        assert!(!StrictBound.check(&history).is_broken());
        (0..6).for_each(|_| history.ask(0, ms(9_100), ms(9_100), Outcome::Allowed));
        assert_eq!(StrictBound.check(&history).breaches()[0].span, (ms(9_100), ms(9_100)));
    }

    #[test]
    fn only_what_was_allowed_counts() {
        let mut history = history();
        for outcome in [Outcome::Denied, Outcome::Unavailable, Outcome::Unknown] {
            (0..100).for_each(|_| history.ask(0, ms(0), ms(1), outcome));
        }
        assert!(!StrictBound.check(&history).is_broken());
    }

    #[test]
    fn other_modes_are_not_its_business() {
        let history = history_of(1, vec![edition(0, Mode::Split, 1, 1)]);
        assert!(matches!(StrictBound.check(&history), Verdict::NotApplicable { .. }));
    }
}
