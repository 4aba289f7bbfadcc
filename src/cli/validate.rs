//! `quorate validate FILE...`: every fault of region and policy files, and what each policy guarantees.

mod counted;
mod quota;

use crate::config::yaml::{self, Node, Value};
use crate::config::{Config, ConfigError, Fault, Faults, Mark, env, policies, read, region};
use crate::quota::amount::{DRIFT_PPM, MICROS_PER_TOKEN, Micros, Rate, Tokens};
use crate::quota::guarantee::counted::Counted;
use crate::quota::guarantee::{Guarantee, QuotaGuarantee, RTT_ASSUMED, Reach};
use crate::quota::policy::{OnStoreFailure, Part, Policy, RegionName, TokenBucket, Unit};
use serde_json::{Value as Json, json};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// What to check, and how to say it.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Region or policy files; which one each is, is seen from its keys
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// The regions that policies are to be worked out for [default: those of a region file, else three alike]
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    pub regions: Vec<String>,
    /// One JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// How it came out: the process' exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// Nothing is wrong: 0.
    Valid,
    /// A file is wrong: 1.
    Invalid,
    /// A file, or an argument, could not be read: 2.
    Unreadable,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        Self::from(match outcome {
            Outcome::Valid => 0,
            Outcome::Invalid => 1,
            Outcome::Unreadable => 2,
        })
    }
}

/// Runs the command: 0 if nothing is wrong, 1 if a file is, 2 if one could not be read.
#[must_use]
pub fn run(args: &Args) -> ExitCode {
    match check(args, &mut io::stdout().lock(), &mut io::stderr().lock()) {
        Ok(outcome) => outcome.into(),
        // Nobody reads on (`quorate validate … | head`): there is nobody to tell.
        Err(_) => Outcome::Unreadable.into(),
    }
}

/// Checks the files; faults go to `err`, what policies guarantee (or, with `json`, everything) to `out`.
///
/// # Errors
/// Writing failed.
pub fn check(args: &Args, out: &mut impl Write, err: &mut impl Write) -> io::Result<Outcome> {
    if let Some(name) = args.regions.iter().find(|name| !is_region_name(name)) {
        writeln!(
            err,
            "--regions: {name:?} is not a region's name; use a-z, 0-9 and `-`, as in us-east,eu-west"
        )?;
        return Ok(Outcome::Unreadable);
    }
    let texts: Vec<Source<'_>> = args.files.iter().map(|file| Source::open(file)).collect();
    let setting = Setting::of(&args.regions, &texts);
    let checked: Vec<Checked> = texts.into_iter().map(|source| source.check(&setting)).collect();
    let outcome = checked.iter().map(Checked::outcome).max().unwrap_or(Outcome::Valid);
    if args.json {
        let files: Vec<Json> = checked.iter().map(|c| c.json(&setting)).collect();
        writeln!(out, "{:#}", json!({ "valid": outcome == Outcome::Valid, "files": files }))?;
        return Ok(outcome);
    }
    for file in &checked {
        file.write(&setting, out, err)?;
    }
    Ok(outcome)
}

/// A file as it was read.
struct Source<'a> {
    file: &'a Path,
    read: Result<(String, Node), ConfigError>,
}

impl<'a> Source<'a> {
    fn open(file: &'a Path) -> Self {
        let read = read(file).and_then(|text| {
            let root = yaml::parse(file, &text).map_err(ConfigError::Invalid)?;
            Ok((text, root))
        });
        Self { file, read }
    }

    fn check(self, setting: &Setting) -> Checked {
        let file = self.file.to_owned();
        let result = self.read.and_then(|(text, root)| {
            let content = match kind_of(&root) {
                Kind::Region => {
                    region::parse(&file, &text, &env::of_process()).map(|c| Content::Region(Box::new(c)))
                }
                Kind::Policies => {
                    policies::read(&file, &root, setting.known.as_deref()).map(Content::Policies)
                }
                Kind::Neither => Err(neither(&file)),
            };
            content.map_err(ConfigError::Invalid)
        });
        Checked { file, result }
    }
}

enum Kind {
    Region,
    Policies,
    Neither,
}

/// `policies` is a list in a policy file, and a path in a region file. Of other keys the more telling ones count.
fn kind_of(root: &Node) -> Kind {
    let Value::Map(entries) = &root.value else { return Kind::Neither };
    let list = entries
        .iter()
        .any(|(k, v)| k.name == "policies" && matches!(v.value, Value::List(_) | Value::Map(_)));
    let of_region =
        |(key, _): &&(yaml::Key, Node)| key.name != "policies" && region::KEYS.contains(&key.name.as_str());
    let only_policies = entries.iter().all(|(k, _)| k.name == "policies");
    match entries.iter().filter(of_region).count() {
        0 if list || only_policies && !entries.is_empty() => Kind::Policies,
        0 => Kind::Neither,
        _ => Kind::Region,
    }
}

