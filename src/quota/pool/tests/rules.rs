//! Rules of the pool one by one: policies, tombstones, eviction, and entries that make no sense.

use super::support::*;
use crate::quota::amount::{Level, Micros, Rate, Tokens};
use crate::quota::borrower::Borrower;
use crate::quota::policy::*;
use crate::quota::pool::ledger::Ledger;
use crate::quota::pool::*;

pub(super) const BUCKET: BucketId = BucketId([9; 16]);
pub(super) const A: RegionId = RegionId(0);
pub(super) const B: RegionId = RegionId(1);

/// A cluster of two regions that have joined.
pub(super) fn cluster(policies: Vec<Policy>) -> Pool {
    let mut pool = Pool::default();
    let mut ops = vec![Op::Found { regions: regions(2), policies }];
    ops.extend([A, B].map(|region| Op::Join(Join { region, previous: 0, nonce: 5 })));
    let applied = apply(&mut pool, 0, ops);
    assert_eq!(applied.policies, Some(PolicyOutcome::Set(1)));
    assert_eq!(applied.joined, [A, B]);
    pool
}

/// Applies operations this long after the last entry.
pub(super) fn apply(pool: &mut Pool, millis: i64, ops: Vec<Op>) -> Applied {
    let tau = pool.tau() + Micros::millis(millis);
    let applied = pool.apply(1, &Entry { stamp: Stamp { term: 1, tau }, ops });
    assert_eq!(pool.check(), Ok(()));
    applied
}

pub(super) fn limit(amount: u64, burst: u64, reserve_percent: u32) -> Policy {
    let share = Share::percent(reserve_percent);
    policy("p", amount, Unit::Second, burst, Mode::Strict, Reserve { rate: share, burst: share })
}

pub(super) fn set(policies: Vec<Policy>) -> Vec<Op> {
    vec![Op::SetPolicies(SetPolicies { expected: None, policies })]
}

pub(super) fn ack(region: RegionId, version: u64) -> Op {
    Op::Ack(Ack { region, version })
}

pub(super) fn ask(region: RegionId, seq: u64) -> Ask {
    let demand = Rate::per_second(50);
    let (want, quantum) = (Tokens::whole(50), Tokens::whole(1));
    Ask { region, epoch: 1, bucket: BUCKET, seq, demand, want, quantum, ..Ask::default() }
}

pub(super) fn asked(pool: &Pool, ask: Ask) -> Vec<Op> {
    let seen = Stamp { term: 1, tau: pool.tau() };
    vec![Op::Ask(Ask { seen, ..ask })]
}

pub(super) fn usable(pool: &Pool, region: RegionId) -> (i64, i64) {
    let part = pool.usable(0, region).unwrap();
    (part.rate.0 / 1_000_000, part.burst.floor())
}

#[test]
fn a_cluster_is_founded_once() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    let again = vec![Op::Found { regions: regions(3), policies: vec![] }];
    assert_eq!(apply(&mut pool, 1, again).policies, None);
    assert_eq!((pool.regions().len(), pool.version()), (2, 1));
    assert_eq!((pool.region("r1"), pool.region("r2")), (Some(B), None));
    let refused = |regions: Vec<RegionName>, policies| {
        let mut pool = Pool::default();
        apply(&mut pool, 1, vec![Op::Found { regions, policies }]).policies == Some(PolicyOutcome::Refused)
    };
    assert!(refused(vec![], vec![]));
    assert!(refused(regions(65), vec![]));
    assert!(refused(vec!["a".into(), "a".into()], vec![]));
    assert!(refused(regions(2), vec![limit(1, 1, 0), limit(2, 2, 0)]), "a name twice");
    assert!(refused(regions(2), vec![limit(1 << 33, 1, 0)]), "more than amounts can be");
}

#[test]
fn a_version_that_was_not_expected_is_a_conflict() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    let set = |expected| vec![Op::SetPolicies(SetPolicies { expected, policies: vec![limit(200, 100, 10)] })];
    assert_eq!(apply(&mut pool, 1, set(Some(7))).policies, Some(PolicyOutcome::Conflict(1)));
    assert_eq!(apply(&mut pool, 1, set(Some(1))).policies, Some(PolicyOutcome::Set(2)));
    assert_eq!(apply(&mut pool, 1, set(Some(1))).policies, Some(PolicyOutcome::Conflict(2)));
    assert_eq!(pool.policies().next().unwrap().cut.unwrap().rate, Rate::per_second(200));
}

