//! Matching: precedence against a naive oracle, buckets that stay apart, and requests that are refused.

use proptest::prelude::*;
use quorate::config::policies;
use quorate::quota::amount::Tokens;
use quorate::quota::matching::{
    ATTRIBUTES_MAX, CHARGES_MAX, COST_MAX, Charge, ChargeLimit, DESCRIPTORS_MAX, Descriptor,
    ENTRIES_BYTES_MAX, ENTRIES_MAX, Matched, Matcher, Place, Request, RequestFault, Subject, bucket_id,
    bucket_of, override_bucket_id,
};
use quorate::quota::policy::{BucketId, KeyMatch, Policy, TokenBucket, Unit, ValueMatch};
use quorate::quota::redaction::Redaction;
use std::collections::HashSet;
use std::path::Path;
use std::sync::LazyLock;

fn policy(name: &str, domain: &str, matches: Vec<KeyMatch>) -> Policy {
    static BASE: LazyLock<Policy> = LazyLock::new(|| {
        let text =
            "policies: [{ name: p, domain: d, match: [{ key: k }], mode: split, limit: { rate: 1/s } }]";
        policies::parse(Path::new("p.yaml"), text, None).unwrap().remove(0)
    });
    Policy { name: name.into(), domain: domain.into(), matches, ..BASE.clone() }
}

fn keys(pairs: &[(&str, &str)]) -> Vec<KeyMatch> {
    let value = |text: &str| match text.strip_suffix('*') {
        Some("") => ValueMatch::Any,
        Some(prefix) => ValueMatch::Prefix(prefix.into()),
        None => ValueMatch::Exact(text.into()),
    };
    pairs.iter().map(|(key, v)| KeyMatch { key: (*key).into(), value: value(v) }).collect()
}

fn matcher(policies: &[Policy]) -> Matcher {
    Matcher::new((0..).zip(policies))
}

fn descriptor<'a>(entries: &'a [(&'a str, &'a str)]) -> Descriptor<'a> {
    Descriptor { entries, cost: None, limit: None }
}

