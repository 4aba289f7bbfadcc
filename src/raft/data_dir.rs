//! Whose data directory it is, and which peers it has met.
//!
//! A node that has lost its log must not come back under its old name: it would vote a second time in a term, and
//! forget entries that it had acknowledged. So each data directory has an *instance*, a random number made with it, and
//! every node remembers, on disk, the instance of each peer that it has ever talked to. Another instance under the
//! same name is refused, on every call and in both directions, unless it is another node: a region that has left and come
//! back has a new node id, and its former life is refused from then on.

use super::RaftError;
use crate::quota::policy::RegionName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const MARKER: &str = "quorate.json";
const PEERS: &str = "peers.json";
/// The layout of the data directory.
const FORMAT: u32 = 1;

/// Who this node is, for good.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Identity {
    format: u32,
    pub cluster: String,
    pub region: RegionName,
    pub node_id: u64,
    /// Random, not 0, below 2^53 (so that every JSON reader keeps it).
    pub instance: u64,
}

impl Identity {
    /// Of a node that has no directory yet.
    pub fn nobody(cluster: &str, region: &RegionName) -> Self {
        let (cluster, region) = (cluster.to_owned(), region.clone());
        Self { format: FORMAT, cluster, region, node_id: 0, instance: rand::random_range(1..1_u64 << 53) }
    }

    /// Has the directory a marker?
    pub fn is_there(dir: &Path) -> bool {
        dir.join(MARKER).exists()
    }

