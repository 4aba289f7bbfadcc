//! Policies and processes, by chance.

use super::*;

impl Node {
    pub(super) fn new(rng: &mut Rng, pool: &Pool, policy: u32, i: usize, drift: i64) -> Self {
        let mut clock = || Clock { real: 0, shown: rng.int(0, 1 << 40), ppm: rng.int(-drift, drift) };
        let (mono, store_clock) = (clock(), clock());
        let region = RegionId(i as u16);
        Node {
            region,
            life: i as u64 + 1,
            dead: false,
            mono,
            store_clock,
            replica: pool.clone(),
            applied: 1,
            seen: Stamp::default(),
            seen_at: mono.at(Micros(0)),
            epoch: None,
            nonce: i as u64 + 1_000_000,
            borrower: Borrower::new(mono.at(Micros(0))),
            ask: None,
            lend: None,
            resent: None,
            store: StoreBucket::default(),
            snapshot: StoreBucket::default(),
            generation: Generation { start: store_clock.at(Micros(0)), full: true, known: true },
            part: pool.usable(policy, region).unwrap_or_default(),
            unseen: None,
            lagging: None,
            cut_off: 0,
            paused: 0,
            filled: 0,
        }
    }
}

pub(super) fn bound(pool: &Pool, policy: u32) -> (Rate, Tokens) {
    pool.cut(policy).map_or((Rate::ZERO, Tokens::ZERO), |cut| (cut.rate, cut.burst + cut.overshoot()))
}

pub(super) fn some_policy(rng: &mut Rng) -> Policy {
    let burst = rng.pick(&[1, 3, 10, 20, 100, 1000]);
    let amount = (burst * rng.pick(&[5, 20, 100, 300, 1000, 3000]) / 100).max(1);
    let per = rng.pick(&[Unit::Second, Unit::Second, Unit::Second, Unit::Minute]);
    let amount = if rng.percent(10) { 0 } else { amount };
    let share = |p| Share::percent(p);
    let reserve = Reserve {
        rate: share(rng.pick(&[0, 10, 20, 50, 100])),
        burst: share(rng.pick(&[0, 10, 50, 80, 100])),
    };
    let mode = match rng.int(0, 9) {
        0..3 => Mode::Approximate { max_overshoot: share(rng.int(1, 100) as u32) },
        3 => Mode::Split,
        _ => Mode::Strict,
    };
    let mut p = policy("p", amount as u64, per, burst as u64, mode, reserve);
    if rng.percent(30) {
        p.weights = regions(6).into_iter().map(|r| (r, rng.int(0, 10) as u32)).collect();
    }
    p
}
