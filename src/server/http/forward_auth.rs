//! `ANY /v1/forward-auth`: a proxy asks whether it may pass a request on (nginx `auth_request`, Traefik `forwardAuth`, Caddy
//! `forward_auth`). What is asked about comes from header fields; see [`ForwardAuth`] for which of them are believed.

use crate::config::{AttributeSource, ForwardAuth};
use crate::server::problem::Problem;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use std::borrow::Cow;
use std::net::IpAddr;

/// The URI that was asked for: what Traefik and Caddy call it, and what nginx' users mostly do.
const URI: [&str; 2] = ["x-forwarded-uri", "x-original-uri"];
const METHOD: [&str; 2] = ["x-forwarded-method", "x-original-method"];
const HOST: [&str; 1] = ["x-forwarded-host"];
const CLIENTS: &str = "x-forwarded-for";

/// The attributes of the request that a proxy asks about, which connects from `peer`. Those without a value are left out.
///
/// # Errors
/// Two fields of the head contradict each other: whoever sent the request may have added one of them.
pub fn attributes<'c>(
    config: &'c ForwardAuth,
    headers: &HeaderMap,
    peer: IpAddr,
) -> Result<Vec<(&'c str, String)>, Problem> {
    let mut found = Vec::with_capacity(config.attributes.len());
    for (key, source) in &config.attributes {
        let value = match source {
            AttributeSource::Header(name) => only(headers, &[name.as_str()])?.map(Cow::into_owned),
            AttributeSource::ClientIp => Some(client(headers, peer, config.trusted_proxies).to_string()),
            AttributeSource::Method => only(headers, &METHOD)?.map(Cow::into_owned),
            AttributeSource::Host => only(headers, &HOST)?.map(|host| host_name(&host)),
            AttributeSource::Path => only(headers, &URI)?.map(|uri| path_and_query(&uri).0.to_owned()),
            AttributeSource::Query(name) => {
                only(headers, &URI)?.and_then(|uri| in_query(path_and_query(&uri).1?, name))
            }
            AttributeSource::Cookie(name) => cookie(headers, name),
        };
        found.extend(value.map(|value| (&**key, value)));
    }
    Ok(found)
}

/// The value that all fields of these names have.
fn only<'h>(headers: &'h HeaderMap, names: &[&str]) -> Result<Option<Cow<'h, str>>, Problem> {
    let mut values = names.iter().flat_map(|name| headers.get_all(*name));
    let Some(first) = values.next() else { return Ok(None) };
    if values.any(|other| other != first) {
        let detail = format!(
            "{} is there more than once, and not alike; let the proxy set one and remove what the caller sent",
            names.join(" or ")
        );
        return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
    }
    Ok(Some(text(first)))
}

/// Bytes that are not UTF-8 are taken for Latin-1, so that different values stay different.
fn text(value: &HeaderValue) -> Cow<'_, str> {
    let bytes = value.as_bytes();
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text.trim()),
        Err(_) => Cow::Owned(bytes.iter().copied().map(char::from).collect()),
    }
}

/// Who asked the outermost of the proxies that are trusted. Each of them adds, at the end, the address that it was asked from; what
/// stands before that, anybody may have written.
fn client(headers: &HeaderMap, peer: IpAddr, trusted: usize) -> IpAddr {
    let lines: Vec<Cow<'_, str>> = headers.get_all(CLIENTS).iter().map(text).collect();
    let added = lines.iter().rev().flat_map(|line| line.rsplit(','));
    // Where there are fewer, a request came round the outer proxies: all of them were added by one that is trusted.
    let client = added.take(trusted).last().and_then(|entry| address(entry.trim()));
    client.unwrap_or(peer).to_canonical()
}

/// `192.0.2.1`, `2001:db8::1` or `[2001:db8::1]`; some proxies add a port.
fn address(entry: &str) -> Option<IpAddr> {
    let entry = entry.trim_matches('"');
    if let Ok(address) = entry.parse() {
        return Some(address);
    }
    let host = match entry.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once(']')?.0,
        None => entry.rsplit_once(':')?.0,
    };
    host.parse().ok()
}

/// Without its port, in small letters.
fn host_name(host: &str) -> String {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    };
    name.trim_end_matches('.').to_ascii_lowercase()
}

