//! Demand: many callers at once, in one region or in all, and what became of each request.

use super::client::{Api, check_body};
use super::meter::Admitted;
use super::{eventually, hold};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::RangeBounds;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// A steady load asks this often for what is due.
const TICK: Duration = Duration::from_millis(10);
/// The most requests that a steady load has under way in one region. (A frozen region must not fill the test's memory.)
const IN_FLIGHT_MAX: usize = 400;
/// How long a flood's caller waits after a denial before it asks again.
const AFTER_DENIAL: Duration = Duration::from_millis(40);

/// What the callers ask for.
#[derive(Clone)]
pub struct Ask {
    /// Names the load in the history.
    pub name: &'static str,
    body: Arc<Value>,
}

impl Ask {
    /// One token of what these attributes match.
    pub fn new(name: &'static str, domain: &str, attributes: &[(&str, &str)]) -> Self {
        Self { name, body: Arc::new(check_body(domain, attributes, 1)) }
    }
}

/// One request and its answer.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Which load.
    pub name: &'static str,
    /// Where: an index of the list of regions that the load was started with.
    pub region: usize,
    /// When it was sent.
    pub sent: Instant,
    /// When its answer was there (or was given up).
    pub answered: Instant,
    /// The status; 0: no answer.
    pub status: u16,
    /// The first limit's reason, if there was an answer.
    pub reason: &'static str,
    /// When the first limit is reset, as the answer says: milliseconds since 1970.
    pub reset_at_ms: u64,
}

/// The reasons of the contract.
const REASONS: [&str; 5] = ["ok", "over_limit", "no_lease", "store_unavailable", "shadow"];
/// How many denials a message lists.
const DENIALS_MAX: usize = 40;

/// What became of every request so far. Clones share it.
#[derive(Clone, Default)]
pub struct History(Arc<Mutex<Vec<Event>>>);

impl History {
    /// A copy of all events.
    pub fn events(&self) -> Vec<Event> {
        self.0.lock().expect("no caller panics while it writes").clone()
    }

    /// What was admitted of one load, in all regions: for the meter.
    pub fn admitted(&self, name: &str) -> Vec<Admitted> {
        let admitted = self.events().into_iter().filter(|e| e.name == name && e.status == 200);
        admitted.map(|e| Admitted { sent: e.sent, answered: e.answered, cost: 1 }).collect()
    }

    /// How many were answered so in `region` between two moments (`None`: in all).
    pub fn count(&self, name: &str, region: Option<usize>, status: u16, from: Instant, to: Instant) -> usize {
        let counts = |e: &&Event| {
            e.name == name
                && e.status == status
                && region.is_none_or(|r| r == e.region)
                && (from..to).contains(&e.answered)
        };
        self.0.lock().expect("no caller panics while it writes").iter().filter(counts).count()
    }

    /// How many were admitted in `region` between two moments.
    pub fn admitted_in(&self, name: &str, region: usize, from: Instant, to: Instant) -> usize {
        self.count(name, Some(region), 200, from, to)
    }

    /// How many there are of each status, for messages.
    pub fn statuses(&self, name: &str) -> BTreeMap<(usize, u16), usize> {
        let mut statuses = BTreeMap::new();
        for event in self.events().iter().filter(|e| e.name == name) {
            *statuses.entry((event.region, event.status)).or_default() += 1;
        }
        statuses
    }

    /// A line a second: admitted by region, for messages.
    pub fn by_second(&self, name: &str) -> String {
        let events = self.events();
        let Some(start) = events.iter().map(|e| e.sent).min() else { return "nothing was sent".to_owned() };
        let mut seconds: BTreeMap<u64, BTreeMap<(usize, u16), usize>> = BTreeMap::new();
        for event in events.iter().filter(|e| e.name == name) {
            let second = seconds.entry((event.answered - start).as_secs()).or_default();
            *second.entry((event.region, event.status)).or_default() += 1;
        }
        let line =
            |(second, counts): (&u64, &BTreeMap<(usize, u16), usize>)| format!("{second:>3} s {counts:?}");
        seconds.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// The first of those that were not admitted: when they were sent (seconds since the first of all), where, how long
    /// they took, and why; for messages.
    pub fn denials(&self, name: &str) -> String {
        let events = self.events();
        let Some(start) = events.iter().map(|e| e.sent).min() else { return "nothing was sent".to_owned() };
        let denied = events.iter().filter(|e| e.name == name && e.status != 200).take(DENIALS_MAX);
        let line = |e: &Event| {
            let (at, took) = ((e.sent - start).as_secs_f64(), (e.answered - e.sent).as_millis());
            format!("{at:>7.3} s region {} took {took} ms: {} {}", e.region, e.status, e.reason)
        };
        denied.map(line).collect::<Vec<_>>().join("\n")
    }

    fn add(&self, event: Event) {
        self.0.lock().expect("no caller panics while it writes").push(event);
    }
}

/// Requests at a steady rate, whether they are answered or not (an open loop). Ends when dropped.
pub struct Steady {
    rates: Vec<Arc<AtomicU64>>,
    tasks: JoinSet<()>,
}

impl Steady {
    /// Starts `rates[i]` requests a second in region i.
    pub fn start(ask: &Ask, regions: &[Api], rates: &[u64], history: &History) -> Self {
        assert_eq!(regions.len(), rates.len());
        let mut steady = Self { rates: Vec::new(), tasks: JoinSet::new() };
        for (region, (api, rate)) in regions.iter().zip(rates).enumerate() {
            let rate = Arc::new(AtomicU64::new(*rate));
            steady.rates.push(rate.clone());
            steady.tasks.spawn(send_steadily(ask.clone(), region, api.fresh(), rate, history.clone()));
        }
        steady
    }

