//! A pool goes on in a new cluster, from a copy that may be too old.

use super::rules::{A, B, BUCKET, ack, apply, ask, asked, limit, set, usable};
use super::support::*;
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::counted::lent;
use crate::quota::policy::*;
use crate::quota::pool::*;

const C: RegionId = RegionId(2);
const NOON: Micros = Micros::seconds(1_709_208_000);

fn cluster(policies: Vec<Policy>) -> Pool {
    let mut pool = Pool::default();
    let mut ops = vec![Op::Found { regions: regions(3), policies }];
    ops.extend([A, B, C].map(|region| Op::Join(Join { region, previous: 0, nonce: 5 })));
    ops.extend([A, B, C].map(|region| Op::TimeOfDay(TimeOfDay { region, wall: NOON })));
    apply(&mut pool, 1, ops);
    pool
}

fn hourly(reserve_percent: u32, mode: Mode) -> Policy {
    let share = Share::percent(reserve_percent);
    let limit = Limit::Quota(Quota {
        quota: 90,
        per: Window::Calendar(Unit::Hour),
        algorithm: Algorithm::FixedWindow,
    });
    Policy { limit, ..policy("p", 1, Unit::Second, 1, mode, Reserve { rate: share, burst: share }) }
}

fn restored(pool: &Pool, names: &[&str], witnesses: &[&str], spent: Spent) -> Option<Pool> {
    let list = |names: &[&str]| -> Vec<RegionName> { names.iter().map(|name| (*name).into()).collect() };
    let pool = pool.clone().restored(&list(names), &list(witnesses), spent);
    assert!(pool.as_ref().is_none_or(|pool| pool.check() == Ok(())));
    pool
}

const ALL: [&str; 3] = ["r0", "r1", "r2"];

/// Everyone has said that it goes by what is in force, and older leases have run out.
fn settle(pool: &mut Pool) {
    let version = pool.version();
    let awaited: Vec<RegionId> = pool.unacked(version).collect();
    apply(pool, 61_000, awaited.into_iter().map(|region| ack(region, version)).collect());
    assert!(pool.settled());
}

fn join(pool: &mut Pool, region: RegionId) -> u64 {
    let (previous, _) = pool.epoch(region);
    apply(pool, 0, vec![Op::Join(Join { region, previous, nonce: 6 })]);
    pool.epoch(region).0
}

#[test]
fn token_buckets_begin_empty_and_reserves_wait_for_every_word() {
    let old = cluster(vec![limit(100, 100, 60)]);
    assert_eq!(old.free(0, BUCKET, old.tau()), Tokens::whole(40));
    let mut new = restored(&old, &ALL, &[], Spent::All).unwrap();
    // The old cluster may have spent all that the copy says is there.
    assert_eq!(new.free(0, BUCKET, new.tau()), Tokens::ZERO);
    assert_eq!(new.tau(), old.tau());
    assert_eq!([A, B, C].map(|region| usable(&new, region)), [(0, 0); 3]);
    assert_eq!(new.unacked(new.version()).collect::<Vec<_>>(), [A, B, C]);
    apply(&mut new, 500, vec![]);
    assert_eq!(new.free(0, BUCKET, new.tau()), Tokens::whole(20), "it fills at the pool's rate, 40/s");
    let version = new.version();
    apply(&mut new, 1, [A, B, C].map(|region| ack(region, version)).to_vec());
    assert!(!new.settled(), "a lease of the old cluster may still be out");
    settle(&mut new);
    assert_eq!([A, B, C].map(|region| usable(&new, region)), [(20, 20); 3]);
    let unseen = new.unseen(0, A).map(|unseen| unseen.level);
    assert_eq!(unseen, Some(Tokens::ZERO), "what regions' stores do not hold begins empty, too");
}

