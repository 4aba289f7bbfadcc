//! Counted limits against oracles that know everything that was ever admitted.

use super::*;
use proptest::prelude::*;

const SECOND: i64 = 1_000_000;
const LEASE: LeaseId = LeaseId([1; 16]);

/// One bucket, and all that it admitted.
struct Tried {
    count: Counted,
    allowance: Allowance,
    admitted: Vec<(i64, i64)>,
}

impl Tried {
    fn new(kind: Kind, limit: i64, span: i64) -> Self {
        let allowance = Allowance { limit, span: Micros(span), ..Allowance::default() };
        Self { count: Counted::new(kind), allowance, admitted: Vec::new() }
    }

    fn act(&mut self, at: i64, cost: i64, act: Act) -> Seen {
        let when = Moment::at(Micros(at));
        self.count.settle(self.allowance.span, when.now);
        let charges = [Charge { bucket: 0, cost, act, enforce: true }];
        let mut counts = [(self.count.clone(), self.allowance)];
        let checked = check(&counts, &charges, when);
        let (seen, _) = checked.commit(checked.allowed, &mut counts, &charges, when);
        self.count = counts[0].0.clone();
        if seen[0].fits && cost > 0 {
            self.admitted.push((at, cost));
        }
        seen[0]
    }

    fn take(&mut self, at: i64, cost: i64) -> Seen {
        self.act(at, cost, Act::Count)
    }

    /// Admitted in (from, to].
    fn between(&self, from: i64, to: i64) -> i64 {
        self.admitted.iter().filter(|(at, _)| from < *at && *at <= to).map(|(_, cost)| cost).sum()
    }
}

/// Gaps between requests and their costs; some at the same time, some a whole window apart.
fn traffic(span: i64) -> impl Strategy<Value = Vec<(i64, i64)>> {
    let gap = prop_oneof![0..span / 20, Just(0), Just(span), 0..2 * span];
    prop::collection::vec((gap, 0..4_i64), 1..120)
}

proptest! {
    /// The oracle keeps every admission: a request is admitted exactly if it and the window before it fit, and never are more than
    /// N in any window, wherever it begins.
    #[test]
    fn a_sliding_log_is_exact(limit in 0_i64..20, span in 1_i64..50, traffic in traffic(40 * SECOND)) {
        let span = span * SECOND;
        let mut log = Tried::new(Kind::Log, limit, span);
        let mut now = 1_700_000_000 * SECOND;
        for (gap, cost) in traffic {
            now += gap;
            let before = log.between(now - span, now);
            let seen = log.take(now, cost);
            prop_assert_eq!(seen.fits, cost == 0 || before + cost <= limit);
            let after = log.between(now - span, now);
            prop_assert!(after <= limit);
            prop_assert_eq!(seen.left, limit - after);
            // What is kept is no more than what counts.
            prop_assert!(log.count.entries() as i64 <= limit);
        }
    }

    /// Comes back when it is told to, and is admitted; a microsecond earlier it is not.
    #[test]
    fn the_wait_of_a_log_is_exact(limit in 1_i64..20, cost in 1_i64..25, traffic in traffic(10 * SECOND)) {
        let mut log = Tried::new(Kind::Log, limit, 10 * SECOND);
        let mut now = 1_700_000_000 * SECOND;
        for (gap, cost) in traffic {
            now += gap;
            log.take(now, cost);
        }
        let seen = log.take(now, cost);
        if !seen.fits {
            match seen.wait {
                None => prop_assert!(cost > limit),
                Some(wait) => {
                    prop_assert!(!log.take(now + wait.0 - 1, cost).fits);
                    prop_assert!(log.take(now + wait.0, cost).fits);
                }
            }
        }
    }

    /// In any time T no more than N + N T / span, and in one instant no more than N.
    #[test]
    fn two_counters_keep_the_bound_of_a_token_bucket(
        limit in 1_i64..30,
        span in 1_i64..50,
        start in 0_i64..100,
        traffic in traffic(40 * SECOND),
    ) {
        let span = span * SECOND + 7;
        let mut counters = Tried::new(Kind::Counters, limit, span);
        let mut now = 1_700_000_000 * SECOND + start * SECOND / 3;
        for (gap, cost) in traffic {
            now += gap;
            counters.take(now, cost);
        }
        let all = counters.admitted.clone();
        for (i, (from, _)) in all.iter().enumerate() {
            let mut sum = 0;
            for (to, cost) in &all[i..] {
                sum += cost;
                prop_assert!((sum - limit) * span <= limit * (to - from), "{sum} in {}", to - from);
            }
        }
    }

    /// The wait is never too early, and no later than its rounding to a millionth of the window.
    #[test]
    fn the_wait_of_two_counters_is_safe(
        limit in 1_i64..1_000,
        cost in 1_i64..1_100,
        costs in prop::collection::vec((0..2 * SECOND, 1..600_i64), 1..20),
    ) {
        let span = 10 * SECOND;
        let mut counters = Tried::new(Kind::Counters, limit, span);
        let mut now = 1_700_000_000 * SECOND;
        for (gap, cost) in costs {
            now += gap;
            counters.take(now, cost);
        }
        let seen = counters.take(now, cost);
        if !seen.fits {
            match seen.wait {
                None => prop_assert!(cost > limit),
                Some(wait) => {
                    prop_assert!(wait.0 > 0 && wait.0 <= 2 * span);
                    prop_assert!(!counters.take(now + wait.0 - 1, cost).fits);
                    prop_assert!(counters.take(now + wait.0, cost).fits);
                }
            }
        }
    }

    /// Of the largest limits and longest windows: nothing overflows, and all is as with small numbers.
    #[test]
    fn large_numbers_are_exact(span in SECOND..366 * 86_400 * SECOND, part in 0_i64..1_000_000) {
        let mut counters = Tried::new(Kind::Counters, COUNT_MAX, span);
        let turn = 1_700_000_000 * SECOND / span * span + span;
        prop_assert_eq!(counters.take(turn - 1, COUNT_MAX).left, 0);
        let at = turn + (i128::from(span) * i128::from(part) / 1_000_000) as i64;
        let left = counters.take(at, 0).left;
        let exact = (i128::from(COUNT_MAX) * i128::from(at - turn) / i128::from(span)) as i64;
        prop_assert!(left <= exact && left >= exact - COUNT_MAX / 1_000_000 - 2, "{} {}", left, exact);
    }
}

