//! The control task: attaches to Redis, decides under which session, watches over it, and attaches again.

use super::clock::{Clock, Reading};
use super::connect::{Connection, LONG_PAUSE_MS, info};
use super::fault::Fault;
use super::pump::GIVE_UP;
use super::sample;
use super::scripts::{SCRIPTS, run};
use super::server::Address;
use super::shared::{Attached, Backoff, Link, Live, Region, Shared};
use super::wire::{AttachAnswer, AttachCall, Say, Stem, attached, beaten};
use crate::bugs::{Bug, planted};
use crate::clock;
use crate::quota::amount::Micros;
use crate::quota::bucket::Generation;
use crate::store::{Session, SessionState, new_nonce};
use crate::telemetry::metrics::StoreCall;
use fred::clients::Client;
use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt};
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
/// How often its keys and its memory are looked at, and who the primary is.
const LOOK_ROUND: Duration = Duration::from_secs(10);
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
    /// The servers that its shards are, or were, on.
    run_ids: Vec<String>,
    /// Another daemon took the region over while we were attached.
    ousted: bool,
}

/// A shard's connection, and the session on it.
type Opened = (Connection, Arc<Attached>);

/// Keeps the store attached, for ever; a link for each shard.
pub(super) async fn supervise(region: &Region, links: &[Arc<Link>]) {
    let mut me = Me::default();
    let mut backoff = Backoff::new();
    loop {
        let why = match attach(region, &mut me).await {
            Ok(mut shards) => {
                let lives = publish(region, links, &shards);
                let began = clock::now();
                let fault = watch_all(region, &mut shards, &lives).await;
                links.iter().for_each(|link| link.live.store(None));
                me.ousted |= fault == Fault::Fenced;
                if (clock::now() - began).to_duration() > GIVE_UP {
                    backoff.reset();
                }
                fault
            }
            Err(fault) => fault,
        };
        detach(region, &why);
        backoff.pause().await;
    }
}

/// Connects, and comes to an agreement with the meta keys about the session: one for all shards, so that what one of them has lost
/// all have lost.
async fn attach(region: &Region, me: &mut Me) -> Result<Vec<Opened>, Fault> {
    let addresses = region.server.locate().await?;
    let opened = join_all(addresses.iter().map(|address| Connection::open(&region.server, address))).await;
    let connections = opened.into_iter().collect::<Result<Vec<_>, _>>()?;
    if connections.iter().any(|connection| connection.info.replica) {
        region.lost.store(true, Ordering::SeqCst);
    }
    if let Some(why) = connections.iter().find_map(|connection| connection.info.unfit.clone()) {
        return Err(Fault::NotPrimary(why));
    }
    let run_ids: Vec<String> = connections.iter().map(|c| c.info.run_id.clone()).collect();
    // Buckets on a server that this daemon has left are behind, also if it comes back there. And where the other server still runs,
    // so may calls that were sent to it: refill on this one begins when they have ended.
    let elsewhere = me.session.is_some() && me.run_ids != run_ids && !planted(Bug::RollbackUndetected);
    let grace = if elsewhere {
        region.lost.store(true, Ordering::SeqCst);
        region.shards.iter().map(|shard| shard.end_session()).max().unwrap_or_default()
    } else {
        Micros::ZERO
    };
    let lost = region.lost.swap(false, Ordering::SeqCst);
    let agreed = agree(region, me, &connections, (lost, grace)).await;
    // Whatever became of this attempt, the next one must not forget.
    let answers = agreed.inspect_err(|_| {
        region.lost.fetch_or(lost, Ordering::SeqCst);
    })?;
    let session = session_of(region, me, &answers)?;
    (me.session, me.run_ids, me.ousted) = (Some(session), run_ids, false);
    let shards = region.shards.iter().zip(connections).zip(addresses.into_iter().zip(answers));
    let attached = shards.map(|((shard, connection), (address, (_, answer)))| {
        let same = |known: &Arc<Attached>| known.session == session && known.address == address;
        let known = shard.attached.borrow().clone().filter(same);
        let attached = known.unwrap_or_else(|| {
            let stem = Stem::new(&shard.keys, answer.session, answer.generation);
            let generation = Generation { start: answer.start, full: answer.full, known: answer.known };
            let place = (connection.info.run_id.clone(), address.clone());
            let ahead = shard.offset().map_or(Micros::ZERO, |(low, _)| low);
            Arc::new(Attached::new(session, stem, place, (generation, ahead)))
        });
        (connection, attached)
    });
    Ok(attached.collect())
}

