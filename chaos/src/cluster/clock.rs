//! Wall clocks that are wrong. (libfaketime does not get along with Debian's Redis and its jemalloc.)

use anyhow::{Context as _, bail};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE: &str = include_str!("wrong_clock.c");

/// The library that is preloaded into whoever has a wrong clock.
#[derive(Clone, Debug)]
pub struct ClockLibrary(PathBuf);

impl ClockLibrary {
    /// Compiles it; its files go to `folder`.
    ///
    /// # Errors
    /// There is no C compiler.
    pub fn compile(folder: &Path) -> anyhow::Result<Self> {
        let (source, library) = (folder.join("wrong_clock.c"), folder.join("wrong_clock.so"));
        std::fs::write(&source, SOURCE)?;
        let mut command = Command::new("cc");
        command.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
        let status = command
            .status()
            .context("a scenario with wrong clocks needs a C compiler: `cc` does not start")?;
        if !status.success() {
            bail!("{} does not compile: cc: {status}", source.display());
        }
        Ok(Self(library))
    }
}

/// The wall clock of one process; its monotonic clocks stay right.
#[derive(Debug)]
pub struct WrongClock {
    library: ClockLibrary,
    file: PathBuf,
    offset_ms: i64,
}

impl WrongClock {
    /// One that is right so far; its offset is kept in `file`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(library: &ClockLibrary, file: PathBuf) -> anyhow::Result<Self> {
        let mut clock = Self { library: library.clone(), file, offset_ms: 0 };
        clock.step(0)?;
        Ok(clock)
    }

    /// Steps it, while the process runs.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn step(&mut self, by_ms: i64) -> anyhow::Result<()> {
        self.offset_ms = self.offset_ms.saturating_add(by_ms);
        // In place: the process has the file mapped.
        let file = File::options().create(true).truncate(false).write(true).open(&self.file)?;
        file.write_all_at(&self.offset_ms.saturating_mul(1_000).to_ne_bytes(), 0)?;
        Ok(())
    }

    /// Makes a process that is about to start have this clock.
    pub fn give_to(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library.0).env("WRONG_CLOCK_FILE", &self.file);
    }
}
