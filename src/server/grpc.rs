//! Decisions over gRPC: `envoy.service.ratelimit.v3.RateLimitService`, with health and reflection beside it.
//!
//! A denial because the store is out of reach (`on_store_failure: deny`) is answered OVER_LIMIT, with the header
//! `x-ratelimit-reason: store_unavailable`. A gRPC error would be the plainer word, but Envoy lets requests through on
//! errors unless `failure_mode_deny` is set, and whoever wrote `deny` asked for the opposite. For the same reason a
//! cost beyond [`COST_MAX`] is taken as [`COST_MAX`], not refused: costs often come from the very callers that are to
//! be limited.

mod answer;
mod reflection;
mod unary;

use super::callers::Connected;
use super::{BODY_MAX, Decide, ServerError};
use crate::limiter::newcomers::Caller;
use crate::quota::amount::Tokens;
use crate::quota::matching::{COST_MAX, Descriptor, Request, Subject};
use crate::quota::policy::{TokenBucket, Unit};
use crate::quota::verdict::Verdict;
use crate::telemetry::metrics::{Answered, Protocol};
use crate::telemetry::{Metrics, trace};
use crate::trace_span;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::SERVICE_NAME;
use envoy_types::pb::envoy::r#type::v3::RateLimitUnit;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::HeaderMap;
use http_body_util::Either;
use hyper::body::Incoming;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Status;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tower::Service as _;
use tracing::Instrument as _;
use tracing::field::Empty;

/// The only method of the service.
const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// The service of health checks.
const HEALTH: &str = "/grpc.health.v1.Health/";
/// An answer that is as late as the caller's deadline is too late: this much of the time is kept for the way back ...
const MARGIN_PART: u32 = 8;
/// ... but no less than this (of very little time, half), since the way back waits for a turn on a busy machine ...
const MARGIN_MIN: Duration = Duration::from_millis(5);
/// ... and no more than this.
const MARGIN_MAX: Duration = Duration::from_millis(50);

/// Serves the connections of the gRPC listener.
#[derive(Clone, Debug)]
pub struct Grpc<D> {
    /// For the caller that the connection alone tells.
    decisions: Arc<Decisions<D>>,
    caller: Caller,
    rest: Routes,
    connected: Option<Connected>,
}

/// The body of an answer: ours, or another service's.
type ReplyBody = Either<unary::Reply, tonic::body::Body>;

impl<D: Decide> Grpc<D> {
    /// Decisions by `decide`; everything else goes to `rest` (see [`side_services`]).
    #[must_use]
    pub fn new(decide: D, rest: Routes, timeout: Duration, metrics: Arc<Metrics>) -> Self {
        let decisions = Arc::new(Decisions { decide, timeout, metrics });
        Self { decisions, caller: Caller::ANYONE, rest, connected: None }
    }

    /// The same for one connection.
    #[must_use]
    pub fn of(self, connected: Connected) -> Self {
        let caller = connected.caller();
        let decisions = Arc::new(self.decisions.on_behalf_of(caller));
        Self { decisions, caller, connected: Some(connected), ..self }
    }
}

impl<D: Decide> hyper::service::Service<http::Request<Incoming>> for Grpc<D> {
    type Response = http::Response<ReplyBody>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        let path = request.uri().path();
        let caller = match self.connected.as_ref().map(|c| c.who(request.headers())) {
            None => Caller::ANYONE,
            Some(Ok(caller)) => caller,
            // Probes have no tokens.
            Some(Err(_)) if path.starts_with(HEALTH) => Caller::ANYONE,
            Some(Err(why)) => {
                self.decisions.metrics.unauthenticated(Protocol::Grpc);
                let refused = unary::reply(Err(Status::unauthenticated(why))).map(Either::Left);
                return std::future::ready(Ok(refused)).boxed();
            }
        };
        if path == METHOD {
            let decisions = if caller == self.caller {
                Arc::clone(&self.decisions)
            } else {
                Arc::new(self.decisions.on_behalf_of(caller))
            };
            async move { Ok(decisions.call(request).await.map(Either::Left)) }.boxed()
        } else {
            // It is ready at all times.
            let answer = self.rest.clone().call(request);
            async move { Ok(answer.await?.map(Either::Right)) }.boxed()
        }
    }
}

