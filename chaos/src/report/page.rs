//! The page, from top to bottom.

use super::chart::{Band, Chart, Row, percent, time_axis};
use super::data::embed;
use super::series::{Bins, Shares, Traffic, Usage, edition_at, levels};
use super::text::woke_late;
use crate::invariants::figures::{count, decimal, seconds, span, tokens};
use crate::invariants::{self, Breach, Judged, Sum, Verdict};
use crate::oracle::{Edition, FaultSpan, History, LogLevel, Mode};
use quorate::quota::amount::{Micros, Rate, Tokens};
use std::fmt::Write;

/// So many limits are shown at once; the others can be opened.
const LIMITS_OPEN: usize = 2;
/// Regions have so many colours.
const COLOURS: usize = 9;
/// So many lines of logs are shown.
const LOG_LINES_MAX: usize = 60;
/// So many faults are shown beneath each other ...
const LANES_MAX: usize = 8;
/// ... or so many, thin and without their names, if there are more than [`NAMED_MAX`].
const THIN_LANES_MAX: usize = 30;
/// So many faults are named in their lanes.
const NAMED_MAX: usize = 16;

pub(super) fn page(history: &History, judged: &[Judged]) -> String {
    let (data, kept) = embed(history, judged);
    let bins = Bins::of(history);
    let body = [
        banner(history, judged),
        replay(history),
        promises(judged),
        timeline(history, judged, &bins),
        limits(history),
        remarks(history),
        footer(history, kept),
    ];
    format!(
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<meta name=viewport content=\"width=device-width,initial-scale=1\">\n\
         <meta name=color-scheme content=\"light dark\">\n<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; \
         style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n<title>{} · Quorate chaos</title>\n<style>\n{}</style>\n\
         <main>\n{}</main>\n{data}\n<script>\n{}</script>\n</html>\n",
        escape(&history.run.title),
        include_str!("report.css"),
        body.join("\n"),
        include_str!("report.js"),
    )
}

/// What cannot be taken for markup, in text and in quoted attributes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

fn banner(history: &History, judged: &[Judged]) -> String {
    let broken: Vec<_> = judged.iter().filter(|j| j.verdict.is_broken()).map(|j| j.name.as_str()).collect();
    let held = judged.iter().filter(|j| matches!(j.verdict, Verdict::Held { .. })).count();
    let (class, verdict) = match (broken.as_slice(), held) {
        (names, _) if invariants::sum(history, judged) == Sum::TooBusy => {
            ("none", format!("? The machine was too busy to judge: {}", names.join(", ")))
        }
        ([], 0) => ("none", "Nothing could be judged".into()),
        ([], 1) => ("held", "✓ Kept: the one promise that could be judged held".into()),
        ([], n) => ("held", format!("✓ Kept: all {n} promises that could be judged held")),
        ([one], _) => ("broken", format!("✗ BROKEN: {one}")),
        (names, _) => ("broken", format!("✗ BROKEN: {}", names.join(", "))),
    };
    let run = &history.run;
    let figures = [
        seconds(history.end),
        count(history.regions.len(), "region"),
        count(history.limits.len(), "limit"),
        count(history.requests.len(), "request"),
        count(history.faults.len(), "fault"),
    ];
    format!(
        "<header><p class=product>Quorate chaos report</p><h1>{}</h1><p>{}</p><p class=figures>{}</p></header>\n\
         <p class=\"verdict {class}\" role=status>{}</p>",
        escape(&run.title),
        escape(&run.about),
        escape(&figures.join(" · ")),
        escape(&verdict),
    )
}

fn replay(history: &History) -> String {
    if history.run.replay.is_empty() {
        return String::new();
    }
    format!(
        "<div class=replay><span>Replay</span><code id=replay>{}</code><button type=button id=copy>Copy</button></div>",
        escape(&history.run.replay)
    )
}

fn promises(judged: &[Judged]) -> String {
    let mut out = String::from(
        "<section><h2>Promises</h2><table class=promises><thead><tr><th>Verdict<th>Promise<th>What was seen</thead><tbody>",
    );
    for judged in judged {
        let (class, word) = match judged.verdict {
            Verdict::Held { .. } => ("held", "✓ Kept"),
            Verdict::Broken { .. } => ("broken", "✗ BROKEN"),
            Verdict::NotApplicable { .. } => ("none", "– Not judged"),
        };
        let _ = write!(
            out,
            "<tr class={class}><td><b class=word>{word}</b><td><b>{}</b><p>{}</p><td>{}",
            escape(&judged.name),
            escape(&judged.promise),
            seen(&judged.verdict)
        );
    }
    out.push_str("</tbody></table></section>");
    out
}

