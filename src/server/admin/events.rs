//! `/v1/events`: server-sent events.

use super::Admin;
use crate::server::problem::Problem;
use crate::server::state::State as DaemonState;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use serde_json::Value;
use std::convert::Infallible;

/// What those who watch are told of a state: all of it but what only grows, what is told as events, and the past (which is in
/// `/v1/state`).
#[must_use]
pub fn document(state: &DaemonState) -> Value {
    let mut document = serde_json::to_value(state).unwrap_or_default();
    if let Some(fields) = document.as_object_mut() {
        for untold in ["events", "history", "buckets", "buckets_more", "uptime_ms"] {
            fields.remove(untold);
        }
        let policies = fields.get_mut("policies").and_then(Value::as_array_mut);
        for policy in policies.into_iter().flatten().filter_map(Value::as_object_mut) {
            policy.remove("admitted");
            policy.remove("denied");
        }
    }
    document
}

pub(super) async fn stream(State(admin): State<Admin>, headers: HeaderMap) -> Result<Response, Problem> {
    let feed = admin.source.feed();
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let Some(stream) = feed.read(last) else {
        let detail = format!("{} consoles are open on this daemon already; close one", super::STREAMS_MAX);
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail));
    };
    // Nothing is published while nobody reads.
    feed.publish(document(&admin.source.state().await));
    let fields = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-store"),
        // nginx would keep events back until it has a page of them.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    let body = Body::from_stream(stream.map(Ok::<Bytes, Infallible>));
    Ok((fields, body).into_response())
}