#[test]
fn a_reserve_shrinks_at_once_and_grows_when_all_know_and_a_lease_has_passed() {
    let mut pool = cluster(vec![limit(100, 100, 20)]);
    assert_eq!(usable(&pool, A), (10, 10));
    apply(&mut pool, 1, set(vec![limit(100, 100, 60)]));
    assert_eq!(usable(&pool, A), (10, 10));
    // Counted at the pool at once: what is there for others is less.
    assert_eq!(pool.free(0, BUCKET, pool.tau()), Tokens::whole(40));
    apply(&mut pool, 1, set(vec![limit(100, 100, 4)]));
    assert_eq!(usable(&pool, A), (2, 2), "the smallest of the three");
    assert_eq!(
        pool.free(0, BUCKET, pool.tau()),
        Tokens::whole(40),
        "the largest of the three, until A and B know"
    );

    apply(&mut pool, 1, vec![ack(A, 2), ack(A, 3)]);
    assert_eq!(pool.unacked(3).collect::<Vec<_>>(), [B]);
    apply(&mut pool, 60_000, vec![]);
    assert!(!pool.settled(), "B does not know");
    assert_eq!(usable(&pool, A), (2, 2));
    apply(&mut pool, 1, vec![ack(B, 2)]);
    assert_eq!(usable(&pool, B), (2, 2));
    assert!(apply(&mut pool, 1, vec![ack(B, 3)]).acknowledged);
    assert!(pool.settled());
    assert!(!apply(&mut pool, 1, vec![ack(B, 3), ack(B, 9)]).acknowledged);

    apply(&mut pool, 1, set(vec![limit(100, 100, 60)]));
    apply(&mut pool, 1, vec![ack(A, 4), ack(B, 4)]);
    let wait = pool.settles_at().unwrap() - pool.tau();
    assert_eq!(wait, Micros::seconds(10) - Micros::millis(1));
    apply(&mut pool, 9_998, vec![]);
    assert_eq!(usable(&pool, A), (2, 2));
    apply(&mut pool, 1, vec![]);
    assert_eq!(usable(&pool, A), (30, 30));
    // A bucket that the store does not hold has gained room, no tokens; and it counts as one that was empty at the change,
    // until that would have filled and expired, and that had been lent from just before the change on.
    assert_eq!(pool.unseen(0, A).map(|u| u.level), Some(Tokens::whole(2)));
    apply(&mut pool, 31_900, vec![]);
    assert_eq!(pool.unseen(0, A).map(|u| u.level), Some(Tokens::whole(2)));
    apply(&mut pool, 100, vec![]);
    assert_eq!(pool.unseen(0, A), None);
}

#[test]
fn the_books_say_where_the_whole_is_and_balance() {
    let balanced = |pool: &Pool| {
        let books = pool.books(0, BUCKET, pool.tau()).unwrap();
        let (rate, burst) = books.lent.iter().fold(books.reserved, |(r, b), l| (r + l.0, b + l.1));
        assert_eq!((rate + books.free.0, burst + books.free.1), books.whole, "{books:?}");
        books
    };
    let mut pool = cluster(vec![limit(100, 100, 20)]);
    let unasked = balanced(&pool);
    assert_eq!(unasked.whole, (Rate::per_second(100), Tokens::whole(100)));
    assert_eq!(unasked.reserved, (Rate::per_second(20), Tokens::whole(20)));
    assert_eq!((unasked.level, &unasked.lent[..]), (Tokens::whole(80), &[Default::default(); 2][..]));

    let ops = asked(&pool, ask(A, 1));
    apply(&mut pool, 1, ops);
    let lent = balanced(&pool).lent;
    assert!(lent[0].0.is_positive() && lent[0].1.is_positive() && lent[1] == Default::default(), "{lent:?}");

    // While a limit shrinks what is free is negative, and a reserve counts as the larger of old and new.
    apply(&mut pool, 1, set(vec![limit(10, 10, 20)]));
    let shrinking = balanced(&pool);
    assert_eq!(shrinking.reserved, (Rate::per_second(20), Tokens::whole(20)));
    assert!(shrinking.free.0 < Rate::ZERO && shrinking.free.1 < Tokens::ZERO, "{shrinking:?}");
    apply(&mut pool, 1, vec![ack(A, 2), ack(B, 2)]);
    apply(&mut pool, 20_000, vec![]);
    assert_eq!(balanced(&pool).free, (Rate::per_second(8), Tokens::whole(8)));

    let split = Policy { mode: Mode::Split, ..limit(10, 10, 20) };
    assert_eq!(cluster(vec![split]).books(0, BUCKET, Micros::ZERO), None);
}

