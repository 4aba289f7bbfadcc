//! `timeline`

use super::super::fault::{Back, Clocks, Fault, How, Path, Role, Slow, Who};
use super::super::{Event, Persistence};
use super::topology::{bandwidth, rtt};
use super::{Known, Reader, choice, time};
use quorate::config::Wrong;
use quorate::config::decode::{self, Fields};
use quorate::config::fault::{did_you_mean, one_of, shown};
use quorate::config::yaml::{Node, Value};
use std::time::Duration;

/// The kinds of fault, and whether an event of it may, must or must not have a `for`.
const KINDS: &[(&str, For)] = &[
    ("cut", For::May),
    ("flap", For::Must),
    ("slow", For::May),
    ("redis_cut", For::May),
    ("redis_slow", For::May),
    ("kill", For::May),
    ("pause", For::May),
    ("redis_pause", For::May),
    ("restart", For::Not),
    ("flush", For::Not),
    ("redis_kill", For::May),
    ("redis_save", For::Not),
    ("redis_detach", For::Not),
    ("redis_failover", For::Not),
    ("clock_step", For::May),
    ("disk_full", For::May),
    ("apply", For::Not),
    ("region_add", For::Not),
    ("region_remove", For::Not),
];
const ROLES: &[(&str, Role)] =
    &[("leader", Role::Leader), ("follower", Role::Follower), ("all", Role::All), ("others", Role::Others)];
const HOW: &[(&str, How)] = &[("blackhole", How::Blackhole), ("reset", How::Reset)];
/// The furthest that a clock is stepped: about a year.
const STEP_MAX: Duration = Duration::from_secs(366 * 86_400);

#[derive(Clone, Copy, PartialEq, Eq)]
enum For {
    May,
    Must,
    Not,
}

