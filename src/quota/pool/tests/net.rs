//! A small, seeded wide-area network in virtual time, with true clocks and one bucket, for what is used of a limit (safety is
//! `world`'s affair).

use super::support::*;
use crate::quota::amount::{DRIFT_PPM, Micros, Rate, Tokens};
use crate::quota::borrower::{Borrower, Sending, Situation};
use crate::quota::bucket::{self, Generation, Shape};
use crate::quota::policy::*;
use crate::quota::pool::*;
use std::cmp::Reverse as Earliest;
use std::collections::{BTreeMap, VecDeque};

pub const MS: i64 = 1_000;
/// Time goes on in steps of this.
pub const STEP: i64 = MS;
const BATCH: i64 = 5 * MS;
pub const BUCKET: BucketId = BucketId([1; 16]);

/// Requests a second that a region is offered at a time (microseconds).
pub type Load = fn(region: usize, time: i64) -> i64;

pub struct Region {
    pub replica: Pool,
    seen_at: i64,
    borrower: Borrower,
    store: StoreBucket,
    bare: Bare,
    part: Part,
    offered: Tokens,
    queued: Tokens,
    look: i64,
    rtt: Micros,
    waiting: VecDeque<Waiter>,
    asking: Asking,
    installs: u64,
}

/// As in `limiter::table`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asking {
    No,
    Poked,
    Out,
}

/// A request that waits for a lease, as in `limiter::waits`.
struct Waiter {
    number: usize,
    until: i64,
    seen: u64,
}

/// The most that wait in a region.
const WAITING_MAX: usize = 10_000;

/// How a request fared.
#[derive(Clone, Copy)]
pub struct Outcome {
    pub at: i64,
    /// When it was answered.
    pub end: i64,
    pub admitted: bool,
    /// One bucket for the whole world, with the limit less the drift, fed with the same requests, admitted it.
    pub ideal: bool,
    /// What the pool held, and all of it and the regions together, at the time; zero if it was admitted at once.
    pub pool: Tokens,
    pub held: Tokens,
}

enum Event {
    Arrive(Op),
    Flush,
    Commit(Entry),
    Learn(usize, Entry),
}

pub struct Net {
    pub now: i64,
    pub rng: Rng,
    /// Round trips in ms; the leader is region 0.
    rtt: Vec<Vec<i64>>,
    pub cost: Tokens,
    pub regions: Vec<Region>,
    queue: BTreeMap<Earliest<(i64, u64)>, Event>,
    queued: u64,
    open: Vec<Op>,
    pub cut_off: Option<usize>,
    /// It hears others, and they do not hear it.
    pub mute: Option<usize>,
    held_back: Vec<(usize, Entry)>,
    pub asks: i64,
    pub loans: i64,
    /// What the asks take in the log.
    pub bytes: usize,
    pub entries: i64,
    /// Admitted by region, in steps of 100 ms.
    admitted: Vec<Vec<i64>>,
    meter: Meter,
    pub limit: (Rate, Tokens),
    /// How long a request may wait for a lease.
    pub wait: Micros,
    pub outcomes: Vec<Outcome>,
    ideal: Meter,
}

impl Net {
    pub fn new(policy: Policy, rtt: Vec<Vec<i64>>) -> Self {
        let n = rtt.len();
        let mut pool = Pool::default();
        let mut ops = vec![Op::Found { regions: regions(n), policies: vec![policy] }];
        ops.extend((0..n as u16).map(|i| Op::Join(Join { region: RegionId(i), previous: 0, nonce: 1 })));
        pool.apply(1, &Entry { stamp: Stamp { term: 1, tau: Micros(0) }, ops });
        let cut = pool.cut(0).unwrap();
        let limit = (cut.rate, cut.burst + cut.overshoot());
        let regions = (0..n).map(|i| Region::new(&pool, i)).collect();
        Net {
            now: 0,
            rng: Rng(7),
            rtt,
            cost: Tokens::whole(1),
            regions,
            queue: BTreeMap::new(),
            queued: 0,
            open: Vec::new(),
            cut_off: None,
            mute: None,
            held_back: Vec::new(),
            asks: 0,
            loans: 0,
            bytes: 0,
            entries: 0,
            admitted: Vec::new(),
            meter: Meter::default(),
            limit,
            wait: Micros::ZERO,
            outcomes: Vec::new(),
            ideal: Meter::default(),
        }
    }

    /// Three regions, 80 ms apart.
    pub fn three(policy: Policy) -> Self {
        Self::apart(policy, 3, 80)
    }

