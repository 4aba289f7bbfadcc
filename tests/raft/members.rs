//! Members come and go: each change by itself, and what is refused.

use super::*;
use quorate::quota::pool::{AddRegion, PolicyOutcome, RemoveRegion, Standing};
use quorate::raft::{MemberError, VOTERS_MAX, find_seat};

const SHORT: Duration = Duration::from_millis(80);

impl Cluster {
    fn url(&self, i: usize) -> String {
        format!("http://localhost:{}", self.addrs[i].port())
    }

    /// Lets a region into the pool; returns its node id.
    async fn admit(&self, via: usize, i: usize) -> u64 {
        let name = Self::name(i);
        let previous = {
            let pool = self.raft(via).pool();
            let pool = pool.read();
            pool.region(name).and_then(|id| pool.member(id)).map_or(0, |member| member.node)
        };
        let add = Op::AddRegion(AddRegion { name: name.into(), previous });
        let applied = self.propose(via, vec![add], LONG).await.unwrap();
        let Some(PolicyOutcome::Set(version)) = applied.policies else { panic!("{applied:?}") };
        self.sees(via, version).await;
        let pool = self.raft(via).pool();
        let pool = pool.read();
        pool.members().find(|member| &*member.name == name).unwrap().node
    }

    async fn sees(&self, i: usize, version: u64) {
        until("the pool to follow", || (self.raft(i).pool().read().version() >= version).then_some(())).await;
    }

    async fn remove(&self, via: usize, i: usize, presume_dead: bool) {
        let member = {
            let pool = self.raft(via).pool();
            let pool = pool.read();
            pool.member(pool.region(Self::name(i)).unwrap()).unwrap()
        };
        let remove = RemoveRegion { region: member.id, node: member.node, presume_dead };
        let applied = self.propose(via, vec![Op::RemoveRegion(remove)], LONG).await.unwrap();
        assert!(matches!(applied.policies, Some(PolicyOutcome::Set(_))), "{applied:?}");
    }

