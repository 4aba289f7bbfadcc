//! Limits that count, in Redis and by `quota::counted`.

use super::*;
use crate::quota::counted::lent::{self, LENT_LEASE_MAX, Slice};
use crate::quota::counted::{self, Act, Allowance, Counted, Kind, permits::LeaseId};
use crate::store::CountCharge;

/// Count buckets of a trace: so many of each kind.
const EACH: usize = 2;

/// What the scripts keep, by `quota::counted`, and what a trace asks of it.
#[derive(Default)]
pub(super) struct Counts {
    stored: HashMap<BucketId, Counted>,
    /// Those that this call has changed.
    spans: HashMap<BucketId, Micros>,
    allowances: Vec<(Kind, Allowance)>,
    /// Leases that were given out, with how many permits, and of which bucket.
    leases: Vec<(usize, LeaseId, i64)>,
    next_lease: u64,
    pub(super) fits: [[u64; 2]; 3],
    pub(super) renewals: [u64; 2],
    /// Renewals of leases that are there, and of which there are too many.
    pub(super) refused: u64,
    /// Permits that do not last for a whole span.
    pub(super) cut_short: u64,
    /// Slices of which more was kept than there was to be.
    pub(super) kept: u64,
}

/// Is it a bucket of these?
pub(super) fn is_one(id: &BucketId) -> bool {
    id.0[0] >= 100
}

impl Counts {
    pub(super) fn stored(&self) -> impl Iterator<Item = &BucketId> {
        self.stored.keys()
    }

    /// The charges on counts of one request, checked; to be committed when it is known whether all fits.
    pub(super) fn check(
        &self,
        take: &Take,
        generation: Generation,
        slice: impl Fn(BucketId) -> Slice,
        when: Moment,
    ) -> Drafted {
        let (asked, charges) = take.numbered_counts();
        let settled = asked.iter().map(|(id, kind, allowance)| {
            let mut count = self.stored.get(id).cloned().unwrap_or_else(|| Counted::new(*kind));
            count.settle(allowance.span, when.now);
            (count, allowance.under(generation, when.now).with(slice(*id)))
        });
        let settled: Vec<_> = settled.collect();
        let checked = counted::check(&settled, &charges, when);
        Drafted { ids: asked.iter().map(|(id, ..)| *id).collect(), charges, settled, checked }
    }

    pub(super) fn commit(&mut self, mut draft: Drafted, allowed: bool, when: Moment) -> Vec<counted::Seen> {
        let (seen, changed) = draft.checked.commit(allowed, &mut draft.settled, &draft.charges, when);
        for ((id, (count, allowance)), _) in
            draft.ids.iter().zip(draft.settled).zip(changed).filter(|(_, changed)| *changed)
        {
            self.spans.insert(*id, allowance.span);
            self.stored.insert(*id, count);
        }
        seen
    }

    /// At the end of a call: Redis keeps no key for nothing.
    pub(super) fn forget(&mut self) {
        let spans = std::mem::take(&mut self.spans);
        self.stored.retain(|id, count| {
            spans.get(id).is_none_or(|span| count.keep_until(*span) != bucket::KEEP_MARGIN)
        });
    }

    /// Tells what was tried: a trace that never denies, or only denies, shows nothing.
    pub(super) fn note(&mut self, take: &Take, taken: &Taken) {
        for (charge, seen) in take.counts.iter().zip(&taken.counts) {
            let lasts = seen.lasts.is_positive().then_some(seen.lasts);
            self.cut_short += u64::from(lasts.is_some_and(|lasts| lasts < charge.allowance.span));
            match charge.act {
                Act::Renew(_) => {
                    self.renewals[usize::from(seen.fits)] += 1;
                    self.refused += u64::from(seen.wait.is_some());
                }
                Act::Release(_) => {}
                Act::Count | Act::Acquire(_) => {
                    self.fits[usize::from(charge.kind.number()) - 1][usize::from(seen.fits)] += 1;
                }
            }
        }
    }
}

pub(super) struct Drafted {
    ids: Vec<BucketId>,
    charges: Vec<counted::Charge>,
    settled: Vec<(Counted, Allowance)>,
    pub(super) checked: counted::Checked,
}

