use super::*;
use crate::invariants::made_up::*;
use crate::invariants::{Breach, Verdict};
use crate::oracle::{FaultSpan, Mode, Outcome, Request, Run, Sample, Watched};

/// An incident: a region is cut off, and spends its old lease once more when it is back; a store is lost.
fn incident() -> History {
    let reserve = (Rate::per_second(10), Tokens::whole(10));
    let strict = Edition { reserves: vec![reserve; 3], ..edition(0, Mode::Strict, 200, 100) };
    let lower = Edition { reserves: vec![reserve; 3], ..edition(52_000, Mode::Strict, 120, 60) };
    let mut history = history_of(3, vec![strict.clone(), strict.changing_to(ms(48_000), &lower), lower]);
    let split = Edition {
        reserves: vec![(Rate::per_second(7), Tokens::whole(7)); 3],
        ..edition(0, Mode::Split, 21, 21)
    };
    history.limits.push(Watched { name: "login account=<7>&\"x\"".into(), editions: vec![split] });
    history.run = Run {
        title: "cluster minority-cut-off".into(),
        about: "ap-south is cut off from the others; then us-east loses its Redis".into(),
        replay: "quorate-chaos cluster --scenario minority-cut-off --seed 17".into(),
    };
    history.healed = Some(ms(41_000));
    let fault = |from, to, what: &str, regions: &[usize], disables, isolates| FaultSpan {
        from: ms(from),
        to: Some(ms(to)),
        what: what.into(),
        regions: regions.to_vec(),
        disables,
        isolates,
    };
    history.faults = vec![
        fault(12_000, 27_000, "ap-south cut off from all others", &[2], false, true),
        fault(20_000, 23_000, "link us-east to eu-west slow: 400 ms", &[0, 1], false, false),
        fault(38_000, 41_000, "us-east's Redis killed, started empty", &[0], true, false),
        fault(48_000, 48_000, "policy applied: 120/s, burst 60", &[0, 1, 2], false, false),
    ];
    for region in 0..3 {
        load(&mut history, region);
    }
    for at in (0..60_000).step_by(500) {
        (0..3).for_each(|by| history.samples.push(sample(at, by)));
    }
    history
}

/// What a region is asked for, and a limiter that keeps to the rules but for one moment.
fn load(history: &mut History, region: usize) {
    let demand_per_s = [70, 50, 60][region];
    let mut level = 40.0;
    let mut last = 0;
    for i in 0..60 * demand_per_s {
        let at = i64::try_from(i).unwrap() * 1_000 / i64::try_from(demand_per_s).unwrap();
        let cut_off = region == 2 && (14_000..28_500).contains(&at);
        let lowered = at > 48_500;
        let rate =
            if cut_off { 9.8 } else { f64::from([68, 48, 55][region]) * if lowered { 0.6 } else { 1.0 } };
        let cap = if cut_off {
            10.0
        } else if lowered {
            20.0
        } else {
            33.0
        };
        level = f64::min(level + rate * (at - last) as f64 / 1_000.0, cap);
        last = at;
        let twice = region == 2 && (29_000..29_400).contains(&at);
        let dead = region == 0 && (38_000..41_200).contains(&at);
        let outcome = match () {
            () if dead && at < 38_300 => Outcome::Unknown,
            () if dead => Outcome::Unavailable,
            () if level >= 1.0 || twice => Outcome::Allowed,
            () => Outcome::Denied,
        };
        if outcome == Outcome::Allowed {
            level = f64::max(level - 1.0, 0.0);
        }
        let took = 2 + at % 3 + if outcome == Outcome::Unknown { 900 } else { 0 };
        for _ in 0..if twice { 7 } else { 1 } {
            history.requests.push(Request {
                region,
                limit: 0,
                cost: Tokens::whole(1),
                sent: ms(at),
                answered: ms(at + took),
                outcome,
            });
        }
        if i % 8 == 0 {
            history.requests.push(Request {
                region,
                limit: 1,
                cost: Tokens(500_000),
                sent: ms(at),
                answered: ms(at + took),
                outcome: Outcome::Allowed,
            });
        }
    }
}

fn sample(at: i64, by: usize) -> Sample {
    let cut_off = (14_000..28_500).contains(&at);
    let wave = (at / 500) % 8;
    let (whole, thirds) = if at < 52_000 { ((200, 100), [62, 45, 48]) } else { ((120, 60), [36, 24, 26]) };
    let lent: Vec<(Rate, Tokens)> = thirds
        .iter()
        .enumerate()
        .map(|(i, rate)| if i == 2 && cut_off { 0 } else { rate - wave % 3 })
        .map(|rate| (Rate::per_second(rate), Tokens::whole(rate / 3)))
        .collect();
    let reserved = (Rate::per_second(30), Tokens::whole(30.min(whole.1 / 2)));
    let whole = (Rate::per_second(whole.0), Tokens::whole(whole.1));
    let free = (
        whole.0 - reserved.0 - lent.iter().map(|l| l.0).sum(),
        whole.1 - reserved.1 - lent.iter().map(|l| l.1).sum(),
    );
    let level = Some(Tokens::whole((at / 700 + 7 * i64::try_from(by).unwrap()) % 30));
    Sample {
        at: ms(at),
        by,
        level,
        free: (free.0, free.1, free.1.mul_div(wave, 8)),
        lent,
        reserved,
        whole,
        ..Sample::default()
    }
}

#[test]
fn zz_write() {
    let history = incident();
    let judged = judge(&history);
    write(&history, &judged, Path::new("/tmp/report.html")).unwrap();
    println!("{}", text(&history, &judged, false));
    println!("{}", failure(&history, &judged).unwrap());
    for i in crate::invariants::ALL {
        let start = std::time::Instant::now();
        (0..10).for_each(|_| drop(i.check(&history)));
        println!("{} {:?} for {}", i.name(), start.elapsed() / 10, history.requests.len());
    }
    let _ = (Breach::default(), Verdict::Held { detail: String::new() });
}
