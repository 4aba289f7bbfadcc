//! One node: openraft, its stores and its wire, and the few tasks that keep them going.

use super::data_dir::{self, Acquaintances, Identity};
use super::gate::Call;
use super::log::LogStore;
use super::machine::Machine;
use super::network::client::{CallError, Client, Lane};
use super::network::peers::{Peer, Peers, REGIONS_MAX};
use super::network::wire::{self, Hello, HelloReply, Propose, ProposeReply, Refusal, path};
use super::propose::{Proposals, check_size};
use super::replica::Replica;
use super::snapshot::SnapshotDir;
use super::task::{blocking, here};
use super::timing::Timing;
use super::types::{LogId, NODE_IDS, PeerNode, TypeConfig};
use super::word::Word;
use super::{Answers, LogLimits, PeerTls, ProposeError, RaftConfig, RaftError};
use crate::clock;
use crate::quota::amount::Micros;
use crate::quota::policy::{Policy, RegionName};
use crate::quota::pool::{Applied, FoundWith, Op};
use crate::telemetry::metrics::RaftMetrics;
use arc_swap::ArcSwapOption;
use futures::future::join_all;
use openraft::ServerState;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::storage::RaftLogStorage;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

pub(super) type OpenRaft = openraft::Raft<TypeConfig, Machine>;

/// How long a node that stops still waits for the answers that it owes its peers.
const OWED_WITHIN: Duration = Duration::from_millis(500);
/// How often a proposal may be passed on: to the leader, and by a leader that has just handed over.
const HOPS_MAX: u8 = 2;
/// Proposals from other regions whose bodies arrive at once.
const READING_MAX: usize = 64;
/// Between two tries to send a proposal that reached nobody.
const RETRY: Duration = Duration::from_millis(50);
/// Every so many pings, a peer is asked who the members are (until there is a log, with every ping).
const WHO_EVERY: u64 = 5;
/// Between two looks at whether the cluster can be founded.
const FOUNDING: Duration = Duration::from_millis(500);

/// Everything that one region's part in the cluster consists of.
pub(super) struct Node {
    pub raft: OpenRaft,
    pub replica: Arc<Replica>,
    pub client: Client,
    pub snapshots: Arc<SnapshotDir>,
    /// One snapshot is received at a time ...
    pub receiving: Semaphore,
    /// ... and so many proposals.
    pub reading: Semaphore,
    /// What answers other regions' questions ...
    pub answers: OnceLock<Answers>,
    /// ... one at a time.
    pub answering: Semaphore,
    /// Sums up the list of first voters.
    pub founding: u32,
    voters: BTreeMap<u64, PeerNode>,
    witnesses: Vec<RegionName>,
    /// What this region has given its word on.
    pub word: Arc<Word>,
    proposals: Proposals,
    data_dir: PathBuf,
    tls: ArcSwapOption<rustls::ServerConfig>,
    tls_files: Option<PeerTls>,
    fault: Mutex<Option<String>>,
    tasks: Mutex<JoinSet<()>>,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("me", &self.client.peers.me).finish_non_exhaustive()
    }
}

impl Node {
    /// See [`super::Raft::start`].
    pub async fn start(
        config: RaftConfig,
        first_policies: Vec<Policy>,
        limits: LogLimits,
    ) -> Result<Arc<Self>, RaftError> {
        Self::start_on(config, first_policies, limits, Files).await
    }

