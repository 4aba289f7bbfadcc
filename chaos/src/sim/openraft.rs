//! The product's own Raft ([`quorate::raft::sim`]) on the machines and lines of this simulation, and what must be true of it
//! whatever happens to them.
//!
//! - R1: what one node has applied at an index, every node that gets there has applied; and their pools are equal;
//! - R2: within a term the Raft clock never runs ahead of true time;
//! - R3: what a proposer was told is so: what is done was applied, what was not sent never is (see [`Claims`]).

mod claims;
#[cfg(test)]
mod tests;

pub use claims::Ends;

use super::chance::Chance;
use super::machine::{Machine, TrueTime, pass};
use super::net::Net;
use claims::Claims;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use quorate::quota::amount::Micros;
use quorate::quota::policy::{Policy, RegionName};
use quorate::quota::pool::{Entry, LEVEL, Op, Pool, Stamp};
use quorate::raft::sim::{Disk, Home, Network, Place, Wires, digest};
use quorate::raft::{LogLimits, Raft, RaftConfig, RaftStatus, Role};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::Instant;

/// Hears of every entry for the pool from the founding on, once, when it is applied for the first time, in the order of the log: the term, the entry,
/// and the true time at which it was stamped.
pub type OnCommit = Box<dyn Fn(u64, &Entry, Micros) + Send + Sync>;

/// How a run's nodes behave.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// The longest round trip that they are configured for.
    pub rtt_max: Micros,
    /// The longest that a disk takes.
    pub disk: Micros,
    /// When the log is cut.
    pub log: LogLimits,
    /// Every region proposes something that does nothing so often, at the least.
    pub propose_every: Micros,
}

/// What happened in a run; one in which nothing did proves nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The last index that was applied anywhere.
    pub last: u64,
    /// Terms in which something was stamped.
    pub terms: u64,
    /// Entries applied, on all nodes.
    pub applied: u64,
    /// Snapshots installed.
    pub restored: u64,
    /// Writes lost in crashes.
    pub lost: u64,
    /// How proposals ended.
    pub ends: Ends,
}

/// All regions' nodes.
pub struct Openrafts {
    chance: Chance,
    habits: Habits,
    policies: Vec<Policy>,
    names: Vec<RegionName>,
    wires: Arc<Wires>,
    seen: Arc<Seen>,
    dirs: TempDir,
    nodes: Vec<Node>,
}

struct Node {
    machine: Arc<Machine>,
    disk: Disk,
    home: Arc<dyn Home>,
    raft: Mutex<Option<Raft>>,
}

impl std::fmt::Debug for Openrafts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Openrafts").field("names", &self.names).finish_non_exhaustive()
    }
}

impl Openrafts {
    /// One for each machine, in a cluster that is still to be founded with these policies.
    ///
    /// # Errors
    /// If there is no room for their directories.
    pub fn new(
        (time, chance): (TrueTime, Chance),
        net: Arc<Net>,
        machines: Vec<Arc<Machine>>,
        habits: Habits,
        policies: Vec<Policy>,
        on_commit: OnCommit,
    ) -> anyhow::Result<Arc<Self>> {
        let names: Vec<RegionName> = (0..machines.len()).map(|i| RegionName::from(format!("r{i}"))).collect();
        let numbers = names.iter().cloned().zip(0..).collect();
        let seen = Arc::new(Seen { time, state: Mutex::default(), on_commit });
        let nodes = machines.into_iter().map(|machine| {
            let home = OnIt {
                machine: Arc::clone(&machine),
                chance: chance.clone(),
                disk: habits.disk,
                seen: Arc::clone(&seen),
            };
            Node { machine, disk: Disk::default(), home: Arc::new(home), raft: Mutex::default() }
        });
        Ok(Arc::new(Self {
            nodes: nodes.collect(),
            wires: Wires::new(Arc::new(Lines { net, numbers })),
            chance,
            habits,
            policies,
            names,
            seen,
            dirs: directory()?,
        }))
    }

    /// Starts the daemon's node of a region, from what is on its disk. `None`: it crashed meanwhile. (Then this may never
    /// end, too: what runs on a machine that has crashed does nothing more.)
    ///
    /// # Errors
    /// If the node refuses to start.
    pub async fn start(self: &Arc<Self>, region: usize) -> anyhow::Result<Option<Raft>> {
        let node = &self.nodes[region];
        let life = node.machine.life();
        let place =
            Place { home: Arc::clone(&node.home), disk: node.disk.clone(), wires: Arc::clone(&self.wires) };
        let config = RaftConfig {
            region: self.names[region].clone(),
            cluster: "sim".into(),
            regions: self.names.iter().map(|name| (name.clone(), format!("http://{name}.sim"))).collect(),
            data_dir: self.dirs.path().join(&*self.names[region]),
            seat: None,
            tls: None,
            rtt_max: self.habits.rtt_max.to_duration(),
            redaction: None,
            witnesses: Vec::new(),
            level: LEVEL,
        };
        let started = Raft::start_simulated(config, self.policies.clone(), self.habits.log, place).await;
        if node.machine.life() != life {
            return Ok(None);
        }
        let raft = started?;
        *lock(&node.raft) = Some(raft.clone());
        tokio::spawn(node.machine.run(self.clone().propose(raft.clone())));
        Ok(Some(raft))
    }

