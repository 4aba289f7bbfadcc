//! What each fault does when it begins and when it ends.

use super::{Begun, Director, lock};
use crate::cluster::promise::Change;
use crate::cluster::scenario::{Back, Clocks, Fault, How, Slow, Who};
use anyhow::{Context as _, bail};
use quorate::config::print;
use quorate::quota::policy::Policy;
use quorate::server::state::State;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// A change of policies has settled within this, unless the scenario ends before.
const SETTLES_WITHIN: Duration = Duration::from_secs(600);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long a region may take to join or leave.
const MEMBER_WITHIN: Duration = Duration::from_secs(60);

impl Director {
    /// Begins a fault; `None`: it was skipped.
    pub(super) async fn begin(&self, fault: &Fault) -> anyhow::Result<Option<Begun>> {
        match fault {
            Fault::Cut(path, how) | Fault::Flap { path, how, .. } => {
                let (pairs, from, to) = self.pairs(path).await?;
                let (one, other) = (self.names(&from), self.names(&to));
                let verb = if matches!(fault, Fault::Flap { .. }) { "flapping line" } else { "cut off" };
                let what = match path.both_ways {
                    true => format!(
                        "{one}: {verb} ({other}){}",
                        if *how == How::Reset { ", with resets" } else { "" }
                    ),
                    false => format!("{one}: {verb} one way (to {other})"),
                };
                let span = self.open(what, from.clone(), false);
                if matches!(fault, Fault::Cut(..)) {
                    self.cut(&pairs, *how, true)?;
                }
                Ok(Some(Begun { span, regions: from, pairs }))
            }
            Fault::Slow(path, slow) => {
                let (pairs, from, to) = self.pairs(path).await?;
                let what =
                    format!("{}: slow lines to {} ({})", self.names(&from), self.names(&to), described(slow));
                let span = self.open(what, from.clone(), false);
                for (a, b) in &pairs {
                    self.stage.ground.slow(*a, *b, Some(*slow))?;
                }
                Ok(Some(Begun { span, regions: from, pairs }))
            }
            Fault::Apply { through, policies } => self.apply(through, policies).await.map(Some),
            Fault::Restart { who, pause } => self.restart(who, *pause).await.map(|()| None),
            Fault::DiskFull(who) => self.fill_disks(who).await,
            Fault::RegionAdd(who) => self.add_regions(who).await.map(Some),
            Fault::RegionRemove(who) => self.remove_regions(who).await.map(Some),
            _ => self.strike(fault).await.map(Some),
        }
    }

    /// Faults of single regions.
    async fn strike(&self, fault: &Fault) -> anyhow::Result<Begun> {
        let (who, what) = match fault {
            Fault::Kill(who) => (who, "daemon killed".to_owned()),
            Fault::Pause(who) => (who, "daemon frozen".to_owned()),
            Fault::RedisPause(who) => (who, "Redis frozen".to_owned()),
            Fault::RedisCut(who, _) => (who, "cut off from its Redis".to_owned()),
            Fault::RedisSlow(who, slow) => (who, format!("slow Redis ({})", described(slow))),
            Fault::Flush(who) => (who, "FLUSHALL".to_owned()),
            Fault::RedisKill(who, back) => {
                (who, format!("Redis killed, comes back {}", back_in_words(*back)))
            }
            Fault::RedisSave(who) => (who, "Redis snapshot saved".to_owned()),
            Fault::RedisDetach(who) => (who, "replica cut off from its master".to_owned()),
            Fault::RedisFailover(who) => (who, "Redis dies, its replica is promoted".to_owned()),
            Fault::ClockStep { who, by_ms, of } => (who, format!("{} {by_ms:+} ms", clock_in_words(*of))),
            other => bail!("{} is no fault of single regions", super::kind(other)),
        };
        let regions = self.resolve(who, &[]).await?;
        let span =
            self.open(format!("{}: {what}", self.names(&regions)), regions.clone(), self.disables(fault));
        futures::future::try_join_all(regions.iter().map(|region| self.strike_one(fault, *region))).await?;
        Ok(Begun { span, regions, pairs: Vec::new() })
    }

