//! Trace spans: which requests have them, and how they hang together.
//!
//! A request is traced if its caller traces it (W3C Trace Context, `traceparent` with the sampled flag), and else by chance,
//! as `telemetry.sampling` says. For any other request no span is made at all: [`request`] and [`child`] return one that is
//! nothing. Spans carry no values of descriptors.
//!
//! A lease that a traced request waits for belongs to its trace, across regions: the bucket's tally takes a [`Cause`] to the slow
//! loop, `traceparent` takes it over the peer wire to the leader. The replicated log knows nothing of it.

use http::HeaderMap;
use opentelemetry::Context;
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState};
use std::str::FromStr as _;
use std::sync::atomic::{AtomicU32, Ordering};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// The target of all spans, and of nothing else.
pub const TARGET: &str = "quorate::trace";
/// The header that carries the context (W3C Trace Context, section 3.2), over HTTP and as gRPC metadata.
pub const PARENT_HEADER: &str = "traceparent";
/// The header that carries vendors' own data along (section 3.3).
const STATE_HEADER: &str = "tracestate";
/// More than this of it is left out (section 3.3.1.5 asks for 512 at least).
const STATE_MAX: usize = 512;
/// The most traces that one step taken for many requests is part of.
pub const CAUSES_MAX: usize = 8;

/// Tracing is off.
const OFF: u32 = u32::MAX;
/// All requests.
pub const ALL_PPM: u32 = 1_000_000;

/// How many requests in a million are traced that no caller decides about; [`OFF`] at first.
static SAMPLING: AtomicU32 = AtomicU32::new(OFF);

/// Spans are made from now on. (One process has one setting.)
pub(super) fn turn_on(sampling_ppm: u32) {
    SAMPLING.store(sampling_ppm.min(ALL_PPM), Ordering::Relaxed);
}

/// Are there traces at all?
#[must_use]
pub fn is_on() -> bool {
    SAMPLING.load(Ordering::Relaxed) != OFF
}

/// Makes a span of the room's own.
///
/// `span!("name", field = value, ...)`; it is a child of the current span.
#[macro_export]
macro_rules! trace_span {
    ($name:literal $(, $($fields:tt)*)?) => {
        tracing::info_span!(target: $crate::telemetry::trace::TARGET, $name $(, $($fields)*)?)
    };
}

/// A span that something happened in: what follows from it, elsewhere or later, belongs to the same trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause(SpanContext);

/// The span of a request that came in with these headers: `make` makes it, if the request is traced.
pub fn request(headers: &HeaderMap, make: impl FnOnce() -> Span) -> Span {
    let sampling = SAMPLING.load(Ordering::Relaxed);
    if sampling == OFF {
        return Span::none();
    }
    match parent(headers) {
        Some(parent) if parent.0.is_sampled() => within(&parent, make()),
        Some(_) => Span::none(),
        None if by_chance(sampling) => make(),
        None => Span::none(),
    }
}

/// The span of what a peer asked for with these headers, if it is part of a trace there.
pub fn from_peer(headers: &HeaderMap, make: impl FnOnce() -> Span) -> Span {
    if !is_on() {
        return Span::none();
    }
    match parent(headers) {
        Some(parent) if parent.0.is_sampled() => within(&parent, make()),
        _ => Span::none(),
    }
}

/// The span of a step of what is traced now, if anything is.
pub fn child(make: impl FnOnce() -> Span) -> Span {
    if is_traced() { make() } else { Span::none() }
}

/// The span of a step that is taken for all of these; if there are none, it is traced by chance.
pub fn caused(causes: &[Cause], make: impl FnOnce() -> Span) -> Span {
    let sampling = SAMPLING.load(Ordering::Relaxed);
    if sampling == OFF {
        return Span::none();
    }
    let Some((first, others)) = causes.split_first() else {
        return if by_chance(sampling) { make() } else { Span::none() };
    };
    let span = within(first, make());
    for other in others.iter().take(CAUSES_MAX) {
        span.add_link(other.0.clone());
    }
    span
}

/// The span of a step that this brought about.
pub fn because_of(cause: &Cause, make: impl FnOnce() -> Span) -> Span {
    if is_on() { within(cause, make()) } else { Span::none() }
}

/// What is traced now, for what follows from it.
#[must_use]
pub fn cause() -> Option<Cause> {
    is_traced().then(|| cause_of(&Span::current())).flatten()
}

/// The same, of another span.
#[must_use]
pub fn cause_of(span: &Span) -> Option<Cause> {
    if span.is_disabled() {
        return None;
    }
    let context = span.context().span().span_context().clone();
    context.is_sampled().then_some(Cause(context))
}

/// The header that tells another region of what is traced now.
#[must_use]
pub fn traceparent() -> Option<String> {
    let Cause(context) = cause()?;
    Some(format!("00-{}-{}-{:02x}", context.trace_id(), context.span_id(), context.trace_flags().to_u8()))
}