    /// Reads the directory's marker, or makes it in an empty (or missing) directory; true if it did. The marker is on
    /// disk when this returns.
    pub fn open(
        dir: &Path,
        cluster: &str,
        region: &RegionName,
        node_id: u64,
    ) -> Result<(Self, bool), RaftError> {
        let io = |source| RaftError::Io { path: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(io)?;
        let path = dir.join(MARKER);
        let refuse = |what: String| RaftError::DataDir { path: dir.to_owned(), what };
        match fs::read(&path) {
            Ok(content) => {
                let marker: Self = serde_json::from_slice(&content)
                    .map_err(|e| refuse(format!("{MARKER} cannot be read ({e}); restore the directory")))?;
                marker.check(cluster, region).map_err(refuse)?;
                Ok((marker, false))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if let Some(stranger) = strangers(dir).map_err(io)? {
                    return Err(refuse(format!(
                        "it has no {MARKER} and is not empty (`{stranger}`); name an empty directory"
                    )));
                }
                let instance = rand::random_range(1..1_u64 << 53);
                let (cluster, region) = (cluster.to_owned(), region.clone());
                let marker = Self { format: FORMAT, cluster, region, node_id, instance };
                write_durably(&path, &marker).map_err(io)?;
                Ok((marker, true))
            }
            Err(source) => Err(RaftError::Io { path, source }),
        }
    }

    /// Of a directory that is to be filled by something else than a node that starts. It is made if there is none.
    pub fn must_be_empty(dir: &Path) -> Result<(), RaftError> {
        let io = |source| RaftError::Io { path: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(io)?;
        match strangers(dir).map_err(io)? {
            None => Ok(()),
            Some(stranger) => {
                let what =
                    format!("it is not empty (`{stranger}`); move what is there away, or name another");
                Err(RaftError::DataDir { path: dir.to_owned(), what })
            }
        }
    }

    /// Makes the marker of a directory that has been filled: it is this node's from now on.
    pub fn write(dir: &Path, cluster: &str, region: &RegionName, node_id: u64) -> Result<(), RaftError> {
        let marker = Self { node_id, ..Self::nobody(cluster, region) };
        let path = dir.join(MARKER);
        write_durably(&path, &marker).map_err(|source| RaftError::Io { path, source })
    }

    fn check(&self, cluster: &str, region: &str) -> Result<(), String> {
        let Self { format, cluster: its_cluster, region: its_region, .. } = self;
        if *format != FORMAT {
            return Err(format!(
                "it has format {format}, and this version knows {FORMAT}; use the version that wrote it"
            ));
        }
        if (its_cluster.as_str(), &**its_region) != (cluster, region) {
            return Err(format!(
                "it belongs to region `{its_region}` of cluster `{its_cluster}`, not to `{region}` of `{cluster}`; name this region's own"
            ));
        }
        Ok(())
    }
}

/// What is in the directory and does not belong to an empty one.
fn strangers(dir: &Path) -> io::Result<Option<String>> {
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        // A volume's own folder, and what a crash left of the marker before it had its name.
        if name != "lost+found" && !name.ends_with(".tmp") {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// The instances of the peers that this node has met.
#[derive(Debug)]
pub(super) struct Acquaintances {
    path: PathBuf,
    /// Nothing is written any more. Read and set under the lock.
    closed: AtomicBool,
    known: Mutex<BTreeMap<RegionName, Met>>,
}

/// A peer that was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "MetForms")]
struct Met {
    /// Its node id; `None`: it was met when regions had one node id for good.
    node: Option<u64>,
    instance: u64,
}

/// What a file may hold: the second is how files were before regions could come back.
#[derive(Deserialize)]
#[serde(untagged)]
enum MetForms {
    Node { node: Option<u64>, instance: u64 },
    Instance(u64),
}

impl From<MetForms> for Met {
    fn from(form: MetForms) -> Self {
        match form {
            MetForms::Node { node, instance } => Self { node, instance },
            MetForms::Instance(instance) => Self { node: None, instance },
        }
    }
}

impl Acquaintances {
    pub fn open(dir: &Path) -> Result<Self, RaftError> {
        let path = dir.join(PEERS);
        let known = match fs::read(&path) {
            Ok(content) => serde_json::from_slice(&content).map_err(|e| RaftError::DataDir {
                path: dir.to_owned(),
                what: format!("{PEERS} cannot be read ({e}); restore the directory"),
            })?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(source) => return Err(RaftError::Io { path, source }),
        };
        Ok(Self { path, closed: AtomicBool::new(false), known: Mutex::new(known) })
    }

    /// Nobody: for a node that has no directory yet. It cannot remember anyone either.
    pub fn nobody() -> Self {
        Self { path: PathBuf::new(), closed: AtomicBool::new(true), known: Mutex::default() }
    }

    /// The instance that a region was met with, and its node id, if it said so.
    pub fn get(&self, region: &str) -> Option<(Option<u64>, u64)> {
        self.lock().get(region).map(|met| (met.node, met.instance))
    }

    /// Is this the peer that it was? One that is met for the first time, or comes back as a newer node (the caller has seen
    /// that it is one), is remembered, on disk, before this returns.
    pub fn meet(&self, region: &RegionName, node: Option<u64>, instance: u64) -> io::Result<bool> {
        let mut known = self.lock();
        if self.closed.load(Ordering::Relaxed) {
            return Ok(true);
        }
        if let Some(before) = known.get(region) {
            let newer = node.zip(before.node).is_some_and(|(now, before)| now > before);
            let learnt = before.node.is_none() && node.is_some();
            if before.instance != instance && !newer {
                return Ok(false);
            }
            if before.instance == instance && !newer && !learnt {
                return Ok(true);
            }
        }
        let mut next = known.clone();
        next.insert(region.clone(), Met { node, instance });
        write_durably(&self.path, &next)?;
        *known = next;
        Ok(true)
    }

    /// Writes nothing any more: the directory is to be empty, and to stay so.
    pub fn close(&self) {
        let _known = self.lock();
        self.closed.store(true, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<RegionName, Met>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes who the node is and whom it has met: the marker last.
pub(super) fn forget(dir: &Path) -> io::Result<()> {
    super::word::forget(dir)?;
    match fs::remove_file(dir.join(PEERS)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => fs::remove_file(dir.join(MARKER)),
    }
}

/// Replaces a file as a whole; it is on disk when this returns.
pub(super) fn write_durably(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(&serde_json::to_vec_pretty(value)?)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_belongs_to_one_region() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("data");
        let region: RegionName = "us-east".into();
        let (made, fresh) = Identity::open(&dir, "prod", &region, 2).unwrap();
        assert!(fresh && made.instance > 0 && made.node_id == 2);
        let (again, fresh) = Identity::open(&dir, "prod", &region, 7).unwrap();
        assert_eq!((again, fresh), (made, false), "the id stays what it was");
        let fault = Identity::open(&dir, "test", &region, 2).unwrap_err().to_string();
        assert!(fault.contains("`us-east` of cluster `prod`"), "{fault}");
        let fault = Identity::open(&dir, "prod", &"eu-west".into(), 2).unwrap_err().to_string();
        assert!(fault.contains("not to `eu-west`"), "{fault}");
        fs::write(dir.join(MARKER), "{}").unwrap();
        assert!(Identity::open(&dir, "prod", &region, 2).is_err());
    }

    #[test]
    fn other_peoples_directories_are_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir(temp.path().join("lost+found")).unwrap();
        assert!(Identity::open(temp.path(), "prod", &"us-east".into(), 1).is_ok());
        let temp = tempfile::tempdir().unwrap();
        fs::write(temp.path().join("thesis.txt"), "dear").unwrap();
        let fault = Identity::open(temp.path(), "prod", &"us-east".into(), 1).unwrap_err().to_string();
        assert!(fault.contains("thesis.txt"), "{fault}");
    }

    #[test]
    fn a_peer_keeps_its_instance() {
        let temp = tempfile::tempdir().unwrap();
        let region: RegionName = "eu-west".into();
        let peers = Acquaintances::open(temp.path()).unwrap();
        assert_eq!(peers.get("eu-west"), None);
        assert!(peers.meet(&region, None, 7).unwrap() && peers.meet(&region, None, 7).unwrap());
        assert!(!peers.meet(&region, None, 8).unwrap());
        let peers = Acquaintances::open(temp.path()).unwrap();
        assert_eq!(peers.get("eu-west"), Some((None, 7)));
        assert!(!peers.meet(&region, None, 8).unwrap());
        assert!(!peers.meet(&region, Some(2), 8).unwrap(), "nobody knows which node it was");
        assert!(peers.meet(&region, Some(2), 7).unwrap());
        assert!(!peers.meet(&region, Some(2), 8).unwrap());
        assert!(peers.meet(&region, Some(4), 8).unwrap(), "it has come back as another node");
        assert!(!peers.meet(&region, Some(2), 7).unwrap() && !peers.meet(&region, None, 7).unwrap());
        let peers = Acquaintances::open(temp.path()).unwrap();
        assert_eq!(peers.get("eu-west"), Some((Some(4), 8)));
    }

    #[test]
    fn former_files_are_read() {
        let temp = tempfile::tempdir().unwrap();
        fs::write(temp.path().join(PEERS), r#"{"eu-west": 7}"#).unwrap();
        let peers = Acquaintances::open(temp.path()).unwrap();
        assert_eq!(peers.get("eu-west"), Some((None, 7)));
    }
}
