//! The newest version of the policies that this region has acknowledged: its word that it uses no more than that version
//! and later ones allow, which others go by from then on.
//!
//! A daemon that starts again reads its log from the last snapshot on, and may not hear from anyone how far that was
//! committed: so its replica may stand at an older version, with a larger part for this region. The simulation found that
//! one. So the word is on disk before it is given, and the region goes by no version that is older.

use super::RaftError;
use super::data_dir::write_durably;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const WORD: &str = "acknowledged.json";

/// See above.
#[derive(Debug)]
pub(super) struct Word {
    path: PathBuf,
    version: AtomicU64,
}

impl Word {
    /// Reads it from the data directory; 0 if none was ever given.
    pub fn open(dir: &Path) -> Result<Self, RaftError> {
        let path = dir.join(WORD);
        let version = match fs::read(&path) {
            Ok(content) => serde_json::from_slice(&content).map_err(|e| RaftError::DataDir {
                path: dir.to_owned(),
                what: format!("{WORD} cannot be read ({e}); restore the directory"),
            })?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => 0,
            Err(source) => return Err(RaftError::Io { path, source }),
        };
        Ok(Self { path, version: AtomicU64::new(version) })
    }

    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    /// It is on disk when this returns. A version that is not newer changes nothing.
    pub fn give(&self, version: u64) -> io::Result<()> {
        if version > self.version() {
            write_durably(&self.path, &version)?;
            self.version.fetch_max(version, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Removes it.
pub(super) fn forget(dir: &Path) -> io::Result<()> {
    match fs::remove_file(dir.join(WORD)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_kept() {
        let temp = tempfile::tempdir().unwrap();
        let word = Word::open(temp.path()).unwrap();
        assert_eq!(word.version(), 0);
        word.give(7).unwrap();
        word.give(3).unwrap();
        assert_eq!(Word::open(temp.path()).unwrap().version(), 7);
        fs::write(temp.path().join(WORD), "seven").unwrap();
        let fault = Word::open(temp.path()).unwrap_err().to_string();
        assert!(fault.contains("acknowledged.json cannot be read"), "{fault}");
        forget(temp.path()).unwrap();
        forget(temp.path()).unwrap();
        assert_eq!(Word::open(temp.path()).unwrap().version(), 0);
    }
}
