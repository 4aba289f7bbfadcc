//! Regions come into a running cluster and leave it: what they may spend, who votes, and the bound throughout.

use crate::support::client::Api;
use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::daemon::quorate_within;
use crate::support::load::{self, Ask, History, Steady};
use crate::support::meter::Bound;
use crate::support::{eventually, hold};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(10);
/// For a command that waits for a change to be through: acknowledgements, a lease, and a busy machine.
const CHANGE_WITHIN: Duration = Duration::from_secs(90);

const POLICIES: &str = "
policies:
  - { name: strict, domain: strict, match: [ { key: tenant } ], limit: { rate: 60/s, burst: 60 }, mode: strict, reserve: 20% }
  - { name: split, domain: split, match: [ { key: tenant } ], limit: { rate: 60/s, burst: 60 }, mode: split }
";

fn plan() -> Plan {
    Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(80), ..Plan::default() }
}

/// Thirty requests a second of either policy in each of these regions.
fn load(regions: &[Api], history: &History) -> [Steady; 2] {
    ["strict", "split"].map(|name| {
        Steady::start(&Ask::new(name, name, &[("tenant", "7")]), regions, &vec![30; regions.len()], history)
    })
}

/// Waits until a region admits between `low` and `high` a second, seen over two seconds.
async fn admits(history: &History, name: &str, region: usize, low: usize, high: usize, within: Duration) {
    let over = Duration::from_secs(2);
    load::admits(history, name, region, (2 * low..=2 * high, over), within).await;
}

/// Runs `quorate region`, which must do what it is asked for, and returns what it printed.
async fn region(admin: &Api, args: &[&str]) -> String {
    let (code, out, err) = try_region(admin, args).await;
    assert_eq!(code, Some(0), "quorate region {args:?}: {out}{err}");
    println!("quorate region {args:?}:\n{out}{err}");
    out
}

