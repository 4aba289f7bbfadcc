//! Logs: how much is written when things go wrong, in which form, and that the filter can be changed while it runs.

use crate::support::client::Api;
use crate::support::daemon::{Daemon, Settings};
use crate::support::load::{Ask, History, Steady};
use crate::support::redis::Redis;
use crate::support::{eventually, hold};
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const POLICIES: &str = "
policies:
  - { name: p, domain: api, match: [ { key: tenant } ], limit: { rate: 1000/s, burst: 1000 }, mode: strict }
";
const SOON: Duration = Duration::from_secs(20);

/// A region that logs as its `region.yaml` says (other tests' daemons log more than the default).
async fn region(more: &str) -> (Redis, Daemon) {
    let redis = Redis::start().await;
    let mut settings = Settings::alone(&redis.url(), POLICIES);
    settings.more = more.to_owned();
    settings.env = vec![("QUORATE_LOG".to_owned(), String::new()), ("RUST_LOG".to_owned(), String::new())];
    let daemon = Daemon::start(settings).await;
    (redis, daemon)
}

async fn logs(daemon: &Daemon, what: &str) {
    eventually(&format!("it logs `{what}`"), SOON, || async {
        hold(daemon.log().contains(what), || daemon.log())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_redis_under_load_is_a_few_lines() {
    let (mut redis, daemon) = region("").await;
    let before = daemon.log().lines().count();
    let (history, ask) = (History::default(), Ask::new("all", "api", &[("tenant", "7")]));
    let load = Steady::start(&ask, &[daemon.api()], &[1_000], &history);
    let answered = |status: u16| history.count("all", None, status, Instant::now() - SOON, Instant::now());
    eventually("it admits", SOON, || async { hold(answered(200) > 500, || format!("{}", answered(200))) })
        .await;
    redis.kill();
    logs(&daemon, "not ready").await;
    // Long enough for a dozen attempts to connect.
    eventually("thousands are answered without Redis", Duration::from_secs(60), || async {
        hold(answered(503) > 5_000, || format!("{}", answered(503)))
    })
    .await;
    redis.up().await;
    eventually("it is ready again", SOON, || async {
        let ready = daemon.admin().get("/readyz").await?;
        hold(ready.status == 200, || ready.text.clone())
    })
    .await;
    drop(load);
    let log = daemon.log();
    let lines: Vec<&str> = log.lines().skip(before).collect();
    assert!(lines.len() <= 20, "{} lines for one outage:\n{}", lines.len(), lines.join("\n"));
    assert!(!log.contains("ERROR"), "no person has to look:\n{log}");
}

#[tokio::test]
async fn the_filter_can_be_changed_while_it_runs() {
    let (_redis, mut daemon) = region("telemetry: { log_filter: info }\n").await;
    let admin = daemon.admin();
    assert_eq!(admin.get("/v1/log-filter").await.expect("an answer").text, "info\n");
    assert!(!daemon.log().contains("DEBUG"), "{}", daemon.log());

    daemon.reload("telemetry: { log_filter: 'info,hyper=off,quorate=debug' }\n");
    logs(&daemon, "re-read what can change live").await;
    let filter = admin.get("/v1/log-filter").await.expect("an answer").text;
    assert_eq!(filter, "info,hyper=off,quorate=debug\n");
    let stale = [("if-match", "\"99\"")];
    let conflict = put(&admin, "/v1/policies", POLICIES, &stale).await;
    assert_eq!(conflict.0, 412);
    logs(&daemon, "a change of policies came too late").await;

    daemon.reload("telemetry: { log_filter: 'quorate=loud' }\n");
    logs(&daemon, "SIGHUP: kept what could not be re-read as it was").await;
    assert!(daemon.log().contains("log_filter"), "the line says what is wrong: {}", daemon.log());

    let (status, text) = put(&admin, "/v1/log-filter", "error", &[]).await;
    assert_eq!((status, text.as_str()), (200, "error\n"));
    let (status, text) = put(&admin, "/v1/log-filter", "quorate=loud", &[]).await;
    assert!(status == 400 && text.contains("quorate=loud"), "{status} {text}");
    let late = |log: &str| log.matches("a change of policies came too late").count();
    let before = late(&daemon.log());
    assert_eq!(put(&admin, "/v1/policies", POLICIES, &stale).await.0, 412);
    assert_eq!(late(&daemon.log()), before, "DEBUG is not written any more:\n{}", daemon.log());
}

#[tokio::test]
async fn json_lines_have_the_fields_that_the_documentation_names() {
    let (mut redis, daemon) = region("telemetry: { log: json }\n").await;
    logs(&daemon, "\"message\":\"ready\"").await;
    redis.kill();
    logs(&daemon, "detached from Redis").await;
    logs(&daemon, "not ready").await;
    redis.up().await;
    eventually("it is ready again", SOON, || async {
        let ready = daemon.admin().get("/readyz").await?;
        hold(ready.status == 200, || ready.text.clone())
    })
    .await;
    let documented = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/telemetry.md"));
    let documented = documented.expect("docs/telemetry.md");
    let mut messages = BTreeSet::new();
    for line in daemon.log().lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("not JSON ({e}): {line}"));
        for field in ["timestamp", "level", "message", "target"] {
            assert!(line[field].is_string(), "no {field} in {line}");
            assert!(documented.contains(&format!("`{field}`")), "{field} is not documented");
        }
        assert!(line["after_ms"].is_null() || line["after_ms"].is_u64(), "numbers are numbers: {line}");
        let time = line["timestamp"].as_str().expect("a text");
        assert!(time.len() >= 20 && time.ends_with('Z') && time.contains('T'), "RFC 3339 in UTC: {time}");
        assert!(["INFO", "WARN", "ERROR"].contains(&line["level"].as_str().expect("a text")), "{line}");
        messages.insert(line["message"].as_str().expect("a text").to_owned());
    }
    for message in ["starting", "ready", "detached from Redis", "not ready", "policies are in use"] {
        assert!(messages.contains(message), "{message}: {messages:?}");
        assert!(documented.contains(&format!("`{message}`")), "`{message}` is not documented");
    }
}

async fn put(api: &Api, path: &str, body: &str, headers: &[(&str, &str)]) -> (u16, String) {
    let answer = api.request(reqwest::Method::PUT, path, body, headers).await.expect("an answer");
    (answer.status, answer.text)
}
