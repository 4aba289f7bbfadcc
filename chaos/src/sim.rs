//! The simulation: the product's own fast and slow loops and pool, of 2 to 9 regions, in one thread with simulated time, network,
//! stores and log. Everything that is left to chance comes from the seed, so that a seed repeats bit for bit.
//!
//! The log is the simulation's own small Raft (`raft`), or, at some three times the cost, the product's (`openraft`).
//!
//! A run has two phases: one with faults, in which only safety is checked (and at every instant: see `watch`), and a healed one,
//! which must converge: policies settle, every region joins, and the whole limit is used again.

pub mod campaign;
mod chance;
pub mod command;
mod faults;
mod load;
mod logs;
mod machine;
mod members;
mod net;
mod openraft;
mod permits;
mod policies;
mod quotas;
mod raft;
mod region;
mod store;
mod watch;
mod weather;

pub use logs::Kind;
pub use openraft::{Counts as RaftCounts, Ends};
pub use watch::Counts;

use crate::invariants::{ApproximateBound, Breach, Invariant, Judged, SplitBound, StrictBound, Verdict};
use crate::oracle;
use chance::Chance;
use logs::Logs;
use machine::{Clock, Clocks, Machine, TrueTime, pass};
use net::Net;
use openraft::Openrafts;
use permits::PermitWatch;
use policies::Target;
use quorate::bugs::{self, Bug};
use quorate::quota::amount::{Micros, Rate, Tokens};
use quorate::quota::policy::{LEASE_MAX, Policy, RegionName};
use quorate::quota::pool::{Entry, Op, Pool, Stamp};
use quorate::raft::LogLimits;
use quotas::QuotaWatch;
use raft::{Habits, Payload, Rafts};
use region::Region;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use store::Shelf;
use tokio::sync::Notify;
use watch::{Held, Watch};
use weather::Weather;

/// After this all faults have ended.
const FAULTS: Micros = Micros::seconds(120);
/// How long a healed cluster may take until every region has joined and policies have settled: an election, a join, the
/// acknowledgements, and the longest lease.
const SETTLES: Micros = Micros::seconds(20);
/// A reserve that refilled slowly may be held back for long after a change of policies: limits are measured after this all the same,
/// but without those.
const HELD_MAX: Micros = Micros::seconds(200);
/// Full use of the limits is measured over this time, after demand has been there for as long.
const MEASURE: Micros = Micros::seconds(8);
/// So much of what a pool can carry must be used then. (What it reaches over longer times is measured in benches/utilisation.rs.)
const SERVED_PERCENT: i64 = 60;

/// What is run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// So many regions; `None`: as the seed says.
    pub regions: Option<usize>,
    /// With this deliberate bug.
    pub bug: Option<Bug>,
    /// On this log.
    pub log: Kind,
    /// Keep a history for the report.
    pub record: bool,
    /// With a quota in short windows besides the other policies.
    pub quotas: bool,
    /// With permits that are lent between regions besides the other policies.
    pub permits: bool,
}

impl Options {
    /// The world in which this bug can be caught.
    #[must_use]
    pub fn to_catch(bug: Bug) -> Self {
        let of_quotas =
            matches!(bug, Bug::FirstClockCounts | Bug::EndedWindowAccepted | Bug::QuotaMovedMidWindow);
        let of_permits =
            matches!(bug, Bug::PermitOutlivesLease | Bug::ReserveAfterLoss | Bug::PermitsGivenUpInUse);
        Self { bug: Some(bug), quotas: of_quotas, permits: of_permits, ..Self::default() }
    }

    /// The command that runs one seed once more.
    #[must_use]
    pub fn replay(&self, seed: u64) -> String {
        let regions = self.regions.map(|n| format!(" --regions {n}")).unwrap_or_default();
        let bug = self.bug.map(|bug| format!(" --bug {bug}")).unwrap_or_default();
        let log = if self.log == Kind::Openraft { " --log openraft" } else { "" };
        let quotas = if self.quotas { " --quotas" } else { "" };
        let permits = if self.permits { " --permits" } else { "" };
        format!("quorate-chaos sim --seed {seed}{log}{regions}{quotas}{permits}{bug}")
    }
}

