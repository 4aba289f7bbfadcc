//! The control task: attaches to Redis, decides under which session, watches over it, and attaches again.

use super::clock::{Clock, Reading};
use super::connect::{Connection, info};
use super::fault::Fault;
use super::pump::GIVE_UP;
use super::sample;
use super::scripts::{SCRIPTS, run};
use super::shared::{Attached, Backoff, Link, Live, Shared};
use super::wire::{AttachAnswer, AttachCall, Stem, attached, beaten};
use crate::bugs::{Bug, planted};
use crate::clock;
use crate::quota::amount::Micros;
use crate::quota::bucket::Generation;
use crate::store::{Session, SessionState, new_nonce};
use crate::telemetry::metrics::StoreCall;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// How often the session, the clock and the round trip are looked at.
const BEAT: Duration = Duration::from_millis(200);
/// Every so many beats the meta key is written, which says that a daemon is alive ...
const BEATS_A_WRITE: u32 = 5;
/// ... and every so many the server is asked about itself.
const BEATS_AN_INFO: u32 = 50;
/// Every so many its keys and its memory are looked at.
const BEATS_A_SAMPLE: u32 = 50;
/// After this the server is said not to answer; after [`GIVE_UP`] the connection is dropped.
const SILENCE: Duration = Duration::from_secs(1);
/// A daemon that wrote the meta key this recently is alive: one that it has ousted waits.
const RECENT: Micros = Micros::seconds(5);
/// The meta key lives this long after the last beat. A region that comes back later starts empty.
pub(super) const META_LIFE: Micros = Micros::seconds(30 * 86_400);

/// What this daemon remembers of its sessions.
#[derive(Default)]
struct Me {
    session: Option<Session>,
    /// The server that it is, or was, on.
    run_id: Option<String>,
    /// Another daemon took the region over while we were attached.
    ousted: bool,
}

/// Keeps the store attached, for ever.
pub(super) async fn supervise(shared: &Shared, link: &Link) {
    let mut me = Me::default();
    let mut backoff = Backoff::new();
    loop {
        let why = match attach(shared, &mut me).await {
            Ok((mut connection, session)) => {
                let live = publish(shared, link, &connection, session);
                let began = clock::now();
                let fault = watch(shared, &mut connection, &live).await;
                link.live.store(None);
                me.ousted |= fault == Fault::Fenced;
                if (clock::now() - began).to_duration() > GIVE_UP {
                    backoff.reset();
                }
                fault
            }
            Err(fault) => fault,
        };
        detach(shared, &why);
        backoff.pause().await;
    }
}

/// Connects, and comes to an agreement with the meta key about the session.
async fn attach(shared: &Shared, me: &mut Me) -> Result<(Connection, Arc<Attached>), Fault> {
    let address = shared.server.locate().await?;
    let connection = Connection::open(&shared.server, &address).await?;
    if connection.info.replica {
        shared.lost.store(true, Ordering::SeqCst);
    }
    if let Some(why) = &connection.info.unfit {
        return Err(Fault::NotPrimary(why.clone()));
    }
    let run_id = &connection.info.run_id;
    // Buckets on a server that this daemon has left are behind, also if it comes back there. And where the other server still runs,
    // so may calls that were sent to it: refill on this one begins when they have ended.
    let elsewhere =
        me.run_id.as_ref().is_some_and(|known| known != run_id) && !planted(Bug::RollbackUndetected);
    let grace = if elsewhere {
        shared.lost.store(true, Ordering::SeqCst);
        shared.end_session()
    } else {
        Micros::ZERO
    };
    let lost = shared.lost.swap(false, Ordering::SeqCst);
    let exchange = ask_meta(shared, me, &connection, (lost, grace)).await;
    // Whatever became of this attempt, the next one must not forget.
    let (sent, answer) = exchange.inspect_err(|_| {
        shared.lost.fetch_or(lost, Ordering::SeqCst);
    })?;
    let received = clock::now();
    let nonce = answer.session;
    let session = match (answer.kind, me.session) {
        (b'A', Some(session)) => {
            let reading = shared.clock().as_mut().map(|clock| clock.observe(sent, received, answer.time));
            if let Some(Reading::Step(by)) = reading {
                shared.lost.store(true, Ordering::SeqCst);
                return Err(stepped(by));
            }
            session
        }
        (b'R' | b'L', _) => {
            *shared.clock() = Some(Clock::new(sent, received, answer.time));
            Session { nonce, kept: answer.kind == b'R' }
        }
        (b'H', _) => return Err(Fault::Fenced),
        _ => return Err(Fault::Unknown("attach.lua gave an answer that is none of its own".to_owned())),
    };
    me.session = Some(session);
    me.run_id = Some(connection.info.run_id.clone());
    me.ousted = false;
    let same = |known: &Arc<Attached>| known.session == session && known.address == address;
    let known = shared.attached.borrow().clone().filter(same);
    let session = known.unwrap_or_else(|| {
        let stem = Stem::new(&shared.keys, nonce, answer.generation);
        let generation = Generation { start: answer.start, full: answer.full };
        tracing::debug!(nonce, kept = session.kept, "a new session with Redis");
        let place = (connection.info.run_id.clone(), address);
        Arc::new(Attached::new(session, stem, place, generation))
    });
    Ok((connection, session))
}

