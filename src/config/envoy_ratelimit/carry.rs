//! A tree of descriptors to limits that match here what they matched there.
//!
//! There, an entry of a request goes to *one* descriptor of a level: the exact value, else the first that fits of those with a
//! `*`, else the bare key; what is below the others is out of reach from then on. Here, the most exact policy *that there is*
//! counts. So where a more exact descriptor has nothing below it that fits, and a less exact one has, a policy without a limit
//! takes that place ([`Kind::Exempt`]).

use super::read::{Descriptor, Domain, RateLimit};
use super::{Lost, Place};
use crate::config::policies::{KEY_BYTES_MAX, POLICIES_MAX, VALUE_BYTES_MAX};
use crate::quota::matching::ENTRIES_MAX;
use crate::quota::policy::{KeyMatch, Unit, ValueMatch};
use std::collections::{BTreeSet, HashSet};

/// What is carried over.
#[derive(Default)]
pub(super) struct Carried {
    /// In the order of the files and their lines.
    pub(super) limits: Vec<Limit>,
    pub(super) lost: Vec<Lost>,
    /// What that service never reached: nothing is lost with it.
    pub(super) unreached: Vec<Place>,
}

/// What becomes one policy.
pub(super) struct Limit {
    pub(super) place: Place,
    pub(super) domain: String,
    /// Unique.
    pub(super) name: String,
    pub(super) matches: Vec<KeyMatch>,
    pub(super) kind: Kind,
    /// What people should know about it.
    pub(super) notes: Vec<String>,
}

/// What a policy allows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// So many requests in a unit.
    Limited { amount: u32, unit: Unit, shadow: bool },
    /// `unlimited: true`, or a descriptor with no limit and nothing below it.
    Unlimited,
    /// There a more exact descriptor kept requests from this place, and here nothing else would.
    Exempt,
}

pub(super) fn carry(domains: &[Domain]) -> Carried {
    let mut carried = Carried::default();
    let mut names = Names::default();
    for domain in domains {
        let mut level = Level::new(domain);
        let mut found = level.carry(&domain.descriptors);
        found.sort_by(|a, b| a.order().cmp(&b.order()));
        if found.len() > POLICIES_MAX || level.many {
            level.too_many(found.len());
        }
        carried.lost.append(&mut level.lost);
        carried.unreached.append(&mut level.unreached);
        carried.limits.extend(found.into_iter().map(|found| found.limit(domain, &mut names)));
    }
    carried
}

/// A limit, or the lack of one, below some descriptors.
#[derive(Clone)]
struct Found<'d> {
    descriptor: &'d Descriptor,
    /// From the level on that is looked at.
    path: Vec<KeyMatch>,
    kind: Kind,
    notes: Vec<String>,
}

/// One level of descriptors, and all below it.
struct Level<'d> {
    domain: &'d Domain,
    /// The names that limits of this domain have.
    names: BTreeSet<&'d str>,
    lost: Vec<Lost>,
    unreached: Vec<Place>,
    many: bool,
}

impl<'d> Level<'d> {
    fn new(domain: &'d Domain) -> Self {
        let names = limit_names(&domain.descriptors);
        Self { domain, names, lost: Vec::new(), unreached: Vec::new(), many: false }
    }