/// Health, which follows `ready` until `stopping`, and reflection.
///
/// # Errors
/// [`ServerError::Reflection`]
pub async fn side_services(
    mut ready: watch::Receiver<bool>,
    mut stopping: watch::Receiver<bool>,
) -> Result<Routes, ServerError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    let descriptors = reflection::descriptors();
    let configure = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_file_descriptor_set(descriptors.clone())
    };
    let routes =
        Routes::new(health).add_service(configure().build_v1()?).add_service(configure().build_v1alpha()?);
    let report = async move |serving: bool| {
        let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.set_service_status("", status).await;
        reporter.set_service_status(SERVICE_NAME, status).await;
    };
    report(*ready.borrow_and_update()).await;
    tokio::spawn(async move {
        loop {
            tokio::select! {
                biased;
                _ = stopping.wait_for(|stop| *stop) => break,
                changed = ready.changed() => if changed.is_err() { break },
            }
            let now = *ready.borrow_and_update();
            report(now).await;
        }
        report(false).await;
    });
    Ok(routes.prepare())
}

/// Reads a message and decides about it, whatever it is.
#[cfg(any(test, fuzzing))]
pub(crate) async fn read_any<D: Decide>(bytes: &[u8], decide: &D) -> Result<Vec<u8>, Status> {
    let message: RateLimitRequest = unary::decode(bytes::Bytes::copy_from_slice(bytes), BODY_MAX)?;
    let (timeout, metrics) = (Duration::from_secs(1), Arc::new(Metrics::new("fuzz")));
    let decisions = Decisions { decide: decide.clone(), timeout, metrics };
    let verdict = decisions.decide(&message, None).await?;
    Ok(answer::encode(&verdict, message.descriptors.len()))
}

/// What is behind the method.
#[derive(Debug)]
struct Decisions<D> {
    decide: D,
    timeout: Duration,
    metrics: Arc<Metrics>,
}

impl<D: Decide> Decisions<D> {
    fn on_behalf_of(&self, caller: Caller) -> Self {
        let (timeout, metrics) = (self.timeout, Arc::clone(&self.metrics));
        Self { decide: self.decide.on_behalf_of(caller), timeout, metrics }
    }

    async fn call(&self, request: http::Request<Incoming>) -> http::Response<unary::Reply> {
        let caller = timeout_of(request.headers());
        let span = trace::request(request.headers(), || {
            // Names as in OpenTelemetry's semantic conventions for RPC.
            trace_span!(
                "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
                "otel.kind" = "server",
                "rpc.system" = "grpc",
                "rpc.service" = SERVICE_NAME,
                "rpc.method" = "ShouldRateLimit",
                domain = Empty,
                allowed = Empty,
                policy = Empty,
                reason = Empty,
            )
        });
        let limit = caller.map_or(self.timeout, |t| t.min(self.timeout));
        let answer = async {
            let message = match unary::receive(request, BODY_MAX).await {
                Ok(message) => message,
                Err(response) => return response,
            };
            let began = Instant::now();
            let result = self.decide(&message, caller.map(within)).await;
            let answer = match &result {
                Ok(verdict) if verdict.allowed => Answered::Allowed,
                Ok(_) => Answered::Denied,
                Err(_) => Answered::Refused,
            };
            self.metrics.decided(Protocol::Grpc, answer, began.elapsed());
            unary::reply(result.map(|verdict| answer::encode(&verdict, message.descriptors.len())))
        };
        tokio::time::timeout(limit, answer.instrument(span)).await.unwrap_or_else(|_| {
            self.metrics.timed_out(Protocol::Grpc);
            unary::reply(Err(Status::deadline_exceeded("no decision within the caller's deadline")))
        })
    }

    async fn decide(
        &self,
        message: &RateLimitRequest,
        deadline: Option<Duration>,
    ) -> Result<Verdict, Status> {
        let refused = |status: Status| {
            self.metrics.bad_request(Protocol::Grpc);
            status
        };
        let wire = &message.descriptors;
        let entries: Vec<_> =
            wire.iter().flat_map(|d| &d.entries).map(|e| (e.key.as_str(), e.value.as_str())).collect();
        let descriptors = descriptors(message, &entries).map_err(refused)?;
        let cost = cost(u64::from(message.hits_addend.max(1)), false);
        let request = Request { domain: &message.domain, subject: Subject::Descriptors(&descriptors), cost };
        let verdict = self.decide.check(&request, deadline).await;
        let verdict = verdict.map_err(|fault| refused(Status::invalid_argument(fault.to_string())))?;
        super::describe(&message.domain, &verdict);
        Ok(verdict)
    }
}

