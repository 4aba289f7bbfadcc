//! What policies promise about a bucket over time.

use super::scenario::Load;
use crate::oracle::Edition;
use quorate::quota::amount::Micros;
use quorate::quota::policy::{Policy, RegionName};

/// A change of policies, or of the regions that share them.
#[derive(Clone, Debug)]
pub struct Change {
    /// When it was sent.
    pub sent: Micros,
    /// When every region had settled.
    pub settled: Option<Micros>,
    /// The policies from then on.
    pub policies: Vec<Policy>,
    /// The regions that share them from then on, in the cluster's own order.
    pub members: Vec<RegionName>,
}

/// What is in force, and for whom.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'t> {
    /// The policies.
    pub policies: &'t [Policy],
    /// The regions that share them, in the cluster's own order.
    pub members: &'t [RegionName],
}

/// A limit's editions: what it promises at `first`, and then after each change, in the order in which they were sent. `regions` are all
/// of the run, by number.
#[must_use]
pub fn editions(first: Terms<'_>, changes: &[Change], load: &Load, regions: &[RegionName]) -> Vec<Edition> {
    let Some(mut last) = edition(first, load, regions, Micros::ZERO) else { return Vec::new() };
    let mut editions = vec![last.clone()];
    for (number, change) in changes.iter().enumerate() {
        let terms = Terms { policies: &change.policies, members: &change.members };
        let Some(next) = edition(terms, load, regions, change.sent) else { continue };
        last = last.changing_to(change.sent, &next);
        editions.push(last.clone());
        // If the next was sent before this one had settled, all of them count until that has.
        let sent_next = changes.get(number + 1).map_or(Micros::MAX, |next| next.sent);
        if let Some(settled) = change.settled.filter(|settled| *settled <= sent_next) {
            last = Edition { from: settled, ..next };
            editions.push(last.clone());
        }
    }
    editions
}

/// What a limit promises; `None`: there is no such policy, or it is unlimited.
#[must_use]
pub fn edition(terms: Terms<'_>, load: &Load, regions: &[RegionName], from: Micros) -> Option<Edition> {
    let policy = terms.policies.iter().find(|p| *p.name == *load.policy)?;
    let mut edition = Edition::of(from, policy.mode, &policy.cut(terms.members)?);
    let member = |region: &RegionName| terms.members.iter().position(|member| member == region);
    for parts in [&mut edition.reserves, &mut edition.parts_max] {
        let part = |region| member(region).and_then(|at| parts.get(at)).copied().unwrap_or_default();
        *parts = regions.iter().map(part).collect();
    }
    Some(edition)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::scenario::Over;
    use quorate::quota::amount::Rate;
    use std::path::Path;
    use std::time::Duration;

    fn policies(rate: u32) -> Vec<Policy> {
        let yaml = format!(
            "policies: [ {{ name: p, domain: d, match: [ {{ key: k }} ], limit: {{ rate: {rate}/s, burst: 900 }}, mode: strict }} ]"
        );
        quorate::config::policies::parse(Path::new("p"), &yaml, None).expect("policies")
    }

    fn load() -> Load {
        Load {
            policy: "p".into(),
            domain: "d".into(),
            bucket: Vec::new(),
            pace: Vec::new(),
            cost: 1,
            from: Duration::ZERO,
            to: Duration::ZERO,
            over: Over::Http,
        }
    }

    fn rates(changes: &[(i64, Option<i64>, u32)]) -> Vec<(i64, Rate)> {
        let load = load();
        let members: [RegionName; 2] = ["a".into(), "b".into()];
        let change = |(sent, settled, rate): &(i64, Option<i64>, u32)| Change {
            sent: Micros(*sent),
            settled: settled.map(Micros),
            policies: policies(*rate),
            members: members.to_vec(),
        };
        let changes: Vec<Change> = changes.iter().map(change).collect();
        let first = Terms { policies: &policies(50), members: &members };
        let editions = editions(first, &changes, &load, &members);
        editions.iter().map(|e| (e.from.0, e.rate)).collect()
    }

    #[test]
    fn a_change_counts_with_its_predecessor_until_it_has_settled() {
        let per = Rate::per_second;
        assert_eq!(rates(&[(10, Some(20), 5)]), [(0, per(50)), (10, per(50)), (20, per(5))]);
        assert_eq!(rates(&[(10, None, 70)]), [(0, per(50)), (10, per(70))], "it never settled");
        let overlapping = rates(&[(10, Some(40), 5), (20, Some(40), 7)]);
        assert_eq!(overlapping, [(0, per(50)), (10, per(50)), (20, per(50)), (40, per(7))]);
    }

    #[test]
    fn parts_are_of_the_members_and_stand_at_the_regions_numbers() {
        let regions: Vec<RegionName> = ["b", "c", "a"].map(Into::into).to_vec();
        let members: Vec<RegionName> = ["a", "b"].map(Into::into).to_vec();
        let terms = Terms { policies: &policies(100), members: &members };
        let edition = edition(terms, &load(), &regions, Micros::ZERO).expect("an edition");
        let [b, c, a] = [0, 1, 2].map(|region| edition.reserve(region).0);
        assert_eq!((a, b, c), (Rate::per_second(1), Rate::per_second(1), Rate::ZERO), "2% among two");
    }
}
