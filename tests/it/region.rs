//! One region with a real Redis, asked from outside: HTTP, gRPC and the command line.

use crate::support::client::{Grpc, descriptor, rls_request};
use crate::support::daemon::{Daemon, Settings, quorate};
use crate::support::meter::{Admitted, Bound};
use crate::support::redis::Redis;
use crate::support::{eventually, free_address, hold};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use std::time::{Duration, Instant};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

/// 20 at once and then one in ten seconds: slow enough that a test sees the end of it.
const SLOW: &str = "
policies:
  - name: tenant-requests
    domain: api
    match: [ { key: tenant } ]
    limit: { rate: 6/m, burst: 20 }
    mode: strict
";
const SLOW_BOUND: Bound = Bound { amount: 6, per_seconds: 60, burst: 20 };

async fn slow_region() -> (Redis, Daemon) {
    let redis = Redis::start().await;
    let daemon = Daemon::start(Settings::alone(&redis.url(), SLOW)).await;
    (redis, daemon)
}

#[tokio::test]
async fn http_allows_up_to_the_limit_and_says_so_in_every_header() {
    let (_redis, daemon) = slow_region().await;
    let mut admitted = Vec::new();
    let (mut allowed, mut denied) = (Vec::new(), Vec::new());
    for _ in 0..30 {
        let sent = Instant::now();
        let answer = daemon.api().check("api", &[("tenant", "7")], 1).await;
        if answer.status == 200 {
            admitted.push(Admitted { sent, answered: Instant::now(), cost: 1 });
            allowed.push(answer);
        } else {
            denied.push(answer);
        }
    }
    SLOW_BOUND.must_hold(&admitted);
    assert!(allowed.len() >= 19, "{} of a burst of 20 were allowed", allowed.len());
    assert!(denied.len() >= 5, "{} were denied", denied.len());

    for answer in &allowed {
        let (json, limit) = (answer.json(), answer.limit());
        assert_eq!((answer.status, &json["allowed"]), (200, &true.into()));
        assert_eq!((&limit["policy"], &limit["mode"]), (&"tenant-requests".into(), &"strict".into()));
        assert_eq!((&limit["allowed"], &limit["reason"]), (&true.into(), &"ok".into()));
        assert_eq!((&limit["limit"], &limit["retry_after_ms"]), (&6.into(), &0.into()));
        assert!(limit["reset_ms"].is_u64(), "{limit}");
        assert_eq!(answer.header("retry-after"), None);
        assert_eq!(answer.must_have("content-type"), "application/json");
    }
    let remaining: Vec<u64> = allowed.iter().map(|answer| answer.remaining()).collect();
    assert!(remaining.is_sorted_by(|before, after| before > after), "each takes one: {remaining:?}");

    for answer in &denied {
        let (json, limit) = (answer.json(), answer.limit());
        assert_eq!((answer.status, &json["allowed"]), (429, &false.into()));
        assert_eq!((&limit["allowed"], &limit["remaining"]), (&false.into(), &0.into()));
        assert!(["over_limit", "no_lease"].contains(&answer.reason().as_str()), "{limit}");
        let retry_ms = limit["retry_after_ms"].as_u64().expect("milliseconds");
        let retry_s: u64 = answer.must_have("retry-after").parse().expect("whole seconds");
        assert!((1..=11).contains(&retry_s), "a token takes ten seconds: {retry_s}");
        assert_eq!(retry_s, retry_ms.div_ceil(1000).max(1));
    }
    for answer in allowed.iter().chain(&denied) {
        let remaining = answer.remaining();
        assert_eq!(answer.must_have("ratelimit-policy"), "\"tenant-requests\";q=6;w=60");
        let field = answer.must_have("ratelimit");
        let seconds = field.strip_prefix(&format!("\"tenant-requests\";r={remaining};t="));
        let seconds: u64 = seconds.unwrap_or_else(|| panic!("{field}")).parse().expect("whole seconds");
        // Rates are enforced 1% lower, for clocks that run slow.
        assert!(seconds <= 203, "a full bucket takes 202 s: {seconds}");
        assert_eq!(answer.must_have("x-ratelimit-limit"), "6");
        assert_eq!(answer.must_have("x-ratelimit-remaining"), remaining.to_string());
        assert_eq!(answer.must_have("x-ratelimit-reset"), seconds.to_string());
    }
}

