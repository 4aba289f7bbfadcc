//! Lending of idle reserve, where the region has no demand of its own; and what a store that has lost its data must know of it.

use super::{BATCH, Reconcile, Round};
use crate::clock;
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::policy::{BucketId, LOAN};
use crate::quota::pool::{Lend, Op};
use crate::raft::Log;
use crate::store::{Prepare, RegionStore};
use std::collections::BTreeSet;
use tracing::Span;

impl<L: Log, S: RegionStore> Reconcile<L, S> {
    /// Looks at buckets that others are short of, as if there were demand here: what of their reserve is idle may be lent.
    pub(super) fn meet_the_short(&mut self, buckets: &BTreeSet<BucketId>) {
        let (Some(me), Some(_)) = (self.me, self.epoch) else { return };
        let mut unmet = buckets.iter().filter(|bucket| self.book.get(bucket).is_none()).peekable();
        if unmet.peek().is_none() || !self.raft.is_known_to_all(Lend::LEVEL) {
            return;
        }
        let unmet: Vec<&BucketId> = unmet.collect();
        let now = clock::now();
        let pool = self.raft.pool();
        let pool = pool.read();
        for bucket in unmet {
            let Some(policy) = pool.policy_of(*bucket) else { continue };
            let tau = pool.tau();
            if !pool.wants_loan(policy, *bucket, me, tau) || pool.loan(*bucket, me, tau).is_some() {
                continue;
            }
            let free = pool.free(policy, *bucket, tau);
            if let Some(tally) = self.core.table.get_or_make(policy, *bucket, None, free) {
                self.book.meet(tally, now);
            }
        }
    }

    /// The first loans of a cluster go by themselves: should somebody not know what they are after all, they alone come to nothing.
    pub(super) fn propose_round(&mut self, round: Round) {
        let span = round.span.unwrap_or_else(Span::none);
        let first = self.raft.pool().read().level() < Lend::LEVEL;
        let all = round.ops.into_iter().zip(round.buckets);
        let (loans, asks): (Vec<_>, Vec<_>) = all.partition(|(op, _)| first && matches!(op, Op::Lend(_)));
        for part in [asks, loans].into_iter().filter(|part| !part.is_empty()) {
            let (ops, buckets) = part.into_iter().unzip();
            self.propose(ops, buckets, span.clone());
        }
    }

    /// A store that has lost its data takes all of its reserve for lent. Once the region has joined, its replica has every loan that
    /// may still count: those buckets are stored as they are taken to be, empty until the loans are over; the others were not lent.
    pub(super) async fn mark_known(&mut self) {
        let (Some(session), Some(_), Some(me), false) =
            (self.session, self.epoch, self.me, self.marked_known)
        else {
            return;
        };
        let generation = self.store.generation();
        let over = self.store.now() >= generation.start + LOAN;
        if generation.known || generation.full || over {
            self.marked_known = true;
            return;
        }
        let active = self.core.active.load_full();
        if active.version == 0 {
            return;
        }
        let lent: Vec<(BucketId, u32)> = self.raft.pool().read().lender_of(me).collect();
        let pin = |(bucket, policy): (BucketId, u32)| {
            let policy = active.policy(policy)?;
            let (shape, unseen) = (policy.shape, policy.unseen);
            let (hold_burst, hold_rate) = (Tokens::MAX, Rate::MAX);
            let (permits, lend_rate, lend_for) = (None, Rate::ZERO, Micros::ZERO);
            Some(Prepare {
                bucket,
                shape,
                unseen,
                seq: 0,
                hold_burst,
                hold_rate,
                permits,
                lend_rate,
                lend_for,
            })
        };
        // A policy that is not in use now may come back while its loans last: then nobody could say which of its buckets were lent.
        let Some(pins) = lent.into_iter().map(pin).collect::<Option<Vec<_>>>() else { return };
        for batch in pins.chunks(BATCH) {
            if let Err(error) = self.store.prepare(batch.to_vec()).await {
                tracing::debug!(%error, "what was lent of reserves cannot be seen to yet");
                return;
            }
        }
        let marked = self.store.mark_known(session).await;
        self.core.denials.forget_all();
        match marked {
            Ok(()) => self.marked_known = true,
            Err(error) => tracing::debug!(%error, "that reserves were not lent cannot be marked yet"),
        }
    }
}
