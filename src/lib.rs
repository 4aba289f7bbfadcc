//! Quorate: one API quota, enforced across regions, that stays true when the network does not.
pub mod quota;
pub mod raft;
pub mod store;
pub mod wan;
