//! `/v1/log-filter`: which log lines this process writes, until SIGHUP or its end.

use super::Admin;
use crate::server::problem::Problem;
use crate::telemetry::{self, TelemetryError};
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, StatusCode};
use std::net::SocketAddr;

/// The longest filter, in bytes.
const FILTER_MAX: usize = 4_096;

pub(super) async fn get() -> Result<String, Problem> {
    telemetry::log_filter().map(line).ok_or_else(|| problem(&TelemetryError::NotSet))
}

pub(super) async fn put(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    filter: String,
) -> Result<String, Problem> {
    admin.access.check(peer.ip(), &headers)?;
    let filter = filter.trim();
    if filter.is_empty() || filter.len() > FILTER_MAX {
        let detail = format!("send a filter of 1 to {FILTER_MAX} bytes, like `info,quorate::raft=debug`");
        return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
    }
    telemetry::set_log_filter(filter).map_err(|error| problem(&error))?;
    tracing::info!(filter, "the log filter was changed through the admin listener");
    Ok(line(filter.to_owned()))
}

fn line(mut filter: String) -> String {
    filter.push('\n');
    filter
}

fn problem(error: &TelemetryError) -> Problem {
    let status = match error {
        TelemetryError::Filter { .. } => StatusCode::BAD_REQUEST,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    Problem::new(status, error.to_string())
}
