//! The durable Raft log: raft-log's write-ahead log behind openraft's traits.
//!
//! What is acknowledged has been synced: entries by the callback that openraft gives with them, votes and truncations
//! before the call returns. Syncs that arrive together are done together. The commit position is written without a
//! sync; it only saves replay time.

use super::types::{Command, LogEntry, LogId, Payload, TypeConfig, Vote};
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use openraft::{EntryPayload, OptionalSend};
use raft_log::api::raft_log_writer::RaftLogWriter;
use raft_log::{RaftLog, chunked_wal, codeq};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::io::{self, Read};
use std::ops::{Bound, RangeBounds};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;

/// Encoded bytes after which a batch of entries for a peer is full.
pub(super) const READ_BYTES: usize = 1_024 * 1_024;
/// A record of the log is never larger than this; a longer one is damage.
const RECORD_BYTES_MAX: u32 = 16 * 1_024 * 1_024;
/// The first byte of every record's content.
const FORMAT: u8 = 1;
/// One file of the log. Purged ones are deleted whole.
const CHUNK_BYTES: usize = 16 * 1_024 * 1_024;
const CHUNK_RECORDS: usize = 64 * 1_024;
/// Entries kept in memory for peers that are up to date.
const CACHE_BYTES: usize = 32 * 1_024 * 1_024;
const CACHE_ENTRIES: usize = 32 * 1_024;
/// How long a sync waits for others to join it.
const GROUP_WAIT: Duration = Duration::from_micros(100);
/// Bytes that may wait for the disk before appending blocks.
const FLUSH_QUEUE_BYTES: usize = 32 * 1_024 * 1_024;

/// The log of one node. Clones are the same log.
#[derive(Clone, Debug)]
pub struct LogStore {
    log: Arc<Mutex<RaftLog<Records>>>,
}

impl LogStore {
    /// Opens the log in `dir`, and makes it if there is none. A record that was cut short at the end (a crash while
    /// writing, never acknowledged) is dropped.
    ///
    /// # Errors
    /// If another process has it open, or it is damaged anywhere else.
    pub fn open(dir: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let dir = dir.to_str().ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not valid UTF-8", dir.display()))
        })?;
        let config = raft_log::Config {
            wal: chunked_wal::Config {
                dir: dir.to_owned(),
                read_buffer_size: Some(1_024 * 1_024),
                chunk_max_records: Some(CHUNK_RECORDS),
                chunk_max_size: Some(CHUNK_BYTES),
                truncate_incomplete_record: Some(true),
                flush_batch_wait: Some(GROUP_WAIT),
                flush_batch_max_items: None,
                flush_queue_max_bytes: Some(FLUSH_QUEUE_BYTES),
            },
            log_cache_max_items: Some(CACHE_ENTRIES),
            log_cache_capacity: Some(CACHE_BYTES),
        };
        let log = RaftLog::open(Arc::new(config))?;
        Ok(Self { log: Arc::new(Mutex::new(log)) })
    }

    /// The last entry that has been deleted, if any.
    pub fn purged(&self) -> Option<LogId> {
        self.lock().log_state().purged().map(|id| id.0)
    }

    fn lock(&self) -> MutexGuard<'_, RaftLog<Records>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a record and waits until it and everything before it is on disk.
    async fn write_synced(
        &self,
        write: impl FnOnce(&mut RaftLog<Records>) -> io::Result<()>,
    ) -> io::Result<()> {
        let (tx, rx) = oneshot::channel();
        {
            let mut log = self.lock();
            write(&mut log)?;
            log.flush(true, Some(Synced::Wait(tx)))?;
        }
        rx.await.map_err(|_| io::Error::other("the log's writer has stopped"))?
    }

    /// Entries `from..to` that exist, until they add up to `bytes` (but at least one).
    fn read(&self, from: u64, to: u64, bytes: usize) -> io::Result<Vec<LogEntry>> {
        if from >= to {
            return Ok(Vec::new());
        }
        let log = self.lock();
        let mut entries = Vec::new();
        let mut left = bytes;
        for record in log.read(from, to) {
            let (log_id, payload) = record?;
            let size = payload_bytes(&payload.0);
            if size > left && !entries.is_empty() {
                break;
            }
            left = left.saturating_sub(size);
            entries.push(LogEntry { log_id: log_id.0, payload: payload.0 });
        }
        Ok(entries)
    }
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<LogEntry>> {
        let (from, to) = half_open(&range);
        self.read(from, to, usize::MAX)
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<LogEntry>> {
        self.read(start, end, READ_BYTES)
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.lock().log_state().vote().map(|vote| vote.0))
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        let log = self.lock();
        let state = log.log_state();
        let last_purged_log_id = state.purged().map(|id| id.0);
        let last_log_id = state.last().map(|id| id.0).max(last_purged_log_id);
        Ok(LogState { last_purged_log_id, last_log_id })
    }

    async fn get_log_reader(&mut self) -> Self::LogReader {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        self.write_synced(|log| log.save_vote(Record(*vote)).map(drop)).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        let Some(committed) = committed else { return Ok(()) };
        let mut log = self.lock();
        log.commit(Record(committed))?;
        // Synced too: after a power cut this node must not go back to policies older than those that it acknowledged.
        log.flush(true, None)
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.lock().log_state().committed().map(|id| id.0))
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = LogEntry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut log = self.lock();
        log.append(entries.into_iter().map(|entry| (Record(entry.log_id), Record(entry.payload))))?;
        log.flush(true, Some(Synced::Raft(callback)))
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> io::Result<()> {
        let next = last_log_id.map_or(0, |id| id.index.saturating_add(1));
        self.write_synced(|log| {
            let last = log.log_state().last().map(|id| id.0.index);
            if last.is_some_and(|last| last >= next) { log.truncate(next).map(drop) } else { Ok(()) }
        })
        .await
    }

    async fn purge(&mut self, log_id: LogId) -> io::Result<()> {
        self.write_synced(|log| log.purge(Record(log_id)).map(drop)).await
    }
}

