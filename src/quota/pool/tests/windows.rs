//! Rules of quotas: whose clock counts, which windows are open, what is lent, and what a change of policy brings.

use super::rules::{A, B, BUCKET, ack, apply, ask, set};
use super::support::*;
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::calendar::Turn;
use crate::quota::policy::*;
use crate::quota::pool::*;

const C: RegionId = RegionId(2);
/// 2024-02-29T12:00:00Z
const NOON: Micros = Micros::seconds(1_709_208_000);
const HOUR: Window = Window::Calendar(Unit::Hour);

fn quota(quota: u64, reserve_percent: u32) -> Policy {
    let share = Share::percent(reserve_percent);
    let limit = Limit::Quota(Quota { quota, per: HOUR, algorithm: Algorithm::FixedWindow });
    Policy { limit, ..policy("p", 1, Unit::Second, 1, Mode::Strict, Reserve { rate: share, burst: share }) }
}

/// Three regions that have joined, and none has said what time it is.
fn silent_cluster(policies: Vec<Policy>) -> Pool {
    let mut pool = Pool::default();
    let mut ops = vec![Op::Found { regions: regions(3), policies }];
    ops.extend([A, B, C].map(|region| Op::Join(Join { region, previous: 0, nonce: 5 })));
    assert_eq!(apply(&mut pool, 0, ops).policies, Some(PolicyOutcome::Set(1)));
    pool
}

/// It is noon in all three.
fn cluster(policies: Vec<Policy>) -> Pool {
    let mut pool = silent_cluster(policies);
    apply(&mut pool, 0, [A, B, C].map(|region| says(region, NOON)).to_vec());
    pool
}

fn says(region: RegionId, wall: Micros) -> Op {
    Op::TimeOfDay(TimeOfDay { region, wall })
}

fn asked_in(pool: &Pool, start: Micros, ask: Ask) -> Vec<Op> {
    let seen = Stamp { term: 1, tau: pool.tau() };
    vec![Op::AskInWindow(AskInWindow { start, ask: Ask { seen, ..ask } })]
}

/// What it is lent when it has spent all that it was lent before, and its reserve, and asks for this much.
fn lent(pool: &mut Pool, region: RegionId, seq: u64, want: i64) -> i64 {
    let part = pool.usable(0, region).unwrap_or_default();
    let read = pool.record(BUCKET, region).cloned().unwrap_or_default();
    let (read_seq, read_granted) = (read.seq, read.granted);
    let ask =
        Ask { want: Tokens::whole(want), level: -part.cap(), read_seq, read_granted, ..ask(region, seq) };
    let ops = asked_in(pool, NOON, ask);
    apply(pool, 300, ops);
    pool.record(BUCKET, region).filter(|record| record.seq == seq).map_or(-1, |record| record.granted.floor())
}

fn free(pool: &Pool) -> i64 {
    pool.free(0, BUCKET, pool.tau()).floor()
}

#[test]
fn the_time_of_day_is_what_a_majority_has_reached() {
    let mut pool = silent_cluster(vec![quota(100, 0)]);
    let at = |pool: &Pool| pool.wall(pool.tau()).map(|wall| wall - NOON);
    apply(&mut pool, 10, vec![says(A, NOON + Micros::seconds(9_000))]);
    assert_eq!(at(&pool), None, "one of three is no majority");
    apply(&mut pool, 0, vec![says(B, NOON)]);
    assert_eq!(at(&pool), Some(Micros::ZERO), "and one that is ahead does not count");
    // The Raft clock is a hundredth slow: 99 s are 100.
    apply(&mut pool, 99_000, vec![]);
    assert_eq!(at(&pool), Some(Micros::seconds(100)));
    // One is set back, another is set forward by a year.
    apply(
        &mut pool,
        0,
        vec![says(B, NOON - Micros::seconds(500)), says(A, NOON + Micros::seconds(31_536_000))],
    );
    assert_eq!(at(&pool), Some(Micros::seconds(100)), "never back");
    apply(&mut pool, 9_900, vec![]);
    assert_eq!(at(&pool), Some(Micros::seconds(100)), "until they are there again");
    // All were down for a day: two of them know.
    apply(
        &mut pool,
        0,
        vec![says(B, NOON + Micros::seconds(86_400)), says(C, NOON + Micros::seconds(86_401))],
    );
    assert_eq!(at(&pool), Some(Micros::seconds(86_401)));
    apply(&mut pool, 0, vec![says(RegionId(7), Micros::MAX), says(A, Micros(-7)), says(C, Micros::MAX)]);
    assert_eq!(at(&pool), Some(Micros::seconds(86_401)), "nonsense is one clock that is wrong");
}

