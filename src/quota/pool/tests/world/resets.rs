//! An operator resets the bucket, while everything else goes wrong.

use super::*;

impl World {
    /// How much more may be admitted for the resets in an entry: exactly what they make, and that is never more than one
    /// burst (and overshoot) each.
    pub(super) fn allow_for_resets(&mut self, term: u64, entry: &Entry, before: &Pool) {
        let is_reset = |op: &&Op| matches!(op, Op::ResetBucket(_));
        let many = i64::try_from(entry.ops.iter().filter(is_reset).count()).unwrap();
        if many == 0 {
            return;
        }
        let mut without = before.clone();
        let ops = entry.ops.iter().filter(|op| !is_reset(op)).cloned().collect();
        without.apply(term, &Entry { stamp: entry.stamp, ops });
        let regions: Vec<RegionId> = self.pool.members().map(|member| member.id).collect();
        let in_books = |pool: &Pool| {
            let granted = |region: &RegionId| pool.record(BUCKET, *region).map(|r| r.granted);
            let granted: Tokens = regions.iter().filter_map(granted).sum();
            pool.free(self.policy, BUCKET, pool.tau()) + granted
        };
        let part = |region: &RegionId| self.pool.usable(self.policy, *region).unwrap_or_default().cap();
        let parts: Tokens = regions.iter().map(part).sum();
        let parts = Tokens(parts.0 * many);
        let made = in_books(&self.pool) - in_books(&without) + parts;
        let whole = bound(&self.pool, self.policy).1;
        assert!(made <= Tokens(whole.0 * many), "{many} resets made {made:?} of {whole:?}");
        self.extra += made;
        self.resets += many;
    }

    pub(super) fn reset(&mut self, i: usize) {
        let (by, reason) = ("operator".to_owned(), "chance".to_owned());
        self.send(i, Op::ResetBucket(ResetBucket { policy: self.policy, bucket: BUCKET, by, reason }));
    }

    /// Says that it has heard of a reset.
    pub(super) fn take_reset(&mut self, i: usize, region: RegionId) {
        let node = &self.nodes[i];
        let Some(epoch) = node.epoch else { return };
        let owed = node.replica.resets().find(|(_, reset)| reset.owed().any(|owed| owed == region));
        let Some((bucket, number)) = owed.map(|(bucket, reset)| (bucket, reset.number)) else { return };
        self.send(i, Op::TakeReset(TakeReset { region, epoch, bucket, number }));
    }

    /// Fills in what it has taken, once (or not at all, if its store does not answer just then).
    pub(super) fn fill_reset(&mut self, i: usize) {
        let (Some(region), Some(epoch)) = (self.seat(i), self.nodes[i].epoch) else { return };
        let epochs = if self.is(Bug::ResetTwice) { 0..=epoch } else { epoch..=epoch };
        let node = &self.nodes[i];
        let taken = |reset: &Reset| {
            let tokens = epochs.clone().find_map(|epoch| reset.taken(region, epoch));
            tokens.filter(|_| reset.number > node.filled).map(|tokens| (reset.number, tokens))
        };
        let Some((number, tokens)) = node.replica.resets().find_map(|(_, reset)| taken(reset)) else {
            return;
        };
        self.nodes[i].filled = number;
        if self.rng.percent(10) {
            return;
        }
        let (bare, now) = (self.bare(i), self.store_now(i));
        self.nodes[i].store.take(&bare, -tokens, now);
    }
}
