//! Two regions and a witness, which votes and serves nobody: what a cut leaves to whom.

use crate::support::client::Api;
use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::daemon::{quorate, quorate_within};
use crate::support::load::{self, Ask, History, Steady};
use crate::support::meter::Bound;
use crate::support::{eventually, hold};
use std::time::Duration;

const POLICIES: &str = "
policies:
  - { name: strict, domain: api, match: [ { key: tenant } ], limit: { rate: 12/s, burst: 24 }, mode: strict, reserve: 20% }
";
const WITNESS: usize = 2;
/// A lease is over, and what comes of it is measured, within this.
const LEASES_END: Duration = Duration::from_secs(90);

async fn cluster() -> Cluster {
    let plan = Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(80), ..Plan::default() };
    Cluster::start_among(plan, "", &[REGIONS[WITNESS]]).await
}

/// Waits until a region admits between `low` and `high` in five seconds.
async fn admits(history: &History, region: usize, low: usize, high: usize) {
    let over = Duration::from_secs(5);
    load::admits(history, "all", region, (low..=high, over), LEASES_END).await;
}

async fn printed(args: &[&str]) -> String {
    let output = quorate_within(args, Duration::from_secs(60)).await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_a_witness_either_of_two_regions_may_be_cut_off() {
    let cluster = cluster().await;
    let history = History::default();
    let serving: Vec<Api> = cluster.apis()[..WITNESS].to_vec();
    let load = Steady::start(&Ask::new("all", "api", &[("tenant", "7")]), &serving, &[8, 8], &history);
    // The limit is cut for two.
    admits(&history, 0, 20, 40).await;
    admits(&history, 1, 20, 40).await;

    for cut in 0..WITNESS {
        let other = 1 - cut;
        load.set(other, 20);
        cluster.cut_off(cut);
        // Once the other's lease is over: all but its reserve of 1.2/s.
        admits(&history, other, 45, 60).await;
        admits(&history, cut, 3, 9).await;
        cluster.heal(cut);
        cluster.agreed_leader(Duration::from_secs(30), &[0, 1, 2]).await;
        load.set(other, 8);
        admits(&history, cut, 20, 40).await;
    }

    // It may lead: then its clock is what leases end by.
    let via = cluster.daemons[0].admin().url();
    printed(&["region", "transfer-leader", REGIONS[WITNESS], "--admin", &via]).await;
    cluster.cut_off(0);
    admits(&history, 1, 35, 60).await;
    let led = cluster.daemons[WITNESS].leader().await;
    assert_eq!(led.as_deref(), Ok(REGIONS[WITNESS]), "it has led all the while");
    cluster.heal(0);
    drop(load);
    Bound::per_second(12, 24).must_hold(&history.admitted("all"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_witness_says_what_it_is_and_serves_nobody() {
    let cluster = cluster().await;
    let witness = &cluster.daemons[WITNESS];
    let ready = witness.admin().get("/readyz").await.expect("an answer");
    assert_eq!((ready.status, ready.json()["witness"].as_bool()), (200, Some(true)), "{}", ready.text);
    let other = cluster.daemons[0].admin().get("/readyz").await.expect("an answer");
    assert!(!other.text.contains("witness"), "{}", other.text);
    assert!(witness.api().get("/v1/check").await.is_err(), "nobody listens there");

    let via = cluster.daemons[0].admin().url();
    let status = printed(&["status", "--admin", &via]).await;
    assert!(status.contains("voters ap-south, eu-west, us-east (witness)"), "{status}");
    assert!(!status.contains("passes   us-east"), "{status}");
    let its = printed(&["status", "--admin", &witness.admin().url()]).await;
    assert!(its.contains("region   us-east (witness) of test") && its.contains("store    none"), "{its}");
    let top = printed(&["top", "--admin", &via, "--count", "1"]).await;
    assert!(top.contains("2 regions") && !top.contains(REGIONS[WITNESS]), "{top}");
    let listed = printed(&["region", "list", "--admin", &via]).await;
    assert!(
        listed.lines().any(|l| l.starts_with("us-east") && l.contains("voter") && l.contains(", witness")),
        "{listed}"
    );
    let state = cluster.daemons[0].state().await.expect("a state");
    assert_eq!(state["regions"]["us-east"]["witness"].as_bool(), Some(true));
    let parts = state["policies"][0]["parts"].as_array().expect("parts");
    assert_eq!(
        parts.iter().map(|p| p["region"].as_str().unwrap()).collect::<Vec<_>>(),
        ["ap-south", "eu-west"]
    );

    // A policy is settled without its word, and may not give it a weight.
    let weighted = POLICIES.replace("reserve: 20%", "weights: { us-east: 1 }");
    let refused = cluster.daemons[0].admin().put_yaml("/v1/policies", &weighted).await.expect("an answer");
    assert_eq!(refused.status, 400, "{}", refused.text);
    let put = cluster.daemons[0].admin().put_yaml("/v1/policies", &POLICIES.replace("12/s", "10/s")).await;
    assert_eq!(put.expect("an answer").status, 200);
    eventually("the change is settled", Duration::from_secs(40), || async {
        let state = cluster.daemons[0].state().await?;
        hold(state["policies_settled"].as_bool() == Some(true), || "not yet".into())
    })
    .await;

    // What is for callers has no place in its file.
    let file = witness.config_file();
    let text = std::fs::read_to_string(&file).expect("its file");
    let wrong = file.with_file_name("wrong.yaml");
    std::fs::write(&wrong, text + "store:\n  embedded: {}\n").expect("a file");
    let output = quorate(&["validate", &wrong.display().to_string()]).await;
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(why.contains("`store` is there, and this region is one of `cluster.witnesses`"), "{why}");
}
