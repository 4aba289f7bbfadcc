//! An operator resets a bucket.

use super::Inner;
use super::admin::unanswered;
use crate::quota::policy::Limit;
use crate::quota::pool::{Op, PolicyOutcome, RegionId, ResetBucket};
use crate::server::admin::{ApplyError, ResetError, ResetRequest};
use crate::server::state::BucketReset;
use std::time::Duration;
use tokio::time::Instant;

/// How long the decision may take to be committed.
const DECIDE_WITHIN: Duration = Duration::from_secs(10);

impl Inner {
    /// Decides, through the log. Every region gives its bucket its part when it hears of it.
    pub(super) async fn decide_reset(&self, request: ResetRequest) -> Result<BucketReset, ResetError> {
        let ResetRequest { policy, values, by, reason } = request;
        let (id, bucket) = (self.named(&policy)?, self.matching(&policy, &values)?);
        let limit = self.core.active.load().policy(id).map(|known| known.policy.limit.clone());
        if !matches!(limit, Some(Limit::TokenBucket(_) | Limit::Quota(_))) {
            let what = format!("`{policy}` has no bucket that could be spent: nothing is to be reset");
            return Err(ApplyError::Refused(what).into());
        }
        if matches!(limit, Some(Limit::Quota(_))) {
            let what = format!(
                "the windows of `{policy}` cannot be reset; raise its quota, which brings just the difference to the window that it is now"
            );
            return Err(ApplyError::Refused(what).into());
        }
        let op = ResetBucket { policy: id, bucket, by: by.clone(), reason: reason.clone() };
        let proposed = self.raft.propose(vec![Op::ResetBucket(op)], Instant::now() + DECIDE_WITHIN).await;
        let number = match proposed.map_err(unanswered)?.policies {
            Some(PolicyOutcome::Reset(number)) => number,
            Some(PolicyOutcome::NotReset(why)) => return Err(ApplyError::Refused(why.to_string()).into()),
            _ => {
                let what = "the cluster has not been founded yet";
                return Err(ApplyError::Unavailable(what.into()).into());
            }
        };
        tracing::info!(policy, %bucket, number, by, reason, "a bucket's reset was decided here");
        let pool = self.raft.pool();
        let pool = pool.read();
        let waits = pool.resets().find(|(of, reset)| *of == bucket && reset.number == number);
        let name = |region: RegionId| pool.regions().get(usize::from(region.0)).map(ToString::to_string);
        let waits_for = waits.map(|(_, reset)| reset.owed().filter_map(name).collect()).unwrap_or_default();
        Ok(BucketReset { policy, bucket: bucket.to_string(), number, waits_for })
    }
}
