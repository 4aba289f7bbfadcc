//! `ShouldRateLimit`, health and reflection, with tonic's client.

use crate::limiter::{Limiter, policy};
use crate::{Fixture, PATIENCE, client};
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as WireUnit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, RateLimit};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::UInt64Value;
use proptest::prelude::*;
use quorate::quota::amount::Micros;
use quorate::quota::policy::{Limit, Policy, Unit};
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code as Grpc, Status};

impl Fixture {
    async fn channel(&self) -> Channel {
        let url = format!("http://{}", self.server.grpc());
        Endpoint::new(url).unwrap().timeout(PATIENCE).connect().await.unwrap()
    }

    async fn should(&self, request: RateLimitRequest) -> Result<RateLimitResponse, Status> {
        let mut client = RateLimitServiceClient::new(self.channel().await);
        client.should_rate_limit(request).await.map(tonic::Response::into_inner)
    }
}

fn descriptor(entries: &[(&str, &str)]) -> RateLimitDescriptor {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).into(), value: (*value).into() };
    RateLimitDescriptor { entries: entries.iter().map(entry).collect(), ..RateLimitDescriptor::default() }
}

fn hits(hits: u64, negative: bool) -> RateLimitDescriptor {
    let hits_addend = Some(UInt64Value { value: hits });
    RateLimitDescriptor { hits_addend, is_negative_hits: negative, ..descriptor(&[("tenant", "7")]) }
}

fn overridden(requests_per_unit: u32, unit: i32) -> RateLimitDescriptor {
    let limit = Some(RateLimitOverride { requests_per_unit, unit });
    RateLimitDescriptor { limit, ..descriptor(&[("tenant", "9")]) }
}

fn request(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest { domain: "api".into(), descriptors, hits_addend: 0 }
}

fn tenants(amount: u64, burst: u64) -> Policy {
    policy("tenants", &["tenant"], amount, Unit::Minute, burst)
}

fn remaining(response: &RateLimitResponse) -> u32 {
    response.statuses[0].limit_remaining
}

fn headers(response: &RateLimitResponse) -> Vec<(&str, &str)> {
    response.response_headers_to_add.iter().map(|h| (h.key.as_str(), h.value.as_str())).collect()
}

#[tokio::test]
async fn allowed_and_denied() {
    let front = Fixture::new(Limiter::new(vec![tenants(60, 2)])).await;
    let one = || request(vec![descriptor(&[("tenant", "7")])]);
    let answer = front.should(one()).await.unwrap();
    assert_eq!(answer.overall_code(), Code::Ok);
    let limit = RateLimit { name: "tenants".into(), requests_per_unit: 60, unit: WireUnit::Minute.into() };
    assert_eq!(answer.statuses[0].current_limit, Some(limit));
    assert_eq!(answer.statuses[0].code(), Code::Ok);
    assert_eq!(remaining(&answer), 1);
    let until_full = answer.statuses[0].duration_until_reset.unwrap();
    assert_eq!((until_full.seconds, until_full.nanos), (1, 0));
    assert_eq!(
        headers(&answer),
        [
            ("ratelimit-policy", "\"tenants\";q=60;w=60"),
            ("ratelimit", "\"tenants\";r=1;t=1"),
            ("x-ratelimit-limit", "60"),
            ("x-ratelimit-remaining", "1"),
            ("x-ratelimit-reset", "1"),
        ]
    );
    let fields = answer.dynamic_metadata.unwrap().fields;
    let mut keys: Vec<_> = fields.keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["allowed", "mode", "policy", "reason", "remaining", "reset_ms"]);

    front.should(one()).await.unwrap();
    front.limiter.pass(Micros::millis(250));
    let denied = front.should(one()).await.unwrap();
    assert_eq!((denied.overall_code(), denied.statuses[0].code()), (Code::OverLimit, Code::OverLimit));
    let until_it_fits = denied.statuses[0].duration_until_reset.unwrap();
    assert_eq!((until_it_fits.seconds, until_it_fits.nanos), (0, 750_000_000));
    assert!(headers(&denied).contains(&("retry-after", "1")));
    assert_eq!(denied.quota, None);
}