impl Reader<'_> {
    pub(super) fn timeline(&mut self, list: &Node, known: Known<'_>) -> Option<Vec<Event>> {
        let items = decode::items(list, "timeline", self.faults)?;
        let events: Vec<Option<Event>> = items.iter().map(|item| self.event(item, known)).collect();
        let events = events.into_iter().collect::<Option<Vec<_>>>()?;
        for (event, item) in events.iter().zip(items) {
            self.sound(event, &events, item, known);
        }
        Some(events)
    }

    fn event(&mut self, node: &Node, known: Known<'_>) -> Option<Event> {
        let kinds = KINDS.iter().map(|(kind, _)| *kind);
        let keys: Vec<&str> = ["at", "for"].into_iter().chain(kinds).collect();
        let fields = Fields::of(node, "timeline", &keys, self.faults)?;
        let at = fields.need("at", "say when, such as `at: 10s`", self.faults);
        let at = at.and_then(|_| fields.read("at", self.faults, |t| time(t, Duration::ZERO)));
        let lasts = match fields.get("for") {
            None => Some(None),
            Some(_) => fields.read("for", self.faults, |t| time(t, Duration::from_millis(1))).map(Some),
        };
        let found: Vec<&(&str, For)> = KINDS.iter().filter(|(kind, _)| fields.get(kind).is_some()).collect();
        let [(kind, rule)] = found.as_slice() else {
            if !keys.iter().any(|k| fields.is_misspelt(k)) {
                let kinds: Vec<&str> = keys.get(2..).unwrap_or_default().to_vec();
                let what = format!("an event has one kind of fault, and this has {}", found.len());
                self.faults.push(fields.mark(), what, format!("write one of {}", one_of(&kinds)));
            }
            return None;
        };
        let fault = self.fault(kind, fields.get(kind)?, known);
        let (at, lasts) = (at?, lasts?);
        match (rule, lasts) {
            (For::Must, None) => self.faults.push(
                fields.mark(),
                format!("`{kind}` has no end"),
                "add `for`, such as `for: 10s`",
            ),
            (For::Not, Some(_)) => {
                let mark = fields.key_mark("for").unwrap_or(fields.mark());
                self.faults.push(mark, format!("`{kind}` is over by itself"), "remove `for`");
            }
            _ => {}
        }
        if at + lasts.unwrap_or_default() > known.length {
            self.faults.push(fields.mark(), "this ends after the scenario does", "make `length` longer");
        }
        Some(Event { at, lasts, fault: fault? })
    }

    /// What no single event can see.
    fn sound(&mut self, event: &Event, all: &[Event], node: &Node, known: Known<'_>) {
        let redis = known.topology.redis;
        let before = |is: fn(&Fault) -> bool| all.iter().any(|e| e.at < event.at && is(&e.fault));
        let wrong = match &event.fault {
            Fault::RedisKill(_, Back::Saved) if redis.persistence == Persistence::Aof => Some((
                "a Redis with an append-only file does not load a snapshot",
                "use `persistence: rdb` or `none`",
            )),
            Fault::RedisKill(_, Back::Saved) if !before(|f| matches!(f, Fault::RedisSave(_))) => {
                Some(("no snapshot has been saved by then", "add a `redis_save` earlier in the timeline"))
            }
            Fault::RedisDetach(_) | Fault::RedisFailover(_) if !redis.replica => {
                Some(("there is no replica", "add `replica: true` to `topology.redis`"))
            }
            _ => None,
        };
        if let Some((what, mend)) = wrong {
            self.faults.push(&node.mark, what, mend);
        }
    }

    fn fault(&mut self, kind: &str, node: &Node, known: Known<'_>) -> Option<Fault> {
        Some(match kind {
            "cut" => {
                let (path, fields) = self.path(node, kind, &["how"], known)?;
                let how = self.how(fields.as_ref())?;
                self.both_ways_if_reset(&path, how, node);
                Fault::Cut(path, how)
            }
            "flap" => {
                let (path, fields) = self.path(node, kind, &["how", "down", "up"], known)?;
                let how = self.how(fields.as_ref())?;
                self.both_ways_if_reset(&path, how, node);
                let (down, up) = (self.span(fields.as_ref(), "down")?, self.span(fields.as_ref(), "up")?);
                Fault::Flap { path, how, down, up }
            }
            "slow" => {
                let (path, fields) = self.path(node, kind, &["rtt", "jitter", "bandwidth"], known)?;
                Fault::Slow(path, self.slow(fields.as_ref(), node)?)
            }
            "redis_cut" => {
                let (who, fields) = self.who_and(node, kind, &["how"], known)?;
                Fault::RedisCut(who, self.how(fields.as_ref())?)
            }
            "redis_slow" => {
                let (who, fields) = self.who_and(node, kind, &["rtt", "jitter", "bandwidth"], known)?;
                Fault::RedisSlow(who, self.slow(fields.as_ref(), node)?)
            }
            "restart" => {
                let (who, fields) = self.who_and(node, kind, &["pause"], known)?;
                let pause = match &fields {
                    Some(f) => {
                        f.read_or("pause", Duration::ZERO, self.faults, |t| time(t, Duration::ZERO))?
                    }
                    None => Duration::ZERO,
                };
                Fault::Restart { who, pause }
            }
            "redis_kill" => {
                let (who, fields) = self.who_and(node, kind, &["back"], known)?;
                let backs = [("empty", Back::Empty), ("kept", Back::Kept), ("saved", Back::Saved)];
                let back = match &fields {
                    Some(f) => f.read_or("back", Back::Kept, self.faults, |t| choice(t, &backs))?,
                    None => Back::Kept,
                };
                Fault::RedisKill(who, back)
            }
            "clock_step" => self.clock_step(node, known)?,
            "apply" => self.apply(node, known)?,
            _ => {
                let who = self.who(node, kind, known)?;
                match kind {
                    "kill" => Fault::Kill(who),
                    "pause" => Fault::Pause(who),
                    "redis_pause" => Fault::RedisPause(who),
                    "flush" => Fault::Flush(who),
                    "redis_save" => Fault::RedisSave(who),
                    "redis_detach" => Fault::RedisDetach(who),
                    "redis_failover" => Fault::RedisFailover(who),
                    "disk_full" => Fault::DiskFull(who),
                    "region_add" => Fault::RegionAdd(who),
                    _ => Fault::RegionRemove(who),
                }
            }
        })
    }

    fn clock_step(&mut self, node: &Node, known: Known<'_>) -> Option<Fault> {
        let fields = Fields::of(node, "clock_step", &["who", "by", "of"], self.faults)?;
        let who = fields.need("who", "name the regions", self.faults);
        let who = who.and_then(|node| self.who(node, "clock_step.who", known));
        fields.need("by", "say how far, such as `by: 120m` or `by: -5s`", self.faults)?;
        let by_ms = fields.read("by", self.faults, |text| {
            let (sign, text) = text.strip_prefix('-').map_or((1, text), |rest| (-1, rest));
            let far = decode::duration(text, Duration::from_millis(1), STEP_MAX)?;
            Ok(sign * i64::try_from(far.as_millis()).unwrap_or(i64::MAX))
        });
        let clocks = [("daemon", Clocks::Daemon), ("redis", Clocks::Redis), ("both", Clocks::Both)];
        let of = fields.read_or("of", Clocks::Both, self.faults, |t| choice(t, &clocks));
        Some(Fault::ClockStep { who: who?, by_ms: by_ms?, of: of? })
    }

    fn apply(&mut self, node: &Node, known: Known<'_>) -> Option<Fault> {
        let fields = Fields::of(node, "apply", &["through", "policies"], self.faults)?;
        let through = match fields.get("through") {
            None => Some(Who(vec![Role::Leader])),
            Some(node) => self.who(node, "apply.through", known),
        };
        let list = fields.need("policies", "add the policies, all of them", self.faults)?;
        let founders = known.topology.regions.get(..known.topology.founders).unwrap_or_default();
        let policies = self.policies(list, founders);
        Some(Fault::Apply { through: through?, policies: policies? })
    }

    /// `WHO` (from and to all others), or a mapping with `from`, `to`, `both_ways` and these keys.
    fn path<'n>(
        &mut self,
        node: &'n Node,
        name: &'n str,
        more: &[&'n str],
        known: Known<'_>,
    ) -> Option<(Path, Option<Fields<'n>>)> {
        let others = || Who(vec![Role::Others]);
        if !matches!(node.value, Value::Map(_)) {
            let from = self.who(node, name, known)?;
            return Some((Path { from, to: others(), both_ways: true }, None));
        }
        let keys: Vec<&'n str> =
            ["from", "to", "both_ways"].into_iter().chain(more.iter().copied()).collect();
        let fields = Fields::of(node, name, &keys, self.faults)?;
        let from = fields.need("from", "name the regions on this side", self.faults);
        let from = from.and_then(|node| self.who(node, &fields.name("from"), known));
        let to = match fields.get("to") {
            None => Some(others()),
            Some(node) => self.who(node, &fields.name("to"), known),
        };
        let both_ways = fields.read_or("both_ways", true, self.faults, decode::boolean);
        Some((Path { from: from?, to: to?, both_ways: both_ways? }, Some(fields)))
    }

    /// `WHO`, or a mapping with `who` and these keys.
    fn who_and<'n>(
        &mut self,
        node: &'n Node,
        name: &'n str,
        more: &[&'n str],
        known: Known<'_>,
    ) -> Option<(Who, Option<Fields<'n>>)> {
        if !matches!(node.value, Value::Map(_)) {
            return Some((self.who(node, name, known)?, None));
        }
        let keys: Vec<&'n str> = ["who"].into_iter().chain(more.iter().copied()).collect();
        let fields = Fields::of(node, name, &keys, self.faults)?;
        let who = fields.need("who", "name the regions", self.faults)?;
        let who = self.who(who, &fields.name("who"), known)?;
        Some((who, Some(fields)))
    }

    fn who(&mut self, node: &Node, name: &str, known: Known<'_>) -> Option<Who> {
        let role = |text: &str| {
            if let Some((_, role)) = ROLES.iter().find(|(role, _)| *role == text) {
                return Ok(*role);
            }
            let regions = &known.topology.regions;
            let number = regions.iter().position(|region| &**region == text);
            number.map(Role::Region).ok_or_else(|| {
                let names: Vec<&str> =
                    regions.iter().map(|r| &**r).chain(ROLES.iter().map(|(r, _)| *r)).collect();
                Wrong::new(
                    format!("is {}, which is neither a region nor a role", shown(text)),
                    did_you_mean(text, &names),
                )
            })
        };
        let Value::List(items) = &node.value else {
            return decode::read(node, name, self.faults, role).map(|role| Who(vec![role]));
        };
        if items.is_empty() {
            self.faults.push(
                &node.mark,
                format!("`{name}` names nobody"),
                "name a region, `leader`, `follower`, `all` or `others`",
            );
            return None;
        }
        let roles: Vec<Option<Role>> =
            items.iter().map(|item| decode::read(item, name, self.faults, role)).collect();
        roles.into_iter().collect::<Option<Vec<_>>>().map(Who)
    }

    fn how(&mut self, fields: Option<&Fields<'_>>) -> Option<How> {
        fields.map_or(Some(How::Blackhole), |f| {
            f.read_or("how", How::Blackhole, self.faults, |t| choice(t, HOW))
        })
    }

    fn both_ways_if_reset(&mut self, path: &Path, how: How, node: &Node) {
        if how == How::Reset && !path.both_ways {
            let what = "a connection cannot be reset one way";
            self.faults.push(&node.mark, what, "use `how: blackhole`, or leave `both_ways` out");
        }
    }

    fn span(&mut self, fields: Option<&Fields<'_>>, key: &str) -> Option<Duration> {
        let default = Duration::from_secs(1);
        fields.map_or(Some(default), |f| {
            f.read_or(key, default, self.faults, |t| time(t, Duration::from_millis(10)))
        })
    }

    fn slow(&mut self, fields: Option<&Fields<'_>>, node: &Node) -> Option<Slow> {
        let slow = match fields {
            None => Slow::default(),
            Some(f) => {
                let read = |key: &str, faults: &mut quorate::config::Faults| match f.get(key) {
                    None => Some(None),
                    Some(_) => f.read(key, faults, rtt).map(Some),
                };
                let (time, jitter) = (read("rtt", self.faults), read("jitter", self.faults));
                let width = match f.get("bandwidth") {
                    None => Some(None),
                    Some(_) => f.read("bandwidth", self.faults, bandwidth).map(Some),
                };
                Slow { rtt: time?, jitter: jitter?, bandwidth: width? }
            }
        };
        if slow == Slow::default() {
            self.faults.push(&node.mark, "nothing is slow here", "add `rtt`, `jitter` or `bandwidth`");
            return None;
        }
        Some(slow)
    }
}
