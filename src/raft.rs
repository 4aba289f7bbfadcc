//! The replicated pool: openraft around [`Pool`], a durable log, and the wire between regions.

mod changes;
mod data_dir;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod gate;
mod log;
mod machine;
mod members;
mod network;
mod node;
mod propose;
mod replica;
mod save;
mod seat;
#[cfg(feature = "sim")]
pub mod sim;
mod snapshot;
mod task;
mod timing;
mod types;
mod word;

use crate::quota::policy::{Policy, RegionName};
use crate::quota::pool::{Applied, Op, Pool};
use crate::telemetry::metrics::RaftMetrics;
use crate::tls::{TlsError, TlsFiles};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};
use std::time::Duration;
use tokio::time::Instant;

pub use changes::{ChangeFeed, Changes};
pub use members::VOTERS_MAX;
pub use replica::{AppliedAt, Replica};
pub use save::{Saved, SavedHeader, restore};
pub use seat::find as find_seat;

use network::wire::{MemberChange, MemberFault};
use node::Node;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::{Instant as _, ServerState};

/// Answers questions of other regions that are no business of Raft's, in a format that they agree on; `None`: not now.
pub type Answers = Box<dyn Fn(Vec<u8>) -> futures::future::BoxFuture<'static, Option<Vec<u8>>> + Send + Sync>;

/// How one region takes part.
#[derive(Clone, Debug)]
pub struct RaftConfig {
    /// This region.
    pub region: RegionName,
    /// The cluster's name; peers of another cluster are refused.
    pub cluster: String,
    /// The first voters and the URLs of their peer listeners, this region among them. The same in every region.
    pub regions: Vec<(RegionName, String)>,
    /// Those of them that vote and serve nobody. The same in every region.
    pub witnesses: Vec<RegionName>,
    /// Where the log and the snapshots live. Belongs to one region of one cluster for good.
    pub data_dir: PathBuf,
    /// What [`find_seat`] has found; `None`: nothing, and the cluster is asked when the node starts. (A cluster that is asked
    /// once more may be out of reach, and the configuration would count.)
    pub seat: Option<u64>,
    /// Mutual TLS between regions; without it only loopback peers are accepted.
    pub tls: Option<PeerTls>,
    /// The longest round trip between two regions. Every timeout follows from it.
    pub rtt_max: Duration,
    /// Sums up how the region names its buckets (see [`crate::quota::redaction`]): those that do it otherwise share none with it, and are
    /// refused.
    pub redaction: Option<u64>,
    /// The level of operations that this node says it applies: [`LEVEL`](crate::quota::pool::LEVEL), unless a test wants it to
    /// pass for an older version.
    pub level: u32,
}

/// The longest round trip between regions that is assumed where nobody says otherwise.
pub const RTT_MAX_DEFAULT: Duration = Duration::from_millis(250);

/// When the log is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLimits {
    /// A snapshot is due after so many entries (or 64 MiB of them).
    pub snapshot_entries: u64,
    /// Entries kept behind a snapshot, for followers that are a little late.
    pub entries_kept: u64,
}

impl Default for LogLimits {
    fn default() -> Self {
        Self { snapshot_entries: 8_192, entries_kept: 1_024 }
    }
}

/// PEM files for mutual TLS between regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTls {
    /// This region's certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities that peers' certificates must come from.
    pub ca: PathBuf,
}

impl PeerTls {
    /// The same, for [`crate::tls`].
    #[must_use]
    pub fn files(&self) -> TlsFiles {
        TlsFiles { cert: self.cert.clone(), key: self.key.clone(), ca: Some(self.ca.clone()) }
    }
}

