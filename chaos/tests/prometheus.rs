//! A real Prometheus with the alerts that we ship, scraping real daemons: it is quiet about those that are right, and pages
//! about those whose pool lends what it has lent already.

#![allow(clippy::disallowed_methods, reason = "tests measure with whatever clock they like")]

use serde_json::Value;
use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CHAOS: &str = env!("CARGO_BIN_EXE_quorate-chaos");
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const SOON: Duration = Duration::from_secs(60);
const REGIONS: [&str; 3] = ["us-east", "eu-west", "ap-south"];
const POLICIES: &str = "
policies:
  - { name: p, domain: d, match: [ { key: k } ], limit: { rate: 100/s, burst: 300 }, mode: strict }
  - { name: q, domain: d, match: [ { key: l } ], limit: { rate: 100/s, burst: 300 }, mode: approximate, max_overshoot: 10% }
";
/// What is not there before something of its kind has happened.
const NOT_YET: [&str; 4] = [
    "quorate_fallbacks_total",
    "quorate_store_errors_total",
    "quorate_unmatched_total",
    "quorate_raft_replication_lag_entries",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_that_are_right_raise_no_alert_and_have_what_the_dashboard_shows() {
    let cluster = Cluster::start(&["serve"]).await;
    let rounds = cluster.evaluated().await;
    cluster.rush(Duration::from_secs(6)).await;
    eventually("the rules are evaluated a few more times", || async {
        let now = cluster.evaluated().await;
        if now >= rounds + 5.0 { Ok(()) } else { Err(format!("{now} rounds, {rounds} before")) }
    })
    .await;
    let alerts = cluster.alerts().await;
    // Machines that run tests may be slow: that is not what this is about.
    let about_speed = |name: &&String| ["QuorateSlow", "QuorateStoreSlow"].contains(&name.as_str());
    let raised: Vec<_> = alerts.iter().filter(|name| !about_speed(name)).collect();
    assert!(raised.is_empty(), "{raised:?}");

    let dashboard = file("deploy/grafana/dashboards/quorate.json");
    let mut queries = Vec::new();
    collect(&serde_json::from_str(&dashboard).expect("JSON"), &mut queries);
    assert!(queries.len() > 40, "{}", queries.len());
    let known = cluster.ask("label/__name__/values", &[]).await;
    let known: BTreeSet<&str> = known.as_array().expect("names").iter().filter_map(Value::as_str).collect();
    for query in &queries {
        let mut query = query.clone();
        let values = [("$job", "quorate"), ("$region", ".*"), ("$policy", ".*"), ("$__rate_interval", "1m")];
        for (variable, value) in values {
            query = query.replace(variable, value);
        }
        cluster.ask("query", &[("query", &query)]).await;
    }
    let rules = file("deploy/prometheus/alerts.yaml");
    let words = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        words.filter(|w| w.starts_with("quorate_") || w.starts_with("process_")).map(str::to_owned).collect()
    };
    let used: BTreeSet<String> =
        queries.iter().map(String::as_str).chain([rules.as_str()]).flat_map(words).collect();
    let unknown: Vec<_> =
        used.iter().filter(|n| !known.contains(n.as_str()) && !NOT_YET.contains(&n.as_str())).collect();
    assert!(unknown.is_empty(), "asked for, but no daemon has them: {unknown:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_lends_what_it_has_lent_already_pages() {
    let cluster = Cluster::start(&["planted", "outstanding-not-counted"]).await;
    let rush = async {
        loop {
            cluster.rush(Duration::from_secs(5)).await;
        }
    };
    let paged = eventually("Prometheus pages", || async {
        let alerts = cluster.alerts().await;
        let wanted = ["QuoratePromiseBroken", "QuorateOvercommitted"];
        if wanted.iter().all(|name| alerts.contains(*name)) { Ok(()) } else { Err(format!("{alerts:?}")) }
    });
    tokio::select! {
        () = paged => {}
        () = rush => {}
    }
}

/// Three daemons with their Redis servers, and a Prometheus that scrapes them. All are killed when it is dropped.
struct Cluster {
    http: reqwest::Client,
    daemons: Vec<Ports>,
    prometheus: SocketAddr,
    _processes: Vec<Process>,
    _folder: tempfile::TempDir,
}

#[derive(Clone, Copy)]
struct Ports {
    http: SocketAddr,
    grpc: SocketAddr,
    peer: SocketAddr,
    admin: SocketAddr,
    redis: SocketAddr,
}

impl Cluster {
    /// Starts everything, and waits until all of it is up.
    async fn start(daemon: &[&str]) -> Self {
        let folder = tempfile::Builder::new().prefix("quorate-alerts-").tempdir().expect("a folder");
        let free = free_addresses(16);
        let daemons: Vec<Ports> = free
            .chunks_exact(5)
            .map(|a| Ports { http: a[0], grpc: a[1], peer: a[2], admin: a[3], redis: a[4] })
            .collect();
        let prometheus = free[15];
        let mut processes = Vec::new();
        for (region, ports) in REGIONS.iter().zip(&daemons) {
            processes.push(redis(folder.path(), region, ports.redis));
            let config = write_config(folder.path(), region, *ports, &daemons);
            let mut command = Command::new(CHAOS);
            command.args(daemon).arg("--config").arg(config);
            processes.push(Process::start(folder.path(), region, command));
        }
        processes.push(start_prometheus(folder.path(), prometheus, &daemons));
        // It fails only if there is one already: the other test's.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build();
        let cluster = Self {
            http: http.expect("a client"),
            daemons,
            prometheus,
            _processes: processes,
            _folder: folder,
        };
        eventually("Prometheus sees three regions ready", || async {
            let ready = cluster.number("sum(quorate_ready)").await;
            if ready == Some(3.0) { Ok(()) } else { Err(format!("{ready:?}")) }
        })
        .await;
        cluster
    }

    /// Callers in all regions ask for one bucket of each policy, as fast as they are answered.
    async fn rush(&self, time: Duration) {
        let until = Instant::now() + time;
        let callers = self.daemons.iter().flat_map(|ports| ["k", "l"].map(|key| (ports.http, key)));
        futures::future::join_all(callers.map(|(address, key)| async move {
            while Instant::now() < until {
                let body = format!(r#"{{"domain":"d","attributes":{{"{key}":"x"}},"cost":2}}"#);
                let answer = self.http.post(format!("http://{address}/v1/check")).body(body).send().await;
                let status = answer.expect("an answer").status().as_u16();
                assert!([200, 429, 503].contains(&status), "{status}");
            }
        }))
        .await;
    }

    /// The names of the alerts that fire.
    async fn alerts(&self) -> BTreeSet<String> {
        let alerts = self.ask("alerts", &[]).await;
        let alerts = alerts["alerts"].as_array().expect("alerts");
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        firing.map(|alert| alert["labels"]["alertname"].as_str().expect("a name").to_owned()).collect()
    }

    /// How often the rules have been evaluated.
    async fn evaluated(&self) -> f64 {
        self.number("min(prometheus_rule_group_iterations_total)").await.unwrap_or(0.0)
    }

    async fn number(&self, query: &str) -> Option<f64> {
        let answer = self.try_to_ask("query", &[("query", query)]).await.ok()?;
        answer["result"][0]["value"][1].as_str()?.parse().ok()
    }

    async fn ask(&self, what: &str, query: &[(&str, &str)]) -> Value {
        self.try_to_ask(what, query).await.unwrap_or_else(|why| panic!("{what} {query:?}: {why}"))
    }

    async fn try_to_ask(&self, what: &str, query: &[(&str, &str)]) -> Result<Value, String> {
        let mut url =
            reqwest::Url::parse(&format!("http://{}/api/v1/{what}", self.prometheus)).expect("a URL");
        url.query_pairs_mut().extend_pairs(query);
        let answer = self.http.get(url).send().await.map_err(|e| e.to_string())?;
        let text = answer.text().await.map_err(|e| e.to_string())?;
        let mut answer: Value = serde_json::from_str(&text).map_err(|_| text.clone())?;
        if answer["status"] == "success" { Ok(answer["data"].take()) } else { Err(text) }
    }
}

fn redis(folder: &Path, region: &str, address: SocketAddr) -> Process {
    let mut command = Command::new("redis-server");
    command.args(["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", "--port"]);
    command.arg(address.port().to_string()).current_dir(folder);
    Process::start(folder, &format!("redis-{region}"), command)
}

fn write_config(folder: &Path, region: &str, ports: Ports, all: &[Ports]) -> std::path::PathBuf {
    let home = folder.join(region);
    std::fs::create_dir_all(&home).expect("a folder");
    std::fs::write(home.join("policies.yaml"), POLICIES).expect("policies");
    let regions: String =
        REGIONS.iter().zip(all).map(|(name, p)| format!("    {name}: http://{}\n", p.peer)).collect();
    let Ports { http, grpc, peer, admin, redis } = ports;
    let text = format!(
        "region: {region}\nlisten: {{ http: {http}, grpc: {grpc}, peer: {peer}, admin: {admin} }}\n\
         store: {{ redis: {{ url: 'redis://{redis}', timeout: 500ms }} }}\ndata_dir: data\n\
         cluster:\n  name: alerts\n  regions:\n{regions}policies: policies.yaml\n"
    );
    let file = home.join("region.yaml");
    std::fs::write(&file, text).expect("region.yaml");
    file
}

fn start_prometheus(folder: &Path, address: SocketAddr, daemons: &[Ports]) -> Process {
    let targets: Vec<String> = daemons.iter().map(|ports| ports.admin.to_string()).collect();
    let rules = std::fs::canonicalize(format!("{REPOSITORY}/deploy/prometheus/alerts.yaml")).expect("rules");
    let config = serde_json::json!({
        "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
        "rule_files": [rules],
        "scrape_configs": [
            { "job_name": "quorate", "static_configs": [{ "targets": targets }] },
            { "job_name": "prometheus", "static_configs": [{ "targets": [address.to_string()] }] },
        ],
    });
    let file = folder.join("prometheus.json");
    std::fs::write(&file, config.to_string()).expect("Prometheus' configuration");
    let mut command = Command::new("prometheus");
    command.arg(format!("--config.file={}", file.display()));
    command.arg(format!("--storage.tsdb.path={}", folder.join("prometheus").display()));
    command.arg(format!("--web.listen-address={address}"));
    Process::start(folder, "prometheus", command)
}

/// A child that is killed when it is dropped; its log is shown if the test failed.
struct Process {
    log: std::path::PathBuf,
    child: Child,
}

impl Process {
    fn start(folder: &Path, name: &str, mut command: Command) -> Self {
        let log = folder.join(format!("{name}.log"));
        let out = std::fs::File::create(&log).expect("a log");
        let err = out.try_clone().expect("a log");
        for (variable, _) in std::env::vars_os().filter(|(v, _)| v.to_string_lossy().starts_with("QUORATE_"))
        {
            command.env_remove(variable);
        }
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        Self { log, child: child.unwrap_or_else(|e| panic!("{name} does not start ({e}): run ./tests/run")) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("---- {}\n{}", self.log.display(), lines[lines.len().saturating_sub(20)..].join("\n"));
        }
    }
}

fn free_addresses(count: usize) -> Vec<SocketAddr> {
    let bound: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    bound.iter().map(|listener| listener.local_addr().expect("an address")).collect()
}

fn file(path: &str) -> String {
    std::fs::read_to_string(Path::new(REPOSITORY).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn collect(value: &Value, queries: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(text) if key == "expr" => queries.push(text.clone()),
                    value => collect(value, queries),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, queries)),
        _ => {}
    }
}

async fn eventually<F: Future<Output = Result<(), String>>>(what: &str, mut condition: impl FnMut() -> F) {
    let end = Instant::now() + SOON;
    while let Err(why) = condition().await {
        assert!(Instant::now() < end, "{what}: not within {SOON:?}: {why}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
