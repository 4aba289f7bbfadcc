//! The admin listener.

use crate::{Answer, client};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use quorate::server::admin::{
    self, Access, AdminSource, ApplyError, BucketError, Feed, MetricsFormat, PolicyChange, RegionAction,
    ResetError, ResetRequest,
};
use quorate::server::listen;
use quorate::server::state::{
    AppliedPolicies, BucketReset, BucketView, NotReady, RegionState, RegionStep, RegionsState, State,
};
use quorate::telemetry::Metrics;
use reqwest::{Method, RequestBuilder};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// A daemon's policies, and nothing else of it.
struct Source {
    metrics: Metrics,
    reasons: Mutex<Vec<String>>,
    policies: Mutex<(u64, String)>,
    feed: Arc<Feed>,
}

impl AdminSource for Source {
    fn not_ready(&self) -> Vec<String> {
        self.reasons.lock().unwrap().clone()
    }

    fn metrics(&self, format: MetricsFormat) -> Result<String, std::fmt::Error> {
        match format {
            MetricsFormat::OpenMetrics => self.metrics.encode(),
            MetricsFormat::Prometheus => self.metrics.encode_plain(),
        }
    }

    fn state(&self) -> BoxFuture<'_, State> {
        async { State { region: "us-east".into(), ..State::default() } }.boxed()
    }

    fn policies(&self) -> (u64, String) {
        self.policies.lock().unwrap().clone()
    }

    fn apply(&self, change: PolicyChange) -> BoxFuture<'_, Result<AppliedPolicies, ApplyError>> {
        async move {
            let mut policies = self.policies.lock().unwrap();
            if !change.yaml.starts_with("policies:") {
                return Err(ApplyError::Invalid(vec!["policies.yaml:1:1: unknown key".into()]));
            }
            if change.expected.is_some_and(|v| v != policies.0) {
                return Err(ApplyError::Conflict(policies.0));
            }
            let version = policies.0 + 1;
            if !change.dry_run {
                *policies = (version, change.yaml);
            }
            Ok(AppliedPolicies { version, dry_run: change.dry_run, changes: Vec::new() })
        }
        .boxed()
    }

    fn regions(&self) -> RegionsState {
        let region = RegionState { region: "us-east".into(), ..RegionState::default() };
        RegionsState { region: "us-east".into(), regions: vec![region] }
    }

    fn change_region(
        &self,
        region: String,
        action: RegionAction,
    ) -> BoxFuture<'_, Result<RegionStep, ApplyError>> {
        async move {
            let waits_for = match action {
                RegionAction::Demote => return Err(ApplyError::Refused("it would lose quorum".into())),
                RegionAction::Lead => return Err(ApplyError::Unavailable("nobody leads".into())),
                other => Some(format!("{other:?}")),
            };
            Ok(RegionStep { region, waits_for, ..RegionStep::default() })
        }
        .boxed()
    }

    fn bucket<'a>(
        &'a self,
        policy: &'a str,
        values: Vec<(String, String)>,
    ) -> BoxFuture<'a, Result<BucketView, BucketError>> {
        async move {
            match (policy, &values[..]) {
                ("tenants", [(key, value)]) if key == "tenant" => {
                    Ok(BucketView { policy: policy.into(), bucket: value.clone(), ..BucketView::default() })
                }
                ("tenants", _) => Err(BucketError::NoMatch("send ?tenant=...".into())),
                _ => Err(BucketError::NoPolicy(policy.into())),
            }
        }
        .boxed()
    }

    fn bucket_by_id<'a>(
        &'a self,
        policy: &'a str,
        id: &'a str,
    ) -> BoxFuture<'a, Result<BucketView, BucketError>> {
        async move { Ok(BucketView { policy: policy.into(), bucket: id.into(), ..BucketView::default() }) }
            .boxed()
    }

    fn feed(&self) -> Arc<Feed> {
        Arc::clone(&self.feed)
    }

    fn reset_bucket(&self, request: ResetRequest) -> BoxFuture<'_, Result<BucketReset, ResetError>> {
        let ResetRequest { policy, values, by, reason } = request;
        async move {
            match policy.as_str() {
                "tenants" => Ok(BucketReset {
                    policy: format!("{policy} {values:?} {by}: {reason}"),
                    number: 3,
                    ..BucketReset::default()
                }),
                "free" => Err(ApplyError::Refused("nothing is to be reset".into()).into()),
                "away" => Err(ApplyError::Unknown("no answer".into()).into()),
                _ => Err(BucketError::NoPolicy(policy).into()),
            }
        }
        .boxed()
    }
}

