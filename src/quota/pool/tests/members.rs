//! Rules of the pool for regions that come and go, one by one.

use super::rules::{A, B, BUCKET, ack, apply, ask, asked, cluster, limit, set, usable};
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::policy::*;
use crate::quota::pool::*;

const C: RegionId = RegionId(2);

fn add(name: &str, previous: u64) -> Vec<Op> {
    vec![Op::AddRegion(AddRegion { name: name.into(), previous })]
}

fn remove(pool: &Pool, region: RegionId, presume_dead: bool) -> Vec<Op> {
    let node = pool.member(region).unwrap().node;
    vec![Op::RemoveRegion(RemoveRegion { region, node, presume_dead })]
}

fn free(pool: &Pool) -> Tokens {
    pool.free(0, BUCKET, pool.tau())
}

fn standing(pool: &Pool, region: RegionId) -> Standing {
    pool.member(region).unwrap().standing
}

fn changed(pool: &mut Pool, ops: Vec<Op>) -> Option<PolicyOutcome> {
    apply(pool, 1, ops).policies
}

#[test]
fn a_newcomer_gets_its_part_when_all_know_and_a_lease_has_passed() {
    // 60 in reserves: 30 each.
    let mut pool = cluster(vec![limit(100, 100, 60)]);
    assert_eq!((usable(&pool, A), free(&pool)), ((30, 30), Tokens::whole(40)));
    assert_eq!(changed(&mut pool, add("r2", 0)), Some(PolicyOutcome::Set(2)));
    let member = pool.member(C).unwrap();
    assert_eq!((&*member.name, member.node, member.standing), ("r2", 3, Standing::In));
    assert_eq!(pool.seat("r2", 3), Some(C));
    assert_eq!(pool.seat("r2", 2), None, "another node may not speak for it");
    // The others stop using theirs at once, the newcomer does not begin, and the pool counts the worst of all.
    assert_eq!([A, B, C].map(|region| usable(&pool, region)), [(20, 20), (20, 20), (0, 0)]);
    assert_eq!(free(&pool), Tokens::whole(20));
    assert_eq!(pool.unacked(2).collect::<Vec<_>>(), [A, B], "the newcomer has nothing to give up");
    apply(&mut pool, 1, vec![ack(A, 2)]);
    apply(&mut pool, 60_000, vec![]);
    assert_eq!(usable(&pool, C), (0, 0), "B does not know yet");
    apply(&mut pool, 1, vec![ack(B, 2)]);
    assert!(pool.settled());
    assert_eq!(usable(&pool, C), (20, 20));
    // It has gained room, no tokens: the others may have spent theirs just now.
    assert_eq!(pool.unseen(0, C).map(|unseen| unseen.level), Some(Tokens::ZERO));
    // Once more changes nothing.
    assert_eq!(changed(&mut pool, add("r2", 0)), Some(PolicyOutcome::Set(2)));
    assert_eq!(pool.member(C).unwrap().node, 3);
}

#[test]
fn a_newcomer_acknowledges_what_comes_after_it() {
    let mut pool = cluster(vec![limit(100, 100, 60)]);
    changed(&mut pool, add("r2", 0));
    changed(&mut pool, set(vec![limit(100, 100, 90)]));
    apply(&mut pool, 1, vec![ack(A, 3), ack(B, 3)]);
    apply(&mut pool, 60_000, vec![]);
    assert_eq!(usable(&pool, C), (20, 20), "it came; but of the raise it does not know");
    assert_eq!(usable(&pool, A), (20, 20));
    apply(&mut pool, 1, vec![ack(C, 3)]);
    assert_eq!([A, C].map(|region| usable(&pool, region)), [(30, 30); 2]);
}

