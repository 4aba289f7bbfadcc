//! The policies of the cluster under one version, and what each region may use while they change.
//!
//! A version is *in play* from the one that is settled to the one that is in force. For each policy and region
//!
//! - the region may use the **smallest** reserve of all versions in play;
//! - the pool counts the **largest** reserve of the versions from the last one that the region has acknowledged on.
//!
//! A version settles once every region has acknowledged it and one longest lease has passed since it was set: then no
//! slice that was cut under an older version is out. So whatever mix of versions the regions have read, what they use and
//! what is lent never adds up to more than one of the limits in play; and all of it is computed from applied entries
//! alone, so a restarted daemon computes the same.
//!
//! Regions that come and go are changes of this kind, too: a new version, with the same policies cut up in another way. In
//! versions before it came a region has a part of nothing, so it uses nothing until all others know. A region that is gone
//! counts as having acknowledged whatever may come.

mod counted;

use super::entry::RegionId;
use super::ledger::Ledger;
use super::loans::Lent;
use super::members::Members;
use super::permits;
use crate::bugs::{Bug, planted};
use crate::quota::amount::{Level, Micros, Rate, TOKENS_MAX, Tokens};
use crate::quota::bucket::Unseen;
use crate::quota::counted::lent::kept;
use crate::quota::policy::{Cut, LENGTH_MAX_S, LOAN, Limit, Mode, Part, Policy, Share, Window};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The most policies that a cluster has.
pub const POLICIES_MAX: usize = 10_000;
/// The most versions that may wait to be settled (for an unreachable region, say). One more is refused.
pub const VERSIONS_MAX: usize = 64;

/// See [`Policies::acked`].
const GONE: u64 = u64::MAX;

/// All policies, by id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Policies {
    version: u64,
    settled: u64,
    /// The versions after `settled`, oldest first.
    unsettled: VecDeque<Unsettled>,
    /// The version that each region has acknowledged last; [`GONE`]: nobody waits for its word.
    acked: Vec<u64>,
    /// Ids of the policies in force, in the order in which their author wrote them.
    order: Vec<u32>,
    /// By id, ascending.
    slots: Vec<Slot>,
    next_id: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Unsettled {
    version: u64,
    /// Raft time at which every slice that is older has run out.
    clear: Micros,
}

/// One policy, under an id that no other policy gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Slot {
    pub(super) id: u32,
    name: Arc<str>,
    /// What it was and is, oldest first; the first is the one of the settled version. Never empty.
    editions: Vec<Edition>,
    /// What each region may use.
    usable: Vec<Part>,
    /// What a bucket that a region's store does not hold has of its reserve, in Raft time; `None`: all of it.
    unseen_parts: Vec<Option<Unseen>>,
    /// The pool of a bucket that has never been asked about. Full, except while a policy that enlarged the pool has not
    /// yet filled up: nobody gains tokens by a change of policy.
    pub(super) unseen: Ledger,
    /// The whole less all reserves as they are counted.
    pool: (Rate, Tokens),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Edition {
    /// The version that brought it.
    from: u64,
    /// `None`: the policy was removed.
    policy: Option<Arc<Policy>>,
    /// `None`: unlimited.
    cut: Option<Cut>,
}

/// What a bucket's pool is made of at this moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms<'a> {
    pub(super) cut: &'a Cut,
    /// The pool's rate with nothing lent; negative while a policy shrinks.
    pub(super) rate: Rate,
    /// The pool's burst with nothing lent; negative while a policy shrinks.
    pub(super) burst: Tokens,
    /// It is a quota, in windows: see [`Windows`](super::windows::Windows).
    pub(super) windowed: bool,
    /// It is permits: see [`super::permits`].
    pub(super) permits: bool,
    /// What regions lend to it besides.
    pub(super) lent: Lent<'a>,
}

/// What a change left to be done for the buckets.
#[derive(Clone, Debug, Default)]
pub(super) struct Gone {
    /// Policies whose buckets are to be dropped, ascending.
    pub(super) ids: Vec<u32>,
}

impl Policies {
    /// The first version.
    pub(super) fn found(members: &Members, policies: &[Policy], tau: Micros) -> Option<Self> {
        sound(policies).then_some(())?;
        // Witnesses use nothing: nobody waits for their word.
        let acked = members.all().map(|member| if member.witness { GONE } else { 1 }).collect();
        let mut new = Self { version: 1, settled: 1, acked, ..Self::default() };
        for policy in policies {
            new.add(members, policy, tau)?;
        }
        Some(new)
    }