struct Admin {
    source: Arc<Source>,
    address: SocketAddr,
    client: reqwest::Client,
    stop: watch::Sender<bool>,
    served: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Admin {
    fn new(token: Option<&str>) -> Self {
        let source = Arc::new(Source {
            metrics: Metrics::new("us-east"),
            reasons: Mutex::default(),
            policies: Mutex::new((1, "policies: []\n".into())),
            feed: Arc::default(),
        });
        let listener = listen::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopping) = watch::channel(false);
        let shared: Arc<dyn AdminSource> = Arc::clone(&source) as _;
        let routes = admin::router(shared, Access::new(token.map(quorate::config::Secret::new)));
        let served = tokio::spawn(admin::serve(listener, None, routes, stopping));
        Self { source, address, client: client(), stop, served }
    }

    fn to(&self, method: Method, path: &str) -> RequestBuilder {
        self.client.request(method, format!("http://{}{path}", self.address))
    }

    async fn get(&self, path: &str) -> Answer {
        self.send(self.to(Method::GET, path)).await
    }

    async fn put(&self, query: &str, body: &str, headers: &[(&str, &str)]) -> Answer {
        let request = self.to(Method::PUT, &format!("/v1/policies{query}")).body(body.to_owned());
        self.send(headers.iter().fold(request, |r, (name, value)| r.header(*name, *value))).await
    }

    async fn send(&self, request: RequestBuilder) -> Answer {
        Answer::of(request.send().await.unwrap()).await
    }
}

#[tokio::test]
async fn health_readiness_and_the_rest() {
    let admin = Admin::new(None);
    assert_eq!(admin.get("/healthz").await.status, 200);
    assert_eq!(admin.get("/readyz").await.status, 200);
    admin.source.reasons.lock().unwrap().push("store: not attached".into());
    let not_ready = admin.get("/readyz").await;
    assert_eq!(not_ready.status, 503);
    let parsed: NotReady = serde_json::from_value(not_ready.body).unwrap();
    assert_eq!(
        parsed,
        NotReady { ready: false, witness: false, reasons: vec!["store: not attached".into()] }
    );
    assert_eq!(admin.get("/healthz").await.status, 200, "not ready, but alive");

    let metrics = admin.to(Method::GET, "/metrics").send().await.unwrap();
    let kind = metrics.headers()["content-type"].to_str().unwrap().to_owned();
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(metrics.text().await.unwrap().ends_with("# EOF\n"));
    for (accept, plain) in [
        ("*/*", false),
        ("text/plain", true),
        // As Prometheus asks.
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", false),
    ] {
        let metrics = admin.to(Method::GET, "/metrics").header("accept", accept).send().await.unwrap();
        let kind = metrics.headers()["content-type"].to_str().unwrap().to_owned();
        assert_eq!(kind.starts_with("text/plain; version=0.0.4"), plain, "{accept}: {kind}");
        assert_eq!(!metrics.text().await.unwrap().contains("# EOF"), plain, "{accept}");
    }

    let state: State = serde_json::from_value(admin.get("/v1/state").await.body).unwrap();
    assert_eq!(state.region, "us-east");
    let sparse: State = serde_json::from_value(json!({"region": "r", "from_the_future": 1})).unwrap();
    assert_eq!(sparse, State { region: "r".into(), ..State::default() });

    assert_eq!(admin.get("/v1/buckets/tenants?tenant=42").await.body["bucket"], json!("42"));
    assert_eq!(admin.get("/v1/buckets/tenants").await.status, 400);
    assert_eq!(admin.get("/v1/buckets/nobody?tenant=42").await.status, 404);
    let nowhere = admin.get("/v1/nowhere").await;
    assert_eq!((nowhere.status, nowhere.header("content-type")), (404, Some("application/problem+json")));
    let delete = admin.send(admin.to(Method::DELETE, "/v1/policies")).await;
    assert_eq!((delete.status, delete.header("content-type")), (405, Some("application/problem+json")));

    admin.stop.send_replace(true);
    admin.served.await.unwrap().unwrap();
}

