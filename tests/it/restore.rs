//! A majority of the regions is lost for good: the pool goes on from what one of them knew, and no limit is broken by it.

use crate::support::client::Api;
use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::daemon::quorate;
use crate::support::load::{Ask, History, Steady, unix_ms};
use crate::support::meter::Bound;
use crate::support::{eventually, hold};
use std::path::Path;
use std::time::{Duration, Instant};

const MINUTE_MS: u64 = 60_000;
const POLICIES: &str = "
policies:
  - { name: strict, domain: strict, match: [ { key: tenant } ], limit: { rate: 30/s, burst: 60 }, mode: strict, reserve: 20% }
  - { name: split, domain: split, match: [ { key: tenant } ], limit: { rate: 30/s, burst: 60 }, mode: split }
  - { name: year, domain: year, match: [ { key: tenant } ], limit: { quota: 300, per: year }, mode: strict, reserve: 60% }
  - { name: minute, domain: minute, match: [ { key: tenant } ], limit: { quota: 300, per: 1m }, mode: strict, reserve: 10% }
";
const NAMES: [&str; 4] = ["strict", "split", "year", "minute"];

fn load(regions: &[Api], history: &History) -> Vec<Steady> {
    let start = |name| {
        Steady::start(&Ask::new(name, name, &[("tenant", "7")]), regions, &vec![5; regions.len()], history)
    };
    NAMES.into_iter().map(start).collect()
}

async fn admitted_since(history: &History, name: &str, from: Instant, least: usize) {
    eventually(&format!("{name}: {least} admitted"), Duration::from_secs(120), || async {
        let admitted = history.count(name, None, 200, from, Instant::now());
        hold(admitted >= least, || format!("{admitted}; by second:\n{}", history.by_second(name)))
    })
    .await;
}

async fn snapshot(args: &[&str]) -> (Option<i32>, String) {
    let all: Vec<&str> = ["snapshot"].iter().chain(args).copied().collect();
    let output = quorate(&all).await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let text = format!("{}{}", text(&output.stdout), text(&output.stderr));
    println!("quorate {all:?}: {:?}\n{text}", output.status.code());
    (output.status.code(), text)
}

/// How many were admitted in each calendar minute, by when their answer came.
fn by_minute(history: &History, since: Instant, since_ms: u64) -> Vec<(u64, usize)> {
    let mut minutes = std::collections::BTreeMap::<u64, usize>::new();
    for admitted in history.admitted("minute") {
        // In what minute it was admitted for certain: it was sent and answered in the same.
        let ms = |at: Instant| since_ms + u64::try_from((at - since).as_millis()).unwrap();
        let (sent, answered) = (ms(admitted.sent), ms(admitted.answered));
        // Regions go by the cluster's time of day, which is theirs but for half a second.
        if (sent + 1_000) / MINUTE_MS == (answered - 1_000) / MINUTE_MS
            || sent / MINUTE_MS == answered / MINUTE_MS
        {
            let clear = sent % MINUTE_MS > 1_000 && answered % MINUTE_MS < MINUTE_MS - 1_000;
            if clear {
                *minutes.entry(sent / MINUTE_MS).or_default() += 1;
            }
        }
    }
    minutes.into_iter().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_lost_its_majority_goes_on_from_a_copy() {
    let (began, began_ms) = (Instant::now(), unix_ms());
    let plan = Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(80), ..Plan::default() };
    let mut cluster = Cluster::start(plan).await;
    let history = History::default();
    let running = load(&cluster.apis(), &history);
    admitted_since(&history, "year", began, 40).await;
    admitted_since(&history, "strict", began, 60).await;

    // A copy that will be too old ...
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pool.save").display().to_string();
    let (code, told) = snapshot(&["save", &file, "--admin", &cluster.daemons[2].admin().url()]).await;
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("cluster test (ap-south, eu-west, us-east) as us-east knew it"), "{told}");
    // ... as more of the quota is spent, and leases are lent, after it was made.
    admitted_since(&history, "year", Instant::now(), 10).await;
    let spent = history.admitted("year").len();

    // Two disks are lost, all at once; the third region goes on with what it holds until it is stopped.
    for lost in [0, 1] {
        cluster.daemons[lost].kill();
        std::fs::remove_dir_all(cluster.daemons[lost].data_dir()).expect("the disk is gone");
    }
    cluster.daemons[2].stop().await;
    let kept = cluster.daemons[2].data_dir();
    std::fs::rename(&kept, kept.with_file_name("former")).expect("it is moved away");

    let config = |i: usize, cluster: &Cluster| cluster.daemons[i].config_file().display().to_string();
    let (code, told) = snapshot(&["restore", &file, "--config", &config(0, &cluster)]).await;
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("--presume-stopped") && !cluster.daemons[0].data_dir().exists(), "{told}");
    for (i, region) in REGIONS.iter().enumerate() {
        let args = ["restore", &file, "--config", &config(i, &cluster), "--presume-stopped"];
        let (code, told) = snapshot(&args).await;
        assert_eq!(code, Some(0), "{told}");
        assert!(told.contains(&format!("{region} is node {} of a new cluster", 512 + i)), "{told}");
        let (code, told) = snapshot(&args).await;
        assert_eq!(code, Some(1), "{told}");
        assert!(told.contains("it is not empty"), "{told}");
    }
    let restored = Instant::now();
    for daemon in &mut cluster.daemons {
        daemon.spawn();
    }
    for daemon in &mut cluster.daemons {
        daemon.ready().await;
    }
    cluster.agreed_leader(Duration::from_secs(30), &[0, 1, 2]).await;
    admitted_since(&history, "strict", restored, 100).await;
    admitted_since(&history, "split", restored, 50).await;
    // The next minute's quota is there again, and nothing of the year's.
    admitted_since(&history, "minute", restored, 20).await;
    drop(running);
    for name in ["strict", "split"] {
        Bound::per_second(30, 60).must_hold(&history.admitted(name));
    }
    let year = history.admitted("year").len();
    assert!(year >= spent && year <= 300, "{year} of 300; {spent} before");
    let after = history.count("year", None, 200, restored, Instant::now());
    assert_eq!(after, 0, "nobody knows what was spent after the copy was made");
    for (minute, admitted) in by_minute(&history, began, began_ms) {
        assert!(admitted <= 300, "{admitted} in minute {minute}");
    }

    // Somebody starts a daemon on what it had before: the new cluster has no place for it.
    let last = &mut cluster.daemons[2];
    last.kill();
    std::fs::rename(&kept, kept.with_file_name("newer")).expect("the newer disk is out");
    std::fs::rename(kept.with_file_name("former"), &kept).expect("the older disk is in");
    last.spawn();
    let admin = last.admin();
    eventually("it hears that it is nobody", Duration::from_secs(60), || async {
        let answer = admin.get("/readyz").await?;
        let gone = "region `us-east` has been removed from the cluster";
        hold(answer.status == 503 && answer.text.contains(gone), || answer.text)
    })
    .await;
}

#[tokio::test]
async fn what_is_no_copy_or_another_clusters_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("no.save");
    std::fs::write(&file, b"QRSAVE\x01 but no more than that").expect("a file");
    let (code, told) = snapshot(&["show", &file.display().to_string()]).await;
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("no.save: it is "), "{told}");
    assert!(Path::new(&file).exists());
    let (code, told) =
        snapshot(&["save", &file.display().to_string(), "--admin", "http://127.0.0.1:1"]).await;
    assert_eq!(code, Some(2), "{told}");
}
