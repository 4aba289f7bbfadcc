//! Loans of idle reserve, rule by rule.

use super::rules::{A, B, BUCKET, apply, ask, asked, cluster, limit, set};
use crate::quota::amount::{Micros, Rate};
use crate::quota::policy::{LOAN, Mode, Policy};
use crate::quota::pool::*;

/// The reserves are 10 each, of a limit of 100.
fn pool() -> Pool {
    cluster(vec![limit(100, 100, 20)])
}

fn hungry(seq: u64) -> Ask {
    Ask { demand: Rate::per_second(200), ..ask(A, seq) }
}

fn lend(pool: &Pool, seq: u64, rate: i64) -> Lend {
    let seen = Stamp { term: pool.term(), tau: pool.tau() };
    let ask = Ask { seen, demand: Rate::ZERO, want: Default::default(), ..ask(B, seq) };
    Lend { ask, rate: Rate::per_second(rate), until: Lend::until(seen, Micros::ZERO), seen_term: seen.term }
}

fn lent(pool: &Pool) -> Option<Rate> {
    pool.loan(BUCKET, B, pool.tau()).map(|loan| loan.rate)
}

/// Is anybody but this region short?
fn short(pool: &Pool, region: RegionId) -> bool {
    pool.wants_loan(0, BUCKET, region, pool.tau())
}

/// What region A has been lent.
fn granted(pool: &Pool) -> Rate {
    pool.record(BUCKET, A).unwrap().offer_rate
}

/// Under demand for all of it, with a loan of 9.
fn lending() -> Pool {
    let mut pool = pool();
    let ops = asked(&pool, hungry(1));
    apply(&mut pool, 10, ops);
    assert_eq!(granted(&pool), Rate::per_second(80));
    assert!(short(&pool, B) && !short(&pool, A));
    let op = Op::Lend(lend(&pool, 1, 9));
    apply(&mut pool, 10, vec![op]);
    pool
}

#[test]
fn what_is_lent_goes_to_those_who_are_short() {
    let mut pool = lending();
    assert_eq!(lent(&pool), Some(Rate::per_second(9)));
    assert_eq!(granted(&pool), Rate::per_second(89), "at once");
    let books = pool.books(0, BUCKET, pool.tau()).unwrap();
    assert_eq!(books.reserved.0 + books.lent.iter().map(|l| l.0).sum::<Rate>() + books.free.0, books.whole.0);
    assert_eq!(books.reserved.0, Rate::per_second(11));
    // Nobody is short of what is there once less is asked for.
    let ops = asked(&pool, Ask { demand: Rate::per_second(50), ..ask(A, 2) });
    apply(&mut pool, 10, ops);
    assert!(!short(&pool, B));
}

#[test]
fn a_lease_that_is_backed_ends_before_the_loan() {
    let mut pool = lending();
    let until = pool.loan(BUCKET, B, pool.tau()).unwrap().until;
    let backed = pool.record(BUCKET, A).unwrap().expires;
    assert!(backed <= until);
    for seq in 2..12 {
        let ops = asked(&pool, Ask { held_rate: granted(&pool), ..hungry(seq) });
        apply(&mut pool, 4_000, ops);
        let record = pool.record(BUCKET, A).unwrap();
        let own = Rate::per_second(80);
        assert!(record.rate <= own || record.expires <= until, "{seq}: {record:?}");
        let books = pool.books(0, BUCKET, pool.tau()).unwrap();
        assert!(books.free.0 >= Rate::ZERO, "{books:?}");
    }
    assert_eq!((lent(&pool), granted(&pool)), (None, Rate::per_second(80)));
    assert_eq!(pool.lender_of(B).count(), 0, "it is forgotten");
}

#[test]
fn another_term_makes_it_void_but_knows_of_it() {
    let mut pool = lending();
    let late = lend(&pool, 2, 9);
    let tau = pool.tau() + Micros::millis(10);
    pool.apply(2, &Entry { stamp: Stamp { term: 2, tau }, ops: vec![] });
    assert_eq!(lent(&pool), None);
    let books = pool.books(0, BUCKET, pool.tau()).unwrap();
    assert_eq!(books.free.0, Rate::ZERO, "what it has backed is still in use");
    assert_eq!(pool.lender_of(B).collect::<Vec<_>>(), [(BUCKET, 0)]);
    // Nothing more is lent of it, and one that was measured by the clock before counts for nothing.
    let mut ops = asked(&pool, Ask { held_rate: Rate::per_second(89), ..hungry(2) });
    ops.push(Op::Lend(late));
    pool.apply(2, &Entry { stamp: Stamp { term: 2, tau: tau + Micros::millis(10) }, ops });
    assert_eq!((lent(&pool), granted(&pool)), (None, Rate::per_second(80)));
    assert_eq!(pool.record(BUCKET, B).unwrap().seq, 2, "the ask counts all the same");
    assert_eq!(pool.check(), Ok(()));
}

