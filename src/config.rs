//! `region.yaml` and `policies.yaml`: from text to valid types, or to every fault with its place and its mend.
//!
//! After that nothing is a string or a maybe: what these types hold has been checked.

pub mod callers;
pub mod decode;
pub mod env;
pub mod envoy_ratelimit;
pub mod fault;
mod limits;
pub mod policies;
pub mod print;
pub mod region;
mod url;
pub mod yaml;

pub use decode::Wrong;
pub use fault::{ConfigError, Fault, Faults, Mark};
pub use region::peer;

use crate::quota::policy::RegionName;
use std::collections::BTreeSet;
use std::fmt;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Reads a region file with the process' environment and the secret files that it names.
///
/// # Errors
/// The file cannot be read, or it is wrong: then all of its faults.
pub fn load(file: &Path) -> Result<Config, ConfigError> {
    let text = read(file)?;
    region::parse(file, &text, &env::of_process()).map_err(ConfigError::Invalid)
}

/// A duration as the files write it (`20ms`, `10s`, `1m`), from `min` to `max`: for the command line.
///
/// # Errors
/// It is none, or out of range; with the mend.
pub fn duration(text: &str, min: Duration, max: Duration) -> Result<Duration, String> {
    decode::duration(text, min, max).map_err(|wrong| wrong.to_string())
}

/// A configuration file's text; of what is too large only so much that it can be seen to be.
pub(crate) fn read(file: &Path) -> Result<String, ConfigError> {
    let unreadable = |error| ConfigError::Unreadable { file: file.to_owned(), error };
    let mut text = String::new();
    let bytes_max = u64::try_from(yaml::FILE_BYTES_MAX).unwrap_or(u64::MAX).saturating_add(1);
    let opened = std::fs::File::open(file).map_err(unreadable)?;
    opened.take(bytes_max).read_to_string(&mut text).map_err(unreadable)?;
    Ok(text)
}

/// One region's daemon, from `region.yaml`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// This region; one of [`Cluster::regions`].
    pub region: RegionName,
    /// Where it listens.
    pub listen: Listen,
    /// Where its buckets live.
    pub store: StoreConfig,
    /// The folder of the Raft log and snapshots.
    pub data_dir: PathBuf,
    /// How long a daemon that is told to stop says that it is not ready, and serves all the same, before it takes no more
    /// connections.
    pub drain_wait: Duration,
    /// How long it then goes on giving back what its region has been lent, as long as that makes progress.
    pub drain_within: Duration,
    /// The regions that share the limits.
    pub cluster: Cluster,
    /// The policy file that is committed once, when the cluster has no policies.
    pub policies: Option<PathBuf>,
    /// The answer to what no policy matches.
    pub unmatched: Unmatched,
    /// Mutual TLS between regions. Without it all of [`Cluster::regions`] and [`Listen::peer`] are on loopback.
    pub peer_tls: Option<PeerTls>,
    /// Bearer token for everything on the admin listener that changes state. Always there if that is not on loopback.
    pub admin_token: Option<Secret>,
    /// Where it was read from, if from a file: it is read again when that changes.
    pub admin_token_file: Option<PathBuf>,
    /// TLS on the admin listener.
    pub admin_tls: Option<AdminTls>,
    /// TLS on the callers' listeners.
    pub caller_tls: Option<CallerTls>,
    /// Bearer tokens of callers, one of which every request must bring: see [`callers::tokens`]. Without it none is needed.
    pub caller_tokens_file: Option<PathBuf>,
    /// How much of this region callers may have.
    pub caller_limits: CallerLimits,
    /// Descriptor keys whose values are stored, logged and shown only as a keyed hash.
    pub redact: BTreeSet<Arc<str>>,
    /// The key of that hash, the same in every region. Without it the hash is only keyed with the cluster's name.
    pub redact_key: Option<Secret>,
    /// How `/v1/forward-auth` makes attributes out of a request; without it the path is not served.
    pub forward_auth: Option<ForwardAuth>,
    /// Logs and traces.
    pub telemetry: Telemetry,
}

/// A daemon's listeners. Port 0 lets the system choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Decisions over HTTP.
    pub http: SocketAddr,
    /// Decisions over gRPC.
    pub grpc: SocketAddr,
    /// Other regions.
    pub peer: SocketAddr,
    /// Health, metrics, state, console, policies.
    pub admin: SocketAddr,
}

/// Where a region's buckets live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreConfig {
    /// In this process' memory: gone when it ends.
    Embedded,
    /// In Redis.
    Redis(RedisConfig),
    /// Nowhere: a witness has none.
    None,
}

/// A region's Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisConfig {
    /// Which one, with its credentials.
    pub url: RedisUrl,
    /// With TLS: instead of the system's authorities, and a certificate to show.
    pub tls: Option<RedisTls>,
    /// A decision never waits longer than this for it.
    pub timeout: Duration,
}

/// Files for TLS to Redis (PEM).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisTls {
    /// The authorities that its certificate must come from.
    pub ca: PathBuf,
    /// The certificate chain to show, and its private key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// The URL of one Redis server (`redis://`, `rediss://` with TLS, `redis+unix://`), of Sentinels that know its primary
/// (`redis-sentinel://`, `rediss-sentinel://`), or of nodes of a Redis Cluster (`redis-cluster://`, `rediss-cluster://`). Shown without its credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisUrl(Secret);

impl RedisUrl {
    /// Does it ask for TLS?
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.expose().starts_with("rediss")
    }

    /// The whole URL, with its credentials.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.0.expose()
    }
}

