//! The systemd unit, and what the daemon tells systemd: a real socket in systemd's place.

use crate::support::daemon::{Daemon, QUORATE, Settings};
use crate::support::redis::Redis;
use crate::support::tools::{file, root, run, try_to_run};
use crate::support::{eventually, hold};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(30);
const POLICIES: &str =
    "policies: [ { name: p, domain: d, match: [ { key: k } ], limit: { rate: 1/s }, mode: strict } ]\n";

/// What systemd has heard.
struct Heard {
    socket: UnixDatagram,
    messages: Vec<String>,
}

impl Heard {
    fn at(path: &std::path::Path) -> Self {
        let socket = UnixDatagram::bind(path).expect("a socket");
        socket.set_nonblocking(true).expect("a socket that does not block");
        Self { socket, messages: Vec::new() }
    }

    /// Waits for a message with this line.
    async fn wait_for(&mut self, line: &str) {
        eventually(&format!("systemd hears {line}"), SOON, || {
            let mut buffer = [0; 4096];
            while let Ok(n) = self.socket.recv(&mut buffer) {
                self.messages.push(String::from_utf8_lossy(&buffer[..n]).into_owned());
            }
            let heard = self.messages.iter().any(|m| m.lines().any(|l| l.starts_with(line)));
            let done = hold(heard, || format!("heard {:?}", self.messages));
            async move { done }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_hears_when_the_daemon_is_ready_and_why_it_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let mut heard = Heard::at(&path);
    let mut redis = Redis::down();
    let mut settings = Settings::alone(&redis.url(), POLICIES);
    settings.env =
        vec![("NOTIFY_SOCKET".into(), path.display().to_string()), ("WATCHDOG_USEC".into(), "500000".into())];
    let mut daemon = Daemon::down(settings);
    daemon.spawn();
    heard.wait_for("STATUS=not ready: store: ").await;
    heard.wait_for("EXTEND_TIMEOUT_USEC=").await;
    heard.wait_for("WATCHDOG=1").await;
    assert!(!heard.messages.iter().any(|m| m.contains("READY=1")), "{:?}", heard.messages);

    redis.up().await;
    heard.wait_for("READY=1").await;
    heard.wait_for("STATUS=ready").await;
    daemon.ready().await;

    heard.messages.clear();
    daemon.signal(Signal::HUP);
    heard.wait_for("RELOADING=1").await;
    heard.wait_for("MONOTONIC_USEC=").await;
    heard.wait_for("READY=1").await;
    heard.wait_for("WATCHDOG=1").await;
    assert!(!heard.messages.iter().any(|m| m.contains("EXTEND_TIMEOUT")), "{:?}", heard.messages);
    assert!(daemon.stop().await.success());
    heard.wait_for("STOPPING=1").await;
}

#[test]
fn the_unit_is_one_that_systemd_takes_and_finds_safe() {
    let folder = tempfile::tempdir().expect("a folder");
    let unit = folder.path().join("quorate.service");
    let text = file("deploy/quorate.service");
    assert!(text.contains("Type=notify") && text.contains("WatchdogSec=30"));
    // systemd looks whether the program is there.
    std::fs::write(&unit, text.replace("/usr/bin/quorate", QUORATE)).expect("a unit");
    let said = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit));
    assert!(!said.contains("quorate.service:"), "{said}");
    let offline = ["security", "--offline=yes", "--no-pager"];
    run(Command::new("systemd-analyze").args(offline).arg("--threshold=20").arg(&unit));
    // The threshold is one that can be missed.
    std::fs::write(&unit, text.replace("SystemCallFilter", "# ").replace("Protect", "# ")).expect("a unit");
    let (safe, said) =
        try_to_run(Command::new("systemd-analyze").args(offline).arg("--threshold=20").arg(&unit));
    assert!(!safe, "{said}");
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().expect("a folder");
    run(Command::new(QUORATE).arg("man").arg(folder.path()));
    let pages: BTreeSet<String> = std::fs::read_dir(folder.path())
        .expect("pages")
        .map(|page| page.expect("a page").file_name().to_string_lossy().into_owned())
        .collect();
    let help = run(Command::new(QUORATE).arg("--help"));
    let commands =
        help.split_once("Commands:").expect("commands").1.split_once("Options:").expect("options").0;
    let commands: Vec<_> = commands.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"serve") && !commands.contains(&"man"), "{commands:?}");
    for command in commands {
        assert!(pages.contains(&format!("quorate-{command}.1")), "{command}: {pages:?}");
    }
    let page = std::fs::read_to_string(folder.path().join("quorate.1")).expect("quorate.1");
    for section in ["NAME", "EXIT STATUS", "SIGNALS", "ENVIRONMENT", "FILES"] {
        assert!(page.contains(section), "{section}");
    }
}

#[test]
fn the_debian_package_is_made_of_files_that_are_there() {
    let manifest = file("Cargo.toml");
    let section = manifest.split_once("[package.metadata.deb]").expect("the section").1;
    let assets = section.split_once("assets = [").expect("assets").1;
    let sources: Vec<_> =
        assets.lines().filter_map(|l| l.trim().strip_prefix("[\"")?.split('"').next()).collect();
    assert!(sources.len() > 5, "{sources:?}");
    for source in sources.into_iter().filter(|source| !source.starts_with("target/")) {
        let there = match source.strip_suffix("/*.md") {
            Some(folder) => std::fs::read_dir(root().join(folder)).is_ok(),
            None => root().join(source).is_file(),
        };
        assert!(there, "{source}");
    }
    for script in ["postinst", "postrm"] {
        let text = file(&format!("deploy/debian/{script}"));
        assert!(text.contains("#DEBHELPER#"), "{script}: cargo-deb puts systemd's part there");
        run(Command::new("sh").arg("-n").arg(format!("deploy/debian/{script}")));
    }
    // The user of the unit is the one that the package makes.
    assert!(file("deploy/quorate.service").contains("\nUser=quorate\n"));
    assert!(file("deploy/debian/postinst").contains("adduser --system --group"));
}
