//! Three regions, each with another kind of Redis: Sentinels, a Cluster and one server; two of them fail over under load.

use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::load::{self, Ask, History, Steady};
use crate::support::meter::Bound;
use crate::support::process::Process;
use crate::support::redis::{Redis, cli};
use crate::support::{eventually, free_address, hold};
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const POLICIES: &str = "
policies:
  - { name: strict, domain: api, match: [ { key: tenant } ], limit: { rate: 30/s, burst: 60 }, mode: strict, reserve: 20% }
";
const RATE: u32 = 30;
const BURST: u32 = 60;
/// Which region has which.
const SENTINELS: usize = 0;
const CLUSTER: usize = 1;
const SINGLE: usize = 2;
/// A failover, a new session and the end of the leases of the old one are over within this, also on a busy machine.
const AGAIN_WITHIN: Duration = Duration::from_secs(120);

/// A primary, a replica, and three Sentinels that watch them.
struct Watched {
    primary: Redis,
    replica: Redis,
    sentinels: Vec<(SocketAddr, Process, TempDir)>,
}

impl Watched {
    async fn start() -> Self {
        let primary = Redis::start().await;
        let port = primary.address().port().to_string();
        let follow = ["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"];
        let replica = Redis::start_as(&follow).await;
        let sentinels = (0..3).map(|_| sentinel(&port)).collect();
        let watched = Self { primary, replica, sentinels };
        eventually("the Sentinels agree, and know the replica", AGAIN_WITHIN, || async {
            for (address, ..) in &watched.sentinels {
                let quorum = cli(*address, &["SENTINEL", "CKQUORUM", "main"]).await?;
                hold(quorum.contains("3 usable"), || quorum)?;
                let replicas = cli(*address, &["SENTINEL", "REPLICAS", "main"]).await?;
                hold(replicas.contains("master-link-status\nok"), || replicas)?;
            }
            Ok(())
        })
        .await;
        watched
    }

    fn url(&self) -> String {
        let hosts: Vec<String> = self.sentinels.iter().map(|(address, ..)| address.to_string()).collect();
        format!("redis-sentinel://{}?sentinelServiceName=main", hosts.join(","))
    }
}

fn sentinel(primary: &str) -> (SocketAddr, Process, TempDir) {
    let (address, folder) = (free_address(), tempfile::tempdir().expect("a folder"));
    let file = folder.path().join("sentinel.conf");
    let lines = format!(
        "port {}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {primary} 2\n\
         sentinel down-after-milliseconds main 2000\nsentinel failover-timeout main 3000\n",
        address.port()
    );
    std::fs::write(&file, lines).expect("a file");
    let mut command = Command::new("redis-server");
    command.arg(&file).arg("--sentinel");
    let process = Process::start("sentinel", folder.path(), &mut command);
    (address, process, folder)
}

/// Three masters, and a replica of the first.
struct Shards {
    masters: Vec<Redis>,
    replica: Redis,
}

impl Shards {
    async fn start() -> Self {
        let mut nodes = Vec::new();
        for _ in 0..4 {
            let bus = free_address().port().to_string();
            let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", "3000", "--cluster-port", &bus];
            let more = ["--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0"];
            let more = [&more[..], &["--cluster-require-full-coverage", "no"]].concat();
            nodes.push(Redis::start_as(&[&args[..], &more].concat()).await);
        }
        let replica = nodes.pop().expect("four were started");
        let at: Vec<String> = nodes.iter().map(|node| node.address().to_string()).collect();
        let create = [&["--cluster", "create"][..], &at.iter().map(String::as_str).collect::<Vec<_>>()];
        let create = [&create.concat()[..], &["--cluster-yes"]].concat();
        nodes[0].cli(&create).await;
        let (new, first) = (replica.address().to_string(), nodes[0].cli(&["CLUSTER", "MYID"]).await);
        let join = ["--cluster", "add-node", &new, &at[0], "--cluster-slave", "--cluster-master-id", &first];
        eventually("the replica joins", AGAIN_WITHIN, || async {
            // It may know all by now although it could not be told in time.
            let info = replica.cli(&["INFO", "replication"]).await;
            if info.contains("master_link_status:up") {
                return Ok(());
            }
            nodes[0].try_cli(&join).await.map(drop)?;
            Err("it was told".to_owned())
        })
        .await;
        let shards = Self { masters: nodes, replica };
        eventually("all know all", AGAIN_WITHIN, || async {
            for node in shards.masters.iter().chain([&shards.replica]) {
                let info = node.cli(&["CLUSTER", "INFO"]).await;
                let whole = info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:4");
                hold(whole, || info)?;
            }
            Ok(())
        })
        .await;
        shards
    }

    fn url(&self) -> String {
        format!("redis-cluster://{}", self.masters[2].address())
    }
}

/// Waits until a region has admitted at least so many in the last five seconds.
async fn admits(history: &History, region: usize, least: usize) {
    load::admits(history, "all", region, (least.., Duration::from_secs(5)), AGAIN_WITHIN).await;
}

/// Waits until this replica is a primary.
async fn promoted(replica: &Redis) {
    eventually("the replica is promoted", AGAIN_WITHIN, || async {
        let role = replica.cli(&["ROLE"]).await;
        hold(role.starts_with("master"), || role)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_strict_limit_holds_while_sentinels_and_a_cluster_fail_over() {
    let (mut watched, mut shards) = (Watched::start().await, Shards::start().await);
    let plan = Plan {
        policies: POLICIES.to_owned(),
        rtt: Duration::from_millis(40),
        stores: [Some(watched.url()), Some(shards.url()), None],
        ..Plan::default()
    };
    let cluster = Cluster::start(plan).await;
    let history = History::default();
    // Half as much again as there is.
    let load =
        Steady::start(&Ask::new("all", "api", &[("tenant", "7")]), &cluster.apis(), &[15; 3], &history);
    for region in [SENTINELS, CLUSTER, SINGLE] {
        admits(&history, region, 30).await;
    }

    watched.primary.kill();
    admits(&history, SINGLE, 30).await;
    promoted(&watched.replica).await;
    admits(&history, SENTINELS, 30).await;

    // The master that has the bucket, if it is the first, or its neighbour: a loss on one is a loss for all of them.
    shards.masters[0].kill();
    admits(&history, SINGLE, 30).await;
    promoted(&shards.replica).await;
    for region in [CLUSTER, SENTINELS, SINGLE] {
        admits(&history, region, 30).await;
    }
    drop(load);
    for (region, least, most) in [(SENTINELS, 2, 9), (CLUSTER, 2, 9), (SINGLE, 1, 1)] {
        let log = cluster.daemons[region].log();
        let begun = log.matches("a new session with the store").count();
        assert!((least..=most).contains(&begun), "{}: {begun} sessions: {log}", REGIONS[region]);
    }
    Bound::per_second(RATE, BURST).must_hold(&history.admitted("all"));
}
