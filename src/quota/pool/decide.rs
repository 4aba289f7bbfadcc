//! Who is to have how much of a bucket's pool: max-min fair over the demands on record.

use super::entry::RegionId;
use super::ledger::{Ledger, Record};
use super::permits;
use super::policies::Terms;
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::policy::LEASE_MIN;

/// Requests that got nothing are taken to be asking again for so long.
pub(super) const WAITS: Micros = Micros::seconds(3);

/// A region is to have this much of the rate that its demand needs, so that it need not ask at every breath.
const HEADROOM_PERCENT: i64 = 125;
/// Limits slower than this are served by tokens on demand, unless a region's bucket is roomy.
pub const SLOW: Rate = Rate::per_second(2);
/// For less than this a lease is not made shorter.
const LEASE_GAIN_PPM: i64 = 2_000;
/// Lease of tokens on demand: long enough to arrive and be spent.
const LEASE_ON_DEMAND: Micros = Micros::seconds(3);

/// What a region is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) rate: Rate,
    pub(super) burst: Tokens,
    pub(super) tokens: Tokens,
    pub(super) lease: Micros,
    /// Tokens for the requests at hand, no share of the rate.
    pub(super) on_demand: bool,
}

/// What a region is entitled to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entitlement {
    /// The rate that covers its demand ...
    bare: Rate,
    /// ... and with headroom, as far as that is left.
    rate: Rate,
    burst: Tokens,
}

/// The decision for a region whose record already says what it holds and needs. `level` and `short` as in its ask.
pub(super) fn decide(
    terms: &Terms<'_>,
    ledger: &Ledger,
    region: RegionId,
    level: Tokens,
    short: Tokens,
) -> Decision {
    let entitled = entitlements(terms, ledger);
    let mut pairs = ledger.records.iter().zip(&entitled);
    let Some((record, due)) = pairs.find(|(r, _)| r.region == region) else { return Decision::default() };
    if ledger.frozen || !terms.cut.pooled {
        return Decision::default();
    }
    if terms.permits {
        return permits::decide(terms, ledger, record, short);
    }
    if terms.windowed {
        return lend_for_good(terms, ledger, record, level, short);
    }
    let quantum = record.quantum;
    if on_demand(terms, record, due.burst) {
        let lease = lease_for(terms, ledger, record, Rate::ZERO, LEASE_ON_DEMAND);
        let (_, free_burst) = ledger.free_for(terms, record, ledger.at + lease);
        let share = due.burst.max(short.min(Tokens(quantum.0.saturating_mul(4)))).max(quantum);
        let mut tokens = short.min(share).min(ledger.level.tokens).min(free_burst - record.burst).or_zero();
        if tokens < short.min(quantum) {
            tokens = Tokens::ZERO; // a part of a request's cost is of use to nobody
        }
        let burst = (record.burst + tokens).min(free_burst.or_zero());
        return Decision { rate: Rate::ZERO, burst, tokens, lease, on_demand: true };
    }
    let lease = lease_for(terms, ledger, record, due.rate, terms.cut.lease);
    let (free_rate, free_burst) = ledger.free_for(terms, record, ledger.at + lease);
    let least = quantum.min(need(terms, ledger, record).burst);
    let mut burst = due.burst.max(least).min(free_burst.or_zero());
    let mut rate = due.rate.min(free_rate.or_zero());
    if burst < quantum {
        // A bucket that can never hold one request is of no use: leave it to others.
        burst = burst.min(record.burst);
        rate = rate.min(record.rate);
    }
    let missing = if burst >= quantum { (burst - level).or_zero() } else { Tokens::ZERO };
    let tokens = missing.min(ledger.level.tokens);
    if rate == Rate::ZERO {
        burst = burst.min(record.burst + tokens); // burst that nothing fills is better left in the pool
    }
    Decision { rate, burst, tokens, lease, on_demand: false }
}

