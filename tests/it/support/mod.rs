//! What the black-box tests stand on: real processes, real links, an exact meter.
//!
//! Every process is started on ports and folders of its own, is killed by its own id when it is dropped, and prints the
//! end of its log if the test failed. Nothing here sleeps for luck: it polls, with a deadline.

pub mod client;
pub mod clock;
pub mod cluster;
pub mod daemon;
pub mod envoy;
pub mod load;
pub mod meter;
pub mod process;
pub mod redis;

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Mutex;
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

/// A loopback address that nobody listens on, and that no other call returns, in this process or in another test's.
///
/// Between this call and the server's own bind the port is free for all to take. So it is reserved among tests by a UDP
/// socket on the same number, which the process keeps to its end and which is in no TCP server's way.
pub fn free_address() -> SocketAddr {
    static RESERVED: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());
    let mut reserved = RESERVED.lock().expect("no other call panics");
    // From a place of this process' own, so that two processes seldom try the same ports.
    let start = usize::try_from(std::process::id()).expect("a process id") * 131 + reserved.len();
    for step in 0..PORTS.len() {
        let offset = u16::try_from((start + step) % PORTS.len()).expect("less than the number of ports");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORTS.start + offset));
        if let Ok(reservation) = UdpSocket::bind(address)
            && TcpListener::bind(address).is_ok()
        {
            reserved.push(reservation);
            return address;
        }
    }
    panic!("no free port in {PORTS:?}");
}
