//! YAML to [`Scenario`], with the place and the mend of everything that is wrong, as the daemon's own files are read.

mod timeline;
mod topology;

use super::{Expect, Load, Over, Pace, Scenario, Topology};
use quorate::config::decode::{self, Fields};
use quorate::config::fault::{did_you_mean, shown};
use quorate::config::yaml::{self, Key, Node, Value};
use quorate::config::{Faults, Wrong, policies};
use quorate::quota::policy::{Policy, RegionName};
use std::path::Path;
use std::time::Duration;

const TOP: &[&str] = &["title", "about", "length", "topology", "policies", "load", "timeline", "expect"];
const LOAD: &[&str] = &["policy", "bucket", "rate", "callers", "cost", "from", "to", "over"];
const EXPECT: &[&str] = &["must", "not", "recovery", "errors"];

const LENGTH_MIN: Duration = Duration::from_secs(1);
/// A day: longer runs are better made of many.
const LENGTH_MAX: Duration = Duration::from_secs(86_400);
const RATE_MAX: u64 = 20_000;
const CALLERS_MAX: u64 = 1_000;
const COST_MAX: u64 = 1 << 31;
const TEXT_BYTES_MAX: usize = 2_000;

/// Reads a scenario.
///
/// # Errors
/// Everything that is wrong with it.
pub(super) fn scenario(file: &Path, text: &str) -> Result<Scenario, Faults> {
    let root = yaml::parse(file, text)?;
    let mut faults = Faults::new(file);
    let scenario = Reader { file, faults: &mut faults }.scenario(&root);
    faults.or(scenario)
}

/// What is known when the later parts of a scenario are read.
#[derive(Clone, Copy)]
struct Known<'k> {
    topology: &'k Topology,
    length: Duration,
}

struct Reader<'r> {
    file: &'r Path,
    faults: &'r mut Faults,
}

