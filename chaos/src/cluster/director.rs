//! Does to the cluster what the timeline says, and notes what was done, to whom, and from when to when.

mod act;

use super::promise::Change;
use super::scenario::{Event, Fault, Path, Role, Scenario, Slow, Who};
use super::stage::Stage;
use crate::oracle::FaultSpan;
use crate::workload::Recorder;
use anyhow::Context as _;
use quorate::quota::policy::Policy;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Runs a timeline.
#[derive(Debug)]
pub struct Director {
    stage: Arc<Stage>,
    recorder: Arc<Recorder>,
    random: Mutex<ChaCha8Rng>,
    /// How lines to stores are without a fault, and how long daemons wait for stores.
    store_rtt: Slow,
    store_timeout: Duration,
    /// The policies that were put last.
    policies: Mutex<Vec<Policy>>,
    spans: Mutex<Vec<FaultSpan>>,
    /// The regions that have no quorum now, and the span that says so.
    isolated: Mutex<(BTreeSet<usize>, Option<usize>)>,
    changes: Mutex<Vec<Change>>,
    /// Daemons that ended by themselves, and may have.
    excused: Mutex<BTreeSet<usize>>,
}

/// A fault that has begun: whom it touches, and its span.
struct Begun {
    span: usize,
    regions: Vec<usize>,
    /// Ordered pairs, where it is about lines.
    pairs: Vec<(usize, usize)>,
}

impl Director {
    /// One for this stage.
    #[must_use]
    pub fn new(stage: Arc<Stage>, recorder: Arc<Recorder>, scenario: &Scenario, seed: u64) -> Self {
        let plan = scenario.topology.redis;
        Self {
            policies: Mutex::new(scenario.policies.clone()),
            store_rtt: Slow { rtt: Some(plan.rtt), ..Slow::default() },
            store_timeout: plan.timeout,
            stage,
            recorder,
            random: Mutex::new(ChaCha8Rng::seed_from_u64(seed)),
            spans: Mutex::default(),
            isolated: Mutex::default(),
            changes: Mutex::default(),
            excused: Mutex::default(),
        }
    }

    /// Runs the whole timeline, which began at `began`.
    ///
    /// # Errors
    /// Something could not be done.
    pub async fn run(self: Arc<Self>, scenario: &Scenario, began: Instant) -> anyhow::Result<()> {
        let mut tasks = JoinSet::new();
        for event in scenario.timeline.clone() {
            tasks.spawn(Arc::clone(&self).event(event, began));
        }
        while let Some(done) = tasks.join_next().await {
            done.context("the timeline panicked")??;
        }
        Ok(())
    }

    /// What was done so far.
    #[must_use]
    pub fn spans(&self) -> Vec<FaultSpan> {
        lock(&self.spans).clone()
    }

    /// How policies changed.
    #[must_use]
    pub fn changes(&self) -> Vec<Change> {
        lock(&self.changes).clone()
    }

    /// What is in force now, in a few words each.
    #[must_use]
    pub fn in_force(&self) -> Vec<String> {
        let now = self.recorder.now();
        let open = |span: &&FaultSpan| span.from <= now && span.to.is_none();
        lock(&self.spans).iter().filter(open).map(|span| span.what.clone()).collect()
    }

    /// Looks for daemons that ended though nobody told them to; notes each once. What is excused is none.
    pub async fn watch(&self) {
        for (number, site) in self.stage.sites.iter().enumerate() {
            let Ok(mut daemon) = site.daemon.try_lock() else { continue };
            let Some(status) = daemon.has_ended() else { continue };
            site.runs.store(false, std::sync::atomic::Ordering::Relaxed);
            if lock(&self.excused).contains(&number) {
                self.stage.note(format!("{}: the daemon ended with {status}, which it may here", site.name));
                continue;
            }
            let what = format!("{}: the daemon ended by itself with {status}", site.name);
            tracing::error!("{what}");
            let span = self.open(what, vec![number], true);
            self.stage.note(
                lock(&self.spans).get(span).map(|s| format!("unexpected: {}", s.what)).unwrap_or_default(),
            );
            self.reckon();
        }
    }

    async fn event(self: Arc<Self>, event: Event, began: Instant) -> anyhow::Result<()> {
        tokio::time::sleep_until(began + event.at).await;
        let fault = &event.fault;
        let Some(begun) =
            self.begin(fault).await.with_context(|| format!("at {:?}: {}", event.at, kind(fault)))?
        else {
            return Ok(());
        };
        self.reckon();
        let Some(lasts) = event.lasts else {
            if is_over_at_once(fault) {
                self.close(begun.span);
                self.reckon();
            }
            return Ok(());
        };
        let end = began + event.at + lasts;
        if let Fault::Flap { down, up, how, .. } = fault {
            self.flap(&begun, *how, (*down, *up), end).await?;
        }
        tokio::time::sleep_until(end).await;
        self.end(fault, &begun).await.with_context(|| format!("at the end of {}", kind(fault)))?;
        self.close(begun.span);
        self.reckon();
        Ok(())
    }

