//! How much of a limit the regions really use, under random arrivals. Figures are in thousandths.

use super::net::*;
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::policy::*;
use crate::quota::pool::*;

fn uniform(_: usize, _: i64) -> i64 {
    500
}

fn skewed(i: usize, _: i64) -> i64 {
    if i == 1 { 1_350 } else { 75 }
}

fn solo(i: usize, _: i64) -> i64 {
    if i == 1 { 1_500 } else { 0 }
}

fn uniform_five(_: usize, _: i64) -> i64 {
    300
}

fn skewed_five(i: usize, _: i64) -> i64 {
    if i == 3 { 1_350 } else { 37 }
}

fn solo_five(i: usize, _: i64) -> i64 {
    if i == 3 { 1_500 } else { 0 }
}

/// Steady demand of 1.5 times the limit.
#[test]
fn a_busy_limit_is_used_whatever_the_skew() {
    let limit = || strict(1_000, Unit::Second, 2_000);
    let approximate = || {
        let mode = Mode::Approximate { max_overshoot: Share::percent(10) };
        Policy { mode, ..limit() }
    };
    let cases: [(&str, Net, Load); 8] = [
        ("three, approximate, 90/10", Net::three(approximate()), skewed),
        ("five, approximate, one", Net::five(approximate()), solo_five),
        ("three, uniform", Net::three(limit()), uniform),
        ("three, 90/10", Net::three(limit()), skewed),
        ("three, one", Net::three(limit()), solo),
        ("five, uniform", Net::five(limit()), uniform_five),
        ("five, 90/10", Net::five(limit()), skewed_five),
        ("five, one", Net::five(limit()), solo_five),
    ];
    for (name, mut net, load) in cases {
        net.run(s(10), load);
        let asks = net.asks;
        net.run(s(70), load);
        let (used, asks) = (net.used(s(10), s(70)), net.asks - asks);
        println!("{name}: {used} thousandths used, {asks} asks in 60 s");
        assert!(used >= 970, "{name}: {used}");
        assert!(asks <= 90 * net.regions.len() as i64, "{name}: {asks} asks in 60 s");
    }
}

/// What can be reached: clocks may run fast by the drift, so that everything is used at a rate less that.
const CEILING: i64 = 990;

/// The same near and far, with 3 to 9 regions: idle reserve is lent. With `FIGURES=all` it prints what `docs/performance.md` shows.
#[test]
fn idle_reserve_is_used_by_others() {
    type Spread = fn(usize, usize) -> i64;
    let spreads: [(&str, Spread); 3] = [
        ("even", |_, many| 1_500 / many as i64),
        ("9 in 10 in one", |i, many| if i == 1 { 1_350 } else { 150 / (many as i64 - 1) }),
        ("all in one", |i, _| if i == 1 { 1_500 } else { 0 }),
    ];
    let all = [(3, 80), (5, 200), (9, 80), (3, 200), (5, 80), (9, 200)];
    let some = if std::env::var_os("FIGURES").is_some() { all.len() } else { 3 };
    for (many, rtt) in all.into_iter().take(some) {
        for (name, spread) in spreads {
            let mut net = Net::apart(strict(1_000, Unit::Second, 2_000), many, rtt);
            net.drive(s(10), spread);
            let (asks, entries, bytes) = (net.asks, net.entries, net.bytes);
            net.drive(s(70), spread);
            let used = net.used(s(10), s(70));
            let (asks, entries, bytes) = (net.asks - asks, net.entries - entries, net.bytes - bytes);
            println!(
                "{many} regions, {rtt} ms, {name}: {used} thousandths used; in a minute {asks} asks, {} loans, {entries} entries, {bytes} bytes",
                net.loans
            );
            // (A little demand at random keeps more headroom idle than it uses.)
            let least = if name.starts_with('9') { CEILING - 15 } else { CEILING - 5 };
            assert!(used >= least, "{many} regions, {rtt} ms, {name}: {used}");
            assert!((net.loans > 0) == (spread(0, many) < 10), "{name}: {} loans", net.loans);
        }
    }
}

