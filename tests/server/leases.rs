//! Permits over HTTP, and limits that count, in front of the product's limiter over a store in memory whose clock tests move.

use crate::limiter::policy;
use crate::{Answer, PATIENCE, client};
use quorate::limiter::active::{Active, ActivePolicy};
use quorate::limiter::{Core, Limiter};
use quorate::quota::amount::{Micros, Tokens};
use quorate::quota::policy::{
    Algorithm, BucketId, Concurrent, Limit, OnStoreFailure, Policy, Quota, RegionName, Unit, Window,
};
use quorate::server::{self, Listeners, Options, Server, listen};
use quorate::store::memory::MemoryStore;
use quorate::store::{Install, Prepare, Prepared, Store, StoreError, Take, Taken};
use quorate::telemetry::Metrics;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use tokio::sync::watch;

/// A store that tests take away, and whose time they move.
#[derive(Clone)]
struct Shelf {
    memory: MemoryStore,
    down: Arc<AtomicBool>,
}

impl Shelf {
    fn up(&self) -> Result<&MemoryStore, StoreError> {
        if self.down.load(Ordering::SeqCst) { Err(StoreError::Unavailable) } else { Ok(&self.memory) }
    }
}

impl Store for Shelf {
    async fn take(&self, take: Take) -> Result<Taken, StoreError> {
        self.up()?.take(take).await
    }

    async fn known(&self, buckets: Vec<BucketId>) -> Result<(u64, Vec<bool>), StoreError> {
        self.up()?.known(buckets).await
    }

    async fn prepare(&self, asks: Vec<Prepare>) -> Result<(Micros, Vec<Prepared>), StoreError> {
        self.up()?.prepare(asks).await
    }

    async fn install(&self, records: Vec<Install>) -> Result<Vec<Tokens>, StoreError> {
        self.up()?.install(records).await
    }
}

struct Region {
    server: Server,
    client: reqwest::Client,
    now: Arc<AtomicI64>,
    down: Arc<AtomicBool>,
}

impl Region {
    /// One that has all of these policies' limits to itself.
    async fn new(policies: Vec<Policy>) -> Self {
        Self::named("here", policies).await
    }

    async fn named(name: &str, policies: Vec<Policy>) -> Self {
        let now = Arc::new(AtomicI64::new(Micros::seconds(1_700_000_000).0));
        let clock = Arc::clone(&now);
        let local = Arc::clone(&now);
        let memory = MemoryStore::new(move || Micros(clock.load(Ordering::SeqCst)));
        let session = memory.session().borrow().session().unwrap();
        memory.mark_full(session).unwrap();
        let down = Arc::new(AtomicBool::new(false));
        let shelf = Shelf { memory, down: Arc::clone(&down) };
        let metrics = Arc::new(Metrics::new("test"));
        let regions: Vec<RegionName> = vec![name.into()];
        let active = policies.into_iter().zip(0..).map(|(policy, id)| {
            let cut = policy.cut(&regions);
            let part = cut.as_ref().map_or_else(Default::default, |cut| cut.parts[0]);
            ActivePolicy::new(id, Arc::new(policy), cut.as_ref(), part, None, &metrics)
        });
        let active = Active::new(1, active.collect(), true, &metrics);
        let local = MemoryStore::new(move || Micros(local.load(Ordering::SeqCst)));
        let core = Core::new(active, Arc::clone(&metrics), local, Box::new(|_, _| None)).of(name.into());
        let core = Arc::new(core);
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listeners = Listeners { http: listen::bind(any).unwrap(), grpc: listen::bind(any).unwrap() };
        let (_, ready) = watch::channel(true);
        let options = Options { workers: 2, ..Options::default() };
        let build = move |_| Limiter::new(shelf.clone(), Arc::clone(&core));
        let server = server::start(listeners, options, metrics, ready, build).await.unwrap();
        Self { server, client: client(), now, down }
    }

    fn pass(&self, time: Micros) {
        self.now.fetch_add(time.0, Ordering::SeqCst);
    }

