//! The machines that daemons run on: clocks that are wrong in every way that the promise allows, pauses, crashes.

use super::chance::Chance;
use quorate::clock::{Reading, simulate};
use quorate::quota::amount::{MICROS_PER_SECOND, Micros};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::time::{Instant, sleep};

/// True time: that of the simulation, which no part of the product knows.
#[derive(Clone, Copy, Debug)]
pub struct TrueTime(Instant);

impl TrueTime {
    /// It begins now.
    #[must_use]
    pub fn begin() -> Self {
        Self(Instant::now())
    }

    /// Microseconds since the run began.
    #[must_use]
    pub fn now(self) -> Micros {
        Micros::from_duration(self.0.elapsed())
    }

    /// Waits until so much time has passed since the run began.
    pub async fn until(self, at: Micros) {
        tokio::time::sleep_until(self.0 + at.or_zero().to_duration()).await;
    }
}

/// Waits for so long, in true time.
pub async fn pass(time: Micros) {
    sleep(time.or_zero().to_duration()).await;
}

/// A clock of any offset that runs fast or slow by some parts per million.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    real: Micros,
    shown: Micros,
    ppm: i64,
}

impl Clock {
    /// One that reads anything, and runs by up to `drift` parts per million off true speed.
    #[must_use]
    pub fn any(chance: &Chance, drift: i64) -> Self {
        let shown = Micros(chance.int(1_000_000, 1 << 50));
        Self { real: Micros::ZERO, shown, ppm: chance.int(-drift, drift) }
    }

    /// What it reads.
    #[must_use]
    pub fn at(&self, real: Micros) -> Micros {
        self.shown + (real - self.real).mul_div(MICROS_PER_SECOND + self.ppm, MICROS_PER_SECOND)
    }

    /// From now on it runs off true speed by so much.
    pub fn bend(&mut self, real: Micros, ppm: i64) {
        *self = Self { real, shown: self.at(real), ppm };
    }

    /// It is set forward or back.
    pub fn step(&mut self, real: Micros, by: Micros) {
        *self = Self { real, shown: self.at(real) + by, ppm: self.ppm };
    }
}

/// What one machine's clocks are.
#[derive(Clone, Copy, Debug)]
pub struct Clocks {
    /// Since it was switched on, suspended time included.
    pub monotonic: Clock,
    /// The time of day.
    pub wall: Clock,
}

/// A machine with one daemon on it.
#[derive(Debug)]
pub struct Machine {
    time: TrueTime,
    clocks: Mutex<Clocks>,
    paused: Mutex<Pause>,
    /// Grows with every crash: what belongs to an older life of the daemon does nothing more.
    life: AtomicU64,
}

#[derive(Debug, Default)]
struct Pause {
    until: Micros,
    waiting: Vec<Waker>,
}

impl Machine {
    /// One that runs.
    #[must_use]
    pub fn new(time: TrueTime, clocks: Clocks) -> Arc<Self> {
        Arc::new(Self { time, clocks: Mutex::new(clocks), paused: Mutex::default(), life: AtomicU64::new(0) })
    }

    /// Changes its clocks.
    pub fn clocks(&self) -> MutexGuard<'_, Clocks> {
        lock(&self.clocks)
    }

    /// Stands still for so long: whatever arrives is dealt with afterwards.
    pub fn pause(self: &Arc<Self>, time: Micros) {
        let until = self.time.now() + time;
        {
            let mut paused = lock(&self.paused);
            paused.until = paused.until.max(until);
        }
        let machine = Arc::clone(self);
        tokio::spawn(async move {
            machine.time.until(until).await;
            machine.wake();
        });
    }

    /// Goes on, if it stood still.
    pub fn resume(&self) {
        lock(&self.paused).until = Micros::ZERO;
        self.wake();
    }

    /// Everything that runs on it ends, without a word.
    pub fn crash(&self) {
        self.life.fetch_add(1, Ordering::Relaxed);
        self.resume();
    }

    /// Which life of its daemon this is.
    #[must_use]
    pub fn life(&self) -> u64 {
        self.life.load(Ordering::Relaxed)
    }

    /// Runs something on this machine: under its clocks, not while it stands still, and no longer than its present life:
    /// then it ends with `None`.
    pub fn run<F: Future>(self: &Arc<Self>, future: F) -> OnMachine<F> {
        OnMachine { life: self.life(), machine: Arc::clone(self), future: Box::pin(future) }
    }

    /// Does something at once, under its clocks.
    pub fn with_clocks<T>(&self, act: impl FnOnce() -> T) -> T {
        let real = self.time.now();
        let clocks = *lock(&self.clocks);
        let reading = Reading { monotonic: clocks.monotonic.at(real), wall: clocks.wall.at(real) };
        let before = simulate(Some(reading));
        let done = act();
        simulate(before);
        done
    }

    fn wake(&self) {
        let waiting = std::mem::take(&mut lock(&self.paused).waiting);
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// See [`Machine::run`].
#[derive(Debug)]
pub struct OnMachine<F> {
    life: u64,
    machine: Arc<Machine>,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for OnMachine<F> {
    type Output = Option<F::Output>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if this.life != this.machine.life() {
            return Poll::Ready(None);
        }
        {
            let mut paused = lock(&this.machine.paused);
            if paused.until > this.machine.time.now() {
                paused.waiting.push(context.waker().clone());
                return Poll::Pending;
            }
        }
        this.machine.with_clocks(|| this.future.as_mut().poll(context)).map(Some)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
