//! What the admin listener shows and does.

use super::overview::{bucket_in_hex, now_ms, on_store_failure};
use super::{Inner, gauges};
use crate::clock;
use crate::config;
use crate::quota::amount::{Micros, Tokens};
use crate::quota::calendar::Turn;
use crate::quota::counted::Kind;
use crate::quota::guarantee::counted::Counted;
use crate::quota::matching::{bucket_of, window_bucket};
use crate::quota::policy::{BucketId, Limit, Mode, Policy, RegionName};
use crate::quota::pool::{Books, Member, Op, PolicyOutcome, Pool, Record, RegionId, SetPolicies, Standing};
use crate::raft::ProposeError;
use crate::server::admin::{
    self, AdminSource, ApplyError, BucketError, Feed, MetricsFormat, PolicyChange, RegionAction, ResetError,
    ResetRequest,
};
use crate::server::state::{
    AppliedPolicies, BooksState, BucketRegion, BucketReset, BucketState, BucketView, LeaseState, LentState,
    PeerBucket, PeerQuestion, PeerState, PolicyChangeState, PolicyState, RaftState, RegionStep, RegionsState,
    State, StoreState, WindowState,
};
use crate::store::AnyStore;
use crate::store::RegionStore as _;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Buckets in `/v1/state`.
const BUCKETS_SHOWN: usize = 200;
/// Events in `/v1/state`.
const EVENTS_SHOWN: usize = 100;
/// How long another region may take to say what it holds of a bucket.
const HOLDS_WITHIN: Duration = Duration::from_secs(2);
/// How long a change of policies may take to be committed.
const APPLY_WITHIN: Duration = Duration::from_secs(10);

/// Serves the admin listener until `stopping`.
pub async fn serve(
    inner: Arc<Inner>,
    listener: std::net::TcpListener,
    stopping: watch::Receiver<bool>,
    fail: watch::Sender<Option<String>>,
) {
    let (access, tls) = (inner.live.access.clone(), inner.live.admin_tls.clone());
    let routes = admin::router(inner, access);
    if let Err(error) = admin::serve(listener, tls, routes, stopping).await {
        fail.send_replace(Some(format!("admin listener: {error}")));
    }
}

impl AdminSource for Inner {
    fn not_ready(&self) -> Vec<String> {
        Self::not_ready(self)
    }

    fn is_witness(&self) -> bool {
        self.config.is_witness()
    }

    fn metrics(&self, format: MetricsFormat) -> Result<String, std::fmt::Error> {
        let m = &self.core.metrics;
        gauges::show_raft(m, &self.raft.status());
        let age = (clock::now() - self.raft.applied_at().at).or_zero();
        m.raft_age.set(age.to_duration().as_secs_f64());
        m.store_attached.set(i64::from(self.store.session().borrow().session().is_some()));
        m.waiting.set(i64::try_from(self.core.waiting()).unwrap_or(i64::MAX));
        match format {
            MetricsFormat::OpenMetrics => m.encode(),
            MetricsFormat::Prometheus => m.encode_plain(),
        }
    }

