//! The Kubernetes manifests, as kubectl puts them together: each object by Kubernetes' own schema, and all of them by what they
//! say of each other.

use super::compose::{make_keys, validate};
use crate::support::tools::{root, run, tool, try_to_run, yaml};
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version whose schemas the manifests are checked by.
const KUBERNETES: &str = "1.32";
const REGIONS: [&str; 3] = ["ap-south", "eu-west", "us-east"];

/// One region's objects.
struct Objects {
    folder: tempfile::TempDir,
    all: Vec<Value>,
}

impl Objects {
    /// What `kubectl apply -k` would send, with keys made as the page says.
    fn of(region: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let copy = folder.path().join("kubernetes");
        run(Command::new("cp").arg("-r").arg(root().join("deploy/kubernetes")).arg(&copy));
        let overlay = copy.join("overlays").join(region);
        assert!(!overlay.join("secrets").exists(), "keys are not part of the repository");
        make_keys(&copy.join("keys"), &[&format!("{region}:quorate.{region}.example")]);
        std::fs::rename(copy.join("keys").join(region), overlay.join("secrets")).expect("keys");
        let out = folder.path().join("out");
        std::fs::create_dir(&out).expect("a folder");
        run(Command::new("kubectl").arg("kustomize").arg(&overlay).arg("-o").arg(&out));
        let read = |file: PathBuf| yaml(&std::fs::read_to_string(file).expect("an object"));
        let all = files(&out).into_iter().map(read).collect();
        Self { folder, all }
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    fn kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.all.iter().filter(move |object| object["kind"] == kind)
    }

    fn named(&self, kind: &str, name: &str) -> &Value {
        let is_it = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
        self.all.iter().find(is_it).unwrap_or_else(|| panic!("no {kind} {name}"))
    }

