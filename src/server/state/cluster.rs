//! The part of [`State`](super::State) that is about the whole cluster, as one region knows it.

use super::{BooksState, LeaseState, StoreState};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A region of the cluster: what the answering region sees of it, and what it said of itself last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegionView {
    /// It is the one that answers.
    pub me: bool,
    /// `in`, `leaving` or `out`; empty before the cluster was founded.
    pub standing: String,
    /// `leader`, `voter`, `learner`, or `none`: it does not follow the log.
    pub role: String,
    /// It votes, has no part of any limit and serves nobody.
    pub witness: bool,
    /// It is the answering region, or has answered that one's last pings.
    pub reachable: bool,
    /// Smoothed round trip from the answering region, in microseconds.
    pub rtt_us: Option<u64>,
    /// This region's epoch in the log: how often it has joined.
    pub epoch: u64,
    /// How old the rest is, in milliseconds; `None`: it has not said anything yet.
    pub age_ms: Option<u64>,
    /// What it says of itself.
    pub said: RegionReport,
}

/// What a region says of itself. Regions tell each other once a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegionReport {
    /// Its daemon's version.
    pub version: String,
    /// How long its daemon has run, in milliseconds.
    pub uptime_ms: u64,
    /// What keeps it from being ready; empty: it is.
    pub not_ready: Vec<String>,
    /// It reaches a majority of the voters (itself included, if it votes).
    pub quorum: bool,
    /// Who leads, as far as it knows.
    pub leader: Option<String>,
    /// The term that it is in.
    pub term: u64,
    /// Index of the last entry that it has applied.
    pub applied: u64,
    /// The version of the policies that it uses.
    pub policies_version: u64,
    /// Its store.
    pub store: StoreState,
}

/// What passes under a policy. Rates are thousandths of a token a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TrafficState {
    /// By region, as it said last.
    pub regions: BTreeMap<String, RateState>,
    /// How many buckets had demand within the last minute, if all of the traffic is theirs. `None`: there are more than are
    /// followed.
    pub buckets: Option<u64>,
    /// The books of those buckets together (of at most 32), or of one that nobody has asked about; `None`: there is no pool.
    pub books: Option<BooksState>,
}

/// What passes, in thousandths of a token a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RateState {
    /// Let through.
    pub admitted: u64,
    /// Refused (by a shadow policy: would have been).
    pub denied: u64,
    /// Requests a second, in thousandths, that the store gave no answer for: `on_store_failure` decided.
    pub fallbacks: u64,
}

/// What a region may use of a policy's limit with no word from anyone, for each bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartState {
    /// The region.
    pub region: String,
    /// Micro-tokens a second.
    pub rate: i64,
    /// Micro-tokens, without the overdraft.
    pub burst: i64,
    /// How far below zero it may go, in micro-tokens (approximate mode).
    pub overdraft: i64,
}

/// One of the buckets with most demand in all regions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HotBucket {
    /// Its policy.
    pub policy: String,
    /// Its id, in hex.
    pub bucket: String,
    /// What it is for, as text: `tenant=42` (long values cut, values of redacted keys as hashes).
    pub what: String,
    /// Let through in all regions that were heard lately, in thousandths of a token a second.
    pub admitted: u64,
    /// Refused in them, in thousandths of a token a second.
    pub denied: u64,
    /// By region, as it said last.
    pub regions: BTreeMap<String, HotRegion>,
    /// The pool's books; `None`: there is no pool.
    pub books: Option<BooksState>,
}

/// A region's part in a bucket with much demand.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HotRegion {
    /// Let through, in thousandths of a token a second.
    pub admitted: u64,
    /// Refused, in thousandths of a token a second.
    pub denied: u64,
    /// Whole tokens that were left of the limit, as the last caller was told.
    pub remaining: Option<u64>,
    /// What the region holds, in micro-tokens: it would admit so much at once if it were cut off now ...
    pub level: Option<i64>,
    /// ... and then so many micro-tokens a second: its reserve's rate, and its lease's while that runs.
    pub rate: Option<i64>,
    /// Its lease, as the pool knows it.
    pub lease: Option<LeaseState>,
}

