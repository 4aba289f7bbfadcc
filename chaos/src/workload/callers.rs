//! Callers: at a steady rate whether they are answered or not, or one request after the other.

use super::recorder::{Recorder, Reply};
use crate::cluster::scenario::{Load, Over, Pace};
use crate::oracle::Outcome;
use anyhow::Context as _;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use quorate::quota::amount::Tokens;
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

/// A client waits so long for an answer.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(3);
/// The most requests under way of one load in one region. (A frozen region must not fill the memory; what would be beyond is not sent.)
const IN_FLIGHT_MAX: usize = 500;
/// How long a caller waits after a denial before it asks again.
const AFTER_DENIAL: Duration = Duration::from_millis(40);
/// The reasons of the contract.
const REASONS: [&str; 5] = ["ok", "over_limit", "no_lease", "store_unavailable", "shadow"];

/// Where a region is asked.
#[derive(Clone, Debug)]
pub struct Target {
    /// `http://...` of its HTTP listener.
    pub http: String,
    /// `http://...` of its gRPC listener, if that is used.
    pub grpc: Option<String>,
}

/// Requests for all loads in all regions.
#[derive(Debug)]
pub struct Workload {
    /// What is asked; the limit of each, by number.
    pub loads: Vec<(Load, usize)>,
    /// Where, by region.
    pub targets: Vec<Target>,
    /// Pacing varies with it.
    pub seed: u64,
}

impl Workload {
    /// Sends everything, from `began` until each load's end.
    ///
    /// # Errors
    /// A client cannot be made.
    pub async fn run(self, recorder: Arc<Recorder>, began: Instant) -> anyhow::Result<()> {
        let mut tasks = JoinSet::new();
        let mut number = self.seed;
        for (load, limit) in &self.loads {
            for (region, target) in self.targets.iter().enumerate() {
                number = number.wrapping_add(1);
                let pace = load.pace.get(region).copied().unwrap_or(Pace::Open(0));
                if pace.is_nothing() {
                    continue;
                }
                let caller =
                    Caller::new(load, target, Seat { region, limit: *limit }, Arc::clone(&recorder))?;
                let random = ChaCha8Rng::seed_from_u64(number);
                tasks.spawn(ask(caller, pace, random, began + load.from, began + load.to));
            }
        }
        while let Some(done) = tasks.join_next().await {
            done.context("a caller panicked")?;
        }
        Ok(())
    }
}

async fn ask(caller: Caller, pace: Pace, random: ChaCha8Rng, from: Instant, to: Instant) {
    tokio::time::sleep_until(from).await;
    match pace {
        Pace::Open(rate) => open(caller, rate, random, to).await,
        Pace::Closed(callers) => closed(caller, callers, random, to).await,
    }
}

/// An open loop: gaps vary by half, so that regions do not march in step.
async fn open(caller: Caller, rate: u32, mut random: ChaCha8Rng, to: Instant) {
    let gap = Duration::from_secs(1).div_f64(f64::from(rate.max(1)));
    let room = Arc::new(Semaphore::new(IN_FLIGHT_MAX));
    let mut flying = JoinSet::new();
    let mut due = Instant::now() + gap.mul_f64(random.random::<f64>());
    while due < to {
        tokio::time::sleep_until(due).await;
        due += gap.mul_f64(0.5 + random.random::<f64>());
        while flying.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else { continue };
        let mut caller = caller.clone();
        caller.turn = random.random();
        flying.spawn(async move {
            caller.send().await;
            drop(permit);
        });
    }
    while flying.join_next().await.is_some() {}
}

async fn closed(caller: Caller, callers: u32, mut random: ChaCha8Rng, to: Instant) {
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let (mut caller, mut random) = (caller.clone(), ChaCha8Rng::seed_from_u64(random.random()));
        tasks.spawn(async move {
            while Instant::now() < to {
                caller.turn = random.random();
                if caller.send().await != Outcome::Allowed {
                    tokio::time::sleep(AFTER_DENIAL.mul_f64(0.5 + random.random::<f64>())).await;
                }
            }
        });
    }
    while tasks.join_next().await.is_some() {}
}

/// For whom a caller asks.
#[derive(Clone, Copy, Debug)]
struct Seat {
    region: usize,
    limit: usize,
}

/// Asks one region for one bucket. Clones share connections.
#[derive(Clone)]
struct Caller {
    seat: Seat,
    cost: Tokens,
    over: Over,
    turn: bool,
    url: String,
    body: String,
    http: reqwest::Client,
    grpc: Option<RateLimitServiceClient<Channel>>,
    request: Arc<RateLimitRequest>,
    recorder: Arc<Recorder>,
}