fn seen(verdict: &Verdict) -> String {
    let breaches = verdict.breaches();
    if breaches.is_empty() {
        return sentence(&verdict.detail());
    }
    let item =
        |breach: &Breach| format!("<li><b>{}</b> {}", escape(&span(breach.span)), sentence(&breach.detail));
    let shown: String = breaches.iter().take(5).map(item).collect();
    let more = breaches.len().saturating_sub(5);
    let more = if more == 0 { String::new() } else { format!("<li>and {more} more") };
    format!("<ul class=breaches>{shown}{more}</ul>")
}

/// What is `in backticks` is code.
fn sentence(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let part = |(i, part): (usize, &str)| match i % 2 {
        0 => escape(part),
        _ => format!("<code>{}</code>", escape(part)),
    };
    parts.map(part).collect()
}

fn timeline(history: &History, judged: &[Judged], bins: &Bins) -> String {
    let breaches: Vec<&Breach> = judged.iter().flat_map(|j| j.verdict.breaches()).collect();
    let mut out = format!("<section><h2>What happened</h2>{}", lanes(history, judged, bins.end));
    for limit in 0..history.limits.len() {
        let broken = breaches.iter().any(|breach| breach.limit == Some(limit));
        let open = if limit < LIMITS_OPEN || broken { " open" } else { "" };
        let name = escape(&history.limits[limit].name);
        let _ = write!(out, "<details class=limit{open}><summary><h3>{name}</h3></summary>");
        out.push_str(&charts(history, limit, &breaches, bins));
        out.push_str("</details>");
    }
    out.push_str(&fault_list(history));
    out.push_str("</section>");
    out
}

/// Faults and breaches as bars, on the charts' axis.
fn lanes(history: &History, judged: &[Judged], end: Micros) -> String {
    let thin = if history.faults.len() > NAMED_MAX { " thin" } else { "" };
    let mut out = format!("<figure class=\"chart lanes{thin}\"><figcaption><b>Faults</b>");
    out.push_str(match history.faults.len() {
        0 => " <span class=unit>none</span>",
        n if n > NAMED_MAX => " <span class=unit>darker: a region is disabled; the list is below</span>",
        _ => "",
    });
    out.push_str("</figcaption>");
    out.push_str(if history.healed.is_some() { "<div class=\"bars healing\">" } else { "<div class=bars>" });
    for judged in judged.iter().filter(|j| j.verdict.is_broken()) {
        out.push_str("<div class=lane>");
        for (i, breach) in judged.verdict.breaches().iter().enumerate() {
            let name = if i == 0 { judged.name.as_str() } else { "" };
            out.push_str(&bar("breach", breach.span, end, (name, ""), &breach.detail));
        }
        out.push_str("</div>");
    }
    for lane in assign_lanes(history, end) {
        out.push_str("<div class=lane>");
        for (number, fault) in lane {
            let name = (number.to_string(), format!(" {}", fault.what));
            let class = if fault.disables { "fault off" } else { "fault" };
            out.push_str(&bar(class, extent(fault, end), end, (&name.0, &name.1), &fault.what));
        }
        out.push_str("</div>");
    }
    if let Some(healed) = history.healed {
        let left = percent(healed, end);
        let side = if left > 80.0 { "left" } else { "right" };
        let _ = write!(out, "<b class=healed style=\"left:{left:.2}%\"><span class={side}>healed</span></b>");
    }
    let _ = write!(out, "</div>{}</figure>", time_axis(end));
    out
}

/// A bar with a name, of which the second part is left out where there is little room.
fn bar(class: &str, at: (Micros, Micros), end: Micros, name: (&str, &str), title: &str) -> String {
    let (left, right) = (percent(at.0, end), percent(at.1, end));
    let side = match () {
        () if right - left >= 20.0 => " inside",
        () if left > 60.0 => " before",
        () => "",
    };
    format!(
        "<div class=\"bar {class}{side}\" style=\"left:{left:.2}%;width:{:.2}%\" title=\"{}: {}\"><span>{}<span class=long>{}</span></span></div>",
        right - left,
        escape(&span(at)),
        escape(title),
        escape(name.0),
        escape(name.1)
    )
}

