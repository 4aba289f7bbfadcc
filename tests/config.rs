//! Region and policy files, from their text to valid values or to every fault.
#![allow(clippy::disallowed_methods, reason = "tests and benchmarks measure with whatever clock they like")]

#[path = "config/envoy_ratelimit.rs"]
mod envoy_ratelimit;
#[path = "config/files.rs"]
mod files;
#[path = "config/matching.rs"]
mod matching;
#[path = "config/properties.rs"]
mod properties;
#[path = "config/schema.rs"]
mod schema;
#[path = "config/validate.rs"]
mod validate;
