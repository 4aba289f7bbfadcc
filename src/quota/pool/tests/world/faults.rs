//! What goes wrong.

use super::*;

impl World {
    pub(super) fn fault(&mut self) {
        let longest = if self.changing == Changing::Regions { 4 * SECOND } else { 6 * SECOND };
        let gap = self.rng.int(200 * MS, longest);
        self.at(self.now + gap, Event::Fault);
        let i = self.any_alive();
        let changing = matches!(self.changing, Changing::Policies | Changing::Regions);
        let kind = match self.changing {
            Changing::Regions if self.rng.percent(if self.hapless { 60 } else { 30 }) => 10,
            Changing::Policies if self.rng.percent(25) => 8,
            Changing::Resets if self.rng.percent(30) && self.resets < 3 => 11,
            _ => self.rng.int(0, 9),
        };
        match kind {
            0 => {
                self.leader = None;
                self.open.clear();
            }
            1 => self.elect(),
            2 => {
                let longest = match self.changing {
                    Changing::Nothing | Changing::Resets => 30,
                    Changing::Policies => 90,
                    // (Those that are removed are cut off for longer.)
                    Changing::Regions => 20,
                };
                self.nodes[i].cut_off = self.now + self.rng.int(SECOND, longest * SECOND);
            }
            3 => self.nodes[i].paused = self.now + self.rng.int(10 * MS, 15 * SECOND),
            4 => self.lose_data(i),
            5 => self.new_session(i),
            6 => {
                let ppm = self.rng.int(-1, 1) * self.drift;
                let now = Micros(self.now);
                let node = &mut self.nodes[i];
                if ppm >= 0 {
                    node.mono.bend(now, ppm)
                } else {
                    node.store_clock.bend(now, ppm)
                }
                node.store_clock.bend(now, ppm);
            }
            7 => self.attacker = i,
            8 if changing && self.bounds.len() < 4 => self.change_policies(i),
            10 if self.bounds.len() < 6 => self.change_regions(),
            11 => self.reset(i),
            _ if self.leader.is_none() => self.elect(),
            _ => {}
        }
    }

    /// The daemon starts over: what was lent under the older session is not used any more, buckets keep their levels. What it
    /// had worked out of buckets that the store does not hold, it has forgotten.
    fn new_session(&mut self, i: usize) {
        let (mono, now) = (self.mono(i), self.store_now(i));
        let shape = self.shape(self.nodes[i].part);
        self.nonce += 1;
        let policy = self.policy;
        let node = &mut self.nodes[i];
        let in_pool = node.replica.unseen(policy, node.region);
        let in_pool = in_pool.map(|unseen| unseen.on_clock(node.replica.tau(), now));
        node.unseen = Unseen::adopt(None, shape, true, in_pool, node.generation, now);
        node.nonce = self.nonce;
        node.filled = 0;
        node.epoch = None;
        node.ask = None;
        node.borrower.restart(mono);
    }

    fn lose_data(&mut self, i: usize) {
        if self.is(Bug::RollbackUndetected) {
            self.nodes[i].store = self.nodes[i].snapshot.clone();
            return;
        }
        self.new_session(i);
        let now = self.store_now(i);
        let node = &mut self.nodes[i];
        node.store = StoreBucket::default();
        node.generation = Generation { start: now, ..Generation::default() };
        match self.bug {
            Some(Bug::LoansForgotten) => node.generation.known = true,
            Some(Bug::FullAfterLoss) => node.generation.full = true,
            Some(Bug::OverdraftForgottenOnLoss) => {
                node.generation.full = true;
                node.unseen = Some(Unseen { level: node.part.overdraft, at: now });
            }
            _ => {}
        }
    }

    fn change_policies(&mut self, i: usize) {
        let now: Vec<Policy> = self.pool.policies().map(|p| Policy::clone(p.policy)).collect();
        let mut policies = match self.rng.int(0, 9) {
            0 if !now.is_empty() => vec![], // removed; may come back
            1..6 if !now.is_empty() => vec![scaled(&mut self.rng, &now[0])],
            _ => vec![some_policy(&mut self.rng)],
        };
        if self.rng.percent(10) {
            policies.push(Policy { name: "another".into(), ..some_policy(&mut self.rng) });
        }
        let expected = self.rng.percent(50).then(|| self.pool.version());
        self.send(i, Op::SetPolicies(SetPolicies { expected, policies }));
    }
}

/// The same limit, larger or smaller; or the same size, cut up in another way.
fn scaled(rng: &mut Rng, p: &Policy) -> Policy {
    let mut p = p.clone();
    if rng.percent(50) {
        p.reserve = some_policy(rng).reserve;
    } else if let Limit::TokenBucket(b) = &mut p.limit {
        let percent = rng.int(50, 200) as u64;
        b.amount = b.amount * percent / 100;
        b.burst = b.burst * percent / 100;
    }
    p
}
