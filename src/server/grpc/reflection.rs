//! What gRPC reflection tells: the parts of Envoy's and Google's files that the rate limit service needs.
//!
//! `envoy-types` ships no descriptors, so they are written out here (numbers and types as in Envoy's `rls.proto`,
//! `ratelimit.proto`, `ratelimit_unit.proto` and `base.proto`). Fields that are not implemented, and options, are left
//! out: a tool needs neither to make a call and print its answer.

use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto,
    FileDescriptorProto, FileDescriptorSet, MessageOptions, MethodDescriptorProto, OneofDescriptorProto,
    ServiceDescriptorProto,
};

const DURATION: &str = "google/protobuf/duration.proto";
const WRAPPERS: &str = "google/protobuf/wrappers.proto";
const STRUCT: &str = "google/protobuf/struct.proto";
const UNIT: &str = "envoy/type/v3/ratelimit_unit.proto";
const BASE: &str = "envoy/config/core/v3/base.proto";
const DESCRIPTOR: &str = "envoy/extensions/common/ratelimit/v3/ratelimit.proto";
const SERVICE: &str = "envoy/service/ratelimit/v3/rls.proto";

/// All files, each after those that it imports.
pub(super) fn descriptors() -> FileDescriptorSet {
    let file = vec![duration(), wrappers(), structs(), unit(), base(), descriptor(), service()];
    FileDescriptorSet { file }
}

fn service() -> FileDescriptorProto {
    const DESCRIPTORS: &str = ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor";
    const HEADER: &str = ".envoy.config.core.v3.HeaderValue";
    const RESPONSE: &str = ".envoy.service.ratelimit.v3.RateLimitResponse";
    let of = |name: &str| format!("{RESPONSE}.{name}");
    let units = ["UNKNOWN", "SECOND", "MINUTE", "HOUR", "DAY", "MONTH", "YEAR", "WEEK"];
    let limit = DescriptorProto {
        enum_type: vec![enumeration("Unit", &units)],
        ..message(
            "RateLimit",
            vec![
                scalar("requests_per_unit", 1, Type::Uint32),
                typed("unit", 2, Type::Enum, &of("RateLimit.Unit")),
                scalar("name", 3, Type::String),
            ],
        )
    };
    let status = message(
        "DescriptorStatus",
        vec![
            typed("code", 1, Type::Enum, &of("Code")),
            typed("current_limit", 2, Type::Message, &of("RateLimit")),
            scalar("limit_remaining", 3, Type::Uint32),
            typed("duration_until_reset", 4, Type::Message, ".google.protobuf.Duration"),
        ],
    );
    let response = DescriptorProto {
        nested_type: vec![limit, status],
        enum_type: vec![enumeration("Code", &["UNKNOWN", "OK", "OVER_LIMIT"])],
        ..message(
            "RateLimitResponse",
            vec![
                typed("overall_code", 1, Type::Enum, &of("Code")),
                repeated(typed("statuses", 2, Type::Message, &of("DescriptorStatus"))),
                repeated(typed("response_headers_to_add", 3, Type::Message, HEADER)),
                repeated(typed("request_headers_to_add", 4, Type::Message, HEADER)),
                scalar("raw_body", 5, Type::Bytes),
                typed("dynamic_metadata", 6, Type::Message, ".google.protobuf.Struct"),
            ],
        )
    };
    let request = message(
        "RateLimitRequest",
        vec![
            scalar("domain", 1, Type::String),
            repeated(typed("descriptors", 2, Type::Message, DESCRIPTORS)),
            scalar("hits_addend", 3, Type::Uint32),
        ],
    );
    let method = MethodDescriptorProto {
        name: Some("ShouldRateLimit".into()),
        input_type: Some(".envoy.service.ratelimit.v3.RateLimitRequest".into()),
        output_type: Some(RESPONSE.into()),
        ..MethodDescriptorProto::default()
    };
    let service = ServiceDescriptorProto {
        name: Some("RateLimitService".into()),
        method: vec![method],
        ..ServiceDescriptorProto::default()
    };
    FileDescriptorProto {
        message_type: vec![request, response],
        service: vec![service],
        ..file(SERVICE, "envoy.service.ratelimit.v3", &[BASE, DESCRIPTOR, DURATION, STRUCT])
    }
}

fn descriptor() -> FileDescriptorProto {
    const OF: &str = ".envoy.extensions.common.ratelimit.v3.RateLimitDescriptor";
    let entry = message("Entry", vec![scalar("key", 1, Type::String), scalar("value", 2, Type::String)]);
    let limit = message(
        "RateLimitOverride",
        vec![
            scalar("requests_per_unit", 1, Type::Uint32),
            typed("unit", 2, Type::Enum, ".envoy.type.v3.RateLimitUnit"),
        ],
    );
    let descriptor = DescriptorProto {
        nested_type: vec![entry, limit],
        ..message(
            "RateLimitDescriptor",
            vec![
                repeated(typed("entries", 1, Type::Message, &format!("{OF}.Entry"))),
                typed("limit", 2, Type::Message, &format!("{OF}.RateLimitOverride")),
                typed("hits_addend", 3, Type::Message, ".google.protobuf.UInt64Value"),
                scalar("is_negative_hits", 4, Type::Bool),
            ],
        )
    };
    FileDescriptorProto {
        message_type: vec![descriptor],
        ..file(DESCRIPTOR, "envoy.extensions.common.ratelimit.v3", &[UNIT, WRAPPERS])
    }
}

