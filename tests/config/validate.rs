//! `quorate validate`: what it prints, where, and how it ends.

use quorate::cli::validate::{Args, Outcome, check};
use std::path::PathBuf;

fn validate(files: &[PathBuf], regions: &[&str], json: bool) -> (Outcome, String, String) {
    let args =
        Args { files: files.to_vec(), regions: regions.iter().map(ToString::to_string).collect(), json };
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let outcome = check(&args, &mut out, &mut err).unwrap();
    (outcome, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn with(text: &str) -> (Self, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("policies.yaml");
        std::fs::write(&file, text).unwrap();
        (Self(folder), file)
    }

    fn path(&self) -> &std::path::Path {
        self.0.path()
    }
}

#[test]
fn the_examples_are_valid_and_say_what_they_guarantee() {
    let files = [repository("config/region.yaml"), repository("config/policies.yaml")];
    let (outcome, out, err) = validate(&files, &[], false);
    assert_eq!((outcome, err.as_str()), (Outcome::Valid, ""));
    assert!(
        out.contains("region.yaml: region `us-east` of cluster `prod` (ap-south, eu-west, us-east): valid\n"),
        "{out}"
    );
    assert!(out.contains("policies.yaml: 9 policies: valid\n"), "{out}");
    let first: String =
        out.split("\n\n").find(|block| block.starts_with("tenant-requests")).unwrap().to_owned();
    let expected = "\
tenant-requests (strict): 10/s, burst 100
  in any window of T seconds all regions together admit at most 100 + 10·T (burst + rate·T)
  in a partition each region keeps, less 1% for clocks:
    ap-south: 0.066/s, burst 1.667
    eu-west: 0.066/s, burst 1.667
    us-east: 0.066/s, burst 1.667
    and what is left of its lease, for at most 10 s
  the pool lends the rest: 9.8/s, burst 95; one region alone can have 9.768/s
  demand that moves between regions is carried up to 9.9/s (tokens take 450 ms to move: a round trip and the gap between asks)";
    assert_eq!(first, expected);
    let block =
        |name: &str| out.split("\n\n").find(|block| block.starts_with(name)).unwrap().trim_end().to_owned();
    let log = "\
password-resets (split): 5 per 15m, sliding_log
  in any window of 900 s, wherever it begins, all regions together admit at most 5, as their stores' clocks measure it
  each region has a part of its own, in a partition or not:
    ap-south: 1
    eu-west: 1
    us-east: 3
  the count is in each region's Redis alone: one that lost its data takes its part for used up, until the loss is 900 s ago";
    assert_eq!(block("password-resets"), log);
    assert!(block("exports").contains("at any time at most 3 are in use, all regions together"), "{out}");
    assert!(out.contains("health-checks (unlimited): matches and never denies"), "{out}");
    let month: String = out.split("\n\n").find(|block| block.starts_with("plan-month")).unwrap().to_owned();
    let expected = "\
plan-month (strict): 1000000 per month
  in any window (month, UTC), which turns by the clocks of a majority of the regions, all regions together admit at most 1000000
  around a turn up to 2000000 may pass in a short time, the end of one window's and the beginning of the next's
  in a partition each region keeps, as far as it has not spent it:
    ap-south: 16667
    eu-west: 16667
    us-east: 16666
    and what it has borrowed and not spent, at most 10000 for at most 60 s; half of its reserve is not touched while the pool has something
  the pool lends the rest: 950000; it keeps the account, whatever becomes of stores and daemons";
    assert_eq!(month, expected);
    assert!(out.contains("admit at most 1000 + 100 + 500·T (burst + overshoot + rate·T)"), "{out}");
}

#[test]
fn faults_go_to_stderr_and_end_in_1() {
    let wrong = repository("tests/config/wrong/policies-unlimied.yaml");
    let (outcome, out, err) = validate(&[wrong.clone(), repository("config/policies.yaml")], &[], false);
    assert_eq!(outcome, Outcome::Invalid);
    assert_eq!(err, format!("{}:5:5: unknown key `unlimied`; did you mean `unlimited`?\n", wrong.display()));
    assert!(out.contains("9 policies: valid"), "the other file is checked all the same: {out}");
}

#[test]
fn what_cannot_be_read_ends_in_2() {
    let (outcome, _, err) = validate(&[PathBuf::from("no/such.yaml")], &[], false);
    assert_eq!(outcome, Outcome::Unreadable);
    assert!(err.starts_with("no/such.yaml: cannot read it"), "{err}");
    let (outcome, _, err) = validate(&[repository("config/policies.yaml")], &["US"], false);
    assert_eq!(outcome, Outcome::Unreadable);
    assert!(err.starts_with("--regions: "), "{err}");
}

#[test]
fn a_file_is_known_by_its_keys() {
    for (text, says) in [
        ("policies: []\n", None),
        ("policies:\n", Some("`policies` is empty; write a list")),
        ("policies: policies.yaml\nregion: a\n", Some("`cluster` is missing")),
        ("store: {}\n", Some("`region` is missing")),
        ("foo: 1\n", Some("neither a region file")),
        ("", Some("neither a region file")),
        ("- 1\n", Some("neither a region file")),
    ] {
        let (_folder, file) = Folder::with(text);
        let (outcome, _, err) = validate(&[file], &[], false);
        match says {
            None => assert_eq!((outcome, err.as_str()), (Outcome::Valid, ""), "{text:?}"),
            Some(says) => assert!(outcome == Outcome::Invalid && err.contains(says), "{text:?}: {err}"),
        }
    }
}

#[test]
fn weights_are_checked_against_the_region_file() {
    let (folder, file) = Folder::with(
        "policies: [{ name: a, domain: d, match: [{ key: k }], limit: { rate: 1/s }, mode: split, weights: { eu-wets: 1 } }]\n",
    );
    let (outcome, out, _) = validate(std::slice::from_ref(&file), &[], false);
    assert_eq!(outcome, Outcome::Valid);
    assert!(out.contains("eu-wets: 0.99/s, burst 1"), "{out}");
    let (outcome, _, err) = validate(std::slice::from_ref(&file), &["us-east", "eu-west"], false);
    assert_eq!(outcome, Outcome::Invalid);
    assert!(err.contains(
        "`weights` names `eu-wets`, which is not a region of the cluster; did you mean `eu-west`?"
    ));
    let region = folder.path().join("region.yaml");
    std::fs::write(
        &region,
        "region: eu-west\ncluster: { name: c, regions: { eu-west: 'http://127.0.0.1:1', us: 'http://127.0.0.1:2' } }\n",
    )
    .unwrap();
    let (outcome, _, err) = validate(&[file, region.clone()], &[], false);
    assert_eq!(outcome, Outcome::Invalid);
    assert!(err.contains("did you mean `eu-west`?"), "{err}");

    // The region file also says how far apart its regions are.
    let text = std::fs::read_to_string(&region).unwrap().replace("name: c", "rtt_max: 80ms, name: c");
    std::fs::write(&region, text).unwrap();
    let (outcome, out, _) = validate(&[region, repository("config/policies.yaml")], &[], false);
    assert_eq!(outcome, Outcome::Invalid, "its weights name other regions");
    assert!(!out.contains("policies: valid"), "{out}");
    let simple = folder.path().join("simple.yaml");
    std::fs::write(
        &simple,
        "policies: [{ name: a, domain: d, match: [{ key: k }], limit: { rate: 1/s }, mode: strict }]\n",
    )
    .unwrap();
    let (outcome, out, _) = validate(&[simple, folder.path().join("region.yaml")], &[], false);
    assert_eq!(outcome, Outcome::Valid);
    assert!(out.contains("tokens take 280 ms to move") && out.contains("    eu-west: "), "{out}");
}

#[test]
fn what_is_less_than_it_seems_is_said() {
    let (_folder, file) = Folder::with(
        "policies:\n\
         - { name: slow, domain: d, match: [{ key: a }], limit: { rate: 1/d }, mode: split }\n\
         - { name: tight, domain: d, match: [{ key: b }], limit: { rate: 100/s, burst: 20 }, mode: strict }\n\
         - name: open\n  domain: d\n  match: [{ key: c }]\n  limit: { rate: 100/s }\n  mode: approximate\n  \
           max_overshoot: 10%\n  on_store_failure: allow\n  shadow: true\n",
    );
    let (outcome, out, _) = validate(&[file], &["a", "b"], false);
    assert_eq!(outcome, Outcome::Valid);
    assert!(out.contains("0.000011/s of it, 4.96% less than written"), "{out}");
    assert!(out.contains("carried up to 44/s") && out.contains("a burst of 45 or more"), "{out}");
    assert!(out.contains("its requests pass uncounted: the bound does not hold then"), "{out}");
    assert!(out.contains("and 5 above the limit") && out.contains("shadow:"), "{out}");
    assert_eq!(out.matches("or more, a larger reserve").count(), 1, "{out}");
}

#[test]
fn a_quota_says_who_keeps_the_account() {
    let (_folder, file) = Folder::with(
        "policies:\n\
         - { name: own, domain: d, match: [{ key: a }], limit: { quota: 10, per: 15m }, mode: split }\n\
         - { name: over, domain: d, match: [{ key: b }], limit: { quota: 100, per: 1s }, mode: approximate, max_overshoot: 10% }\n",
    );
    let (outcome, out, err) = validate(&[file], &["a", "b", "c"], false);
    assert_eq!((outcome, err.as_str()), (Outcome::Valid, ""));
    assert!(out.contains("own (split): 10 per 15m\n"), "{out}");
    assert!(
        out.contains("each region has:\n    a: 4\n    b: 3\n    c: 3\n  the store alone keeps the account"),
        "{out}"
    );
    assert!(out.contains("admit at most 100 + 10\n") && out.contains("a: 2, and 4 above the quota"), "{out}");
    assert!(out.contains("up to 220 may pass in a short time"), "{out}");
    assert_eq!(out.matches("hardly longer than tokens take to move").count(), 1, "{out}");
}

#[test]
fn machines_get_json() {
    let wrong = repository("tests/config/wrong/policies-unlimied.yaml");
    let missing = PathBuf::from("no/such.yaml");
    let files = [repository("config/policies.yaml"), repository("config/region.yaml"), wrong, missing];
    let (outcome, out, err) = validate(&files, &[], true);
    assert_eq!((outcome, err.as_str()), (Outcome::Unreadable, ""));
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["valid"], false);
    let policy = &json["files"][0]["policies"][0];
    assert_eq!(policy["name"], "tenant-requests");
    assert_eq!(policy["bound"]["burst_micro"], 100_000_000);
    assert_eq!(policy["in_a_partition"][0]["region"], "ap-south");
    assert_eq!(policy["pool"]["rate_micro_per_s"], 9_800_002);
    let month =
        json["files"][0]["policies"].as_array().unwrap().iter().find(|p| p["name"] == "plan-month").unwrap();
    assert_eq!(month["quota"]["quota_micro"], 1_000_000_000_000_i64);
    assert_eq!(month["quota"]["around_a_turn_micro"], 2_000_000_000_000_i64);
    assert_eq!(month["in_a_partition"][2]["burst_micro"], 16_666_000_000_i64);
    assert_eq!(month["pool"]["loan_max_micro"], 10_000_000_000_i64);
    assert_eq!(json["files"][1]["region"], "us-east");
    let fault = &json["files"][2]["faults"][0];
    assert_eq!((&fault["line"], &fault["column"]), (&5.into(), &5.into()));
    assert_eq!(fault["mend"], "did you mean `unlimited`?");
    assert!(json["files"][3]["unreadable"].is_string());
}

