//! The time of day that a region goes by, and so which window of a quota a request is in.
//!
//! What the cluster agrees on ([`Pool::wall`](crate::quota::pool::Pool::wall)) comes in entries of the log, late by a trip between
//! regions; the region's own clock is finer, but may be wrong. So it is the own clock, as far as that is no more than half a
//! second off what the cluster's clock reads by now, and it never goes back. A region that is cut off turns its windows by
//! itself: what the cluster agreed on last, carried on by the daemon's monotonic clock.

use crate::clock;
use crate::quota::amount::Micros;
use crate::quota::bucket::Unseen;
use crate::quota::calendar::Turn;
use crate::quota::policy::Window;
use arc_swap::ArcSwapOption;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// How far the region's own clock may be off what the cluster agrees on.
const SLACK: Micros = Micros::millis(500);
/// What is agreed is looked at anew when it is off by more than this: a window's beginning by the monotonic clock is the same for
/// requests that come together, so that they can share a call to the store.
const STEP: Micros = Micros::millis(50);

/// What a daemon that has just started hears first of the cluster may be so much older than what it knew in its last life.
const BEFORE: Micros = Micros::seconds(60);

/// Before any store's clock began.
const LONG_AGO: Micros = Micros(i64::MIN / 2);

/// The time of day.
#[derive(Debug, Default)]
pub struct TimeOfDay {
    /// The newest that was agreed on: the store was told of windows by it ...
    agreed: ArcSwapOption<Anchor>,
    /// ... and it still counts.
    is_known: AtomicBool,
    last: AtomicI64,
    /// How far it has ever been ahead of what was agreed later (a fast clock in a long partition).
    early: AtomicI64,
    /// By how much what is agreed has ever fallen behind what it was before (Raft time loses what passes without a leader) ...
    fallen: AtomicI64,
    /// ... and what time it was when it did so last: windows that begin later know nothing of it.
    fell_at: AtomicI64,
}

/// What the cluster agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anchor {
    /// The time of day, in microseconds since 1970-01-01T00:00:00Z ...
    pub wall: Micros,
    /// ... and what it would be if it had never stood still ([`Pool::wall_run`](crate::quota::pool::Pool::wall_run)) ...
    pub run: Micros,
    /// ... when the daemon's monotonic clock read this.
    pub mono: Micros,
}

impl Anchor {
    fn at(&self, mono: Micros) -> Micros {
        self.wall + (mono - self.mono)
    }

    /// Does `new` say much the same?
    fn is_near(&self, new: &Self) -> bool {
        let off = self.at(new.mono) - new.wall;
        let run = (self.run - self.wall) - (new.run - new.wall);
        off.0.saturating_abs() < STEP.0 && run.0.saturating_abs() < STEP.0
    }
}

/// The window that a request is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// When it began and ends.
    pub turn: Turn,
    /// The time of day.
    pub now: Micros,
    /// What its bucket is that the store does not hold.
    pub unseen: Unseen,
}

impl TimeOfDay {
    /// The cluster agrees on this; `None`: nobody knows what it agrees on.
    pub fn agree(&self, anchor: Option<Anchor>) {
        if let Some(new) = anchor {
            self.heard(new);
        }
        self.is_known.store(anchor.is_some(), Ordering::Release);
    }

    fn heard(&self, new: Anchor) {
        let last = self.last.load(Ordering::Relaxed);
        self.early.fetch_max(last.saturating_sub(new.run.0), Ordering::Relaxed);
        match self.agreed.load().as_deref() {
            None => {
                self.fell_at.store((new.wall + SLACK).0, Ordering::Relaxed);
                self.fallen.store(BEFORE.0, Ordering::Relaxed);
            }
            Some(old) if old.is_near(&new) => return,
            Some(old) => {
                let fallen = old.run + (new.mono - old.mono) - new.run;
                if fallen > STEP {
                    self.fell_at.store(last, Ordering::Relaxed);
                    self.fallen.fetch_add(fallen.0, Ordering::Relaxed);
                }
            }
        }
        self.agreed.store(Some(Arc::new(new)));
    }

    fn anchor(&self) -> Option<Anchor> {
        let known = self.is_known.load(Ordering::Acquire);
        if known { self.agreed.load().as_deref().copied() } else { None }
    }

    /// What time is it, in microseconds since 1970-01-01T00:00:00Z? `None`: nobody knows yet.
    #[must_use]
    pub fn now(&self) -> Option<Micros> {
        let by_now = self.anchor()?.at(clock::now());
        let now = clock::wall().max(by_now - SLACK).min(by_now + SLACK);
        Some(Micros(self.last.fetch_max(now.0, Ordering::Relaxed)).max(now))
    }

    /// The window that it is now.
    #[must_use]
    pub fn present(&self, window: Window) -> Option<Present> {
        let now = self.now()?;
        let turn = window.turn_at(now);
        Some(Present { turn, now, unseen: self.unseen(turn)? })
    }

