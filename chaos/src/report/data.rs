//! The history inside the page: as JSON, with its requests in columns, which take a third of the room.

use crate::invariants::Judged;
use crate::oracle::{History, Outcome, Request};
use anyhow::{Context, ensure};
use quorate::quota::amount::{Micros, Tokens};
use serde::{Deserialize, Serialize};

/// More than this is thinned out, so that the whole page stays below 3 MB.
const BYTES_MAX: usize = 2_300_000;
/// So many requests where a promise was broken are kept in any case.
const PRECIOUS_MAX: usize = 20_000;
/// What stands before the JSON in a page.
const BEGIN: &str = r#"<script type="application/json" id="history">"#;
/// And after it. (There is no `<` in the JSON.)
const END: &str = "</script>";

/// What is in the page.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Embedded {
    /// All but the requests.
    history: History,
    /// Them.
    requests: Columns,
    /// So many requests there were, and so many samples, if not all are here.
    thinned: Option<(usize, usize)>,
    judged: Vec<Judged>,
}

/// Requests, a column for each of their fields; times in microseconds, costs in millionths of a token.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Columns {
    region: Vec<usize>,
    limit: Vec<usize>,
    cost: Vec<i64>,
    sent: Vec<i64>,
    answered: Vec<i64>,
    /// A letter for each: allowed, denied, unavailable, no answer.
    outcome: String,
}

impl Columns {
    fn of<'a>(requests: impl IntoIterator<Item = &'a Request>) -> Self {
        let mut columns = Self::default();
        for request in requests {
            columns.region.push(request.region);
            columns.limit.push(request.limit);
            columns.cost.push(request.cost.0);
            columns.sent.push(request.sent.0);
            columns.answered.push(request.answered.0);
            columns.outcome.push(letter(request.outcome));
        }
        columns
    }

    fn requests(&self) -> anyhow::Result<Vec<Request>> {
        let n = self.region.len();
        let same = [self.limit.len(), self.cost.len(), self.sent.len(), self.answered.len()];
        ensure!(
            same == [n; 4] && self.outcome.chars().count() == n,
            "the columns of requests are not equally long"
        );
        let request = |(i, letter)| {
            Ok(Request {
                region: self.region[i],
                limit: self.limit[i],
                cost: Tokens(self.cost[i]),
                sent: Micros(self.sent[i]),
                answered: Micros(self.answered[i]),
                outcome: outcome(letter).with_context(|| format!("no outcome is called {letter:?}"))?,
            })
        };
        self.outcome.chars().enumerate().map(request).collect()
    }
}

fn letter(outcome: Outcome) -> char {
    match outcome {
        Outcome::Allowed => 'a',
        Outcome::Denied => 'd',
        Outcome::Unavailable => 'u',
        Outcome::Unknown => 'n',
    }
}

fn outcome(letter: char) -> Option<Outcome> {
    let all = [Outcome::Allowed, Outcome::Denied, Outcome::Unavailable, Outcome::Unknown];
    all.into_iter().find(|outcome| self::letter(*outcome) == letter)
}

/// The script element with the history, and how many of how many requests are in it.
pub(super) fn embed(history: &History, judged: &[Judged]) -> (String, usize) {
    let bare = |every: usize| History {
        requests: Vec::new(),
        samples: history.samples.iter().step_by(every).cloned().collect(),
        ..history.clone()
    };
    let precious: Vec<bool> = history.requests.iter().map(|r| is_in_a_breach(r, judged)).collect();
    let keep_precious = precious.iter().filter(|precious| **precious).count() <= PRECIOUS_MAX;
    let mut every = 1;
    loop {
        let kept: Vec<&Request> = (0..)
            .zip(history.requests.iter().zip(&precious))
            .filter(|(i, (_, precious))| i % every == 0 || (keep_precious && **precious))
            .map(|(_, (request, _))| request)
            .collect();
        let embedded = Embedded {
            history: bare(every),
            requests: Columns::of(kept.iter().copied()),
            thinned: (every > 1).then_some((history.requests.len(), history.samples.len())),
            judged: judged.to_vec(),
        };
        let json = serde_json::to_string(&embedded).unwrap_or_default().replace('<', "\\u003c");
        if json.len() <= BYTES_MAX || every > history.requests.len().max(history.samples.len()) {
            return (format!("{BEGIN}{json}{END}"), kept.len());
        }
        every = every.max(json.len() * every / BYTES_MAX) + 1;
    }
}

fn is_in_a_breach(request: &Request, judged: &[Judged]) -> bool {
    judged.iter().flat_map(|j| j.verdict.breaches()).any(|breach| {
        breach.limit.is_none_or(|limit| limit == request.limit)
            && request.sent <= breach.span.1
            && request.answered >= breach.span.0
    })
}

/// A history: as a run leaves it, out of a page, or as a page gives it away.
pub(super) fn parse(text: &str) -> anyhow::Result<History> {
    let embedded = match text.split_once(BEGIN) {
        Some((_, rest)) => {
            let (json, _) = rest.split_once(END).context("the page is cut off")?;
            serde_json::from_str(json).context("the page's JSON is damaged")?
        }
        None => match serde_json::from_str::<Embedded>(text) {
            Ok(embedded) => embedded,
            Err(_) => return serde_json::from_str(text).context("it is not the JSON of a history"),
        },
    };
    ensure!(
        embedded.thinned.is_none(),
        "the report holds only a part of its run: judge the run's own history instead"
    );
    Ok(History { requests: embedded.requests.requests()?, ..embedded.history })
}