/// Why Raft could not start or do what an operator asked for.
#[derive(Debug, thiserror::Error)]
pub enum RaftError {
    /// The configuration cannot work.
    #[error("{0}")]
    Config(String),
    /// The data directory is not this region's.
    #[error("data_dir {}: {what}", path.display())]
    DataDir {
        /// The directory.
        path: PathBuf,
        /// What is wrong, and how to mend it.
        what: String,
    },
    /// The data directory is empty, and a peer knows this region with data.
    #[error(
        "data_dir {}: it is empty, but `{peer}` has met this region with data. If a daemon of this region runs elsewhere: one region is one daemon, and a second one is a region of its own; see docs/operations.md, One daemon a region. Else restore the directory, or let the region come back as another node with `quorate region remove NAME --presume-dead` and `quorate region add NAME` (one that lost its log may not vote again as it was; if the cluster never held anything, empty the data_dir of every region)",
        path.display()
    )]
    DataLost {
        /// The directory.
        path: PathBuf,
        /// The region that remembers.
        peer: RegionName,
    },
    /// The log or every snapshot is damaged, or another process has them open.
    #[error("data_dir {}: {what}; stop what else uses it (one region is one daemon), or restore the directory as a whole", path.display())]
    Storage {
        /// The directory.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A certificate, a key or an authority.
    #[error("peer_tls: {0}")]
    Tls(#[from] TlsError),
    /// Leadership was not handed over.
    #[error("leadership was not handed over: {0}")]
    Transfer(String),
}

/// Why a proposal has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Nothing was sent, or it was refused before it reached the log: it has not happened and will not.
    #[error("the proposal was not sent: no leader could be reached")]
    NotSent {
        /// Worth trying again soon (an election is under way, the queue is full)? Not so while shutting down.
        retry: bool,
    },
    /// It was sent and no answer came in time: it may have happened, or may happen yet.
    #[error("the proposal was not answered in time: it may have happened")]
    Unknown,
    /// It was committed under a stamp of an earlier term and had no effect: ask again.
    #[error("the proposal was refused because the leader changed: ask again")]
    Refused,
    /// More than one entry may carry: see [`OPS_MAX`] and [`ENTRY_BYTES_MAX`].
    #[error("the proposal is larger than {OPS_MAX} operations or {ENTRY_BYTES_MAX} bytes")]
    TooLarge,
    /// The member with this node id may not be able to apply it: it is of an older version, or has not said yet of which one.
    #[error("a region may be too old for it (node {node})")]
    TooNew {
        /// Its node id.
        node: u64,
    },
}

/// The most operations in one log entry, and so in one proposal.
pub const OPS_MAX: usize = 4_096;
/// The most bytes in one log entry, encoded.
pub const ENTRY_BYTES_MAX: usize = 1_024 * 1_024;

/// The local replica of the pool, to be read under a short lock.
#[derive(Clone, Debug, Default)]
pub struct SharedPool(Arc<RwLock<Pool>>);

impl SharedPool {
    fn new(pool: Pool) -> Self {
        Self(Arc::new(RwLock::new(pool)))
    }

    fn write(&self) -> RwLockWriteGuard<'_, Pool> {
        PoolRead::none_is_held();
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks it for reading. Entries wait meanwhile: read what you need, and do not hold this across an `await`. Nor may a thread that
    /// holds it lock it again: an entry that waits between the two waits for the first, and the second for the entry. (Checked in
    /// debug builds, as it takes an entry at the wrong moment to be seen.)
    pub fn read(&self) -> PoolRead<'_> {
        PoolRead::none_is_held();
        PoolRead::new(self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The same, without waiting: `None` while entries are applied.
    #[must_use]
    pub fn try_read(&self) -> Option<PoolRead<'_>> {
        match self.0.try_read() {
            Ok(pool) => Some(PoolRead::new(pool)),
            Err(TryLockError::Poisoned(poisoned)) => Some(PoolRead::new(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The pool, locked for reading.
#[derive(Debug)]
pub struct PoolRead<'p>(RwLockReadGuard<'p, Pool>);

thread_local! {
    /// How many [`PoolRead`]s this thread holds (of any pool: the simulation has many, and holds one at a time).
    static READING: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

impl<'p> PoolRead<'p> {
    fn new(guard: RwLockReadGuard<'p, Pool>) -> Self {
        READING.set(READING.get().saturating_add(1));
        Self(guard)
    }

    fn none_is_held() {
        debug_assert_eq!(READING.get(), 0, "this thread reads the pool already: it would wait for itself");
    }
}

impl Drop for PoolRead<'_> {
    fn drop(&mut self) {
        READING.set(READING.get().saturating_sub(1));
    }
}

impl std::ops::Deref for PoolRead<'_> {
    type Target = Pool;

    fn deref(&self) -> &Pool {
        &self.0
    }
}

/// What this region does in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Its log is the cluster's.
    Leader,
    /// It follows, and votes.
    Follower,
    /// It asks for votes.
    Candidate,
    /// It follows, and does not vote (yet).
    Learner,
    /// It has stopped.
    Stopped,
}

/// A snapshot of Raft's state, for people and for readiness.
#[derive(Clone, Debug)]
pub struct RaftStatus {
    /// Its node id.
    pub id: u64,
    /// This region.
    pub region: RegionName,
    /// What it does.
    pub role: Role,
    /// Who leads, as far as this region knows.
    pub leader: Option<RegionName>,
    /// Raft's term. (The pool's is another number: it grows with every leader, and Raft's may have two.)
    pub term: u64,
    /// Index of the last entry in the log.
    pub last_log: Option<u64>,
    /// Index of the last entry known to be committed in the cluster.
    pub committed: Option<u64>,
    /// Index of the last entry applied here.
    pub applied: Option<u64>,
    /// Index of the last entry in the newest snapshot.
    pub snapshot: Option<u64>,
    /// Leader only: time since a quorum acknowledged it.
    pub since_quorum_ack: Option<Duration>,
    /// The other regions, by name.
    pub peers: Vec<PeerStatus>,
    /// Who follows the log, this region included, by node id.
    pub members: Vec<MemberStatus>,
    /// All peers that answer say that this region has been removed from the cluster.
    pub removed: bool,
    /// Why it has stopped, if it has.
    pub fault: Option<String>,
}

/// Another region, as this one sees it.
#[derive(Clone, Debug)]
pub struct PeerStatus {
    /// Its name.
    pub region: RegionName,
    /// Its peer URL.
    pub url: String,
    /// Does it vote?
    pub voter: bool,
    /// Did it answer the last pings?
    pub reachable: bool,
    /// Smoothed round trip; `None` until it has answered.
    pub rtt: Option<Duration>,
    /// Leader only: index of the last entry known to be in its log.
    pub matched: Option<u64>,
}

/// A member of the Raft group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its node id.
    pub node: u64,
    /// Its region.
    pub region: RegionName,
    /// Its peer URL, as it was given when it came.
    pub url: String,
    /// Does it vote?
    pub voter: bool,
}

/// Why a change of members was not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    /// It cannot be, and why.
    #[error("{0}")]
    Refused(String),
    /// Not now: ask again.
    #[error("{0}; try again")]
    NotNow(String),
    /// It may have happened, or may yet.
    #[error("the outcome is not known: {0}")]
    Unknown(String),
}