#[test]
fn a_region_leaves_when_it_has_said_so_and_a_lease_has_passed() {
    let mut pool = cluster(vec![limit(100, 100, 60)]);
    let borrowed = asked(&pool, ask(B, 1));
    apply(&mut pool, 1, borrowed);
    assert!(pool.record(BUCKET, B).unwrap().offer_rate.is_positive());
    let op = remove(&pool, B, false);
    assert_eq!(changed(&mut pool, op.clone()), Some(PolicyOutcome::Set(2)));
    assert_eq!(standing(&pool, B), Standing::Leaving { version: 2 });
    assert_eq!([A, B].map(|region| usable(&pool, region)), [(30, 30), (0, 0)]);
    // It may give back, and gets nothing, however it asks.
    let held_burst = Tokens::whole(7);
    let asks = Ask { held_burst, short: Tokens::whole(5), level: Tokens::whole(-9), ..ask(B, 2) };
    let asks = asked(&pool, asks);
    assert_eq!(apply(&mut pool, 1, asks).records, [(B, BUCKET)]);
    let record = pool.record(BUCKET, B).unwrap();
    assert_eq!((record.offer_burst, record.offer_rate, record.granted), Default::default());
    assert_eq!(record.burst, held_burst, "it counts until it is given up or has run out");
    let gives_all_back = asked(&pool, ask(B, 3));
    apply(&mut pool, 1, gives_all_back);
    assert_eq!(pool.record(BUCKET, B).unwrap().burst, Tokens::ZERO);
    let preview = pool.preview(0, BUCKET, pool.tau(), &Inquiry { region: B, ..inquiry() }).unwrap();
    assert_eq!((preview.rate, preview.burst, preview.tokens), Default::default());

    apply(&mut pool, 60_000, vec![ack(A, 2)]);
    assert_eq!((usable(&pool, A), pool.settled()), ((30, 30), false), "not before B has said so");
    assert_eq!(changed(&mut pool, op), Some(PolicyOutcome::Set(2)), "once more changes nothing");
    let done = apply(&mut pool, 1, vec![ack(B, 2)]);
    assert_eq!((standing(&pool, B), done.joined), (Standing::Out, vec![B]));
    assert_eq!((usable(&pool, A), usable(&pool, B)), ((60, 60), (0, 0)));
    assert_eq!(pool.seat("r1", 2), None);
    // What it says is not heard any more, nor waited for.
    let asks = asked(&pool, ask(B, 4));
    assert!(apply(&mut pool, 1, asks).records.is_empty());
    for previous in 0..4 {
        let join = Op::Join(Join { region: B, previous, nonce: 9 });
        assert!(apply(&mut pool, 1, vec![join]).joined.is_empty());
    }
    changed(&mut pool, set(vec![limit(100, 100, 80)]));
    assert_eq!(pool.unacked(3).collect::<Vec<_>>(), [A]);
    apply(&mut pool, 60_000, vec![ack(A, 3)]);
    assert_eq!(usable(&pool, A), (80, 80));
}

fn inquiry() -> Inquiry {
    let (tokens, demand) = (Tokens::whole(9), Rate::per_second(9));
    Inquiry { demand, want: tokens, short: tokens, quantum: Tokens::whole(1), ..Inquiry::default() }
}

#[test]
fn a_region_that_is_presumed_dead_is_not_waited_for_and_its_lease_runs_out() {
    let mut pool = cluster(vec![limit(100, 100, 60)]);
    let borrowed = asked(&pool, ask(B, 1));
    apply(&mut pool, 1, borrowed);
    let lent = pool.record(BUCKET, B).unwrap().liable();
    let op = remove(&pool, B, true);
    assert_eq!(apply(&mut pool, 1, op).joined, [B]);
    assert_eq!(pool.epoch(B), (2, 0), "nothing counts any more that it says");
    let asks = asked(&pool, ask(B, 2));
    assert!(apply(&mut pool, 1, asks).records.is_empty());
    // Its reserve is the pool's at once; what it had borrowed, when it has run out.
    assert_eq!(pool.record(BUCKET, B).unwrap().liable(), lent);
    let view = pool.bucket(BUCKET).unwrap();
    assert_eq!(view.free_burst, Tokens::whole(100 - 60) - lent.1, "A may come to use all reserves");
    assert_eq!(pool.unacked(2).collect::<Vec<_>>(), [A]);
    apply(&mut pool, 9_000, vec![ack(A, 2)]);
    assert_eq!(usable(&pool, A), (30, 30), "a lease has not passed");
    apply(&mut pool, 2_000, vec![]);
    assert_eq!((usable(&pool, A), standing(&pool, B)), ((60, 60), Standing::Out));
    assert_eq!(pool.bucket(BUCKET).unwrap().free_burst, Tokens::whole(40));
}