#[test]
fn only_the_window_that_it_is_can_be_asked_about() {
    let mut pool = silent_cluster(vec![quota(100, 0)]);
    assert_eq!(lent(&mut pool, A, 1, 9), -1, "nobody knows what time it is");
    apply(&mut pool, 0, [A, B, C].map(|region| says(region, NOON)).to_vec());
    assert_eq!(lent(&mut pool, A, 2, 1), 1);
    let asks = |pool: &mut Pool, start: Micros, seq| {
        let mut other = ask(B, seq);
        other.bucket = BucketId([seq as u8; 16]);
        let ops = asked_in(pool, start, other.clone());
        apply(pool, 1, ops);
        pool.record(other.bucket, B).is_some()
    };
    assert!(!asks(&mut pool, NOON + Micros::seconds(1), 3), "no window begins then");
    assert!(
        !asks(&mut pool, NOON - Micros::seconds(3_600), 4),
        "it has ended: its books would be full again"
    );
    assert!(!asks(&mut pool, NOON + Micros::seconds(3_600), 5), "it has not begun");
    apply(&mut pool, 0, [A, B].map(|region| says(region, NOON + Micros::millis(3_599_500))).to_vec());
    assert!(asks(&mut pool, NOON + Micros::seconds(3_600), 6), "regions may turn it a moment before");
    let plain = vec![Op::Ask(Ask { seen: Stamp { term: 1, tau: pool.tau() }, ..ask(B, 7) })];
    apply(&mut pool, 1, plain);
    assert_eq!(pool.record(BUCKET, B), None, "an ask must say which window");
    let mut rates = cluster(vec![policy("p", 1, Unit::Second, 10, Mode::Strict, Reserve::default())]);
    let ops = asked_in(&rates, NOON, ask(B, 8));
    apply(&mut rates, 1, ops);
    assert_eq!(rates.record(BUCKET, B), None, "a token bucket has none");
}

#[test]
fn the_books_of_a_window_that_is_over_go() {
    let mut pool = cluster(vec![quota(100, 0)]);
    assert_eq!(lent(&mut pool, A, 1, 9), 1);
    let turn = HOUR.turn_at(NOON);
    assert_eq!(pool.bucket(BUCKET).unwrap().window, Some(turn));
    assert_eq!(turn, Turn { start: NOON, end: NOON + Micros::seconds(3_600) });
    for _ in 0..40 {
        apply(&mut pool, 85_000, vec![]);
    }
    assert_eq!(pool.bucket_count(), 1, "what was lent in it is spent");
    for _ in 0..4 {
        apply(&mut pool, 85_000, vec![]);
    }
    assert_eq!(pool.bucket_count(), 0);
    assert_eq!(lent(&mut pool, A, 2, 9), -1, "and it does not begin anew");
}

#[test]
fn little_is_lent_at_a_time_and_the_last_tokens_too() {
    let mut pool = cluster(vec![quota(1_000, 0)]);
    assert_eq!(lent(&mut pool, A, 1, 500), 10, "a hundredth, and not half of it");
    assert_eq!(lent(&mut pool, B, 1, 3), 3);
    let mut all = 13;
    let mut seq = 1;
    while free(&pool) > 0 {
        seq += 1;
        let got: i64 = [A, B, C].map(|region| lent(&mut pool, region, seq, 500)).into_iter().sum();
        assert!(got > 0, "{} are left", free(&pool));
        all += got;
    }
    assert_eq!(all, 1_000);
    assert_eq!(lent(&mut pool, A, seq + 1, 500), 0);
    let large = Ask { quantum: Tokens::whole(30), short: Tokens::whole(30), ..ask(B, 1) };
    let mut fresh = cluster(vec![quota(1_000, 0)]);
    let ops = asked_in(&fresh, NOON, large);
    apply(&mut fresh, 1, ops);
    assert_eq!(fresh.record(BUCKET, B).unwrap().granted, Tokens::whole(30), "enough for a large request");
    // What is given back can be lent again, but no more than was lent.
    assert_eq!((lent(&mut fresh, A, 1, 500), free(&fresh)), (10, 960));
    for (seq, returned, left) in [(2, 4, 964), (3, 50, 964)] {
        let (read_seq, read_granted) = (1, Tokens::whole(10));
        let returned = Tokens::whole(returned);
        let (want, demand) = Default::default();
        let back = Ask { returned, read_seq, read_granted, want, demand, ..ask(A, seq) };
        let ops = asked_in(&fresh, NOON, back);
        apply(&mut fresh, 1, ops);
        assert_eq!(free(&fresh), left);
    }
}

#[test]
fn what_is_spent_stays_spent_when_the_quota_changes() {
    let mut pool = cluster(vec![quota(100, 0)]);
    for seq in 1..=40 {
        assert_eq!(lent(&mut pool, A, seq, 1), 1);
    }
    let to = |pool: &mut Pool, size| {
        apply(pool, 100, set(vec![quota(size, 0)]));
        free(pool)
    };
    assert_eq!(to(&mut pool, 120), 80, "just the difference");
    assert_eq!(to(&mut pool, 30), -10, "a cut binds at once");
    assert_eq!(lent(&mut pool, A, 41, 5), 0);
    assert_eq!(to(&mut pool, 45), 5);
    assert_eq!(lent(&mut pool, A, 42, 1), 1);
    assert_eq!(to(&mut pool, 0), -41);
    assert_eq!(to(&mut pool, 100), 59, "whatever came in between");
    // A bucket of which nothing is spent has all of it.
    assert_eq!(pool.free(0, BucketId([77; 16]), pool.tau()), Tokens::whole(100));
}

