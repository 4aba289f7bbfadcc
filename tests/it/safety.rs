//! What callers who mean ill, or are many, can do to a region: little. And what an operator can change while it runs.

use crate::support::daemon::{Daemon, Settings, quorate};
use crate::support::redis::Redis;
use crate::support::{eventually, hold};
use futures::StreamExt as _;
use quorate::quota::matching::bucket_id;
use quorate::quota::redaction::Redaction;
use rcgen::{CertificateParams, KeyPair};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::cell::Cell;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const WITHIN: Duration = Duration::from_secs(30);
/// A strict policy and a split one: a bucket of each for each value.
const POLICIES: &str = "
policies:
  - { name: strict, domain: strict, match: [ { key: ip } ], limit: { rate: 100/m, burst: 60 }, mode: strict, wait: 0 }
  - { name: split, domain: split, match: [ { key: ip } ], limit: { rate: 10/m, burst: 10 }, mode: split }
  - { name: tenants, domain: api, match: [ { key: tenant } ], limit: { rate: 1000000/s, burst: 1000000 }, mode: split }
  - { name: free, domain: free, match: [ { key: tenant } ], unlimited: true }
";
const TOKENS: &str = "flooder flooders-own-secret-token\nhonest  honests-own-secret-token\n";

/// A caller with a token.
#[derive(Clone)]
struct Caller {
    http: reqwest::Client,
    url: String,
    token: &'static str,
}

impl Caller {
    fn new(daemon: &Daemon, token: &'static str) -> Self {
        let http = reqwest::Client::builder().no_proxy().timeout(WITHIN).build().expect("a client");
        Self { http, url: format!("{}/v1/check", daemon.api().url()), token }
    }

    /// Status and body.
    async fn ask(&self, body: Value) -> (u16, Value) {
        let request = self.http.post(&self.url).bearer_auth(self.token).body(body.to_string());
        let answer = request.send().await.unwrap_or_else(|e| panic!("no answer: {e:?}"));
        let status = answer.status().as_u16();
        (status, serde_json::from_slice(&answer.bytes().await.expect("a body")).expect("JSON"))
    }

    async fn check(&self, domain: &str, key: &str, value: &str) -> (u16, String) {
        let (status, body) = self.ask(json!({"domain": domain, "attributes": {key: value}})).await;
        let reason = body.pointer("/limits/0/reason").and_then(Value::as_str).unwrap_or_default();
        (status, reason.to_owned())
    }
}

/// One with a token file, ready.
async fn guarded(more: &str) -> (Redis, Daemon) {
    let redis = Redis::start().await;
    let settings = Settings {
        more: format!("caller_tokens_file: tokens\n{more}"),
        ..Settings::alone(&redis.url(), POLICIES)
    };
    let mut daemon = Daemon::down(settings);
    write(&daemon, "tokens", TOKENS);
    daemon.spawn();
    daemon.ready().await;
    (redis, daemon)
}

fn write(daemon: &Daemon, file: &str, content: &str) {
    let folder = daemon.config_file().parent().expect("a folder").to_owned();
    std::fs::write(folder.join(file), content).expect("it is written");
}

async fn keys(redis: &Redis) -> u64 {
    redis.cli(&["DBSIZE"]).await.trim().parse().expect("a number")
}

async fn redis_memory(redis: &Redis) -> u64 {
    let info = redis.cli(&["INFO", "memory"]).await;
    let used = info.lines().find_map(|line| line.trim().strip_prefix("used_memory:"));
    used.expect("used_memory").parse().expect("a number")
}

