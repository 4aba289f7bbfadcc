//! Region and policy files, from their text to valid values or to every fault.

#[path = "config/files.rs"]
mod files;
#[path = "config/matching.rs"]
mod matching;
#[path = "config/properties.rs"]
mod properties;
#[path = "config/validate.rs"]
mod validate;
