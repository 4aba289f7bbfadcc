//! Puts the load on: lanes that ask one request after the other, and a clock that says when requests are due.

use super::histogram::Histogram;
use super::keys::Keys;
use super::target::{Connection, Decision, Failure};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Reasons and errors that are told apart; others count as this.
const NAMES_MAX: usize = 32;
const OTHERS: &str = "other";
/// A lane that finds nobody waits for this long before it tries again.
const UNREACHABLE_PAUSE: Duration = Duration::from_millis(100);
/// The clock of the open loop looks this often at least whether it is to stop ...
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// ... and sleeps this long at least: what falls due meanwhile is let go at once.
const NAP_MIN: Duration = Duration::from_micros(50);

/// What one target answered, in the time that is measured.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Yes.
    pub allowed: u64,
    /// No, by reason.
    pub denied: BTreeMap<String, u64>,
    /// Not decided, by what went wrong.
    pub errors: BTreeMap<String, u64>,
    /// From when it was due (in the open loop), or sent, to its answer; decided requests alone.
    pub from_due: Histogram,
    /// From when it was sent.
    pub from_sent: Histogram,
}

impl Tally {
    fn count(&mut self, asked: &Result<Decision, Failure>, due: Duration, sent: Duration) {
        match asked {
            Ok(Decision::Allowed) => self.allowed += 1,
            Ok(Decision::Denied(reason)) => add(&mut self.denied, reason, 1),
            Err(failure) => return add(&mut self.errors, failure.name(), 1),
        }
        self.from_due.record(due);
        self.from_sent.record(sent);
    }

    /// Adds what another one has counted.
    pub fn add(&mut self, other: &Self) {
        self.allowed += other.allowed;
        other.denied.iter().for_each(|(reason, count)| add(&mut self.denied, reason, *count));
        other.errors.iter().for_each(|(error, count)| add(&mut self.errors, error, *count));
        self.from_due.add(&other.from_due);
        self.from_sent.add(&other.from_sent);
    }

    /// Requests that were allowed or denied.
    #[must_use]
    pub fn decided(&self) -> u64 {
        self.allowed + self.denied.values().sum::<u64>()
    }

    /// Requests that were neither.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.errors.values().sum()
    }
}

fn add(counts: &mut BTreeMap<String, u64>, name: &str, count: u64) {
    let name = if counts.len() < NAMES_MAX || counts.contains_key(name) { name } else { OTHERS };
    *counts.entry(name.to_owned()).or_default() += count;
}

/// A tally that lanes share.
pub type Shared = Arc<Mutex<Tally>>;

/// Reads a shared tally.
pub fn read(tally: &Shared) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

/// When requests are sent, and which of them count.
#[derive(Debug)]
pub struct Plan {
    start: Instant,
    /// Requests from now on count ...
    pub counted_from: Instant,
    /// ... until then.
    pub end: Instant,
    /// Requests a second; `None`: as soon as the one before is answered.
    rate: Option<u32>,
    stopped: AtomicBool,
    /// Open loop: requests that are due and not sent.
    due: Semaphore,
    sent: AtomicU64,
}

impl Plan {
    /// From now on.
    #[must_use]
    pub fn new(rate: Option<u32>, warm_up: Duration, duration: Duration) -> Self {
        let start = Instant::now();
        let counted_from = start + warm_up;
        let (stopped, due, sent) = (AtomicBool::new(false), Semaphore::new(0), AtomicU64::new(0));
        Self { start, counted_from, end: counted_from + duration, rate, stopped, due, sent }
    }

