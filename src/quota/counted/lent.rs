//! Strict permits: never more than N in use, all regions together, though each region lends them to holders by itself.
//!
//! A permit limit is cut like any other: each region has a reserve, and the rest is a pool that is lent in slices. A slice of permits
//! is a capacity alone: a burst, no rate and no tokens. What comes back of it is free again at once; nothing is presumed spent, since
//! a permit is in use or it is not.
//!
//! **In a region** a bucket has r permits of its reserve and, until the deadline D of its lease, the b of its slice. Which of them a
//! holder has is nobody's business; the rule is about when they end. At any store time
//!
//! 1. no permit is given out, and none is renewed, if more than r + b would be in use (r alone once D has passed); and
//! 2. of those in use at most r end after D: a permit that would be one too many ends by D, whatever the `ttl`, and its holder is told so.
//!    A renewal is under the same rule, so a permit above the reserve goes on only as the region's lease does.
//!
//! So a region that is cut off comes down to its reserve by itself, just when the pool takes its slice back. No permit is given out for
//! less than a quarter of what a full one lasts (`Slice::for_new`). A lease is long enough ([`lease`]) for a region that renews it at
//! half time always to have a whole `ttl` left of it.
//!
//! **Giving back.** A region lowers its capacity in the store first, and there in one step with a look at what is in use ([`shrink`]): it keeps
//! what holders have above the reserve, whatever it meant to give up. Only what the store says is kept goes into the ask as held. (The pool
//! takes no more than it has counted: a reserve that has just shrunk is not taken for a slice.) Where a policy was lowered, the
//! pool offers less than is held: then the store has a smaller b, nothing above it is given out or renewed, and what is in use
//! goes on being told as held until it has ended, by the D that it was given out under.
//!
//! **Loss.** What the store has lost is in holders' hands for up to the longest `ttl` that they were told ([`Allowance::life`](super::Allowance)):
//! for so long the reserve gives out nothing, since all of it may be in use. The slices of the old life are ghosts at the pool until
//! their leases end; slices of the new life are counted beside them, and are used at once. A daemon that starts again on a store that kept
//! its data still sees what is in use there: it says so in its first ask as held, and the pool moves it from the ghost to the
//! new life's record. Only what is in that store can be said so: after a loss nothing is, until new slices come.
//!
//! **Changes.** A region uses the smallest reserve of all versions of a policy that are in play, at once. But permits that were told before
//! live on. So the pool counts the largest of them until the version settles, and it does not settle before the longest `ttl` has passed since
//! the last region acknowledged it (see `pool/policies.rs`): then what was given out under an older reserve has ended.
//!
//! **Clocks.** The region's lease counts from before the ask was sent, in store time less the drift, and the pool's from the commit, in Raft time,
//! as for token buckets. A holder's clock is one more: a permit is kept for 3% longer than its holder is told ([`kept`], [`told`]), which
//! is more than two clocks that are each 1% off make of it. Who holds a permit counts from before sending the request.

use super::{Allowance, Counted};
use crate::bugs::{Bug, planted};
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::bucket::Bucket;

/// The longest `ttl` of permits that are lent between regions: a slice may be out for a little more than twice as long.
pub const LENT_TTL_MAX: Micros = Micros::seconds(300);
/// No lease of permits is longer.
pub const LENT_LEASE_MAX: Micros = lease(LENT_TTL_MAX);
/// A new permit lasts at least this part of what a full one does.
const NEW_PART: i64 = 4;

/// What a store has of its region's slice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    /// So many permits ...
    pub permits: i64,
    /// ... until this store time.
    pub until: Micros,
}

impl Slice {
    /// The slice as it is in the store, in the lease of a bucket that is settled.
    #[must_use]
    pub fn of(bucket: &Bucket) -> Self {
        let (burst, until) = bucket.lent();
        Self { permits: burst.floor(), until }
    }

    /// What new permits may be given out against, `late` being no earlier than now.
    #[must_use]
    pub(super) fn for_new(&self, span: Micros, late: Micros) -> i64 {
        let roomy = self.until - late >= span.mul_div(1, NEW_PART);
        if roomy { self.live(late) } else { 0 }
    }

    /// What permits may be in use against.
    #[must_use]
    pub(super) fn live(&self, late: Micros) -> i64 {
        if self.until > late { self.permits } else { 0 }
    }
}

/// How long a store keeps a permit whose holder is told `ttl`.
#[must_use]
pub const fn kept(ttl: Micros) -> Micros {
    Micros(ttl.0.saturating_mul(103).div_euclid(100))
}

/// What the holder of a permit is told that lasts for so long in the store.
#[must_use]
pub fn told(lasts: Micros) -> Micros {
    lasts.mul_div(100, 103)
}

/// How long slices of permits with this `ttl` are lent for. (Different for each `ttl`, so that a change of it is a change of how the
/// limit is cut.)
#[must_use]
pub const fn lease(ttl: Micros) -> Micros {
    Micros(kept(ttl).0.saturating_mul(21).div_euclid(10).saturating_add(Micros::seconds(8).0))
}

/// What is left of a slice after [`shrink`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Was a lease live before?
    pub leased: bool,
    /// What the region must say that it holds: its slice, or what is in use above its reserve if that is more.
    pub held: Tokens,
    /// What it could still give out.
    pub left: Tokens,
}

/// Before an ask: keeps at most `hold` of a slice, but all that holders have above the reserve. `bucket`, which has the slice, and
/// `count` are settled; `allowance` is as the store's generation has it.
pub fn shrink(
    bucket: &mut Bucket,
    count: &Counted,
    allowance: &Allowance,
    hold: Tokens,
    now: Micros,
) -> Kept {
    let (reserve, used) = (allowance.at(now), count.in_use(now));
    let mut above = used.saturating_sub(reserve).max(0);
    if planted(Bug::PermitsGivenUpInUse) {
        above = 0;
    }
    let shrunk = bucket.shrink(Tokens::whole(above.max(hold.floor())), Rate::ZERO);
    let slice = shrunk.burst.floor();
    Kept {
        leased: shrunk.leased,
        held: Tokens::whole(slice.max(above)),
        left: Tokens::whole(reserve.saturating_add(slice).saturating_sub(used).max(0)),
    }
}

/// What a region could still give out of a bucket that is settled.
#[must_use]
pub fn left(bucket: &Bucket, count: &Counted, allowance: &Allowance, now: Micros) -> Tokens {
    let all = allowance.at(now).saturating_add(Slice::of(bucket).permits);
    Tokens::whole(all.saturating_sub(count.in_use(now)).max(0))
}
