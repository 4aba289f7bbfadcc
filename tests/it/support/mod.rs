//! What the black-box tests stand on: real processes, real links, an exact meter.
//!
//! Every process is started on ports and folders of its own, is killed by its own id when it is dropped, and prints the
//! end of its log if the test failed. Nothing here sleeps for luck: it polls, with a deadline.

pub mod browser;
pub mod client;
pub mod clock;
pub mod cluster;
pub mod daemon;
pub mod envoy;
pub mod load;
pub mod meter;
pub mod otlp;
pub mod process;
pub mod proxies;
pub mod redis;
pub mod tools;

use std::fs::File;
use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(50);
/// Test servers listen below the range that the kernel takes for outgoing connections, which could otherwise sit on a
/// port while its server is being restarted.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// Polls `condition` until it gives a value; panics with `what` and the last reason once `deadline` has passed.
pub async fn eventually<T, F>(what: &str, deadline: Duration, mut condition: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    let end = Instant::now() + deadline;
    loop {
        let why = match condition().await {
            Ok(value) => return value,
            Err(why) => why,
        };
        assert!(Instant::now() < end, "{what}: not within {deadline:?}: {why}");
        tokio::time::sleep(POLL).await;
    }
}

/// `Ok` if it holds, else the reason: for the conditions of [`eventually`].
pub fn hold(it_holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if it_holds { Ok(()) } else { Err(why()) }
}

/// A loopback address that nobody listens on, and that no other test gets as long as this one's process lives: a lock on a
/// file says whose it is.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static MINE: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let locks = std::env::temp_dir().join("quorate-test-ports");
    std::fs::create_dir_all(&locks).expect("a folder for locks");
    let start = u16::try_from(std::process::id() % 997).unwrap_or(0).wrapping_mul(17);
    for _ in 0..PORTS.len() {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let offset = usize::from(start.wrapping_add(step)) % PORTS.len();
        let port = PORTS.start + u16::try_from(offset).unwrap_or(0);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let Ok(lock) = File::create(locks.join(port.to_string())) else { continue };
        if lock.try_lock().is_ok() && TcpListener::bind(address).is_ok() {
            MINE.lock().expect("no other test has panicked here").push(lock);
            return address;
        }
    }
    panic!("no free port in {PORTS:?}");
}
