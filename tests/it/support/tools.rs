//! Other people's programs that check the files that we ship. `./tests/run` installs those that are missing.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file of the repository.
pub fn file(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// A program that `./tests/run` has put under `target/tools`.
pub fn tool(path: &str) -> PathBuf {
    let tool = root().join("target/tools").join(path);
    assert!(tool.exists(), "no {}: run ./tests/run, which installs it", tool.display());
    tool
}

/// Runs a program in the repository, which must succeed, and returns what it said (stdout, then stderr).
pub fn run(command: &mut Command) -> String {
    let (status, said) = try_to_run(command);
    assert!(status, "{command:?} fails:\n{said}");
    said
}

/// Runs a program in the repository: did it succeed, and what did it say?
pub fn try_to_run(command: &mut Command) -> (bool, String) {
    let output = command.current_dir(root()).output();
    let output = output.unwrap_or_else(|e| panic!("{command:?} does not start ({e}): run ./tests/run"));
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), said)
}

/// YAML (of one document) or JSON.
pub fn yaml(text: &str) -> serde_json::Value {
    serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}