#[tokio::test]
async fn policies_are_changed_with_care() {
    let admin = Admin::new(None);
    let shown = admin.to(Method::GET, "/v1/policies").send().await.unwrap();
    assert_eq!(shown.headers()["etag"], "\"1\"");
    assert_eq!(shown.text().await.unwrap(), "policies: []\n");

    let yaml = "policies: [] # new";
    let dry = admin.put("?dry_run=1", yaml, &[]).await;
    assert_eq!((dry.status, dry.body), (200, json!({"version": 2, "dry_run": true})));
    let misspelt = admin.put("?dryrun=1", yaml, &[]).await;
    assert_eq!(misspelt.status, 400, "it must not be done in earnest");
    assert_eq!(admin.put("?dry_run=yes", yaml, &[]).await.status, 400);
    assert_eq!(admin.source.policies().0, 1);

    let conflict = admin.put("", yaml, &[("if-match", "\"7\"")]).await;
    assert_eq!(conflict.status, 412);
    assert_eq!(admin.put("", yaml, &[("if-match", "new")]).await.status, 400);
    let done = admin.put("", yaml, &[("if-match", "\"1\"")]).await;
    assert_eq!((done.status, done.header("etag")), (200, Some("\"2\"")));
    assert_eq!(admin.put("", yaml, &[("if-match", "*")]).await.status, 200);
    assert_eq!(admin.source.policies(), (3, yaml.to_owned()));

    let bad = admin.put("", "unlimied: true", &[]).await;
    assert_eq!(bad.status, 400);
    assert_eq!(bad.body["errors"], json!([{"detail": "policies.yaml:1:1: unknown key"}]));
    let large = admin.put("", &"x".repeat(admin::POLICIES_MAX + 1), &[]).await;
    assert_eq!(large.status, 413);
    assert_eq!(admin.source.policies().0, 3);
}

#[tokio::test]
async fn changes_need_the_token() {
    let admin = Admin::new(Some("s3cret"));
    let yaml = "policies: []";
    for headers in [
        &[][..],
        &[("authorization", "Bearer wrong!")],
        &[("authorization", "Bearer s3cre")],
        &[("authorization", "Bearer s3crets")],
        &[("authorization", "Bearer ")],
        &[("authorization", "s3cret")],
        &[("authorization", "Basic s3cret")],
    ] {
        let answer = admin.put("", yaml, headers).await;
        assert_eq!((answer.status, answer.header("content-type")), (401, Some("application/problem+json")));
    }
    assert_eq!(admin.put("", yaml, &[("authorization", "bearer s3cret")]).await.status, 200);
    assert_eq!(admin.get("/v1/policies").await.status, 200, "reading needs none");
    let shown = format!("{:?}", Access::new(Some(quorate::config::Secret::new("s3cret"))));
    assert!(!shown.contains("s3cret"), "{shown}");
}

