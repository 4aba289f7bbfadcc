//! When all is well again, so is the service.

use super::figures::{decimal, seconds, tokens};
use super::spans::disturbed;
use super::{Breach, Invariant, Verdict};
use crate::oracle::{Edition, History, Mode, Outcome, Request};
use quorate::quota::amount::{Level, MICROS_PER_SECOND, Micros, Rate, Tokens};
use quorate::quota::guarantee::{ASK_GAP, RTT_ASSUMED};
use quorate::quota::policy::LEASE_MAX;

/// Less than this after recovery is not judged.
const JUDGED_MIN: Micros = Micros::seconds(3);
/// Nor is less than so many of the largest request for each region.
const REQUESTS_MIN: i64 = 10;

/// Once the last fault (and the last change of policy) is over and
/// [`Params::recovery_of`](crate::oracle::Params::recovery_of) has passed, the demand is served for the rest of the run: at
/// least [`Params::served_percent`](crate::oracle::Params::served_percent) of what an ideal limiter would admit then, and in each
/// region at least [`Params::fair_percent`](crate::oracle::Params::fair_percent) of its share.
///
/// The ideal limiter knows everything at once, but keeps to the rules: a region spends its own reserve first and then of the pool,
/// nobody spends another's reserve, all start empty, rates are 1% lower and clocks slow. Where the burst is too small
/// for the rate to move, the rate is `burst / move time` (see docs/guarantees.md, *A strict limit needs burst*). A region's
/// share is its reserve and an equal part of the pool. One largest request for each region is forgiven.
#[derive(Clone, Copy, Debug)]
pub struct Recovery;

impl Invariant for Recovery {
    fn name(&self) -> &'static str {
        "recovery"
    }

    fn promise(&self) -> &'static str {
        "Two leases (or the stated time) after the last fault is over, the demand is served again, up to the limit, everywhere."
    }

    fn check(&self, history: &History) -> Verdict {
        let mut breaches = Vec::new();
        let mut held = Vec::new();
        let mut whys = Vec::new();
        for limit in 0..history.limits.len() {
            match judge(history, limit) {
                Ok(Served { breaches: found, detail }) => {
                    breaches.extend(found);
                    held.push(detail);
                }
                Err(why) => whys.push(why),
            }
        }
        Verdict::of(breaches, || match held.into_iter().reduce(|a, b| if a.0 <= b.0 { a } else { b }) {
            Some((_, detail)) => Verdict::Held { detail },
            None => Verdict::NotApplicable {
                why: whys.into_iter().next().unwrap_or_else(|| "there is no limit".into()),
            },
        })
    }
}

struct Served {
    breaches: Vec<Breach>,
    /// Of what could be served, how much was (in hundredths of a percent); the same in words.
    detail: (i64, String),
}

