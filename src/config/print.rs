//! Policies as a policy file: what [`super::policies::parse`] reads back to the same values.

use super::decode::{written_percent, written_time};
use super::policies::WAIT_DEFAULT;
use crate::quota::amount::Micros;
use crate::quota::policy::{
    KeyMatch, Limit, Mode, OnStoreFailure, Policy, Reserve, TokenBucket, Unit, ValueMatch,
};
use std::fmt::{self, Display, Formatter, Write};

/// Shows policies as the text of a policy file; what is a default is left out.
///
/// A limit whose unit a file cannot name (a week or more; no policy that came out of a file has one) is shown as its
/// amount a day, rounded down. So is a prefix that ends with a backslash shown as the exact value that it would be
/// read as.
pub struct PolicyFile<'p>(pub &'p [Policy]);

impl Display for PolicyFile<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("policies: []\n");
        }
        f.write_str("policies:\n")?;
        self.0.iter().try_for_each(|policy| write_policy(f, policy))
    }
}

fn write_policy(f: &mut Formatter<'_>, policy: &Policy) -> fmt::Result {
    writeln!(f, "  - name: {}", Quoted(&policy.name))?;
    writeln!(f, "    domain: {}", Quoted(&policy.domain))?;
    f.write_str("    match:\n")?;
    for KeyMatch { key, value } in &policy.matches {
        write!(f, "      - {{ key: {}", Quoted(key))?;
        match value {
            ValueMatch::Any => {}
            ValueMatch::Prefix(text) => write!(f, ", value: {}", Quoted(&format!("{text}*")))?,
            ValueMatch::Exact(text) => match text.strip_suffix('*') {
                Some(start) => write!(f, ", value: {}", Quoted(&format!("{start}\\*")))?,
                None => write!(f, ", value: {}", Quoted(text))?,
            },
        }
        f.write_str(" }\n")?;
    }
    match policy.limit {
        Limit::Unlimited => f.write_str("    unlimited: true\n"),
        Limit::TokenBucket(bucket) => write_limited(f, policy, bucket),
    }
}

fn write_limited(f: &mut Formatter<'_>, policy: &Policy, bucket: TokenBucket) -> fmt::Result {
    let (amount, unit) = match bucket.per {
        Unit::Second => (bucket.amount, "s"),
        Unit::Minute => (bucket.amount, "m"),
        Unit::Hour => (bucket.amount, "h"),
        Unit::Day => (bucket.amount, "d"),
        longer @ (Unit::Week | Unit::Month | Unit::Year) => {
            (bucket.amount / (longer.seconds() / Unit::Day.seconds()).unsigned_abs(), "d")
        }
    };
    writeln!(f, "    limit: {{ rate: {amount}/{unit}, burst: {} }}", bucket.burst)?;
    writeln!(f, "    mode: {}", policy.mode.name())?;
    if let Mode::Approximate { max_overshoot } = policy.mode {
        writeln!(f, "    max_overshoot: {}", written_percent(max_overshoot))?;
    }
    if policy.mode != Mode::Split && policy.reserve != Reserve::default() {
        let Reserve { rate, burst } = policy.reserve;
        let (rate, burst) = (written_percent(rate), written_percent(burst));
        writeln!(f, "    reserve: {{ rate: {rate}, burst: {burst} }}")?;
    }
    if !policy.weights.is_empty() {
        f.write_str("    weights:\n")?;
        policy
            .weights
            .iter()
            .try_for_each(|(region, weight)| writeln!(f, "      {}: {weight}", Quoted(region)))?;
    }
    if policy.mode == Mode::Strict && policy.wait != Micros::from_duration(WAIT_DEFAULT) {
        writeln!(f, "    wait: {}", written_time(policy.wait.to_duration()))?;
    }
    match policy.on_store_failure {
        OnStoreFailure::Deny => {}
        OnStoreFailure::Allow => f.write_str("    on_store_failure: allow\n")?,
        OnStoreFailure::Local => f.write_str("    on_store_failure: local\n")?,
    }
    if policy.shadow {
        f.write_str("    shadow: true\n")?;
    }
    Ok(())
}

/// A scalar: bare where that is sure to be read back as text, else in double quotes.
struct Quoted<'t>(&'t str);

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
