//! Metrics: that they are what the documentation says, that they count what happened, and that the promise is seen to hold.

use crate::support::client::Api;
use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::daemon::{Daemon, Settings};
use crate::support::load::{Ask, History, flood};
use crate::support::process::Process;
use crate::support::redis::Redis;
use crate::support::{eventually, free_address, hold};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

const POLICIES: &str = "
policies:
  - { name: strict, domain: strict, match: [ { key: tenant } ], limit: { rate: 20/s, burst: 100 }, mode: strict, wait: 250ms }
  - { name: approximate, domain: approximate, match: [ { key: tenant } ], limit: { rate: 20/s, burst: 100 }, mode: approximate, max_overshoot: 50% }
  - { name: split, domain: split, match: [ { key: tenant } ], limit: { rate: 30/s, burst: 90 }, mode: split }
";
const SOON: Duration = Duration::from_secs(30);

/// A scrape: kinds by name, and samples.
#[derive(Debug, Default)]
struct Scrape {
    /// Name as in a query (counters with `_total`), to kind and labels (without `region` and `le`).
    families: BTreeMap<String, (String, BTreeSet<String>)>,
    samples: Vec<(String, BTreeMap<String, String>, f64)>,
}

impl Scrape {
    async fn of(admin: &Api) -> Self {
        let answer = admin.get("/metrics").await.expect("an answer");
        assert_eq!(answer.status, 200, "{}", answer.text);
        Self::parse(&answer.text)
    }

    fn parse(text: &str) -> Self {
        let mut scrape = Self::default();
        let mut family = String::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').expect("a kind");
                family = if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
                scrape.families.insert(family.clone(), (kind.to_owned(), BTreeSet::new()));
            }
            if line.starts_with('#') {
                continue;
            }
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').expect("every metric has labels");
            let labels: BTreeMap<String, String> = labels
                .trim_end_matches('}')
                .split("\",")
                .map(|label| label.split_once("=\"").expect("a label"))
                .map(|(key, value)| (key.to_owned(), value.trim_end_matches('"').to_owned()))
                .collect();
            assert!(labels.contains_key("region"), "{line}");
            let known = &mut scrape.families.get_mut(&family).expect("a type").1;
            known.extend(labels.keys().filter(|key| !["region", "le"].contains(&key.as_str())).cloned());
            scrape.samples.push((name.to_owned(), labels, value.parse().expect("a number")));
        }
        scrape
    }

    /// The samples with this name and these labels among others.
    fn all(&self, name: &str, with: &[(&str, &str)]) -> Vec<f64> {
        let fits = |labels: &BTreeMap<String, String>| {
            with.iter().all(|(key, value)| labels.get(*key).is_some_and(|v| v == value))
        };
        self.samples.iter().filter(|(n, labels, _)| n == name && fits(labels)).map(|(_, _, v)| *v).collect()
    }

    fn sum(&self, name: &str, with: &[(&str, &str)]) -> f64 {
        let all = self.all(name, with);
        assert!(!all.is_empty(), "no {name} {with:?}");
        all.iter().sum()
    }
}

/// The tables of docs/metrics.md: name to kind and labels.
fn documented() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md"));
    let text = text.expect("docs/metrics.md");
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let labels = cells[2].split(", ").map(|l| l.trim_matches('`').to_owned()).filter(|l| !l.is_empty());
        (cells[0].trim_matches('`').to_owned(), (cells[1].to_owned(), labels.collect()))
    };
    let rows: Vec<_> = rows.map(row).collect();
    let table: BTreeMap<_, _> = rows.iter().cloned().collect();
    assert_eq!(table.len(), rows.len(), "a name is there twice");
    table
}

async fn scrapes(cluster: &Cluster) -> Vec<Scrape> {
    let mut all = Vec::new();
    for daemon in &cluster.daemons {
        all.push(Scrape::of(&daemon.admin()).await);
    }
    all
}

