//! The cluster as it runs: processes, lines, disks.

use super::admin::Admin;
use super::clock::{ClockLibrary, WrongClock};
use super::daemon::{self, Daemon};
use super::disk::SmallDisk;
use super::ground::{Addresses, Ground};
use super::redis::Redis;
use super::run::{Folder, Options};
use super::scenario::{Fault, Scenario, Topology};
use crate::workload::Target;
use anyhow::{Context as _, bail};
use quorate::config::print;
use quorate::wan::Link;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// A region must be ready within this after a start. (A first election across a WAN takes seconds.)
const READY_WITHIN: Duration = Duration::from_secs(45);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// What daemons take for the longest round trip where lines are faster.
const RTT_MAX: Duration = Duration::from_millis(250);

/// A running cluster. Everything in it ends when it is dropped.
#[derive(Debug)]
pub struct Stage {
    /// Its regions, by number; those that join later do not run at first.
    pub sites: Vec<Site>,
    /// What is between them.
    pub ground: Ground,
    /// Their admin listeners.
    pub admin: Admin,
    /// Remarks for the report: what could not be done here, and why.
    pub notes: std::sync::Mutex<Vec<String>>,
    /// Who is a member now.
    members: std::sync::Mutex<BTreeSet<usize>>,
    /// Where its files are: it goes after everything else.
    _folder: Arc<Folder>,
}

/// One region.
#[derive(Debug)]
pub struct Site {
    /// Its name.
    pub name: String,
    /// Where everything is.
    pub addresses: Addresses,
    /// Its daemon.
    pub daemon: Mutex<Daemon>,
    /// Its stores.
    pub stores: Mutex<Stores>,
    /// From the daemon to the store.
    pub store_line: Link,
    /// From the replica to the store.
    pub replication: Option<Link>,
    /// Under its `data_dir`.
    pub disk: Option<SmallDisk>,
    /// Is the daemon there, and does it run? (As far as this program does something about it.)
    pub runs: AtomicBool,
}

/// A region's Redis, and the replica that may take its place.
#[derive(Debug)]
pub struct Stores {
    /// The one that the daemon's line leads to.
    pub main: Redis,
    /// The one that follows it.
    pub replica: Option<Redis>,
}

impl Stage {
    /// Starts the founders of a scenario's cluster in a folder, and waits until all are ready and agree on a leader.
    ///
    /// # Errors
    /// They do not.
    pub async fn start(scenario: &Scenario, options: &Options, kept: &Arc<Folder>) -> anyhow::Result<Self> {
        let folder = kept.path();
        let topology = &scenario.topology;
        let ground = Ground::new(topology, options.namespaces, folder).await?;
        let needs = Needs::of(scenario);
        let library = if needs.clocks { Some(ClockLibrary::compile(folder)?) } else { None };
        let addresses =
            (0..topology.regions.len()).map(|i| ground.addresses(i)).collect::<anyhow::Result<Vec<_>>>()?;
        let mut build =
            Build { scenario, options, folder, ground: &ground, library, needs, notes: Vec::new() };
        let mut sites = Vec::new();
        for (number, addresses) in addresses.iter().enumerate() {
            sites.push(build.site(number, addresses).await?);
        }
        let urls = addresses.iter().map(|a| format!("http://{}", a.admin)).collect();
        let admin = Admin::new(urls, ground.more(0).1)?;
        let notes = std::sync::Mutex::new(build.notes);
        let members = std::sync::Mutex::new((0..topology.founders).collect());
        let stage = Self { sites, ground, admin, notes, members, _folder: Arc::clone(kept) };
        for number in 0..topology.founders {
            stage.start_site(number).await?;
        }
        for number in 0..topology.founders {
            stage.ready(number).await?;
        }
        stage.agreed_leader().await?;
        Ok(stage)
    }