/// What came of a seed.
#[derive(Debug)]
pub struct Outcome {
    /// What was broken, if anything.
    pub violation: Option<Broken>,
    /// What happened.
    pub counts: Counts,
    /// What happened in the product's own Raft, if it ran on that.
    pub raft: Option<RaftCounts>,
    /// A number that two runs of one seed have in common.
    pub fingerprint: u64,
    /// If it was to be kept.
    pub history: Option<oracle::History>,
    /// True time at the end.
    pub end: Micros,
}

/// A promise that was broken.
#[derive(Clone, Debug)]
pub struct Broken {
    /// When, in true time.
    pub at: Micros,
    /// What, in words.
    pub what: String,
}

/// In which part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Faults, and callers of every style.
    Faults,
    /// Healed; little demand.
    Quiet,
    /// More demand than the limits allow, everywhere.
    Demand,
    /// Over.
    Over,
}

/// Everything of one run.
struct World {
    time: TrueTime,
    chance: Chance,
    drift: i64,
    weather: Weather,
    /// By region: nobody asks for anything there until then.
    asleep_until: Vec<AtomicI64>,
    /// Much was spent at once: time to look at everything.
    alarm: Arc<Notify>,
    net: Arc<Net>,
    logs: Logs,
    regions: Vec<Arc<Region>>,
    watch: Arc<Watch>,
    quotas: Arc<QuotaWatch>,
    permits: Arc<PermitWatch>,
    targets: Vec<Target>,
    phase: AtomicU8,
    /// A region joins or leaves.
    changing: AtomicBool,
    delay: Micros,
    record: bool,
    with_permits: bool,
    history: Mutex<oracle::History>,
}

/// Runs one seed to its end, or to the first broken promise.
///
/// # Errors
/// If the simulation itself cannot run.
pub fn run(seed: u64, options: Options) -> anyhow::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    bugs::plant(options.bug);
    let outcome = runtime.block_on(async {
        let world = World::new(seed, options)?;
        let broken = Arc::clone(&world).live().await;
        world.outcome(broken)
    });
    bugs::plant(None);
    runtime.shutdown_background();
    outcome
}

