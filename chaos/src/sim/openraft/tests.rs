use super::*;
use crate::sim::machine::{Clock, Clocks, pass};
use quorate::bugs::{self, Bug};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// A cluster.
struct Bench {
    time: TrueTime,
    chance: Chance,
    net: Arc<Net>,
    machines: Vec<Arc<Machine>>,
    rafts: Arc<Openrafts>,
}

/// The longest that a message takes on a good line.
const DELAY: Micros = Micros::millis(40);
const LOG: LogLimits = LogLimits { snapshot_entries: 40, entries_kept: 10 };

/// Runs a test in simulated time.
fn simulate<T, F: Future<Output = T>>(
    seed: u64,
    regions: usize,
    test: impl FnOnce(Arc<Bench>) -> F,
) -> (T, Duration) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let done = runtime.block_on(async {
        let begun = Instant::now();
        let done = test(Arc::new(Bench::new(seed, regions))).await;
        (done, begun.elapsed())
    });
    runtime.shutdown_background();
    done
}

impl Bench {
    fn new(seed: u64, regions: usize) -> Self {
        let (time, chance) = (TrueTime::begin(), Chance::new(seed));
        let clock = || Clock::any(&chance, 10_000);
        let net = Net::new(chance.clone(), regions, |_, _| chance.time(Micros::millis(5), DELAY));
        let net = Arc::new(net);
        let machines: Vec<_> =
            (0..regions).map(|_| Machine::new(time, Clocks { monotonic: clock(), wall: clock() })).collect();
        let habits = Habits {
            rtt_max: (DELAY + DELAY).percent(120),
            disk: Micros::millis(15),
            log: LOG,
            propose_every: Micros::millis(400),
        };
        let rafts = Openrafts::new(
            (time, chance.clone()),
            Arc::clone(&net),
            machines.clone(),
            habits,
            Vec::new(),
            Box::new(|_, _, _| ()),
        );
        Self { time, chance, net, machines, rafts: rafts.unwrap() }
    }

    async fn start_all(self: &Arc<Self>) {
        for region in 0..self.machines.len() {
            self.start(region);
        }
        self.eventually("a leader", |bench| bench.rafts.leader().is_some()).await;
    }

    /// Starts a region's daemon.
    fn start(self: &Arc<Self>, region: usize) {
        let bench = Arc::clone(self);
        tokio::spawn(async move {
            bench.rafts.start(region).await.unwrap();
        });
    }

    fn crash(&self, region: usize, power: bool) {
        self.machines[region].crash();
        self.rafts.crash(region, power);
    }

    /// All lines of a region, in both directions.
    fn cut(&self, region: usize, cut: bool) {
        for other in (0..self.machines.len()).filter(|other| *other != region) {
            self.net.change(region, other, |line| line.cut = cut);
            self.net.change(other, region, |line| line.cut = cut);
        }
    }

    fn applied(&self, region: usize) -> u64 {
        let status = self.rafts.raft(region).map(|raft| raft.status());
        status.and_then(|status| status.applied).unwrap_or(0)
    }

    /// Waits for something that must come true within half a minute.
    async fn eventually(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let waited = async {
            while !holds(self) {
                pass(Micros::millis(50)).await;
            }
        };
        if timeout(Duration::from_secs(30), waited).await.is_err() {
            panic!("no {what} at {:?}: {:#?}", self.time.now(), self.rafts.statuses());
        }
        self.sound();
    }

    fn sound(&self) {
        if let Some(fault) = self.rafts.fault() {
            panic!("at {:?}: {fault}", self.time.now());
        }
    }

    /// Everything that was committed is applied everywhere.
    async fn together(&self) {
        let last = self.rafts.counts().last;
        let all = |bench: &Self| (0..bench.machines.len()).all(|region| bench.applied(region) > last);
        self.eventually("agreement", all).await;
    }
}

#[test]
fn a_cluster_is_founded_and_goes_on_under_loss() {
    let (ends, _) = simulate(1, 3, |bench| async move {
        for (a, b) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
            bench.net.change(a, b, |line| (line.lost, line.doubled, line.late) = (15, 10, 1));
        }
        bench.start_all().await;
        pass(Micros::seconds(60)).await;
        bench.together().await;
        bench.rafts.counts().ends
    });
    assert!(ends.done > 100, "{ends:?}");
    assert!(ends.unknown > 0, "loss must have cost some answers: {ends:?}");
}

