//! What a run leaves behind, for the invariants to judge and the report to draw: what clients saw, what was promised, and
//! what was done to the cluster. Nothing in here comes from the word of the thing that is tested, but [`Sample`]s,
//! which say what the cluster believed.
//!
//! Time is *true* time: microseconds since the run began on the harness' own monotonic clock (or the simulation's).

use quorate::quota::amount::{DRIFT_PPM, Micros, Rate, Tokens};
use quorate::quota::policy::{self, Cut, LEASE_MAX, LEASE_MIN};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    /// What was stated about this run, besides the policies.
    #[serde(default)]
    pub params: Params,
    /// How often each reason came with an answer (or each trouble with a connection instead of one), by region.
    #[serde(default)]
    pub reasons: Vec<BTreeMap<String, u64>>,
    /// What processes wrote that a person should look at.
    #[serde(default)]
    pub logs: Vec<LogLine>,
    /// Remarks: what was left out, and why; what happened besides.
    #[serde(default)]
    pub notes: Vec<String>,
    /// How the machine served the harness itself (nothing, where time is simulated).
    #[serde(default)]
    pub wakes: Wakes,
}

/// How late a task of the harness woke that slept for a few milliseconds again and again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wakes {
    /// So often by more than [`Self::LATE`] ...
    pub late: u64,
    /// ... by so much at worst ...
    pub worst: Micros,
    /// ... and by so much in all of these together.
    pub lost: Micros,
}

impl Wakes {
    /// Later than this is no delay of the day, but a machine that does something else.
    pub const LATE: Micros = Micros::millis(250);
    /// So often is too often ...
    const OFTEN: u64 = 5;
    /// ... and so much in all is too much.
    const LOST_MAX: Micros = Micros::seconds(2);

    /// It woke once, so late.
    pub fn add(&mut self, late: Micros) {
        if late > Self::LATE {
            self.late = self.late.saturating_add(1);
            self.worst = self.worst.max(late);
            self.lost += late;
        }
    }

    /// Had the machine too little time for this run? Then nothing that takes time can be judged by it.
    #[must_use]
    pub fn too_busy(&self) -> bool {
        self.late >= Self::OFTEN || self.lost >= Self::LOST_MAX
    }
}

/// Lines of a process' log that say the same, but for numbers and times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Of which region, by number.
    pub region: usize,
    /// How bad.
    pub level: LogLevel,
    /// The first of them, without its time.
    pub text: String,
    /// How many there were.
    pub count: u64,
    /// The scenario says that it may be there.
    #[serde(default)]
    pub expected: bool,
}

/// How bad a line of a log is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Somebody may want to know.
    #[default]
    Warn,
    /// A person must look.
    Error,
    /// A bug.
    Panic,
}

/// Figures that some promises need, as they are stated for a run. The defaults are those of docs/guarantees.md, for leases
/// of 10 s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Params {
    /// So long after the last fault (or change of policy, or the start) the demand must be served again; `None`: after two
    /// leases of the limit, see [`Params::recovery_of`].
    pub recovery: Option<Micros>,
    /// Of what an ideal limiter would admit then, so much must be admitted, in percent ...
    pub served_percent: i64,
    /// ... and in each region so much of what it would be entitled to if all regions had as much demand as they liked.
    pub fair_percent: i64,
    /// So long tokens may take to a region that asks for them in quiet time.
    pub move_time: Micros,
    /// So long after a fault that disabled it a region may still be starting.
    pub restart: Micros,
    /// How far a store's clock may be behind when it refills a bucket, besides the 1% of its speed.
    pub slack: Micros,
    /// How far from true a clock's speed may be, in parts per million.
    pub drift_ppm: i64,
    /// Of the requests to a region that is not disabled, so many per million may find no decision (503) for want of
    /// a store that is fast enough.
    pub unavailable_ppm: i64,
    /// An answer that takes longer than this is none; `None`: the client's own deadline decides.
    pub deadline: Option<Micros>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            recovery: None,
            served_percent: 95,
            fair_percent: 50,
            move_time: Micros::seconds(2),
            restart: Micros::seconds(3),
            slack: Micros::millis(250),
            drift_ppm: DRIFT_PPM,
            unavailable_ppm: 10_000,
            deadline: None,
        }
    }
}

impl Params {
    /// How long recovery may take for this limit: as stated, or two leases, which are as long as its burst takes to fill
    /// within 10 to 60 s.
    #[must_use]
    pub fn recovery_of(&self, limit: &Watched) -> Micros {
        let lease = |edition: &Edition| {
            edition.rate.time_for(edition.burst).unwrap_or(LEASE_MAX).clamp(LEASE_MIN, LEASE_MAX)
        };
        let limited = limit.editions.iter().filter(|edition| !edition.is_unlimited());
        let leases = limited.map(lease).max().unwrap_or(LEASE_MIN);
        self.recovery.unwrap_or(leases + leases)
    }

    /// What a rate certainly brings, by a clock that is as slow as it may be and with the product's own discount.
    #[must_use]
    pub fn rate_min(&self, rate: Rate) -> Rate {
        rate.discount(DRIFT_PPM).discount(self.drift_ppm)
    }
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

impl Watched {
    /// The edition that counts at a time; `None`: there was none yet.
    #[must_use]
    pub fn edition_at(&self, now: Micros) -> Option<&Edition> {
        self.editions.iter().rev().find(|edition| edition.from <= now)
    }
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
    /// Split: what each region (by number) may spend at most. While a change is under way, the *larger*. Empty: as
    /// [`Self::reserves`].
    #[serde(default)]
    pub parts_max: Vec<(Rate, Tokens)>,
    /// Is a change under way? (Then a pool may have lent more than it has.)
    #[serde(default)]
    pub changing: bool,
}

impl Edition {
    /// A policy that is in force by itself.
    #[must_use]
    pub fn of(from: Micros, mode: policy::Mode, cut: &Cut) -> Self {
        let parts: Vec<_> = cut.parts.iter().map(|part| (part.rate, part.burst)).collect();
        Self {
            from,
            mode: mode.into(),
            rate: cut.rate,
            burst: cut.burst,
            overshoot: cut.overshoot(),
            reserves: parts.clone(),
            parts_max: parts,
            changing: false,
        }
    }

