//! What is answered to a request: a verdict for each limit, one for the whole, and the header fields that say it.
//!
//! The names and formats of header fields are all in [`Fields`], because the draft they follow still changes.

use super::amount::{Micros, Rate, Tokens};
use super::calendar::Turn;
use super::policy::{Limit, Mode, Policy, TokenBucket, Window};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::sync::Arc;

/// When to come back after a denial that has nothing to do with the limit (the store or the pool was out of reach).
pub const RETRY_HINT: Micros = Micros::seconds(1);

/// The answer to a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// May it go on? Only then was anything charged.
    pub allowed: bool,
    /// One for each limit that matched.
    pub limits: Vec<LimitVerdict>,
    /// One for each descriptor of the request, in order (attributes count as one).
    pub descriptors: Vec<DescriptorVerdict>,
    /// No policies are known yet, so nothing can be said: not even that none matches.
    pub undecided: bool,
}

/// The answer of one limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitVerdict {
    /// The policy's name.
    pub policy: Arc<str>,
    /// The policy's mode.
    pub mode: Mode,
    /// Does this limit let the request through (whatever the others say)?
    pub allowed: bool,
    /// Tokens a [`Self::per`].
    pub limit: u64,
    /// The time that [`Self::limit`] is for; `None`: so many at a time.
    pub per: Option<Window>,
    /// How long the window of a quota is that the request was in: months and years differ.
    pub window: Option<Micros>,
    /// What the bucket holds at most, in whole tokens.
    pub burst: u64,
    /// What is left, in whole tokens, rounded down.
    pub remaining: u64,
    /// Allowed: how long until the bucket is full. Denied: how long until this cost fits (0 if it never does).
    pub reset: Micros,
    /// Denied: when to come back. `None`: never (or it was allowed).
    pub retry_after: Option<Micros>,
    /// Why.
    pub reason: Reason,
    /// Which descriptor of the request this limit matched.
    pub descriptor: usize,
    /// There is no limit; the numbers mean nothing.
    pub unlimited: bool,
    /// The policy only counts: it never denies, and callers should not be told of it if another limit can be.
    pub shadow: bool,
}

/// The answer for one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorVerdict {
    /// Do all of its limits let the request through?
    pub allowed: bool,
    /// The limit that binds it most: an index into [`Verdict::limits`]. `None`: no policy matched.
    pub limit: Option<usize>,
}

/// Why a limit answered as it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It fits.
    Ok,
    /// It does not fit.
    OverLimit,
    /// Strict mode: it did not fit what the region holds, and the pool could not be reached in time.
    NoLease,
    /// The region's store gave no answer.
    StoreUnavailable,
    /// It does not fit, but the policy only counts.
    Shadow,
    /// The bucket does not exist, and the caller makes more of them than it may.
    TooManyBuckets,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Ok,
        Self::OverLimit,
        Self::NoLease,
        Self::StoreUnavailable,
        Self::Shadow,
        Self::TooManyBuckets,
    ];

    /// Its name in answers and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OverLimit => "over_limit",
            Self::NoLease => "no_lease",
            Self::StoreUnavailable => "store_unavailable",
            Self::Shadow => "shadow",
            Self::TooManyBuckets => "too_many_buckets",
        }
    }
}

/// The kind of answer, as HTTP has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// 200.
    Allowed,
    /// 429.
    OverLimit,
    /// 503: every denial is for want of a store, or of policies. An outage is not a used-up quota.
    Unavailable,
}

impl Status {
    /// The HTTP status code.
    #[must_use]
    pub const fn code(self) -> u16 {
        match self {
            Self::Allowed => 200,
            Self::OverLimit => 429,
            Self::Unavailable => 503,
        }
    }
}

/// The limit that an answer is about.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// The policy's name (or what a limit is called that came with a descriptor and replaces none).
    pub policy: &'a Arc<str>,
    /// The policy's mode.
    pub mode: Mode,
    /// The limit; `None`: unlimited.
    pub limit: Option<Scale>,
    /// The policy only counts.
    pub shadow: bool,
}

/// A limit's numbers, as answers tell them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Tokens, or permits, ...
    pub amount: u64,
    /// ... in so much time; `None`: at a time.
    pub per: Option<Window>,
    /// The most that can be had at once, in whole tokens.
    pub burst: u64,
}