async fn three_regions_under_load() -> (Cluster, History) {
    let plan = Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(40), ..Plan::default() };
    let cluster = Cluster::start(plan).await;
    let history = History::default();
    for domain in ["strict", "approximate", "split"] {
        let ask = Ask::new(domain, domain, &[("tenant", "7")]);
        flood(&ask, &cluster.apis(), 60, 8, Duration::from_secs(4), &history).await;
    }
    for api in cluster.apis() {
        api.check("nowhere", &[("tenant", "7")], 1).await;
    }
    (cluster, history)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_exposed_is_what_is_documented_and_counts_what_happened() {
    let (cluster, history) = three_regions_under_load().await;
    let expected = documented();
    let all = eventually("all that is documented is exposed", SOON, || async {
        let all = scrapes(&cluster).await;
        let mut exposed = BTreeMap::<String, (String, BTreeSet<String>)>::new();
        for (name, (kind, labels)) in all.iter().flat_map(|scrape| scrape.families.clone()) {
            exposed.entry(name).or_insert((kind, BTreeSet::new())).1.extend(labels);
        }
        for (name, what) in &exposed {
            // What is exposed and not documented will not go away by waiting.
            let known = expected.get(name).unwrap_or_else(|| panic!("{name} is not in docs/metrics.md"));
            assert_eq!(&known.0, &what.0, "{name} is of another kind");
            assert!(what.1.is_subset(&known.1), "{name} has the labels {:?}", what.1);
        }
        let missing: Vec<_> =
            expected.iter().filter(|(name, what)| exposed.get(*name) != Some(*what)).collect();
        hold(missing.is_empty(), || format!("missing: {missing:?}"))?;
        Ok(all)
    })
    .await;
    for (index, scrape) in all.iter().enumerate() {
        assert_eq!(scrape.sum("quorate_build_info", &[]), 1.0);
        for policy in ["strict", "approximate", "split"] {
            let of = &[("policy", policy)];
            let decided = decided(&history, policy, index);
            let denied = [("policy", policy), ("result", "denied")];
            assert_eq!(
                scrape.sum("quorate_decisions_total", of),
                decided.0 + decided.1,
                "{policy}: {scrape:?}"
            );
            assert_eq!(scrape.sum("quorate_decisions_total", &denied), decided.1, "{policy}");
            assert_eq!(scrape.sum("quorate_cost_tokens_total", of), decided.0 + decided.1, "{policy}");
        }
        let decided = scrape.sum("quorate_decision_seconds_count", &[("protocol", "http")]);
        assert_eq!(decided, scrape.sum("quorate_decisions_total", &[]) + 1.0, "and one that matched nothing");
        let batched = scrape.sum("quorate_store_batch_requests_sum", &[]);
        let remembered = scrape.sum("quorate_denials_from_memory_total", &[]);
        let answered = batched + remembered;
        assert!(
            answered >= decided - 1.0,
            "{batched} requests went to the store, of {decided}, and {remembered} not"
        );
        // (Of one limit each: what is denied from memory was denied.)
        let denied = scrape.sum("quorate_decisions_total", &[("result", "denied")]);
        assert!(remembered <= denied, "{remembered} were denied from memory, and {denied} in all");
    }
    let leaders: f64 = all.iter().map(|scrape| scrape.sum("quorate_raft_leader", &[])).sum();
    assert_eq!(leaders, 1.0);
    lint(&cluster).await;
}

