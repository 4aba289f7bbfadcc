//! openraft's shell round the pool: applies entries, tells readers, takes and installs snapshots.
//!
//! The pool is in memory. After a restart it is the newest snapshot plus the log behind it.

use super::replica::Replica;
use super::snapshot::{SnapshotDir, SnapshotFile};
use super::task::blocking;
use super::types::{LeaderId, LogId, Membership, PeerNode, Response, SnapshotMeta, TypeConfig, leadership};
use crate::quota::pool::Pool;
use futures::{Stream, TryStreamExt};
use openraft::storage::{EntryResponder, RaftSnapshotBuilder, RaftStateMachine, Snapshot};
use openraft::{EntryPayload, OptionalSend};
use std::io;
use std::sync::Arc;

/// A snapshot is due after so many bytes of entries (or [`super::LogLimits::snapshot_entries`] of them).
const SNAPSHOT_LOG_BYTES: usize = 64 * 1_024 * 1_024;

/// openraft's state machine.
#[derive(Debug)]
pub struct Machine {
    me: u64,
    replica: Arc<Replica>,
    snapshots: Arc<SnapshotDir>,
    applied: Option<LogId>,
    membership: Membership,
    /// Entries' bytes since the last snapshot was asked for.
    log_bytes: usize,
}

impl Machine {
    /// Restores the newest snapshot that can be read. The log goes on behind entry `purged`, or from its beginning.
    ///
    /// # Errors
    /// If there are snapshots, and none of them can be read and continued from the log.
    pub(super) fn open(me: u64, snapshots: SnapshotDir, purged: Option<LogId>) -> io::Result<Self> {
        let (meta, pool) = newest(&snapshots, purged)?;
        Ok(Self {
            me,
            replica: Arc::new(Replica::new(pool)),
            snapshots: Arc::new(snapshots),
            applied: meta.last_log_id,
            membership: meta.last_membership,
            log_bytes: 0,
        })
    }

    pub(super) fn replica(&self) -> Arc<Replica> {
        Arc::clone(&self.replica)
    }

    pub(super) fn snapshots(&self) -> Arc<SnapshotDir> {
        Arc::clone(&self.snapshots)
    }

    fn measure(&mut self, bytes: usize) {
        self.log_bytes = self.log_bytes.saturating_add(bytes);
        if self.log_bytes > SNAPSHOT_LOG_BYTES {
            self.log_bytes = 0;
            self.replica.snapshot_due.notify_one();
        }
    }
}

