//! The disk that a log is on: what is written is read back at once, and survives a crash once it is synced.

use super::home;
use crate::raft::log::{READ_BYTES, half_open, payload_bytes};
use crate::raft::task;
use crate::raft::types::{LogEntry, LogId, TypeConfig, Vote};
use openraft::OptionalSend;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::io;
use std::ops::RangeBounds;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{mpsc, oneshot};

/// A disk. Clones are the same disk.
#[derive(Clone, Debug, Default)]
pub struct Disk(Arc<Mutex<Platters>>);

#[derive(Debug, Default)]
struct Platters {
    /// What a running process reads.
    written: Contents,
    /// What is there after a crash.
    durable: Contents,
    /// The difference, oldest first.
    unsynced: VecDeque<Write>,
    /// Writes that are durable.
    synced: u64,
}

#[derive(Clone, Debug, Default)]
struct Contents {
    vote: Option<Vote>,
    committed: Option<LogId>,
    purged: Option<LogId>,
    entries: BTreeMap<u64, LogEntry>,
}

#[derive(Clone, Debug)]
enum Write {
    Vote(Vote),
    Committed(LogId),
    Entry(LogEntry),
    /// The entries from this one on are deleted.
    Truncate(u64),
    /// The entries up to this one are deleted.
    Purge(LogId),
}

impl Contents {
    fn apply(&mut self, write: Write) {
        match write {
            Write::Vote(vote) => self.vote = Some(vote),
            Write::Committed(log_id) => self.committed = Some(log_id),
            Write::Entry(entry) => drop(self.entries.insert(entry.log_id.index, entry)),
            Write::Truncate(from) => drop(self.entries.split_off(&from)),
            Write::Purge(log_id) => {
                self.purged = self.purged.max(Some(log_id));
                self.entries = self.entries.split_off(&log_id.index.saturating_add(1));
            }
        }
    }
}

impl Disk {
    /// The machine crashes: of the writes that were not synced, a number that `kept` chooses (0 to as many as there are)
    /// is there afterwards, the oldest. Returns how many are lost.
    pub fn crash(&self, kept: impl FnOnce(usize) -> usize) -> usize {
        let mut platters = self.lock();
        let kept = kept(platters.unsynced.len()).min(platters.unsynced.len());
        platters.sync(kept);
        platters.written = platters.durable.clone();
        let lost = platters.unsynced.len();
        platters.unsynced.clear();
        lost
    }

    /// Everything on it is gone.
    pub fn wipe(&self) {
        *self.lock() = Platters::default();
    }

    /// Opens the log on it. Needs to be called on the machine.
    pub(super) fn open(&self) -> DiskLog {
        let (syncs, waiting) = mpsc::unbounded_channel();
        task::spawn(sync(self.clone(), waiting));
        DiskLog { disk: self.clone(), syncs }
    }

    fn lock(&self) -> MutexGuard<'_, Platters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Platters {
    fn write(&mut self, write: Write) {
        self.written.apply(write.clone());
        self.unsynced.push_back(write);
    }

    fn sync(&mut self, writes: usize) {
        for write in self.unsynced.drain(..writes) {
            self.durable.apply(write);
            self.synced = self.synced.saturating_add(1);
        }
    }

    /// How many writes there have been.
    fn writes(&self) -> u64 {
        self.synced.saturating_add(self.unsynced.len().try_into().unwrap_or(u64::MAX))
    }
}

/// Who waits for a sync, and of how many writes.
type Sync = (u64, Waiter);

enum Waiter {
    Nobody,
    Raft(IOFlushed<TypeConfig>),
    Task(oneshot::Sender<()>),
}

/// Syncs, one after the other; those that come while one is under way are done together.
async fn sync(disk: Disk, mut waiting: mpsc::UnboundedReceiver<Sync>) {
    while let Some(first) = waiting.recv().await {
        let mut group = vec![first];
        while let Ok(next) = waiting.try_recv() {
            group.push(next);
        }
        if let Some(home) = home() {
            tokio::time::sleep(home.sync_takes()).await;
        }
        for (writes, waiter) in group {
            {
                let mut platters = disk.lock();
                let due = writes.saturating_sub(platters.synced);
                platters.sync(due.try_into().unwrap_or(usize::MAX));
            }
            match waiter {
                Waiter::Nobody => (),
                Waiter::Raft(callback) => callback.io_completed(Ok(())),
                // Whoever waited may have been dropped.
                Waiter::Task(done) => drop(done.send(())),
            }
        }
    }
}

/// The log of one node, for one life of its process.
#[derive(Clone, Debug)]
pub struct DiskLog {
    disk: Disk,
    syncs: mpsc::UnboundedSender<Sync>,
}

impl Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nobody => "nobody",
            Self::Raft(_) => "openraft",
            Self::Task(_) => "a task",
        })
    }
}

impl DiskLog {
    /// The last entry that has been deleted, if any.
    pub fn purged(&self) -> Option<LogId> {
        self.disk.lock().written.purged
    }

    fn write(&self, writes: impl IntoIterator<Item = Write>, waiter: Waiter) -> io::Result<()> {
        let mut platters = self.disk.lock();
        writes.into_iter().for_each(|write| platters.write(write));
        let sync = (platters.writes(), waiter);
        self.syncs.send(sync).map_err(|_| io::Error::other("the disk is gone"))
    }

