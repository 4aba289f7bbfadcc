//! TLS, client certificates, tokens, and connections of one address, over real sockets.

use crate::limiter::{Limiter, policy};
use crate::{Answer, Fixture, PATIENCE, client};
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use prost::Message as _;
use quorate::config::{AttributeSource, ForwardAuth, Secret};
use quorate::limiter::newcomers::Caller;
use quorate::quota::policy::Unit;
use quorate::server::Options;
use quorate::server::callers::{CallerTls, Callers, Tokens};
use quorate::tls::TlsFiles;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

const BODY: &str = r#"{"domain":"api","attributes":{"tenant":"7"}}"#;
const ALICE: &str = "Bearer alices-own-secret-token";

fn limiter() -> Limiter {
    Limiter::new(vec![policy("tenants", &["tenant"], 1_000, Unit::Minute, 1_000)])
}

fn options(callers: Callers) -> Options {
    Options { workers: 1, callers, ..Options::default() }
}

fn tokens(names: &[&str]) -> Arc<Tokens> {
    let token = |name: &&str| ((*name).into(), Secret::new(&format!("{name}s-own-secret-token")));
    Arc::new(Tokens::new(&names.iter().map(token).collect::<Vec<_>>()))
}

/// An authority and the certificates that it signs, in files.
struct Authority {
    folder: TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        std::fs::write(folder.path().join("ca"), params.self_signed(&key).unwrap().pem()).unwrap();
        Self { folder, issuer: Issuer::new(params, key) }
    }

    /// Files of this name; what was there before is replaced.
    fn issue(&self, name: &str) -> TlsFiles {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let path = |what: &str| self.folder.path().join(format!("{name}.{what}"));
        std::fs::write(path("cert"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        TlsFiles { cert: path("cert"), key: path("key"), ca: None }
    }

    fn ca(&self) -> PathBuf {
        self.folder.path().join("ca")
    }

    /// One that trusts this authority, and shows this certificate. gRPC speaks HTTP/2 only.
    fn client(&self, shows: Option<&TlsFiles>, http2: bool) -> reqwest::Client {
        let _ = client();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.ca()).unwrap()).unwrap();
        let builder = rustls::ClientConfig::builder().with_root_certificates(roots);
        let mut config = match shows {
            None => builder.with_no_client_auth(),
            Some(files) => {
                let chain = vec![CertificateDer::from_pem_file(&files.cert).unwrap()];
                builder
                    .with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(&files.key).unwrap())
                    .unwrap()
            }
        };
        config.alpn_protocols = if http2 { vec![b"h2".to_vec()] } else { vec![b"http/1.1".to_vec()] };
        let builder =
            reqwest::Client::builder().tls_backend_preconfigured(config).no_proxy().timeout(PATIENCE);
        // No connection is kept, so that each call shakes hands anew.
        builder.pool_max_idle_per_host(0).build().unwrap()
    }
}

async fn check(client: &reqwest::Client, to: SocketAddr) -> Result<Answer, reqwest::Error> {
    let url = format!("https://localhost:{}/v1/check", to.port());
    Ok(Answer::of(client.post(url).body(BODY).send().await?).await)
}

