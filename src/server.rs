//! Front ends: what callers, operators and probes talk to.

pub mod state;

use crate::quota::matching::{Request, RequestFault};
use crate::quota::verdict::Verdict;
use std::future::Future;
use std::time::Duration;

/// What decides about requests. Each worker thread has its own clone (see [`Decide::check`]).
pub trait Decide: Clone + Send + Sync + 'static {
    /// Decides about one request. With a `deadline`, an answer after that time is of no use to the caller: so what
    /// waits (for a lease, for the store) stops waiting before it.
    ///
    /// # Errors
    /// A request that cannot be checked as it is. Everything else that goes wrong becomes a verdict.
    fn check(
        &self,
        request: &Request<'_>,
        deadline: Option<Duration>,
    ) -> impl Future<Output = Result<Verdict, RequestFault>> + Send;
}
