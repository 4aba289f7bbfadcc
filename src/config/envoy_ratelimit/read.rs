//! Files to a tree of descriptors, or to everything that is wrong with them.

use super::Place;
use crate::config::decode::{self, Fields, Wrong};
use crate::config::fault::{Faults, Mark, one_of, shown};
use crate::config::yaml::{self, Node, Value};
use crate::quota::matching::DOMAIN_BYTES_MAX;
use crate::quota::policy::Unit;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FILE: &[&str] = &["domain", "descriptors"];
const DESCRIPTOR: &[&str] = &[
    "key",
    "value",
    "rate_limit",
    "descriptors",
    "shadow_mode",
    "quota_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
];
const RATE_LIMIT: &[&str] = &["unit", "requests_per_unit", "unlimited", "name", "replaces"];

/// All descriptors of one domain, from all files.
pub(super) struct Domain {
    pub(super) name: String,
    pub(super) descriptors: Vec<Descriptor>,
}

/// A descriptor and what is nested in it.
pub(super) struct Descriptor {
    pub(super) place: Place,
    pub(super) key: String,
    /// Never empty.
    pub(super) value: Option<String>,
    pub(super) limit: Option<RateLimit>,
    pub(super) descriptors: Vec<Self>,
    pub(super) shadow: bool,
    pub(super) shared: bool,
    /// Keys that are there and set, and have nothing that they could become.
    pub(super) foreign: Vec<(&'static str, Place)>,
}

/// A `rate_limit`.
pub(super) struct RateLimit {
    /// So many requests in windows of the unit's length ([`Unit::seconds`]), counted from the epoch. `None`: unlimited.
    pub(super) amount: Option<(u32, Unit)>,
    pub(super) name: Option<String>,
    pub(super) replaces: Vec<(String, Place)>,
}

/// Reads all files. Those of one domain are put together in the order of the files.
pub(super) fn read(files: &[(PathBuf, String)]) -> Result<Vec<Domain>, Vec<Faults>> {
    let mut domains: Vec<Domain> = Vec::new();
    let mut wrong = Vec::new();
    for (order, (file, text)) in files.iter().enumerate() {
        match read_file(order, file, text) {
            Err(faults) => wrong.push(faults),
            Ok(read) => match domains.iter_mut().find(|domain| domain.name == read.name) {
                None => domains.push(read),
                Some(domain) => {
                    let mut faults = Faults::new(file);
                    distinct(&domain.descriptors, &read.descriptors, &mut faults);
                    domain.descriptors.extend(read.descriptors);
                    wrong.extend((!faults.is_empty()).then_some(faults));
                }
            },
        }
    }
    if wrong.is_empty() { Ok(domains) } else { Err(wrong) }
}

fn read_file(order: usize, file: &Path, text: &str) -> Result<Domain, Faults> {
    let root = yaml::parse(file, text)?;
    let mut faults = Faults::new(file);
    let mut reader = Reader { file: file.into(), order, faults: &mut faults };
    let domain = reader.domain(&root);
    faults.or(domain)
}

struct Reader<'r> {
    file: Arc<Path>,
    order: usize,
    faults: &'r mut Faults,
}