fn ask(matcher: &Matcher, domain: &str, descriptors: &[Descriptor<'_>]) -> Result<Matched, RequestFault> {
    let subject = Subject::Descriptors(descriptors);
    matcher.charges(&Request { domain, subject, cost: Tokens::whole(1) })
}

fn ask_map(matcher: &Matcher, attributes: &[(&str, &str)]) -> Result<Matched, RequestFault> {
    let subject = Subject::Attributes(attributes);
    matcher.charges(&Request { domain: "d", subject, cost: Tokens::whole(1) })
}

fn ids(matched: &Matched) -> Vec<u32> {
    matched.charges.iter().filter_map(Charge::policy).collect()
}

#[test]
fn the_most_exact_policy_counts_key_by_key() {
    let policies = [
        policy("any-any", "d", keys(&[("a", "*"), ("b", "*")])),
        policy("any-exact", "d", keys(&[("a", "*"), ("b", "x")])),
        policy("long-any", "d", keys(&[("a", "abc*"), ("b", "*")])),
        policy("short-exact", "d", keys(&[("a", "ab*"), ("b", "x")])),
        policy("exact-y", "d", keys(&[("a", "abcd"), ("b", "y")])),
        policy("one", "d", keys(&[("a", "*")])),
        policy("other-order", "d", keys(&[("b", "*"), ("a", "*")])),
    ];
    let matcher = matcher(&policies);
    let name = |entries: &[(&str, &str)]| {
        let found = ask(&matcher, "d", &[descriptor(entries)]).unwrap();
        found.charges.first().and_then(Charge::policy).map(|id| policies[id as usize].name.to_string())
    };
    assert_eq!(name(&[("a", "abcd"), ("b", "y")]).as_deref(), Some("exact-y"));
    // The exact first key leads nowhere for `x`: the search goes back to the longest prefix.
    assert_eq!(name(&[("a", "abcd"), ("b", "x")]).as_deref(), Some("long-any"));
    assert_eq!(name(&[("a", "abx"), ("b", "x")]).as_deref(), Some("short-exact"));
    assert_eq!(name(&[("a", "abx"), ("b", "z")]).as_deref(), Some("any-any"));
    assert_eq!(name(&[("a", ""), ("b", "x")]).as_deref(), Some("any-exact"));
    assert_eq!(name(&[("a", "q")]).as_deref(), Some("one"));
    assert_eq!(name(&[("b", "q"), ("a", "q")]).as_deref(), Some("other-order"));
    assert_eq!(name(&[("b", "q")]), None);
    assert_eq!(name(&[("a", "q"), ("b", "q"), ("c", "q")]), None);
}

#[test]
fn what_matches_nothing_is_named() {
    let matcher = matcher(&[policy("p", "d", keys(&[("a", "*")]))]);
    let (hit, miss) = ([("a", "1")], [("z", "1")]);
    let matched = ask(&matcher, "d", &[descriptor(&miss), descriptor(&hit), descriptor(&miss)]).unwrap();
    assert_eq!((matched.unmatched.as_slice(), matched.charges[0].descriptor), ([0, 2].as_slice(), 1));
    assert!(matched.domain_known && matcher.knows("d"));
    let matched = ask(&matcher, "elsewhere", &[descriptor(&hit)]).unwrap();
    assert_eq!((matched.unmatched.as_slice(), matched.charges.len()), ([0].as_slice(), 0));
    assert!(!matched.domain_known && !matcher.knows("elsewhere"));
    assert_eq!(ask_map(&matcher, &[("z", "1")]).unwrap().unmatched, [0]);
}

#[test]
fn an_override_has_a_bucket_of_its_own_in_known_domains_only() {
    let matcher = matcher(&[policy("p", "d", keys(&[("a", "*")]))]);
    let limit = TokenBucket { amount: 7, per: Unit::Minute, burst: 7 };
    let (hit, miss) = ([("a", "1")], [("z", "1")]);
    let with = |entries| Descriptor { limit: Some(limit), ..descriptor(entries) };
    let matched = ask(&matcher, "d", &[descriptor(&hit), with(&hit), with(&miss)]).unwrap();
    let limits: Vec<_> = matched.charges.iter().map(|c| c.limit).collect();
    let replaced = |policy| ChargeLimit::Override { limit, policy };
    assert_eq!(limits, [ChargeLimit::Policy(0), replaced(Some(0)), replaced(None)]);
    let buckets: HashSet<BucketId> = matched.charges.iter().map(|c| c.bucket).collect();
    assert_eq!(buckets.len(), 3);
    let other = TokenBucket { burst: 8, ..limit };
    assert_ne!(override_bucket_id("d", &hit, &limit), override_bucket_id("d", &hit, &other));
    assert_ne!(override_bucket_id("d", &hit, &limit), override_bucket_id("e", &hit, &limit));
    let matched = ask(&matcher, "elsewhere", &[with(&hit)]).unwrap();
    assert_eq!((matched.charges.len(), matched.unmatched.len()), (0, 1));
}

#[test]
fn costs_come_from_the_descriptor_or_the_request() {
    let matcher = matcher(&[policy("p", "d", keys(&[("a", "*")]))]);
    let hit = [("a", "1")];
    let costs = [None, Some(Tokens::ZERO), Some(Tokens::whole(-5))];
    let descriptors = costs.map(|cost| Descriptor { cost, ..descriptor(&hit) });
    let matched = ask(&matcher, "d", &descriptors).unwrap();
    let charged: Vec<_> = matched.charges.iter().map(|c| c.cost).collect();
    assert_eq!(charged, [Tokens::whole(1), Tokens::ZERO, Tokens::whole(-5)]);
    let subject = Subject::Descriptors(&descriptors);
    let too_much = Request { domain: "d", subject, cost: COST_MAX + Tokens(1) };
    assert_eq!(matcher.charges(&too_much), Err(RequestFault::CostTooLarge { place: Place::Request }));
    let too_little = [Descriptor { cost: Some(-COST_MAX - Tokens(1)), ..descriptor(&hit) }];
    let place = Place::Descriptor(0);
    assert_eq!(ask(&matcher, "d", &too_little), Err(RequestFault::CostTooLarge { place }));
    let most = Request { domain: "d", subject, cost: COST_MAX };
    assert!(matcher.charges(&most).is_ok());
}

#[test]
fn malformed_requests_are_refused_with_the_place() {
    let matcher = matcher(&[policy("p", "d", keys(&[("a", "*")]))]);
    let fault = |domain: &str, descriptors: &[Descriptor<'_>]| {
        ask(&matcher, domain, descriptors).unwrap_err().to_string()
    };
    let hit = [("a", "1")];
    let nameless = [("a", "1"), ("", "hunter2")];
    let fine = descriptor(&hit);
    assert_eq!(fault("", &[fine]), "domain is empty; name the domain of the policies to check");
    assert!(fault(&"d".repeat(256), &[fine]).starts_with("domain has 256 bytes"));
    assert_eq!(fault("d", &[]), "descriptors is empty; give at least one descriptor");
    assert_eq!(
        fault("d", &[fine, descriptor(&[])]),
        "descriptors[1] is empty; give at least one key and value"
    );
    assert_eq!(
        fault("d", &[fine, fine, descriptor(&nameless)]),
        "descriptors[2].entries[1].key is empty; give every value a key"
    );
    assert!(fault("d", &vec![fine; DESCRIPTORS_MAX + 1]).contains("at most 64"));
    assert!(ask(&matcher, "d", &vec![fine; DESCRIPTORS_MAX]).is_ok());
    let many = vec![("a", "1"); ENTRIES_MAX + 1];
    assert!(fault("d", &[descriptor(&many)]).starts_with("descriptors[0] has 33 keys; at most 32"));
    let large = "x".repeat(64 * 1024);
    assert!(fault("d", &[descriptor(&[("a", &large)])]).contains("at most 16384"));
    let just = "x".repeat(ENTRIES_BYTES_MAX - 1);
    assert!(ask(&matcher, "d", &[descriptor(&[("a", &just)])]).is_ok());

    let twice = ask_map(&matcher, &[("a", "1"), ("b", "2"), ("a", "3")]).unwrap_err().to_string();
    assert_eq!(twice, "attributes[2].key is there twice; give every key once");
    assert_eq!(
        ask_map(&matcher, &[]).unwrap().unmatched,
        [0],
        "as from a proxy whose request has none of them"
    );
    let names: Vec<String> = (0..=ATTRIBUTES_MAX).map(|n| n.to_string()).collect();
    let many: Vec<_> = names.iter().map(|name| (name.as_str(), "v")).collect();
    assert!(ask_map(&matcher, &many).unwrap_err().to_string().contains("at most 64"));
}

#[test]
fn attributes_are_charged_to_so_many_policies_and_no_more() {
    let all: Vec<Policy> = (0..=CHARGES_MAX)
        .map(|n| policy(&format!("p{n}"), "d", keys(&[("a", &format!("{}*", "x".repeat(n)))])))
        .collect();
    let value = "x".repeat(CHARGES_MAX + 1);
    assert_eq!(ask_map(&matcher(&all), &[("a", &value)]), Err(RequestFault::TooManyCharges));
    let just = ask_map(&matcher(&all[1..]), &[("a", &value)]).unwrap();
    assert_eq!(ids(&just), (0..64).collect::<Vec<u32>>());
}

#[test]
fn nasty_values_never_share_a_bucket() {
    let long = "x".repeat(16_000);
    let parts = [
        "",
        "a",
        "b",
        "c",
        "a_b",
        "b_c",
        "_",
        ".",
        "|",
        ":",
        "{}",
        "/",
        "\n",
        "\0",
        "a\0",
        "\0a",
        "é",
        "e\u{301}",
        "🦀",
        "a=b",
        "=",
        "policy",
        "override",
        " ",
        long.as_str(),
    ];
    let mut seen = HashSet::new();
    for policy in ["p", "p2", "pa"] {
        assert!(seen.insert(bucket_id(policy, [])));
        for a in parts {
            for b in parts {
                assert!(seen.insert(bucket_id(policy, [(a, b)])), "{policy} {a:?}={b:?}");
                assert!(seen.insert(bucket_id(policy, [(a, b), (b, a)])), "{policy} {a:?}={b:?},{b:?}={a:?}");
            }
        }
    }
    // The same in every region and every version: stores and logs hold these.
    assert_eq!(bucket_id("tenant-requests", [("tenant", "42")]).to_string(), PINNED);
}

const PINNED: &str = "32e84110f1722cddf1975ddf4d195657";

/// Policies over few keys and values, so that many of them overlap.
fn some_policies() -> impl Strategy<Value = Vec<Policy>> {
    let value = prop_oneof![
        Just(ValueMatch::Any),
        "[xy]{0,3}".prop_map(|s| ValueMatch::Exact(s.into())),
        "[xyé]{1,2}".prop_map(|s| ValueMatch::Prefix(s.into())),
        "[xyé]{0,2}".prop_map(|s| ValueMatch::Shared(s.into())),
    ];
    let matches = prop::collection::btree_map("[abc]", value, 1..4)
        .prop_map(|m| {
            m.into_iter().map(|(k, value)| KeyMatch { key: k.as_str().into(), value }).collect::<Vec<_>>()
        })
        .prop_shuffle();
    prop::collection::vec(matches, 0..40).prop_map(|all| {
        let mut seen = HashSet::new();
        // Whether values share a bucket makes no two policies different.
        let alike = |matches: &[KeyMatch]| -> Vec<String> {
            matches.iter().map(|m| m.to_string().replace(" (shared)", "")).collect()
        };
        let distinct = all.into_iter().filter(|matches| seen.insert(alike(matches)));
        distinct.enumerate().map(|(n, matches)| policy(&format!("p{n}"), "d", matches)).collect()
    })
}

fn fits(rule: &ValueMatch, value: &str) -> bool {
    match rule {
        ValueMatch::Exact(text) => **text == *value,
        ValueMatch::Prefix(text) | ValueMatch::Shared(text) => value.starts_with(&**text),
        ValueMatch::Any => true,
    }
}

/// Exact before prefix before any; of prefixes the longest.
fn rank(rule: &ValueMatch) -> (u8, usize) {
    match rule {
        ValueMatch::Exact(_) => (0, 0),
        ValueMatch::Shared(text) if text.is_empty() => (2, 0),
        ValueMatch::Prefix(text) | ValueMatch::Shared(text) => (1, usize::MAX - text.len()),
        ValueMatch::Any => (2, 0),
    }
}

/// Values that share a bucket are called by what they begin with.
fn called<'a>(policy: &'a Policy, entries: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let called = policy.matches.iter().zip(entries).map(|(m, (key, value))| match &m.value {
        ValueMatch::Shared(text) => (*key, &**text),
        _ => (*key, *value),
    });
    called.collect()
}

