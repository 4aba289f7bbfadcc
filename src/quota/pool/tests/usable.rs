//! Are tokens that exist of use to whoever asks? Requests that are denied, or made to wait, although one bucket for the whole world
//! would have admitted them; slow limits, asked for from any region; a flash crowd on an idle bucket. `FIGURES=all` prints what
//! `docs/performance.md` shows.

use super::net::*;
use super::support::*;
use crate::quota::amount::{DRIFT_PPM, Micros, Tokens};
use crate::quota::policy::*;

/// Which region asks for the how-manieth token.
type Asker = fn(usize) -> usize;

/// As policies have it where they do not say.
const WAIT: Micros = Micros::millis(250);

fn figures() -> bool {
    std::env::var_os("FIGURES").is_some()
}

/// Arrivals at random, so many thousandths of a request a second in each region: exponential gaps.
struct Poisson {
    rates: Vec<i64>,
    next: Vec<i64>,
}

impl Poisson {
    fn new(net: &mut Net, rates: Vec<i64>) -> Self {
        let now = net.now;
        let next = rates.iter().map(|rate| now + gap(&mut net.rng, *rate)).collect();
        Self { rates, next }
    }

    fn due(&mut self, rng: &mut Rng, region: usize, now: i64) -> usize {
        let mut many = 0;
        while self.next[region] <= now {
            many += 1;
            self.next[region] += gap(rng, self.rates[region]);
        }
        many
    }

    fn run(&mut self, net: &mut Net, until: Micros) {
        net.arrive(until, &mut |rng, region, now| self.due(rng, region, now));
    }
}

#[allow(clippy::float_arithmetic)]
fn gap(rng: &mut Rng, rate: i64) -> i64 {
    if rate == 0 {
        return i64::MAX / 2;
    }
    let part = (rng.int(0, (1 << 53) - 1) + 1) as f64 / (1u64 << 53) as f64;
    (-part.ln() * 1e9 / rate as f64) as i64
}

/// What became of requests.
#[derive(Clone, Copy, Default, Debug)]
struct Tale {
    asked: usize,
    admitted: usize,
    ideal: usize,
    /// Tokens existed, and they were denied ...
    denied: usize,
    /// ... or waited, and were admitted, after so long in all, and at most.
    waited: usize,
    waits: i64,
    longest: i64,
    /// Denied while the pool itself held enough.
    pool_held: usize,
}

impl Tale {
    fn of(net: &Net, from: Micros) -> Self {
        let mut tale = Self::default();
        for o in net.outcomes.iter().filter(|o| o.at >= from.0) {
            tale.asked += 1;
            tale.admitted += usize::from(o.admitted);
            tale.ideal += usize::from(o.ideal);
            let existed = o.ideal && o.held >= net.cost;
            if existed && !o.admitted {
                tale.denied += 1;
                tale.pool_held += usize::from(o.pool >= net.cost);
            } else if existed && o.end > o.at {
                tale.waited += 1;
                tale.waits += o.end - o.at;
                tale.longest = tale.longest.max(o.end - o.at);
            }
        }
        tale
    }

    fn and(self, other: Self) -> Self {
        Self {
            asked: self.asked + other.asked,
            admitted: self.admitted + other.admitted,
            ideal: self.ideal + other.ideal,
            denied: self.denied + other.denied,
            waited: self.waited + other.waited,
            waits: self.waits + other.waits,
            longest: self.longest.max(other.longest),
            pool_held: self.pool_held + other.pool_held,
        }
    }

    /// Denied and made to wait, in millionths of all requests.
    fn ppm(&self) -> (usize, usize) {
        let part = |n: usize| n * 1_000_000 / self.asked.max(1);
        (part(self.denied), part(self.waited))
    }

    fn print(&self, name: &str) {
        let (denied, waited) = self.ppm();
        let short = self.ideal as i64 - self.admitted as i64;
        println!(
            "{name}: {} asked, {denied} ppm denied ({} of {} with enough in the pool), {waited} ppm waited, {} ms on average, {} at most; {short} fewer than the ideal's {}",
            self.asked,
            self.pool_held,
            self.denied,
            self.waits / 1_000 / self.waited.max(1) as i64,
            self.longest / 1_000,
            self.ideal,
        );
    }
}

type Spread = fn(total: i64, region: usize, many: usize) -> i64;
const SPREADS: [(&str, Spread); 3] = [
    ("even", |total, _, many| total / many as i64),
    ("9 in 10 in one", |total, i, many| if i == 1 { total * 9 / 10 } else { total / 10 / (many as i64 - 1) }),
    ("all in one", |total, i, _| if i == 1 { total } else { 0 }),
];

