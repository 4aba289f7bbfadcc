//! `quorate bench`: puts load on rate limit services, and says what they answered and how fast.
//!
//! **Closed loop**: each stream of each connection asks again as soon as it is answered; that finds out how much a service can
//! do. **Open loop** (`--rate`): requests fall due by the clock, whatever the service does, and their time counts from
//! then: a stall shows in every request that it delayed (no coordinated omission).

mod histogram;
mod keys;
mod load;
mod report;
mod target;

use super::client;
use anyhow::{Context as _, bail, ensure};
use clap::builder::RangedU64ValueParser;
use keys::{Distribution, KEYS_MAX, Keys};
use load::{Plan, Shared, lane};
use report::Report;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use target::{Connection, Protocol, Setup, Target};
use tokio::time::Instant;

/// The most requests in flight, all targets together.
const LANES_MAX: usize = 65_536;
const TARGETS_MAX: usize = 64;
const PIDS_MAX: usize = 64;
const SECOND: Duration = Duration::from_secs(1);

/// Put load on rate limit services and measure them: Quorate, or anything that speaks Envoy's protocol.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    quorate bench -t grpc://127.0.0.1:8081 --domain api --entries tenant={key} --keys 1000000\n  \
    quorate bench -t http://127.0.0.1:8080 --domain api --entries tenant={key} --rate 2000 --duration 30s\n\n\
    Ctrl-C ends a run early, with the report so far.")]
