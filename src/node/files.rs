//! Open files: as many as the system lets this process have, and some of them kept for what is not a caller.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files for everything but callers' connections: peers, admin, the store, the log, what listens. Were all of them taken by
/// callers, the region could not talk to the others.
const OTHERS: u64 = 256;

/// How many callers may be connected at once to each of `listeners`, as far as open files go. Raises the process' limit first,
/// to what it may be raised to: the usual 1,024 are from a time when programs called `select`.
pub fn connections_max(listeners: u64) -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let in_force = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => raised,
        Err(error) => {
            tracing::warn!(%error, "the limit of open files stays as it is");
            limit
        }
    };
    each(in_force.current, listeners)
}

/// `None`: no limit.
fn each(files: Option<u64>, listeners: u64) -> usize {
    let Some(files) = files else { return usize::MAX };
    let callers = files.saturating_sub(OTHERS).max(files / 2) / listeners.max(1);
    usize::try_from(callers).unwrap_or(usize::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_leave_files_for_the_rest() {
        assert_eq!(each(None, 2), usize::MAX);
        assert_eq!(each(Some(1_024), 2), 384);
        assert_eq!(each(Some(20_000), 2), 9_872);
        assert_eq!(each(Some(100), 2), 25, "half of few");
        assert_eq!(each(Some(1), 2), 1);
    }
}