/// What each does with N at the end of a window and N at the beginning of the next.
#[test]
fn a_burst_around_a_turn() {
    let (limit, span) = (100, 60 * SECOND);
    let turn = 1_700_000_000 * SECOND / span * span;
    let admitted = |kind| {
        let mut tried = Tried::new(kind, limit, span);
        for i in 0..300 {
            tried.take(turn - SECOND + i * SECOND / 150, 1);
        }
        tried.between(turn - SECOND - 1, turn + SECOND)
    };
    assert_eq!(admitted(Kind::Log), 100, "exact");
    assert_eq!(admitted(Kind::Counters), 101, "a second of the new window is a sixtieth of N more");

    // The worst that two counters let through within a span: N at the end of a window, and more whenever it fits.
    let mut worst = Tried::new(Kind::Counters, limit, span);
    assert!(worst.take(turn - 1, limit).fits);
    (0..6_000).for_each(|i| assert!(worst.take(turn + i * SECOND / 100, 1).left <= limit));
    let most = worst.between(turn - 2, turn + span - 2);
    assert_eq!(most, 199);
    // Steady traffic of twice the limit gets the limit.
    let mut steady = Tried::new(Kind::Counters, limit, span);
    (0..2_000).for_each(|i| assert!(steady.take(turn + i * span / 200, 1).left <= limit));
    let windows: Vec<i64> = (5..9).map(|w| steady.between(turn + w * span, turn + (w + 1) * span)).collect();
    assert!(windows.iter().all(|n| (99..=101).contains(n)), "{windows:?}");
}

#[test]
fn costs_of_every_kind() {
    for kind in [Kind::Log, Kind::Counters] {
        let mut tried = Tried::new(kind, 5, 60 * SECOND);
        let mut now = 1_700_000_000 * SECOND;
        assert_eq!(tried.take(now, 6), Seen { left: 5, ..Seen::default() }, "never, and nothing changes");
        assert!(tried.take(now, 0).fits);
        assert_eq!(tried.take(now, 3).left, 2);
        now += SECOND;
        assert_eq!(tried.take(now, 2).left, 0);
        assert!(tried.take(now, 0).fits, "asking is free, even where nothing is left");
        assert_eq!(tried.take(now, -1).left, 1);
        assert_eq!(tried.take(now, -2).left, 3, "the newest goes first, and half of the oldest");
        assert_eq!(tried.take(now, -1_000).left, 5, "no more than there was");
        assert_eq!(tried.take(now, 5).left, 0);
    }
}