/// The last minutes of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HistoryState {
    /// By region, oldest first; the last one ends [`History::end_ms`](HistoriesState::end_ms). Regions that were heard of later
    /// have fewer. `null`: nothing was heard of the region then.
    pub regions: BTreeMap<String, SeriesState>,
}

/// What passed in one region, in thousandths of a token a second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SeriesState {
    /// Let through.
    pub admitted: Vec<Option<u64>>,
    /// Refused.
    pub denied: Vec<Option<u64>>,
}

/// The last minutes of the busiest policies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HistoriesState {
    /// Each number is the average over so many milliseconds.
    pub step_ms: u64,
    /// When the last step ended: milliseconds since the Unix epoch.
    pub end_ms: u64,
    /// By policy.
    pub policies: BTreeMap<String, HistoryState>,
}

/// Something happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Event {
    /// Counts up from 1 in each life of a daemon.
    pub id: u64,
    /// When the answering region noticed: milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// `leader`, `epoch`, `fallback`, `policies`, `region`, `store`, `peer`, `ready`, `reset` or `books`.
    pub kind: String,
    /// `info`, `warn` or `error` (a person must look).
    pub level: String,
    /// The region that it is about, if it is about one.
    pub region: Option<String>,
    /// What happened.
    pub text: String,
}

/// What one region asks another over the peer wire, about what it shows to people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerQuestion {
    /// What it says of itself: [`PeerReport`].
    Report,
    /// What it holds of a bucket: [`PeerBucket`].
    Bucket {
        /// The policy's name.
        policy: String,
        /// The bucket's id, in hex.
        bucket: String,
    },
}

/// What a region tells the others once a second: at most [`PEER_REPORT_BYTES_MAX`] as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerReport {
    /// Itself.
    pub region: RegionReport,
    /// What passes, by policy; the busiest, if there are too many.
    pub policies: BTreeMap<String, RateState>,
    /// It has less traffic than is followed bucket by bucket: for these policies all of it is in [`Self::buckets`].
    pub complete: Vec<String>,
    /// The buckets with most demand there.
    pub buckets: Vec<PeerHot>,
}

/// The most bytes of a [`PeerReport`].
pub const PEER_REPORT_BYTES_MAX: usize = 48 * 1024;

/// A bucket with much demand in a region.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerHot {
    /// Its policy.
    pub policy: String,
    /// Its id, in hex.
    pub bucket: String,
    /// See [`HotBucket::what`].
    pub what: String,
    /// See [`HotRegion::admitted`].
    pub admitted: u64,
    /// See [`HotRegion::denied`].
    pub denied: u64,
    /// See [`HotRegion::remaining`].
    pub remaining: u64,
    /// What the region holds of it; `None`: the store did not say.
    pub holds: Option<PeerBucket>,
}

/// What a region holds of a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerBucket {
    /// Micro-tokens.
    pub level: i64,
    /// Micro-tokens a second.
    pub rate: i64,
    /// Micro-tokens that it can hold.
    pub cap: i64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Regions of different versions ask each other.
    #[test]
    fn questions_and_answers_are_read_by_older_and_newer_regions() {
        let bucket = PeerQuestion::Bucket { policy: "p".into(), bucket: "0f".into() };
        for (question, wire) in [
            (PeerQuestion::Report, json!("report")),
            (bucket, json!({"bucket": {"policy": "p", "bucket": "0f"}})),
        ] {
            assert_eq!(serde_json::to_value(&question).unwrap(), wire);
            assert_eq!(serde_json::from_value::<PeerQuestion>(wire).unwrap(), question);
        }
        let newer = json!({"from_the_future": 1, "buckets": [{"what": "tenant=42", "shape": {}}],
            "region": {"quorum": true, "mood": "calm"}, "policies": {"p": {"admitted": 7}}});
        let read: PeerReport = serde_json::from_value(newer).unwrap();
        assert_eq!((read.region.quorum, read.policies["p"].admitted), (true, 7));
        assert_eq!(read.buckets[0].what, "tenant=42");
        assert_eq!(serde_json::from_value::<PeerReport>(json!({})).unwrap(), PeerReport::default());
    }
}
