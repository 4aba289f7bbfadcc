//! `quorate serve`: one region's daemon.

use crate::config::{self, Config, ConfigError, LogFormat};
use crate::node::Node;
use crate::telemetry::{self, Telemetry};
use anyhow::Context as _;
use std::path::PathBuf;
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Run one region's daemon until SIGTERM or SIGINT, then drain. SIGHUP re-reads the log filter and TLS files.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The region's configuration
    #[arg(long, value_name = "FILE", env = "QUORATE_CONFIG")]
    pub config: PathBuf,
}

/// Runs the daemon.
///
/// # Errors
/// If it cannot start.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let config = match config::load(&args.config) {
        Ok(config) => config,
        Err(error) => return Ok(refuse(&error)),
    };
    let regions = config.cluster.names();
    let load = |file| config::policies::load(file, Some(&regions));
    let policies = match config.policies.as_deref().map(load).transpose() {
        Ok(policies) => policies.unwrap_or_default(),
        Err(error) => return Ok(refuse(&error)),
    };
    let telemetry = telemetry::init(&telemetry_options(&config))?;
    let runtime = control_runtime()?;
    let done = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
        let mut hang_up = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
        let node = tokio::select! {
            node = Node::start(config, policies) => node?,
            // It may wait for long to be let into the cluster.
            _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
            stopped = tokio::signal::ctrl_c() => {
                return stopped.context("cannot listen for SIGINT").map(|()| ExitCode::SUCCESS);
            }
        };
        until_stopped(&node, &telemetry, &mut terminate, &mut hang_up).await?;
        node.drain().await;
        anyhow::Ok(ExitCode::SUCCESS)
    });
    telemetry.shutdown();
    done
}

/// Raft, the slow loop, admin and peers: never a caller's request.
pub(super) fn control_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("control")
        .enable_all()
        .build()
        .context("cannot start the control runtime")
}

pub(super) fn telemetry_options(config: &Config) -> telemetry::Options {
    telemetry::Options {
        region: config.region.to_string(),
        log: match config.telemetry.log {
            LogFormat::Text => telemetry::LogFormat::Text,
            LogFormat::Json => telemetry::LogFormat::Json,
        },
        otlp: config.telemetry.otlp.as_deref().map(str::to_owned),
    }
}

/// Prints every fault, one a line.
fn refuse(error: &ConfigError) -> ExitCode {
    eprintln!("{error}");
    ExitCode::from(match error {
        ConfigError::Invalid(_) => super::NO,
        ConfigError::Unreadable { .. } => super::COULD_NOT,
    })
}

async fn until_stopped(
    node: &Node,
    telemetry: &Telemetry,
    terminate: &mut Signal,
    hang_up: &mut Signal,
) -> anyhow::Result<()> {
    loop {
        tokio::select! {
            _ = terminate.recv() => return Ok(()),
            stopped = tokio::signal::ctrl_c() => return stopped.context("cannot listen for SIGINT"),
            why = node.failed() => anyhow::bail!("{why}"),
            _ = hang_up.recv() => {
                match (telemetry.reload(), node.reload()) {
                    (Ok(()), Ok(())) => tracing::info!("re-read what can change live"),
                    (filter, tls) => {
                        let why = filter.err().map(|e| e.to_string()).or_else(|| tls.err().map(|e| e.to_string()));
                        tracing::warn!(why, "SIGHUP: kept what could not be re-read as it was");
                    }
                }
            }
        }
    }
}
