//! Asks every region, again and again, what it believes.

use super::admin::Admin;
use super::scenario::Load;
use crate::oracle::Sample;
use crate::workload::Recorder;
use quorate::quota::amount::{Rate, Tokens};
use quorate::server::state::{BucketView, State};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often.
const EVERY: Duration = Duration::from_millis(500);

/// What was believed so far.
#[derive(Debug, Default)]
pub struct Beliefs {
    samples: Mutex<Vec<Sample>>,
    leader: Mutex<Option<String>>,
}

impl Beliefs {
    /// Goes on asking; ends when it is dropped.
    pub async fn watch(&self, admin: &Admin, loads: &[(Load, usize)], recorder: &Recorder) {
        let mut tick = tokio::time::interval(EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let all = (0..admin.regions()).map(|region| self.ask(admin, region, loads, recorder));
            let states = futures::future::join_all(all).await;
            let leads = |s: &&State| s.raft.role == "leader";
            let leader = states.iter().flatten().filter(leads).max_by_key(|s| s.raft.term);
            *self.leader.lock().unwrap_or_else(PoisonError::into_inner) = leader.map(|s| s.region.clone());
        }
    }

    /// The region that leads, as far as is known.
    #[must_use]
    pub fn leader(&self) -> Option<String> {
        self.leader.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Hands over what was noted.
    #[must_use]
    pub fn take(&self) -> Vec<Sample> {
        std::mem::take(&mut *self.samples.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A region that does not answer believes nothing.
    async fn ask(
        &self,
        admin: &Admin,
        region: usize,
        loads: &[(Load, usize)],
        recorder: &Recorder,
    ) -> Option<State> {
        let state = admin.state(region).await.ok()?;
        let mut seen = Vec::new();
        for (load, limit) in loads {
            if seen.contains(limit) {
                continue;
            }
            seen.push(*limit);
            let Ok(view) = admin.bucket(region, load).await else { continue };
            if let Some(sample) = sample(&view, region, *limit, recorder) {
                self.samples.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
            }
        }
        Some(state)
    }
}

/// `None`: there is no pool.
fn sample(view: &BucketView, region: usize, limit: usize, recorder: &Recorder) -> Option<Sample> {
    let books = view.books.as_ref()?;
    let level = view.regions.iter().find_map(|r| r.level);
    Some(Sample {
        at: recorder.now(),
        limit,
        by: region,
        level: level.map(Tokens),
        free: (Rate(books.free_rate), Tokens(books.free_burst), Tokens(view.pool_level.unwrap_or_default())),
        lent: books.lent.iter().map(|lent| (Rate(lent.rate), Tokens(lent.burst))).collect(),
        reserved: (Rate(books.reserved_rate), Tokens(books.reserved_burst)),
        whole: (Rate(books.whole_rate), Tokens(books.whole_burst)),
        frozen: books.frozen,
    })
}

/// Runs [`Beliefs::watch`] as a task.
pub fn spawn(
    beliefs: &Arc<Beliefs>,
    admin: &Admin,
    loads: &[(Load, usize)],
    recorder: &Arc<Recorder>,
    tasks: &mut tokio::task::JoinSet<()>,
) {
    let (beliefs, admin, loads, recorder) =
        (Arc::clone(beliefs), admin.clone(), loads.to_vec(), Arc::clone(recorder));
    tasks.spawn(async move { beliefs.watch(&admin, &loads, &recorder).await });
}