    async fn strike_one(&self, fault: &Fault, region: usize) -> anyhow::Result<()> {
        let site = self.stage.site(region)?;
        match fault {
            Fault::Kill(_) => {
                site.daemon.lock().await.kill();
                site.runs.store(false, Ordering::Relaxed);
            }
            Fault::Pause(_) => {
                site.daemon.lock().await.signal(Signal::STOP)?;
                site.runs.store(false, Ordering::Relaxed);
            }
            Fault::RedisPause(_) => site.stores.lock().await.main.signal(Signal::STOP)?,
            Fault::RedisCut(_, How::Blackhole) => site.store_line.cut(),
            Fault::RedisCut(_, How::Reset) => site.store_line.set_refuses(true),
            Fault::RedisSlow(_, slow) => set_slow(&site.store_line, slow),
            Fault::Flush(_) => {
                site.stores.lock().await.main.ask(&["FLUSHALL"]).await?;
            }
            Fault::RedisKill(..) => site.stores.lock().await.main.kill(),
            Fault::RedisSave(_) => site.stores.lock().await.main.save().await?,
            Fault::RedisDetach(_) => site.replication.as_ref().context("there is no replica")?.cut(),
            Fault::RedisFailover(_) => {
                let mut stores = site.stores.lock().await;
                let mut replica = stores.replica.take().context("its replica has been promoted already")?;
                stores.main.kill();
                replica.ask(&["REPLICAOF", "NO", "ONE"]).await?;
                replica.master = None;
                site.store_line.set_target(replica.place.address);
                site.store_line.reset();
                stores.main = replica;
            }
            Fault::ClockStep { by_ms, of, .. } => self.step(region, *by_ms, *of).await?,
            other => bail!("{} is no fault of single regions", super::kind(other)),
        }
        Ok(())
    }

    /// Ends a fault.
    pub(super) async fn end(&self, fault: &Fault, begun: &Begun) -> anyhow::Result<()> {
        match fault {
            Fault::Cut(_, how) => return self.cut(&begun.pairs, *how, false),
            Fault::Slow(..) => {
                for (a, b) in &begun.pairs {
                    self.stage.ground.slow(*a, *b, None)?;
                }
                return Ok(());
            }
            _ => {}
        }
        futures::future::try_join_all(begun.regions.iter().map(|region| self.end_one(fault, *region)))
            .await?;
        Ok(())
    }

