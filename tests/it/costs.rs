//! What a request costs, through every door: HTTP, gRPC, a limit that came with it; with limits that only count, that never deny,
//! and that stand above one another. Each with buckets in Redis and in memory.

use crate::support::client::{Answer, Grpc, descriptor, rls_request};
use crate::support::daemon::{Daemon, Settings};
use crate::support::redis::Redis;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, RateLimit};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::envoy::r#type::v3::RateLimitUnit;
use envoy_types::pb::google::protobuf::UInt64Value;
use serde_json::{Value, json};

const POLICIES: &str = "
policies:
  - { name: plain, domain: api, match: [ { key: tenant } ], limit: { rate: 1/d, burst: 10 }, mode: split }
  - { name: counted, domain: shadow, match: [ { key: tenant } ], limit: { rate: 1/d, burst: 2 }, mode: split, shadow: true }
  - { name: enforced, domain: shadow, match: [ { key: user } ], limit: { rate: 1/d, burst: 4 }, mode: split }
  - { name: free, domain: free, match: [ { key: tenant } ], unlimited: true }
  - { name: tenant, domain: layers, match: [ { key: tenant } ], limit: { rate: 1/d, burst: 10 }, mode: split }
  - { name: exports, domain: layers, match: [ { key: tenant }, { key: op, value: export } ], limit: { rate: 1/d, burst: 3 }, mode: split }
  - { name: everyone, domain: layers, match: [ { key: tenant, shared: true }, { key: op, shared: true } ], limit: { rate: 1/d, burst: 5 }, mode: strict, reserve: 100% }
";

/// One daemon for each kind of store.
async fn regions() -> (Redis, [Daemon; 2]) {
    let redis = Redis::start().await;
    let settings = Settings::alone(&redis.url(), POLICIES);
    let in_memory = Settings { redis: None, ..Settings::alone("", POLICIES) };
    (redis, [Daemon::start(settings).await, Daemon::start(in_memory).await])
}

fn limits(answer: &Answer) -> Vec<(String, bool, Value, String)> {
    let text = |limit: &Value, key: &str| limit[key].as_str().unwrap_or_default().to_owned();
    let limits = answer.json()["limits"].as_array().cloned().unwrap_or_default();
    let each = |limit: &Value| {
        let allowed = limit["allowed"] == json!(true);
        (text(limit, "policy"), allowed, limit["remaining"].clone(), text(limit, "reason"))
    };
    limits.iter().map(each).collect()
}

fn hits(value: u64, negative: bool) -> RateLimitDescriptor {
    RateLimitDescriptor {
        hits_addend: Some(UInt64Value { value }),
        is_negative_hits: negative,
        ..descriptor(&[("tenant", "grpc")])
    }
}

fn overridden(requests_per_unit: u32, unit: RateLimitUnit) -> RateLimitDescriptor {
    let limit = Some(RateLimitOverride { requests_per_unit, unit: unit.into() });
    RateLimitDescriptor { limit, ..descriptor(&[("tenant", "own")]) }
}

fn seen(response: &RateLimitResponse) -> (Code, u32) {
    (response.overall_code(), response.statuses[0].limit_remaining)
}

