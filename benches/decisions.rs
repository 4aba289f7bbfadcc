//! What a decision costs: `cargo bench --bench decisions`, about two minutes.
//!
//! One `quorate serve`, asked over Envoy's rate limit service by 8 connections with 16 requests under way on each, with one
//! hot bucket or many cold ones, with a Redis and without. Printed are decisions a second when saturated, and then, at a
//! steady 2,000 a second, how long they take. Client, daemon and Redis share this machine's cores, so **CPU a decision**
//! (user and system, of the daemon and of Redis) is the figure to compare; the rate depends on the client too.
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/it/support/mod.rs"]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::client::{Grpc, descriptor, rls_request};
use support::daemon::{Daemon, Settings};
use support::redis::Redis;
use tokio::task::JoinSet;

/// Generous, so that what is measured is deciding and not denying.
const POLICIES: &str = "
policies:
  - { name: p, domain: api, match: [ { key: tenant } ], limit: { rate: 1000000/s, burst: 4000000000 }, mode: split }
";
const CONNECTIONS: usize = 8;
const STREAMS: usize = 16;
const SATURATED: Duration = Duration::from_secs(10);
const STEADY: Duration = Duration::from_secs(10);
const STEADY_RATE: u64 = 2_000;
const MANY: u64 = 1_000_000;

/// A daemon and, if it has one, its Redis.
struct Server {
    daemon: Daemon,
    redis: Option<Redis>,
}

fn main() {
    // The test runner and others list targets this way; there is nothing to list.
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(measure());
}

async fn measure() {
    println!(
        "{:<10} {:>9} {:>12} {:>22} {:>28}",
        "store", "buckets", "saturated/s", "CPU µs (Redis)", "p50, p99 µs at 2,000/s"
    );
    for with_redis in [true, false] {
        let redis = if with_redis { Some(Redis::start().await) } else { None };
        let url = redis.as_ref().map(Redis::url);
        let daemon = Daemon::start(Settings { redis: url, ..Settings::alone("", POLICIES) }).await;
        let server = Server { daemon, redis };
        for buckets in [1, MANY] {
            row(&server, buckets).await;
        }
    }
}

async fn row(server: &Server, buckets: u64) {
    let (daemon_before, redis_before) = server.cpu();
    let start = Instant::now();
    let decided = saturate(&server.daemon.grpc_url(), buckets).await;
    let took = start.elapsed();
    let (daemon_after, redis_after) = server.cpu();
    let each = |cpu: Duration| cpu.as_secs_f64() * 1e6 / decided as f64;
    let (of_daemon, of_redis) = (each(daemon_after - daemon_before), each(redis_after - redis_before));
    let (p50, p99) = steadily(&server.daemon.grpc_url(), buckets).await;
    println!(
        "{:<10} {buckets:>9} {:>12.0} {:>22} {:>28}",
        if server.redis.is_some() { "Redis" } else { "embedded" },
        decided as f64 / took.as_secs_f64(),
        format!("{:.1} ({of_redis:.1})", of_daemon + of_redis),
        format!("{} , {}", p50.as_micros(), p99.as_micros()),
    );
}

impl Server {
    fn cpu(&self) -> (Duration, Duration) {
        (self.daemon.cpu(), self.redis.as_ref().map(Redis::cpu).unwrap_or_default())
    }
}

/// As many as there can be; returns how many were answered.
async fn saturate(url: &str, buckets: u64) -> u64 {
    let decided = Arc::new(AtomicU64::new(0));
    let end = Instant::now() + SATURATED;
    let mut tasks = JoinSet::new();
    for connection in 0..CONNECTIONS {
        let grpc = Grpc::connect(url).await;
        for stream in 0..STREAMS {
            let (mut grpc, decided) = (grpc.clone(), decided.clone());
            let mut tenants = Tenants::new(buckets, (connection * STREAMS + stream) as u64);
            tasks.spawn(async move {
                while Instant::now() < end {
                    ask(&mut grpc, &mut tenants).await;
                    decided.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("a caller does not panic");
    }
    decided.load(Ordering::Relaxed)
}

/// At a steady rate, whether they are answered or not; returns the median and the 99th percentile, counted from when
/// each was due.
async fn steadily(url: &str, buckets: u64) -> (Duration, Duration) {
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(Grpc::connect(url).await);
    }
    let mut tenants = Tenants::new(buckets, 0xfeed);
    let mut tasks = JoinSet::new();
    let start = tokio::time::Instant::now();
    let gap = Duration::from_secs(1) / u32::try_from(STEADY_RATE).expect("a small number");
    for (n, grpc) in (0_u32..).zip(connections.iter().cycle()) {
        let due = start + gap * n;
        if due >= start + STEADY {
            break;
        }
        tokio::time::sleep_until(due).await;
        let (mut grpc, mut tenant) = (grpc.clone(), Tenants::new(buckets, tenants.next()));
        // The timer's grain is a millisecond: count from when it was sent, which is at most that late.
        let sent = Instant::now();
        tasks.spawn(async move {
            ask(&mut grpc, &mut tenant).await;
            sent.elapsed()
        });
    }
    let mut times = tasks.join_all().await;
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

async fn ask(grpc: &mut Grpc, tenants: &mut Tenants) {
    let tenant = tenants.next().to_string();
    let answer =
        grpc.ask(rls_request("api", vec![descriptor(&[("tenant", &tenant)])])).await.expect("an answer");
    assert_eq!(answer.statuses.len(), 1);
}

/// Tenants in an order that repeats from run to run (a linear congruential generator, Knuth's MMIX constants).
struct Tenants {
    buckets: u64,
    state: u64,
}

impl Tenants {
    fn new(buckets: u64, seed: u64) -> Self {
        Self { buckets, state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    fn next(&mut self) -> u64 {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33) % self.buckets
    }
}
