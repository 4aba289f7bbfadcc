//! What every store does.

use crate::counted;
use crate::support::*;
use quorate::quota::amount::{Micros, Rate, Tokens};
use quorate::quota::bucket::Grant;
use quorate::quota::bucket::Unseen;
use quorate::store::memory::MemoryStore;
use quorate::store::{AnyStore, Install, Prepare, RegionStore, Session, Store, StoreError, Take};

#[tokio::test]
async fn memory() {
    let store = AnyStore::Memory(MemoryStore::monotonic(Micros::seconds(1_700_000_000)));
    suite(&store).await;
}

#[tokio::test]
async fn redis() {
    let redis = Redis::start(&[]).await;
    let store = redis.store();
    session(&store, None).await;
    suite(&AnyStore::Redis(store)).await;
}

pub async fn suite(store: &AnyStore) {
    let session = store.session().borrow().session().unwrap();
    assert!(!session.kept && session.nonce > 0 && session.nonce < 1 << 52);
    counted::nothing_is_known(store).await;
    empty_until_it_is_said_that_nothing_was_spent(store, session).await;
    takes_all_or_nothing(store).await;
    costs_of_every_kind(store).await;
    shadows_are_left_out_alone(store).await;
    refills_with_time(store).await;
    a_policy_may_change(store).await;
    leases_come_and_go(store).await;
    what_is_lent_of_the_rate_does_not_flow(store).await;
    a_record_that_is_late_has_no_effect(store).await;
    unseen_is_as_it_is_said(store).await;
    limits_are_kept(store).await;
    what_it_holds_is_known(store).await;
    counted::suite(store).await;
}

async fn empty_until_it_is_said_that_nothing_was_spent(store: &AnyStore, session: Session) {
    let b = bucket(1, 0, 10);
    assert_eq!(spend(store, b, 1).await, Ok((false, 0)));
    let other = Session { nonce: session.nonce ^ 1, kept: false };
    assert_eq!(store.mark_full(other).await, Err(StoreError::Fenced));
    assert_eq!(spend(store, b, 1).await, Ok((false, 0)));
    assert!(!store.generation().full && !store.generation().known);
    assert_eq!(store.mark_known(other).await, Err(StoreError::Fenced));
    store.mark_known(session).await.unwrap();
    assert!(!store.generation().full && store.generation().known, "they refill, and are not full");
    assert_eq!(spend(store, b, 1).await, Ok((false, 0)));
    store.mark_full(session).await.unwrap();
    assert!(store.generation().full);
    assert_eq!(spend(store, b, 1).await, Ok((true, 9)));
    assert!(store.now() >= store.generation().start);
}

async fn what_it_holds_is_known(store: &AnyStore) {
    let (held, refused, never) = (bucket(240, 1, 10), bucket(241, 1, 10), bucket(242, 1, 10));
    let (before, known) = store.known(vec![held.id, never.id]).await.unwrap();
    assert_eq!(known, [false, false]);
    assert_eq!(spend(store, held, 5).await, Ok((true, 5)));
    assert_eq!(spend(store, refused, 11).await, Ok((false, 10)));
    assert_eq!(spend(store, never, 0).await, Ok((true, 10)), "asking stores nothing");
    let (after, known) = store.known(vec![never.id, held.id, refused.id, held.id]).await.unwrap();
    assert_eq!(known, [false, true, false, true]);
    assert_eq!(after, before + 1);
    assert_eq!(store.known(vec![]).await.unwrap(), (after, vec![]));
}

async fn takes_all_or_nothing(store: &AnyStore) {
    let (a, b) = (bucket(2, 0, 10), bucket(3, 0, 2));
    let both = vec![a.charge(3), b.charge(3)];
    assert_eq!(spend_all(store, both).await, (false, vec![true, false], vec![10, 2]));
    assert_eq!(spend_all(store, vec![a.charge(3), b.charge(2)]).await, (true, vec![true; 2], vec![7, 0]));
    let twice = vec![a.charge(4), a.charge(4)];
    assert_eq!(spend_all(store, twice).await, (false, vec![true, false], vec![7, 7]));
    let twice = vec![a.charge(4), a.charge(3)];
    assert_eq!(spend_all(store, twice).await, (true, vec![true; 2], vec![0, 0]));
    assert_eq!(spend_all(store, Vec::new()).await, (true, Vec::new(), Vec::new()));
}

async fn costs_of_every_kind(store: &AnyStore) {
    let b = bucket(4, 0, 5);
    assert_eq!(spend(store, b, 6).await, Ok((false, 5)), "above the capacity: nothing changes");
    assert_eq!(spend(store, b, 5).await, Ok((true, 0)));
    assert_eq!(spend(store, b, 0).await, Ok((true, 0)), "asking is free, even where nothing is left");
    assert_eq!(spend(store, b, -2).await, Ok((true, 2)));
    assert_eq!(spend(store, b, -1_000_000_000).await, Ok((true, 5)), "no more than it holds");
    assert_eq!(spend(store, b, i64::MAX).await, Ok((false, 5)));
    let none = bucket(5, 0, 0);
    assert_eq!(spend(store, none, 1).await, Ok((false, 0)));
}

