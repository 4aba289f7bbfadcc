//! Environment variables that override what `region.yaml` says.
//!
//! `QUORATE_STORE__REDIS__URL` is `store.redis.url`: capitals for letters, `__` between levels, `_` also for `-`. A
//! variable that names no setting is a fault, so that a misspelt one is not silently without effect.

use super::fault::{Faults, Mark};
use super::yaml::{Key, Node, Value};
use std::ffi::OsString;

const PREFIX: &str = "QUORATE_";

/// Variables that are read elsewhere: by the command line, by telemetry, or by scripts round the daemon.
pub const NOT_SETTINGS: &[&str] = &[
    "QUORATE_LOG",
    "QUORATE_CONFIG",
    "QUORATE_ADDR",
    "QUORATE_ADMIN",
    "QUORATE_CA",
    "QUORATE_TOKEN_FILE",
    // Test runs.
    "QUORATE_SEED",
    "QUORATE_SEEDS",
];

/// The process' variables that may be overrides.
#[must_use]
pub fn of_process() -> Vec<(OsString, OsString)> {
    std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with(PREFIX)).collect()
}

/// Puts overrides into the tree of a region file.
pub fn apply(root: &mut Node, variables: &[(OsString, OsString)], faults: &mut Faults) {
    let mut variables: Vec<_> =
        variables.iter().map(|(name, value)| (name.to_string_lossy(), value.to_str())).collect();
    variables.sort();
    for (name, value) in variables {
        let Some(path) = name.strip_prefix(PREFIX) else { continue };
        if NOT_SETTINGS.contains(&&*name) || is_service_link(&name) {
            continue;
        }
        let mark = Mark::Env((&*name).into());
        let path: Vec<String> = path.split("__").map(str::to_ascii_lowercase).collect();
        let Some(value) = value else {
            faults.push(&mark, "it is not valid UTF-8", "set it to readable text");
            continue;
        };
        if path.iter().any(String::is_empty) {
            faults.push(
                &mark,
                "it names no setting",
                "write it as in QUORATE_STORE__REDIS__URL, or unset it",
            );
            continue;
        }
        set(root, &path, value, &mark, faults);
    }
}

/// Kubernetes sets such variables for a service named `quorate…` (docker links did before it); they are no settings.
fn is_service_link(name: &str) -> bool {
    let port = name.rsplit_once("_PORT").is_some_and(|(_, rest)| {
        let mut parts = rest.split('_').skip(1);
        rest.is_empty()
            || rest.starts_with('_')
                && parts.next().is_some_and(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))
                && parts.next().is_some_and(|p| matches!(p, "TCP" | "UDP" | "SCTP"))
    });
    port || name.ends_with("_SERVICE_HOST") || name.contains("_SERVICE_PORT")
}

fn set(root: &mut Node, path: &[String], value: &str, mark: &Mark, faults: &mut Faults) {
    let mut node = root;
    let mut names_regions = false;
    for (depth, segment) in path.iter().enumerate() {
        if node.value == Value::Null {
            node.value = Value::Map(Vec::new());
        }
        let kind = node.value.kind();
        let Value::Map(entries) = &mut node.value else {
            let what = format!("the file has {kind} where it reaches into");
            faults.push(mark, what, "unset it, or make that a mapping");
            return;
        };
        let known = entries.iter().position(|(key, _)| as_variable(&key.name) == *segment);
        let at = known.unwrap_or_else(|| {
            let name = if names_regions { segment.replace('_', "-") } else { segment.clone() };
            let empty = Node { mark: mark.clone(), value: Value::Null };
            entries.push((Key { mark: mark.clone(), name }, empty));
            entries.len() - 1
        });
        names_regions = depth == 1 && path[..2] == ["cluster", "regions"];
        node = &mut entries[at].1;
    }
    match &node.value {
        Value::Null | Value::Text(_) => {
            *node = Node { mark: mark.clone(), value: Value::Text(value.to_owned()) }
        }
        other => {
            let what = format!("the file has {} there", other.kind());
            faults.push(mark, what, "only single values can be overridden: unset it and change the file");
        }
    }
}

/// A key as a variable's name spells it, but in small letters.
fn as_variable(key: &str) -> String {
    key.to_ascii_lowercase().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_kubernetes_sets_is_no_setting() {
        for name in [
            "QUORATE_SERVICE_HOST",
            "QUORATE_SERVICE_PORT",
            "QUORATE_SERVICE_PORT_HTTP",
            "QUORATE_PORT",
            "QUORATE_PORT_8080_TCP",
            "QUORATE_PORT_8080_TCP_ADDR",
            "QUORATE_ADMIN_PORT_8083_TCP_PROTO",
        ] {
            assert!(is_service_link(name), "{name}");
        }
        for name in
            ["QUORATE_LISTEN__PORTS", "QUORATE_PORT_X_TCP", "QUORATE_PORTAL", "QUORATE_STORE__REDIS__URL"]
        {
            assert!(!is_service_link(name), "{name}");
        }
    }
}
