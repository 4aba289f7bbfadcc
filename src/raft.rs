//! The replicated pool: openraft around [`Pool`], a durable log, and the wire between regions.

mod changes;
pub mod clock;

use crate::quota::amount::Micros;
use crate::quota::policy::{Policy, RegionName};
use crate::quota::pool::{Applied, Op, Pool, Stamp};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;
use tokio::time::Instant;

pub use changes::{ChangeFeed, Changes};

/// How one region takes part.
#[derive(Clone, Debug)]
pub struct RaftConfig {
    /// This region.
    pub region: RegionName,
    /// The cluster's name; peers of another cluster are refused.
    pub cluster: String,
    /// The first voters and the URLs of their peer listeners, this region among them. The same in every region.
    pub regions: Vec<(RegionName, String)>,
    /// Where the log and the snapshots live. Belongs to one region of one cluster for good.
    pub data_dir: PathBuf,
    /// Mutual TLS between regions; without it only loopback peers are accepted.
    pub tls: Option<PeerTls>,
    /// The longest round trip between two regions. Every timeout follows from it.
    pub rtt_max: Duration,
}

/// The longest round trip between regions that is assumed where nobody says otherwise.
pub const RTT_MAX_DEFAULT: Duration = Duration::from_millis(250);

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

/// Why Raft could not start or do what an operator asked for.
#[derive(Debug, thiserror::Error)]
pub enum RaftError {
    /// The configuration cannot work.
    #[error("{0}")]
    Config(String),
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
}

/// The most operations in one log entry, and so in one proposal.
pub const OPS_MAX: usize = 4_096;
/// The most bytes in one log entry, encoded.
pub const ENTRY_BYTES_MAX: usize = 1_024 * 1_024;

/// The local replica of the pool, to be read under a short lock.
#[derive(Clone, Debug, Default)]
pub struct SharedPool(Arc<RwLock<Pool>>);

impl SharedPool {
    /// Locks it for reading. Entries wait meanwhile: read what you need, and do not hold this across an `await`.
    pub fn read(&self) -> RwLockReadGuard<'_, Pool> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The newest stamp applied on this replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppliedAt {
    /// The stamp.
    pub stamp: Stamp,
    /// When it was applied, on [`clock::now`]'s clock.
    pub at: Micros,
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
    /// openraft's node id.
    pub id: u64,
    /// This region.
    pub region: RegionName,
    /// What it does.
    pub role: Role,
    /// Who leads, as far as this region knows.
    pub leader: Option<RegionName>,
    /// Raft's term.
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

/// One region's part in the cluster. Cheap to clone; all clones are the same node.
#[derive(Clone, Debug)]
pub struct Raft {}

impl Raft {
    /// Opens or creates the data directory, joins or founds the cluster, and returns at once: a leader may be elected
    /// only later. On first start every region founds the cluster with the same voters, and whichever becomes leader
    /// gives it its regions and `first_policies`. Serve [`Self::peer_router`] (or [`Self::serve_peers`]) from then on.
    ///
    /// # Errors
    /// If the configuration cannot work, the data directory belongs to another region or is damaged, or the directory is
    /// empty though a peer knows this region as one that has data.
    pub async fn start(_config: RaftConfig, _first_policies: Vec<Policy>) -> Result<Self, RaftError> {
        unimplemented!()
    }

    /// Proposes operations, in one entry, from any region; returns what that entry did when it was applied by the
    /// leader (the entry may hold other regions' operations too).
    ///
    /// # Errors
    /// See [`ProposeError`].
    pub async fn propose(&self, _ops: Vec<Op>, _deadline: Instant) -> Result<Applied, ProposeError> {
        unimplemented!()
    }

    /// This region's replica of the pool.
    #[must_use]
    pub fn pool(&self) -> SharedPool {
        unimplemented!()
    }

    /// What is applied on this replica from now on. A slow reader misses nothing and costs bounded memory.
    #[must_use]
    pub fn changes(&self) -> ChangeFeed {
        unimplemented!()
    }

    /// The newest stamp applied here, and when.
    #[must_use]
    pub fn applied_at(&self) -> AppliedAt {
        unimplemented!()
    }

    /// The state of this node and what it knows of the others.
    #[must_use]
    pub fn status(&self) -> RaftStatus {
        unimplemented!()
    }

    /// Hands leadership to another region; returns once that region leads.
    ///
    /// # Errors
    /// If this region does not lead, the other is no voter, or it did not take over within two election timeouts.
    pub async fn transfer_leader(&self, _to: &RegionName) -> Result<(), RaftError> {
        unimplemented!()
    }

    /// Stops taking part; what was acknowledged is on disk.
    pub async fn shutdown(&self) {
        unimplemented!()
    }

    /// The peer wire's routes.
    pub fn peer_router(&self) -> axum::Router {
        unimplemented!()
    }

    /// Serves the peer wire on `listener`, with mutual TLS if configured, until [`Self::shutdown`]. Bounded connections
    /// and handshakes; without TLS only loopback peers are let in.
    ///
    /// # Errors
    /// If the TLS files cannot be read.
    pub async fn serve_peers(&self, _listener: tokio::net::TcpListener) -> Result<(), RaftError> {
        unimplemented!()
    }
}
