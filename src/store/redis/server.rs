//! Where a region's Redis is, and how to get in: one server, the primary that Sentinel names, or the masters of a Redis Cluster.
//!
//! Each connection asks anew: nothing here remembers where the primary was.

use super::connect::{self, CONNECT_TIMEOUT};
use super::fault::{Fault, classify};
use super::shards::{SHARDS, slot};
use super::{RedisConfig, RedisConfigError};
use crate::tls::{self, ClientFiles};
use fred::interfaces::ClientLike;
use fred::types::config::{Config, ServerConfig, TlsConfig, TlsConnector};
use fred::types::{CustomCommand, Value};
use futures::future::join_all;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::time::timeout;
use url::Url;

const SENTINEL_PORT: u16 = 26_379;
const REDIS_PORT: u16 = 6_379;

/// What a URL says, with its secrets.
pub(super) struct Server {
    place: Place,
    login: Login,
    database: Option<u8>,
    /// `Some(None)`: TLS with the system's authorities.
    tls: Option<Option<ClientFiles>>,
}

enum Place {
    Here(Address),
    Sentinel { sentinels: Vec<Address>, service: String, login: Login },
    Cluster { nodes: Vec<Address> },
}

#[derive(Clone, Default)]
struct Login {
    user: Option<String>,
    password: Option<String>,
}

/// Where one server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Address {
    /// Host and port.
    Tcp(String, u16),
    /// A Unix socket.
    Socket(PathBuf),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Socket(path) => write!(f, "{}", path.display()),
        }
    }
}

impl Server {
    /// Reads a URL without ever showing it.
    pub(super) fn read(config: &RedisConfig) -> Result<Self, RedisConfigError> {
        let wrong = |why: &str| RedisConfigError::Url(why.to_owned());
        let form = "must begin with redis://, redis-sentinel://, redis-cluster://, the same with rediss, or redis+unix://";
        let (scheme, rest) = config.url.split_once("://").ok_or_else(|| wrong(form))?;
        let encrypted = scheme.starts_with("rediss");
        if config.tls.is_some() && !encrypted {
            return Err(wrong(
                "store.redis.tls is for rediss://, rediss-sentinel:// and rediss-cluster:// only",
            ));
        }
        let tls = encrypted.then(|| config.tls.clone());
        match scheme {
            "redis+unix" => {
                let read = Config::from_url_unix(&config.url).map_err(|e| wrong(e.details()))?;
                let ServerConfig::Unix { path } = &read.server else { return Err(wrong("names no socket")) };
                let place = Place::Here(Address::Socket(path.clone()));
                Ok(Self { place, login: Login::of(&read), database: read.database, tls })
            }
            "redis" | "rediss" => {
                let (read, address, _) = parse(rest, REDIS_PORT)?;
                Ok(Self {
                    place: Place::Here(address),
                    login: Login::of(&read),
                    database: read.database,
                    tls,
                })
            }
            "redis-sentinel" | "rediss-sentinel" => Self::behind_sentinel(rest, tls),
            "redis-cluster" | "rediss-cluster" => Self::in_cluster(rest, tls),
            _ => Err(wrong(form)),
        }
    }

    /// `[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/[DB]?sentinelServiceName=NAME[&sentinelUsername=..][&sentinelPassword=..]`
    fn behind_sentinel(rest: &str, tls: Option<Option<ClientFiles>>) -> Result<Self, RedisConfigError> {
        let wrong = |why: &str| RedisConfigError::Url(why.to_owned());
        let (sentinels, read, url) = parse_all(rest, SENTINEL_PORT)?;
        let (mut service, mut login) = (None, Login::default());
        for (key, value) in url.query_pairs() {
            let value = Some(value.into_owned());
            match &*key {
                "sentinelServiceName" => service = value,
                "sentinelUsername" => login.user = value,
                "sentinelPassword" => login.password = value,
                _ => return Err(wrong("has an unknown query")),
            }
        }
        let service = service.filter(|name| !name.is_empty());
        let service = service.ok_or_else(|| wrong("names no ?sentinelServiceName="))?;
        let place = Place::Sentinel { sentinels, service, login };
        Ok(Self { place, login: Login::of(&read), database: read.database, tls })
    }