/// The longest lease, of at most `full`, under which the region can have what it is entitled to: what loans to the pool back that end
/// before, it cannot have. Nor may it go on holding so much that they back: until it has read its record it may, and the pool counts
/// that until the lease ends.
fn lease_for(terms: &Terms<'_>, ledger: &Ledger, record: &Record, due: Rate, full: Micros) -> Micros {
    let free = |lease: Micros| ledger.free_for(terms, record, ledger.at + lease).0;
    let least = due.min(free(Micros::ZERO));
    let enough = |lease: &Micros| free(*lease).min(due) >= least - due.mul_div(LEASE_GAIN_PPM, 1_000_000);
    let held = record.rate.min(free(Micros::ZERO));
    let fits = |lease: &Micros| free(*lease) >= held;
    if fits(&full) && enough(&full) {
        return full;
    }
    let ends = terms.lent.after(ledger.at).map(|loan| loan.until - ledger.at);
    let shorter: Vec<Micros> = ends.filter(|lease| *lease < full && fits(lease)).collect();
    let worth = shorter.iter().filter(|lease| **lease >= LEASE_MIN && enough(lease)).max();
    let longest = if fits(&full) { Some(full) } else { shorter.iter().max().copied() };
    // What it holds fits until its older lease ends.
    worth.copied().or(longest).unwrap_or_else(|| (record.expires - ledger.at).or_zero().min(full))
}

/// Of a quota: tokens that do not come back unless the region returns them, so only for what it is about to spend. A region that
/// is cut off must not take much with it, nor may the last tokens all go to the first who asks: at most a hundredth of the
/// quota, and of what is left half of a fair share, but always enough for one request.
fn lend_for_good(
    terms: &Terms<'_>,
    ledger: &Ledger,
    record: &Record,
    level: Tokens,
    short: Tokens,
) -> Decision {
    let part = part(terms, record.region);
    let (left, quantum) = (ledger.level.tokens.or_zero(), record.quantum);
    let takers = ledger.records.iter().filter(|r| r.demand.is_positive()).count().max(1);
    let share = left.mul_div(1, i64::try_from(takers).unwrap_or(i64::MAX).saturating_mul(2));
    let most = share
        .min(terms.cut.burst.percent(1))
        .max(quantum)
        .max(short.min(Tokens(quantum.0.saturating_mul(4))));
    let has = level + part.cap() - part.overdraft;
    let lacks = (record.want - has).max(short).or_zero();
    let (_, free_burst) = ledger.free(terms);
    // Whole tokens: crumbs would be left over in every region at the end.
    let whole = |tokens: Tokens| Tokens::whole(tokens.floor());
    let lacks = lacks.up_to_whole();
    // What is left at the end may be less than the largest request costs: smaller ones can still use it.
    let tokens = whole(lacks.min(most).min(left).min(free_burst)).or_zero();
    Decision {
        rate: Rate::ZERO,
        burst: record.burst + tokens,
        tokens,
        lease: terms.cut.lease,
        on_demand: true,
    }
}

/// Gives what is free to other regions than `asker` that are below their entitlement. Their records keep their leases and
/// get the next push number. Returns who got something.
pub(super) fn distribute(terms: &Terms<'_>, ledger: &mut Ledger, asker: RegionId) -> Vec<RegionId> {
    let mut pushed = Vec::new();
    if ledger.frozen || ledger.records.len() < 2 || terms.windowed {
        return pushed;
    }
    if terms.permits {
        return permits::distribute(terms, ledger, asker);
    }
    for (at, due) in entitlements(terms, ledger).into_iter().enumerate() {
        let Some(push) = ledger.records.get(at).and_then(|r| push_for(terms, ledger, r, asker, due)) else {
            continue;
        };
        let Some(record) = ledger.records.get_mut(at) else { continue };
        record.rate += push.rate;
        record.burst += push.burst;
        record.offer_rate = record.rate;
        record.offer_burst = record.burst;
        record.granted += push.tokens;
        record.push = record.push.saturating_add(1);
        pushed.push(record.region);
        ledger.level.tokens -= push.tokens;
        ledger.clip(terms);
    }
    pushed
}

