//! A scenario: what runs, what is asked of it, what is done to it, and what must hold. `scenarios/*.yaml` are some; the keys are in
//! `scenarios/README.md`.

mod fault;
mod read;

pub use fault::{Back, Clocks, Fault, How, Path, Role, Slow, Who};

use anyhow::{Context as _, bail};
use quorate::config::Faults;
use quorate::quota::policy::{Policy, RegionName};
use std::num::NonZeroU64;
use std::path::Path as FilePath;
use std::time::Duration;

macro_rules! built_in {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../scenarios/", $name, ".yaml")))),*]
    };
}

/// The scenarios that come with the program: name and text.
pub const BUILT_IN: &[(&str, &str)] = built_in![
    "minority-cut-off",
    "majority-lost",
    "one-way-partition",
    "flapping-link",
    "leader-isolated",
    "leader-paused",
    "every-redis-lost-once",
    "redis-rollback",
    "stale-failover",
    "slow-redis",
    "clock-step",
    "rolling-restart",
    "daemons-killed",
    "policy-lowered-in-partition",
    "modes-in-partition",
    "disk-full",
    "region-joins-and-leaves",
];

/// A whole scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its file's name without the extension.
    pub name: String,
    /// What happens, in a few words.
    pub title: String,
    /// What it is about, in a sentence or two.
    pub about: String,
    /// How long it is run for.
    pub length: Duration,
    /// What runs.
    pub topology: Topology,
    /// The policies that the cluster is founded with.
    pub policies: Vec<Policy>,
    /// What is asked of it.
    pub loads: Vec<Load>,
    /// What is done to it, in the order of the file.
    pub timeline: Vec<Event>,
    /// What must hold.
    pub expect: Expect,
}

/// What runs.
#[derive(Clone, Debug)]
pub struct Topology {
    /// The founding regions, in the order of their names, and then those that may join later.
    pub regions: Vec<RegionName>,
    /// How many of them found the cluster.
    pub founders: usize,
    /// Round trips between regions, by number.
    pub rtt: Vec<Vec<Duration>>,
    /// Adds up to this to each delay.
    pub jitter: Duration,
    /// Bytes a second of each direction of each line between regions.
    pub bandwidth: Option<NonZeroU64>,
    /// The stores.
    pub redis: RedisPlan,
}

/// Each region's Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedisPlan {
    /// What it keeps on disk.
    pub persistence: Persistence,
    /// There is a replica to fail over to.
    pub replica: bool,
    /// How long the daemon waits for it.
    pub timeout: Duration,
    /// The round trip to it.
    pub rtt: Duration,
}

/// What a Redis keeps on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// Nothing: a restart is a loss.
    None,
    /// A snapshot every second or two in which something changed.
    Rdb,
    /// An append-only file, synced every second.
    Aof,
}

/// A stream of requests for one bucket.
#[derive(Clone, Debug)]
pub struct Load {
    /// For which policy.
    pub policy: String,
    /// Its domain.
    pub domain: String,
    /// Key and value, in the order of the policy's `match`.
    pub bucket: Vec<(String, String)>,
    /// How fast, by region.
    pub pace: Vec<Pace>,
    /// Tokens a request.
    pub cost: u32,
    /// From when ...
    pub from: Duration,
    /// ... to when.
    pub to: Duration,
    /// Over what.
    pub over: Over,
}

impl Load {
    /// The bucket, as people write it: `tenant-requests tenant=42`.
    #[must_use]
    pub fn limit_name(&self) -> String {
        let keys: Vec<String> = self.bucket.iter().map(|(k, v)| format!("{k}={v}")).collect();
        format!("{} {}", self.policy, keys.join(","))
    }
}

/// How fast requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// So many a second, answered or not.
    Open(u32),
    /// So many callers, each with one request after the other.
    Closed(u32),
}

impl Pace {
    /// Nothing is asked at all?
    #[must_use]
    pub fn is_nothing(self) -> bool {
        matches!(self, Self::Open(0) | Self::Closed(0))
    }
}

/// How requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// `POST /v1/check`
    Http,
    /// Envoy's `ShouldRateLimit`
    Grpc,
    /// By turns.
    Both,
}

/// Something that is done to the cluster.
#[derive(Clone, Debug)]
pub struct Event {
    /// When.
    pub at: Duration,
    /// For how long; `None`: it is over at once, or lasts to the end.
    pub lasts: Option<Duration>,
    /// What.
    pub fault: Fault,
}

/// What must hold.
#[derive(Clone, Debug, Default)]
pub struct Expect {
    /// Invariants that must apply and hold, by name; the others must hold where they apply.
    pub must: Vec<String>,
    /// Invariants that are not promised here, by name, and why not.
    pub not: Vec<(String, String)>,
    /// How long after the last fault demand must be served again.
    pub recovery: Option<Duration>,
    /// Daemons may log lines of level ERROR that hold one of these.
    pub errors: Vec<String>,
}

impl Scenario {
    /// One of [`BUILT_IN`] by its name, or a file.
    ///
    /// # Errors
    /// There is none, or it is wrong: then all of its faults, one a line, as `FILE:LINE:COL: what; how to mend it`.
    pub fn load(name_or_file: &str) -> anyhow::Result<Self> {
        if let Some((name, text)) = BUILT_IN.iter().find(|(name, _)| *name == name_or_file) {
            return Ok(Self::parse(FilePath::new(&format!("{name}.yaml")), text)?);
        }
        let file = FilePath::new(name_or_file);
        if !file.exists() {
            let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
            bail!(
                "--scenario {name_or_file}: no such file, and no scenario of that name; there are {}",
                names.join(", ")
            );
        }
        let text =
            std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(Self::parse(file, &text)?)
    }

    /// Reads a scenario's text; `file` is its name in faults.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(file: &FilePath, text: &str) -> Result<Self, Faults> {
        read::scenario(file, text)
    }

    /// Regions by number, those that found the cluster and those that may join.
    #[must_use]
    pub fn region(&self, name: &str) -> Option<usize> {
        self.topology.regions.iter().position(|region| &**region == name)
    }
}

#[cfg(test)]
mod tests;