    /// The same, on any ground.
    pub async fn start_on(
        config: RaftConfig,
        first_policies: Vec<Policy>,
        limits: LogLimits,
        ground: impl Ground,
    ) -> Result<Arc<Self>, RaftError> {
        let voters = voters(&config)?;
        let seat = match config.seat {
            Some(found) => Some(found),
            None => super::seat::find_on(&config, &watch::Sender::new(None), &ground).await?,
        };
        let me = voters.iter().find(|(_, node)| node.region == config.region).map_or(0, |(&id, _)| id);
        let me = seat.unwrap_or(me);
        let timing = Timing::new(config.rtt_max);
        let dir = config.data_dir.clone();
        let (cluster, region) = (config.cluster.clone(), config.region.clone());
        let (ground, opened) = blocking(move || {
            let opened = open(&ground, &dir, &cluster, &region, me);
            (ground, opened)
        })
        .await
        .map_err(|e| RaftError::Config(e.to_string()))?;
        let Opened { identity, known, word, fresh, log, machine } = opened?;
        let me = identity.node_id;
        let peers = Peers::new(identity, known, &config.regions).with_redaction(config.redaction);
        let peers = peers.with_level(config.level);
        let peers = Arc::new(peers);
        let client = ground.client(Client::new(peers, timing, config.tls.as_ref())?);
        if fresh {
            refuse_to_start_over(&client, &config.data_dir).await?;
        }
        let (replica, snapshots) = (machine.replica(), machine.snapshots());
        let settings = timing
            .config(&config.cluster, limits)
            .validate()
            .map_err(|e| RaftError::Config(e.to_string()))?;
        let raft = OpenRaft::new(me, Arc::new(settings), client.clone(), log, machine)
            .await
            .map_err(|e| RaftError::Storage { path: config.data_dir.clone(), what: e.to_string() })?;
        let tls = config.tls.as_ref().map(|tls| tls.files().server(&["h2"])).transpose()?;
        let node = Arc::new(Self {
            proposals: Proposals::start(raft.clone(), Arc::clone(&replica)),
            founding: founding(&voters, &config.witnesses),
            raft,
            replica,
            client,
            snapshots,
            receiving: Semaphore::new(1),
            reading: Semaphore::new(READING_MAX),
            answers: OnceLock::new(),
            answering: Semaphore::new(1),
            voters,
            witnesses: config.witnesses,
            word: Arc::new(word),
            data_dir: config.data_dir,
            tls: ArcSwapOption::from(tls),
            tls_files: config.tls,
            fault: Mutex::new(None),
            tasks: Mutex::default(),
        });
        node.spawn(Arc::clone(&node).found(first_policies));
        node.spawn(Arc::clone(&node).take_snapshots());
        node.spawn(Arc::clone(&node).keep_time());
        node.spawn(Arc::clone(&node).ping_all());
        node.spawn(Arc::clone(&node).follow_members());
        Ok(node)
    }

    /// Proposes, from wherever the leader is, until `deadline`. What has certainly not happened is tried again.
    pub async fn propose(&self, ops: Vec<Op>, deadline: Instant) -> Result<Arc<Applied>, ProposeError> {
        check_size(&ops)?;
        let ops = Arc::new(ops);
        let mut metrics = self.raft.server_metrics();
        loop {
            let outcome = self.propose_once(&ops, deadline, HOPS_MAX).await;
            let retry = matches!(outcome, Err(ProposeError::NotSent { retry: true }));
            if !retry || Instant::now() >= deadline || self.client.gate.is_stopping() {
                return outcome;
            }
            let news = async {
                // In this order, so that a simulation repeats.
                tokio::select! {
                    biased;
                    _ = metrics.changed() => (),
                    () = tokio::time::sleep(RETRY) => (),
                }
            };
            if timeout_at(deadline, news).await.is_err() {
                return outcome;
            }
        }
    }

    /// Measures with these from now on.
    pub fn measure(&self, metrics: RaftMetrics) {
        self.proposals.measure(metrics);
    }

    /// One try: here if this node leads, else at the leader's.
    pub async fn propose_once(
        &self,
        ops: &Arc<Vec<Op>>,
        deadline: Instant,
        hops: u8,
    ) -> Result<Arc<Applied>, ProposeError> {
        check_size(ops)?;
        let nobody = ProposeError::NotSent { retry: true };
        let Some(_call) = self.call() else { return Err(nobody) };
        let Some((leader, region)) = self.leader() else { return Err(nobody) };
        if leader == self.client.peers.me.node_id {
            let ops = self.known_to_all(ops)?;
            return self.proposals.propose(&ops, deadline).await;
        }
        let hops = hops.checked_sub(1).ok_or(nobody)?;
        let peer = self.client.peers.get(&region).ok_or(nobody)?;
        if peer.level().is_some_and(|level| level < level_of(ops)) {
            return Err(ProposeError::TooNew { node: leader });
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(nobody);
        }
        let wait_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let request = Propose { ops: ops.to_vec(), wait_ms, hops };
        let limits = (left, wire::APPLIED_BYTES_MAX);
        let call = self.client.call(&peer, Lane::Entries, path::PROPOSE, &request, limits);
        let called: Result<ProposeReply, CallError> = tokio::select! {
            biased;
            called = call => called,
            // Whoever waits for a leader that is gone would wait in vain: let it ask again.
            () = self.replaced(leader) => Err(CallError::TimedOut),
        };
        match called {
            Ok(reply) => reply.map_err(ProposeError::from),
            Err(fault) if fault.nothing_happened() => Err(nobody),
            Err(_) => Err(ProposeError::Unknown),
        }
    }

