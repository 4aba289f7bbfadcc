//! `region.yaml` to [`Config`].

use super::decode::{self, Fields, Wrong};
use super::env;
use super::fault::{Faults, Mark, one_of, shown};
use super::url::is_loopback_host;
use super::yaml::{self, Node, Value};
use super::{
    AdminTls, AttributeSource, Cluster, Config, ForwardAuth, Listen, LogFormat, Peer, PeerTls, PeerUrl,
    REGIONS_MAX, RedisConfig, RedisTls, RedisUrl, Secret, StoreConfig, Telemetry, Unmatched,
};
use crate::quota::matching::{ATTRIBUTES_MAX, DOMAIN_BYTES_MAX};
use crate::quota::policy::RegionName;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// The keys of the file.
pub const KEYS: &[&str] = &[
    "region",
    "listen",
    "store",
    "data_dir",
    "drain_wait",
    "drain_within",
    "cluster",
    "policies",
    "unmatched",
    "peer_tls",
    "admin_token",
    "admin_token_file",
    "admin_tls",
    "caller_tls",
    "caller_tokens_file",
    "caller_limits",
    "redact",
    "redact_key",
    "redact_key_file",
    "forward_auth",
    "telemetry",
];
const LISTEN: &[&str] = &["http", "grpc", "peer", "admin"];
const STORE: &[&str] = &["redis", "embedded"];
const REDIS: &[&str] = &["url", "url_file", "tls", "timeout"];
const REDIS_TLS: &[&str] = &["ca", "cert", "key"];
const CLUSTER: &[&str] = &["name", "regions", "witnesses", "rtt_max"];
/// What a witness has none of.
const SERVING: &[&str] =
    &["store", "unmatched", "caller_tls", "caller_tokens_file", "caller_limits", "forward_auth"];
const ADMIN_TLS: &[&str] = &["cert", "key"];
const PEER_TLS: &[&str] = &["cert", "key", "ca"];
const FORWARD_AUTH: &[&str] = &["domain", "trusted_proxies", "attributes"];
const TELEMETRY: &[&str] = &["otlp", "sampling", "log", "log_filter"];

const DATA_DIR: &str = "/var/lib/quorate";
const REDIS_URL: &str = "redis://127.0.0.1:6379";
const REDIS_TIMEOUT: Duration = Duration::from_millis(20);
const DRAIN_WAIT_MAX: Duration = Duration::from_secs(300);
/// [`Config::drain_within`] if nothing is said.
pub const DRAIN_WITHIN_DEFAULT: Duration = Duration::from_secs(10);
const RTT_MAX: Duration = Duration::from_millis(250);
const KEY_BYTES_MAX: usize = 255;
const REDACT_MAX: usize = 1_000;
const SECRET_FILE_BYTES_MAX: u64 = 64 * 1024;
const TOKEN_CHARS_MIN: usize = 16;
const PROXIES_MAX: u64 = 16;

/// Reads a region file's text, with the environment's overrides. Reads the secret files that it names.
///
/// # Errors
/// Everything that is wrong with it.
pub fn parse(file: &Path, text: &str, variables: &[(OsString, OsString)]) -> Result<Config, Faults> {
    let mut root = yaml::parse(file, text)?;
    let mut faults = Faults::new(file);
    env::apply(&mut root, variables, &mut faults);
    let folder = file.parent().unwrap_or(Path::new(""));
    let config = Reader { folder, faults: &mut faults }.config(&root);
    faults.or(config)
}

/// The names of the regions in a region file that serve callers, sorted, whatever else may be wrong with it.
#[must_use]
pub fn region_names(root: &Node) -> Vec<RegionName> {
    let cluster = |key| entry(root, "cluster").and_then(|cluster| entry(cluster, key));
    let Some(Value::Map(regions)) = cluster("regions").map(|node| &node.value) else { return Vec::new() };
    let witnesses: Vec<&str> = match cluster("witnesses").map(|node| &node.value) {
        Some(Value::List(items)) => items.iter().filter_map(text).collect(),
        _ => Vec::new(),
    };
    let serving = regions.iter().filter(|(key, _)| !witnesses.contains(&key.name.as_str()));
    let names: BTreeSet<RegionName> =
        serving.filter_map(|(key, _)| decode::name(&key.name).ok().map(Arc::from)).collect();
    names.into_iter().collect()
}

