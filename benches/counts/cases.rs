//! What is counted: the fast loop by itself, and the whole way from a caller's bytes and back, over both stores.

use crate::support::redis::Redis;
use crate::wire::{Grpc, Http, http_request, message};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use quorate::config::policies;
use quorate::limiter::active::{Active, ActivePolicy};
use quorate::limiter::newcomers::NewBuckets;
use quorate::limiter::{Core, Decide as _, Limiter};
use quorate::quota::amount::{Micros, Tokens};
use quorate::quota::matching::{Descriptor, Request, Subject};
use quorate::quota::policy::RegionName;
use quorate::server::{self, Listeners, Options, Server, listen};
use quorate::store::memory::MemoryStore;
use quorate::store::redis::{RedisConfig, RedisStore};
use quorate::store::{AnyStore, RegionStore as _};
use quorate::telemetry::Metrics;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Buckets that requests take turns at.
const TENANTS: usize = 500;
/// Requests at once where there are many.
const AT_ONCE: usize = 16;
/// The policies that the cases need, and many that they have nothing to do with.
const POLICIES: &str = r#"
policies:
  - { name: tenants, domain: api, match: [ { key: tenant } ], limit: { rate: 1000000/s, burst: 4000000000 }, mode: split }
  - { name: users, domain: api, match: [ { key: tenant }, { key: user } ], limit: { rate: 1000000/s, burst: 4000000000 }, mode: split }
  - { name: paths, domain: api, match: [ { key: path, value: "/v1/*" } ], limit: { rate: 1000000/s, burst: 4000000000 }, mode: split }
  - { name: none, domain: none, match: [ { key: tenant } ], limit: { rate: 1/day, burst: 1 }, mode: split }
"#;
const OTHERS: usize = 20;

/// One line of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// A descriptor becomes a verdict: match, take (memory), judge.
    Limiter,
    /// The same, denied.
    LimiterDenied,
    /// Attributes that three policies match.
    LimiterThree,
    /// Envoy's service, from the caller's bytes to the answer's, in memory.
    GrpcMemory,
    /// The same, denied.
    GrpcDenied,
    /// `POST /v1/check`, in memory.
    HttpMemory,
    /// Envoy's service with a Redis, one request at a time ...
    GrpcRedis,
    /// ... and sixteen.
    GrpcRedisBatch,
}

impl Case {
    pub const ALL: [Self; 8] = [
        Self::Limiter,
        Self::LimiterDenied,
        Self::LimiterThree,
        Self::GrpcMemory,
        Self::GrpcDenied,
        Self::HttpMemory,
        Self::GrpcRedis,
        Self::GrpcRedisBatch,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Limiter => "limiter",
            Self::LimiterDenied => "limiter_denied",
            Self::LimiterThree => "limiter_three",
            Self::GrpcMemory => "grpc_memory",
            Self::GrpcDenied => "grpc_denied",
            Self::HttpMemory => "http_memory",
            Self::GrpcRedis => "grpc_redis",
            Self::GrpcRedisBatch => "grpc_redis_batch",
        }
    }

    pub fn has_redis(self) -> bool {
        matches!(self, Self::GrpcRedis | Self::GrpcRedisBatch)
    }
}

/// Decides so many times.
pub fn run(case: Case, decisions: u32) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let redis = if case.has_redis() { Some(Redis::start().await) } else { None };
        let (core, store) = region(redis.as_ref()).await;
        let decisions = usize::try_from(decisions).expect("a number of times");
        match case {
            Case::Limiter => descriptors(&Limiter::new(store, core), "api", decisions, true).await,
            Case::LimiterDenied => descriptors(&Limiter::new(store, core), "none", decisions, false).await,
            Case::LimiterThree => attributes(&Limiter::new(store, core), decisions).await,
            Case::GrpcMemory
            | Case::GrpcDenied
            | Case::HttpMemory
            | Case::GrpcRedis
            | Case::GrpcRedisBatch => {
                let server = serve(core, store).await;
                let (http, grpc) = (server.http(), server.grpc());
                let client = tokio::task::spawn_blocking(move || match case {
                    Case::HttpMemory => ask_http(http, decisions),
                    Case::GrpcDenied => ask_denied(grpc, decisions),
                    Case::GrpcRedisBatch => ask_grpc(grpc, decisions, AT_ONCE),
                    _ => ask_grpc(grpc, decisions, 1),
                });
                client.await.expect("the client does not panic");
                server.drain().await;
            }
        }
    });
}

