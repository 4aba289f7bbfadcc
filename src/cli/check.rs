//! `quorate check`: asks for one decision and prints it.

use super::client;
use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Ask for one decision and print it. Exit code 0: allowed, 1: denied, 2: no answer.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The domain of the policies
    #[arg(long)]
    pub domain: String,
    /// Attributes of the request
    #[arg(value_name = "KEY=VALUE", required = true)]
    pub attributes: Vec<String>,
    /// Tokens to spend; 0 asks without spending, less gives back
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    pub cost: i64,
    /// Where a region decides over HTTP
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080", env = "QUORATE_ADDR")]
    pub addr: String,
    /// A file with a caller's token, where the region wants one
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// A file with the authority (PEM) that the region's certificate comes from, if not one of the system's
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Deserialize)]
struct Answer {
    allowed: bool,
    limits: Vec<LimitAnswer>,
}

#[derive(Debug, Deserialize)]
struct LimitAnswer {
    policy: String,
    mode: String,
    allowed: bool,
    #[serde(default)]
    limit: Option<u64>,
    #[serde(default)]
    remaining: Option<u64>,
    #[serde(default)]
    reset_ms: u64,
    #[serde(default)]
    retry_after_ms: Option<u64>,
    reason: String,
}

/// Runs the command.
///
/// # Errors
/// If the arguments are wrong or no answer comes.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let body =
        json!({ "domain": args.domain, "attributes": attributes(&args.attributes)?, "cost": args.cost });
    let base = client::base("--addr", &args.addr)?;
    let request = client::trusting(args.ca.as_deref())?.post(format!("{base}/v1/check"));
    let request = client::with_token(request, args.token_file.as_deref())?;
    let text = client::runtime()?.block_on(ask(&base, request, &body))?;
    let answer: Answer =
        serde_json::from_str(&text).with_context(|| format!("{base} answered what is no decision"))?;
    if args.json {
        println!("{text}");
    } else {
        print(&answer);
    }
    Ok(ExitCode::from(if answer.allowed { 0 } else { super::NO }))
}

fn attributes(pairs: &[String]) -> anyhow::Result<Map<String, Value>> {
    let mut attributes = Map::new();
    for pair in pairs {
        let Some((key, value)) = pair.split_once('=') else {
            bail!("`{pair}`: want KEY=VALUE, such as tenant=42");
        };
        if attributes.insert(key.to_owned(), value.into()).is_some() {
            bail!("`{pair}`: the key `{key}` is there twice; give each once");
        }
    }
    Ok(attributes)
}

/// The body of a decision (200, 429 or 503).
async fn ask(base: &str, request: reqwest::RequestBuilder, body: &Value) -> anyhow::Result<String> {
    let request = request.header("content-type", "application/json").body(body.to_string());
    let answer = match request.send().await {
        Ok(answer) => answer,
        Err(error) => bail!("no answer from {base}: {}; is a region listening there?", client::why(&error)),
    };
    let status = answer.status();
    let text = answer.text().await.with_context(|| format!("the answer of {base} broke off"))?;
    let decision =
        matches!(status.as_u16(), 200 | 429) || (status.as_u16() == 503 && text.contains("\"limits\""));
    if !decision {
        let problem: Value = serde_json::from_str(&text).unwrap_or_default();
        let detail = problem.get("detail").or(problem.get("title")).and_then(Value::as_str).unwrap_or(&text);
        bail!("{base} refused the request ({status}): {detail}");
    }
    Ok(text)
}

fn print(answer: &Answer) {
    println!("{}", if answer.allowed { "allowed" } else { "denied" });
    if answer.limits.is_empty() {
        println!("  no policy matches");
    }
    for limit in &answer.limits {
        let mut line = format!("  {} ({})", limit.policy, limit.mode);
        match (limit.limit, limit.remaining) {
            (Some(of), Some(left)) => line.push_str(&format!(": {left} left, limit {of}")),
            _ => line.push_str(": unlimited"),
        }
        if limit.reason != "ok" {
            line.push_str(&format!(", {}", limit.reason));
        }
        if limit.allowed {
            line.push_str(&format!(", full again in {}", seconds(limit.reset_ms)));
        } else {
            match limit.retry_after_ms {
                Some(ms) if ms > 0 => line.push_str(&format!(", try again in {}", seconds(ms))),
                _ => line.push_str(", this cost never fits"),
            }
        }
        println!("{line}");
    }
}

fn seconds(ms: u64) -> String {
    format!("{}.{:03} s", ms / 1_000, ms % 1_000)
}
