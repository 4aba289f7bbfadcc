//! What callers ask: requests, in either of their two forms.

use super::policy::TokenBucket;

/// A request to be checked.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Envoy's domain.
    pub domain: &'a str,
    /// What it is about.
    pub subject: Subject<'a>,
    /// Tokens; 0 asks without spending, negative gives back.
    pub cost: i64,
}

/// What a request is about.
#[derive(Clone, Copy, Debug)]
pub enum Subject<'a> {
    /// Envoy's descriptors.
    Descriptors(&'a [Descriptor<'a>]),
    /// One flat map.
    Attributes(&'a [(&'a str, &'a str)]),
}

/// An ordered list of key/value entries.
#[derive(Clone, Debug, Default)]
pub struct Descriptor<'a> {
    /// In order.
    pub entries: Vec<(&'a str, &'a str)>,
    /// Its own cost; `None`: the request's.
    pub cost: Option<i64>,
    /// A limit that came with it and replaces the policy's.
    pub limit: Option<TokenBucket>,
}

/// Why a request cannot be checked. Names the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestFault {
    /// The domain is empty.
    #[error("domain: is empty; name the domain whose policies apply")]
    EmptyDomain,
}
