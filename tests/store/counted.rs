//! Limits that count, in every store: part of the suite.

use crate::support::*;
use fred::interfaces::KeysInterface;
use quorate::quota::amount::{Micros, Rate, Tokens};
use quorate::quota::bucket::{Grant, Shape};
use quorate::quota::counted::lent::Slice;
use quorate::quota::counted::permits::LeaseId;
use quorate::quota::counted::{Act, Allowance, Kind, Seen};
use quorate::quota::policy::BucketId;
use quorate::store::{AnyStore, CountCharge, Install, Prepare, Store, StoreError, Take, TakeCharge, Taken};

/// A bucket that counts.
#[derive(Clone, Copy)]
struct Count {
    id: BucketId,
    kind: Kind,
    allowance: Allowance,
}

/// Bucket `id` of this kind, so much within so many milliseconds.
fn count(id: u8, kind: Kind, limit: i64, span_ms: i64) -> Count {
    let allowance = Allowance { limit, span: Micros::millis(span_ms), ..Allowance::default() };
    Count { id: BucketId([id; 16]), kind, allowance }
}

impl Count {
    fn charge(&self, cost: i64, act: Act) -> CountCharge {
        let Self { id, kind, allowance } = *self;
        CountCharge { bucket: id, kind, allowance, cost: Tokens::whole(cost), act, enforce: true }
    }

    async fn act<S: Store>(&self, store: &S, cost: i64, act: Act) -> Result<Seen, StoreError> {
        let take = Take { counts: vec![self.charge(cost, act)], ..Take::default() };
        let taken = store.take(take).await?;
        assert_eq!(taken.allowed, taken.counts[0].fits);
        Ok(taken.counts[0])
    }

    /// Counts a cost: does it fit, and what is left?
    async fn take<S: Store>(&self, store: &S, cost: i64) -> (bool, i64) {
        let seen = self.act(store, cost, Act::Count).await.unwrap();
        (seen.fits, seen.left)
    }
}

fn lease(n: u8) -> LeaseId {
    LeaseId([n; 16])
}

/// What every store does, once it is known that nothing was spent.
pub async fn suite(store: &AnyStore) {
    costs_of_every_kind(store).await;
    permits(store).await;
    permits_that_are_lent(store).await;
    mixed_requests_are_all_or_none(store).await;
    a_log_forgets_by_the_stores_clock(store).await;
    many_at_once_get_exactly_the_limit(store).await;
}

/// Before that: all of it is used.
pub async fn nothing_is_known(store: &AnyStore) {
    for (id, kind) in [(60, Kind::Counters), (61, Kind::Log), (62, Kind::Permits)] {
        let c = count(id, kind, 5, 3_600_000);
        let seen = c.act(store, 1, Act::Acquire(lease(1))).await.unwrap();
        let (wait, span) = (seen.wait.unwrap(), c.allowance.span);
        assert_eq!((seen.fits, seen.left), (false, 0), "{kind:?}");
        assert!(wait > span - Micros::seconds(60) && wait <= span, "{kind:?}: until the loss is a span old");
        assert_eq!(c.take(store, -3).await, (true, 0), "there is nothing to give back");
    }
}

async fn costs_of_every_kind(store: &AnyStore) {
    for (id, kind) in [(220, Kind::Counters), (221, Kind::Log)] {
        let c = count(id, kind, 5, 3_600_000);
        assert_eq!(c.act(store, 6, Act::Count).await.unwrap().wait, None, "never");
        assert_eq!(c.take(store, 3).await, (true, 2));
        assert_eq!(c.take(store, 0).await, (true, 2));
        let denied = c.act(store, 3, Act::Count).await.unwrap();
        assert!(!denied.fits && denied.left == 2 && denied.wait > Some(Micros::ZERO));
        assert_eq!(c.take(store, 2).await, (true, 0));
        assert_eq!(c.take(store, -1).await, (true, 1));
        assert_eq!(c.take(store, -100).await, (true, 5));
        assert_eq!(c.take(store, 5).await, (true, 0));
        // Another policy: what is counted stays counted.
        let raised = Count { allowance: Allowance { limit: 8, ..c.allowance }, ..c };
        assert_eq!(raised.take(store, 4).await, (false, 3), "a raise brings the difference");
        assert_eq!(raised.take(store, 3).await, (true, 0));
        assert_eq!(c.take(store, 1).await, (false, 0));
        assert_eq!(c.take(store, 0).await, (true, 0), "asking is free, even above the limit");
        let held = Count {
            allowance: Allowance { limit: 20, until: Micros(i64::MAX >> 12), held: 9, ..c.allowance },
            ..c
        };
        assert_eq!(held.take(store, 2).await, (false, 1), "more may be in use elsewhere");
        let (_, known) = store.known(vec![c.id, BucketId([243; 16])]).await.unwrap();
        assert_eq!(known, [true, false]);
    }
}

