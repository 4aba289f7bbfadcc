//! What the replicated log carries. Persisted and sent: fields and variants are only ever appended.

use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::policy::{BucketId, Policy, RegionName};
use serde::{Deserialize, Serialize};

/// A region's position in the cluster's list of all regions that it ever had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RegionId(pub u16);

/// The Raft clock as the leader stamped it on an entry, after the last request in it had arrived:
/// tau = (tau of the last entry when the term began) + (1 - drift) x (the leader's monotonic time in this term).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// The term whose leader made the stamp. It counts only in an entry of the same term.
    pub term: u64,
    /// Raft time.
    pub tau: Micros,
}

/// One log entry: a batch of operations under one stamp.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// When.
    pub stamp: Stamp,
    /// What. May be empty: then the entry only moves the Raft clock.
    pub ops: Vec<Op>,
}

/// One operation on the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// The cluster begins: its regions and first policies. Ignored once there are regions.
    Found {
        /// In the order of their [`RegionId`]s.
        regions: Vec<RegionName>,
        /// Version 1 of the policies.
        policies: Vec<Policy>,
    },
    /// A region asks for, keeps or gives up a slice.
    Ask(Ask),
    /// A region starts over.
    Join(Join),
    /// New policies, all or nothing.
    SetPolicies(SetPolicies),
    /// A region has read new policies.
    Ack(Ack),
    /// A region comes into the cluster.
    AddRegion(AddRegion),
    /// A region leaves the cluster.
    RemoveRegion(RemoveRegion),
    /// An operator gives a bucket back what it has spent.
    ResetBucket(ResetBucket),
    /// A region gives its own bucket its part of that.
    TakeReset(TakeReset),
    /// A region asks for, keeps or gives up a slice of a quota.
    AskInWindow(AskInWindow),
    /// A region says what time it is.
    TimeOfDay(TimeOfDay),
    /// All members apply operations up to this level: from here on there may be such (see [`LEVEL`]).
    Level(u32),
    /// The cluster begins, with witnesses among its members.
    FoundWith(FoundWith),
    /// A witness comes into the cluster.
    AddWitness(AddRegion),
    /// A region lends of its reserve, and asks as ever.
    Lend(Lend),
}

/// The newest level of operations that this version applies. Whoever appends a variant to [`Op`] (or to what it holds, policies
/// included) raises this, and says so in [`Op::level`]: an operation is proposed only once all members apply it.
pub const LEVEL: u32 = 4;

impl Op {
    /// What a member must be able to apply to be in a cluster whose log has this operation.
    #[must_use]
    pub fn level(&self) -> u32 {
        // Before that, permits were never lent between regions.
        let of = |policies: &[Policy]| if policies.iter().any(Policy::lends_permits) { 3 } else { 1 };
        match self {
            Self::Found { policies, .. } | Self::SetPolicies(SetPolicies { policies, .. }) => of(policies),
            Self::FoundWith(found) => of(&found.policies).max(2),
            Self::Ask(_)
            | Self::Join(_)
            | Self::Ack(_)
            | Self::AddRegion(_)
            | Self::RemoveRegion(_)
            | Self::ResetBucket(_)
            | Self::TakeReset(_)
            | Self::AskInWindow(_)
            | Self::TimeOfDay(_) => 1,
            Self::Level(_) | Self::AddWitness(_) => 2,
            Self::Lend(_) => Lend::LEVEL,
        }
    }
}

/// The cluster begins: its members, of which some are witnesses, and its first policies. Ignored once there are members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundWith {
    /// In the order of their [`RegionId`]s.
    pub members: Vec<RegionName>,
    /// Those of them that vote and serve nobody. Not all.
    pub witnesses: Vec<RegionName>,
    /// Version 1 of the policies.
    pub policies: Vec<Policy>,
}

/// A region's only request about a bucket: "this is what I still hold, this is what I give back, this is what I need".
/// It has *already stopped using* what it gives up when it sends this.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Who asks.
    pub region: RegionId,
    /// Its epoch: see [`Join`].
    pub epoch: u64,
    /// The policy's id: see [`crate::quota::pool::PolicyView`].
    pub policy: u32,
    /// Which bucket of it.
    pub bucket: BucketId,
    /// Grows with every new request of this region for this bucket in this epoch.
    pub seq: u64,
    /// The record that the region had read last when it sent this ...
    pub read_seq: u64,
    /// ... and the tokens that it had seen granted in it.
    pub read_granted: Tokens,
    /// What it still holds of its slice: burst ...
    pub held_burst: Tokens,
    /// ... and rate.
    pub held_rate: Rate,
    /// Unspent tokens handed back.
    pub returned: Tokens,
    /// Its level above its reserve's cap (less than 0: room in the reserve). Advisory.
    pub level: Tokens,
    /// Demand. Advisory.
    pub demand: Rate,
    /// Burst that it would like to hold. Advisory.
    pub want: Tokens,
    /// Tokens that it lacks right now. Advisory.
    pub short: Tokens,
    /// The greatest cost of one request that it has seen: less burst than this is of no use. Advisory.
    pub quantum: Tokens,
    /// The newest stamp that it had applied ...
    pub seen: Stamp,
    /// ... and how long before, by its own clock.
    pub age: Micros,
}

