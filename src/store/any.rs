//! The store that a region was configured with.

use super::memory::{BUCKET_BYTES, MemoryStore};
use super::redis::RedisStore;
use super::{
    Health, Install, Prepare, Prepared, RegionStore, Session, SessionState, Store, StoreError, Take, Taken,
};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::bucket::Generation;
use crate::quota::policy::BucketId;
use crate::telemetry::metrics::StoreMetrics;
use std::time::Duration;
use tokio::sync::watch;

/// One of the two stores.
#[derive(Clone)]
pub enum AnyStore {
    /// Buckets in this process.
    Memory(MemoryStore),
    /// Buckets in the region's Redis.
    Redis(RedisStore),
}

impl AnyStore {
    /// A handle for the worker thread on whose runtime this is called: it has its own connection, driven by that runtime.
    #[must_use]
    pub fn worker(&self) -> Self {
        match self {
            Self::Memory(store) => Self::Memory(store.clone()),
            Self::Redis(store) => Self::Redis(store.worker()),
        }
    }

    /// How long the store takes to answer, smoothed.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        match self {
            Self::Memory(_) => Duration::ZERO,
            Self::Redis(store) => store.rtt(),
        }
    }

    /// Measures with these from now on.
    pub fn measure(&self, metrics: &StoreMetrics) {
        if let Self::Redis(store) = self {
            store.measure(metrics.clone());
        }
    }

    /// Says how much it holds. (Redis is asked now and then by its own task.)
    pub fn count(&self, metrics: &StoreMetrics) {
        if let Self::Memory(store) = self {
            let buckets = store.buckets();
            metrics.keys.set(Some(buckets as f64));
            metrics.memory.set(Some(buckets.saturating_mul(BUCKET_BYTES) as f64));
        }
    }

    /// For `/readyz`.
    #[must_use]
    pub fn health(&self) -> Health {
        match self {
            Self::Memory(_) => Health::default(),
            Self::Redis(store) => store.health(),
        }
    }

    /// Ends its connections and tasks (of this handle and of its workers). Calls fail from then on.
    pub async fn close(&self) {
        match self {
            Self::Memory(_) => {}
            Self::Redis(store) => store.close().await,
        }
    }
}

impl RegionStore for AnyStore {
    fn session(&self) -> watch::Receiver<SessionState> {
        match self {
            Self::Memory(store) => store.session(),
            Self::Redis(store) => store.session(),
        }
    }

    fn generation(&self) -> Generation {
        match self {
            Self::Memory(store) => store.generation(),
            Self::Redis(store) => store.generation(),
        }
    }

    async fn mark_full(&self, session: Session) -> Result<(), StoreError> {
        match self {
            Self::Memory(store) => store.mark_full(session),
            Self::Redis(store) => store.mark_full(session).await,
        }
    }

    async fn mark_known(&self, session: Session) -> Result<(), StoreError> {
        match self {
            Self::Memory(store) => store.mark_known(session),
            Self::Redis(store) => store.mark_known(session).await,
        }
    }

    fn now(&self) -> Micros {
        match self {
            Self::Memory(store) => store.now(),
            Self::Redis(store) => store.now(),
        }
    }
}

impl Store for AnyStore {
    async fn take(&self, take: Take) -> Result<Taken, StoreError> {
        match self {
            Self::Memory(store) => store.take(take).await,
            Self::Redis(store) => store.take(take).await,
        }
    }

    async fn known(&self, buckets: Vec<BucketId>) -> Result<(u64, Vec<bool>), StoreError> {
        match self {
            Self::Memory(store) => store.known(buckets).await,
            Self::Redis(store) => store.known(buckets).await,
        }
    }

    async fn prepare(&self, asks: Vec<Prepare>) -> Result<(Micros, Vec<Prepared>), StoreError> {
        match self {
            Self::Memory(store) => store.prepare(asks).await,
            Self::Redis(store) => store.prepare(asks).await,
        }
    }

    async fn install(&self, records: Vec<Install>) -> Result<Vec<Tokens>, StoreError> {
        match self {
            Self::Memory(store) => store.install(records).await,
            Self::Redis(store) => store.install(records).await,
        }
    }
}
