//! The leader's gathering of proposals into entries.
//!
//! What arrives while others wait, its own and other regions', goes into one entry, stamped when it is closed: after the
//! last of its requests has arrived.

use super::node::OpenRaft;
use super::replica::Replica;
use super::task;
use super::types::{Command, LeaderId, TypeConfig, encoded_len, leadership};
use super::{ENTRY_BYTES_MAX, OPS_MAX, ProposeError};
use crate::bugs::{Bug, planted};
use crate::quota::pool::{Applied, Entry, Op, Stamp};
use crate::telemetry::metrics::RaftMetrics;
use crate::telemetry::trace::{self, CAUSES_MAX, Cause};
use crate::trace_span;
use openraft::ServerState;
use openraft::async_runtime::watch::WatchReceiver;
use openraft::errors::ClientWriteError;
use openraft::impls::ProgressResponder;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tracing::Span;
use tracing::field::Empty;

/// Proposals that wait to be gathered.
const QUEUE_MAX: usize = 1_024;
/// Their bytes.
const QUEUE_BYTES_MAX: usize = 16 * 1_024 * 1_024;
/// Entries on their way to being committed.
const IN_FLIGHT_MAX: usize = 64;
/// While entries are on their way, the next one waits so long for company.
const COMPANY: Duration = Duration::from_millis(1);
/// How long proposals wait for a new leader to have applied what came before it.
const NEW_LEADER: Duration = Duration::from_secs(5);

type Outcome = Result<Arc<Applied>, ProposeError>;

/// Where proposals are left for the gatherer.
#[derive(Debug)]
pub(super) struct Proposals {
    queue: mpsc::Sender<Proposal>,
    bytes: Arc<Semaphore>,
    metrics: Arc<OnceLock<RaftMetrics>>,
}

#[derive(Debug)]
struct Proposal {
    ops: Arc<Vec<Op>>,
    bytes: usize,
    /// Whoever sets it first, the gatherer (it goes out) or the proposer (it is withdrawn), has decided.
    decided: Arc<AtomicBool>,
    reply: oneshot::Sender<Outcome>,
    room: OwnedSemaphorePermit,
    /// What it is traced with.
    cause: Option<Cause>,
}

impl Proposals {
    /// Starts the gatherer; it ends when the returned handle is dropped.
    pub fn start(raft: OpenRaft, replica: Arc<Replica>) -> Self {
        let (queue, proposals) = mpsc::channel(QUEUE_MAX);
        let metrics = Arc::<OnceLock<RaftMetrics>>::default();
        let gatherer = Gatherer {
            raft,
            replica,
            proposals,
            held: None,
            in_flight: Arc::new(Semaphore::new(IN_FLIGHT_MAX)),
            metrics: Arc::clone(&metrics),
        };
        task::spawn(gatherer.run());
        Self { queue, bytes: Arc::new(Semaphore::new(QUEUE_BYTES_MAX)), metrics }
    }

    /// Measures with these from now on.
    pub fn measure(&self, metrics: RaftMetrics) {
        // Whoever was first counts.
        let _ = self.metrics.set(metrics);
    }

    /// Proposes on this node, which must be the leader.
    pub async fn propose(&self, ops: &Arc<Vec<Op>>, deadline: Instant) -> Outcome {
        let bytes = check_size(ops)?;
        let busy = ProposeError::NotSent { retry: true };
        let room = u32::try_from(bytes).map_err(|_| ProposeError::TooLarge)?.max(1);
        let room = Arc::clone(&self.bytes).try_acquire_many_owned(room).map_err(|_| busy)?;
        let (reply, outcome) = oneshot::channel();
        let decided = Arc::new(AtomicBool::new(false));
        let (ops, cause) = (Arc::clone(ops), trace::cause());
        let proposal = Proposal { ops, bytes, decided: Arc::clone(&decided), reply, room, cause };
        self.queue.try_send(proposal).map_err(|_| busy)?;
        match timeout_at(deadline, outcome).await {
            Ok(Ok(outcome)) => outcome,
            // The gatherer is gone (this node stops), or it is too late: either way it depends on whether it went out.
            _ if decided.swap(true, Ordering::AcqRel) => Err(ProposeError::Unknown),
            _ => Err(busy),
        }
    }
}

/// The encoded size of operations that fit into one entry.
pub(super) fn check_size(ops: &[Op]) -> Result<usize, ProposeError> {
    let bytes = if ops.len() > OPS_MAX { usize::MAX } else { encoded_len(ops) };
    if bytes > ENTRY_BYTES_MAX { Err(ProposeError::TooLarge) } else { Ok(bytes) }
}

