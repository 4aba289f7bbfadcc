//! Members of several versions: what is too new for one of them waits, and what is too old has no place any more.

use super::*;
use quorate::quota::amount::Micros;
use quorate::quota::policy::*;
use quorate::quota::pool::{AddRegion, PolicyOutcome, SetPolicies};

const SHORT: Duration = Duration::from_millis(80);

fn witness(name: &str) -> Vec<Op> {
    vec![Op::AddWitness(AddRegion { name: name.into(), previous: 0 })]
}

fn permits(mode: Mode) -> Op {
    let policy = Policy {
        name: "jobs".into(),
        domain: "test".into(),
        matches: vec![KeyMatch { key: "tenant".into(), value: ValueMatch::Any }],
        limit: Limit::Concurrent(Concurrent { permits: 3, ttl: TTL_DEFAULT }),
        mode,
        reserve: Reserve::default(),
        weights: BTreeMap::new(),
        wait: Micros::ZERO,
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    };
    Op::SetPolicies(SetPolicies { expected: None, policies: vec![policy] })
}

/// What becomes of it once everyone has said which version it is of.
async fn outcome(cluster: &Cluster, i: usize, name: &str) -> Result<Applied, ProposeError> {
    cluster.propose(i, witness(name), LONG).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_region_holds_back_what_it_does_not_know() {
    let mut cluster = Cluster::new(LOCAL, SHORT).await;
    cluster.levels[1] = 1;
    cluster.start_all().await;
    cluster.leader().await;
    cluster.settled().await;
    // Whoever leads, and whoever proposes: the old one does not know it.
    for i in 0..NAMES.len() {
        let refused = outcome(&cluster, i, "tie").await;
        assert_eq!(refused, Err(ProposeError::TooNew { node: 2 }), "from region {i}");
        let refused = cluster.propose(i, vec![permits(Mode::Strict)], LONG).await;
        assert_eq!(refused, Err(ProposeError::TooNew { node: 2 }), "from region {i}");
    }
    assert_eq!(cluster.raft(0).pool().read().level(), 1);
    // What it knows goes on.
    let add = Op::AddRegion(AddRegion { name: "d-new".into(), previous: 0 });
    assert!(cluster.propose(0, vec![add], LONG).await.is_ok());
    assert!(cluster.propose(0, vec![permits(Mode::Split)], LONG).await.is_ok());
    assert_eq!(cluster.raft(0).pool().read().level(), 1);

    // One that cannot be asked may be old.
    cluster.kill(1).await;
    let refused = outcome(&cluster, 0, "tie").await;
    assert_eq!(refused, Err(ProposeError::TooNew { node: 2 }));

    // It is upgraded.
    cluster.levels[1] = LEVEL;
    cluster.start(1).await.unwrap();
    cluster.settled().await;
    let begun = Instant::now();
    let applied = loop {
        match outcome(&cluster, 0, "tie").await {
            Err(ProposeError::TooNew { .. }) if begun.elapsed() < LONG => {
                sleep(Duration::from_millis(50)).await
            }
            other => break other.unwrap(),
        }
    };
    assert!(matches!(applied.policies, Some(PolicyOutcome::Set(_))), "{applied:?}");
    let all_know = async |level| {
        let known = || (0..NAMES.len()).all(|i| cluster.raft(i).pool().read().level() == level);
        until("all know the level", || known().then_some(())).await;
    };
    all_know(2).await;
    let set = cluster.propose(0, vec![permits(Mode::Strict)], LONG).await.unwrap();
    assert!(matches!(set.policies, Some(PolicyOutcome::Set(_))), "{set:?}");
    all_know(3).await;

    // There is no way back: one of the old version is refused.
    cluster.kill(1).await;
    cluster.levels[1] = 1;
    cluster.start(1).await.unwrap();
    until("the old one is alone", || {
        let status = cluster.status(1);
        status.peers.iter().all(|peer| !peer.reachable).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_witness_leads_and_the_clock_goes_on() {
    let mut cluster = Cluster::new(LOCAL, SHORT).await;
    cluster.witnesses = vec![NAMES[2].into()];
    cluster.start_all().await;
    let leader = cluster.leader().await;
    cluster.settled().await;
    {
        let pool = cluster.raft(0).pool();
        let pool = pool.read();
        let witness = pool.members().find(|member| member.witness).unwrap();
        assert_eq!((&*witness.name, pool.level()), (NAMES[2], 2));
    }
    if leader != 2 {
        cluster.raft(leader).transfer_leader(&NAMES[2].into()).await.unwrap();
    }
    until("the witness leads", || (cluster.status(0).leader.as_deref() == Some(NAMES[2])).then_some(()))
        .await;
    let before = cluster.raft(0).pool().read().tau();
    cluster.isolate(1);
    let applied = cluster.propose(0, vec![], LONG).await;
    assert!(applied.is_ok(), "{applied:?}");
    until("Raft time to go on", || (cluster.raft(0).pool().read().tau() > before).then_some(())).await;
    assert_eq!(cluster.status(0).leader.as_deref(), Some(NAMES[2]));
}
