//! The scripts, each with its digest; see the head of each `.lua` for keys, arguments and answers.

use super::fault::{Fault, classify};
use bytes::Bytes;
use fred::clients::Client;
use fred::interfaces::LuaInterface;
use fred::types::scripts::Script;
use fred::types::{Key, Value};
use std::sync::LazyLock;

/// The scripts as the store runs them.
pub(super) static SCRIPTS: LazyLock<Scripts> =
    LazyLock::new(|| Scripts::with_clock(include_str!("clock.lua")));

/// All scripts over one source of time.
pub(super) struct Scripts {
    pub(super) take: Script,
    pub(super) take_counts: Script,
    pub(super) known: Script,
    pub(super) prepare: Script,
    pub(super) install: Script,
    pub(super) prepare_permits: Script,
    pub(super) install_permits: Script,
    pub(super) attach: Script,
    pub(super) beat: Script,
}

impl Scripts {
    /// `clock` is Lua that sets `TIME`.
    pub(super) fn with_clock(clock: &str) -> Self {
        let core = include_str!("core.lua");
        let on_buckets = |body: &str| Script::from_lua(format!("{clock}\n{core}\n{body}"));
        let counted = include_str!("counted.lua");
        let on_counts = |body: &str| on_buckets(&format!("{counted}\n{body}"));
        let leases = include_str!("leases.lua");
        let about_leases = |body: &str| format!("{leases}\n{body}");
        let plain = |body: &str| Script::from_lua(format!("{clock}\n{body}"));
        Self {
            take: on_buckets(include_str!("take.lua")),
            take_counts: on_counts(include_str!("take_counts.lua")),
            known: on_buckets(include_str!("known.lua")),
            prepare: on_buckets(&about_leases(include_str!("prepare.lua"))),
            install: on_buckets(&about_leases(include_str!("install.lua"))),
            prepare_permits: on_counts(&about_leases(include_str!("prepare_permits.lua"))),
            install_permits: on_counts(&about_leases(include_str!("install_permits.lua"))),
            attach: plain(include_str!("attach.lua")),
            beat: plain(include_str!("beat.lua")),
        }
    }
}

/// A script's keys and arguments.
#[derive(Clone, Debug, Default)]
pub(super) struct Call {
    pub(super) keys: Vec<Key>,
    pub(super) args: Vec<Bytes>,
}

/// Runs a script; sends all of it if the server has forgotten it (then it has not run). One step, so that it is not forgotten between.
pub(super) async fn run(client: &Client, script: &Script, call: Call) -> Result<Bytes, Fault> {
    let args: Vec<Value> = call.args.into_iter().map(Value::Bytes).collect();
    let answer = match client.evalsha(script.sha1().clone(), call.keys.clone(), args.clone()).await {
        Err(error) if error.details().starts_with("NOSCRIPT") => {
            let lua = script.lua().cloned().unwrap_or_default();
            client.eval(lua, call.keys, args).await
        }
        other => other,
    };
    answer.map_err(|e| classify(&e))
}
