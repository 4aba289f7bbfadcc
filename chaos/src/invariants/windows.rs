//! The exact check of a bound: in ANY window of T seconds at most `cap + rate·T` are admitted.
//!
//! A client sees when it sent a request and when the answer came; the admission happened at some moment in between. So a
//! window is known to hold an admission only if it holds both. [`Bound`] counts what a window certainly holds, and so
//! never raises a false alarm; what it can miss is a breach smaller than what is in flight at a window's two ends. It
//! looks at every window there is: the worst one always opens at a sending and closes at an answer.
//!
//! A limit that changes is a list of steps: what flows in a window is the integral of the rate, and its cap the largest
//! of the steps that the window touches.

use quorate::quota::amount::{Micros, Rate, Tokens};

/// One admitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// When it was sent.
    pub sent: Micros,
    /// When its answer was there.
    pub answered: Micros,
    /// What it cost: more than nothing.
    pub cost: Tokens,
}

/// A limit for some time: until the next step's `from`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Since when. (The first one also counts before.)
    pub from: Micros,
    /// Tokens a second.
    pub rate: Rate,
    /// Tokens at once.
    pub cap: Tokens,
}

/// A limit over time, to be held against what was admitted.
#[derive(Clone, Debug, Default)]
pub struct Bound {
    steps: Vec<Step>,
    /// What has flowed at the beginning of each step, since the first one's.
    flowed: Vec<Fine>,
}

/// A window of time, and what it certainly holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// From when ...
    pub opens: Micros,
    /// ... until when.
    pub closes: Micros,
    /// The cap that counts in it.
    pub cap: Tokens,
    /// Above the bound by so much: broken if positive.
    pub excess: Fine,
}

/// Millionths of a micro-token: a rate in micro-tokens a second times a time in microseconds, exactly.
pub type Fine = i128;
/// How many there are in a micro-token.
const FINE: Fine = 1_000_000;
/// Less than any count; halved, so that sums stay in range.
const NOTHING: Fine = Fine::MIN / 4;

impl Bound {
    /// A limit with these steps, by [`Step::from`], ascending.
    #[must_use]
    pub fn new(steps: Vec<Step>) -> Self {
        let mut flowed: Vec<Fine> = steps.iter().take(1).map(|_| 0).collect();
        let mut sum = 0;
        for pair in steps.windows(2) {
            sum += fine(pair[0].rate, pair[1].from - pair[0].from);
            flowed.push(sum);
        }
        Self { steps, flowed }
    }

    /// The worst of all windows that hold anything.
    #[must_use]
    pub fn worst(&self, admitted: &[Admitted]) -> Option<Window> {
        let mut worst: Option<Window> = None;
        self.each_closing(admitted, |excess, window| {
            if worst.is_none_or(|w| excess > w.excess) {
                worst = Some(window());
            }
        });
        worst
    }

    /// The worst window that closes at each answer, in the order of answers: how far it is above the bound, and which it is.
    /// (Of answers at the same time, only the last says all.)
    ///
    /// A window opens at a sending. Once its answer is in, a request counts in all windows that open at or before its
    /// sending: the tree keeps the sum from each opening on, and which is the worst, so that all n² windows take n log n
    /// steps.
    pub fn each_closing(&self, admitted: &[Admitted], mut visit: impl FnMut(Fine, &dyn Fn() -> Window)) {
        if self.steps.is_empty() {
            return;
        }
        let mut openings: Vec<&Admitted> = admitted.iter().collect();
        openings.sort_unstable_by_key(|request| request.sent);
        let mut closings: Vec<(Micros, usize)> =
            openings.iter().enumerate().map(|(place, request)| (request.answered, place)).collect();
        closings.sort_unstable();

        let mut tree = SuffixTree::new(openings.len());
        let mut step = 0;
        for (closes, place) in closings {
            let now = self.step_at(closes);
            if now != step {
                step = now;
                tree.reset_offsets(|place| self.offset(openings[place].sent, step));
            }
            let request = openings[place];
            tree.insert(place, Fine::from(request.cost.0) * FINE, self.offset(request.sent, step));
            let excess = tree.max() - self.flow(closes);
            visit(excess, &|| {
                let opens = openings[tree.place_of_max()].sent;
                Window { opens, closes, cap: self.cap(opens, step), excess }
            });
        }
    }

    /// What has flowed until `at`, since the first step began.
    fn flow(&self, at: Micros) -> Fine {
        let i = self.step_at(at);
        self.flowed[i] + fine(self.steps[i].rate, at - self.steps[i].from)
    }