    /// So many regions, all as far apart.
    pub fn apart(policy: Policy, many: usize, rtt: i64) -> Self {
        let row = |i| (0..many).map(|j| if i == j { 0 } else { rtt }).collect();
        Self::new(policy, (0..many).map(row).collect())
    }

    /// Five regions, 80 to 250 ms apart.
    pub fn five(policy: Policy) -> Self {
        let rtt = [
            [0, 80, 80, 160, 120],
            [80, 0, 140, 110, 180],
            [80, 140, 0, 220, 190],
            [160, 110, 220, 0, 250],
            [120, 180, 190, 250, 0],
        ];
        Self::new(policy, rtt.map(Vec::from).to_vec())
    }

    pub fn run(&mut self, until: Micros, load: Load) -> &mut Self {
        self.offer(until, &|region, time| load(region, time))
    }

    /// Under demand that depends on how many regions there are.
    pub fn drive(&mut self, until: Micros, load: fn(usize, usize) -> i64) {
        let many = self.regions.len();
        self.offer(until, &|region, _| load(region, many));
    }

    fn offer(&mut self, until: Micros, load: &dyn Fn(usize, i64) -> i64) -> &mut Self {
        self.arrive(until, &mut |rng, region, time| {
            let per_step = load(region, time) * STEP; // in millionths of a request
            (0..4).filter(|_| rng.int(0, 4_000_000 - 1) < per_step).count()
        })
    }

    /// Under so many requests in a region at a time.
    pub fn arrive(
        &mut self,
        until: Micros,
        arrivals: &mut dyn FnMut(&mut Rng, usize, i64) -> usize,
    ) -> &mut Self {
        while self.now < until.0 {
            while let Some((Earliest((time, _)), _)) = self.queue.last_key_value()
                && *time <= self.now
                && let Some((_, event)) = self.queue.pop_last()
            {
                self.handle(event);
            }
            for i in 0..self.regions.len() {
                for _ in 0..arrivals(&mut self.rng, i, self.now) {
                    self.request(i);
                }
                self.end_waits(i);
                self.look(i);
            }
            self.now += STEP;
        }
        self
    }

    /// Was it admitted at once?
    pub fn request(&mut self, i: usize) -> bool {
        let (now, cost) = (Micros(self.now), self.cost);
        let admitted = self.take(i);
        let rate = self.limit.0.discount(DRIFT_PPM);
        let ideal = self.ideal.level(rate, now) + cost <= self.limit.1;
        if ideal {
            self.ideal.add(cost, rate, now);
        }
        let (pool, held) = if admitted { Default::default() } else { self.held() };
        let number = self.outcomes.len();
        self.outcomes.push(Outcome { at: now.0, end: now.0, admitted, ideal, pool, held });
        let most = self.regions[0].replica.cut(0).unwrap().burst;
        let r = &mut self.regions[i];
        r.offered += cost;
        let waiting = Tokens(cost.0 * r.waiting.len() as i64);
        if admitted {
        } else if self.wait == Micros::ZERO {
            r.queued += cost;
        } else if waiting + cost <= most && r.waiting.len() < WAITING_MAX {
            r.waiting.push_back(Waiter { number, until: (now + self.wait).0, seen: r.installs });
            r.poke(self.now);
        }
        if !admitted || r.store.level(&r.bare, now) < r.borrower.low_water() {
            r.look = self.now;
        }
        admitted
    }

    fn take(&mut self, i: usize) -> bool {
        let (now, cost, many) = (Micros(self.now), self.cost, self.regions.len());
        let r = &mut self.regions[i];
        let admitted = r.store.take(&r.bare, cost, now);
        if admitted {
            let slot = (self.now / (100 * MS)) as usize;
            self.admitted.resize(self.admitted.len().max(slot + 1), vec![]);
            self.admitted[slot].resize(many, 0);
            self.admitted[slot][i] += cost.floor();
            self.meter.add(cost, self.limit.0, now);
            let level = self.meter.level(self.limit.0, now);
            assert!(level <= self.limit.1 + Tokens(10), "{level:?} admitted in a window");
        }
        admitted
    }

    /// What the pool holds by its newest entry, and all of it and the regions together: what is on its way, too.
    fn held(&self) -> (Tokens, Tokens) {
        let now = Micros(self.now);
        let newest = &self.regions[0].replica;
        let pool = newest.free(0, BUCKET, now.discount(DRIFT_PPM));
        let in_region = |(i, r): (usize, &Region)| {
            let record = newest.record(BUCKET, RegionId(i as u16));
            let on_its_way = record.map_or(Tokens::ZERO, |record| r.borrower.unread(record, now));
            r.store.level(&r.bare, now) + on_its_way
        };
        (pool, pool + self.regions.iter().enumerate().map(in_region).sum::<Tokens>())
    }

