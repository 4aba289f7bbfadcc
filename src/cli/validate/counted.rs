//! What limits that count guarantee, for people and as JSON.

use super::{Setting, describe_failure, holds_without_store};
use crate::quota::counted::Kind;
use crate::quota::guarantee::counted::Counted;
use crate::quota::policy::Policy;
use serde_json::{Value as Json, json};
use std::fmt::Write as _;

pub(super) fn policy_json(policy: &Policy, guarantee: &Counted) -> Json {
    let parts: Vec<Json> =
        guarantee.parts.iter().map(|(region, part)| json!({ "region": &**region, "whole": part })).collect();
    let (kind, window, ttl) = match guarantee.kind {
        Kind::Counters => ("sliding_window", Some(guarantee.span.0), None),
        Kind::Log => ("sliding_log", Some(guarantee.span.0), None),
        Kind::Permits => ("concurrent", None, Some(guarantee.span.0)),
    };
    json!({
        "name": &*policy.name,
        "domain": &*policy.domain,
        "mode": policy.mode.name(),
        "bound": {
            "algorithm": kind,
            "whole": guarantee.limit,
            "window_us": window,
            "ttl_us": ttl,
            "in_one_window": guarantee.bound(guarantee.span),
            "holds_without_store": holds_without_store(policy),
        },
        "in_a_partition": parts,
        "pool": guarantee.pool.map(|(whole, lease)| json!({ "whole": whole, "lease_us": lease.0 })),
    })
}

pub(super) fn describe(
    text: &mut String,
    policy: &Policy,
    guarantee: &Counted,
    setting: &Setting,
) -> std::fmt::Result {
    let Counted { kind, limit, span, parts, pool } = guarantee;
    let (mode, seconds) = (policy.mode.name(), span.ceil_seconds());
    writeln!(text, "{} ({mode}): {}", policy.name, policy.limit)?;
    match kind {
        Kind::Log => writeln!(
            text,
            "  in any window of {seconds} s, wherever it begins, all regions together admit at most {limit}, as their stores' clocks measure it"
        )?,
        Kind::Counters => writeln!(
            text,
            "  in any window of T seconds all regions together admit at most {limit} + {limit}·T/{seconds}: {limit} at once, up to {} in {seconds} s around \
             the turn of a window, and {limit} in {seconds} s where traffic is steady",
            guarantee.bound(*span),
        )?,
        Kind::Permits => writeln!(
            text,
            "  at any time at most {limit} are in use, all regions together; one that is not renewed ends after {seconds} s"
        )?,
    }
    let supposed = if setting.known.is_none() && policy.weights.is_empty() {
        format!(" (for {} regions alike; name yours with --regions or a region file)", parts.len())
    } else {
        String::new()
    };
    let has = if pool.is_some() { "a reserve" } else { "a part" };
    writeln!(text, "  each region has {has} of its own, in a partition or not{supposed}:")?;
    for (region, part) in parts {
        let part = match (part, pool) {
            (0, Some(_)) => "none".to_owned(),
            (0, None) => "nothing: it denies everything".to_owned(),
            _ => part.to_string(),
        };
        writeln!(text, "    {region}: {part}")?;
    }
    if let Some((whole, lease)) = pool {
        writeln!(
            text,
            "  the pool lends the rest, {whole}, to whichever region needs them; one that is cut off keeps what it was lent for at most {} s, and its \
             holders are told no more",
            lease.ceil_seconds()
        )?;
    }
    writeln!(
        text,
        "  the count is in each region's Redis alone: one that lost its data takes its part for used up, until the loss is {seconds} s ago"
    )?;
    describe_failure(
        text,
        policy,
        &format!(
            "  while a region's Redis does not answer the daemon counts in memory, as if its part were used up until that is {seconds} s ago; what it \
             admits is counted in Redis afterwards (unless the daemon ends before)"
        ),
    )
}
