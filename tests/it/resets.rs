//! An operator resets a bucket: everywhere, once, and everyone can read who did it and why.

use crate::support::cluster::{Cluster, Plan};
use crate::support::daemon::{Daemon, Settings, quorate};
use crate::support::load::{Ask, History, flood};
use crate::support::meter::Bound;
use crate::support::redis::Redis;
use crate::support::{eventually, hold};
use serde_json::json;
use std::time::Duration;

const BURST: usize = 60;
const TENANT: [(&str, &str); 1] = [("tenant", "7")];

/// A day's limit: what passes in a test is the burst and what a reset gives, nothing else.
fn policies(mode: &str) -> String {
    format!(
        "policies:\n  - {{ name: plan, domain: api, match: [ {{ key: tenant }} ], limit: {{ rate: 1/d, burst: {BURST} }}, {mode} }}\n"
    )
}

fn seconds(s: u64) -> Duration {
    Duration::from_secs(s)
}

/// Asks all regions in turn until none of them lets anything through any more; how much they did.
async fn spend(cluster: &Cluster, name: &'static str, history: &History) -> usize {
    let ask = Ask::new(name, "api", &TENANT);
    loop {
        let before = history.admitted(name).len();
        for api in cluster.apis() {
            flood(&ask, &[api], 2 * BURST, 4, seconds(1), history).await;
        }
        // What was lent to a region when its turn was over is there for its next.
        let after = history.admitted(name).len();
        if after == before {
            return after;
        }
    }
}

