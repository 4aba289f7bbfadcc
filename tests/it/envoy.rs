//! A real Envoy in front of one region, with the configuration that users are given (deploy/envoy.yaml).

use crate::support::client::Answer;
use crate::support::daemon::{Daemon, Settings};
use crate::support::envoy::Envoy;
use crate::support::redis::Redis;
use crate::support::{eventually, hold};
use std::time::Duration;

const POLICIES: &str = "
policies:
  - name: tenant-requests
    domain: api
    match: [ { key: tenant } ]
    limit: { rate: 6/m, burst: 10 }
    mode: strict
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_lets_the_limit_through_and_answers_429_with_the_fields() {
    let redis = Redis::start().await;
    let mut daemon = Daemon::start(Settings::alone(&redis.url(), POLICIES)).await;
    let envoy = Envoy::start(daemon.grpc_address()).await;
    // Until Envoy has found the daemon healthy it lets everything through, without our fields.
    eventually("Envoy asks the daemon", Duration::from_secs(15), || async {
        let answer = envoy.api().get_with("/", &[("x-tenant", "warm-up")]).await?;
        hold(answer.header("x-ratelimit-limit").is_some(), || format!("{answer:?}"))
    })
    .await;

    let (mut allowed, mut denied): (Vec<Answer>, Vec<Answer>) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let answer = envoy.api().get_with("/", &[("x-tenant", "42")]).await.expect("an answer");
        if answer.status == 200 { allowed.push(answer) } else { denied.push(answer) }
    }
    assert!((9..=11).contains(&allowed.len()), "{} of a burst of 10 were let through", allowed.len());
    for answer in &allowed {
        assert_eq!(answer.text, "hello\n", "from the service behind Envoy");
        assert_eq!(answer.must_have("x-ratelimit-limit"), "6");
        assert_eq!(answer.header("retry-after"), None);
    }
    for answer in &denied {
        assert_eq!(answer.status, 429);
        assert_eq!(answer.must_have("x-envoy-ratelimited"), "true");
        assert_eq!(answer.must_have("x-ratelimit-limit"), "6");
        assert_eq!(answer.must_have("x-ratelimit-remaining"), "0");
        assert_eq!(answer.must_have("ratelimit-policy"), "\"tenant-requests\";q=6;w=60");
        assert!(answer.must_have("ratelimit").starts_with("\"tenant-requests\";r=0;t="));
        let reset: u64 = answer.must_have("x-ratelimit-reset").parse().expect("whole seconds");
        let retry: u64 = answer.must_have("retry-after").parse().expect("whole seconds");
        assert!((1..=11).contains(&retry) && retry >= reset, "retry after {retry} s, reset {reset} s");
    }

    daemon.kill();
    let answer = envoy.api().get_with("/", &[("x-tenant", "42")]).await.expect("an answer");
    assert_eq!(answer.status, 200, "failure_mode_deny: false, as the example says: no daemon, no limit");
}