fn path_and_query(uri: &str) -> (&str, Option<&str>) {
    // A whole URL is possible, too.
    let uri = match uri.split_once("://") {
        Some((scheme, rest)) if scheme.bytes().all(|b| b.is_ascii_alphanumeric()) => {
            rest.find(['/', '?']).map_or("/", |at| rest.split_at(at).1)
        }
        _ => uri,
    };
    let uri = uri.split('#').next().unwrap_or(uri);
    match uri.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (uri, None),
    }
}

fn in_query(query: &str, name: &str) -> Option<String> {
    let mut pairs = url::form_urlencoded::parse(query.as_bytes());
    pairs.find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
}

fn cookie(headers: &HeaderMap, name: &str) -> Option<String> {
    let lines: Vec<Cow<'_, str>> = headers.get_all(header::COOKIE).iter().map(text).collect();
    let mut pairs =
        lines.iter().flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()))
            .collect()
    }

    fn client_of(lines: &[&str], trusted: usize) -> String {
        let lines: Vec<_> = lines.iter().map(|line| (CLIENTS, *line)).collect();
        client(&headers(&lines), "::ffff:127.0.0.1".parse().unwrap(), trusted).to_string()
    }

    #[test]
    fn of_the_clients_only_those_count_that_a_trusted_proxy_added() {
        let forged = ["9.9.9.9, 8.8.8.8", "192.0.2.1,198.51.100.7"];
        assert_eq!(client_of(&forged, 0), "127.0.0.1");
        assert_eq!(client_of(&forged, 1), "198.51.100.7");
        assert_eq!(client_of(&forged, 2), "192.0.2.1");
        assert_eq!(client_of(&forged, 3), "8.8.8.8");
        assert_eq!(client_of(&["192.0.2.1"], 2), "192.0.2.1", "round the outer proxy");
        assert_eq!(client_of(&[], 1), "127.0.0.1");
        assert_eq!(client_of(&["192.0.2.1, unknown"], 1), "127.0.0.1", "never an address that was not added");
        assert_eq!(client_of(&["[2001:db8::1]:4711"], 1), "2001:db8::1");
        assert_eq!(client_of(&["2001:db8::1"], 1), "2001:db8::1");
        assert_eq!(client_of(&["192.0.2.1:4711"], 1), "192.0.2.1");
        assert_eq!(client_of(&["::ffff:192.0.2.1"], 1), "192.0.2.1");
    }

    #[test]
    fn fields_that_contradict_each_other_are_refused() {
        let uri =
            |lines: &[(&'static str, &str)]| only(&headers(lines), &URI).map(|uri| uri.map(Cow::into_owned));
        assert_eq!(uri(&[("x-original-uri", "/a")]).unwrap().as_deref(), Some("/a"));
        assert_eq!(
            uri(&[("x-original-uri", "/a"), ("x-forwarded-uri", "/a")]).unwrap().as_deref(),
            Some("/a")
        );
        assert!(uri(&[("x-original-uri", "/a"), ("x-forwarded-uri", "/b")]).is_err());
        assert!(uri(&[("x-forwarded-uri", "/a"), ("x-forwarded-uri", "/b")]).is_err());
        assert_eq!(uri(&[]).unwrap(), None);
    }

    #[test]
    fn uris_hosts_queries_and_cookies() {
        assert_eq!(path_and_query("/a/b?c=d#e"), ("/a/b", Some("c=d")));
        assert_eq!(path_and_query("https://h:1/a?b"), ("/a", Some("b")));
        assert_eq!(path_and_query("https://h"), ("/", None));
        assert_eq!(path_and_query("/a?next=https://h/b"), ("/a", Some("next=https://h/b")));
        assert_eq!(host_name("API.Example.:8443"), "api.example");
        assert_eq!(host_name("[2001:db8::1]:80"), "[2001:db8::1]");
        assert_eq!(host_name("[2001:db8::1]"), "[2001:db8::1]");
        assert_eq!(in_query("a=1&key=x%2Fy+z&key=2", "key").as_deref(), Some("x/y z"));
        assert_eq!(in_query("a=1", "key"), None);
        let with = headers(&[("cookie", "a=1; session=\"q=r\""), ("cookie", "b=2")]);
        assert_eq!(cookie(&with, "session").as_deref(), Some("q=r"));
        assert_eq!(cookie(&with, "b").as_deref(), Some("2"));
        assert_eq!(cookie(&with, "c"), None);
    }
}
