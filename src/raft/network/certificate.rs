//! Which region a certificate is of.
//!
//! That it comes from the cluster's authority, TLS has checked. Here it must be the caller's own: a region does not speak as another.
//! It names its region in one of two ways (RFC 5280, section 4.2.1.6):
//!
//! - a URI name `quorate://CLUSTER/REGION`. If it has any, nothing else counts.
//! - else a DNS name or an address that fits the host in the region's peer URL. (The callers of that URL check the same.) Where
//!   several regions are at one host, or share a wildcard, it cannot tell them apart: give those a URI name.

use rustls::pki_types::{CertificateDer, ServerName};
use webpki::EndEntityCert;

const SCHEME: &str = "quorate://";

/// The certificate that a peer has shown.
#[derive(Clone, Debug)]
pub(crate) struct Shown(CertificateDer<'static>);

impl Shown {
    pub fn new(certificate: CertificateDer<'static>) -> Self {
        Self(certificate)
    }

    /// Is it that of this region, which is at this URL (as far as is known)?
    ///
    /// # Errors
    /// What it is instead, and the mend.
    pub fn is_of(&self, cluster: &str, region: &str, url: Option<&str>) -> Result<(), String> {
        let certificate =
            EndEntityCert::try_from(&self.0).map_err(|e| format!("its certificate cannot be read: {e}"))?;
        let wanted = format!("{SCHEME}{cluster}/{region}");
        let mut uris = certificate.valid_uri_names().filter(|uri| uri.starts_with(SCHEME)).peekable();
        if uris.peek().is_some() {
            let names: Vec<&str> = uris.collect();
            return if names.contains(&&*wanted) {
                Ok(())
            } else {
                Err(format!("its certificate is of {}, not of {wanted}", names.join(", ")))
            };
        }
        let Some(url) = url else { return Ok(()) };
        let host = host(url).ok_or_else(|| format!("{url} names no host"))?;
        let name = ServerName::try_from(host.clone()).map_err(|_| format!("{host} is no host's name"))?;
        certificate.verify_is_valid_for_subject_name(&name).map_err(|_| {
            let names: Vec<&str> = certificate.valid_dns_names().collect();
            let names = if names.is_empty() { "no DNS name".to_owned() } else { names.join(", ") };
            format!("its certificate has {names}, not {host}, where `{region}` is: let it have that name, or the URI {wanted}")
        })
    }
}

/// The host of a URL, an IPv6 address without its brackets.
fn host(url: &str) -> Option<String> {
    let uri: http::Uri = url.parse().ok()?;
    Some(uri.host()?.trim_matches(['[', ']']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair, SanType};

    fn shown(dns: &[&str], uris: &[&str]) -> Shown {
        let mut params =
            CertificateParams::new(dns.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
        let uri = |uri: &&str| SanType::URI((*uri).try_into().unwrap());
        params.subject_alt_names.extend(uris.iter().map(uri));
        Shown::new(params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone())
    }

    #[test]
    fn a_certificate_names_its_region() {
        let is_of_b = |shown: Shown, url| shown.is_of("prod", "b", url);
        let at = Some("https://b.example:8082");
        assert_eq!(is_of_b(shown(&["b.example"], &[]), at), Ok(()));
        assert_eq!(is_of_b(shown(&["x.example", "B.Example"], &[]), at), Ok(()));
        assert_eq!(is_of_b(shown(&["10.0.0.7"], &[]), Some("https://10.0.0.7:1")), Ok(()));
        assert_eq!(is_of_b(shown(&["::1"], &[]), Some("https://[::1]:1")), Ok(()));
        let fault = is_of_b(shown(&["a.example"], &[]), at).unwrap_err();
        assert!(
            fault.contains("has a.example, not b.example") && fault.contains("quorate://prod/b"),
            "{fault}"
        );
        assert!(is_of_b(shown(&["10.0.0.8"], &[]), Some("https://10.0.0.7:1")).is_err());
        assert_eq!(is_of_b(shown(&["a.example"], &[]), None), Ok(()), "nobody knows yet where it is");
    }

    #[test]
    fn a_uri_says_it_all() {
        let at = Some("https://b.example:8082");
        assert_eq!(shown(&[], &["quorate://prod/b"]).is_of("prod", "b", at), Ok(()));
        assert_eq!(shown(&[], &["quorate://prod/a", "quorate://prod/b"]).is_of("prod", "b", at), Ok(()));
        assert_eq!(shown(&["b.example"], &["spiffe://x/y"]).is_of("prod", "b", at), Ok(()));
        for other in ["quorate://prod/a", "quorate://test/b", "quorate://prod/b/", "quorate://prod/B"] {
            let fault = shown(&["b.example"], &[other]).is_of("prod", "b", at).unwrap_err();
            assert!(fault.contains(other), "{fault}");
            assert!(shown(&[], &[other]).is_of("prod", "b", None).is_err());
        }
    }
}
