//! What can befall a Redis, and what must not come of it.

use crate::support::*;
use fred::prelude::*;
use quorate::quota::amount::{Micros, Rate, Tokens};
use quorate::quota::bucket::Grant;
use quorate::store::redis::{RedisConfig, RedisConfigError, RedisStore};
use quorate::store::{AnyStore, Install, Store, StoreError};
use quorate::telemetry::Metrics;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

#[tokio::test]
async fn flushall_is_a_loss() {
    let redis = Redis::start(&[]).await;
    let (store, first) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&worker, b, 4).await, Ok((true, 6)));
    let _: () = redis.admin().await.flushall(false).await.unwrap();
    let answer = spend(&worker, b, 1).await;
    assert!(matches!(answer, Err(StoreError::Fenced | StoreError::Unavailable)), "{answer:?}");
    let second = session(&store, Some(first)).await;
    assert!(!second.kept);
    assert_eq!(settled(&worker, b, 1).await, (false, 0), "never full because missing");
    assert_eq!(store.mark_full(first).await, Err(StoreError::Fenced));
}

#[tokio::test]
async fn a_unix_socket_will_do() {
    let redis = Redis::start(&["--unixsocket", "redis.sock"]).await;
    let store = RedisStore::connect(&redis.config_by_socket("redis.sock")).unwrap();
    let first = session(&store, None).await;
    store.mark_full(first).await.unwrap();
    assert_eq!(settled(&store, bucket(1, 0, 10), 4).await, (true, 6));
}

#[tokio::test]
async fn a_crash_is_a_loss_with_and_without_a_snapshot() {
    let mut redis = Redis::start(&[]).await;
    let (store, mut last) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&worker, b, 4).await, Ok((true, 6)));
    for snapshot in [false, true] {
        if snapshot {
            store.mark_full(last).await.unwrap();
            assert_eq!(settled(&worker, bucket(2, 0, 10), 4).await, (true, 6));
            let _: () = command(&redis.admin().await, "SAVE", &[]).await;
        }
        redis.kill();
        detached(&store).await;
        assert!(store.health().down.is_some());
        assert_eq!(spend(&worker, b, 1).await, Err(StoreError::Unavailable));
        redis.run().await;
        let next = session(&store, Some(last)).await;
        assert!(!next.kept);
        assert_eq!(settled(&worker, b, 1).await, (false, 0));
        assert_eq!(settled(&worker, bucket(2, 0, 10), 1).await, (false, 0), "the snapshot is not read");
        assert_eq!(store.health().down, None);
        last = next;
    }
}

