//! Quotas for each window of the calendar, three regions with a daemon and a Redis of their own: never more than the quota in
//! any window, whatever is cut off, wiped, restarted or set to another time, and nearly all of it usable.

use crate::support::client::{Grpc, descriptor, rls_request};
use crate::support::cluster::{Cluster, Plan};
use crate::support::daemon::{Daemon, Settings, quorate};
use crate::support::load::{Ask, Event, History, Steady, flood, unix_ms};
use crate::support::redis::Redis;
use crate::support::{eventually, hold};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, rate_limit::Unit};
use std::collections::BTreeMap;
use std::time::Duration;

/// Round trip between regions: across a continent.
const RTT: Duration = Duration::from_millis(80);

fn policies(limit: &str, rest: &str) -> String {
    format!(
        "policies:\n  - {{ name: p, domain: api, match: [ {{ key: tenant }} ], limit: {limit}, {rest} }}\n"
    )
}

fn plan(limit: &str, rest: &str) -> Plan {
    Plan { policies: policies(limit, rest), rtt: RTT, ..Plan::default() }
}

fn seconds(s: u64) -> Duration {
    Duration::from_secs(s)
}

/// Waits until `ms` milliseconds after the beginning of the next window of `seconds` seconds that begins in a second or later: of
/// one that begins within half a second of its start, a daemon presumes that it was there before, and that all is spent.
async fn into_next_window(seconds: u64, ms: u64) {
    let length = seconds * 1_000;
    sleep_until_ms((unix_ms() + 1_000) / length * length + length + ms).await;
}

async fn sleep_until_ms(at: u64) {
    tokio::time::sleep(Duration::from_millis(at.saturating_sub(unix_ms()))).await;
}

/// What was admitted in each window of `seconds` seconds, by the window's number: each answer says when its window ends.
fn by_window(events: &[Event], seconds: u64) -> BTreeMap<u64, Vec<Event>> {
    let length = seconds * 1_000;
    let mut windows: BTreeMap<u64, Vec<Event>> = BTreeMap::new();
    for event in events.iter().filter(|e| e.status == 200) {
        let end = (event.reset_at_ms + length / 2) / length;
        let off = event.reset_at_ms.abs_diff(end * length);
        assert!(
            off < 5_000.min(length / 2),
            "an answer's window ends {off} ms off any window's end: {event:?}"
        );
        windows.entry(end - 1).or_default().push(*event);
    }
    windows
}

