//! From the policies in the pool to those that the fast loop goes by.

use super::{REPEAT, Reconcile};
use crate::bugs::{Bug, planted};
use crate::clock;
use crate::limiter::active::{Active, ActivePolicy};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::bucket::Unseen;
use crate::quota::counted::Kind;
use crate::quota::policy::Part;
use crate::quota::pool::{Ack, Op};
use crate::raft::Log;
use crate::store::RegionStore;

/// A decision under older policies may still be on its way to the store for this long: acknowledging waits for it. Longer
/// than any store's timeout and the slack that its commands are given.
const ACK_AFTER: Micros = Micros::seconds(1);

/// What buckets are that a store does not hold whose clock has not been read.
const NOTHING: Unseen = Unseen { level: Tokens::ZERO, at: Micros(i64::MAX / 4) };

impl<L: Log, S: RegionStore> Reconcile<L, S> {
    /// The policies in the pool may be others than those in use.
    pub(super) fn read_policies(&mut self) {
        self.node = self.raft.node_id();
        let me = self.node.and_then(|node| self.raft.pool().read().seat(&self.region, node));
        if me != self.me {
            self.me = me;
            self.forget_time();
            if me.is_none() {
                self.leave();
            }
            self.read_epoch();
        }
        if self.refresh_policies() {
            self.activated_at = clock::now();
        }
    }

    /// Takes the policies of the pool into use, as far as this region may use them now; did anything change?
    pub(super) fn refresh_policies(&mut self) -> bool {
        let Some(me) = self.me else { return false };
        let before = self.core.active.load_full();
        let pool = self.raft.pool();
        let pool = pool.read();
        let version = pool.version();
        if version < self.raft.acknowledged() && !planted(Bug::WordForgotten) {
            // An older life of this daemon has said that it uses no more than a newer version allows, and this replica has
            // not come so far again.
            return false;
        }
        let parts = || pool.policies().map(|p| (p.id, pool.usable(p.id, me).unwrap_or_default()));
        let held = |id| pool.held_back(id, me);
        let same =
            |(id, part): (u32, Part)| before.policy(id).is_some_and(|p| p.part == part && p.held == held(id));
        let blind = self.session.is_none();
        if before.version == version && before.blind == blind && parts().all(same) {
            return false;
        }
        let (now, generation) = (self.store.now(), self.store.generation());
        let tau = self.raft.applied_at().tau(&pool, clock::now());
        let policies = pool
            .policies()
            .map(|view| {
                let part = pool.usable(view.id, me).unwrap_or_default();
                let lent = pool.may_lend(view.id);
                let known = before.policy(view.id).filter(|_| !before.blind).map(|p| (p.shape, p.unseen));
                let in_pool = pool.unseen(view.id, me).map(|unseen| unseen.on_clock(tau, now));
                let mut unseen = match Kind::of(&view.policy.limit) {
                    // What counts is in the store, or was lost and is taken for used; only what others may have used is not.
                    Some(_) => in_pool,
                    None => Unseen::adopt(known, part.shape(), lent, in_pool, generation, now),
                };
                if planted(Bug::FullAfterPolicyChange) || view.policy.window().is_some() {
                    unseen = None;
                } else if blind {
                    unseen = Some(NOTHING);
                }
                let policy = view.policy.clone();
                let mut next = ActivePolicy::new(view.id, policy, view.cut, part, unseen, &self.core.metrics);
                next.held = held(view.id);
                next.life = pool.permit_life(view.id);
                next.lends = lent && pool.regions().len() > 1;
                next
            })
            .collect();
        for gone in before.policies().filter(|p| pool.policies().all(|view| view.id != p.id)) {
            self.core.metrics.forget_policy(&gone.policy.name, gone.policy.mode);
        }
        drop(pool);
        let next = Active::new(version, policies, self.unmatched_allowed, &self.core.metrics);
        let mut next = next.redacting(&self.core.redaction);
        next.blind = blind;
        self.core.active.store(next.into());
        self.core.metrics.policies_version.set(i64::try_from(version).unwrap_or(i64::MAX));
        if before.version != version {
            tracing::info!(version, "policies are in use");
        }
        self.progress.send_modify(|p| p.policies = version);
        true
    }

    /// The cluster has this region no more: nothing of its limits is this region's to spend.
    fn leave(&mut self) {
        tracing::warn!(region = %self.region, "the region has left the cluster, and lets nothing through any more");
        for gone in self.core.active.load_full().policies() {
            self.core.metrics.forget_policy(&gone.policy.name, gone.policy.mode);
        }
        let none = Active::none(self.unmatched_allowed, &self.core.metrics);
        self.core.active.store(none.into());
        self.progress.send_modify(|p| p.policies = 0);
    }

    /// Says that this region uses no more than the policies in force allow, once that is so for everything under way.
    pub(super) async fn ack(&mut self, now: Micros) -> Option<Op> {
        let me = self.me?;
        let in_use = self.core.active.load().version;
        let under_way = now < self.activated_at + ACK_AFTER && !planted(Bug::AckAtOnce);
        if under_way || now < self.acked_at + REPEAT {
            return None;
        }
        let version = {
            let pool = self.raft.pool();
            let pool = pool.read();
            let version = pool.version();
            let due = in_use == version && pool.unacked(version).any(|region| region == me);
            due.then_some(version)?
        };
        self.acked_at = now;
        if let Err(error) = self.raft.acknowledge(version).await {
            tracing::warn!(%error, version, "policies cannot be acknowledged: what this region says must be on its disk first");
            return None;
        }
        Some(Op::Ack(Ack { region: me, version }))
    }
}
