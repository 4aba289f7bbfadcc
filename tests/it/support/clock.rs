//! Wall clocks that are wrong. (libfaketime does not get along with Debian's Redis and its jemalloc.)

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/chaos/src/cluster/wrong_clock.c");

/// The wall clock of one process; its monotonic clocks stay right.
pub struct WrongClock {
    library: PathBuf,
    offset: PathBuf,
}

impl WrongClock {
    /// A clock that is off by so many seconds. Its files go to `folder`.
    pub fn new(folder: &Path, offset_seconds: i64) -> Self {
        let clock =
            Self { library: folder.join("wrong_clock.so"), offset: folder.join("wrong_clock.offset") };
        let compiled = Command::new("cc")
            .args(["-O1", "-shared", "-fPIC", "-o"])
            .arg(&clock.library)
            .arg(SOURCE)
            .status();
        assert!(compiled.expect("cc starts").success(), "{SOURCE} compiles");
        clock.set(offset_seconds);
        clock
    }

    /// Steps it, while the process runs.
    pub fn set(&self, offset_seconds: i64) {
        // In place: the process has the file mapped.
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&self.offset)
            .expect("the offset's file");
        file.write_all_at(&(offset_seconds * 1_000_000).to_ne_bytes(), 0).expect("the offset is written");
    }

    /// Makes a process that is about to start have this clock.
    pub fn give_to(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("WRONG_CLOCK_FILE", &self.offset);
    }
}
