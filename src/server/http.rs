//! Decisions over HTTP: `POST /v1/check`, leases of permits: `POST /v1/acquire`, `/v1/renew`, `/v1/release`, and
//! `/v1/forward-auth` for proxies.
//!
//! The content type of a request is not looked at: whatever is there is read as JSON, so that `curl -d` just works.

mod forward_auth;
mod leases;

use super::callers::Connected;
use super::problem::Problem;
use super::reading::Share;
use super::{BODY_MAX, Decide};
use crate::config::ForwardAuth;
use crate::limiter::leases::Lease;
use crate::limiter::newcomers::Caller;
use crate::quota::amount::Tokens;
use crate::quota::matching::{Descriptor, Place, Request, RequestFault, Subject};
use crate::quota::verdict::{Fields, LimitVerdict, Verdict};
use crate::telemetry::metrics::{Answered, Protocol};
use crate::telemetry::{Metrics, trace};
use crate::trace_span;
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Incoming};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_path_to_error::{Path, Segment};
use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt::{self, Write as _};
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

/// A body that is too large is read to its end, up to this many bytes, and thrown away: a connection that is closed on
/// a caller who still sends takes the answer with it.
const DISCARD_MAX: usize = 16 * BODY_MAX;
/// Memory for a body before anything of it is here.
const FIRST_PIECE: usize = 4 * 1024;

/// Serves the connections of the HTTP listener.
#[derive(Clone, Debug)]
pub struct Http<D> {
    /// For the caller that the connection alone tells.
    inner: Arc<Inner<D>>,
    caller: Caller,
    connected: Option<Connected>,
}

#[derive(Debug)]
struct Inner<D> {
    decide: D,
    forward_auth: Option<Arc<ForwardAuth>>,
    timeout: Duration,
    metrics: Arc<Metrics>,
}

impl<D: Decide> Http<D> {
    /// Decisions by `decide`; a request may take `timeout` to come in and as long to be decided.
    #[must_use]
    pub fn new(
        decide: D,
        forward_auth: Option<Arc<ForwardAuth>>,
        timeout: Duration,
        metrics: Arc<Metrics>,
    ) -> Self {
        let inner = Inner { decide, forward_auth, timeout, metrics };
        Self { inner: Arc::new(inner), caller: Caller::ANYONE, connected: None }
    }

    /// The same for one connection.
    #[must_use]
    pub fn of(self, connected: Connected) -> Self {
        let caller = connected.caller();
        let inner = Arc::new(self.inner.on_behalf_of(caller));
        Self { inner, caller, connected: Some(connected) }
    }
}

impl<D: Decide> hyper::service::Service<http::Request<Incoming>> for Http<D> {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        let caller = self.connected.as_ref().map_or(Ok(Caller::ANYONE), |c| c.who(request.headers()));
        let peer = self.connected.as_ref().map_or(Ipv4Addr::UNSPECIFIED.into(), Connected::address);
        match caller {
            Ok(caller) => {
                let inner = if caller == self.caller {
                    Arc::clone(&self.inner)
                } else {
                    Arc::new(self.inner.on_behalf_of(caller))
                };
                async move { Ok(inner.route(request, peer).await) }.boxed()
            }
            Err(why) => {
                self.inner.metrics.unauthenticated(Protocol::Http);
                let mut response = Problem::new(StatusCode::UNAUTHORIZED, why).response();
                let bearer = HeaderValue::from_static("Bearer");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
                std::future::ready(Ok(response)).boxed()
            }
        }
    }
}

impl<D: Decide> Inner<D> {
    fn on_behalf_of(&self, caller: Caller) -> Self {
        Self {
            decide: self.decide.on_behalf_of(caller),
            forward_auth: self.forward_auth.clone(),
            timeout: self.timeout,
            metrics: Arc::clone(&self.metrics),
        }
    }

