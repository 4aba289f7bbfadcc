//! A small Raft (Ongaro and Ousterhout, 2014: sections 5 and 6, members changed one at a time) whose every step is the
//! simulation's, so that a seed repeats. It orders entries for the product's own [`Replica`]s; gathering and stamping follow
//! `quorate`'s leader.
//!
//! What a crash loses: the tail of the log that was not yet on disk, and everything in memory.

mod log;
mod node;

pub use log::SimLog;

use super::FAULTS;
use super::chance::Chance;
use super::machine::{Machine, TrueTime, pass};
use super::net::{LATE, Net};
use node::{Message, Node, Reply};
use quorate::clock;
use quorate::quota::amount::Micros;
use quorate::quota::pool::{Applied, Entry, Op, Pool, RaftClock, Stamp};
use quorate::raft::{ProposeError, Replica};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// What a proposal comes to.
pub type Outcome = Result<Applied, ProposeError>;

/// One entry of the log.
#[derive(Clone, Debug)]
pub struct Item {
    /// The term that wrote it.
    pub term: u64,
    /// What it says.
    pub payload: Payload,
}

/// What an entry says.
#[derive(Clone, Debug)]
pub enum Payload {
    /// A new leader begins.
    Blank,
    /// Something for the pool, and the true time at which it was stamped.
    Pool(Arc<Entry>, Micros),
    /// Who votes from now on.
    Voters(Arc<Vec<usize>>),
}

/// Hears of every entry once, when it is committed for the first time, in the order of the log.
pub type OnCommit = Box<dyn Fn(u64, &Item) + Send + Sync>;

/// How a run's Raft behaves.
#[derive(Clone, Copy, Debug)]
pub struct Habits {
    /// The longest that a leader gathers company for an entry.
    pub company: Micros,
    /// Of a hundred entries so many are handed over long after they were stamped: maybe in another term.
    pub slow_hand_over: i64,
    /// The longest that a disk takes.
    pub disk: Micros,
    /// Entries in the log before it is compacted.
    pub log_max: usize,
    /// Of a hundred asks so many arrive once more, long after.
    pub echoes: i64,
    /// Of a hundred entries of a node that has led before, so many are stamped by the clock of an earlier leadership of its: by code
    /// that has not noticed the new term.
    pub unaware: i64,
}

/// The most messages that are under way; a healthy run has some hundreds.
const UNDER_WAY_MAX: usize = 50_000;

/// All regions' Rafts.
pub struct Rafts {
    time: TrueTime,
    chance: Chance,
    net: Arc<Net>,
    machines: Vec<Arc<Machine>>,
    habits: Habits,
    /// Where everyone starts: the pool and the first voters.
    genesis: (Pool, usize),
    nodes: Vec<Mutex<Node>>,
    /// Proposals of regions to leaders elsewhere, by number.
    calls: Mutex<(u64, BTreeMap<u64, oneshot::Sender<Outcome>>)>,
    committed: Mutex<Committed>,
    on_commit: OnCommit,
}

/// What was committed first at each index: nobody may ever commit anything else there.
#[derive(Debug, Default)]
struct Committed {
    terms: Vec<u64>,
    /// `None`: the first voters.
    voters: Option<Arc<Vec<usize>>>,
    fault: Option<String>,
}

impl std::fmt::Debug for Rafts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rafts").field("nodes", &self.nodes.len()).finish_non_exhaustive()
    }
}

impl Rafts {
    /// One for each machine; the first `voters` of them vote. `pool` is where all of them start.
    #[must_use]
    pub fn new(
        time: TrueTime,
        chance: Chance,
        net: Arc<Net>,
        machines: Vec<Arc<Machine>>,
        habits: Habits,
        genesis: (Pool, usize),
        on_commit: OnCommit,
    ) -> Arc<Self> {
        let nodes = (0..machines.len()).map(|_| Mutex::new(Node::new(genesis.clone()))).collect();
        let (calls, committed) = (Mutex::default(), Mutex::default());
        Arc::new(Self { time, chance, net, machines, habits, genesis, nodes, calls, committed, on_commit })
    }

    /// The daemon of a region starts (again): from what is on its disk.
    pub fn start(self: &Arc<Self>, region: usize) {
        let stand_at = self.patience();
        self.machines[region].with_clocks(|| self.node(region).start(stand_at));
        let rafts = Arc::clone(self);
        tokio::spawn(self.machines[region].run(async move {
            loop {
                pass(rafts.chance.time(Micros::millis(40), Micros::millis(120))).await;
                rafts.tick(region);
            }
        }));
    }

    /// It is gone (after [`Machine::crash`]).
    pub fn crash(&self, region: usize) {
        self.node(region).crash();
    }