#[test]
fn a_raise_gains_room_and_no_tokens() {
    let mut pool = cluster(vec![limit(10, 100, 0)]);
    apply(&mut pool, 1, set(vec![limit(10, 300, 0)]));
    assert_eq!(pool.free(0, BUCKET, pool.tau()), Tokens::whole(100));
    assert_eq!(pool.free(0, BUCKET, pool.tau() + Micros::seconds(5)), Tokens::whole(150));
    apply(&mut pool, 1, set(vec![limit(10, 50, 0)]));
    assert_eq!(pool.free(0, BUCKET, pool.tau()), Tokens::whole(50));
}

#[test]
fn policies_keep_their_ids_and_removed_ones_retire() {
    let named = |name: &str| Policy { name: name.into(), ..limit(100, 100, 10) };
    let mut pool = cluster(vec![named("a"), named("b")]);
    let ids = |pool: &Pool| pool.policies().map(|p| (p.policy.name.to_string(), p.id)).collect::<Vec<_>>();
    apply(&mut pool, 1, set(vec![named("c"), named("b")]));
    assert_eq!(ids(&pool), [("c".into(), 2), ("b".into(), 1)]);
    let op = asked(&pool, Ask { policy: 0, ..ask(A, 1) });
    assert!(apply(&mut pool, 1, op).records.is_empty(), "nothing is lent of a policy that was removed");
    assert_eq!(pool.usable(0, A), Some(Part::default()));
    apply(&mut pool, 1, set(vec![named("a")]));
    assert_eq!(ids(&pool), [("a".into(), 0)], "it came back before it was gone");
    assert_eq!(pool.free(0, BUCKET, pool.tau()), Tokens::ZERO, "and gained nothing by that");

    apply(&mut pool, 1, set(vec![]));
    apply(&mut pool, 1, vec![ack(A, 4), ack(B, 4)]);
    apply(&mut pool, 60_000, vec![]);
    assert!(pool.settled() && pool.usable(0, A).is_none());
    apply(&mut pool, 1, set(vec![named("a")]));
    assert_eq!(ids(&pool), [("a".into(), 3)]);
    assert_eq!(pool.free(3, BUCKET, pool.tau()), Tokens::whole(90), "a new policy starts full");
}

#[test]
fn buckets_go_with_their_policy_and_with_its_limit() {
    for next in [vec![], vec![Policy { limit: Limit::Unlimited, ..limit(100, 100, 10) }]] {
        let mut pool = cluster(vec![limit(100, 100, 10)]);
        let op = asked(&pool, ask(A, 1));
        assert_eq!(apply(&mut pool, 1, op).records, [(A, BUCKET)]);
        apply(&mut pool, 1, set(next));
        apply(&mut pool, 1, vec![ack(A, 2), ack(B, 2)]);
        assert_eq!(pool.bucket_count(), 1);
        apply(&mut pool, 20_000, vec![]);
        assert!(pool.settled());
        assert_eq!(pool.bucket_count(), 0);
    }
}

#[test]
fn too_many_changes_at_once_are_refused() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    for i in 0..VERSIONS_MAX as u64 {
        assert_eq!(
            apply(&mut pool, 1, set(vec![limit(i, 100, 10)])).policies,
            Some(PolicyOutcome::Set(i + 2))
        );
    }
    assert_eq!(apply(&mut pool, 1, set(vec![limit(7, 100, 10)])).policies, Some(PolicyOutcome::Refused));
    let version = pool.version();
    apply(&mut pool, 60_000, vec![ack(A, version), ack(B, version)]);
    assert!(pool.settled());
    assert_eq!(usable(&pool, A).0, 63 * 10 / 200, "the last of them");
}

#[test]
fn an_ask_is_applied_once() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    let op = asked(&pool, ask(A, 3));
    assert_eq!(apply(&mut pool, 1, op.clone()).records, [(A, BUCKET)]);
    let record = pool.record(BUCKET, A).unwrap().clone();
    assert!(record.granted.is_positive());
    for op in [op.clone(), asked(&pool, ask(A, 2)), asked(&pool, Ask { epoch: 2, ..ask(A, 9) })] {
        assert!(apply(&mut pool, 1, op).records.is_empty());
    }
    assert_eq!(pool.record(BUCKET, A), Some(&record));
    // Its slice has run out; a late copy finds the tombstone, and then is too old.
    apply(&mut pool, 15_000, vec![]);
    assert!(apply(&mut pool, 14_000, op.clone()).records.is_empty());
    assert!(apply(&mut pool, 30_000, op).records.is_empty());
}