    async fn route(&self, request: http::Request<Incoming>, peer: IpAddr) -> Response<Full<Bytes>> {
        let began = Instant::now();
        let result = match (request.uri().path(), request.method()) {
            ("/v1/check", &Method::POST) => {
                let span = span(request.headers(), "POST /v1/check");
                self.check(request).instrument(span).await
            }
            ("/v1/forward-auth", _) => {
                let span = span(request.headers(), "/v1/forward-auth");
                self.forward_auth(request.headers(), peer).instrument(span).await
            }
            ("/v1/acquire", &Method::POST) => {
                let span = span(request.headers(), "POST /v1/acquire");
                self.acquire(request).instrument(span).await
            }
            ("/v1/renew", &Method::POST) => self.renew(request).await,
            ("/v1/release", &Method::POST) => self.release(request).await,
            ("/v1/check" | "/v1/acquire" | "/v1/renew" | "/v1/release", _) => {
                let problem = Problem::new(StatusCode::METHOD_NOT_ALLOWED, "use POST with a JSON body");
                let mut response = problem.response();
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
                return response;
            }
            _ => Err(Problem::new(
                StatusCode::NOT_FOUND,
                "there is nothing here; decisions are at POST /v1/check and /v1/forward-auth, permits at POST /v1/acquire, \
                 /v1/renew and /v1/release",
            )),
        };
        result.unwrap_or_else(|problem| {
            let lost = [StatusCode::NOT_FOUND, StatusCode::CONFLICT].contains(&problem.status());
            if problem.status().is_client_error() && !lost {
                self.metrics.bad_request(Protocol::Http);
                self.metrics.decided(Protocol::Http, Answered::Refused, began.elapsed());
            }
            problem.response()
        })
    }

    async fn check(&self, request: http::Request<Incoming>) -> Result<Response<Full<Bytes>>, Problem> {
        let bytes = self.read(request).await?;
        let began = Instant::now();
        let body: Body<'_> = parse(&bytes)?;
        let (verdict, _) = self.in_time(body.decide(&self.decide, Ask::Check)).await?;
        super::describe(body.domain.as_ref().map_or("", Text::as_str), &verdict);
        if verdict.undecided {
            let why = "the policies are not known yet; /readyz on the admin listener says what the region waits for";
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, why));
        }
        let response = response(&verdict);
        self.answered(&verdict, began);
        Ok(response)
    }

    /// A body is not waited for: nginx announces one, and sends none.
    async fn forward_auth(
        &self,
        headers: &HeaderMap,
        peer: IpAddr,
    ) -> Result<Response<Full<Bytes>>, Problem> {
        let began = Instant::now();
        let Some(config) = &self.forward_auth else {
            let how = "set `forward_auth: { domain: …, attributes: { … } }` in the region file: it says what to ask about";
            return Err(Problem::new(
                StatusCode::NOT_FOUND,
                format!("/v1/forward-auth is not served here; {how}"),
            ));
        };
        let attributes = forward_auth::attributes(config, headers, peer)?;
        let attributes: Vec<(&str, &str)> = attributes.iter().map(|(k, v)| (*k, v.as_str())).collect();
        let cost = Tokens::whole(1);
        let request = Request { domain: &config.domain, subject: Subject::Attributes(&attributes), cost };
        let decided = self.decide.check(&request, None);
        let decided =
            async { decided.await.map_err(|f| Problem::new(StatusCode::BAD_REQUEST, f.to_string())) };
        let verdict = match self.in_time(decided).await {
            Ok(verdict) => verdict,
            Err(problem) if problem.status() == StatusCode::SERVICE_UNAVAILABLE => {
                return Ok(head(&Verdict::undecided(1)));
            }
            Err(problem) => return Err(problem),
        };
        super::describe(&config.domain, &verdict);
        let response = head(&verdict);
        self.answered(&verdict, began);
        Ok(response)
    }

    fn answered(&self, verdict: &Verdict, began: Instant) {
        let answered = if verdict.allowed { Answered::Allowed } else { Answered::Denied };
        self.metrics.decided(Protocol::Http, answered, began.elapsed());
    }

    async fn in_time<T>(&self, decided: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
        tokio::time::timeout(self.timeout, decided).await.unwrap_or_else(|_| {
            self.metrics.timed_out(Protocol::Http);
            Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "no decision in time; try again"))
        })
    }

    async fn read(&self, request: http::Request<Incoming>) -> Result<Bytes, Problem> {
        let asks_first = request.headers().contains_key(header::EXPECT);
        let mut body = request.into_body();
        let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if announced > DISCARD_MAX || (announced > BODY_MAX && asks_first) {
            return Err(too_large());
        }
        let all = async {
            let mut all = Vec::with_capacity(announced.min(FIRST_PIECE));
            let mut length = 0_usize;
            let mut share = Share::none();
            while let Some(frame) = body.frame().await {
                let broken = |_| Problem::new(StatusCode::BAD_REQUEST, "the body broke off");
                let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
                length = length.saturating_add(data.len());
                if length > DISCARD_MAX {
                    break;
                }
                if length <= BODY_MAX {
                    if !body.is_end_stream() && !share.grow(data.len()) {
                        return Err(Problem::new(
                            StatusCode::SERVICE_UNAVAILABLE,
                            "too many bodies arrive in pieces; try again",
                        ));
                    }
                    all.extend_from_slice(&data);
                }
            }
            if length > BODY_MAX { Err(too_large()) } else { Ok(Bytes::from(all)) }
        };
        tokio::time::timeout(self.timeout, all).await.unwrap_or_else(|_| {
            self.metrics.timed_out(Protocol::Http);
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"))
        })
    }
}