    /// No limit at all: the policy is unlimited, or was removed and what it matched is let through.
    #[must_use]
    pub fn unlimited(from: Micros) -> Self {
        Self { from, burst: Tokens::MAX, ..Self::default() }
    }

    /// Is it no limit at all?
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        self.burst == Tokens::MAX
    }

    /// This edition together with its successor, from when the change was sent until every region has settled.
    /// For more than two, call it again with the next.
    #[must_use]
    pub fn changing_to(&self, from: Micros, next: &Self) -> Self {
        Self {
            from,
            mode: self.mode.with(next.mode),
            rate: self.rate.max(next.rate),
            burst: self.burst.max(next.burst),
            overshoot: self.overshoot.max(next.overshoot),
            reserves: fold(&self.reserves, &next.reserves, |a, b| (a.0.min(b.0), a.1.min(b.1))),
            parts_max: fold(self.most(), next.most(), |a, b| (a.0.max(b.0), a.1.max(b.1))),
            changing: true,
        }
    }

    /// What all regions together may hold at once.
    #[must_use]
    pub fn cap(&self) -> Tokens {
        self.burst + self.overshoot
    }

    /// What this region may always spend: rate and burst.
    #[must_use]
    pub fn reserve(&self, region: usize) -> (Rate, Tokens) {
        self.reserves.get(region).copied().unwrap_or_default()
    }

    /// What this region may spend at most by itself (split): rate and burst.
    #[must_use]
    pub fn part_max(&self, region: usize) -> (Rate, Tokens) {
        self.most().get(region).copied().unwrap_or_default()
    }

    fn most(&self) -> &[(Rate, Tokens)] {
        if self.parts_max.is_empty() { &self.reserves } else { &self.parts_max }
    }
}

/// Region by region; a region that one of both does not know has nothing there.
fn fold<T: Copy + Default>(a: &[T], b: &[T], with: impl Fn(T, T) -> T) -> Vec<T> {
    let at = |parts: &[T], i: usize| parts.get(i).copied().unwrap_or_default();
    (0..a.len().max(b.len())).map(|i| with(at(a, i), at(b, i))).collect()
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

impl Mode {
    /// What holds for certain while one gives way to the other: the whole bound, and no region's part.
    fn with(self, other: Self) -> Self {
        match (self, other) {
            (Self::Approximate, _) | (_, Self::Approximate) => Self::Approximate,
            (Self::Split, Self::Split) => Self::Split,
            (Self::Strict | Self::Split, Self::Strict | Self::Split) => Self::Strict,
        }
    }
}

impl From<policy::Mode> for Mode {
    fn from(mode: policy::Mode) -> Self {
        match mode {
            policy::Mode::Strict => Self::Strict,
            policy::Mode::Approximate { .. } => Self::Approximate,
            policy::Mode::Split => Self::Split,
        }
    }
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
    /// Do requests of these regions fail, or is their reserve out of use, for its sake (a dead or paused daemon or store, a
    /// lost or rolled-back one, a clock that steps)? A cut between regions does not do that. What is over at once needs no
    /// length: a region has [`Params::restart`] to get over it.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn edition(mode: Mode, rate: i64, parts: &[(i64, i64)]) -> Edition {
        let parts: Vec<_> = parts.iter().map(|(r, b)| (Rate(*r), Tokens(*b))).collect();
        Edition { mode, rate: Rate(rate), reserves: parts.clone(), parts_max: parts, ..Edition::default() }
    }

    #[test]
    fn a_change_promises_the_smaller_reserve_and_may_use_the_larger_part() {
        let (old, new) = (edition(Mode::Split, 10, &[(5, 1), (5, 9)]), edition(Mode::Split, 8, &[(8, 8)]));
        let both = old.changing_to(Micros(7), &new);
        assert_eq!(
            (both.from, both.rate, both.mode, both.changing),
            (Micros(7), Rate(10), Mode::Split, true)
        );
        assert_eq!(both.reserves, [(Rate(5), Tokens(1)), (Rate(0), Tokens(0))]);
        assert_eq!(both.parts_max, [(Rate(8), Tokens(8)), (Rate(5), Tokens(9))]);
        assert_eq!(old.changing_to(Micros(0), &edition(Mode::Strict, 1, &[])).mode, Mode::Strict);
        assert_eq!(edition(Mode::Strict, 1, &[]).changing_to(Micros(0), &old).mode, Mode::Strict);
    }

    #[test]
    fn a_history_of_an_older_run_can_be_read() {
        let json = r#"{"run":{"title":"t","about":"","replay":""},"regions":[],"limits":[{"name":"n","editions":
            [{"from":0,"mode":"split","rate":1,"burst":2,"overshoot":0,"reserves":[[1,2]]}]}],"requests":[],
            "faults":[],"samples":[],"healed":null,"end":5}"#;
        let history: History = serde_json::from_str(json).unwrap();
        assert_eq!(history.params, Params::default());
        assert_eq!(history.limits[0].editions[0].part_max(0), (Rate(1), Tokens(2)));
    }
}
