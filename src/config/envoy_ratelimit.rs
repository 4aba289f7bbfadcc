//! The YAML of envoyproxy/ratelimit, carried over to policies: what `quorate import envoy-ratelimit` does.
//!
//! Read from that project's `src/config/config_impl.go` and README (at commit f2fb157 of July 2026): which keys there are, what
//! refuses the load, how a level is matched, what a window is. Three steps: the files to a tree (`read`), the tree to limits that
//! match here what they matched there (`carry`), and those to the text of a policy file (`write`).

mod carry;
mod read;
mod write;

use super::fault::{Faults, Mark};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How limits are to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// What a limit becomes.
    pub limits: Limits,
    /// How regions share it.
    pub sharing: Sharing,
}

/// What a limit of so many requests a unit becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limits {
    /// A token bucket where the unit is a second, else a quota in fixed windows.
    Auto,
    /// Always a quota in fixed windows, as there.
    Quota,
    /// Always a token bucket that holds one window's requests.
    TokenBucket,
}

/// The `mode` of every policy, with what belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// `strict`: denies while a region's store does not answer.
    Strict,
    /// `approximate`, with an overshoot of 10%: lets requests through while a region's store does not answer.
    Approximate,
    /// `split`: the same.
    Split,
}

/// What became of some files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The policy file.
    pub text: String,
    /// How many policies are in it.
    pub policies: usize,
    /// What could not be carried over, in the order of the files and their lines.
    pub lost: Vec<Lost>,
}

/// Something that could not be carried over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Where it stands.
    pub place: Place,
    /// What it is, and what holds instead.
    pub what: String,
    /// What to do about it.
    pub mend: String,
}

/// A place in one of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which file.
    pub file: Arc<Path>,
    /// The number of the file, in the order in which they were given.
    order: usize,
    /// Where in it.
    pub mark: Mark,
}

/// Orders places.
type PlaceKey<'a> = (usize, &'a Mark);

impl Place {
    fn key(&self) -> PlaceKey<'_> {
        (self.order, &self.mark)
    }
}

impl std::fmt::Display for Place {
    /// `FILE:LINE:COL`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.mark {
            Mark::At { line, column } => write!(f, "{}:{line}:{column}", self.file.display()),
            Mark::Env(name) => f.write_str(name),
        }
    }
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { place, what, mend } = self;
        write!(f, "{place}: not carried over: {what}; {mend}")
    }
}

/// Carries files (their names and texts, in the order in which that service would load them) over to one policy file.
///
/// # Errors
/// What that service would refuse to load, and what it would load and ignore: a key in a place where it means nothing.
/// One set of faults for each file that has some.
pub fn import(files: &[(PathBuf, String)], style: Style) -> Result<Imported, Vec<Faults>> {
    let domains = read::read(files)?;
    let carried = carry::carry(&domains);
    let names: Vec<&Path> = files.iter().map(|(file, _)| file.as_path()).collect();
    let text = write::write(&names, &carried, style);
    let mut lost = carried.lost;
    lost.sort_by(|a, b| a.place.key().cmp(&b.place.key()));
    Ok(Imported { text, policies: carried.limits.len(), lost })
}
