//! The admin listener: health, readiness, metrics, state, events, policies, regions, buckets, log filter, and the console.

mod buckets;
mod console;
mod events;
mod feed;
mod log_filter;
mod regions;

pub use buckets::{ResetError, ResetRequest};
pub use events::document;
pub use feed::{Feed, STREAMS_MAX};
pub use regions::RegionAction;

use super::callers::{CallerTls, bearer};
use super::listen::{Accepted, Acceptor, ConnectionLimits};
use super::problem::{Fault, Problem};
use super::state::{
    AppliedPolicies, BucketReset, BucketView, NotReady, RegionStep, RegionsState, State as DaemonState,
};
use crate::config::Secret;
use crate::telemetry::metrics::Protocol;
use arc_swap::ArcSwapOption;
use axum::extract::{ConnectInfo, Path, Query, State};
use axum::http::{HeaderMap, HeaderValue, Request, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use futures::future::BoxFuture;
use http_body_util::BodyExt as _;
use hyper_util::service::TowerToHyperService;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// The largest policy file, in bytes.
pub const POLICIES_MAX: usize = 4 * 1024 * 1024;
/// Connections at once.
const CONNECTIONS_MAX: usize = 256;
/// How long a request may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// How long requests in flight may still take when the server stops.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// What the admin listener shows and does; the daemon implements it.
pub trait AdminSource: Send + Sync + 'static {
    /// What keeps the daemon from being ready; empty: it is.
    fn not_ready(&self) -> Vec<String>;

    /// Does it vote, and serve nobody?
    fn is_witness(&self) -> bool {
        false
    }

    /// All metrics, fresh, as text.
    ///
    /// # Errors
    /// They could not be written: a bug.
    fn metrics(&self, format: MetricsFormat) -> Result<String, std::fmt::Error>;

    /// Everything that the console shows.
    fn state(&self) -> BoxFuture<'_, DaemonState>;

    /// The version of the policies in force, and they themselves, as YAML.
    fn policies(&self) -> (u64, String);

    /// Puts policies in force, all or nothing.
    fn apply(&self, change: PolicyChange) -> BoxFuture<'_, Result<AppliedPolicies, ApplyError>>;

    /// Who is in the cluster.
    fn regions(&self) -> RegionsState;

    /// Takes the next step of a change of one region. It is asked again until the step says that it is done.
    fn change_region(
        &self,
        region: String,
        action: RegionAction,
    ) -> BoxFuture<'_, Result<RegionStep, ApplyError>>;

    /// One bucket in every region; `values` are the descriptor's entries.
    fn bucket<'a>(
        &'a self,
        policy: &'a str,
        values: Vec<(String, String)>,
    ) -> BoxFuture<'a, Result<BucketView, BucketError>>;

    /// The same, of the bucket with this id.
    fn bucket_by_id<'a>(
        &'a self,
        policy: &'a str,
        id: &'a str,
    ) -> BoxFuture<'a, Result<BucketView, BucketError>>;

    /// What those who watch are told: see [`document`].
    fn feed(&self) -> Arc<Feed>;

    /// The whole pool, as `quorate snapshot save` writes it.
    fn save(&self) -> BoxFuture<'_, std::io::Result<Vec<u8>>> {
        Box::pin(async { Err(std::io::ErrorKind::Unsupported.into()) })
    }

    /// Fills one bucket, in every region.
    fn reset_bucket(&self, request: ResetRequest) -> BoxFuture<'_, Result<BucketReset, ResetError>>;
}

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// OpenMetrics 1.0, for whoever does not ask for anything else.
    OpenMetrics,
    /// Prometheus' text format 0.0.4, for whoever asks for `text/plain` and not for OpenMetrics.
    Prometheus,
}

impl MetricsFormat {
    fn wanted(headers: &HeaderMap) -> Self {
        let accepts: Vec<&str> =
            headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
        let accepts = accepts.join(",").to_ascii_lowercase();
        if accepts.contains("text/plain") && !accepts.contains("application/openmetrics-text") {
            Self::Prometheus
        } else {
            Self::OpenMetrics
        }
    }

    fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// New policies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyChange {
    /// The file, as it is.
    pub yaml: String,
    /// Only if this version is in force.
    pub expected: Option<u64>,
    /// Only check.
    pub dry_run: bool,
}

/// Why policies were not put in force, or a region was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// The file has faults: each with its line, column and mend.
    #[error("it has {} fault{}", .0.len(), if .0.len() == 1 { "" } else { "s" })]
    Invalid(Vec<String>),
    /// Another version is in force than the one that was expected.
    #[error("version {0} is in force, not the one that was expected; read it and apply your change to it")]
    Conflict(u64),
    /// The file is good, but the cluster cannot take it as it is.
    #[error("{0}")]
    Refused(String),
    /// Nothing has happened: ask again later.
    #[error("{0}")]
    Unavailable(String),
    /// It may have happened, or may yet.
    #[error("the outcome is not known: {0}; look at what is in force before you try again")]
    Unknown(String),
}

/// Why a bucket cannot be shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BucketError {
    /// No such policy.
    #[error("there is no policy `{0}`")]
    NoPolicy(String),
    /// The policy has no bucket for these values.
    #[error("{0}")]
    NoMatch(String),
}

/// Who may change things; it can change while the listener listens. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Access {
    token: Arc<ArcSwapOption<Secret>>,
}

impl Access {
    /// Whoever has this bearer token; `None`: whoever is on this machine, and nobody else.
    #[must_use]
    pub fn new(token: Option<Secret>) -> Self {
        Self { token: Arc::new(ArcSwapOption::from_pointee(token)) }
    }

    /// Another token counts from now on.
    pub fn set(&self, token: Secret) {
        self.token.store(Some(Arc::new(token)));
    }
}

/// The routes, for [`serve`].
pub fn router(source: Arc<dyn AdminSource>, access: Access) -> Router {
    let state = Admin { source, access, saving: Arc::new(Semaphore::new(1)) };
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/v1/state", get(daemon_state))
        .route("/v1/policies", get(policies).put(put_policies))
        .route("/v1/regions", get(regions::list).post(regions::add))
        .route("/v1/regions/{region}", axum::routing::delete(regions::remove))
        .route("/v1/regions/{region}/{action}", axum::routing::post(regions::act))
        .route("/v1/events", get(events::stream))
        .route("/v1/snapshot", get(snapshot))
        .route("/v1/buckets/{policy}", get(bucket))
        .route("/v1/buckets/{policy}/reset", axum::routing::post(buckets::reset))
        .route("/v1/buckets/{policy}/{id}", get(bucket_by_id))
        .route("/v1/log-filter", get(log_filter::get).put(log_filter::put))
        .merge(console::router())
        .with_state(state)
}

/// The routes of a daemon that waits to be let into the cluster, and why it waits.
pub fn waiting_router(waits_for: watch::Receiver<Option<String>>) -> Router {
    let readyz = move || {
        let why = waits_for.borrow().clone().unwrap_or_else(|| "it starts".into());
        async move {
            let not_ready = NotReady { ready: false, witness: false, reasons: vec![why] };
            (StatusCode::SERVICE_UNAVAILABLE, Json(not_ready))
        }
    };
    Router::new().route("/healthz", get(|| async { "ok\n" })).route("/readyz", get(readyz))
}

/// Serves `routes` on the current runtime, over TLS if there is any, until `stopping`, and finishes what is in flight, within two seconds.
///
/// # Errors
/// The listener cannot be used.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<CallerTls>>,
    routes: Router,
    stopping: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut acceptor = Acceptor::new(listener, Protocol::Admin, permits, stopping.clone())?;
    let routes = routes.fallback(not_found).method_not_allowed_fallback(not_allowed).layer(from_fn(in_time));
    let mut open = JoinSet::new();
    while let Some(accepted) = acceptor.next().await {
        open.spawn(connection(accepted, tls.clone(), routes.clone(), stopping.clone()));
        while open.try_join_next().is_some() {}
    }
    let all = async { while open.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN_TIMEOUT, all).await.is_err() {
        tracing::debug!(connections = open.len(), "cutting what is left of the admin listener's connections");
    }
    Ok(())
}