/// `quorate bucket reset` through this region's admin listener.
async fn reset(daemon: &Daemon, reason: &str) -> (Option<i32>, String, String) {
    let admin = daemon.admin().url();
    let args = ["bucket", "reset", "--admin", &admin, "--policy", "plan", "--reason", reason, "tenant=7"];
    let output = quorate(&args).await;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Every region has written down who did it and why.
async fn logged(daemons: &[&Daemon], reason: &str) {
    for daemon in daemons {
        eventually("the reset is in the log", seconds(15), || async {
            let log = daemon.log();
            let line =
                log.lines().find(|l| l.contains("an operator has reset a bucket") && l.contains(reason));
            let line = line.ok_or_else(|| "no line".to_owned())?;
            hold(line.contains("127.0.0.1") && line.contains("plan"), || line.to_owned())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spent_bucket_is_full_again_in_every_region_and_no_more_than_once() {
    for mode in ["mode: strict, wait: 1s", "mode: approximate, max_overshoot: 10%", "mode: split"] {
        let policies = policies(mode);
        let cluster =
            Cluster::start(Plan { policies, rtt: Duration::from_millis(20), ..Plan::default() }).await;
        let history = History::default();
        let most = if mode.contains("approximate") { BURST + BURST / 10 } else { BURST };
        let first = spend(&cluster, "first", &history).await;
        assert!((BURST * 9 / 10..=most).contains(&first), "{mode}: {first} of {BURST}");
        for api in cluster.apis() {
            assert_eq!(api.check("api", &TENANT, 1).await.status, 429, "{mode}: spent everywhere");
        }

        let (code, out, err) = reset(&cluster.daemons[1], "the customer called").await;
        assert_eq!(code, Some(0), "{mode}: {out} {err}");
        assert!(out.contains("of plan was reset (number 1)"), "{out}");
        logged(&cluster.daemons.iter().collect::<Vec<_>>(), "the customer called").await;
        let second = spend(&cluster, "second", &history).await;
        assert!((BURST * 9 / 10..=most).contains(&second), "{mode}: {second} of {BURST} after the reset");
        for api in cluster.apis() {
            assert_eq!(api.check("api", &TENANT, 1).await.status, 429, "{mode}: spent again");
        }
        let other = cluster.apis()[0].check("api", &[("tenant", "8")], 0).await;
        assert_eq!(other.status, 200, "{mode}: others are as they were");
        // One burst, and one more for the reset.
        let mut all = history.admitted("first");
        all.extend(history.admitted("second"));
        let burst = u32::try_from(2 * most).expect("small");
        Bound { amount: 1, per_seconds: 86_400, burst }.must_hold(&all);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_that_is_cut_off_gives_its_part_when_it_hears_of_it() {
    let policies = policies("mode: strict, reserve: 60%, wait: 1s");
    let mut cluster =
        Cluster::start(Plan { policies, rtt: Duration::from_millis(20), ..Plan::default() }).await;
    let history = History::default();
    let first = spend(&cluster, "first", &history).await;
    assert!((BURST * 9 / 10..=BURST).contains(&first), "{first} of {BURST}");
    let leader = cluster.agreed_leader(seconds(10), &[0, 1, 2]).await;
    let alone = (leader + 1) % 3;
    cluster.cut_off(alone);
    let (code, out, err) = reset(&cluster.daemons[leader], "while one is away").await;
    assert_eq!(code, Some(0), "{out} {err}");
    let told: Vec<&Daemon> =
        cluster.daemons.iter().enumerate().filter(|(i, _)| *i != alone).map(|(_, d)| d).collect();
    logged(&told, "while one is away").await;
    for _ in 0..5 {
        assert_eq!(
            cluster.apis()[alone].check("api", &TENANT, 1).await.status,
            429,
            "it has not heard of it"
        );
    }
    // Its daemon starts anew while it is away: it hears of the reset from its log, or from a snapshot.
    cluster.daemons[alone].kill();
    cluster.heal(alone);
    cluster.daemons[alone].spawn();
    cluster.daemons[alone].ready().await;
    logged(&[&cluster.daemons[alone]], "while one is away").await;
    // A second start does not give it again.
    cluster.daemons[alone].kill();
    cluster.daemons[alone].spawn();
    cluster.daemons[alone].ready().await;
    let second = spend(&cluster, "second", &history).await;
    assert!((BURST * 8 / 10..=BURST).contains(&second), "{second} of {BURST} after the reset");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_is_shown_and_what_is_wrong_with_a_reset_is_said() {
    let redis = Redis::start().await;
    let token = "0123456789abcdef";
    let settings = Settings {
        more: format!("admin_token: {token}\n"),
        ..Settings::alone(&redis.url(), &policies("mode: strict"))
    };
    let daemon = Daemon::start(settings).await;
    daemon.api().check("api", &TENANT, 3).await;
    let admin = daemon.admin().url();
    let show = quorate(&["bucket", "show", "--admin", &admin, "--policy", "plan", "tenant=7"]).await;
    let text = String::from_utf8_lossy(&show.stdout).into_owned();
    assert_eq!(show.status.code(), Some(0), "{text}");
    assert!(text.contains("of plan") && text.contains("solo: keeps"), "{text}");

    let (code, _, err) = reset(&daemon, "no token").await;
    assert_eq!(code, Some(2));
    assert!(err.contains("401") && err.contains("Bearer"), "{err}");
    let file = daemon.config_file().with_file_name("token");
    std::fs::write(&file, token).expect("the token is written");
    let file = file.display().to_string();
    let with = |args: &'static [&'static str]| {
        let mut all = vec!["bucket", "reset", "--admin", admin.as_str(), "--token-file", file.as_str()];
        all.extend(args);
        async move { quorate(&all).await }
    };
    for (args, code, says) in [
        (&["--policy", "plan", "tenant=7"][..], 2, "--reason"),
        (&["--policy", "nowhere", "--reason", "r", "tenant=7"], 2, "there is no policy `nowhere`"),
        (&["--policy", "plan", "--reason", "r", "user=7"], 2, "it wants tenant=*"),
        (&["--policy", "plan", "--reason", " ", "tenant=7"], 2, "say why"),
        (&["--policy", "plan", "--reason", "r", "tenant"], 2, "KEY=VALUE"),
    ] {
        let output = with(args).await;
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {err}");
        assert!(err.contains(says), "{args:?}: {err}");
    }
    let output = with(&["--policy", "plan", "--reason", "it is theirs", "--json", "tenant=7"]).await;
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&answer["policy"], &answer["number"]), (&json!("plan"), &json!(1)));
    eventually("it is in the log", seconds(15), || async {
        let log = daemon.log();
        hold(log.contains("127.0.0.1 with the admin token") && log.contains("it is theirs"), || {
            "no line".into()
        })
    })
    .await;
    assert!(!daemon.log().contains(token));
}