fn judge(history: &History, limit: usize) -> Result<Served, String> {
    let watched = &history.limits[limit];
    let edition = watched.editions.last().ok_or("a limit has no policy")?;
    if edition.is_unlimited() {
        return Err("the limit was lifted".into());
    }
    let recovery = history.params.recovery_of(watched);
    if let Some(breach) = stuck(history, limit, edition, recovery) {
        return Ok(Served { breaches: vec![breach], detail: (0, String::new()) });
    }
    let over = disturbed(history, limit).end().unwrap_or_default().max(history.healed.unwrap_or_default());
    let start = over.max(edition.from) + recovery;
    if history.end - start < JUDGED_MIN {
        return Err(format!(
            "the run ended less than {} and {} of recovery after the last fault or change",
            seconds(JUDGED_MIN),
            seconds(recovery)
        ));
    }
    let mut requests: Vec<&Request> = history
        .requests
        .iter()
        .filter(|r| r.limit == limit && r.sent >= start && r.cost.is_positive())
        .collect();
    requests.sort_unstable_by_key(|r| r.sent);
    let regions = i64::try_from(history.regions.len().max(1)).unwrap_or(i64::MAX);
    let largest = requests.iter().map(|r| r.cost).max().unwrap_or_default();
    let forgiven = largest.mul_div(regions, 1);
    let mut ideal = Ideal::new(history, edition, start);
    let served = Counts::of(&requests, None, |r| ideal.admits(r));
    if !served.ideal.is_positive() || served.ideal < forgiven.mul_div(REQUESTS_MIN, 1) {
        return Err("too little was asked for after recovery".into());
    }

    let mut breaches = Vec::new();
    let mut look = |region: Option<usize>, counts: &Counts, percent: i64, forgiven: Tokens| {
        if counts.admitted + forgiven < counts.ideal.percent(percent) {
            let detail = counts.words(history, limit, region, start, percent);
            breaches.push(Breach { detail, span: (start, history.end), limit: Some(limit), region });
        }
    };
    look(None, &served, history.params.served_percent, forgiven);
    for region in 0..history.regions.len() {
        let mut share = Ideal::share(history, edition, start, region);
        let counts = Counts::of(&requests, Some(region), |r| share.admits(r));
        look(Some(region), &counts, history.params.fair_percent, largest);
    }
    let percent = served.admitted.mul_div(10_000, served.ideal.0.max(1)).0;
    let detail = served.words(history, limit, None, start, history.params.served_percent);
    Ok(Served { breaches, detail: (percent, detail) })
}

/// A change of policy that does not come to its end.
fn stuck(history: &History, limit: usize, edition: &Edition, recovery: Micros) -> Option<Breach> {
    let faults = history.faults.iter().map(|f| f.to.unwrap_or(Micros::MAX)).max().unwrap_or_default();
    let since = faults.max(edition.from).max(history.healed.unwrap_or_default());
    (edition.changing && history.end - since > recovery + LEASE_MAX).then(|| Breach {
        detail: format!(
            "`{}`: the change of policy of {} is still under way, though nothing was in its way since {}",
            history.limits[limit].name,
            seconds(edition.from),
            seconds(since)
        ),
        span: (since, history.end),
        limit: Some(limit),
        region: None,
    })
}

/// What was asked for, what an ideal limiter admits, and what was admitted.
#[derive(Default)]
struct Counts {
    asked: Tokens,
    ideal: Tokens,
    admitted: Tokens,
}

impl Counts {
    fn of(requests: &[&Request], region: Option<usize>, mut ideal: impl FnMut(&Request) -> bool) -> Self {
        let mut counts = Self::default();
        for request in requests.iter().filter(|r| region.is_none_or(|region| r.region == region)) {
            counts.asked += request.cost;
            counts.ideal += if ideal(request) { request.cost } else { Tokens::ZERO };
            counts.admitted += if request.outcome == Outcome::Allowed { request.cost } else { Tokens::ZERO };
        }
        counts
    }

    fn words(
        &self,
        history: &History,
        limit: usize,
        region: Option<usize>,
        start: Micros,
        percent: i64,
    ) -> String {
        let place =
            region.and_then(|i| history.regions.get(i)).map_or(String::new(), |name| format!(" in {name}"));
        let share = self.admitted.mul_div(100 * 1_000_000, self.ideal.0.max(1)).0;
        format!(
            "`{}`{place}: from {} on {} tokens were asked for; of {} that could be admitted, {} were: {}% ({percent}% promised)",
            history.limits[limit].name,
            seconds(start),
            tokens(self.asked),
            tokens(self.ideal),
            tokens(self.admitted),
            decimal(share, 1),
        )
    }
}

/// A limiter that knows everything at once.
struct Ideal {
    reserves: Vec<Bucket>,
    pool: Bucket,
}

struct Bucket {
    level: Level,
    at: Micros,
    rate: Rate,
    cap: Tokens,
}

