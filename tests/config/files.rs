//! The examples load, and each wrong file is refused at the right places with the right mends.

use quorate::config::{self, AttributeSource, LogFormat, StoreConfig, Unmatched, policies, region};
use quorate::quota::amount::Micros;
use quorate::quota::policy::{
    KeyMatch, Limit, Mode, OnStoreFailure, RegionName, Reserve, Share, TokenBucket, Unit, ValueMatch,
};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

fn example(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("config").join(name)).unwrap()
}

fn variables(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

const SMALL: &str = "region: a\ncluster: { name: c, regions: { a: 'http://127.0.0.1:8082' } }\n";

#[test]
fn the_example_region_file_says_the_defaults() {
    let text = example("region.yaml");
    let config = region::parse(Path::new("/etc/quorate/region.yaml"), &text, &[]).unwrap();
    assert_eq!(&*config.region, "us-east");
    assert_eq!(config.policies.as_deref(), Some(Path::new("/etc/quorate/policies.yaml")));
    assert_eq!(config.peer_tls.as_ref().unwrap().cert, Path::new("/etc/quorate/tls/region.crt"));
    let names: Vec<_> = config.cluster.names().iter().map(ToString::to_string).collect();
    assert_eq!(names, ["ap-south", "eu-west", "us-east"], "sorted, so that every region numbers them alike");

    // What it gives for keys with defaults is what a file without them gets.
    let small = "region: us-east\npolicies: policies.yaml\n\
        peer_tls: { cert: tls/region.crt, key: tls/region.key, ca: tls/ca.crt }\n\
        cluster:\n  name: prod\n  regions:\n    eu-west: https://quorate.eu-west.example:8082\n    \
        us-east: https://quorate.us-east.example:8082\n    ap-south: https://quorate.ap-south.example:8082\n";
    let defaults = region::parse(Path::new("/etc/quorate/region.yaml"), small, &[]).unwrap();
    assert_eq!(config, defaults);
    let StoreConfig::Redis(redis) = &config.store else { panic!("{:?}", config.store) };
    assert_eq!((redis.url.expose(), redis.timeout), ("redis://127.0.0.1:6379", Duration::from_millis(20)));
    assert_eq!(config.unmatched, Unmatched::Allow);
    assert_eq!(config.telemetry.log, LogFormat::Text);
    assert_eq!(config.cluster.rtt_max, Duration::from_millis(250));
}

#[test]
fn the_example_region_file_names_every_key_and_its_comments_load() {
    let text = example("region.yaml");
    for key in region::KEYS {
        assert!(text.lines().any(|l| l.trim_start_matches("# ").starts_with(&format!("{key}:"))), "{key}");
    }
    // The keys that are commented out are right, too.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("token"), "0123456789abcdef\n").unwrap();
    let all: String = text
        .lines()
        .filter(|l| !l.contains("url_file:") && !l.ends_with(": …"))
        .map(|line| {
            let indent = line.len() - line.trim_start().len();
            let (spaces, rest) = line.split_at(indent);
            let keys = [
                "admin_token_file:",
                "admin_tls:",
                "caller_tls:",
                "  cert:",
                "  key:",
                "  client_ca:",
                "caller_tokens_file:",
                "redact_key_file:",
                "forward_auth:",
                "  domain:",
                "  trusted_proxies:",
                "  attributes:",
                "    tenant:",
                "    ip:",
                "    path:",
                "otlp:",
            ];
            match rest.strip_prefix("# ") {
                Some(setting) if keys.iter().any(|k| setting.starts_with(k)) => {
                    format!("{spaces}{setting}\n")
                }
                _ => format!("{line}\n"),
            }
        })
        .collect();
    std::fs::write(folder.path().join("tokens"), "checkout 0123456789abcdef\n").unwrap();
    let all = all.replace("/run/secrets/quorate-admin-token", "token");
    let all = all.replace("/run/secrets/quorate-redact-key", "token");
    let all = all.replace("/run/secrets/quorate-caller-tokens", "tokens");
    let config = region::parse(&folder.path().join("region.yaml"), &all, &[]).unwrap();
    assert_eq!(config.admin_token.as_ref().unwrap().expose(), "0123456789abcdef");
    assert_eq!(config.admin_token_file, Some(folder.path().join("token")));
    assert_eq!(config.redact_key, config.admin_token);
    assert_eq!(config.caller_tokens_file, Some(folder.path().join("tokens")));
    assert_eq!(config.admin_tls.unwrap().key, folder.path().join("tls/admin.key"));
    let ca = config.caller_tls.unwrap().client_ca;
    assert_eq!(ca, Some(folder.path().join("tls/callers-ca.crt")));
    let auth = config.forward_auth.unwrap();
    let header = AttributeSource::Header(http::HeaderName::from_static("x-tenant"));
    let expected = [("ip", AttributeSource::ClientIp), ("path", AttributeSource::Path), ("tenant", header)];
    assert_eq!(auth.attributes, expected.map(|(key, source)| (key.into(), source)));
    assert_eq!(auth.trusted_proxies, 1);
    assert_eq!(config.telemetry.otlp.as_deref(), Some("http://127.0.0.1:4317"));
}

#[test]
fn the_example_policies_are_what_they_say() {
    let text = example("policies.yaml");
    let regions: Vec<RegionName> = ["us-east", "eu-west", "ap-south"].map(Into::into).to_vec();
    let all = policies::parse(Path::new("policies.yaml"), &text, Some(&regions)).unwrap();
    let first = &all[0];
    assert_eq!((&*first.name, &*first.domain), ("tenant-requests", "api"));
    assert_eq!(first.matches, [KeyMatch { key: "tenant".into(), value: ValueMatch::Any }]);
    assert_eq!(first.limit, Limit::TokenBucket(TokenBucket { amount: 10, per: Unit::Second, burst: 100 }));
    assert_eq!((first.mode, first.wait), (Mode::Strict, Micros::millis(250)));
    assert_eq!((first.reserve, first.on_store_failure), (Reserve::default(), OnStoreFailure::Deny));

    let second = &all[1];
    assert_eq!(second.mode, Mode::Approximate { max_overshoot: Share::percent(10) });
    assert_eq!(second.reserve, Reserve { rate: Share::percent(4), burst: Share::percent(10) });
    assert_eq!(
        second.weights,
        BTreeMap::from([("us-east".into(), 2), ("eu-west".into(), 1), ("ap-south".into(), 1)])
    );
    assert_eq!((second.on_store_failure, second.wait), (OnStoreFailure::Local, Micros::ZERO));
    assert_eq!(all[2].matches[1].value, ValueMatch::Prefix("pay".into()));
    for mode in ["strict", "approximate", "split"] {
        assert!(all.iter().any(|p| p.mode.name() == mode), "{mode}");
    }
    assert!(all.iter().any(|p| p.limit == Limit::Unlimited));
    for key in policies::KEYS {
        assert!(text.contains(&format!("{key}:")), "{key}");
    }
}

#[test]
fn the_environment_overrides_every_scalar() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("url"), "redis://u:hunter2@from-file\n").unwrap();
    let file = folder.path().join("region.yaml");
    let set = variables(&[
        ("QUORATE_REGION", "us-east"),
        ("QUORATE_LISTEN__HTTP", "127.0.0.1:0"),
        ("QUORATE_STORE__REDIS__URL_FILE", "url"),
        ("QUORATE_STORE__REDIS__TIMEOUT", "5ms"),
        ("QUORATE_CLUSTER__NAME", "other"),
        ("QUORATE_CLUSTER__REGIONS__US_EAST", "http://127.0.0.1:9000"),
        ("QUORATE_CLUSTER__REGIONS__EU_WEST", "http://127.0.0.1:9001"),
        ("QUORATE_CLUSTER__RTT_MAX", "1s"),
        ("QUORATE_UNMATCHED", "deny"),
        ("QUORATE_ADMIN_TOKEN", "0123456789abcdef"),
        ("QUORATE_TELEMETRY__LOG", "json"),
        ("QUORATE_FORWARD_AUTH__DOMAIN", "web"),
        ("QUORATE_FORWARD_AUTH__ATTRIBUTES__IP", "client-ip"),
        ("QUORATE_LOG", "debug"),
        ("PATH", "/bin"),
    ]);
    let text = "region: us\nstore: { redis: { url: 'redis://in-file' } }\n\
                cluster:\n  name: c\n  regions:\n    us-east: http://127.0.0.1:8082\n";
    let config = region::parse(&file, text, &set).unwrap();
    assert_eq!(&*config.region, "us-east");
    assert_eq!(config.listen.http.to_string(), "127.0.0.1:0");
    let StoreConfig::Redis(redis) = &config.store else { panic!("{:?}", config.store) };
    assert_eq!(
        redis.url.expose(),
        "redis://u:hunter2@from-file",
        "the variable counts, not the file's `url`"
    );
    assert_eq!(redis.timeout, Duration::from_millis(5));
    let urls: Vec<_> = config.cluster.regions.iter().map(|p| format!("{} {}", p.name, p.url)).collect();
    assert_eq!(urls, ["eu-west http://127.0.0.1:9001", "us-east http://127.0.0.1:9000"]);
    assert_eq!((&*config.cluster.name, config.cluster.rtt_max), ("other", Duration::from_secs(1)));
    assert_eq!((config.unmatched, config.telemetry.log), (Unmatched::Deny, LogFormat::Json));
    assert_eq!(&*config.forward_auth.as_ref().unwrap().domain, "web");
    let shown = format!("{config:?}");
    assert!(!shown.contains("hunter2") && !shown.contains("0123456789abcdef"), "{shown}");
}