impl From<MemberFault> for MemberError {
    fn from(fault: MemberFault) -> Self {
        match fault {
            MemberFault::Refused(why) => Self::Refused(why),
            MemberFault::NotNow(why) => Self::NotNow(why),
            MemberFault::Unknown(why) => Self::Unknown(why),
        }
    }
}

/// One region's part in the cluster. Cheap to clone; all clones are the same node, which goes on until
/// [`Self::shutdown`].
#[derive(Clone, Debug)]
pub struct Raft {
    node: Arc<Node>,
}

impl Raft {
    /// Opens or creates the data directory, joins or founds the cluster, and returns at once: a leader may be elected
    /// only later. When the cluster is new, one region initialises it as soon as a majority can be reached, and whichever
    /// becomes leader gives it its regions and `first_policies`. Serve [`Self::serve_peers`] (or [`Self::peer_router`])
    /// from then on. Needs a tokio runtime, and runs on it.
    ///
    /// # Errors
    /// If the configuration cannot work, the data directory belongs to another region or is damaged, or the directory is
    /// empty though a peer knows this region as one that has data.
    pub async fn start(config: RaftConfig, first_policies: Vec<Policy>) -> Result<Self, RaftError> {
        Self::start_with(config, first_policies, LogLimits::default()).await
    }

    /// The same, with other limits on the log.
    ///
    /// # Errors
    /// See [`Self::start`].
    pub async fn start_with(
        config: RaftConfig,
        first_policies: Vec<Policy>,
        limits: LogLimits,
    ) -> Result<Self, RaftError> {
        Ok(Self { node: Node::start(config, first_policies, limits).await? })
    }

    /// Proposes operations, in one entry, from any region; returns what that entry did when it was applied by the
    /// leader (the entry may hold other regions' operations too). What certainly did not happen is tried again until
    /// `deadline`.
    ///
    /// # Errors
    /// See [`ProposeError`].
    pub async fn propose(&self, ops: Vec<Op>, deadline: Instant) -> Result<Applied, ProposeError> {
        self.node.propose(ops, deadline).await.map(Arc::unwrap_or_clone)
    }

    /// Measures with these from now on.
    pub fn measure(&self, metrics: RaftMetrics) {
        self.node.measure(metrics);
    }

    /// This region's replica of the pool.
    #[must_use]
    pub fn pool(&self) -> SharedPool {
        self.node.replica.pool()
    }

    /// What is applied on this replica from now on. A slow reader misses nothing and costs bounded memory.
    #[must_use]
    pub fn changes(&self) -> ChangeFeed {
        self.node.replica.changes()
    }

    /// The newest stamp applied here, and when.
    #[must_use]
    pub fn applied_at(&self) -> AppliedAt {
        self.node.replica.applied_at()
    }