async fn try_region(admin: &Api, args: &[&str]) -> (Option<i32>, String, String) {
    let url = admin.url();
    let all: Vec<&str> = ["region"].iter().chain(args).copied().chain(["--admin", &url]).collect();
    let output = quorate_within(&all, CHANGE_WITHIN).await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

async fn not_ready_because(admin: &Api, why: &str) {
    eventually(&format!("not ready: {why}"), Duration::from_secs(20), || async {
        let answer = admin.get("/readyz").await?;
        hold(answer.status == 503 && answer.text.contains(why), || {
            format!("{} {}", answer.status, answer.text)
        })
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fourth_region_joins_under_load_gets_its_share_and_leaves() {
    let mut cluster = Cluster::start(plan()).await;
    let history = History::default();
    let founders_load = load(&cluster.apis(), &history);
    let via = cluster.daemons[1].admin();
    admits(&history, "split", 0, 18, 21, Duration::from_secs(20)).await;

    // It waits to be let in, says so, and lets nobody through.
    let new = cluster.newcomer("ca-west").await;
    cluster.daemons[new].spawn();
    let (admin, api) = (cluster.daemons[new].admin(), cluster.daemons[new].api());
    not_ready_because(&admin, "region `ca-west` is not a member yet: run `quorate region add ca-west").await;
    assert!(api.get("/v1/check").await.is_err(), "nobody listens there yet");

    let url = cluster.daemons[new].peer_url();
    let told = region(&via, &["add", "ca-west", "--url", &url]).await;
    for line in ["follows the log as node 4", "ca-west votes", "ca-west is in"] {
        assert!(told.contains(line), "{told}");
    }
    cluster.daemons[new].ready().await;
    let all: Vec<Api> = cluster.apis();
    // (History counts regions of one list: the newcomer is its fourth.)
    let rates = [0, 0, 0, 30];
    let newcomers_load = ["strict", "split"]
        .map(|name| Steady::start(&Ask::new(name, name, &[("tenant", "7")]), &all, &rates, &history));
    admits(&history, "split", new, 13, 16, 2 * LEASE).await;
    admits(&history, "split", 0, 13, 16, 2 * LEASE).await;
    admits(&history, "strict", new, 12, 22, 2 * LEASE).await;

    let listed = region(&via, &["list"]).await;
    assert_eq!(
        listed.lines().filter(|l| l.contains("voter") && l.contains(" reachable")).count(),
        4,
        "{listed}"
    );
    // Once more changes nothing.
    region(&via, &["add", "ca-west", "--url", &url]).await;
    region(&via, &["transfer-leader", "ca-west"]).await;
    let leads = || async { hold(cluster.daemons[0].leader().await? == "ca-west", || "not yet".into()) };
    eventually("the newcomer leads", Duration::from_secs(10), leads).await;

    // It leads, and leaves all the same.
    let told = region(&via, &["remove", "ca-west"]).await;
    assert!(told.contains("ca-west is removed"), "{told}");
    admits(&history, "split", 0, 18, 21, 2 * LEASE).await;
    not_ready_because(&admin, "region `ca-west` has been removed from the cluster").await;
    let denied = api.check("split", &[("tenant", "8")], 1).await;
    assert!(denied.status >= 429, "{} {}", denied.status, denied.text);
    let status = quorate_within(&["status", "--admin", &via.url()], CHANGE_WITHIN).await;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains("voters ap-south, eu-west, us-east\n"), "{status}");
    drop((founders_load, newcomers_load));
    for name in ["strict", "split"] {
        Bound::per_second(60, 60).must_hold(&history.admitted(name));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_region_is_removed_and_comes_back_without_its_disk() {
    let mut cluster = Cluster::start(plan()).await;
    let history = History::default();
    let steady = load(&cluster.apis(), &history);
    let via = cluster.daemons[0].admin();
    admits(&history, "split", 0, 18, 21, Duration::from_secs(20)).await;
    let lost = 2;
    cluster.daemons[lost].kill();
    let data = cluster.daemons[lost].data_dir();
    let former = data.with_file_name("former");
    std::fs::rename(&data, &former).expect("its disk is gone");

    // Of the other two, none could go: what is left would be no majority.
    let missed = || async {
        let listed = via.get("/v1/regions").await?.text;
        hold(listed.contains(r#""reachable":false"#), || listed)
    };
    eventually("it is missed", Duration::from_secs(20), missed).await;
    let (code, _, why) = try_region(&via, &["remove", REGIONS[1]]).await;
    assert_eq!(code, Some(1), "{why}");
    assert!(why.contains("it would lose quorum") && why.contains(REGIONS[lost]), "{why}");

    region(&via, &["remove", REGIONS[lost], "--presume-dead"]).await;
    admits(&history, "split", 0, 27, 31, 2 * LEASE).await;
    admits(&history, "split", 1, 27, 31, 2 * LEASE).await;

    let url = cluster.daemons[lost].peer_url();
    cluster.daemons[lost].spawn();
    let told = region(&via, &["add", REGIONS[lost], "--url", &url]).await;
    assert!(told.contains("follows the log as node 4"), "{told}");
    cluster.daemons[lost].ready().await;
    for region in 0..3 {
        admits(&history, "split", region, 18, 21, 2 * LEASE).await;
        admits(&history, "strict", region, 16, 24, 2 * LEASE).await;
    }

    // Somebody finds the old disk, and starts the daemon on it: it is nobody any more.
    cluster.daemons[lost].kill();
    std::fs::rename(&data, data.with_file_name("newer")).expect("the newer disk is out");
    std::fs::rename(&former, &data).expect("the old disk is in");
    cluster.daemons[lost].spawn();
    let why = format!("region `{}` has been removed from the cluster", REGIONS[lost]);
    not_ready_because(&cluster.daemons[lost].admin(), &why).await;
    let api = cluster.daemons[lost].api();
    let lets_nothing_through = || async {
        let answer = api.check("split", &[("tenant", "8")], 1).await;
        hold(answer.status >= 429, || format!("{} {}", answer.status, answer.text))
    };
    eventually("it lets nothing through", Duration::from_secs(5), lets_nothing_through).await;
    drop(steady);
    for name in ["strict", "split"] {
        Bound::per_second(60, 60).must_hold(&history.admitted(name));
    }
}
