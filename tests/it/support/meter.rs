//! The exact check of the promise: in ANY window of T seconds at most `burst + rate * T` are admitted.
//!
//! A test sees when it sent a request and when the answer came; the admission happened at some moment in between. So a
//! window is known to hold an admission only if it holds both: a request that was sent before the window opened, or
//! answered after it closed, may have been admitted outside. The meter counts what a window certainly holds, and so
//! never raises a false alarm; what it can miss is a breach smaller than what is in flight at a window's two ends. It
//! looks at every window there is: the worst one always opens at a sending and closes at an answer.

use std::time::Instant;

/// One admitted request.
#[derive(Clone, Copy, Debug)]
pub struct Admitted {
    /// When it was sent.
    pub sent: Instant,
    /// When its answer was there.
    pub answered: Instant,
    /// What it cost.
    pub cost: u32,
}

/// A token bucket limit, held against what was admitted.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Tokens in `per_seconds`.
    pub amount: u32,
    /// The unit of the rate, in seconds.
    pub per_seconds: u32,
    /// The burst, and `max_overshoot` if there is one.
    pub burst: u32,
}

impl Bound {
    /// So much a second.
    pub const fn per_second(amount: u32, burst: u32) -> Self {
        Self { amount, per_seconds: 1, burst }
    }

    /// Panics if there is a window that certainly holds more than the bound allows.
    pub fn must_hold(&self, admitted: &[Admitted]) {
        let worst = self.worst_excess(admitted);
        assert!(
            worst <= 0,
            "the bound {self:?} is broken: some window holds {:.3} tokens more than it may, of {} admitted",
            worst as f64 / (1e6 * f64::from(self.per_seconds)),
            admitted.len()
        );
    }

    /// How far the worst window is above the bound, in millionths of a token times `per_seconds`; not above 0 if it holds.
    ///
    /// Windows are opened at every sending, latest first. `counts[j]` is what the window that closes at the j-th
    /// answer certainly holds, less what it may refill; opening it earlier adds a request to all windows that close
    /// at or after its answer. The tree keeps the maximum, so all n² windows take n log n steps.
    fn worst_excess(&self, admitted: &[Admitted]) -> i128 {
        let Some(start) = admitted.iter().map(|a| a.sent).min() else { return i128::MIN };
        let micros = |t: Instant| i128::try_from((t - start).as_micros()).expect("a test is short");
        let (rate, unit) = (i128::from(self.amount), 1_000_000 * i128::from(self.per_seconds));

        let mut closings: Vec<i128> = admitted.iter().map(|a| micros(a.answered)).collect();
        closings.sort_unstable();
        let mut openings: Vec<&Admitted> = admitted.iter().collect();
        openings.sort_unstable_by_key(|a| std::cmp::Reverse(a.sent));

        let mut counts = MaxTree::new(&closings.iter().map(|at| -rate * at).collect::<Vec<_>>());
        let mut worst = i128::MIN;
        for opening in openings {
            let opened = micros(opening.sent);
            let first = closings.partition_point(|at| *at < micros(opening.answered));
            counts.add_from(first, i128::from(opening.cost) * unit);
            let earliest = closings.partition_point(|at| *at < opened);
            worst = worst.max(counts.max_from(earliest) + rate * opened);
        }
        worst - i128::from(self.burst) * unit
    }
}

/// A segment tree: add to a suffix, maximum of a suffix.
struct MaxTree {
    leaves: usize,
    /// Maximum of the subtree, with `added` of the node itself.
    max: Vec<i128>,
    /// Added to every leaf below.
    added: Vec<i128>,
}

/// Less than any count; halved, so that sums stay in range.
const NOTHING: i128 = i128::MIN / 4;

