//! A request's descriptors or attributes become charges: which buckets, and how much from each.
//!
//! Policies are compiled once, when they change. A request then costs a few hash lookups, however many policies
//! there are, and allocates only its answer.
//!
//! - A **descriptor** is an ordered list of entries. It is matched by the policies whose `match` has the same keys in
//!   the same order; of those the most exact one counts, position by position: an exact value, then the longest
//!   prefix, then any value.
//! - **Attributes** are a flat map. They are matched by every policy whose keys are all present with values that fit. (A policy
//!   whose `match` names a key twice is for descriptors alone.)

use super::amount::{Micros, Tokens};
use super::policy::{BucketId, KeyMatch, Policy, TokenBucket, ValueMatch, Window};
use super::redaction::Redaction;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

/// The most descriptors of one request.
pub const DESCRIPTORS_MAX: usize = 64;
/// The most entries of one descriptor, and the most keys of one policy's `match`.
pub const ENTRIES_MAX: usize = 32;
/// The most attributes of one request.
pub const ATTRIBUTES_MAX: usize = 64;
/// The most bytes that the keys and values of one descriptor, or of all attributes, may have together.
pub const ENTRIES_BYTES_MAX: usize = 16 * 1024;
/// The most bytes of a domain's name.
pub const DOMAIN_BYTES_MAX: usize = 255;
/// The most limits that one request may be charged against.
pub const CHARGES_MAX: usize = 64;
/// The greatest cost of one request, and the most that it may give back.
pub const COST_MAX: Tokens = Tokens::whole(1 << 31);

/// What a caller asks.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The namespace of its descriptors or attributes.
    pub domain: &'a str,
    /// What it is about.
    pub subject: Subject<'a>,
    /// What it costs at each limit: 0 asks without spending, less than 0 gives back. A descriptor may have its own.
    pub cost: Tokens,
}

impl Request<'_> {
    /// How many descriptors it has; attributes count as one.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        match self.subject {
            Subject::Descriptors(descriptors) => descriptors.len(),
            Subject::Attributes(_) => 1,
        }
    }
}

/// What a request is about.
#[derive(Clone, Copy, Debug)]
pub enum Subject<'a> {
    /// Envoy's way: each descriptor is matched by one policy at most.
    Descriptors(&'a [Descriptor<'a>]),
    /// A flat map (each key once), matched by every policy that fits; an empty one by none.
    Attributes(&'a [(&'a str, &'a str)]),
}

/// An ordered list of keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor<'a> {
    /// Keys and values, in their order.
    pub entries: &'a [(&'a str, &'a str)],
    /// Its own cost instead of the request's.
    pub cost: Option<Tokens>,
    /// A limit that came with it (Envoy's override) and replaces the policy's.
    pub limit: Option<TokenBucket>,
}

/// What a request is charged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// In the order of the descriptors; for attributes in the order of the policies. Two descriptors may name the
    /// same bucket twice: then both charges count.
    pub charges: Vec<Charge>,
    /// Descriptors that nothing matched, in order; attributes count as descriptor 0.
    pub unmatched: Vec<usize>,
    /// Does any policy belong to the request's domain?
    pub domain_known: bool,
}

/// One charge against one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Whose limit it is.
    pub limit: ChargeLimit,
    /// Which bucket.
    pub bucket: BucketId,
    /// Tokens; 0 asks without taking, less than 0 gives back.
    pub cost: Tokens,
    /// The descriptor that it comes from; 0 for attributes.
    pub descriptor: usize,
}

impl Charge {
    /// The id of the policy that matched, if one did (an override needs none).
    #[must_use]
    pub const fn policy(&self) -> Option<u32> {
        match self.limit {
            ChargeLimit::Policy(id) => Some(id),
            ChargeLimit::Override { policy, .. } => policy,
        }
    }
}

/// Whose limit a charge is held against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeLimit {
    /// The policy with this id.
    Policy(u32),
    /// The limit that came with the descriptor. It holds in this region alone.
    Override {
        /// The limit.
        limit: TokenBucket,
        /// The policy whose limit it replaces, if one matched.
        policy: Option<u32>,
    },
}

