//! What is drawn again and again: on a terminal in its place, elsewhere as lines that follow each other.

use super::client;
use crate::server::state::State;
use anyhow::{Context as _, bail};
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How to look.
#[derive(Clone, Copy, Debug)]
pub struct Looks {
    /// So many times; `None`: until interrupted.
    pub count: Option<u64>,
    /// On a terminal, draw over what was there.
    pub redraw: bool,
}

/// Looks at `/v1/state` of the daemon there and prints what `describe` makes of it (of the state, and of its text); returns the
/// last state.
///
/// # Errors
/// If the daemon cannot be reached the first time. Later it is waited for.
pub async fn look(
    at: &client::Place,
    looks: Looks,
    mut describe: impl FnMut(&State, &str) -> String,
) -> anyhow::Result<State> {
    let (http, base) = (at.http()?, at.base()?);
    let (mut state, mut text) = get(&http, &base).await?;
    let mut done = 0_u64;
    loop {
        // Whoever reads may go away: that ends the command, without a fuss.
        if show(&describe(&state, &text), looks.redraw && std::io::stdout().is_terminal(), done == 0).is_err()
        {
            return Ok(state);
        }
        done = done.saturating_add(1);
        if looks.count.is_some_and(|count| done >= count) {
            return Ok(state);
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            _ = tokio::signal::ctrl_c() => return Ok(state),
        }
        match get(&http, &base).await {
            Ok(next) => (state, text) = next,
            Err(error) => eprintln!("quorate: {error:#}"),
        }
    }
}

fn show(text: &str, redraw: bool, first: bool) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    if redraw {
        // Lines are cut at the edge, and what was there before goes line by line: nothing flickers.
        let clear = if first { "\x1b[2J" } else { "" };
        let lines: String = text.lines().map(|line| format!("{line}\x1b[K\r\n")).collect();
        write!(out, "\x1b[?7l{clear}\x1b[H{lines}\x1b[J\x1b[?7h")?;
    } else {
        writeln!(out, "{text}")?;
    }
    out.flush()
}

async fn get(http: &reqwest::Client, base: &str) -> anyhow::Result<(State, String)> {
    let answer = match http.get(format!("{base}/v1/state")).send().await {
        Ok(answer) => answer,
        Err(error) => {
            bail!("no answer from {base}: {}; give --admin a region's admin address", client::why(&error))
        }
    };
    let status = answer.status();
    let text = answer.text().await.with_context(|| format!("the answer of {base} broke off"))?;
    if !status.is_success() {
        bail!("{base} answered {status}: {text}");
    }
    let state = serde_json::from_str(&text).with_context(|| format!("{base} answered what is no state"))?;
    Ok((state, text))
}

/// Callers' text, for a terminal: what could move its cursor, change its colours or turn its lines around is replaced.
#[must_use]
pub fn printable(text: &str) -> String {
    let unsafe_in_terminals = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
    };
    text.chars().map(|c| if unsafe_in_terminals(c) { '\u{fffd}' } else { c }).collect()
}

/// Thousandths of a token a second.
#[must_use]
pub fn rate(milli: u64) -> String {
    match milli {
        0 => "0/s".into(),
        1..1_000 => format!("0.{milli:03}/s"),
        1_000..100_000 => format!("{}.{}/s", milli / 1_000, milli % 1_000 / 100),
        _ => format!("{}/s", milli / 1_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_cannot_write_to_the_terminal() {
        assert_eq!(
            printable("tenant=\x1b[2J\x07evil\u{202e}txt"),
            "tenant=\u{fffd}[2J\u{fffd}evil\u{fffd}txt"
        );
        assert_eq!(printable("tenant=Zoë 42"), "tenant=Zoë 42");
    }

    #[test]
    fn rates_have_digits_where_they_tell() {
        let all = [0, 7, 999, 1_000, 99_960, 100_000, 2_500_000].map(rate);
        assert_eq!(all, ["0/s", "0.007/s", "0.999/s", "1.0/s", "99.9/s", "100/s", "2500/s"]);
    }
}