#[test]
fn what_the_old_cluster_says_is_not_heard() {
    let mut old = cluster(vec![limit(100, 100, 10)]);
    let asks = asked(&old, ask(A, 1));
    apply(&mut old, 1, asks);
    assert!(old.record(BUCKET, A).is_some_and(|record| record.live));
    let mut new = restored(&old, &ALL, &[], Spent::All).unwrap();
    let nodes: Vec<u64> = new.members().map(|member| member.node).collect();
    assert_eq!(nodes, [512, 513, 514], "ahead of all that can have come meanwhile");
    assert_eq!(new.epoch(A), (1 + (1 << 32) + 1, 0));
    // A late ask of the old life changes nothing; the slice that the copy knows of counts until it ends.
    let before = new.record(BUCKET, A).cloned();
    let late = asked(&new, ask(A, 2));
    apply(&mut new, 1, late);
    assert_eq!(new.record(BUCKET, A).cloned(), before);
    let epoch = join(&mut new, A);
    let fresh = asked(&new, Ask { epoch, ..ask(A, 1) });
    apply(&mut new, 1, fresh);
    let record = new.record(BUCKET, A).unwrap();
    assert!(record.ghost.is_some() && record.granted <= Tokens::whole(1), "{record:?}");
}

#[test]
fn the_members_are_those_of_the_new_cluster() {
    let old = cluster(vec![limit(100, 100, 60)]);
    let mut new = restored(&old, &["r1", "r9", "tie"], &["tie"], Spent::All).unwrap();
    let standing: Vec<_> = new.members().map(|m| (m.name.to_string(), m.standing, m.witness)).collect();
    assert_eq!(
        standing,
        [
            ("r0".into(), Standing::Out, false),
            ("r1".into(), Standing::In, false),
            ("r2".into(), Standing::Out, false),
            ("r9".into(), Standing::In, false),
            ("tie".into(), Standing::In, true),
        ]
    );
    let (r9, tie) = (RegionId(3), RegionId(4));
    assert_eq!(new.unacked(new.version()).collect::<Vec<_>>(), [B, r9]);
    settle(&mut new);
    assert_eq!([A, B, r9, tie].map(|region| usable(&new, region)), [(0, 0), (30, 30), (30, 30), (0, 0)]);
    assert!(restored(&old, &["tie"], &["tie"], Spent::All).is_none(), "nobody would serve");
    assert!(restored(&Pool::default(), &ALL, &[], Spent::All).is_none());
    // It may be lost again.
    let again = restored(&new, &["r1"], &[], Spent::All).unwrap();
    assert_eq!(again.members().find(|m| &*m.name == "r1").map(|m| m.node), Some(1_024));
}

#[test]
fn nothing_is_left_of_windows_that_have_begun_by_the_new_members_clocks() {
    for mode in [Mode::Strict, Mode::Split] {
        let old = cluster(vec![hourly(30, mode)]);
        let mut new = restored(&old, &ALL, &[], Spent::All).unwrap();
        settle(&mut new);
        // They say what time it is: an hour later than the copy, in a window that the old cluster may have been in, too.
        let later = NOON + Micros::seconds(3_700);
        apply(&mut new, 1, [A, B, C].map(|region| Op::TimeOfDay(TimeOfDay { region, wall: later })).to_vec());
        apply(&mut new, 1, vec![]);
        let (before, part) = new.held_back(0, A).expect("windows that have begun are held back");
        assert_eq!((part, before > later), (Part::default(), true), "{mode:?}");
        assert!(before < later + Micros::seconds(10), "and those that begin later are not");
        let lent = |new: &mut Pool, seq, start| {
            let epoch = new.epoch(A).0;
            let wants = Ask { epoch, want: Tokens::whole(50), ..ask(A, seq) };
            let seen = Stamp { term: 1, tau: new.tau() };
            let bucket = BucketId([u8::try_from(seq).unwrap(); 16]);
            let ask = Ask { seen, bucket, ..wants };
            apply(new, 1, vec![Op::AskInWindow(AskInWindow { start, ask })]);
            new.record(bucket, A).map_or(Tokens::ZERO, |record| record.granted)
        };
        join(&mut new, A);
        let hour = NOON + Micros::seconds(3_600);
        assert_eq!(lent(&mut new, 1, hour), Tokens::ZERO, "{mode:?}");
        apply(&mut new, 3_600_000, vec![]);
        let next = lent(&mut new, 2, hour + Micros::seconds(3_600));
        assert_eq!(next.is_positive(), mode == Mode::Strict, "the next window begins whole ({mode:?})");
    }
}