    /// Starts a region's stores and its daemon, without waiting for the daemon.
    ///
    /// # Errors
    /// They do not start.
    pub async fn start_site(&self, number: usize) -> anyhow::Result<()> {
        let site = self.site(number)?;
        let mut stores = site.stores.lock().await;
        stores.main.up().await?;
        if let Some(replica) = &mut stores.replica {
            replica.up().await?;
        }
        site.daemon.lock().await.up()?;
        site.runs.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Waits until a region is ready.
    ///
    /// # Errors
    /// It is not in time, or its daemon has ended.
    pub async fn ready(&self, number: usize) -> anyhow::Result<()> {
        let site = self.site(number)?;
        let end = Instant::now() + READY_WITHIN;
        loop {
            let why = match self.admin.ready(number).await {
                Ok(()) => return Ok(()),
                Err(why) => why,
            };
            if let Some(status) = site.daemon.lock().await.has_ended() {
                let log = site.daemon.lock().await.settings.folder.display().to_string();
                bail!("{}: `quorate serve` ended with {status}; its log is in {log}", site.name);
            }
            if Instant::now() >= end {
                return Err(why.context(format!("{} is not ready within {READY_WITHIN:?}", site.name)));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until all members name the same leader.
    ///
    /// # Errors
    /// They do not in time.
    pub async fn agreed_leader(&self) -> anyhow::Result<usize> {
        let end = Instant::now() + READY_WITHIN;
        loop {
            let states = self.admin.states().await;
            let members = self.members();
            let named = members.iter().map(|m| states.get(*m)?.as_ref().ok()?.raft.leader.clone());
            let named: Option<Vec<String>> = named.collect();
            if let Some([first, rest @ ..]) = named.as_deref()
                && rest.iter().all(|name| name == first)
                && let Some(leader) = self.sites.iter().position(|site| site.name == *first)
            {
                return Ok(leader);
            }
            if Instant::now() >= end {
                bail!("the regions do not agree on a leader within {READY_WITHIN:?}: they name {named:?}");
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// One of [`Self::sites`].
    ///
    /// # Errors
    /// There is none of this number.
    pub fn site(&self, number: usize) -> anyhow::Result<&Site> {
        self.sites.get(number).with_context(|| format!("there is no region number {number}"))
    }

    /// Who is a member now, by number.
    #[must_use]
    pub fn members(&self) -> BTreeSet<usize> {
        self.members.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// A region has become a member, or is none any more.
    pub fn set_member(&self, number: usize, is: bool) {
        let mut members = self.members.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if is {
            members.insert(number)
        } else {
            members.remove(&number)
        };
    }

    /// Adds a remark for the report.
    pub fn note(&self, note: impl Into<String>) {
        self.notes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(note.into());
    }

    /// Members whose daemon runs and that have no majority within reach, themselves counted.
    #[must_use]
    pub fn isolated(&self) -> Vec<usize> {
        let members = self.members();
        let runs = |m: &usize| self.sites.get(*m).is_some_and(|site| site.runs.load(Ordering::Relaxed));
        let both_ways = |a: usize, b: usize| a == b || self.ground.is_open(a, b) && self.ground.is_open(b, a);
        let reach = |m: usize| members.iter().filter(|o| runs(o) && both_ways(m, **o)).count();
        members.iter().copied().filter(|m| runs(m) && reach(*m) * 2 <= members.len()).collect()
    }

    /// Where callers ask, by region.
    #[must_use]
    pub fn targets(&self) -> Vec<Target> {
        let target = |site: &Site| Target {
            http: format!("http://{}", site.addresses.http.address),
            grpc: Some(format!("http://{}", site.addresses.grpc)),
        };
        self.sites.iter().map(target).collect()
    }
}

/// What the faults of a scenario need to be prepared.
#[derive(Clone, Copy, Debug)]
struct Needs {
    clocks: bool,
    disks: bool,
}

impl Needs {
    fn of(scenario: &Scenario) -> Self {
        let any = |is: fn(&Fault) -> bool| scenario.timeline.iter().any(|event| is(&event.fault));
        Self {
            clocks: any(|f| matches!(f, Fault::ClockStep { .. })),
            disks: any(|f| matches!(f, Fault::DiskFull(_))),
        }
    }
}

struct Build<'b> {
    scenario: &'b Scenario,
    options: &'b Options,
    folder: &'b Path,
    ground: &'b Ground,
    library: Option<ClockLibrary>,
    needs: Needs,
    notes: Vec<String>,
}

impl Build<'_> {
    async fn site(&mut self, number: usize, addresses: &Addresses) -> anyhow::Result<Site> {
        let topology = &self.scenario.topology;
        let name = topology.regions.get(number).context("a region has no name")?.to_string();
        let folder = self.folder.join(&name);
        std::fs::create_dir_all(&folder)?;
        let plan = topology.redis;
        let store_line = self.ground.line(addresses.redis.address, plan.rtt).await?;
        let replication = match plan.replica {
            true => Some(self.ground.line(addresses.redis.address, Duration::ZERO).await?),
            false => None,
        };
        let disk = if self.needs.disks { self.disk(&name, folder.join("disk")) } else { None };
        let data_dir = disk.as_ref().map_or(folder.join("data"), |disk| disk.path().join("data"));
        let settings = self.settings(number, addresses, store_line.addr(), folder.clone(), data_dir)?;
        let daemon = Daemon::new(settings, self.clock(&folder, "quorate")?)?;
        let redis = |name: &str, place, master: Option<&Link>, clock| Redis {
            name: name.to_owned(),
            place,
            folder: folder.join(name),
            persistence: plan.persistence,
            clock,
            master: master.map(Link::addr),
            process: None,
        };
        let main = redis("redis", addresses.redis.clone(), None, self.clock(&folder, "redis")?);
        let replica = match &replication {
            None => None,
            Some(link) => {
                Some(redis("replica", addresses.replica.clone(), Some(link), self.clock(&folder, "replica")?))
            }
        };
        Ok(Site {
            name,
            addresses: addresses.clone(),
            daemon: Mutex::new(daemon),
            stores: Mutex::new(Stores { main, replica }),
            store_line,
            replication,
            disk,
            runs: AtomicBool::new(false),
        })
    }

    fn settings(
        &self,
        number: usize,
        addresses: &Addresses,
        redis: SocketAddr,
        folder: PathBuf,
        data_dir: PathBuf,
    ) -> anyhow::Result<daemon::Settings> {
        let topology = &self.scenario.topology;
        let region = topology.regions.get(number).context("a region has no name")?.to_string();
        let known = |other: &usize| *other < topology.founders || *other == number;
        let named = topology.regions.iter().enumerate().filter(|(other, _)| known(other));
        let url = |other: usize| match other == number {
            true => self.ground.own_url(addresses.peer),
            false => self.ground.peer_url(number, other),
        };
        Ok(daemon::Settings {
            binary: self.options.binary.clone(),
            plant: self.options.plant,
            folder,
            data_dir,
            regions: named.map(|(other, name)| (name.to_string(), url(other))).collect(),
            region,
            http: addresses.http.clone(),
            grpc: addresses.grpc,
            peer: addresses.peer,
            admin: addresses.admin,
            redis,
            redis_timeout: topology.redis.timeout,
            rtt_max: rtt_max(topology),
            policies: print::policies(&self.scenario.policies),
            more: self.ground.more(number).0,
        })
    }

    /// `None`, with a remark, where there cannot be one.
    fn disk(&mut self, region: &str, path: PathBuf) -> Option<SmallDisk> {
        match SmallDisk::mount(path) {
            Ok(disk) => Some(disk),
            Err(why) => {
                self.notes.push(format!("skipped: the disk of {region} is not filled: {why:#}"));
                None
            }
        }
    }

    fn clock(&self, folder: &Path, of: &str) -> anyhow::Result<Option<WrongClock>> {
        let Some(library) = &self.library else { return Ok(None) };
        WrongClock::new(library, folder.join(format!("{of}.clock"))).map(Some)
    }
}

/// What daemons are told about the longest round trip. (Slow lines in the timeline are a fault: they are not told of those.)
fn rtt_max(topology: &Topology) -> Duration {
    let longest = topology.rtt.iter().flatten().max().copied().unwrap_or_default();
    RTT_MAX.max(longest + 2 * topology.jitter)
}
