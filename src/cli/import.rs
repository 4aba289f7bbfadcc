//! `quorate import`: policy files from what other rate limiters read.

use crate::config::envoy_ratelimit::{self, Limits, Sharing, Style};
use crate::config::{self, ConfigError};
use anyhow::Context as _;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Write a policy file from another rate limiter's configuration.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whose.
    #[command(subcommand)]
    pub from: From,
}

/// Whose configuration it is.
#[derive(Debug, clap::Subcommand)]
pub enum From {
    /// envoyproxy/ratelimit's YAML. Exit code 0: all of it was carried over, 1: not all of it, or it has faults, 2: not done
    EnvoyRatelimit(EnvoyRatelimit),
}

/// The files, and what is to become of them.
#[derive(Clone, Debug, clap::Args)]
pub struct EnvoyRatelimit {
    /// Files, in the order in which that service loads them (by name); those of one domain are put together
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Where the policy file goes [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// How regions share each limit
    #[arg(long, value_enum, default_value_t = Mode::Strict)]
    pub mode: Mode,
    /// What a limit becomes
    #[arg(long = "as", value_enum, default_value_t = As::Auto)]
    pub limits: As,
}

/// How regions share each limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Never more than the limit; denied while a region's store does not answer
    Strict,
    /// At most 10% more; let through while a region's store does not answer
    Approximate,
    /// A part for each region; let through while its store does not answer
    Split,
}

/// What a limit becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum As {
    /// A token bucket if it is by the second, else a quota in fixed windows
    Auto,
    /// A quota in fixed windows
    Quota,
    /// A token bucket that holds one window's requests
    TokenBucket,
}

/// How an import ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All was carried over.
    Done,
    /// Some of it was not, or there are faults.
    Lost,
    /// A file could not be read.
    Unreadable,
}

/// Runs the command.
///
/// # Errors
/// If it could not write.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let From::EnvoyRatelimit(args) = &args.from;
    let outcome = import(args, &mut io::stdout().lock(), &mut io::stderr().lock())?;
    Ok(ExitCode::from(match outcome {
        Outcome::Done => 0,
        Outcome::Lost => super::NO,
        Outcome::Unreadable => super::COULD_NOT,
    }))
}

/// Imports. What was lost, and every fault, is a line in `err`; with faults nothing is written.
///
/// # Errors
/// If it could not write.
pub fn import(args: &EnvoyRatelimit, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<Outcome> {
    let mut files = Vec::new();
    let mut outcome = Outcome::Done;
    for file in &args.files {
        match config::read(file) {
            Ok(text) => files.push((file.clone(), text)),
            Err(error @ (ConfigError::Unreadable { .. } | ConfigError::Invalid(_))) => {
                writeln!(err, "{error}")?;
                outcome = Outcome::Unreadable;
            }
        }
    }
    if outcome == Outcome::Unreadable {
        return Ok(outcome);
    }
    let imported = match envoy_ratelimit::import(&files, style(args)) {
        Ok(imported) => imported,
        Err(faults) => {
            faults.iter().try_for_each(|faults| writeln!(err, "{faults}"))?;
            return Ok(Outcome::Lost);
        }
    };
    match &args.output {
        None => out.write_all(imported.text.as_bytes()).context("cannot write the policy file")?,
        Some(file) => std::fs::write(file, &imported.text)
            .with_context(|| format!("--output {}: cannot be written", file.display()))?,
    }
    imported.lost.iter().try_for_each(|lost| writeln!(err, "{lost}"))?;
    Ok(if imported.lost.is_empty() { Outcome::Done } else { Outcome::Lost })
}

fn style(args: &EnvoyRatelimit) -> Style {
    Style {
        limits: match args.limits {
            As::Auto => Limits::Auto,
            As::Quota => Limits::Quota,
            As::TokenBucket => Limits::TokenBucket,
        },
        sharing: match args.mode {
            Mode::Strict => Sharing::Strict,
            Mode::Approximate => Sharing::Approximate,
            Mode::Split => Sharing::Split,
        },
    }
}