/// Faults that do not get into each other's way, numbered.
fn assign_lanes(history: &History, end: Micros) -> Vec<Vec<(usize, &FaultSpan)>> {
    let named = history.faults.len() <= NAMED_MAX;
    let lanes_max = if named { LANES_MAX } else { THIN_LANES_MAX };
    let mut lanes: Vec<(f64, Vec<(usize, &FaultSpan)>)> = Vec::new();
    for (number, fault) in (1..).zip(by_time(history)) {
        let (from, to) = extent(fault, end);
        let (left, right) = (percent(from, end), percent(to, end));
        let is_short = named && right - left < 20.0;
        // A bar's words need room: to its right, or to its left near the end.
        let room = if is_short && left <= 60.0 { right.max(left + 40.0) } else { right };
        let begins = if is_short && left > 60.0 { left - 40.0 } else { left };
        let free = lanes.iter().position(|(until, _)| *until <= begins);
        match free {
            Some(lane) => {
                lanes[lane].0 = room;
                lanes[lane].1.push((number, fault));
            }
            None if lanes.len() < lanes_max => lanes.push((room, vec![(number, fault)])),
            None => lanes[number % lanes_max].1.push((number, fault)),
        }
    }
    lanes.into_iter().map(|(_, faults)| faults).collect()
}

fn by_time(history: &History) -> Vec<&FaultSpan> {
    let mut faults: Vec<_> = history.faults.iter().collect();
    faults.sort_by_key(|fault| fault.from);
    faults
}

fn extent(fault: &FaultSpan, end: Micros) -> (Micros, Micros) {
    (fault.from, fault.to.unwrap_or(end))
}

fn charts(history: &History, limit: usize, breaches: &[&Breach], bins: &Bins) -> String {
    let faults = history.faults.iter().map(|f| extent(f, bins.end)).collect();
    let faults = if history.faults.len() > NAMED_MAX { union(faults) } else { faults };
    let faults = faults.into_iter().map(|span| Band { span, class: "fault" });
    let broken = breaches.iter().filter(|b| b.limit.is_none_or(|l| l == limit));
    // What is said of the whole run marks no moment.
    let broken = broken.filter(|b| percent(b.span.1, bins.end) - percent(b.span.0, bins.end) < 98.0);
    let broken = union(broken.map(|b| b.span).collect());
    let broken = broken.into_iter().map(|span| Band { span, class: "breach" });
    let bands: Vec<Band> = faults.chain(broken).collect();
    let traffic = Traffic::of(history, limit, bins);
    let mut charts = vec![admitted(history, limit, &traffic, bins)];
    charts.extend(refused(history, &traffic));
    charts.push(usage(history, limit, bins));
    if let Some(shares) = Shares::of(history, limit, bins) {
        charts.extend(pool(history, shares));
    }
    if let Some(levels) = levels(history, limit, bins) {
        charts.push(Chart {
            title: "Tokens in each region's bucket".into(),
            note: "As its store has them: reserve and lease together.".into(),
            unit: "tokens",
            height: 120,
            stack: Vec::new(),
            lines: regions(history, levels),
            mark: None,
        });
    }
    charts.iter().map(|chart| chart.html(bins, &bands)).collect()
}

/// Many on top of each other would hide what is behind them.
fn union(mut spans: Vec<(Micros, Micros)>) -> Vec<(Micros, Micros)> {
    spans.sort_unstable();
    spans.dedup_by(|next, kept| {
        let touches = next.0 <= kept.1;
        kept.1 = if touches { kept.1.max(next.1) } else { kept.1 };
        touches
    });
    spans
}

fn regions(history: &History, rows: Vec<Vec<f64>>) -> Vec<Row> {
    let named = history.regions.iter().enumerate().zip(rows);
    named.map(|((i, name), values)| Row::new(name, format!("r{}", i % COLOURS), values)).collect()
}

fn admitted(history: &History, limit: usize, traffic: &Traffic, bins: &Bins) -> Chart {
    let rate = |bin| edition_at(history, limit, bins.begin(bin)).map_or(0.0, |(rate, _)| rate);
    Chart {
        title: "Admitted".into(),
        note:
            "By region, one on top of the other. What is above the rate for a while comes out of the burst."
                .into(),
        unit: "tokens/s",
        height: 190,
        stack: regions(history, traffic.admitted.clone()),
        lines: vec![Row::new("rate of the limit", "bound", (0..bins.count).map(rate).collect())],
        mark: None,
    }
}