    fn store_is_down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    async fn post(&self, path: &str, body: &Value) -> Answer {
        let url = format!("http://{}/v1/{path}", self.server.http());
        let request = self.client.post(url).body(body.to_string()).timeout(PATIENCE);
        Answer::of(request.send().await.unwrap()).await
    }

    async fn check(&self, cost: i64) -> Answer {
        self.post("check", &asked(cost)).await
    }

    async fn acquire(&self, cost: i64) -> Result<String, Answer> {
        let answer = self.post("acquire", &asked(cost)).await;
        match answer.body["lease"].as_str().map(str::to_owned) {
            Some(lease) => {
                assert_eq!(answer.status, 200);
                Ok(lease)
            }
            None => Err(answer),
        }
    }

    /// Status of a renewal, and how long the lease lasts.
    async fn renew(&self, lease: &str) -> (u16, Option<i64>) {
        let answer = self.post("renew", &json!({ "lease": lease })).await;
        (answer.status, answer.body["expires_ms"].as_i64())
    }

    async fn release(&self, lease: &str) -> u16 {
        self.post("release", &json!({ "lease": lease })).await.status
    }
}

fn asked(cost: i64) -> Value {
    json!({"domain": "api", "attributes": {"tenant": "7", "op": "export"}, "cost": cost})
}

fn permits(name: &str, permits: u64, ttl_s: i64) -> Policy {
    let limit = Limit::Concurrent(Concurrent { permits, ttl: Micros::seconds(ttl_s) });
    Policy { limit, ..policy(name, &["tenant", "op"], 1, Unit::Second, 1) }
}

fn quota(name: &str, quota: u64, seconds: u32, algorithm: Algorithm) -> Policy {
    let limit = Limit::Quota(Quota { quota, per: Window::Length { seconds }, algorithm });
    Policy { limit, ..policy(name, &["tenant"], 1, Unit::Second, 1) }
}

#[tokio::test]
async fn permits_are_lent_renewed_and_given_back() {
    let region = Region::new(vec![permits("exports", 2, 60)]).await;
    let answer = region.post("acquire", &asked(1)).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("ratelimit-policy"), Some("\"exports\";q=2;qu=\"concurrent-requests\""));
    assert_eq!(answer.header("x-ratelimit-remaining"), Some("1"));
    assert_eq!(answer.body["expires_ms"], json!(60_000));
    assert_eq!(answer.body.as_object().unwrap().len(), 2, "{}", answer.body);
    let first = answer.body["lease"].as_str().unwrap().to_owned();
    region.pass(Micros::seconds(10));
    let second = region.acquire(1).await.unwrap();
    assert_ne!(first, second);

    let denied = region.acquire(1).await.unwrap_err();
    assert_eq!(
        (denied.status, denied.header("retry-after")),
        (429, Some("52")),
        "when the first one ends, a little after its holder has stopped"
    );
    assert_eq!(denied.header("ratelimit"), Some("\"exports\";r=0;t=52"));
    let limit = json!({
        "policy": "exports", "mode": "split", "allowed": false, "limit": 2, "remaining": 0,
        "reset_ms": 51_800, "retry_after_ms": 51_800, "reason": "over_limit",
    });
    assert_eq!(denied.body, json!({"allowed": false, "limits": [limit]}));
    let never = region.acquire(3).await.unwrap_err();
    assert_eq!((never.status, never.header("retry-after")), (429, None));

    region.pass(Micros::seconds(40));
    for _ in 0..2 {
        assert_eq!(region.renew(&first).await, (200, Some(60_000)));
    }
    region.pass(Micros::seconds(15));
    assert_eq!(
        region.acquire(1).await.unwrap_err().header("retry-after"),
        Some("7"),
        "the second ends first now"
    );
    assert_eq!(region.release(&first).await, 200);
    assert_eq!(region.release(&first).await, 404, "once is enough");
    assert_eq!(region.renew(&first).await.0, 404);
    let third = region.acquire(1).await.unwrap();
    assert!(region.acquire(1).await.is_err());
    assert_eq!((region.release(&second).await, region.release(&third).await), (200, 200));
    let both = region.acquire(2).await.unwrap();
    assert!(region.acquire(1).await.is_err());
    assert_eq!(region.release(&both).await, 200);
    assert_eq!(region.check(0).await.header("x-ratelimit-remaining"), Some("2"));
}