impl Ideal {
    fn new(history: &History, edition: &Edition, start: Micros) -> Self {
        let reserves: Vec<_> = (0..history.regions.len()).map(|region| edition.reserve(region)).collect();
        let bucket = |(rate, cap)| Bucket::new(history.params.rate_min(rate), cap, start);
        Self { pool: bucket(pool(edition, &reserves)), reserves: reserves.into_iter().map(bucket).collect() }
    }

    /// What this region has for certain if all regions have as much demand as they like.
    fn share(history: &History, edition: &Edition, start: Micros, region: usize) -> Self {
        let mut ideal = Self::new(history, edition, start);
        let regions = i64::try_from(history.regions.len().max(1)).unwrap_or(i64::MAX);
        (ideal.pool.rate, ideal.pool.cap) =
            (ideal.pool.rate.mul_div(1, regions), ideal.pool.cap.mul_div(1, regions));
        for (other, reserve) in ideal.reserves.iter_mut().enumerate() {
            (reserve.rate, reserve.cap) =
                if other == region { (reserve.rate, reserve.cap) } else { Default::default() };
        }
        ideal
    }

    fn admits(&mut self, request: &Request) -> bool {
        let Some(own) = self.reserves.get_mut(request.region) else { return false };
        own.advance(request.sent);
        self.pool.advance(request.sent);
        if own.level.tokens + self.pool.level.tokens < request.cost {
            return false;
        }
        let reserved = own.level.tokens.min(request.cost);
        own.level.tokens -= reserved;
        self.pool.level.tokens -= request.cost - reserved;
        true
    }
}

impl Bucket {
    fn new(rate: Rate, cap: Tokens, at: Micros) -> Self {
        Self { level: Level::default(), at, rate, cap }
    }

    fn advance(&mut self, now: Micros) {
        self.level.accrue(self.rate, now - self.at, self.cap);
        self.at = now;
    }
}

