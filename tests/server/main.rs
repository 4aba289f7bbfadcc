//! The front ends over real sockets, in front of a small exact limiter (see `limiter`).
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

mod admin;
mod callers;
mod connections;
mod forward_auth;
mod grpc;
mod http;
mod leases;
mod limiter;

use limiter::Limiter;
use quorate::server::{self, Listeners, Options, Server, listen};
use quorate::telemetry::Metrics;
use std::net::SocketAddr;
use std::sync::{Arc, Once};
use std::time::Duration;
use tokio::sync::watch;

/// Longer than anything may take on a busy machine; a test that waits for it has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Front ends that run.
struct Fixture {
    server: Server,
    limiter: Limiter,
    metrics: Arc<Metrics>,
    ready: watch::Sender<bool>,
    client: reqwest::Client,
}

impl Fixture {
    async fn new(limiter: Limiter) -> Self {
        Self::with(limiter, Options { workers: 2, ..Options::default() }).await
    }

    async fn with(limiter: Limiter, options: Options) -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listeners = Listeners { http: listen::bind(any).unwrap(), grpc: listen::bind(any).unwrap() };
        let metrics = Arc::new(Metrics::new("test"));
        let (ready, watched) = watch::channel(true);
        let each = limiter.clone();
        let server =
            server::start(listeners, options, Arc::clone(&metrics), watched, move |_| each.clone()).await;
        Self { server: server.unwrap(), limiter, metrics, ready, client: client() }
    }

    /// `POST /v1/check`
    async fn check(&self, body: impl Into<reqwest::Body>) -> Answer {
        let url = format!("http://{}/v1/check", self.server.http());
        Answer::of(self.client.post(url).body(body).send().await.unwrap()).await
    }
}

/// An HTTP answer.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: reqwest::header::HeaderMap,
    body: serde_json::Value,
}

impl Answer {
    async fn of(response: reqwest::Response) -> Self {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = response.bytes().await.unwrap();
        Self { status, headers, body: serde_json::from_slice(&bytes).unwrap_or_default() }
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|v| v.to_str().unwrap())
    }
}

fn client() -> reqwest::Client {
    static PROVIDER: Once = Once::new();
    PROVIDER.call_once(|| rustls::crypto::ring::default_provider().install_default().unwrap());
    reqwest::Client::builder().no_proxy().timeout(PATIENCE).build().unwrap()
}
