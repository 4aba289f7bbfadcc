//! One unary gRPC call over HTTP/2, by hand ("gRPC over HTTP/2" in the gRPC project's documents).
//!
//! tonic serves the other services. On this one, which is called for every request of every caller, its streams and
//! buffers cost a sixth of the CPU time of a call: 11.8 µs with them, 10.0 µs without, measured with `benches/floor.rs`
//! (two cores, 8 connections with 16 calls in flight each).

use super::super::reading::Share;
use bytes::{Buf as _, Bytes};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use prost::Message;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::Status;

const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/grpc");
/// A message is preceded by a flag (1: compressed) and its length, in four bytes.
const PREFIX: usize = 5;

/// The body of an answer: one message and the trailers, or nothing (then the status is in the head).
#[derive(Debug, Default)]
pub struct Reply {
    message: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

/// Reads the one message of a call.
///
/// # Errors
/// What is to be answered instead: it is not a gRPC call, or not a whole message of at most `max` bytes.
pub async fn receive<M: Message + Default>(
    request: Request<Incoming>,
    max: usize,
) -> Result<M, Response<Reply>> {
    let kind = request.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    if request.method() != Method::POST || !kind.starts_with(b"application/grpc") {
        let mut response = Response::new(Reply::default());
        *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        return Err(response);
    }
    let mut body = request.into_body();
    let mut all = Bytes::new();
    let mut share = Share::none();
    while let Some(frame) = body.frame().await {
        let broken = |_| refuse(Status::cancelled("the message broke off"));
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        if !body.is_end_stream() && !complete(&all, &data) && !share.grow(data.len()) {
            return Err(refuse(Status::resource_exhausted("too many messages arrive in pieces; try again")));
        }
        // Nearly always the whole message comes in one piece.
        all = if all.is_empty() { data } else { [all, data].concat().into() };
        if all.len() > max.saturating_add(PREFIX) {
            return Err(refuse(too_large(max)));
        }
    }
    decode(all, max).map_err(refuse)
}

/// Is this piece a whole message? (The end of the stream may come behind it, in a frame of its own.)
fn complete(before: &Bytes, piece: &Bytes) -> bool {
    let length = piece.get(1..PREFIX).and_then(|length| length.try_into().ok()).map(u32::from_be_bytes);
    let length = length.and_then(|length| usize::try_from(length).ok());
    before.is_empty() && length.is_some_and(|length| length.saturating_add(PREFIX) == piece.len())
}

/// The answer to a call.
pub fn reply(result: Result<Vec<u8>, Status>) -> Response<Reply> {
    let message = match result {
        Ok(message) => message,
        Err(status) => return refuse(status),
    };
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    let mut response = Response::new(Reply { message: Some(message.into()), trailers: Some(trailers) });
    response.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
    response
}

pub fn decode<M: Message + Default>(mut all: Bytes, max: usize) -> Result<M, Status> {
    if all.len() < PREFIX {
        return Err(Status::invalid_argument("the message broke off in its prefix"));
    }
    let (compressed, length) = (all.get_u8() != 0, all.get_u32());
    if compressed {
        return Err(Status::unimplemented("the message is compressed; send it as it is"));
    }
    match usize::try_from(length).unwrap_or(usize::MAX) {
        length if length > max => Err(too_large(max)),
        length if length != all.len() => {
            let text = format!("the message has {} bytes, not the {length} that it announced", all.len());
            Err(Status::invalid_argument(text))
        }
        _ => M::decode(all).map_err(|e| Status::invalid_argument(format!("the message cannot be read: {e}"))),
    }
}

fn too_large(max: usize) -> Status {
    Status::out_of_range(format!("the message is larger than {max} bytes"))
}

/// The status goes into the head of the answer ("Trailers-Only").
fn refuse(status: Status) -> Response<Reply> {
    status.into_http()
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = match self.message.take() {
            Some(message) => Some(Frame::data(message)),
            None => self.trailers.take().map(Frame::trailers),
        };
        Poll::Ready(next.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.message.is_none() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let length = self.message.as_ref().map_or(0, Bytes::len);
        SizeHint::with_exact(u64::try_from(length).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use envoy_types::pb::envoy::service::ratelimit::v3::RateLimitRequest;
    use tonic::Code;

    /// A message with its prefix.
    fn encode(message: &impl Message) -> Vec<u8> {
        let length = u32::try_from(message.encoded_len()).unwrap();
        [&[0], &length.to_be_bytes()[..], &message.encode_to_vec()].concat()
    }

    fn read(bytes: &[u8]) -> Result<RateLimitRequest, Code> {
        decode(Bytes::copy_from_slice(bytes), 100).map_err(|status| status.code())
    }

    #[test]
    fn messages() {
        let message = RateLimitRequest { domain: "api".into(), ..RateLimitRequest::default() };
        let bytes = encode(&message);
        assert_eq!(read(&bytes), Ok(message));
        assert_eq!(read(&bytes[..bytes.len() - 1]), Err(Code::InvalidArgument), "broken off");
        assert_eq!(read(&bytes[..4]), Err(Code::InvalidArgument), "broken off in the prefix");
        assert_eq!(read(&[&bytes[..], &[0]].concat()), Err(Code::InvalidArgument), "more than was announced");
        assert_eq!(read(&[&[1], &bytes[1..]].concat()), Err(Code::Unimplemented), "compressed");
        assert_eq!(read(&[0, 0, 0, 0, 101]), Err(Code::OutOfRange));
        assert_eq!(read(&[0, 255, 255, 255, 255]), Err(Code::OutOfRange));
        assert_eq!(read(&[0, 0, 0, 0, 1, 255]), Err(Code::InvalidArgument), "no protobuf");
        assert_eq!(read(&[0; 5]), Ok(RateLimitRequest::default()));
    }
}
