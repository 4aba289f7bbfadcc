//! What answers say.

use super::*;
use crate::quota::policy::{Algorithm, Concurrent, OnStoreFailure, Quota, Reserve, Share, Unit};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn limit(amount: u64, per: Unit, burst: u64) -> TokenBucket {
    TokenBucket { amount, per, burst }
}

fn policy(name: &str, bucket: TokenBucket) -> Policy {
    Policy {
        name: name.into(),
        domain: "api".into(),
        matches: Vec::new(),
        limit: Limit::TokenBucket(bucket),
        mode: Mode::Split,
        reserve: Reserve::default(),
        weights: BTreeMap::new(),
        wait: Micros::ZERO,
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    }
}

/// A bucket at `level` that is asked for `cost`, whole tokens.
fn asked(policy: &Policy, descriptor: usize, cost: i64, level: i64) -> LimitVerdict {
    let Limit::TokenBucket(bucket) = policy.limit else { panic!("a limit") };
    let (cost, level) = (Tokens::whole(cost), Tokens::whole(level));
    let fits = cost <= level;
    let level = if fits { level - cost } else { level };
    let sight = Sight { fits, level, rate: bucket.rate(), cap: bucket.burst() };
    LimitVerdict::seen(policy.into(), descriptor, cost, sight, None, Reason::OverLimit)
}

fn lines(verdict: &Verdict) -> Vec<String> {
    let f = verdict.fields().unwrap();
    let mut lines = vec![
        format!("{}: {}", Fields::POLICY, f.policy),
        format!("{}: {}", Fields::STATE, f.state),
        format!("{}: {}", Fields::X_LIMIT, f.limit),
        format!("{}: {}", Fields::X_REMAINING, f.remaining),
        format!("{}: {}", Fields::X_RESET, f.reset),
    ];
    lines.extend(f.retry_after.map(|s| format!("{}: {s}", Fields::RETRY_AFTER)));
    lines
}

#[test]
fn fields_of_an_allowed_request() {
    let p = policy("tenant-requests", limit(1000, Unit::Second, 2000));
    let mut limit = asked(&p, 0, 1, 42);
    // As in the contract: 230 ms are a second, rounded up.
    limit.reset = Micros::millis(230);
    let verdict = Verdict::new(vec![limit], 1, true);
    assert_eq!(verdict.status(), Status::Allowed);
    assert_eq!(
        lines(&verdict),
        [
            "ratelimit-policy: \"tenant-requests\";q=1000;w=1",
            "ratelimit: \"tenant-requests\";r=41;t=1",
            "x-ratelimit-limit: 1000",
            "x-ratelimit-remaining: 41",
            "x-ratelimit-reset: 1",
        ]
    );
}

#[test]
fn fields_of_a_denied_request() {
    let p = policy("slow", limit(1, Unit::Minute, 10));
    let verdict = Verdict::new(vec![asked(&p, 0, 3, 1)], 1, true);
    assert_eq!(verdict.status().code(), 429);
    assert_eq!(
        lines(&verdict),
        [
            "ratelimit-policy: \"slow\";q=1;w=60",
            "ratelimit: \"slow\";r=1;t=121",
            "x-ratelimit-limit: 1",
            "x-ratelimit-remaining: 1",
            "x-ratelimit-reset: 121",
            "retry-after: 121",
        ],
        "1/m is 16,666 micro-tokens a second, rounded down: two tokens take a little more than 120 s"
    );
    let soon = policy("fast", limit(1_000_000, Unit::Second, 1_000_000));
    let verdict = Verdict::new(vec![asked(&soon, 0, 2, 1)], 1, true);
    assert_eq!(verdict.fields().unwrap().retry_after, Some(1), "at least a second");
}