/// The first ask after an idle minute comes with an old stamp, and counts all the same.
#[test]
fn an_idle_region_is_not_too_late() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    let seen = Stamp { term: 1, tau: pool.tau() };
    let late = Ask { seen, age: Micros::seconds(59), ..ask(A, 1) };
    assert_eq!(apply(&mut pool, 60_000, vec![Op::Ask(late)]).records.len(), 1);
}

#[test]
fn a_request_of_many_tokens_gets_them_all() {
    let mut pool = cluster(vec![limit(1, 15, 0)]);
    let ten = Tokens::whole(10);
    let few = Ask { quantum: ten, want: ten, short: ten, demand: Rate(1), ..ask(A, 1) };
    let op = asked(&pool, few);
    apply(&mut pool, 1, op);
    assert!(pool.record(BUCKET, A).unwrap().granted >= Tokens(9_500_000));
    // What is left does not hold another: nothing, rather than a part.
    let op = asked(&pool, Ask { quantum: ten, want: ten, short: ten, demand: Rate(1), ..ask(B, 1) });
    apply(&mut pool, 1, op);
    assert_eq!(pool.record(BUCKET, B).unwrap().granted, Tokens::ZERO);
}

#[test]
fn an_entry_with_a_stamp_of_another_term_is_refused_whole() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    let entry = Entry { stamp: Stamp { term: 1, tau: Micros::seconds(9) }, ops: asked(&pool, ask(A, 1)) };
    assert!(pool.apply(2, &entry).refused);
    assert_eq!((pool.tau(), pool.bucket_count()), (Micros(0), 0));
}

#[test]
fn idle_buckets_are_forgotten_a_few_at_a_time() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    for i in 0..2_000_u16 {
        let [x, y] = i.to_le_bytes();
        let mut id = [0; 16];
        (id[0], id[1]) = (x, y);
        let op = asked(&pool, Ask { bucket: BucketId(id), ..ask(A, 1) });
        apply(&mut pool, 0, op);
    }
    assert_eq!(pool.bucket_count(), 2_000);
    apply(&mut pool, 60_000, vec![]);
    assert!(pool.bucket_count() >= 1_980);
    for _ in 0..200 {
        apply(&mut pool, 1, vec![]);
    }
    assert_eq!(pool.bucket_count(), 0);
}

#[test]
fn books_that_do_not_balance_are_frozen_until_all_has_run_out() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    let op = asked(&pool, ask(A, 1));
    apply(&mut pool, 1, op);
    pool.buckets.get_mut(&BUCKET).unwrap().records[0].offer_burst = Tokens::whole(500);
    assert_eq!(pool.check(), Err((BUCKET, Breach::Offer)));
    let op = asked(&pool, ask(B, 1));
    let entry = Entry { stamp: Stamp { term: 1, tau: pool.tau() }, ops: op };
    assert_eq!(pool.apply(1, &entry).breached, [BUCKET]);
    assert!(pool.bucket(BUCKET).unwrap().frozen);
    let op = asked(&pool, ask(B, 2));
    let entry = Entry { stamp: Stamp { term: 1, tau: pool.tau() }, ops: op };
    pool.apply(1, &entry);
    assert_eq!(pool.record(BUCKET, B).unwrap().granted, Tokens::ZERO);
    let later = Entry { stamp: Stamp { term: 1, tau: pool.tau() + Micros::seconds(60) }, ops: vec![] };
    pool.apply(1, &later);
    let now = pool.tau();
    assert_eq!(pool.free(0, BUCKET, now), Tokens::ZERO, "sound again, and empty");
    let op = asked(&pool, ask(B, 3));
    apply(&mut pool, 500, op);
    assert!(pool.record(BUCKET, B).unwrap().offer_rate.is_positive());
}

