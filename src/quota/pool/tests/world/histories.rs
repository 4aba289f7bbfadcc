//! Histories without mistakes, and with one.

use super::{Bug, World};

fn campaign(seeds: std::ops::Range<u64>, changing: bool) {
    let (mut commits, mut grants, mut changes) = (0, 0, 0);
    for seed in seeds {
        let (world, result) = World::run(seed, changing, None, 120);
        if let Err(what) = result {
            panic!("seed {seed} (changing: {changing}): {what}");
        }
        commits += world.commits;
        grants += world.grants;
        changes += world.changes;
    }
    // It would prove nothing if nothing had happened.
    assert!(commits > 1_000 && grants > 300 && (changes > 20 || !changing), "{commits} {grants} {changes}");
}

#[test]
fn no_history_admits_more_than_the_limit() {
    campaign(seeds(0), false);
}

#[test]
fn no_change_of_policies_admits_more_than_the_larger_limit() {
    campaign(seeds(1_000_000), true);
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
    ];
    let by_changes = [RaiseAtOnce, AckBeforeStopping, FullAfterPolicy];
    let all = at_any_time.map(|bug| (bug, false)).into_iter().chain(by_changes.map(|bug| (bug, true)));
    for (bug, changing) in all {
        let found = (0..600).find(|seed| World::run(*seed, changing, Some(bug), 120).1.is_err());
        println!("{bug:?}: seed {found:?}");
        assert!(found.is_some(), "{bug:?} goes unnoticed");
    }
}