impl MaxTree {
    fn new(values: &[i128]) -> Self {
        let leaves = values.len().next_power_of_two();
        let mut max = vec![NOTHING; 2 * leaves];
        max[leaves..leaves + values.len()].copy_from_slice(values);
        for node in (1..leaves).rev() {
            max[node] = max[2 * node].max(max[2 * node + 1]);
        }
        Self { leaves, max, added: vec![0; 2 * leaves] }
    }

    fn add_from(&mut self, first: usize, what: i128) {
        if first < self.leaves {
            self.add(1, 0, self.leaves, first, what);
        }
    }

    fn max_from(&self, first: usize) -> i128 {
        if first < self.leaves { self.suffix(1, 0, self.leaves, first) } else { NOTHING }
    }

    fn add(&mut self, node: usize, from: usize, to: usize, first: usize, what: i128) {
        if first <= from {
            self.max[node] += what;
            self.added[node] += what;
            return;
        }
        let middle = usize::midpoint(from, to);
        if first < middle {
            self.add(2 * node, from, middle, first, what);
        }
        self.add(2 * node + 1, middle, to, first, what);
        self.max[node] = self.max[2 * node].max(self.max[2 * node + 1]) + self.added[node];
    }

    fn suffix(&self, node: usize, from: usize, to: usize, first: usize) -> i128 {
        if first <= from {
            return self.max[node];
        }
        let middle = usize::midpoint(from, to);
        let right = self.suffix(2 * node + 1, middle, to, first);
        let left = if first < middle { self.suffix(2 * node, from, middle, first) } else { NOTHING };
        left.max(right) + self.added[node]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn admitted(history: &[(u64, u64)]) -> Vec<Admitted> {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        history
            .iter()
            .map(|(sent, took)| Admitted { sent: at(*sent), answered: at(sent + took), cost: 1 })
            .collect()
    }

    fn naive(bound: &Bound, admitted: &[Admitted]) -> i128 {
        let mut worst = i128::MIN;
        for open in admitted.iter().map(|a| a.sent) {
            for close in admitted.iter().map(|a| a.answered).filter(|c| *c >= open) {
                let held = admitted.iter().filter(|a| a.sent >= open && a.answered <= close);
                let count: i128 = held.map(|a| i128::from(a.cost)).sum();
                let unit = 1_000_000 * i128::from(bound.per_seconds);
                let refill = i128::from(bound.amount) * i128::try_from((close - open).as_micros()).unwrap();
                worst = worst.max((count - i128::from(bound.burst)) * unit - refill);
            }
        }
        worst
    }

    proptest! {
        #[test]
        fn finds_what_trying_every_window_finds(
            history in prop::collection::vec((0_u64..3_000, 0_u64..400), 1..60),
            amount in 0_u32..40, burst in 0_u32..20,
        ) {
            let bound = Bound::per_second(amount, burst);
            let admitted = admitted(&history);
            prop_assert_eq!(bound.worst_excess(&admitted), naive(&bound, &admitted));
        }
    }

    #[test]
    fn one_too_many_is_seen_and_exactly_enough_is_not() {
        let bound = Bound::per_second(10, 3);
        let enough = admitted(&[(0, 0), (0, 0), (0, 0), (100, 0), (200, 0)]);
        assert_eq!(bound.worst_excess(&enough), 0);
        let too_many = admitted(&[(0, 0), (0, 0), (0, 0), (100, 0), (150, 0)]);
        assert!(bound.worst_excess(&too_many) > 0);
        assert!(Bound { burst: 4, ..bound }.worst_excess(&too_many) <= 0);
    }

    #[test]
    fn what_may_have_been_admitted_outside_a_window_is_no_breach() {
        let bound = Bound::per_second(0, 1);
        assert!(
            bound.worst_excess(&admitted(&[(0, 100), (50, 100)])) > 0,
            "both are inside 0..150 for certain"
        );
        let bound = Bound::per_second(10, 1);
        assert!(bound.worst_excess(&admitted(&[(0, 100), (50, 100)])) <= 0, "they may be 100 ms apart");
    }
}
