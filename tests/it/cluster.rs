//! Three regions, each a daemon and a Redis of its own, and what must hold between them: the bound in any window, and
//! that a limit is used as well as it can be, while lines are cut, leaders killed and stores wiped.

use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::load::{Ask, History, Steady, flood};
use crate::support::meter::Bound;
use crate::support::{eventually, hold};
use std::time::{Duration, Instant};

/// Round trip between regions: across a continent.
const RTT: Duration = Duration::from_millis(80);
/// How long a slice of a pool is lent for at least (and for limits that fill up sooner).
const LEASE: Duration = Duration::from_secs(10);
/// A region that has lost its leader has another within this.
const NEW_LEADER_WITHIN: Duration = Duration::from_secs(5);

/// One policy of domain `api` for each tenant.
fn one_policy(limit: &str, rest: &str) -> Plan {
    let policies = format!(
        "policies:\n  - {{ name: p, domain: api, match: [ {{ key: tenant }} ], limit: {limit}, mode: strict{rest} }}\n"
    );
    Plan { policies, rtt: RTT, ..Plan::default() }
}

fn seconds(s: u64) -> Duration {
    Duration::from_secs(s)
}

fn ago(time: Duration) -> Instant {
    Instant::now().checked_sub(time).expect("the machine runs longer than that")
}

