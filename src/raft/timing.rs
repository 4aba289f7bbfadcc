//! Every timeout of the room, from the longest round trip between regions.
//!
//! openraft's clockwork, as read from its source (0.10.0-alpha.37: `core/raft_core.rs`, `engine/engine_impl.rs`,
//! `core/heartbeat/worker.rs`), with R for the round trip:
//!
//! - A leader sends a heartbeat to each follower at the first tick (every 13/64 of the interval) after
//!   `heartbeat_interval`, and gives each one that interval to come back: it must be well above R.
//! - A leader takes writes while a quorum has acknowledged something that it *sent* less than `election_timeout_max`
//!   ago (the lease). Idle, what was acknowledged last was sent up to R + interval + tick ago.
//! - A follower votes for nobody while it has heard of the leader less than `election_timeout_max` ago, and stands for
//!   election itself a random `election_timeout_min..max` after that. Before-vote, vote and the first entry of the new
//!   term take a round trip each.
//!
//! With an interval of 2R, a tick of 0.4R, min = 2.5R and max = 5R: a lease lasts 5R where heartbeats need 3.4R (with a
//! fifth of jitter 3.6R); a follower stands 7.5R to 10.4R after the last heartbeat, and the new leader serves 3R later:
//! 13.4R at the latest, 3.4 s at R = 250 ms. (Two candidates at once do not split the vote: see `types::TypeConfig`.)

use super::LogLimits;
use openraft::{Config, SnapshotPolicy};
use std::time::Duration;

/// Below this, a busy machine's scheduling looks like a dead leader.
const RTT_MIN: Duration = Duration::from_millis(80);
/// Above this, elections take too long for anyone's patience.
const RTT_MAX: Duration = Duration::from_secs(2);

/// Timeouts that follow from the longest round trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Timing {
    rtt: Duration,
}

impl Timing {
    pub fn new(rtt_max: Duration) -> Self {
        Self { rtt: rtt_max.clamp(RTT_MIN, RTT_MAX) }
    }

    /// Between a leader's heartbeats, and for each to come back.
    pub fn heartbeat(&self) -> Duration {
        self.rtt * 2
    }

    /// The least time from the end of a lease to standing for election.
    pub fn election_min(&self) -> Duration {
        self.rtt * 5 / 2
    }

    /// The most; also how long a leader's lease lasts.
    pub fn election_max(&self) -> Duration {
        self.rtt * 5
    }

    /// To make a connection (two round trips with TLS).
    pub fn connect(&self) -> Duration {
        self.rtt * 3
    }

    /// For a small call over a connection that exists.
    pub fn call(&self) -> Duration {
        self.rtt * 3
    }

    /// For an append to be acknowledged, the follower's disk included.
    pub fn append(&self) -> Duration {
        self.rtt * 4 + Duration::from_secs(2)
    }

    /// For a connection to prove that it is alive.
    pub fn keep_alive(&self) -> Duration {
        self.rtt * 4
    }

    /// Between two pings of a peer.
    pub fn ping(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// A peer that has not answered for so long is not reachable.
    pub fn silence(&self) -> Duration {
        self.ping() * 2 + self.call()
    }

    /// For a whole snapshot to be sent and installed.
    pub fn snapshot(&self) -> Duration {
        Duration::from_secs(120)
    }

    /// The leader writes an empty entry when nothing has been applied for so long, so that the Raft clock goes on.
    pub fn idle_entry(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// openraft's settings.
    pub fn config(&self, cluster: &str, log: LogLimits) -> Config {
        Config {
            cluster_name: cluster.to_owned(),
            heartbeat_interval: millis(self.heartbeat()),
            election_timeout_min: millis(self.election_min()),
            election_timeout_max: millis(self.election_max()),
            install_snapshot_timeout: millis(self.snapshot()),
            max_payload_entries: 1_024,
            replication_lag_threshold: log.snapshot_entries.saturating_mul(2),
            snapshot_policy: SnapshotPolicy::LogsSinceLast(log.snapshot_entries),
            max_in_snapshot_log_to_keep: log.entries_kept,
            purge_batch_size: (log.entries_kept / 4).max(1),
            // Bounded well above what one region's proposals and its peers' appends can be at once.
            api_channel_size: Some(4_096),
            notification_channel_size: Some(4_096),
            // An acknowledged entry of a restarted leader must be learnt from an election, not presumed.
            enable_leader_restore: Some(false),
            enable_pre_vote: Some(true),
            ..Config::default()
        }
    }
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inequalities_hold_with_jitter() {
        for rtt in [0, 80, 250, 600, 5_000].map(Duration::from_millis) {
            let timing = Timing::new(rtt);
            let config = timing.config("c", LogLimits::default()).validate().unwrap();
            let slow = timing.rtt * 6 / 5;
            let tick = timing.heartbeat() * 13 / 64;
            assert!(slow < timing.heartbeat() * 3 / 4, "a heartbeat comes back in time");
            assert!(
                slow + timing.heartbeat() + tick < timing.election_max(),
                "an idle leader keeps its lease"
            );
            assert!(config.election_timeout_min < config.election_timeout_max);
        }
        let timing = Timing::new(Duration::from_millis(250));
        let stand = timing.election_max() * 2 + timing.heartbeat() * 13 / 64;
        assert!(stand + timing.rtt * 3 < Duration::from_secs(4), "a new leader serves in time");
    }
}
