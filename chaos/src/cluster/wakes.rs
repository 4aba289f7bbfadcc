//! How late this program itself wakes up: where it does, so do the daemons, and nothing that takes time says anything of them.

use crate::oracle::Wakes;
use quorate::quota::amount::Micros;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// How long it sleeps.
const NAP: Duration = Duration::from_millis(10);

/// Sleeps and looks how late it is.
#[derive(Debug, Default)]
pub struct Naps(Mutex<Wakes>);

impl Naps {
    /// Begins; goes on for as long as the tasks run.
    pub fn spawn(tasks: &mut JoinSet<()>) -> Arc<Self> {
        let naps = Arc::<Self>::default();
        let these = Arc::clone(&naps);
        tasks.spawn(async move {
            loop {
                let began = Instant::now();
                tokio::time::sleep(NAP).await;
                these.woke(Micros::from_duration(began.elapsed().saturating_sub(NAP)));
            }
        });
        naps
    }

    /// What was seen so far.
    #[must_use]
    pub fn seen(&self) -> Wakes {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn woke(&self, late: Micros) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).add(late);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    #[expect(clippy::disallowed_methods, reason = "to block the runtime is the point")]
    async fn a_thread_that_is_taken_away_is_noticed() {
        let mut tasks = JoinSet::new();
        let naps = Naps::spawn(&mut tasks);
        tokio::time::sleep(NAP).await;
        // Nobody else on this thread can run meanwhile.
        std::thread::sleep(Wakes::LATE.to_duration() * 2);
        tokio::time::sleep(NAP).await;
        let seen = naps.seen();
        assert!(seen.late >= 1 && seen.worst > Wakes::LATE && seen.lost > Wakes::LATE, "{seen:?}");
        assert!(!seen.too_busy(), "once is not often");
    }
}