pub(super) fn half_open(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let from = match range.start_bound() {
        Bound::Included(&from) => from,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let to = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&to) => to,
        Bound::Unbounded => u64::MAX,
    };
    (from, to)
}

pub(super) fn payload_bytes(payload: &Payload) -> usize {
    match payload {
        EntryPayload::Blank => 1,
        EntryPayload::Normal(command) => Command::bytes(command),
        EntryPayload::Membership(_) => 4_096,
    }
}

/// raft-log's type parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Records;

impl raft_log::Types for Records {
    type LogId = Record<LogId>;
    type LogPayload = Record<Payload>;
    type Vote = Record<Vote>;
    type Callback = Synced;
    type UserData = String;

    fn log_index(log_id: &Self::LogId) -> u64 {
        log_id.0.index
    }

    fn payload_size(payload: &Self::LogPayload) -> u64 {
        // What it takes in memory is about twice what it takes on disk.
        u64::try_from(payload_bytes(&payload.0)).unwrap_or(u64::MAX).saturating_mul(2)
    }
}

/// Who waits for a sync.
enum Synced {
    Raft(IOFlushed<TypeConfig>),
    Wait(oneshot::Sender<io::Result<()>>),
}

impl raft_log::Callback for Synced {
    fn send(self, result: io::Result<()>) {
        match self {
            Self::Raft(callback) => callback.io_completed(result),
            // Whoever waited may have been dropped.
            Self::Wait(tx) => drop(tx.send(result)),
        }
    }
}

/// A value in the log: a format byte, its length, and itself in postcard. (raft-log adds checksums.)
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Record<T>(T);

impl<T: Serialize> codeq::Encode for Record<T> {
    fn encode<W: io::Write>(&self, mut writer: W) -> io::Result<usize> {
        let content = postcard::to_stdvec(&self.0).map_err(io::Error::other)?;
        let length =
            u32::try_from(content.len()).ok().filter(|&n| n <= RECORD_BYTES_MAX).ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("a log record of {} bytes is too large", content.len()),
                )
            })?;
        writer.write_all(&[FORMAT])?;
        writer.write_all(&length.to_be_bytes())?;
        writer.write_all(&content)?;
        Ok(content.len().saturating_add(5))
    }
}

impl<T: DeserializeOwned> codeq::Decode for Record<T> {
    fn decode<R: Read>(mut reader: R) -> io::Result<Self> {
        let mut format = [0; 1];
        reader.read_exact(&mut format)?;
        if format != [FORMAT] {
            return Err(damaged(format!("has format {}, this version reads {FORMAT}", format[0])));
        }
        let mut length = [0; 4];
        reader.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length);
        if length > RECORD_BYTES_MAX {
            return Err(damaged(format!("claims {length} bytes")));
        }
        let mut content = Vec::new();
        reader.by_ref().take(u64::from(length)).read_to_end(&mut content)?;
        if u32::try_from(content.len()) != Ok(length) {
            // The end of the file: a record that was cut short.
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        postcard::from_bytes(&content).map(Self).map_err(|e| damaged(e.to_string()))
    }
}