#[tokio::test]
async fn grpc_and_http_spend_the_same_bucket() {
    let (_redis, daemon) = slow_region().await;
    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    let (mut over_grpc, mut over_http) = (0, 0);
    for _ in 0..15 {
        let answer =
            grpc.ask(rls_request("api", vec![descriptor(&[("tenant", "7")])])).await.expect("an answer");
        over_grpc += u32::from(answer.overall_code() == Code::Ok);
        over_http += u32::from(daemon.api().check("api", &[("tenant", "7")], 1).await.status == 200);
    }
    assert!((19..=21).contains(&(over_grpc + over_http)), "{over_grpc} over gRPC and {over_http} over HTTP");

    let denied = grpc.ask(rls_request("api", vec![descriptor(&[("tenant", "7")])])).await.expect("an answer");
    assert_eq!((denied.overall_code(), denied.statuses.len()), (Code::OverLimit, 1));
    let status = &denied.statuses[0];
    let limit = status.current_limit.as_ref().expect("current_limit");
    assert_eq!((status.code(), status.limit_remaining), (Code::OverLimit, 0));
    assert_eq!(
        (limit.requests_per_unit, limit.unit(), limit.name.as_str()),
        (6, Unit::Minute, "tenant-requests")
    );
    let reset = status.duration_until_reset.as_ref().expect("duration_until_reset");
    assert!((0..=11).contains(&reset.seconds), "until this cost fits: {reset:?}");

    let header = |name: &str| {
        let same = denied.response_headers_to_add.iter().filter(|h| h.key.eq_ignore_ascii_case(name));
        let values: Vec<&str> = same.map(|h| h.value.as_str()).collect();
        assert_eq!(values.len(), 1, "{name}: {values:?} in {:?}", denied.response_headers_to_add);
        values[0].to_owned()
    };
    assert_eq!(header("ratelimit-policy"), "\"tenant-requests\";q=6;w=60");
    assert!(header("ratelimit").starts_with("\"tenant-requests\";r=0;t="));
    assert_eq!(
        (header("x-ratelimit-limit"), header("x-ratelimit-remaining")),
        ("6".to_owned(), "0".to_owned())
    );
    assert!(header("retry-after").parse::<u64>().expect("whole seconds") >= 1);

    let other = grpc.ask(rls_request("api", vec![descriptor(&[("tenant", "8")])])).await.expect("an answer");
    assert_eq!(other.overall_code(), Code::Ok, "another tenant has a bucket of its own");
}

#[tokio::test]
async fn grpc_health_follows_readiness() {
    let (mut redis, daemon) = slow_region().await;
    let channel = tonic::transport::Channel::from_shared(daemon.grpc_url()).expect("a URL").connect().await;
    let channel = channel.expect("gRPC connects");
    let is = |status: ServingStatus| {
        let channel = channel.clone();
        move || {
            let mut health = HealthClient::new(channel.clone());
            async move {
                let request = tonic_health::pb::HealthCheckRequest { service: String::new() };
                let answer = health.check(request).await.map_err(|e| e.to_string())?.into_inner();
                hold(answer.status() == status, || format!("{:?}", answer.status()))
            }
        }
    };
    eventually("it serves", Duration::from_secs(3), is(ServingStatus::Serving)).await;
    redis.kill();
    eventually("it does not serve", Duration::from_secs(5), is(ServingStatus::NotServing)).await;
    redis.up().await;
    eventually("it serves again", Duration::from_secs(15), is(ServingStatus::Serving)).await;
}

