//! What a daemon tells about itself: the types of `GET /v1/state` and its neighbours on the admin listener.
//!
//! Written by the daemon, read by `quorate status`, `quorate top` and the console. Readers ignore fields that they do
//! not know, and every field has a default: a newer daemon and an older reader get along, and the other way round.

mod cluster;

pub use cluster::{
    Event, HistoriesState, HistoryState, HotBucket, HotRegion, PEER_REPORT_BYTES_MAX, PartState, PeerBucket,
    PeerHot, PeerQuestion, PeerReport, RateState, RegionReport, RegionView, SeriesState, TrafficState,
};

use crate::quota::amount::Tokens;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// `GET /v1/state`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// The daemon's version.
    pub version: String,
    /// The cluster's name.
    pub cluster: String,
    /// The region that answers.
    pub region: String,
    /// How long the daemon has run, in milliseconds.
    pub uptime_ms: u64,
    /// What keeps it from being ready; empty: it is.
    pub not_ready: Vec<String>,
    /// The replicated log, as seen here.
    pub raft: RaftState,
    /// The other regions.
    pub peers: Vec<PeerState>,
    /// The region's store.
    pub store: StoreState,
    /// Version of the policies in force.
    pub policies_version: u64,
    /// Every region has acknowledged them, and nothing is lent under older ones any more.
    pub policies_settled: bool,
    /// The policies in force.
    pub policies: Vec<PolicyState>,
    /// The busiest buckets of this region, busiest first.
    pub buckets: Vec<BucketState>,
    /// There are more buckets than are listed.
    pub buckets_more: bool,
    /// When this was so, by the answering region's wall clock: milliseconds since the Unix epoch.
    pub now_ms: u64,
    /// Who may change things: `token` (whoever has it), or `loopback` (there is none: this machine).
    pub changes: String,
    /// All regions, as the answering one knows them, by name.
    pub regions: BTreeMap<String, RegionView>,
    /// What passes in all regions, by policy. Policies without traffic are left out.
    pub traffic: BTreeMap<String, TrafficState>,
    /// The buckets with most demand in all regions, the busiest first.
    pub hottest: Vec<HotBucket>,
    /// What happened lately, the newest last.
    pub events: Vec<Event>,
    /// The last minutes of the busiest policies.
    pub history: HistoriesState,
    /// The time of day that windows of quotas go by here, in milliseconds since 1970-01-01T00:00:00Z; `None`: there are none, or
    /// nobody knows.
    pub time_of_day_ms: Option<u64>,
}

/// The replicated log, as one region sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RaftState {
    /// The leading region, if one is known.
    pub leader: Option<String>,
    /// The current term.
    pub term: u64,
    /// `leader`, `follower`, `candidate` or `learner`.
    pub role: String,
    /// Index of the last entry in the log.
    pub last: u64,
    /// Index of the last applied entry.
    pub applied: u64,
    /// The Raft clock, in microseconds.
    pub tau_us: i64,
    /// How old the Raft clock's newest stamp is here, in milliseconds.
    pub age_ms: u64,
    /// Regions with a vote.
    pub voters: Vec<String>,
    /// Regions without one.
    pub learners: Vec<String>,
    /// Regions that are leaving the cluster.
    pub leaving: Vec<String>,
    /// This region's epoch: how often it has joined.
    pub epoch: u64,
}

/// `GET /v1/regions`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegionsState {
    /// The region that answers.
    pub region: String,
    /// Those that are in the cluster, are coming, or are leaving it.
    pub regions: Vec<RegionState>,
}

/// A region of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegionState {
    /// Its name.
    pub region: String,
    /// Its Raft node id.
    pub node: u64,
    /// Its peer listener, if it follows the log.
    pub url: Option<String>,
    /// `in`, `leaving` or `out` (and still to be forgotten).
    pub standing: String,
    /// `voter`, `learner`, or `none`: it does not follow the log.
    pub role: String,
    /// It has no part of any limit and serves nobody.
    pub witness: bool,
    /// It leads, as far as the answering region knows.
    pub leads: bool,
    /// It is the answering region, or has answered that one's last pings.
    pub reachable: bool,
    /// How long what it has changed still takes, if it is not through.
    pub waits_for: Option<String>,
}