    /// Operations of a newer level than any in the log are held back until all members have said that they apply them; then the
    /// log says so first. Who founds the cluster is alone in it.
    fn known_to_all(&self, ops: &Arc<Vec<Op>>) -> Result<Arc<Vec<Op>>, ProposeError> {
        let level = level_of(ops);
        if level <= self.replica.level() || self.replica.pool().read().regions().is_empty() {
            return Ok(Arc::clone(ops));
        }
        if let Some(node) = self.who_may_not_know(level) {
            return Err(ProposeError::TooNew { node });
        }
        let mut raised = vec![Op::Level(level)];
        raised.extend(ops.iter().cloned());
        tracing::info!(
            level,
            "all regions know operations of this level: from now on older versions have no place in the cluster"
        );
        Ok(Arc::new(raised))
    }

    /// May there be operations of this level in the log, as far as this node has heard?
    pub fn is_known_to_all(&self, level: u32) -> bool {
        level <= self.replica.level() || self.who_may_not_know(level).is_none()
    }

    /// A member that has not said that it applies operations of this level.
    fn who_may_not_know(&self, level: u32) -> Option<u64> {
        let peers = &self.client.peers;
        let metrics = self.raft.server_metrics().borrow_watched().clone();
        let mut members = metrics.membership_config.nodes();
        let knows = |node: u64, region: &str| match node == peers.me.node_id {
            true => peers.level >= level,
            false => peers.get(region).and_then(|peer| peer.level()).is_some_and(|said| said >= level),
        };
        members.find(|(node, member)| !knows(**node, &member.region)).map(|(node, _)| *node)
    }

    /// Another node has been leading for long enough that an answer from `leader` would have arrived.
    async fn replaced(&self, leader: u64) {
        let mut metrics = self.raft.server_metrics();
        while metrics.borrow_watched().current_leader.is_none_or(|now| now == leader) {
            if metrics.changed().await.is_err() {
                // This node stops; the call ends by itself.
                return std::future::pending().await;
            }
        }
        tokio::time::sleep(self.client.timing.call()).await;
    }

    /// Asks another region something that is no business of Raft's; `None`: no answer in time.
    pub async fn question(&self, region: &str, body: Vec<u8>) -> Option<Vec<u8>> {
        let peer = self.client.peers.get(region)?;
        let limits = (self.client.timing.call() * 2, wire::CALL_BYTES_MAX);
        let question = wire::Question { body };
        // On the connection that snapshots use: nothing urgent queues behind it.
        let reply = self.client.call(&peer, Lane::Bulk, path::QUESTION, &question, limits).await;
        reply.ok().map(|wire::QuestionReply { body }| body)
    }

    /// Has this node a log, or a vote? Then the cluster has been founded.
    pub fn initialized(&self) -> bool {
        let metrics = self.raft.metrics().borrow_watched().clone();
        metrics.last_log_index.is_some() || metrics.current_term > 0
    }

    /// Who leads, as far as this node knows.
    pub fn leader(&self) -> Option<(u64, RegionName)> {
        let metrics = self.raft.server_metrics().borrow_watched().clone();
        let leader = metrics.current_leader?;
        let member = metrics.membership_config.membership().get_node(&leader);
        let region = member.map(|member| member.region.clone());
        Some((leader, region.or_else(|| self.client.peers.region_of(leader))?))
    }

    pub fn tls(&self) -> Option<Arc<rustls::ServerConfig>> {
        self.tls.load_full()
    }

    /// Reads the TLS files again, for connections from now on.
    pub fn reload_tls(&self) -> Result<(), RaftError> {
        if let Some(files) = &self.tls_files {
            let server = files.files().server(&["h2"])?;
            self.client.reload(Some(files))?;
            self.tls.store(Some(server));
        }
        Ok(())
    }

