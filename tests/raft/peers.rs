//! Who is let in: certificates, and what else regions must have in common.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mutual_tls_lets_in_the_clusters_own() {
    let mut cluster = Cluster::new(LOCAL, Duration::from_millis(80)).await;
    let (ours, theirs) = (Authority::new(&cluster, "ours"), Authority::new(&cluster, "theirs"));
    cluster.tls = (0..3).map(|i| Some(ours.issue(NAMES[i]))).collect();
    cluster.start_all().await;
    let leader = cluster.leader().await;
    let other = (leader + 1) % NAMES.len();
    cluster.propose(other, vec![], LONG).await.unwrap();
    cluster.raft(other).reload_tls().unwrap();
    cluster.propose(other, vec![], LONG).await.unwrap();
    cluster.settled().await;

    // A certificate from another authority opens no door, whichever side shows it.
    let before = cluster.status(other).last_log;
    cluster.kill(other).await;
    cluster.tls[other] = Some(theirs.issue(NAMES[other]));
    cluster.start(other).await.unwrap();
    for _ in 0..5 {
        cluster.propose(leader, vec![], LONG).await.unwrap();
    }
    refused(&cluster, other).await;
    assert!(cluster.status(other).peers.iter().all(|peer| !peer.reachable));
    assert_eq!(cluster.status(other).last_log, before);
    assert!(cluster.status(leader).applied > before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_does_not_speak_as_another() {
    let mut cluster = Cluster::new(LOCAL, Duration::from_millis(80)).await;
    let ours = Authority::new(&cluster, "ours");
    let named = |region: &str| ours.issue_named(region, &[&format!("quorate://test/{region}")]);
    cluster.tls = NAMES.map(|region| Some(named(region))).to_vec();
    cluster.start_all().await;
    let leader = cluster.leader().await;
    let (other, third) = ((leader + 1) % NAMES.len(), (leader + 2) % NAMES.len());
    cluster.propose(other, vec![], LONG).await.unwrap();
    cluster.settled().await;

    // It has a certificate of the cluster's, but that of another region; then one of the same region in another cluster.
    let right = cluster.tls[other].clone();
    let elsewhere = ours.issue_named("elsewhere", &[&format!("quorate://staging/{}", NAMES[other])]);
    for wrong in [cluster.tls[third].clone(), Some(elsewhere)] {
        cluster.kill(other).await;
        cluster.tls[other] = wrong;
        cluster.start(other).await.unwrap();
        refused(&cluster, other).await;
        assert!(cluster.status(other).peers.iter().all(|peer| !peer.reachable));
        cluster.propose(leader, vec![], LONG).await.unwrap();
    }
    cluster.kill(other).await;
    cluster.tls[other] = right;
    cluster.start(other).await.unwrap();
    cluster.propose(other, vec![], LONG).await.unwrap();
}

/// Its buckets have other names: what it was lent under them would come on top of what the others have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_that_redacts_otherwise_is_refused() {
    let mut cluster = Cluster::new(LOCAL, Duration::from_millis(80)).await;
    cluster.redaction = vec![Some(7); NAMES.len()];
    cluster.start_all().await;
    let leader = cluster.leader().await;
    let other = (leader + 1) % NAMES.len();
    cluster.propose(other, vec![], LONG).await.unwrap();
    cluster.settled().await;
    for wrong in [Some(8), None] {
        cluster.kill(other).await;
        cluster.redaction[other] = wrong;
        cluster.start(other).await.unwrap();
        refused(&cluster, other).await;
        cluster.propose(leader, vec![], LONG).await.unwrap();
    }
    cluster.kill(other).await;
    cluster.redaction[other] = Some(7);
    cluster.start(other).await.unwrap();
    cluster.propose(other, vec![], LONG).await.unwrap();
}

/// No peer lets a proposal of this region's in: it has certainly not happened.
async fn refused(cluster: &Cluster, region: usize) {
    let mut fault = ProposeError::Unknown;
    // On a slow machine the time may be over before the last try's refusal is there: then nobody can say, until one comes in time.
    for _ in 0..10 {
        fault = cluster.propose(region, vec![], Duration::from_secs(1)).await.unwrap_err();
        if fault != ProposeError::Unknown {
            break;
        }
    }
    assert_eq!(fault, ProposeError::NotSent { retry: true });
}

/// A certificate authority in files.
struct Authority {
    dir: PathBuf,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    fn new(cluster: &Cluster, name: &str) -> Self {
        let dir = cluster.temp.path().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(dir.join("ca.pem"), certificate.pem()).unwrap();
        Self { dir, issuer: rcgen::Issuer::new(params, key) }
    }

    /// For `localhost`.
    fn issue(&self, file: &str) -> PeerTls {
        self.issue_named(file, &[])
    }

    /// For `localhost`, and with these URI names.
    fn issue_named(&self, file: &str, uris: &[&str]) -> PeerTls {
        let mut params = rcgen::CertificateParams::new(vec!["localhost".into()]).unwrap();
        let uri = |uri: &&str| rcgen::SanType::URI((*uri).try_into().unwrap());
        params.subject_alt_names.extend(uris.iter().map(uri));
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let path = |kind: &str| self.dir.join(format!("{file}.{kind}.pem"));
        std::fs::write(path("cert"), certificate.pem()).unwrap();
        std::fs::write(path("key"), key.serialize_pem()).unwrap();
        PeerTls { cert: path("cert"), key: path("key"), ca: self.dir.join("ca.pem") }
    }
}
