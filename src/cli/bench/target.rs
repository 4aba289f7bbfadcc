//! Whom the load is put on, and one request to it.

use anyhow::{Context as _, bail};
use bytes::Bytes;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::value::Kind;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Collected, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message as _;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tonic::Code as GrpcCode;

/// The most bytes of an answer.
const ANSWER_MAX: usize = 256 * 1024;
/// What stands for the key in a descriptor.
const KEY: &str = "{key}";

/// What is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Envoy's rate limit service, over HTTP/2.
    Grpc,
    /// `POST /v1/check`, over HTTP/1.1.
    Http,
}

/// One address.
#[derive(Clone, Debug)]
pub struct Target {
    /// As it was given.
    pub url: String,
    /// What is spoken there.
    pub protocol: Protocol,
    encrypted: bool,
    host: String,
    port: u16,
}

impl Target {
    /// Is it asked over TLS?
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.encrypted
    }
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let how = "want grpc://HOST:PORT or http://HOST:PORT (grpcs:// or https:// for TLS)";
        let parsed = url::Url::parse(text).context(how)?;
        let (protocol, encrypted) = match parsed.scheme() {
            "grpc" => (Protocol::Grpc, false),
            "grpcs" => (Protocol::Grpc, true),
            "http" => (Protocol::Http, false),
            "https" => (Protocol::Http, true),
            _ => bail!(how),
        };
        let host = parsed.host_str().context(how)?.trim_matches(['[', ']']).to_owned();
        let port = parsed.port_or_known_default().context(how)?;
        if !matches!(parsed.path(), "" | "/") || parsed.query().is_some() || !parsed.username().is_empty() {
            bail!(how);
        }
        Ok(Self { url: text.trim_end_matches('/').to_owned(), protocol, encrypted, host, port })
    }
}

/// What all requests have in common.
pub struct Setup {
    /// The domain of the policies.
    pub domain: String,
    /// Keys and values; `{key}` in a value becomes the request's key.
    pub entries: Vec<(String, String)>,
    /// What each costs.
    pub cost: u32,
    /// How long an answer may take, a connection included.
    pub timeout: Duration,
    /// What the caller shows.
    pub token: Option<HeaderValue>,
    /// For targets that speak TLS.
    pub tls: Option<Arc<rustls::ClientConfig>>,
}

/// A request that was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Yes.
    Allowed,
    /// No, for this reason.
    Denied(String),
}

/// A request that was not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection could be made.
    Unreachable,
    /// It was sent, or waited to be, for too long.
    TimedOut,
    /// The connection broke, or what came is no answer.
    Broken,
    /// It was refused, with this status.
    Refused(String),
}

impl Failure {
    /// As the report has it.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Unreachable => "unreachable",
            Self::TimedOut => "timeout",
            Self::Broken => "broken",
            Self::Refused(status) => status,
        }
    }
}

/// A connection, made when it is first needed, and again when it breaks.
pub struct Connection {
    target: Arc<Target>,
    setup: Arc<Setup>,
    /// HTTP/1.1 has one request on its way at a time: then this stays locked meanwhile.
    sender: Mutex<Option<Sender>>,
}

enum Sender {
    One(http1::SendRequest<Full<Bytes>>),
    Many(http2::SendRequest<Full<Bytes>>),
}

trait Wire: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Wire for T {}

impl Connection {
    /// Not made yet.
    #[must_use]
    pub fn new(target: Arc<Target>, setup: Arc<Setup>) -> Self {
        Self { target, setup, sender: Mutex::new(None) }
    }

    /// Asks about one key.
    ///
    /// # Errors
    /// See [`Failure`].
    pub async fn ask(&self, key: u64) -> Result<Decision, Failure> {
        let asked = tokio::time::timeout(self.setup.timeout, self.exchange(key)).await;
        let asked = asked.unwrap_or(Err(Failure::TimedOut));
        let is_lost = match &asked {
            Err(Failure::Broken | Failure::Unreachable) => true,
            // The answer may come yet, and would be taken for the next one's.
            Err(Failure::TimedOut) => self.target.protocol == Protocol::Http,
            Ok(_) | Err(Failure::Refused(_)) => false,
        };
        if is_lost {
            *self.sender.lock().await = None;
        }
        asked
    }