/// A real Prometheus scrapes the regions (as OpenMetrics), and the query that docs/metrics.md has for all regions together
/// finds nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prometheus_reads_it_and_the_documented_query_finds_nothing() {
    let (cluster, _) = three_regions_under_load().await;
    let targets: Vec<String> =
        cluster.daemons.iter().map(|d| d.admin().url().replace("http://", "").to_owned()).collect();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = format!(
        "global: {{ scrape_interval: 1s }}\nscrape_configs: [ {{ job_name: quorate, static_configs: [ {{ targets: {targets:?} }} ] }} ]\n"
    );
    std::fs::write(folder.path().join("prometheus.yml"), config).expect("its configuration is written");
    let address = free_address();
    let mut command = Command::new("prometheus");
    command.current_dir(folder.path()).arg("--config.file=prometheus.yml").arg("--storage.tsdb.path=data");
    command.arg(format!("--web.listen-address={address}"));
    let _prometheus = Process::start("prometheus", folder.path(), &mut command);
    let prometheus = Api::new(address);
    let query = async |query: &str| -> Result<Vec<serde_json::Value>, String> {
        let query: String = url::form_urlencoded::byte_serialize(query.as_bytes()).collect();
        let answer = prometheus.get(&format!("/api/v1/query?query={query}")).await?;
        hold(answer.status == 200, || answer.text.clone())?;
        Ok(answer.json()["data"]["result"].as_array().cloned().unwrap_or_default())
    };
    let ask = Ask::new("more", "strict", &[("tenant", "7")]);
    let history = History::default();
    eventually("two scrapes of each are there", Duration::from_secs(60), || async {
        flood(&ask, &cluster.apis(), 5, 1, Duration::from_secs(1), &history).await;
        let up = query("up == 1").await?;
        hold(up.len() == 3, || format!("{up:?}"))?;
        let rates = query("sum by (policy) (increase(quorate_hot_bucket_tokens_total[1m])) > 0").await?;
        hold(!rates.is_empty(), || "no tokens yet".to_owned())
    })
    .await;
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md"));
    let text = text.expect("docs/metrics.md");
    let documented =
        text.split_once("```promql").and_then(|(_, rest)| rest.split_once("```")).expect("a query").0;
    assert_eq!(query(documented).await.expect("an answer"), Vec::<serde_json::Value>::new());
    // It would find something, were the bound smaller.
    let smaller = documented.replace("1.1 *", "-1 +");
    assert_ne!(smaller, documented);
    let found =
        query(&smaller.replace("max by (policy) (", "0 * max by (policy) (")).await.expect("an answer");
    assert!(!found.is_empty(), "the query looks at nothing");
    assert!(query("quorate_promise_breaches_total > 0").await.expect("an answer").is_empty());
    assert_eq!(query("quorate_promise_breaches_total").await.expect("an answer").len(), 12);
}

/// How many were admitted and denied in a region.
fn decided(history: &History, name: &str, region: usize) -> (f64, f64) {
    let statuses = history.statuses(name);
    let of_region = statuses.iter().filter(|((r, _), _)| *r == region);
    let sum = |admitted: bool| {
        of_region.clone().filter(|((_, s), _)| (*s == 200) == admitted).map(|(_, n)| *n as f64).sum()
    };
    (sum(true), sum(false))
}

