//! What can be done to a cluster.

use quorate::quota::policy::Policy;
use std::num::NonZeroU64;
use std::time::Duration;

/// Something that is done to a cluster. What lasts ends with its event; what is over at once is marked so.
#[derive(Clone, Debug)]
pub enum Fault {
    /// A partition.
    Cut(Path, How),
    /// A partition that comes and goes.
    Flap {
        /// Where.
        path: Path,
        /// How.
        how: How,
        /// How long it is there.
        down: Duration,
        /// How long it is not.
        up: Duration,
    },
    /// Slow lines between regions.
    Slow(Path, Slow),
    /// Regions' daemons cannot reach their Redis.
    RedisCut(Who, How),
    /// Slow lines from daemons to their Redis.
    RedisSlow(Who, Slow),
    /// Daemons are killed (`kill -9`); started again at the end.
    Kill(Who),
    /// Daemons are frozen (SIGSTOP); go on at the end.
    Pause(Who),
    /// Redis servers are frozen; go on at the end.
    RedisPause(Who),
    /// Daemons are stopped (SIGTERM) and started, one after the other, each when the one before is ready. Over when all are.
    Restart {
        /// Which.
        who: Who,
        /// Waits so long after each.
        pause: Duration,
    },
    /// FLUSHALL. Over at once.
    Flush(Who),
    /// Redis servers are killed; started again at the end.
    RedisKill(Who, Back),
    /// Redis servers write a snapshot, which is kept for [`Back::Saved`]. Over at once.
    RedisSave(Who),
    /// The replica stops hearing of changes: it grows stale. Ends with the scenario.
    RedisDetach(Who),
    /// Redis servers die and their replicas are promoted. Over at once.
    RedisFailover(Who),
    /// Wall clocks step; back at the end, if there is one.
    ClockStep {
        /// Whose.
        who: Who,
        /// How far, in milliseconds.
        by_ms: i64,
        /// Which of a region's.
        of: Clocks,
    },
    /// The disk under `data_dir` is full; room again at the end.
    DiskFull(Who),
    /// New policies, put to the admin listener of a region. Over at once.
    Apply {
        /// Of which region.
        through: Who,
        /// All of them.
        policies: Vec<Policy>,
    },
    /// Regions of `topology.later` start and are added. Over when they are members.
    RegionAdd(Who),
    /// Regions are removed. Over when they are not members any more.
    RegionRemove(Who),
}

/// Lines between regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// From these ...
    pub from: Who,
    /// ... to these.
    pub to: Who,
    /// And back.
    pub both_ways: bool,
}

/// How a partition shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Nothing passes, and nobody is told.
    Blackhole,
    /// Connections are reset and refused.
    Reset,
}

/// How slow a line is; `None`: as it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slow {
    /// Round trip.
    pub rtt: Option<Duration>,
    /// Adds up to this to each delay.
    pub jitter: Option<Duration>,
    /// Bytes a second.
    pub bandwidth: Option<NonZeroU64>,
}

/// With what a Redis comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Back {
    /// With nothing.
    Empty,
    /// With what its persistence kept.
    Kept,
    /// With the snapshot that was saved earlier in the timeline.
    Saved,
}

/// Which of a region's wall clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clocks {
    /// The daemon's.
    Daemon,
    /// The Redis server's.
    Redis,
    /// Both.
    Both,
}

impl Clocks {
    /// Is the daemon's one of them?
    #[must_use]
    pub fn daemon(self) -> bool {
        self != Self::Redis
    }

    /// Is the Redis server's one of them?
    #[must_use]
    pub fn redis(self) -> bool {
        self != Self::Daemon
    }
}

/// Regions, by name or by what they are when the fault begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who(pub Vec<Role>);

/// One of [`Who`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// By number.
    Region(usize),
    /// The region that leads.
    Leader,
    /// A region that does not lead, chosen by the seed.
    Follower,
    /// Every member.
    All,
    /// Every member that the fault does not name otherwise.
    Others,
}