    async fn end_one(&self, fault: &Fault, region: usize) -> anyhow::Result<()> {
        let site = self.stage.site(region)?;
        match fault {
            Fault::Kill(_) => self.start(region).await?,
            Fault::Pause(_) => {
                site.daemon.lock().await.signal(Signal::CONT)?;
                site.runs.store(true, Ordering::Relaxed);
            }
            Fault::RedisPause(_) => site.stores.lock().await.main.signal(Signal::CONT)?,
            Fault::RedisCut(_, How::Blackhole) => site.store_line.heal(),
            Fault::RedisCut(_, How::Reset) => site.store_line.set_refuses(false),
            Fault::RedisSlow(..) => {
                let usual = self.store_rtt;
                set_slow(&site.store_line, &usual);
            }
            Fault::RedisKill(_, back) => site.stores.lock().await.main.back(*back).await?,
            Fault::ClockStep { by_ms, of, .. } => self.step(region, -by_ms, *of).await?,
            Fault::DiskFull(_) => {
                site.disk.as_ref().context("it has no disk of its own")?.make_room()?;
                lock(&self.excused).remove(&region);
                if site.daemon.lock().await.process.is_none() {
                    self.start(region).await?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Lets a cut come and go until `end`.
    pub(super) async fn flap(
        &self,
        begun: &Begun,
        how: How,
        (down, up): (Duration, Duration),
        end: Instant,
    ) -> anyhow::Result<()> {
        while Instant::now() < end {
            self.cut(&begun.pairs, how, true)?;
            self.reckon();
            tokio::time::sleep_until(end.min(Instant::now() + down)).await;
            self.cut(&begun.pairs, how, false)?;
            self.reckon();
            tokio::time::sleep_until(end.min(Instant::now() + up)).await;
        }
        Ok(())
    }

    fn cut(&self, pairs: &[(usize, usize)], how: How, begins: bool) -> anyhow::Result<()> {
        pairs.iter().try_for_each(|(from, to)| self.stage.ground.cut(*from, *to, how, begins))
    }

    async fn step(&self, region: usize, by_ms: i64, of: Clocks) -> anyhow::Result<()> {
        const NONE: &str = "it has no clock of its own";
        let site = self.stage.site(region)?;
        if of.daemon() {
            site.daemon.lock().await.clock.as_mut().context(NONE)?.step(by_ms)?;
        }
        if of.redis() {
            site.stores.lock().await.main.clock.as_mut().context(NONE)?.step(by_ms)?;
        }
        Ok(())
    }

    /// Starts a daemon again.
    async fn start(&self, region: usize) -> anyhow::Result<()> {
        let site = self.stage.site(region)?;
        site.daemon.lock().await.up()?;
        site.runs.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// One after the other, each when the one before is ready; a span for each.
    async fn restart(&self, who: &Who, pause: Duration) -> anyhow::Result<()> {
        for region in self.resolve(who, &[]).await? {
            let site = self.stage.site(region)?;
            let span = self.open(format!("{}: daemon restarted", site.name), vec![region], true);
            site.daemon.lock().await.stop().await?;
            site.runs.store(false, Ordering::Relaxed);
            self.start(region).await?;
            self.stage.ready(region).await?;
            self.close(span);
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    async fn fill_disks(&self, who: &Who) -> anyhow::Result<Option<Begun>> {
        let regions = self.resolve(who, &[]).await?;
        let has_disk = |region: &usize| self.stage.sites.get(*region).is_some_and(|site| site.disk.is_some());
        let regions: Vec<usize> = regions.into_iter().filter(has_disk).collect();
        if regions.is_empty() {
            return Ok(None);
        }
        // A daemon that cannot write its log may end, as it would under a supervisor; it is started again at the end.
        lock(&self.excused).extend(&regions);
        let span = self.open(format!("{}: disk full", self.names(&regions)), regions.clone(), true);
        for region in &regions {
            self.stage.site(*region)?.disk.as_ref().context("it has no disk of its own")?.fill()?;
        }
        Ok(Some(Begun { span, regions, pairs: Vec::new() }))
    }

    /// Puts policies in force, and goes on watching until they have settled.
    async fn apply(&self, through: &Who, policies: &[Policy]) -> anyhow::Result<Begun> {
        let regions = self.resolve(through, &[]).await?;
        let region = *regions.first().context("nobody to put policies to")?;
        *lock(&self.policies) = policies.to_vec();
        let change = self.change(self.stage.members());
        let span = self.open(format!("policies changed through {}", self.name(region)), Vec::new(), false);
        let version = self.stage.admin.apply(region, &print::policies(policies)).await?.version;
        self.settle(change, version).await;
        Ok(Begun { span, regions: Vec::new(), pairs: Vec::new() })
    }

    async fn add_regions(&self, who: &Who) -> anyhow::Result<Begun> {
        let regions = self.resolve(who, &[]).await?;
        let span = self.open(format!("{} joins", self.names(&regions)), regions.clone(), true);
        for region in &regions {
            let leader = self.leader().await?;
            let mut members = self.stage.members();
            members.insert(*region);
            let change = self.change(members);
            // All others reach it over the leader's line: members know one address of each other.
            let url = self.stage.ground.peer_url(leader, *region);
            self.stage.start_site(*region).await?;
            self.quorate(&["region", "add", self.name(*region), "--url", &url], leader).await?;
            self.stage.set_member(*region, true);
            self.stage.ready(*region).await?;
            self.settle(change, self.version().await).await;
        }
        Ok(Begun { span, regions, pairs: Vec::new() })
    }

    async fn remove_regions(&self, who: &Who) -> anyhow::Result<Begun> {
        let regions = self.resolve(who, &[]).await?;
        let span = self.open(format!("{} leaves", self.names(&regions)), regions.clone(), true);
        for region in &regions {
            let mut members = self.stage.members();
            members.remove(region);
            let through = *members.first().context("the last region cannot leave")?;
            let change = self.change(members);
            self.quorate(&["region", "remove", self.name(*region)], through).await?;
            self.stage.set_member(*region, false);
            self.settle(change, self.version().await).await;
            // It is of no use any more, and says so.
            self.stage.site(*region)?.daemon.lock().await.stop().await?;
        }
        Ok(Begun { span, regions, pairs: Vec::new() })
    }

    /// Notes that what is promised changes from now on.
    fn change(&self, members: BTreeSet<usize>) -> usize {
        let members = members.iter().map(|member| self.name(*member).into()).collect();
        let policies = lock(&self.policies).clone();
        let mut changes = lock(&self.changes);
        changes.push(Change { sent: self.recorder.now(), settled: None, policies, members });
        changes.len() - 1
    }

    /// Waits until this version of the policies has settled.
    async fn settle(&self, change: usize, version: u64) {
        let end = Instant::now() + SETTLES_WITHIN;
        while Instant::now() < end {
            let states = self.stage.admin.states().await;
            // Any replica will do: that all have acknowledged is itself in the log.
            let settled = |s: &State| s.policies_version >= version && s.policies_settled;
            if states.iter().flatten().any(settled) {
                if let Some(change) = lock(&self.changes).get_mut(change) {
                    change.settled = Some(self.recorder.now());
                }
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// The newest version of the policies that any region knows.
    async fn version(&self) -> u64 {
        self.stage.admin.states().await.iter().flatten().map(|s| s.policies_version).max().unwrap_or(0)
    }

    /// Runs a `quorate` command against a region's admin listener.
    async fn quorate(&self, args: &[&str], region: usize) -> anyhow::Result<()> {
        let binary = self.stage.site(region)?.daemon.lock().await.settings.binary.clone();
        let mut command = tokio::process::Command::new(binary);
        if let Some(token) = self.stage.ground.token_file() {
            command.env("QUORATE_TOKEN_FILE", token);
        }
        command.args(args).args(["--admin", self.stage.admin.url(region)]).stdin(std::process::Stdio::null());
        let output = tokio::time::timeout(MEMBER_WITHIN, command.kill_on_drop(true).output()).await;
        let output =
            output.with_context(|| format!("quorate {args:?} does not end within {MEMBER_WITHIN:?}"))??;
        if !output.status.success() {
            bail!("quorate {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// May requests of the regions that it touches fail for its sake?
    fn disables(&self, fault: &Fault) -> bool {
        match fault {
            Fault::RedisSave(_) | Fault::RedisDetach(_) => false,
            // A daemon's wall clock is in no decision.
            Fault::ClockStep { of, .. } => of.redis(),
            Fault::RedisSlow(_, slow) => {
                let slowest = slow.rtt.unwrap_or_default() + 2 * slow.jitter.unwrap_or_default();
                slow.bandwidth.is_some() || slowest * 2 >= self.store_timeout
            }
            _ => true,
        }
    }
}

fn set_slow(line: &quorate::wan::Link, slow: &Slow) {
    use quorate::wan::Direction;
    for way in [Direction::ToTarget, Direction::FromTarget] {
        line.set_delay_one_way(way, slow.rtt.unwrap_or_default() / 2);
        line.set_jitter_one_way(way, slow.jitter.unwrap_or_default());
        line.set_bandwidth_one_way(way, slow.bandwidth);
    }
}

fn described(slow: &Slow) -> String {
    let rtt = slow.rtt.map(|rtt| format!("round trip {rtt:?}"));
    let jitter = slow.jitter.map(|jitter| format!("jitter {jitter:?}"));
    let bandwidth = slow.bandwidth.map(|bytes| format!("{bytes} bytes/s"));
    [rtt, jitter, bandwidth].into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn back_in_words(back: Back) -> &'static str {
    match back {
        Back::Empty => "empty",
        Back::Kept => "with what it kept",
        Back::Saved => "with an old snapshot",
    }
}

fn clock_in_words(of: Clocks) -> &'static str {
    match of {
        Clocks::Daemon => "the daemon's wall clock steps",
        Clocks::Redis => "the wall clock of Redis steps",
        Clocks::Both => "wall clocks step",
    }
}