#[test]
fn an_isolated_leader_is_replaced_and_what_it_could_not_commit_is_not_done() {
    let (ends, _) = simulate(2, 3, |bench| async move {
        bench.start_all().await;
        pass(Micros::seconds(5)).await;
        let old = bench.rafts.leader().unwrap();
        let applied = bench.applied(old);
        bench.cut(old, true);
        bench.eventually("new leader", |bench| bench.rafts.leader().is_some_and(|l| l != old)).await;
        pass(Micros::seconds(10)).await;
        let others = (0..3).filter(|region| *region != old).map(|region| bench.applied(region)).max();
        assert!(others.unwrap() > bench.applied(old), "the others go on without it");
        assert!(bench.applied(old) < applied + 40, "alone it commits nothing");
        bench.cut(old, false);
        bench.together().await;
        bench.rafts.counts().ends
    });
    assert!(ends.unknown > 0 && ends.done > 100, "{ends:?}");
}

#[test]
fn a_power_cut_everywhere_loses_nothing_that_was_acknowledged() {
    let (lost, _) = simulate(3, 3, |bench| async move {
        bench.start_all().await;
        for _ in 0..20 {
            pass(Micros::seconds(3)).await;
            (0..3).for_each(|region| bench.crash(region, true));
            pass(Micros::millis(200)).await;
            bench.start_all().await;
        }
        pass(Micros::seconds(5)).await;
        bench.together().await;
        bench.rafts.counts().lost
    });
    assert!(lost > 0, "no crash came between a write and its sync");
}

#[test]
fn a_node_that_was_away_gets_a_snapshot() {
    simulate(4, 3, |bench| async move {
        bench.start_all().await;
        let away = (0..3).find(|region| Some(*region) != bench.rafts.leader()).unwrap();
        bench.crash(away, true);
        let before = bench.rafts.counts().last;
        bench.eventually("a purged log", |bench| bench.rafts.counts().last > before + 200).await;
        let restored = bench.rafts.counts().restored;
        bench.start(away);
        bench.together().await;
        assert!(bench.rafts.counts().restored > restored, "{:?}", bench.rafts.counts());
    });
}

#[test]
fn a_region_that_lost_its_disk_does_not_come_back_under_its_old_name() {
    simulate(5, 3, |bench| async move {
        bench.start_all().await;
        bench.crash(1, true);
        bench.rafts.nodes[1].disk.wipe();
        std::fs::remove_dir_all(bench.rafts.dirs.path().join("r1")).unwrap();
        let refused = bench.rafts.start(1).await.unwrap_err();
        assert!(refused.to_string().contains("met this region with data"), "{refused}");
        pass(Micros::seconds(5)).await;
    });
}

#[test]
fn a_raft_clock_that_runs_fast_is_seen() {
    for bug in [Bug::NoDriftDiscount, Bug::LeaderWallClock] {
        bugs::plant(Some(bug));
        let (fault, _) = simulate(6, 3, |bench| async move {
            bench.start_all().await;
            let now = bench.time.now();
            for machine in &bench.machines {
                machine.clocks().monotonic.bend(now, 10_000);
            }
            pass(Micros::seconds(5)).await;
            for machine in &bench.machines {
                machine.clocks().wall.step(bench.time.now(), Micros::seconds(3_600));
            }
            pass(Micros::seconds(5)).await;
            bench.rafts.fault()
        });
        bugs::plant(None);
        assert!(fault.as_ref().is_some_and(|fault| fault.starts_with("R2")), "{bug}: {fault:?}");
    }
}

#[test]
fn nodes_that_disagree_are_seen() {
    let fault = |act: fn(&Seen)| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _inside = runtime.enter();
        let seen =
            Seen { time: TrueTime::begin(), state: Mutex::default(), on_commit: Box::new(|_, _, _| ()) };
        seen.applied(1, 7, None, &Pool::default());
        seen.applied(2, 7, Some(&Entry::default()), &Pool::default());
        act(&seen);
        seen.state().fault.clone().unwrap_or_default()
    };
    assert_eq!(fault(|seen| seen.applied(2, 7, Some(&Entry::default()), &Pool::default())), "");
    assert_eq!(fault(|seen| seen.restored(2, &Pool::default())), "");
    assert!(
        fault(|seen| seen.applied(2, 8, Some(&Entry::default()), &Pool::default())).contains("two entries")
    );
    assert!(fault(|seen| seen.applied(2, 7, None, &Pool::default())).contains("two entries"));
    assert!(fault(|seen| seen.applied(4, 7, None, &Pool::default())).contains("before the one before"));
    let differs =
        [fault(|seen| seen.applied(1, 7, None, &another())), fault(|seen| seen.restored(2, &another()))];
    assert!(differs.iter().all(|fault| fault.contains("pool")), "{differs:?}");
}

