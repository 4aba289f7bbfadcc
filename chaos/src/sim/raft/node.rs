//! One node's state, and what each message does to it. No time, no chance, no sending in here.

use super::{Item, Outcome, Payload};
use quorate::quota::amount::Micros;
use quorate::quota::pool::{Op, Pool, RaftClock};
use quorate::raft::Replica;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Between two signs of life of a leader with nothing to say.
const HEARTBEAT: Micros = Micros::millis(250);
/// What was sent and not acknowledged for so long is sent again.
const RESEND: Micros = Micros::millis(900);
/// Entries in one message.
const BATCH: usize = 64;

/// Between nodes.
#[derive(Clone, Debug)]
pub(super) enum Message {
    Vote { term: u64, last: (u64, u64) },
    Voted { term: u64, granted: bool },
    Append(Append),
    Snapshot { term: u64, base: Arc<Base> },
    Appended { term: u64, upto: u64, fits: bool },
    Propose { id: u64, ops: Vec<Op> },
    Proposed { id: u64, outcome: Outcome },
}

#[derive(Clone, Debug)]
pub(super) struct Append {
    term: u64,
    before: (u64, u64),
    items: Vec<Item>,
    commit: u64,
}

/// Where the answer to a proposal goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reply {
    Here { id: u64 },
    To { region: usize, id: u64 },
}

/// What the log begins after.
#[derive(Clone, Debug)]
pub(super) struct Base {
    index: u64,
    term: u64,
    pool: Pool,
    voters: Arc<Vec<usize>>,
}

#[derive(Debug)]
enum Role {
    Follower,
    Candidate { votes: BTreeSet<usize> },
    Leader { peers: Vec<Peer> },
}

#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    matched: u64,
    sent: u64,
    sent_at: Micros,
    /// When it was last believed that something does not fit.
    sent_back_at: Option<Micros>,
}

#[derive(Debug)]
pub(super) struct Node {
    pub up: bool,
    pub replica: Arc<Replica>,
    // On disk at once.
    pub term: u64,
    vote: Option<usize>,
    /// The policies that the region has acknowledged.
    pub acknowledged: u64,
    base: Arc<Base>,
    // On disk up to `durable`.
    log: Vec<Item>,
    durable: u64,
    // In memory.
    commit: u64,
    applied: u64,
    role: Role,
    pub leader: Option<usize>,
    pub stand_at: Micros,
    /// The Raft clocks of its leaderships, oldest first.
    pub clocks: Vec<RaftClock>,
    queue: Vec<(Vec<Op>, Reply)>,
    replies: BTreeMap<u64, Vec<Reply>>,
    voters: Arc<Vec<usize>>,
}

impl Node {
    pub fn new((pool, voters): (Pool, usize)) -> Self {
        let voters = Arc::new((0..voters).collect::<Vec<_>>());
        let replica = Arc::new(Replica::new(pool.clone()));
        let base = Arc::new(Base { index: 0, term: 0, pool, voters: Arc::clone(&voters) });
        Self {
            up: false,
            replica,
            term: 1,
            vote: None,
            acknowledged: 0,
            base,
            log: Vec::new(),
            durable: 0,
            commit: 0,
            applied: 0,
            role: Role::Follower,
            leader: None,
            stand_at: Micros::ZERO,
            clocks: Vec::new(),
            queue: Vec::new(),
            replies: BTreeMap::new(),
            voters,
        }
    }

    pub fn start(&mut self, stand_at: Micros) {
        self.up = true;
        self.stand_at = stand_at;
        self.replica = Arc::new(Replica::new(self.base.pool.clone()));
        (self.commit, self.applied) = (self.base.index, self.base.index);
    }

    /// It was shut down, and starts as a node that has never been.
    pub fn lose_disk(&mut self, genesis: (Pool, usize)) {
        *self = Self::new(genesis);
    }

    /// That node has lost its disk: what it had counts no more.
    pub fn forget_peer(&mut self, region: usize) {
        if let Role::Leader { peers } = &mut self.role
            && let Some(peer) = peers.get_mut(region)
        {
            *peer = Peer::default();
        }
    }

