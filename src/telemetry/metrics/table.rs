//! Every metric, by name.

/// A metric's name (without its unit and the suffixes of its kind) and what it tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// Its name.
    pub name: &'static str,
    /// What it tells.
    pub help: &'static str,
}

macro_rules! table {
    ($($constant:ident: $name:literal, $help:literal;)*) => {
        $(pub(super) const $constant: Described = Described { name: $name, help: $help };)*
        /// Every metric of a daemon.
        pub const TABLE: &[Described] = &[$($constant),*];
    };
}

table! {
    BREACHES: "quorate_promise_breaches", "Times that a check of the promise failed, by check (books, committed, level, admitted): anything but 0 is a bug or damaged data";
    COMMITTED: "quorate_pool_committed_ratio", "Most of any bucket: reserves and all that regions may hold, as a part of the limit (of its burst, of its rate)";
    FROZEN: "quorate_pool_frozen_buckets", "Buckets that are frozen because their books did not balance";
    BOUND: "quorate_policy_bound_tokens", "Burst and overshoot: what all regions together may admit at once, of a bucket";
    BOUND_RATE: "quorate_policy_bound_tokens_per_second", "What all regions together may admit beyond that, of a bucket";
    OVERDRAFT: "quorate_overdraft_used_tokens", "The most that any bucket of this region is below zero";
    OVERDRAFT_BOUND: "quorate_overdraft_bound_tokens", "The most that a bucket of this region may be below zero";
    HOT: "quorate_hot_bucket_tokens", "Tokens that the hottest buckets were asked for, by result (at most 20 buckets)";
    DECISIONS: "quorate_decisions", "Answers of limits, by policy, result and reason";
    COST: "quorate_cost_tokens", "Tokens that requests asked of limits, by policy and result";
    UNMATCHED: "quorate_unmatched", "Descriptors that no policy matched, by domain (the first 100 domains; then `other`)";
    BAD_REQUESTS: "quorate_bad_requests", "Requests that could not be checked as they were, by protocol";
    REQUESTS_TIMED_OUT: "quorate_requests_timed_out", "Requests that were not answered in time, by protocol";
    DECISION: "quorate_decision", "Time from a request read to its answer, by protocol and result";
    CONNECTIONS: "quorate_connections", "Open connections of callers, by protocol";
    CONNECTIONS_REFUSED: "quorate_connections_refused", "Connections of callers that were hung up on because their address had too many, by protocol";
    UNAUTHENTICATED: "quorate_unauthenticated", "Requests of callers without a token that may ask, by protocol";
    NEW_BUCKETS_REFUSED: "quorate_new_buckets_refused", "Buckets that were not made because a caller brought too many, or the store holds too many keys";
    DENIALS_FROM_MEMORY: "quorate_denials_from_memory", "Requests that were denied without asking the store: it had just denied, and the bucket cannot have refilled";
    WAIT: "quorate_wait", "Time that strict requests waited for a lease, by policy and outcome";
    WAITING: "quorate_waiting", "Requests that wait for a lease now";
    FALLBACKS: "quorate_fallbacks", "Answers of limits without the store, by policy and what it says to do then";
    STORE_CALL: "quorate_store_call", "Time of a store call, by operation";
    STORE_BATCH: "quorate_store_batch_requests", "Requests in one call that takes tokens";
    STORE_ERRORS: "quorate_store_errors", "Decisions that the store gave no answer to, by kind (unavailable, timeout, fenced)";
    STORE_BREAKERS: "quorate_store_breakers_open", "Worker threads that do without the store because a call to it is overdue";
    STORE_BREAKER_OPENED: "quorate_store_breaker_opened", "Times that a worker thread began to do without the store because a call was overdue";
    STORE_ATTACHED: "quorate_store_attached", "1: the store serves this daemon";
    STORE_SESSIONS: "quorate_store_sessions", "Sessions begun with the store: the daemon started, or the store lost its data";
    STORE_KEYS: "quorate_store_keys", "Keys of this region in its store, as estimated from a sample";
    STORE_MEMORY: "quorate_store_memory", "What they take of the store's memory, as estimated from a sample";
    REDIS_KEYS: "quorate_redis_keys", "Keys in the database of this region's Redis, whoever's they are";
    REDIS_MEMORY: "quorate_redis_memory", "Memory that this region's Redis uses";
    REDIS_MEMORY_MAX: "quorate_redis_memory_max", "Memory that this region's Redis may use; 0: no limit";
    REDIS_EVICTED: "quorate_redis_evicted_keys", "Keys that this region's Redis has evicted since it started";
    POOL_BUCKETS: "quorate_pool_buckets", "Buckets that have books in the pool, by policy";
    POOL_TOKENS: "quorate_pool_tokens", "Burst of the buckets that have books, by policy and whose it is: reserve, leased, free";
    POOL_RATE: "quorate_pool_tokens_per_second", "Rate of the buckets that have books, by policy and whose it is: reserve, leased, free";
    POOL_LEVEL: "quorate_pool_level_tokens", "Tokens that could be lent now, of the buckets that have books";
    POOL_WALK_AGE: "quorate_pool_walk_age", "How old the figures about the pool's buckets are at most";
    ASKS: "quorate_asks", "Asks sent to the pool";
    ASK: "quorate_ask", "Time from an ask to its lease";
    RECORDS: "quorate_records", "The pool's records installed in buckets";
    BUCKETS: "quorate_buckets", "Buckets that the slow loop follows";
    PROPOSALS: "quorate_proposals", "This region's proposals to the log, by outcome";
    PROPOSAL: "quorate_proposal", "Time from a proposal of this region to its answer";
    RAFT_TERM: "quorate_raft_term", "The current term";
    RAFT_LEADER: "quorate_raft_leader", "1: this region leads";
    RAFT_LEADER_CHANGES: "quorate_raft_leader_changes", "Times that this region saw another leader than before";
    RAFT_LAST: "quorate_raft_last_index", "Index of the last entry in this region's log";
    RAFT_COMMITTED: "quorate_raft_committed_index", "Index of the last entry known here to be committed";
    RAFT_APPLIED: "quorate_raft_applied_index", "Index of the last entry applied here";
    RAFT_SNAPSHOT: "quorate_raft_snapshot_index", "Index of the last entry in the newest snapshot";
    RAFT_LAG: "quorate_raft_apply_lag_entries", "Committed entries that are still to be applied here";
    RAFT_FOLLOWER_LAG: "quorate_raft_replication_lag_entries", "Entries that another region's log is behind the leader's (shown by the leader)";
    RAFT_QUORUM_AGE: "quorate_raft_quorum_ack_age", "Time since a quorum acknowledged the leader (shown by the leader)";
    RAFT_AGE: "quorate_raft_stamp_age", "Age of the newest stamp of the Raft clock";
    RAFT_COMMIT: "quorate_raft_commit", "Time from an entry closed to its being applied (by the leader)";
    RAFT_OPERATIONS: "quorate_raft_entry_operations", "Operations in one entry (by the leader)";
    PEER_REACHABLE: "quorate_peer_reachable", "1: the region has answered the last pings";
    PEER_RTT: "quorate_peer_rtt", "Smoothed round trip to the region";
    POLICIES_VERSION: "quorate_policies_version", "Version of the policies in use here";
    POLICIES_SETTLED: "quorate_policies_settled", "1: no change of policies or regions is under way";
    READY: "quorate_ready", "1: ready";
    BUILD: "quorate_build_info", "The daemon's version; always 1";
    LOG_EVENTS: "quorate_log_events", "Warnings and errors of this process, by level, those left out of the log included";
    LOG_SUPPRESSED: "quorate_log_suppressed", "Log lines of this process that were left out because they repeat themselves";
    SPANS: "quorate_spans", "Trace spans of this process, by outcome (exported, lost)";
    PROCESS_START: "process_start_time", "When this process started, since the Unix epoch";
    PROCESS_CPU: "process_cpu", "CPU time of this process";
    PROCESS_MEMORY: "process_resident_memory", "Resident memory of this process";
    PROCESS_FDS: "process_open_fds", "Open files of this process";
    PROCESS_FDS_MAX: "process_max_fds", "Open files that this process may have";
}
