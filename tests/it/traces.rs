//! Traces: a real OTLP endpoint, and daemons that send to it.

use crate::support::client::{Grpc, check_body, descriptor, rls_request};
use crate::support::cluster::{Cluster, Plan, REGIONS};
use crate::support::daemon::{Daemon, Settings};
use crate::support::eventually;
use crate::support::hold;
use crate::support::otlp::{Receiver, Span};
use crate::support::redis::Redis;
use std::time::Duration;

const POLICIES: &str = "
policies:
  - { name: p, domain: api, match: [ { key: tenant } ], limit: { rate: 10/s, burst: 100 }, mode: strict, wait: 2s }
";

/// Spans are sent a second after they end.
const ARRIVES_WITHIN: Duration = Duration::from_secs(20);

fn traceparent(trace: u128, sampled: bool) -> String {
    format!("00-{trace:032x}-00f067aa0ba902b7-{:02x}", u8::from(sampled))
}

fn telemetry(receiver: &Receiver, sampling: &str) -> String {
    format!("telemetry: {{ otlp: {}, sampling: {sampling} }}\n", receiver.url())
}

fn one<'s>(spans: &'s [Span], name: &str) -> Result<&'s Span, String> {
    let found: Vec<&Span> = spans.iter().filter(|span| span.name == name).collect();
    hold(!found.is_empty(), || format!("no span `{name}` in {spans:#?}"))?;
    Ok(found[0])
}

