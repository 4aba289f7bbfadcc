//! `POST /v1/check`, row by row of the contract, and the cases that are told over HTTP.

use crate::limiter::{Limiter, policy};
use crate::{Answer, Fixture, client};
use proptest::prelude::*;
use quorate::quota::amount::Micros;
use quorate::quota::policy::{Limit, OnStoreFailure, Policy, Unit};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const TENANT_7: &str = r#"{"domain":"api","attributes":{"tenant":"7","op":"search"},"cost":1}"#;

fn tenants(amount: u64, burst: u64) -> Policy {
    policy("tenant-requests", &["tenant"], amount, Unit::Second, burst)
}

/// A request of a tenant, with a cost.
fn cost(tenant: &str, cost: i64) -> String {
    json!({"domain": "api", "attributes": {"tenant": tenant}, "cost": cost}).to_string()
}

#[tokio::test]
async fn an_allowed_request() {
    let front = Fixture::new(Limiter::new(vec![tenants(1000, 42)])).await;
    let answer = front.check(TENANT_7).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("ratelimit-policy"), Some("\"tenant-requests\";q=1000;w=1"));
    assert_eq!(answer.header("ratelimit"), Some("\"tenant-requests\";r=41;t=1"));
    assert_eq!(answer.header("x-ratelimit-limit"), Some("1000"));
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("41"));
    assert_eq!(answer.header("x-ratelimit-reset"), Some("1"));
    assert_eq!(answer.header("retry-after"), None);
    let limit = json!({
        "policy": "tenant-requests", "mode": "split", "allowed": true, "limit": 1000, "remaining": 41,
        "reset_ms": 1, "retry_after_ms": 0, "reason": "ok",
    });
    assert_eq!(answer.body, json!({"allowed": true, "limits": [limit]}));
}

#[tokio::test]
async fn a_denied_request_may_come_back_when_it_is_told_to() {
    let front = Fixture::new(Limiter::new(vec![tenants(2, 10)])).await;
    assert_eq!(front.check(cost("7", 10)).await.status, 200);
    let answer = front.check(cost("7", 3)).await;
    assert_eq!(answer.status, 429);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("ratelimit"), Some("\"tenant-requests\";r=0;t=2"));
    assert_eq!(answer.header("x-ratelimit-reset"), Some("2"));
    assert_eq!(answer.header("retry-after"), Some("2"));
    let limit = json!({
        "policy": "tenant-requests", "mode": "split", "allowed": false, "limit": 2, "remaining": 0,
        "reset_ms": 1500, "retry_after_ms": 1500, "reason": "over_limit",
    });
    assert_eq!(answer.body, json!({"allowed": false, "limits": [limit]}));

    front.limiter.pass(Micros::millis(1500) - Micros(1));
    assert_eq!(front.check(cost("7", 3)).await.status, 429);
    front.limiter.pass(Micros(1));
    assert_eq!(front.check(cost("7", 3)).await.status, 200);
}