/// When an answer was asked for and came, and what it is.
type Answer = ((Micros, Micros), AttachAnswer);

/// Asks every shard's meta key, in order, until all say the same: one session, one generation of data.
async fn agree(
    region: &Region,
    me: &Me,
    connections: &[Connection],
    (lost, grace): (bool, Micros),
) -> Result<Vec<Answer>, Fault> {
    let mut claim = Claim { session: new_nonce(), generation: new_nonce(), lost, grace };
    let mut answers: Vec<Answer> = Vec::with_capacity(connections.len());
    for (shard, connection) in region.shards.iter().zip(connections) {
        let answer = ask_meta(shard, me, connection, &claim).await?;
        if answer.1.kind == b'H' {
            return Err(Fault::Fenced);
        }
        answers.push(answer);
    }
    let said = |(_, answer): &Answer| (answer.kind, answer.session, answer.generation);
    let first = answers.first().map(said);
    if answers.iter().all(|answer| Some(said(answer)) == first) {
        return Ok(answers);
    }
    // What one has lost, all have lost.
    claim.lost = true;
    let anew = (b'L', claim.session, claim.generation);
    let shards = region.shards.iter().zip(connections);
    for ((shard, connection), answer) in shards.zip(&mut answers).filter(|(_, answer)| said(answer) != anew) {
        *answer = ask_meta(shard, me, connection, &claim).await?;
    }
    Ok(answers)
}

/// The session that the shards have agreed on, and their clocks.
fn session_of(region: &Region, me: &Me, answers: &[Answer]) -> Result<Session, Fault> {
    let nonsense = || Fault::Unknown("attach.lua gave an answer that is none of its own".to_owned());
    let (_, first) = answers.first().ok_or_else(nonsense)?;
    let session = match (first.kind, me.session) {
        (b'A', Some(session)) => session,
        (b'R' | b'L', _) => Session { nonce: first.session, kept: first.kind == b'R' },
        _ => return Err(nonsense()),
    };
    for (shard, ((sent, received), answer)) in region.shards.iter().zip(answers) {
        let mut clock = shard.clock();
        match clock.as_mut() {
            Some(clock) if answer.kind == b'A' => {
                if let Reading::Step(by) = clock.observe(*sent, *received, answer.time) {
                    region.lost.store(true, Ordering::SeqCst);
                    return Err(stepped(by));
                }
            }
            _ => *clock = Some(Clock::new(*sent, *received, answer.time)),
        }
    }
    Ok(session)
}

/// What a daemon says when it attaches.
struct Claim {
    session: u64,
    generation: u64,
    lost: bool,
    grace: Micros,
}

async fn ask_meta(shared: &Shared, me: &Me, connection: &Connection, claim: &Claim) -> Result<Answer, Fault> {
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
            new_session: claim.session,
            new_generation: claim.generation,
            run_id: &run_id,
            replication: &replication,
            replication_may_change: info.replication_may_change,
            lost: claim.lost && !blind,
            yields: me.ousted,
            recent: RECENT,
            life: META_LIFE,
            grace: claim.grace,
        };
        let sent = clock::now();
        let answer = run(&connection.client, &SCRIPTS.attach, call.call(&shared.keys)).await?;
        Ok(((sent, clock::now()), attached(answer)?))
    };
    let late = |_| Fault::Unknown(format!("no answer within {GIVE_UP:?}"));
    timeout(GIVE_UP, exchange).await.map_err(late)?
}

fn publish(region: &Region, links: &[Arc<Link>], shards: &[Opened]) -> Vec<Arc<Live>> {
    let mut lives = Vec::with_capacity(shards.len());
    for ((shard, link), (connection, attached)) in region.shards.iter().zip(links).zip(shards) {
        let live = Arc::new(Live {
            client: connection.client.clone(),
            attached: attached.clone(),
            broken: Notify::new(),
        });
        link.open(live.clone());
        shard.attached.send_if_modified(|now| {
            let modified = !now.as_ref().is_some_and(|now| Arc::ptr_eq(now, attached));
            *now = Some(attached.clone());
            modified
        });
        *shard.health() = crate::store::Health { down: None, evicts: connection.info.evicts.clone() };
        lives.push(live);
    }
    if let Some((_, attached)) = shards.first() {
        if region.state.borrow().session().is_none() {
            tracing::info!(kept = attached.session.kept, server = %attached.address, "attached to Redis");
            let pause_ms = shards.iter().map(|(connection, _)| connection.info.pause_ms).max();
            if let Some(pause_ms) = pause_ms.filter(|ms| *ms > LONG_PAUSE_MS) {
                tracing::info!(
                    pause_ms,
                    "clearing expired keys may hold Redis up for so long; set `hz 100` there"
                );
            }
        }
        region.state.send_replace(SessionState::Attached(attached.session));
    }
    lives
}