#[test]
fn what_some_may_have_spent_is_not_given_to_others_in_the_same_window() {
    let weighed = |weights: [u32; 3]| Policy {
        weights: [("r0", weights[0]), ("r1", weights[1]), ("r2", weights[2])]
            .map(|(r, w)| (r.into(), w))
            .into(),
        ..quota(100, 30)
    };
    let mut pool = cluster(vec![weighed([1, 0, 0])]);
    let burst = |pool: &Pool, region| pool.usable(0, region).unwrap().burst.floor();
    assert_eq!((burst(&pool, A), burst(&pool, B), free(&pool)), (30, 0, 70));
    assert_eq!(lent(&mut pool, A, 1, 1), 1);
    // Half of the reserve becomes B's, half the pool's.
    let next =
        Policy { reserve: Reserve { rate: Share::NONE, burst: Share::percent(15) }, ..weighed([0, 1, 0]) };
    apply(&mut pool, 1, set(vec![next]));
    assert!(free(&pool) <= 69);
    apply(&mut pool, 1, [A, B, C].map(|region| ack(region, 2)).to_vec());
    assert_eq!(free(&pool), 54, "the larger of B's old and new part counts, and A's may be spent");
    apply(&mut pool, 70_000, vec![]);
    assert!(pool.settled());
    assert_eq!((burst(&pool, A), burst(&pool, B)), (0, 15));
    let (before, part) = pool.held_back(0, B).unwrap();
    assert_eq!((part.burst, pool.held_back(0, A).unwrap().1.burst), (Tokens::ZERO, Tokens::ZERO));
    assert_eq!(free(&pool), 54);
    // A change back, or of the quota alone, does not bring it back in this window.
    apply(&mut pool, 1, set(vec![weighed([1, 0, 0])]));
    apply(&mut pool, 1, [A, B, C].map(|region| ack(region, 3)).to_vec());
    apply(&mut pool, 70_000, vec![]);
    assert_eq!(pool.held_back(0, A).unwrap().1.burst, Tokens::ZERO);
    // The next window begins with all of it.
    let wall = pool.wall(pool.tau()).unwrap();
    assert!(before > NOON && before < wall);
    apply(&mut pool, 0, [A, B, C].map(|region| says(region, NOON + Micros::seconds(3_600))).to_vec());
    assert_eq!(pool.held_back(0, A), None);
    let other = Ask { bucket: BucketId([1; 16]), ..ask(A, 50) };
    let ops = asked_in(&pool, NOON + Micros::seconds(3_600), other);
    apply(&mut pool, 1, ops);
    assert_eq!(pool.free(0, BucketId([1; 16]), pool.tau()), Tokens::whole(69));
}

#[test]
fn a_region_that_comes_has_its_part_of_the_next_window() {
    let mut pool = cluster(vec![quota(90, 50)]);
    assert_eq!(pool.usable(0, A).unwrap().burst, Tokens::whole(15));
    apply(&mut pool, 1, vec![Op::AddRegion(AddRegion { name: "r3".into(), previous: 0 })]);
    apply(&mut pool, 1, [A, B, C].map(|region| ack(region, 2)).to_vec());
    apply(&mut pool, 70_000, vec![]);
    let newcomer = pool.region("r3").unwrap();
    assert!(pool.settled());
    assert_eq!(pool.usable(0, newcomer).unwrap().burst, Tokens::whole(11));
    assert_eq!(pool.held_back(0, newcomer).unwrap().1, Part::default());
    assert_eq!(pool.held_back(0, A).unwrap().1.burst, pool.usable(0, A).unwrap().burst);
}

#[test]
fn raises_of_the_quota_alone_are_not_held_back() {
    let mut pool = cluster(vec![quota(100, 20)]);
    let reserve =
        |pool: &Pool| [A, B, C].map(|r| pool.usable(0, r).unwrap().burst.floor()).iter().sum::<i64>();
    assert_eq!((reserve(&pool), free(&pool)), (20, 80));
    apply(&mut pool, 1, set(vec![quota(200, 20)]));
    assert_eq!((reserve(&pool), free(&pool)), (20, 160), "the pool has its part at once");
    apply(&mut pool, 1, [A, B, C].map(|region| ack(region, 2)).to_vec());
    apply(&mut pool, 70_000, vec![]);
    assert_eq!((reserve(&pool), free(&pool)), (40, 160), "and regions once all know");
    assert_eq!(pool.held_back(0, A), None);
    assert_eq!(Rate::ZERO, pool.cut(0).unwrap().rate);
}
