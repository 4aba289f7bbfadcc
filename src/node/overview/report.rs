//! What this region says of itself: to people here, and to the other regions.

use super::super::Inner;
use crate::limiter::active::ActivePolicy;
use crate::limiter::meter::{Reading, per_second};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::counted::Seen;
use crate::quota::matching::CHARGES_MAX;
use crate::quota::policy::{BucketId, Limit};
use crate::server::state::{
    PEER_REPORT_BYTES_MAX, PeerBucket, PeerHot, PeerQuestion, PeerReport, RateState, RegionReport,
};
use crate::store::{AnyStore, RegionStore as _, Store as _, Take, Taken, TakenCharge};
use std::collections::{BTreeMap, HashMap};

/// Buckets in a report.
const BUCKETS_MAX: usize = 32;
/// Policies in a report.
const POLICIES_MAX: usize = 256;
/// A policy with traffic beyond the buckets that are reported counts as such for so many reports.
const INCOMPLETE_FOR: u32 = 60;

/// Rates so far, in thousandths of a token a second.
#[derive(Debug, Default)]
pub struct Smooth {
    policies: BTreeMap<String, RateState>,
    buckets: HashMap<BucketId, RateState>,
    /// By policy: reports until all of its traffic may be that of the buckets in them.
    incomplete: BTreeMap<String, u32>,
}

/// What there is to say. `held`: what the store holds of the busiest buckets; `time`: since the last reading.
pub fn report(
    smooth: &mut Smooth,
    reading: &Reading,
    held: &HashMap<BucketId, PeerBucket>,
    region: RegionReport,
    time: Micros,
    name: impl Fn(u32) -> Option<String>,
) -> PeerReport {
    let before = std::mem::take(&mut smooth.buckets);
    let mut buckets = Vec::new();
    let mut listed: HashMap<u32, Tokens> = HashMap::new();
    let mut cut_short = Vec::new();
    for bucket in &reading.buckets {
        let Some(policy) = name(bucket.policy) else { continue };
        let (admitted, denied) = (per_second(bucket.admitted, time), per_second(bucket.denied, time));
        let rate = smoothed(before.get(&bucket.bucket), thousandths(admitted), thousandths(denied));
        smooth.buckets.insert(bucket.bucket, rate);
        if buckets.len() >= BUCKETS_MAX {
            cut_short.push(policy);
            continue;
        }
        *listed.entry(bucket.policy).or_default() += bucket.admitted + bucket.denied;
        buckets.push(PeerHot {
            policy,
            bucket: bucket.bucket.to_string(),
            what: bucket.what.to_string(),
            admitted: rate.admitted,
            denied: rate.denied,
            remaining: bucket.remaining,
            holds: held.get(&bucket.bucket).copied(),
        });
    }
    let mut policies: BTreeMap<String, RateState> = BTreeMap::new();
    for (id, policy) in &reading.policies {
        let Some(name) = name(*id) else { continue };
        let rate = RateState {
            admitted: thousandths(per_second(policy.admitted, time)),
            denied: thousandths(per_second(policy.denied, time)),
            fallbacks: thousandths(per_second(count(policy.fallbacks), time)),
        };
        if policy.admitted + policy.denied > listed.get(id).copied().unwrap_or_default() {
            cut_short.push(name.clone());
        }
        policies.insert(name, rate);
    }
    smooth.policies(&mut policies);
    smooth.incomplete.retain(|_, left| {
        *left = left.saturating_sub(1);
        *left > 0
    });
    smooth.incomplete.extend(cut_short.into_iter().map(|name| (name, INCOMPLETE_FOR)));
    let complete = policies.keys().filter(|name| !smooth.incomplete.contains_key(*name)).cloned().collect();
    bounded(PeerReport { region, policies, complete, buckets })
}

impl Smooth {
    /// Smooths what was measured, and goes on with what was busy before.
    fn policies(&mut self, measured: &mut BTreeMap<String, RateState>) {
        for (name, before) in &self.policies {
            let now = measured.entry(name.clone()).or_default();
            let fallbacks = now.fallbacks;
            *now = RateState { fallbacks, ..smoothed(Some(before), now.admitted, now.denied) };
        }
        measured.retain(|_, rate| *rate != RateState::default());
        if measured.len() > POLICIES_MAX {
            let mut rates: Vec<u64> =
                measured.values().map(|r| r.admitted.saturating_add(r.denied)).collect();
            rates.sort_unstable_by(|a, b| b.cmp(a));
            let least = rates.get(POLICIES_MAX).copied().unwrap_or(0);
            measured.retain(|_, rate| rate.admitted.saturating_add(rate.denied) > least);
        }
        self.policies.clone_from(measured);
    }
}

