//! Permits of `concurrent` limits: a lease is given out, renewed, and given back.
//!
//! What a holder gets is a token that says all that its region must know to find the permits again: which lease, of which
//! buckets. Nobody can guess a lease: its name is 128 random bits, and a token that names one which the store does not hold is
//! good for nothing.

use super::{Held, Limiter, hold};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::counted::lent;
use crate::quota::counted::permits::LeaseId;
use crate::quota::counted::{Act, Kind, Seen};
use crate::quota::matching::{CHARGES_MAX, Request, RequestFault};
use crate::quota::policy::{BucketId, OnStoreFailure, Policy, RegionName, TTL_DEFAULT};
use crate::quota::verdict::{Reason, Verdict};
use crate::store::{CountCharge, Store, Take, Taken};
use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;

/// The longest token: a lease of as many permits as a request can match.
const TOKEN_BYTES_MAX: usize = 2 + 16 + 255 + CHARGES_MAX * GRANT_BYTES;
const GRANT_BYTES: usize = 1 + 4 + 16 + 8;
/// The first byte of a token.
const VERSION: u8 = 1;

/// A lease of permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// For its holder.
    pub token: String,
    /// It ends after this, unless it is renewed.
    pub expires: Micros,
}

/// Why a lease was not renewed or given back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseFault {
    /// It has ended, was given back, was lost with the store's data, or never was.
    #[error("there is no such lease: it has ended, was released, or never was")]
    Unknown,
    /// Only the region that gave it out knows it.
    #[error("the lease is one of region `{region}`; send it there")]
    Elsewhere {
        /// Which region.
        region: RegionName,
    },
    /// More permits are in use than the limit allows now.
    #[error("the limit was lowered and too many permits are in use: the lease is not renewed, and ends in {} ms", left.ceil_millis())]
    TooMany {
        /// How long it lasts.
        left: Micros,
    },
    /// The region's store gives no answer.
    #[error("the region's store gives no answer; try again")]
    Unavailable,
    /// The region has no policies yet.
    #[error("the policies are not known yet; /readyz on the admin listener says what the region waits for")]
    Undecided,
}

impl<S: Store> Limiter<S> {
    pub(super) async fn acquire_lease(
        &self,
        request: &Request<'_>,
    ) -> Result<(Verdict, Option<Lease>), RequestFault> {
        let active = self.core.active.load_full();
        let matched = active.matcher.charges(request)?;
        let id = LeaseId(rand::random());
        let Some(mut held) = hold(&active, &matched, &self.core.time) else {
            return Ok((Verdict::undecided(request.descriptors()), None));
        };
        for (held, ordinal) in held.iter_mut().zip(0..) {
            held.acquires(of_grant(id, ordinal));
        }
        let verdict = self.decide(&active, request, &matched, &mut held, None).await;
        if !verdict.allowed {
            return Ok((verdict, None));
        }
        // A shadow policy may have had no permit to give: the lease goes without it.
        let granted = |limit: usize| verdict.limits.get(limit).is_some_and(|l| l.reason != Reason::Shadow);
        let grants = held.iter().enumerate().filter(|(index, _)| granted(*index));
        let grants = grants.filter_map(|(index, held)| held.grant(index)).collect();
        let expires = held.iter().filter_map(Held::expires).min().unwrap_or(TTL_DEFAULT);
        let token = Token { id, region: Arc::clone(&self.core.region), grants }.write();
        Ok((verdict, Some(Lease { token, expires })))
    }

    pub(super) async fn renew_lease(&self, token: &str) -> Result<Micros, LeaseFault> {
        let claims = self.claims(&self.read(token)?, Act::Renew)?;
        let mut expires = claims.iter().map(Claim::whole).min().unwrap_or(TTL_DEFAULT);
        for (claim, seen) in self.act(&claims).await? {
            match seen {
                Seen { fits: true, lasts, .. } => expires = expires.min(lent::told(lasts)),
                _ if claim.shadow => {}
                // It has what it has, until the region is lent more again (or others are done).
                Seen { wait: Some(left), .. } if claim.is_lent() => expires = expires.min(lent::told(left)),
                Seen { wait: Some(left), .. } => return Err(LeaseFault::TooMany { left: lent::told(left) }),
                Seen { wait: None, .. } => return Err(LeaseFault::Unknown),
            }
        }
        Ok(expires)
    }

