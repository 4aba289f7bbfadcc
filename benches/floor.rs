//! The front ends with nothing behind them: what a decision costs before it is one.
//!
//! `cargo bench --bench floor -- [HTTP PORT] [GRPC PORT]` serves an answer that is always the same, until its standard
//! input ends. Put load on it with any client, and read its CPU time from `/proc/PID/stat`.
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

use quorate::quota::amount::{Rate, Tokens};
use quorate::quota::matching::{Request, RequestFault};
use quorate::quota::policy::{Mode, TokenBucket, Unit};
use quorate::quota::verdict::{LimitVerdict, Reason, Sight, Terms, Verdict};
use quorate::server::{self, Decide, Listeners, Options, listen};
use quorate::telemetry::Metrics;
use std::io::Read as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

#[global_allocator]
static ALLOC: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Clone)]
struct Always {
    policy: Arc<str>,
}

impl Decide for Always {
    async fn check(&self, request: &Request<'_>, _: Option<Duration>) -> Result<Verdict, RequestFault> {
        let limit = TokenBucket { amount: 1000, per: Unit::Second, burst: 2000 };
        let terms =
            Terms { policy: &self.policy, mode: Mode::Split, limit: Some(limit.into()), shadow: false };
        let sight =
            Sight { fits: true, level: Tokens::whole(41), rate: Rate::per_second(1000), cap: limit.burst() };
        let descriptors = request.descriptors();
        let limits = (0..descriptors)
            .map(|i| LimitVerdict::seen(terms, i, request.cost, sight, None, Reason::OverLimit));
        Ok(Verdict::new(limits.collect(), descriptors, true))
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let ports: Vec<u16> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let at = |i: usize| SocketAddr::from(([127, 0, 0, 1], ports.get(i).copied().unwrap_or(0)));
    let listeners = Listeners { http: listen::bind(at(0))?, grpc: listen::bind(at(1))? };
    let (_ready, ready) = watch::channel(true);
    let always = Always { policy: "tenant-requests".into() };
    let metrics = Arc::new(Metrics::new("floor"));
    let server =
        server::start(listeners, Options::default(), metrics, ready, move |_| always.clone()).await?;
    println!("pid {} http {} grpc {}", std::process::id(), server.http(), server.grpc());
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    server.drain().await;
    Ok(())
}
