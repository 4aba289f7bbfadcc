//! `/console`: the web page, compiled into the binary. It has no build step and asks nobody but this listener.

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use std::sync::LazyLock;

/// A file: its path, its type and its bytes.
struct File {
    path: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
}

macro_rules! files {
    ($($path:literal, $kind:literal, $file:literal;)*) => {
        &[$(File { path: $path, kind: $kind, bytes: include_bytes!(concat!("../console/", $file)) }),*]
    };
}

const FILES: &[File] = files! {
    "/console", "text/html; charset=utf-8", "index.html";
    "/console/console.css", "text/css; charset=utf-8", "console.css";
    "/console/icon.svg", "image/svg+xml", "icon.svg";
    "/console/main.js", "text/javascript; charset=utf-8", "main.js";
    "/console/dom.js", "text/javascript; charset=utf-8", "dom.js";
    "/console/format.js", "text/javascript; charset=utf-8", "format.js";
    "/console/model.js", "text/javascript; charset=utf-8", "model.js";
    "/console/parts.js", "text/javascript; charset=utf-8", "parts.js";
    "/console/chart.js", "text/javascript; charset=utf-8", "chart.js";
    "/console/overview.js", "text/javascript; charset=utf-8", "overview.js";
    "/console/policy.js", "text/javascript; charset=utf-8", "policy.js";
    "/console/bucket.js", "text/javascript; charset=utf-8", "bucket.js";
    "/console/events.js", "text/javascript; charset=utf-8", "events.js";
    "/console/change.js", "text/javascript; charset=utf-8", "change.js";
};

/// What the page may load and do: nothing but what comes from here, and no text becomes markup or script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// Of each file, by the same index: a hash of its bytes, so that a browser asks whether it has changed and need not load it.
static TAGS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let hash = |file: &File| blake3::hash(file.bytes).to_hex();
    FILES.iter().map(|file| format!("\"{}\"", hash(file).split_at(32).0)).collect()
});

/// The page's routes.
pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let routes = Router::new()
        .route("/", get(|| async { Redirect::temporary("console") }))
        .route("/console/", get(|| async { Redirect::permanent("../console") }));
    FILES.iter().enumerate().fold(routes, |routes, (index, file)| {
        routes.route(file.path, get(move |headers: HeaderMap| async move { answer(index, file, &headers) }))
    })
}

fn answer(index: usize, file: &'static File, headers: &HeaderMap) -> Response {
    let tag = TAGS.get(index).map_or("", String::as_str);
    let known = headers.get_all(header::IF_NONE_MATCH).iter();
    let known = known.filter_map(|value| value.to_str().ok());
    // RFC 9110, section 13.1.2: a list, compared weakly.
    let mut known = known.flat_map(|list| list.split(',')).map(|t| t.trim().trim_start_matches("W/"));
    let mut response = if known.any(|known| known == tag || known == "*") {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        ([(header::CONTENT_TYPE, file.kind)], Body::from(file.bytes)).into_response()
    };
    let fields = response.headers_mut();
    fields.extend(HeaderValue::from_str(tag).map(|tag| (header::ETAG, tag)));
    for (name, value) in [
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        fields.insert(name, HeaderValue::from_static(value));
    }
    response
}
