//! Until the cluster lets the region in, its daemon does nothing but say so.

use super::NodeError;
use crate::raft::{self, RaftConfig};
use crate::server::callers::CallerTls;
use crate::server::{ServerError, admin};
use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Peers that are there answer within this: then nobody has to be told anything.
const SHORTLY: Duration = Duration::from_millis(300);

/// Waits until the region knows who it is (see [`RaftConfig::seat`]). Meanwhile the admin listener says what it waits for.
pub async fn for_seat(
    config: &RaftConfig,
    listener: &TcpListener,
    tls: Option<Arc<CallerTls>>,
) -> Result<Option<u64>, NodeError> {
    let waits_for = watch::Sender::new(None);
    let mut seat = pin!(raft::find_seat(config, &waits_for));
    if let Ok(found) = tokio::time::timeout(SHORTLY, seat.as_mut()).await {
        return Ok(found?);
    }
    let (stop, stopping) = watch::channel(false);
    let listener = listener.try_clone().map_err(ServerError::Listener)?;
    let routes = admin::waiting_router(waits_for.subscribe());
    let serving = tokio::spawn(admin::serve(listener, tls, routes, stopping));
    let found = seat.await;
    stop.send_replace(true);
    // The listener itself stays, for what comes.
    let _ = serving.await;
    Ok(found?)
}