#[test]
fn a_log_gives_back_the_newest() {
    let (mut log, now) = (Tried::new(Kind::Log, 5, 60 * SECOND), 1_700_000_000 * SECOND);
    log.take(now, 2);
    log.take(now + 10 * SECOND, 3);
    let back = log.take(now + 20 * SECOND, -2);
    assert_eq!((back.left, back.reset), (2, Micros(50 * SECOND)));
    let none = log.take(now + 20 * SECOND, -1);
    assert_eq!((none.left, none.reset), (3, Micros(40 * SECOND)));
}

#[test]
fn what_was_lost_counts_as_used() {
    for kind in [Kind::Log, Kind::Counters, Kind::Permits] {
        let start = 1_700_000_000 * SECOND + 7;
        let lost = Generation { start: Micros(start), full: false, known: true };
        let mut tried = Tried::new(kind, 5, 60 * SECOND);
        let act = if kind == Kind::Permits { Act::Acquire(LEASE) } else { Act::Count };
        let whole = tried.allowance;
        for (after, fits) in [(0, false), (30 * SECOND, false), (60 * SECOND - 1, false), (60 * SECOND, true)]
        {
            tried.allowance = whole.under(lost, Micros(start + after));
            let seen = tried.act(start + after, 1, act);
            assert_eq!(seen.fits, fits, "{kind:?} {after}");
            if !fits {
                assert_eq!((seen.left, seen.wait), (0, Some(Micros(60 * SECOND - after))));
            }
        }
        let kept = Generation { full: true, ..lost };
        assert_eq!(whole.under(kept, lost.start), whole);
    }
}

#[test]
fn what_others_may_still_use_is_held_back() {
    let now = 1_700_000_000 * SECOND;
    let mut log = Tried::new(Kind::Log, 10, 60 * SECOND);
    log.allowance = Allowance { held: 4, until: Micros(now + 5 * SECOND), ..log.allowance };
    assert_eq!(log.take(now, 3).left, 1);
    let seen = log.take(now, 3);
    assert_eq!(seen.wait, Some(Micros(5 * SECOND)), "the hold ends before anything is forgotten");
    assert!(log.take(now + 5 * SECOND, 3).fits);
    log.allowance.until = Micros(now + 80 * SECOND);
    let seen = log.take(now + 10 * SECOND, 2);
    assert_eq!(
        (seen.left, seen.wait),
        (0, Some(Micros(55 * SECOND))),
        "enough is forgotten before the hold ends"
    );
    assert_eq!(log.take(now + 10 * SECOND, 5).wait, Some(Micros(70 * SECOND)));
    assert_eq!(log.take(now + 10 * SECOND, 11).wait, None);
}

#[test]
fn permits_come_back_when_they_are_given_back_or_end() {
    let (mut permits, now) = (Tried::new(Kind::Permits, 3, 60 * SECOND), 1_700_000_000 * SECOND);
    let lease = |n| LeaseId([n; 16]);
    assert_eq!(permits.act(now, 2, Act::Acquire(lease(1))).left, 1);
    assert!(permits.take(now, 1).fits, "asking takes none");
    assert_eq!(permits.act(now + SECOND, 1, Act::Acquire(lease(2))).left, 0);
    assert!(!permits.take(now + SECOND, 1).fits);
    let denied = permits.act(now + 2 * SECOND, 3, Act::Acquire(lease(3)));
    assert_eq!((denied.fits, denied.wait), (false, Some(Micros(59 * SECOND))), "both have to end");
    assert_eq!(permits.act(now + 2 * SECOND, 4, Act::Acquire(lease(3))).wait, None, "never");

    for _ in 0..2 {
        let renewed = permits.act(now + 50 * SECOND, 2, Act::Renew(lease(1)));
        assert_eq!((renewed.fits, renewed.left, renewed.reset), (true, 0, Micros(60 * SECOND)));
    }
    assert_eq!(permits.act(now + 50 * SECOND, 1, Act::Renew(lease(1))).wait, None, "not with so many");
    assert!(!permits.act(now + 50 * SECOND, 1, Act::Renew(lease(9))).fits, "unknown");
    let after = now + 61 * SECOND;
    assert_eq!(permits.act(after, 1, Act::Renew(lease(2))).wait, None, "it has ended");
    assert_eq!(permits.act(after, 1, Act::Acquire(lease(4))).left, 0);
    assert_eq!(permits.act(after, 2, Act::Release(lease(1))).left, 2);
    assert!(!permits.act(after, 2, Act::Release(lease(1))).fits, "it is given back once");
    assert_eq!(permits.act(after, 0, Act::Count).left, 2);
    assert_eq!(permits.count.entries(), 1);
}