fn text(node: &Node) -> Option<&str> {
    match &node.value {
        Value::Text(text) => Some(text),
        _ => None,
    }
}

fn entry<'n>(node: &'n Node, name: &str) -> Option<&'n Node> {
    let Value::Map(entries) = &node.value else { return None };
    entries.iter().find(|(key, _)| key.name == name).map(|(_, node)| node)
}

pub(super) struct Reader<'r> {
    pub(super) folder: &'r Path,
    pub(super) faults: &'r mut Faults,
}

impl Reader<'_> {
    fn config(&mut self, root: &Node) -> Option<Config> {
        let top = Fields::of(root, "", KEYS, self.faults)?;
        let peer_tls = top.get("peer_tls").map(|node| self.peer_tls(node));
        let tls = peer_tls.is_some();
        let listen = self.listen(&top, tls);
        let cluster = self.cluster(&top, tls);
        let region = self.region(&top, cluster.as_ref());
        let witness = cluster.as_ref().zip(region.as_ref());
        let witness = witness.is_some_and(|(cluster, region)| cluster.witnesses.contains(region));
        let store = if witness { self.serves_nobody(&top) } else { self.store(&top) };
        let data_dir = top.read_or("data_dir", DATA_DIR.into(), self.faults, |t| path(self.folder, t));
        let (min, max) = (Duration::ZERO, DRAIN_WAIT_MAX);
        let mut time =
            |key, default| top.read_or(key, default, self.faults, |text| decode::duration(text, min, max));
        let (drain_wait, drain_within) =
            (time("drain_wait", Duration::ZERO), time("drain_within", DRAIN_WITHIN_DEFAULT));
        let policies = self.optional(&top, "policies", path);
        let unmatched = top.read_or("unmatched", Unmatched::Allow, self.faults, |text| {
            choice(text, &[("allow", Unmatched::Allow), ("deny", Unmatched::Deny)])
        });
        let admin_token = self.admin_token(&top, listen.as_ref());
        let admin_token_file = chosen(&top, "admin_token").and_then(|chosen| match chosen {
            Chosen::File(node) => {
                decode::read(node, "admin_token_file", self.faults, |t| path(self.folder, t))
            }
            Chosen::Inline(_) => None,
        });
        let admin_tls = top.get("admin_tls").map(|node| self.admin_tls(node));
        let caller_tls = top.get("caller_tls").map(|node| self.caller_tls(node));
        let caller_tokens_file = self.caller_tokens_file(&top);
        let caller_limits = self.caller_limits(&top);
        let redact = self.redact(&top);
        let redact_key = self.secret(&top, "redact_key", token);
        let forward_auth = top.get("forward_auth").map(|node| self.forward_auth(node));
        let telemetry = self.telemetry(&top);
        Some(Config {
            region: region?,
            listen: listen?,
            store: store?,
            data_dir: data_dir?,
            drain_wait: drain_wait?,
            drain_within: drain_within?,
            cluster: cluster?,
            policies: policies?,
            unmatched: unmatched?,
            peer_tls: transpose(peer_tls)?,
            admin_token: admin_token?,
            admin_token_file,
            admin_tls: transpose(admin_tls)?,
            caller_tls: transpose(caller_tls)?,
            caller_tokens_file: caller_tokens_file?,
            caller_limits: caller_limits?,
            redact: redact?,
            redact_key: redact_key?,
            forward_auth: transpose(forward_auth)?,
            telemetry: telemetry?,
        })
    }

    fn region(&mut self, top: &Fields<'_>, cluster: Option<&Cluster>) -> Option<RegionName> {
        let node = top.need("region", "name this region: one of `cluster.regions`", self.faults)?;
        decode::read(node, "region", self.faults, |text| {
            let name: RegionName = decode::name(text)?.into();
            match cluster.map(Cluster::names) {
                Some(names) if !names.contains(&name) => {
                    let names: Vec<&str> = names.iter().map(|n| &**n).collect();
                    let what = format!("is {}, which is not among `cluster.regions`", shown(text));
                    Err(Wrong::new(what, format!("use {} or add it there", one_of(&names))))
                }
                _ => Ok(name),
            }
        })
    }

    fn listen(&mut self, top: &Fields<'_>, tls: bool) -> Option<Listen> {
        let empty = Node { mark: top.mark().clone(), value: Value::Null };
        let fields = Fields::of(top.get("listen").unwrap_or(&empty), "listen", LISTEN, self.faults)?;
        let all = |port| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        let own = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let http = fields.read_or("http", all(8080), self.faults, address);
        let grpc = fields.read_or("grpc", all(8081), self.faults, address);
        let peer = fields.read_or("peer", if tls { all(8082) } else { own(8082) }, self.faults, |text| {
            let address = address(text)?;
            if tls || address.ip().is_loopback() {
                return Ok(address);
            }
            let what = format!("is {}, which is not on loopback, and there is no `peer_tls`", shown(text));
            Err(Wrong::new(what, "add `peer_tls` (cert, key, ca), or listen at 127.0.0.1"))
        });
        let admin = fields.read_or("admin", own(8083), self.faults, address);
        let listen = Listen { http: http?, grpc: grpc?, peer: peer?, admin: admin? };
        self.distinct(&fields, &listen);
        Some(listen)
    }

    /// No two listeners may have one address.
    fn distinct(&mut self, fields: &Fields<'_>, listen: &Listen) {
        let all =
            [("http", listen.http), ("grpc", listen.grpc), ("peer", listen.peer), ("admin", listen.admin)];
        for (at, (name, address)) in all.iter().enumerate() {
            let overlaps = |other: &SocketAddr| {
                let anywhere = |ip: IpAddr| ip.is_unspecified();
                other.port() == address.port()
                    && address.port() != 0
                    && (other.ip() == address.ip() || anywhere(other.ip()) || anywhere(address.ip()))
            };
            if let Some((earlier, _)) = all.iter().take(at).find(|(_, a)| overlaps(a)) {
                let mark = fields.get(name).or(fields.get(earlier)).map_or(fields.mark(), |node| &node.mark);
                let what = format!("`listen.{name}` has the port of `listen.{earlier}`: {}", address.port());
                self.faults.push(mark, what, "give each listener its own port");
            }
        }
    }

    fn store(&mut self, top: &Fields<'_>) -> Option<StoreConfig> {
        let empty = Node { mark: top.mark().clone(), value: Value::Null };
        let node = top.get("store").unwrap_or(&empty);
        let fields = Fields::of(node, "store", STORE, self.faults)?;
        match (fields.get("embedded"), fields.get("redis")) {
            (Some(_), Some(_)) => {
                let mark = fields.key_mark("embedded").unwrap_or(fields.mark());
                let what = "`store` has both `embedded` and `redis`";
                self.faults.push(mark, what, "keep the one that holds this region's buckets");
                None
            }
            (Some(embedded), None) => {
                Fields::of(embedded, "store.embedded", &[], self.faults).map(|_| StoreConfig::Embedded)
            }
            (None, redis) => {
                let redis = Fields::of(redis.unwrap_or(&empty), "store.redis", REDIS, self.faults)?;
                self.redis(&redis).map(StoreConfig::Redis)
            }
        }
    }

    fn redis(&mut self, redis: &Fields<'_>) -> Option<RedisConfig> {
        let (min, max) = (Duration::from_millis(1), Duration::from_secs(5));
        let timeout =
            redis.read_or("timeout", REDIS_TIMEOUT, self.faults, |text| decode::duration(text, min, max));
        let default = || RedisUrl::from_str(REDIS_URL).ok();
        let url = self.secret(redis, "url", RedisUrl::from_str)?.or_else(default)?;
        let tls = redis.get("tls").map(|node| self.redis_tls(node));
        if let Some(node) = redis.get("tls").filter(|_| !url.is_encrypted()) {
            let mend = "write `rediss://`, `rediss-sentinel://` or `rediss-cluster://`, or remove it";
            self.faults.push(
                &node.mark,
                "`store.redis.tls` is there, and `store.redis.url` asks for no TLS",
                mend,
            );
            return None;
        }
        Some(RedisConfig { url, tls: transpose(tls)?, timeout: timeout? })
    }

    fn redis_tls(&mut self, node: &Node) -> Option<RedisTls> {
        let fields = Fields::of(node, "store.redis.tls", REDIS_TLS, self.faults)?;
        let ca = self.pem(&fields, "ca", "the file of the authority that signs Redis' certificate");
        if fields.get("cert").is_none() && fields.get("key").is_none() {
            return Some(RedisTls { ca: ca?, own: None });
        }
        let cert = self.pem(&fields, "cert", "the file of the certificate chain to show to Redis");
        let key = self.pem(&fields, "key", "the file of its private key");
        Some(RedisTls { ca: ca?, own: Some((cert?, key?)) })
    }

    fn cluster(&mut self, top: &Fields<'_>, tls: bool) -> Option<Cluster> {
        let node = top.need("cluster", "add `cluster` with its `name` and `regions`", self.faults)?;
        let fields = Fields::of(node, "cluster", CLUSTER, self.faults)?;
        let name = fields.need("name", "give the cluster a name, the same in every region", self.faults);
        let name = name.and_then(|node| {
            decode::read(node, "cluster.name", self.faults, |text| decode::name(text).map(Arc::from))
        });
        let (min, max) = (Duration::from_millis(1), Duration::from_secs(2));
        let rtt_max =
            fields.read_or("rtt_max", RTT_MAX, self.faults, |text| decode::duration(text, min, max));
        let mend = "list every region and its peer URL, the same in every region";
        let regions = fields.need("regions", mend, self.faults).and_then(|node| self.peers(node, tls));
        let witnesses = self.witnesses(&fields, regions.as_deref());
        Some(Cluster { name: name?, regions: regions?, witnesses: witnesses?, rtt_max: rtt_max? })
    }

    fn witnesses(&mut self, fields: &Fields<'_>, regions: Option<&[Peer]>) -> Option<Vec<RegionName>> {
        let Some(node) = fields.get("witnesses") else { return Some(Vec::new()) };
        let items = decode::items(node, "cluster.witnesses", self.faults)?;
        let known = |name: &str| regions.is_none_or(|all| all.iter().any(|peer| &*peer.name == name));
        let read = |item: &Node| {
            decode::read(item, "cluster.witnesses", self.faults, |text| {
                let name: RegionName = decode::name(text)?.into();
                if known(&name) {
                    return Ok(name);
                }
                let what = format!("names {}, which is not among `cluster.regions`", shown(text));
                Err(Wrong::new(what, "give it a peer URL there, too"))
            })
        };
        let names: Option<BTreeSet<RegionName>> = items.iter().map(read).collect();
        let names: Vec<RegionName> = names?.into_iter().collect();
        if regions.is_some_and(|all| names.len() >= all.len()) {
            let what = "`cluster.witnesses` leaves no region that serves callers";
            self.faults.push(&node.mark, what, "take one out");
            return None;
        }
        Some(names)
    }

    /// A witness votes, and that is all: what is for callers has no meaning there.
    fn serves_nobody(&mut self, top: &Fields<'_>) -> Option<StoreConfig> {
        let listen =
            |key| Some((top.get("listen").and_then(|listen| entry(listen, key))?, format!("listen.{key}")));
        let keys = SERVING.iter().filter_map(|key| Some((top.get(key)?, (*key).to_owned())));
        let all: Vec<(&Node, String)> = keys.chain(["http", "grpc"].into_iter().filter_map(listen)).collect();
        for (node, key) in &all {
            let what = format!(
                "`{key}` is there, and this region is one of `cluster.witnesses`, which serve nobody"
            );
            self.faults.push(&node.mark, what, "take it out");
        }
        all.is_empty().then_some(StoreConfig::None)
    }

    fn peers(&mut self, node: &Node, tls: bool) -> Option<Vec<Peer>> {
        let entries = decode::entries(node, "cluster.regions", self.faults)?;
        if entries.is_empty() || entries.len() > REGIONS_MAX {
            let what = format!("`cluster.regions` has {} regions", entries.len());
            self.faults.push(&node.mark, what, format!("name 1 to {REGIONS_MAX}"));
            return None;
        }
        let mut peers: Vec<Peer> = Vec::with_capacity(entries.len());
        let mut all = true;
        for (key, url) in entries {
            let path = format!("cluster.regions.{}", key.name);
            let name = decode::name(&key.name);
            if let Err(wrong) = &name {
                let what = format!("{} is no region's name", shown(&key.name));
                self.faults.push(&key.mark, what, wrong.mend());
            }
            let url = decode::read(url, &path, self.faults, |text| {
                let url = peer_url(text, tls)?;
                match peers.iter().find(|peer| peer.url == url) {
                    None => Ok(url),
                    Some(other) => {
                        let what = format!("is {}, the URL of `{}`", shown(text), other.name);
                        Err(Wrong::new(what, "give each region its own"))
                    }
                }
            });
            match (name, url) {
                (Ok(name), Some(url)) => peers.push(Peer { name: name.into(), url }),
                _ => all = false,
            }
        }
        peers.sort_by(|a, b| a.name.cmp(&b.name));
        all.then_some(peers)
    }

    fn peer_tls(&mut self, node: &Node) -> Option<PeerTls> {
        let fields = Fields::of(node, "peer_tls", PEER_TLS, self.faults)?;
        let cert = self.pem(&fields, "cert", "the file of this region's certificate chain");
        let key = self.pem(&fields, "key", "the file of its private key");
        let ca = self.pem(&fields, "ca", "the file of the authority that signs all regions' certificates");
        Some(PeerTls { cert: cert?, key: key?, ca: ca? })
    }

    fn admin_tls(&mut self, node: &Node) -> Option<AdminTls> {
        let fields = Fields::of(node, "admin_tls", ADMIN_TLS, self.faults)?;
        let cert = self.pem(&fields, "cert", "the file of the admin listener's certificate chain");
        let key = self.pem(&fields, "key", "the file of its private key");
        Some(AdminTls { cert: cert?, key: key? })
    }

    /// A file that has to be named.
    pub(super) fn pem(&mut self, fields: &Fields<'_>, key: &str, what: &str) -> Option<PathBuf> {
        fields.need(key, &format!("name {what} (PEM)"), self.faults)?;
        fields.read(key, self.faults, |text| path(self.folder, text))
    }

    /// `Some(None)`: none is given, and none is needed.
    fn admin_token(&mut self, top: &Fields<'_>, listen: Option<&Listen>) -> Option<Option<Secret>> {
        let token = self.secret(top, "admin_token", token)?;
        match listen {
            Some(listen) if token.is_none() && !listen.admin.ip().is_loopback() => {
                let admin = top.get("listen").and_then(|listen| entry(listen, "admin"));
                let what = format!("`listen.admin` is {}, which is not on loopback", listen.admin);
                let mark = admin.map_or(top.mark(), |node| &node.mark);
                self.faults.push(mark, what, "add `admin_token_file`, or listen at 127.0.0.1");
                None
            }
            _ => Some(token),
        }
    }

    fn redact(&mut self, top: &Fields<'_>) -> Option<BTreeSet<Arc<str>>> {
        let Some(node) = top.get("redact") else { return Some(BTreeSet::new()) };
        let items = decode::items(node, "redact", self.faults)?;
        if items.len() > REDACT_MAX {
            let what = format!("`redact` has {} keys", items.len());
            self.faults.push(&node.mark, what, format!("at most {REDACT_MAX} are possible"));
            return None;
        }
        let keys: Vec<Option<Arc<str>>> = items
            .iter()
            .map(|item| {
                decode::read(item, "redact", self.faults, |t| decode::plain(t, KEY_BYTES_MAX).map(Arc::from))
            })
            .collect();
        keys.into_iter().collect()
    }

    fn forward_auth(&mut self, node: &Node) -> Option<ForwardAuth> {
        let fields = Fields::of(node, "forward_auth", FORWARD_AUTH, self.faults)?;
        let domain = fields.need("domain", "name the domain that is asked", self.faults).and_then(|_| {
            fields.read("domain", self.faults, |t| decode::plain(t, DOMAIN_BYTES_MAX).map(Arc::from))
        });
        let trusted = fields.read_or("trusted_proxies", 0, self.faults, |t| decode::whole(t, PROXIES_MAX));
        let mend = "name at least one, such as `ip: client-ip`";
        let attributes = fields.need("attributes", mend, self.faults)?;
        let entries = decode::entries(attributes, "forward_auth.attributes", self.faults)?;
        if entries.is_empty() || entries.len() > ATTRIBUTES_MAX {
            let what = format!("`forward_auth.attributes` has {} attributes", entries.len());
            self.faults.push(&attributes.mark, what, format!("name 1 to {ATTRIBUTES_MAX}"));
            return None;
        }
        let mut sources: Vec<(Arc<str>, AttributeSource)> = Vec::with_capacity(entries.len());
        for (key, node) in entries {
            let name = decode::plain(&key.name, KEY_BYTES_MAX);
            if name.is_err() {
                let what = format!("{} is not an attribute's key", shown(&key.name));
                self.faults.push(&key.mark, what, format!("use 1 to {KEY_BYTES_MAX} printable bytes"));
            }
            let path = format!("forward_auth.attributes.{}", key.name);
            let source = decode::read(node, &path, self.faults, attribute_source);
            if let (Ok(name), Some(source)) = (name, source) {
                sources.push((name.into(), source));
            }
        }
        sources.sort_by(|(a, _), (b, _)| a.cmp(b));
        (sources.len() == entries.len()).then_some(())?;
        let trusted_proxies = usize::try_from(trusted?).unwrap_or(0);
        Some(ForwardAuth { domain: domain?, trusted_proxies, attributes: sources })
    }

    fn telemetry(&mut self, top: &Fields<'_>) -> Option<Telemetry> {
        let Some(node) = top.get("telemetry") else { return Some(Telemetry::default()) };
        let fields = Fields::of(node, "telemetry", TELEMETRY, self.faults)?;
        let otlp = fields.read_or("otlp", None, self.faults, |text| super::url::otlp(text).map(Some));
        let log = fields.read_or("log", LogFormat::Text, self.faults, |text| {
            choice(text, &[("text", LogFormat::Text), ("json", LogFormat::Json)])
        });
        let default = Telemetry::default();
        let sampling = fields.read_or("sampling", default.sampling_ppm, self.faults, part_in_a_million);
        let log_filter = fields.read_or("log_filter", None, self.faults, |text| log_filter(text).map(Some));
        Some(Telemetry { otlp: otlp?, sampling_ppm: sampling?, log: log?, log_filter: log_filter? })
    }

    /// A scalar that may be left out: `Some(None)`.
    fn optional<T>(
        &mut self,
        fields: &Fields<'_>,
        key: &str,
        parse: impl FnOnce(&Path, &str) -> Result<T, Wrong>,
    ) -> Option<Option<T>> {
        fields.read_or(key, None, self.faults, |text| parse(self.folder, text).map(Some))
    }

    /// A secret, in place (`key`) or in a file (`key_file`); `Some(None)` if it is not there. Of a variable and the file, the
    /// variable counts.
    fn secret<T>(
        &mut self,
        fields: &Fields<'_>,
        key: &str,
        parse: impl Fn(&str) -> Result<T, Wrong>,
    ) -> Option<Option<T>> {
        let key_file = format!("{key}_file");
        if let (Some(a), Some(b)) = (fields.get(key), fields.get(&key_file))
            && from_env(a) == from_env(b)
        {
            let what = format!("`{}` and `{}` are both there", fields.name(key), fields.name(&key_file));
            self.faults.push(&b.mark, what, "keep one of them");
            return None;
        }
        match chosen(fields, key) {
            None => Some(None),
            Some(Chosen::Inline(node)) => decode::read(node, &fields.name(key), self.faults, parse).map(Some),
            Some(Chosen::File(node)) => decode::read(node, &fields.name(&key_file), self.faults, |text| {
                let file = path(self.folder, text)?;
                parse(&read_secret(&file)?)
            })
            .map(Some),
        }
    }
}