impl Scale {
    /// Those of a policy's limit; `None`: unlimited.
    #[must_use]
    pub fn of(limit: &Limit) -> Option<Self> {
        match limit {
            Limit::TokenBucket(bucket) => Some((*bucket).into()),
            Limit::Quota(quota) => {
                Some(Self { amount: quota.quota, per: Some(quota.per), burst: quota.quota })
            }
            Limit::Concurrent(concurrent) => {
                Some(Self { amount: concurrent.permits, per: None, burst: concurrent.permits })
            }
            Limit::Unlimited => None,
        }
    }
}

impl From<TokenBucket> for Scale {
    fn from(bucket: TokenBucket) -> Self {
        Self { amount: bucket.amount, per: Some(Window::Calendar(bucket.per)), burst: bucket.burst }
    }
}

impl<'a> From<&'a Policy> for Terms<'a> {
    fn from(policy: &'a Policy) -> Self {
        let limit = Scale::of(&policy.limit);
        Self { policy: &policy.name, mode: policy.mode, limit, shadow: policy.shadow }
    }
}

impl Terms<'_> {
    /// The most that one request can ever be granted.
    #[must_use]
    pub fn ceiling(&self) -> Tokens {
        let whole = |limit: Scale| Tokens::whole(i64::try_from(limit.burst).unwrap_or(i64::MAX));
        let burst = self.limit.map_or(Tokens::MAX, whole);
        match self.mode {
            Mode::Approximate { max_overshoot } => burst + max_overshoot.of_tokens(burst),
            Mode::Strict | Mode::Split => burst,
        }
    }
}

/// A bucket as a request found it (its state after the request, if something was taken).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    /// Did the cost fit?
    pub fits: bool,
    /// What is in it.
    pub level: Tokens,
    /// How fast it refills.
    pub rate: Rate,
    /// What it can hold.
    pub cap: Tokens,
}

/// A quota as a request found it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaSight {
    /// Did the cost fit?
    pub fits: bool,
    /// What is left of it as far as this region knows: its own, and what it might be lent.
    pub left: Tokens,
    /// The window.
    pub turn: Turn,
    /// The time of day.
    pub now: Micros,
    /// How long it takes to be lent something; `None`: nothing can be lent.
    pub lent_after: Option<Micros>,
}

/// What a region may hope to get from the pool, beyond what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// How fast its bucket would refill with a fair lease (discounted for drift, like any rate in a bucket).
    pub rate: Rate,
    /// What its bucket could hold at most, with all of the pool in it.
    pub cap: Tokens,
    /// How long it takes to get a lease.
    pub after: Micros,
}

impl Verdict {
    /// Puts the answers of all limits together. `descriptors`: how many the request had (attributes count as one).
    /// A descriptor that no limit matched is answered with `unmatched`. A limit with an index of no descriptor
    /// counts for the whole request.
    #[must_use]
    pub fn new(limits: Vec<LimitVerdict>, descriptors: usize, unmatched: bool) -> Self {
        let mut each = vec![DescriptorVerdict { allowed: unmatched, limit: None }; descriptors];
        let mut allowed = true;
        for (index, limit) in limits.iter().enumerate() {
            allowed &= limit.allowed;
            let Some(descriptor) = each.get_mut(limit.descriptor) else { continue };
            let bound = descriptor.limit.and_then(|i| limits.get(i));
            descriptor.allowed = bound.is_none_or(|_| descriptor.allowed) && limit.allowed;
            if bound.is_none_or(|bound| limit.binds_more_than(bound)) {
                descriptor.limit = Some(index);
            }
        }
        allowed &= each.iter().all(|d| d.allowed);
        Self { allowed, limits, descriptors: each, undecided: false }
    }

    /// The answer of a region that knows no policies yet (it has just started, or its cluster has not been founded).
    /// Letting such requests through would be a limit for nobody at every restart.
    #[must_use]
    pub fn undecided(descriptors: usize) -> Self {
        let descriptors = vec![DescriptorVerdict { allowed: false, limit: None }; descriptors];
        Self { allowed: false, limits: Vec::new(), descriptors, undecided: true }
    }

