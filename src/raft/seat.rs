//! Who a node with an empty data directory is.
//!
//! Where the cluster does not exist yet, the configuration says it: the founders' node ids are positions in its list. Where
//! it does, the cluster says it, and a region that is not in it waits until an operator has added it.

use super::data_dir::{Acquaintances, Identity};
use super::network::client::{Client, Lane};
use super::network::peers::{Peer, Peers};
use super::network::wire::{self, Who, WhoReply, path};
use super::node::{Files, Ground};
use super::timing::Timing;
use super::{RaftConfig, RaftError};
use crate::quota::policy::RegionName;
use futures::future::join_all;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Between two times that the cluster is asked.
const ASK_EVERY: Duration = Duration::from_millis(500);

/// The node id of a region whose data directory is empty, once the cluster knows it; `None`: the directory says it, or
/// there is no cluster yet that could. While it waits, `waits_for` says why.
///
/// # Errors
/// If the TLS files cannot be used.
pub async fn find(
    config: &RaftConfig,
    waits_for: &watch::Sender<Option<String>>,
) -> Result<Option<u64>, RaftError> {
    find_on(config, waits_for, &Files).await
}

/// The same, on any ground.
pub(super) async fn find_on(
    config: &RaftConfig,
    waits_for: &watch::Sender<Option<String>>,
    ground: &impl Ground,
) -> Result<Option<u64>, RaftError> {
    if Identity::is_there(&config.data_dir) {
        return Ok(None);
    }
    let me = Identity::nobody(&config.cluster, &config.region);
    let peers = Peers::new(me, Acquaintances::nobody(), &config.regions);
    let peers = Arc::new(peers.with_redaction(config.redaction).with_level(config.level));
    let client = ground.client(Client::new(peers, Timing::new(config.rtt_max), config.tls.as_ref())?);
    let mut founded = false;
    loop {
        let newest = ask_all(&client, &config.region).await;
        founded |= newest.is_some();
        match newest.map(|reply| reply.seat) {
            Some(Some(node)) => {
                waits_for.send_replace(None);
                return Ok(Some(node));
            }
            Some(None) => {
                let region = &config.region;
                let why = format!(
                    "region `{region}` is not a member yet: run `quorate region add {region} --url URL`"
                );
                let is_news =
                    waits_for.send_if_modified(|waits| waits.replace(why.clone()).as_ref() != Some(&why));
                if is_news {
                    tracing::warn!("{why}");
                }
            }
            None if !founded => return Ok(None),
            None => (),
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

/// The answer of the peer that has come furthest, of those who say that there is a cluster.
async fn ask_all(client: &Client, region: &RegionName) -> Option<WhoReply> {
    let ask = async |peer: Arc<Peer>| ask(client, &peer, region).await;
    let mut newest: Option<WhoReply> = None;
    for reply in join_all(client.peers.all().into_iter().map(ask)).await.into_iter().flatten() {
        if reply.initialized && newest.as_ref().is_none_or(|n| n.applied < reply.applied) {
            newest = Some(reply);
        }
    }
    newest
}

/// What a peer says of this region and of all.
pub(super) async fn ask(client: &Client, peer: &Peer, region: &RegionName) -> Option<WhoReply> {
    let limits = (client.timing.call(), wire::CALL_BYTES_MAX);
    let who = Who { region: region.clone() };
    client.call(peer, Lane::Control, path::WHO, &who, limits).await.ok()
}
