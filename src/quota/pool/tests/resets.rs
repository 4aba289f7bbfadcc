//! Resets: what they make, once, and never more.

use super::rules::{A, B, BUCKET, apply, ask, asked, cluster, limit, set};
use super::support::policy;
use crate::quota::amount::{Rate, Tokens};
use crate::quota::policy::*;
use crate::quota::pool::*;

fn reset(pool: &mut Pool) -> Result<u64, NoReset> {
    let op = ResetBucket { policy: 0, bucket: BUCKET, by: "127.0.0.1".into(), reason: "a test".into() };
    outcome(&apply(pool, 1, vec![Op::ResetBucket(op)]))
}

fn outcome(applied: &Applied) -> Result<u64, NoReset> {
    match applied.policies {
        Some(PolicyOutcome::Reset(number)) => Ok(number),
        Some(PolicyOutcome::NotReset(why)) => Err(why),
        ref other => panic!("{other:?}"),
    }
}

fn take(pool: &mut Pool, region: RegionId, epoch: u64, number: u64) {
    let op = TakeReset { region, epoch, bucket: BUCKET, number };
    apply(pool, 1, vec![Op::TakeReset(op)]);
}

fn of(pool: &Pool) -> &Reset {
    pool.resets().find(|(bucket, _)| *bucket == BUCKET).unwrap().1
}

fn whole(tokens: i64) -> Tokens {
    Tokens::whole(tokens)
}

/// All that is owed and taken, in whole tokens.
fn parts(pool: &Pool) -> i64 {
    let reset = of(pool);
    let taken: Tokens = [A, B].iter().filter_map(|region| reset.taken(*region, 1)).sum();
    taken.floor() + 10 * i64::try_from(reset.owed().count()).unwrap()
}

#[test]
fn the_pool_is_full_and_slices_and_reserves_get_theirs_once() {
    let mut pool = cluster(vec![limit(100, 100, 20)]);
    let op = asked(&pool, Ask { region: A, level: whole(10), ..ask(A, 1) });
    apply(&mut pool, 1, op);
    let before = pool.record(BUCKET, A).unwrap().clone();
    assert!(before.granted.is_positive() && before.offer_burst.is_positive());

    assert_eq!(reset(&mut pool), Ok(1));
    let after = pool.record(BUCKET, A).unwrap().clone();
    assert_eq!(after.granted - before.granted, after.offer_burst, "what the slice holds, once more");
    assert_eq!((after.seq, after.push), (before.seq, before.push + 1), "as a push that is read once");
    assert_eq!((after.burst, after.rate, after.expires), (before.burst, before.rate, before.expires));
    let free = pool.books(0, BUCKET, pool.tau()).unwrap().free.1;
    assert_eq!(pool.free(0, BUCKET, pool.tau()), free, "full");
    assert_eq!(of(&pool).owed().collect::<Vec<_>>(), [A, B]);
    let made = free.floor() + (after.granted - before.granted).floor() + parts(&pool);
    assert!(made <= 100, "{made}: no more than one burst, all together");

    take(&mut pool, A, 1, 1);
    assert_eq!((of(&pool).taken(A, 1), of(&pool).taken(A, 2)), (Some(whole(10)), None));
    take(&mut pool, A, 1, 1);
    assert_eq!(parts(&pool), 20, "twice is once");
    take(&mut pool, B, 2, 1);
    assert_eq!(of(&pool).owed().collect::<Vec<_>>(), [B], "under its present epoch alone");
    take(&mut pool, B, 1, 7);
    assert_eq!(of(&pool).owed().collect::<Vec<_>>(), [B], "of this reset alone");
}

#[test]
fn a_region_that_asks_before_it_has_read_gives_back_what_it_never_saw() {
    let mut pool = cluster(vec![limit(100, 100, 20)]);
    let op = asked(&pool, Ask { level: whole(10), ..ask(A, 1) });
    apply(&mut pool, 1, op);
    let granted = pool.record(BUCKET, A).unwrap().granted;
    reset(&mut pool).unwrap();
    let full = pool.free(0, BUCKET, pool.tau());
    // It has read its first record, spent everything, and gives up its slice without having read of the reset.
    let empty =
        Ask { read_seq: 1, read_granted: granted, demand: Rate::ZERO, want: Tokens::ZERO, ..ask(A, 2) };
    let op = asked(&pool, empty);
    apply(&mut pool, 1, op);
    let books = pool.books(0, BUCKET, pool.tau()).unwrap();
    assert!(books.level <= books.free.1 && books.level >= full, "{books:?}");
}