/// Every span has its parent in the trace (or the caller's), and lies within the time after its beginning.
fn hangs_together(spans: &[Span]) -> Result<(), String> {
    for span in spans {
        hold(span.start <= span.end, || format!("it ends before it begins: {span:#?}"))?;
        let caller = span.parent == "00f067aa0ba902b7";
        let parent = spans.iter().find(|other| other.id == span.parent);
        hold(caller || parent.is_some(), || format!("{} has no parent in {spans:#?}", span.name))?;
        if let Some(parent) = parent {
            // All clocks are this machine's.
            hold(parent.start <= span.start, || format!("{} begins before {}", span.name, parent.name))?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_for_a_lease_is_one_trace_across_regions() {
    let receiver = Receiver::start().await;
    let plan = Plan { policies: POLICIES.to_owned(), rtt: Duration::from_millis(80), ..Plan::default() };
    // No request is traced by chance: what arrives is what its callers trace.
    let cluster = Cluster::start_with(plan, &telemetry(&receiver, "0")).await;
    let leader = cluster.agreed_leader(Duration::from_secs(20), &[0, 1, 2]).await;
    let follower = (leader + 1) % 3;
    let api = cluster.daemons[follower].api();
    // More than its reserve: it has to wait for a lease. The first such request may find the region without one.
    let mut trace = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128;
    let spans =
        eventually("a request waits, and is traced through both regions", Duration::from_secs(60), || {
            trace += 1;
            let parent = traceparent(trace, true);
            let (api, receiver) = (api.clone(), &receiver);
            let tenant = format!("{trace}");
            async move {
                let body = check_body("api", &[("tenant", tenant.as_str())], 20).to_string();
                let parent = [("traceparent", parent.as_str())];
                let answer = api.request(reqwest::Method::POST, "/v1/check", &body, &parent).await?;
                hold(answer.status == 200, || format!("{} {}", answer.status, answer.text))?;
                let name = format!("{trace:032x}");
                let mut all = Err("nothing has come".to_owned());
                let deadline = tokio::time::Instant::now() + ARRIVES_WITHIN;
                while all.is_err() && tokio::time::Instant::now() < deadline {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    let spans = receiver.trace(&name);
                    all = [
                        "POST /v1/check",
                        "store take",
                        "wait for lease",
                        "propose",
                        "propose for a peer",
                        "commit",
                        "install lease",
                    ]
                    .iter()
                    .try_for_each(|name| one(&spans, name).map(drop))
                    .map(|()| spans);
                }
                all
            }
        })
        .await;
    hangs_together(&spans).expect("one tree");
    let name = |span: &Span| span.name.clone();
    let (here, there) = (REGIONS[follower], REGIONS[leader]);
    for (span, region) in [
        ("POST /v1/check", here),
        ("store take", here),
        ("wait for lease", here),
        ("propose", here),
        ("propose for a peer", there),
        ("commit", there),
        ("install lease", here),
    ] {
        let span = one(&spans, span).expect("it is there");
        assert_eq!(span.region(), region, "{}", name(span));
        assert_eq!(span.resource["service.name"], "quorate");
        assert_eq!(span.resource["quorate.cluster"], "test");
    }
    let root = one(&spans, "POST /v1/check").expect("it is there");
    assert_eq!(root.parent, "00f067aa0ba902b7", "the caller's");
    assert_eq!((root.says("policy"), root.says("allowed"), root.says("domain")), ("p", "true", "api"));
    assert_eq!(one(&spans, "wait for lease").expect("it is there").says("outcome"), "granted");
    assert_eq!(one(&spans, "propose for a peer").expect("it is there").says("peer"), here);
    let parent_of = |name: &str| {
        let span = one(&spans, name).expect("it is there");
        spans
            .iter()
            .find(|other| other.id == span.parent)
            .map(|parent| parent.name.clone())
            .unwrap_or_default()
    };
    assert_eq!(parent_of("propose for a peer"), "propose");
    assert_eq!(parent_of("commit"), "propose for a peer");
    assert_eq!(parent_of("install lease"), "propose");
    let others = receiver.spans().into_iter().filter(|span| !span.trace.starts_with("4bf92f35")).count();
    assert_eq!(others, 0, "nothing is traced by chance");
}

#[tokio::test]
async fn callers_decide_and_else_the_sampling() {
    let receiver = Receiver::start().await;
    let redis = Redis::start().await;
    let policies = POLICIES.replace("strict, wait: 2s", "split");
    let mut settings = Settings::alone(&redis.url(), &policies);
    settings.more = telemetry(&receiver, "1");
    let mut daemon = Daemon::start(settings).await;
    let ask = |parent: Option<String>| {
        let (api, body) = (daemon.api(), check_body("api", &[("tenant", "hunter2")], 1).to_string());
        async move {
            let headers: Vec<_> =
                parent.as_deref().map(|parent| ("traceparent", parent)).into_iter().collect();
            api.request(reqwest::Method::POST, "/v1/check", &body, &headers).await.expect("an answer")
        }
    };
    let traces: Vec<u128> = (1..=20).map(|n| 0xabcd_0000_0000_0000_0000_0000_0000_0000 + n).collect();
    for trace in &traces {
        ask(Some(traceparent(*trace, trace % 2 == 0))).await;
    }
    for _ in 0..10 {
        ask(None).await;
    }
    let mut grpc = Grpc::connect(&daemon.grpc_url()).await;
    grpc.ask(rls_request("api", vec![descriptor(&[("tenant", "hunter2")])])).await.expect("an answer");
    // Whatever still waits to be sent is sent when the daemon drains: nobody waits for a second here.
    assert!(daemon.stop().await.success());
    let spans = receiver.spans();
    for trace in &traces {
        let found = spans.iter().filter(|span| span.trace == format!("{trace:032x}")).count();
        assert_eq!(found > 0, trace % 2 == 0, "{trace:x}: its caller says whether it is traced");
    }
    let by_chance = |name: &str| spans.iter().filter(|s| s.name == name && s.parent.is_empty()).count();
    assert_eq!(by_chance("POST /v1/check"), 10, "all whose caller says nothing");
    assert_eq!(by_chance("envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"), 1);
    let takes = spans.iter().filter(|span| span.name == "store take").count();
    assert_eq!(takes, 21, "one trip to the store each");
    assert!(!format!("{spans:?}").contains("hunter2"), "no values of descriptors");
}

#[tokio::test]
async fn a_receiver_that_is_gone_costs_one_line_and_no_request() {
    let mut receiver = Receiver::down();
    let policies = POLICIES.replace("strict, wait: 2s", "split");
    let mut settings = Settings::alone("", &policies);
    settings.redis = None;
    settings.more = telemetry(&receiver, "1");
    settings.env = vec![("QUORATE_LOG".to_owned(), "info".to_owned())];
    let mut daemon = Daemon::start(settings).await;
    // More than the queue holds, so that some have to be lost.
    for _ in 0..15 {
        let many = (0..200).map(|_| {
            let api = daemon.api();
            async move { api.check("api", &[("tenant", "7")], 1).await.status }
        });
        let statuses = futures::future::join_all(many).await;
        assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    }
    let lost = |metrics: &str| {
        let line =
            metrics.lines().find(|line| line.starts_with("quorate_spans_total{") && line.contains("lost"));
        line.and_then(|line| line.rsplit_once(' ')).map_or(0.0, |(_, n)| n.parse::<f64>().expect("a number"))
    };
    eventually("the losses are counted", ARRIVES_WITHIN, || async {
        let metrics = daemon.admin().get("/metrics").await?.text;
        hold(lost(&metrics) >= 512.0, || format!("{} lost", lost(&metrics)))
    })
    .await;
    let said = daemon.log().matches("traces cannot be sent").count();
    assert_eq!(said, 1, "{}", daemon.log());
    receiver.up().await;
    eventually("it is sent to again", Duration::from_secs(30), || async {
        daemon.api().check("api", &[("tenant", "7")], 1).await;
        let log = daemon.log();
        let again = !receiver.spans().is_empty() && log.contains("traces are sent again");
        hold(again, || format!("nothing has arrived, or nothing says so\n{log}"))
    })
    .await;
    let lines = daemon.log().lines().count();
    assert!(lines < 40, "{lines} lines:\n{}", daemon.log());
    drop(receiver);
    let began = tokio::time::Instant::now();
    assert!(daemon.stop().await.success());
    assert!(began.elapsed() < Duration::from_secs(15), "it does not wait for a receiver that is gone");
}