/// Nobody is short: nothing is lent, and nothing is asked.
#[test]
fn what_is_idle_stays_where_it_is_as_long_as_nobody_is_short() {
    let mut net = Net::three(strict(1_000, Unit::Second, 2_000));
    net.run(s(60), |i, _| i64::from(i == 1) * 700);
    assert_eq!(net.loans, 0);
    net.run(s(90), solo);
    assert!((2..=8).contains(&net.loans), "{} loans of two regions in 30 s", net.loans);
    let loans = net.loans;
    net.run(s(110), |i, _| i64::from(i == 1) * 500);
    let after = net.loans;
    net.run(s(200), |i, _| i64::from(i == 1) * 500);
    assert!(net.loans == after && after - loans <= 2, "{loans} {after} {}", net.loans);
}

/// With a third of the limit in reserve, of which most can be lent.
fn reserved() -> Net {
    let share = Share::percent(30);
    let limit = strict(1_000, Unit::Second, 2_000);
    Net::three(Policy { reserve: Reserve { rate: share, burst: Share::percent(3) }, ..limit })
}

/// A loan that is not renewed ends: whoever had it goes on with the rest, at every moment.
#[test]
fn a_loan_that_ends_takes_nothing_else_with_it() {
    let mut net = reserved();
    net.run(s(20), solo);
    assert!(net.loans >= 2);
    net.cut_off = Some(2);
    net.run(s(70), solo);
    for second in 20..70 {
        let admitted = net.count(s(second), s(second + 1), Some(1));
        assert!(admitted >= 800, "{admitted} at {second} s");
    }
}

/// A lender needs what it has lent, and no more: the pool hears of it, and serves it, like anybody in steps.
#[test]
fn a_lender_whose_own_demand_is_within_its_reserve_is_served() {
    let mut net = reserved();
    net.run(s(20), solo);
    let loans = net.loans;
    assert!(loans >= 2);
    net.run(s(45), |i, time| if i == 2 { 80 } else { solo(i, time) });
    let admitted = [(21, 45), (40, 45)].map(|(from, to)| net.count(s(from), s(to), Some(2)) / (to - from));
    assert!(admitted[0] >= 45 && admitted[1] >= 65, "{admitted:?} a second");
}

/// Its own demand comes back to a region that has lent its reserve.
#[test]
fn a_lender_is_served_like_anybody() {
    let mut net = Net::three(strict(1_000, Unit::Second, 2_000));
    net.run(s(20), solo);
    assert!(net.loans >= 2);
    net.run(s(23), |i, _| 700 * i64::from(i < 2));
    net.run(s(40), |i, _| 700 * i64::from(i < 2));
    let (lender, other) = (net.count(s(23), s(40), Some(0)), net.count(s(23), s(40), Some(1)));
    assert!(lender * 100 >= 17_000 * 45 && other * 100 >= 17_000 * 45, "{lender} {other}");
}

/// All demand in one region, and half of its reserve (6.7/s and a burst of 67) in another, which lends as long as it has none.
fn solo_and_some(i: usize, _: i64) -> i64 {
    [0, 1_500, 3][i]
}

#[test]
fn a_lender_that_is_cut_off_has_its_reserve_back_when_the_loan_is_over() {
    for (mute, after) in [(false, s(0)), (true, s(60))] {
        let mut net = Net::three(strict(1_000, Unit::Second, 2_000));
        net.run(s(20), solo);
        assert!(net.loans >= 2);
        (net.cut_off, net.mute) = if mute { (None, Some(2)) } else { (Some(2), None) };
        let from = s(20) + after;
        net.run(from, solo);
        net.run(from + s(62), |i, _| [0, 1_500, 6][i]);
        let (first, then) =
            (net.count(from, from + s(30), Some(2)), net.count(from + s(32), from + s(62), Some(2)));
        println!("mute: {mute}, after {after:?}: {first} and {then} of 180 each");
        // Its burst of 33 and a tenth of the rate stay; and what it does not lend any more, it has at once.
        let least = if after == s(0) { 33 + 20 } else { 180 * 9 / 10 };
        assert!(first >= least - 2, "{first}");
        assert!(then >= 180 * 9 / 10, "nothing is lent any more: {then}");
    }
}

