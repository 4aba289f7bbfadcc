//! `quorate-chaos`: see the library.

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use quorate::bugs::Bug;
use quorate_chaos::sim::{self, campaign::campaign};
use std::ops::RangeInclusive;
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
    /// The daemon's own code in simulated time, over many seeds.
    Sim(Sim),
}

#[derive(Debug, Args)]
struct Sim {
    /// Run these seeds: `1..5000`, both ends included.
    #[arg(long, value_parser = seeds, default_value = "1..500", conflicts_with = "seed")]
    seeds: RangeInclusive<u64>,
    /// Run this one seed.
    #[arg(long)]
    seed: Option<u64>,
    /// So many regions (2 to 9); otherwise each seed has its own number.
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=9))]
    regions: Option<u8>,
    /// Plant this deliberate bug, which must be caught.
    #[arg(long)]
    bug: Option<Bug>,
    /// So many seeds at a time; as many as there are cores.
    #[arg(long)]
    threads: Option<usize>,
    /// Go on after a broken promise.
    #[arg(long)]
    keep_going: bool,
}

fn main() -> ExitCode {
    let Cli { command } = Cli::parse();
    let done = match command {
        Command::Sim(args) => simulate(&args),
    };
    done.unwrap_or_else(|error| {
        eprintln!("quorate-chaos: {error:#}");
        ExitCode::from(2)
    })
}

fn simulate(args: &Sim) -> anyhow::Result<ExitCode> {
    let options =
        sim::Options { regions: args.regions.map(usize::from), bug: args.bug, record: args.seed.is_some() };
    let seeds = args.seed.map_or(args.seeds.clone(), |seed| seed..=seed);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or(cores);
    let summary = campaign(seeds, options, threads, !args.keep_going, |seed, outcome| {
        if let Some(broken) = &outcome.violation {
            println!("seed {seed}: at {:.6} s: {}", broken.at.0 as f64 / 1e6, broken.what);
        }
        if args.seed.is_some() {
            println!("seed {seed}: {:?}, fingerprint {:016x}", outcome.counts, outcome.fingerprint);
        }
    })?;
    println!(
        "{} seeds, {:.1} hours simulated: {} commits, {} records, {} changes, {} refused; {} broken",
        summary.seeds,
        summary.simulated.0 as f64 / 3.6e9,
        summary.counts.commits,
        summary.counts.records,
        summary.counts.changes,
        summary.counts.refused,
        summary.broken.len()
    );
    Ok(ExitCode::from(u8::from(!summary.broken.is_empty())))
}

fn seeds(text: &str) -> Result<RangeInclusive<u64>, String> {
    let wrong = || format!("`{text}` is not a range of seeds like 1..5000");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    let number = |text: &str| text.trim_start_matches('=').parse::<u64>().map_err(|_| wrong());
    let range = number(from)?..=number(to)?;
    if range.is_empty() { Err(wrong()) } else { Ok(range) }
}
