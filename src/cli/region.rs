//! `quorate region`: which regions are in the cluster, and which of them vote.

use super::client;
use crate::raft::VOTERS_MAX;
use crate::server::state::{RegionState, RegionStep, RegionsState};
use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::Duration;
use tokio::time::Instant;

/// Between two steps.
const STEP_EVERY: Duration = Duration::from_millis(500);

/// Show or change which regions are in the cluster, and which of them vote. Each change can be broken off and run again.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do
    #[command(subcommand)]
    pub action: Action,
    /// Where, and with what token
    #[command(flatten)]
    pub admin: client::Admin,
    /// How long to wait for the change to be through, in seconds
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 180, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

/// What to do with them.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// Print the regions of the cluster
    List {
        /// Print `/v1/regions` as it is
        #[arg(long)]
        json: bool,
    },
    /// Let a region in: it follows the log, and gets a vote once it has caught up
    Add {
        /// The region's name
        name: String,
        /// Where the others reach its peer listener
        #[arg(long)]
        url: String,
        /// Give it no vote
        #[arg(long)]
        learner: bool,
        /// It is to vote, have no part of any limit, and serve nobody
        #[arg(long, conflicts_with = "learner")]
        witness: bool,
    },
    /// Remove a region: its part of every limit goes to the others
    Remove {
        /// The region's name
        name: String,
        /// Do not wait for its word: you promise that its daemon has stopped for good, and will not start again with its data
        #[arg(long)]
        presume_dead: bool,
    },
    /// Give a learner a vote
    Promote {
        /// The region's name
        name: String,
    },
    /// Take a region's vote; it stays in the cluster
    Demote {
        /// The region's name
        name: String,
    },
    /// Have another region lead
    TransferLeader {
        /// The region's name
        name: String,
    },
}

/// Runs the command.
///
/// # Errors
/// If the daemon cannot be reached, or the change is not through in time.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let base = args.admin.at.base()?;
    client::runtime()?.block_on(async {
        let admin = Admin {
            http: args.admin.at.http()?,
            url: format!("{base}/v1/regions"),
            access: args.admin.clone(),
            until: Instant::now() + Duration::from_secs(args.timeout),
        };
        let done = match &args.action {
            Action::List { json } => list(&admin, *json).await,
            Action::Add { name, url, learner, witness } => add(&admin, name, url, *learner, *witness).await,
            Action::Remove { name, presume_dead } => remove(&admin, name, *presume_dead).await,
            Action::Promote { name } => {
                admin.act(name, "promote").await.map(|step| println!("{name} votes (node {})", step.node))
            }
            Action::Demote { name } => admin
                .act(name, "demote")
                .await
                .map(|step| println!("{name} has no vote (node {})", step.node)),
            Action::TransferLeader { name } => {
                admin.act(name, "lead").await.map(|_| println!("{name} leads"))
            }
        };
        match done {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(fault) => match fault.downcast::<Refused>() {
                Ok(Refused(why)) => {
                    eprintln!("quorate: {why}");
                    Ok(ExitCode::from(super::NO))
                }
                Err(fault) => Err(fault),
            },
        }
    })
}

/// The cluster's "no".
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

async fn list(admin: &Admin, json: bool) -> anyhow::Result<()> {
    let (state, text) = admin.list().await?;
    if json {
        println!("{text}");
        return Ok(());
    }
    println!("{}", table(&state));
    Ok(())
}

async fn add(admin: &Admin, name: &str, url: &str, learner: bool, witness: bool) -> anyhow::Result<()> {
    let mut body = json!({ "region": name, "url": url });
    if witness && let Some(body) = body.as_object_mut() {
        body.insert("witness".into(), true.into());
    }
    let step = admin.finish(name, |a| a.http.post(&a.url).json_body(&body)).await?;
    println!("{name} follows the log as node {}; start its daemon, if it does not run yet", step.node);
    let voters =
        admin.list().await?.0.regions.iter().filter(|r| r.role == "voter" && r.region != name).count();
    if learner || voters >= VOTERS_MAX {
        let why =
            if learner { "as you asked".to_owned() } else { format!("as {voters} regions vote already") };
        println!("it has no vote, {why}; its part of every limit is the same");
    } else {
        admin.act(name, "promote").await?;
        println!("{name} votes");
    }
    if witness {
        println!("{name} is in: a witness, which has no part of any limit");
        return Ok(());
    }
    admin.settled(name).await?;
    println!("{name} is in: it has its part of every limit");
    Ok(())
}

async fn remove(admin: &Admin, name: &str, presume_dead: bool) -> anyhow::Result<()> {
    let url = format!("{}/{name}{}", admin.url, if presume_dead { "?presume_dead=1" } else { "" });
    admin.finish(name, |a| a.http.delete(&url)).await?;
    println!("{name} is removed; stop its daemon, if it still runs, and take it out of `cluster.regions`");
    Ok(())
}

