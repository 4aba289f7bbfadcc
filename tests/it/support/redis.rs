//! A real `redis-server` on its own port and folder.

use super::clock::WrongClock;
use super::process::Process;
use super::{eventually, free_address};
use rustix::process::Signal;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const START_WITHIN: Duration = Duration::from_secs(10);

/// A Redis. Its folder outlives restarts; it keeps no data over one unless it is told to [`Redis::save`].
pub struct Redis {
    address: SocketAddr,
    /// Arguments of its own.
    args: Vec<String>,
    process: Option<Process>,
    clock: Option<WrongClock>,
    /// Dropped last: the process' log is in it.
    folder: TempDir,
}

impl Redis {
    /// Reserves an address; nothing runs yet.
    pub fn down() -> Self {
        let folder = tempfile::Builder::new().prefix("quorate-redis-").tempdir().expect("a temporary folder");
        Self { address: free_address(), args: Vec::new(), folder, process: None, clock: None }
    }

    /// Starts one.
    pub async fn start() -> Self {
        let mut redis = Self::down();
        redis.up().await;
        redis
    }

    /// Starts one with these arguments besides.
    #[allow(dead_code, reason = "not for the benches")]
    pub async fn start_as(args: &[&str]) -> Self {
        let mut redis = Self::down();
        redis.args = args.iter().map(|arg| (*arg).to_owned()).collect();
        redis.up().await;
        redis
    }

    /// One whose wall clock is off by so many seconds; [`Redis::set_clock`] steps it.
    pub async fn start_with_clock(offset_seconds: i64) -> Self {
        let mut redis = Self::down();
        redis.clock = Some(WrongClock::new(redis.folder.path(), offset_seconds));
        redis.up().await;
        redis
    }

    /// Starts it again (or for the first time) and waits until it answers.
    pub async fn up(&mut self) {
        let mut command = Command::new("redis-server");
        command
            .args(["--port", &self.address.port().to_string()])
            .args(["--bind", "127.0.0.1"])
            .args(["--save", ""])
            .args(["--appendonly", "no"])
            .args(["--dbfilename", "dump.rdb"])
            .arg("--dir")
            .arg(self.folder.path())
            .args(&self.args);
        if let Some(clock) = &self.clock {
            clock.give_to(&mut command);
        }
        self.process = Some(Process::start("redis", self.folder.path(), &mut command));
        eventually("redis-server answers", START_WITHIN, || async {
            match self.try_cli(&["PING"]).await {
                Ok(pong) if pong == "PONG" => Ok(()),
                Ok(other) | Err(other) => Err(other),
            }
        })
        .await;
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Freezes it: connections stay open, nothing is answered.
    pub fn freeze(&self) {
        self.running().signal(Signal::STOP);
    }

    /// Lets it run again.
    pub fn thaw(&self) {
        self.running().signal(Signal::CONT);
    }

    /// Steps the wall clock of one that was started with a clock of its own.
    pub fn set_clock(&self, offset_seconds: i64) {
        self.clock.as_ref().expect("it has a clock of its own").set(offset_seconds);
    }

    /// Writes its data to disk now, so that a restart brings it back as it was.
    pub async fn save(&self) {
        assert_eq!(self.cli(&["SAVE"]).await, "OK");
    }

    /// CPU time that it has used so far.
    #[allow(dead_code, reason = "for the benches")]
    pub fn cpu(&self) -> Duration {
        self.running().cpu()
    }

    /// Sends one command, as `redis-cli` does, and returns what it prints.
    pub async fn cli(&self, args: &[&str]) -> String {
        self.try_cli(args).await.unwrap_or_else(|why| panic!("redis-cli {args:?}: {why}"))
    }

    /// Every key that it holds.
    pub async fn keys(&self) -> Vec<String> {
        self.cli(&["--scan"]).await.lines().map(str::to_owned).collect()
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `redis://...`
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// The same, where a server may have reasons not to answer.
    pub async fn try_cli(&self, args: &[&str]) -> Result<String, String> {
        cli(self.address, args).await
    }

    fn running(&self) -> &Process {
        self.process.as_ref().expect("redis-server is running")
    }
}

/// Sends one command to whatever speaks Redis' protocol there, as `redis-cli` does, and returns what it prints.
pub async fn cli(server: SocketAddr, args: &[&str]) -> Result<String, String> {
    let output = tokio::process::Command::new("redis-cli")
        .args(["-h", "127.0.0.1", "-p", &server.port().to_string(), "--raw"])
        .args(args)
        .output()
        .await
        .map_err(|e| format!("redis-cli does not start: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).trim_end().to_owned();
    if output.status.success() {
        Ok(text)
    } else {
        Err(format!("{text} {}", String::from_utf8_lossy(&output.stderr)))
    }
}