#[tokio::test]
async fn the_permits_of_a_holder_who_dies_are_free_when_its_lease_ends() {
    let region = Region::new(vec![permits("exports", 1, 60)]).await;
    let dead = region.acquire(1).await.unwrap();
    region.pass(Micros::seconds(60));
    assert_eq!(region.acquire(1).await.unwrap_err().header("retry-after"), Some("2"), "clocks may be slow");
    region.pass(Micros::millis(1_800) - Micros(1));
    assert_eq!(region.acquire(1).await.unwrap_err().header("retry-after"), Some("1"));
    region.pass(Micros(1));
    assert_eq!(region.renew(&dead).await.0, 404, "it has ended");
    let next = region.acquire(1).await.unwrap();
    assert_eq!(region.release(&dead).await, 404, "and cannot take the next one's permit away");
    assert!(region.acquire(1).await.is_err());
    assert_eq!(region.release(&next).await, 200);
}

#[tokio::test]
async fn a_check_says_whether_a_permit_is_free_and_takes_none() {
    let region = Region::new(vec![permits("exports", 1, 60)]).await;
    for _ in 0..3 {
        let free = region.check(1).await;
        assert_eq!((free.status, free.header("x-ratelimit-remaining")), (200, Some("1")));
    }
    let lease = region.acquire(1).await.unwrap();
    let busy = region.check(1).await;
    assert_eq!((busy.status, busy.header("retry-after")), (429, Some("62")));
    assert_eq!(region.check(0).await.status, 200, "asking for nothing is free");
    assert_eq!(region.check(-1).await.status, 200);
    assert_eq!(region.check(1).await.status, 429, "a check gives nothing back that it did not take");
    assert_eq!(region.release(&lease).await, 200);
}

