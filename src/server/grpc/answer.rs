//! The answer of the rate limit service, written in one go.
//!
//! The same as protobuf's library would write of a `RateLimitResponse`. To build one only to have it read again takes two dozen
//! strings and a map; every decision has such an answer.

use crate::quota::amount::Micros;
use crate::quota::policy::{Unit, Window};
use crate::quota::verdict::{
    DIGITS_MAX, DescriptorVerdict, Fields, LimitVerdict, Status as Kind, Verdict, decimal,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as WireUnit;
use prost::encoding::encode_varint;

/// Says why a request was denied, where it was not for the limit.
const REASON_HEADER: &str = "x-ratelimit-reason";
/// A message is preceded by a flag (1: compressed) and its length, in four bytes.
const PREFIX: usize = 5;

/// The message with its prefix: as many statuses as there were descriptors.
pub fn encode(verdict: &Verdict, descriptors: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    out.extend_from_slice(&[0; PREFIX]);
    // envoy.service.ratelimit.v3.RateLimitResponse
    number(&mut out, 1, code(verdict.allowed));
    let unmatched = DescriptorVerdict { allowed: verdict.allowed, limit: None };
    for index in 0..descriptors {
        let descriptor = verdict.descriptors.get(index).unwrap_or(&unmatched);
        let limit = descriptor.limit.and_then(|i| verdict.limits.get(i));
        message(&mut out, 2, |out| status(out, descriptor, limit));
    }
    headers(&mut out, verdict);
    if let Some(limit) = verdict.binding() {
        message(&mut out, 6, |out| metadata(out, limit));
    }
    let length = u32::try_from(out.len().saturating_sub(PREFIX)).unwrap_or(u32::MAX);
    if let Some(place) = out.get_mut(1..PREFIX) {
        place.copy_from_slice(&length.to_be_bytes());
    }
    out
}

fn code(allowed: bool) -> u64 {
    if allowed { Code::Ok as u64 } else { Code::OverLimit as u64 }
}

/// RateLimitResponse.DescriptorStatus
fn status(out: &mut Vec<u8>, descriptor: &DescriptorVerdict, limit: Option<&LimitVerdict>) {
    number(out, 1, code(descriptor.allowed));
    match limit {
        None => {}
        Some(limit) if limit.unlimited => number(out, 3, u64::from(u32::MAX)),
        Some(limit) => {
            // RateLimitResponse.RateLimit
            message(out, 2, |out| {
                number(out, 1, saturating(limit.limit));
                number(out, 2, limit.per.map_or(WireUnit::Unknown, unit) as u64);
                text(out, 3, &limit.policy);
            });
            number(out, 3, saturating(limit.remaining));
            // A denial that never ends has no time to give.
            if limit.allowed || limit.retry_after.is_some() {
                message(out, 4, |out| duration(out, limit.reset));
            }
        }
    }
}

fn saturating(n: u64) -> u64 {
    n.min(u64::from(u32::MAX))
}

/// Envoy has no name for a window of any other length.
fn unit(window: Window) -> WireUnit {
    let seconds = window.seconds();
    let same = |unit: &Unit| window == Window::Calendar(*unit) || unit.seconds() == seconds;
    let Some(unit) = Unit::ALL.into_iter().find(same) else { return WireUnit::Unknown };
    match unit {
        Unit::Second => WireUnit::Second,
        Unit::Minute => WireUnit::Minute,
        Unit::Hour => WireUnit::Hour,
        Unit::Day => WireUnit::Day,
        Unit::Week => WireUnit::Week,
        Unit::Month => WireUnit::Month,
        Unit::Year => WireUnit::Year,
    }
}

/// google.protobuf.Duration
fn duration(out: &mut Vec<u8>, time: Micros) {
    let time = time.to_duration();
    number(out, 1, time.as_secs());
    number(out, 2, u64::from(time.subsec_nanos()));
}

/// The same fields as over HTTP.
fn headers(out: &mut Vec<u8>, verdict: &Verdict) {
    let mut header = |key: &str, value: &str| {
        // envoy.config.core.v3.HeaderValue
        message(out, 3, |out| {
            text(out, 1, key);
            text(out, 2, value);
        });
    };
    if let Some(fields) = verdict.fields() {
        let room = &mut [0; DIGITS_MAX];
        header(Fields::POLICY, &fields.policy);
        header(Fields::STATE, &fields.state);
        header(Fields::X_LIMIT, decimal(fields.limit, room));
        header(Fields::X_REMAINING, decimal(fields.remaining, room));
        header(Fields::X_RESET, decimal(fields.reset, room));
        if let Some(seconds) = fields.retry_after {
            header(Fields::RETRY_AFTER, decimal(seconds, room));
        }
    }
    if verdict.status() == Kind::Unavailable {
        header(REASON_HEADER, if verdict.undecided { "no_policies" } else { "store_unavailable" });
    }
}

/// The limit that binds most, for Envoy's access logs and later filters: a google.protobuf.Struct.
fn metadata(out: &mut Vec<u8>, limit: &LimitVerdict) {
    let mut field = |key: &str, value: &dyn Fn(&mut Vec<u8>)| {
        message(out, 1, |out| {
            text(out, 1, key);
            message(out, 2, value);
        });
    };
    // The fields of a google.protobuf.Value are there also where they are 0 or empty.
    field("policy", &|out| bytes(out, 3, limit.policy.as_bytes()));
    field("mode", &|out| bytes(out, 3, limit.mode.name().as_bytes()));
    field("allowed", &|out| out.extend_from_slice(&[4 << 3, u8::from(limit.allowed)]));
    field("reason", &|out| bytes(out, 3, limit.reason.name().as_bytes()));
    if !limit.unlimited {
        let double = |out: &mut Vec<u8>, n: i64| {
            out.push(2 << 3 | 1);
            out.extend_from_slice(&(n as f64).to_le_bytes());
        };
        field("remaining", &|out| double(out, i64::try_from(limit.remaining).unwrap_or(i64::MAX)));
        field("reset_ms", &|out| double(out, limit.reset.ceil_millis()));
    }
}

/// A number; 0 is left out.
fn number(out: &mut Vec<u8>, tag: u8, n: u64) {
    if n != 0 {
        out.push(tag << 3);
        encode_varint(n, out);
    }
}

/// A string; an empty one is left out.
fn text(out: &mut Vec<u8>, tag: u8, text: &str) {
    if !text.is_empty() {
        bytes(out, tag, text.as_bytes());
    }
}

fn bytes(out: &mut Vec<u8>, tag: u8, bytes: &[u8]) {
    out.push(tag << 3 | 2);
    encode_varint(u64::try_from(bytes.len()).unwrap_or(u64::MAX), out);
    out.extend_from_slice(bytes);
}

/// A message: nearly all are shorter than 128 bytes, so that one byte is kept for the length.
fn message(out: &mut Vec<u8>, tag: u8, write: impl FnOnce(&mut Vec<u8>)) {
    out.extend_from_slice(&[tag << 3 | 2, 0]);
    let start = out.len();
    write(out);
    let length = out.len().saturating_sub(start);
    match u8::try_from(length) {
        Ok(short @ ..0x80) => {
            if let Some(place) = start.checked_sub(1).and_then(|at| out.get_mut(at)) {
                *place = short;
            }
        }
        _ => {
            let mut long = Vec::with_capacity(10);
            encode_varint(u64::try_from(length).unwrap_or(u64::MAX), &mut long);
            out.splice(start.saturating_sub(1)..start, long);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::amount::{Rate, Tokens};
    use crate::quota::policy::{Mode, TokenBucket};
    use crate::quota::verdict::{Reason, Sight, Terms};
    use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitResponse;
    use envoy_types::pb::google::protobuf::value::Kind::{BoolValue, NumberValue, StringValue};
    use prost::Message as _;
    use std::sync::Arc;

    fn limit(name: &str, descriptor: usize, fits: bool) -> LimitVerdict {
        let policy: Arc<str> = name.into();
        let limit = TokenBucket { amount: 1_000, per: Unit::Minute, burst: 2_000 };
        let terms = Terms { policy: &policy, mode: Mode::Split, limit: Some(limit.into()), shadow: false };
        let sight = Sight { fits, level: Tokens::whole(41), rate: Rate::per_second(100), cap: limit.burst() };
        LimitVerdict::seen(terms, descriptor, Tokens::whole(50), sight, None, Reason::OverLimit)
    }

    /// What protobuf's library reads; and it writes the same of it, but for the order of a map.
    fn read(verdict: &Verdict, descriptors: usize) -> RateLimitResponse {
        let bytes = encode(verdict, descriptors);
        let length = u32::from_be_bytes(bytes[1..PREFIX].try_into().unwrap());
        assert_eq!((bytes[0], length as usize), (0, bytes.len() - PREFIX));
        let read = RateLimitResponse::decode(&bytes[PREFIX..]).unwrap();
        assert_eq!(read.encoded_len(), bytes.len() - PREFIX);
        read
    }

    #[test]
    fn an_answer_reads_as_it_was_meant() {
        let verdict = Verdict::new(vec![limit("a", 0, true), limit("b", 1, false)], 3, true);
        let read = read(&verdict, 3);
        assert_eq!(read.overall_code, Code::OverLimit as i32);
        let codes: Vec<i32> = read.statuses.iter().map(|s| s.code).collect();
        assert_eq!(codes, [Code::Ok, Code::OverLimit, Code::Ok].map(|code| code as i32));
        let of = read.statuses[1].current_limit.as_ref().unwrap();
        assert_eq!((&*of.name, of.requests_per_unit, of.unit()), ("b", 1_000, WireUnit::Minute));
        assert_eq!(read.statuses[1].limit_remaining, 41);
        let wait = read.statuses[1].duration_until_reset.unwrap();
        assert_eq!((wait.seconds, wait.nanos), (0, 90_000_000));
        assert_eq!(read.statuses[2].current_limit, None);
        let headers: Vec<_> = read.response_headers_to_add.iter().map(|h| (&*h.key, &*h.value)).collect();
        assert_eq!(
            headers,
            [
                ("ratelimit-policy", "\"b\";q=1000;w=60"),
                ("ratelimit", "\"b\";r=41;t=1"),
                ("x-ratelimit-limit", "1000"),
                ("x-ratelimit-remaining", "41"),
                ("x-ratelimit-reset", "1"),
                ("retry-after", "1"),
            ]
        );
        let metadata = read.dynamic_metadata.unwrap().fields;
        let value = |key: &str| metadata[key].kind.clone().unwrap();
        assert_eq!(value("policy"), StringValue("b".into()));
        assert_eq!(value("mode"), StringValue("split".into()));
        assert_eq!(value("allowed"), BoolValue(false));
        assert_eq!(value("reason"), StringValue("over_limit".into()));
        assert_eq!(value("remaining"), NumberValue(41.0));
        assert_eq!(value("reset_ms"), NumberValue(90.0));
        assert_eq!(metadata.len(), 6);
    }

    #[test]
    fn long_names_unlimited_policies_and_no_policies() {
        let name = "n".repeat(300);
        let allowed = read(&Verdict::new(vec![limit(&name, 0, true)], 1, true), 1);
        assert_eq!(allowed.statuses[0].current_limit.as_ref().unwrap().name, name);
        assert!(allowed.statuses[0].duration_until_reset.is_some());
        let policy: Arc<str> = "free".into();
        let terms = Terms { policy: &policy, mode: Mode::Split, limit: None, shadow: false };
        let unlimited = read(&Verdict::new(vec![LimitVerdict::unlimited(terms, 0)], 1, true), 1);
        assert_eq!(unlimited.statuses[0].limit_remaining, u32::MAX);
        assert!(unlimited.response_headers_to_add.is_empty());
        assert_eq!(unlimited.dynamic_metadata.unwrap().fields.len(), 4);
        let undecided = read(&Verdict::undecided(2), 2);
        assert_eq!((undecided.statuses.len(), undecided.dynamic_metadata), (2, None));
        let reason = &undecided.response_headers_to_add[0];
        assert_eq!((&*reason.key, &*reason.value), (REASON_HEADER, "no_policies"));
    }
}
