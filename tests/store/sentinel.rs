//! A primary that moves: three Sentinels, three servers, failovers.

use crate::support::*;
use fred::prelude::*;
use quorate::quota::amount::{Rate, Tokens};
use quorate::store::redis::{RedisConfig, RedisStore};
use quorate::store::{Session, Store};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A Sentinel on a free port; ended when dropped.
pub struct Sentinel {
    child: Child,
    pub port: u16,
    _dir: TempDir,
}

impl Sentinel {
    /// One that watches the primary at `port` under the name `main`, as soon as so many Sentinels agree.
    pub fn watch(port: u16, quorum: u8, more: &str) -> Self {
        let (dir, own) = (tempfile::tempdir().unwrap(), free_port());
        let config = format!(
            "port {own}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {port} {quorum}\n\
             sentinel down-after-milliseconds main 2000\nsentinel failover-timeout main 3000\n{more}\n"
        );
        let file = dir.path().join("sentinel.conf");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new("redis-server");
        command.arg(&file).arg("--sentinel").current_dir(dir.path()).stdout(Stdio::null());
        Self { child: command.spawn().expect("redis-server is needed for these tests"), port: own, _dir: dir }
    }

    /// Sends one command; `None`: it does not answer, or says no.
    async fn ask<R: FromValue>(&self, args: &[&str]) -> Option<R> {
        let server = ServerConfig::new_centralized("127.0.0.1", self.port);
        let client = Client::new(Config { server, ..Config::default() }, None, None, None);
        client.init().await.ok()?;
        let answer = try_command(&client, "SENTINEL", args).await.ok();
        let _ = client.quit().await;
        answer
    }