#[test]
fn what_is_known_to_be_spent_may_be_what_counts() {
    let mut old = cluster(vec![hourly(30, Mode::Strict)]);
    let wants = Ask { want: Tokens::whole(50), demand: Rate::per_second(50), ..ask(A, 1) };
    let seen = Stamp { term: 1, tau: old.tau() };
    apply(&mut old, 1, vec![Op::AskInWindow(AskInWindow { start: NOON, ask: Ask { seen, ..wants } })]);
    let left = old.free(0, BUCKET, old.tau());
    assert!(left.is_positive() && left < Tokens::whole(63), "{left:?}");
    let known = restored(&old, &ALL, &[], Spent::AsKnown).unwrap();
    assert_eq!(known.free(0, BUCKET, known.tau()), left);
    let strict = restored(&old, &ALL, &[], Spent::All).unwrap();
    assert!(strict.free(0, BUCKET, strict.tau()) <= Tokens::ZERO);
}

#[test]
fn what_counts_is_taken_for_used_for_a_window() {
    let log = Limit::Quota(Quota {
        quota: 30,
        per: Window::Length { seconds: 900 },
        algorithm: Algorithm::SlidingLog,
    });
    let counts = Policy { limit: log, ..hourly(0, Mode::Split) };
    let old = cluster(vec![counts]);
    let mut new = restored(&old, &ALL, &[], Spent::All).unwrap();
    settle(&mut new);
    assert_eq!(new.unseen(0, A).map(|unseen| unseen.level), Some(Tokens::ZERO));
    assert_eq!(restored(&old, &ALL, &[], Spent::AsKnown).unwrap().unseen(0, A), None);
    // A change looks again at what is held back: a window later nothing is.
    apply(&mut new, 900_000, vec![]);
    apply(&mut new, 1, set(vec![limit(1, 1, 0)]));
}

#[test]
fn permits_are_not_lent_while_holders_of_the_old_cluster_may_have_them() {
    let ttl = Micros::seconds(10);
    let permits = Limit::Concurrent(Concurrent { permits: 10, ttl });
    let old = cluster(vec![Policy { limit: permits, ..hourly(30, Mode::Strict) }]);
    assert_eq!(old.free(0, BUCKET, old.tau()), Tokens::whole(7));
    let known = restored(&old, &ALL, &[], Spent::AsKnown).unwrap();
    assert_eq!(known.free(0, BUCKET, known.tau()), Tokens::whole(7));
    let mut new = restored(&old, &["r1", "r2", "tie"], &["tie"], Spent::All).unwrap();
    let ask_for_all = |new: &mut Pool, seq| {
        let epoch = new.epoch(B).0;
        let asks = asked(new, Ask { epoch, want: Tokens::whole(9), ..ask(B, seq) });
        apply(new, 1, asks);
        new.record(BUCKET, B).map_or(0, |record| record.offer_burst.floor())
    };
    let held = new.unseen(0, B).map(|unseen| unseen.level);
    assert_eq!(held, Some(Tokens::ZERO), "nor are its own given out before they have ended");
    join(&mut new, B);
    assert_eq!(ask_for_all(&mut new, 1), 0);
    let version = new.version();
    apply(&mut new, 20_000, vec![]);
    apply(&mut new, 1, [B, C].map(|region| ack(region, version)).to_vec());
    assert_eq!(ask_for_all(&mut new, 2), 0);
    apply(&mut new, lent::kept(lent::kept(ttl)).0 / 1_000 - 10, vec![]);
    assert!(!new.settled());
    assert_eq!(ask_for_all(&mut new, 3), 0);
    apply(&mut new, 20, vec![]);
    assert_eq!((new.settled(), ask_for_all(&mut new, 4)), (true, 7));
    let parts = [B, C].map(|region| new.usable(0, region).map(|part| part.burst.floor()));
    assert_eq!(parts, [Some(2), Some(1)]);
}

#[test]
fn every_member_comes_to_the_same() {
    let old = cluster(vec![limit(100, 100, 60), Policy { name: "q".into(), ..hourly(10, Mode::Strict) }]);
    let twice = [(); 2].map(|()| restored(&old, &ALL, &[], Spent::All).unwrap());
    assert_eq!(twice[0], twice[1]);
    assert_eq!(twice[0].level(), LEVEL);
}
