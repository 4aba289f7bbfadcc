//! What is answered to a request: a verdict for each limit, one for the whole, and the header fields that say it.
//!
//! The names and formats of header fields are all in [`Fields`], because the draft they follow still changes.

use super::amount::{Micros, Rate, Tokens};
use super::calendar::Turn;
use super::counted::Seen;
use super::policy::{Limit, Mode, Policy, TokenBucket, Window};
use serde::{Deserialize, Serialize};
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

    /// The answer of a limit whose region was not lent in time what it lacks, though the pool has it; `level` is what the region has itself.
    /// It may have been lent `after` so long.
    #[must_use]
    pub fn unanswered(terms: Terms<'_>, descriptor: usize, level: Tokens, after: Micros) -> Self {
        Self {
            allowed: false,
            remaining: u64::try_from(level.floor()).unwrap_or(0),
            reset: after,
            retry_after: Some(after),
            reason: Reason::NoLease,
            ..Self::unlimited(terms, descriptor)
        }
    }

    /// The answer of a limit that counts. `denial` is as for [`Self::seen`].
    #[must_use]
    pub fn counted(terms: Terms<'_>, descriptor: usize, seen: &Seen, denial: Reason) -> Self {
        let allowed = seen.fits || terms.shadow;
        Self {
            allowed,
            remaining: u64::try_from(seen.left).unwrap_or(0),
            reset: if allowed { seen.reset } else { seen.wait.unwrap_or(Micros::ZERO) },
            retry_after: seen.wait.filter(|_| !allowed),
            reason: match (seen.fits, terms.shadow) {
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
        let room = &mut [0; DIGITS_MAX];
        let mut number = |out: &mut String, key: &str, n: u64| {
            out.push_str(key);
            out.push_str(decimal(n, room));
        };
        quoted(&mut policy, &limit.policy);
        number(&mut policy, ";q=", sf_integer(limit.limit));
        match limit.per {
            Some(per) => {
                let length = limit.window.map_or(per.seconds(), Micros::ceil_seconds);
                number(&mut policy, ";w=", u64::try_from(length).unwrap_or(0));
            }
            None => policy.push_str(";qu=\"concurrent-requests\""),
        }
        let mut state = String::with_capacity(name_length.saturating_add(48));
        quoted(&mut state, &limit.policy);
        number(&mut state, ";r=", sf_integer(limit.remaining));
        if !never {
            number(&mut state, ";t=", sf_integer(reset));
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

/// Digits of the largest number.
pub const DIGITS_MAX: usize = 20;

/// A number in decimal, without the machinery of `format!`: an answer has half a dozen of them.
pub fn decimal(mut n: u64, room: &mut [u8; DIGITS_MAX]) -> &str {
    let mut at = DIGITS_MAX;
    loop {
        at = at.saturating_sub(1);
        if let Some(place) = room.get_mut(at) {
            *place = b'0'.saturating_add(u8::try_from(n % 10).unwrap_or(0));
        }
        n /= 10;
        if n == 0 {
            break;
        }
    }
    room.get(at..).and_then(|digits| std::str::from_utf8(digits).ok()).unwrap_or_default()
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
    if name.bytes().all(|b| matches!(b, b' '..=b'~') && b != b'"' && b != b'\\') {
        out.push_str(name);
        out.push('"');
        return;
    }
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
mod tests;