    /// The version in force; 0 before the cluster was founded.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// The newest version that has settled.
    pub(super) fn settled(&self) -> u64 {
        self.settled
    }

    /// May one more version wait to be settled?
    pub(super) fn has_room(&self) -> bool {
        self.unsettled.len() < VERSIONS_MAX
    }

    /// Can `policies` be set?
    pub(super) fn accepts(&self, policies: &[Policy]) -> bool {
        let ids_left = u32::MAX.saturating_sub(self.next_id);
        self.has_room()
            && sound(policies)
            && u32::try_from(policies.len()).is_ok_and(|new| new <= ids_left)
            && self.slots.len().saturating_add(policies.len()) <= POLICIES_MAX.saturating_mul(4)
    }

    /// The policies become these (which [`Self::accepts`]) at Raft time `tau`. Every bucket must have been advanced to `tau`,
    /// and must be advanced once more afterwards.
    pub(super) fn set(&mut self, members: &Members, policies: &[Policy], tau: Micros) -> u64 {
        self.advance(tau);
        self.version = self.version.saturating_add(1);
        self.order.clear();
        let by_name: BTreeMap<&str, &Policy> = policies.iter().map(|p| (&*p.name, p)).collect();
        let mut kept: BTreeMap<Arc<str>, u32> = BTreeMap::new();
        let mut full = Vec::new();
        for slot in &mut self.slots {
            if slot.revise(by_name.get(&*slot.name).copied(), members, self.version) {
                full.push(slot.id);
            }
            kept.insert(slot.name.clone(), slot.id);
        }
        for policy in policies {
            match kept.get(&policy.name) {
                Some(id) => self.order.push(*id),
                None => {
                    self.add(members, policy, tau);
                }
            }
        }
        self.await_settling(tau);
        self.recount();
        for slot in self.slots.iter_mut().filter(|slot| slot.counts_anew()) {
            slot.unseen_parts.fill(None);
        }
        for slot in self.slots.iter_mut().filter(|slot| full.binary_search(&slot.id).is_ok()) {
            slot.fill();
        }
        self.version
    }

    /// The same policies are cut up for other regions from Raft time `tau` on. Every bucket must have been advanced to `tau`,
    /// and must be advanced once more afterwards.
    pub(super) fn share_anew(&mut self, members: &Members, tau: Micros) -> u64 {
        self.advance(tau);
        self.version = self.version.saturating_add(1);
        for slot in &mut self.slots {
            slot.share_anew(members, self.version);
        }
        self.await_settling(tau);
        self.recount();
        self.version
    }

    /// A region is new under the newest version, or new again: it has used nothing, and says what it reads from here on.
    pub(super) fn welcome(&mut self, region: RegionId) {
        let version = self.version;
        if let Some(acked) = self.word_of(region) {
            *acked = version;
        }
        self.recount();
    }

    /// A region has to say what it goes by before anything that is new settles.
    pub(super) fn hear_again(&mut self, region: RegionId) {
        let version = self.version;
        if let Some(acked) = self.word_of(region) {
            *acked = (*acked).min(version);
        }
        self.recount();
    }

    /// Of limits that count, every region's part is as this says.
    pub(super) fn hold_counts(&mut self, unseen: Unseen) {
        let counts =
            |slot: &&mut Slot| slot.editions.last().is_some_and(|edition| edition.counts().is_some());
        for slot in self.slots.iter_mut().filter(counts) {
            slot.unseen_parts.fill(Some(unseen));
        }
    }

    /// A witness comes: it has no part of anything, and nobody waits for its word.
    pub(super) fn seat_witness(&mut self, region: RegionId) {
        let known = self.acked.len();
        let _ = self.word_of(region);
        if self.acked.len() > known {
            self.recount();
        }
    }

    /// A region uses nothing any more: it counts as having acknowledged whatever may come. Buckets must be advanced before
    /// and after.
    pub(super) fn retire(&mut self, region: RegionId, tau: Micros) {
        self.advance(tau);
        if let Some(acked) = self.acked.get_mut(usize::from(region.0)) {
            *acked = GONE;
        }
        self.await_holders(GONE, tau);
        self.recount();
    }

    /// Would this acknowledgement change anything?
    pub(super) fn awaits(&self, region: RegionId, version: u64) -> bool {
        version <= self.version && self.acked.get(usize::from(region.0)).is_some_and(|acked| *acked < version)
    }