fn another() -> Pool {
    let mut pool = Pool::default();
    pool.apply(1, &Entry { stamp: Stamp { term: 1, tau: Micros(5) }, ops: Vec::new() });
    pool
}

/// One seed of everything at once: what it came to.
fn storm(seed: u64) -> (Counts, i64) {
    let regions = [3, 3, 5, 2][usize::try_from(seed % 4).unwrap()];
    let (outcome, _) = simulate(seed, regions, |bench| async move {
        bench.start_all().await;
        let over = bench.time.now() + Micros::seconds(40);
        while bench.time.now() < over {
            pass(bench.chance.time(Micros::millis(50), Micros::seconds(3))).await;
            bench.sound();
            bench.break_one();
        }
        bench.heal();
        bench.eventually("a leader", |bench| bench.rafts.leader().is_some()).await;
        bench.together().await;
        // Nothing is waited for longer than this.
        pass(Micros::seconds(50)).await;
        bench.together().await;
        // The next of the seed's numbers: equal if all before it were.
        (bench.rafts.counts(), bench.chance.int(0, i64::MAX - 1))
    });
    outcome
}

impl Bench {
    fn break_one(self: &Arc<Self>) {
        let n = self.machines.len();
        let a = self.chance.index(n);
        let b = (a + 1 + self.chance.index(n - 1)) % n;
        let long = self.chance.time(Micros::millis(100), Micros::seconds(8));
        let bench = Arc::clone(self);
        match self.chance.int(0, 8) {
            0 => self.cut(a, true),
            1 => self.net.change(a, b, |line| line.cut = true),
            2 => {
                let (lost, doubled, late) =
                    (self.chance.int(0, 60), self.chance.int(0, 30), self.chance.int(0, 10));
                self.net.change(a, b, |line| {
                    (line.lost, line.doubled, line.late) = (lost, doubled, late);
                });
            }
            3 => self.net.change(a, b, |line| line.most = Micros::seconds(2)),
            4 => return self.machines[a].pause(long),
            5 | 6 if self.rafts.raft(a).is_some() => {
                self.crash(a, self.chance.percent(50));
                tokio::spawn(async move {
                    pass(long).await;
                    bench.start(a);
                });
                return;
            }
            7 => {
                let ppm = self.chance.pick(&[-10_000, 0, 10_000]);
                self.machines[a].clocks().monotonic.bend(self.time.now(), ppm);
                return;
            }
            _ => return,
        }
        tokio::spawn(async move {
            pass(long).await;
            bench.mend(a);
        });
    }

    fn mend(&self, region: usize) {
        for other in (0..self.machines.len()).filter(|other| *other != region) {
            self.net.change(region, other, |line| *line = crate::sim::net::Line::good(DELAY));
            self.net.change(other, region, |line| *line = crate::sim::net::Line::good(DELAY));
        }
    }

    fn heal(&self) {
        (0..self.machines.len()).for_each(|region| self.mend(region));
        self.machines.iter().for_each(|machine| machine.resume());
    }
}

#[test]
fn storms_break_nothing() {
    for seed in seeds() {
        let (counts, _) = storm(seed);
        println!("seed {seed}: {counts:?}");
        assert!(counts.ends.done > 20, "seed {seed}: {counts:?}");
    }
}

#[test]
fn a_seed_repeats() {
    for seed in [7, 8] {
        assert_eq!(storm(seed), storm(seed), "seed {seed}");
    }
}

/// `SIM_SEEDS=1..500` runs more than the few that a test run has time for.
fn seeds() -> std::ops::Range<u64> {
    let asked = std::env::var("SIM_SEEDS").ok();
    let range = asked.as_deref().and_then(|text| text.split_once(".."));
    range.map_or(1..5, |(from, to)| from.parse().unwrap()..to.parse().unwrap())
}