/// A region's own two and its slice, which ends: see `quota::counted::lent`.
async fn permits_that_are_lent(store: &AnyStore) {
    let own = count(227, Kind::Permits, 2, 60_000);
    let c = Count { allowance: Allowance { lent: Some(Slice::default()), ..own.allowance }, ..own };
    let act = async |cost, act| {
        let seen = c.act(store, cost, act).await.unwrap();
        (seen.fits, seen.left, seen.lasts)
    };
    let prepare = async |seq, hold| {
        let ask = Prepare {
            bucket: c.id,
            shape: Shape::default(),
            unseen: None,
            seq,
            hold_burst: Tokens::whole(hold),
            hold_rate: Rate::ZERO,
            permits: Some(c.allowance),
            lend_rate: Rate::ZERO,
            lend_for: Micros::ZERO,
        };
        let (now, prepared) = store.prepare(vec![ask]).await.unwrap();
        (now, prepared[0].leased, prepared[0].level.floor(), prepared[0].burst.floor())
    };
    let install = async |seq, burst, deadline| {
        let grant = Grant { seq, burst: Tokens::whole(burst), deadline, ..Grant::default() };
        let shape = Shape::default();
        let record = Install { bucket: c.id, shape, unseen: None, grant, permits: Some(c.allowance) };
        store.install(vec![record]).await.unwrap()[0].floor()
    };
    let (span, none) = (c.allowance.span, Micros::ZERO);
    assert_eq!(act(3, Act::Acquire(lease(1))).await, (false, 2, none));
    assert_eq!(act(1, Act::Acquire(lease(1))).await, (true, 1, span), "of its own");
    let (now, leased, left, held) = prepare(1, 0).await;
    assert_eq!((leased, left, held), (false, 1, 0));
    let deadline = now + Micros::seconds(40);
    assert_eq!(install(1, 3, deadline).await, 4);
    let (_, _, lasts) = act(2, Act::Acquire(lease(2))).await;
    assert!(lasts <= deadline - now && lasts > Micros::seconds(10), "one of them is lent: {lasts:?}");
    assert_eq!(act(1, Act::Acquire(lease(3))).await, (true, 1, span), "two may last longer than the slice");
    let (fits, left, lasts) = act(2, Act::Renew(lease(2))).await;
    assert!(fits && left == 1 && lasts <= deadline - now);
    assert_eq!(act(1, Act::Renew(lease(1))).await, (true, 1, span));
    // What holders have is kept, whatever was to be given up.
    let (_, leased, left, held) = prepare(2, 0).await;
    assert_eq!((leased, left, held), (true, 0, 2));
    assert_eq!(install(1, 9, deadline).await, 0, "an older record");
    assert!(!act(1, Act::Acquire(lease(4))).await.0);
    // Offered less than is in use: nothing of it is given out or renewed, and it is still said to be held.
    assert_eq!(install(2, 1, deadline).await, 0);
    let refused = c.act(store, 2, Act::Renew(lease(2))).await.unwrap();
    assert!(!refused.fits && refused.wait > Some(none));
    assert_eq!(prepare(3, 0).await.3, 2);
    assert_eq!(act(2, Act::Release(lease(2))).await.1, 1);
    let (_, _, left, held) = prepare(4, 0).await;
    assert_eq!((left, held), (0, 0), "its own are in use, and no more");
    // A slice that is about to end is no good for new ones.
    let (now, ..) = prepare(5, 0).await;
    assert_eq!(install(5, 3, now + Micros::seconds(14)).await, 3);
    assert!(!act(1, Act::Acquire(lease(5))).await.0);
    assert_eq!(install(5, 3, now - Micros(1)).await, 3, "a record that has ended");
    // Another way of sharing, where nothing is lent: what is in use counts.
    assert_eq!(own.act(store, 1, Act::Acquire(lease(6))).await.unwrap().left, 0);
    assert_eq!(act(1, Act::Release(lease(1))).await.1, 4);
}

