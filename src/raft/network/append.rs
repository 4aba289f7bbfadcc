//! The ordered stream of appends to one follower.
//!
//! openraft's default sends one batch, waits for its answer, and only then sends the next. Here batches follow each
//! other down one HTTP/2 stream and answers come back up the same stream, in order: a commit takes one round trip, and
//! throughput is the window's size a round trip.

use super::client::{CallError, Client, Lane};
use super::peers::Peer;
use super::wire::{self, Frames, path};
use crate::raft::types::{AppendReply, AppendRequest};
use bytes::Bytes;
use futures::channel::mpsc;
use futures::future::{BoxFuture, Either};
use futures::{FutureExt, SinkExt, Stream, StreamExt};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Batches and bytes that may wait for their answers.
const BATCHES_MAX: usize = 256;
const BYTES_MAX: usize = 8 * 1_024 * 1_024;

/// Opens the stream. Batches are drawn from `input` only while the answer is polled, and never after it is dropped:
/// openraft shares what is behind `input` between one stream and the next.
pub(super) async fn open<S>(
    client: &Client,
    peer: &Peer,
    input: S,
) -> Result<impl Stream<Item = Result<AppendReply, CallError>> + Send + use<S>, CallError>
where
    S: Stream<Item = AppendRequest> + Send + Unpin + 'static,
{
    let (frames, body) = mpsc::channel(1);
    let window = Arc::new(Window::default());
    let feeder = feed(input, frames, Arc::clone(&window)).boxed();
    let request = client.post(peer, Lane::Entries, path::APPEND_STREAM);
    let request = request.body(reqwest::Body::wrap_stream(body));
    let opening = client.send(peer, Lane::Entries, request).boxed();
    let opening = tokio::time::timeout(client.timing.append(), futures::future::select(opening, feeder));
    // The first batches travel with the request itself.
    let (reply, feeder) = match opening.await.map_err(|_| CallError::TimedOut)? {
        Either::Left((reply, feeder)) => (reply?, Some(feeder)),
        Either::Right(((), opening)) => {
            let left = tokio::time::timeout(client.timing.append(), opening);
            (left.await.map_err(|_| CallError::TimedOut)??, None)
        }
    };
    let reply = client.check(peer, reply)?;
    let answers = Frames::new(reply.bytes_stream().boxed(), wire::CALL_BYTES_MAX);
    Ok(replies(feeder, answers, window, client.timing.append()))
}

/// Draws batches and sends them, as far as the window allows.
async fn feed<S>(mut input: S, mut frames: mpsc::Sender<Result<Bytes, Infallible>>, window: Arc<Window>)
where
    S: Stream<Item = AppendRequest> + Send + Unpin,
{
    loop {
        window.room().await;
        let Some(request) = input.next().await else { return };
        let frame = match wire::frame(&request) {
            Ok(frame) => frame,
            Err(fault) => {
                // Ending the stream makes openraft try again and report.
                tracing::error!(%fault, "cannot encode entries for a peer");
                return;
            }
        };
        window.sent(frame.len());
        if frames.send(Ok(frame)).await.is_err() {
            return;
        }
    }
}

fn replies(
    mut feeder: Option<BoxFuture<'static, ()>>,
    answers: Frames<impl Stream<Item = reqwest::Result<Bytes>> + Send + Unpin + 'static>,
    window: Arc<Window>,
    patience: Duration,
) -> impl Stream<Item = Result<AppendReply, CallError>> + Send {
    let mut answers = answer_stream(answers).boxed();
    let mut clock = tokio::time::interval(patience / 4);
    clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ended = false;
    futures::stream::poll_fn(move |context| {
        if ended {
            return Poll::Ready(None);
        }
        if feeder.as_mut().is_some_and(|feeder| feeder.poll_unpin(context).is_ready()) {
            // Dropped, it closes the request; the peer then closes the answer.
            feeder = None;
        }
        let next = match answers.poll_next_unpin(context) {
            Poll::Ready(Some(Ok(reply))) => {
                window.answered();
                return Poll::Ready(Some(Ok(reply)));
            }
            Poll::Ready(Some(Err(fault))) => Some(fault),
            Poll::Ready(None) if window.oldest().is_none() && feeder.is_none() => None,
            Poll::Ready(None) => Some(CallError::Lost("the peer has closed the stream".into())),
            Poll::Pending => {
                while clock.poll_tick(context).is_ready() {}
                if window.oldest().is_none_or(|oldest| oldest < patience) {
                    return Poll::Pending;
                }
                Some(CallError::TimedOut)
            }
        };
        ended = true;
        feeder = None;
        Poll::Ready(next.map(Err))
    })
}

fn answer_stream<S>(answers: Frames<S>) -> impl Stream<Item = Result<AppendReply, CallError>>
where
    S: Stream<Item = reqwest::Result<Bytes>> + Unpin,
{
    futures::stream::unfold(answers, |mut answers| async {
        let answer = answers.next().await?;
        let reply = answer.and_then(|body| wire::decode(&body)).map_err(CallError::from);
        Some((reply, answers))
    })
}

/// Batches that have been sent and not answered.
#[derive(Debug, Default)]
struct Window {
    waiting: Mutex<Waiting>,
    shrunk: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    batches: VecDeque<(Instant, usize)>,
    bytes: usize,
}

impl Window {
    async fn room(&self) {
        loop {
            let shrunk = self.shrunk.notified();
            {
                let waiting = self.lock();
                if waiting.batches.len() < BATCHES_MAX && waiting.bytes < BYTES_MAX {
                    return;
                }
            }
            shrunk.await;
        }
    }

    fn sent(&self, bytes: usize) {
        let mut waiting = self.lock();
        waiting.batches.push_back((Instant::now(), bytes));
        waiting.bytes = waiting.bytes.saturating_add(bytes);
    }

    fn answered(&self) {
        let mut waiting = self.lock();
        if let Some((_, bytes)) = waiting.batches.pop_front() {
            waiting.bytes = waiting.bytes.saturating_sub(bytes);
        }
        drop(waiting);
        self.shrunk.notify_one();
    }

    fn oldest(&self) -> Option<Duration> {
        self.lock().batches.front().map(|(sent, _)| sent.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_window_bounds_what_waits() {
        let window = Window::default();
        for _ in 0..BATCHES_MAX {
            assert!(window.room().now_or_never().is_some());
            window.sent(1);
        }
        assert!(window.room().now_or_never().is_none());
        window.answered();
        assert!(window.room().now_or_never().is_some());
        window.sent(BYTES_MAX);
        assert!(window.room().now_or_never().is_none());
        for _ in 0..BATCHES_MAX {
            window.answered();
        }
        assert!(window.room().now_or_never().is_some());
        assert_eq!(window.oldest(), None);
    }
}