    /// What a window that opens here is above the bound, but for what it holds and what flows until it closes.
    fn offset(&self, opens: Micros, closing_step: usize) -> Fine {
        self.flow(opens) - Fine::from(self.cap(opens, closing_step).0) * FINE
    }

    /// The largest cap of all steps that a window touches, with its ends.
    fn cap(&self, opens: Micros, closing_step: usize) -> Tokens {
        let first = self.steps.partition_point(|step| step.from < opens).saturating_sub(1);
        let touched = self.steps.get(first..=closing_step).unwrap_or_default();
        touched.iter().map(|step| step.cap).max().unwrap_or_default()
    }

    /// The last step that has begun.
    fn step_at(&self, at: Micros) -> usize {
        self.steps.partition_point(|step| step.from <= at).saturating_sub(1)
    }
}

impl Window {
    /// How long it is.
    #[must_use]
    pub fn length(&self) -> Micros {
        self.closes - self.opens
    }

    /// By how much it is above the bound, rounded up (negative: below).
    #[must_use]
    pub fn excess(&self) -> Tokens {
        let up = -(-self.excess).div_euclid(FINE);
        Tokens(i64::try_from(up).unwrap_or(if up > 0 { i64::MAX } else { i64::MIN }))
    }

    /// What of the cap was in use: what the window holds less what flowed in it.
    #[must_use]
    pub fn used(&self) -> Tokens {
        self.cap + self.excess()
    }

    /// What it certainly holds.
    #[must_use]
    pub fn held(&self, admitted: &[Admitted]) -> Tokens {
        let inside = admitted.iter().filter(|a| a.sent >= self.opens && a.answered <= self.closes);
        inside.map(|a| a.cost).sum()
    }
}

fn fine(rate: Rate, time: Micros) -> Fine {
    Fine::from(rate.0) * Fine::from(time.0)
}

/// Numbers in a row, absent at first, each with an offset; and the largest of `offset + sum of all numbers from here on`
/// over those that are present.
struct SuffixTree {
    leaves: usize,
    nodes: Vec<Node>,
    present: Vec<bool>,
}

/// Of the numbers below it: their sum, and the largest of the above among them alone.
#[derive(Clone, Copy)]
struct Node {
    sum: Fine,
    max: Fine,
}

impl SuffixTree {
    fn new(len: usize) -> Self {
        let leaves = len.next_power_of_two();
        Self { leaves, nodes: vec![Node { sum: 0, max: NOTHING }; 2 * leaves], present: vec![false; len] }
    }

    fn insert(&mut self, place: usize, number: Fine, offset: Fine) {
        self.present[place] = true;
        let mut node = self.leaves + place;
        self.nodes[node] = Node { sum: number, max: number + offset };
        while node > 1 {
            node /= 2;
            self.join(node);
        }
    }

    /// Gives all that are present another offset.
    fn reset_offsets(&mut self, offset: impl Fn(usize) -> Fine) {
        for (place, _) in self.present.iter().enumerate().filter(|(_, present)| **present) {
            let leaf = &mut self.nodes[self.leaves + place];
            leaf.max = leaf.sum + offset(place);
        }
        for node in (1..self.leaves).rev() {
            self.join(node);
        }
    }

    /// The largest. (One at least must be present.)
    fn max(&self) -> Fine {
        self.nodes[1].max
    }

    /// Where it is.
    fn place_of_max(&self) -> usize {
        let mut node = 1;
        while node < self.leaves {
            let right = 2 * node + 1;
            node = if self.nodes[right].max == self.nodes[node].max { right } else { 2 * node };
        }
        node - self.leaves
    }