    /// True once the node stops.
    pub fn stopping(&self) -> watch::Receiver<bool> {
        self.client.gate.stopping()
    }

    /// To be held for as long as a peer's call or a proposal takes; `None`: it has been told to stop, and answers no more.
    /// (openraft would call each call that it can not answer an error.)
    pub fn call(&self) -> Option<Call> {
        self.client.gate.enter()
    }

    /// Why it has stopped by itself, if it has.
    pub fn fault(&self) -> Option<String> {
        let own = self.fault.lock().unwrap_or_else(PoisonError::into_inner).clone();
        own.or_else(|| {
            let metrics = self.raft.metrics().borrow_watched().clone();
            metrics.running_state.err().map(|fatal| fatal.to_string())
        })
    }

    pub async fn shutdown(&self) {
        // The answers that it owes, first; a peer that does not take its own does not keep it.
        self.client.gate.close(OWED_WITHIN).await;
        let _ = self.raft.shutdown().await;
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        tasks.shutdown().await;
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(here(task));
    }

    /// Hands leadership to this node; returns once it is seen to lead.
    pub async fn transfer_leader(&self, to: u64) -> Result<(), RaftError> {
        self.raft.trigger().transfer_leader(to).await.map_err(|e| RaftError::Transfer(e.to_string()))?;
        let patience = self.client.timing.election_max() * 2;
        let seen = self.raft.wait(Some(patience)).current_leader(to, "leadership handed over").await;
        let late = "the other region did not take over in time; this one may lead again";
        seen.map(drop).map_err(|_| RaftError::Transfer(late.into()))
    }

    fn is_leader(&self) -> bool {
        self.raft.server_metrics().borrow_watched().state == ServerState::Leader
    }
}

/// What a member must be able to apply to take these.
fn level_of(ops: &[Op]) -> u32 {
    ops.iter().map(Op::level).max().unwrap_or(1)
}

/// What a node's log and its wire stand on: files and sockets, or a simulation's.
pub(super) trait Ground: Send + 'static {
    /// openraft's log.
    type Log: RaftLogStorage<TypeConfig>;

    /// Opens the log that belongs in `dir`; and the last entry that has been deleted from it, if any.
    fn open_log(&self, dir: &Path) -> std::io::Result<(Self::Log, Option<LogId>)>;

    /// Where calls to peers go.
    fn client(&self, client: Client) -> Client {
        client
    }
}

/// Files and sockets.
pub(super) struct Files;

impl Ground for Files {
    type Log = LogStore;

    fn open_log(&self, dir: &Path) -> std::io::Result<(LogStore, Option<LogId>)> {
        let log = LogStore::open(dir)?;
        let purged = log.purged();
        Ok((log, purged))
    }
}

/// What the data directory holds.
struct Opened<L> {
    identity: Identity,
    known: Acquaintances,
    word: Word,
    fresh: bool,
    log: L,
    machine: Machine,
}

fn open<G: Ground>(
    ground: &G,
    dir: &Path,
    cluster: &str,
    region: &RegionName,
    node_id: u64,
) -> Result<Opened<G::Log>, RaftError> {
    let (identity, fresh) = Identity::open(dir, cluster, region, node_id)?;
    let known = Acquaintances::open(dir)?;
    let word = Word::open(dir)?;
    let storage = |e: std::io::Error| RaftError::Storage { path: dir.to_owned(), what: e.to_string() };
    let (log, purged) = ground.open_log(&dir.join("log")).map_err(storage)?;
    let snapshots = SnapshotDir::open(dir.join("snapshots")).map_err(storage)?;
    let machine = Machine::open(identity.node_id, snapshots, purged).map_err(storage)?;
    Ok(Opened { identity, known, word, fresh, log, machine })
}