/// A region that has all of the limits to itself.
async fn region(redis: Option<&Redis>) -> (Arc<Core>, AnyStore) {
    let store = match redis {
        None => AnyStore::Memory(memory()),
        Some(redis) => AnyStore::Redis(connect(redis)),
    };
    let mut sessions = store.session();
    let attached = sessions.wait_for(|state| state.session().is_some()).await.expect("the store is there");
    let session = attached.session().expect("it is attached");
    drop(attached);
    store.mark_full(session).await.expect("the store is new");
    let metrics = Arc::new(Metrics::new("here"));
    let mut text = POLICIES.to_owned();
    for n in 0..OTHERS {
        text.push_str(&format!(
            "  - {{ name: other-{n}, domain: api, match: [ {{ key: plan, value: p{n} }}, {{ key: tenant }} ], limit: {{ rate: 10/s, burst: 20 }}, mode: split }}\n"
        ));
    }
    let policies = policies::parse(Path::new("counts"), &text, None).expect("good policies");
    let regions: [RegionName; 1] = ["here".into()];
    let active = policies.into_iter().zip(1..).map(|(policy, id)| {
        let cut = policy.cut(&regions);
        let part = cut.as_ref().map_or_else(Default::default, |cut| cut.parts[0]);
        ActivePolicy::new(id, Arc::new(policy), cut.as_ref(), part, None, &metrics)
    });
    let active = Active::new(1, active.collect(), true, &metrics);
    let core = Core::new(active, metrics, memory(), Box::new(|_, _| None));
    // What one second allows is more than all of them.
    let core = core.with_new_buckets(NewBuckets { per_second: 1_000_000, ..NewBuckets::default() });
    (Arc::new(core), store)
}

fn memory() -> MemoryStore {
    MemoryStore::monotonic(Micros::seconds(1_700_000_000))
}

fn connect(redis: &Redis) -> RedisStore {
    let (cluster, region) = ("counts".to_owned(), "here".to_owned());
    // Under valgrind everything takes fifty times as long.
    let config =
        RedisConfig { url: redis.url(), timeout: Duration::from_secs(10), cluster, region, tls: None };
    RedisStore::connect(&config).expect("a good address")
}

async fn serve(core: Arc<Core>, store: AnyStore) -> Server {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let bind = || listen::bind(any).expect("a free port");
    let listeners = Listeners { http: bind(), grpc: bind() };
    let (_, ready) = watch::channel(true);
    let options = Options { workers: 1, ..Options::default() };
    let metrics = Arc::clone(&core.metrics);
    let build = move |_| Limiter::new(store.worker(), Arc::clone(&core));
    server::start(listeners, options, metrics, ready, build).await.expect("it starts")
}

fn tenants() -> Vec<String> {
    (0..TENANTS).map(|n| format!("tenant-{n:06}")).collect()
}

async fn descriptors(limiter: &Limiter<AnyStore>, domain: &str, decisions: usize, allowed: bool) {
    let tenants = tenants();
    for n in 0..decisions {
        // A limit that denies has one bucket, so that all requests but the first are denied.
        let tenant = if allowed { &tenants[n % TENANTS] } else { &tenants[0] };
        let entries = [("tenant", tenant.as_str())];
        let descriptors = [Descriptor { entries: &entries, cost: None, limit: None }];
        let request = Request { domain, subject: Subject::Descriptors(&descriptors), cost: Tokens::whole(1) };
        let verdict = limiter.check(&request, None).await.expect("a good request");
        assert_eq!(verdict.allowed, allowed || n == 0);
        assert!(std::hint::black_box(verdict.fields()).is_some());
    }
}

async fn attributes(limiter: &Limiter<AnyStore>, decisions: usize) {
    let tenants = tenants();
    for tenant in tenants.iter().cycle().take(decisions) {
        let attributes =
            [("method", "GET"), ("path", "/v1/things"), ("plan", "gold"), ("tenant", tenant), ("user", "u1")];
        let request =
            Request { domain: "api", subject: Subject::Attributes(&attributes), cost: Tokens::whole(1) };
        let verdict = limiter.check(&request, None).await.expect("a good request");
        assert!(verdict.allowed && verdict.limits.len() == 3);
        assert!(std::hint::black_box(verdict.fields()).is_some());
    }
}

fn ask_grpc(address: SocketAddr, decisions: usize, at_once: usize) {
    let ask = |tenant: &String| message("api", &[&[("tenant", tenant)]]);
    let messages: Vec<Vec<u8>> = tenants().iter().map(ask).collect();
    let mut client = Grpc::connect(address);
    let mut next = messages.iter().map(Vec::as_slice).cycle();
    for _ in 0..decisions / at_once {
        client.ask(next.by_ref().take(at_once), Code::Ok);
    }
}

fn ask_denied(address: SocketAddr, decisions: usize) {
    let message = message("none", &[&[("tenant", "tenant-000000")]]);
    let mut client = Grpc::connect(address);
    client.ask([&message[..]], Code::Ok);
    (0..decisions).for_each(|_| client.ask([&message[..]], Code::OverLimit));
}

fn ask_http(address: SocketAddr, decisions: usize) {
    let body = |tenant: &String| {
        format!(r#"{{"domain":"api","attributes":{{"tenant":"{tenant}","method":"GET"}}}}"#)
    };
    let requests: Vec<Vec<u8>> = tenants().iter().map(|tenant| http_request(&body(tenant))).collect();
    let mut client = Http::connect(address);
    for request in requests.iter().cycle().take(decisions) {
        client.ask(request, "200");
    }
}