/// Cases 1, 3, 4, 24.
#[tokio::test]
async fn odd_limits_and_costs() {
    let front =
        Fixture::new(Limiter::new(vec![tenants(5, 5), policy("none", &["none"], 0, Unit::Hour, 0)])).await;
    let none = front.check(r#"{"domain":"api","attributes":{"none":""}}"#).await;
    assert_eq!(none.status, 429);
    assert_eq!(none.header("ratelimit-policy"), Some("\"none\";q=0;w=3600"));
    assert_eq!(none.header("ratelimit"), Some("\"none\";r=0"));
    assert_eq!(none.header("x-ratelimit-limit"), Some("0"));
    assert_eq!(none.header("retry-after"), None);
    assert_eq!(none.body["limits"][0]["retry_after_ms"], json!(null));

    for _ in 0..3 {
        let ask = front.check(cost("7", 0)).await;
        assert_eq!(
            (ask.status, ask.header("x-ratelimit-remaining")),
            (200, Some("5")),
            "asking costs nothing"
        );
    }
    let above = front.check(cost("7", 6)).await;
    assert_eq!((above.status, above.header("retry-after")), (429, None), "it can never come true");
    assert_eq!(front.check(cost("7", 5)).await.status, 200, "nothing was charged before");
    let spent = front.check(cost("7", 0)).await;
    assert_eq!((spent.status, spent.header("x-ratelimit-remaining")), (200, Some("0")));
    let back = front.check(cost("7", -100)).await;
    assert_eq!(
        (back.status, back.header("x-ratelimit-remaining")),
        (200, Some("5")),
        "no more than it holds"
    );
}

/// Case 8, and layers of attributes: all limits are charged, or none.
#[tokio::test]
async fn all_or_none() {
    let exports = policy("exports", &["tenant", "op"], 1, Unit::Hour, 1);
    let front = Fixture::new(Limiter::new(vec![tenants(10, 10), exports])).await;
    let body = r#"{"domain":"api","descriptors":[
        [{"key":"tenant","value":"7"}],[{"key":"tenant","value":"7"},{"key":"op","value":"export"}]]}"#;
    let first = front.check(body).await;
    assert_eq!(first.status, 200);
    assert_eq!(first.header("ratelimit-policy"), Some("\"exports\";q=1;w=3600"), "it binds most");
    assert_eq!(first.body["limits"][0]["remaining"], json!(9));
    let second = front.check(body).await;
    assert_eq!(second.status, 429);
    assert_eq!(second.body["limits"][0]["allowed"], json!(true));
    assert_eq!(second.body["limits"][0]["remaining"], json!(9), "the other one does not move");
    assert_eq!(second.body["limits"][1]["reason"], json!("over_limit"));
    assert_eq!(second.header("retry-after"), Some("3611"), "1/h is 277 micro-tokens a second, rounded down");
}

/// Case 9.
#[tokio::test]
async fn values_are_not_mixed_up() {
    let front = Fixture::new(Limiter::new(vec![
        policy("one", &["a_b"], 1, Unit::Hour, 1),
        policy("two", &["a"], 1, Unit::Hour, 1),
    ]))
    .await;
    let descriptor = |key: &str, value: &str| {
        json!({"domain": "api", "descriptors": [[{"key": key, "value": value}]]}).to_string()
    };
    let emoji = "\u{1f980}".repeat(1000);
    let values = ["c", "b_c", "b.c", "b|c", "b:c", "{b}", "b/c", "b\nc", "b\0c", "b\"\\c", "", &emoji];
    for key in ["a_b", "a"] {
        for value in values {
            assert_eq!(front.check(descriptor(key, value)).await.status, 200, "{key}={value:?}");
            assert_eq!(front.check(descriptor(key, value)).await.status, 429, "{key}={value:?}");
        }
    }
    let large = front.check(descriptor("a", &"x".repeat(64 * 1024))).await;
    assert_eq!(large.status, 413);
    assert_eq!(large.header("content-type"), Some("application/problem+json"));
}

/// Case 10.
#[tokio::test]
async fn what_no_policy_matches() {
    for (allow, status) in [(true, 200), (false, 429)] {
        let front = Fixture::new(Limiter::with_unmatched(vec![tenants(1, 1)], allow)).await;
        for body in [
            r#"{"domain":"elsewhere","attributes":{"tenant":"7"}}"#,
            r#"{"domain":"api","descriptors":[[{"key":"nobody","value":"7"}]]}"#,
        ] {
            let answer = front.check(body).await;
            assert_eq!(answer.status, status);
            assert_eq!(answer.body, json!({"allowed": allow, "limits": []}));
            assert_eq!((answer.header("ratelimit"), answer.header("retry-after")), (None, None));
        }
    }
}

