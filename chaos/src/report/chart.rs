//! Charts: SVG that stretches to any width, with its labels in HTML, so that they stay readable.

use super::page::escape;
use super::series::Bins;
use crate::invariants::figures::decimal;
use quorate::quota::amount::Micros;
use std::fmt::Write;

/// The drawing's own size; it is stretched to the room that there is.
const WIDTH: f64 = 1_000.0;
const HEIGHT: f64 = 100.0;
/// A band that is shorter is drawn this wide, or nobody would see it.
const BAND_MIN: f64 = 1.5;

/// Values over time.
pub(super) struct Chart {
    pub(super) title: String,
    /// What one sees in it.
    pub(super) note: String,
    pub(super) unit: &'static str,
    /// In CSS pixels.
    pub(super) height: u32,
    /// Drawn on top of each other.
    pub(super) stack: Vec<Row>,
    /// Drawn over it.
    pub(super) lines: Vec<Row>,
    /// A point worth naming: step, value, and its name.
    pub(super) mark: Option<(usize, f64, String)>,
}

/// A value for each step.
pub(super) struct Row {
    pub(super) name: String,
    /// CSS class that gives it its colour.
    pub(super) class: String,
    pub(super) values: Vec<f64>,
}

/// A span of time that is marked in all charts.
pub(super) struct Band {
    pub(super) span: (Micros, Micros),
    /// `fault` or `breach`.
    pub(super) class: &'static str,
}

impl Row {
    pub(super) fn new(name: impl Into<String>, class: impl Into<String>, values: Vec<f64>) -> Self {
        Self { name: name.into(), class: class.into(), values }
    }

    fn is_empty(&self) -> bool {
        self.values.iter().all(|value| *value == 0.0)
    }
}

impl Chart {
    pub(super) fn html(&self, bins: &Bins, bands: &[Band]) -> String {
        let (top, step) = ticks(self.top());
        let mut out = String::new();
        let _ = write!(
            out,
            "<figure class=chart><figcaption><b>{}</b> <span class=unit>{}</span><p>{}</p></figcaption>",
            escape(&self.title),
            escape(self.unit),
            escape(&self.note)
        );
        let _ = write!(out, "<div class=plot style=\"height:{}px\">", self.height);
        out.push_str(&self.svg(bins, bands, top));
        let mut tick = 0.0;
        while tick <= top * 1.000_001 {
            let _ =
                write!(out, "<i class=y style=\"bottom:{:.2}%\">{}</i>", tick / top * 100.0, number(tick));
            tick += step;
        }
        if let Some((bin, value, name)) = &self.mark {
            let (x, y) = (middle(bins, *bin) / WIDTH * 100.0, (value / top * 100.0).min(100.0));
            let side = if x > 50.0 { "left" } else { "right" };
            let _ = write!(
                out,
                "<b class=mark style=\"left:{x:.2}%;bottom:{y:.2}%\"><span class={side}>{}</span></b>",
                escape(name)
            );
        }
        let _ = write!(out, "</div>{}{}", time_axis(bins.end), self.legend());
        let _ = write!(
            out,
            "<script type=\"application/json\" class=values>{}</script></figure>",
            self.values(bins)
        );
        out
    }

    fn top(&self) -> f64 {
        let bins = self.stack.iter().chain(&self.lines).map(|row| row.values.len()).max().unwrap_or(0);
        let stacked =
            (0..bins).map(|bin| self.stack.iter().filter_map(|row| row.values.get(bin)).sum::<f64>());
        let lines = self.lines.iter().flat_map(|row| row.values.iter().copied());
        stacked.chain(lines).fold(0.0, f64::max) * 1.05
    }

    fn svg(&self, bins: &Bins, bands: &[Band], top: f64) -> String {
        let mut out = String::new();
        let _ = write!(
            out,
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=none role=img aria-label=\"{}\">",
            escape(&self.title)
        );
        // Behind the values, whose colours say whose they are.
        bands.iter().for_each(|band| out.push_str(&band.svg(bins.end, band.class, HEIGHT)));
        let mut base = vec![0.0; bins.count];
        for row in &self.stack {
            let over: Vec<f64> = base.iter().zip(&row.values).map(|(base, value)| base + value).collect();
            if !row.is_empty() {
                let area = area(bins, &base, &over, top);
                let _ = write!(out, "<path class=\"area {}\" d=\"{area}\"/>", row.class);
            }
            base = over;
        }
        for row in &self.lines {
            let _ = write!(
                out,
                "<path class=\"line {}\" d=\"{}\"/>",
                row.class,
                steps(bins, &row.values, top, 'M')
            );
        }
        let breaches = bands.iter().filter(|band| band.class == "breach");
        breaches.for_each(|band| out.push_str(&band.svg(bins.end, "breach top", 3.0)));
        out.push_str("</svg>");
        out
    }

    fn legend(&self) -> String {
        let mut out = String::from("<ul class=legend>");
        for (kind, rows) in [("area", &self.stack), ("line", &self.lines)] {
            for row in rows.iter().filter(|row| !row.is_empty() || !row.class.starts_with("no-")) {
                let (class, name) = (&row.class, escape(&row.name));
                let _ = write!(out, "<li><i class=\"key {kind} {class}\"></i>{name}</li>");
            }
        }
        out.push_str("</ul>");
        out
    }