    /// Must it acknowledge what is new? (Not if it is gone, or is no region.)
    pub(super) fn is_awaited(&self, region: RegionId) -> bool {
        self.acked.get(usize::from(region.0)).is_some_and(|acked| *acked != GONE)
    }

    /// A region uses no more than the smallest of all versions up to this one. Buckets must be advanced before and after.
    pub(super) fn ack(&mut self, region: RegionId, version: u64, tau: Micros) {
        self.advance(tau);
        if let Some(acked) = self.acked.get_mut(usize::from(region.0)) {
            *acked = (*acked).max(version.min(self.version));
        }
        self.await_holders(version, tau);
        self.recount();
    }

    /// A region uses no more from now on than versions up to this one allow. But the permits that it has given out last as long as
    /// their holders were told (and until then `most` counts them), and what it has lent of a reserve is lent until the loan's end, though the
    /// limit be one that is not lent any more: what is acknowledged does not settle before.
    fn await_holders(&mut self, acked: u64, tau: Micros) {
        let changed = || self.slots.iter().filter(|slot| slot.editions.len() > 1);
        let holders = changed().filter(|slot| slot.lent_permits());
        let told = holders.flat_map(Slot::policies).filter_map(permits::life).max();
        let lent = changed().any(Slot::lends_no_more).then_some(LOAN);
        let Some(longest) = told.max(lent) else { return };
        for unsettled in self.unsettled.iter_mut().filter(|unsettled| unsettled.version <= acked) {
            unsettled.clear = unsettled.clear.max(tau + kept(longest));
        }
    }

    /// Settles what can be settled at Raft time `tau`. What regions may use grows; what the pool counts does not change.
    pub(super) fn settle(&mut self, tau: Micros) -> Gone {
        let mut gone = Gone::default();
        let mut everyone = self.acked.iter().copied().min().unwrap_or(0);
        if planted(Bug::RaiseUnacknowledged) {
            everyone = u64::MAX;
        }
        let ripe = self.unsettled.iter().take_while(|v| v.version <= everyone && v.clear <= tau).count();
        let Some(last) = self.unsettled.drain(..ripe).next_back() else { return gone };
        self.advance(tau);
        self.settled = last.version;
        let settled = self.settled;
        let counts = self.slots.iter().filter_map(|slot| Some((slot.id, slot.counted_change(settled)?)));
        let counts: Vec<_> = counts.collect();
        self.slots.retain_mut(|slot| {
            let (alive, bucketless) = slot.forget_before(settled);
            if bucketless {
                gone.ids.push(slot.id);
            }
            alive
        });
        self.recount();
        for (id, change) in counts {
            if let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) {
                slot.unseen_parts = change.hold(std::mem::take(&mut slot.unseen_parts));
            }
        }
        gone
    }

    /// Is only one version in play?
    pub(super) fn is_settled(&self) -> bool {
        self.unsettled.is_empty()
    }

    /// When the next version can settle as far as leases go.
    pub(super) fn clear_at(&self) -> Option<Micros> {
        self.unsettled.front().map(|next| next.clear)
    }

    /// Regions that have not acknowledged `version`.
    pub(super) fn unacked(&self, version: u64) -> impl Iterator<Item = RegionId> {
        let late = self.acked.iter().zip(0_u16..).filter(move |(acked, _)| **acked < version);
        late.map(|(_, i)| RegionId(i))
    }

    /// The policies in force, in the order in which their author wrote them.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Arc<Policy>, Option<&Cut>)> {
        self.order.iter().filter_map(|id| {
            let edition = self.slot(*id)?.editions.last()?;
            Some((*id, edition.policy.as_ref()?, edition.cut.as_ref()))
        })
    }

    /// All regions' reserves of a policy, as the pool counts them: rate, and burst with the overdrafts.
    pub(super) fn reserved(&self, id: u32) -> Option<(Rate, Tokens)> {
        Some(self.slot(id)?.reserved(&self.acked))
    }

    /// The rate of one region's reserve of a policy, as the pool counts it.
    pub(super) fn reserved_of(&self, id: u32, region: RegionId) -> Rate {
        let acked = self.acked.get(usize::from(region.0));
        let counted = |slot: &Slot| Some(most(&slot.editions, *acked?, usize::from(region.0)).0);
        self.slot(id).and_then(counted).unwrap_or_default()
    }

    pub(super) fn slot(&self, id: u32) -> Option<&Slot> {
        let at = self.slots.binary_search_by_key(&id, |slot| slot.id).ok()?;
        self.slots.get(at)
    }

    /// Ids of the policies that a change of version or an acknowledgement can matter to.
    pub(super) fn in_motion(&self) -> impl Fn(u32) -> bool + use<> {
        let ids: Vec<u32> = self.slots.iter().filter(|s| s.editions.len() > 1).map(|s| s.id).collect();
        move |id| ids.binary_search(&id).is_ok()
    }

    /// The newest version can settle once nothing that was lent under an older one is out.
    fn await_settling(&mut self, tau: Micros) {
        // Slices of permits may be out for long: where nothing has changed, nothing has to wait for them.
        let bears = |slot: &&Slot| slot.editions.len() > 1 || !slot.lent_permits();
        let editions = self.slots.iter().filter(bears).flat_map(|slot| &slot.editions);
        let lent = editions.filter_map(|e| e.cut.as_ref()).filter(|cut| cut.pooled);
        let longest = lent.map(|cut| cut.lease).max().unwrap_or_default();
        self.unsettled.push_back(Unsettled { version: self.version, clear: tau + longest });
    }

    /// What a region has acknowledged last. Nobody waits for the word of one that is new, until something is written here.
    fn word_of(&mut self, region: RegionId) -> Option<&mut u64> {
        let at = usize::from(region.0);
        if at >= self.acked.len() {
            self.acked.resize(at.saturating_add(1), GONE);
        }
        self.acked.get_mut(at)
    }

    fn advance(&mut self, tau: Micros) {
        for slot in &mut self.slots {
            slot.advance(tau);
        }
    }

    fn recount(&mut self) {
        for slot in &mut self.slots {
            slot.recount(&self.acked);
        }
    }

    fn add(&mut self, members: &Members, policy: &Policy, tau: Micros) -> Option<()> {
        let id = self.next_id;
        self.next_id = self.next_id.checked_add(1)?;
        let edition = Edition::of(policy, members, self.version);
        let mut slot = Slot {
            id,
            name: policy.name.clone(),
            editions: vec![edition],
            usable: Vec::new(),
            unseen_parts: Vec::new(),
            unseen: Ledger::new(id, tau),
            pool: Default::default(),
        };
        slot.recount(&self.acked);
        slot.fill();
        self.slots.push(slot);
        self.order.push(id);
        Some(())
    }
}