#[test]
fn limits_that_count_say_what_their_algorithm_can() {
    let (_folder, file) = Folder::with(
        "policies:
  - name: w
    domain: d
    match: [ { key: k } ]
    limit: { quota: 1000, per: hour, algorithm: sliding_window }
    mode: split
    on_store_failure: local
  - name: c
    domain: d
    match: [ { key: k }, { key: l } ]
    limit: { concurrent: 1 }
    mode: split
    weights: { a: 1, b: 1 }
",
    );
    let (outcome, out, err) = validate(std::slice::from_ref(&file), &[], false);
    assert_eq!((outcome, err.as_str()), (Outcome::Valid, ""));
    for part in [
        "w (split): 1000 per hour, sliding_window\n",
        "at most 1000 + 1000·T/3600: 1000 at once, up to 2000 in 3600 s around the turn of a window, and 1000 in 3600 s where traffic is steady\n",
        "(for 3 regions alike; name yours with --regions or a region file):\n    region-1: 334\n    region-2: 333\n",
        "the daemon counts in memory, as if its part were used up until that is 3600 s ago",
        "c (split): 1 at a time, ttl 60s\n",
        "    a: 1\n    b: nothing: it denies everything\n",
    ] {
        assert!(out.contains(part), "{part}\n{out}");
    }
    let (_, json, _) = validate(&[file], &[], true);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let policies = json.pointer("/files/0/policies").or(json.pointer("/0/policies")).unwrap();
    assert_eq!(policies[0]["bound"]["in_one_window"], 2000);
    assert_eq!(
        (&policies[1]["bound"]["algorithm"], &policies[1]["bound"]["whole"]),
        (&"concurrent".into(), &1.into())
    );
}