    /// What kind of answer it is.
    #[must_use]
    pub fn status(&self) -> Status {
        if self.allowed {
            return Status::Allowed;
        }
        if self.undecided {
            return Status::Unavailable;
        }
        let mut denials = self.limits.iter().filter(|l| !l.allowed).peekable();
        let unmatched = self.descriptors.iter().any(|d| d.limit.is_none() && !d.allowed);
        if denials.peek().is_some() && denials.all(|l| l.reason == Reason::StoreUnavailable) && !unmatched {
            Status::Unavailable
        } else {
            Status::OverLimit
        }
    }

    /// The limit that binds most: of those that deny, the one that does so longest; else the one with least left.
    #[must_use]
    pub fn binding(&self) -> Option<&LimitVerdict> {
        let mut limits = self.limits.iter();
        let first = limits.next()?;
        Some(limits.fold(first, |most, next| if next.binds_more_than(most) { next } else { most }))
    }

    /// The header fields of the answer; `None` if no limit matched, or none that has a number.
    #[must_use]
    pub fn fields(&self) -> Option<Fields> {
        self.binding().filter(|l| !l.unlimited).map(Fields::new)
    }
}

impl LimitVerdict {
    /// The answer of a limit whose bucket was seen. `denial` is the reason to give if the cost does not fit
    /// ([`Reason::OverLimit`] or [`Reason::NoLease`]).
    #[must_use]
    pub fn seen(
        terms: Terms<'_>,
        descriptor: usize,
        cost: Tokens,
        sight: Sight,
        elsewhere: Option<Elsewhere>,
        denial: Reason,
    ) -> Self {
        let allowed = sight.fits || terms.shadow;
        let retry = if sight.fits { None } else { retry_after(cost, sight, elsewhere) };
        let reset = if allowed { until_full(sight) } else { retry.unwrap_or(Micros::ZERO) };
        Self {
            allowed,
            remaining: u64::try_from(sight.level.floor()).unwrap_or(0),
            reset,
            retry_after: retry.filter(|_| !allowed),
            reason: match (sight.fits, terms.shadow) {
                (true, _) => Reason::Ok,
                (false, true) => Reason::Shadow,
                (false, false) => denial,
            },
            ..Self::unlimited(terms, descriptor)
        }
    }

    /// The answer of a quota whose bucket was seen, as `turn` looks at it; `denial` as for [`Self::seen`]. A denial ends with the
    /// window, or as soon as what is left in the pool has been lent.
    #[must_use]
    pub fn in_window(
        terms: Terms<'_>,
        descriptor: usize,
        cost: Tokens,
        quota: &QuotaSight,
        denial: Reason,
    ) -> Self {
        let allowed = quota.fits || terms.shadow;
        let left = (quota.turn.end - quota.now).or_zero();
        let lent_soon = quota.lent_after.filter(|_| cost <= quota.left);
        let wait = lent_soon.map_or(left, |after| left.min(after));
        let retry = (!quota.fits && cost <= terms.ceiling()).then_some(wait.max(Micros(1)));
        Self {
            allowed,
            remaining: u64::try_from(quota.left.floor()).unwrap_or(0),
            reset: if allowed { left } else { retry.unwrap_or(Micros::ZERO) },
            retry_after: retry.filter(|_| !allowed),
            reason: match (quota.fits, terms.shadow) {
                (true, _) => Reason::Ok,
                (false, true) => Reason::Shadow,
                (false, false) => denial,
            },
            window: Some(quota.turn.length()),
            ..Self::unlimited(terms, descriptor)
        }
    }

    /// The answer of a limit whose store gave none: as `on_store_failure` says. (A cost that never fits is a denial
    /// that never ends, store or not.)
    #[must_use]
    pub fn unavailable(terms: Terms<'_>, descriptor: usize, cost: Tokens, allow: bool) -> Self {
        let allowed = allow || terms.shadow;
        let retry = (!allowed && cost <= terms.ceiling()).then_some(RETRY_HINT);
        Self {
            allowed,
            remaining: 0,
            reset: retry.unwrap_or(Micros::ZERO),
            retry_after: retry,
            reason: Reason::StoreUnavailable,
            ..Self::unlimited(terms, descriptor)
        }
    }