async fn connection(
    accepted: Accepted,
    tls: Option<Arc<CallerTls>>,
    routes: Router,
    stopping: watch::Receiver<bool>,
) {
    let routes = routes.layer(axum::Extension(ConnectInfo(accepted.peer)));
    let limits = ConnectionLimits::default();
    let service = |_| TowerToHyperService::new(routes);
    super::listen::connection(accepted, (tls.as_deref(), None), service, &limits, stopping).await;
}

#[derive(Clone)]
struct Admin {
    source: Arc<dyn AdminSource>,
    access: Access,
    /// One copy of the pool is made at a time.
    saving: Arc<Semaphore>,
}

async fn readyz(State(admin): State<Admin>) -> Response {
    let (reasons, witness) = (admin.source.not_ready(), admin.source.is_witness());
    if reasons.is_empty() {
        return Json(NotReady { ready: true, witness, reasons }).into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, Json(NotReady { ready: false, witness, reasons })).into_response()
}

async fn metrics(State(admin): State<Admin>, headers: HeaderMap) -> Result<Response, Problem> {
    let failed = |_| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be written");
    let format = MetricsFormat::wanted(&headers);
    let text = admin.source.metrics(format).map_err(failed)?;
    Ok(([(header::CONTENT_TYPE, format.content_type()), (header::VARY, "accept")], text).into_response())
}

async fn daemon_state(State(admin): State<Admin>) -> Json<DaemonState> {
    Json(admin.source.state().await)
}

/// It costs as much memory as the pool does, and has everything in it: not for everyone.
async fn snapshot(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    admin.access.check(peer.ip(), &headers)?;
    let _one_at_a_time = admin.saving.try_acquire().map_err(|_| {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "another copy is being made; try again")
    })?;
    let saved = admin.source.save().await;
    let saved = saved.map_err(|fault| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, fault.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], saved).into_response())
}

async fn policies(State(admin): State<Admin>) -> Response {
    let (version, yaml) = admin.source.policies();
    let headers =
        [(header::CONTENT_TYPE, "application/yaml".to_owned()), (header::ETAG, format!("\"{version}\""))];
    (headers, yaml).into_response()
}

