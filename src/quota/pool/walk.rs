//! Looking at all buckets bit by bit, for figures about the whole.

use super::Pool;
use crate::quota::policy::BucketId;

impl Pool {
    /// Buckets that have books, with the ids of their policies, from the one behind `after` on (`None`: from the first).
    pub fn buckets_after(&self, after: Option<BucketId>) -> impl Iterator<Item = (BucketId, u32)> {
        self.buckets.after(after).map(|(bucket, ledger)| (*bucket, ledger.policy))
    }

    /// The parts of a policy's limit that are all regions' reserves, as they are counted: see [`super::Books::reserved`].
    #[must_use]
    pub fn reserved(
        &self,
        policy: u32,
    ) -> Option<(crate::quota::amount::Rate, crate::quota::amount::Tokens)> {
        self.policies.reserved(policy)
    }
}
