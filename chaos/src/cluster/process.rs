//! A child process: its output in a file, its end certain.

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tokio::time::Instant;

/// How often a process that is to end is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A running child. It is killed when this is dropped, and by the kernel when the thread that started it ends: start it on one
/// that lasts.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
}

impl Process {
    /// Starts a command; what it writes is appended to `folder/name.log`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(name: &str, folder: &Path, mut command: Command) -> anyhow::Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log);
        let out = out.with_context(|| format!("cannot write {}", log.display()))?;
        command.stdin(Stdio::null()).stderr(out.try_clone()?).stdout(out);
        // A group of its own: Ctrl-C is for this program, which then ends the others in order.
        command.process_group(0);
        die_with_parent(&mut command);
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command
            .spawn()
            .with_context(|| format!("{name}: `{program}` does not start; is it installed?"))?;
        Ok(Self { name: name.to_owned(), child })
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// The process has ended.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process id")?;
        kill_process(pid, signal).with_context(|| format!("{}: cannot send {signal:?}", self.name))
    }

    /// Has it ended by itself?
    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It has not ended within the deadline.
    pub async fn ended(&mut self, within: Duration) -> anyhow::Result<ExitStatus> {
        let end = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= end {
                bail!("{} does not end within {within:?}", self.name);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended already is what was wanted; one that is stopped dies of SIGKILL too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child is killed when the thread that starts it ends, however that comes about.
fn die_with_parent(command: &mut Command) {
    let die = || Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?);
    // SAFETY: between fork and exec this makes one system call (prctl), which is async-signal-safe, and allocates nothing.
    #[allow(unsafe_code, reason = "the only way to run code in a child before its program")]
    unsafe {
        command.pre_exec(die);
    }
}
