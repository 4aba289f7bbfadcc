//! Permits of `concurrent` limits over HTTP: `POST /v1/acquire`, `/v1/renew`, `/v1/release`.
//!
//! To acquire is to check a request as `/v1/check` does: all of its limits are charged, or none, and a denial looks the same.
//! Who has a lease renews it before it ends, and gives it back when done; the permits of one who dies are free when it ends.

use super::{Ask, Body, Inner, Text, head, json, parse, response};
use crate::limiter::Decide;
use crate::limiter::leases::LeaseFault;
use crate::quota::amount::Micros;
use crate::server::problem::Problem;
use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use tokio::time::Instant;

/// A request about a lease.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct About<'a> {
    #[serde(borrow)]
    lease: Text<'a>,
}

impl<D: Decide> Inner<D> {
    pub(super) async fn acquire(
        &self,
        request: http::Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Problem> {
        let bytes = self.read(request).await?;
        let began = Instant::now();
        let body: Body<'_> = parse(&bytes)?;
        if body.cost.as_ref().is_some_and(|cost| cost.0 < 1) {
            return Err(Problem::at("#/cost", "is less than 1; say how many permits to take"));
        }
        let (verdict, lease) = self.in_time(body.decide(&self.decide, Ask::Acquire)).await?;
        crate::server::describe(body.domain.as_ref().map_or("", Text::as_str), &verdict);
        if verdict.undecided {
            return Err(lease_problem(&LeaseFault::Undecided));
        }
        self.answered(&verdict, began);
        let Some(lease) = lease else { return Ok(response(&verdict)) };
        Ok(json(head(&verdict), granted(&lease.token, lease.expires)))
    }

    pub(super) async fn renew(
        &self,
        request: http::Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Problem> {
        let bytes = self.read(request).await?;
        let About { lease } = parse(&bytes)?;
        let renewed =
            async { self.decide.renew(lease.as_str()).await.map_err(|fault| lease_problem(&fault)) };
        let expires = self.in_time(renewed).await?;
        Ok(json(Response::default(), granted(lease.as_str(), expires)))
    }

    pub(super) async fn release(
        &self,
        request: http::Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Problem> {
        let bytes = self.read(request).await?;
        let About { lease } = parse(&bytes)?;
        let released =
            async { self.decide.release(lease.as_str()).await.map_err(|fault| lease_problem(&fault)) };
        self.in_time(released).await?;
        Ok(json(Response::default(), b"{\"released\":true}".to_vec()))
    }
}

/// A lease, and how long it lasts from now on.
fn granted(lease: &str, expires: Micros) -> Vec<u8> {
    #[derive(serde::Serialize)]
    struct Granted<'a> {
        lease: &'a str,
        expires_ms: i64,
    }
    // Neither of them can fail to be written.
    serde_json::to_vec(&Granted { lease, expires_ms: expires.ceil_millis() }).unwrap_or_default()
}

fn lease_problem(fault: &LeaseFault) -> Problem {
    let status = match fault {
        LeaseFault::Unknown | LeaseFault::Elsewhere { .. } => StatusCode::NOT_FOUND,
        LeaseFault::TooMany { .. } => StatusCode::CONFLICT,
        LeaseFault::Unavailable | LeaseFault::Undecided => StatusCode::SERVICE_UNAVAILABLE,
    };
    Problem::new(status, fault.to_string())
}
