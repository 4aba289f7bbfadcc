//! Regions in network namespaces: partitions are the kernel's, with nftables, and packets vanish or are refused as on a real line.
//!
//! Regions talk to each other directly, with mutual TLS, since daemons let nobody but loopback in without; so this is also the
//! way in which production runs. They reach their Redis through the harness' proxy, at the bridge. What is made has this process'
//! id in its name, and goes with it; [`clean`] removes what a killed run left behind.

use super::ground::{Addresses, Cuts, Place};
use super::scenario::How;
use anyhow::{Context as _, bail};
use quorate::quota::policy::RegionName;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// What all names begin with.
const PREFIX: &str = "qchaos";
const RULES: &str = "
table inet chaos {
  set blackholed { type ipv4_addr; }
  set refused { type ipv4_addr; }
  chain in {
    type filter hook input priority 0; policy accept;
    ip saddr @blackholed drop
    ip saddr @refused meta l4proto tcp reject with tcp reset
  }
}
";

/// A namespace for each region, and the bridge between them.
#[derive(Debug)]
pub struct Namespaces {
    bridge: String,
    /// `10.x.y.0/24`
    net: [u8; 3],
    names: Vec<Arc<str>>,
    folder: PathBuf,
    token: String,
    cuts: Mutex<Cuts>,
}

impl Namespaces {
    /// Makes them, and certificates and a token in `folder`.
    ///
    /// # Errors
    /// This is not root, or `ip` or `nft` is missing.
    pub fn new(regions: &[RegionName], folder: &Path) -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("--netns needs root: it makes network namespaces");
        }
        let id = std::process::id();
        let bridge = format!("{PREFIX}{id}");
        let net = free_net()?;
        let token = format!("{:032x}", rand::random::<u128>());
        let cuts = Mutex::new(Cuts::new(regions.len()));
        let mut made = Self { bridge, net, names: Vec::new(), folder: folder.to_owned(), token, cuts };
        run("ip", &["link", "add", &made.bridge, "type", "bridge"], None)?;
        run("ip", &["address", "add", &format!("{}/24", made.gateway()), "dev", &made.bridge], None)?;
        run("ip", &["link", "set", &made.bridge, "up"], None)?;
        for number in 0..regions.len() {
            made.add(number)?;
        }
        made.certify(regions)?;
        std::fs::write(made.token_file(), &made.token)?;
        Ok(made)
    }

    /// Where this program is, as seen from the regions.
    #[must_use]
    pub fn gateway(&self) -> IpAddr {
        self.ip(1)
    }

    /// A region's addresses.
    #[must_use]
    pub fn addresses(&self, region: usize) -> Addresses {
        let at = |port| SocketAddr::new(self.address(region), port);
        let place = |port| Place { address: at(port), namespace: self.names.get(region).cloned() };
        Addresses {
            http: place(8080),
            grpc: at(8081),
            peer: at(8082),
            admin: at(8083),
            redis: place(6379),
            replica: place(6380),
        }
    }

    /// Lines for `region.yaml`, and the token for the admin listener.
    #[must_use]
    pub fn more(&self, region: usize) -> (String, Option<String>) {
        let file = |name: String| self.folder.join(name).display().to_string();
        let tls = format!(
            "peer_tls: {{ cert: {}, key: {}, ca: {} }}\nadmin_token_file: {}\n",
            file(format!("tls-{region}.pem")),
            file(format!("tls-{region}.key")),
            file("tls-ca.pem".to_owned()),
            self.token_file().display(),
        );
        (tls, Some(self.token.clone()))
    }

    /// A file with that token.
    #[must_use]
    pub fn token_file(&self) -> PathBuf {
        self.folder.join("admin.token")
    }

    /// Cuts what one region sends to another, or ends a cut.
    ///
    /// # Errors
    /// nftables refuses.
    pub fn cut(&self, from: usize, to: usize, how: How, begins: bool) -> anyhow::Result<()> {
        let mut cuts = self.cuts.lock().unwrap_or_else(PoisonError::into_inner);
        let set = if how == How::Reset { "refused" } else { "blackholed" };
        let before = cuts.is_cut(from, to, how);
        let now = cuts.count(from, to, how, begins);
        let word = match (before, now) {
            (false, true) => "add",
            (true, false) => "delete",
            _ => return Ok(()),
        };
        let Some(namespace) = self.names.get(to) else { return Ok(()) };
        let element = format!("{word} element inet chaos {set} {{ {} }}\n", self.address(from));
        run("ip", &["netns", "exec", namespace, "nft", "-f", "-"], Some(&element))
    }

    /// Does what one region sends reach the other?
    #[must_use]
    pub fn is_open(&self, from: usize, to: usize) -> bool {
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner).is_open(from, to)
    }

    fn add(&mut self, number: usize) -> anyhow::Result<()> {
        let namespace = format!("{}-{number}", self.bridge);
        let veth = format!("{}v{number}", self.bridge);
        run("ip", &["netns", "add", &namespace], None)?;
        self.names.push(namespace.as_str().into());
        run(
            "ip",
            &["link", "add", &veth, "type", "veth", "peer", "name", "eth0", "netns", &namespace],
            None,
        )?;
        run("ip", &["link", "set", &veth, "master", &self.bridge, "up"], None)?;
        let address = format!("{}/24", self.address(number));
        run("ip", &["-n", &namespace, "address", "add", &address, "dev", "eth0"], None)?;
        run("ip", &["-n", &namespace, "link", "set", "eth0", "up"], None)?;
        run("ip", &["-n", &namespace, "link", "set", "lo", "up"], None)?;
        run("ip", &["netns", "exec", &namespace, "nft", "-f", "-"], Some(RULES))
    }

    /// One authority, and a certificate for each region.
    fn certify(&self, regions: &[RegionName]) -> anyhow::Result<()> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "quorate-chaos");
        let key = KeyPair::generate()?;
        let authority = params.self_signed(&key)?;
        std::fs::write(self.folder.join("tls-ca.pem"), authority.pem())?;
        let issuer = Issuer::new(params, key);
        for (number, region) in regions.iter().enumerate() {
            let mut params = CertificateParams::new(vec![region.to_string()])?;
            params.subject_alt_names.push(SanType::IpAddress(self.address(number)));
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &issuer)?;
            std::fs::write(self.folder.join(format!("tls-{number}.pem")), certificate.pem())?;
            std::fs::write(self.folder.join(format!("tls-{number}.key")), key.serialize_pem())?;
        }
        Ok(())
    }

    fn address(&self, region: usize) -> IpAddr {
        self.ip(u8::try_from(region.saturating_add(10)).unwrap_or(u8::MAX))
    }

    fn ip(&self, last: u8) -> IpAddr {
        let [a, b, c] = self.net;
        IpAddr::V4(Ipv4Addr::new(a, b, c, last))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = run("ip", &["netns", "delete", name], None);
        }
        let _ = run("ip", &["link", "delete", &self.bridge], None);
    }
}

