//! How many instructions a decision takes: `cargo bench --bench counts`, about two minutes.
//!
//! Times on a shared machine say little, counts repeat. Each case runs under valgrind's callgrind with a smaller and with a larger
//! number of decisions; the difference is what the decisions cost, whatever the start did. `table.txt` has what they
//! should cost; more or less by over [`TOLERANCE_PERCENT`] fails.
//!
//!     cargo bench --bench counts                        compare all cases with the table
//!     cargo bench --bench counts --profile dev          the same, of the build that the tests use
//!     cargo bench --bench counts -- --guard             only what repeats, and nothing where another compiler made the table
//!     cargo bench --bench counts -- --update            write the table anew, for this profile
//!     cargo bench --bench counts -- --top grpc_memory   where one case's instructions go (with function names if it is built
//!                                                       with `cargo rustc --profile bench --bench counts -- -C strip=none`)
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

mod cases;
mod wire;

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../tests/it/support/mod.rs"]
mod support;

use anyhow::{Context as _, anyhow, bail, ensure};
use cases::Case;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// As the daemon has it.
#[global_allocator]
static ALLOC: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// So many decisions more in the second run.
const DECISIONS: u32 = 400;
/// Decisions of the first run: tables have grown, and code has run once.
const WARM_UP: u32 = 600;
/// The table has what each profile's build should cost.
const PROFILE: &str = if cfg!(debug_assertions) { "dev" } else { "release" };
/// A count may be off by this much from what the table says.
const TOLERANCE_PERCENT: u64 = 4;
/// How many lines `--top` shows.
const TOP: usize = 60;

fn main() -> anyhow::Result<ExitCode> {
    // What `cargo bench` itself adds.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        // The test runner and others list targets this way; there is nothing to list.
        ["--list", ..] => Ok(ExitCode::SUCCESS),
        ["--run", case, decisions] => {
            cases::run(case_of(case)?, decisions.parse()?);
            Ok(ExitCode::SUCCESS)
        }
        ["--top", case] => top(case_of(case)?),
        ["--update"] => update(),
        ["--guard"] => guard(),
        [] => compare(&Case::ALL),
        _ => bail!("want nothing, --guard, --update, or --top CASE; cases: {}", names().join(", ")),
    }
}

fn names() -> Vec<&'static str> {
    Case::ALL.map(Case::name).to_vec()
}

fn case_of(name: &str) -> anyhow::Result<Case> {
    let case = Case::ALL.into_iter().find(|case| case.name() == name);
    case.with_context(|| format!("no case `{name}`; there are {}", names().join(", ")))
}

/// What `tests/run` looks at. Which requests meet in one call to Redis is not the same in every run.
fn guard() -> anyhow::Result<ExitCode> {
    let (here, there) = (compiler()?, compiler_of_table()?);
    if here != there {
        println!("not counted: the table was made with {there}, and this is {here}");
        return Ok(ExitCode::SUCCESS);
    }
    let repeats: Vec<Case> = Case::ALL.into_iter().filter(|case| !case.has_redis()).collect();
    compare(&repeats)
}

fn compare(cases: &[Case]) -> anyhow::Result<ExitCode> {
    let expected = read_table()?;
    let mut off = Vec::new();
    println!("{:<18} {:>10} {:>10} {:>8}", "case", "counted", "table", "");
    for case in cases.iter().copied() {
        let counted = count(case)?;
        let Some(table) = expected.get(&key(case)).copied() else {
            println!("{:<18} {counted:>10} {:>10}", case.name(), "-");
            off.push(format!("{}: not in the table", case.name()));
            continue;
        };
        let percent = 100.0 * (counted as f64 / table as f64 - 1.0);
        println!("{:<18} {counted:>10} {table:>10} {percent:>+7.1}%", case.name());
        if counted.abs_diff(table) * 100 > table * TOLERANCE_PERCENT {
            off.push(format!("{}: {percent:+.1}%", case.name()));
        }
    }
    if off.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("\nmore than {TOLERANCE_PERCENT}% off the table: {}", off.join(", "));
    println!("it was made with {}; this is {}", compiler_of_table()?, compiler()?);
    let profile = if PROFILE == "dev" { " --profile dev" } else { "" };
    println!("if that is as it should be: cargo bench --bench counts{profile} -- --update");
    Ok(ExitCode::FAILURE)
}