struct Gatherer {
    raft: OpenRaft,
    replica: Arc<Replica>,
    proposals: mpsc::Receiver<Proposal>,
    /// It did not fit into the entry before.
    held: Option<Proposal>,
    in_flight: Arc<Semaphore>,
    metrics: Arc<OnceLock<RaftMetrics>>,
}

impl Gatherer {
    async fn run(mut self) {
        while let Some(first) = self.next().await {
            let Ok(permit) = Arc::clone(&self.in_flight).acquire_owned().await else { return };
            let opened = match planted(Bug::StampAtBatchOpen) {
                true => self.lead().await.and_then(|leader| self.stamp(leader)),
                false => None,
            };
            if self.in_flight.available_permits() + 1 < IN_FLIGHT_MAX {
                tokio::time::sleep(COMPANY).await;
            }
            let leader = self.lead().await;
            let batch = self.gather(first);
            if batch.replies.is_empty() {
                continue;
            }
            // Now, after the last request has arrived.
            let stamped = leader.zip(opened.or_else(|| leader.and_then(|l| self.stamp(l))));
            match stamped {
                Some((leader, stamp)) => {
                    #[cfg(feature = "sim")]
                    super::sim::stamped(stamp);
                    let metrics = self.metrics.get().cloned();
                    task::spawn(write(self.raft.clone(), leader, stamp, batch, permit, metrics));
                }
                None => batch.answer(&Err(ProposeError::NotSent { retry: true })),
            }
        }
    }

    fn stamp(&self, leader: LeaderId) -> Option<Stamp> {
        self.replica.stamp(leadership(&leader))
    }

    async fn next(&mut self) -> Option<Proposal> {
        match self.held.take() {
            Some(held) => Some(held),
            None => self.proposals.recv().await,
        }
    }

    /// Closes the next entry: what waits now, as far as it fits.
    fn gather(&mut self, first: Proposal) -> Batch {
        let mut batch = Batch::default();
        let mut next = Some(first);
        while let Some(proposal) = next.take().or_else(|| self.proposals.try_recv().ok()) {
            if !batch.has_room(&proposal) {
                self.held = Some(proposal);
                break;
            }
            // A proposer that has given up has been told that nothing was sent: keep to that.
            if !proposal.decided.swap(true, Ordering::AcqRel) {
                batch.add(proposal);
            }
        }
        batch
    }

    /// The leadership of this node, if it has one, and once its Raft clock has begun: when it has applied the first
    /// entry of its own. Until then, proposals wait for it.
    async fn lead(&self) -> Option<LeaderId> {
        let deadline = Instant::now() + NEW_LEADER;
        let mut metrics = self.raft.server_metrics();
        let mut clock = self.replica.clock();
        loop {
            let now = metrics.borrow_watched().clone();
            if now.state != ServerState::Leader {
                return None;
            }
            let leader = *now.vote.leader_id();
            if clock.borrow_and_update().is_some_and(|clock| clock.term() == leadership(&leader)) {
                return Some(leader);
            }
            // In this order, so that a simulation repeats.
            tokio::select! {
                biased;
                changed = metrics.changed() => changed.ok()?,
                changed = clock.changed() => changed.ok()?,
                () = tokio::time::sleep_until(deadline) => return None,
            }
        }
    }
}

/// What goes into one entry.
#[derive(Debug, Default)]
struct Batch {
    ops: Vec<Op>,
    bytes: usize,
    /// It has an operation whose outcome an entry reports once: no second one may join.
    single: bool,
    replies: Vec<oneshot::Sender<Outcome>>,
    room: Vec<OwnedSemaphorePermit>,
    causes: Vec<Cause>,
}

impl Batch {
    fn has_room(&self, next: &Proposal) -> bool {
        self.replies.is_empty()
            || self.ops.len() + next.ops.len() <= OPS_MAX
                && self.bytes + next.bytes <= ENTRY_BYTES_MAX
                && !(self.single && next.ops.iter().any(reports_once))
    }

    fn add(&mut self, proposal: Proposal) {
        self.single |= proposal.ops.iter().any(reports_once);
        self.ops.extend(proposal.ops.iter().cloned());
        self.bytes += proposal.bytes;
        self.replies.push(proposal.reply);
        if self.causes.len() < CAUSES_MAX {
            self.causes.extend(proposal.cause);
        }
        self.room.push(proposal.room);
    }

