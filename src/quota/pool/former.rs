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

/// What pools of all formats have in the same place. (Fields are written one after another: a struct in a struct is as its fields.)
#[derive(Debug, Deserialize)]
struct Books {
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: Shards,
    evict_after: Option<BucketId>,
}

/// The pool of a cluster whose regions were the founders, for good: snapshot format 1.
#[derive(Debug, Deserialize)]
pub struct PoolV1 {
    regions: Vec<RegionName>,
    epochs: Vec<(u64, u64)>,
    books: Books,
}

impl From<PoolV1> for Pool {
    fn from(PoolV1 { regions, epochs, books }: PoolV1) -> Self {
        PoolV2 { members: Members::with_epochs(regions, epochs).into(), books }.into()
    }
}

/// The pool of a cluster that knew no resets: snapshot format 2.
#[derive(Debug, Deserialize)]
pub struct PoolV2 {
    members: MembersV4,
    books: Books,
}

impl From<PoolV2> for Pool {
    fn from(v2: PoolV2) -> Self {
        PoolV3 { v2, resets: Resets::default() }.into()
    }
}

/// The pool of a cluster that knew no quotas: snapshot format 3.
#[derive(Debug, Deserialize)]
pub struct PoolV3 {
    v2: PoolV2,
    resets: Resets,
}

impl From<PoolV3> for Pool {
    fn from(v3: PoolV3) -> Self {
        PoolV4 { v3, windows: Windows::default() }.into()
    }
}

/// The pool of a cluster that knew no witnesses and no levels: snapshot format 4.
#[derive(Debug, Deserialize)]
pub struct PoolV4 {
    v3: PoolV3,
    windows: Windows,
}

impl From<PoolV4> for Pool {
    fn from(v4: PoolV4) -> Self {
        let PoolV4 { v3: PoolV3 { v2: PoolV2 { members, books }, resets }, windows } = v4;
        PoolV5 { members: members.into(), books, resets, windows, level: 0 }.into()
    }
}

/// The pool of a cluster that knew no loans of reserve: snapshot format 5.
#[derive(Debug, Deserialize)]
pub struct PoolV5 {
    members: Members,
    books: Books,
    resets: Resets,
    windows: Windows,
    level: u32,
}

impl From<PoolV5> for Pool {
    fn from(PoolV5 { members, books, resets, windows, level }: PoolV5) -> Self {
        let Books { tau, term, policies, buckets, evict_after } = books;
        let loans = Loans::default();
        Self { members, tau, term, policies, buckets, evict_after, resets, windows, level, loans }
    }
}

impl Pool {
    /// What a member that applies only operations of level 1 reads, as a [`PoolV4`]; `None`: it has no place in the cluster any more.
    #[must_use]
    pub fn as_v4(&self) -> Option<impl Serialize + '_> {
        let members = || MembersV4::from(self.members.clone());
        (self.level() == 1).then(|| (members(), self.written_books(), &self.resets, &self.windows))
    }

    /// What a member that applies no loans reads, as a [`PoolV5`]; `None`: it has no place in the cluster any more.
    #[must_use]
    pub fn as_v5(&self) -> Option<impl Serialize + '_> {
        let all = || (&self.members, self.written_books(), &self.resets, &self.windows, self.level);
        (self.level() < Lend::LEVEL).then(all)
    }

    /// As [`Books`] are read.
    fn written_books(&self) -> impl Serialize + '_ {
        (self.tau, self.term, &self.policies, &self.buckets, self.evict_after)
    }
}
