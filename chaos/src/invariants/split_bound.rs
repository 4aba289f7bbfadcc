//! By region, with no coordination at all.

use super::bound::{Findings, ever};
use super::{Invariant, Verdict};
use crate::oracle::{History, Mode};

/// In any window of T seconds all regions together admit at most `burst + rate·T`, and each region at most its part of that.
///
/// It judges limits that were split at any time. A region is held to its part in windows that lie in split editions; while
/// the mode changes, and in other modes, the whole limit counts.
#[derive(Clone, Copy, Debug)]
pub struct SplitBound;

impl Invariant for SplitBound {
    fn name(&self) -> &'static str {
        "split-bound"
    }

    fn promise(&self) -> &'static str {
        "In any window of T seconds, each region admits at most its own part of burst + rate × T tokens, and so all regions \
         together at most the whole."
    }

    fn check(&self, history: &History) -> Verdict {
        let mut found = Findings::default();
        for (limit, watched) in history.limits.iter().enumerate().filter(|(_, w)| ever(w, Mode::Split)) {
            found.add_whole(history, limit, watched);
            (0..history.regions.len()).for_each(|region| found.add_part(history, limit, watched, region));
        }
        found.verdict("no limit was split")
    }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;
    use crate::oracle::Outcome;

    /// 10/s with a burst of 20 to one region, and as much to the other.
    fn split(from_ms: i64) -> Edition {
        let part = (Rate::per_second(10), Tokens::whole(20));
        Edition { reserves: vec![part, part], ..edition(from_ms, Mode::Split, 20, 40) }
    }

    #[test]
    fn each_within_its_part_holds() {
        let mut history = history_of(2, vec![split(0)]);
        (0..40).for_each(|i| history.ask(i % 2, ms(0), ms(1), Outcome::Allowed));
        (1..100).for_each(|i| history.ask(i % 2, ms(i * 100), ms(i * 100), Outcome::Allowed));
        let verdict = SplitBound.check(&history);
        assert!(matches!(verdict, Verdict::Held { .. }), "{verdict:?}");
    }

    #[test]
    fn a_region_above_its_part_breaks_it_though_the_whole_holds() {
        let mut history = history_of(2, vec![split(0)]);
        (0..21).for_each(|_| history.ask(1, ms(0), ms(1), Outcome::Allowed));
        let verdict = SplitBound.check(&history);
        let [breach] = verdict.breaches() else { panic!("{verdict:?}") };
        assert_eq!(breach.region, Some(1));
        assert!(breach.detail.contains("in eu-west"), "{}", breach.detail);
    }

    #[test]
    fn parts_that_add_up_to_more_than_the_whole_break_it() {
        let generous = Edition { burst: Tokens::whole(30), ..split(0) };
        let mut history = history_of(2, vec![generous]);
        (0..40).for_each(|i| history.ask(i % 2, ms(0), ms(1), Outcome::Allowed));
        let verdict = SplitBound.check(&history);
        let [breach] = verdict.breaches() else { panic!("{verdict:?}") };
        assert_eq!(breach.region, None, "each region is within its part");
    }

    #[test]
    fn a_part_that_moves_is_the_larger_until_the_change_is_over() {
        let parts = |a, b| vec![(Rate::ZERO, Tokens::whole(a)), (Rate::ZERO, Tokens::whole(b))];
        let (old, new) = (
            Edition { reserves: parts(30, 10), ..split(0) },
            Edition { reserves: parts(10, 30), ..split(2_000) },
        );
        let mut history = history_of(2, vec![old.clone(), old.changing_to(ms(1_000), &new), new]);
        (0..20).for_each(|_| history.ask(0, ms(1_500), ms(1_500), Outcome::Allowed));
        assert!(!SplitBound.check(&history).is_broken(), "the old part may be in force");
        (0..20).for_each(|_| history.ask(0, ms(2_500), ms(2_500), Outcome::Allowed));
        assert_eq!(SplitBound.check(&history).breaches()[0].region, Some(0));
    }

    #[test]
    fn strict_limits_are_not_its_business() {
        let history = history_of(1, vec![edition(0, Mode::Strict, 1, 1)]);
        assert!(matches!(SplitBound.check(&history), Verdict::NotApplicable { .. }));
    }
}
