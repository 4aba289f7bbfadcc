//! Who may ask for decisions, how they show it, and how many connections each may have.
//!
//! What is configured is required: a client certificate if there is `caller_tls.client_ca`, a bearer token if there is
//! `caller_tokens_file`, both if both are there. The owner of the token, else of the certificate, else of the address is also
//! who new buckets are counted to (see [`crate::limiter::newcomers`]).

use crate::config::Secret;
use crate::limiter::newcomers::Caller;
use crate::telemetry::metrics::Protocol;
use crate::tls::{TlsError, TlsFiles};
use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderValue, header};
use rustls::ServerConfig;
use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// What callers must show.
#[derive(Clone, Debug, Default)]
pub struct Callers {
    /// They speak TLS.
    pub tls: Option<Arc<CallerTls>>,
    /// They have one of these.
    pub tokens: Option<Arc<Tokens>>,
}

/// The listeners' TLS; it can change while they listen.
#[derive(Debug)]
pub struct CallerTls {
    files: TlsFiles,
    http: ArcSwap<ServerConfig>,
    grpc: ArcSwap<ServerConfig>,
}

impl CallerTls {
    /// From files.
    ///
    /// # Errors
    /// They cannot be used.
    pub fn load(files: TlsFiles) -> Result<Self, TlsError> {
        let (http, grpc) = both(&files)?;
        Ok(Self { files, http: http.into(), grpc: grpc.into() })
    }

    /// Its files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.paths()
    }

    /// Reads the files again, for connections from now on.
    ///
    /// # Errors
    /// They cannot be used: then what was there before stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let (http, grpc) = both(&self.files)?;
        self.http.store(http);
        self.grpc.store(grpc);
        Ok(())
    }

    /// For a connection of this kind.
    #[must_use]
    pub fn acceptor(&self, protocol: Protocol) -> tokio_rustls::TlsAcceptor {
        let config = match protocol {
            Protocol::Grpc => &self.grpc,
            Protocol::Http | Protocol::Admin => &self.http,
        };
        config.load_full().into()
    }
}

fn both(files: &TlsFiles) -> Result<(Arc<ServerConfig>, Arc<ServerConfig>), TlsError> {
    Ok((files.server(&["h2", "http/1.1"])?, files.server(&["h2"])?))
}

/// Bearer tokens and their owners; they can change while the listeners listen.
#[derive(Debug)]
pub struct Tokens(ArcSwap<HashMap<Digest, Caller>>);

/// Tokens are looked up by their hash: how long that takes says nothing of any token.
type Digest = [u8; blake3::OUT_LEN];

impl Tokens {
    /// Names of owners, and their tokens.
    #[must_use]
    pub fn new(tokens: &[(Arc<str>, Secret)]) -> Self {
        Self(ArcSwap::from_pointee(known(tokens)))
    }

    /// Only these count from now on.
    pub fn set(&self, tokens: &[(Arc<str>, Secret)]) {
        self.0.store(Arc::new(known(tokens)));
    }

    fn owner(&self, token: &[u8]) -> Option<Caller> {
        self.0.load().get(blake3::hash(token).as_bytes()).copied()
    }
}

fn known(tokens: &[(Arc<str>, Secret)]) -> HashMap<Digest, Caller> {
    let digest = |token: &Secret| *blake3::hash(token.expose().as_bytes()).as_bytes();
    tokens.iter().map(|(name, token)| (digest(token), Caller::token(name))).collect()
}

/// A proxy that asks for its caller (`/v1/forward-auth`) sends its token in this field: `Authorization` is its caller's.
const TOKEN_HEADER: &str = "x-quorate-token";

/// Who is at the other end of one connection.
#[derive(Clone, Debug)]
pub struct Connected {
    address: IpAddr,
    caller: Caller,
    tokens: Option<Arc<Tokens>>,
}

impl Connected {
    /// From this address, having shown this certificate (DER).
    #[must_use]
    pub fn new(address: IpAddr, certificate: Option<&[u8]>, tokens: Option<Arc<Tokens>>) -> Self {
        let caller = certificate.map_or_else(|| Caller::address(address), Caller::certificate);
        Self { address, caller, tokens }
    }

    /// Who it is where nobody shows a token.
    #[must_use]
    pub fn caller(&self) -> Caller {
        self.caller
    }

    /// Where it comes from.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Who sent a request with this head?
    ///
    /// # Errors
    /// What to tell somebody who has no token.
    pub fn who(&self, headers: &HeaderMap) -> Result<Caller, &'static str> {
        let Some(tokens) = &self.tokens else { return Ok(self.caller) };
        let own = headers.get(TOKEN_HEADER).map(HeaderValue::as_bytes);
        let token = own.or_else(|| bearer(headers)).ok_or("send `Authorization: Bearer <token>`")?;
        tokens.owner(token).ok_or("the bearer token is none of those that may ask")
    }
}

/// The token of `Authorization: Bearer` (RFC 6750, section 2.1).
pub(super) fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let sent = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes)?;
    let (scheme, token) = sent.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

/// How many connections each address has.
#[derive(Debug)]
pub struct Addresses {
    max: usize,
    open: Mutex<HashMap<Caller, usize>>,
}

/// A connection that is counted until this is dropped.
#[derive(Debug)]
pub struct Place {
    addresses: Arc<Addresses>,
    at: Caller,
}

impl Addresses {
    /// At most `max` for each.
    #[must_use]
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, open: Mutex::default() })
    }

    /// One more from there; `None`: it has as many as it may.
    #[must_use]
    pub fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Place> {
        let at = Caller::address(address);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(at).or_insert(0);
        if *count >= self.max {
            return None;
        }
        *count = count.saturating_add(1);
        Some(Place { addresses: Arc::clone(self), at })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.addresses.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.at) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                open.remove(&self.at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_name_their_owners() {
        let of = |names: &[&str]| -> Vec<(Arc<str>, Secret)> {
            names.iter().map(|n| ((*n).into(), Secret::new(&format!("token-of-{n}")))).collect()
        };
        let tokens = Arc::new(Tokens::new(&of(&["a", "b"])));
        let connected = Connected::new("127.0.0.1".parse().unwrap(), None, Some(Arc::clone(&tokens)));
        let who = |sent: &str| {
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, sent.parse().unwrap())]);
            connected.who(&headers).ok()
        };
        assert_eq!(who("Bearer token-of-a"), Some(Caller::token("a")));
        assert_eq!(who("bearer token-of-b"), Some(Caller::token("b")));
        for wrong in
            ["Bearer token-of-c", "Bearer ", "Bearer", "token-of-a", "Basic token-of-a", "Bearer token-of-a "]
        {
            assert_eq!(who(wrong), None, "{wrong}");
        }
        assert!(connected.who(&HeaderMap::new()).is_err());
        tokens.set(&of(&["b", "c"]));
        assert_eq!((who("Bearer token-of-a"), who("Bearer token-of-c")), (None, Some(Caller::token("c"))));
    }

    #[test]
    fn places_are_given_back() {
        let addresses = Addresses::new(2);
        let (a, b) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let first = addresses.enter(a);
        let second = addresses.enter(a);
        assert!(first.is_some() && second.is_some() && addresses.enter(a).is_none());
        let other = addresses.enter(b);
        assert!(other.is_some());
        drop((first, other));
        assert!(addresses.enter(a).is_some());
        drop(second);
        assert!(addresses.open.lock().unwrap().is_empty());
    }
}
