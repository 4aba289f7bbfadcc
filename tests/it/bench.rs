//! `quorate bench`: what it reports is what was asked and answered, whatever the machine's speed.

use crate::support::daemon::{Daemon, QUORATE, Settings};
use crate::support::{eventually, free_address, hold};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::process::{Output, Stdio};
use std::time::Duration;
use tokio::process::Command;

const POLICIES: &str = "
policies:
  - { name: few, domain: few, match: [ { key: tenant } ], limit: { rate: 1/day, burst: 5 }, mode: split }
  - { name: many, domain: many, match: [ { key: tenant } ], limit: { rate: 1000000/s, burst: 4000000000 }, mode: split }
";
/// Far above what a run of a second or two takes.
const PATIENCE: Duration = Duration::from_secs(60);

async fn daemon() -> Daemon {
    Daemon::start(Settings { redis: None, ..Settings::alone("", POLICIES) }).await
}

fn grpc(daemon: &Daemon) -> String {
    daemon.grpc_url().replacen("http://", "grpc://", 1)
}

/// The command with answers that may take long: the machine is shared.
fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(QUORATE);
    command.args(["bench", "--entries", "tenant={key}", "--timeout", "60s"]).args(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

async fn run(args: &[&str]) -> Output {
    let output = tokio::time::timeout(PATIENCE, bench(args).output()).await.expect("it ends");
    output.expect("it starts")
}

async fn report(args: &[&str]) -> Value {
    let output = run(&[args, &["--json"]].concat()).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Waits until the daemon has let so many requests through.
async fn until_allowed(daemon: &Daemon, many: u64) {
    let counter =
        |line: &&str| line.starts_with("quorate_decisions_total") && line.contains("policy=\"many\"");
    eventually("it asks", PATIENCE, || async {
        let text = daemon.admin().get("/metrics").await?.text;
        let allowed = text.lines().filter(counter).filter(|line| line.contains("reason=\"ok\""));
        let allowed: u64 = allowed.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum();
        hold(allowed > many, || format!("{allowed} so far"))
    })
    .await;
}

fn count(report: &Value, path: &str) -> u64 {
    report.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_is_seen_whichever_way_it_is_asked() {
    let daemon = daemon().await;
    let (grpc, http) = (grpc(&daemon), daemon.api().url().to_owned());
    // Five tokens for each of ten keys: of both targets together.
    let report = report(&[
        "-t",
        &grpc,
        "-t",
        &http,
        "--domain",
        "few",
        "--keys",
        "10",
        "--duration",
        "3s",
        "--warm-up",
        "0s",
    ])
    .await;
    assert_eq!(count(&report, "/total/allowed"), 50, "{report}");
    let denied = count(&report, "/total/denied/over_limit");
    assert!(denied > 0 && count(&report, "/total/decided") == denied + 50, "{report}");
    assert_eq!(report["total"]["errors"], serde_json::json!({}), "{report}");
    for target in [0, 1] {
        assert!(count(&report, &format!("/targets/{target}/decided")) > 0, "{report}");
    }
    assert_eq!((&report["loop"], &report["interrupted"]), (&"closed".into(), &false.into()));
    let time = |share: &str| report["total"]["latency_us"][share].as_f64().expect("a time");
    assert!(time("p50") > 0.0 && time("p50") <= time("p99") && time("p99.9") <= time("max"), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_the_open_loop_every_request_that_was_due_is_accounted_for() {
    let daemon = daemon().await;
    let process = format!("me={}", std::process::id());
    let report = report(&[
        "-t",
        &grpc(&daemon),
        "--domain",
        "many",
        "--keys",
        "1000",
        "--distribution",
        "zipf:1.1",
        "--rate",
        "300",
        "--duration",
        "2s",
        "--warm-up",
        "0s",
        "--threads",
        "2",
        "--pid",
        &process,
    ])
    .await;
    let answered = count(&report, "/total/allowed");
    assert_eq!(answered + count(&report, "/not_sent"), 600, "{report}");
    assert!(answered > 0, "{report}");
    assert!(report["total"]["latency_from_sent_us"]["p50"].as_f64().expect("a time") > 0.0, "{report}");
    assert!(report["cpu_us_per_decision"]["me"].is_number(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stall_shows_in_all_that_it_delayed() {
    let mut daemon = daemon().await;
    let grpc = grpc(&daemon);
    let mut command = bench(&[
        "-t",
        &grpc,
        "--domain",
        "many",
        "--rate",
        "200",
        "--duration",
        "4s",
        "--warm-up",
        "0s",
        "--json",
        "--connections",
        "1",
        "--streams",
        "4",
    ]);
    let child = command.spawn().expect("it starts");
    until_allowed(&daemon, 10).await;
    daemon.signal(Signal::STOP);
    tokio::time::sleep(Duration::from_secs(2)).await;
    daemon.signal(Signal::CONT);
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output()).await.expect("it ends");
    let report: Value = serde_json::from_slice(&output.expect("it has run").stdout).expect("JSON");
    // Four requests were in flight; four hundred fell due meanwhile. A tool that waits to send them sees the four alone.
    let late = report["total"]["latency_us"]["p90"].as_f64().expect("a time");
    assert!(late > 500_000.0, "{report}");
    assert_eq!(count(&report, "/total/allowed") + count(&report, "/not_sent"), 800, "{report}");
    daemon.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ctrl_c_gives_the_report_so_far() {
    let daemon = daemon().await;
    let mut command =
        bench(&["-t", &grpc(&daemon), "--domain", "many", "--duration", "1h", "--warm-up", "0s"]);
    let child = command.spawn().expect("it starts");
    let id = Pid::from_raw(i32::try_from(child.id().expect("it runs")).expect("a process id"))
        .expect("a process id");
    // More than are in flight at once: some answers have been counted.
    until_allowed(&daemon, 1_000).await;
    kill_process(id, Signal::INT).expect("it runs");
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output()).await.expect("it ends");
    let output = output.expect("it has run");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("interrupted"), "{text}");
    let decided = text.lines().find_map(|line| line.trim().strip_prefix("decided")).expect("a line");
    let decided = decided.split_whitespace().next().and_then(|n| n.parse::<u64>().ok());
    assert!(decided.is_some_and(|n| n > 0), "{text}");
}

#[tokio::test]
async fn what_cannot_be_done_is_said() {
    let nobody = format!("grpc://{}", free_address());
    let output = run(&["-t", &nobody, "--domain", "d", "--duration", "1s", "--warm-up", "0s"]).await;
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stdout).contains("unreachable"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("none of the requests was decided"));
    for wrong in [["-t", "127.0.0.1:8081"], ["-t", "grpcs://localhost:1"]] {
        let output = run(&[&wrong[..], &["--domain", "d"]].concat()).await;
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
}