impl World {
    fn new(seed: u64, options: Options) -> anyhow::Result<Arc<Self>> {
        let (time, chance) = (TrueTime::begin(), Chance::new(seed));
        let n = options.regions.unwrap_or_else(|| match chance.int(0, 9) {
            0 => 2,
            1..6 => 3,
            6..8 => 5,
            _ => chance.index(8) + 2,
        });
        let weather = Weather::any(&chance);
        let drift = chance.pick(&[0, 10_000, 10_000, 10_000]);
        // Some that may join later.
        let more = n < 9 && chance.percent(30) && options.log == Kind::Small;
        let all = n + usize::from(more);
        let names: Vec<RegionName> = (0..all).map(|i| RegionName::from(format!("r{i}"))).collect();
        let mut policies: Vec<Policy> = (0..chance.int(1, 2))
            .map(|i| policies::any(&chance, weather, &format!("p{i}"), &names))
            .collect();
        if options.quotas {
            policies.push(quotas::any(&chance, &names));
        }
        let targets = Target::of(&chance, &policies);
        if options.permits {
            // Whose callers are its holders.
            policies.push(permits::any(&chance, &names));
        }
        let pool = found(&names[..n], policies);
        let others = || targets.iter().filter(|target| target.policy != quotas::NAME);
        let watch = Arc::new(Watch::new(pool.clone(), others().map(|t| (t.bucket, t.policy.clone()))));
        let quota_watch = Arc::new(QuotaWatch::default());
        let permit_watch = Arc::new(PermitWatch::default());
        permit_watch.committed(Micros::ZERO, &pool);
        if options.quotas {
            quota_watch.begin(&pool, others().map(|target| target.bucket));
        }
        let delay = Micros::millis(chance.pick(&[1, 20, 40, 40, 100, 150]));
        let asleep_until = (0..all).map(|_| AtomicI64::new(weather.asleep_until(&chance).0)).collect();
        let alarm = Arc::new(Notify::new());
        let net = Arc::new(Net::new(chance.clone(), all, |_, _| chance.time(delay.percent(50), delay)));
        let regions: Vec<Arc<Region>> = (0..all)
            .map(|i| {
                let clocks =
                    Clocks { monotonic: Clock::any(&chance, drift), wall: Clock::any(&chance, drift) };
                let machine = Machine::new(time, clocks);
                let (spent, of_quotas, alarm) =
                    (Arc::clone(&watch), Arc::clone(&quota_watch), Arc::clone(&alarm));
                let on_spent: store::OnSpent = Arc::new(move |now, bucket, cost| {
                    if spent.spent(now, bucket, cost) {
                        alarm.notify_one();
                    }
                    of_quotas.spent(now, bucket, cost);
                });
                let clock = Clock::any(&chance, drift);
                let shelf = Shelf::new(time, chance.clone(), clock, (i as u64 + 1) << 32, on_spent);
                for target in &targets {
                    let part = watch.parts(&target.policy).get(i).copied().unwrap_or_default();
                    shelf.set_overdraft(target.bucket, part.overdraft);
                }
                let region = Region::new(i, names[i].clone(), machine, shelf);
                let member = pool.members().find(|member| member.name == names[i]);
                region.set_node(member.map_or(0, |member| member.node));
                Arc::new(region)
            })
            .collect();
        let habits = Habits {
            company: Micros::millis(chance.pick(&[1, 30, 600, 3_000])),
            slow_hand_over: chance.pick(&[0, 0, 2, 10]),
            disk: Micros::millis(chance.pick(&[0, 5, 200])),
            log_max: chance.pick(&[20_usize, 100, 1_000]),
            echoes: weather.echoes(),
            unaware: weather.unaware(),
        };
        let (seen, of_quotas) = (Arc::clone(&watch), Arc::clone(&quota_watch));
        let of_permits = Arc::clone(&permit_watch);
        let all_machines: Vec<(RegionName, Arc<Machine>)> =
            regions.iter().map(|r| (r.name.clone(), Arc::clone(&r.machine))).collect();
        let on_commit = move |term, entry: &Entry, stamped| {
            seen.committed(time.now(), term, entry, stamped);
            let clocks = all_machines.iter().map(|(name, m)| (name.clone(), m.clocks().wall.at(time.now())));
            of_quotas.clocks(time.now(), clocks);
            seen.with_pool(|pool| {
                of_quotas.committed(time.now(), pool);
                of_permits.committed(time.now(), pool);
            });
        };
        let machines = regions.iter().map(|r| Arc::clone(&r.machine)).collect();
        let (lines, among) = (Arc::clone(&net), (time, chance.clone()));
        let logs = match options.log {
            Kind::Small => {
                let on_item = move |_, item: &raft::Item| {
                    if let Payload::Pool(entry, stamped) = &item.payload {
                        on_commit(item.term, entry, *stamped);
                    }
                };
                let founded = (pool, n);
                Logs::Small(Rafts::new(
                    time,
                    chance.clone(),
                    lines,
                    machines,
                    habits,
                    founded,
                    Box::new(on_item),
                ))
            }
            Kind::Openraft => {
                let entries = habits.log_max as u64;
                let habits = openraft::Habits {
                    rtt_max: (delay + delay).percent(120),
                    disk: habits.disk,
                    log: LogLimits { snapshot_entries: entries, entries_kept: entries / 4 },
                    propose_every: Micros::seconds(2),
                };
                let policies = pool.policies().map(|view| Policy::clone(view.policy)).collect();
                let on_commit = Box::new(on_commit);
                Logs::Openraft(Openrafts::new(among, lines, machines, habits, policies, on_commit)?)
            }
        };
        let history = Mutex::new(oracle::History::default());
        let world = Self {
            time,
            chance,
            drift,
            weather,
            asleep_until,
            alarm,
            net,
            logs,
            regions,
            watch,
            quotas: quota_watch,
            permits: permit_watch,
            targets,
            phase: AtomicU8::new(Phase::Faults as u8),
            changing: AtomicBool::new(false),
            delay,
            record: options.record,
            with_permits: options.permits,
            history,
        };
        world.title(seed, options, &names);
        Ok(Arc::new(world))
    }