#[tokio::test]
async fn starts_without_a_redis_and_finds_it_later() {
    let mut redis = Redis::absent();
    let store = redis.store();
    let worker = store.worker();
    let why = detached(&store).await;
    assert!(!why.is_empty());
    assert_eq!(spend(&worker, bucket(1, 0, 1), 1).await, Err(StoreError::Unavailable));
    assert_eq!(store.prepare(Vec::new()).await, Err(StoreError::Unavailable));
    redis.run().await;
    let first = session(&store, None).await;
    store.mark_full(first).await.unwrap();
    assert_eq!(settled(&worker, bucket(1, 0, 1), 1).await, (true, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_redis_costs_no_more_than_the_timeout_and_nothing_late_is_done() {
    let redis = Redis::start(&[]).await;
    let (store, first) = full(&redis.config()).await;
    let metrics = Metrics::new("us-east").store;
    store.measure(metrics.clone());
    let worker = worker(&store).await;
    let b = bucket(1, 0, 1_000);
    assert_eq!(spend(&worker, b, 1).await, Ok((true, 999)));
    let opened = metrics.breaker_opened.get();
    redis.signal("STOP");
    let began = Instant::now();
    // 50 callers, one request after the other, for two seconds.
    let callers = (0..50).map(|_| {
        let worker = worker.clone();
        tokio::spawn(async move {
            let mut unknown = 0;
            while began.elapsed() < Duration::from_secs(2) {
                let sent = Instant::now();
                let answer = spend(&worker, b, 1).await;
                assert!(sent.elapsed() < TIMEOUT * 5, "{:?}", sent.elapsed());
                assert!(answer.is_err());
                unknown += u32::from(answer == Err(StoreError::Unknown));
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            unknown
        })
    });
    let mut unknown = 0;
    for caller in callers.collect::<Vec<_>>() {
        unknown += caller.await.unwrap();
    }
    assert!((1..=100).contains(&unknown), "each caller waits once, or twice if it was quick: {unknown}");
    assert!(store.health().down.is_some(), "and people are told");
    assert_eq!(metrics.breakers.get(), 1);
    assert!(metrics.breaker_opened.get() > opened);
    redis.signal("CONT");
    assert_eq!(settled(&worker, b, 0).await, (true, 999), "what was asked before is not done now");
    assert_eq!(session(&store, None).await, first, "no loss: the answers were late, the clock was right");
    until("healthy again", || async { store.health().down.is_none() && metrics.breakers.get() == 0 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_are_forgotten_all_the_time_cost_no_answer() {
    let redis = Redis::start(&[]).await;
    let (store, first) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let admin = redis.admin().await;
    let done = Arc::new(AtomicBool::new(false));
    let flushing = done.clone();
    let flushes = tokio::spawn(async move {
        let mut flushes = 0;
        while !flushing.load(Ordering::Relaxed) {
            let _: () = command(&admin, "SCRIPT", &["FLUSH"]).await;
            flushes += 1;
        }
        flushes
    });
    let b = bucket(1, 0, 500);
    let callers = (0..8).map(|_| async {
        let mut allowed = 0;
        for _ in 0..100 {
            match spend(&worker, b, 1).await {
                Ok((true, _)) => allowed += 1,
                Ok((false, _)) => {}
                // Late, on a busy machine; what was taken then is gone.
                Err(error) => assert_eq!(error, StoreError::Unknown),
            }
        }
        allowed
    });
    let allowed: i64 = futures::future::join_all(callers).await.into_iter().sum();
    done.store(true, Ordering::Relaxed);
    assert!(allowed > 400 && allowed <= 500, "{allowed}");
    assert!(flushes.await.unwrap() > 10);
    assert_eq!(session(&store, None).await, first);
}

#[tokio::test]
async fn a_redis_that_is_loading_is_waited_for() {
    let args = ["--loading-process-events-interval-bytes", "1024"];
    let mut redis = Redis::start(&args).await;
    let (store, first) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&worker, b, 1).await, Ok((true, 9)));
    let admin = redis.admin().await;
    let many = "for i = 1, 1500 do redis.call('SET', 'x' .. i, i) end";
    let _: () = command(&admin, "EVAL", &[many, "0"]).await;
    let _: () = command(&admin, "SAVE", &[]).await;
    redis.kill();
    detached(&store).await;
    redis.spawn(&["--key-load-delay", "1000"]);
    until("says that it is loading", || async {
        store.health().down.is_some_and(|why| why.to_lowercase().contains("loading"))
    })
    .await;
    assert_eq!(spend(&worker, b, 1).await, Err(StoreError::Unavailable));
    let second = session(&store, Some(first)).await;
    assert!(!second.kept);
    assert_eq!(settled(&worker, b, 1).await, (false, 0), "what it has loaded is not read");
}

#[tokio::test]
async fn forgotten_scripts_are_loaded_again() {
    let redis = Redis::start(&[]).await;
    let (store, first) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let b = bucket(1, 0, 10);
    for left in (0..10).rev() {
        let _: () = command(&redis.admin().await, "SCRIPT", &["FLUSH"]).await;
        assert_eq!(spend(&worker, b, 1).await, Ok((true, left)));
    }
    assert_eq!(session(&store, None).await, first);
}

#[tokio::test]
async fn a_restarted_daemon_keeps_levels_and_no_leases() {
    let redis = Redis::start(&[]).await;
    let (store, first) = full(&redis.config()).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&store, b, 4).await, Ok((true, 6)));
    let deadline = store.prepare(Vec::new()).await.unwrap().0 + Micros::seconds(60);
    let (granted, burst) = (Tokens::whole(20), Tokens::whole(20));
    let grant = Grant { seq: 9, push: 0, granted, burst, rate: Rate::ZERO, deadline };
    let record = Install { bucket: b.id, shape: b.shape, unseen: None, grant, permits: None };
    assert_eq!(store.install(vec![record]).await.unwrap(), [Tokens::whole(26)]);
    store.close().await;
    assert_eq!(spend(&store, b, 1).await, Err(StoreError::Unavailable));

    let store = redis.store();
    let second = session(&store, None).await;
    assert!(second.kept && second.nonce != first.nonce);
    assert_eq!(store.mark_full(second).await, Err(StoreError::Fenced));
    assert!(store.generation().full, "what was said of the data still holds");
    assert_eq!(spend(&store, b, 0).await, Ok((true, 10)), "the lease's part is gone");
    let grant = Grant { seq: 1, granted: Tokens::whole(1), ..grant };
    let record = Install { grant, ..record };
    assert_eq!(store.install(vec![record]).await.unwrap(), [Tokens::whole(11)], "its seq starts over");
}

#[tokio::test]
async fn a_second_daemon_takes_over_and_the_first_yields() {
    let redis = Redis::start(&[]).await;
    let (old, first) = full(&redis.config()).await;
    let old_worker = worker(&old).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&old_worker, b, 1).await, Ok((true, 9)));
    let new = redis.store();
    let second = session(&new, None).await;
    assert!(second.kept);
    let answer = spend(&old_worker, b, 1).await;
    assert!(matches!(answer, Err(StoreError::Fenced | StoreError::Unavailable)), "{answer:?}");
    detached(&old).await;
    // For longer than a daemon's silence means that it is gone.
    let end = Instant::now() + Duration::from_secs(6);
    while Instant::now() < end {
        assert_eq!(spend(&new, b, 0).await, Ok((true, 9)), "the second is left in peace");
        assert!(old.session().borrow().session().is_none());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    new.close().await;
    let third = session(&old, Some(first)).await;
    assert!(third.kept);
    assert_eq!(settled(&old_worker, b, 1).await, (true, 8));
}

#[tokio::test]
async fn a_clock_that_steps_is_a_loss_and_mints_nothing() {
    let redis = Redis::start_with_a_clock().await;
    let (store, mut last) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let b = bucket(1, 1, 1_000);
    assert!(spend(&worker, b, 1_000).await.unwrap().0);
    for offset in [7_200_000, 10_000, -7_200_000] {
        redis.set_clock(offset);
        let stepped = Instant::now();
        let next = loop {
            match spend(&worker, b, 100).await {
                // Refused, or under the old clock, or empty under the new.
                Ok((allowed, level)) => assert!(!allowed && level <= 60, "{level}"),
                Err(error) => {
                    assert!(matches!(error, StoreError::Unavailable | StoreError::Fenced), "{error}")
                }
            }
            if let Some(session) = store.session().borrow().session().filter(|s| *s != last) {
                break session;
            }
            assert!(stepped.elapsed() < PATIENCE);
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        assert!(!next.kept);
        last = next;
    }
    // A small one is not.
    redis.set_clock(-7_199_900);
    let until_it_was_seen = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until_it_was_seen {
        assert!(!settled(&worker, b, 100).await.0);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(session(&store, None).await, last);
}

#[tokio::test]
async fn a_demoted_primary_is_left_and_what_it_held_is_not_read_again() {
    let (redis, other) = (Redis::start(&[]).await, Redis::start(&[]).await);
    let (store, first) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&worker, b, 1).await, Ok((true, 9)));
    let admin = redis.admin().await;
    let _: () = command(&admin, "REPLICAOF", &["127.0.0.1", &other.port.to_string()]).await;
    let why = detached(&store).await;
    until("says why", || async { store.health().down.is_some_and(|why| why.contains("replica")) }).await;
    assert!(!why.is_empty());
    assert!(spend(&worker, b, 1).await.is_err());
    let _: () = command(&admin, "REPLICAOF", &["NO", "ONE"]).await;
    let second = session(&store, Some(first)).await;
    assert!(!second.kept);
    assert_eq!(settled(&worker, b, 1).await, (false, 0));
}

#[tokio::test]
async fn a_lost_connection_alone_changes_nothing() {
    let redis = Redis::start(&[]).await;
    let (store, first) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&worker, b, 1).await, Ok((true, 9)));
    let _: i64 = command(&redis.admin().await, "CLIENT", &["KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    assert_eq!(settled(&worker, b, 1).await, (true, 8));
    assert_eq!(session(&store, None).await, first);
}

#[tokio::test]
async fn every_key_expires() {
    let redis = Redis::start(&[]).await;
    let (store, _) = full(&redis.config()).await;
    for id in 0..20 {
        let b = bucket(id, i64::from(id % 3), 10);
        assert!(spend(&store, b, 4).await.unwrap().0);
    }
    let admin = redis.admin().await;
    let keys: Vec<String> = command(&admin, "KEYS", &["*"]).await;
    assert_eq!(keys.len(), 21, "{keys:?}");
    for key in keys {
        assert!(key.starts_with("q1:prod:us-east:"), "{key}");
        let left: i64 = admin.pttl(&key).await.unwrap();
        assert!(left > 0, "{key} has no TTL");
    }
}

#[tokio::test]
async fn requests_share_calls() {
    let redis = Redis::start(&[]).await;
    let (store, _) = full(&redis.config()).await;
    let worker = worker(&store).await;
    let admin = redis.admin().await;
    let _: () = command(&admin, "CONFIG", &["RESETSTAT"]).await;
    let b = bucket(1, 0, 1_000);
    let asks = (0..2_000).map(|_| spend(&worker, b, 1));
    let answers = futures::future::join_all(asks).await;
    let allowed = answers.iter().filter(|answer| matches!(answer, Ok((true, _)))).count();
    assert_eq!(allowed, 1_000, "exactly what there was");
    let stats: String = command(&admin, "INFO", &["commandstats"]).await;
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls=")).unwrap();
    let calls: u64 = calls.split(',').next().unwrap().parse().unwrap();
    assert!(calls < 100, "{calls} calls for 2000 requests");
}

#[tokio::test]
async fn workers_on_their_own_runtimes_share_buckets() {
    let redis = Redis::start(&[]).await;
    let (store, _) = full(&redis.config()).await;
    let b = bucket(1, 0, 500);
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let store = AnyStore::Redis(store.clone());
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let worker = store.worker();
                    until("connected", || async { spend(&worker, b, 0).await.is_ok() }).await;
                    let mut allowed = 0;
                    for _ in 0..300 {
                        allowed += u32::from(spend(&worker, b, 1).await.unwrap().0);
                    }
                    allowed
                })
            })
        })
        .collect();
    let all = tokio::task::spawn_blocking(|| threads.into_iter().map(|t| t.join().unwrap()).sum::<u32>());
    assert_eq!(all.await.unwrap(), 500);
}