impl Reader<'_> {
    fn scenario(&mut self, root: &Node) -> Option<Scenario> {
        let top = Fields::of(root, "", TOP, self.faults)?;
        let text = |t: &str| decode::plain(t, TEXT_BYTES_MAX).map(str::to_owned);
        let title = top.need("title", "say in a few words what happens", self.faults);
        let title = title.and_then(|_| top.read("title", self.faults, text));
        let about = top.read_or("about", String::new(), self.faults, text);
        let length = top.need("length", "say how long it is run for, such as `length: 40s`", self.faults);
        let length = length.and_then(|_| top.read("length", self.faults, |t| time(t, LENGTH_MIN)));
        let topology = top.need("topology", "add `topology` with its `regions`", self.faults);
        let topology = topology.and_then(|node| self.topology(node));
        let (topology, length) = (topology?, length?);
        let known = Known { topology: &topology, length };
        let founders = topology.regions.get(..topology.founders).unwrap_or_default();
        let policies = top.need("policies", "add the policies, as in policies.yaml", self.faults);
        let policies = policies.and_then(|node| self.policies(node, founders));
        let loads = top.need("load", "say what is asked of the cluster", self.faults);
        let loads = loads.and_then(|node| self.loads(node, known, policies.as_deref()));
        let timeline = top.get("timeline").map_or(Some(Vec::new()), |node| self.timeline(node, known));
        let expect = top.get("expect").map_or(Some(Expect::default()), |node| self.expect(node));
        Some(Scenario {
            name: self.file.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default(),
            title: title?,
            about: about?,
            length,
            policies: policies?,
            loads: loads?,
            timeline: timeline?,
            expect: expect?,
            topology,
        })
    }

    /// A list of policies; their faults are those of a policy file.
    fn policies(&mut self, list: &Node, regions: &[RegionName]) -> Option<Vec<Policy>> {
        let key = Key { mark: list.mark.clone(), name: "policies".to_owned() };
        let root = Node { mark: list.mark.clone(), value: Value::Map(vec![(key, list.clone())]) };
        match policies::read(self.file, &root, Some(regions)) {
            Ok(policies) => Some(policies),
            Err(faults) => {
                faults.iter().for_each(|f| self.faults.push(&f.mark, &f.what, &f.mend));
                None
            }
        }
    }

    fn loads(&mut self, list: &Node, known: Known<'_>, policies: Option<&[Policy]>) -> Option<Vec<Load>> {
        let items = decode::items(list, "load", self.faults)?;
        if items.is_empty() {
            self.faults.push(
                &list.mark,
                "`load` is empty",
                "a cluster that is asked nothing breaks no promise: add one",
            );
            return None;
        }
        // (All of them, for all of their faults.)
        let loads: Vec<Option<Load>> = items.iter().map(|item| self.load(item, known, policies)).collect();
        loads.into_iter().collect()
    }

    fn load(&mut self, node: &Node, known: Known<'_>, policies: Option<&[Policy]>) -> Option<Load> {
        let fields = Fields::of(node, "load", LOAD, self.faults)?;
        let named = fields.need("policy", "name the policy that is asked for", self.faults);
        let pace = self.pace(&fields, known.topology);
        let cost = fields.read_or("cost", 1, self.faults, |t| decode::whole(t, COST_MAX));
        let from = fields.read_or("from", Duration::ZERO, self.faults, |t| time(t, Duration::ZERO));
        let to = fields.read_or("to", known.length, self.faults, |t| time(t, Duration::ZERO));
        let over = fields.read_or("over", Over::Http, self.faults, |t| {
            choice(t, &[("http", Over::Http), ("grpc", Over::Grpc), ("both", Over::Both)])
        });
        let policies = policies?;
        let policy = decode::read(named?, "load.policy", self.faults, |name| {
            policies.iter().find(|p| &*p.name == name).ok_or_else(|| {
                let names: Vec<&str> = policies.iter().map(|p| &*p.name).collect();
                Wrong::new(format!("is {}, which is no policy here", shown(name)), did_you_mean(name, &names))
            })
        })?;
        let bucket = self.bucket(&fields, policy);
        Some(Load {
            policy: policy.name.to_string(),
            domain: policy.domain.to_string(),
            bucket: bucket?,
            pace: pace?,
            cost: u32::try_from(cost?).unwrap_or(u32::MAX),
            from: from?,
            to: to?.min(known.length),
            over: over?,
        })
    }

    /// The values of a policy's keys, in its order.
    fn bucket(&mut self, fields: &Fields<'_>, policy: &Policy) -> Option<Vec<(String, String)>> {
        let keys: Vec<&str> = policy.matches.iter().map(|m| &*m.key).collect();
        let mend = format!(
            "give a value to each key of `{}`, such as `bucket: {{ {}: a }}`",
            policy.name,
            keys.join(": a, ")
        );
        let node = fields.need("bucket", &mend, self.faults)?;
        let given = Fields::of(node, "load.bucket", &keys, self.faults)?;
        let values: Vec<Option<(String, String)>> = keys
            .iter()
            .map(|key| {
                given.need(key, &mend, self.faults)?;
                let value =
                    given.read(key, self.faults, |t| decode::plain(t, TEXT_BYTES_MAX).map(str::to_owned))?;
                Some(((*key).to_owned(), value))
            })
            .collect();
        values.into_iter().collect()
    }

    fn pace(&mut self, fields: &Fields<'_>, topology: &Topology) -> Option<Vec<Pace>> {
        let (key, max) = match (fields.get("rate"), fields.get("callers")) {
            (Some(_), None) => ("rate", RATE_MAX),
            (None, Some(_)) => ("callers", CALLERS_MAX),
            (found, _) => {
                let what = if found.is_some() {
                    "`load` has both `rate` and `callers`"
                } else {
                    "`load` has neither `rate` nor `callers`"
                };
                let mend = "`rate` is requests a second, `callers` is how many ask one request after the other; write one of them";
                self.faults.push(fields.mark(), what, mend);
                return None;
            }
        };
        let pace = |n: u64| {
            let n = u32::try_from(n).unwrap_or(u32::MAX);
            if key == "rate" { Pace::Open(n) } else { Pace::Closed(n) }
        };
        let node = fields.get(key)?;
        if matches!(node.value, Value::Map(_)) {
            let names: Vec<&str> = topology.regions.iter().map(|r| &**r).collect();
            let path = fields.name(key);
            let by_region = Fields::of(node, &path, &names, self.faults)?;
            let each: Vec<Option<u64>> = names
                .iter()
                .map(|name| by_region.read_or(name, 0, self.faults, |t| decode::whole(t, max)))
                .collect();
            return each.into_iter().map(|n| n.map(pace)).collect();
        }
        let all = fields.read(key, self.faults, |t| decode::whole(t, max))?;
        Some(vec![pace(all); topology.regions.len()])
    }

    fn expect(&mut self, node: &Node) -> Option<Expect> {
        let fields = Fields::of(node, "expect", EXPECT, self.faults)?;
        let must = fields.get("must").map_or(Some(Vec::new()), |node| self.invariants(node, "expect.must"));
        let not = fields.get("not").map_or(Some(Vec::new()), |node| self.excused(node));
        let recovery = match fields.get("recovery") {
            None => Some(None),
            Some(_) => fields.read("recovery", self.faults, |t| time(t, Duration::ZERO)).map(Some),
        };
        let errors = fields.get("errors").map_or(Some(Vec::new()), |node| self.texts(node, "expect.errors"));
        Some(Expect { must: must?, not: not?, recovery: recovery?, errors: errors? })
    }

    fn invariants(&mut self, node: &Node, name: &str) -> Option<Vec<String>> {
        let items = decode::items(node, name, self.faults)?;
        let each: Vec<Option<String>> =
            items.iter().map(|item| decode::read(item, name, self.faults, invariant)).collect();
        each.into_iter().collect()
    }

    fn excused(&mut self, node: &Node) -> Option<Vec<(String, String)>> {
        let entries = decode::entries(node, "expect.not", self.faults)?;
        let mut excused = Vec::new();
        for (key, why) in entries {
            if let Err(wrong) = invariant(&key.name) {
                self.faults.push(&key.mark, format!("{} is no invariant", shown(&key.name)), wrong.mend());
            }
            let why = decode::read(why, &key.name, self.faults, |t| {
                decode::plain(t, TEXT_BYTES_MAX).map(str::to_owned)
            });
            excused.push((key.name.clone(), why?));
        }
        Some(excused)
    }

    fn texts(&mut self, node: &Node, name: &str) -> Option<Vec<String>> {
        let items = decode::items(node, name, self.faults)?;
        let text = |t: &str| decode::plain(t, TEXT_BYTES_MAX).map(str::to_owned);
        let each: Vec<Option<String>> =
            items.iter().map(|item| decode::read(item, name, self.faults, text)).collect();
        each.into_iter().collect()
    }
}

/// The name of an invariant.
fn invariant(name: &str) -> Result<String, Wrong> {
    let known = crate::invariants::ALL.map(|invariant| invariant.name());
    if known.contains(&name) {
        return Ok(name.to_owned());
    }
    Err(Wrong::new(format!("is {}, which is no invariant", shown(name)), did_you_mean(name, &known)))
}

fn time(text: &str, min: Duration) -> Result<Duration, Wrong> {
    decode::duration(text, min, LENGTH_MAX)
}

fn choice<T: Copy>(text: &str, choices: &[(&str, T)]) -> Result<T, Wrong> {
    choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        Wrong::new(format!("is {}", shown(text)), did_you_mean(text, &names))
    })
}
