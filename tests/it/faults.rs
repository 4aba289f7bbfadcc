//! Faults that other rate limiters had, each tried from outside on one region.

use crate::support::client::{Grpc, descriptor, rls_request};
use crate::support::daemon::{Daemon, Settings, quorate};
use crate::support::load::{Ask, History, Steady};
use crate::support::meter::Bound;
use crate::support::redis::Redis;
use crate::support::{eventually, hold};
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use serde_json::json;
use std::time::{Duration, Instant};

/// A policy file with one policy: domain `api`, a bucket for each tenant.
fn one_policy(limit: &str, rest: &str) -> String {
    format!(
        "policies:\n  - {{ name: p, domain: api, match: [ {{ key: tenant }} ], limit: {limit}, {rest} }}\n"
    )
}

async fn region(policies: &str, more: &str) -> (Redis, Daemon) {
    let redis = Redis::start().await;
    let settings = Settings { more: more.to_owned(), ..Settings::alone(&redis.url(), policies) };
    let daemon = Daemon::start(settings).await;
    (redis, daemon)
}

async fn admitted_of(daemon: &Daemon, tenant: &str, asked: usize) -> usize {
    let mut admitted = 0;
    for _ in 0..asked {
        admitted += usize::from(daemon.api().check("api", &[("tenant", tenant)], 1).await.status == 200);
    }
    admitted
}

#[tokio::test]
async fn a_limit_of_zero_denies_all_and_promises_nothing() {
    for mode in ["split", "strict"] {
        let (_redis, daemon) =
            region(&one_policy("{ rate: 0/s, burst: 0 }", &format!("mode: {mode}")), "").await;
        for _ in 0..3 {
            let answer = daemon.api().check("api", &[("tenant", "7")], 1).await;
            assert_eq!((answer.status, answer.remaining()), (429, 0), "{mode}");
            assert_eq!(answer.header("retry-after"), None, "{mode}: there is no time at which it would fit");
            assert_eq!(answer.must_have("x-ratelimit-limit"), "0");
            assert!(answer.must_have("ratelimit").starts_with("\"p\";r=0"), "{answer:?}");
        }
    }
}

#[tokio::test]
async fn large_limits_are_exact_or_refused_with_the_largest_possible() {
    let (_redis, daemon) =
        region(&one_policy("{ rate: 4294967296/s, burst: 4294967296 }", "mode: split"), "").await;
    let asked = daemon.api().check("api", &[("tenant", "7")], 0).await;
    assert_eq!((asked.status, asked.remaining()), (200, 4_294_967_296));
    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    let answer = grpc.ask(rls_request("api", vec![descriptor(&[("tenant", "7")])])).await.expect("an answer");
    assert_eq!(answer.overall_code(), Code::Ok);
    assert_eq!(answer.statuses[0].limit_remaining, u32::MAX, "saturates");

    let file = daemon.config_file().with_file_name("large.yaml");
    let path = file.display().to_string();
    for (burst, valid) in [("2147483648", true), ("4294967296", true), ("9007199254740993", false)] {
        let yaml = one_policy(&format!("{{ rate: 10/s, burst: {burst} }}"), "mode: strict");
        std::fs::write(&file, yaml).expect("a file");
        let output = quorate(&["validate", &path]).await;
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(i32::from(!valid)), "{burst}: {why}");
        assert!(
            valid || why.replace([',', '_'], "").contains("4294967296"),
            "it names the largest possible: {why}"
        );
    }
}

#[tokio::test]
async fn asking_costs_nothing() {
    let (_redis, daemon) = region(&one_policy("{ rate: 1/d, burst: 10 }", "mode: split"), "").await;
    for _ in 0..3 {
        let answer = daemon.api().check("api", &[("tenant", "7")], 0).await;
        assert_eq!((answer.status, answer.remaining()), (200, 10));
    }
    assert_eq!(
        daemon.api().check("api", &[("tenant", "7")], 10).await.status,
        200,
        "all of it is still there"
    );
    assert_eq!(daemon.api().check("api", &[("tenant", "7")], 1).await.status, 429);
    assert_eq!(daemon.api().check("api", &[("tenant", "7")], 0).await.remaining(), 0);
}