/// Reads a record of each kind, whatever it is.
#[cfg(any(test, fuzzing))]
pub(super) fn read_any(data: &[u8]) {
    use codeq::Decode as _;
    let _ = Record::<LogId>::decode(data);
    let _ = Record::<Vote>::decode(data);
    let _ = Record::<Payload>::decode(data);
}

fn damaged(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a record of the log is damaged: {what}"))
}

#[cfg(test)]
mod tests {
    use super::super::types::LeaderId;
    use super::*;
    use crate::quota::pool::{Entry, Op, SetPolicies};
    use openraft::entry::RaftEntry;
    use openraft::storage::RaftLogStorageExt;
    use std::path::PathBuf;

    fn log_id(index: u64) -> LogId {
        LogId { leader_id: LeaderId { term: 1, node_id: 1 }, index }
    }

    fn entry(index: u64, ops: usize) -> LogEntry {
        let op = Op::SetPolicies(SetPolicies { expected: Some(index), policies: vec![] });
        let command = Command::new(Entry { ops: vec![op; ops], ..Entry::default() });
        RaftEntry::new(log_id(index), EntryPayload::Normal(command))
    }

    async fn written(dir: &Path, entries: u64) -> PathBuf {
        let mut log = LogStore::open(dir).unwrap();
        let vote = Vote { leader_id: LeaderId { term: 4, node_id: 2 }, committed: true };
        log.save_vote(&vote).await.unwrap();
        log.blocking_append((0..entries).map(|index| entry(index, 50))).await.unwrap();
        drop(log);
        let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.retain(|path| path.extension().is_some_and(|ext| ext == "wal"));
        files.sort_unstable();
        files.pop().unwrap()
    }

    #[tokio::test]
    async fn what_was_acknowledged_is_read_back() {
        let temp = tempfile::tempdir().unwrap();
        written(temp.path(), 20).await;
        let mut log = LogStore::open(temp.path()).unwrap();
        assert_eq!(log.read_vote().await.unwrap().map(|vote| vote.leader_id.term), Some(4));
        let entries = log.try_get_log_entries(3..=5).await.unwrap();
        assert_eq!(entries, [entry(3, 50), entry(4, 50), entry(5, 50)]);
        log.purge(log_id(9)).await.unwrap();
        log.truncate_after(Some(log_id(15))).await.unwrap();
        let state = log.get_log_state().await.unwrap();
        assert_eq!((state.last_purged_log_id, state.last_log_id), (Some(log_id(9)), Some(log_id(15))));
        assert!(LogStore::open(temp.path()).is_err(), "one process at a time");
    }

    #[tokio::test]
    async fn a_torn_tail_is_cut_and_damage_inside_refuses() {
        let temp = tempfile::tempdir().unwrap();
        let file = written(temp.path(), 20).await;
        let good = std::fs::read(&file).unwrap();
        std::fs::write(&file, &good[..good.len() - 7]).unwrap();
        let mut log = LogStore::open(temp.path()).unwrap();
        assert_eq!(log.get_log_state().await.unwrap().last_log_id, Some(log_id(18)));
        log.blocking_append([entry(19, 1)]).await.unwrap();
        drop(log);

        let mut bad = good.clone();
        bad[good.len() / 2] ^= 1;
        std::fs::write(&file, &bad).unwrap();
        assert_eq!(LogStore::open(temp.path()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn a_batch_for_a_peer_is_bounded() {
        let temp = tempfile::tempdir().unwrap();
        let mut log = LogStore::open(temp.path()).unwrap();
        log.blocking_append((0..4).map(|index| entry(index, 200_000))).await.unwrap();
        let size = payload_bytes(&entry(0, 200_000).payload);
        let batch = log.limited_get_log_entries(0, 4).await.unwrap();
        assert_eq!(batch.len(), READ_BYTES / size);
        assert!(!batch.is_empty() && batch.len() < 4);
        log.blocking_append([entry(4, 600_000)]).await.unwrap();
        assert_eq!(log.limited_get_log_entries(4, 5).await.unwrap().len(), 1, "one always fits");
        assert!(log.limited_get_log_entries(9, 3).await.unwrap().is_empty());
    }

    #[test]
    fn records_of_another_format_are_refused() {
        let decode = |bytes: &[u8]| <Record<u64> as codeq::Decode>::decode(bytes).unwrap_err();
        assert!(decode(&[2, 0, 0, 0, 1, 7]).to_string().contains("format 2"));
        assert!(decode(&[1, 255, 0, 0, 1, 7]).to_string().contains("claims"));
        assert_eq!(decode(&[1, 0, 0, 0, 9, 7]).kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(decode(&[1, 0, 0, 0, 1, 255]).kind(), io::ErrorKind::InvalidData);
    }
}