/// Policies, compiled for matching.
#[derive(Clone, Debug, Default)]
pub struct Matcher {
    domains: HashMap<Arc<str>, Domain>,
    redaction: Redaction,
}

impl Matcher {
    /// Compiles policies, each with its id. Of two in one domain with the same `match` (which `config` refuses)
    /// descriptors go by the first.
    #[must_use]
    pub fn new<'p>(policies: impl IntoIterator<Item = (u32, &'p Policy)>) -> Self {
        let mut domains: HashMap<Arc<str>, Domain> = HashMap::new();
        for (id, policy) in policies {
            domains.entry(Arc::clone(&policy.domain)).or_default().add(id, policy);
        }
        Self { domains, redaction: Redaction::default() }
    }

    /// The same, but buckets are named after what stands for redacted values.
    #[must_use]
    pub fn redacting(self, redaction: Redaction) -> Self {
        Self { redaction, ..self }
    }

    /// Does any policy belong to this domain?
    #[must_use]
    pub fn knows(&self, domain: &str) -> bool {
        self.domains.contains_key(domain)
    }

    /// What the request is to be charged.
    ///
    /// # Errors
    /// The request is malformed or too large: see [`RequestFault`].
    pub fn charges(&self, request: &Request<'_>) -> Result<Matched, RequestFault> {
        check_domain(request.domain)?;
        check_cost(request.cost, Place::Request)?;
        let domain = self.domains.get(request.domain);
        let mut matched = Matched { domain_known: domain.is_some(), ..Matched::default() };
        match request.subject {
            Subject::Descriptors(descriptors) => {
                check_descriptors(descriptors)?;
                matched.charges.reserve_exact(descriptors.len());
                for (index, descriptor) in descriptors.iter().enumerate() {
                    match domain.and_then(|d| d.charge(request, index, descriptor, &self.redaction)) {
                        Some(charge) => matched.charges.push(charge),
                        None => matched.unmatched.push(index),
                    }
                }
            }
            Subject::Attributes(attributes) => {
                check_attributes(attributes)?;
                if let Some(domain) = domain {
                    matched.charges = domain.charge_attributes(request.cost, attributes, &self.redaction)?;
                }
                if matched.charges.is_empty() {
                    matched.unmatched.push(0);
                }
            }
        }
        Ok(matched)
    }
}

/// Names the bucket of a policy for these values of its keys (in the order of the policy's `match`).
///
/// A 128-bit prefix of BLAKE3 over the policy's name and each key and value, every one with its length in front: no
/// two different inputs feed it the same bytes.
#[must_use]
pub fn bucket_id<'a>(policy: &str, entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> BucketId {
    Redaction::default().bucket_id(policy, entries)
}

impl Redaction {
    /// The same as [`bucket_id`] where nothing is redacted.
    #[must_use]
    pub fn bucket_id<'a>(
        &self,
        policy: &str,
        entries: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> BucketId {
        let mut hash = Separated::new(b"policy");
        hash.text(policy);
        for (key, value) in entries {
            hash.text(key).value(self, key, value);
        }
        hash.finish()
    }

    /// The same as [`override_bucket_id`] where nothing is redacted.
    #[must_use]
    pub fn override_bucket_id(
        &self,
        domain: &str,
        entries: &[(&str, &str)],
        limit: &TokenBucket,
    ) -> BucketId {
        let mut hash = Separated::new(b"override");
        hash.text(domain);
        hash.number(limit.amount).number(limit.per.seconds().unsigned_abs()).number(limit.burst);
        for (key, value) in entries {
            hash.text(key).value(self, key, value);
        }
        hash.finish()
    }
}

