//! Black-box tests: real daemons, real Redis, a real Envoy, real links that are cut.
//!
//! Run by `./tests/run`, which installs what they need. What each module shows is in its own head.

mod cluster;
mod dev;
mod envoy;
mod faults;
mod region;
mod support;
mod tidy;
