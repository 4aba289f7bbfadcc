//! The pool's rules of permits, one by one. (Whole histories are the simulation's.)

use super::rules::{A, B, ack, apply, cluster, set};
use super::support::*;
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::counted::lent::{kept, lease};
use crate::quota::policy::*;
use crate::quota::pool::*;

const ID: BucketId = BucketId([3; 16]);
const TTL: Micros = Micros::seconds(10);

fn permits(permits: u64, reserve: u32, weights: [u32; 2]) -> Policy {
    let share = Share::percent(reserve);
    let reserve = Reserve { rate: share, burst: share };
    let limit = Limit::Concurrent(Concurrent { permits, ttl: TTL });
    let [a, b] = weights;
    Policy {
        limit,
        weights: [("r0".into(), a), ("r1".into(), b)].into(),
        ..policy("p", 1, Unit::Second, 1, Mode::Strict, reserve)
    }
}

/// "I hold so many of the pool, and would like to have so many of it in all."
fn ask(pool: &mut Pool, region: RegionId, seq: u64, held: i64, want: i64) -> i64 {
    let ask = Ask {
        region,
        epoch: pool.epoch(region).0,
        bucket: ID,
        seq,
        held_burst: Tokens::whole(held),
        demand: if want > 0 { Rate(1) } else { Rate::ZERO },
        want: Tokens::whole(want),
        quantum: Tokens::whole(1),
        seen: Stamp { term: 0, tau: pool.tau() },
        ..Ask::default()
    };
    apply(pool, 0, vec![Op::Ask(ask)]);
    offer(pool, region)
}

fn offer(pool: &Pool, region: RegionId) -> i64 {
    pool.record(ID, region).map_or(0, |record| record.offer_burst.floor())
}

fn free(pool: &Pool) -> i64 {
    pool.books(0, ID, pool.tau()).expect("there is a pool").free.1.floor()
}

#[test]
fn what_is_not_lent_is_there_and_goes_to_who_waits() {
    let mut pool = cluster(vec![permits(10, 20, [1, 1])]);
    assert_eq!(pool.cut(0).map(|cut| cut.lease), Some(lease(TTL)));
    assert_eq!(ask(&mut pool, A, 1, 0, 7), 7);
    assert_eq!((ask(&mut pool, B, 1, 0, 3), free(&pool)), (1, 0), "one is left");
    let view = pool.permits(0, ID, pool.tau(), A).expect("they are lent");
    assert_eq!((view.missing, view.elsewhere), (Tokens::whole(2), Tokens::whole(1)), "another waits");
    // Gives back three: two are pushed to who waits.
    assert_eq!(ask(&mut pool, A, 2, 4, 4), 4);
    assert_eq!((offer(&pool, B), free(&pool)), (3, 1));
    assert_eq!(pool.record(ID, B).map(|record| (record.push, record.granted)), Some((1, Tokens::ZERO)));
    // What has run out is there again, all of it.
    apply(&mut pool, lease(TTL).0 / 1_000, vec![]);
    assert_eq!(free(&pool), 8);
    assert_eq!(pool.check(), Ok(()));
}

#[test]
fn a_new_life_takes_over_what_its_store_still_has() {
    let mut pool = cluster(vec![permits(10, 20, [1, 1])]);
    assert_eq!(ask(&mut pool, A, 1, 0, 8), 8);
    let until = pool.record(ID, A).map(|record| record.expires);
    apply(&mut pool, 1_000, vec![Op::Join(Join { region: A, previous: 1, nonce: 6 })]);
    assert_eq!((ask(&mut pool, A, 2, 5, 5), free(&pool)), (5, 0), "five of the eight are in use there");
    let record = pool.record(ID, A).expect("it has one");
    assert_eq!(record.ghost.as_ref().map(|ghost| ghost.burst), Some(Tokens::whole(3)));
    assert!(record.expires >= until.expect("it had one"), "what is held may last as long as it was told");
    assert_eq!(ask(&mut pool, A, 3, 8, 8), 8, "the rest, too, and no more");
    assert_eq!((ask(&mut pool, A, 4, 9, 9), free(&pool)), (8, 0));
    assert_eq!(pool.check(), Ok(()));
}

#[test]
fn a_lowered_limit_is_offered_and_counts_when_it_is_held() {
    let mut pool = cluster(vec![permits(10, 0, [1, 1])]);
    assert_eq!((ask(&mut pool, A, 1, 0, 6), ask(&mut pool, B, 1, 0, 4)), (6, 4));
    apply(&mut pool, 1, set(vec![permits(4, 0, [1, 1])]));
    assert_eq!(ask(&mut pool, A, 2, 6, 6), 2, "half of what there is");
    assert_eq!(free(&pool), -6, "all six may be in use");
    assert_eq!(ask(&mut pool, B, 2, 4, 4), 2);
    assert_eq!((ask(&mut pool, A, 3, 2, 2), ask(&mut pool, B, 3, 1, 2)), (2, 2));
    assert_eq!(free(&pool), 0);
}

#[test]
fn a_smaller_reserve_is_free_when_its_holders_have_been_told_nothing_more() {
    let mut pool = cluster(vec![permits(10, 100, [1, 1])]);
    apply(&mut pool, 1, set(vec![permits(10, 20, [1, 1])]));
    let version = pool.version();
    apply(&mut pool, 1, vec![ack(A, version)]);
    apply(&mut pool, 60_000, vec![ack(B, version)]);
    assert_eq!((free(&pool), pool.settled()), (0, false), "five each were told to holders");
    let told = kept(kept(TTL)).0 / 1_000;
    apply(&mut pool, told - 10, vec![]);
    assert_eq!((free(&pool), pool.settled()), (0, false));
    apply(&mut pool, 20, vec![]);
    assert_eq!((free(&pool), pool.settled()), (8, true));
    // Another policy does not wait for slices that it does not change.
    let other = policy("q", 1, Unit::Second, 1, Mode::Split, Reserve::default());
    apply(&mut pool, 1, set(vec![permits(10, 20, [1, 1]), other]));
    let version = pool.version();
    apply(&mut pool, 1, vec![ack(A, version), ack(B, version)]);
    assert!(pool.settled());
}
