//! When a region may have lent the rate of its reserve.

use super::spans::Spans;
use crate::oracle::{History, Mode, Request, Watched};
use quorate::quota::amount::{MICROS_PER_SECOND, Micros, Rate, Tokens};
use quorate::quota::policy::LOAN;
use quorate::quota::pool::LENT_MAX_PERCENT;

/// Requests are counted by the second.
const SLOT: Micros = Micros(MICROS_PER_SECOND);
/// Demand is an average over this long.
const AVERAGE: usize = 3;
/// What a region says of its demand counts for a lease, and a change of it is noticed within so long.
const SAID: Micros = Micros::seconds(5);
/// A loan that was begun then may last until so long afterwards: its time, drift, and what it took to be made.
const LASTS: Micros = Micros(LOAN.0 + 5 * MICROS_PER_SECOND);

/// When some of this region's reserve of a limit may be lent: it asked for less than that not long before (a region whose demand
/// comes near its reserve lends nothing), and others for more than half of the limit (where nobody is short, nobody lends). By what
/// clients sent, with every doubt against the region.
pub(super) fn may_have_lent(history: &History, limit: usize, region: usize, watched: &Watched) -> Spans {
    let slots = usize::try_from(history.end.0.max(0) / SLOT.0).unwrap_or(0) + 1;
    let (mut own, mut others) = (vec![Tokens::ZERO; slots], vec![Tokens::ZERO; slots]);
    for request in history.requests.iter().filter(|r| r.limit == limit) {
        let of = if request.region == region { &mut own } else { &mut others };
        if let Some(slot) = of.get_mut(slot_of(request)) {
            *slot += request.cost.or_zero();
        }
    }
    let begins = |slot: usize| Micros(SLOT.0 * i64::try_from(slot).unwrap_or(i64::MAX));
    let said = usize::try_from((leases_of(history, watched) + SAID).0 / SLOT.0).unwrap_or(usize::MAX);
    let lends = (0..slots).filter(|slot| {
        let edition = watched.edition_at(begins(*slot)).filter(|edition| edition.mode != Mode::Split);
        let Some(edition) = edition else { return false };
        let short = |slot: &Tokens| *slot > edition.rate.during(SLOT).percent(50);
        idle(&own, *slot, edition.reserve(region).0) && past(&others, *slot, said).iter().any(short)
    });
    Spans::new(lends.map(|slot| (begins(slot), begins(slot) + SLOT + LASTS)))
}

/// What stays of a reserve's rate.
pub(super) fn kept(rate: Rate) -> Rate {
    rate - rate.percent(LENT_MAX_PERCENT)
}

/// Was less asked for than the reserve brings, in any few seconds with this one among them?
fn idle(own: &[Tokens], slot: usize, rate: Rate) -> bool {
    let brings = rate.during(SLOT);
    (0..=AVERAGE).any(|back| {
        let slots = past(own, slot.saturating_sub(back), AVERAGE);
        let many = i64::try_from(slots.len()).unwrap_or(i64::MAX);
        slots.iter().copied().sum::<Tokens>() < Tokens(brings.0.saturating_mul(many))
    })
}

/// This slot and those before it, so many at most.
fn past(slots: &[Tokens], slot: usize, many: usize) -> &[Tokens] {
    let end = (slot + 1).min(slots.len());
    slots.get(end.saturating_sub(many)..end).unwrap_or_default()
}

fn slot_of(request: &Request) -> usize {
    usize::try_from(request.sent.0 / SLOT.0).unwrap_or(0)
}

/// A longest lease of this limit.
fn leases_of(history: &History, watched: &Watched) -> Micros {
    let two = crate::oracle::Params { recovery: None, ..history.params.clone() }.recovery_of(watched);
    Micros(two.0 / 2)
}
