use super::*;
use crate::limiter::active::{Active, ActivePolicy};
use crate::limiter::table::Asking;
use crate::limiter::{Core, Decide as _};
use crate::quota::matching::{Request, Subject};
use crate::quota::policy::{
    KeyMatch, Limit, Mode, OnStoreFailure, Policy, RegionName, Reserve, TokenBucket, Unit, ValueMatch,
};
use crate::quota::verdict::{Reason, Verdict};
use crate::store::memory::MemoryStore;
use crate::store::{Install, Prepare, Prepared};
use crate::telemetry::Metrics;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;
use tokio::time::Instant;

const BUCKET: BucketId = BucketId([7; 16]);
const NOW: Micros = Micros::seconds(5);
const AT: Micros = Micros::seconds(1_000);

fn charge(cost: Tokens) -> TakeCharge {
    let shape = Shape { rate: Rate::per_second(10), cap: Tokens::whole(10) };
    TakeCharge { bucket: BUCKET, shape, unseen: None, cost, enforce: true }
}

/// What a store says of a bucket that holds so much.
fn denied(level: Tokens) -> Taken {
    let Shape { rate, cap } = charge(Tokens::ZERO).shape;
    let seen = TakenCharge { fits: false, level, rate, cap };
    Taken { allowed: false, now: AT, charges: vec![seen], counts: Vec::new() }
}

fn ticket(denials: &Denials, charge: &TakeCharge, now: Micros) -> Ticket {
    match denials.recall(charge, now) {
        Recalled::Ask(ticket) => ticket,
        Recalled::Denied(taken) => panic!("nothing can be known: {taken:?}"),
    }
}

/// A table that remembers that the bucket held `level` at [`NOW`].
fn with(level: Tokens, may_be_lent: bool) -> Denials {
    let (denials, one) = (Denials::default(), charge(Tokens::whole(1)));
    let ticket = ticket(&denials, &one, NOW);
    denials.remember(ticket, &one, may_be_lent, &denied(level), NOW);
    denials
}

fn level(denials: &Denials, charge: &TakeCharge, after: Micros) -> Option<(Tokens, Micros)> {
    match denials.recall(charge, NOW + after) {
        Recalled::Denied(taken) => {
            assert!(!taken.allowed && !taken.charges[0].fits && taken.charges.len() == 1);
            Some((taken.charges[0].level, taken.now))
        }
        Recalled::Ask(_) => None,
    }
}

#[test]
fn what_may_have_refilled_is_asked_for() {
    // At ten a second, half a token is there after 50 ms, and a clock that is 3% slow has shown 48.5 ms.
    let (denials, one) = (with(Tokens(500_000), false), charge(Tokens::whole(1)));
    assert_eq!(level(&denials, &one, Micros::ZERO), Some((Tokens(500_000), AT)));
    assert_eq!(level(&denials, &one, Micros::millis(20)), Some((Tokens(700_000), AT + Micros::millis(20))));
    assert!(level(&denials, &one, Micros::millis(48)).is_some());
    assert_eq!(level(&denials, &one, Micros::millis(49)), None);
    // Other costs are measured against the same bucket.
    assert!(level(&denials, &charge(Tokens(1_100_000)), Micros::millis(57)).is_some());
    assert_eq!(level(&denials, &charge(Tokens(500_000)), Micros::ZERO), None);
    assert_eq!(level(&denials, &charge(Tokens(510_000)), Micros::millis(2)), None);
}

#[test]
fn reserve_that_is_lent_may_come_back_at_any_time() {
    let (denials, one) = (with(Tokens(500_000), true), charge(Tokens::whole(1)));
    assert!(level(&denials, &one, Micros::millis(24)).is_some());
    assert_eq!(level(&denials, &one, Micros::millis(25)), None);
}

#[test]
fn nothing_is_remembered_for_long() {
    let (denials, ten) = (with(Tokens::ZERO, false), charge(Tokens::whole(10)));
    assert!(level(&denials, &ten, REMEMBERED).is_some());
    assert_eq!(level(&denials, &ten, REMEMBERED + Micros(1)), None);
    // It counts from before the store was asked; what is said to be there, from the answer on.
    let (denials, ten) = (Denials::default(), charge(Tokens::whole(10)));
    let ticket = ticket(&denials, &ten, NOW);
    denials.remember(ticket, &ten, false, &denied(Tokens::ZERO), NOW + Micros::millis(60));
    assert_eq!(level(&denials, &ten, Micros::millis(80)), Some((Tokens(200_000), AT + Micros::millis(20))));
    assert_eq!(level(&denials, &ten, Micros::millis(101)), None);
}

#[test]
fn an_answer_holds_for_its_own_question() {
    let (denials, one) = (with(Tokens::ZERO, false), charge(Tokens::whole(1)));
    let other = |change: &dyn Fn(&mut TakeCharge)| {
        let mut other = one;
        change(&mut other);
        level(&denials, &other, Micros::ZERO)
    };
    assert!(other(&|_| ()).is_some());
    assert_eq!(other(&|c| c.shape.rate = Rate::per_second(11)), None);
    assert_eq!(other(&|c| c.shape.cap = Tokens::whole(9)), None);
    assert_eq!(other(&|c| c.unseen = Some(Unseen::default())), None);
    assert_eq!(other(&|c| c.bucket = BucketId([8; 16])), None);
    // One in the same place.
    assert_eq!(other(&|c| c.bucket.0[15] = 0), None);
    denials.forget(&BucketId([8; 16]));
    assert!(other(&|_| ()).is_some());
}

