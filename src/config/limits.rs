//! `limit` of a policy: a token bucket, a quota in each window, or so many at a time.

use super::decode::{self, Fields, Wrong};
use super::fault::{Faults, Mark, one_of, shown};
use super::yaml::Node;
use crate::quota::amount::{Micros, TOKENS_MAX};
use crate::quota::counted::lent::LENT_TTL_MAX;
use crate::quota::policy::{
    Algorithm, Concurrent, LENGTH_MAX_S, LOG_QUOTA_MAX, Limit, Mode, PERMITS_MAX, Quota, TTL_DEFAULT,
    TTL_MAX, TTL_MIN, TokenBucket, Unit, Window,
};

/// The keys of `limit`, those that belong together side by side: a rate, a quota, permits.
const KEYS: &[&str] = &["rate", "burst", "quota", "per", "algorithm", "concurrent", "ttl"];
const OF_RATES: &[&str] = &["rate", "burst"];
const OF_QUOTAS: &[&str] = &["quota", "per", "algorithm"];
const OF_PERMITS: &[&str] = &["concurrent", "ttl"];
const ALGORITHMS: [Algorithm; 3] = [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::SlidingLog];

/// Reads a policy's `limit`.
pub fn read(node: &Node, faults: &mut Faults) -> Option<Limit> {
    let fields = Fields::of(node, "limit", KEYS, faults)?;
    let has = |keys: &[&str]| keys.iter().any(|key| fields.get(key).is_some());
    let kinds = [OF_RATES, OF_QUOTAS, OF_PERMITS].into_iter().filter(|keys| has(keys));
    if kinds.count() > 1 {
        let what = "`limit` is a rate, a quota or a number of permits, and this one is more than one of them";
        let mend = "make a policy of each: every attribute policy that matches is charged";
        faults.push(&node.mark, what, mend);
        return None;
    }
    if has(OF_QUOTAS) {
        quota(&fields, faults).map(Limit::Quota)
    } else if has(OF_PERMITS) {
        concurrent(&fields, faults).map(Limit::Concurrent)
    } else {
        token_bucket(&fields, faults).map(Limit::TokenBucket)
    }
}

/// Can regions share this limit in this mode? `None`: no, and there is a fault.
pub fn check_mode(node: &Node, limit: &Limit, mode: Mode, faults: &mut Faults) -> Option<()> {
    let Some((what, mend)) = refused(limit, mode) else { return Some(()) };
    faults.push(&node.mark, what, mend);
    None
}

/// Is it a quota in fixed windows?
pub fn has_windows(limit: &Limit) -> bool {
    matches!(limit, Limit::Quota(Quota { algorithm: Algorithm::FixedWindow, .. }))
}

/// What no region can know of the others is not promised.
fn refused(limit: &Limit, mode: Mode) -> Option<(String, String)> {
    let (what, mend) = match limit {
        _ if mode == Mode::Split => return None,
        Limit::TokenBucket(_) | Limit::Unlimited => return None,
        Limit::Quota(Quota { algorithm: Algorithm::FixedWindow, .. }) => return None,
        Limit::Quota(Quota { algorithm, .. }) => (
            format!("`algorithm: {}` counts", algorithm.name()),
            "`mode: split`, or `algorithm: fixed_window`",
        ),
        Limit::Concurrent(Concurrent { ttl, .. }) if mode == Mode::Strict => {
            if *ttl <= LENT_TTL_MAX {
                return None;
            }
            let most = LENT_TTL_MAX.ceil_seconds();
            let what = format!(
                "permits that last {} s would keep what a region that is cut off was lent for twice as long, and `mode: strict` lends none for more than {most} s",
                ttl.ceil_seconds()
            );
            let mend =
                format!("the nearest that can be kept: `ttl: {most}s`, and renewing it; or `mode: split`");
            return Some((what, mend));
        }
        Limit::Concurrent(_) => {
            let what =
                "a permit is in use or it is not: there is nothing for `mode: approximate` to overshoot";
            let mend = "the nearest that can be kept: `mode: strict`, all of them lent to whichever region needs them, or `mode: split`, a part for each region";
            return Some((what.to_owned(), mend.to_owned()));
        }
    };
    let what = format!("{what} in one region alone, and `mode: {}` promises more", mode.name());
    Some((what, format!("the nearest that can be kept: {mend}")))
}