/// A moving average over about two and a half readings. What is less than a hundredth of a token a second is nothing.
fn smoothed(before: Option<&RateState>, admitted: u64, denied: u64) -> RateState {
    let Some(before) = before else { return RateState { admitted, denied, fallbacks: 0 } };
    let mean = |old: u64, new: u64| {
        let mean = old.saturating_mul(2).saturating_add(new.saturating_mul(3)) / 5;
        if mean < 10 { 0 } else { mean }
    };
    RateState { admitted: mean(before.admitted, admitted), denied: mean(before.denied, denied), fallbacks: 0 }
}

fn thousandths(tokens: Tokens) -> u64 {
    u64::try_from(tokens.0 / 1_000).unwrap_or(0)
}

fn count(n: u64) -> Tokens {
    Tokens(i64::try_from(n).unwrap_or(i64::MAX).saturating_mul(1_000_000))
}

/// No more than may be sent: descriptions can be of characters that JSON writes in six bytes each.
fn bounded(mut report: PeerReport) -> PeerReport {
    let size = |report: &PeerReport| serde_json::to_vec(report).map_or(usize::MAX, |bytes| bytes.len());
    while size(&report) > PEER_REPORT_BYTES_MAX && !report.buckets.is_empty() {
        report.buckets.truncate(report.buckets.len() / 2);
        report.complete.clear();
    }
    if size(&report) > PEER_REPORT_BYTES_MAX {
        report.policies.clear();
        report.complete.clear();
    }
    report
}

impl Inner {
    /// What this region says of itself, at this moment.
    pub(in crate::node) fn report_region(&self) -> RegionReport {
        let status = self.raft.status();
        let voters: Vec<_> = status.members.iter().filter(|member| member.voter).collect();
        let reached = voters.iter().filter(|voter| {
            voter.region == self.config.region
                || status.peers.iter().any(|peer| peer.region == voter.region && peer.reachable)
        });
        RegionReport {
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            not_ready: Self::not_ready(self),
            quorum: reached.count() > voters.len() / 2,
            leader: status.leader.as_deref().map(str::to_owned),
            term: status.term,
            applied: status.applied.unwrap_or(0),
            policies_version: self.core.active.load().version,
            store: self.store_state(),
        }
    }

    /// What the store holds of the busiest buckets: one call for all of them.
    pub(super) async fn held(&self, reading: &Reading) -> HashMap<BucketId, PeerBucket> {
        let active = self.core.active.load_full();
        let busiest = reading.buckets.iter().take(BUCKETS_MAX.min(CHARGES_MAX));
        let mut asked = Asked::default();
        for bucket in busiest {
            let ask = active.policy(bucket.policy).and_then(|policy| self.ask_of(policy, bucket.bucket));
            if let Some(ask) = ask {
                asked.push(bucket.bucket, ask);
            }
        }
        if asked.take.is_empty() || self.store.session().borrow().session().is_none() {
            return HashMap::new();
        }
        asked.of(&self.store).await.collect()
    }

    /// Answers another region's question.
    pub(super) async fn answer(&self, question: &[u8]) -> Option<Vec<u8>> {
        match serde_json::from_slice(question).ok()? {
            PeerQuestion::Report => {
                let mine = self.overview.seen().mine.clone();
                serde_json::to_vec(&mine).ok()
            }
            PeerQuestion::Bucket { policy, bucket } => {
                let held = self.holds(&policy, bucket_in_hex(&bucket)?).await?;
                serde_json::to_vec(&held).ok()
            }
        }
    }

    /// What this region holds of a bucket; `None`: its store does not say, or there is no such limit.
    pub(in crate::node) async fn holds(&self, policy: &str, bucket: BucketId) -> Option<PeerBucket> {
        let active = self.core.active.load_full();
        let known = active.policies().find(|p| &*p.policy.name == policy)?;
        let mut asked = Asked::default();
        asked.push(bucket, self.ask_of(known, bucket)?);
        asked.of(&self.store).await.next().map(|(_, held)| held)
    }

    /// Asks what a bucket holds, without taking anything.
    fn ask_of(&self, policy: &ActivePolicy, bucket: BucketId) -> Option<Take> {
        let mut take = policy.take(bucket, Tokens::ZERO);
        if policy.window.is_some() {
            let turn = self.turn_of(&self.raft.pool().read(), policy.id, bucket)?;
            let unseen = Some(self.core.time.unseen(turn)?);
            for charge in &mut take.charges {
                (charge.shape, charge.unseen) = (policy.shape_in(turn), unseen);
            }
        }
        (policy.policy.limit != Limit::Unlimited).then_some(take)
    }
}

/// A bucket's id, as it is shown.
pub(in crate::node) fn bucket_in_hex(hex: &str) -> Option<BucketId> {
    let mut id = BucketId::default();
    let digits: Vec<u8> = hex.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    if digits.len() != id.0.len() * 2 {
        return None;
    }
    for (byte, pair) in id.0.iter_mut().zip(digits.chunks(2)) {
        *byte = pair.iter().fold(0, |byte, digit| byte << 4 | digit);
    }
    Some(id)
}

