//! A Redis of one's own, and requests in short.

use fred::prelude::*;
use fred::types::CustomCommand;
use quorate::quota::amount::{Rate, Tokens};
use quorate::quota::bucket::{Shape, Unseen};
use quorate::quota::policy::BucketId;
use quorate::store::redis::{RedisConfig, RedisStore};
use quorate::store::{Session, SessionState, Store, StoreError, Take, TakeCharge, Taken};
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const TIMEOUT: Duration = Duration::from_millis(500);

/// A redis-server on a free port, with its own folder; stopped when dropped.
pub struct Redis {
    child: Option<Child>,
    pub dir: tempfile::TempDir,
    pub port: u16,
    args: Vec<String>,
    steps: bool,
}

impl Redis {
    pub async fn start(args: &[&str]) -> Self {
        Self::launch(args, false).await
    }

    /// Its clock can be moved by [`Self::set_clock`].
    pub async fn start_with_a_clock() -> Self {
        Self::launch(&[], true).await
    }

    /// Reserves a port and starts nothing.
    pub fn absent() -> Self {
        let port = free_port();
        Self { child: None, dir: tempfile::tempdir().unwrap(), port, args: Vec::new(), steps: false }
    }

    async fn launch(args: &[&str], steps: bool) -> Self {
        let mut redis = Self::absent();
        redis.args = args.iter().map(ToString::to_string).collect();
        redis.steps = steps;
        redis.run().await;
        redis
    }

