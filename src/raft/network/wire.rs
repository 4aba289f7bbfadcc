//! What both ends agree on: paths, headers, bodies, frames, limits.

use crate::quota::policy::RegionName;
use crate::quota::pool::{Applied, Op};
use crate::raft::types::{SnapshotMeta, Vote};
use crate::raft::{ENTRY_BYTES_MAX, ProposeError, log};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::{Stream, StreamExt};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The version of all this. Peers of another one are refused.
pub(crate) const PROTOCOL: &str = "1";
/// The first byte of every body and frame.
const FORMAT: u8 = 1;

/// Small calls: votes, pings, leader transfers, heartbeats.
pub(crate) const CALL_BYTES_MAX: usize = 64 * 1_024;
/// A batch of entries: the batch's own limit, one entry more, and some room for what surrounds them.
pub(crate) const APPEND_BYTES_MAX: usize = log::READ_BYTES + ENTRY_BYTES_MAX + CALL_BYTES_MAX;
/// A proposal.
pub(crate) const PROPOSE_BYTES_MAX: usize = ENTRY_BYTES_MAX + CALL_BYTES_MAX;
/// The answer to a proposal: what 4,096 operations did.
pub(crate) const APPLIED_BYTES_MAX: usize = 4 * 1_024 * 1_024;

pub(crate) mod path {
    pub const HELLO: &str = "/peer/v1/hello";
    pub const VOTE: &str = "/peer/v1/vote";
    pub const PRE_VOTE: &str = "/peer/v1/pre-vote";
    pub const APPEND: &str = "/peer/v1/append";
    pub const APPEND_STREAM: &str = "/peer/v1/append-stream";
    pub const SNAPSHOT: &str = "/peer/v1/snapshot";
    pub const TRANSFER: &str = "/peer/v1/transfer-leader";
    pub const PROPOSE: &str = "/peer/v1/propose";
    /// For whoever asks, also a region that is no peer (yet): see [`super::Who`].
    pub const WHO: &str = "/peer/v1/who";
    pub const MEMBERS: &str = "/peer/v1/members";
    pub const QUESTION: &str = "/peer/v1/question";
}

pub(crate) mod header {
    pub const PROTOCOL: &str = "x-quorate-protocol";
    pub const CLUSTER: &str = "x-quorate-cluster";
    /// The sender's region and the instance of its data directory; in answers, the answering side's.
    pub const REGION: &str = "x-quorate-region";
    pub const INSTANCE: &str = "x-quorate-instance";
    /// The sender's node id; in answers, the answering side's.
    pub const NODE: &str = "x-quorate-node";
    /// Who is meant, and which node and instance of it, where the sender knows.
    pub const TO: &str = "x-quorate-to";
    pub const TO_NODE: &str = "x-quorate-to-node";
    pub const TO_INSTANCE: &str = "x-quorate-to-instance";
    /// Sums up how the sender names its buckets; left out where it redacts nothing. In answers, the answering side's.
    pub const REDACTION: &str = "x-quorate-redaction";
    /// The level of operations that the sender applies ([`crate::quota::pool::LEVEL`]); left out by those of level 1. In answers, the
    /// answering side's.
    pub const LEVEL: &str = "x-quorate-level";
    /// Why a call was refused before anything was done: a [`super::Refusal`].
    pub const REFUSED: &str = "x-quorate-refused";
}

/// Why a peer will not talk to another. Nothing has been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Refusal {
    /// Another version of the wire.
    Protocol,
    /// Another cluster.
    Cluster,
    /// The call was meant for another region.
    Target,
    /// The called region has other data than the caller knows it by, or takes itself for another node.
    TargetInstance,
    /// The caller is not a region of the cluster.
    Stranger,
    /// The caller has other data than it is known by.
    Instance,
    /// The caller has left the cluster, or has come back as another node since.
    Removed,
    /// The caller's certificate is not that of its region.
    Certificate,
    /// The two redact other values, or with another key: they would not share buckets.
    Redaction,
}

impl Refusal {
    const ALL: [Self; 9] = [
        Self::Protocol,
        Self::Cluster,
        Self::Target,
        Self::TargetInstance,
        Self::Stranger,
        Self::Instance,
        Self::Removed,
        Self::Certificate,
        Self::Redaction,
    ];

    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Protocol => "protocol",
            Self::Cluster => "cluster",
            Self::Target => "target",
            Self::TargetInstance => "target-instance",
            Self::Stranger => "stranger",
            Self::Instance => "instance",
            Self::Removed => "removed",
            Self::Certificate => "certificate",
            Self::Redaction => "redaction",
        }
    }

    /// What a person should know about it, from either side.
    pub fn means(self) -> &'static str {
        match self {
            Self::Protocol => {
                "the two speak other versions of the wire; run versions that are next to each other"
            }
            Self::Cluster => "the two are of other clusters; see cluster.name and cluster.regions",
            Self::Target => "the call was meant for another region; see the URLs in cluster.regions",
            Self::TargetInstance => "the called region has other data than the caller knows it by",
            Self::Stranger => "the caller is no region of the cluster; see `quorate region list`",
            Self::Instance => {
                "the caller has other data than it is known by; see docs/operations.md, A region lost its disk"
            }
            Self::Removed => "the caller has left the cluster",
            Self::Certificate => {
                "the caller's certificate is not that of its region; see docs/operations.md, Certificates"
            }
            Self::Redaction => {
                "`redact` or its key differ, and so would the names of buckets; make them the same in every region"
            }
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| refusal.name() == name)
    }
}