#[test]
fn one_that_does_not_answer_can_be_presumed_dead_later() {
    let mut pool = cluster(vec![limit(100, 100, 60)]);
    let op = remove(&pool, B, false);
    changed(&mut pool, op);
    changed(&mut pool, set(vec![limit(100, 100, 80)]));
    apply(&mut pool, 60_000, vec![ack(A, 3)]);
    assert!(!pool.settled());
    assert_eq!(changed(&mut pool, add("r1", 2)), Some(PolicyOutcome::Refused), "it may still use its part");
    let op = remove(&pool, B, true);
    changed(&mut pool, op);
    assert!(pool.settled());
    assert_eq!((usable(&pool, A), standing(&pool, B)), ((80, 80), Standing::Out));
}

#[test]
fn a_name_that_comes_back_is_another_node_and_goes_on_with_its_epoch() {
    let mut pool = cluster(vec![limit(100, 100, 60)]);
    let old = asked(&pool, ask(B, 1));
    apply(&mut pool, 1, old);
    let op = remove(&pool, B, true);
    changed(&mut pool, op.clone());
    assert_eq!(changed(&mut pool, add("r1", 0)), Some(PolicyOutcome::Refused), "of another life");
    // At once, though its leaving has not settled: it is presumed dead.
    assert_eq!(changed(&mut pool, add("r1", 2)), Some(PolicyOutcome::Set(3)));
    let member = pool.member(B).unwrap();
    assert_eq!((member.id, member.node, member.standing), (B, 3, Standing::In));
    assert_eq!((pool.seat("r1", 2), pool.seat("r1", 3)), (None, Some(B)));
    // Copies that come late neither remove it again nor bring it back.
    assert_eq!(changed(&mut pool, op), Some(PolicyOutcome::Set(3)));
    assert_eq!(standing(&pool, B), Standing::In);
    // Its former life is not heard.
    let former = asked(&pool, ask(B, 2));
    assert!(apply(&mut pool, 1, former).records.is_empty());
    let join = |previous| vec![Op::Join(Join { region: B, previous, nonce: 8 })];
    assert!(apply(&mut pool, 1, join(0)).joined.is_empty());
    assert!(apply(&mut pool, 1, join(1)).joined.is_empty());
    assert_eq!(apply(&mut pool, 1, join(2)).joined, [B]);
    assert_eq!(pool.epoch(B), (3, 8));
    // And what that had borrowed is a ghost.
    let new = asked(&pool, Ask { epoch: 3, ..ask(B, 1) });
    assert_eq!(apply(&mut pool, 1, new).records, [(B, BUCKET)]);
    assert!(pool.record(BUCKET, B).unwrap().ghost.is_some());
    assert_eq!(usable(&pool, B), (0, 0));
    apply(&mut pool, 11_000, vec![ack(A, 3)]);
    assert_eq!([A, B].map(|region| usable(&pool, region)), [(30, 30); 2]);
    assert_eq!(pool.unseen(0, B).map(|unseen| unseen.level), Some(Tokens::ZERO));
}

