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

use super::amount::{DRIFT_PPM, MICROS_PER_SECOND, MICROS_PER_TOKEN, Micros, Rate, Tokens};
use super::demand::Demand;
use super::policy::{BucketId, Part};
use super::pool::{Ask, Inquiry, Pool, Preview, Record, RegionId, Stamp};

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
        }
    }

    /// The region has a new epoch: what was lent under the older one is not used any more, and unanswered asks are void. The
    /// demand goes on.
    pub fn restart(&mut self, now: Micros) {
        let seq = self.seq;
        *self = Self { demand: self.demand, ..Self::new(now) };
        self.seq = self.seq.max(seq);
        self.read.seq = self.seq;
    }

    /// `offered` tokens were asked for since the last time (admitted or not), at most `largest` by one request.
    pub fn observe(&mut self, now: Micros, offered: Tokens, largest: Tokens) {
        self.demand.add(now, offered, largest);
    }

    /// Is there reason to ask, and for what? Cheap when there is nothing to be done.
    pub fn consider(&mut self, s: &Situation<'_>) -> Option<Plan> {
        let _ =
            (s, LOW_PERCENT, HORIZON, HORIZON_MAX, HEADROOM_PERCENT, GAP_MAX, LOOK_MIN, ANSWER_TIMEOUT, IDLE);
        None
    }

    /// The number that the next ask will have. From `prepare` on, the store must not install a grant with a smaller one.
    #[must_use]
    pub fn next_seq(&self) -> u64 {
        self.seq.saturating_add(1)
    }

    /// Writes the ask of a plan, after the store has stopped using what it gives up.
    pub fn ask(&mut self, plan: &Plan, store: &InStore, sending: &Sending) -> Ask {
        let _ = (store, MICROS_PER_SECOND, MICROS_PER_TOKEN, GAP_MIN, BACKOFF_MIN, BACKOFF_MAX);
        Ask { demand: plan.demand, region: sending.region, ..Ask::default() }
    }

    /// Reads a record of the region's own replica, any number of times. `Some`: it is news, and to be installed.
    pub fn on_record(&mut self, record: &Record, epoch: u64, now: Micros) -> Option<Grant> {
        let _ = (record, epoch, now, DRIFT_PPM);
        None
    }

    /// When to consider it again without any other cause.
    #[must_use]
    pub fn next_look(&self, now: Micros) -> Micros {
        now + SELF_CHECK
    }

    /// Consider it when a take has left less than this in the store.
    #[must_use]
    pub fn low_water(&self) -> Tokens {
        self.low_water
    }

    /// No slice, nothing out, no demand: it may be forgotten.
    #[must_use]
    pub fn is_idle(&self, now: Micros) -> bool {
        let _ = now;
        false
    }

    /// What it holds of the pool, for people to look at: rate (undiscounted), burst, and store time of the end.
    #[must_use]
    pub fn slice(&self, now: Micros) -> Option<(Rate, Tokens, Micros)> {
        self.slice.filter(|s| s.until > now).map(|s| (s.rate, s.burst, s.deadline))
    }

    /// Plans to hold nothing (on a drain). Needless if [`Self::slice`] is `None`.
    pub fn give_up_all(&mut self) -> Plan {
        Plan::default()
    }
}

fn _unused(_: &Inquiry, _: &Preview) {}
