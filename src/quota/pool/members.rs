//! The regions of a cluster: those that are in it, those that leave, and those that have left.
//!
//! A [`RegionId`] is a name's for good. A name that comes back gets its old id, and goes on with its epoch: nothing that
//! its former life says counts any more. What it does not get back is its Raft node id: a region that lost its disk must
//! not vote as the one that it was.

use super::entry::RegionId;
use crate::quota::policy::{Cut, Part, Policy, RegionName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The most regions that a cluster has at one time.
pub const REGIONS_MAX: usize = 64;
/// The most names that a cluster has ever had.
pub const NAMES_MAX: usize = 256;
/// Raft node ids are below this.
pub const NODE_IDS: u64 = 1 << 16;
/// No cluster gives out so many node ids between a copy of its state and its end ...
const NODES_LEAP: u64 = 256;
/// ... nor so many epochs.
const EPOCHS_LEAP: u64 = 1 << 32;
/// The longest name, in bytes.
const NAME_BYTES_MAX: usize = 255;

/// Is a region in the cluster?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// It has its part of every limit (or will, once everyone knows), and borrows.
    In,
    /// It has no part any more and borrows nothing. Once everyone knows, it is out.
    Leaving {
        /// The version of the policies that left it out.
        version: u64,
    },
    /// It has left.
    Out,
}

/// A region that is or was in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its id.
    pub id: RegionId,
    /// Its name.
    pub name: RegionName,
    /// Its Raft node id: another one in each of its lives.
    pub node: u64,
    /// Is it in?
    pub standing: Standing,
    /// It votes, has no part of any limit and serves nobody.
    pub witness: bool,
}

/// All of them, by [`RegionId`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Members {
    names: Vec<RegionName>,
    seats: Vec<Seat>,
    next_node: u64,
    /// Those that vote and serve nobody.
    witnesses: BTreeSet<RegionId>,
}

/// The same before there were witnesses: snapshot formats 2 to 4.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct MembersV4 {
    names: Vec<RegionName>,
    seats: Vec<Seat>,
    next_node: u64,
}

impl From<MembersV4> for Members {
    fn from(v4: MembersV4) -> Self {
        let MembersV4 { names, seats, next_node } = v4;
        Self { names, seats, next_node, witnesses: BTreeSet::new() }
    }
}