    fn state(&self) -> BoxFuture<'_, State> {
        async { self.describe() }.boxed()
    }

    fn policies(&self) -> (u64, String) {
        let pool = self.raft.pool();
        let pool = pool.read();
        let policies: Vec<Policy> = pool.policies().map(|p| (**p.policy).clone()).collect();
        (pool.version(), config::print::policies(&policies))
    }

    fn apply(&self, change: PolicyChange) -> BoxFuture<'_, Result<AppliedPolicies, ApplyError>> {
        self.apply_policies(change).boxed()
    }

    fn regions(&self) -> RegionsState {
        self.list_regions()
    }

    fn change_region(
        &self,
        region: String,
        action: RegionAction,
    ) -> BoxFuture<'_, Result<RegionStep, ApplyError>> {
        async move {
            let step = self.step_region(&region, action.clone()).await;
            match &step {
                Ok(step) => tracing::info!(
                    region,
                    ?action,
                    done = step.done,
                    waits_for = step.waits_for,
                    "a region is changed through the admin listener"
                ),
                Err(error) => tracing::info!(region, ?action, %error, "a change of a region was not made"),
            }
            step
        }
        .boxed()
    }

    fn bucket<'a>(
        &'a self,
        policy: &'a str,
        values: Vec<(String, String)>,
    ) -> BoxFuture<'a, Result<BucketView, BucketError>> {
        async move {
            let known = self.named(policy)?;
            let bucket = self.matching(policy, &values)?;
            Ok(self.show_bucket(policy, known, bucket).await)
        }
        .boxed()
    }

    fn bucket_by_id<'a>(
        &'a self,
        policy: &'a str,
        id: &'a str,
    ) -> BoxFuture<'a, Result<BucketView, BucketError>> {
        async move {
            let known = self.named(policy)?;
            let bucket = bucket_in_hex(id).ok_or_else(|| {
                BucketError::NoMatch(format!("`{id}` is no bucket's id: 32 hexadecimal digits are"))
            })?;
            Ok(self.show_bucket(policy, known, bucket).await)
        }
        .boxed()
    }

    fn feed(&self) -> Arc<Feed> {
        Arc::clone(&self.overview.feed)
    }

    fn save(&self) -> BoxFuture<'_, std::io::Result<Vec<u8>>> {
        self.raft.save().boxed()
    }

    fn reset_bucket(&self, request: ResetRequest) -> BoxFuture<'_, Result<BucketReset, ResetError>> {
        self.decide_reset(request).boxed()
    }
}

impl Inner {
    async fn apply_policies(&self, change: PolicyChange) -> Result<AppliedPolicies, ApplyError> {
        let regions = self.region_names();
        let policies = config::policies::parse(Path::new("policies"), &change.yaml, Some(&regions))
            .map_err(|faults| ApplyError::Invalid(faults.to_string().lines().map(str::to_owned).collect()))?;
        let (version, before) = {
            let pool = self.raft.pool();
            let pool = pool.read();
            let before: Vec<Policy> = pool.policies().map(|view| (**view.policy).clone()).collect();
            (pool.version(), before)
        };
        let changes = changes(&before, &policies);
        if let Some(expected) = change.expected.filter(|e| *e != version) {
            tracing::debug!(expected, version, "a change of policies came too late");
            return Err(ApplyError::Conflict(version));
        }
        if change.dry_run {
            return Ok(AppliedPolicies { version: version.saturating_add(1), dry_run: true, changes });
        }
        // Whoever named no version means the one that is in force now: two changes at once must not overwrite each other.
        let set = SetPolicies { expected: change.expected.or(Some(version)), policies };
        let applied = self.raft.propose(vec![Op::SetPolicies(set)], Instant::now() + APPLY_WITHIN).await;
        match applied {
            Ok(applied) => match applied.policies {
                Some(PolicyOutcome::Set(version)) => {
                    tracing::info!(version, "policies were changed through the admin listener");
                    Ok(AppliedPolicies { version, dry_run: false, changes })
                }
                Some(PolicyOutcome::Conflict(version)) => Err(ApplyError::Conflict(version)),
                Some(PolicyOutcome::Refused | PolicyOutcome::Reset(_) | PolicyOutcome::NotReset(_)) | None => Err(ApplyError::Refused(
                    "the cluster did not take the policies: too many changes wait for regions to acknowledge them, or \
                     it has not been founded"
                        .into(),
                )),
            },
            Err(error) => Err(unanswered(error)),
        }
    }

    /// The regions that serve callers: those in the cluster, or those that are to found it.
    fn region_names(&self) -> Vec<RegionName> {
        let pool = self.raft.pool();
        let pool = pool.read();
        let members = pool.members().filter(|member| member.standing == Standing::In && !member.witness);
        let names: Vec<RegionName> = members.map(|member| member.name).collect();
        if names.is_empty() { self.config.cluster.serving() } else { names }
    }

