//! What commands need to talk to a running daemon.

use anyhow::{Context as _, bail};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Long enough for any decision; a daemon that takes longer is not answering.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A client for one command, that trusts the authority in this file and no other; `None`: those of the system.
///
/// # Errors
/// If the file cannot be used, or TLS cannot be set up.
pub fn trusting(ca: Option<&Path>) -> anyhow::Result<reqwest::Client> {
    let mut builder = reqwest::Client::builder();
    if let Some(file) = ca {
        let pem = std::fs::read(file).with_context(|| format!("{}: cannot be read", file.display()))?;
        let certificates = reqwest::Certificate::from_pem_bundle(&pem);
        let certificates =
            certificates.with_context(|| format!("{}: not a PEM file of certificates", file.display()))?;
        builder = builder.tls_certs_only(certificates);
    }
    builder
        .timeout(TIMEOUT)
        .no_proxy()
        .user_agent(concat!("quorate/", env!("CARGO_PKG_VERSION")))
        .build()
        .context("cannot set up an HTTP client")
}

/// A runtime for one command.
///
/// # Errors
/// If the system refuses.
pub fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start a runtime")
}

/// Where a command finds a cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct Place {
    /// A region's admin listener
    #[arg(
        long,
        global = true,
        value_name = "URL",
        default_value = "http://127.0.0.1:8083",
        env = "QUORATE_ADMIN"
    )]
    pub admin: String,
    /// Trust the listener's certificate if it comes from this authority (PEM) [default: those of the system]
    #[arg(long, global = true, value_name = "FILE", env = "QUORATE_CA")]
    pub ca: Option<PathBuf>,
}

impl Place {
    /// The base of the admin listener's URL.
    ///
    /// # Errors
    /// See [`base`].
    pub fn base(&self) -> anyhow::Result<String> {
        base("--admin", &self.admin)
    }

    /// A client that trusts it.
    ///
    /// # Errors
    /// See [`trusting`].
    pub fn http(&self) -> anyhow::Result<reqwest::Client> {
        trusting(self.ca.as_deref())
    }
}

/// Where a command finds a cluster that it may change, and what lets it.
#[derive(Clone, Debug, clap::Args)]
pub struct Admin {
    /// Where
    #[command(flatten)]
    pub at: Place,
    /// A file with the admin token
    #[arg(long, global = true, value_name = "FILE", env = "QUORATE_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
}

impl Admin {
    /// The request with the admin token, if a file is named.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn authorize(&self, request: reqwest::RequestBuilder) -> anyhow::Result<reqwest::RequestBuilder> {
        with_token(request, self.token_file.as_deref())
    }
}

/// The request with the token in this file, if one is named.
///
/// # Errors
/// If it cannot be read.
pub fn with_token(
    request: reqwest::RequestBuilder,
    file: Option<&Path>,
) -> anyhow::Result<reqwest::RequestBuilder> {
    let Some(file) = file else { return Ok(request) };
    let token = std::fs::read_to_string(file);
    let token = token.with_context(|| format!("{}: cannot be read", file.display()))?;
    Ok(request.bearer_auth(token.trim()))
}

/// The base of a URL given as a flag: `http://` may be left out, a trailing slash is dropped.
///
/// # Errors
/// If it is no http or https URL.
pub fn base(flag: &str, url: &str) -> anyhow::Result<String> {
    let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let parsed = reqwest::Url::parse(&url).with_context(|| format!("{flag} {url}: not a URL"))?;
    if !matches!(parsed.scheme(), "http" | "https") || parsed.host_str().is_none() {
        bail!("{flag} {url}: want an address such as http://127.0.0.1:8083");
    }
    Ok(url.trim_end_matches('/').to_owned())
}

/// The reason behind a failed request, without the URL (which the caller names) and in one line.
#[must_use]
pub fn why(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return format!("no answer within {} s", TIMEOUT.as_secs());
    }
    let mut source: &dyn std::error::Error = error;
    while let Some(next) = source.source() {
        source = next;
    }
    source.to_string()
}
