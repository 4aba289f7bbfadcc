//! The slow loop's way to the log.

use super::{Message, Outcome, Rafts, Reply, lock};
use crate::sim::machine::pass;
use quorate::quota::amount::Micros;
use quorate::quota::pool::{Applied, Op};
use quorate::raft::{AppliedAt, ChangeFeed, Log, ProposeError, Replica, SharedPool};
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// Between two tries to reach a leader.
const RETRY: Micros = Micros::millis(50);

/// One life of one region's daemon, as a proposer and reader.
#[derive(Clone, Debug)]
pub struct SimLog {
    rafts: Arc<Rafts>,
    region: usize,
    node: u64,
    replica: Arc<Replica>,
}

impl SimLog {
    pub(super) fn new(rafts: Arc<Rafts>, region: usize, node: u64) -> Self {
        let replica = rafts.replica(region);
        Self { rafts, region, node, replica }
    }

    async fn try_until(&self, ops: Vec<Op>, deadline: Instant) -> Outcome {
        loop {
            let outcome = self.try_once(ops.clone(), deadline).await;
            let retry = matches!(outcome, Err(ProposeError::NotSent { retry: true }));
            if !retry || Instant::now() >= deadline {
                return outcome;
            }
            pass(RETRY).await;
        }
    }

    async fn try_once(&self, ops: Vec<Op>, deadline: Instant) -> Outcome {
        let known = self.rafts.node(self.region).leader;
        let Some(leader) = known else { return Err(ProposeError::NotSent { retry: true }) };
        let (id, outcome) = self.rafts.call();
        self.rafts.echo(&ops);
        if leader == self.region {
            self.rafts.enqueue(self.region, ops, Reply::Here { id });
        } else if self.rafts.net.line(self.region, leader).cut {
            lock(&self.rafts.calls).1.remove(&id);
            return Err(ProposeError::NotSent { retry: true });
        } else {
            self.rafts.send(self.region, leader, Message::Propose { id, ops });
        }
        match timeout_at(deadline, outcome).await {
            Ok(Ok(outcome)) => outcome,
            _ => {
                lock(&self.rafts.calls).1.remove(&id);
                Err(ProposeError::Unknown)
            }
        }
    }
}

impl Log for SimLog {
    async fn propose(&self, ops: Vec<Op>, deadline: Instant) -> Result<Applied, ProposeError> {
        let machine = Arc::clone(&self.rafts.machines[self.region]);
        // A daemon that is gone hears of nothing.
        machine.run(self.try_until(ops, deadline)).await.unwrap_or(Err(ProposeError::Unknown))
    }

    fn pool(&self) -> SharedPool {
        self.replica.pool()
    }

    fn changes(&self) -> ChangeFeed {
        self.replica.changes()
    }

    fn applied_at(&self) -> AppliedAt {
        self.replica.applied_at()
    }

    fn acknowledged(&self) -> u64 {
        self.rafts.node(self.region).acknowledged
    }

    async fn acknowledge(&self, version: u64) -> std::io::Result<()> {
        let mut node = self.rafts.node(self.region);
        node.acknowledged = node.acknowledged.max(version);
        Ok(())
    }

    fn is_known_to_all(&self, _: u32) -> bool {
        true
    }

    fn leads(&self) -> bool {
        self.rafts.leads(self.region)
    }

    fn node_id(&self) -> Option<u64> {
        Some(self.node)
    }
}