/// Where a secret is.
enum Chosen<'n> {
    /// Here.
    Inline(&'n Node),
    /// In the file that this names.
    File(&'n Node),
}

/// Of a key and its `_file`, the one that counts.
fn chosen<'n>(fields: &Fields<'n>, key: &str) -> Option<Chosen<'n>> {
    match (fields.get(key), fields.get(&format!("{key}_file"))) {
        (Some(inline), Some(_)) if from_env(inline) => Some(Chosen::Inline(inline)),
        (_, Some(file)) => Some(Chosen::File(file)),
        (inline, None) => inline.map(Chosen::Inline),
    }
}

fn from_env(node: &Node) -> bool {
    matches!(node.mark, Mark::Env(_))
}

/// Reads the admin token again.
///
/// # Errors
/// What is wrong with the file, and the mend; nothing of the token.
pub fn admin_token(file: &Path) -> Result<Secret, Wrong> {
    token(&read_secret(file)?)
}

/// A region and its peer listener, by the rules of `cluster.regions`, as an operator gave them; `tls`: there is mutual TLS
/// between regions.
///
/// # Errors
/// What is wrong, and how to mend it.
pub fn peer(name: &str, url: &str, tls: bool) -> Result<Peer, String> {
    let wrong = |what: &str, wrong: &Wrong| format!("{what} {}; {}", wrong.what(), wrong.mend());
    let name = decode::name(name).map_err(|w| wrong("the region's name", &w))?.into();
    let url = peer_url(url, tls).map_err(|w| wrong("its URL", &w))?;
    Ok(Peer { name, url })
}