fn neither(file: &Path) -> Faults {
    let mut faults = Faults::new(file);
    let what = "this is neither a region file (`region`, `cluster`, …) nor a policy file (`policies`)";
    faults.push(
        &Mark::START,
        what,
        "check its top-level keys against config/region.yaml or config/policies.yaml",
    );
    faults
}

fn is_region_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
}

/// The cluster that policies are worked out for.
struct Setting {
    /// The regions, where they are known.
    known: Option<Vec<RegionName>>,
    /// The same, or three made-up ones.
    regions: Vec<RegionName>,
    rtt: Micros,
}

impl Setting {
    fn of(named: &[String], sources: &[Source<'_>]) -> Self {
        let region_file = sources.iter().find_map(|source| {
            let (text, root) = source.read.as_ref().ok()?;
            matches!(kind_of(root), Kind::Region).then_some((source.file, text, root))
        });
        let known = if named.is_empty() {
            region_file.map(|(_, _, root)| region::region_names(root)).filter(|names| !names.is_empty())
        } else {
            Some(named.iter().map(|name| Arc::from(name.as_str())).collect())
        };
        let config =
            region_file.and_then(|(file, text, _)| region::parse(file, text, &env::of_process()).ok());
        let rtt = config.map_or(RTT_ASSUMED, |config| Micros::from_duration(config.cluster.rtt_max));
        let made_up = || (1..=3).map(|n| format!("region-{n}").into()).collect();
        Self { regions: known.clone().unwrap_or_else(made_up), known, rtt }
    }

    /// The regions of a policy: where none are known, those that its weights name.
    fn regions_of(&self, policy: &Policy) -> Vec<RegionName> {
        if self.known.is_none() && !policy.weights.is_empty() {
            return policy.weights.keys().cloned().collect();
        }
        self.regions.clone()
    }

    /// Says so where nobody has said how many regions there are.
    fn supposed(&self, policy: &Policy, regions: usize) -> String {
        if self.known.is_none() && policy.weights.is_empty() {
            format!(" (for {regions} regions alike; name yours with --regions or a region file)")
        } else {
            String::new()
        }
    }
}

enum Content {
    Region(Box<Config>),
    Policies(Vec<Policy>),
}

/// A file and what became of it.
struct Checked {
    file: PathBuf,
    result: Result<Content, ConfigError>,
}

impl Checked {
    fn outcome(&self) -> Outcome {
        match &self.result {
            Ok(_) => Outcome::Valid,
            Err(ConfigError::Invalid(_)) => Outcome::Invalid,
            Err(ConfigError::Unreadable { .. }) => Outcome::Unreadable,
        }
    }

    fn write(&self, setting: &Setting, out: &mut impl Write, err: &mut impl Write) -> io::Result<()> {
        let file = self.file.display();
        match &self.result {
            Err(error) => writeln!(err, "{error}"),
            Ok(Content::Region(config)) => {
                let witness = |name: &RegionName| match config.cluster.witnesses.contains(name) {
                    true => format!("{name}, a witness"),
                    false => name.to_string(),
                };
                let names: Vec<String> = config.cluster.names().iter().map(witness).collect();
                writeln!(
                    out,
                    "{file}: region `{}` of cluster `{}` ({}): valid",
                    config.region,
                    config.cluster.name,
                    names.join(", ")
                )
            }
            Ok(Content::Policies(policies)) => {
                writeln!(out, "{file}: {} policies: valid", policies.len())?;
                policies.iter().try_for_each(|policy| write!(out, "\n{}", described(policy, setting)))
            }
        }
    }

