//! The other regions: where they are, whether they answer, and whether they are who they were.

use super::wire::{Refusal, header};
use crate::quota::policy::RegionName;
use crate::quota::pool::LEVEL;
pub(crate) use crate::quota::pool::REGIONS_MAX;
use crate::raft::data_dir::{Acquaintances, Identity};
use http::HeaderMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use tokio::time::Instant;

/// All regions but this one.
#[derive(Debug)]
pub(crate) struct Peers {
    pub me: Identity,
    known: Acquaintances,
    /// Where this region's configuration says that the others are.
    configured: BTreeMap<RegionName, String>,
    book: RwLock<Book>,
    /// Peers that say that this node has been removed.
    removed_by: Mutex<BTreeSet<RegionName>>,
    /// When a refusal of each kind was logged last.
    refusals: Mutex<BTreeMap<&'static str, Instant>>,
    /// Sums up how this region names its buckets.
    pub redaction: Option<u64>,
    /// The level of operations that this node applies.
    pub level: u32,
    /// Calls of those that are no peers (yet).
    strangers: Calls,
}

#[derive(Debug, Default)]
struct Book {
    peers: BTreeMap<RegionName, Arc<Peer>>,
    /// The newest list of members that this node has heard of. Until there is one, the peers are those of the configuration.
    members: Option<Listed>,
    /// The newest node id that entries were to be sent to, of each region: Raft sends them before there is a list that says so.
    targets: BTreeMap<RegionName, u64>,
    /// The node id that each region had when this process first heard of it: the configuration knows where that one is.
    first: BTreeMap<RegionName, u64>,
}

