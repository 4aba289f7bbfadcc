//! Decisions over gRPC: `envoy.service.ratelimit.v3.RateLimitService`, with health and reflection beside it.
//!
//! A denial because the store is out of reach (`on_store_failure: deny`) is answered OVER_LIMIT, with the header
//! `x-ratelimit-reason: store_unavailable`. A gRPC error would be the plainer word, but Envoy lets requests through on
//! errors unless `failure_mode_deny` is set, and whoever wrote `deny` asked for the opposite. For the same reason a
//! cost beyond [`COST_MAX`] is taken as [`COST_MAX`], not refused: costs often come from the very callers that are to
//! be limited.

mod reflection;
mod unary;

use super::callers::Connected;
use super::{BODY_MAX, Decide, ServerError};
use crate::limiter::newcomers::Caller;
use crate::quota::amount::{Micros, Tokens};
use crate::quota::matching::{COST_MAX, Descriptor, Request, Subject};
use crate::quota::policy::{TokenBucket, Unit, Window};
use crate::quota::verdict::{DescriptorVerdict, Fields, LimitVerdict, Status as Kind, Verdict};
use crate::telemetry::metrics::{Answered, Protocol};
use crate::telemetry::{Metrics, trace};
use crate::trace_span;
use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as WireUnit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::SERVICE_NAME;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::envoy::r#type::v3::RateLimitUnit;
use envoy_types::pb::google::protobuf as wkt;
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
/// Says why a request was denied, where it was not for the limit.
const REASON_HEADER: &str = "x-ratelimit-reason";
/// An answer that is as late as the caller's deadline is too late: this much of the time is kept for the way back ...
const MARGIN_PART: u32 = 8;
/// ... but no more than this.
const MARGIN_MAX: Duration = Duration::from_millis(50);

/// Serves the connections of the gRPC listener.
#[derive(Clone, Debug)]
pub struct Grpc<D> {
    decisions: Arc<Decisions<D>>,
    rest: Routes,
    connected: Option<Connected>,
}

/// The body of an answer: ours, or another service's.
type ReplyBody = Either<unary::Reply, tonic::body::Body>;

impl<D: Decide> Grpc<D> {
    /// Decisions by `decide`; everything else goes to `rest` (see [`side_services`]).
    #[must_use]
    pub fn new(decide: D, rest: Routes, timeout: Duration, metrics: Arc<Metrics>) -> Self {
        Self { decisions: Arc::new(Decisions { decide, timeout, metrics }), rest, connected: None }
    }