async fn permits(store: &AnyStore) {
    let c = count(225, Kind::Permits, 3, 3_600_000);
    let act = async |cost, act| {
        let seen = c.act(store, cost, act).await.unwrap();
        (seen.fits, seen.left)
    };
    assert_eq!(act(2, Act::Acquire(lease(1))).await, (true, 1));
    assert_eq!(act(2, Act::Acquire(lease(2))).await, (false, 1));
    assert_eq!(act(1, Act::Count).await, (true, 1), "asking takes none");
    assert_eq!(act(1, Act::Acquire(lease(2))).await, (true, 0));
    assert_eq!(act(1, Act::Count).await, (false, 0));
    assert_eq!(act(2, Act::Renew(lease(1))).await, (true, 0));
    assert_eq!(act(1, Act::Renew(lease(1))).await, (false, 0), "it has two");
    assert_eq!(act(3, Act::Renew(lease(1))).await, (false, 0));
    assert_eq!(act(1, Act::Renew(lease(9))).await, (false, 0));
    let lowered = Count { allowance: Allowance { limit: 2, ..c.allowance }, ..c };
    let refused = lowered.act(store, 2, Act::Renew(lease(1))).await.unwrap();
    assert!(!refused.fits && refused.wait > Some(Micros::ZERO), "there, and not renewed");
    assert_eq!(act(2, Act::Release(lease(1))).await, (true, 2));
    assert_eq!(act(2, Act::Release(lease(1))).await, (false, 2));
    assert_eq!(act(1, Act::Release(lease(2))).await, (true, 3));

    let short = count(226, Kind::Permits, 1, 30);
    assert!(short.act(store, 1, Act::Acquire(lease(1))).await.unwrap().fits);
    until("the lease ends by itself", || async {
        short.act(store, 1, Act::Acquire(lease(2))).await.unwrap().fits
    })
    .await;
    assert!(!short.act(store, 1, Act::Renew(lease(1))).await.unwrap().fits);
}

async fn mixed_requests_are_all_or_none(store: &AnyStore) {
    let bucket = bucket(210, 0, 10);
    let (window, log) = (count(231, Kind::Counters, 5, 3_600_000), count(232, Kind::Log, 4, 3_600_000));
    let permits = count(233, Kind::Permits, 2, 3_600_000);
    let request = |cost, n| Take {
        charges: vec![bucket.charge(cost)],
        counts: vec![
            window.charge(cost, Act::Count),
            log.charge(cost, Act::Count),
            permits.charge(1, Act::Acquire(lease(n))),
        ],
    };
    let left = |taken: &Taken| {
        let counts: Vec<i64> = taken.counts.iter().map(|seen| seen.left).collect();
        (taken.allowed, taken.charges[0].level.floor(), counts)
    };
    let taken = store.take(request(3, 1)).await.unwrap();
    assert_eq!(left(&taken), (true, 7, vec![2, 1, 1]));
    let denied = store.take(request(2, 2)).await.unwrap();
    assert_eq!(left(&denied), (false, 7, vec![2, 1, 1]));
    assert_eq!(denied.counts.iter().map(|seen| seen.fits).collect::<Vec<_>>(), [true, false, true]);
    assert!(denied.charges[0].fits);
    let dry = Take { charges: vec![bucket.charge(8)], ..request(1, 2) };
    assert_eq!(left(&store.take(dry).await.unwrap()), (false, 7, vec![2, 1, 1]), "for want of tokens");
    let taken = store.take(request(1, 2)).await.unwrap();
    assert_eq!(left(&taken), (true, 6, vec![1, 0, 0]));
    // A shadow is left out alone; a bucket that comes twice is charged twice.
    let mut shadowed = request(0, 3);
    shadowed.counts[2].enforce = false;
    shadowed.charges.push(TakeCharge { cost: Tokens::whole(6), ..bucket.charge(0) });
    shadowed.counts.push(window.charge(1, Act::Count));
    let taken = store.take(shadowed).await.unwrap();
    assert_eq!((taken.allowed, taken.charges[1].level), (true, Tokens::ZERO));
    assert_eq!(
        taken.counts.iter().map(|seen| (seen.fits, seen.left)).collect::<Vec<_>>()[2..],
        [(false, 0), (true, 0)]
    );
}

