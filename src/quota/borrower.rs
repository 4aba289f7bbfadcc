//! A region's side of one bucket: what it has borrowed of the pool, and when to ask for what.
//!
//! The bucket itself lives in the region's store. The order is always the same, and safety hangs on it:
//!
//! 1. [`Borrower::consider`] makes a [`Plan`].
//! 2. The store *stops using* what the plan gives up, and its time is read (`Store::prepare`).
//! 3. [`Borrower::ask`] writes the ask; only now is anything sent. It may be sent again as it is: its lease counts from here.
//! 4. The region's own replica applies the entry; [`Borrower::on_record`] makes a [`Grant`] of the record.
//! 5. The store installs it (any number of times: it is idempotent).
//!
//! Between 2 and 3 nothing may fail for good: if `prepare` did, forget the plan and consider again. Once a bucket has been
//! prepared for an ask, a grant of an *older* seq must not be installed any more ([`Borrower::next_seq`] is the fence).
//!
//! Rates are undiscounted in here. The store is given `rate.discount(DRIFT_PPM)`, for a plan's and for a grant's rate alike.

mod lending;
mod outlook;
mod permits;
mod windows;

use self::outlook::{Hold, Outlook, above_by_a_third};
use super::amount::{DRIFT_PPM, MICROS_PER_TOKEN, Micros, Rate, Tokens};
use super::demand::Demand;
use super::policy::{BucketId, LEASE_MIN, LOAN, Part};
use super::pool::{Ask, Pool, Preview, Record, RegionId, Stamp};
use crate::bugs::{Bug, planted};

/// A level is low when the demand uses it up within this share of the time that an ask takes.
const LOW_PERCENT: i64 = 150;
/// Burst to hold: so much time's demand (or what the limit refills its burst in).
const HORIZON: Micros = Micros::seconds(1);
/// The longest such time.
const HORIZON_MAX: Micros = Micros::seconds(60);
/// Headroom over the demand.
const HEADROOM_PERCENT: i64 = 125;
/// The shortest time between two asks.
const GAP_MIN: Micros = Micros::millis(200);
/// The longest time that it holds back from asking for more after asking brought nothing.
const GAP_MAX: Micros = Micros::seconds(2);
/// The shortest time between two looks.
const LOOK_MIN: Micros = Micros::millis(10);
/// How often a region that holds a slice looks whether it still needs it.
const SELF_CHECK: Micros = Micros::millis(250);
/// An ask without an answer for this long is superseded by another, and then for longer and longer.
const ANSWER_TIMEOUT: Micros = Micros::millis(1_500);
const BACKOFF_MIN: Micros = Micros::seconds(1);
const BACKOFF_MAX: Micros = Micros::seconds(4);
/// A bucket without demand, slice or ask for this long may be forgotten.
const IDLE: Micros = Micros::seconds(120);

/// What a region has borrowed for one bucket. Time is the daemon's monotonic clock, except where store time is named.
#[derive(Clone, Debug)]
pub struct Borrower {
    demand: Demand,
    slice: Option<Slice>,
    out: Option<Out>,
    /// The newest ask. Starts from the clock, so that a borrower that is forgotten and made anew goes on counting up.
    seq: u64,
    /// The record read last.
    read: Read,
    next_look: Micros,
    next_ask: Micros,
    last_ask: Micros,
    /// Time to the next ask for more: doubles while asking yields nothing. Giving up what others are short of is not held
    /// back by it.
    gap: Micros,
    backoff: Micros,
    /// How often to look while holding a slice.
    self_check: Micros,
    low_water: Tokens,
    /// Requests waited, or were denied, when it was considered last.
    starved: bool,
    /// What of its reserve's rate it has lent (not more than), until when (or sooner).
    lent: Option<(Rate, Micros)>,
    /// When it looked last, the pool would have served it with tokens for the requests at hand.
    on_demand: bool,
}