    /// `[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]`
    fn in_cluster(rest: &str, tls: Option<Option<ClientFiles>>) -> Result<Self, RedisConfigError> {
        let (nodes, read, url) = parse_all(rest, REDIS_PORT)?;
        if !matches!(url.path(), "" | "/") || url.query().is_some() {
            return Err(RedisConfigError::Url(
                "a Redis Cluster has one database, and needs no query".to_owned(),
            ));
        }
        Ok(Self { place: Place::Cluster { nodes }, login: Login::of(&read), database: None, tls })
    }

    /// How many shards it has, of which each may be on another server.
    pub(super) fn shards(&self) -> usize {
        match self.place {
            Place::Here(_) | Place::Sentinel { .. } => 1,
            Place::Cluster { .. } => SHARDS,
        }
    }

    /// Where the primary of each shard is now.
    pub(super) async fn locate(&self) -> Result<Vec<Address>, Fault> {
        match &self.place {
            Place::Cluster { nodes } => self.ask_cluster(nodes).await,
            Place::Here(address) => Ok(vec![address.clone()]),
            Place::Sentinel { sentinels, service, login } => {
                let asked = sentinels.iter().map(|at| self.ask_sentinel(at, service, login));
                most_named(join_all(asked).await, service).map(|address| vec![address])
            }
        }
    }

    /// May the primary be somewhere else later on?
    pub(super) fn moves(&self) -> bool {
        !matches!(self.place, Place::Here(_))
    }

    /// How to reach the server at an address.
    pub(super) fn config(&self, address: &Address) -> Result<Config, Fault> {
        self.config_as(address, &self.login, self.database)
    }

    fn config_as(&self, address: &Address, login: &Login, database: Option<u8>) -> Result<Config, Fault> {
        let server = match address {
            Address::Tcp(host, port) => ServerConfig::new_centralized(host.as_str(), *port),
            Address::Socket(path) => ServerConfig::Unix { path: path.clone() },
        };
        Ok(Config {
            server,
            username: login.user.clone(),
            password: login.password.clone(),
            database,
            tls: self.tls()?,
            ..Config::default()
        })
    }

    /// The files are read for each connection: those that have been renewed count from the next one on.
    fn tls(&self) -> Result<Option<TlsConfig>, Fault> {
        let connector = match &self.tls {
            None => return Ok(None),
            Some(None) => {
                TlsConnector::default_rustls().map_err(|e| Fault::Unknown(e.details().to_owned()))?
            }
            Some(Some(files)) => {
                let config = tls::client_of(files).map_err(|e| Fault::Unknown(e.to_string()))?;
                TlsConnector::from(Arc::unwrap_or_clone(config))
            }
        };
        Ok(Some(connector.into()))
    }

    /// Asks one node after the other, until one answers: a map that is out of date shows itself by MOVED.
    async fn ask_cluster(&self, nodes: &[Address]) -> Result<Vec<Address>, Fault> {
        let mut why = Fault::Unknown("names no node".to_owned());
        for node in nodes {
            let asked = async {
                let (client, task) = connect::dial(&self.config(node)?).await?;
                let command = CustomCommand::new_static("CLUSTER", None::<u16>, false);
                let answer: Result<Value, _> =
                    client.custom(command, vec![Value::from_static_str("SLOTS")]).await;
                drop(task);
                owners(answer.map_err(|e| classify(&e))?, node)
            };
            let late = || Fault::Unknown(format!("no answer within {CONNECT_TIMEOUT:?}"));
            match timeout(CONNECT_TIMEOUT, asked).await.unwrap_or_else(|_| Err(late())) {
                Ok(owners) => return Ok(owners),
                Err(fault) => why = fault,
            }
        }
        Err(Fault::Unknown(format!("no node says where the slots are; the last: {why}")))
    }

    async fn ask_sentinel(&self, at: &Address, service: &str, login: &Login) -> Result<Address, Fault> {
        let config = self.config_as(at, login, None)?;
        let asked = async {
            let (client, task) = connect::dial(&config).await?;
            let command = CustomCommand::new_static("SENTINEL", None::<u16>, false);
            let arguments: Vec<Value> = vec!["GET-MASTER-ADDR-BY-NAME".into(), service.into()];
            let answer: Result<Option<(String, u16)>, _> = client.custom(command, arguments).await;
            drop(task);
            answer.map_err(|e| classify(&e))
        };
        let late = |_| Fault::Unknown(format!("no answer within {CONNECT_TIMEOUT:?}"));
        match timeout(CONNECT_TIMEOUT, asked).await.map_err(late)?? {
            Some((host, port)) => Ok(Address::Tcp(host, port)),
            None => Err(Fault::Unknown("knows no primary of that name".to_owned())),
        }
    }
}

