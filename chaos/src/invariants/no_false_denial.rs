//! In quiet time, nobody is turned away while there are tokens.

use super::figures::{count, seconds, span};
use super::floor::Floor;
use super::spans::{Spans, disturbed, join};
use super::{Breach, Invariant, Verdict};
use crate::oracle::{Edition, History, Mode, Outcome, Request, Watched};
use quorate::quota::amount::{MICROS_PER_SECOND, Micros, Rate, Tokens};
use std::ops::Range;

/// Denials that are closer together are one breach.
const GAP: Micros = Micros::seconds(1);
/// What was charged without an answer may be charged so much later.
const LATE: Micros = Micros::seconds(1);

/// In quiet time a region that keeps asking is not denied for longer than the stated
/// [`move_time`](crate::oracle::Params::move_time), while tokens are there with ample margin.
///
/// A single denial proves nothing: tokens may sit in other regions' reserves, which nobody else can have, or in their leases,
/// from where they take some time. What is promised is that they come. So a denial, at *b*, is false if all of this is so:
///
/// - **It lasts.** The same region was denied before, at *a*, one to two move times ago, and has asked without a pause of more than
///   half a move time since.
/// - **It is quiet.** No fault, and no change of policy, since one recovery time before *a*.
/// - **Tokens are there.** An ideal bucket is at least half full from *a* to *b*. It has what this region could have: the limit's rate
///   and burst less the other regions' reserves (split: the region's own part); it fills 1% slower, by a clock that may be slow,
///   was empty when quiet began, and pays for everything that any region may have admitted, with every doubt against it.
/// - **Little is asked for.** From *a* to *b*, all regions together asked for at most half of what flows, denied requests included;
///   this region, for at most a quarter of the ideal bucket's burst in the last second, and as much a second on average;
///   the request itself for no more than that.
#[derive(Clone, Copy, Debug)]
pub struct NoFalseDenial;

impl Invariant for NoFalseDenial {
    fn name(&self) -> &'static str {
        "no-false-denial"
    }

    fn promise(&self) -> &'static str {
        "In quiet time, a region that keeps asking is not denied for longer than tokens take to get there, while there are plenty."
    }

    fn check(&self, history: &History) -> Verdict {
        let mut looked = 0;
        let mut breaches = Vec::new();
        for (limit, watched) in history.limits.iter().enumerate() {
            let quiet = Quiet::of(history, limit, watched);
            for region in 0..history.regions.len() {
                let denied = quiet.denied(region);
                if !denied.is_empty() {
                    looked += denied.len();
                    breaches.extend(false_denials(history, &quiet, region, &denied));
                }
            }
        }
        if looked == 0 {
            return Verdict::NotApplicable { why: "nobody was denied in quiet time".into() };
        }
        breaches.sort_by_key(|(n, _)| std::cmp::Reverse(*n));
        let breaches = breaches.into_iter().map(|(_, breach)| breach).collect();
        Verdict::of(breaches, || Verdict::Held {
            detail: format!(
                "{} in quiet time: none went on for {} with plenty of tokens there",
                count(looked, "denial"),
                seconds(history.params.move_time)
            ),
        })
    }
}

/// A limit, what was asked of it, and when it was quiet.
struct Quiet<'a> {
    limit: usize,
    watched: &'a Watched,
    /// Faults and changes, and the time to get over them.
    disturbed: Spans,
    /// By sending.
    requests: Vec<&'a Request>,
    /// What may have been taken, and when: by time. (Not worked out if nobody was denied in quiet time.)
    taken: Vec<(Micros, Taken)>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Taken {
    Sent { cost: Tokens, answered: Micros, region: usize },
    Answered { cost: Tokens, region: usize },
}

impl<'a> Quiet<'a> {
    fn of(history: &'a History, limit: usize, watched: &'a Watched) -> Self {
        let recovery = history.params.recovery_of(watched);
        let start = watched.editions.first().map_or(Micros::ZERO, |edition| edition.from.or_zero());
        let disturbed = disturbed(history, limit);
        let spans = disturbed.iter().chain([(Micros(i64::MIN), start)]);
        let disturbed = Spans::new(spans.map(|(from, to)| (from, to + recovery)));
        let mut requests: Vec<&Request> =
            history.requests.iter().filter(|r| r.limit == limit && r.cost.is_positive()).collect();
        requests.sort_unstable_by_key(|r| (r.sent, r.answered));
        let mut quiet = Self { limit, watched, disturbed, requests, taken: Vec::new() };
        if (0..history.regions.len()).any(|region| !quiet.denied(region).is_empty()) {
            quiet.taken = quiet.takings();
        }
        quiet
    }

