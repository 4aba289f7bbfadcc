//! Regions that come, leave, die and come back.

use super::*;

/// The most names that a history has.
const NAMES: usize = 6;

impl World {
    /// Whom this life speaks for, as far as it knows.
    pub(super) fn seat(&self, i: usize) -> Option<RegionId> {
        let Node { replica, region, life, .. } = &self.nodes[i];
        if self.is(Bug::FormerLife) {
            return replica.member(*region).map(|member| member.id);
        }
        replica.seat(&replica.member(*region)?.name, *life)
    }

    pub(super) fn is_newcomer(&self, i: usize) -> bool {
        let founders = self.log.first().map_or(0, |(_, founding)| match &founding.ops[..] {
            [Op::Found { regions, .. }] => regions.len() as u64,
            _ => 0,
        });
        self.nodes[i].life > founders
    }

    pub(super) fn any_alive(&mut self) -> usize {
        let alive: Vec<usize> = (0..self.nodes.len()).filter(|i| !self.nodes[*i].dead).collect();
        self.rng.pick(&alive)
    }

    /// Somebody comes, leaves, dies, or comes back.
    pub(super) fn change_regions(&mut self) {
        let members: Vec<Member> = self.pool.members().collect();
        let hapless = self.hapless && self.rng.percent(80);
        let at = if hapless { 0 } else { self.rng.int(0, members.len() as i64 - 1) as usize };
        let member = &members[at];
        let process = self.nodes.iter().position(|node| node.life == member.node && !node.dead);
        let add = |name: &RegionName, previous| Op::AddRegion(AddRegion { name: name.clone(), previous });
        let remove = |presume_dead| {
            Op::RemoveRegion(RemoveRegion { region: member.id, node: member.node, presume_dead })
        };
        let op = match (member.standing, process) {
            (Standing::Out, _) => add(&member.name, member.node),
            (_, None) if !self.pool.policies.is_awaited(member.id) => add(&member.name, member.node),
            // The operator is right: there is no process any more. At once, or after somebody has tried without.
            (_, None) => remove(true),
            (Standing::Leaving { .. }, Some(i)) if self.rng.percent(30) && self.die(i) => remove(true),
            (Standing::In, Some(i)) if self.rng.percent(25) && self.die(i) => remove(true),
            (Standing::In, Some(_)) if hapless => return,
            (Standing::In, Some(i)) if self.rng.percent(50) => {
                if self.rng.percent(40) {
                    // Just then its lines are cut, so that it does not hear of it.
                    self.nodes[i].cut_off = self.now + self.rng.int(10 * SECOND, 120 * SECOND);
                }
                remove(false)
            }
            _ if members.len() < NAMES => add(&regions(NAMES)[members.len()], 0),
            _ => return,
        };
        if matches!(op, Op::RemoveRegion(RemoveRegion { presume_dead: true, .. }))
            && (hapless || self.rng.percent(50))
        {
            // A replacement is at hand.
            let soon = self.now + self.rng.int(300 * MS, 3 * SECOND);
            self.at(soon, Event::Arrive(add(&member.name, member.node)));
        }
        let sender = self.any_alive();
        self.send(sender, op);
    }

    /// A process ends for good, unless it is the last one.
    fn die(&mut self, i: usize) -> bool {
        if self.nodes.iter().filter(|node| !node.dead).count() < 2 {
            return false;
        }
        self.nodes[i].dead = true;
        if self.leader == Some(i) {
            self.leader = None;
            self.open.clear();
        }
        true
    }

    /// Starts a process for each region that has come, and ends most of those that have left.
    pub(super) fn arrivals(&mut self) {
        for member in self.pool.members().collect::<Vec<_>>() {
            let runs = self.nodes.iter().any(|node| node.life == member.node);
            if member.standing == Standing::In && !runs {
                self.came += 1;
                self.arrive_as(&member);
            }
        }
        for i in 0..self.nodes.len() {
            let Node { region, life, dead, .. } = self.nodes[i];
            let member = self.pool.member(region).unwrap();
            let out = member.node != life || member.standing == Standing::Out;
            if out && !dead && self.rng.percent(10) && self.die(i) {
                self.left += 1;
            }
        }
    }

    /// A new life of a region: it begins with the log, or with a snapshot.
    fn arrive_as(&mut self, member: &Member) {
        let mut node =
            Node::new(&mut self.rng, &self.pool, self.policy, usize::from(member.id.0), self.drift);
        let now = Micros(self.now);
        self.nonce += 1;
        // Its very first: it has spent nothing.
        let full = self.pool.epoch(member.id).0 == 0;
        (node.life, node.nonce) = (member.node, self.nonce);
        node.generation = Generation { start: node.store_clock.at(now), full, known: false };
        node.borrower = Borrower::new(node.mono.at(now));
        (node.part, node.seen_at) = (Part::default(), node.mono.at(now));
        let from_log = self.rng.percent(60);
        if from_log {
            (node.replica, node.applied) = (Pool::default(), 0);
        } else {
            node.applied = self.log.len();
        }
        let i = self.nodes.len();
        self.nodes.push(node);
        let longest = if self.hapless { SECOND } else { 5 * SECOND };
        let begins = self.now + self.rng.int(0, longest);
        self.at(begins, Event::Tick(i));
        if from_log {
            let longest = if self.hapless { SECOND } else { 20 * SECOND };
            let takes = self.rng.int(100 * MS, longest);
            for n in 0..self.log.len() as i64 {
                self.at(begins + takes * n / self.log.len() as i64, Event::Learn(i));
            }
        }
    }
}
