//! `quorate dev`: a whole multi-region cluster on this machine, in one process.

mod lines;
mod redis;

use super::serve;
use crate::config::{
    self, Cluster, Config, Listen, Peer, PeerUrl, RedisConfig, RedisUrl, StoreConfig, Unmatched,
};
use crate::node::Node;
use crate::quota::policy::{KeyMatch, Policy, RegionName, ValueMatch};
use crate::telemetry;
use anyhow::{Context as _, bail};
use lines::Lines;
use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

/// What regions are called, in order; there can be no more.
const NAMES: [&str; 9] =
    ["us-east", "eu-west", "ap-south", "us-west", "eu-north", "ap-east", "sa-east", "af-south", "me-central"];
/// What a witness is called.
const WITNESS: &str = "witness";
/// Ports from one region to the next.
const PORTS_A_REGION: u16 = 10;
/// Of the first region's ports, the one where lines are cut and joined.
const LINES_PORT: u16 = 9;
/// The policies of the example, where no file is given.
const EXAMPLE: &str = include_str!("../../config/policies.yaml");
/// What it is called in messages.
const EXAMPLE_NAME: &str = "the example policies";
/// How long to wait for all regions to be ready before saying what they wait for.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// The longest line between regions.
const WAN_RTT_MAX: Duration = Duration::from_secs(2);
/// Within this a decision needs an answer from a spawned Redis.
const REDIS_TIMEOUT: Duration = Duration::from_millis(20);

/// Run a whole multi-region cluster on this machine, in one process: nothing to install.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How many regions
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=9))]
    pub regions: u16,
    /// Besides, a witness: it votes, and serves nobody
    #[arg(long)]
    pub witness: bool,
    /// A policy file [default: the commented example, config/policies.yaml]
    #[arg(long, value_name = "FILE")]
    pub policies: Option<PathBuf>,
    /// Where buckets live: in memory, or in one redis-server a region
    #[arg(long, value_enum, default_value_t = RedisKind::Embedded)]
    pub redis: RedisKind,
    /// Round trip between any two regions
    #[arg(long, default_value = "80ms", value_parser = wan_rtt)]
    pub wan_rtt: Duration,
    /// Region i (from 0) listens at this + 10 i: +0 HTTP, +1 gRPC, +2 peer, +3 admin. At this + 9 lines are cut
    #[arg(long, default_value_t = 8000)]
    pub base_port: u16,
    /// Where state goes [default: a temporary folder]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
}

impl Args {
    /// How many daemons there are.
    fn members(&self) -> u16 {
        self.regions + u16::from(self.witness)
    }

    /// The name of one of them: the witness comes last.
    fn name(&self, member: u16) -> RegionName {
        if member >= self.regions { WITNESS.into() } else { name(member) }
    }
}

/// Where buckets live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum RedisKind {
    /// In memory.
    Embedded,
    /// In one redis-server a region.
    Spawn,
}

/// Runs the cluster until SIGTERM or SIGINT.
///
/// # Errors
/// If it cannot start.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let policies = match &args.policies {
        Some(file) => config::policies::load(file, Some(&names(args)))?,
        None => config::policies::parse(Path::new(EXAMPLE_NAME), EXAMPLE, None)?,
    };
    let telemetry = telemetry::init(&telemetry::Options {
        region: "dev".into(),
        // The table is what people want to see here.
        log_filter: Some("warn,openraft=off,raft_log=off".into()),
        ..Default::default()
    })?;
    let runtime = serve::control_runtime()?;
    let done = runtime.block_on(async {
        // From the first moment on: a signal must not leave servers and folders behind.
        let mut stopped = std::pin::pin!(stopped()?);
        let began = Instant::now();
        let start = async {
            let cluster = Dev::start(args, &policies).await?;
            cluster.ready(began).await?;
            anyhow::Ok(cluster)
        };
        let cluster = tokio::select! {
            cluster = start => cluster?,
            () = &mut stopped => bail!("interrupted while starting"),
        };
        let at = addr(args, 0, LINES_PORT);
        let listener = tokio::net::TcpListener::bind(at).await;
        let listener = listener.with_context(|| format!("{at}: cannot listen there to cut and join lines"))?;
        say(&cluster.describe(args, &policies, began));
        tokio::select! {
            () = stopped => {}
            failed = Arc::clone(&cluster.lines).serve(listener) => failed.context("cutting and joining lines")?,
            why = cluster.failed() => bail!("{why}"),
        }
        say("\nstopping");
        cluster.stop().await;
        anyhow::Ok(ExitCode::SUCCESS)
    });
    telemetry.shutdown();
    done
}

/// Waits for SIGINT, SIGTERM, or SIGHUP (the terminal has gone).
fn stopped() -> anyhow::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut hang_up = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hang_up.recv() => {}
        }
    })
}