    pub(super) fn describe(&self) -> State {
        // It reads the pool, too: before this does.
        let mine = self.report_region();
        let status = self.raft.status();
        let not_ready = mine.not_ready.clone();
        let (events, history) = self.overview.past(EVENTS_SHOWN);
        let pool = self.raft.pool();
        let pool = pool.read();
        let (applied_at, now) = (self.raft.applied_at(), clock::now());
        let age = (now - applied_at.at).or_zero();
        let me = pool.region(&self.config.region);
        let leases = BucketsSeen { pool: &pool, me, tau: applied_at.tau(&pool, now) };
        let (buckets, buckets_more) = self.buckets(&leases);
        let mut state = State {
            version: env!("CARGO_PKG_VERSION").into(),
            cluster: self.config.cluster.name.to_string(),
            region: self.config.region.to_string(),
            uptime_ms: u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
            not_ready,
            raft: RaftState {
                leader: status.leader.as_deref().map(str::to_owned),
                term: status.term,
                role: format!("{:?}", status.role).to_lowercase(),
                last: status.last_log.unwrap_or(0),
                applied: status.applied.unwrap_or(0),
                tau_us: pool.tau().0,
                age_ms: u64::try_from(age.ceil_millis()).unwrap_or(0),
                voters: self.voters(&status, true),
                learners: self.voters(&status, false),
                leaving: pool
                    .members()
                    .filter(|member| matches!(member.standing, Standing::Leaving { .. }))
                    .map(|member| member.name.to_string())
                    .collect(),
                epoch: self.progress.borrow().epoch.unwrap_or(0),
            },
            peers: status
                .peers
                .iter()
                .map(|peer| PeerState {
                    region: peer.region.to_string(),
                    address: peer.url.clone(),
                    reachable: peer.reachable,
                    why: None,
                    rtt_us: peer.rtt.map(|rtt| u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX)),
                    matched: peer.matched,
                })
                .collect(),
            store: self.store_state(),
            policies_version: pool.version(),
            policies_settled: pool.settled(),
            policies: self.policy_states(&pool),
            buckets,
            buckets_more,
            now_ms: now_ms(),
            changes: if self.config.admin_token.is_some() { "token" } else { "loopback" }.into(),
            events,
            history,
            time_of_day_ms: self.core.time.now().and_then(|now| u64::try_from(now.ceil_millis()).ok()),
            ..State::default()
        };
        self.describe_cluster(&mut state, mine, &status, &leases);
        state
    }

    fn voters(&self, status: &crate::raft::RaftStatus, voting: bool) -> Vec<String> {
        let members = status.members.iter().filter(|member| member.voter == voting);
        let mut names: Vec<String> = members.map(|member| member.region.to_string()).collect();
        names.sort();
        names
    }

    pub(super) fn store_state(&self) -> StoreState {
        let health = self.store.health();
        let session = self.store.session().borrow().session();
        StoreState {
            kind: match &self.store {
                AnyStore::Memory(_) if self.config.is_witness() => "none".into(),
                AnyStore::Memory(_) => "embedded".into(),
                #[allow(unreachable_patterns)]
                _ => "redis".into(),
            },
            attached: session.is_some(),
            why: health.down,
            rtt_us: Some(u64::try_from(self.store.rtt().as_micros()).unwrap_or(u64::MAX)),
            evicts: health.evicts.is_some(),
            session: session.map_or(0, |s| s.nonce),
            ..StoreState::default()
        }
    }

    fn policy_states(&self, pool: &Pool) -> Vec<PolicyState> {
        let active = self.core.active.load();
        pool.policies()
            .map(|view| {
                let policy = view.policy;
                let counts = active.policy(view.id).map(|a| (a.metrics.admitted(), a.metrics.denied()));
                PolicyState {
                    name: policy.name.to_string(),
                    domain: policy.domain.to_string(),
                    matches: policy.matches.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
                    limit: policy.limit.to_string(),
                    mode: policy.mode.name().into(),
                    guarantee: bound(policy),
                    shadow: policy.shadow,
                    admitted: counts.map_or(0, |c| c.0),
                    denied: counts.map_or(0, |c| c.1),
                    keys: policy.matches.iter().map(|m| m.key.to_string()).collect(),
                    rate: view.cut.map(|cut| cut.rate.0),
                    burst: view.cut.map(|cut| cut.burst.0),
                    overshoot: view.cut.map_or(0, |cut| cut.overshoot().0),
                    parts: Self::parts(pool, view.id),
                    on_store_failure: on_store_failure(policy.on_store_failure).into(),
                    wait_ms: u64::try_from(policy.wait.ceil_millis()).unwrap_or(0),
                }
            })
            .collect()
    }

    /// The tallied buckets, those with most demand first.
    fn buckets(&self, seen: &BucketsSeen<'_>) -> (Vec<BucketState>, bool) {
        let active = self.core.active.load();
        let (tallies, more) = self.core.table.busiest(BUCKETS_SHOWN);
        let states = tallies.into_iter().filter_map(|tally| {
            let policy = active.policy(tally.policy)?;
            let (admitted, refused) = tally.totals();
            let lease = seen.lease(tally.bucket, seen.me?);
            let whole = |tokens: Tokens| u64::try_from(tokens.floor()).unwrap_or(0);
            Some(BucketState {
                policy: policy.policy.name.to_string(),
                bucket: tally.bucket.to_string(),
                what: self.overview.what(&tally.bucket.to_string()),
                demand: seen.demand(tally.bucket),
                admitted: whole(admitted),
                denied: whole(refused),
                level: tally.level().0,
                cap: tally.turn.map_or(policy.shape, |turn| policy.shape_in(turn)).cap
                    + Tokens(lease.as_ref().map_or(0, |l| l.burst)),
                lease,
                window: tally.turn.map(window_state),
            })
        });
        (states.collect(), more)
    }

    /// A policy in force.
    pub(super) fn named(&self, policy: &str) -> Result<u32, BucketError> {
        let active = self.core.active.load();
        let known = active.policies().find(|p| &*p.policy.name == policy);
        known.map(|known| known.id).ok_or_else(|| BucketError::NoPolicy(policy.to_owned()))
    }

    /// The policy's bucket for these values.
    pub(super) fn matching(
        &self,
        policy: &str,
        values: &[(String, String)],
    ) -> Result<BucketId, BucketError> {
        let active = self.core.active.load_full();
        let known = active.policies().find(|p| &*p.policy.name == policy);
        let known = known.ok_or_else(|| BucketError::NoPolicy(policy.to_owned()))?;
        let values: Vec<(&str, &str)> = values.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let bucket = bucket_of(&self.core.redaction, &known.policy, &values);
        // Of a quota, that of the window that it is now.
        let window = known.window.and_then(|window| Some((window, self.core.time.present(window)?)));
        let now = |bucket| match window {
            Some((window, present)) => window_bucket(bucket, window, present.turn.start),
            None => bucket,
        };
        bucket.map(now).ok_or_else(|| {
            let keys: Vec<String> = known.policy.matches.iter().map(ToString::to_string).collect();
            BucketError::NoMatch(format!(
                "`{policy}` does not match these values; it wants {}",
                keys.join(", ")
            ))
        })
    }

    /// One bucket in every region: what the pool's books say of it, and what each region says that it holds.
    async fn show_bucket(&self, policy: &str, id: u32, bucket: BucketId) -> BucketView {
        let mut held = self.ask_holders(policy, bucket).await;
        let status = self.raft.status();
        let pool = self.raft.pool();
        let pool = pool.read();
        let tau = self.raft.applied_at().tau(&pool, clock::now());
        let seen = BucketsSeen { pool: &pool, me: None, tau };
        let present = pool.members().filter(|member| member.standing != Standing::Out && !member.witness);
        let turn = self.turn_of(&pool, id, bucket);
        let booked = pool.booked_as(id, bucket);
        let regions = present.map(|Member { id: region, name, .. }| {
            let less =
                pool.held_back(id, region).filter(|(before, _)| turn.is_some_and(|t| t.start < *before));
            let part = less.map(|(_, part)| part).or_else(|| pool.usable(id, region)).unwrap_or_default();
            let holds = held.remove(&name);
            BucketRegion {
                region: name.to_string(),
                reserve_cap: part.cap().0,
                reserve_rate: part.rate.0,
                lease: seen.lease(booked, region),
                level: holds.map(|holds| holds.level),
                cap: holds.map(|holds| holds.cap),
                rate: holds.map(|holds| holds.rate),
                reachable: name == self.config.region
                    || status.peers.iter().any(|peer| peer.region == name && peer.reachable),
            }
        });
        let books = pool.books(id, booked, seen.tau);
        BucketView {
            policy: policy.to_owned(),
            bucket: bucket.to_string(),
            pool_level: books.as_ref().map(|books| books.level.0),
            pool_rate: books.as_ref().map(|books| books.free.0.0),
            regions: regions.collect(),
            books: books.map(|books| books_state(&books, pool.regions())),
            window: turn.map(window_state),
        }
    }

    /// The window of a quota's bucket: of one without books, the one that it is now.
    pub(super) fn turn_of(&self, pool: &Pool, policy: u32, bucket: BucketId) -> Option<Turn> {
        let window = pool.window(policy)?;
        let booked = pool.bucket(bucket).and_then(|view| view.window);
        booked.or_else(|| Some(window.turn_at(self.core.time.now()?)))
    }

    /// Asks all regions at once what they hold of a bucket.
    async fn ask_holders(&self, policy: &str, bucket: BucketId) -> BTreeMap<RegionName, PeerBucket> {
        let question = PeerQuestion::Bucket { policy: policy.to_owned(), bucket: bucket.to_string() };
        let question = serde_json::to_vec(&question).unwrap_or_default();
        let reachable = self.raft.status().peers.into_iter().filter(|peer| peer.reachable);
        let others = reachable.map(|peer| {
            let (raft, question) = (self.raft.clone(), question.clone());
            async move {
                let answer = raft.question(&peer.region, question);
                let answer = tokio::time::timeout(HOLDS_WITHIN, answer).await.ok().flatten()?;
                Some((peer.region, serde_json::from_slice::<PeerBucket>(&answer).ok()?))
            }
        });
        let (mine, others) = tokio::join!(self.holds(policy, bucket), futures::future::join_all(others));
        let mine = mine.map(|mine| (self.config.region.clone(), mine));
        others.into_iter().flatten().chain(mine).collect()
    }
}

