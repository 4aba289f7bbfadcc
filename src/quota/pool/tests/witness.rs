//! Rules of the pool for witnesses, which vote and have no part of anything, and for levels of operations.

use super::rules::{A, B, BUCKET, ack, apply, cluster, limit, set, usable};
use super::support::regions;
use crate::quota::amount::{Micros, Tokens};
use crate::quota::pool::*;

const C: RegionId = RegionId(2);

fn found(witnesses: &[&str]) -> (Pool, Option<PolicyOutcome>) {
    let mut pool = Pool::default();
    let witnesses = witnesses.iter().map(|name| (*name).into()).collect();
    let found = FoundWith { members: regions(3), witnesses, policies: vec![limit(100, 100, 60)] };
    let applied = apply(&mut pool, 1, vec![Op::FoundWith(found)]);
    (pool, applied.policies)
}

fn add(name: &str, previous: u64) -> Vec<Op> {
    vec![Op::AddWitness(AddRegion { name: name.into(), previous })]
}

fn remove(pool: &Pool, region: RegionId) -> Vec<Op> {
    let node = pool.member(region).unwrap().node;
    vec![Op::RemoveRegion(RemoveRegion { region, node, presume_dead: false })]
}

#[test]
fn a_witness_has_no_part_and_nobody_waits_for_its_word() {
    let (mut pool, outcome) = found(&["r2"]);
    assert_eq!(outcome, Some(PolicyOutcome::Set(1)));
    let witness = pool.member(C).unwrap();
    assert!(witness.witness && witness.standing == Standing::In && witness.node == 3);
    assert_eq!([A, B, C].map(|region| usable(&pool, region)), [(30, 30), (30, 30), (0, 0)]);
    assert_eq!(pool.free(0, BUCKET, pool.tau()), Tokens::whole(40));

    apply(&mut pool, 1, set(vec![limit(200, 200, 60)]));
    assert_eq!(pool.unacked(2).collect::<Vec<_>>(), [A, B]);
    apply(&mut pool, 60_000, vec![ack(A, 2), ack(B, 2)]);
    assert!(pool.settled());
    assert_eq!([A, B, C].map(|region| usable(&pool, region)), [(60, 60), (60, 60), (0, 0)]);
}

#[test]
fn somebody_must_serve() {
    assert_eq!(found(&["r0", "r1", "r2"]).1, Some(PolicyOutcome::Refused));
    let (mut pool, _) = found(&["r1", "r2"]);
    let gone = remove(&pool, A);
    assert_eq!(apply(&mut pool, 1, gone).policies, Some(PolicyOutcome::Refused), "the last that serves");
}

#[test]
fn a_witness_comes_and_goes_and_no_limit_is_cut_anew() {
    let mut pool = cluster(vec![limit(100, 100, 60)]);
    assert_eq!(apply(&mut pool, 1, add("tie", 0)).policies, Some(PolicyOutcome::Set(1)));
    let tie = pool.region("tie").unwrap();
    assert_eq!(pool.seat("tie", 3), Some(tie));
    assert!(pool.settled());
    assert_eq!([A, B, tie].map(|region| usable(&pool, region)), [(30, 30), (30, 30), (0, 0)]);
    // Once more changes nothing; as a region it is refused as long as it is a witness, and the other way round.
    assert_eq!(apply(&mut pool, 1, add("tie", 0)).policies, Some(PolicyOutcome::Set(1)));
    let region = |name: &str, previous| vec![Op::AddRegion(AddRegion { name: name.into(), previous })];
    assert_eq!(apply(&mut pool, 1, region("tie", 3)).policies, Some(PolicyOutcome::Refused));
    assert_eq!(apply(&mut pool, 1, add("r0", 1)).policies, Some(PolicyOutcome::Refused));

    let gone = remove(&pool, tie);
    assert_eq!(apply(&mut pool, 1, gone.clone()).policies, Some(PolicyOutcome::Set(1)));
    assert_eq!((pool.member(tie).unwrap().standing, pool.seat("tie", 3)), (Standing::Out, None));
    assert_eq!(
        apply(&mut pool, 1, add("tie", 0)).policies,
        Some(PolicyOutcome::Refused),
        "a copy that is late"
    );
    assert_eq!(apply(&mut pool, 1, add("tie", 3)).policies, Some(PolicyOutcome::Set(1)));
    assert_eq!(pool.member(tie).unwrap().node, 4, "a new life");
    assert_eq!(apply(&mut pool, 1, gone).policies, Some(PolicyOutcome::Set(1)));
    assert_eq!(pool.member(tie).unwrap().standing, Standing::In, "that was its life before");

    // As a region it comes like any other.
    let gone = remove(&pool, tie);
    apply(&mut pool, 1, gone);
    assert_eq!(apply(&mut pool, 1, region("tie", 4)).policies, Some(PolicyOutcome::Set(2)));
    apply(&mut pool, 60_000, vec![ack(A, 2), ack(B, 2)]);
    assert_eq!([A, B, tie].map(|region| usable(&pool, region)), [(20, 20), (20, 20), (20, 20)]);
}

#[test]
fn the_time_of_day_counts_its_clock() {
    let (mut pool, _) = found(&["r2"]);
    let says = |region, seconds| Op::TimeOfDay(TimeOfDay { region, wall: Micros::seconds(seconds) });
    apply(&mut pool, 1, vec![says(A, 5_000)]);
    assert_eq!(pool.wall(pool.tau()), None);
    apply(&mut pool, 0, vec![says(C, 4_000)]);
    assert_eq!(pool.wall(pool.tau()), Some(Micros::seconds(4_000)));
}

#[test]
fn the_level_is_raised_once_and_older_members_read_what_is_below() {
    let mut pool = cluster(vec![limit(100, 100, 10)]);
    assert_eq!((pool.level(), pool.as_v4().is_some()), (1, true));
    let bytes = postcard::to_stdvec(&pool.as_v4()).unwrap();
    let read: Option<PoolV4> = postcard::from_bytes(&bytes).unwrap();
    assert_eq!(Pool::from(read.unwrap()), pool);
    apply(&mut pool, 1, vec![Op::Level(2)]);
    assert_eq!((pool.level(), pool.as_v4().is_some()), (2, false));
    apply(&mut pool, 1, vec![Op::Level(1)]);
    assert_eq!(pool.level(), 2);
    let bytes = postcard::to_stdvec(&pool).unwrap();
    assert_eq!(postcard::from_bytes::<Pool>(&bytes).unwrap(), pool);
}
