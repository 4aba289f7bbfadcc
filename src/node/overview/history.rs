//! The last five minutes of the busiest policies, region by region.

use crate::server::state::{HistoriesState, HistoryState, RateState, SeriesState};
use std::collections::{BTreeMap, VecDeque};

/// Samples (a second apart) in one step.
const STEP_SAMPLES: u32 = 3;
/// A step, in milliseconds.
const STEP_MS: u64 = 3_000;
/// Steps that are kept.
const STEPS_MAX: usize = 100;
/// Policies that are kept ...
const POLICIES_MAX: usize = 64;
/// ... and shown.
const POLICIES_SHOWN: usize = 16;

/// What passes under a policy, by region; `None`: not heard of it lately.
pub type Sample<'s> = BTreeMap<&'s str, BTreeMap<&'s str, Option<RateState>>>;

/// What passed, step by step.
#[derive(Debug, Default)]
pub struct History {
    policies: BTreeMap<String, Kept>,
    samples: u32,
    end_ms: u64,
}

/// One policy.
#[derive(Debug, Default)]
struct Kept {
    /// By region.
    series: BTreeMap<String, Series>,
    /// Everything in all of them.
    total: u64,
}

#[derive(Debug, Default)]
struct Series {
    steps: VecDeque<Option<(u64, u64)>>,
    sum: (u64, u64),
    heard: u32,
}

impl History {
    /// Adds a sample, which every policy with traffic and every region is in.
    pub fn add(&mut self, sample: &Sample<'_>, regions: &[&str], now_ms: u64) {
        for (policy, by_region) in sample {
            let rates = by_region.values().flatten().map(|r| r.admitted.saturating_add(r.denied));
            let busy = rates.fold(0, u64::saturating_add);
            if busy == 0 || self.policies.contains_key(*policy) {
                continue;
            }
            if self.policies.len() >= POLICIES_MAX {
                // One that was hardly busy in all this time makes room for it.
                let least = self.policies.iter().min_by_key(|(_, kept)| kept.total);
                let least = least.filter(|(_, kept)| kept.total < busy).map(|(name, _)| name.clone());
                let Some(least) = least else { continue };
                self.policies.remove(&least);
            }
            self.policies.insert((*policy).to_owned(), Kept { total: busy, ..Kept::default() });
        }
        self.samples = self.samples.saturating_add(1);
        let step_ends = self.samples >= STEP_SAMPLES;
        for (policy, kept) in &mut self.policies {
            let by_region = sample.get(policy.as_str());
            for region in regions {
                let rate = by_region.and_then(|r| r.get(region)).copied().flatten();
                kept.series.entry((*region).to_owned()).or_default().add(rate);
            }
            if step_ends {
                kept.series.values_mut().for_each(Series::end_step);
                kept.series.retain(|_, series| series.steps.iter().any(Option::is_some));
                kept.total = kept.series.values().map(Series::total).fold(0, u64::saturating_add);
            }
        }
        if step_ends {
            (self.samples, self.end_ms) = (0, now_ms);
            self.policies.retain(|_, kept| kept.total > 0);
        }
    }

    /// The busiest.
    pub fn state(&self) -> HistoriesState {
        let mut busiest: Vec<_> = self.policies.iter().collect();
        busiest.sort_by_key(|(_, kept)| std::cmp::Reverse(kept.total));
        let policies = busiest.into_iter().take(POLICIES_SHOWN).map(|(policy, kept)| {
            let regions = kept.series.iter().map(|(region, series)| {
                let (admitted, denied) =
                    series.steps.iter().map(|step| (step.map(|s| s.0), step.map(|s| s.1))).unzip();
                (region.clone(), SeriesState { admitted, denied })
            });
            (policy.clone(), HistoryState { regions: regions.collect() })
        });
        HistoriesState { step_ms: STEP_MS, end_ms: self.end_ms, policies: policies.collect() }
    }
}

impl Series {
    fn add(&mut self, rate: Option<RateState>) {
        if let Some(rate) = rate {
            self.heard = self.heard.saturating_add(1);
            self.sum.0 = self.sum.0.saturating_add(rate.admitted);
            self.sum.1 = self.sum.1.saturating_add(rate.denied);
        }
    }

    fn end_step(&mut self) {
        let heard = u64::from(self.heard);
        let step = self.sum.0.checked_div(heard).zip(self.sum.1.checked_div(heard));
        (self.sum, self.heard) = Default::default();
        if self.steps.len() >= STEPS_MAX {
            self.steps.pop_front();
        }
        self.steps.push_back(step);
    }

    fn total(&self) -> u64 {
        let steps = self.steps.iter().flatten();
        steps.map(|(admitted, denied)| admitted.saturating_add(*denied)).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(admitted: u64) -> Option<RateState> {
        Some(RateState { admitted, denied: 1, fallbacks: 0 })
    }

    #[test]
    fn steps_are_averages_and_silence_is_a_gap() {
        let mut history = History::default();
        let regions = ["a", "b"];
        for second in 0..9_u64 {
            let b = if second < 3 { rate(50) } else { None };
            let sample: Sample<'_> = [("p", [("a", rate(100 * (second + 1))), ("b", b)].into())].into();
            history.add(&sample, &regions, second * 1_000);
        }
        let state = history.state();
        assert_eq!((state.step_ms, state.end_ms), (3_000, 8_000));
        let p = &state.policies["p"];
        assert_eq!(p.regions["a"].admitted, [Some(200), Some(500), Some(800)]);
        assert_eq!(p.regions["a"].denied, [Some(1), Some(1), Some(1)]);
        assert_eq!(p.regions["b"].admitted, [Some(50), None, None]);
    }

    #[test]
    fn it_is_bounded_in_time_and_in_policies() {
        let mut history = History::default();
        // The busiest comes last, when there is no room any more.
        let names: Vec<String> = (0..200).map(|n| format!("p{n:03}")).collect();
        for _ in 0..STEPS_MAX * 4 {
            let sample: Sample<'_> = names
                .iter()
                .zip(1_u64..)
                .map(|(name, n)| (name.as_str(), [("a", rate(n * n * n))].into()))
                .collect();
            history.add(&sample, &["a"], 1);
        }
        assert_eq!(history.policies.len(), POLICIES_MAX);
        let state = history.state();
        assert_eq!(state.policies.len(), POLICIES_SHOWN);
        assert!(state.policies.contains_key("p199"), "the busiest stay: {:?}", state.policies.keys());
        assert!(state.policies.values().all(|p| p.regions["a"].admitted.len() <= STEPS_MAX));
    }

    #[test]
    fn what_has_no_traffic_any_more_is_forgotten() {
        let mut history = History::default();
        history.add(&[("p", [("a", rate(5))].into())].into(), &["a"], 1);
        for _ in 0..(STEPS_MAX + 1) * 3 {
            history.add(&Sample::new(), &["a"], 1);
        }
        assert!(history.policies.is_empty());
    }
}
