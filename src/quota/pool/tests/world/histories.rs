//! Histories without mistakes, and with one.

use super::{Bug, Changing, World};

fn campaign(seeds: std::ops::Range<u64>, changing: Changing) {
    let (mut commits, mut grants, mut changes, mut came, mut left) = (0, 0, 0, 0, 0);
    let (mut resets, mut loans) = (0, 0);
    for seed in seeds {
        let (world, result) = World::run(seed, changing, None, time_of(changing));
        if let Err(what) = result {
            panic!("seed {seed} (changing: {changing:?}): {what}");
        }
        commits += world.commits;
        grants += world.grants;
        changes += world.changes;
        came += world.came;
        left += world.left;
        resets += world.resets;
        loans += world.loans;
    }
    println!(
        "{commits} entries, {grants} grants, {changes} changes, {came} regions came, {left} left, {loans} loans"
    );
    // It would prove nothing if nothing had happened.
    let enough = match changing {
        Changing::Nothing => loans > 20,
        Changing::Resets => resets > 40,
        Changing::Policies => changes > 20,
        Changing::Regions => changes > 20 && came > 20 && left > 3,
    };
    assert!(commits > 1_000 && grants > 300 && enough, "{commits} {grants} {changes} {came} {left}");
}

#[test]
fn no_history_admits_more_than_the_limit() {
    campaign(seeds(0), Changing::Nothing);
}

#[test]
fn no_reset_makes_more_than_one_burst() {
    campaign(seeds(3_000_000), Changing::Resets);
}

#[test]
fn no_change_of_policies_admits_more_than_the_larger_limit() {
    campaign(seeds(1_000_000), Changing::Policies);
}

#[test]
fn no_coming_and_going_of_regions_admits_more_than_the_limit() {
    // (They are longer ones.)
    let seeds = seeds(2_000_000);
    campaign(seeds.start..seeds.start + (seeds.end - seeds.start).div_ceil(2), Changing::Regions);
}

/// How long a history lasts, in seconds: regions come and go slowly.
fn time_of(changing: Changing) -> i64 {
    if changing == Changing::Regions { 240 } else { 120 }
}

/// How many histories to try: `QUORATE_SEEDS`, or a few; or the one that `QUORATE_SEED` names.
fn seeds(from: u64) -> std::ops::Range<u64> {
    if let Some(seed) = std::env::var("QUORATE_SEED").ok().and_then(|s| s.parse().ok()) {
        return seed..seed + 1;
    }
    let many = std::env::var("QUORATE_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(40);
    from..from + many
}

/// A check that never fails proves nothing: each of these mistakes at the seams must be found.
#[test]
fn every_mistake_is_found() {
    use Bug::*;
    let at_any_time = [
        NoDriftDiscount,
        LeaseFromReply,
        LeaseFromResend,
        StaleStampAccepted,
        LeaderWallClock,
        StampAtBatchOpen,
        NoSeqCheck,
        NoEpoch,
        FullAfterLoss,
        OverdraftForgottenOnLoss,
        RollbackUndetected,
        StopAfterSending,
        NoFence,
        LentUsed,
        LoanTooLong,
        LoansForgotten,
    ];
    let by_changes = [RaiseAtOnce, AckBeforeStopping, FullAfterPolicy];
    let all = at_any_time.map(|bug| (bug, Changing::Nothing)).into_iter();
    let all = all.chain(by_changes.map(|bug| (bug, Changing::Policies)));
    for (bug, changing) in all.chain([(ResetTwice, Changing::Resets)]) {
        find(bug, changing, 0);
    }
}

// With regions that come and go a mistake takes some hundreds of histories to show: one test each, which begins near the first that was found.

#[test]
fn every_mistake_with_regions_is_found_former_life() {
    find(Bug::FormerLife, Changing::Regions, 1_420);
}

#[test]
fn every_mistake_with_regions_is_found_newcomer_at_once() {
    find(Bug::NewcomerAtOnce, Changing::Regions, 115);
}

#[test]
fn every_mistake_with_regions_is_found_removed_unheard() {
    find(Bug::RemovedUnheard, Changing::Regions, 115);
}

fn find(bug: Bug, changing: Changing, from: u64) {
    let goes_wrong = |seed: &u64| World::run(*seed, changing, Some(bug), time_of(changing)).1.is_err();
    let found = (from..from + 600).find(goes_wrong);
    println!("{bug:?}: seed {found:?}");
    assert!(found.is_some(), "{bug:?} goes unnoticed");
}
