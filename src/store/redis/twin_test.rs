//! The scripts against `quota::bucket` and `quota::counted`, on random traces: every answer is the same, number for number.

mod counts;

use super::fault::Fault;
use super::scripts::{Call, Scripts, run};
use super::wire::{self, Batch, Keys, Stem, TakeScript};
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::bucket::{self, Bucket, Charge, EXACT_MAX, Generation, Grant, Moment, Shape, Unseen};
use crate::quota::calendar::Turn;
use crate::quota::counted::lent::Slice;
use crate::quota::policy::BucketId;
use crate::store::{Install, Prepare, Prepared, Take, TakeCharge, Taken, TakenCharge};
use bytes::Bytes;
use counts::Counts;
use fred::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::HashMap;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const TRACES: u64 = 40;
const STEPS: usize = 250;
const TOLERANCE: i64 = 250_000;

struct Server {
    child: Child,
    _dir: tempfile::TempDir,
}

impl Server {
    async fn start() -> (Self, Client) {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let mut command = Command::new("redis-server");
        command.args(["--port", "0", "--save", "", "--unixsocket"]).arg(&socket);
        command.current_dir(dir.path()).stdout(Stdio::null());
        let server =
            Self { child: command.spawn().expect("redis-server is needed for this test"), _dir: dir };
        let config = Config { server: ServerConfig::Unix { path: socket }, ..Config::default() };
        for _ in 0..500 {
            let client = Client::new(config.clone(), None, None, None);
            if client.init().await.is_ok() {
                return (server, client);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("redis-server does not answer")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the scripts do, by `quota::bucket`; nothing expires.
struct Model {
    buckets: HashMap<BucketId, Bucket>,
    session: u64,
    generation: Generation,
}

impl Model {
    fn settle(&self, id: BucketId, shape: Shape, unseen: Option<Unseen>, when: Moment) -> Bucket {
        let stored = self.buckets.get(&id).copied();
        let mut b = stored.unwrap_or_else(|| Bucket::unseen(shape, unseen, self.generation, when.now));
        b.settle(shape, self.session, when);
        b
    }

    /// Settling alone is not worth a write; here it would show where time runs backwards.
    fn put(&mut self, id: BucketId, changed: bool, after: Bucket) {
        let reshaped = self.buckets.get(&id).is_some_and(|stored| stored.shape() != after.shape());
        if changed || reshaped {
            self.buckets.insert(id, after);
        }
    }

    fn take(&mut self, take: &Take, counts: &mut Counts, when: Moment) -> Taken {
        let mut ids: Vec<BucketId> = Vec::new();
        let mut settled = Vec::new();
        let mut charges = Vec::new();
        for c in &take.charges {
            let bucket = ids.iter().position(|id| *id == c.bucket).unwrap_or_else(|| {
                ids.push(c.bucket);
                settled.push(self.settle(c.bucket, c.shape, c.unseen, when));
                ids.len() - 1
            });
            charges.push(Charge { bucket, cost: c.cost, enforce: c.enforce });
        }
        let slice = |id| Slice::of(&self.settle(id, Shape::default(), None, when));
        let drafted = counts.check(take, self.generation, slice, when);
        let before = settled.clone();
        let (mut allowed, fits) = bucket::take(&mut settled, &charges);
        if !drafted.checked.allowed {
            (allowed, settled) = (false, before);
        }
        let counts = counts.commit(drafted, allowed, when);
        for (i, id) in ids.iter().enumerate() {
            let took = |(c, fits): (&Charge, &bool)| c.bucket == i && *fits && c.cost != Tokens::ZERO;
            let changed = allowed && charges.iter().zip(&fits).any(took);
            self.put(*id, changed, settled[i]);
        }
        let charges = charges.iter().zip(fits).map(|(c, fits)| {
            let b = &settled[c.bucket];
            TakenCharge { fits, level: b.level(), rate: b.rate(), cap: b.cap() }
        });
        Taken { allowed, now: when.now, charges: charges.collect(), counts }
    }

    fn prepare(&mut self, ask: &Prepare, when: Moment) -> Prepared {
        let before = self.settle(ask.bucket, ask.shape, ask.unseen, when);
        let mut b = before;
        let shrunk = b.shrink(ask.hold_burst, ask.hold_rate);
        b.fence(ask.seq, self.session, when);
        let lent = b.lend(ask.lend_rate, ask.lend_for, when);
        self.put(ask.bucket, before != b, b);
        Prepared {
            leased: shrunk.leased,
            level: b.level(),
            returned: shrunk.returned,
            burst: shrunk.burst,
            rate: shrunk.rate,
            lent,
        }
    }

    fn install(&mut self, record: &Install, when: Moment) -> Tokens {
        let before = self.settle(record.bucket, record.shape, record.unseen, when);
        let mut b = before;
        b.install(&record.grant, self.session, when);
        self.put(record.bucket, before != b, b);
        b.level()
    }
}

/// One random history, in Redis and in the model.
struct Trace<'a> {
    rng: StdRng,
    client: &'a Client,
    scripts: &'a Scripts,
    keys: Keys,
    stem: Stem,
    generation: u64,
    model: Model,
    counts: Counts,
    shapes: Vec<(Shape, Option<Unseen>)>,
    now: i64,
    seq: u64,
}

impl<'a> Trace<'a> {
    async fn begin(client: &'a Client, scripts: &'a Scripts, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let now = 1_700_000_000_000_000 + rng.random_range(0..1_000_000_000_i64);
        let start = Micros(now - rng.random_range(0..20_000_000));
        let generation = Generation { start, full: rng.random(), known: seed.is_multiple_of(2) };
        let keys = Keys::new("twin", "here", None);
        let model = Model { buckets: HashMap::new(), session: 1, generation };
        let stem = Stem::new(&keys, 1, seed + 1);
        let shapes = vec![(Shape::default(), None); 5];
        let (generation, counts) = (seed + 1, Counts::default());
        let mut trace =
            Self { rng, client, scripts, keys, stem, generation, model, counts, shapes, now, seq: 0 };
        (0..5).for_each(|i| trace.reshape(i));
        trace.reallow_all();
        trace.write_meta().await;
        trace
    }

    /// The meta key as attach.lua writes it.
    async fn write_meta(&mut self) {
        let mut meta = Vec::new();
        for number in [self.model.session, self.generation] {
            meta.extend((number as f64).to_le_bytes());
        }
        meta.extend((self.model.generation.start.0 as f64).to_le_bytes());
        meta.extend((self.now as f64).to_le_bytes());
        let Generation { full, known, .. } = self.model.generation;
        meta.push(if full { 1 } else { 2 * u8::from(known) });
        let _: () = self.client.set(self.keys.meta(), Bytes::from(meta), None, None, false).await.unwrap();
        self.stem = Stem::new(&self.keys, self.model.session, self.generation);
    }

    fn amount(&mut self) -> i64 {
        match self.rng.random_range(0..8) {
            0 => 0,
            1 => self.rng.random_range(0..10),
            2 => EXACT_MAX - self.rng.random_range(0..3),
            3 => self.rng.random_range(0..EXACT_MAX),
            _ => self.rng.random_range(0..50_000_000),
        }
    }

    fn reshape(&mut self, i: usize) {
        let mut shape = Shape { rate: Rate(self.amount()), cap: Tokens(self.amount()) };
        if self.rng.random_bool(0.3) {
            shape = Shape::windowed(shape.cap);
        }
        let at = self.now + self.rng.random_range(-10_000_000..10_000_000);
        let unseen =
            self.rng.random_bool(0.4).then(|| Unseen { level: Tokens(self.amount()), at: Micros(at) });
        self.shapes[i] = (shape, unseen);
    }

    fn bucket(&mut self) -> (BucketId, Shape, Option<Unseen>) {
        let i = self.rng.random_range(0..5_usize);
        let (shape, unseen) = self.shapes[i];
        (BucketId([u8::try_from(i).unwrap(); 16]), shape, unseen)
    }

    /// Moves time, and says when the next call happens: what Redis' clock reads, the call's window, and the moment.
    async fn tick(&mut self) -> ((Micros, Micros), Option<Moment>) {
        self.now += match self.rng.random_range(0..6) {
            0 => self.rng.random_range(0..2) * 1_000_000,
            1 => self.rng.random_range(0..3_000),
            2 => self.rng.random_range(0..20_000_000),
            3 => -self.rng.random_range(0..2_000_000),
            4 if self.rng.random_bool(0.05) => 86_400_000_000,
            _ => self.rng.random_range(0..1_000_000),
        };
        let mut lo = self.now + self.rng.random_range(-300_000..300_000);
        let mut hi = lo + self.rng.random_range(0..100_000);
        if self.rng.random() {
            (lo, hi) = (self.now, self.now);
        }
        let text = self.now.to_string();
        let _: () = self.client.set("now", text, None, None, false).await.unwrap();
        let inside = lo - TOLERANCE <= self.now && self.now <= hi + TOLERANCE;
        let now = self.now.clamp(lo, hi);
        let when = Moment { now: Micros(now), late: Micros(now.max(self.now)) };
        ((Micros(lo), Micros(hi)), inside.then_some(when))
    }

    async fn run(&self, script: &fred::types::scripts::Script, call: Call) -> Result<Bytes, Fault> {
        run(self.client, script, call).await
    }

    async fn takes(&mut self) {
        let (window, when) = self.tick().await;
        let counted = self.rng.random();
        let mut batch = if counted { Batch::counted() } else { Batch::default() };
        let (mut takes, mut leased) = (Vec::new(), Vec::new());
        for _ in 0..self.rng.random_range(1..6) {
            let mut take = Take::default();
            if counted {
                let claims = self.rng.random_range(0..4);
                take.counts = (0..claims).map(|_| self.claim(&mut leased)).collect();
            }
            for _ in 0..self.rng.random_range(0..5) {
                let (bucket, shape, unseen) = self.bucket();
                let sign = if self.rng.random_bool(0.2) { -1 } else { 1 };
                let cost = match self.rng.random_range(0..10) {
                    0 => 0,
                    1 => i64::MAX,
                    _ => self.amount() / 3,
                };
                let (cost, enforce) = (Tokens(sign * cost), self.rng.random_bool(0.7));
                take.charges.push(TakeCharge { bucket, shape, unseen, cost, enforce });
            }
            assert!(batch.push(&take));
            takes.push(take);
        }
        let (script, call, sizes) = batch.into_call(&self.stem, window);
        assert_eq!(script == TakeScript::Counts, counted);
        let script = if counted { &self.scripts.take_counts } else { &self.scripts.take };
        let answer = self.run(script, call).await;
        let taken = answer.and_then(|answer| wire::taken(answer, &sizes));
        match when {
            None => assert_eq!(taken.unwrap_err(), Fault::Clock),
            Some(when) => {
                for (take, taken) in takes.iter().zip(taken.unwrap()) {
                    let expected = self.model.take(take, &mut self.counts, when);
                    self.counts.note(take, &taken);
                    assert_eq!(taken.allowed, expected.allowed, "{take:?}");
                    assert_eq!(taken.now, expected.now);
                    if take.is_empty() {
                        assert!(taken.allowed);
                    }
                    assert_eq!(taken.charges, expected.charges, "{take:?}");
                    assert_eq!(taken.counts, expected.counts, "{take:?} at {when:?}");
                }
                self.counts.forget();
            }
        }
    }

    async fn prepares(&mut self) {
        let (window, when) = self.tick().await;
        let mut asks = Vec::new();
        for _ in 0..self.rng.random_range(0..4) {
            let (bucket, shape, unseen) = self.bucket();
            let (hold_burst, hold_rate) = (Tokens(self.amount() / 2), Rate(self.amount() / 2));
            let seq = self.rng.random_range(1..6);
            let lend_rate = Rate(hold_rate.0 / 2);
            let lends = seq % 3 == 0 && !shape.is_windowed();
            let lend_for = if lends { Micros(hold_burst.0 % 5_000_000 + 1) } else { Micros::ZERO };
            let permits = None;
            asks.push(Prepare {
                bucket,
                shape,
                unseen,
                seq,
                hold_burst,
                hold_rate,
                permits,
                lend_rate,
                lend_for,
            });
        }
        let answer = self.run(&self.scripts.prepare, self.stem.prepare(window, &asks)).await;
        let prepared = answer.and_then(|answer| wire::prepared(answer, asks.len()));
        match when {
            None => assert_eq!(prepared.unwrap_err(), Fault::Clock),
            Some(when) => {
                let expected: Vec<_> = asks.iter().map(|ask| self.model.prepare(ask, when)).collect();
                // One bucket that comes twice is settled once: its second answer is of the same moment.
                assert_eq!(prepared.unwrap(), (when.now, expected));
            }
        }
    }

    async fn installs(&mut self) {
        let (window, when) = self.tick().await;
        let mut records = Vec::new();
        for _ in 0..self.rng.random_range(0..4) {
            let (bucket, shape, unseen) = self.bucket();
            // Some end exactly at a later reading of the clock.
            let after = match self.rng.random() {
                true => self.rng.random_range(0..4) * 1_000_000,
                false => self.rng.random_range(-1_000_000..10_000_000),
            };
            self.seq += self.rng.random_range(0..2_u64);
            let seq = self.seq - self.rng.random_range(0..3_u64).min(self.seq);
            let grant = Grant {
                seq,
                push: self.rng.random_range(0..3),
                granted: Tokens(self.amount()),
                burst: Tokens(self.amount()),
                rate: Rate(self.amount()),
                deadline: Micros(self.now + after),
            };
            records.push(Install { bucket, shape, unseen, grant, permits: None });
        }
        let answer = self.run(&self.scripts.install, self.stem.install(window, &records)).await;
        let levels = answer.and_then(|answer| wire::installed(answer, records.len()));
        match when {
            None => assert_eq!(levels.unwrap_err(), Fault::Clock),
            Some(when) => {
                let expected: Vec<_> = records.iter().map(|r| self.model.install(r, when)).collect();
                assert_eq!(levels.unwrap(), expected);
                self.check_expiry().await;
            }
        }
    }

    async fn check_expiry(&self) {
        let buckets = self.model.buckets.keys();
        let keys =
            buckets.map(|id| if counts::is_one(id) { self.stem.slice(id) } else { self.stem.bucket(id) });
        for key in keys.chain(self.counts.stored().map(|id| self.stem.bucket(id))) {
            let left: i64 = self.client.pttl(key).await.unwrap();
            // Counts expire within the test, by the server's clock: -2 says so. -1 would be for ever.
            assert!(left > 0 || left == -2, "{left}");
        }
    }

    async fn step(&mut self) {
        match self.rng.random_range(0..20) {
            0..10 => self.takes().await,
            10..12 => self.prepares().await,
            12 => self.prepares_permits().await,
            13..15 => self.installs().await,
            15 | 16 => self.installs_permits().await,
            17 | 18 => {
                let i = self.rng.random_range(0..5_usize);
                self.reshape(i);
                self.reallow_one();
            }
            _ => {
                if self.rng.random_bool(0.3) {
                    self.model.session += 1;
                } else {
                    self.model.generation.full = true;
                }
                self.write_meta().await;
            }
        }
    }
}

#[tokio::test]
async fn the_scripts_equal_their_twin() {
    let (_server, client) = Server::start().await;
    let scripts = Scripts::with_clock("local TIME = tonumber(redis.call('GET', 'now'))");
    let (mut fits, mut renewals, mut refused) = ([[0; 2]; 3], [0; 2], 0);
    let (mut cut_short, mut kept) = (0, 0);
    let traces = std::env::var("QUORATE_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(TRACES);
    for seed in 0..traces {
        let mut trace = Trace::begin(&client, &scripts, seed).await;
        println!("seed {seed}");
        for _ in 0..STEPS {
            trace.step().await;
        }
        assert!(!trace.model.buckets.is_empty());
        fits.iter_mut().zip(trace.counts.fits).for_each(|(all, one)| {
            (all[0], all[1]) = (all[0] + one[0], all[1] + one[1]);
        });
        refused += trace.counts.refused;
        (cut_short, kept) = (cut_short + trace.counts.cut_short, kept + trace.counts.kept);
        renewals = [renewals[0] + trace.counts.renewals[0], renewals[1] + trace.counts.renewals[1]];
    }
    println!("denied and fitted, by kind: {fits:?}; renewals: {renewals:?}, {refused} of them refused");
    assert!(fits.iter().all(|one| one.iter().all(|n| *n > 200)));
    assert!(renewals.iter().all(|n| *n > 50) && refused > 0);
    println!("permits that end with a lease: {cut_short}; slices that were kept for holders: {kept}");
    assert!(cut_short > 20 && kept > 5);
}

#[tokio::test]
async fn another_session_or_none_is_fenced() {
    let (_server, client) = Server::start().await;
    let scripts = Scripts::with_clock("local TIME = tonumber(redis.call('GET', 'now'))");
    let mut trace = Trace::begin(&client, &scripts, 1).await;
    let (window, _) = trace.tick().await;
    let others = Stem::new(&trace.keys, 2, trace.generation);
    let answer = trace.run(&scripts.prepare, others.prepare(window, &[])).await.unwrap();
    assert_eq!(wire::prepared(answer, 0).unwrap_err(), Fault::Fenced);
    let answer = trace.run(&scripts.beat, others.beat(Micros::ZERO, wire::Say::Full)).await.unwrap();
    assert_eq!(wire::beaten(answer).unwrap_err(), Fault::Fenced);
    let _: () = client.flushall(false).await.unwrap();
    let answer = trace.run(&scripts.beat, trace.stem.beat(Micros::ZERO, wire::Say::Nothing)).await;
    assert!(answer.is_err() || wire::beaten(answer.unwrap()).unwrap_err() == Fault::Fenced);
}

#[tokio::test]
async fn a_key_of_a_window_is_kept_until_it_ends() {
    let (_server, client) = Server::start().await;
    let scripts = Scripts::with_clock("local TIME = tonumber(redis.call('GET', 'now'))");
    let mut trace = Trace::begin(&client, &scripts, 3).await;
    trace.model.generation = Generation { start: Micros(trace.now - 1_000_000), full: false, known: true };
    trace.write_meta().await;
    let _: () = client.set("now", trace.now.to_string(), None, None, false).await.unwrap();
    let window = (Micros(trace.now), Micros(trace.now));
    let shape = Shape::windowed(Tokens::whole(5));
    for (i, (began_ago, ends_in, level)) in
        [(999_999, 60_000_000, 5), (1_000_000, 60_000_000, 0), (0, 2_000_000, 5)].into_iter().enumerate()
    {
        let bucket = BucketId([u8::try_from(i).unwrap(); 16]);
        let turn = Turn { start: Micros(trace.now - began_ago), end: Micros(trace.now + ends_in) };
        let unseen = Some(Unseen::of_window(turn));
        let take = |cost| TakeCharge { bucket, shape, unseen, cost: Tokens::whole(cost), enforce: true };
        for cost in 0..=level {
            let mut batch = Batch::default();
            batch.push(&Take { charges: vec![take(i64::from(cost > 0))], ..Take::default() });
            let (_, call, sizes) = batch.into_call(&trace.stem, window);
            let answer = trace.run(&scripts.take, call).await.unwrap();
            let seen = wire::taken(answer, &sizes).unwrap()[0].charges[0];
            assert_eq!(
                seen,
                TakenCharge {
                    fits: true,
                    level: Tokens::whole(level - cost),
                    rate: Rate(-1),
                    cap: shape.cap
                }
            );
        }
        let left: i64 = client.pttl(trace.stem.bucket(&bucket)).await.unwrap();
        let expected = if level > 0 { (ends_in + bucket::KEEP_MARGIN.0) / 1_000 } else { -2 };
        assert!((expected - 100..=expected + 1).contains(&left), "{left} of {expected}");
    }
}

#[tokio::test]
async fn a_key_is_kept_until_it_is_full() {
    let (_server, client) = Server::start().await;
    let scripts = Scripts::with_clock("local TIME = tonumber(redis.call('GET', 'now'))");
    let mut trace = Trace::begin(&client, &scripts, 3).await;
    trace.model.generation.full = true;
    trace.write_meta().await;
    let _: () = client.set("now", trace.now.to_string(), None, None, false).await.unwrap();
    let window = (Micros(trace.now), Micros(trace.now));
    let seconds = |s| Micros::seconds(s).0 / 1_000;
    for (i, (rate, expected)) in
        [(10, seconds(10)), (1, seconds(100)), (0, bucket::KEEP_MAX.0 / 1_000)].into_iter().enumerate()
    {
        let bucket = BucketId([u8::try_from(i).unwrap(); 16]);
        let shape = Shape { rate: Rate::per_second(rate), cap: Tokens::whole(100) };
        let cost = Tokens::whole(100);
        let mut batch = Batch::default();
        let charges = vec![TakeCharge { bucket, shape, unseen: None, cost, enforce: true }];
        batch.push(&Take { charges, ..Take::default() });
        let (_, call, sizes) = batch.into_call(&trace.stem, window);
        let answer = trace.run(&scripts.take, call).await.unwrap();
        assert!(wire::taken(answer, &sizes).unwrap()[0].allowed);
        let left: i64 = client.pttl(trace.stem.bucket(&bucket)).await.unwrap();
        let margin = bucket::KEEP_MARGIN.0 / 1_000;
        assert!(left > expected && left <= expected + margin + 1, "{left} of {expected}");
        // A lease keeps it at least until no record of it can come a second time.
        let deadline = Micros(trace.now) + Micros::seconds(50);
        let (granted, burst) = (Tokens::whole(300), Tokens::whole(300));
        let grant = Grant { seq: 1, push: 0, granted, burst, rate: Rate::ZERO, deadline };
        let install = Install { bucket, shape, unseen: None, grant, permits: None };
        let answer = trace.run(&scripts.install, trace.stem.install(window, &[install])).await.unwrap();
        assert_eq!(wire::installed(answer, 1).unwrap(), [Tokens::whole(300)]);
        let left: i64 = client.pttl(trace.stem.bucket(&bucket)).await.unwrap();
        assert!(left > seconds(50) && left <= seconds(50) + margin + 1, "{left}");
    }
}
