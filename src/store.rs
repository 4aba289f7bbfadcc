//! A region's store: where its buckets live. Two real implementations: [`redis`] and [`memory`]; [`AnyStore`] is either.
//!
//! Time in here is the *store's* clock (Redis' TIME): microseconds since the Unix epoch, the same for every daemon of
//! the region.

mod any;
pub mod memory;
pub mod names;
pub mod redis;

pub use crate::quota::matching::CHARGES_MAX;
pub use any::AnyStore;

use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::bucket::{Charge, Generation, Grant, Shape, Unseen};
use crate::quota::counted::{self, Act, Allowance, Kind};
use crate::quota::policy::BucketId;
use std::future::Future;
use tokio::sync::watch;

/// What a request takes, all or nothing.
#[derive(Clone, Debug, Default)]
pub struct Take {
    /// One for each token bucket that the request matched.
    pub charges: Vec<TakeCharge>,
    /// One for each limit that counts; with the others at most [`CHARGES_MAX`].
    pub counts: Vec<CountCharge>,
}

/// What a request says of a bucket: which, its reserve in this region, and what it is if the store has never seen it.
pub type Asked = (BucketId, Shape, Option<Unseen>);

impl Take {
    /// The buckets of a request, each once, and its charges by their number in that list, as [`take`](crate::quota::bucket::take) wants them.
    #[must_use]
    pub fn numbered(&self) -> (Vec<Asked>, Vec<Charge>) {
        let mut buckets: Vec<Asked> = Vec::with_capacity(self.charges.len());
        let charges = self
            .charges
            .iter()
            .map(|charge| {
                let known = buckets.iter().position(|(id, ..)| *id == charge.bucket);
                let bucket = known.unwrap_or_else(|| {
                    buckets.push((charge.bucket, charge.shape, charge.unseen));
                    buckets.len() - 1
                });
                Charge { bucket, cost: charge.cost, enforce: charge.enforce }
            })
            .collect();
        (buckets, charges)
    }

    /// The same for the limits that count, as [`counted::check`] wants them.
    #[must_use]
    pub fn numbered_counts(&self) -> (Vec<AskedCount>, Vec<counted::Charge>) {
        let mut buckets: Vec<AskedCount> = Vec::with_capacity(self.counts.len());
        let charges = self
            .counts
            .iter()
            .map(|charge| {
                let known = buckets.iter().position(|(id, ..)| *id == charge.bucket);
                let bucket = known.unwrap_or_else(|| {
                    buckets.push((charge.bucket, charge.kind, charge.allowance));
                    buckets.len() - 1
                });
                let CountCharge { cost, act, enforce, .. } = *charge;
                counted::Charge { bucket, cost: counted::whole(cost), act, enforce }
            })
            .collect();
        (buckets, charges)
    }

    /// Charges of both kinds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.charges.len().saturating_add(self.counts.len())
    }

    /// Is there nothing to take?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A charge on one bucket.
#[derive(Clone, Copy, Debug)]
pub struct TakeCharge {
    /// Which bucket.
    pub bucket: BucketId,
    /// Its reserve in this region.
    pub shape: Shape,
    /// What it is if the store has never seen it; `None`: full.
    pub unseen: Option<Unseen>,
    /// Tokens to take. 0 asks without taking, less than 0 gives back (up to what the bucket can hold).
    pub cost: Tokens,
    /// If it does not fit, refuse the request? (Not for shadow policies: then this charge alone is left out.)
    pub enforce: bool,
}

/// What a request says of a bucket that counts: which, how, and what this region may use of it.
pub type AskedCount = (BucketId, Kind, Allowance);

/// A charge on one bucket that counts.
#[derive(Clone, Copy, Debug)]
pub struct CountCharge {
    /// Which bucket: see [`Kind::bucket`].
    pub bucket: BucketId,
    /// How it counts.
    pub kind: Kind,
    /// What this region may use of it.
    pub allowance: Allowance,
    /// Tokens (a part of one counts as a whole one). 0 asks without counting, less than 0 gives back.
    pub cost: Tokens,
    /// What is done with them.
    pub act: Act,
    /// If it does not fit, refuse the request?
    pub enforce: bool,
}

/// The answer to a [`Take`].
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// Everything that had to fit did, and what fitted was taken.
    pub allowed: bool,
    /// The store's time at which this was decided.
    pub now: Micros,
    /// In the order of the charges.
    pub charges: Vec<TakenCharge>,
    /// In the order of the charges on limits that count.
    pub counts: Vec<counted::Seen>,
}

/// What became of one charge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenCharge {
    /// Did it fit (whatever became of the others)?
    pub fits: bool,
    /// The level afterwards.
    pub level: Tokens,
    /// The refill rate now: the reserve's and a live lease's.
    pub rate: Rate,
    /// The capacity now.
    pub cap: Tokens,
}

/// Before an ask: read a bucket and give up what the lease is to shrink by. Idempotent.
#[derive(Clone, Copy, Debug)]
pub struct Prepare {
    /// Which bucket.
    pub bucket: BucketId,
    /// Its reserve in this region.
    pub shape: Shape,
    /// What it is if the store has never seen it; `None`: full.
    pub unseen: Option<Unseen>,
    /// The number of the ask that follows: from now on no [`Install`] with a smaller one has any effect.
    pub seq: u64,
    /// Keep at most this burst of the lease ...
    pub hold_burst: Tokens,
    /// ... and at most this rate (as it was installed, discounted).
    pub hold_rate: Rate,
    /// It is permits, of which the region may use this: what holders have of the lease is kept, whatever is to be. Shape and rate
    /// mean nothing then.
    pub permits: Option<Allowance>,
    /// From now on this much of the reserve's rate is lent ...
    pub lend_rate: Rate,
    /// ... for so long; zero: nothing is lent by this (what is lent already stays so).
    pub lend_for: Micros,
}

