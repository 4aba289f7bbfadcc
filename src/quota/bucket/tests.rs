//! What a bucket promises, against an exact simulation of buckets that are kept for ever.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const SESSION: u64 = 7;
const FULL: Generation = Generation { start: Micros::ZERO, full: true, known: true };

fn shape(rate: i64, cap: i64) -> Shape {
    Shape { rate: Rate::per_second(rate), cap: Tokens::whole(cap) }
}

fn at(seconds: i64) -> Moment {
    Moment::at(Micros::seconds(seconds))
}

fn bucket(shape: Shape, level: i64) -> Bucket {
    let unseen = Unseen { level: Tokens::whole(level), at: Micros::ZERO };
    Bucket::unseen(shape, Some(unseen), FULL, Micros::ZERO)
}

fn grant(seq: u64, push: u32, granted: i64, deadline: i64) -> Grant {
    let (granted, burst, rate) = (Tokens::whole(granted), Tokens::whole(10), Rate::per_second(2));
    Grant { seq, push, granted, burst, rate, deadline: Micros::seconds(deadline) }
}

#[test]
fn refills_piecewise_over_the_end_of_a_lease() {
    let s = shape(1, 5);
    let mut b = bucket(s, 0);
    b.install(&grant(1, 0, 3, 4), SESSION, at(0));
    assert_eq!((b.level(), b.cap(), b.rate()), (Tokens::whole(3), Tokens::whole(15), Rate::per_second(3)));
    b.settle(s, SESSION, at(2));
    assert_eq!(b.level(), Tokens::whole(9));
    b.settle(s, SESSION, at(4));
    assert_eq!((b.level(), b.cap(), b.rate()), (Tokens::whole(5), Tokens::whole(5), Rate::per_second(1)));
    assert_eq!(b.lease, None);
}

#[test]
fn a_lease_ends_by_the_later_clock_and_refills_by_the_earlier() {
    let s = shape(1, 5);
    let mut b = bucket(s, 0);
    b.install(&grant(1, 0, 0, 4), SESSION, at(0));
    b.settle(s, SESSION, Moment { now: Micros::seconds(1), late: Micros::seconds(4) });
    assert_eq!((b.level(), b.cap(), b.rate()), (Tokens::whole(3), Tokens::whole(5), Rate::per_second(1)));
}

#[test]
fn records_count_once_and_old_ones_never() {
    let s = shape(0, 5);
    let mut b = bucket(s, 0);
    let mut level_after = |g: Grant| {
        b.settle(s, SESSION, at(1));
        b.install(&g, SESSION, at(1));
        b.level().floor()
    };
    assert_eq!(level_after(grant(2, 0, 3, 9)), 3);
    assert_eq!(level_after(grant(2, 0, 3, 9)), 3);
    assert_eq!(level_after(grant(2, 1, 4, 9)), 4);
    assert_eq!(level_after(grant(1, 9, 5, 99)), 4);
    assert_eq!(level_after(grant(3, 0, 2, 5)), 6);
    assert_eq!(level_after(grant(4, 0, 2, 1)), 6, "has ended");
    // Its lease is over, but a record of the longer one before it may still come.
    b.settle(s, SESSION, at(6));
    b.install(&grant(2, 1, 4, 9), SESSION, at(6));
    assert_eq!((b.level().floor(), b.cap().floor()), (5, 5));
    assert!(b.keep_until() >= Micros::seconds(9));
}

#[test]
fn another_session_voids_the_lease_alone() {
    let s = shape(1, 5);
    let mut b = bucket(s, 1);
    b.install(&grant(5, 0, 8, 9), SESSION, at(0));
    b.settle(s, 8, at(0));
    assert_eq!((b.level(), b.cap()), (Tokens::whole(5), Tokens::whole(5)));
    b.install(&grant(1, 0, 2, 9), 8, at(0));
    assert_eq!(b.level(), Tokens::whole(7));
}

#[test]
fn shrinking_returns_what_no_longer_fits_once() {
    let s = shape(0, 5);
    let mut b = bucket(s, 5);
    assert_eq!(b.shrink(Tokens::ZERO, Rate::ZERO), Shrunk::default());
    b.install(&grant(1, 0, 8, 9), SESSION, at(0));
    let (burst, rate) = (Tokens::whole(4), Rate::per_second(1));
    let first = b.shrink(burst, rate);
    assert_eq!(first, Shrunk { leased: true, returned: Tokens::whole(4), burst, rate });
    assert_eq!(b.shrink(burst, rate), Shrunk { returned: Tokens::ZERO, ..first });
    assert_eq!(b.shrink(Tokens::ZERO, Rate::ZERO).returned, Tokens::whole(4));
    assert!(!b.shrink(Tokens::ZERO, Rate::ZERO).leased);
    b.install(&grant(1, 0, 8, 9), SESSION, at(1));
    assert_eq!(b.level(), Tokens::whole(5), "what was given up stays so");
}

