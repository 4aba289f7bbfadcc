//! Properties of the readers: nothing makes them panic, and what is printed is read back.

use proptest::prelude::*;
use quorate::config::{policies, print, region};
use quorate::quota::amount::{Micros, TOKENS_MAX};
use quorate::quota::policy::{
    Algorithm, KeyMatch, LENGTH_MAX_S, Limit, Mode, OnStoreFailure, Policy, Quota, Reserve, Share,
    TokenBucket, Unit, ValueMatch, Window,
};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// Text that is often nearly right: pieces of files in any order, and noise between them.
fn nearly_yaml() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("policies:\n  - name: a\n    domain: d\n    match: [{ key: k }]\n".to_owned()),
        Just("    limit: { rate: 10/s, burst: 5 }\n    mode: strict\n".to_owned()),
        Just("region: a\nstore: { redis: { url: 'redis://h' } }\n".to_owned()),
        Just("cluster: { name: c, regions: { a: 'http://127.0.0.1:1' } }\n".to_owned()),
        Just("listen:\n  admin: 0.0.0.0:1\nforward_auth: { attributes: { a: path } }\n".to_owned()),
        Just("weights: &x { a: 1 }\nreserve: *x\n<<: *x\n".to_owned()),
        Just("? [a]\n: b\n".to_owned()),
        Just("!!binary aGk=\n".to_owned()),
        "[-:{}\\[\\],&*#?|>'\"%@`! \n\t0-9a-z/é🦀\u{0}\u{feff}]{0,12}",
        any::<String>(),
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

fn text(chars: &'static str) -> impl Strategy<Value = String> {
    proptest::string::string_regex(chars).unwrap()
}

fn value() -> impl Strategy<Value = ValueMatch> {
    // A prefix that ends with a backslash cannot be written: `\*` is a star.
    let prefix = || {
        text("[^\u{0}-\u{1f}\u{7f}-\u{9f}]{1,6}").prop_filter("ends with a backslash", |s| !s.ends_with('\\'))
    };
    prop_oneof![
        Just(ValueMatch::Any),
        any::<String>().prop_map(|s| ValueMatch::Exact(s.into())),
        text("[a-z0-9*\\\\]{0,4}").prop_map(|s| ValueMatch::Exact(s.into())),
        prefix().prop_map(|s| ValueMatch::Prefix(s.into())),
        prop_oneof![Just(String::new()), prefix()].prop_map(|s| ValueMatch::Shared(s.into())),
    ]
}

/// What is refused is not printed: quotas in fixed windows.
fn quota() -> impl Strategy<Value = Quota> {
    let unit = prop::sample::select(&Unit::ALL[..]).prop_map(Window::Calendar);
    let length = (1..=LENGTH_MAX_S).prop_map(|seconds| Window::Length { seconds });
    (0..=TOKENS_MAX.unsigned_abs(), prop_oneof![unit, length]).prop_map(|(quota, per)| Quota {
        quota,
        per,
        algorithm: Algorithm::FixedWindow,
    })
}

fn limit() -> impl Strategy<Value = Limit> {
    prop_oneof![bucket().prop_map(Limit::TokenBucket), quota().prop_map(Limit::Quota)]
}

fn bucket() -> impl Strategy<Value = TokenBucket> {
    let max = TOKENS_MAX.unsigned_abs();
    let unit = prop_oneof![Just(Unit::Second), Just(Unit::Minute), Just(Unit::Hour), Just(Unit::Day)];
    let full =
        (1..=max, unit.clone(), 1..=max).prop_map(|(amount, per, burst)| TokenBucket { amount, per, burst });
    prop_oneof![9 => full, 1 => unit.prop_map(|per| TokenBucket { amount: 0, per, burst: 0 })]
}

