//! Policies as a policy file: what [`super::policies::parse`] reads back to the same values.
//!
//! What is a default is left out. Two things that no file can say are shown as the nearest that it can: a limit a week or
//! longer (Envoy's overrides alone have them) as its amount a day, rounded down; and a prefix that ends with a backslash as
//! the exact value that it would be read as.

use super::decode::{written_percent, written_time};
use super::policies::WAIT_DEFAULT;
use crate::quota::amount::Micros;
use crate::quota::policy::{
    Algorithm, Concurrent, KeyMatch, Limit, Mode, OnStoreFailure, Policy, Quota, Reserve, TokenBucket, Unit,
    ValueMatch,
};
use std::fmt::{self, Display, Formatter, Write};

/// The text of a policy file.
#[must_use]
pub fn policies(policies: &[Policy]) -> String {
    if policies.is_empty() {
        return "policies: []\n".to_owned();
    }
    let mut text = "policies:\n".to_owned();
    for policy in policies {
        for (at, (key, value)) in fields(policy).into_iter().enumerate() {
            text.push_str(if at == 0 { "  - " } else { "    " });
            text.push_str(key);
            text.push_str(": ");
            text.push_str(&value);
            text.push('\n');
        }
    }
    text
}

/// One policy, on one line.
#[must_use]
pub fn policy(policy: &Policy) -> String {
    let fields: Vec<String> =
        fields(policy).into_iter().map(|(key, value)| format!("{key}: {value}")).collect();
    format!("{{ {} }}", fields.join(", "))
}

/// Keys and values, each value on one line.
fn fields(policy: &Policy) -> Vec<(&'static str, String)> {
    let matches: Vec<String> = policy.matches.iter().map(key_match).collect();
    let mut fields = vec![
        ("name", Quoted(&policy.name).to_string()),
        ("domain", Quoted(&policy.domain).to_string()),
        ("match", format!("[{}]", matches.join(", "))),
    ];
    match limit(&policy.limit) {
        None => fields.push(("unlimited", "true".to_owned())),
        Some(limit) => limited(policy, limit, &mut fields),
    }
    fields
}

pub(super) fn key_match(KeyMatch { key, value }: &KeyMatch) -> String {
    let key = Quoted(key);
    let written = match value {
        ValueMatch::Any => return format!("{{ key: {key} }}"),
        ValueMatch::Shared(text) if text.is_empty() => return format!("{{ key: {key}, shared: true }}"),
        ValueMatch::Shared(text) => {
            return format!("{{ key: {key}, value: {}, shared: true }}", Quoted(&format!("{text}*")));
        }
        ValueMatch::Prefix(text) => format!("{text}*"),
        ValueMatch::Exact(text) => match text.strip_suffix('*') {
            Some(start) => format!("{start}\\*"),
            None => text.to_string(),
        },
    };
    format!("{{ key: {key}, value: {} }}", Quoted(&written))
}

/// A limit as the value of `limit`; `None`: there is none.
pub(super) fn limit(limit: &Limit) -> Option<String> {
    Some(match *limit {
        Limit::Unlimited => return None,
        Limit::TokenBucket(bucket) => format!("{{ rate: {}, burst: {} }}", rate(bucket), bucket.burst),
        Limit::Quota(Quota { quota, per, algorithm: Algorithm::FixedWindow }) => {
            format!("{{ quota: {quota}, per: {per} }}")
        }
        Limit::Quota(Quota { quota, per, algorithm }) => {
            format!("{{ quota: {quota}, per: {per}, algorithm: {} }}", algorithm.name())
        }
        Limit::Concurrent(Concurrent { permits, ttl }) => {
            format!("{{ concurrent: {permits}, ttl: {} }}", written_time(ttl.to_duration()))
        }
    })
}

fn limited(policy: &Policy, limit: String, fields: &mut Vec<(&'static str, String)>) {
    fields.push(("limit", limit));
    fields.push(("mode", policy.mode.name().to_owned()));
    if let Mode::Approximate { max_overshoot } = policy.mode {
        fields.push(("max_overshoot", written_percent(max_overshoot)));
    }
    if policy.mode != Mode::Split && policy.reserve != Reserve::default() {
        let Reserve { rate, burst } = policy.reserve;
        let (rate, burst) = (written_percent(rate), written_percent(burst));
        fields.push(match policy.limit {
            Limit::Quota(_) | Limit::Concurrent(_) => ("reserve", burst),
            Limit::TokenBucket(_) | Limit::Unlimited => {
                ("reserve", format!("{{ rate: {rate}, burst: {burst} }}"))
            }
        });
    }
    if !policy.weights.is_empty() {
        let weights: Vec<String> =
            policy.weights.iter().map(|(region, weight)| format!("{}: {weight}", Quoted(region))).collect();
        fields.push(("weights", format!("{{ {} }}", weights.join(", "))));
    }
    if policy.mode == Mode::Strict && policy.wait != Micros::from_duration(WAIT_DEFAULT) {
        fields.push(("wait", written_time(policy.wait.to_duration())));
    }
    match policy.on_store_failure {
        OnStoreFailure::Deny => {}
        OnStoreFailure::Allow => fields.push(("on_store_failure", "allow".to_owned())),
        OnStoreFailure::Local => fields.push(("on_store_failure", "local".to_owned())),
    }
    if policy.shadow {
        fields.push(("shadow", "true".to_owned()));
    }
}

fn rate(bucket: TokenBucket) -> String {
    let (amount, unit) = match bucket.per {
        Unit::Second => (bucket.amount, "s"),
        Unit::Minute => (bucket.amount, "m"),
        Unit::Hour => (bucket.amount, "h"),
        Unit::Day => (bucket.amount, "d"),
        longer @ (Unit::Week | Unit::Month | Unit::Year) => {
            (bucket.amount / (longer.seconds() / Unit::Day.seconds()).unsigned_abs(), "d")
        }
    };
    format!("{amount}/{unit}")
}

/// A scalar: bare where that is sure to be read back as text, else in double quotes.
pub(super) struct Quoted<'t>(pub(super) &'t str);

impl Display for Quoted<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let word = self.0.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./".contains(&b));
        let reserved = ["null", "true", "false", "yes", "no", "on", "off", "y", "n"];
        if word
            && self.0.starts_with(|c: char| c.is_ascii_alphabetic())
            && !reserved.contains(&self.0.to_ascii_lowercase().as_str())
        {
            return f.write_str(self.0);
        }
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                '\n' => f.write_str("\\n")?,
                '\r' => f.write_str("\\r")?,
                '\t' => f.write_str("\\t")?,
                c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}') => {
                    write!(f, "\\U{:08x}", u32::from(c))?;
                }
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}