    pub fn crash(&mut self) {
        self.up = false;
        self.truncate(self.durable);
        (self.role, self.leader) = (Role::Follower, None);
        self.clocks.clear();
        self.queue.clear();
        self.replies.clear();
    }

    pub fn describe(&self) -> String {
        let role = match &self.role {
            Role::Follower => "follows",
            Role::Candidate { .. } => "stands",
            Role::Leader { .. } => "leads",
        };
        let (last, term) = self.last();
        format!(
            "up {}, {role} in term {}, log to {last} of term {term}, {} durable, {} committed, {} applied",
            self.up, self.term, self.durable, self.commit, self.applied
        )
    }

    pub fn leads(&self) -> bool {
        self.up && matches!(self.role, Role::Leader { .. })
    }

    pub fn leads_in(&self, term: u64) -> bool {
        self.leads() && self.term == term
    }

    pub fn voters(&self) -> &[usize] {
        &self.voters
    }

    /// A change of voters is not committed yet.
    pub fn is_changing(&self) -> bool {
        let behind = usize::try_from(self.commit - self.base.index).unwrap_or(usize::MAX);
        self.log.iter().skip(behind).any(|item| matches!(item.payload, Payload::Voters(_)))
    }

    /// Has it, as a leader, committed something in its own term?
    pub fn has_committed(&self) -> bool {
        self.term_at(self.commit) == Some(self.term)
    }

    /// Index and term of the last entry.
    pub fn last(&self) -> (u64, u64) {
        (self.base.index + self.log.len() as u64, self.log.last().map_or(self.base.term, |item| item.term))
    }

    fn term_at(&self, index: u64) -> Option<u64> {
        match index.checked_sub(self.base.index)? {
            0 => Some(self.base.term),
            n => self.log.get(usize::try_from(n - 1).ok()?).map(|item| item.term),
        }
    }

    pub fn append(&mut self, payload: Payload) {
        self.log.push(Item { term: self.term, payload });
        self.read_voters();
    }

    fn truncate(&mut self, to: u64) {
        let keep = usize::try_from(to.saturating_sub(self.base.index)).unwrap_or(usize::MAX);
        if keep < self.log.len() {
            self.log.truncate(keep);
            self.durable = self.durable.min(to);
            self.replies.retain(|index, _| *index <= to);
            self.read_voters();
        }
    }

    fn read_voters(&mut self) {
        let newest = self.log.iter().rev().find_map(|item| match &item.payload {
            Payload::Voters(voters) => Some(Arc::clone(voters)),
            _ => None,
        });
        self.voters = newest.unwrap_or_else(|| Arc::clone(&self.base.voters));
    }

    // --- Elections --------------------------------------------------------------------------------------------------

    pub fn campaign(&mut self, me: usize, stand_at: Micros) -> (Message, Arc<Vec<usize>>) {
        self.step_down(self.term + 1, stand_at);
        self.vote = Some(me);
        self.role = Role::Candidate { votes: BTreeSet::from([me]) };
        (Message::Vote { term: self.term, last: self.last_for_votes() }, Arc::clone(&self.voters))
    }

    /// (term, index), by which logs are compared.
    fn last_for_votes(&self) -> (u64, u64) {
        let (index, term) = self.last();
        (term, index)
    }

    pub fn vote(&mut self, from: usize, term: u64, last: (u64, u64), stand_at: Micros) -> Message {
        if term > self.term {
            // Asking for votes does not put off one's own standing; granting one does.
            let own = self.stand_at;
            self.step_down(term, own);
        }
        let free = self.vote.is_none_or(|vote| vote == from);
        let granted = term == self.term && free && last >= self.last_for_votes();
        if granted {
            self.vote = Some(from);
            self.stand_at = stand_at;
        }
        Message::Voted { term: self.term, granted }
    }

    pub fn voted(&mut self, from: usize, term: u64, granted: bool) -> bool {
        if term > self.term {
            let own = self.stand_at;
            self.step_down(term, own);
        }
        match &mut self.role {
            Role::Candidate { votes } if term == self.term && granted => votes.insert(from),
            _ => false,
        }
    }

