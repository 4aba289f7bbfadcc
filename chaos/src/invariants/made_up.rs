//! Made-up histories, for tests.

pub(crate) use crate::oracle::Edition;
use crate::oracle::{FaultSpan, History, Mode, Outcome, Request, Watched};
pub(crate) use quorate::quota::amount::{Micros, Rate, Tokens};

pub(crate) fn ms(ms: i64) -> Micros {
    Micros::millis(ms)
}

/// So many a second and at once; no reserves.
pub(crate) fn edition(from_ms: i64, mode: Mode, rate: i64, burst: i64) -> Edition {
    Edition {
        from: ms(from_ms),
        mode,
        rate: Rate::per_second(rate),
        burst: Tokens::whole(burst),
        ..Edition::default()
    }
}

/// One limit in so many regions, for 60 s; nobody has asked yet.
pub(crate) fn history_of(regions: usize, editions: Vec<Edition>) -> History {
    History {
        regions: ["us-east", "eu-west", "ap-south"].into_iter().take(regions).map(Into::into).collect(),
        limits: vec![Watched { name: "tenant-requests tenant=42".into(), editions }],
        end: Micros::seconds(60),
        ..History::default()
    }
}

impl History {
    /// A request of one token to the first limit.
    pub(crate) fn ask(&mut self, region: i64, sent: Micros, answered: Micros, outcome: Outcome) {
        let region = usize::try_from(region).unwrap();
        let cost = Tokens::whole(1);
        self.requests.push(Request { region, limit: 0, cost, sent, answered, outcome });
    }

    /// A fault that touches one region.
    pub(crate) fn fault(&mut self, region: usize, from: Micros, to: Micros, what: &str) -> &mut FaultSpan {
        let span = FaultSpan {
            from,
            to: Some(to),
            what: what.into(),
            regions: vec![region],
            disables: false,
            isolates: false,
        };
        self.faults.push(span);
        self.faults.last_mut().unwrap()
    }
}
