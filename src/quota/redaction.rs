//! Values of descriptors that must not be known from what is stored, logged or shown.
//!
//! The names of buckets are hashes. Whoever sees one can try values until one fits, and values of the kind that is worth hiding
//! (addresses, account numbers) are few enough for that. So the values of keys that are to be redacted go in as a *keyed* hash:
//! without the key nothing can be tried. All regions need the same keys and the same key, or they would not share buckets.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

/// What is redacted, and how.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Redaction {
    keys: BTreeSet<Arc<str>>,
    key: [u8; blake3::KEY_LEN],
}

impl Redaction {
    /// The values of these descriptor keys, with this secret.
    #[must_use]
    pub fn new(keys: BTreeSet<Arc<str>>, secret: &str) -> Self {
        Self { keys, key: blake3::derive_key("quorate 2026 redacted values", secret.as_bytes()) }
    }

    /// What stands for the value of this key; `None`: the value itself.
    #[must_use]
    pub fn hash(&self, key: &str, value: &str) -> Option<[u8; blake3::OUT_LEN]> {
        // The same value of two keys is not seen to be the same.
        let hash = || {
            let mut hasher = blake3::Hasher::new_keyed(&self.key);
            hasher.update(&u64::try_from(key.len()).unwrap_or(u64::MAX).to_le_bytes());
            hasher.update(key.as_bytes()).update(value.as_bytes());
            *hasher.finalize().as_bytes()
        };
        self.keys.contains(key).then(hash)
    }

    /// A value as people may see it: itself, or `#` and the first half of its hash in hexadecimal.
    #[must_use]
    pub fn shown<'v>(&self, key: &str, value: &'v str) -> Cow<'v, str> {
        let Some(hash) = self.hash(key, value) else { return Cow::Borrowed(value) };
        let half = hash.iter().take(16).map(|byte| format!("{byte:02x}"));
        Cow::Owned(std::iter::once("#".to_owned()).chain(half).collect())
    }

    /// Sums up what is redacted, and how, so that regions can see that they do it alike; `None`: nothing is.
    #[must_use]
    pub fn fingerprint(&self) -> Option<u64> {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        for key in &self.keys {
            hasher.update(&u64::try_from(key.len()).unwrap_or(u64::MAX).to_le_bytes()).update(key.as_bytes());
        }
        let mut sum = [0; 8];
        // Not of the kind that stands for a value.
        hasher.update(b"fingerprint").finalize_xof().fill(&mut sum);
        (!self.keys.is_empty()).then(|| u64::from_le_bytes(sum))
    }
}

impl fmt::Debug for Redaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redaction").field("keys", &self.keys).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::matching::bucket_id;

    fn redaction(keys: &[&str], secret: &str) -> Redaction {
        Redaction::new(keys.iter().map(|key| Arc::from(*key)).collect(), secret)
    }

    #[test]
    fn buckets_of_redacted_values_need_the_key() {
        let one = redaction(&["api_key"], "one");
        let id = |redaction: &Redaction, entries: &[(&str, &str)]| {
            redaction.bucket_id("p", entries.iter().copied())
        };
        let secret = [("tenant", "7"), ("api_key", "sk-1")];
        assert_eq!(id(&one, &secret), id(&redaction(&["api_key"], "one"), &secret));
        assert_ne!(id(&one, &secret), id(&redaction(&["api_key"], "two"), &secret));
        assert_ne!(id(&one, &secret), bucket_id("p", secret));
        assert_ne!(id(&one, &secret), id(&one, &[("tenant", "7"), ("api_key", "sk-2")]));
        let plain = [("tenant", "7"), ("op", "x")];
        assert_eq!(id(&one, &plain), bucket_id("p", plain), "the names of other buckets stay as they are");
        // Who sends a hash for a value does not get that value's bucket.
        let hash = one.shown("api_key", "sk-1").into_owned();
        assert_ne!(id(&one, &[("tenant", "7"), ("api_key", &hash)]), id(&one, &secret));
        assert_ne!(id(&one, &[("tenant", "7"), ("key", &hash)]), id(&one, &secret));
    }

    #[test]
    fn what_is_shown() {
        let one = redaction(&["api_key", "account"], "one");
        assert_eq!(one.shown("tenant", "7"), "7");
        let shown = one.shown("api_key", "sk-1");
        assert!(shown.len() == 33 && shown.starts_with('#') && !shown.contains("sk-1"), "{shown}");
        assert_ne!(shown, one.shown("account", "sk-1"));
        assert_ne!(shown, redaction(&["api_key"], "two").shown("api_key", "sk-1"));
        assert_eq!(format!("{:?}", redaction(&["k"], "s3cret")), "Redaction { keys: {\"k\"}, .. }");
    }

    #[test]
    fn fingerprints() {
        let one = redaction(&["a", "b"], "one").fingerprint();
        assert_eq!(one, redaction(&["b", "a"], "one").fingerprint());
        for other in [redaction(&["ab"], "one"), redaction(&["a"], "one"), redaction(&["a", "b"], "two")] {
            assert_ne!(one, other.fingerprint());
        }
        assert_eq!(redaction(&[], "one").fingerprint(), None);
    }
}