    /// For those who point at a moment.
    fn values(&self, bins: &Bins) -> String {
        let rows = self.lines.iter().chain(self.stack.iter().rev());
        let round = |value: &f64| (value * 1_000.0).round() / 1_000.0;
        let rows: Vec<_> = rows
            .map(|row| (&row.name, &row.class, row.values.iter().map(round).collect::<Vec<_>>()))
            .collect();
        let step = bins.width.0 as f64 / 1e6;
        let end = bins.end.0 as f64 / 1e6;
        let json = serde_json::json!({ "step": step, "end": end, "unit": self.unit, "rows": rows });
        json.to_string().replace('<', "\\u003c")
    }
}

impl Band {
    fn svg(&self, end: Micros, class: &str, height: f64) -> String {
        let (from, to) = (x(self.span.0, end), x(self.span.1, end));
        let (x, width) = (from.min(WIDTH - BAND_MIN), (to - from).max(BAND_MIN));
        format!("<rect class=\"{class}\" x={x:.2} y=0 width={width:.2} height={height} />")
    }
}

/// The time below a chart.
pub(super) fn time_axis(end: Micros) -> String {
    let seconds = end.0 as f64 / 1e6;
    let (unit, length) = match seconds {
        s if s < 600.0 => ("s", 1.0),
        s if s < 36_000.0 => ("min", 60.0),
        _ => ("h", 3_600.0),
    };
    let step = nice(seconds / length / 8.0);
    let mut out = String::from("<div class=x>");
    let mut tick = 0.0;
    for i in 0.. {
        let left = tick * length / seconds * 100.0;
        if left > 97.0 {
            break;
        }
        let odd = if i % 2 == 1 { " class=odd" } else { "" };
        let _ = write!(out, "<i{odd} style=\"left:{left:.2}%\">{} {unit}</i>", number(tick));
        tick += step;
    }
    out.push_str("</div>");
    out
}

/// Where a moment is, in percent of the width.
pub(super) fn percent(at: Micros, end: Micros) -> f64 {
    x(at, end) / WIDTH * 100.0
}

fn x(at: Micros, end: Micros) -> f64 {
    (at.0.max(0) as f64 / end.0.max(1) as f64).min(1.0) * WIDTH
}

fn y(value: f64, top: f64) -> f64 {
    HEIGHT - (value / top).clamp(0.0, 1.0) * HEIGHT
}

fn middle(bins: &Bins, bin: usize) -> f64 {
    f64::midpoint(x(bins.begin(bin), bins.end), x(bins.begin(bin + 1), bins.end))
}

/// There over the values, and back under them.
fn area(bins: &Bins, under: &[f64], over: &[f64], top: f64) -> String {
    let mut out = steps(bins, over, top, 'M');
    let _ = write!(out, "V{:.2}", y(under[bins.count - 1], top));
    for bin in (0..bins.count).rev() {
        if bin + 1 == bins.count || under[bin] != under[bin + 1] {
            let _ = write!(out, "V{:.2}", y(under[bin], top));
        }
        if bin == 0 || under[bin - 1] != under[bin] {
            let _ = write!(out, "H{:.1}", x(bins.begin(bin), bins.end));
        }
    }
    out.push('Z');
    out
}

fn steps(bins: &Bins, values: &[f64], top: f64, first: char) -> String {
    let mut out = String::new();
    for (bin, value) in values.iter().enumerate() {
        if bin == 0 {
            let _ = write!(out, "{first}0 {:.2}", y(*value, top));
        } else if values[bin - 1] != *value {
            let _ = write!(out, "V{:.2}", y(*value, top));
        }
        if values.get(bin + 1) != Some(value) {
            let _ = write!(out, "H{:.1}", x(bins.begin(bin + 1), bins.end));
        }
    }
    out
}

/// The top of a scale that holds this value, and the distance of its ticks.
fn ticks(most: f64) -> (f64, f64) {
    let step = nice(most / 4.0);
    ((most / step).ceil().max(1.0) * step, step)
}

/// 1, 2 or 5 times a power of ten, no less than this.
fn nice(least: f64) -> f64 {
    if !(least.is_finite() && least > 1e-6) {
        return 1.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    let fits = [1.0, 2.0, 5.0].into_iter().find(|n| n * power >= least * 0.999_999);
    fits.unwrap_or(10.0) * power
}

fn number(value: f64) -> String {
    decimal((value * 1e6).round() as i64, 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_round() {
        assert_eq!(ticks(0.0), (1.0, 1.0));
        assert_eq!(ticks(97.0), (100.0, 50.0));
        assert_eq!(ticks(105.0), (150.0, 50.0));
        assert_eq!(ticks(8.1), (10.0, 5.0));
        assert_eq!(nice(0.2), 0.2);
    }

    #[test]
    fn equal_steps_are_one_stroke() {
        let bins = Bins { width: Micros::seconds(1), count: 4, end: Micros::seconds(4) };
        assert_eq!(
            steps(&bins, &[0.0, 0.0, 5.0, 10.0], 10.0, 'M'),
            "M0 100.00H500.0V50.00H750.0V0.00H1000.0"
        );
        let area = area(&bins, &[0.0; 4], &[10.0; 4], 10.0);
        assert_eq!(area, "M0 0.00H1000.0V100.00V100.00H0.0Z");
    }
}
