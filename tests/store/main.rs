//! One suite over both stores, and what only a Redis can do to one.

mod redis;
mod suite;
mod support;
