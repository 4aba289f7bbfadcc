//! A real `quorate serve` process.

use super::client::Api;
use super::clock::WrongClock;
use super::process::Process;
use super::{eventually, free_address, hold};
use rustix::process::Signal;
use serde_json::Value;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Output};
use std::time::Duration;
use tempfile::TempDir;

/// The binary under test.
pub const QUORATE: &str = env!("CARGO_BIN_EXE_quorate");

/// A daemon must be ready within this (a first election across a WAN takes seconds).
pub const READY_WITHIN: Duration = Duration::from_secs(30);
const STOP_WITHIN: Duration = Duration::from_secs(15);

/// What differs between the daemons of the tests; the rest of their `region.yaml` is the same.
#[derive(Clone)]
pub struct Settings {
    /// Its region.
    pub region: String,
    /// Region and peer URL of every voter, as this daemon is to reach them.
    pub regions: Vec<(String, String)>,
    /// Those of them that serve nobody.
    pub witnesses: Vec<String>,
    /// Its Redis; `None`: the embedded store.
    pub redis: Option<String>,
    /// `policies.yaml`
    pub policies: String,
    /// More lines for `region.yaml`.
    pub more: String,
    /// Environment variables.
    pub env: Vec<(String, String)>,
    /// Where it listens for peers (links have to know before it runs).
    pub peer: SocketAddr,
    /// A wall clock of its own, off by so many seconds.
    pub clock: Option<i64>,
}

impl Settings {
    /// A cluster of one region.
    pub fn alone(redis: &str, policies: &str) -> Self {
        let peer = free_address();
        Self {
            region: "solo".to_owned(),
            regions: vec![("solo".to_owned(), format!("http://{peer}"))],
            witnesses: Vec::new(),
            redis: Some(redis.to_owned()),
            policies: policies.to_owned(),
            more: String::new(),
            env: Vec::new(),
            peer,
            clock: None,
        }
    }
}

/// A daemon, its folder (which outlives restarts) and its addresses (which stay the same).
pub struct Daemon {
    settings: Settings,
    http: SocketAddr,
    grpc: SocketAddr,
    admin: SocketAddr,
    clock: Option<WrongClock>,
    process: Option<Process>,
    /// Dropped last: the process' log is in it.
    folder: TempDir,
}

impl Daemon {
    /// Writes the configuration; nothing runs yet.
    pub fn down(settings: Settings) -> Self {
        let prefix = format!("quorate-{}-", settings.region);
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir().expect("a temporary folder");
        let (http, grpc, admin) = (free_address(), free_address(), free_address());
        let clock = settings.clock.map(|offset| WrongClock::new(folder.path(), offset));
        let daemon = Self { settings, folder, http, grpc, admin, clock, process: None };
        daemon.write_config();
        daemon
    }

    /// Starts one and waits until it is ready.
    pub async fn start(settings: Settings) -> Self {
        let mut daemon = Self::down(settings);
        daemon.spawn();
        daemon.ready().await;
        daemon
    }

    /// Starts the process without waiting for it.
    pub fn spawn(&mut self) {
        let mut command = Command::new(QUORATE);
        command.arg("serve").arg("--config").arg(self.config_file());
        command.env("QUORATE_LOG", "info,quorate=debug").envs(self.settings.env.iter().cloned());
        if let Some(clock) = &self.clock {
            clock.give_to(&mut command);
        }
        let name = format!("quorate-{}", self.settings.region);
        self.process = Some(Process::start(&name, self.folder.path(), &mut command));
    }

    /// Steps the wall clock of one that was started with a clock of its own.
    pub fn set_clock(&self, offset_seconds: i64) {
        self.clock.as_ref().expect("it has a clock of its own").set(offset_seconds);
    }