#[test]
fn a_quota_comes_back_when_its_window_ends() {
    let per = Window::Calendar(Unit::Month);
    let quota = Limit::Quota(Quota { quota: 5, per, algorithm: Algorithm::FixedWindow });
    let plan = Policy { limit: quota, ..policy("plan", limit(1, Unit::Second, 1)) };
    // February 2024, half a second before its end.
    let turn = per.turn_at(Micros::seconds(1_709_164_800));
    let now = turn.end - Micros::millis(500);
    let sight =
        QuotaSight { fits: false, left: Tokens::ZERO, turn, now, lent_after: Some(Micros::millis(250)) };
    let answer = |sight: &QuotaSight, cost| {
        let verdict =
            LimitVerdict::in_window((&plan).into(), 0, Tokens::whole(cost), sight, Reason::OverLimit);
        lines(&Verdict::new(vec![verdict], 1, true))
    };
    let plan_lines = |state: &str, remaining: u32, retry: Option<&str>| {
        let mut lines = vec![
            "ratelimit-policy: \"plan\";q=5;w=2505600".to_owned(),
            format!("ratelimit: \"plan\";r={remaining}{state}"),
            "x-ratelimit-limit: 5".to_owned(),
            format!("x-ratelimit-remaining: {remaining}"),
            format!("x-ratelimit-reset: {}", state.trim_start_matches(";t=").parse().unwrap_or(0)),
        ];
        lines.extend(retry.map(|t| format!("retry-after: {t}")));
        lines
    };
    assert_eq!(answer(&sight, 1), plan_lines(";t=1", 0, Some("1")));
    let early = QuotaSight { now: turn.end - Micros::seconds(86_400), ..sight };
    assert_eq!(answer(&early, 1), plan_lines(";t=86400", 0, Some("86400")));
    let pooled = QuotaSight { left: Tokens::whole(3), ..early };
    assert_eq!(answer(&pooled, 3), plan_lines(";t=1", 3, Some("1")), "the pool has it");
    assert_eq!(answer(&pooled, 4), plan_lines(";t=86400", 3, Some("86400")));
    assert_eq!(answer(&pooled, 6), plan_lines("", 3, None), "more than the quota: never");
    assert_eq!(answer(&QuotaSight { fits: true, ..pooled }, 3), plan_lines(";t=86400", 3, None));
    let over = QuotaSight { left: Tokens::whole(-2), lent_after: None, ..early };
    assert_eq!(answer(&over, 0), plan_lines(";t=86400", 0, Some("86400")), "cut below what is spent");
}

#[test]
fn fields_of_limits_that_count() {
    let bucket = limit(1, Unit::Second, 1);
    let per = Window::Length { seconds: 900 };
    let quota = Quota { quota: 5, per, algorithm: Algorithm::SlidingLog };
    let login = Policy { limit: Limit::Quota(quota), ..policy("login", bucket) };
    let full = Seen {
        fits: false,
        left: 0,
        wait: Some(Micros::millis(899_001)),
        reset: Micros::seconds(899),
        lasts: Micros::ZERO,
    };
    let counted = |policy: &Policy, seen: &Seen| {
        Verdict::new(vec![LimitVerdict::counted(policy.into(), 0, seen, Reason::OverLimit)], 1, true)
    };
    assert_eq!(
        lines(&counted(&login, &full)),
        [
            "ratelimit-policy: \"login\";q=5;w=900",
            "ratelimit: \"login\";r=0;t=900",
            "x-ratelimit-limit: 5",
            "x-ratelimit-remaining: 0",
            "x-ratelimit-reset: 900",
            "retry-after: 900",
        ]
    );
    let never = counted(&login, &Seen { wait: None, ..full }).fields().unwrap();
    assert_eq!((never.retry_after, never.state.as_str()), (None, "\"login\";r=0"));
    let permits = Concurrent { permits: 3, ttl: Micros::seconds(60) };
    let exports = Policy { limit: Limit::Concurrent(permits), ..policy("exports", bucket) };
    let free = Seen { fits: true, left: 2, reset: Micros::seconds(60), ..Seen::default() };
    assert_eq!(
        lines(&counted(&exports, &free))[..2],
        ["ratelimit-policy: \"exports\";q=3;qu=\"concurrent-requests\"", "ratelimit: \"exports\";r=2;t=60"]
    );
    let shadow = counted(&Policy { shadow: true, ..login }, &full);
    assert_eq!((shadow.allowed, shadow.limits[0].reason), (true, Reason::Shadow));
}