    /// The answer of a limit whose bucket does not exist and may not be made now. Come back when fewer others do.
    #[must_use]
    pub fn no_room(terms: Terms<'_>, descriptor: usize, cost: Tokens) -> Self {
        let reason = if terms.shadow { Reason::Shadow } else { Reason::TooManyBuckets };
        Self { reason, ..Self::unavailable(terms, descriptor, cost, false) }
    }

    /// The answer of a policy without a limit.
    #[must_use]
    pub fn unlimited(terms: Terms<'_>, descriptor: usize) -> Self {
        let limit = terms.limit;
        Self {
            policy: Arc::clone(terms.policy),
            mode: terms.mode,
            allowed: true,
            limit: limit.map_or(u64::MAX, |l| l.amount),
            per: limit.and_then(|l| l.per),
            window: None,
            burst: limit.map_or(u64::MAX, |l| l.burst),
            remaining: u64::MAX,
            reset: Micros::ZERO,
            retry_after: None,
            reason: Reason::Ok,
            descriptor,
            unlimited: limit.is_none(),
            shadow: terms.shadow,
        }
    }

    /// Would a caller rather hear of this limit than of the other?
    #[must_use]
    pub fn binds_more_than(&self, other: &Self) -> bool {
        self.rank() > other.rank()
    }

    /// Greater: binds more. Denials first, the longest of them foremost; then what has least left (and takes longest
    /// to fill); then what only counts; then what has no limit.
    fn rank(&self) -> (u8, i64, std::cmp::Reverse<u64>, i64) {
        let class = match self {
            Self { allowed: false, .. } => 3,
            Self { unlimited: true, .. } => 0,
            Self { shadow: true, .. } => 1,
            _ => 2,
        };
        let retry = if self.allowed { 0 } else { self.retry_after.unwrap_or(Micros::MAX).0 };
        (class, retry, std::cmp::Reverse(self.remaining), self.reset.0)
    }
}

/// How long until `cost` fits into a bucket that it does not fit now; `None`: never.
///
/// What the bucket refills at now is certain, what the pool may lend is a hope: so the hope shortens the wait only
/// where a fair lease would bring more than the bucket has (otherwise a caller would come back too soon).
#[must_use]
pub fn retry_after(cost: Tokens, sight: Sight, elsewhere: Option<Elsewhere>) -> Option<Micros> {
    let short = cost - sight.level;
    let here = if cost <= sight.cap { sight.rate.time_for(short) } else { None };
    let there = elsewhere
        .filter(|e| cost <= e.cap)
        .and_then(|e| Some(e.after + e.rate.max(sight.rate).time_for(short)?.max(Micros(1))));
    match (here, there) {
        (Some(here), Some(there)) => Some(here.min(there)),
        (here, there) => here.or(there),
    }
}

/// How long until a bucket is full, if nothing is taken; 0 if it is, or never will be.
#[must_use]
pub fn until_full(sight: Sight) -> Micros {
    sight.rate.time_for(sight.cap - sight.level).unwrap_or(Micros::ZERO)
}

/// The header fields that tell a caller about the limit that binds most.
///
/// `RateLimit-Policy` and `RateLimit` are those of draft-ietf-httpapi-ratelimit-headers-10 (an Internet-Draft, not an
/// RFC): one quota policy item (section 3) with `q` and `w`, one service limit item (section 4) with `r` and `t`.
/// What is limited at a time has no `w`, but the quota unit `qu="concurrent-requests"` (section 3). Names of items are Structured Field strings (RFC 9651, section 3.3.3), numbers are Structured Field integers
/// (section 3.3.1: at most 15 digits). `X-RateLimit-*` are the older, informal ones. `Retry-After` is RFC 9110,
/// section 10.2.3.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fields {
    /// [`Self::POLICY`].
    pub policy: String,
    /// [`Self::STATE`].
    pub state: String,
    /// [`Self::X_LIMIT`].
    pub limit: u64,
    /// [`Self::X_REMAINING`].
    pub remaining: u64,
    /// [`Self::X_RESET`], in seconds.
    pub reset: u64,
    /// [`Self::RETRY_AFTER`], in seconds; `None`: left out.
    pub retry_after: Option<u64>,
}

