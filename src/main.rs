//! `quorate`: arguments become a command.

use clap::Parser;
use quorate::cli::{self, Cli, Command};
use quorate::config::{ConfigError, Faults};
use std::process::ExitCode;

#[global_allocator]
static ALLOC: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    // Installed once for the whole process: reqwest and the peer listener use whatever is the default. It fails only if there
    // is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let done = match command {
        Command::Serve(args) => cli::serve::run(&args),
        Command::Dev(args) => cli::dev::run(&args),
        Command::Check(args) => cli::check::run(&args),
        Command::Bench(args) => cli::bench::run(&args),
        Command::Validate(args) => return cli::validate::run(&args),
        Command::Policies(args) => cli::policies::run(&args),
        Command::Bucket(args) => cli::bucket::run(&args),
        Command::Region(args) => cli::region::run(&args),
        Command::Snapshot(args) => cli::snapshot::run(&args),
        Command::Import(args) => cli::import::run(&args),
        Command::Schema(args) => cli::schema::run(&args),
        Command::Completions(args) => cli::schema::complete(&args),
        Command::Status(args) => cli::status::run(&args),
        Command::Top(args) => cli::top::run(&args),
        Command::Man(args) => cli::man::run(&args),
    };
    match done {
        Ok(code) => code,
        // A file with faults is a "no"; each of them is a line of its own.
        Err(error) if is_faulty_file(&error) => {
            eprintln!("{error}");
            ExitCode::from(cli::NO)
        }
        Err(error) => {
            eprintln!("quorate: {}", in_one_line(&error));
            ExitCode::from(cli::COULD_NOT)
        }
    }
}

fn is_faulty_file(error: &anyhow::Error) -> bool {
    error.is::<Faults>() || matches!(error.downcast_ref(), Some(ConfigError::Invalid(_)))
}

/// The error and its causes, but those that it names itself.
fn in_one_line(error: &anyhow::Error) -> String {
    error.chain().skip(1).fold(error.to_string(), |line, cause| {
        let cause = cause.to_string();
        if line.contains(&cause) { line } else { format!("{line}: {cause}") }
    })
}
