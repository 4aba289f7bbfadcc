//! Quorate: one API quota, enforced across regions, that stays true when the network does not.
//!
//! This page is the map of the source. What the program promises is in `docs/guarantees.md`, how to run it in
//! `docs/operations.md`.
//!
//! # Words
//!
//! | word | meaning |
//! | --- | --- |
//! | region | one place with one daemon and one store (its Redis) |
//! | member | a region that is in the cluster, under a Raft node id that is another one in each of its lives |
//! | witness | a member that votes, has no part of any limit and serves nobody |
//! | level | which operations a member applies; what is too new for one of them is not proposed |
//! | policy | one rule: what it matches, its limit, its consistency mode; the same in every region |
//! | bucket | one policy for one set of descriptor values |
//! | reserve | the part of a limit that each region may always spend, with no word from anyone |
//! | pool | the rest of the limit, lent to regions through Raft |
//! | lease, slice | a part of a pool lent to a region: tokens, burst, rate, and when it ends |
//! | loan | a part of the rate of an idle reserve, lent by its region to the pool for 30 s where others are short |
//! | window, turn | what a quota is for: a unit of the calendar or a length of time; one such span, from its beginning to its end |
//! | time of day | the latest that the wall clocks of a majority of the regions have reached, forward only: what windows turn by |
//! | count | what a bucket of a limit that counts keeps: two counters, a log, or the permits in use |
//! | permit | one of so many at a time; lent to its holder under a lease of its own, by the region's store, which may itself have it on loan: see [`quota::counted::lent`] |
//! | epoch | a region's life between two losses of state; what was lent under an older one is not used any more |
//! | session | the store's name for the same: which daemon holds the buckets, and since when there is data |
//! | Raft clock, tau | time as the log knows it: never ahead of true time |
//!
//! # The flows
//!
//! **A request** ([`server`] → [`limiter`] → [`store`]): a wire request is matched ([`quota::matching`]) to charges; the store
//! takes all or none in one atomic step, under its own clock; what it found becomes a verdict ([`quota::verdict`]) and
//! header fields. What the store has just denied and cannot have refilled is denied without it ([`limiter::denials`]). Nothing on this
//! path leaves the region. Callers' connections are pinned to worker threads, each with a
//! single-threaded runtime and its own connection to Redis; what arrives while a call is in flight shares the next.
//!
//! **A lease** ([`reconcile`] → [`raft`] → [`reconcile`] → [`store`]): a bucket that runs low is looked at by its
//! [`quota::borrower`]; the store *stops using* what is given up; one proposal carries all asks of a round; every
//! replica applies it to its [`quota::pool`]; the region reads its own record there and installs it in its bucket.
//!
//! **A reset** ([`server::admin`] → [`raft`] → [`quota::pool::Reset`] → [`reconcile`] → [`store`]): one operation fills the pool; each region says
//! through the log that it has heard, and then gives its bucket what its reserve holds, once.
//!
//! **What people see** ([`limiter::meter`] → [`node`] → [`server::admin`]): each region counts what passes, by policy and by its busiest
//! buckets, and asks the others once a second what they counted. [`server::state`] is what comes of it, for the console
//! (`server/console/`, plain files in the binary), `quorate top` and scripts. Nothing that is decided goes by it.
//!
//! **A reset** ([`server::admin`] → [`raft`] → [`quota::pool::Reset`] → [`reconcile`] → [`store`]): one operation fills the pool; each region says
//! through the log that it has heard, and then gives its bucket what its reserve holds, once.
//!
//! # Rooms, and who may use whom
//!
//! | room | does | may use |
//! | --- | --- | --- |
//! | [`quota`] | the pure core: no I/O, async, clock, randomness, floats or logging | std, serde (and blake3, for names of buckets) |
//! | [`config`] | files → valid types, or every fault with its place and mend | `quota` |
//! | [`store`] | a region's buckets: Redis, or memory | `quota`, `tls` |
//! | [`raft`] | openraft round the pool: log, snapshots, the wire between regions | `quota`, `tls` |
//! | [`limiter`] | the fast loop | `store`, `quota`, `telemetry`, `clock` (the time of day); implements `server::Decide` |
//! | [`reconcile`] | the slow loop | `store`, `raft`, `quota`, the limiter's tallies |
//! | [`server`] | listeners, limits, HTTP, gRPC, admin | `quota`, `telemetry`, `tls` |
//! | [`telemetry`] | logs, traces, every metric | `quota` |
//! | [`clock`] | the machine's clock | `quota` |
//! | [`tls`] | TLS from files, files that change | std, rustls |
//! | [`bugs`] | deliberate bugs for `quorate-chaos` to catch; constants without feature `sim` | std |
//! | [`wan`] | a line with delay and partitions, for `quorate dev` and tests | tokio |
//! | [`node`] | builds, runs and drains one region | all |
//! | [`cli`] | one file a command | all |
//!
//! `store` and `raft` do not know each other: they meet in `reconcile`. `limiter` does not know `raft`. `tests/it/tidy.rs` checks it.
//!
//! # Architecture invariants
//!
//! - **Core computes, edges do.** Time and randomness come into `quota` as arguments.
//! - **One door for each state.** [`quota::pool::Pool::apply`] for the pool, one atomic script for buckets. The Lua
//!   in `store/redis/` equals its Rust twins, [`quota::bucket`] and [`quota::counted`], on random traces.
//! - **Never use what was given up, never count what was not heard.** A region stops using before it sends; the pool counts the larger
//!   of what a region held and what it was offered until the region says that it has shrunk.
//! - **A lease ends at the region first.** It counts from before the ask was sent, on the store's clock, shortened by the drift; the pool
//!   counts from the commit, on the Raft clock, which runs slow.
//! - **A lender comes last.** What a region lends of its reserve backs only leases that end before the loan does, within the term whose clock
//!   it was measured by; the region uses it again later than that, by its store's clock.
//! - **Never full because missing.** A store that lost its data, or cannot prove that it did not, starts empty.
//! - **Unknown is not failed.** What was sent and not answered may have happened: errors say which it is, nothing is retried
//!   blindly, and every step that is retried is idempotent.
//! - **Everything has a limit and a deadline**: queues, bodies, connections, policies, waits, calls.
//! - **Replicated and stored types only grow**: they travel behind a version byte; fields and variants are appended.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unimplemented, clippy::todo)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

pub mod bugs;
pub mod cli;
pub mod clock;
pub mod config;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod limiter;
pub mod node;
pub mod quota;
pub mod raft;
pub mod reconcile;
pub mod server;
pub mod store;
pub mod telemetry;
pub mod tls;
pub mod wan;