#[test]
fn what_never_fits_has_no_time() {
    for (bucket, cost) in [(limit(0, Unit::Hour, 0), 1), (limit(5, Unit::Second, 5), 6)] {
        let p = policy("p", bucket);
        let level = i64::try_from(bucket.burst).unwrap();
        let verdict = Verdict::new(vec![asked(&p, 0, cost, level)], 1, true);
        assert_eq!(verdict.status(), Status::OverLimit);
        assert_eq!(verdict.limits[0].remaining, bucket.burst, "nothing is charged");
        let fields = verdict.fields().unwrap();
        assert_eq!(fields.retry_after, None);
        assert_eq!(fields.state, format!("\"p\";r={level}"));
        assert_eq!(fields.reset, 0);
    }
}

#[test]
fn the_binding_limit() {
    let bucket = limit(1, Unit::Second, 100);
    let p = policy("p", bucket);
    let (little, plenty) = (asked(&p, 0, 1, 5), asked(&p, 0, 1, 50));
    let (short, long) = (asked(&p, 1, 10, 5), asked(&p, 1, 50, 5));
    let never = asked(&p, 1, 101, 100);
    let unlimited = LimitVerdict::unlimited(Terms { limit: None, ..Terms::from(&p) }, 0);
    let mut shadow = asked(&policy("s", limit(1, Unit::Second, 1)), 0, 1, 1);
    shadow.shadow = true;
    let binding = |limits: &[&LimitVerdict]| {
        let forth = Verdict::new(limits.iter().map(|&l| l.clone()).collect(), 2, true);
        let back = Verdict::new(limits.iter().rev().map(|&l| l.clone()).collect(), 2, true);
        assert_eq!(forth.binding(), back.binding());
        forth.binding().unwrap().clone()
    };
    assert_eq!(binding(&[&little, &plenty, &unlimited, &shadow]), little);
    assert_eq!(binding(&[&little, &short, &long]), long);
    assert_eq!(binding(&[&long, &never]), never);
    assert_eq!(binding(&[&unlimited, &shadow]), shadow);
    assert_eq!(Verdict::new(vec![unlimited], 1, true).fields(), None);
}

#[test]
fn descriptors_in_order() {
    let p = policy("p", limit(1, Unit::Second, 10));
    let limits = vec![asked(&p, 2, 1, 9), asked(&p, 0, 1, 0), asked(&p, 2, 1, 3)];
    let verdict = Verdict::new(limits, 4, true);
    assert!(!verdict.allowed);
    let expected = [(false, Some(1)), (true, None), (true, Some(2)), (true, None)];
    let expected = expected.map(|(allowed, limit)| DescriptorVerdict { allowed, limit });
    assert_eq!(verdict.descriptors, expected);

    let unmatched = Verdict::new(Vec::new(), 2, false);
    assert!(!unmatched.allowed);
    assert_eq!(unmatched.status(), Status::OverLimit);
    assert_eq!(unmatched.fields(), None);
}

#[test]
fn an_outage_is_not_a_used_up_quota() {
    let bucket = limit(10, Unit::Second, 10);
    let p = policy("p", bucket);
    let gone = LimitVerdict::unavailable((&p).into(), 0, Tokens::whole(1), false);
    let over = asked(&p, 1, 5, 1);
    let fine = asked(&p, 1, 1, 5);
    let status = |limits: Vec<LimitVerdict>| Verdict::new(limits, 2, true).status();
    assert_eq!(status(vec![gone.clone()]), Status::Unavailable);
    assert_eq!(status(vec![gone.clone(), fine]), Status::Unavailable);
    assert_eq!(status(vec![gone.clone(), over]), Status::OverLimit);
    assert_eq!(Verdict::new(vec![gone.clone()], 2, false).status(), Status::OverLimit);
    assert_eq!(Fields::new(&gone).retry_after, Some(1));

    let never = LimitVerdict::unavailable((&p).into(), 0, Tokens::whole(11), false);
    assert_eq!(Fields::new(&never).retry_after, None);
    let allowed = LimitVerdict::unavailable((&p).into(), 0, Tokens::whole(1), true);
    assert_eq!((allowed.allowed, allowed.reason), (true, Reason::StoreUnavailable));
    let roomy =
        Policy { mode: Mode::Approximate { max_overshoot: Share::percent(10) }, ..policy("a", bucket) };
    let fits = LimitVerdict::unavailable((&roomy).into(), 0, Tokens::whole(11), false);
    assert_eq!(fits.retry_after, Some(RETRY_HINT), "the overshoot can be spent");
}

