//! Log lines that repeat themselves: said once, then with a count.
//!
//! A line is the same as one before it if it comes from the same place in the source with the same text; numbers count in
//! lines at level INFO alone (versions, indexes: there a number is the news). Within ten seconds it is written once more only
//! where something else was said from the same module in between, and at most five times; how often it was left out is
//! written when the ten seconds are over. Levels below INFO are for those who want to see everything.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Filter};

/// Lines that are the same are told apart by this long.
const WINDOW: Duration = Duration::from_secs(10);
/// How often a line is written within it at most.
const WRITTEN_MAX: u32 = 5;
/// Different lines that are remembered; beyond, lines are written as they come.
const LINES_MAX: usize = 512;
/// The most of a line's text that is kept for its count.
const TEXT_MAX: usize = 400;
/// Counts are written under this target.
const TARGET: &str = "quorate::repeats";

static WARNINGS: AtomicU64 = AtomicU64::new(0);
static ERRORS: AtomicU64 = AtomicU64::new(0);
static SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// What this process has logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lines at level WARN, those that were left out included.
    pub warnings: u64,
    /// The same at level ERROR.
    pub errors: u64,
    /// Lines that were left out.
    pub suppressed: u64,
}

/// What this process has logged so far.
#[must_use]
pub fn counts() -> Counts {
    Counts {
        warnings: WARNINGS.load(Ordering::Relaxed),
        errors: ERRORS.load(Ordering::Relaxed),
        suppressed: SUPPRESSED.load(Ordering::Relaxed),
    }
}

/// The filter that leaves repeats out.
#[derive(Debug, Default)]
pub struct Repeats(Mutex<Lines>);

/// Handed to the layer.
#[derive(Debug)]
pub struct RepeatsFilter(pub std::sync::Arc<Repeats>);

#[derive(Debug, Default)]
struct Lines {
    known: HashMap<u64, Line>,
    /// The line that was written last, by module.
    last: HashMap<&'static str, u64>,
}

#[derive(Debug)]
struct Line {
    level: Level,
    target: &'static str,
    text: String,
    since: Duration,
    written: u32,
    left_out: u64,
}

impl<S> Filter<S> for RepeatsFilter {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    /// No limit of its own (the default, none known, would take the limit from the filter beside it).
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        let metadata = event.metadata();
        match *metadata.level() {
            Level::WARN => WARNINGS.fetch_add(1, Ordering::Relaxed),
            Level::ERROR => ERRORS.fetch_add(1, Ordering::Relaxed),
            Level::INFO => 0,
            _ => return true,
        };
        if metadata.target() == TARGET {
            return true;
        }
        let mut text = Text::new(*metadata.level() == Level::INFO);
        metadata.callsite().hash(&mut text.hash);
        event.record(&mut text);
        self.0.is_written(text.hash.finish(), metadata, text.text, now())
    }
}

impl Repeats {
    fn is_written(&self, key: u64, metadata: &Metadata<'static>, text: String, now: Duration) -> bool {
        let mut lines = self.lines();
        let other_since = lines.last.get(metadata.target()) != Some(&key);
        let Some(line) = lines.known.get_mut(&key).filter(|line| now < line.since + WINDOW) else {
            if lines.known.len() < LINES_MAX || lines.known.contains_key(&key) {
                // One whose count is still to be written goes on counting.
                let left_out = lines.known.get(&key).map_or(0, |line| line.left_out);
                let (level, target) = (*metadata.level(), metadata.target());
                let line = Line { level, target, text, since: now, written: 1, left_out };
                lines.known.insert(key, line);
                lines.last.insert(metadata.target(), key);
            }
            return true;
        };
        if other_since && line.written < WRITTEN_MAX {
            line.written += 1;
            lines.last.insert(metadata.target(), key);
            return true;
        }
        line.left_out += 1;
        SUPPRESSED.fetch_add(1, Ordering::Relaxed);
        false
    }