    /// Has it a majority? Then it leads.
    pub fn elect(&mut self, nodes: usize) -> bool {
        let Role::Candidate { votes } = &self.role else { return false };
        let have = self.voters.iter().filter(|voter| votes.contains(voter)).count();
        if have * 2 <= self.voters.len() {
            return false;
        }
        let sent = self.last().0;
        self.role = Role::Leader { peers: vec![Peer { sent, ..Peer::default() }; nodes] };
        self.leader = self.vote;
        self.append(Payload::Blank);
        true
    }

    fn step_down(&mut self, term: u64, stand_at: Micros) {
        if term > self.term {
            (self.term, self.vote) = (term, None);
        }
        (self.role, self.leader, self.stand_at) = (Role::Follower, None, stand_at);
    }

    // --- The log ----------------------------------------------------------------------------------------------------

    /// What the leader has to tell this node now.
    pub fn news_for(&mut self, me: usize, to: usize, now: Micros) -> Option<Message> {
        let (last, _) = self.last();
        let (term, commit, base) = (self.term, self.commit, Arc::clone(&self.base));
        let Role::Leader { peers } = &mut self.role else { return None };
        let peer = peers.get_mut(to).filter(|_| to != me)?;
        if peer.sent > peer.matched && now - peer.sent_at > RESEND {
            peer.sent = peer.matched;
        }
        let quiet = now - peer.sent_at > HEARTBEAT;
        if peer.sent >= last && !quiet {
            return None;
        }
        peer.sent_at = now;
        let before = peer.sent;
        if before < base.index {
            peer.sent = base.index;
            return Some(Message::Snapshot { term, base });
        }
        let skip = usize::try_from(before - base.index).unwrap_or(usize::MAX);
        let items: Vec<Item> = self.log.iter().skip(skip).take(BATCH).cloned().collect();
        peer.sent = before + items.len() as u64;
        let before = (before, self.term_at(before)?);
        Some(Message::Append(Append { term, before, items, commit }))
    }

    /// An append of a leader. Returns the answer, and up to where it must be on disk before it is sent.
    pub fn follow(&mut self, from: usize, append: Append, stand_at: Micros) -> (Message, Option<(u64, u64)>) {
        if append.term < self.term {
            return (Message::Appended { term: self.term, upto: 0, fits: false }, None);
        }
        self.step_down(append.term, stand_at);
        self.leader = Some(from);
        let (mut at, term) = append.before;
        let known = at <= self.commit || self.term_at(at) == Some(term);
        if !known {
            // What is committed fits for certain.
            return (Message::Appended { term: self.term, upto: self.commit, fits: false }, None);
        }
        for item in append.items {
            at += 1;
            if at <= self.commit || self.term_at(at) == Some(item.term) {
                continue;
            }
            self.truncate(at - 1);
            self.log.push(item);
        }
        self.read_voters();
        self.commit = self.commit.max(append.commit.min(at));
        let stored = self.term_at(at).filter(|_| at > self.durable).map(|term| (at, term));
        (Message::Appended { term: self.term, upto: at, fits: true }, stored)
    }

    /// A snapshot of a leader.
    pub fn restore(&mut self, from: usize, term: u64, base: &Arc<Base>, stand_at: Micros) -> Message {
        if term < self.term {
            return Message::Appended { term: self.term, upto: 0, fits: false };
        }
        self.step_down(term, stand_at);
        self.leader = Some(from);
        if base.index > self.commit && self.term_at(base.index) == Some(base.term) {
            // It has all that, and what comes after may be committed because this node has it (section 7).
            (self.commit, self.durable) = (base.index, self.durable.max(base.index));
        } else if base.index > self.commit {
            self.log.clear();
            self.replies.clear();
            self.base = Arc::clone(base);
            (self.commit, self.applied, self.durable) = (base.index, base.index, base.index);
            self.replica.restore(base.pool.clone());
            self.read_voters();
        }
        Message::Appended { term: self.term, upto: base.index, fits: true }
    }

