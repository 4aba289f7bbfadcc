//! The pool's side of permits: slices that are a capacity alone. What keeps the rule is in [`crate::quota::counted::lent`].
//!
//! Here permits that are not lent are the level: they are all there, whatever became of them before. Nobody is told to give up what is in
//! use; a region is offered less than it holds only where the policy was lowered. Who has permits that nobody uses hears in its own replica that
//! another waits ([`Pool::permits`]), and gives them back; they go to who waits as a push of its record.

use super::decide::{Decision, WAITS, max_min};
use super::entry::{Ask, RegionId};
use super::ledger::{Ledger, Record};
use super::policies::Terms;
use super::{MAX_AGE, Pool};
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::counted::Kind;
use crate::quota::policy::{BucketId, Limit};

/// What a region looks at before it asks for permits, or gives some back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PermitsView {
    /// Not lent.
    pub free: Tokens,
    /// What others lack that asked just now, or what is lent beyond the limit after it was lowered.
    pub missing: Tokens,
    /// What others hold.
    pub elsewhere: Tokens,
}

impl Pool {
    /// Is this a limit on permits that are lent?
    #[must_use]
    pub fn lends_permits(&self, policy: u32) -> bool {
        self.policies.slot(policy).and_then(|slot| slot.terms()).is_some_and(|terms| terms.permits)
    }

    /// The permits of a bucket as this region sees them, were an entry stamped `tau` applied now. `None`: none are lent.
    #[must_use]
    pub fn permits(
        &self,
        policy: u32,
        bucket: BucketId,
        tau: Micros,
        region: RegionId,
    ) -> Option<PermitsView> {
        let slot = self.policies.slot(policy)?;
        let terms = slot.terms().filter(|terms| terms.permits)?;
        let ledger = self.ledger_at(slot, &terms, bucket, tau);
        let (_, free) = ledger.free(&terms);
        let others = || ledger.records.iter().filter(|r| r.region != region);
        let lack = others().map(|r| lacks(&ledger, r)).sum::<Tokens>();
        Some(PermitsView {
            free: free.or_zero(),
            missing: (lack - free.or_zero()).or_zero().max(-free.min(Tokens::ZERO)),
            elsewhere: others().filter(|r| r.live).map(|r| r.burst).sum(),
        })
    }

    /// The bucket under whose name a policy's bucket has its books, and the other way round: permits in use are counted apart from tokens.
    #[must_use]
    pub fn booked_as(&self, policy: u32, bucket: BucketId) -> BucketId {
        if self.lends_permits(policy) { Kind::Permits.bucket(bucket, Micros::ZERO) } else { bucket }
    }

    /// For how long permits may be in holders' hands that a region's store has lost: the longest that any version of the policy in play
    /// lends them for.
    #[must_use]
    pub fn permit_life(&self, policy: u32) -> Micros {
        let slot = self.policies.slot(policy);
        slot.map_or(Micros::ZERO, |slot| slot.policies().filter_map(life).max().unwrap_or_default())
    }
}

/// For how long a store keeps permits of such a policy.
pub(super) fn life(limit: &Limit) -> Option<Micros> {
    let (kind, span) = Kind::of(limit)?;
    (kind == Kind::Permits).then_some(span)
}

/// What an ask brings: what is free, up to what the region waits for or its fair share, whichever is more.
pub(super) fn decide(terms: &Terms<'_>, ledger: &Ledger, record: &Record, short: Tokens) -> Decision {
    let (_, free) = ledger.free(terms);
    let whole = terms.burst.or_zero();
    let held = record.burst;
    let burst = if free < Tokens::ZERO {
        // The limit was lowered: what is offered comes down, to a fair share at least.
        let others = ledger.records.iter().filter(|r| r.region != record.region);
        let offered: Tokens = others.map(|r| r.offer_burst + ghost(r)).sum::<Tokens>() + ghost(record);
        held.min(share(whole, ledger, record.region, |r| r.burst).max(whole - offered)).or_zero()
    } else {
        let due = share(whole, ledger, record.region, |r| wants(r).max(r.burst));
        held + (due - held).max(short).min(wants(record) - held).min(free).or_zero()
    };
    let burst = Tokens::whole(burst.floor());
    Decision { rate: Rate::ZERO, burst, tokens: Tokens::ZERO, lease: terms.cut.lease, on_demand: true }
}

/// Gives what is free to other regions than `asker` that wait for it. Returns who got something.
pub(super) fn distribute(terms: &Terms<'_>, ledger: &mut Ledger, asker: RegionId) -> Vec<RegionId> {
    let mut pushed = Vec::new();
    for at in 0..ledger.records.len() {
        let (_, free) = ledger.free(terms);
        let Some(record) = ledger.records.get(at) else { break };
        // Never touch a record whose region was told to shrink and has not said that it did.
        let told = record.live && record.offer_burst == record.burst;
        let more = Tokens::whole(lacks(ledger, record).min(free).floor());
        if record.region == asker || !told || !more.is_positive() {
            continue;
        }
        let Some(record) = ledger.records.get_mut(at) else { break };
        record.burst += more;
        record.offer_burst = record.burst;
        record.push = record.push.saturating_add(1);
        pushed.push(record.region);
    }
    ledger.clip(terms);
    pushed
}

/// A region that has started again sees in its store what its former life has given out there, and says so: it counts under its
/// present life from now on. Returns until when the former one would have had it.
pub(super) fn adopt(record: &mut Record, ask: &Ask) -> Option<Micros> {
    let ghost = record.ghost.as_mut()?;
    let more = (ask.held_burst - record.burst).min(ghost.burst);
    if !more.is_positive() {
        return None;
    }
    ghost.burst -= more;
    record.burst += more;
    Some(ghost.until)
}

fn wants(record: &Record) -> Tokens {
    if record.demand.is_positive() { record.want } else { Tokens::ZERO }
}

/// What it wanted and did not get, if that is not long ago.
fn lacks(ledger: &Ledger, record: &Record) -> Tokens {
    let lately = ledger.at - record.asked < WAITS.min(MAX_AGE);
    if lately { (wants(record) - record.offer_burst).or_zero() } else { Tokens::ZERO }
}

fn ghost(record: &Record) -> Tokens {
    record.ghost.as_ref().map_or(Tokens::ZERO, |ghost| ghost.burst)
}

fn share(whole: Tokens, ledger: &Ledger, region: RegionId, need: impl Fn(&Record) -> Tokens) -> Tokens {
    let shares = max_min(whole.0, ledger.records.iter().map(|r| need(r).0));
    let mut all = ledger.records.iter().zip(shares);
    all.find(|(r, _)| r.region == region).map_or(Tokens::ZERO, |(_, share)| Tokens(share))
}
