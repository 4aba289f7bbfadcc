//! The buckets that the slow loop follows: who borrowed what, when to look at each again, what is still to be installed.

use crate::limiter::active::{Active, ActivePolicy};
use crate::limiter::table::{Table, Tally};
use crate::limiter::time_of_day::TimeOfDay;
use crate::quota::amount::{DRIFT_PPM, Level, Micros, Rate, Tokens};
use crate::quota::borrower::{Borrower, Grant, Plan};
use crate::quota::bucket::{Shape, Unseen};
use crate::quota::counted::Allowance;
use crate::quota::policy::{BucketId, Part};
use crate::telemetry::trace::Cause;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// All buckets that the slow loop follows.
#[derive(Debug, Default)]
pub struct Book {
    /// Boxed: a map has room for up to twice as many, and half as many again while it grows.
    loans: HashMap<BucketId, Box<Loan>>,
    wakes: BTreeSet<(Micros, BucketId)>,
    installs: BTreeSet<(Micros, BucketId)>,
}

/// One of them.
#[derive(Debug)]
pub struct Loan {
    /// Its demand, shared with the fast loop.
    pub tally: Arc<Tally>,
    /// What it has borrowed.
    pub borrower: Borrower,
    /// What its ask that is out is traced with.
    pub cause: Option<Box<Cause>>,
    wake: Option<Micros>,
    /// Boxed: few of the many have one.
    install: Option<Box<(Micros, Grant)>>,
}

/// What a bucket is to the region's store.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// Its policy.
    pub policy: &'a ActivePolicy,
    /// Without a lease.
    pub shape: Shape,
    /// If the store does not hold it.
    pub unseen: Option<Unseen>,
    /// What the region may use of the reserve.
    pub part: Part,
}

impl Terms<'_> {
    /// Of permits: what the region may use of them.
    pub fn permits(&self) -> Option<Allowance> {
        self.policy.count.map(|(_, span)| self.policy.allowance(span))
    }
}

impl Loan {
    /// Is a record still to be put into the store?
    pub fn is_installing(&self) -> bool {
        self.install.is_some()
    }

    /// What its bucket is to the store at this moment. `None`: its policy has gone or has become another, or its window is
    /// over.
    pub fn terms<'a>(&self, active: &'a Active, time: &TimeOfDay) -> Option<Terms<'a>> {
        let policy = active.policy(self.tally.policy)?;
        if policy.count.is_some() != self.tally.is_of_permits() {
            return None;
        }
        match (policy.window, self.tally.turn) {
            (None, None) => {
                let (shape, unseen, part) = (policy.shape, policy.unseen, policy.part);
                Some(Terms { policy, shape, unseen, part })
            }
            (Some(window), Some(turn))
                if window.turn_from(turn.start) == Some(turn) && !self.is_over(time) =>
            {
                let unseen = Some(time.unseen(turn)?);
                Some(Terms { policy, shape: policy.shape_in(turn), unseen, part: policy.part_in(turn) })
            }
            _ => None,
        }
    }

    /// Is its window over?
    pub fn is_over(&self, time: &TimeOfDay) -> bool {
        self.tally.turn.zip(time.now()).is_some_and(|(turn, now)| turn.end <= now)
    }

    /// What the bucket holds at store time `store_now`, going by what was last seen of it. An estimate.
    pub fn level(&self, shape: Shape, store_now: Micros, now: Micros) -> Tokens {
        let (level, at) = self.tally.level();
        let slice = self.borrower.slice(now);
        let (rate, burst) = slice.map_or((Rate::ZERO, Tokens::ZERO), |s| (s.0, s.1));
        let mut level = Level::new(level);
        let rate = shape.rate + rate.discount(DRIFT_PPM);
        level.accrue(rate, store_now - at, shape.cap + burst);
        level.tokens
    }
}

impl Book {
    /// Follows this bucket from now on (if it does not already), and looks at it at the next occasion.
    pub fn meet(&mut self, tally: Arc<Tally>, now: Micros) {
        let bucket = tally.bucket;
        if self.loans.get(&bucket).is_some_and(|loan| loan.tally.policy != tally.policy) {
            // Its policy was removed and has come back as another: what was borrowed has run out long ago.
            self.drop(&bucket);
        }
        let loan = self.loans.entry(bucket);
        loan.or_insert_with(|| {
            Box::new(Loan { tally, borrower: Borrower::new(now), cause: None, wake: None, install: None })
        });
        self.wake(bucket, now);
    }

    pub fn get(&self, bucket: &BucketId) -> Option<&Loan> {
        self.loans.get(bucket).map(|loan| &**loan)
    }