fn refused(history: &History, traffic: &Traffic) -> Option<Chart> {
    let mut stack = regions(history, traffic.denied.clone());
    stack.push(Row::new("no decision (503)", "no-decision", traffic.undecided.clone()));
    stack.push(Row::new("no answer", "no-answer", traffic.unanswered.clone()));
    let any = stack.iter().any(|row| row.values.iter().any(|value| *value > 0.0));
    any.then(|| Chart {
        title: "Not admitted".into(),
        note: "Denied by region; and what got no decision or no answer at all, in any region.".into(),
        unit: "tokens/s",
        height: 110,
        stack,
        lines: Vec::new(),
        mark: None,
    })
}

fn usage(history: &History, limit: usize, bins: &Bins) -> Chart {
    let usage = Usage::of(history, limit, bins);
    let mark = usage.peak.map(|bin| {
        let (used, cap) = (usage.used[bin], usage.cap[bin]);
        let name = format!("{} of {}", decimal((used * 1e6) as i64, 1), decimal((cap * 1e6) as i64, 1));
        (bin, used, name)
    });
    let split = |on: bool| -> Vec<f64> {
        let over = |(used, cap): (&f64, &f64)| if (used > cap) == on { *used } else { 0.0 };
        usage.used.iter().zip(&usage.cap).map(over).collect()
    };
    Chart {
        title: "Burst in use".into(),
        note: "Of all windows that end at a moment, the worst: what it admitted less what the rate brought in that time. \
               Above the line the bound is broken."
            .into(),
        unit: "tokens",
        height: 140,
        stack: vec![
            Row::new("in use, worst window", "usage", split(false)),
            Row::new("above the bound", "no-bound", split(true)),
        ],
        lines: vec![Row::new("burst (and overshoot)", "bound", usage.cap)],
        mark,
    }
}

fn pool(history: &History, shares: Shares) -> [Chart; 2] {
    let stack = |share: super::series::Share| {
        let mut stack = vec![Row::new("reserved by all", "reserved", share.reserved)];
        stack.extend(
            regions(history, share.lent)
                .into_iter()
                .map(|row| Row { name: format!("lent to {}", row.name), ..row }),
        );
        stack.push(Row::new("free", "free", share.free));
        (stack, Row::new("the whole", "bound", share.whole))
    };
    let (rates, rate) = stack(shares.rate);
    let (bursts, burst) = stack(shares.burst);
    let level = Row::new("tokens in the pool", "level", shares.level);
    [
        Chart {
            title: "Who holds the rate".into(),
            note: "Reserves, leases and what is free, as a region with a quorum saw them.".into(),
            unit: "tokens/s",
            height: 130,
            stack: rates,
            lines: vec![rate],
            mark: None,
        },
        Chart {
            title: "Who holds the burst".into(),
            note: "The same for the burst, and how many tokens the pool held.".into(),
            unit: "tokens",
            height: 130,
            stack: bursts,
            lines: vec![burst, level],
            mark: None,
        },
    ]
}

fn fault_list(history: &History) -> String {
    if history.faults.is_empty() {
        return String::new();
    }
    let open = if history.faults.len() <= 15 { " open" } else { "" };
    let mut out = format!(
        "<details class=faults{open}><summary><h3>{}</h3></summary><ol>",
        count(history.faults.len(), "fault")
    );
    for fault in by_time(history) {
        let when = match fault.to {
            Some(to) if to == fault.from => format!("at {}", seconds(fault.from)),
            Some(to) => span((fault.from, to)),
            None => format!("from {} on, never ended", seconds(fault.from)),
        };
        let names = fault.regions.iter().map(|r| history.regions.get(*r).map_or("?", String::as_str));
        let mut notes: Vec<String> = vec![names.collect::<Vec<_>>().join(", ")];
        notes.extend(fault.disables.then(|| "disabled".into()));
        notes.extend(fault.isolates.then(|| "without a quorum".into()));
        notes.retain(|note| !note.is_empty());
        let _ = write!(
            out,
            "<li><b>{}</b> {} <span class=unit>{}</span>",
            escape(&when),
            escape(&fault.what),
            escape(&notes.join("; "))
        );
    }
    out.push_str("</ol></details>");
    out
}

