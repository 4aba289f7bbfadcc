//! Notes every request, and keeps a few sums for whoever looks on.

use crate::oracle::{Edition, Outcome, Request};
use quorate::clock;
use quorate::quota::amount::{Micros, Rate, Tokens};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What the client was told.
    pub outcome: Outcome,
    /// Why, as the answer says; or what was the matter with the connection.
    pub reason: &'static str,
}

/// Everything that was seen so far.
#[derive(Debug)]
pub struct Recorder {
    began: Micros,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    requests: Vec<Request>,
    reasons: Vec<BTreeMap<&'static str, u64>>,
    pulse: Vec<Pulse>,
    gauges: Vec<Gauge>,
}

/// A region's answers so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulse {
    /// Requests that were admitted.
    pub allowed: u64,
    /// Requests that were denied.
    pub denied: u64,
    /// Requests that were not decided.
    pub other: u64,
}

/// How full the fullest window that ends now is, taking each request for admitted when it was answered. (The invariants know it
/// exactly; this is for whoever looks on.)
#[derive(Clone, Copy, Debug, Default)]
struct Gauge {
    rate: Rate,
    cap: Tokens,
    at: Micros,
    used: Tokens,
    percent_max: i64,
}

impl Gauge {
    fn admit(&mut self, at: Micros, cost: Tokens) {
        let passed = (at - self.at).or_zero();
        self.at = self.at.max(at);
        self.used = (self.used - self.rate.during(passed)).or_zero() + cost;
        let percent = self.used.0.saturating_mul(100).checked_div(self.cap.0).unwrap_or(0);
        self.percent_max = self.percent_max.max(percent);
    }
}

impl Recorder {
    /// An empty one, whose time begins now.
    #[must_use]
    pub fn new(regions: usize, limits: usize) -> Self {
        let inner = Inner {
            reasons: vec![BTreeMap::new(); regions],
            pulse: vec![Pulse::default(); regions],
            gauges: vec![Gauge::default(); limits],
            ..Inner::default()
        };
        Self { began: clock::now(), inner: Mutex::new(inner) }
    }

    /// True time since the run began.
    #[must_use]
    pub fn now(&self) -> Micros {
        clock::now() - self.began
    }

    /// Holds a limit against this edition from now on (for [`Self::fullest_percent`] alone).
    pub fn gauge(&self, limit: usize, edition: &Edition) {
        if let Some(gauge) = self.lock().gauges.get_mut(limit) {
            (gauge.rate, gauge.cap) = (edition.rate, edition.cap());
        }
    }

    /// Notes one request.
    pub fn note(&self, region: usize, limit: usize, cost: Tokens, sent: Micros, reply: Reply) {
        let answered = self.now();
        let mut inner = self.lock();
        inner.requests.push(Request { region, limit, cost, sent, answered, outcome: reply.outcome });
        if let Some(reasons) = inner.reasons.get_mut(region) {
            *reasons.entry(reply.reason).or_default() += 1;
        }
        if let Some(pulse) = inner.pulse.get_mut(region) {
            match reply.outcome {
                Outcome::Allowed => pulse.allowed += 1,
                Outcome::Denied => pulse.denied += 1,
                Outcome::Unavailable | Outcome::Unknown => pulse.other += 1,
            }
        }
        if reply.outcome == Outcome::Allowed
            && let Some(gauge) = inner.gauges.get_mut(limit)
        {
            gauge.admit(answered, cost);
        }
    }

    /// Answers so far, by region.
    #[must_use]
    pub fn pulse(&self) -> Vec<Pulse> {
        self.lock().pulse.clone()
    }

    /// The fullest window so far, in percent of what the burst allows, over all limits.
    #[must_use]
    pub fn fullest_percent(&self) -> i64 {
        self.lock().gauges.iter().map(|g| g.percent_max).max().unwrap_or(0)
    }

    /// Hands over what was noted: requests, and how often each reason came, by region.
    #[must_use]
    pub fn take(&self) -> (Vec<Request>, Vec<BTreeMap<String, u64>>) {
        let mut inner = self.lock();
        let reasons = std::mem::take(&mut inner.reasons);
        let named =
            |by: BTreeMap<&'static str, u64>| by.into_iter().map(|(why, n)| (why.to_owned(), n)).collect();
        (std::mem::take(&mut inner.requests), reasons.into_iter().map(named).collect())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_fills_with_what_is_admitted_and_drains_at_the_rate() {
        let mut gauge = Gauge { rate: Rate::per_second(10), cap: Tokens::whole(20), ..Gauge::default() };
        (0..10).for_each(|_| gauge.admit(Micros::ZERO, Tokens::whole(1)));
        assert_eq!(gauge.percent_max, 50);
        gauge.admit(Micros::millis(500), Tokens::whole(3));
        assert_eq!((gauge.used, gauge.percent_max), (Tokens::whole(8), 50));
        gauge.admit(Micros::millis(400), Tokens::whole(14));
        assert_eq!(gauge.percent_max, 110, "an answer that comes late drains nothing");
    }

    #[test]
    fn what_is_noted_is_handed_over_with_its_reasons() {
        let recorder = Recorder::new(2, 1);
        let reply = |outcome, reason| Reply { outcome, reason };
        recorder.note(1, 0, Tokens::whole(1), recorder.now(), reply(Outcome::Allowed, "ok"));
        recorder.note(1, 0, Tokens::whole(1), recorder.now(), reply(Outcome::Unknown, "timeout"));
        assert_eq!(recorder.pulse()[1], Pulse { allowed: 1, denied: 0, other: 1 });
        let (requests, reasons) = recorder.take();
        assert_eq!(requests.len(), 2);
        assert!(requests.iter().all(|r| r.sent <= r.answered && r.region == 1));
        assert_eq!(reasons[1].get("timeout"), Some(&1));
        assert!(reasons[0].is_empty());
    }
}
