//! `quorate import envoy-ratelimit`: what was matched and counted there is matched and counted here, and what cannot be is said.

use proptest::prelude::*;
use quorate::cli::import::{As, EnvoyRatelimit, Mode, Outcome, import};
use quorate::config::policies;
use quorate::quota::amount::Tokens;
use quorate::quota::matching::{Descriptor, Matcher, Request, Subject};
use quorate::quota::policy::{BucketId, Limit, Policy, TokenBucket};
use std::path::{Path, PathBuf};

/// The reference's tree, as a test builds it.
#[derive(Clone, Debug)]
struct Theirs {
    key: &'static str,
    value: &'static str,
    shared: bool,
    /// Requests a second; each limit has another number.
    limit: Option<u32>,
    below: Vec<Theirs>,
}

#[test]
fn every_file_is_carried_over_as_written_down() {
    let mut different = String::new();
    for (name, files) in examples() {
        let (_, out, err) = run(&files, Mode::Strict, As::Auto);
        let found =
            format!("{out}{}", err.lines().map(|line| format!("# stderr: {line}\n")).collect::<String>());
        let file = folder().join(format!("{name}.out"));
        if std::env::var_os("WRITE_EXPECTED").is_some() {
            std::fs::write(&file, &found).unwrap();
        }
        let expected = std::fs::read_to_string(&file).unwrap_or_default();
        if found != expected {
            different.push_str(&format!("{name} should have\n{found}\n"));
        }
    }
    assert!(different.is_empty(), "{different}");
}

#[test]
fn what_is_written_is_a_policy_file() {
    for (name, files) in examples() {
        for mode in [Mode::Strict, Mode::Approximate, Mode::Split] {
            for limits in [As::TokenBucket, As::Auto, As::Quota] {
                let (outcome, out, err) = run(&files, mode, limits);
                if let Err(faults) = policies::parse(Path::new(&name), &out, None) {
                    // The format has quotas; a version that does not serve them says just that.
                    let faults = faults.to_string();
                    let unserved = "a quota in fixed windows is not supported by this version";
                    assert!(
                        faults.lines().all(|l| l.contains(unserved)),
                        "{mode:?} {limits:?}: {faults}\n{out}"
                    );
                }
                assert_eq!(outcome == Outcome::Done, err.is_empty(), "{name}: {err}");
            }
        }
    }
}

/// Each file in `wrong/` says in comments what is to be said about it.
#[test]
fn wrong_files_are_refused_at_the_right_places() {
    let mut files: Vec<_> =
        std::fs::read_dir(folder().join("wrong")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10);
    let mut different = String::new();
    for path in files {
        let text = std::fs::read_to_string(&path).unwrap();
        let expected: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# expect: ")).collect();
        let (outcome, out, err) = run(&[path.clone()], Mode::Strict, As::Auto);
        assert_eq!((outcome, out.as_str()), (Outcome::Lost, ""), "{}", path.display());
        let prefix = format!("{}:", path.display());
        let found: Vec<String> = err.replace(&prefix, "").lines().map(str::to_owned).collect();
        if found != expected {
            let found: String = found.iter().map(|line| format!("# expect: {line}\n")).collect();
            different.push_str(&format!("{} should have\n{found}\n", path.display()));
        }
    }
    assert!(different.is_empty(), "{different}");
}

#[test]
fn a_descriptor_that_two_files_have_is_refused_and_so_is_a_file_that_is_not_there() {
    let file = folder().join("merged-1.yaml");
    let (outcome, out, err) = run(&[file.clone(), file.clone()], Mode::Strict, As::Auto);
    assert_eq!((outcome, out.as_str()), (Outcome::Lost, ""));
    let file = file.display();
    let expected = format!(
        "{file}:3:5: the descriptor `key1` with the value `value1` is there twice; remove this one or the one at {file}:3:5\n"
    );
    assert_eq!(err, expected);
    let (outcome, _, err) = run(&["no/such.yaml".into()], Mode::Strict, As::Auto);
    assert_eq!(outcome, Outcome::Unreadable);
    assert!(err.starts_with("no/such.yaml: cannot read it"), "{err}");
}

#[test]
fn a_file_that_is_written_holds_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("policies.yaml");
    let files = vec![self::folder().join("messaging.yaml")];
    let args = EnvoyRatelimit {
        files: files.clone(),
        output: Some(output.clone()),
        mode: Mode::Split,
        limits: As::Auto,
    };
    let mut out = Vec::new();
    assert_eq!(import(&args, &mut out, &mut Vec::new()).unwrap(), Outcome::Done);
    assert!(out.is_empty());
    assert_eq!(std::fs::read_to_string(output).unwrap(), run(&files, Mode::Split, As::Auto).1);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1024) })]

    /// The same limit, and the same requests on one counter.
    #[test]
    fn what_was_matched_and_counted_there_is_here(
        theirs in level(3),
        requests in prop::collection::vec(prop::collection::vec((key(), sent()), 1..4), 2..20),
    ) {
        let yaml = format!("domain: d\ndescriptors:\n{}", written(&theirs, 1));
        let policies = imported(&yaml);
        let matcher = Matcher::new((0..).zip(&policies));
        let mut seen: Vec<(Vec<(&str, &str)>, BucketId)> = Vec::new();
        for entries in &requests {
            let limit = limit_of(&theirs, entries);
            let ours = ours(&policies, &matcher, entries);
            prop_assert_eq!(ours.map(|ours| ours.0), limit.as_ref().map(|limit| limit.0), "{:?}\n{}", entries, yaml);
            let (Some((_, counter)), Some((_, bucket))) = (limit, ours) else { continue };
            for (other, of_other) in &seen {
                prop_assert_eq!(&counter == other, bucket == *of_other, "{:?} {:?}\n{}", counter, other, yaml);
            }
            seen.push((counter, bucket));
        }
    }
}