#[test]
fn shadow_policies_never_deny() {
    let bucket = limit(1, Unit::Second, 1);
    let p = Policy { shadow: true, ..policy("p", bucket) };
    let verdict = asked(&p, 0, 1, 0);
    assert_eq!((verdict.allowed, verdict.reason, verdict.retry_after), (true, Reason::Shadow, None));
}

#[test]
fn names_are_structured_field_strings() {
    let p = policy("a\"b\\c\u{e9}\n", limit(u64::MAX, Unit::Day, 1));
    let fields = Fields::new(&asked(&p, 0, 0, 1));
    assert_eq!(fields.policy, r#""a\"b\\c__";q=999999999999999;w=86400"#);
    assert!(fields.policy.is_ascii() && fields.state.is_ascii());
}

#[test]
fn hope_shortens_the_wait_only_where_a_lease_would_help() {
    let second = Micros::seconds(1);
    let sight = Sight { fits: false, level: Tokens::ZERO, rate: Rate::per_second(1), cap: Tokens::whole(10) };
    let lease = Elsewhere { rate: Rate::per_second(100), cap: Tokens::whole(50), after: second };
    assert_eq!(retry_after(Tokens::whole(10), sight, None), Some(Micros::seconds(10)));
    assert_eq!(retry_after(Tokens::whole(10), sight, Some(lease)), Some(Micros::millis(1_100)));
    assert_eq!(retry_after(Tokens::whole(50), sight, None), None);
    assert_eq!(retry_after(Tokens::whole(50), sight, Some(lease)), Some(Micros::millis(1_500)));
    assert_eq!(retry_after(Tokens::whole(51), sight, Some(lease)), None);
    let leased = Sight { rate: Rate::per_second(200), ..sight };
    assert_eq!(retry_after(Tokens::whole(10), leased, Some(lease)), Some(Micros::millis(50)));
}

proptest! {
    /// Never sooner than the cost can be met, and not a microsecond later either.
    #[test]
    fn the_wait_is_exact(
        cost in 1_i64..1 << 40,
        level in 0_i64..1 << 40,
        rate in 0_i64..1 << 45,
        cap in 0_i64..1 << 40,
    ) {
        let (cost, level, rate, cap) = (Tokens(cost), Tokens(level.min(cap)), Rate(rate), Tokens(cap));
        prop_assume!(cost > level);
        let sight = Sight { fits: false, level, rate, cap };
        match retry_after(cost, sight, None) {
            None => prop_assert!(cost > cap || rate == Rate::ZERO),
            Some(wait) => {
                prop_assert!(level + rate.during(wait) >= cost);
                prop_assert!(level + rate.during(wait - Micros(1)) < cost);
            }
        }
    }

    #[test]
    fn retry_after_and_reset_agree(seconds in 0_i64..1 << 33) {
        let p = policy("p", limit(1, Unit::Second, 1));
        let mut limit = asked(&p, 0, 1, 0);
        limit.reset = Micros(seconds);
        limit.retry_after = Some(Micros(seconds));
        let fields = Fields::new(&limit);
        prop_assert_eq!(Some(fields.reset), fields.retry_after);
        prop_assert!(i64::try_from(fields.reset).unwrap() * 1_000_000 >= seconds.max(1));
    }
}

#[test]
fn numbers_in_decimal() {
    for n in [0, 7, 10, 99, 100, 1_234_567_890, u64::MAX] {
        assert_eq!(decimal(n, &mut [0; DIGITS_MAX]), n.to_string());
    }
}
