//! `quorate serve`: one region's daemon.

use super::notify::Manager;
use crate::config::{self, Config, ConfigError, LogFormat};
use crate::node::Node;
use crate::telemetry::{self, Telemetry};
use anyhow::Context as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Run one region's daemon until SIGTERM or SIGINT, then drain (a second one: stop at once). SIGHUP re-reads the log filter, certificates and tokens.
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
    let regions = config.cluster.serving();
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
        let mut manager = Manager::from_env().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot tell systemd how the daemon is");
            Manager::default()
        });
        let node = tokio::select! {
            node = Node::start(config, policies) => node?,
            // It may wait for long to be let into the cluster.
            never = starting(&mut manager) => match never {},
            told = told_to_stop(&mut terminate) => return told.map(|()| ExitCode::SUCCESS),
        };
        until_stopped(&args.config, &node, &telemetry, &mut manager, &mut terminate, &mut hang_up).await?;
        manager.stopping();
        tokio::select! {
            () = node.drain() => Ok(ExitCode::SUCCESS),
            Ok(()) = told_to_stop(&mut terminate) => {
                tracing::warn!("told to stop once more: stopping at once; what is lent ends by itself");
                Ok(ExitCode::from(super::COULD_NOT))
            }
        }
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
        cluster: config.cluster.name.to_string(),
        log: match config.telemetry.log {
            LogFormat::Text => telemetry::LogFormat::Text,
            LogFormat::Json => telemetry::LogFormat::Json,
        },
        log_filter: config.telemetry.log_filter.as_deref().map(str::to_owned),
        otlp: config.telemetry.otlp.as_deref().map(str::to_owned),
        sampling_ppm: config.telemetry.sampling_ppm,
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

/// Says that the daemon lives for as long as it starts.
async fn starting(manager: &mut Manager) -> std::convert::Infallible {
    loop {
        manager.due().await;
        manager.look(vec!["it starts, or waits to be let into the cluster".into()]);
    }
}

async fn until_stopped(
    file: &Path,
    node: &Node,
    telemetry: &Telemetry,
    manager: &mut Manager,
    terminate: &mut Signal,
    hang_up: &mut Signal,
) -> anyhow::Result<()> {
    loop {
        tokio::select! {
            told = told_to_stop(terminate) => return told,
            why = node.failed() => anyhow::bail!("{why}"),
            () = manager.due() => manager.look(node.not_ready()),
            _ = hang_up.recv() => {
                manager.reloading();
                let filter = reload_filter(file, telemetry).await;
                let tls = node.reload().map_err(|error| error.to_string());
                match filter.and(tls) {
                    Ok(()) => tracing::info!("re-read what can change live"),
                    Err(why) => tracing::warn!(why, "SIGHUP: kept what could not be re-read as it was"),
                }
                manager.reloaded();
            }
        }
    }
}

/// Resolves at the next SIGTERM or SIGINT.
async fn told_to_stop(terminate: &mut Signal) -> anyhow::Result<()> {
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        stopped = tokio::signal::ctrl_c() => stopped.context("cannot listen for SIGINT"),
    }
}

/// Of the configuration file, the log filter can change live.
async fn reload_filter(file: &Path, telemetry: &Telemetry) -> Result<(), String> {
    let file = file.to_owned();
    let config = tokio::task::spawn_blocking(move || config::load(&file)).await.map_err(|e| e.to_string())?;
    let config = config.map_err(|error| error.to_string())?;
    telemetry.reload(config.telemetry.log_filter.as_deref()).map_err(|error| error.to_string())
}
