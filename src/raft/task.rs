//! How a node's tasks run: on tokio's runtime, or, with feature `sim`, on the simulated machine of their region.

#[cfg(not(feature = "sim"))]
use std::io;

/// Runs a task by itself, for as long as it takes.
pub(super) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(here(task));
}

/// A task for a `JoinSet`.
#[cfg(not(feature = "sim"))]
pub(super) fn here<F: Future<Output = ()> + Send + 'static>(task: F) -> F {
    task
}

/// Does work that may block; the error says that it did not end.
#[cfg(not(feature = "sim"))]
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

#[cfg(feature = "sim")]
pub(super) use simulated::{blocking, here};

#[cfg(feature = "sim")]
mod simulated {
    use crate::raft::sim;
    use futures::future::Either;
    use std::io;

    /// A task for a `JoinSet`: it runs on the machine of whoever makes it.
    pub fn here(
        task: impl Future<Output = ()> + Send + 'static,
    ) -> impl Future<Output = ()> + Send + 'static {
        match sim::home() {
            Some(home) => Either::Left(sim::on(&home, task)),
            None => Either::Right(task),
        }
    }

    /// Does work that may block: in a simulation at once, after as long as the machine's disk takes.
    pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let Some(home) = sim::home() else {
            return tokio::task::spawn_blocking(work).await.map_err(io::Error::other);
        };
        tokio::time::sleep(home.sync_takes()).await;
        Ok(work())
    }
}