async fn ask_meta(
    shared: &Shared,
    me: &Me,
    connection: &Connection,
    (lost, grace): (bool, Micros),
) -> Result<(Micros, AttachAnswer), Fault> {
    let all = [&SCRIPTS.take, &SCRIPTS.prepare, &SCRIPTS.install, &SCRIPTS.beat];
    let info = &connection.info;
    let exchange = async {
        // So that the first request does not pay for it.
        for script in all {
            script.load(&connection.client).await.map_err(|e| super::fault::classify(&e))?;
        }
        // All servers and all their pasts are one.
        let blind = planted(Bug::RollbackUndetected);
        let id = |id: &'_ str| if blind { "0".repeat(id.len()) } else { id.to_owned() };
        let (run_id, replication) = (id(&info.run_id), id(&info.replication));
        let call = AttachCall {
            mine: me.session.map_or(0, |session| session.nonce),
            new_session: new_nonce(),
            new_generation: new_nonce(),
            run_id: &run_id,
            replication: &replication,
            replication_may_change: info.replication_may_change,
            lost: lost && !blind,
            yields: me.ousted,
            recent: RECENT,
            life: META_LIFE,
            grace,
        };
        let sent = clock::now();
        let answer = run(&connection.client, &SCRIPTS.attach, call.call(&shared.keys)).await?;
        Ok((sent, attached(answer)?))
    };
    let late = |_| Fault::Unknown(format!("no answer within {GIVE_UP:?}"));
    timeout(GIVE_UP, exchange).await.map_err(late)?
}

fn publish(shared: &Shared, link: &Link, connection: &Connection, session: Arc<Attached>) -> Arc<Live> {
    let live = Arc::new(Live {
        client: connection.client.clone(),
        attached: session.clone(),
        broken: Notify::new(),
    });
    link.open(live.clone());
    let state = SessionState::Attached(session.session);
    if shared.state.borrow().session().is_none() {
        tracing::info!(kept = session.session.kept, server = %session.address, "attached to Redis");
    }
    shared.attached.send_if_modified(|now| {
        let modified = !now.as_ref().is_some_and(|now| Arc::ptr_eq(now, &session));
        *now = Some(session);
        modified
    });
    *shared.health() = crate::store::Health { down: None, evicts: connection.info.evicts.clone() };
    shared.state.send_replace(state);
    live
}

/// Says that the control connection is gone. The workers' session ends only where the data or the right to it has.
fn detach(shared: &Shared, fault: &Fault) {
    let ends = matches!(fault, Fault::Fenced | Fault::NotPrimary(_)) || shared.lost.load(Ordering::SeqCst);
    if ends {
        shared.end_session();
    }
    let why = fault.to_string();
    let was_attached = shared.state.borrow().session().is_some();
    if was_attached {
        tracing::warn!(%fault, "detached from Redis");
    }
    shared.health().down = Some(why.clone());
    shared.state.send_replace(SessionState::Detached { why });
}

