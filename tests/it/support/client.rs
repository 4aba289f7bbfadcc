//! Callers: HTTP and gRPC, as a sidecar or a script would ask.

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;
use tonic::transport::Channel;

/// No test waits longer for one answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// One listener of a daemon (or of Envoy), asked over HTTP/1.1 with connections kept.
#[derive(Clone)]
pub struct Api {
    address: SocketAddr,
    http: reqwest::Client,
}

/// An answer, read whole.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The headers.
    pub headers: reqwest::header::HeaderMap,
    /// The body.
    pub text: String,
}

impl Answer {
    /// A header's value; a header that is there twice counts as a fault.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter();
        let value = values.next().map(|v| v.to_str().expect("a readable header"));
        assert!(values.next().is_none(), "{name} is there twice: {:?}", self.headers);
        value
    }

    /// A header that must be there.
    pub fn must_have(&self, name: &str) -> &str {
        self.header(name).unwrap_or_else(|| panic!("no {name} in {} {:?}", self.status, self.headers))
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("not JSON ({e}): {}", self.text))
    }

    /// The first limit in the body of a decision.
    pub fn limit(&self) -> Value {
        self.json().pointer("/limits/0").cloned().unwrap_or_else(|| panic!("no limits in {}", self.text))
    }

    /// Whole tokens that remain, of the first limit.
    pub fn remaining(&self) -> u64 {
        let limit = self.limit();
        limit.get("remaining").and_then(Value::as_u64).unwrap_or_else(|| panic!("no remaining in {limit}"))
    }

    /// Why the first limit answered so.
    pub fn reason(&self) -> String {
        self.limit().get("reason").and_then(Value::as_str).unwrap_or_default().to_owned()
    }
}

impl Api {
    /// A caller of the listener at this address.
    pub fn new(address: SocketAddr) -> Self {
        static CLIENT: OnceLock<reqwest::Client> = OnceLock::new();
        // One client for each process: its pool keeps connections by address. Tests run one in a process, or on runtimes
        // of their own; a connection of a runtime that has ended is found dead and opened again.
        let http = CLIENT.get_or_init(new_client).clone();
        Self { address, http }
    }

    /// The same listener with a pool of connections of its own.
    pub fn fresh(&self) -> Self {
        Self { address: self.address, http: new_client() }
    }

    /// `http://address`
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// GET
    pub async fn get(&self, path: &str) -> Result<Answer, String> {
        self.send(self.http.get(format!("{}{path}", self.url()))).await
    }

    /// GET with headers.
    pub async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Result<Answer, String> {
        let mut request = self.http.get(format!("{}{path}", self.url()));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request).await
    }

    /// Any method, body and headers.
    pub async fn request(
        &self,
        method: reqwest::Method,
        path: &str,
        body: &str,
        headers: &[(&str, &str)],
    ) -> Result<Answer, String> {
        let request = self.http.request(method, format!("{}{path}", self.url())).body(body.to_owned());
        self.send(headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))).await
    }

    /// PUT of a YAML file.
    pub async fn put_yaml(&self, path: &str, yaml: &str) -> Result<Answer, String> {
        let request =
            self.http.put(format!("{}{path}", self.url())).header("content-type", "application/yaml");
        self.send(request.body(yaml.to_owned())).await
    }

    /// POST of JSON.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer, String> {
        let request =
            self.http.post(format!("{}{path}", self.url())).header("content-type", "application/json");
        self.send(request.body(body.to_string())).await
    }

    /// `POST /v1/check` with attributes; an answer must come.
    pub async fn check(&self, domain: &str, attributes: &[(&str, &str)], cost: i64) -> Answer {
        let body = check_body(domain, attributes, cost);
        self.post("/v1/check", &body).await.unwrap_or_else(|why| panic!("/v1/check {body}: {why}"))
    }

    /// `POST /v1/check` with descriptors; an answer must come.
    pub async fn check_descriptors(
        &self,
        domain: &str,
        descriptors: &[&[(&str, &str)]],
        cost: i64,
    ) -> Answer {
        let entries =
            |d: &&[(&str, &str)]| d.iter().map(|(k, v)| json!({"key": k, "value": v})).collect::<Vec<_>>();
        let descriptors: Vec<_> = descriptors.iter().map(entries).collect();
        let body = json!({"domain": domain, "descriptors": descriptors, "cost": cost});
        self.post("/v1/check", &body).await.unwrap_or_else(|why| panic!("/v1/check {body}: {why}"))
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Answer, String> {
        let whole = async {
            let response = request.send().await?;
            let (status, headers) = (response.status().as_u16(), response.headers().clone());
            Ok(Answer { status, headers, text: response.text().await? })
        };
        let answer: Result<Answer, reqwest::Error> = tokio::time::timeout(ANSWER_WITHIN, whole)
            .await
            .map_err(|_| format!("no answer in {ANSWER_WITHIN:?}"))?;
        answer.map_err(|e| format!("{e:?}"))
    }
}

/// The body of a check by attributes.
pub fn check_body(domain: &str, attributes: &[(&str, &str)], cost: i64) -> Value {
    let attributes: serde_json::Map<_, _> =
        attributes.iter().map(|(k, v)| ((*k).to_owned(), json!(v))).collect();
    json!({"domain": domain, "attributes": attributes, "cost": cost})
}

/// A caller over gRPC. Clones share the connection.
#[derive(Clone)]
pub struct Grpc(RateLimitServiceClient<Channel>);

impl Grpc {
    /// Connects.
    pub async fn connect(url: &str) -> Self {
        let client = RateLimitServiceClient::connect(url.to_owned()).await;
        Self(client.unwrap_or_else(|e| panic!("gRPC at {url}: {e}")))
    }

    /// `ShouldRateLimit`
    pub async fn ask(&mut self, request: RateLimitRequest) -> Result<RateLimitResponse, tonic::Status> {
        let answer = tokio::time::timeout(ANSWER_WITHIN, self.0.should_rate_limit(request)).await;
        answer
            .unwrap_or_else(|_| panic!("no answer over gRPC in {ANSWER_WITHIN:?}"))
            .map(tonic::Response::into_inner)
    }
}

/// A request with these descriptors, `hits_addend` unset.
pub fn rls_request(domain: &str, descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 }
}

/// A descriptor with these entries.
pub fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: (*value).to_owned() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..Default::default() }
}

fn new_client() -> reqwest::Client {
    // Needed by the client library even where no request uses TLS; it is an error only to install it twice.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder().no_proxy().http1_only().tls_backend_preconfigured(no_tls());
    builder.pool_max_idle_per_host(512).timeout(ANSWER_WITHIN).build().expect("an HTTP client")
}

/// TLS that trusts nobody: test traffic stays on loopback, in the clear.
fn no_tls() -> rustls::ClientConfig {
    rustls::ClientConfig::builder()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth()
}