#[tokio::test]
async fn hits_addend() {
    let front = Fixture::new(Limiter::new(vec![tenants(0, 10)])).await;
    let after = async |request| remaining(&front.should(request).await.unwrap());
    let plain = || descriptor(&[("tenant", "7")]);
    assert_eq!(after(request(vec![plain()])).await, 9, "0 in the request is 1");
    assert_eq!(after(RateLimitRequest { hits_addend: 3, ..request(vec![plain()]) }).await, 6);
    let own = RateLimitRequest { hits_addend: 3, ..request(vec![hits(2, false)]) };
    assert_eq!(after(own).await, 4, "the descriptor's beats the request's");
    for _ in 0..3 {
        assert_eq!(after(request(vec![hits(0, false)])).await, 4, "0 in a descriptor asks");
    }
    assert_eq!(after(request(vec![hits(5, true)])).await, 9, "given back");
    assert_eq!(after(request(vec![hits(5, true)])).await, 10, "no more than it holds");
    let huge = front.should(request(vec![hits(u64::MAX, false)])).await.unwrap();
    assert_eq!((huge.overall_code(), remaining(&huge)), (Code::OverLimit, 10));
    assert_eq!(huge.statuses[0].duration_until_reset, None, "it never fits");
    assert!(headers(&huge).iter().all(|(name, _)| *name != "retry-after"));
}

/// Case 8.
#[tokio::test]
async fn a_status_for_each_descriptor() {
    let exports = policy("exports", &["tenant", "op"], 1, Unit::Hour, 1);
    let vip = Policy { limit: Limit::Unlimited, ..policy("vip", &["vip"], 1, Unit::Second, 1) };
    let front = Fixture::new(Limiter::new(vec![tenants(60, 10), exports, vip])).await;
    let all = || {
        request(vec![
            descriptor(&[("nobody", "1")]),
            descriptor(&[("tenant", "7"), ("op", "export")]),
            descriptor(&[("vip", "1")]),
            descriptor(&[("tenant", "7")]),
        ])
    };
    let seen = |response: &RateLimitResponse| {
        let status =
            |s: &envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::DescriptorStatus| {
                (s.code(), s.current_limit.as_ref().map(|l| l.name.clone()), s.limit_remaining)
            };
        response.statuses.iter().map(status).collect::<Vec<_>>()
    };
    let (exports, tenants) = (Some("exports".to_owned()), Some("tenants".to_owned()));
    let first = front.should(all()).await.unwrap();
    assert_eq!(
        seen(&first),
        [
            (Code::Ok, None, 0),
            (Code::Ok, exports.clone(), 0),
            (Code::Ok, None, u32::MAX),
            (Code::Ok, tenants.clone(), 9),
        ]
    );
    let second = front.should(all()).await.unwrap();
    assert_eq!(second.overall_code(), Code::OverLimit);
    assert_eq!(
        seen(&second),
        [
            (Code::Ok, None, 0),
            (Code::OverLimit, exports, 0),
            (Code::Ok, None, u32::MAX),
            (Code::Ok, tenants, 9),
        ]
    );
}

#[tokio::test]
async fn unmatched() {
    for (allow, code) in [(true, Code::Ok), (false, Code::OverLimit)] {
        let front = Fixture::new(Limiter::with_unmatched(vec![tenants(1, 1)], allow)).await;
        let answer = front.should(request(vec![descriptor(&[("nobody", "")])])).await.unwrap();
        assert_eq!((answer.overall_code(), answer.statuses[0].code()), (code, code));
        assert_eq!((remaining(&answer), answer.statuses[0].current_limit.clone()), (0, None));
        assert_eq!(answer.response_headers_to_add, []);
    }
}

/// Cases 2 and 5.
#[tokio::test]
async fn overrides_and_large_limits() {
    let large = 1 << 32;
    let front = Fixture::new(Limiter::new(vec![tenants(large, large)])).await;
    let answer = front.should(request(vec![hits(0, false)])).await.unwrap();
    assert_eq!(answer.statuses[0].current_limit.as_ref().unwrap().requests_per_unit, u32::MAX);
    assert_eq!(remaining(&answer), u32::MAX);

    for (unit, wire) in [(1, WireUnit::Second), (4, WireUnit::Day), (5, WireUnit::Month), (6, WireUnit::Year)]
    {
        let answer = front.should(request(vec![overridden(3, unit)])).await.unwrap();
        let limit = answer.statuses[0].current_limit.clone().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit()), (3, wire));
    }
    for unit in [0, 7, 99, -1] {
        let status = front.should(request(vec![overridden(3, unit)])).await.unwrap_err();
        assert_eq!(status.code(), Grpc::InvalidArgument);
        assert!(status.message().starts_with("descriptors[0].limit.unit"), "{status:?}");
    }
}