    fn takings(&self) -> Vec<(Micros, Taken)> {
        let mut taken = Vec::with_capacity(2 * self.requests.len());
        for (request, answered) in self.requests.iter().filter_map(|r| Some((r, taken_by(r)?))) {
            let (cost, region) = (request.cost, request.region);
            taken.push((request.sent, Taken::Sent { cost, answered, region }));
            taken.push((answered, Taken::Answered { cost, region }));
        }
        taken.sort_unstable();
        taken
    }

    /// Denials of a region in quiet time, by sending.
    fn denied(&self, region: usize) -> Vec<&'a Request> {
        let denied = self.requests.iter().filter(|r| {
            r.outcome == Outcome::Denied && r.region == region && !self.disturbed.touch(r.sent, r.answered)
        });
        denied.copied().collect()
    }

    /// What this region could have of an edition, with all that is lent.
    fn ideal(history: &History, edition: &Edition, region: usize) -> (Rate, Tokens) {
        if edition.mode == Mode::Split {
            let (rate, burst) = edition.reserve(region);
            return (history.params.rate_min(rate), burst);
        }
        let others = edition.reserves.iter().enumerate().filter(|(i, _)| *i != region);
        let (rate, burst) =
            others.fold((edition.rate, edition.burst), |(r, b), (_, other)| (r - other.0, b - other.1));
        (history.params.rate_min(rate.or_zero()), burst.or_zero())
    }
}

/// When its tokens may have been taken at the latest; `None`: they were not.
fn taken_by(request: &Request) -> Option<Micros> {
    match request.outcome {
        Outcome::Allowed => Some(request.answered),
        Outcome::Unknown | Outcome::Unavailable => Some(request.answered + LATE),
        Outcome::Denied => None,
    }
}

fn false_denials(
    history: &History,
    quiet: &Quiet<'_>,
    region: usize,
    denied: &[&Request],
) -> Vec<(usize, Breach)> {
    let asked = Asked::of(quiet, region, history.params.move_time.mul_div(1, 2));
    let mut order: Vec<usize> = (0..denied.len()).collect();
    order.sort_by_key(|i| denied[*i].answered);
    let mut found: Vec<((Micros, Micros), usize)> = Vec::new();
    let mut ideal = IdealBucket::new(history, quiet, region);
    for i in order {
        let last = denied[i];
        ideal.advance(last.answered);
        let from = last.sent - history.params.move_time.mul_div(2, 1);
        let from = from.max(ideal.low_until + Micros(1)).max(asked.since(last.sent));
        let first = denied.get(denied.partition_point(|d| d.sent < from)).copied();
        let Some(first) = first.filter(|first| last.sent - first.answered >= history.params.move_time) else {
            continue;
        };
        if asked.is_little(ideal.rate, ideal.cap, first.sent..last.sent) && last.cost <= quarter(ideal.cap) {
            found.push(((first.sent, last.answered), 1));
        }
    }
    found.sort_unstable();
    let what = format!("`{}` in {}", quiet.watched.name, history.regions[region]);
    let words = |(n, at): (usize, (Micros, Micros))| {
        let detail = format!(
            "{what} denied {} in {} after denying for {} already, though an ideal bucket was at least half full",
            count(n, "request"),
            span(at),
            seconds(history.params.move_time),
        );
        (n, Breach { detail, span: at, limit: Some(quiet.limit), region: Some(region) })
    };
    join(found, GAP, |sum, n| *sum += n)
        .into_iter()
        .map(|joined| words((joined.figures, joined.span)))
        .collect()
}

fn quarter(cap: Tokens) -> Tokens {
    cap.mul_div(1, 4)
}

/// The ideal bucket, run through time.
struct IdealBucket<'a> {
    history: &'a History,
    quiet: &'a Quiet<'a>,
    region: usize,
    floor: Floor,
    rate: Rate,
    cap: Tokens,
    /// When it was less than half full the last time, as far as is known.
    low_until: Micros,
    /// What comes next.
    taken: usize,
    edition: usize,
    disturbance: Vec<(Micros, Micros)>,
}

impl<'a> IdealBucket<'a> {
    fn new(history: &'a History, quiet: &'a Quiet<'a>, region: usize) -> Self {
        let mut disturbance: Vec<_> = quiet.disturbed.iter().collect();
        disturbance.reverse();
        Self {
            history,
            quiet,
            region,
            floor: Floor::default(),
            rate: Rate::ZERO,
            cap: Tokens::ZERO,
            low_until: Micros(i64::MIN),
            taken: 0,
            edition: 0,
            disturbance,
        }
    }