/// What was promised.
fn limits(history: &History) -> String {
    let mut out = String::from(
        "<section><h2>Limits</h2><div class=scroll><table class=limits><thead><tr><th>Limit<th>From<th>Mode<th>Rate<th>Burst\
         <th>Overshoot<th>Reserve of each region (rate, burst)</thead><tbody>",
    );
    for watched in &history.limits {
        for edition in &watched.editions {
            let _ = write!(out, "<tr><td>{}{}", escape(&watched.name), row(history, edition));
        }
    }
    out.push_str("</tbody></table></div></section>");
    out
}

fn row(history: &History, edition: &Edition) -> String {
    if edition.is_unlimited() {
        return format!("<td>{}<td>unlimited<td><td><td><td>", seconds(edition.from));
    }
    let mode = match edition.mode {
        Mode::Strict => "strict",
        Mode::Approximate => "approximate",
        Mode::Split => "split",
    };
    let changing = if edition.changing { ", changing" } else { "" };
    let rate = |rate: Rate| tokens(Tokens(rate.0));
    let reserve = |(name, (r, burst)): (&String, &(Rate, Tokens))| {
        format!("{} {}/s, {}", escape(name), rate(*r), tokens(*burst))
    };
    let reserves: Vec<_> = history.regions.iter().zip(&edition.reserves).map(reserve).collect();
    format!(
        "<td>{}<td>{mode}{changing}<td>{}/s<td>{}<td>{}<td>{}",
        seconds(edition.from),
        rate(edition.rate),
        tokens(edition.burst),
        tokens(edition.overshoot),
        reserves.join(" · ")
    )
}

/// What processes said, and what else there is to know.
fn remarks(history: &History) -> String {
    let mut out = String::new();
    let late = woke_late(history);
    if !history.notes.is_empty() || late.is_some() {
        let notes = late.iter().chain(&history.notes);
        let notes: String = notes.map(|note| format!("<li>{}", escape(note))).collect();
        let _ = write!(out, "<section><h2>Remarks</h2><ul class=remarks>{notes}</ul></section>");
    }
    if history.reasons.iter().any(|reasons| !reasons.is_empty()) {
        out.push_str("<section><h2>Answers</h2><div class=scroll><table class=limits><thead><tr><th>Region<th>Reasons given</thead><tbody>");
        for (name, reasons) in history.regions.iter().zip(&history.reasons) {
            let said: Vec<_> = reasons.iter().map(|(reason, n)| format!("{} {n}", escape(reason))).collect();
            let _ = write!(out, "<tr><td>{}<td>{}", escape(name), said.join(" · "));
        }
        out.push_str("</tbody></table></div></section>");
    }
    if !history.logs.is_empty() {
        out.push_str(&logs(history));
    }
    out
}

fn logs(history: &History) -> String {
    let mut lines: Vec<_> = history.logs.iter().collect();
    lines.sort_by_key(|line| (std::cmp::Reverse(line.level), line.region, std::cmp::Reverse(line.count)));
    let mut out = String::from("<section><h2>What the daemons logged</h2><ul class=remarks>");
    for line in lines.iter().take(LOG_LINES_MAX) {
        let (class, word) = match line.level {
            LogLevel::Warn => ("warn", "WARN"),
            LogLevel::Error => ("bad", "ERROR"),
            LogLevel::Panic => ("bad", "PANIC"),
        };
        let region = history.regions.get(line.region).map_or("?", String::as_str);
        let times = if line.count == 1 { String::new() } else { format!(" ({} times)", line.count) };
        let expected = if line.expected { " <span class=unit>expected</span>" } else { "" };
        let _ = write!(
            out,
            "<li><b class={class}>{word}</b> {}: <code>{}</code>{times}{expected}",
            escape(region),
            escape(&line.text)
        );
    }
    if lines.len() > LOG_LINES_MAX {
        let _ = write!(out, "<li>and {} more", lines.len() - LOG_LINES_MAX);
    }
    out.push_str("</ul></section>");
    out
}

fn footer(history: &History, kept: usize) -> String {
    let all = history.requests.len();
    let data = if kept == all {
        "The whole history is in this file: <code>quorate-chaos report</code> reads it out of it.".into()
    } else {
        format!(
            "{} of {all} requests are in this file: the run was too long for all of them.",
            count(kept, "request")
        )
    };
    format!(
        "<footer><p>A request is decided at some moment between its sending and its answer; what is uncertain counts in favour of \
         what is tested. Times are true time since the run began.</p><p>{data} <a id=download hidden>Download it as JSON</a></p>\
         <p>quorate-chaos {}</p></footer>",
        env!("CARGO_PKG_VERSION")
    )
}
