//! What happened lately: differences between two looks at the cluster, in words.

use crate::server::state::Event;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Events that are kept.
pub const EVENTS_MAX: usize = 256;

/// The last events.
#[derive(Debug, Default)]
pub struct Journal {
    events: VecDeque<Event>,
    last: u64,
    seen: Option<Observed>,
}

/// What is looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Who leads.
    pub leader: Option<String>,
    /// Raft's term.
    pub term: u64,
    /// The version of the policies.
    pub policies: u64,
    /// Every region has acknowledged it.
    pub settled: bool,
    /// Buckets whose books did not balance, so far.
    pub breaches: u64,
    /// Resets of buckets that not every region has heard of, or has just heard of: by number, what was reset, by whom and why.
    pub resets: BTreeMap<u64, String>,
    /// The regions.
    pub regions: BTreeMap<String, ObservedRegion>,
    /// Regions and policies whose requests go by `on_store_failure`, and what that is.
    pub fallbacks: BTreeSet<(String, String, &'static str)>,
}

/// What is looked at of a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedRegion {
    /// It is the one that looks.
    pub me: bool,
    /// See [`crate::server::state::RegionView::standing`].
    pub standing: String,
    /// How often it has joined.
    pub epoch: u64,
    /// It answers pings.
    pub reachable: bool,
    /// Why its store is away, or that it is not; `None`: not heard lately.
    pub store: Option<Result<(), String>>,
    /// Why it is not ready, or that it is; `None`: not heard lately.
    pub ready: Option<Result<(), String>>,
}

/// An event without number and time.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Draft {
    kind: &'static str,
    level: &'static str,
    region: Option<String>,
    text: String,
}

impl Journal {
    /// Compares with the last look; returns what is new. The first look only begins the journal.
    pub fn look(&mut self, now: Observed, at_ms: u64) -> Vec<Event> {
        let drafts = match &self.seen {
            Some(before) => differences(before, &now),
            None => vec![draft("region", "info", None, "this daemon has started".into())],
        };
        self.seen = Some(now);
        drafts.into_iter().map(|draft| self.add(draft, at_ms)).collect()
    }

    /// All that are kept, the oldest first.
    pub fn events(&self) -> impl DoubleEndedIterator<Item = &Event> {
        self.events.iter()
    }

    fn add(&mut self, draft: Draft, at_ms: u64) -> Event {
        self.last = self.last.saturating_add(1);
        let Draft { kind, level, region, text } = draft;
        let event = Event { id: self.last, at_ms, kind: kind.into(), level: level.into(), region, text };
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(event.clone());
        event
    }
}

fn draft(kind: &'static str, level: &'static str, region: Option<&str>, text: String) -> Draft {
    Draft { kind, level, region: region.map(str::to_owned), text }
}

fn differences(before: &Observed, now: &Observed) -> Vec<Draft> {
    let mut drafts = Vec::new();
    if before.leader != now.leader || before.term != now.term && now.leader.is_some() {
        drafts.push(match &now.leader {
            Some(leader) => {
                let text = format!("{leader} leads, in term {}", now.term);
                draft("leader", "info", Some(leader), text)
            }
            None => {
                let text = format!("nobody leads as far as is known here (term {})", now.term);
                draft("leader", "warn", None, text)
            }
        });
    }
    if now.policies > before.policies {
        let text = format!("policies version {} is in force", now.policies);
        drafts.push(draft("policies", "info", None, text));
    }
    if now.settled && (!before.settled || now.policies > before.policies) {
        let text = format!("policies version {}: every region goes by it", now.policies);
        drafts.push(draft("policies", "info", None, text));
    }
    if now.breaches > before.breaches {
        let text = "the books of a bucket do not balance: it is frozen, nothing is lent from it".into();
        drafts.push(draft("books", "error", None, text));
    }
    // Numbers grow, and the newest of each bucket is there for a while.
    let last = before.resets.keys().next_back().copied().unwrap_or(0);
    for (_, what) in now.resets.iter().filter(|(number, _)| **number > last) {
        drafts.push(draft("reset", "warn", None, what.clone()));
    }
    for (name, region) in &now.regions {
        match before.regions.get(name) {
            Some(was) => differences_of(name, was, region, &mut drafts),
            None => drafts.push(draft("region", "info", Some(name), format!("{name} is in the cluster"))),
        }
    }
    for name in before.regions.keys().filter(|name| !now.regions.contains_key(*name)) {
        drafts.push(draft("region", "info", Some(name), format!("{name} is out of the cluster")));
    }
    for (region, policy, failure) in now.fallbacks.difference(&before.fallbacks) {
        let text =
            format!("{region}: the store gives no answer, `{policy}` goes by on_store_failure: {failure}");
        drafts.push(draft("fallback", "warn", Some(region), text));
    }
    for (region, policy, _) in before.fallbacks.difference(&now.fallbacks) {
        let text = format!("{region}: no request of `{policy}` goes by on_store_failure any more");
        drafts.push(draft("fallback", "info", Some(region), text));
    }
    drafts
}

