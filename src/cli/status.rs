//! `quorate status`: a region's view of the cluster.

use super::client;
use super::screen::{self, Looks, printable, rate};
use crate::server::state::{RegionView, State};
use std::fmt::Write as _;
use std::process::ExitCode;

/// Buckets shown.
const BUCKETS_SHOWN: usize = 20;

/// Show a region's view of the cluster: leader, peers, store, policies, leases. Exit code 1: not ready.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where
    #[command(flatten)]
    pub at: client::Place,
    /// Look again every second until interrupted; on a terminal it is drawn in its place
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
    client::runtime()?.block_on(async {
        let looks = Looks { count: if args.watch { None } else { Some(1) }, redraw: args.watch };
        let show = |state: &State, text: &str| if args.json { text.to_owned() } else { describe(state) };
        let state = screen::look(&args.at, looks, show).await?;
        Ok(ExitCode::from(if state.not_ready.is_empty() { 0 } else { super::NO }))
    })
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
    let is_witness = |name: &str| state.regions.get(name).is_some_and(|region| region.witness);
    let witness = |name: &str| if is_witness(name) { " (witness)" } else { "" };
    let (me, what) = (&state.region, witness(&state.region));
    let _ = writeln!(w, "region   {me}{what} of {}, quorate {}, {ready}", state.cluster, state.version);
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
    let voters: Vec<String> = raft.voters.iter().map(|name| format!("{name}{}", witness(name))).collect();
    let _ = writeln!(w, "members  voters {}{others}", voters.join(", "));
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
        let said = state.regions.get(&peer.region).map(said).unwrap_or_default();
        let _ = writeln!(w, "peer     {:<16} {how}, round trip {rtt}, {}{said}", peer.region, peer.address);
    }
    for (name, region) in state.regions.iter().filter(|(_, region)| !region.witness) {
        let passes = state.traffic.values().filter_map(|traffic| traffic.regions.get(name));
        let (admitted, denied) = passes
            .fold((0_u64, 0_u64), |(a, d), r| (a.saturating_add(r.admitted), d.saturating_add(r.denied)));
        let old = if region.reachable { "" } else { " (when last heard)" };
        let _ = writeln!(w, "passes   {name:<16} admits {}, denies {}{old}", rate(admitted), rate(denied));
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
        let what = printable(if bucket.what.is_empty() { &bucket.bucket } else { &bucket.what });
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

/// What another region says of itself, where that is worth a word.
fn said(region: &RegionView) -> String {
    let Some(age) = region.age_ms else { return String::new() };
    let store = &region.said.store;
    let store = match (store.attached, &store.why) {
        (true, _) => String::new(),
        (false, why) => format!(", store DETACHED: {}", why.as_deref().unwrap_or("it is not attached")),
    };
    let ready = if region.said.not_ready.is_empty() { "" } else { ", NOT READY" };
    let old = if region.reachable { String::new() } else { format!(", last heard {} s ago", age / 1_000) };
    format!("{ready}{store}{old}")
}

/// Micro-tokens as tokens with two digits.
fn tokens(micro: i64) -> String {
    format!("{}.{:02}", micro / 1_000_000, micro.rem_euclid(1_000_000) / 10_000)
}
