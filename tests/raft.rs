//! Three regions in one process, each on a runtime of its own (so that it can be killed), over real HTTP through links
//! that can be slow or cut.
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

#[path = "raft/levels.rs"]
mod levels;
#[path = "raft/members.rs"]
mod members;
#[path = "raft/peers.rs"]
mod peers;

use quorate::quota::policy::RegionName;
use quorate::quota::pool::{Applied, LEVEL, Op};
use quorate::raft::{LogLimits, PeerTls, ProposeError, Raft, RaftConfig, RaftError, RaftStatus, Role};
use quorate::wan::Link;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, timeout};

const NAMES: [&str; 3] = ["ap-south", "eu-west", "us-east"];
/// Regions that come later. (The first sorts before the founders: its node id is not its position.)
const NEWCOMERS: [&str; 4] = ["aa-new", "b-new", "c-new", "d-new"];
const RTT: Duration = Duration::from_millis(250);

struct Cluster {
    temp: TempDir,
    addrs: Vec<SocketAddr>,
    links: BTreeMap<(usize, usize), Link>,
    nodes: Vec<Option<Node>>,
    name: String,
    rtt_max: Duration,
    limits: LogLimits,
    tls: Vec<Option<PeerTls>>,
    redaction: Vec<Option<u64>>,
    witnesses: Vec<RegionName>,
    levels: Vec<u32>,
}

struct Node {
    runtime: Runtime,
    raft: Raft,
}