    fn answer(self, outcome: &Outcome) {
        for reply in self.replies {
            // Whoever proposed may have gone.
            let _ = reply.send(outcome.clone());
        }
    }
}

/// See [`Applied::policies`].
fn reports_once(op: &Op) -> bool {
    matches!(
        op,
        Op::Found { .. } | Op::SetPolicies(_) | Op::AddRegion(_) | Op::RemoveRegion(_) | Op::ResetBucket(_)
    )
}

/// Hands an entry to openraft, under the leadership that stamped it and no other, and brings back what it did.
async fn write(
    raft: OpenRaft,
    leader: LeaderId,
    stamp: Stamp,
    mut batch: Batch,
    _in_flight: OwnedSemaphorePermit,
    metrics: Option<RaftMetrics>,
) {
    let (began, size) = (Instant::now(), batch.ops.len());
    // The entry belongs to the trace of each of them.
    let spans: Vec<_> = batch.causes.iter().map(|cause| commit_span(cause, stamp, size)).collect();
    let command = Command::new(Entry { stamp, ops: std::mem::take(&mut batch.ops) });
    let (responder, applied) = ProgressResponder::<TypeConfig, _>::complete_only();
    let handed = raft.write(command).with_leader(leader).responder(responder).await;
    let outcome = match handed {
        Err(_) => Err(ProposeError::NotSent { retry: false }),
        Ok(()) => match applied.await {
            Ok(Ok(written)) if written.data.0.refused => Err(ProposeError::Refused),
            Ok(Ok(written)) => Ok(written.data.0),
            // openraft answers this before it appends anything.
            Ok(Err(ClientWriteError::ForwardToLeader(_))) => Err(ProposeError::NotSent { retry: true }),
            Ok(Err(_)) | Err(_) => Err(ProposeError::Unknown),
        },
    };
    for span in spans {
        span.record("applied", outcome.is_ok());
    }
    if let Some(metrics) = metrics.filter(|_| outcome.is_ok()) {
        metrics.commit.observe(began.elapsed());
        metrics.operations.observe_size(size);
    }
    batch.answer(&outcome);
}

fn commit_span(cause: &Cause, stamp: Stamp, operations: usize) -> Span {
    trace::because_of(cause, || {
        trace_span!("commit", term = stamp.term, tau_us = stamp.tau.0, operations, applied = Empty)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::pool::{Ack, AddRegion, RegionId, SetPolicies};

    fn proposal(ops: Vec<Op>) -> (Proposal, oneshot::Receiver<Outcome>) {
        let (reply, outcome) = oneshot::channel();
        let room = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let bytes = check_size(&ops).unwrap();
        (Proposal { ops: Arc::new(ops), bytes, decided: Arc::default(), reply, room, cause: None }, outcome)
    }

    fn acks(n: usize) -> Vec<Op> {
        vec![Op::Ack(Ack { region: RegionId(1), version: u64::MAX }); n]
    }

    #[test]
    fn an_entry_is_bounded() {
        assert_eq!(check_size(&acks(OPS_MAX + 1)), Err(ProposeError::TooLarge));
        let region = "r".repeat(ENTRY_BYTES_MAX);
        let big = Op::Found { regions: vec![region.as_str().into()], policies: vec![] };
        assert_eq!(check_size(&[big]), Err(ProposeError::TooLarge));
        let mut batch = Batch::default();
        batch.add(proposal(acks(OPS_MAX - 1)).0);
        assert!(batch.has_room(&proposal(acks(1)).0));
        assert!(!batch.has_room(&proposal(acks(2)).0));
        assert!(Batch::default().has_room(&proposal(acks(OPS_MAX)).0), "one always fits");
    }

    #[test]
    fn an_entry_reports_on_one_change_of_policies() {
        let set = || vec![Op::SetPolicies(SetPolicies { expected: None, policies: vec![] })];
        let mut batch = Batch::default();
        batch.add(proposal(acks(1)).0);
        assert!(batch.has_room(&proposal(set()).0));
        batch.add(proposal(set()).0);
        assert!(!batch.has_room(&proposal(set()).0));
        let add = vec![Op::AddRegion(AddRegion { name: "r".into(), previous: 0 })];
        assert!(!batch.has_room(&proposal(add).0));
        assert!(batch.has_room(&proposal(acks(1)).0));
    }
}
