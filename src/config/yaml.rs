//! YAML text to a tree in which every node knows where it was written.
//!
//! Reading into a tree first, and into types from there, is what lets one run report every fault of a file: a
//! deserializer that builds the types itself stops at the first.

use super::fault::{Faults, Mark};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Spanned, UserMessageFormatter};
use std::fmt;
use std::path::Path;

/// The largest file that is read, in bytes.
pub const FILE_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The deepest nesting; no valid file needs more than eight levels.
const DEPTH_MAX: usize = 32;
/// The most nodes, with aliases expanded: the largest policy file there can be has fewer.
const NODES_MAX: usize = 4_000_000;
/// The most events that aliases may stand for.
const REPLAYED_MAX: usize = 200_000;

/// A node and where it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Where.
    pub mark: Mark,
    /// What.
    pub value: Value,
}

/// What a node is. Scalars keep the text that was written (`1.10` stays `1.10`): what it means is for whoever reads
/// the key to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Nothing, `~` or `null`.
    Null,
    /// Any other scalar.
    Text(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in its order. A key may be there twice.
    Map(Vec<(Key, Node)>),
}

/// The key of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Where.
    pub mark: Mark,
    /// Its text.
    pub name: String,
}

impl Value {
    /// What it is, in an error.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "empty",
            Self::Text(_) => "a single value",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
        }
    }
}

/// Reads a file's text.
///
/// # Errors
/// It is too large, or not YAML: one fault, where the reading stopped.
pub fn parse(file: &Path, text: &str) -> Result<Node, Faults> {
    let mut faults = Faults::new(file);
    if text.len() > FILE_BYTES_MAX {
        let what = format!("the file has {} bytes", text.len());
        faults.push(&Mark::START, what, format!("at most {FILE_BYTES_MAX} are possible"));
        return faults.or(None);
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match serde_saphyr::from_str_with_options::<Raw>(text, options()) {
        Ok(raw) => {
            let node = raw.node(text);
            let mark = if node.value == Value::Null { Mark::START } else { node.mark };
            Ok(Node { mark, value: node.value })
        }
        Err(error) => {
            let error = error.without_snippet();
            let mark = error.location().map_or(Mark::START, |l| mark_of(&l));
            let what = error.render_with_formatter(&UserMessageFormatter);
            let what = what.lines().next().unwrap_or_default().trim();
            faults.push(&mark, format!("not valid YAML: {}", strip_place(what)), "mend the YAML there");
            faults.or(None)
        }
    }
}

fn options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 2 * NODES_MAX,
            max_nodes: NODES_MAX,
            max_depth: DEPTH_MAX,
            max_documents: 2,
            max_total_scalar_bytes: 2 * FILE_BYTES_MAX,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: REPLAYED_MAX },
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::PassThrough,
        non_finite_float_policy: serde_saphyr::NonFiniteFloatPolicy::PassThrough,
        strict_booleans: true,
        reject_unsupported_tags: true,
        with_snippet: false,
    }
}

/// The library says the place in the text too; ours is in front of the line already.
fn strip_place(what: &str) -> &str {
    what.split_once(" at line ").map_or(what, |(before, _)| before)
}

fn mark_of(location: &serde_saphyr::Location) -> Mark {
    Mark::At { line: location.line().max(1), column: location.column().max(1) }
}

/// A node as the deserializer gives it.
struct Raw(Spanned<RawValue>);

enum RawValue {
    Null,
    /// A string, with its escapes resolved.
    Text(String),
    /// Plain text that looks like a number or a boolean, and what it was taken for.
    Inferred(String),
    List(Vec<Raw>),
    Map(Vec<(Raw, Raw)>),
}

impl Raw {
    /// `text` is the whole file's.
    fn node(self, text: &str) -> Node {
        let Spanned { value, referenced, defined } = self.0;
        // The place of an alias is where it is used; its text stands where it was defined.
        let mark = mark_of(if referenced.line() == 0 { &defined } else { &referenced });
        let value = match value {
            RawValue::Null => Value::Null,
            RawValue::Text(text) => Value::Text(text),
            RawValue::Inferred(inferred) => {
                let written = written_at(text, &defined).filter(|w| !w.is_empty());
                Value::Text(written.map_or(inferred, str::to_owned))
            }
            RawValue::List(items) => Value::List(items.into_iter().map(|item| item.node(text)).collect()),
            RawValue::Map(entries) => {
                Value::Map(entries.into_iter().map(|(k, v)| (k.key(text), v.node(text))).collect())
            }
        };
        Node { mark, value }
    }