impl Login {
    fn of(config: &Config) -> Self {
        Self { user: config.username.clone(), password: config.password.clone() }
    }
}

/// The address that most Sentinels name: one that has been cut off from the others may be behind. Of as many, the first.
fn most_named(answers: Vec<Result<Address, Fault>>, service: &str) -> Result<Address, Fault> {
    let mut why = None;
    let mut named: Vec<(Address, usize)> = Vec::new();
    for answer in answers {
        match answer {
            Ok(address) => match named.iter_mut().find(|(known, _)| *known == address) {
                Some((_, votes)) => *votes += 1,
                None => named.push((address, 1)),
            },
            Err(fault) => why = Some(fault),
        }
    }
    named.reverse();
    named.into_iter().max_by_key(|(_, votes)| *votes).map(|(address, _)| address).ok_or_else(|| {
        let why = why.map(|fault| fault.to_string()).unwrap_or_default();
        Fault::Unknown(format!("no Sentinel says where the primary of {service:?} is; the last: {why}"))
    })
}

/// Who has each shard's slot, as CLUSTER SLOTS says: `[[first, last, [host, port, id, ...], replicas...], ...]`.
fn owners(answer: Value, asked: &Address) -> Result<Vec<Address>, Fault> {
    let nonsense = || Fault::Unknown("CLUSTER SLOTS makes no sense".to_owned());
    let Value::Array(ranges) = answer else { return Err(nonsense()) };
    let mut owned = Vec::new();
    for range in ranges {
        let Value::Array(range) = range else { return Err(nonsense()) };
        let number = |at: usize| range.get(at).and_then(Value::as_u64);
        let Some(Value::Array(master)) = range.get(2) else { return Err(nonsense()) };
        let port = master.get(1).and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
        let (Some(first), Some(last), Some(port)) = (number(0), number(1), port) else {
            return Err(nonsense());
        };
        // A node that does not know its own name leaves it out.
        let host = match (master.first().and_then(Value::as_string), asked) {
            (Some(host), _) if !host.is_empty() && host != "?" => host,
            (_, Address::Tcp(host, _)) => host.clone(),
            _ => return Err(nonsense()),
        };
        owned.push((first..=last, Address::Tcp(host, port)));
    }
    let owner = |shard| {
        let slot = u64::from(slot(shard));
        let found = owned.iter().find(|(range, _)| range.contains(&slot)).map(|(_, address)| address.clone());
        found.ok_or_else(|| Fault::Unknown(format!("nobody has slot {slot}")))
    };
    (0..SHARDS).map(owner).collect()
}

