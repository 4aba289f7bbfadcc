//! One connection to Redis, and what the server says of itself.
//!
//! A connection is never mended: fred gets no reconnect policy and one attempt a command, so nothing that was meant for one
//! server, or one session, can reach another. Whoever owns a [`Connection`] drops it and makes a new one.

use super::fault::{Fault, classify};
use super::server::{Address, Server};
use fred::clients::Client;
use fred::interfaces::ClientLike;
use fred::types::config::{Config, ConnectionConfig, PerformanceConfig, TcpConfig};
use fred::types::{ConnectHandle, CustomCommand, Value};
use std::time::Duration;
use tokio::time::timeout;

/// How long a connection may take to be made and to introduce itself.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long bytes that were sent may go without an acknowledgement before the kernel gives the connection up.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection; dropping it closes it.
pub(super) struct Connection {
    pub(super) client: Client,
    pub(super) info: Info,
    task: Task,
}

/// What drives a connection; it ends with this value.
pub(super) struct Task(ConnectHandle);

/// Connects.
pub(super) async fn dial(config: &Config) -> Result<(Client, Task), Fault> {
    let connection = ConnectionConfig {
        connection_timeout: CONNECT_TIMEOUT,
        internal_command_timeout: CONNECT_TIMEOUT,
        max_command_attempts: 1,
        tcp: TcpConfig { nodelay: Some(true), user_timeout: Some(TCP_USER_TIMEOUT), ..TcpConfig::default() },
        ..ConnectionConfig::default()
    };
    let client = Client::new(config.clone(), Some(PerformanceConfig::default()), Some(connection), None);
    let late = |_| Fault::Unknown(format!("no connection within {CONNECT_TIMEOUT:?}"));
    let task = timeout(CONNECT_TIMEOUT, client.init()).await.map_err(late)?;
    let task = task.map_err(|e| classify(&e))?;
    Ok((client, Task(task)))
}

impl Connection {
    /// Connects, and asks who is there.
    pub(super) async fn open(server: &Server, address: &Address) -> Result<Self, Fault> {
        let (client, task) = dial(&server.config(address)?).await?;
        let late = |_| Fault::Unknown(format!("no answer within {CONNECT_TIMEOUT:?}"));
        let info = timeout(CONNECT_TIMEOUT, info(&client)).await.map_err(late)??;
        Ok(Self { client, info, task })
    }

    /// Waits until the connection is lost.
    pub(super) async fn lost(&mut self) {
        // How it ended is of no interest: those whose calls it cut short are told.
        let _ = (&mut self.task.0).await;
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What the server says of itself (INFO).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Info {
    /// New with every start of the server.
    pub(super) run_id: String,
    /// New with every promotion (and at a few other times: see [`Self::replication_may_change`]).
    pub(super) replication: String,
    /// There is no earlier replication id on record, as there is after a promotion: if the id has changed, it was for
    /// reasons of housekeeping (a first replica came, or the backlog was freed).
    pub(super) replication_may_change: bool,
    /// Why it cannot be used.
    pub(super) unfit: Option<String>,
    /// It is not a primary: what it holds is a copy.
    pub(super) replica: bool,
    /// Why it may forget keys before their time.
    pub(super) evicts: Option<String>,
    /// Clearing expired keys may keep it from answering for so many milliseconds at a time: a quarter of its tick, which is `1/hz`.
    pub(super) pause_ms: u32,
}

/// A pause that callers would notice.
pub(super) const LONG_PAUSE_MS: u32 = 5;

/// Asks a server about itself.
pub(super) async fn info(client: &Client) -> Result<Info, Fault> {
    let command = CustomCommand::new_static("INFO", None::<u16>, false);
    let text: String = client.custom(command, Vec::<Value>::new()).await.map_err(|e| classify(&e))?;
    Info::parse(&text).ok_or_else(|| Fault::Unknown("INFO names no run_id: is this a Redis?".to_owned()))
}

impl Info {
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .map(|value| value.trim_end())
        };
        let id = |name: &str| {
            let value = field(name)?;
            (value.len() == 40 && value.is_ascii()).then(|| value.to_owned())
        };
        let replica = field("role")? != "master";
        let unfit = if replica {
            Some("it is a replica; give the address of the primary".to_owned())
        } else {
            (field("loading") == Some("1")).then(|| "it is loading its data".to_owned())
        };
        let (most, policy) = (field("maxmemory"), field("maxmemory_policy"));
        let evicts = match (most, policy) {
            (Some("0") | None, _) | (_, Some("noeviction") | None) => None,
            (Some(most), Some(policy)) => Some(format!(
                "Redis evicts keys (maxmemory {most}, maxmemory-policy {policy}); set maxmemory-policy noeviction"
            )),
        };
        Some(Self {
            run_id: id("run_id")?,
            replication: id("master_replid")?,
            replication_may_change: field("master_replid2").is_some_and(|id| id.bytes().all(|b| b == b'0')),
            unfit,
            replica,
            evicts,
            pause_ms: field("configured_hz")
                .and_then(|hz| 250_u32.checked_div(hz.parse().ok()?))
                .unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789012345678901234567890123456789";

    fn parse(rest: &str) -> Option<Info> {
        Info::parse(&format!("# Server\r\nrun_id:{ID}\r\nmaster_replid:{ID}\r\n{rest}"))
    }

    #[test]
    fn reads_who_is_there() {
        let zeros = "0".repeat(40);
        let info =
            parse(&format!("role:master\r\nloading:0\r\nmaster_replid2:{zeros}\r\nmaxmemory:0\r\n")).unwrap();
        let expected = Info {
            run_id: ID.to_owned(),
            replication: ID.to_owned(),
            replication_may_change: true,
            ..Info::default()
        };
        assert_eq!(info, expected);
        assert!(!parse(&format!("role:master\r\nmaster_replid2:{ID}\r\n")).unwrap().replication_may_change);
        assert!(parse("role:slave\r\n").unwrap().replica);
        assert!(parse("role:master\r\nloading:1\r\n").unwrap().unfit.is_some());
        let evicts = |policy: &str| {
            parse(&format!("role:master\r\nmaxmemory:9\r\nmaxmemory_policy:{policy}\r\n")).unwrap().evicts
        };
        assert!(evicts("allkeys-lru").is_some());
        assert_eq!(evicts("noeviction"), None);
        let pause = |hz: &str| parse(&format!("configured_hz:{hz}\r\nrole:master\r\n")).unwrap().pause_ms;
        assert_eq!([pause("10"), pause("100"), pause("0"), pause("fast")], [25, 2, 0, 0]);
        assert_eq!(Info::parse("role:master\r\nrun_id:short\r\n"), None);
    }
}
