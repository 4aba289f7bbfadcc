//! How many keys and how much memory are this region's: an estimate from a few random keys, so that it costs the same however
//! many there are. (KEYS, or a SCAN to the end, would keep Redis from its work.)

use super::fault::{Fault, classify};
use super::wire::Keys;
use crate::telemetry::metrics::StoreMetrics;
use bytes::Bytes;
use fred::clients::Client;
use fred::interfaces::ClientLike;
use fred::types::{CustomCommand, Value};
use futures::future::try_join_all;
use std::time::Duration;
use tokio::time::timeout;

/// Keys that are looked at.
const KEYS: usize = 32;
/// How long all of it may take; it waits behind what requests send.
const WITHIN: Duration = Duration::from_secs(1);

/// Takes a sample of each server, and shows what they say together.
pub(super) async fn take(clients: &[Client], keys: &Keys, metrics: &StoreMetrics) -> Result<(), Fault> {
    let late = |_| Fault::Unknown(format!("no answer within {WITHIN:?}"));
    let looks = try_join_all(clients.iter().map(|client| look(client, keys)));
    let looked = timeout(WITHIN, looks).await.map_err(late)?;
    let shown = looked.as_ref().ok();
    let sum = |of: fn(&Sample) -> Option<f64>| shown.and_then(|all| all.iter().map(of).sum::<Option<f64>>());
    metrics.keys.set(sum(|sample| Some(sample.keys())));
    metrics.memory.set(sum(|sample| Some(sample.bytes())));
    metrics.redis_keys.set(sum(|sample| Some(sample.all as f64)));
    metrics.redis_memory.set(sum(|sample| sample.server.used));
    metrics.redis_memory_max.set(sum(|sample| sample.server.max));
    metrics.redis_evicted.set(sum(|sample| sample.server.evicted));
    looked.map(drop)
}

/// What was found.
#[derive(Debug, Default, PartialEq)]
struct Sample {
    /// Keys in the database.
    all: u64,
    /// Keys that were looked at.
    looked_at: usize,
    /// What those of them take that are this region's, in bytes.
    ours: Vec<u64>,
    server: Server,
}

/// What the server says of itself.
#[derive(Debug, Default, PartialEq)]
struct Server {
    used: Option<f64>,
    max: Option<f64>,
    evicted: Option<f64>,
}

impl Sample {
    fn keys(&self) -> f64 {
        if self.looked_at == 0 {
            0.0
        } else {
            self.all as f64 * self.ours.len() as f64 / self.looked_at as f64
        }
    }

    fn bytes(&self) -> f64 {
        let sum: f64 = self.ours.iter().map(|bytes| *bytes as f64).sum();
        if self.ours.is_empty() { 0.0 } else { self.keys() * sum / self.ours.len() as f64 }
    }
}

impl Server {
    fn parse(info: &str) -> Self {
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|value| value.trim_end().parse().ok())
        };
        Self { used: field("used_memory"), max: field("maxmemory"), evicted: field("evicted_keys") }
    }
}

async fn look(client: &Client, keys: &Keys) -> Result<Sample, Fault> {
    let info: String = ask(client, "INFO", vec![]).await?;
    let all: u64 = ask(client, "DBSIZE", vec![]).await?;
    let server = Server::parse(&info);
    if all == 0 {
        return Ok(Sample { server, ..Sample::default() });
    }
    // They travel together.
    let random = (0..KEYS).map(|_| ask::<Option<Bytes>>(client, "RANDOMKEY", vec![]));
    let found: Vec<Bytes> = try_join_all(random).await?.into_iter().flatten().collect();
    let looked_at = found.len();
    let ours = found.into_iter().filter(|key| keys.is_ours(key));
    let sizes = ours.map(|key| {
        ask::<Option<u64>>(client, "MEMORY", vec![Value::from_static_str("USAGE"), Value::Bytes(key)])
    });
    // One that has expired meanwhile has no size.
    let ours = try_join_all(sizes).await?.into_iter().flatten().collect();
    Ok(Sample { all, looked_at, ours, server })
}

async fn ask<T: fred::types::FromValue>(
    client: &Client,
    command: &'static str,
    arguments: Vec<Value>,
) -> Result<T, Fault> {
    let command = CustomCommand::new_static(command, None::<u16>, false);
    client.custom(command, arguments).await.map_err(|e| classify(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_stands_for_the_whole() {
        let sample = Sample { all: 1_000, looked_at: 32, ours: vec![100; 8], server: Server::default() };
        assert_eq!((sample.keys(), sample.bytes()), (250.0, 25_000.0));
        assert_eq!((Sample::default().keys(), Sample::default().bytes()), (0.0, 0.0));
    }

    #[test]
    fn the_server_is_read() {
        let info = "# Memory\r\nused_memory:1024\r\nused_memory_human:1.00K\r\nmaxmemory:0\r\n# Stats\r\nevicted_keys:7\r\n";
        let expected = Server { used: Some(1_024.0), max: Some(0.0), evicted: Some(7.0) };
        assert_eq!(Server::parse(info), expected);
        assert_eq!(Server::parse(""), Server::default());
    }
}