/// What it has of the pool.
#[derive(Clone, Copy, Debug)]
struct Slice {
    burst: Tokens,
    rate: Rate,
    /// The end of the lease in store time, which is what counts ...
    deadline: Micros,
    /// ... and by the daemon's clock, for planning.
    until: Micros,
}

/// An ask that has not been answered. It stays until a newer one supersedes it: were it just forgotten, a late push of the
/// record before it would be read, although the pool may have acted on what this ask gave up.
#[derive(Clone, Copy, Debug)]
struct Out {
    sent: Sent,
    seq: u64,
    /// It is known never to have had, nor to get, an effect: no answer is awaited.
    void: bool,
}

/// When an ask was made, before it was first sent.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    mono: Micros,
    store: Micros,
}

#[derive(Clone, Copy, Debug, Default)]
struct Read {
    seq: u64,
    push: u32,
    granted: Tokens,
    sent: Sent,
}

/// What [`Borrower::consider`] looks at.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The region's own replica.
    pub pool: &'a Pool,
    /// The bucket's policy.
    pub policy: u32,
    /// Which bucket.
    pub bucket: BucketId,
    /// This region.
    pub region: RegionId,
    /// What it may use of its reserve: [`Pool::usable`].
    pub part: Part,
    /// The daemon's monotonic clock.
    pub now: Micros,
    /// The bucket's level in the store, as far as known: overdraft included, never below zero.
    pub level: Tokens,
    /// The cost of all requests that wait, or were denied just now.
    pub queued: Tokens,
    /// The largest cost of one of them.
    pub queued_max: Tokens,
    /// How long it takes from sending an ask to reading its record.
    pub rtt: Micros,
    /// How long ago the replica has applied its newest stamp.
    pub tau_age: Micros,
    /// All members apply loans of idle reserve.
    pub may_lend: bool,
}

impl Situation<'_> {
    /// The Raft time now, as far as the replica can say.
    fn tau(&self) -> Micros {
        self.pool.tau() + self.tau_age.or_zero()
    }

    /// The Raft time at which an ask that is made now may be applied.
    fn tau_of_ask(&self) -> Micros {
        self.tau() + self.rtt.mul_div(1, 2)
    }
}

/// An ask to be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Of its slice it is to keep at most this burst ...
    pub hold_burst: Tokens,
    /// ... and at most this rate (undiscounted).
    pub hold_rate: Rate,
    /// Its demand.
    pub demand: Rate,
    /// Burst that it would like to hold.
    pub want: Tokens,
    /// Tokens that it lacks.
    pub short: Tokens,
    /// The largest cost of one request.
    pub quantum: Tokens,
    /// It is to lend this much of its reserve's rate, for [`LOAN`]; zero: nothing.
    pub lend: Rate,
}

/// What the store said after it has stopped using what the plan gives up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InStore {
    /// Was a lease live in it (before the shrinking)?
    pub leased: bool,
    /// The level after the shrinking.
    pub level: Tokens,
    /// Tokens that are gone from it, and may be given back.
    pub returned: Tokens,
    /// Of permits: what must be said to be held, because holders have it.
    pub held: Option<Tokens>,
    /// How much of the reserve's rate is lent.
    pub lent: Rate,
}

/// Where and when an ask is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sending {
    /// This region ...
    pub region: RegionId,
    /// ... and its epoch.
    pub epoch: u64,
    /// The bucket's policy ...
    pub policy: u32,
    /// ... and the bucket.
    pub bucket: BucketId,
    /// What the region uses of its reserve (as given to the store in `prepare`).
    pub part: Part,
    /// The daemon's clock, before anything is sent.
    pub now: Micros,
    /// The store's time as `prepare` read it.
    pub store_now: Micros,
    /// The newest stamp that the replica has applied ...
    pub seen: Stamp,
    /// ... and how long ago.
    pub age: Micros,
}