    /// Requests that have waited for as long as they may try once more.
    fn end_waits(&mut self, i: usize) {
        while self.regions[i].waiting.front().is_some_and(|first| first.until <= self.now) {
            let number = self.regions[i].waiting.pop_front().unwrap().number;
            self.outcomes[number].admitted = self.take(i);
            self.outcomes[number].end = self.now;
        }
    }

    /// All who wait try again. Who finds too little goes on waiting, unless there is nothing to wait for.
    fn news(&mut self, i: usize) {
        for waiter in std::mem::take(&mut self.regions[i].waiting) {
            let admitted = self.take(i);
            let r = &mut self.regions[i];
            if !admitted && (r.asking != Asking::No || waiter.seen != r.installs) {
                r.waiting.push_back(Waiter { seen: r.installs, ..waiter });
                r.poke(self.now);
            } else {
                self.outcomes[waiter.number].admitted = admitted;
                self.outcomes[waiter.number].end = self.now;
            }
        }
    }

    fn look(&mut self, i: usize) {
        if self.regions[i].look > self.now {
            return;
        }
        let now = Micros(self.now);
        let r = &mut self.regions[i];
        r.borrower.observe(now, std::mem::take(&mut r.offered), self.cost);
        let region = RegionId(i as u16);
        let waiting = Tokens(self.cost.0 * r.waiting.len() as i64);
        let queued = r.queued + waiting;
        let tau_age = now - Micros(r.seen_at);
        let situation = Situation {
            pool: &r.replica,
            policy: 0,
            bucket: BUCKET,
            region,
            part: r.part,
            now,
            level: r.store.level(&r.bare, now),
            queued,
            queued_max: self.cost.min(queued),
            rtt: r.rtt,
            tau_age,
            may_lend: true,
        };
        let plan = r.borrower.consider(&situation);
        r.look = r.borrower.next_look(now).0;
        r.queued = Tokens::ZERO;
        let Some(plan) = plan else {
            let free = r.replica.free(0, BUCKET, r.replica.tau() + tau_age);
            let of_use = free.is_positive() && free >= self.cost.min(queued);
            let slow = self.limit.0 < SLOW || r.borrower.is_on_demand();
            let may_come =
                slow && waiting.is_positive() && r.replica.lent_elsewhere(BUCKET, region) >= self.cost;
            if !(r.borrower.is_out() || of_use && r.borrower.is_held_back(now) || may_come) {
                r.asking = Asking::No;
                self.news(i);
            }
            return;
        };
        r.asking = Asking::Out;
        let rate = plan.hold_rate.discount(DRIFT_PPM);
        let store = r.store.prepare(&r.bare, &plan, rate, r.borrower.next_seq(), now);
        let seen = Stamp { term: 1, tau: r.replica.tau() };
        let sending = Sending {
            region,
            epoch: r.replica.epoch(region).0,
            policy: 0,
            bucket: BUCKET,
            part: r.part,
            now,
            store_now: now,
            seen,
            age: now - Micros(r.seen_at),
        };
        let ask = r.borrower.ask(&plan, &store, &sending);
        self.asks += 1;
        if std::env::var("VERBOSE").is_ok() {
            eprintln!(
                "{:8} r{i} asks held {:?} {:?} ret {:?} level {:?} demand {:?} want {:?} short {:?} q {:?}",
                self.now,
                ask.held_burst,
                ask.held_rate,
                ask.returned,
                ask.level,
                ask.demand,
                ask.want,
                ask.short,
                ask.quantum
            );
        }
        if self.cut_off != Some(i) && self.mute != Some(i) {
            let way = self.rtt[i][0] * MS / 2;
            let op = if plan.lend.is_positive() {
                self.loans += 1;
                let (until, seen_term) = (Lend::until(seen, sending.age), seen.term);
                Op::Lend(Lend { ask, rate: store.lent, until, seen_term })
            } else {
                Op::Ask(ask)
            };
            self.bytes += postcard::to_stdvec(&op).unwrap().len();
            self.at(self.now + way + 300, Event::Arrive(op));
        }
    }

