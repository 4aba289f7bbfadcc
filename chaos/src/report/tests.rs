use super::series::{Bins, Shares, Traffic, Usage};
use super::*;
use crate::invariants::made_up::*;
use crate::invariants::{ALL, Breach, Verdict, admitted, whole};
use crate::oracle::{FaultSpan, LogLevel, LogLine, Mode, Outcome, Request, Run, Sample, Watched};

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
        let at = i64::from(i) * 1_000 / i64::from(demand_per_s);
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

/// Names that would be markup if they could.
fn nasty() -> History {
    let evil = "</script><script>alert('1')</script>\"'><img src=x onerror=alert(1)>\u{1b}[2J";
    let mut history = incident();
    history.run = Run { title: evil.into(), about: evil.into(), replay: evil.into() };
    history.regions = vec![evil.into(); 3];
    history.limits.iter_mut().for_each(|limit| limit.name = evil.into());
    history.faults.iter_mut().for_each(|fault| fault.what = evil.into());
    history.notes = vec![evil.into()];
    history.reasons = vec![[(evil.to_string(), 3)].into(); 3];
    let line = LogLine { region: 9, level: LogLevel::Panic, text: evil.into(), count: 2, expected: true };
    history.logs = vec![line; 100];
    history
}

fn judged(verdict: Verdict) -> Vec<Judged> {
    vec![Judged { name: "strict-bound".into(), promise: "It holds.".into(), verdict }]
}

#[test]
fn it_says_what_was_broken_and_how_to_see_it_again() {
    let history = incident();
    let page = html(&history, &judge(&history));
    for needle in [
        "✗ BROKEN: strict-bound",
        "<code id=replay>quorate-chaos cluster --scenario minority-cut-off --seed 17</code>",
        "<b>29–29.387 s</b> <code>tenant-requests tenant=42</code> admitted 215 tokens",
        "✓ Kept</b><td><b>conservation</b>",
        "– Not judged</b><td><b>approximate-bound</b>",
        "137.6 of 100",
        "<span>1<span class=long> ap-south cut off from all others</span></span>",
        "lent to eu-west",
        "no decision (503)",
        "<td>52 s<td>strict<td>120/s<td>60<td>0",
    ] {
        assert!(page.contains(needle), "{needle}");
    }
    assert!(page.len() < 3_000_000);
}

#[test]
fn it_says_so_if_all_is_well_or_nothing_is_known() {
    let history = history_of(2, vec![edition(0, Mode::Strict, 10, 10)]);
    let held = html(&history, &judged(Verdict::Held { detail: String::new() }));
    assert!(held.contains("✓ Kept: the one promise that could be judged held") && !held.contains("BROKEN"));
    let nothing = html(&history, &judged(Verdict::NotApplicable { why: "x".into() }));
    assert!(nothing.contains("Nothing could be judged"));
}

