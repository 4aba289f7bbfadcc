//! Some of the scenarios that come with the program, with real processes: each holds.

use std::process::Command;

const CHAOS: &str = env!("CARGO_BIN_EXE_quorate-chaos");

fn holds(scenario: &str) {
    let folder = tempfile::Builder::new().prefix("quorate-chaos-test-").tempdir().expect("a folder");
    let report = folder.path().join("report.html");
    let output = Command::new(CHAOS)
        .args(["cluster", "--quorate", CHAOS, "--scenario", scenario, "--report"])
        .arg(&report)
        .output()
        .expect("quorate-chaos starts");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{scenario}:\n{out}\n{err}");
    assert!(report.exists(), "a report is written");
}

#[test]
fn a_minority_that_is_cut_off_has_its_reserve_and_no_more() {
    holds("minority-cut-off");
}

#[test]
fn stores_that_are_lost_one_after_the_other_admit_nothing_twice() {
    holds("every-redis-lost-once");
}

#[test]
fn a_policy_that_is_lowered_in_a_partition_binds_everyone() {
    holds("policy-lowered-in-partition");
}

#[test]
fn regions_join_and_leave_under_load() {
    holds("region-joins-and-leaves");
}