/// What is different, policy by policy: what goes, then what comes or changes, in the order of the new file.
fn changes(before: &[Policy], after: &[Policy]) -> Vec<PolicyChangeState> {
    let text = config::print::policy;
    let state = |before: Option<&Policy>, after: Option<&Policy>| PolicyChangeState {
        name: before.or(after).map(|policy| policy.name.to_string()).unwrap_or_default(),
        before: before.map(text),
        after: after.map(text),
        guaranteed_before: before.map(bound),
        guarantees_after: after.map(bound),
    };
    let named = |policies: &'_ [Policy], name: &str| policies.iter().position(|p| &*p.name == name);
    let gone = before.iter().filter(|policy| named(after, &policy.name).is_none());
    let mut changes: Vec<PolicyChangeState> = gone.map(|policy| state(Some(policy), None)).collect();
    for policy in after {
        let was = named(before, &policy.name).and_then(|at| before.get(at));
        if was != Some(policy) {
            changes.push(state(was, Some(policy)));
        }
    }
    changes
}

fn window_state(turn: Turn) -> WindowState {
    let ms = |time: Micros| u64::try_from(time.ceil_millis()).unwrap_or(0);
    WindowState { began_ms: ms(turn.start), ends_ms: ms(turn.end) }
}

pub(super) fn books_state(books: &Books, regions: &[RegionName]) -> BooksState {
    let lent = regions.iter().zip(&books.lent).map(|(region, (rate, burst))| LentState {
        region: region.to_string(),
        rate: rate.0,
        burst: burst.0,
    });
    BooksState {
        whole_rate: books.whole.0.0,
        whole_burst: books.whole.1.0,
        reserved_rate: books.reserved.0.0,
        reserved_burst: books.reserved.1.0,
        free_rate: books.free.0.0,
        free_burst: books.free.1.0,
        lent: lent.collect(),
        frozen: books.frozen,
    }
}