/// Demand of so many percent of the limit (1,000/s, burst 2,000) for half a minute, after ten seconds.
fn under(percent: i64, many: usize, rtt: i64, spread: Spread) -> Tale {
    let mut net = Net::apart(strict(1_000, Unit::Second, 2_000), many, rtt);
    net.wait = WAIT;
    let rates = (0..many).map(|i| spread(10_000 * percent, i, many)).collect();
    let mut poisson = Poisson::new(&mut net, rates);
    poisson.run(&mut net, s(40));
    Tale::of(&net, s(10))
}

#[test]
fn who_asks_for_less_than_the_limit_gets_it_at_once() {
    let all = [(3, 80), (5, 200), (9, 80), (3, 200), (5, 80), (9, 200)];
    let some = if figures() { all.len() } else { 2 };
    let demands: &[i64] = if figures() { &[80, 90, 95, 150] } else { &[95, 150] };
    let mut seen = Vec::new();
    for (many, rtt) in all.into_iter().take(some) {
        for (name, spread) in SPREADS {
            for percent in demands {
                let tale = under(*percent, many, rtt, spread);
                tale.print(&format!("{many} regions, {rtt} ms, {name}, {percent}%"));
                let (denied, waited) = tale.ppm();
                let short = (tale.ideal as i64 - tale.admitted as i64) * 1_000 / tale.ideal as i64;
                seen.push((name, *percent, denied + waited, short));
            }
        }
    }
    let fine = |(name, percent, ppm, short): &(&str, i64, usize, i64)| match percent {
        150 => *short <= 15,
        _ if name.starts_with("all") => *ppm < 1_000,
        _ => *ppm < 10_000,
    };
    assert!(seen.iter().all(fine), "{seen:?}");
}

/// Some buckets (10/s, burst 20), the first asked for at 90% of its limit, the k-th at a k-th of that. By default a region's
/// reserve of such a burst holds no whole token, and all wait for a lease; with more reserve, or more patience, they need not.
#[test]
fn sparse_buckets_are_served_at_once_where_the_reserve_holds_a_request() {
    let many = 20;
    let mut seen = Vec::new();
    for (reserve, wait) in [(5, WAIT), (20, WAIT), (50, WAIT)] {
        for (name, spread) in SPREADS {
            let mut all = Tale::default();
            for k in 1..=many {
                let limit = strict(10, Unit::Second, 20);
                let reserve = Reserve { burst: Share::percent(reserve), ..limit.reserve };
                let mut net = Net::apart(Policy { reserve, ..limit }, 3, 80);
                net.wait = wait;
                net.rng = Rng(k as u64);
                let rates = (0..3).map(|i| spread(9_000 / k, i, 3)).collect();
                let mut poisson = Poisson::new(&mut net, rates);
                poisson.run(&mut net, s(70));
                all = all.and(Tale::of(&net, s(10)));
            }
            all.print(&format!("{many} buckets, reserve {reserve}%, wait {}, {name}", wait.0 / MS));
            seen.push((reserve, all.ppm()));
        }
    }
    let fine = |(reserve, (denied, waited)): &(u32, (usize, usize))| {
        if *reserve < 20 { *denied < 80_000 } else { denied + waited < 40_000 }
    };
    assert!(seen.iter().all(fine), "{seen:?}");
}

/// Five times the limit at once, in one region, after a minute and a half of nothing: what is admitted within a second, in
/// thousandths of what one bucket would have.
fn flash(limit: &(u64, u64), rtt: i64, wait: Micros) -> (usize, i64) {
    let mut net = Net::apart(strict(limit.0, Unit::Second, limit.1), 3, rtt);
    net.wait = wait;
    net.arrive(s(90), &mut |_, _, _| 0);
    let rate = 5_000 * limit.0 as i64;
    let mut poisson = Poisson::new(&mut net, vec![0, rate, 0]);
    poisson.run(&mut net, s(92));
    let end = s(91).0;
    let admitted = net.outcomes.iter().filter(|o| o.admitted && o.end < end).count();
    let ideal = net.outcomes.iter().filter(|o| o.ideal && o.at < end).count();
    (admitted * 1_000 / ideal, net.asks)
}

#[test]
fn a_flash_crowd_on_an_idle_bucket_is_served() {
    let mut seen = Vec::new();
    for rtt in [80, 200] {
        for limit in [(1_000, 2_000), (1_000, 1_000), (100, 100), (10, 20)] {
            for wait in [WAIT, Micros::ZERO] {
                let (used, asks) = flash(&limit, rtt, wait);
                println!(
                    "{}/s, burst {}, {rtt} ms, wait {}: {used} thousandths of the ideal in the first second, {asks} asks",
                    limit.0,
                    limit.1,
                    wait.0 / MS
                );
                if wait == WAIT {
                    let least = if rtt > 100 { 720 } else { 885 };
                    seen.push((rtt, limit, used, used >= least));
                }
            }
        }
    }
    assert!(seen.iter().all(|(.., fine)| *fine), "{seen:?}");
}