impl Fields {
    /// The quota policy.
    pub const POLICY: &'static str = "ratelimit-policy";
    /// What is left of it.
    pub const STATE: &'static str = "ratelimit";
    /// Tokens a unit of time.
    pub const X_LIMIT: &'static str = "x-ratelimit-limit";
    /// What is left, in whole tokens.
    pub const X_REMAINING: &'static str = "x-ratelimit-remaining";
    /// Seconds until reset.
    pub const X_RESET: &'static str = "x-ratelimit-reset";
    /// Seconds until the same request can be met.
    pub const RETRY_AFTER: &'static str = "retry-after";

    /// The fields for one limit.
    #[must_use]
    pub fn new(limit: &LimitVerdict) -> Self {
        // A denial that says "in 0 seconds" would be asked again at once.
        let at_least = u64::from(!limit.allowed);
        let reset = whole_seconds(limit.reset).max(at_least);
        let never = !limit.allowed && limit.retry_after.is_none();
        let name_length = limit.policy.len();
        let mut policy = String::with_capacity(name_length.saturating_add(48));
        quoted(&mut policy, &limit.policy);
        // Writing to a String does not fail.
        let _ = write!(policy, ";q={}", sf_integer(limit.limit));
        let _ = match limit.per {
            Some(per) => {
                let length = limit.window.map_or(per.seconds(), Micros::ceil_seconds);
                write!(policy, ";w={length}")
            }
            None => policy.write_str(";qu=\"concurrent-requests\""),
        };
        let mut state = String::with_capacity(name_length.saturating_add(48));
        quoted(&mut state, &limit.policy);
        let _ = write!(state, ";r={}", sf_integer(limit.remaining));
        if !never {
            let _ = write!(state, ";t={}", sf_integer(reset));
        }
        Self {
            policy,
            state,
            limit: limit.limit,
            remaining: limit.remaining,
            reset: if never { 0 } else { reset },
            retry_after: limit.retry_after.map(|t| whole_seconds(t).max(1)),
        }
    }
}

fn whole_seconds(time: Micros) -> u64 {
    u64::try_from(time.ceil_seconds()).unwrap_or(0)
}

/// RFC 9651, section 3.3.1.
fn sf_integer(n: u64) -> u64 {
    n.min(999_999_999_999_999)
}

