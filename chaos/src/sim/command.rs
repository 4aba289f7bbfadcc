//! `quorate-chaos sim` and `quorate-chaos bugs`: seeds, progress, the line that replays, the report.

use super::campaign::{Summary, campaign};
use super::{Broken, Kind, Options, Outcome, run};
use crate::{invariants, report};
use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use quorate::bugs::Bug;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The daemon's own code in simulated time, over many seeds.
#[derive(Debug, clap::Args)]
pub struct Sim {
    /// Run these seeds: `1..5000`, both ends included.
    #[arg(long, value_parser = seeds, default_value = "1..500", conflicts_with = "seed")]
    seeds: RangeInclusive<u64>,
    /// Run this one seed, say all that was done to the cluster, and judge every promise.
    #[arg(long)]
    seed: Option<u64>,
    /// So many regions (2 to 9); otherwise each seed has its own number.
    #[arg(long, value_parser = clap::value_parser!(u8).range(2..=9))]
    regions: Option<u8>,
    /// On this log: `small`, the simulation's own, or `openraft`, the product's.
    #[arg(long, default_value = "small")]
    log: Kind,
    /// Plant this deliberate bug, which must be caught.
    #[arg(long)]
    bug: Option<Bug>,
    /// With a quota in short windows besides the other policies.
    #[arg(long)]
    quotas: bool,
    /// With permits that are lent between regions besides the other policies.
    #[arg(long)]
    permits: bool,
    /// So many seeds at a time; as many as there are cores.
    #[arg(long)]
    threads: Option<usize>,
    /// Go on after a broken promise.
    #[arg(long)]
    keep_going: bool,
    /// Write a page about the run (of one seed; of many: about the first that breaks a promise).
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

/// Plants every deliberate bug in turn, and says which seed catches it.
#[derive(Debug, clap::Args)]
pub struct Bugs {
    /// Look in these seeds.
    #[arg(long, value_parser = seeds, default_value = "1..1000")]
    seeds: RangeInclusive<u64>,
    /// So many seeds at a time; as many as there are cores.
    #[arg(long)]
    threads: Option<usize>,
    /// Write what was found into the table of this file, which has a row for each bug: chaos/README.md.
    #[arg(long, value_name = "README.md")]
    write: Option<PathBuf>,
    /// Only these bugs.
    bugs: Vec<Bug>,
}

/// Runs it: 0 if every promise was kept, 1 if not.
///
/// # Errors
/// If the simulation or the report cannot be made.
pub fn sim(args: &Sim) -> anyhow::Result<ExitCode> {
    match args.seed {
        Some(seed) => one(args, seed),
        None => many(args),
    }
}

/// Runs it: 0 if every bug was caught, 1 if not.
///
/// # Errors
/// If a simulation cannot run.
pub fn bugs(args: &Bugs) -> anyhow::Result<ExitCode> {
    let all = if args.bugs.is_empty() { Bug::ALL } else { &args.bugs };
    let (mut missed, mut rows) = (0, Vec::new());
    for bug in all {
        match catch(*bug, args.seeds.clone(), cores(args.threads))? {
            Some((seed, broken)) => {
                println!("{bug:<28} seed {seed:<6} {}", first_line(&broken.what));
                rows.push((*bug, seed, broken.seen()));
            }
            None => {
                missed += 1;
                println!("{bug:<28} NOT CAUGHT");
            }
        }
    }
    if let Some(path) = &args.write {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
        std::fs::write(path, tabulate(&text, &rows)?)
            .with_context(|| format!("{} cannot be written", path.display()))?;
    }
    Ok(ExitCode::from(u8::from(missed > 0)))
}

/// The first of these seeds that catches the bug for what it is.
fn catch(bug: Bug, seeds: RangeInclusive<u64>, threads: usize) -> anyhow::Result<Option<(u64, Broken)>> {
    let (options, end) = (Options::to_catch(bug), *seeds.end());
    let mut from = *seeds.start();
    while from <= end {
        let summary = campaign(from..=end, options, threads, true, |_, _| ())?;
        let Some((last, _)) = summary.broken.last() else { return Ok(None) };
        from = last + 1;
        if let Some(found) = summary.broken.into_iter().find(|(_, broken)| broken.shows(bug)) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// The text with these rows in its table of bugs: a row for each bug, in their own order, the ones that are not new as they were.
///
/// # Errors
/// If the text has no such table.
fn tabulate(text: &str, new: &[(Bug, u64, &str)]) -> anyhow::Result<String> {
    const HEAD: &str = "| bug | seed | what is seen |\n| --- | --- | --- |\n";
    let (before, rest) = text.split_once(HEAD).context("it has no table of bugs")?;
    let end = rest.find("\n\n").map_or(rest.len(), |end| end + 1);
    let (old, after) = rest.split_at(end);
    let row = |bug: &Bug| {
        let start = format!("| `{bug}` |");
        let new = new.iter().find(|(found, ..)| found == bug);
        let old = || old.lines().find(|line| line.starts_with(&start)).map(ToOwned::to_owned);
        new.map(|(_, seed, seen)| format!("{start} {seed} | {seen} |")).or_else(old)
    };
    let rows: String = Bug::ALL.iter().filter_map(row).map(|row| row + "\n").collect();
    Ok(format!("{before}{HEAD}{rows}{after}"))
}

fn many(args: &Sim) -> anyhow::Result<ExitCode> {
    let bar = progress(args.seeds.end() - args.seeds.start() + 1);
    let tell = |seed: u64, outcome: &Outcome| {
        bar.inc(1);
        if let Some(broken) = &outcome.violation {
            let at = report_time(broken.at.0);
            bar.suspend(|| {
                println!("seed {seed}: at {at}: {}\n  replay: {}", broken.what, options(args).replay(seed))
            });
        }
    };
    let summary = campaign(args.seeds.clone(), options(args), cores(args.threads), !args.keep_going, tell)?;
    bar.finish_and_clear();
    println!("{}", sum_up(&summary));
    if let (Some(page), Some((seed, _))) = (&args.report, summary.broken.first()) {
        write_report(run(*seed, Options { record: true, ..options(args) })?, page)?;
    }
    Ok(ExitCode::from(u8::from(!summary.broken.is_empty())))
}

fn one(args: &Sim, seed: u64) -> anyhow::Result<ExitCode> {
    let outcome = run(seed, Options { record: true, ..options(args) })?;
    let history = outcome.history.as_ref().context("no history was kept")?;
    for fault in &history.faults {
        let to = fault.to.map_or(String::new(), |to| format!(" to {}", report_time(to.0)));
        println!("{}{to}: {}", report_time(fault.from.0), fault.what);
    }
    println!("{:?}, fingerprint {:016x}", outcome.counts, outcome.fingerprint);
    if let Some(raft) = &outcome.raft {
        println!("{raft:?}");
    }
    match &outcome.violation {
        Some(broken) => {
            println!(
                "BROKEN at {}: {}\n  replay: {}",
                report_time(broken.at.0),
                broken.what,
                options(args).replay(seed)
            );
        }
        None => println!("every promise was kept"),
    }
    let broken = outcome.violation.is_some();
    if let Some(page) = &args.report {
        write_report(outcome, page)?;
    }
    Ok(ExitCode::from(u8::from(broken)))
}

fn write_report(outcome: Outcome, page: &Path) -> anyhow::Result<()> {
    let history = outcome.history.context("no history was kept")?;
    let mut judged = invariants::judge_by(&super::JUDGED, &history);
    judged.extend(outcome.violation.map(|broken| broken.judged()));
    report::write(&history, &judged, page)?;
    println!("report: {}", page.display());
    Ok(())
}

fn options(args: &Sim) -> Options {
    let regions = args.regions.map(usize::from);
    Options {
        regions,
        bug: args.bug,
        log: args.log,
        record: false,
        quotas: args.quotas,
        permits: args.permits,
    }
}

fn sum_up(summary: &Summary) -> String {
    let counts = &summary.counts;
    format!(
        "{} seeds, {:.1} hours simulated: {} entries committed ({} refused), {} records of leases, {} changes of policies or members; {}",
        summary.seeds,
        summary.simulated.0 as f64 / 3.6e9,
        counts.commits,
        counts.refused,
        counts.records,
        counts.changes,
        match summary.broken.len() {
            0 => "every promise was kept".to_owned(),
            n => format!("{n} seeds BROKE A PROMISE"),
        }
    )
}

fn progress(seeds: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(seeds), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{pos}/{len} seeds {wide_bar} {per_sec}, {eta} to go") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

fn cores(threads: Option<usize>) -> usize {
    threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

fn report_time(micros: i64) -> String {
    format!("{}.{:03} s", micros / 1_000_000, micros % 1_000_000 / 1_000)
}

fn first_line(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    line.chars().take(100).collect()
}

fn seeds(text: &str) -> Result<RangeInclusive<u64>, String> {
    let wrong = || format!("`{text}` is not a range of seeds like 1..5000");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    let number = |text: &str| text.trim_start_matches('=').parse::<u64>().map_err(|_| wrong());
    let range = number(from)?..=number(to)?;
    if range.is_empty() { Err(wrong()) } else { Ok(range) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_gets_new_rows_and_keeps_the_others() {
        let text = "a\n\n| bug | seed | what is seen |\n| --- | --- | --- |\n| `no-epoch` | 2 | x |\n| `gone` | 3 | x |\n| `no-fence` | 4 | x |\n\n| `b` |\n";
        let table = tabulate(text, &[(Bug::NoFence, 9, "y"), (Bug::AckAtOnce, 7, "z")]);
        let rows = "| `no-epoch` | 2 | x |\n| `no-fence` | 9 | y |\n| `ack-at-once` | 7 | z |\n";
        let head = "a\n\n| bug | seed | what is seen |\n| --- | --- | --- |\n";
        assert_eq!(table.ok(), Some(format!("{head}{rows}\n| `b` |\n")));
        assert!(tabulate("no table", &[]).is_err());
    }

    #[test]
    fn ranges_of_seeds_are_read() {
        assert_eq!(seeds("1..5000"), Ok(1..=5000));
        assert_eq!(seeds("7..=7"), Ok(7..=7));
        for wrong in ["", "5", "5..", "9..3", "a..b"] {
            assert!(seeds(wrong).is_err_and(|why| why.contains("1..5000")), "{wrong}");
        }
    }
}