struct Dev {
    nodes: Vec<Node>,
    configs: Vec<Config>,
    /// Dropped last: the lines, the servers and the folder that the nodes use.
    lines: Arc<Lines>,
    _redis: Vec<redis::Server>,
    _temporary: Option<Temporary>,
}

impl Dev {
    async fn start(args: &Args, policies: &[Policy]) -> anyhow::Result<Self> {
        let last = u32::from(args.base_port) + u32::from((args.members() - 1) * PORTS_A_REGION) + 4;
        if args.base_port == 0 || last > u32::from(u16::MAX) {
            bail!(
                "--base-port {}: {} regions need ports up to {last}; choose a lower one",
                args.base_port,
                args.regions
            );
        }
        let (data_dir, temporary) = match &args.data_dir {
            Some(dir) => (dir.clone(), None),
            None => {
                let temporary = Temporary::new()?;
                (temporary.0.clone(), Some(temporary))
            }
        };
        let mut lines = Lines::default();
        let mut servers = Vec::new();
        let mut configs = Vec::new();
        for me in 0..args.members() {
            let mut peers = Vec::new();
            for other in 0..args.members() {
                let mut at = addr(args, other, 2);
                if other != me && !args.wan_rtt.is_zero() {
                    let line = lines.lay(args.name(me), args.name(other), at, args.wan_rtt / 2).await;
                    at = line.context("cannot lay a line between regions")?;
                }
                let url = PeerUrl { tls: false, host: at.ip().to_string().into(), port: at.port() };
                peers.push(Peer { name: args.name(other), url });
            }
            peers.sort_by(|a, b| a.name.cmp(&b.name));
            let dir = data_dir.join(&*args.name(me));
            let store = match args.redis {
                _ if me >= args.regions => StoreConfig::None,
                RedisKind::Embedded => StoreConfig::Embedded,
                RedisKind::Spawn => {
                    let server = redis::Server::start(addr(args, me, 4), &dir.join("redis")).await?;
                    let url = RedisUrl::from_str(&server.url())
                        .map_err(|wrong| anyhow::anyhow!("redis-server: {wrong:?}"))?;
                    servers.push(server);
                    StoreConfig::Redis(RedisConfig { url, tls: None, timeout: REDIS_TIMEOUT })
                }
            };
            configs.push(config(args, me, peers, store, dir.join("raft")));
        }
        let nodes = configs.iter().map(|config| async {
            let node = Node::start(config.clone(), policies.to_vec()).await;
            let place = || {
                format!(
                    "region {}; are the ports from --base-port {} on free?",
                    config.region, args.base_port
                )
            };
            node.with_context(place)
        });
        let nodes = futures::future::try_join_all(nodes).await?;
        Ok(Self { nodes, configs, lines: Arc::new(lines), _redis: servers, _temporary: temporary })
    }

