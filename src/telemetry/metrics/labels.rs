//! The labels that metrics have.

use prometheus_client::encoding::EncodeLabelSet;

macro_rules! labels {
    ($($(#[$doc:meta])* $visibility:vis $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
        $visibility struct $name {
            $($(#[$field_doc])* pub $field: $type),*
        }
    )*};
}

labels! {
    pub(super) DecisionLabels {
        policy: String,
        mode: &'static str,
        result: &'static str,
        reason: &'static str
    }
    pub(super) CostLabels { policy: String, mode: &'static str, result: &'static str }
    pub(super) WaitLabels { policy: String, outcome: &'static str }
    pub(super) ActionLabel { policy: String, action: &'static str }
    pub(super) DomainLabel { domain: String }
    pub(super) ProtocolLabel { protocol: &'static str }
    pub(super) AnswerLabels { protocol: &'static str, result: &'static str }
    pub(super) CheckLabel { check: &'static str }
    pub(super) KindLabel { kind: &'static str }
    pub(super) OutcomeLabel { outcome: &'static str }
    pub(super) OperationLabel { operation: &'static str }
    pub(super) LevelLabel { level: &'static str }
    pub(super) VersionLabel { version: &'static str }
    /// Another region.
    pub RegionLabel {
        /// Its name.
        peer: String
    }
    /// A policy.
    pub PolicyLabel {
        /// Its name.
        policy: String
    }
    /// A policy, and what of its limit.
    pub PolicyOf {
        /// Its name.
        policy: String,
        /// `burst` or `rate`.
        of: &'static str
    }
    /// A part of what the buckets of a policy have.
    pub PolicyPart {
        /// The policy's name.
        policy: String,
        /// `reserve`, `leased` or `free`.
        part: &'static str,
        /// The region that has it; empty: none.
        holder: String
    }
    /// A bucket, and what became of what it was asked for.
    pub BucketResult {
        /// Its policy's name.
        policy: String,
        /// Its id, in hex.
        bucket: String,
        /// `admitted` or `denied`.
        result: &'static str
    }
}
