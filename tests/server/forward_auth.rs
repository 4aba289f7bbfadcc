//! `/v1/forward-auth`: what a proxy asks, and what it is answered.

use crate::limiter::{Limiter, policy};
use crate::{Answer, Fixture};
use quorate::config::{AttributeSource, ForwardAuth};
use quorate::quota::policy::{OnStoreFailure, Policy, Unit};
use quorate::server::Options;
use reqwest::Method;
use std::time::Duration;

fn config(domain: &str) -> ForwardAuth {
    let header = AttributeSource::Header(http::HeaderName::from_static("x-tenant"));
    ForwardAuth {
        domain: domain.into(),
        trusted_proxies: 1,
        attributes: vec![("ip".into(), AttributeSource::ClientIp), ("tenant".into(), header)],
    }
}

async fn front(limiter: Limiter, domain: &str) -> Fixture {
    let request_timeout = Duration::from_millis(300);
    let forward_auth = Some(config(domain).into());
    Fixture::with(limiter, Options { workers: 1, forward_auth, request_timeout, ..Options::default() }).await
}

fn tenants(burst: u64) -> Policy {
    policy("tenants", &["tenant"], 1, Unit::Second, burst)
}

/// Status, body and all.
async fn ask(front: &Fixture, method: Method, headers: &[(&str, &str)]) -> (Answer, String) {
    let url = format!("http://{}/v1/forward-auth", front.server.http());
    let mut request = front.client.request(method, url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.unwrap();
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let text = response.text().await.unwrap();
    (Answer { status, headers, body: serde_json::from_str(&text).unwrap_or_default() }, text)
}

#[tokio::test]
async fn any_method_is_answered_with_status_and_fields_and_no_body() {
    let front = front(Limiter::new(vec![tenants(6)]), "api").await;
    for method in ["GET", "POST", "HEAD", "PUT", "DELETE", "PROPFIND"] {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let (answer, text) = ask(&front, method, &[("x-tenant", "7")]).await;
        assert_eq!((answer.status, text.as_str()), (200, ""));
        assert_eq!(answer.header("ratelimit-policy"), Some("\"tenants\";q=1;w=1"));
        assert_eq!(answer.header("content-type"), None);
    }
    let (answer, text) = ask(&front, Method::GET, &[("x-tenant", "7")]).await;
    assert_eq!((answer.status, text.as_str()), (429, ""));
    assert_eq!(answer.header("ratelimit"), Some("\"tenants\";r=0;t=1"));
    assert_eq!(
        (answer.header("retry-after"), answer.header("x-ratelimit-remaining")),
        (Some("1"), Some("0"))
    );
    assert_eq!(ask(&front, Method::GET, &[("x-tenant", "8")]).await.0.status, 200);
}

#[tokio::test]
async fn an_outage_of_the_store_is_503_or_passes_as_the_policy_says() {
    let open =
        Policy { on_store_failure: OnStoreFailure::Allow, ..policy("open", &["ip"], 1, Unit::Minute, 9) };
    let limiter = Limiter::new(vec![tenants(9), open]);
    let front = front(limiter.clone(), "api").await;
    limiter.store_is_down(true);
    let (answer, text) = ask(&front, Method::GET, &[("x-tenant", "7")]).await;
    assert_eq!((answer.status, text.as_str()), (503, ""));
    assert_eq!(ask(&front, Method::GET, &[]).await.0.status, 200);
    limiter.store_is_down(false);
    assert_eq!(ask(&front, Method::GET, &[("x-tenant", "7")]).await.0.status, 200);
}

#[tokio::test]
async fn no_decision_in_time_is_503() {
    let front = front(Limiter::new(vec![tenants(9)]), "gated").await;
    let (answer, text) = ask(&front, Method::GET, &[("x-tenant", "7")]).await;
    assert_eq!((answer.status, text.as_str()), (503, ""));
}

/// A request without any of the attributes is like any other that no policy matches.
#[tokio::test]
async fn what_no_policy_matches_is_answered_as_configured() {
    let without_address = |unmatched| async move {
        let mut config = config("api");
        config.attributes.remove(0);
        let options = Options { workers: 1, forward_auth: Some(config.into()), ..Options::default() };
        let front = Fixture::with(Limiter::with_unmatched(vec![tenants(9)], unmatched), options).await;
        ask(&front, Method::GET, &[]).await
    };
    assert_eq!(without_address(true).await.0.status, 200);
    let (answer, text) = without_address(false).await;
    assert_eq!((answer.status, text.as_str()), (429, ""));
}

#[tokio::test]
async fn a_field_that_is_there_twice_is_refused_and_names_itself() {
    let front = front(Limiter::new(vec![tenants(9)]), "api").await;
    let (answer, _) = ask(&front, Method::GET, &[("x-tenant", "7"), ("x-tenant", "8")]).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    assert!(
        answer.body["detail"].as_str().unwrap().starts_with("x-tenant is there more than once"),
        "{answer:?}"
    );
    let large = "x".repeat(15 * 1024);
    let (answer, _) = ask(&front, Method::GET, &[("x-tenant", &large)]).await;
    assert_eq!(answer.status, 200, "as large as a request's head may be");
}

#[tokio::test]
async fn values_that_are_no_text_stay_apart() {
    let front = front(Limiter::new(vec![tenants(1)]), "api").await;
    for bytes in [b"\xff", b"\xfe"] {
        let url = format!("http://{}/v1/forward-auth", front.server.http());
        let value = reqwest::header::HeaderValue::from_bytes(bytes).unwrap();
        let first = front.client.get(&url).header("x-tenant", value.clone()).send().await.unwrap();
        let second = front.client.get(&url).header("x-tenant", value).send().await.unwrap();
        assert_eq!((first.status().as_u16(), second.status().as_u16()), (200, 429));
    }
}

#[tokio::test]
async fn where_it_is_not_configured_it_says_how() {
    let front = Fixture::new(Limiter::new(vec![tenants(9)])).await;
    let (answer, _) = ask(&front, Method::GET, &[]).await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    assert!(answer.body["detail"].as_str().unwrap().contains("set `forward_auth: {"), "{answer:?}");
}