/// Looks a descriptor up as `GetLimit` does, wildcards and all: the limit, and the counter that it is charged to.
fn limit_of<'t>(
    level: &'t [Theirs],
    entries: &[(&'static str, &'static str)],
) -> Option<(u32, Vec<(&'t str, &'t str)>)> {
    let mut level = level;
    let mut counter = Vec::new();
    for (at, (key, value)) in entries.iter().enumerate() {
        let of_key = || level.iter().filter(|theirs| theirs.key == *key);
        let exact = of_key().find(|theirs| theirs.value == *value && !value.is_empty());
        let starred =
            of_key().find(|t| t.value.strip_suffix('*').is_some_and(|start| value.starts_with(start)));
        let found = exact.or(starred).or_else(|| of_key().find(|theirs| theirs.value.is_empty()))?;
        let shared = found.shared && found.value.ends_with('*') && exact.is_none();
        counter.push((*key, if shared { found.value } else { *value }));
        if at + 1 == entries.len() {
            return found.limit.map(|limit| (limit, counter));
        }
        level = &found.below;
    }
    None
}

fn ours(policies: &[Policy], matcher: &Matcher, entries: &[(&str, &str)]) -> Option<(u32, BucketId)> {
    let descriptor = Descriptor { entries, cost: None, limit: None };
    let request = Request { domain: "d", subject: Subject::Descriptors(&[descriptor]), cost: Tokens::ZERO };
    let matched = matcher.charges(&request).unwrap();
    let charge = matched.charges.first()?;
    match policies[charge.policy()? as usize].limit {
        Limit::TokenBucket(TokenBucket { amount, .. }) => {
            Some((u32::try_from(amount).unwrap(), charge.bucket))
        }
        _ => None,
    }
}

fn imported(yaml: &str) -> Vec<Policy> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("theirs.yaml");
    std::fs::write(&file, yaml).unwrap();
    let (outcome, out, err) = run(&[file], Mode::Strict, As::TokenBucket);
    assert_eq!((outcome, err.as_str()), (Outcome::Done, ""), "{yaml}");
    policies::parse(Path::new("out"), &out, None).unwrap_or_else(|faults| panic!("{faults}\n{out}\n{yaml}"))
}

fn key() -> impl Strategy<Value = &'static str> {
    prop_oneof![Just("a"), Just("b")]
}

fn sent() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["x", "xy", "xyz", "y", "z", ""])
}

/// Descriptors of one level, with limits that are numbered so that no two are alike.
fn level(depth: u32) -> impl Strategy<Value = Vec<Theirs>> {
    let value = prop::sample::select(vec!["", "x", "xy", "y", "x*", "xy*", "*"]);
    let leaf = (key(), value.clone(), any::<bool>(), prop::option::weighted(0.7, 1..1_000_000_u32))
        .prop_map(|(key, value, shared, limit)| Theirs { key, value, shared, limit, below: Vec::new() });
    let tree = leaf.prop_recursive(depth, 24, 4, move |below| {
        (
            key(),
            value.clone(),
            any::<bool>(),
            prop::option::of(1..1_000_000_u32),
            prop::collection::vec(below, 0..4),
        )
            .prop_map(|(key, value, shared, limit, below)| Theirs {
                key,
                value,
                shared,
                limit,
                below: distinct(below),
            })
    });
    prop::collection::vec(tree, 0..6).prop_map(distinct)
}

fn distinct(all: Vec<Theirs>) -> Vec<Theirs> {
    let mut seen = std::collections::HashSet::new();
    all.into_iter().filter(|theirs| seen.insert((theirs.key, theirs.value))).collect()
}

fn written(level: &[Theirs], depth: usize) -> String {
    let indent = "  ".repeat(depth);
    let mut text = String::new();
    for Theirs { key, value, shared, limit, below } in level {
        text.push_str(&format!("{indent}- key: {key}\n"));
        if !value.is_empty() {
            text.push_str(&format!("{indent}  value: '{value}'\n"));
        }
        if value.ends_with('*') && *shared {
            text.push_str(&format!("{indent}  share_threshold: true\n"));
        }
        if let Some(limit) = limit {
            text.push_str(&format!("{indent}  rate_limit: {{ unit: second, requests_per_unit: {limit} }}\n"));
        }
        if !below.is_empty() {
            text.push_str(&format!("{indent}  descriptors:\n{}", written(below, depth + 2)));
        }
    }
    text
}

fn run(files: &[PathBuf], mode: Mode, limits: As) -> (Outcome, String, String) {
    let args = EnvoyRatelimit { files: files.to_vec(), output: None, mode, limits };
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let outcome = import(&args, &mut out, &mut err).unwrap();
    (outcome, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

/// What is imported together, by name.
fn examples() -> Vec<(String, Vec<PathBuf>)> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "yaml"))
        .collect();
    files.sort();
    let mut together: Vec<(String, Vec<PathBuf>)> = Vec::new();
    for file in files {
        let stem = file.file_stem().unwrap().to_str().unwrap();
        let name = stem.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-').to_owned();
        match together.iter_mut().find(|(other, _)| *other == name) {
            Some((_, files)) => files.push(file),
            None => together.push((name, vec![file])),
        }
    }
    assert!(together.len() >= 12);
    together
}

fn folder() -> PathBuf {
    PathBuf::from("tests/config/envoy_ratelimit")
}