#[test]
fn a_region_without_tls_stays_on_loopback() {
    let config = region::parse(Path::new("region.yaml"), SMALL, &[]).unwrap();
    assert!(config.listen.peer.ip().is_loopback() && config.listen.admin.ip().is_loopback());
    assert_eq!(config.peer_tls, None);
    let embedded = format!("{SMALL}store: {{ embedded: {{}} }}\n");
    let config = region::parse(Path::new("region.yaml"), &embedded, &[]).unwrap();
    assert_eq!(config.store, StoreConfig::Embedded);
}

#[test]
fn attributes_of_proxies_come_from_where_they_are_told_to() {
    let text = format!(
        "{SMALL}forward_auth:\n  domain: web\n  attributes: {{ a: method, b: host, c: 'query: api_key', d: cookie:sid, e: path }}\n"
    );
    let auth = region::parse(Path::new("region.yaml"), &text, &[]).unwrap().forward_auth.unwrap();
    let expected = [
        ("a", AttributeSource::Method),
        ("b", AttributeSource::Host),
        ("c", AttributeSource::Query("api_key".into())),
        ("d", AttributeSource::Cookie("sid".into())),
        ("e", AttributeSource::Path),
    ];
    assert_eq!(auth.attributes, expected.map(|(key, source)| (key.into(), source)));
    assert_eq!(auth.trusted_proxies, 0, "nobody is believed about addresses unless the file says so");
}

