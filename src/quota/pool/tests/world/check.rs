//! What must hold after every event.

use super::*;

impl World {
    /// Once a change is through, only the newest limit is in force.
    fn narrow(&mut self) {
        if self.bounds.len() < 2 || !self.pool.settled() {
            return;
        }
        let since = *self.settled_since.get_or_insert(self.pool.tau());
        // Until every region has learnt of it, and a longest lease has passed.
        if self.pool.tau() >= since + Micros::seconds(100) {
            self.bounds = self.bounds.split_off(self.bounds.len() - 1);
            self.settled_since = None;
            self.meter.empty();
        }
    }

    pub(super) fn check(&mut self) -> Result<(), String> {
        self.narrow();
        let rate = self.bounds.iter().map(|b| b.0).max().unwrap();
        let most = self.bounds.iter().map(|b| b.1).max().unwrap() + self.extra;
        // Clocks tick in whole microseconds: a few of those, and rounding.
        let slack = Tokens(10_000) + rate.during(Micros(5));
        let spent = self.meter.level(rate, Micros(self.now));
        if spent > most + slack {
            return Err(format!("S1: {spent:?} in a window, bound {most:?}"));
        }
        let parts: Vec<Tokens> = (0..self.nodes.len()).map(|i| self.peek(i)).collect();
        let with_parts = spent + parts.iter().copied().sum();
        if with_parts > most + slack {
            return Err(format!("S2: spent {spent:?}, spendable {parts:?}, bound {most:?}"));
        }
        // What is lent of reserves counts only for entries of its own term, as long as one can be stamped.
        let Stamp { term, tau } = match self.leader {
            Some(leader) => { self.clocks.last().unwrap().1 }.stamp(self.mono(leader)),
            None => Stamp { term: u64::MAX, tau: self.pool.tau() },
        };
        let way: Tokens = (0..self.nodes.len()).map(|i| self.on_its_way(i)).sum();
        let pooled = self.pool.free_in(term, self.policy, BUCKET, tau.max(self.pool.tau()));
        if with_parts + way + pooled > most + slack {
            return Err(format!(
                "S5: spent {spent:?}, spendable {parts:?}, on its way {way:?}, pool {pooled:?}, bound {most:?}"
            ));
        }
        if self.leader.is_some() && term == self.pool.term() {
            self.check_loans(tau.max(self.pool.tau()))?;
        }
        for region in (0..self.pool.regions().len() as u16).map(RegionId) {
            self.check_leases(region)?;
        }
        self.check_committed()?;
        if self.breached {
            let (check, bucket) = (self.pool.check(), self.pool.bucket(BUCKET));
            return Err(format!("S4: the pool itself reported a breach: {check:?} {bucket:?}"));
        }
        self.pool.check().map_err(|(_, breach)| format!("S4: {breach:?}"))
    }

    /// What daemons show of the promise (`quorate_pool_committed_ratio`) never cries wolf: while no change of policies is under
    /// way, reserves and all that regions may hold are no more than the limit.
    fn check_committed(&self) -> Result<(), String> {
        let books = self.pool.books(self.policy, BUCKET, self.pool.tau()).filter(|_| self.pool.settled());
        let Some(books) = books else { return Ok(()) };
        let lent = books.lent.iter().fold(books.reserved, |sum, lent| (sum.0 + lent.0, sum.1 + lent.1));
        let fits = lent.0 <= books.whole.0 && lent.1 <= books.whole.1;
        if fits { Ok(()) } else { Err(format!("S6: {lent:?} committed: {books:?}")) }
    }

    /// What an entry that is stamped now may count on, its lender does not use.
    fn check_loans(&self, tau: Micros) -> Result<(), String> {
        for i in (0..self.nodes.len()).filter(|i| !self.nodes[*i].dead) {
            let Some(loan) = self.pool.loan(BUCKET, self.nodes[i].region, tau) else { continue };
            let now = self.store_now(i);
            let bucket = self.nodes[i].store.peek(&self.bare(i), now);
            let idle = if bucket.refills_from() > now {
                Rate::MAX
            } else {
                bucket.on_loan().map_or(Rate::ZERO, |l| l.rate)
            };
            if self.seat(i).is_some() && loan.rate > idle {
                return Err(format!("S7: {loan:?}, of which {idle:?} is idle"));
            }
        }
        Ok(())
    }

    /// Of all lives of a region together.
    fn check_leases(&self, region: RegionId) -> Result<(), String> {
        let (mut burst, mut rate) = (Tokens::ZERO, Rate::ZERO);
        for i in (0..self.nodes.len()).filter(|i| self.nodes[*i].region == region && !self.nodes[*i].dead) {
            let bucket = self.nodes[i].store.peek(&self.bare(i), self.store_now(i));
            burst += bucket.borrowed().1;
            rate += bucket.borrowed().0;
        }
        if burst == Tokens::ZERO && rate == Rate::ZERO {
            return Ok(());
        }
        let record = self.pool.record(BUCKET, region);
        let covered = record.is_some_and(|r| {
            let liable = r.liable();
            liable.1 >= burst && liable.0 >= rate
        });
        if covered { Ok(()) } else { Err(format!("S3: {region:?} holds {burst:?}, {rate:?} of {record:?}")) }
    }

    /// Tokens granted to a region that its store has not got yet, but may still get.
    fn on_its_way(&self, i: usize) -> Tokens {
        let (mono, now, bare) = (self.mono(i), self.store_now(i), self.bare(i));
        let node = &self.nodes[i];
        if node.dead {
            return Tokens::ZERO;
        }
        let record = self.pool.record(BUCKET, node.region).filter(|r| Some(r.epoch) == node.epoch);
        let unread = record.map_or(Tokens::ZERO, |r| node.borrower.unread(r, mono));
        let has = node.store.level(&bare, now);
        let coming = self.queue.values().filter_map(|event| match event {
            Event::Install(j, nonce, grant) if *j == i && *nonce == node.nonce => Some(grant),
            _ => None,
        });
        let would_have = coming.map(|grant| {
            let mut store = node.store.clone();
            store.install(&bare, grant, now);
            store.level(&bare, now)
        });
        unread + would_have.max().map_or(Tokens::ZERO, |level| (level - has).or_zero())
    }

    /// Everything stops; once all leases and tombstones have run out the pool is whole again.
    pub(super) fn run_out(&mut self) -> Result<(), String> {
        self.term += 1;
        let version = self.pool.version();
        let acks: Vec<Op> =
            self.pool.unacked(version).map(|region| Op::Ack(Ack { region, version })).collect();
        for (seconds, ops) in [(100, acks), (200, vec![]), (10_000_000, vec![]), (1, vec![])] {
            let tau = self.pool.tau() + Micros::seconds(seconds);
            self.pool.apply(self.term, &Entry { stamp: Stamp { term: self.term, tau }, ops });
        }
        // (A pool whose rate is all in reserves, or zero, never refills.)
        let refills = |b: &BucketView| b.free_rate.during(Micros::seconds(10_000_000)) > b.free_burst;
        if !self.pool.settled() || self.pool.buckets().any(|b| !b.records.is_empty() || refills(&b)) {
            return Err(format!("L1: left over: {:?}", self.pool.buckets().collect::<Vec<_>>()));
        }
        Ok(())
    }
}
