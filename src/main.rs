//! `quorate`: arguments become a command.

use clap::Parser;
use quorate::cli::{self, Cli, Command};
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
        Command::Validate(args) => return cli::validate::run(&args),
        Command::Policies(args) => cli::policies::run(&args),
        Command::Status(args) => cli::status::run(&args),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("quorate: {error:#}");
            ExitCode::from(cli::COULD_NOT)
        }
    }
}
