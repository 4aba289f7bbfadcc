//! A worker thread's own connection: made by its runtime, and used only for the session that the control task has published.

use super::connect::Connection;
use super::fault::Fault;
use super::scripts::{SCRIPTS, run};
use super::shared::{Attached, Backoff, Link, Live, Shared};
use super::wire::{Say, beaten};
use crate::bugs::{Bug, planted};
use crate::quota::amount::Micros;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

/// How long a check of the session may take.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// Keeps `link` connected, for ever.
pub(super) async fn supervise(shared: &Shared, link: &Link) {
    let mut sessions = shared.attached.subscribe();
    let mut backoff = Backoff::new();
    loop {
        let Some(attached) = next(&mut sessions).await else { return };
        match open(shared, &attached).await {
            Ok(mut connection) => {
                backoff.reset();
                let live = Arc::new(Live {
                    client: connection.client.clone(),
                    attached: attached.clone(),
                    broken: Notify::new(),
                });
                link.open(live.clone());
                let replaced = tokio::select! {
                    () = connection.lost() => false,
                    () = live.broken.notified() => false,
                    () = other(&mut sessions, &attached) => true,
                };
                link.live.store(None);
                if replaced {
                    continue;
                }
            }
            Err(fault) => {
                tracing::debug!(%fault, "a worker has no connection to Redis");
                if fault == Fault::Fenced {
                    shared.doubt.notify_one();
                }
            }
        }
        backoff.pause().await;
    }
}

/// The session in force, as soon as there is one.
async fn next(sessions: &mut watch::Receiver<Option<Arc<Attached>>>) -> Option<Arc<Attached>> {
    sessions.wait_for(Option::is_some).await.ok()?.clone()
}

/// Resolves when another session, or none, is in force.
async fn other(sessions: &mut watch::Receiver<Option<Arc<Attached>>>, than: &Arc<Attached>) {
    let is_other = |now: &Option<Arc<Attached>>| !now.as_ref().is_some_and(|now| Arc::ptr_eq(now, than));
    if sessions.wait_for(is_other).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// A connection to the server that the session is on, checked to be in force there.
async fn open(shared: &Shared, attached: &Attached) -> Result<Connection, Fault> {
    let connection = Connection::open(&shared.server, &attached.address).await?;
    if let Some(why) = &connection.info.unfit {
        return Err(Fault::NotPrimary(why.clone()));
    }
    if connection.info.run_id != attached.run_id && !planted(Bug::RollbackUndetected) {
        return Err(Fault::Fenced);
    }
    let look = attached.stem.beat(Micros::ZERO, Say::Nothing);
    let late = |_| Fault::Unknown(format!("no answer within {CHECK_TIMEOUT:?}"));
    beaten(timeout(CHECK_TIMEOUT, run(&connection.client, &SCRIPTS.beat, look)).await.map_err(late)??)?;
    Ok(connection)
}
