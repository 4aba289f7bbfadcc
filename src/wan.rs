//! A wide-area link on one machine: a TCP proxy with delay, jitter, bandwidth, partitions and resets.
//!
//! `quorate dev --wan-rtt` puts one in front of each region's peer listener, and so do tests and `quorate-chaos`. It carries
//! bytes in order and never loses any, as TCP does: what is in flight when the link is cut arrives after it heals.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

/// Connections that a link carries at once; more wait in the listener's backlog.
pub const CONNECTIONS_MAX: usize = 1_024;
/// Bytes read at once.
const CHUNK_BYTES: usize = 16 * 1_024;
/// Chunks under way in one direction of a connection. With `CHUNK_BYTES` it bounds the memory (4 MiB) and, as a
/// window would, the throughput (4 MiB a one-way delay).
const CHUNKS_IN_FLIGHT: usize = 256;
/// How long to wait for the target to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// One direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From whoever connects to [`Link::addr`] to the target.
    ToTarget,
    /// From the target back.
    FromTarget,
}

/// A TCP proxy that behaves like a long line. It ends, with all its connections, when it is dropped.
#[derive(Debug)]
pub struct Link {
    addr: SocketAddr,
    line: watch::Sender<Line>,
    task: AbortHandle,
}

/// How the line is at the moment.
#[derive(Clone, Copy, Debug)]
struct Line {
    target: SocketAddr,
    to_target: Way,
    from_target: Way,
    /// Connections made under an earlier number are reset.
    generation: u64,
    /// New connections are reset, too.
    refuses: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Way {
    delay: Duration,
    jitter: Duration,
    bytes_per_second: Option<NonZeroU64>,
    cut: bool,
}

/// Until when each direction is busy with bytes that have been sent: connections share a line's bandwidth.
#[derive(Debug, Default)]
struct Busy {
    to_target: Mutex<Option<Instant>>,
    from_target: Mutex<Option<Instant>>,
}

impl Busy {
    /// When the last of `bytes` has left, sent now; from then on the line is free again.
    fn sent(&self, direction: Direction, bytes: usize, way: Way) -> Instant {
        let now = Instant::now();
        let Some(rate) = way.bytes_per_second else { return now };
        let of = match direction {
            Direction::ToTarget => &self.to_target,
            Direction::FromTarget => &self.from_target,
        };
        let mut busy = of.lock().unwrap_or_else(PoisonError::into_inner);
        let micros = u64::try_from(bytes).unwrap_or(u64::MAX).saturating_mul(1_000_000) / rate;
        let done = busy.map_or(now, |until| until.max(now)) + Duration::from_micros(micros);
        *busy = Some(done);
        done
    }
}

impl Line {
    fn way(&self, direction: Direction) -> Way {
        match direction {
            Direction::ToTarget => self.to_target,
            Direction::FromTarget => self.from_target,
        }
    }

    fn way_mut(&mut self, direction: Direction) -> &mut Way {
        match direction {
            Direction::ToTarget => &mut self.to_target,
            Direction::FromTarget => &mut self.from_target,
        }
    }
}

impl Link {
    /// Listens on a free loopback port and carries connections to `target`, `delay` each way.
    ///
    /// # Errors
    /// If no port can be bound.
    pub async fn start(target: SocketAddr, delay: Duration) -> std::io::Result<Self> {
        Self::listen("127.0.0.1:0".parse().map_err(std::io::Error::other)?, target, delay).await
    }

    /// The same on an address of the caller's choice.
    ///
    /// # Errors
    /// If the address cannot be bound.
    pub async fn listen(addr: SocketAddr, target: SocketAddr, delay: Duration) -> std::io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        let way = Way { delay, ..Way::default() };
        let line = Line { target, to_target: way, from_target: way, generation: 0, refuses: false };
        let (line, seen) = watch::channel(line);
        let task = tokio::spawn(accept(listener, seen)).abort_handle();
        Ok(Self { addr, line, task })
    }

