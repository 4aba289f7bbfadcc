//! What a quota in fixed windows guarantees.

use super::{Setting, exact, holds_without_store, tokens, without_store};
use crate::quota::guarantee::QuotaGuarantee;
use crate::quota::policy::Policy;
use serde_json::{Value as Json, json};
use std::fmt::{Result, Write};

pub(super) fn to_json(policy: &Policy, guarantee: &QuotaGuarantee) -> Json {
    let parts = guarantee.parts.iter().map(|(region, part)| {
        json!({ "region": &**region, "burst_micro": part.burst.0, "overdraft_micro": part.overdraft.0 })
    });
    let pool = guarantee.pool.map(|loans| {
        json!({ "burst_micro": loans.pool.0, "loan_max_micro": loans.largest.0, "lease_us": loans.lease.0 })
    });
    json!({
        "name": &*policy.name,
        "domain": &*policy.domain,
        "mode": policy.mode.name(),
        "quota": {
            "per": guarantee.quota.per.to_string(),
            "quota_micro": guarantee.whole.0,
            "overshoot_micro": guarantee.overshoot.0,
            "around_a_turn_micro": guarantee.around_a_turn().0,
            "holds_without_store": holds_without_store(policy),
        },
        "in_a_partition": parts.collect::<Vec<_>>(),
        "pool": pool,
    })
}

pub(super) fn describe(
    text: &mut String,
    policy: &Policy,
    guarantee: &QuotaGuarantee,
    setting: &Setting,
) -> Result {
    let QuotaGuarantee { quota, whole, overshoot, parts, pool } = guarantee;
    writeln!(text, "{} ({}): {}", policy.name, policy.mode.name(), policy.limit)?;
    let above = if overshoot.is_positive() { format!(" + {}", exact(overshoot.0)) } else { String::new() };
    let turns = match pool {
        Some(_) => "which turns by the clocks of a majority of the regions",
        None => {
            "which turns by the clocks of a majority of the regions, and in a region that is cut off by its own"
        }
    };
    writeln!(
        text,
        "  in any window ({}, UTC), {turns}, all regions together admit at most {}{above}",
        quota.per,
        exact(whole.0)
    )?;
    writeln!(
        text,
        "  around a turn up to {} may pass in a short time, the end of one window's and the beginning of the next's",
        exact(guarantee.around_a_turn().0)
    )?;
    let which = if pool.is_some() {
        "in a partition each region keeps, as far as it has not spent it"
    } else {
        "each region has"
    };
    writeln!(text, "  {which}{}:", setting.supposed(policy, parts.len()))?;
    for (region, part) in parts {
        let above = if part.overdraft.is_positive() {
            format!(", and {} above the quota", tokens(part.overdraft))
        } else {
            String::new()
        };
        writeln!(text, "    {region}: {}{above}", tokens(part.burst))?;
    }
    match pool {
        Some(loans) => {
            writeln!(
                text,
                "    and what it has borrowed and not spent, at most {} for at most {} s; half of its reserve is not touched while the pool has something",
                tokens(loans.largest),
                loans.lease.ceil_seconds()
            )?;
            writeln!(
                text,
                "  the pool lends the rest: {}; it keeps the account, whatever becomes of stores and daemons",
                tokens(loans.pool)
            )?;
            if guarantee.is_short_for_a_pool(setting.rtt) {
                writeln!(
                    text,
                    "  that is hardly longer than tokens take to move between regions: a token bucket, or `mode: split`, carries more"
                )?;
            }
        }
        None => writeln!(
            text,
            "  the store alone keeps the account: a region that loses its data admits nothing more until the window ends"
        )?,
    }
    without_store(text, policy)
}