fn token_bucket(fields: &Fields<'_>, faults: &mut Faults) -> Option<TokenBucket> {
    fields.need("rate", "add a rate, such as `rate: 1000/s`", faults)?;
    let rate = fields.read("rate", faults, decode::rate);
    let burst = fields.read_or("burst", None, faults, |text| decode::whole(text, tokens_max()).map(Some));
    let ((amount, per), burst) = (rate?, burst?);
    let burst = burst.unwrap_or(amount);
    match (amount, burst) {
        (0, 1..) => {
            let what = format!("a rate of 0 never refills the burst of {burst}");
            faults.push(fields.mark(), what, "give it a rate, or `burst: 0` to deny everything");
            None
        }
        (1.., 0) => {
            let what = "a burst of 0 denies everything, whatever the rate";
            let mend = "give it a burst of at least 1, or `rate: 0/s` if that is meant";
            faults.push(fields.mark(), what, mend);
            None
        }
        _ => Some(TokenBucket { amount, per, burst }),
    }
}

fn quota(fields: &Fields<'_>, faults: &mut Faults) -> Option<Quota> {
    let quota = fields
        .need("quota", "add what a window has, such as `quota: 1000`", faults)
        .and_then(|_| fields.read("quota", faults, |text| decode::whole(text, tokens_max())));
    let mend = "add what the quota is for: `per: month`, or a length such as `per: 15m`";
    let per = fields.need("per", mend, faults).and_then(|_| fields.read("per", faults, window));
    let algorithm = fields.read_or("algorithm", Algorithm::FixedWindow, faults, |text| {
        let names = ALGORITHMS.map(Algorithm::name);
        let found = ALGORITHMS.into_iter().find(|algorithm| algorithm.name() == text);
        found.ok_or_else(|| Wrong::new(format!("is {}", shown(text)), format!("write {}", one_of(&names))))
    });
    let quota = Quota { quota: quota?, per: per?, algorithm: algorithm? };
    let mark = |key| fields.key_mark(key).unwrap_or(fields.mark());
    slides(&quota, mark("quota"), mark("per"), faults).then_some(quota)
}

/// Can the algorithm do it?
fn slides(quota: &Quota, at_quota: &Mark, at_per: &Mark, faults: &mut Faults) -> bool {
    let name = quota.algorithm.name();
    if quota.algorithm == Algorithm::SlidingLog && quota.quota > LOG_QUOTA_MAX {
        let what = format!(
            "`algorithm: {name}` keeps an entry for each request, too many for a quota of {}",
            quota.quota
        );
        let mend = format!(
            "at most {LOG_QUOTA_MAX} are possible; the nearest that can be more: `algorithm: sliding_window`"
        );
        faults.push(at_quota, what, mend);
        return false;
    }
    let length = match quota.per {
        Window::Calendar(Unit::Month) => "30d",
        Window::Calendar(Unit::Year) => "365d",
        Window::Calendar(_) | Window::Length { .. } => return true,
    };
    if quota.algorithm == Algorithm::FixedWindow {
        return true;
    }
    let what =
        format!("a {} of the calendar has no fixed length for `algorithm: {name}` to slide", quota.per);
    faults.push(at_per, what, format!("the nearest that has: `per: {length}`, or `algorithm: fixed_window`"));
    false
}

fn concurrent(fields: &Fields<'_>, faults: &mut Faults) -> Option<Concurrent> {
    let permits = fields
        .need("concurrent", "add how many at a time, such as `concurrent: 3`", faults)
        .and_then(|_| fields.read("concurrent", faults, |text| decode::whole(text, PERMITS_MAX)));
    let ttl = fields.read_or("ttl", TTL_DEFAULT, faults, |text| {
        let ttl = decode::duration(text, TTL_MIN.to_duration(), TTL_MAX.to_duration())?;
        Ok(Micros::from_duration(ttl))
    });
    Some(Concurrent { permits: permits?, ttl: ttl? })
}

