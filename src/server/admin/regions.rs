//! `/v1/regions`: who is in the cluster.

use super::{Admin, ApplyError, refusal};
use crate::server::problem::Problem;
use crate::server::state::{RegionStep, RegionsState};
use axum::Json;
use axum::body::Bytes;
use axum::extract::{ConnectInfo, Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use serde::Deserialize;
use std::net::SocketAddr;

/// A change of one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionAction {
    /// It comes into the cluster, and follows the log without a vote.
    Add {
        /// Its peer listener.
        url: String,
        /// It is to have no part of any limit, and to serve nobody.
        witness: bool,
    },
    /// It leaves.
    Remove {
        /// The operator promises that its daemon has stopped for good.
        presume_dead: bool,
    },
    /// It gets a vote.
    Promote,
    /// It loses its vote.
    Demote,
    /// It is to lead.
    Lead,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Add {
    region: String,
    url: String,
    #[serde(default)]
    witness: bool,
}

pub(super) async fn list(State(admin): State<Admin>) -> Json<RegionsState> {
    Json(admin.source.regions())
}

pub(super) async fn add(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Json<RegionStep>, Problem> {
    admin.access.check(peer.ip(), &headers)?;
    let Add { region, url, witness } = serde_json::from_slice(&body).map_err(|fault| {
        let detail =
            format!("the body: {fault}; send `{{\"region\": \"NAME\", \"url\": \"https://HOST:PORT\"}}`");
        Problem::new(StatusCode::BAD_REQUEST, detail)
    })?;
    step(&admin, region, RegionAction::Add { url, witness }).await
}

pub(super) async fn remove(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path(region): Path<String>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
) -> Result<Json<RegionStep>, Problem> {
    admin.access.check(peer.ip(), &headers)?;
    let presume_dead = super::flag(&query, "presume_dead")?;
    step(&admin, region, RegionAction::Remove { presume_dead }).await
}

pub(super) async fn act(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Path((region, action)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Json<RegionStep>, Problem> {
    admin.access.check(peer.ip(), &headers)?;
    let action = match action.as_str() {
        "promote" => RegionAction::Promote,
        "demote" => RegionAction::Demote,
        "lead" => RegionAction::Lead,
        other => {
            let detail = format!("`{other}` is nothing to do to a region; promote, demote and lead are");
            return Err(Problem::new(StatusCode::NOT_FOUND, detail));
        }
    };
    step(&admin, region, action).await
}

async fn step(admin: &Admin, region: String, action: RegionAction) -> Result<Json<RegionStep>, Problem> {
    let step: Result<RegionStep, ApplyError> = admin.source.change_region(region, action).await;
    step.map(Json).map_err(|error| refusal(&error))
}