impl Cluster {
    /// Three regions with an address each, not yet started.
    async fn new(delay: Duration, rtt_max: Duration) -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let addrs: Vec<_> = NAMES.iter().map(|_| free_addr()).collect();
        let mut links = BTreeMap::new();
        for from in 0..NAMES.len() {
            for to in (0..NAMES.len()).filter(|&to| to != from) {
                links.insert((from, to), Link::start(addrs[to], delay).await.unwrap());
            }
        }
        Self {
            temp: tempfile::tempdir().unwrap(),
            addrs,
            links,
            nodes: (0..NAMES.len()).map(|_| None).collect(),
            name: "test".into(),
            rtt_max,
            limits: LogLimits::default(),
            tls: vec![None; NAMES.len()],
            redaction: vec![None; NAMES.len()],
            witnesses: Vec::new(),
            levels: vec![LEVEL; NAMES.len()],
        }
    }

    async fn started(delay: Duration, rtt_max: Duration) -> Self {
        let mut cluster = Self::new(delay, rtt_max).await;
        cluster.start_all().await;
        cluster.leader().await;
        cluster
    }

    async fn start_all(&mut self) {
        for i in 0..NAMES.len() {
            self.start(i).await.unwrap();
        }
    }

    fn name(i: usize) -> &'static str {
        NAMES.get(i).or_else(|| NEWCOMERS.get(i - NAMES.len())).unwrap()
    }

    /// An address for the next newcomer; it reaches the others without links.
    fn room_for_newcomer(&mut self) -> usize {
        self.addrs.push(free_addr());
        self.nodes.push(None);
        self.tls.push(None);
        self.redaction.push(None);
        self.levels.push(LEVEL);
        self.nodes.len() - 1
    }

    fn dir(&self, i: usize) -> PathBuf {
        self.temp.path().join(Self::name(i))
    }

    fn config(&self, i: usize) -> RaftConfig {
        let scheme = if self.tls[i].is_some() { "https" } else { "http" };
        let addr = |to| self.links.get(&(i, to)).map_or(self.addrs[to], Link::addr);
        let host = |addr: SocketAddr| format!("{scheme}://localhost:{}", addr.port());
        let newcomer = (i >= NAMES.len()).then_some(i);
        let known = (0..NAMES.len()).chain(newcomer);
        RaftConfig {
            region: Self::name(i).into(),
            cluster: self.name.clone(),
            regions: known.map(|to| (Self::name(to).into(), host(addr(to)))).collect(),
            data_dir: self.dir(i),
            seat: None,
            tls: self.tls[i].clone(),
            rtt_max: self.rtt_max,
            redaction: self.redaction[i],
            witnesses: self.witnesses.clone(),
            level: self.levels[i],
        }
    }

    async fn start(&mut self, i: usize) -> Result<(), RaftError> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (config, limits, addr) = (self.config(i), self.limits, self.addrs[i]);
        let started = runtime.spawn(async move {
            let listener = bind(addr).await;
            let raft = Raft::start_with(config, vec![], limits).await?;
            let serving = raft.clone();
            tokio::spawn(async move { serving.serve_peers(listener).await });
            Ok::<_, RaftError>(raft)
        });
        match started.await.unwrap() {
            Ok(raft) => {
                self.nodes[i] = Some(Node { runtime, raft });
                Ok(())
            }
            Err(fault) => {
                runtime.shutdown_background();
                Err(fault)
            }
        }
    }

    /// As `kill -9` does: nothing is finished, nothing is said.
    async fn kill(&mut self, i: usize) {
        let Node { runtime, raft } = self.nodes[i].take().unwrap();
        tokio::task::spawn_blocking(move || runtime.shutdown_timeout(Duration::from_secs(5))).await.unwrap();
        drop(raft);
    }

    fn raft(&self, i: usize) -> &Raft {
        &self.nodes[i].as_ref().unwrap().raft
    }

    fn status(&self, i: usize) -> RaftStatus {
        self.raft(i).status()
    }

    fn alive(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.nodes.len()).filter(|&i| self.nodes[i].is_some())
    }

    async fn propose(&self, i: usize, ops: Vec<Op>, within: Duration) -> Result<Applied, ProposeError> {
        let Node { runtime, raft } = self.nodes[i].as_ref().unwrap();
        let raft = raft.clone();
        runtime.spawn(async move { raft.propose(ops, Instant::now() + within).await }).await.unwrap()
    }

    /// The region that leads a founded cluster.
    async fn leader(&self) -> usize {
        until("a leader of a founded cluster", || {
            self.alive().find(|&i| {
                self.status(i).role == Role::Leader && !self.raft(i).pool().read().regions().is_empty()
            })
        })
        .await
    }

    /// Everyone has applied what the leader has.
    async fn settled(&self) {
        let leader = self.leader().await;
        let applied = self.status(leader).applied;
        until("all to apply it", || self.alive().all(|i| self.status(i).applied >= applied).then_some(()))
            .await;
    }

    fn isolate(&self, i: usize) {
        self.links.iter().filter(|((a, b), _)| *a == i || *b == i).for_each(|(_, link)| link.cut());
    }

    fn heal(&self) {
        self.links.values().for_each(Link::heal);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in self.nodes.drain(..).flatten() {
            node.runtime.shutdown_background();
        }
    }
}

/// An address that stays this test's also while its region is down: the kernel hands out ports from 32768 on.
fn free_addr() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = 10_000 + u16::try_from(std::process::id() % 200).unwrap() * 100;
    loop {
        let addr = SocketAddr::from(([127, 0, 0, 1], base + NEXT.fetch_add(1, Ordering::Relaxed)));
        if std::net::TcpListener::bind(addr).is_ok() {
            return addr;
        }
    }
}

async fn bind(addr: SocketAddr) -> TcpListener {
    let listener = until("a free port", || std::net::TcpListener::bind(addr).ok()).await;
    listener.set_nonblocking(true).unwrap();
    TcpListener::from_std(listener).unwrap()
}

