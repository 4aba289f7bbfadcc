//! Peer messages, records of the log and snapshots from any bytes: see [`crate::fuzz`].

use super::log;
use super::network::wire::{self, Frames};
use super::snapshot;
use super::types::{AppendReply, AppendRequest, TypeConfig};
use crate::quota::amount::Micros;
use crate::quota::pool::{Entry, Op, Pool, Stamp};
use bytes::Bytes;
use openraft::EntryPayload;
use openraft::raft::{SnapshotResponse, TransferLeaderRequest, VoteRequest, VoteResponse};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::convert::Infallible;
use std::sync::LazyLock;

/// A body of the wire between regions: the first byte says of which kind, the rest is the body. What it would have a pool do
/// is done.
pub fn peer(data: &[u8]) {
    let Some((kind, body)) = data.split_first() else { return };
    match kind % 14 {
        0 => drop(again::<wire::Hello>(body)),
        1 => drop(again::<wire::HelloReply>(body)),
        2 => drop(again::<wire::Who>(body)),
        3 => drop(again::<wire::WhoReply>(body)),
        4 => drop(again::<wire::MemberChange>(body)),
        5 => drop(again::<wire::MemberReply>(body)),
        6 => drop(again::<VoteRequest<TypeConfig>>(body)),
        7 => drop(again::<VoteResponse<TypeConfig>>(body)),
        8 => drop(again::<AppendReply>(body)),
        9 => drop(again::<wire::SnapshotHead>(body)),
        10 => drop(again::<SnapshotResponse<TypeConfig>>(body)),
        11 => drop(again::<TransferLeaderRequest<TypeConfig>>(body)),
        12 => {
            if let Some(propose) = again::<wire::Propose>(body) {
                apply(vec![propose.ops]);
            }
        }
        _ => frames(body),
    }
}

/// A stream of entries, as a leader sends them.
fn frames(body: &[u8]) {
    let chunks: Vec<Result<Bytes, Infallible>> =
        body.chunks(7).map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect();
    let mut frames = Frames::new(futures::stream::iter(chunks), wire::APPEND_BYTES_MAX);
    while let Some(Ok(frame)) = futures::executor::block_on(frames.next()) {
        let Some(append) = again::<AppendRequest>(&frame) else { return };
        let commands = append.entries.into_iter().filter_map(|entry| match entry.payload {
            EntryPayload::Normal(command) => Some(command.entry().ops.clone()),
            _ => None,
        });
        apply(commands.collect());
    }
}

/// A record of the persisted log.
pub fn log(data: &[u8]) {
    log::read_any(data);
    if let Ok(entries) = postcard::from_bytes::<Vec<Entry>>(data) {
        apply(entries.into_iter().map(|entry| entry.ops).collect());
    }
}

/// A snapshot without its checksum, which would keep everything else out.
pub fn snapshot(data: &[u8]) {
    let content = [data, &crc32fast::hash(data).to_be_bytes()].concat();
    if let Ok((_, mut pool)) = snapshot::take_apart(&content) {
        let tau = pool.tau();
        pool.apply(pool.term(), &Entry { stamp: Stamp { term: pool.term(), tau }, ops: vec![] });
        let _ = pool.check();
    }
}

/// What can be read can be written and read again, to the same bytes.
fn again<T: Serialize + DeserializeOwned>(body: &[u8]) -> Option<T> {
    let value: T = wire::decode(body).ok()?;
    let written = wire::encode(&value).unwrap_or_default();
    let read: Option<T> = wire::decode(&written).ok();
    let rewritten = read.as_ref().and_then(|read| wire::encode(read).ok());
    assert_eq!(rewritten.as_ref(), Some(&written));
    read
}

/// Two regions with the example policies. The operations come from a peer that means ill (or is broken): the pool refuses what makes no
/// sense, and its books balance whatever comes.
fn apply(batches: Vec<Vec<Op>>) {
    static FOUNDED: LazyLock<Pool> = LazyLock::new(|| {
        let text = include_str!("../../config/policies.yaml");
        let policies = crate::fuzz::examples(text);
        let mut pool = Pool::default();
        let regions = vec!["ap-south".into(), "eu-west".into(), "us-east".into()];
        let entry =
            Entry { stamp: Stamp { term: 1, tau: Micros(1) }, ops: vec![Op::Found { regions, policies }] };
        pool.apply(1, &entry);
        pool
    });
    let mut pool = FOUNDED.clone();
    for (n, ops) in (1..).zip(batches) {
        let tau = pool.tau() + Micros::millis(500 * n);
        pool.apply(1, &Entry { stamp: Stamp { term: 1, tau }, ops });
        assert_eq!(pool.check(), Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_is_founded() {
        apply(vec![vec![]]);
        let body = wire::encode(&wire::Hello { founding: 7 }).unwrap();
        assert!(again::<wire::Hello>(&body).is_some());
    }
}
