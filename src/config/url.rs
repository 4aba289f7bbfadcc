//! The URLs of a region file. What may hold credentials is never repeated in a fault.

use super::decode::Wrong;
use super::fault::shown;
use super::{PeerUrl, RedisUrl, Secret};
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use url::{Host, Url};

const REDIS_FORM: &str = "write `redis://[USER:PASSWORD@]HOST[:PORT][/DB]`, the same with `rediss://` for TLS, or \
                          `redis+unix:///PATH`";
const CLUSTER_FORM: &str = "write `redis-cluster://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]`, or the same with \
                            `rediss-cluster://` for TLS";
const SENTINEL_FORM: &str = "write `redis-sentinel://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/[DB]?sentinelServiceName=NAME` \
                             (`&sentinelUsername=`, `&sentinelPassword=`), or the same with `rediss-sentinel://` for TLS";

impl FromStr for RedisUrl {
    type Err = Wrong;

    /// # Errors
    /// It is not the URL of a Redis server, of Sentinels, or of nodes of a Redis Cluster.
    fn from_str(text: &str) -> Result<Self, Wrong> {
        match text.split_once("://") {
            Some((scheme @ ("redis-sentinel" | "rediss-sentinel"), rest)) => {
                hosts(scheme, rest, SENTINEL_FORM, sentinel).map(|()| Self(Secret::new(text)))
            }
            Some((scheme @ ("redis-cluster" | "rediss-cluster"), rest)) => {
                hosts(scheme, rest, CLUSTER_FORM, node).map(|()| Self(Secret::new(text)))
            }
            _ => one(text).map(|()| Self(Secret::new(text))),
        }
    }
}

/// The URL of one server.
fn one(text: &str) -> Result<(), Wrong> {
    let url = Url::parse(text).map_err(|error| Wrong::new(format!("is not a URL: {error}"), REDIS_FORM))?;
    let wrong = |what: &str| Err(Wrong::new(what, REDIS_FORM));
    match url.scheme() {
        "redis" | "rediss" => {
            if url.host_str().is_none_or(str::is_empty) {
                return wrong("names no host");
            }
            let db = url.path().trim_start_matches('/');
            if !db.is_empty() && db.parse::<u8>().is_err() {
                return wrong("has a path that is not the number of a database");
            }
        }
        "redis+unix" if url.path().trim_matches('/').is_empty() => return wrong("names no socket"),
        "redis+unix" => {}
        other => return wrong(&format!("has the unknown scheme {}", shown(other))),
    }
    if url.query().is_some() || url.fragment().is_some() {
        return wrong("has a query or a fragment");
    }
    Ok(())
}

/// What follows the scheme where there are several hosts, which no URL has: each is checked by itself.
fn hosts(
    scheme: &str,
    rest: &str,
    form: &str,
    check: impl Fn(&Url) -> Result<(), &'static str>,
) -> Result<(), Wrong> {
    let (hosts, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (login, hosts) = hosts.rsplit_once('@').map_or((None, hosts), |(login, hosts)| (Some(login), hosts));
    for host in hosts.split(',') {
        let login = login.map(|login| format!("{login}@")).unwrap_or_default();
        let url = Url::parse(&format!("{scheme}://{login}{host}{path}"))
            .map_err(|error| Wrong::new(format!("is not a URL: {error}"), form))?;
        if url.host_str().is_none_or(str::is_empty) {
            return Err(Wrong::new("names no host", form));
        }
        check(&url).map_err(|what| Wrong::new(what, form))?;
    }
    Ok(())
}

fn sentinel(url: &Url) -> Result<(), &'static str> {
    let db = url.path().trim_start_matches('/');
    if !db.is_empty() && db.parse::<u8>().is_err() {
        return Err("has a path that is not the number of a database");
    }
    let known = ["sentinelServiceName", "sentinelUsername", "sentinelPassword"];
    if url.fragment().is_some() || url.query_pairs().any(|(key, _)| !known.contains(&&*key)) {
        return Err("has an unknown query or a fragment");
    }
    if !url.query_pairs().any(|(key, name)| key == "sentinelServiceName" && !name.is_empty()) {
        return Err("names no service");
    }
    Ok(())
}

fn node(url: &Url) -> Result<(), &'static str> {
    if !matches!(url.path(), "" | "/") {
        return Err("has a path: a Redis Cluster has one database");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("has a query or a fragment");
    }
    Ok(())
}

impl FromStr for PeerUrl {
    type Err = Wrong;

