//! `/v1/events`: what changes, as it changes, to every console that is open.
//!
//! One document is kept, [`Feed::publish`]ed at most once a second; readers get it whole when they come, and then its changes as
//! JSON merge patches (RFC 7396), and events at once. All readers share one ring of messages: one that is slow costs no
//! memory, and gets the document again when the ring has gone on without it.

use crate::server::state::Event;
use axum::body::Bytes;
use futures::Stream;
use serde_json::{Map, Value};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Streams at once.
pub const STREAMS_MAX: usize = 32;
/// Messages that are kept for readers that come back.
const MESSAGES_MAX: usize = 256;
/// A reader hears something within this, so that it (and every proxy on the way) knows that the line is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How soon a reader that has lost its stream should come back.
const RETRY_MS: u64 = 2_000;

/// One document, and who reads it.
#[derive(Debug)]
pub struct Feed {
    ring: Mutex<Ring>,
    /// The number of the newest message; `None`: it is over.
    news: watch::Sender<Option<u64>>,
    places: Arc<Semaphore>,
}

#[derive(Debug)]
struct Ring {
    /// Another one in each life of the daemon: numbers start over with it.
    life: u64,
    last: u64,
    /// The newest messages, without gaps.
    messages: VecDeque<(u64, Bytes)>,
    document: Value,
}

impl Default for Feed {
    fn default() -> Self {
        let ring = Ring { life: rand::random(), last: 0, messages: VecDeque::new(), document: Value::Null };
        let places = Arc::new(Semaphore::new(STREAMS_MAX));
        Self { ring: Mutex::new(ring), news: watch::Sender::new(Some(0)), places }
    }
}

impl Feed {
    /// The document is so now.
    pub fn publish(&self, document: Value) {
        let mut ring = self.ring();
        if let Some(patch) = merge_patch(&ring.document, &document) {
            ring.document = document;
            self.tell(&mut ring, "patch", &patch);
        }
    }

    /// These things have happened.
    pub fn tell_events(&self, events: &[Event]) {
        let mut ring = self.ring();
        for event in events {
            self.tell(&mut ring, "event", &serde_json::to_value(event).unwrap_or_default());
        }
    }

    /// Does anybody read?
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.places.available_permits() < STREAMS_MAX
    }

    /// Ends all streams, and those that come.
    pub fn close(&self) {
        self.news.send_replace(None);
    }

    /// A reader's stream, in the format of server-sent events (WHATWG HTML, section 9.2); `last`: the id of the last message that it
    /// has, if it comes back. `None`: there are too many.
    pub fn read(self: &Arc<Self>, last: Option<&str>) -> Option<impl Stream<Item = Bytes> + use<>> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        let reader = Reader {
            feed: Arc::clone(self),
            next: last.and_then(|last| self.ring().after(last)),
            news: self.news.subscribe(),
            begun: false,
            _place: place,
        };
        Some(futures::stream::unfold(reader, |mut reader| async {
            let bytes = reader.next().await?;
            Some((bytes, reader))
        }))
    }

    fn tell(&self, ring: &mut Ring, name: &str, data: &Value) {
        ring.last = ring.last.saturating_add(1);
        let message = message(name, &ring.id(ring.last), data);
        if ring.messages.len() >= MESSAGES_MAX {
            ring.messages.pop_front();
        }
        ring.messages.push_back((ring.last, message));
        let last = ring.last;
        self.news.send_if_modified(|news| news.is_some() && news.replace(last) != Some(last));
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ring {
    fn id(&self, number: u64) -> String {
        format!("{:016x}-{number}", self.life)
    }

    /// The number of the message after the one with this id, if nothing between is lost.
    fn after(&self, id: &str) -> Option<u64> {
        let (life, number) = id.split_once('-')?;
        let number: u64 = number.parse().ok()?;
        let same = u64::from_str_radix(life, 16) == Ok(self.life);
        let next = number.checked_add(1)?;
        let kept = next > self.last || self.messages.front().is_some_and(|(first, _)| *first <= next);
        (same && number <= self.last && kept).then_some(next)
    }
}

/// A reader, and how far it has come.
struct Reader {
    feed: Arc<Feed>,
    /// The number of its next message; `None`: it needs the document.
    next: Option<u64>,
    news: watch::Receiver<Option<u64>>,
    begun: bool,
    _place: OwnedSemaphorePermit,
}

impl Reader {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            self.news.borrow_and_update().as_ref()?;
            let mut bytes =
                if self.begun { Vec::new() } else { format!("retry: {RETRY_MS}\n\n").into_bytes() };
            self.begun = true;
            self.catch_up(&mut bytes);
            if !bytes.is_empty() {
                return Some(bytes.into());
            }
            match tokio::time::timeout(KEEP_ALIVE, self.news.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return None,
                Err(_) => return Some(Bytes::from_static(b": the line is alive\n\n")),
            }
        }
    }

    fn catch_up(&mut self, bytes: &mut Vec<u8>) {
        let ring = self.feed.ring();
        let first = ring.messages.front().map_or(ring.last.saturating_add(1), |(number, _)| *number);
        match self.next.filter(|next| *next >= first) {
            Some(next) => {
                let new = ring.messages.iter().filter(|(number, _)| *number >= next);
                new.for_each(|(_, message)| bytes.extend_from_slice(message));
            }
            None => bytes.extend_from_slice(&message("state", &ring.id(ring.last), &ring.document)),
        }
        self.next = Some(ring.last.saturating_add(1));
    }
}

