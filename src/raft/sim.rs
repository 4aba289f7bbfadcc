//! openraft in a simulation: this room as it is, but the network, the disk under the log, time and chance are the
//! simulation's.
//!
//! All regions run on one current-thread runtime of tokio with paused time. What is real: openraft, the state machine,
//! snapshots (in a directory that had better be in memory), the gathering and forwarding of proposals, founding, pings,
//! and the wire between regions from the encoding of a request to the routes that answer it. What is not: sockets,
//! HTTP/2 and TLS ([`Wires`] carries requests and their streams instead), and the disk ([`Disk`] can lose what was not
//! synced). A seed repeats: nothing here has a thread or a die of its own.

mod disk;
mod runtime;
mod watch;
mod wires;

pub use disk::Disk;
pub use runtime::SimRuntime;
pub(super) use wires::Line;
pub use wires::Wires;

use super::network::client::Client;
use super::node::{Ground, Node};
use super::replica::Replica;
use super::types::{LogEntry, LogId, leadership};
use super::{LogLimits, Raft, RaftConfig, RaftError};
use crate::clock;
use crate::quota::policy::{Policy, RegionName};
use crate::quota::pool::{Entry, Pool, Stamp};
use futures::future::BoxFuture;
use openraft::EntryPayload;
use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;

/// The machine that a region's daemon runs on.
pub trait Home: Send + Sync + 'static {
    /// Makes a task that runs on this machine: under its clocks, not while it stands still, and not beyond a crash.
    fn run(&self, task: BoxFuture<'static, ()>) -> BoxFuture<'static, ()>;

    /// A die.
    fn random(&self) -> u64;

    /// How long the disk takes, this time.
    fn sync_takes(&self) -> Duration;

    /// An entry of this machine's leader has been stamped.
    fn stamped(&self, _stamp: Stamp) {}

    /// Entry `index` of the log, of leadership `term`, has been applied here; there is an `entry` if it is for the pool.
    fn applied(&self, _index: u64, _term: u64, _entry: Option<&Entry>, _pool: &Pool) {}

    /// A snapshot of everything up to entry `index` has been installed here.
    fn restored(&self, _index: u64, _pool: &Pool) {}
}

/// What becomes of messages between regions.
pub trait Network: Send + Sync + 'static {
    /// The times after which a message that is sent now arrives: none (it is lost), one, or two (it arrives twice).
    fn fate(&self, from: &RegionName, to: &RegionName) -> [Option<Duration>; 2];
}

/// Where a region's node runs.
#[derive(Clone)]
pub struct Place {
    /// Its machine.
    pub home: Arc<dyn Home>,
    /// What its log is on. Outlives the node.
    pub disk: Disk,
    /// The lines between all regions.
    pub wires: Arc<Wires>,
}

impl Raft {
    /// [`Self::start_with`], in a simulation. The node serves its peers until [`Wires::unplug`].
    ///
    /// # Errors
    /// See [`Self::start`]; [`RaftError::Config`] also if the machine crashes meanwhile.
    pub async fn start_simulated(
        config: RaftConfig,
        first_policies: Vec<Policy>,
        limits: LogLimits,
        place: Place,
    ) -> Result<Self, RaftError> {
        let (done, started) = oneshot::channel();
        let (home, wires, region) =
            (Arc::clone(&place.home), Arc::clone(&place.wires), config.region.clone());
        tokio::spawn(on(&home, async move {
            wires.begin(&region, &place.home);
            let started = Node::start_on(config, first_policies, limits, place).await;
            if let Ok(node) = &started {
                wires.listen(&region, super::network::server::router(Arc::clone(node)));
            }
            // Whoever started it may have gone.
            let _ = done.send(started.map(|node| Self { node }));
        }));
        started.await.unwrap_or_else(|_| Err(RaftError::Config("the machine crashed".into())))
    }
}

impl Ground for Place {
    type Log = disk::DiskLog;

    fn open_log(&self, dir: &Path) -> io::Result<(Self::Log, Option<LogId>)> {
        // It belongs to a data directory, even if nothing is in it.
        std::fs::create_dir_all(dir)?;
        let log = self.disk.open();
        let purged = log.purged();
        Ok((log, purged))
    }

    fn client(&self, client: Client) -> Client {
        client.through(&self.wires)
    }
}

thread_local! {
    static HERE: RefCell<Option<Arc<dyn Home>>> = const { RefCell::new(None) };
}

/// The machine of the task that is running.
pub(super) fn home() -> Option<Arc<dyn Home>> {
    let home = HERE.with_borrow(Option::clone);
    assert!(home.is_some() || !clock::is_simulated(), "a task of a simulated region would leave its machine");
    home
}

pub(super) fn stamped(stamp: Stamp) {
    if let Some(home) = home() {
        home.stamped(stamp);
    }
}

pub(super) fn applied(entry: &LogEntry, replica: &Replica) {
    let Some(home) = home() else { return };
    let content = match &entry.payload {
        EntryPayload::Normal(command) => Some(command.entry()),
        EntryPayload::Blank | EntryPayload::Membership(_) => None,
    };
    let LogId { leader_id, index } = entry.log_id;
    home.applied(index, leadership(&leader_id), content, &replica.pool().read());
}

pub(super) fn restored(upto: Option<LogId>, replica: &Replica) {
    if let Some((home, upto)) = home().zip(upto) {
        home.restored(upto.index, &replica.pool().read());
    }
}

/// A task of this machine: what it spawns runs there too.
pub(super) fn on(
    home: &Arc<dyn Home>,
    task: impl Future<Output = ()> + Send + 'static,
) -> BoxFuture<'static, ()> {
    home.run(Box::pin(Here { home: Arc::clone(home), task: Box::pin(task) }))
}

struct Here {
    home: Arc<dyn Home>,
    task: BoxFuture<'static, ()>,
}

impl Future for Here {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let before = HERE.replace(Some(Arc::clone(&self.home)));
        let polled = self.task.as_mut().poll(context);
        HERE.set(before);
        polled
    }
}

/// A number that equal pools have in common, and others hardly ever.
#[must_use]
pub fn digest(pool: &Pool) -> u32 {
    // Pools are made to be encoded; one that cannot be is not equal to any.
    postcard::to_stdvec(pool).map_or_else(|_| rand::random(), |bytes| crc32fast::hash(&bytes))
}
