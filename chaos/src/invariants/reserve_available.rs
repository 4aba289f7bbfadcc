//! The reserve needs nobody's word.

use super::figures::{count, tokens};
use super::floor::Floor;
use super::loans::{kept, may_have_lent};
use super::spans::{Joined, Spans, disabled, isolated, join};
use super::{Breach, Invariant, Verdict};
use crate::oracle::{History, Outcome, Request, Watched};
use quorate::quota::amount::{Micros, Tokens};
use quorate::quota::policy::LOAN;

/// Refusals that are closer together are one breach.
const GAP: Micros = Micros::seconds(1);
/// What was charged without an answer may be charged so much later.
const LATE: Micros = Micros::seconds(1);

/// A region that is not disabled admits its reserve, whatever else is wrong: no request is refused while the reserve alone must
/// hold enough for it.
///
/// The reserve alone is a bucket with the reserve's burst that fills at the reserve's rate, less 1% (the product's discount) and
/// what the clock may be slow; that starts empty (at the start, and after a fault that disabled the region and
/// [`Params::restart`](crate::oracle::Params::restart)); and that pays for everything which the region may have admitted, also
/// out of a lease. It is counted with every doubt against it, see `floor.rs`, and less
/// [`Params::slack`](crate::oracle::Params::slack) of its rate. After a change of policy the region's bucket may be taken for
/// empty until the old reserve would have filled, and a loan would have ended, so nothing is judged for so long.
///
/// While a region may have lent of its reserve (see `loans.rs`: it had little use for it and others were short, a loan's time ago
/// or less) only the tenth of the rate counts that it never lends. A region that is cut off does not know what it had lent when its store
/// lost its data: it starts empty a loan's time later.
///
/// `Unavailable` counts as a refusal too, if it is more than
/// [`Params::unavailable_ppm`](crate::oracle::Params::unavailable_ppm) of what the region is asked.
#[derive(Clone, Copy, Debug)]
pub struct ReserveAvailable;

impl Invariant for ReserveAvailable {
    fn name(&self) -> &'static str {
        "reserve-available"
    }

    fn promise(&self) -> &'static str {
        "A region whose daemon and store are alive always admits its reserve, also when it is cut off from all others \
         (of the rate, nine tenths may be lent, for 30 s, to others that are short of it while the region is not)."
    }

    fn check(&self, history: &History) -> Verdict {
        let mut seen = Seen::default();
        for (limit, watched) in history.limits.iter().enumerate() {
            for region in 0..history.regions.len() {
                if watched.editions.iter().any(|edition| edition.reserve(region).1.is_positive()) {
                    seen.look(history, (limit, region), watched);
                }
            }
        }
        seen.verdict()
    }
}

/// What was found so far.
#[derive(Default)]
struct Seen {
    reserves: usize,
    refusals: usize,
    cut_off: usize,
    breaches: Vec<(usize, Breach)>,
}

/// Refusals that should not have been.
#[derive(Clone, Copy)]
struct Refused {
    requests: usize,
    cost: Tokens,
    /// What the reserve held at least, at best.
    held: Tokens,
}

impl Seen {
    fn look(&mut self, history: &History, (limit, region): (usize, usize), watched: &Watched) {
        let dead = disabled(history, region);
        let blind = isolated(history, region, Micros::ZERO);
        let requests: Vec<&Request> =
            history.requests.iter().filter(|r| r.limit == limit && r.region == region).collect();
        let alive = |r: &&&Request| !dead.touch(r.sent, r.answered);
        let refused: Vec<&Request> =
            requests.iter().filter(alive).copied().filter(|r| is_refusal(r)).collect();
        self.reserves += 1;
        self.refusals += refused.len();
        self.cut_off += refused.iter().filter(|r| blind.touch(r.sent, r.answered)).count();
        if refused.is_empty() {
            return;
        }

        let asked = requests.iter().filter(alive).count();
        let (mut denied, mut unavailable) = (Vec::new(), Vec::new());
        let lent = may_have_lent(history, limit, region, watched);
        let trouble = Trouble { dead, blind, lent };
        for (request, held) in false_refusals(history, region, watched, &requests, &refused, &trouble) {
            let one = Refused { requests: 1, cost: request.cost, held };
            let into = if request.outcome == Outcome::Denied { &mut denied } else { &mut unavailable };
            into.push(((request.sent, request.answered), one));
        }
        let tolerated = i64::try_from(asked).unwrap_or(i64::MAX);
        let tolerated = Tokens(tolerated).mul_div(history.params.unavailable_ppm, 1_000_000).0;
        if i64::try_from(unavailable.len()).is_ok_and(|n| n <= tolerated) {
            unavailable.clear();
        }
        for (found, how) in [(denied, "denied"), (unavailable, "could not decide")] {
            for joined in join(found, GAP, Refused::add) {
                self.breaches.push((joined.figures.requests, breach(history, limit, region, &joined, how)));
            }
        }
    }