impl Caller {
    fn new(load: &Load, target: &Target, seat: Seat, recorder: Arc<Recorder>) -> anyhow::Result<Self> {
        let entries: Vec<Value> = load.bucket.iter().map(|(k, v)| json!({ "key": k, "value": v })).collect();
        let body = json!({ "domain": load.domain, "descriptors": [entries], "cost": load.cost });
        let entry = |(key, value): &(String, String)| Entry { key: key.clone(), value: value.clone() };
        let entries = load.bucket.iter().map(entry).collect();
        let request = RateLimitRequest {
            domain: load.domain.clone(),
            descriptors: vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }],
            hits_addend: load.cost,
        };
        let grpc = match &target.grpc {
            Some(url) if load.over != Over::Http => {
                let channel =
                    Endpoint::from_shared(url.clone())?.timeout(ANSWER_WITHIN).connect_timeout(ANSWER_WITHIN);
                Some(RateLimitServiceClient::new(channel.connect_lazy()))
            }
            _ => None,
        };
        Ok(Self {
            seat,
            cost: Tokens::whole(i64::from(load.cost)),
            over: load.over,
            turn: false,
            url: format!("{}/v1/check", target.http),
            body: body.to_string(),
            http: client(ANSWER_WITHIN)?,
            grpc,
            request: Arc::new(request),
            recorder,
        })
    }

    async fn send(&mut self) -> Outcome {
        let sent = self.recorder.now();
        let reply = match (self.over, &mut self.grpc) {
            (Over::Grpc, Some(grpc)) => over_grpc(grpc, &self.request).await,
            (Over::Both, Some(grpc)) if self.turn => over_grpc(grpc, &self.request).await,
            _ => self.over_http().await,
        };
        self.recorder.note(self.seat.region, self.seat.limit, self.cost, sent, reply);
        reply.outcome
    }

    async fn over_http(&self) -> Reply {
        let whole = async {
            let response = self
                .http
                .post(&self.url)
                .header("content-type", "application/json")
                .body(self.body.clone())
                .send()
                .await?;
            Ok((response.status().as_u16(), response.text().await?))
        };
        let answer: Result<(u16, String), reqwest::Error> = whole.await;
        match answer {
            Ok((status, text)) => {
                let outcome = match status {
                    200 => Outcome::Allowed,
                    429 => Outcome::Denied,
                    503 => Outcome::Unavailable,
                    _ => return Reply { outcome: Outcome::Unknown, reason: "unexpected status" },
                };
                let named = |reason: &&&str| text.contains(&format!("\"reason\":\"{reason}\""));
                Reply { outcome, reason: REASONS.iter().find(named).copied().unwrap_or("none") }
            }
            Err(error) => Reply { outcome: Outcome::Unknown, reason: why(&error) },
        }
    }
}

async fn over_grpc(client: &mut RateLimitServiceClient<Channel>, request: &RateLimitRequest) -> Reply {
    match client.should_rate_limit(request.clone()).await {
        Ok(answer) if answer.get_ref().overall_code() == Code::Ok => {
            Reply { outcome: Outcome::Allowed, reason: "ok" }
        }
        // (Over gRPC a store that does not answer is OVER_LIMIT, too.)
        Ok(_) => Reply { outcome: Outcome::Denied, reason: "over_limit" },
        Err(status) if status.code() == tonic::Code::Cancelled => {
            Reply { outcome: Outcome::Unknown, reason: "timeout" }
        }
        Err(_) => Reply { outcome: Outcome::Unknown, reason: "broken connection" },
    }
}

fn why(error: &reqwest::Error) -> &'static str {
    match () {
        () if error.is_timeout() => "timeout",
        () if error.is_connect() => "no connection",
        () => "broken connection",
    }
}

/// A client over HTTP/1.1 that keeps its connections.
///
/// # Errors
/// It cannot be made.
pub fn client(answer_within: Duration) -> anyhow::Result<reqwest::Client> {
    // Needed by the client library even where no request uses TLS; it is an error only to install it twice.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let nobody = rustls::ClientConfig::builder()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let builder = reqwest::Client::builder().no_proxy().http1_only().tls_backend_preconfigured(nobody);
    Ok(builder.pool_max_idle_per_host(IN_FLIGHT_MAX).timeout(answer_within).build()?)
}