impl Slot {
    /// What its buckets' pools are made of now; `None`: it is unlimited.
    pub(super) fn terms(&self) -> Option<Terms<'_>> {
        let cut = self.editions.last()?.cut.as_ref()?;
        let windowed = self.policy().is_some_and(|policy| policy.window().is_some());
        let permits = cut.pooled && self.policy().is_some_and(|policy| policy.permits().is_some());
        let ((rate, burst), lent) = (self.pool, Lent::default());
        Some(Terms { cut, rate, burst, windowed, permits, lent })
    }

    /// What it is and was under every version in play.
    pub(super) fn policies(&self) -> impl Iterator<Item = &Limit> {
        self.editions.iter().filter_map(|edition| Some(&edition.policy.as_ref()?.limit))
    }

    /// May a region have lent something of its reserve that is not over yet? (Not long after a version that allows it, see
    /// [`Policies::await_holders`].)
    pub(super) fn may_lend(&self) -> bool {
        self.editions.iter().any(Edition::lends)
    }

    /// Was it lent, and has it the same buckets now without being lent?
    fn lends_no_more(&self) -> bool {
        let split = |p: &Arc<Policy>| p.mode == Mode::Split && matches!(p.limit, Limit::TokenBucket(_));
        self.may_lend() && self.policy().is_some_and(split)
    }

    /// Permits were lent between regions under a version in play, or are: what holders were told counts on.
    fn lent_permits(&self) -> bool {
        self.editions.iter().any(Edition::lends_permits)
    }

    /// The policy in force; `None`: it has been removed.
    pub(super) fn policy(&self) -> Option<&Arc<Policy>> {
        self.editions.last()?.policy.as_ref()
    }

    /// Is only one version of it in play?
    pub(super) fn is_settled(&self) -> bool {
        self.editions.len() == 1
    }

    /// What each region may use of its reserve.
    pub(super) fn all_usable(&self) -> &[Part] {
        &self.usable
    }

    /// What a region may use of its reserve; `None`: it is unlimited (or no such region).
    pub(super) fn usable(&self, region: RegionId) -> Option<Part> {
        self.editions.last()?.cut.as_ref()?;
        self.usable.get(usize::from(region.0)).copied()
    }

    /// What a bucket that the region's store does not hold has of its reserve (overdraft included), in Raft time; `None`: all
    /// of it.
    pub(super) fn unseen_part(&self, region: RegionId, tau: Micros) -> Option<Unseen> {
        let part = self.usable(region)?;
        let unseen = self.unseen_parts.get(usize::from(region.0)).copied()??;
        let mut level = Level::new(unseen.level);
        level.accrue(part.shape().rate, tau - unseen.at, part.cap());
        (level.tokens < part.cap()).then_some(unseen)
    }

    /// Says whether it was unlimited and is not any more: then it starts full, like a new one.
    fn revise(&mut self, policy: Option<&Policy>, members: &Members, version: u64) -> bool {
        let Some(last) = self.editions.last_mut() else { return false };
        if policy == last.policy.as_deref() {
            return false;
        }
        let new = match policy {
            Some(policy) => Edition::of(policy, members, version),
            None => Edition::removed(members.names().len(), version),
        };
        // What changes no amount needs nobody's word. A policy that comes back is one that changes.
        if new.cut == last.cut && new.policy.is_some() && last.policy.is_some() {
            last.policy = new.policy;
            return false;
        }
        let bounded = last.cut.is_none() && new.cut.is_some();
        self.editions.push(new);
        bounded
    }

    /// Other regions share it from `version` on.
    fn share_anew(&mut self, members: &Members, version: u64) {
        let Some(last) = self.editions.last() else { return };
        let Some(policy) = last.policy.clone() else { return };
        let cut = members.cut(&policy);
        if cut != last.cut {
            self.editions.push(Edition { from: version, policy: Some(policy), cut });
        }
    }

    /// Forgets what was over before version `settled`. Says whether the policy lives, and whether its buckets are to go.
    fn forget_before(&mut self, settled: u64) -> (bool, bool) {
        let was = self.editions.len();
        while self.editions.get(1).is_some_and(|next| next.from <= settled) {
            self.editions.remove(0);
        }
        let alive = self.editions.len() > 1 || self.editions.iter().any(|e| e.policy.is_some());
        let changed = self.editions.len() != was;
        let pooled = self.editions.iter().any(|e| e.cut.as_ref().is_some_and(|cut| cut.pooled));
        (alive, !alive || changed && !pooled)
    }

    fn advance(&mut self, tau: Micros) {
        let passed = tau - self.unseen.at;
        let (rate, burst) = self.pool;
        self.unseen.level.accrue(rate.or_zero(), passed, burst.or_zero());
        self.unseen.at = self.unseen.at.max(tau);
    }

    /// All regions' reserves, as the pool counts them.
    fn reserved(&self, acked: &[u64]) -> (Rate, Tokens) {
        let counted = acked.iter().enumerate().map(|(i, acked)| most(&self.editions, *acked, i));
        counted.fold(Default::default(), |(r, b): (Rate, Tokens), (rate, cap)| (r + rate, b + cap))
    }

    /// Works out what regions may use and what the pool counts, and clips levels to what is left.
    fn recount(&mut self, acked: &[u64]) {
        let Some(now) = self.editions.last() else { return };
        let mut before = std::mem::take(&mut self.usable);
        // A region that is new had nothing before.
        before.resize(acked.len(), Part::default());
        self.unseen_parts.resize(acked.len(), None);
        let Some(whole) = &now.cut else {
            self.usable = vec![Part::default(); acked.len()];
            self.pool = Default::default();
            return;
        };
        self.usable = (0..acked.len()).map(|i| least(&self.editions, whole, i)).collect();
        let (rate, burst) = self.reserved(acked);
        self.pool = (whole.rate - rate, whole.burst + whole.overshoot() - burst);
        if !whole.pooled {
            self.pool = (self.pool.0.min(Rate::ZERO), self.pool.1.min(Tokens::ZERO)); // crumbs of rounding
        }
        let tau = self.unseen.at;
        if let Some((_, span)) = now.counts() {
            // What was held back for a change that is a span old is over.
            self.unseen_parts.iter_mut().for_each(|unseen| *unseen = unseen.filter(|u| u.at + span > tau));
        }
        let lent = self.may_lend();
        for (unseen, (old, new)) in self.unseen_parts.iter_mut().zip(before.iter().zip(&self.usable)) {
            *unseen = Unseen::after_change(old.shape(), new.shape(), lent, *unseen, tau);
        }
        self.unseen.level.clip(self.pool.1.or_zero());
    }

    /// A policy that is new starts full.
    fn fill(&mut self) {
        self.unseen.level = Level::new(self.pool.1.or_zero());
        self.unseen_parts.fill(None);
    }
}