#[test]
fn a_changed_shape_gains_nothing_and_cuts_at_once() {
    let mut b = bucket(shape(1, 10), 10);
    b.settle(shape(100, 1_000), SESSION, at(5));
    assert_eq!(b.level(), Tokens::whole(10));
    b.settle(shape(100, 1_000), SESSION, at(6));
    assert_eq!(b.level(), Tokens::whole(110));
    b.settle(shape(1, 10), SESSION, at(6));
    assert_eq!(b.level(), Tokens::whole(10));
}

#[test]
fn all_charges_or_none() {
    let charge = |bucket, cost, enforce| Charge { bucket, cost: Tokens::whole(cost), enforce };
    let mut two = [bucket(shape(0, 10), 5), bucket(shape(0, 10), 1)];
    let before = two;
    assert_eq!(
        take(&mut two, &[charge(0, 3, true), charge(0, 3, true)]),
        (false, vec![true, false]),
        "the second finds what the first leaves"
    );
    assert_eq!(take(&mut two, &[charge(0, 1, true), charge(1, 2, true)]), (false, vec![true, false]));
    assert_eq!(take(&mut two, &[charge(0, 11, true)]), (false, vec![false]));
    assert_eq!(take(&mut two, &[charge(9, 0, true)]), (false, vec![false]));
    assert_eq!(two, before);
    assert_eq!(take(&mut two, &[charge(0, 5, true), charge(1, 2, false)]), (true, vec![true, false]));
    assert_eq!([two[0].level(), two[1].level()], [Tokens::ZERO, Tokens::whole(1)]);
    assert_eq!(take(&mut two, &[charge(0, 0, true)]), (true, vec![true]), "asking is free");
    assert_eq!(take(&mut two, &[charge(0, -99, true)]), (true, vec![true]));
    assert_eq!(two[0].level(), Tokens::whole(10), "and no more than it can hold");
}

#[test]
fn a_bucket_that_was_lost_is_empty_when_the_data_began() {
    let lost = Generation { start: Micros::seconds(100), full: false, known: true };
    let s = shape(2, 50);
    let level = |unseen: Option<Unseen>, now| {
        let mut b = Bucket::unseen(s, unseen, lost, Micros::seconds(now));
        b.settle(s, SESSION, at(now));
        b.level().floor()
    };
    assert_eq!(level(None, 100), 0);
    assert_eq!(level(None, 110), 20);
    assert_eq!(level(None, 1_000), 50);
    let unseen = |level, at| Some(Unseen { level: Tokens::whole(level), at: Micros::seconds(at) });
    assert_eq!(level(unseen(40, 90), 110), 20, "the loss came later");
    assert_eq!(level(unseen(40, 105), 105), 10, "the loss leaves less");
    assert_eq!(level(unseen(4, 105), 110), 14, "the change leaves less");
    assert_eq!(level(unseen(4, 120), 110), 4, "nothing flows before its time");
}

#[test]
fn nothing_overflows() {
    let most = Shape { rate: Rate::MAX, cap: Tokens::MAX };
    let mut b = Bucket::unseen(most, None, FULL, Micros::ZERO);
    let g = Grant { granted: Tokens::MAX, burst: Tokens::MAX, rate: Rate::MAX, ..grant(1, 0, 0, 9) };
    b.install(&g, SESSION, at(0));
    b.settle(most, SESSION, Moment { now: Micros(i64::MIN), late: Micros(i64::MIN) });
    b.settle(most, SESSION, Moment::at(Micros::MAX));
    assert_eq!(b.level(), Tokens(EXACT_MAX));
    let back = Charge { bucket: 0, cost: Tokens(i64::MIN), enforce: true };
    assert!(take(std::slice::from_mut(&mut b), &[back]).0);
    assert_eq!(b.level(), Tokens(EXACT_MAX));
}