/// The span of a request, if it is traced.
fn span(headers: &HeaderMap, name: &'static str) -> Span {
    trace::request(headers, || {
        trace_span!(
            "http",
            "otel.name" = name,
            "otel.kind" = "server",
            domain = Empty,
            allowed = Empty,
            policy = Empty,
            reason = Empty,
        )
    })
}

fn too_large() -> Problem {
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {BODY_MAX} bytes"))
}

/// Reads a body and decides about it, whatever it is.
#[cfg(any(test, fuzzing))]
pub(crate) async fn read_any<D: Decide>(bytes: &[u8], decide: &D) -> Response<Full<Bytes>> {
    let decided = match parse::<Body<'_>>(bytes) {
        Ok(body) => body.decide(decide, Ask::Check).await,
        Err(problem) => Err(problem),
    };
    decided.map_or_else(|problem| problem.response(), |(verdict, _)| response(&verdict))
}

/// The body of a request.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Body<'a> {
    #[serde(borrow)]
    domain: Option<Text<'a>>,
    #[serde(borrow)]
    attributes: Option<Attributes<'a>>,
    #[serde(borrow)]
    descriptors: Option<Vec<Vec<Object<Entry<'a>>>>>,
    cost: Option<Cost>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry<'a> {
    #[serde(borrow)]
    key: Text<'a>,
    #[serde(borrow)]
    value: Text<'a>,
}

/// Reads a body. If it cannot be read it is read again, slower, to find the place.
fn parse<'b, T: Deserialize<'b>>(bytes: &'b [u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes).map(|Object(body)| body).map_err(|error| {
        let mut json = serde_json::Deserializer::from_slice(bytes);
        let read: Result<Object<T>, _> = serde_path_to_error::deserialize(&mut json);
        match read {
            Err(again) => Problem::at(pointer(again.path()), again.inner().to_string()),
            // There is something behind the object.
            Ok(_) => Problem::at("#", error.to_string()),
        }
    })
}

/// What is asked about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    Check,
    Acquire,
}

impl Ask {
    async fn of<D: Decide>(
        self,
        decide: &D,
        request: &Request<'_>,
    ) -> Result<(Verdict, Option<Lease>), RequestFault> {
        match self {
            Self::Check => Ok((decide.check(request, None).await?, None)),
            Self::Acquire => decide.acquire(request).await,
        }
    }
}

