//! Scenarios that come with the program, and scenarios that are wrong.

use super::*;
use std::collections::BTreeSet;
use std::path::PathBuf;

fn folder() -> PathBuf {
    FilePath::new(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

fn faults(text: &str) -> Vec<String> {
    let faults = Scenario::parse(FilePath::new("s.yaml"), text).expect_err("it is wrong");
    faults.to_string().lines().map(str::to_owned).collect()
}

fn faults_of(file: &str) -> Vec<String> {
    faults(&std::fs::read_to_string(folder().join("wrong").join(file)).expect("a file"))
}

#[test]
fn every_scenario_of_the_folder_comes_with_the_program_and_is_right() {
    let files = std::fs::read_dir(folder()).expect("a folder").flatten();
    let yaml = files.filter(|f| f.path().extension().is_some_and(|e| e == "yaml"));
    let names: BTreeSet<String> =
        yaml.map(|f| f.path().file_stem().expect("a name").to_string_lossy().into_owned()).collect();
    let built_in: BTreeSet<String> = BUILT_IN.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(names, built_in);
    let mut seconds = 0;
    for name in &names {
        let scenario = Scenario::load(name).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(scenario.name, *name);
        assert!(!scenario.about.is_empty() && !scenario.expect.must.is_empty(), "{name}");
        assert!((30..=70).contains(&scenario.length.as_secs()), "{name}: {:?}", scenario.length);
        seconds += scenario.length.as_secs();
    }
    assert!(seconds < 15 * 60, "all of them take less than 15 minutes: {seconds} s");
}

#[test]
fn what_is_wrong_at_the_top_is_said_with_its_place_and_mend() {
    assert_eq!(
        faults_of("faults.yaml"),
        [
            "s.yaml:3:1: unknown key `topologie`; did you mean `topology`?",
            "s.yaml:6:31: `topology.regions` is not a name: `US`; use 1 to 63 of a-z, 0-9 and `-`, such as `us-east`",
            "s.yaml:8:25: `topology.redis.persistence` is `sometimes`; it may be `none`, `rdb` or `aof`",
        ]
    );
}

#[test]
fn every_fault_of_a_timeline_is_said() {
    let said = faults_of("timeline.yaml");
    let expected = [
        "8:15: `load.policy` is `q`, which is no policy here; did you mean `p`?",
        "9:28: unknown key `key` in `load.bucket`; it may be `k`",
        "9:26: `load.bucket.k` is missing; give a value to each key of `p`, such as `bucket: { k: a }`",
        "10:5: `load` has neither `rate` nor `callers`; `rate` is requests a second, `callers` is how many ask one request after the other; write one of them",
        "12:29: `cut` is `us-west`, which is neither a region nor a role; did you mean `eu-west`?",
        "13:24: unknown key `cutt` in `timeline`; did you mean `cut`?",
        "14:5: `flap` has no end; add `for`, such as `for: 10s`",
        "15:15: `flush` is over by itself; remove `for`",
        "16:5: this ends after the scenario does; make `length` longer",
        "18:5: `timeline.at` is missing; say when, such as `at: 10s`",
        "19:29: a connection cannot be reset one way; use `how: blackhole`, or leave `both_ways` out",
        "20:30: nothing is slow here; add `rtt`, `jitter` or `bandwidth`",
        "23:47: `clock_step.by` is not a duration: `2h`; write a number and `us`, `ms`, `s` or `m`, from 1ms to 31622400s",
        "24:30: `kill` names nobody; name a region, `leader`, `follower`, `all` or `others`",
        "26:10: `expect.must` is `strict-bond`, which is no invariant; did you mean `strict-bound`?",
        "27:10: `everything` is no invariant;",
        "28:13: `expect.recovery` is not a duration: `1`;",
    ];
    for fault in expected {
        assert!(
            said.iter().any(|line| line.starts_with(&format!("s.yaml:{fault}"))),
            "{fault}\nis not in\n{}",
            said.join("\n")
        );
    }
    assert!(
        said.iter()
            .any(|line| line.starts_with("s.yaml:17:5: an event has one kind of fault, and this has 2;")),
        "{said:#?}"
    );
    assert_eq!(said.len(), expected.len() + 1, "{}", said.join("\n"));
}

#[test]
fn what_no_single_event_can_see_is_said_when_all_of_them_are_right() {
    let text = "
title: t
length: 20s
topology: { regions: [a, b] }
policies: [ { name: p, domain: d, match: [ { key: k } ], limit: { rate: 10/s, burst: 10 }, mode: strict } ]
load: [ { policy: p, bucket: { k: a }, rate: 5 } ]
timeline:
  - { at: 5s, for: 1s, redis_kill: { who: a, back: saved } }
  - { at: 5s, redis_failover: a }
";
    assert_eq!(
        faults(text),
        [
            "s.yaml:8:5: no snapshot has been saved by then; add a `redis_save` earlier in the timeline",
            "s.yaml:9:5: there is no replica; add `replica: true` to `topology.redis`",
        ]
    );
    let saved = text.replace("  - { at: 5s, redis_failover: a }", "  - { at: 1s, redis_save: a }");
    assert!(Scenario::parse(FilePath::new("s.yaml"), &saved).is_ok());
    let aof = saved.replace("regions: [a, b]", "regions: [a, b], redis: { persistence: aof }");
    assert_eq!(faults(&aof).len(), 1);
}

#[test]
fn policies_are_read_as_the_daemon_reads_them() {
    let said = faults_of("policies.yaml");
    let expected = ["5:33: `us-east/mars` is no pair of regions; write `region/region: 80ms`"];
    for fault in expected {
        assert!(
            said.iter().any(|line| line.starts_with(&format!("s.yaml:{fault}"))),
            "{fault}\nis not in\n{}",
            said.join("\n")
        );
    }
}

#[test]
fn regions_are_numbered_by_name_and_a_matrix_is_symmetric() {
    let text = "
title: t
length: 20s
topology:
  regions: [us-east, ap-south, eu-west]
  later: [af-south]
  rtt: { us-east/eu-west: 80ms, us-east/ap-south: 160ms, eu-west/ap-south: 110ms, af-south/us-east: 1ms, af-south/eu-west: 2ms, af-south/ap-south: 3ms }
policies: [ { name: p, domain: d, match: [ { key: k }, { key: l } ], limit: { rate: 10/s, burst: 10 }, mode: strict } ]
load:
  - { policy: p, bucket: { l: b, k: a }, rate: { eu-west: 5 }, to: 60s }
  - { policy: p, bucket: { l: b, k: a }, callers: 3 }
timeline:
  - { at: 5s, for: 1s, cut: { from: [leader, us-east], to: others, both_ways: false } }
";
    let scenario = Scenario::parse(FilePath::new("s.yaml"), text).unwrap_or_else(|e| panic!("{e}"));
    let Topology { regions, founders, rtt, .. } = &scenario.topology;
    let names: Vec<&str> = regions.iter().map(|r| &**r).collect();
    assert_eq!((names, *founders), (vec!["ap-south", "eu-west", "us-east", "af-south"], 3));
    assert_eq!(
        (rtt[0][1], rtt[1][0], rtt[2][3]),
        (Duration::from_millis(110), Duration::from_millis(110), Duration::from_millis(1))
    );
    let [first, second] = scenario.loads.as_slice() else { panic!("{:?}", scenario.loads) };
    assert_eq!(first.limit_name(), "p k=a,l=b");
    assert_eq!(first.pace, [Pace::Open(0), Pace::Open(5), Pace::Open(0), Pace::Open(0)]);
    assert_eq!((first.to, second.pace[3]), (scenario.length, Pace::Closed(3)));
    let Fault::Cut(path, How::Blackhole) = &scenario.timeline[0].fault else {
        panic!("{:?}", scenario.timeline)
    };
    assert_eq!(path.from, Who(vec![Role::Leader, Role::Region(2)]));
    assert!(!path.both_ways && path.to == Who(vec![Role::Others]));
}