#[test]
fn a_lender_keeps_what_its_own_demand_needs_once_there_is_some() {
    let mut net = Net::three(strict(1_000, Unit::Second, 2_000));
    let lent = |net: &Net| {
        let pool = &net.regions[2].replica;
        pool.loan(BUCKET, RegionId(2), pool.tau()).map_or(Rate::ZERO, |loan| loan.rate)
    };
    net.run(s(20), solo);
    assert!(lent(&net) > Rate(5_999_000), "nine tenths");
    net.run(s(52), solo_and_some);
    assert!(lent(&net) < Rate::per_second(4), "{:?}", lent(&net));
    net.run(s(110), solo_and_some);
    let rest = lent(&net);
    assert!(rest > Rate::per_second(1) && rest < Rate::per_second(5), "it lends the rest: {rest:?}");
    assert!(net.count(s(60), s(110), Some(2)) >= 150 * 9 / 10);
}

#[test]
fn demand_that_moves_is_followed() {
    for (name, mut net, from, to) in [
        ("three", Net::three(strict(1_000, Unit::Second, 2_000)), 1, 2),
        ("five", Net::five(strict(1_000, Unit::Second, 2_000)), 1, 3),
    ] {
        let load: [Load; 4] = [
            |i, _| i64::from(i == 0),
            |i, _| i64::from(i == 1) * 1_500,
            |i, _| i64::from(i == 2) * 1_500,
            |i, _| i64::from(i == 3) * 1_500,
        ];
        net.run(s(20), load[from]);
        net.run(s(40), load[to]);
        let within = (0..100)
            .find(|t| net.used(s(20) + Micros::millis(t * 100), s(21) + Micros::millis(t * 100)) >= 950);
        println!("{name}: 95% again after {within:?} x 100 ms; then {}", net.used(s(23), s(40)));
        assert!(within.is_some_and(|t| t <= 30), "{name}: {within:?}");
    }
}

#[test]
fn a_burst_at_once_gets_the_burst() {
    for (name, places) in [("over three", vec![0, 1, 2]), ("in one", vec![1])] {
        let mut net = Net::three(strict(10, Unit::Second, 100));
        net.run(s(1), |_, _| 0);
        // 300 requests at once, and each tries again every 50 ms until it is let through.
        let mut waiting: Vec<usize> = (0..300).map(|i| places[i % places.len()]).collect();
        while net.now < s(9).0 {
            waiting.retain(|i| !net.request(*i));
            let next = Micros(net.now + 50 * MS);
            net.run(next, |_, _| 0);
        }
        let (all, ideal) = (net.count(s(1), s(9), None), 180);
        println!("{name}: {all} of {ideal}, {} asks", net.asks);
        assert!(all * 100 >= ideal * 92, "{name}: {all} of {ideal}");
    }
}

#[test]
fn a_region_that_was_cut_off_has_its_share_back_within_two_leases() {
    let mut net = Net::three(strict(1_000, Unit::Second, 2_000));
    net.run(s(20), uniform);
    net.cut_off = Some(2);
    net.run(s(60), uniform);
    let (alone, others) = (net.count(s(40), s(60), Some(2)), net.used(s(40), s(60)));
    net.heal();
    net.run(s(100), uniform);
    let back = net.count(s(80), s(100), Some(2));
    println!("cut off: {alone} in 20 s, the others made up to {others}; after 20 s: {back} in 20 s");
    assert!(alone < 500 && others > 900, "{alone} {others}");
    assert!(back * 3 * 100 >= 20_000 * 90, "{back}");
}

#[test]
fn sparse_demand_within_the_reserve_never_asks() {
    let mut net = Net::three(strict(1_000, Unit::Second, 2_000));
    net.run(s(300), |_, _| 1);
    assert_eq!(net.asks, 0);
    assert!(net.count(s(0), s(300), None) > 600);
}

/// The reserve holds less than one request: the first ask brings tokens.
#[test]
fn a_cold_bucket_gets_tokens_with_its_first_ask() {
    for (limit, cost) in [
        (strict(10, Unit::Second, 10), 1),
        (strict(10, Unit::Minute, 10), 1),
        (strict(100, Unit::Second, 100), 10),
        (strict(5, Unit::Day, 5), 1),
        (strict(100, Unit::Hour, 20), 18),
        (strict(1, Unit::Second, 1), 1),
    ] {
        let mut net = Net::three(limit.clone());
        net.cost = Tokens::whole(cost);
        net.run(s(3), |_, _| 0);
        assert!(!net.request(2), "the reserve would have done");
        net.run(s(3) + Micros::millis(400), |_, _| 0);
        assert_eq!(net.asks, 1);
        assert!(net.request(2), "{limit:?}");
    }
}