/// RFC 9651, section 3.3.3: printable ASCII, with `"` and `\` escaped. What cannot be written becomes `_`.
fn quoted(out: &mut String, name: &str) {
    out.push('"');
    for c in name.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            ' '..='~' => out.push(c),
            _ => out.push('_'),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::policy::{Algorithm, OnStoreFailure, Quota, Reserve, Share, Unit};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn limit(amount: u64, per: Unit, burst: u64) -> TokenBucket {
        TokenBucket { amount, per, burst }
    }

    fn policy(name: &str, bucket: TokenBucket) -> Policy {
        Policy {
            name: name.into(),
            domain: "api".into(),
            matches: Vec::new(),
            limit: Limit::TokenBucket(bucket),
            mode: Mode::Split,
            reserve: Reserve::default(),
            weights: BTreeMap::new(),
            wait: Micros::ZERO,
            on_store_failure: OnStoreFailure::Deny,
            shadow: false,
        }
    }

    /// A bucket at `level` that is asked for `cost`, whole tokens.
    fn asked(policy: &Policy, descriptor: usize, cost: i64, level: i64) -> LimitVerdict {
        let Limit::TokenBucket(bucket) = policy.limit else { panic!("a limit") };
        let (cost, level) = (Tokens::whole(cost), Tokens::whole(level));
        let fits = cost <= level;
        let level = if fits { level - cost } else { level };
        let sight = Sight { fits, level, rate: bucket.rate(), cap: bucket.burst() };
        LimitVerdict::seen(policy.into(), descriptor, cost, sight, None, Reason::OverLimit)
    }

    fn lines(verdict: &Verdict) -> Vec<String> {
        let f = verdict.fields().unwrap();
        let mut lines = vec![
            format!("{}: {}", Fields::POLICY, f.policy),
            format!("{}: {}", Fields::STATE, f.state),
            format!("{}: {}", Fields::X_LIMIT, f.limit),
            format!("{}: {}", Fields::X_REMAINING, f.remaining),
            format!("{}: {}", Fields::X_RESET, f.reset),
        ];
        lines.extend(f.retry_after.map(|s| format!("{}: {s}", Fields::RETRY_AFTER)));
        lines
    }

    #[test]
    fn fields_of_an_allowed_request() {
        let p = policy("tenant-requests", limit(1000, Unit::Second, 2000));
        let mut limit = asked(&p, 0, 1, 42);
        // As in the contract: 230 ms are a second, rounded up.
        limit.reset = Micros::millis(230);
        let verdict = Verdict::new(vec![limit], 1, true);
        assert_eq!(verdict.status(), Status::Allowed);
        assert_eq!(
            lines(&verdict),
            [
                "ratelimit-policy: \"tenant-requests\";q=1000;w=1",
                "ratelimit: \"tenant-requests\";r=41;t=1",
                "x-ratelimit-limit: 1000",
                "x-ratelimit-remaining: 41",
                "x-ratelimit-reset: 1",
            ]
        );
    }

    #[test]
    fn fields_of_a_denied_request() {
        let p = policy("slow", limit(1, Unit::Minute, 10));
        let verdict = Verdict::new(vec![asked(&p, 0, 3, 1)], 1, true);
        assert_eq!(verdict.status().code(), 429);
        assert_eq!(
            lines(&verdict),
            [
                "ratelimit-policy: \"slow\";q=1;w=60",
                "ratelimit: \"slow\";r=1;t=121",
                "x-ratelimit-limit: 1",
                "x-ratelimit-remaining: 1",
                "x-ratelimit-reset: 121",
                "retry-after: 121",
            ],
            "1/m is 16,666 micro-tokens a second, rounded down: two tokens take a little more than 120 s"
        );
        let soon = policy("fast", limit(1_000_000, Unit::Second, 1_000_000));
        let verdict = Verdict::new(vec![asked(&soon, 0, 2, 1)], 1, true);
        assert_eq!(verdict.fields().unwrap().retry_after, Some(1), "at least a second");
    }

    #[test]
    fn a_quota_comes_back_when_its_window_ends() {
        let per = Window::Calendar(Unit::Month);
        let quota = Limit::Quota(Quota { quota: 5, per, algorithm: Algorithm::FixedWindow });
        let plan = Policy { limit: quota, ..policy("plan", limit(1, Unit::Second, 1)) };
        // February 2024, half a second before its end.
        let turn = per.turn_at(Micros::seconds(1_709_164_800));
        let now = turn.end - Micros::millis(500);
        let sight =
            QuotaSight { fits: false, left: Tokens::ZERO, turn, now, lent_after: Some(Micros::millis(250)) };
        let answer = |sight: &QuotaSight, cost| {
            let verdict =
                LimitVerdict::in_window((&plan).into(), 0, Tokens::whole(cost), sight, Reason::OverLimit);
            lines(&Verdict::new(vec![verdict], 1, true))
        };
        let plan_lines = |state: &str, remaining: u32, retry: Option<&str>| {
            let mut lines = vec![
                "ratelimit-policy: \"plan\";q=5;w=2505600".to_owned(),
                format!("ratelimit: \"plan\";r={remaining}{state}"),
                "x-ratelimit-limit: 5".to_owned(),
                format!("x-ratelimit-remaining: {remaining}"),
                format!("x-ratelimit-reset: {}", state.trim_start_matches(";t=").parse().unwrap_or(0)),
            ];
            lines.extend(retry.map(|t| format!("retry-after: {t}")));
            lines
        };
        assert_eq!(answer(&sight, 1), plan_lines(";t=1", 0, Some("1")));
        let early = QuotaSight { now: turn.end - Micros::seconds(86_400), ..sight };
        assert_eq!(answer(&early, 1), plan_lines(";t=86400", 0, Some("86400")));
        let pooled = QuotaSight { left: Tokens::whole(3), ..early };
        assert_eq!(answer(&pooled, 3), plan_lines(";t=1", 3, Some("1")), "the pool has it");
        assert_eq!(answer(&pooled, 4), plan_lines(";t=86400", 3, Some("86400")));
        assert_eq!(answer(&pooled, 6), plan_lines("", 3, None), "more than the quota: never");
        assert_eq!(answer(&QuotaSight { fits: true, ..pooled }, 3), plan_lines(";t=86400", 3, None));
        let over = QuotaSight { left: Tokens::whole(-2), lent_after: None, ..early };
        assert_eq!(answer(&over, 0), plan_lines(";t=86400", 0, Some("86400")), "cut below what is spent");
    }

    #[test]
    fn what_never_fits_has_no_time() {
        for (bucket, cost) in [(limit(0, Unit::Hour, 0), 1), (limit(5, Unit::Second, 5), 6)] {
            let p = policy("p", bucket);
            let level = i64::try_from(bucket.burst).unwrap();
            let verdict = Verdict::new(vec![asked(&p, 0, cost, level)], 1, true);
            assert_eq!(verdict.status(), Status::OverLimit);
            assert_eq!(verdict.limits[0].remaining, bucket.burst, "nothing is charged");
            let fields = verdict.fields().unwrap();
            assert_eq!(fields.retry_after, None);
            assert_eq!(fields.state, format!("\"p\";r={level}"));
            assert_eq!(fields.reset, 0);
        }
    }

    #[test]
    fn the_binding_limit() {
        let bucket = limit(1, Unit::Second, 100);
        let p = policy("p", bucket);
        let (little, plenty) = (asked(&p, 0, 1, 5), asked(&p, 0, 1, 50));
        let (short, long) = (asked(&p, 1, 10, 5), asked(&p, 1, 50, 5));
        let never = asked(&p, 1, 101, 100);
        let unlimited = LimitVerdict::unlimited(Terms { limit: None, ..Terms::from(&p) }, 0);
        let mut shadow = asked(&policy("s", limit(1, Unit::Second, 1)), 0, 1, 1);
        shadow.shadow = true;
        let binding = |limits: &[&LimitVerdict]| {
            let forth = Verdict::new(limits.iter().map(|&l| l.clone()).collect(), 2, true);
            let back = Verdict::new(limits.iter().rev().map(|&l| l.clone()).collect(), 2, true);
            assert_eq!(forth.binding(), back.binding());
            forth.binding().unwrap().clone()
        };
        assert_eq!(binding(&[&little, &plenty, &unlimited, &shadow]), little);
        assert_eq!(binding(&[&little, &short, &long]), long);
        assert_eq!(binding(&[&long, &never]), never);
        assert_eq!(binding(&[&unlimited, &shadow]), shadow);
        assert_eq!(Verdict::new(vec![unlimited], 1, true).fields(), None);
    }

    #[test]
    fn descriptors_in_order() {
        let p = policy("p", limit(1, Unit::Second, 10));
        let limits = vec![asked(&p, 2, 1, 9), asked(&p, 0, 1, 0), asked(&p, 2, 1, 3)];
        let verdict = Verdict::new(limits, 4, true);
        assert!(!verdict.allowed);
        let expected = [(false, Some(1)), (true, None), (true, Some(2)), (true, None)];
        let expected = expected.map(|(allowed, limit)| DescriptorVerdict { allowed, limit });
        assert_eq!(verdict.descriptors, expected);

        let unmatched = Verdict::new(Vec::new(), 2, false);
        assert!(!unmatched.allowed);
        assert_eq!(unmatched.status(), Status::OverLimit);
        assert_eq!(unmatched.fields(), None);
    }

    #[test]
    fn an_outage_is_not_a_used_up_quota() {
        let bucket = limit(10, Unit::Second, 10);
        let p = policy("p", bucket);
        let gone = LimitVerdict::unavailable((&p).into(), 0, Tokens::whole(1), false);
        let over = asked(&p, 1, 5, 1);
        let fine = asked(&p, 1, 1, 5);
        let status = |limits: Vec<LimitVerdict>| Verdict::new(limits, 2, true).status();
        assert_eq!(status(vec![gone.clone()]), Status::Unavailable);
        assert_eq!(status(vec![gone.clone(), fine]), Status::Unavailable);
        assert_eq!(status(vec![gone.clone(), over]), Status::OverLimit);
        assert_eq!(Verdict::new(vec![gone.clone()], 2, false).status(), Status::OverLimit);
        assert_eq!(Fields::new(&gone).retry_after, Some(1));

        let never = LimitVerdict::unavailable((&p).into(), 0, Tokens::whole(11), false);
        assert_eq!(Fields::new(&never).retry_after, None);
        let allowed = LimitVerdict::unavailable((&p).into(), 0, Tokens::whole(1), true);
        assert_eq!((allowed.allowed, allowed.reason), (true, Reason::StoreUnavailable));
        let roomy =
            Policy { mode: Mode::Approximate { max_overshoot: Share::percent(10) }, ..policy("a", bucket) };
        let fits = LimitVerdict::unavailable((&roomy).into(), 0, Tokens::whole(11), false);
        assert_eq!(fits.retry_after, Some(RETRY_HINT), "the overshoot can be spent");
    }

    #[test]
    fn shadow_policies_never_deny() {
        let bucket = limit(1, Unit::Second, 1);
        let p = Policy { shadow: true, ..policy("p", bucket) };
        let verdict = asked(&p, 0, 1, 0);
        assert_eq!((verdict.allowed, verdict.reason, verdict.retry_after), (true, Reason::Shadow, None));
    }

    #[test]
    fn names_are_structured_field_strings() {
        let p = policy("a\"b\\c\u{e9}\n", limit(u64::MAX, Unit::Day, 1));
        let fields = Fields::new(&asked(&p, 0, 0, 1));
        assert_eq!(fields.policy, r#""a\"b\\c__";q=999999999999999;w=86400"#);
        assert!(fields.policy.is_ascii() && fields.state.is_ascii());
    }

    #[test]
    fn hope_shortens_the_wait_only_where_a_lease_would_help() {
        let second = Micros::seconds(1);
        let sight =
            Sight { fits: false, level: Tokens::ZERO, rate: Rate::per_second(1), cap: Tokens::whole(10) };
        let lease = Elsewhere { rate: Rate::per_second(100), cap: Tokens::whole(50), after: second };
        assert_eq!(retry_after(Tokens::whole(10), sight, None), Some(Micros::seconds(10)));
        assert_eq!(retry_after(Tokens::whole(10), sight, Some(lease)), Some(Micros::millis(1_100)));
        assert_eq!(retry_after(Tokens::whole(50), sight, None), None);
        assert_eq!(retry_after(Tokens::whole(50), sight, Some(lease)), Some(Micros::millis(1_500)));
        assert_eq!(retry_after(Tokens::whole(51), sight, Some(lease)), None);
        let leased = Sight { rate: Rate::per_second(200), ..sight };
        assert_eq!(retry_after(Tokens::whole(10), leased, Some(lease)), Some(Micros::millis(50)));
    }

    proptest! {
        /// Never sooner than the cost can be met, and not a microsecond later either.
        #[test]
        fn the_wait_is_exact(
            cost in 1_i64..1 << 40,
            level in 0_i64..1 << 40,
            rate in 0_i64..1 << 45,
            cap in 0_i64..1 << 40,
        ) {
            let (cost, level, rate, cap) = (Tokens(cost), Tokens(level.min(cap)), Rate(rate), Tokens(cap));
            prop_assume!(cost > level);
            let sight = Sight { fits: false, level, rate, cap };
            match retry_after(cost, sight, None) {
                None => prop_assert!(cost > cap || rate == Rate::ZERO),
                Some(wait) => {
                    prop_assert!(level + rate.during(wait) >= cost);
                    prop_assert!(level + rate.during(wait - Micros(1)) < cost);
                }
            }
        }

        #[test]
        fn retry_after_and_reset_agree(seconds in 0_i64..1 << 33) {
            let p = policy("p", limit(1, Unit::Second, 1));
            let mut limit = asked(&p, 0, 1, 0);
            limit.reset = Micros(seconds);
            limit.retry_after = Some(Micros(seconds));
            let fields = Fields::new(&limit);
            prop_assert_eq!(Some(fields.reset), fields.retry_after);
            prop_assert!(i64::try_from(fields.reset).unwrap() * 1_000_000 >= seconds.max(1));
        }
    }
}