#[test]
fn limits_at_the_edges_load_exactly() {
    let text = "policies:\n\
        - { name: a, domain: d, match: [{ key: a }], mode: split, limit: { rate: 4294967296/s, burst: 4294967296 } }\n\
        - { name: b, domain: d, match: [{ key: b }], mode: split, limit: { rate: 2147483648/d } }\n\
        - { name: c, domain: d, match: [{ key: c }], mode: split, limit: { rate: 0/s } }\n";
    let all = policies::parse(Path::new("p.yaml"), text, None).unwrap();
    let buckets: Vec<_> = all
        .iter()
        .map(|p| match p.limit {
            Limit::TokenBucket(b) => (b.amount, b.per, b.burst),
            _ => panic!("{p:?}"),
        })
        .collect();
    let expected = [(1 << 32, Unit::Second, 1 << 32), (1 << 31, Unit::Day, 1 << 31), (0, Unit::Second, 0)];
    assert_eq!(buckets, expected);
}

#[test]
fn values_keep_what_was_written() {
    let value = |text: &str| {
        let text = format!(
            "policies: [{{ name: a, domain: d, match: [{{ key: k, value: {text} }}], unlimited: true }}]"
        );
        policies::parse(Path::new("p.yaml"), &text, None).unwrap()[0].matches[0].value.clone()
    };
    assert_eq!(value("1.10"), ValueMatch::Exact("1.10".into()));
    assert_eq!(value("0x10"), ValueMatch::Exact("0x10".into()));
    assert_eq!(value("yes"), ValueMatch::Exact("yes".into()));
    assert_eq!(value("true"), ValueMatch::Exact("true".into()));
    assert_eq!(value("''"), ValueMatch::Exact("".into()));
    assert_eq!(value("'a*'"), ValueMatch::Prefix("a".into()));
    assert_eq!(value("'a*b'"), ValueMatch::Exact("a*b".into()));
    assert_eq!(value("'*'"), ValueMatch::Any);
    assert_eq!(value(r"'a\*'"), ValueMatch::Exact("a*".into()));
    assert_eq!(value(r"'\*'"), ValueMatch::Exact("*".into()));
}

