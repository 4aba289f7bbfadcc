//! What operators' tools ask a daemon.

use super::scenario::Load;
use crate::workload::client;
use anyhow::{Context as _, bail};
use quorate::server::state::{AppliedPolicies, BucketView, State};
use serde::de::DeserializeOwned;
use std::time::Duration;

const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// A change of policies is answered when it is committed.
const APPLIED_WITHIN: Duration = Duration::from_secs(12);

/// The admin listeners of all regions.
#[derive(Clone, Debug)]
pub struct Admin {
    http: reqwest::Client,
    /// `http://...`, by region.
    urls: Vec<String>,
    token: Option<String>,
}

impl Admin {
    /// A client of these.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(urls: Vec<String>, token: Option<String>) -> anyhow::Result<Self> {
        Ok(Self { http: client(ANSWER_WITHIN)?, urls, token })
    }

    /// How many regions there are.
    #[must_use]
    pub fn regions(&self) -> usize {
        self.urls.len()
    }

    /// The URL of a region's listener.
    #[must_use]
    pub fn url(&self, region: usize) -> &str {
        self.urls.get(region).map(String::as_str).unwrap_or_default()
    }

    /// Is the region ready?
    ///
    /// # Errors
    /// No, and why not.
    pub async fn ready(&self, region: usize) -> anyhow::Result<()> {
        let answer = self.http.get(format!("{}/readyz", self.url(region))).send().await?;
        let (ready, text) = (answer.status().is_success(), answer.text().await?);
        if ready { Ok(()) } else { bail!("{text}") }
    }

    /// `/v1/state`
    ///
    /// # Errors
    /// No answer in time.
    pub async fn state(&self, region: usize) -> anyhow::Result<State> {
        self.get(region, "/v1/state", &[]).await
    }

    /// The states of all regions, asked at the same time.
    pub async fn states(&self) -> Vec<anyhow::Result<State>> {
        futures::future::join_all((0..self.urls.len()).map(|region| self.state(region))).await
    }

    /// The region that leads, by its own word and number: of several that believe so, the one of the highest term.
    pub async fn leader(&self) -> Option<usize> {
        let states = self.states().await;
        let leads = states.iter().enumerate().filter_map(|(region, state)| {
            let state = state.as_ref().ok().filter(|s| s.raft.role == "leader")?;
            Some((state.raft.term, region))
        });
        leads.max().map(|(_, region)| region)
    }

    /// One bucket in every region.
    ///
    /// # Errors
    /// No answer in time, or there is no such bucket.
    pub async fn bucket(&self, region: usize, load: &Load) -> anyhow::Result<BucketView> {
        self.get(region, &format!("/v1/buckets/{}", load.policy), &load.bucket).await
    }

    /// The version and the text of the policies in force.
    ///
    /// # Errors
    /// No answer in time.
    pub async fn policies(&self, region: usize) -> anyhow::Result<String> {
        let answer = self.http.get(format!("{}/v1/policies", self.url(region))).send().await?;
        Ok(answer.error_for_status()?.text().await?)
    }

    /// Puts policies in force.
    ///
    /// # Errors
    /// They are not: or it is not known (no answer).
    pub async fn apply(&self, region: usize, yaml: &str) -> anyhow::Result<AppliedPolicies> {
        let mut request = self.http.put(format!("{}/v1/policies", self.url(region))).timeout(APPLIED_WITHIN);
        if let Some(token) = &self.token {
            request = request.bearer_auth(token);
        }
        let answer = request.header("content-type", "application/yaml").body(yaml.to_owned()).send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        if !status.is_success() {
            bail!("PUT /v1/policies: {status}: {text}");
        }
        serde_json::from_str(&text).context("PUT /v1/policies: not the answer that was expected")
    }

    async fn get<T: DeserializeOwned>(
        &self,
        region: usize,
        path: &str,
        query: &[(String, String)],
    ) -> anyhow::Result<T> {
        let mut url = reqwest::Url::parse(&format!("{}{path}", self.url(region)))?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let answer = self.http.get(url).send().await?.error_for_status()?;
        Ok(serde_json::from_str(&answer.text().await?)?)
    }
}