    /// What a bucket of this window is that the store does not hold.
    #[must_use]
    pub fn unseen(&self, turn: Turn) -> Option<Unseen> {
        let Anchor { run, mono, .. } = self.anchor()?;
        let by_mono = |time: Micros| time - run + mono;
        // The region may have entered it by so much sooner than is agreed now: it is rather taken for empty than for full.
        let early = Micros(self.early.load(Ordering::Relaxed)).max(SLACK) + SLACK;
        // The store keeps it for longer than clocks can drift apart in it.
        let (start, end) =
            (by_mono(turn.start) - early, by_mono(turn.end) + SLACK + turn.length().mul_div(1, 32));
        let fell = turn.start.0 <= self.fell_at.load(Ordering::Relaxed);
        // What the store was told before.
        let forgotten = end - if fell { Micros(self.fallen.load(Ordering::Relaxed)) } else { Micros::ZERO };
        if forgotten <= clock::now() {
            // The time of day stands still, and the store may have forgotten what was spent of it already.
            return Some(Unseen::of_window(Turn { start: LONG_AGO, end }));
        }
        Some(Unseen::of_window(Turn { start, end }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(wall: Micros) -> Option<Anchor> {
        Some(Anchor { wall, run: wall, mono: clock::now() })
    }

    #[test]
    fn the_own_clock_counts_as_far_as_the_cluster_agrees() {
        let day = TimeOfDay::default();
        assert_eq!((day.now(), day.present(Window::Length { seconds: 60 })), (None, None));
        let own = clock::wall();
        day.agree(at(own + Micros::millis(300)));
        assert!(day.now().is_some_and(|now| now - own < Micros::millis(300)), "a little off: its own");
        day.agree(at(own + Micros::seconds(7_200)));
        let now = day.now().unwrap();
        let expected = own + Micros::seconds(7_200) - SLACK;
        assert!(now >= expected && now < expected + Micros::seconds(5), "it is two hours late itself");
        day.agree(at(own));
        assert!(day.now().unwrap() >= now, "never back");
        let turn = Window::Length { seconds: 60 }.turn_at(now);
        let began = day.unseen(turn).unwrap().at;
        let by_now = clock::now() - (clock::wall() - turn.start);
        assert!(
            by_now - began > Micros::seconds(7_190),
            "it has been in that window for two hours too early"
        );
        day.agree(None);
        assert_eq!(day.now(), None);
    }

    #[test]
    fn a_window_that_lasts_longer_than_it_is_long_is_not_full_again() {
        let day = TimeOfDay::default();
        let (wall, mono) = (clock::wall(), clock::now());
        let turn = Window::Length { seconds: 60 }.turn_at(wall);
        let waited = |seconds| Some(Anchor { wall, run: wall + Micros::seconds(seconds), mono });
        day.agree(waited(20));
        let began = day.unseen(turn).unwrap().at;
        assert!(mono - began >= wall - turn.start + Micros::seconds(20), "it has stood still for 20 s in it");
        day.agree(waited(61));
        assert!(day.unseen(turn).unwrap().at < Micros(i64::MIN / 4), "and may be forgotten by the store");
    }

    #[test]
    fn time_that_raft_loses_makes_no_bucket_full_again() {
        let day = TimeOfDay::default();
        let (ten, mono) = (Micros::seconds(10), clock::now());
        let turn = Window::Length { seconds: 60 }.turn_at(clock::wall());
        // Ten seconds ago it had five to go ...
        let wall = turn.end - Micros::seconds(5);
        day.agree(Some(Anchor { wall, run: wall, mono: mono - ten }));
        assert!(day.now().is_some_and(|now| now > turn.end));
        day.agree(None);
        assert_eq!(day.unseen(turn), None);
        // ... and after an election that cost ten, it has five to go.
        day.agree(Some(Anchor { wall, run: wall, mono }));
        assert_eq!(day.unseen(turn).unwrap().at, LONG_AGO, "the store may have forgotten it");
        let later = Turn { start: turn.end + turn.length(), end: turn.end + turn.length() + turn.length() };
        assert!(day.unseen(later).unwrap().at > LONG_AGO, "a window that begins later is not concerned");
    }

    #[test]
    fn requests_that_come_together_agree_on_the_window() {
        let day = TimeOfDay::default();
        day.agree(at(clock::wall()));
        let window = Window::Calendar(crate::quota::policy::Unit::Year);
        let first = day.present(window).unwrap();
        let Unseen { level: end, at: start } = first.unseen;
        let kept = first.turn.length().mul_div(1, 32);
        assert_eq!(Micros(end.0) - start, first.turn.length() + kept + SLACK + SLACK + SLACK);
        for drift in 0..20 {
            let wall = clock::wall() + Micros::millis(drift);
            let drifted = Anchor { wall, run: wall, mono: clock::now() };
            day.agree(Some(drifted));
            assert_eq!(day.present(window).unwrap().unseen, first.unseen);
        }
    }
}