#[tokio::test]
async fn faults_have_a_place() {
    let front = Fixture::new(Limiter::new(vec![tenants(1, 1)])).await;
    let fine = descriptor(&[("tenant", "7")]);
    let faults = [
        (RateLimitRequest { domain: String::new(), ..request(vec![fine.clone()]) }, "domain"),
        (request(vec![]), "descriptors is empty"),
        (request(vec![fine.clone(), descriptor(&[])]), "descriptors[1] is empty"),
        (request(vec![descriptor(&[("a", "b"), ("", "c")])]), "descriptors[0].entries[1].key"),
        (request(vec![fine; 65]), "descriptors has 65 descriptors"),
    ];
    for (request, place) in faults {
        let status = front.should(request).await.unwrap_err();
        assert_eq!(status.code(), Grpc::InvalidArgument);
        assert!(status.message().starts_with(place), "{status:?}");
    }
    let long = "x".repeat(64 * 1024);
    let status = front.should(request(vec![descriptor(&[("tenant", &long)])])).await.unwrap_err();
    assert_eq!(status.code(), Grpc::OutOfRange, "too large: {status:?}");
    assert!(front.should(request(vec![descriptor(&[("tenant", "")])])).await.is_ok(), "a value may be empty");
}

/// Case 22: fail closed means closed, even for an Envoy that lets requests through on gRPC errors.
#[tokio::test]
async fn an_outage_is_told() {
    let front = Fixture::new(Limiter::new(vec![tenants(1, 5)])).await;
    front.limiter.store_is_down(true);
    let answer = front.should(request(vec![descriptor(&[("tenant", "7")])])).await.unwrap();
    assert_eq!(answer.overall_code(), Code::OverLimit);
    assert!(headers(&answer).contains(&("x-ratelimit-reason", "store_unavailable")));
    assert!(headers(&answer).contains(&("retry-after", "1")));
}

/// Case 25: an answer comes before its caller gives up.
#[tokio::test]
async fn deadlines() {
    let front = Fixture::new(Limiter::new(vec![Policy { domain: "gated".into(), ..tenants(1, 1) }])).await;
    let message =
        RateLimitRequest { domain: "gated".into(), ..request(vec![descriptor(&[("tenant", "7")])]) };
    let body = frame(&prost::Message::encode_to_vec(&message));
    // Not tonic's client: that one keeps the time by itself.
    let call = h2_client().post(method(&front)).header("grpc-timeout", "1S").body(body);
    let answer = call.send().await.unwrap().bytes().await.unwrap();
    let answer: RateLimitResponse = prost::Message::decode(&answer[5..]).unwrap();
    assert_eq!(answer.overall_code(), Code::Ok, "decided with what was there, in time");
    assert_eq!(front.limiter.deadlines(), [Some(Duration::from_millis(950))]);
}

