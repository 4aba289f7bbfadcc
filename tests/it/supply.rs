//! What the program is made of: licences, sources and banned crates, by `cargo deny` (which tests/run installs) and deny.toml.

use std::path::PathBuf;
use std::time::Duration;

#[tokio::test]
async fn dependencies_are_in_order() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let installed = root.join("target/tools/cargo-deny/bin/cargo-deny");
    let program = if installed.exists() { installed } else { PathBuf::from("cargo-deny") };
    let mut command = tokio::process::Command::new(&program);
    command.current_dir(&root).args([
        "--locked",
        "check",
        "--hide-inclusion-graph",
        "licenses",
        "bans",
        "sources",
    ]);
    let run = tokio::time::timeout(Duration::from_secs(200), command.output()).await.expect("it ends");
    let output = run.unwrap_or_else(|e| panic!("{}: {e}; ./tests/run installs it", program.display()));
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("bans ok") && said.contains("licenses ok") && said.contains("sources ok"),
        "{said}"
    );
}
