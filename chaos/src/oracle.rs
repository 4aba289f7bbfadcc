//! What a run leaves behind, for the invariants to judge and the report to draw: what clients saw, what was promised, and
//! what was done to the cluster. Nothing in here comes from the word of the thing that is tested, but [`Sample`]s,
//! which say what the cluster believed.
//!
//! Time is *true* time: microseconds since the run began on the harness' own monotonic clock (or the simulation's).

use quorate::quota::amount::{Micros, Rate, Tokens};
use serde::{Deserialize, Serialize};

/// All of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct History {
    /// What ran.
    pub run: Run,
    /// The regions, by number.
    pub regions: Vec<String>,
    /// The limits that were watched, by number: one bucket each.
    pub limits: Vec<Watched>,
    /// What clients saw, in no particular order.
    pub requests: Vec<Request>,
    /// What was done to the cluster.
    pub faults: Vec<FaultSpan>,
    /// What the cluster believed.
    pub samples: Vec<Sample>,
    /// When the last fault had ended; `None`: never (or there was none to end).
    pub healed: Option<Micros>,
    /// When the run ended.
    pub end: Micros,
}

/// What ran, and how to run it again.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// `sim seed 17`, `cluster minority-cut-off`.
    pub title: String,
    /// One line of what it is about.
    pub about: String,
    /// The command that replays it.
    pub replay: String,
}

/// One bucket, and what was promised about it over time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Watched {
    /// The policy and the bucket's values: `tenant-requests tenant=42`.
    pub name: String,
    /// Editions of its policy, by `from`, ascending.
    pub editions: Vec<Edition>,
}

/// What a policy promised for some time. From `from` until the next edition's `from` only this edition counts; an edition
/// that may be in force together with its predecessor (a change is under way: from when it was *sent* until every region had
/// settled) is written as the larger of both, field by field.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Edition {
    /// Since when.
    pub from: Micros,
    /// The mode.
    pub mode: Mode,
    /// The refill rate of the whole limit.
    pub rate: Rate,
    /// Its burst.
    pub burst: Tokens,
    /// Approximate: how far above it all regions together may go.
    pub overshoot: Tokens,
    /// What each region (by number) may always spend: rate and burst. While a change is under way, the *smaller*.
    pub reserves: Vec<(Rate, Tokens)>,
}

/// As in policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// A global cap.
    #[default]
    Strict,
    /// A global cap, and so much more.
    Approximate,
    /// By region.
    Split,
}

/// One request, as its client saw it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Asked of this region.
    pub region: usize,
    /// Of this limit.
    pub limit: usize,
    /// For so many tokens.
    pub cost: Tokens,
    /// When it was sent.
    pub sent: Micros,
    /// When its answer arrived, or when the client gave up.
    pub answered: Micros,
    /// The answer.
    pub outcome: Outcome,
}

/// What a client was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Go on.
    Allowed,
    /// The quota is used up.
    Denied,
    /// The region could not decide (503; store or pool out of reach).
    Unavailable,
    /// No answer: it may have been charged.
    Unknown,
}

/// Something that was done to the cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FaultSpan {
    /// From when ...
    pub from: Micros,
    /// ... until when; `None`: it never ended (or was over at once: `to == Some(from)`).
    pub to: Option<Micros>,
    /// In words: `us-east cut off from all others`.
    pub what: String,
    /// Regions that it touches, by number.
    pub regions: Vec<usize>,
    /// Do requests of these regions fail, or is their reserve out of use, for its sake (a dead daemon, a lost store)? A cut
    /// between regions does not do that.
    pub disables: bool,
    /// Are these regions cut off from a quorum?
    pub isolates: bool,
}

/// What the cluster believed about one limit at one time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sample {
    /// When.
    pub at: Micros,
    /// Of which limit.
    pub limit: usize,
    /// Said by this region.
    pub by: usize,
    /// The bucket in this region's store: tokens it could spend now, if known.
    pub level: Option<Tokens>,
    /// Free in the pool, by this region's replica: rate and burst (negative while a policy shrinks) and level.
    pub free: (Rate, Tokens, Tokens),
    /// Lent, by region: rate and burst as the pool counts them.
    pub lent: Vec<(Rate, Tokens)>,
    /// What it takes for reserved by all regions together: rate and burst.
    pub reserved: (Rate, Tokens),
    /// What it thinks the whole is: rate and burst (with overshoot).
    pub whole: (Rate, Tokens),
    /// The bucket's books did not balance: nothing is lent from it.
    pub frozen: bool,
}
