//! What the pool looked like in snapshots of older formats.

use super::Pool;
use super::ledger::Ledger;
use super::members::Members;
use super::policies::Policies;
use super::resets::Resets;
use super::windows::Windows;
use crate::quota::amount::Micros;
use crate::quota::policy::{BucketId, RegionName};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The pool of a cluster whose regions were the founders, for good: snapshot format 1.
#[derive(Debug, Deserialize)]
pub struct PoolV1 {
    regions: Vec<RegionName>,
    epochs: Vec<(u64, u64)>,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: BTreeMap<BucketId, Ledger>,
    evict_after: Option<BucketId>,
}

impl From<PoolV1> for Pool {
    fn from(v1: PoolV1) -> Self {
        let PoolV1 { regions, epochs, tau, term, policies, buckets, evict_after } = v1;
        let members = Members::with_epochs(regions, epochs);
        PoolV2 { members, tau, term, policies, buckets, evict_after }.into()
    }
}

/// The pool of a cluster that knew no resets: snapshot format 2.
#[derive(Debug, Deserialize)]
pub struct PoolV2 {
    members: Members,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: BTreeMap<BucketId, Ledger>,
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
    members: Members,
    tau: Micros,
    term: u64,
    policies: Policies,
    buckets: BTreeMap<BucketId, Ledger>,
    evict_after: Option<BucketId>,
    resets: Resets,
}

impl From<PoolV3> for Pool {
    fn from(v3: PoolV3) -> Self {
        let PoolV3 { members, tau, term, policies, buckets, evict_after, resets } = v3;
        Self { members, tau, term, policies, buckets, evict_after, resets, windows: Windows::default() }
    }
}
