//! Quorate: one API quota, enforced across regions, that stays true when the network does not.
pub mod config;
pub mod limiter;
pub mod quota;
pub mod raft;
pub mod server;
pub mod store;
pub mod telemetry;
pub mod wan;