/// `month`, or `15m`.
fn window(text: &str) -> Result<Window, Wrong> {
    let named = Unit::ALL.into_iter().find(|unit| unit.name() == text);
    if let Some(unit) = named {
        return Ok(Window::Calendar(unit));
    }
    let names = Unit::ALL.map(Unit::name);
    let form =
        || format!("write {}, or a length from 1s to 366d such as `15m` (s, m, h or d)", one_of(&names));
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    if matches!(unit, "ms" | "us") && !number.is_empty() {
        let what = format!("is shorter than a second or has a part of one: {}", shown(text));
        return Err(Wrong::new(
            what,
            "write whole seconds, or use a token bucket such as `limit: { rate: 10/s }`",
        ));
    }
    let each = match unit {
        "s" => Unit::Second.seconds(),
        "m" => Unit::Minute.seconds(),
        "h" => Unit::Hour.seconds(),
        "d" => Unit::Day.seconds(),
        _ => return Err(Wrong::new(format!("is no window of time: {}", shown(text)), form())),
    };
    let number: Option<u32> = number.parse().ok();
    let seconds = number.and_then(|n| n.checked_mul(u32::try_from(each).ok()?));
    match seconds.filter(|s| (1..=LENGTH_MAX_S).contains(s)) {
        Some(seconds) => Ok(Window::Length { seconds }),
        None => Err(Wrong::new(format!("is out of range: {}", shown(text)), form())),
    }
}

