//! openraft's type parameters, and what they look like on disk and on the wire.

use crate::quota::policy::RegionName;
pub(super) use crate::quota::pool::NODE_IDS;
use crate::quota::pool::{Applied, Entry};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::sync::Arc;

#[cfg(not(feature = "sim"))]
#[allow(deprecated)] // openraft deprecates its own name for this type, and its macro uses it.
type Runtime = openraft::impls::TokioRuntime;
#[cfg(feature = "sim")]
type Runtime = super::sim::SimRuntime;

openraft::declare_raft_types!(
    /// Leaders are ordered by (term, node id): two candidates of one term do not block each other, the greater id wins.
    pub TypeConfig:
        D = Command,
        R = Response,
        NodeId = u64,
        Node = PeerNode,
        LeaderId = openraft::impls::leader_id_adv::LeaderId<u64, u64>,
        AsyncRuntime = Runtime,
);

pub(super) type LogId = openraft::type_config::alias::LogIdOf<TypeConfig>;
pub(super) type LeaderId = openraft::type_config::alias::LeaderIdOf<TypeConfig>;
pub(super) type Vote = openraft::type_config::alias::VoteOf<TypeConfig>;
pub(super) type LogEntry = openraft::type_config::alias::EntryOf<TypeConfig>;
pub(super) type Payload = openraft::type_config::alias::EntryPayloadOf<TypeConfig>;
pub(super) type Membership = openraft::type_config::alias::StoredMembershipOf<TypeConfig>;
pub(super) type SnapshotMeta = openraft::type_config::alias::SnapshotMetaOf<TypeConfig>;
pub(super) type AppendRequest = openraft::raft::AppendEntriesRequest<TypeConfig>;
pub(super) type AppendReply = openraft::raft::StreamAppendResult<TypeConfig>;

/// The number of a leadership: grows with every new leader, also where openraft elects two within one term. It is what
/// the pool knows as the *term* (of entries and of stamps), so that a term has one leader there, as the protocol says.
pub(super) fn leadership(leader: &LeaderId) -> u64 {
    leader.term.saturating_mul(NODE_IDS).saturating_add(leader.node_id)
}

/// A log entry's own content. Cheap to clone: it is kept in the log's cache and sent to several peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    entry: Arc<Entry>,
    bytes: usize,
}

impl Command {
    /// Measures the entry.
    pub fn new(entry: Entry) -> Self {
        let bytes = encoded_len(&entry);
        Self { entry: Arc::new(entry), bytes }
    }

    /// The entry.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Its encoded size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stamp = self.entry.stamp;
        write!(f, "{} operations at {}us of term {}", self.entry.ops.len(), stamp.tau.0, stamp.term)
    }
}

impl Serialize for Command {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.entry.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Command {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Entry::deserialize(deserializer).map(Self::new)
    }
}

/// What applying an entry did, for whoever proposed it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response(pub Arc<Applied>);

/// A member of the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerNode {
    /// Its region.
    pub region: RegionName,
    /// Its peer URL when it joined; the configuration of a region may say better.
    pub url: String,
}

impl Default for PeerNode {
    fn default() -> Self {
        Self { region: "".into(), url: String::new() }
    }
}

impl fmt::Display for PeerNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.region)
    }
}

/// The size of a value in postcard.
pub(super) fn encoded_len<T: Serialize + ?Sized>(value: &T) -> usize {
    // Counting cannot fail; if it ever did, the value is too large for every limit.
    postcard::serialize_with_flavor(value, postcard::ser_flavors::Size::default()).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::pool::{Ack, Op, RegionId};

    #[test]
    fn commands_know_their_size() {
        let ops = (0..9).map(|v| Op::Ack(Ack { region: RegionId(1), version: v << 20 })).collect();
        let command = Command::new(Entry { ops, ..Entry::default() });
        let bytes = postcard::to_stdvec(&command).unwrap();
        assert_eq!(bytes.len(), command.bytes());
        assert_eq!(postcard::from_bytes::<Command>(&bytes).unwrap(), command);
    }

    #[test]
    fn leaderships_are_ordered_as_leaders_are() {
        let of = |term, node_id| leadership(&LeaderId { term, node_id });
        assert!(of(1, 3) < of(2, 1) && of(2, 1) < of(2, 2));
    }
}
