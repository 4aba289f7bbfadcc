//! A `redis-server` for one region of `quorate dev --redis spawn`.

use anyhow::{Context as _, bail};
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::Instant;

const STARTS_WITHIN: Duration = Duration::from_secs(10);

/// A server, killed when dropped.
pub struct Server {
    addr: SocketAddr,
    _process: Child,
}

impl Server {
    /// Starts one, and waits until it accepts connections.
    pub async fn start(addr: SocketAddr, dir: &Path) -> anyhow::Result<Self> {
        if TcpStream::connect(addr).await.is_ok() {
            bail!("something listens on {addr} already; choose another --base-port");
        }
        std::fs::create_dir_all(dir).with_context(|| format!("{}: cannot be made", dir.display()))?;
        let mut process = Command::new("redis-server")
            .args(["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--hz", "100"])
            .args(["--bind", &addr.ip().to_string(), "--port", &addr.port().to_string()])
            .arg("--dir")
            .arg(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for this process: it stops its regions first, and then the server.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("--redis spawn needs a redis-server in PATH (Debian: apt-get install redis-server)")?;
        let began = Instant::now();
        while TcpStream::connect(addr).await.is_err() {
            if let Some(status) = process.try_wait()? {
                bail!("redis-server on {addr} ended at once ({status})");
            }
            if began.elapsed() > STARTS_WITHIN {
                bail!("redis-server on {addr} does not accept connections");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { addr, _process: process })
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }
}