    /// Waits until `/readyz` says so.
    pub async fn ready(&mut self) {
        let what = format!("{} is ready", self.settings.region);
        let admin = self.admin();
        let process = self.process.as_mut().expect("the daemon was started");
        eventually(&what, READY_WITHIN, || {
            let ended = process.has_ended();
            let admin = &admin;
            async move {
                assert!(ended.is_none(), "quorate serve ended by itself: {ended:?}");
                let answer = admin.get("/readyz").await?;
                hold(answer.status == 200, || format!("{} {}", answer.status, answer.text))
            }
        })
        .await;
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// SIGHUP: reads again what can change live, from a `region.yaml` with these lines more.
    pub fn reload(&mut self, more: &str) {
        more.clone_into(&mut self.settings.more);
        self.write_config();
        self.process.as_ref().expect("the daemon was started").signal(Signal::HUP);
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.as_ref().expect("the daemon was started").signal(signal);
    }

    /// SIGTERM: drains and ends.
    pub async fn stop(&mut self) -> ExitStatus {
        let mut process = self.process.take().expect("the daemon was started");
        process.signal(Signal::TERM);
        process.ended(STOP_WITHIN).await
    }

    /// Waits until it ends by itself.
    #[allow(dead_code, reason = "not for the benches")]
    pub async fn ended(&mut self, deadline: Duration) -> ExitStatus {
        self.process.as_mut().expect("the daemon was started").ended(deadline).await
    }

    /// Asks its HTTP listener.
    pub fn api(&self) -> Api {
        Api::new(self.http)
    }

    /// Asks its admin listener.
    pub fn admin(&self) -> Api {
        Api::new(self.admin)
    }

    /// `http://...` of the gRPC listener.
    pub fn grpc_url(&self) -> String {
        format!("http://{}", self.grpc)
    }

    /// Where HTTP listens.
    #[allow(dead_code, reason = "not for the benches")]
    pub fn http_address(&self) -> SocketAddr {
        self.http
    }

    /// Where gRPC listens.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc
    }

    /// `/v1/state`
    pub async fn state(&self) -> Result<Value, String> {
        let answer = self.admin().get("/v1/state").await?;
        hold(answer.status == 200, || format!("/v1/state: {} {}", answer.status, answer.text))?;
        Ok(answer.json())
    }

    /// The leader's region, as this daemon sees it.
    pub async fn leader(&self) -> Result<String, String> {
        let state = self.state().await?;
        let leader = state.pointer("/raft/leader").or_else(|| state.pointer("/leader"));
        leader.and_then(Value::as_str).map(str::to_owned).ok_or_else(|| "no leader is known".to_owned())
    }

    /// CPU time that it has used so far.
    #[allow(dead_code, reason = "for the benches")]
    pub fn cpu(&self) -> Duration {
        self.process.as_ref().map(Process::cpu).unwrap_or_default()
    }

    /// Memory that it has in use, in bytes.
    #[allow(dead_code, reason = "not for the benches")]
    pub fn memory(&self) -> u64 {
        self.process.as_ref().map(Process::memory).unwrap_or_default()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        self.process.as_ref().map(Process::log).unwrap_or_default()
    }

    /// Where it listens for other regions.
    pub fn peer_url(&self) -> String {
        format!("http://{}", self.settings.peer)
    }

    /// Where it keeps its state.
    pub fn data_dir(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Its `region.yaml`
    pub fn config_file(&self) -> PathBuf {
        self.folder.path().join("region.yaml")
    }

    fn write_config(&self) {
        let s = &self.settings;
        let mut yaml = String::new();
        let _ = writeln!(yaml, "region: {}", s.region);
        let witness = s.witnesses.contains(&s.region);
        yaml.push_str("listen:\n");
        if !witness {
            let _ = writeln!(yaml, "  http: {}\n  grpc: {}", self.http, self.grpc);
        }
        let _ = writeln!(yaml, "  peer: {}\n  admin: {}", s.peer, self.admin);
        match &s.redis {
            _ if witness => {}
            Some(url) => {
                // Twenty milliseconds, the default, are for a machine that is not also building and running all of this.
                let _ = writeln!(yaml, "store:\n  redis:\n    url: {url}\n    timeout: 500ms");
            }
            None => yaml.push_str("store:\n  embedded: {}\n"),
        }
        let _ = writeln!(yaml, "data_dir: {}", self.data_dir().display());
        yaml.push_str("cluster:\n  name: test\n  regions:\n");
        for (region, url) in &s.regions {
            let _ = writeln!(yaml, "    {region}: {url}");
        }
        let _ = writeln!(yaml, "  witnesses: [{}]", s.witnesses.join(", "));
        yaml.push_str("policies: policies.yaml\n");
        yaml.push_str(&s.more);
        std::fs::write(self.config_file(), yaml).expect("region.yaml is written");
        std::fs::write(self.folder.path().join("policies.yaml"), &s.policies)
            .expect("policies.yaml is written");
    }
}

/// Runs a `quorate` command to its end.
pub async fn quorate(args: &[&str]) -> Output {
    quorate_within(args, Duration::from_secs(30)).await
}

/// The same, of one that takes its time.
pub async fn quorate_within(args: &[&str], time: Duration) -> Output {
    let run = tokio::process::Command::new(QUORATE).args(args).stdin(std::process::Stdio::null()).output();
    let output = tokio::time::timeout(time, run).await;
    output.unwrap_or_else(|_| panic!("quorate {args:?} does not end")).expect("quorate starts")
}