    /// Changes the rate in one region from now on.
    pub fn set(&self, region: usize, rate: u64) {
        self.rates[region].store(rate, Ordering::Relaxed);
    }
}

/// All at once `count` requests, dealt out over the regions, and then each of `callers` asks again and again (after a
/// denial with a short pause) until `time` has passed.
pub async fn flood(
    ask: &Ask,
    regions: &[Api],
    count: usize,
    callers: usize,
    time: Duration,
    history: &History,
) {
    let end = Instant::now() + time;
    let mut tasks = JoinSet::new();
    let dealt = regions.iter().cycle().enumerate().map(|(i, api)| (i % regions.len(), api.clone()));
    for (n, (region, api)) in dealt.take(count).enumerate() {
        let (ask, history) = (ask.clone(), history.clone());
        tasks.spawn(async move {
            let mut admitted = send(&ask, region, &api, &history).await;
            while n < callers && Instant::now() < end {
                if !admitted {
                    tokio::time::sleep(AFTER_DENIAL).await;
                }
                admitted = send(&ask, region, &api, &history).await;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("a caller does not panic");
    }
}

async fn send_steadily(ask: Ask, region: usize, api: Api, rate: Arc<AtomicU64>, history: History) {
    let in_flight = Arc::new(Semaphore::new(IN_FLIGHT_MAX));
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut last, mut due) = (Instant::now(), 0.0);
    loop {
        tick.tick().await;
        let now = Instant::now();
        due += (now - last).as_secs_f64() * rate.load(Ordering::Relaxed) as f64;
        last = now;
        while due >= 1.0 {
            due -= 1.0;
            let Ok(permit) = in_flight.clone().try_acquire_owned() else { continue };
            let (ask, api, history) = (ask.clone(), api.clone(), history.clone());
            tokio::spawn(async move {
                send(&ask, region, &api, &history).await;
                drop(permit);
            });
        }
    }
}

/// Waits until as many requests of a load as `many` says were admitted in one region in the last `over`, all of it after this call.
pub async fn admits(
    history: &History,
    name: &str,
    region: usize,
    (many, over): (impl RangeBounds<usize> + Debug, Duration),
    within: Duration,
) {
    let called = Instant::now();
    eventually(&format!("{name}: {many:?} in {over:?} in region {region}"), within, || async {
        let now = Instant::now();
        let from = now.checked_sub(over).unwrap_or(now).max(called);
        let admitted = history.admitted_in(name, region, from, now);
        hold(now - called >= over && many.contains(&admitted), || {
            format!("{admitted} in {over:?}; by second:\n{}", history.by_second(name))
        })
    })
    .await;
}

/// Milliseconds since 1970, by this machine's clock.
pub fn unix_ms() -> u64 {
    let since =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("it is later than 1970");
    u64::try_from(since.as_millis()).expect("and no more than that")
}

/// Sends one request; was it admitted?
async fn send(ask: &Ask, region: usize, api: &Api, history: &History) -> bool {
    let sent = Instant::now();
    let answer = api.post("/v1/check", &ask.body).await;
    let answered = Instant::now();
    let status = answer.as_ref().map_or(0, |answer| answer.status);
    let holds =
        |reason: &&&str| answer.as_ref().is_ok_and(|a| a.text.contains(&format!("\"reason\":\"{reason}\"")));
    let reason = REASONS.iter().find(holds).copied().unwrap_or("none");
    let reset_ms = answer
        .as_ref()
        .ok()
        .and_then(|a| a.text.split("\"reset_ms\":").nth(1)?.split(',').next()?.parse().ok());
    let reset_at_ms = unix_ms() + reset_ms.unwrap_or(0);
    history.add(Event { name: ask.name, region, sent, answered, status, reason, reset_at_ms });
    status == 200
}
