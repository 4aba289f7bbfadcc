//! Verdicts for a terminal.

use crate::invariants::{self, Judged, Sum, Verdict};
use crate::oracle::{History, Wakes};
use quorate::quota::amount::Micros;
use std::fmt::Write;

/// So many breaches of one promise are said.
const BREACHES_SHOWN: usize = 4;

/// The verdicts, a line for each promise, and the command that replays the run if one was broken. Colours only if asked for.
#[must_use]
pub fn text(history: &History, judged: &[Judged], colour: bool) -> String {
    let mut out = String::new();
    let broken = judged.iter().filter(|j| j.verdict.is_broken()).count();
    let paint = |code: &str, what: &str| {
        if colour { format!("\x1b[{code}m{what}\x1b[0m") } else { what.into() }
    };
    let sum = match (broken, invariants::sum(history, judged)) {
        (0, _) => paint("1;32", "every promise was kept"),
        (_, Sum::TooBusy) => paint("1;33", "the machine was too busy to judge"),
        (n, _) => paint("1;31", &format!("{n} of {} promises BROKEN", judged.len())),
    };
    let title = line(&history.run.title);
    let _ = writeln!(out, "{title}: {sum}");
    for judged in judged {
        let (word, code) = match judged.verdict {
            Verdict::Held { .. } => ("held  ", "32"),
            Verdict::Broken { .. } => ("BROKEN", "1;31"),
            Verdict::NotApplicable { .. } => ("-     ", "2"),
        };
        let _ =
            writeln!(out, "  {} {:<18} {}", paint(code, word), judged.name, line(&first(&judged.verdict)));
        for breach in judged.verdict.breaches().iter().take(BREACHES_SHOWN).skip(1) {
            let _ = writeln!(out, "{:28}{}", "", line(&breach.to_string()));
        }
    }
    if let Some(late) = woke_late(history) {
        let _ = writeln!(out, "{late}");
    }
    if broken > 0 && !history.run.replay.is_empty() {
        let _ = writeln!(out, "replay: {}", line(&history.run.replay));
    }
    out
}

/// One line for a failed run: what was broken, and the command that replays it; `None`: nothing was.
#[must_use]
pub fn failure(history: &History, judged: &[Judged]) -> Option<String> {
    let mut broken = judged.iter().filter(|j| j.verdict.is_broken());
    let worst = broken.next()?;
    let others = match broken.count() {
        0 => String::new(),
        n => format!(" (and {n} more)"),
    };
    Some(format!(
        "{}: {} broken{others}: {}; replay: {}",
        line(&history.run.title),
        worst.name,
        line(&first(&worst.verdict)),
        line(&history.run.replay)
    ))
}

/// What a machine that was busy with other things did to the run; `None`: nothing that was noticed.
pub(super) fn woke_late(history: &History) -> Option<String> {
    let wakes = history.wakes;
    if wakes.late == 0 {
        return None;
    }
    let what = if wakes.too_busy() { "starved" } else { "busy at times" };
    let ms = |time: Micros| time.0 / 1_000;
    Some(format!(
        "machine {what}: the harness woke more than {} ms late {} times, {} ms at worst, {} ms in all",
        ms(Wakes::LATE),
        wakes.late,
        ms(wakes.worst),
        ms(wakes.lost)
    ))
}

/// What there is to say, or the worst breach and how many others there are.
fn first(verdict: &Verdict) -> String {
    match verdict.breaches() {
        [] => verdict.detail(),
        [only] => only.to_string(),
        [worst, others @ ..] => format!("{worst} (and {} more)", others.len()),
    }
}

/// Nothing in a history moves the cursor.
fn line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