    async fn primary(&self) -> Option<u16> {
        let (_, port): (String, u16) = self.ask(&["GET-MASTER-ADDR-BY-NAME", "main"]).await?;
        Some(port)
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a store finds what these watch.
fn config(sentinels: &[Sentinel], login: &str) -> RedisConfig {
    let hosts: Vec<String> = sentinels.iter().map(|s| format!("127.0.0.1:{}", s.port)).collect();
    let url = format!("redis-sentinel://{login}{}?sentinelServiceName=main", hosts.join(","));
    RedisConfig { url, ..Redis::absent().config() }
}

/// What a bucket holds is what has flowed in since this session's data began, and no more.
async fn began_empty(store: &RedisStore, before: Session) -> Session {
    let session = session(store, Some(before)).await;
    assert!(!session.kept);
    let b = bucket(9, 10, 1_000_000);
    until("an answer", || async { spend(store, b, 0).await.is_ok() }).await;
    let taken = store.take(b.take(0)).await.unwrap();
    let flowed = Rate::per_second(10).during((taken.now - store.generation().start).or_zero());
    let level = taken.charges[0].level;
    assert!(level <= flowed && level < Tokens::whole(1_000), "{level:?} of {flowed:?}");
    session
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buckets_do_not_survive_a_failover() {
    let auth = ["--requirepass", "right-one", "--masterauth", "right-one", "--repl-diskless-sync-delay", "0"];
    let first = Redis::start(&auth).await;
    let port = first.port.to_string();
    let follower = [&auth[..], &["--replicaof", "127.0.0.1", &port]].concat();
    let mut servers = [first, Redis::start(&follower).await, Redis::start(&follower).await];
    let watch = |_| Sentinel::watch(servers[0].port, 2, "sentinel auth-pass main right-one");
    let sentinels: Vec<Sentinel> = (0..3).map(watch).collect();
    until("Sentinels know each other and the replicas", || async {
        for sentinel in &sentinels {
            let quorum: Option<String> = sentinel.ask(&["CKQUORUM", "main"]).await;
            let replicas: Option<Vec<Value>> = sentinel.ask(&["REPLICAS", "main"]).await;
            let usable = quorum.is_some_and(|said| said.contains("3 usable"));
            if !usable || replicas.is_none_or(|replicas| replicas.len() < 2) {
                return false;
            }
        }
        true
    })
    .await;

    // The Sentinels have no password, the servers have one.
    let (store, session) = full(&config(&sentinels, ":right-one@")).await;
    let worker = worker(&store).await;
    let b = bucket(9, 10, 1_000_000);
    assert!(spend(&worker, b, 1_000).await.unwrap().0);
    until("the replicas have it", || async {
        replicated(&servers[1]).await && replicated(&servers[2]).await
    })
    .await;

    // An operator moves the primary: what the replica holds is the same, or a moment older; nobody can say.
    until("a failover begins", || async {
        sentinels[0].ask::<String>(&["FAILOVER", "main"]).await.is_some()
    })
    .await;
    let second = began_empty(&store, session).await;
    let now = sentinels[0].primary().await.unwrap();
    assert_ne!(now, servers[0].port);
    let at = servers.iter().position(|server| server.port == now).unwrap();

    // The others fall behind, and the primary dies.
    until("the others follow it", || async {
        for other in servers.iter().filter(|server| server.port != now) {
            if !follows(other, now).await {
                return false;
            }
        }
        true
    })
    .await;
    for other in servers.iter().filter(|server| server.port != now) {
        until("it is told another password", || async {
            asked::<()>(other, "CONFIG", &["SET", "masterauth", "wrong-one"]).await.is_some()
        })
        .await;
        until("its primary is cut off", || async {
            asked::<i64>(other, "CLIENT", &["KILL", "TYPE", "master"]).await.is_some()
                && !follows(other, now).await
        })
        .await;
    }
    // As a region does that has joined again: nothing was lent of its reserves, so they refill.
    store.mark_known(second).await.unwrap();
    let late = bucket(10, 1_000, 1_000);
    until("it has tokens", || async { spend(&worker, late, 5).await.is_ok_and(|(allowed, _)| allowed) })
        .await;
    for other in servers.iter().filter(|server| server.port != now) {
        assert!(!holds(other, late).await, "it is behind");
    }
    assert!(holds(&servers[at], late).await);
    servers[at].kill();
    let third = began_empty(&store, second).await;
    assert!(settled(&worker, b, 0).await.0);
    assert_eq!(store.session().borrow().session(), Some(third));
    assert_eq!(store.health().down, None);
}

/// Does this replica follow that primary?
async fn follows(server: &Redis, primary: u16) -> bool {
    let info: Option<String> = asked(server, "INFO", &["replication"]).await;
    info.is_some_and(|info| {
        info.contains(&format!("master_port:{primary}")) && info.contains("master_link_status:up")
    })
}

/// Does this replica hold buckets?
async fn replicated(server: &Redis) -> bool {
    asked::<i64>(server, "DBSIZE", &[]).await.is_some_and(|keys| keys >= 2)
}

async fn holds(server: &Redis, b: TestBucket) -> bool {
    let id: String = b.id.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let keys: Vec<String> = command(&server.admin().await, "KEYS", &["q1:*"]).await;
    keys.iter().any(|key| key.contains(&id))
}

#[tokio::test]
async fn a_server_that_was_left_is_behind_also_if_nothing_happened_to_it() {
    let (one, other) = (Redis::start(&[]).await, Redis::start(&[]).await);
    let sentinel = Sentinel::watch(one.port, 1, "");
    until("it answers", || async { sentinel.primary().await == Some(one.port) }).await;
    let (store, first) = full(&config(std::slice::from_ref(&sentinel), "")).await;
    let worker = worker(&store).await;
    let b = bucket(1, 0, 10);
    assert_eq!(spend(&worker, b, 4).await, Ok((true, 6)));
    let mut last = first;
    for (from, to) in [(&one, &other), (&other, &one)] {
        let _: Option<String> = sentinel.ask(&["REMOVE", "main"]).await;
        let port = to.port.to_string();
        let _: Option<String> = sentinel.ask(&["MONITOR", "main", "127.0.0.1", &port, "1"]).await;
        // Its connections are cut, as Sentinel does to a primary that it demotes.
        let _: i64 =
            command(&from.admin().await, "CLIENT", &["KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
        let next = session(&store, Some(last)).await;
        assert!(!next.kept);
        assert_eq!(settled(&worker, b, 1).await, (false, 0));
        last = next;
    }
}

#[tokio::test]
async fn a_primary_that_its_sentinels_have_left_is_left() {
    let (one, other) = (Redis::start(&[]).await, Redis::start(&[]).await);
    let sentinel = Sentinel::watch(one.port, 1, "");
    until("it answers", || async { sentinel.primary().await == Some(one.port) }).await;
    let (store, first) = full(&config(std::slice::from_ref(&sentinel), "")).await;
    let _: Option<String> = sentinel.ask(&["REMOVE", "main"]).await;
    let port = other.port.to_string();
    let _: Option<String> = sentinel.ask(&["MONITOR", "main", "127.0.0.1", &port, "1"]).await;
    // Nothing tells the daemon: it looks by itself.
    assert!(!session(&store, Some(first)).await.kept);
    let keys: i64 = command(&other.admin().await, "DBSIZE", &[]).await;
    assert_eq!(keys, 1, "it is there");
}

#[tokio::test]
async fn without_sentinels_it_waits_and_says_so() {
    let redis = Redis::start(&[]).await;
    let url = format!("redis-sentinel://127.0.0.1:{}?sentinelServiceName=main", free_port());
    let store = RedisStore::connect(&RedisConfig { url, ..redis.config() }).unwrap();
    until("says so", || async { store.health().down.is_some_and(|why| why.contains("Sentinel")) }).await;
}
