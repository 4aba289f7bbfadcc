//! Requests that wait for a lease.

use super::table::Asking;
use super::{Held, Limiter, WAITING_MAX};
use crate::quota::amount::{Micros, Tokens};
use crate::store::{Store, Taken};
use crate::telemetry::metrics::Waited;
use crate::telemetry::trace;
use crate::trace_span;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::time::Instant;
use tracing::Instrument as _;
use tracing::field::Empty;

impl<S: Store> Limiter<S> {
    /// A strict request that found too little waits for the leases that are asked for, if all that it lacks can come
    /// by lease; then it tries again. `None`: there is nothing to wait for.
    pub(super) async fn wait(
        &self,
        held: &[Held<'_>],
        taken: &Taken,
        deadline: Option<Instant>,
    ) -> Option<(Waited, Option<Taken>)> {
        let mut lacking: Vec<&Held<'_>> = held
            .iter()
            .filter(|h| h.limit.is_some())
            .zip(&taken.charges)
            .filter(|(h, seen)| !seen.fits && h.enforced())
            .map(|(h, _)| h)
            .collect();
        let counted = held.iter().filter(|h| h.count.is_some()).zip(&taken.counts);
        lacking.extend(counted.filter(|(h, seen)| !seen.fits && h.enforced()).map(|(h, _)| h));
        if lacking.iter().any(|h| h.count.is_some() && !h.is_lent()) {
            return None;
        }
        let wait = lacking.iter().map(|h| h.wait()).min()?;
        if wait <= Micros::ZERO {
            return None;
        }
        let until = Instant::now() + wait.to_duration();
        let until = deadline.map_or(until, |d| until.min(d));
        let _place = Place::take(&self.core.waiting)?;
        let guards: Option<Vec<_>> =
            lacking.iter().map(|h| h.tally.as_ref()?.wait(h.charge.cost, h.most())).collect();
        let _guards = guards?;
        let (began, span) = (Instant::now(), trace::child(|| trace_span!("wait for lease", outcome = Empty)));
        let (outcome, later) = self.until_granted(held, &lacking, until).instrument(span.clone()).await;
        span.record("outcome", outcome.name());
        for held in lacking {
            held.policy.metrics.waited(outcome, began.elapsed());
        }
        Some((outcome, later))
    }

    /// Tries again with all news, until it fits, nothing more will come, or `until`. `None`: the store has gone meanwhile.
    async fn until_granted(
        &self,
        held: &[Held<'_>],
        lacking: &[&Held<'_>],
        until: Instant,
    ) -> (Waited, Option<Taken>) {
        let tallies = || lacking.iter().filter_map(|h| h.tally.as_ref());
        let installs = || tallies().map(|t| t.installs()).sum::<u64>();
        let (mut seen, mut later) = (installs(), None);
        loop {
            // Made before looking, so that news in between is not missed.
            let news = tallies().map(|t| {
                let mut news = Box::pin(t.news.notified());
                news.as_mut().enable();
                news
            });
            let news = futures::future::select_all(news.collect::<Vec<_>>());
            if tallies().all(|t| t.asking() == Asking::No) {
                if installs() == seen {
                    let last = if later.is_some() { later } else { self.again(held).await };
                    return (Waited::Denied, last);
                }
                // A lease came, and others who waited were served by it: there may be more.
                seen = installs();
                tallies().for_each(|t| self.core.table.poke(t));
            }
            if tokio::time::timeout_at(until, news).await.is_err() {
                return (Waited::TimedOut, self.again(held).await);
            }
            match self.again(held).await {
                Some(tried) if tried.allowed => return (Waited::Granted, Some(tried)),
                Some(tried) => later = Some(tried),
                None => return (Waited::Denied, None),
            }
        }
    }

    async fn again(&self, held: &[Held<'_>]) -> Option<Taken> {
        let taken = self.take_traced(held).await.ok()?;
        for (held, seen) in held.iter().filter(|h| h.limit.is_some()).zip(&taken.charges) {
            if let Some(tally) = &held.tally {
                tally.retried(held.charge.cost, seen.fits, seen.level, taken.now);
            }
        }
        for (held, seen) in held.iter().filter(|h| h.count.is_some()).zip(&taken.counts) {
            if let Some(tally) = &held.tally {
                tally.retried(held.charge.cost, seen.fits, Tokens::whole(seen.left), taken.now);
            }
        }
        Some(taken)
    }
}

/// A place among the requests that wait.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(waiting: &'a AtomicUsize) -> Option<Self> {
        let place = Self(waiting);
        (waiting.fetch_add(1, Ordering::Relaxed) < WAITING_MAX).then_some(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