    fn title(&self, seed: u64, options: Options, names: &[RegionName]) {
        let mut history = self.history();
        history.run.title = format!("simulation, seed {seed}");
        history.run.replay = options.replay(seed);
        history.run.about = format!(
            "up to {} regions, {} ms apart, clocks off by up to {} ppm; {}",
            names.len(),
            self.delay.0 / 1_000,
            self.drift,
            self.weather.about()
        );
        history.regions = names.iter().map(ToString::to_string).collect();
    }

    /// The run itself.
    async fn live(self: Arc<Self>) -> Option<Broken> {
        for region in &self.regions {
            region.start(&self.logs);
        }
        let look = tokio::spawn(Arc::clone(&self).look_on());
        for region in 0..self.regions.len() {
            tokio::spawn(Arc::clone(&self).call(region));
            if self.with_permits {
                self.hold_permits(region);
            }
        }
        if self.with_permits {
            tokio::spawn(Arc::clone(&self).isolate());
            tokio::spawn(Arc::clone(&self).share_anew());
        }
        tokio::spawn(Arc::clone(&self).attack());
        tokio::spawn(Arc::clone(&self).make_weather());
        let faults = tokio::spawn(Arc::clone(&self).break_things());
        let broken = self.clone().stages().await;
        self.enter(Phase::Over);
        look.abort();
        faults.abort();
        broken
    }

    async fn stages(self: Arc<Self>) -> Option<Broken> {
        if let Some(broken) = self.until(FAULTS).await {
            return Some(broken);
        }
        self.heal();
        self.history().healed = Some(self.time.now());
        self.enter(Phase::Quiet);
        loop {
            if let Some(broken) = self.settle().await {
                return Some(broken);
            }
            self.enter(Phase::Demand);
            if let Some(broken) = self.until(self.time.now() + MEASURE).await {
                return Some(broken);
            }
            let before: Vec<Tokens> = self.spent();
            let measured = self.time.now();
            if let Some(broken) = self.until(measured + MEASURE).await {
                return Some(broken);
            }
            // A change of policies that was on its way for long starts it all again (nobody makes new ones).
            if self.missing().is_none() {
                return self.idle(&before);
            }
        }
    }

    /// Waits until a healed cluster is whole again: in time, or that is a broken promise.
    async fn settle(&self) -> Option<Broken> {
        let healed = self.time.now();
        loop {
            // What was lent to the past lives of a region counts as lent until it has run out; so does what a change of policies,
            // which may have been on its way, takes back.
            let clear = self.watch.clear_at(healed);
            let missing = self.missing();
            let now = self.time.now();
            if missing.is_none() && now >= clear && (!self.is_held() || now > healed + HELD_MAX) {
                return None;
            }
            // (Of two changes in one entry the watch sees the second: the first may have had the longest lease that there is.)
            if now > clear + LEASE_MAX + SETTLES
                && let Some(missing) = missing
            {
                let what = format!("L1: not whole again: {missing}; {}", self.logs.describe());
                return Some(Broken { at: now, what });
            }
            if let Some(broken) = self.until(now + Micros::seconds(1)).await {
                return Some(broken);
            }
        }
    }

    /// Does some reserve not refill yet, for the sake of a change of policies, settled or not? (See `Unseen::after_change`.)
    fn is_held(&self) -> bool {
        self.regions.iter().any(|region| {
            if self.targets.iter().any(|target| region.shelf.is_held(target.bucket)) {
                return true;
            }
            let parts = self.targets.iter().filter_map(|target| region.part(&target.policy));
            parts.filter_map(|(_, unseen)| unseen).any(|unseen| unseen.at > region.shelf.now())
        })
    }

    /// Waits until then, or for the first broken promise.
    async fn until(&self, at: Micros) -> Option<Broken> {
        while self.time.now() < at {
            pass(Micros::millis(100).min(at - self.time.now())).await;
            if let Some(broken) =
                self.watch.broken().or_else(|| self.quotas.broken()).or_else(|| self.permits.broken())
            {
                return Some(broken);
            }
            if let Some(what) = self.logs.fault() {
                return Some(Broken { at: self.time.now(), what });
            }
        }
        None
    }

    /// Looks at everything again and again.
    async fn look_on(self: Arc<Self>) {
        loop {
            tokio::select! {
                biased;
                () = self.alarm.notified() => {}
                () = pass(self.chance.time(Micros::millis(20), Micros::millis(250))) => {}
            }
            self.look();
            if self.chance.percent(10) {
                self.regions.iter().for_each(|region| region.shelf.expire());
            }
        }
    }