/// Random values by the thousand. `FLOOD_VALUES=1000000` makes it a million in a minute with the default limits.
#[tokio::test]
async fn a_flood_of_new_values_fills_nothing() {
    let full: Option<usize> = std::env::var("FLOOD_VALUES").ok().map(|n| n.parse().expect("a number"));
    let (values, each) = full.map_or((12_000, 8), |values| (values, 32));
    let (a_second, limits) = match full {
        Some(_) => (10_000, ""),
        None => (200, "caller_limits: { new_buckets_per_second: 200 }\n"),
    };
    let (redis, daemon) = guarded(limits).await;
    let (flooder, honest) =
        (Caller::new(&daemon, "flooders-own-secret-token"), Caller::new(&daemon, "honests-own-secret-token"));
    assert_eq!(honest.check("api", "tenant", "old").await.0, 200);
    let (memory, redis_before) = (daemon.memory(), redis_memory(&redis).await);

    let began = Instant::now();
    let pace = full.map(|n| Duration::from_secs(60).div_f64(n as f64));
    let flood = async {
        let requests = futures::stream::iter(0..values / each).map(|n| {
            let flooder = flooder.clone();
            let value = |i: usize| json!([{"key": "ip", "value": format!("{:x}-{n}", i * 7_919)}]);
            let domain = if n % 2 == 0 { "strict" } else { "split" };
            let body = json!({"domain": domain, "descriptors": (0..each).map(value).collect::<Vec<_>>()});
            async move {
                if let Some(pace) = pace {
                    let due = pace.mul_f64((n * each) as f64);
                    tokio::time::sleep(due.saturating_sub(began.elapsed())).await;
                }
                let asked = Instant::now();
                let (status, body) = flooder.ask(body).await;
                (status, body.to_string().contains("too_many_buckets"), asked.elapsed())
            }
        });
        requests.buffer_unordered(32).collect::<Vec<_>>().await
    };
    let store_too_slow = Cell::new(0);
    let served = |what: String, (status, reason): (u16, String)| {
        // On a machine that does much else Redis may be too late: that is said, and is not a denial.
        let late = (status, reason.as_str()) == (503, "store_unavailable");
        store_too_slow.set(store_too_slow.get() + u32::from(late));
        assert!(late || (status, reason.as_str()) == (200, "ok"), "{what}: {status} {reason}");
    };
    let meanwhile = async {
        for n in 0_u64.. {
            served("a bucket that exists".into(), honest.check("api", "tenant", "old").await);
            // Ten new ones a second are far below this caller's part.
            served(format!("new-{n}"), honest.check("api", "tenant", &format!("new-{n}")).await);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let answers = tokio::select! {
        answers = flood => answers,
        () = meanwhile => unreachable!("it does not end"),
    };
    let took = began.elapsed();
    let stored = keys(&redis).await;
    let (grown, redis_grown) =
        (daemon.memory().saturating_sub(memory), redis_memory(&redis).await.saturating_sub(redis_before));
    let refused = answers.iter().filter(|(_, refused, _)| *refused).count();
    let mut times: Vec<Duration> = answers.iter().map(|(_, _, time)| *time).collect();
    times.sort_unstable();
    println!(
        "{values} values in {took:?}: {refused} of {} requests refused, {stored} keys; the daemon grew by {} MiB, Redis by {} MiB; \
         99 of 100 answers within {:?}, the last within {:?}",
        answers.len(),
        grown >> 20,
        redis_grown >> 20,
        times[times.len() * 99 / 100],
        times[times.len() - 1],
    );
    let late = answers.iter().filter(|(status, _, _)| *status == 503).count();
    println!(
        "the store was too slow for {late} requests of the flood and {} of the others",
        store_too_slow.get()
    );
    assert!(
        answers
            .iter()
            .all(|(status, refused, _)| matches!(status, 200 | 503) || (*status == 429 && *refused))
    );
    let permitted = a_second * 10 + a_second * took.as_secs() + a_second;
    assert!(stored <= permitted + 10, "{stored} keys, and {permitted} permits");
    if (values as u64) > permitted {
        assert!(refused > 0, "{permitted} permits");
    }
    assert!(grown < 512 << 20 && redis_grown < (permitted + 1_000) * 1_024, "{grown} {redis_grown}");
    let metrics = daemon.admin().get("/metrics").await.expect("metrics").text;
    let counted = metrics.lines().find(|line| line.starts_with("quorate_new_buckets_refused_total"));
    let counted: u64 = counted.and_then(|l| l.rsplit(' ').next()?.parse().ok()).expect("a counter");
    assert!(counted >= refused as u64, "{counted}");
    assert!(
        daemon.log().matches("requests for new buckets are denied").count()
            <= took.as_secs() as usize / 10 + 1
    );
}

#[tokio::test]
async fn a_full_store_takes_no_more_buckets_and_keeps_those_that_it_has() {
    let (redis, daemon) = guarded("caller_limits: { buckets: 100 }\n").await;
    let caller = Caller::new(&daemon, "honests-own-secret-token");
    for n in 0..150 {
        caller.check("split", "ip", &format!("old-{n}")).await;
    }
    // The daemon counts once a second.
    eventually("it is full", WITHIN, || async {
        let answer = caller.check("split", "ip", &format!("new-{:?}", Instant::now())).await;
        hold(answer == (429, "too_many_buckets".to_owned()), || format!("{answer:?}"))
    })
    .await;
    let stored = keys(&redis).await;
    for n in 0..50 {
        assert_eq!(caller.check("split", "ip", &format!("newer-{n}")).await.1, "too_many_buckets");
        assert_eq!(caller.check("split", "ip", &format!("old-{n}")).await, (200, "ok".to_owned()));
    }
    assert!(keys(&redis).await <= stored, "nothing was stored");
    // Of two limits only the one says no, and nothing is charged.
    let two = json!({"domain": "split", "descriptors": [[{"key": "ip", "value": "old-0"}], [{"key": "ip", "value": "newest"}]]});
    let (status, body) = caller.ask(two).await;
    assert_eq!(status, 429);
    assert_eq!(body.pointer("/limits/0/allowed"), Some(&json!(true)), "{body}");
    assert_eq!(body.pointer("/limits/1/reason"), Some(&json!("too_many_buckets")), "{body}");
    let left = body.pointer("/limits/0/remaining").and_then(Value::as_u64);
    let (_, again) = caller.ask(json!({"domain": "split", "attributes": {"ip": "old-0"}, "cost": 0})).await;
    assert_eq!(again.pointer("/limits/0/remaining").and_then(Value::as_u64), left);
}

#[tokio::test]
async fn buckets_of_redacted_values_are_named_with_the_key() {
    const KEY: &str = "a-key-that-nobody-knows";
    let (redis, daemon) = guarded(&format!("redact: [tenant]\nredact_key: {KEY}\n")).await;
    let caller = Caller::new(&daemon, "honests-own-secret-token");
    assert_eq!(caller.check("api", "tenant", "sk-7").await.0, 200);
    assert_eq!(caller.check("split", "ip", "10.0.0.7").await.0, 200);
    let redaction = Redaction::new(["tenant".into()].into(), KEY);
    let (named, guessed) = (
        redaction.bucket_id("tenants", [("tenant", "sk-7")]).to_string(),
        bucket_id("tenants", [("tenant", "sk-7")]).to_string(),
    );
    let plain = bucket_id("split", [("ip", "10.0.0.7")]).to_string();
    let keys = redis.keys().await.join(" ");
    assert!(keys.contains(&named) && keys.contains(&plain) && !keys.contains(&guessed), "{keys}");
    let shown = daemon.admin().get("/v1/buckets/tenants?tenant=sk-7").await.expect("an answer").text;
    assert!(shown.contains(&named) && !shown.contains("sk-7"), "{shown}");
}

#[tokio::test]
async fn tokens_change_while_it_runs() {
    let redis = Redis::start().await;
    let more = "caller_tokens_file: tokens\nadmin_token_file: admin\n".to_owned();
    let mut daemon = Daemon::down(Settings { more, ..Settings::alone(&redis.url(), POLICIES) });
    write(&daemon, "tokens", TOKENS);
    write(&daemon, "admin", "the-first-admin-token\n");
    daemon.spawn();
    daemon.ready().await;
    let (old, new) = (
        Caller::new(&daemon, "honests-own-secret-token"),
        Caller::new(&daemon, "newcomers-own-secret-token"),
    );
    let status = async |caller: &Caller| {
        let body = json!({"domain": "api", "attributes": {"tenant": "7"}}).to_string();
        let sent = caller.http.post(&caller.url).bearer_auth(caller.token).body(body).send().await;
        sent.expect("an answer").status().as_u16()
    };
    assert_eq!((status(&old).await, status(&new).await), (200, 401));
    // A file with a fault changes nothing; one without is in use soon.
    write(&daemon, "tokens", "newcomer short\n");
    eventually("the fault is told", WITHIN, || {
        let log = daemon.log();
        async move { hold(log.contains("a file has changed and cannot be used"), || "not yet".to_owned()) }
    })
    .await;
    assert_eq!((status(&old).await, status(&new).await), (200, 401));
    write(&daemon, "tokens", "newcomer newcomers-own-secret-token\n");
    eventually("the new token counts", WITHIN, || async {
        let both = (status(&old).await, status(&new).await);
        hold(both == (401, 200), || format!("{both:?}"))
    })
    .await;

    // SIGHUP does not wait for the next look.
    let http = reqwest::Client::builder().no_proxy().build().expect("a client");
    let change = async |token: &str| {
        let url = format!("{}/v1/policies?dry_run=1", daemon.admin().url());
        let sent = http.put(url).bearer_auth(token).body(POLICIES).send().await;
        sent.expect("an answer").status().as_u16()
    };
    assert_eq!((change("the-first-admin-token").await, change("the-other-admin-token").await), (200, 401));
    write(&daemon, "admin", "the-other-admin-token\n");
    daemon.signal(Signal::HUP);
    eventually("the other token counts", WITHIN, || async {
        let both = (change("the-first-admin-token").await, change("the-other-admin-token").await);
        hold(both == (401, 200), || format!("{both:?}"))
    })
    .await;
    let log = daemon.log();
    for secret in ["admin-token", "own-secret-token"] {
        assert!(!log.contains(secret), "a token is in the log");
    }
}

#[tokio::test]
async fn two_thousand_connections_at_once() {
    const MANY: usize = 2_000;
    let (_redis, daemon) = guarded("").await;
    let to: SocketAddr = daemon.http_address();
    let request = |domain: &str| {
        let body = format!(r#"{{"domain":"{domain}","attributes":{{"tenant":"7"}}}}"#);
        let token = "authorization: Bearer honests-own-secret-token";
        let length = body.len();
        format!("POST /v1/check HTTP/1.1\r\nhost: x\r\n{token}\r\ncontent-length: {length}\r\n\r\n{body}")
    };
    let began = Instant::now();
    let open =
        futures::stream::iter(0..MANY).map(|_| async { TcpStream::connect(to).await.expect("it connects") });
    let mut streams: Vec<TcpStream> = open.buffer_unordered(128).collect().await;
    // All of them are open, and ask at once, again and again: first a limit, whose store may be too slow for so many on a busy
    // machine (then the answer says so), then none.
    let mut late = 0;
    for domain in ["api", "free", "free"] {
        let ask = |mut stream: TcpStream| {
            let request = request(domain);
            async move {
                stream.write_all(request.as_bytes()).await.expect("it is sent");
                let mut head = [0; 12];
                stream.read_exact(&mut head).await.unwrap_or_else(|e| panic!("{domain}: no answer: {e}"));
                let decided = &head == b"HTTP/1.1 200";
                assert!(decided || domain == "api" && &head == b"HTTP/1.1 503", "{domain}: {head:?}");
                let mut rest = vec![0; 4_096];
                // What is left of the answer comes in one piece with its head.
                let read = stream.read(&mut rest).await.expect("the rest");
                assert!(read > 0);
                (decided, stream)
            }
        };
        let all = futures::future::join_all(streams.into_iter().map(ask));
        let answered = tokio::time::timeout(WITHIN, all).await.expect("all are answered");
        late += answered.iter().filter(|(decided, _)| !decided).count();
        streams = answered.into_iter().map(|(_, stream)| stream).collect();
    }
    println!(
        "{MANY} connections, {} requests, {late} too late for the store: {:?}",
        3 * MANY,
        began.elapsed()
    );
    let metrics = daemon.admin().get("/metrics").await.expect("metrics").text;
    assert!(
        metrics.contains(&format!("quorate_connections{{region=\"solo\",protocol=\"http\"}} {MANY}")),
        "{metrics}"
    );
    drop(streams);
    eventually("they are gone", WITHIN, || async {
        let text = daemon.admin().get("/metrics").await?.text;
        let line =
            text.lines().find(|line| line.starts_with("quorate_connections{") && line.contains("http"));
        hold(line.is_some_and(|line| line.ends_with(" 0")), || format!("{line:?}"))
    })
    .await;
}

/// Writes a certificate for `localhost` that stands for itself, and its key, to the daemon's folder.
fn certificate(daemon: &Daemon) {
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
    let certificate = params.self_signed(&key).expect("a certificate").pem();
    write(daemon, "admin.key", &key.serialize_pem());
    write(daemon, "admin.crt", &certificate);
}

#[tokio::test]
async fn the_admin_listener_speaks_tls() {
    let redis = Redis::start().await;
    let more = "admin_token_file: admin\nadmin_tls: { cert: admin.crt, key: admin.key }\n".to_owned();
    let mut daemon = Daemon::down(Settings { more, ..Settings::alone(&redis.url(), POLICIES) });
    write(&daemon, "admin", "the-only-admin-token\n");
    certificate(&daemon);
    let file = |name: &str| daemon.config_file().with_file_name(name).display().to_string();
    let (token, ca, old, policies) =
        (file("admin"), file("admin.crt"), file("old.crt"), file("policies.yaml"));
    std::fs::copy(&ca, &old).expect("a copy");
    let plain = daemon.admin().url();
    let url = plain.replace("http://127.0.0.1", "https://localhost");
    daemon.spawn();
    let run = async |args: &[&str]| {
        let output = quorate(args).await;
        let said = [&output.stdout[..], &output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    };
    let status = ["status", "--admin", &url, "--ca"];
    eventually("it is ready", WITHIN, || async {
        let (code, said) = run(&[&status[..], &[&ca]].concat()).await;
        hold(code == Some(0), || said)
    })
    .await;
    assert_eq!(run(&["status", "--admin", &plain]).await.0, Some(2), "not in the clear");
    let (code, said) = run(&["status", "--admin", &url]).await;
    assert!(code == Some(2) && said.contains("certificate"), "nobody it knows vouches for it: {said}");
    let show = ["policies", "show", "--admin", &url, "--ca", &ca];
    assert_eq!(run(&show).await.0, Some(0));
    let apply = ["policies", "apply", &policies, "--admin", &url, "--ca", &ca];
    let (code, said) = run(&apply).await;
    assert!(code != Some(0) && said.contains("Bearer"), "{said}");
    assert_eq!(run(&[&apply[..], &["--token-file", &token]].concat()).await.0, Some(0));

    certificate(&daemon);
    eventually("the new certificate is in use", WITHIN, || async {
        let (code, said) = run(&[&status[..], &[&ca]].concat()).await;
        hold(code == Some(0), || said)
    })
    .await;
    assert_eq!(run(&[&status[..], &[&old]].concat()).await.0, Some(2), "and the old one is not");
}