/// A step of a change of a region.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegionStep {
    /// The region.
    pub region: String,
    /// Its Raft node id.
    pub node: u64,
    /// Nothing more is to be done.
    pub done: bool,
    /// What the next step waits for.
    pub waits_for: Option<String>,
}

/// Another region, as seen from here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerState {
    /// Its name.
    pub region: String,
    /// Where its peer listener is.
    pub address: String,
    /// Did the last exchange succeed?
    pub reachable: bool,
    /// Why not, if it did not.
    pub why: Option<String>,
    /// Round trip, in microseconds.
    pub rtt_us: Option<u64>,
    /// Index of the last entry that it is known to have (as the leader sees it).
    pub matched: Option<u64>,
}

/// The region's store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreState {
    /// `redis` or `embedded`.
    pub kind: String,
    /// Where, without secrets.
    pub address: Option<String>,
    /// Does it serve this daemon?
    pub attached: bool,
    /// Why not, if it does not.
    pub why: Option<String>,
    /// Its version.
    pub version: Option<String>,
    /// Round trip, in microseconds.
    pub rtt_us: Option<u64>,
    /// May it evict keys? Then strict policies are not safe on it.
    pub evicts: bool,
    /// The session's nonce.
    pub session: u64,
}

/// A policy in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyState {
    /// Its name.
    pub name: String,
    /// Its domain.
    pub domain: String,
    /// What it matches, as text: `tenant=*, op=search`.
    pub matches: String,
    /// Its limit, as text: `1000/s, burst 2000`.
    pub limit: String,
    /// `strict`, `approximate` or `split`.
    pub mode: String,
    /// What it guarantees, as text.
    pub guarantee: String,
    /// It only counts.
    pub shadow: bool,
    /// Requests that it let through since the daemon started.
    pub admitted: u64,
    /// Requests that it denied since the daemon started.
    pub denied: u64,
    /// The keys that it matches, in order.
    pub keys: Vec<String>,
    /// The whole limit's rate, in micro-tokens a second; `None`: it is unlimited.
    pub rate: Option<i64>,
    /// The whole limit's burst, in micro-tokens.
    pub burst: Option<i64>,
    /// How far above the limit all regions together may go, in micro-tokens.
    pub overshoot: i64,
    /// What each region may always use.
    pub parts: Vec<PartState>,
    /// `allow`, `deny` or `local`.
    pub on_store_failure: String,
    /// How long a request may wait for a lease, in milliseconds.
    pub wait_ms: u64,
}

/// A bucket in the region that answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BucketState {
    /// Its policy.
    pub policy: String,
    /// Its id, in hex.
    pub bucket: String,
    /// What it is for, as text: `tenant=42` (values of redacted keys as hashes); empty if it is not known here.
    pub what: String,
    /// Tokens that were asked for, a second, lately.
    pub demand: u64,
    /// Tokens let through since the daemon started.
    pub admitted: u64,
    /// Tokens denied since the daemon started.
    pub denied: u64,
    /// The level, in micro-tokens, when last seen.
    pub level: Tokens,
    /// The capacity, in micro-tokens, when last seen.
    pub cap: Tokens,
    /// The lease that it has here.
    pub lease: Option<LeaseState>,
    /// The window that it is of, if its policy is a quota.
    pub window: Option<WindowState>,
}

/// A window of a quota, in milliseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WindowState {
    /// When it began.
    pub began_ms: u64,
    /// When it ends.
    pub ends_ms: u64,
}

/// A slice of a pool lent to a region.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LeaseState {
    /// Micro-tokens of capacity.
    pub burst: i64,
    /// Micro-tokens a second.
    pub rate: i64,
    /// How long it still runs, in milliseconds.
    pub left_ms: u64,
}