    fn carry(&mut self, descriptors: &'d [Descriptor]) -> Vec<Found<'d>> {
        let mut keys: Vec<&str> = Vec::new();
        let mut seen = HashSet::new();
        keys.extend(descriptors.iter().map(|d| d.key.as_str()).filter(|key| seen.insert(*key)));
        let mut all = Vec::new();
        for key in keys {
            let of_key: Vec<&Descriptor> = descriptors.iter().filter(|d| d.key == key).collect();
            all.extend(self.carry_key(&of_key));
        }
        all
    }

    /// Descriptors of one level with one key: the least exact first, so that those that are more exact see what they hide.
    fn carry_key(&mut self, descriptors: &[&'d Descriptor]) -> Vec<Found<'d>> {
        let mut siblings: Vec<(KeyMatch, &'d Descriptor)> = Vec::new();
        for descriptor in descriptors {
            match key_match(descriptor) {
                Ok(entry) => siblings.push((entry, *descriptor)),
                Err((what, mend)) => self.lose(&descriptor.place, what, mend),
            }
        }
        let mut done: Vec<(KeyMatch, Vec<Found<'d>>)> = Vec::new();
        for (entry, descriptor) in in_order(siblings, &mut self.unreached).into_iter().rev() {
            let mut found = self.below(descriptor);
            for (_, others) in done.iter().filter(|(other, _)| overlap(&entry.value, &other.value)) {
                for other in others {
                    let own: Vec<&[KeyMatch]> = found.iter().map(|own| own.path.as_slice()).collect();
                    let exempt = hidden(&own, &other.path).into_iter().map(|path| {
                        let kind = Kind::Exempt;
                        Found { descriptor, path, kind, notes: Vec::new() }
                    });
                    found.extend(exempt.collect::<Vec<_>>());
                }
                if found.len() > POLICIES_MAX {
                    self.many = true;
                    break;
                }
            }
            done.push((entry, found));
        }
        let with_entry = |(entry, found): (KeyMatch, Vec<Found<'d>>)| {
            found.into_iter().map(move |mut found| {
                found.path.insert(0, entry.clone());
                found
            })
        };
        done.into_iter().flat_map(with_entry).collect()
    }

    /// What a descriptor itself says, and what is below it.
    fn below(&mut self, descriptor: &'d Descriptor) -> Vec<Found<'d>> {
        let mut all = Vec::new();
        let mut notes = Vec::new();
        let kind = match &descriptor.limit {
            None if descriptor.descriptors.is_empty() => Some(Kind::Unlimited),
            None => None,
            Some(limit) => {
                self.replaces(limit, &mut notes);
                Some(match limit.amount {
                    None => Kind::Unlimited,
                    Some((amount, unit)) => Kind::Limited { amount, unit, shadow: descriptor.shadow },
                })
            }
        };
        self.foreign(descriptor);
        if let Some(kind) = kind {
            all.push(Found { descriptor, path: Vec::new(), kind, notes });
        }
        let below = self.carry(&descriptor.descriptors);
        let (fit, deep): (Vec<_>, Vec<_>) =
            below.into_iter().partition(|found| found.path.len() < ENTRIES_MAX);
        if let Some(found) = deep.first() {
            let what = format!("descriptors more than {ENTRIES_MAX} levels deep");
            self.lose(&found.descriptor.place, what, "no request may have as many entries here".into());
        }
        all.extend(fit);
        all
    }

    fn replaces(&mut self, limit: &RateLimit, notes: &mut Vec<String>) {
        for (name, place) in &limit.replaces {
            if self.names.contains(name.as_str()) {
                let what = format!("`replaces: {name}`: here both limits hold");
                let mend = "send only one of the two descriptors, or raise the limit that is in the way";
                self.lose(place, what, mend.into());
            } else {
                notes.push(format!("it replaced `{name}`, a limit that these files do not have"));
            }
        }
    }

    fn foreign(&mut self, descriptor: &Descriptor) {
        for (name, place) in &descriptor.foreign {
            let (what, mend) = match *name {
                "quota_mode" => (
                    "`quota_mode`: here this limit denies by itself, whatever the request's other limits say",
                    "send its descriptor in a request of its own",
                ),
                "metadata" => (
                    "`metadata`: here the dynamic metadata of an answer are the policy, its mode and what is left",
                    "let Envoy look it up by the policy's name",
                ),
                "detailed_metric" => (
                    "`detailed_metric`: here metrics are by policy, however many values there are",
                    "`quorate top` and /v1/buckets show single values; policies with exact values have metrics of their own",
                ),
                _ => (
                    "`value_to_metric`: here metrics are by policy, however many values there are",
                    "`quorate top` and /v1/buckets show single values; policies with exact values have metrics of their own",
                ),
            };
            self.lose(place, what.into(), mend.into());
        }
    }

    fn too_many(&mut self, count: usize) {
        let Some(first) = self.domain.descriptors.first() else { return };
        let what = format!("the domain `{}` needs {count} policies or more", self.domain.name);
        let mend =
            format!("at most {POLICIES_MAX} are possible: put values with the same limit under one `*`");
        self.lose(&first.place, what, mend);
    }

    fn lose(&mut self, place: &Place, what: String, mend: String) {
        self.lost.push(Lost { place: place.clone(), what, mend });
    }
}

impl Found<'_> {
    fn order(&self) -> (super::PlaceKey<'_>, bool) {
        (self.descriptor.place.key(), self.kind == Kind::Exempt)
    }

    fn limit(self, domain: &Domain, names: &mut Names) -> Limit {
        let Found { descriptor, path, kind, mut notes } = self;
        let own = descriptor.limit.as_ref().and_then(|limit| limit.name.as_deref());
        let own = own.filter(|_| kind != Kind::Exempt);
        let name = names.unique(own.map_or_else(|| written(&domain.name, &path), str::to_owned));
        notes.extend(own.filter(|own| *own != name).map(|own| format!("there its name is `{own}`")));
        Limit {
            place: descriptor.place.clone(),
            domain: domain.name.clone(),
            name,
            matches: path,
            kind,
            notes,
        }
    }
}

/// The most exact first. Of those with a `*` the first that fits counts there; here the longest: so one that could never be
/// reached there is left out, and the order of the rest makes no difference.
fn in_order<'d>(
    siblings: Vec<(KeyMatch, &'d Descriptor)>,
    unreached: &mut Vec<Place>,
) -> Vec<(KeyMatch, &'d Descriptor)> {
    let (exact, loose): (Vec<_>, Vec<_>) =
        siblings.into_iter().partition(|(entry, _)| matches!(entry.value, ValueMatch::Exact(_)));
    let (starred, bare): (Vec<_>, Vec<_>) = loose.into_iter().partition(|(_, d)| d.value.is_some());
    let mut reached: Vec<(KeyMatch, &Descriptor)> = Vec::new();
    for (entry, descriptor) in starred.into_iter().chain(bare) {
        if reached.iter().any(|(earlier, _)| value_covers(&earlier.value, &entry.value)) {
            unreached.push(descriptor.place.clone());
        } else {
            reached.push((entry, descriptor));
        }
    }
    reached.sort_by_key(|(entry, _)| std::cmp::Reverse(prefix(&entry.value).map_or(0, str::len)));
    exact.into_iter().chain(reached).collect()
}

fn key_match(descriptor: &Descriptor) -> Result<KeyMatch, (String, String)> {
    let Descriptor { key, value, shared, .. } = descriptor;
    let lost = |what: &str, mend: &str| {
        Err((format!("{what}: this descriptor and what is below it"), mend.to_owned()))
    };
    if key.contains('*') {
        return lost("a `*` in a key", "name each key");
    }
    if key.len() > KEY_BYTES_MAX || value.as_ref().is_some_and(|value| value.len() > VALUE_BYTES_MAX) {
        return lost("a key or value that is too long", "send a hash of it");
    }
    let value = match value.as_deref().map(|value| (value, value.strip_suffix('*'))) {
        None => ValueMatch::Any,
        Some((value, None)) if !value.contains('*') => ValueMatch::Exact(value.into()),
        Some((_, Some(start))) if start.ends_with('\\') => {
            return lost("a value that ends with `\\*`", "use a start without the backslash");
        }
        Some((_, Some(start))) if !start.contains('*') => match (start, shared) {
            (_, true) => ValueMatch::Shared(start.into()),
            ("", false) => ValueMatch::Any,
            (_, false) => ValueMatch::Prefix(start.into()),
        },
        Some(_) => {
            return lost(
                "a `*` that is not at the end of a value",
                "name the start that these values have in common",
            );
        }
    };
    Ok(KeyMatch { key: key.as_str().into(), value })
}

/// Where policies without a limit must stand below a descriptor, so that what it keeps from a path of a less exact one stays out of
/// reach, and its own paths do not. An entry goes to one descriptor of a level here, too: so the path goes on below those that take
/// some of its entries, whatever else they take, and stands for itself where they do not take all.
fn hidden(own: &[&[KeyMatch]], path: &[KeyMatch]) -> Vec<Vec<KeyMatch>> {
    let Some((first, rest)) = path.split_first() else {
        return if own.iter().any(|own| own.is_empty()) { Vec::new() } else { vec![Vec::new()] };
    };
    let tails = own.iter().filter_map(|own| own.split_first());
    let mut below: Vec<(&KeyMatch, Vec<&[KeyMatch]>)> = Vec::new();
    for (head, tail) in tails.filter(|(head, _)| head.key == first.key && overlap(&head.value, &first.value))
    {
        match below.iter_mut().find(|(other, _)| *other == head) {
            Some((_, tails)) => tails.push(tail),
            None => below.push((head, vec![tail])),
        }
    }
    let mut paths = Vec::new();
    for (head, tails) in &below {
        let with_head = |tail: Vec<KeyMatch>| std::iter::once((*head).clone()).chain(tail).collect();
        paths.extend(hidden(tails, rest).into_iter().map(with_head));
    }
    if !below.iter().any(|(head, _)| value_covers(&head.value, &first.value)) {
        paths.push(path.to_vec());
    }
    paths
}

fn value_covers(value: &ValueMatch, other: &ValueMatch) -> bool {
    match (value, other) {
        (ValueMatch::Exact(value), ValueMatch::Exact(other)) => value == other,
        (ValueMatch::Exact(_), _) => false,
        (value, ValueMatch::Exact(other)) => prefix(value).is_some_and(|start| other.starts_with(start)),
        (value, other) => match (prefix(value), prefix(other)) {
            (Some(start), Some(other)) => other.starts_with(start),
            _ => false,
        },
    }
}

/// Is there a value that both match?
fn overlap(value: &ValueMatch, other: &ValueMatch) -> bool {
    value_covers(value, other) || value_covers(other, value)
}

/// What values have to begin with; `None`: they have to be one.
fn prefix(value: &ValueMatch) -> Option<&str> {
    match value {
        ValueMatch::Exact(_) => None,
        ValueMatch::Prefix(start) | ValueMatch::Shared(start) => Some(start),
        ValueMatch::Any => Some(""),
    }
}

/// The names of all limits.
fn limit_names(descriptors: &[Descriptor]) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    let mut left: Vec<&Descriptor> = descriptors.iter().collect();
    while let Some(descriptor) = left.pop() {
        names.extend(descriptor.limit.as_ref().and_then(|limit| limit.name.as_deref()));
        left.extend(&descriptor.descriptors);
    }
    names
}

/// A policy's name as that service calls a limit in its statistics: `domain.key_value.key`.
fn written(domain: &str, path: &[KeyMatch]) -> String {
    path.iter().fold(domain.to_owned(), |name, KeyMatch { key, value }| match value {
        ValueMatch::Any => format!("{name}.{key}"),
        ValueMatch::Exact(value) => format!("{name}.{key}_{value}"),
        ValueMatch::Prefix(start) | ValueMatch::Shared(start) => format!("{name}.{key}_{start}"),
    })
}

/// Names that are taken.
#[derive(Default)]
struct Names(HashSet<String>);

impl Names {
    /// The name, in the characters that a policy's may have, and another than all before.
    fn unique(&mut self, name: String) -> String {
        const BYTES_MAX: usize = 120;
        let fits = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
        let name: String = name.chars().map(|c| if fits(c) { c } else { '-' }).take(BYTES_MAX).collect();
        let numbered = (2_u32..).map(|n| format!("{name}-{n}"));
        let unique = std::iter::once(name.clone()).chain(numbered).find(|name| !self.0.contains(name));
        let unique = unique.unwrap_or(name);
        self.0.insert(unique.clone());
        unique
    }
}
