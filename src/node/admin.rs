//! What the admin listener shows and does.

use super::{Inner, gauges};
use crate::clock;
use crate::config;
use crate::quota::amount::{DRIFT_PPM, Micros, Tokens};
use crate::quota::matching::bucket_of;
use crate::quota::policy::{BucketId, Limit, Mode, Policy, RegionName};
use crate::quota::pool::{Books, Member, Op, PolicyOutcome, Pool, Record, RegionId, SetPolicies, Standing};
use crate::raft::ProposeError;
use crate::server::admin::{
    self, Access, AdminSource, ApplyError, BucketError, MetricsFormat, PolicyChange, RegionAction,
};
use crate::server::state::{
    AppliedPolicies, BooksState, BucketRegion, BucketState, BucketView, LeaseState, LentState, PeerState,
    PolicyState, RaftState, RegionStep, RegionsState, State, StoreState,
};
use crate::store::AnyStore;
use crate::store::{RegionStore as _, Store as _};
use crate::store::{Take, TakeCharge};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Buckets in `/v1/state`.
const BUCKETS_SHOWN: usize = 200;
/// How long a change of policies may take to be committed.
const APPLY_WITHIN: Duration = Duration::from_secs(10);

/// Serves the admin listener until `stopping`.
pub async fn serve(
    inner: Arc<Inner>,
    listener: std::net::TcpListener,
    stopping: watch::Receiver<bool>,
    fail: watch::Sender<Option<String>>,
) {
    let token = inner.config.admin_token.as_ref().map(|t| t.expose().to_owned());
    let routes = admin::router(inner, Access { token });
    if let Err(error) = admin::serve(listener, routes, stopping).await {
        fail.send_replace(Some(format!("admin listener: {error}")));
    }
}

impl AdminSource for Inner {
    fn not_ready(&self) -> Vec<String> {
        Self::not_ready(self)
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
        self.show_bucket(policy, values).boxed()
    }
}

impl Inner {
    async fn apply_policies(&self, change: PolicyChange) -> Result<AppliedPolicies, ApplyError> {
        let regions = self.region_names();
        let policies = config::policies::parse(Path::new("policies"), &change.yaml, Some(&regions))
            .map_err(|faults| ApplyError::Invalid(faults.to_string().lines().map(str::to_owned).collect()))?;
        let version = self.raft.pool().read().version();
        if let Some(expected) = change.expected.filter(|e| *e != version) {
            tracing::debug!(expected, version, "a change of policies came too late");
            return Err(ApplyError::Conflict(version));
        }
        if change.dry_run {
            return Ok(AppliedPolicies { version: version.saturating_add(1), dry_run: true });
        }
        // Whoever named no version means the one that is in force now: two changes at once must not overwrite each other.
        let set = SetPolicies { expected: change.expected.or(Some(version)), policies };
        let applied = self.raft.propose(vec![Op::SetPolicies(set)], Instant::now() + APPLY_WITHIN).await;
        match applied {
            Ok(applied) => match applied.policies {
                Some(PolicyOutcome::Set(version)) => {
                    tracing::info!(version, "policies were changed through the admin listener");
                    Ok(AppliedPolicies { version, dry_run: false })
                }
                Some(PolicyOutcome::Conflict(version)) => Err(ApplyError::Conflict(version)),
                Some(PolicyOutcome::Refused) | None => Err(ApplyError::Refused(
                    "the cluster did not take the policies: too many changes wait for regions to acknowledge them, or \
                     it has not been founded"
                        .into(),
                )),
            },
            Err(error) => Err(unanswered(error)),
        }
    }

    /// The regions that are in the cluster, or are to found it.
    fn region_names(&self) -> Vec<RegionName> {
        let pool = self.raft.pool();
        let pool = pool.read();
        let members = pool.members().filter(|member| member.standing == Standing::In);
        let names: Vec<RegionName> = members.map(|member| member.name).collect();
        if names.is_empty() { self.config.cluster.names() } else { names }
    }

    fn describe(&self) -> State {
        let status = self.raft.status();
        let applied_at = self.raft.applied_at();
        let age = (clock::now() - applied_at.at).or_zero();
        let not_ready = Self::not_ready(self);
        let pool = self.raft.pool();
        let pool = pool.read();
        let me = pool.region(&self.config.region);
        let leases = BucketsSeen { pool: &pool, me, tau: pool.tau() + age.discount(DRIFT_PPM) };
        let (buckets, buckets_more) = self.buckets(&leases);
        State {
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
        }
    }