    /// Where to connect.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sets the one-way delay of both directions, for what is sent from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.set_delay_one_way(Direction::ToTarget, delay);
        self.set_delay_one_way(Direction::FromTarget, delay);
    }

    /// Sets the delay of one direction.
    pub fn set_delay_one_way(&self, direction: Direction, delay: Duration) {
        self.line.send_modify(|line| line.way_mut(direction).delay = delay);
    }

    /// Adds a random time up to `jitter` to the delay of each chunk of bytes; order is kept.
    pub fn set_jitter(&self, jitter: Duration) {
        self.set_jitter_one_way(Direction::ToTarget, jitter);
        self.set_jitter_one_way(Direction::FromTarget, jitter);
    }

    /// Sets the jitter of one direction.
    pub fn set_jitter_one_way(&self, direction: Direction, jitter: Duration) {
        self.line.send_modify(|line| line.way_mut(direction).jitter = jitter);
    }

    /// Carries at most so many bytes a second in this direction, all connections together; `None`: as many as come.
    pub fn set_bandwidth_one_way(&self, direction: Direction, bytes_per_second: Option<NonZeroU64>) {
        self.line.send_modify(|line| line.way_mut(direction).bytes_per_second = bytes_per_second);
    }

    /// Carries new connections to another target. Those that exist stay with the old one: see [`Self::reset`].
    pub fn set_target(&self, target: SocketAddr) {
        self.line.send_modify(|line| line.target = target);
    }

    /// A partition: connections, those that exist and new ones, stay open and carry nothing. (A new one is
    /// accepted by this machine's kernel, so it looks connected and dead; across a real WAN it would hang sooner.)
    pub fn cut(&self) {
        self.cut_one_way(Direction::ToTarget);
        self.cut_one_way(Direction::FromTarget);
    }

    /// A partition of one direction.
    pub fn cut_one_way(&self, direction: Direction) {
        self.line.send_modify(|line| line.way_mut(direction).cut = true);
    }

    /// Ends a partition; what had been sent arrives.
    pub fn heal(&self) {
        self.heal_one_way(Direction::ToTarget);
        self.heal_one_way(Direction::FromTarget);
    }

    /// Ends a partition of one direction.
    pub fn heal_one_way(&self, direction: Direction) {
        self.line.send_modify(|line| line.way_mut(direction).cut = false);
    }

    /// Resets (RST) every connection; new ones work as before.
    pub fn reset(&self) {
        self.line.send_modify(|line| line.generation = line.generation.wrapping_add(1));
    }

    /// A partition that callers are told of: every connection is reset, and new ones are until `refuses` is taken back.
    pub fn set_refuses(&self, refuses: bool) {
        self.line.send_modify(|line| {
            line.refuses = refuses;
            line.generation = line.generation.wrapping_add(u64::from(refuses));
        });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, line: watch::Receiver<Line>) {
    let busy = Arc::new(Busy::default());
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let Ok((client, _)) = listener.accept().await else {
            // Out of file descriptors, or the peer has gone again: do not spin.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let (line, busy) = (line.clone(), Arc::clone(&busy));
        connections.spawn(async move {
            carry(client, line, &busy).await;
            drop(permit);
        });
    }
}

/// One connection, until both sides are done, one side breaks, or the link is reset.
async fn carry(mut client: TcpStream, mut line: watch::Receiver<Line>, busy: &Busy) {
    let Line { generation, refuses, .. } = *line.borrow_and_update();
    if refuses {
        return abort(&client);
    }
    let mut reset = line.clone();
    let reset = reset.wait_for(|line| line.generation != generation);
    tokio::pin!(reset);
    let connected = tokio::select! {
        server = connect(&mut line) => server,
        _ = &mut reset => None,
    };
    let Some(mut server) = connected else { return abort(&client) };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (client_halves, server_halves) = (client.split(), server.split());
    let pumps = async {
        tokio::try_join!(
            pump(client_halves.0, server_halves.1, line.clone(), Direction::ToTarget, busy),
            pump(server_halves.0, client_halves.1, line.clone(), Direction::FromTarget, busy),
        )
    };
    let torn = tokio::select! {
        done = pumps => done.is_err(),
        _ = reset => true,
    };
    if torn {
        abort(&client);
        abort(&server);
    }
}

/// Connects to the target, a round trip later: the handshake of a long line, which this machine's kernel skips.
async fn connect(line: &mut watch::Receiver<Line>) -> Option<TcpStream> {
    for way in [Direction::ToTarget, Direction::FromTarget] {
        let due = Instant::now() + delay(line.borrow().way(way));
        pass(line, way, due).await;
    }
    let target = line.borrow().target;
    tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(target)).await.ok()?.ok()
}