/// The answer to a [`Prepare`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Is a lease live in the store (before the shrinking)?
    pub leased: bool,
    /// The level after the shrinking.
    pub level: Tokens,
    /// Tokens that no longer fitted: they are gone from the bucket, and may be given back to the pool.
    pub returned: Tokens,
    /// The lease's burst and rate after the shrinking. Of permits: what must be said to be held (see
    /// [`lent::Kept`](counted::lent::Kept)).
    pub burst: Tokens,
    /// See [`Self::burst`].
    pub rate: Rate,
    /// How much of the reserve's rate is lent, for [`Prepare::lend_for`] at least if that was asked for.
    pub lent: Rate,
}

/// A record of the pool, to be put into the bucket. Idempotent by (session, seq, push): `granted` counts from the
/// beginning of `seq`, so installing it twice adds nothing, and an older record than the one installed last is ignored.
#[derive(Clone, Copy, Debug)]
pub struct Install {
    /// Which bucket.
    pub bucket: BucketId,
    /// Its reserve in this region.
    pub shape: Shape,
    /// What it is if the store has never seen it; `None`: full.
    pub unseen: Option<Unseen>,
    /// The record; its rate is discounted for drift. Past its deadline nothing is installed.
    pub grant: Grant,
    /// It is permits, of which the region may use this.
    pub permits: Option<Allowance>,
}

/// One region's store. Cheap to clone; each thread that serves callers has its own (see `redis`).
pub trait Store: Clone + Send + Sync + 'static {
    /// Checks all charges of a request, then takes all or none.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn take(&self, take: Take) -> impl Future<Output = Result<Taken, StoreError>> + Send;

    /// How many keys the store holds, and for each of these buckets whether it is among them.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn known(
        &self,
        buckets: Vec<BucketId>,
    ) -> impl Future<Output = Result<(u64, Vec<bool>), StoreError>> + Send;

    /// Reads buckets before their asks go out; the time is the store's, read before anything is sent.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn prepare(
        &self,
        asks: Vec<Prepare>,
    ) -> impl Future<Output = Result<(Micros, Vec<Prepared>), StoreError>> + Send;

    /// Puts records of the pool into buckets; returns their levels afterwards.
    ///
    /// # Errors
    /// See [`StoreError`].
    fn install(&self, records: Vec<Install>) -> impl Future<Output = Result<Vec<Tokens>, StoreError>> + Send;
}

/// A store with all that the region's slow loop needs of it.
pub trait RegionStore: Store {
    /// The session, and why there is none.
    fn session(&self) -> watch::Receiver<SessionState>;

    /// What the store knows about buckets that it does not hold. Before a change of policy, fold it in with
    /// [`Generation::unseen`]; see [`Unseen::after_change`].
    fn generation(&self) -> Generation;

    /// The region has joined the cluster for the very first time: nothing was ever spent here, and buckets that were
    /// never seen are full from now on, whatever restarts come. Only for a session that kept nothing.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if `session` is not the one in force, or if it kept buckets; else see [`StoreError`].
    fn mark_full(&self, session: Session) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Buckets of whose reserve something was lent before this generation of data began have been prepared, and are stored: see
    /// [`Generation::known`].
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if `session` is not the one in force; else see [`StoreError`].
    fn mark_known(&self, session: Session) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// About what the store's clock reads now (zero before it was ever seen).
    fn now(&self) -> Micros;
}

/// Why a store gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Nothing was sent, or the store refused it whole: nothing has happened.
    #[error("the store is not available")]
    Unavailable,
    /// It was sent and not answered in time: it may have happened.
    #[error("the store did not answer in time")]
    Unknown,
    /// Another daemon has taken this region's buckets over, or the store lost its data.
    #[error("the store has been taken over or has lost its data")]
    Fenced,
}

impl StoreError {
    /// Its name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Unknown => "timeout",
            Self::Fenced => "fenced",
        }
    }
}

/// What a store holds of this region's state, as its supervisor sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Random, not 0, below 2^52: new whenever the daemon starts or the store has lost data. It is the nonce of the region's
    /// [`Join`](crate::quota::pool::Op::Join): what was lent under an earlier session is not used under this one.
    pub nonce: u64,
    /// The store kept the buckets of an earlier session (a restart of the daemon alone).
    pub kept: bool,
}

/// A nonce for a new session.
fn new_nonce() -> u64 {
    rand::random_range(1..1_u64 << 52)
}

/// Can the store be used, and under which [`Session`]?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// Not for now.
    Detached {
        /// What a person should know about it; no secrets.
        why: String,
    },
    /// It can.
    Attached(Session),
}

impl SessionState {
    /// The session, if it is attached.
    #[must_use]
    pub fn session(&self) -> Option<Session> {
        match self {
            Self::Attached(session) => Some(*session),
            Self::Detached { .. } => None,
        }
    }
}

/// What `/readyz` and a person should know about a store; no secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// Why it gives no answers; `None`: it does.
    pub down: Option<String>,
    /// Why it may forget buckets before their time (a Redis that evicts); `None`: it does not. Strict policies are not
    /// ready then.
    pub evicts: Option<String>,
}
