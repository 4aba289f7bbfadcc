use super::*;
use crate::quota::policy::{Policy, Reserve};
use crate::quota::verdict::LimitVerdict;

const REPORTED: [&str; 21] = [
    COMMITTED.name,
    FROZEN.name,
    BOUND.name,
    BOUND_RATE.name,
    OVERDRAFT.name,
    OVERDRAFT_BOUND.name,
    HOT.name,
    STORE_KEYS.name,
    STORE_MEMORY.name,
    REDIS_KEYS.name,
    REDIS_MEMORY.name,
    REDIS_MEMORY_MAX.name,
    REDIS_EVICTED.name,
    POOL_BUCKETS.name,
    POOL_TOKENS.name,
    POOL_RATE.name,
    POOL_LEVEL.name,
    RAFT_FOLLOWER_LAG.name,
    RAFT_QUORUM_AGE.name,
    PEER_REACHABLE.name,
    PEER_RTT.name,
];

#[test]
fn every_metric_is_in_the_text() {
    let metrics = Metrics::new("us-east");
    // Families are not in the text before something has been counted.
    metrics.unmatched("d");
    let _ = metrics.policy("p", Mode::Strict);
    let text = metrics.encode().unwrap();
    for described in TABLE {
        let known = text.contains(&format!("# HELP {}", described.name));
        // What others report is not there before they have.
        assert!(known || REPORTED.contains(&described.name), "{}", described.name);
    }
    assert!(text.ends_with("# EOF\n"));
    assert!(text.contains("quorate_raft_term{region=\"us-east\"} 0"), "{text}");
}

#[test]
fn decisions_are_counted_by_reason() {
    let policy = Policy {
        name: "p".into(),
        domain: "d".into(),
        matches: Vec::new(),
        limit: crate::quota::policy::Limit::Unlimited,
        mode: Mode::Split,
        reserve: Reserve::default(),
        weights: std::collections::BTreeMap::new(),
        wait: crate::quota::amount::Micros::ZERO,
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    };
    let metrics = Metrics::new("r");
    let counters = metrics.policy("p", Mode::Split);
    let ok = LimitVerdict::unlimited((&policy).into(), 0);
    counters.count(&ok, Tokens::whole(3));
    counters
        .count(&LimitVerdict { allowed: false, reason: Reason::OverLimit, ..ok.clone() }, Tokens::whole(2));
    counters.count(&LimitVerdict { allowed: false, reason: Reason::OverLimit, ..ok }, Tokens(500_000));
    assert_eq!((counters.admitted(), counters.denied()), (1, 2));
    let line = "quorate_decisions_total{region=\"r\",policy=\"p\",mode=\"split\",result=\"denied\",reason=\"over_limit\"} 2";
    let text = metrics.encode().unwrap();
    assert!(text.contains(line), "{text}");
    let cost = |result, tokens| {
        format!(
            "quorate_cost_tokens_total{{region=\"r\",policy=\"p\",mode=\"split\",result=\"{result}\"}} {tokens}"
        )
    };
    assert!(text.contains(&cost("allowed", "3.0")) && text.contains(&cost("denied", "2.5")), "{text}");
    metrics.forget_policy("p", Mode::Split);
    assert!(!metrics.encode().unwrap().contains("policy=\"p\""));
}

#[test]
fn callers_cannot_grow_the_registry() {
    let metrics = Metrics::new("r");
    for i in 0..10_000 {
        metrics.unmatched(&format!("domain-{i}"));
    }
    let text = metrics.encode().unwrap();
    assert_eq!(text.matches("quorate_unmatched_total{").count(), DOMAINS_MAX + 1);
    assert!(text.contains("domain=\"other\"} 9900"));
}

#[test]
fn latencies_fall_into_their_buckets() {
    let metrics = Metrics::new("r");
    for us in [50, 100, 101, 30_000, 5_000_000] {
        metrics.decided(Protocol::Grpc, Answered::Denied, Duration::from_micros(us));
    }
    let text = metrics.encode().unwrap();
    for line in [
        "quorate_decision_seconds_bucket{region=\"r\",le=\"0.0001\",protocol=\"grpc\",result=\"denied\"} 2",
        "quorate_decision_seconds_bucket{region=\"r\",le=\"0.00025\",protocol=\"grpc\",result=\"denied\"} 3",
        "quorate_decision_seconds_bucket{region=\"r\",le=\"0.05\",protocol=\"grpc\",result=\"denied\"} 4",
        "quorate_decision_seconds_bucket{region=\"r\",le=\"+Inf\",protocol=\"grpc\",result=\"denied\"} 5",
        "quorate_decision_seconds_count{region=\"r\",protocol=\"grpc\",result=\"denied\"} 5",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}
