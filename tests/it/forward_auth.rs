//! `/v1/forward-auth` behind real proxies, with the configurations that users are given (deploy/).

use crate::support::client::{Answer, Api};
use crate::support::daemon::{Daemon, Settings};
use crate::support::proxies::{Proxy, with_ports};
use std::net::SocketAddr;

const POLICIES: &str = "
policies:
  - name: tenant-requests
    domain: api
    match: [ { key: tenant } ]
    limit: { rate: 6/m, burst: 5 }
    mode: split
  - name: by-address
    domain: api
    match: [ { key: ip }, { key: path, value: /by-address } ]
    limit: { rate: 6/m, burst: 3 }
    mode: split
";
const FORWARD_AUTH: &str = "
forward_auth: { domain: api, trusted_proxies: 1, attributes: { tenant: 'header:x-tenant', ip: client-ip, path: path } }
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_lets_the_limit_through_and_answers_429_with_the_fields() {
    let mut daemon = daemon().await;
    let nginx = Proxy::nginx(daemon.http_address()).await;
    limits_tenants(&nginx.api()).await;
    limits_addresses_whatever_the_client_says(&nginx.api()).await;
    daemon.kill();
    let answer = get(&nginx.api(), "/", &[]).await;
    assert_eq!(answer.status, 503, "without a daemon nothing passes, as the example says: {answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caddy_lets_the_limit_through_and_answers_429_with_the_fields() {
    let mut daemon = daemon().await;
    let caddy = Proxy::caddy(daemon.http_address()).await;
    limits_tenants(&caddy.api()).await;
    limits_addresses_whatever_the_client_says(&caddy.api()).await;
    daemon.kill();
    let answer = get(&caddy.api(), "/", &[]).await;
    assert_eq!(answer.status, 502, "without a daemon nothing passes: {answer:?}");
}

/// Traefik sends the request's own header fields, and with `trustForwardHeader: false` overwrites these.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_traefik_asks_is_answered() {
    let daemon = daemon().await;
    let unused = SocketAddr::from(([127, 0, 0, 1], 3_000));
    let config = with_ports("traefik.yaml", &[(8_080, daemon.http_address()), (3_000, unused)]);
    let address = config.lines().find_map(|line| line.trim().strip_prefix("address: ")).expect("an address");
    let path = address.strip_prefix(&daemon.api().url()).expect("the daemon's");
    let ask = |address: &'static str, tenant: &'static str| {
        let headers = [
            ("x-forwarded-method", "POST"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "shop.example"),
            ("x-forwarded-uri", "/by-address?page=2"),
            ("x-forwarded-for", address),
            ("x-tenant", tenant),
            ("user-agent", "curl/8"),
        ];
        let api = daemon.api();
        async move { api.get_with(path, &headers).await.expect("an answer") }
    };
    for tenant in ["a", "b", "c"] {
        assert_eq!(ask("203.0.113.5", tenant).await.status, 200);
    }
    let denied = ask("203.0.113.5", "d").await;
    assert_eq!((denied.status, denied.text.as_str()), (429, ""));
    assert!(denied.must_have("retry-after").parse::<u64>().expect("whole seconds") >= 1);
    assert_eq!(denied.must_have("ratelimit-policy"), "\"by-address\";q=6;w=60");
    assert_eq!(ask("203.0.113.6", "d").await.status, 200, "another address");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_it_is_not_configured_it_says_how() {
    let settings = Settings { redis: None, ..Settings::alone("", POLICIES) };
    let daemon = Daemon::start(settings).await;
    let answer = get(&daemon.api(), "/v1/forward-auth", &[]).await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.must_have("content-type"), "application/problem+json");
    assert!(answer.text.contains("set `forward_auth:"), "{}", answer.text);
}

/// A burst of five, and what is left is told on the way.
async fn limits_tenants(api: &Api) {
    for left in (0..5).rev() {
        let answer = get(api, "/any?x=1", &[("x-tenant", "42")]).await;
        assert_eq!((answer.status, answer.text.as_str()), (200, "hello\n"), "from the service behind");
        assert_eq!(answer.must_have("ratelimit-policy"), "\"tenant-requests\";q=6;w=60");
        assert!(
            answer.must_have("ratelimit").starts_with(&format!("\"tenant-requests\";r={left};t=")),
            "{answer:?}"
        );
    }
    let denied = get(api, "/any", &[("x-tenant", "42")]).await;
    assert_eq!(denied.status, 429);
    assert!(!denied.text.contains("hello"));
    let retry: u64 = denied.must_have("retry-after").parse().expect("whole seconds");
    assert!((1..=11).contains(&retry), "{retry}");
    assert!(denied.must_have("ratelimit").starts_with("\"tenant-requests\";r=0;t="));
    let answer = get(api, "/any", &[]).await;
    assert_eq!(answer.status, 200, "no tenant, no limit");
    assert_eq!(answer.header("ratelimit"), None);
}

/// What a client writes into the fields by which proxies name it and its request buys it nothing.
async fn limits_addresses_whatever_the_client_says(api: &Api) {
    for n in 0..3 {
        let forged = format!("198.51.100.{n}");
        let answer =
            get(api, "/by-address?n=1", &[("x-forwarded-for", &forged), ("x-tenant", &forged)]).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    for (name, value) in [
        ("x-forwarded-for", "198.51.100.99"),
        ("x-forwarded-uri", "/elsewhere"),
        ("x-original-uri", "/elsewhere"),
        ("x-forwarded-method", "OPTIONS"),
    ] {
        let answer = get(api, "/by-address", &[(name, value), ("x-tenant", value)]).await;
        assert_eq!(answer.status, 429, "{name}: {value}");
    }
}

async fn get(api: &Api, path: &str, headers: &[(&str, &str)]) -> Answer {
    api.get_with(path, headers).await.expect("an answer")
}

async fn daemon() -> Daemon {
    let more = FORWARD_AUTH.to_owned();
    Daemon::start(Settings { redis: None, more, ..Settings::alone("", POLICIES) }).await
}
