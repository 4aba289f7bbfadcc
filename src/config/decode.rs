//! From nodes to values: mappings with known keys, and the small languages of scalars.

use super::fault::{Faults, Mark, did_you_mean, nearest, shown};
use super::yaml::{Key, Node, Value};
use crate::quota::amount::TOKENS_MAX;
use crate::quota::policy::{Share, Unit};
use std::collections::HashMap;
use std::time::Duration;

/// What is wrong with a scalar, and the mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}; {mend}")]
pub struct Wrong {
    what: String,
    mend: String,
}

impl Wrong {
    /// `what` follows the name of the key.
    pub fn new(what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { what: what.into(), mend: mend.into() }
    }

    /// What is wrong; follows the name of the thing.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// How to mend it.
    pub fn mend(&self) -> &str {
        &self.mend
    }
}

/// The entries of a mapping whose keys are known.
pub struct Fields<'n> {
    mark: &'n Mark,
    path: &'n str,
    entries: &'n [(Key, Node)],
    /// Known keys that an unknown one was probably meant to be.
    misspelt: Vec<&'n str>,
}

impl<'n> Fields<'n> {
    /// Takes a node for a mapping; every unknown and every repeated key is a fault. `path` names it in faults: empty
    /// for the file itself.
    pub fn of(node: &'n Node, path: &'n str, known: &[&'n str], faults: &mut Faults) -> Option<Self> {
        let entries = entries(node, path, faults)?;
        let mut misspelt = Vec::new();
        for (key, _) in entries.iter().filter(|(key, _)| !known.contains(&key.name.as_str())) {
            if faults.is_full() {
                // Only counted: what a suggestion costs is not spent on every key of a hopeless file.
                faults.push(&key.mark, "", "");
                continue;
            }
            let place = if path.is_empty() { String::new() } else { format!(" in `{path}`") };
            let what = format!("unknown key {}{place}", shown(&key.name));
            faults.push(&key.mark, what, did_you_mean(&key.name, known));
            misspelt.extend(nearest(&key.name, known));
        }
        Some(Self { mark: &node.mark, path, entries, misspelt })
    }

    /// Where the mapping begins.
    pub const fn mark(&self) -> &'n Mark {
        self.mark
    }

    /// The value of a key, if it is there.
    pub fn get(&self, key: &str) -> Option<&'n Node> {
        self.entry(key).map(|(_, node)| node)
    }

    /// Where a key is, if it is there.
    pub fn key_mark(&self, key: &str) -> Option<&'n Mark> {
        self.entry(key).map(|(key, _)| &key.mark)
    }

    /// Is there an unknown key that was probably meant to be this one? That is fault enough.
    pub fn is_misspelt(&self, key: &str) -> bool {
        self.misspelt.contains(&key)
    }

    /// The value of a key that has to be there.
    pub fn need(&self, key: &str, mend: &str, faults: &mut Faults) -> Option<&'n Node> {
        let found = self.get(key);
        if found.is_none() && !self.is_misspelt(key) {
            faults.push(self.mark, format!("`{}` is missing", self.name(key)), mend);
        }
        found
    }

    /// A scalar, if the key is there; a fault and `None` if it is wrong.
    pub fn read<T>(
        &self,
        key: &str,
        faults: &mut Faults,
        parse: impl FnOnce(&str) -> Result<T, Wrong>,
    ) -> Option<T> {
        read(self.get(key)?, &self.name(key), faults, parse)
    }

    /// A scalar, or `default` if the key is not there; a fault and `None` if it is wrong.
    pub fn read_or<T>(
        &self,
        key: &str,
        default: T,
        faults: &mut Faults,
        parse: impl FnOnce(&str) -> Result<T, Wrong>,
    ) -> Option<T> {
        if self.get(key).is_some() { self.read(key, faults, parse) } else { Some(default) }
    }

    /// A key's name with its path.
    pub fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn entry(&self, key: &str) -> Option<&'n (Key, Node)> {
        self.entries.iter().find(|(k, _)| k.name == key)
    }
}

/// The entries of a mapping with any keys (nothing at all is an empty one); every repeated key is a fault.
pub fn entries<'n>(node: &'n Node, path: &str, faults: &mut Faults) -> Option<&'n [(Key, Node)]> {
    let entries = match &node.value {
        Value::Null => return Some(&[]),
        Value::Map(entries) => entries,
        other => {
            let name = if path.is_empty() { "the file".to_owned() } else { format!("`{path}`") };
            faults.push(
                &node.mark,
                format!("{name} is {}", other.kind()),
                "write `key: value` entries there",
            );
            return None;
        }
    };
    let mut seen: HashMap<&str, &Mark> = HashMap::new();
    for (key, _) in entries {
        if let Some(first) = seen.get(key.name.as_str()) {
            let what = format!("{} is there twice", shown(&key.name));
            faults.push(&key.mark, what, format!("remove this one or the one on {first}"));
        } else {
            seen.insert(&key.name, &key.mark);
        }
    }
    Some(entries)
}