/// The bucket of a policy for these values, in any order; `None`: it does not match them. Of a key that the policy names twice the
/// first value is for the first of them.
#[must_use]
pub fn bucket_of(redaction: &Redaction, policy: &Policy, values: &[(&str, &str)]) -> Option<BucketId> {
    let mut left = values.to_vec();
    let entries: Option<Vec<(&str, &str)>> = policy
        .matches
        .iter()
        .map(|m| {
            let at = left.iter().position(|(key, _)| *key == &*m.key)?;
            let entry = left.remove(at);
            value_fits(&m.value, entry.1).then_some(entry)
        })
        .collect();
    Some(policy_bucket_id(redaction, &policy.name, &policy.matches, entries?.into_iter()))
}

/// Values that share a bucket are named by what they have in common. (All buckets of a policy do so at the same keys.)
fn policy_bucket_id<'a>(
    redaction: &Redaction,
    policy: &str,
    matches: &'a [KeyMatch],
    entries: impl Iterator<Item = (&'a str, &'a str)>,
) -> BucketId {
    let named = matches.iter().zip(entries).map(|(m, (key, value))| match &m.value {
        ValueMatch::Shared(prefix) => (key, &**prefix),
        ValueMatch::Exact(_) | ValueMatch::Prefix(_) | ValueMatch::Any => (key, value),
    });
    redaction.bucket_id(policy, named)
}

/// Names the bucket of one window of a policy's quota; `bucket` is what [`bucket_id`] calls it in all windows. Windows of
/// different kinds have different buckets, also where they begin together.
#[must_use]
pub fn window_bucket(bucket: BucketId, window: Window, start: Micros) -> BucketId {
    let mut hash = Separated::new(b"window");
    hash.0.update(&bucket.0);
    hash.text(&window.to_string()).number(start.0.unsigned_abs());
    hash.finish()
}

/// Names the bucket of a limit that came with a descriptor: it is not the bucket of any policy, nor of any other
/// domain, descriptor or limit.
#[must_use]
pub fn override_bucket_id(domain: &str, entries: &[(&str, &str)], limit: &TokenBucket) -> BucketId {
    Redaction::default().override_bucket_id(domain, entries, limit)
}

/// A hash of parts that cannot run into each other.
struct Separated(blake3::Hasher);

impl Separated {
    fn new(kind: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(kind);
        Self(hasher)
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.number(u64::try_from(text.len()).unwrap_or(u64::MAX));
        self.0.update(text.as_bytes());
        self
    }

    /// A redacted value goes in as its hash, behind a length that no text has.
    fn value(&mut self, redaction: &Redaction, key: &str, value: &str) -> &mut Self {
        match redaction.hash(key, value) {
            None => self.text(value),
            Some(hash) => {
                self.number(u64::MAX).0.update(&hash);
                self
            }
        }
    }

    fn number(&mut self, number: u64) -> &mut Self {
        self.0.update(&number.to_le_bytes());
        self
    }

    fn finish(&self) -> BucketId {
        let mut id = BucketId::default();
        self.0.finalize_xof().fill(&mut id.0);
        id
    }
}

/// The policies of one domain.
#[derive(Clone, Debug, Default)]
struct Domain {
    /// In the order in which they were given.
    rules: Vec<Rule>,
    /// For descriptors: one level for each entry.
    root: Level,
    /// For attributes: each policy under its most telling key.
    anchors: HashMap<Arc<str>, Values<Vec<usize>>>,
}

/// What matching needs to know of a policy.
#[derive(Clone, Debug)]
struct Rule {
    id: u32,
    name: Arc<str>,
    matches: Vec<KeyMatch>,
}

/// Where a descriptor stands after some of its entries.
#[derive(Clone, Debug, Default)]
struct Level {
    /// The rule that ends here.
    rule: Option<usize>,
    /// By the next entry's key.
    next: HashMap<Arc<str>, Values<Level>>,
}

/// Something for each way in which a value can match.
#[derive(Clone, Debug, Default)]
struct Values<T> {
    exact: HashMap<Arc<str>, T>,
    /// By length, the longest first.
    prefixes: BTreeMap<Reverse<usize>, HashMap<Arc<str>, T>>,
    any: Option<T>,
}

