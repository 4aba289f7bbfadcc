//! `quorate-chaos` tries to make Quorate break its word, says what happened in pictures, and replays any failure.
//!
//! Two ways to a [`history`](oracle::History), one oracle for both:
//!
//! | room | does |
//! | --- | --- |
//! | [`sim`] | the daemon's own loops in one process, with simulated network, time, stores and log; a seed replays bit for bit |
//! | [`cluster`] | real daemons and `redis-server`s as processes, every link through a proxy; scenarios are YAML |
//! | [`oracle`] | what clients saw and what was done to the cluster: the only thing that is judged |
//! | [`invariants`] | the promises, one file each, each with a made-up history that breaks it |
//! | [`report`] | a history and its verdicts as one self-contained HTML file |

pub mod cluster;
pub mod invariants;
pub mod oracle;
pub mod report;
pub mod sim;
pub mod workload;