#[test]
fn it_needs_nothing_from_anywhere_else() {
    let history = incident();
    let page = html(&history, &judge(&history));
    for needle in ["http:", "https:", " src=", "@import", "url("] {
        assert!(!page.contains(needle), "{needle}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn nothing_in_a_history_is_markup() {
    let (plain, evil) = (incident(), nasty());
    let mut broken = judge(&evil);
    broken.push(Judged { name: "<b>".into(), promise: "<i>".into(), verdict: broken[0].verdict.clone() });
    let page = html(&evil, &broken);
    assert!(!page.contains("<script>alert") && !page.contains("<img") && !page.contains('\u{1b}'));
    let scripts = |page: &str| (page.matches("<script").count(), page.matches("</script").count());
    assert_eq!(scripts(&page), scripts(&html(&plain, &judge(&plain))), "as many as without it");
}

#[test]
fn what_is_empty_is_drawn_too() {
    for history in
        [History::default(), history_of(3, vec![]), history_of(0, vec![edition(5, Mode::Split, 0, 0)])]
    {
        let page = html(&history, &judge(&history));
        assert!(!page.contains("NaN") && !page.contains("inf"), "no number is none");
    }
}

#[test]
fn many_faults_are_thin_and_hide_nothing() {
    let mut history = incident();
    let fault = history.faults[0].clone();
    history.faults.extend((0..300).map(|i| FaultSpan { from: ms(i * 100), to: None, ..fault.clone() }));
    let page = html(&history, &judge(&history));
    assert!(page.contains("class=\"chart lanes thin\"") && page.contains("<h3>304 faults</h3>"));
    assert_eq!(page.matches("<rect class=\"fault\"").count() % page.matches("<svg ").count(), 0);
    assert_eq!(page.matches("<rect class=\"fault\"").count() / page.matches("<svg ").count(), 1, "one band");
}

#[test]
fn no_limit_is_drawn_as_none() {
    let mut history = incident();
    history.limits[0].editions.push(Edition::unlimited(ms(55_000)));
    let page = html(&history, &judge(&history));
    assert!(page.contains("<td>55 s<td>unlimited<td>"));
    let bins = Bins::of(&history);
    let usage = Usage::of(&history, 0, &bins);
    assert!(
        usage.cap.iter().chain(&usage.used).all(|value| (0.0..=140.0).contains(value)),
        "no axis goes to the sky"
    );
}

#[test]
fn the_history_can_be_read_out_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let history = nasty();
    let before = judge(&history);
    let file = dir.path().join("report.html");
    write(&history, &before, &file).unwrap();
    let again = read(&file).unwrap();
    assert_eq!(serde_json::to_value(&again).unwrap(), serde_json::to_value(&history).unwrap());
    assert_eq!(serde_json::to_value(judge(&again)).unwrap(), serde_json::to_value(before).unwrap());

    let page = fs::read_to_string(&file).unwrap();
    let json = page.split_once("id=\"history\">").unwrap().1.split_once("</script>").unwrap().0;
    fs::write(&file, json).unwrap();
    assert_eq!(read(&file).unwrap().requests.len(), history.requests.len(), "as it is downloaded");
}

#[test]
fn a_long_run_is_thinned_and_says_so() {
    let mut history = incident();
    let requests = history.requests.clone();
    (0..8).for_each(|_| history.requests.extend_from_slice(&requests));
    let span = (ms(29_000), ms(29_010));
    let breach = Breach { detail: "too much".into(), span, limit: Some(0), region: None };
    let broken = judged(Verdict::Broken { breaches: vec![breach] });
    let page = html(&history, &broken);
    assert!((1_500_000..3_000_000).contains(&page.len()), "{}", page.len());
    assert!(page.contains("the run was too long for all of them"));
    let error = data::parse(&page).unwrap_err().to_string();
    assert!(error.contains("only a part of its run"), "{error}");

    let inside = |r: &&Request| r.limit == 0 && r.sent <= span.1 && r.answered >= span.0;
    let times = history.requests.iter().filter(inside).count();
    let json: serde_json::Value = {
        let rest = page.split_once("id=\"history\">").unwrap().1;
        serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
    };
    let column = |name: &str| json["requests"][name].as_array().unwrap().iter().map(|v| v.as_i64().unwrap());
    let kept = column("sent").zip(column("answered")).zip(column("limit"));
    let kept =
        kept.filter(|((sent, answered), limit)| *limit == 0 && *sent <= span.1.0 && *answered >= span.0.0);
    assert_eq!(kept.count(), times, "what broke the promise is all there");
}

#[test]
fn a_terminal_gets_a_line_for_each_promise() {
    let history = incident();
    let plain = text(&history, &judge(&history), false);
    let sum = format!("cluster minority-cut-off: 1 of {} promises BROKEN\n", ALL.len());
    assert!(plain.starts_with(&(sum + "  BROKEN strict-bound       29–29.387 s: ")), "{plain}");
    assert!(plain.ends_with("replay: quorate-chaos cluster --scenario minority-cut-off --seed 17\n"));
    assert!(!plain.contains('\u{1b}'));
    assert!(text(&history, &judge(&history), true).contains("\u{1b}[1;31mBROKEN\u{1b}[0m"));
    let evil = nasty();
    assert!(!text(&evil, &judge(&evil), false).contains('\u{1b}'));
}

#[test]
fn a_failure_is_one_line_that_replays() {
    let history = incident();
    let line = failure(&history, &judge(&history)).unwrap();
    assert!(
        line.starts_with("cluster minority-cut-off: strict-bound broken: 29–29.387 s: `tenant-requests"),
        "{line}"
    );
    assert!(
        line.ends_with("; replay: quorate-chaos cluster --scenario minority-cut-off --seed 17"),
        "{line}"
    );
    assert_eq!(failure(&history, &judged(Verdict::Held { detail: String::new() })), None);
    let mut evil = nasty();
    evil.run.replay.push_str("\n\r");
    assert_eq!(failure(&evil, &judge(&evil)).unwrap().lines().count(), 1);
}

#[test]
fn the_command_judges_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let (file, page) = (dir.path().join("history.json"), dir.path().join("report.html"));
    let mut history = incident();
    fs::write(&file, serde_json::to_vec(&history).unwrap()).unwrap();
    assert!(!command(&file, &page).unwrap());
    history.requests.clear();
    fs::write(&file, serde_json::to_vec(&history).unwrap()).unwrap();
    assert!(command(&file, &page).unwrap());
    assert!(fs::read_to_string(&page).unwrap().contains("✓ Kept"));
    fs::write(&file, "{}").unwrap();
    assert!(format!("{:#}", command(&file, &page).unwrap_err()).contains("neither a history nor a report"));
    assert!(command(&dir.path().join("nothing"), &page).is_err());
}