impl Domain {
    fn add(&mut self, id: u32, policy: &Policy) {
        let rule = self.rules.len();
        let mut level = &mut self.root;
        for KeyMatch { key, value } in &policy.matches {
            level = level.next.entry(Arc::clone(key)).or_default().slot(value);
        }
        level.rule.get_or_insert(rule);
        let anchor = policy.matches.iter().min_by_key(|m| exactness(&m.value));
        if let Some(KeyMatch { key, value }) = anchor.filter(|_| !names_a_key_twice(&policy.matches)) {
            self.anchors.entry(Arc::clone(key)).or_default().slot(value).push(rule);
        }
        self.rules.push(Rule { id, name: Arc::clone(&policy.name), matches: policy.matches.clone() });
    }

    /// The charge for one descriptor, if a policy matches it or it brings its own limit.
    fn charge(
        &self,
        request: &Request<'_>,
        index: usize,
        descriptor: &Descriptor<'_>,
        redaction: &Redaction,
    ) -> Option<Charge> {
        let Descriptor { entries, cost, limit } = *descriptor;
        let rule = self.root.find(entries).and_then(|rule| self.rules.get(rule));
        let (limit, bucket) = match (limit, rule) {
            (Some(limit), rule) => (
                ChargeLimit::Override { limit, policy: rule.map(|r| r.id) },
                redaction.override_bucket_id(request.domain, entries, &limit),
            ),
            (None, Some(rule)) => {
                let entries = entries.iter().copied();
                let bucket = policy_bucket_id(redaction, &rule.name, &rule.matches, entries);
                (ChargeLimit::Policy(rule.id), bucket)
            }
            (None, None) => return None,
        };
        Some(Charge { limit, bucket, cost: cost.unwrap_or(request.cost), descriptor: index })
    }

    /// A charge for every policy that fits, in the order of the policies.
    fn charge_attributes(
        &self,
        cost: Tokens,
        attributes: &[(&str, &str)],
        redaction: &Redaction,
    ) -> Result<Vec<Charge>, RequestFault> {
        let mut fits = Fits::default();
        for (key, value) in attributes {
            let Some(values) = self.anchors.get(*key) else { continue };
            for rule in values.matching(value).flatten().copied() {
                if self.rules.get(rule).is_some_and(|r| r.fits(attributes)) {
                    fits.push(rule)?;
                }
            }
        }
        let mut charges = Vec::with_capacity(fits.len);
        for rule in fits.sorted().iter().filter_map(|&rule| self.rules.get(rule)) {
            let entries = rule.matches.iter().filter_map(|m| Some((&*m.key, value_of(attributes, &m.key)?)));
            let bucket = policy_bucket_id(redaction, &rule.name, &rule.matches, entries);
            charges.push(Charge { limit: ChargeLimit::Policy(rule.id), bucket, cost, descriptor: 0 });
        }
        Ok(charges)
    }
}

impl Rule {
    fn fits(&self, attributes: &[(&str, &str)]) -> bool {
        self.matches
            .iter()
            .all(|m| value_of(attributes, &m.key).is_some_and(|value| value_fits(&m.value, value)))
    }
}

impl Level {
    /// The rule for exactly these entries; the most exact one, position by position. Each level is visited once at
    /// most; the depth is that of the policies.
    fn find(&self, entries: &[(&str, &str)]) -> Option<usize> {
        match entries.split_first() {
            None => self.rule,
            Some(((key, value), rest)) => {
                self.next.get(*key)?.matching(value).find_map(|level| level.find(rest))
            }
        }
    }
}

impl<T: Default> Values<T> {
    fn slot(&mut self, value: &ValueMatch) -> &mut T {
        match value {
            ValueMatch::Exact(text) => self.exact.entry(Arc::clone(text)).or_default(),
            ValueMatch::Any => self.any.get_or_insert_default(),
            ValueMatch::Shared(text) if text.is_empty() => self.any.get_or_insert_default(),
            ValueMatch::Prefix(text) | ValueMatch::Shared(text) => {
                let same_length = self.prefixes.entry(Reverse(text.len())).or_default();
                same_length.entry(Arc::clone(text)).or_default()
            }
        }
    }
}

