//! `quorate-chaos cluster`: real daemons and `redis-server`s as processes, every link through a proxy (or the kernel), and a
//! timeline of faults; or a cluster that exists already.

mod admin;
pub mod attach;
mod clock;
mod daemon;
mod director;
mod disk;
mod ground;
mod lines;
mod logs;
mod netns;
mod ports;
mod process;
mod progress;
mod promise;
mod redis;
mod run;
pub mod scenario;
mod stage;
mod verdict;
mod wakes;
mod watch;

pub use run::{Options, run};

use anyhow::Context as _;
use quorate::bugs::Bug;
use scenario::Scenario;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tokio::signal::unix::{SignalKind, signal};

/// All promises were kept.
pub const HELD: u8 = 0;
/// One was broken.
pub const BROKEN: u8 = 1;
/// It could not be run, or the machine was too busy to judge.
pub const COULD_NOT: u8 = 2;

/// What folders of runs begin with; the process' id follows.
const FOLDER_PREFIX: &str = "quorate-chaos-";

/// Run real daemons and Redis servers through a scenario of faults, or test a cluster that exists already.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The scenario: one of `--list`, or a file
    #[arg(long, value_name = "NAME|FILE", required_unless_present_any = ["list", "clean", "attach"])]
    pub scenario: Option<String>,
    /// List the scenarios that come with the program
    #[arg(long)]
    pub list: bool,
    /// Remove namespaces, bridges, disks and folders that killed runs left behind
    #[arg(long)]
    pub clean: bool,
    /// The `quorate` binary [default: beside this program, then $PATH]
    #[arg(long, value_name = "PATH")]
    pub quorate: Option<PathBuf>,
    /// Where to write the report [default: quorate-chaos-NAME.html]
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// Keep logs, data and history there
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// Network namespaces and nftables instead of proxies between regions (needs root)
    #[arg(long)]
    pub netns: bool,
    /// Run daemons with a deliberate bug, which must be caught
    #[arg(long, value_name = "BUG")]
    pub plant: Option<Bug>,
    /// Chooses followers and paces requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    #[command(flatten)]
    pub attached: attach::Attach,
}

/// A daemon with a deliberate bug, in place of `quorate serve`.
#[derive(Clone, Debug, clap::Args)]
pub struct Planted {
    /// The bug
    pub bug: Bug,
    /// The region's configuration
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
}

/// Runs a daemon with a deliberate bug.
///
/// # Errors
/// It cannot start.
pub fn planted(args: &Planted) -> anyhow::Result<ExitCode> {
    quorate::bugs::plant_everywhere(args.bug).map_err(anyhow::Error::msg)?;
    serve(&quorate::cli::serve::Args { config: args.config.clone() })
}

/// Runs a daemon.
///
/// # Errors
/// It cannot start.
pub fn serve(args: &quorate::cli::serve::Args) -> anyhow::Result<ExitCode> {
    quorate::cli::serve::run(args)
}

/// Does what the arguments say, until Ctrl-C.
///
/// # Errors
/// It could not be done: no verdict.
pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let code = runtime.block_on(async {
        tokio::select! {
            done = command(args) => done,
            stopped = stopped() => stopped.map(|()| COULD_NOT),
        }
    });
    // Everything that runs is killed, and everything that was made is removed, before this returns.
    drop(runtime);
    code.map(ExitCode::from)
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start a runtime")
}

async fn command(args: &Args) -> anyhow::Result<u8> {
    if args.clean {
        let removed = clean()?;
        removed.iter().for_each(|what| println!("removed {what}"));
        println!("{} left-overs removed", removed.len());
        return Ok(HELD);
    }
    if args.list {
        for (name, text) in scenario::BUILT_IN {
            let scenario = Scenario::parse(Path::new(name), text)?;
            println!("{name:<28} {:>4} s  {}", scenario.length.as_secs(), scenario.title);
        }
        return Ok(HELD);
    }
    if args.attached.is_wanted() {
        return attach::run(args).await;
    }
    let name = args.scenario.as_deref().context("--scenario names what to run")?;
    let scenario = Scenario::load(name)?;
    let options = Options {
        binary: if args.plant.is_some() {
            std::env::current_exe()?
        } else {
            binary(args.quorate.as_deref())?
        },
        plant: args.plant,
        folder: args.keep.clone(),
        namespaces: args.netns,
        seed: args.seed,
        replay: replay(name, args),
        quiet: false,
    };
    let outcome = run(&scenario, &options).await?;
    let kept = outcome.folder.kept();
    verdict::conclude(&outcome.history, &scenario.expect, args.report.as_deref(), &scenario.name, kept)
}

/// Ctrl-C, or SIGTERM.
async fn stopped() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    tokio::select! {
        stopped = tokio::signal::ctrl_c() => stopped.context("cannot listen for SIGINT")?,
        _ = terminate.recv() => {}
    }
    eprintln!("stopped: removing what runs");
    Ok(())
}

/// The command that runs the same again.
fn replay(scenario: &str, args: &Args) -> String {
    let mut command = format!("quorate-chaos cluster --scenario {scenario} --seed {}", args.seed);
    if args.netns {
        command.push_str(" --netns");
    }
    if let Some(bug) = args.plant {
        command.push_str(&format!(" --plant {bug}"));
    }
    command
}

fn binary(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(given) = given {
        return std::path::absolute(given).with_context(|| format!("--quorate {}", given.display()));
    }
    let beside = std::env::current_exe()?.with_file_name("quorate");
    Ok(if beside.exists() { beside } else { PathBuf::from("quorate") })
}

/// Removes what runs that are no more left behind, and says what.
fn clean() -> anyhow::Result<Vec<String>> {
    let mut removed = netns::clean()?;
    removed.extend(disk::clean());
    for entry in std::fs::read_dir(std::env::temp_dir())?.flatten() {
        if folder_owner(&entry.path()).is_some_and(|id| !id.exists()) {
            std::fs::remove_dir_all(entry.path())?;
            removed.push(format!("folder {}", entry.path().display()));
        }
    }
    Ok(removed)
}

/// `/proc/ID` of the process that made the folder of a run that this path is in; `None`: it is in none.
fn folder_owner(path: &Path) -> Option<PathBuf> {
    let names = path.iter().filter_map(|name| name.to_str());
    let mut ids = names.filter_map(|name| name.strip_prefix(FOLDER_PREFIX)?.split('-').next());
    let id = ids.rfind(|id| !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit()))?;
    Some(Path::new("/proc").join(id))
}
