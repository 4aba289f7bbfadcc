//! A real `redis-server`, and the few words that are spoken with it.

use super::clock::WrongClock;
use super::ground::Place;
use super::process::Process;
use super::scenario::{Back, Persistence};
use anyhow::{Context as _, bail};
use rustix::process::Signal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::Instant;

const START_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);
const SNAPSHOT: &str = "dump.rdb";
const SAVED: &str = "saved.rdb";

/// A Redis. Its folder outlives restarts.
#[derive(Debug)]
pub struct Redis {
    /// Names its log.
    pub name: String,
    /// Where it runs and listens.
    pub place: Place,
    /// Where its data and its log are.
    pub folder: PathBuf,
    /// What it keeps on disk.
    pub persistence: Persistence,
    /// A wall clock of its own.
    pub clock: Option<WrongClock>,
    /// Whom it follows.
    pub master: Option<SocketAddr>,
    /// While it runs.
    pub process: Option<Process>,
}

impl Redis {
    /// Starts it (again) and waits until it answers.
    ///
    /// # Errors
    /// It does not.
    pub async fn up(&mut self) -> anyhow::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let mut command = self.place.command("redis-server");
        let SocketAddr::V4(address) = self.place.address else { bail!("redis-server at an IPv6 address") };
        command.args(["--port", &address.port().to_string(), "--bind", &address.ip().to_string()]);
        command.args(["--protected-mode", "no", "--dbfilename", SNAPSHOT, "--dir"]).arg(&self.folder);
        command.args(match self.persistence {
            Persistence::None => ["--save", "", "--appendonly", "no"],
            Persistence::Rdb => ["--save", "1 1", "--appendonly", "no"],
            Persistence::Aof => ["--save", "", "--appendonly", "yes"],
        });
        if let Some(master) = self.master {
            command.arg("--replicaof").args([master.ip().to_string(), master.port().to_string()]);
        }
        self.start(command).await
    }

    async fn start(&mut self, mut command: Command) -> anyhow::Result<()> {
        if let Some(clock) = &self.clock {
            clock.give_to(&mut command);
        }
        self.process = Some(Process::start(&self.name, &self.folder, command)?);
        let end = Instant::now() + START_WITHIN;
        loop {
            match self.ask(&["PING"]).await {
                Ok(pong) if pong == "PONG" => return Ok(()),
                Ok(other) if Instant::now() >= end => bail!("{} answers {other:?} to PING", self.name),
                Err(error) if Instant::now() >= end => {
                    return Err(
                        error.context(format!("{} does not answer within {START_WITHIN:?}", self.name))
                    );
                }
                _ => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts it again with what is said.
    ///
    /// # Errors
    /// It does not start, or the snapshot is not there.
    pub async fn back(&mut self, with: Back) -> anyhow::Result<()> {
        if with != Back::Kept {
            for file in [SNAPSHOT, "appendonlydir"] {
                let path = self.folder.join(file);
                let gone =
                    if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
                if let Err(error) = gone
                    && error.kind() != std::io::ErrorKind::NotFound
                {
                    return Err(error).with_context(|| format!("cannot remove {}", path.display()));
                }
            }
        }
        if with == Back::Saved {
            std::fs::copy(self.folder.join(SAVED), self.folder.join(SNAPSHOT))
                .context("no snapshot was saved")?;
        }
        self.up().await
    }

    /// Writes a snapshot and keeps a copy.
    ///
    /// # Errors
    /// It does not.
    pub async fn save(&self) -> anyhow::Result<()> {
        let end = Instant::now() + ANSWER_WITHIN;
        // While it is saving by itself it refuses.
        while let Err(error) = self.ask(&["SAVE"]).await {
            if Instant::now() >= end {
                return Err(error);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        std::fs::copy(self.folder.join(SNAPSHOT), self.folder.join(SAVED))
            .context("no snapshot was written")?;
        Ok(())
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// It does not run.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        self.process.as_ref().with_context(|| format!("{} does not run", self.name))?.signal(signal)
    }

    /// Sends one command; its answer as text.
    ///
    /// # Errors
    /// No answer in time, or an error.
    pub async fn ask(&self, words: &[&str]) -> anyhow::Result<String> {
        let asked = tokio::time::timeout(ANSWER_WITHIN, ask(self.place.address, words)).await;
        asked.with_context(|| format!("{}: no answer to {words:?}", self.name))?
    }
}

/// One command of Redis' protocol on a connection of its own.
async fn ask(address: SocketAddr, words: &[&str]) -> anyhow::Result<String> {
    let mut stream = BufReader::new(TcpStream::connect(address).await?);
    let mut command = format!("*{}\r\n", words.len());
    for word in words {
        command.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    stream.write_all(command.as_bytes()).await?;
    let mut line = String::new();
    stream.read_line(&mut line).await?;
    let (kind, rest) = line.trim_end().split_at_checked(1).context("an empty answer")?;
    match kind {
        "+" | ":" => Ok(rest.to_owned()),
        "$" => {
            let Ok(length) = rest.parse::<usize>() else { return Ok(String::new()) };
            let mut text = vec![0; length];
            stream.read_exact(&mut text).await?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        }
        _ => bail!("{words:?}: {rest}"),
    }
}
