//! Tells systemd how the daemon is: sd_notify(3), for `Type=notify` and `WatchdogSec`.
//!
//! *Ready* means the same as at `/readyz`. A daemon that waits (for its Redis, for a quorum, to be let into the cluster) lives:
//! it asks systemd for more time, and says in its status what it waits for.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// How often the daemon is looked at until it is ready, and at least afterwards.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const LOOK_EVERY_MAX: Duration = Duration::from_secs(2);
/// How much time each look asks for while the daemon is not ready.
const MORE_TIME: Duration = Duration::from_secs(30);

/// The service manager that started this process, if there is one.
#[derive(Debug, Default)]
pub struct Manager {
    link: Option<Link>,
    /// How often it wants to hear that the daemon lives.
    watchdog: Option<Duration>,
    was_ready: bool,
    told: Option<Vec<String>>,
}

#[derive(Debug)]
struct Link {
    socket: UnixDatagram,
    to: SocketAddr,
    failed: bool,
}

impl Manager {
    /// The one that `NOTIFY_SOCKET` names, and `WATCHDOG_USEC` with `WATCHDOG_PID`; without them, none.
    ///
    /// # Errors
    /// The socket cannot be used.
    pub fn from_env() -> io::Result<Self> {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(Self::default());
        };
        let text = |name| std::env::var(name).ok();
        let watchdog = watchdog(text("WATCHDOG_USEC"), text("WATCHDOG_PID"), std::process::id());
        Self::at(&name, watchdog)
    }

    fn at(name: &OsStr, watchdog: Option<Duration>) -> io::Result<Self> {
        let to = address(name)?;
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read must not hold up the daemon.
        socket.set_nonblocking(true)?;
        Ok(Self { link: Some(Link { socket, to, failed: false }), watchdog, ..Self::default() })
    }

    /// Waits until the next [`Self::look`] is due; for ever where there is no manager.
    pub async fn due(&self) {
        if self.link.is_none() {
            return std::future::pending().await;
        }
        let wait = if self.was_ready { LOOK_EVERY_MAX } else { LOOK_EVERY };
        tokio::time::sleep(self.watchdog.map_or(wait, |watchdog| wait.min(watchdog / 2))).await;
    }

    /// Says that the daemon lives, and what keeps it from being ready (nothing: it is).
    pub fn look(&mut self, not_ready: Vec<String>) {
        let mut lines = vec!["WATCHDOG=1".to_owned()];
        if not_ready.is_empty() && !self.was_ready {
            self.was_ready = true;
            lines.push("READY=1".into());
        } else if !self.was_ready {
            lines.push(format!("EXTEND_TIMEOUT_USEC={}", MORE_TIME.as_micros()));
        }
        if self.told.as_ref() != Some(&not_ready) {
            lines.push(status(&not_ready));
            self.told = Some(not_ready);
        }
        self.send(&lines.join("\n"));
    }

    /// Says that the daemon reads its files again; [`Self::reloaded`] has to follow.
    pub fn reloading(&mut self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now = Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0));
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={}", now.as_micros()));
    }

    /// Says that it has done so. To systemd that is the same as being ready, so a daemon that never was does not say it.
    pub fn reloaded(&mut self) {
        if self.was_ready {
            self.send("READY=1");
        }
    }

    /// Says that the daemon drains.
    pub fn stopping(&mut self) {
        self.send("STOPPING=1\nSTATUS=draining");
    }

    fn send(&mut self, text: &str) {
        let Some(link) = &mut self.link else { return };
        match link.socket.send_to_addr(text.as_bytes(), &link.to) {
            Ok(_) => link.failed = false,
            // Said once until it goes again.
            Err(error) if !link.failed => {
                link.failed = true;
                tracing::warn!(%error, "systemd does not take notifications");
            }
            Err(_) => {}
        }
    }
}

/// What `systemctl status` shows: one line.
fn status(not_ready: &[String]) -> String {
    if not_ready.is_empty() {
        return "STATUS=ready".into();
    }
    format!("STATUS=not ready: {}", not_ready.join("; ").replace(['\n', '\r'], " "))
}

