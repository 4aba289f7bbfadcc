//! The house rules that no lint checks: who may import whom, how long a file may be, what no finished file holds.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A longer file wants to be two.
const LINES_MAX: usize = 700;

/// Each room and the rooms that it may import (src/lib.rs draws the map). `node` and `cli` know all; nobody imports them.
const ROOMS: &[(&str, &[&str])] = &[
    ("bugs", &[]),
    ("quota", &["bugs"]),
    ("clock", &["quota"]),
    ("config", &["quota"]),
    ("telemetry", &["quota", "config"]),
    ("store", &["quota", "clock", "telemetry", "tls", "bugs"]),
    ("raft", &["quota", "clock", "telemetry", "tls", "bugs"]),
    ("limiter", &["store", "quota", "telemetry", "clock"]),
    ("reconcile", &["store", "raft", "quota", "clock", "limiter", "telemetry", "bugs"]),
    ("server", &["limiter", "quota", "config", "telemetry", "tls"]),
    ("tls", &[]),
    ("wan", &[]),
];

/// All that the pure core may name of the world outside.
const QUOTA_CRATES: &[&str] = &["std", "core", "alloc", "serde", "blake3", "thiserror"];

/// A source file: where, which room, and its code without comments, strings and tests.
struct Source {
    path: PathBuf,
    room: String,
    code: String,
}

#[test]
fn rooms_import_only_the_rooms_that_they_may() {
    let mut wrong = Vec::new();
    for source in sources() {
        let Some((_, allowed)) = ROOMS.iter().find(|(room, _)| *room == source.room) else { continue };
        for import in words_after(&source.code, "crate::").iter().filter(|import| is_room(import)) {
            if *import != source.room && !allowed.contains(&import.as_str()) {
                wrong.push(format!("{}: `{}` may not import `{import}`", source.path.display(), source.room));
            }
        }
    }
    assert!(wrong.is_empty(), "see Who may import whom in src/lib.rs:\n{}", wrong.join("\n"));
}

#[test]
fn every_room_is_on_the_list() {
    let known: BTreeSet<String> = ROOMS.iter().map(|(room, _)| (*room).to_owned()).collect();
    let beyond = BTreeSet::from(["node", "cli", "fuzz", "lib", "main"].map(str::to_owned));
    let found: BTreeSet<String> = sources().into_iter().map(|source| source.room).collect();
    let unknown: Vec<_> = found.difference(&known).filter(|room| !beyond.contains(*room)).collect();
    assert!(unknown.is_empty(), "rooms that tests/it/tidy.rs does not know: {unknown:?}");
}