async fn shadows_are_left_out_alone(store: &AnyStore) {
    let (real, shadow) = (bucket(6, 0, 10), bucket(7, 0, 2));
    let mut charge = shadow.charge(3);
    charge.enforce = false;
    let all = vec![charge, real.charge(3)];
    assert_eq!(spend_all(store, all).await, (true, vec![false, true], vec![2, 7]));
    charge.cost = Tokens::whole(2);
    assert_eq!(spend_all(store, vec![charge, real.charge(8)]).await, (false, vec![true, false], vec![2, 7]));
}

async fn refills_with_time(store: &AnyStore) {
    let b = bucket(8, 1_000, 50);
    let first = store.take(b.take(50)).await.unwrap();
    assert!(first.allowed);
    let mut last = first.now;
    loop {
        let taken = store.take(b.take(20)).await.unwrap();
        assert!(taken.now >= last, "time does not run backwards");
        last = taken.now;
        let flowed = b.shape.rate.during(taken.now - first.now);
        assert!(taken.charges[0].level <= flowed);
        if taken.allowed {
            assert!(flowed >= Tokens::whole(20));
            assert_eq!((taken.charges[0].rate, taken.charges[0].cap), (b.shape.rate, b.shape.cap));
            return;
        }
        tokio::task::yield_now().await;
    }
}

async fn a_policy_may_change(store: &AnyStore) {
    let (small, large) = (bucket(9, 0, 10), bucket(9, 0, 1_000));
    assert_eq!(spend(store, small, 1).await, Ok((true, 9)));
    assert_eq!(spend(store, large, 10).await, Ok((false, 9)), "a raise gains room, no tokens");
    assert_eq!(spend(store, bucket(9, 0, 4), 5).await, Ok((false, 4)), "a cut takes effect at once");
    assert_eq!(spend(store, large, 4).await, Ok((true, 0)));
}

fn prepare(b: TestBucket, burst: i64, rate: i64) -> Prepare {
    Prepare {
        bucket: b.id,
        shape: b.shape,
        unseen: b.unseen,
        seq: 0,
        hold_burst: Tokens::whole(burst),
        hold_rate: Rate::per_second(rate),
        permits: None,
        lend_rate: Rate::ZERO,
        lend_for: Micros::ZERO,
    }
}

fn install(b: TestBucket, (seq, push): (u64, u32), granted: i64, burst: i64, deadline: Micros) -> Install {
    let (granted, burst) = (Tokens::whole(granted), Tokens::whole(burst));
    let grant = Grant { seq, push, granted, burst, rate: Rate::ZERO, deadline };
    Install { bucket: b.id, shape: b.shape, unseen: b.unseen, grant, permits: None }
}

async fn leases_come_and_go(store: &AnyStore) {
    let b = bucket(10, 0, 10);
    let (now, prepared) = store.prepare(vec![prepare(b, 0, 0)]).await.unwrap();
    assert!(!prepared[0].leased && prepared[0].level == Tokens::whole(10));
    assert!(now > Micros::ZERO);

    let long = now + Micros::seconds(60);
    let level = async |record| store.install(vec![record]).await.unwrap()[0].floor();
    assert_eq!(level(install(b, (1, 0), 20, 30, long)).await, 30);
    assert_eq!(level(install(b, (1, 0), 20, 30, long)).await, 30, "twice is once");
    assert_eq!(level(install(b, (1, 1), 25, 30, long)).await, 35, "a push counts what is new");
    assert_eq!(level(install(b, (1, 0), 20, 30, long)).await, 35, "an older record is ignored");
    assert_eq!(level(install(b, (2, 0), 5, 30, now)).await, 35, "and one that has ended");
    let (_, prepared) = store.prepare(vec![prepare(b, 12, 0)]).await.unwrap();
    let p = prepared[0];
    assert_eq!((p.leased, p.level.floor(), p.returned.floor(), p.burst.floor()), (true, 22, 13, 12));
    let (_, prepared) = store.prepare(vec![prepare(b, 12, 0)]).await.unwrap();
    assert_eq!((prepared[0].returned, prepared[0].level.floor()), (Tokens::ZERO, 22));
    assert_eq!(spend(store, b, 20).await, Ok((true, 2)));

    // It ends by the store's clock, and takes what does not fit with it.
    let soon = store.prepare(vec![prepare(b, 0, 0)]).await.unwrap().0 + Micros::millis(50);
    assert_eq!(level(install(b, (3, 0), 50, 50, soon)).await, 52);
    until("the lease ends", || async { spend(store, b, 0).await == Ok((true, 10)) }).await;
    // Between shards of a cluster times go from one clock to another, towards the end.
    assert!(store.take(b.take(0)).await.unwrap().now >= soon - Micros::millis(20));
    let (_, prepared) = store.prepare(vec![prepare(b, 99, 0)]).await.unwrap();
    assert!(!prepared[0].leased);
    assert!(store.prepare(Vec::new()).await.unwrap().1.is_empty());
    assert!(store.install(Vec::new()).await.unwrap().is_empty());
}

