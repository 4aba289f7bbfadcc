//! A real `quorate serve` process.

use super::clock::WrongClock;
use super::ground::Place;
use super::process::Process;
use anyhow::{Context as _, bail};
use quorate::bugs::Bug;
use rustix::process::Signal;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

const STOP_WITHIN: Duration = Duration::from_secs(20);

/// A daemon. Its folder outlives restarts, and its addresses stay the same.
#[derive(Debug)]
pub struct Daemon {
    /// What it is.
    pub settings: Settings,
    /// A wall clock of its own.
    pub clock: Option<WrongClock>,
    /// While it runs.
    pub process: Option<Process>,
}

/// What a daemon is told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The binary.
    pub binary: PathBuf,
    /// It is this program, with a deliberate bug.
    pub plant: Option<Bug>,
    /// Where its configuration and its log are.
    pub folder: PathBuf,
    /// Where its state is.
    pub data_dir: PathBuf,
    /// Its region.
    pub region: String,
    /// Where it runs, and listens for HTTP.
    pub http: Place,
    /// Where it listens for gRPC ...
    pub grpc: SocketAddr,
    /// ... for other regions ...
    pub peer: SocketAddr,
    /// ... and for operators.
    pub admin: SocketAddr,
    /// Each region and its peer URL, as this daemon is to reach it.
    pub regions: Vec<(String, String)>,
    /// Its Redis, as it is to reach it.
    pub redis: SocketAddr,
    /// How long it waits for that.
    pub redis_timeout: Duration,
    /// The longest round trip between regions.
    pub rtt_max: Duration,
    /// `policies.yaml`
    pub policies: String,
    /// More lines of `region.yaml`.
    pub more: String,
}

impl Daemon {
    /// Writes the configuration; nothing runs yet.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn new(settings: Settings, clock: Option<WrongClock>) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&settings.folder)?;
        std::fs::write(settings.folder.join("region.yaml"), settings.yaml())?;
        std::fs::write(settings.folder.join("policies.yaml"), &settings.policies)?;
        Ok(Self { settings, clock, process: None })
    }

    /// Starts it, without waiting for it.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn up(&mut self) -> anyhow::Result<()> {
        let settings = &self.settings;
        let mut command = settings.http.command(&settings.binary.to_string_lossy());
        match settings.plant {
            None => command.arg("serve"),
            Some(bug) => command.args(["planted", bug.name()]),
        };
        command.arg("--config").arg(settings.folder.join("region.yaml"));
        // What is set here for other runs must not change this one.
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("QUORATE_"))
        {
            command.env_remove(name);
        }
        command.env(
            "QUORATE_LOG",
            std::env::var_os("QUORATE_LOG").unwrap_or_else(|| "info,quorate=debug".into()),
        );
        if let Some(clock) = &self.clock {
            clock.give_to(&mut command);
        }
        self.process =
            Some(Process::start(&format!("quorate-{}", settings.region), &settings.folder, command)?);
        Ok(())
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// SIGTERM: drains and ends.
    ///
    /// # Errors
    /// It does not run, does not end in time, or ends with a failure.
    pub async fn stop(&mut self) -> anyhow::Result<()> {
        let mut process =
            self.process.take().with_context(|| format!("{} does not run", self.settings.region))?;
        process.signal(Signal::TERM)?;
        let status = process.ended(STOP_WITHIN).await?;
        if !status.success() {
            bail!("{}: told to stop, it ended with {status}", self.settings.region);
        }
        Ok(())
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// It does not run.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        self.process
            .as_ref()
            .with_context(|| format!("{} does not run", self.settings.region))?
            .signal(signal)
    }

    /// Has it ended by itself? Says so once.
    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        let status = self.process.as_mut()?.has_ended()?;
        self.process = None;
        Some(status)
    }
}

impl Settings {
    /// Where it logs, over all its restarts.
    #[must_use]
    pub fn log_file(&self) -> PathBuf {
        self.folder.join(format!("{}.log", self.process_name()))
    }

    fn process_name(&self) -> String {
        format!("quorate-{}", self.region)
    }

    fn yaml(&self) -> String {
        let mut yaml = String::new();
        let _ = writeln!(yaml, "region: {}", self.region);
        let _ = writeln!(yaml, "listen:\n  http: {}\n  grpc: {}", self.http.address, self.grpc);
        let _ = writeln!(yaml, "  peer: {}\n  admin: {}", self.peer, self.admin);
        let timeout = self.redis_timeout.as_micros();
        let _ = writeln!(yaml, "store:\n  redis:\n    url: redis://{}\n    timeout: {timeout}us", self.redis);
        let _ = writeln!(yaml, "data_dir: {}", self.data_dir.display());
        let _ =
            writeln!(yaml, "cluster:\n  name: chaos\n  rtt_max: {}us\n  regions:", self.rtt_max.as_micros());
        for (region, url) in &self.regions {
            let _ = writeln!(yaml, "    {region}: {url}");
        }
        yaml.push_str("policies: policies.yaml\n");
        yaml.push_str(&self.more);
        yaml
    }
}