/// The items of a list.
pub fn items<'n>(node: &'n Node, name: &str, faults: &mut Faults) -> Option<&'n [Node]> {
    match &node.value {
        Value::List(items) => Some(items),
        other => {
            let what = format!("`{name}` is {}", other.kind());
            faults.push(&node.mark, what, "write a list: `- …` lines, or `[]` for none");
            None
        }
    }
}

/// A scalar; a fault and `None` if it is wrong.
pub fn read<T>(
    node: &Node,
    name: &str,
    faults: &mut Faults,
    parse: impl FnOnce(&str) -> Result<T, Wrong>,
) -> Option<T> {
    let Value::Text(text) = &node.value else {
        faults.push(&node.mark, format!("`{name}` is {}", node.value.kind()), "give it a single value");
        return None;
    };
    match parse(text) {
        Ok(value) => Some(value),
        Err(Wrong { what, mend }) => {
            faults.push(&node.mark, format!("`{name}` {what}"), mend);
            None
        }
    }
}

/// `true` or `false`.
pub fn boolean(text: &str) -> Result<bool, Wrong> {
    match text {
        "true" | "True" | "TRUE" => Ok(true),
        "false" | "False" | "FALSE" => Ok(false),
        _ => Err(Wrong::new(format!("is {}", shown(text)), "write `true` or `false`")),
    }
}

/// A whole number of at most `max`; `_` may group its digits.
pub fn whole(text: &str, max: u64) -> Result<u64, Wrong> {
    let mend = format!("write a whole number from 0 to {max}");
    match digits(text) {
        Some(Some(number)) if number <= max => Ok(number),
        Some(_) => Err(Wrong::new(format!("is too large: {}", shown(text)), mend)),
        None => Err(Wrong::new(format!("is not a whole number: {}", shown(text)), mend)),
    }
}

/// `20ms`, `10s`, `1m`: from `min` to `max`.
pub fn duration(text: &str, min: Duration, max: Duration) -> Result<Duration, Wrong> {
    let mend = || {
        format!(
            "write a number and `us`, `ms`, `s` or `m`, from {} to {}",
            written_time(min),
            written_time(max)
        )
    };
    let not = || Wrong::new(format!("is not a duration: {}", shown(text)), mend());
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let unit_us: u64 = match unit {
        "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "" if number == "0" => 1,
        _ => return Err(not()),
    };
    let number = digits(number).ok_or_else(not)?;
    let duration = number.and_then(|n| n.checked_mul(unit_us)).map(Duration::from_micros);
    match duration {
        Some(duration) if (min..=max).contains(&duration) => Ok(duration),
        _ => Err(Wrong::new(format!("is out of range: {}", shown(text)), mend())),
    }
}

/// As [`duration`] reads it.
pub fn written_time(duration: Duration) -> String {
    match duration.as_micros() {
        0 => "0s".to_owned(),
        us if us % 1_000_000 == 0 => format!("{}s", us / 1_000_000),
        us if us % 1_000 == 0 => format!("{}ms", us / 1_000),
        us => format!("{us}us"),
    }
}

/// `1000/s`: an amount and its unit of time.
pub fn rate(text: &str) -> Result<(u64, Unit), Wrong> {
    let form = "write an amount and a unit of time, such as `1000/s` (s, m, h or d)";
    let (amount, unit) = text
        .split_once('/')
        .ok_or_else(|| Wrong::new(format!("has no unit of time: {}", shown(text)), form))?;
    let amount = whole(amount.trim(), TOKENS_MAX.unsigned_abs())?;
    let unit = match unit.trim() {
        "s" | "sec" | "second" => Unit::Second,
        "m" | "min" | "minute" => Unit::Minute,
        "h" | "hour" => Unit::Hour,
        "d" | "day" => Unit::Day,
        other => {
            return Err(Wrong::new(format!("has an unknown unit of time: {}", shown(other)), form));
        }
    };
    Ok((amount, unit))
}