/// The regions that share the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Peers of a cluster with another name are refused.
    pub name: Arc<str>,
    /// The first voters, sorted by name, so that every region numbers them alike. At least one, at most
    /// [`REGIONS_MAX`].
    pub regions: Vec<Peer>,
    /// Those of them that vote and serve nobody, sorted. Not all.
    pub witnesses: Vec<RegionName>,
    /// The longest round trip between two regions that Raft's timeouts are to allow for.
    pub rtt_max: Duration,
}

impl Config {
    /// Is this the daemon of a witness, which votes and serves nobody?
    #[must_use]
    pub fn is_witness(&self) -> bool {
        self.cluster.witnesses.contains(&self.region)
    }
}

impl Cluster {
    /// The regions' names, in the order of their [`RegionId`](crate::quota::pool::RegionId)s.
    #[must_use]
    pub fn names(&self) -> Vec<RegionName> {
        self.regions.iter().map(|peer| Arc::clone(&peer.name)).collect()
    }

    /// The names of those that serve callers, and so have a part of every limit.
    #[must_use]
    pub fn serving(&self) -> Vec<RegionName> {
        let serves = |peer: &&Peer| !self.witnesses.contains(&peer.name);
        self.regions.iter().filter(serves).map(|peer| Arc::clone(&peer.name)).collect()
    }
}

/// One region of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: RegionName,
    /// Where its peer listener is reached.
    pub url: PeerUrl,
}

/// Where a region's peer listener is reached: `http://HOST:PORT` (loopback without TLS only) or `https://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerUrl {
    /// Over TLS?
    pub tls: bool,
    /// A name or an address; an IPv6 address without brackets.
    pub host: Arc<str>,
    /// The port.
    pub port: u16,
}

impl fmt::Display for PeerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        let Self { host, port, .. } = self;
        if host.contains(':') {
            write!(f, "{scheme}://[{host}]:{port}")
        } else {
            write!(f, "{scheme}://{host}:{port}")
        }
    }
}

/// The answer to what no policy matches. It is counted either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unmatched {
    /// Let it through.
    #[default]
    Allow,
    /// Refuse it.
    Deny,
}

/// The PEM files of mutual TLS between regions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTls {
    /// This region's certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority that signs all regions' certificates.
    pub ca: PathBuf,
}

/// PEM files. Whoever asks shows a token, if there is one, and no certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminTls {
    /// The listener's certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The PEM files of TLS on the callers' listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallerTls {
    /// The certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority that callers' certificates must come from; without it they need none.
    pub client_ca: Option<PathBuf>,
}

/// How much of a region callers may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerLimits {
    /// Connections at once, on each of the two listeners.
    pub connections: u32,
    /// The same from one address.
    pub connections_per_address: u32,
    /// Requests at once on one connection (HTTP/2).
    pub streams: u32,
    /// Buckets a second that nobody has asked for lately, all callers together.
    pub new_buckets_per_second: u32,
    /// Keys in the store beyond which no bucket is made.
    pub buckets: u64,
}

impl Default for CallerLimits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            connections_per_address: 4_096,
            streams: 1_024,
            new_buckets_per_second: 10_000,
            buckets: 4_000_000,
        }
    }
}

/// How `/v1/forward-auth` makes attributes out of a request.
///
/// A proxy that asks is believed about what it was asked for (method, host, URI), as far as it contradicts nobody. About who asked
/// it, it is believed only if it is one of [`Self::trusted_proxies`]: many pass on an `X-Forwarded-For` that a caller has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardAuth {
    /// The domain that is asked.
    pub domain: Arc<str>,
    /// How many proxies there are one behind the other, the one that asks included, each of which adds to `X-Forwarded-For` the
    /// address that it was asked from. 0: the field is not looked at.
    pub trusted_proxies: usize,
    /// Attribute keys and where their values come from, sorted by key.
    pub attributes: Vec<(Arc<str>, AttributeSource)>,
}

/// Where the value of an attribute comes from. An attribute without a value is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttributeSource {
    /// `header:NAME`: a request header.
    Header(http::HeaderName),
    /// `client-ip`: the caller's address; with no trusted proxy that of the proxy that asks.
    ClientIp,
    /// `method`: the method of the request that the proxy asks about.
    Method,
    /// `host`: its host, in small letters and without the port.
    Host,
    /// `path`: its path, as it was sent, without the query.
    Path,
    /// `query:NAME`: a parameter of its query, decoded; of several the first.
    Query(Arc<str>),
    /// `cookie:NAME`: a cookie; of several the first.
    Cookie(Arc<str>),
}

/// Logs and traces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Telemetry {
    /// Where traces go, over OTLP/gRPC; nowhere if there is none.
    pub otlp: Option<Arc<str>>,
    /// How many requests in a million are traced that no caller decides about.
    pub sampling_ppm: u32,
    /// How log lines are written.
    pub log: LogFormat,
    /// Which log lines are written (levels, by module); `None`: the default.
    pub log_filter: Option<Arc<str>>,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { otlp: None, sampling_ppm: SAMPLING_PPM, log: LogFormat::default(), log_filter: None }
    }
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Something that is never shown: not in errors, logs or `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Keeps a secret.
    #[must_use]
    pub fn new(secret: &str) -> Self {
        Self(secret.into())
    }

    /// The secret itself.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// One request in a hundred.
const SAMPLING_PPM: u32 = 10_000;
/// The most regions of one cluster.
pub const REGIONS_MAX: usize = 64;
