//! Quorate: one API quota, enforced across regions, that stays true when the network does not.
pub mod cli;
pub mod config;
pub mod quota;
pub mod store;