/// The first voters: node ids are positions (from 1) in the list of regions, sorted by name.
pub(super) fn voters(config: &RaftConfig) -> Result<BTreeMap<u64, PeerNode>, RaftError> {
    let mut regions = config.regions.clone();
    regions.sort_unstable();
    let refuse = |what: String| Err(RaftError::Config(what));
    if regions.len() > REGIONS_MAX {
        return refuse(format!("cluster.regions: {} regions are more than {REGIONS_MAX}", regions.len()));
    }
    if let Some(((twice, _), _)) = regions.iter().zip(regions.iter().skip(1)).find(|(a, b)| a.0 == b.0) {
        return refuse(format!("cluster.regions: `{twice}` is there twice; remove one"));
    }
    if !regions.iter().any(|(region, _)| *region == config.region) {
        return refuse(format!("cluster.regions: this region, `{}`, is not there; add it", config.region));
    }
    for (region, url) in &regions {
        let scheme = url.parse::<http::Uri>().ok().and_then(|uri| uri.scheme_str().map(str::to_owned));
        let (wanted, why) = if config.tls.is_some() {
            ("https", "there is peer_tls")
        } else {
            ("http", "there is no peer_tls")
        };
        if scheme.as_deref() != Some(wanted) {
            return refuse(format!("cluster.regions.{region}: `{url}` must be an {wanted}:// URL, as {why}"));
        }
    }
    let nodes = regions.into_iter().map(|(region, url)| PeerNode { region, url });
    Ok((1..NODE_IDS).zip(nodes).collect())
}

fn founding(voters: &BTreeMap<u64, PeerNode>, witnesses: &[RegionName]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    for node in voters.values() {
        sum.update(node.region.as_bytes());
        let is_witness = witnesses.contains(&node.region);
        sum.update(if is_witness { b"\0witness\0" } else { b"\0" });
    }
    sum.finalize()
}

/// An empty data directory is right for a node that has never been, and wrong for one that peers have met. Peers that do
/// not answer do not hold it up: they refuse its calls later (see `data_dir`).
async fn refuse_to_start_over(client: &Client, dir: &Path) -> Result<(), RaftError> {
    let ask = async |peer: Arc<Peer>| (hello(client, &peer, 0).await, peer);
    for answer in join_all(client.peers.all().into_iter().map(ask)).await {
        if let (Err(CallError::Refused(Refusal::Instance)), peer) = answer {
            start_over(client, dir);
            return Err(RaftError::DataLost { path: dir.to_owned(), peer: peer.region.clone() });
        }
    }
    Ok(())
}

/// The directory holds nothing, as it did before: the next start must see it so.
fn start_over(client: &Client, dir: &Path) {
    client.peers.remember_nobody();
    let undo = std::fs::remove_dir_all(dir.join("log"))
        .and_then(|()| std::fs::remove_dir_all(dir.join("snapshots")))
        .and_then(|()| data_dir::forget(dir));
    if let Err(fault) = undo {
        tracing::warn!(%fault, dir = %dir.display(), "cannot clean up an empty data directory");
    }
}

async fn hello(client: &Client, peer: &Peer, founding: u32) -> Result<HelloReply, CallError> {
    let limits = (client.timing.call(), wire::CALL_BYTES_MAX);
    let sent = Instant::now();
    let reply = client.call(peer, Lane::Control, path::HELLO, &Hello { founding }, limits).await?;
    peer.heard(sent.elapsed());
    client.peers.accepted_by(&peer.region);
    Ok(reply)
}

/// Pings a peer for its health, and the connection for entries so that it is there when this node leads all at once.
async fn ping(node: &Node, peer: &Peer) {
    let limits = (node.client.timing.call(), wire::CALL_BYTES_MAX);
    let request = Hello { founding: node.founding };
    let warm = node.client.call::<_, HelloReply>(peer, Lane::Entries, path::HELLO, &request, limits);
    let _ = tokio::join!(hello(&node.client, peer, node.founding), warm);
}

/// The tasks.
impl Node {
    /// Brings a new cluster into being. The first of the reachable regions by name initialises it, once a majority is
    /// there; then whichever leads founds the pool.
    async fn found(self: Arc<Self>, policies: Vec<Policy>) {
        loop {
            if !self.replica.pool().read().regions().is_empty() {
                return;
            }
            if !self.initialized() {
                self.initialize().await;
            }
            if timeout_at(Instant::now() + FOUNDING, self.leading()).await.is_err() {
                continue;
            }
            let found = self.founding(policies.clone());
            let deadline = Instant::now() + self.client.timing.append();
            match self.propose(vec![found], deadline).await {
                Ok(_) => {
                    tracing::info!("founded the cluster");
                    return;
                }
                Err(ProposeError::TooLarge) => {
                    self.fail("the first policies are too large for one entry; remove some".into());
                    return;
                }
                Err(fault) => tracing::warn!(%fault, "cannot found the cluster yet"),
            }
            tokio::time::sleep(FOUNDING).await;
        }
    }

