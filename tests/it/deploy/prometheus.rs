//! Alerts and the dashboard: rules that promtool takes, with unit tests for each, a runbook for each, and metrics that exist.
//! (A real Prometheus that scrapes real daemons, with a bug and with none, is in chaos/tests/prometheus.rs.)

use crate::support::tools::{file, run, yaml};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

const ALERTS: &str = "deploy/prometheus/alerts.yaml";
const DASHBOARD: &str = "deploy/grafana/dashboards/quorate.json";

#[test]
fn promtool_takes_the_rules_and_their_tests_pass() {
    run(Command::new("promtool").args(["check", "rules", ALERTS]));
    run(Command::new("promtool").args(["check", "config", "deploy/prometheus/prometheus.yaml"]));
    run(Command::new("promtool").args(["test", "rules", "deploy/prometheus/alerts_test.yaml"]));
}

#[test]
fn every_alert_has_a_runbook_and_tests_that_it_fires_and_that_it_does_not() {
    let runbooks = file("docs/operations.md");
    let tests = yaml(&file("deploy/prometheus/alerts_test.yaml"));
    let mut fires: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    for test in tests["tests"].as_array().expect("tests") {
        for ask in test["alert_rule_test"].as_array().expect("asks") {
            let quiet = ask["exp_alerts"].as_array().is_none_or(Vec::is_empty);
            fires.entry(ask["alertname"].as_str().expect("a name").to_owned()).or_default()
                [usize::from(quiet)] += 1;
        }
    }
    let alerts = alerts();
    assert!(alerts.len() > 20, "{}", alerts.len());
    for alert in &alerts {
        let name = alert["alert"].as_str().expect("a name");
        assert!(runbooks.contains(&format!("\n### {name}\n")), "{name}: no section in docs/operations.md");
        let link = format!("docs/operations.md#{}", name.to_lowercase());
        assert_eq!(alert["annotations"]["runbook_url"], link.as_str());
        assert!(["page", "ticket"].iter().any(|s| alert["labels"]["severity"] == **s), "{name}");
        let tested = fires.remove(name).unwrap_or_default();
        assert!(tested.iter().all(|&n| n > 0), "{name}: fires, and does not, in {tested:?} unit tests");
    }
    assert!(fires.is_empty(), "tests of alerts that are no more: {fires:?}");
    let sections = runbooks.lines().filter_map(|line| line.strip_prefix("### Quorate")).count();
    assert_eq!(sections, alerts.len(), "a section for each alert, and no others");
}

#[test]
fn alerts_and_dashboard_ask_for_metrics_that_exist() {
    let queries: Vec<String> = alert_queries().into_iter().chain(dashboard_queries()).collect();
    let mut used = BTreeSet::new();
    for query in &queries {
        used.extend(names(query));
    }
    assert!(used.len() > 40, "{used:?}");
    let series = series();
    assert!(series.len() > 60, "{series:?}");
    let unknown: Vec<_> = used.difference(&series).collect();
    assert!(unknown.is_empty(), "metrics that no daemon has: {unknown:?}");
}

#[test]
fn the_dashboard_is_one_that_grafana_reads() {
    let dashboard: Value = serde_json::from_str(&file(DASHBOARD)).expect("JSON");
    assert_eq!(dashboard["uid"], "quorate");
    let panels = dashboard["panels"].as_array().expect("panels");
    let ids: BTreeSet<_> = panels.iter().map(|p| p["id"].as_u64().expect("an id")).collect();
    assert_eq!(ids.len(), panels.len(), "every panel has an id of its own");
    let mut taken = BTreeSet::new();
    for panel in panels {
        let at = |key: &str| panel["gridPos"][key].as_u64().expect("a place");
        assert!(at("x") + at("w") <= 24, "{}: beyond the right edge", panel["title"]);
        for x in at("x")..at("x") + at("w") {
            for y in at("y")..at("y") + at("h") {
                assert!(taken.insert((x, y)), "{}: over another panel at {x}, {y}", panel["title"]);
            }
        }
        let is_row = panel["type"] == "row";
        assert_eq!(is_row, panel["targets"].is_null(), "{}", panel["title"]);
        let known = ["row", "stat", "timeseries", "state-timeline", "table"];
        assert!(known.iter().any(|kind| panel["type"] == **kind), "{}", panel["type"]);
    }
    // Variables that queries use are there, and the source is the one that is provisioned.
    let variables: BTreeSet<_> = dashboard["templating"]["list"]
        .as_array()
        .expect("variables")
        .iter()
        .map(|v| &v["name"])
        .collect::<Vec<_>>()
        .into_iter()
        .map(|name| name.as_str().expect("a name").to_owned())
        .collect();
    for query in dashboard_queries() {
        for variable in query.split('$').skip(1) {
            let name: String = variable.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            assert!(name == "__rate_interval" || variables.contains(&name), "${name} in {query}");
        }
    }
    let sources = yaml(&file("deploy/grafana/datasources.yaml"));
    assert_eq!(sources["datasources"][0]["url"], "http://prometheus:9090");
    let provider = yaml(&file("deploy/grafana/dashboards.yaml"));
    let compose = file("deploy/compose.yaml");
    let folder = provider["providers"][0]["options"]["path"].as_str().expect("a folder");
    assert!(compose.contains(&format!("./grafana/dashboards:{folder}:ro")), "{folder} is mounted");
}

fn alerts() -> Vec<Value> {
    let rules = yaml(&file(ALERTS));
    let groups = rules["groups"].as_array().expect("groups");
    groups.iter().flat_map(|g| g["rules"].as_array().expect("rules")).cloned().collect()
}

fn alert_queries() -> Vec<String> {
    alerts().iter().map(|alert| alert["expr"].as_str().expect("a query").to_owned()).collect()
}

/// Of panels, variables and annotations.
fn dashboard_queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&file(DASHBOARD)).expect("JSON");
    let mut queries = Vec::new();
    collect(&dashboard, &mut queries);
    assert!(queries.len() > 40, "{}", queries.len());
    queries
}

fn collect(value: &Value, queries: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::String(text) if ["expr", "definition"].contains(&key.as_str()) => {
                        queries.push(text.clone());
                    }
                    value => collect(value, queries),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, queries)),
        _ => {}
    }
}

/// The names of metrics in a query: of ours, of processes, and `up`.
fn names(query: &str) -> BTreeSet<String> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let ours = |word: &&str| word.starts_with("quorate_") || word.starts_with("process_") || *word == "up";
    words.filter(ours).map(str::to_owned).collect()
}

/// The series of every metric of docs/metrics.md, which another test compares with what daemons expose.
fn series() -> BTreeSet<String> {
    let mut series = BTreeSet::from(["up".to_owned()]);
    for row in file("docs/metrics.md").lines().filter_map(|line| line.strip_prefix("| `")) {
        let mut cells = row.split(" | ");
        let (name, kind) = (cells.next().unwrap_or_default().trim_end_matches('`'), cells.next());
        match kind.expect("a kind").trim() {
            "histogram" => series.extend(["_bucket", "_sum", "_count"].map(|s| format!("{name}{s}"))),
            "counter" | "gauge" => _ = series.insert(name.to_owned()),
            kind => panic!("{name}: {kind}?"),
        }
    }
    series
}
