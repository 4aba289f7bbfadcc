//! `policies.yaml` to policies, and back.

use super::decode::{self, Fields, Wrong};
use super::fault::{Faults, Mark, one_of, shown};
use super::limits;
use super::yaml::{self, Node, Value};
use super::{ConfigError, REGIONS_MAX};
use crate::quota::amount::Micros;
use crate::quota::matching::{DOMAIN_BYTES_MAX, ENTRIES_MAX};
use crate::quota::policy::{
    KeyMatch, Limit, Mode, OnStoreFailure, Policy, RegionName, Reserve, Share, ValueMatch,
};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The most policies of a cluster.
pub const POLICIES_MAX: usize = 10_000;
/// How long a strict request may wait for a lease where its policy does not say.
pub const WAIT_DEFAULT: Duration = Duration::from_millis(250);
/// The longest that it may wait.
pub const WAIT_MAX: Duration = Duration::from_secs(5);

/// The keys of a policy.
pub const KEYS: &[&str] = &[
    "name",
    "domain",
    "match",
    "limit",
    "unlimited",
    "mode",
    "max_overshoot",
    "reserve",
    "weights",
    "wait",
    "on_store_failure",
    "shadow",
];
const MATCH: &[&str] = &["key", "value", "shared"];
/// Keys that say how a limit is shared, which an unlimited policy has not.
const OF_LIMITS: &[&str] =
    &["limit", "mode", "max_overshoot", "reserve", "weights", "wait", "on_store_failure", "shadow"];

const NAME_BYTES_MAX: usize = 128;
pub(super) const KEY_BYTES_MAX: usize = 255;
pub(super) const VALUE_BYTES_MAX: usize = 4096;
const WEIGHT_MAX: u64 = 1_000_000;

/// Reads a policy file. With the `regions` of a cluster, weights may name no others.
///
/// # Errors
/// The file cannot be read, or it is wrong: then all of its faults.
pub fn load(file: &Path, regions: Option<&[RegionName]>) -> Result<Vec<Policy>, ConfigError> {
    let text = super::read(file)?;
    parse(file, &text, regions).map_err(ConfigError::Invalid)
}

/// Reads a policy file's text; `file` is its name in faults.
///
/// # Errors
/// Everything that is wrong with it.
pub fn parse(file: &Path, text: &str, regions: Option<&[RegionName]>) -> Result<Vec<Policy>, Faults> {
    let root = yaml::parse(file, text)?;
    read(file, &root, regions)
}

/// Reads a policy file's tree.
///
/// # Errors
/// Everything that is wrong with it.
pub fn read(file: &Path, root: &Node, regions: Option<&[RegionName]>) -> Result<Vec<Policy>, Faults> {
    let mut faults = Faults::new(file);
    let policies = Reader { regions, faults: &mut faults }.policies(root);
    faults.or(policies)
}

struct Reader<'r> {
    regions: Option<&'r [RegionName]>,
    faults: &'r mut Faults,
}

