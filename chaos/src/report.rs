//! A history and its verdicts, for people: one self-contained HTML file, good enough to attach to an incident review, and a few
//! lines for a terminal.

mod chart;
mod data;
mod page;
mod series;
mod text;

pub use text::{failure, text};

use crate::invariants::{Judged, all_held, judge};
use crate::oracle::History;
use anyhow::Context;
use std::fs;
use std::io::{IsTerminal, Write};
use std::path::Path;

/// The page: no file beside it, no network, light and dark, for screens and paper. The history is in it as JSON, so that others
/// can look at it again ([`read`] does).
#[must_use]
pub fn html(history: &History, judged: &[Judged]) -> String {
    page::page(history, judged)
}

/// Reads a history from a run's JSON, or out of a report that holds all of it.
///
/// # Errors
/// The file cannot be read, is neither, or is a report of a run that was too long to be kept in it.
pub fn read(file: &Path) -> anyhow::Result<History> {
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    data::parse(&text).with_context(|| format!("{} is neither a history nor a report", file.display()))
}

/// Judges the history in `file`, writes the page to `page`, and says on stdout what was found. Was every promise kept?
///
/// # Errors
/// As [`read`]; or the page cannot be written.
pub fn command(file: &Path, page: &Path) -> anyhow::Result<bool> {
    let history = read(file)?;
    let judged = judge(&history);
    write(&history, &judged, page)?;
    let mut out = std::io::stdout();
    let colour = out.is_terminal() && std::env::var_os("NO_COLOR").is_none();
    write!(out, "{}", text(&history, &judged, colour)).context("cannot write to stdout")?;
    writeln!(out, "report: {}", page.display()).context("cannot write to stdout")?;
    Ok(all_held(&judged))
}

/// Writes the page.
///
/// # Errors
/// The file cannot be written.
pub fn write(history: &History, judged: &[Judged], page: &Path) -> anyhow::Result<()> {
    fs::write(page, html(history, judged)).with_context(|| format!("cannot write {}", page.display()))
}

#[cfg(test)]
mod tests;
