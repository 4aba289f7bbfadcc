//! The wire between regions: HTTP/2, postcard bodies behind a version byte, mutual TLS.

pub(super) mod append;
pub(super) mod certificate;
pub(super) mod client;
pub(super) mod peers;
#[cfg(test)]
mod samples;
pub(super) mod server;
pub(super) mod wire;
