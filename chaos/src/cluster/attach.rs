//! A cluster that exists already: load and oracle are ours, faults are the operator's own.
//!
//! Nobody else may use the buckets that are asked for: what others are admitted is not seen here, and neither is what they are
//! denied for.

mod marks;

use super::admin::Admin;
use super::progress::Progress;
use super::promise::{self, Change, Terms};
use super::run::limits;
use super::scenario::{Expect, Load, Over, Pace};
use super::verdict;
use super::wakes::Naps;
use super::watch::{self, Beliefs};
use crate::oracle::{History, Run, Watched};
use crate::workload::{Recorder, Target, Workload};
use anyhow::{Context as _, bail};
use marks::Marks;
use quorate::config;
use quorate::quota::amount::Micros;
use quorate::quota::policy::{Policy, RegionName};
use quorate::server::state::State;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How to test a cluster that exists already.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Attach {
    /// Test a cluster that exists already: the HTTP and the admin URL of each region, `http://a:8080,http://a:8083,http://b:8080,...`.
    /// Faults are your own: write what you do, a line each, or press Enter or send SIGUSR1, at its begin and at its end
    #[arg(long, value_name = "URL,URL,...", value_delimiter = ',', conflicts_with_all = ["scenario", "netns", "keep", "quorate"])]
    pub attach: Vec<String>,
    /// A bucket to ask for, which nobody else may use: `policy:key=value,...`; may be given more than once
    #[arg(long, value_name = "POLICY:KEY=VALUE,...", requires = "attach")]
    pub bucket: Vec<String>,
    /// Requests a second, for each bucket in each region
    #[arg(long, value_name = "N", default_value_t = 20, requires = "attach")]
    pub rate: u32,
    /// Tokens a request
    #[arg(long, value_name = "N", default_value_t = 1, requires = "attach")]
    pub cost: u32,
    /// For how long, such as `60s` or `10m`
    #[arg(long, value_name = "TIME", default_value = "60s", requires = "attach", value_parser = duration)]
    pub duration: Duration,
}

fn duration(text: &str) -> Result<Duration, String> {
    config::duration(text, Duration::from_secs(1), Duration::from_secs(86_400))
}

impl Attach {
    /// Is that what is asked for?
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        !self.attach.is_empty()
    }
}

/// Runs load against a cluster and judges what it saw.
///
/// # Errors
/// The cluster cannot be reached, or has no such policy.
pub async fn run(args: &super::Args) -> anyhow::Result<u8> {
    let attached = &args.attached;
    let cluster = Cluster::reach(attached).await?;
    let progress = Progress::new(&format!("attached to {}", cluster.name), attached.duration, false);
    for load in &cluster.loads {
        progress.say(&format!(
            "nobody else may use {}: what others are admitted is not seen here",
            load.limit_name()
        ));
    }
    let history = cluster.go(args.seed, attached, &progress).await?;
    let elsewhere = ("quiet-logs".to_owned(), "its logs are not read from here".to_owned());
    let expect = Expect { not: vec![elsewhere], ..Expect::default() };
    verdict::conclude(&history, &expect, args.report.as_deref(), "attached", None)
}

/// A cluster, as its admin listeners describe it.
struct Cluster {
    name: String,
    admin: Admin,
    targets: Vec<Target>,
    /// The attached regions, by number.
    regions: Vec<String>,
    /// All regions of the cluster, in its own order.
    all: Vec<RegionName>,
    version: u64,
    policies: Vec<Policy>,
    loads: Vec<Load>,
}

impl Cluster {
    async fn reach(args: &Attach) -> anyhow::Result<Self> {
        let pairs = args.attach.chunks(2);
        if !args.attach.len().is_multiple_of(2) {
            bail!("--attach: {} URLs; give two for each region, first HTTP, then admin", args.attach.len());
        }
        let url = |url: &String| url.trim_end_matches('/').to_owned();
        let (http, admin): (Vec<String>, Vec<String>) =
            pairs.filter_map(|pair| Some((url(pair.first()?), url(pair.get(1)?)))).unzip();
        let admin = Admin::new(admin, None)?;
        let mut regions = Vec::new();
        let mut first = None;
        for (number, state) in admin.states().await.into_iter().enumerate() {
            let state = state.with_context(|| format!("--attach: {} does not answer", admin.url(number)))?;
            regions.push(state.region.clone());
            first.get_or_insert(state);
        }
        let state = first.context("--attach names no region")?;
        let all = members(&state);
        let yaml = admin.policies(0).await?;
        let policies = config::policies::parse(Path::new("policies"), &yaml, None)?;
        let target = |http: String| Target { http, grpc: None };
        let mut cluster = Self {
            name: state.cluster,
            admin,
            targets: http.into_iter().map(target).collect(),
            regions,
            all,
            version: state.policies_version,
            policies,
            loads: Vec::new(),
        };
        cluster.loads =
            args.bucket.iter().map(|text| cluster.load(text, args)).collect::<anyhow::Result<_>>()?;
        if cluster.loads.is_empty() {
            bail!("--attach needs a --bucket to ask for, such as `--bucket {}`", cluster.example());
        }
        Ok(cluster)
    }