/// Is what happens now part of a trace?
#[must_use]
pub fn is_traced() -> bool {
    is_on() && Span::current().metadata().is_some_and(|metadata| metadata.target() == TARGET)
}

fn within(cause: &Cause, span: Span) -> Span {
    // Without the layer there is nobody to set it for.
    let _ = span.set_parent(Context::new().with_remote_span_context(cause.0.clone()));
    span
}

fn by_chance(sampling_ppm: u32) -> bool {
    sampling_ppm > 0 && rand::random_range(0..ALL_PPM) < sampling_ppm
}

/// The caller's span. What is malformed counts as not there: the trace starts here (section 2.2 of the recommendation).
fn parent(headers: &HeaderMap) -> Option<Cause> {
    let mut values = headers.get_all(PARENT_HEADER).iter();
    let (only, None) = (values.next()?, values.next()) else { return None };
    let (trace_id, span_id, flags) = read_parent(only.to_str().ok()?.trim())?;
    let state = if flags.is_sampled() { state(headers) } else { TraceState::default() };
    Some(Cause(SpanContext::new(trace_id, span_id, flags, true, state)))
}

/// `VERSION-TRACE_ID-PARENT_ID-FLAGS` in lower-case hex; a later version may have more behind that (section 3.2.2).
fn read_parent(text: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let mut parts = text.split('-');
    let hex = |part: Option<&str>, digits: usize| {
        let part = part?;
        let good = part.len() == digits && part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        good.then(|| part.to_owned())
    };
    let version = hex(parts.next(), 2)?;
    let trace_id = TraceId::from_hex(&hex(parts.next(), 32)?).ok()?;
    let span_id = SpanId::from_hex(&hex(parts.next(), 16)?).ok()?;
    let flags = u8::from_str_radix(&hex(parts.next(), 2)?, 16).ok()?;
    let known = version == "00" && parts.next().is_none() || version != "00" && version != "ff";
    let valid = trace_id != TraceId::INVALID && span_id != SpanId::INVALID;
    // Only the sampled flag means anything here.
    (known && valid).then(|| (trace_id, span_id, TraceFlags::new(flags & TraceFlags::SAMPLED.to_u8())))
}

/// Several headers are one list (section 3.3.1).
fn state(headers: &HeaderMap) -> TraceState {
    let all: Vec<&str> =
        headers.get_all(STATE_HEADER).iter().filter_map(|value| value.to_str().ok()).collect();
    let all = all.join(",");
    if all.is_empty() || all.len() > STATE_MAX {
        return TraceState::default();
    }
    TraceState::from_str(&all).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

    #[test]
    fn traceparent_is_read_as_w3c_says() {
        let read =
            |text: &str| read_parent(text).map(|(t, s, f)| (t.to_string(), s.to_string(), f.is_sampled()));
        let good = |sampled| Some((TRACE.to_owned(), "b7ad6b7169203331".to_owned(), sampled));
        assert_eq!(read(&format!("00-{TRACE}-b7ad6b7169203331-01")), good(true));
        assert_eq!(read(&format!("00-{TRACE}-b7ad6b7169203331-00")), good(false));
        assert_eq!(read(&format!("00-{TRACE}-b7ad6b7169203331-03")), good(true), "other flags are left out");
        assert_eq!(read(&format!("42-{TRACE}-b7ad6b7169203331-01-more")), good(true), "a later version");
        for bad in [
            "",
            "00",
            &format!("00-{TRACE}-b7ad6b7169203331"),
            &format!("00-{TRACE}-b7ad6b7169203331-01-more"),
            &format!("ff-{TRACE}-b7ad6b7169203331-01"),
            &format!("00-{TRACE}-b7ad6b716920333-01"),
            &format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase()),
            &format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)),
            &format!("00-{TRACE}-0000000000000000-01"),
            &format!("00-{TRACE}-b7ad6b7169203331-0g"),
        ] {
            assert_eq!(read(bad), None, "{bad}");
        }
    }

    #[test]
    fn two_parents_are_none_and_a_large_state_is_left_out() {
        let mut headers = HeaderMap::new();
        let value = format!("00-{TRACE}-b7ad6b7169203331-01");
        headers.append(PARENT_HEADER, value.parse().unwrap());
        headers.append(STATE_HEADER, "a=1,b=2".parse().unwrap());
        assert_eq!(parent(&headers).unwrap().0.trace_state().header(), "a=1,b=2");
        headers.append(STATE_HEADER, format!("c={}", "x".repeat(STATE_MAX)).parse().unwrap());
        assert_eq!(parent(&headers).unwrap().0.trace_state().header(), "");
        headers.append(PARENT_HEADER, value.parse().unwrap());
        assert_eq!(parent(&headers), None);
    }

    #[test]
    fn nothing_is_made_while_tracing_is_off() {
        let never = || panic!("a span was made");
        assert!(request(&HeaderMap::new(), never).is_none());
        assert!(child(never).is_none());
        assert!(caused(&[], never).is_none());
        assert_eq!(traceparent(), None);
    }
}
