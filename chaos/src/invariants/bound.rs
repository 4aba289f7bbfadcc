//! What the three bounds have in common: a limit of a history as a [`Bound`], its worst windows, and words for them.

use super::figures::{count, seconds, span, tokens};
use super::windows::{Admitted, Bound, Step, Window};
use super::{Breach, Verdict};
use crate::oracle::{Edition, History, Mode, Outcome, Watched};
use quorate::quota::amount::{Rate, Tokens};

/// Judges all limits that have such an edition, each as a whole.
pub(super) fn check(history: &History, modes: impl Fn(&Watched) -> bool, none: &str) -> Verdict {
    let mut found = Findings::default();
    for (limit, watched) in history.limits.iter().enumerate().filter(|(_, watched)| modes(watched)) {
        found.add_whole(history, limit, watched);
    }
    found.verdict(none)
}

/// Has the limit ever been in this mode?
pub(super) fn ever(watched: &Watched, mode: Mode) -> bool {
    watched.editions.iter().any(|edition| edition.mode == mode)
}

/// What all regions together may admit.
pub(crate) fn whole(watched: &Watched) -> Bound {
    steps(watched, |edition| (edition.rate, edition.cap()))
}

/// What was admitted of a limit, in one region or in all.
pub(crate) fn admitted(history: &History, limit: usize, region: Option<usize>) -> Vec<Admitted> {
    let requests = history.requests.iter().filter(|r| {
        r.limit == limit && r.outcome == Outcome::Allowed && region.is_none_or(|region| r.region == region)
    });
    let requests = requests.filter(|r| r.cost.is_positive());
    requests.map(|r| Admitted { sent: r.sent, answered: r.answered, cost: r.cost }).collect()
}

/// What one region may admit by itself, while the mode is split.
pub(super) fn part(watched: &Watched, region: usize) -> Bound {
    steps(watched, |edition| match edition.mode {
        Mode::Split => edition.part_max(region),
        Mode::Strict | Mode::Approximate => (edition.rate, edition.cap()),
    })
}

fn steps(watched: &Watched, of: impl Fn(&Edition) -> (Rate, Tokens)) -> Bound {
    let step = |edition: &Edition| {
        let (rate, cap) = of(edition);
        Step { from: edition.from, rate, cap }
    };
    Bound::new(watched.editions.iter().map(step).collect())
}

/// The worst windows of all bounds that were looked at.
#[derive(Debug, Default)]
pub(super) struct Findings {
    looked: usize,
    requests: usize,
    /// The tightest of those that held, and what it is about.
    closest: Option<(Window, String)>,
    /// By excess.
    broken: Vec<(Window, Breach)>,
}

impl Findings {
    /// Looks at all windows of a limit, over all regions.
    pub(super) fn add_whole(&mut self, history: &History, limit: usize, watched: &Watched) {
        let admitted = admitted(history, limit, None);
        self.requests += admitted.len();
        self.add(&whole(watched), &admitted, limit, None, &format!("`{}`", watched.name));
    }

    /// Looks at all windows of a limit in one region, while it is split.
    pub(super) fn add_part(&mut self, history: &History, limit: usize, watched: &Watched, region: usize) {
        let admitted = admitted(history, limit, Some(region));
        let name = history.regions.get(region).map_or_else(|| format!("region {region}"), Clone::clone);
        let what = format!("`{}` in {name}", watched.name);
        self.add(&part(watched, region), &admitted, limit, Some(region), &what);
    }

    /// All of it in one verdict.
    pub(super) fn verdict(mut self, none: &str) -> Verdict {
        if self.looked == 0 {
            return Verdict::NotApplicable { why: none.into() };
        }
        self.broken.sort_by_key(|(window, _)| std::cmp::Reverse(window.excess));
        let breaches = self.broken.drain(..).map(|(_, breach)| breach).collect();
        Verdict::of(breaches, || Verdict::Held { detail: self.how_close() })
    }

    fn add(&mut self, bound: &Bound, admitted: &[Admitted], limit: usize, region: Option<usize>, what: &str) {
        self.looked += 1;
        let Some(worst) = bound.worst(admitted) else { return };
        if worst.excess > 0 {
            let detail = broken(&worst, admitted, what);
            let span = (worst.opens, worst.closes);
            self.broken.push((worst, Breach { detail, span, limit: Some(limit), region }));
        } else if self.closest.as_ref().is_none_or(|(closest, _)| worst.excess > closest.excess) {
            self.closest = Some((worst, what.into()));
        }
    }

    fn how_close(&self) -> String {
        let Some((window, what)) = &self.closest else { return "nothing was admitted".into() };
        format!(
            "closest in {} of {what}: {} of {} tokens of burst in use, {} to spare; {} admitted in all",
            span((window.opens, window.closes)),
            tokens(window.used()),
            tokens(window.cap),
            tokens(-window.excess()),
            count(self.requests, "request"),
        )
    }
}

fn broken(window: &Window, admitted: &[Admitted], what: &str) -> String {
    let held = window.held(admitted);
    format!(
        "{what} admitted {} tokens within {}; burst {} and what flows in that time allow {}: {} too many",
        tokens(held),
        seconds(window.length()),
        tokens(window.cap),
        tokens(held - window.excess()),
        tokens(window.excess()),
    )
}