impl From<Members> for MembersV4 {
    /// Whoever needs this knows that there are no witnesses.
    fn from(members: Members) -> Self {
        let Members { names, seats, next_node, witnesses: _ } = members;
        Self { names, seats, next_node }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Seat {
    node: u64,
    standing: Standing,
    /// Its epoch, and the nonce of the `Join` that began it.
    epoch: (u64, u64),
}

impl Members {
    /// The founders: their node ids count from 1.
    pub(super) fn found(names: Vec<RegionName>, witnesses: &[RegionName]) -> Self {
        let epochs = vec![(0, 0); names.len()];
        let mut founders = Self::with_epochs(names, epochs);
        founders.witnesses = witnesses.iter().filter_map(|name| founders.find(name)).collect();
        founders
    }

    /// Founders that have joined.
    pub(super) fn with_epochs(names: Vec<RegionName>, epochs: Vec<(u64, u64)>) -> Self {
        let seats = (1..).zip(epochs).map(|(node, epoch)| Seat { node, standing: Standing::In, epoch });
        let seats: Vec<Seat> = seats.take(names.len()).collect();
        let next_node = seats.last().map_or(1, |last| last.node.saturating_add(1));
        Self { names, seats, next_node, witnesses: BTreeSet::new() }
    }

    /// By id: who is in, and who ever was.
    pub(super) fn names(&self) -> &[RegionName] {
        &self.names
    }

    pub(super) fn find(&self, name: &str) -> Option<RegionId> {
        self.names.iter().zip(0_u16..).find(|(r, _)| &***r == name).map(|(_, i)| RegionId(i))
    }

    pub(super) fn get(&self, id: RegionId) -> Option<Member> {
        let at = usize::from(id.0);
        let (name, seat) = (self.names.get(at)?.clone(), self.seats.get(at)?);
        let witness = self.witnesses.contains(&id);
        Some(Member { id, name, node: seat.node, standing: seat.standing, witness })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Member> {
        (0_u16..).map_while(|i| self.get(RegionId(i)))
    }

    pub(super) fn standing(&self, id: RegionId) -> Standing {
        self.seat(id).map_or(Standing::Out, |seat| seat.standing)
    }

    /// How many are in.
    pub(super) fn count(&self) -> usize {
        self.seats.iter().filter(|seat| seat.standing == Standing::In).count()
    }

    /// How many of those serve callers.
    pub(super) fn serving(&self) -> usize {
        self.all().filter(|member| member.standing == Standing::In && !member.witness).count()
    }

    pub(super) fn epoch(&self, id: RegionId) -> (u64, u64) {
        self.seat(id).map_or((0, 0), |seat| seat.epoch)
    }

    /// Compare and set; false if `previous` is not the epoch, or the region has left.
    pub(super) fn join(&mut self, id: RegionId, previous: u64, nonce: u64) -> bool {
        let seat = self.seat_mut(id).filter(|s| s.standing != Standing::Out && s.epoch.0 == previous);
        seat.map(|seat| seat.epoch = (previous.saturating_add(1), nonce)).is_some()
    }

    /// Is there room for a region of this name?
    pub(super) fn has_room(&self, name: &str) -> bool {
        let known = self.find(name).is_some();
        self.count() < REGIONS_MAX
            && self.next_node < NODE_IDS
            && (known || self.names.len() < NAMES_MAX)
            && (1..=NAME_BYTES_MAX).contains(&name.len())
    }

    /// A region (or a witness) of this name comes (back): it is in, as a new node.
    pub(super) fn add(&mut self, name: &RegionName, witness: bool) -> Option<RegionId> {
        let node = self.next_node;
        self.next_node = node.saturating_add(1);
        let id = match self.find(name) {
            Some(id) => id,
            None => {
                self.names.push(name.clone());
                self.seats.push(Seat { node, standing: Standing::Out, epoch: (0, 0) });
                self.find(name)?
            }
        };
        let seat = self.seat_mut(id)?;
        (seat.node, seat.standing) = (node, Standing::In);
        if witness {
            self.witnesses.insert(id);
        } else {
            self.witnesses.remove(&id);
        }
        Some(id)
    }

    /// What comes is ahead of whatever older members, of whom nobody knows, can have been given: epochs and node ids.
    pub(super) fn leap(&mut self) {
        self.next_node = self.next_node.div_euclid(NODES_LEAP).saturating_add(2).saturating_mul(NODES_LEAP);
        for seat in &mut self.seats {
            seat.epoch = (seat.epoch.0.saturating_add(EPOCHS_LEAP), 0);
        }
    }

    /// It is out, and nothing counts any more that this life of it says. (Whoever has a part must [`Self::leave`] first.)
    pub(super) fn dismiss(&mut self, id: RegionId) {
        if let Some(seat) = self.seat_mut(id) {
            seat.standing = Standing::Out;
        }
        self.retire(id);
    }

    /// It has no part from this version on.
    pub(super) fn leave(&mut self, id: RegionId, version: u64) {
        if let Some(seat) = self.seat_mut(id) {
            seat.standing = Standing::Leaving { version };
        }
    }

    /// Nothing counts any more that this life of the region says.
    pub(super) fn retire(&mut self, id: RegionId) {
        if let Some(seat) = self.seat_mut(id) {
            seat.epoch = (seat.epoch.0.saturating_add(1), 0);
        }
    }

    /// A mistake, for tests: a region forgets that it has had former lives.
    #[cfg(test)]
    pub(super) fn forget_epoch(&mut self, id: RegionId) {
        if let Some(seat) = self.seat_mut(id) {
            seat.epoch = (0, 0);
        }
    }

    /// Those that were leaving, and whose last version has settled, are out.
    pub(super) fn complete(&mut self, settled: u64) -> Vec<RegionId> {
        let mut out = Vec::new();
        for (seat, i) in self.seats.iter_mut().zip(0_u16..) {
            if matches!(seat.standing, Standing::Leaving { version } if version <= settled) {
                seat.standing = Standing::Out;
                out.push(RegionId(i));
            }
        }
        out
    }

    /// Cuts a policy up for those that are in, and serve. The others have parts of nothing.
    pub(super) fn cut(&self, policy: &Policy) -> Option<Cut> {
        let serves = |member: &Member| member.standing == Standing::In && !member.witness;
        let present: Vec<RegionName> = self.all().filter(serves).map(|member| member.name).collect();
        let mut cut = policy.cut(&present)?;
        let mut parts = std::mem::take(&mut cut.parts).into_iter();
        let spread = self.all().map(|member| if serves(&member) { parts.next() } else { None });
        cut.parts = spread.map(|part: Option<Part>| part.unwrap_or_default()).collect();
        Some(cut)
    }

    fn seat(&self, id: RegionId) -> Option<&Seat> {
        self.seats.get(usize::from(id.0))
    }

    fn seat_mut(&mut self, id: RegionId) -> Option<&mut Seat> {
        self.seats.get_mut(usize::from(id.0))
    }
}