/// `promtool check metrics` finds nothing.
async fn lint(cluster: &Cluster) {
    for daemon in &cluster.daemons {
        let text =
            daemon.admin().get_with("/metrics", &[("accept", "text/plain")]).await.expect("an answer").text;
        let mut promtool = Command::new("promtool")
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("promtool (Debian: prometheus)");
        promtool.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("it reads");
        let output = promtool.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success() && said.trim().is_empty(), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_promise_is_seen_to_hold() {
    let (cluster, history) = three_regions_under_load().await;
    eventually("the figures come together", SOON, || async {
        let all = scrapes(&cluster).await;
        for (scrape, region) in all.iter().zip(REGIONS) {
            for policy in ["strict", "approximate"] {
                let of = |part| [("policy", policy), ("part", part)];
                let buckets = scrape.sum("quorate_pool_buckets", &[("policy", policy)]);
                hold(buckets == 1.0, || format!("{region}: {policy} has {buckets} buckets"))?;
                for (name, whole) in [
                    ("quorate_pool_tokens", scrape.sum("quorate_policy_bound_tokens", &[("policy", policy)])),
                    ("quorate_pool_tokens_per_second", 20.0),
                ] {
                    let parts: f64 =
                        ["reserve", "leased", "free"].map(|p| scrape.sum(name, &of(p))).iter().sum();
                    assert!((parts - whole).abs() < 1e-3, "{region}: {policy}: {parts} of {whole}");
                }
                let committed = scrape.all("quorate_pool_committed_ratio", &[("policy", policy)]);
                assert!(committed.iter().all(|part| *part > 0.0 && *part <= 1.0), "{committed:?}");
            }
            let breaches = scrape.all("quorate_promise_breaches_total", &[]);
            assert_eq!(breaches, [0.0; 4], "{region}: the promise");
            let bound = scrape.sum("quorate_overdraft_bound_tokens", &[]);
            let used = scrape.sum("quorate_overdraft_used_tokens", &[]);
            assert!(bound > 0.0 && used <= bound, "{region}: {used} of {bound}");
        }
        for policy in ["strict", "approximate", "split"] {
            let with = [("policy", policy), ("result", "admitted")];
            let hot: f64 =
                all.iter().map(|scrape| scrape.sum("quorate_hot_bucket_tokens_total", &with)).sum();
            let admitted = history.admitted(policy).len() as f64;
            hold(hot == admitted, || format!("{policy}: {hot} counted of {admitted}"))?;
        }
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn redis_and_its_outage_are_measured() {
    let mut redis = Redis::start().await;
    let mut settings = Settings::alone(&redis.url(), POLICIES);
    // So slow that no key expires meanwhile.
    settings.policies = POLICIES
        .replace("30/s, burst: 90 }, mode: split", "1/m, burst: 90 }, mode: split, on_store_failure: local");
    let daemon = Daemon::start(settings).await;
    for tenant in 0..300 {
        daemon.api().check("split", &[("tenant", &tenant.to_string())], 50).await;
    }
    eventually("keys and memory are estimated", SOON, || async {
        let scrape = Scrape::of(&daemon.admin()).await;
        let keys: f64 = redis.cli(&["DBSIZE"]).await.parse().expect("a number");
        let all = scrape.all("quorate_redis_keys", &[]);
        hold(all == [keys] && keys >= 300.0, || format!("{all:?} of {keys}"))?;
        // Nobody else has keys there.
        let ours = scrape.sum("quorate_store_keys", &[]);
        hold(ours == keys, || format!("{ours} of {keys}"))?;
        let (memory, used) =
            (scrape.sum("quorate_store_memory_bytes", &[]), scrape.sum("quorate_redis_memory_bytes", &[]));
        hold(memory > 50.0 * keys && memory < used, || format!("{memory} bytes of {used}"))?;
        hold(scrape.sum("quorate_redis_evicted_keys_total", &[]) == 0.0, || "evicted".to_owned())
    })
    .await;
    redis.kill();
    eventually("the outage is counted", SOON, || async {
        for domain in ["strict", "split"] {
            daemon.api().check(domain, &[("tenant", "1")], 1).await;
        }
        let scrape = Scrape::of(&daemon.admin()).await;
        let fell =
            |policy, action| scrape.sum("quorate_fallbacks_total", &[("policy", policy), ("action", action)]);
        hold(fell("strict", "deny") >= 2.0, || "deny".to_owned())?;
        hold(fell("split", "local") >= 2.0, || "local".to_owned())?;
        assert_eq!((fell("strict", "local"), fell("split", "deny")), (0.0, 0.0));
        hold(scrape.sum("quorate_store_errors_total", &[]) >= 4.0, || "errors".to_owned())?;
        hold(scrape.sum("quorate_store_attached", &[]) == 0.0, || "attached".to_owned())?;
        hold(scrape.sum("quorate_log_events_total", &[("level", "warn")]) >= 1.0, || "no warning".to_owned())
    })
    .await;
}
