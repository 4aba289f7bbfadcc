//! openraft's runtime: tokio, but its tasks run on the machine of their region and its dice are the simulation's.

use super::watch::FairWatch;
use super::{home, on};
use openraft::AsyncRuntime;
use rand_of_openraft::SeedableRng;
use rand_of_openraft::rngs::SmallRng;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;

// openraft deprecates its own name for this type, and its macro uses it.
#[allow(deprecated)]
type Tokio = openraft::impls::TokioRuntime;

/// See the module. Off a simulated machine it is tokio's.
#[derive(Debug)]
pub struct SimRuntime(Tokio);

impl AsyncRuntime for SimRuntime {
    type JoinError = Gone;
    type JoinHandle<T: Send + 'static> = Handle<T>;
    type Sleep = <Tokio as AsyncRuntime>::Sleep;
    type Instant = <Tokio as AsyncRuntime>::Instant;
    type TimeoutError = <Tokio as AsyncRuntime>::TimeoutError;
    type Timeout<R, T: Future<Output = R> + Send> = <Tokio as AsyncRuntime>::Timeout<R, T>;
    type ThreadLocalRng = SmallRng;
    type Mpsc = <Tokio as AsyncRuntime>::Mpsc;
    type Watch = FairWatch;
    type Oneshot = <Tokio as AsyncRuntime>::Oneshot;
    type Mutex<T: Send + 'static> = <Tokio as AsyncRuntime>::Mutex<T>;

    fn spawn<T>(future: T) -> Handle<T::Output>
    where
        T: Future + Send + 'static,
        T::Output: Send + 'static,
    {
        let (done, result) = oneshot::channel();
        let task = async move {
            // Whoever spawned it may not care.
            let _ = done.send(future.await);
        };
        match home() {
            Some(home) => drop(tokio::spawn(on(&home, task))),
            None => drop(tokio::spawn(task)),
        }
        Handle(result)
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        Tokio::sleep(duration)
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        Tokio::sleep_until(deadline)
    }

    fn timeout<R, F: Future<Output = R> + Send>(duration: Duration, future: F) -> Self::Timeout<R, F> {
        Tokio::timeout(duration, future)
    }

    fn timeout_at<R, F: Future<Output = R> + Send>(
        deadline: Self::Instant,
        future: F,
    ) -> Self::Timeout<R, F> {
        Tokio::timeout_at(deadline, future)
    }

    fn is_panic(_: &Gone) -> bool {
        true
    }

    fn thread_rng() -> SmallRng {
        SmallRng::seed_from_u64(home().map_or_else(rand::random, |home| home.random()))
    }

    fn new(threads: usize) -> Self {
        Self(Tokio::new(threads))
    }

    fn block_on<F: Future<Output = T>, T>(&mut self, future: F) -> T {
        self.0.block_on(future)
    }
}

/// What a task will have brought.
#[derive(Debug)]
pub struct Handle<T>(oneshot::Receiver<T>);

impl<T> Future for Handle<T> {
    type Output = Result<T, Gone>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(|_| Gone)
    }
}

/// The task has ended without a result: it panicked, or its machine crashed.
#[derive(Debug)]
pub struct Gone;

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the task has ended without a result")
    }
}