/// A record, to be put into the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The ask that it answers.
    pub seq: u64,
    /// Later records under the same `seq` have greater numbers.
    pub push: u32,
    /// Tokens granted under `seq` so far.
    pub granted: Tokens,
    /// The slice's burst ...
    pub burst: Tokens,
    /// ... and rate (undiscounted).
    pub rate: Rate,
    /// Store time at which the lease ends.
    pub deadline: Micros,
    /// How long the ask took to be answered; `None` for a later push. For the region's average of round trips.
    pub waited: Option<Micros>,
}

impl Borrower {
    /// Nothing borrowed, no demand.
    #[must_use]
    pub fn new(now: Micros) -> Self {
        let seq = u64::try_from(now.0).unwrap_or(0);
        Self {
            demand: Demand::new(now),
            slice: None,
            out: None,
            seq,
            read: Read { seq, ..Read::default() },
            next_look: now,
            next_ask: now,
            last_ask: now,
            gap: Micros::ZERO,
            backoff: Micros::ZERO,
            self_check: SELF_CHECK,
            low_water: Tokens::MAX,
            starved: false,
            lent: None,
            on_demand: false,
        }
    }

    /// The region has a new epoch: what was lent under the older one is not used any more, and unanswered asks are void. The
    /// demand goes on.
    pub fn restart(&mut self, now: Micros) {
        let seq = self.seq;
        *self = Self { demand: self.demand, lent: self.lent, ..Self::new(now) };
        self.seq = self.seq.max(seq);
        self.read.seq = self.seq;
    }

    /// `offered` tokens were asked for since the last time (admitted or not), at most `largest` by one request. To be told
    /// before every [`Self::consider`], and at least about once a second while there is traffic: what is told after a
    /// longer time is taken to have come in evenly.
    pub fn observe(&mut self, now: Micros, offered: Tokens, largest: Tokens) {
        self.demand.add(now, offered, largest);
    }

    /// Is there reason to ask, and for what? Cheap when there is nothing to be done.
    pub fn consider(&mut self, s: &Situation<'_>) -> Option<Plan> {
        self.starved = s.queued.is_positive();
        if planted(Bug::ForgetUnanswered) && !self.awaits_answer(s.now) {
            self.out = None;
        }
        if s.now < self.next_look || s.now < self.next_ask || self.awaits_answer(s.now) {
            return None;
        }
        self.next_look = s.now + LOOK_MIN;
        if self.slice.is_some_and(|slice| slice.until <= s.now) {
            // What it had is gone, however little the last asks brought.
            self.gap = Micros::ZERO;
        }
        let cut = s.pool.cut(s.policy).filter(|cut| cut.pooled)?;
        if s.pool.window(s.policy).is_some() {
            return self.consider_window(s);
        }
        if s.pool.lends_permits(s.policy) {
            return self.consider_permits(s, cut.burst);
        }
        self.demand.tune(cut.rate, cut.burst);
        let fill = cut.rate.time_for(cut.burst).unwrap_or(HORIZON_MAX);
        self.self_check = SELF_CHECK.max(fill.mul_div(1, 50)).min(HORIZON_MAX);
        let outlook = self.outlook(s, fill.clamp(HORIZON, HORIZON_MAX));
        let ahead_of = (outlook.ahead + outlook.quantum).max(s.part.burst.percent(50));
        self.low_water = s.part.overdraft + ahead_of;
        let lend = self.to_lend(s, &outlook);
        let keep = Hold { burst: outlook.keep_burst, rate: outlook.keep_rate };
        let lends = lend.is_positive().then_some(keep);
        if !outlook.active && !outlook.leased() && lends.is_none() {
            return None;
        }
        let tau = s.tau_of_ask();
        let mut inquiry = outlook.inquiry(s.region);
        let mut preview = s.pool.preview(s.policy, s.bucket, tau, &inquiry)?;
        if outlook.only_waiting(&preview, s) {
            // As the ask will say it. (A part of what is lacking is not given: a larger request before must not count as waiting.)
            inquiry.short = outlook.short_for(&preview, s);
            preview = s.pool.preview(s.policy, s.bucket, tau, &inquiry)?;
        }
        self.on_demand = preview.on_demand;
        let hold = self.reason(s, &outlook, &preview, cut.rate, cut.burst).or(lends)?;
        Some(Plan {
            lend,
            hold_burst: hold.burst,
            hold_rate: hold.rate,
            demand: outlook.demand,
            want: outlook.want,
            short: outlook.short_for(&preview, s),
            quantum: outlook.quantum,
        })
    }

