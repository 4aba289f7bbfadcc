//! `quorate-chaos`: see the library.

use clap::{Parser, Subcommand};
use quorate_chaos::cluster;
use quorate_chaos::sim::command::{self, Bugs, Sim};
use std::process::ExitCode;

/// Tries to make Quorate break its word.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Sim(Sim),
    Bugs(Bugs),
    Cluster(Box<cluster::Args>),
    /// A daemon, as `quorate serve` is: for runs that must be of what this program was built with
    #[command(hide = true)]
    Serve(quorate::cli::serve::Args),
    /// What `quorate region` does: scenarios change the members through the program that their daemons run
    #[command(hide = true)]
    Region(quorate::cli::region::Args),
    /// A daemon with a deliberate bug, for `cluster --plant`
    #[command(hide = true)]
    Planted(cluster::Planted),
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    // Once, for every client that the process makes; nobody has installed another by now.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // A daemon sets up its own log.
    if !matches!(command, Command::Serve(_) | Command::Planted(_)) {
        let filter = tracing_subscriber::EnvFilter::from_default_env();
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    }
    let done = match command {
        Command::Sim(args) => command::sim(&args),
        Command::Bugs(args) => command::bugs(&args),
        Command::Cluster(args) => cluster::main(&args),
        Command::Serve(args) => cluster::serve(&args),
        Command::Region(args) => quorate::cli::region::run(&args),
        Command::Planted(args) => cluster::planted(&args),
    };
    done.unwrap_or_else(|error| {
        eprintln!("quorate-chaos: {error:#}");
        ExitCode::from(2)
    })
}