/// Asks one after the other, in all regions in turn, until `want` are admitted; then `more` times. Says how many were admitted.
async fn admitted_of(cluster: &Cluster, history: &History, want: usize, more: usize) -> usize {
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    let apis = cluster.apis();
    let before = history.admitted("all").len();
    eventually("what is left of the quota is admitted", seconds(100), || async {
        flood(&ask, &apis, 3, 0, Duration::ZERO, history).await;
        let now = history.admitted("all").len() - before;
        hold(now >= want, || format!("{now} of {want}\n{}", history.denials("all")))
    })
    .await;
    flood(&ask, &apis, more, 0, Duration::ZERO, history).await;
    history.admitted("all").len() - before
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_is_used_up_and_never_passed_with_a_region_cut_off_over_a_turn() {
    const WINDOW: u64 = 30;
    const QUOTA: usize = 1_000;
    let cluster = Cluster::start(plan("{ quota: 1000, per: 30s }", "mode: strict")).await;
    let apis = cluster.apis();
    let history = History::default();
    let leader = cluster.agreed_leader(seconds(5), &[0, 1, 2]).await;
    let alone = (leader + 1) % 3;

    into_next_window(WINDOW, 0).await;
    let first = unix_ms() / 1_000 / WINDOW;
    let load = Steady::start(&Ask::new("all", "api", &[("tenant", "7")]), &apis, &[13, 13, 13], &history);
    // The last third of a window, and some of the next.
    sleep_until_ms((first * WINDOW + 20) * 1_000).await;
    cluster.cut_off(alone);
    (0..3).for_each(|region| load.set(region, 30));
    sleep_until_ms(((first + 1) * WINDOW + 4) * 1_000).await;
    cluster.heal(alone);
    sleep_until_ms((first + 4) * WINDOW * 1_000 + 2_000).await;
    drop(load);

    let windows = by_window(&history.events(), WINDOW);
    let shown = |(window, events): (&u64, &Vec<Event>)| {
        let by_region: Vec<usize> = (0..3).map(|r| events.iter().filter(|e| e.region == r).count()).collect();
        format!("window {}: {} admitted, by region {by_region:?}", window - first, events.len())
    };
    let all: String = windows.iter().map(|w| shown(w) + "\n").collect();
    println!("{all}");
    for events in windows.values() {
        assert!(events.len() <= QUOTA, "more than the quota:\n{all}");
    }
    for window in first..first + 4 {
        let used = windows.get(&window).map_or(0, Vec::len);
        assert!(
            used * 100 >= QUOTA * 95,
            "window {}: only {used} used:\n{all}\n{}",
            window - first,
            history.by_second("all")
        );
    }
    let next = windows[&(first + 1)].iter().filter(|e| e.region == alone).count();
    assert!(next >= 16, "it turned the window by itself, and had its reserve of the next:\n{all}");
}

/// 50 calls, then a raise, a cut and a raise in the same window.
async fn only_the_difference_passes(rest: &str, changes: &[(usize, usize)]) {
    let cluster = Cluster::start(plan("{ quota: 10, per: year }", rest)).await;
    let history = History::default();
    let all = admitted_of(&cluster, &history, 10, 40).await;
    assert_eq!(all, 10);
    for (quota, more) in changes {
        set_quota(&cluster, *quota, rest).await;
        let all = admitted_of(&cluster, &history, *more, 30).await;
        assert_eq!(all, *more, "after a change to {quota}:\n{}", history.denials("all"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_that_is_raised_brings_just_the_difference() {
    only_the_difference_passes("mode: strict, wait: 1s", &[(20, 10), (5, 0), (21, 1)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_split_quota_that_is_raised_brings_just_the_difference() {
    only_the_difference_passes("mode: split", &[(20, 10), (5, 0), (21, 1)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_approximate_quota_that_is_raised_brings_just_the_difference() {
    // An overshoot of a twentieth of 10 is none, one of 20 is one.
    only_the_difference_passes("mode: approximate, max_overshoot: 5%", &[(20, 11)]).await;
}

/// `policies apply`, and waits until every region has read it.
async fn set_quota(cluster: &Cluster, quota: usize, rest: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("policies.yaml");
    std::fs::write(&file, policies(&format!("{{ quota: {quota}, per: year }}"), rest)).expect("a file");
    let admin = cluster.daemons[0].admin().url();
    let output = quorate(&["policies", "apply", file.to_str().expect("a path"), "--admin", &admin]).await;
    assert!(output.status.success(), "{output:?}");
    let version = cluster.daemons[0].state().await.expect("its state")["policies_version"].clone();
    for daemon in &cluster.daemons {
        eventually("every region reads the change", seconds(20), || async {
            let state = daemon.state().await?;
            hold(state["policies_version"] == version, || state["policies_version"].to_string())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_spent_stays_spent_through_the_loss_of_everything_in_memory() {
    let mut cluster = Cluster::start(plan("{ quota: 300, per: day }", "mode: strict, reserve: 10%")).await;
    let history = History::default();
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    flood(&ask, &cluster.apis(), 150, 0, Duration::ZERO, &history).await;
    let before = history.admitted("all").len();
    assert!(before >= 30, "{:?}", history.statuses("all"));
    // One region's store, then everything: all daemons and all stores at once.
    cluster.redis[0].cli(&["FLUSHALL"]).await;
    flood(&ask, &cluster.apis(), 60, 0, Duration::ZERO, &history).await;
    for i in 0..3 {
        cluster.daemons[i].kill();
        cluster.redis[i].kill();
    }
    for i in 0..3 {
        cluster.redis[i].up().await;
        cluster.daemons[i].spawn();
    }
    for daemon in &mut cluster.daemons {
        daemon.ready().await;
    }
    let load = Steady::start(&ask, &cluster.apis(), &[40, 40, 40], &history);
    let most = || history.admitted("all").len();
    eventually("the rest of the quota is used up", seconds(60), || async {
        let bucket = cluster.daemons[0].admin().get("/v1/buckets/p?tenant=7").await?.json();
        let then = most();
        tokio::time::sleep(seconds(3)).await;
        hold(bucket["pool_level"] == 0 && most() == then, || format!("{then}, then {}: {bucket}", most()))
    })
    .await;
    drop(load);
    let all = most();
    println!("{all} of 300 admitted, {before} before the first loss");
    assert!(all <= 300, "{all} of 300: {:?}", history.statuses("all"));
    // What was lent and not used, and the reserves, are lost with the stores.
    assert!(all >= 250, "{all} of 300\n{}", history.by_second("all"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_wrong_turns_no_window() {
    const WINDOW: u64 = 600;
    let mut set = plan("{ quota: 60, per: 10m }", "mode: strict, reserve: 50%");
    set.clocks = Some([(0, 0), (7_200, -7_200), (0, 7_200)]);
    let cluster = Cluster::start(set).await;
    let history = History::default();
    let ask = Ask::new("all", "api", &[("tenant", "7")]);
    let length = WINDOW * 1_000;
    if length - unix_ms() % length < 60_000 {
        into_next_window(WINDOW, 0).await;
    }
    let load = Steady::start(&ask, &cluster.apis(), &[20, 20, 20], &history);
    let leader = cluster.agreed_leader(seconds(5), &[0, 1, 2]).await;
    let used_up = || async {
        let admitted = history.admitted("all").len();
        hold(admitted >= 57, || format!("{admitted} of 60: {:?}", history.statuses("all")))
    };
    eventually("the quota is used up", seconds(30), used_up).await;
    // The leader's clock is a day ahead, and Redis' goes back: a window early would be a quota more.
    cluster.daemons[leader].set_clock(86_400);
    tokio::time::sleep(seconds(8)).await;
    cluster.daemons[leader].set_clock(-86_400);
    cluster.redis[leader].set_clock(86_400);
    tokio::time::sleep(seconds(8)).await;
    drop(load);
    let windows = by_window(&history.events(), WINDOW);
    assert!(
        windows.len() == 1 && windows.values().all(|events| events.len() <= 60),
        "{:?}",
        history.statuses("all")
    );
    // Where nothing is left to be lent, every region's denials end with the window.
    let denied: Vec<Event> = history.events().into_iter().filter(|e| e.status == 429).collect();
    for event in denied.iter().rev().take(30) {
        let off = (event.reset_at_ms % length).min(length - event.reset_at_ms % length);
        assert!(off < 5_000, "{off} ms off the end of the window: {event:?}");
    }
}

/// One region, its daemon and its Redis.
async fn region(policies: &str) -> (Redis, Daemon) {
    let redis = Redis::start().await;
    let daemon = Daemon::start(Settings::alone(&redis.url(), policies)).await;
    (redis, daemon)
}

#[tokio::test]
async fn keys_end_with_their_window_and_the_next_one_is_free() {
    let (redis, daemon) = region(&policies("{ quota: 2, per: 6s }", "mode: split")).await;
    let statuses = || async {
        let mut statuses = Vec::new();
        for _ in 0..3 {
            statuses.push(daemon.api().check("api", &[("tenant", "7")], 1).await.status);
        }
        statuses
    };
    into_next_window(6, 700).await;
    assert_eq!(statuses().await, [200, 200, 429]);
    let buckets = || async {
        let keys = redis.keys().await;
        keys.into_iter().filter(|key| key.contains('{')).collect::<Vec<_>>()
    };
    let old = buckets().await;
    assert_eq!(old.len(), 1, "{old:?}");
    let ttl: i64 = redis.cli(&["PTTL", &old[0]]).await.parse().expect("a number");
    assert!((1..=6_000 + 7_000).contains(&ttl), "it goes soon after the window: {ttl} ms");
    into_next_window(6, 700).await;
    assert_eq!(statuses().await, [200, 200, 429], "the next window has its own");
    eventually("the old key is gone", seconds(20), || async {
        let now = buckets().await;
        hold(!now.contains(&old[0]), || format!("{now:?}"))
    })
    .await;
}

#[tokio::test]
async fn answers_say_when_the_window_ends() {
    let (_redis, daemon) = region(&policies("{ quota: 3, per: month }", "mode: strict, wait: 1s")).await;
    let api = daemon.api();
    let first = api.check("api", &[("tenant", "7")], 1).await;
    assert_eq!((first.status, first.remaining()), (200, 2), "{first:?}");
    let left = |answer: &str| answer.parse::<u64>().expect("a number");
    let month = this_month();
    let reset = left(first.must_have("x-ratelimit-reset"));
    assert!(reset.abs_diff(month.1) <= 3, "{reset} of {month:?}");
    assert_eq!(first.must_have("ratelimit-policy"), format!("\"p\";q=3;w={}", month.0));
    assert_eq!(
        api.check("api", &[("tenant", "7")], 4).await.header("retry-after"),
        None,
        "more than the quota"
    );
    // An ask that brought nothing is not repeated at once.
    eventually("what is left can be had", seconds(10), || async {
        let answer = api.check("api", &[("tenant", "7")], 2).await;
        hold(answer.status == 200, || format!("{answer:?}"))
    })
    .await;
    let denied = api.check("api", &[("tenant", "7")], 1).await;
    assert_eq!((denied.status, denied.reason().as_str()), (429, "over_limit"));
    assert!(left(denied.must_have("retry-after")).abs_diff(month.1) <= 3, "{denied:?}");

    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    let answer = grpc.ask(rls_request("api", vec![descriptor(&[("tenant", "7")])])).await.expect("an answer");
    assert_eq!(answer.overall_code(), Code::OverLimit);
    let limit = answer.statuses[0].current_limit.as_ref().expect("a limit");
    assert_eq!((limit.requests_per_unit, limit.unit), (3, Unit::Month.into()));
    let until = answer.statuses[0].duration_until_reset.as_ref().expect("a time");
    assert!(u64::try_from(until.seconds).expect("positive").abs_diff(month.1) <= 3, "{until:?} of {month:?}");
    let bucket = daemon.admin().get("/v1/buckets/p?tenant=7").await.expect("an answer").json();
    assert_eq!(bucket["regions"][0]["level"], 0, "{bucket}");
    assert!(
        bucket["window"]["ends_ms"]
            .as_u64()
            .is_some_and(|end| (end / 1_000 - unix_ms() / 1_000).abs_diff(month.1) <= 3),
        "{bucket}"
    );
}

/// Length of this month, and what is left of it, in seconds: as `date` says it.
fn this_month() -> (u64, u64) {
    let date = |what: &str| {
        let output =
            std::process::Command::new("date").args(["-u", "-d", what, "+%s"]).output().expect("date");
        String::from_utf8_lossy(&output.stdout).trim().parse::<u64>().expect("a number")
    };
    let first = String::from_utf8_lossy(
        &std::process::Command::new("date").args(["-u", "+%Y-%m-01"]).output().expect("date").stdout,
    )
    .trim()
    .to_owned();
    let (start, end) = (date(&first), date(&format!("{first} +1 month")));
    (end - start, end - unix_ms() / 1_000)
}

#[tokio::test]
async fn a_quota_of_nothing_denies_all_and_promises_nothing() {
    for mode in ["strict", "split"] {
        let (_redis, daemon) = region(&policies("{ quota: 0, per: day }", &format!("mode: {mode}"))).await;
        for _ in 0..3 {
            let answer = daemon.api().check("api", &[("tenant", "7")], 1).await;
            assert_eq!((answer.status, answer.remaining()), (429, 0), "{mode}");
            assert_eq!(
                answer.header("retry-after"),
                None,
                "{mode}: there is no window in which it would fit"
            );
            assert_eq!(answer.must_have("x-ratelimit-limit"), "0");
            assert_eq!(answer.must_have("ratelimit"), "\"p\";r=0");
        }
    }
}

#[tokio::test]
async fn a_large_quota_is_exact_and_a_larger_one_refused() {
    let (_redis, daemon) = region(&policies("{ quota: 4294967296, per: year }", "mode: strict")).await;
    let asked = daemon.api().check("api", &[("tenant", "7")], 0).await;
    assert_eq!((asked.status, asked.remaining()), (200, 4_294_967_296));
    let spent = daemon.api().check("api", &[("tenant", "7")], 1).await;
    assert_eq!((spent.status, spent.remaining()), (200, 4_294_967_295));
    let larger = policies("{ quota: 4294967297, per: year }", "mode: strict");
    let refused = daemon.admin().put_yaml("/v1/policies", &larger).await.expect("an answer");
    assert!(refused.status == 422 || refused.status == 400, "{refused:?}");
    assert!(refused.text.contains("4294967296"), "{refused:?}");
}