fn update() -> anyhow::Result<ExitCode> {
    let mut text =
        "# Instructions a decision, by `cargo bench --bench counts -- --update`; see benches/counts/main.rs.\n"
            .to_owned();
    writeln!(text, "# {}", compiler()?)?;
    let mut all = read_table().unwrap_or_default();
    all.retain(|key, _| !key.starts_with(PROFILE));
    for case in Case::ALL {
        let count = count(case)?;
        println!("{:<18} {count:>10}", case.name());
        all.insert(key(case), count);
    }
    for (key, count) in all {
        writeln!(text, "{key} {count}")?;
    }
    std::fs::write(table(), text)?;
    Ok(ExitCode::SUCCESS)
}

fn top(case: Case) -> anyhow::Result<ExitCode> {
    let folder = tempfile::tempdir()?;
    let out = folder.path().join("callgrind.out");
    let all = instructions(case, WARM_UP + DECISIONS, &out)?;
    let told = Command::new("callgrind_annotate").arg(&out).output().context("callgrind_annotate")?;
    let told = String::from_utf8_lossy(&told.stdout);
    println!("{all} instructions, the start and {} decisions", WARM_UP + DECISIONS);
    let lines = told.lines().filter(|line| line.contains('%') && line.contains(':'));
    lines.take(TOP).for_each(|line| println!("{line}"));
    Ok(ExitCode::SUCCESS)
}

/// Instructions a decision.
fn count(case: Case) -> anyhow::Result<u64> {
    let run = |decisions: u32| {
        let folder = tempfile::tempdir()?;
        instructions(case, decisions, &folder.path().join("callgrind.out"))
    };
    let (few, many) = std::thread::scope(|both| {
        let few = both.spawn(|| run(WARM_UP));
        let many = run(WARM_UP + DECISIONS);
        (few.join(), many)
    });
    let (few, many) = (few.map_err(|_| anyhow!("a run has panicked"))??, many?);
    ensure!(many > few, "{}: {few} instructions for few decisions, {many} for many", case.name());
    Ok((many - few) / u64::from(DECISIONS))
}

/// Runs this program under callgrind.
fn instructions(case: Case, decisions: u32, out: &Path) -> anyhow::Result<u64> {
    let mut command = Command::new("valgrind");
    command
        .args(["--tool=callgrind", "--fair-sched=yes", "--combine-dumps=yes"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe()?)
        .args(["--run", case.name(), &decisions.to_string()]);
    let output = command.output().context("valgrind does not start; install it (Debian: valgrind)")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}:\n{said}", case.name());
    let collected = said.lines().find_map(|line| line.split_once("Collected : "));
    let (_, count) = collected.with_context(|| format!("callgrind has counted nothing:\n{said}"))?;
    Ok(count.trim().parse()?)
}

/// A line of the table.
fn key(case: Case) -> String {
    format!("{PROFILE}.{}", case.name())
}

fn table() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/counts/table.txt")
}

fn read_table() -> anyhow::Result<BTreeMap<String, u64>> {
    let text = std::fs::read_to_string(table()).context("benches/counts/table.txt")?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let entry = |line: &str| {
        let (name, count) = line.split_once(' ').with_context(|| format!("`{line}`: want NAME COUNT"))?;
        Ok((name.to_owned(), count.trim().parse()?))
    };
    lines.map(entry).collect()
}

fn compiler() -> anyhow::Result<String> {
    let output = Command::new("rustc").arg("--version").output().context("rustc")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn compiler_of_table() -> anyhow::Result<String> {
    let text = std::fs::read_to_string(table())?;
    let line = text.lines().filter_map(|line| line.strip_prefix("# ")).find(|line| line.starts_with("rustc"));
    Ok(line.unwrap_or("an unknown compiler").to_owned())
}
