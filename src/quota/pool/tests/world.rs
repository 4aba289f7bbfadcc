//! An adversarial world for safety: clocks with any offset and bent by up to 1%, messages lost, doubled and late, leaders
//! that change and keep a prefix of the unfinished log, stamps of older leaderships, daemons that restart, pause, and forget
//! borrowers, stores that lose their data or answer late, changes of policies while slices are out, regions that come,
//! leave, die and come back, and callers who spend whenever it hurts.
//!
//! Checked after every event, in real time that no part of the system knows:
//!
//! - S1: what was admitted never exceeds the bound in any window (see [`Meter`]);
//! - S2: ... nor would it if every region spent what it has at this instant;
//! - S3: no region's lease exceeds, or outlives, its liability in the committed pool;
//! - S4: the pool's own books balance;
//! - S5: ... nor would it if what is on its way and in the pool were spent as well (the inductive form: admitting moves
//!   tokens from one term to another, time adds at most the rate);
//!
//! and at the end, L1: once everything has run out the pool is whole again and nothing is on record.

mod asking;
mod check;
mod faults;
mod histories;
mod made_up;
mod regions;
mod resets;

use super::support::*;
use crate::quota::amount::{DRIFT_PPM, Micros, Rate, Tokens};
use crate::quota::borrower::{Borrower, Grant, Plan, Sending, Situation};
use crate::quota::bucket::{self, Generation, Shape, Unseen};
use crate::quota::policy::*;
use crate::quota::pool::*;
use made_up::{bound, some_policy};
use std::cmp::Reverse as Earliest;
use std::collections::{BTreeMap, VecDeque};

const BUCKET: BucketId = BucketId([7; 16]);
const SECOND: i64 = 1_000_000;
const MS: i64 = 1_000;

/// Mistakes at the seams of the protocol, to see that the checks see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    NoDriftDiscount,
    LeaseFromReply,
    LeaseFromResend,
    StaleStampAccepted,
    LeaderWallClock,
    StampAtBatchOpen,
    NoSeqCheck,
    NoEpoch,
    FullAfterLoss,
    OverdraftForgottenOnLoss,
    RollbackUndetected,
    StopAfterSending,
    RaiseAtOnce,
    AckBeforeStopping,
    NoFence,
    FullAfterPolicy,
    NewcomerAtOnce,
    RemovedUnheard,
    FormerLife,
    ResetTwice,
    LentUsed,
    LoanTooLong,
    LoansForgotten,
}

/// What may change in a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changing {
    Nothing,
    /// An operator resets the bucket now and then.
    Resets,
    Policies,
    /// And policies, too.
    Regions,
}

/// One life of a region: what runs under one Raft node id.
struct Node {
    region: RegionId,
    life: u64,
    /// It has no process any more.
    dead: bool,
    /// The daemon's monotonic clock, and the store's.
    mono: Clock,
    store_clock: Clock,
    replica: Pool,
    applied: usize,
    seen: Stamp,
    seen_at: Micros,
    epoch: Option<u64>,
    nonce: u64,
    borrower: Borrower,
    /// The ask that it sent last, and what it lent with it.
    ask: Option<Ask>,
    lend: Option<Lend>,
    /// The store's time when it was last sent again.
    resent: Option<Micros>,
    store: StoreBucket,
    snapshot: StoreBucket,
    generation: Generation,
    part: Part,
    unseen: Option<Unseen>,
    /// Since when a new part waits to be adopted ([`Bug::AckBeforeStopping`]).
    lagging: Option<(Part, i64)>,
    cut_off: i64,
    paused: i64,
    /// The newest reset that it has filled in.
    filled: u64,
}

enum Event {
    Tick(usize),
    Arrive(Op),
    Close(u64),
    Commit,
    Learn(usize),
    Read(usize, Box<Record>),
    Install(usize, u64, bucket::Grant),
    Fault,
    Attack,
}

pub struct World {
    rng: Rng,
    now: i64,
    queue: BTreeMap<Earliest<(i64, u64)>, Event>,
    queued: u64,
    nodes: Vec<Node>,
    policy: u32,
    style: i64,
    attacker: usize,
    drift: i64,
    // Raft
    leader: Option<usize>,
    clocks: Vec<(usize, RaftClock)>,
    term: u64,
    log: Vec<(u64, Entry)>,
    /// Appended, not committed; with the real time of the stamp.
    pending: VecDeque<(i64, u64, Entry)>,
    open: Vec<Op>,
    open_stamp: Stamp,
    pool: Pool,
    // The bounds that may be in force, and the newest.
    bounds: Vec<(Rate, Tokens)>,
    settled_since: Option<Micros>,
    /// What resets have made.
    extra: Tokens,
    meter: Meter,
    changing: Changing,
    /// Region 0 dies and is replaced again and again.
    hapless: bool,
    nonce: u64,
    bug: Option<Bug>,
    breached: bool,
    pub commits: u64,
    pub grants: u64,
    pub admitted: Tokens,
    pub changes: u64,
    pub resets: i64,
    pub loans: u64,
    pub came: u64,
    pub left: u64,
}