#[tokio::test]
async fn a_request_may_hit_limits_of_every_kind_all_or_none() {
    let policies = vec![
        policy("rate", &["tenant"], 1, Unit::Hour, 10),
        quota("log", 3, 600, Algorithm::SlidingLog),
        quota("window", 5, 600, Algorithm::SlidingWindow),
        permits("exports", 2, 60),
        permits("shared-exports", 9, 30),
    ];
    let region = Region::new(policies).await;
    let left = async || {
        let answer = region.check(0).await;
        let limits = answer.body["limits"].as_array().unwrap();
        limits.iter().map(|limit| limit["remaining"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let answer = region.post("acquire", &asked(1)).await;
    assert_eq!(answer.body["expires_ms"], json!(30_000), "the shorter of two leases");
    let lease = answer.body["lease"].as_str().unwrap();
    assert_eq!(left().await, [9, 2, 4, 1, 8]);
    assert!(region.acquire(2).await.is_err(), "one permit is left");
    assert_eq!(left().await, [9, 2, 4, 1, 8], "and nothing was charged");
    assert_eq!(region.check(2).await.status, 429);
    assert_eq!(left().await, [9, 2, 4, 1, 8]);
    assert_eq!(region.check(1).await.status, 200);
    assert_eq!(left().await, [8, 1, 3, 1, 8], "a check takes no permit");
    assert_eq!(region.release(lease).await, 200);
    assert_eq!(left().await, [8, 1, 3, 2, 9], "what was spent stays spent");
    assert!(region.acquire(1).await.is_ok());
    let denied = region.acquire(1).await.unwrap_err();
    assert_eq!(denied.header("ratelimit-policy"), Some("\"log\";q=3;w=600"), "it binds most");
    assert_eq!(denied.header("retry-after"), Some("600"));
    assert_eq!(left().await, [7, 0, 2, 1, 8]);
    assert_eq!(region.check(-1).await.status, 200);
    assert_eq!(left().await, [8, 1, 3, 1, 8], "rates come back, permits by their lease alone");
}

#[tokio::test]
async fn a_sliding_log_comes_back_when_it_says() {
    let region = Region::new(vec![quota("login", 5, 900, Algorithm::SlidingLog)]).await;
    for left in (0..5).rev() {
        let answer = region.check(1).await;
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some(&*left.to_string())));
        assert_eq!(answer.header("ratelimit-policy"), Some("\"login\";q=5;w=900"));
        region.pass(Micros::seconds(10));
    }
    let denied = region.check(1).await;
    assert_eq!((denied.status, denied.header("retry-after")), (429, Some("850")));
    assert_eq!(
        region.check(3).await.header("retry-after"),
        Some("870"),
        "three take the third to be forgotten"
    );
    assert_eq!(region.check(6).await.header("retry-after"), None);
    region.pass(Micros::seconds(850) - Micros(1));
    assert_eq!(region.check(1).await.status, 429);
    region.pass(Micros(1));
    assert_eq!(region.check(1).await.status, 200);
    assert_eq!(region.check(1).await.status, 429);
}

#[tokio::test]
async fn what_has_no_limit_needs_no_permit() {
    let region = Region::new(vec![policy("rate", &["tenant"], 1, Unit::Hour, 1)]).await;
    let lease = region.acquire(1).await.unwrap();
    assert_eq!(region.acquire(1).await.unwrap_err().status, 429, "the rate is charged all the same");
    assert_eq!((region.renew(&lease).await, region.release(&lease).await), ((200, Some(60_000)), 200));
}

#[tokio::test]
async fn a_shadow_limit_on_permits_denies_nothing() {
    let region = Region::new(vec![Policy { shadow: true, ..permits("exports", 1, 60) }]).await;
    let (one, two) = (region.acquire(1).await.unwrap(), region.acquire(1).await.unwrap());
    for lease in [&one, &two] {
        assert_eq!(region.renew(lease).await.0, 200);
    }
    assert_eq!((region.release(&two).await, region.release(&one).await), (200, 200));
    assert_eq!(region.check(0).await.header("x-ratelimit-remaining"), Some("1"));
}

#[tokio::test]
async fn two_descriptors_may_want_permits_of_one_bucket() {
    let region = Region::new(vec![permits("exports", 3, 60)]).await;
    let descriptor = json!([{"key": "tenant", "value": "7"}, {"key": "op", "value": "export"}]);
    let both = json!({"domain": "api", "descriptors": [descriptor, descriptor]});
    let answer = region.post("acquire", &both).await;
    assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some("1")));
    assert_eq!(region.post("acquire", &both).await.status, 429);
    let lease = answer.body["lease"].as_str().unwrap();
    assert_eq!((region.renew(lease).await.0, region.release(lease).await), (200, 200));
    assert_eq!(region.check(0).await.header("x-ratelimit-remaining"), Some("3"));
}

#[tokio::test]
async fn a_lease_is_its_regions_own() {
    let policies = || vec![permits("exports", 1, 60)];
    let (here, there) = (Region::new(policies()).await, Region::named("there", policies()).await);
    let lease = here.acquire(1).await.unwrap();
    let answer = there.post("renew", &json!({ "lease": lease })).await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    assert!(answer.body["detail"].as_str().unwrap().contains("region `here`"), "{}", answer.body);
    let mut forged = lease.clone().into_bytes();
    forged[5] = if forged[5] == b'0' { b'1' } else { b'0' };
    for wrong in [&*String::from_utf8(forged).unwrap(), "nonsense", "", &"0".repeat(60_000)] {
        assert_eq!((here.renew(wrong).await.0, here.release(wrong).await), (404, 404), "{wrong:.20}");
    }
    assert_eq!(here.release(&lease).await, 200);
}

