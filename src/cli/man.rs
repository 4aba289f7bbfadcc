//! `quorate man`: the manual pages, for packages.

use super::Cli;
use anyhow::Context as _;
use clap::CommandFactory as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write the manual pages: `quorate.1`, and `quorate-COMMAND.1` for each command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder to write them to
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// The folder cannot be written to.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let cannot = || format!("{}: cannot be written to", args.folder.display());
    std::fs::create_dir_all(&args.folder).with_context(cannot)?;
    clap_mangen::generate_to(Cli::command(), &args.folder).with_context(cannot)?;
    Ok(ExitCode::SUCCESS)
}