    /// The templates of pods that a selector's labels match.
    fn pods(&self, selector: &Value) -> Vec<&Value> {
        let wanted = selector.as_object().cloned().unwrap_or_default();
        let templates = self.kind("StatefulSet").map(|set| &set["spec"]["template"]);
        templates.filter(|pod| holds_all(&pod["metadata"]["labels"], &wanted)).collect()
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        std::fs::read_dir(folder).expect("a folder").map(|f| f.expect("a file").path()).collect();
    files.sort();
    files
}

fn holds_all(labels: &Value, wanted: &Map<String, Value>) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[test]
fn there_is_an_overlay_for_each_region_and_kubernetes_takes_what_it_makes() {
    let overlays: Vec<String> = files(&root().join("deploy/kubernetes/overlays"))
        .iter()
        .map(|f| f.file_name().expect("a name").to_string_lossy().into_owned())
        .collect();
    assert_eq!(overlays, REGIONS);
    let check = |files: Vec<PathBuf>| {
        let mut command = Command::new("python3");
        command.env("PYTHONPATH", tool("kubernetes-validate"));
        command.args(["-m", "kubernetes_validate", "--strict", "-k", KUBERNETES]).args(files);
        try_to_run(&mut command)
    };
    for region in REGIONS {
        let objects = Objects::of(region);
        assert!(objects.all.len() > 10, "{}", objects.all.len());
        let (right, said) = check(files(&objects.out()));
        assert!(right, "{region}: {said}");
        let passed = said.lines().filter(|line| line.contains(" passed ")).count();
        assert_eq!(passed, objects.all.len(), "{said}");
        // It sees a misspelt key.
        let wrong = objects.folder.path().join("wrong.yaml");
        let service =
            std::fs::read_to_string(objects.out().join("v1_service_quorate.yaml")).expect("a service");
        std::fs::write(&wrong, service.replace("targetPort", "targetport")).expect("a file");
        assert!(!check(vec![wrong]).0);
    }
}

#[test]
fn regions_are_what_the_daemon_takes() {
    let region =
        yaml(&std::fs::read_to_string(root().join("deploy/kubernetes/base/region.yaml")).expect("a file"));
    let urls: BTreeSet<_> =
        region["cluster"]["regions"].as_object().expect("regions").keys().map(String::as_str).collect();
    assert_eq!(urls, REGIONS.into());
    for name in REGIONS {
        let objects = Objects::of(name);
        let pod = &objects.named("StatefulSet", "quorate")["spec"]["template"];
        let container = &pod["spec"]["containers"][0];
        let mut variables = list(&container["env"]);
        assert!(variables.any(|v| v["name"] == "QUORATE_REGION" && v["value"] == name), "{container}");
        // The very files that the pod gets.
        let config = objects.kind("ConfigMap").next().expect("a configuration");
        let folder = objects.folder.path().join("etc");
        std::fs::create_dir(&folder).expect("a folder");
        for (file, text) in config["data"].as_object().expect("files") {
            std::fs::write(folder.join(file), text.as_str().expect("text")).expect("a file");
        }
        for file in ["region.yaml", "policies.yaml"] {
            let said = validate(&folder.join(file).display().to_string(), name);
            assert!(said.contains("valid") || said.contains("at most"), "{said}");
        }
        // What it names is mounted.
        let secret = objects.kind("Secret").next().expect("a secret");
        for path in [
            &region["peer_tls"]["cert"],
            &region["peer_tls"]["key"],
            &region["peer_tls"]["ca"],
            &region["admin_token_file"],
        ] {
            let key = path.as_str().and_then(|p| p.strip_prefix("/run/quorate/")).expect("a secret");
            assert!(secret["data"][key].is_string(), "{key}");
        }
        assert!(list(&container["volumeMounts"]).any(|m| m["mountPath"] == "/run/quorate"));
        let hosts = format!("https://quorate.{name}.example:8082");
        assert_eq!(region["cluster"]["regions"][name], hosts.as_str());
        let peer = objects.named("Service", "quorate-peer");
        let annotation = &peer["metadata"]["annotations"]["external-dns.alpha.kubernetes.io/hostname"];
        assert_eq!(*annotation, format!("quorate.{name}.example"));
    }
}

#[test]
fn objects_fit_together() {
    let objects = Objects::of("us-east");
    for set in objects.kind("StatefulSet") {
        let (name, pod) = (&set["metadata"]["name"], &set["spec"]["template"]);
        let selector = set["spec"]["selector"]["matchLabels"].as_object().expect("a selector");
        assert!(holds_all(&pod["metadata"]["labels"], selector), "{name}");
        assert_eq!(set["spec"]["replicas"], 1, "{name}: a region is one daemon and one Redis");
        objects.named("Service", set["spec"]["serviceName"].as_str().expect("a service"));
        let container = &pod["spec"]["containers"][0];
        let ports: BTreeSet<&str> = list(&container["ports"]).filter_map(|p| p["name"].as_str()).collect();
        for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
            if let Some(port) = container[probe]["httpGet"]["port"].as_str() {
                assert!(ports.contains(port), "{name}: {probe}");
            }
        }
        let volumes = list(&pod["spec"]["volumes"]).map(|v| &v["name"]);
        let claims = list(&set["spec"]["volumeClaimTemplates"]).map(|c| &c["metadata"]["name"]);
        let volumes: Vec<_> = volumes.chain(claims).collect();
        for mount in list(&container["volumeMounts"]) {
            assert!(volumes.contains(&&mount["name"]), "{name}: {mount}");
        }
        for volume in list(&pod["spec"]["volumes"]) {
            if let Some(secret) = volume["secret"]["secretName"].as_str() {
                objects.named("Secret", secret);
            }
            if let Some(config) = volume["configMap"]["name"].as_str() {
                objects.named("ConfigMap", config);
            }
        }
        // What the namespace's pod security, `restricted`, asks for.
        let (pod, own) = (&pod["spec"]["securityContext"], &container["securityContext"]);
        assert_eq!(pod["runAsNonRoot"], true);
        assert_eq!(pod["seccompProfile"]["type"], "RuntimeDefault");
        assert_eq!(own["allowPrivilegeEscalation"], false);
        assert_eq!(own["capabilities"]["drop"], serde_json::json!(["ALL"]));
    }
    for service in objects.kind("Service") {
        let pods = objects.pods(&service["spec"]["selector"]);
        assert_eq!(pods.len(), 1, "{}: selects one kind of pod", service["metadata"]["name"]);
        let ports: Vec<_> = list(&pods[0]["spec"]["containers"][0]["ports"]).map(|p| &p["name"]).collect();
        for port in list(&service["spec"]["ports"]) {
            assert!(ports.contains(&&port["targetPort"]), "{}", service["metadata"]["name"]);
        }
    }
    for budget in objects.kind("PodDisruptionBudget") {
        assert_eq!(objects.pods(&budget["spec"]["selector"]["matchLabels"]).len(), 2, "daemon and Redis");
    }
}

#[test]
fn the_network_lets_through_what_is_needed_and_denies_the_rest() {
    let objects = Objects::of("us-east");
    let open = |pod: &Value| -> BTreeSet<u64> {
        let ports = list(&pod["spec"]["containers"][0]["ports"]);
        ports.map(|p| p["containerPort"].as_u64().expect("a port")).collect()
    };
    let all = objects.named("NetworkPolicy", "nobody");
    assert_eq!(all["spec"]["podSelector"], serde_json::json!({}), "it is about every pod");
    for (name, sends_to) in [("quorate", vec![53, 4317, 6379, 8082]), ("redis", vec![])] {
        let policy = &objects.named("NetworkPolicy", name)["spec"];
        let pods = objects.pods(&policy["podSelector"]["matchLabels"]);
        assert_eq!(pods.len(), 1, "{name}");
        let let_in: BTreeSet<u64> = list(&policy["ingress"])
            .flat_map(|rule| list(&rule["ports"]))
            .filter_map(|p| p["port"].as_u64())
            .collect();
        assert_eq!(let_in, open(pods[0]), "{name}: each port has its callers");
        let let_out: BTreeSet<u64> = list(&policy["egress"])
            .flat_map(|rule| list(&rule["ports"]))
            .filter_map(|p| p["port"].as_u64())
            .collect();
        assert_eq!(let_out, sends_to.into_iter().collect(), "{name}");
        for peer in list(&policy["ingress"]).flat_map(|rule| list(&rule["from"])) {
            if !peer["podSelector"].is_null() {
                assert_eq!(objects.pods(&peer["podSelector"]["matchLabels"]).len(), 1, "{peer}");
            }
        }
    }
}
