//! A proxy for each ordered pair of regions: what the first one opens to the second goes through it.

use super::ground::Cuts;
use super::ports::free_address;
use super::scenario::{How, Slow, Topology};
use anyhow::Context as _;
use quorate::wan::{Direction, Link};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// All of them.
#[derive(Debug)]
pub struct Lines {
    peers: Vec<SocketAddr>,
    /// By who opens connections, and to whom; none from a region to itself.
    links: Vec<Vec<Option<Link>>>,
    usual: Vec<Vec<Slow>>,
    cuts: Mutex<Cuts>,
}

impl Lines {
    /// Starts them.
    ///
    /// # Errors
    /// No ports are free.
    pub async fn new(topology: &Topology) -> anyhow::Result<Self> {
        let regions = topology.regions.len();
        let peers = (0..regions).map(|_| free_address()).collect::<anyhow::Result<Vec<_>>>()?;
        let (mut links, mut usual) = (Vec::new(), Vec::new());
        for from in 0..regions {
            let (mut row, mut usual_row) = (Vec::new(), Vec::new());
            for (to, peer) in peers.iter().enumerate() {
                let rtt = topology.rtt.get(from).and_then(|row| row.get(to)).copied().unwrap_or_default();
                usual_row.push(Slow {
                    rtt: Some(rtt),
                    jitter: Some(topology.jitter),
                    bandwidth: topology.bandwidth,
                });
                row.push(match from == to {
                    true => None,
                    false => Some(
                        Link::listen(free_address()?, *peer, rtt / 2)
                            .await
                            .context("a proxy cannot listen")?,
                    ),
                });
            }
            links.push(row);
            usual.push(usual_row);
        }
        let lines = Self { peers, links, usual, cuts: Mutex::new(Cuts::new(regions)) };
        (0..regions).for_each(|from| (0..regions).for_each(|to| lines.slow(from, to, None)));
        Ok(lines)
    }

    /// Where a region listens for others.
    #[must_use]
    pub fn peer(&self, region: usize) -> SocketAddr {
        self.peers.get(region).copied().unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    }

    /// Where one region reaches another.
    #[must_use]
    pub fn address(&self, from: usize, to: usize) -> SocketAddr {
        self.link(from, to).map_or(self.peer(to), Link::addr)
    }

    /// Cuts what one region sends to another, or ends a cut.
    pub fn cut(&self, from: usize, to: usize, how: How, begins: bool) {
        let is_cut = self.cuts.lock().unwrap_or_else(PoisonError::into_inner).count(from, to, how, begins);
        match how {
            How::Reset => self.link(from, to).into_iter().for_each(|link| link.set_refuses(is_cut)),
            How::Blackhole => self.ways(from, to).for_each(|(link, way)| match is_cut {
                true => link.cut_one_way(way),
                false => link.heal_one_way(way),
            }),
        }
    }

    /// Makes what one region sends to another slow; `None`: as it was.
    pub fn slow(&self, from: usize, to: usize, slow: Option<Slow>) {
        let usual = self.usual.get(from).and_then(|row| row.get(to)).copied().unwrap_or_default();
        let slow = slow.unwrap_or(usual);
        for (link, way) in self.ways(from, to) {
            link.set_delay_one_way(way, slow.rtt.or(usual.rtt).unwrap_or(Duration::ZERO) / 2);
            link.set_jitter_one_way(way, slow.jitter.or(usual.jitter).unwrap_or(Duration::ZERO));
            link.set_bandwidth_one_way(way, slow.bandwidth.or(usual.bandwidth));
        }
    }

    /// Does what one region sends reach the other?
    #[must_use]
    pub fn is_open(&self, from: usize, to: usize) -> bool {
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner).is_open(from, to)
    }

    /// All that carries bytes from one region to another: connections that it opened, and answers on those of the other.
    fn ways(&self, from: usize, to: usize) -> impl Iterator<Item = (&Link, Direction)> {
        let out = self.link(from, to).map(|link| (link, Direction::ToTarget));
        let back = self.link(to, from).map(|link| (link, Direction::FromTarget));
        out.into_iter().chain(back)
    }

    fn link(&self, from: usize, to: usize) -> Option<&Link> {
        self.links.get(from)?.get(to)?.as_ref()
    }
}
