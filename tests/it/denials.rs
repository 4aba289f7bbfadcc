//! A bucket that is spent denies from the daemon's memory, and is there again when its tokens are.

use crate::support::daemon::{Daemon, Settings, quorate};
use crate::support::redis::Redis;
use std::time::{Duration, Instant};

const TENANT: [(&str, &str); 1] = [("tenant", "7")];

async fn region(limit: &str) -> (Redis, Daemon) {
    let redis = Redis::start().await;
    let policies = format!(
        "policies:\n  - {{ name: plan, domain: api, match: [ {{ key: tenant }} ], limit: {limit}, mode: split }}\n"
    );
    let daemon = Daemon::start(Settings::alone(&redis.url(), &policies)).await;
    (redis, daemon)
}

/// How many scripts this Redis has run.
async fn scripts(redis: &Redis) -> u64 {
    let stats = redis.cli(&["INFO", "commandstats"]).await;
    let calls = stats.lines().filter_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    calls.filter_map(|rest| rest.split(',').next()?.parse::<u64>().ok()).sum()
}

async fn from_memory(daemon: &Daemon) -> u64 {
    let metrics = daemon.admin().get("/metrics").await.expect("metrics").text;
    let line = metrics.lines().find(|line| line.starts_with("quorate_denials_from_memory_total"));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spent_bucket_costs_redis_few_calls_and_lets_each_token_through_on_time() {
    let (redis, daemon) = region("{ rate: 4/s, burst: 20 }").await;
    let api = daemon.api();
    let (before, began) = (scripts(&redis).await, Instant::now());
    let (mut asked, mut admitted) = (0_u64, Vec::new());
    while began.elapsed() < Duration::from_secs(6) {
        let answer = api.check("api", &TENANT, 1).await;
        assert!([200, 429].contains(&answer.status), "{answer:?}");
        asked += 1;
        if answer.status == 200 {
            admitted.push(began.elapsed());
        }
    }
    let (time, calls) = (began.elapsed(), scripts(&redis).await - before);
    let remembered = from_memory(&daemon).await;
    // A region uses its rate less 1%. The first token may have come with the first request, the last may not be there yet.
    let most = 20 + usize::try_from(time.as_micros() * 396 / 100_000_000).expect("few");
    let all = admitted.len();
    assert!((most - 1..=most).contains(&all), "{all} of {most} in {time:?}");
    // Ten a second; of each token the one that it goes to and a few that come just before; and heartbeats.
    let many = 8 * u64::try_from(all).expect("few") + 20 * time.as_secs() + 20;
    assert!(
        calls <= many,
        "{calls} calls of {asked} requests, {remembered} from memory; {all} were admitted"
    );
    assert!(remembered <= asked && asked - remembered <= calls, "{asked}, {remembered}, {calls}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_back_is_there_at_once() {
    let (_redis, daemon) = region("{ rate: 1/d, burst: 10 }").await;
    let (api, admin) = (daemon.api(), daemon.admin().url());
    assert_eq!(api.check("api", &TENANT, 10).await.status, 200);
    for _ in 0..10 {
        let remembered = from_memory(&daemon).await;
        while from_memory(&daemon).await == remembered {
            assert_eq!(api.check("api", &TENANT, 1).await.status, 429);
        }
        assert_eq!(api.check("api", &TENANT, -1).await.status, 200);
        assert_eq!(api.check("api", &TENANT, 1).await.status, 200, "it was given back");
    }
    for number in 1..=3 {
        let args = ["bucket", "reset", "--admin", &admin, "--policy", "plan", "--reason", "test", "tenant=7"];
        let reset = async { quorate(&args).await };
        let asking = async {
            // Once the region says that it is done, nobody is denied.
            loop {
                let done = daemon.log().matches("an operator has reset a bucket").count() == number;
                let answer = api.check("api", &TENANT, 10).await;
                assert!(!done || answer.status == 200, "{number}: {answer:?}");
                if answer.status == 200 {
                    break;
                }
            }
        };
        let (output, ()) = tokio::join!(reset, asking);
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