    /// The state of this node and what it knows of the others.
    #[must_use]
    pub fn status(&self) -> RaftStatus {
        status(&self.node)
    }

    /// Hands leadership to another region; returns once this region sees that one lead.
    ///
    /// # Errors
    /// If this region does not lead, the other is no voter, or it did not take over within two election timeouts.
    pub async fn transfer_leader(&self, to: &RegionName) -> Result<(), RaftError> {
        let refuse = |why: String| Err(RaftError::Transfer(why));
        let metrics = self.node.raft.server_metrics().borrow_watched().clone();
        if metrics.state != ServerState::Leader {
            return refuse(match self.node.leader() {
                Some((_, leader)) => format!("`{leader}` leads; ask there"),
                None => "nobody leads at the moment; try again".into(),
            });
        }
        let members = metrics.membership_config.membership();
        let Some(id) = members.voter_ids().find(|id| members.get_node(id).is_some_and(|n| n.region == *to))
        else {
            return refuse(format!("`{to}` is not a voter of this cluster"));
        };
        self.node.transfer_leader(id).await
    }

    /// This region's node id.
    #[must_use]
    pub fn node_id(&self) -> u64 {
        self.node.client.peers.me.node_id
    }

    /// A node follows the log from now on, without a vote. Each of these changes is made by the leader, which may be in another
    /// region, and changes nothing where it has been made already.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub async fn add_learner(
        &self,
        node: u64,
        region: &RegionName,
        url: &str,
        deadline: Instant,
    ) -> Result<(), MemberError> {
        let (region, url) = (region.clone(), url.to_owned());
        self.change(MemberChange::Learn { node, region, url }, deadline).await
    }

    /// A learner that has caught up gets a vote.
    ///
    /// # Errors
    /// See [`MemberError`]: refused if five vote already, or if it would lose quorum.
    pub async fn promote(&self, node: u64, deadline: Instant) -> Result<(), MemberError> {
        self.change(MemberChange::Promote { node }, deadline).await
    }

    /// A voter becomes a learner.
    ///
    /// # Errors
    /// See [`MemberError`]: refused if it would lose quorum.
    pub async fn demote(&self, node: u64, deadline: Instant) -> Result<(), MemberError> {
        self.change(MemberChange::Demote { node }, deadline).await
    }

    /// A node is no member any more.
    ///
    /// # Errors
    /// See [`MemberError`]: refused if it would lose quorum.
    pub async fn forget(&self, node: u64, deadline: Instant) -> Result<(), MemberError> {
        self.change(MemberChange::Forget { node }, deadline).await
    }

    /// A voter is to lead; unlike [`Self::transfer_leader`] from any region.
    ///
    /// # Errors
    /// See [`MemberError`].
    pub async fn lead(&self, node: u64, deadline: Instant) -> Result<(), MemberError> {
        self.change(MemberChange::Lead { node }, deadline).await
    }

    async fn change(&self, change: MemberChange, deadline: Instant) -> Result<(), MemberError> {
        Ok(self.node.change_members(change, deadline).await?)
    }

    /// Asks another region's [`Answers`] something, of at most 60 KiB, as the answer is; `None`: it cannot be reached, is
    /// busy, or is too old to know of questions.
    pub async fn question(&self, region: &str, body: Vec<u8>) -> Option<Vec<u8>> {
        self.node.question(region, body).await
    }

    /// What answers other regions' questions from now on. Only the first call counts.
    pub fn answer_with(&self, answers: Answers) {
        let _ = self.node.answers.set(answers);
    }

    /// Reads the TLS files again, for connections from now on.
    ///
    /// # Errors
    /// If they cannot be used; then nothing changes.
    pub fn reload_tls(&self) -> Result<(), RaftError> {
        self.node.reload_tls()
    }

    /// Stops taking part; what was acknowledged is on disk.
    pub async fn shutdown(&self) {
        self.node.shutdown().await;
    }

    /// The peer wire's routes (HTTP/2). Whoever serves them sees to TLS and to who may connect; [`Self::serve_peers`] does.
    pub fn peer_router(&self) -> axum::Router {
        network::server::router(Arc::clone(&self.node))
    }

    /// Serves the peer wire on `listener`, with mutual TLS if configured, until [`Self::shutdown`]. Bounded connections
    /// and handshakes; without TLS only loopback peers are let in.
    pub async fn serve_peers(&self, listener: tokio::net::TcpListener) {
        network::server::serve(Arc::clone(&self.node), listener).await;
    }
}

