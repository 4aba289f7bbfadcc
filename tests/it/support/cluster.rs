//! Regions on one machine: each a daemon and a Redis of its own, and a link between every ordered pair of them.

use super::client::Api;
use super::daemon::{Daemon, Settings};
use super::redis::Redis;
use super::{eventually, free_address, hold};
use quorate::wan::Link;
use std::net::SocketAddr;
use std::time::Duration;

/// The regions of a test cluster.
pub const REGIONS: [&str; 3] = ["ap-south", "eu-west", "us-east"];
/// A leader must be there within this after a start.
const LEADER_WITHIN: Duration = Duration::from_secs(20);

/// A running cluster. `redis[i]` and `daemons[i]` are those of `REGIONS[i]`.
pub struct Cluster {
    /// The regions' stores.
    pub redis: Vec<Redis>,
    /// The regions' daemons.
    pub daemons: Vec<Daemon>,
    /// Where the regions listen for each other.
    peers: Vec<SocketAddr>,
    policies: String,
    /// From, to, and the line between.
    links: Vec<(usize, usize, Link)>,
}

/// How to start one.
#[derive(Clone, Default)]
pub struct Plan {
    /// `policies.yaml`
    pub policies: String,
    /// Round trip between any two regions.
    pub rtt: Duration,
    /// How far each region's daemon's and Redis' wall clocks are off, in seconds.
    pub clocks: Option<[(i64, i64); 3]>,
    /// The URL of a region's store, where it is not a Redis of its own. (That one is down, and nobody's.)
    pub stores: [Option<String>; 3],
}

impl Cluster {
    /// Starts three regions and waits until each is ready and all agree on a leader.
    pub async fn start(plan: Plan) -> Self {
        Self::start_with(plan, "").await
    }

    /// The same, with more lines in every `region.yaml`.
    pub async fn start_with(plan: Plan, more: &str) -> Self {
        Self::start_among(plan, more, &[]).await
    }

    /// The same; some of the regions are witnesses. (Their Redis is down, and nobody's.)
    pub async fn start_among(plan: Plan, more: &str, witnesses: &[&str]) -> Self {
        let peers: Vec<SocketAddr> = REGIONS.iter().map(|_| free_address()).collect();
        let links = links(&peers, plan.rtt / 2).await;
        let (redis, daemons, policies) = (Vec::new(), Vec::new(), plan.policies.clone());
        let mut cluster = Self { redis, daemons, peers: peers.clone(), policies, links };
        for (i, region) in REGIONS.iter().enumerate() {
            let redis = match plan.clocks {
                _ if witnesses.contains(region) || plan.stores[i].is_some() => Redis::down(),
                Some(clocks) => Redis::start_with_clock(clocks[i].1).await,
                None => Redis::start().await,
            };
            let mut daemon = Daemon::down(Settings {
                region: (*region).to_owned(),
                regions: cluster.regions_seen_from(i, &peers),
                witnesses: witnesses.iter().map(ToString::to_string).collect(),
                redis: Some(plan.stores[i].clone().unwrap_or_else(|| redis.url())),
                policies: plan.policies.clone(),
                more: more.to_owned(),
                env: Vec::new(),
                peer: peers[i],
                clock: plan.clocks.map(|clocks| clocks[i].0),
            });
            daemon.spawn();
            cluster.redis.push(redis);
            cluster.daemons.push(daemon);
        }
        for daemon in &mut cluster.daemons {
            daemon.ready().await;
        }
        cluster.agreed_leader(LEADER_WITHIN, &[0, 1, 2]).await;
        cluster
    }

    /// A daemon and a Redis more, for a region that is not in the cluster yet; it is down. No links lead to it or from it.
    pub async fn newcomer(&mut self, region: &str) -> usize {
        let redis = Redis::start().await;
        let peer = free_address();
        let known = REGIONS.iter().map(|r| (*r).to_owned()).zip(self.peers.iter().copied());
        let regions = known.chain([(region.to_owned(), peer)]);
        self.daemons.push(Daemon::down(Settings {
            region: region.to_owned(),
            regions: regions.map(|(name, address)| (name, format!("http://{address}"))).collect(),
            witnesses: Vec::new(),
            redis: Some(redis.url()),
            policies: self.policies.clone(),
            more: String::new(),
            env: Vec::new(),
            peer,
            clock: None,
        }));
        self.redis.push(redis);
        self.daemons.len() - 1
    }

    /// Callers of each region's HTTP listener.
    pub fn apis(&self) -> Vec<Api> {
        self.daemons.iter().map(Daemon::api).collect()
    }

    /// Waits until these regions name the same leader, one of themselves, and returns it.
    pub async fn agreed_leader(&self, deadline: Duration, regions: &[usize]) -> usize {
        eventually("the regions agree on a leader", deadline, || async {
            let mut leaders = Vec::new();
            for region in regions {
                leaders.push(self.daemons[*region].leader().await?);
            }
            let first = leaders.first().and_then(|leader| REGIONS.iter().position(|r| r == leader));
            let leader = first.ok_or_else(|| format!("no region is called {:?}", leaders.first()))?;
            let agreed = regions.contains(&leader) && leaders.iter().all(|l| l == REGIONS[leader]);
            hold(agreed, || format!("{regions:?} name {leaders:?}"))?;
            Ok(leader)
        })
        .await
    }

    /// Cuts a region off from all others, both ways.
    pub fn cut_off(&self, region: usize) {
        self.links_of(region).for_each(Link::cut);
    }

    /// Ends that; what was sent meanwhile arrives.
    pub fn heal(&self, region: usize) {
        self.links_of(region).for_each(Link::heal);
    }

    fn links_of(&self, region: usize) -> impl Iterator<Item = &Link> {
        self.links
            .iter()
            .filter(move |(from, to, _)| *from == region || *to == region)
            .map(|(_, _, link)| link)
    }

    fn regions_seen_from(&self, region: usize, peers: &[SocketAddr]) -> Vec<(String, String)> {
        let address = |other: usize| {
            let link = self.links.iter().find(|(from, to, _)| *from == region && *to == other);
            link.map_or(peers[other], |(_, _, link)| link.addr())
        };
        let named =
            |(other, name): (usize, &&str)| ((*name).to_owned(), format!("http://{}", address(other)));
        REGIONS.iter().enumerate().map(named).collect()
    }
}

async fn links(peers: &[SocketAddr], delay: Duration) -> Vec<(usize, usize, Link)> {
    let mut links = Vec::new();
    for from in 0..peers.len() {
        for to in (0..peers.len()).filter(|to| *to != from) {
            let link = Link::listen(free_address(), peers[to], delay).await.expect("a link starts");
            links.push((from, to, link));
        }
    }
    links
}
