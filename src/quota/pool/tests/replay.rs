//! Replays recorded histories against an independent model of the protocol (one bucket, integers, no policies by name): after
//! every entry the pool's level and every live slice must come out the same, to the micro-token.
//!
//! The model differs on purpose in a few places, which the traces avoid: it takes the largest cost of a request from the
//! policy (here always one token), it was taught to keep tombstones for this recording, it counts the age of an ask from the
//! stamp alone (here the age is always zero), and idle reserves are never lent.
//!
//! A trace is a list of lines, amounts in micro-tokens and microseconds:
//! `policy regions amount unit burst overshoot-ppm reserve-rate-ppm reserve-burst-ppm`, then what each region must come out
//! with: `rate burst overdraft lease`; `entry term stamp-term tau`, with its `join region previous` and `ask region epoch seq
//! read-seq read-granted held-burst held-rate returned level demand want short seen-tau`; and `is tau level`, then for each live
//! record `region,epoch,seq,push,burst,rate,offer-burst,offer-rate,granted,lease,expires,ghost-burst,ghost-rate`.

use super::support::*;
use crate::quota::amount::{MICROS_PER_TOKEN, Micros, Rate, Tokens};
use crate::quota::policy::*;
use crate::quota::pool::*;

const BUCKET: BucketId = BucketId([3; 16]);

#[test]
fn the_model_agrees() {
    let mut pool = Pool::default();
    let mut next: Option<(u64, Entry)> = None;
    let (mut compared, mut granted) = (0, 0);
    for (number, line) in include_str!("../../../../tests/traces/pool.txt").lines().enumerate() {
        let (kind, rest) = line.split_once(' ').unwrap();
        let words: Vec<&str> = rest.split(' ').collect();
        let n = |i: usize| words[i].parse::<i64>().unwrap();
        match kind {
            "policy" => pool = found(&words),
            "entry" => {
                let stamp = Stamp { term: n(1) as u64, tau: Micros(n(2)) };
                next = Some((n(0) as u64, Entry { stamp, ops: Vec::new() }));
            }
            "join" => {
                let join = Join { region: RegionId(n(0) as u16), previous: n(1) as u64, nonce: 1 };
                next.as_mut().unwrap().1.ops.push(Op::Join(join));
            }
            "ask" => next.as_mut().unwrap().1.ops.push(Op::Ask(ask(n))),
            "is" => {
                let (term, entry) = next.take().unwrap();
                let applied = pool.apply(term, &entry);
                assert!(applied.breached.is_empty(), "line {}", number + 1);
                assert_eq!(state(&pool), rest, "line {}", number + 1);
                compared += 1;
                granted += words.len() - 2;
            }
            other => panic!("line {}: {other}?", number + 1),
        }
    }
    assert!(compared > 1_000 && granted > 2_000, "{compared} {granted}");
}

fn found(words: &[&str]) -> Pool {
    let n = |i: usize| words[i].parse::<u32>().unwrap();
    let per = if words[2] == "m" { Unit::Minute } else { Unit::Second };
    let share = |i| Share(n(i));
    let mode = if n(4) == 0 { Mode::Strict } else { Mode::Approximate { max_overshoot: share(4) } };
    let reserve = Reserve { rate: share(5), burst: share(6) };
    let policies = vec![policy("p", u64::from(n(1)), per, u64::from(n(3)), mode, reserve)];
    let mut pool = Pool::default();
    let ops = vec![Op::Found { regions: regions(n(0) as usize), policies }];
    pool.apply(1, &Entry { stamp: Stamp { term: 1, tau: Micros(0) }, ops });
    let cut = pool.cut(0).unwrap();
    let part = cut.parts[0];
    let got = [part.rate.0, part.burst.0, part.overdraft.0, cut.lease.0].map(|x| x.to_string());
    assert_eq!(got, words[7..11], "the policy is cut up in another way");
    pool
}

fn ask(n: impl Fn(usize) -> i64) -> Ask {
    Ask {
        region: RegionId(n(0) as u16),
        epoch: n(1) as u64,
        policy: 0,
        bucket: BUCKET,
        seq: n(2) as u64,
        read_seq: n(3) as u64,
        read_granted: Tokens(n(4)),
        held_burst: Tokens(n(5)),
        held_rate: Rate(n(6)),
        returned: Tokens(n(7)),
        level: Tokens(n(8)),
        demand: Rate(n(9)),
        want: Tokens(n(10)),
        short: Tokens(n(11)),
        quantum: Tokens(MICROS_PER_TOKEN),
        seen: Stamp { term: 0, tau: Micros(n(12)) },
        age: Micros(0),
    }
}

/// The state as a trace has it.
fn state(pool: &Pool) -> String {
    let mut text = format!("{} {}", pool.tau().0, pool.free(0, BUCKET, pool.tau()).0);
    let records = (0..64).filter_map(|i| pool.record(BUCKET, RegionId(i)));
    for r in records.filter(|r| r.live && r.expires > pool.tau()) {
        let ghost = r.ghost.as_deref().filter(|g| g.until > pool.tau()).copied().unwrap_or_default();
        let line = [
            i64::from(r.region.0),
            r.epoch as i64,
            r.seq as i64,
            i64::from(r.push),
            r.burst.0,
            r.rate.0,
            r.offer_burst.0,
            r.offer_rate.0,
            r.granted.0,
            r.lease.0,
            r.expires.0,
            ghost.burst.0,
            ghost.rate.0,
        ];
        text += &format!(" {}", line.map(|x| x.to_string()).join(","));
    }
    text
}
