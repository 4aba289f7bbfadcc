//! The promises, one file each: what a [`History`] must look like for Quorate to have kept its word.
//!
//! An invariant must not cry wolf: what is uncertain (a request is decided somewhere between its sending and its answer)
//! counts in favour of what is tested. And it must not sleep: each has a made-up history for every way to break it.

mod answered;
mod approximate_bound;
mod bound;
mod conservation;
pub mod figures;
mod floor;
mod loans;
#[cfg(test)]
pub(crate) mod made_up;
mod no_false_denial;
mod quiet_logs;
mod recovery;
mod reserve_available;
mod spans;
mod split_bound;
mod strict_bound;
pub mod windows;

pub(crate) use bound::{admitted, whole};

pub use answered::Answered;
pub use approximate_bound::ApproximateBound;
pub use conservation::Conservation;
pub use no_false_denial::NoFalseDenial;
pub use quiet_logs::QuietLogs;
pub use recovery::Recovery;
pub use reserve_available::ReserveAvailable;
pub use split_bound::SplitBound;
pub use strict_bound::StrictBound;

use crate::oracle::History;
use quorate::quota::amount::Micros;
use serde::{Deserialize, Serialize};
use std::fmt;

/// All of them, in the order in which they are shown.
pub const ALL: [&dyn Invariant; 9] = [
    &StrictBound,
    &ApproximateBound,
    &SplitBound,
    &Conservation,
    &ReserveAvailable,
    &Answered,
    &Recovery,
    &NoFalseDenial,
    &QuietLogs,
];

/// At most so many breaches of one invariant are kept.
pub const BREACHES_MAX: usize = 20;

/// A promise.
pub trait Invariant: Sync {
    /// What scenarios call it: `strict-bound`.
    fn name(&self) -> &'static str;
    /// What is promised, in one sentence for people.
    fn promise(&self) -> &'static str;
    /// Was it kept?
    fn check(&self, history: &History) -> Verdict;
}

/// Was a promise kept?
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Yes.
    Held {
        /// What was looked at, and how close it came.
        detail: String,
    },
    /// No.
    Broken {
        /// Where: at least one and at most [`BREACHES_MAX`], the worst first.
        breaches: Vec<Breach>,
    },
    /// There was nothing to judge.
    NotApplicable {
        /// Why not.
        why: String,
    },
}

/// One place in which a promise was broken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Breach {
    /// What happened, with figures.
    pub detail: String,
    /// From when to when (true time).
    pub span: (Micros, Micros),
    /// Of which limit, if it is about one.
    pub limit: Option<usize>,
    /// In which region, if it is about one.
    pub region: Option<usize>,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", figures::span(self.span), self.detail)
    }
}

/// A promise and its verdict.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Judged {
    /// As in [`Invariant::name`].
    pub name: String,
    /// As in [`Invariant::promise`].
    pub promise: String,
    /// Was it kept?
    pub verdict: Verdict,
}

/// Holds a history against every promise.
#[must_use]
pub fn judge(history: &History) -> Vec<Judged> {
    judge_by(&ALL, history)
}

/// Holds a history against these promises.
#[must_use]
pub fn judge_by(invariants: &[&dyn Invariant], history: &History) -> Vec<Judged> {
    let judged = |invariant: &&dyn Invariant| Judged {
        name: invariant.name().into(),
        promise: invariant.promise().into(),
        verdict: invariant.check(history),
    };
    invariants.iter().map(judged).collect()
}

/// The invariant of this name.
#[must_use]
pub fn named(name: &str) -> Option<&'static dyn Invariant> {
    ALL.into_iter().find(|invariant| invariant.name() == name)
}

/// What all verdicts together come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sum {
    /// No promise was broken.
    Kept,
    /// One was.
    Broken,
    /// None but of what takes time, and the machine had none to give: see [`Wakes::too_busy`](crate::oracle::Wakes::too_busy).
    TooBusy,
}

/// These fail on a machine that is too busy, whatever is tested. (Nothing excuses a bound.)
const TAKES_TIME: [&str; 3] = ["answered", "recovery", "no-false-denial"];

/// Sums verdicts up.
#[must_use]
pub fn sum(history: &History, judged: &[Judged]) -> Sum {
    let mut broken = judged.iter().filter(|j| j.verdict.is_broken()).peekable();
    if broken.peek().is_none() {
        return Sum::Kept;
    }
    let excused = history.wakes.too_busy() && broken.all(|j| TAKES_TIME.contains(&&*j.name));
    if excused { Sum::TooBusy } else { Sum::Broken }
}

/// Was none of them broken?
#[must_use]
pub fn all_held(judged: &[Judged]) -> bool {
    !judged.iter().any(|j| j.verdict.is_broken())
}

impl Verdict {
    /// Was the promise broken?
    #[must_use]
    pub fn is_broken(&self) -> bool {
        matches!(self, Self::Broken { .. })
    }

    /// Where it was broken: nothing unless it was.
    #[must_use]
    pub fn breaches(&self) -> &[Breach] {
        if let Self::Broken { breaches } = self { breaches } else { &[] }
    }

    /// What there is to say, in one line.
    #[must_use]
    pub fn detail(&self) -> String {
        match self {
            Self::Held { detail } => detail.clone(),
            Self::NotApplicable { why } => why.clone(),
            Self::Broken { breaches } => match breaches.as_slice() {
                [] => "broken".into(),
                [only] => only.detail.clone(),
                [worst, others @ ..] => format!("{} (and {} more)", worst.detail, others.len()),
            },
        }
    }

    /// Broken if there are breaches, the worst first; otherwise what `held` says.
    fn of(mut breaches: Vec<Breach>, held: impl FnOnce() -> Self) -> Self {
        if breaches.is_empty() {
            return held();
        }
        breaches.truncate(BREACHES_MAX);
        Self::Broken { breaches }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::Wakes;

    #[test]
    fn a_busy_machine_excuses_what_takes_time_and_nothing_else() {
        let judged = |names: &[&str]| -> Vec<Judged> {
            let verdict = || Verdict::Broken { breaches: vec![Breach::default()] };
            names
                .iter()
                .map(|name| Judged { name: (*name).into(), promise: String::new(), verdict: verdict() })
                .collect()
        };
        let history = |late: &[i64]| {
            let mut wakes = Wakes::default();
            late.iter().for_each(|late| wakes.add(Micros::millis(*late)));
            History { wakes, ..History::default() }
        };
        let (idle, busy) = (history(&[900, 3, 249, 260, 300, 200]), history(&[260, 260, 260, 260, 260]));
        assert_eq!(sum(&busy, &[]), Sum::Kept);
        assert_eq!(sum(&busy, &judged(&["recovery", "answered"])), Sum::TooBusy);
        assert_eq!(sum(&history(&[2_000]), &judged(&["no-false-denial"])), Sum::TooBusy);
        assert_eq!(sum(&idle, &judged(&["recovery"])), Sum::Broken, "three times is not often");
        for bound in ["strict-bound", "approximate-bound", "split-bound", "conservation"] {
            assert_eq!(sum(&busy, &judged(&["recovery", bound])), Sum::Broken);
        }
        assert!(TAKES_TIME.iter().all(|name| named(name).is_some()));
    }
}