/// What other regions lack of what they are entitled to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lack {
    /// Some region holds less.
    pub(super) some: bool,
    /// Some region that asked just now holds less than half.
    pub(super) most: bool,
}

/// What do others than this region lack?
pub(super) fn others_lack(terms: &Terms<'_>, ledger: &Ledger, me: RegionId) -> Lack {
    let mut lack = Lack::default();
    if terms.windowed {
        return lack;
    }
    let crumb = terms.cut.rate.percent(1);
    for (r, due) in ledger.records.iter().zip(entitlements(terms, ledger)) {
        if r.region == me || on_demand(terms, r, due.burst) {
            continue;
        }
        let slack = r.rate.percent(5) + due.bare.percent(5).max(crumb);
        lack.some |=
            due.bare > r.rate + slack || due.burst >= r.quantum && due.burst > r.burst + r.burst.percent(25);
        lack.most |= ledger.at - r.asked < WAITS && due.bare > r.rate + r.rate + crumb.percent(200);
    }
    lack
}

/// Has another region that cannot hold a request by itself asked for one's tokens just now, and got none?
pub(super) fn others_wait(terms: &Terms<'_>, ledger: &Ledger, me: RegionId) -> bool {
    ledger.records.iter().any(|r| {
        r.region != me
            && r.granted == Tokens::ZERO
            && r.demand.is_positive()
            && (terms.windowed || part(terms, r.region).cap() + r.burst < r.quantum)
            && ledger.at - r.asked < WAITS
    })
}

/// Do the needs on record exceed the pool?
pub(super) fn contended(terms: &Terms<'_>, ledger: &Ledger) -> bool {
    let need = |r: &Record| need(terms, ledger, r).bare;
    ledger.records.iter().map(need).sum::<Rate>() > terms.rate + terms.lent.rate(ledger.at)
}

/// The rate that regions need of the pool, but for one, by what they have said within a lease before `tau`.
pub(super) fn needed_by_others(terms: &Terms<'_>, ledger: &Ledger, me: RegionId, tau: Micros) -> Rate {
    let others = ledger.records.iter().filter(|r| r.region != me && r.asked + terms.cut.lease > tau);
    others.map(|r| need(terms, ledger, r).bare).sum()
}

/// What more to give to the region of this record, if that is of use.
fn push_for(
    terms: &Terms<'_>,
    ledger: &Ledger,
    record: &Record,
    asker: RegionId,
    due: Entitlement,
) -> Option<Decision> {
    // Never touch a record whose region was told to shrink and has not said that it did.
    let told = record.offer_burst == record.burst && record.offer_rate == record.rate;
    if record.region == asker || !record.live || !told || on_demand(terms, record, due.burst) {
        return None;
    }
    let (free_rate, free_burst) = ledger.free_for(terms, record, record.expires);
    let rate = (due.rate.min(free_rate) - record.rate).or_zero();
    let burst = (due.burst.min(free_burst) - record.burst).or_zero();
    let of_use = record.burst + burst >= record.quantum
        && (rate > due.rate.percent(2) || burst > due.burst.percent(10));
    let tokens = ledger.level.tokens.min(burst);
    of_use.then_some(Decision { rate, burst, tokens, ..Decision::default() })
}

/// A share of the rate is of no use in a bucket that holds hardly one request; and a slow limit can afford a proposal a
/// request, so only a roomy bucket is worth tying up its burst.
fn on_demand(terms: &Terms<'_>, record: &Record, burst: Tokens) -> bool {
    let cap = part(terms, record.region).cap() + burst;
    let quantum = record.quantum;
    cap < quantum + quantum.percent(50) || terms.cut.rate < SLOW && cap < Tokens(quantum.0.saturating_mul(4))
}

struct Need {
    /// Rate for the demand itself, beyond the reserve ...
    bare: Rate,
    /// ... and on top of that for the headroom.
    headroom: Rate,
    burst: Tokens,
}