impl Reader<'_> {
    fn policies(&mut self, root: &Node) -> Option<Vec<Policy>> {
        let top = Fields::of(root, "", &["policies"], self.faults)?;
        let list = top.need("policies", "write `policies:` and a list below it, or `[]`", self.faults)?;
        let items = decode::items(list, "policies", self.faults)?;
        if items.len() > POLICIES_MAX {
            let what = format!("there are {} policies", items.len());
            let mark = top.key_mark("policies").unwrap_or(&list.mark);
            self.faults.push(mark, what, format!("at most {POLICIES_MAX} are possible"));
            return None;
        }
        let policies: Vec<Option<Policy>> = items.iter().map(|item| self.policy(item)).collect();
        self.distinct(items, &policies);
        policies.into_iter().collect()
    }

    fn policy(&mut self, node: &Node) -> Option<Policy> {
        let fields = Fields::of(node, "", KEYS, self.faults)?;
        let name = fields
            .need("name", "give the policy a name, such as `name: tenant-requests`", self.faults)
            .and_then(|_| fields.read("name", self.faults, policy_name));
        let domain =
            fields.need("domain", "name the domain of its descriptors", self.faults).and_then(|_| {
                fields.read("domain", self.faults, |t| decode::plain(t, DOMAIN_BYTES_MAX).map(Arc::from))
            });
        let matches = self.matches(&fields);
        if fields.is_misspelt("unlimited") {
            return None;
        }
        let policy = if fields.read_or("unlimited", false, self.faults, decode::boolean)? {
            self.unlimited(&fields)
        } else {
            self.limited(&fields)
        };
        Some(Policy { name: name?, domain: domain?, matches: matches?, ..policy? })
    }

    /// A policy without a limit; its name, domain and keys are still to be filled in.
    fn unlimited(&mut self, fields: &Fields<'_>) -> Option<Policy> {
        for key in OF_LIMITS {
            if let Some(mark) = fields.key_mark(key) {
                let what = format!("`{key}` means nothing beside `unlimited: true`");
                self.faults.push(mark, what, "remove one of them");
            }
        }
        Some(bare(Limit::Unlimited, Mode::Split))
    }

    /// A policy with a limit; its name, domain and keys are still to be filled in.
    fn limited(&mut self, fields: &Fields<'_>) -> Option<Policy> {
        let mend = "add `limit: { rate: 1000/s, burst: 2000 }`, or `unlimited: true`";
        let node = fields.need("limit", mend, self.faults);
        let limit = node.and_then(|node| limits::read(node, self.faults));
        let mode = self.mode(fields);
        if let (Some(node), Some(limit), Some(mode)) = (node, &limit, mode) {
            limits::check_mode(node, limit, mode, self.faults)?;
        }
        let reserve = self.reserve(fields, limit.as_ref(), mode);
        let weights = self.weights(fields);
        let wait = self.wait(fields, mode);
        let on_store_failure = self.on_store_failure(fields, limit.as_ref(), mode);
        let shadow = fields.read_or("shadow", false, self.faults, decode::boolean);
        Some(Policy {
            reserve: reserve?,
            weights: weights?,
            wait: wait?,
            on_store_failure: on_store_failure?,
            shadow: shadow?,
            ..bare(limit?, mode?)
        })
    }

    fn matches(&mut self, fields: &Fields<'_>) -> Option<Vec<KeyMatch>> {
        let mend = "add `match: [ { key: tenant } ]`";
        let list = fields.need("match", mend, self.faults)?;
        let items = decode::items(list, "match", self.faults)?;
        if items.is_empty() || items.len() > ENTRIES_MAX {
            let what = format!("`match` has {} keys", items.len());
            let mend =
                format!("name 1 to {ENTRIES_MAX}; for one bucket in all, a key that every request has");
            self.faults.push(&list.mark, what, mend);
            return None;
        }
        let matches: Vec<Option<KeyMatch>> = items.iter().map(|item| self.key_match(item)).collect();
        matches.into_iter().collect()
    }

    fn key_match(&mut self, node: &Node) -> Option<KeyMatch> {
        let fields = Fields::of(node, "match", MATCH, self.faults)?;
        let key =
            fields.need("key", "name a descriptor key, such as `key: tenant`", self.faults).and_then(|_| {
                fields.read("key", self.faults, |t| decode::plain(t, KEY_BYTES_MAX).map(Arc::from))
            });
        let value = fields.read_or("value", ValueMatch::Any, self.faults, value_match);
        let shared = fields.read_or("shared", false, self.faults, decode::boolean);
        let value = match (value?, shared?) {
            (value, false) => value,
            (ValueMatch::Any, true) => ValueMatch::Shared("".into()),
            (ValueMatch::Prefix(start), true) => ValueMatch::Shared(start),
            (value @ (ValueMatch::Exact(_) | ValueMatch::Shared(_)), true) => {
                let mark = fields.key_mark("shared").unwrap_or(&node.mark);
                let what = "`shared: true` beside one value, which shares its bucket with no other";
                self.faults.push(mark, what, "remove it, or give `value` a `*` at its end");
                value
            }
        };
        Some(KeyMatch { key: key?, value })
    }

    fn mode(&mut self, fields: &Fields<'_>) -> Option<Mode> {
        let mend = "add `mode: strict`, `mode: approximate` or `mode: split`";
        fields.need("mode", mend, self.faults)?;
        let overshoot = fields.read_or("max_overshoot", None, self.faults, |text| {
            let share = decode::percent(text)?;
            let mend = "write more than 0% and at most 100%; for none at all, `mode: strict`";
            if share == Share::NONE { Err(Wrong::new("is nothing", mend)) } else { Ok(Some(share)) }
        });
        let name = fields.read("mode", self.faults, |text| match text {
            "strict" | "approximate" | "split" => Ok(text.to_owned()),
            _ => {
                let mend = format!("write {}", one_of(&["strict", "approximate", "split"]));
                Err(Wrong::new(format!("is {}", shown(text)), mend))
            }
        })?;
        match (name.as_str(), overshoot?) {
            ("approximate", Some(max_overshoot)) => Some(Mode::Approximate { max_overshoot }),
            ("approximate", None) => {
                if !fields.is_misspelt("max_overshoot") {
                    let what = "`max_overshoot` is missing";
                    let mend =
                        "say how far above the limit all regions together may go: `max_overshoot: 10%`";
                    self.faults.push(fields.mark(), what, mend);
                }
                None
            }
            (other, overshoot) => {
                if overshoot.is_some() {
                    let mark = fields.key_mark("max_overshoot").unwrap_or(fields.mark());
                    let what =
                        format!("`max_overshoot` is for `mode: approximate`, and the mode is `{other}`");
                    self.faults.push(mark, what, "remove it, or change the mode");
                }
                Some(if other == "strict" { Mode::Strict } else { Mode::Split })
            }
        }
    }

    /// `10%` of both, or `{ rate: 2%, burst: 5% }`; of a quota, which has no rate, `10%`.
    fn reserve(&mut self, fields: &Fields<'_>, limit: Option<&Limit>, mode: Option<Mode>) -> Option<Reserve> {
        let Some(node) = fields.get("reserve") else { return Some(Reserve::default()) };
        if mode == Some(Mode::Split) {
            let mark = fields.key_mark("reserve").unwrap_or(&node.mark);
            let what = "`reserve` means nothing in `mode: split`, where regions keep all of the limit";
            self.faults.push(mark, what, "remove it, or change the mode");
            return None;
        }
        if let Value::Map(_) = node.value {
            if matches!(limit, Some(Limit::Quota(_) | Limit::Concurrent(_))) {
                let what =
                    "`reserve` has a part for the rate and one for the burst, and the limit has neither";
                self.faults.push(&node.mark, what, "write one share of it, such as `reserve: 10%`");
                return None;
            }
            let parts = Fields::of(node, "reserve", &["rate", "burst"], self.faults)?;
            let Reserve { rate, burst } = Reserve::default();
            let rate = parts.read_or("rate", rate, self.faults, decode::percent);
            let burst = parts.read_or("burst", burst, self.faults, decode::percent);
            return Some(Reserve { rate: rate?, burst: burst? });
        }
        fields
            .read("reserve", self.faults, decode::percent)
            .map(|share| Reserve { rate: share, burst: share })
    }

    fn weights(&mut self, fields: &Fields<'_>) -> Option<BTreeMap<RegionName, u32>> {
        let Some(node) = fields.get("weights") else { return Some(BTreeMap::new()) };
        let entries = decode::entries(node, "weights", self.faults)?;
        if entries.is_empty() || entries.len() > REGIONS_MAX {
            let what = format!("`weights` names {} regions", entries.len());
            self.faults.push(&node.mark, what, format!("name 1 to {REGIONS_MAX}, or leave it out"));
            return None;
        }
        let mut weights = BTreeMap::new();
        for (key, value) in entries {
            let region = self.weighted_region(&key.name, &key.mark);
            let weight = decode::read(value, &format!("weights.{}", key.name), self.faults, |text| {
                decode::whole(text, WEIGHT_MAX)
            });
            if let (Some(region), Some(weight)) = (region, weight.and_then(|w| u32::try_from(w).ok())) {
                weights.insert(region, weight);
            }
        }
        if weights.len() < entries.len() {
            return None;
        }
        if weights.values().all(|w| *w == 0) {
            self.faults.push(
                &node.mark,
                "`weights` are all 0",
                "give at least one region more, or leave it out",
            );
            return None;
        }
        Some(weights)
    }

    fn weighted_region(&mut self, name: &str, mark: &Mark) -> Option<RegionName> {
        match (decode::name(name), self.regions) {
            (Err(wrong), _) => {
                let what = format!("`weights` names {}, which is no region's name", shown(name));
                self.faults.push(mark, what, wrong.mend());
                None
            }
            (Ok(name), Some(regions)) if !regions.iter().any(|r| **r == *name) => {
                let known: Vec<&str> = regions.iter().map(|r| &**r).collect();
                let what = format!("`weights` names {}, which is not a region of the cluster", shown(name));
                self.faults.push(mark, what, super::fault::did_you_mean(name, &known));
                None
            }
            (Ok(name), _) => Some(name.into()),
        }
    }

    fn wait(&mut self, fields: &Fields<'_>, mode: Option<Mode>) -> Option<Micros> {
        let strict = mode == Some(Mode::Strict);
        let default = if strict { WAIT_DEFAULT } else { Duration::ZERO };
        let wait = fields.read_or("wait", default, self.faults, |text| {
            let wait = decode::duration(text, Duration::ZERO, WAIT_MAX)?;
            if strict || mode.is_none() || wait.is_zero() {
                return Ok(wait);
            }
            let what = "is for `mode: strict`: no other mode waits for a lease";
            Err(Wrong::new(what, "remove it, or write 0"))
        });
        wait.map(Micros::from_duration)
    }

    fn on_store_failure(
        &mut self,
        fields: &Fields<'_>,
        limit: Option<&Limit>,
        mode: Option<Mode>,
    ) -> Option<OnStoreFailure> {
        fields.read_or("on_store_failure", OnStoreFailure::Deny, self.faults, |text| {
            let answer = match text {
                "deny" => OnStoreFailure::Deny,
                "allow" => OnStoreFailure::Allow,
                "local" => OnStoreFailure::Local,
                _ => {
                    let mend = format!("write {}", one_of(&["deny", "allow", "local"]));
                    return Err(Wrong::new(format!("is {}", shown(text)), mend));
                }
            };
            if mode == Some(Mode::Strict) && answer != OnStoreFailure::Deny {
                let what = format!("is `{text}` in `mode: strict`: it would not be strict");
                return Err(Wrong::new(what, "write `deny`, or change the mode"));
            }
            if answer == OnStoreFailure::Local && limit.is_some_and(limits::has_windows) {
                let what = "is `local`, and a bucket in memory, empty at first, would not fill before the window ends";
                return Err(Wrong::new(what, "write `deny` or `allow`"));
            }
            Ok(answer)
        })
    }

    /// Names are unique, and what matches in a domain too.
    fn distinct(&mut self, items: &[Node], policies: &[Option<Policy>]) {
        type Matched<'p> = (&'p str, Vec<(&'p str, Alike<'p>)>);
        let mut names: HashMap<&str, &Mark> = HashMap::new();
        let mut matches: HashMap<Matched<'_>, (&str, &Mark)> = HashMap::new();
        for (node, policy) in items.iter().zip(policies) {
            let Some(policy) = policy else { continue };
            let mark = &node.mark;
            if let Some(first) = names.get(&*policy.name) {
                let what = format!("the name {} is there twice", shown(&policy.name));
                self.faults.push(mark, what, format!("rename this policy or the one on {first}"));
            } else {
                names.insert(&policy.name, mark);
            }
            let alike = policy.matches.iter().map(|m| (&*m.key, alike(&m.value)));
            let key = (&*policy.domain, alike.collect());
            if let Some((name, first)) = matches.get(&key) {
                let what = format!("{} matches the same as {} on {first}", shown(&policy.name), shown(name));
                self.faults.push(mark, what, "change the `match` of one of them, or remove it");
            } else {
                matches.insert(key, (&policy.name, mark));
            }
        }
    }
}

