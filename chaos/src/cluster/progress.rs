//! What a run shows while it goes on: one line that changes on a terminal, a line every few seconds elsewhere.

use super::watch::Beliefs;
use crate::workload::{Pulse, Recorder};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

const EVERY: Duration = Duration::from_secs(1);
/// How many of those go by between two lines where there is no terminal.
const PLAIN_EVERY: u32 = 5;

/// Shows how a run goes.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    length: Duration,
}

impl Progress {
    /// For a run of this length.
    #[must_use]
    pub fn new(title: &str, length: Duration, quiet: bool) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(length.as_secs());
            let style = ProgressStyle::with_template("{spinner} {prefix} [{bar:24}] {pos}/{len} s\n  {msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix(title.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        if bar.is_none() && !quiet {
            eprintln!("{title} ({} s)", length.as_secs());
        }
        Self { bar, quiet, length }
    }

    /// Says something.
    pub fn say(&self, what: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(what.to_owned()),
            None if !self.quiet => eprintln!("{what}"),
            None => {}
        }
    }

    /// Says every second how it goes, for as long as the tasks run. `in_force` names the faults.
    pub fn follow(
        &self,
        tasks: &mut JoinSet<()>,
        recorder: &Arc<Recorder>,
        beliefs: &Arc<Beliefs>,
        in_force: Box<dyn Fn() -> Vec<String> + Send + Sync>,
        regions: &[String],
    ) {
        if self.quiet {
            return;
        }
        let (recorder, beliefs) = (Arc::clone(recorder), Arc::clone(beliefs));
        let (bar, regions, length) = (self.bar.clone(), regions.to_vec(), self.length);
        tasks.spawn(async move {
            let mut tick = tokio::time::interval(EVERY);
            let mut before = recorder.pulse();
            let mut seconds = 0_u32;
            loop {
                tick.tick().await;
                let every = if bar.is_some() { 1 } else { PLAIN_EVERY };
                let shown = seconds.is_multiple_of(every);
                seconds = seconds.saturating_add(1);
                if !shown {
                    continue;
                }
                let now = recorder.pulse();
                let rates = rates(&regions, &before, &now, every);
                before = now;
                let leader = beliefs.leader().unwrap_or_else(|| "nobody".to_owned());
                let faults = in_force().join("; ");
                let faults = if faults.is_empty() { "no fault".to_owned() } else { faults };
                let text = format!(
                    "{rates} | fullest window {}% of burst | {leader} leads | {faults}",
                    recorder.fullest_percent()
                );
                let at = recorder.now().to_duration().as_secs();
                match &bar {
                    Some(bar) => {
                        bar.set_position(at.min(length.as_secs()));
                        bar.set_message(text);
                    }
                    None => eprintln!("{at:>4} s  {text}"),
                }
            }
        });
    }

    /// It is over.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Admitted and denied (and undecided) a second, by region.
fn rates(regions: &[String], before: &[Pulse], now: &[Pulse], seconds: u32) -> String {
    let each = regions.iter().zip(before.iter().zip(now)).map(|(region, (before, now))| {
        let rate = |a: u64, b: u64| b.saturating_sub(a) / u64::from(seconds.max(1));
        let other = rate(before.other, now.other);
        let other = if other > 0 { format!("?{other}") } else { String::new() };
        format!("{region} +{}-{}{other}", rate(before.allowed, now.allowed), rate(before.denied, now.denied))
    });
    each.collect::<Vec<_>>().join("  ")
}
