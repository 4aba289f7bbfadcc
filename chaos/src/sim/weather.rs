//! What kind of world a seed has. In half of them everything happens that can, at any time; in the others, one rare kind of history
//! happens often: some rules matter in those alone.

use super::chance::Chance;
use super::faults::Effect;
use super::machine::pass;
use super::{Phase, World};
use quorate::quota::amount::Micros;
use quorate::quota::policy::{Reserve, Share, Unit};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The kind of world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weather {
    /// Faults of every kind.
    Mixed,
    /// Asks arrive a second time, up to [`super::net::LATE`] later.
    Echoes,
    /// A region's asks are soon heard, but it hears of the others seconds later; and its store is slow.
    Deaf,
    /// Leaders stamp by the clock of an earlier leadership of theirs; leadership comes and goes, sometimes after nobody has
    /// had a quorum for seconds.
    Unaware,
    /// In some regions nobody asks for anything for long, while policies change.
    Asleep,
    /// Policies change while decisions are on their way to slow stores.
    Hasty,
    /// Stores are so slow that commands overtake each other.
    Sluggish,
}

impl Weather {
    /// Any.
    pub(super) fn any(chance: &Chance) -> Self {
        match chance.int(0, 11) {
            0..6 => Self::Mixed,
            6 => Self::Echoes,
            7 => Self::Deaf,
            8 => Self::Unaware,
            9 => Self::Asleep,
            10 => Self::Hasty,
            _ => Self::Sluggish,
        }
    }

    /// In words, for the report.
    pub(super) fn about(self) -> &'static str {
        match self {
            Self::Mixed => "faults of every kind",
            Self::Echoes => "asks that arrive once more, long after",
            Self::Deaf => "regions that hear of the others late",
            Self::Unaware => "leaders that stamp by an older term's clock",
            Self::Asleep => "regions where nobody asks for long",
            Self::Hasty => "decisions on their way while policies change",
            Self::Sluggish => "slow stores",
        }
    }

    /// The longest time between two faults of other kinds, in milliseconds.
    pub(super) fn calm(self, chance: &Chance) -> i64 {
        match self {
            Self::Mixed => chance.pick(&[500, 3_000, 8_000]),
            _ => chance.pick(&[3_000, 8_000, 30_000]),
        }
    }

    /// Of a hundred asks so many arrive once more.
    pub(super) fn echoes(self) -> i64 {
        if self == Self::Echoes { 40 } else { 0 }
    }

    /// Of a hundred entries so many are stamped by an older clock.
    pub(super) fn unaware(self) -> i64 {
        if self == Self::Unaware { 30 } else { 0 }
    }

    /// Until when nobody asks for anything in a region, to begin with.
    pub(super) fn asleep_until(self, chance: &Chance) -> Micros {
        match self {
            Self::Asleep if chance.percent(60) => chance.time(Micros::seconds(30), Micros::seconds(200)),
            _ => Micros::ZERO,
        }
    }

    /// The burst of a limit.
    pub(super) fn burst(self, chance: &Chance) -> i64 {
        match self {
            Self::Asleep => chance.pick(&[20, 100, 1_000]),
            _ => chance.pick(&[1, 3, 10, 20, 100, 100, 1_000]),
        }
    }

    /// What of its burst a limit refills in a unit of time, in percent; and the unit.
    pub(super) fn pace(self, chance: &Chance) -> (i64, Unit) {
        match self {
            // What was spent is not soon forgotten: not until a copy comes ...
            Self::Echoes => (chance.pick(&[5, 20, 100, 100, 300, 1_000]), Unit::Minute),
            // ... nor while a change of policies settles.
            Self::Asleep => (chance.pick(&[5, 20, 50]), Unit::Minute),
            // What is free is soon full.
            Self::Hasty => (chance.pick(&[100, 300, 1_000, 3_000]), Unit::Second),
            _ => {
                let percent = chance.pick(&[5, 20, 100, 100, 300, 1_000, 3_000]);
                (percent, chance.pick(&[Unit::Second, Unit::Second, Unit::Second, Unit::Minute]))
            }
        }
    }

    /// The reserve that a change of policies brings, if the weather has a say in it.
    pub(super) fn reserve(self, chance: &Chance) -> Option<Reserve> {
        let (rates, bursts) = match self {
            Self::Asleep => ([0, 10, 20], [5, 80, 100]),
            Self::Hasty => ([0, 20, 100], [0, 10, 100]),
            _ => return None,
        };
        let share = |of: [u32; 3]| Share::percent(chance.pick(&of));
        chance.percent(70).then(|| Reserve { rate: share(rates), burst: share(bursts) })
    }
}

