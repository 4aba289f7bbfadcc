//! `quorate snapshot`: the pool in a file, for the day on which a majority of the regions is lost.

use super::client;
use crate::config::{self, ConfigError};
use crate::node;
use crate::quota::pool::Spent;
use crate::raft::{self, RaftError, Saved, SavedHeader};
use crate::telemetry::wall_clock;
use anyhow::{Context as _, bail};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

/// Save the pool to a file, and begin anew from one when a majority of the regions is lost.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do
    #[command(subcommand)]
    pub action: Action,
}

/// What to do with it.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// Write what a running region knows of the pool to a file
    Save {
        /// The file
        file: PathBuf,
        /// Where, and with what token
        #[command(flatten)]
        admin: client::Admin,
    },
    /// Check a file, and print what it is a copy of
    Show {
        /// The file
        file: PathBuf,
    },
    /// Make one region's (empty) `data_dir` that of a member of a new cluster, which goes on from a file. To be done for every
    /// region of `cluster.regions`, with the same file
    Restore {
        /// The file
        file: PathBuf,
        /// The region's configuration
        #[arg(long, value_name = "FILE", env = "QUORATE_CONFIG")]
        config: PathBuf,
        /// You promise that no daemon of the old cluster runs any more, in any region, and that none will start again with its data
        #[arg(long)]
        presume_stopped: bool,
        /// Let windows of quotas that have begun go on with what the file knows to be left of them: what was spent after it was
        /// saved may then be spent once more. Without it nothing more passes of them
        #[arg(long)]
        trust_quotas: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// If the daemon cannot be reached, or a file cannot be read or written.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.action {
        Action::Save { file, admin } => client::runtime()?.block_on(save(file, admin)),
        Action::Show { file } => match read(file)? {
            Ok(saved) => {
                println!("{}: {}", file.display(), described(&saved.header));
                Ok(ExitCode::SUCCESS)
            }
            Err(why) => Ok(no(&why)),
        },
        Action::Restore { file, config, presume_stopped, trust_quotas } => {
            let spent = if *trust_quotas { Spent::AsKnown } else { Spent::All };
            restore(file, config, *presume_stopped, spent)
        }
    }
}

async fn save(file: &Path, admin: &client::Admin) -> anyhow::Result<ExitCode> {
    let url = format!("{}/v1/snapshot", admin.at.base()?);
    let answer = admin.authorize(admin.at.http()?.get(&url))?.send().await;
    let answer = answer.map_err(|e| anyhow::anyhow!("no answer from {url}: {}", client::why(&e)))?;
    let status = answer.status();
    let content = answer.bytes().await.context("the answer broke off")?;
    if !status.is_success() {
        let why = format!("{url} answered {status}: {}", String::from_utf8_lossy(&content));
        return if status.is_client_error() { Ok(no(&why)) } else { Err(anyhow::anyhow!(why)) };
    }
    let saved = Saved::read(&content).context("the answer is no snapshot")?;
    write(file, &content).with_context(|| format!("{}: cannot be written", file.display()))?;
    println!("{}: {}", file.display(), described(&saved.header));
    Ok(ExitCode::SUCCESS)
}

fn restore(file: &Path, config: &Path, promised: bool, spent: Spent) -> anyhow::Result<ExitCode> {
    let config = match config::load(config) {
        Ok(config) => config,
        Err(error @ ConfigError::Invalid(_)) => return Ok(no(&error.to_string())),
        Err(error) => return Err(error.into()),
    };
    let saved = match read(file)? {
        Ok(saved) => saved,
        Err(why) => return Ok(no(&why)),
    };
    let header = saved.header.clone();
    if !promised {
        return Ok(no(
            "a cluster that is begun anew knows nothing of what the old one does: stop its daemons in all regions for good, and promise that with --presume-stopped",
        ));
    }
    let raft = node::raft_config(&config);
    match client::runtime()?.block_on(raft::restore(&raft, saved, spent)) {
        Ok(node) => {
            let (dir, region) = (config.data_dir.display(), &config.region);
            println!("{dir}: {region} is node {node} of a new cluster, from {}", described(&header));
            let windows = match spent {
                Spent::All => "nothing more passes of quotas' windows that have begun",
                Spent::AsKnown => "quotas' windows that have begun go on with what the file knows to be left",
            };
            println!("buckets begin empty; {windows}");
            println!("do the same in every region of `cluster.regions`, then start the daemons");
            Ok(ExitCode::SUCCESS)
        }
        Err(error @ (RaftError::Config(_) | RaftError::DataDir { .. })) => Ok(no(&error.to_string())),
        Err(error) => bail!("{error}"),
    }
}

/// A file, or why it is none.
fn read(file: &Path) -> anyhow::Result<Result<Saved, String>> {
    let content = std::fs::read(file).with_context(|| format!("{}: cannot be read", file.display()))?;
    Ok(Saved::read(&content).map_err(|fault| format!("{}: {fault}", file.display())))
}

/// It is there as a whole, or not at all.
fn write(file: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = file.with_file_name(name);
    let mut out = std::fs::File::create(&temporary)?;
    out.write_all(content)?;
    out.sync_all()?;
    std::fs::rename(&temporary, file)
}

fn described(header: &SavedHeader) -> String {
    let SavedHeader { cluster, region, saved_at_ms, applied, policies, regions, .. } = header;
    let now = wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    let age = now.saturating_sub(Duration::from_millis(*saved_at_ms)).as_secs();
    let age = match age {
        0..600 => format!("{age} s"),
        600..36_000 => format!("{} min", age / 60),
        _ => format!("{} h", age / 3_600),
    };
    format!(
        "cluster {cluster} ({}) as {region} knew it {age} ago: {applied} entries of the log, policies version {policies}",
        regions.join(", ")
    )
}

fn no(why: &str) -> ExitCode {
    eprintln!("quorate: {why}");
    ExitCode::from(super::NO)
}