fn table(state: &RegionsState) -> String {
    let line = |r: &RegionState| {
        let reachable = if r.reachable { "reachable" } else { "UNREACHABLE" };
        let leads = if r.leads { ", leads" } else { "" };
        let leads = if r.witness { format!(", witness{leads}") } else { leads.to_owned() };
        let waits = r.waits_for.as_ref().map(|w| format!(", waits for {w}")).unwrap_or_default();
        let url = r.url.as_deref().unwrap_or("-");
        format!(
            "{:<16} {:<8} {:<8} node {:<4} {reachable}{leads}{waits}  {url}",
            r.region, r.standing, r.role, r.node
        )
    };
    state.regions.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// `/v1/regions` of a daemon.
struct Admin {
    http: reqwest::Client,
    url: String,
    access: client::Admin,
    until: Instant,
}

/// reqwest's own needs a feature.
trait JsonBody {
    fn json_body(self, body: &Value) -> Self;
}

impl JsonBody for reqwest::RequestBuilder {
    fn json_body(self, body: &Value) -> Self {
        self.header("content-type", "application/json").body(body.to_string())
    }
}

impl Admin {
    async fn list(&self) -> anyhow::Result<(RegionsState, String)> {
        let answer = self.http.get(&self.url).send().await;
        let answer =
            answer.map_err(|e| anyhow::anyhow!("no answer from {}: {}", self.url, client::why(&e)))?;
        let status = answer.status();
        let text = answer.text().await.context("the answer broke off")?;
        if !status.is_success() {
            bail!("{} answered {status}: {text}", self.url);
        }
        Ok((serde_json::from_str(&text).context("the answer is no list of regions")?, text))
    }

    async fn act(&self, name: &str, action: &str) -> anyhow::Result<RegionStep> {
        let url = format!("{}/{name}/{action}", self.url);
        self.finish(name, |a| a.http.post(&url)).await
    }

    /// Asks for the same again and again until it is done, and says what it waits for.
    async fn finish(
        &self,
        name: &str,
        request: impl Fn(&Self) -> reqwest::RequestBuilder,
    ) -> anyhow::Result<RegionStep> {
        let mut told = Told::default();
        loop {
            let why = match self.step(request(self)).await? {
                Ok(step) if step.done => return Ok(step),
                Ok(step) => step.waits_for.unwrap_or_default(),
                Err(not_now) => not_now,
            };
            told.tell(name, &why);
            self.pause(&why).await?;
        }
    }

    /// Waits until the region has its part.
    async fn settled(&self, name: &str) -> anyhow::Result<()> {
        let mut told = Told::default();
        loop {
            let (state, _) = self.list().await?;
            let region = state.regions.into_iter().find(|region| region.region == name);
            let region = region.with_context(|| format!("{name} has been removed meanwhile"))?;
            let Some(why) = region.waits_for else { return Ok(()) };
            told.tell(name, &why);
            self.pause(&why).await?;
        }
    }

    async fn pause(&self, why: &str) -> anyhow::Result<()> {
        if Instant::now() + STEP_EVERY > self.until {
            bail!("not through in time ({why}); run the same again to go on");
        }
        tokio::time::sleep(STEP_EVERY).await;
        Ok(())
    }

    /// One step, or why it could not be taken now.
    async fn step(&self, request: reqwest::RequestBuilder) -> anyhow::Result<Result<RegionStep, String>> {
        let answer = match self.access.authorize(request)?.send().await {
            Err(late) if late.is_timeout() => return Ok(Err(client::why(&late))),
            answer => answer,
        };
        let answer =
            answer.map_err(|e| anyhow::anyhow!("no answer from {}: {}", self.url, client::why(&e)))?;
        let status = answer.status();
        let body = answer.text().await.context("the answer broke off")?;
        if status.is_success() {
            return Ok(Ok(serde_json::from_str(&body).context("the answer is no step")?));
        }
        let problem: Value = serde_json::from_str(&body).unwrap_or_default();
        let text = |value: &Value| value.get("detail").and_then(Value::as_str).map(str::to_owned);
        let first = problem.pointer("/errors/0").and_then(text);
        let why = first.or_else(|| text(&problem)).unwrap_or(body);
        // Every step may be taken again: also one of which nobody knows what became.
        if status.is_server_error() { Ok(Err(why)) } else { Err(Refused(why).into()) }
    }
}

/// What it waits for is told when it changes (but for how many seconds).
#[derive(Default)]
struct Told(String);

impl Told {
    fn tell(&mut self, name: &str, why: &str) {
        let gist: String = why.chars().filter(|c| !c.is_ascii_digit()).collect();
        if self.0 != gist {
            eprintln!("{name}: not through yet ({why})");
            self.0 = gist;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_says_who_votes_and_what_it_waits_for() {
        let region = |region: &str, role: &str, waits_for: Option<&str>| RegionState {
            region: region.into(),
            node: 4,
            url: Some("https://a:8082".into()),
            standing: "in".into(),
            role: role.into(),
            witness: false,
            leads: role == "voter",
            reachable: waits_for.is_none(),
            waits_for: waits_for.map(Into::into),
        };
        let regions = vec![
            region("us-east", "voter", None),
            region("ca-west", "learner", Some("us-east to acknowledge")),
        ];
        let text = table(&RegionsState { region: "us-east".into(), regions });
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "us-east          in       voter    node 4    reachable, leads  https://a:8082",
                "ca-west          in       learner  node 4    UNREACHABLE, waits for us-east to acknowledge  https://a:8082",
            ]
        );
    }
}
