//! A Redis Cluster: three masters and a replica of the first; a failover, a slot that moves.

use crate::suite::suite;
use crate::support::*;
use fred::prelude::*;
use quorate::quota::amount::{Micros, Rate, Tokens};
use quorate::quota::bucket::Grant;
use quorate::quota::counted::lent::Slice;
use quorate::quota::counted::permits::LeaseId;
use quorate::quota::counted::{Act, Allowance, Kind};
use quorate::quota::policy::BucketId;
use quorate::store::redis::{RedisConfig, RedisStore};
use quorate::store::{AnyStore, CountCharge, Install, Prepare, Session, Store, StoreError, Take};
use std::time::Duration;
use tokio::time::Instant;

const ARGS: &[&str] = &[
    "--cluster-enabled",
    "yes",
    "--cluster-node-timeout",
    "5000",
    "--cluster-require-full-coverage",
    "no",
    "--cluster-replica-validity-factor",
    "0",
    "--repl-diskless-sync-delay",
    "0",
];

pub struct Cluster {
    /// The masters of slots 0, 5462 and 10923 and further, in this order.
    pub masters: Vec<Redis>,
    replicas: Vec<Redis>,
}

impl Cluster {
    async fn start(replicas: usize) -> Self {
        let nodes = futures::future::join_all((0..3 + replicas).map(|_| Redis::start(ARGS))).await;
        let ports: Vec<u16> = nodes.iter().map(|node| node.port).collect();
        Self::of(nodes, &ports).await
    }

    /// Nodes that talk to each other over TLS, and their ports for it.
    pub async fn start_with_tls(files: &[&str]) -> (Self, Vec<u16>) {
        let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
        let nodes = ports.iter().map(|port| async move {
            let port = port.to_string();
            let own =
                [&["--tls-cluster", "yes", "--tls-replication", "yes", "--tls-port", &port], files, ARGS];
            Redis::start(&own.concat()).await
        });
        let nodes = futures::future::join_all(nodes).await;
        (Self::of(nodes, &ports).await, ports)
    }

    /// These nodes; the `ports` are those by which they know each other.
    async fn of(nodes: Vec<Redis>, ports: &[u16]) -> Self {
        let mut masters = nodes;
        let replicas = masters.split_off(3);
        for (at, (first, last)) in [(0, 5_461), (5_462, 10_922), (10_923, 16_383)].into_iter().enumerate() {
            let (first, last, epoch) = (format!("{first}"), format!("{last}"), format!("{}", at + 1));
            let admin = masters[at].admin().await;
            let _: () = command(&admin, "CLUSTER", &["SET-CONFIG-EPOCH", &epoch]).await;
            let _: () = command(&admin, "CLUSTER", &["ADDSLOTSRANGE", &first, &last]).await;
        }
        let cluster = Self { masters, replicas };
        let first = cluster.masters[0].admin().await;
        for port in &ports[1..] {
            let _: () = command(&first, "CLUSTER", &["MEET", "127.0.0.1", &port.to_string()]).await;
        }
        until("all know all", || async {
            for node in cluster.masters.iter().chain(&cluster.replicas) {
                let nodes: String = command(&node.admin().await, "CLUSTER", &["NODES"]).await;
                let known = nodes.lines().filter(|line| line.contains("connected")).count();
                let state: String = command(&node.admin().await, "CLUSTER", &["INFO"]).await;
                if known < 3 + cluster.replicas.len() || !state.contains("cluster_state:ok") {
                    return false;
                }
            }
            true
        })
        .await;
        let id: String = command(&first, "CLUSTER", &["MYID"]).await;
        for replica in &cluster.replicas {
            let _: () = command(&replica.admin().await, "CLUSTER", &["REPLICATE", &id]).await;
            until("it follows", || async {
                let info: String = command(&replica.admin().await, "INFO", &["replication"]).await;
                info.contains("master_link_status:up")
            })
            .await;
        }
        cluster
    }

    fn config(&self) -> RedisConfig {
        // The first does not answer, and is passed over.
        let url = format!("redis-cluster://127.0.0.1:{},127.0.0.1:{}", free_port(), self.masters[2].port);
        RedisConfig { url, ..self.masters[0].config() }
    }
}

/// A bucket on a shard: the shard is the first two bytes of the name, modulo their number.
pub fn on_shard(shard: u8, cap: i64) -> TestBucket {
    let mut id = [77; 16];
    id[..2].copy_from_slice(&[shard, 0]);
    TestBucket { id: BucketId(id), ..bucket(0, 0, cap) }
}

