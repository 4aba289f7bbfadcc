//! The pure core: amounts, policies, matching, buckets, verdicts, and the pool that regions share.
//!
//! No I/O, no async, no clock, no randomness, no floats, no logging. Time comes in as
//! [`amount::Micros`], and what comes out is a value. Everything else in the crate moves data to and
//! from here.
#![deny(clippy::float_arithmetic, clippy::arithmetic_side_effects, clippy::as_conversions)]
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![cfg_attr(test, allow(clippy::arithmetic_side_effects, clippy::as_conversions, clippy::unwrap_used))]
#![cfg_attr(test, allow(clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod amount;
pub mod borrower;
pub mod bucket;
pub mod calendar;
pub mod counted;
pub mod demand;
pub mod guarantee;
pub mod matching;
pub mod policy;
pub mod pool;
pub mod redaction;
pub mod verdict;