/// Asks what buckets hold, without taking anything.
#[derive(Default)]
struct Asked {
    take: Take,
    buckets: Vec<BucketId>,
    /// Those that count, with their limits.
    counts: Vec<(BucketId, i64)>,
}

impl Asked {
    fn push(&mut self, bucket: BucketId, Take { charges, counts }: Take) {
        self.buckets.extend(charges.iter().map(|_| bucket));
        self.counts.extend(counts.iter().map(|count| (bucket, Tokens::whole(count.allowance.limit).0)));
        self.take.charges.extend(charges);
        self.take.counts.extend(counts);
    }

    /// What the store says.
    async fn of(self, store: &AnyStore) -> impl Iterator<Item = (BucketId, PeerBucket)> {
        let taken = if self.take.is_empty() { None } else { store.take(self.take).await.ok() };
        let Taken { charges, counts, .. } = taken.unwrap_or_default();
        let bucket = |c: TakenCharge| PeerBucket { level: c.level.0, rate: c.rate.0, cap: c.cap.0 };
        let count = |((id, cap), seen): ((BucketId, i64), Seen)| {
            (id, PeerBucket { level: Tokens::whole(seen.left).0, rate: 0, cap })
        };
        let buckets = self.buckets.into_iter().zip(charges.into_iter().map(bucket));
        buckets.chain(self.counts.into_iter().zip(counts).map(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::meter::{BucketReading, PolicyReading};

    fn reading(buckets: u8, admitted: i64, all: i64) -> Reading {
        let bucket = |n: u8| BucketReading {
            bucket: BucketId([n; 16]),
            policy: 1,
            what: format!("tenant={n}").into(),
            admitted: Tokens::whole(admitted),
            denied: Tokens::ZERO,
            unchecked: Tokens::ZERO,
            given_back: Tokens::ZERO,
            total: Tokens::whole(admitted),
            remaining: 5,
            idle: 0,
        };
        let policy = PolicyReading { admitted: Tokens::whole(all), ..PolicyReading::default() };
        Reading { policies: [(1, policy)].into(), buckets: (0..buckets).map(bucket).collect() }
    }

    fn said(smooth: &mut Smooth, reading: &Reading, millis: i64) -> PeerReport {
        let name = |id| (id == 1).then(|| "p".to_owned());
        report(smooth, reading, &HashMap::new(), RegionReport::default(), Micros::millis(millis), name)
    }

    #[test]
    fn rates_are_by_the_time_that_has_passed_and_smooth() {
        let mut smooth = Smooth::default();
        let first = said(&mut smooth, &reading(1, 10, 10), 2_000);
        assert_eq!((first.policies["p"].admitted, first.buckets[0].admitted), (5_000, 5_000));
        assert_eq!(first.complete, ["p"]);
        let next = said(&mut smooth, &reading(1, 10, 10), 1_000);
        assert_eq!((next.policies["p"].admitted, next.buckets[0].admitted), (8_000, 8_000));
        let nothing = (0..40).map(|_| said(&mut smooth, &Reading::default(), 1_000)).last().unwrap();
        assert!(nothing.policies.is_empty(), "it fades to nothing: {nothing:?}");
    }

    #[test]
    fn traffic_beyond_the_listed_buckets_is_said_for_a_minute() {
        let mut smooth = Smooth::default();
        assert!(said(&mut smooth, &reading(2, 10, 21), 1_000).complete.is_empty());
        for _ in 1..INCOMPLETE_FOR {
            assert!(said(&mut smooth, &reading(2, 10, 20), 1_000).complete.is_empty());
        }
        assert_eq!(said(&mut smooth, &reading(2, 10, 20), 1_000).complete, ["p"]);
        let many = said(&mut Smooth::default(), &reading(40, 1, 40), 1_000);
        assert_eq!((many.buckets.len(), many.complete.len()), (BUCKETS_MAX, 0));
    }

    #[test]
    fn a_report_is_bounded_whatever_callers_send() {
        let mut nasty = reading(200, 1, 200);
        for bucket in &mut nasty.buckets {
            bucket.what = "\u{1}".repeat(crate::limiter::meter::WHAT_BYTES_MAX).into();
        }
        let report = said(&mut Smooth::default(), &nasty, 1_000);
        assert!(!report.buckets.is_empty());
        assert!(serde_json::to_vec(&report).unwrap().len() <= PEER_REPORT_BYTES_MAX);
    }

    #[test]
    fn ids_are_read_as_they_are_shown() {
        let id = BucketId([0x0f, 0xa1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff]);
        assert_eq!(bucket_in_hex(&id.to_string()), Some(id));
        for wrong in ["", "0f", &id.to_string()[1..], &format!("{id}00"), "zz"] {
            assert_eq!(bucket_in_hex(wrong), None, "{wrong}");
        }
    }
}
