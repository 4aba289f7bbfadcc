//! How much of a limit three regions use: `cargo bench --bench utilisation`, about six minutes.
//!
//! Three `quorate serve` processes, each with a Redis of its own, with links of 80 ms round trip between them. One strict
//! limit, and a steady demand of one and a half times as much, spread over the regions in different ways. What is
//! printed is what was admitted, as a share of what the limit allows, and how long the limit takes to follow when all
//! demand moves to another region. The bound is checked over every window of every run.
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/it/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};
use support::client::Api;
use support::cluster::{Cluster, Plan, REGIONS};
use support::load::{Ask, History, Steady};
use support::meter::Bound;

const RATE: u32 = 1_000;
const BURST: u32 = 2_000;
const POLICIES: &str = "
policies:
  - { name: p, domain: api, match: [ { key: tenant } ], limit: { rate: 1000/s, burst: 2000 }, mode: strict }
";
const RTT: Duration = Duration::from_millis(80);
/// How the demand, 1,500 a second, is spread.
const SPREADS: [(&str, [u64; 3]); 3] =
    [("uniform", [500, 500, 500]), ("80/10/10", [1_200, 150, 150]), ("all in one", [1_500, 0, 0])];
/// The burst is spent and the shares have settled after this ...
const WARM_UP: Duration = Duration::from_secs(10);
/// ... and then this is measured.
const MEASURED: Duration = Duration::from_secs(60);
/// How long a move is watched.
const WATCHED: Duration = Duration::from_secs(20);

fn main() {
    // The test runner and others list targets this way; there is nothing to list.
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime").block_on(measure());
}

async fn measure() {
    let cluster = Cluster::start(Plan { policies: POLICIES.to_owned(), rtt: RTT, ..Plan::default() }).await;
    let regions = cluster.apis();
    println!("strict, {RATE}/s, burst {BURST}; demand 1,500/s; three regions, {RTT:?} apart");
    println!("{:<12} {:>14}   by region", "demand", "admitted/limit");
    for (name, rates) in SPREADS {
        spread(name, rates, &regions).await;
    }
    println!("{:<12} {:>14}", "all moves", "seconds to 95%");
    moved("moved", &regions).await;
}

async fn spread(name: &'static str, rates: [u64; 3], regions: &[Api]) {
    let history = History::default();
    let load = Steady::start(&Ask::new(name, "api", &[("tenant", name)]), regions, &rates, &history);
    tokio::time::sleep(WARM_UP).await;
    let from = Instant::now();
    tokio::time::sleep(MEASURED).await;
    let to = Instant::now();
    drop(load);
    let ideal = f64::from(RATE) * (to - from).as_secs_f64();
    let share = |region: Option<usize>| 100.0 * history.count(name, region, 200, from, to) as f64 / ideal;
    let by_region: Vec<String> = (0..3).map(|r| format!("{} {:.1}%", REGIONS[r], share(Some(r)))).collect();
    println!("{name:<12} {:>13.1}%   {}", share(None), by_region.join(", "));
    Bound::per_second(RATE, BURST).must_hold(&history.admitted(name));
}

async fn moved(name: &'static str, regions: &[Api]) {
    let history = History::default();
    let load = Steady::start(&Ask::new(name, "api", &[("tenant", name)]), regions, &[1_500, 0, 0], &history);
    tokio::time::sleep(WARM_UP + WARM_UP).await;
    load.set(0, 0);
    load.set(1, 1_500);
    let at = Instant::now();
    tokio::time::sleep(WATCHED).await;
    drop(load);
    // The first moment from which a whole second has 95% of the rate.
    let second = Duration::from_secs(1);
    let enough =
        |start: &Instant| history.admitted_in(name, 1, *start, *start + second) * 100 >= RATE as usize * 95;
    let starts =
        (0..(WATCHED - second).as_millis()).step_by(50).map(|ms| at + Duration::from_millis(ms as u64));
    match starts.into_iter().find(enough) {
        Some(start) => println!("{:<12} {:>14.2}", "", (start - at).as_secs_f64()),
        None => println!("{:<12} {:>14}", "", format!("over {}", WATCHED.as_secs())),
    }
    Bound::per_second(RATE, BURST).must_hold(&history.admitted(name));
}