impl World {
    pub fn run(seed: u64, changing: Changing, bug: Option<Bug>, seconds: i64) -> (Self, Result<(), String>) {
        let mut rng = Rng(seed);
        let n = rng.int(2, 4) as usize;
        let drift = rng.pick(&[0, 10_000, 10_000]);
        let policies = vec![some_policy(&mut rng)];
        let mut pool = Pool::default();
        let found = Entry {
            stamp: Stamp { term: 1, tau: Micros(0) },
            ops: vec![Op::Found { regions: regions(n), policies }],
        };
        pool.apply(1, &found);
        let policy = pool.policies().next().unwrap().id;
        let nodes = (0..n).map(|i| Node::new(&mut rng, &pool, policy, i, drift)).collect();
        let mut w = World {
            now: 0,
            queue: BTreeMap::new(),
            queued: 0,
            nodes,
            policy,
            style: rng.int(0, 6),
            attacker: 0,
            drift,
            leader: None,
            clocks: Vec::new(),
            term: 1,
            log: vec![(1, found)],
            pending: VecDeque::new(),
            open: Vec::new(),
            open_stamp: Stamp::default(),
            bounds: vec![bound(&pool, policy)],
            settled_since: None,
            extra: Tokens::ZERO,
            pool,
            meter: Meter::default(),
            changing,
            hapless: rng.percent(25),
            nonce: 1,
            bug,
            breached: false,
            commits: 0,
            grants: 0,
            admitted: Tokens::ZERO,
            changes: 0,
            resets: 0,
            loans: 0,
            came: 0,
            left: 0,
            rng,
        };
        w.elect();
        let result = w.go(seconds * SECOND).and_then(|()| w.run_out());
        (w, result)
    }

    fn go(&mut self, until: i64) -> Result<(), String> {
        for i in 0..self.nodes.len() {
            self.at(i as i64 * MS, Event::Tick(i));
        }
        self.at(2 * SECOND, Event::Fault);
        self.at(SECOND, Event::Attack);
        while let Some((Earliest((time, _)), event)) = self.queue.pop_last() {
            if time > until {
                break;
            }
            self.now = time;
            self.handle(event);
            self.check().map_err(|what| format!("at {}.{:06} s: {what}", time / SECOND, time % SECOND))?;
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Tick(i) => self.tick(i),
            Event::Arrive(op) => self.arrive(op),
            Event::Close(term) => self.close(term),
            Event::Commit => {
                if self.leader.is_some_and(|l| self.nodes[l].cut_off <= self.now) {
                    self.commit();
                }
            }
            Event::Learn(i) => match self.absent(i) {
                Some(back) => self.at(back, Event::Learn(i)),
                None => self.learn(i),
            },
            Event::Read(i, record) => match self.absent(i) {
                Some(back) => self.at(back, Event::Read(i, record)),
                None => self.read(i, &record),
            },
            Event::Install(i, nonce, grant) => self.install(i, nonce, &grant),
            Event::Fault => self.fault(),
            Event::Attack => {
                let gap = self.rng.int(10 * MS, 8 * SECOND);
                self.at(self.now + gap, Event::Attack);
                for i in 0..self.nodes.len() {
                    self.spend_all(i);
                }
            }
        }
    }

    fn at(&mut self, time: i64, event: Event) {
        self.queued += 1;
        self.queue.insert(Earliest((time.max(self.now), self.queued)), event);
    }

    fn delay(&mut self) -> i64 {
        match self.rng.int(0, 99) {
            0..3 => self.rng.int(0, 45 * SECOND),
            3..18 => self.rng.int(0, 4 * SECOND),
            _ => self.rng.int(MS, 300 * MS),
        }
    }

    fn absent(&mut self, i: usize) -> Option<i64> {
        let back = self.nodes[i].paused.max(self.nodes[i].cut_off);
        (back > self.now).then(|| back + self.rng.int(0, SECOND))
    }

    fn mono(&self, i: usize) -> Micros {
        self.nodes[i].mono.at(Micros(self.now))
    }

