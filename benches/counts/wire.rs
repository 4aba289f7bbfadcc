//! Clients that cost next to nothing: bytes made beforehand, and just enough reading to see that each was answered.

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor::Entry,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use prost::Message as _;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;
/// RFC 9113, section 4.1.
const FRAME_HEAD: usize = 9;

/// One HTTP/2 connection that asks Envoy's service.
pub struct Grpc {
    stream: TcpStream,
    /// The next request's stream.
    next: u32,
    head: Vec<u8>,
    out: Vec<u8>,
    read: Vec<u8>,
}

impl Grpc {
    pub fn connect(address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).expect("a socket");
        let mut hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        frame(&mut hello, SETTINGS, 0, 0, &[]);
        // The answers' bytes, all together, need no more leave than this.
        frame(&mut hello, WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes());
        stream.write_all(&hello).expect("it takes the preface");
        Self { stream, next: 1, head: head(), out: Vec::new(), read: Vec::new() }
    }

    /// Sends all of these at once, and waits for all of their answers.
    pub fn ask<'m>(&mut self, messages: impl IntoIterator<Item = &'m [u8]>, code: Code) {
        self.out.clear();
        let mut asked = 0;
        for message in messages {
            frame(&mut self.out, HEADERS, END_HEADERS, self.next, &self.head);
            frame(&mut self.out, DATA, END_STREAM, self.next, message);
            self.next += 2;
            asked += 1;
        }
        self.stream.write_all(&self.out).expect("it takes requests");
        while asked > 0 {
            asked -= self.answers(code);
        }
    }

    /// Reads once; returns how many streams have ended.
    fn answers(&mut self, code: Code) -> usize {
        let mut buffer = [0; 16 * 1024];
        let size = self.stream.read(&mut buffer).expect("it answers");
        assert!(size > 0, "it has hung up");
        self.read.extend_from_slice(&buffer[..size]);
        let (mut at, mut ended) = (0, 0);
        while let Some(head) = self.read.get(at..at + FRAME_HEAD) {
            let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            let (kind, flags) = (head[3], head[4]);
            let Some(body) = self.read.get(at + FRAME_HEAD..at + FRAME_HEAD + length) else { break };
            match kind {
                SETTINGS if flags & ACK == 0 => answer(&mut self.stream, SETTINGS, &[]),
                PING if flags & ACK == 0 => answer(&mut self.stream, PING, body),
                DATA => assert_eq!(code_of(body), Some(code as u8), "{body:?}"),
                _ => {}
            }
            // Answers end with trailers.
            ended += usize::from(kind == HEADERS && flags & END_STREAM != 0);
            at += FRAME_HEAD + length;
        }
        self.read.drain(..at);
        ended
    }
}

/// A connection that asks over HTTP/1.1.
pub struct Http(TcpStream);

impl Http {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).expect("a socket");
        Self(stream)
    }

    pub fn ask(&mut self, request: &[u8], status: &str) {
        self.0.write_all(request).expect("it takes requests");
        let mut buffer = [0; 4 * 1024];
        let mut size = 0;
        // All answers are JSON objects, and small.
        while size == 0 || buffer[size - 1] != b'}' {
            let more = self.0.read(&mut buffer[size..]).expect("it answers");
            assert!(more > 0, "it has hung up");
            size += more;
        }
        let head = format!("HTTP/1.1 {status} ");
        assert!(buffer.starts_with(head.as_bytes()), "{}", String::from_utf8_lossy(&buffer[..size]));
    }
}

/// A call's message with its prefix.
pub fn message(domain: &str, descriptors: &[&[(&str, &str)]]) -> Vec<u8> {
    let entry = |(key, value): &(&str, &str)| Entry { key: (*key).into(), value: (*value).into() };
    let descriptor = |entries: &&[(&str, &str)]| RateLimitDescriptor {
        entries: entries.iter().map(entry).collect(),
        ..RateLimitDescriptor::default()
    };
    let message = RateLimitRequest {
        domain: domain.into(),
        descriptors: descriptors.iter().map(descriptor).collect(),
        hits_addend: 1,
    };
    let mut bytes = vec![0];
    bytes.extend_from_slice(&u32::try_from(message.encoded_len()).expect("a short one").to_be_bytes());
    message.encode(&mut bytes).expect("there is room");
    bytes
}

pub fn http_request(body: &str) -> Vec<u8> {
    let head =
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length:";
    format!("{head} {}\r\n\r\n{body}", body.len()).into_bytes()
}

/// The overall code is the first field of an answer; a whole answer is read to see that it is one.
fn code_of(body: &[u8]) -> Option<u8> {
    match body.get(5..7)? {
        [0x08, code] => Some(*code),
        _ => RateLimitResponse::decode(body.get(5..)?).ok().and_then(|r| u8::try_from(r.overall_code).ok()),
    }
}

fn answer(stream: &mut TcpStream, kind: u8, body: &[u8]) {
    let mut out = Vec::new();
    frame(&mut out, kind, ACK, 0, body);
    stream.write_all(&out).expect("it takes frames");
}

fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, body: &[u8]) {
    let length = u32::try_from(body.len()).expect("a short frame").to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(body);
}

/// The header block of a call (RFC 7541): indexed where the static table has it, else literal and never in the dynamic table.
fn head() -> Vec<u8> {
    // :method POST, :scheme http
    let mut block = vec![0x83, 0x86];
    let mut literal = |name: &[u8], value: &str| {
        block.extend_from_slice(name);
        block.push(u8::try_from(value.len()).expect("a short value"));
        block.extend_from_slice(value.as_bytes());
    };
    literal(&[0x04], "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    literal(&[0x01], "localhost");
    // content-type is number 31: 15 in the prefix, 16 behind it.
    literal(&[0x0f, 0x10], "application/grpc");
    literal(b"\x00\x02te", "trailers");
    block
}