    pub(super) async fn release_lease(&self, token: &str) -> Result<(), LeaseFault> {
        let mut claims = self.claims(&self.read(token)?, Act::Release)?;
        // What is there is given back, whatever became of the rest.
        claims.iter_mut().for_each(|claim| claim.charge.enforce = false);
        let seen = self.act(&claims).await?;
        let mut matter = seen.iter().filter(|(claim, _)| !claim.shadow).peekable();
        let gone = matter.peek().is_some() && matter.all(|(_, seen)| !seen.fits);
        if gone { Err(LeaseFault::Unknown) } else { Ok(()) }
    }

    fn read(&self, token: &str) -> Result<Token, LeaseFault> {
        let token = Token::read(token).ok_or(LeaseFault::Unknown)?;
        if token.region != self.core.region {
            return Err(LeaseFault::Elsewhere { region: token.region });
        }
        Ok(token)
    }

    /// A charge for each of its buckets whose policy is still there: what has no limit any more needs no permit.
    fn claims(&self, token: &Token, act: impl Fn(LeaseId) -> Act) -> Result<Vec<Claim>, LeaseFault> {
        let active = self.core.active.load_full();
        if !active.is_known() {
            return Err(LeaseFault::Undecided);
        }
        let claim = |grant: &Grant| {
            let policy = active.policy(grant.policy)?;
            let (kind, span) = policy.count.filter(|(kind, _)| *kind == Kind::Permits)?;
            let charge = CountCharge {
                bucket: kind.bucket(grant.bucket, span),
                kind,
                allowance: policy.allowance(span),
                cost: grant.cost,
                act: act(of_grant(token.id, grant.ordinal)),
                enforce: !policy.policy.shadow,
            };
            let Policy { shadow, on_store_failure, .. } = *policy.policy;
            Some(Claim { charge, policy: policy.id, shadow, on_store_failure })
        };
        Ok(token.grants.iter().filter_map(claim).collect())
    }

    /// What became of each claim; those that nothing is known of, as their policies let pass what is not counted, are left out.
    async fn act<'c>(&self, claims: &'c [Claim]) -> Result<Vec<(&'c Claim, Seen)>, LeaseFault> {
        let take = |claims: &[&Claim]| Take {
            counts: claims.iter().map(|claim| claim.charge).collect(),
            ..Take::default()
        };
        let all: Vec<&Claim> = claims.iter().collect();
        if all.is_empty() {
            return Ok(Vec::new());
        }
        let taken = match self.core.fallback.settle(&self.store, || take(&all)).await {
            Ok(()) => self.store.take(take(&all)).await,
            Err(error) => Err(error),
        };
        let error = match taken {
            Ok(taken) => {
                self.core.fallback.store_is_back();
                self.note(claims, &taken);
                return Ok(all.into_iter().zip(taken.counts).collect());
            }
            Err(error) => error,
        };
        self.core.metrics.store_error(error.name());
        if claims.iter().any(|claim| claim.on_store_failure == OnStoreFailure::Deny) {
            return Err(LeaseFault::Unavailable);
        }
        let local = all.into_iter().filter(|claim| claim.on_store_failure == OnStoreFailure::Local);
        let local: Vec<&Claim> = local.collect();
        let taken = self.core.fallback.take(take(&local), &HashSet::new()).await;
        let seen = taken.map_or_else(Vec::new, |taken| taken.counts);
        // What the store holds cannot be renewed while it is away; whether it is there, nobody can say.
        if local.len() != seen.len() || local.iter().zip(&seen).any(|(c, seen)| !c.shadow && !seen.fits) {
            return Err(LeaseFault::Unavailable);
        }
        Ok(local.into_iter().zip(seen).collect())
    }
}

impl<S: Store> Limiter<S> {
    /// Tells the slow loop what is left of permits that are lent between regions, and where more are needed to go on.
    fn note(&self, claims: &[Claim], taken: &Taken) {
        let active = self.core.active.load_full();
        for (claim, seen) in claims.iter().zip(&taken.counts).filter(|(claim, _)| claim.is_lent()) {
            let (bucket, cost) = (claim.charge.bucket, claim.charge.cost);
            let Some(policy) = active.policy(claim.policy) else { continue };
            if !seen.fits && seen.wait.is_some() {
                self.count_permits(policy, bucket, cost, seen, taken.now);
            } else {
                self.saw_permits(policy, bucket, seen, taken.now);
            }
        }
    }
}

