//! Slow, silent, many, large and dying connections.

use crate::limiter::{Limiter, policy};
use crate::{Fixture, PATIENCE};
use quorate::quota::policy::{Policy, Unit};
use quorate::server::listen::ConnectionLimits;
use quorate::server::{ABLE_WITHIN, Options};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

const GATED: &str = r#"{"domain":"gated","attributes":{"a":"b"}}"#;

fn policies() -> Vec<Policy> {
    vec![policy("p", &["a"], 1_000, Unit::Second, 1_000)]
}

fn impatient() -> Options {
    let second = Duration::from_secs(1);
    let connection = ConnectionLimits {
        head_timeout: second / 2,
        idle_timeout: second / 2,
        ..ConnectionLimits::default()
    };
    Options {
        workers: 1,
        connection,
        request_timeout: second / 2,
        drain_timeout: second / 2,
        ..Options::default()
    }
}

/// Sends some bytes and reads until the server hangs up.
/// A whole request that is allowed.
const CHECK: &[u8] = b"POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: 39\r\n\r\n\
    {\"domain\":\"api\",\"attributes\":{\"a\":\"b\"}}";

async fn send(to: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(to).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    // A reset is as good an end as any.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("the server hangs up");
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn slow_and_silent_callers_are_hung_up_on() {
    let front = Fixture::with(Limiter::new(policies()), impatient()).await;
    let (http, grpc) = (front.server.http(), front.server.grpc());
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let head = b"POST /v1/check HTTP/1.1\r\nhost: x\r\n";
    let no_body = b"POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{";
    let silent = futures::join!(
        send(http, b""),
        send(http, b"P"),
        send(http, &preface[..10]),
        send(http, preface),
        send(http, head),
        send(grpc, b""),
        send(grpc, &preface[..10]),
        send(grpc, preface),
    );
    assert_eq!((silent.0.as_str(), silent.1.as_str()), ("", ""));
    let answer = send(http, no_body).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert_eq!(front.check(r#"{"domain":"api","attributes":{"a":"b"}}"#).await.status, 200);
}

/// A caller that sends a byte now and then is not idle to the socket, but it asks nothing.
#[tokio::test]
async fn trickling_callers_are_hung_up_on() {
    let front = Fixture::with(Limiter::new(policies()), impatient()).await;
    let mut stream = TcpStream::connect(front.server.http()).await.unwrap();
    let trickle = async {
        for byte in b"POST /v1/check HTTP/1.1\r\nx: ".iter().chain(std::iter::repeat(&b'y')) {
            let mut answer = [0; 256];
            if stream.write_all(&[*byte]).await.is_err() {
                return;
            }
            match timeout(Duration::from_millis(20), stream.read(&mut answer)).await {
                Err(_) => {}
                Ok(Ok(0) | Err(_)) => return,
                Ok(Ok(n)) => assert!(answer[..n].starts_with(b"HTTP/1.1 408"), "{:?}", &answer[..n]),
            }
        }
    };
    timeout(PATIENCE, trickle).await.expect("the server hangs up");
}

#[tokio::test]
async fn large_heads_are_refused() {
    let front = Fixture::with(Limiter::new(policies()), impatient()).await;
    let head = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "y".repeat(1 << 20));
    let answer = send(front.server.http(), head.as_bytes()).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    let many = "x: y\r\n".repeat(200);
    let head = format!("POST /v1/check HTTP/1.1\r\nhost: x\r\n{many}\r\n");
    let answer = send(front.server.http(), head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
}

#[tokio::test]
async fn grpc_speaks_http2_only() {
    let front = Fixture::with(Limiter::new(policies()), impatient()).await;
    let request =
        format!("POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{GATED}", GATED.len());
    let answer = send(front.server.grpc(), request.as_bytes()).await;
    assert!(!answer.contains("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn one_connection_too_many_waits() {
    // Nobody is hung up on while the test is patient.
    let connection = ConnectionLimits { head_timeout: 2 * PATIENCE, ..ConnectionLimits::default() };
    let options = Options { connections_max: 2, workers: 2, connection, ..Options::default() };
    let front = Fixture::with(Limiter::new(policies()), options).await;
    let to = front.server.http();
    let mut streams = Vec::new();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(to).await.unwrap();
        stream.write_all(CHECK).await.unwrap();
        streams.push(stream);
    }
    let mut third = streams.pop().unwrap();
    let mut first = [0; 12];
    for stream in &mut streams {
        timeout(PATIENCE, stream.read_exact(&mut first)).await.unwrap().unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
    }
    let early = timeout(Duration::from_millis(100), third.read_exact(&mut first)).await;
    assert!(early.is_err(), "both connections are taken");
    drop(streams);
    timeout(PATIENCE, third.read_exact(&mut first)).await.unwrap().unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
}

#[tokio::test]
async fn draining_finishes_what_is_in_flight() {
    let front = Fixture::new(Limiter::new(policies())).await;
    let (limiter, client) = (front.limiter.clone(), front.client.clone());
    let (http, grpc) = (front.server.http(), front.server.grpc());
    let url = format!("http://{http}/v1/check");
    let in_flight = tokio::spawn(client.post(&url).body(GATED).send());
    wait_for(|| limiter.deadlines().len() == 1).await;
    let draining = tokio::spawn(front.server.drain());
    // No more connections are taken; the listeners are closed.
    wait_until_refused(http).await;
    wait_until_refused(grpc).await;
    assert!(!draining.is_finished() && !in_flight.is_finished());
    limiter.open_gate(1);
    let response = timeout(PATIENCE, in_flight).await.unwrap().unwrap().unwrap();
    assert_eq!(response.status().as_u16(), 200);
    assert!(timeout(PATIENCE, draining).await.unwrap().unwrap(), "nothing had to be cut");
}

#[tokio::test]
async fn who_leaves_serves_on_and_ends_connections_with_an_answer() {
    let front = Fixture::new(Limiter::new(policies())).await;
    let mut stream = TcpStream::connect(front.server.http()).await.unwrap();
    stream.write_all(CHECK).await.unwrap();
    let mut head = vec![0; 4096];
    let read = timeout(PATIENCE, stream.read(&mut head)).await.unwrap().unwrap();
    let kept = String::from_utf8_lossy(&head[..read]).to_lowercase();
    assert!(kept.starts_with("http/1.1 200") && !kept.contains("connection: close"), "{kept}");
    front.server.leave();
    // What is open gets one more answer, and so does what comes late.
    for mut stream in [stream, TcpStream::connect(front.server.http()).await.unwrap()] {
        stream.write_all(CHECK).await.unwrap();
        let mut last = String::new();
        timeout(PATIENCE, stream.read_to_string(&mut last)).await.expect("it is closed").unwrap();
        let last = last.to_lowercase();
        assert!(last.starts_with("http/1.1 200") && last.contains("\r\nconnection: close\r\n"), "{last}");
    }
}

#[tokio::test]
async fn draining_does_not_wait_for_ever() {
    let options = Options { request_timeout: PATIENCE, ..impatient() };
    let front = Fixture::with(Limiter::new(policies()), options).await;
    let url = format!("http://{}/v1/check", front.server.http());
    let in_flight = tokio::spawn(front.client.post(&url).body(GATED).send());
    wait_for(|| front.limiter.deadlines().len() == 1).await;
    let began = Instant::now();
    assert!(!front.server.drain().await, "something had to be cut");
    assert!(began.elapsed() < Duration::from_secs(10));
    assert!(timeout(PATIENCE, in_flight).await.unwrap().unwrap().is_err());
}

#[tokio::test]
async fn a_decision_that_hangs_is_given_up() {
    let front = Fixture::with(Limiter::new(policies()), impatient()).await;
    let answer = front.check(GATED).await;
    assert_eq!((answer.status, answer.header("content-type")), (503, Some("application/problem+json")));
}

/// Waits for a condition that another task brings about.
async fn wait_for(condition: impl Fn() -> bool) {
    let met = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, met).await.expect("the condition is met");
}

async fn wait_until_refused(address: SocketAddr) {
    let refused = async {
        while TcpStream::connect(address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, refused).await.expect("connections are refused");
}

#[tokio::test]
async fn callers_of_a_starting_region_wait_until_it_can_decide() {
    let (able, is_able) = watch::channel(false);
    let options = Options { able: Some(is_able), ..impatient() };
    let front = Fixture::with(Limiter::new(policies()), options).await;
    let mut early = std::pin::pin!(front.check(r#"{"domain":"api","attributes":{"a":"b"}}"#));
    assert!(timeout(Duration::from_millis(200), early.as_mut()).await.is_err(), "it was answered too early");
    able.send_replace(true);
    assert_eq!(early.await.status, 200);
}

#[tokio::test]
async fn a_region_that_cannot_decide_for_long_answers_all_the_same() {
    let (_able, is_able) = watch::channel(false);
    let front = Fixture::with(Limiter::new(policies()), Options { able: Some(is_able), ..impatient() }).await;
    let began = Instant::now();
    assert_eq!(front.check(r#"{"domain":"api","attributes":{"a":"b"}}"#).await.status, 200);
    assert!(began.elapsed() >= ABLE_WITHIN / 2, "{:?}", began.elapsed());
    assert!(front.server.drain().await, "it stops as ever");
}
