//! An OTLP endpoint: the trace service of OpenTelemetry's own protocol over gRPC, on a port of its own.

use super::free_address;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status};

/// A span that was received.
#[derive(Clone, Debug)]
pub struct Span {
    /// Of the process that sent it: region, cluster and so on.
    pub resource: BTreeMap<String, String>,
    /// Trace, span and parent (empty: it has none), in hex.
    pub trace: String,
    pub id: String,
    pub parent: String,
    /// What it is called.
    pub name: String,
    /// Nanoseconds since the epoch.
    pub start: u64,
    pub end: u64,
    /// What it says.
    pub attributes: BTreeMap<String, String>,
}

impl Span {
    /// The region that it comes from.
    pub fn region(&self) -> &str {
        self.resource.get("quorate.region").map_or("", String::as_str)
    }

    /// One of its attributes.
    pub fn says(&self, key: &str) -> &str {
        self.attributes.get(key).map_or("", String::as_str)
    }
}

/// The endpoint, and what has arrived there.
pub struct Receiver {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
    serving: Option<JoinHandle<()>>,
}

impl Receiver {
    /// Reserves an address; nobody listens there yet.
    pub fn down() -> Self {
        Self { address: free_address(), spans: Arc::default(), serving: None }
    }

    /// Starts one.
    pub async fn start() -> Self {
        let mut receiver = Self::down();
        receiver.up().await;
        receiver
    }

    /// Listens from now on.
    pub async fn up(&mut self) {
        let service = TraceServiceServer::new(Collector(Arc::clone(&self.spans)));
        let listener = tokio::net::TcpListener::bind(self.address).await.expect("the address was free");
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let server = tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming);
        self.serving = Some(tokio::spawn(async move { server.await.expect("the endpoint serves") }));
    }

    /// `http://...`, for `telemetry.otlp`
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All spans so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().expect("no test has panicked here").clone()
    }

    /// The spans of one trace.
    pub fn trace(&self, trace: &str) -> Vec<Span> {
        self.spans().into_iter().filter(|span| span.trace == trace).collect()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if let Some(serving) = &self.serving {
            serving.abort();
        }
    }
}

struct Collector(Arc<Mutex<Vec<Span>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut spans = self.0.lock().expect("no test has panicked here");
        for of_resource in request.into_inner().resource_spans {
            let resource = texts(&of_resource.resource.map(|r| r.attributes).unwrap_or_default());
            for span in of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                spans.push(Span {
                    resource: resource.clone(),
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    name: span.name,
                    start: span.start_time_unix_nano,
                    end: span.end_time_unix_nano,
                    attributes: texts(&span.attributes),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    attributes.iter().map(|kv| (kv.key.clone(), kv.value.as_ref().map(text).unwrap_or_default())).collect()
}

fn text(value: &AnyValue) -> String {
    match &value.value {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::BoolValue(yes)) => yes.to_string(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}