/// The whole burst is asked for at once; then, whenever one bucket for the whole world would have another token, somebody comes for it
/// (in one region after the other, or always in the same), and tries again every half a second until he has it.
#[derive(Debug)]
struct Slow {
    /// Of the burst: admitted at once or within the wait.
    burst: usize,
    /// Afterwards: tokens that have accrued, and that were used before the end.
    accrued: usize,
    used: usize,
    /// How long after it had accrued, in ms: on average, nine in ten, at most.
    mean: i64,
    most: i64,
    longest: i64,
}

const AGAIN: i64 = 500 * MS;

fn slow(policy: &Policy, rtt: i64, who: fn(usize) -> usize, time: Micros) -> Slow {
    let mut net = Net::apart(policy.clone(), 3, rtt);
    net.wait = if rtt > 100 { WAIT + WAIT } else { WAIT };
    net.arrive(s(60), &mut |_, _, _| 0);
    let rate = net.limit.0.discount(DRIFT_PPM);
    let mut left = net.limit.1.floor() as usize;
    net.arrive(s(60) + Micros(STEP), &mut |_, i, _| if i == who(0) { std::mem::take(&mut left) } else { 0 });
    let burst = net.outcomes.len();
    let every = rate.time_for(Tokens::whole(1)).unwrap();
    // Who has come: when, where, and his last attempt.
    let mut callers: Vec<(i64, usize, Option<usize>)> = Vec::new();
    let (mut delays, mut accrued) = (Vec::new(), 0);
    while net.now < (s(60) + time).0 {
        if net.now >= s(60).0 + every.0 * (accrued + 1) {
            accrued += 1;
            callers.push((net.now, who(accrued as usize), None));
        }
        callers.retain_mut(|(came, region, last)| {
            let outcome = last.map(|number| net.outcomes[number]);
            if let Some(outcome) = outcome.filter(|outcome| outcome.admitted) {
                delays.push((outcome.end - *came) / MS);
                return false;
            }
            if outcome.is_none_or(|outcome| outcome.at + AGAIN <= net.now) {
                *last = Some(net.outcomes.len());
                net.request(*region);
            }
            true
        });
        let next = Micros(net.now + STEP);
        net.arrive(next, &mut |_, _, _| 0);
    }
    delays.sort_unstable();
    Slow {
        burst: net.outcomes[..burst].iter().filter(|o| o.admitted).count(),
        accrued: accrued as usize,
        used: delays.len(),
        mean: delays.iter().sum::<i64>() / delays.len().max(1) as i64,
        most: delays.get(delays.len() * 9 / 10).copied().unwrap_or(0),
        longest: delays.last().copied().unwrap_or(0),
    }
}

#[test]
fn every_token_of_a_slow_limit_is_usable_anywhere() {
    let ways: [(&str, Asker); 5] = [
        ("region 0, the leader", |_| 0),
        ("region 1", |_| 1),
        ("region 2", |_| 2),
        ("in turn", |number| number % 3),
        ("hopping", |number| (number / 5) % 3),
    ];
    let limits = [
        (strict(10, Unit::Minute, 10), s(600)),
        (strict(10, Unit::Minute, 1), s(600)),
        (strict(10, Unit::Minute, 60), s(600)),
        (strict(1, Unit::Minute, 1), s(1_800)),
        (strict(1, Unit::Minute, 5), s(1_800)),
        (strict(100, Unit::Hour, 20), s(1_800)),
    ];
    let (some, rtts) = if figures() { (limits.len(), vec![80, 200]) } else { (3, vec![80]) };
    for (limit, time) in limits.into_iter().take(some) {
        for rtt in &rtts {
            for (name, who) in ways {
                let seen = slow(&limit, *rtt, who, time);
                println!(
                    "{}, {rtt} ms, {name}: {} of the burst, {} of {} afterwards, {} ms after they accrued on average, nine in ten within {} ms, all within {} ms",
                    limit.limit, seen.burst, seen.used, seen.accrued, seen.mean, seen.most, seen.longest
                );
                let locked = if limit.limit.to_string().ends_with(" 60") { 2 } else { 0 };
                let whole = limit.limit.to_string().rsplit(' ').next().unwrap().parse::<usize>().unwrap();
                assert_eq!(seen.burst + locked, whole);
                assert!(seen.used * 100 >= seen.accrued * 85, "{seen:?}");
            }
        }
    }
}
