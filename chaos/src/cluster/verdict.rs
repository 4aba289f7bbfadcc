//! What a run comes to: verdicts on the terminal, a report, an exit code.

use super::scenario::Expect;
use super::{BROKEN, COULD_NOT, HELD};
use crate::invariants::{self, Judged, Sum, Verdict};
use crate::oracle::History;
use crate::report;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

/// Judges a history by what a scenario expects of it, tells, and says the exit code.
///
/// # Errors
/// The report cannot be written.
pub fn conclude(
    history: &History,
    expect: &Expect,
    report: Option<&Path>,
    name: &str,
    kept: Option<&Path>,
) -> anyhow::Result<u8> {
    let judged = judge(history, expect);
    let file = report.map_or_else(|| PathBuf::from(format!("quorate-chaos-{name}.html")), Path::to_owned);
    report::write(history, &judged, &file)?;
    let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    print!("{}", report::text(history, &judged, colour));
    for note in &history.notes {
        println!("note: {note}");
    }
    println!("report: {}", file.display());
    if let Some(path) = kept {
        println!("logs, data and history: {}", path.display());
    }
    Ok(match invariants::sum(history, &judged) {
        Sum::Kept => HELD,
        Sum::Broken => BROKEN,
        Sum::TooBusy => COULD_NOT,
    })
}

/// Holds a history against every promise; one that must apply and does not is broken, one that is not made here does not apply.
#[must_use]
pub fn judge(history: &History, expect: &Expect) -> Vec<Judged> {
    let mut judged = invariants::judge(history);
    for judged in &mut judged {
        if let Some((_, why)) = expect.not.iter().find(|(name, _)| *name == judged.name) {
            judged.verdict = Verdict::NotApplicable { why: format!("not promised here: {why}") };
        } else if let Verdict::NotApplicable { why } = &judged.verdict
            && expect.must.contains(&judged.name)
        {
            let detail = format!("the scenario is about this, and it could not be judged: {why}");
            let breach =
                invariants::Breach { detail, span: (Default::default(), history.end), ..Default::default() };
            judged.verdict = Verdict::Broken { breaches: vec![breach] };
        }
    }
    judged
}