/// `ShouldRateLimit` by hand; returns its gRPC status.
async fn should(client: &reqwest::Client, base: &str, token: Option<&str>) -> Result<String, reqwest::Error> {
    let entries = vec![Entry { key: "tenant".into(), value: "7".into() }];
    let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
    let message = RateLimitRequest { domain: "api".into(), descriptors, hits_addend: 1 }.encode_to_vec();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let url = format!("{base}/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    let mut request = client.post(url).header("content-type", "application/grpc").header("te", "trailers");
    if let Some(token) = token {
        request = request.header("authorization", token);
    }
    let answer = request.body([&[0], &length[..], &message].concat()).send().await?;
    // A refusal has it in the head; of what was decided it follows the message, which reqwest does not show.
    let status = answer.headers().get("grpc-status").map(|s| s.to_str().unwrap().to_owned());
    let body = answer.bytes().await?;
    Ok(status.unwrap_or_else(|| if body.is_empty() { "?".into() } else { "0".into() }))
}

#[tokio::test]
async fn tls_on_both_listeners() {
    let authority = Authority::new();
    let tls = Arc::new(CallerTls::load(authority.issue("server")).unwrap());
    let front = Fixture::with(limiter(), options(Callers { tls: Some(tls), tokens: None })).await;
    let (http, grpc) = (front.server.http(), front.server.grpc());
    for http2 in [false, true] {
        assert_eq!(check(&authority.client(None, http2), http).await.unwrap().status, 200);
    }
    let base = format!("https://localhost:{}", grpc.port());
    assert_eq!(should(&authority.client(None, true), &base, None).await.unwrap(), "0");
    assert!(should(&authority.client(None, false), &base, None).await.is_err(), "gRPC is not HTTP/1");
    assert!(check(&Authority::new().client(None, false), http).await.is_err(), "another authority's");
    // Plain HTTP gets no answer, and nothing hangs.
    let mut plain = TcpStream::connect(http).await.unwrap();
    plain.write_all(b"POST /v1/check HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = timeout(PATIENCE, plain.read_to_end(&mut answer)).await.expect("it is hung up on");
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
    assert!(front.server.drain().await);
}

#[tokio::test]
async fn certificates_of_callers() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let files = TlsFiles { ca: Some(ours.ca()), ..ours.issue("server") };
    let tls = Arc::new(CallerTls::load(files).unwrap());
    let front = Fixture::with(limiter(), options(Callers { tls: Some(tls), tokens: None })).await;
    let (http, base) = (front.server.http(), format!("https://localhost:{}", front.server.grpc().port()));
    let (alice, mallory) = (ours.issue("alice"), theirs.issue("mallory"));
    assert_eq!(check(&ours.client(Some(&alice), true), http).await.unwrap().status, 200);
    assert_eq!(should(&ours.client(Some(&alice), true), &base, None).await.unwrap(), "0");
    for shows in [None, Some(&mallory)] {
        assert!(check(&ours.client(shows, true), http).await.is_err());
        assert!(should(&ours.client(shows, true), &base, None).await.is_err());
    }
    let leaf = CertificateDer::from_pem_file(&alice.cert).unwrap();
    let all: Vec<Caller> = front.limiter.callers();
    assert_eq!(all, [Caller::certificate(&leaf); 2], "whoever was let in");
}

#[tokio::test]
async fn another_certificate_is_in_use_from_the_next_connection_on() {
    let (old, new) = (Authority::new(), Authority::new());
    let files = old.issue("server");
    let tls = Arc::new(CallerTls::load(files.clone()).unwrap());
    let front =
        Fixture::with(limiter(), options(Callers { tls: Some(Arc::clone(&tls)), tokens: None })).await;
    let http = front.server.http();
    assert_eq!(check(&old.client(None, false), http).await.unwrap().status, 200);
    let renewed = new.issue("server");
    std::fs::copy(&renewed.cert, &files.cert).unwrap();
    assert!(tls.reload().is_err(), "its key is not there yet");
    assert_eq!(check(&old.client(None, false), http).await.unwrap().status, 200, "the old one stays");
    std::fs::copy(&renewed.key, &files.key).unwrap();
    tls.reload().unwrap();
    assert_eq!(check(&new.client(None, false), http).await.unwrap().status, 200);
    assert!(check(&old.client(None, false), http).await.is_err());
}

#[tokio::test]
async fn tokens_are_needed_and_name_the_caller() {
    let known = tokens(&["alice", "bob"]);
    let callers = Callers { tls: None, tokens: Some(Arc::clone(&known)) };
    let front = Fixture::with(limiter(), options(callers)).await;
    let url = format!("http://{}/v1/check", front.server.http());
    let ask = async |authorization: Option<&str>| {
        let request = front.client.post(&url).body(BODY);
        let request = match authorization {
            Some(value) => request.header("authorization", value),
            None => request,
        };
        Answer::of(request.send().await.unwrap()).await
    };
    assert_eq!(ask(Some(ALICE)).await.status, 200);
    assert_eq!(front.limiter.callers(), [Caller::token("alice")]);
    for wrong in [None, Some("Bearer mallorys-own-secret-token"), Some("Basic YTpi"), Some("")] {
        let answer = ask(wrong).await;
        assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")), "{wrong:?}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    }
    // Not even what is there is told.
    let other = front.client.get(format!("http://{}/nothing", front.server.http())).send().await.unwrap();
    assert_eq!(other.status().as_u16(), 401);
    assert_eq!(front.limiter.callers().len(), 1, "nothing else was decided");

    known.set(&[("carol".into(), Secret::new("carols-own-secret-token"))]);
    assert_eq!(ask(Some(ALICE)).await.status, 401, "hers counts no more");
    assert_eq!(ask(Some("Bearer carols-own-secret-token")).await.status, 200);
    let text = front.metrics.encode().unwrap();
    assert!(text.contains("quorate_unauthenticated_total{region=\"test\",protocol=\"http\"} 6"), "{text}");
}

/// A proxy sends its own, and passes on what its client sent to whom it meant.
#[tokio::test]
async fn a_proxys_own_token_counts_and_its_clients_does_not() {
    let callers = Callers { tls: None, tokens: Some(tokens(&["alice", "proxy"])) };
    let forward_auth = ForwardAuth {
        domain: "api".into(),
        trusted_proxies: 0,
        attributes: vec![("tenant".into(), AttributeSource::Path)],
    };
    let front =
        Fixture::with(limiter(), Options { forward_auth: Some(forward_auth.into()), ..options(callers) })
            .await;
    let url = format!("http://{}/v1/forward-auth", front.server.http());
    let ask = async |own: Option<&str>, clients: Option<&str>| {
        let mut request = front.client.get(&url).header("x-forwarded-uri", "/7");
        for (name, value) in [("x-quorate-token", own), ("authorization", clients)] {
            if let Some(value) = value {
                request = request.header(name, value);
            }
        }
        request.send().await.unwrap().status().as_u16()
    };
    let own = "proxys-own-secret-token";
    assert_eq!(ask(Some(own), Some("Bearer a-token-for-somebody-else")).await, 200);
    assert_eq!(front.limiter.callers(), [Caller::token("proxy")]);
    assert_eq!(
        ask(Some("guessed"), Some(ALICE)).await,
        401,
        "its own is wrong: its client's makes up for nothing"
    );
    assert_eq!(ask(None, Some("Bearer a-token-for-somebody-else")).await, 401);
    assert_eq!(front.limiter.callers().len(), 1, "nothing else was decided");
}

#[tokio::test]
async fn tokens_over_grpc() {
    let callers = Callers { tls: None, tokens: Some(tokens(&["alice"])) };
    let front = Fixture::with(limiter(), options(callers)).await;
    let _ = client();
    let http2 =
        reqwest::Client::builder().http2_prior_knowledge().no_proxy().timeout(PATIENCE).build().unwrap();
    let base = format!("http://{}", front.server.grpc());
    assert_eq!(should(&http2, &base, Some(ALICE)).await.unwrap(), "0");
    // 16: UNAUTHENTICATED.
    assert_eq!(should(&http2, &base, Some("Bearer somebody-elses-token")).await.unwrap(), "16");
    assert_eq!(should(&http2, &base, None).await.unwrap(), "16");
    assert_eq!(front.limiter.callers(), [Caller::token("alice")]);
    // Probes have no tokens.
    let probe = http2.post(format!("{base}/grpc.health.v1.Health/Check"));
    let probe = probe.header("content-type", "application/grpc").header("te", "trailers");
    let answer = probe.body(vec![0; 5]).send().await.unwrap();
    assert_eq!(answer.headers().get("grpc-status"), None);
    assert_eq!(answer.bytes().await.unwrap()[..], [0, 0, 0, 0, 2, 8, 1], "SERVING");
}

#[tokio::test]
async fn an_address_has_only_so_many_connections() {
    let limits = Options { connections_per_address_max: 3, ..options(Callers::default()) };
    let front = Fixture::with(limiter(), limits).await;
    let to = front.server.http();
    let request =
        format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{BODY}", BODY.len());
    let open = async || {
        let mut stream = TcpStream::connect(to).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        let read = timeout(PATIENCE, stream.read_exact(&mut head)).await.expect("an answer, or the end");
        read.ok().map(|_| {
            assert_eq!(&head, b"HTTP/1.1 200");
            stream
        })
    };
    let mut streams = Vec::new();
    for _ in 0..3 {
        streams.push(open().await.expect("it is let in"));
    }
    assert!(open().await.is_none(), "one too many");
    assert!(front.metrics.connections_refused(quorate::telemetry::metrics::Protocol::Http).get() >= 1);
    streams.pop();
    let again = async {
        while open().await.is_none() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, again).await.expect("there is a place again");
}