    fn key(self, text: &str) -> Key {
        let Node { mark, value } = self.node(text);
        let name = match value {
            Value::Text(name) => name,
            // No known key looks like this: it is reported as unknown.
            Value::Null | Value::List(_) | Value::Map(_) => format!("({})", value.kind()),
        };
        Key { mark, name }
    }
}

fn written_at<'t>(text: &'t str, location: &serde_saphyr::Location) -> Option<&'t str> {
    let span = location.span();
    let start = usize::try_from(span.byte_offset()?).ok()?;
    let end = start.checked_add(usize::try_from(span.byte_len()?).ok()?)?;
    text.get(start..end).map(str::trim)
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Spanned::deserialize(deserializer).map(Self)
    }
}

impl<'de> Deserialize<'de> for RawValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = RawValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value, a list or a mapping")
    }

    fn visit_unit<E>(self) -> Result<RawValue, E> {
        Ok(RawValue::Null)
    }

    fn visit_none<E>(self) -> Result<RawValue, E> {
        Ok(RawValue::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<RawValue, E> {
        Ok(RawValue::Inferred(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<RawValue, E> {
        Ok(RawValue::Inferred(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<RawValue, E> {
        Ok(RawValue::Inferred(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<RawValue, E> {
        Ok(RawValue::Inferred(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<RawValue, E> {
        Ok(RawValue::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<RawValue, E> {
        Ok(RawValue::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawValue, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(RawValue::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawValue, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(RawValue::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Node {
        parse(Path::new("f.yaml"), text).unwrap()
    }

    fn get<'n>(node: &'n Node, key: &str) -> &'n Node {
        let Value::Map(entries) = &node.value else { panic!("not a map: {node:?}") };
        &entries.iter().find(|(k, _)| k.name == key).unwrap().1
    }

    fn text(node: &Node) -> &str {
        let Value::Text(text) = &node.value else { panic!("not a scalar: {node:?}") };
        text
    }

    #[test]
    fn scalars_keep_what_was_written() {
        let node = read(
            "{a: 1.10, b: 0x10, c: yes, d: TRUE, e: \"q\\n\", f: ~, g: 1e999, h: .nan, i: 007, j: -0, k: '5', \
             l: 12345678901234567890123, m: 2026-01-01, n: é 1, o: 1_0}",
        );
        let texts: Vec<_> = "abcdeghijklmno".chars().map(|k| text(get(&node, &k.to_string()))).collect();
        let written = [
            "1.10",
            "0x10",
            "yes",
            "TRUE",
            "q\n",
            "1e999",
            ".nan",
            "007",
            "-0",
            "5",
            "12345678901234567890123",
            "2026-01-01",
            "é 1",
            "1_0",
        ];
        assert_eq!(texts, written);
        assert_eq!(get(&node, "f").value, Value::Null);
    }

    #[test]
    fn every_node_knows_its_place() {
        let node = read("# é\na:\n  - x\n  - é: 1\n    b: 2\n");
        let Value::List(items) = &get(&node, "a").value else { panic!() };
        assert_eq!(items[0].mark, Mark::At { line: 3, column: 5 });
        let Value::Map(entries) = &items[1].value else { panic!() };
        assert_eq!(entries[0].1.mark, Mark::At { line: 4, column: 8 });
        assert_eq!(entries[1].0.mark, Mark::At { line: 5, column: 5 });
    }

    #[test]
    fn aliases_are_placed_where_they_are_used_and_read_where_they_are_defined() {
        let node = read("a: &x 1.10\nb: *x\n");
        assert_eq!(text(get(&node, "b")), "1.10");
        assert_eq!(get(&node, "b").mark, Mark::At { line: 2, column: 4 });
    }

    #[test]
    fn what_is_not_yaml_is_one_fault_where_the_reading_stopped() {
        let shown = parse(Path::new("f.yaml"), "a: [1, 2\nb: 3\n").unwrap_err().to_string();
        assert!(shown.starts_with("f.yaml:2:"), "{shown}");
        assert_eq!(shown.lines().count(), 1, "{shown}");
        let bomb = "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n\
                    d: &d [*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e]\n\
                    g: [*f,*f,*f,*f,*f,*f]\n";
        assert!(parse(Path::new("f.yaml"), bomb).is_err());
        assert!(parse(Path::new("f.yaml"), &"[".repeat(10_000)).is_err());
        assert!(parse(Path::new("f.yaml"), &"- ".repeat(10_000)).is_err());
    }
}
