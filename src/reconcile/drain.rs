//! The end of a daemon: what its region has been lent goes back, so that nobody waits for leases to end. What is left in one that
//! ends counts as spent: for good, of a slow limit.
//!
//! The order is that of every ask: the store stops using what is given up, and only then is anything sent. While proposals are on
//! their way, the store prepares the next buckets.

use super::{BATCH, PROPOSE_WITHIN, ROUND_MAX, Reconcile, Round, outcome};
use crate::clock;
use crate::limiter::Core;
use crate::quota::amount::{Micros, Tokens};
use crate::quota::borrower::Plan;
use crate::quota::policy::BucketId;
use crate::quota::pool::{Op, RegionId};
use crate::raft::{Log, ProposeError};
use crate::store::{RegionStore, StoreError};
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

/// The longest that giving back may take, unless it is told otherwise.
pub(super) const WITHIN_DEFAULT: Duration = Duration::from_secs(10);
/// It ends when nothing has been prepared or given back for so long.
const PATIENCE: Duration = Duration::from_secs(2);
/// The most proposals on their way; well below what a leader lets wait.
const PROPOSALS_MAX: usize = 8;
/// A call or a proposal that came to nothing is tried again after this long.
const RETRY: Duration = Duration::from_millis(50);

/// What a bucket has to lose: how long the limit takes to bring that back, and its share of the burst in millionths.
type Worth = (Micros, i64);

impl<L: Log, S: RegionStore> Reconcile<L, S> {
    /// Gives back what is borrowed, for as long as that makes progress.
    pub(super) async fn drain(mut self) {
        let mut back = Back::new(self.drain_within);
        let lent = self.dearest_first();
        for part in lent.chunks(ROUND_MAX) {
            let mut round = Round::default();
            let goes_on = back.has_room().await && self.give_up(part, &mut round, &mut back).await;
            if !round.ops.is_empty()
                && let Some(me) = self.me
            {
                let (raft, core) = (self.raft.clone(), Arc::clone(&self.core));
                back.sent.spawn(give_back(raft, core, me, round.ops, back.until));
            }
            if !goes_on {
                break;
            }
        }
        while back.next().await {}
        back.say(lent.len());
        while let Ok(Some(_)) = timeout_at(back.patience(), self.proposals.join_next()).await {}
    }

    /// Everything that may be lent, in the order in which it is given back.
    fn dearest_first(&mut self) -> Vec<(BucketId, Plan)> {
        let now = clock::now();
        let mut plans: Vec<_> =
            self.book.give_up_all(now).into_iter().map(|p| (self.worth(&p.0, now), p)).collect();
        plans.sort_by_key(|((time, share), (bucket, _))| (Reverse(*time), Reverse(*share), *bucket));
        plans.into_iter().map(|(_, plan)| plan).collect()
    }

    fn worth(&self, bucket: &BucketId, now: Micros) -> Worth {
        let active = self.core.active.load();
        let Some(loan) = self.book.get(bucket) else { return Worth::default() };
        let Some(terms) = loan.terms(&active, &self.core.time) else { return Worth::default() };
        let pool = self.raft.pool();
        let pool = pool.read();
        // Permits come back with their lease, or with their holders.
        let Some(cut) = pool.cut(terms.policy.id).filter(|_| terms.permits().is_none()) else {
            return Worth::default();
        };
        let level = loan.level(terms.shape, self.store.now(), now);
        let lent = (level - terms.shape.cap).or_zero();
        let share = Tokens(1_000_000).mul_div(lent.0, cut.burst.0);
        // A quota never does.
        (cut.rate.time_for(lent).unwrap_or(Micros(i64::MAX)), share.0)
    }

    /// The store stops using these; what they ask then goes into the round. `false`: it must end.
    async fn give_up(&mut self, part: &[(BucketId, Plan)], round: &mut Round, back: &mut Back) -> bool {
        for batch in part.chunks(BATCH) {
            loop {
                match timeout_at(back.patience(), self.ask(batch.to_vec(), round)).await {
                    Ok(Ok(())) => break,
                    Ok(Err(StoreError::Fenced)) | Err(_) => return false,
                    Ok(Err(StoreError::Unavailable | StoreError::Unknown)) => sleep(RETRY).await,
                }
            }
            back.progress = Instant::now();
        }
        true
    }
}

/// How far giving back has come.
struct Back {
    began: Instant,
    until: Instant,
    progress: Instant,
    sent: JoinSet<usize>,
    given: usize,
}

impl Back {
    fn new(within: Duration) -> Self {
        let began = Instant::now();
        Self { began, until: began + within, progress: began, sent: JoinSet::new(), given: 0 }
    }

    /// When it ends unless there is progress.
    fn patience(&self) -> Instant {
        (self.progress + PATIENCE).min(self.until)
    }

    /// Waits until another proposal may go out. `false`: it must end.
    async fn has_room(&mut self) -> bool {
        while self.sent.len() >= PROPOSALS_MAX {
            if !self.next().await {
                return false;
            }
        }
        true
    }

    /// Waits for the end of a proposal. `false`: there is none, or it must end.
    async fn next(&mut self) -> bool {
        let Ok(Some(done)) = timeout_at(self.patience(), self.sent.join_next()).await else { return false };
        let given = done.unwrap_or_default();
        if given > 0 {
            self.given += given;
            self.progress = Instant::now();
        }
        true
    }

    /// What a person should know of it.
    fn say(&self, lent: usize) {
        let after_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (given_back, kept) = (self.given, lent.saturating_sub(self.given));
        if kept > 0 {
            tracing::warn!(
                given_back,
                kept,
                after_ms,
                "not all leases were given back: what was left in the others counts as spent"
            );
        } else if lent > 0 {
            tracing::info!(given_back, kept, after_ms, "gave leases back");
        }
    }
}

/// Proposes until it is known to have had its effect, and returns for how many buckets it had. The same asks again: each counts
/// once, whatever became of it.
async fn give_back<L: Log>(raft: L, core: Arc<Core>, me: RegionId, ops: Vec<Op>, until: Instant) -> usize {
    let mut may_have_counted = false;
    loop {
        let began = Instant::now();
        let result = raft.propose(ops.clone(), until.min(began + PROPOSE_WITHIN)).await;
        core.metrics.proposal.observe(began.elapsed());
        core.metrics.proposed(outcome(&result));
        match result {
            Ok(_) if may_have_counted => return ops.len(),
            Ok(applied) => return applied.records.iter().filter(|(region, _)| *region == me).count(),
            Err(ProposeError::TooLarge | ProposeError::TooNew { .. }) => return 0,
            Err(ProposeError::Unknown) => may_have_counted = true,
            Err(ProposeError::NotSent { .. } | ProposeError::Refused) => {}
        }
        if Instant::now() + RETRY >= until {
            return 0;
        }
        sleep(RETRY).await;
    }
}