#[test]
fn a_lowered_limit_is_reached_by_those_that_may_not_renew() {
    let (mut permits, now) = (Tried::new(Kind::Permits, 3, 60 * SECOND), 1_700_000_000 * SECOND);
    let lease = |n| LeaseId([n; 16]);
    (1..=3).for_each(|n| assert!(permits.act(now + i64::from(n), 1, Act::Acquire(lease(n))).fits));
    permits.allowance.limit = 2;
    let refused = permits.act(now + SECOND, 1, Act::Renew(lease(2)));
    assert_eq!((refused.fits, refused.wait), (false, Some(Micros(59 * SECOND + 2))), "it is still there");
    assert!(permits.act(now + SECOND, 1, Act::Release(lease(2))).fits);
    assert!(permits.act(now + SECOND, 1, Act::Renew(lease(1))).fits);
    assert!(!permits.act(now + SECOND, 1, Act::Acquire(lease(4))).fits);
}

#[test]
fn a_request_is_charged_whole_or_not_at_all() {
    let when = Moment::at(Micros(1_700_000_000 * SECOND));
    let allowance = |limit| Allowance { limit, span: Micros(SECOND), ..Allowance::default() };
    let mut counts = [
        (Counted::new(Kind::Log), allowance(5)),
        (Counted::new(Kind::Counters), allowance(3)),
        (Counted::new(Kind::Permits), allowance(1)),
    ];
    let charge = |bucket, cost, act| Charge { bucket, cost, act, enforce: true };
    let acquire = charge(2, 1, Act::Acquire(LEASE));
    let too_much = [charge(0, 4, Act::Count), charge(0, 2, Act::Count), charge(1, 1, Act::Count), acquire];
    let before = counts.clone();
    let checked = check(&counts, &too_much, when);
    let (seen, changed) = checked.commit(checked.allowed, &mut counts, &too_much, when);
    assert_eq!(seen.iter().map(|s| s.fits).collect::<Vec<_>>(), [true, false, true, true]);
    assert_eq!(seen[1].wait, None, "all six are wanted at once, and five is all that there is");
    assert_eq!((&counts, changed), (&before, vec![false; 3]));

    let mut fits = too_much;
    fits[1].cost = 1;
    let checked = check(&counts, &fits, when);
    assert!(checked.allowed);
    // Something else did not fit.
    checked.commit(false, &mut counts, &fits, when);
    assert_eq!(counts, before);
    let (seen, changed) = checked.commit(true, &mut counts, &fits, when);
    assert_eq!(seen.iter().map(|s| s.left).collect::<Vec<_>>(), [0, 0, 2, 0]);
    assert_eq!(changed, [true; 3]);

    // A shadow is left out alone.
    let mut shadowed = [charge(1, 1, Act::Count), charge(0, 1, Act::Count)];
    shadowed[1].enforce = false;
    let checked = check(&counts, &shadowed, when);
    let (seen, changed) = checked.commit(checked.allowed, &mut counts, &shadowed, when);
    assert_eq!((seen[0].fits, seen[0].left, seen[1].fits, changed[1]), (true, 1, false, true));
}

#[test]
fn other_ways_of_counting_have_other_buckets() {
    let id = BucketId([9; 16]);
    let (minute, hour) = (Micros::seconds(60), Micros::seconds(3_600));
    let all = [(Kind::Log, minute), (Kind::Log, hour), (Kind::Counters, minute), (Kind::Permits, minute)];
    let mut buckets: Vec<BucketId> = all.iter().map(|(kind, span)| kind.bucket(id, *span)).collect();
    buckets.push(id);
    buckets.sort_unstable();
    buckets.dedup();
    assert_eq!(buckets.len(), 5);
    assert_eq!(
        Kind::Permits.bucket(id, minute),
        Kind::Permits.bucket(id, hour),
        "they are in use all the same"
    );
    assert_eq!(
        [whole(Tokens(1)), whole(Tokens::whole(2)), whole(Tokens(-1)), whole(Tokens::whole(-2))],
        [1, 2, 0, -2]
    );
}
