//! A small disk that can be filled.

use anyhow::{Context as _, bail};
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What it holds. (A daemon's log files are a few MB.)
const SIZE: &str = "64m";
const STEP_BYTES: usize = 64 * 1024;
const BALLAST: &str = "ballast";

/// A tmpfs of its own; unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts one at `path`.
    ///
    /// # Errors
    /// This is not root, or may not mount.
    pub fn mount(path: PathBuf) -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            bail!("a disk that can be filled needs root: it is a small tmpfs");
        }
        std::fs::create_dir_all(&path)?;
        let size = format!("size={SIZE}");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &size, "quorate-chaos"]).arg(&path).stdin(Stdio::null());
        let output = command.output().context("`mount` does not start")?;
        if !output.status.success() {
            bail!("cannot mount a tmpfs: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(Self(path))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Fills it to the last byte.
    ///
    /// # Errors
    /// It cannot be written for another reason.
    pub fn fill(&self) -> anyhow::Result<()> {
        let mut file = File::options().create(true).append(true).open(self.0.join(BALLAST))?;
        let block = vec![0; STEP_BYTES];
        for size in [STEP_BYTES, 1] {
            while let Some(part) = block.get(..size) {
                match file.write_all(part) {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::StorageFull => break,
                    Err(error) => return Err(error).context("cannot fill the disk"),
                }
            }
        }
        Ok(())
    }

    /// Makes room again.
    ///
    /// # Errors
    /// It was not full.
    pub fn make_room(&self) -> anyhow::Result<()> {
        Ok(std::fs::remove_file(self.0.join(BALLAST))?)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        unmount(&self.0);
    }
}

/// Unmounts the disks of runs that are no more, and says which.
pub(super) fn clean() -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let ours = mounts.lines().filter(|line| line.starts_with("quorate-chaos "));
    let paths = ours.filter_map(|line| line.split_whitespace().nth(1));
    let orphans = paths.filter(|path| super::folder_owner(Path::new(path)).is_some_and(|id| !id.exists()));
    orphans
        .map(|path| {
            unmount(Path::new(path));
            format!("tmpfs {path}")
        })
        .collect()
}

fn unmount(path: &Path) {
    // Lazily: whoever still has a file open there is about to die.
    let _ = Command::new("umount").arg("-l").arg(path).stdin(Stdio::null()).stderr(Stdio::null()).status();
}