/// Nothing that an entry holds makes a replica panic, or lend what is not there; and a replica that starts from a snapshot
/// comes to the same.
#[test]
fn entries_that_make_no_sense_are_harmless() {
    for seed in 0..60 {
        let mut rng = Rng(seed);
        let mut pool = cluster(vec![limit(100, 100, 10), Policy { name: "q".into(), ..limit(1, 5, 0) }]);
        let mut copy = pool.clone();
        for step in 0..120 {
            let ops = (0..rng.int(0, 3)).map(|_| senseless(&mut rng, &pool)).collect();
            let tau = pool.tau() + Micros(rng.int(-5_000_000, 5_000_000));
            let entry = Entry { stamp: Stamp { term: rng.pick(&[1, 1, 1, 2]), tau }, ops };
            let applied = pool.apply(1, &entry);
            assert!(applied.breached.is_empty(), "seed {seed}, step {step}: {entry:?}");
            assert_eq!(pool.check(), Ok(()), "seed {seed}, step {step}: {entry:?}");
            assert_eq!(copy.apply(1, &entry), applied);
            if rng.percent(5) {
                copy = postcard::from_bytes(&postcard::to_allocvec(&copy).unwrap()).unwrap();
            }
            let inquiry = Inquiry {
                demand: Rate(amount(&mut rng)),
                want: Tokens(amount(&mut rng)),
                ..Inquiry::default()
            };
            let _ = pool.preview(0, BUCKET, Micros(amount(&mut rng)), &inquiry);
        }
        assert!(copy == pool, "seed {seed}");
        for view in pool.buckets() {
            assert!(view.free_burst >= Tokens::ZERO || !pool.settled(), "{view:?}");
        }
    }
}

fn amount(rng: &mut Rng) -> i64 {
    match rng.int(0, 9) {
        0 => rng.pick(&[i64::MIN, i64::MAX, -1, 0, 1]),
        1 => rng.next() as i64,
        _ => rng.int(-10_000_000, 200_000_000),
    }
}

fn senseless(rng: &mut Rng, pool: &Pool) -> Op {
    let region = RegionId(rng.pick(&[0, 0, 1, 1, 2, 3, u16::MAX]));
    match rng.int(0, 21) {
        0 => Op::Join(Join { region, previous: rng.pick(&[0, 1, 2, u64::MAX]), nonce: rng.next() }),
        1 => Op::Ack(Ack { region, version: rng.pick(&[0, 1, 2, 3, 4, u64::MAX]) }),
        2 => {
            let mut p = limit(rng.pick(&[0, 1, 100, 1_000, u64::MAX]), rng.pick(&[0, 1, 100, u64::MAX]), 10);
            p.reserve = Reserve { rate: Share(rng.pick(&[0, 500_000, 1_000_000, u32::MAX])), ..p.reserve };
            p.mode =
                rng.pick(&[Mode::Strict, Mode::Split, Mode::Approximate { max_overshoot: Share(400_000) }]);
            p.weights = [("r0".into(), rng.pick(&[0, 1, u32::MAX]))].into();
            Op::SetPolicies(SetPolicies { expected: None, policies: vec![p] })
        }
        3 => Op::Found { regions: regions(3), policies: vec![] },
        4 => {
            let name = format!("r{}", rng.int(0, 3)).as_str().into();
            Op::AddRegion(AddRegion { name, previous: rng.pick(&[0, 0, 1, 2, 3, 4, 5]) })
        }
        5 => Op::RemoveRegion(RemoveRegion {
            region,
            node: rng.pick(&[1, 2, 3, 4, 5, u64::MAX]),
            presume_dead: rng.percent(50),
        }),
        _ => {
            let any = Micros(amount(rng));
            let seen = Stamp { term: rng.pick(&[1, 2]), tau: rng.pick(&[pool.tau(), pool.tau(), any]) };
            Op::Ask(Ask {
                region,
                epoch: rng.pick(&[pool.epoch(region).0, 0, 1, u64::MAX]),
                policy: rng.pick(&[0, 0, 0, 1, 2, u32::MAX]),
                bucket: rng.pick(&[BUCKET, BucketId([1; 16]), BucketId([0; 16])]),
                seq: rng.pick(&[rng.clone().next() % 1_000, 0, u64::MAX]),
                read_seq: rng.clone().next() % 1_000,
                read_granted: Tokens(amount(rng)),
                held_burst: Tokens(amount(rng)),
                held_rate: Rate(amount(rng)),
                returned: Tokens(amount(rng)),
                level: Tokens(amount(rng)),
                demand: Rate(amount(rng)),
                want: Tokens(amount(rng)),
                short: Tokens(amount(rng)),
                quantum: Tokens(amount(rng)),
                seen,
                age: rng.pick(&[Micros(0), any]),
            })
        }
    }
}

/// A leased bucket costs about 200 bytes in every region, a borrower a few hundred in its own.
#[test]
fn buckets_are_small() {
    assert!(size_of::<Record>() <= 136, "{}", size_of::<Record>());
    assert!(size_of::<Ledger>() <= 64, "{}", size_of::<Ledger>());
    assert!(size_of::<Borrower>() <= 384, "{}", size_of::<Borrower>());
    assert_eq!(Level::default().tokens, Tokens::ZERO);
}