    /// Asks for a change until it can be made.
    async fn change(&self, via: usize, change: impl AsyncFn(&Raft) -> Result<(), MemberError>) {
        let begun = Instant::now();
        loop {
            match change(self.raft(via)).await {
                Ok(()) => return,
                Err(MemberError::NotNow(why)) => assert!(begun.elapsed() < LONG, "{why}"),
                Err(other) => panic!("{other}"),
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// As a learner, and then as a voter.
    async fn join(&mut self, via: usize, i: usize) -> u64 {
        let node = self.admit(via, i).await;
        self.start(i).await.unwrap();
        self.learns(via, i, node).await;
        self.change(via, async |raft| raft.promote(node, soon()).await).await;
        node
    }

    async fn learns(&self, via: usize, i: usize, node: u64) {
        let (name, url): (RegionName, _) = (Self::name(i).into(), self.url(i));
        self.change(via, async |raft| raft.add_learner(node, &name, &url, soon()).await).await;
    }

    fn voters(&self, i: usize) -> Vec<String> {
        let members = self.status(i).members;
        members.iter().filter(|m| m.voter).map(|m| m.region.to_string()).collect()
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_joins_votes_leads_and_leaves() {
    let mut cluster = Cluster::started(LOCAL, SHORT).await;
    let leader = cluster.leader().await;
    let follower = (leader + 1) % NAMES.len();
    let new = cluster.room_for_newcomer();

    // Before it is let in it waits, and says so.
    let waits_for = tokio::sync::watch::Sender::new(None);
    let config = cluster.config(new);
    let waiting = timeout(Duration::from_secs(1), find_seat(&config, &waits_for)).await;
    assert!(waiting.is_err(), "{waiting:?}");
    let why = waits_for.borrow().clone().unwrap();
    assert!(why.contains("quorate region add aa-new"), "{why}");
    assert!(!cluster.dir(new).exists(), "it has not begun to be anyone");

    // All of it is asked of a follower.
    let node = cluster.admit(follower, new).await;
    assert_eq!(node, 4, "not its position in any list");
    cluster.start(new).await.unwrap();
    cluster.learns(follower, new, node).await;
    cluster.learns(follower, new, node).await;
    until("it to learn the log", || {
        let status = cluster.status(new);
        (status.id == 4 && status.role == Role::Learner && status.leader.is_some()).then_some(())
    })
    .await;
    cluster.settled().await;
    assert_eq!(cluster.voters(leader).len(), 3);
    cluster.propose(new, vec![], LONG).await.unwrap();
    cluster.change(follower, async |raft| raft.promote(node, soon()).await).await;
    cluster.change(follower, async |raft| raft.promote(node, soon()).await).await;
    assert_eq!(cluster.voters(leader).len(), 4);

    // It leads, seen by all, also by those who have never heard of it in their configuration.
    until("it to be reachable", || {
        cluster.status(leader).peers.iter().any(|p| &*p.region == "aa-new" && p.reachable).then_some(())
    })
    .await;
    cluster.change(follower, async |raft| raft.lead(node, soon()).await).await;
    assert_eq!(cluster.leader().await, new);
    cluster.propose(follower, vec![], LONG).await.unwrap();
    cluster.settled().await;

    // A founder that was away while it came, and knows it from nowhere, follows it all the same.
    cluster.kill(leader).await;
    cluster.propose(follower, vec![], LONG).await.unwrap();
    cluster.start(leader).await.unwrap();
    cluster.settled().await;

    // It is forgotten: it hands leadership over first, and disturbs nobody afterwards.
    cluster.change(follower, async |raft| raft.forget(node, soon()).await).await;
    cluster.change(follower, async |raft| raft.forget(node, soon()).await).await;
    assert_eq!(cluster.voters(follower), NAMES);
    let leader = until("one of the founders to lead", || {
        (0..NAMES.len()).find(|&i| cluster.status(i).role == Role::Leader)
    })
    .await;
    let term = cluster.status(leader).term;
    until("it to hear that it was removed", || cluster.status(new).removed.then_some(())).await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(4) {
        cluster.propose(leader, vec![], LONG).await.unwrap();
        sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(cluster.status(leader).term, term, "its elections disturb nobody");
    assert!(cluster.propose(new, vec![], Duration::from_millis(300)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_would_lose_quorum_is_refused() {
    let mut cluster = Cluster::started(LOCAL, SHORT).await;
    let leader = cluster.leader().await;
    let (dead, other) = ((leader + 1) % NAMES.len(), (leader + 2) % NAMES.len());
    let node_of = |i: usize| cluster.status(i).id;
    let (dead_node, other_node) = (node_of(dead), node_of(other));
    until("pings", || cluster.status(leader).peers.iter().all(|p| p.reachable).then_some(())).await;
    cluster.kill(dead).await;
    until("it to be missed", || (!cluster.status(leader).peers.iter().all(|p| p.reachable)).then_some(()))
        .await;
    for change in ["demote", "forget"] {
        let refused = match change {
            "demote" => cluster.raft(leader).demote(other_node, soon()).await,
            _ => cluster.raft(leader).forget(other_node, soon()).await,
        };
        let Err(MemberError::Refused(why)) = refused else { panic!("{change}: {refused:?}") };
        assert!(why.contains("lose quorum") && why.contains(NAMES[dead]), "{why}");
    }
    assert!(matches!(cluster.raft(leader).lead(dead_node, soon()).await, Err(MemberError::Refused(_))));
    assert!(matches!(cluster.raft(leader).promote(77, soon()).await, Err(MemberError::Refused(_))));
    // The dead one can go: the two that remain are there.
    cluster.change(other, async |raft| raft.forget(dead_node, soon()).await).await;
    assert_eq!(cluster.voters(leader).len(), 2);
    // A region under another node id while it is still there: not before it is forgotten.
    let again = cluster.raft(leader).add_learner(9, &NAMES[other].into(), "http://localhost:1", soon()).await;
    assert!(matches!(again, Err(MemberError::Refused(_))), "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_than_five_vote() {
    let mut cluster = Cluster::started(LOCAL, SHORT).await;
    let leader = cluster.leader().await;
    for _ in NAMES.len()..VOTERS_MAX {
        let new = cluster.room_for_newcomer();
        cluster.join(leader, new).await;
    }
    assert_eq!(cluster.voters(leader).len(), VOTERS_MAX);
    let sixth = cluster.room_for_newcomer();
    let node = cluster.admit(leader, sixth).await;
    cluster.start(sixth).await.unwrap();
    cluster.learns(leader, sixth, node).await;
    cluster.settled().await;
    let refused = cluster.raft(leader).promote(node, soon()).await;
    let Err(MemberError::Refused(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("stays a learner"), "{why}");
    // A vote is free again, once another has lost it.
    let other = cluster.status((leader + 1) % NAMES.len()).id;
    cluster.change(leader, async |raft| raft.demote(other, soon()).await).await;
    cluster.change(leader, async |raft| raft.promote(node, soon()).await).await;
    assert_eq!(cluster.voters(leader).len(), VOTERS_MAX);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_that_lost_its_disk_comes_back_as_another_node() {
    let mut cluster = Cluster::started(LOCAL, SHORT).await;
    cluster.settled().await;
    let leader = cluster.leader().await;
    let lost = (leader + 1) % NAMES.len();
    let former = cluster.status(lost).id;
    until("pings", || cluster.status(leader).peers.iter().all(|p| p.reachable).then_some(())).await;
    cluster.kill(lost).await;
    std::fs::rename(cluster.dir(lost), cluster.temp.path().join("former")).unwrap();
    assert!(matches!(cluster.start(lost).await, Err(RaftError::DataLost { .. })));

    cluster.remove(leader, lost, true).await;
    cluster.change(leader, async |raft| raft.forget(former, soon()).await).await;
    let node = cluster.admit(leader, lost).await;
    assert_eq!(node, 4);
    cluster.start(lost).await.unwrap();
    cluster.learns(leader, lost, node).await;
    cluster.change(leader, async |raft| raft.promote(node, soon()).await).await;
    cluster.settled().await;
    assert_eq!(cluster.status(lost).id, 4);
    assert_eq!(cluster.voters(leader).len(), 3);
    let pool = cluster.raft(lost).pool();
    let seat = pool.read().seat(NAMES[lost], node).unwrap();
    assert_eq!(pool.read().member(seat).unwrap().standing, Standing::In);
    cluster.propose(lost, vec![], LONG).await.unwrap();

    // Its former life, found again, is nobody any more.
    cluster.kill(lost).await;
    std::fs::rename(cluster.dir(lost), cluster.temp.path().join("new")).unwrap();
    std::fs::rename(cluster.temp.path().join("former"), cluster.dir(lost)).unwrap();
    let term = cluster.status(leader).term;
    cluster.start(lost).await.unwrap();
    until("it to hear that it is nobody", || cluster.status(lost).removed.then_some(())).await;
    cluster.propose(leader, vec![], LONG).await.unwrap();
    assert_eq!(cluster.status(leader).term, term);
    assert!(cluster.propose(lost, vec![], Duration::from_millis(300)).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_that_found_nobody_when_it_started_gets_no_entries_as_another_node() {
    let mut cluster = Cluster::started(LOCAL, SHORT).await;
    cluster.settled().await;
    let leader = cluster.leader().await;
    let new = cluster.room_for_newcomer();
    // It takes the first place in its own configuration, which is another region's in the cluster.
    let founders = cluster.addrs[..NAMES.len()].to_vec();
    cluster.addrs[..NAMES.len()].fill(free_addr());
    cluster.start(new).await.unwrap();
    assert_eq!(cluster.status(new).id, 1);
    cluster.kill(new).await;

    // The cluster is there again, and lets it in while it runs.
    cluster.addrs[..NAMES.len()].clone_from_slice(&founders);
    cluster.start(new).await.unwrap();
    let node = cluster.admit(leader, new).await;
    assert_eq!(node, 4);
    cluster.learns(leader, new, node).await;
    let fault = until("it to hear who it is", || {
        let status = cluster.status(new);
        assert_eq!(status.last_log, None, "entries for node 4 in the log of node 1");
        status.fault
    })
    .await;
    assert!(fault.contains("start it again"), "{fault}");

    cluster.kill(new).await;
    cluster.start(new).await.unwrap();
    assert_eq!(cluster.status(new).id, node);
    cluster.change(leader, async |raft| raft.promote(node, soon()).await).await;
    cluster.settled().await;
    assert_eq!(cluster.voters(leader).len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_a_region_is_is_not_asked_twice() {
    let mut cluster = Cluster::started(LOCAL, SHORT).await;
    cluster.settled().await;
    let leader = cluster.leader().await;
    let new = cluster.room_for_newcomer();
    let node = cluster.admit(leader, new).await;
    let waits_for = tokio::sync::watch::Sender::new(None);
    let seat = timeout(LONG, find_seat(&cluster.config(new), &waits_for)).await.unwrap().unwrap();
    assert_eq!(seat, Some(node));
    // Nobody can be reached any more.
    let nowhere = free_addr();
    cluster.addrs[..NAMES.len()].fill(nowhere);
    let raft = Raft::start(RaftConfig { seat, ..cluster.config(new) }, vec![]).await.unwrap();
    assert_eq!(raft.node_id(), node, "not its place in the configuration");
    raft.shutdown().await;
}