    async fn ready(&self, began: Instant) -> anyhow::Result<()> {
        let mut told = false;
        loop {
            let waits: Vec<String> = self
                .nodes
                .iter()
                .zip(&self.configs)
                .filter_map(|(node, config)| {
                    Some(format!("{}: {}", config.region, node.not_ready().first()?))
                })
                .collect();
            if waits.is_empty() {
                return Ok(());
            }
            if began.elapsed() > READY_WITHIN && !told {
                say(&format!("still waiting for\n  {}", waits.join("\n  ")));
                told = true;
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(20)) => {}
                why = self.failed() => bail!("{why}"),
            }
        }
    }

    async fn failed(&self) -> String {
        let all = self.nodes.iter().map(|node| Box::pin(node.failed()));
        futures::future::select_all(all).await.0
    }

    async fn stop(self) {
        futures::future::join_all(self.nodes.into_iter().map(Node::drain)).await;
    }

    fn describe(&self, args: &Args, policies: &[Policy], began: Instant) -> String {
        let (bold, dim, plain) =
            if std::io::stdout().is_terminal() { ("\x1b[1m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
        let mut out = String::new();
        let buckets = match args.redis {
            RedisKind::Embedded => "buckets in memory",
            RedisKind::Spawn => "a redis-server each",
        };
        let n = args.regions;
        let plural = if n == 1 { "" } else { "s" };
        let plural = if args.witness { format!("{plural} and a witness") } else { plural.into() };
        out += &format!(
            "{bold}Quorate{plain}: {n} region{plural} in one process, {} ms apart, {buckets}. Ready after {} ms.\n\n",
            args.wan_rtt.as_millis(),
            began.elapsed().as_millis()
        );
        out += &format!("  {dim}{:<12}{:<24}{:<18}{:<24}{plain}\n", "region", "HTTP", "gRPC", "admin");
        for config in &self.configs {
            let l = &config.listen;
            let (mut http, mut grpc, admin) =
                (format!("http://{}", l.http), l.grpc.to_string(), format!("http://{}", l.admin));
            if config.is_witness() {
                (http, grpc) = ("(votes, serves nobody)".into(), "-".into());
            }
            out += &format!("  {:<12}{http:<24}{grpc:<18}{admin:<24}\n", config.region);
        }
        out.push('\n');
        for policy in policies.iter().take(8) {
            let keys: Vec<&str> = policy.matches.iter().map(|m| &*m.key).collect();
            out += &format!(
                "  {dim}policy{plain} {:<20}{:<12}{:<28}domain {}, by {}\n",
                policy.name,
                policy.mode.name(),
                policy.limit.to_string(),
                policy.domain,
                keys.join(", ")
            );
        }
        let me = std::env::args().next().unwrap_or_else(|| "quorate".into());
        if let (Some(first), Some(policy)) = (self.configs.first(), policies.first()) {
            let (http, admin) = (first.listen.http, first.listen.admin);
            let values: Vec<String> = policy.matches.iter().map(example).collect();
            let values = values.join(" ");
            let last = self.configs.iter().rfind(|config| !config.is_witness()).unwrap_or(first).listen.http;
            out += &format!(
                "\n{bold}Try:{plain}\n  {me} check --addr http://{http} --domain {} {values}\n  \
                 for i in $(seq 120); do {me} check --addr http://{last} --domain {} {values}; done | sort | uniq -c | sort -rn | head -3\n  \
                 {me} status --admin http://{admin}\n  \
                 {me} top --admin http://{admin}\n\n{bold}Console:{plain} http://{admin}/console",
                policy.domain, policy.domain
            );
        }
        if self.configs.len() > 1 && !args.wan_rtt.is_zero() {
            let at = addr(args, 0, LINES_PORT);
            out += &format!("\n\n{bold}Cut a region off, and join it again:{plain}");
            for what in ["cut", "join"] {
                out += &format!("\n  curl -X POST http://{at}/{what}/{}", name(0));
            }
        }
        out + "\n\nCtrl-C stops it."
    }
}

fn config(args: &Args, me: u16, regions: Vec<Peer>, store: StoreConfig, data_dir: PathBuf) -> Config {
    Config {
        region: args.name(me),
        listen: Listen {
            http: addr(args, me, 0),
            grpc: addr(args, me, 1),
            peer: addr(args, me, 2),
            admin: addr(args, me, 3),
        },
        store,
        data_dir,
        cluster: Cluster {
            name: "dev".into(),
            regions,
            witnesses: if args.witness { vec![WITNESS.into()] } else { Vec::new() },
            rtt_max: args.wan_rtt.max(crate::raft::RTT_MAX_DEFAULT),
        },
        drain_wait: Duration::ZERO,
        drain_within: config::region::DRAIN_WITHIN_DEFAULT,
        policies: None,
        unmatched: Unmatched::Allow,
        peer_tls: None,
        admin_token: None,
        admin_token_file: None,
        admin_tls: None,
        caller_tls: None,
        caller_tokens_file: None,
        caller_limits: config::CallerLimits::default(),
        redact: BTreeSet::new(),
        redact_key: None,
        forward_auth: None,
        telemetry: config::Telemetry::default(),
    }
}

/// Attributes that match.
fn example(key: &KeyMatch) -> String {
    match &key.value {
        ValueMatch::Exact(value) => format!("{}={value}", key.key),
        ValueMatch::Prefix(prefix) | ValueMatch::Shared(prefix) => format!("{}={prefix}42", key.key),
        ValueMatch::Any => format!("{}=42", key.key),
    }
}

fn wan_rtt(text: &str) -> Result<Duration, String> {
    config::duration(text, Duration::ZERO, WAN_RTT_MAX)
}

fn names(args: &Args) -> Vec<RegionName> {
    (0..args.regions).map(name).collect()
}

fn name(region: u16) -> RegionName {
    NAMES.get(usize::from(region)).copied().unwrap_or("region").into()
}

fn addr(args: &Args, region: u16, port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, args.base_port.saturating_add(region * PORTS_A_REGION).saturating_add(port)).into()
}

/// Prints a line; whoever reads may have gone away.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// A folder that goes when the command ends.
struct Temporary(PathBuf);

impl Temporary {
    fn new() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("quorate-dev-{}", std::process::id()));
        std::fs::create_dir_all(&dir).with_context(|| format!("{}: cannot be made", dir.display()))?;
        Ok(Self(dir))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(dir: &Path) {
    if let Err(error) = std::fs::remove_dir_all(dir) {
        tracing::warn!(dir = %dir.display(), %error, "could not remove the temporary folder");
    }
}
