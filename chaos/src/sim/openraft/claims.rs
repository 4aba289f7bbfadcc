//! Proposals that can be told from each other, and what their proposers were told of them.

use quorate::quota::pool::{Entry, Join, Op, RegionId};
use quorate::raft::ProposeError;
use std::collections::BTreeMap;

/// What was proposed and what was applied.
#[derive(Debug, Default)]
pub struct Claims {
    next: u64,
    all: BTreeMap<u64, Claim>,
}

#[derive(Debug, Default)]
struct Claim {
    /// `None`: nothing yet, or nothing ever, as the proposer's daemon is gone.
    told: Option<Result<(), ProposeError>>,
    /// It was applied, and had its effect.
    done: bool,
    /// It was applied, and had none, as its stamp was of another term.
    refused: bool,
}

/// How many proposals ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// Applied, and told so.
    pub done: u64,
    /// Told that it was not sent.
    pub not_sent: u64,
    /// Told that nobody knows, or nothing ...
    pub unknown: u64,
    /// ... and applied all the same.
    pub unknown_applied: u64,
    /// Told that it had no effect, for its stamp.
    pub refused: u64,
}

impl Claims {
    /// The next proposal, and its number. It does nothing: no region ever had this epoch.
    pub fn next(&mut self) -> (u64, Op) {
        self.next += 1;
        let nonce = self.next;
        self.all.insert(nonce, Claim::default());
        (nonce, Op::Join(Join { region: RegionId(0), previous: u64::MAX, nonce }))
    }

    /// Its proposer was told this.
    ///
    /// # Errors
    /// If it is not true.
    pub fn told(&mut self, nonce: u64, outcome: Result<(), ProposeError>) -> Result<(), String> {
        let claim = self.all.entry(nonce).or_default();
        claim.told = Some(outcome);
        claim.check(nonce)
    }

    /// An entry was applied (once, wherever it was first).
    ///
    /// # Errors
    /// If a proposer was told otherwise.
    pub fn applied(&mut self, term: u64, entry: &Entry) -> Result<(), String> {
        for op in &entry.ops {
            let Op::Join(Join { previous: u64::MAX, nonce, .. }) = op else { continue };
            let Some(claim) = self.all.get_mut(nonce) else { continue };
            let done = entry.stamp.term == term;
            claim.done |= done;
            claim.refused |= !done;
            claim.check(*nonce)?;
        }
        Ok(())
    }

    /// How they ended.
    #[must_use]
    pub fn ends(&self) -> Ends {
        let mut ends = Ends::default();
        for claim in self.all.values() {
            match claim.told {
                Some(Ok(())) => ends.done += 1,
                Some(Err(
                    ProposeError::NotSent { .. } | ProposeError::TooLarge | ProposeError::TooNew { .. },
                )) => ends.not_sent += 1,
                Some(Err(ProposeError::Refused)) => ends.refused += 1,
                Some(Err(ProposeError::Unknown)) | None => {
                    ends.unknown += 1;
                    ends.unknown_applied += u64::from(claim.done);
                }
            }
        }
        ends
    }
}

impl Claim {
    fn check(&self, nonce: u64) -> Result<(), String> {
        let holds = match self.told {
            // The leader answers when it has applied it.
            Some(Ok(())) => self.done,
            Some(Err(
                ProposeError::NotSent { .. } | ProposeError::TooLarge | ProposeError::TooNew { .. },
            )) => !self.done && !self.refused,
            Some(Err(ProposeError::Refused)) => self.refused && !self.done,
            Some(Err(ProposeError::Unknown)) | None => true,
        };
        if holds { Ok(()) } else { Err(format!("R3: what became of proposal {nonce}: {self:?}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quorate::quota::amount::Micros;
    use quorate::quota::pool::Stamp;

    fn entry(term: u64, op: Op) -> Entry {
        Entry { stamp: Stamp { term, tau: Micros::ZERO }, ops: vec![op] }
    }

    #[test]
    fn lies_are_found() {
        let not_sent = Err(ProposeError::NotSent { retry: true });
        let mut claims = Claims::default();
        let (early, _) = claims.next();
        assert!(claims.told(early, Ok(())).is_err(), "done, and never applied");
        let (lost, op) = claims.next();
        assert_eq!(claims.told(lost, not_sent), Ok(()));
        assert!(claims.applied(3, &entry(3, op)).is_err(), "applied, though it was not sent");
        let (late, op) = claims.next();
        assert_eq!(claims.applied(3, &entry(3, op)), Ok(()));
        assert!(claims.told(late, not_sent).is_err());
        let (stale, op) = claims.next();
        assert_eq!(claims.applied(4, &entry(3, op)), Ok(()));
        assert_eq!(claims.told(stale, Err(ProposeError::Refused)), Ok(()));
        assert!(claims.told(stale, Ok(())).is_err(), "it had no effect");
        let (unknown, op) = claims.next();
        assert_eq!(claims.told(unknown, Err(ProposeError::Unknown)), Ok(()));
        assert_eq!(claims.applied(3, &entry(3, op)), Ok(()));
        assert_eq!(claims.ends().unknown_applied, 1);
    }
}
