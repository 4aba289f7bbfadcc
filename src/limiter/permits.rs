//! Permits that are lent between regions: what the slow loop hears of them, and what callers are told.

use super::active::ActivePolicy;
use super::table::Tally;
use super::{Held, Limiter};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::counted::Seen;
use crate::quota::policy::BucketId;
use crate::quota::verdict::{LimitVerdict, RETRY_HINT, Reason};
use crate::store::Store;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl<S: Store> Limiter<S> {
    /// Permits were asked for (or were to be renewed): there is demand, and perhaps there are too few.
    pub(super) fn count_permits(
        &self,
        policy: &ActivePolicy,
        bucket: BucketId,
        cost: Tokens,
        seen: &Seen,
        now: Micros,
    ) -> Option<Arc<Tally>> {
        let left = Tokens::whole(seen.left);
        let low = !seen.fits || left <= policy.shape.cap.percent(50);
        let tally = match self.core.table.get(policy.id, &bucket) {
            None if low => {
                let pool = (self.core.peek)(policy.id, bucket).unwrap_or(policy.pool_full);
                self.core.table.get_or_make(policy.id, bucket, None, pool)
            }
            known => known,
        }?;
        tally.set_of_permits();
        self.count_one(&tally, cost.or_zero(), seen.fits, left, now);
        Some(tally)
    }

    /// Permits were renewed or given back: so many are left.
    pub(super) fn saw_permits(&self, policy: &ActivePolicy, bucket: BucketId, seen: &Seen, now: Micros) {
        if let Some(tally) = self.core.table.get(policy.id, &bucket) {
            tally.saw(Tokens::whole(seen.left), now);
        }
    }

    /// What this region has left, and what it might be lent. Who is refused may come back when that can have been lent, or when
    /// permits that are in use here have ended, whichever is sooner.
    pub(super) fn judge_permits(&self, held: &Held<'_>, mut seen: Seen) -> LimitVerdict {
        let policy = held.policy;
        let whole = policy.policy.permits().map_or(Tokens::ZERO, |permits| permits.tokens());
        let tally = held.tally.as_ref();
        let pool = tally.map_or_else(|| self.core.in_pool(held), |t| t.elsewhere()).or_zero();
        let (cost, left) = (held.charge.cost, Tokens::whole(seen.left));
        let mut denial = Reason::OverLimit;
        if tally.is_some_and(|t| t.is_cut_off()) {
            if cost <= whole {
                denial = Reason::NoLease;
            }
        } else {
            let takes = Micros(self.core.lease_takes.load(Ordering::Relaxed));
            if !seen.fits && cost <= left + pool {
                seen.wait = Some(seen.wait.map_or(takes, |wait| wait.min(takes)));
                if held.unanswered {
                    denial = Reason::NoLease;
                }
            }
            seen.left = (left + pool).min(whole).floor();
        }
        if !seen.fits && cost <= whole {
            // Others may give some back.
            seen.wait = seen.wait.or(Some(RETRY_HINT));
        }
        LimitVerdict::counted(held.terms(), held.charge.descriptor, &seen, denial)
    }
}
