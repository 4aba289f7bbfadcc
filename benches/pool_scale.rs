//! What a million leased buckets cost in the pool: `cargo bench --bench pool_scale`, under a minute. (Or another number:
//! `cargo bench --bench pool_scale -- 100000`.)
//!
//! Memory a bucket, the size of a snapshot; how long it takes to copy the pool for one (nothing is applied meanwhile), to write it and to
//! read it back; and how long entries take that are applied while it is written.
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

use quorate::quota::amount::{Micros, Rate, Tokens};
use quorate::quota::policy::*;
use quorate::quota::pool::*;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Asks in an entry.
const BATCH: usize = 256;

fn main() {
    // The test runner and others list targets this way; there is nothing to list.
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    let many = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(1_000_000);
    let before = resident();
    let began = Instant::now();
    let mut world = World::new(many);
    world.ask_all();
    let bytes = resident().saturating_sub(before);
    println!("{many} leased buckets: {} bytes each, asked for in {:?}", bytes / many, began.elapsed());
    let usual = world.apply_for(Duration::from_secs(2), || false);
    println!("entries of {BATCH} asks, {:?} (p50, p99, longest)", usual);
    let began = Instant::now();
    let copy = world.pool.clone();
    println!("copied for a snapshot in {:?}", began.elapsed());
    let (done, is_done) = std::sync::mpsc::channel();
    let began = Instant::now();
    let writer = std::thread::spawn(move || {
        let bytes = postcard::to_stdvec(&copy).expect("it can be written");
        let took = began.elapsed();
        done.send(()).expect("somebody waits");
        (bytes, took)
    });
    let meanwhile = world.apply_for(Duration::from_secs(60), || is_done.try_recv().is_ok());
    let (bytes, took) = writer.join().expect("a snapshot");
    println!("written in {took:?}: {} bytes, {} a bucket", bytes.len(), bytes.len() / many);
    println!("entries meanwhile, {meanwhile:?} (p50, p99, longest)");
    let began = Instant::now();
    let read: Pool = postcard::from_bytes(&bytes).expect("it can be read");
    println!("read back in {:?}", began.elapsed());
    assert_eq!(read.bucket_count(), many);
}

struct World {
    pool: Pool,
    many: usize,
    seq: u64,
    next: usize,
}

impl World {
    fn new(many: usize) -> Self {
        let policy = Policy {
            name: "p".into(),
            domain: "bench".into(),
            matches: vec![KeyMatch { key: "k".into(), value: ValueMatch::Any }],
            limit: Limit::TokenBucket(TokenBucket { amount: 100, per: Unit::Second, burst: 100 }),
            mode: Mode::Strict,
            reserve: Reserve::default(),
            weights: BTreeMap::new(),
            wait: Micros::ZERO,
            on_store_failure: OnStoreFailure::Deny,
            shadow: false,
        };
        let regions: Vec<RegionName> = ["a", "b", "c"].map(RegionName::from).to_vec();
        let mut ops = vec![Op::Found { regions, policies: vec![policy] }];
        ops.extend((0..3).map(|i| Op::Join(Join { region: RegionId(i), previous: 0, nonce: 1 })));
        let mut pool = Pool::default();
        pool.apply(1, &Entry { stamp: Stamp { term: 1, tau: Micros::ZERO }, ops });
        Self { pool, many, seq: 0, next: 0 }
    }

    fn ask_all(&mut self) {
        for _ in 0..self.many.div_ceil(BATCH) {
            self.apply();
        }
    }

    /// The next entry; takes this long.
    fn apply(&mut self) -> Duration {
        self.seq += 1;
        let stamp = Stamp { term: 1, tau: self.pool.tau() + Micros(10) };
        let ask = |n: usize| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&(n as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes());
            Op::Ask(Ask {
                region: RegionId(0),
                epoch: 1,
                bucket: BucketId(id),
                seq: self.seq,
                demand: Rate::per_second(50),
                want: Tokens::whole(50),
                quantum: Tokens::whole(1),
                seen: stamp,
                ..Ask::default()
            })
        };
        let ops = (0..BATCH).map(|i| ask((self.next + i) % self.many)).collect();
        self.next = (self.next + BATCH) % self.many;
        let entry = Entry { stamp, ops };
        let began = Instant::now();
        let applied = self.pool.apply(1, &entry);
        let took = began.elapsed();
        assert!(applied.breached.is_empty() && !applied.records.is_empty());
        took
    }

    fn apply_for(&mut self, most: Duration, done: impl Fn() -> bool) -> [Duration; 3] {
        let began = Instant::now();
        let mut took = vec![self.apply()];
        while began.elapsed() < most && !done() {
            took.push(self.apply());
        }
        took.sort_unstable();
        let at = |percent: usize| took[(took.len() - 1) * percent / 100];
        [at(50), at(99), at(100)]
    }
}

/// Resident memory in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("resident pages") * 4_096
}
