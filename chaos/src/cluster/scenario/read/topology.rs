//! `topology`

use super::super::{Persistence, RedisPlan, Topology};
use super::{Reader, choice};
use quorate::config::decode::{self, Fields};
use quorate::config::fault::shown;
use quorate::config::yaml::{Node, Value};
use quorate::config::{REGIONS_MAX, Wrong};
use quorate::quota::policy::RegionName;
use std::num::NonZeroU64;
use std::time::Duration;

const TOPOLOGY: &[&str] = &["regions", "later", "rtt", "jitter", "bandwidth", "redis"];
const REDIS: &[&str] = &["persistence", "replica", "timeout", "rtt"];
const RTT_MAX: Duration = Duration::from_secs(2);

impl Reader<'_> {
    pub(super) fn topology(&mut self, node: &Node) -> Option<Topology> {
        let fields = Fields::of(node, "topology", TOPOLOGY, self.faults)?;
        let regions = fields.need("regions", "list two regions or more", self.faults);
        let founders = regions.and_then(|node| self.regions(node, "topology.regions", 2));
        let later =
            fields.get("later").map_or(Some(Vec::new()), |node| self.regions(node, "topology.later", 0));
        let jitter = fields.read_or("jitter", Duration::ZERO, self.faults, rtt);
        let bandwidth = match fields.get("bandwidth") {
            None => Some(None),
            Some(_) => fields.read("bandwidth", self.faults, bandwidth).map(Some),
        };
        let redis = self.redis(&fields);
        let (mut regions, later) = (founders?, later?);
        let founders = regions.len();
        if let Some(twice) = later.iter().find(|r| regions.contains(r)) {
            self.faults.push(
                fields.mark(),
                format!("`{twice}` founds the cluster and joins later"),
                "list it once",
            );
        }
        regions.extend(later);
        let rtt = match fields.get("rtt") {
            None => Some(vec![vec![Duration::ZERO; regions.len()]; regions.len()]),
            Some(node) => self.rtts(node, &regions),
        };
        Some(Topology { founders, rtt: rtt?, jitter: jitter?, bandwidth: bandwidth?, redis: redis?, regions })
    }

    /// Region names, sorted: by number they are in the order of the cluster's own numbers.
    fn regions(&mut self, node: &Node, name: &str, min: usize) -> Option<Vec<RegionName>> {
        let items = decode::items(node, name, self.faults)?;
        let names: Vec<Option<RegionName>> = items
            .iter()
            .map(|item| decode::read(item, name, self.faults, |t| decode::name(t).map(RegionName::from)))
            .collect();
        let mut names = names.into_iter().collect::<Option<Vec<_>>>()?;
        names.sort();
        names.dedup();
        if names.len() < min || names.len() > REGIONS_MAX || names.len() < items.len() {
            let what = format!("`{name}` has {} different regions", names.len());
            self.faults.push(&node.mark, what, format!("name {min} to {REGIONS_MAX}, each once"));
            return None;
        }
        Some(names)
    }

    /// One round trip for all pairs, or by pair: `us-east/eu-west: 80ms`.
    fn rtts(&mut self, node: &Node, regions: &[RegionName]) -> Option<Vec<Vec<Duration>>> {
        let n = regions.len();
        let Value::Map(entries) = &node.value else {
            let all = decode::read(node, "topology.rtt", self.faults, rtt)?;
            return Some(
                (0..n).map(|i| (0..n).map(|j| if i == j { Duration::ZERO } else { all }).collect()).collect(),
            );
        };
        let mut matrix = vec![vec![None; n]; n];
        let mut sound = true;
        for (key, node) in entries {
            let pair = key.name.split_once('/');
            let number = |name: &str| regions.iter().position(|r| &**r == name.trim());
            let pair = pair.and_then(|(a, b)| Some((number(a)?, number(b)?))).filter(|(a, b)| a != b);
            let time = decode::read(node, &format!("topology.rtt.{}", key.name), self.faults, rtt);
            let Some((a, b)) = pair else {
                let what = format!("{} is no pair of regions", shown(&key.name));
                self.faults.push(&key.mark, what, "write `region/region: 80ms`");
                sound = false;
                continue;
            };
            for (a, b) in [(a, b), (b, a)] {
                if let Some(cell) = matrix.get_mut(a).and_then(|row| row.get_mut(b)) {
                    *cell = time;
                }
            }
        }
        for (a, row) in matrix.iter_mut().enumerate() {
            for (b, cell) in row.iter_mut().enumerate() {
                if a == b {
                    *cell = Some(Duration::ZERO);
                } else if cell.is_none() && sound && a < b {
                    let pair = [a, b].map(|i| regions.get(i).map(|r| &**r).unwrap_or_default()).join("/");
                    self.faults.push(
                        &node.mark,
                        format!("`topology.rtt` lacks `{pair}`"),
                        "give every pair, or one time for all",
                    );
                }
            }
        }
        matrix.into_iter().map(|row| row.into_iter().collect()).collect()
    }

    fn redis(&mut self, fields: &Fields<'_>) -> Option<RedisPlan> {
        let empty = Node { mark: fields.mark().clone(), value: Value::Null };
        let fields = Fields::of(fields.get("redis").unwrap_or(&empty), "topology.redis", REDIS, self.faults)?;
        let persistence = fields.read_or("persistence", Persistence::None, self.faults, |t| {
            choice(t, &[("none", Persistence::None), ("rdb", Persistence::Rdb), ("aof", Persistence::Aof)])
        });
        let replica = fields.read_or("replica", false, self.faults, decode::boolean);
        // Twenty milliseconds, the daemon's default, are for a machine that does not run all regions at once.
        let timeout = fields.read_or("timeout", Duration::from_millis(500), self.faults, |t| {
            decode::duration(t, Duration::from_millis(1), Duration::from_secs(5))
        });
        let rtt = fields.read_or("rtt", Duration::ZERO, self.faults, rtt);
        Some(RedisPlan { persistence: persistence?, replica: replica?, timeout: timeout?, rtt: rtt? })
    }
}

/// A round trip, or what is added to one.
pub(super) fn rtt(text: &str) -> Result<Duration, Wrong> {
    decode::duration(text, Duration::ZERO, RTT_MAX)
}

/// `500B/s`, `64kB/s` or `10MB/s`.
pub(super) fn bandwidth(text: &str) -> Result<NonZeroU64, Wrong> {
    let wrong = || {
        Wrong::new(
            format!("is no bandwidth: {}", shown(text)),
            "write bytes a second, such as `64kB/s` or `10MB/s`",
        )
    };
    let amount = text.strip_suffix("B/s").ok_or_else(wrong)?;
    let (number, unit) = match amount.as_bytes().last() {
        Some(b'k') => (amount.trim_end_matches('k'), 1_000),
        Some(b'M') => (amount.trim_end_matches('M'), 1_000_000),
        _ => (amount, 1),
    };
    let number: u64 = number.trim().parse().map_err(|_| wrong())?;
    number.checked_mul(unit).and_then(NonZeroU64::new).ok_or_else(wrong)
}