    fn json(&self, setting: &Setting) -> Json {
        let file = self.file.display().to_string();
        match &self.result {
            Err(ConfigError::Unreadable { error, .. }) => {
                json!({ "file": file, "valid": false, "unreadable": error.to_string() })
            }
            Err(ConfigError::Invalid(faults)) => {
                json!({ "file": file, "valid": false, "faults": faults.iter().map(fault_json).collect::<Vec<_>>() })
            }
            Ok(Content::Region(config)) => {
                let regions: Vec<_> = config.cluster.serving().iter().map(ToString::to_string).collect();
                json!({ "file": file, "valid": true, "region": &*config.region, "cluster": &*config.cluster.name, "regions": regions })
            }
            Ok(Content::Policies(policies)) => {
                let policies: Vec<Json> = policies.iter().map(|p| policy_json(p, setting)).collect();
                json!({ "file": file, "valid": true, "policies": policies })
            }
        }
    }
}

fn fault_json(fault: &Fault) -> Json {
    let Fault { mark, what, mend } = fault;
    match mark {
        Mark::At { line, column } => json!({ "line": line, "column": column, "what": what, "mend": mend }),
        Mark::Env(name) => json!({ "variable": &**name, "what": what, "mend": mend }),
    }
}

fn policy_json(policy: &Policy, setting: &Setting) -> Json {
    let regions = setting.regions_of(policy);
    if let Some(guarantee) = Counted::of(policy, &regions) {
        return counted::policy_json(policy, &guarantee);
    }
    if let Some(guarantee) = QuotaGuarantee::of(policy, &regions) {
        return quota::to_json(policy, &guarantee);
    }
    let Some(guarantee) = Guarantee::of(policy, &regions, setting.rtt) else {
        return json!({ "name": &*policy.name, "domain": &*policy.domain, "unlimited": true });
    };
    let parts: Vec<Json> = guarantee
        .parts
        .iter()
        .map(|(region, part)| {
            json!({
                "region": &**region,
                "rate_micro_per_s": part.rate.discount(DRIFT_PPM).0,
                "burst_micro": part.burst.0,
                "overdraft_micro": part.overdraft.0,
            })
        })
        .collect();
    let pool = guarantee.pool.map(|reach| {
        json!({
            "rate_micro_per_s": reach.rate.0,
            "burst_micro": reach.burst.0,
            "lease_us": reach.lease.0,
            "move_time_us": reach.move_time.0,
            "alone_max_micro_per_s": reach.alone_max.0,
            "moving_max_micro_per_s": reach.moving_max.0,
            "burst_needed_micro": reach.burst_needed.0,
        })
    });
    json!({
        "name": &*policy.name,
        "domain": &*policy.domain,
        "mode": policy.mode.name(),
        "bound": {
            "burst_micro": guarantee.burst.0,
            "overshoot_micro": guarantee.overshoot.0,
            "rate_micro_per_s": guarantee.rate.0,
            "rounding_ppm": guarantee.rounding_ppm(),
            "holds_without_store": holds_without_store(policy),
        },
        "in_a_partition": parts,
        "pool": pool,
    })
}

/// Does the bound hold while a region's store does not answer?
fn holds_without_store(policy: &Policy) -> bool {
    policy.on_store_failure == OnStoreFailure::Deny && !policy.shadow
}

/// What a policy guarantees, for people.
fn described(policy: &Policy, setting: &Setting) -> String {
    let mut text = String::new();
    let regions = setting.regions_of(policy);
    if let Some(guarantee) = Counted::of(policy, &regions) {
        let _ = counted::describe(&mut text, policy, &guarantee, setting);
        return text;
    }
    if let Some(guarantee) = QuotaGuarantee::of(policy, &regions) {
        let _ = quota::describe(&mut text, policy, &guarantee, setting);
        return text;
    }
    match Guarantee::of(policy, &regions, setting.rtt) {
        None => {
            let _ = writeln!(text, "{} (unlimited): matches and never denies", policy.name);
        }
        Some(guarantee) => {
            let _ = describe(&mut text, policy, &guarantee, setting);
        }
    }
    text
}

fn describe(
    text: &mut String,
    policy: &Policy,
    guarantee: &Guarantee,
    setting: &Setting,
) -> std::fmt::Result {
    let Guarantee { limit, rate, burst, overshoot, parts, pool } = guarantee;
    let mode = policy.mode.name();
    writeln!(text, "{} ({mode}): {}, burst {}", policy.name, written_rate(limit), limit.burst)?;
    let above = if overshoot.is_positive() { format!(" + {}", exact(overshoot.0)) } else { String::new() };
    writeln!(
        text,
        "  in any window of T seconds all regions together admit at most {}{above} + {}·T{}",
        exact(burst.0),
        exact(rate.0),
        if overshoot.is_positive() { " (burst + overshoot + rate·T)" } else { " (burst + rate·T)" },
    )?;
    if guarantee.rounding_ppm() > 1_000 {
        let lost = number(guarantee.rounding_ppm().saturating_mul(100));
        writeln!(
            text,
            "  the rate is enforced in millionths of a token a second: {} of it, {lost}% less than written",
            per_second(*rate)
        )?;
    }
    let supposed = setting.supposed(policy, parts.len());
    writeln!(text, "  in a partition each region keeps, less 1% for clocks{supposed}:")?;
    for (region, part) in parts {
        writeln!(text, "    {region}: {}", kept(part))?;
    }
    if let Some(reach) = pool {
        describe_pool(text, guarantee, reach)?;
    }
    without_store(text, policy)
}

/// What becomes of the promise while a region's Redis does not answer, or if the policy only counts.
fn without_store(text: &mut String, policy: &Policy) -> std::fmt::Result {
    let local = "  while a region's Redis does not answer a bucket in memory, empty at first, takes over; what it admits is \
                 taken out of Redis' bucket afterwards (unless the daemon ends before)";
    describe_failure(text, policy, local)
}

/// The same; `local` says it for what takes over.
fn describe_failure(text: &mut String, policy: &Policy, local: &str) -> std::fmt::Result {
    match policy.on_store_failure {
        OnStoreFailure::Deny => {}
        OnStoreFailure::Allow => writeln!(
            text,
            "  while a region's Redis does not answer its requests pass uncounted: the bound does not hold then"
        )?,
        OnStoreFailure::Local => writeln!(text, "{local}")?,
    }
    if policy.shadow {
        writeln!(text, "  shadow: it is counted and reported, and nothing is denied")?;
    }
    Ok(())
}

fn describe_pool(text: &mut String, guarantee: &Guarantee, reach: &Reach) -> std::fmt::Result {
    let lease = reach.lease.ceil_seconds();
    writeln!(text, "    and what is left of its lease, for at most {lease} s")?;
    writeln!(
        text,
        "  the pool lends the rest: {}, burst {}; one region alone can have {}",
        per_second(reach.rate),
        tokens(reach.burst),
        per_second(reach.alone_max),
    )?;
    let move_ms = reach.move_time.ceil_millis();
    writeln!(
        text,
        "  demand that moves between regions is carried up to {} (tokens take {move_ms} ms to move: a round trip and the gap between asks)",
        per_second(reach.moving_max),
    )?;
    if reach.is_short_of_burst(guarantee) {
        writeln!(
            text,
            "  that is less than the rate: a burst of {} or more, a larger reserve, or demand that stays where it is carries more",
            reach.burst_needed.up_to_whole().floor(),
        )?;
    }
    Ok(())
}

fn kept(part: &Part) -> String {
    let mut text = format!("{}, burst {}", per_second(part.rate.discount(DRIFT_PPM)), tokens(part.burst));
    if part.overdraft.is_positive() {
        let _ = write!(text, ", and {} above the limit", tokens(part.overdraft));
    }
    if *part == Part::default() {
        text = "nothing".to_owned();
    }
    text
}

fn written_rate(limit: &TokenBucket) -> String {
    let unit = match limit.per {
        Unit::Second => "s",
        Unit::Minute => "m",
        Unit::Hour => "h",
        Unit::Day => "d",
        Unit::Week => "week",
        Unit::Month => "month",
        Unit::Year => "year",
    };
    format!("{}/{unit}", limit.amount)
}

fn per_second(rate: Rate) -> String {
    format!("{}/s", number(rate.0))
}

fn tokens(tokens: Tokens) -> String {
    number(tokens.0)
}

/// Millionths as a decimal number, rounded to three decimals; below one, to three that count.
fn number(millionths: i64) -> String {
    let unit = match millionths.unsigned_abs() {
        100_000.. => 1_000,
        10_000.. => 100,
        1_000.. => 10,
        _ => 1,
    };
    exact(millionths.saturating_add(unit / 2) / unit * unit)
}

/// Millionths as a decimal number.
fn exact(millionths: i64) -> String {
    let (whole, rest) = (millionths / MICROS_PER_TOKEN, (millionths % MICROS_PER_TOKEN).unsigned_abs());
    match format!("{rest:06}").trim_end_matches('0') {
        "" => whole.to_string(),
        decimals => format!("{whole}.{decimals}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_never_nothing() {
        assert_eq!(number(5_000_000), "5");
        assert_eq!(number(3_333_333), "3.333");
        assert_eq!(number(43_999_999), "44");
        assert_eq!(number(65_999), "0.066");
        assert_eq!(number(12_345), "0.0123");
        assert_eq!(number(11), "0.000011");
        assert_eq!(number(0), "0");
        assert_eq!(exact(3_333_333), "3.333333");
        assert_eq!(exact(1_000_000), "1");
    }
}
