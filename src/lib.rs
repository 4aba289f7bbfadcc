//! Quorate: one API quota, enforced across regions, that stays true when the network does not.
pub mod cli;
pub mod config;
pub mod limiter;
pub mod node;
pub mod quota;
pub mod raft;
pub mod reconcile;
pub mod server;
pub mod store;
pub mod telemetry;
pub mod wan;