#[test]
fn a_later_reset_takes_the_place_of_one_that_was_not_taken() {
    let mut pool = cluster(vec![limit(100, 100, 20)]);
    assert_eq!(reset(&mut pool), Ok(1));
    take(&mut pool, A, 1, 1);
    assert_eq!(reset(&mut pool), Ok(2));
    take(&mut pool, B, 1, 1);
    assert_eq!(of(&pool).owed().collect::<Vec<_>>(), [A, B]);
    take(&mut pool, B, 1, 2);
    assert_eq!(of(&pool).taken(B, 1), Some(whole(10)));
}

#[test]
fn a_part_is_what_the_reserve_held_when_it_was_decided() {
    let mut pool = cluster(vec![limit(100, 100, 20)]);
    reset(&mut pool).unwrap();
    apply(&mut pool, 1, set(vec![limit(100, 100, 4)]));
    take(&mut pool, B, 1, 1);
    assert_eq!(of(&pool).taken(B, 1), Some(whole(10)));
    let add = AddRegion { name: "new".into(), previous: 0 };
    apply(&mut pool, 1, vec![Op::AddRegion(add)]);
    assert!(of(&pool).owed().all(|region| region == A), "who comes later is owed nothing");
}

#[test]
fn split_has_no_pool_and_unlimited_nothing_to_reset() {
    let mut split = limit(100, 100, 20);
    split.mode = Mode::Split;
    let mut pool = cluster(vec![split]);
    assert_eq!(reset(&mut pool), Ok(1));
    assert_eq!(pool.bucket_count(), 0);
    take(&mut pool, A, 1, 1);
    assert_eq!(of(&pool).taken(A, 1), Some(whole(50)));

    let mut free = policy("p", 1, Unit::Second, 1, Mode::Split, Reserve::default());
    free.limit = Limit::Unlimited;
    assert_eq!(reset(&mut cluster(vec![free])), Err(NoReset::NoLimit));
    assert_eq!(reset(&mut cluster(vec![])), Err(NoReset::NoLimit));
}

#[test]
fn resets_that_all_have_taken_go_and_too_many_are_refused() {
    let mut pool = cluster(vec![limit(100, 100, 20)]);
    let op = |n: u128| {
        let (by, reason) = ("me".to_owned(), "why".to_owned());
        Op::ResetBucket(ResetBucket { policy: 0, bucket: BucketId(n.to_be_bytes()), by, reason })
    };
    for n in 0..u128::try_from(RESETS_MAX).unwrap() {
        assert!(outcome(&apply(&mut pool, 0, vec![op(n)])).is_ok());
    }
    assert_eq!(outcome(&apply(&mut pool, 0, vec![op(1 << 40)])), Err(NoReset::TooMany));
    assert!(outcome(&apply(&mut pool, 0, vec![op(0)])).is_ok(), "the same bucket again takes no more room");
    let all: Vec<(BucketId, u64)> = pool.resets().map(|(bucket, reset)| (bucket, reset.number)).collect();
    for (bucket, number) in all {
        let take = |region| Op::TakeReset(TakeReset { region, epoch: 1, bucket, number });
        apply(&mut pool, 0, vec![take(A), take(B)]);
    }
    assert_eq!(
        outcome(&apply(&mut pool, 0, vec![op(1 << 40)])),
        Err(NoReset::TooMany),
        "they have time to read it"
    );
    assert!(outcome(&apply(&mut pool, 31_000, vec![op(1 << 40)])).is_ok());
    assert_eq!(pool.resets().count(), 1);
    let long =
        ResetBucket { policy: 0, bucket: BUCKET, by: "x".repeat(RESET_TEXT_MAX + 1), reason: "y".into() };
    assert_eq!(outcome(&apply(&mut pool, 0, vec![Op::ResetBucket(long)])), Err(NoReset::TooLong));
}