#[derive(Debug)]
struct Listed {
    /// Of the log entry that says so.
    index: u64,
    /// It is in this node's own log: whatever takes its place there counts, also an earlier entry, where this one was not
    /// committed in the end.
    own: bool,
    nodes: BTreeMap<RegionName, u64>,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Peer {
    pub region: RegionName,
    pub url: String,
    health: Mutex<Health>,
    /// The level of operations that it has said last that it applies; 0: it has said nothing yet.
    level: AtomicU32,
    /// What it has asked lately.
    pub calls: Calls,
}

/// The most calls that one region may make a second: many times what it needs. (A stream of entries is one call.)
const CALLS_PER_SECOND: u32 = 5_000;

/// Counts calls, second by second.
#[derive(Debug, Default)]
pub(crate) struct Calls(Mutex<Option<(Instant, u32)>>);

impl Calls {
    /// One more; false: it is one too many.
    pub fn count(&self) -> bool {
        let mut second = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (began, calls) = second.get_or_insert_with(|| (Instant::now(), 0));
        if began.elapsed() >= Duration::from_secs(1) {
            (*began, *calls) = (Instant::now(), 0);
        }
        *calls = calls.saturating_add(1);
        *calls <= CALLS_PER_SECOND
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Health {
    heard: Option<Instant>,
    rtt: Option<Duration>,
}

impl Peer {
    /// It answered a ping after `rtt`.
    pub fn heard(&self, rtt: Duration) {
        let mut health = self.health();
        health.heard = Some(Instant::now());
        // A moving average over about eight pings, as TCP's.
        health.rtt = Some(health.rtt.map_or(rtt, |before| (before * 7 + rtt) / 8));
    }

    /// Notes what these headers, of a call or an answer of its own, say about the level of operations that it applies.
    pub fn applies(&self, headers: &HeaderMap) {
        self.level.store(level_of(headers), Ordering::Relaxed);
    }

    /// What it has said last; `None`: nothing yet, in this life of the daemon.
    pub fn level(&self) -> Option<u32> {
        Some(self.level.load(Ordering::Relaxed)).filter(|level| *level > 0)
    }

    /// Has it answered within `silence`?
    pub fn reachable(&self, silence: Duration) -> bool {
        self.health().heard.is_some_and(|heard| heard.elapsed() < silence)
    }

    /// Its smoothed round trip.
    pub fn rtt(&self) -> Option<Duration> {
        self.health().rtt
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The level of operations that the sender of these headers applies.
pub(crate) fn level_of(headers: &HeaderMap) -> u32 {
    let said = headers.get(header::LEVEL).and_then(|value| value.to_str().ok()?.parse().ok());
    said.unwrap_or(1).max(1)
}

impl Peers {
    pub fn new(me: Identity, known: Acquaintances, regions: &[(RegionName, String)]) -> Self {
        let configured = regions.iter().cloned().collect();
        let (book, removed_by, refusals, strangers) = Default::default();
        let peers = Self {
            me,
            known,
            configured,
            book,
            removed_by,
            refusals,
            redaction: None,
            level: LEVEL,
            strangers,
        };
        for (region, url) in regions {
            peers.book_mut().add(&peers.me, region, url);
        }
        peers
    }

    /// The same, where buckets are named so.
    pub fn with_redaction(self, redaction: Option<u64>) -> Self {
        Self { redaction, ..self }
    }

    /// The same, of a node that applies operations up to this level.
    pub fn with_level(self, level: u32) -> Self {
        Self { level, ..self }
    }

    /// May this region (or whoever says that it is) make one more call?
    pub fn count_call(&self, region: &str) -> bool {
        self.get(region).map_or_else(|| self.strangers.count(), |peer| peer.calls.count())
    }

    /// A member of the cluster that may not be on the newest list yet.
    pub fn add(&self, node: u64, region: &RegionName, url: &str) {
        let mut book = self.book_mut();
        let url = self.url_of(&book, node, region, url);
        let target = book.targets.entry(region.clone()).or_insert(node);
        *target = node.max(*target);
        if !book.peers.contains_key(region) {
            book.add(&self.me, region, &url);
        }
    }

    /// These are the members of the cluster, says the log at `index`: this node's `own`, or what a peer has applied. Who is no
    /// member is no peer; the newest list counts. Where a region is, the configuration says before the log does, unless it has
    /// come back as another node.
    pub fn follow(&self, index: u64, members: &[(u64, RegionName, String)], own: bool) {
        let mut book = self.book_mut();
        let newer = book.members.as_ref().is_none_or(|known| index > known.index || own && known.own);
        if members.is_empty() || !newer {
            return;
        }
        let mut nodes = BTreeMap::new();
        let mut urls = BTreeMap::new();
        let mut sorted: Vec<_> = members.iter().collect();
        sorted.sort_unstable(); // of a region that is there twice, the newer node counts
        for (node, region, url) in sorted {
            nodes.insert(region.clone(), *node);
            book.first.entry(region.clone()).or_insert(*node);
            urls.insert(region.clone(), self.url_of(&book, *node, region, url));
        }
        book.peers.retain(|region, peer| urls.get(region).is_some_and(|url| *url == peer.url));
        for (region, url) in &urls {
            book.add(&self.me, region, url);
        }
        book.members = Some(Listed { index, own, nodes });
    }

    /// The node that a call to this region is meant for.
    pub fn meant(&self, region: &str) -> Option<u64> {
        let book = self.book();
        book.node(region).max(book.targets.get(region).copied())
    }

    pub fn get(&self, region: &str) -> Option<Arc<Peer>> {
        self.book().peers.get(region).cloned()
    }

    /// By name.
    pub fn all(&self) -> Vec<Arc<Peer>> {
        self.book().peers.values().cloned().collect()
    }

    /// The instance by which this node knows a region, as the node that it is now.
    pub fn instance(&self, region: &str) -> Option<u64> {
        let (node, instance) = self.known.get(region)?;
        let same = node.zip(self.book().node(region)).is_none_or(|(met, now)| met == now);
        same.then_some(instance)
    }

    /// Looks at who calls, before anything is done for them. Writes to disk when a peer calls for the first time. `anyone`: it
    /// need not be a peer.
    pub fn admit(&self, headers: &HeaderMap, anyone: bool) -> Result<(), Refusal> {
        let get = |name| headers.get(name).and_then(|value| value.to_str().ok());
        if get(header::PROTOCOL) != Some(super::wire::PROTOCOL) {
            return Err(Refusal::Protocol);
        }
        if get(header::CLUSTER) != Some(&self.me.cluster) {
            return Err(Refusal::Cluster);
        }
        if get(header::TO) != Some(&self.me.region) {
            return Err(Refusal::Target);
        }
        let caller = self.caller(headers);
        if matches!(caller, Err(Refusal::Removed)) && !anyone {
            // Before anything else that may be wrong with it: who does not hear this goes on spending its reserve. What it knows of
            // this node may be as old as it is, where all others have been restored since.
            return Err(Refusal::Removed);
        }
        if get(header::TO_INSTANCE).is_some_and(|to| to.parse() != Ok(self.me.instance)) {
            return Err(Refusal::TargetInstance);
        }
        if !self.redacts_alike(headers) {
            return Err(Refusal::Redaction);
        }
        if anyone {
            return Ok(());
        }
        // One that found nobody when it started took a node id from its configuration: entries that are meant for the node that
        // the cluster knows it as must not get into its log.
        if get(header::TO_NODE).is_some_and(|to| to.parse() != Ok(self.me.node_id)) {
            return Err(Refusal::TargetInstance);
        }
        let (region, node, instance) = caller?;
        if self.meet(&region, node, instance) { Ok(()) } else { Err(Refusal::Instance) }
    }

    /// The member that the sender of these headers says it is: region, node id and instance.
    fn caller(&self, headers: &HeaderMap) -> Result<(RegionName, Option<u64>, u64), Refusal> {
        let get = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let region = get(header::REGION).ok_or(Refusal::Stranger)?;
        let node = get(header::NODE).and_then(|n| n.parse().ok());
        let instance = get(header::INSTANCE).and_then(|n| n.parse().ok()).ok_or(Refusal::Stranger)?;
        let Some(from) = self.get(region) else {
            // Not a member. Either it was, and this node has met it, or it is one of which this node has not heard yet.
            let left = self.known.get(region).is_some_and(|(met, known)| known == instance || met > node);
            return Err(if left { Refusal::Removed } else { Refusal::Stranger });
        };
        match node.zip(self.book().node(region)) {
            Some((node, member)) if node < member => Err(Refusal::Removed),
            Some((node, member)) if node > member => Err(Refusal::Stranger),
            _ => Ok((from.region.clone(), node, instance)),
        }
    }

    /// Does the sender of these headers name its buckets as this region does?
    pub fn redacts_alike(&self, headers: &HeaderMap) -> bool {
        let theirs = headers.get(header::REDACTION).map(|value| value.to_str().unwrap_or_default());
        theirs == self.redaction.map(|sum| sum.to_string()).as_deref()
    }

    /// Is `region` still the one that this node knows (or does it know none)? A newer node is another one, if the members'
    /// list has it.
    pub fn meet(&self, region: &RegionName, node: Option<u64>, instance: u64) -> bool {
        let listed = self.book().node(region);
        if node.zip(listed).is_some_and(|(node, listed)| node != listed) {
            return false;
        }
        self.known.meet(region, node, instance).unwrap_or_else(|fault| {
            tracing::error!(%fault, "cannot write down a peer; its calls are refused until it can be");
            false
        })
    }

    /// This node is nobody any more: whom it meets from now on it does not write down.
    pub fn remember_nobody(&self) {
        self.known.close();
    }

    /// A peer refuses this node.
    pub fn refused_by(&self, region: &RegionName, refusal: Refusal) {
        if refusal == Refusal::Removed && self.removed_by_mut().insert(region.clone()) {
            tracing::warn!(by = %region, "this region has been removed from the cluster, says a peer");
        }
    }

    /// A peer takes this node for one of the cluster.
    pub fn accepted_by(&self, region: &RegionName) {
        self.removed_by_mut().remove(region);
    }

    /// Do peers say that this node has been removed, and none of those that answered within `silence` takes it for a member?
    pub fn is_removed(&self, silence: Duration) -> bool {
        let says_so = self.removed_by_mut().clone();
        let contradicts = |peer: &Arc<Peer>| peer.reachable(silence) && !says_so.contains(&peer.region);
        !says_so.is_empty() && !self.all().iter().any(contradicts)
    }

    /// The region of a member.
    pub fn region_of(&self, node: u64) -> Option<RegionName> {
        let book = self.book();
        let mut nodes = book.members.as_ref()?.nodes.iter();
        nodes.find(|(_, id)| **id == node).map(|(region, _)| region.clone())
    }

    fn url_of(&self, book: &Book, node: u64, region: &RegionName, url: &str) -> String {
        let moved = book.first.get(region).is_some_and(|first| node > *first);
        let configured = self.configured.get(region).filter(|_| !moved).map_or(url, String::as_str);
        configured.trim_end_matches('/').to_owned()
    }

    fn book(&self) -> RwLockReadGuard<'_, Book> {
        self.book.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn book_mut(&self) -> RwLockWriteGuard<'_, Book> {
        self.book.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn removed_by_mut(&self) -> MutexGuard<'_, BTreeSet<RegionName>> {
        self.removed_by.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True at most every ten seconds for each kind: refusals come at the rate of calls, and one line says it.
    pub fn may_log_refusal(&self, kind: &'static str) -> bool {
        let mut logged = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let due = logged.get(kind).is_none_or(|last| last.elapsed() > Duration::from_secs(10));
        if due {
            logged.insert(kind, Instant::now());
        }
        due
    }
}

impl Book {
    fn add(&mut self, me: &Identity, region: &RegionName, url: &str) {
        if *region == me.region || self.peers.len() >= REGIONS_MAX {
            return;
        }
        self.peers.entry(region.clone()).or_insert_with(|| {
            let url = url.trim_end_matches('/').to_owned();
            Arc::new(Peer {
                region: region.clone(),
                url,
                health: Mutex::default(),
                level: AtomicU32::new(0),
                calls: Calls::default(),
            })
        });
    }

    fn node(&self, region: &str) -> Option<u64> {
        self.members.as_ref()?.nodes.get(region).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(dir: &std::path::Path) -> Peers {
        let regions = [("a", "http://a/"), ("b", "http://b:1"), ("c", "http://c:1")];
        let regions: Vec<(RegionName, String)> =
            regions.iter().map(|(name, url)| ((*name).into(), (*url).into())).collect();
        let me = Identity::nobody("test", &"a".into());
        Peers::new(me, Acquaintances::open(dir).unwrap(), &regions)
    }

    fn members(members: &[(u64, &str, &str)]) -> Vec<(u64, RegionName, String)> {
        members.iter().map(|(node, region, url)| (*node, (*region).into(), (*url).into())).collect()
    }

    fn headers(me: &Identity, region: &str, node: u64, instance: u64) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::PROTOCOL, super::super::wire::PROTOCOL.parse().unwrap());
        headers.insert(header::CLUSTER, "test".parse().unwrap());
        headers.insert(header::TO, me.region.parse().unwrap());
        headers.insert(header::REGION, region.parse().unwrap());
        headers.insert(header::NODE, node.into());
        headers.insert(header::INSTANCE, instance.into());
        headers
    }

    #[test]
    fn peers_follow_the_members() {
        let temp = tempfile::tempdir().unwrap();
        let peers = peers(temp.path());
        let urls = || peers.all().iter().map(|peer| peer.url.clone()).collect::<Vec<_>>();
        assert_eq!(urls(), ["http://b:1", "http://c:1"]);
        let founders = [(1, "a", "http://x"), (2, "b", "http://x"), (3, "c", "http://x")];
        peers.follow(5, &members(&founders), true);
        assert_eq!(urls(), ["http://b:1", "http://c:1"], "the configuration knows better where they are");
        peers.follow(9, &members(&[(1, "a", ""), (2, "b", ""), (4, "d", "http://d:1/")]), false);
        assert_eq!(urls(), ["http://b:1", "http://d:1"]);
        peers.follow(8, &members(&founders), true);
        assert_eq!(urls(), ["http://b:1", "http://d:1"], "an older list");
        peers.follow(10, &members(&[(1, "a", ""), (2, "b", ""), (5, "c", "http://c:7")]), true);
        assert_eq!(urls(), ["http://b:1", "http://c:7"], "it has come back, somewhere else");
        peers.follow(7, &members(&[(1, "a", ""), (2, "b", "")]), false);
        assert_eq!(urls().len(), 2, "a peer that is behind");
        peers.follow(7, &members(&[(1, "a", ""), (2, "b", "")]), true);
        assert_eq!(urls(), ["http://b:1"], "its own log has lost what was not committed");
        assert_eq!((peers.meant("b"), peers.meant("d")), (Some(2), None));
        peers.add(6, &"d".into(), "http://d:1");
        assert_eq!(
            (peers.book().node("d"), peers.meant("d")),
            (None, Some(6)),
            "before there is a list that says so"
        );
    }

    #[test]
    fn former_lives_are_refused() {
        let temp = tempfile::tempdir().unwrap();
        let peers = peers(temp.path());
        let admit = |region, node, instance| peers.admit(&headers(&peers.me, region, node, instance), false);
        peers.follow(5, &members(&[(1, "a", ""), (2, "b", ""), (3, "c", "")]), true);
        assert_eq!(admit("c", 3, 77), Ok(()));
        assert_eq!(admit("c", 3, 78), Err(Refusal::Instance));
        assert_eq!(admit("d", 4, 79), Err(Refusal::Stranger));
        let mut meant = headers(&peers.me, "c", 3, 77);
        meant.insert(header::TO_NODE, peers.me.node_id.into());
        assert_eq!(peers.admit(&meant, false), Ok(()));
        meant.insert(header::TO_NODE, 4.into());
        assert_eq!(peers.admit(&meant, false), Err(Refusal::TargetInstance));
        assert_eq!(peers.admit(&meant, true), Ok(()), "who asks who is who");
        assert_eq!(peers.admit(&headers(&peers.me, "d", 4, 79), true), Ok(()));
        peers.follow(6, &members(&[(1, "a", ""), (2, "b", "")]), true);
        assert_eq!(admit("c", 3, 77), Err(Refusal::Removed));
        assert_eq!(admit("c", 5, 80), Err(Refusal::Stranger), "not heard of yet");
        peers.follow(7, &members(&[(1, "a", ""), (2, "b", ""), (5, "c", "")]), true);
        assert_eq!(peers.instance("c"), None, "that was another node");
        assert_eq!(admit("c", 5, 80), Ok(()));
        assert_eq!(peers.instance("c"), Some(80));
        assert_eq!(admit("c", 3, 77), Err(Refusal::Removed));
        let mut forgotten = headers(&peers.me, "c", 3, 77);
        forgotten.insert(header::TO_INSTANCE, (peers.me.instance + 1).into());
        assert_eq!(
            peers.admit(&forgotten, false),
            Err(Refusal::Removed),
            "though it knows this node's former life"
        );
        assert_eq!(admit("c", 5, 77), Err(Refusal::Instance));
        assert_eq!(admit("c", 6, 81), Err(Refusal::Stranger));
    }
}