    fn at(&mut self, time: i64, event: Event) {
        self.queued += 1;
        self.queue.insert(Earliest((time, self.queued)), event);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive(op) => {
                if self.open.is_empty() {
                    self.at(self.now + BATCH, Event::Flush);
                }
                self.open.push(op);
            }
            Event::Flush => {
                let tau = Micros(self.now).discount(DRIFT_PPM);
                let entry = Entry { stamp: Stamp { term: 1, tau }, ops: std::mem::take(&mut self.open) };
                let mut ways: Vec<i64> = self.rtt[0].clone();
                ways.sort_unstable();
                self.at(self.now + ways[ways.len() / 2] * MS, Event::Commit(entry));
            }
            Event::Commit(entry) => {
                self.entries += 1;
                for i in 0..self.regions.len() {
                    if self.cut_off == Some(i) {
                        self.held_back.push((i, entry.clone()));
                    } else {
                        self.at(self.now + self.rtt[0][i] * MS / 2, Event::Learn(i, entry.clone()));
                    }
                }
            }
            Event::Learn(i, entry) => self.learn(i, &entry),
        }
    }

    fn learn(&mut self, i: usize, entry: &Entry) {
        let now = Micros(self.now);
        let r = &mut self.regions[i];
        let applied = r.replica.apply(1, entry);
        assert!(applied.breached.is_empty());
        r.seen_at = self.now;
        r.look = self.now;
        let mut installed = false;
        for (region, bucket) in applied.records {
            if usize::from(region.0) != i {
                continue;
            }
            let record = r.replica.record(bucket, region).unwrap();
            if std::env::var("VERBOSE").is_ok() {
                eprintln!("{:8} r{i} reads {record:?}", self.now);
            }
            let Some(grant) = r.borrower.on_record(record, record.epoch, now) else {
                if r.asking == Asking::Out && !r.borrower.is_out() {
                    r.asking = Asking::Poked;
                }
                continue;
            };
            if let Some(waited) = grant.waited {
                r.rtt = Micros((r.rtt.0 * 7 + waited.0) / 8);
            }
            let rate = grant.rate.discount(DRIFT_PPM);
            let (seq, push, granted) = (grant.seq, grant.push, grant.granted);
            let (burst, deadline) = (grant.burst, grant.deadline);
            let grant = bucket::Grant { seq, push, granted, burst, rate, deadline };
            r.store.install(&r.bare, &grant, now);
            r.installs += 1;
            r.asking = Asking::No;
            installed = true;
        }
        if installed {
            self.news(i);
        }
    }

    pub fn heal(&mut self) {
        self.cut_off = None;
        for (i, entry) in std::mem::take(&mut self.held_back) {
            self.at(self.now + self.rtt[0][i] * MS / 2, Event::Learn(i, entry));
        }
    }

    /// Tokens admitted in a stretch of time, in one region or all.
    pub fn count(&self, from: Micros, to: Micros, region: Option<usize>) -> i64 {
        let slots =
            self.admitted.iter().take((to.0 / (100 * MS)) as usize).skip((from.0 / (100 * MS)) as usize);
        slots
            .flat_map(|s| s.iter().enumerate())
            .filter(|(i, _)| region.is_none_or(|r| r == *i))
            .map(|(_, n)| n)
            .sum()
    }

    /// Thousandths of what the limit refills in a stretch of time.
    pub fn used(&self, from: Micros, to: Micros) -> i64 {
        self.count(from, to, None) * 1_000 / self.limit.0.during(to - from).floor()
    }
}

impl Region {
    fn new(pool: &Pool, i: usize) -> Self {
        let part = pool.usable(0, RegionId(i as u16)).unwrap();
        let shape = Shape { rate: part.rate.discount(DRIFT_PPM), cap: part.cap() };
        let generation = Generation { start: Micros(0), full: true, known: true };
        Self {
            replica: pool.clone(),
            seen_at: 0,
            borrower: Borrower::new(Micros(0)),
            store: StoreBucket::default(),
            bare: Bare { shape, unseen: None, generation, session: 1 },
            part,
            offered: Tokens::ZERO,
            queued: Tokens::ZERO,
            look: 0,
            rtt: Micros::millis(200),
            waiting: VecDeque::new(),
            asking: Asking::No,
            installs: 0,
        }
    }

    fn poke(&mut self, now: i64) {
        if self.asking == Asking::No {
            self.asking = Asking::Poked;
            self.look = now;
        }
    }
}

pub fn strict(amount: u64, per: Unit, burst: u64) -> Policy {
    policy("p", amount, per, burst, Mode::Strict, Reserve::default())
}

pub const fn s(seconds: i64) -> Micros {
    Micros::seconds(seconds)
}
