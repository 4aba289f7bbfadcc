//! Who may ask a region, and how much of it each may have: the parts of `region.yaml` that [`super::region`] hands over here.

use super::decode::{self, Fields, Wrong};
use super::fault::shown;
use super::region::{Reader, path, secret_text, token};
use super::{CallerLimits, CallerTls, Secret};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CALLER_TLS: &[&str] = &["cert", "key", "client_ca"];
const CALLER_LIMITS: &[&str] =
    &["connections", "connections_per_address", "streams", "new_buckets_per_second", "buckets"];
const TOKENS_MAX: usize = 10_000;
const NAME_BYTES_MAX: usize = 128;

/// Reads a file of callers' tokens: a name and a token a line; empty lines and those that begin with `#` are skipped.
///
/// # Errors
/// What is wrong with it, and the mend; nothing of a token.
pub fn tokens(file: &Path) -> Result<Vec<(Arc<str>, Secret)>, Wrong> {
    let text = secret_text(file)?;
    let mut tokens: Vec<(Arc<str>, Secret)> = Vec::new();
    let (mut names, mut secrets) = (HashSet::new(), HashSet::new());
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = |what: &str, mend: &str| {
            Err(Wrong::new(format!("names a file with a fault: {}:{number}: {what}", file.display()), mend))
        };
        let form = "write `NAME TOKEN` on each line";
        let mut words = line.split_whitespace();
        let (Some(name), Some(word), None) = (words.next(), words.next(), words.next()) else {
            return wrong("it is not a name and a token", form);
        };
        if decode::plain(name, NAME_BYTES_MAX).is_err() {
            return wrong("the name has characters that are not printable, or too many", form);
        }
        let secret = match token(word) {
            Ok(secret) => secret,
            Err(fault) => return wrong(&format!("the token {}", fault.what()), fault.mend()),
        };
        if !names.insert(name) {
            return wrong(&format!("the name {} is there twice", shown(name)), "give each caller one");
        }
        if !secrets.insert(word) {
            return wrong("the token is there twice", "give each caller its own");
        }
        if tokens.len() >= TOKENS_MAX {
            return wrong("there are too many tokens", &format!("at most {TOKENS_MAX} are possible"));
        }
        tokens.push((name.into(), secret));
    }
    if tokens.is_empty() {
        let what = format!("names a file without tokens: {}", file.display());
        return Err(Wrong::new(what, "write `NAME TOKEN` on each line, or leave the key out"));
    }
    Ok(tokens)
}

impl Reader<'_> {
    pub(super) fn caller_tls(&mut self, node: &super::yaml::Node) -> Option<CallerTls> {
        let fields = Fields::of(node, "caller_tls", CALLER_TLS, self.faults)?;
        let cert = self.pem(&fields, "cert", "the file of the listeners' certificate chain");
        let key = self.pem(&fields, "key", "the file of its private key");
        let client_ca = fields.read_or("client_ca", None, self.faults, |t| path(self.folder, t).map(Some));
        Some(CallerTls { cert: cert?, key: key?, client_ca: client_ca? })
    }

    /// `Some(None)`: none is given, and none is needed.
    pub(super) fn caller_tokens_file(&mut self, top: &Fields<'_>) -> Option<Option<PathBuf>> {
        top.read_or("caller_tokens_file", None, self.faults, |text| {
            let file = path(self.folder, text)?;
            tokens(&file)?;
            Ok(Some(file))
        })
    }

    pub(super) fn caller_limits(&mut self, top: &Fields<'_>) -> Option<CallerLimits> {
        let default = CallerLimits::default();
        let Some(node) = top.get("caller_limits") else { return Some(default) };
        let fields = Fields::of(node, "caller_limits", CALLER_LIMITS, self.faults)?;
        let mut number = |key: &str, default: u64, max: u64| {
            fields.read_or(key, default, self.faults, |text| match decode::whole(text, max)? {
                0 => Err(Wrong::new("is 0", format!("write a whole number from 1 to {max}"))),
                number => Ok(number),
            })
        };
        let (connections, streams) = (u64::from(default.connections), u64::from(default.streams));
        let connections = number("connections", connections, 1_000_000);
        let per_address =
            number("connections_per_address", u64::from(default.connections_per_address), 1_000_000);
        let streams = number("streams", streams, 100_000);
        let new_buckets =
            number("new_buckets_per_second", u64::from(default.new_buckets_per_second), 10_000_000);
        let buckets = number("buckets", default.buckets, 1_000_000_000);
        let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        Some(CallerLimits {
            connections: small(connections?),
            connections_per_address: small(per_address?),
            streams: small(streams?),
            new_buckets_per_second: small(new_buckets?),
            buckets: buckets?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(Arc<str>, Secret)>, String> {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("tokens");
        std::fs::write(&file, text).unwrap();
        tokens(&file).map_err(|wrong| wrong.to_string())
    }

    #[test]
    fn token_files() {
        let good = "# checkout\ncheckout  aaaaaaaaaaaaaaaa\n\n  search\tbbbbbbbbbbbbbbbb\r\n";
        let tokens = read(good).unwrap();
        assert_eq!(tokens.iter().map(|(name, _)| &**name).collect::<Vec<_>>(), ["checkout", "search"]);
        assert_eq!(tokens[1].1.expose(), "bbbbbbbbbbbbbbbb");
        for (wrong, says) in [
            ("", "without tokens"),
            ("# nothing\n", "without tokens"),
            ("a\n", ":1: it is not a name and a token"),
            ("\na b c\n", ":2: it is not a name and a token"),
            ("a short\n", ":1: the token has 5 characters"),
            ("a aaaaaaaaaaaaaaaa\na bbbbbbbbbbbbbbbb\n", ":2: the name `a` is there twice"),
            ("a aaaaaaaaaaaaaaaa\nb aaaaaaaaaaaaaaaa\n", ":2: the token is there twice"),
        ] {
            let fault = read(wrong).unwrap_err();
            assert!(fault.contains(says), "{wrong:?}: {fault}");
            assert!(!fault.contains("aaaaaaaa"), "a token is shown: {fault}");
        }
    }
}