async fn what_is_lent_of_the_rate_does_not_flow(store: &AnyStore) {
    let (b, other) = (bucket(15, 1_000, 1_000), bucket(16, 1_000, 1_000));
    assert!(spend_all(store, vec![b.charge(1_000), other.charge(1_000)]).await.0);
    let lend = |rate, seconds| Prepare {
        lend_rate: Rate::per_second(rate),
        lend_for: Micros::seconds(seconds),
        ..prepare(b, 0, 0)
    };
    let lent = async |ask| store.prepare(vec![ask]).await.unwrap().1[0].lent;
    assert_eq!(lent(prepare(b, 0, 0)).await, Rate::ZERO);
    assert_eq!(lent(lend(900, 60)).await, Rate::per_second(900));
    assert_eq!(lent(lend(100, 1)).await, Rate::per_second(900), "neither less nor sooner than was said");
    assert_eq!(lent(prepare(b, 0, 0)).await, Rate::per_second(900), "asks leave it as it is");
    let seen = async |b: TestBucket| store.take(b.take(0)).await.unwrap().charges[0];
    let before = seen(b).await;
    assert_eq!(before.rate, Rate::per_second(100));
    let others_before = seen(other).await.level;
    until("the other one has refilled by half", || async {
        seen(other).await.level >= others_before + Tokens::whole(500)
    })
    .await;
    let (now, others_now) = (seen(b).await.level, seen(other).await.level);
    assert!(now > before.level && now - before.level <= (others_now - others_before).percent(12), "a tenth");
    // What was lent comes back by itself.
    let short = bucket(17, 1_000, 1_000);
    assert!(spend(store, short, 1_000).await.unwrap().0);
    let ask = Prepare { bucket: short.id, shape: short.shape, unseen: short.unseen, ..lend(1_000, 1) };
    assert_eq!(lent(ask).await, Rate::per_second(1_000));
    assert_eq!(seen(short).await.rate, Rate::ZERO);
    until("it flows again", || async { seen(short).await.rate == short.shape.rate }).await;
}

async fn a_record_that_is_late_has_no_effect(store: &AnyStore) {
    let b = bucket(40, 0, 10);
    let ask = |seq| Prepare { seq, ..prepare(b, 99, 0) };
    let (now, _) = store.prepare(vec![ask(1)]).await.unwrap();
    let long = now + Micros::seconds(60);
    let level = async |record| store.install(vec![record]).await.unwrap()[0].floor();
    assert_eq!(spend(store, b, 10).await, Ok((true, 0)));
    store.prepare(vec![ask(2)]).await.unwrap();
    assert_eq!(level(install(b, (1, 0), 20, 30, long)).await, 0, "its successor is being asked for");
    assert_eq!(level(install(b, (1, 7), 20, 30, long)).await, 0, "nor does a later push of it count");
    assert_eq!(level(install(b, (2, 0), 5, 30, long)).await, 5);
    store.prepare(vec![ask(3)]).await.unwrap();
    assert_eq!(level(install(b, (2, 1), 9, 30, long)).await, 5);
    assert_eq!(level(install(b, (3, 0), 2, 30, long)).await, 7);
}

async fn unseen_is_as_it_is_said(store: &AnyStore) {
    let now = store.take(bucket(11, 0, 1).take(0)).await.unwrap().now;
    let mut b = bucket(12, 1, 1_000);
    b.unseen = Some(Unseen { level: Tokens::whole(7), at: now - Micros::seconds(100) });
    let (_, level) = spend(store, b, 0).await.unwrap();
    // (A moment less, where times go from one clock to another.)
    assert!((106..200).contains(&level), "{level}");
    let mut b = bucket(13, 1, 1_000);
    b.unseen = Some(Unseen { level: Tokens::whole(7), at: now + Micros::seconds(3_600) });
    assert_eq!(spend(store, b, 8).await, Ok((false, 7)));
}

async fn limits_are_kept(store: &AnyStore) {
    let b = bucket(14, 0, 1_000);
    let charges = vec![b.charge(1); 65];
    assert_eq!(store.take(Take { charges, ..Take::default() }).await.unwrap_err(), StoreError::Unavailable);
    let (allowed, _, levels) = spend_all(store, vec![b.charge(1); 64]).await;
    assert!(allowed && levels.iter().all(|level| *level == 936));
    let many: Vec<Prepare> =
        (0..600).map(|i| prepare(bucket(u8::try_from(i % 200).unwrap(), 0, 5), 0, 0)).collect();
    assert_eq!(store.prepare(many).await.unwrap().1.len(), 600);
}
