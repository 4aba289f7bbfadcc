//! Regions that join, leave, and die for good; as an operator would do it, step by step, and each step tried until it is done.

use super::faults::Effect;
use super::machine::pass;
use super::{Phase, World};
use quorate::quota::amount::Micros;
use quorate::quota::pool::{AddRegion, Member, Op, RemoveRegion, Standing};
use quorate::raft::Log as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// The fewest members that a run goes down to.
const MEMBERS_MIN: usize = 2;

impl World {
    /// One change at a time: this region joins if it is out, and leaves, or dies for good, if it is in.
    pub(super) fn change_members(self: &Arc<Self>, a: usize) {
        if !self.logs.lets_members_change() || self.changing.swap(true, Ordering::Relaxed) {
            return;
        }
        let members = self.regions.iter().filter(|region| region.is_member()).count();
        let world = Arc::clone(self);
        tokio::spawn(async move {
            if !world.regions[a].is_member() {
                world.join(a).await;
            } else if members > MEMBERS_MIN {
                let dead = world.chance.percent(50);
                world.leave(a, dead).await;
            }
            world.changing.store(false, Ordering::Relaxed);
        });
    }

    async fn join(self: &Arc<Self>, a: usize) {
        let region = &self.regions[a];
        self.note(Micros::ZERO, &[a], Effect::None, format!("r{a} joins"));
        let previous = self.member(a).map_or(0, |member| member.node);
        let add = Op::AddRegion(AddRegion { name: region.name.clone(), previous });
        let node = loop {
            match self.member(a) {
                Some(member) if member.standing == Standing::In => break member.node,
                _ if self.phase() == Phase::Over => return,
                _ => self.propose(add.clone()).await,
            }
        };
        self.logs.lose_disk(a);
        region.set_node(node);
        region.start(&self.logs);
        self.vote(a, true).await;
    }

    /// It says itself that it uses nothing any more; or it is gone, and an operator says so.
    async fn leave(self: &Arc<Self>, a: usize, dead: bool) {
        let region = &self.regions[a];
        let Some(member) = self.member(a) else { return };
        let how = if dead { "dies for good and is removed" } else { "leaves" };
        self.note(Micros::seconds(30), &[a], Effect::Disables, format!("r{a} {how}"));
        if dead {
            region.set_node(0); // nobody starts it again
            region.crash(&self.logs);
        }
        let remove = RemoveRegion { region: member.id, node: member.node, presume_dead: dead };
        loop {
            match self.member(a) {
                Some(member) if member.standing == Standing::Out => break,
                Some(member) if member.standing != Standing::In && dead => break,
                _ if self.phase() == Phase::Over => return,
                Some(member) if member.standing == Standing::In => {
                    self.propose(Op::RemoveRegion(remove)).await
                }
                _ => pass(Micros::millis(500)).await,
            }
        }
        self.vote(a, false).await;
        if !dead {
            region.set_node(0);
            region.crash(&self.logs);
        }
        region.shelf.lose_data();
    }

    /// Makes it a voter, or makes it none, and waits until that is so.
    async fn vote(&self, a: usize, votes: bool) {
        while self.phase() != Phase::Over {
            if let Some(mut voters) = self.logs.voters() {
                if voters.contains(&a) == votes {
                    return;
                }
                if votes {
                    voters.push(a);
                } else {
                    voters.retain(|voter| *voter != a);
                }
                self.logs.set_voters(voters);
            }
            pass(Micros::millis(300)).await;
        }
    }

    /// Proposes, from some region that is up, whatever comes of it.
    async fn propose(&self, op: Op) {
        let up: Vec<usize> = (0..self.regions.len()).filter(|i| self.regions[*i].is_up()).collect();
        if !up.is_empty()
            && let Some(log) = self.logs.log(self.chance.pick(&up), 0)
        {
            // What has happened is read from the pool.
            let _ = log.propose(vec![op], Instant::now() + Duration::from_secs(2)).await;
        }
        pass(Micros::millis(200)).await;
    }

    /// The region as the committed pool knows it.
    fn member(&self, a: usize) -> Option<Member> {
        let name = &self.regions[a].name;
        self.watch.with_pool(|pool| pool.members().find(|member| member.name == *name))
    }
}
