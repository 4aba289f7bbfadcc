//! Real processes, in short: a scenario that holds, and one that must not.

use std::path::Path;
use std::process::{Command, Output};

const CHAOS: &str = env!("CARGO_BIN_EXE_quorate-chaos");

/// Buckets fill for three seconds; a rush empties them, their stores are lost, and the rush goes on.
const LOST: &str = "
title: Every Redis is flushed in the middle of a rush
about: A short one, for tests.
length: 9s
topology: { regions: [a, b, c], rtt: 20ms }
policies:
  - { name: p, domain: d, match: [ { key: k } ], limit: { rate: 30/s, burst: 90 }, mode: strict, reserve: 60% }
load:
  - { policy: p, bucket: { k: x }, rate: 5, over: both }
  - { policy: p, bucket: { k: x }, callers: 4, from: 3s, to: 8s }
timeline:
  - { at: 4500ms, flush: all }
expect:
  must: [strict-bound, conservation, answered, quiet-logs]
";

fn run(folder: &Path, more: &[&str]) -> (Output, String) {
    let scenario = folder.join("lost.yaml");
    std::fs::write(&scenario, LOST).expect("a scenario");
    let report = folder.join("report.html");
    let mut command = Command::new(CHAOS);
    // Daemons are this program itself, with a bug or with none: what it is built with is what is tested.
    command
        .args(["cluster", "--quorate", CHAOS, "--scenario"])
        .arg(&scenario)
        .arg("--report")
        .arg(&report)
        .args(more);
    let output = command.output().expect("quorate-chaos starts");
    let text =
        format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output, text)
}

fn temporary() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("quorate-chaos-test-").tempdir().expect("a folder")
}

#[test]
fn stores_that_are_lost_in_a_rush_admit_nothing_twice() {
    let folder = temporary();
    let kept = folder.path().join("kept");
    let more = ["--keep", &kept.display().to_string()];
    let (output, text) = run(folder.path(), &more);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let report = std::fs::read_to_string(folder.path().join("report.html")).expect("a report");
    assert!(report.contains("FLUSHALL") && report.contains("p k=x"));
    let history = std::fs::read(kept.join("history.json")).expect("a history");
    let history: quorate_chaos::oracle::History = serde_json::from_slice(&history).expect("a history");
    assert!(history.requests.len() > 300, "{} requests", history.requests.len());
    assert!(history.samples.len() > 20, "{} samples", history.samples.len());
    assert_eq!(history.faults.len(), 1, "{:?}", history.faults);
}

#[test]
fn a_pool_that_lends_what_it_has_lent_already_is_caught_and_the_run_can_be_replayed() {
    let folder = temporary();
    let (output, text) = run(folder.path(), &["--plant", "outstanding-not-counted"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    // (On a machine that is too busy to send a rush, the books alone show it.)
    let seen = ["BROKEN strict-bound", "BROKEN conservation"].iter().any(|broken| text.contains(broken));
    assert!(seen, "{text}");
    let replay = text.lines().find(|line| line.starts_with("replay: ")).unwrap_or_else(|| panic!("{text}"));
    assert!(replay.contains("--seed 1") && replay.contains("--plant outstanding-not-counted"), "{replay}");
}

#[test]
fn what_cannot_be_run_says_why_and_is_no_verdict() {
    let folder = temporary();
    let cases: [(&[&str], &str); 3] = [
        (&["--scenario", "no-such-thing"], "there are minority-cut-off, "),
        (&["--attach", "http://127.0.0.1:1"], "give two for each region"),
        (&["--attach", "http://127.0.0.1:1,http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer"),
    ];
    for (args, why) in cases {
        let output =
            Command::new(CHAOS).arg("cluster").args(args).current_dir(&folder).output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.contains(why), "{args:?}: {text}");
    }
}