impl<T> Values<T> {
    /// What fits a value, the most exact first.
    fn matching<'s>(&'s self, value: &'s str) -> impl Iterator<Item = &'s T> {
        let prefixes =
            self.prefixes.iter().filter_map(move |(Reverse(length), map)| map.get(value.get(..*length)?));
        self.exact.get(value).into_iter().chain(prefixes).chain(&self.any)
    }
}

/// Rules that fit, in a buffer of its own: no allocation, and never more than a request may be charged for.
struct Fits {
    rules: [usize; CHARGES_MAX],
    len: usize,
}

impl Default for Fits {
    fn default() -> Self {
        Self { rules: [0; CHARGES_MAX], len: 0 }
    }
}

impl Fits {
    fn push(&mut self, rule: usize) -> Result<(), RequestFault> {
        *self.rules.get_mut(self.len).ok_or(RequestFault::TooManyCharges)? = rule;
        self.len = self.len.saturating_add(1);
        Ok(())
    }

    fn sorted(&mut self) -> &[usize] {
        let rules = self.rules.get_mut(..self.len).unwrap_or_default();
        rules.sort_unstable();
        rules
    }
}

/// The smaller, the fewer requests it fits.
const fn exactness(value: &ValueMatch) -> u8 {
    match value {
        ValueMatch::Exact(_) => 0,
        ValueMatch::Prefix(_) | ValueMatch::Shared(_) => 1,
        ValueMatch::Any => 2,
    }
}

fn value_fits(rule: &ValueMatch, value: &str) -> bool {
    match rule {
        ValueMatch::Exact(text) => **text == *value,
        ValueMatch::Prefix(text) | ValueMatch::Shared(text) => value.starts_with(&**text),
        ValueMatch::Any => true,
    }
}

fn names_a_key_twice(matches: &[KeyMatch]) -> bool {
    matches.iter().enumerate().any(|(at, m)| matches.iter().take(at).any(|earlier| earlier.key == m.key))
}

fn value_of<'a>(attributes: &[(&str, &'a str)], key: &str) -> Option<&'a str> {
    attributes.iter().find(|(k, _)| *k == key).map(|(_, value)| *value)
}

fn check_domain(domain: &str) -> Result<(), RequestFault> {
    match domain.len() {
        0 => Err(RequestFault::EmptyDomain),
        1..=DOMAIN_BYTES_MAX => Ok(()),
        bytes => Err(RequestFault::DomainTooLong { bytes }),
    }
}

fn check_cost(cost: Tokens, place: Place) -> Result<(), RequestFault> {
    if cost > COST_MAX || cost < -COST_MAX {
        return Err(RequestFault::CostTooLarge { place });
    }
    Ok(())
}

