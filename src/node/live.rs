//! What can change while the daemon runs: certificates, tokens. Their files are looked at now and then, and at once on SIGHUP.

use crate::config::{self, Config};
use crate::raft::Raft;
use crate::server::admin::Access;
use crate::server::callers::{CallerTls, Callers, Tokens};
use crate::tls::{TlsError, TlsFiles, Watched};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Between two looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The parts that can change, as they are in use.
#[derive(Debug)]
pub struct Live {
    /// Who may change things on the admin listener.
    pub access: Access,
    /// TLS on it.
    pub admin_tls: Option<Arc<CallerTls>>,
    /// What callers must show.
    pub callers: Callers,
    peer_tls: Option<TlsFiles>,
    admin_token: Option<PathBuf>,
    caller_tokens: Option<PathBuf>,
}

/// A part that could not be read again.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {why}")]
pub struct LiveError {
    /// The key in `region.yaml`.
    pub what: &'static str,
    /// Why, and the mend; no secrets.
    pub why: String,
}

impl Live {
    /// As the configuration says.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn new(config: &Config) -> Result<Self, LiveError> {
        let caller_tls = config.caller_tls.as_ref().map(|tls| TlsFiles {
            cert: tls.cert.clone(),
            key: tls.key.clone(),
            ca: tls.client_ca.clone(),
        });
        let admin_tls = config.admin_tls.as_ref().map(|tls| TlsFiles {
            cert: tls.cert.clone(),
            key: tls.key.clone(),
            ca: None,
        });
        let caller_tls = loaded(caller_tls, Part::CallerTls)?;
        let admin_tls = loaded(admin_tls, Part::AdminTls)?;
        let tokens = config.caller_tokens_file.as_deref().map(config::callers::tokens).transpose();
        let tokens = tokens.map_err(|e| LiveError { what: "caller_tokens_file", why: e.to_string() })?;
        Ok(Self {
            access: Access::new(config.admin_token.clone()),
            admin_tls,
            callers: Callers { tls: caller_tls, tokens: tokens.map(|tokens| Arc::new(Tokens::new(&tokens))) },
            peer_tls: config.peer_tls.as_ref().map(|tls| TlsFiles {
                cert: tls.cert.clone(),
                key: tls.key.clone(),
                ca: Some(tls.ca.clone()),
            }),
            admin_token: config.admin_token_file.clone(),
            caller_tokens: config.caller_tokens_file.clone(),
        })
    }

    /// Reads everything again. What cannot be used stays as it was.
    ///
    /// # Errors
    /// The first part that could not be used; the others are in use all the same.
    pub fn reload(&self, raft: &Raft) -> Result<(), LiveError> {
        let all = Part::ALL.map(|part| self.reload_part(part, raft));
        all.into_iter().collect()
    }

    fn reload_part(&self, part: Part, raft: &Raft) -> Result<(), LiveError> {
        match part {
            Part::PeerTls => {
                raft.reload_tls().map_err(|e| LiveError { what: part.key(), why: e.to_string() })
            }
            Part::CallerTls => reloaded(self.callers.tls.as_deref()).map_err(unusable(part)),
            Part::AdminTls => reloaded(self.admin_tls.as_deref()).map_err(unusable(part)),
            Part::AdminToken => {
                let Some(file) = &self.admin_token else { return Ok(()) };
                let token = config::region::admin_token(file);
                self.access.set(token.map_err(|e| LiveError { what: part.key(), why: e.to_string() })?);
                Ok(())
            }
            Part::CallerTokens => {
                let (Some(file), Some(tokens)) = (&self.caller_tokens, &self.callers.tokens) else {
                    return Ok(());
                };
                let new = config::callers::tokens(file);
                tokens.set(&new.map_err(|e| LiveError { what: part.key(), why: e.to_string() })?);
                Ok(())
            }
        }
    }

    fn watched(&self, part: Part) -> Watched {
        match part {
            Part::PeerTls => Watched::new(self.peer_tls.iter().flat_map(TlsFiles::paths)),
            Part::CallerTls => Watched::new(paths(self.callers.tls.as_deref())),
            Part::AdminTls => Watched::new(paths(self.admin_tls.as_deref())),
            Part::AdminToken => Watched::new(self.admin_token.as_deref()),
            Part::CallerTokens => Watched::new(self.caller_tokens.as_deref()),
        }
    }
}

fn loaded(files: Option<TlsFiles>, part: Part) -> Result<Option<Arc<CallerTls>>, LiveError> {
    let tls = files.map(CallerTls::load).transpose();
    Ok(tls.map_err(unusable(part))?.map(Arc::new))
}

fn paths(tls: Option<&CallerTls>) -> impl Iterator<Item = &Path> {
    tls.into_iter().flat_map(CallerTls::paths)
}

fn reloaded(tls: Option<&CallerTls>) -> Result<(), TlsError> {
    tls.map_or(Ok(()), CallerTls::reload)
}

fn unusable(part: Part) -> impl FnOnce(TlsError) -> LiveError {
    move |error| LiveError { what: part.key(), why: error.to_string() }
}

/// What is read again as a whole.
#[derive(Clone, Copy, Debug)]
enum Part {
    PeerTls,
    CallerTls,
    AdminTls,
    AdminToken,
    CallerTokens,
}

impl Part {
    const ALL: [Self; 5] =
        [Self::PeerTls, Self::CallerTls, Self::AdminTls, Self::AdminToken, Self::CallerTokens];

    /// Its key in `region.yaml`.
    const fn key(self) -> &'static str {
        match self {
            Self::PeerTls => "peer_tls",
            Self::CallerTls => "caller_tls",
            Self::AdminTls => "admin_tls",
            Self::AdminToken => "admin_token_file",
            Self::CallerTokens => "caller_tokens_file",
        }
    }
}

/// Looks at the files until `stopping`. What cannot be used is tried again at every look: a certificate may be there before its
/// key is.
pub async fn follow(live: Arc<Live>, raft: Raft, mut stopping: watch::Receiver<bool>) {
    struct Followed {
        part: Part,
        watched: Watched,
        failed: Option<String>,
    }
    let follow = |part| Followed { part, watched: live.watched(part), failed: None };
    let mut all = Part::ALL.map(follow);
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            _ = stopping.wait_for(|stop| *stop) => return,
        }
        for followed in &mut all {
            if !followed.watched.changed() && followed.failed.is_none() {
                continue;
            }
            match live.reload_part(followed.part, &raft) {
                Ok(()) => {
                    tracing::info!(what = followed.part.key(), "a file has changed and is in use");
                    followed.failed = None;
                }
                Err(error) => {
                    let why = Some(error.why);
                    if followed.failed != why {
                        tracing::warn!(
                            what = error.what,
                            why,
                            "a file has changed and cannot be used; what was there before stays in use"
                        );
                    }
                    followed.failed = why;
                }
            }
        }
    }
}