/// What is lent, as far as the burst can carry it.
fn pool(edition: &Edition, reserves: &[(Rate, Tokens)]) -> (Rate, Tokens) {
    if edition.mode == Mode::Split {
        return (Rate::ZERO, Tokens::ZERO);
    }
    let (rate, burst): (Rate, Tokens) =
        (reserves.iter().map(|r| r.0).sum(), reserves.iter().map(|r| r.1).sum());
    let moving = Rate(edition.cap().mul_div(MICROS_PER_SECOND, (RTT_ASSUMED + ASK_GAP).0).0);
    ((edition.rate.min(moving) - rate).or_zero(), (edition.burst - burst).or_zero())
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;

    /// 100/s, burst 100, of which each of two regions keeps 10%.
    fn history() -> History {
        let reserve = (Rate::per_second(10), Tokens::whole(10));
        let mut history =
            history_of(2, vec![Edition { reserves: vec![reserve; 2], ..edition(0, Mode::Strict, 100, 100) }]);
        history.fault(0, ms(5_000), ms(10_000), "cut off").isolates = true;
        history.healed = Some(ms(10_000));
        history
    }

    /// From `from` s to the end, 40 requests a second, of which so many are admitted.
    fn load(history: &mut History, region: i64, from: i64, admitted: i64) {
        for i in from * 40..60 * 40 {
            let outcome = if i % 40 < admitted { Outcome::Allowed } else { Outcome::Denied };
            history.ask(region, ms(i * 25), ms(i * 25 + 1), outcome);
        }
    }

    fn check(history: &History) -> Verdict {
        Recovery.check(history)
    }

    #[test]
    fn demand_that_is_served_holds() {
        let mut history = history();
        load(&mut history, 0, 30, 40);
        load(&mut history, 1, 30, 40);
        let verdict = check(&history);
        assert!(matches!(&verdict, Verdict::Held { detail } if detail.contains(": 100")), "{verdict:?}");
    }

    #[test]
    fn what_is_refused_before_recovery_does_not_count() {
        let mut history = history();
        load(&mut history, 0, 0, 0);
        history.requests.retain(|r| r.sent < ms(30_000));
        load(&mut history, 0, 30, 40);
        assert!(!check(&history).is_broken());
    }

    #[test]
    fn demand_that_is_not_served_breaks_it() {
        let mut history = history();
        load(&mut history, 0, 30, 37);
        load(&mut history, 1, 30, 37);
        let verdict = check(&history);
        let [breach] = verdict.breaches() else { panic!("{verdict:?}") };
        assert_eq!((breach.span, breach.region), ((ms(30_000), ms(60_000)), None));
        assert!(breach.detail.contains("2,220 were: 92.6% (95% promised)"), "{}", breach.detail);
    }

    #[test]
    fn a_region_that_gets_nothing_breaks_it_though_the_limit_is_used() {
        let mut history = history();
        load(&mut history, 0, 30, 5);
        load(&mut history, 1, 30, 40);
        (0..3).for_each(|_| load(&mut history, 1, 30, 19));
        let verdict = check(&history);
        let [breach] = verdict.breaches() else { panic!("{verdict:?}") };
        assert_eq!(breach.region, Some(0), "{breach:?}");
    }

    #[test]
    fn the_reserve_of_an_idle_region_is_nobody_elses() {
        let mut history = history();
        (0..3).for_each(|_| load(&mut history, 0, 30, 29));
        assert!(!check(&history).is_broken(), "90/s is all that one region can have");
        history.limits[0].editions[0].reserves = vec![];
        assert!(check(&history).is_broken(), "without reserves it is 100/s");
    }

    #[test]
    fn a_small_burst_need_not_carry_the_rate() {
        let mut history = history();
        history.limits[0].editions[0].burst = Tokens::whole(23);
        load(&mut history, 0, 30, 25);
        load(&mut history, 1, 30, 25);
        assert!(!check(&history).is_broken(), "23 tokens each 450 ms are 51/s");
        history.limits[0].editions[0].burst = Tokens::whole(30);
        assert!(check(&history).is_broken(), "30 are 67/s");
    }

    #[test]
    fn split_limits_owe_each_region_its_part() {
        let mut history = history();
        history.limits[0].editions[0].mode = Mode::Split;
        load(&mut history, 0, 30, 10);
        assert!(!check(&history).is_broken());
        history.requests.clear();
        load(&mut history, 0, 30, 8);
        assert!(check(&history).is_broken());
    }

    #[test]
    fn nothing_is_judged_where_nothing_can_be() {
        let mut history = history();
        assert!(matches!(check(&history), Verdict::NotApplicable { .. }), "nobody asked");
        load(&mut history, 0, 0, 0);
        history.end = ms(32_000);
        assert!(matches!(check(&history), Verdict::NotApplicable { .. }), "it is too short");
        history.end = ms(60_000);
        assert!(check(&history).is_broken());
        history.faults[0].to = None;
        assert!(matches!(check(&history), Verdict::NotApplicable { .. }), "the fault is not over");
    }

    #[test]
    fn a_stated_time_counts() {
        let mut history = history();
        load(&mut history, 0, 30, 40);
        history.requests.iter_mut().filter(|r| r.sent < ms(45_000)).for_each(|r| r.outcome = Outcome::Denied);
        assert!(check(&history).is_broken());
        history.params.recovery = Some(ms(35_000));
        assert!(!check(&history).is_broken());
    }

    #[test]
    fn a_limit_that_was_lifted_is_not_judged() {
        let mut history = history();
        load(&mut history, 0, 30, 0);
        history.limits[0].editions.push(Edition::unlimited(ms(11_000)));
        assert!(matches!(check(&history), Verdict::NotApplicable { .. }));
    }

    #[test]
    fn a_change_of_policy_that_never_ends_breaks_it() {
        let mut history = history();
        load(&mut history, 0, 30, 40);
        let changing = Edition { changing: true, ..edition(12_000, Mode::Strict, 100, 100) };
        history.limits[0].editions.push(changing);
        assert!(!check(&history).is_broken(), "it may yet end");
        history.end = ms(100_000);
        assert!(check(&history).detail().contains("still under way"));
    }
}