pub struct Args {
    /// Where to ask: grpc://HOST:PORT (Envoy's rate limit service) or http://HOST:PORT (/v1/check over HTTP/1.1); grpcs:// and https://
    /// for TLS. Several share the load evenly
    #[arg(short, long = "target", value_name = "URL", required = true)]
    pub targets: Vec<String>,
    /// The domain of the policies
    #[arg(long)]
    pub domain: String,
    /// Keys and values of each request; `{key}` becomes the number of a key
    #[arg(long, value_name = "KEY=VALUE,...", default_value = "key={key}")]
    pub entries: String,
    /// How many keys there are
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = RangedU64ValueParser::<u64>::new().range(1..=KEYS_MAX))]
    pub keys: u64,
    /// How requests are spread over keys: uniform, zipf, zipf:EXPONENT or sequential
    #[arg(long, value_name = "HOW", default_value = "uniform")]
    pub distribution: Distribution,
    /// What each request costs
    #[arg(long, value_name = "TOKENS", default_value_t = 1)]
    pub cost: u32,
    /// Requests a second, all targets together, sent whatever the answers are; without it as many as are answered
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<u32>::new().range(1..=1_000_000))]
    pub rate: Option<u32>,
    /// Connections to each target
    #[arg(short, long, value_name = "N", default_value_t = 8, value_parser = RangedU64ValueParser::<u32>::new().range(1..=4_096))]
    pub connections: u32,
    /// Requests at once on each gRPC connection (an HTTP connection has one)
    #[arg(short, long, value_name = "N", default_value_t = 16, value_parser = RangedU64ValueParser::<u32>::new().range(1..=1_024))]
    pub streams: u32,
    /// Threads that send
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = RangedU64ValueParser::<u32>::new().range(1..=64))]
    pub threads: u32,
    /// How long to measure
    #[arg(short, long, value_name = "TIME", default_value = "10s", value_parser = time)]
    pub duration: Duration,
    /// How long to send before that
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time)]
    pub warm_up: Duration,
    /// How long an answer may take
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time)]
    pub timeout: Duration,
    /// Where the random numbers begin: the same seed asks about the same keys
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// A process of this machine whose CPU time is measured along
    #[arg(long = "pid", value_name = "NAME=PID")]
    pub pids: Vec<String>,
    /// A file with a caller's token
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// A file with the authority (PEM) that the targets' certificates come from; TLS needs it
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// The arguments are wrong, or nobody answers.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let bench = Bench::new(args)?;
    let report = client::runtime()?.block_on(bench.run())?;
    if args.json {
        println!("{}", report.json());
    } else {
        print!("{report}");
    }
    let total = report.total();
    if total.decided() == 0 && total.failed() > 0 {
        bail!(
            "none of the requests was decided; is the address right, and does the service know the caller?"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// What is to be done.
struct Bench<'a> {
    args: &'a Args,
    targets: Vec<Arc<Target>>,
    setup: Arc<Setup>,
    processes: Vec<Process>,
}

impl<'a> Bench<'a> {
    fn new(args: &'a Args) -> anyhow::Result<Self> {
        ensure!(args.targets.len() <= TARGETS_MAX, "--target: at most {TARGETS_MAX}");
        ensure!(args.pids.len() <= PIDS_MAX, "--pid: at most {PIDS_MAX}");
        ensure!(
            !args.duration.is_zero() && !args.timeout.is_zero(),
            "--duration and --timeout must not be 0"
        );
        let target = |text: &String| text.parse().map(Arc::new).with_context(|| format!("--target {text}"));
        let targets = args.targets.iter().map(target).collect::<anyhow::Result<Vec<Arc<Target>>>>()?;
        let token = args.token_file.as_deref().map(|file| {
            let text = std::fs::read_to_string(file);
            let text = text.with_context(|| format!("{}: cannot be read", file.display()))?;
            let value = http::HeaderValue::try_from(format!("Bearer {}", text.trim()));
            value.with_context(|| format!("{}: no token", file.display()))
        });
        if targets.iter().any(|t| t.is_encrypted()) && args.ca.is_none() {
            bail!("--ca: name the file with the authority (PEM) that the targets' certificates come from");
        }
        let setup = Setup {
            domain: args.domain.clone(),
            entries: entries(&args.entries)?,
            cost: args.cost,
            timeout: args.timeout,
            token: token.transpose()?,
            tls: args.ca.as_deref().map(target::trusting).transpose()?.map(Arc::new),
        };
        let processes = args.pids.iter().map(|text| Process::read(text)).collect::<anyhow::Result<_>>()?;
        let bench = Self { args, targets, setup: Arc::new(setup), processes };
        let lanes: usize = bench.targets.iter().map(|t| bench.lanes_of(t).1).sum();
        ensure!(lanes <= LANES_MAX, "{lanes} requests at once; at most {LANES_MAX} are possible");
        Ok(bench)
    }

    /// Connections to a target, and requests in flight there.
    fn lanes_of(&self, target: &Target) -> (usize, usize) {
        let many = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        let streams = if target.protocol == Protocol::Grpc { many(self.args.streams) } else { 1 };
        (many(self.args.connections), many(self.args.connections).saturating_mul(streams))
    }

    async fn run(self) -> anyhow::Result<Report> {
        let tallies: Vec<Shared> = self.targets.iter().map(|_| Shared::default()).collect();
        let plan = Arc::new(Plan::new(self.args.rate, self.args.warm_up, self.args.duration));
        let threads = self.start(&plan, &tallies)?;
        let mut stop = std::pin::pin!(tokio::signal::ctrl_c());
        let mut interrupted = tokio::select! {
            () = tokio::time::sleep_until(plan.counted_from) => false,
            stopped = &mut stop => stopped.map(|()| true)?,
        };
        let before = self.cpu()?;
        if !interrupted {
            interrupted = tokio::select! {
                () = tokio::time::sleep_until(plan.end) => false,
                stopped = &mut stop => stopped.map(|()| true)?,
            };
        }
        plan.stop();
        let measured = Instant::now().min(plan.end).saturating_duration_since(plan.counted_from);
        let after = self.cpu()?;
        let ended =
            tokio::task::spawn_blocking(move || threads.into_iter().map(|t| t.join().is_ok()).collect());
        let ended: Vec<bool> = ended.await.context("the threads cannot be waited for")?;
        ensure!(ended.into_iter().all(|well| well), "a thread has died: please report this");
        let names = self.processes.iter().map(|process| process.name.clone());
        let cpu = names.zip(before.iter().zip(&after).map(|(b, a)| a.saturating_sub(*b))).collect();
        let targets = self.targets.iter().zip(&tallies);
        let targets = targets.map(|(t, tally)| (t.url.clone(), load::read(tally).clone())).collect();
        Ok(Report { rate: self.args.rate, measured, interrupted, not_sent: plan.not_sent(), targets, cpu })
    }

    /// Starts the threads: a connection's lanes are all on one.
    fn start(
        &self,
        plan: &Arc<Plan>,
        tallies: &[Shared],
    ) -> anyhow::Result<Vec<std::thread::JoinHandle<()>>> {
        let count = usize::try_from(self.args.threads).unwrap_or(1).max(1);
        let mut lanes: Vec<Vec<(Arc<Connection>, Keys, Shared)>> = (0..count).map(|_| Vec::new()).collect();
        let (next_key, mut seed) = (Arc::new(AtomicU64::new(0)), self.args.seed);
        let mut places = (0..count).cycle();
        for (target, tally) in self.targets.iter().zip(tallies) {
            let (connections, all) = self.lanes_of(target);
            for _ in 0..connections {
                let connection = Arc::new(Connection::new(Arc::clone(target), Arc::clone(&self.setup)));
                let Some(lanes) = places.next().and_then(|place| lanes.get_mut(place)) else { continue };
                for _ in 0..all / connections {
                    // Odd, so that the seeds of lanes are far apart and each is another.
                    seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15 ^ 0xffff_0000);
                    let keys = Keys::new(self.args.distribution, self.args.keys, seed, &next_key);
                    lanes.push((Arc::clone(&connection), keys, Arc::clone(tally)));
                }
            }
        }
        let mut threads = Vec::new();
        for (number, lanes) in lanes.into_iter().enumerate() {
            let (runtime, plan) = (client::runtime()?, Arc::clone(plan));
            let work = move || {
                runtime.block_on(async {
                    let each =
                        lanes.into_iter().map(|(c, keys, tally)| lane(Arc::clone(&plan), c, keys, tally));
                    each.collect::<tokio::task::JoinSet<()>>().join_all().await;
                });
            };
            threads.push(std::thread::Builder::new().name(format!("bench-{number}")).spawn(work)?);
        }
        if self.args.rate.is_some() {
            let plan = Arc::clone(plan);
            threads.push(
                std::thread::Builder::new().name("bench-clock".into()).spawn(move || plan.keep_time())?,
            );
        }
        Ok(threads)
    }

    fn cpu(&self) -> anyhow::Result<Vec<Duration>> {
        self.processes.iter().map(Process::cpu).collect()
    }
}