/// The contract, word by word, over all policies in turn.
fn oracle(policies: &[Policy], entries: &[(&str, &str)]) -> Option<u32> {
    let same_keys = |p: &&(u32, &Policy)| {
        p.1.matches.len() == entries.len()
            && p.1.matches.iter().zip(entries).all(|(m, (k, v))| *m.key == **k && fits(&m.value, v))
    };
    let all: Vec<(u32, &Policy)> = (0..).zip(policies).collect();
    let best = all
        .iter()
        .filter(same_keys)
        .min_by_key(|p| p.1.matches.iter().map(|m| rank(&m.value)).collect::<Vec<_>>());
    best.map(|(id, _)| *id)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn descriptors_match_as_the_contract_says(
        policies in some_policies(),
        entries in prop::collection::vec(("[abc]", "[xyé]{0,3}"), 1..4),
    ) {
        let entries: Vec<(&str, &str)> = entries.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let matched = ask(&matcher(&policies), "d", &[descriptor(&entries)]).unwrap();
        let expected = oracle(&policies, &entries);
        prop_assert_eq!(matched.charges.first().and_then(Charge::policy), expected);
        if let Some(charge) = matched.charges.first() {
            let policy = &policies[charge.policy().unwrap() as usize];
            prop_assert_eq!(charge.bucket, bucket_id(&policy.name, called(policy, &entries)));
            prop_assert_eq!(Some(charge.bucket), bucket_of(&Redaction::default(), policy, &entries));
        }
    }

    #[test]
    fn attributes_match_every_policy_whose_keys_are_there(
        policies in some_policies(),
        attributes in prop::collection::btree_map("[abcd]", "[xyé]{0,3}", 1..5),
        reversed in any::<bool>(),
    ) {
        let mut given: Vec<(&str, &str)> = attributes.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        if reversed {
            given.reverse();
        }
        let expected: Vec<u32> = (0..)
            .zip(&policies)
            .filter(|(_, p)| p.matches.iter().all(|m| attributes.get(&*m.key).is_some_and(|v| fits(&m.value, v))))
            .map(|(id, _)| id)
            .collect();
        let matched = ask_map(&matcher(&policies), &given).unwrap();
        prop_assert_eq!(ids(&matched), expected);
        for charge in &matched.charges {
            let p = &policies[charge.policy().unwrap() as usize];
            let entries: Vec<(&str, &str)> =
                p.matches.iter().map(|m| (&*m.key, attributes[&*m.key].as_str())).collect();
            prop_assert_eq!(charge.bucket, bucket_id(&p.name, called(p, &entries)));
            prop_assert_eq!(Some(charge.bucket), bucket_of(&Redaction::default(), p, &given));
        }
    }

    #[test]
    fn different_entries_never_share_a_bucket(
        a in (".{0,3}", prop::collection::vec((".{0,3}", ".{0,3}"), 0..3)),
        b in (".{0,3}", prop::collection::vec((".{0,3}", ".{0,3}"), 0..3)),
    ) {
        let id = |(policy, entries): &(String, Vec<(String, String)>)| {
            bucket_id(policy, entries.iter().map(|(k, v)| (k.as_str(), v.as_str())))
        };
        prop_assert_eq!(id(&a) == id(&b), a == b);
    }
}

#[test]
fn a_policy_may_name_a_key_twice_and_is_for_descriptors_then() {
    let matcher = matcher(&[policy("p", "d", keys(&[("k", "a"), ("k", "*")]))]);
    assert_eq!(ids(&ask(&matcher, "d", &[descriptor(&[("k", "a"), ("k", "b")])]).unwrap()), [0]);
    assert_eq!(ask(&matcher, "d", &[descriptor(&[("k", "b"), ("k", "a")])]).unwrap().unmatched, [0]);
    assert_eq!(ask_map(&matcher, &[("k", "a")]).unwrap().unmatched, [0]);
}

#[test]
fn the_last_of_ten_thousand_policies_is_found() {
    let policies: Vec<Policy> = (0..10_000)
        .map(|n| policy(&format!("p{n}"), "d", keys(&[("a", &format!("v{n}")), ("b", "*")])))
        .collect();
    let matcher = matcher(&policies);
    let entries = [("a", "v9999"), ("b", "x")];
    let matched = ask(&matcher, "d", &[descriptor(&entries)]).unwrap();
    assert_eq!(ids(&matched), [9_999]);
    assert_eq!(ids(&ask_map(&matcher, &entries).unwrap()), [9_999]);
}