/// One thing that is wanted of a lease's permits.
struct Claim {
    charge: CountCharge,
    policy: u32,
    shadow: bool,
    on_store_failure: OnStoreFailure,
}

impl Claim {
    fn is_lent(&self) -> bool {
        self.charge.allowance.lent.is_some()
    }

    /// How long a whole lease lasts.
    fn whole(&self) -> Micros {
        lent::told(self.charge.allowance.span)
    }
}

/// A lease has a name of its own for each of its grants: two may be of the same bucket.
fn of_grant(mut id: LeaseId, ordinal: u8) -> LeaseId {
    id.0[15] ^= ordinal;
    id
}

impl Held<'_> {
    /// From now on a limit on permits takes them under this lease.
    fn acquires(&mut self, id: LeaseId) {
        if let Some((Kind::Permits, _)) = self.count {
            self.act = Act::Acquire(id);
        }
    }

    fn grant(&self, index: usize) -> Option<Grant> {
        matches!(self.act, Act::Acquire(_)).then(|| Grant {
            ordinal: u8::try_from(index).unwrap_or(u8::MAX),
            policy: self.policy.id,
            bucket: self.charge.bucket,
            cost: self.charge.cost,
        })
    }

    /// How long its holder is told that its permits last.
    fn expires(&self) -> Option<Micros> {
        let (_, span) = self.count.filter(|(kind, _)| *kind == Kind::Permits)?;
        let lasts = self.lasts.filter(|lasts| lasts.is_positive()).unwrap_or(span);
        Some(lent::told(lasts))
    }
}

/// What a lease's token says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    id: LeaseId,
    region: RegionName,
    grants: Vec<Grant>,
}

/// Permits of one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Grant {
    ordinal: u8,
    policy: u32,
    bucket: BucketId,
    cost: Tokens,
}

impl Token {
    fn write(&self) -> String {
        let mut bytes = vec![VERSION];
        bytes.extend(self.id.0);
        bytes.push(u8::try_from(self.region.len()).unwrap_or(0));
        bytes.extend(self.region.bytes().take(255));
        for grant in &self.grants {
            bytes.push(grant.ordinal);
            bytes.extend(grant.policy.to_le_bytes());
            bytes.extend(grant.bucket.0);
            bytes.extend(grant.cost.0.to_le_bytes());
        }
        bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing to a String does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    /// `None`: it is none of ours.
    fn read(text: &str) -> Option<Self> {
        if text.len() > 2 * TOKEN_BYTES_MAX || !text.len().is_multiple_of(2) || !text.is_ascii() {
            return None;
        }
        let digits = text.as_bytes().chunks_exact(2);
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes: Vec<u8> = digits.map(byte).collect::<Option<_>>()?;
        let (&version, rest) = bytes.split_first()?;
        let (id, rest) = rest.split_first_chunk::<16>()?;
        let (&length, rest) = rest.split_first()?;
        let (region, grants) = rest.split_at_checked(length.into())?;
        let grants = grants.chunks(GRANT_BYTES).map(|grant| {
            let (&ordinal, rest) = grant.split_first()?;
            let (policy, rest) = rest.split_first_chunk()?;
            let (bucket, rest) = rest.split_first_chunk()?;
            let cost = Tokens(i64::from_le_bytes(rest.try_into().ok()?));
            let policy = u32::from_le_bytes(*policy);
            cost.is_positive().then_some(Grant { ordinal, policy, bucket: BucketId(*bucket), cost })
        });
        let region = std::str::from_utf8(region).ok()?.into();
        let token = Self { id: LeaseId(*id), region, grants: grants.collect::<Option<_>>()? };
        (version == VERSION && token.grants.len() <= CHARGES_MAX).then_some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_read_as_it_was_written() {
        let grant = Grant { ordinal: 1, policy: 7, bucket: BucketId([9; 16]), cost: Tokens::whole(2) };
        for grants in [vec![], vec![grant.clone()], vec![grant; CHARGES_MAX]] {
            let token = Token { id: LeaseId([3; 16]), region: "us-east".into(), grants };
            let text = token.write();
            assert_eq!(Token::read(&text), Some(token));
            assert_eq!(Token::read(&text[2..]), None);
            assert_eq!(Token::read(&format!("{text}00")), None);
            assert_eq!(Token::read(&text.replacen("01", "02", 1)), None);
        }
        for odd in ["", "0", "zz", "é", "01", &"0".repeat(10_000)] {
            assert_eq!(Token::read(odd), None, "{odd}");
        }
    }
}
