//! What an operator says that was done.

use crate::oracle::FaultSpan;
use crate::workload::Recorder;
use anyhow::Context as _;
use std::io::BufRead as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Lines that wait to be noted.
const LINES_MAX: usize = 64;
/// What a fault without a name is called.
const UNNAMED: &str = "fault";

/// Marks of an operator: a line that says something begins a fault of that name; an empty one (or SIGUSR1) ends the one that began
/// last, or begins one without a name if there is none.
#[derive(Debug)]
pub struct Marks {
    recorder: Arc<Recorder>,
    regions: usize,
    spans: Mutex<Vec<FaultSpan>>,
}

impl Marks {
    /// None so far.
    #[must_use]
    pub fn new(recorder: Arc<Recorder>, regions: usize) -> Self {
        Self { recorder, regions, spans: Mutex::default() }
    }

    /// Listens to standard input and to SIGUSR1, for as long as the tasks run.
    ///
    /// # Errors
    /// Signals cannot be listened for.
    pub fn listen(self: &Arc<Self>, tasks: &mut JoinSet<()>) -> anyhow::Result<()> {
        let mut toggles = signal(SignalKind::user_defined1()).context("cannot listen for SIGUSR1")?;
        let (said, mut lines) = mpsc::channel(LINES_MAX);
        // A thread of its own, which goes with the process: nobody can take back a read of standard input.
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                if said.blocking_send(line).is_err() {
                    return;
                }
            }
        });
        let marks = Arc::clone(self);
        tasks.spawn(async move {
            loop {
                tokio::select! {
                    Some(line) = lines.recv() => marks.mark(line.trim()),
                    Some(()) = toggles.recv() => marks.mark(""),
                    else => return,
                }
            }
        });
        Ok(())
    }

    /// What is open, by name.
    #[must_use]
    pub fn open(&self) -> Vec<String> {
        self.lock().iter().filter(|span| span.to.is_none()).map(|span| span.what.clone()).collect()
    }

    /// All of it.
    #[must_use]
    pub fn take(&self) -> Vec<FaultSpan> {
        std::mem::take(&mut *self.lock())
    }

    fn mark(&self, line: &str) {
        let now = self.recorder.now();
        let mut spans = self.lock();
        match spans.iter_mut().rev().find(|span| span.to.is_none()) {
            Some(open) if line.is_empty() => open.to = Some(now),
            _ => {
                let what = if line.is_empty() { UNNAMED } else { line }.to_owned();
                // It may touch anything: nothing that is promised to a healthy region is held against one meanwhile.
                let regions = (0..self.regions).collect();
                spans.push(FaultSpan { from: now, to: None, what, regions, disables: true, isolates: true });
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<FaultSpan>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_begin_and_empty_ones_end() {
        let marks = Marks::new(Arc::new(Recorder::new(2, 0)), 2);
        for line in ["drop eu", "", "", "pull the plug", "", ""] {
            marks.mark(line);
        }
        assert_eq!(marks.open(), Vec::<String>::new());
        let spans = marks.take();
        let seen: Vec<&str> = spans.iter().map(|span| span.what.as_str()).collect();
        assert_eq!(seen, ["drop eu", "fault", "pull the plug"]);
        assert!(
            spans.iter().all(|s| s.disables && s.regions == [0, 1] && s.to.is_some_and(|to| to >= s.from))
        );
    }
}
