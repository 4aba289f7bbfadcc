//! `quorate policies`: shows or changes the policies of a running cluster.

use super::client;
use crate::config;
use crate::server::state::AppliedPolicies;
use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Show or change the policies of a running cluster.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do
    #[command(subcommand)]
    pub action: Action,
    /// Where, and with what token
    #[command(flatten)]
    pub admin: client::Admin,
}

/// What to do with them.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// Print the policies in force, as a policy file
    Show {
        /// Print them as JSON, with their version
        #[arg(long)]
        json: bool,
    },
    /// Compare a file with the policies in force; exit code 1 if they differ
    Diff {
        /// A policy file
        file: PathBuf,
        /// Print JSON: what either has and the other has not
        #[arg(long)]
        json: bool,
    },
    /// Commit a file's policies through Raft, all or nothing
    Apply {
        /// A policy file
        file: PathBuf,
        /// Check only
        #[arg(long)]
        dry_run: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Runs the command.
///
/// # Errors
/// If the daemon cannot be reached or a file cannot be read.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let base = args.admin.at.base()?;
    let url = format!("{base}/v1/policies");
    client::runtime()?.block_on(async {
        let http = args.admin.at.http()?;
        match &args.action {
            Action::Show { json } => {
                let (version, text) = show(&http, &url).await?;
                if *json {
                    println!("{:#}", json!({ "version": version, "policies": as_json(&text)? }));
                } else {
                    print!("{text}");
                }
                Ok(ExitCode::SUCCESS)
            }
            Action::Diff { file, json } => diff(&show(&http, &url).await?.1, file, *json),
            Action::Apply { file, dry_run, json } => apply(args, &http, &url, (file, *dry_run), *json).await,
        }
    })
}

/// The policies in force and their version.
async fn show(http: &reqwest::Client, url: &str) -> anyhow::Result<(u64, String)> {
    let answer = http.get(url).send().await;
    let answer = answer.map_err(|e| anyhow::anyhow!("no answer from {url}: {}", client::why(&e)))?;
    let status = answer.status();
    let etag = answer
        .headers()
        .get("etag")
        .and_then(|tag| tag.to_str().ok())
        .map(|tag| tag.trim_matches('"').to_owned());
    let text = answer.text().await.context("the answer broke off")?;
    if !status.is_success() {
        bail!("{url} answered {status}: {text}");
    }
    let version = etag.and_then(|tag| tag.parse().ok()).with_context(|| format!("{url} names no version"))?;
    Ok((version, text))
}

/// A policy file's list, for machines: numbers and booleans are what YAML takes them for.
fn as_json(yaml: &str) -> anyhow::Result<Value> {
    let file: Value = serde_saphyr::from_str(yaml).context("the policies in force are no YAML")?;
    file.get("policies").cloned().context("the policies in force are no policy file")
}

/// Compares what the files mean, and prints what either has and the other has not.
fn diff(in_force: &str, file: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("{}: cannot be read", file.display()))?;
    let meaning = |name: &Path, text: &str| -> anyhow::Result<Vec<String>> {
        let policies = config::policies::parse(name, text, None)?;
        Ok(policies.iter().map(config::print::policy).collect())
    };
    let (old, new) = (meaning(Path::new("policies in force"), in_force)?, meaning(file, &text)?);
    let gone: Vec<&String> = old.iter().filter(|policy| !new.contains(policy)).collect();
    let come: Vec<&String> = new.iter().filter(|policy| !old.contains(policy)).collect();
    if json {
        println!("{:#}", json!({ "same": old == new, "only_in_force": gone, "only_in_file": come }));
    } else {
        gone.iter().for_each(|gone| println!("- {gone}"));
        come.iter().for_each(|come| println!("+ {come}"));
    }
    Ok(ExitCode::from(if old == new { 0 } else { super::NO }))
}

async fn apply(
    args: &Args,
    http: &reqwest::Client,
    url: &str,
    (file, dry_run): (&Path, bool),
    json: bool,
) -> anyhow::Result<ExitCode> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("{}: cannot be read", file.display()))?;
    let mut request = http.put(format!("{url}{}", if dry_run { "?dry_run=1" } else { "" })).body(text);
    request = args.admin.authorize(request)?;
    let answer = request.header("content-type", "application/yaml").send().await;
    let answer = answer.map_err(|e| anyhow::anyhow!("no answer from {url}: {}", client::why(&e)))?;
    let status = answer.status();
    let body = answer.text().await.context("the answer broke off")?;
    if status.is_success() {
        let done: AppliedPolicies = serde_json::from_str(&body).context("the answer is no JSON")?;
        if json {
            println!("{body}");
            return Ok(ExitCode::SUCCESS);
        }
        println!(
            "{} version {}",
            if done.dry_run { "would become" } else { "policies are in force:" },
            done.version
        );
        return Ok(ExitCode::SUCCESS);
    }
    for line in refusals(file, &body) {
        eprintln!("{line}");
    }
    Ok(ExitCode::from(if status.is_client_error() { super::NO } else { super::COULD_NOT }))
}

/// Why a daemon refused a file: each fault in a line of its own, or all in one.
fn refusals(file: &Path, body: &str) -> Vec<String> {
    let problem: Value = serde_json::from_str(body).unwrap_or_default();
    let text = |value: &Value| value.get("detail").and_then(Value::as_str).map(str::to_owned);
    let errors = problem.get("errors").and_then(Value::as_array);
    let each: Vec<String> = errors.into_iter().flatten().filter_map(text).collect();
    if each.is_empty() {
        return vec![format!("{}: {}", file.display(), text(&problem).as_deref().unwrap_or(body))];
    }
    // The daemon read it under the name `policies`: here it has a better one.
    let named = |fault: String| match fault.strip_prefix("policies:") {
        Some(rest) => format!("{}:{rest}", file.display()),
        None => format!("{}: {fault}", file.display()),
    };
    each.into_iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_is_told_with_its_place() {
        let lines = |body: &str| refusals(Path::new("my.yaml"), body);
        let faults = r#"{"detail":"2 faults","errors":[{"detail":"policies:2:5: a; b"},{"detail":"c"}]}"#;
        assert_eq!(lines(faults), ["my.yaml:2:5: a; b", "my.yaml: c"]);
        assert_eq!(lines(r#"{"detail":"version 3 is in force"}"#), ["my.yaml: version 3 is in force"]);
        assert_eq!(lines("<html>"), ["my.yaml: <html>"]);
    }
}
