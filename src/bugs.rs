//! Deliberate bugs, so that the simulation can show that it would see them: with feature `sim`, for `quorate-chaos`
//! alone. Without it [`planted`] is the constant `false`, and the compiler drops every one of them.
//!
//! A checker that has never caught anything proves nothing. Each bug is one line at the place where the rule that it breaks is
//! kept; `chaos/README.md` says which seed catches which.

macro_rules! bugs {
    ($($(#[$doc:meta])* $bug:ident = $name:literal,)*) => {
        /// A deliberate bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Bug { $($(#[$doc])* $bug,)* }

        impl Bug {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$bug,)*];

            /// Its name on the command line.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$bug => $name,)* }
            }
        }
    };
}

bugs! {
    /// Clocks are taken to run true: no discount on rates, leases and the Raft clock.
    NoDriftDiscount = "no-drift-discount",
    /// A lease counts at the region from when its record was read, not from before its ask was sent.
    LeaseFromReply = "lease-from-reply",
    /// The pool lends what it has lent already.
    OutstandingNotCounted = "outstanding-not-counted",
    /// Tokens on their way to a region do not count on top of what it holds.
    TransitNotCounted = "transit-not-counted",
    /// A smaller offer counts at once, before the region has said that it has shrunk.
    ShrinkAtOnce = "shrink-at-once",
    /// A slice ends at the pool when the next ask is answered with a shorter lease, though the region may hold on to the older one.
    ShorterLeaseAtOnce = "shorter-lease-at-once",
    /// An entry stamped in an earlier term than its own moves the Raft clock, and is applied.
    StaleStampAccepted = "stale-stamp-accepted",
    /// An entry stamped in an earlier term than its own does not move the Raft clock, but is applied.
    StaleStampOpsApplied = "stale-stamp-ops-applied",
    /// Entries are stamped with the leader's wall clock.
    LeaderWallClock = "leader-wall-clock",
    /// Entries are stamped when they are opened, not when they are closed.
    StampAtBatchOpen = "stamp-at-batch-open",
    /// An ask counts however old its number is.
    NoSeqCheck = "no-seq-check",
    /// Epochs are not looked at: a region whose store has lost its data goes on as if it still had what it borrowed.
    NoEpoch = "no-epoch",
    /// Buckets are full after their store has lost its data.
    FullAfterLoss = "full-after-loss",
    /// After a loss of data the overdraft may be used once more.
    OverdraftForgottenOnLoss = "overdraft-forgotten-on-loss",
    /// A store that went back to an older state is not noticed.
    RollbackUndetected = "rollback-undetected",
    /// A region goes on using what it gives up until it is answered.
    StopAfterSending = "stop-after-sending",
    /// An ask without an answer is forgotten: a late push of the record before it is read, and stored under the forgotten ask's number.
    ForgetUnanswered = "forget-unanswered",
    /// A record that an older ask brought is installed after a newer ask was prepared.
    NoFence = "no-fence",
    /// Tokens of a slice that ran out are taken to be unspent.
    UnspentPresumed = "unspent-presumed",
    /// A record is forgotten as soon as its slice has run out: a late copy of its ask counts again, with all that it gives back.
    TombstoneDroppedEarly = "tombstone-dropped-early",
    /// A region uses a larger reserve as soon as it reads of it.
    RaiseAtOnce = "raise-at-once",
    /// A change of policies settles although not every region has acknowledged it.
    RaiseUnacknowledged = "raise-unacknowledged",
    /// A smaller reserve counts in the pool before its region has acknowledged it.
    ShrinkUnacknowledged = "shrink-unacknowledged",
    /// A region acknowledges policies while decisions under older ones are still on their way to its store.
    AckAtOnce = "ack-at-once",
    /// A daemon that starts again goes by older policies than it has acknowledged, until its log has caught up.
    WordForgotten = "word-forgotten",
    /// The cluster's time of day is that of the clock that is furthest ahead, not that of a majority.
    FirstClockCounts = "first-clock-counts",
    /// Asks about a window that has ended are granted, from books that are new because the old ones were closed.
    EndedWindowAccepted = "ended-window-accepted",
    /// A change of reserves or weights gives some more of a window's quota although others may have spent it.
    QuotaMovedMidWindow = "quota-moved-mid-window",
    /// A permit against a region's slice lasts for its whole `ttl`, whenever the region's lease ends.
    PermitOutlivesLease = "permit-outlives-lease",
    /// Permits of the reserve are given out at once after the store has lost its data.
    ReserveAfterLoss = "reserve-after-loss",
    /// A region gives permits back to the pool that holders have.
    PermitsGivenUpInUse = "permits-given-up-in-use",
    /// Buckets that the store does not hold are full after a change of policies.
    FullAfterPolicyChange = "full-after-policy-change",
    /// What a region has lent of its reserve counts in a later term of the log, too, whose clock it was not measured by.
    LoanOutlivesTerm = "loan-outlives-term",
    /// What is lent of idle reserve backs leases that end later than the loan.
    LoanBacksLongerLease = "loan-backs-longer-lease",
    /// A region goes on using the reserve that it has lent.
    ReserveUsedWhileLent = "reserve-used-while-lent",
    /// A store that has lost its data takes nothing for lent.
    LoansForgottenOnLoss = "loans-forgotten-on-loss",
}

impl std::fmt::Display for Bug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Bug {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = || Self::ALL.iter().map(|bug| bug.name()).collect::<Vec<_>>().join(", ");
        let bug = Self::ALL.iter().find(|bug| bug.name() == name);
        bug.copied().ok_or_else(|| format!("there is no bug `{name}`; there are {}", known()))
    }
}

/// Is this bug planted?
#[cfg(not(feature = "sim"))]
#[inline(always)]
#[must_use]
pub const fn planted(_: Bug) -> bool {
    false
}

#[cfg(feature = "sim")]
pub use planting::{plant, plant_everywhere, planted};

#[cfg(feature = "sim")]
mod planting {
    use super::Bug;
    use std::cell::Cell;
    use std::sync::OnceLock;

    thread_local! {
        static HERE: Cell<Option<Bug>> = const { Cell::new(None) };
    }
    static EVERYWHERE: OnceLock<Bug> = OnceLock::new();

    /// Is this bug planted, on this thread or everywhere?
    #[inline]
    #[must_use]
    pub fn planted(bug: Bug) -> bool {
        HERE.get() == Some(bug) || EVERYWHERE.get() == Some(&bug)
    }

    /// Plants a bug on this thread (in place of the one before), or none.
    pub fn plant(bug: Option<Bug>) {
        HERE.set(bug);
    }

    /// Plants a bug in this process for good.
    ///
    /// # Errors
    /// If another is planted already.
    pub fn plant_everywhere(bug: Bug) -> Result<(), String> {
        let planted = *EVERYWHERE.get_or_init(|| bug);
        if planted == bug { Ok(()) } else { Err(format!("{planted} is planted already")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for bug in Bug::ALL {
            assert_eq!(bug.name().parse(), Ok(*bug));
            assert!(!planted(*bug), "nothing is planted by itself");
        }
        assert!("no-such".parse::<Bug>().is_err_and(|why| why.contains("no-epoch")));
    }
}
