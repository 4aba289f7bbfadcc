//! Where a cluster stands: on loopback with a proxy for each line, or in network namespaces where the kernel does the partitions.

use super::lines::Lines;
use super::netns::Namespaces;
use super::ports::free_address;
use super::scenario::{How, Slow, Topology};
use anyhow::bail;
use quorate::wan::Link;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// An address, and where a program has to run to have it.
#[derive(Clone, Debug)]
pub struct Place {
    /// The address.
    pub address: SocketAddr,
    /// The network namespace; `None`: this program's.
    pub namespace: Option<Arc<str>>,
}

impl Place {
    /// A command that runs there.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        match &self.namespace {
            None => Command::new(program),
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, program]);
                command
            }
        }
    }
}

/// The addresses of one region.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// Where its daemon runs, and listens for HTTP.
    pub http: Place,
    /// gRPC.
    pub grpc: SocketAddr,
    /// Other regions.
    pub peer: SocketAddr,
    /// Operators.
    pub admin: SocketAddr,
    /// Its Redis.
    pub redis: Place,
    /// The replica of that.
    pub replica: Place,
}

/// Where a cluster stands.
#[derive(Debug)]
pub enum Ground {
    /// Loopback.
    Loopback(Lines),
    /// Network namespaces.
    Namespaces(Namespaces),
}

impl Ground {
    /// Makes lines or namespaces. What namespaces need besides is put into `folder`.
    ///
    /// # Errors
    /// They cannot be made.
    pub async fn new(topology: &Topology, namespaces: bool, folder: &Path) -> anyhow::Result<Self> {
        if namespaces {
            return Ok(Self::Namespaces(Namespaces::new(&topology.regions, folder)?));
        }
        Ok(Self::Loopback(Lines::new(topology).await?))
    }

    /// A region's addresses. (On loopback: new ones each time, but for the peers'.)
    ///
    /// # Errors
    /// There are none left.
    pub fn addresses(&self, region: usize) -> anyhow::Result<Addresses> {
        match self {
            Self::Namespaces(namespaces) => Ok(namespaces.addresses(region)),
            Self::Loopback(lines) => {
                let place = || anyhow::Ok(Place { address: free_address()?, namespace: None });
                Ok(Addresses {
                    http: place()?,
                    grpc: free_address()?,
                    peer: lines.peer(region),
                    admin: free_address()?,
                    redis: place()?,
                    replica: place()?,
                })
            }
        }
    }

    /// How one region reaches another's daemon.
    #[must_use]
    pub fn peer_url(&self, from: usize, to: usize) -> String {
        match self {
            Self::Loopback(lines) => format!("http://{}", lines.address(from, to)),
            Self::Namespaces(namespaces) => format!("https://{}", namespaces.addresses(to).peer),
        }
    }

    /// How a region is written in its own configuration.
    #[must_use]
    pub fn own_url(&self, peer: SocketAddr) -> String {
        match self {
            Self::Loopback(_) => format!("http://{peer}"),
            Self::Namespaces(_) => format!("https://{peer}"),
        }
    }

    /// What a daemon needs in `region.yaml` besides, and the token for its admin listener.
    #[must_use]
    pub fn more(&self, region: usize) -> (String, Option<String>) {
        match self {
            Self::Loopback(_) => (String::new(), None),
            Self::Namespaces(namespaces) => namespaces.more(region),
        }
    }

    /// A file with the token for admin listeners, if they need one.
    #[must_use]
    pub fn token_file(&self) -> Option<PathBuf> {
        match self {
            Self::Loopback(_) => None,
            Self::Namespaces(namespaces) => Some(namespaces.token_file()),
        }
    }

    /// A line from a region's daemon, through this program, to `target`.
    ///
    /// # Errors
    /// No port is free.
    pub async fn line(&self, target: SocketAddr, rtt: Duration) -> anyhow::Result<Link> {
        let listen = match self {
            Self::Loopback(_) => free_address()?,
            Self::Namespaces(namespaces) => SocketAddr::new(namespaces.gateway(), 0),
        };
        Ok(Link::listen(listen, target, rtt / 2).await?)
    }

    /// Cuts what one region sends to another, or (`begins` is false) ends a cut. Cuts add up.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn cut(&self, from: usize, to: usize, how: How, begins: bool) -> anyhow::Result<()> {
        match self {
            Self::Loopback(lines) => lines.cut(from, to, how, begins),
            Self::Namespaces(namespaces) => namespaces.cut(from, to, how, begins)?,
        }
        Ok(())
    }

    /// Makes what one region sends to another slow; `None`: as it was.
    ///
    /// # Errors
    /// Not in namespaces.
    pub fn slow(&self, from: usize, to: usize, slow: Option<Slow>) -> anyhow::Result<()> {
        match self {
            Self::Loopback(lines) => lines.slow(from, to, slow),
            Self::Namespaces(_) if slow.is_some() => {
                bail!("lines between namespaces cannot be slow; leave out --netns")
            }
            Self::Namespaces(_) => {}
        }
        Ok(())
    }

    /// Does what one region sends reach the other?
    #[must_use]
    pub fn is_open(&self, from: usize, to: usize) -> bool {
        match self {
            Self::Loopback(lines) => lines.is_open(from, to),
            Self::Namespaces(namespaces) => namespaces.is_open(from, to),
        }
    }
}

/// How often each ordered pair of regions is cut.
#[derive(Clone, Debug)]
pub struct Cuts(Vec<Vec<[u32; 2]>>);

impl Cuts {
    /// None so far.
    #[must_use]
    pub fn new(regions: usize) -> Self {
        Self(vec![vec![[0; 2]; regions]; regions])
    }

    /// One more, or one less; is the pair cut in this way now?
    pub fn count(&mut self, from: usize, to: usize, how: How, begins: bool) -> bool {
        let Some(cell) = self.0.get_mut(from).and_then(|row| row.get_mut(to)) else { return false };
        let [blackhole, reset] = cell;
        let count = if how == How::Reset { reset } else { blackhole };
        *count = if begins { count.saturating_add(1) } else { count.saturating_sub(1) };
        *count > 0
    }

    /// Is the pair cut in this way?
    #[must_use]
    pub fn is_cut(&self, from: usize, to: usize, how: How) -> bool {
        let cell = self.0.get(from).and_then(|row| row.get(to));
        cell.is_some_and(|[blackhole, reset]| if how == How::Reset { *reset > 0 } else { *blackhole > 0 })
    }

    /// Is the pair not cut in any way?
    #[must_use]
    pub fn is_open(&self, from: usize, to: usize) -> bool {
        self.0.get(from).and_then(|row| row.get(to)).is_some_and(|cell| *cell == [0, 0])
    }
}
