//! Errors over HTTP: `application/problem+json` (RFC 9457).

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde::Serialize;

/// A problem, to be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    status: StatusCode,
    detail: String,
    errors: Vec<Fault>,
}

/// One fault in a request's body: `errors` in RFC 9457, section 3.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Where: a JSON pointer as a URI fragment (RFC 6901, section 6). Left out if the body is not JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pointer: Option<String>,
    /// What is wrong, and the mend.
    pub detail: String,
}

impl Problem {
    /// A problem with a request, or with the server; `detail` says what, and the mend.
    #[must_use]
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), errors: Vec::new() }
    }

    /// A fault in the body, at a JSON pointer (`#/cost`).
    #[must_use]
    pub fn at(pointer: impl Into<String>, detail: impl Into<String>) -> Self {
        let (pointer, detail) = (pointer.into(), detail.into());
        let errors = vec![Fault { pointer: Some(pointer.clone()), detail: detail.clone() }];
        Self { status: StatusCode::BAD_REQUEST, detail: format!("{pointer}: {detail}"), errors }
    }

    /// Faults in the body.
    #[must_use]
    pub fn with_errors(mut self, errors: Vec<Fault>) -> Self {
        self.errors = errors;
        self
    }

    /// The status code.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The answer.
    #[must_use]
    pub fn response(&self) -> Response<Full<Bytes>> {
        #[derive(Serialize)]
        struct Body<'a> {
            r#type: &'static str,
            title: &'static str,
            status: u16,
            detail: &'a str,
            #[serde(skip_serializing_if = "<[_]>::is_empty")]
            errors: &'a [Fault],
        }
        let body = Body {
            // Means: no more than the status code says (RFC 9457, section 4.2.1).
            r#type: "about:blank",
            title: self.status.canonical_reason().unwrap_or("Error"),
            status: self.status.as_u16(),
            detail: &self.detail,
            errors: &self.errors,
        };
        let text = serde_json::to_vec(&body).unwrap_or_default();
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = self.status;
        let json = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            // Whatever it waits for, a look a second is often enough.
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl axum::response::IntoResponse for Problem {
    fn into_response(self) -> axum::response::Response {
        self.response().map(axum::body::Body::new)
    }
}