    /// Who is meant, now. `others` are all members but those in `named`.
    async fn resolve(&self, who: &Who, named: &[usize]) -> anyhow::Result<Vec<usize>> {
        let mut regions = BTreeSet::new();
        let members = self.stage.members();
        for role in &who.0 {
            match role {
                Role::Region(number) => {
                    regions.insert(*number);
                }
                Role::All => regions.extend(&members),
                Role::Others => regions.extend(members.iter().filter(|m| !named.contains(m))),
                Role::Leader => {
                    regions.insert(self.leader().await?);
                }
                Role::Follower => {
                    let leader = self.leader().await?;
                    let followers: Vec<usize> =
                        members.iter().copied().filter(|m| *m != leader && !named.contains(m)).collect();
                    let choice = lock(&self.random).random_range(0..followers.len().max(1));
                    regions.extend(followers.get(choice));
                }
            }
        }
        Ok(regions.into_iter().collect())
    }

    /// The leader; waits for one for a while.
    async fn leader(&self) -> anyhow::Result<usize> {
        const WITHIN: Duration = Duration::from_secs(15);
        const LOOK_EVERY: Duration = Duration::from_millis(100);
        let end = Instant::now() + WITHIN;
        loop {
            match self.stage.admin.leader().await {
                Some(leader) => return Ok(leader),
                None if Instant::now() >= end => {
                    anyhow::bail!("no region leads within {WITHIN:?}, and a fault is for the leader")
                }
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Ordered pairs of regions between which a line is touched, and all regions of one side.
    async fn pairs(&self, path: &Path) -> anyhow::Result<(Vec<(usize, usize)>, Vec<usize>, Vec<usize>)> {
        let from = self.resolve(&path.from, &[]).await?;
        let to = self.resolve(&path.to, &from).await?;
        let mut pairs = BTreeSet::new();
        for (a, b) in from.iter().flat_map(|a| to.iter().map(move |b| (*a, *b))).filter(|(a, b)| a != b) {
            pairs.insert((a, b));
            if path.both_ways {
                pairs.insert((b, a));
            }
        }
        Ok((pairs.into_iter().collect(), from, to))
    }

    fn name(&self, region: usize) -> &str {
        self.stage.sites.get(region).map(|site| site.name.as_str()).unwrap_or_default()
    }

    fn names(&self, regions: &[usize]) -> String {
        let names: Vec<&str> = regions.iter().map(|r| self.name(*r)).collect();
        names.join(", ")
    }

    /// Opens a span.
    fn open(&self, what: String, regions: Vec<usize>, disables: bool) -> usize {
        tracing::info!("{what}");
        let span =
            FaultSpan { from: self.recorder.now(), to: None, what, regions, disables, isolates: false };
        let mut spans = lock(&self.spans);
        spans.push(span);
        spans.len() - 1
    }

    fn close(&self, span: usize) {
        if let Some(span) = lock(&self.spans).get_mut(span) {
            span.to = Some(self.recorder.now());
            tracing::info!("over: {}", span.what);
        }
    }

    /// Keeps the span that says who has no quorum.
    fn reckon(&self) {
        let isolated: BTreeSet<usize> = self.stage.isolated().into_iter().collect();
        let mut known = lock(&self.isolated);
        if known.0 == isolated {
            return;
        }
        if let Some(span) = known.1.take() {
            self.close(span);
        }
        if !isolated.is_empty() {
            let regions: Vec<usize> = isolated.iter().copied().collect();
            let span = self.open(format!("no quorum: {}", self.names(&regions)), regions, false);
            if let Some(span) = lock(&self.spans).get_mut(span) {
                span.isolates = true;
            }
            known.1 = Some(span);
        }
        known.0 = isolated;
    }
}

fn is_over_at_once(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::Restart { .. }
            | Fault::Flush(_)
            | Fault::RedisSave(_)
            | Fault::RedisDetach(_)
            | Fault::RedisFailover(_)
            | Fault::ClockStep { .. }
            | Fault::Apply { .. }
            | Fault::RegionAdd(_)
            | Fault::RegionRemove(_)
    )
}

/// What messages call a fault.
fn kind(fault: &Fault) -> &'static str {
    match fault {
        Fault::Cut(..) => "cut",
        Fault::Flap { .. } => "flap",
        Fault::Slow(..) => "slow",
        Fault::RedisCut(..) => "redis_cut",
        Fault::RedisSlow(..) => "redis_slow",
        Fault::Kill(_) => "kill",
        Fault::Pause(_) => "pause",
        Fault::RedisPause(_) => "redis_pause",
        Fault::Restart { .. } => "restart",
        Fault::Flush(_) => "flush",
        Fault::RedisKill(..) => "redis_kill",
        Fault::RedisSave(_) => "redis_save",
        Fault::RedisDetach(_) => "redis_detach",
        Fault::RedisFailover(_) => "redis_failover",
        Fault::ClockStep { .. } => "clock_step",
        Fault::DiskFull(_) => "disk_full",
        Fault::Apply { .. } => "apply",
        Fault::RegionAdd(_) => "region_add",
        Fault::RegionRemove(_) => "region_remove",
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