/// What a region on record needs of the pool.
fn need(terms: &Terms<'_>, ledger: &Ledger, record: &Record) -> Need {
    if !record.demand.is_positive() {
        return Need { bare: Rate::ZERO, headroom: Rate::ZERO, burst: Tokens::ZERO };
    }
    let lent = terms.lent.by(record.region, ledger.at).map_or(Rate::ZERO, |loan| loan.rate);
    let reserve = (part(terms, record.region).rate - lent).or_zero();
    let with = (record.demand.percent(HEADROOM_PERCENT) - reserve).or_zero();
    let bare = (record.demand - reserve).or_zero().min(with);
    let any = with.is_positive() || record.want.is_positive();
    let burst = if any { record.want.max(record.quantum) } else { Tokens::ZERO };
    Need { bare, headroom: with - bare, burst }
}

/// Entitlements in the order of the records: demand first, headroom out of what is left.
fn entitlements(terms: &Terms<'_>, ledger: &Ledger) -> Vec<Entitlement> {
    let pool_rate = (terms.rate + terms.lent.rate(ledger.at)).or_zero();
    let pool_burst = terms.burst.or_zero();
    let needs: Vec<Need> = ledger.records.iter().map(|r| need(terms, ledger, r)).collect();
    let bare = max_min(pool_rate.0, needs.iter().map(|n| n.bare.0));
    let left = pool_rate.0.saturating_sub(sum(&bare));
    let headroom = max_min(left, needs.iter().map(|n| n.headroom.0));
    let burst = max_min(pool_burst.0, needs.iter().map(|n| n.burst.0));
    let mut rate: Vec<i64> = bare.iter().zip(&headroom).map(|(b, h)| b.saturating_add(*h)).collect();
    // Where hardly any burst stays in the pool, rate left there would only run over.
    if Tokens(sum(&burst)) >= pool_burst - pool_burst.percent(10) {
        let all = sum(&rate);
        let rest = Rate(pool_rate.0.saturating_sub(all));
        for r in &mut rate {
            *r = r.saturating_add(rest.mul_div(*r, all).0);
        }
    }
    let rates = bare.into_iter().zip(rate);
    rates
        .zip(burst)
        .map(|((b, r), t)| Entitlement { bare: Rate(b), rate: Rate(r), burst: Tokens(t) })
        .collect()
}

fn part(terms: &Terms<'_>, region: RegionId) -> crate::quota::policy::Part {
    terms.cut.parts.get(usize::from(region.0)).copied().unwrap_or_default()
}

fn sum(amounts: &[i64]) -> i64 {
    amounts.iter().copied().fold(0, i64::saturating_add)
}

/// Max-min fair division of `total` among `needs` (progressive filling: Bertsekas and Gallager, Data Networks, 6.5.2);
/// rounded down, what is over stays in the pool.
pub(super) fn max_min(total: i64, needs: impl Iterator<Item = i64>) -> Vec<i64> {
    let needs: Vec<i64> = needs.collect();
    let mut shares = vec![0; needs.len()];
    let mut by_need: Vec<(i64, &mut i64)> = needs.iter().copied().zip(&mut shares).collect();
    by_need.retain(|(need, _)| *need > 0);
    by_need.sort_by_key(|(need, _)| *need);
    let mut left = total;
    let mut many = i64::try_from(by_need.len()).unwrap_or(i64::MAX);
    for (need, share) in by_need {
        *share = need.min(left.checked_div(many).unwrap_or(0));
        left = left.saturating_sub(*share);
        many = many.saturating_sub(1);
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_max_min_fair() {
        let shares = |total, needs: &[i64]| max_min(total, needs.iter().copied());
        assert_eq!(shares(100, &[10, 100, 100]), [10, 45, 45]);
        assert_eq!(shares(100, &[0, 30, 20]), [0, 30, 20]);
        assert_eq!(shares(10, &[7, 7, 7]), [3, 3, 4]);
        assert_eq!(shares(0, &[7]), [0]);
        assert_eq!(shares(i64::MAX, &[i64::MAX, i64::MAX]), [i64::MAX / 2, i64::MAX / 2 + 1]);
    }
}