/// The replicated log, as the slow loop needs it: [`Raft`], or the simulation's.
pub trait Log: Clone + Send + Sync + 'static {
    /// See [`Raft::propose`].
    ///
    /// # Errors
    /// See [`ProposeError`].
    fn propose(
        &self,
        ops: Vec<Op>,
        deadline: Instant,
    ) -> impl Future<Output = Result<Applied, ProposeError>> + Send;

    /// See [`Raft::pool`].
    fn pool(&self) -> SharedPool;

    /// See [`Raft::changes`].
    fn changes(&self) -> ChangeFeed;

    /// See [`Raft::applied_at`].
    fn applied_at(&self) -> AppliedAt;

    /// The newest version of the policies that this region has acknowledged, in this life of its daemon or an earlier one.
    fn acknowledged(&self) -> u64;

    /// Remembers, for good, that this region is about to acknowledge a version.
    ///
    /// # Errors
    /// If it cannot be remembered: then the version must not be acknowledged.
    fn acknowledge(&self, version: u64) -> impl Future<Output = std::io::Result<()>> + Send;

    /// Do all members apply operations up to this level, as far as this one has heard? Those of a newer one come to nothing, with
    /// whatever is proposed along with them.
    fn is_known_to_all(&self, level: u32) -> bool;

    /// Does this region lead, as far as it knows?
    fn leads(&self) -> bool;

    /// This region's node id (see [`Pool::seat`]); `None`: all peers that answer say that it has left the cluster.
    fn node_id(&self) -> Option<u64>;
}

impl Log for Raft {
    async fn propose(&self, ops: Vec<Op>, deadline: Instant) -> Result<Applied, ProposeError> {
        self.propose(ops, deadline).await
    }

    fn pool(&self) -> SharedPool {
        self.pool()
    }

    fn changes(&self) -> ChangeFeed {
        self.changes()
    }

    fn applied_at(&self) -> AppliedAt {
        self.applied_at()
    }

    fn acknowledged(&self) -> u64 {
        self.node.word.version()
    }

    async fn acknowledge(&self, version: u64) -> std::io::Result<()> {
        let word = Arc::clone(&self.node.word);
        task::blocking(move || word.give(version)).await?
    }

    fn is_known_to_all(&self, level: u32) -> bool {
        self.node.is_known_to_all(level)
    }

    fn leads(&self) -> bool {
        self.node.raft.server_metrics().borrow_watched().state == ServerState::Leader
            && self.node.fault().is_none()
    }

    fn node_id(&self) -> Option<u64> {
        let removed = self.node.client.peers.is_removed(self.node.client.timing.silence());
        (!removed).then(|| self.node_id())
    }
}

fn status(node: &Node) -> RaftStatus {
    let metrics = node.raft.metrics().borrow_watched().clone();
    let members = metrics.membership_config.membership();
    let silence = node.client.timing.silence();
    let peer = |peer: Arc<network::peers::Peer>| {
        let id = members.nodes().find(|(_, node)| node.region == peer.region).map(|(&id, _)| id);
        let matched =
            metrics.replication.as_ref().zip(id).and_then(|(all, id)| all.get(&id).copied().flatten());
        PeerStatus {
            region: peer.region.clone(),
            url: peer.url.clone(),
            voter: id.is_some_and(|id| members.voter_ids().any(|voter| voter == id)),
            reachable: peer.reachable(silence),
            rtt: peer.rtt(),
            matched: matched.map(|log_id| log_id.index),
        }
    };
    let fault = node.fault();
    RaftStatus {
        id: metrics.id,
        region: node.client.peers.me.region.clone(),
        role: match metrics.state {
            _ if fault.is_some() => Role::Stopped,
            ServerState::Leader => Role::Leader,
            ServerState::Follower => Role::Follower,
            ServerState::Candidate => Role::Candidate,
            ServerState::Learner => Role::Learner,
            ServerState::Shutdown => Role::Stopped,
        },
        leader: node.leader().map(|(_, region)| region),
        term: metrics.current_term,
        last_log: metrics.last_log_index,
        committed: metrics.cluster_committed.map(|log_id| log_id.index),
        applied: metrics.last_applied.map(|log_id| log_id.index),
        snapshot: metrics.snapshot.map(|log_id| log_id.index),
        since_quorum_ack: metrics.last_quorum_acked.map(|acked| acked.elapsed()),
        peers: node.client.peers.all().into_iter().map(peer).collect(),
        members: members
            .nodes()
            .map(|(&id, member)| MemberStatus {
                node: id,
                region: member.region.clone(),
                url: member.url.clone(),
                voter: members.voter_ids().any(|voter| voter == id),
            })
            .collect(),
        removed: node.client.peers.is_removed(silence),
        fault,
    }
}
