//! The slow loop of a region: demand becomes asks, records become leases in the store.
//!
//! One task. It is woken by low buckets (pokes), by what its replica applied, by its store's session and by time; each
//! time it looks at the buckets that are due, and whatever they ask goes out as *one* proposal. The order of steps for each
//! bucket is the protocol's: see [`crate::quota::borrower`].

mod book;
mod drain;
mod lending;
mod policies;
mod resets;
mod time;

use crate::bugs::{Bug, planted};
use crate::clock;
use crate::limiter::Core;
use crate::limiter::table::Asking;
use crate::quota::amount::{DRIFT_PPM, Micros, Rate, Tokens};
use crate::quota::borrower::{Grant, InStore, Plan, Sending, Situation};
use crate::quota::bucket;
use crate::quota::policy::{BucketId, LOAN, Part, RegionName};
use crate::quota::pool::{Applied, Ask, AskInWindow, Join, Lend, Op, RegionId, SLOW};
use crate::raft::{ChangeFeed, Changes, Log, ProposeError};
use crate::store::{Install, Prepare, Prepared, RegionStore, Session, StoreError};
use crate::telemetry::metrics::Check;
use crate::telemetry::trace::{self, CAUSES_MAX};
use crate::trace_span;
use book::{Book, Terms};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use time::Said;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

/// Between two rounds, so that what comes together goes out together.
const ROUND_GAP: Micros = Micros::millis(10);
/// A proposal without an answer for this long is of no use any more.
const PROPOSE_WITHIN: Duration = Duration::from_secs(3);
/// A join, an acknowledgement or a tick that has had no effect is repeated after this long.
const REPEAT: Micros = Micros::millis(500);
/// How long an install that failed rests before it is tried again.
const RETRY_INSTALL: Micros = Micros::millis(20);
/// The most buckets in one store call.
const BATCH: usize = 256;
/// The most buckets that one round looks at; the rest is looked at in the next.
const ROUND_MAX: usize = 4_096;

/// What the slow loop tells the rest of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The cluster has been founded and policies were read.
    pub policies: u64,
    /// The region has joined under the store's present session, with this epoch.
    pub epoch: Option<u64>,
}

/// The slow loop.
pub struct Reconcile<L, S> {
    raft: L,
    store: S,
    core: Arc<Core>,
    region: RegionName,
    unmatched_allowed: bool,
    me: Option<RegionId>,
    /// As the log knew this region when [`Self::me`] was looked up.
    node: Option<u64>,
    session: Option<Session>,
    epoch: Option<u64>,
    marked_full: bool,
    /// The store knows what of its reserves was lent when its data began.
    marked_known: bool,
    /// A change of policies was under way at the last look.
    settling: bool,
    book: Book,
    proposals: JoinSet<Proposed>,
    last_round: Micros,
    joined_at: Micros,
    acked_at: Micros,
    resets: resets::Taken,
    ticked_at: Micros,
    activated_at: Micros,
    said: Said,
    rtt: Micros,
    drain_within: Duration,
    progress: watch::Sender<Progress>,
}

/// What all buckets of a round ask: one proposal.
#[derive(Default)]
struct Round {
    ops: Vec<Op>,
    buckets: Vec<BucketId>,
    span: Option<Span>,
}

/// How a proposal ended.
struct Proposed {
    buckets: Vec<BucketId>,
    result: Result<Applied, ProposeError>,
}

impl<L: Log, S: RegionStore> Reconcile<L, S> {
    /// A loop for this region; see [`Self::run`].
    #[must_use]
    pub fn new(raft: L, store: S, core: Arc<Core>, region: RegionName, unmatched_allowed: bool) -> Self {
        let long_ago = Micros::ZERO - Micros::seconds(3_600);
        Self {
            raft,
            store,
            core,
            region,
            unmatched_allowed,
            me: None,
            node: None,
            session: None,
            epoch: None,
            marked_full: false,
            marked_known: false,
            settling: false,
            book: Book::default(),
            proposals: JoinSet::new(),
            last_round: long_ago,
            joined_at: long_ago,
            acked_at: long_ago,
            resets: resets::Taken::default(),
            ticked_at: long_ago,
            activated_at: long_ago,
            said: Said::default(),
            rtt: Micros::millis(300),
            drain_within: drain::WITHIN_DEFAULT,
            progress: watch::Sender::new(Progress::default()),
        }
    }