#[test]
fn charts_add_up_to_the_history() {
    let history = incident();
    let bins = Bins::of(&history);
    let traffic = Traffic::of(&history, 0, &bins);
    let total = |rows: &[Vec<f64>]| rows.iter().flatten().sum::<f64>() * bins.width.0 as f64 / 1e6;
    let asked =
        |outcome| history.requests.iter().filter(|r| r.limit == 0 && r.outcome == outcome).count() as f64;
    assert!((total(&traffic.admitted) - asked(Outcome::Allowed)).abs() < 1e-6);
    assert!((total(&traffic.denied) - asked(Outcome::Denied)).abs() < 1e-6);
    assert!((total(&[traffic.undecided]) - asked(Outcome::Unavailable)).abs() < 1e-6);
    assert!((total(&[traffic.unanswered]) - asked(Outcome::Unknown)).abs() < 1e-6);

    let worst = whole(&history.limits[0]).worst(&admitted(&history, 0, None)).unwrap();
    let usage = Usage::of(&history, 0, &bins);
    let peak = usage.peak.unwrap();
    assert_eq!(peak, bins.at(worst.closes));
    assert!((usage.used[peak] * 1e6 - worst.used().0 as f64).abs() < 0.5);

    let shares = Shares::of(&history, 0, &bins).unwrap();
    for bin in 0..bins.count {
        let lent: f64 = shares.burst.lent.iter().map(|row| row[bin]).sum();
        assert!(
            (shares.burst.reserved[bin] + lent + shares.burst.free[bin] - shares.burst.whole[bin]).abs()
                < 1e-6
        );
    }
}

#[test]
fn a_run_of_any_length_has_a_few_hundred_steps() {
    for end in [1, 1_000, 60_000, 3_600_000, 86_400_000, 86_400_000 * 3_000] {
        let bins = Bins::of(&History { end: ms(end), ..History::default() });
        assert!((10..=240).contains(&bins.count), "{end}: {bins:?}");
        assert_eq!(bins.at(bins.end), bins.count - 1);
    }
}
