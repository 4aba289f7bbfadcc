//! The store that a region was configured with.

use super::memory::MemoryStore;
use super::redis::RedisStore;
use super::{Health, Install, Prepare, Prepared, SessionState, Store, StoreError, Take, Taken};
use crate::quota::amount::{Micros, Tokens};
use crate::quota::bucket::Generation;
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
    /// The session, and why there is none.
    #[must_use]
    pub fn session(&self) -> watch::Receiver<SessionState> {
        match self {
            Self::Memory(store) => store.session(),
            Self::Redis(store) => store.session(),
        }
    }

    /// What the store knows about buckets that it does not hold. Before a change of policy, fold it in with
    /// [`Generation::unseen`]; see [`Unseen::after_change`](crate::quota::bucket::Unseen::after_change).
    #[must_use]
    pub fn generation(&self) -> Generation {
        match self {
            Self::Memory(store) => store.generation(),
            Self::Redis(store) => store.generation(),
        }
    }

    /// The region has joined the cluster for the very first time: nothing was ever spent here, and buckets that were
    /// never seen are full from now on, whatever restarts come. Only for a session that kept nothing.
    ///
    /// # Errors
    /// [`StoreError::Fenced`] if `session` is not the one in force, or if it kept buckets; else see [`StoreError`].
    pub async fn mark_full(&self, session: super::Session) -> Result<(), StoreError> {
        match self {
            Self::Memory(store) => store.mark_full(session),
            Self::Redis(store) => store.mark_full(session).await,
        }
    }

    /// A handle for the worker thread on whose runtime this is called: it has its own connection, driven by that runtime.
    #[must_use]
    pub fn worker(&self) -> Self {
        match self {
            Self::Memory(store) => Self::Memory(store.clone()),
            Self::Redis(store) => Self::Redis(store.worker()),
        }
    }

    /// About what the store's clock reads now (zero before it was ever seen).
    #[must_use]
    pub fn now(&self) -> Micros {
        match self {
            Self::Memory(store) => store.now(),
            Self::Redis(store) => store.now(),
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

impl Store for AnyStore {
    async fn take(&self, take: Take) -> Result<Taken, StoreError> {
        match self {
            Self::Memory(store) => store.take(take).await,
            Self::Redis(store) => store.take(take).await,
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