    /// Proposes for as long as the daemon lives, and looks whether what comes of it is true.
    async fn propose(self: Arc<Self>, raft: Raft) {
        loop {
            pass(self.chance.time(Micros::millis(5), self.habits.propose_every)).await;
            let within = self.chance.time(Micros::millis(50), Micros::seconds(4)).to_duration();
            let (nonce, op) = self.seen.state().claims.next();
            let outcome = raft.propose(vec![op], Instant::now() + within).await;
            let mut state = self.seen.state();
            let told = state.claims.told(nonce, outcome.map(drop));
            state.must(told);
        }
    }

    /// The region's daemon is gone (after [`Machine::crash`]). With `power` its machine has lost power too: what was not synced
    /// may or may not be on its disk.
    pub fn crash(&self, region: usize, power: bool) {
        let node = &self.nodes[region];
        self.wires.unplug(&self.names[region]);
        let lost = node.disk.crash(|unsynced| if power { self.chance.index(unsynced + 1) } else { unsynced });
        self.seen.state().lost += lost as u64;
        *lock(&node.raft) = None;
    }

    /// The region's node, if it runs.
    #[must_use]
    pub fn raft(&self, region: usize) -> Option<Raft> {
        lock(&self.nodes[region].raft).clone()
    }

    /// Their states, of those that run.
    #[must_use]
    pub fn statuses(&self) -> Vec<(usize, RaftStatus)> {
        (0..self.nodes.len()).filter_map(|i| Some((i, self.raft(i)?.status()))).collect()
    }

    /// Whoever leads hands over to this region, if it can.
    pub fn hand_over_to(&self, region: usize) {
        let Some(leader) = self.leader().filter(|leader| *leader != region) else { return };
        let (Some(raft), to) = (self.raft(leader), self.names[region].clone()) else { return };
        let handed = async move {
            // Whatever becomes of it.
            let _ = raft.transfer_leader(&to).await;
        };
        tokio::spawn(self.nodes[leader].machine.run(handed));
    }

    /// Does a machine lose power with the crash of its daemon?
    #[must_use]
    pub fn power_fails(&self) -> bool {
        self.chance.percent(50)
    }

    /// Something is wrong with a node.
    pub fn note(&self, what: String) {
        self.seen.state().break_promise(what);
    }

    /// Whoever leads in the newest term.
    #[must_use]
    pub fn leader(&self) -> Option<usize> {
        let leads = |(_, status): &(usize, RaftStatus)| status.role == Role::Leader;
        self.statuses().into_iter().filter(leads).max_by_key(|(_, s)| s.term).map(|(i, _)| i)
    }

    /// The first of the promises that was broken, or why a node has stopped by itself.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        let stopped = || {
            let stopped =
                |(i, status): (usize, RaftStatus)| Some(format!("r{i} has stopped: {}", status.fault?));
            self.statuses().into_iter().find_map(stopped)
        };
        self.seen.state().fault.clone().or_else(stopped)
    }

    /// How the nodes are, in words.
    #[must_use]
    pub fn describe(&self) -> String {
        let describe = |(i, s): (usize, RaftStatus)| {
            let (role, term, last) = (s.role, s.term, s.last_log.unwrap_or(0));
            let (committed, applied) = (s.committed.unwrap_or(0), s.applied.unwrap_or(0));
            format!("r{i} {role:?} in term {term}, log {last}, committed {committed}, applied {applied}")
        };
        self.statuses().into_iter().map(describe).collect::<Vec<_>>().join("; ")
    }

    /// What has happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let state = self.seen.state();
        Counts {
            last: state.log.last_key_value().map_or(0, |(index, _)| *index),
            terms: state.terms.len() as u64,
            applied: state.applied,
            restored: state.restored,
            lost: state.lost,
            ends: state.claims.ends(),
        }
    }
}

/// Snapshots and identities of nodes are small files; where memory looks like a disk, syncing them costs nothing.
fn directory() -> std::io::Result<TempDir> {
    let memory = Path::new("/dev/shm");
    let named = tempfile::Builder::new().prefix("quorate-sim-").to_owned();
    if memory.is_dir() { named.tempdir_in(memory).or_else(|_| named.tempdir()) } else { named.tempdir() }
}

