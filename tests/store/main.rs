//! One suite over both stores, and what only a Redis can do to one.
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

mod cluster;
mod counted;
mod redis;
mod secured;
mod sentinel;
mod suite;
mod support;
