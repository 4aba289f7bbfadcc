//! The other regions: where they are, whether they answer, and whether they are who they were.

use super::wire::{Refusal, header};
use crate::quota::policy::RegionName;
use crate::raft::data_dir::{Acquaintances, Identity};
use http::HeaderMap;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;
use tokio::time::Instant;

/// The most regions of a cluster.
pub(crate) const REGIONS_MAX: usize = 64;

/// All regions but this one.
#[derive(Debug)]
pub(crate) struct Peers {
    pub me: Identity,
    known: Acquaintances,
    peers: RwLock<BTreeMap<RegionName, Arc<Peer>>>,
    refusals: Mutex<Option<Instant>>,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Peer {
    pub region: RegionName,
    pub url: String,
    health: Mutex<Health>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Health {
    heard: Option<Instant>,
    rtt: Option<Duration>,
}

impl Peer {
    /// It answered a ping after `rtt`.
    pub fn heard(&self, rtt: Duration) {
        let mut health = self.health();
        health.heard = Some(Instant::now());
        // A moving average over about eight pings, as TCP's.
        health.rtt = Some(health.rtt.map_or(rtt, |before| (before * 7 + rtt) / 8));
    }

    /// Has it answered within `silence`?
    pub fn reachable(&self, silence: Duration) -> bool {
        self.health().heard.is_some_and(|heard| heard.elapsed() < silence)
    }

    /// Its smoothed round trip.
    pub fn rtt(&self) -> Option<Duration> {
        self.health().rtt
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peers {
    pub fn new(me: Identity, known: Acquaintances, regions: &[(RegionName, String)]) -> Self {
        let peers = Self { me, known, peers: RwLock::default(), refusals: Mutex::new(None) };
        for (region, url) in regions {
            peers.add(region, url);
        }
        peers
    }

    /// A region of the cluster. Where it is already known, its URL stays: the configuration says it before any member's
    /// entry in the log does.
    pub fn add(&self, region: &RegionName, url: &str) {
        if *region == self.me.region {
            return;
        }
        let mut peers = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        if peers.len() < REGIONS_MAX {
            peers.entry(region.clone()).or_insert_with(|| {
                let url = url.trim_end_matches('/').to_owned();
                Arc::new(Peer { region: region.clone(), url, health: Mutex::default() })
            });
        }
    }

    pub fn get(&self, region: &str) -> Option<Arc<Peer>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).get(region).cloned()
    }

    /// By name.
    pub fn all(&self) -> Vec<Arc<Peer>> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    pub fn instance(&self, region: &str) -> Option<u64> {
        self.known.get(region)
    }

    /// Looks at who calls, before anything is done for them. Writes to disk when a peer calls for the first time.
    pub fn admit(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let get = |name| headers.get(name).and_then(|value| value.to_str().ok());
        if get(header::PROTOCOL) != Some(super::wire::PROTOCOL) {
            return Err(Refusal::Protocol);
        }
        if get(header::CLUSTER) != Some(&self.me.cluster) {
            return Err(Refusal::Cluster);
        }
        if get(header::TO) != Some(&self.me.region) {
            return Err(Refusal::Target);
        }
        if get(header::TO_INSTANCE).is_some_and(|to| to.parse() != Ok(self.me.instance)) {
            return Err(Refusal::TargetInstance);
        }
        let from = get(header::REGION).and_then(|region| self.get(region)).ok_or(Refusal::Stranger)?;
        let instance = get(header::INSTANCE).and_then(|n| n.parse().ok()).ok_or(Refusal::Stranger)?;
        if self.meet(&from.region, instance) { Ok(()) } else { Err(Refusal::Instance) }
    }

    /// Is `region` still the one that this node knows (or does it know none)?
    pub fn meet(&self, region: &RegionName, instance: u64) -> bool {
        self.known.meet(region, instance).unwrap_or_else(|fault| {
            tracing::error!(%fault, "cannot write down a peer; its calls are refused until it can be");
            false
        })
    }

    /// True at most every ten seconds: refusals come at the rate of calls, and one line says it.
    pub fn may_log_refusal(&self) -> bool {
        let mut last = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.is_none_or(|last| last.elapsed() > Duration::from_secs(10));
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}
