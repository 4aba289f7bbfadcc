//! All regions are restarted, one after the other, under load; a daemon that stops gives back what it has been lent; and a second daemon
//! for a region is refused.

use crate::support::client::{Api, Grpc, descriptor, rls_request};
use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::daemon::{Daemon, Settings};
use crate::support::load::{Ask, Event, History, Steady};
use crate::support::meter::Bound;
use crate::support::redis::Redis;
use crate::support::{eventually, free_address, hold};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use futures::future::join_all;
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const POLICIES: &str = "
policies:
  - { name: strict, domain: strict, match: [ { key: tenant } ], limit: { rate: 200/s, burst: 200 }, mode: strict, reserve: 20% }
  - { name: split, domain: split, match: [ { key: tenant } ], limit: { rate: 90/s, burst: 90 }, mode: split }
";
/// Requests a second of either policy, all regions together.
const RATE: u64 = 90;

/// Sends each policy's requests to the regions that are ready, as a load balancer does that looks at `/readyz`.
async fn balance(admins: Vec<Api>, loads: Vec<Steady>, stop: Arc<AtomicBool>) {
    while !stop.load(Ordering::Relaxed) {
        let looks = admins
            .iter()
            .map(|admin| async { admin.get("/readyz").await.is_ok_and(|answer| answer.status == 200) });
        let ready = join_all(looks).await;
        let many = u64::try_from(ready.iter().filter(|ready| **ready).count()).unwrap().max(1);
        for load in &loads {
            for (region, ready) in ready.iter().enumerate() {
                load.set(region, if *ready { RATE / many } else { 0 });
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A machine that is short of time keeps Redis from answering within half a second: no restart's doing, which would be told at once.
fn waited_for_redis(event: &Event) -> bool {
    event.status == 503
        && event.reason == "store_unavailable"
        && event.answered - event.sent >= Duration::from_millis(500)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn regions_restart_one_by_one_and_every_request_is_answered() {
    let plan = Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(80), ..Plan::default() };
    let mut cluster = Cluster::start_with(plan, "drain_wait: 3s\n").await;
    let history = History::default();
    let loads = ["strict", "split"].map(|name| {
        Steady::start(&Ask::new(name, name, &[("tenant", "7")]), &cluster.apis(), &[RATE / 3; 3], &history)
    });
    let stop = Arc::new(AtomicBool::new(false));
    let admins = cluster.daemons.iter().map(Daemon::admin).collect();
    let balancer = tokio::spawn(balance(admins, loads.into(), Arc::clone(&stop)));
    let busy = |from: Instant| {
        let history = history.clone();
        async move {
            let (now, least) = (Instant::now(), 100);
            let admitted = history.count("strict", None, 200, from, now);
            hold(admitted >= least, || format!("{admitted}; by second:\n{}", history.by_second("strict")))
        }
    };
    for region in 0..REGIONS.len() {
        let from = Instant::now();
        eventually("the load goes on", Duration::from_secs(30), || busy(from)).await;
        let daemon = &mut cluster.daemons[region];
        let (admin, grpc) = (daemon.admin(), daemon.grpc_url());
        let stopping = async {
            // It says so first, and serves all the same.
            eventually("it is not ready", Duration::from_secs(2), || async {
                let answer = admin.get("/readyz").await?;
                hold(answer.status == 503 && answer.text.contains("told to stop"), || answer.text)
            })
            .await;
            let mut late = Grpc::connect(&grpc).await;
            let answer = late.ask(rls_request("split", vec![descriptor(&[("tenant", "8")])])).await;
            assert!(answer.is_ok(), "a connection that comes late is served: {answer:?}");
        };
        let (status, ()) = tokio::join!(daemon.stop(), stopping);
        assert!(status.success(), "{status}");
        daemon.spawn();
        daemon.ready().await;
        cluster.agreed_leader(Duration::from_secs(30), &[0, 1, 2]).await;
    }
    let from = Instant::now();
    eventually("the load goes on", Duration::from_secs(30), || busy(from)).await;
    stop.store(true, Ordering::Relaxed);
    balancer.await.expect("the balancer does not panic");
    // Whatever is on its way is answered.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for name in ["strict", "split"] {
        println!("{name}: {:?}", history.statuses(name));
        let all: Vec<Event> = history.events().into_iter().filter(|e| e.name == name).collect();
        let bad = all.iter().filter(|e| !matches!(e.status, 200 | 429) && !waited_for_redis(e)).count();
        assert_eq!(bad, 0, "{name}: {:?}\n{}", history.statuses(name), history.denials(name));
        let slow = all.iter().filter(|e| waited_for_redis(e)).count();
        assert!(slow * 100 <= all.len(), "{slow} of {} waited for Redis in vain", all.len());
    }
    Bound::per_second(200, 200).must_hold(&history.admitted("strict"));
    Bound::per_second(90, 90).must_hold(&history.admitted("split"));
}

async fn ends(daemon: &mut Daemon, why: &str) {
    daemon.spawn();
    let ended = daemon.ended(Duration::from_secs(30)).await;
    assert_eq!(ended.code(), Some(2), "{}", daemon.log());
    assert!(daemon.log().contains(why), "{}", daemon.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_daemon_for_a_region_is_refused() {
    let plan = Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(20), ..Plan::default() };
    let cluster = Cluster::start(plan).await;
    let redis = Redis::start().await;
    let known = cluster.daemons.iter().zip(REGIONS).map(|(d, name)| (name.to_owned(), d.peer_url()));
    let peer = free_address();
    let mut second = Daemon::down(Settings {
        region: REGIONS[0].to_owned(),
        regions: known
            .map(
                |(name, url)| if name == REGIONS[0] { (name, format!("http://{peer}")) } else { (name, url) },
            )
            .collect(),
        peer,
        ..Settings::alone(&redis.url(), POLICIES)
    });
    // With a folder of its own: the others know the first.
    ends(&mut second, "one region is one daemon, and a second one is a region of its own").await;
    // With the first one's: it has its log open.
    std::fs::remove_dir_all(second.data_dir()).expect("its folder goes");
    std::os::unix::fs::symlink(cluster.daemons[0].data_dir(), second.data_dir()).expect("a link");
    ends(&mut second, "stop what else uses it (one region is one daemon)").await;
    let answer = cluster.daemons[0].api().check("split", &[("tenant", "7")], 1).await;
    assert_eq!(answer.status, 200, "the first one has not noticed: {}", answer.text);
}

/// Slow, and without a reserve: what is lent and does not come back is lost for the day.
const SLOW: &str = "
policies:
  - { name: slow, domain: slow, match: [ { key: tenant } ], limit: { rate: 10/d, burst: 100 }, mode: strict, reserve: 0% }
";
const TENANTS: usize = 4_000;
/// Requests at once.
const LANES: usize = 128;

/// Asks once for each of these tenants; returns those that were admitted.
async fn each(daemon: &Daemon, tenants: &[usize], cost: u32) -> Vec<usize> {
    let url = daemon.grpc_url();
    let connections = join_all((0..4).map(|_| Grpc::connect(&url))).await;
    let lanes = (0..LANES).map(|lane| {
        let mut grpc = connections[lane % connections.len()].clone();
        async move {
            let mut admitted = Vec::new();
            for tenant in tenants.iter().skip(lane).step_by(LANES) {
                let mut request = rls_request("slow", vec![descriptor(&[("tenant", &tenant.to_string())])]);
                request.hits_addend = cost;
                let answer = grpc.ask(request).await;
                if answer.is_ok_and(|answer| answer.overall_code() == Code::Ok) {
                    admitted.push(*tenant);
                }
            }
            admitted
        }
    });
    join_all(lanes).await.concat()
}

/// Asks until each of these tenants was admitted once, or for so long; returns those that were not. (One that finds too little in time
/// takes nothing.)
async fn once_each(daemon: &Daemon, tenants: Vec<usize>, cost: u32, within: Duration) -> Vec<usize> {
    let end = Instant::now() + within;
    let mut left = tenants;
    while !left.is_empty() && Instant::now() < end {
        let admitted: BTreeSet<usize> = each(daemon, &left, cost).await.into_iter().collect();
        left.retain(|tenant| !admitted.contains(tenant));
    }
    left
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_stops_gives_back_all_that_it_was_lent() {
    let redis = Redis::start().await;
    // A build without optimisation, on a machine that is busy.
    let more = "drain_within: 60s\n".to_owned();
    let mut daemon = Daemon::start(Settings { more, ..Settings::alone(&redis.url(), SLOW) }).await;
    let tenants: Vec<usize> = (0..TENANTS).collect();
    let left = once_each(&daemon, tenants.clone(), 1, Duration::from_secs(60)).await;
    assert!(left.is_empty(), "{} were never admitted", left.len());
    let began = Instant::now();
    daemon.signal(Signal::TERM);
    let status = daemon.ended(Duration::from_secs(70)).await;
    println!("it stopped after {:?}", began.elapsed());
    assert!(status.success(), "{status}");
    let log = daemon.log();
    assert!(log.contains("gave leases back"), "{log}");
    daemon.spawn();
    daemon.ready().await;
    // A token of each was spent; all others are there, and not one more.
    let left = once_each(&daemon, tenants.clone(), 99, Duration::from_secs(60)).await;
    assert!(left.is_empty(), "{} of {TENANTS} lost what they had", left.len());
    let over = each(&daemon, &tenants, 1).await;
    assert!(over.is_empty(), "{} of {TENANTS} had more than there is", over.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_has_no_time_says_what_it_kept() {
    let redis = Redis::start().await;
    let more = "drain_within: 0s\n".to_owned();
    let mut daemon = Daemon::start(Settings { more, ..Settings::alone(&redis.url(), SLOW) }).await;
    let left = once_each(&daemon, (0..20).collect(), 1, Duration::from_secs(60)).await;
    assert!(left.is_empty(), "{} were never admitted", left.len());
    daemon.signal(Signal::TERM);
    let status = daemon.ended(Duration::from_secs(20)).await;
    assert!(status.success(), "{status}");
    let log = daemon.log();
    assert!(log.contains("not all leases were given back") && !log.contains("gave leases back"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_is_told_twice_stops_at_once() {
    let redis = Redis::start().await;
    let more = "drain_wait: 60s\n".to_owned();
    let mut daemon = Daemon::start(Settings { more, ..Settings::alone(&redis.url(), SLOW) }).await;
    daemon.signal(Signal::TERM);
    eventually("it drains", Duration::from_secs(10), || async {
        let answer = daemon.admin().get("/readyz").await?;
        hold(answer.status == 503, || answer.text)
    })
    .await;
    daemon.signal(Signal::TERM);
    let status = daemon.ended(Duration::from_secs(10)).await;
    assert_eq!(status.code(), Some(2), "{status}");
}