#[tokio::test]
async fn a_cost_above_the_burst_is_denied_and_takes_nothing() {
    for mode in ["split", "strict"] {
        let (_redis, daemon) =
            region(&one_policy("{ rate: 1/d, burst: 5 }", &format!("mode: {mode}")), "").await;
        let answer = daemon.api().check("api", &[("tenant", "7")], 6).await;
        assert_eq!(answer.status, 429, "{mode}");
        assert_eq!(answer.header("retry-after"), None, "{mode}: it never fits");
        let admitted = admitted_of(&daemon, "7", 8).await;
        let least = if mode == "split" { 5 } else { 4 };
        assert!((least..=5).contains(&admitted), "{mode}: {admitted} of 5 were left");
    }
}

/// Denied requests take nothing, also where the region asks the pool on their behalf and has no use for what it gets.
#[tokio::test]
async fn what_is_denied_leaves_the_pool_as_it_was() {
    let case = |(limit, spent, denied): (&'static str, i64, i64)| async move {
        let (_redis, daemon) = region(&one_policy(limit, "mode: strict"), "").await;
        let api = daemon.api();
        let ask = async |cost: i64| api.check("api", &[("tenant", "7")], cost).await;
        if spent > 0 {
            assert_eq!(ask(spent).await.status, 200, "{limit}");
        }
        let before = ask(0).await.remaining();
        assert_eq!(ask(denied).await.status, 429, "{limit}: {denied} of {before}");
        let asked = Instant::now();
        eventually("a lease has come and gone", Duration::from_secs(60), || async {
            let left = ask(0).await.remaining();
            hold(asked.elapsed() > Duration::from_secs(12), || format!("{left} are left"))
        })
        .await;
        let left = ask(0).await.remaining();
        assert!(left + 1 >= before, "{limit}: {left} of {before} are left");
        let rest = i64::try_from(before).expect("few") - 1;
        assert_eq!(ask(rest).await.status, 200, "{limit}: what is left can be spent");
    };
    // What is spent before, and the cost of what is denied: more than there is, more than there can be.
    let (minute, day) = ("{ rate: 1/m, burst: 100 }", "{ rate: 5/d, burst: 5 }");
    futures::future::join_all([(minute, 5, 101), (day, 1, 5), (day, 0, 6)].map(case)).await;
}

#[tokio::test]
async fn two_descriptors_that_together_never_fit_are_not_told_to_come_back() {
    let (_redis, daemon) = region(&one_policy("{ rate: 10/m, burst: 10 }", "mode: split"), "").await;
    let twice: [&[(&str, &str)]; 2] = [&[("tenant", "7")], &[("tenant", "7")]];
    let never = daemon.api().check_descriptors("api", &twice, 6).await;
    assert_eq!(
        (never.status, never.header("retry-after")),
        (429, None),
        "12 of a burst of 10: {}",
        never.text
    );
    let at_once = daemon.api().check_descriptors("api", &twice, 5).await;
    assert_eq!(at_once.status, 200, "the denied request took nothing: {}", at_once.text);
    let later = daemon.api().check_descriptors("api", &twice, 4).await;
    let after: u64 = later.must_have("retry-after").parse().expect("whole seconds");
    assert!((46..=50).contains(&after), "8 tokens at one in 6 s: {after} s, {}", later.text);
}