fn transpose<T>(value: Option<Option<T>>) -> Option<Option<T>> {
    match value {
        Some(None) => None,
        Some(Some(value)) => Some(Some(value)),
        None => Some(None),
    }
}

fn choice<T: Copy>(text: &str, choices: &[(&str, T)]) -> Result<T, Wrong> {
    if let Some((_, value)) = choices.iter().find(|(name, _)| *name == text) {
        return Ok(*value);
    }
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    Err(Wrong::new(format!("is {}", shown(text)), format!("write {}", one_of(&names))))
}

pub(super) fn path(folder: &Path, text: &str) -> Result<PathBuf, Wrong> {
    decode::plain(text, 4096).map(|text| folder.join(text))
}

fn address(text: &str) -> Result<SocketAddr, Wrong> {
    text.parse().map_err(|_| {
        let mend = "write an IP address and a port, such as `127.0.0.1:8080` or `[::]:8080`";
        Wrong::new(format!("is not an address: {}", shown(text)), mend)
    })
}

fn peer_url(text: &str, tls: bool) -> Result<PeerUrl, Wrong> {
    let url = PeerUrl::from_str(text)?;
    match (tls, url.tls) {
        (true, true) => Ok(url),
        (true, false) => Err(Wrong::new(
            format!("is {}, without TLS", shown(text)),
            "write `https://`: there is `peer_tls`",
        )),
        (false, true) => Err(Wrong::new(
            format!("is {}, and there is no `peer_tls`", shown(text)),
            "add `peer_tls` (cert, key, ca)",
        )),
        (false, false) if is_loopback_host(&url.host) => Ok(url),
        (false, false) => Err(Wrong::new(
            format!("is {}, which is not on loopback, and there is no `peer_tls`", shown(text)),
            "add `peer_tls` (cert, key, ca) and write `https://`",
        )),
    }
}

