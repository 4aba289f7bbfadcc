//! How much of callers' bodies may be half read.
//!
//! Nearly all bodies arrive in one piece and are gone a moment later. The others are kept until they are complete, for as long as
//! a request may take; many connections with many streams each could fill a machine's memory with them. So all of this process'
//! half-read bodies together have a largest size.

use std::sync::atomic::{AtomicUsize, Ordering};

/// All half-read bodies together, in bytes.
pub const HALF_READ_MAX: usize = 256 * 1024 * 1024;

static HALF_READ: Total = Total::new(HALF_READ_MAX);

/// What one body has taken of it; given back when this is dropped.
#[derive(Debug)]
pub struct Share {
    total: &'static Total,
    bytes: usize,
}

impl Share {
    /// Of a body of which nothing has been kept yet.
    #[must_use]
    pub const fn none() -> Self {
        Self { total: &HALF_READ, bytes: 0 }
    }

    /// So many more bytes are kept; false: there is no room for them.
    #[must_use]
    pub fn grow(&mut self, bytes: usize) -> bool {
        let room = self.total.take(bytes);
        if room {
            self.bytes = self.bytes.saturating_add(bytes);
        }
        room
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.total.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Total {
    max: usize,
    used: AtomicUsize,
}

impl Total {
    const fn new(max: usize) -> Self {
        Self { max, used: AtomicUsize::new(0) }
    }

    fn take(&self, bytes: usize) -> bool {
        let more = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.max);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_is_given_back() {
        static SMALL: Total = Total::new(100);
        let share = || Share { total: &SMALL, bytes: 0 };
        let (mut one, mut other) = (share(), share());
        assert!(one.grow(60) && !other.grow(41) && other.grow(40) && !one.grow(1));
        drop(other);
        assert!(one.grow(40) && !share().grow(1));
        drop(one);
        assert_eq!(SMALL.used.load(Ordering::Relaxed), 0);
    }
}