fn base() -> FileDescriptorProto {
    let header = message(
        "HeaderValue",
        vec![
            scalar("key", 1, Type::String),
            scalar("value", 2, Type::String),
            scalar("raw_value", 3, Type::Bytes),
        ],
    );
    FileDescriptorProto { message_type: vec![header], ..file(BASE, "envoy.config.core.v3", &[]) }
}

fn unit() -> FileDescriptorProto {
    let values = ["UNKNOWN", "SECOND", "MINUTE", "HOUR", "DAY", "MONTH", "YEAR"];
    FileDescriptorProto {
        enum_type: vec![enumeration("RateLimitUnit", &values)],
        ..file(UNIT, "envoy.type.v3", &[])
    }
}

fn duration() -> FileDescriptorProto {
    let fields = vec![scalar("seconds", 1, Type::Int64), scalar("nanos", 2, Type::Int32)];
    google(DURATION, vec![message("Duration", fields)])
}

fn wrappers() -> FileDescriptorProto {
    google(WRAPPERS, vec![message("UInt64Value", vec![scalar("value", 1, Type::Uint64)])])
}

fn structs() -> FileDescriptorProto {
    const VALUE: &str = ".google.protobuf.Value";
    let entry = DescriptorProto {
        options: Some(MessageOptions { map_entry: Some(true), ..MessageOptions::default() }),
        ..message(
            "FieldsEntry",
            vec![scalar("key", 1, Type::String), typed("value", 2, Type::Message, VALUE)],
        )
    };
    let fields = typed("fields", 1, Type::Message, ".google.protobuf.Struct.FieldsEntry");
    let strukt = DescriptorProto { nested_type: vec![entry], ..message("Struct", vec![repeated(fields)]) };
    let kinds = [
        typed("null_value", 1, Type::Enum, ".google.protobuf.NullValue"),
        scalar("number_value", 2, Type::Double),
        scalar("string_value", 3, Type::String),
        scalar("bool_value", 4, Type::Bool),
        typed("struct_value", 5, Type::Message, ".google.protobuf.Struct"),
        typed("list_value", 6, Type::Message, ".google.protobuf.ListValue"),
    ];
    let one_of = |field| FieldDescriptorProto { oneof_index: Some(0), ..field };
    let value = DescriptorProto {
        oneof_decl: vec![OneofDescriptorProto { name: Some("kind".into()), options: None }],
        ..message("Value", kinds.map(one_of).to_vec())
    };
    let list = message("ListValue", vec![repeated(typed("values", 1, Type::Message, VALUE))]);
    FileDescriptorProto {
        enum_type: vec![enumeration("NullValue", &["NULL_VALUE"])],
        ..google(STRUCT, vec![strukt, value, list])
    }
}

fn google(name: &str, messages: Vec<DescriptorProto>) -> FileDescriptorProto {
    FileDescriptorProto { message_type: messages, ..file(name, "google.protobuf", &[]) }
}

fn file(name: &str, package: &str, imports: &[&str]) -> FileDescriptorProto {
    FileDescriptorProto {
        name: Some(name.into()),
        package: Some(package.into()),
        dependency: imports.iter().map(|&i| i.into()).collect(),
        syntax: Some("proto3".into()),
        ..FileDescriptorProto::default()
    }
}

fn message(name: &str, field: Vec<FieldDescriptorProto>) -> DescriptorProto {
    DescriptorProto { name: Some(name.into()), field, ..DescriptorProto::default() }
}

fn scalar(name: &str, number: i32, kind: Type) -> FieldDescriptorProto {
    FieldDescriptorProto {
        name: Some(name.into()),
        number: Some(number),
        label: Some(Label::Optional.into()),
        r#type: Some(kind.into()),
        ..FieldDescriptorProto::default()
    }
}

fn typed(name: &str, number: i32, kind: Type, of: &str) -> FieldDescriptorProto {
    FieldDescriptorProto { type_name: Some(of.into()), ..scalar(name, number, kind) }
}

fn repeated(field: FieldDescriptorProto) -> FieldDescriptorProto {
    FieldDescriptorProto { label: Some(Label::Repeated.into()), ..field }
}

/// Values numbered from 0.
fn enumeration(name: &str, values: &[&str]) -> EnumDescriptorProto {
    let value = |(number, &name): (i32, &&str)| EnumValueDescriptorProto {
        name: Some(name.into()),
        number: Some(number),
        options: None,
    };
    EnumDescriptorProto {
        name: Some(name.into()),
        value: (0..).zip(values).map(value).collect(),
        ..EnumDescriptorProto::default()
    }
}
