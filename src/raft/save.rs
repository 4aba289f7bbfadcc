//! The whole pool in one file, for the day on which a majority of the regions is lost: `quorate snapshot save` and `restore`.
//!
//! A file is `QRSAVE`, a format byte (1), the length of the header (4 bytes, big-endian), the header (JSON, whose readers pass over keys
//! that they do not know), the content of a snapshot file (see [`super::snapshot`]), and the BLAKE3 hash (32 bytes) of all that.
//!
//! What is restored is another cluster, of the same name: its members have new node ids and new data directories, and a log that begins
//! far behind the old one's end. So whoever of the old cluster still runs is refused by the new one, and gets no lease from it.
//! (Its reserve it has all the same: that none runs is promised.) What the pool makes of a copy that may be too old: [`Pool::restored`].

use super::data_dir::Identity;
use super::log::LogStore;
use super::node::voters;
use super::snapshot::{self, SnapshotDir};
use super::types::{LeaderId, LogId, Membership, NODE_IDS, SnapshotMeta, Vote};
use super::{Raft, RaftConfig, RaftError, task};
use crate::quota::policy::RegionName;
use crate::quota::pool::{Pool, Spent};
use crate::telemetry::wall_clock;
use openraft::async_runtime::watch::WatchReceiver as _;
use openraft::storage::RaftLogStorage as _;
use serde::{Deserialize, Serialize};
use std::io::{self, Write as _};
use std::time::UNIX_EPOCH;

const MAGIC: &[u8; 7] = b"QRSAVE\x01";
const CHECKSUM: usize = 32;
/// No cluster commits so many entries between a copy of its state and its end.
const LOG_LEAP: u64 = 1_000_000_000;

/// What a saved pool says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedHeader {
    /// Of which cluster.
    pub cluster: String,
    /// The region whose replica it was.
    pub region: String,
    /// The version of its daemon.
    pub version: String,
    /// When, by that region's wall clock: milliseconds since the Unix epoch.
    pub saved_at_ms: u64,
    /// Index of the last entry of the log that is in it.
    pub applied: u64,
    /// The version of the policies in it.
    pub policies: u64,
    /// The regions that were in the cluster, sorted.
    pub regions: Vec<String>,
    /// Sums up how buckets are named: see [`RaftConfig::redaction`].
    pub redaction: Option<u64>,
}

/// A saved pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// What it says of itself.
    pub header: SavedHeader,
    pool: Pool,
}

impl Saved {
    /// Reads a file's content.
    ///
    /// # Errors
    /// It is none, is damaged, or is of a newer version.
    pub fn read(content: &[u8]) -> io::Result<Self> {
        let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        let (body, sum) = content
            .split_at_checked(content.len().saturating_sub(CHECKSUM))
            .ok_or_else(|| damaged("it is too short to be a saved snapshot"))?;
        let rest = body
            .strip_prefix(MAGIC)
            .ok_or_else(|| damaged("it is no file of `quorate snapshot save`, or one of a newer version"))?;
        if blake3::hash(body).as_bytes().as_slice() != sum {
            return Err(damaged("it is damaged: its checksum is wrong"));
        }
        let cut_short = || damaged("it is damaged: it is cut short");
        let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(cut_short)?;
        let length = usize::try_from(u32::from_be_bytes(*length)).map_err(io::Error::other)?;
        let (header, rest) = rest.split_at_checked(length).ok_or_else(cut_short)?;
        let (_, pool) = snapshot::take_apart(rest)?;
        Ok(Self { header: serde_json::from_slice(header)?, pool })
    }

    fn write(&self) -> io::Result<Vec<u8>> {
        let mut out = MAGIC.to_vec();
        let header = serde_json::to_vec(&self.header)?;
        out.write_all(&u32::try_from(header.len()).map_err(io::Error::other)?.to_be_bytes())?;
        out.write_all(&header)?;
        snapshot::write_to(&mut out, &SnapshotMeta::default(), &self.pool)?;
        let sum = blake3::hash(&out);
        out.write_all(sum.as_bytes())?;
        Ok(out)
    }
}