    fn verdict(mut self) -> Verdict {
        if self.reserves == 0 {
            return Verdict::NotApplicable { why: "no limit has a reserve".into() };
        }
        self.breaches.sort_by_key(|(requests, _)| std::cmp::Reverse(*requests));
        let breaches = self.breaches.into_iter().map(|(_, breach)| breach).collect();
        let held = || Verdict::Held {
            detail: format!(
                "{} looked at, {} of them in regions that were cut off: the reserve was used up each time",
                count(self.refusals, "refusal"),
                self.cut_off
            ),
        };
        Verdict::of(breaches, held)
    }
}

impl Refused {
    fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.cost += other.cost;
        self.held = self.held.max(other.held);
    }
}

fn is_refusal(request: &Request) -> bool {
    matches!(request.outcome, Outcome::Denied | Outcome::Unavailable) && request.cost.is_positive()
}

/// When its tokens may have been taken at the latest; `None`: they were not.
fn charged_by(request: &Request) -> Option<Micros> {
    match request.outcome {
        Outcome::Allowed => Some(request.answered),
        Outcome::Unknown | Outcome::Unavailable => Some(request.answered + LATE),
        Outcome::Denied => None,
    }
}

/// What keeps a region from its reserve.
struct Trouble {
    /// It was disabled.
    dead: Spans,
    /// It reached nobody.
    blind: Spans,
    /// It may have lent some of it.
    lent: Spans,
}

/// Something that happened to a region's reserve; of what happens at the same time, the first comes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Edition(usize),
    Lent(bool),
    Disabled { until: Micros },
    Refused(usize),
    Sent { cost: Tokens, answered: Micros },
    Answered { cost: Tokens },
}

/// Which of the refused ones the reserve could have paid for, by time, and what it held.
fn false_refusals<'a>(
    history: &History,
    region: usize,
    watched: &Watched,
    requests: &[&Request],
    refused: &[&'a Request],
    trouble: &Trouble,
) -> Vec<(&'a Request, Tokens)> {
    let mut events: Vec<(Micros, Event)> = Vec::with_capacity(2 * requests.len());
    for request in requests {
        if let (Some(answered), cost) = (charged_by(request), request.cost) {
            events.push((request.sent, Event::Sent { cost, answered }));
            events.push((answered, Event::Answered { cost }));
        }
    }
    events.extend(refused.iter().enumerate().map(|(i, request)| (request.sent, Event::Refused(i))));
    events.extend(trouble.dead.iter().map(|(from, until)| {
        let until = if trouble.blind.touch(from, until) { until + LOAN } else { until };
        (from, Event::Disabled { until })
    }));
    events.extend(
        trouble
            .lent
            .iter()
            .flat_map(|(from, until)| [(from, Event::Lent(true)), (until, Event::Lent(false))]),
    );
    events.extend(watched.editions.iter().enumerate().map(|(i, edition)| (edition.from, Event::Edition(i))));
    events.sort_unstable();

    let spent = Spent::of(requests);
    let changes = Spans::new(watched.editions.iter().skip(1).map(|edition| (edition.from, edition.from)));
    let mut floor = Floor::default();
    let (mut found, mut edition, mut lends) = (Vec::new(), 0, false);
    for (now, event) in events {
        match event {
            Event::Edition(i) => {
                edition = i;
                reshape(&mut floor, history, (watched, i, region), now, lends);
                adopt(&mut floor, history, watched, i, region);
            }
            Event::Lent(now_lent) => {
                lends = now_lent;
                reshape(&mut floor, history, (watched, edition, region), now, lends);
            }
            Event::Disabled { until } => floor.empty(until),
            Event::Sent { cost, answered } => floor.sent(now, cost, answered),
            Event::Answered { cost } => floor.answered(now, cost),
            Event::Refused(i) => {
                let request = refused[i];
                let meanwhile = spent.between(request.sent, request.answered) - spent.own(request);
                let held = floor.level(now) - meanwhile - slack(history, watched, region, now);
                if held >= request.cost && !changes.touch(request.sent, request.answered) {
                    found.push((request, held));
                }
            }
        }
    }
    found
}

