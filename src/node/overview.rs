//! What a region shows to people of the whole cluster: regions ask each other once a second what they have to say, and each
//! keeps what it heard last. Nothing in the protocol goes by any of it.

mod history;
mod journal;
mod report;
mod view;

pub(super) use report::bucket_in_hex;
pub(super) use view::on_store_failure;

use super::{Inner, gauges};
use crate::clock;
use crate::limiter::meter::Reading;
use crate::quota::amount::Micros;
use crate::server::admin::Feed;
use crate::server::state::{Event, HistoriesState, PeerQuestion, PeerReport, RateState};
use crate::telemetry::wall_clock;
use history::{History, Sample};
use journal::Journal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

/// Between two looks at what has happened.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Between two readings of the meter, two questions to a region, and two documents for those who watch.
const MEASURE_EVERY: Duration = Duration::from_secs(1);
/// What was heard longer ago is old: charts show a gap, and nothing is concluded from it.
const OLD: Duration = Duration::from_secs(5);

/// What is known of the cluster, for people.
#[derive(Debug, Default)]
pub struct Overview {
    seen: Mutex<Seen>,
    /// For consoles that are open.
    pub feed: Arc<Feed>,
}

#[derive(Debug, Default)]
struct Seen {
    /// What this region says of itself.
    mine: PeerReport,
    /// What the busiest buckets here are for, by id.
    whats: BTreeMap<String, String>,
    /// What the others said last, and when they were asked.
    heard: BTreeMap<String, (Instant, PeerReport)>,
    history: History,
    journal: Journal,
    smooth: report::Smooth,
}

impl Overview {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Events, the newest last, at most `most`; and the last minutes.
    pub(super) fn past(&self, most: usize) -> (Vec<Event>, HistoriesState) {
        let seen = self.seen();
        let mut events: Vec<Event> = seen.journal.events().rev().take(most).cloned().collect();
        events.reverse();
        (events, seen.history.state())
    }

    /// What a bucket that is busy here is for; empty: it is not known.
    pub(super) fn what(&self, bucket: &str) -> String {
        self.seen().whats.get(bucket).cloned().unwrap_or_default()
    }
}

/// Milliseconds since the Unix epoch.
pub(super) fn now_ms() -> u64 {
    let now = wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// Keeps the overview until `stopping`.
pub(super) async fn keep(inner: Arc<Inner>, mut stopping: watch::Receiver<bool>) {
    let answering = Arc::downgrade(&inner);
    inner.raft.answer_with(Box::new(move |question| {
        let inner = answering.upgrade();
        Box::pin(async move { inner?.answer(&question).await })
    }));
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asking = JoinSet::new();
    let mut asked = BTreeSet::new();
    let mut measured = clock::now();
    loop {
        tokio::select! {
            biased;
            () = stopped(&mut stopping) => break,
            Some(done) = asking.join_next(), if !asking.is_empty() => {
                let Ok((region, at, report)) = done else { continue };
                asked.remove(&region);
                if let Some(report) = report {
                    inner.overview.seen().heard.insert(region, (at, report));
                }
            }
            _ = looks.tick() => {
                let now = clock::now();
                let due = now - measured >= Micros::from_duration(MEASURE_EVERY);
                if due {
                    inner.measure(now - measured).await;
                    measured = now;
                    for peer in inner.raft.status().peers {
                        let region = peer.region.to_string();
                        if asked.insert(region.clone()) {
                            asking.spawn(ask(inner.raft.clone(), region));
                        }
                    }
                }
                inner.look();
                if due && inner.overview.feed.is_read() {
                    inner.overview.feed.publish(crate::server::admin::document(&inner.describe()));
                }
            }
        }
    }
    inner.overview.feed.close();
}

async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // Nobody who could say so is as good as being told.
    let _ = stopping.wait_for(|stop| *stop).await;
}

/// Asks a region what it has to say. What it answers is as old as the question, or newer.
async fn ask(raft: crate::raft::Raft, region: String) -> (String, Instant, Option<PeerReport>) {
    let at = Instant::now();
    let question = serde_json::to_vec(&PeerQuestion::Report).unwrap_or_default();
    let answer = raft.question(&region, question).await;
    let report = answer.and_then(|answer| serde_json::from_slice(&answer).ok());
    (region, at, report)
}

impl Inner {
    /// Reads the meter, and says what there is to say.
    async fn measure(&self, time: Micros) {
        let reading: Reading = self.core.meter.read();
        gauges::show_hot(self, &reading);
        let held = self.held(&reading).await;
        let region = self.report_region();
        let mut seen = self.overview.seen();
        let active = self.core.active.load();
        let name = |id: u32| active.policy(id).map(|policy| policy.policy.name.to_string());
        seen.mine = report::report(&mut seen.smooth, &reading, &held, region, time, name);
        let busy = reading.buckets.iter();
        seen.whats = busy.map(|bucket| (bucket.bucket.to_string(), bucket.what.to_string())).collect();
        let present: Vec<String> = self.raft.status().peers.iter().map(|p| p.region.to_string()).collect();
        let Seen { mine, heard, history, .. } = &mut *seen;
        heard.retain(|region, _| present.contains(region));
        let mut sample = Sample::new();
        let fresh = |at: &Instant| at.elapsed() < OLD;
        let others = present.iter().map(|region| {
            let report = heard.get(region).filter(|(at, _)| fresh(at)).map(|(_, report)| report);
            (region.as_str(), report)
        });
        let all: Vec<(&str, Option<&PeerReport>)> =
            others.chain([(&*self.config.region, Some(&*mine))]).collect();
        let policies: BTreeSet<&str> =
            all.iter().filter_map(|(_, r)| *r).flat_map(|r| r.policies.keys().map(String::as_str)).collect();
        for policy in policies {
            let rates = all.iter().map(|(region, report)| {
                let rate = report.map(|r| r.policies.get(policy).copied().unwrap_or(RateState::default()));
                (*region, rate)
            });
            sample.insert(policy, rates.collect());
        }
        let regions: Vec<&str> = all.iter().map(|(region, _)| *region).collect();
        history.add(&sample, &regions, now_ms());
    }

    /// Notes what has happened, and tells those who watch.
    fn look(&self) {
        let observed = self.observe();
        let new = self.overview.seen().journal.look(observed, now_ms());
        if !new.is_empty() {
            self.overview.feed.tell_events(&new);
        }
    }
}