impl Body<'_> {
    async fn decide<D: Decide>(&self, decide: &D, ask: Ask) -> Result<(Verdict, Option<Lease>), Problem> {
        let domain = self.domain.as_ref().map_or("", Text::as_str);
        let cost = Tokens::whole(self.cost.as_ref().map_or(1, |cost| cost.0));
        let checked = match (&self.attributes, &self.descriptors) {
            (Some(Attributes(none)), None) if none.is_empty() && !domain.is_empty() => {
                Err(RequestFault::NoEntries { place: Place::Attributes })
            }
            (Some(Attributes(attributes)), None) => {
                let attributes: Vec<_> = attributes.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
                let request = Request { domain, subject: Subject::Attributes(&attributes), cost };
                ask.of(decide, &request).await
            }
            (None, Some(wire)) => {
                let entries: Vec<_> =
                    wire.iter().flatten().map(|Object(e)| (e.key.as_str(), e.value.as_str())).collect();
                let mut rest = &entries[..];
                let descriptor = |own: &Vec<Object<Entry<'_>>>| {
                    let (entries, others) = rest.split_at_checked(own.len()).unwrap_or_default();
                    rest = others;
                    Descriptor { entries, cost: None, limit: None }
                };
                let descriptors: Vec<_> = wire.iter().map(descriptor).collect();
                let request = Request { domain, subject: Subject::Descriptors(&descriptors), cost };
                ask.of(decide, &request).await
            }
            (Some(_), Some(_)) => {
                return Err(Problem::at("#/attributes", "stands beside `descriptors`; send one of them"));
            }
            (None, None) if domain.is_empty() => Err(RequestFault::EmptyDomain),
            (None, None) => Err(RequestFault::NoDescriptors),
        };
        checked.map_err(|fault| Problem::at(place(&fault), fault.to_string()))
    }
}

/// Where in the body a fault is.
fn place(fault: &RequestFault) -> String {
    let of = |place: &Place| match place {
        Place::Request => "#".to_owned(),
        Place::Attributes => "#/attributes".to_owned(),
        Place::Descriptor(index) => format!("#/descriptors/{index}"),
    };
    match fault {
        RequestFault::EmptyDomain | RequestFault::DomainTooLong { .. } => "#/domain".into(),
        RequestFault::NoDescriptors | RequestFault::TooManyDescriptors { .. } => "#/descriptors".into(),
        RequestFault::CostTooLarge { .. } => "#/cost".into(),
        RequestFault::NoEntries { place }
        | RequestFault::TooManyEntries { place, .. }
        | RequestFault::TooLarge { place, .. } => of(place),
        RequestFault::EmptyKey { place, entry } | RequestFault::DuplicateKey { place, entry } => {
            match place {
                Place::Descriptor(index) => format!("#/descriptors/{index}/{entry}/key"),
                // Members of an object have no numbers.
                Place::Attributes | Place::Request => of(place),
            }
        }
        RequestFault::TooManyCharges => "#".into(),
    }
}

/// A JSON object: a list of the values in the right order will not do (serde takes that for a struct, too).
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
            type Value = Object<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(Members(PhantomData))
    }
}

/// A cost as it was sent; whether it is in range is the limiter's to say.
struct Cost(i64);

impl<'de> Deserialize<'de> for Cost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Whole;
        impl Visitor<'_> for Whole {
            type Value = Cost;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number")
            }
            fn visit_i64<E: de::Error>(self, cost: i64) -> Result<Self::Value, E> {
                Ok(Cost(cost))
            }
            fn visit_u64<E: de::Error>(self, cost: u64) -> Result<Self::Value, E> {
                Ok(Cost(i64::try_from(cost).unwrap_or(i64::MAX)))
            }
        }
        deserializer.deserialize_i64(Whole)
    }
}

/// A flat map, in the order in which it was sent; a key that is there twice is the limiter's to refuse.
struct Attributes<'a>(Vec<(Text<'a>, Text<'a>)>);