    /// The same for one connection.
    #[must_use]
    pub fn of(self, connected: Connected) -> Self {
        Self { connected: Some(connected), ..self }
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
            let decisions = self.decisions.on_behalf_of(caller);
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
    decisions.decide(&message, None).await.map(|response| unary::encode(&response))
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
                Ok(response) if response.overall_code == code(true) => Answered::Allowed,
                Ok(_) => Answered::Denied,
                Err(_) => Answered::Refused,
            };
            self.metrics.decided(Protocol::Grpc, answer, began.elapsed());
            unary::reply(result.map(|response| unary::encode(&response)))
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
    ) -> Result<RateLimitResponse, Status> {
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
        Ok(response(&verdict, descriptors.len()))
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
    timeout.saturating_sub((timeout / MARGIN_PART).min(MARGIN_MAX))
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

/// The answer on the wire: as many statuses as there were descriptors.
fn response(verdict: &Verdict, descriptors: usize) -> RateLimitResponse {
    let unmatched = DescriptorVerdict { allowed: verdict.allowed, limit: None };
    let each = (0..descriptors).map(|i| verdict.descriptors.get(i).copied().unwrap_or(unmatched));
    RateLimitResponse {
        overall_code: code(verdict.allowed),
        statuses: each.map(|d| status(&d, d.limit.and_then(|i| verdict.limits.get(i)))).collect(),
        response_headers_to_add: headers(verdict),
        dynamic_metadata: verdict.binding().map(metadata),
        ..RateLimitResponse::default()
    }
}

fn code(allowed: bool) -> i32 {
    if allowed { Code::Ok.into() } else { Code::OverLimit.into() }
}

fn status(descriptor: &DescriptorVerdict, limit: Option<&LimitVerdict>) -> DescriptorStatus {
    let code = code(descriptor.allowed);
    match limit {
        None => DescriptorStatus { code, ..DescriptorStatus::default() },
        Some(limit) if limit.unlimited => {
            DescriptorStatus { code, limit_remaining: u32::MAX, ..DescriptorStatus::default() }
        }
        Some(limit) => DescriptorStatus {
            code,
            current_limit: Some(RateLimit {
                name: limit.policy.to_string(),
                requests_per_unit: saturating(limit.limit),
                unit: limit.per.map_or(WireUnit::Unknown, unit).into(),
            }),
            limit_remaining: saturating(limit.remaining),
            // A denial that never ends has no time to give.
            duration_until_reset: (limit.allowed || limit.retry_after.is_some())
                .then(|| duration(limit.reset)),
            quota: None,
        },
    }
}

fn saturating(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Envoy has no name for a window of any other length.
fn unit(window: Window) -> WireUnit {
    let seconds = window.seconds();
    let same = |unit: &Unit| window == Window::Calendar(*unit) || unit.seconds() == seconds;
    let Some(unit) = Unit::ALL.into_iter().find(same) else { return WireUnit::Unknown };
    match unit {
        Unit::Second => WireUnit::Second,
        Unit::Minute => WireUnit::Minute,
        Unit::Hour => WireUnit::Hour,
        Unit::Day => WireUnit::Day,
        Unit::Week => WireUnit::Week,
        Unit::Month => WireUnit::Month,
        Unit::Year => WireUnit::Year,
    }
}

fn duration(time: Micros) -> wkt::Duration {
    let time = time.to_duration();
    wkt::Duration {
        seconds: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(time.subsec_nanos()).unwrap_or(0),
    }
}

/// The same fields as over HTTP.
fn headers(verdict: &Verdict) -> Vec<HeaderValue> {
    let header = |key: &str, value: String| HeaderValue { key: key.into(), value, raw_value: Vec::new() };
    let mut headers = Vec::with_capacity(6);
    if let Some(fields) = verdict.fields() {
        headers.push(header(Fields::POLICY, fields.policy));
        headers.push(header(Fields::STATE, fields.state));
        headers.push(header(Fields::X_LIMIT, fields.limit.to_string()));
        headers.push(header(Fields::X_REMAINING, fields.remaining.to_string()));
        headers.push(header(Fields::X_RESET, fields.reset.to_string()));
        headers.extend(fields.retry_after.map(|s| header(Fields::RETRY_AFTER, s.to_string())));
    }
    if verdict.status() == Kind::Unavailable {
        let why = if verdict.undecided { "no_policies" } else { "store_unavailable" };
        headers.push(header(REASON_HEADER, why.into()));
    }
    headers
}

/// The limit that binds most, for Envoy's access logs and later filters.
fn metadata(limit: &LimitVerdict) -> wkt::Struct {
    use wkt::value::Kind::{BoolValue, NumberValue, StringValue};
    let number = |n: i64| NumberValue(n as f64);
    let mut fields = vec![
        ("policy", StringValue(limit.policy.to_string())),
        ("mode", StringValue(limit.mode.name().into())),
        ("allowed", BoolValue(limit.allowed)),
        ("reason", StringValue(limit.reason.name().into())),
    ];
    if !limit.unlimited {
        fields.push(("remaining", number(i64::try_from(limit.remaining).unwrap_or(i64::MAX))));
        fields.push(("reset_ms", number(limit.reset.ceil_millis())));
    }
    let fields = fields.into_iter().map(|(key, kind)| (key.to_owned(), wkt::Value { kind: Some(kind) }));
    wkt::Struct { fields: fields.collect() }
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
        assert_eq!(within(Duration::from_millis(16)), Duration::from_millis(14));
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
