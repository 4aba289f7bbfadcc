//! A history as numbers over time, to be drawn.

use crate::invariants::{admitted, whole};
use crate::oracle::{History, Outcome, Sample};
use quorate::quota::amount::{Micros, Rate, Tokens};

/// No chart has more steps than this.
const BINS_MAX: i64 = 240;
/// How long a step may be.
const WIDTHS_MS: [i64; 17] = [
    10, 20, 50, 100, 250, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 900_000, 3_600_000,
    21_600_000, 86_400_000,
];

/// The run, cut into steps of the same length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bins {
    pub(super) width: Micros,
    pub(super) count: usize,
    pub(super) end: Micros,
}

impl Bins {
    pub(super) fn of(history: &History) -> Self {
        let last = history.requests.iter().map(|r| r.answered).max().unwrap_or_default();
        let end = history.end.max(last).max(Micros::millis(100));
        let fits = |ms: &&i64| Micros::millis(**ms).0.saturating_mul(BINS_MAX) >= end.0;
        let width =
            WIDTHS_MS.iter().find(fits).map_or(Micros(end.0 / BINS_MAX + 1), |ms| Micros::millis(*ms));
        let count = usize::try_from((end.0 - 1) / width.0 + 1).unwrap_or(1);
        Self { width, count, end }
    }

    /// Which step this moment is in.
    pub(super) fn at(&self, at: Micros) -> usize {
        usize::try_from(at.0.max(0) / self.width.0).unwrap_or(0).min(self.count - 1)
    }

    /// When a step begins.
    pub(super) fn begin(&self, bin: usize) -> Micros {
        self.width.mul_div(i64::try_from(bin).unwrap_or(i64::MAX), 1)
    }

    fn zeros(&self) -> Vec<f64> {
        vec![0.0; self.count]
    }
}

/// Whole tokens (or tokens a second).
pub(super) fn float(amount: Tokens) -> f64 {
    amount.0 as f64 / 1e6
}

fn float_rate(rate: Rate) -> f64 {
    rate.0 as f64 / 1e6
}

/// Tokens a second that were asked of a limit, by what became of them.
#[derive(Clone, Debug)]
pub(super) struct Traffic {
    /// By region.
    pub(super) admitted: Vec<Vec<f64>>,
    /// By region.
    pub(super) denied: Vec<Vec<f64>>,
    /// 503.
    pub(super) undecided: Vec<f64>,
    pub(super) unanswered: Vec<f64>,
}

impl Traffic {
    pub(super) fn of(history: &History, limit: usize, bins: &Bins) -> Self {
        let regions = vec![bins.zeros(); history.regions.len()];
        let mut traffic = Self {
            admitted: regions.clone(),
            denied: regions,
            undecided: bins.zeros(),
            unanswered: bins.zeros(),
        };
        let seconds = bins.width.0 as f64 / 1e6;
        for request in history.requests.iter().filter(|r| r.limit == limit) {
            let row = match request.outcome {
                Outcome::Allowed => traffic.admitted.get_mut(request.region),
                Outcome::Denied => traffic.denied.get_mut(request.region),
                Outcome::Unavailable => Some(&mut traffic.undecided),
                Outcome::Unknown => Some(&mut traffic.unanswered),
            };
            if let Some(row) = row {
                row[bins.at(request.sent)] += float(request.cost.or_zero()) / seconds;
            }
        }
        traffic
    }
}

/// Of all windows that end in a step, the one that used most of the burst: how much, and how much it may. Where no window
/// ends, what is in use has been running out since.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    pub(super) used: Vec<f64>,
    pub(super) cap: Vec<f64>,
    /// The step in which most was used, against its cap.
    pub(super) peak: Option<usize>,
}

impl Usage {
    pub(super) fn of(history: &History, limit: usize, bins: &Bins) -> Self {
        let watched = &history.limits[limit];
        let mut used: Vec<Option<f64>> = vec![None; bins.count];
        whole(watched).each_closing(&admitted(history, limit, None), |_, window| {
            let window = window();
            if window.cap == Tokens::MAX {
                return;
            }
            let bin = &mut used[bins.at(window.closes)];
            *bin = Some(bin.unwrap_or(0.0).max(float(window.used())));
        });
        let mut running = 0.0;
        let used: Vec<f64> = (0..bins.count)
            .zip(used)
            .map(|(bin, used)| {
                let flow = edition_at(history, limit, bins.begin(bin)).map_or(0.0, |(rate, _)| rate);
                running = used.unwrap_or_else(|| f64::max(running - flow * bins.width.0 as f64 / 1e6, 0.0));
                running
            })
            .collect();
        let cap: Vec<f64> = (0..bins.count)
            .map(|bin| edition_at(history, limit, bins.begin(bin)).map_or(0.0, |(_, cap)| cap))
            .collect();
        let headroom = |bin: &usize| used[*bin] - cap[*bin];
        let peak = (0..bins.count).max_by(|a, b| headroom(a).total_cmp(&headroom(b)));
        Self { peak: peak.filter(|bin| used[*bin] > 0.0), used, cap }
    }
}

