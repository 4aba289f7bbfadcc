//! What a run has measured, as text and as JSON.

use super::histogram::Histogram;
use super::load::Tally;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::time::Duration;

/// The shares of all requests whose times are shown, in a thousand, and what they are called.
const SHARES: [(u64, &str); 4] = [(500, "p50"), (900, "p90"), (990, "p99"), (999, "p99.9")];

/// What a run has measured.
#[derive(Debug)]
pub struct Report {
    /// Requests a second that were to be sent; `None`: as many as there could be.
    pub rate: Option<u32>,
    /// How long was measured.
    pub measured: Duration,
    /// It was ended before its time.
    pub interrupted: bool,
    /// Open loop: requests that were due and found no lane free.
    pub not_sent: u64,
    /// Each target and what it answered.
    pub targets: Vec<(String, Tally)>,
    /// Names of processes, and what CPU time they took while it was measured.
    pub cpu: Vec<(String, Duration)>,
}

impl Report {
    /// All targets together.
    #[must_use]
    pub fn total(&self) -> Tally {
        self.targets.iter().fold(Tally::default(), |mut sum, (_, tally)| {
            sum.add(tally);
            sum
        })
    }

    /// As JSON: times in microseconds.
    #[must_use]
    pub fn json(&self) -> Value {
        let total = self.total();
        let targets = self.targets.iter().map(|(url, tally)| {
            let mut target = self.tally_json(tally);
            target.insert("target".into(), url.as_str().into());
            Value::from(target)
        });
        let cpu: Map<String, Value> = self
            .cpu
            .iter()
            .map(|(name, time)| (name.clone(), micros_each(*time, total.decided()).into()))
            .collect();
        json!({
            "loop": if self.rate.is_some() { "open" } else { "closed" },
            "rate": self.rate,
            "seconds": self.measured.as_secs_f64(),
            "interrupted": self.interrupted,
            "not_sent": self.not_sent,
            "targets": targets.collect::<Vec<_>>(),
            "total": self.tally_json(&total),
            "cpu_us_per_decision": cpu,
        })
    }

    fn tally_json(&self, tally: &Tally) -> Map<String, Value> {
        let mut out = Map::new();
        out.insert("decided".into(), tally.decided().into());
        out.insert("decided_per_second".into(), self.per_second(tally.decided()).into());
        out.insert("allowed".into(), tally.allowed.into());
        out.insert("denied".into(), json!(tally.denied));
        out.insert("errors".into(), json!(tally.errors));
        out.insert("latency_us".into(), times_json(&tally.from_due));
        if self.rate.is_some() {
            out.insert("latency_from_sent_us".into(), times_json(&tally.from_sent));
        }
        out
    }

    fn per_second(&self, count: u64) -> f64 {
        count as f64 / self.measured.as_secs_f64().max(1e-9)
    }