    fn load(&self, text: &str, args: &Attach) -> anyhow::Result<Load> {
        let wrong = || format!("--bucket {text}: write `policy:key=value,...`, such as `{}`", self.example());
        let (name, values) = text.split_once(':').with_context(wrong)?;
        let policy = self.policies.iter().find(|p| &*p.name == name);
        let policy = policy.with_context(|| format!("{}: the cluster has no policy `{name}`", wrong()))?;
        let values: Vec<(&str, &str)> = values.split(',').filter_map(|pair| pair.split_once('=')).collect();
        let value = |key: &str| {
            values.iter().find(|(k, _)| *k == key).map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        };
        let bucket: Option<Vec<(String, String)>> = policy.matches.iter().map(|m| value(&m.key)).collect();
        let bucket = bucket.filter(|bucket| bucket.len() == values.len()).with_context(wrong)?;
        Ok(Load {
            policy: policy.name.to_string(),
            domain: policy.domain.to_string(),
            bucket,
            pace: vec![Pace::Open(args.rate); self.regions.len()],
            cost: args.cost,
            from: Duration::ZERO,
            to: args.duration,
            over: Over::Http,
        })
    }

    fn example(&self) -> String {
        let Some(policy) = self.policies.iter().find(|p| p.cut(&self.all).is_some()) else {
            return "policy:key=value".into();
        };
        let keys: Vec<String> = policy.matches.iter().map(|m| format!("{}=test", m.key)).collect();
        format!("{}:{}", policy.name, keys.join(","))
    }

    async fn go(self, seed: u64, args: &Attach, progress: &Progress) -> anyhow::Result<History> {
        let (names, loads) = limits(&self.loads);
        let named: Vec<RegionName> = self.regions.iter().map(|name| name.as_str().into()).collect();
        let recorder = Arc::new(Recorder::new(self.regions.len(), names.len()));
        let began = Instant::now();
        for (load, limit) in &loads {
            let edition = promise::edition(self.terms(), load, &named, Micros::ZERO);
            recorder.gauge(*limit, &edition.with_context(|| format!("{} has no limit", load.limit_name()))?);
        }
        let (beliefs, marks) =
            (Arc::new(Beliefs::default()), Arc::new(Marks::new(Arc::clone(&recorder), self.regions.len())));
        let changes: Arc<Mutex<Vec<Change>>> = Arc::default();
        let mut background = JoinSet::new();
        watch::spawn(&beliefs, &self.admin, &loads, &recorder, &mut background);
        let naps = Naps::spawn(&mut background);
        marks.listen(&mut background)?;
        background.spawn(watch_policies(
            self.admin.clone(),
            self.version,
            Arc::clone(&recorder),
            Arc::clone(&changes),
        ));
        let in_force = Arc::clone(&marks);
        progress.follow(
            &mut background,
            &recorder,
            &beliefs,
            Box::new(move || in_force.open()),
            &self.regions,
        );
        let load = Workload { loads: loads.clone(), targets: self.targets.clone(), seed };
        load.run(Arc::clone(&recorder), began).await?;
        let end = recorder.now();
        background.shutdown().await;
        progress.finish();
        let (requests, reasons) = recorder.take();
        let changes = changes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let watched = names.into_iter().enumerate().map(|(limit, name)| {
            let load = loads.iter().find(|(_, l)| *l == limit).map(|(load, _)| load);
            let editions = load.map(|load| promise::editions(self.terms(), &changes, load, &named));
            Watched { name, editions: editions.unwrap_or_default() }
        });
        let faults = marks.take();
        let buckets: Vec<String> = args.bucket.iter().map(|bucket| format!("--bucket '{bucket}'")).collect();
        let replay = format!(
            "quorate-chaos cluster --attach {} {} --rate {} --cost {} --duration {}s",
            args.attach.join(","),
            buckets.join(" "),
            args.rate,
            args.cost,
            args.duration.as_secs(),
        );
        Ok(History {
            run: Run {
                title: format!("attached to cluster {}", self.name),
                about:
                    "Load against a cluster that existed already; faults are those that its operator noted."
                        .to_owned(),
                replay,
            },
            limits: watched.collect(),
            requests,
            healed: faults
                .iter()
                .map(|f| f.to)
                .collect::<Option<Vec<_>>>()
                .and_then(|ends| ends.into_iter().max()),
            faults,
            samples: beliefs.take(),
            wakes: naps.seen(),
            end,
            reasons,
            notes: vec![
                "Nobody else may have used these buckets: what others were admitted is not seen here."
                    .to_owned(),
            ],
            regions: self.regions,
            ..History::default()
        })
    }

    fn terms(&self) -> Terms<'_> {
        Terms { policies: &self.policies, members: &self.all }
    }
}

/// The regions of a cluster. (How a limit is cut up does not depend on their order.)
fn members(state: &State) -> Vec<RegionName> {
    let names = state.raft.voters.iter().chain(&state.raft.learners);
    names.map(|name| name.as_str().into()).collect()
}

/// Notes changes of policies by others. (One was sent after the last look that did not show it.)
async fn watch_policies(admin: Admin, first: u64, recorder: Arc<Recorder>, changes: Arc<Mutex<Vec<Change>>>) {
    let mut version = first;
    loop {
        let before = recorder.now();
        tokio::time::sleep(LOOK_EVERY).await;
        let states = admin.states().await;
        let newest = states
            .iter()
            .enumerate()
            .filter_map(|(region, s)| Some((s.as_ref().ok()?.policies_version, region)))
            .max();
        let Some((newest, region)) = newest else { continue };
        if newest > version
            && let Some(Ok(state)) = states.get(region)
            && let Ok(yaml) = admin.policies(region).await
            && let Ok(policies) = config::policies::parse(Path::new("policies"), &yaml, None)
        {
            version = newest;
            changes.lock().unwrap_or_else(PoisonError::into_inner).push(Change {
                sent: before,
                settled: None,
                policies,
                members: members(state),
            });
        }
        let settled = states.iter().flatten().any(|s| s.policies_version == version && s.policies_settled);
        let mut changes = changes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = changes.last_mut().filter(|last| settled && last.settled.is_none()) {
            last.settled = Some(recorder.now());
        }
    }
}
