//! What is answered to a request: a verdict for each limit, one for the whole, and the header fields that say it.
//!
//! The names and formats of header fields are all in [`Fields`], because the draft they follow still changes.

use super::amount::{Micros, Rate, Tokens};
use super::policy::{Mode, Policy, TokenBucket, Unit};
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
    /// The unit of time of [`Self::limit`].
    pub per: Unit,
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
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Ok, Self::OverLimit, Self::NoLease, Self::StoreUnavailable, Self::Shadow];

    /// Its name in answers and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OverLimit => "over_limit",
            Self::NoLease => "no_lease",
            Self::StoreUnavailable => "store_unavailable",
            Self::Shadow => "shadow",
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
    /// 503: every denial is for want of a store. An outage is not a used-up quota.
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
        Self { allowed, limits, descriptors: each }
    }

    /// What kind of answer it is.
    #[must_use]
    pub fn status(&self) -> Status {
        if self.allowed {
            return Status::Allowed;
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
        (policy, limit): (&Policy, &TokenBucket),
        descriptor: usize,
        cost: Tokens,
        sight: Sight,
        elsewhere: Option<Elsewhere>,
        denial: Reason,
    ) -> Self {
        let allowed = sight.fits || policy.shadow;
        let retry = if sight.fits { None } else { retry_after(cost, sight, elsewhere) };
        let reset = if allowed { until_full(sight) } else { retry.unwrap_or(Micros::ZERO) };
        Self {
            allowed,
            remaining: u64::try_from(sight.level.floor()).unwrap_or(0),
            reset,
            retry_after: retry.filter(|_| !allowed),
            reason: match (sight.fits, policy.shadow) {
                (true, _) => Reason::Ok,
                (false, true) => Reason::Shadow,
                (false, false) => denial,
            },
            ..Self::of(policy, Some(limit), descriptor)
        }
    }

    /// The answer of a limit whose store gave none: as `on_store_failure` says. (A cost that never fits is a denial
    /// that never ends, store or not.)
    #[must_use]
    pub fn unavailable(
        (policy, limit): (&Policy, &TokenBucket),
        descriptor: usize,
        cost: Tokens,
        allow: bool,
    ) -> Self {
        let allowed = allow || policy.shadow;
        let retry = (!allowed && cost <= ceiling(policy, limit)).then_some(RETRY_HINT);
        Self {
            allowed,
            remaining: 0,
            reset: retry.unwrap_or(Micros::ZERO),
            retry_after: retry,
            reason: Reason::StoreUnavailable,
            ..Self::of(policy, Some(limit), descriptor)
        }
    }

    /// The answer of a policy without a limit.
    #[must_use]
    pub fn unlimited(policy: &Policy, descriptor: usize) -> Self {
        Self::of(policy, None, descriptor)
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

    fn of(policy: &Policy, limit: Option<&TokenBucket>, descriptor: usize) -> Self {
        Self {
            policy: Arc::clone(&policy.name),
            mode: policy.mode,
            allowed: true,
            limit: limit.map_or(u64::MAX, |l| l.amount),
            per: limit.map_or(Unit::Second, |l| l.per),
            burst: limit.map_or(u64::MAX, |l| l.burst),
            remaining: u64::MAX,
            reset: Micros::ZERO,
            retry_after: None,
            reason: Reason::Ok,
            descriptor,
            unlimited: limit.is_none(),
            shadow: policy.shadow,
        }
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

/// The most that one request can ever be granted.
fn ceiling(policy: &Policy, limit: &TokenBucket) -> Tokens {
    let burst = limit.burst();
    match policy.mode {
        Mode::Approximate { max_overshoot } => burst + max_overshoot.of_tokens(burst),
        Mode::Strict | Mode::Split => burst,
    }
}

/// The header fields that tell a caller about the limit that binds most.
///
/// `RateLimit-Policy` and `RateLimit` are those of draft-ietf-httpapi-ratelimit-headers-10 (an Internet-Draft, not an
/// RFC): one quota policy item (section 3) with `q` and `w`, one service limit item (section 4) with `r` and `t`.
/// Names of items are Structured Field strings (RFC 9651, section 3.3.3), numbers are Structured Field integers
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
        let _ = write!(policy, ";q={};w={}", sf_integer(limit.limit), limit.per.seconds());
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