impl Raft {
    /// This region's replica of the pool as it is now, as a file's content. Needs no leader.
    ///
    /// # Errors
    /// It cannot be encoded.
    pub async fn save(&self) -> io::Result<Vec<u8>> {
        let node = &self.node;
        let applied = node.raft.metrics().borrow_watched().last_applied.map_or(0, |log_id| log_id.index);
        let pool = node.replica.pool().read().clone();
        let me = &node.client.peers.me;
        let in_it = pool.members().filter(|member| member.standing != crate::quota::pool::Standing::Out);
        let mut regions: Vec<String> = in_it.map(|member| member.name.to_string()).collect();
        regions.sort();
        let since = wall_clock().duration_since(UNIX_EPOCH).unwrap_or_default();
        let header = SavedHeader {
            cluster: me.cluster.clone(),
            region: me.region.to_string(),
            version: env!("CARGO_PKG_VERSION").into(),
            saved_at_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            applied,
            policies: pool.version(),
            regions,
            redaction: node.client.peers.redaction,
        };
        task::blocking(move || Saved { header, pool }.write()).await?
    }
}

/// Makes the data directory of one member of a new cluster, which must be empty. All of `config.regions` have to be restored from the
/// same file, with the same list of regions. Returns its node id.
///
/// # Errors
/// The file is of another cluster, or one that names buckets otherwise; the directory is not empty, or cannot be written; the pool
/// cannot go on with these members.
pub async fn restore(config: &RaftConfig, saved: Saved, spent: Spent) -> Result<u64, RaftError> {
    let Saved { header, pool } = saved;
    let refuse = |what: String| Err(RaftError::Config(what));
    if header.cluster != config.cluster {
        return refuse(format!("the file is of cluster `{}`, not of `{}`", header.cluster, config.cluster));
    }
    if header.redaction != config.redaction {
        return refuse(
            "the file's buckets are named otherwise: `redact` or its key was another one when it was saved"
                .into(),
        );
    }
    let founders = voters(config)?;
    let names: Vec<RegionName> = founders.values().map(|node| node.region.clone()).collect();
    let term = pool.term().div_euclid(NODE_IDS).saturating_add(1);
    let Some(pool) = pool.restored(&names, &config.witnesses, spent) else {
        return refuse("the pool in the file cannot go on with these regions: nobody would serve callers, there are too many of them, or too many changes of policies were under way".into());
    };
    let node_of =
        |name: &str| pool.region(name).and_then(|id| pool.member(id)).map_or(0, |member| member.node);
    let nodes: std::collections::BTreeMap<_, _> =
        founders.into_values().map(|node| (node_of(&node.region), node)).collect();
    let first = nodes.keys().next().copied().unwrap_or_default();
    let leader_id = LeaderId { term, node_id: first };
    let last = LogId { leader_id, index: header.applied.saturating_add(LOG_LEAP) };
    let members = openraft::Membership::new(vec![nodes.keys().copied().collect()], nodes)
        .map_err(|fault| RaftError::Config(fault.to_string()))?;
    let meta =
        SnapshotMeta { last_log_id: Some(last), last_membership: Membership::new(Some(last), members) };
    let (dir, node) = (config.data_dir.clone(), node_of(&config.region));
    let storage = |fault: io::Error| RaftError::Storage { path: dir.clone(), what: fault.to_string() };
    Identity::must_be_empty(&dir)?;
    let mut log = LogStore::open(&dir.join("log")).map_err(storage)?;
    log.save_vote(&Vote { leader_id, committed: false }).await.map_err(storage)?;
    log.purge(last).await.map_err(storage)?;
    SnapshotDir::open(dir.join("snapshots")).and_then(|dir| dir.write(&meta, &pool)).map_err(storage)?;
    // Last: without it the directory is nobody's.
    Identity::write(&dir, &config.cluster, &config.region, node)?;
    Ok(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn saved() -> Saved {
        let header = SavedHeader { cluster: "prod".into(), applied: 7, ..SavedHeader::default() };
        Saved { header, pool: Pool::default() }
    }

    #[test]
    fn a_file_is_read_back_and_damage_is_found() {
        let bytes = saved().write().unwrap();
        assert_eq!(Saved::read(&bytes).unwrap(), saved());
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            assert!(Saved::read(&bad).is_err(), "byte {at}");
            assert!(Saved::read(&bytes[..at]).is_err(), "cut at {at}");
        }
        assert!(Saved::read(b"QRSNAP\x05").is_err(), "a snapshot of Raft's own");
    }
}