/// Removes what runs that are no more left behind, and says what.
///
/// # Errors
/// `ip` is missing.
pub fn clean() -> anyhow::Result<Vec<String>> {
    let mut removed = Vec::new();
    for line in output("ip", &["netns", "list"])?.lines() {
        let name = line.split_whitespace().next().unwrap_or_default();
        if is_orphan(name) {
            run("ip", &["netns", "delete", name], None)?;
            removed.push(format!("network namespace {name}"));
        }
    }
    for line in output("ip", &["-o", "link", "show", "type", "bridge"])?.lines() {
        let name = line.split(": ").nth(1).unwrap_or_default().trim();
        if is_orphan(name) {
            run("ip", &["link", "delete", name], None)?;
            removed.push(format!("bridge {name}"));
        }
    }
    Ok(removed)
}

/// Has its name the id of a process that is no more?
fn is_orphan(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else { return false };
    let id = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    !id.is_empty() && !Path::new("/proc").join(id).exists()
}

/// Three bytes of a network that no interface of this machine has.
fn free_net() -> anyhow::Result<[u8; 3]> {
    let used = output("ip", &["-o", "-4", "address", "show"])?;
    let start = std::process::id();
    (0..=u8::MAX)
        .map(|step| [10, 213, u8::try_from(start % 256).unwrap_or(0).wrapping_add(step)])
        .find(|[a, b, c]| !used.contains(&format!(" {a}.{b}.{c}.")))
        .context("every network in 10.213.0.0/16 is in use")
}

fn output(program: &str, args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("`{program}` does not start; --netns needs it"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn run(program: &str, args: &[&str], input: Option<&str>) -> anyhow::Result<()> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child =
        command.spawn().with_context(|| format!("`{program}` does not start; --netns needs it"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.unwrap_or_default().as_bytes())?;
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        bail!("{program} {}: {why}", args.join(" "));
    }
    Ok(())
}