#[tokio::test]
async fn overrides_with_no_or_an_unknown_unit_are_invalid_and_harm_nobody() {
    let (_redis, daemon) = region(&one_policy("{ rate: 1/d, burst: 5 }", "mode: split"), "").await;
    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    for unit in [0, 99, -1] {
        let mut with_override = descriptor(&[("tenant", "7")]);
        with_override.limit = Some(RateLimitOverride { requests_per_unit: 3, unit });
        let refused = grpc.ask(rls_request("api", vec![with_override])).await.expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "unit {unit}: {refused}");
    }
    for (domain, descriptors) in
        [("", vec![descriptor(&[("tenant", "7")])]), ("api", vec![]), ("api", vec![descriptor(&[])])]
    {
        let refused = grpc.ask(rls_request(domain, descriptors)).await.expect_err("refused");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument, "{refused}");
    }
    let answer = grpc.ask(rls_request("api", vec![descriptor(&[("tenant", "7")])])).await.expect("it lives");
    assert_eq!((answer.overall_code(), answer.statuses[0].limit_remaining), (Code::Ok, 4));
}

#[tokio::test]
async fn raising_a_burst_makes_room_and_no_tokens() {
    for mode in ["split", "strict"] {
        let policies =
            |burst: u32| one_policy(&format!("{{ rate: 1/d, burst: {burst} }}"), &format!("mode: {mode}"));
        let (_redis, daemon) = region(&policies(10), "").await;
        let before = admitted_of(&daemon, "7", 50).await;
        assert!((9..=10).contains(&before), "{mode}: {before} of 10");
        let put = daemon.admin().put_yaml("/v1/policies", &policies(20)).await.expect("an answer");
        assert_eq!(put.status, 200, "{mode}: {}", put.text);
        let after = admitted_of(&daemon, "7", 10).await;
        assert!(before + after <= 10, "{mode}: {before} and then {after} of a burst of 10");
        assert_eq!(
            daemon.api().check("api", &[("tenant", "8")], 0).await.status,
            200,
            "{mode}: it still decides"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raised_part_is_in_use_once_the_change_has_settled() {
    let policies = |rate: u32| one_policy(&format!("{{ rate: {rate}/s, burst: {rate} }}"), "mode: split");
    let (_redis, daemon) = region(&policies(5), "").await;
    let (history, ask) = (History::default(), Ask::new("busy", "api", &[("tenant", "7")]));
    let _load = Steady::start(&ask, &[daemon.api()], &[60], &history);
    let put = daemon.admin().put_yaml("/v1/policies", &policies(40)).await.expect("an answer");
    assert_eq!(put.status, 200, "{}", put.text);
    // There is no pool: all of it is this region's part, which grows when no lease under the old policy can be left.
    eventually("the raised part is in use", Duration::from_secs(30), || async {
        let now = Instant::now();
        let from = now.checked_sub(Duration::from_secs(2)).unwrap_or(now);
        let admitted = history.admitted_in("busy", 0, from, now);
        hold(admitted >= 70, || {
            format!("{admitted} in two seconds; by second:\n{}", history.by_second("busy"))
        })
    })
    .await;
    Bound::per_second(40, 40).must_hold(&history.admitted("busy"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_rate_takes_effect_on_a_bucket_in_use_without_a_free_burst() {
    let policies =
        |rate: u32| one_policy(&format!("{{ rate: {rate}/s, burst: 10 }}"), "mode: strict, wait: 1s");
    let (_redis, daemon) = region(&policies(5), "").await;
    let (history, ask) = (History::default(), Ask::new("busy", "api", &[("tenant", "7")]));
    let _load = Steady::start(&ask, &[daemon.api()], &[80], &history);
    let calm = Ask::new("calm", "api", &[("tenant", "8")]);
    let _calm = Steady::start(&calm, &[daemon.api()], &[2], &history);
    tokio::time::sleep(Duration::from_secs(3)).await;
    Bound::per_second(5, 10).must_hold(&history.admitted("busy"));

    let put = daemon.admin().put_yaml("/v1/policies", &policies(50)).await.expect("an answer");
    assert_eq!(put.status, 200, "{}", put.text);
    // A raise waits until no lease under the old policy can be left.
    eventually("the higher rate is in force", Duration::from_secs(30), || async {
        let now = Instant::now();
        let admitted =
            history.admitted_in("busy", 0, now.checked_sub(Duration::from_secs(2)).unwrap_or(now), now);
        hold(admitted >= 90, || format!("{admitted} in two seconds at 50/s"))
    })
    .await;
    Bound::per_second(50, 10).must_hold(&history.admitted("busy"));

    let put = daemon.admin().put_yaml("/v1/policies", &policies(5)).await.expect("an answer");
    assert_eq!(put.status, 200, "{}", put.text);
    let cut = Instant::now();
    // What was lent under the higher rate is cut back when the region next looks at it: in less than a second.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let in_force = Instant::now();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let seconds = || history.by_second("busy");
    let all = history.admitted("busy");
    Bound::per_second(50, 10).must_hold(&all);
    let since: Vec<_> = all.into_iter().filter(|a| a.sent > in_force).collect();
    Bound::per_second(5, 10).must_hold(&since);
    assert!((16..=30).contains(&since.len()), "{} in 4 s at 5/s; by second:\n{}", since.len(), seconds());
    let spurious = history.count("calm", None, 429, cut - Duration::from_secs(60), Instant::now());
    assert_eq!(spurious, 0, "a tenant far below either rate is never denied");
}

#[tokio::test]
async fn one_spent_descriptor_denies_all_and_charges_none() {
    let (_redis, daemon) = region(&one_policy("{ rate: 1/d, burst: 5 }", "mode: split"), "").await;
    assert_eq!(daemon.api().check("api", &[("tenant", "spent")], 5).await.status, 200);
    for _ in 0..3 {
        let both: [&[(&str, &str)]; 2] = [&[("tenant", "fresh")], &[("tenant", "spent")]];
        let answer = daemon.api().check_descriptors("api", &both, 1).await;
        let allowed: Vec<_> = answer.json()["limits"]
            .as_array()
            .expect("limits")
            .iter()
            .map(|l| l["allowed"].clone())
            .collect();
        assert_eq!((answer.status, allowed), (429, vec![json!(true), json!(false)]));
    }
    assert_eq!(daemon.api().check("api", &[("tenant", "fresh")], 0).await.remaining(), 5);
}

#[tokio::test]
async fn no_two_values_share_a_bucket_whatever_is_in_them() {
    let policies = "
policies:
  - { name: a, domain: api, match: [ { key: a } ], limit: { rate: 1/d, burst: 1 }, mode: split }
  - { name: a_b, domain: api, match: [ { key: a_b } ], limit: { rate: 1/d, burst: 1 }, mode: split }
  - { name: two, domain: api, match: [ { key: x }, { key: y } ], limit: { rate: 1/d, burst: 1 }, mode: split }
";
    let (_redis, daemon) = region(policies, "").await;
    let mut buckets: Vec<Vec<(&str, &str)>> = vec![vec![("a", "b_c")], vec![("a_b", "c")]];
    let nasty = [
        "", " ", ".", "|", ":", "{}", "{a}", "/", "\n", "\0", "\0\0", "😀", "a|b", "a:b", "a.b", "%00", "'",
        "\\", "\u{fffd}",
    ];
    buckets.extend(nasty.iter().map(|value| vec![("a", *value)]));
    buckets.extend(
        [("1", "23"), ("12", "3"), ("", "123"), ("1:2", "3"), ("1", "2:3")]
            .map(|(x, y)| vec![("x", x), ("y", y)]),
    );
    for bucket in &buckets {
        let first = daemon.api().check_descriptors("api", &[bucket], 1).await;
        assert_eq!(first.status, 200, "{bucket:?} has a bucket of its own: {}", first.text);
    }
    for bucket in &buckets {
        assert_eq!(
            daemon.api().check_descriptors("api", &[bucket], 1).await.status,
            429,
            "{bucket:?} is spent"
        );
    }
    let oversize = "v".repeat(64 * 1024);
    let refused = daemon.api().check_descriptors("api", &[&[("a", &oversize)]], 1).await;
    assert!([400, 413].contains(&refused.status), "{}", refused.status);
    assert_eq!(refused.must_have("content-type"), "application/problem+json");
    let long = "v".repeat(32 * 1024);
    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    let refused = grpc.ask(rls_request("api", vec![descriptor(&[("a", &long), ("b", &long)])])).await;
    assert!(refused.is_err(), "too large over gRPC too: {refused:?}");
}

#[tokio::test]
async fn what_no_policy_matches_gets_the_configured_answer_and_is_counted() {
    for (unmatched, status) in [("allow", 200), ("deny", 429)] {
        let policies = one_policy("{ rate: 1/d, burst: 5 }", "mode: split");
        let (_redis, daemon) = region(&policies, &format!("unmatched: {unmatched}\n")).await;
        assert_eq!(daemon.api().check("nowhere", &[("tenant", "7")], 1).await.status, status);
        assert_eq!(daemon.api().check("api", &[("other", "7")], 1).await.status, status);
        let metrics = daemon.admin().get("/metrics").await.expect("an answer").text;
        for domain in ["nowhere", "api"] {
            let of_domain = |line: &&str| {
                line.starts_with("quorate_unmatched_total{") && line.contains(&format!("\"{domain}\""))
            };
            let line = metrics.lines().find(of_domain).unwrap_or_else(|| panic!("{domain} is not counted"));
            assert!(line.ends_with(" 1"), "{line}");
        }
    }
}

#[tokio::test]
async fn a_misspelt_key_is_refused_with_its_place_and_the_old_policies_stay() {
    let (_redis, daemon) = region(&one_policy("{ rate: 1/d, burst: 5 }", "mode: split"), "").await;
    let before = daemon.state().await.expect("the state")["policies_version"].clone();
    let wrong =
        "policies:\n  - name: p\n    domain: api\n    match: [ { key: tenant } ]\n    unlimied: true\n";
    let refused = daemon.admin().put_yaml("/v1/policies", wrong).await.expect("an answer");
    assert!([400, 422].contains(&refused.status), "{} {}", refused.status, refused.text);
    assert!(refused.text.contains("5:5") && refused.text.contains("unlimied"), "{}", refused.text);
    assert_eq!(daemon.state().await.expect("the state")["policies_version"], before);
    assert_eq!(admitted_of(&daemon, "7", 8).await, 5, "what ran before still runs");
}

/// A policy for each answer to a store's silence.
const BY_FAILURE: &str = "
policies:
  - { name: deny, domain: deny, match: [ { key: tenant } ], limit: { rate: 1000/s, burst: 1000 }, mode: strict, on_store_failure: deny }
  - { name: allow, domain: allow, match: [ { key: tenant } ], limit: { rate: 1000/s, burst: 1000 }, mode: approximate, max_overshoot: 10%, on_store_failure: allow }
  - { name: local, domain: local, match: [ { key: tenant } ], limit: { rate: 1000/s, burst: 1000 }, mode: split, on_store_failure: local }
";

/// Asks each policy of [`BY_FAILURE`] and holds the answers against what it says.
async fn answers_by_failure(daemon: &Daemon, within: Duration) -> Result<(), String> {
    for (domain, status, reason) in
        [("deny", 503, "store_unavailable"), ("allow", 200, "store_unavailable"), ("local", 200, "")]
    {
        let sent = Instant::now();
        let answer = daemon.api().check(domain, &[("tenant", "7")], 1).await;
        hold(answer.status == status, || format!("{domain}: {} {}", answer.status, answer.text))?;
        hold(reason.is_empty() || answer.reason() == reason, || format!("{domain}: {}", answer.text))?;
        hold(sent.elapsed() <= within, || format!("{domain}: answered after {:?}", sent.elapsed()))?;
    }
    Ok(())
}

async fn serves_from_redis(daemon: &Daemon, deadline: Duration) {
    eventually("the daemon serves from Redis again", deadline, || async {
        for domain in ["deny", "allow", "local"] {
            let answer = daemon.api().check(domain, &[("tenant", "7")], 1).await;
            hold(answer.status == 200 && answer.reason() == "ok", || format!("{domain}: {}", answer.text))?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_frozen_redis_is_answered_for_in_time_and_recovered_from() {
    let (redis, daemon) = region(BY_FAILURE, "").await;
    serves_from_redis(&daemon, Duration::from_secs(10)).await;
    redis.freeze();
    let in_time = || answers_by_failure(&daemon, Duration::from_millis(1_200));
    // `local` begins with an empty bucket.
    eventually("the freeze is answered as the policies say", Duration::from_secs(2), in_time).await;
    for _ in 0..10 {
        // The store's timeout of the tests is 500 ms: CI has two cores for everything.
        answers_by_failure(&daemon, Duration::from_millis(1_200))
            .await
            .expect("each answers as its policy says, in time");
    }
    redis.thaw();
    serves_from_redis(&daemon, Duration::from_secs(20)).await;
}

#[tokio::test]
async fn an_outage_of_redis_is_no_used_up_quota() {
    let (mut redis, daemon) = region(BY_FAILURE, "").await;
    serves_from_redis(&daemon, Duration::from_secs(10)).await;
    redis.kill();
    eventually("the outage is answered as the policies say", Duration::from_secs(5), || {
        answers_by_failure(&daemon, Duration::from_millis(1_200))
    })
    .await;
    let answer = daemon.api().check("deny", &[("tenant", "7")], 1).await;
    assert_eq!((answer.status, answer.reason().as_str()), (503, "store_unavailable"));
    assert!(answer.must_have("retry-after").parse::<u64>().expect("whole seconds") >= 1);
    let ready = daemon.admin().get("/readyz").await.expect("an answer");
    assert_eq!(ready.status, 503, "{}", ready.text);
    redis.up().await;
    serves_from_redis(&daemon, Duration::from_secs(30)).await;
}

#[tokio::test]
async fn a_start_with_redis_down_waits_and_says_why() {
    let mut redis = Redis::down();
    let mut daemon = Daemon::down(Settings::alone(&redis.url(), BY_FAILURE));
    daemon.spawn();
    eventually("it lives, and tells what is missing", Duration::from_secs(15), || async {
        let alive = daemon.admin().get("/healthz").await?;
        hold(alive.status == 200, || format!("/healthz: {}", alive.status))?;
        let ready = daemon.admin().get("/readyz").await?;
        hold(ready.status == 503, || format!("/readyz: {}", ready.status))?;
        let only_redis = ready.text.to_lowercase().contains("redis") && !ready.text.contains("raft:");
        hold(only_redis, || ready.text.clone())
    })
    .await;
    let answer = daemon.api().check("deny", &[("tenant", "7")], 1).await;
    assert_eq!((answer.status, answer.must_have("retry-after")), (503, "1"), "{}", answer.text);
    redis.up().await;
    daemon.ready().await;
    serves_from_redis(&daemon, Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demoted_primary_is_no_store_until_it_is_one_again() {
    let (redis, daemon) = region(&one_policy("{ rate: 20/s, burst: 20 }", "mode: strict"), "").await;
    let (history, ask) = (History::default(), Ask::new("all", "api", &[("tenant", "7")]));
    let _load = Steady::start(&ask, &[daemon.api()], &[60], &history);
    let recent = |status: u16| {
        let now = Instant::now();
        history.count("all", None, status, now.checked_sub(Duration::from_secs(1)).unwrap_or(now), now)
    };
    eventually("it admits", Duration::from_secs(10), || async {
        hold(recent(200) >= 10, || format!("{}", recent(200)))
    })
    .await;
    let nobody = crate::support::free_address().port().to_string();
    redis.cli(&["REPLICAOF", "127.0.0.1", &nobody]).await;
    let why = || format!("{:?}", history.statuses("all"));
    eventually("a replica is refused", Duration::from_secs(5), || async {
        hold(recent(503) >= 30 && recent(200) == 0, why)
    })
    .await;
    redis.cli(&["REPLICAOF", "NO", "ONE"]).await;
    eventually("it admits again", Duration::from_secs(30), || async { hold(recent(200) >= 10, why) }).await;
    Bound::per_second(20, 20).must_hold(&history.admitted("all"));
}

#[tokio::test]
async fn every_key_expires_even_if_the_daemon_is_killed() {
    let (redis, mut daemon) = region(
        "
policies:
  - { name: strict, domain: strict, match: [ { key: tenant } ], limit: { rate: 10/m, burst: 3 }, mode: strict }
  - { name: split, domain: split, match: [ { key: tenant } ], limit: { rate: 10/m, burst: 3 }, mode: split }
  - { name: slow, domain: slow, match: [ { key: tenant } ], limit: { rate: 1/d, burst: 3 }, mode: split }
",
        "",
    )
    .await;
    let burst =
        futures::future::join_all(
            (0..150).map(|n| {
                let (api, tenant) = (daemon.api(), (n % 50).to_string());
                async move {
                    api.check(["strict", "split", "slow"][n % 3], &[("tenant", &tenant)], 2).await.status
                }
            }),
        );
    let statuses = burst.await;
    daemon.kill();
    assert!(statuses.iter().filter(|status| **status == 200).count() >= 50, "{statuses:?}");
    assert!(redis.keys().await.len() > 50, "there is a key for each bucket");
    let lasting = "local found = {} \
                   for _, key in ipairs(redis.call('KEYS', '*')) do \
                     if redis.call('PTTL', key) < 0 then found[#found + 1] = key end \
                   end return found";
    assert_eq!(redis.cli(&["EVAL", lasting, "0"]).await, "", "keys that never expire");
}

#[tokio::test]
async fn a_redacted_value_is_nowhere() {
    const SECRET: &str = "sk-live-51f0aa7c";
    let policies = "
policies:
  - { name: by-key, domain: api, match: [ { key: api_key } ], limit: { rate: 10/m, burst: 3 }, mode: strict }
";
    let (redis, daemon) = region(policies, "redact: [api_key]\n").await;
    for _ in 0..6 {
        let answer = daemon.api().check("api", &[("api_key", SECRET)], 1).await;
        assert!(!answer.text.contains(SECRET), "{}", answer.text);
    }
    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    let answer =
        grpc.ask(rls_request("api", vec![descriptor(&[("api_key", SECRET)])])).await.expect("an answer");
    assert!(!format!("{answer:?}").contains(SECRET), "{answer:?}");
    // Requests that are faulty or match nothing must not bring it out either.
    daemon.api().check("nowhere", &[("api_key", SECRET)], 1).await;
    daemon.api().check("api", &[("api_key", SECRET)], 1 << 40).await;

    for page in ["/metrics", "/v1/state", "/readyz", &format!("/v1/buckets/by-key?api_key={SECRET}")] {
        let shown = daemon.admin().get(page).await.expect("an answer").text;
        assert!(!shown.contains(SECRET), "{page}: {shown}");
    }
    assert!(!daemon.log().contains(SECRET), "in the log");
    let holds = "for _, key in ipairs(redis.call('KEYS', '*')) do \
                   if string.find(key .. redis.call('DUMP', key), ARGV[1], 1, true) then return key end \
                 end return ''";
    assert!(!redis.keys().await.is_empty(), "there is something to look at");
    assert_eq!(redis.cli(&["EVAL", holds, "0", SECRET]).await, "", "in Redis");
    for file in files_under(&daemon.data_dir()) {
        let bytes = std::fs::read(&file).expect("a file of the data folder");
        let found = bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes());
        assert!(!found, "in {}", file.display());
    }
}

fn files_under(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    entries.flat_map(|path| if path.is_dir() { files_under(&path) } else { vec![path] }).collect()
}