    fn look(&self) {
        let now = self.time.now();
        let clocks = self.regions.iter().map(|r| (r.name.clone(), r.machine.clocks().wall.at(now)));
        self.quotas.clocks(now, clocks);
        self.watch.look(now, self.logs.stamp(), |pool, bucket| {
            let Some(target) = self.targets.iter().find(|t| t.bucket == bucket) else { return Vec::new() };
            self.regions.iter().map(|region| held(region, target, pool)).collect()
        });
    }

    /// What a healed cluster still lacks.
    fn missing(&self) -> Option<String> {
        if self.changing.load(Ordering::Relaxed) {
            let members = self.watch.with_pool(|pool| pool.members().collect::<Vec<_>>());
            let voters = self.logs.voters();
            return Some(format!("a region still joins or leaves: {members:?}, voters {voters:?}"));
        }
        let version = self.watch.with_pool(Pool::version);
        if !self.watch.with_pool(Pool::settled) {
            let late: Vec<_> = self.watch.with_pool(|pool| pool.unacked(version).collect());
            return Some(format!(
                "version {version} of the policies is not settled; not acknowledged by {late:?}"
            ));
        }
        let mut members = self.regions.iter().filter(|region| region.is_member());
        let late = members.find(|region| region.version() != Some(version));
        late.map(|region| {
            format!("{} has version {:?} of the policies, not {version}", region.name, region.version())
        })
    }

    /// Was some limit not used although there was demand for it everywhere?
    fn idle(&self, before: &[Tokens]) -> Option<Broken> {
        let after = self.spent();
        if self.is_held() {
            return None;
        }
        for ((target, before), after) in self.targets.iter().zip(before).zip(after) {
            let Some((rate, carried)) = self.carries(target) else { continue };
            let used = after - *before;
            let least = carried.during(MEASURE).percent(SERVED_PERCENT);
            if used < least {
                let what = format!(
                    "L2: {} ({}): {used:?} used in {} s, where {least:?} can be carried (limit {rate:?}): {}",
                    target.policy,
                    target.value,
                    MEASURE.0 / 1_000_000,
                    self.describe(target)
                );
                return Some(Broken { at: self.time.now(), what });
            }
        }
        None
    }

    /// Where a limit is at this instant, for messages.
    fn describe(&self, target: &Target) -> String {
        let pool = self.watch.with_pool(|pool| {
            let cut = pool.policies().find(|p| *p.policy.name == *target.policy).map(|p| p.policy.clone());
            format!("{cut:?}; log {}; pool {:?}", self.logs.describe(), pool.bucket(target.bucket))
        });
        let regions = self.regions.iter().map(|region| {
            let part = region.part(&target.policy);
            let level = spendable(region, target);
            let stored = region.shelf.describe(target.bucket);
            format!("{}: up {}, part {part:?}, level {level:?}, stored {stored}", region.name, region.is_up())
        });
        format!("{pool}; {}", regions.collect::<Vec<_>>().join("; "))
    }

    fn spent(&self) -> Vec<Tokens> {
        self.targets.iter().map(|target| self.watch.spent_of(target.bucket)).collect()
    }

    fn outcome(&self, broken: Option<Broken>) -> anyhow::Result<Outcome> {
        let counts =
            Counts { windows: self.quotas.windows(), permits: self.permits.taken(), ..self.watch.counts() };
        let mut history = std::mem::take(&mut *self.history());
        history.end = self.time.now();
        let fingerprint = [
            counts.commits,
            counts.records,
            counts.refused,
            counts.spent.0.unsigned_abs(),
            self.chance.int(0, i64::MAX - 1).unsigned_abs(),
        ];
        let fingerprint = fingerprint.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, n| {
            (hash ^ n).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
        });
        history.limits = self.watched();
        let broken = broken.or_else(|| judged(&history));
        let history = self.record.then_some(history);
        let raft = self.logs.counts();
        Ok(Outcome { violation: broken, counts, raft, fingerprint, history, end: self.time.now() })
    }

    fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Faults,
            1 => Phase::Quiet,
            2 => Phase::Demand,
            _ => Phase::Over,
        }
    }

    fn history(&self) -> std::sync::MutexGuard<'_, oracle::History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The promises that clients of a simulation judge; what is available and when, the simulation knows better by itself.
