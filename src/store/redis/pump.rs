//! Requests that arrive while a call is in flight share the next one.
//!
//! Nothing waits for company: a request that finds the link idle is sent at once. A call that is not answered in time stays
//! out as the probe of a frozen Redis: until its answer comes, requests are refused at once and nothing more is sent.

use super::fault::Fault;
use super::scripts::{SCRIPTS, run};
use super::shared::{Link, Live, Shared};
use super::wire::{Batch, TakeScript, taken};
use crate::store::{StoreError, Take, Taken};
use crate::telemetry::metrics::StoreCall;
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

/// Requests that may wait for a call; beyond, the store is unavailable.
pub(super) const QUEUE_MAX: usize = 16_384;
/// Calls in flight on one link: while Redis works on one, the next is on its way.
const CALLS_MAX: usize = 2;
/// When a call that nobody waits for any more is given up, and its connection with it.
pub(super) const GIVE_UP: Duration = Duration::from_secs(5);

/// A request, and who waits for it.
pub(super) struct Job {
    pub(super) take: Take,
    pub(super) reply: oneshot::Sender<Result<Taken, StoreError>>,
}

/// Moves requests until all senders are gone.
pub(super) async fn pump(shared: &Shared, link: &Link, mut jobs: mpsc::Receiver<Job>) {
    let mut calls: FuturesUnordered<BoxFuture<'_, Instant>> = FuturesUnordered::new();
    // When each call in flight is due.
    let mut due: Vec<Instant> = Vec::with_capacity(CALLS_MAX);
    let mut waiting: Option<Job> = None;
    loop {
        let overdue = link.overdue.load(Ordering::Relaxed);
        let first_due = due.iter().min().copied();
        tokio::select! {
            biased;
            Some(done) = calls.next() => {
                due.retain(|other| *other != done);
                let late = due.iter().any(|due| *due <= Instant::now());
                shared.set_overdue(link, late);
            }
            () = sleep_until(first_due.unwrap_or_else(Instant::now)), if !overdue && first_due.is_some() => {
                shared.set_overdue(link, true);
            }
            job = jobs.recv(), if waiting.is_none() && (overdue || due.len() < CALLS_MAX) => match job {
                Some(job) => waiting = Some(job),
                None => return,
            },
        }
        if link.overdue.load(Ordering::Relaxed) {
            refuse_all(&mut waiting, &mut jobs);
            continue;
        }
        if due.len() < CALLS_MAX && waiting.is_some() {
            // Whoever is ready to ask now comes along.
            tokio::task::yield_now().await;
        }
        while due.len() < CALLS_MAX && waiting.is_some() {
            let [plain, counted] = gather(&mut waiting, &mut jobs);
            if plain.1.is_empty() && counted.1.is_empty() {
                continue;
            }
            let mut at = Instant::now() + shared.timeout;
            while due.contains(&at) {
                at += Duration::from_nanos(1);
            }
            due.push(at);
            let both = futures::future::join(call(shared, link, plain), call(shared, link, counted));
            calls.push(both.map(move |_| at).boxed());
            waiting = waiting.or_else(|| jobs.try_recv().ok());
        }
    }
}

type Replies = Vec<oneshot::Sender<Result<Taken, StoreError>>>;

/// Takes as many requests as one call of each script carries; leaves the first that it does not carry in `waiting`. Requests on
/// token buckets alone go by the shorter script, whatever else is asked.
fn gather(waiting: &mut Option<Job>, jobs: &mut mpsc::Receiver<Job>) -> [(Batch, Replies); 2] {
    let mut plain = (Batch::default(), Vec::new());
    let mut counted = (Batch::counted(), Vec::new());
    while let Some(job) = waiting.take().or_else(|| jobs.try_recv().ok()) {
        if job.reply.is_closed() {
            // Nobody waits for it any more, and it has not been sent.
            continue;
        }
        let (batch, replies) = if job.take.counts.is_empty() { &mut plain } else { &mut counted };
        if batch.push(&job.take) {
            replies.push(job.reply);
        } else if batch.len() == 0 {
            answer(job.reply, Err(StoreError::Unavailable));
        } else {
            *waiting = Some(job);
            break;
        }
    }
    [plain, counted]
}

fn refuse_all(waiting: &mut Option<Job>, jobs: &mut mpsc::Receiver<Job>) {
    while let Some(job) = waiting.take().or_else(|| jobs.try_recv().ok()) {
        answer(job.reply, Err(StoreError::Unavailable));
    }
}

async fn call(shared: &Shared, link: &Link, (batch, replies): (Batch, Replies)) {
    if replies.is_empty() {
        return;
    }
    let outcome = match link.live.load_full() {
        None => Err(StoreError::Unavailable),
        Some(live) => take(shared, &live, batch).await.map_err(|fault| {
            if fault.ends_connection() {
                retire(link, &live);
            }
            shared.met(&fault, &live);
            fault.error()
        }),
    };
    match outcome {
        Ok(taken) => replies.into_iter().zip(taken).for_each(|(reply, taken)| answer(reply, Ok(taken))),
        Err(error) => replies.into_iter().for_each(|reply| answer(reply, Err(error))),
    }
}

/// One call on this connection, for its session and no other.
pub(super) async fn take(shared: &Shared, live: &Live, mut batch: Batch) -> Result<Vec<Taken>, Fault> {
    let sent = crate::clock::now();
    let window = shared.window(sent, shared.timeout);
    let window = window.ok_or_else(|| Fault::Refused("its clock has not been read".to_owned()))?;
    if live.attached.is_over() {
        return Err(Fault::Fenced);
    }
    batch.on_store_clock(window.0 - sent);
    let (script, call, sizes) = batch.into_call(&live.attached.stem, window);
    let script = match script {
        TakeScript::Buckets => &SCRIPTS.take,
        TakeScript::Counts => &SCRIPTS.take_counts,
    };
    let late = |_| Fault::Unknown(format!("no answer within {GIVE_UP:?}"));
    let began = Instant::now();
    let answer = timeout(GIVE_UP, run(&live.client, script, call)).await;
    if let Some(metrics) = shared.metrics.get() {
        metrics.called(StoreCall::Take, began.elapsed());
        metrics.batch.observe_size(sizes.len());
    }
    taken(answer.map_err(late)??, &sizes)
}

/// Lets nothing more onto a connection that is of no use; its owner will replace it.
pub(super) fn retire(link: &Link, live: &Arc<Live>) {
    if link.live.load().as_ref().is_some_and(|now| Arc::ptr_eq(now, live)) {
        link.live.store(None);
    }
}

/// Whoever asked may have given up meanwhile.
fn answer(reply: oneshot::Sender<Result<Taken, StoreError>>, outcome: Result<Taken, StoreError>) {
    let _ = reply.send(outcome);
}