fn entries(text: &str) -> anyhow::Result<Vec<(String, String)>> {
    let entry = |pair: &str| match pair.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => bail!("--entries `{pair}`: want KEY=VALUE, such as tenant={{key}}"),
    };
    text.split(',').map(entry).collect()
}

/// Up to a day: `10s`, `500ms`, `2m`, `0s`.
fn time(text: &str) -> Result<Duration, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let how = "want a number and ms, s, m or h, such as 10s; at most 24h";
    let number: u32 = digits.parse().map_err(|_| how.to_owned())?;
    let unit = match unit {
        "ms" => Duration::from_millis(1),
        "s" => SECOND,
        "m" => SECOND * 60,
        "h" => SECOND * 3_600,
        _ => return Err(how.to_owned()),
    };
    unit.checked_mul(number).filter(|time| *time <= SECOND * 86_400).ok_or_else(|| how.to_owned())
}

/// A process of this machine.
struct Process {
    name: String,
    id: u32,
}

impl Process {
    fn read(text: &str) -> anyhow::Result<Self> {
        let parsed = text.split_once('=').and_then(|(name, id)| Some((name, id.parse().ok()?)));
        let Some((name, id)) = parsed else { bail!("--pid {text}: want NAME=PID, such as redis=1234") };
        let process = Self { name: name.to_owned(), id };
        process.cpu().map(|_| process)
    }

    /// CPU time that it has used so far, user and system: proc(5), fields 14 and 15 of `stat`. (The second, the name, may hold
    /// anything up to the last parenthesis.)
    fn cpu(&self) -> anyhow::Result<Duration> {
        let gone = || format!("process {} ({}) is not there, or not this machine's", self.id, self.name);
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id)).with_context(gone)?;
        let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().skip(11).take(2));
        let ticks = fields.and_then(|ticks| ticks.map(|t| t.parse::<u64>().ok()).sum::<Option<u64>>());
        let ticks = ticks.with_context(gone)?;
        Ok(Duration::from_millis(ticks * 1_000 / rustix::param::clock_ticks_per_second().max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(time("10s"), Ok(SECOND * 10));
        assert_eq!(time("500ms"), Ok(SECOND / 2));
        assert_eq!(time("24h"), Ok(SECOND * 86_400));
        assert_eq!(time("0s"), Ok(Duration::ZERO));
        for bad in ["", "10", "s", "25h", "1d", "-1s", "1.5s", "99999999999s"] {
            assert!(time(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_requests_are_about() {
        let pairs = entries("tenant={key},method=GET,empty=").unwrap();
        let pairs: Vec<_> = pairs.iter().map(|(k, v)| (&**k, &**v)).collect();
        assert_eq!(pairs, [("tenant", "{key}"), ("method", "GET"), ("empty", "")]);
        assert!(entries("tenant").is_err() && entries("=x").is_err() && entries("").is_err());
    }

    #[test]
    fn processes() {
        let me = Process::read(&format!("me={}", std::process::id())).unwrap();
        assert_eq!(me.name, "me");
        assert!(me.cpu().unwrap() < SECOND * 86_400);
        for bad in ["me", "me=", "me=x", "me=0"] {
            assert!(Process::read(bad).is_err(), "{bad}");
        }
    }
}