/// `GET /v1/buckets/{policy}?tenant=42`: one bucket in every region.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BucketView {
    /// Its policy.
    pub policy: String,
    /// Its id, in hex.
    pub bucket: String,
    /// What is left in the pool, in micro-tokens; `None`: there is no pool.
    pub pool_level: Option<i64>,
    /// The pool's rate that is not lent, in micro-tokens a second.
    pub pool_rate: Option<i64>,
    /// Each region's part.
    pub regions: Vec<BucketRegion>,
    /// The pool's books; `None`: there is no pool.
    pub books: Option<BooksState>,
    /// The window that it is now, if the policy is a quota: the bucket is that window's.
    pub window: Option<WindowState>,
}

/// The books of a bucket: for each of rate and burst, `reserved + lent + free = whole`. Rates are micro-tokens a second; bursts are
/// micro-tokens, with the overshoot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BooksState {
    /// The whole limit's rate ...
    pub whole_rate: i64,
    /// ... and burst.
    pub whole_burst: i64,
    /// The rate of all regions' reserves as they are counted ...
    pub reserved_rate: i64,
    /// ... and their burst.
    pub reserved_burst: i64,
    /// The rate that could be lent (negative while a policy shrinks) ...
    pub free_rate: i64,
    /// ... and the burst.
    pub free_burst: i64,
    /// By region: what it may hold of the pool.
    pub lent: Vec<LentState>,
    /// The books did not balance: nothing is granted.
    pub frozen: bool,
}

/// The most that a region may hold, or come to hold, of a bucket's pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LentState {
    /// The region.
    pub region: String,
    /// Micro-tokens a second.
    pub rate: i64,
    /// Micro-tokens.
    pub burst: i64,
}

/// One region's part of a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BucketRegion {
    /// The region.
    pub region: String,
    /// Its reserve's capacity, with its overdraft, in micro-tokens.
    pub reserve_cap: i64,
    /// Its reserve's rate, in micro-tokens a second.
    pub reserve_rate: i64,
    /// Its lease.
    pub lease: Option<LeaseState>,
    /// Its level, in micro-tokens; `None`: the region could not be asked, or has no store at the moment.
    pub level: Option<i64>,
    /// What its bucket can hold now, in micro-tokens ...
    pub cap: Option<i64>,
    /// ... and what it refills by, in micro-tokens a second: its reserve, and its lease while that runs.
    pub rate: Option<i64>,
    /// It is the answering region, or can be asked.
    pub reachable: bool,
}

/// `POST /v1/buckets/{policy}/reset?tenant=42` succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BucketReset {
    /// Its policy.
    pub policy: String,
    /// Its id, in hex.
    pub bucket: String,
    /// Which of the cluster's resets it is.
    pub number: u64,
    /// Regions that are still to hear of it.
    pub waits_for: Vec<String>,
}

/// `PUT /v1/policies` succeeded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AppliedPolicies {
    /// The version in force now (with `dry_run`: the one that would be).
    pub version: u64,
    /// Nothing was changed.
    pub dry_run: bool,
    /// What is different, policy by policy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<PolicyChangeState>,
}

/// How a policy changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyChangeState {
    /// Its name.
    pub name: String,
    /// What was in force, as a policy file has it; `None`: it is new.
    pub before: Option<String>,
    /// What comes into force; `None`: it goes.
    pub after: Option<String>,
    /// What it guaranteed before: see [`PolicyState::guarantee`].
    pub guaranteed_before: Option<String>,
    /// What it guarantees then.
    pub guarantees_after: Option<String>,
}

/// `/readyz` where the answer is no.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NotReady {
    /// Always `false`.
    pub ready: bool,
    /// It votes, and serves nobody: nothing is ever to be sent there. (Left out where it is not so.)
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub witness: bool,
    /// Why not.
    pub reasons: Vec<String>,
}
