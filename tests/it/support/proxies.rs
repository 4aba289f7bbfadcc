//! Real proxies that ask `/v1/forward-auth`, with the configurations that users are given.

use super::client::Api;
use super::envoy::serve_hello;
use super::process::Process;
use super::{eventually, free_address, hold};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const START_WITHIN: Duration = Duration::from_secs(20);

/// A proxy between its callers and a service that answers 200 to everything.
pub struct Proxy {
    address: SocketAddr,
    _process: Process,
    _folder: TempDir,
    service: tokio::task::JoinHandle<()>,
}

impl Proxy {
    /// nginx with `deploy/nginx.conf`.
    pub async fn nginx(quorate: SocketAddr) -> Self {
        Self::start("nginx", "nginx.conf", 8_090, quorate, |folder, file| {
            // What a distribution's nginx.conf has round the files that it includes.
            let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
                .map(|kind| format!("{kind}_temp_path {}/{kind};", folder.display()));
            let whole = format!(
                "daemon off; worker_processes 1; pid {0}/pid; error_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{1}\n\
                 include {2};\n}}\n",
                folder.display(),
                temporary.join("\n"),
                file.display()
            );
            let main = folder.join("main.conf");
            std::fs::write(&main, whole).expect("nginx' configuration is written");
            // Debian has it where only root looks.
            let binary = ["/usr/sbin/nginx", "nginx"].into_iter().find(|path| Path::new(path).exists());
            let mut command = Command::new(binary.unwrap_or("nginx"));
            command.arg("-p").arg(folder).arg("-e").arg("stderr").arg("-c").arg(main);
            command
        })
        .await
    }

    /// Caddy with `deploy/Caddyfile`.
    pub async fn caddy(quorate: SocketAddr) -> Self {
        Self::start("caddy", "Caddyfile", 8_091, quorate, |folder, file| {
            let mut command = Command::new(caddy());
            command.args(["run", "--adapter", "caddyfile", "--config"]).arg(file);
            command.env("HOME", folder).env("XDG_DATA_HOME", folder).env("XDG_CONFIG_HOME", folder);
            command
        })
        .await
    }

    async fn start(
        name: &str,
        example: &str,
        port: u16,
        quorate: SocketAddr,
        command: impl FnOnce(&Path, &Path) -> Command,
    ) -> Self {
        let (address, service_address) = (free_address(), free_address());
        let service = serve_hello(service_address).await;
        let ports = [(port, address), (3_000, service_address), (8_080, quorate)];
        let folder = tempfile::Builder::new().prefix("quorate-proxy-").tempdir().expect("a temporary folder");
        let file = folder.path().join(example);
        std::fs::write(&file, with_ports(example, &ports)).expect("the configuration is written");
        let process = Process::start(name, folder.path(), &mut command(folder.path(), &file));
        let proxy = Self { address, _process: process, _folder: folder, service };
        eventually(&format!("{name} answers"), START_WITHIN, || async {
            let answer = proxy.api().get("/").await?;
            hold(answer.status == 200, || format!("{} {}", answer.status, answer.text))
        })
        .await;
        proxy
    }

    /// Asks for something behind it.
    pub fn api(&self) -> Api {
        Api::new(self.address)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.service.abort();
    }
}

/// A file of `deploy/`, with other ports in the place of those that it has outside its comments.
pub fn with_ports(example: &str, ports: &[(u16, SocketAddr)]) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(example);
    let text = std::fs::read_to_string(&path).expect("the example can be read");
    let mut replaced = vec![false; ports.len()];
    let mut lines = Vec::new();
    for line in text.lines() {
        let mut line = line.to_owned();
        for ((documented, used), replaced) in ports.iter().zip(&mut replaced) {
            let before = format!("127.0.0.1:{documented}");
            if !line.trim_start().starts_with('#') && line.contains(&before) {
                line = line.replace(&before, &used.to_string());
                *replaced = true;
            }
        }
        lines.push(line);
    }
    assert!(replaced.iter().all(|replaced| *replaced), "{example} has all of {ports:?}");
    lines.join("\n") + "\n"
}

/// `$CADDY_BINARY`, or the one that `./tests/run` has put under `target/tools`.
fn caddy() -> PathBuf {
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools/caddy/bin/caddy");
    let binary = std::env::var_os("CADDY_BINARY").map_or(installed, PathBuf::from);
    assert!(
        binary.exists(),
        "no Caddy at {}: run ./tests/run, which installs it, or set CADDY_BINARY to its path",
        binary.display()
    );
    binary
}