/// One message. JSON has no line breaks of its own.
fn message(name: &str, id: &str, data: &Value) -> Bytes {
    format!("event: {name}\nid: {id}\ndata: {data}\n\n").into()
}

/// What turns one document into another (RFC 7396); `None`: nothing. A field that is null and one that is not there are the same.
fn merge_patch(from: &Value, to: &Value) -> Option<Value> {
    let (Value::Object(from), Value::Object(to)) = (from, to) else {
        return (from != to).then(|| to.clone());
    };
    let mut patch = Map::new();
    for (key, value) in to {
        let known = from.get(key).unwrap_or(&Value::Null);
        if let Some(change) = merge_patch(known, value) {
            patch.insert(key.clone(), change);
        }
    }
    for key in from.keys().filter(|key| !to.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt as _;
    use serde_json::json;
    use std::pin::pin;

    /// Section 2 of RFC 7396, to check the patches with.
    fn apply(target: &mut Value, patch: &Value) {
        let Value::Object(patch) = patch else {
            *target = patch.clone();
            return;
        };
        if !target.is_object() {
            *target = json!({});
        }
        let fields = target.as_object_mut().unwrap();
        for (key, value) in patch {
            if value.is_null() {
                fields.remove(key);
            } else {
                apply(fields.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
    }

    #[test]
    fn patches_turn_one_document_into_the_other() {
        let documents = [
            json!({}),
            json!({"a": 1, "b": {"c": [1, 2], "d": "x"}}),
            json!({"a": 1, "b": {"c": [1], "e": true}}),
            json!({"b": 7}),
            json!({"b": {"c": {"d": {}}}}),
        ];
        for from in &documents {
            for to in &documents {
                let mut made = from.clone();
                if let Some(patch) = merge_patch(from, to) {
                    apply(&mut made, &patch);
                }
                assert_eq!(&made, to, "{from} to {to}");
                assert_eq!(merge_patch(from, to).is_none(), from == to);
            }
        }
    }

    fn text(bytes: Option<Bytes>) -> String {
        String::from_utf8(bytes.unwrap().to_vec()).unwrap()
    }

    fn last_id(text: &str) -> String {
        text.lines().rev().find_map(|line| line.strip_prefix("id: ")).unwrap().to_owned()
    }

    #[tokio::test(start_paused = true)]
    async fn readers_get_the_document_then_changes_and_events() {
        let feed = Arc::new(Feed::default());
        feed.publish(json!({"a": 1, "b": 2}));
        let mut stream = pin!(feed.read(None).unwrap());
        let first = text(stream.next().await);
        assert!(first.starts_with("retry: 2000\n\nevent: state\nid: "), "{first}");
        assert!(first.ends_with("data: {\"a\":1,\"b\":2}\n\n"), "{first}");
        feed.publish(json!({"a": 1, "b": 2}));
        feed.publish(json!({"a": 1, "b": 3}));
        feed.tell_events(&[Event { id: 4, text: "line one\nline two".into(), ..Event::default() }]);
        let next = text(stream.next().await);
        assert!(next.starts_with("event: patch\n") && next.contains("data: {\"b\":3}\n\n"), "{next}");
        assert!(next.contains("event: event\n") && next.contains(r"line one\nline two"), "{next}");
        assert_eq!(text(stream.next().await), ": the line is alive\n\n", "after some silence");
        feed.close();
        assert!(stream.next().await.is_none());
        assert!(pin!(feed.read(None).unwrap()).next().await.is_none());
    }

    #[tokio::test]
    async fn who_comes_back_misses_nothing() {
        let feed = Arc::new(Feed::default());
        feed.publish(json!({"n": 0}));
        let id = last_id(&text(pin!(feed.read(None).unwrap()).next().await));
        feed.publish(json!({"n": 1}));
        feed.publish(json!({"n": 2}));
        let back = text(pin!(feed.read(Some(&id)).unwrap()).next().await);
        assert!(!back.contains("event: state") && back.matches("event: patch").count() == 2, "{back}");
        for strange in ["", "x", "1-2", &format!("{id}9"), "ffffffffffffffff-1"] {
            let whole = text(pin!(feed.read(Some(strange)).unwrap()).next().await);
            assert!(whole.contains("event: state"), "{strange}: {whole}");
        }
        for n in 3..=MESSAGES_MAX + 3 {
            feed.publish(json!({"n": n}));
        }
        let late = text(pin!(feed.read(Some(&id)).unwrap()).next().await);
        assert!(late.contains("event: state"), "the ring has gone on: {late}");
    }

    #[tokio::test]
    async fn a_slow_reader_gets_the_document_again() {
        let feed = Arc::new(Feed::default());
        feed.publish(json!({"n": 0}));
        let mut slow = pin!(feed.read(None).unwrap());
        slow.next().await.unwrap();
        for n in 0..=MESSAGES_MAX * 2 {
            feed.publish(json!({"n": n + 1}));
        }
        let whole = text(slow.next().await);
        assert_eq!(whole.matches("event: ").count(), 1, "{whole}");
        assert!(whole.contains("event: state"), "{whole}");
    }

    #[test]
    fn streams_are_limited() {
        let feed = Arc::new(Feed::default());
        assert!(!feed.is_read());
        let streams: Vec<_> = (0..STREAMS_MAX).map(|_| feed.read(None).unwrap()).collect();
        assert!(feed.read(None).is_none() && feed.is_read());
        drop(streams);
        assert!(feed.read(None).is_some() && !feed.is_read());
    }
}