#[tokio::test]
async fn health_follows_readiness() {
    use tonic_health::pb::health_check_response::ServingStatus;
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
    let front = Fixture::new(Limiter::new(vec![])).await;
    let mut client = HealthClient::new(front.channel().await);
    let service = "envoy.service.ratelimit.v3.RateLimitService";
    for service in ["", service] {
        let request = HealthCheckRequest { service: service.into() };
        let answer = client.check(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving);
    }
    let mut watch = client.watch(HealthCheckRequest { service: service.into() }).await.unwrap().into_inner();
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    front.ready.send_replace(false);
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    front.ready.send_replace(true);
    assert_eq!(watch.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let unknown = client.check(HealthCheckRequest { service: "nobody".into() }).await.unwrap_err();
    assert_eq!(unknown.code(), Grpc::NotFound);
}

#[tokio::test]
async fn reflection_describes_the_service() {
    use prost_types::FileDescriptorProto;
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    let front = Fixture::new(Limiter::new(vec![])).await;
    let mut client = ServerReflectionClient::new(front.channel().await);
    let mut ask = async |message_request| {
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(message_request) };
        let mut answers =
            client.server_reflection_info(futures::stream::iter([request])).await.unwrap().into_inner();
        answers.message().await.unwrap().unwrap().message_response.unwrap()
    };
    let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices(String::new())).await
    else {
        panic!("a list");
    };
    let names: Vec<_> = list.service.iter().map(|s| s.name.as_str()).collect();
    for name in ["envoy.service.ratelimit.v3.RateLimitService", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }

    // Follow the imports as a tool does: every type that is named must be in a file that is served.
    let symbol = MessageRequest::FileContainingSymbol("envoy.service.ratelimit.v3.RateLimitService".into());
    let (mut asks, mut files) = (vec![symbol], Vec::<FileDescriptorProto>::new());
    while let Some(next) = asks.pop() {
        let MessageResponse::FileDescriptorResponse(answer) = ask(next).await else { panic!("a file") };
        for bytes in answer.file_descriptor_proto {
            let file: FileDescriptorProto = decode(&bytes);
            if files.iter().all(|f| f.name != file.name) {
                asks.extend(file.dependency.iter().cloned().map(MessageRequest::FileByFilename));
                files.push(file);
            }
        }
    }
    let mut known = Vec::new();
    for file in &files {
        let package = format!(".{}", file.package());
        known.extend(file.enum_type.iter().map(|e| format!("{package}.{}", e.name())));
        for message in &file.message_type {
            names_in(message, &package, &mut known);
        }
    }
    let mut named = Vec::new();
    for file in &files {
        file.message_type.iter().for_each(|m| types_in(m, &mut named));
        named.extend(file.service.iter().flat_map(|s| &s.method).map(|m| m.output_type().to_owned()));
    }
    assert!(named.len() > 20);
    for name in named {
        assert!(known.contains(&name), "{name} is not in {known:?}");
    }
}

fn decode(bytes: &[u8]) -> prost_types::FileDescriptorProto {
    prost::Message::decode(bytes).unwrap()
}

fn names_in(message: &prost_types::DescriptorProto, outer: &str, names: &mut Vec<String>) {
    let name = format!("{outer}.{}", message.name());
    names.extend(message.enum_type.iter().map(|e| format!("{name}.{}", e.name())));
    message.nested_type.iter().for_each(|inner| names_in(inner, &name, names));
    names.push(name);
}

fn types_in(message: &prost_types::DescriptorProto, types: &mut Vec<String>) {
    types.extend(message.field.iter().filter_map(|f| f.type_name.clone()));
    message.nested_type.iter().for_each(|inner| types_in(inner, types));
}

fn method(front: &Fixture) -> String {
    format!("http://{}/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit", front.server.grpc())
}

/// A client that knows HTTP/2, but nothing of gRPC.
fn h2_client() -> reqwest::Client {
    let _ = client();
    let headers = [("content-type", "application/grpc"), ("te", "trailers")];
    let headers = headers.map(|(k, v)| (k.parse().unwrap(), v.parse().unwrap())).into_iter().collect();
    let builder = reqwest::Client::builder().no_proxy().http2_prior_knowledge();
    builder.default_headers(headers).timeout(PATIENCE).build().unwrap()
}

fn frame(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0], &length[..], message].concat()
}

/// Whatever is sent to the method, there is a gRPC status, and the next request is served.
#[test]
fn any_bytes() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let front = runtime.block_on(Fixture::new(Limiter::new(vec![tenants(1, 1)])));
    let (client, url) = (h2_client(), method(&front));
    let framed = prop::collection::vec(any::<u8>(), 0..100).prop_map(|message| frame(&message));
    let bytes = prop_oneof![prop::collection::vec(any::<u8>(), 0..100), framed];
    proptest!(ProptestConfig::with_cases(300), |(body in bytes)| {
        runtime.block_on(async {
            let answer = client.post(&url).body(body).send().await.unwrap();
            assert_eq!(answer.status().as_u16(), 200);
            let _ = answer.bytes().await.unwrap();
        });
    });
    let fine = front.should(request(vec![descriptor(&[("tenant", "7")])]));
    assert_eq!(runtime.block_on(fine).unwrap().overall_code(), Code::Ok);
}
