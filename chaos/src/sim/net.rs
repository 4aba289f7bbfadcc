//! The lines between regions: delay, loss, duplication, reordering, cuts in one direction or both.

use super::chance::Chance;
use quorate::quota::amount::Micros;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One direction between two regions.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// The usual time that a message takes, at least ...
    pub least: Micros,
    /// ... and at most.
    pub most: Micros,
    /// Of a hundred messages so many are lost ...
    pub lost: i64,
    /// ... so many arrive twice ...
    pub doubled: i64,
    /// ... and so many take much longer than usual, up to [`LATE`].
    pub late: i64,
    /// Nothing passes.
    pub cut: bool,
}

/// A message that is late takes up to this: longer than anything in the protocol waits for it.
pub const LATE: Micros = Micros::seconds(70);

impl Line {
    /// A good line with this usual delay.
    #[must_use]
    pub fn good(delay: Micros) -> Self {
        Self { least: delay, most: delay.percent(120), lost: 0, doubled: 0, late: 0, cut: false }
    }
}

/// All lines.
#[derive(Debug)]
pub struct Net {
    chance: Chance,
    regions: usize,
    lines: Mutex<Vec<Line>>,
}

impl Net {
    /// Good lines between so many regions.
    #[must_use]
    pub fn new(chance: Chance, regions: usize, delay: impl Fn(usize, usize) -> Micros) -> Self {
        let pairs = (0..regions).flat_map(|from| (0..regions).map(move |to| (from, to)));
        let lines = pairs.map(|(from, to)| Line::good(delay(from, to))).collect();
        Self { chance, regions, lines: Mutex::new(lines) }
    }

    /// Changes a line.
    pub fn change(&self, from: usize, to: usize, change: impl FnOnce(&mut Line)) {
        if let Some(line) = self.lines().get_mut(from * self.regions + to) {
            change(line);
        }
    }

    /// The line as it is.
    #[must_use]
    pub fn line(&self, from: usize, to: usize) -> Line {
        self.lines()[from * self.regions + to]
    }

    /// What becomes of a message that is sent now: the times after which it arrives (none, once or twice). Messages overtake
    /// each other.
    #[must_use]
    pub fn fate(&self, from: usize, to: usize) -> [Option<Micros>; 2] {
        let line = self.line(from, to);
        if line.cut || self.chance.percent(line.lost) {
            return [None, None];
        }
        let second = self.chance.percent(line.doubled).then(|| self.delay(&line));
        [Some(self.delay(&line)), second]
    }

    fn delay(&self, line: &Line) -> Micros {
        if self.chance.percent(line.late) {
            return self.chance.time(line.most, LATE);
        }
        self.chance.time(line.least, line.most)
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