/// The reserve of an edition comes into force.
fn adopt(floor: &mut Floor, history: &History, watched: &Watched, edition: usize, region: usize) {
    let from = watched.editions[edition].from.or_zero();
    let before = edition.checked_sub(1).map(|i| watched.editions[i].reserve(region));
    let fill = before.and_then(|(rate, cap)| rate.time_for(cap)).map_or(Micros::ZERO, |fill| fill + LOAN);
    floor.empty(from + history.params.restart + fill);
}

/// It fills at the rate of the reserve, or at what is kept of it.
fn reshape(floor: &mut Floor, history: &History, of: (&Watched, usize, usize), now: Micros, lends: bool) {
    let (watched, edition, region) = of;
    let Some(edition) = watched.editions.get(edition) else { return };
    let (rate, cap) = edition.reserve(region);
    let rate = if lends { kept(rate) } else { rate };
    floor.reshape(now.or_zero(), history.params.rate_min(rate), cap);
}

fn slack(history: &History, watched: &Watched, region: usize, now: Micros) -> Tokens {
    watched
        .edition_at(now)
        .map_or(Tokens::ZERO, |edition| edition.reserve(region).0.during(history.params.slack))
}

/// What may have been taken, by the time of sending: running sums.
struct Spent(Vec<(Micros, Tokens)>);

impl Spent {
    fn of(requests: &[&Request]) -> Self {
        let charged = requests.iter().filter(|r| charged_by(r).is_some());
        let mut sums: Vec<(Micros, Tokens)> = charged.map(|r| (r.sent, r.cost)).collect();
        sums.sort_unstable();
        let mut sum = Tokens::ZERO;
        for (_, cost) in &mut sums {
            sum += *cost;
            *cost = sum;
        }
        Self(sums)
    }

    /// By what was sent in this time, with its ends.
    fn between(&self, from: Micros, to: Micros) -> Tokens {
        let before = |n: usize| n.checked_sub(1).map_or(Tokens::ZERO, |last| self.0[last].1);
        before(self.0.partition_point(|(at, _)| *at <= to))
            - before(self.0.partition_point(|(at, _)| *at < from))
    }

    fn own(&self, request: &Request) -> Tokens {
        if charged_by(request).is_some() { request.cost } else { Tokens::ZERO }
    }
}