impl Edition {
    fn of(policy: &Policy, members: &Members, from: u64) -> Self {
        Self { from, policy: Some(Arc::new(policy.clone())), cut: members.cut(policy) }
    }

    fn lends_permits(&self) -> bool {
        let permits = self.policy.as_ref().is_some_and(|policy| policy.permits().is_some());
        permits && self.cut.as_ref().is_some_and(|cut| cut.pooled)
    }

    /// Is idle reserve of it lent?
    fn lends(&self) -> bool {
        let windowed = self.policy.as_ref().is_some_and(|policy| policy.window().is_some());
        self.cut.as_ref().is_some_and(|cut| cut.pooled) && !windowed && !self.lends_permits()
    }

    /// A policy that is no more, until everyone knows: a limit of nothing.
    fn removed(regions: usize, from: u64) -> Self {
        let parts = vec![Part::default(); regions];
        let cut = Cut { rate: Rate::ZERO, burst: Tokens::ZERO, parts, lease: Micros::ZERO, pooled: false };
        Self { from, policy: None, cut: Some(cut) }
    }

    /// Its part of a limit (of nothing, where it was no region yet); `None`: there is no limit.
    fn part(&self, region: usize) -> Option<Part> {
        self.cut.as_ref().map(|cut| cut.parts.get(region).copied().unwrap_or_default())
    }
}

