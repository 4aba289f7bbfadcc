//! Many seeds, on all cores.

use super::{Counts, Options, Outcome, run};
use anyhow::Context as _;
use quorate::quota::amount::Micros;
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What came of many seeds.
#[derive(Debug, Default)]
pub struct Summary {
    /// How many were run.
    pub seeds: u64,
    /// Those that broke a promise, ascending.
    pub broken: Vec<(u64, super::Broken)>,
    /// All that happened.
    pub counts: Counts,
    /// True time that was simulated.
    pub simulated: Micros,
}

/// Runs these seeds. With `first_only` it stops soon after the first broken promise. `progress` hears of every seed that is done.
///
/// # Errors
/// If a thread or a simulation cannot run.
pub fn campaign(
    seeds: RangeInclusive<u64>,
    options: Options,
    threads: usize,
    first_only: bool,
    progress: impl Fn(u64, &Outcome) + Sync,
) -> anyhow::Result<Summary> {
    let (next, stop) = (AtomicU64::new(*seeds.start()), AtomicBool::new(false));
    let summary = Mutex::new(Summary::default());
    let work = || -> anyhow::Result<()> {
        while !stop.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if !seeds.contains(&seed) {
                break;
            }
            let outcome = run(seed, options).with_context(|| format!("seed {seed}"))?;
            progress(seed, &outcome);
            let mut all = summary.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            all.seeds += 1;
            all.counts.add(&outcome.counts);
            all.simulated += outcome.end;
            if let Some(broken) = outcome.violation {
                all.broken.push((seed, broken));
                stop.store(first_only, Ordering::Relaxed);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(done) => done,
            Err(_) => Err(anyhow::anyhow!("a simulation panicked: see above")),
        })
    })?;
    let mut summary = summary.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    summary.broken.sort_by_key(|(seed, _)| *seed);
    Ok(summary)
}