fn attribute_source(text: &str) -> Result<AttributeSource, Wrong> {
    let wrong = |what: String| {
        let mend =
            "write `header:NAME`, `cookie:NAME`, `query:NAME`, `client-ip`, `method`, `host` or `path`";
        Wrong::new(what, mend)
    };
    let named = |name: &str| match decode::plain(name.trim(), KEY_BYTES_MAX) {
        Ok(name) => Ok(name.into()),
        Err(_) => Err(wrong(format!("names nothing: {}", shown(text)))),
    };
    match text.split_once(':') {
        None if text == "client-ip" => Ok(AttributeSource::ClientIp),
        None if text == "method" => Ok(AttributeSource::Method),
        None if text == "host" => Ok(AttributeSource::Host),
        None if text == "path" => Ok(AttributeSource::Path),
        Some(("query", name)) => named(name).map(AttributeSource::Query),
        Some(("cookie", name)) => named(name).map(AttributeSource::Cookie),
        Some(("header", name)) => http::HeaderName::from_str(name.trim())
            .map(AttributeSource::Header)
            .map_err(|_| wrong(format!("names no possible header: {}", shown(text)))),
        _ => Err(wrong(format!("is an unknown source: {}", shown(text)))),
    }
}

/// A part of all, from 0 to 1, with at most six decimals.
fn part_in_a_million(text: &str) -> Result<u32, Wrong> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    let part = (matches!(whole, "0" | "1") && decimals.len() <= 6 && digits(decimals))
        .then(|| format!("{whole}{decimals:0<6}").parse::<u32>().ok())
        .flatten()
        .filter(|part| *part <= 1_000_000);
    part.ok_or_else(|| {
        let mend = "write a number from 0 (none) to 1 (all), such as 0.01, with at most six decimals";
        Wrong::new(format!("is {}", shown(text)), mend)
    })
}

