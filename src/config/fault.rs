//! What is wrong with a file, where, and how to mend it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most faults of one file that are reported.
const FAULTS_MAX: usize = 100;

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: cannot read it: {error}; check the path and its permissions", file.display())]
    Unreadable {
        /// Which file.
        file: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It was read, and is wrong.
    #[error("{0}")]
    Invalid(Faults),
}

/// Everything that is wrong with one file, in the order of its lines. Shown with one fault a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults {
    file: PathBuf,
    faults: Vec<Fault>,
    /// How many there were beyond [`FAULTS_MAX`].
    more: usize,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub mark: Mark,
    /// What is wrong. Never a secret.
    pub what: String,
    /// How to mend it.
    pub mend: String,
}

/// Where something was written.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mark {
    /// In the file, both counted from 1.
    At {
        /// Line.
        line: u64,
        /// Column, in characters.
        column: u64,
    },
    /// In this environment variable.
    Env(Arc<str>),
}

impl fmt::Display for Fault {
    /// `LINE:COL: what; how to mend it`, without the file; or the variable's name in front.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mark, what, mend } = self;
        match mark {
            Mark::At { line, column } => write!(f, "{line}:{column}: {what}; {mend}"),
            Mark::Env(name) => write!(f, "{name}: {what}; {mend}"),
        }
    }
}

impl Mark {
    /// The first character of the file: what is missing from it as a whole is reported here.
    pub const START: Self = Self::At { line: 1, column: 1 };
}

impl fmt::Display for Mark {
    /// For a mend that points elsewhere: `line 3`, or the variable.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::At { line, .. } => write!(f, "line {line}"),
            Self::Env(name) => f.write_str(name),
        }
    }
}

impl Faults {
    /// No faults yet.
    #[must_use]
    pub fn new(file: &Path) -> Self {
        Self { file: file.to_owned(), faults: Vec::new(), more: 0 }
    }

    /// One more.
    pub fn push(&mut self, mark: &Mark, what: impl Into<String>, mend: impl Into<String>) {
        if self.is_full() {
            self.more += 1;
            return;
        }
        self.faults.push(Fault { mark: mark.clone(), what: what.into(), mend: mend.into() });
    }

    /// The file that they are in.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// No faults at all?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// Are so many reported already that more are only counted?
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.faults.len() >= FAULTS_MAX
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter()
    }

    /// `value` if nothing is wrong, else what is, in the order of the lines.
    ///
    /// # Errors
    /// There are faults, or there is no value (which is then a fault of its own).
    pub fn or<T>(mut self, value: Option<T>) -> Result<T, Self> {
        match value {
            Some(value) if self.faults.is_empty() => Ok(value),
            _ => {
                if self.faults.is_empty() {
                    self.push(&Mark::START, "the file could not be used", "check it against config/");
                }
                self.faults.sort_by(|a, b| a.mark.cmp(&b.mark));
                Err(self)
            }
        }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display();
        for (index, fault) in self.faults.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            match fault.mark {
                Mark::At { .. } => write!(f, "{file}:{fault}")?,
                Mark::Env(_) => write!(f, "{fault}")?,
            }
        }
        if self.more > 0 {
            write!(f, "\n{file}: {} more faults; mend these first", self.more)?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

/// A value as a message may show it: short, on one line.
#[must_use]
pub fn shown(value: &str) -> String {
    const CHARS_MAX: usize = 40;
    let mut short: String = value.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if value.chars().nth(CHARS_MAX).is_some() {
        short.push('…');
    }
    format!("`{short}`")
}

/// `` `a`, `b` or `c` ``.
#[must_use]
pub fn one_of(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        None => "nothing".to_owned(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
    }
}

/// How to mend a name that is not among the known ones: the nearest, if one is near, else all.
#[must_use]
pub fn did_you_mean(name: &str, known: &[&str]) -> String {
    match nearest(name, known) {
        Some(known) => format!("did you mean `{known}`?"),
        None => format!("it may be {}", one_of(known)),
    }
}

/// The known name that this one was probably meant to be.
#[must_use]
pub fn nearest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    const BYTES_MAX: usize = 64;
    if name.len() > BYTES_MAX {
        return None;
    }
    let (edits, known) = known.iter().map(|k| (strsim::osa_distance(name, k), *k)).min()?;
    (edits <= 1 + known.len() / 4).then_some(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_name_is_suggested_and_a_far_one_is_not() {
        let known = ["unlimited", "limit", "match", "mode"];
        assert_eq!(did_you_mean("unlimied", &known), "did you mean `unlimited`?");
        assert_eq!(did_you_mean("limti", &known), "did you mean `limit`?");
        assert_eq!(did_you_mean("xyz", &known), "it may be `unlimited`, `limit`, `match` or `mode`");
        assert_eq!(did_you_mean("", &known), "it may be `unlimited`, `limit`, `match` or `mode`");
    }

    #[test]
    fn what_is_shown_is_short_and_on_one_line() {
        assert_eq!(shown("a\nb"), "`a\\nb`");
        assert_eq!(shown(&"x".repeat(100)).chars().count(), 43);
    }

    #[test]
    fn faults_come_in_the_order_of_lines_and_stop_somewhere() {
        let mut faults = Faults::new(Path::new("f.yaml"));
        faults.push(&Mark::At { line: 2, column: 1 }, "b", "mend b");
        faults.push(&Mark::At { line: 1, column: 9 }, "a", "mend a");
        let shown = faults.clone().or(Some(())).unwrap_err().to_string();
        assert_eq!(shown, "f.yaml:1:9: a; mend a\nf.yaml:2:1: b; mend b");
        (0..200).for_each(|_| faults.push(&Mark::START, "c", "mend c"));
        assert!(faults.to_string().ends_with("102 more faults; mend these first"));
    }
}