async fn levels(store: &RedisStore) -> Vec<i64> {
    let mut levels = Vec::new();
    for shard in 0..12 {
        levels.push(settled(store, on_shard(shard, 10), 0).await.1);
    }
    levels
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_every_store_does_and_requests_over_shards() {
    let cluster = Cluster::start(0).await;
    let store = RedisStore::connect(&cluster.config()).unwrap();
    session(&store, None).await;
    suite(&AnyStore::Redis(store.clone())).await;
    for master in &cluster.masters {
        let keys: Vec<String> = command(&master.admin().await, "KEYS", &["*"]).await;
        assert_eq!(keys.iter().filter(|key| key.ends_with(":meta")).count(), 4, "{keys:?}");
    }

    // Two that fit, on two masters, and one between that does not: nothing is taken for long.
    let store = worker(&store).await;
    let [a, b, c] = [on_shard(1, 10), on_shard(5, 2), on_shard(9, 10)];
    let all = || vec![c.charge(3), b.charge(3), a.charge(3)];
    let seen = spend_all(&store, all()).await;
    assert_eq!(seen, (false, vec![true, false, true], vec![10, 2, 10]));
    assert_eq!(spend(&store, a, 0).await, Ok((true, 10)));
    assert_eq!(
        spend_all(&store, vec![c.charge(3), b.charge(2), a.charge(3)]).await,
        (true, vec![true; 3], vec![7, 0, 7])
    );

    // What gives back is not done where another denies, and is where none does.
    let mixed = vec![a.charge(-2), b.charge(1)];
    assert_eq!(spend_all(&store, mixed).await, (false, vec![true, false], vec![7, 0]));
    assert_eq!(spend(&store, a, 0).await, Ok((true, 7)));
    assert_eq!(spend_all(&store, vec![a.charge(-2), c.charge(1)]).await, (true, vec![true; 2], vec![9, 6]));

    // Permits that were acquired for a request that is denied are free again.
    let allowance = Allowance { limit: 1, span: Micros::seconds(3_600), ..Allowance::default() };
    let permit = |act| CountCharge {
        bucket: on_shard(0, 0).id,
        kind: Kind::Permits,
        allowance,
        cost: Tokens::whole(1),
        act,
        enforce: true,
    };
    let acquire = |lease, cost| Take {
        charges: vec![b.charge(cost)],
        counts: vec![permit(Act::Acquire(LeaseId([lease; 16])))],
    };
    assert!(!store.take(acquire(1, 1)).await.unwrap().allowed);
    assert!(store.take(acquire(2, 0)).await.unwrap().allowed);
    assert!(!store.take(acquire(3, 0)).await.unwrap().allowed);

    // Many at once, each over two shards, never get more than there is; and all of it, one after the other.
    let (x, y) = (on_shard(2, 100), on_shard(7, 60));
    let asks = (0..200).map(|i| {
        let charges =
            if i % 2 == 0 { vec![x.charge(1), y.charge(1)] } else { vec![y.charge(1), x.charge(1)] };
        store.take(Take { charges, ..Take::default() })
    });
    let answers = futures::future::join_all(asks).await;
    let mut allowed =
        answers.iter().filter(|answer| answer.as_ref().is_ok_and(|taken| taken.allowed)).count();
    assert!(answers.iter().all(Result::is_ok), "nobody is late: {answers:?}");
    assert!(allowed <= 60, "{allowed}");
    while spend_all(&store, vec![x.charge(1), y.charge(1)]).await.0 {
        allowed += 1;
    }
    assert_eq!(allowed, 60, "what was given back is there again");
    assert_eq!(spend(&store, x, 0).await, Ok((true, 40)));

    // Leases on every shard end by that shard's clock.
    let now = store.prepare(Vec::new()).await.unwrap().0;
    let deadline = now + Micros::seconds(60);
    let grant = Grant {
        seq: 1,
        push: 0,
        granted: Tokens::whole(5),
        burst: Tokens::whole(5),
        deadline,
        ..Grant::default()
    };
    let records = (0..12).map(|shard| {
        let b = on_shard(shard + 24, 10);
        Install { bucket: b.id, shape: b.shape, unseen: None, grant, permits: None }
    });
    assert_eq!(store.install(records.collect()).await.unwrap(), [Tokens::whole(15); 12]);
    // So do slices of permits. In one call with others: each finds its answer.
    let allowance = Allowance { limit: 2, lent: Some(Slice::default()), ..allowance };
    let of = |shard: u8| (on_shard(shard + 36, 0), (shard.is_multiple_of(2)).then_some(allowance));
    let asks = (0..12).map(of).map(|(b, permits)| Prepare {
        bucket: b.id,
        shape: b.shape,
        unseen: None,
        seq: 1,
        hold_burst: Tokens::ZERO,
        hold_rate: Rate::ZERO,
        permits,
        lend_rate: Rate::ZERO,
        lend_for: Micros::ZERO,
    });
    let two_or_none = |shard: i64| if shard % 2 == 0 { 2 } else { 0 };
    let (now, prepared) = store.prepare(asks.collect()).await.unwrap();
    let left: Vec<i64> = prepared.iter().map(|prepared| prepared.level.floor()).collect();
    assert_eq!(left, (0..12).map(two_or_none).collect::<Vec<_>>());
    let grant = Grant { deadline: now + Micros::seconds(60), ..grant };
    let records = (0..12).map(of).map(|(b, permits)| Install {
        bucket: b.id,
        shape: b.shape,
        unseen: None,
        grant,
        permits,
    });
    let left: Vec<i64> =
        store.install(records.collect()).await.unwrap().iter().map(|left| left.floor()).collect();
    assert_eq!(left, (0..12).map(|shard| 5 + two_or_none(shard)).collect::<Vec<_>>());
}

/// Waits for a new session, and for all shards to have begun anew.
async fn all_empty(store: &RedisStore, before: Session) -> Session {
    let next = session(store, Some(before)).await;
    assert!(!next.kept);
    assert_eq!(levels(store).await, [0; 12], "what one shard has lost, all have lost");
    next
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_and_a_slot_that_moves_are_losses_for_all_shards() {
    let mut cluster = Cluster::start(1).await;
    let (store, first) = full(&cluster.config()).await;
    let worker = worker(&store).await;
    assert_eq!(levels(&worker).await, [10; 12]);

    // A slot moves, with the keys in it, under load: that of shard 11, from the third master to the second.
    let slot = "15572";
    let (from, to) = (&cluster.masters[2], &cluster.masters[1]);
    let (from_admin, to_admin) = (from.admin().await, to.admin().await);
    let from_id: String = command(&from_admin, "CLUSTER", &["MYID"]).await;
    let to_id: String = command(&to_admin, "CLUSTER", &["MYID"]).await;
    let b = on_shard(11, 10);
    assert_eq!(settled(&worker, b, 4).await, (true, 6));
    let moved = async {
        let _: () = command(&to_admin, "CLUSTER", &["SETSLOT", slot, "IMPORTING", &from_id]).await;
        let _: () = command(&from_admin, "CLUSTER", &["SETSLOT", slot, "MIGRATING", &to_id]).await;
        let to_port = to.port.to_string();
        until("its keys have moved", || async {
            let keys: Vec<String> = command(&from_admin, "CLUSTER", &["GETKEYSINSLOT", slot, "10"]).await;
            for key in &keys {
                // A busy server may take the cluster to be down, for a moment.
                let to = ["127.0.0.1", &to_port, key, "0", "5000"];
                let _ = try_command::<String>(&from_admin, "MIGRATE", &to).await;
            }
            keys.is_empty()
        })
        .await;
        for admin in [&to_admin, &from_admin] {
            let _: () = command(admin, "CLUSTER", &["SETSLOT", slot, "NODE", &to_id]).await;
        }
    };
    let loaded = async {
        let mut taken = 4;
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            taken += i64::from(matches!(spend(&worker, b, 1).await, Ok((true, _))));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        taken
    };
    let (taken, ()) = tokio::join!(loaded, moved);
    assert!(taken <= 10, "never more than there was: {taken}");
    let second = all_empty(&store, first).await;
    let _ = settled(&worker, b, 0).await;

    // The first master dies; its replica takes over.
    cluster.masters[0].kill();
    let answer = settled(&worker, on_shard(6, 10), 0).await;
    assert!(answer.0, "other shards go on meanwhile");
    let dead = spend(&worker, on_shard(0, 10), 1).await;
    assert!(
        matches!(dead, Err(StoreError::Unavailable | StoreError::Unknown)) || dead == Ok((false, 0)),
        "{dead:?}"
    );
    let third = all_empty(&store, second).await;
    assert_eq!(store.health().down, None);

    // A restart of one master alone is a loss for all, too; a restarted daemon alone is none.
    store.close().await;
    let store = RedisStore::connect(&RedisConfig {
        url: format!("redis-cluster://127.0.0.1:{}", cluster.replicas[0].port),
        ..cluster.config()
    })
    .unwrap();
    let fourth = session(&store, None).await;
    assert!(fourth.kept && fourth.nonce != third.nonce);
    let _: () = cluster.masters[1].admin().await.flushall(false).await.unwrap();
    all_empty(&store, fourth).await;
}