/// An [`Ask`] about a bucket of a quota, which is one window's alone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AskInWindow {
    /// When the window began: microseconds since 1970-01-01T00:00:00Z.
    pub start: Micros,
    /// The ask. [`Ask::want`] is the level that the region would like to have, its reserve included.
    pub ask: Ask,
}

/// An [`Ask`] of a region that lends of its reserve's rate: before it sent this, its store has stopped using that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lend {
    /// The ask.
    pub ask: Ask,
    /// All that the region's store does not use of its reserve's rate, what it had lent before included.
    pub rate: Rate,
    /// The Raft time until which the pool may count on that, by the clock of this term: see [`Lend::until`].
    pub until: Micros,
    /// See [`Self::until`].
    pub seen_term: u64,
}

/// What a region's wall clock reads. The latest that a majority of them has reached is the cluster's time of day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeOfDay {
    /// Whose.
    pub region: RegionId,
    /// Microseconds since 1970-01-01T00:00:00Z.
    pub wall: Micros,
}

/// A region (re)starts, after its daemon or its store lost state: a compare-and-set of its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// Which region.
    pub region: RegionId,
    /// The epoch that it believes is in force (0: it has never joined).
    pub previous: u64,
    /// Tells the region that it was the one.
    pub nonce: u64,
}

/// Replaces all policies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetPolicies {
    /// Refused unless this is the version in force; `None`: whatever it is.
    pub expected: Option<u64>,
    /// The new ones.
    pub policies: Vec<Policy>,
}

/// A region uses no more than the smaller of the old policies and these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ack {
    /// Which region.
    pub region: RegionId,
    /// The version that it has read.
    pub version: u64,
}

/// A region comes into the cluster, or comes back: every limit is cut anew, and it gets its part once everyone knows.
/// Changes nothing if it is in already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddRegion {
    /// Its name.
    pub name: RegionName,
    /// The Raft node id of its last life (0: it has had none): a copy that comes late must not bring it back once more.
    pub previous: u64,
}

/// A region leaves: every limit is cut anew among the others, who get its part once everyone knows, the region that
/// leaves included. Changes nothing if it has left already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveRegion {
    /// Which region.
    pub region: RegionId,
    /// Its Raft node id: a copy that comes late must not remove its next life.
    pub node: u64,
    /// An operator's promise that it admits nothing any more, and never will under this node id: its word is not waited
    /// for.
    pub presume_dead: bool,
}

/// A bucket is to be full again, in every region: see [`super::Reset`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetBucket {
    /// The policy's id: see [`crate::quota::pool::PolicyView`].
    pub policy: u32,
    /// Which bucket of it.
    pub bucket: BucketId,
    /// Who decided; at most [`super::RESET_TEXT_MAX`] bytes.
    pub by: String,
    /// Why; at most [`super::RESET_TEXT_MAX`] bytes.
    pub reason: String,
}

/// A region has heard of a reset. Only once this is committed, it gives its bucket what its reserve holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakeReset {
    /// Which region.
    pub region: RegionId,
    /// Its epoch.
    pub epoch: u64,
    /// Which bucket.
    pub bucket: BucketId,
    /// Which reset: [`super::Reset::number`].
    pub number: u64,
}

/// What an entry did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// The stamp was of an earlier term: nothing was applied, and whoever proposed should ask again.
    pub refused: bool,
    /// Records that were written, by region.
    pub records: Vec<(RegionId, BucketId)>,
    /// Regions whose epoch changed.
    pub joined: Vec<RegionId>,
    /// What became of a [`SetPolicies`], [`Op::Found`], [`FoundWith`], [`AddRegion`], [`RemoveRegion`] or [`ResetBucket`] (of the last, if there were several).
    pub policies: Option<PolicyOutcome>,
    /// Did an acknowledgement count, of policies or of a reset?
    pub acknowledged: bool,
    /// Buckets whose books did not balance: they are frozen, and a person must look.
    pub breached: Vec<BucketId>,
}

/// Why a bucket was not reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum NoReset {
    /// There is no such policy any more, or it has no limit.
    #[error("the policy has no limit, or has just been removed")]
    NoLimit,
    /// The bucket's books did not balance.
    #[error(
        "the bucket's books did not balance: it is frozen until all that is lent has run out, and begins empty then"
    )]
    Frozen,
    /// Too many are under way.
    #[error("regions still have to hear of too many resets")]
    TooMany,
    /// The texts are too long.
    #[error("who and why are too long")]
    TooLong,
}

/// What became of a change of policies or regions, or of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicyOutcome {
    /// It is in force under this version.
    Set(u64),
    /// Another version is in force than the one that was expected.
    Conflict(u64),
    /// Nothing has changed: these can't be policies (too many, a name twice, amounts beyond what a limit may have) or
    /// regions (too many, the last one, one that is still leaving), there is no cluster yet, or too many changes still wait
    /// for regions to acknowledge them.
    Refused,
    /// The bucket was reset: the reset's number.
    Reset(u64),
    /// It was not.
    NotReset(NoReset),
}
