//! The simulation: seeds repeat, promises are kept, and every deliberate bug is caught by the seed that the README names.

use quorate::bugs::Bug;
use quorate_chaos::sim::{Counts, Options, campaign::campaign, run};
use std::collections::BTreeSet;

/// How many seeds are run, or as `QUORATE_SEEDS` says.
const SEEDS: u64 = 300;

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[test]
fn a_seed_repeats_bit_for_bit() {
    for seed in [1, 5, 21, 29] {
        let runs =
            [(); 2].map(|()| run(seed, Options { record: true, ..Options::default() }).expect("it runs"));
        let [first, second] = &runs;
        assert_eq!(first.fingerprint, second.fingerprint, "seed {seed}");
        let text =
            |run: &quorate_chaos::sim::Outcome| serde_json::to_string(&run.history).expect("a history");
        assert_eq!(text(first), text(second), "seed {seed}");
    }
    let fingerprints: BTreeSet<u64> =
        (100..110).map(|seed| run(seed, Options::default()).expect("it runs").fingerprint).collect();
    assert_eq!(fingerprints.len(), 10, "seeds differ");
}

/// Runs the first seeds in this way: every promise is kept. What happened in them.
fn clean(seeds: u64, options: Options) -> Counts {
    let summary = campaign(1..=seeds, options, cores(), false, |_, _| ()).expect("they run");
    let broken = summary
        .broken
        .iter()
        .map(|(seed, broken)| format!("{}: {} at {:?}", options.replay(*seed), broken.what, broken.at));
    let broken: Vec<String> = broken.collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert_eq!(summary.seeds, seeds);
    summary.counts
}

// Each of these would prove nothing if nothing had happened.

#[test]
fn every_promise_is_kept_in_some_hundred_seeds() {
    let seeds = std::env::var("QUORATE_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(SEEDS);
    let counts = clean(seeds, Options::default());
    assert!(counts.commits > 100 * seeds && counts.records > 50 * seeds, "{counts:?}");
    assert!(counts.changes > seeds && counts.refused > 0, "{counts:?}");
}

#[test]
fn no_window_of_a_quota_has_more_than_the_quota() {
    const QUOTA_SEEDS: u64 = 60;
    let counts = clean(QUOTA_SEEDS, Options { quotas: true, ..Options::default() });
    assert!(counts.windows > 3 * QUOTA_SEEDS, "{counts:?}");
}

#[test]
fn never_more_permits_are_held_than_there_are() {
    const PERMIT_SEEDS: u64 = 60;
    let counts = clean(PERMIT_SEEDS, Options { permits: true, ..Options::default() });
    assert!(counts.permits > 20 * PERMIT_SEEDS, "{counts:?}");
}

/// The table in the README: `| bug | seed | what is seen |`, and whether that is with quotas, or permits.
fn table() -> Vec<(Bug, u64, bool, bool)> {
    let readme = include_str!("../README.md");
    let rows = readme.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| `")?.split('|').map(|cell| cell.trim().trim_matches('`'));
        let (bug, seed) = (cells.next()?.parse::<Bug>().ok()?, cells.next()?.parse::<u64>().ok()?);
        Some((bug, seed, line.contains("`--quotas`"), line.contains("`--permits`")))
    });
    rows.collect()
}

#[test]
fn every_bug_is_caught_by_the_seed_that_the_readme_names() {
    let table = table();
    let named: BTreeSet<Bug> = table.iter().map(|(bug, ..)| *bug).collect();
    let missing: Vec<_> = Bug::ALL.iter().filter(|bug| !named.contains(bug)).collect();
    assert!(missing.is_empty(), "chaos/README.md must say which seed catches {missing:?}");
    let missed: Vec<_> = table
        .iter()
        .filter(|(bug, seed, quotas, permits)| {
            let (quotas, permits) = (*quotas, *permits);
            let options = Options { bug: Some(*bug), quotas, permits, ..Options::default() };
            let outcome = run(*seed, options).expect("it runs");
            let sound = run(*seed, Options { bug: None, ..options }).expect("it runs");
            assert!(sound.violation.is_none(), "seed {seed} without {bug}: {:?}", sound.violation);
            !outcome.violation.is_some_and(|broken| broken.shows(*bug))
        })
        .collect();
    assert!(
        missed.is_empty(),
        "not caught any more (find others with `quorate-chaos bugs --write chaos/README.md`): {missed:?}"
    );
}
