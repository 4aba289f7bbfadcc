//! Every message between regions as version 1 of the wire has it, frozen in `tests/formats/peer-1`: what an older daemon sends is
//! read for ever, and what this one sends is what an older one reads. So a cluster works while half of it is upgraded.
//!
//! A new message, or a new variant of an old one, gets a sample of its own: `WRITE_SAMPLES=1 cargo test` writes those that are
//! not there. A sample that is there never changes.

use super::wire::{
    self, Hello, HelloReply, MemberChange, MemberFault, MemberReply, Propose, ProposeFault, ProposeReply,
    Question, QuestionReply, SnapshotHead, Who, WhoReply,
};
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::policy::{
    Algorithm, BucketId, Concurrent, KeyMatch, Limit, Mode, OnStoreFailure, Policy, Quota, Reserve, Share,
    TokenBucket, Unit, ValueMatch, Window,
};
use crate::quota::pool::{
    Ack, AddRegion, Applied, Ask, AskInWindow, Entry, FoundWith, Join, Lend, NoReset, Op, PolicyOutcome,
    RegionId, RemoveRegion, ResetBucket, SetPolicies, Stamp, TakeReset, TimeOfDay,
};
use crate::raft::types::{
    AppendReply, AppendRequest, Command, LeaderId, LogId, PeerNode, SnapshotMeta, TypeConfig, Vote,
};
use openraft::entry::RaftEntry as _;
use openraft::raft::{
    AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest, TransferLeaderResponse, VoteRequest,
    VoteResponse,
};
use openraft::{EntryPayload, Membership};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[test]
fn messages_are_what_they_were() {
    let samples = Samples::new();
    let vote = Vote { leader_id: LeaderId { term: 5, node_id: 2 }, committed: true };
    let candidate = Vote { committed: false, ..vote };
    samples.check("hello", &Hello { founding: 0xdead_beef });
    let leader = Some("us-east".into());
    samples.check("hello-reply", &HelloReply { founding: 7, initialized: true, leader });
    samples.check("who", &Who { region: "eu-west".into() });
    let members = vec![(3, "us-east".into(), "https://quorate.us-east.example:8082".to_owned())];
    let who = WhoReply { initialized: true, seat: Some(300), applied: 17, index: 9, members };
    samples.check("who-reply", &who);

    samples.check("question", &Question { body: br#""report""#.to_vec() });
    samples.check("question-reply", &QuestionReply { body: br#"{"region":{},"policies":{}}"#.to_vec() });

    let vote_request = |leadership_transfer| VoteRequest::<TypeConfig> {
        vote: candidate,
        last_log_id: log_id(8),
        leadership_transfer,
    };
    samples.check("vote", &vote_request(false));
    samples.check("vote-transferred", &vote_request(true));
    let reply = VoteResponse::<TypeConfig> { vote, vote_granted: true, last_log_id: None };
    samples.check("vote-reply", &reply);

    samples.check("append", &append(vote));
    samples.check("heartbeat", &AppendRequest { entries: vec![], ..append(vote) });
    samples.check("heartbeat-reply", &AppendEntriesResponse::<TypeConfig>::Success);
    samples.check("heartbeat-reply-partial", &AppendEntriesResponse::<TypeConfig>::PartialSuccess(log_id(4)));
    samples.check("heartbeat-reply-conflict", &AppendEntriesResponse::<TypeConfig>::Conflict);
    samples.check("heartbeat-reply-vote", &AppendEntriesResponse::<TypeConfig>::HigherVote(vote));
    samples.check::<AppendReply>("append-reply", &Ok(log_id(12)));
    let conflict = openraft::raft::StreamAppendError::Conflict;
    samples.check::<AppendReply>("append-reply-conflict", &Err(conflict(log_id(12).unwrap())));
    let higher = openraft::raft::StreamAppendError::HigherVote;
    samples.check::<AppendReply>("append-reply-vote", &Err(higher(vote)));

    let meta = SnapshotMeta { last_log_id: log_id(12), ..SnapshotMeta::default() };
    samples.check("snapshot-head", &SnapshotHead { vote, meta, bytes: 694 });
    samples.check("snapshot-reply", &SnapshotResponse::<TypeConfig> { vote });
    let transfer = TransferLeaderRequest::<TypeConfig>::new(vote, 3, log_id(12));
    samples.check("transfer-leader", &transfer);
    samples.check::<TransferLeaderResponse<TypeConfig>>("transfer-leader-reply", &Ok(()));
}

#[test]
fn proposals_are_what_they_were() {
    let samples = Samples::new();
    let propose = |ops| Propose { ops, wait_ms: 3_000, hops: 2 };
    samples.check("propose", &propose(ops()));
    samples.check("propose-resets", &propose(resets()));
    samples.check("propose-windows", &propose(windows()));
    samples.check("propose-limits", &propose(limits()));
    samples.check("propose-witnesses", &propose(witnesses()));
    samples.check("propose-loans", &propose(loans()));
    let applied = Applied {
        refused: false,
        records: vec![(RegionId(1), BucketId([7; 16]))],
        joined: vec![RegionId(2)],
        policies: Some(PolicyOutcome::Set(4)),
        acknowledged: true,
        breached: vec![BucketId([9; 16])],
    };
    let outcome = |outcome| Ok(Arc::new(Applied { policies: Some(outcome), ..Applied::default() }));
    samples.check::<ProposeReply>("propose-reply", &Ok(Arc::new(applied)));
    samples.check::<ProposeReply>("propose-reply-conflict", &outcome(PolicyOutcome::Conflict(3)));
    samples.check::<ProposeReply>("propose-reply-refused", &outcome(PolicyOutcome::Refused));
    samples.check::<ProposeReply>("propose-reply-reset", &outcome(PolicyOutcome::Reset(7)));
    for (name, why) in [
        ("propose-reply-no-limit", NoReset::NoLimit),
        ("propose-reply-frozen", NoReset::Frozen),
        ("propose-reply-too-many", NoReset::TooMany),
        ("propose-reply-too-long", NoReset::TooLong),
    ] {
        samples.check::<ProposeReply>(name, &outcome(PolicyOutcome::NotReset(why)));
    }
    for (name, fault) in [
        ("propose-fault-not-sent", ProposeFault::NotSent { retry: true }),
        ("propose-fault-unknown", ProposeFault::Unknown),
        ("propose-fault-refused", ProposeFault::Refused),
        ("propose-fault-too-large", ProposeFault::TooLarge),
        ("propose-fault-too-new", ProposeFault::TooNew { node: 4 }),
    ] {
        samples.check::<ProposeReply>(name, &Err(fault));
    }
}

#[test]
fn changes_of_members_are_what_they_were() {
    let samples = Samples::new();
    let (region, url) = ("ca-west".into(), "https://quorate.ca-west.example:8082".to_owned());
    samples.check("member-learn", &MemberChange::Learn { node: 4, region, url });
    samples.check("member-promote", &MemberChange::Promote { node: 4 });
    samples.check("member-demote", &MemberChange::Demote { node: 4 });
    samples.check("member-forget", &MemberChange::Forget { node: 4 });
    samples.check("member-lead", &MemberChange::Lead { node: 4 });
    samples.check::<MemberReply>("member-reply", &Ok(()));
    for (name, fault) in [
        ("member-fault-refused", MemberFault::Refused("no".into())),
        ("member-fault-not-now", MemberFault::NotNow("later".into())),
        ("member-fault-unknown", MemberFault::Unknown("who knows".into())),
    ] {
        samples.check::<MemberReply>(name, &Err(fault));
    }
}

#[test]
fn a_sample_that_differs_is_noticed() {
    let temp = tempfile::tempdir().unwrap();
    std::fs::write(temp.path().join("hello.bin"), wire::encode(&Hello { founding: 7 }).unwrap()).unwrap();
    let samples = Samples { folder: temp.path().to_owned() };
    samples.check("hello", &Hello { founding: 7 });
    let wrong = std::panic::catch_unwind(|| samples.check("hello", &Hello { founding: 8 }));
    assert!(wrong.is_err());
}

fn log_id(index: u64) -> Option<LogId> {
    Some(LogId { leader_id: LeaderId { term: 5, node_id: 2 }, index })
}

/// An entry of each kind.
fn append(vote: Vote) -> AppendRequest {
    let entry = |index, payload| RaftEntry::new(log_id(index).unwrap(), payload);
    let node =
        |region: &str| PeerNode { region: region.into(), url: format!("https://{region}.example:8082") };
    let nodes = BTreeMap::from([(1, node("eu-west")), (2, node("us-east")), (3, node("ap-south"))]);
    let joint = Membership::new(vec![BTreeSet::from([1, 2]), BTreeSet::from([2])], nodes).unwrap();
    let stamp = Stamp { term: 327_682, tau: Micros::seconds(86_400) };
    let command = Command::new(Entry { stamp, ops: ops() });
    AppendRequest {
        vote,
        prev_log_id: log_id(8),
        entries: vec![
            entry(9, EntryPayload::Blank),
            entry(10, EntryPayload::Normal(command)),
            entry(11, EntryPayload::Membership(joint)),
        ],
        leader_commit: log_id(9),
    }
}

type RaftEntry = crate::raft::types::LogEntry;

fn ask() -> Ask {
    let stamp = Stamp { term: 327_682, tau: Micros::seconds(86_399) };
    let (n, tokens) = (Micros::millis(250), Tokens::whole);
    Ask {
        region: RegionId(2),
        epoch: 3,
        policy: 5,
        bucket: BucketId([7; 16]),
        seq: 11,
        read_seq: 10,
        read_granted: tokens(40),
        held_burst: tokens(50),
        held_rate: Rate::per_second(20),
        returned: tokens(4),
        level: tokens(-3),
        demand: Rate::per_second(30),
        want: tokens(60),
        short: tokens(1),
        quantum: tokens(2),
        seen: stamp,
        age: n,
    }
}

/// One of each that the first version of the wire had.
fn ops() -> Vec<Op> {
    vec![
        Op::Found { regions: vec!["eu-west".into(), "us-east".into()], policies: policies() },
        Op::Ask(ask()),
        Op::Join(Join { region: RegionId(1), previous: 2, nonce: 1 << 50 }),
        Op::SetPolicies(SetPolicies { expected: Some(4), policies: policies() }),
        Op::SetPolicies(SetPolicies { expected: None, policies: vec![] }),
        Op::Ack(Ack { region: RegionId(1), version: 5 }),
        Op::AddRegion(AddRegion { name: "ca-west".into(), previous: 4 }),
        Op::RemoveRegion(RemoveRegion { region: RegionId(0), node: 1, presume_dead: true }),
    ]
}

/// Operations that came with resets.
fn resets() -> Vec<Op> {
    let (bucket, by, reason) = (BucketId([7; 16]), "10.0.0.7".to_owned(), "ticket 4711".to_owned());
    vec![
        Op::ResetBucket(ResetBucket { policy: 5, bucket, by, reason }),
        Op::TakeReset(TakeReset { region: RegionId(1), epoch: 3, bucket, number: 9 }),
    ]
}

/// Operations that came with quotas.
fn windows() -> Vec<Op> {
    let start = Micros::seconds(1_790_000_000);
    vec![
        Op::AskInWindow(AskInWindow { start, ask: ask() }),
        Op::TimeOfDay(TimeOfDay { region: RegionId(2), wall: start + Micros(1) }),
    ]
}

/// Operations of level 2.
fn witnesses() -> Vec<Op> {
    let members = vec!["eu-west".into(), "tie".into(), "us-east".into()];
    let ops = vec![
        Op::Level(2),
        Op::FoundWith(FoundWith { members, witnesses: vec!["tie".into()], policies: policies() }),
        Op::AddWitness(AddRegion { name: "tie".into(), previous: 4 }),
    ];
    assert!(ops.iter().all(|op| op.level() == 2));
    ops
}

/// Operations of level 4.
fn loans() -> Vec<Op> {
    let (rate, until) = (Rate::per_second(9), Micros::seconds(41));
    let ops = vec![Op::Level(4), Op::Lend(Lend { ask: ask(), rate, until, seen_term: 65_537 })];
    assert_eq!(ops.iter().map(Op::level).max(), Some(Lend::LEVEL));
    ops
}

/// What policies have learnt to say since.
fn limits() -> Vec<Op> {
    let quota = |per, algorithm| Limit::Quota(Quota { quota: 1_000_000, per, algorithm });
    let length = Window::Length { seconds: 900 };
    let named = |name: &str, limit| Policy { name: name.into(), limit, ..policies().remove(2) };
    let shared = KeyMatch { key: "path".into(), value: ValueMatch::Shared("/api/".into()) };
    let policies = vec![
        named("plan", quota(Window::Calendar(Unit::Month), Algorithm::FixedWindow)),
        named("hourly", quota(length, Algorithm::SlidingWindow)),
        named("logins", quota(length, Algorithm::SlidingLog)),
        named("exports", Limit::Concurrent(Concurrent { permits: 3, ttl: Micros::seconds(60) })),
        Policy { matches: vec![shared], ..named("shared", Limit::Unlimited) },
    ];
    vec![Op::SetPolicies(SetPolicies { expected: Some(9), policies })]
}

/// One of each mode, match, limit and failure.
fn policies() -> Vec<Policy> {
    let limit = |per| Limit::TokenBucket(TokenBucket { amount: 1_000, per, burst: 2_000 });
    let key = |key: &str, value| KeyMatch { key: key.into(), value };
    let strict = Policy {
        name: "tenant-requests".into(),
        domain: "api".into(),
        matches: vec![key("tenant", ValueMatch::Any)],
        limit: limit(Unit::Second),
        mode: Mode::Strict,
        reserve: Reserve::default(),
        weights: BTreeMap::from([("us-east".into(), 2), ("eu-west".into(), 1)]),
        wait: Micros::millis(250),
        on_store_failure: OnStoreFailure::Deny,
        shadow: false,
    };
    let max_overshoot = Share::percent(10);
    let approximate = Policy {
        name: "search".into(),
        matches: vec![key("op", ValueMatch::Exact("search".into()))],
        limit: limit(Unit::Minute),
        mode: Mode::Approximate { max_overshoot },
        on_store_failure: OnStoreFailure::Allow,
        shadow: true,
        ..strict.clone()
    };
    let split = Policy {
        name: "logins".into(),
        matches: vec![key("account", ValueMatch::Prefix("a".into()))],
        limit: limit(Unit::Day),
        mode: Mode::Split,
        on_store_failure: OnStoreFailure::Local,
        ..strict.clone()
    };
    let unlimited = Policy { name: "health".into(), limit: Limit::Unlimited, ..split.clone() };
    vec![strict, approximate, split, unlimited]
}

struct Samples {
    folder: PathBuf,
}

impl Samples {
    fn new() -> Self {
        Self { folder: Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats/peer-1") }
    }

    fn check<T: Serialize + DeserializeOwned + Debug>(&self, name: &str, value: &T) {
        let file = self.folder.join(format!("{name}.bin"));
        let now = wire::encode(value).unwrap();
        if !file.exists() && std::env::var_os("WRITE_SAMPLES").is_some() {
            std::fs::create_dir_all(&self.folder).unwrap();
            std::fs::write(&file, &now).unwrap();
        }
        let frozen = std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}; see above", file.display()));
        let read: T = wire::decode(&frozen).unwrap_or_else(|e| panic!("{name} is not read any more: {e}"));
        assert_eq!(format!("{read:?}"), format!("{value:?}"), "{name} is read as something else");
        assert_eq!(frozen, now, "{name} is written in a way that an older version does not read");
    }
}