    async fn write_synced(&self, write: Write) -> io::Result<()> {
        let (done, synced) = oneshot::channel();
        self.write([write], Waiter::Task(done))?;
        synced.await.map_err(|_| io::Error::other("the disk is gone"))
    }

    fn read(&self, from: u64, to: u64, bytes: usize) -> Vec<LogEntry> {
        if from >= to {
            return Vec::new();
        }
        let mut left = bytes;
        let mut entries = Vec::new();
        for entry in self.disk.lock().written.entries.range(from..to).map(|(_, entry)| entry) {
            let size = payload_bytes(&entry.payload);
            if size > left && !entries.is_empty() {
                break;
            }
            left = left.saturating_sub(size);
            entries.push(entry.clone());
        }
        entries
    }
}

impl RaftLogReader<TypeConfig> for DiskLog {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<LogEntry>> {
        let (from, to) = half_open(&range);
        Ok(self.read(from, to, usize::MAX))
    }

    async fn limited_get_log_entries(&mut self, start: u64, end: u64) -> io::Result<Vec<LogEntry>> {
        Ok(self.read(start, end, READ_BYTES))
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.disk.lock().written.vote)
    }
}

impl RaftLogStorage<TypeConfig> for DiskLog {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<TypeConfig>> {
        let platters = self.disk.lock();
        let Contents { purged, entries, .. } = &platters.written;
        let last = entries.last_key_value().map(|(_, entry)| entry.log_id);
        Ok(LogState { last_purged_log_id: *purged, last_log_id: last.max(*purged) })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        self.write_synced(Write::Vote(*vote)).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        self.write(committed.map(Write::Committed), Waiter::Nobody)
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.disk.lock().written.committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<TypeConfig>) -> io::Result<()>
    where
        I: IntoIterator<Item = LogEntry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        self.write(entries.into_iter().map(Write::Entry), Waiter::Raft(callback))
    }

    async fn truncate_after(&mut self, last_log_id: Option<LogId>) -> io::Result<()> {
        let next = last_log_id.map_or(0, |id| id.index.saturating_add(1));
        self.write_synced(Write::Truncate(next)).await
    }

    async fn purge(&mut self, log_id: LogId) -> io::Result<()> {
        self.write_synced(Write::Purge(log_id)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::pool::Entry;
    use crate::raft::machine::Machine;
    use crate::raft::snapshot::SnapshotDir;
    use crate::raft::types::{Command, LeaderId};
    use openraft::entry::RaftEntry;
    use openraft::storage::RaftLogStorageExt;
    use openraft::testing::log::{StoreBuilder, Suite};
    use openraft::{EntryPayload, StorageError};
    use tempfile::TempDir;

    struct Stores;

    impl StoreBuilder<TypeConfig, DiskLog, Machine, TempDir> for Stores {
        async fn build(&self) -> Result<(TempDir, DiskLog, Machine), StorageError<TypeConfig>> {
            let temp = tempfile::tempdir().unwrap();
            let snapshots = SnapshotDir::open(temp.path().join("snapshots")).unwrap();
            let machine = Machine::open(1, snapshots, None).unwrap();
            Ok((temp, Disk::default().open(), machine))
        }
    }

    #[tokio::test]
    async fn openrafts_own_suite_passes() {
        Suite::test_all(Stores).await.unwrap();
    }

    fn entry(index: u64) -> LogEntry {
        let log_id = LogId { leader_id: LeaderId { term: 1, node_id: 1 }, index };
        RaftEntry::new(log_id, EntryPayload::Normal(Command::new(Entry::default())))
    }

    async fn last(log: &mut DiskLog) -> Option<u64> {
        log.get_log_state().await.unwrap().last_log_id.map(|id| id.index)
    }

    #[tokio::test]
    async fn a_crash_loses_what_was_not_synced() {
        let disk = Disk::default();
        let mut log = disk.open();
        log.blocking_append((1..=5).map(entry)).await.unwrap();
        log.truncate_after(Some(entry(4).log_id)).await.unwrap();
        log.purge(entry(1).log_id).await.unwrap();
        let vote = Vote { leader_id: LeaderId { term: 3, node_id: 1 }, committed: true };
        log.save_vote(&vote).await.unwrap();
        log.write((5..=9).map(|n| Write::Entry(entry(n))), Waiter::Nobody).unwrap();
        assert_eq!(last(&mut log).await, Some(9), "it is read back before it is synced");
        assert_eq!(disk.crash(|unsynced| unsynced - 3), 3);
        let mut log = disk.open();
        assert_eq!(last(&mut log).await, Some(6));
        assert_eq!(log.try_get_log_entries(..).await.unwrap(), (2..=6).map(entry).collect::<Vec<_>>());
        assert_eq!((log.purged(), log.read_vote().await.unwrap()), (Some(entry(1).log_id), Some(vote)));
        log.blocking_append([entry(7)]).await.unwrap();
        assert_eq!(disk.crash(|_| 0), 0, "what was acknowledged is durable");
        assert_eq!(last(&mut disk.open()).await, Some(7));
        disk.wipe();
        assert_eq!(last(&mut disk.open()).await, None);
    }
}