/// Polls until there is an answer; fails after a time that is far beyond any that is promised.
async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let waiting = async {
        loop {
            if let Some(found) = look() {
                return found;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(30), waiting).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

const LOCAL: Duration = Duration::ZERO;
const LONG: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_region_proposes_and_sees() {
    let cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    let regions: Vec<RegionName> = NAMES.map(Into::into).to_vec();
    let mut feed = cluster.raft(0).changes();
    for i in 0..NAMES.len() {
        cluster.propose(i, vec![], LONG).await.unwrap();
    }
    cluster.settled().await;
    let tau = cluster.raft(0).pool().read().tau();
    for i in 0..NAMES.len() {
        assert_eq!(cluster.raft(i).pool().read().regions(), regions);
        assert_eq!(cluster.raft(i).pool().read().tau(), tau, "the same everywhere");
        assert_eq!(cluster.raft(i).applied_at().stamp.tau, tau);
        let status = cluster.status(i);
        assert_eq!(status.leader, cluster.status(0).leader);
        until("pings", || {
            let peers = cluster.status(i).peers;
            (peers.len() == 2 && peers.iter().all(|p| p.reachable && p.voter && p.rtt.is_some()))
                .then_some(())
        })
        .await;
    }
    // An entry that changes nothing wakes nobody.
    assert!(timeout(Duration::from_millis(50), feed.next()).await.is_err());
    let big = Op::Found { regions: vec!["x".repeat(2_000_000).as_str().into()], policies: vec![] };
    assert_eq!(cluster.propose(1, vec![big], LONG).await, Err(ProposeError::TooLarge));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_leader_is_replaced_in_time() {
    let mut cluster = Cluster::started(RTT / 2, RTT).await;
    let mut worst = Duration::ZERO;
    for round in 0..3 {
        cluster.settled().await;
        let leader = cluster.leader().await;
        let other = (leader + 1) % NAMES.len();
        cluster.propose(other, vec![], LONG).await.unwrap();
        let term = cluster.status(leader).term;
        let killed = Instant::now();
        cluster.kill(leader).await;
        let served = loop {
            if cluster.propose(other, vec![], LONG).await.is_ok() {
                break killed.elapsed();
            }
        };
        println!("round {round}: a new leader served {served:?} after the old one was killed (RTT {RTT:?})");
        assert!(cluster.status(other).term > term || cluster.leader().await != leader);
        worst = worst.max(served);
        cluster.start(leader).await.unwrap();
    }
    assert!(worst < Duration::from_secs(5), "{worst:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_cluster_comes_back_with_everything() {
    let mut cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    for i in 0..20 {
        cluster.propose(i % NAMES.len(), vec![], LONG).await.unwrap();
    }
    let leader = cluster.leader().await;
    let (tau, applied, term) = {
        let status = cluster.status(leader);
        (cluster.raft(leader).pool().read().tau(), status.applied, status.term)
    };
    for i in 0..NAMES.len() {
        cluster.kill(i).await;
    }
    cluster.start_all().await;
    cluster.leader().await;
    for i in 0..NAMES.len() {
        until("what was acknowledged", || (cluster.status(i).applied > applied).then_some(())).await;
        assert!(cluster.raft(i).pool().read().tau() >= tau);
        assert!(cluster.status(i).term > term, "leadership is never presumed after a restart");
    }
    cluster.propose(1, vec![], LONG).await.unwrap();
    cluster.settled().await;
    assert!(cluster.raft(1).pool().read().tau() > tau, "the Raft clock goes on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_far_behind_gets_a_snapshot() {
    let mut cluster = Cluster::new(LOCAL, Duration::from_millis(80)).await;
    cluster.limits = LogLimits { snapshot_entries: 50, entries_kept: 5 };
    cluster.start_all().await;
    let leader = cluster.leader().await;
    let late = (leader + 1) % NAMES.len();
    cluster.kill(late).await;
    for _ in 0..150 {
        cluster.propose(leader, vec![], LONG).await.unwrap();
    }
    until("a snapshot", || cluster.status(leader).snapshot.filter(|&index| index > 100)).await;
    cluster.start(late).await.unwrap();
    let mut feed = cluster.raft(late).changes();
    let told = async { while !feed.next().await.everything {} };
    timeout(LONG, told).await.expect("its readers are told to look at all");
    cluster.settled().await;
    assert!(cluster.status(late).snapshot.is_some_and(|index| index > 100));
    let tau = cluster.raft(leader).pool().read().tau();
    assert_eq!(cluster.raft(late).pool().read().tau(), tau);
    // And it is there after a restart.
    cluster.kill(late).await;
    cluster.start(late).await.unwrap();
    assert!(cluster.raft(late).pool().read().tau() > Default::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_line_costs_no_elections() {
    let cluster = Cluster::started(RTT / 2, RTT).await;
    cluster.links.values().for_each(|link| link.set_jitter(RTT / 10));
    let leader = cluster.leader().await;
    let term = cluster.status(leader).term;
    let mut latencies = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        let sent = Instant::now();
        let outcomes =
            futures::future::join_all((0..30).map(|i| cluster.propose(i % NAMES.len(), vec![], LONG))).await;
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        latencies.push(sent.elapsed());
    }
    latencies.sort_unstable();
    println!(
        "RTT {RTT:?} with jitter: {} rounds of 30 proposals, slowest of a round p50 {:?} max {:?}",
        latencies.len(),
        latencies[latencies.len() / 2],
        latencies[latencies.len() - 1]
    );
    for i in 0..NAMES.len() {
        assert_eq!(cluster.status(i).term, term);
        assert_eq!(cluster.status(i).leader.as_deref(), Some(NAMES[leader]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_that_was_cut_off_does_not_disturb() {
    let cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    let leader = cluster.leader().await;
    let follower = (leader + 1) % NAMES.len();
    let term = cluster.status(leader).term;
    cluster.isolate(follower);
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(6) {
        cluster.propose(leader, vec![], LONG).await.unwrap();
        sleep(Duration::from_millis(50)).await;
    }
    assert!(!cluster.status(leader).peers.iter().all(|peer| peer.reachable));
    cluster.heal();
    cluster.settled().await;
    cluster.propose(follower, vec![], LONG).await.unwrap();
    for i in 0..NAMES.len() {
        assert_eq!(cluster.status(i).term, term, "before-votes were refused and no term was used up");
    }
    assert_eq!(cluster.leader().await, leader);
}
/// Questions that are no business of Raft's: to whom they are, from peers only, bounded, and none without an answerer.
#[tokio::test(flavor = "multi_thread")]
async fn a_region_asks_another_what_it_has_to_say() {
    let cluster = Cluster::started(RTT / 10, RTT).await;
    let ask = async |from: usize, to: &'static str, body: Vec<u8>| {
        let Node { runtime, raft } = cluster.nodes[from].as_ref().unwrap();
        let raft = raft.clone();
        runtime.spawn(async move { raft.question(to, body).await }).await.unwrap()
    };
    assert_eq!(ask(0, NAMES[1], b"early".to_vec()).await, None, "nobody answers there yet");
    for (i, name) in NAMES.iter().enumerate() {
        cluster.raft(i).answer_with(Box::new(move |body| {
            Box::pin(async move { (body != b"?").then(|| [name.as_bytes(), b": ", &body].concat()) })
        }));
    }
    assert_eq!(ask(0, NAMES[1], b"you".to_vec()).await, Some(b"eu-west: you".to_vec()));
    assert_eq!(ask(1, NAMES[2], b"you".to_vec()).await, Some(b"us-east: you".to_vec()));
    assert_eq!(ask(0, NAMES[1], b"?".to_vec()).await, None, "it has no answer");
    assert_eq!(ask(0, "nowhere", b"you".to_vec()).await, None);
    assert_eq!(ask(0, NAMES[1], vec![7; 100_000]).await, None, "too large a question");
    cluster.isolate(1);
    assert_eq!(ask(0, NAMES[1], b"you".to_vec()).await, None, "it is cut off");
    assert_eq!(ask(0, NAMES[2], b"you".to_vec()).await, Some(b"us-east: you".to_vec()));
    cluster.heal();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proposal_in_flight_at_a_cut_is_unknown() {
    let cluster = Cluster::started(Duration::from_millis(40), Duration::from_millis(80)).await;
    let leader = cluster.leader().await;
    let follower = (leader + 1) % NAMES.len();
    cluster.propose(follower, vec![], LONG).await.unwrap();
    let (remote, local) = tokio::join!(cluster.propose(follower, vec![], Duration::from_secs(2)), async {
        // Both are under way when the leader is cut off.
        let local = cluster.propose(leader, vec![], Duration::from_secs(2));
        let cut = async {
            sleep(Duration::from_millis(20)).await;
            cluster.isolate(leader);
        };
        tokio::join!(local, cut).0
    });
    assert_eq!(remote, Err(ProposeError::Unknown));
    assert_eq!(local, Err(ProposeError::Unknown));
    // The cut-off leader stops taking proposals: those that it refuses have not happened.
    until("the lease to end", || {
        cluster
            .status(leader)
            .since_quorum_ack
            .is_none_or(|since| since > Duration::from_secs(1))
            .then_some(())
    })
    .await;
    let refused = cluster.propose(leader, vec![], Duration::from_millis(300)).await;
    assert_eq!(refused, Err(ProposeError::NotSent { retry: true }));
    // The others go on, and it joins them again.
    until("another leader", || cluster.status(follower).leader.filter(|name| &**name != NAMES[leader])).await;
    cluster.propose(follower, vec![], LONG).await.unwrap();
    cluster.heal();
    until("the old leader to follow", || (cluster.status(leader).role == Role::Follower).then_some(())).await;
    // Its connections may break yet, from having been cut.
    while let Err(fault) = cluster.propose(leader, vec![], LONG).await {
        assert_eq!(fault, ProposeError::Unknown);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proposer_does_not_wait_for_a_leader_that_is_gone() {
    let cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    let leader = cluster.leader().await;
    let follower = (leader + 1) % NAMES.len();
    cluster.propose(follower, vec![], LONG).await.unwrap();
    cluster.isolate(leader);
    let asked = Instant::now();
    assert_eq!(cluster.propose(follower, vec![], LONG).await, Err(ProposeError::Unknown));
    assert!(asked.elapsed() < LONG / 2, "{:?}", asked.elapsed());
    cluster.propose(follower, vec![], LONG).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_raft_clock_goes_on_when_nobody_asks() {
    let cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    cluster.settled().await;
    let before = cluster.raft(0).pool().read().tau();
    until("an entry of its own accord", || (cluster.raft(0).pool().read().tau() > before).then_some(()))
        .await;
    let passed = cluster.raft(0).pool().read().tau() - before;
    assert!(passed.to_duration() > Duration::from_secs(5), "{passed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nonsense_from_a_peer_is_survived() {
    let cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    let marker = std::fs::read(cluster.dir(1).join("quorate.json")).unwrap();
    let instance =
        serde_json::from_slice::<serde_json::Value>(&marker).unwrap()["instance"].as_u64().unwrap();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().http2_prior_knowledge().no_proxy().build().unwrap();
    let post = |path: &str, body: Vec<u8>| {
        client
            .post(format!("http://{}/peer/v1/{path}", cluster.addrs[0]))
            .header("x-quorate-protocol", "1")
            .header("x-quorate-cluster", "test")
            .header("x-quorate-region", NAMES[1])
            .header("x-quorate-instance", instance)
            .header("x-quorate-to", NAMES[0])
            .body(body)
    };
    let paths =
        ["hello", "vote", "pre-vote", "append", "append-stream", "snapshot", "transfer-leader", "propose"];
    for path in paths {
        for body in
            [vec![], vec![9; 100], vec![1; 100], vec![1, 255, 255, 255, 255, 255], vec![255; 3_000_000]]
        {
            let reply = timeout(LONG, post(path, body.clone()).send()).await.unwrap();
            let Ok(reply) = reply else { continue }; // It may close the stream before it has read all.
            let status = reply.status();
            let fine = status.is_client_error()
                || path == "append-stream"
                || path == "hello" && body[..] == [1; 100];
            assert!(fine, "{path} {} bytes: {status}", body.len());
        }
    }
    for (header, value) in
        [("x-quorate-protocol", "2"), ("x-quorate-to", "mars"), ("x-quorate-region", "mars")]
    {
        let mut request = post("hello", vec![1, 0]).build().unwrap();
        request.headers_mut().insert(header, value.parse().unwrap());
        let reply = client.execute(request).await.unwrap();
        assert_eq!(reply.status(), 409, "{header}");
        assert!(reply.headers().contains_key("x-quorate-refused"));
    }
    assert_eq!(post("hello", vec![1, 0]).send().await.unwrap().status(), 200);
    for i in 0..NAMES.len() {
        cluster.propose(i, vec![], LONG).await.unwrap();
        assert_eq!(cluster.status(i).fault, None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leadership_moves_on_request() {
    let cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    let leader = cluster.leader().await;
    let next = (leader + 1) % NAMES.len();
    let (raft, to) = (cluster.raft(leader).clone(), RegionName::from(NAMES[next]));
    assert!(matches!(raft.transfer_leader(&"mars".into()).await, Err(RaftError::Transfer(_))));
    let asked = Instant::now();
    raft.transfer_leader(&to).await.unwrap();
    println!("leadership moved in {:?}", asked.elapsed());
    cluster.propose(leader, vec![], LONG).await.unwrap();
    assert_eq!(cluster.status(leader).leader, Some(to.clone()));
    let fault = raft.transfer_leader(&to).await.unwrap_err().to_string();
    assert!(fault.contains("leads; ask there"), "{fault}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_and_the_forgetful_are_refused() {
    let mut cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    let leader = cluster.leader().await;
    let other = (leader + 1) % NAMES.len();
    cluster.settled().await;
    cluster.kill(other).await;

    // Another cluster's daemon, at this one's addresses.
    cluster.name = "elsewhere".into();
    let fault = cluster.start(other).await.unwrap_err().to_string();
    assert!(fault.contains("of cluster `test`"), "{fault}");
    let kept = cluster.temp.path().join("kept");
    std::fs::rename(cluster.dir(other), &kept).unwrap();
    cluster.start(other).await.unwrap();
    sleep(Duration::from_secs(2)).await;
    assert_eq!(cluster.status(other).leader, None, "nobody talks to it");
    assert_eq!(cluster.status(other).last_log, None);
    cluster.kill(other).await;

    // The right cluster, with an empty directory where there was data.
    cluster.name = "test".into();
    std::fs::remove_dir_all(cluster.dir(other)).unwrap();
    for _ in 0..2 {
        let fault = cluster.start(other).await.unwrap_err();
        assert!(matches!(fault, RaftError::DataLost { .. }), "{fault}");
    }
    // With its own directory it is welcome.
    std::fs::remove_dir_all(cluster.dir(other)).unwrap();
    std::fs::rename(&kept, cluster.dir(other)).unwrap();
    cluster.start(other).await.unwrap();
    cluster.propose(other, vec![], LONG).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forgetful_region_is_refused_also_if_it_started_alone() {
    let mut cluster = Cluster::started(LOCAL, Duration::from_millis(80)).await;
    cluster.settled().await;
    for i in 0..NAMES.len() {
        cluster.kill(i).await;
    }
    std::fs::remove_dir_all(cluster.dir(0)).unwrap();
    cluster.start_all().await;
    let leader = cluster.leader().await;
    assert_ne!(leader, 0);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(cluster.status(0).last_log, None, "it is given nothing, and has no vote");
    assert!(matches!(
        cluster.propose(0, vec![], Duration::from_millis(200)).await,
        Err(ProposeError::NotSent { .. })
    ));
    cluster.propose(leader, vec![], LONG).await.unwrap();
}