/// Cases 3, 4 and 24, and costs of all kinds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cost_over_http_takes_asks_or_gives_back() {
    let (_redis, regions) = regions().await;
    for daemon in &regions {
        let cost = async |cost| daemon.api().check("api", &[("tenant", "http")], cost).await;
        let spent = async |n| {
            let answer = cost(n).await;
            (answer.status, answer.remaining())
        };
        assert_eq!(spent(4).await, (200, 6));
        assert_eq!(spent(0).await, (200, 6), "0 asks");
        assert_eq!(spent(-3).await, (200, 9), "less than 0 gives back");
        assert_eq!(spent(-1_000).await, (200, 10), "and no more than the bucket holds");
        let never = cost(11).await;
        assert_eq!((never.status, never.header("retry-after")), (429, None), "it never fits");
        assert_eq!(spent(1 << 31).await.0, 429, "the largest cost there is");
        assert_eq!(spent(-(1 << 31)).await, (200, 10));
        for too_large in [(1 << 31) + 1, -(1 << 31) - 1, i64::MAX] {
            let refused = cost(too_large).await;
            assert_eq!(refused.status, 400, "{too_large}");
            assert_eq!(refused.json()["errors"][0]["pointer"], json!("#/cost"));
        }
        assert_eq!(spent(10).await, (200, 0), "nothing of that has taken any");
        assert_eq!(spent(1).await, (429, 0));
        assert_eq!(spent(0).await, (200, 0), "to ask about a bucket that is just spent is no offence");
        let twice: [&[(&str, &str)]; 2] = [&[("tenant", "twice")], &[("tenant", "twice")]];
        let both = daemon.api().check_descriptors("api", &twice, 3).await;
        let left: Vec<Value> = limits(&both).into_iter().map(|limit| limit.2).collect();
        assert_eq!((both.status, left.last()), (200, Some(&json!(4))), "each descriptor costs as much");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cost_over_grpc_is_the_requests_or_the_descriptors() {
    let (_redis, regions) = regions().await;
    for daemon in &regions {
        let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
        let mut ask = async |hits_addend, descriptor: RateLimitDescriptor| {
            let request = RateLimitRequest { hits_addend, ..rls_request("api", vec![descriptor]) };
            seen(&grpc.ask(request).await.expect("an answer"))
        };
        let plain = || descriptor(&[("tenant", "grpc")]);
        assert_eq!(ask(0, plain()).await, (Code::Ok, 9), "unset is 1");
        assert_eq!(ask(3, plain()).await, (Code::Ok, 6));
        assert_eq!(ask(3, hits(2, false)).await, (Code::Ok, 4), "the descriptor's own counts");
        assert_eq!(ask(3, hits(0, false)).await, (Code::Ok, 4), "and 0 there asks");
        assert_eq!(ask(0, hits(5, false)).await, (Code::OverLimit, 4));
        assert_eq!(ask(0, hits(3, true)).await, (Code::Ok, 7), "given back");
        let negative = RateLimitDescriptor { is_negative_hits: true, ..plain() };
        assert_eq!(ask(2, negative).await, (Code::Ok, 9), "the request's cost, given back");
        assert_eq!(ask(0, hits(u64::MAX, true)).await, (Code::Ok, 10));
        assert_eq!(ask(u32::MAX, plain()).await, (Code::OverLimit, 10));
        assert_eq!(ask(0, hits(u64::MAX, false)).await, (Code::OverLimit, 10));
        assert_eq!(ask(0, hits(10, false)).await, (Code::Ok, 0), "all of it is there");
        let http = daemon.api().check("api", &[("tenant", "grpc")], 1).await;
        assert_eq!(http.status, 429, "both doors lead to one bucket");
    }
}

/// Case 5, and what an override does when it is right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_that_came_with_a_descriptor_replaces_the_policys() {
    let (_redis, regions) = regions().await;
    for daemon in &regions {
        let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
        let mut ask = async |domain, descriptor: RateLimitDescriptor| {
            grpc.ask(rls_request(domain, vec![descriptor])).await.expect("an answer")
        };
        for left in [2, 1, 0] {
            let answer = ask("api", overridden(3, RateLimitUnit::Day)).await;
            assert_eq!(seen(&answer), (Code::Ok, left));
            let limit = RateLimit { name: "plain".into(), requests_per_unit: 3, unit: 4 };
            assert_eq!(answer.statuses[0].current_limit, Some(limit), "{answer:?}");
        }
        assert_eq!(seen(&ask("api", overridden(3, RateLimitUnit::Day)).await), (Code::OverLimit, 0));
        let other = ask("api", overridden(4, RateLimitUnit::Day)).await;
        assert_eq!(seen(&other), (Code::Ok, 3), "another limit has another bucket");
        let nothing = ask("api", overridden(0, RateLimitUnit::Hour)).await;
        assert_eq!(seen(&nothing), (Code::OverLimit, 0), "a limit of 0 denies");
        let plain = ask("api", descriptor(&[("tenant", "own")])).await;
        assert_eq!(seen(&plain), (Code::Ok, 9), "the policy's own bucket has not moved");
        let elsewhere = ask("nowhere", overridden(3, RateLimitUnit::Day)).await;
        assert_eq!(seen(&elsewhere), (Code::Ok, 0));
        assert_eq!(
            elsewhere.statuses[0].current_limit, None,
            "no policy knows the domain: nothing is limited"
        );
        let mut unmatched = overridden(1, RateLimitUnit::Minute);
        unmatched.entries = descriptor(&[("nobody", "1")]).entries;
        assert_eq!(seen(&ask("api", unmatched.clone()).await), (Code::Ok, 0));
        assert_eq!(
            ask("api", unmatched).await.overall_code(),
            Code::OverLimit,
            "it needs no policy, only a domain"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_counts_and_never_denies() {
    let (_redis, regions) = regions().await;
    for daemon in &regions {
        let check = async |attributes: &[(&str, &str)]| daemon.api().check("shadow", attributes, 1).await;
        for (left, reason) in [(1, "ok"), (0, "ok"), (0, "shadow"), (0, "shadow")] {
            let answer = check(&[("tenant", "7")]).await;
            assert_eq!((answer.status, answer.remaining(), answer.reason()), (200, left, reason.to_owned()));
            assert_eq!(answer.header("retry-after"), None);
        }
        let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
        let answer =
            grpc.ask(rls_request("shadow", vec![descriptor(&[("tenant", "7")])])).await.expect("an answer");
        assert_eq!((answer.overall_code(), answer.statuses[0].code()), (Code::Ok, Code::Ok));
        // Beside an enforced limit it is the other that says what a caller has left, and that denies.
        for left in (0..4).rev() {
            let both = check(&[("tenant", "7"), ("user", "u")]).await;
            assert_eq!(both.must_have("x-ratelimit-remaining"), left.to_string());
            assert_eq!((both.status, limits(&both)[0].3.as_str()), (200, "shadow"));
        }
        let denied = check(&[("tenant", "fresh"), ("user", "u")]).await;
        assert_eq!(denied.status, 429);
        assert!(denied.must_have("ratelimit-policy").starts_with("\"enforced\";"), "{denied:?}");
        assert_eq!(
            check(&[("tenant", "fresh")]).await.remaining(),
            1,
            "what the other denied, it has not counted"
        );
        let metrics = daemon.admin().get("/metrics").await.expect("an answer").text;
        let line = |line: &&str| {
            line.starts_with("quorate_decisions_total{")
                && line.contains("policy=\"counted\"")
                && line.contains("reason=\"shadow\"")
        };
        let line = metrics.lines().find(line).expect("it is counted");
        assert!(line.ends_with(" 7"), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_without_a_limit_never_denies() {
    let (_redis, regions) = regions().await;
    for daemon in &regions {
        for cost in [1, 0, -5, 1 << 31] {
            let answer = daemon.api().check("free", &[("tenant", "7")], cost).await;
            assert_eq!((answer.status, answer.header("ratelimit")), (200, None));
            let limit = answer.limit();
            assert_eq!((&limit["limit"], &limit["remaining"]), (&json!(null), &json!(null)));
        }
        let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
        let answer =
            grpc.ask(rls_request("free", vec![descriptor(&[("tenant", "7")])])).await.expect("an answer");
        assert_eq!(seen(&answer), (Code::Ok, u32::MAX));
        assert_eq!((&answer.statuses[0].current_limit, answer.response_headers_to_add.len()), (&None, 0));
    }
}

/// Case 8 with limits above one another: what one of them refuses, none has counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_limits_above_one_another_all_are_charged_or_none() {
    let (_redis, regions) = regions().await;
    for daemon in &regions {
        let check =
            async |attributes: &[(&str, &str)], cost| daemon.api().check("layers", attributes, cost).await;
        let export = [("op", "export"), ("tenant", "7")];
        let left = |answer: &Answer| -> Vec<(String, Value)> {
            limits(answer).into_iter().map(|(policy, _, left, _)| (policy, left)).collect()
        };
        let all = |tenant, exports, everyone| {
            [("tenant", tenant), ("exports", exports), ("everyone", everyone)]
                .map(|(name, left): (&str, i64)| (name.to_owned(), json!(left)))
                .to_vec()
        };
        let first = check(&export, 2).await;
        assert_eq!((first.status, left(&first)), (200, all(8, 1, 3)));
        assert!(first.must_have("ratelimit-policy").starts_with("\"exports\";"), "it binds most");
        for _ in 0..3 {
            let denied = check(&export, 2).await;
            assert_eq!((denied.status, left(&denied)), (429, all(8, 1, 3)), "none of them moved");
            let allowed: Vec<bool> = limits(&denied).iter().map(|limit| limit.1).collect();
            assert_eq!(allowed, [true, false, true]);
        }
        let other = check(&[("tenant", "8"), ("op", "read")], 3).await;
        assert_eq!(
            left(&other).last(),
            Some(&("everyone".to_owned(), json!(0))),
            "one bucket for all tenants"
        );
        let denied = check(&export, 1).await;
        assert_eq!((denied.status, left(&denied)), (429, all(8, 1, 0)));
        let given_back = check(&export, -1).await;
        assert_eq!((given_back.status, left(&given_back)), (200, all(9, 2, 1)));
        let descriptors: [&[(&str, &str)]; 2] = [&[("tenant", "7")], &[("tenant", "7"), ("op", "export")]];
        let most_exact = daemon.api().check_descriptors("layers", &descriptors, 2).await;
        let names: Vec<String> = limits(&most_exact).into_iter().map(|limit| limit.0).collect();
        assert_eq!((most_exact.status, names), (200, vec!["tenant".to_owned(), "exports".to_owned()]));
    }
}
