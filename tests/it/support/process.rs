//! A child process: its log in a file, its end by its own id.

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// How much of its log a process shows when its test fails.
const LOG_TAIL_LINES: usize = 60;

/// A running child. Killed (and waited for) when dropped.
pub struct Process {
    name: String,
    log: PathBuf,
    child: Child,
}

impl Process {
    /// Starts `command`, its output appended to `folder/name.log`.
    pub fn start(name: &str, folder: &Path, command: &mut Command) -> Self {
        let log = folder.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log).expect("the log file opens");
        let err = out.try_clone().expect("the log file opens twice");
        let child = command.stdin(Stdio::null()).stdout(out).stderr(err).spawn();
        let child =
            child.unwrap_or_else(|e| panic!("{name}: {:?} does not start: {e}", command.get_program()));
        Self { name: name.to_owned(), log, child }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap_or_else(|e| panic!("{}: signal {signal:?}: {e}", self.name));
    }

    /// Kills the process group that it leads.
    pub fn kill_group(&self) {
        // One that has ended already is what was wanted.
        let _ = kill_process_group(self.pid(), Signal::KILL);
    }

    fn pid(&self) -> Pid {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process id")
    }

    /// Kills it as `kill -9` does, and waits for its end.
    pub fn kill(&mut self) {
        // A process that has ended already is what was wanted; a stopped one dies of SIGKILL too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its exit status, if it ends before the deadline.
    pub async fn ended(&mut self, deadline: Duration) -> ExitStatus {
        let name = self.name.clone();
        super::eventually(&format!("{name} ends"), deadline, || {
            let ended = self.child.try_wait();
            async { ended.map_err(|e| e.to_string())?.ok_or_else(|| "it is running".to_owned()) }
        })
        .await
    }

    /// Has it ended by itself?
    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// CPU time that it has used so far, all its threads, user and system.
    #[allow(dead_code, reason = "for the benches")]
    pub fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("it is running");
        // proc(5): the second field, the name, may hold anything up to the last parenthesis; utime and stime are 14 and 15.
        let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum();
        Duration::from_millis(ticks * 1_000 / rustix::param::clock_ticks_per_second())
    }

    /// Memory that it has in use, in bytes.
    pub fn memory(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it is running");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1_024
    }

    /// Everything that it has written so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines.split_at(lines.len().saturating_sub(LOG_TAIL_LINES)).1;
            eprintln!("---- the end of {}'s log ----\n{}", self.name, tail.join("\n"));
        }
    }
}