/// `10%` or `2.5%`, to four decimals, up to 100%.
pub fn percent(text: &str) -> Result<Share, Wrong> {
    let wrong = || {
        let mend = "write a percentage from 0% to 100%, such as `10%` or `2.5%` (at most four decimals)";
        Wrong::new(format!("is not a percentage: {}", shown(text)), mend)
    };
    let number = text.strip_suffix('%').ok_or_else(wrong)?.trim_end();
    let (whole, decimals) = number.split_once('.').unwrap_or((number, "0"));
    if decimals.is_empty() || decimals.len() > 4 || whole.is_empty() || whole.len() > 3 {
        return Err(wrong());
    }
    let all_digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if !all_digits(whole) || !all_digits(decimals) {
        return Err(wrong());
    }
    let ppm: u32 = format!("{whole}{decimals:0<4}").parse().map_err(|_| wrong())?;
    if ppm > Share::ALL.0 { Err(wrong()) } else { Ok(Share(ppm)) }
}

/// As [`percent`] reads it.
pub fn written_percent(share: Share) -> String {
    let (whole, decimals) = (share.0 / 10_000, share.0 % 10_000);
    if decimals == 0 {
        return format!("{whole}%");
    }
    format!("{whole}.{}%", format!("{decimals:04}").trim_end_matches('0'))
}

/// A name of a region or a cluster: `[a-z0-9-]`, 1 to 63 characters.
pub fn name(text: &str) -> Result<&str, Wrong> {
    let fits = (1..=63).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    let mend = "use 1 to 63 of a-z, 0-9 and `-`, such as `us-east`";
    if fits { Ok(text) } else { Err(Wrong::new(format!("is not a name: {}", shown(text)), mend)) }
}

/// Text for people or for matching: 1 to `bytes_max` bytes without control characters.
pub fn plain(text: &str, bytes_max: usize) -> Result<&str, Wrong> {
    if text.is_empty() {
        return Err(Wrong::new("is empty", "give it a value"));
    }
    if text.len() > bytes_max {
        let what = format!("has {} bytes", text.len());
        return Err(Wrong::new(what, format!("at most {bytes_max} are possible")));
    }
    if text.chars().any(char::is_control) {
        let what = format!("has control characters: {}", shown(text));
        return Err(Wrong::new(what, "use printable characters"));
    }
    Ok(text)
}

/// `None`: not a number. `Some(None)`: one that is too large.
fn digits(text: &str) -> Option<Option<u64>> {
    let grouped = text.starts_with(|c: char| c.is_ascii_digit()) && !text.ends_with('_');
    if !grouped || !text.bytes().all(|b| b.is_ascii_digit() || b == b'_') {
        return None;
    }
    Some(text.replace('_', "").parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_exact() {
        assert_eq!(percent("10%"), Ok(Share::percent(10)));
        assert_eq!(percent("2.5%"), Ok(Share(25_000)));
        assert_eq!(percent("0.0001%"), Ok(Share(1)));
        assert_eq!(percent("100%"), Ok(Share::ALL));
        for wrong in
            ["100.0001%", "10", "-1%", "1e1%", "%", ".5%", "5.%", "1.00001%", "999999999999%", "1_0%", ""]
        {
            assert!(percent(wrong).is_err(), "{wrong}");
        }
        for ppm in (0..=1_000_000).step_by(777) {
            assert_eq!(percent(&written_percent(Share(ppm))), Ok(Share(ppm)));
        }
    }

    #[test]
    fn durations_have_units_and_bounds() {
        let (min, max) = (Duration::from_millis(1), Duration::from_secs(60));
        assert_eq!(duration("20ms", min, max), Ok(Duration::from_millis(20)));
        assert_eq!(duration("1m", min, max), Ok(max));
        assert_eq!(duration("1500us", min, max), Ok(Duration::from_micros(1500)));
        for wrong in ["20", "ms", "1 s", "-1s", "1.5s", "61s", "0", "99999999999999999999s", "1h", ""] {
            assert!(duration(wrong, min, max).is_err(), "{wrong}");
        }
        assert_eq!(duration("0", Duration::ZERO, max), Ok(Duration::ZERO));
        assert_eq!(written_time(Duration::from_millis(1500)), "1500ms");
    }

    #[test]
    fn the_largest_rate_is_named() {
        assert_eq!(rate("4294967296/s"), Ok((1 << 32, Unit::Second)));
        assert_eq!(rate("1_000 / day"), Ok((1000, Unit::Day)));
        for too_large in ["4294967297/s", "9007199254740993/s", "99999999999999999999999/s"] {
            let Err(wrong) = rate(too_large) else { panic!("{too_large}") };
            assert!(wrong.mend.contains("4294967296"), "{wrong:?}");
        }
        for wrong in ["10", "10/x", "/s", "-1/s", "1.5/s", "_1/s", "1_/s", "10/s/s"] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }
}