    /// Lets everything happen until this time.
    fn advance(&mut self, until: Micros) {
        loop {
            let taken = self.quiet.taken.get(self.taken).map_or(Micros::MAX, |(at, _)| *at);
            let edition = self.quiet.watched.editions.get(self.edition).map_or(Micros::MAX, |e| e.from);
            let disturbed = self.disturbance.last().map_or(Micros::MAX, |(from, _)| *from);
            let now = taken.min(edition).min(disturbed);
            if now > until || now == Micros::MAX {
                break;
            }
            if edition == now {
                let edition = &self.quiet.watched.editions[self.edition];
                (self.rate, self.cap) = Quiet::ideal(self.history, edition, self.region);
                self.floor.reshape(now, self.rate, self.cap);
                self.edition += 1;
            } else if disturbed == now {
                if let Some((_, over)) = self.disturbance.pop() {
                    self.floor.empty(over);
                }
            } else {
                self.take(now);
                self.taken += 1;
            }
            self.note(now);
        }
        self.note(until);
    }

    fn take(&mut self, now: Micros) {
        let split = self.quiet.watched.editions.get(self.edition.saturating_sub(1));
        let own = split.is_some_and(|edition| edition.mode == Mode::Split);
        match self.quiet.taken[self.taken].1 {
            Taken::Sent { cost, answered, region } if !own || region == self.region => {
                self.floor.sent(now, cost, answered);
            }
            Taken::Answered { cost, region } if !own || region == self.region => {
                self.floor.answered(now, cost);
            }
            _ => {}
        }
    }

    fn note(&mut self, now: Micros) {
        let half = self.cap.mul_div(1, 2);
        if self.floor.level(now) < half || !self.cap.is_positive() {
            let until = self.floor.holds_at(half).unwrap_or(Micros::MAX).max(now);
            self.low_until = self.low_until.max(until);
        }
    }
}

/// What was asked for.
struct Asked {
    /// Of this region, by sending: when, since when without a pause, and running sums.
    own: Vec<(Micros, Micros, Tokens)>,
    /// Of all regions that share what there is.
    all: Vec<(Micros, Tokens)>,
}

impl Asked {
    fn of(quiet: &Quiet<'_>, region: usize, pause: Micros) -> Self {
        let split = quiet.watched.editions.iter().all(|edition| edition.mode == Mode::Split);
        let (mut own, mut all) = (Vec::new(), Vec::with_capacity(quiet.requests.len()));
        let (mut sums, mut since, mut last) = ((Tokens::ZERO, Tokens::ZERO), Micros::ZERO, None);
        for request in &quiet.requests {
            if request.region == region {
                if last.is_none_or(|last| request.sent - last > pause) {
                    since = request.sent;
                }
                last = Some(request.sent);
                sums.0 += request.cost;
                own.push((request.sent, since, sums.0));
            }
            if request.region == region || !split {
                sums.1 += request.cost;
                all.push((request.sent, sums.1));
            }
        }
        Self { own, all }
    }

    /// Since when the region has asked without a pause, at this time.
    fn since(&self, at: Micros) -> Micros {
        let n = self.own.partition_point(|(sent, ..)| *sent <= at);
        n.checked_sub(1).map_or(Micros::MAX, |last| self.own[last].1)
    }

    fn is_little(&self, rate: Rate, cap: Tokens, time: Range<Micros>) -> bool {
        let second = Micros::seconds(1);
        let average = quarter(cap).mul_div((time.end - time.start).0, MICROS_PER_SECOND);
        self.all_in(&time) <= rate.during(time.end - time.start).mul_div(1, 2)
            && self.own_in(&(time.end - second..time.end)) <= quarter(cap)
            && self.own_in(&time) <= average
    }

    /// In this time, with both its ends.
    fn own_in(&self, time: &Range<Micros>) -> Tokens {
        let sum = |n: usize| n.checked_sub(1).map_or(Tokens::ZERO, |last| self.own[last].2);
        sum(self.own.partition_point(|(sent, ..)| *sent <= time.end))
            - sum(self.own.partition_point(|(sent, ..)| *sent < time.start))
    }

    fn all_in(&self, time: &Range<Micros>) -> Tokens {
        let sum = |n: usize| n.checked_sub(1).map_or(Tokens::ZERO, |last| self.all[last].1);
        sum(self.all.partition_point(|(sent, _)| *sent <= time.end))
            - sum(self.all.partition_point(|(sent, _)| *sent < time.start))
    }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;

    /// 100/s, burst 100, of which each of two regions keeps 10%; quiet from 20 s on.
    fn history() -> History {
        let reserve = (Rate::per_second(10), Tokens::whole(10));
        history_of(2, vec![Edition { reserves: vec![reserve; 2], ..edition(0, Mode::Strict, 100, 100) }])
    }

