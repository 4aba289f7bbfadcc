//! Sliding windows by two counters, as Cloudflare and Figma describe them: what was admitted in the window before counts by how much
//! of it is younger than a span.
//!
//! Windows are aligned to the store's clock. With `c` counted in the present window, `p` in the one before, and a part `x` of the
//! present one gone, `c + p (1 - x)` counts; it is rounded up, against admission.
//!
//! That is an estimate: it takes what was admitted in the window before to be spread evenly. What holds whatever callers do is
//! the bound of a token bucket with the limit as its burst: at most `N + N T / span` in any time T (so 2 N in a span). Within
//! one window no more than N is admitted, as `c <= N`. Over a turn, from a time where `c0` was counted in the old window to
//! one where a part `x` of the new one is gone, it is `p - c0 + c` with `c <= N - p (1 - x)`, so at most `N + p x`, and `x`
//! spans have passed since the turn; each further window adds N.

use crate::quota::amount::Micros;

/// Parts of a window in which weights are counted. A limit times this, and a span in its units times this, stay below 2^53.
const PARTS: i64 = 1 << 20;
/// Units of time in a span, at most; longer spans have longer units.
const UNITS_MAX: i64 = 1 << 32;

/// One bucket's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Store time at which the present window began.
    start: Micros,
    previous: i64,
    current: i64,
}

impl Counters {
    /// Turns to the window that `now` is in.
    pub(super) fn settle(&mut self, span: Micros, now: Micros) {
        let start = now - Micros(now.0.checked_rem_euclid(span.0).unwrap_or(0));
        if start <= self.start {
            return;
        }
        self.previous = if start == self.start + span { self.current } else { 0 };
        self.current = 0;
        self.start = start;
    }

    /// What the window before still counts for, rounded up.
    pub(super) fn carried(&self, span: Micros, now: Micros) -> i64 {
        let left = span - (now - self.start).or_zero();
        let (unit, units) = units(span);
        let parts = div_up(div_up(left.0, unit).saturating_mul(PARTS), units).min(PARTS);
        div_up(self.previous.saturating_mul(parts), PARTS)
    }

    pub(super) fn current(&self) -> i64 {
        self.current
    }

    pub(super) fn set_current(&mut self, current: i64) {
        self.current = current;
    }

    /// How long until at most `room` counts, if the present window's count is `current`.
    pub(super) fn until_at_most(&self, room: i64, current: i64, span: Micros, now: Micros) -> Micros {
        let turn = self.start + span;
        let at = if current <= room {
            turn - left_for(self.previous, room.saturating_sub(current), span)
        } else {
            turn + span - left_for(current, room, span)
        };
        (at - now).or_zero()
    }

    /// When nothing counts any more; `None`: nothing does.
    pub(super) fn over(&self, span: Micros) -> Option<Micros> {
        match (self.current, self.previous) {
            (1.., _) => Some(self.start + span + span),
            (_, 1..) => Some(self.start + span),
            _ => None,
        }
    }
}

/// The most that may be left of a window so that what the one before has counted weighs at most `room`.
fn left_for(counted: i64, room: i64, span: Micros) -> Micros {
    if counted <= room {
        return span;
    }
    let (unit, units) = units(span);
    let parts = room.saturating_mul(PARTS).checked_div(counted).unwrap_or(0);
    let left = parts.saturating_mul(units).checked_div(PARTS).unwrap_or(0);
    Micros(left.saturating_mul(unit)).min(span)
}

/// The unit of time in which a window of this span is weighed, and how many of them it has (rounded down, so that weights are
/// rounded up).
fn units(span: Micros) -> (i64, i64) {
    let unit = div_up(span.0, UNITS_MAX).max(1);
    (unit, span.0.checked_div(unit).unwrap_or(1).max(1))
}

/// `x / den` of numbers that are not negative, rounded up.
fn div_up(x: i64, den: i64) -> i64 {
    x.saturating_add(den.saturating_sub(1)).checked_div(den).unwrap_or(0)
}