    fn write_tally(&self, f: &mut fmt::Formatter<'_>, name: &str, tally: &Tally) -> fmt::Result {
        writeln!(f, "{name}")?;
        let decided = tally.decided();
        writeln!(f, "  decided   {decided:>10}  {:.0}/s", self.per_second(decided))?;
        writeln!(f, "  allowed   {:>10}", tally.allowed)?;
        write_counts(f, "denied", &tally.denied)?;
        write_counts(f, "errors", &tally.errors)?;
        if decided > 0 {
            writeln!(f, "  latency   {}", times(&tally.from_due))?;
        }
        if decided > 0 && self.rate.is_some() {
            writeln!(f, "  from sent {}", times(&tally.from_sent))?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let so_far = if self.interrupted { ", interrupted" } else { "" };
        let seconds = self.measured.as_secs_f64();
        match self.rate {
            Some(rate) => writeln!(f, "open loop, {rate}/s, {seconds:.1} s measured{so_far}")?,
            None => writeln!(f, "closed loop, {seconds:.1} s measured{so_far}")?,
        }
        for (url, tally) in &self.targets {
            self.write_tally(f, url, tally)?;
        }
        let total = self.total();
        if self.targets.len() > 1 {
            self.write_tally(f, "all targets", &total)?;
        }
        if self.not_sent > 0 {
            writeln!(
                f,
                "{} requests were due and found no lane free: more connections or streams, or a lower rate",
                self.not_sent
            )?;
        }
        for (name, time) in &self.cpu {
            writeln!(f, "CPU of {name}: {:.1} µs a decision", micros_each(*time, total.decided()))?;
        }
        Ok(())
    }
}

fn write_counts(f: &mut fmt::Formatter<'_>, what: &str, counts: &BTreeMap<String, u64>) -> fmt::Result {
    let all: u64 = counts.values().sum();
    let each: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    let each = if each.is_empty() { String::new() } else { format!("  {}", each.join(", ")) };
    writeln!(f, "  {what:<9} {all:>10}{each}")
}

fn times(times: &Histogram) -> String {
    let mut line = String::new();
    for (share, name) in SHARES {
        // Writing to a String does not fail.
        let _ = write!(line, "{name} {}  ", shown(times.per_mille(share)));
    }
    format!("{line}max {}  mean {}", shown(times.max()), shown(times.mean()))
}

fn times_json(times: &Histogram) -> Value {
    let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
    let mut all: Map<String, Value> = SHARES
        .iter()
        .map(|(share, name)| ((*name).to_owned(), micros(times.per_mille(*share)).into()))
        .collect();
    all.insert("max".into(), micros(times.max()).into());
    all.insert("mean".into(), micros(times.mean()).into());
    all.into()
}

fn shown(time: Duration) -> String {
    match time.as_micros() {
        ..10_000 => format!("{} µs", time.as_micros()),
        10_000..10_000_000 => format!("{:.1} ms", time.as_secs_f64() * 1e3),
        _ => format!("{:.1} s", time.as_secs_f64()),
    }
}

fn micros_each(time: Duration, decided: u64) -> f64 {
    if decided == 0 { 0.0 } else { time.as_secs_f64() * 1e6 / decided as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rate: Option<u32>) -> Report {
        let mut one = Tally { allowed: 3, ..Tally::default() };
        one.denied.insert("over_limit".into(), 1);
        one.errors.insert("timeout".into(), 2);
        [100, 200, 300, 20_000].iter().for_each(|us| one.from_due.record(Duration::from_micros(*us)));
        let targets = vec![("grpc://a:1".to_owned(), one.clone()), ("http://b:2".to_owned(), one)];
        let cpu = vec![("daemon".to_owned(), Duration::from_micros(80))];
        Report { rate, measured: Duration::from_secs(2), interrupted: false, not_sent: 5, targets, cpu }
    }

    #[test]
    fn what_people_read() {
        let text = report(Some(100)).to_string();
        for line in [
            "open loop, 100/s, 2.0 s measured",
            "  decided            4  2/s",
            "  denied             1  over_limit 1",
            "  errors             2  timeout 2",
            "all targets",
            "  decided            8  4/s",
            "CPU of daemon: 10.0 µs a decision",
        ] {
            assert!(text.lines().any(|l| l == line), "no `{line}` in\n{text}");
        }
        assert!(text.contains("5 requests were due") && text.contains("max 20.0 ms"), "{text}");
        let closed = Report { interrupted: true, ..report(None) }.to_string();
        assert!(closed.starts_with("closed loop, 2.0 s measured, interrupted\n"), "{closed}");
        assert!(!closed.contains("from sent"));
    }

    #[test]
    fn what_programs_read() {
        let json = report(Some(100)).json();
        assert_eq!(json["total"]["decided"], 8);
        assert_eq!(json["total"]["decided_per_second"], 4.0);
        assert_eq!(json["targets"][1]["target"], "http://b:2");
        assert_eq!(json["targets"][0]["denied"]["over_limit"], 1);
        assert_eq!(json["cpu_us_per_decision"]["daemon"], 10.0);
        assert_eq!(json["total"]["latency_us"]["max"], 20_000.0);
        assert_eq!((&json["not_sent"], &json["interrupted"]), (&json!(5), &json!(false)));
    }
}