/// A ping, and what a starting node wants to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Sums up the list of first voters: all must agree before the cluster is founded.
    pub founding: u32,
}

/// The answer to a [`Hello`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HelloReply {
    /// See [`Hello::founding`].
    pub founding: u32,
    /// It has a log: the cluster has been founded.
    pub initialized: bool,
    /// Who leads, as far as it knows.
    pub leader: Option<RegionName>,
}

/// "Who is this region, and who are you all?" Asked by a node that has an empty data directory, and by those that may have
/// missed who has come.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Who {
    pub region: RegionName,
}

/// The answer to a [`Who`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WhoReply {
    /// It has a log: the cluster has been founded.
    pub initialized: bool,
    /// The region's node id, if it is in the cluster.
    pub seat: Option<u64>,
    /// How far it has applied the log: who has come further knows better.
    pub applied: u64,
    /// Index of the entry with these members.
    pub index: u64,
    /// The members: node id, region, peer URL.
    pub members: Vec<(u64, RegionName, String)>,
}

/// One change of who is in the Raft group, for the leader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MemberChange {
    /// The node follows the log, without a vote.
    Learn { node: u64, region: RegionName, url: String },
    /// It gets a vote.
    Promote { node: u64 },
    /// It loses its vote.
    Demote { node: u64 },
    /// It is no member any more.
    Forget { node: u64 },
    /// It is to lead.
    Lead { node: u64 },
}

/// What became of a [`MemberChange`].
pub(crate) type MemberReply = Result<(), MemberFault>;

/// Why nothing came of it, as it travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum MemberFault {
    /// It cannot be, and why.
    #[error("{0}")]
    Refused(String),
    /// Not now: ask again.
    #[error("{0}")]
    NotNow(String),
    /// It may have happened, or may yet.
    #[error("{0}")]
    Unknown(String),
}

/// What another region wants to know that is no business of Raft's: see [`crate::raft::Answers`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Question {
    pub body: Vec<u8>,
}

/// The answer to a [`Question`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct QuestionReply {
    pub body: Vec<u8>,
}

/// Operations on their way to the leader.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Propose {
    pub ops: Vec<Op>,
    /// How long the caller will wait, in milliseconds.
    pub wait_ms: u64,
    /// How often it may be passed on.
    pub hops: u8,
}

/// What became of a [`Propose`].
pub(crate) type ProposeReply = Result<Arc<Applied>, ProposeFault>;

/// [`ProposeError`], as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ProposeFault {
    NotSent {
        retry: bool,
    },
    Unknown,
    Refused,
    TooLarge,
    /// Only ever answered to those who propose what is too new for others.
    TooNew {
        node: u64,
    },
}

impl From<ProposeError> for ProposeFault {
    fn from(error: ProposeError) -> Self {
        match error {
            ProposeError::NotSent { retry } => Self::NotSent { retry },
            ProposeError::Unknown => Self::Unknown,
            ProposeError::Refused => Self::Refused,
            ProposeError::TooLarge => Self::TooLarge,
            ProposeError::TooNew { node } => Self::TooNew { node },
        }
    }
}

impl From<ProposeFault> for ProposeError {
    fn from(fault: ProposeFault) -> Self {
        match fault {
            ProposeFault::NotSent { retry } => Self::NotSent { retry },
            ProposeFault::Unknown => Self::Unknown,
            ProposeFault::Refused => Self::Refused,
            ProposeFault::TooLarge => Self::TooLarge,
            ProposeFault::TooNew { node } => Self::TooNew { node },
        }
    }
}

/// Comes before a snapshot's bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotHead {
    pub vote: Vote,
    pub meta: SnapshotMeta,
    pub bytes: u64,
}

/// What a peer sent does not make sense.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("format {0} is not known")]
    Format(u8),
    #[error("{0} bytes are more than the {1} that are allowed")]
    TooLarge(usize, usize),
    #[error("the content is malformed: {0}")]
    Malformed(#[from] postcard::Error),
    #[error("it ends too soon")]
    Short,
    #[error("{0} bytes follow the content")]
    Trailing(usize),
    #[error("the connection broke: {0}")]
    Broken(String),
}

