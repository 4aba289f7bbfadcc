//! A watch channel that wakes those who wait in the order in which they began to: tokio's wakes them in an order that it
//! leaves to chance, and a seed would not repeat.

use openraft::async_runtime::watch::{RecvError, SendError, Watch, WatchReceiver, WatchSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::task::{Poll, Waker};

/// See the module.
#[derive(Debug)]
pub struct FairWatch;

impl Watch for FairWatch {
    type Sender<T: Send + Sync> = Sender<T>;
    type Receiver<T: Send + Sync> = Receiver<T>;
    type Ref<'a, T: Send + 'a> = RwLockReadGuard<'a, T>;

    fn channel<T: Send + Sync>(init: T) -> (Sender<T>, Receiver<T>) {
        let state = State { version: 0, senders: 1, receivers: 1, waiting: Vec::new() };
        let shared = Arc::new(Shared { value: RwLock::new(init), state: Mutex::new(state) });
        (Sender(Arc::clone(&shared)), Receiver { shared, seen: 0 })
    }
}

#[derive(Debug)]
struct Shared<T> {
    value: RwLock<T>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    version: u64,
    senders: usize,
    receivers: usize,
    waiting: Vec<Waker>,
}

impl<T> Shared<T> {
    fn read(&self) -> RwLockReadGuard<'_, T> {
        self.value.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.value.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, change: impl FnOnce(&mut State)) {
        let waiting = {
            let mut state = self.state();
            change(&mut state);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// The sending end.
#[derive(Debug)]
pub struct Sender<T>(Arc<Shared<T>>);

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.state().senders += 1;
        Self(Arc::clone(&self.0))
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.tell(|state| state.senders -= 1);
    }
}

impl<T: Send + Sync> WatchSender<FairWatch, T> for Sender<T> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        if self.0.state().receivers == 0 {
            return Err(SendError(value));
        }
        *self.0.write() = value;
        self.0.tell(|state| state.version += 1);
        Ok(())
    }

    fn send_if_modified<F: FnOnce(&mut T) -> bool>(&self, modify: F) -> bool {
        let modified = modify(&mut self.0.write());
        if modified {
            self.0.tell(|state| state.version += 1);
        }
        modified
    }

    fn borrow_watched(&self) -> RwLockReadGuard<'_, T> {
        self.0.read()
    }

    fn subscribe(&self) -> Receiver<T> {
        let mut state = self.0.state();
        state.receivers += 1;
        Receiver { shared: Arc::clone(&self.0), seen: state.version }
    }
}

/// The receiving end.
#[derive(Debug)]
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    seen: u64,
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        self.shared.state().receivers += 1;
        Self { shared: Arc::clone(&self.shared), seen: self.seen }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.shared.state().receivers -= 1;
    }
}

impl<T: Send + Sync> WatchReceiver<FairWatch, T> for Receiver<T> {
    async fn changed(&mut self) -> Result<(), RecvError> {
        std::future::poll_fn(|context| {
            let mut state = self.shared.state();
            if state.version != self.seen {
                self.seen = state.version;
                return Poll::Ready(Ok(()));
            }
            if state.senders == 0 {
                return Poll::Ready(Err(RecvError(())));
            }
            if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                state.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    fn borrow_watched(&self) -> RwLockReadGuard<'_, T> {
        self.shared.read()
    }

    fn borrow_and_update(&mut self) -> RwLockReadGuard<'_, T> {
        // First the version, then the value: a change in between is told once more, and none is missed.
        self.seen = self.shared.state().version;
        self.shared.read()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn it_tells_changes_once_and_says_when_it_is_over() {
        let (sender, mut receiver) = FairWatch::channel(1);
        let mut late = sender.subscribe();
        assert!(receiver.changed().now_or_never().is_none(), "nothing has changed");
        sender.send(2).unwrap();
        assert!(sender.send_if_modified(|value| std::mem::replace(value, 3) == 2));
        assert!(!sender.send_if_modified(|_| false));
        assert_eq!(receiver.changed().now_or_never(), Some(Ok(())));
        assert_eq!(*receiver.borrow_watched(), 3);
        assert!(receiver.changed().now_or_never().is_none(), "told once");
        assert_eq!(*late.borrow_and_update(), 3);
        assert!(late.changed().now_or_never().is_none(), "seen is seen");
        let other = sender.clone();
        drop(sender);
        assert!(late.changed().now_or_never().is_none());
        other.send(4).unwrap();
        drop(other);
        assert_eq!(late.changed().now_or_never(), Some(Ok(())), "the last value is told");
        assert_eq!(late.changed().now_or_never(), Some(Err(RecvError(()))));
        let (sender, receiver) = FairWatch::channel(1);
        drop(receiver);
        assert_eq!(sender.send(2), Err(SendError(2)));
    }

    #[tokio::test]
    async fn it_wakes_in_order() {
        let (sender, _receiver) = FairWatch::channel(0);
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..20 {
            let (mut receiver, order) = (sender.subscribe(), Arc::clone(&order));
            tasks.spawn(async move {
                receiver.changed().await.unwrap();
                order.lock().unwrap().push(n);
            });
        }
        tokio::task::yield_now().await;
        sender.send(1).unwrap();
        tasks.join_all().await;
        assert_eq!(*order.lock().unwrap(), (0..20).collect::<Vec<_>>());
    }
}