    /// This region's way to the log, for the present life of its daemon; `node` is the id that the pool knows it by.
    #[must_use]
    pub fn log(self: &Arc<Self>, region: usize, node: u64) -> SimLog {
        SimLog::new(Arc::clone(self), region, node)
    }

    /// The region's disk is gone. It must not be among the voters.
    pub fn lose_disk(&self, region: usize) {
        self.node(region).lose_disk(self.genesis.clone());
        // To others it is a node that has never been.
        (0..self.nodes.len()).for_each(|other| self.node(other).forget_peer(region));
    }

    /// The region's copy of the pool.
    #[must_use]
    pub fn replica(&self, region: usize) -> Arc<Replica> {
        Arc::clone(&self.node(region).replica)
    }

    /// Does it lead, as far as it knows?
    #[must_use]
    pub fn leads(&self, region: usize) -> bool {
        self.node(region).leads()
    }

    /// Whoever leads in the newest term.
    #[must_use]
    pub fn leader(&self) -> Option<usize> {
        let leads = |i: &usize| self.node(*i).leads();
        (0..self.nodes.len()).filter(leads).max_by_key(|i| self.node(*i).term)
    }

    /// The region stands for election at once.
    pub fn stand(self: &Arc<Self>, region: usize) {
        if self.node(region).up {
            self.machines[region].with_clocks(|| self.campaign(region));
        }
    }

    /// The leader makes these the voters: one more or one less than there are. Returns whether it could be tried.
    pub fn set_voters(self: &Arc<Self>, voters: Vec<usize>) -> bool {
        let Some(leader) = self.leader() else { return false };
        let mut node = self.node(leader);
        let changed = voters.iter().filter(|v| !node.voters().contains(v)).count()
            + node.voters().iter().filter(|v| !voters.contains(v)).count();
        // (A leader that has committed nothing in its own term may not know the newest voters: Ongaro, 2015, on raft-dev.)
        if changed != 1 || node.is_changing() || !node.has_committed() {
            return false;
        }
        node.append(Payload::Voters(Arc::new(voters)));
        drop(node);
        self.machines[leader].with_clocks(|| {
            self.persist(leader);
            self.replicate(leader);
        });
        true
    }

    /// Who votes, for certain.
    #[must_use]
    pub fn voters(&self) -> Vec<usize> {
        let voters = lock(&self.committed).voters.clone();
        voters.map_or_else(|| (0..self.genesis.1).collect(), |voters| voters.to_vec())
    }