impl World {
    /// Makes the weather.
    pub(super) async fn make_weather(self: Arc<Self>) {
        let longest = match self.weather {
            Weather::Mixed => return,
            Weather::Echoes => Micros::seconds(10),
            Weather::Deaf => Micros::seconds(8),
            Weather::Unaware => Micros::seconds(6),
            Weather::Asleep => Micros::seconds(40),
            Weather::Hasty => Micros::seconds(8),
            Weather::Sluggish => Micros::seconds(3),
        };
        loop {
            pass(self.chance.time(Micros::millis(300), longest)).await;
            if self.phase() != Phase::Faults {
                return;
            }
            let a = self.chance.index(self.regions.len());
            match self.weather {
                Weather::Mixed => {}
                Weather::Echoes => self.fall_asleep(a, Micros::seconds(70)),
                Weather::Deaf if self.chance.percent(40) => self.deafen(a),
                // It gives up what it has, and does not yet know what others have given up.
                Weather::Deaf => self.fall_asleep(a, Micros::seconds(15)),
                Weather::Sluggish if self.chance.percent(50) => {
                    let time = self.chance.time(Micros::seconds(2), Micros::seconds(20));
                    let slow = Micros::millis(self.chance.pick(&[15, 25, 40]));
                    self.slow_store(a, time, slow, self.chance.pick(&[0, 5, 30]));
                }
                Weather::Sluggish => self.fall_asleep(a, Micros::seconds(12)),
                Weather::Unaware => self.lead_in_turn(a).await,
                Weather::Asleep => self.change_policies(a),
                Weather::Hasty => self.change_in_haste(a).await,
            }
        }
    }

    /// Nobody asks for anything there for some time.
    fn fall_asleep(&self, a: usize, longest: Micros) {
        let until = self.time.now() + self.chance.time(Micros::seconds(3), longest);
        self.asleep_until[a].store(until.0, Ordering::Relaxed);
    }

    /// This region hears of the others as late as through a bad satellite link; it is heard as ever.
    fn deafen(self: &Arc<Self>, a: usize) {
        let late = self.chance.time(Micros::millis(1_500), Micros::seconds(6));
        let time = self.chance.time(Micros::seconds(5), Micros::seconds(40));
        let lines: Vec<_> = (0..self.regions.len()).filter(|b| *b != a).map(|b| (b, a)).collect();
        let what = format!("r{a} hears of the others {} ms late", late.0 / 1_000);
        self.change_lines(&lines, time, &what, |line| (line.least, line.most) = (late, late));
        self.slow_store(a, time, Micros::millis(self.chance.pick(&[0, 15, 40])), 0);
    }

    /// Nobody has a quorum for some time, maybe; then this region leads, and soon another.
    async fn lead_in_turn(self: &Arc<Self>, a: usize) {
        if self.chance.percent(40) {
            let time = self.chance.time(Micros::millis(500), Micros::seconds(8));
            for b in 0..self.regions.len() {
                self.cut(&[b], false, time);
            }
            pass(time).await;
        }
        self.logs.stand(a);
        self.note(Micros::ZERO, &[a], Effect::None, format!("r{a} stands for election"));
    }

    /// Policies change; and as soon as the change is committed, all that there is is asked for everywhere, from stores that are so
    /// slow that it is still on its way when the change is known.
    async fn change_in_haste(self: &Arc<Self>, a: usize) {
        for b in 0..self.regions.len() {
            self.slow_store(b, Micros::seconds(4), Micros::millis(400), 0);
        }
        let version = || self.watch.with_pool(quorate::quota::pool::Pool::version);
        let before = version();
        self.change_policies(a);
        for _ in 0..500 {
            pass(Micros::millis(4)).await;
            if version() != before {
                break;
            }
        }
        for b in 0..self.regions.len() {
            self.spend_all(b);
        }
    }
}
