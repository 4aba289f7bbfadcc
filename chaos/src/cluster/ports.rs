//! Addresses that nobody else takes.

use anyhow::{Context as _, bail};
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, PoisonError};

/// Below the range that the kernel takes for outgoing connections, which could otherwise sit on a port while its server is being
/// restarted.
const PORTS: std::ops::Range<u16> = 15_000..32_000;

/// A loopback address that nobody listens on, and that no other run gets as long as this process lives: a lock on a file says whose
/// it is.
///
/// # Errors
/// There is none.
pub fn free_address() -> anyhow::Result<SocketAddr> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static MINE: Mutex<Vec<File>> = Mutex::new(Vec::new());
    // The same folder as the product's own tests use.
    let locks = std::env::temp_dir().join("quorate-test-ports");
    std::fs::create_dir_all(&locks).with_context(|| format!("cannot make {}", locks.display()))?;
    let start = u16::try_from(std::process::id() % 997).unwrap_or(0).wrapping_mul(17);
    for _ in 0..PORTS.len() {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let offset = usize::from(start.wrapping_add(step)) % PORTS.len();
        let port = PORTS.start + u16::try_from(offset).unwrap_or(0);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let Ok(lock) = File::create(locks.join(port.to_string())) else { continue };
        if lock.try_lock().is_ok() && TcpListener::bind(address).is_ok() {
            MINE.lock().unwrap_or_else(PoisonError::into_inner).push(lock);
            return Ok(address);
        }
    }
    bail!("no free port in {PORTS:?}")
}