async fn a_log_forgets_by_the_stores_clock(store: &AnyStore) {
    let c = count(235, Kind::Log, 2, 200);
    let first = store.take(Take { counts: vec![c.charge(2, Act::Count)], ..Take::default() }).await.unwrap();
    let mut denials = 0;
    loop {
        let take = Take { counts: vec![c.charge(1, Act::Count)], ..Take::default() };
        let taken = store.take(take).await.unwrap();
        let passed = taken.now - first.now;
        assert_eq!(taken.allowed, passed >= c.allowance.span, "{passed:?}");
        if taken.allowed {
            break;
        }
        assert_eq!(taken.counts[0].wait, Some(c.allowance.span - passed), "exactly");
        denials += 1;
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert!(denials > 0, "the first was asked again before a span had passed");
}

async fn many_at_once_get_exactly_the_limit(store: &AnyStore) {
    for (id, kind) in [(222, Kind::Counters), (223, Kind::Log), (224, Kind::Permits)] {
        let c = count(id, kind, 100, 3_600_000);
        let one = async |n: u8| {
            let act = if kind == Kind::Permits { Act::Acquire(lease(n)) } else { Act::Count };
            c.act(store, 1, act).await.unwrap().fits
        };
        let all = futures::future::join_all((0..250).map(one)).await;
        assert_eq!(all.iter().filter(|fits| **fits).count(), 100, "{kind:?}");
    }
}

/// No key stays for ever, and none goes before its time; a loss of data counts as use.
#[tokio::test]
async fn in_redis_every_key_expires_and_a_loss_counts_as_used() {
    let redis = Redis::start(&[]).await;
    let store = redis.store();
    let first = session(&store, None).await;
    store.mark_full(first).await.unwrap();
    let all = [(1, Kind::Counters), (2, Kind::Log), (3, Kind::Permits)]
        .map(|(id, kind)| count(id, kind, 9, 60_000));
    let all_take = async |cost| {
        let mut fits = Vec::new();
        for c in &all {
            let act = if c.kind == Kind::Permits { Act::Acquire(lease(cost)) } else { Act::Count };
            fits.push(c.act(&store, cost.into(), act).await.unwrap().fits);
        }
        fits
    };
    assert_eq!(all_take(4).await, [true; 3]);
    assert_eq!(all_take(3).await, [true; 3]);
    // What is left of a set after everything else has been taken out of it.
    assert!(all[1].act(&store, -6, Act::Count).await.unwrap().fits);
    assert!(all[2].act(&store, 4, Act::Release(lease(4))).await.unwrap().fits);
    let admin = redis.admin().await;
    let keys: Vec<String> = command(&admin, "KEYS", &["*"]).await;
    assert_eq!(keys.len(), 4, "{keys:?}");
    for key in keys.iter().filter(|key| !key.ends_with(":meta")) {
        let left: i64 = admin.pttl(key).await.unwrap();
        assert!((60_000 - 20_000..=125_001).contains(&left), "{key} lives for {left} ms");
    }
    assert!(all[2].act(&store, 3, Act::Release(lease(3))).await.unwrap().fits);
    assert!(all[1].act(&store, -9, Act::Count).await.unwrap().fits);
    let keys: Vec<String> = command(&admin, "KEYS", &["*"]).await;
    assert_eq!(keys.len(), 2, "what is empty has no key: {keys:?}");

    let _: () = command(&admin, "FLUSHALL", &[]).await;
    // The first that notices tells.
    let _ = all[0].act(&store, 1, Act::Count).await;
    assert!(!session(&store, Some(first)).await.kept);
    let short = count(4, Kind::Log, 9, 2_000);
    until("an answer", || async { all[0].act(&store, 0, Act::Count).await.is_ok() }).await;
    assert_eq!(all_take(1).await, [false; 3], "never full because missing");
    let lost_at = store.generation().start;
    let mut denied = 0;
    loop {
        let take = Take { counts: vec![short.charge(1, Act::Count)], ..Take::default() };
        let taken = store.take(take).await.unwrap();
        assert_eq!(
            taken.allowed,
            taken.now - lost_at >= short.allowance.span,
            "{:?} of {lost_at:?}",
            taken.now
        );
        if taken.allowed {
            break;
        }
        denied += 1;
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert!(denied > 0, "asked before the loss was a span old");
}
