//! A node that stops begins nothing more, and what is under way may end first.

use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedRwLockReadGuard, RwLock, watch};
use tokio::time::timeout;

/// Open until the node stops. Cheap to clone; all clones are the same.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    stop: Arc<watch::Sender<bool>>,
    /// Whoever owes a peer an answer, or waits for one of openraft, holds it for reading.
    calls: Arc<RwLock<()>>,
}

/// Something is under way; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Call(#[expect(dead_code, reason = "held, not read")] OwnedRwLockReadGuard<()>);

impl Default for Gate {
    fn default() -> Self {
        Self { stop: Arc::new(watch::Sender::new(false)), calls: Arc::default() }
    }
}

impl Gate {
    /// To be held for as long as a call takes; `None`: the node has been told to stop.
    pub fn enter(&self) -> Option<Call> {
        let call = Arc::clone(&self.calls).try_read_owned().ok()?;
        (!self.is_stopping()).then_some(Call(call))
    }

    /// Has the node been told to stop?
    pub fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }

    /// True once the node stops.
    pub fn stopping(&self) -> watch::Receiver<bool> {
        self.stop.subscribe()
    }

    /// Lets nothing more in, and waits for what is under way, but not for longer than `patience`.
    pub async fn close(&self, patience: Duration) {
        self.stop.send_replace(true);
        let _ = timeout(patience, self.calls.write()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test(start_paused = true)]
    async fn what_is_under_way_may_end_and_nothing_begins() {
        const PATIENCE: Duration = Duration::from_secs(1);
        let gate = Gate::default();
        let call = gate.enter().expect("it is open");
        let mut closing = std::pin::pin!(gate.close(PATIENCE));
        assert!(closing.as_mut().now_or_never().is_none(), "a call is under way");
        assert!(gate.enter().is_none());
        drop(call);
        assert!(closing.now_or_never().is_some());
        assert!(gate.enter().is_none(), "for good");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_does_not_end_is_not_waited_for_for_ever() {
        const PATIENCE: Duration = Duration::from_secs(1);
        let gate = Gate::default();
        let _call = gate.enter();
        let began = tokio::time::Instant::now();
        gate.close(PATIENCE).await;
        assert_eq!(began.elapsed(), PATIENCE);
    }
}
