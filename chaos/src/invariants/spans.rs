//! When something was wrong, and with whom.

use crate::oracle::{FaultSpan, History};
use quorate::quota::amount::Micros;

/// Closed spans of time that do not overlap, by time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spans(Vec<(Micros, Micros)>);

impl Spans {
    pub(super) fn new(spans: impl IntoIterator<Item = (Micros, Micros)>) -> Self {
        let mut spans: Vec<_> = spans.into_iter().collect();
        spans.sort_unstable();
        let mut merged: Vec<(Micros, Micros)> = Vec::new();
        for (from, to) in spans {
            match merged.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => merged.push((from, to)),
            }
        }
        Self(merged)
    }

    /// Does any of them have a moment in common with this one?
    pub(super) fn touch(&self, from: Micros, to: Micros) -> bool {
        let first = self.0.partition_point(|span| span.1 < from);
        self.0.get(first).is_some_and(|span| span.0 <= to)
    }

    /// When the last one was over.
    pub(super) fn end(&self) -> Option<Micros> {
        self.0.last().map(|span| span.1)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Micros, Micros)> {
        self.0.iter().copied()
    }
}

/// When a region was disabled, or had not yet got over it.
pub(super) fn disabled(history: &History, region: usize) -> Spans {
    let restart = history.params.restart;
    let faults = history.faults.iter().filter(|f| f.disables && f.regions.contains(&region));
    Spans::new(faults.map(|f| (f.from, end(f) + restart)))
}

/// When a region had no quorum, or had not yet caught up.
pub(super) fn isolated(history: &History, region: usize, catch_up: Micros) -> Spans {
    let faults = history.faults.iter().filter(|f| f.isolates && f.regions.contains(&region));
    Spans::new(faults.map(|f| (f.from, end(f) + catch_up)))
}

/// When anything at all was done to the cluster, or a limit's policy was being changed.
pub(super) fn disturbed(history: &History, limit: usize) -> Spans {
    let faults = history.faults.iter().map(|f| (f.from, end(f)));
    let editions = history.limits.get(limit).map_or(&[][..], |watched| &watched.editions);
    let changes = editions.windows(2).map(|pair| {
        let begun = if pair[0].changing { pair[0].from } else { pair[1].from };
        (begun, pair[1].from)
    });
    let under_way = editions.last().filter(|last| last.changing).map(|last| (last.from, Micros::MAX));
    Spans::new(faults.chain(changes).chain(under_way))
}

/// Spans that follow each other closely, as one.
#[derive(Debug)]
pub(super) struct Joined<F> {
    /// What they have in common.
    pub(super) span: (Micros, Micros),
    /// What is added up.
    pub(super) figures: F,
}

/// Joins spans that are at most `gap` apart; they come in the order of their beginnings.
pub(super) fn join<F>(
    found: impl IntoIterator<Item = ((Micros, Micros), F)>,
    gap: Micros,
    mut add: impl FnMut(&mut F, F),
) -> Vec<Joined<F>> {
    let mut joined: Vec<Joined<F>> = Vec::new();
    for (span, figures) in found {
        match joined.last_mut() {
            Some(last) if span.0 - last.span.1 <= gap => {
                last.span.1 = last.span.1.max(span.1);
                add(&mut last.figures, figures);
            }
            _ => joined.push(Joined { span, figures }),
        }
    }
    joined
}

fn end(fault: &FaultSpan) -> Micros {
    fault.to.unwrap_or(Micros::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;
    use crate::oracle::Mode;

    #[test]
    fn spans_that_touch_are_one() {
        let spans = Spans::new([(ms(5), ms(9)), (ms(0), ms(2)), (ms(2), ms(3)), (ms(6), ms(7))]);
        assert_eq!(spans, Spans(vec![(ms(0), ms(3)), (ms(5), ms(9))]));
        assert!(
            spans.touch(ms(3), ms(4))
                && spans.touch(ms(4), ms(5))
                && !spans.touch(Micros(3_001), Micros(4_999))
        );
        assert_eq!(spans.end(), Some(ms(9)));
    }

    #[test]
    fn a_change_of_policy_disturbs_from_when_it_is_sent() {
        let changing = Edition { changing: true, ..edition(1_000, Mode::Strict, 1, 1) };
        let old_and_new = [edition(0, Mode::Strict, 1, 1), edition(5_000, Mode::Strict, 1, 1)];
        let [old, new] = old_and_new;
        let mut history = history_of(1, vec![old.clone(), changing.clone(), new]);
        assert_eq!(disturbed(&history, 0), Spans(vec![(ms(1_000), ms(5_000))]));
        history.limits[0].editions = vec![old, changing];
        assert_eq!(disturbed(&history, 0).end(), Some(Micros::MAX), "it is not over");
    }
}
