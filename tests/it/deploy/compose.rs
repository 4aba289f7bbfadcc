//! The image, the compose file and what they mount, and the script that makes keys.

use crate::support::daemon::{Daemon, QUORATE, Settings};
use crate::support::free_address;
use crate::support::tools::{file, root, run, tool, try_to_run, yaml};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const REGIONS: [&str; 3] = ["us-east", "eu-west", "ap-south"];

#[test]
fn hadolint_has_nothing_to_say_about_the_dockerfile() {
    let hadolint = tool("hadolint/bin/hadolint");
    run(Command::new(&hadolint).args(["--no-color", "deploy/Dockerfile"]));
    let folder = tempfile::tempdir().expect("a folder");
    let wrong = folder.path().join("Dockerfile");
    std::fs::write(&wrong, "FROM debian:latest\nRUN cd /tmp && sudo apt-get install x\n").expect("a file");
    assert!(!try_to_run(Command::new(&hadolint).arg(&wrong)).0, "it does look");

    let text = file("deploy/Dockerfile");
    for copied in file("deploy/Dockerfile.dockerignore").lines().filter_map(|line| line.strip_prefix('!')) {
        assert!(root().join(copied).exists(), "{copied}");
    }
    // What the health check runs is a command, and the image's variable is one that the command reads.
    assert!(text.contains(r#"CMD ["quorate", "status"]"#) && text.contains("QUORATE_CONFIG="));
    assert!(run(Command::new(QUORATE).args(["serve", "--help"])).contains("QUORATE_CONFIG"));
}

#[test]
fn compose_takes_the_file_and_it_fits_together() {
    let compose = resolved_compose();
    let services = compose["services"].as_object().expect("services");
    let names: Vec<&str> = services.keys().map(String::as_str).collect();
    for region in REGIONS {
        for name in [region.to_owned(), format!("redis-{region}"), format!("envoy-{region}")] {
            assert!(names.contains(&name.as_str()), "{name} in {names:?}");
        }
    }
    for (name, service) in services {
        for volume in service["volumes"].as_array().into_iter().flatten() {
            let source = volume["source"].as_str().expect("a source");
            if volume["type"] == "bind" {
                assert!(Path::new(source).exists(), "{name} mounts {source}");
            } else {
                assert!(compose["volumes"][source].is_object(), "{name} mounts {source}");
            }
        }
        for port in service["ports"].as_array().into_iter().flatten() {
            assert_eq!(port["host_ip"], "127.0.0.1", "{name}: nothing is open to others");
        }
        assert!(service["cap_drop"] == serde_json::json!(["ALL"]), "{name}");
        assert!(service["mem_limit"].is_string(), "{name} has a bound");
    }
    for (i, region) in REGIONS.iter().enumerate() {
        let service = &services[*region];
        let networks: Vec<_> = service["networks"].as_object().expect("networks").keys().collect();
        assert_eq!(
            networks.len(),
            2,
            "its region's and `wan`, or a partition would not be one: {networks:?}"
        );
        let published: Vec<String> = service["ports"]
            .as_array()
            .expect("ports")
            .iter()
            .map(|p| format!("{}:{}", p["published"].as_str().expect("a port"), p["target"]))
            .collect();
        // The same as `quorate dev`.
        let wanted = [(0, 8080), (1, 8081), (3, 8083)].map(|(n, target)| format!("80{i}{n}:{target}"));
        assert_eq!(published, wanted, "{region}");
        let redis = services[&format!("redis-{region}")]["command"].to_string();
        assert!(redis.contains("noeviction") && redis.contains("--maxmemory"), "{redis}");
    }
    let wan = services.iter().filter(|(_, s)| s["networks"].get("wan").is_some());
    assert_eq!(wan.count(), 3, "daemons alone are on the line between regions");
    assert_eq!(compose["networks"]["wan"]["internal"], true);
}

#[test]
fn what_the_compose_file_mounts_is_right() {
    let compose = resolved_compose();
    let region = yaml(&file("deploy/compose/region.yaml"));
    for name in REGIONS {
        let said = validate("deploy/compose/region.yaml", name);
        assert!(said.contains("valid"), "{said}");
        let service = &compose["services"][name];
        let container = service["container_name"].as_str().expect("a name that outlives a cut line");
        assert_eq!(region["cluster"]["regions"][name], format!("https://{container}:8082"));
        let certificates = compose["services"]["certificates"]["command"].to_string();
        assert!(certificates.contains(&format!("{name}:{container}")), "{certificates}");
        let prometheus = yaml(&file("deploy/prometheus/prometheus.yaml"));
        let targets = prometheus["scrape_configs"][0]["static_configs"][0]["targets"].to_string();
        assert!(targets.contains(&format!("{container}:8083")), "{targets}");
        assert!(service["networks"][name]["aliases"].to_string().contains("quorate"), "Envoy's name for it");
        let redis = &compose["services"][format!("redis-{name}")];
        assert!(redis["networks"][name]["aliases"].to_string().contains("redis"), "the daemon's name for it");
    }
    // What sed is to change in deploy/envoy.yaml is there.
    let (envoy, command) =
        (file("deploy/envoy.yaml"), compose["services"]["envoy-us-east"]["command"].to_string());
    let patterns: Vec<&str> =
        command.split("'s/").skip(1).filter_map(|rest| rest.split('/').next()).collect();
    assert_eq!(patterns.len(), 3, "{command}");
    for pattern in patterns {
        assert!(envoy.contains(pattern), "{pattern}");
    }
    yaml(&file("deploy/compose/service.yaml"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn regions_trust_each_other_with_the_keys_that_the_script_makes() {
    let folder = tempfile::tempdir().expect("a folder");
    let keys = folder.path();
    make_keys(keys, &["us-east:localhost", "eu-west:localhost,eu-west.example"]);
    let before = std::fs::read(keys.join("us-east/region.crt")).expect("a certificate");
    make_keys(keys, &["us-east:localhost", "ap-south:localhost"]);
    let after = std::fs::read(keys.join("us-east/region.crt")).expect("a certificate");
    assert_eq!(before, after, "what is there stays");
    let names = run(Command::new("openssl")
        .args(["x509", "-noout", "-ext", "subjectAltName", "-in"])
        .arg(keys.join("eu-west/region.crt")));
    assert!(names.contains("DNS:localhost, DNS:eu-west.example"), "{names}");

    let peers = REGIONS.map(|name| (name, free_address()));
    let regions: Vec<(String, String)> = peers
        .iter()
        .map(|(name, address)| ((*name).to_owned(), format!("https://localhost:{}", address.port())))
        .collect();
    let mut daemons: Vec<Daemon> = peers
        .iter()
        .map(|(name, peer)| {
            let own = keys.join(name);
            let file = |name: &str| own.join(name).display().to_string();
            let policies = "policies: [ { name: p, domain: d, match: [ { key: k } ], limit: { rate: 1/s }, mode: strict } ]";
            let mut settings = Settings::alone("", policies);
            settings.region = (*name).to_owned();
            settings.regions.clone_from(&regions);
            settings.redis = None;
            settings.peer = *peer;
            settings.more = format!(
                "peer_tls: {{ cert: '{}', key: '{}', ca: '{}' }}\nadmin_token_file: '{}'\n",
                file("region.crt"),
                file("region.key"),
                file("ca.crt"),
                file("admin-token")
            );
            let mut daemon = Daemon::down(settings);
            daemon.spawn();
            daemon
        })
        .collect();
    for daemon in &mut daemons {
        daemon.ready().await;
    }
}

/// The compose file as Docker Compose reads it.
fn resolved_compose() -> Value {
    let mut command = Command::new(tool("compose/compose/docker-compose"));
    command
        .args(["-f", "deploy/compose.yaml", "config", "--format", "json"])
        .env("DOCKER_HOST", "unix:///nowhere");
    serde_json::from_str(&run(&mut command)).expect("JSON")
}

pub fn make_keys(folder: &Path, regions: &[&str]) {
    let script: PathBuf = root().join("deploy/certificates.sh");
    run(Command::new("sh").arg(script).arg(folder).args(regions));
}

/// `quorate validate`, as the daemon of this region would read the file.
pub fn validate(path: &str, region: &str) -> String {
    let token = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(token.path(), "0123456789abcdef0123456789abcdef").expect("a token");
    let mut command = Command::new(QUORATE);
    command.args(["validate", path]).env("QUORATE_REGION", region);
    // The only file that it reads besides: it is there once keys have been made.
    run(command.env("QUORATE_ADMIN_TOKEN_FILE", token.path()))
}
