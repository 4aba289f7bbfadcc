//! TLS from PEM files, and files that may change while the daemon runs.
//!
//! The listeners for callers and for regions, the calls between regions and connections to Redis all get theirs here: rustls with *ring*, TLS 1.2 and 1.3,
//! no session that outlives the process.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities that the other side's certificate must come from; `None`: it need not show one.
    pub ca: Option<PathBuf>,
}

/// PEM files for connections to servers of others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientFiles {
    /// The authorities that the server's certificate must come from.
    pub ca: PathBuf,
    /// The certificate chain to show, and its private key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// A file is of no use.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be used: {why}; give a PEM file", path.display())]
pub struct TlsError {
    /// Which.
    pub path: PathBuf,
    /// Why; nothing of its content.
    pub why: String,
}

impl TlsFiles {
    /// All of them.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        [Some(&self.cert), Some(&self.key), self.ca.as_ref()].into_iter().flatten().map(PathBuf::as_path)
    }

    /// For a listener that speaks these protocols (ALPN).
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn server(&self, protocols: &[&str]) -> Result<Arc<ServerConfig>, TlsError> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|e| unusable(&self.cert, &e))?;
        let builder = match &self.ca {
            None => builder.with_no_client_auth(),
            Some(ca) => {
                let roots = Arc::new(authorities(ca)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
                builder.with_client_cert_verifier(verifier.map_err(|e| unusable(ca, &e))?)
            }
        };
        let mut config = builder
            .with_single_cert(certificates(&self.cert)?, key(&self.key)?)
            .map_err(|e| unusable(&self.cert, &e))?;
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        Ok(Arc::new(config))
    }
}

/// For calls over HTTP/2 that show a certificate of their own; without files it trusts nobody, so that only plain HTTP works.
///
/// # Errors
/// A file cannot be used.
pub fn client(files: Option<&TlsFiles>) -> Result<ClientConfig, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| unusable(files.map_or(Path::new(""), |f| &f.cert), &e))?;
    let mut config = match files {
        None => builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth(),
        Some(files) => {
            let roots = files.ca.as_deref().map_or_else(|| Ok(RootCertStore::empty()), authorities)?;
            builder
                .with_root_certificates(roots)
                .with_client_auth_cert(certificates(&files.cert)?, key(&files.key)?)
                .map_err(|e| unusable(&files.cert, &e))?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// For connections that speak no protocol of ours.
///
/// # Errors
/// A file cannot be used.
pub fn client_of(files: &ClientFiles) -> Result<Arc<ClientConfig>, TlsError> {
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| unusable(&files.ca, &e))?
        .with_root_certificates(authorities(&files.ca)?);
    let config = match &files.own {
        None => builder.with_no_client_auth(),
        Some((cert, private)) => builder
            .with_client_auth_cert(certificates(cert)?, key(private)?)
            .map_err(|e| unusable(cert, &e))?,
    };
    Ok(Arc::new(config))
}

/// Files that are looked at now and then.
#[derive(Debug)]
pub struct Watched {
    files: Vec<(PathBuf, Stamp)>,
}

/// What changes when a file is written or replaced. `None`: it is not there.
type Stamp = Option<(SystemTime, u64, u64)>;

impl Watched {
    /// These files, as they are now.
    pub fn new<'p>(paths: impl IntoIterator<Item = &'p Path>) -> Self {
        Self { files: paths.into_iter().map(|path| (path.to_owned(), stamp(path))).collect() }
    }

    /// Has one changed since the last call?
    pub fn changed(&mut self) -> bool {
        let mut changed = false;
        for (path, before) in &mut self.files {
            let now = stamp(path);
            changed |= now != *before;
            *before = now;
        }
        changed
    }
}

fn stamp(path: &Path) -> Stamp {
    use std::os::unix::fs::MetadataExt as _;
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.ino(), metadata.len()))
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn authorities(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(path)? {
        store.add(certificate).map_err(|e| unusable(path, &e))?;
    }
    Ok(store)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let content = read(path)?;
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(&content).collect::<Result<_, _>>().map_err(|e| unusable(path, &e))?;
    if certificates.is_empty() {
        return Err(unusable(path, &"there is no certificate in it"));
    }
    Ok(certificates)
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(&read(path)?).map_err(|e| unusable(path, &e))
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|e| unusable(path, &e))
}

fn unusable(path: &Path, why: &dyn Display) -> TlsError {
    TlsError { path: path.to_owned(), why: why.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_of_files_are_seen() {
        let temp = tempfile::tempdir().unwrap();
        let (a, b) = (temp.path().join("a"), temp.path().join("b"));
        std::fs::write(&a, "1").unwrap();
        let mut watched = Watched::new([a.as_path(), b.as_path()]);
        assert!(!watched.changed());
        std::fs::write(&b, "1").unwrap();
        assert!(watched.changed(), "it has come");
        assert!(!watched.changed());
        // As Kubernetes and certbot do: another file under the same name, of the same size.
        let other = temp.path().join("other");
        std::fs::write(&other, "2").unwrap();
        std::fs::rename(&other, &a).unwrap();
        assert!(watched.changed());
        std::fs::remove_file(&a).unwrap();
        assert!(watched.changed());
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("x.pem");
        let files = TlsFiles { cert: path.clone(), key: path.clone(), ca: None };
        assert!(files.server(&["h2"]).unwrap_err().to_string().contains("x.pem cannot be used"));
        std::fs::write(&path, "nothing").unwrap();
        let fault = files.server(&["h2"]).unwrap_err().to_string();
        assert!(fault.contains("there is no certificate in it; give a PEM file"), "{fault}");
    }
}
