//! The replicated state machine: for each bucket, one pool, cut out of the policy's rate and burst.

pub mod entry;

pub use entry::{Ack, Applied, Ask, Entry, Join, Op, PolicyOutcome, RegionId, SetPolicies, Stamp};

use super::amount::Micros;
use super::policy::RegionName;
use serde::{Deserialize, Serialize};

/// The pool of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    regions: Vec<RegionName>,
    tau: Micros,
    term: u64,
}

impl Pool {
    /// Applies one committed log entry; the only door to the state.
    pub fn apply(&mut self, term: u64, entry: &Entry) -> Applied {
        self.term = term;
        if entry.stamp.term != term {
            return Applied { refused: true, ..Applied::default() };
        }
        self.tau = self.tau.max(entry.stamp.tau);
        for op in &entry.ops {
            if let Op::Found { regions, .. } = op
                && self.regions.is_empty()
            {
                self.regions.clone_from(regions);
            }
        }
        Applied::default()
    }

    /// The Raft clock: the newest stamp that counted.
    #[must_use]
    pub fn tau(&self) -> Micros {
        self.tau
    }

    /// The term of the last entry.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term
    }

    /// The regions of the cluster; [`RegionId`] indexes into it.
    #[must_use]
    pub fn regions(&self) -> &[RegionName] {
        &self.regions
    }
}