/// The caller's deadline, from the `grpc-timeout` header: at most 8 digits and a unit (gRPC over HTTP/2, "Timeout").
/// What cannot be read counts as none.
fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(n * 3_600)),
        "M" => Some(Duration::from_secs(n * 60)),
        "S" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_millis(n)),
        "u" => Some(Duration::from_micros(n)),
        "n" => Some(Duration::from_nanos(n)),
        _ => None,
    }
}

/// How long a decision may take so that its answer still reaches a caller who waits this long.
fn within(timeout: Duration) -> Duration {
    timeout.saturating_sub((timeout / MARGIN_PART).clamp(MARGIN_MIN, MARGIN_MAX).min(timeout / 2))
}

/// The request's descriptors; `entries` are those of all of them.
fn descriptors<'a>(
    message: &RateLimitRequest,
    mut entries: &'a [(&'a str, &'a str)],
) -> Result<Vec<Descriptor<'a>>, Status> {
    let descriptor = |(index, wire): (usize, &RateLimitDescriptor)| {
        let limit = match wire.limit.as_ref().map(limit_override) {
            Some(None) => {
                let what = "is none of SECOND (1) to YEAR (6); name the unit";
                return Err(Status::invalid_argument(format!("descriptors[{index}].limit.unit {what}")));
            }
            Some(limit) => limit,
            None => None,
        };
        let hits = wire.hits_addend.as_ref().map(|h| h.value);
        let own = match (hits, wire.is_negative_hits) {
            (Some(hits), negative) => Some(cost(hits, negative)),
            (None, true) => Some(cost(u64::from(message.hits_addend.max(1)), true)),
            (None, false) => None,
        };
        let (mine, rest) = entries.split_at_checked(wire.entries.len()).unwrap_or_default();
        entries = rest;
        Ok(Descriptor { entries: mine, cost: own, limit })
    };
    message.descriptors.iter().enumerate().map(descriptor).collect()
}

/// `None`: the unit is not one.
fn limit_override(wire: &RateLimitOverride) -> Option<TokenBucket> {
    let per = match RateLimitUnit::try_from(wire.unit).ok()? {
        RateLimitUnit::Unknown => return None,
        RateLimitUnit::Second => Unit::Second,
        RateLimitUnit::Minute => Unit::Minute,
        RateLimitUnit::Hour => Unit::Hour,
        RateLimitUnit::Day => Unit::Day,
        RateLimitUnit::Month => Unit::Month,
        RateLimitUnit::Year => Unit::Year,
    };
    let amount = u64::from(wire.requests_per_unit);
    Some(TokenBucket { amount, per, burst: amount })
}

fn cost(hits: u64, negative: bool) -> Tokens {
    let cost = i64::try_from(hits).map_or(COST_MAX, Tokens::whole).min(COST_MAX);
    if negative { -cost } else { cost }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeouts() {
        let timeout = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            timeout_of(&headers)
        };
        assert_eq!(timeout("20m"), Some(Duration::from_millis(20)));
        assert_eq!(timeout("99999999H"), Some(Duration::from_secs(99_999_999 * 3_600)));
        assert_eq!(timeout("1500u"), Some(Duration::from_micros(1_500)));
        for bad in ["", "m", "20", "-5m", "123456789m", "1.5S", "20ms"] {
            assert_eq!(timeout(bad), None, "{bad}");
        }
        assert_eq!(within(Duration::from_millis(4)), Duration::from_millis(2));
        assert_eq!(within(Duration::from_millis(20)), Duration::from_millis(15));
        assert_eq!(within(Duration::from_millis(80)), Duration::from_millis(70));
        assert_eq!(within(Duration::from_secs(1)), Duration::from_millis(950));
    }

    #[test]
    fn costs_saturate() {
        assert_eq!(cost(0, false), Tokens::ZERO);
        assert_eq!(cost(7, true), Tokens::whole(-7));
        assert_eq!(cost(u64::MAX, false), COST_MAX);
        assert_eq!(cost(u64::MAX, true), -COST_MAX);
    }
}