/// A machine, as the product's nodes see it.
struct OnIt {
    machine: Arc<Machine>,
    chance: Chance,
    disk: Micros,
    seen: Arc<Seen>,
}

impl Home for OnIt {
    fn run(&self, task: BoxFuture<'static, ()>) -> BoxFuture<'static, ()> {
        self.machine.run(task).map(drop).boxed()
    }

    fn random(&self) -> u64 {
        self.chance.int(0, i64::MAX - 1).unsigned_abs()
    }

    fn sync_takes(&self) -> Duration {
        self.chance.time(Micros::ZERO, self.disk).to_duration()
    }

    fn stamped(&self, stamp: Stamp) {
        self.seen.stamped(stamp);
    }

    fn applied(&self, index: u64, term: u64, entry: Option<&Entry>, pool: &Pool) {
        self.seen.applied(index, term, entry, pool);
    }

    fn restored(&self, index: u64, pool: &Pool) {
        self.seen.restored(index, pool);
    }
}

/// The lines, as the product's nodes see them.
struct Lines {
    net: Arc<Net>,
    numbers: BTreeMap<RegionName, usize>,
}

impl Network for Lines {
    fn fate(&self, from: &RegionName, to: &RegionName) -> [Option<Duration>; 2] {
        let number = |region| self.numbers.get(region).copied();
        let Some((from, to)) = number(from).zip(number(to)) else { return [None, None] };
        self.net.fate(from, to).map(|time| time.map(Micros::to_duration))
    }
}

/// Everything that nodes have applied.
struct Seen {
    time: TrueTime,
    state: Mutex<State>,
    on_commit: OnCommit,
}

#[derive(Debug, Default)]
struct State {
    log: BTreeMap<u64, Known>,
    claims: Claims,
    /// When each entry was stamped, in true time.
    stamps: BTreeMap<(u64, Micros), Micros>,
    /// The first stamp of a term.
    terms: BTreeMap<u64, (Micros, Micros)>,
    applied: u64,
    restored: u64,
    lost: u64,
    founded: bool,
    fault: Option<String>,
}

/// What was applied first at an index.
#[derive(Debug)]
struct Known {
    term: u64,
    entry: Option<Entry>,
    pool: u32,
}

impl Seen {
    fn stamped(&self, stamp: Stamp) {
        let now = self.time.now();
        let mut state = self.state();
        let (since, tau) = *state.terms.entry(stamp.term).or_insert((now, stamp.tau));
        // Clocks and times are whole microseconds.
        if stamp.tau - tau > now - since + Micros(2) {
            let (ran, passed) = (stamp.tau - tau, now - since);
            state.break_promise(format!(
                "R2: the Raft clock ran {ran:?} in {passed:?} of term {}",
                stamp.term
            ));
        }
        state.stamps.insert((stamp.term, stamp.tau), now);
    }

    fn applied(&self, index: u64, term: u64, entry: Option<&Entry>, pool: &Pool) {
        let pool = digest(pool);
        let mut state = self.state();
        state.applied += 1;
        if let Some(known) = state.log.get(&index) {
            if known.term != term || known.entry.as_ref() != entry {
                let what =
                    format!("R1: two entries at index {index}: {known:?}, and {entry:?} of term {term}");
                state.break_promise(what);
            } else if known.pool != pool {
                state.break_promise(format!("R1: two pools after index {index}"));
            }
            return;
        }
        if state.log.last_key_value().is_some_and(|(last, _)| last + 1 != index) {
            state.break_promise(format!("R1: entry {index} was applied before the one before it"));
        }
        state.log.insert(index, Known { term, entry: entry.cloned(), pool });
        let told = entry.map_or(Ok(()), |entry| state.claims.applied(term, entry));
        state.must(told);
        let stamped =
            entry.and_then(|e| state.stamps.get(&(e.stamp.term, e.stamp.tau)).copied()).unwrap_or_default();
        let Some(mut entry) = entry.cloned() else { return };
        if !state.founded {
            // What comes before has no effect.
            let founding = entry.ops.iter().position(|op| matches!(op, Op::Found { .. }));
            let Some(founding) = founding.filter(|_| entry.stamp.term == term) else { return };
            entry.ops.drain(..founding);
            state.founded = true;
        }
        drop(state);
        (self.on_commit)(term, &entry, stamped);
    }

    fn restored(&self, index: u64, pool: &Pool) {
        let pool = digest(pool);
        let mut state = self.state();
        state.restored += 1;
        if state.log.get(&index).is_none_or(|known| known.pool != pool) {
            state.break_promise(format!("R1: a snapshot at index {index} holds another pool"));
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn break_promise(&mut self, what: String) {
        self.fault.get_or_insert(what);
    }

    fn must(&mut self, hold: Result<(), String>) {
        if let Err(what) = hold {
            self.break_promise(what);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
