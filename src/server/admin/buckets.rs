//! `POST /v1/buckets/{policy}/reset`: a bucket is full again, in every region.

use super::{Admin, ApplyError, BucketError, refusal};
use crate::server::problem::Problem;
use crate::server::state::BucketReset;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{ConnectInfo, Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use serde::Deserialize;
use std::net::SocketAddr;

/// The longest reason, in bytes.
pub const REASON_MAX: usize = 400;

/// What an operator decides about a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResetRequest {
    /// The policy's name.
    pub policy: String,
    /// The descriptor's entries.
    pub values: Vec<(String, String)>,
    /// Who asks for it, for the logs.
    pub by: String,
    /// Why; not empty.
    pub reason: String,
}

/// Why a bucket was not reset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResetError {
    /// There is no such bucket.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// It was not done, or nobody knows.
    #[error(transparent)]
    Apply(#[from] ApplyError),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    reason: String,
}

pub(super) async fn reset(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path(policy): Path<String>,
    Query(values): Query<Vec<(String, String)>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Json<BucketReset>, Problem> {
    admin.access.check(peer.ip(), &headers)?;
    let bad = |what: String| Problem::new(StatusCode::BAD_REQUEST, what);
    let Body { reason } = serde_json::from_slice(&body)
        .map_err(|fault| bad(format!("the body: {fault}; send `{{\"reason\": \"why\"}}`")))?;
    let reason: String = reason.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if reason.is_empty() || reason.len() > REASON_MAX {
        return Err(bad(format!("reason: has {} bytes; say why in 1 to {REASON_MAX}", reason.len())));
    }
    let with = if admin.access.token.load().is_some() { " with the admin token" } else { "" };
    let by = format!("{}{with}", peer.ip().to_canonical());
    match admin.source.reset_bucket(ResetRequest { policy, values, by, reason }).await {
        Ok(reset) => Ok(Json(reset)),
        Err(ResetError::Bucket(error @ BucketError::NoPolicy(_))) => {
            Err(Problem::new(StatusCode::NOT_FOUND, error.to_string()))
        }
        Err(ResetError::Bucket(error @ BucketError::NoMatch(_))) => Err(bad(error.to_string())),
        Err(ResetError::Apply(error)) => Err(refusal(&error)),
    }
}