    /// Waits until this node leads.
    async fn leading(&self) {
        let mut metrics = self.raft.server_metrics();
        while !self.is_leader() {
            if metrics.changed().await.is_err() {
                // It stops.
                return std::future::pending().await;
            }
        }
    }

    fn founding(&self, policies: Vec<Policy>) -> Op {
        let members = self.voters.values().map(|node| node.region.clone()).collect();
        match &*self.witnesses {
            [] => Op::Found { regions: members, policies },
            witnesses => Op::FoundWith(FoundWith { members, witnesses: witnesses.to_vec(), policies }),
        }
    }

    async fn initialize(&self) {
        let mut first = true;
        let mut there = 1;
        for peer in self.client.peers.all() {
            match hello(&self.client, &peer, self.founding).await {
                // It will send its log.
                Ok(HelloReply { initialized: true, .. }) => return,
                Ok(HelloReply { founding, .. }) if founding != self.founding => {
                    tracing::error!(region = %peer.region, "cluster.regions differs between this region and another; make them equal");
                    return;
                }
                Ok(_) => {
                    there += 1;
                    first &= self.client.peers.me.region < peer.region;
                }
                Err(_) => (),
            }
        }
        if first && there > self.voters.len() / 2 {
            match self.raft.initialize(self.voters.clone()).await {
                Ok(()) => tracing::info!(regions = self.voters.len(), "initialised the cluster"),
                // Another region was faster.
                Err(fault) => tracing::info!(%fault, "did not initialise the cluster"),
            }
        }
    }

    /// By bytes; by count of entries openraft does it.
    async fn take_snapshots(self: Arc<Self>) {
        loop {
            self.replica.snapshot_due.notified().await;
            if self.raft.trigger().snapshot().await.is_err() {
                return;
            }
        }
    }

    /// An idle leader moves the Raft clock, so that leases end and asks are not taken for old ones.
    async fn keep_time(self: Arc<Self>) {
        let idle = self.client.timing.idle_entry();
        loop {
            tokio::time::sleep(idle / 4).await;
            let since = clock::now() - self.replica.applied_at().at;
            if since > Micros::from_duration(idle) && self.is_leader() {
                let deadline = Instant::now() + self.client.timing.append();
                let _ = self.proposals.propose(&Arc::default(), deadline).await;
            }
        }
    }

    async fn ping_all(self: Arc<Self>) {
        let mut pinged = BTreeMap::new();
        let mut tasks = JoinSet::new();
        loop {
            let peers = self.client.peers.all();
            // Members come, go, and move.
            pinged.retain(|(region, url), task: &mut tokio::task::AbortHandle| {
                let stays = peers.iter().any(|peer| (&peer.region, &peer.url) == (region, url));
                if !stays {
                    task.abort();
                }
                stays
            });
            for peer in peers {
                pinged.entry((peer.region.clone(), peer.url.clone())).or_insert_with(|| {
                    let node = Arc::clone(&self);
                    tasks.spawn(here(async move {
                        for round in 0_u64.. {
                            ping(&node, &peer).await;
                            // A node that has no log yet may have to learn that it is another one.
                            if round % WHO_EVERY == 0 || !node.initialized() {
                                node.hear_of_members(&peer).await;
                            }
                            tokio::time::sleep(node.client.timing.ping()).await;
                        }
                    }))
                });
            }
            while tasks.try_join_next().is_some() {}
            tokio::time::sleep(self.client.timing.ping()).await;
        }
    }

    /// A node that was away may have missed who has come since, and must not take them for strangers: one of them may lead.
    async fn hear_of_members(&self, peer: &Peer) {
        let me = &self.client.peers.me;
        if let Some(reply) = super::seat::ask(&self.client, peer, &me.region).await
            && reply.initialized
        {
            self.client.peers.follow(reply.index, &reply.members, false);
            if !self.initialized() && reply.seat.is_some_and(|node| node > me.node_id) {
                start_over(&self.client, &self.data_dir);
                self.fail("the cluster was out of reach when this region started, and knows it as another node; start it again".into());
            }
        }
    }

    fn fail(&self, why: String) {
        tracing::error!(why, "the region cannot take part");
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }
}