/// Says that the control connection is gone. The workers' session ends only where the data or the right to it has.
fn detach(region: &Region, fault: &Fault) {
    let ends = matches!(fault, Fault::Fenced | Fault::NotPrimary(_)) || region.lost.load(Ordering::SeqCst);
    if ends {
        for shard in &region.shards {
            shard.end_session();
        }
    }
    let was_attached = region.state.borrow().session().is_some();
    if was_attached {
        tracing::warn!(%fault, "detached from Redis");
    }
    region.state.send_replace(SessionState::Detached { why: fault.to_string() });
}

/// Beats on all shards until the first is lost.
async fn watch_all(region: &Region, shards: &mut [Opened], lives: &[Arc<Live>]) -> Fault {
    let addresses: Vec<Address> = shards.iter().map(|(_, attached)| attached.address.clone()).collect();
    let all = region.shards.iter().zip(shards.iter_mut()).zip(lives);
    let watched = all.map(|((shard, (connection, _)), live)| watch(region, shard, connection, live));
    let mut watched: FuturesUnordered<_> = watched.collect();
    tokio::select! {
        Some(fault) = watched.next() => fault,
        fault = look_round(region, &addresses, lives) => fault,
    }
}

/// Samples each server now and then, and asks whether others have become the primaries: one that is cut off does not know it.
async fn look_round(region: &Region, addresses: &[Address], lives: &[Arc<Live>]) -> Fault {
    let mut ticks = interval(LOOK_ROUND);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut first = true;
    loop {
        ticks.tick().await;
        if let (Some(metrics), Some(shard)) = (region.metrics.get(), region.shards.first())
            && let Err(fault) = sample::take(&one_each(lives), &shard.keys, metrics).await
        {
            // What it means for the session, the next beat finds out.
            tracing::debug!(%fault, "Redis' keys cannot be sampled");
        }
        if std::mem::take(&mut first) || !region.server.moves() {
            continue;
        }
        match region.server.locate().await {
            Ok(now) if now != addresses => return Fault::Unknown("another server is the primary".to_owned()),
            Ok(_) => {}
            Err(fault) => tracing::debug!(%fault, "nobody says where the primary is"),
        }
    }
}

/// A connection to each server.
fn one_each(lives: &[Arc<Live>]) -> Vec<Client> {
    let mut servers: Vec<&Arc<Live>> = Vec::new();
    for live in lives {
        if !servers.iter().any(|known| known.attached.run_id == live.attached.run_id) {
            servers.push(live);
        }
    }
    servers.into_iter().map(|live| live.client.clone()).collect()
}

/// Beats until the connection, the session or the data is lost, and says which.
async fn watch(region: &Region, shared: &Shared, connection: &mut Connection, live: &Live) -> Fault {
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
        if let Err(fault) = patient(shared, beat(region, shared, live, writes)).await {
            return fault;
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
async fn beat(region: &Region, shared: &Shared, live: &Live, writes: bool) -> Result<(), Fault> {
    let life = if writes { META_LIFE } else { Micros::ZERO };
    let call = live.attached.stem.beat(life, Say::Nothing);
    let sent = clock::now();
    let outcome = run(&live.client, &SCRIPTS.beat, call).await.and_then(beaten);
    let received = clock::now();
    if let Some(metrics) = shared.metrics.get() {
        metrics.called(StoreCall::Beat, (received - sent).to_duration());
    }
    let beaten = match outcome {
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
    live.attached.heard(beaten);
    shared.health().down = None;
    region.observe_rtt((received - sent).to_duration());
    let reading = shared.clock().as_mut().map(|clock| clock.observe(sent, received, beaten.time));
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