/// Waits until the regions together (or one of them) admit at least this much a second, seen over two whole seconds after
/// this call; the deadline counts from here too.
async fn admits(history: &History, name: &str, region: Option<usize>, per_second: usize, deadline: Duration) {
    let what = format!("{name}: {per_second}/s in {}", region.map_or("all regions", |r| REGIONS[r]));
    let called = Instant::now();
    eventually(&what, deadline, || async {
        let (from, now) = (ago(seconds(2)).max(called), Instant::now());
        let admitted = history.count(name, region, 200, from, now);
        hold(admitted >= 2 * per_second, || {
            format!("{admitted} in two seconds; by second:\n{}", history.by_second(name))
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sudden_crowd_gets_what_the_limit_allows_and_no_more() {
    const TIME: Duration = Duration::from_secs(8);
    let bound = Bound::per_second(10, 100);
    let cluster = Cluster::start(one_policy("{ rate: 10/s, burst: 100 }", "")).await;
    let apis = cluster.apis();
    let history = History::default();
    for (name, regions) in [("everywhere", &apis[..]), ("one region", &apis[1..2])] {
        let ask = Ask::new(name, "api", &[("tenant", name)]);
        let start = Instant::now();
        flood(&ask, regions, 300, 24, TIME, &history).await;
        bound.must_hold(&history.admitted(name));
        let admitted = history.count(name, None, 200, start, start + TIME);
        let ideal = 100 + 10 * 8;
        println!("{name}: {admitted} of {ideal} admitted in {TIME:?}; {:?}", history.statuses(name));
        assert!(
            admitted * 10 >= ideal * 9,
            "{name}: {admitted} of {ideal}; by second:\n{}",
            history.by_second(name)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_wait_for_the_pool_is_told_that_it_is_not_over_the_limit() {
    // Shorter than a round trip to the leader.
    let plan = one_policy("{ rate: 10/s, burst: 20 }", ", reserve: 0%, wait: 20ms");
    let cluster = Cluster::start(plan).await;
    let leader = cluster.agreed_leader(seconds(20), &[0, 1, 2]).await;
    let api = cluster.daemons[(leader + 1) % REGIONS.len()].api();
    let answer = api.check("api", &[("tenant", "7")], 1).await;
    assert_eq!((answer.status, answer.reason().as_str()), (429, "no_lease"), "{}", answer.text);
    let after: u64 = answer.must_have("retry-after").parse().expect("whole seconds");
    assert!(after <= 2, "{}", answer.text);
    // What was asked for on its behalf has come by then.
    eventually("it is admitted", seconds(10), || async {
        let answer = api.check("api", &[("tenant", "7")], 1).await;
        hold(answer.status == 200, || answer.text)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_region_has_spent_is_spent_everywhere() {
    let bound = Bound { amount: 6, per_seconds: 60, burst: 30 };
    let cluster = Cluster::start(one_policy("{ rate: 6/m, burst: 30 }", "")).await;
    let history = History::default();
    let ask = Ask::new("spend", "api", &[("tenant", "7")]);
    flood(&ask, &cluster.apis()[..1], 40, 4, seconds(2), &history).await;
    let spent = history.admitted("spend").len();
    assert!((27..=30).contains(&spent), "one region gets at all but the others' reserve: {spent} of 30");
    for api in &cluster.apis()[1..] {
        let told = api.check("api", &[("tenant", "7")], 0).await.remaining();
        assert!(told <= 3, "a region that has spent nothing itself says that {told} are left");
    }
    let elsewhere = Ask::new("elsewhere", "api", &[("tenant", "7")]);
    flood(&elsewhere, &cluster.apis(), 60, 0, Duration::ZERO, &history).await;
    let mut all = history.admitted("spend");
    all.extend(history.admitted("elsewhere"));
    bound.must_hold(&all);
    assert!(history.admitted("elsewhere").len() <= 3, "{:?}", history.statuses("elsewhere"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_limit_is_one_limit_whichever_region_is_asked() {
    let cluster = Cluster::start(one_policy("{ rate: 4/m, burst: 4 }", ", reserve: 0%, wait: 2s")).await;
    let history = History::default();
    let (apis, ask) = (cluster.apis(), Ask::new("small", "api", &[("tenant", "7")]));
    flood(&ask, &apis[..1], 3, 0, Duration::ZERO, &history).await;
    assert_eq!(
        history.admitted("small").len(),
        3,
        "one region gets what is there: {}",
        history.denials("small")
    );
    flood(&ask, &apis[1..2], 4, 0, Duration::ZERO, &history).await;
    assert!(
        history.admitted("small").len() >= 4,
        "what the first region does not need, the second gets: {}",
        history.denials("small")
    );
    flood(&ask, &apis[2..], 4, 0, Duration::ZERO, &history).await;
    Bound { amount: 4, per_seconds: 60, burst: 4 }.must_hold(&history.admitted("small"));
    // Then it is refilled, and that goes to whoever asks: one in 15 seconds.
    let before = history.admitted("small").len();
    let refilled = || async {
        flood(&ask, &apis[1..2], 1, 0, Duration::ZERO, &history).await;
        hold(history.admitted("small").len() > before, || history.denials("small"))
    };
    eventually("the second region gets the next token", seconds(20), refilled).await;
    Bound { amount: 4, per_seconds: 60, burst: 4 }.must_hold(&history.admitted("small"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn regions_far_below_the_limit_are_never_denied() {
    let cluster = Cluster::start(one_policy("{ rate: 100/s, burst: 100 }", ", wait: 1s")).await;
    let history = History::default();
    let ask = Ask::new("tenth", "api", &[("tenant", "7")]);
    let load = Steady::start(&ask, &cluster.apis(), &[10, 10, 10], &history);
    tokio::time::sleep(seconds(15)).await;
    drop(load);
    let sent = history.events().len();
    assert!(sent >= 400, "{sent} of 450 were sent");
    assert_eq!(history.admitted("tenth").len(), sent, "denied:\n{}", history.denials("tenth"));
    Bound::per_second(100, 100).must_hold(&history.admitted("tenth"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demand_that_moves_finds_its_share_in_the_other_region() {
    let cluster = Cluster::start(one_policy("{ rate: 60/s, burst: 60 }", "")).await;
    let history = History::default();
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    let load = Steady::start(&ask, &cluster.apis(), &[90, 0, 0], &history);
    admits(&history, "all", Some(0), 54, seconds(15)).await;
    load.set(0, 0);
    load.set(1, 90);
    let moved = Instant::now();
    // Two seconds of it have to be seen, and a few go by until the pool has followed.
    admits(&history, "all", Some(1), 54, seconds(7)).await;
    println!("90% in the other region, over two seconds, {:?} after the demand moved", moved.elapsed());
    drop(load);
    Bound::per_second(60, 60).must_hold(&history.admitted("all"));
}

/// The three modes side by side, 60/s and burst 60 each, a tenth of it reserve: 2/s and 2 tokens for each region.
const MODES: &str = "
policies:
  - { name: strict, domain: strict, match: [ { key: tenant } ], limit: { rate: 60/s, burst: 60 }, mode: strict, reserve: 10% }
  - { name: approximate, domain: approximate, match: [ { key: tenant } ], limit: { rate: 60/s, burst: 60 },
      mode: approximate, max_overshoot: 20%, reserve: 10% }
  - { name: split, domain: split, match: [ { key: tenant } ], limit: { rate: 60/s, burst: 60 }, mode: split }
";
/// Name, burst with the overshoot.
const MODE_BURSTS: [(&str, u32); 3] = [("strict", 60), ("approximate", 72), ("split", 60)];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_that_is_cut_off_keeps_its_part_and_the_others_share_the_rest() {
    let cluster = Cluster::start(Plan { policies: MODES.to_owned(), rtt: RTT, ..Plan::default() }).await;
    let apis = cluster.apis();
    let history = History::default();
    let load: Vec<Steady> = MODE_BURSTS
        .iter()
        .map(|(mode, _)| {
            Steady::start(&Ask::new(mode, mode, &[("tenant", "7")]), &apis, &[30, 30, 30], &history)
        })
        .collect();
    for (mode, _) in MODE_BURSTS {
        admits(&history, mode, None, 50, seconds(15)).await;
    }

    // A region that does not lead: what becomes of a leader that is cut off is another test's.
    let leader = cluster.agreed_leader(seconds(5), &[0, 1, 2]).await;
    let (alone, others) = match leader {
        0 => (1, [0, 2]),
        1 => (2, [0, 1]),
        _ => (0, [1, 2]),
    };
    cluster.cut_off(alone);
    let cut = Instant::now();
    // What it holds under a lease it may use until the lease ends.
    tokio::time::sleep(LEASE + seconds(2)).await;
    let ended = Instant::now();
    tokio::time::sleep(seconds(8)).await;
    let healed = Instant::now();
    cluster.heal(alone);
    let time = (healed - ended).as_secs_f64();

    let of = |mode: &str, region: usize| history.admitted_in(mode, region, ended, healed) as f64;
    let others_of = |mode: &str| others.iter().map(|r| of(mode, *r)).sum::<f64>();
    println!(
        "cut off for {:?}; admitted a second over the last {time:.1} s (cut off, others):",
        healed - cut
    );
    for (mode, _) in MODE_BURSTS {
        println!("  {mode}: {:.1}, {:.1}", of(mode, alone) / time, others_of(mode) / time);
    }
    let seconds_of = |mode: &str| format!("{mode} by second:\n{}", history.by_second(mode));
    // Reserve: 2/s and 2 tokens. One more for what was in flight as the window opened.
    assert!(of("strict", alone) <= 2.0 * time + 2.0 + 1.0, "{}", seconds_of("strict"));
    assert!(of("strict", alone) >= 2.0 * time * 0.8, "its reserve is there: {}", seconds_of("strict"));
    // And in approximate mode a third of the overshoot, 4 tokens.
    assert!(of("approximate", alone) <= 2.0 * time + 2.0 + 4.0 + 1.0, "{}", seconds_of("approximate"));
    assert!(of("approximate", alone) >= 2.0 * time * 0.8, "{}", seconds_of("approximate"));
    // Split does not notice.
    assert!((of("split", alone) - 20.0 * time).abs() <= 20.0 * time * 0.15, "{}", seconds_of("split"));
    for mode in ["strict", "approximate"] {
        assert!(others_of(mode) >= 58.0 * time * 0.9, "the others have the rest: {}", seconds_of(mode));
    }
    assert!(others_of("split") >= 40.0 * time * 0.9, "{}", seconds_of("split"));

    // The others hold the pool when it comes back; it has its third again within two leases.
    for (mode, _) in MODE_BURSTS {
        let left = (2 * LEASE).saturating_sub(healed.elapsed()).max(seconds(1));
        admits(&history, mode, Some(alone), 16, left).await;
    }
    println!("its share was back {:?} after healing", healed.elapsed());
    drop(load);
    for (mode, burst) in MODE_BURSTS {
        Bound::per_second(60, burst).must_hold(&history.admitted(mode));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_is_killed_and_the_others_go_on() {
    let mut cluster = Cluster::start(one_policy("{ rate: 60/s, burst: 60 }", "")).await;
    let apis = cluster.apis();
    let history = History::default();
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    let load = Steady::start(&ask, &apis, &[30, 30, 30], &history);
    admits(&history, "all", None, 50, seconds(15)).await;

    let leader = cluster.agreed_leader(seconds(5), &[0, 1, 2]).await;
    let others: Vec<usize> = (0..3).filter(|r| *r != leader).collect();
    let before = cluster.daemons[leader].state().await.expect("its state");
    // Spent in the leader's region before; its Redis is not killed, so it stays spent.
    let spent = Ask::new("spent", "api", &[("tenant", "spent")]);
    flood(&spent, &apis[leader..=leader], 100, 0, Duration::ZERO, &history).await;

    cluster.daemons[leader].kill();
    let killed = Instant::now();
    let next = cluster.agreed_leader(NEW_LEADER_WITHIN, &others).await;
    let found = killed.elapsed();
    assert_ne!(next, leader);
    let meanwhile: usize =
        others.iter().map(|r| history.admitted_in("all", *r, killed, killed + found)).sum();
    println!(
        "{} leads {found:?} after {} was killed; {meanwhile} admitted meanwhile",
        REGIONS[next], REGIONS[leader]
    );
    assert!(
        meanwhile as f64 >= 40.0 * 0.8 * found.as_secs_f64() - 5.0,
        "they go on admitting from what they hold: {meanwhile} in {found:?}; by second:\n{}",
        history.by_second("all")
    );
    // When the dead region's lease has ended, the others have all but its reserve.
    admits(&history, "all", None, 52, LEASE + seconds(8)).await;

    cluster.daemons[leader].spawn();
    cluster.daemons[leader].ready().await;
    let after = cluster.daemons[leader].state().await.expect("its state");
    for what in ["/raft/applied", "/raft/term", "/policies_version"] {
        let number = |state: &serde_json::Value| state.pointer(what).and_then(serde_json::Value::as_u64);
        let (was, is) = (number(&before), number(&after));
        assert!(was.is_some() && is >= was, "it comes back with what it had: {what} was {was:?}, is {is:?}");
    }
    flood(&spent, &apis[leader..=leader], 20, 0, Duration::ZERO, &history).await;
    admits(&history, "all", Some(leader), 16, 2 * LEASE).await;
    drop(load);
    let bound = Bound::per_second(60, 60);
    bound.must_hold(&history.admitted("all"));
    bound.must_hold(&history.admitted("spent"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_is_cut_off_is_replaced_and_admits_no_more_than_its_part() {
    let cluster = Cluster::start(one_policy("{ rate: 60/s, burst: 60 }", "")).await;
    let apis = cluster.apis();
    let history = History::default();
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    let load = Steady::start(&ask, &apis, &[30, 30, 30], &history);
    admits(&history, "all", None, 50, seconds(15)).await;
    let leader = cluster.agreed_leader(seconds(5), &[0, 1, 2]).await;
    let others: Vec<usize> = (0..3).filter(|r| *r != leader).collect();
    cluster.cut_off(leader);
    cluster.agreed_leader(NEW_LEADER_WITHIN, &others).await;
    tokio::time::sleep(LEASE).await;
    cluster.heal(leader);
    cluster.agreed_leader(seconds(10), &[0, 1, 2]).await;
    admits(&history, "all", Some(leader), 16, 2 * LEASE).await;
    drop(load);
    Bound::per_second(60, 60).must_hold(&history.admitted("all"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_that_lose_their_data_start_empty_and_recover() {
    let mut cluster = Cluster::start(one_policy("{ rate: 60/s, burst: 60 }", "")).await;
    let history = History::default();
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    let load = Steady::start(&ask, &cluster.apis(), &[30, 30, 30], &history);
    admits(&history, "all", None, 50, seconds(15)).await;

    assert_eq!(cluster.redis[0].cli(&["FLUSHALL"]).await, "OK");
    admits(&history, "all", Some(0), 16, 3 * LEASE).await;

    // Comes back with a snapshot of a fuller past.
    cluster.redis[1].save().await;
    cluster.redis[1].kill();
    let is_out = || async {
        let unavailable = history.count("all", Some(1), 503, ago(seconds(1)), Instant::now());
        hold(unavailable >= 10, || format!("{:?}", history.statuses("all")))
    };
    eventually("the outage shows", seconds(5), is_out).await;
    cluster.redis[1].up().await;
    admits(&history, "all", Some(1), 16, 3 * LEASE).await;

    // Comes back with nothing.
    cluster.redis[2].kill();
    cluster.redis[2].up().await;
    admits(&history, "all", Some(2), 16, 3 * LEASE).await;
    drop(load);
    Bound::per_second(60, 60).must_hold(&history.admitted("all"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_restarted_one_by_one_stay_within_the_bound() {
    let mut cluster = Cluster::start(one_policy("{ rate: 60/s, burst: 60 }", "")).await;
    let history = History::default();
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    let load = Steady::start(&ask, &cluster.apis(), &[30, 30, 30], &history);
    admits(&history, "all", None, 50, seconds(15)).await;
    for daemon in &mut cluster.daemons {
        assert_eq!(daemon.stop().await.code(), Some(0));
        daemon.spawn();
        daemon.ready().await;
    }
    admits(&history, "all", None, 50, 3 * LEASE).await;
    drop(load);
    Bound::per_second(60, 60).must_hold(&history.admitted("all"));
    // No burst of errors: a restart costs its region less than a second of answers, until the daemon has found its store
    // (a tenth of that on a machine that is not busy with other things).
    for (region, name) in REGIONS.iter().enumerate() {
        let errors = history.events().iter().filter(|e| e.region == region && e.status >= 500).count();
        assert!(errors <= 30, "{errors} errors in {name}:\n{}", history.denials("all"));
        // A restart is nothing that a person must look at.
        let log = cluster.daemons[region].log();
        let bad: Vec<&str> = log.lines().filter(|line| line.contains(" ERROR ")).collect();
        assert!(bad.is_empty(), "{name}: {bad:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wall_clocks_that_disagree_or_step_admit_nothing_extra() {
    let plan = one_policy("{ rate: 60/s, burst: 60 }", "");
    let clocks = Some([(0, 2), (7_200, -7_200), (-2, 0)]);
    let cluster = Cluster::start(Plan { clocks, ..plan }).await;
    let history = History::default();
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    let load = Steady::start(&ask, &cluster.apis(), &[30, 30, 30], &history);
    admits(&history, "all", None, 50, seconds(15)).await;
    cluster.daemons[0].set_clock(7_200);
    cluster.redis[0].set_clock(-7_200);
    cluster.redis[2].set_clock(7_200);
    tokio::time::sleep(seconds(3)).await;
    admits(&history, "all", None, 50, 3 * LEASE).await;
    drop(load);
    Bound::per_second(60, 60).must_hold(&history.admitted("all"));
}
