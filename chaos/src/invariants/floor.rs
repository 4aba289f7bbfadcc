//! The least that a bucket can hold.

use quorate::quota::amount::{MICROS_PER_SECOND, Micros, Rate, Tokens};

/// The least that a bucket can hold which is refilled at a rate or faster, up to a cap or further, and out of which
/// something was taken *at some moment* between a request's sending and its answer.
///
/// It was empty, or fuller, when it began; it never holds less than nothing. What is taken is missing from the sending on,
/// and the room that it leaves is not refilled before the answer. If there may have been just enough for a request, there
/// may be nothing left after it, until all that was in flight then is answered.
///
/// Calls come in the order of time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Floor {
    rate: Rate,
    cap: Tokens,
    level: Tokens,
    /// What has flowed below one micro-token, in millionths of it.
    rem: i128,
    /// Until when this counts; if that is to come, nothing flows before.
    at: Micros,
    in_flight: Tokens,
    /// When the last of it is taken.
    in_flight_until: Micros,
}

impl Floor {
    /// Gives it another rate and cap.
    pub(super) fn reshape(&mut self, now: Micros, rate: Rate, cap: Tokens) {
        self.advance(now);
        (self.rate, self.cap) = (rate, cap);
        self.clip();
    }

    /// Nobody knows what it holds; from `until` on it fills, and from when all that is in flight has been taken.
    pub(super) fn empty(&mut self, until: Micros) {
        (self.level, self.rem) = (Tokens::ZERO, 0);
        self.at = self.at.max(until).max(self.in_flight_until);
    }

    /// So much is taken between now and `answered`.
    pub(super) fn sent(&mut self, now: Micros, cost: Tokens, answered: Micros) {
        self.advance(now);
        self.in_flight += cost;
        self.in_flight_until = self.in_flight_until.max(answered);
        if self.level < cost {
            self.empty(now);
        } else {
            self.level -= cost;
        }
        self.clip();
    }

    /// It has been taken.
    pub(super) fn answered(&mut self, now: Micros, cost: Tokens) {
        self.advance(now);
        self.in_flight -= cost;
    }

    /// What it holds at least.
    pub(super) fn level(&mut self, now: Micros) -> Tokens {
        self.advance(now);
        self.level
    }

    /// When it will hold so much, if nothing more is taken; `None`: never.
    pub(super) fn holds_at(&self, level: Tokens) -> Option<Micros> {
        Some(self.at + self.rate.time_for(level - self.level)?)
    }

    fn advance(&mut self, now: Micros) {
        if now <= self.at {
            return;
        }
        let flow = i128::from(self.rate.0) * i128::from(now.0 - self.at.0) + self.rem;
        let second = i128::from(MICROS_PER_SECOND);
        self.level += Tokens(i64::try_from(flow / second).unwrap_or(i64::MAX));
        self.rem = flow % second;
        self.at = now;
        self.clip();
    }

    fn clip(&mut self) {
        let room = (self.cap - self.in_flight).or_zero();
        if self.level >= room {
            (self.level, self.rem) = (room, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::made_up::*;
    use super::*;
    use proptest::prelude::*;

    /// A request: when it is sent, how long until it is decided, and from then until it is answered (ms), and its cost.
    type Asked = (i64, i64, i64, i64);

    enum Event {
        Sent(Tokens, Micros),
        /// The real bucket held so much.
        Decided(Tokens),
        Answered(Tokens),
    }

    /// What happens, by time, with a real bucket that is given extra tokens now and then, as by leases.
    fn run_a_bucket(
        asked: &[Asked],
        extra: &[(i64, i64)],
        rate: Rate,
        cap: Tokens,
    ) -> Vec<(Micros, u8, Event)> {
        let decisions = asked.iter().map(|asked| (ms(asked.0 + asked.1), Some(asked)));
        let extras = extra.iter().map(|(at, _)| (ms(*at), None));
        let mut order: Vec<_> = decisions.chain(extras).collect();
        order.sort_unstable();
        let mut extra = extra.to_vec();
        extra.sort_unstable();
        let mut extra = extra.into_iter();
        let (mut level, mut at) = (Tokens::ZERO, ms(0));
        let mut events = Vec::new();
        for (now, asked) in order {
            level = (level + rate.during(now - at)).min(cap.max(level));
            at = now;
            let Some((sent, until, then, cost)) = asked else {
                level += extra.next().map_or(Tokens::ZERO, |(_, n)| Tokens::whole(n));
                continue;
            };
            events.push((now, 1, Event::Decided(level)));
            let cost = Tokens::whole(*cost);
            if level >= cost {
                level -= cost;
                let answered = ms(sent + until + then);
                events.push((ms(*sent), 0, Event::Sent(cost, answered)));
                events.push((answered, 2, Event::Answered(cost)));
            }
        }
        events.sort_by_key(|(at, order, _)| (*at, *order));
        events
    }

    proptest! {
        #[test]
        fn no_bucket_ever_holds_less(
            asked in prop::collection::vec((0_i64..2_000, 0_i64..60, 0_i64..60, 1_i64..5), 1..80),
            extra in prop::collection::vec((0_i64..2_000, 1_i64..20), 0..5),
            rate in 1_i64..100, cap in 1_i64..20,
        ) {
            let (rate, cap) = (Rate::per_second(rate), Tokens::whole(cap));
            let mut floor = Floor::default();
            floor.reshape(ms(0), rate, cap);
            for (now, _, event) in run_a_bucket(&asked, &extra, rate, cap) {
                match event {
                    Event::Sent(cost, answered) => floor.sent(now, cost, answered),
                    Event::Answered(cost) => floor.answered(now, cost),
                    Event::Decided(level) => prop_assert!(floor.level(now) <= level),
                }
            }
        }
    }

    #[test]
    fn without_doubt_it_is_the_bucket() {
        let mut floor = Floor::default();
        floor.reshape(ms(0), Rate::per_second(10), Tokens::whole(5));
        assert_eq!(floor.level(ms(250)), Tokens(2_500_000));
        floor.sent(ms(250), Tokens::whole(2), ms(250));
        floor.answered(ms(250), Tokens::whole(2));
        assert_eq!(floor.level(ms(250)), Tokens(500_000));
        assert_eq!(floor.holds_at(Tokens::whole(1)), Some(ms(300)));
        assert_eq!(floor.level(ms(10_000)), Tokens::whole(5));
        floor.empty(ms(11_000));
        assert_eq!((floor.level(ms(10_500)), floor.level(ms(11_100))), (Tokens(0), Tokens::whole(1)));
    }
}