/// What follows `://`, for several hosts.
fn parse_all(rest: &str, port: u16) -> Result<(Vec<Address>, Config, Url), RedisConfigError> {
    let (hosts, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    let (secret, hosts) = hosts.rsplit_once('@').map_or(("", hosts), |(secret, hosts)| (secret, hosts));
    let at = if secret.is_empty() { "" } else { "@" };
    let (mut addresses, mut last) = (Vec::new(), None);
    for host in hosts.split(',') {
        let (read, address, url) = parse(&format!("{secret}{at}{host}{path}"), port)?;
        addresses.push(address);
        last = Some((read, url));
    }
    let (read, url) = last.ok_or_else(|| RedisConfigError::Url("names no host".to_owned()))?;
    Ok((addresses, read, url))
}

/// What follows `://`, for one host.
fn parse(rest: &str, port: u16) -> Result<(Config, Address, Url), RedisConfigError> {
    let url = format!("redis://{rest}");
    let parsed = Url::parse(&url).map_err(|e| RedisConfigError::Url(e.to_string()))?;
    let read =
        Config::from_url_centralized(&url).map_err(|e| RedisConfigError::Url(e.details().to_owned()))?;
    let host = match parsed.host() {
        Some(url::Host::Ipv6(ip)) => ip.to_string(),
        Some(host) => host.to_string(),
        None => return Err(RedisConfigError::Url("names no host".to_owned())),
    };
    Ok((read, Address::Tcp(host, parsed.port().unwrap_or(port)), parsed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn read(url: &str) -> Result<Server, RedisConfigError> {
        let (cluster, region) = ("c".to_owned(), "r".to_owned());
        let timeout = Duration::from_millis(20);
        Server::read(&RedisConfig { url: url.to_owned(), tls: None, timeout, cluster, region })
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp(host.to_owned(), port)
    }

    #[test]
    fn one_server() {
        let server = read("rediss://u:p%40ss@redis.example/3").unwrap();
        assert!(matches!(&server.place, Place::Here(at) if *at == tcp("redis.example", 6_379)));
        assert_eq!(
            (server.login.user.as_deref(), server.login.password.as_deref()),
            (Some("u"), Some("p@ss"))
        );
        assert_eq!((server.database, server.tls, server.place.sentinels()), (Some(3), Some(None), 0));
        assert!(matches!(read("redis://[::1]:7").unwrap().place, Place::Here(at) if at == tcp("::1", 7)));
    }

    #[test]
    fn sentinels() {
        let url = "redis-sentinel://u:p@a,b:7,[::1]/2?sentinelServiceName=main&sentinelPassword=s%26t";
        let server = read(url).unwrap();
        let Place::Sentinel { sentinels, service, login } = &server.place else { panic!() };
        assert_eq!(*sentinels, [tcp("a", 26_379), tcp("b", 7), tcp("::1", 26_379)]);
        assert_eq!((service.as_str(), login.user.as_deref()), ("main", None));
        assert_eq!(login.password.as_deref(), Some("s&t"));
        assert_eq!((server.login.password.as_deref(), server.database), (Some("p"), Some(2)));
        for wrong in
            ["redis-sentinel://a", "redis-sentinel://a?sentinelServiceName=", "redis-sentinel://a,?x=y"]
        {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_sentinel_that_is_behind_is_outvoted() {
        let none = || Err(Fault::Unknown("away".to_owned()));
        let (old, new) = (tcp("old", 1), tcp("new", 1));
        let named = |answers| most_named(answers, "main");
        assert_eq!(named(vec![Ok(old.clone()), Ok(new.clone()), Ok(new.clone())]), Ok(new.clone()));
        assert_eq!(named(vec![none(), Ok(old.clone()), Ok(new)]), Ok(old));
        let why = named(vec![none(), none()]).unwrap_err().to_string();
        assert!(why.contains("main") && why.contains("away"), "{why}");
    }

    #[test]
    fn nodes_of_a_cluster() {
        let server = read("redis-cluster://u:p@a,b:7").unwrap();
        let Place::Cluster { nodes } = &server.place else { panic!() };
        assert_eq!(*nodes, [tcp("a", 6_379), tcp("b", 7)]);
        assert_eq!((server.shards(), server.login.user.as_deref()), (SHARDS, Some("u")));
        assert!(read("redis-cluster://a/3").is_err() && read("redis-cluster://a?x=y").is_err());
    }

    #[test]
    fn who_has_which_slot() {
        let master = |host: Value, port: i64| Value::Array(vec![host, port.into(), "id".into()]);
        let range = |from: i64, to: i64, master| Value::Array(vec![from.into(), to.into(), master]);
        let all = Value::Array(vec![
            range(8_192, 16_383, master("b".into(), 2)),
            range(0, 8_191, master(Value::Null, 1)),
        ]);
        let found = owners(all, &tcp("asked", 9)).unwrap();
        assert_eq!(found.iter().filter(|at| **at == tcp("asked", 1)).count(), SHARDS / 2);
        assert_eq!(found.last(), Some(&tcp("b", 2)));
        let half = Value::Array(vec![range(0, 8_191, master("a".into(), 1))]);
        assert!(owners(half, &tcp("asked", 9)).unwrap_err().to_string().contains("nobody has slot"));
        assert!(owners(Value::Null, &tcp("asked", 9)).is_err());
    }

    impl Place {
        fn sentinels(&self) -> usize {
            match self {
                Self::Here(_) => 0,
                Self::Cluster { nodes } => nodes.len(),
                Self::Sentinel { sentinels, .. } => sentinels.len(),
            }
        }
    }
}