    async fn exchange(&self, key: u64) -> Result<Decision, Failure> {
        let request = self.request(key)?;
        let mut sender = self.sender.lock().await;
        if sender.as_ref().is_none_or(Sender::is_closed) {
            *sender = Some(self.connect().await.map_err(|_| Failure::Unreachable)?);
        }
        let broken = |_| Failure::Broken;
        match &mut *sender {
            Some(Sender::Many(many)) => {
                let mut own = many.clone();
                drop(sender);
                own.ready().await.map_err(broken)?;
                grpc_answer(own.send_request(request).await.map_err(broken)?).await
            }
            Some(Sender::One(one)) => {
                one.ready().await.map_err(broken)?;
                http_answer(one.send_request(request).await.map_err(broken)?).await
            }
            None => Err(Failure::Broken),
        }
    }

    async fn connect(&self) -> anyhow::Result<Sender> {
        let Target { host, port, protocol, encrypted, .. } = &*self.target;
        let stream = TcpStream::connect((host.as_str(), *port)).await?;
        stream.set_nodelay(true)?;
        let wire: Box<dyn Wire> = if *encrypted {
            let tls = self.setup.tls.clone().context("TLS is not set up")?;
            let mut tls = (*tls).clone();
            let speaks: &[u8] = if *protocol == Protocol::Grpc { b"h2" } else { b"http/1.1" };
            tls.alpn_protocols = vec![speaks.to_vec()];
            let name = rustls::pki_types::ServerName::try_from(host.clone())?;
            Box::new(tokio_rustls::TlsConnector::from(Arc::new(tls)).connect(name, stream).await?)
        } else {
            Box::new(stream)
        };
        // Whatever ends a connection, its requests hear of it.
        Ok(match protocol {
            Protocol::Grpc => {
                let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(wire)).await?;
                tokio::spawn(connection);
                Sender::Many(sender)
            }
            Protocol::Http => {
                let (sender, connection) = http1::handshake(TokioIo::new(wire)).await?;
                tokio::spawn(connection);
                Sender::One(sender)
            }
        })
    }

    fn request(&self, key: u64) -> Result<Request<Full<Bytes>>, Failure> {
        let Target { host, port, protocol, encrypted, .. } = &*self.target;
        let scheme = if *encrypted { "https" } else { "http" };
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let mut request = match protocol {
            Protocol::Grpc => Request::post(format!(
                "{scheme}://{host}:{port}/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
            ))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers"),
            Protocol::Http => Request::post("/v1/check")
                .header(header::HOST, format!("{host}:{port}"))
                .header(header::CONTENT_TYPE, "application/json"),
        };
        if let Some(token) = &self.setup.token {
            request = request.header(header::AUTHORIZATION, token);
        }
        let body = match protocol {
            Protocol::Grpc => self.setup.message(key),
            Protocol::Http => self.setup.json(key),
        };
        request.body(Full::new(body.into())).map_err(|_| Failure::Broken)
    }
}

impl Sender {
    fn is_closed(&self) -> bool {
        match self {
            Self::One(one) => one.is_closed(),
            Self::Many(many) => many.is_closed(),
        }
    }
}

impl Setup {
    fn entries(&self, key: u64) -> impl Iterator<Item = (&str, String)> {
        let key = key.to_string();
        self.entries.iter().map(move |(name, value)| (name.as_str(), value.replace(KEY, &key)))
    }

    /// With its prefix ("gRPC over HTTP/2": a flag, and the length in four bytes).
    fn message(&self, key: u64) -> Vec<u8> {
        let entry = |(key, value): (&str, String)| Entry { key: key.to_owned(), value };
        let entries = self.entries(key).map(entry).collect();
        let message = RateLimitRequest {
            domain: self.domain.clone(),
            descriptors: vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }],
            hits_addend: self.cost,
        };
        let length = message.encoded_len();
        let mut bytes = Vec::with_capacity(length + 5);
        bytes.push(0);
        bytes.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
        message.encode_raw(&mut bytes);
        bytes
    }

    fn json(&self, key: u64) -> Vec<u8> {
        let attributes: serde_json::Map<String, serde_json::Value> =
            self.entries(key).map(|(key, value)| (key.to_owned(), value.into())).collect();
        let body = serde_json::json!({ "domain": self.domain, "attributes": attributes, "cost": self.cost });
        body.to_string().into_bytes()
    }
}