#[tokio::test]
async fn a_full_or_evicting_redis_says_so() {
    let redis = Redis::start(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]).await;
    let (store, first) = full(&redis.config()).await;
    assert!(store.health().evicts.is_some_and(|why| why.contains("allkeys-lru")));
    let admin = redis.admin().await;
    let _: () = command(&admin, "CONFIG", &["SET", "maxmemory-policy", "noeviction"]).await;
    let _: () = command(&admin, "CONFIG", &["SET", "maxmemory", "1"]).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&store, b, 1).await, Err(StoreError::Unavailable));
    until("says so", || async { store.health().down.is_some_and(|why| why.contains("OOM")) }).await;
    let _: () = command(&admin, "CONFIG", &["SET", "maxmemory", "0"]).await;
    assert_eq!(settled(&store, b, 1).await, (true, 9));
    assert_eq!(session(&store, None).await, first);
    until("and no more", || async { store.health().down.is_none() }).await;
}

#[tokio::test]
async fn a_wrong_password_is_told_and_not_shown() {
    let redis = Redis::start(&["--requirepass", "right-one"]).await;
    let with = |password: &str| RedisConfig {
        url: format!("redis://:{password}@127.0.0.1:{}", redis.port),
        ..redis.config()
    };
    let config = with("wrong-one");
    assert!(!format!("{config:?}").contains("wrong-one"));
    let store = RedisStore::connect(&config).unwrap();
    until("says why", || async { store.health().down.is_some_and(|why| why.contains("WRONGPASS")) }).await;
    assert!(!store.health().down.unwrap().contains("wrong-one"));
    let store = RedisStore::connect(&with("right-one")).unwrap();
    session(&store, None).await;
}

#[tokio::test]
async fn a_configuration_of_no_use_is_refused() {
    let redis = Redis::absent();
    let refused = |config: RedisConfig| RedisStore::connect(&config).err().unwrap();
    let url = |url: &str| refused(RedisConfig { url: url.to_owned(), ..redis.config() });
    assert!(
        matches!(url("redis-sentinel://a:1"), RedisConfigError::Url(why) if why.contains("sentinelServiceName"))
    );
    assert!(matches!(url("redis-cluster://a:1/7"), RedisConfigError::Url(_)));
    assert!(matches!(url("http://user:secret@a"), RedisConfigError::Url(why) if !why.contains("secret")));
    let name = refused(RedisConfig { region: "a:b".to_owned(), ..redis.config() });
    assert!(name.to_string().contains("a:b"));
    let timeout = refused(RedisConfig { timeout: Duration::ZERO, ..redis.config() });
    assert_eq!(timeout, RedisConfigError::Timeout);
}