    /// Starts it (again), and waits until it answers.
    pub async fn run(&mut self) {
        self.spawn(&[]);
        let end = Instant::now() + PATIENCE;
        while !self.answers().await {
            assert!(Instant::now() < end, "redis-server does not answer");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Starts it with these arguments besides, and does not wait.
    pub fn spawn(&mut self, more: &[&str]) {
        let mut command = Command::new("redis-server");
        command
            .args(["--port", &self.port.to_string(), "--save", "", "--bind", "127.0.0.1"])
            .args(&self.args)
            .args(more)
            .current_dir(self.dir.path())
            .stdout(Stdio::null());
        if self.steps {
            self.set_clock(0);
            command.env("LD_PRELOAD", self.step_clock()).env("STEP_CLOCK", self.dir.path().join("clock"));
        }
        self.child = Some(command.spawn().expect("redis-server is needed for these tests"));
    }

    /// Sets how far its clock is ahead of ours.
    pub fn set_clock(&self, ms: i64) {
        let path = self.dir.path().join("clock");
        let mut file =
            std::fs::OpenOptions::new().create(true).write(true).truncate(false).open(path).unwrap();
        file.write_all(&(ms * 1_000).to_ne_bytes()).unwrap();
    }

    /// Builds what makes its clock movable.
    fn step_clock(&self) -> PathBuf {
        let library = self.dir.path().join("step_clock.so");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/store/step_clock.c");
        let built =
            Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).status();
        assert!(built.expect("a C compiler is needed for this test").success());
        library
    }

    async fn answers(&self) -> bool {
        let client = self.client();
        if client.init().await.is_err() {
            return false;
        }
        let pong: Result<String, _> = client.ping(None).await;
        pong.is_ok_and(|pong| pong == "PONG") && client.quit().await.is_ok()
    }

    fn client(&self) -> Client {
        let password = self.args.iter().position(|a| a == "--requirepass").map(|i| self.args[i + 1].clone());
        let server = ServerConfig::new_centralized("127.0.0.1", self.port);
        Client::new(Config { server, password, ..Config::default() }, None, None, None)
    }

    /// A client beside the store's.
    pub async fn admin(&self) -> Client {
        let client = self.client();
        client.init().await.unwrap();
        client
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    pub fn config(&self) -> RedisConfig {
        RedisConfig {
            url: format!("redis://127.0.0.1:{}", self.port),
            tls: None,
            timeout: TIMEOUT,
            cluster: "prod".to_owned(),
            region: "us-east".to_owned(),
        }
    }

    /// The same server, by a Unix socket of this name in its folder.
    pub fn config_by_socket(&self, name: &str) -> RedisConfig {
        RedisConfig { url: format!("redis+unix://{}", self.dir.path().join(name).display()), ..self.config() }
    }

    pub fn store(&self) -> RedisStore {
        RedisStore::connect(&self.config()).unwrap()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Runs a command by its name.
pub async fn command<R: FromValue>(client: &Client, name: &'static str, args: &[&str]) -> R {
    try_command(client, name, args).await.unwrap()
}

/// The same, where the server may say no, or go away.
pub async fn try_command<R: FromValue>(client: &Client, name: &'static str, args: &[&str]) -> FredResult<R> {
    let args: Vec<Value> = args.iter().map(|a| Value::from(*a)).collect();
    client.custom(CustomCommand::new_static(name, None::<u16>, false), args).await
}

/// The same, of a server that may cut its clients off at any moment, as Sentinel makes one do that it moves; `None`: it did.
pub async fn asked<R: FromValue>(server: &Redis, name: &'static str, args: &[&str]) -> Option<R> {
    let client = server.client();
    client.init().await.ok()?;
    try_command(&client, name, args).await.ok()
}

/// A store whose buckets are full, and its session.
pub async fn full(config: &RedisConfig) -> (RedisStore, Session) {
    let store = RedisStore::connect(config).unwrap();
    let session = session(&store, None).await;
    store.mark_full(session).await.unwrap();
    (store, session)
}

/// Takes until there is an answer.
pub async fn settled(store: &RedisStore, b: TestBucket, cost: i64) -> (bool, i64) {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Ok(answer) = spend(store, b, cost).await {
            return answer;
        }
        assert!(Instant::now() < end, "no answer in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits for a session other than `not`.
pub async fn session(store: &RedisStore, not: Option<Session>) -> Session {
    let mut states = store.session();
    let other = |state: &SessionState| state.session().is_some_and(|s| Some(s) != not);
    match timeout(PATIENCE, states.wait_for(other)).await {
        Ok(state) => state.unwrap().session().unwrap(),
        Err(_) => panic!("no session in time: {:?}", store.health()),
    }
}

/// Waits until it is detached; returns why.
pub async fn detached(store: &RedisStore) -> String {
    let mut states = store.session();
    let gone = |state: &SessionState| state.session().is_none();
    match timeout(PATIENCE, states.wait_for(gone)).await.expect("detached in time").unwrap().clone() {
        SessionState::Detached { why } => why,
        SessionState::Attached(session) => panic!("{session:?}"),
    }
}

/// Repeats `what` until it holds.
pub async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let end = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < end, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A worker that answers.
pub async fn worker(store: &RedisStore) -> RedisStore {
    let worker = store.worker();
    let probe = bucket(255, 0, 1);
    until("a worker is connected", || async { worker.take(probe.take(0)).await.is_ok() }).await;
    worker
}

/// A bucket under test.
#[derive(Clone, Copy)]
pub struct TestBucket {
    pub id: BucketId,
    pub shape: Shape,
    pub unseen: Option<Unseen>,
}

/// Bucket `id`, with a rate and a capacity in whole tokens.
pub fn bucket(id: u8, rate: i64, cap: i64) -> TestBucket {
    let shape = Shape { rate: Rate::per_second(rate), cap: Tokens::whole(cap) };
    TestBucket { id: BucketId([id; 16]), shape, unseen: None }
}

impl TestBucket {
    pub fn charge(&self, cost: i64) -> TakeCharge {
        let (cost, enforce) = (Tokens::whole(cost), true);
        TakeCharge { bucket: self.id, shape: self.shape, unseen: self.unseen, cost, enforce }
    }

    pub fn take(&self, cost: i64) -> Take {
        Take { charges: vec![self.charge(cost)], ..Take::default() }
    }
}

/// Takes `cost` from one bucket: was it allowed, and what is left, in whole tokens?
pub async fn spend<S: Store>(store: &S, bucket: TestBucket, cost: i64) -> Result<(bool, i64), StoreError> {
    let taken = store.take(bucket.take(cost)).await?;
    Ok((taken.allowed, taken.charges[0].level.floor()))
}

/// A request of several charges: was it allowed, which fitted, and what is left?
pub async fn spend_all<S: Store>(store: &S, charges: Vec<TakeCharge>) -> (bool, Vec<bool>, Vec<i64>) {
    let Taken { allowed, charges, .. } = store.take(Take { charges, ..Take::default() }).await.unwrap();
    (allowed, charges.iter().map(|c| c.fits).collect(), charges.iter().map(|c| c.level.floor()).collect())
}