/// Makes the stream send RST when it is dropped.
fn abort(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Moves bytes one way until the source ends; then ends the sink, after its last byte. An error is one side breaking.
async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    line: watch::Receiver<Line>,
    way: Direction,
    busy: &Busy,
) -> std::io::Result<()> {
    let (tx, mut rx) = mpsc::channel::<(Instant, Vec<u8>)>(CHUNKS_IN_FLIGHT);
    let mut reading = line.clone();
    let read = async move {
        let mut buffer = vec![0_u8; CHUNK_BYTES];
        loop {
            let read = from.read(&mut buffer).await?;
            let now = reading.borrow().way(way);
            let due = busy.sent(way, read, now) + delay(now);
            let chunk = buffer.get(..read).map(<[u8]>::to_vec).unwrap_or_default();
            if tx.send((due, chunk)).await.is_err() || read == 0 {
                return Ok(());
            }
            // Bytes sent into a partition wait at their source, as unacknowledged ones do.
            let _ = reading.wait_for(|line| !line.way(way).cut).await;
        }
    };
    let mut writing = line;
    let write = async move {
        let mut last = Instant::now();
        while let Some((due, chunk)) = rx.recv().await {
            last = last.max(due);
            pass(&mut writing, way, last).await;
            if chunk.is_empty() {
                return to.shutdown().await;
            }
            to.write_all(&chunk).await?;
        }
        Ok(())
    };
    tokio::try_join!(read, write).map(|_| ())
}

/// Waits until `due`, and for as long as the line is cut.
async fn pass(line: &mut watch::Receiver<Line>, way: Direction, due: Instant) {
    tokio::time::sleep_until(due).await;
    // If the link has been dropped, this task is being aborted.
    let _ = line.wait_for(|line| !line.way(way).cut).await;
}

