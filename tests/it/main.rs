//! Black-box tests: real daemons, real Redis, a real Envoy, real links that are cut.
//!
//! Run by `./tests/run`, which installs what they need. What each module shows is in its own head.
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

mod bench;
mod cluster;
mod console;
mod costs;
mod counts;
mod denials;
mod deploy;
mod dev;
mod envoy;
mod faults;
mod forward_auth;
mod logs;
mod members;
mod metrics;
mod permits;
mod quotas;
mod region;
mod resets;
mod restart;
mod restore;
mod safety;
mod stores;
mod supply;
mod support;
mod tidy;
mod traces;
mod witness;
