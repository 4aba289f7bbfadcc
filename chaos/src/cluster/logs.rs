//! What daemons wrote that a person should look at.

use crate::oracle::{LogLevel, LogLine};
use std::collections::BTreeMap;
use std::path::Path;

/// The most different lines that are kept of one daemon.
const LINES_MAX: usize = 60;
/// The longest of them, in characters.
const CHARS_MAX: usize = 400;

/// Reads a daemon's log. Lines of level ERROR that hold one of `expected` are.
#[must_use]
pub fn summary(region: usize, file: &Path, expected: &[String]) -> Vec<LogLine> {
    let text = String::from_utf8_lossy(&std::fs::read(file).unwrap_or_default()).into_owned();
    of_text(region, &text, expected)
}

fn of_text(region: usize, text: &str, expected: &[String]) -> Vec<LogLine> {
    let mut kinds: BTreeMap<(LogLevel, String), LogLine> = BTreeMap::new();
    for line in text.lines() {
        let Some((level, text)) = bad(line) else { continue };
        let kind = (level, without_numbers(text));
        let full = kinds.len() >= LINES_MAX;
        match kinds.get_mut(&kind) {
            Some(known) => known.count += 1,
            None if full && level == LogLevel::Warn => {}
            None => {
                let expected = level == LogLevel::Error && expected.iter().any(|e| text.contains(e));
                let text = text.chars().take(CHARS_MAX).collect();
                kinds.insert(kind, LogLine { region, level, text, count: 1, expected });
            }
        }
    }
    let mut lines: Vec<LogLine> = kinds.into_values().collect();
    lines.sort_by_key(|line| std::cmp::Reverse((line.level, line.count)));
    lines
}

/// The level of a line that is worth a look, and the line from there on.
fn bad(line: &str) -> Option<(LogLevel, &str)> {
    // The runtime's own words: no subscriber writes them.
    if line.starts_with("thread '") && line.contains("panicked at") {
        return Some((LogLevel::Panic, line));
    }
    let (_time, rest) = line.split_once(char::is_whitespace)?;
    let rest = rest.trim_start();
    let (level, text) = rest.split_once(' ')?;
    match level {
        "ERROR" => Some((LogLevel::Error, text.trim_start())),
        "WARN" => Some((LogLevel::Warn, text.trim_start())),
        _ => None,
    }
}

/// Lines that differ in numbers alone say the same.
fn without_numbers(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for c in text.chars() {
        if !c.is_ascii_digit() {
            plain.push(c);
        } else if !plain.ends_with('#') {
            plain.push('#');
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
2026-01-01T00:00:00.000001Z  INFO quorate::node: ready after_ms=3
2026-01-01T00:00:00.100000Z  WARN quorate::raft: peer 1 is away for 20 ms
2026-01-01T00:00:00.200000Z  WARN quorate::raft: peer 2 is away for 1 ms
2026-01-01T00:00:01.000000Z ERROR quorate::raft: disk full
thread 'control' (7) panicked at src/x.rs:1:2:
2026-01-01T00:00:01.000000Z  INFO quorate: not an ERROR at all
";

    #[test]
    fn the_worst_comes_first_and_like_lines_are_counted() {
        let lines = of_text(2, LOG, &[]);
        let seen: Vec<(LogLevel, u64, bool)> = lines.iter().map(|l| (l.level, l.count, l.expected)).collect();
        let expected = [(LogLevel::Panic, 1, false), (LogLevel::Error, 1, false), (LogLevel::Warn, 2, false)];
        assert_eq!(seen, expected);
        assert_eq!(lines[2].text, "quorate::raft: peer 1 is away for 20 ms");
        assert!(lines.iter().all(|l| l.region == 2));
    }

    #[test]
    fn a_scenario_may_expect_errors_and_never_panics() {
        let lines = of_text(0, LOG, &["disk full".to_owned(), "panicked".to_owned()]);
        let expected: Vec<(LogLevel, bool)> = lines.iter().map(|l| (l.level, l.expected)).collect();
        assert_eq!(expected, [(LogLevel::Panic, false), (LogLevel::Error, true), (LogLevel::Warn, false)]);
    }
}
