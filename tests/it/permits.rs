//! Permits that three regions share: never more than there are, by their holders' own view, whatever is cut off or lost.

use crate::support::client::Api;
use crate::support::cluster::{Cluster, Plan};
use crate::support::{eventually, hold};
use serde_json::json;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const PERMITS: usize = 6;
/// One of them is each region's own.
const POLICY: &str = "
policies:
  - name: jobs
    domain: api
    match: [ { key: tenant } ]
    limit: { concurrent: 6, ttl: 3s }
    mode: strict
    reserve: 50%
";
const TTL: Duration = Duration::from_secs(3);
/// A region that is cut off has what it was lent for as long as that.
const SOON: Duration = Duration::from_secs(60);

/// Who holds what: from when its holder has its answer until it stops, of its own accord.
#[derive(Default)]
struct Held {
    /// By number: in which region, and until when its holder believes to have it.
    now: Mutex<BTreeMap<usize, (usize, Instant)>>,
    next: AtomicUsize,
    most: AtomicUsize,
}

impl Held {
    fn book(&self) -> std::sync::MutexGuard<'_, BTreeMap<usize, (usize, Instant)>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It has it until then; counted with all others at this instant.
    fn until(&self, holder: usize, region: usize, until: Instant) {
        let mut book = self.book();
        book.insert(holder, (region, until));
        let now = Instant::now();
        self.most.fetch_max(book.values().filter(|(_, until)| *until > now).count(), Ordering::Relaxed);
    }

    fn stops(&self, holder: usize) {
        self.book().remove(&holder);
    }

    fn in_region(&self, region: usize) -> usize {
        let now = Instant::now();
        self.book().values().filter(|(r, until)| *r == region && *until > now).count()
    }

    /// So many in all, and in each region as many as that.
    fn is(&self, all: usize, each: &[RangeInclusive<usize>; 3]) -> Result<(), String> {
        let held = [0, 1, 2].map(|region| self.in_region(region));
        let fits = each.iter().zip(held).all(|(each, held)| each.contains(&held));
        hold(fits && held.iter().sum::<usize>() == all, || format!("{held:?}"))
    }

    /// How many are held in a region that were taken or renewed after this time.
    fn since(&self, region: usize, time: Instant) -> usize {
        let lately = |(r, until): &&(usize, Instant)| *r == region && *until >= time + TTL;
        self.book().values().filter(lately).count()
    }
}

/// Somebody who wants a permit in one region, and holds on to it until told to stop.
async fn holder(api: Api, region: usize, held: Arc<Held>, mut wanted: tokio::sync::watch::Receiver<bool>) {
    let number = held.next.fetch_add(1, Ordering::Relaxed);
    loop {
        if wanted.wait_for(|wanted| *wanted).await.is_err() {
            return;
        }
        // It counts from before it asks.
        let asked = Instant::now();
        let body = json!({"domain": "api", "attributes": {"tenant": "7"}});
        let Ok(answer) = api.post("/v1/acquire", &body).await else { continue };
        if answer.status != 200 {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        }
        let (lease, mut until) = (answer.json()["lease"].clone(), asked + lasts(&answer.json()));
        held.until(number, region, until);
        while *wanted.borrow() && Instant::now() < until {
            let third = (until - Instant::now()) / 3;
            let _ = tokio::time::timeout(third, wanted.wait_for(|wanted| !*wanted)).await;
            let (asked, body) = (Instant::now(), json!({ "lease": lease }));
            let renewal = tokio::time::timeout_at(until.into(), api.post("/v1/renew", &body)).await;
            match renewal {
                Ok(Ok(answer)) if answer.status == 200 => {
                    until = asked + lasts(&answer.json());
                    held.until(number, region, until);
                }
                Ok(Ok(answer)) if answer.status == 404 => break,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        held.stops(number);
        let _ = api.post("/v1/release", &json!({ "lease": lease })).await;
    }
}

fn lasts(body: &serde_json::Value) -> Duration {
    Duration::from_millis(body["expires_ms"].as_u64().expect("how long it lasts"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn regions_lend_each_other_permits_and_never_hold_more_than_there_are() {
    let plan = Plan { policies: POLICY.into(), rtt: Duration::from_millis(20), ..Plan::default() };
    let mut cluster = Cluster::start(plan).await;
    let (held, apis) = (Arc::new(Held::default()), cluster.apis());
    let wanted = [0, 1, 2].map(|_| tokio::sync::watch::Sender::new(false));
    for (region, api) in apis.iter().enumerate() {
        for _ in 0..8 {
            tokio::spawn(holder(api.clone(), region, Arc::clone(&held), wanted[region].subscribe()));
        }
    }
    let becomes = async |what: &str, all: usize, each: [RangeInclusive<usize>; 3]| {
        eventually(what, SOON, || async { held.is(all, &each) }).await;
    };
    // One region alone: its own, and all that are lent.
    wanted[1].send_replace(true);
    becomes("all demand is in one region", 4, [0..=0, 4..=4, 0..=0]).await;
    // It is cut off. Its holders renew, and come down to its own; what ended is the others'.
    cluster.cut_off(1);
    wanted[0].send_replace(true);
    wanted[2].send_replace(true);
    becomes("who is cut off has its own, and others the rest", PERMITS, [1..=4, 1..=1, 1..=4]).await;
    // It is there again, and gets what others do not need any more.
    cluster.heal(1);
    wanted[0].send_replace(false);
    becomes("what one region gives back is another's", 5, [0..=0, 1..=4, 1..=4]).await;
    // A daemon that starts again goes on lending what is in use in its store.
    wanted[2].send_replace(false);
    becomes("one region has it all again", 4, [0..=0, 4..=4, 0..=0]).await;
    cluster.daemons[1].kill();
    cluster.daemons[1].spawn();
    cluster.daemons[1].ready().await;
    let restarted = Instant::now();
    eventually("all is renewed after a restart", SOON, || async {
        let renewed = held.since(1, restarted);
        hold(renewed == 4, || format!("{renewed}"))
    })
    .await;
    // Its store is lost: what was told before lives on, and until it has ended the reserve gives out nothing.
    cluster.redis[1].cli(&["FLUSHALL"]).await;
    wanted[0].send_replace(true);
    becomes("what was lost is there again", 5, [1..=4, 1..=4, 0..=0]).await;

    let most = held.most.load(Ordering::Relaxed);
    println!("at most {most} of {PERMITS} were held at a time");
    assert_eq!(most, PERMITS, "never more, and all were used");
}
