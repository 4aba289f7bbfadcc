//! What is read from outside, each kind behind one function that takes any bytes: for the fuzz targets in `fuzz/` (see
//! `docs/threat-model.md`) and for the test that replays what they have found.
//!
//! Not there in the program: it is compiled for tests and for fuzzing alone.
#![allow(clippy::panic, reason = "finding what is wrong is all that these are for")]

use crate::config;
use crate::limiter::Decide;
use crate::quota::amount::{Rate, Tokens};
use crate::quota::matching::{Matcher, Request, RequestFault};
use crate::quota::policy::{Policy, RegionName};
use crate::quota::verdict::{LimitVerdict, Reason, Sight, Verdict};
use crate::server::{grpc, http};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub use crate::raft::fuzz::{log, peer, snapshot};

const POLICIES: &str = include_str!("../config/policies.yaml");

/// A policy file. What is accepted must survive being written and read again.
pub fn policies(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let read = |text: &str| config::policies::parse(Path::new("policies.yaml"), text, Some(&regions()));
    let Ok(policies) = read(text) else { return };
    let written = config::print::policies(&policies);
    match read(&written) {
        Ok(again) => assert_eq!(again, policies, "written as:\n{written}"),
        Err(faults) => panic!("{faults}\nwritten as:\n{written}"),
    }
}

/// A region file.
pub fn region(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = config::region::parse(Path::new("region.yaml"), text, &[]);
}

/// The body of `POST /v1/check`.
pub fn http(data: &[u8]) {
    let status = futures::executor::block_on(http::read_any(data, &AnyLimits)).status().as_u16();
    assert!([200, 400, 429].contains(&status), "{status}");
}

/// The message of `ShouldRateLimit`, with its prefix.
pub fn grpc(data: &[u8]) {
    let _ = futures::executor::block_on(grpc::read_any(data, &AnyLimits));
}

fn regions() -> Vec<RegionName> {
    ["ap-south", "eu-west", "us-east"].map(Into::into).to_vec()
}

/// The policies of an example file.
pub(crate) fn examples(text: &str) -> Vec<Policy> {
    config::policies::parse(Path::new("policies.yaml"), text, Some(&regions())).unwrap_or_default()
}

/// Decides by the example policies; what fits goes by the name of the bucket.
#[derive(Clone)]
struct AnyLimits;

static EXAMPLES: LazyLock<(Vec<Arc<Policy>>, Matcher)> = LazyLock::new(|| {
    let policies: Vec<_> = examples(POLICIES).into_iter().map(Arc::new).collect();
    let matcher = Matcher::new((0..).zip(policies.iter().map(|policy| &**policy)));
    (policies, matcher)
});

impl Decide for AnyLimits {
    async fn check(&self, request: &Request<'_>, _: Option<Duration>) -> Result<Verdict, RequestFault> {
        let (policies, matcher) = &*EXAMPLES;
        let matched = matcher.charges(request)?;
        let judge = |charge: &crate::quota::matching::Charge| {
            let policy = policies.get(usize::try_from(charge.policy()?).ok()?)?;
            let fits = charge.bucket.0[0] < 200;
            let sight =
                Sight { fits, level: Tokens::whole(41), rate: Rate::per_second(1), cap: Tokens::whole(50) };
            let (terms, at) = ((&**policy).into(), charge.descriptor);
            Some(LimitVerdict::seen(terms, at, charge.cost, sight, None, Reason::OverLimit))
        };
        let limits = matched.charges.iter().filter_map(judge).collect();
        let descriptors = request.descriptors();
        Ok(Verdict::new(limits, descriptors, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng as _, SeedableRng as _};

    /// A target: its name and what it runs.
    type Target = (&'static str, fn(&[u8]));

    const TARGETS: [Target; 7] = [
        ("policies", policies),
        ("region", region),
        ("http", http),
        ("grpc", grpc),
        ("peer", peer),
        ("log", log),
        ("snapshot", snapshot),
    ];

    /// What the targets have found, or began from. A panic is the failure; its output names the file.
    #[test]
    fn the_corpus_is_survived() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
        for (name, target) in TARGETS {
            let files =
                std::fs::read_dir(corpus.join(name)).unwrap_or_else(|e| panic!("corpus of {name}: {e}"));
            let mut count = 0;
            for file in files {
                let path = file.unwrap().path();
                println!("{}", path.display());
                target(&std::fs::read(&path).unwrap());
                count += 1;
            }
            assert!(count >= 5, "{name}: {count} files");
        }
    }

    /// Where there is no fuzzer: the corpus with bytes changed, cut out, put in and crossed over, by dice that repeat. `FUZZ_SECONDS=600` is
    /// for how long each target is tried; without it, a few hundred times.
    #[test]
    fn mutations_of_the_corpus_are_survived() {
        let time = std::env::var("FUZZ_SECONDS").ok().map(|s| Duration::from_secs(s.parse().unwrap()));
        for (name, target) in TARGETS {
            let mut dice = StdRng::seed_from_u64(7);
            let corpus = corpus(name);
            let (began, mut tried) = (tokio::time::Instant::now(), 0_u64);
            while time.map_or(tried < 300, |time| began.elapsed() < time) {
                let data = mutated(&corpus, &mut dice);
                if let Err(panic) = std::panic::catch_unwind(|| target(&data)) {
                    eprintln!(
                        "{name}: {}",
                        data.iter().map(|byte| format!("{byte:02x}")).collect::<String>()
                    );
                    std::panic::resume_unwind(panic);
                }
                tried += 1;
            }
            println!("{name}: {tried} inputs in {:?}", began.elapsed());
        }
    }

    fn corpus(name: &str) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
    }

    fn mutated(corpus: &[Vec<u8>], dice: &mut StdRng) -> Vec<u8> {
        let mut data = corpus[dice.random_range(0..corpus.len())].clone();
        for _ in 0..dice.random_range(1..6) {
            let at = dice.random_range(0..=data.len());
            let until = (at + dice.random_range(0..9)).min(data.len());
            match dice.random_range(0..6) {
                0 if at < data.len() => data[at] = dice.random(),
                1 if at < data.len() => data[at] ^= 1 << dice.random_range(0..8),
                2 => drop(data.drain(at..until)),
                3 => drop(
                    data.splice(at..at, [[0, 1, 0x7f, 0x80, 0xff, dice.random()][dice.random_range(0..6)]]),
                ),
                4 => {
                    let piece = data[at..until].to_vec();
                    data.splice(at..at, piece);
                }
                _ => {
                    let other = &corpus[dice.random_range(0..corpus.len())];
                    let from = dice.random_range(0..=other.len());
                    data.truncate(at);
                    data.extend_from_slice(&other[from..]);
                }
            }
        }
        data
    }

    #[test]
    fn the_targets_reach_what_they_are_for() {
        assert_eq!(EXAMPLES.0.len(), 9);
        let good = br#"{"domain":"api","attributes":{"tenant":"7"}}"#;
        let answer = futures::executor::block_on(http::read_any(good, &AnyLimits));
        assert!([200, 429].contains(&answer.status().as_u16()));
    }
}