#[test]
fn too_much_is_refused() {
    let many: String = (0..=policies::POLICIES_MAX)
        .map(|n| {
            format!("- {{ name: p{n}, domain: d, match: [{{ key: k, value: v{n} }}], unlimited: true }}\n")
        })
        .collect();
    let shown =
        policies::parse(Path::new("p.yaml"), &format!("policies:\n{many}"), None).unwrap_err().to_string();
    assert_eq!(shown, "p.yaml:1:1: there are 10001 policies; at most 10000 are possible");
    let just = many.lines().skip(1).collect::<Vec<_>>().join("\n");
    let all = policies::parse(Path::new("p.yaml"), &format!("policies:\n{just}"), None).unwrap();
    assert_eq!(all.len(), policies::POLICIES_MAX);
    let large = " ".repeat(9 * 1024 * 1024);
    assert!(policies::parse(Path::new("p.yaml"), &large, None).unwrap_err().to_string().contains("8388608"));
    let regions: String = (0..65).map(|n| format!("    r{n}: http://127.0.0.1:{}\n", 9000 + n)).collect();
    let text = format!("region: r0\ncluster:\n  name: c\n  regions:\n{regions}");
    let shown = region::parse(Path::new("r.yaml"), &text, &[]).unwrap_err().to_string();
    assert!(shown.contains("has 65 regions; name 1 to 64"), "{shown}");
}

#[test]
fn a_file_that_is_not_there_says_so() {
    let shown = config::load(Path::new("no/such/file.yaml")).unwrap_err().to_string();
    assert!(shown.starts_with("no/such/file.yaml: cannot read it: "), "{shown}");
}

/// Each file in `wrong/` says in comments what is to be said about it, all of it and in that order.
#[test]
fn wrong_files_are_refused_at_the_right_places() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/wrong");
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 24);
    let mut different = String::new();
    for path in files {
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let comments = |kind: &str| -> Vec<&str> {
            text.lines()
                .filter_map(|l| l.strip_prefix("# ")?.strip_prefix(kind)?.strip_prefix(": "))
                .collect()
        };
        let faults = if name.starts_with("region") {
            let set: Vec<_> = comments("env").iter().map(|e| e.split_once('=').unwrap()).collect();
            region::parse(Path::new(name), &text, &variables(&set)).unwrap_err()
        } else {
            let regions: Option<Vec<RegionName>> =
                comments("regions").first().map(|names| names.split(", ").map(RegionName::from).collect());
            policies::parse(Path::new(name), &text, regions.as_deref()).unwrap_err()
        };
        let found = faults.to_string();
        assert!(!found.contains("hunter2"), "{found}");
        let found: Vec<&str> =
            found.lines().map(|l| l.strip_prefix(&format!("{name}:")).unwrap_or(l)).collect();
        if found != comments("expect") {
            let found: String = found.iter().map(|line| format!("# expect: {line}\n")).collect();
            different.push_str(&format!("{name} should have\n{found}\n"));
        }
    }
    assert!(different.is_empty(), "{different}");
}