    fn join(&mut self, node: usize) {
        let (left, right) = (self.nodes[2 * node], self.nodes[2 * node + 1]);
        self.nodes[node] = Node { sum: left.sum + right.sum, max: right.max.max(left.max + right.sum) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn admitted(history: &[(i64, i64, i64)]) -> Vec<Admitted> {
        let request = |(sent, took, cost): &(i64, i64, i64)| Admitted {
            sent: Micros::millis(*sent),
            answered: Micros::millis(sent + took),
            cost: Tokens::whole(*cost),
        };
        history.iter().map(request).collect()
    }

    fn steps(steps: &[(i64, i64, i64)]) -> Vec<Step> {
        let step = |(from, rate, cap): &(i64, i64, i64)| Step {
            from: Micros::millis(*from),
            rate: Rate::per_second(*rate),
            cap: Tokens::whole(*cap),
        };
        steps.iter().map(step).collect()
    }

    /// Every window, its flow and its cap looked for in all steps.
    fn by_trying_all(steps: &[Step], admitted: &[Admitted]) -> Option<Fine> {
        let opens = admitted.iter().map(|a| a.sent);
        let windows = opens.flat_map(|a| admitted.iter().map(move |b| (a, b.answered)));
        let holding = |(a, b): &(Micros, Micros)| admitted.iter().any(|r| r.sent >= *a && r.answered <= *b);
        windows.filter(holding).map(|(a, b)| excess(steps, admitted, a, b)).max()
    }

    fn excess(steps: &[Step], admitted: &[Admitted], a: Micros, b: Micros) -> Fine {
        let (mut flow, mut cap) = (0, Tokens::ZERO);
        for (i, step) in steps.iter().enumerate() {
            let from = if i == 0 { Micros(i64::MIN / 2) } else { step.from };
            let to = steps.get(i + 1).map_or(Micros(i64::MAX / 2), |next| next.from);
            if from <= b && to >= a {
                cap = cap.max(step.cap);
                flow += fine(step.rate, (to.min(b) - from.max(a)).or_zero());
            }
        }
        let inside = admitted.iter().filter(|r| r.sent >= a && r.answered <= b);
        inside.map(|r| Fine::from(r.cost.0) * FINE).sum::<Fine>() - flow - Fine::from(cap.0) * FINE
    }

    proptest! {
        #[test]
        fn finds_what_trying_every_window_finds(
            history in prop::collection::vec((0_i64..3_000, 0_i64..400, 1_i64..4), 0..50),
            mut changes in prop::collection::vec((-100_i64..3_500, 0_i64..40, 0_i64..30), 1..5),
        ) {
            changes.sort_unstable();
            changes.dedup_by_key(|(from, ..)| *from);
            let (steps, admitted) = (steps(&changes), admitted(&history));
            let worst = Bound::new(steps.clone()).worst(&admitted);
            prop_assert_eq!(worst.map(|w| w.excess), by_trying_all(&steps, &admitted));
            if let Some(w) = worst {
                prop_assert_eq!(excess(&steps, &admitted, w.opens, w.closes), w.excess, "it is that window");
                let allowed = -excess(&steps, &[], w.opens, w.closes);
                prop_assert_eq!(Fine::from(w.held(&admitted).0) * FINE - allowed, w.excess);
            }
        }
    }

    #[test]
    fn one_too_many_is_seen_and_exactly_enough_is_not() {
        let bound = Bound::new(steps(&[(0, 10, 3)]));
        let enough = admitted(&[(0, 0, 1), (0, 0, 1), (0, 0, 1), (100, 0, 1), (200, 0, 1)]);
        assert_eq!(bound.worst(&enough).map(|w| w.excess), Some(0));
        let too_many = admitted(&[(0, 0, 1), (0, 0, 1), (0, 0, 1), (100, 0, 1), (150, 0, 1)]);
        let worst = bound.worst(&too_many).unwrap();
        assert_eq!((worst.opens, worst.closes), (Micros(0), Micros::millis(150)));
        assert_eq!((worst.excess(), worst.used()), (Tokens(500_000), Tokens(3_500_000)));
    }

    #[test]
    fn what_may_have_been_admitted_outside_a_window_is_no_breach() {
        let history = admitted(&[(0, 100, 1), (50, 100, 1)]);
        let never = Bound::new(steps(&[(0, 0, 1)]));
        assert!(never.worst(&history).unwrap().excess > 0, "both are inside 0..150 for certain");
        let slow = Bound::new(steps(&[(0, 10, 1)]));
        assert!(slow.worst(&history).unwrap().excess <= 0, "they may be 100 ms apart");
    }

    #[test]
    fn the_largest_cap_that_a_window_touches_counts() {
        let bound = Bound::new(steps(&[(0, 0, 10), (1_000, 0, 2)]));
        let across = admitted(&[(999, 0, 8), (1_001, 0, 2)]);
        assert_eq!(bound.worst(&across).unwrap().excess, 0);
        let after = admitted(&[(1_001, 0, 2), (1_002, 0, 1)]);
        assert_eq!(bound.worst(&after).unwrap().excess(), Tokens::whole(1));
    }

    #[test]
    fn nothing_admitted_has_no_worst_window() {
        assert_eq!(Bound::new(steps(&[(0, 1, 1)])).worst(&[]), None);
        assert_eq!(Bound::new(vec![]).worst(&admitted(&[(0, 0, 1)])), None);
    }
}