#[tokio::test]
async fn faults_have_a_place() {
    let region = Region::new(vec![permits("exports", 1, 60)]).await;
    let faults = [
        ("renew", json!({}), "#"),
        ("renew", json!({"lease": 7}), "#/lease"),
        ("release", json!({"lease": "x", "cost": 1}), "#/cost"),
        ("release", json!([]), "#"),
        ("acquire", asked(0), "#/cost"),
        ("acquire", asked(-1), "#/cost"),
        ("acquire", asked((1 << 31) + 1), "#/cost"),
        ("acquire", json!({"domain": "api"}), "#/descriptors"),
    ];
    for (path, body, pointer) in faults {
        let answer = region.post(path, &body).await;
        assert_eq!(
            (answer.status, &answer.body["errors"][0]["pointer"]),
            (400, &json!(pointer)),
            "{path} {body}"
        );
    }
    assert!(region.acquire(1).await.is_ok(), "none of them took anything");
}

/// Every kind of limit, while its store is down and after.
#[tokio::test]
async fn a_store_that_fails() {
    let (log, window) = (Algorithm::SlidingLog, Algorithm::SlidingWindow);
    let all = [quota("p", 2, 60, log), quota("p", 2, 60, window), permits("p", 2, 60)];
    for limit in all {
        let concurrent = matches!(limit.limit, Limit::Concurrent(_));
        let failing = |on_store_failure| Policy { on_store_failure, ..limit.clone() };

        let region = Region::new(vec![failing(OnStoreFailure::Deny)]).await;
        let before = region.acquire(1).await.unwrap();
        region.store_is_down(true);
        let denied = region.check(1).await;
        assert_eq!((denied.status, &denied.body["limits"][0]["reason"]), (503, &json!("store_unavailable")));
        assert_eq!(
            (denied.header("retry-after"), region.check(3).await.header("retry-after")),
            (Some("1"), None)
        );
        assert_eq!(region.acquire(1).await.unwrap_err().status, 503);
        if concurrent {
            assert_eq!((region.renew(&before).await.0, region.release(&before).await), (503, 503));
        }
        region.store_is_down(false);
        assert_eq!(region.check(1).await.status, 200, "{limit:?}");
        assert_eq!(region.renew(&before).await.0, 200);

        let region = Region::new(vec![failing(OnStoreFailure::Allow)]).await;
        region.store_is_down(true);
        for _ in 0..5 {
            assert_eq!(region.check(1).await.body["limits"][0]["reason"], json!("store_unavailable"));
        }
        let uncounted = region.acquire(1).await.unwrap();
        assert_eq!((region.renew(&uncounted).await.0, region.release(&uncounted).await), (200, 200));
        region.store_is_down(false);
        if concurrent {
            assert_eq!(region.renew(&uncounted).await.0, 404, "nobody has counted it");
        }

        let region = Region::new(vec![failing(OnStoreFailure::Local)]).await;
        region.pass(Micros::seconds(100));
        let before = region.acquire(1).await.unwrap();
        region.store_is_down(true);
        let denied = region.check(1).await;
        // A store keeps permits for longer than their holders are told.
        let span = if concurrent { "62" } else { "60" };
        assert_eq!(
            (denied.status, denied.header("retry-after")),
            (429, Some(span)),
            "{limit:?}: nothing is known"
        );
        if concurrent {
            assert_eq!((region.renew(&before).await.0, region.release(&before).await), (503, 503));
        }
        region.pass(Micros::seconds(62));
        let local = region.acquire(1).await.unwrap();
        let other = region.acquire(1).await.unwrap();
        assert_eq!(region.acquire(1).await.unwrap_err().status, 429, "{limit:?}: no more than the limit");
        if concurrent {
            assert_eq!((region.renew(&local).await.0, region.release(&other).await), (200, 200));
        }
        region.store_is_down(false);
        let left = if concurrent { "1" } else { "0" };
        assert_eq!(
            region.check(0).await.header("x-ratelimit-remaining"),
            Some(left),
            "{limit:?}: it is paid back"
        );
        assert_eq!(region.renew(&local).await.0, 200, "{limit:?}: and the lease goes on in the store");
    }
}