/// The newest snapshot from which the log goes on. The log has been purged up to a snapshot, so that an older one
/// helps only if the crash came before the purge.
fn newest(snapshots: &SnapshotDir, purged: Option<LogId>) -> io::Result<(SnapshotMeta, Pool)> {
    let mut first_fault = None;
    for path in snapshots.list()? {
        let fault = match snapshots.get(&path).and_then(|file| file.decode()) {
            Ok((meta, pool)) if purged <= meta.last_log_id => return Ok((meta, pool)),
            Ok(_) => io::Error::new(io::ErrorKind::InvalidData, "the log does not go back to this snapshot"),
            Err(fault) => fault,
        };
        let fault = io::Error::new(fault.kind(), format!("{}: {fault}", path.display()));
        tracing::error!(%fault, "cannot use a snapshot; trying the one before it");
        first_fault.get_or_insert(fault);
    }
    match (first_fault, purged) {
        (Some(fault), _) => Err(fault),
        (None, Some(purged)) => Err(io::Error::new(
            io::ErrorKind::NotFound,
            format!("the log begins after entry {}, and there is no snapshot up to there", purged.index),
        )),
        (None, None) => Ok((SnapshotMeta::default(), Pool::default())),
    }
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotData = SnapshotFile;
    type SnapshotBuilder = Builder;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, Membership)> {
        Ok((self.applied, self.membership.clone()))
    }

    async fn apply<S>(&mut self, mut entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<TypeConfig>>> + Unpin + OptionalSend,
    {
        while let Some((entry, responder)) = entries.try_next().await? {
            let leader = entry.log_id.leader_id;
            let response = match &entry.payload {
                EntryPayload::Blank => Response::default(),
                EntryPayload::Normal(command) => {
                    self.measure(command.bytes());
                    Response(self.replica.apply(leadership(&leader), command.entry()))
                }
                EntryPayload::Membership(members) => {
                    self.membership = Membership::new(Some(entry.log_id), members.clone());
                    Response::default()
                }
            };
            self.applied = Some(entry.log_id);
            #[cfg(feature = "sim")]
            super::sim::applied(&entry, &self.replica);
            if leader.node_id == self.me {
                self.replica.lead(leadership(&leader));
            }
            if let Some(responder) = responder {
                responder.send(response);
            }
        }
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Builder {
        let meta = SnapshotMeta { last_log_id: self.applied, last_membership: self.membership.clone() };
        let pool = self.replica.pool().read().clone();
        Builder { meta, pool: Arc::new(pool), snapshots: Arc::clone(&self.snapshots) }
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, file: SnapshotFile) -> io::Result<()> {
        let (snapshots, announced) = (Arc::clone(&self.snapshots), meta.clone());
        let pool = blocking(move || {
            let (meta, pool) = file.decode()?;
            if meta != announced {
                let what = "a snapshot is not the one that was announced";
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            snapshots.adopt(&file, &meta)?;
            Ok(pool)
        })
        .await??;
        self.applied = meta.last_log_id;
        self.membership = meta.last_membership.clone();
        self.log_bytes = 0;
        self.replica.restore(pool);
        #[cfg(feature = "sim")]
        super::sim::restored(self.applied, &self.replica);
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<CompleteSnapshot>> {
        let snapshots = Arc::clone(&self.snapshots);
        blocking(move || {
            for path in snapshots.list()? {
                let snapshot = snapshots.get(&path)?;
                match snapshot.decode() {
                    Ok((meta, _)) => return Ok(Some(CompleteSnapshot { meta, snapshot })),
                    Err(fault) => tracing::error!(%fault, path = %path.display(), "cannot read a snapshot"),
                }
            }
            Ok(None)
        })
        .await?
    }
}

type CompleteSnapshot = Snapshot<LeaderId, u64, PeerNode, SnapshotFile>;

/// Writes one snapshot, while entries go on being applied.
#[derive(Debug)]
pub struct Builder {
    meta: SnapshotMeta,
    pool: Arc<Pool>,
    snapshots: Arc<SnapshotDir>,
}

impl RaftSnapshotBuilder<TypeConfig> for Builder {
    type SnapshotData = SnapshotFile;

    async fn build_snapshot(&mut self) -> io::Result<CompleteSnapshot> {
        let (meta, pool, snapshots) =
            (self.meta.clone(), Arc::clone(&self.pool), Arc::clone(&self.snapshots));
        blocking(move || {
            let snapshot = snapshots.write(&meta, &pool)?;
            Ok(CompleteSnapshot { meta, snapshot })
        })
        .await?
    }
}

#[cfg(test)]
mod tests {
    use super::super::log::LogStore;
    use super::super::types::Command;
    use super::*;
    use crate::quota::amount::Micros;
    use crate::quota::pool::{Entry, Stamp};
    use openraft::testing::log::{StoreBuilder, Suite};
    use openraft::{StorageError, entry::RaftEntry};
    use tempfile::TempDir;

    struct Stores;

    impl StoreBuilder<TypeConfig, LogStore, Machine, TempDir> for Stores {
        async fn build(&self) -> Result<(TempDir, LogStore, Machine), StorageError<TypeConfig>> {
            let temp = tempfile::tempdir().unwrap();
            let (log, machine) = open(temp.path()).unwrap();
            Ok((temp, log, machine))
        }
    }

    fn open(dir: &std::path::Path) -> io::Result<(LogStore, Machine)> {
        let log = LogStore::open(&dir.join("log"))?;
        let machine = Machine::open(1, SnapshotDir::open(dir.join("snapshots"))?, log.purged())?;
        Ok((log, machine))
    }

    fn log_id(term: u64, node_id: u64, index: u64) -> LogId {
        LogId { leader_id: LeaderId { term, node_id }, index }
    }

    fn entry(log_id: LogId, tau: i64) -> super::super::types::LogEntry {
        let stamp = Stamp { term: leadership(&log_id.leader_id), tau: Micros(tau) };
        RaftEntry::new(log_id, EntryPayload::Normal(Command::new(Entry { stamp, ops: vec![] })))
    }

    async fn apply(machine: &mut Machine, entries: Vec<super::super::types::LogEntry>) {
        let entries = entries.into_iter().map(|entry| Ok((entry, None)));
        machine.apply(futures::stream::iter(entries)).await.unwrap();
    }

    #[tokio::test]
    async fn openrafts_own_suite_passes() {
        Suite::test_all(Stores).await.unwrap();
    }

    #[tokio::test]
    async fn applying_stamps_and_leads() {
        let temp = tempfile::tempdir().unwrap();
        let (_log, mut machine) = open(temp.path()).unwrap();
        let replica = machine.replica();
        let mut feed = replica.changes();
        apply(&mut machine, vec![entry(log_id(1, 2, 1), 70)]).await;
        assert_eq!(replica.pool().read().tau(), Micros(70));
        assert!(replica.clock().borrow().is_none(), "another node leads");
        let blank = RaftEntry::new(log_id(2, 1, 2), EntryPayload::Blank);
        apply(&mut machine, vec![blank]).await;
        let begun = replica.clock().borrow().unwrap();
        assert_eq!(begun.term(), leadership(&LeaderId { term: 2, node_id: 1 }));
        let stamp = replica.stamp(begun.term()).unwrap();
        assert!(stamp.tau >= Micros(70) && stamp.term == begun.term());
        assert_eq!(replica.stamp(begun.term() + 1), None);
        let stamped = *replica.clock().borrow();
        apply(&mut machine, vec![entry(log_id(2, 1, 3), 90)]).await;
        assert_eq!(*replica.clock().borrow(), stamped, "it begins once a term");
        assert_eq!(replica.applied_at().stamp.tau, Micros(90));
        assert!(tokio::time::timeout(std::time::Duration::from_millis(5), feed.next()).await.is_err());
    }

    #[tokio::test]
    async fn a_snapshot_moves_and_survives() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (_log, mut machine) = open(from.path()).unwrap();
        apply(&mut machine, vec![entry(log_id(1, 2, 1), 70)]).await;
        let built = machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
        let (log, mut other) = open(to.path()).unwrap();
        let mut feed = other.replica().changes();
        other.install_snapshot(&built.meta, built.snapshot.clone()).await.unwrap();
        assert_eq!(other.replica().pool().read().tau(), Micros(70));
        assert!(feed.next().await.everything);
        // As it comes from a peer: written to a file of its own, then adopted.
        let mut bytes = vec![0; usize::try_from(built.snapshot.bytes()).unwrap()];
        built.snapshot.read_at(&mut bytes, 0).unwrap();
        let mut incoming = other.snapshots().incoming().unwrap();
        io::Write::write_all(&mut incoming, &bytes).unwrap();
        other.install_snapshot(&built.meta, incoming.complete().unwrap()).await.unwrap();
        drop((log, other));
        let (_log, mut again) = open(to.path()).unwrap();
        assert_eq!(again.applied_state().await.unwrap().0, Some(log_id(1, 2, 1)));
        assert_eq!(again.replica().pool().read().tau(), Micros(70));
        let other_meta = SnapshotMeta::default();
        let refused = again.install_snapshot(&other_meta, built.snapshot).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