    /// Nothing more is sent.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.stopped.load(Ordering::Relaxed) || Instant::now() >= self.end
    }

    /// Open loop: requests that were due and found no lane free.
    #[must_use]
    pub fn not_sent(&self) -> u64 {
        u64::try_from(self.due.available_permits()).unwrap_or(u64::MAX)
    }

    /// When the lane's next request is due; `None`: it is over.
    async fn next(&self) -> Option<Instant> {
        let Some(rate) = self.rate else {
            let now = Instant::now();
            return (!self.is_over()).then_some(now);
        };
        self.due.acquire().await.ok()?.forget();
        Some(self.due_at(self.sent.fetch_add(1, Ordering::Relaxed), rate))
    }

    fn due_at(&self, number: u64, rate: u32) -> Instant {
        let (seconds, rest) = (number / u64::from(rate), number % u64::from(rate));
        self.start
            + Duration::from_secs(seconds)
            + Duration::from_nanos(rest * 1_000_000_000 / u64::from(rate))
    }

    /// How many are due by now: number 0 at once.
    fn due_by(&self, now: Instant, rate: u32) -> u64 {
        let due = (now - self.start).as_nanos() * u128::from(rate) / 1_000_000_000;
        u64::try_from(due).unwrap_or(u64::MAX).saturating_add(1)
    }

    /// The clock of the open loop, on a thread of its own (a runtime's timer has a grain of a millisecond); returns when it is over.
    #[allow(clippy::disallowed_methods, reason = "the thread has nothing else to do")]
    pub fn keep_time(&self) {
        let Some(rate) = self.rate else { return };
        let mut released = 0;
        loop {
            let over = self.is_over();
            let due = self.due_by(Instant::now().min(self.end), rate);
            // What is due at the end itself is not asked any more.
            let due = if over { due.saturating_sub(1) } else { due };
            let more = usize::try_from(due.saturating_sub(released)).unwrap_or(0);
            self.due.add_permits(more.min(Semaphore::MAX_PERMITS - self.due.available_permits()));
            released = released.max(due);
            if over {
                return self.due.close();
            }
            let next = self.due_at(released, rate).saturating_duration_since(Instant::now());
            std::thread::sleep(next.clamp(NAP_MIN, LOOK_EVERY));
        }
    }
}

/// Asks one request after the other until the plan is over.
pub async fn lane(plan: Arc<Plan>, connection: Arc<Connection>, mut keys: Keys, tally: Shared) {
    while let Some(due) = plan.next().await {
        let sent = Instant::now();
        let asked = connection.ask(keys.next()).await;
        let answered = Instant::now();
        if due >= plan.counted_from && due < plan.end {
            read(&tally).count(&asked, answered - due, answered - sent);
        }
        if asked == Err(Failure::Unreachable) {
            tokio::time::sleep(UNREACHABLE_PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_due_evenly() {
        let plan = Plan::new(Some(3), Duration::ZERO, Duration::from_secs(10));
        let after = |ms| plan.start + Duration::from_millis(ms);
        assert_eq!(plan.due_at(0, 3), plan.start);
        assert_eq!(plan.due_at(6, 3), after(2_000));
        let due: Vec<u64> = [0, 333, 334, 999, 1_000].map(|ms| plan.due_by(after(ms), 3)).to_vec();
        assert_eq!(due, [1, 1, 2, 3, 4]);
    }

    #[tokio::test]
    async fn what_nobody_takes_was_not_sent() {
        let plan = Plan::new(Some(1_000), Duration::ZERO, Duration::from_millis(100));
        plan.keep_time();
        assert_eq!(plan.not_sent(), 100);
        assert_eq!(plan.next().await, None, "it is over");
    }

    #[test]
    fn tallies() {
        let mut tally = Tally::default();
        let (long, short) = (Duration::from_millis(5), Duration::from_millis(1));
        tally.count(&Ok(Decision::Allowed), long, short);
        tally.count(&Ok(Decision::Denied("over_limit".into())), long, short);
        tally.count(&Err(Failure::TimedOut), long, short);
        let mut two = tally.clone();
        two.add(&tally);
        assert_eq!((two.decided(), two.failed(), two.denied["over_limit"]), (4, 2, 2));
        assert_eq!(two.from_due.total(), 4, "what failed has no time");
        assert!(two.from_due.per_mille(500) >= long && two.from_sent.max() == short);
        for n in 0..100 {
            add(&mut two.errors, &n.to_string(), 1);
        }
        assert!(two.errors.len() <= NAMES_MAX + 1 && two.failed() == 102);
    }
}