    /// # Errors
    /// It is not `http://HOST:PORT` or `https://HOST:PORT`.
    fn from_str(text: &str) -> Result<Self, Wrong> {
        const FORM: &str = "write `https://HOST:PORT`";
        let url = Url::parse(text)
            .map_err(|error| Wrong::new(format!("is not a URL: {}: {error}", shown(text)), FORM))?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(Wrong::new("has credentials", "remove them: regions know each other by `peer_tls`"));
        }
        let tls = match url.scheme() {
            "https" => true,
            "http" => false,
            _ => return Err(Wrong::new(format!("has an unknown scheme: {}", shown(text)), FORM)),
        };
        if url.path() != "/" || url.query().is_some() || url.fragment().is_some() {
            return Err(Wrong::new(format!("has something after the port: {}", shown(text)), FORM));
        }
        let host: Arc<str> = match url.host() {
            Some(Host::Domain(name)) => name.into(),
            Some(Host::Ipv4(ip)) => ip.to_string().into(),
            Some(Host::Ipv6(ip)) => ip.to_string().into(),
            None => return Err(Wrong::new(format!("names no host: {}", shown(text)), FORM)),
        };
        match url.port_or_known_default() {
            None | Some(0) => Err(Wrong::new(format!("has no port: {}", shown(text)), FORM)),
            Some(port) => Ok(Self { tls, host, port }),
        }
    }
}

/// The URL of an OTLP collector; it is logged, so it may have no credentials.
pub fn otlp(text: &str) -> Result<Arc<str>, Wrong> {
    const FORM: &str = "write `http://HOST:4317`";
    let url = Url::parse(text).map_err(|error| Wrong::new(format!("is not a URL: {error}"), FORM))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(Wrong::new("has credentials", FORM));
    }
    if url.scheme() == "https" {
        let mend = "write the `http://` address of a collector on this machine, and let that one speak TLS";
        return Err(Wrong::new("has https, and traces are sent without TLS", mend));
    }
    if url.scheme() != "http" || url.host().is_none() {
        return Err(Wrong::new(format!("is not an HTTP URL: {}", shown(text)), FORM));
    }
    Ok(text.into())
}

/// Does this host only ever mean this machine?
pub fn is_loopback_host(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redis_urls() {
        for fine in [
            "redis://127.0.0.1:6379",
            "redis://:secret@redis/3",
            "rediss://user:secret@redis.example:6380",
            "redis+unix:///run/redis.sock",
            "redis-sentinel://a,b:26379,[::1]:7?sentinelServiceName=main",
            "rediss-sentinel://u:secret@a:1,b:2/3?sentinelServiceName=main&sentinelPassword=secret",
            "redis-cluster://u:secret@a,b:7000,[::1]",
            "rediss-cluster://a:7000/",
        ] {
            assert!(RedisUrl::from_str(fine).is_ok(), "{fine}");
        }
        for wrong in [
            "redis-sentinel://secret@a:26379",
            "redis-sentinel://u:secret@a,?sentinelServiceName=main",
            "redis-sentinel://u:secret@a:x?sentinelServiceName=main",
            "redis-sentinel://u:secret@a/x?sentinelServiceName=main",
            "redis-sentinel://u:secret@a?sentinelServiceName=main&secret=1",
            "redis-cluster://u:secret@a:6379/1",
            "redis-cluster://u:secret@a,",
            "redis-cluster://u:secret@a?node=b",
            "http://secret@a",
            "redis://u:secret@a/x",
            "redis://u:secret@a/0?node=b",
            "redis://u:secret@a:99999",
            "redis://u:secret@",
            "redis+unix://",
            "secret",
            "",
        ] {
            let Err(wrong) = RedisUrl::from_str(wrong) else { panic!("{wrong}") };
            assert!(!wrong.to_string().contains("secret"), "{wrong}");
        }
        let url = RedisUrl::from_str("redis://u:secret@a").unwrap();
        assert!(!format!("{url:?}").contains("secret"));
        assert!(url.expose().contains("secret"));
    }

    #[test]
    fn peer_urls() {
        let url = PeerUrl::from_str("https://quorate.us-east.example").unwrap();
        assert_eq!(url.to_string(), "https://quorate.us-east.example:443");
        assert_eq!(PeerUrl::from_str("http://[::1]:8082/").unwrap().to_string(), "http://[::1]:8082");
        for wrong in
            ["ftp://a:1", "https://a:1/x", "https://u:p@a:1", "a:1", "https://", "https://a:0", "https://a?b"]
        {
            assert!(PeerUrl::from_str(wrong).is_err(), "{wrong}");
        }
        assert!(is_loopback_host("127.8.8.8") && is_loopback_host("::1") && is_loopback_host("localhost"));
        assert!(!is_loopback_host("localhost.example") && !is_loopback_host("0.0.0.0"));
    }
}
