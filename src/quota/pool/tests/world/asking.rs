//! What a region asks for, and lends.

use super::*;

impl World {
    pub(super) fn consider(&mut self, i: usize, queued: Tokens) {
        let (now, level) = (self.mono(i), self.peek(i));
        let region = self.nodes[i].region;
        let node = &mut self.nodes[i];
        let Some(epoch) = node.epoch else { return };
        let situation = Situation {
            pool: &node.replica,
            policy: self.policy,
            bucket: BUCKET,
            region,
            part: node.part,
            now,
            level,
            queued,
            queued_max: queued,
            rtt: Micros::millis(200),
            tau_age: now - node.seen_at,
            may_lend: true,
        };
        let Some(plan) = node.borrower.consider(&situation) else {
            if let Some(ask) = node.ask.clone().filter(|a| a.epoch == epoch)
                && self.rng.percent(5)
            {
                self.nodes[i].resent = Some(self.store_now(i));
                // Once more, as it was.
                let lend = self.nodes[i].lend.clone().filter(|lend| lend.ask == ask);
                self.send(i, lend.map_or(Op::Ask(ask), Op::Lend));
            }
            return;
        };
        let fence = if self.is(Bug::NoFence) { 0 } else { self.nodes[i].borrower.next_seq() };
        let rate = self.discounted(plan.hold_rate);
        let late = self.is(Bug::StopAfterSending);
        let lent_used = self.is(Bug::LentUsed);
        let longer = if self.is(Bug::LoanTooLong) { Micros::seconds(5) } else { Micros::ZERO };
        let (bare, store_now) = (self.bare(i), self.store_now(i));
        let bucket = &mut self.nodes[i].store;
        let was = bucket.clone();
        let mut store = bucket.prepare(&bare, &plan, rate, fence, store_now);
        if lent_used {
            *bucket = was.clone();
            store = bucket.prepare(&bare, &Plan { lend: Rate::ZERO, ..plan }, rate, fence, store_now);
            store.lent = plan.lend;
        }
        if late {
            *bucket = was;
        }
        if self.rng.percent(5) {
            return; // it happened, but the daemon did not hear of it
        }
        let node = &mut self.nodes[i];
        let age = now - node.seen_at;
        let (part, seen, policy) = (node.part, node.seen, self.policy);
        let sending = Sending { region, epoch, policy, bucket: BUCKET, part, now, store_now, seen, age };
        let ask = node.borrower.ask(&plan, &store, &sending);
        (node.ask, node.resent, node.lend) = (Some(ask.clone()), None, None);
        if plan.lend.is_positive() {
            let until = Lend::until(seen, age + longer);
            node.lend = Some(Lend { ask: ask.clone(), rate: store.lent, until, seen_term: seen.term });
            self.loans += 1;
        }
        let lend = self.nodes[i].lend.clone();
        self.send(i, lend.map_or(Op::Ask(ask), Op::Lend));
    }

    /// A store that has lost its data learns what of its reserve was lent.
    pub(super) fn see_to_loans(&mut self, i: usize) {
        let (bare, now) = (self.bare(i), self.store_now(i));
        let node = &mut self.nodes[i];
        if node.epoch.is_none() || node.generation.known || node.generation.full {
            return;
        }
        if node.replica.lender_of(node.region).next().is_some() {
            node.store.touch(&bare, now);
        }
        node.generation.known = true;
    }
}
