//! A region that lives has something to say.

use super::figures::{count, seconds};
use super::spans::{disabled, join};
use super::{Breach, Invariant, Verdict};
use crate::oracle::{History, Outcome, Request};
use quorate::quota::amount::Micros;

/// Silences of a region that are closer together are one.
const GAP: Micros = Micros::seconds(1);

/// A region that is not disabled answers every request: there is no [`Outcome::Unknown`], and nothing takes longer than
/// [`Params::deadline`](crate::oracle::Params::deadline).
///
/// A request is not judged if it was under way at any moment of a fault that disables its region, or within
/// [`Params::restart`](crate::oracle::Params::restart) after it. "I cannot decide" is an answer, see
/// [`ReserveAvailable`](super::ReserveAvailable).
#[derive(Clone, Copy, Debug)]
pub struct Answered;

impl Invariant for Answered {
    fn name(&self) -> &'static str {
        "answered"
    }

    fn promise(&self) -> &'static str {
        "A region whose daemon and store are alive answers every request in time, whatever the network between regions does."
    }

    fn check(&self, history: &History) -> Verdict {
        let mut judged = 0;
        let mut breaches = Vec::new();
        for (region, name) in history.regions.iter().enumerate() {
            let disabled = disabled(history, region);
            let mut requests: Vec<&Request> = history
                .requests
                .iter()
                .filter(|r| r.region == region && !disabled.touch(r.sent, r.answered))
                .collect();
            judged += requests.len();
            requests.retain(|r| is_late(history, r));
            requests.sort_unstable_by_key(|r| r.sent);
            let silences = requests.iter().map(|r| ((r.sent, r.answered), 1_usize));
            breaches.extend(join(silences, GAP, |sum, n| *sum += n).into_iter().map(|silence| {
                let detail = format!("{name} left {} without an answer", count(silence.figures, "request"));
                (silence.figures, Breach { detail, span: silence.span, limit: None, region: Some(region) })
            }));
        }
        if judged == 0 {
            return Verdict::NotApplicable { why: "nobody asked a region that was not disabled".into() };
        }
        breaches.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
        let breaches = breaches.into_iter().map(|(_, breach)| breach).collect();
        Verdict::of(breaches, || Verdict::Held { detail: slowest(history, judged) })
    }
}

fn is_late(history: &History, request: &Request) -> bool {
    let took = request.answered - request.sent;
    request.outcome == Outcome::Unknown || history.params.deadline.is_some_and(|deadline| took > deadline)
}

fn slowest(history: &History, judged: usize) -> String {
    let answered = history.requests.iter().filter(|r| r.outcome != Outcome::Unknown);
    let slowest = answered.map(|r| r.answered - r.sent).max().unwrap_or_default();
    format!("{} answered, the slowest of all in {}", count(judged, "request"), seconds(slowest))
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;
    use crate::oracle::Mode;

    fn history() -> History {
        let mut history = history_of(2, vec![edition(0, Mode::Strict, 100, 50)]);
        (0..100).for_each(|i| history.ask(i % 2, ms(i * 100), ms(i * 100 + 3), Outcome::Allowed));
        history
    }

    #[test]
    fn answers_hold_be_they_what_they_may() {
        let mut history = history();
        history.ask(0, ms(500), ms(503), Outcome::Denied);
        history.ask(0, ms(500), ms(504), Outcome::Unavailable);
        let verdict = Answered.check(&history);
        assert!(matches!(&verdict, Verdict::Held { detail } if detail.contains("0.004 s")), "{verdict:?}");
    }

    #[test]
    fn silence_breaks_it() {
        let mut history = history();
        history.ask(1, ms(2_000), ms(4_000), Outcome::Unknown);
        history.ask(1, ms(2_100), ms(4_100), Outcome::Unknown);
        history.ask(1, ms(9_000), ms(9_100), Outcome::Unknown);
        let verdict = Answered.check(&history);
        let [worst, other] = verdict.breaches() else { panic!("{verdict:?}") };
        assert_eq!((worst.span, worst.region), ((ms(2_000), ms(4_100)), Some(1)));
        assert_eq!(worst.detail, "eu-west left 2 requests without an answer");
        assert_eq!(other.span, (ms(9_000), ms(9_100)));
    }

    #[test]
    fn an_answer_after_the_deadline_breaks_it() {
        let mut history = history();
        history.ask(0, ms(500), ms(900), Outcome::Denied);
        assert!(!Answered.check(&history).is_broken());
        history.params.deadline = Some(ms(399));
        assert!(Answered.check(&history).is_broken());
    }

    #[test]
    fn a_dead_region_may_be_silent_and_a_cut_off_one_may_not() {
        let mut history = history();
        history.ask(0, ms(5_000), ms(7_000), Outcome::Unknown);
        history.fault(0, ms(6_000), ms(8_000), "cut off").isolates = true;
        assert!(Answered.check(&history).is_broken());
        history.faults[0].disables = true;
        assert!(!Answered.check(&history).is_broken());
        history.ask(0, ms(10_900), ms(11_200), Outcome::Unknown);
        assert!(!Answered.check(&history).is_broken(), "it is still starting");
        history.ask(0, ms(11_100), ms(11_200), Outcome::Unknown);
        assert!(Answered.check(&history).is_broken());
    }

    #[test]
    fn nobody_asked() {
        let history = history_of(1, vec![]);
        assert!(matches!(Answered.check(&history), Verdict::NotApplicable { .. }));
    }
}
