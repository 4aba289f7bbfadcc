//! What the pool looked like in snapshots of older formats.

use super::Pool;
use super::entry::Lend;
use super::loans::Loans;
use super::members::{Members, MembersV4};
use super::policies::Policies;
use super::resets::Resets;
use super::shards::Shards;
use super::windows::Windows;
use crate::quota::amount::Micros;
use crate::quota::policy::{BucketId, RegionName};
use serde::{Deserialize, Serialize};

/// The pool of a cluster whose regions were the founders, for good: snapshot format 1.
#[derive(Debug, Deserialize)]
pub struct PoolV1 {
    regions: Vec<RegionName>,
    epochs: Vec<(u64, u64)>,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: Shards,
    evict_after: Option<BucketId>,
}

impl From<PoolV1> for Pool {
    fn from(v1: PoolV1) -> Self {
        let PoolV1 { regions, epochs, tau, term, policies, buckets, evict_after } = v1;
        let members = Members::with_epochs(regions, epochs).into();
        PoolV2 { members, tau, term, policies, buckets, evict_after }.into()
    }
}

/// The pool of a cluster that knew no resets: snapshot format 2.
#[derive(Debug, Deserialize)]
pub struct PoolV2 {
    members: MembersV4,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: Shards,
    evict_after: Option<BucketId>,
}

impl From<PoolV2> for Pool {
    fn from(v2: PoolV2) -> Self {
        let PoolV2 { members, tau, term, policies, buckets, evict_after } = v2;
        PoolV3 { members, tau, term, policies, buckets, evict_after, resets: Resets::default() }.into()
    }
}

/// The pool of a cluster that knew no quotas: snapshot format 3.
#[derive(Debug, Deserialize)]
pub struct PoolV3 {
    members: MembersV4,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: Shards,
    evict_after: Option<BucketId>,
    resets: Resets,
}

impl From<PoolV3> for Pool {
    fn from(v3: PoolV3) -> Self {
        let PoolV3 { members, tau, term, policies, buckets, evict_after, resets } = v3;
        let windows = Windows::default();
        PoolV4 { members, tau, term, policies, buckets, evict_after, resets, windows }.into()
    }
}

/// The pool of a cluster that knew no witnesses and no levels: snapshot format 4.
#[derive(Debug, Deserialize)]
pub struct PoolV4 {
    members: MembersV4,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: Shards,
    evict_after: Option<BucketId>,
    resets: Resets,
    windows: Windows,
}

impl From<PoolV4> for Pool {
    fn from(v4: PoolV4) -> Self {
        let PoolV4 { members, tau, term, policies, buckets, evict_after, resets, windows } = v4;
        let members = members.into();
        PoolV5 { members, tau, term, policies, buckets, evict_after, resets, windows, level: 0 }.into()
    }
}

/// The pool of a cluster that knew no loans of reserve: snapshot format 5.
#[derive(Debug, Deserialize)]
pub struct PoolV5 {
    members: Members,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: Shards,
    evict_after: Option<BucketId>,
    resets: Resets,
    windows: Windows,
    level: u32,
}

impl From<PoolV5> for Pool {
    fn from(v5: PoolV5) -> Self {
        let PoolV5 { members, tau, term, policies, buckets, evict_after, resets, windows, level } = v5;
        let loans = Loans::default();
        Self { members, tau, term, policies, buckets, evict_after, resets, windows, level, loans }
    }
}

/// A pool, to be written as a [`PoolV4`].
#[derive(Debug, Serialize)]
pub struct AsPoolV4<'p> {
    members: MembersV4,
    tau: Micros,
    term: u64,
    policies: &'p Policies,
    buckets: &'p Shards,
    evict_after: Option<BucketId>,
    resets: &'p Resets,
    windows: &'p Windows,
}

/// A pool, to be written as a [`PoolV5`].
#[derive(Debug, Serialize)]
pub struct AsPoolV5<'p> {
    members: &'p Members,
    tau: Micros,
    term: u64,
    policies: &'p Policies,
    buckets: &'p Shards,
    evict_after: Option<BucketId>,
    resets: &'p Resets,
    windows: &'p Windows,
    level: u32,
}

impl Pool {
    /// What a member that applies only operations of level 1 reads; `None`: it has no place in the cluster any more.
    #[must_use]
    pub fn as_v4(&self) -> Option<AsPoolV4<'_>> {
        let Self { members, tau, term, policies, buckets, evict_after, resets, windows, level: _, loans: _ } =
            self;
        let (tau, term, evict_after) = (*tau, *term, *evict_after);
        let members = members.clone().into();
        let v4 = AsPoolV4 { members, tau, term, policies, buckets, evict_after, resets, windows };
        (self.level() == 1).then_some(v4)
    }

    /// What a member that applies no loans reads; `None`: it has no place in the cluster any more.
    #[must_use]
    pub fn as_v5(&self) -> Option<AsPoolV5<'_>> {
        let Self { members, tau, term, policies, buckets, evict_after, resets, windows, level, loans: _ } =
            self;
        let (tau, term, evict_after, level) = (*tau, *term, *evict_after, *level);
        let v5 = AsPoolV5 { members, tau, term, policies, buckets, evict_after, resets, windows, level };
        (self.level() < Lend::LEVEL).then_some(v5)
    }
}