fn bare(limit: Limit, mode: Mode) -> Policy {
    Policy {
        name: "".into(),
        domain: "".into(),
        matches: Vec::new(),
        limit,
        mode,
        reserve: Reserve::default(),
        weights: BTreeMap::new(),
        wait: Micros::ZERO,
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    }
}

/// A policy's name travels in headers and metric labels.
fn policy_name(text: &str) -> Result<Arc<str>, Wrong> {
    let fits = (1..=NAME_BYTES_MAX).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./:".contains(&b));
    let mend = format!("use 1 to {NAME_BYTES_MAX} letters, digits and `-_./:`");
    if fits { Ok(text.into()) } else { Err(Wrong::new(format!("is not a name: {}", shown(text)), mend)) }
}

/// What tells two matches apart: the exact value, or what values begin with.
type Alike<'v> = Result<&'v str, &'v str>;

fn alike(value: &ValueMatch) -> Alike<'_> {
    match value {
        ValueMatch::Exact(text) => Ok(text),
        ValueMatch::Prefix(start) | ValueMatch::Shared(start) => Err(start),
        ValueMatch::Any => Err(""),
    }
}

/// `x` exactly, `x*` as a prefix, `*` any; `x\*` for a value that ends with a star. Other stars are themselves.
fn value_match(text: &str) -> Result<ValueMatch, Wrong> {
    if text.len() > VALUE_BYTES_MAX {
        let what = format!("has {} bytes", text.len());
        return Err(Wrong::new(what, format!("at most {VALUE_BYTES_MAX} are possible")));
    }
    if let Some(start) = text.strip_suffix("\\*") {
        return Ok(ValueMatch::Exact(format!("{start}*").into()));
    }
    match text.strip_suffix('*') {
        Some("") => Ok(ValueMatch::Any),
        Some(prefix) => Ok(ValueMatch::Prefix(prefix.into())),
        None => Ok(ValueMatch::Exact(text.into())),
    }
}
