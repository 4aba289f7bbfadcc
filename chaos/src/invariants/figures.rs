//! Figures in sentences for people.

use quorate::quota::amount::{MICROS_PER_TOKEN, Micros, Tokens};

/// `1,234.5`: whole thousands apart, at most three decimals, rounded to the nearest.
#[must_use]
pub fn tokens(amount: Tokens) -> String {
    decimal(amount.0, 3)
}

/// `12.345 s`.
#[must_use]
pub fn seconds(time: Micros) -> String {
    format!("{} s", decimal(time.0, 3))
}

/// `12.345–13 s`.
#[must_use]
pub fn span((from, to): (Micros, Micros)) -> String {
    format!("{}–{}", decimal(from.0, 3), seconds(to))
}

/// `1 request`, `1,000 requests`.
#[must_use]
pub fn count(n: usize, what: &str) -> String {
    let number = thousands(&n.to_string());
    if n == 1 { format!("{number} {what}") } else { format!("{number} {what}s") }
}

/// Millionths with so many decimals (at most 6), rounded to the nearest, with no zeros at the end.
#[must_use]
pub fn decimal(millionths: i64, decimals: u32) -> String {
    let unit = 10_u64.pow(6 - decimals.min(6));
    let rounded = (millionths.unsigned_abs() + unit / 2) / unit * unit;
    let million = MICROS_PER_TOKEN.unsigned_abs();
    let whole = thousands(&(rounded / million).to_string());
    let rest = format!("{:06}", rounded % million);
    let rest = rest.trim_end_matches('0');
    let sign = if millionths < 0 && rounded > 0 { "-" } else { "" };
    if rest.is_empty() { format!("{sign}{whole}") } else { format!("{sign}{whole}.{rest}") }
}

fn thousands(digits: &str) -> String {
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_rounded_and_readable() {
        assert_eq!(tokens(Tokens(1_234_567_890_123)), "1,234,567.89");
        assert_eq!(tokens(Tokens(-999_999)), "-1");
        assert_eq!(tokens(Tokens(-400)), "0");
        assert_eq!(tokens(Tokens::whole(100)), "100");
        assert_eq!(seconds(Micros(12_345_678)), "12.346 s");
        assert_eq!(span((Micros(0), Micros::millis(1_500))), "0–1.5 s");
        assert_eq!(decimal(i64::MIN, 6), "-9,223,372,036,854.775808");
        assert_eq!(
            (count(1, "request"), count(1_000, "request")),
            ("1 request".into(), "1,000 requests".into())
        );
    }
}