fn policy() -> impl Strategy<Value = Policy> {
    let share = || (0..=1_000_000_u32).prop_map(Share);
    let mode = prop_oneof![
        Just(Mode::Strict),
        Just(Mode::Split),
        (1..=1_000_000_u32).prop_map(|s| Mode::Approximate { max_overshoot: Share(s) }),
    ];
    let matches = prop::collection::btree_map(text("\\PC{1,8}"), value(), 1..4);
    let weights = prop::collection::btree_map(text("[a-z0-9-]{1,9}"), 1..9_u32, 0..4);
    let names = (text("[a-zA-Z0-9._/:-]{1,20}"), text("\\PC{1,12}"));
    let failure =
        prop_oneof![Just(OnStoreFailure::Deny), Just(OnStoreFailure::Allow), Just(OnStoreFailure::Local)];
    let rest = (share(), share(), 0..=5_000_000_i64, failure, any::<bool>());
    (names, matches, prop::option::weighted(0.9, limit()), mode, weights, rest).prop_map(
        |((name, domain), matches, limit, mode, weights, (rate, burst, wait, failure, shadow))| {
            let mode = if limit.is_some() { mode } else { Mode::Split };
            let limited = limit.is_some();
            // A quota has no rate, and no bucket in memory.
            let quota = matches!(limit, Some(Limit::Quota(_)));
            let rate = if quota { burst } else { rate };
            let failure =
                if quota && failure == OnStoreFailure::Local { OnStoreFailure::Allow } else { failure };
            Policy {
                name: name.into(),
                domain: domain.into(),
                matches: matches
                    .into_iter()
                    .map(|(key, value)| KeyMatch { key: key.into(), value })
                    .collect(),
                limit: limit.unwrap_or(Limit::Unlimited),
                mode,
                reserve: if mode == Mode::Split { Reserve::default() } else { Reserve { rate, burst } },
                weights: if limited {
                    weights.into_iter().map(|(region, weight)| (region.into(), weight)).collect()
                } else {
                    BTreeMap::new()
                },
                wait: if mode == Mode::Strict { Micros(wait) } else { Micros::ZERO },
                on_store_failure: if limited && mode != Mode::Strict {
                    failure
                } else {
                    OnStoreFailure::Deny
                },
                shadow: limited && shadow,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn nothing_makes_the_readers_panic(text in nearly_yaml()) {
        let file = Path::new("f.yaml");
        for shown in [
            policies::parse(file, &text, None).err().map(|f| f.to_string()),
            region::parse(file, &text, &[]).err().map(|f| f.to_string()),
        ].into_iter().flatten() {
            // Each fault is one line that begins with its place.
            for line in shown.lines() {
                prop_assert!(line.starts_with("f.yaml:") && line.contains("; "), "{}", shown);
            }
        }
    }

    #[test]
    fn what_is_printed_is_read_back(all in prop::collection::vec(policy(), 0..6)) {
        let (mut names, mut matches) = (HashSet::new(), HashSet::new());
        let all: Vec<Policy> = all
            .into_iter()
            .filter(|p| {
                let alike: Vec<String> = p.matches.iter().map(|m| m.to_string().replace(" (shared)", "")).collect();
                names.insert(p.name.clone()) && matches.insert((p.domain.clone(), alike))
            })
            .collect();
        let printed = print::policies(&all);
        let read = policies::parse(Path::new("f.yaml"), &printed, None);
        prop_assert_eq!(read.as_ref().map_err(ToString::to_string), Ok(&all), "{}", printed);
        for policy in &all {
            let line = print::policy(policy);
            let read = policies::parse(Path::new("f.yaml"), &format!("policies: [{line}]"), None);
            prop_assert_eq!(read.as_deref().ok(), Some(std::slice::from_ref(policy)), "{}", line);
        }
    }

    #[test]
    fn variables_never_make_the_reader_panic(
        name in "[A-Z_]{0,6}(REDIS|CLUSTER|REGIONS|LISTEN|STORE|__){0,4}[A-Z_é]{0,4}",
        value in any::<String>(),
    ) {
        let text = "region: a\ncluster: { name: c, regions: { a: 'http://127.0.0.1:8082' } }\n";
        let set = [(format!("QUORATE_{name}").into(), value.into())];
        let _ = region::parse(Path::new("f.yaml"), text, &set);
    }
}