/// What a client trusts: the authority in this file (PEM).
///
/// # Errors
/// It cannot be used.
pub fn trusting(file: &Path) -> anyhow::Result<rustls::ClientConfig> {
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};
    let mut roots = rustls::RootCertStore::empty();
    let certificates =
        CertificateDer::pem_file_iter(file).with_context(|| format!("{}: cannot be read", file.display()))?;
    for certificate in certificates {
        let bad = || format!("{}: not a PEM file of certificates", file.display());
        roots.add(certificate.with_context(bad)?).with_context(bad)?;
    }
    if roots.is_empty() {
        bail!("{}: there is no certificate in it", file.display());
    }
    Ok(rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

async fn grpc_answer(response: Response<Incoming>) -> Result<Decision, Failure> {
    let (head, body) = response.into_parts();
    if head.status != StatusCode::OK {
        return Err(Failure::Refused(format!("HTTP {}", head.status.as_u16())));
    }
    refused(&head.headers)?;
    let body = whole(body).await?;
    body.trailers().map_or(Ok(()), refused)?;
    let bytes = body.to_bytes();
    let answer =
        RateLimitResponse::decode(bytes.get(5..).unwrap_or_default()).map_err(|_| Failure::Broken)?;
    match Code::try_from(answer.overall_code) {
        Ok(Code::Ok) => Ok(Decision::Allowed),
        Ok(Code::OverLimit) => Ok(Decision::Denied(reason(&answer))),
        Ok(Code::Unknown) | Err(_) => Err(Failure::Refused("no code".to_owned())),
    }
}

/// Is there a status that is not "OK"?
fn refused(headers: &HeaderMap) -> Result<(), Failure> {
    let status = headers.get("grpc-status").map_or(GrpcCode::Ok, |s| GrpcCode::from_bytes(s.as_bytes()));
    if status == GrpcCode::Ok { Ok(()) } else { Err(Failure::Refused(format!("gRPC {status:?}"))) }
}

/// Why a request was denied: this product says so in the metadata, others do not.
fn reason(answer: &RateLimitResponse) -> String {
    let field = answer.dynamic_metadata.as_ref().and_then(|metadata| metadata.fields.get("reason"));
    match field.and_then(|value| value.kind.as_ref()) {
        Some(Kind::StringValue(reason)) => reason.clone(),
        _ => "over_limit".to_owned(),
    }
}

async fn http_answer(response: Response<Incoming>) -> Result<Decision, Failure> {
    let status = response.status();
    let body = whole(response.into_body()).await?.to_bytes();
    let refused = || Failure::Refused(format!("HTTP {}", status.as_u16()));
    match status {
        StatusCode::OK => Ok(Decision::Allowed),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            let answer: Answer = serde_json::from_slice(&body).map_err(|_| refused())?;
            let denied = answer.limits.into_iter().find(|limit| !limit.allowed);
            Ok(Decision::Denied(denied.map_or_else(|| "unmatched".to_owned(), |limit| limit.reason)))
        }
        _ => Err(refused()),
    }
}

#[derive(serde::Deserialize)]
struct Answer {
    limits: Vec<Limit>,
}

#[derive(serde::Deserialize)]
struct Limit {
    allowed: bool,
    reason: String,
}

async fn whole(body: Incoming) -> Result<Collected<Bytes>, Failure> {
    Limited::new(body, ANSWER_MAX).collect().await.map_err(|_| Failure::Broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets() {
        let read =
            |text: &str| text.parse::<Target>().ok().map(|t| (t.protocol, t.encrypted, t.host, t.port));
        assert_eq!(read("grpc://127.0.0.1:8081"), Some((Protocol::Grpc, false, "127.0.0.1".into(), 8081)));
        assert_eq!(read("http://[::1]:8080/"), Some((Protocol::Http, false, "::1".into(), 8080)));
        assert_eq!(read("https://a.example"), Some((Protocol::Http, true, "a.example".into(), 443)));
        assert_eq!(read("grpcs://a.example:1"), Some((Protocol::Grpc, true, "a.example".into(), 1)));
        for bad in ["", "127.0.0.1:8081", "ftp://a:1", "grpc://a", "http://a/b", "http://u@a:1", "http://a?b"]
        {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_key_goes_into_values() {
        let entries = vec![("tenant".to_owned(), "t-{key}".to_owned()), ("m".to_owned(), "GET".to_owned())];
        let (domain, timeout) = ("api".to_owned(), Duration::from_secs(1));
        let setup = Setup { domain, entries, cost: 3, timeout, token: None, tls: None };
        let json: serde_json::Value = serde_json::from_slice(&setup.json(42)).unwrap();
        let wanted =
            serde_json::json!({"domain": "api", "attributes": {"tenant": "t-42", "m": "GET"}, "cost": 3});
        assert_eq!(json, wanted);
        let message = RateLimitRequest::decode(&setup.message(42)[5..]).unwrap();
        let sent: Vec<_> = message.descriptors[0].entries.iter().map(|e| (&*e.key, &*e.value)).collect();
        assert_eq!((sent, message.hits_addend), (vec![("tenant", "t-42"), ("m", "GET")], 3));
    }
}
