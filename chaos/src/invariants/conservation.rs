//! Nothing is lent twice.

use super::figures::{count, decimal, tokens};
use super::spans::{Spans, isolated};
use super::{Breach, Invariant, Verdict};
use crate::oracle::{History, Sample, Watched};
use quorate::quota::amount::{Micros, Rate, Tokens};

/// What each replica of the pool believes adds up: free + lent + reserved = whole, in rate and in burst; the pool's level lies
/// within 0 and what is free; nothing that is lent or reserved is negative; no books are frozen.
///
/// What is free may be negative while a policy shrinks: in a sample of an edition that is changing, or of a replica that may
/// not have heard yet that the change is over (one recovery time later; or it had no quorum since).
#[derive(Clone, Copy, Debug)]
pub struct Conservation;

impl Invariant for Conservation {
    fn name(&self) -> &'static str {
        "conservation"
    }

    fn promise(&self) -> &'static str {
        "What is free, lent and reserved adds up to the whole limit at all times, and the pool's books are never frozen."
    }

    fn check(&self, history: &History) -> Verdict {
        if history.samples.is_empty() {
            return Verdict::NotApplicable { why: "nobody looked at the pool".into() };
        }
        let excuses: Vec<Vec<Spans>> =
            (0..history.limits.len()).map(|limit| excuses(history, limit)).collect();
        let mut breaches = Vec::new();
        let mut shrinking = 0;
        for sample in &history.samples {
            let excuses = excuses.get(sample.limit).and_then(|regions| regions.get(sample.by));
            let may_shrink = excuses.is_some_and(|spans| spans.touch(sample.at, sample.at));
            shrinking += usize::from(is_negative(sample));
            if let Some(detail) = fault(sample, may_shrink) {
                breaches.push(breach(history, sample, &detail));
            }
        }
        Verdict::of(merged(breaches), || Verdict::Held {
            detail: format!(
                "{} balanced; in {shrinking} of them a policy was shrinking",
                count(history.samples.len(), "sample")
            ),
        })
    }
}

/// When a replica (by region) may believe that this limit is shrinking.
fn excuses(history: &History, limit: usize) -> Vec<Spans> {
    let Some(watched) = history.limits.get(limit) else { return Vec::new() };
    let late = history.params.recovery_of(watched);
    let changes = changes(watched, late);
    let replica = |region| {
        let blind = isolated(history, region, late);
        let stale = blind.iter().filter(|(from, _)| changes.touch(*from, *from));
        Spans::new(changes.iter().chain(stale))
    };
    (0..history.regions.len()).map(replica).collect()
}

fn changes(watched: &Watched, late: Micros) -> Spans {
    let ends = watched.editions.iter().skip(1).map(|next| next.from + late).chain([Micros::MAX]);
    let editions = watched.editions.iter().zip(ends);
    Spans::new(editions.filter(|(edition, _)| edition.changing).map(|(edition, end)| (edition.from, end)))
}

fn is_negative(sample: &Sample) -> bool {
    sample.free.0 < Rate::ZERO || sample.free.1 < Tokens::ZERO
}

fn fault(sample: &Sample, may_shrink: bool) -> Option<String> {
    let (rate, burst, level) = sample.free;
    let lent: (Rate, Tokens) =
        (sample.lent.iter().map(|(r, _)| *r).sum(), sample.lent.iter().map(|(_, b)| *b).sum());
    if sample.frozen {
        return Some("the bucket's books are frozen".into());
    }
    if rate + lent.0 + sample.reserved.0 != sample.whole.0 {
        let [free, lent, reserved, whole] = [rate, lent.0, sample.reserved.0, sample.whole.0].map(exact);
        return Some(format!(
            "rates do not add up: {free} free + {lent} lent + {reserved} reserved is not {whole}"
        ));
    }
    if burst + lent.1 + sample.reserved.1 != sample.whole.1 {
        let [free, lent, reserved, whole] =
            [burst, lent.1, sample.reserved.1, sample.whole.1].map(|t| exact(Rate(t.0)));
        return Some(format!(
            "bursts do not add up: {free} free + {lent} lent + {reserved} reserved is not {whole}"
        ));
    }
    let parts = sample.lent.iter().chain([&sample.reserved]);
    if parts.into_iter().any(|(r, b)| *r < Rate::ZERO || *b < Tokens::ZERO) {
        return Some("something that is lent or reserved is negative".into());
    }
    if is_negative(sample) && !may_shrink {
        let (rate, burst) = (exact(rate), tokens(burst));
        return Some(format!("more is lent than there is: {rate}/s and {burst} tokens of burst are free"));
    }
    if level < Tokens::ZERO || level > burst.or_zero() {
        return Some(format!("the pool holds {} tokens, and {} are free", tokens(level), tokens(burst)));
    }
    None
}

fn exact(rate: Rate) -> String {
    decimal(rate.0, 6)
}