/// Why a proposal came to nothing, or nobody knows what it came to.
pub(super) fn unanswered(error: ProposeError) -> ApplyError {
    match error {
        ProposeError::Unknown => ApplyError::Unknown("no answer from the leader in time".into()),
        ProposeError::TooNew { .. } => ApplyError::Refused(
            "a region of the cluster may run a version that does not know this yet: upgrade all, see in `quorate status` that all can be reached, and try again"
                .into(),
        ),
        ProposeError::TooLarge => ApplyError::Refused("it is too large for one entry of the log".into()),
        ProposeError::NotSent { .. } | ProposeError::Refused => ApplyError::Unavailable(error.to_string()),
    }
}

/// The most that all regions admit in a window of T seconds, as text.
fn bound(policy: &Policy) -> String {
    if let Some(Counted { kind, limit, span, .. }) = Counted::of(policy, &[]) {
        let seconds = span.ceil_seconds();
        return match kind {
            Kind::Counters => format!("{limit} + {limit} T / {seconds} s"),
            Kind::Log => format!("{limit} in any {seconds} s"),
            Kind::Permits => format!("{limit} at a time"),
        };
    }
    let overshoot = |whole: Tokens| match policy.mode {
        Mode::Approximate { max_overshoot } => format!(" + {}", max_overshoot.of_tokens(whole).floor()),
        Mode::Strict | Mode::Split => String::new(),
    };
    match policy.limit {
        Limit::TokenBucket(limit) => {
            let overshoot = overshoot(limit.burst());
            format!("{}{overshoot} + {} T / {} s", limit.burst, limit.amount, limit.per.seconds())
        }
        Limit::Quota(quota) => format!("{}{} per {}", quota.quota, overshoot(quota.tokens()), quota.per),
        Limit::Concurrent(_) | Limit::Unlimited => "no bound".into(),
    }
}

/// The pool at an estimated Raft time.
pub(super) struct BucketsSeen<'a> {
    pub pool: &'a Pool,
    pub me: Option<RegionId>,
    pub tau: Micros,
}

impl BucketsSeen<'_> {
    fn record(&self, bucket: BucketId, region: RegionId) -> Option<&Record> {
        self.pool.record(bucket, region).filter(|r| r.live && r.expires > self.tau)
    }

    pub fn lease(&self, bucket: BucketId, region: RegionId) -> Option<LeaseState> {
        let record = self.record(bucket, region)?;
        Some(LeaseState {
            burst: record.offer_burst.0,
            rate: record.offer_rate.0,
            left_ms: u64::try_from((record.expires - self.tau).ceil_millis()).unwrap_or(0),
        })
    }

    /// What the region said that it needs, in whole tokens a second.
    fn demand(&self, bucket: BucketId) -> u64 {
        let record = self.me.and_then(|me| self.record(bucket, me));
        record.map_or(0, |r| u64::try_from(Tokens(r.demand.0).floor()).unwrap_or(0))
    }
}