#[tokio::test]
async fn regions_are_changed_step_by_step() {
    let admin = Admin::new(Some("s3cret"));
    assert_eq!(admin.get("/v1/regions").await.body["regions"][0]["region"], json!("us-east"));
    let ask = async |method, path: &str, body: &str| {
        let request = admin.to(method, path).header("authorization", "Bearer s3cret").body(body.to_owned());
        admin.send(request).await
    };
    let body = r#"{"region": "ca-west", "url": "https://ca:1"}"#;
    let added = ask(Method::POST, "/v1/regions", body).await;
    assert_eq!((added.status, &added.body["region"]), (200, &json!("ca-west")));
    assert_eq!(added.body["waits_for"], json!(r#"Add { url: "https://ca:1", witness: false }"#));
    assert_eq!(added.body["done"], json!(false));
    let removed = ask(Method::DELETE, "/v1/regions/ca-west?presume_dead=1", "").await;
    assert_eq!(removed.body["waits_for"], json!("Remove { presume_dead: true }"));
    let removed = ask(Method::DELETE, "/v1/regions/ca-west", "").await;
    assert_eq!(removed.body["waits_for"], json!("Remove { presume_dead: false }"));
    assert_eq!(
        ask(Method::POST, "/v1/regions/ca-west/promote", "").await.body["waits_for"],
        json!("Promote")
    );

    // A promise is not made by a slip of the pen, and nothing is done for whoever may not.
    for (method, path, body, status) in [
        (Method::DELETE, "/v1/regions/ca-west?presumed_dead=1", "", 400),
        (Method::DELETE, "/v1/regions/ca-west?presume_dead=yes", "", 400),
        (Method::POST, "/v1/regions", r#"{"region": "ca-west"}"#, 400),
        (Method::POST, "/v1/regions", r#"{"region": "ca-west", "url": "x", "voter": true}"#, 400),
        (Method::POST, "/v1/regions/ca-west/demote", "", 409),
        (Method::POST, "/v1/regions/ca-west/lead", "", 503),
        (Method::POST, "/v1/regions/ca-west/praise", "", 404),
    ] {
        assert_eq!(ask(method, path, body).await.status, status, "{path} {body}");
    }
    for (method, path) in [
        (Method::POST, "/v1/regions"),
        (Method::DELETE, "/v1/regions/ca-west"),
        (Method::POST, "/v1/regions/ca-west/promote"),
    ] {
        assert_eq!(admin.send(admin.to(method, path).body(body)).await.status, 401, "{path}");
    }
}

#[tokio::test]
async fn the_console_is_served_with_what_keeps_it_safe_and_cached() {
    let admin = Admin::new(None);
    let page = admin.get("/console").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").unwrap();
    for rule in [
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ] {
        assert!(policy.contains(rule), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    let html = admin.to(Method::GET, "/console").send().await.unwrap().text().await.unwrap();
    let linked: Vec<&str> =
        html.split('"').filter(|part| part.starts_with("console/") && part.contains('.')).collect();
    assert!(linked.len() >= 3, "{linked:?}");
    for path in linked {
        let path = format!("/{path}");
        let file = admin.get(&path).await;
        assert_eq!(file.status, 200, "{path}");
        let tag = file.header("etag").unwrap().to_owned();
        for (sent, status) in [(tag.as_str(), 304), (&format!("\"x\", W/{tag}"), 304), ("\"x\"", 200)] {
            let again = admin.send(admin.to(Method::GET, &path).header("if-none-match", sent)).await;
            assert_eq!((again.status, again.header("etag")), (status, Some(tag.as_str())), "{path} {sent}");
        }
    }
    let moved =
        reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    for (path, to) in [("/", "console"), ("/console/", "../console")] {
        let answer = moved.get(format!("http://{}{path}", admin.address)).send().await.unwrap();
        assert_eq!(answer.headers()["location"], to, "{path}");
    }
}

#[tokio::test]
async fn events_are_streamed_to_so_many_and_end_with_the_daemon() {
    let admin = Admin::new(None);
    let open = || async { admin.to(Method::GET, "/v1/events").send().await.unwrap() };
    let mut first = open().await;
    assert_eq!(
        (first.status().as_u16(), &first.headers()["content-type"]),
        (200, &"text/event-stream".parse().unwrap())
    );
    assert_eq!(first.headers()["cache-control"], "no-store");
    let begins = String::from_utf8(first.chunk().await.unwrap().unwrap().to_vec()).unwrap();
    assert!(begins.contains("event: state") && begins.contains(r#""region":"us-east""#), "{begins}");
    let mut others = Vec::new();
    for _ in 1..admin::STREAMS_MAX {
        others.push(open().await);
    }
    let one_more = admin.get("/v1/events").await;
    assert_eq!((one_more.status, one_more.header("content-type")), (503, Some("application/problem+json")));
    admin.source.feed.close();
    let mut rest = String::new();
    while let Some(chunk) = first.chunk().await.unwrap() {
        rest.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(!rest.contains("event: state"), "{rest}");
}

/// A page of another origin cannot set a token, and says where it comes from; without a token that must do.
#[tokio::test]
async fn another_origins_page_changes_nothing() {
    let admin = Admin::new(None);
    let lead = |origin: String| admin.to(Method::POST, "/v1/regions/ca-west/lead").header("origin", origin);
    let here = format!("http://{}", admin.address);
    for origin in ["http://evil.example", "null", "http://localhost", &format!("{here}0")] {
        assert_eq!(admin.send(lead(origin.to_owned())).await.status, 403, "{origin}");
    }
    assert_eq!(admin.send(lead(here)).await.status, 503, "it got through to the daemon");
    let behind_a_proxy = Admin::new(Some("s3cret"));
    let request = behind_a_proxy.to(Method::POST, "/v1/regions/ca-west/lead").bearer_auth("s3cret");
    let answer = behind_a_proxy.send(request.header("origin", "https://admin.example")).await;
    assert_eq!(answer.status, 503, "whoever has the token may");
}

#[tokio::test]
async fn a_bucket_is_reset_by_whoever_may_and_with_a_reason() {
    let admin = Admin::new(Some("s3cret"));
    let ask = async |path: &str, body: &str| {
        let request = admin.to(Method::POST, path).header("authorization", "Bearer s3cret");
        admin.send(request.body(body.to_owned())).await
    };
    let path = "/v1/buckets/tenants/reset?tenant=42";
    let answer = ask(path, r#"{"reason": " they\ncalled "}"#).await;
    assert_eq!((answer.status, &answer.body["number"]), (200, &json!(3)));
    let seen = r#"tenants [("tenant", "42")] 127.0.0.1 with the admin token: they called"#;
    assert_eq!(answer.body["policy"], json!(seen), "on one line, with who asked");
    for (path, body, status) in [
        (path, "", 400),
        (path, r#"{"reason": "  "}"#, 400),
        (path, r#"{"reason": "r", "force": true}"#, 400),
        ("/v1/buckets/nobody/reset?a=b", r#"{"reason": "r"}"#, 404),
        ("/v1/buckets/free/reset?a=b", r#"{"reason": "r"}"#, 409),
        ("/v1/buckets/away/reset?a=b", r#"{"reason": "r"}"#, 504),
    ] {
        assert_eq!(ask(path, body).await.status, status, "{path} {body}");
    }
    let long = json!({ "reason": "x".repeat(401) }).to_string();
    assert_eq!(ask(path, &long).await.status, 400);
    let request = admin.to(Method::POST, path).body(r#"{"reason": "r"}"#);
    assert_eq!(admin.send(request).await.status, 401);
}

/// A page in a browser can send its own requests here, but under its own name.
#[tokio::test]
async fn without_a_token_only_this_machine_changes_things() {
    let admin = Admin::new(None);
    let yaml = "policies: []";
    for host in ["evil.example", "evil.example:8083", "10.0.0.1", "localhost.evil.example", "127.0.0.1@evil"]
    {
        assert_eq!(admin.put("", yaml, &[("host", host)]).await.status, 403, "{host}");
    }
    for host in ["localhost", "localhost:8083", "127.0.0.1:8083", "[::1]:8083"] {
        assert_eq!(admin.put("", yaml, &[("host", host)]).await.status, 200, "{host}");
    }
}