/// A body: the format byte and the value.
pub(crate) fn encode<T: Serialize>(value: &T) -> Result<Bytes, WireError> {
    Ok(postcard::to_extend(value, vec![FORMAT])?.into())
}

/// The value of a body.
pub(crate) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, WireError> {
    match body.split_first() {
        Some((&FORMAT, content)) => match postcard::take_from_bytes(content)? {
            (value, []) => Ok(value),
            (_, rest) => Err(WireError::Trailing(rest.len())),
        },
        Some((&format, _)) => Err(WireError::Format(format)),
        None => Err(WireError::Short),
    }
}

/// A body with its length (4 bytes, big-endian) in front, for streams.
pub(crate) fn frame<T: Serialize>(value: &T) -> Result<Bytes, WireError> {
    let mut frame = vec![0; 4];
    frame.push(FORMAT);
    let mut frame = postcard::to_extend(value, frame)?;
    let length = frame.len().saturating_sub(4);
    let length = u32::try_from(length).map_err(|_| WireError::TooLarge(length, APPEND_BYTES_MAX))?;
    if let Some(head) = frame.first_chunk_mut() {
        *head = length.to_be_bytes();
    }
    Ok(frame.into())
}

/// Takes a byte stream apart again.
pub(crate) struct Frames<S> {
    bytes: S,
    max: usize,
    buffer: BytesMut,
}

impl<S, E> Frames<S>
where
    S: Stream<Item = Result<Bytes, E>> + Unpin,
    E: std::fmt::Display,
{
    /// Frames of at most `max` bytes.
    pub fn new(bytes: S, max: usize) -> Self {
        Self { bytes, max, buffer: BytesMut::new() }
    }

    /// The next frame's body; `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<Result<Bytes, WireError>> {
        loop {
            match self.cut() {
                Ok(Some(frame)) => return Some(Ok(frame)),
                Ok(None) => (),
                Err(fault) => return Some(Err(fault)),
            }
            match self.bytes.next().await {
                Some(Ok(bytes)) => self.buffer.put(bytes),
                Some(Err(e)) => return Some(Err(WireError::Broken(e.to_string()))),
                None if self.buffer.is_empty() => return None,
                None => return Some(Err(WireError::Short)),
            }
        }
    }

    /// The bytes behind the frames that were taken: those that have arrived, and the stream of the rest.
    pub fn into_rest(self) -> (Bytes, S) {
        (self.buffer.freeze(), self.bytes)
    }

    fn cut(&mut self) -> Result<Option<Bytes>, WireError> {
        let Some(head) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let length = usize::try_from(u32::from_be_bytes(*head)).unwrap_or(usize::MAX);
        if length > self.max {
            return Err(WireError::TooLarge(length, self.max));
        }
        if self.buffer.len() < length.saturating_add(4) {
            return Ok(None);
        }
        self.buffer.advance(4);
        Ok(Some(self.buffer.split_to(length).freeze()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(chunks: &[&[u8]], max: usize) -> Frames<impl Stream<Item = Result<Bytes, String>> + Unpin> {
        let chunks: Vec<_> = chunks.iter().map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
        Frames::new(futures::stream::iter(chunks), max)
    }

    #[tokio::test]
    async fn frames_survive_any_cutting() {
        let bytes = [frame(&"one").unwrap(), frame(&"three").unwrap()].concat();
        for size in 1..bytes.len() {
            let chunks: Vec<_> = bytes.chunks(size).collect();
            let mut frames = frames(&chunks, 100);
            for expected in ["one", "three"] {
                let body = frames.next().await.unwrap().unwrap();
                assert_eq!(decode::<String>(&body).unwrap(), expected);
            }
            assert!(frames.next().await.is_none());
        }
    }

    #[tokio::test]
    async fn nonsense_is_refused() {
        let long = frame(&"a very long string").unwrap();
        assert!(matches!(frames(&[&long], 5).next().await, Some(Err(WireError::TooLarge(20, 5)))));
        assert!(matches!(frames(&[&long[..9]], 99).next().await, Some(Err(WireError::Short))));
        assert!(matches!(decode::<u64>(&[9, 1]), Err(WireError::Format(9))));
        assert!(matches!(decode::<u64>(&[]), Err(WireError::Short)));
        assert!(matches!(decode::<u64>(&[1, 255]), Err(WireError::Malformed(_))));
        assert!(matches!(decode::<u64>(&[1, 7, 7]), Err(WireError::Trailing(1))));
        assert_eq!(decode::<u64>(&encode(&7_u64).unwrap()).unwrap(), 7);
        for refusal in Refusal::ALL {
            assert_eq!(Refusal::named(refusal.name()), Some(refusal));
        }
    }
}