fn breach(history: &History, sample: &Sample, detail: &str) -> Breach {
    let limit = history.limits.get(sample.limit).map_or("?", |watched| watched.name.as_str());
    let by = history.regions.get(sample.by).map_or("?", String::as_str);
    let detail = format!("`{limit}` as seen in {by}: {detail}");
    Breach { detail, span: (sample.at, sample.at), limit: Some(sample.limit), region: Some(sample.by) }
}

/// One for each limit and region, from the first to the last time; the first ones first: what follows is often its consequence.
fn merged(mut breaches: Vec<Breach>) -> Vec<Breach> {
    breaches.sort_by_key(|b| (b.limit, b.region, b.span));
    breaches.dedup_by(|next, kept| {
        let same = (next.limit, next.region) == (kept.limit, kept.region);
        kept.span.1 = if same { kept.span.1.max(next.span.1) } else { kept.span.1 };
        same
    });
    breaches.sort_by_key(|b| b.span);
    breaches
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;
    use crate::oracle::Mode;

    fn rate_and_burst(rate: i64, burst: i64) -> (Rate, Tokens) {
        (Rate::per_second(rate), Tokens::whole(burst))
    }

    /// 100/s with a burst of 50: 10/s and 5 are reserved, 30/s and 20 are lent, the rest is free and full.
    fn sample(at: i64) -> Sample {
        Sample {
            at: ms(at),
            free: (Rate::per_second(60), Tokens::whole(25), Tokens::whole(25)),
            lent: vec![rate_and_burst(20, 15), rate_and_burst(10, 5)],
            reserved: rate_and_burst(10, 5),
            whole: rate_and_burst(100, 50),
            ..Sample::default()
        }
    }

    fn check(samples: Vec<Sample>) -> Verdict {
        let mut history = history_of(2, vec![edition(0, Mode::Strict, 100, 50)]);
        history.samples = samples;
        Conservation.check(&history)
    }

    #[test]
    fn books_that_balance_hold() {
        assert!(matches!(check(vec![sample(0), sample(500)]), Verdict::Held { .. }));
        assert!(matches!(check(vec![]), Verdict::NotApplicable { .. }));
    }

    #[test]
    fn each_way_to_lose_balance_breaks_it() {
        let breaks = |spoil: fn(&mut Sample), word: &str| {
            let mut spoilt = sample(500);
            spoil(&mut spoilt);
            let verdict = check(vec![sample(0), spoilt]);
            assert_eq!(verdict.breaches().first().map(|b| b.span), Some((ms(500), ms(500))), "{word}");
            assert!(verdict.detail().contains(word), "{}", verdict.detail());
        };
        breaks(|s| s.free.0 += Rate(1), "rates do not add up");
        breaks(|s| s.lent[1].0 -= Rate(1), "rates do not add up");
        breaks(|s| s.reserved.1 += Tokens(1), "bursts do not add up");
        breaks(|s| s.whole.1 -= Tokens(1), "bursts do not add up");
        breaks(|s| s.free.2 = Tokens::whole(26), "holds 26 tokens");
        breaks(|s| s.free.2 = Tokens(-1), "the pool holds");
        breaks(|s| s.frozen = true, "frozen");
        breaks(
            |s| {
                s.lent[0].0 += Rate::per_second(61);
                s.free.0 -= Rate::per_second(61);
            },
            "more is lent than there is",
        );
        breaks(
            |s| {
                s.lent[0].1 -= Tokens::whole(20);
                s.free.1 += Tokens::whole(20);
            },
            "negative",
        );
    }

    /// 20/s with a burst of 10, of which more is lent.
    fn shrunk(at: i64, by: usize) -> Sample {
        let free = (Rate::per_second(-20), Tokens::whole(-15), Tokens::ZERO);
        Sample { free, whole: rate_and_burst(20, 10), by, ..sample(at) }
    }

    #[test]
    fn a_pool_may_be_overdrawn_while_its_policy_shrinks_and_not_afterwards() {
        let changing = Edition { changing: true, ..edition(10_000, Mode::Strict, 100, 50) };
        let editions =
            vec![edition(0, Mode::Strict, 100, 50), changing, edition(20_000, Mode::Strict, 20, 10)];
        let mut history = history_of(2, editions);
        history.samples = vec![shrunk(15_000, 0), shrunk(25_000, 1)];
        assert!(!Conservation.check(&history).is_broken());
        history.samples.push(shrunk(41_000, 0));
        assert!(Conservation.check(&history).is_broken());
        history.samples[2].at = ms(9_000);
        assert!(Conservation.check(&history).is_broken());
    }

    #[test]
    fn a_replica_that_was_cut_off_meanwhile_may_believe_it_longer() {
        let changing = Edition { changing: true, ..edition(10_000, Mode::Strict, 100, 50) };
        let editions =
            vec![edition(0, Mode::Strict, 100, 50), changing, edition(20_000, Mode::Strict, 20, 10)];
        let mut history = history_of(2, editions);
        history.fault(1, ms(12_000), ms(50_000), "cut off").isolates = true;
        history.samples = vec![shrunk(49_000, 1)];
        assert!(!Conservation.check(&history).is_broken());
        history.samples[0].by = 0;
        assert!(Conservation.check(&history).is_broken());
    }
}
