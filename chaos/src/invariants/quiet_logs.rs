//! No daemon panics, and none logs at level ERROR, which means that a person must look: the protocol's own checks do so when
//! books do not balance.

use super::{Breach, Invariant, Verdict};
use crate::oracle::{History, LogLevel};
use quorate::quota::amount::Micros;

/// See the module.
#[derive(Clone, Copy, Debug, Default)]
pub struct QuietLogs;

impl Invariant for QuietLogs {
    fn name(&self) -> &'static str {
        "quiet-logs"
    }

    fn promise(&self) -> &'static str {
        "No daemon panics, ends by itself or logs an ERROR that the scenario does not expect."
    }

    fn check(&self, history: &History) -> Verdict {
        let unexpected = history.notes.iter().filter(|note| note.starts_with("unexpected: "));
        let ended =
            unexpected.map(|note| Breach { detail: note.clone(), span: whole(history), ..Breach::default() });
        let bad = history.logs.iter().filter(|line| line.level > LogLevel::Warn && !line.expected);
        let logged = bad.map(|line| {
            let region = history.regions.get(line.region).map(String::as_str).unwrap_or_default();
            let times = if line.count == 1 { String::new() } else { format!(" ({} times)", line.count) };
            let detail = format!("{region}: {:?}: {}{times}", line.level, line.text);
            Breach { detail, span: whole(history), limit: None, region: Some(line.region) }
        });
        let warnings: u64 = history.logs.iter().filter(|l| l.level == LogLevel::Warn).map(|l| l.count).sum();
        Verdict::of(ended.chain(logged).collect(), || Verdict::Held {
            detail: format!("{warnings} warnings, nothing worse"),
        })
    }
}

fn whole(history: &History) -> (Micros, Micros) {
    (Micros::ZERO, history.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::LogLine;

    fn history(level: LogLevel, expected: bool) -> History {
        let line = LogLine { region: 0, level, text: "quorate::x: 1".into(), count: 2, expected };
        History { regions: vec!["a".into()], logs: vec![line], ..History::default() }
    }

    #[test]
    fn warnings_and_what_is_expected_are_quiet() {
        assert!(!QuietLogs.check(&history(LogLevel::Warn, false)).is_broken());
        assert!(!QuietLogs.check(&history(LogLevel::Error, true)).is_broken());
    }

    #[test]
    fn errors_panics_and_ends_are_not() {
        let verdict = QuietLogs.check(&history(LogLevel::Error, false));
        assert!(verdict.detail().ends_with("a: Error: quorate::x: 1 (2 times)"), "{}", verdict.detail());
        assert!(QuietLogs.check(&history(LogLevel::Panic, false)).is_broken());
        let ended = History { notes: vec!["unexpected: a: the daemon ended".into()], ..History::default() };
        assert!(QuietLogs.check(&ended).is_broken());
    }
}