impl Trace<'_> {
    pub(super) fn reallow(&mut self, i: usize) {
        let kind = [Kind::Counters, Kind::Log, Kind::Permits][i / EACH];
        let span = match self.rng.random_range(0..6) {
            // Leases are to live to be renewed.
            _ if kind == Kind::Permits => self.rng.random_range(5..60) * 1_000_000,
            0 => 1_000_000,
            1 => self.rng.random_range(1_000_000..5_000_000),
            2 => 366 * 86_400_000_000,
            _ => self.rng.random_range(1..30) * 1_000_000,
        };
        let limit = match (self.rng.random_range(0..8), kind) {
            (0, _) => 0,
            (1, Kind::Counters) => counted::COUNT_MAX,
            (2, _) => 10_000,
            (3, _) => self.rng.random_range(0..1_000),
            _ => self.rng.random_range(1..12),
        };
        let held = self.rng.random_range(0..=limit);
        let until = match self.rng.random_bool(0.3) {
            true => self.now + self.rng.random_range(-5_000_000..10_000_000),
            false => 0,
        };
        // As in the product, where another span of a window is another bucket.
        let span = match self.counts.allowances.get(i) {
            Some((_, known)) if kind != Kind::Permits => known.span,
            _ => Micros(span),
        };
        let lent = (kind == Kind::Permits && self.rng.random_bool(0.7)).then(Slice::default);
        let life = Micros(self.rng.random_range(0..2) * self.rng.random_range(0..80_000_000));
        let allowance = Allowance { limit, span, until: Micros(until), held, life, lent };
        match self.counts.allowances.get_mut(i) {
            Some(known) => *known = (kind, allowance),
            None => self.counts.allowances.push((kind, allowance)),
        }
    }

    pub(super) fn reallow_all(&mut self) {
        (0..3 * EACH).for_each(|i| self.reallow(i));
    }

    pub(super) fn reallow_one(&mut self) {
        let i = self.rng.random_range(0..3 * EACH);
        self.reallow(i);
    }

    fn lease(&mut self) -> LeaseId {
        self.counts.next_lease += 1;
        let mut id = [7; 16];
        id[..8].copy_from_slice(&self.counts.next_lease.to_le_bytes());
        LeaseId(id)
    }

    pub(super) fn claim(&mut self, leased: &mut Vec<usize>) -> CountCharge {
        let mut i = self.rng.random_range(0..3 * EACH);
        let (mut kind, mut allowance) = self.counts.allowances[i];
        let limit = allowance.limit.clamp(1, 30);
        let mut cost = match self.rng.random_range(0..10) {
            0 => 0,
            1 | 2 => -self.rng.random_range(1..=limit),
            3 => allowance.limit + self.rng.random_range(0..2),
            _ => self.rng.random_range(1..=limit.min(6)),
        };
        let mut act = Act::Count;
        if kind == Kind::Permits && self.rng.random_bool(0.9) {
            let lease = self.lease();
            cost = cost.clamp(1, 50);
            act = Act::Acquire(lease);
            let known = self.counts.leases.len();
            if known > 0 && self.rng.random_bool(0.5) {
                let at = self.rng.random_range(known.saturating_sub(4)..known);
                let (of, lease, count) = self.counts.leases[at];
                // A request names a lease once.
                if !leased.contains(&at) {
                    leased.push(at);
                    i = of;
                    (kind, allowance) = self.counts.allowances[i];
                    cost = if self.rng.random_bool(0.1) { count + 1 } else { count };
                    act = if self.rng.random() { Act::Renew(lease) } else { Act::Release(lease) };
                }
            } else {
                self.counts.leases.push((i, lease, cost));
                leased.push(known);
            }
        }
        let bucket = BucketId([100 + u8::try_from(i).unwrap(); 16]);
        CountCharge {
            bucket,
            kind,
            allowance,
            cost: Tokens::whole(cost),
            act,
            enforce: self.rng.random_bool(0.7),
        }
    }

    /// Permits, and what the region may use of them.
    fn permits(&mut self) -> (BucketId, Allowance) {
        let i = 2 * EACH + self.rng.random_range(0..EACH);
        let allowance = Allowance { lent: Some(Slice::default()), ..self.counts.allowances[i].1 };
        (BucketId([100 + u8::try_from(i).unwrap(); 16]), allowance)
    }

    /// What is in use of permits, by the model.
    fn in_use(&self, id: BucketId, allowance: &Allowance, when: Moment) -> (Counted, Allowance) {
        let count = self.counts.stored.get(&id).cloned().unwrap_or_else(|| Counted::new(Kind::Permits));
        (count, allowance.under(self.model.generation, when.now))
    }

    pub(super) async fn prepares_permits(&mut self) {
        let (window, when) = self.tick().await;
        let mut asks = Vec::new();
        for _ in 0..self.rng.random_range(1..3) {
            let (bucket, allowance) = self.permits();
            self.seq += self.rng.random_range(0..2_u64);
            let hold_burst = Tokens(self.rng.random_range(0..8_000_000));
            asks.push(Prepare {
                bucket,
                shape: Shape::default(),
                unseen: None,
                seq: self.seq,
                hold_burst,
                hold_rate: Rate::ZERO,
                permits: Some(allowance),
                lend_rate: Rate::ZERO,
                lend_for: Micros::ZERO,
            });
        }
        let call = self.stem.prepare_permits(window, &asks);
        let answer = self.run(&self.scripts.prepare_permits, call).await;
        let prepared = answer.and_then(|answer| wire::prepared_permits(answer, asks.len()));
        let Some(when) = when else { return assert_eq!(prepared.unwrap_err(), Fault::Clock) };
        let mut expected = Vec::new();
        for ask in &asks {
            let before = self.model.settle(ask.bucket, Shape::default(), None, when);
            let (count, allowance) = self.in_use(ask.bucket, &ask.permits.unwrap(), when);
            let mut b = before;
            let kept = lent::shrink(&mut b, &count, &allowance, ask.hold_burst, when.now);
            b.fence_for(LENT_LEASE_MAX, ask.seq, self.model.session, when);
            self.model.put(ask.bucket, true, b);
            self.counts.kept += u64::from(kept.leased && kept.held > ask.hold_burst);
            let (leased, level, burst) = (kept.leased, kept.left, kept.held);
            expected.push(Prepared { leased, level, burst, ..Prepared::default() });
        }
        assert_eq!(prepared.unwrap(), (when.now, expected), "{asks:?}");
        self.check_expiry().await;
    }

    pub(super) async fn installs_permits(&mut self) {
        let (window, when) = self.tick().await;
        let mut records = Vec::new();
        for _ in 0..self.rng.random_range(1..3) {
            let (bucket, allowance) = self.permits();
            self.seq += self.rng.random_range(0..2_u64);
            let grant = Grant {
                seq: self.seq,
                push: self.rng.random_range(0..3),
                granted: Tokens::ZERO,
                burst: Tokens::whole(self.rng.random_range(0..8)),
                rate: Rate::ZERO,
                deadline: Micros(self.now + self.rng.random_range(-1_000_000..60_000_000)),
            };
            let shape = Shape::default();
            records.push(Install { bucket, shape, unseen: None, grant, permits: Some(allowance) });
        }
        let call = self.stem.install_permits(window, &records);
        let answer = self.run(&self.scripts.install_permits, call).await;
        let levels = answer.and_then(|answer| wire::installed(answer, records.len()));
        let Some(when) = when else { return assert_eq!(levels.unwrap_err(), Fault::Clock) };
        for record in &records {
            let before = self.model.settle(record.bucket, Shape::default(), None, when);
            let mut b = before;
            b.install(&record.grant, self.model.session, when);
            self.model.put(record.bucket, before != b, b);
        }
        let expected = records.iter().map(|record| {
            let b = self.model.settle(record.bucket, Shape::default(), None, when);
            let (count, allowance) = self.in_use(record.bucket, &record.permits.unwrap(), when);
            lent::left(&b, &count, &allowance, when.now)
        });
        assert_eq!(levels.unwrap(), expected.collect::<Vec<_>>(), "{records:?}");
        self.check_expiry().await;
    }
}