/// Rate and cap of a limit at a time; `None`: there is no limit.
pub(super) fn edition_at(history: &History, limit: usize, at: Micros) -> Option<(f64, f64)> {
    let watched = history.limits.get(limit)?;
    let edition = watched.edition_at(at).or(watched.editions.first())?;
    (!edition.is_unlimited()).then(|| (float_rate(edition.rate), float(edition.cap())))
}

/// How a pool was shared out, as the best informed replica saw it.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    pub(super) rate: Share,
    pub(super) burst: Share,
    /// Tokens in the pool.
    pub(super) level: Vec<f64>,
}

/// Rate or burst.
#[derive(Clone, Debug)]
pub(super) struct Share {
    pub(super) reserved: Vec<f64>,
    /// By region.
    pub(super) lent: Vec<Vec<f64>>,
    pub(super) free: Vec<f64>,
    pub(super) whole: Vec<f64>,
}

impl Share {
    fn new(regions: usize, bins: &Bins) -> Self {
        let zeros = bins.zeros();
        Self {
            reserved: zeros.clone(),
            lent: vec![zeros.clone(); regions],
            free: zeros.clone(),
            whole: zeros,
        }
    }

    fn put(&mut self, bin: usize, reserved: f64, lent: impl Iterator<Item = f64>, free: f64, whole: f64) {
        self.reserved[bin] = reserved;
        self.free[bin] = free.max(0.0);
        self.whole[bin] = whole;
        for (row, value) in self.lent.iter_mut().zip(lent) {
            row[bin] = value;
        }
    }
}

impl Shares {
    pub(super) fn of(history: &History, limit: usize, bins: &Bins) -> Option<Self> {
        let mut samples: Vec<&Sample> = history.samples.iter().filter(|s| s.limit == limit).collect();
        samples.sort_by_key(|sample| sample.at);
        let regions = history.regions.len();
        let mut shares =
            Self { rate: Share::new(regions, bins), burst: Share::new(regions, bins), level: bins.zeros() };
        let first = *samples.first()?;
        let mut rest = samples.iter().peekable();
        let mut best = first;
        for bin in 0..bins.count {
            let end = bins.begin(bin + 1);
            while let Some(sample) = rest.next_if(|sample| sample.at < end) {
                if best.by == sample.by || !is_informed(history, best) || is_better(history, sample, best) {
                    best = sample;
                }
            }
            let rates = best.lent.iter().map(|(rate, _)| float_rate(*rate));
            let bursts = best.lent.iter().map(|(_, burst)| float(*burst));
            let (free, whole) = (best.free, best.whole);
            let reserved = best.reserved;
            shares.rate.put(bin, float_rate(reserved.0), rates, float_rate(free.0), float_rate(whole.0));
            shares.burst.put(bin, float(reserved.1), bursts, float(free.1), float(whole.1));
            shares.level[bin] = float(free.2);
        }
        Some(shares)
    }
}

/// Had the replica that said it a quorum?
fn is_informed(history: &History, sample: &Sample) -> bool {
    let at = |f: &&crate::oracle::FaultSpan| f.from <= sample.at && f.to.is_none_or(|to| to >= sample.at);
    let mut faults = history.faults.iter().filter(at);
    !faults.any(|f| (f.isolates || f.disables) && f.regions.contains(&sample.by))
}

/// The lowest region that is informed, for as long as it is: a chart that jumps between replicas shows their lags.
fn is_better(history: &History, sample: &Sample, best: &Sample) -> bool {
    sample.by < best.by && is_informed(history, sample)
}

/// Tokens in each region's bucket, as its store has them; `None`: nobody looked.
pub(super) fn levels(history: &History, limit: usize, bins: &Bins) -> Option<Vec<Vec<f64>>> {
    let mut rows: Vec<Vec<Option<f64>>> = vec![vec![None; bins.count]; history.regions.len()];
    for sample in history.samples.iter().filter(|s| s.limit == limit) {
        if let (Some(level), Some(row)) = (sample.level, rows.get_mut(sample.by)) {
            row[bins.at(sample.at)] = Some(float(level));
        }
    }
    rows.iter().flatten().any(Option::is_some).then(|| {
        let carried = |row: Vec<Option<f64>>| {
            let mut last = row.iter().flatten().next().copied().unwrap_or(0.0);
            row.into_iter()
                .map(|value| {
                    last = value.unwrap_or(last);
                    last
                })
                .collect()
        };
        rows.into_iter().map(carried).collect()
    })
}