#[test]
fn a_cut_scales_and_a_raise_keeps_what_is_unseen() {
    let now = Micros::seconds(50);
    let after = |old, new, before| Unseen::after_change(old, new, true, before, now);
    let cut = after(shape(10, 100), shape(1, 100), None);
    assert_eq!(cut, Some(Unseen { level: Tokens::whole(10), at: Micros::seconds(60) + LOAN }));
    assert_eq!(after(shape(1, 10), shape(100, 10), None), None);
    assert_eq!(after(shape(10, 100), shape(10, 50), None), None, "full is full");
    let raise = after(shape(1, 10), shape(100, 1_000), None);
    assert_eq!(raise, Some(Unseen { level: Tokens::whole(10), at: Micros::seconds(60) + LOAN }));
    assert_eq!(after(shape(1, 10), shape(1, 10), cut), cut);
    let never = after(shape(0, 10), shape(5, 20), None);
    assert_eq!(never, Some(Unseen { level: Tokens::whole(10), at: now }));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Wait(i64),
    Spend(u8, i64),
    Change(i64, i64),
    Lend(u8, i64, i64),
    Lose,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_i64..20_000_000).prop_map(Step::Wait),
        1 => (0_i64..200_000_000).prop_map(Step::Wait),
        6 => (0_u8..4, 1_i64..30_000_000).prop_map(|(id, cost)| Step::Spend(id, cost)),
        2 => (0_i64..5_000_000, 0_i64..40_000_000).prop_map(|(rate, cap)| Step::Change(rate, cap)),
        2 => (0_u8..4, 1_i64..5_000_000, 1_i64..=LOAN.0).prop_map(|(id, rate, time)| Step::Lend(id, rate, time)),
        1 => Just(Step::Lose),
    ]
}

/// Buckets kept for ever, at every moment under the policy of that moment.
struct Exact {
    shape: Shape,
    buckets: BTreeMap<u8, Level>,
    /// What of their reserve is lent, and for how much longer.
    lent: BTreeMap<u8, (Rate, Micros)>,
}