    fn store_now(&self, i: usize) -> Micros {
        self.nodes[i].store_clock.at(Micros(self.now))
    }

    fn is(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    // --- A region ---------------------------------------------------------------------------------------------------

    fn discounted(&self, rate: Rate) -> Rate {
        if self.is(Bug::NoDriftDiscount) { rate } else { rate.discount(DRIFT_PPM) }
    }

    fn bare(&self, i: usize) -> Bare {
        let node = &self.nodes[i];
        let unseen = if self.is(Bug::FullAfterPolicy) { None } else { node.unseen };
        Bare { shape: self.shape(node.part), unseen, generation: node.generation, session: node.nonce }
    }

    fn shape(&self, part: Part) -> Shape {
        Shape { rate: self.discounted(part.rate), cap: part.cap() }
    }

    fn peek(&self, i: usize) -> Tokens {
        if self.nodes[i].dead {
            return Tokens::ZERO;
        }
        self.nodes[i].store.level(&self.bare(i), self.store_now(i))
    }

    fn spend(&mut self, i: usize, cost: Tokens) {
        if self.nodes[i].paused > self.now || self.nodes[i].dead {
            return;
        }
        let (bare, now) = (self.bare(i), self.store_now(i));
        if self.nodes[i].store.take(&bare, cost, now) {
            let rate = self.bounds.iter().map(|b| b.0).max().unwrap();
            self.meter.add(cost, rate, Micros(self.now));
            self.admitted += cost;
        }
    }

    fn spend_all(&mut self, i: usize) {
        let all = self.peek(i);
        if all.is_positive() {
            self.spend(i, all);
        }
    }

    fn tick(&mut self, i: usize) {
        if self.nodes[i].dead {
            return;
        }
        let gap = self.rng.int(5 * MS, 250 * MS);
        self.at(self.now + gap, Event::Tick(i));
        if self.nodes[i].paused > self.now {
            return;
        }
        if let Some((part, since)) = self.nodes[i].lagging
            && since + 3 * SECOND < self.now
        {
            self.nodes[i].lagging = None;
            self.adopt(i, part);
        }
        let region = self.nodes[i].region;
        if self.rng.percent(30) && self.seat(i).is_some() {
            self.keep_up(i, region);
        }
        if self.rng.percent(1) && self.nodes[i].borrower.slice(self.mono(i)).is_none() {
            self.nodes[i].borrower = Borrower::new(self.mono(i)); // forgotten
            self.nodes[i].ask = None;
        }
        let hot = match self.style {
            0 | 1 => true,
            2 => i == self.attacker,
            4 => i == self.attacker && self.rng.percent(5),
            _ => self.rng.percent(50),
        };
        let now = self.mono(i);
        if hot {
            let cost = Tokens::whole(self.rng.pick(&[1, 1, 1, 4]));
            let rate = self.pool.cut(self.policy).map_or(Rate::ZERO, |c| c.rate);
            let offered = Tokens(rate.percent(self.rng.int(1, 300)).0).max(cost);
            self.nodes[i].borrower.observe(now, offered, cost);
        }
        let queued = if hot && self.rng.percent(70) { Tokens::whole(1) } else { Tokens::ZERO };
        self.consider(i, queued);
        match self.style {
            0 => self.spend_all(i),
            2 if i == self.attacker => self.spend_all(i),
            6 if self.rng.percent(30) => self.spend_all(i),
            3 => {
                let cost = Tokens(self.rng.int(1, 5) * 500_000);
                self.spend(i, cost);
            }
            _ => {}
        }
        if self.rng.percent(2) {
            self.nodes[i].snapshot = self.nodes[i].store.clone();
        }
        let store_now = self.store_now(i);
        self.nodes[i].store.expire(store_now);
    }

    /// Joins, or acknowledges policies, until that is heard of.
    fn keep_up(&mut self, i: usize, region: RegionId) {
        let node = &self.nodes[i];
        let version = node.replica.version();
        if node.epoch.is_none() {
            let join = Join { region, previous: node.replica.epoch(region).0, nonce: node.nonce };
            self.send(i, Op::Join(join));
        } else if node.replica.unacked(version).any(|r| r == region) {
            self.send(i, Op::Ack(Ack { region, version }));
        }
        self.take_reset(i, region);
    }

    fn send(&mut self, from: usize, op: Op) {
        if self.nodes[from].cut_off > self.now || self.nodes[from].dead {
            return;
        }
        let copies = match self.rng.int(0, 99) {
            0..12 => 0,
            12..27 => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let delay = self.delay();
            self.at(self.now + delay, Event::Arrive(op.clone()));
        }
    }

    fn learn(&mut self, i: usize) {
        let Some((term, entry)) = self.log.get(self.nodes[i].applied).cloned() else { return };
        if self.nodes[i].dead {
            return;
        }
        let now = self.mono(i);
        let region = self.nodes[i].region;
        let node = &mut self.nodes[i];
        node.applied += 1;
        let applied = node.replica.apply(term, &entry);
        let stamp = Stamp { term, tau: node.replica.tau() };
        if stamp != node.seen {
            (node.seen, node.seen_at) = (stamp, now);
        }
        let (epoch, nonce) = node.replica.epoch(region);
        if nonce == node.nonce && node.epoch != Some(epoch) {
            node.epoch = Some(epoch);
        }
        self.see_to_loans(i);
        let part = self.part_to_use(i);
        if part != self.nodes[i].part {
            if self.is(Bug::AckBeforeStopping) {
                self.nodes[i].lagging.get_or_insert((part, self.now));
            } else {
                self.adopt(i, part);
            }
        }
        for (whose, bucket) in applied.records {
            let record = self.nodes[i].replica.record(bucket, whose).filter(|_| whose == region).cloned();
            if let Some(record) = record {
                self.read(i, &record);
            }
        }
        self.fill_reset(i);
    }

    fn part_to_use(&self, i: usize) -> Part {
        let Some(region) = self.seat(i) else { return Part::default() };
        let replica = &self.nodes[i].replica;
        if self.is(Bug::RaiseAtOnce) || self.is(Bug::NewcomerAtOnce) && self.is_newcomer(i) {
            let cut = replica.cut(self.policy);
            return cut.and_then(|cut| cut.parts.get(usize::from(region.0)).copied()).unwrap_or_default();
        }
        replica.usable(self.policy, region).unwrap_or_default()
    }

    /// What the region may use of its reserve changes; no bucket gains tokens by that.
    fn adopt(&mut self, i: usize, part: Part) {
        let now = self.store_now(i);
        let (old, new) = (self.shape(self.nodes[i].part), self.shape(part));
        let node = &mut self.nodes[i];
        let in_pool = node.replica.unseen(self.policy, node.region);
        let in_pool = in_pool.map(|unseen| unseen.on_clock(node.replica.tau(), now));
        node.unseen = Unseen::adopt(Some((old, node.unseen)), new, true, in_pool, node.generation, now);
        node.part = part;
        if self.is(Bug::FullAfterPolicy) {
            self.nodes[i].store = StoreBucket::default();
        }
    }

    fn read(&mut self, i: usize, record: &Record) {
        let now = self.mono(i);
        let Some(mut epoch) = self.nodes[i].epoch.filter(|_| !self.nodes[i].dead) else { return };
        if self.is(Bug::NoEpoch) {
            epoch = record.epoch;
        }
        let Some(grant) = self.nodes[i].borrower.on_record(record, epoch, now) else { return };
        let grant = self.for_store(i, &grant, record);
        self.grants += 1;
        for _ in 0..self.rng.int(1, 2) {
            let delay = match self.rng.int(0, 9) {
                0 => self.rng.int(0, 5 * SECOND),
                1 => self.rng.int(0, 300 * MS),
                _ => 0,
            };
            let nonce = self.nodes[i].nonce;
            self.at(self.now + delay, Event::Install(i, nonce, grant));
        }
    }

    fn for_store(&self, i: usize, grant: &Grant, record: &Record) -> bucket::Grant {
        let &Grant { seq, push, granted, burst, rate, mut deadline, .. } = grant;
        let from = match (self.bug, self.nodes[i].resent) {
            (Some(Bug::LeaseFromReply), _) => Some(self.store_now(i)),
            (Some(Bug::LeaseFromResend), resent) => resent,
            _ => None,
        };
        if let Some(from) = from {
            deadline = from + record.lease.discount(DRIFT_PPM);
        }
        if self.is(Bug::NoDriftDiscount) {
            deadline += record.lease - record.lease.discount(DRIFT_PPM);
        }
        bucket::Grant { seq, push, granted, burst, rate: self.discounted(rate), deadline }
    }

    fn install(&mut self, i: usize, nonce: u64, grant: &bucket::Grant) {
        if self.nodes[i].nonce == nonce {
            let (bare, now) = (self.bare(i), self.store_now(i));
            self.nodes[i].store.install(&bare, grant, now);
        }
    }

    // --- Raft -------------------------------------------------------------------------------------------------------

    fn arrive(&mut self, op: Op) {
        let Some(leader) = self.leader.filter(|l| self.nodes[*l].cut_off <= self.now) else { return };
        if self.open.is_empty() {
            self.open_stamp = self.stamp(leader);
            let batch = if self.is(Bug::StampAtBatchOpen) { 600 * MS } else { 30 * MS };
            let wait = self.rng.int(0, batch);
            self.at(self.now + wait, Event::Close(self.term));
        }
        self.open.push(op);
    }

    fn stamp(&mut self, leader: usize) -> Stamp {
        let now = self.mono(leader);
        let (_, clock) = self.clocks.last().unwrap();
        let mut stamp = { *clock }.stamp(now);
        let older: Vec<RaftClock> = self
            .clocks
            .iter()
            .filter(|(node, c)| *node == leader && c.term() < self.term)
            .map(|c| c.1)
            .collect();
        if !older.is_empty() && self.rng.percent(20) {
            stamp = self.rng.pick(&older).stamp(now); // code that has not noticed the new term
        }
        if self.is(Bug::LeaderWallClock) {
            stamp.tau = now;
        }
        if self.is(Bug::NoDriftDiscount) {
            stamp.tau = stamp.tau.mul_div(1_000_000, 990_000);
        }
        stamp
    }

    fn close(&mut self, term: u64) {
        let Some(leader) = self.leader else { return };
        if term != self.term || self.open.is_empty() {
            return;
        }
        let mut stamp = if self.is(Bug::StampAtBatchOpen) { self.open_stamp } else { self.stamp(leader) };
        if self.is(Bug::StaleStampAccepted) {
            stamp.term = term;
        }
        let ops = std::mem::take(&mut self.open);
        self.pending.push_back((self.now, term, Entry { stamp, ops }));
        let delay = self.rng.int(5 * MS, 400 * MS);
        self.at(self.now + delay, Event::Commit);
    }

    fn commit(&mut self) {
        let Some((stamped, term, mut entry)) = self.pending.pop_front() else { return };
        self.commits += 1;
        self.tamper(&mut entry);
        let version = self.pool.version();
        let before = (self.changing == Changing::Resets).then(|| self.pool.clone());
        let applied = self.pool.apply(term, &entry);
        if let Some(before) = before {
            self.allow_for_resets(term, &entry, &before);
        }
        self.breached |= !applied.breached.is_empty();
        if self.pool.version() != version {
            // In force from the stamp on: the meter drains at the new rate from there.
            let old = self.bounds.iter().map(|b| b.0).max().unwrap();
            let new = bound(&self.pool, self.policy);
            self.meter.level(old, Micros(self.now));
            self.meter.drain((new.0 - old).or_zero(), Micros(self.now - stamped));
            if self.bounds.last() != Some(&new) {
                self.bounds.push(new);
            }
            self.settled_since = None;
            self.changes += 1;
        }
        for (region, bucket) in applied.records {
            let record = self.pool.record(bucket, region).unwrap().clone();
            for _ in 0..self.rng.int(0, 2) {
                let delay = self.delay();
                for i in (0..self.nodes.len()).filter(|i| self.nodes[*i].region == region).collect::<Vec<_>>()
                {
                    self.at(self.now + delay, Event::Read(i, Box::new(record.clone())));
                }
            }
        }
        self.log.push((term, entry));
        self.arrivals();
        for i in 0..self.nodes.len() {
            let delay = self.rng.int(MS, 600 * MS);
            self.at(self.now + delay, Event::Learn(i));
        }
    }

    fn tamper(&self, entry: &mut Entry) {
        for op in &mut entry.ops {
            if let Op::RemoveRegion(remove) = op {
                remove.presume_dead |= self.is(Bug::RemovedUnheard);
            }
            let Op::Ask(ask) = op else { continue };
            if !self.is(Bug::NoSeqCheck) && !self.is(Bug::NoEpoch) {
                continue;
            }
            if self.is(Bug::NoEpoch) {
                ask.epoch = self.pool.epoch(ask.region).0;
            }
            if let Some(record) = self.pool.record(ask.bucket, ask.region) {
                ask.seq = ask.seq.max(record.seq + 1);
            }
        }
    }

    fn elect(&mut self) {
        // A prefix of what was under way survives into the new leader's log.
        let keep = self.rng.int(0, self.pending.len() as i64) as usize;
        self.pending.truncate(keep);
        self.open.clear();
        while !self.pending.is_empty() {
            self.commit();
        }
        self.term += self.rng.int(1, 2) as u64;
        let leader = self.any_alive();
        self.leader = Some(leader);
        self.clocks.push((leader, RaftClock::begin(self.term, self.pool.tau(), self.mono(leader))));
    }
}