    /// The number that the next ask will have. From `prepare` on, the store must not install a grant with a smaller one.
    #[must_use]
    pub fn next_seq(&self) -> u64 {
        self.seq.saturating_add(1)
    }

    /// Writes the ask of a plan, after the store has stopped using what it gives up.
    pub fn ask(&mut self, plan: &Plan, store: &InStore, sending: &Sending) -> Ask {
        // A lease that the store does not know of may still get there (an install without an answer), so it is all held
        // until it has run out by the store's clock, which alone decides that.
        self.slice = self.slice.filter(|slice| slice.deadline > sending.store_now);
        if let Some(slice) = self.slice.as_mut().filter(|_| store.leased) {
            slice.burst = slice.burst.min(store.held.unwrap_or(plan.hold_burst.or_zero()));
            slice.rate = slice.rate.min(plan.hold_rate.or_zero());
        }
        let (mut held_burst, held_rate) = self.slice.map_or_else(Default::default, |s| (s.burst, s.rate));
        let mut want = plan.want;
        if let Some(held) = store.held {
            held_burst = held_burst.max(held);
            want = (held - store.level + plan.want).or_zero();
        }
        if self.out.is_some_and(|out| !out.void) {
            self.backoff = (self.backoff + self.backoff).clamp(BACKOFF_MIN, BACKOFF_MAX);
        }
        self.seq = self.next_seq();
        let sent = Sent { mono: sending.now, store: sending.store_now };
        self.out = Some(Out { seq: self.seq, sent, void: false });
        if store.lent.is_positive() {
            self.lent = Some((store.lent, sending.now + LOAN));
        }
        self.last_ask = sending.now;
        self.next_ask = sending.now + GAP_MIN;
        Ask {
            region: sending.region,
            epoch: sending.epoch,
            policy: sending.policy,
            bucket: sending.bucket,
            seq: self.seq,
            read_seq: self.read.seq,
            read_granted: self.read.granted,
            held_burst,
            held_rate,
            returned: if store.leased { store.returned.or_zero() } else { Tokens::ZERO },
            level: store.level - sending.part.cap(),
            demand: plan.demand,
            want,
            short: plan.short,
            quantum: plan.quantum,
            seen: sending.seen,
            age: sending.age.or_zero(),
        }
    }

    /// Is an ask out whose answer may still come?
    #[must_use]
    pub fn is_out(&self) -> bool {
        self.out.is_some_and(|out| !out.void)
    }

    /// The ask that is out was not sent, or was refused whole: it has had no effect, and never will. Another one may take its
    /// place soon. (What it gave up in the store is gone all the same.)
    pub fn came_to_nothing(&mut self) {
        if let Some(out) = &mut self.out {
            out.void = true;
        }
    }

