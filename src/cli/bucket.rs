//! `quorate bucket`: one bucket in every region, to look at or to reset.

use super::client;
use crate::quota::amount::Tokens;
use crate::server::state::{BucketReset, BucketView};
use anyhow::{Context as _, bail};
use serde_json::json;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Show a bucket, or give it back what it has spent.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
    /// The cluster.
    #[command(flatten)]
    pub admin: client::Admin,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// Show a bucket: the pool, and each region's part
    Show {
        /// Which.
        #[command(flatten)]
        which: Which,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Fill a bucket, in every region: up to one burst more than the limit may pass. It is logged in each of them
    Reset {
        /// Which.
        #[command(flatten)]
        which: Which,
        /// Why, for the logs
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// A policy and the values of its keys.
#[derive(Clone, Debug, clap::Args)]
pub struct Which {
    /// The policy's name
    #[arg(long, value_name = "NAME")]
    pub policy: String,
    /// The values of the policy's keys
    #[arg(value_name = "KEY=VALUE", required = true)]
    pub values: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// If the arguments are wrong, or the daemon does not answer or does not do it.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let base = args.admin.at.base()?;
    client::runtime()?.block_on(async {
        match &args.action {
            Action::Show { which, json } => {
                let request = args.admin.at.http()?.get(which.url(&base, "")?);
                let text = answer(&base, request).await?;
                let view: BucketView = serde_json::from_str(&text).with_context(|| strange(&base))?;
                if *json { println!("{text}") } else { print!("{}", shown(&view)) }
            }
            Action::Reset { which, reason, json } => {
                let request = args.admin.at.http()?.post(which.url(&base, "/reset")?);
                let request = request
                    .header("content-type", "application/json")
                    .body(json!({ "reason": reason }).to_string());
                let text = answer(&base, args.admin.authorize(request)?).await?;
                let reset: BucketReset = serde_json::from_str(&text).with_context(|| strange(&base))?;
                if *json { println!("{text}") } else { print!("{}", done(&reset)) }
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl Which {
    fn url(&self, base: &str, action: &str) -> anyhow::Result<reqwest::Url> {
        let mut url = reqwest::Url::parse(base).with_context(|| format!("--admin {base}: not a URL"))?;
        let path = format!("v1/buckets/{}{action}", percent_encoded(&self.policy));
        url.set_path(&format!("{}/{path}", url.path().trim_end_matches('/')));
        for pair in &self.values {
            let Some((key, value)) = pair.split_once('=') else {
                bail!("`{pair}`: want KEY=VALUE, such as tenant=42");
            };
            url.query_pairs_mut().append_pair(key, value);
        }
        Ok(url)
    }
}

/// One segment of a path.
fn percent_encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut out, byte| {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
        out
    })
}

/// The body of a good answer.
async fn answer(base: &str, request: reqwest::RequestBuilder) -> anyhow::Result<String> {
    let answer = match request.send().await {
        Ok(answer) => answer,
        Err(error) => {
            bail!("no answer from {base}: {}; is a region's admin listener there?", client::why(&error))
        }
    };
    let status = answer.status();
    let text = answer.text().await.with_context(|| format!("the answer of {base} broke off"))?;
    if !status.is_success() {
        let problem: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let detail = problem.get("detail").and_then(serde_json::Value::as_str).unwrap_or(&text);
        bail!("{base} refused ({status}): {detail}");
    }
    Ok(text)
}

fn strange(base: &str) -> String {
    format!("{base} answered what is no bucket")
}

fn shown(view: &BucketView) -> String {
    let mut text = format!("bucket {} of {}\n", view.bucket, view.policy);
    if let Some(level) = view.pool_level {
        let _ = writeln!(text, "  pool: {} tokens to lend", tokens(level));
    }
    for region in &view.regions {
        let _ = write!(text, "  {}: keeps {}", region.region, tokens(region.reserve_cap));
        if let Some(lease) = &region.lease {
            let _ = write!(
                text,
                ", has borrowed {} and {}/s for {}.{:03} s more",
                tokens(lease.burst),
                tokens(lease.rate),
                lease.left_ms / 1_000,
                lease.left_ms % 1_000
            );
        }
        if let Some(level) = region.level {
            let _ = write!(text, ", {} left", tokens(level));
        }
        text.push('\n');
    }
    if view.books.as_ref().is_some_and(|books| books.frozen) {
        text.push_str(
            "  FROZEN: its books did not balance, and nothing is lent until all that is lent has run out\n",
        );
    }
    text
}

fn done(reset: &BucketReset) -> String {
    let mut text =
        format!("bucket {} of {} was reset (number {})\n", reset.bucket, reset.policy, reset.number);
    if !reset.waits_for.is_empty() {
        let _ = writeln!(text, "  still to hear of it: {}", reset.waits_for.join(", "));
    }
    text
}

/// Millionths as whole tokens and three decimals, rounded down.
fn tokens(millionths: i64) -> String {
    let whole = Tokens(millionths).floor();
    match millionths.rem_euclid(1_000_000) / 1_000 {
        0 => whole.to_string(),
        thousandths => format!("{whole}.{thousandths:03}").trim_end_matches('0').to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_carry_any_name_and_value() {
        let which = Which { policy: "a/b c".into(), values: vec!["tenant=x&y=z".into(), "op=é".into()] };
        let url = which.url("http://127.0.0.1:8083", "/reset").unwrap();
        assert_eq!(
            url.as_str(),
            "http://127.0.0.1:8083/v1/buckets/a%2Fb%20c/reset?tenant=x%26y%3Dz&op=%C3%A9"
        );
        assert!(Which { policy: "p".into(), values: vec!["tenant".into()] }.url("http://h", "").is_err());
    }

    #[test]
    fn tokens_are_short() {
        assert_eq!(tokens(1_500_000), "1.5");
        assert_eq!(tokens(2_000_000), "2");
        assert_eq!(tokens(1_999), "0.001");
    }
}