fn check_descriptors(descriptors: &[Descriptor<'_>]) -> Result<(), RequestFault> {
    match descriptors.len() {
        0 => return Err(RequestFault::NoDescriptors),
        1..=DESCRIPTORS_MAX => {}
        count => return Err(RequestFault::TooManyDescriptors { count }),
    }
    for (index, descriptor) in descriptors.iter().enumerate() {
        let place = Place::Descriptor(index);
        match descriptor.entries.len() {
            0 => return Err(RequestFault::NoEntries { place }),
            1..=ENTRIES_MAX => {}
            count => return Err(RequestFault::TooManyEntries { place, count, max: ENTRIES_MAX }),
        }
        check_entries(descriptor.entries, place)?;
        check_cost(descriptor.cost.unwrap_or(Tokens::ZERO), place)?;
    }
    Ok(())
}

fn check_attributes(attributes: &[(&str, &str)]) -> Result<(), RequestFault> {
    let place = Place::Attributes;
    match attributes.len() {
        0..=ATTRIBUTES_MAX => {}
        count => return Err(RequestFault::TooManyEntries { place, count, max: ATTRIBUTES_MAX }),
    }
    check_entries(attributes, place)?;
    for (entry, (key, _)) in attributes.iter().enumerate() {
        if attributes.iter().take(entry).any(|(earlier, _)| earlier == key) {
            return Err(RequestFault::DuplicateKey { place, entry });
        }
    }
    Ok(())
}

fn check_entries(entries: &[(&str, &str)], place: Place) -> Result<(), RequestFault> {
    if let Some(entry) = entries.iter().position(|(key, _)| key.is_empty()) {
        return Err(RequestFault::EmptyKey { place, entry });
    }
    let bytes = entries
        .iter()
        .fold(0, |sum: usize, (key, value)| sum.saturating_add(key.len()).saturating_add(value.len()));
    if bytes > ENTRIES_BYTES_MAX {
        return Err(RequestFault::TooLarge { place, bytes });
    }
    Ok(())
}

/// Where in a request a fault is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The request itself.
    Request,
    /// The attributes.
    Attributes,
    /// The descriptor with this index.
    Descriptor(usize),
}

impl Place {
    /// How the place of one entry is written.
    fn entry(self, entry: usize) -> String {
        match self {
            Self::Descriptor(index) => format!("descriptors[{index}].entries[{entry}]"),
            Self::Attributes | Self::Request => format!("attributes[{entry}]"),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request => f.write_str("the request"),
            Self::Attributes => f.write_str("attributes"),
            Self::Descriptor(index) => write!(f, "descriptors[{index}]"),
        }
    }
}

/// Why a request cannot be checked: the caller's fault, never the limit's. Names the place and the mend, and repeats
/// nothing that the caller sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestFault {
    /// No domain.
    #[error("domain is empty; name the domain of the policies to check")]
    EmptyDomain,
    /// A domain longer than any policy can have.
    #[error("domain has {bytes} bytes; at most {DOMAIN_BYTES_MAX} are possible")]
    DomainTooLong {
        /// Its length.
        bytes: usize,
    },
    /// No descriptors.
    #[error("descriptors is empty; give at least one descriptor")]
    NoDescriptors,
    /// Too many descriptors.
    #[error("descriptors has {count} descriptors; at most {DESCRIPTORS_MAX} are possible in one request")]
    TooManyDescriptors {
        /// How many.
        count: usize,
    },
    /// A descriptor without entries, or no attributes.
    #[error("{place} is empty; give at least one key and value")]
    NoEntries {
        /// Where.
        place: Place,
    },
    /// Too many entries or attributes.
    #[error("{place} has {count} keys; at most {max} are possible")]
    TooManyEntries {
        /// Where.
        place: Place,
        /// How many.
        count: usize,
        /// How many are possible there.
        max: usize,
    },
    /// An empty key.
    #[error("{}.key is empty; give every value a key", place.entry(*entry))]
    EmptyKey {
        /// Where.
        place: Place,
        /// Which of its entries.
        entry: usize,
    },
    /// One attribute twice.
    #[error("{}.key is there twice; give every key once", place.entry(*entry))]
    DuplicateKey {
        /// Where.
        place: Place,
        /// The later of the two.
        entry: usize,
    },
    /// Keys and values that are too large together.
    #[error(
        "{place}: its keys and values have {bytes} bytes; at most {ENTRIES_BYTES_MAX} are possible: send a hash of what is longer"
    )]
    TooLarge {
        /// Where.
        place: Place,
        /// Their size.
        bytes: usize,
    },
    /// A cost that no limit could meet.
    #[error("the cost of {place} is out of range; it may be from -{max} to {max}", max = COST_MAX.floor())]
    CostTooLarge {
        /// Where.
        place: Place,
    },
    /// It matches too many policies.
    #[error("the request matches more than {CHARGES_MAX} policies; send fewer attributes or merge policies")]
    TooManyCharges,
}