fn log_filter(text: &str) -> Result<Arc<str>, Wrong> {
    let mend = "write levels like `info` or `info,quorate::raft=debug`";
    match tracing_subscriber::EnvFilter::builder().parse(text) {
        Ok(_) if !text.trim().is_empty() => Ok(text.into()),
        Ok(_) => Err(Wrong::new("is empty", mend)),
        Err(error) => Err(Wrong::new(format!("is {}: {error}", shown(text)), mend)),
    }
}

/// Shows nothing of the token.
pub(super) fn token(text: &str) -> Result<Secret, Wrong> {
    let mend = format!("use at least {TOKEN_CHARS_MIN} printable ASCII characters without spaces");
    if text.len() < TOKEN_CHARS_MIN || text.len() > 4096 {
        return Err(Wrong::new(format!("has {} characters", text.len()), mend));
    }
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Wrong::new("has characters that a header cannot carry", mend));
    }
    Ok(Secret::new(text))
}

/// A secret file's text without the white space round it.
fn read_secret(file: &Path) -> Result<String, Wrong> {
    secret_text(file).map(|text| text.trim().to_owned())
}

/// A secret file's text.
pub(super) fn secret_text(file: &Path) -> Result<String, Wrong> {
    let unreadable = |error: std::io::Error| {
        let what = format!("names a file that cannot be read: {}: {error}", file.display());
        Wrong::new(what, "check the path and its permissions")
    };
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(unreadable)?;
    let read = opened.take(SECRET_FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
    if u64::try_from(read).unwrap_or(u64::MAX) > SECRET_FILE_BYTES_MAX {
        let what = format!("names a file that is too large for a secret: {}", file.display());
        return Err(Wrong::new(what, format!("at most {SECRET_FILE_BYTES_MAX} bytes are possible")));
    }
    Ok(text)
}
