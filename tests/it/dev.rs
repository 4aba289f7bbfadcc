//! `quorate dev`: three regions in one process, with nothing to install, as a newcomer first meets them.

use crate::support::client::Api;
use crate::support::daemon::QUORATE;
use crate::support::load::{Ask, History, flood};
use crate::support::meter::Bound;
use crate::support::process::Process;
use crate::support::{eventually, free_address, hold};
use rustix::process::Signal;
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Command;
use std::time::{Duration, Instant};

/// Region i listens at the base and ten times i: +0 HTTP, +1 gRPC, +2 peer, +3 admin. Lines are cut at the base and nine.
fn free_base_port() -> u16 {
    let is_free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let bases = std::iter::repeat_with(|| free_address().port()).take(1_000);
    let mut free = bases.filter(|base| (0..3).all(|i| (0..10).all(|n| is_free(base + 10 * i + n))));
    free.next().expect("thirty free ports in a row")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dev_starts_three_regions_that_share_one_limit() {
    const TIME: Duration = Duration::from_secs(8);
    let base = free_base_port();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(QUORATE);
    command.args(["dev", "--base-port", &base.to_string()]);
    let started = Instant::now();
    let mut dev = Process::start("quorate-dev", folder.path(), &mut command);
    let apis: Vec<Api> =
        (0..3).map(|i| Api::new(SocketAddr::from((Ipv4Addr::LOCALHOST, base + 10 * i)))).collect();
    eventually("dev says what to try next", Duration::from_secs(20), || async {
        hold(dev.log().contains("check --addr"), || dev.log())
    })
    .await;
    println!("ready {:?} after the start", started.elapsed());
    for api in &apis {
        assert!(dev.log().contains(&api.url()), "the table names {}: {}", api.url(), dev.log());
    }

    // The example's first policy: strict, 10/s, burst 100.
    for (name, regions) in [("everywhere", &apis[..]), ("one region", &apis[2..])] {
        let history = History::default();
        let start = Instant::now();
        flood(&Ask::new(name, "api", &[("tenant", name)]), regions, 300, 24, TIME, &history).await;
        Bound::per_second(10, 100).must_hold(&history.admitted(name));
        let admitted = history.count(name, None, 200, start, start + TIME);
        println!("{name}: {admitted} of 180 admitted in {TIME:?}; {:?}", history.statuses(name));
        assert!(
            admitted * 10 >= 180 * 9,
            "{name}: {admitted} of 180; by second:\n{}",
            history.by_second(name)
        );
    }
    cuts_and_joins(base).await;
    dev.signal(Signal::INT);
    assert_eq!(dev.ended(Duration::from_secs(10)).await.code(), Some(0), "Ctrl-C stops it: {}", dev.log());
}

/// A region is cut off from both others, they are not from each other, and it is joined again.
async fn cuts_and_joins(base: u16) {
    let at = |port: u16| Api::new(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let (lines, first, last) = (at(base + 9), at(base + 3), at(base + 23));
    let reached = |admin: Api| async move {
        let state = admin.get("/v1/state").await?.json();
        let peers = state["peers"].as_array().expect("peers").clone();
        let reached: Vec<String> = peers
            .iter()
            .filter(|peer| peer["reachable"] == true)
            .map(|peer| peer["region"].as_str().expect("a name").to_owned())
            .collect();
        Ok::<_, String>(reached)
    };
    for (what, by_first, by_last) in [("cut", 0, 1), ("join", 2, 2)] {
        let answer = lines.post(&format!("/{what}/us-east"), &Value::Null).await.expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text);
        eventually(&format!("{what}: the regions see it"), Duration::from_secs(30), || async {
            let (a, b) = (reached(first.clone()).await?, reached(last.clone()).await?);
            hold((a.len(), b.len()) == (by_first, by_last), || {
                format!("us-east reaches {a:?}, ap-south {b:?}")
            })
        })
        .await;
    }
    let answer = lines.post("/cut/nowhere", &Value::Null).await.expect("an answer");
    assert_eq!(answer.status, 404, "{}", answer.text);
}