    pub fn get_mut(&mut self, bucket: &BucketId) -> Option<&mut Loan> {
        self.loans.get_mut(bucket).map(|loan| &mut **loan)
    }

    pub fn buckets(&self) -> impl Iterator<Item = BucketId> {
        self.loans.keys().copied()
    }

    pub fn len(&self) -> usize {
        self.loans.len()
    }

    /// Looks at it no later than `at`.
    pub fn wake(&mut self, bucket: BucketId, at: Micros) {
        if let Some(loan) = self.loans.get(&bucket)
            && loan.wake.is_none_or(|wake| wake > at)
        {
            self.set_wake(bucket, at);
        }
    }

    /// Looks at it at `at` (or a little later than `now`), and not before without another cause.
    pub fn settle(&mut self, bucket: BucketId, at: Micros, now: Micros) {
        self.set_wake(bucket, at.max(now + Micros(1)));
    }

    fn set_wake(&mut self, bucket: BucketId, at: Micros) {
        let Some(loan) = self.loans.get_mut(&bucket) else { return };
        if let Some(wake) = loan.wake.replace(at) {
            self.wakes.remove(&(wake, bucket));
        }
        self.wakes.insert((at, bucket));
    }

    /// The time of the next look.
    pub fn next_wake(&self) -> Option<Micros> {
        self.wakes.first().map(|(at, _)| *at)
    }

    /// Takes the buckets whose time has come, at most `most`.
    pub fn take_due(&mut self, now: Micros, most: usize) -> Vec<BucketId> {
        let mut due = Vec::new();
        while due.len() < most
            && let Some((at, bucket)) = self.wakes.first().copied()
            && at <= now
        {
            self.wakes.pop_first();
            if let Some(loan) = self.loans.get_mut(&bucket) {
                loan.wake = None;
                due.push(bucket);
            }
        }
        due
    }

    /// This record is to be put into the store, not before `at`. It replaces an older one.
    pub fn queue_install(&mut self, bucket: BucketId, grant: Grant, at: Micros) {
        let Some(loan) = self.loans.get_mut(&bucket) else { return };
        if loan.install.as_ref().is_some_and(|to| (to.1.seq, to.1.push) > (grant.seq, grant.push)) {
            return;
        }
        if let Some(before) = loan.install.replace(Box::new((at, grant))) {
            self.installs.remove(&(before.0, bucket));
        }
        self.installs.insert((at, bucket));
    }

    /// The time of the next install.
    pub fn next_install(&self) -> Option<Micros> {
        self.installs.first().map(|(at, _)| *at)
    }

    /// Takes records to be installed now, at most `most`.
    pub fn take_installs(&mut self, now: Micros, most: usize) -> Vec<(BucketId, Grant)> {
        let mut batch = Vec::new();
        while batch.len() < most
            && let Some((at, bucket)) = self.installs.first().copied()
            && at <= now
        {
            self.installs.pop_first();
            if let Some(install) = self.loans.get_mut(&bucket).and_then(|loan| loan.install.take()) {
                batch.push((bucket, install.1));
            }
        }
        batch
    }

    /// The region has a new epoch, or none: nothing is borrowed any more.
    pub fn restart(&mut self, now: Micros) {
        self.installs.clear();
        self.wakes.clear();
        for (bucket, loan) in &mut self.loans {
            loan.borrower.restart(now);
            loan.install = None;
            loan.wake = Some(now);
            self.wakes.insert((now, *bucket));
        }
    }

    /// Follows it no more, unless a request is just looking at it.
    pub fn forget(&mut self, bucket: &BucketId, table: &Table) {
        if table.forget(bucket) {
            self.drop(bucket);
        }
    }

    fn drop(&mut self, bucket: &BucketId) {
        if let Some(loan) = self.loans.remove(bucket) {
            if let Some(wake) = loan.wake {
                self.wakes.remove(&(wake, *bucket));
            }
            if let Some(install) = loan.install {
                self.installs.remove(&(install.0, *bucket));
            }
        }
    }

    /// Plans to hold nothing any more, nor to take what is on its way.
    pub fn give_up_all(&mut self, now: Micros) -> Vec<(BucketId, Plan)> {
        let may_hold = |loan: &Loan| loan.borrower.slice(now).is_some() || loan.borrower.is_out();
        let lent = self.loans.iter_mut().filter(|(_, loan)| may_hold(loan));
        lent.map(|(bucket, loan)| (*bucket, loan.borrower.give_up_all())).collect()
    }
}
