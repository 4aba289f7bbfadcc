//! One run of a scenario, from the first process to the history.

use super::director::Director;
use super::progress::Progress;
use super::promise::{self, Terms};
use super::scenario::{Load, Scenario};
use super::stage::Stage;
use super::wakes::Naps;
use super::watch::{self, Beliefs};
use super::{FOLDER_PREFIX, logs};
use crate::oracle::{FaultSpan, History, Params, Run, Watched};
use crate::workload::{Recorder, Workload};
use anyhow::{Context as _, bail};
use quorate::bugs::Bug;
use quorate::quota::amount::Micros;
use quorate::quota::policy::RegionName;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// How often daemons are looked after.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How to run a scenario.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The `quorate` binary; with a deliberate bug, this program's.
    pub binary: PathBuf,
    /// The deliberate bug.
    pub plant: Option<Bug>,
    /// Keep everything in this folder; `None`: in a temporary one, which goes.
    pub folder: Option<PathBuf>,
    /// Use network namespaces.
    pub namespaces: bool,
    /// Chooses followers and paces requests.
    pub seed: u64,
    /// The command that runs it again.
    pub replay: String,
    /// Show no progress.
    pub quiet: bool,
}

/// What a run left behind.
#[derive(Debug)]
pub struct Outcome {
    /// What happened.
    pub history: History,
    /// Logs and data; goes with the last who holds it, unless it is to be kept.
    pub folder: Arc<Folder>,
}

/// The folder of a run.
#[derive(Debug)]
pub enum Folder {
    /// It goes.
    Temporary(TempDir),
    /// It stays.
    Kept(PathBuf),
}

impl Folder {
    fn new(kept: Option<&Path>) -> anyhow::Result<Self> {
        if let Some(path) = kept {
            let name = || format!("--keep {}", path.display());
            std::fs::create_dir_all(path).with_context(name)?;
            if std::fs::read_dir(path).with_context(name)?.next().is_some() {
                bail!("{}: is not empty; a run begins with nothing", name());
            }
            return Ok(Self::Kept(std::path::absolute(path)?));
        }
        let prefix = format!("{FOLDER_PREFIX}{}-", std::process::id());
        Ok(Self::Temporary(tempfile::Builder::new().prefix(&prefix).tempdir()?))
    }

    /// Where it is, if it stays.
    #[must_use]
    pub fn kept(&self) -> Option<&Path> {
        if let Self::Kept(path) = self { Some(path) } else { None }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Temporary(folder) => folder.path(),
            Self::Kept(path) => path,
        }
    }
}

/// Runs a scenario to its end.
///
/// # Errors
/// It could not be run.
pub async fn run(scenario: &Scenario, options: &Options) -> anyhow::Result<Outcome> {
    let folder = Arc::new(Folder::new(options.folder.as_deref())?);
    let progress = Progress::new(&scenario.title, scenario.length, options.quiet);
    progress.say(&format!("starting {} regions", scenario.topology.founders));
    let stage = Stage::start(scenario, options, &folder).await?;
    let history = Show { scenario, options, stage: Arc::new(stage), progress: &progress }.go().await?;
    std::fs::write(folder.path().join("history.json"), serde_json::to_vec(&history)?)?;
    Ok(Outcome { history, folder })
}

struct Show<'s> {
    scenario: &'s Scenario,
    options: &'s Options,
    stage: Arc<Stage>,
    progress: &'s Progress,
}

impl Show<'_> {
    async fn go(self) -> anyhow::Result<History> {
        let (names, loads) = limits(&self.scenario.loads);
        let recorder = Arc::new(Recorder::new(self.stage.sites.len(), names.len()));
        let began = Instant::now();
        let director =
            Director::new(Arc::clone(&self.stage), Arc::clone(&recorder), self.scenario, self.options.seed);
        let director = Arc::new(director);
        for (load, limit) in &loads {
            if let Some(edition) = promise::edition(self.terms(), load, self.regions(), Micros::ZERO) {
                recorder.gauge(*limit, &edition);
            }
        }
        let beliefs = Arc::new(Beliefs::default());
        let mut background = JoinSet::new();
        watch::spawn(&beliefs, &self.stage.admin, &loads, &recorder, &mut background);
        background.spawn(look_after(Arc::clone(&director)));
        let naps = Naps::spawn(&mut background);
        let in_force = Arc::clone(&director);
        let in_force = Box::new(move || in_force.in_force());
        self.progress.follow(&mut background, &recorder, &beliefs, in_force, &self.names());
        let load = Workload { loads: loads.clone(), targets: self.stage.targets(), seed: self.options.seed };
        tokio::try_join!(
            load.run(Arc::clone(&recorder), began),
            Arc::clone(&director).run(self.scenario, began)
        )?;
        tokio::time::sleep_until(began + self.scenario.length).await;
        director.watch().await;
        let end = recorder.now();
        background.shutdown().await;
        self.progress.finish();
        let (requests, reasons) = recorder.take();
        let spans = director.spans();
        let changes = director.changes();
        let watched = names.into_iter().enumerate().map(|(limit, name)| {
            let load = loads.iter().find(|(_, l)| *l == limit).map(|(load, _)| load);
            let editions = load.map(|load| promise::editions(self.terms(), &changes, load, self.regions()));
            Watched { name, editions: editions.unwrap_or_default() }
        });
        Ok(History {
            run: Run {
                title: format!("cluster {}: {}", self.scenario.name, self.scenario.title),
                about: self.scenario.about.clone(),
                replay: self.options.replay.clone(),
            },
            regions: self.names(),
            limits: watched.collect(),
            requests,
            healed: healed(&spans),
            faults: spans,
            samples: beliefs.take(),
            wakes: naps.seen(),
            end,
            params: self.params(),
            reasons,
            logs: self.logs().await,
            notes: self.stage.notes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone(),
        })
    }

    fn names(&self) -> Vec<String> {
        self.stage.sites.iter().map(|site| site.name.clone()).collect()
    }

    fn params(&self) -> Params {
        Params { recovery: self.scenario.expect.recovery.map(Micros::from_duration), ..Params::default() }
    }

    fn regions(&self) -> &[RegionName] {
        &self.scenario.topology.regions
    }

    /// What holds at first.
    fn terms(&self) -> Terms<'_> {
        let topology = &self.scenario.topology;
        let members = topology.regions.get(..topology.founders).unwrap_or_default();
        Terms { policies: &self.scenario.policies, members }
    }

    async fn logs(&self) -> Vec<crate::oracle::LogLine> {
        let mut lines = Vec::new();
        for (number, site) in self.stage.sites.iter().enumerate() {
            let file = site.daemon.lock().await.settings.log_file();
            lines.extend(logs::summary(number, &file, &self.scenario.expect.errors));
        }
        lines
    }
}

/// The different buckets that are asked for, and for each load the number of its own.
pub(super) fn limits(loads: &[Load]) -> (Vec<String>, Vec<(Load, usize)>) {
    let mut names: Vec<String> = Vec::new();
    let numbered = loads.iter().map(|load| {
        let name = load.limit_name();
        let number = names.iter().position(|known| *known == name).unwrap_or_else(|| {
            names.push(name);
            names.len() - 1
        });
        (load.clone(), number)
    });
    let numbered = numbered.collect();
    (names, numbered)
}

/// When the last fault had ended; `None`: one never did, or there was none.
fn healed(spans: &[FaultSpan]) -> Option<Micros> {
    spans.iter().map(|span| span.to).collect::<Option<Vec<Micros>>>()?.into_iter().max()
}

async fn look_after(director: Arc<Director>) {
    loop {
        director.watch().await;
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