    /// Reads a record of the region's own replica, any number of times. `Some`: it is news, and to be installed.
    pub fn on_record(&mut self, record: &Record, epoch: u64, now: Micros) -> Option<Grant> {
        if record.epoch != epoch && !planted(Bug::NoEpoch) {
            return None;
        }
        let (sent, before) = match &self.out {
            Some(out) if out.seq == record.seq => (out.sent, Tokens::ZERO),
            None if record.seq == self.read.seq && record.push > self.read.push => {
                (self.read.sent, self.read.granted)
            }
            _ => return None,
        };
        let waited = self.out.take().map(|out| now - out.sent.mono);
        self.read = Read { seq: record.seq, push: record.push, granted: record.granted, sent };
        let had = self.slice.take();
        let (had_burst, had_rate) = had.map_or_else(Default::default, |s| (s.burst, s.rate));
        let better =
            record.granted > before || record.offer_rate > had_rate || record.offer_burst > had_burst;
        self.gap = if better { Micros::ZERO } else { (self.gap + self.gap).clamp(GAP_MIN, GAP_MAX) };
        if waited.is_some() {
            self.backoff = Micros::ZERO;
        }
        let mut lease = record.lease.discount(DRIFT_PPM);
        if planted(Bug::LeaseFromReply) {
            lease += now - sent.mono;
        }
        let (until, deadline) = (sent.mono + lease, sent.store + lease);
        if now >= until {
            return None;
        }
        let (burst, rate) = (record.offer_burst, record.offer_rate);
        self.slice =
            (burst.is_positive() || rate.is_positive()).then_some(Slice { burst, rate, deadline, until });
        let nothing = self.slice.is_none() && had.is_none() && !better;
        let (mut seq, mut granted) = (record.seq, record.granted);
        if planted(Bug::ForgetUnanswered) && self.seq > seq {
            // Under its own number the store's fence would refuse it.
            (seq, granted) = (self.seq, granted - before);
        }
        (!nothing).then_some(Grant { seq, push: record.push, granted, burst, rate, deadline, waited })
    }

    /// When to consider it again without any other cause.
    #[must_use]
    pub fn next_look(&self, now: Micros) -> Micros {
        let renew = self.slice.map(|s| self.renew_at(&s).min(now + self.self_check));
        let answer = self
            .out
            .map(|out| if out.void { self.next_ask } else { out.sent.mono + ANSWER_TIMEOUT + self.backoff });
        let again = self.starved.then_some(self.next_ask.max(self.last_ask + self.gap));
        let causes = [renew, answer, again].into_iter().flatten();
        causes.min().unwrap_or(now + IDLE).max(now + LOOK_MIN + LOOK_MIN)
    }

    /// Requests wait or were denied, and it has not looked at what could be done for them, only because its last ask was too
    /// short a time ago: [`Self::next_look`] says when it will.
    #[must_use]
    pub fn is_held_back(&self, now: Micros) -> bool {
        self.starved && now < self.next_ask
    }

    /// Is it served with tokens for the requests at hand, not with a share of the rate? Then what other regions have to spare
    /// may come for a request that waits.
    #[must_use]
    pub fn is_on_demand(&self) -> bool {
        self.on_demand
    }

    /// Consider it when a take has left less than this in the store.
    #[must_use]
    pub fn low_water(&self) -> Tokens {
        self.low_water
    }

    /// No slice, nothing out, no demand: it may be forgotten.
    #[must_use]
    pub fn is_idle(&self, now: Micros) -> bool {
        let over = |end: Micros, margin: Micros| end + margin < now;
        self.slice.is_none_or(|s| over(s.until, Micros::seconds(5)))
            && self.out.is_none_or(|out| over(out.sent.mono, IDLE))
            && over(self.last_ask.max(self.demand.last()), IDLE)
    }

    /// What it holds of the pool, for people to look at: rate (undiscounted), burst, and store time of the end.
    #[must_use]
    pub fn slice(&self, now: Micros) -> Option<(Rate, Tokens, Micros)> {
        self.slice.filter(|s| s.until > now).map(|s| (s.rate, s.burst, s.deadline))
    }

    /// Plans to hold nothing (on a drain). Needless if [`Self::slice`] is `None`.
    pub fn give_up_all(&mut self) -> Plan {
        Plan { quantum: self.demand.largest().max(Tokens(MICROS_PER_TOKEN)), ..Plan::default() }
    }