    /// A follower's answer. Returns whether there is more to send it.
    pub fn appended(&mut self, from: usize, (term, upto, fits): (u64, u64, bool), now: Micros) -> bool {
        if term > self.term {
            let own = self.stand_at;
            self.step_down(term, own);
        }
        let last = self.last().0;
        let Role::Leader { peers } = &mut self.role else { return false };
        let Some(peer) = peers.get_mut(from).filter(|_| term == self.term) else { return false };
        if fits {
            peer.matched = peer.matched.max(upto);
            peer.sent = peer.sent.max(peer.matched);
        } else {
            // Everything on the way behind what did not fit is sent back, too. Were each answered by sending anew, lines that
            // double what they carry would fill up with nothing else.
            if peer.sent_back_at.is_some_and(|at| now - at < HEARTBEAT) {
                return false;
            }
            peer.sent_back_at = Some(now);
            peer.sent = upto.max(peer.matched);
        }
        peer.sent < last
    }

    /// The disk has the log up to here, if it still reads so.
    pub fn stored(&mut self, me: usize, upto: u64, term: u64) -> bool {
        let still = upto <= self.base.index || self.term_at(upto) == Some(term);
        if still {
            self.durable = self.durable.max(upto);
            let durable = self.durable;
            if let Role::Leader { peers } = &mut self.role
                && let Some(own) = peers.get_mut(me)
            {
                own.matched = own.matched.max(durable);
            }
        }
        still
    }

    /// The leader counts who has what; only entries of its own term are committed by counting (section 5.4.2).
    pub fn advance(&mut self) -> bool {
        let Role::Leader { peers } = &self.role else { return false };
        let mut matched: Vec<u64> = self.voters.iter().map(|v| peers[*v].matched).collect();
        matched.sort_unstable();
        let Some(majority) = matched.get(matched.len().saturating_sub(1) / 2).copied() else { return false };
        let moved = majority > self.commit && self.term_at(majority) == Some(self.term);
        if moved {
            self.commit = majority;
        }
        moved
    }

    pub fn next_to_apply(&mut self) -> Option<(u64, Item, Vec<Reply>)> {
        if self.applied >= self.commit {
            return None;
        }
        let at = usize::try_from(self.applied - self.base.index).ok()?;
        let item = self.log.get(at)?.clone();
        self.applied += 1;
        Some((self.applied, item, self.replies.remove(&self.applied).unwrap_or_default()))
    }

    pub fn compact(&mut self, log_max: usize) {
        let applied = usize::try_from(self.applied - self.base.index).unwrap_or(0);
        if self.log.len() <= log_max || self.durable < self.applied {
            return;
        }
        let kept = self.log.split_off(applied);
        let behind = std::mem::replace(&mut self.log, kept);
        let voters = behind.iter().rev().find_map(|item| match &item.payload {
            Payload::Voters(voters) => Some(Arc::clone(voters)),
            _ => None,
        });
        let voters = voters.unwrap_or_else(|| Arc::clone(&self.base.voters));
        let term = behind.last().map_or(self.base.term, |item| item.term);
        let pool = self.replica.pool().read().clone();
        self.base = Arc::new(Base { index: self.applied, term, pool, voters });
    }

    // --- Proposals --------------------------------------------------------------------------------------------------

    /// Says whether it is the first of an entry.
    pub fn enqueue(&mut self, ops: Vec<Op>, reply: Reply) -> bool {
        self.queue.push((ops, reply));
        self.queue.len() == 1
    }

    /// Everything that waits to go into an entry.
    pub fn gathered(&mut self) -> (Vec<Op>, Vec<Reply>) {
        let mut all = (Vec::new(), Vec::new());
        for (ops, reply) in std::mem::take(&mut self.queue) {
            all.0.extend(ops);
            all.1.push(reply);
        }
        all
    }

    /// Appends as the leader, whatever the term is by now.
    pub fn lead_with(&mut self, payload: Payload, replies: Vec<Reply>) -> Result<(), Vec<Reply>> {
        if !self.leads() {
            return Err(replies);
        }
        self.append(payload);
        self.replies.insert(self.last().0, replies);
        Ok(())
    }
}
