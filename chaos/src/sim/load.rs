//! Callers: from none to greedy, and those who spend everything everywhere at the worst of times.

use super::machine::pass;
use super::policies::request_of;
use super::region::PATIENCE;
use super::weather::Weather;
use super::{Phase, World, spendable};
use crate::oracle::{Outcome, Request};
use quorate::quota::amount::{Micros, Rate, Tokens};
use quorate::quota::policy::Limit;
use quorate::quota::verdict::{Reason, Verdict};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How callers of a region behave while there are faults.
#[derive(Clone, Copy, Debug)]
enum Style {
    Idle,
    /// So many percent of the limit's rate.
    Steady(i64),
    /// Now and then all that there is.
    Bursts,
    /// All that there is, always.
    Greedy,
}

impl World {
    /// The callers of one region.
    pub(super) async fn call(self: Arc<Self>, region: usize) {
        let mut style = self.style();
        loop {
            let gap = match self.phase() {
                Phase::Over => return,
                _ if !self.regions[region].is_member() || self.sleeps(region) => Micros::millis(500),
                Phase::Quiet => {
                    pass(Micros::millis(500)).await;
                    continue;
                }
                Phase::Demand => self.demand(region).await,
                Phase::Faults => {
                    if self.chance.percent(1) {
                        style = self.style();
                    }
                    self.ask_in_style(region, style)
                }
            };
            pass(gap).await;
        }
    }

    /// Does nobody ask for anything there yet?
    fn sleeps(&self, region: usize) -> bool {
        self.phase() != Phase::Demand && self.time.now().0 < self.asleep_until[region].load(Ordering::Relaxed)
    }

    fn style(&self) -> Style {
        match self.chance.int(0, 9) {
            // So that pools and reserves are full.
            2.. if self.weather == Weather::Hasty && self.chance.percent(80) => Style::Idle,
            0 | 1 => Style::Idle,
            2..6 => Style::Steady(self.chance.pick(&[5, 30, 100, 300])),
            6 | 7 => Style::Bursts,
            _ => Style::Greedy,
        }
    }

    fn ask_in_style(self: &Arc<Self>, region: usize, style: Style) -> Micros {
        let at = self.chance.index(self.targets.len());
        let (rate, unit) = self.size(at);
        match style {
            Style::Idle => Micros::millis(400),
            Style::Steady(percent) => {
                let cost = if self.chance.percent(15) { unit + unit } else { unit };
                self.ask(region, at, cost);
                let gap = rate.percent(percent).time_for(cost).unwrap_or(Micros::seconds(1));
                // At random, with this mean.
                self.chance.time(Micros::ZERO, gap + gap).clamp(Micros::millis(5), Micros::seconds(4))
            }
            Style::Bursts if self.chance.percent(20) => {
                self.spend_all(region);
                self.chance.time(Micros::millis(100), Micros::seconds(3))
            }
            Style::Bursts => {
                self.ask(region, at, unit);
                Micros::millis(150)
            }
            Style::Greedy => {
                self.spend_all(region);
                // What was not to be had was demand all the same.
                self.ask(region, at, unit);
                self.chance.time(Micros::millis(10), Micros::millis(120))
            }
        }
    }

    /// Twice the limit in every region. Returns how long to wait with the next.
    async fn demand(self: &Arc<Self>, region: usize) -> Micros {
        let mut gap = Micros::seconds(1);
        for at in 0..self.targets.len() {
            let (rate, unit) = self.size(at);
            self.ask(region, at, unit);
            gap = gap.min((rate + rate).time_for(unit).unwrap_or(Micros::seconds(1)));
        }
        gap.max(Micros::millis(4))
    }

    /// The rate of a target's limit, and what one request costs.
    fn size(&self, at: usize) -> (Rate, Tokens) {
        let policy = self.watch.with_pool(|pool| {
            let found = pool.policies().find(|p| *p.policy.name == *self.targets[at].policy);
            found.map(|view| view.policy.limit.clone())
        });
        let rate = match policy {
            Some(Limit::TokenBucket(bucket)) => bucket.rate(),
            // So that a window is used up in some seconds.
            Some(Limit::Quota(quota)) => Rate(quota.tokens().0 / 5).max(Rate::per_second(1)),
            Some(Limit::Unlimited | Limit::Concurrent(_)) | None => Rate::per_second(1),
        };
        (rate, request_of(rate))
    }

    /// Everywhere at once, all that is there.
    pub(super) async fn attack(self: Arc<Self>) {
        while self.phase() != Phase::Over {
            pass(self.chance.time(Micros::millis(10), Micros::seconds(8))).await;
            if self.phase() == Phase::Faults {
                // One may go on having what it has.
                let spared = self.chance.index(self.regions.len() * 3);
                for region in (0..self.regions.len()).filter(|region| *region != spared) {
                    if !self.sleeps(region) {
                        self.spend_all(region);
                    }
                }
            }
        }
    }

    pub(super) fn spend_all(self: &Arc<Self>, region: usize) {
        for at in 0..self.targets.len() {
            let all = spendable(&self.regions[region], &self.targets[at]);
            if all.is_positive() {
                self.ask(region, at, all);
            }
        }
    }

    /// Sends one request, whatever becomes of it.
    fn ask(self: &Arc<Self>, region: usize, at: usize, cost: Tokens) {
        let world = Arc::clone(self);
        tokio::spawn(async move {
            let sent = world.time.now();
            let target = &world.targets[at];
            let answer = world.regions[region].check(&target.policy, &target.value, cost).await;
            let answered = match answer {
                Some(_) => world.time.now(),
                None => sent + Micros::from_duration(PATIENCE),
            };
            let outcome = answer.as_ref().map_or(Outcome::Unknown, outcome);
            world.history().requests.push(Request { region, limit: at, cost, sent, answered, outcome });
        });
    }
}

fn outcome(verdict: &Verdict) -> Outcome {
    if verdict.allowed {
        return Outcome::Allowed;
    }
    let out_of_reach = verdict.limits.iter().any(|limit| limit.reason == Reason::StoreUnavailable);
    if verdict.undecided || out_of_reach { Outcome::Unavailable } else { Outcome::Denied }
}