    fn voters(&self, status: &crate::raft::RaftStatus, voting: bool) -> Vec<String> {
        let members = status.members.iter().filter(|member| member.voter == voting);
        let mut names: Vec<String> = members.map(|member| member.region.to_string()).collect();
        names.sort();
        names
    }

    fn store_state(&self) -> StoreState {
        let health = self.store.health();
        let session = self.store.session().borrow().session();
        StoreState {
            kind: match &self.store {
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
                what: String::new(),
                demand: seen.demand(tally.bucket),
                admitted: whole(admitted),
                denied: whole(refused),
                level: tally.level().0,
                cap: policy.shape.cap + Tokens(lease.as_ref().map_or(0, |l| l.burst)),
                lease,
            })
        });
        (states.collect(), more)
    }

    /// One bucket in every region, as this region's replica and store know it.
    async fn show_bucket(
        &self,
        policy: &str,
        values: Vec<(String, String)>,
    ) -> Result<BucketView, BucketError> {
        let active = self.core.active.load_full();
        let known = active.policies().find(|p| &*p.policy.name == policy);
        let known = known.ok_or_else(|| BucketError::NoPolicy(policy.to_owned()))?;
        let values: Vec<(&str, &str)> = values.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let bucket = bucket_of(&known.policy, &values).ok_or_else(|| {
            let keys: Vec<String> = known.policy.matches.iter().map(ToString::to_string).collect();
            BucketError::NoMatch(format!(
                "`{policy}` does not match these values; it wants {}",
                keys.join(", ")
            ))
        })?;
        let ask = TakeCharge {
            bucket,
            shape: known.shape,
            unseen: known.unseen,
            cost: Tokens::ZERO,
            enforce: true,
        };
        let limited = known.policy.limit != Limit::Unlimited;
        let level = if limited { self.store.take(Take { charges: vec![ask] }).await.ok() } else { None };
        let level = level.and_then(|t| t.charges.first().map(|c| c.level.0));
        let age = (clock::now() - self.raft.applied_at().at).or_zero();
        let pool = self.raft.pool();
        let pool = pool.read();
        let seen = BucketsSeen { pool: &pool, me: None, tau: pool.tau() + age.discount(DRIFT_PPM) };
        let books = pool.bucket(bucket);
        let present = pool.members().filter(|member| member.standing != Standing::Out);
        let regions = present.map(|Member { id, name, .. }| {
            let part = pool.usable(known.id, id).unwrap_or_default();
            BucketRegion {
                region: name.to_string(),
                reserve_cap: part.cap().0,
                reserve_rate: part.rate.0,
                lease: seen.lease(bucket, id),
                level: level.filter(|_| name == self.config.region),
            }
        });
        Ok(BucketView {
            policy: policy.to_owned(),
            bucket: bucket.to_string(),
            pool_level: known.pooled.then(|| pool.free(known.id, bucket, seen.tau).0),
            pool_rate: books.map(|b| b.free_rate.0),
            regions: regions.collect(),
            books: pool.books(known.id, bucket, seen.tau).map(|books| books_state(&books, pool.regions())),
        })
    }
}

fn books_state(books: &Books, regions: &[RegionName]) -> BooksState {
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
        ProposeError::TooLarge => ApplyError::Refused("it is too large for one entry of the log".into()),
        ProposeError::NotSent { .. } | ProposeError::Refused => ApplyError::Unavailable(error.to_string()),
    }
}

/// The most that all regions admit in a window of T seconds, as text.
fn bound(policy: &Policy) -> String {
    let Limit::TokenBucket(limit) = policy.limit else { return "no bound".into() };
    let overshoot = match policy.mode {
        Mode::Approximate { max_overshoot } => {
            format!(" + {}", max_overshoot.of_tokens(limit.burst()).floor())
        }
        Mode::Strict | Mode::Split => String::new(),
    };
    format!("{}{overshoot} + {} T / {} s", limit.burst, limit.amount, limit.per.seconds())
}

/// The pool at an estimated Raft time.
struct BucketsSeen<'a> {
    pool: &'a Pool,
    me: Option<RegionId>,
    tau: Micros,
}

impl BucketsSeen<'_> {
    fn record(&self, bucket: BucketId, region: RegionId) -> Option<&Record> {
        self.pool.record(bucket, region).filter(|r| r.live && r.expires > self.tau)
    }

    fn lease(&self, bucket: BucketId, region: RegionId) -> Option<LeaseState> {
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
