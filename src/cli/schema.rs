//! `quorate schema`: JSON Schema of the files, for editors; and `quorate completions`, for shells.

use super::Cli;
use clap::CommandFactory as _;
use clap_complete::Shell;
use std::io::{self, Write as _};
use std::process::ExitCode;

/// Print the JSON Schema of a file, for an editor. (With yaml-language-server, a file's first line names it:
/// `# yaml-language-server: $schema=policies.schema.json`.)
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Of which file
    #[arg(value_enum)]
    pub of: File,
}

/// Which file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum File {
    /// region.yaml
    Region,
    /// policies.yaml
    Policies,
}

impl File {
    /// Its schema (JSON Schema, draft 7, which is what editors read).
    #[must_use]
    pub const fn schema(self) -> &'static str {
        match self {
            Self::Region => include_str!("../config/schema/region.json"),
            Self::Policies => include_str!("../config/schema/policies.json"),
        }
    }
}

/// Print a shell's completion script, for its folder of completions.
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// For which shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Prints a schema.
///
/// # Errors
/// If it cannot be written.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    io::stdout().lock().write_all(args.of.schema().as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Prints a completion script.
///
/// # Errors
/// If it cannot be written.
pub fn complete(args: &Completions) -> anyhow::Result<ExitCode> {
    // Written to memory first: what writes it knows no errors.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "quorate", &mut script);
    io::stdout().lock().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