    /// Writes the counts of lines whose time is over, or of all (at the end).
    pub fn tell(&self, all: bool) {
        let over = {
            let mut lines = self.lines();
            let now = now();
            let over = |line: &Line| all || now >= line.since + WINDOW;
            let over: Vec<Line> =
                lines.known.extract_if(|_, line| over(line)).map(|(_, line)| line).collect();
            if lines.known.is_empty() {
                lines.last.clear();
            }
            over
        };
        // Not under the lock: writing comes back here.
        for Line { level, target, text, left_out, .. } in over.into_iter().filter(|line| line.left_out > 0) {
            match level {
                Level::ERROR => {
                    tracing::error!(target: TARGET, repeated = left_out, of = target, "again: {text}");
                }
                Level::WARN => {
                    tracing::warn!(target: TARGET, repeated = left_out, of = target, "again: {text}");
                }
                _ => tracing::info!(target: TARGET, repeated = left_out, of = target, "again: {text}"),
            }
        }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A line's text, and what makes it another.
struct Text {
    hash: DefaultHasher,
    text: String,
    numbers_count: bool,
}

impl Text {
    fn new(numbers_count: bool) -> Self {
        Self { hash: DefaultHasher::new(), text: String::new(), numbers_count }
    }

    fn add(&mut self, field: &Field, value: &dyn std::fmt::Display, counts: bool) {
        let from = self.text.len();
        // Writing to a String does not fail.
        let _ = match field.name() {
            "message" => write!(self.text, "{value}"),
            name => write!(self.text, " {name}={value}"),
        };
        if counts {
            self.text.get(from..).hash(&mut self.hash);
        }
        if let Some((end, _)) = self.text.char_indices().nth(TEXT_MAX) {
            self.text.truncate(end);
        }
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.add(field, &format_args!("{value:?}"), true);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, &value, true);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, &value, self.numbers_count);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, &value, self.numbers_count);
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        self.add(field, &value, self.numbers_count);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, &value, self.numbers_count);
    }
}

/// Since some moment before this process logged anything.
fn now() -> Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    #[expect(
        clippy::disallowed_methods,
        reason = "when to repeat a log line is no decision; tests and simulations log, too"
    )]
    let now = std::time::Instant::now();
    now.duration_since(*START.get_or_init(|| now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tracing_subscriber::Layer as _;
    use tracing_subscriber::layer::SubscriberExt as _;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(what: impl FnOnce(&Repeats)) -> Vec<String> {
        let (written, repeats) = (Written::default(), Arc::new(Repeats::default()));
        let writer = written.clone();
        let lines = tracing_subscriber::fmt::layer().without_time().with_ansi(false);
        let lines = lines.with_writer(move || writer.clone()).with_filter(RepeatsFilter(repeats.clone()));
        let subscriber = tracing_subscriber::registry().with(lines);
        tracing::subscriber::with_default(subscriber, || what(&repeats));
        let bytes = written.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_repeating_warning_is_said_once_and_then_counted() {
        let lines = logged(|repeats| {
            for attempt in 0..1_000 {
                tracing::warn!(peer = "eu-west", attempt, "cannot reach it");
            }
            tracing::warn!(peer = "ap-south", attempt = 0, "cannot reach it");
            repeats.tell(true);
            repeats.tell(true);
        });
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines[0].contains("cannot reach it peer=\"eu-west\" attempt=0"), "{}", lines[0]);
        assert!(lines[1].contains("peer=\"ap-south\""), "another peer is other news: {}", lines[1]);
        assert!(lines[2].contains("WARN") && lines[2].contains("again: cannot reach it"), "{}", lines[2]);
        assert!(lines[2].contains("repeated=999"), "{}", lines[2]);
    }

    #[test]
    fn a_state_that_flaps_is_written_a_few_times() {
        let lines = logged(|_| {
            for _ in 0..100 {
                tracing::warn!("not ready");
                tracing::info!("ready");
            }
        });
        assert_eq!(lines.len(), 10, "{lines:#?}");
        assert!(lines.iter().step_by(2).all(|line| line.contains("not ready")), "{lines:#?}");
    }

    #[test]
    fn numbers_are_news_at_info_alone() {
        let lines = logged(|_| {
            for version in 1..=3 {
                tracing::info!(version, "policies are in use");
                tracing::debug!("detail");
            }
        });
        assert_eq!(lines.iter().filter(|line| line.contains("in use")).count(), 3, "{lines:#?}");
        assert_eq!(lines.iter().filter(|line| line.contains("detail")).count(), 3, "{lines:#?}");
    }
}