#[tokio::test]
async fn commands_answer_with_their_exit_codes() {
    let (_redis, mut daemon) = slow_region().await;
    let (http, admin) = (daemon.api().url(), daemon.admin().url());
    let check = |cost: &'static str| {
        let http = http.clone();
        async move {
            quorate(&["check", "--domain", "api", "tenant=7", "--cost", cost, "--addr", &http])
                .await
                .status
                .code()
        }
    };
    assert_eq!(check("1").await, Some(0), "allowed");
    assert_eq!(check("21").await, Some(1), "above the burst: denied");

    let config = daemon.config_file().display().to_string();
    let policies = daemon.config_file().with_file_name("policies.yaml").display().to_string();
    let valid = quorate(&["validate", &config, &policies]).await;
    assert_eq!(valid.status.code(), Some(0), "{}", String::from_utf8_lossy(&valid.stderr));
    let wrong = daemon.config_file().with_file_name("wrong.yaml");
    std::fs::write(&wrong, "policies:\n  - name: x\n    domain: api\n    unlimied: true\n").expect("a file");
    let wrong = wrong.display().to_string();
    let refused = quorate(&["validate", &wrong]).await;
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{why}");
    assert!(why.contains(&format!("{wrong}:4:5: ")), "file, line and column: {why}");
    assert_eq!(quorate(&["validate", "/nonexistent.yaml"]).await.status.code(), Some(2));
    for args in [
        ["policies", "apply", &wrong, "--admin", &admin],
        ["policies", "diff", &wrong, "--admin", &admin],
        ["dev", "--policies", &wrong, "--base-port", "1"],
    ] {
        let refused = quorate(&args).await;
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{args:?}: {why}");
        assert!(why.lines().any(|line| line.starts_with(&format!("{wrong}:4:5: "))), "{args:?}: {why}");
    }

    let status = quorate(&["status", "--admin", &admin, "--json"]).await;
    assert_eq!(status.status.code(), Some(0), "{}", String::from_utf8_lossy(&status.stderr));
    let state: serde_json::Value = serde_json::from_slice(&status.stdout).expect("JSON");
    assert_eq!(state["region"], "solo", "{state}");
    assert_eq!(quorate(&["status", "--admin", &admin]).await.status.code(), Some(0));

    assert_eq!(quorate(&["check", "--domain", "api"]).await.status.code(), Some(2), "no attributes");
    assert_eq!(quorate(&["no-such-command"]).await.status.code(), Some(2));
    assert_eq!(daemon.stop().await.code(), Some(0), "SIGTERM drains and ends well");
    assert_eq!(check("1").await, Some(2), "nobody answers");
    let unreachable = quorate(&["status", "--admin", &admin]).await;
    assert_eq!(unreachable.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&unreachable.stderr).contains(&admin), "it names who gave no answer");
}

#[tokio::test]
async fn the_embedded_store_serves_with_no_redis_at_all() {
    let settings = Settings { redis: None, ..Settings::alone("", SLOW) };
    let daemon = Daemon::start(settings).await;
    let mut admitted = 0;
    for _ in 0..30 {
        admitted += u32::from(daemon.api().check("api", &[("tenant", "7")], 1).await.status == 200);
    }
    assert!((19..=21).contains(&admitted), "{admitted} of a burst of 20");
}

#[tokio::test]
async fn a_restart_forgets_no_spending_and_keeps_the_policies() {
    let (_redis, mut daemon) = slow_region().await;
    let bound_since = Instant::now();
    let mut admitted = 0;
    for _ in 0..25 {
        admitted += u32::from(daemon.api().check("api", &[("tenant", "7")], 1).await.status == 200);
    }
    let put = daemon
        .admin()
        .put_yaml("/v1/policies", &SLOW.replace("burst: 20", "burst: 21"))
        .await
        .expect("an answer");
    assert_eq!(put.status, 200, "{}", put.text);
    assert_eq!(daemon.stop().await.code(), Some(0));
    daemon.spawn();
    daemon.ready().await;
    let shown = daemon.admin().get("/v1/policies").await.expect("an answer").text;
    assert!(shown.contains("21"), "policies come from the log, not from the file again: {shown}");
    for _ in 0..25 {
        admitted += u32::from(daemon.api().check("api", &[("tenant", "7")], 1).await.status == 200);
    }
    let refilled = u32::try_from(bound_since.elapsed().as_secs() / 10).expect("a short test") + 1;
    assert!(admitted <= 20 + refilled, "{admitted} of a burst of 20, and {refilled} refilled");
    assert!(bound_since.elapsed() < Duration::from_secs(60));
}

#[tokio::test]
async fn a_region_that_knows_no_policies_yet_lets_nothing_through() {
    let mut settings = Settings::alone("redis://127.0.0.1:1", SLOW);
    // The other two never come: there is no quorum to found the cluster.
    settings.regions.push(("second".to_owned(), format!("http://{}", free_address())));
    settings.regions.push(("third".to_owned(), format!("http://{}", free_address())));
    settings.redis = None;
    let mut daemon = Daemon::down(settings);
    daemon.spawn();
    eventually("it says that it is not ready", Duration::from_secs(15), || async {
        let ready = daemon.admin().get("/readyz").await?;
        hold(ready.status == 503 && ready.text.contains("no policies yet"), || ready.text.clone())
    })
    .await;
    let answer = daemon.api().check("api", &[("tenant", "7")], 1).await;
    assert_eq!(answer.status, 503, "{}", answer.text);
    assert!(answer.text.contains("policies are not known yet"), "{}", answer.text);
    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    let answer = grpc.ask(rls_request("api", vec![descriptor(&[("tenant", "7")])])).await.expect("an answer");
    assert_eq!((answer.overall_code(), answer.statuses.len()), (Code::OverLimit, 1));
}