fn delay(way: Way) -> Duration {
    if way.jitter.is_zero() { way.delay } else { way.delay + way.jitter.mul_f64(rand::random::<f64>()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn echo() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.split();
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                });
            }
        });
        addr
    }

    async fn ping(stream: &mut TcpStream) -> std::io::Result<Duration> {
        let sent = Instant::now();
        stream.write_all(b"ping").await?;
        let mut back = [0; 4];
        stream.read_exact(&mut back).await?;
        assert_eq!(&back, b"ping");
        Ok(sent.elapsed())
    }

    #[tokio::test]
    async fn delays_both_ways() {
        let link = Link::start(echo().await, Duration::from_millis(20)).await.unwrap();
        let mut stream = TcpStream::connect(link.addr()).await.unwrap();
        assert!(ping(&mut stream).await.unwrap() >= Duration::from_millis(80), "with the handshake");
        assert!(ping(&mut stream).await.unwrap() >= Duration::from_millis(40));
        link.set_delay(Duration::ZERO);
        assert!(ping(&mut stream).await.unwrap() < Duration::from_millis(40));
    }

    #[tokio::test]
    async fn a_cut_loses_nothing_and_a_reset_is_seen() {
        let link = Link::start(echo().await, Duration::ZERO).await.unwrap();
        let mut stream = TcpStream::connect(link.addr()).await.unwrap();
        ping(&mut stream).await.unwrap();
        link.cut();
        stream.write_all(b"held").await.unwrap();
        let mut back = [0; 4];
        let silent = tokio::time::timeout(Duration::from_millis(100), stream.read_exact(&mut back)).await;
        assert!(silent.is_err(), "nothing passes, and nobody is told");
        link.heal();
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"held");

        link.reset();
        let gone = stream.read_exact(&mut back).await.unwrap_err();
        assert_eq!(gone.kind(), std::io::ErrorKind::ConnectionReset);
        let mut stream = TcpStream::connect(link.addr()).await.unwrap();
        ping(&mut stream).await.unwrap();
    }

    #[tokio::test]
    async fn an_end_of_stream_passes_after_the_last_byte() {
        let link = Link::start(echo().await, Duration::from_millis(5)).await.unwrap();
        let mut stream = TcpStream::connect(link.addr()).await.unwrap();
        let sent = vec![7; 300_000];
        let (mut from, mut to) = stream.split();
        let mut got = Vec::new();
        let write = async {
            to.write_all(&sent).await.unwrap();
            to.shutdown().await.unwrap();
        };
        let (_, read) = tokio::join!(write, from.read_to_end(&mut got));
        read.unwrap();
        assert_eq!(got, sent);
    }

    #[tokio::test]
    async fn each_direction_has_its_own_line() {
        let link = Link::start(echo().await, Duration::ZERO).await.unwrap();
        let mut stream = TcpStream::connect(link.addr()).await.unwrap();
        ping(&mut stream).await.unwrap();
        link.set_delay_one_way(Direction::FromTarget, Duration::from_millis(100));
        let took = ping(&mut stream).await.unwrap();
        assert!(
            (Duration::from_millis(100)..Duration::from_millis(200)).contains(&took),
            "one way: {took:?}"
        );

        // Cut on the way there: the target hears nothing, and answers nothing.
        link.set_delay(Duration::ZERO);
        link.cut_one_way(Direction::ToTarget);
        let silent = tokio::time::timeout(Duration::from_millis(100), ping(&mut stream)).await;
        assert!(silent.is_err());
        link.heal_one_way(Direction::ToTarget);
        let mut back = [0; 4];
        stream.read_exact(&mut back).await.unwrap();
        assert_eq!(&back, b"ping");
    }

    #[tokio::test]
    async fn what_is_sent_one_way_arrives_though_the_answer_does_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = Link::start(listener.local_addr().unwrap(), Duration::ZERO).await.unwrap();
        let mut caller = TcpStream::connect(link.addr()).await.unwrap();
        let (mut target, _) = listener.accept().await.unwrap();
        link.cut_one_way(Direction::FromTarget);
        let mut four = [0; 4];
        caller.write_all(b"ping").await.unwrap();
        target.read_exact(&mut four).await.unwrap();
        target.write_all(b"pong").await.unwrap();
        let silent = tokio::time::timeout(Duration::from_millis(100), caller.read_exact(&mut four)).await;
        assert!(silent.is_err(), "the answer is held");
        link.heal();
        caller.read_exact(&mut four).await.unwrap();
        assert_eq!(&four, b"pong");
    }

    #[tokio::test]
    async fn connections_share_a_lines_bandwidth() {
        let link = Link::start(echo().await, Duration::ZERO).await.unwrap();
        link.set_bandwidth_one_way(Direction::ToTarget, NonZeroU64::new(100_000));
        let (mut a, mut b) =
            (TcpStream::connect(link.addr()).await.unwrap(), TcpStream::connect(link.addr()).await.unwrap());
        let began = Instant::now();
        let whole = async |stream: &mut TcpStream| {
            stream.write_all(&[1; 10_000]).await.unwrap();
            stream.read_exact(&mut [0; 10_000]).await.unwrap();
        };
        tokio::join!(whole(&mut a), whole(&mut b));
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(200), "20 kB at 100 kB/s: {took:?}");
        link.set_bandwidth_one_way(Direction::ToTarget, None);
        let began = Instant::now();
        whole(&mut a).await;
        assert!(began.elapsed() < Duration::from_millis(200), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn a_link_that_refuses_resets_old_and_new_connections() {
        let link = Link::start(echo().await, Duration::ZERO).await.unwrap();
        let mut old = TcpStream::connect(link.addr()).await.unwrap();
        ping(&mut old).await.unwrap();
        link.set_refuses(true);
        assert_eq!(ping(&mut old).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
        // The kernel may have taken the connection before it was reset, or not.
        let new = async { ping(&mut TcpStream::connect(link.addr()).await?).await };
        assert!(new.await.is_err());
        link.set_refuses(false);
        ping(&mut TcpStream::connect(link.addr()).await.unwrap()).await.unwrap();
    }

    #[tokio::test]
    async fn new_connections_go_to_the_new_target() {
        let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = Link::start(first.local_addr().unwrap(), Duration::ZERO).await.unwrap();
        let _old = TcpStream::connect(link.addr()).await.unwrap();
        first.accept().await.unwrap();
        link.set_target(echo().await);
        ping(&mut TcpStream::connect(link.addr()).await.unwrap()).await.unwrap();
    }
}
