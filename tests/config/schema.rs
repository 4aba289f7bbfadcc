//! The JSON Schemas are in step with the readers: they take every example, and refuse every wrong file that a schema can.

use boon::{Compiler, Schemas};
use quorate::cli::schema::File;
use quorate::config::{policies, region};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Wrong in a way that no schema can say: what is there twice, what depends on another value, what is not YAML.
const BEYOND: &[&str] = &[
    "policies-key-twice.yaml",
    // Right, and not served yet.
    "policies-later.yaml",
    "policies-not-yaml.yaml",
    "policies-twice.yaml",
    "policies-weights.yaml",
    "region-admin-open.yaml",
    "region-environment.yaml",
    "region-not-a-member.yaml",
    "region-not-yaml.yaml",
    "region-peers-off-loopback.yaml",
    "region-peers-without-tls.yaml",
    "region-same-port.yaml",
    "region-secrets-are-not-shown.yaml",
    "region-two-documents.yaml",
];

fn json(text: &str) -> Option<Value> {
    serde_saphyr::from_str(text).ok()
}

/// Why the schema does not take a file; `None`: it does.
fn refused(of: File, file: &Value) -> Option<String> {
    let mut compiler = Compiler::new();
    let schema: Value = serde_json::from_str(of.schema()).expect("JSON");
    compiler.add_resource("schema.json", schema).expect("a resource");
    let mut schemas = Schemas::new();
    let compiled = compiler.compile("schema.json", &mut schemas).expect("a schema");
    schemas.validate(file, compiled).err().map(|error| error.to_string())
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn in_folder(folder: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(repository(folder)).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    files.sort();
    files
}

#[test]
fn every_example_is_taken() {
    let examples = [(File::Region, "config/region.yaml"), (File::Policies, "config/policies.yaml")];
    for (of, name) in examples {
        let file = json(&read(&repository(name))).unwrap();
        assert_eq!(refused(of, &file), None, "{name}");
    }
    for path in in_folder("tests/config/envoy_ratelimit", "out") {
        let file = json(&read(&path)).unwrap();
        assert_eq!(refused(File::Policies, &file), None, "{}", path.display());
    }
    let all_keys = "region: a\nlisten: { http: '[::]:0', peer: '127.0.0.1:1' }\nstore: { embedded: }\n\
        cluster: { name: c, rtt_max: 1s, regions: { a: 'http://127.0.0.1:1' } }\nadmin_token: 0123456789abcdefg\n\
        redact: [api_key]\ntelemetry: { otlp: 'http://127.0.0.1:4317', log: json }\nforward_auth:\n  domain: web\n  \
        trusted_proxies: 2\n  attributes: { a: 'header: x-a', b: 'cookie:b', c: 'query:c', d: client-ip, e: method, f: host, g: path }\n";
    region::parse(Path::new("r"), all_keys, &[]).unwrap();
    assert_eq!(refused(File::Region, &json(all_keys).unwrap()), None);
}

#[test]
fn what_a_schema_can_see_is_refused() {
    let mut taken = Vec::new();
    for path in in_folder("tests/config/wrong", "yaml") {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let of = if name.starts_with("region") { File::Region } else { File::Policies };
        let refused = json(&read(&path)).is_none_or(|file| refused(of, &file).is_some());
        if !refused && !BEYOND.contains(&name.as_str()) {
            taken.push(name);
        }
    }
    assert!(taken.is_empty(), "the schema takes {taken:?}");
}

/// Whoever adds a key has to write it into the schema, too.
#[test]
fn the_schemas_know_the_same_keys() {
    let keys = |of: File, pointer: &str| -> Vec<String> {
        let schema: Value = serde_json::from_str(of.schema()).unwrap();
        let mut keys: Vec<String> =
            schema.pointer(pointer).unwrap().as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys
    };
    let sorted = |known: &[&str]| {
        let mut known: Vec<String> = known.iter().map(ToString::to_string).collect();
        known.sort();
        known
    };
    assert_eq!(keys(File::Region, "/properties"), sorted(region::KEYS));
    assert_eq!(keys(File::Policies, "/definitions/policy/properties"), sorted(policies::KEYS));
}