#[test]
fn the_pure_core_is_pure() {
    let mut wrong = Vec::new();
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let foreign: Vec<String> =
        dependencies(&manifest).into_iter().filter(|d| !QUOTA_CRATES.contains(&d.as_str())).collect();
    for source in sources().iter().filter(|source| source.room == "quota") {
        let paths = paths_begun(&source.code);
        let named = foreign.iter().filter(|name| paths.contains(*name)).cloned();
        let impure = [
            "Instant",
            "SystemTime",
            "std::fs",
            "std::net",
            "std::env",
            "std::thread",
            "std::io",
            "f32",
            "f64",
            "async fn",
            "unsafe",
        ];
        let impure =
            impure.iter().filter(|what| holds_word(&source.code, what)).map(|what| (*what).to_owned());
        wrong.extend(named.chain(impure).map(|what| format!("{}: {what}", source.path.display())));
    }
    assert!(
        wrong.is_empty(),
        "src/quota takes no clock, no I/O, no floats, and these are:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn files_are_short_enough_to_read() {
    let mut long = Vec::new();
    for path in files(&["src", "tests", "benches", "chaos"], &["rs", "lua"]) {
        let lines = fs::read_to_string(&path).expect("a source file").lines().count();
        if lines > LINES_MAX {
            long.push(format!("{}: {lines} lines", path.display()));
        }
    }
    assert!(long.is_empty(), "at most {LINES_MAX} lines a file:\n{}", long.join("\n"));
}

#[test]
fn nothing_is_left_to_be_done() {
    let unfinished = ["todo!", "unimplemented!", "dbg!", "#[ignore", "FIXME", "XXX"];
    let mut found = Vec::new();
    for path in files(&["src", "tests", "benches", "chaos"], &["rs", "lua"]) {
        if path.ends_with("tests/it/tidy.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source file");
        for (number, line) in text.lines().enumerate() {
            let left = unfinished.iter().filter(|what| line.contains(*what));
            found.extend(left.map(|what| format!("{}:{}: {what}", path.display(), number + 1)));
        }
    }
    assert!(found.is_empty(), "finish these:\n{}", found.join("\n"));
}

#[test]
fn the_checks_above_see_what_they_look_for() {
    let code =
        code_of("use crate::store::Store; // crate::raft\nlet s = \"crate::node\"; crate::quota::x();\n");
    assert_eq!(words_after(&code, "crate::"), ["store", "quota"]);
    assert!(
        paths_begun("let x = tokio::time::sleep(1); use fred::clients;")
            .is_superset(&["tokio", "fred"].map(str::to_owned).into())
    );
    assert!(!paths_begun("crate::tokio::x").contains("tokio"));
    assert!(holds_word("fn x() -> f64 {", "f64") && !holds_word("pdf640", "f64"));
    let tested = code_of("fn a() {}\n#[cfg(test)]\nmod tests {\n    use crate::node;\n}\n");
    assert!(words_after(&tested, "crate::").is_empty(), "tests may name anything: {tested}");
    assert_eq!(
        dependencies(
            "[dependencies]\na-b = \"1\"\n[dev-dependencies]\nc = { version = \"1\" }\n[lib]\nd = 1\n"
        ),
        ["a_b", "c"]
    );
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn is_room(name: &str) -> bool {
    ROOMS.iter().any(|(room, _)| *room == name) || ["node", "cli"].contains(&name)
}

/// The files under `src` that are not only there for tests.
fn sources() -> Vec<Source> {
    let paths = files(&["src"], &["rs"]);
    assert!(paths.len() > 10, "src was found");
    let for_tests: Vec<PathBuf> = paths.iter().flat_map(|path| test_modules(path)).collect();
    let kept =
        paths.into_iter().filter(|path| !for_tests.iter().any(|t| path.with_extension("").starts_with(t)));
    kept.map(|path| {
        let code = code_of(&fs::read_to_string(&path).expect("a source file"));
        let first =
            path.strip_prefix(root().join("src")).expect("under src").components().next().expect("a name");
        let room = Path::new(&first).file_stem().expect("a name").to_string_lossy().into_owned();
        Source { path, room, code }
    })
    .collect()
}

/// The paths, without extension, of the modules that a file declares for tests alone.
fn test_modules(path: &Path) -> Vec<PathBuf> {
    let text = fs::read_to_string(path).expect("a source file");
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let folder = path.with_extension("");
    let declared = lines.windows(2).filter(|pair| pair[0] == "#[cfg(test)]");
    let names =
        declared.filter_map(|pair| pair[1].strip_suffix(';')?.rsplit_once("mod ").map(|(_, name)| name));
    names.map(|name| folder.join(name)).collect()
}

/// Every file under these folders with one of these extensions.
fn files(folders: &[&str], extensions: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = folders.iter().map(|f| root().join(f)).filter(|f| f.is_dir()).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| extensions.iter().any(|x| *x == e)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// A file without its comments, its strings and the test module at its end.
fn code_of(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let inline_tests =
            lines.peek().is_some_and(|next| next.trim_start().starts_with("mod ") && next.ends_with('{'));
        if line.trim() == "#[cfg(test)]" && inline_tests {
            break;
        }
        code.push_str(&without_strings(line.split("//").next().unwrap_or("")));
        code.push('\n');
    }
    code
}

fn without_strings(line: &str) -> String {
    line.split('"').step_by(2).collect::<Vec<_>>().join("\"\"")
}

/// The words that follow a prefix, in order. Those in braces too: `crate::{a, b}`.
fn words_after(code: &str, prefix: &str) -> Vec<String> {
    let mut words = Vec::new();
    for after in code.split(prefix).skip(1) {
        let list = after.strip_prefix('{').and_then(|list| list.split_once("};"));
        let names: Vec<&str> = list.map_or(vec![after], |(list, _)| list.split(',').map(str::trim).collect());
        words.extend(
            names.into_iter().map(|name| name.split(|c: char| !is_word(c)).next().unwrap_or("").to_owned()),
        );
    }
    words
}

/// The first names of all paths: `a` of `a::b::c`.
fn paths_begun(code: &str) -> BTreeSet<String> {
    let mut begun = BTreeSet::new();
    for (at, _) in code.match_indices("::") {
        let before = code.split_at(at).0;
        let name: String =
            before.chars().rev().take_while(|c| is_word(*c)).collect::<Vec<_>>().into_iter().rev().collect();
        if !before.strip_suffix(name.as_str()).unwrap_or("").ends_with("::") {
            begun.insert(name);
        }
    }
    begun
}

fn holds_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let (before, after) = (code.split_at(at).0, code.split_at(at + word.len()).1);
        !before.ends_with(is_word) && !after.starts_with(is_word)
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The crates that a manifest names, as code spells them.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut inside = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.ends_with("dependencies]");
        } else if let (true, Some((name, _))) = (inside, line.split_once('=')) {
            names.push(name.trim().replace('-', "_"));
        }
    }
    names
}
