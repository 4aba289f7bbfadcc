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
    policies: BTreeMap<String, BTreeMap<String, Series>>,
    samples: u32,
    end_ms: u64,
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
            let busy = by_region.values().flatten().any(|r| r.admitted > 0 || r.denied > 0);
            if !busy || self.policies.contains_key(*policy) {
                continue;
            }
            if self.policies.len() >= POLICIES_MAX {
                let least = self.policies.iter().min_by_key(|(_, series)| total(series));
                let Some(least) = least.map(|(name, _)| name.clone()) else { continue };
                self.policies.remove(&least);
            }
            self.policies.insert((*policy).to_owned(), BTreeMap::new());
        }
        self.samples = self.samples.saturating_add(1);
        let step_ends = self.samples >= STEP_SAMPLES;
        for (policy, series) in &mut self.policies {
            let by_region = sample.get(policy.as_str());
            for region in regions {
                let rate = by_region.and_then(|r| r.get(region)).copied().flatten();
                series.entry((*region).to_owned()).or_default().add(rate);
            }
            if step_ends {
                series.values_mut().for_each(Series::end_step);
                series.retain(|_, series| series.steps.iter().any(Option::is_some));
            }
        }
        if step_ends {
            (self.samples, self.end_ms) = (0, now_ms);
            self.policies.retain(|_, series| total(series) > 0);
        }
    }

    /// The busiest.
    pub fn state(&self) -> HistoriesState {
        let mut busiest: Vec<_> = self.policies.iter().collect();
        busiest.sort_by_key(|(_, series)| std::cmp::Reverse(total(series)));
        let policies = busiest.into_iter().take(POLICIES_SHOWN).map(|(policy, series)| {
            let regions = series.iter().map(|(region, series)| {
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
}

/// Everything that passed or was refused, in all regions.
fn total(series: &BTreeMap<String, Series>) -> u64 {
    let steps = series.values().flat_map(|series| series.steps.iter().flatten());
    let kept = steps.map(|(admitted, denied)| admitted.saturating_add(*denied)).fold(0, u64::saturating_add);
    let running = series.values().map(|s| s.sum.0.saturating_add(s.sum.1)).fold(0, u64::saturating_add);
    kept.saturating_add(running)
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
        let names: Vec<String> = (0..200).map(|n| format!("p{n:03}")).collect();
        for _ in 0..STEPS_MAX * 4 {
            let sample: Sample<'_> =
                names.iter().zip(1_u64..).map(|(name, n)| (name.as_str(), [("a", rate(n))].into())).collect();
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
