//! TLS, and a user with no more rights than it needs.

use crate::cluster::{Cluster, on_shard};
use crate::sentinel::Sentinel;
use crate::suite::suite;
use crate::support::*;
use quorate::store::AnyStore;
use quorate::store::redis::{RedisConfig, RedisStore};
use quorate::telemetry::Metrics;
use quorate::tls::ClientFiles;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use std::path::{Path, PathBuf};

/// An authority and its folder of PEM files.
struct Authority {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { dir, issuer: Issuer::new(params, key) }
    }

    /// Writes a certificate for this host; returns it and its key.
    fn issue(&self, name: &str, host: &str) -> (PathBuf, PathBuf) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        // OpenSSL takes a certificate with its issuer's name for one that has signed itself.
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let file = |end: &str| self.dir.path().join(format!("{name}.{end}"));
        std::fs::write(file("crt"), certificate.pem()).unwrap();
        std::fs::write(file("key"), key.serialize_pem()).unwrap();
        (file("crt"), file("key"))
    }

    fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.crt")
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test]
async fn tls_to_redis_and_to_sentinels() {
    let authority = Authority::new();
    let (cert, key) = authority.issue("redis", "127.0.0.1");
    let own = Some(authority.issue("daemon", "us-east"));
    let (ca, port) = (authority.ca(), free_port());
    let port_text = port.to_string();
    let files = [
        ("cert-file", text(&cert)),
        ("key-file", text(&key)),
        ("ca-cert-file", text(&ca)),
        ("port", &port_text),
    ];
    let args: Vec<String> = files.iter().flat_map(|(k, v)| [format!("--tls-{k}"), (*v).to_owned()]).collect();
    let redis = Redis::start(&args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let tls = |ca: PathBuf, own| Some(ClientFiles { ca, own });
    let url = format!("rediss://127.0.0.1:{port}");
    let config = RedisConfig { url: url.clone(), tls: tls(ca.clone(), own.clone()), ..redis.config() };
    let (store, _) = full(&config).await;
    let worker = worker(&store).await;
    assert_eq!(spend(&worker, bucket(1, 0, 10), 4).await, Ok((true, 6)));
    store.close().await;

    // Sentinels have the same port setting for themselves and for what they watch.
    let sentinel_port = free_port();
    let more = format!(
        "tls-replication yes\ntls-port {sentinel_port}\ntls-cert-file {}\ntls-key-file {}\ntls-ca-cert-file {}",
        text(&cert),
        text(&key),
        text(&ca)
    );
    let _sentinel = Sentinel::watch(port, 1, &more);
    let behind = format!("rediss-sentinel://127.0.0.1:{sentinel_port}?sentinelServiceName=main");
    let store = RedisStore::connect(&RedisConfig { url: behind, ..config.clone() }).unwrap();
    assert!(session(&store, None).await.kept);
    assert_eq!(settled(&store, bucket(1, 0, 10), 1).await, (true, 5));
    store.close().await;

    // A certificate that the server did not get from this authority; none to show; no TLS at all; no such file.
    let other = Authority::new();
    let wrong = [
        (url.clone(), tls(other.ca(), own.clone()), "certificate"),
        (url.clone(), tls(ca.clone(), None), "failed"),
        (format!("redis://127.0.0.1:{port}"), None, "failed"),
        (url, tls(other.dir.path().join("none.crt"), None), "none.crt"),
    ];
    for (url, tls, says) in wrong {
        let store = RedisStore::connect(&RedisConfig { url, tls, ..redis.config() }).unwrap();
        let told = || async { store.health().down.is_some_and(|why| why.to_lowercase().contains(says)) };
        until(says, told).await;
        assert_eq!(store.session().borrow().session(), None);
    }
}

/// The user `quorate` with the rights that docs/operations.md says, as arguments of `ACL`; with more where it says so.
fn documented_rights() -> Vec<String> {
    let docs = include_str!("../../docs/operations.md");
    let line =
        docs.lines().find(|line| line.contains("ACL SETUSER quorate")).expect("the rights are documented");
    let rights = line.trim().split("ACL SETUSER ").nth(1).unwrap();
    let rights =
        rights.replace("PASSWORD", "right-one").replace("CLUSTER", "prod").replace("REGION", "us-east");
    std::iter::once("SETUSER").chain(rights.split_whitespace()).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_over_tls_with_a_user_of_few_rights() {
    let authority = Authority::new();
    let (cert, key) = authority.issue("redis", "127.0.0.1");
    let own = Some(authority.issue("daemon", "us-east"));
    let ca = authority.ca();
    let files =
        ["--tls-cert-file", text(&cert), "--tls-key-file", text(&key), "--tls-ca-cert-file", text(&ca)];
    let (cluster, ports) = Cluster::start_with_tls(&files).await;
    let rights = documented_rights();
    let rights: Vec<&str> = rights.iter().map(String::as_str).chain(["+cluster|slots"]).collect();
    for master in &cluster.masters {
        let _: () = command(&master.admin().await, "ACL", &rights).await;
    }
    // One that evicts is one too many.
    let evicting = cluster.masters[1].admin().await;
    let _: () = command(&evicting, "CONFIG", &["SET", "maxmemory", "100mb"]).await;
    let _: () = command(&evicting, "CONFIG", &["SET", "maxmemory-policy", "volatile-lru"]).await;

    let url = format!("rediss-cluster://quorate:right-one@127.0.0.1:{}", ports[2]);
    let tls = Some(ClientFiles { ca, own });
    let config = RedisConfig { url, tls, ..cluster.masters[0].config() };
    let (store, _) = full(&config).await;
    let worker = worker(&store).await;
    for shard in 0..12 {
        assert_eq!(settled(&worker, on_shard(shard, 10), 4).await, (true, 6));
    }
    let health = store.health();
    assert_eq!(health.down, None);
    assert!(health.evicts.is_some_and(|why| why.contains("volatile-lru")), "one of three evicts");
    for master in &cluster.masters {
        let log: Vec<fred::types::Value> = command(&master.admin().await, "ACL", &["LOG"]).await;
        let denied = log.iter().map(|entry| format!("{entry:?}")).filter(|e| !e.contains("client"));
        assert_eq!(denied.collect::<Vec<_>>(), [""; 0]);
        let keys: i64 = command(&master.admin().await, "DBSIZE", &[]).await;
        assert!(keys >= 8, "four shards' own key and bucket: {keys}");
    }
}

/// The commands that docs/operations.md says the daemon's user needs: with them it does everything, and there is none that it does
/// not use.
#[tokio::test]
async fn a_user_with_the_documented_rights_can_do_everything_and_nothing_else() {
    let rights = documented_rights();
    let redis = Redis::start(&[]).await;
    let admin = redis.admin().await;
    let args: Vec<&str> = rights.iter().map(String::as_str).collect();
    let _: () = command(&admin, "ACL", &args).await;
    let _: () = command(&admin, "CONFIG", &["RESETSTAT"]).await;
    let url = format!("redis://quorate:right-one@127.0.0.1:{}", redis.port);
    let store = RedisStore::connect(&RedisConfig { url, ..redis.config() }).unwrap();
    let metrics = Metrics::new("us-east");
    store.measure(metrics.store.clone());
    session(&store, None).await;
    suite(&AnyStore::Redis(store.clone())).await;
    assert_eq!(store.health().down, None);
    until("keys are sampled", || async { metrics.encode_plain().unwrap().contains("\nquorate_redis_keys{") })
        .await;
    let log: Vec<fred::types::Value> = command(&admin, "ACL", &["LOG"]).await;
    // (fred asks for the number of its connection, and does without.)
    let denied: Vec<String> =
        log.iter().map(|entry| format!("{entry:?}")).filter(|e| !e.contains("client")).collect();
    assert!(denied.is_empty(), "{denied:?}");
    let stats: String = command(&admin, "INFO", &["commandstats"]).await;
    for right in args.iter().filter_map(|arg| arg.strip_prefix('+')) {
        let used = stats.contains(&format!("cmdstat_{right}:"));
        // What only happens now and then: a database other than 0; scripts that have been forgotten.
        assert!(used || ["select", "eval"].contains(&right), "{right} is not needed");
    }
    let other = redis.admin().await;
    let _: () = command(&other, "AUTH", &["quorate", "right-one"]).await;
    for forbidden in [&["GET", "somebody-elses"][..], &["KEYS", "*"], &["FLUSHALL"], &["CONFIG", "GET", "*"]]
    {
        let args: Vec<fred::types::Value> = forbidden[1..].iter().map(|a| (*a).into()).collect();
        let name = fred::types::CustomCommand::new(forbidden[0], None::<u16>, false);
        let answer: Result<fred::types::Value, _> =
            fred::interfaces::ClientLike::custom(&other, name, args).await;
        assert!(answer.unwrap_err().details().starts_with("NOPERM"), "{forbidden:?}");
    }
}