/// A path, or a name in the abstract namespace with `@` in front.
fn address(name: &OsStr) -> io::Result<SocketAddr> {
    match name.as_bytes() {
        [b'/', ..] => SocketAddr::from_pathname(name),
        #[cfg(any(target_os = "linux", target_os = "android"))]
        [b'@', rest @ ..] => {
            use std::os::linux::net::SocketAddrExt as _;
            SocketAddr::from_abstract_name(rest)
        }
        _ => {
            let what = format!("NOTIFY_SOCKET is `{}`, not the name of a Unix socket", name.display());
            Err(io::Error::new(io::ErrorKind::Unsupported, what))
        }
    }
}

/// How often systemd wants to hear from this process: sd_watchdog_enabled(3).
fn watchdog(usec: Option<String>, pid: Option<String>, me: u32) -> Option<Duration> {
    let for_me = pid.is_none_or(|pid| pid.trim() == me.to_string());
    let usec: u64 = usec?.trim().parse().ok()?;
    (for_me && usec > 0).then(|| Duration::from_micros(usec))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manager() -> (UnixDatagram, Manager, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let theirs = UnixDatagram::bind(&path).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let ours = Manager::at(path.as_os_str(), None).unwrap();
        (theirs, ours, folder)
    }

    fn heard(socket: &UnixDatagram) -> Vec<String> {
        let mut buffer = [0; 1024];
        let mut said = Vec::new();
        while let Ok(n) = socket.recv(&mut buffer) {
            said.push(String::from_utf8(buffer[..n].to_vec()).unwrap());
        }
        said
    }

    #[test]
    fn it_is_ready_once_and_says_why_it_is_not() {
        let (theirs, mut ours, _folder) = manager();
        ours.look(vec!["store: down\nfor long".into(), "raft: no leader".into()]);
        ours.reloading();
        ours.reloaded();
        ours.look(vec!["store: down\nfor long".into(), "raft: no leader".into()]);
        let said = heard(&theirs);
        let why = "STATUS=not ready: store: down for long; raft: no leader";
        assert_eq!(said[0], format!("WATCHDOG=1\nEXTEND_TIMEOUT_USEC=30000000\n{why}"));
        assert!(said[1].starts_with("RELOADING=1\nMONOTONIC_USEC="), "{said:?}");
        assert_eq!(said[2..], ["WATCHDOG=1\nEXTEND_TIMEOUT_USEC=30000000"]);
        ours.look(Vec::new());
        ours.look(Vec::new());
        ours.look(vec!["store: down".into()]);
        ours.reloaded();
        ours.stopping();
        let said = heard(&theirs);
        assert_eq!(said[0], "WATCHDOG=1\nREADY=1\nSTATUS=ready");
        assert_eq!(said[1..3], ["WATCHDOG=1", "WATCHDOG=1\nSTATUS=not ready: store: down"]);
        assert_eq!(said[3..], ["READY=1", "STOPPING=1\nSTATUS=draining"]);
    }

    #[test]
    fn a_manager_that_does_not_read_holds_nothing_up() {
        let (theirs, mut ours, _folder) = manager();
        for _ in 0..10_000 {
            ours.look(Vec::new());
        }
        assert!(ours.link.as_ref().is_some_and(|link| link.failed), "its buffer was full");
        assert!(heard(&theirs).len() < 10_000);
        ours.look(Vec::new());
        assert!(ours.link.as_ref().is_some_and(|link| !link.failed));
        drop(theirs);
        ours.stopping();
    }

    #[test]
    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn sockets_may_be_abstract_and_nothing_else() {
        use std::os::linux::net::SocketAddrExt as _;
        let name = format!("quorate-notify-{}", std::process::id());
        let theirs = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let mut ours = Manager::at(OsStr::new(&format!("@{name}")), None).unwrap();
        ours.stopping();
        assert_eq!(heard(&theirs).len(), 1);
        assert!(Manager::at(OsStr::new("vsock:2:9"), None).is_err());
    }

    #[test]
    fn the_watchdog_is_for_the_process_that_it_names() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(watchdog(some("30000000"), some("7"), 7), Some(Duration::from_secs(30)));
        assert_eq!(watchdog(some("30000000"), None, 7), Some(Duration::from_secs(30)));
        assert_eq!(watchdog(some("30000000"), some("8"), 7), None);
        assert_eq!(watchdog(some("0"), None, 7), None);
        assert_eq!(watchdog(some("soon"), None, 7), None);
        assert_eq!(watchdog(None, some("7"), 7), None);
    }
}