fn differences_of(name: &str, was: &ObservedRegion, is: &ObservedRegion, drafts: &mut Vec<Draft>) {
    let mut add = |kind, level, text| drafts.push(draft(kind, level, Some(name), text));
    if was.standing != is.standing {
        add("region", "info", format!("{name} is {} now (was {})", said(&is.standing), said(&was.standing)));
    }
    if is.epoch > was.epoch {
        let void = if is.epoch > 1 { ": what it was lent before counts as spent" } else { "" };
        add("epoch", "info", format!("{name} has joined, epoch {}{void}", is.epoch));
    }
    match (was.reachable, is.reachable) {
        (true, false) if !is.me => add("peer", "warn", format!("{name} does not answer: cut off, or down")),
        (false, true) if !is.me => add("peer", "info", format!("{name} answers again")),
        _ => (),
    }
    match (&was.store, &is.store) {
        (Some(Ok(())) | None, Some(Err(why))) => {
            add("store", "warn", format!("{name} has lost its store: {why}"))
        }
        (Some(Err(_)), Some(Ok(()))) => add("store", "info", format!("{name} has its store again")),
        _ => (),
    }
    match (&was.ready, &is.ready) {
        (Some(Ok(())), Some(Err(why))) => add("ready", "warn", format!("{name} is not ready: {why}")),
        (Some(Err(_)), Some(Ok(()))) => add("ready", "info", format!("{name} is ready")),
        _ => (),
    }
}

fn said(standing: &str) -> &str {
    if standing.is_empty() { "not founded" } else { standing }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(epoch: u64) -> ObservedRegion {
        ObservedRegion {
            standing: "in".into(),
            epoch,
            reachable: true,
            store: Some(Ok(())),
            ready: Some(Ok(())),
            ..ObservedRegion::default()
        }
    }

    fn calm() -> Observed {
        Observed {
            leader: Some("a".into()),
            term: 3,
            policies: 1,
            settled: true,
            regions: [("a".into(), region(1)), ("b".into(), region(1))].into(),
            ..Observed::default()
        }
    }

    fn told(change: impl FnOnce(&mut Observed)) -> Vec<(String, String, String)> {
        let mut journal = Journal::default();
        assert_eq!(journal.look(calm(), 1).len(), 1);
        assert!(journal.look(calm(), 2).is_empty(), "nothing happened");
        let mut now = calm();
        change(&mut now);
        journal.look(now, 3).into_iter().map(|e| (e.kind, e.level, e.text)).collect()
    }

    #[test]
    fn each_change_is_told_once_and_at_its_level() {
        let one = |kind: &str, level: &str, text: &str, told: Vec<(String, String, String)>| {
            assert_eq!(told, [(kind.into(), level.into(), text.into())]);
        };
        one("leader", "info", "b leads, in term 4", told(|o| (o.leader, o.term) = (Some("b".into()), 4)));
        let nobody = "nobody leads as far as is known here (term 3)";
        one("leader", "warn", nobody, told(|o| o.leader = None));
        one(
            "policies",
            "info",
            "policies version 2 is in force",
            told(|o| (o.policies, o.settled) = (2, false)),
        );
        let b = |change: fn(&mut ObservedRegion)| told(|o| change(o.regions.get_mut("b").unwrap()));
        one(
            "epoch",
            "info",
            "b has joined, epoch 2: what it was lent before counts as spent",
            b(|r| r.epoch = 2),
        );
        one("peer", "warn", "b does not answer: cut off, or down", b(|r| r.reachable = false));
        one("store", "warn", "b has lost its store: refused", b(|r| r.store = Some(Err("refused".into()))));
        one("ready", "warn", "b is not ready: x", b(|r| r.ready = Some(Err("x".into()))));
        one("region", "info", "b is leaving now (was in)", b(|r| r.standing = "leaving".into()));
        one("region", "info", "b is out of the cluster", told(|o| drop(o.regions.remove("b"))));
        let frozen = "the books of a bucket do not balance: it is frozen, nothing is lent from it";
        one("books", "error", frozen, told(|o| o.breaches = 1));
        let reset = "`p`: a bucket was reset by 10.0.0.1: sorry";
        one("reset", "warn", reset, told(|o| o.resets = [(3, reset.into())].into()));
        let fell = "a: the store gives no answer, `p` goes by on_store_failure: allow";
        one("fallback", "warn", fell, told(|o| o.fallbacks = [("a".into(), "p".into(), "allow")].into()));
    }

    #[test]
    fn silence_is_not_news_about_a_store() {
        assert!(told(|o| o.regions.get_mut("b").unwrap().store = None).is_empty());
    }

    #[test]
    fn it_is_bounded_and_numbers_go_on() {
        let mut journal = Journal::default();
        for term in 0..1_000 {
            journal.look(Observed { term, ..calm() }, term);
        }
        assert_eq!(journal.events().count(), EVENTS_MAX);
        assert_eq!(journal.events().next_back().unwrap().id, 1_000);
    }
}