async fn put_policies(
    State(admin): State<Admin>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
    body: axum::body::Body,
) -> Result<Response, Problem> {
    admin.access.check(peer.ip(), &headers)?;
    let dry_run = flag(&query, "dry_run")?;
    let expected = expected(&headers)?;
    let body = http_body_util::Limited::new(body, POLICIES_MAX).collect().await;
    let body = body.map_err(|_| {
        let detail = format!("the body broke off, or is larger than {POLICIES_MAX} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    })?;
    let yaml = String::from_utf8(body.to_bytes().into())
        .map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "the body is not UTF-8; send YAML"))?;
    match admin.source.apply(PolicyChange { yaml, expected, dry_run }).await {
        Ok(applied) => {
            let etag = format!("\"{}\"", applied.version);
            Ok(([(header::ETAG, etag)], Json(applied)).into_response())
        }
        Err(error) => Err(refusal(&error)),
    }
}

fn refusal(error: &ApplyError) -> Problem {
    let status = match error {
        ApplyError::Invalid(_) => StatusCode::BAD_REQUEST,
        ApplyError::Conflict(_) => StatusCode::PRECONDITION_FAILED,
        ApplyError::Refused(_) => StatusCode::CONFLICT,
        ApplyError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        ApplyError::Unknown(_) => StatusCode::GATEWAY_TIMEOUT,
    };
    let problem = Problem::new(status, error.to_string());
    match error {
        ApplyError::Invalid(faults) => {
            let fault = |detail: &String| Fault { pointer: None, detail: detail.clone() };
            problem.with_errors(faults.iter().map(fault).collect())
        }
        _ => problem,
    }
}

async fn bucket(
    State(admin): State<Admin>,
    Path(policy): Path<String>,
    Query(values): Query<Vec<(String, String)>>,
) -> Result<Json<BucketView>, Problem> {
    shown(admin.source.bucket(&policy, values).await)
}

async fn bucket_by_id(
    State(admin): State<Admin>,
    Path((policy, id)): Path<(String, String)>,
) -> Result<Json<BucketView>, Problem> {
    shown(admin.source.bucket_by_id(&policy, &id).await)
}

fn shown(view: Result<BucketView, BucketError>) -> Result<Json<BucketView>, Problem> {
    match view {
        Ok(view) => Ok(Json(view)),
        Err(error @ BucketError::NoPolicy(_)) => Err(Problem::new(StatusCode::NOT_FOUND, error.to_string())),
        Err(error @ BucketError::NoMatch(_)) => Err(Problem::new(StatusCode::BAD_REQUEST, error.to_string())),
    }
}

/// The one parameter that a request may have, off where it is left out.
fn flag(query: &[(String, String)], name: &str) -> Result<bool, Problem> {
    let fault = |what: String| Err(Problem::new(StatusCode::BAD_REQUEST, what));
    let mut flag = false;
    for (key, value) in query {
        flag = match (key == name, value.as_str()) {
            (true, "" | "1" | "true") => true,
            (true, "0" | "false") => false,
            // A misspelt `dry_run` must not change the policies in earnest.
            (true, _) => return fault(format!("{name}: is `{value}`; write 1 or 0")),
            (false, _) => return fault(format!("`{key}` is no parameter; the only one is {name}")),
        };
    }
    Ok(flag)
}

/// `If-Match` (RFC 9110, section 13.1.1): the version that must be in force; `*`: any.
fn expected(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    let Some(value) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default().trim();
    if text == "*" {
        return Ok(None);
    }
    let digits = text.strip_prefix('"').and_then(|t| t.strip_suffix('"')).unwrap_or(text);
    let fault = |_| {
        let detail = "If-Match: is not a version; send the ETag of GET /v1/policies";
        Problem::new(StatusCode::BAD_REQUEST, detail)
    };
    digits.parse().map(Some).map_err(fault)
}

impl Access {
    /// May this caller change things?
    fn check(&self, peer: IpAddr, headers: &HeaderMap) -> Result<(), Problem> {
        let token = self.token.load();
        let Some(token) = token.as_deref() else {
            // A page in a browser on this machine can be made to look as if it were of this origin (DNS rebinding),
            // but not to send a `Host` of ours; and one of another origin says so.
            if peer.to_canonical().is_loopback() && host_is_local(headers) && same_origin(headers) {
                return Ok(());
            }
            let detail = "changes from other machines need a token: set `admin_token_file`";
            return Err(Problem::new(StatusCode::FORBIDDEN, detail));
        };
        match bearer(headers) {
            Some(sent) if same(sent, token.expose().as_bytes()) => Ok(()),
            Some(_) => Err(Problem::new(StatusCode::UNAUTHORIZED, "the bearer token is not the right one")),
            None => Err(Problem::new(StatusCode::UNAUTHORIZED, "send `Authorization: Bearer <admin token>`")),
        }
    }
}

/// Browsers name the page that makes them ask (Fetch, section 3.2), whatever the page says: one of another origin must not make
/// changes with what this browser may do. Whoever is no browser sends no `Origin`.
fn same_origin(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|value: &HeaderValue| value.to_str().unwrap_or_default());
    let Some(origin) = text(header::ORIGIN) else { return true };
    let site = origin.split_once("://").map(|(_, site)| site);
    site.is_some() && site == text(header::HOST)
}

fn host_is_local(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else {
        // HTTP/2 has `:authority` instead, and no browser speaks it without TLS.
        return true;
    };
    let Some(authority) = host.to_str().ok().and_then(|h| h.parse::<http::uri::Authority>().ok()) else {
        return false;
    };
    let name = authority.host().trim_matches(['[', ']']);
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Are they equal? Takes as long wherever they differ, so that a token cannot be guessed byte by byte.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).fold(0, |all, (x, y)| std::hint::black_box(all | (x ^ y)));
    a.len() == b.len() && differences == 0
}

async fn in_time(request: Request<axum::body::Body>, next: Next) -> Response {
    tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await.unwrap_or_else(|_| {
        Problem::new(StatusCode::GATEWAY_TIMEOUT, "no answer in time; the outcome is not known")
            .into_response()
    })
}

async fn not_found() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "there is nothing here")
}

async fn not_allowed() -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "this method does nothing here")
}