    /// Tokens in a committed record that it has not read yet, but still may.
    #[cfg(test)]
    pub(crate) fn unread(&self, record: &Record, now: Micros) -> Tokens {
        let mut copy = self.clone();
        let before = if record.seq == self.read.seq { self.read.granted } else { Tokens::ZERO };
        copy.on_record(record, record.epoch, now).map_or(Tokens::ZERO, |grant| grant.granted - before)
    }

    fn awaits_answer(&self, now: Micros) -> bool {
        self.out.is_some_and(|out| !out.void && now < out.sent.mono + ANSWER_TIMEOUT + self.backoff)
    }

    /// Half the lease: time to renew it.
    fn renew_at(&self, slice: &Slice) -> Micros {
        let from = self.read.sent.mono;
        from + (slice.until - from).mul_div(1, 2)
    }

    /// The largest cost of one request.
    fn quantum(&self, s: &Situation<'_>) -> Tokens {
        self.demand.largest().max(s.queued_max).max(Tokens(MICROS_PER_TOKEN))
    }

    /// What the region has, needs and lacks.
    fn outlook(&self, s: &Situation<'_>, horizon: Micros) -> Outlook {
        let starved = s.queued.is_positive();
        let quantum = self.quantum(s);
        let slice = self.slice.filter(|slice| slice.until > s.now);
        let (burst, rate) = slice.map_or_else(Default::default, |s| (s.burst, s.rate));
        // Planned as if there were no overdraft.
        let available = s.level - s.part.overdraft;
        let reserve = s.part.burst;
        let over = available - reserve;
        let mut demand = self.demand.rate(s.now, quantum);
        if rate.is_positive() && over >= burst {
            // A full bucket is proof that the rate is not being used: believe the fast average then.
            demand = demand.min(self.demand.fast(s.now));
        }
        if starved {
            demand = demand.max(Rate(1));
        }
        let need = (demand.percent(HEADROOM_PERCENT) - self.reserve_rate(s)).or_zero();
        let active = need.is_positive() || starved;
        let mut want = (demand.during(horizon) - reserve).or_zero();
        if active {
            want = want.max(quantum).max(s.queued - available);
        }
        let ahead = demand.during(s.rtt.mul_div(LOW_PERCENT, 100));
        let stock = s.queued.max(ahead + quantum);
        // What it keeps in any case. Some slack, so that noise in the estimate moves nothing.
        let keep_burst = if rate == Rate::ZERO {
            burst.min(over.or_zero()) // tokens only: no refill, so no use for burst without tokens in it
        } else if burst > want.percent(150) {
            burst.min(want.max(over))
        } else {
            burst
        };
        let keep_rate = if rate > above_by_a_third(need) { need } else { rate };
        let short = (stock - available).or_zero();
        let renew_due = slice.is_some_and(|slice| s.now >= self.renew_at(&slice));
        Outlook {
            demand,
            need,
            want,
            short,
            quantum,
            available,
            over,
            ahead,
            burst,
            rate,
            keep_burst,
            keep_rate,
            active,
            starved,
            renew_due,
        }
    }

