//! `quorate top`: the hottest buckets, live, by region.

use super::client;
use super::screen::{self, Looks, printable, rate};
use crate::server::state::{HotBucket, RegionView, State};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

/// The widest that a bucket's description is shown, in characters.
const WHAT_MAX: usize = 40;

/// Show the buckets with most demand in all regions, live: admitted, denied, and what is left
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Where
    #[command(flatten)]
    pub at: client::Place,
    /// One JSON object a line, every second
    #[arg(long)]
    pub json: bool,
    /// End after so many looks [default: go on until interrupted]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Show at most so many buckets
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub rows: usize,
    /// Only of this policy
    #[arg(long, value_name = "NAME")]
    pub policy: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// If the daemon cannot be reached (the first time).
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    client::runtime()?.block_on(async {
        let looks = Looks { count: args.count, redraw: !args.json };
        let describe = |state: &State, _: &str| {
            let hottest = state.hottest.iter();
            let wanted =
                hottest.filter(|hot| args.policy.as_ref().is_none_or(|policy| *policy == hot.policy));
            let shown: Vec<&HotBucket> = wanted.take(args.rows).collect();
            if args.json { machine(state, &shown) } else { people(state, &shown) }
        };
        screen::look(&args.at, looks, describe).await?;
        Ok(ExitCode::SUCCESS)
    })
}

fn machine(state: &State, hottest: &[&HotBucket]) -> String {
    let region = |(name, region): (&String, &RegionView)| {
        (name.clone(), json!({"reachable": region.reachable, "age_ms": region.age_ms}))
    };
    let regions: BTreeMap<_, _> = state.regions.iter().map(region).collect();
    json!({"now_ms": state.now_ms, "region": state.region, "regions": regions, "hottest": hottest})
        .to_string()
}

fn people(state: &State, hottest: &[&HotBucket]) -> String {
    let mut out = String::new();
    let away: Vec<String> = state.regions.iter().filter(|(_, r)| !r.reachable).map(cut_off).collect();
    let second = state.now_ms / 1_000 % 86_400;
    // Writing to a String does not fail.
    let _ = write!(
        out,
        "{:02}:{:02}:{:02} UTC  {} from {}, {} regions",
        second / 3_600,
        second / 60 % 60,
        second % 60,
        state.cluster,
        state.region,
        serving(state).count()
    );
    let _ = writeln!(
        out,
        "{}",
        if away.is_empty() { String::new() } else { format!("; CUT OFF: {}", away.join(", ")) }
    );
    let what = |hot: &HotBucket| cut(&printable(if hot.what.is_empty() { &hot.bucket } else { &hot.what }));
    let wide = |least: usize, all: &mut dyn Iterator<Item = usize>| all.max().unwrap_or(0).max(least);
    let bucket_width = wide(6, &mut hottest.iter().map(|hot| what(hot).chars().count()));
    let policy_width = wide(6, &mut hottest.iter().map(|hot| hot.policy.chars().count()));
    let _ = write!(
        out,
        "{:<bucket_width$}  {:<policy_width$}  {:>9}  {:>9}",
        "BUCKET", "POLICY", "ADMITTED", "DENIED"
    );
    for name in serving(state) {
        let _ = write!(out, "  {name:>24}");
    }
    out.push('\n');
    for hot in hottest {
        let _ = write!(
            out,
            "{:<bucket_width$}  {:<policy_width$}  {:>9}  {:>9}",
            what(hot),
            hot.policy,
            rate(hot.admitted),
            rate(hot.denied)
        );
        for name in serving(state) {
            let part = hot.regions.get(name).filter(|part| part.remaining.is_some());
            let words = part.map_or("-".into(), |part| {
                format!("{} -{} left {}", rate(part.admitted), rate(part.denied), part.remaining.unwrap_or(0))
            });
            let _ = write!(out, "  {words:>24}");
        }
        out.push('\n');
    }
    if hottest.is_empty() {
        out.push_str("no bucket has had demand within the last minute\n");
    }
    out.truncate(out.trim_end().len());
    out
}

/// Nothing passes a witness.
fn serving(state: &State) -> impl Iterator<Item = &String> {
    state.regions.iter().filter(|(_, region)| !region.witness).map(|(name, _)| name)
}

fn cut_off((name, region): (&String, &RegionView)) -> String {
    match region.age_ms {
        Some(age) => format!("{name} (last heard {} s ago)", age / 1_000),
        None => format!("{name} (never heard)"),
    }
}

fn cut(text: &str) -> String {
    if text.chars().count() <= WHAT_MAX {
        return text.to_owned();
    }
    text.chars().take(WHAT_MAX - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::state::HotRegion;

    fn state() -> State {
        let view = |reachable, age_ms| RegionView { reachable, age_ms, ..RegionView::default() };
        let part = HotRegion { admitted: 9_500, denied: 250, remaining: Some(7), ..HotRegion::default() };
        State {
            cluster: "prod".into(),
            region: "us-east".into(),
            now_ms: 3_661_000,
            regions: [("eu-west".into(), view(false, Some(12_300))), ("us-east".into(), view(true, Some(0)))]
                .into(),
            hottest: vec![HotBucket {
                policy: "tenant-requests".into(),
                what: format!("tenant=\x1b[31m{}", "x".repeat(60)),
                admitted: 9_500,
                denied: 250,
                regions: [("us-east".into(), part)].into(),
                ..HotBucket::default()
            }],
            ..State::default()
        }
    }

    #[test]
    fn a_line_a_bucket() {
        let state = state();
        let text = people(&state, &state.hottest.iter().collect::<Vec<_>>());
        let lines: Vec<&str> = text.lines().collect();
        let head = "01:01:01 UTC  prod from us-east, 2 regions; CUT OFF: eu-west (last heard 12 s ago)";
        assert_eq!(lines[0], head);
        assert_eq!(lines.len(), 3, "{text}");
        let words: Vec<&str> = lines[2].split_whitespace().skip(1).collect();
        assert_eq!(words, ["tenant-requests", "9.5/s", "0.250/s", "-", "9.5/s", "-0.250/s", "left", "7"]);
        assert!(!text.contains('\x1b') && lines[2].contains('…'), "{text}");
        assert!(people(&state, &[]).ends_with("no bucket has had demand within the last minute"));
    }

    #[test]
    fn json_is_one_line() {
        let state = state();
        let text = machine(&state, &state.hottest.iter().collect::<Vec<_>>());
        assert!(!text.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["hottest"][0]["regions"]["us-east"]["remaining"], 7);
        assert_eq!(value["regions"]["eu-west"]["reachable"], false);
    }
}
