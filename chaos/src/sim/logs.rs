//! Which log a run is on: the simulation's own small Raft, or the product's.

use super::openraft::{self, Openrafts};
use super::raft::{Rafts, SimLog};
use quorate::quota::pool::{Applied, Op, Stamp};
use quorate::raft::{AppliedAt, ChangeFeed, Log, ProposeError, Raft, SharedPool};
use std::sync::Arc;
use tokio::time::Instant;

/// Which log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// The simulation's own Raft: small, fast, its every step left to the seed.
    #[default]
    Small,
    /// The product's openraft, with its gathering, forwarding, snapshots and wire.
    Openraft,
}

impl std::str::FromStr for Kind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "small" => Ok(Self::Small),
            "openraft" => Ok(Self::Openraft),
            _ => Err(format!("there is no log `{name}`; there are small, openraft")),
        }
    }
}

/// The log of a run. Cheap to clone.
#[derive(Clone, Debug)]
pub enum Logs {
    /// See [`Kind::Small`].
    Small(Arc<Rafts>),
    /// See [`Kind::Openraft`].
    Openraft(Arc<Openrafts>),
}

impl Logs {
    /// The daemon of a region starts (again); `node` is the id that the pool knows it by. `ready` is called with its way to the log; never, if it crashes before.
    pub fn start(&self, region: usize, node: u64, ready: impl FnOnce(AnyLog) + Send + 'static) {
        match self {
            Self::Small(rafts) => {
                rafts.start(region);
                ready(AnyLog::Small(rafts.log(region, node)));
            }
            Self::Openraft(rafts) => {
                let rafts = Arc::clone(rafts);
                tokio::spawn(async move {
                    match rafts.start(region).await {
                        Ok(Some(raft)) => ready(AnyLog::Openraft(raft)),
                        Ok(None) => (),
                        Err(fault) => rafts.note(format!("r{region} does not start: {fault:#}")),
                    }
                });
            }
        }
    }

    /// A region's daemon is gone (after `Machine::crash`), in good order or not.
    pub fn crash(&self, region: usize, in_order: bool) {
        match self {
            Self::Small(rafts) => rafts.crash(region),
            Self::Openraft(rafts) => rafts.crash(region, !in_order && rafts.power_fails()),
        }
    }

    /// A region's way to the log, if its daemon runs; `node` is the id that the pool knows it by.
    #[must_use]
    pub fn log(&self, region: usize, node: u64) -> Option<AnyLog> {
        match self {
            Self::Small(rafts) => Some(AnyLog::Small(rafts.log(region, node))),
            Self::Openraft(rafts) => rafts.raft(region).map(AnyLog::Openraft),
        }
    }

    /// Can regions join and leave? The product's Raft has its own way to do that, which only a whole daemon walks.
    #[must_use]
    pub fn lets_members_change(&self) -> bool {
        matches!(self, Self::Small(_))
    }

    /// A region's disk is gone; it must not be among the voters.
    pub fn lose_disk(&self, region: usize) {
        if let Self::Small(rafts) = self {
            rafts.lose_disk(region);
        }
    }

    /// Who votes, as a leader knows it for certain, where members change.
    #[must_use]
    pub fn voters(&self) -> Option<Vec<usize>> {
        match self {
            Self::Small(rafts) => Some(rafts.voters()),
            Self::Openraft(_) => None,
        }
    }

    /// Makes these the voters: one more or one less than there are.
    pub fn set_voters(&self, voters: Vec<usize>) {
        if let Self::Small(rafts) = self {
            rafts.set_voters(voters);
        }
    }

    /// The region stands for election at once; the product's is handed over leadership.
    pub fn stand(&self, region: usize) {
        match self {
            Self::Small(rafts) => rafts.stand(region),
            Self::Openraft(rafts) => rafts.hand_over_to(region),
        }
    }

    /// What an entry would be stamped with now, where that is known.
    #[must_use]
    pub fn stamp(&self) -> Option<Stamp> {
        match self {
            Self::Small(rafts) => rafts.stamp_now(),
            Self::Openraft(_) => None,
        }
    }

    /// What happened in the product's own Raft, if it is that.
    #[must_use]
    pub fn counts(&self) -> Option<openraft::Counts> {
        match self {
            Self::Small(_) => None,
            Self::Openraft(rafts) => Some(rafts.counts()),
        }
    }

    /// How the nodes are, in words.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Small(rafts) => rafts.describe(),
            Self::Openraft(rafts) => rafts.describe(),
        }
    }

    /// What is wrong with the log itself.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        match self {
            Self::Small(rafts) => rafts.fault(),
            Self::Openraft(rafts) => rafts.fault(),
        }
    }
}

/// A region's way to the log.
#[derive(Clone, Debug)]
pub enum AnyLog {
    /// See [`Kind::Small`].
    Small(SimLog),
    /// See [`Kind::Openraft`].
    Openraft(Raft),
}

impl Log for AnyLog {
    async fn propose(&self, ops: Vec<Op>, deadline: Instant) -> Result<Applied, ProposeError> {
        match self {
            Self::Small(log) => log.propose(ops, deadline).await,
            Self::Openraft(log) => log.propose(ops, deadline).await,
        }
    }

    fn pool(&self) -> SharedPool {
        match self {
            Self::Small(log) => log.pool(),
            Self::Openraft(log) => log.pool(),
        }
    }

    fn changes(&self) -> ChangeFeed {
        match self {
            Self::Small(log) => log.changes(),
            Self::Openraft(log) => log.changes(),
        }
    }

    fn applied_at(&self) -> AppliedAt {
        match self {
            Self::Small(log) => log.applied_at(),
            Self::Openraft(log) => log.applied_at(),
        }
    }

    fn node_id(&self) -> Option<u64> {
        match self {
            Self::Small(log) => log.node_id(),
            Self::Openraft(log) => Log::node_id(log),
        }
    }

    fn acknowledged(&self) -> u64 {
        match self {
            Self::Small(log) => log.acknowledged(),
            Self::Openraft(log) => log.acknowledged(),
        }
    }

    async fn acknowledge(&self, version: u64) -> std::io::Result<()> {
        match self {
            Self::Small(log) => log.acknowledge(version).await,
            Self::Openraft(log) => log.acknowledge(version).await,
        }
    }

    fn is_known_to_all(&self, level: u32) -> bool {
        match self {
            Self::Small(log) => log.is_known_to_all(level),
            Self::Openraft(log) => log.is_known_to_all(level),
        }
    }

    fn leads(&self) -> bool {
        match self {
            Self::Small(log) => log.leads(),
            Self::Openraft(log) => log.leads(),
        }
    }
}
