//! Limits that count, from outside: sliding logs and windows over three regions, and permits that are lent.

use crate::support::client::{Api, Grpc, descriptor, rls_request};
use crate::support::cluster::{Cluster, Plan};
use crate::support::daemon::{Daemon, Settings};
use crate::support::load::{Ask, History, Steady};
use crate::support::meter::{Admitted, Bound};
use crate::support::redis::Redis;
use crate::support::{eventually, hold};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use serde_json::json;
use std::time::{Duration, Instant};

const COUNTED: &str = "
policies:
  - name: log
    domain: api
    match: [ { key: log } ]
    limit: { quota: 10, per: 2s, algorithm: sliding_log }
    mode: split
    weights: { ap-south: 2, eu-west: 2, us-east: 1 }
  - name: window
    domain: api
    match: [ { key: window } ]
    limit: { quota: 10, per: 2s, algorithm: sliding_window }
    mode: split
";
const SPAN: Duration = Duration::from_secs(2);

/// The most that was certainly admitted within some span: sent and answered in it.
fn most_in_a_span(admitted: &[Admitted]) -> usize {
    let within = |from: Instant| {
        let inside = |a: &&Admitted| a.sent >= from && a.answered < from + SPAN;
        admitted.iter().filter(inside).count()
    };
    admitted.iter().map(|a| within(a.sent)).max().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_regions_never_admit_more_than_a_quota_that_slides() {
    let plan = Plan { policies: COUNTED.into(), rtt: Duration::from_millis(20), ..Plan::default() };
    let mut cluster = Cluster::start(plan).await;
    let history = History::default();
    let apis = cluster.apis();
    let asks = [Ask::new("log", "api", &[("log", "7")]), Ask::new("window", "api", &[("window", "7")])];
    let loads = asks.each_ref().map(|ask| Steady::start(ask, &apis, &[15; 3], &history));
    let admits = async |what: &str, region: usize| {
        let since = Instant::now();
        eventually(what, Duration::from_secs(20), || async {
            let counts =
                ["log", "window"].map(|name| history.admitted_in(name, region, since, Instant::now()));
            hold(counts.iter().all(|count| *count >= 3), || format!("{counts:?} in region {region}"))
        })
        .await;
    };
    admits("all is well", 0).await;
    // Nobody is asked: a region that is cut off has its part.
    cluster.cut_off(1);
    admits("a region that is cut off", 1).await;
    cluster.heal(1);
    // The store forgets, and is lost.
    let lost = Instant::now();
    cluster.redis[0].cli(&["FLUSHALL"]).await;
    admits("a region whose store was wiped", 0).await;
    cluster.redis[2].kill();
    cluster.redis[2].up().await;
    admits("a region whose store was killed", 2).await;
    // A daemon dies; what it counted is in its store.
    cluster.daemons[0].kill();
    cluster.daemons[0].spawn();
    cluster.daemons[0].ready().await;
    admits("a region whose daemon was killed", 0).await;
    drop(loads);

    let log = history.admitted("log");
    let most = most_in_a_span(&log);
    println!("{} admitted by the log, at most {most} of 10 within {SPAN:?}", log.len());
    assert!(most <= 10, "{most} in one window:\n{}", history.by_second("log"));
    assert!(most >= 9, "and nearly all of it is used: {most}:\n{}", history.by_second("log"));
    let window = history.admitted("window");
    Bound { amount: 5, per_seconds: 1, burst: 10 }.must_hold(&window);
    let early = |name: &str| {
        let after = lost + Duration::from_millis(300);
        history.admitted_in(name, 0, after, lost + SPAN - Duration::from_millis(300))
    };
    assert_eq!((early("log"), early("window")), (0, 0), "what was forgotten counts as used");
}

/// Permits of one tenant.
struct Holder(Api);

impl Holder {
    async fn post(&self, path: &str, body: serde_json::Value) -> (u16, serde_json::Value) {
        let answer = self.0.post(path, &body).await.expect("an answer");
        let body = if answer.text.is_empty() { json!(null) } else { answer.json() };
        (answer.status, body)
    }

    async fn acquire(&self) -> Result<String, (u16, serde_json::Value)> {
        let body = json!({"domain": "api", "attributes": {"tenant": "7"}});
        match self.post("/v1/acquire", body).await {
            (200, body) => Ok(body["lease"].as_str().expect("a lease").to_owned()),
            other => Err(other),
        }
    }

    async fn renew(&self, lease: &str) -> u16 {
        self.post("/v1/renew", json!({ "lease": lease })).await.0
    }

    async fn release(&self, lease: &str) -> u16 {
        self.post("/v1/release", json!({ "lease": lease })).await.0
    }
}

fn permits(n: u32) -> String {
    format!(
        "policies:\n  - {{ name: jobs, domain: api, match: [ {{ key: tenant }} ], limit: {{ concurrent: {n}, ttl: 3s }}, mode: split }}\n"
    )
}

#[tokio::test]
async fn permits_outlive_the_daemon_and_not_their_holder() {
    let mut redis = Redis::start().await;
    let mut daemon = Daemon::start(Settings::alone(&redis.url(), &permits(2))).await;
    let holder = Holder(daemon.api());
    let kept = holder.acquire().await.expect("a permit");
    let died = Instant::now();
    let _abandoned = holder.acquire().await.expect("a permit");
    let (status, denied) = holder.acquire().await.expect_err("there are two");
    assert_eq!((status, &denied["limits"][0]["reason"]), (429, &json!("over_limit")));
    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    let request = || rls_request("api", vec![descriptor(&[("tenant", "7")])]);
    let busy = grpc.ask(request()).await.expect("an answer");
    let limit = busy.statuses[0].current_limit.clone().expect("current_limit");
    assert_eq!(
        (busy.overall_code(), limit.requests_per_unit, limit.unit()),
        (Code::OverLimit, 2, Unit::Unknown)
    );

    // The daemon comes and goes; one holder goes on, the other does not.
    daemon.kill();
    daemon.spawn();
    daemon.ready().await;
    assert_eq!(holder.renew(&kept).await, 200, "the lease is in the store");
    let next = eventually("the permit of a dead holder is free", Duration::from_secs(20), || async {
        assert_eq!(holder.renew(&kept).await, 200);
        holder.acquire().await.map_err(|denied| format!("{denied:?}"))
    })
    .await;
    assert!(died.elapsed() >= Duration::from_secs(3), "not before its lease has ended: {:?}", died.elapsed());
    assert_eq!((holder.release(&next).await, holder.release(&next).await), (200, 404));
    let free = grpc.ask(request()).await;
    let free = match free {
        Ok(free) => free,
        // The connection was to the daemon that was killed.
        Err(_) => Grpc::connect(&daemon.grpc_url()).await.ask(request()).await.expect("an answer"),
    };
    assert_eq!((free.overall_code(), free.statuses[0].limit_remaining), (Code::Ok, 1));

    let view = daemon.admin().get("/v1/buckets/jobs?tenant=7").await.expect("an answer").json();
    assert_eq!(view["regions"][0]["level"], json!(1_000_000), "{view}");

    // A raise brings the difference.
    daemon.admin().put_yaml("/v1/policies", &permits(4)).await.expect("an answer");
    let mut more = Vec::new();
    eventually("four permits", Duration::from_secs(40), || async {
        let renewed = holder.renew(&kept).await;
        assert_eq!(renewed, 200);
        let level =
            daemon.admin().get("/v1/buckets/jobs?tenant=7").await?.json()["regions"][0]["level"].clone();
        hold(level == json!(3_000_000), || format!("{level}"))
    })
    .await;
    for _ in 0..3 {
        more.push(holder.acquire().await.expect("a permit"));
    }
    assert_eq!(holder.acquire().await.expect_err("there are four").0, 429);

    // Whatever the store forgets may be in use for as long as leases last.
    let lost = Instant::now();
    redis.kill();
    assert_eq!(holder.renew(&kept).await, 503);
    redis.up().await;
    eventually("permits are lent again", Duration::from_secs(30), || async {
        holder.acquire().await.map_err(|denied| format!("{denied:?}"))
    })
    .await;
    assert!(lost.elapsed() >= Duration::from_secs(3), "not while lost leases may last: {:?}", lost.elapsed());
    assert_eq!(holder.renew(&kept).await, 404, "it was lost");
}