#[test]
fn a_loan_is_never_more_than_the_reserve_nor_longer_than_it_may_be() {
    let mut pool = lending();
    let more = Lend { rate: Rate::MAX, until: Micros::MAX, ..lend(&pool, 2, 0) };
    let old = lend(&pool, 1, 5);
    apply(&mut pool, 10, vec![Op::Lend(more)]);
    let loan = pool.loan(BUCKET, B, pool.tau()).unwrap();
    assert_eq!((loan.rate, loan.until), (Rate::per_second(10), pool.tau() + LOAN));
    apply(&mut pool, 10, vec![Op::Lend(old)]);
    assert_eq!(lent(&pool), Some(Rate::per_second(10)), "a late copy changes nothing");
    let of_old = Lend { ask: Ask { epoch: 0, ..lend(&pool, 9, 1).ask }, ..lend(&pool, 9, 1) };
    apply(&mut pool, 10, vec![Op::Lend(of_old)]);
    assert_eq!(lent(&pool), Some(Rate::per_second(10)));
}

#[test]
fn a_smaller_reserve_cuts_it_down_for_good() {
    let mut pool = lending();
    let before = pool.lender_of(B).count();
    apply(&mut pool, 10, set(vec![limit(100, 100, 4)]));
    apply(&mut pool, 10, vec![super::rules::ack(A, 2), super::rules::ack(B, 2)]);
    assert_eq!(lent(&pool), Some(Rate::per_second(2)));
    apply(&mut pool, 10, set(vec![limit(100, 100, 20)]));
    apply(&mut pool, 10, vec![super::rules::ack(A, 3), super::rules::ack(B, 3)]);
    assert_eq!((lent(&pool), pool.lender_of(B).count()), (Some(Rate::per_second(2)), before));
}

/// Until then what a bucket holds that a store has forgotten is reckoned as that of a lender.
#[test]
fn a_limit_that_is_lent_no_more_settles_when_the_loans_are_over() {
    let mut pool = lending();
    let split = Policy { mode: Mode::Split, ..limit(100, 100, 20) };
    apply(&mut pool, 10, set(vec![split.clone()]));
    apply(&mut pool, 20_000, vec![super::rules::ack(A, 2), super::rules::ack(B, 2)]);
    apply(&mut pool, LOAN.0 / 1_000, vec![]);
    assert!(!pool.settled() && pool.may_lend(0));
    apply(&mut pool, LOAN.0 / 25_000, vec![]);
    assert!(pool.settled() && !pool.may_lend(0));
    // Nobody is waited for where nothing was lent.
    apply(&mut pool, 10, set(vec![split.clone(), Policy { name: "q".into(), ..split }]));
    apply(&mut pool, 10, vec![super::rules::ack(A, 3), super::rules::ack(B, 3)]);
    assert!(pool.settled());
}

#[test]
fn a_policy_that_comes_back_has_none_of_its_former_loans() {
    let mut pool = lending();
    for (version, policies) in [(2, vec![]), (3, vec![limit(100, 100, 4)])] {
        apply(&mut pool, 10, set(policies));
        apply(&mut pool, 10, vec![super::rules::ack(A, version), super::rules::ack(B, version)]);
        apply(&mut pool, 10_100, vec![]);
    }
    let policy = pool.policies().next().unwrap().id;
    assert!(policy > 0 && pool.settled());
    let ops = asked(&pool, Ask { policy, ..hungry(3) });
    apply(&mut pool, 10, ops);
    assert_eq!((lent(&pool), granted(&pool)), (None, Rate::per_second(96)));
}

/// A replica that hears nothing more does not go on lending to whoever was short.
#[test]
fn needs_that_nobody_has_spoken_of_for_a_lease_count_for_nothing() {
    let pool = lending();
    let after = |time: i64| pool.wants_loan(0, BUCKET, B, pool.tau() + Micros::millis(time));
    assert!(after(9_900) && !after(10_100));
}

/// The new cluster's leaders have clocks of their own.
#[test]
fn a_restored_pool_has_no_loans() {
    let pool = lending();
    let names = pool.regions().to_vec();
    let restored = pool.clone().restored(&names, &[], Spent::AsKnown).unwrap();
    assert_eq!((pool.lender_of(B).count(), restored.lender_of(B).count()), (1, 0));
    assert_eq!(lent(&restored), None);
}

#[test]
fn a_snapshot_has_loans() {
    let pool = lending();
    let bytes = postcard::to_stdvec(&pool).unwrap();
    assert_eq!(postcard::from_bytes::<Pool>(&bytes).unwrap(), pool);
}