pub(crate) const JUDGED: [&dyn Invariant; 3] = [&StrictBound, &ApproximateBound, &SplitBound];

impl Broken {
    /// Is it what this bug breaks by its nature? Some leave a mess, too, that trips other checks; that proves nothing.
    #[must_use]
    pub fn shows(&self, bug: Bug) -> bool {
        match bug {
            // A healed cluster whose time stands still does not settle.
            Bug::LeaderWallClock => true,
            // What was given up is used.
            Bug::ForgetUnanswered => self.what.starts_with("S3"),
            _ => !self.what.starts_with('L'),
        }
    }

    /// What is seen, in a few words.
    #[must_use]
    pub fn seen(&self) -> &'static str {
        const SEEN: [(&str, &str); 13] = [
            ("S1", "more is spent in a window than may be (S1)"),
            ("S2", "more could be spent at one instant than may be (S2)"),
            ("S3", "a lease is larger or longer than the pool says (S3)"),
            ("S5", "a region uses what it has lent of its reserve (S5)"),
            ("S4", "the pool's books do not balance (S4)"),
            ("Q1", "more of a quota is spent in a window than may be (Q1; with `--quotas`)"),
            ("Q2", "the time of day is ahead of a majority of the clocks (Q2; with `--quotas`)"),
            ("P1", "more permits are held at once than there are (P1; with `--permits`)"),
            ("L1", "a healed cluster does not settle (L1)"),
            ("L2", "a healed cluster does not use its limits (L2)"),
            ("strict-bound", "clients are let through beyond the limit (strict-bound)"),
            ("approximate-bound", "clients are let through beyond the limit (approximate-bound)"),
            ("split-bound", "clients are let through beyond a region's part (split-bound)"),
        ];
        let found = SEEN.iter().find(|(check, _)| self.what.starts_with(check));
        found.map_or("the log itself is broken", |(_, seen)| seen)
    }

    /// For the report.
    fn judged(self) -> Judged {
        let breach = Breach { detail: self.what, span: (self.at, self.at), limit: None, region: None };
        Judged {
            name: "simulation".into(),
            promise: "At every instant no more is spent, nor could be, than is promised; and once healed, all of it is.".into(),
            verdict: Verdict::Broken { breaches: vec![breach] },
        }
    }
}

/// What clients saw must keep the promises too.
fn judged(history: &oracle::History) -> Option<Broken> {
    JUDGED.into_iter().find_map(|invariant| match invariant.check(history) {
        Verdict::Broken { breaches } => {
            let worst = breaches.first()?;
            Some(Broken { at: worst.span.1, what: format!("{}: {}", invariant.name(), worst.detail) })
        }
        Verdict::Held { .. } | Verdict::NotApplicable { .. } => None,
    })
}

/// What a region could spend of a bucket at this instant.
fn spendable(region: &Region, target: &Target) -> Tokens {
    let part = region.part(&target.policy);
    part.map_or(Tokens::ZERO, |(shape, unseen)| region.shelf.spendable(target.bucket, shape, unseen))
}

/// What a region has of a bucket at this instant.
fn held(region: &Region, target: &Target, pool: &Pool) -> Held {
    let part = region.part(&target.policy);
    let coming =
        part.map(|(shape, unseen)| region.shelf.coming(target.bucket, shape, unseen, pool, &region.name));
    let coming = coming.unwrap_or_default();
    let lease = part.map(|(shape, unseen)| region.shelf.lease(target.bucket, shape, unseen));
    let lease = lease.unwrap_or_default();
    let idle = part.map_or(Rate::MAX, |(shape, unseen)| region.shelf.idle(target.bucket, shape, unseen));
    Held { region: region.name.clone(), spendable: spendable(region, target), coming, lease, idle }
}

/// The pool of a cluster that was just founded.
fn found(regions: &[RegionName], policies: Vec<Policy>) -> Pool {
    let mut pool = Pool::default();
    let ops = vec![Op::Found { regions: regions.to_vec(), policies }];
    pool.apply(0, &Entry { stamp: Stamp { term: 0, tau: Micros::ZERO }, ops });
    pool
}