    /// Is there reason to ask? Then this is what it may hold on to.
    fn reason(
        &self,
        s: &Situation<'_>,
        o: &Outlook,
        p: &Preview,
        whole_rate: Rate,
        whole_burst: Tokens,
    ) -> Option<Hold> {
        let crumb = whole_rate.percent(1);
        let mut hold = Hold { burst: o.keep_burst, rate: o.keep_rate };
        let mut ask = o.active && self.is_low(s, o, p) && self.of_use(s, o, p);
        ask |= o.renew_due && o.active && o.rate.is_positive();
        let lacking = (o.rate - p.steady).during(p.lease);
        if o.renew_due && p.lease < LEASE_MIN && lacking < o.rate.during(s.rtt + s.rtt) {
            // A loan that backs some of it ends soon. Whoever held all of it until then would have nothing for a round trip or two.
            hold.rate = hold.rate.min(p.steady);
        }
        if p.on_demand && o.rate.is_positive() && p.contended {
            ask = true;
            hold = Hold { burst: o.burst.min(o.over.or_zero()), rate: Rate::ZERO };
        }
        if p.on_demand && p.others_wait && !o.starved && o.leased() && o.over.is_positive() {
            // A request that waits elsewhere comes before one that may come here.
            ask = true;
            hold = Hold::default();
        }
        let dropped = o.rate > above_by_a_third(o.need) + crumb
            && p.contended
            && o.demand < p.demand_on_record - p.demand_on_record.mul_div(1, 3);
        if dropped {
            ask = true;
            hold = Hold { burst: hold.burst.min(o.want.max(o.quantum)), rate: hold.rate.min(o.need) };
        }
        let noise = if p.others_starve { Rate::ZERO } else { p.rate.percent(10) };
        let too_much_rate = o.rate > p.rate + noise + crumb;
        let too_much_burst = o.burst > p.burst + p.burst.percent(25) + o.quantum.percent(25);
        if o.leased() && p.others_short && (too_much_rate || too_much_burst) {
            ask = true;
            let least = if p.rate.is_positive() { o.quantum } else { Tokens::ZERO };
            hold = Hold { burst: hold.burst.min(p.burst.max(least)), rate: hold.rate.min(p.rate) };
        }
        // Tokens that come without a rate are gone with their lease: it is renewed for requests that wait for more, and else what nobody
        // has used in half of it goes back.
        let stock = o.rate == Rate::ZERO && o.over >= whole_burst.percent(1).max(Tokens(MICROS_PER_TOKEN));
        let unused = if o.active { stock } else { p.others_short || o.over > whole_burst.percent(10) };
        if o.renew_due && unused {
            ask = true;
            hold = if o.starved { hold } else { Hold::default() };
        }
        ask.then_some(hold)
    }

    /// Is the level so low that it may be used up before an ask is answered?
    fn is_low(&self, s: &Situation<'_>, o: &Outlook, p: &Preview) -> bool {
        if !p.on_demand {
            return o.available < o.ahead + o.quantum;
        }
        // Stock up only if the reserve will not have refilled by the next request.
        let until_next = Tokens(self.reserve_rate(s).mul_div(o.quantum.0, o.demand.0.max(1)).0);
        o.available < o.quantum && (o.starved || o.available + until_next < o.quantum)
    }

    /// Would asking for more bring something, or must the pool hear of what it does not know?
    fn of_use(&self, s: &Situation<'_>, o: &Outlook, p: &Preview) -> bool {
        let have = self.reserve_rate(s) + o.rate;
        let gain = if p.on_demand {
            // Stock up only where the tokens keep; otherwise only for a request that waits. (A larger one that came before it and found too
            // little is no reason to leave it waiting.)
            let least = if o.starved { s.queued_max } else { o.quantum };
            p.tokens.is_positive()
                && o.available + p.tokens >= least
                && (o.starved || s.part.burst >= o.quantum)
        } else {
            let more_rate = p.rate - o.rate;
            let rate = more_rate.is_positive() && more_rate >= o.demand.percent(10);
            let tokens = p.tokens.is_positive() && p.tokens >= o.ahead.percent(10);
            rate && o.demand > have - have.percent(5) || tokens && p.tokens >= o.quantum.min(o.want)
        };
        let off = Rate(o.demand.0.abs_diff(p.demand_on_record.0).try_into().unwrap_or(i64::MAX));
        let unheard = (o.starved || !p.on_demand)
            && o.demand > have
            && (!p.known || off > p.demand_on_record.percent(25));
        // Without a rate of its own a region must report what it has spent, or the pool cannot refill.
        let spent = o.burst - o.over.or_zero();
        let report =
            p.on_demand && o.rate == Rate::ZERO && spent >= o.quantum.max(o.burst.percent(50)) && p.contended;
        let may_ask_for_more = s.now >= self.last_ask + self.gap;
        unheard || may_ask_for_more && (gain || report || o.starved && !p.known)
    }
}
