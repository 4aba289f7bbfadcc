//! What is asked of a cluster, and what became of each request.

mod callers;
mod recorder;

pub use callers::{ANSWER_WITHIN, Target, Workload, client};
pub use recorder::{Pulse, Recorder, Reply};
