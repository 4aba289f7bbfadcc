//! Mutual TLS between regions: each side shows a certificate from the cluster's own authority.

use crate::raft::{PeerTls, RaftError};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::path::Path;
use std::sync::Arc;

/// For the listener.
pub(crate) fn server(tls: &PeerTls) -> Result<Arc<ServerConfig>, RaftError> {
    let fault = |e: &dyn std::fmt::Display| unusable(&tls.cert, e);
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(authorities(&tls.ca)?), provider())
        .build()
        .map_err(|e| unusable(&tls.ca, &e))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| fault(&e))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates(&tls.cert)?, key(&tls.key)?)
        .map_err(|e| fault(&e))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// For calls to peers; without `tls` it trusts nobody, so that only plain HTTP works.
pub(crate) fn client(tls: Option<&PeerTls>) -> Result<ClientConfig, RaftError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| RaftError::Config(format!("TLS cannot be set up: {e}")))?;
    let mut config = match tls {
        None => builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth(),
        Some(tls) => builder
            .with_root_certificates(authorities(&tls.ca)?)
            .with_client_auth_cert(certificates(&tls.cert)?, key(&tls.key)?)
            .map_err(|e| unusable(&tls.cert, &e))?,
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn authorities(path: &Path) -> Result<RootCertStore, RaftError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(path)? {
        store.add(certificate).map_err(|e| unusable(path, &e))?;
    }
    Ok(store)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, RaftError> {
    let content = read(path)?;
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(&content).collect::<Result<_, _>>().map_err(|e| unusable(path, &e))?;
    if certificates.is_empty() {
        return Err(unusable(path, &"there is no certificate in it"));
    }
    Ok(certificates)
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, RaftError> {
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|e| unusable(path, &e))
}

fn read(path: &Path) -> Result<Vec<u8>, RaftError> {
    std::fs::read(path).map_err(|source| RaftError::Io { path: path.to_owned(), source })
}

fn unusable(path: &Path, why: &dyn std::fmt::Display) -> RaftError {
    RaftError::Config(format!("peer_tls: {} cannot be used: {why}; give a PEM file", path.display()))
}