impl Exact {
    fn wait(&mut self, time: Micros) {
        let Shape { rate, cap } = self.shape;
        for (id, level) in &mut self.buckets {
            let (lent, left) = self.lent.get(id).copied().unwrap_or_default();
            let lends = left.min(time);
            level.accrue((rate - lent).or_zero(), lends, cap);
            level.accrue(rate, time - lends, cap);
            self.lent.insert(*id, (lent, left - lends));
        }
        self.lent.retain(|_, (_, left)| left.is_positive());
    }
    fn lend(&mut self, id: u8, rate: Rate, time: Micros) {
        let (lent, left) = self.lent.get(&id).copied().unwrap_or_default();
        self.lent.insert(id, (rate.max(lent), time.max(left)));
    }
    fn change(&mut self, new: Shape) {
        self.shape = new;
        self.buckets.values_mut().for_each(|level| level.clip(new.cap));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Buckets that expire and come back as `Unseen` never hold more than those that are kept for ever, through
    /// any number of policy changes, expiries and losses of data.
    #[test]
    fn expiry_mints_nothing(steps in prop::collection::vec(step(), 1..60), rate in 1_i64..5_000_000, cap in 1_i64..40_000_000) {
        let first = Shape { rate: Rate(rate), cap: Tokens(cap) };
        let buckets = (0..4).map(|id| (id, Level::new(first.cap))).collect();
        let mut exact = Exact { shape: first, buckets, lent: BTreeMap::new() };
        // With the time at which each expires, set by its last use.
        let mut stored: BTreeMap<u8, (Bucket, Micros)> = BTreeMap::new();
        let (mut now, mut unseen, mut generation) = (Micros::seconds(1_000), None, FULL);
        for step in steps {
            match step {
                Step::Wait(time) => {
                    now += Micros(time);
                    exact.wait(Micros(time));
                    stored.retain(|_, (_, expires)| *expires > now);
                }
                Step::Change(rate, cap) => {
                    let new = Shape { rate: Rate(rate), cap: Tokens(cap) };
                    let before = generation.unseen(exact.shape, unseen, now);
                    unseen = Unseen::after_change(exact.shape, new, true, before, now);
                    // (A bucket that sleeps through two changes does not notice the first; here none sleeps.)
                    for (b, _) in stored.values_mut() {
                        b.settle(exact.shape, SESSION, Moment::at(now));
                        b.settle(new, SESSION, Moment::at(now));
                    }
                    exact.change(new);
                }
                Step::Lose => {
                    stored.clear();
                    generation = Generation { start: now, full: false, known: false };
                    // Those of which something was lent are stored as they are taken to be.
                    for id in exact.lent.keys() {
                        let mut b = Bucket::unseen(exact.shape, unseen, generation, now);
                        b.settle(exact.shape, SESSION, Moment::at(now));
                        stored.insert(*id, (b, b.keep_until() - KEEP_MARGIN));
                    }
                    generation.known = true;
                }
                Step::Lend(id, rate, time) => {
                    let mut b = stored.get(&id).map(|(b, _)| *b).unwrap_or_else(|| Bucket::unseen(exact.shape, unseen, generation, now));
                    b.settle(exact.shape, SESSION, Moment::at(now));
                    b.lend(Rate(rate), Micros(time), Moment::at(now));
                    exact.lend(id, Rate(rate), Micros(time));
                    stored.insert(id, (b, b.keep_until() - KEEP_MARGIN));
                }
                Step::Spend(id, cost) => {
                    let mut b = stored.get(&id).map(|(b, _)| *b).unwrap_or_else(|| Bucket::unseen(exact.shape, unseen, generation, now));
                    b.settle(exact.shape, SESSION, Moment::at(now));
                    let truth = exact.buckets.get_mut(&id).unwrap();
                    prop_assert!(b.level() <= truth.tokens, "{} > {}", b.level().0, truth.tokens.0);
                    let cost = Tokens(cost).min(b.level());
                    take(std::slice::from_mut(&mut b), &[Charge { bucket: 0, cost, enforce: true }]);
                    truth.tokens -= cost;
                    // The worst case: no margin.
                    stored.insert(id, (b, b.keep_until() - KEEP_MARGIN));
                }
            }
        }
    }

    /// Looking often is the same as looking once.
    #[test]
    fn settling_is_path_independent(
        rate in 0_i64..5_000_000, cap in 0_i64..40_000_000, burst in 0_i64..9_000_000, rho in 0_i64..9_000_000,
        deadline in 1_i64..9_000_000, mut times in prop::collection::vec(0_i64..10_000_000, 1..9),
    ) {
        times.sort_unstable();
        let s = Shape { rate: Rate(rate), cap: Tokens(cap) };
        let mut often = bucket(s, 0);
        let g = Grant { burst: Tokens(burst), rate: Rate(rho), deadline: Micros(deadline), ..grant(1, 0, 1, 0) };
        often.install(&g, SESSION, at(0));
        let mut once = often;
        for time in &times {
            often.settle(s, SESSION, Moment::at(Micros(*time)));
        }
        once.settle(s, SESSION, Moment::at(Micros(times[times.len() - 1])));
        prop_assert_eq!(often, once);
    }
}

#[test]
fn a_window_keeps_what_was_spent_through_raises_and_cuts() {
    let of = |cap| Shape::windowed(Tokens::whole(cap));
    let turn = Turn { start: Micros::seconds(10), end: Micros::seconds(40) };
    let unseen = Some(Unseen::of_window(turn));
    let mut b = Bucket::unseen(of(10), unseen, FULL, Micros::seconds(20));
    let mut level_after = |cap, cost: i64| {
        b.settle(of(cap), SESSION, at(20));
        let charge = Charge { bucket: 0, cost: Tokens::whole(cost), enforce: true };
        (take(std::slice::from_mut(&mut b), &[charge]).0, b.level().floor())
    };
    assert_eq!(level_after(10, 10), (true, 0));
    assert_eq!(level_after(10, 1), (false, 0), "it never refills");
    assert_eq!(level_after(20, 4), (true, 6), "just the difference more");
    assert_eq!(level_after(12, 1), (false, -2), "spent is spent");
    assert_eq!(level_after(14, 0), (true, 0));
    assert_eq!(level_after(15, 1), (true, 0), "whatever came in between: 15 of 15");
    assert_eq!(level_after(15, -3), (true, 3), "and what is given back is there again");
    assert_eq!(b.keep_until(), turn.end + KEEP_MARGIN);
}

#[test]
fn a_window_is_full_only_if_it_began_after_a_loss_of_data() {
    let began = |start: i64, full| {
        let generation = Generation { start: Micros::seconds(5), full, known: true };
        let unseen =
            Some(Unseen::of_window(Turn { start: Micros::seconds(start), end: Micros::seconds(99) }));
        Bucket::unseen(Shape::windowed(Tokens::whole(3)), unseen, generation, Micros::seconds(20))
            .level()
            .floor()
    };
    assert_eq!([began(4, false), began(5, false), began(6, false), began(4, true)], [0, 0, 3, 3]);
}

#[test]
fn what_is_lent_in_a_window_stays_if_there_is_room() {
    let s = Shape::windowed(Tokens::whole(4));
    let mut b = Bucket::unseen(s, None, Generation::default(), Micros::ZERO);
    let lent = |seq| Grant { rate: Rate::ZERO, ..grant(seq, 0, 6, 5) };
    b.install(&lent(1), SESSION, at(0));
    assert_eq!((b.level(), b.cap(), b.rate()), (Tokens::whole(6), Tokens::whole(14), s.rate));
    b.settle(s, SESSION, at(6));
    assert_eq!(b.level(), Tokens::whole(4), "a lease that ends takes what does not fit the reserve");
}