#[test]
fn what_is_forgotten_is_not_remembered_by_an_older_answer() {
    let one = charge(Tokens::whole(1));
    for forget in [&|d: &Denials| d.forget(&BUCKET) as _, &Denials::forget_all as &dyn Fn(&Denials)] {
        let denials = with(Tokens::ZERO, false);
        forget(&denials);
        let before = ticket(&denials, &one, NOW);
        forget(&denials);
        denials.remember(before, &one, false, &denied(Tokens::ZERO), NOW);
        let after = ticket(&denials, &one, NOW);
        denials.remember(after, &one, false, &denied(Tokens::ZERO), NOW);
        assert!(level(&denials, &one, Micros::ZERO).is_some());
    }
}

#[test]
fn it_is_small() {
    assert_eq!(size_of::<Place>() * SHARDS * PLACES, 272 << 10);
}

/// A store that counts, and fails on demand.
#[derive(Clone)]
struct Counting {
    store: MemoryStore,
    takes: Arc<AtomicU64>,
    down: Arc<AtomicBool>,
}

impl Store for Counting {
    async fn take(&self, take: crate::store::Take) -> Result<Taken, StoreError> {
        self.takes.fetch_add(1, Ordering::Relaxed);
        if self.down.load(Ordering::Relaxed) {
            Err(StoreError::Unavailable)
        } else {
            self.store.take(take).await
        }
    }
    async fn known(&self, buckets: Vec<BucketId>) -> Result<(u64, Vec<bool>), StoreError> {
        self.store.known(buckets).await
    }
    async fn prepare(&self, asks: Vec<Prepare>) -> Result<(Micros, Vec<Prepared>), StoreError> {
        self.store.prepare(asks).await
    }
    async fn install(&self, records: Vec<Install>) -> Result<Vec<Tokens>, StoreError> {
        self.store.install(records).await
    }
}

/// A region, one of two.
struct Region {
    store: Counting,
    core: Arc<Core>,
    limiter: Limiter<Counting>,
}

impl Region {
    fn new(policies: &[Policy]) -> Self {
        let memory = MemoryStore::monotonic(AT);
        let session = memory.session().borrow().session().expect("it is attached");
        memory.mark_full(session).expect("it is new");
        let metrics = Arc::new(Metrics::new("here"));
        let regions: [RegionName; 2] = ["here".into(), "there".into()];
        let active = (1..).zip(policies).map(|(id, policy)| {
            let cut = policy.cut(&regions);
            let part = cut.as_ref().map(|cut| cut.parts[0]).unwrap_or_default();
            ActivePolicy::new(id, Arc::new(policy.clone()), cut.as_ref(), part, None, &metrics)
        });
        let active = Active::new(1, active.collect(), true, &metrics);
        let core = Arc::new(Core::new(active, metrics, MemoryStore::monotonic(AT), Box::new(|_, _| None)));
        let (takes, down) = (Arc::default(), Arc::default());
        let store = Counting { store: memory, takes, down };
        Self { limiter: Limiter::new(store.clone(), Arc::clone(&core)), store, core }
    }

    async fn ask(&self, key: &str, cost: i64) -> Verdict {
        let attributes = [(key, "7")];
        let subject = Subject::Attributes(&attributes);
        let request = Request { domain: "api", subject, cost: Tokens::whole(cost) };
        self.limiter.check(&request, None).await.expect("a good request")
    }

    fn takes(&self) -> u64 {
        self.store.takes.load(Ordering::Relaxed)
    }

    fn remembered(&self) -> u64 {
        self.core.metrics.denials_from_memory.get()
    }

    /// Asks until the next denial comes from memory, however slow this machine is.
    async fn deny_from_memory(&self, key: &str, cost: i64) -> Verdict {
        loop {
            let before = self.remembered();
            let verdict = self.ask(key, cost).await;
            assert!(!verdict.allowed, "{verdict:?}");
            if self.remembered() > before {
                return verdict;
            }
        }
    }
}

/// Once a day, so that nothing refills meanwhile.
fn policy(name: &str, mode: Mode, wait: Micros) -> Policy {
    Policy {
        name: name.into(),
        domain: "api".into(),
        matches: vec![KeyMatch { key: name.into(), value: ValueMatch::Any }],
        limit: Limit::TokenBucket(TokenBucket { amount: 1, per: Unit::Day, burst: 400 }),
        mode,
        reserve: Reserve::default(),
        weights: BTreeMap::new(),
        wait,
        on_store_failure: OnStoreFailure::Allow,
        shadow: false,
    }
}

fn split(name: &str) -> Policy {
    policy(name, Mode::Split, Micros::ZERO)
}