    /// At its end it gives leases back for at most so long.
    #[must_use]
    pub fn draining_within(self, drain_within: Duration) -> Self {
        Self { drain_within, ..self }
    }

    /// How far it has come.
    #[must_use]
    pub fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Runs until `stop` says so, then gives back what the region has borrowed.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut feed: ChangeFeed = self.raft.changes();
        let mut session = self.store.session();
        self.changed(&Changes { everything: true, policies: true, ..Changes::default() });
        self.session_is(session.borrow_and_update().session());
        while !*stop.borrow() {
            let wake = self.wake_at();
            // In this order, so that a simulation repeats; each cause is served in every round anyway.
            tokio::select! {
                biased;
                _ = stop.changed() => break,
                changes = feed.next() => self.changed(&changes),
                () = self.core.table.poked() => {}
                Ok(()) = session.changed() => {
                    let now = session.borrow_and_update().session();
                    self.session_is(now);
                }
                Some(done) = self.proposals.join_next(), if !self.proposals.is_empty() => {
                    if let Ok(done) = done {
                        self.proposed(&done);
                    }
                }
                () = sleep_until(wake) => {}
            }
            self.keep_up().await;
            self.install().await;
            self.round().await;
        }
        self.drain().await;
    }

    /// When there is something to do without any other cause.
    fn wake_at(&self) -> Instant {
        let now = clock::now();
        let mut at = now + REPEAT;
        if let Some(due) = self.book.next_wake() {
            at = at.min(due.max(self.last_round + ROUND_GAP));
        }
        if let Some(retry) = self.book.next_install() {
            at = at.min(retry);
        }
        Instant::now() + (at - now).or_zero().to_duration()
    }

    /// The store's session has changed: what was lent under the old one is not used any more.
    fn session_is(&mut self, session: Option<Session>) {
        if session.map(|s| s.nonce) == self.session.map(|s| s.nonce) {
            return;
        }
        if let Some(session) = session {
            tracing::info!(kept = session.kept, "a new session with the store: leases start over");
            self.core.metrics.store_sessions.inc();
            self.core.denials.forget_all();
            // Under an earlier session something may have been spent, joined or not.
            let forgets = planted(Bug::FullAfterLoss) || planted(Bug::NoEpoch);
            self.marked_full = self.session.is_some() && !forgets;
            self.session = Some(session);
            // What was read of policies before the store's clock was is read again.
            if self.core.active.load().blind {
                self.read_policies();
            }
            self.marked_known = false;
            self.joined_at = Micros::ZERO - Micros::seconds(3_600);
            if planted(Bug::NoEpoch) && self.epoch.is_some() {
                return;
            }
            self.set_epoch(None);
            self.read_epoch();
        }
    }

    fn set_epoch(&mut self, epoch: Option<u64>) {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.book.restart(clock::now());
            self.progress.send_modify(|p| p.epoch = epoch);
        }
    }

    /// Is the epoch in the pool the one of this session?
    fn read_epoch(&mut self) {
        let (Some(me), Some(session)) = (self.me, self.session) else { return };
        if planted(Bug::NoEpoch) && self.epoch.is_some() {
            return;
        }
        let (epoch, nonce) = self.raft.pool().read().epoch(me);
        self.set_epoch((nonce == session.nonce && epoch > 0).then_some(epoch));
    }

    /// The replica has applied something.
    fn changed(&mut self, changes: &Changes) {
        let mine = self.me.is_some_and(|me| changes.joined.contains(&me));
        if changes.policies || changes.acknowledged || changes.everything || mine {
            self.read_policies();
        }
        if changes.everything || mine {
            self.read_epoch();
        }
        for bucket in &changes.breached {
            tracing::error!(%bucket, "the books of a bucket do not balance: it is frozen, nothing is lent from it");
            self.core.metrics.breached(Check::Books);
        }
        let buckets: BTreeSet<BucketId> = if changes.everything {
            self.book.buckets().collect()
        } else {
            changes.records.iter().map(|(_, bucket)| *bucket).collect()
        };
        self.meet_the_short(&buckets);
        self.read_records(buckets);
    }

    /// Reads the region's own records, and what is left in the pool of its buckets.
    fn read_records(&mut self, buckets: BTreeSet<BucketId>) {
        let (Some(me), Some(epoch)) = (self.me, self.epoch) else { return };
        let now = clock::now();
        let pool = self.raft.pool();
        let pool = pool.read();
        let tau = pool.tau();
        for bucket in buckets {
            let Some(loan) = self.book.get_mut(&bucket) else { continue };
            loan.tally.set_elsewhere(pool.free(loan.tally.policy, bucket, tau));
            // Others may need what this region has to spare.
            self.book.wake(bucket, now);
            let Some(loan) = self.book.get_mut(&bucket) else { continue };
            let Some(record) = pool.record(bucket, me) else { continue };
            let Some(grant) = loan.borrower.on_record(record, epoch, now) else {
                if loan.tally.asking() == Asking::Out && !loan.borrower.is_out() && !loan.is_installing() {
                    // It brought nothing. Whether to wait on is decided at the next look, which is now.
                    loan.tally.set_asking(Asking::Poked);
                }
                continue;
            };
            if let Some(waited) = grant.waited {
                self.core.metrics.ask.observe(waited.to_duration());
                self.rtt = Micros((self.rtt.0 * 7 + waited.0) / 8);
                self.core.set_lease_takes(self.rtt);
            }
            loan.tally.set_cut_off(false);
            self.book.queue_install(bucket, grant, now);
        }
    }

    /// What has to be proposed again and again until it has had its effect.
    async fn keep_up(&mut self) {
        let now = clock::now();
        if self.raft.node_id() != self.node {
            // Peers say that the region has been removed, or do not say so any more.
            self.read_policies();
        }
        let settling = self.progress.borrow().policies > 0 && !self.raft.pool().read().settled();
        if settling || self.settling {
            // What a region may use grows with Raft time while a change settles, and once more when it has.
            self.refresh_policies();
        }
        self.settling = settling;
        let mut ops = Vec::new();
        if let (Some(me), Some(session)) = (self.me, self.session) {
            let pool = self.raft.pool();
            let pool = pool.read();
            let (previous, nonce) = pool.epoch(me);
            if nonce != session.nonce && now >= self.joined_at + REPEAT {
                self.joined_at = now;
                ops.push(Op::Join(Join { region: me, previous, nonce: session.nonce }));
            }
        }
        ops.extend(self.keep_time(now));
        ops.extend(self.ack(now).await);
        ops.extend(self.resets_to_take(now));
        let tick = self.tick_due(now);
        if !ops.is_empty() || tick {
            self.propose(ops, Vec::new(), Span::none());
        }
        self.mark_full().await;
        self.mark_known().await;
        self.fill_reset().await;
    }

    /// While a change of policies settles, Raft time must go on: the leader sees to that.
    fn tick_due(&mut self, now: Micros) -> bool {
        let due = now >= self.ticked_at + REPEAT && !self.raft.pool().read().settled() && self.raft.leads();
        if due {
            self.ticked_at = now;
        }
        due
    }

    /// A region that joins for the very first time has spent nothing: its buckets begin full.
    async fn mark_full(&mut self) {
        let (Some(session), Some(epoch), false) = (self.session, self.epoch, self.marked_full) else {
            return;
        };
        if epoch != 1 && !planted(Bug::FullAfterLoss) {
            return;
        }
        if session.kept {
            self.marked_full = true;
            return;
        }
        let marked = self.store.mark_full(session).await;
        self.core.denials.forget_all();
        match marked {
            Ok(()) => self.marked_full = true,
            Err(error) => tracing::debug!(%error, "buckets cannot be marked as full yet"),
        }
    }

    /// The spans of installs that belong to traces.
    fn install_spans(&mut self, installed: &[(BucketId, Grant)]) -> Vec<Span> {
        let mut spans = Vec::new();
        for (bucket, grant) in installed {
            let Some(cause) = self.book.get_mut(bucket).and_then(|loan| loan.cause.take()) else { continue };
            if spans.len() < CAUSES_MAX {
                let granted = grant.granted.0;
                spans.push(trace::because_of(&cause, || {
                    trace_span!("install lease", "otel.kind" = "client", %bucket, seq = grant.seq, granted)
                }));
            }
        }
        spans
    }

    /// Puts records into the store. What fails is tried again: it is idempotent.
    async fn install(&mut self) {
        let now = clock::now();
        loop {
            let batch = self.book.take_installs(now, BATCH);
            if batch.is_empty() {
                return;
            }
            let active = self.core.active.load_full();
            let mut installs = Vec::with_capacity(batch.len());
            let mut buckets = Vec::with_capacity(batch.len());
            for (bucket, grant) in batch {
                let Some(loan) = self.book.get(&bucket) else { continue };
                // Its policy has gone, or its window is over: so has its bucket.
                let Some(terms) = loan.terms(&active, &self.core.time) else { continue };
                installs.push(install_of(bucket, &grant, &terms));
                buckets.push((bucket, grant));
            }
            if installs.is_empty() {
                continue;
            }
            let spans = self.install_spans(&buckets);
            let installed = self.store.install(installs).await;
            drop(spans);
            // Whatever came of it, they may be there.
            buckets.iter().for_each(|(bucket, _)| self.core.denials.forget(bucket));
            match installed {
                Ok(levels) => {
                    let at = self.store.now();
                    for ((bucket, _), level) in buckets.iter().zip(levels) {
                        let Some(loan) = self.book.get(bucket) else { continue };
                        loan.tally.saw(level, at);
                        loan.tally.installed();
                        loan.tally.set_asking(Asking::No);
                        self.core.metrics.records.inc();
                    }
                    // They may want more at once, or less.
                    for (bucket, _) in buckets {
                        self.book.wake(bucket, now);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "leases could not be installed; trying again");
                    for (bucket, grant) in buckets {
                        self.book.queue_install(bucket, grant, now + RETRY_INSTALL);
                    }
                    return;
                }
            }
        }
    }

    /// Looks at the buckets that are due, and proposes what they ask.
    async fn round(&mut self) {
        let now = clock::now();
        for tally in self.core.table.take_poked() {
            self.book.meet(tally, now);
        }
        if now < self.last_round + ROUND_GAP {
            return;
        }
        let due = self.book.take_due(now, ROUND_MAX);
        if due.is_empty() {
            return;
        }
        self.last_round = now;
        let mut round = Round::default();
        for batch in due.chunks(BATCH) {
            let plans = self.consider(batch, now);
            if !plans.is_empty() {
                // What could not be prepared is looked at again soon.
                let _ = self.ask(plans, &mut round).await;
            }
        }
        self.propose_round(round);
        self.core.metrics.buckets.set(i64::try_from(self.book.len()).unwrap_or(i64::MAX));
    }

    /// Which of these buckets have reason to ask, and for what?
    fn consider(&mut self, batch: &[BucketId], now: Micros) -> Vec<(BucketId, Plan)> {
        let mut plans = Vec::new();
        let active = self.core.active.load_full();
        let store_now = self.store.now();
        let may_lend = self.raft.is_known_to_all(Lend::LEVEL);
        let pool = self.raft.pool();
        let pool = pool.read();
        let applied_at = self.raft.applied_at();
        let (age, tau) = ((now - applied_at.at).or_zero(), applied_at.tau(&pool, now));
        for bucket in batch {
            let Some(loan) = self.book.get_mut(bucket) else { continue };
            let offered = loan.tally.take_offered();
            loan.borrower.observe(now, offered.cost, offered.largest);
            let terms = loan.terms(&active, &self.core.time).filter(|terms| terms.policy.pooled);
            let (Some(terms), Some(me), Some(_)) = (terms, self.me, self.epoch) else {
                loan.tally.set_asking(Asking::No);
                let over = loan.is_over(&self.core.time);
                self.book.settle(*bucket, now + REPEAT, now);
                if over {
                    self.book.forget(bucket, &self.core.table);
                }
                continue;
            };
            let policy = terms.policy;
            let plan = loan.borrower.consider(&Situation {
                pool: &pool,
                policy: policy.id,
                bucket: *bucket,
                region: me,
                part: terms.part,
                now,
                level: loan.level(terms.shape, store_now, now),
                queued: offered.queued + offered.denied,
                queued_max: offered.largest,
                rtt: self.rtt,
                tau_age: age,
                may_lend,
            });
            loan.tally.set_low_water(loan.borrower.low_water());
            let free = pool.free(policy.id, *bucket, tau);
            loan.tally.set_elsewhere(free);
            match plan {
                Some(plan) => plans.push((*bucket, plan)),
                None => {
                    // Who waits goes on waiting for an ask that only has to keep its distance from the last one, if there
                    // is something to be had.
                    let of_use = free.is_positive() && free >= offered.largest_waiting();
                    // So it does for what other regions have to spare of a slow limit.
                    let slow =
                        pool.cut(policy.id).is_some_and(|cut| cut.rate < SLOW) && policy.window.is_none();
                    let may_come = (slow || loan.borrower.is_on_demand())
                        && offered.queued.is_positive()
                        && pool.lent_elsewhere(*bucket, me) >= offered.largest.max(Tokens::whole(1));
                    let waits_on =
                        loan.borrower.is_out() || of_use && loan.borrower.is_held_back(now) || may_come;
                    if !waits_on {
                        loan.tally.set_asking(Asking::No);
                    }
                    let next = loan.borrower.next_look(now);
                    self.book.settle(*bucket, next, now);
                    if self.book.get(bucket).is_some_and(|loan| loan.borrower.is_idle(now)) {
                        self.book.forget(bucket, &self.core.table);
                    }
                }
            }
        }
        plans
    }

    /// Stops using what is given up, and only then asks.
    async fn ask(&mut self, plans: Vec<(BucketId, Plan)>, round: &mut Round) -> Result<(), StoreError> {
        let late = planted(Bug::StopAfterSending);
        let active = self.core.active.load_full();
        let mut prepares = Vec::with_capacity(plans.len());
        let mut asking: Vec<(BucketId, Plan, Part, bool)> = Vec::with_capacity(plans.len());
        for (bucket, plan) in plans {
            let Some(loan) = self.book.get(&bucket) else { continue };
            let Some(terms) = loan.terms(&active, &self.core.time) else { continue };
            prepares.push(Prepare {
                bucket,
                shape: terms.shape,
                unseen: terms.unseen,
                seq: loan.borrower.next_seq(),
                hold_burst: if late { Tokens::MAX } else { plan.hold_burst },
                hold_rate: if late { Rate::MAX } else { plan.hold_rate.discount(DRIFT_PPM) },
                permits: terms.permits(),
                lend_rate: plan.lend,
                lend_for: if plan.lend.is_positive() { LOAN } else { Micros::ZERO },
            });
            asking.push((bucket, plan, terms.part, terms.permits().is_some()));
        }
        // Loans count from before the store stops using what is lent.
        let (lent_seen, lent_at) = (self.raft.applied_at(), clock::now());
        let lent_until = Lend::until(lent_seen.stamp, lent_at - lent_seen.at);
        let prepared = self.store.prepare(prepares).await;
        let now = clock::now();
        let (store_now, prepared) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                // Nothing was sent. Whatever the store may have given up already is not given back: that is safe.
                tracing::debug!(%error, "buckets could not be prepared; trying again");
                let later = if error == StoreError::Fenced { now + REPEAT } else { now + RETRY_INSTALL };
                for (bucket, ..) in asking {
                    self.book.settle(bucket, later, now);
                }
                return Err(error);
            }
        };
        let (Some(me), Some(epoch)) = (self.me, self.epoch) else { return Ok(()) };
        let seen = self.raft.applied_at();
        let span = self.ask_span(&asking);
        if round.ops.is_empty() {
            round.span = Some(span);
        }
        for ((bucket, plan, part, permits), prepared) in asking.into_iter().zip(prepared) {
            let Some(loan) = self.book.get_mut(&bucket) else { continue };
            let held = permits.then_some(if late { plan.hold_burst } else { prepared.burst });
            let Prepared { leased, level, returned, lent, .. } = prepared;
            let mut store = InStore { leased, level, returned, held, lent };
            if late && !permits {
                store.returned = (prepared.level - part.cap() - plan.hold_burst).or_zero();
            }
            let ask: Ask = loan.borrower.ask(
                &plan,
                &store,
                &Sending {
                    region: me,
                    epoch,
                    policy: loan.tally.policy,
                    bucket,
                    part,
                    now,
                    store_now,
                    seen: seen.stamp,
                    age: (now - seen.at).or_zero(),
                },
            );
            loan.tally.saw(prepared.level, store_now);
            loan.tally.set_asking(Asking::Out);
            let turn = loan.tally.turn;
            let next = loan.borrower.next_look(now);
            self.book.settle(bucket, next, now);
            self.core.metrics.asks.inc();
            round.ops.push(match turn {
                None if plan.lend.is_positive() => {
                    Op::Lend(Lend { ask, rate: lent, until: lent_until, seen_term: lent_seen.stamp.term })
                }
                Some(turn) => Op::AskInWindow(AskInWindow { start: turn.start, ask }),
                None => Op::Ask(ask),
            });
            round.buckets.push(bucket);
        }
        Ok(())
    }

    /// The span of a proposal: part of the traces of the requests that wait for what is asked for. So are the installs of what
    /// these buckets get.
    fn ask_span(&mut self, asking: &[(BucketId, Plan, Part, bool)]) -> Span {
        if !trace::is_on() {
            return Span::none();
        }
        let (mut causes, mut traced) = (Vec::new(), Vec::new());
        for (bucket, ..) in asking {
            let Some(loan) = self.book.get_mut(bucket) else { continue };
            loan.cause = None;
            if let Some(cause) = loan.tally.take_cause().filter(|_| causes.len() < CAUSES_MAX) {
                causes.push(cause);
                traced.push(*bucket);
            }
        }
        let span = trace::caused(&causes, || {
            trace_span!("propose", "otel.kind" = "client", asks = asking.len(), outcome = Empty)
        });
        let cause = trace::cause_of(&span);
        if causes.is_empty() {
            traced.extend(asking.iter().take(CAUSES_MAX).map(|(bucket, ..)| *bucket));
        }
        for bucket in traced {
            if let Some(loan) = self.book.get_mut(&bucket) {
                loan.cause = cause.clone().map(Box::new);
            }
        }
        span
    }

    fn propose(&mut self, ops: Vec<Op>, buckets: Vec<BucketId>, span: Span) {
        let raft = self.raft.clone();
        let deadline = Instant::now() + PROPOSE_WITHIN;
        let time = self.core.metrics.proposal.clone();
        self.proposals.spawn(async move {
            let began = Instant::now();
            let result = raft.propose(ops, deadline).instrument(span.clone()).await;
            time.observe(began.elapsed());
            span.record("outcome", outcome(&result));
            Proposed { buckets, result }
        });
    }

    /// An answer is only a hint: what counts is what the region's own replica applies.
    fn proposed(&mut self, done: &Proposed) {
        let now = clock::now();
        let outcome = outcome(&done.result);
        self.core.metrics.proposed(outcome);
        if done.result.is_ok() {
            return;
        }
        tracing::debug!(outcome, buckets = done.buckets.len(), "a proposal had no effect");
        for bucket in &done.buckets {
            let Some(loan) = self.book.get_mut(bucket) else { continue };
            loan.tally.set_cut_off(true);
            loan.tally.set_asking(Asking::No);
            if matches!(done.result, Err(ProposeError::NotSent { .. } | ProposeError::Refused)) {
                loan.borrower.came_to_nothing();
            }
            let next = loan.borrower.next_look(now);
            self.book.settle(*bucket, next, now);
        }
    }
}

/// Its name in metrics and spans.
fn outcome(result: &Result<Applied, ProposeError>) -> &'static str {
    match result {
        Ok(_) => "applied",
        Err(ProposeError::NotSent { .. }) => "not_sent",
        Err(ProposeError::Unknown) => "unknown",
        Err(ProposeError::Refused) => "refused",
        Err(ProposeError::TooLarge) => "too_large",
        Err(ProposeError::TooNew { .. }) => "too_new",
    }
}

/// A grant as the store keeps it.
fn install_of(bucket: BucketId, grant: &Grant, terms: &Terms<'_>) -> Install {
    let &Grant { seq, push, granted, burst, rate, deadline, .. } = grant;
    let grant = bucket::Grant { seq, push, granted, burst, rate: rate.discount(DRIFT_PPM), deadline };
    Install { bucket, shape: terms.shape, unseen: terms.unseen, grant, permits: terms.permits() }
}