/// Case 22.
#[tokio::test]
async fn an_outage_is_503() {
    let open =
        Policy { on_store_failure: OnStoreFailure::Allow, ..policy("open", &["open"], 1, Unit::Second, 1) };
    let front = Fixture::new(Limiter::new(vec![tenants(5, 5), open])).await;
    front.limiter.store_is_down(true);
    let answer = front.check(TENANT_7).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(answer.body["limits"][0]["reason"], json!("store_unavailable"));
    let open = front.check(r#"{"domain":"api","attributes":{"open":"1"}}"#).await;
    assert_eq!(open.status, 200);
    assert_eq!(open.body["limits"][0]["reason"], json!("store_unavailable"));
    front.limiter.store_is_down(false);
    assert_eq!(front.check(TENANT_7).await.status, 200);
}

#[tokio::test]
async fn unlimited_has_no_numbers() {
    let vip = Policy { limit: Limit::Unlimited, ..policy("vip", &["vip"], 1, Unit::Second, 1) };
    let front = Fixture::new(Limiter::new(vec![vip])).await;
    let answer = front.check(r#"{"domain":"api","attributes":{"vip":"1"}}"#).await;
    assert_eq!((answer.status, answer.header("ratelimit")), (200, None));
    assert_eq!(answer.body["limits"][0]["limit"], json!(null));
    assert_eq!(answer.body["limits"][0]["policy"], json!("vip"));
}

#[tokio::test]
async fn faults_have_a_place() {
    let front = Fixture::new(Limiter::new(vec![tenants(5, 5)])).await;
    let many =
        json!({"domain": "api", "descriptors": vec![json!([{"key": "k", "value": "v"}]); 65]}).to_string();
    let faults = [
        ("", "#"),
        ("{", "#"),
        ("[]", "#"),
        (r#"["api",{"a":"b"},null,1]"#, "#"),
        (r#"{"domain":"api","descriptors":[[["a","b"]]]}"#, "#/descriptors/0/0"),
        ("nonsense", "#"),
        ("{} {}", "#"),
        ("{}", "#/domain"),
        (r#"{"domain":""}"#, "#/domain"),
        (r#"{"domain":7}"#, "#/domain"),
        (r#"{"domain":"api"}"#, "#/descriptors"),
        (r#"{"domain":"api","descriptors":[]}"#, "#/descriptors"),
        (r#"{"domain":"api","descriptors":[[]]}"#, "#/descriptors/0"),
        (r#"{"domain":"api","descriptors":[[{"key":"a","value":"b"},{"key":""}]]}"#, "#/descriptors/0/1"),
        (r#"{"domain":"api","descriptors":[[{"key":"","value":"b"}]]}"#, "#/descriptors/0/0/key"),
        (r#"{"domain":"api","descriptors":[[{"key":"a","value":7}]]}"#, "#/descriptors/0/0/value"),
        (r#"{"domain":"api","descriptors":[[{"key":"a","value":"b","c":1}]]}"#, "#/descriptors/0/0/c"),
        (&many, "#/descriptors"),
        (r#"{"domain":"api","attributes":{}}"#, "#/attributes"),
        (r#"{"domain":"api","attributes":{"":"b"}}"#, "#/attributes"),
        (r#"{"domain":"api","attributes":{"a":"b","a":"c"}}"#, "#/attributes"),
        (r#"{"domain":"api","attributes":{"a":"b"},"descriptors":[]}"#, "#/attributes"),
        (r#"{"domain":"api","attributes":{"a":"b"},"cost":2147483649}"#, "#/cost"),
        (r#"{"domain":"api","attributes":{"a":"b"},"cost":-2147483649}"#, "#/cost"),
        (r#"{"domain":"api","attributes":{"a":"b"},"cost":99999999999999999999}"#, "#/cost"),
        (r#"{"domain":"api","attributes":{"a":"b"},"cost":1.5}"#, "#/cost"),
        (r#"{"domain":"api","attributes":{"a":"b"},"cost":"1"}"#, "#/cost"),
        (r#"{"domain":"api","attributes":{"a":"b"},"hits":1}"#, "#/hits"),
    ];
    for (body, pointer) in faults {
        let answer = front.check(body.to_owned()).await;
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        assert_eq!(answer.body["errors"][0]["pointer"], json!(pointer), "{body}: {}", answer.body);
        assert_eq!(answer.body["status"], json!(400));
        assert!(answer.header("ratelimit").is_none());
    }
    assert_eq!(front.check(cost("7", 1 << 31)).await.status, 429, "the greatest cost is one");
    let text = front.metrics.encode().unwrap();
    let line = format!("quorate_bad_requests_total{{region=\"test\",protocol=\"http\"}} {}", faults.len());
    assert!(text.contains(&line), "{text}");
}

#[tokio::test]
async fn methods_and_paths() {
    let front = Fixture::new(Limiter::new(vec![tenants(5, 5)])).await;
    let base = format!("http://{}", front.server.http());
    for method in [reqwest::Method::GET, reqwest::Method::PUT, reqwest::Method::DELETE] {
        for path in ["check", "acquire", "renew", "release"] {
            let answer =
                front.client.request(method.clone(), format!("{base}/v1/{path}")).send().await.unwrap();
            let answer = Answer::of(answer).await;
            assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
            assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        }
    }
    for path in ["/", "/v1/check/", "/v1/lease", "/metrics"] {
        let answer = front.client.post(format!("{base}{path}")).send().await.unwrap();
        let answer = Answer::of(answer).await;
        assert_eq!((answer.status, answer.body["status"].clone()), (404, json!(404)));
    }
}

#[tokio::test]
async fn http2_without_tls() {
    let front = Fixture::new(Limiter::new(vec![tenants(5, 5)])).await;
    client();
    let client = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let url = format!("http://{}/v1/check", front.server.http());
    let response = client.post(url).body(TENANT_7).send().await.unwrap();
    assert_eq!((response.version(), response.status().as_u16()), (reqwest::Version::HTTP_2, 200));
}

#[tokio::test]
async fn large_bodies() {
    let front = Fixture::new(Limiter::new(vec![tenants(5, 5)])).await;
    let padded = |length: usize| format!("{TENANT_7}{}", " ".repeat(length - TENANT_7.len()));
    assert_eq!(front.check(padded(64 * 1024)).await.status, 200);
    assert_eq!(front.check(padded(64 * 1024 + 1)).await.status, 413);
    assert_eq!(front.check(padded(1024 * 1024)).await.status, 413);
    // Without a length that tells beforehand.
    let chunks = |n: usize| futures::stream::iter((0..n).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1024])));
    assert_eq!(front.check(reqwest::Body::wrap_stream(chunks(64))).await.status, 400);
    assert_eq!(front.check(reqwest::Body::wrap_stream(chunks(65))).await.status, 413);
    assert_eq!(front.check(reqwest::Body::wrap_stream(chunks(1024))).await.status, 413);
    // A caller that asks first is told before it sends.
    let ask = |length: usize| {
        format!(
            "POST /v1/check HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        )
    };
    for (length, line) in
        [(64 * 1024, "HTTP/1.1 100"), (64 * 1024 + 1, "HTTP/1.1 413"), (1 << 30, "HTTP/1.1 413")]
    {
        let mut stream = tokio::net::TcpStream::connect(front.server.http()).await.unwrap();
        stream.write_all(ask(length).as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&answer), line);
    }
}

/// Whatever is sent, there is an answer, and the next request is served.
#[test]
fn any_bytes() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let front = runtime.block_on(Fixture::new(Limiter::new(vec![tenants(1_000_000, 1_000_000)])));
    let json = "[\\[\\]{}\":,a-z0-9.\\-\\\\ ]{0,80}";
    let almost = (0..TENANT_7.len(), any::<u8>()).prop_map(|(at, byte)| {
        let mut bytes = TENANT_7.as_bytes().to_vec();
        bytes[at] = byte;
        bytes
    });
    let bytes = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        json.prop_map(String::into_bytes),
        almost,
        (1..60_usize).prop_map(|n| "[".repeat(n * 1000).into_bytes()),
    ];
    proptest!(ProptestConfig::with_cases(300), |(body in bytes)| {
        let answer = runtime.block_on(front.check(body));
        prop_assert!([200, 400].contains(&answer.status), "{answer:?}");
        prop_assert!(answer.body.is_object());
    });
    assert_eq!(runtime.block_on(front.check(TENANT_7)).status, 200);
}
