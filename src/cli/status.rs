//! `quorate status`: a region's view of the cluster.

use super::client;
use crate::server::state::State;
use anyhow::{Context as _, bail};
use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

/// Time between two looks of `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);
/// Buckets shown.
const BUCKETS_SHOWN: usize = 20;

/// Show a region's view of the cluster: leader, peers, store, policies, leases. Exit code 1: not ready.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A region's admin listener
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8083", env = "QUORATE_ADMIN")]
    pub admin: String,
    /// Look again every second until interrupted
    #[arg(long)]
    pub watch: bool,
    /// Print `/v1/state` as it is
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// If the daemon cannot be reached (with `--watch`: the first time).
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let base = client::base("--admin", &args.admin)?;
    client::runtime()?.block_on(async {
        let http = client::http()?;
        let mut state = get(&http, &base).await?;
        loop {
            let text = if args.json { state.1.clone() } else { describe(&state.0) };
            let clear = args.watch && std::io::stdout().is_terminal();
            let mut out = std::io::stdout().lock();
            // Whoever reads may go away: that ends the command, without a fuss.
            if writeln!(out, "{}{text}", if clear { "\x1b[H\x1b[2J" } else { "" })
                .and_then(|()| out.flush())
                .is_err()
            {
                break;
            }
            drop(out);
            if !args.watch {
                break;
            }
            tokio::select! {
                () = tokio::time::sleep(WATCH_EVERY) => {}
                _ = tokio::signal::ctrl_c() => break,
            }
            match get(&http, &base).await {
                Ok(next) => state = next,
                Err(error) => eprintln!("quorate: {error:#}"),
            }
        }
        Ok(ExitCode::from(if state.0.not_ready.is_empty() { 0 } else { super::NO }))
    })
}

async fn get(http: &reqwest::Client, base: &str) -> anyhow::Result<(State, String)> {
    let answer = match http.get(format!("{base}/v1/state")).send().await {
        Ok(answer) => answer,
        Err(error) => {
            bail!("no answer from {base}: {}; give --admin a region's admin address", client::why(&error))
        }
    };
    let status = answer.status();
    let text = answer.text().await.with_context(|| format!("the answer of {base} broke off"))?;
    if !status.is_success() {
        bail!("{base} answered {status}: {text}");
    }
    let state = serde_json::from_str(&text).with_context(|| format!("{base} answered what is no state"))?;
    Ok((state, text))
}

fn describe(state: &State) -> String {
    let mut out = String::new();
    let w = &mut out;
    let ready = if state.not_ready.is_empty() {
        "ready".to_owned()
    } else {
        format!("NOT READY: {}", state.not_ready.join("; "))
    };
    // Writing to a String does not fail.
    let _ = writeln!(w, "region   {} of {}, quorate {}, {ready}", state.region, state.cluster, state.version);
    let raft = &state.raft;
    let _ = writeln!(
        w,
        "raft     {}, leader {}, term {}, applied {} of {}, clock {} s (heard {} ms ago), epoch {}",
        raft.role,
        raft.leader.as_deref().unwrap_or("none"),
        raft.term,
        raft.applied,
        raft.last,
        raft.tau_us / 1_000_000,
        raft.age_ms,
        raft.epoch,
    );
    let others = [("learners", &raft.learners), ("leaving", &raft.leaving)];
    let others = others.iter().filter(|(_, names)| !names.is_empty());
    let others: String = others.map(|(what, names)| format!("; {what} {}", names.join(", "))).collect();
    let _ = writeln!(w, "members  voters {}{others}", raft.voters.join(", "));
    let store = &state.store;
    let attached = if store.attached { "attached" } else { "DETACHED" };
    let _ = write!(w, "store    {}, {attached}", store.kind);
    if let Some(rtt) = store.rtt_us {
        let _ = write!(w, ", {}.{:03} ms", rtt / 1_000, rtt % 1_000);
    }
    let _ = writeln!(w, "{}", store.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default());
    for peer in &state.peers {
        let rtt = peer.rtt_us.map_or("-".to_owned(), |us| format!("{}.{} ms", us / 1_000, us % 1_000 / 100));
        let how = if peer.reachable { "reachable" } else { "UNREACHABLE" };
        let _ = writeln!(w, "peer     {:<16} {how}, round trip {rtt}, {}", peer.region, peer.address);
    }
    let _ = writeln!(w, "policies version {}", state.policies_version);
    for policy in &state.policies {
        let _ = writeln!(
            w,
            "  {:<24} {:<12} {:<20} admitted {}, denied {}",
            policy.name, policy.mode, policy.limit, policy.admitted, policy.denied
        );
    }
    if !state.buckets.is_empty() {
        let _ = writeln!(w, "buckets  (tokens in this region; lease: tokens a second, burst)");
    }
    for bucket in state.buckets.iter().take(BUCKETS_SHOWN) {
        let lease = bucket.lease.as_ref().map_or("none".to_owned(), |l| {
            format!("{} /s, {}, {} ms left", tokens(l.rate), tokens(l.burst), l.left_ms)
        });
        let what = if bucket.what.is_empty() { &bucket.bucket } else { &bucket.what };
        let _ = writeln!(
            w,
            "  {:<24} {what:<34} holds {} of {}, lease {lease}",
            bucket.policy,
            tokens(bucket.level.0),
            tokens(bucket.cap.0)
        );
    }
    if state.buckets.len() > BUCKETS_SHOWN || state.buckets_more {
        let _ = writeln!(w, "  (more)");
    }
    out.truncate(out.trim_end().len());
    out
}

/// Micro-tokens as tokens with two digits.
fn tokens(micro: i64) -> String {
    format!("{}.{:02}", micro / 1_000_000, micro.rem_euclid(1_000_000) / 10_000)
}