const fn tokens_max() -> u64 {
    TOKENS_MAX.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{print, yaml};
    use crate::quota::policy::Share;
    use std::path::Path;

    /// The limit, or the faults.
    fn parse(text: &str, mode: Mode) -> Result<Limit, String> {
        let file = Path::new("f");
        let node = yaml::parse(file, text).unwrap();
        let mut faults = Faults::new(file);
        let limit = read(&node, &mut faults);
        let limit = limit.filter(|limit| {
            refused(limit, mode).is_none_or(|(what, mend)| {
                faults.push(&node.mark, what, mend);
                false
            })
        });
        faults.or(limit).map_err(|faults| faults.to_string())
    }

    fn quota(quota: u64, per: Window, algorithm: Algorithm) -> Limit {
        Limit::Quota(Quota { quota, per, algorithm })
    }

    #[test]
    fn quotas_and_permits_are_read_and_written_back() {
        let (log, two) = (Algorithm::SlidingLog, Algorithm::SlidingWindow);
        let length = |seconds| Window::Length { seconds };
        let month = Window::Calendar(Unit::Month);
        for (text, limit) in [
            ("{ quota: 1000000, per: month }", quota(1_000_000, month, Algorithm::FixedWindow)),
            ("{ quota: 4294967296, per: 15m }", quota(1 << 32, length(900), Algorithm::FixedWindow)),
            ("{ quota: 0, per: 366d }", quota(0, length(LENGTH_MAX_S), Algorithm::FixedWindow)),
            ("{ quota: 7, per: 90s, algorithm: sliding_window }", quota(7, length(90), two)),
            (
                "{ quota: 10000, per: week, algorithm: sliding_log }",
                quota(10_000, Window::Calendar(Unit::Week), log),
            ),
            (
                "{ concurrent: 3, ttl: 90s }",
                Limit::Concurrent(Concurrent { permits: 3, ttl: Micros::seconds(90) }),
            ),
        ] {
            assert_eq!(parse(text, Mode::Split), Ok(limit.clone()), "{text}");
            assert_eq!(print::limit(&limit).as_deref(), Some(text));
        }
        for unit in Unit::ALL {
            let text = format!("{{ quota: 1, per: {}, algorithm: fixed_window }}", unit.name());
            let limit = quota(1, Window::Calendar(unit), Algorithm::FixedWindow);
            assert_eq!(parse(&text, Mode::Strict), Ok(limit), "{text}");
        }
        let strict = Limit::Concurrent(Concurrent { permits: 3, ttl: LENT_TTL_MAX });
        assert_eq!(parse("{ concurrent: 3, ttl: 5m }", Mode::Strict), Ok(strict));
        let unnamed = Limit::Concurrent(Concurrent { permits: 0, ttl: TTL_DEFAULT });
        assert_eq!(parse("{ concurrent: 0 }", Mode::Split), Ok(unnamed));
    }

    #[test]
    fn what_cannot_be_kept_is_refused_with_the_nearest_that_can() {
        for (text, mode, fault) in [
            (
                "{ quota: 4294967297, per: day }",
                Mode::Split,
                "f:1:10: `limit.quota` is too large: `4294967297`; write a whole number from 0 to 4294967296",
            ),
            (
                "{ quota: 5 }",
                Mode::Split,
                "f:1:1: `limit.per` is missing; add what the quota is for: `per: month`, or a length such as `per: 15m`",
            ),
            (
                "{ per: day }",
                Mode::Split,
                "f:1:1: `limit.quota` is missing; add what a window has, such as `quota: 1000`",
            ),
            (
                "{ ttl: 60s }",
                Mode::Split,
                "f:1:1: `limit.concurrent` is missing; add how many at a time, such as `concurrent: 3`",
            ),
            (
                "{ quota: 5, per: 500ms }",
                Mode::Split,
                "f:1:18: `limit.per` is shorter than a second or has a part of one: `500ms`; write whole seconds, or use a token bucket such as `limit: { rate: 10/s }`",
            ),
            (
                "{ quota: 5, per: 367d }",
                Mode::Split,
                "f:1:18: `limit.per` is out of range: `367d`; write `second`, `minute`, `hour`, `day`, `week`, `month` or `year`, or a length from 1s to 366d such as `15m` (s, m, h or d)",
            ),
            (
                "{ quota: 5, per: fortnight }",
                Mode::Split,
                "f:1:18: `limit.per` is no window of time: `fortnight`; write `second`, `minute`, `hour`, `day`, `week`, `month` or `year`, or a length from 1s to 366d such as `15m` (s, m, h or d)",
            ),
            (
                "{ quota: 5, per: 0s }",
                Mode::Split,
                "f:1:18: `limit.per` is out of range: `0s`; write `second`, `minute`, `hour`, `day`, `week`, `month` or `year`, or a length from 1s to 366d such as `15m` (s, m, h or d)",
            ),
            (
                "{ quota: 5, per: day, algorithm: gcra }",
                Mode::Split,
                "f:1:34: `limit.algorithm` is `gcra`; write `fixed_window`, `sliding_window` or `sliding_log`",
            ),
            (
                "{ quota: 5, per: day, burst: 5 }",
                Mode::Split,
                "f:1:1: `limit` is a rate, a quota or a number of permits, and this one is more than one of them; make a policy of each: every attribute policy that matches is charged",
            ),
            (
                "{ quota: 10001, per: day, algorithm: sliding_log }",
                Mode::Split,
                "f:1:3: `algorithm: sliding_log` keeps an entry for each request, too many for a quota of 10001; at most 10000 are possible; the nearest that can be more: `algorithm: sliding_window`",
            ),
            (
                "{ quota: 5, per: month, algorithm: sliding_window }",
                Mode::Split,
                "f:1:13: a month of the calendar has no fixed length for `algorithm: sliding_window` to slide; the nearest that has: `per: 30d`, or `algorithm: fixed_window`",
            ),
            (
                "{ quota: 5, per: day, algorithm: sliding_log }",
                Mode::Strict,
                "f:1:1: `algorithm: sliding_log` counts in one region alone, and `mode: strict` promises more; the nearest that can be kept: `mode: split`, or `algorithm: fixed_window`",
            ),
            (
                "{ concurrent: 3 }",
                Mode::Approximate { max_overshoot: Share::ALL },
                "f:1:1: a permit is in use or it is not: there is nothing for `mode: approximate` to overshoot; the nearest that can be kept: `mode: strict`, all of them lent to whichever region needs them, or `mode: split`, a part for each region",
            ),
            (
                "{ concurrent: 3, ttl: 301s }",
                Mode::Strict,
                "f:1:1: permits that last 301 s would keep what a region that is cut off was lent for twice as long, and `mode: strict` lends none for more than 300 s; the nearest that can be kept: `ttl: 300s`, and renewing it; or `mode: split`",
            ),
            (
                "{ concurrent: 3, ttl: 25h }",
                Mode::Split,
                "f:1:23: `limit.ttl` is not a duration: `25h`; write a number and `us`, `ms`, `s` or `m`, from 1s to 86400s",
            ),
            (
                "{ concurrent: 3, ttl: 20ms }",
                Mode::Split,
                "f:1:23: `limit.ttl` is out of range: `20ms`; write a number and `us`, `ms`, `s` or `m`, from 1s to 86400s",
            ),
            (
                "{ concurrent: 10001 }",
                Mode::Split,
                "f:1:15: `limit.concurrent` is too large: `10001`; write a whole number from 0 to 10000",
            ),
        ] {
            assert_eq!(parse(text, mode), Err(fault.to_owned()));
        }
    }
}
