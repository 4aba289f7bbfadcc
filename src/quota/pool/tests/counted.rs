//! What a change of policies holds back of limits that count.

use super::rules::{A, B, ack, apply, cluster, set};
use super::support::*;
use crate::quota::amount::{Micros, Tokens};
use crate::quota::counted::lent::kept;
use crate::quota::policy::*;
use crate::quota::pool::*;

fn log(quota: u64, seconds: u32, weights: [u32; 2]) -> Policy {
    let quota = Quota { quota, per: Window::Length { seconds }, algorithm: Algorithm::SlidingLog };
    counted(Limit::Quota(quota), weights)
}

fn permits(permits: u64, ttl_s: i64, weights: [u32; 2]) -> Policy {
    counted(Limit::Concurrent(Concurrent { permits, ttl: Micros::seconds(ttl_s) }), weights)
}

fn counted(limit: Limit, [a, b]: [u32; 2]) -> Policy {
    let token_bucket = policy("p", 1, Unit::Second, 1, Mode::Split, Reserve::default());
    Policy { limit, weights: [("r0".into(), a), ("r1".into(), b)].into(), ..token_bucket }
}

fn parts(pool: &Pool) -> [i64; 2] {
    [A, B].map(|region| pool.usable(0, region).unwrap().burst.floor())
}

/// What each region is held to, and how long ago the change was.
fn held(pool: &Pool) -> [Option<(i64, i64)>; 2] {
    let one = |region| {
        let unseen = pool.unseen(0, region)?;
        Some((unseen.level.floor(), (pool.tau() - unseen.at).0 / 1_000_000))
    };
    [A, B].map(one)
}

/// Sets a policy, and lets it settle.
fn change(pool: &mut Pool, policy: Policy) {
    apply(pool, 1, set(vec![policy]));
    let version = pool.version();
    apply(pool, 1, vec![ack(A, version), ack(B, version)]);
    assert!(pool.settled(), "what is not lent settles when all know");
}

#[test]
fn a_larger_limit_alone_is_used_as_soon_as_it_has_settled() {
    let mut pool = cluster(vec![log(5, 60, [3, 2])]);
    assert_eq!((parts(&pool), held(&pool)), ([3, 2], [None; 2]));
    apply(&mut pool, 1, set(vec![log(10, 60, [3, 2])]));
    assert_eq!(parts(&pool), [3, 2], "not before all know");
    change(&mut pool, log(20, 60, [3, 2]));
    assert_eq!((parts(&pool), held(&pool)), ([12, 8], [None; 2]));
    apply(&mut pool, 1, set(vec![log(5, 60, [3, 2])]));
    assert_eq!((parts(&pool), held(&pool)), ([3, 2], [None; 2]), "a cut binds at once");
    change(&mut pool, log(10, 60, [3, 2]));
    assert_eq!((parts(&pool), held(&pool)), ([6, 4], [None; 2]));
}

#[test]
fn what_is_moved_between_regions_is_held_back_for_a_span() {
    let mut pool = cluster(vec![log(10, 60, [1, 1])]);
    apply(&mut pool, 1, set(vec![log(10, 60, [1, 4])]));
    assert_eq!((parts(&pool), held(&pool)), ([2, 5], [None; 2]));
    change(&mut pool, log(10, 60, [1, 4]));
    assert_eq!((parts(&pool), held(&pool)), ([2, 8], [None, Some((5, 0))]));
    apply(&mut pool, 30_000, vec![]);
    // A larger limit meanwhile does not let go of it.
    change(&mut pool, log(20, 60, [1, 4]));
    assert_eq!((parts(&pool), held(&pool)[1].map(|(level, _)| level)), ([4, 16], Some(5)));
    apply(&mut pool, 30_000, vec![]);
    change(&mut pool, log(20, 60, [4, 1]));
    assert_eq!(parts(&pool), [16, 4]);
    assert_eq!(held(&pool), [Some((4, 0)), None], "what was held back before is over");
    // The same limit for other regions is a move as well.
    let mut pool = cluster(vec![permits(9, 60, [1, 1])]);
    change(&mut pool, permits(12, 60, [3, 1]));
    assert_eq!((parts(&pool), held(&pool)), ([9, 3], [Some((5, 0)), None]));
}

#[test]
fn leases_that_were_given_for_longer_are_waited_for() {
    let mut pool = cluster(vec![permits(4, 100, [1, 1])]);
    change(&mut pool, permits(4, 10, [3, 1]));
    let hold = pool.unseen(0, A).unwrap();
    assert_eq!(hold.level, Tokens::whole(2));
    assert_eq!(hold.at + kept(Micros::seconds(10)) - pool.tau(), kept(Micros::seconds(100)));
}

#[test]
fn who_counts_in_another_way_begins_anew() {
    let bucket = policy("p", 10, Unit::Second, 10, Mode::Split, Reserve::default());
    let mut pool = cluster(vec![bucket.clone()]);
    apply(&mut pool, 1, set(vec![log(20, 60, [1, 1])]));
    assert_eq!(
        (parts(&pool), held(&pool)),
        ([5, 5], [None; 2]),
        "the smaller of both, and nothing of it is used"
    );
    change(&mut pool, log(20, 60, [3, 1]));
    assert_eq!((parts(&pool), held(&pool)), ([15, 5], [Some((5, 0)), None]), "a part has moved since");
    change(&mut pool, log(40, 61, [3, 1]));
    assert_eq!((parts(&pool), held(&pool)), ([30, 10], [None; 2]), "another window has other buckets");
    change(&mut pool, bucket);
    assert_eq!(parts(&pool), [5, 5]);
}