#[test]
fn what_cannot_be_is_refused() {
    let mut pool = Pool::default();
    assert_eq!(changed(&mut pool, add("r0", 0)), Some(PolicyOutcome::Refused), "there is no cluster");
    let mut pool = cluster(vec![limit(100, 100, 60)]);
    let op = remove(&pool, B, true);
    changed(&mut pool, op);
    for presume_dead in [false, true] {
        let op = remove(&pool, A, presume_dead);
        assert_eq!(changed(&mut pool, op), Some(PolicyOutcome::Refused), "the last one");
    }
    let nobody = RemoveRegion { region: RegionId(9), node: 9, presume_dead: true };
    assert_eq!(changed(&mut pool, vec![Op::RemoveRegion(nobody)]), Some(PolicyOutcome::Refused));
    assert_eq!(changed(&mut pool, add("", 0)), Some(PolicyOutcome::Refused));
    assert_eq!(changed(&mut pool, add(&"x".repeat(256), 0)), Some(PolicyOutcome::Refused));
    for i in 1..REGIONS_MAX {
        let added = changed(&mut pool, add(&format!("x{i}"), 0));
        assert_eq!(added, Some(PolicyOutcome::Set(pool.version())));
        let acks = pool.unacked(pool.version()).map(|region| ack(region, pool.version())).collect();
        apply(&mut pool, 60_000, acks);
    }
    assert_eq!(changed(&mut pool, add("one-too-many", 0)), Some(PolicyOutcome::Refused));
}

#[test]
fn a_dead_region_that_everything_waits_for_can_still_be_removed() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    for i in 0..VERSIONS_MAX as u64 {
        changed(&mut pool, set(vec![limit(i, 100, 10)]));
    }
    let version = pool.version();
    apply(&mut pool, 60_000, vec![ack(A, version)]);
    assert_eq!(changed(&mut pool, add("r2", 0)), Some(PolicyOutcome::Refused));
    let op = remove(&pool, B, false);
    assert_eq!(changed(&mut pool, op), Some(PolicyOutcome::Refused));
    let op = remove(&pool, B, true);
    assert_eq!(changed(&mut pool, op), Some(PolicyOutcome::Set(version + 1)));
    apply(&mut pool, 60_000, vec![ack(A, version + 1)]);
    assert!(pool.settled());
}

#[test]
fn weights_count_among_those_who_are_in() {
    let weights = [("r0".into(), 1), ("r1".into(), 2), ("r2".into(), 1)].into();
    let mut pool = cluster(vec![Policy { weights, ..limit(100, 100, 60) }]);
    assert_eq!([A, B].map(|region| usable(&pool, region).1), [20, 40]);
    changed(&mut pool, add("r2", 0));
    apply(&mut pool, 10_000, vec![ack(A, 2), ack(B, 2)]);
    assert_eq!([A, B, C].map(|region| usable(&pool, region).1), [15, 30, 15]);
    let op = remove(&pool, B, false);
    changed(&mut pool, op);
    apply(&mut pool, 10_000, vec![ack(A, 3), ack(B, 3), ack(C, 3)]);
    assert_eq!([A, B, C].map(|region| usable(&pool, region).1), [30, 0, 30]);
    assert_eq!(pool.tau(), Micros::seconds(20) + Micros::millis(2));
}

/// A region that is back holds `held` of the pool when an ask of its former life arrives late. Does the pool still count it?
fn counts_what_is_held_after_a_late_ask(epoch_starts_over: bool) -> bool {
    let mut pool = cluster(vec![limit(100, 100, 0)]);
    let former = asked(&pool, ask(B, 1));
    apply(&mut pool, 1, former);
    let gives_all_up = Ask { demand: Rate::ZERO, want: Tokens::ZERO, ..ask(B, 9) };
    let late = asked(&pool, gives_all_up);
    let op = remove(&pool, B, true);
    changed(&mut pool, op);
    changed(&mut pool, add("r1", 2));
    if epoch_starts_over {
        pool.members.forget_epoch(B);
    }
    let previous = pool.epoch(B).0;
    apply(&mut pool, 1, vec![Op::Join(Join { region: B, previous, nonce: 8 })]);
    let asks = asked(&pool, Ask { epoch: pool.epoch(B).0, ..ask(B, 2) });
    assert_eq!(apply(&mut pool, 1, asks).records, [(B, BUCKET)]);
    let held = pool.record(BUCKET, B).unwrap().offer_burst;
    assert!(held.is_positive());
    apply(&mut pool, 1, late);
    pool.record(BUCKET, B).unwrap().liable().1 >= held
}

#[test]
fn an_epoch_that_started_over_would_lend_twice() {
    assert!(counts_what_is_held_after_a_late_ask(false));
    assert!(!counts_what_is_held_after_a_late_ask(true), "this test cannot fail");
}
