//! A global cap, and so much more.

use super::{Invariant, Verdict, bound};
use crate::oracle::{History, Mode};

/// In any window of T seconds all regions together admit at most `burst + max_overshoot + rate·T`.
///
/// It judges limits that were approximate at any time. An edition in another mode has no overshoot, so windows in it are
/// held to its burst.
#[derive(Clone, Copy, Debug)]
pub struct ApproximateBound;

impl Invariant for ApproximateBound {
    fn name(&self) -> &'static str {
        "approximate-bound"
    }

    fn promise(&self) -> &'static str {
        "In any window of T seconds, all regions together admit at most burst + max_overshoot + rate × T tokens."
    }

    fn check(&self, history: &History) -> Verdict {
        let ever = |watched: &_| bound::ever(watched, Mode::Approximate);
        bound::check(history, ever, "no limit was approximate")
    }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;
    use crate::oracle::Outcome;

    /// 100/s with a burst of 50 and 5 more.
    fn approximate() -> Edition {
        Edition { overshoot: Tokens::whole(5), ..edition(0, Mode::Approximate, 100, 50) }
    }

    #[test]
    fn burst_and_overshoot_at_once_hold() {
        let mut history = history_of(3, vec![approximate()]);
        (0..55).for_each(|i| history.ask(i % 3, ms(0), ms(0), Outcome::Allowed));
        let verdict = ApproximateBound.check(&history);
        assert!(!verdict.is_broken() && verdict.detail().contains("55 of 55"), "{verdict:?}");
    }

    #[test]
    fn more_than_the_overshoot_breaks_it() {
        let mut history = history_of(3, vec![approximate()]);
        (0..56).for_each(|i| history.ask(i % 3, ms(0), ms(0), Outcome::Allowed));
        assert!(ApproximateBound.check(&history).is_broken());
    }

    #[test]
    fn the_overshoot_is_gone_once_the_limit_is_strict() {
        let strict = edition(1_000, Mode::Strict, 100, 50);
        let mut history = history_of(3, vec![approximate(), strict]);
        (0..55).for_each(|i| history.ask(i % 3, ms(900), ms(900), Outcome::Allowed));
        assert!(!ApproximateBound.check(&history).is_broken());
        (0..55).for_each(|i| history.ask(i % 3, ms(2_000), ms(2_000), Outcome::Allowed));
        let verdict = ApproximateBound.check(&history);
        assert_eq!(verdict.breaches()[0].span, (ms(2_000), ms(2_000)), "{verdict:?}");
    }

    #[test]
    fn strict_limits_are_not_its_business() {
        let history = history_of(1, vec![edition(0, Mode::Strict, 1, 1)]);
        assert!(matches!(ApproximateBound.check(&history), Verdict::NotApplicable { .. }));
    }
}