    /// A request each 200 ms.
    fn load(history: &mut History, region: i64, from: i64, to: i64, outcome: Outcome) {
        for i in 0..(to - from) / 200 {
            history.ask(region, ms(from + i * 200), ms(from + i * 200 + 5), outcome);
        }
    }

    fn check(history: &History) -> Verdict {
        NoFalseDenial.check(history)
    }

    #[test]
    fn denials_that_end_in_time_hold() {
        let mut history = history();
        load(&mut history, 1, 0, 60_000, Outcome::Allowed);
        load(&mut history, 0, 40_000, 42_000, Outcome::Denied);
        load(&mut history, 0, 42_000, 60_000, Outcome::Allowed);
        let verdict = check(&history);
        assert!(
            matches!(&verdict, Verdict::Held { detail } if detail.starts_with("10 denials in quiet time")),
            "{verdict:?}"
        );
    }

    #[test]
    fn denials_that_go_on_break_it() {
        let mut history = history();
        load(&mut history, 1, 0, 60_000, Outcome::Allowed);
        load(&mut history, 0, 40_000, 45_000, Outcome::Denied);
        let verdict = check(&history);
        let [breach] = verdict.breaches() else { panic!("{verdict:?}") };
        assert_eq!((breach.span, breach.region), ((ms(40_000), ms(44_805)), Some(0)));
    }

    #[test]
    fn denials_between_admissions_break_it_too() {
        let mut history = history();
        for i in 0..50 {
            let outcome = if i % 2 == 0 { Outcome::Denied } else { Outcome::Allowed };
            history.ask(0, ms(40_000 + i * 200), ms(40_001 + i * 200), outcome);
        }
        assert!(check(&history).is_broken());
    }

    #[test]
    fn a_split_region_owes_its_own_part_whatever_others_spend() {
        let mut history = history();
        history.limits[0].editions[0].mode = Mode::Split;
        (0..20).for_each(|_| load(&mut history, 1, 0, 60_000, Outcome::Allowed));
        load(&mut history, 0, 40_000, 45_000, Outcome::Denied);
        assert!(
            !check(&history).is_broken(),
            "5/s is half of its part, and more than a quarter of its burst a second"
        );
        history.limits[0].editions[0].reserves = vec![(Rate::per_second(20), Tokens::whole(40)); 2];
        assert!(check(&history).is_broken());
    }

    #[test]
    fn denials_in_unquiet_time_are_no_breach() {
        let mut history = history();
        load(&mut history, 0, 40_000, 43_000, Outcome::Denied);
        assert!(check(&history).is_broken());
        history.fault(1, ms(19_000), ms(25_000), "cut off");

        assert!(matches!(check(&history), Verdict::NotApplicable { .. }), "two leases after it");
        history.faults[0].to = Some(ms(20_500));
        assert!(!check(&history).is_broken(), "an ideal bucket is not half full before 40.96 s");
    }

    #[test]
    fn denials_while_the_limit_is_used_up_are_no_breach() {
        let mut history = history();
        (0..21).for_each(|_| load(&mut history, 1, 20_000, 60_000, Outcome::Allowed));
        load(&mut history, 0, 40_000, 45_000, Outcome::Denied);
        assert!(!check(&history).is_broken());
    }

    #[test]
    fn denials_of_more_than_the_limit_are_no_breach() {
        let mut history = history();
        (0..6).for_each(|_| load(&mut history, 0, 40_000, 45_000, Outcome::Denied));
        assert!(!check(&history).is_broken(), "30/s is more than a quarter of 90 in a second");
        let mut history = self::history();
        (0..11).for_each(|_| load(&mut history, 1, 40_000, 45_000, Outcome::Denied));
        load(&mut history, 0, 40_000, 45_000, Outcome::Denied);
        assert!(!check(&history).is_broken(), "60/s is more than half of 90/s");
    }

    #[test]
    fn denials_with_pauses_are_no_breach() {
        let mut history = history();
        for i in 0..10 {
            history.ask(0, ms(40_000 + 1_500 * i), ms(40_001 + 1_500 * i), Outcome::Denied);
        }
        assert!(!check(&history).is_broken(), "what was asked for 1.5 s ago may have been given up again");
        load(&mut history, 0, 40_000, 55_000, Outcome::Allowed);
        assert!(check(&history).is_broken());
    }

    #[test]
    fn a_cost_that_the_bucket_hardly_holds_is_no_breach() {
        let mut history = history();
        load(&mut history, 0, 40_000, 45_000, Outcome::Denied);
        history.limits[0].editions[0].burst = Tokens::whole(23);
        assert!(!check(&history).is_broken(), "5 in a second are more than a quarter of 13");
    }
}