fn breach(history: &History, limit: usize, region: usize, found: &Joined<Refused>, how: &str) -> Breach {
    let detail = format!(
        "`{}` in {}: {how} {} for {} tokens while the reserve alone held up to {}",
        history.limits[limit].name,
        history.regions[region],
        count(found.figures.requests, "request"),
        tokens(found.figures.cost),
        tokens(found.figures.held),
    );
    Breach { detail, span: found.span, limit: Some(limit), region: Some(region) }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;
    use crate::oracle::Mode;

    /// Each of two regions keeps 10/s and a burst of 5.
    fn history() -> History {
        let reserve = (Rate::per_second(10), Tokens::whole(5));
        history_of(2, vec![Edition { reserves: vec![reserve; 2], ..edition(0, Mode::Strict, 100, 50) }])
    }

    /// From `from` to `to` (ms), a request each 20 ms; one of `one_in` is admitted.
    fn load(history: &mut History, region: i64, from: i64, to: i64, one_in: i64) {
        for i in 0..(to - from) / 20 {
            let outcome = if i % one_in == 0 { Outcome::Allowed } else { Outcome::Denied };
            history.ask(region, ms(from + i * 20), ms(from + i * 20 + 2), outcome);
        }
    }

    #[test]
    fn a_region_that_admits_its_reserve_and_no_more_holds() {
        let mut history = history();
        load(&mut history, 0, 0, 5_000, 1);
        history.fault(0, ms(5_000), ms(30_000), "cut off").isolates = true;
        load(&mut history, 0, 5_000, 30_000, 5);
        let verdict = ReserveAvailable.check(&history);
        assert!(
            matches!(&verdict, Verdict::Held { detail } if detail.starts_with("1,000 refusals looked at, 1000 of")),
            "{verdict:?}"
        );
    }

    #[test]
    fn a_cut_off_region_that_admits_less_breaks_it() {
        let mut history = history();
        history.fault(0, ms(5_000), ms(30_000), "cut off").isolates = true;
        load(&mut history, 0, 5_000, 30_000, 10);
        let verdict = ReserveAvailable.check(&history);
        let [breach, ..] = verdict.breaches() else { panic!("{verdict:?}") };
        assert_eq!((breach.limit, breach.region), (Some(0), Some(0)));
        assert!(breach.detail.contains("in us-east: denied"), "{}", breach.detail);
    }

    /// Others ask for all of the limit, and this region for nothing, up to a second before it is cut off.
    fn lender() -> History {
        let mut history = history();
        history.end = ms(100_000);
        load(&mut history, 1, 0, 29_000, 2);
        load(&mut history, 1, 0, 29_000, 2);
        history.fault(0, ms(30_000), ms(100_000), "cut off").isolates = true;
        history
    }

    #[test]
    fn a_lender_that_is_cut_off_has_its_burst_and_a_tenth_of_the_rate_until_the_loan_is_over() {
        let mut history = lender();
        load(&mut history, 0, 30_000, 30_100, 1);
        load(&mut history, 0, 31_000, 60_000, 50);
        // By now it is full again, of the whole rate.
        load(&mut history, 0, 75_000, 75_100, 1);
        load(&mut history, 0, 75_100, 100_000, 5);
        let verdict = ReserveAvailable.check(&history);
        assert!(!verdict.is_broken(), "{verdict:?}");
    }

    #[test]
    fn a_lender_that_keeps_less_than_a_tenth_or_lends_for_longer_breaks_it() {
        let mut history = lender();
        load(&mut history, 0, 30_000, 30_100, 1);
        load(&mut history, 0, 31_000, 60_000, 150);
        assert!(ReserveAvailable.check(&history).is_broken());
        let mut history = lender();
        load(&mut history, 0, 30_000, 30_100, 1);
        load(&mut history, 0, 31_000, 95_000, 50);
        assert!(ReserveAvailable.check(&history).is_broken());
    }

    #[test]
    fn the_burst_belongs_to_the_reserve() {
        let mut history = history();
        history.ask(1, ms(20_000), ms(20_010), Outcome::Allowed);
        history.ask(1, ms(20_020), ms(20_030), Outcome::Denied);
        assert!(
            ReserveAvailable.check(&history).is_broken(),
            "four of five are left, less what comes in 250 ms"
        );
        history.requests.pop();
        (0..4).for_each(|_| history.ask(1, ms(20_000), ms(20_010), Outcome::Allowed));
        history.ask(1, ms(20_020), ms(20_030), Outcome::Denied);
        assert!(!ReserveAvailable.check(&history).is_broken(), "all five were spent");
    }

    #[test]
    fn what_may_have_been_spent_meanwhile_counts_as_spent() {
        let mut history = history();
        history.ask(1, ms(20_000), ms(20_500), Outcome::Denied);
        assert!(ReserveAvailable.check(&history).is_broken());
        (0..5).for_each(|_| history.ask(1, ms(20_100), ms(20_900), Outcome::Allowed));
        assert!(!ReserveAvailable.check(&history).is_broken());
    }

    #[test]
    fn a_disabled_region_owes_nothing_and_starts_empty() {
        let mut history = history();
        history.fault(0, ms(10_000), ms(20_000), "killed").disables = true;
        load(&mut history, 0, 10_000, 20_000, 1_000);
        history.ask(0, ms(23_050), ms(23_060), Outcome::Denied);
        assert!(!ReserveAvailable.check(&history).is_broken());
        history.ask(0, ms(24_000), ms(24_001), Outcome::Denied);
        assert!(ReserveAvailable.check(&history).is_broken());
    }

    #[test]
    fn a_region_that_cannot_decide_breaks_it_if_it_does_so_often() {
        let mut history = history();
        load(&mut history, 0, 4_000, 5_000, 1);
        load(&mut history, 0, 5_000, 30_000, 5);
        (0..13).for_each(|i| {
            history.ask(0, ms(31_000 + 1_000 * i), ms(31_001 + 1_000 * i), Outcome::Unavailable)
        });
        assert!(!ReserveAvailable.check(&history).is_broken());
        history.ask(0, ms(50_000), ms(50_001), Outcome::Unavailable);
        assert!(ReserveAvailable.check(&history).is_broken());
    }

    #[test]
    fn a_smaller_reserve_counts_while_a_policy_changes() {
        let mut history = history();
        let none = edition(60_000, Mode::Strict, 100, 50);
        let changing = history.limits[0].editions[0].changing_to(ms(20_000), &none);
        history.limits[0].editions.push(changing);
        history.ask(0, ms(40_000), ms(40_001), Outcome::Denied);
        assert!(!ReserveAvailable.check(&history).is_broken());
        history.ask(0, ms(19_000), ms(19_001), Outcome::Denied);
        assert!(ReserveAvailable.check(&history).is_broken());
    }

    #[test]
    fn no_reserve_nothing_to_judge() {
        let history = history_of(1, vec![edition(0, Mode::Strict, 1, 1)]);
        assert!(matches!(ReserveAvailable.check(&history), Verdict::NotApplicable { .. }));
    }
}