#[tokio::test]
async fn a_spent_bucket_asks_the_store_ten_times_a_second() {
    let region = Region::new(&[split("tenant")]);
    assert!(region.ask("tenant", 200).await.allowed);
    let began = Instant::now();
    let mut last = region.ask("tenant", 1).await;
    for _ in 0..1_000 {
        last = region.ask("tenant", 1).await;
    }
    let periods = u64::try_from(began.elapsed().as_millis() / 100).expect("soon");
    assert!(region.takes() <= 3 + periods, "{} calls in {periods} periods", region.takes());
    assert_eq!(region.remembered() + region.takes(), 1_002, "every request is one or the other");
    let [limit] = &last.limits[..] else { panic!("{last:?}") };
    assert_eq!((last.allowed, limit.reason, limit.remaining), (false, Reason::OverLimit, 0));
}

#[tokio::test]
async fn what_is_not_one_plain_charge_goes_to_the_store() {
    let region = Region::new(&[split("tenant"), Policy { shadow: true, ..split("shadow") }]);
    region.ask("tenant", 200).await;
    region.ask("shadow", 200).await;
    region.deny_from_memory("tenant", 1).await;
    let (takes, remembered) = (region.takes(), region.remembered());
    assert!(region.ask("tenant", 0).await.allowed, "looking costs nothing");
    for _ in 0..3 {
        assert!(region.ask("shadow", 1).await.allowed);
        let attributes = [("shadow", "7"), ("tenant", "7")];
        let subject = Subject::Attributes(&attributes);
        let both = Request { domain: "api", subject, cost: Tokens::whole(1) };
        assert!(!region.limiter.check(&both, None).await.unwrap().allowed);
    }
    assert_eq!((region.takes() - takes, region.remembered()), (7, remembered));
}

#[tokio::test]
async fn what_is_given_back_is_there_at_once() {
    let region = Region::new(&[split("tenant")]);
    region.ask("tenant", 200).await;
    for _ in 0..20 {
        region.deny_from_memory("tenant", 1).await;
        assert!(region.ask("tenant", -1).await.allowed);
        assert!(region.ask("tenant", 1).await.allowed);
    }
}

#[tokio::test]
async fn an_outage_is_not_hidden_from_others() {
    let region = Region::new(&[split("tenant"), split("user")]);
    region.ask("tenant", 200).await;
    region.deny_from_memory("tenant", 1).await;
    region.store.down.store(true, Ordering::Relaxed);
    // Whoever hears of it first, all have.
    assert_eq!(region.ask("user", 1).await.limits[0].reason, Reason::StoreUnavailable);
    assert_eq!(region.ask("tenant", 1).await.limits[0].reason, Reason::StoreUnavailable);
    region.store.down.store(false, Ordering::Relaxed);
    region.deny_from_memory("tenant", 1).await;
    region.store.down.store(true, Ordering::Relaxed);
    tokio::time::sleep(REMEMBERED.to_duration()).await;
    assert_eq!(region.ask("tenant", 1).await.limits[0].reason, Reason::StoreUnavailable);
}

#[tokio::test]
async fn the_slow_loop_hears_of_what_memory_denies() {
    let region = Region::new(&[policy("strict", Mode::Strict, Micros::ZERO)]);
    while region.ask("strict", 1).await.allowed {}
    let [tally] = &region.core.table.take_poked()[..] else { panic!("it hears of one bucket") };
    tally.set_asking(Asking::No);
    tally.take_offered();
    let before = region.takes() + region.remembered();
    region.deny_from_memory("strict", 1).await;
    assert_eq!(region.core.table.take_poked().len(), 1, "it is told again");
    let asked = i64::try_from(region.takes() + region.remembered() - before).expect("few");
    let offered = tally.take_offered();
    assert_eq!((offered.cost, offered.denied), (Tokens::whole(asked), Tokens::whole(asked)));
}

#[tokio::test]
async fn who_waits_tries_again_at_the_store() {
    let region = Arc::new(Region::new(&[policy("strict", Mode::Strict, Micros::seconds(60))]));
    let active = region.core.active.load_full();
    let policy = active.policy(1).expect("it is there");
    let all = policy.shape.cap;
    assert!(region.ask("strict", all.floor()).await.allowed);
    let mut waiting = Vec::new();
    while region.remembered() == 0 {
        let region = Arc::clone(&region);
        waiting.push(tokio::spawn(async move { region.ask("strict", 1).await }));
        tokio::task::yield_now().await;
    }
    let most = usize::try_from(all.floor()).expect("few");
    assert!((2..=most).contains(&waiting.len()), "{} of {most}", waiting.len());
    let [tally] = &region.core.table.take_poked()[..] else { panic!("they are heard of") };
    assert_eq!(region.core.waiting(), waiting.len());
    // Tokens come that memory knows nothing of.
    region.store.store.take(policy.take(tally.bucket, -all)).await.expect("it is there");
    tally.installed();
    for one in waiting {
        let verdict = tokio::time::timeout(Duration::from_secs(30), one).await.expect("it is let through");
        assert!(verdict.expect("no panic").allowed);
    }
}