impl Reader<'_> {
    fn domain(&mut self, root: &Node) -> Option<Domain> {
        let top = Fields::of(root, "", FILE, self.faults)?;
        let name =
            top.need("domain", "name the domain: that service refuses a file without one", self.faults);
        let name = name.and_then(|node| {
            let name = |text: &str| decode::plain(text, DOMAIN_BYTES_MAX).map(str::to_owned);
            match node.value {
                Value::Null => decode::read(&empty(node), "domain", self.faults, name),
                _ => decode::read(node, "domain", self.faults, name),
            }
        });
        let descriptors = self.descriptors(&top);
        Some(Domain { name: name?, descriptors: descriptors? })
    }

    fn descriptors(&mut self, of: &Fields<'_>) -> Option<Vec<Descriptor>> {
        let Some(node) = of.get("descriptors").filter(|node| node.value != Value::Null) else {
            return Some(Vec::new());
        };
        let items = decode::items(node, "descriptors", self.faults)?;
        let all: Vec<Option<Descriptor>> = items.iter().map(|item| self.descriptor(item)).collect();
        let all: Vec<Descriptor> = all.into_iter().collect::<Option<_>>()?;
        distinct(&[], &all, self.faults);
        Some(all)
    }

    fn descriptor(&mut self, node: &Node) -> Option<Descriptor> {
        let fields = Fields::of(node, "descriptors", DESCRIPTOR, self.faults)?;
        let mend = "give the descriptor a key: that service refuses a file with an empty one";
        let key = fields.need("key", mend, self.faults).and_then(|node| {
            let node = if node.value == Value::Null { &empty(node) } else { node };
            decode::read(node, "key", self.faults, |text| decode::plain(text, 255).map(str::to_owned))
        });
        let value = self.scalar(&fields, "value", |text| Ok(text.to_owned()));
        let limit = match fields.get("rate_limit").filter(|node| node.value != Value::Null) {
            None => Some(None),
            Some(node) => self.rate_limit(node).map(Some),
        };
        let descriptors = self.descriptors(&fields);
        let shadow = self.flag(&fields, "shadow_mode");
        let shared = self.flag(&fields, "share_threshold");
        let mut foreign = Vec::new();
        for name in ["quota_mode", "detailed_metric", "value_to_metric"] {
            if self.flag(&fields, name)? {
                foreign.push((name, self.place(fields.key_mark(name)?)));
            }
        }
        if let Some(node) = fields.get("metadata").filter(|node| node.value != Value::Null) {
            decode::entries(node, "metadata", self.faults)?;
            foreign.push(("metadata", self.place(fields.key_mark("metadata")?)));
        }
        let value = value?.filter(|value| !value.is_empty());
        let (key, shared) = (key?, shared?);
        if shared && !key.contains('*') && !value.as_ref().is_some_and(|value| value.contains('*')) {
            let mark = fields.key_mark("share_threshold").unwrap_or(&node.mark);
            let what = "`share_threshold` is for values with a `*`, and this descriptor's has none";
            self.faults.push(mark, what, "remove it, or give `value` a `*` at its end");
        }
        let place = self.place(&node.mark);
        Some(Descriptor {
            place,
            key,
            value,
            limit: limit?,
            descriptors: descriptors?,
            shadow: shadow?,
            shared,
            foreign,
        })
    }

    fn rate_limit(&mut self, node: &Node) -> Option<RateLimit> {
        let fields = Fields::of(node, "rate_limit", RATE_LIMIT, self.faults)?;
        let misspelt = fields.is_misspelt("unlimited") || fields.is_misspelt("unit");
        let unlimited = self.flag(&fields, "unlimited");
        let unit = self
            .scalar(&fields, "unit", |text| if text.is_empty() { Ok(None) } else { unit(text).map(Some) });
        let amount = self.scalar(&fields, "requests_per_unit", |text| {
            decode::whole(text, u64::from(u32::MAX)).map(|n| u32::try_from(n).unwrap_or(u32::MAX))
        });
        let name = self.scalar(&fields, "name", |text| Ok(text.to_owned()))?.filter(|name| !name.is_empty());
        let replaces = self.replaces(&fields, name.as_deref());
        let (unlimited, unit, amount) = (unlimited?, unit?.flatten(), amount?);
        let amount = match (unlimited, unit) {
            (true, Some(_)) => {
                let mark = fields.key_mark("unit").unwrap_or(&node.mark);
                let what = "`rate_limit.unit` beside `unlimited: true`";
                self.faults.push(mark, what, "remove one of them: that service refuses both together");
                return None;
            }
            (true, None) => None,
            (false, Some(unit)) => Some((amount.unwrap_or(0), unit)),
            (false, None) => {
                if !misspelt {
                    let what = "`rate_limit.unit` is missing";
                    let mend = format!("add {}, or `unlimited: true`", one_of(&Unit::ALL.map(Unit::name)));
                    self.faults.push(&node.mark, what, mend);
                }
                return None;
            }
        };
        Some(RateLimit { amount, name, replaces: replaces? })
    }

    fn replaces(&mut self, limit: &Fields<'_>, own: Option<&str>) -> Option<Vec<(String, Place)>> {
        let Some(node) = limit.get("replaces").filter(|node| node.value != Value::Null) else {
            return Some(Vec::new());
        };
        let mut names = Vec::new();
        for item in decode::items(node, "rate_limit.replaces", self.faults)? {
            let fields = Fields::of(item, "replaces", &["name"], self.faults)?;
            let name = self.scalar(&fields, "name", |text| Ok(text.to_owned()))?.unwrap_or_default();
            let wrong = if name.is_empty() {
                Some(("`replaces` names nothing", "give it the `name` of the limit that it replaces"))
            } else if own == Some(name.as_str()) {
                Some(("`replaces` names the limit that it belongs to", "name another one, or remove it"))
            } else {
                None
            };
            match wrong {
                Some((what, mend)) => self.faults.push(&item.mark, what, mend),
                None => names.push((name, self.place(&item.mark))),
            }
        }
        Some(names)
    }

    /// `Some(false)` where the key is not there; `None`: there is a fault.
    fn flag(&mut self, fields: &Fields<'_>, key: &str) -> Option<bool> {
        self.scalar(fields, key, boolean).map(|flag| flag.unwrap_or(false))
    }

    /// `Some(None)` where the key is not there, or has nothing behind it; `None`: there is a fault.
    fn scalar<T>(
        &mut self,
        fields: &Fields<'_>,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, Wrong>,
    ) -> Option<Option<T>> {
        match fields.get(key).map(|node| &node.value) {
            None | Some(Value::Null) => Some(None),
            Some(_) => fields.read(key, self.faults, parse).map(Some),
        }
    }

    fn place(&self, mark: &Mark) -> Place {
        Place { file: Arc::clone(&self.file), order: self.order, mark: mark.clone() }
    }
}