    /// Two nodes committed different entries at one index, or they drown in messages: the simulation's own fault.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        lock(&self.committed).fault.clone()
    }

    /// Where everyone is, for messages.
    #[must_use]
    pub fn describe(&self) -> String {
        let nodes = (0..self.nodes.len()).map(|i| format!("r{i}: {}", self.node(i).describe()));
        nodes.collect::<Vec<_>>().join("; ")
    }

    fn node(&self, region: usize) -> MutexGuard<'_, Node> {
        lock(&self.nodes[region])
    }

    fn patience(&self) -> Micros {
        self.time.now() + self.chance.time(Micros::millis(900), Micros::millis(1_800))
    }

    fn tick(self: &Arc<Self>, region: usize) {
        let now = self.time.now();
        let (leads, stands) = {
            let node = self.node(region);
            let votes = node.voters().contains(&region);
            (node.leads(), votes && !node.leads() && now >= node.stand_at)
        };
        if leads {
            self.replicate(region);
        } else if stands {
            self.campaign(region);
        }
    }

    fn campaign(self: &Arc<Self>, region: usize) {
        let stand_at = self.patience();
        let (vote, voters) = self.node(region).campaign(region, stand_at);
        for to in voters.iter().filter(|to| **to != region) {
            self.send(region, *to, vote.clone());
        }
        self.count_votes(region);
    }

    fn count_votes(self: &Arc<Self>, region: usize) {
        let elected = self.node(region).elect(self.nodes.len());
        if elected {
            self.persist(region);
            self.replicate(region);
        }
    }

    /// The leader sends everyone what they lack, or a sign of life.
    fn replicate(self: &Arc<Self>, leader: usize) {
        let now = self.time.now();
        for to in (0..self.nodes.len()).filter(|to| *to != leader) {
            let message = self.node(leader).news_for(leader, to, now);
            if let Some(message) = message {
                self.send(leader, to, message);
            }
        }
    }

    fn send(self: &Arc<Self>, from: usize, to: usize, message: Message) {
        if !self.node(to).up {
            return;
        }
        // Each message that is under way holds the simulation.
        if Arc::strong_count(self) > UNDER_WAY_MAX {
            lock(&self.committed)
                .fault
                .get_or_insert_with(|| format!("more than {UNDER_WAY_MAX} messages are under way"));
            return;
        }
        for delay in self.net.fate(from, to).into_iter().flatten() {
            let (rafts, message) = (Arc::clone(self), message.clone());
            // A connection ends with the daemon at its other end.
            let arrive = self.machines[to].run(async move {
                pass(delay).await;
                rafts.receive(to, from, message);
            });
            tokio::spawn(arrive);
        }
    }

    fn receive(self: &Arc<Self>, me: usize, from: usize, message: Message) {
        if !self.node(me).up {
            return;
        }
        match message {
            Message::Vote { term, last } => {
                let stand_at = self.patience();
                let reply = self.node(me).vote(from, term, last, stand_at);
                self.send(me, from, reply);
            }
            Message::Voted { term, granted } => {
                if self.node(me).voted(from, term, granted) {
                    self.count_votes(me);
                }
            }
            Message::Append(append) => {
                let stand_at = self.patience();
                let (reply, stored) = self.node(me).follow(from, append, stand_at);
                self.commit(me);
                match stored {
                    Some(upto) => self.persist_and_reply(me, from, upto, reply),
                    None => self.send(me, from, reply),
                }
            }
            Message::Snapshot { term, base } => {
                let stand_at = self.patience();
                let reply = self.node(me).restore(from, term, &base, stand_at);
                self.send(me, from, reply);
            }
            Message::Appended { term, upto, fits } => {
                let more = self.node(me).appended(from, (term, upto, fits), self.time.now());
                self.advance(me);
                if more {
                    self.replicate(me);
                }
            }
            Message::Propose { id, ops } => self.enqueue(me, ops, Reply::To { region: from, id }),
            Message::Proposed { id, outcome } => self.finish(id, outcome),
        }
    }

    /// What the node has in its log gets to its disk; then it counts.
    fn persist(self: &Arc<Self>, me: usize) {
        let (upto, term) = self.node(me).last();
        let rafts = Arc::clone(self);
        let delay = self.chance.time(Micros::ZERO, self.habits.disk);
        tokio::spawn(self.machines[me].run(async move {
            pass(delay).await;
            rafts.node(me).stored(me, upto, term);
            rafts.advance(me);
        }));
    }

    fn persist_and_reply(self: &Arc<Self>, me: usize, to: usize, upto: (u64, u64), reply: Message) {
        let rafts = Arc::clone(self);
        let delay = self.chance.time(Micros::ZERO, self.habits.disk);
        tokio::spawn(self.machines[me].run(async move {
            pass(delay).await;
            if rafts.node(me).stored(me, upto.0, upto.1) {
                rafts.send(me, to, reply);
            }
        }));
    }

    /// The leader looks whether more is committed now.
    fn advance(self: &Arc<Self>, me: usize) {
        let moved = self.node(me).advance();
        if moved {
            self.commit(me);
            self.replicate(me);
        }
    }

    /// Applies what is committed on this node, and answers whoever proposed it.
    fn commit(self: &Arc<Self>, me: usize) {
        loop {
            let Some((index, item, replies)) = self.node(me).next_to_apply() else { break };
            self.note(index, &item);
            let replica = self.replica(me);
            let outcome = match &item.payload {
                Payload::Pool(entry, _) => {
                    let applied = replica.apply(item.term, entry);
                    if applied.refused { Err(ProposeError::Refused) } else { Ok((*applied).clone()) }
                }
                Payload::Blank => {
                    if self.node(me).leads_in(item.term) {
                        replica.lead(item.term);
                        let tau = replica.pool().read().tau();
                        self.node(me).clocks.push(RaftClock::begin(item.term, tau, clock::now()));
                    }
                    Ok(Applied::default())
                }
                Payload::Voters(_) => Ok(Applied::default()),
            };
            for reply in replies {
                self.answer(me, reply, outcome.clone());
            }
        }
        self.node(me).compact(self.habits.log_max);
    }

    /// An entry is committed somewhere.
    fn note(&self, index: u64, item: &Item) {
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        let mut committed = lock(&self.committed);
        match committed.terms.get(at.saturating_sub(1)) {
            Some(term) if *term != item.term => {
                committed.fault =
                    Some(format!("two entries at index {index}, of terms {term} and {}", item.term));
            }
            Some(_) => {}
            None => {
                committed.terms.push(item.term);
                if let Payload::Voters(voters) = &item.payload {
                    committed.voters = Some(Arc::clone(voters));
                }
                drop(committed);
                (self.on_commit)(index, item);
            }
        }
    }

    fn enqueue(self: &Arc<Self>, me: usize, ops: Vec<Op>, reply: Reply) {
        if !self.node(me).leads() {
            return self.answer(me, reply, Err(ProposeError::NotSent { retry: true }));
        }
        let first = self.node(me).enqueue(ops, reply);
        if first {
            let opened = self.stamp(me);
            let rafts = Arc::clone(self);
            let company = match self.chance.int(0, 99) {
                0..80 => Micros::millis(1),
                _ => self.chance.time(Micros::ZERO, self.habits.company),
            };
            tokio::spawn(self.machines[me].run(async move {
                pass(company).await;
                rafts.close(me, opened).await;
            }));
        }
    }

    /// What the leader would stamp an entry with now, if its clock has begun.
    #[must_use]
    pub fn stamp_now(&self) -> Option<Stamp> {
        let leader = self.leader()?;
        self.machines[leader].with_clocks(|| self.stamp(leader))
    }

    fn stamp(&self, me: usize) -> Option<Stamp> {
        let (replica, term) = (self.replica(me), self.node(me).term);
        replica.stamp(term)
    }

    /// Closes the entry that is open: stamps it, and hands it over.
    async fn close(self: &Arc<Self>, me: usize, opened: Option<Stamp>) {
        use quorate::bugs::{Bug, planted};
        // A new leader waits until it has applied everything before its own first entry.
        while self.node(me).leads() && self.stamp(me).is_none() {
            pass(Micros::millis(10)).await;
        }
        let (ops, replies) = self.node(me).gathered();
        let stamp = self.stamp(me).filter(|_| self.node(me).leads());
        let Some(stamp) = (if planted(Bug::StampAtBatchOpen) { opened.or(stamp) } else { stamp }) else {
            return self.refuse(me, replies);
        };
        let stamp = self.unaware(me).unwrap_or(stamp);
        let stamped = self.time.now();
        if self.chance.percent(self.habits.slow_hand_over) {
            pass(self.chance.time(Micros::ZERO, Micros::seconds(4))).await;
        }
        let entry = Arc::new(Entry { stamp, ops });
        let handed = self.node(me).lead_with(Payload::Pool(entry, stamped), replies);
        match handed {
            Ok(()) => {
                self.persist(me);
                self.replicate(me);
            }
            Err(replies) => self.refuse(me, replies),
        }
    }

    /// A stamp by the clock of an earlier leadership, now and then.
    fn unaware(&self, me: usize) -> Option<Stamp> {
        let older = self.node(me).clocks.iter().rev().skip(1).copied().collect::<Vec<_>>();
        if older.is_empty() || !self.chance.percent(self.habits.unaware) {
            return None;
        }
        Some(self.chance.pick(&older).stamp(clock::now()))
    }

    /// Copies of these asks arrive once more, long after, at whoever leads then.
    fn echo(self: &Arc<Self>, ops: &[Op]) {
        let asks = !ops.is_empty() && ops.iter().all(|op| matches!(op, Op::Ask(_)));
        if !asks || !self.chance.percent(self.habits.echoes) {
            return;
        }
        let (rafts, ops) = (Arc::clone(self), ops.to_vec());
        let delay = self.chance.time(Micros::seconds(3), LATE);
        tokio::spawn(async move {
            pass(delay).await;
            let Some(leader) = rafts.leader().filter(|_| rafts.time.now() < FAULTS) else { return };
            let machine = Arc::clone(&rafts.machines[leader]);
            // Nobody waits for the answer.
            machine.run(async move { rafts.enqueue(leader, ops, Reply::Here { id: 0 }) }).await;
        });
    }

    fn refuse(self: &Arc<Self>, me: usize, replies: Vec<Reply>) {
        for reply in replies {
            self.answer(me, reply, Err(ProposeError::NotSent { retry: true }));
        }
    }

    fn answer(self: &Arc<Self>, me: usize, reply: Reply, outcome: Outcome) {
        match reply {
            Reply::Here { id } => self.finish(id, outcome),
            Reply::To { region, id } => self.send(me, region, Message::Proposed { id, outcome }),
        }
    }

    /// Somebody waits for the outcome of proposal `id`, maybe.
    fn finish(&self, id: u64, outcome: Outcome) {
        if let Some(waits) = lock(&self.calls).1.remove(&id) {
            // Whoever waited may have given up.
            let _ = waits.send(outcome);
        }
    }

    fn call(&self) -> (u64, oneshot::Receiver<Outcome>) {
        let (reply, outcome) = oneshot::channel();
        let mut calls = lock(&self.calls);
        calls.0 += 1;
        let id = calls.0;
        calls.1.insert(id, reply);
        (id, outcome)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