/// Beats until the connection, the session or the data is lost, and says which.
async fn watch(shared: &Shared, connection: &mut Connection, live: &Live) -> Fault {
    let client = connection.client.clone();
    let mut ticks = interval(BEAT);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut beats = 0_u32;
    loop {
        // A replica shows itself only where one writes.
        let writes = tokio::select! {
            () = connection.lost() => return Fault::Unknown("the connection was closed".to_owned()),
            () = live.broken.notified() => return Fault::Unknown("a call on it failed".to_owned()),
            _ = ticks.tick() => beats.is_multiple_of(BEATS_A_WRITE),
            () = shared.doubt.notified() => true,
        };
        if let Err(fault) = patient(shared, beat(shared, live, writes)).await {
            return fault;
        }
        if beats.is_multiple_of(BEATS_A_SAMPLE)
            && let Some(metrics) = shared.metrics.get()
            && let Err(fault) = sample::take(&client, &shared.keys, metrics).await
        {
            // What it means for the session, the next beat finds out.
            tracing::debug!(%fault, "Redis' keys cannot be sampled");
        }
        beats = beats.wrapping_add(1);
        if beats.is_multiple_of(BEATS_AN_INFO) {
            match patient(shared, info(&client)).await {
                Ok(now) if now.run_id == connection.info.run_id && same_lineage(&connection.info, &now) => {
                    shared.health().evicts = now.evicts;
                }
                // Attaching again finds out what it means.
                Ok(_) => return Fault::Unknown("Redis' role or its replication has changed".to_owned()),
                Err(fault) => return fault,
            }
            if shared.server.moves() && is_elsewhere(shared, &live.attached).await {
                return Fault::Unknown("Sentinel names another primary".to_owned());
            }
        }
    }
}

/// Has another server become the primary? One that is cut off from its Sentinels does not know it.
async fn is_elsewhere(shared: &Shared, attached: &Attached) -> bool {
    match shared.server.locate().await {
        Ok(address) => address != attached.address,
        Err(fault) => {
            tracing::debug!(%fault, "nobody says where the primary is");
            false
        }
    }
}

fn same_lineage(before: &super::connect::Info, now: &super::connect::Info) -> bool {
    now.unfit.is_none() && (now.replication == before.replication || now.replication_may_change)
}

/// Waits for an answer; tells people when it is slow to come, and gives up when it does not.
async fn patient<T>(shared: &Shared, exchange: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    tokio::pin!(exchange);
    if let Ok(answer) = timeout(SILENCE, &mut exchange).await {
        return answer;
    }
    shared.health().down = Some(format!("Redis has not answered for {SILENCE:?}"));
    let answer = timeout(GIVE_UP.saturating_sub(SILENCE), &mut exchange).await;
    answer.unwrap_or_else(|_| Err(Fault::Unknown(format!("no answer within {GIVE_UP:?}"))))
}

/// One beat: is the session in force, and where is the clock?
async fn beat(shared: &Shared, live: &Live, writes: bool) -> Result<(), Fault> {
    let life = if writes { META_LIFE } else { Micros::ZERO };
    let call = live.attached.stem.beat(life, false);
    let sent = clock::now();
    let outcome = run(&live.client, &SCRIPTS.beat, call).await.and_then(beaten);
    let received = clock::now();
    if let Some(metrics) = shared.metrics.get() {
        metrics.called(StoreCall::Beat, (received - sent).to_duration());
    }
    let (time, full) = match outcome {
        Ok(answer) => answer,
        // Out of memory, for one: the session is as good as it was, only nobody can write.
        Err(fault @ Fault::Refused(_)) => {
            shared.health().down = Some(fault.to_string());
            return Ok(());
        }
        Err(fault) => {
            if matches!(fault, Fault::NotPrimary(_)) {
                shared.lost.store(true, Ordering::SeqCst);
            }
            return Err(fault);
        }
    };
    if full {
        live.attached.set_full();
    }
    shared.health().down = None;
    shared.observe_rtt((received - sent).to_duration());
    let reading = shared.clock().as_mut().map(|clock| clock.observe(sent, received, time));
    match reading {
        Some(Reading::Step(by)) => {
            shared.lost.store(true, Ordering::SeqCst);
            Err(stepped(by))
        }
        _ => Ok(()),
    }
}

fn stepped(by: Micros) -> Fault {
    tracing::warn!(ms = by.0 / 1_000, "Redis' clock has stepped: what is stored is taken for lost");
    Fault::Clock
}