/// No two descriptors of a level may have the same key and value.
fn distinct(earlier: &[Descriptor], later: &[Descriptor], faults: &mut Faults) {
    let name = |d: &Descriptor| (d.key.clone(), d.value.clone());
    let mut known: HashMap<_, &Descriptor> = earlier.iter().map(|d| (name(d), d)).collect();
    for descriptor in later {
        let Some(first) = known.get(&name(descriptor)) else {
            known.insert(name(descriptor), descriptor);
            continue;
        };
        let named = match &descriptor.value {
            Some(value) => {
                format!("the descriptor {} with the value {}", shown(&descriptor.key), shown(value))
            }
            None => format!("the descriptor {} without a value", shown(&descriptor.key)),
        };
        let what = format!("{named} is there twice");
        faults.push(&descriptor.place.mark, what, format!("remove this one or the one at {}", first.place));
    }
}

/// As that service's YAML reader takes it (YAML 1.1).
fn boolean(text: &str) -> Result<bool, Wrong> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "y" => Ok(true),
        "false" | "no" | "off" | "n" => Ok(false),
        _ => Err(Wrong::new(format!("is {}", shown(text)), "write `true` or `false`")),
    }
}

fn unit(text: &str) -> Result<Unit, Wrong> {
    Unit::ALL.into_iter().find(|unit| unit.name().eq_ignore_ascii_case(text)).ok_or_else(|| {
        let mend = format!("write {}", one_of(&Unit::ALL.map(Unit::name)));
        Wrong::new(format!("is an unknown unit of time: {}", shown(text)), mend)
    })
}

fn empty(node: &Node) -> Node {
    Node { mark: node.mark.clone(), value: Value::Text(String::new()) }
}