impl<'de: 'a, 'a> Deserialize<'de> for Attributes<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Attributes<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Attributes(pairs))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// A string: borrowed from the body unless it has escapes.
struct Text<'a>(Cow<'a, str>);

impl Text<'_> {
    fn as_str(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Str;
        impl<'de> Visitor<'de> for Str {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Str)
    }
}

/// A JSON pointer as a URI fragment (RFC 6901, section 6).
fn pointer(path: &Path) -> String {
    let mut out = String::from("#");
    for segment in path {
        out.push('/');
        match segment {
            Segment::Seq { index } => drop(write!(out, "{index}")),
            Segment::Map { key } | Segment::Enum { variant: key } => {
                for byte in key.bytes() {
                    match byte {
                        b'~' => out.push_str("~0"),
                        b'/' => out.push_str("~1"),
                        b'-' | b'.' | b'_' => out.push(char::from(byte)),
                        _ if byte.is_ascii_alphanumeric() => out.push(char::from(byte)),
                        _ => drop(write!(out, "%{byte:02X}")),
                    }
                }
            }
            Segment::Unknown => {
                out.pop();
            }
        }
    }
    out
}

/// The answer: status, header fields, body.
fn response(verdict: &Verdict) -> Response<Full<Bytes>> {
    let mut body = Vec::with_capacity(64 + verdict.limits.len() * 192);
    // Writing to memory does not fail, and neither do these types.
    let _ = serde_json::to_writer(&mut body, &Answer(verdict));
    json(head(verdict), body)
}

/// Status and header fields with this body.
fn json(head: Response<Full<Bytes>>, body: Vec<u8>) -> Response<Full<Bytes>> {
    let mut response = head.map(|_| Full::new(Bytes::from(body)));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Status and header fields.
fn head(verdict: &Verdict) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.status_mut() =
        StatusCode::from_u16(verdict.status().code()).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
    let headers = response.headers_mut();
    headers.reserve(8);
    if let Some(fields) = verdict.fields() {
        let mut text = |name: &'static str, value: String| {
            if let Ok(value) = HeaderValue::try_from(value) {
                headers.insert(HeaderName::from_static(name), value);
            }
        };
        text(Fields::POLICY, fields.policy);
        text(Fields::STATE, fields.state);
        let mut number =
            |name: &'static str, n: u64| headers.insert(HeaderName::from_static(name), HeaderValue::from(n));
        number(Fields::X_LIMIT, fields.limit);
        number(Fields::X_REMAINING, fields.remaining);
        number(Fields::X_RESET, fields.reset);
        if let Some(seconds) = fields.retry_after {
            number(Fields::RETRY_AFTER, seconds);
        }
    }
    response
}

struct Answer<'a>(&'a Verdict);

impl Serialize for Answer<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(serde::Serialize)]
        struct Body<'a> {
            allowed: bool,
            limits: Limits<'a>,
        }
        Body { allowed: self.0.allowed, limits: Limits(&self.0.limits) }.serialize(serializer)
    }
}

struct Limits<'a>(&'a [LimitVerdict]);

impl Serialize for Limits<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(serde::Serialize)]
        struct Limit<'a> {
            policy: &'a str,
            mode: &'static str,
            allowed: bool,
            /// `null`: unlimited.
            limit: Option<u64>,
            remaining: Option<u64>,
            reset_ms: i64,
            /// 0: now. `null`: never.
            retry_after_ms: Option<i64>,
            reason: &'static str,
        }
        serializer.collect_seq(self.0.iter().map(|l| Limit {
            policy: &l.policy,
            mode: l.mode.name(),
            allowed: l.allowed,
            limit: (!l.unlimited).then_some(l.limit),
            remaining: (!l.unlimited).then_some(l.remaining),
            reset_ms: l.reset.ceil_millis(),
            retry_after_ms: if l.allowed { Some(0) } else { l.retry_after.map(|t| t.ceil_millis()) },
            reason: l.reason.name(),
        }))
    }
}
