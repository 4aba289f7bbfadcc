//! Limits to the text of a policy file.

use super::carry::{Carried, Kind, Limit};
use super::{Limits, Sharing, Style};
use crate::config::print::{Quoted, key_match};
use crate::quota::policy::{Unit, Window};
use std::fmt::Write as _;
use std::path::Path;

pub(super) fn write(files: &[&Path], carried: &Carried, style: Style) -> String {
    let mut text = String::new();
    let names: Vec<String> = files.iter().map(|file| one_line(&file.display().to_string())).collect();
    let _ = writeln!(text, "# Written by `quorate import envoy-ratelimit` from {}.", names.join(", "));
    for line in differences(&carried.limits, style) {
        let _ = writeln!(text, "# {line}");
    }
    for lost in &carried.lost {
        let _ = writeln!(
            text,
            "# NOT carried over: {}: {}.",
            one_line(&lost.place.to_string()),
            one_line(&lost.what)
        );
    }
    for place in &carried.unreached {
        let place = one_line(&place.to_string());
        let why =
            "that service never reaches it, because an earlier value with a `*` takes all that it matches";
        let _ = writeln!(text, "# Left out: {place}: {why}.");
    }
    if carried.limits.is_empty() {
        text.push_str("policies: []\n");
        return text;
    }
    text.push_str("policies:\n");
    for limit in &carried.limits {
        policy(&mut text, limit, style);
    }
    text
}

/// What is different from there, as far as these limits have it.
fn differences(limits: &[Limit], style: Style) -> Vec<String> {
    let limited: Vec<(u32, Unit)> = limits
        .iter()
        .filter_map(|limit| match limit.kind {
            Kind::Limited { amount: amount @ 1.., unit, .. } => Some((amount, unit)),
            _ => None,
        })
        .collect();
    let mut lines = Vec::new();
    if !limited.is_empty() {
        lines.push("What is different from there (docs/migration.md says more):".to_owned());
        lines
            .push("- A limit holds for all regions together; there, for all that count in one Redis.".into());
        lines.push(
            "- A request that one limit refuses is charged against none; there it is charged against all."
                .into(),
        );
        lines.push(match style.sharing {
            Sharing::Strict => {
                "- While a region's store does not answer, its requests are denied; there Envoy lets them through unless \
                 `failure_mode_deny` is set. `--mode approximate` lets them through."
                    .into()
            }
            Sharing::Approximate | Sharing::Split => {
                "- While a region's store does not answer, its requests are let through, as Envoy does there unless \
                 `failure_mode_deny` is set."
                    .into()
            }
        });
    }
    if limited.iter().any(|(amount, unit)| is_bucket(*amount, *unit, style.limits)) {
        lines.push(
            "- There, windows are fixed. A token bucket that holds one window's requests admits no more than they around a \
             turn, and gives them back steadily, not all at the turn."
                .into(),
        );
    }
    if limits.iter().any(|limit| limit.kind == Kind::Exempt) {
        lines.push(
            "- Policies without a limit stand where a more exact descriptor kept requests from a less exact one's limit."
                .into(),
        );
    }
    lines
}

fn policy(text: &mut String, limit: &Limit, style: Style) {
    let _ = writeln!(text, "  # {}", one_line(&limit.place.to_string()));
    for note in &limit.notes {
        let _ = writeln!(text, "  # {}", one_line(note));
    }
    let _ = writeln!(text, "  - name: {}", Quoted(&limit.name));
    let _ = writeln!(text, "    domain: {}", Quoted(&limit.domain));
    let matches: Vec<String> = limit.matches.iter().map(key_match).collect();
    let _ = writeln!(text, "    match: [{}]", matches.join(", "));
    let Kind::Limited { amount, unit, shadow } = limit.kind else {
        let why = if limit.kind == Kind::Exempt { " # out of reach of less exact limits" } else { "" };
        let _ = writeln!(text, "    unlimited: true{why}");
        return;
    };
    let (written, note) = written(amount, unit, style.limits);
    let _ =
        writeln!(text, "    limit: {written}{}", note.map(|note| format!(" # {note}")).unwrap_or_default());
    match style.sharing {
        // Nothing to share, and nothing to wait for.
        _ if amount == 0 => text.push_str("    mode: split\n"),
        Sharing::Strict => text.push_str("    mode: strict\n"),
        Sharing::Approximate => {
            text.push_str("    mode: approximate\n    max_overshoot: 10%\n    on_store_failure: allow\n");
        }
        Sharing::Split => text.push_str("    mode: split\n    on_store_failure: allow\n"),
    }
    if shadow {
        text.push_str("    shadow: true\n");
    }
}

/// A limit, and what people should know about it.
fn written(amount: u32, unit: Unit, limits: Limits) -> (String, Option<&'static str>) {
    if !is_bucket(amount, unit, limits) {
        // Windows of a length are counted from the epoch, as there; weeks, months and years of the calendar differ.
        let by_length = Window::Length { seconds: u32::try_from(unit.seconds()).unwrap_or(u32::MAX) };
        let (per, note) = match unit {
            Unit::Week => {
                (by_length, Some("a week, counted from the epoch, as there; `week` begins on Mondays"))
            }
            Unit::Month => {
                (by_length, Some("30 days, counted from the epoch, as there; `month` is the calendar's"))
            }
            Unit::Year => {
                (by_length, Some("365 days, counted from the epoch, as there; `year` is the calendar's"))
            }
            Unit::Second | Unit::Minute | Unit::Hour | Unit::Day => (Window::Calendar(unit), None),
        };
        return (format!("{{ quota: {amount}, per: {per} }}"), note);
    }
    let (suffix, many) = of_rates(unit);
    let note = "the rate is rounded down: there is no longer unit of time for one than a day";
    let note = (!amount.is_multiple_of(many)).then_some(note);
    (format!("{{ rate: {}/{suffix}, burst: {amount} }}", amount / many), note)
}

/// A limit of nothing denies everything, however it is written; a rate that would be rounded down to nothing is a quota.
fn is_bucket(amount: u32, unit: Unit, limits: Limits) -> bool {
    match limits {
        _ if amount == 0 => true,
        Limits::Auto => unit == Unit::Second,
        Limits::Quota => false,
        Limits::TokenBucket => amount >= of_rates(unit).1,
    }
}

/// The unit for a rate, and how many of them there are in this one.
const fn of_rates(unit: Unit) -> (&'static str, u32) {
    match unit {
        Unit::Second | Unit::Minute | Unit::Hour | Unit::Day => (unit.suffix(), 1),
        Unit::Week => (Unit::Day.suffix(), 7),
        Unit::Month => (Unit::Day.suffix(), 30),
        Unit::Year => (Unit::Day.suffix(), 365),
    }
}

/// For a comment.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