/// The smallest reserve of a region over all versions in play. The overdraft is a part of the capacity: only their sum
/// must not grow early.
fn least(editions: &[Edition], now: &Cut, region: usize) -> Part {
    let part = now.parts.get(region).copied().unwrap_or_default();
    if planted(Bug::RaiseAtOnce) {
        return part;
    }
    editions.iter().filter_map(|e| e.part(region)).fold(part, |least, part| least.least(&part))
}

/// The largest reserve of a region over all versions from the one that it has acknowledged on.
fn most(editions: &[Edition], acked: u64, region: usize) -> (Rate, Tokens) {
    let ends = editions.iter().skip(1).map(|next| next.from).chain([u64::MAX]);
    let acked = if planted(Bug::ShrinkUnacknowledged) { u64::MAX.saturating_sub(1) } else { acked };
    // What holders of permits were told counts until the version settles.
    let told = editions.iter().any(Edition::lends_permits);
    let open = editions.iter().zip(ends).filter(|(_, end)| told || *end > acked);
    let parts = open.filter_map(|(e, _)| e.part(region));
    parts.fold(Default::default(), |(r, c): (Rate, Tokens), p| (r.max(p.rate), c.max(p.cap())))
}

/// Could these be policies at all? Config has checked them; an entry of the log is checked for what would break sums.
fn sound(policies: &[Policy]) -> bool {
    let mut names: Vec<&str> = policies.iter().map(|p| &*p.name).collect();
    names.sort_unstable();
    names.dedup();
    let fits = |share: Share| share <= Share::ALL;
    let amounts = |p: &Policy| match &p.limit {
        Limit::TokenBucket(b) => {
            b.rate() <= Rate::per_second(TOKENS_MAX) && b.burst() <= Tokens::whole(TOKENS_MAX)
        }
        Limit::Quota(quota) => {
            let length = match quota.per {
                Window::Calendar(_) => true,
                Window::Length { seconds } => (1..=LENGTH_MAX_S).contains(&seconds),
            };
            length && quota.tokens() <= Tokens::whole(TOKENS_MAX)
        }
        Limit::Concurrent(concurrent) => concurrent.tokens() <= Tokens::whole(TOKENS_MAX),
        Limit::Unlimited => true,
    };
    let overshoot = |p: &Policy| match p.mode {
        Mode::Approximate { max_overshoot } => fits(max_overshoot),
        Mode::Strict | Mode::Split => true,
    };
    policies.len() <= POLICIES_MAX
        && names.len() == policies.len()
        && policies
            .iter()
            .all(|p| amounts(p) && overshoot(p) && fits(p.reserve.rate) && fits(p.reserve.burst))
}
