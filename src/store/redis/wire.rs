//! What travels to the scripts and back: packed doubles, little endian.

use super::fault::Fault;
use super::scripts::Call;
use crate::quota::amount::{Micros, Rate, Tokens};
use crate::quota::bucket::{EXACT_MAX, Shape, Unseen};
use crate::quota::counted::{self, Allowance, Kind};
use crate::quota::policy::BucketId;
use crate::store::names::BucketMap;
use crate::store::{CountCharge, Install, Prepare, Prepared, Take, TakeCharge, Taken, TakenCharge};
use bytes::{Buf, BufMut, Bytes};
use fred::types::Key;
use std::collections::hash_map::Entry;

/// The most requests in one call ...
pub(super) const TAKES_MAX: usize = 128;
/// ... and the most charges: so long may Redis be kept from other work.
pub(super) const CALL_CHARGES_MAX: usize = 512;

/// The names of a region's keys.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    root: String,
    base: String,
}

impl Keys {
    /// Of the only shard, or of one that has its own slot: then each key begins with the tag that leads there.
    pub(super) fn new(cluster: &str, region: &str, tag: Option<u16>) -> Self {
        let root = format!("q1:{cluster}:{region}:");
        let base = tag.map_or_else(|| root.clone(), |tag| format!("{root}{{{tag}}}:"));
        Self { root, base }
    }

    /// Is this one of the region's (of a session or generation that is over, too)?
    pub(super) fn is_ours(&self, key: &[u8]) -> bool {
        key.starts_with(self.root.as_bytes())
    }

    /// Who has this region's buckets.
    pub(super) fn meta(&self) -> Key {
        Key::from(format!("{}meta", self.base))
    }
}

/// What a call says of the session that it runs under.
#[derive(Clone, Debug)]
pub(super) struct Stem {
    meta: Key,
    fence: Bytes,
    prefix: String,
}

impl Stem {
    pub(super) fn new(keys: &Keys, session: u64, generation: u64) -> Self {
        let mut fence = Vec::with_capacity(16);
        put(&mut fence, exact_u64(session));
        put(&mut fence, exact_u64(generation));
        Self { meta: keys.meta(), fence: fence.into(), prefix: format!("{}{generation:x}:{{", keys.base) }
    }

    /// `q1:<cluster>:<region>:<generation>:{<bucket>}`: a later generation reads nothing of an earlier. On a shard of
    /// a Redis Cluster the first `{}` is its tag, and all its keys are in one slot.
    pub(super) fn bucket(&self, id: &BucketId) -> Key {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut key = Vec::with_capacity(self.prefix.len() + 33);
        key.extend_from_slice(self.prefix.as_bytes());
        for byte in id.0 {
            key.push(HEX[usize::from(byte >> 4)]);
            key.push(HEX[usize::from(byte & 15)]);
        }
        key.push(b'}');
        Key::from(Bytes::from(key))
    }

    /// What is lent to a region of a bucket's permits; with the bucket's hash tag.
    pub(super) fn slice(&self, id: &BucketId) -> Key {
        let mut key = self.bucket(id).as_bytes().to_vec();
        key.push(b's');
        Key::from(Bytes::from(key))
    }

    /// A call of `beat.lua`; a `life` of zero only looks.
    pub(super) fn beat(&self, life: Micros, say: Say) -> Call {
        let flag = Bytes::from_static(match say {
            Say::Nothing => b"0",
            Say::Full => b"1",
            Say::Known => b"2",
        });
        Call { keys: vec![self.meta.clone()], args: vec![self.fence.clone(), doubles(&[life.0]), flag] }
    }

    fn call(&self, window: (Micros, Micros), keys: Vec<Key>, shapes: Vec<u8>, rest: Vec<u8>) -> Call {
        let args = vec![
            self.fence.clone(),
            doubles(&[window.0.0, window.1.0]),
            Bytes::from(shapes),
            Bytes::from(rest),
        ];
        Call { keys, args }
    }

    pub(super) fn known(&self, window: (Micros, Micros), buckets: &[BucketId]) -> Call {
        let keys = std::iter::once(self.meta.clone()).chain(buckets.iter().map(|id| self.bucket(id)));
        self.call(window, keys.collect(), Vec::new(), Vec::new())
    }

    pub(super) fn prepare(&self, window: (Micros, Micros), asks: &[Prepare]) -> Call {
        let (mut keys, mut shapes, mut rest) = (vec![self.meta.clone()], Vec::new(), Vec::new());
        for ask in asks {
            keys.push(self.bucket(&ask.bucket));
            put_shape(&mut shapes, ask.shape, ask.unseen);
            put(&mut rest, exact_u64(ask.seq));
            put(&mut rest, exact(ask.hold_burst.0));
            put(&mut rest, exact(ask.hold_rate.0));
            put(&mut rest, exact(ask.lend_rate.0));
            put(&mut rest, exact(ask.lend_for.0));
        }
        self.call(window, keys, shapes, rest)
    }

    pub(super) fn install(&self, window: (Micros, Micros), records: &[Install]) -> Call {
        let (mut keys, mut shapes, mut rest) = (vec![self.meta.clone()], Vec::new(), Vec::new());
        for record in records {
            keys.push(self.bucket(&record.bucket));
            put_shape(&mut shapes, record.shape, record.unseen);
            let grant = &record.grant;
            for number in [exact_u64(grant.seq), i64::from(grant.push)] {
                put(&mut rest, number);
            }
            for amount in [grant.granted.0, grant.burst.0, grant.rate.0, grant.deadline.0] {
                put(&mut rest, exact(amount));
            }
        }
        self.call(window, keys, shapes, rest)
    }

    /// The same about permits ([`Prepare::permits`] is there).
    pub(super) fn prepare_permits(&self, window: (Micros, Micros), asks: &[Prepare]) -> Call {
        let mut rest = Vec::new();
        for ask in asks {
            put(&mut rest, exact_u64(ask.seq));
            put(&mut rest, exact(ask.hold_burst.0));
        }
        let of = asks.iter().map(|ask| (ask.bucket, ask.permits.unwrap_or_default()));
        self.on_permits(window, of.collect(), rest)
    }

    /// See [`Self::prepare_permits`].
    pub(super) fn install_permits(&self, window: (Micros, Micros), records: &[Install]) -> Call {
        let mut rest = Vec::new();
        for Install { grant, .. } in records {
            for number in [exact_u64(grant.seq), i64::from(grant.push)] {
                put(&mut rest, number);
            }
            for amount in [grant.burst.0, grant.rate.0, grant.deadline.0] {
                put(&mut rest, exact(amount));
            }
        }
        let of = records.iter().map(|record| (record.bucket, record.permits.unwrap_or_default()));
        self.on_permits(window, of.collect(), rest)
    }

    fn on_permits(&self, window: (Micros, Micros), of: Vec<(BucketId, Allowance)>, rest: Vec<u8>) -> Call {
        let slices = of.iter().map(|(id, _)| self.slice(id));
        let keys = std::iter::once(self.meta.clone()).chain(slices);
        let keys = keys.chain(of.iter().map(|(id, _)| self.bucket(id)));
        let (mut shapes, mut allowances) = (Vec::new(), Vec::new());
        for (_, allowance) in &of {
            put_shape(&mut shapes, Shape::default(), None);
            put_allowance(&mut allowances, Kind::Permits, allowance);
        }
        let mut call = self.call(window, keys.collect(), shapes, rest);
        call.args.push(allowances.into());
        call
    }
}

/// Requests that travel in one call: either such as have charges on token buckets alone, or any.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Charges on counts may be among them: it is for `take_counts.lua`.
    counted: bool,
    buckets: BucketMap<(u16, Shape, Option<Unseen>)>,
    order: Vec<BucketId>,
    shapes: Vec<u8>,
    counts: BucketMap<(u16, Kind, Allowance)>,
    count_order: Vec<BucketId>,
    /// Counts of which more may be lent.
    slices: Vec<BucketId>,
    allowances: Vec<u8>,
    requests: Vec<u8>,
    sizes: Vec<Size>,
    charges: usize,
}

/// How many charges a request has, on token buckets and on counts.
pub(super) type Size = (u8, u8);

impl Batch {
    /// One that takes any request.
    pub(super) fn counted() -> Self {
        Self { counted: true, ..Self::default() }
    }

    /// Adds a request, unless there is no room for it, or it comes under another policy than one before it.
    pub(super) fn push(&mut self, take: &Take) -> bool {
        let (Ok(charges), Ok(counts)) = (u8::try_from(take.charges.len()), u8::try_from(take.counts.len()))
        else {
            return false;
        };
        let full = self.sizes.len() >= TAKES_MAX || self.charges + take.len() > CALL_CHARGES_MAX;
        if full || !self.counted && counts > 0 || self.differs(take) {
            return false;
        }
        self.requests.push(charges);
        for charge in &take.charges {
            self.put_charge(charge);
        }
        if self.counted {
            self.requests.push(counts);
            for charge in &take.counts {
                self.put_count(charge);
            }
        }
        self.charges += take.len();
        self.sizes.push((charges, counts));
        true
    }

    /// Windows were told by the daemon's monotonic clock, of which the store's is `ahead`: see [`Unseen::in_store`].
    pub(super) fn on_store_clock(&mut self, ahead: Micros) {
        for (number, shape, unseen) in self.buckets.values().filter(|(_, shape, _)| shape.is_windowed()) {
            let mut bytes = Vec::with_capacity(SHAPE_BYTES);
            put_shape(&mut bytes, *shape, unseen.map(|unseen| unseen.in_store(*shape, ahead)));
            let from = usize::from(number.saturating_sub(1)) * SHAPE_BYTES;
            if let Some(place) = self.shapes.get_mut(from..from + SHAPE_BYTES) {
                place.copy_from_slice(&bytes);
            }
        }
    }

    /// How many requests are in it.
    pub(super) fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Which script it is for, the call, and what to expect of its answer.
    pub(super) fn into_call(
        mut self,
        stem: &Stem,
        window: (Micros, Micros),
    ) -> (TakeScript, Call, Vec<Size>) {
        let mut keys = Vec::with_capacity(self.order.len() + self.count_order.len() + 1);
        keys.push(stem.meta.clone());
        keys.extend(self.order.iter().map(|id| stem.bucket(id)));
        keys.extend(self.slices.iter().map(|id| stem.slice(id)));
        keys.extend(self.count_order.iter().map(|id| stem.bucket(id)));
        self.slices.iter().for_each(|_| put_shape(&mut self.shapes, Shape::default(), None));
        let mut call = stem.call(window, keys, self.shapes, self.requests);
        if !self.counted {
            return (TakeScript::Buckets, call, self.sizes);
        }
        call.args.push(self.allowances.into());
        let sizes = [self.order.len(), self.slices.len()];
        let sizes = sizes.map(|n| u16::try_from(n).unwrap_or(u16::MAX).to_le_bytes());
        call.args.push(Bytes::copy_from_slice(sizes.as_flattened()));
        (TakeScript::Counts, call, self.sizes)
    }

    fn differs(&self, take: &Take) -> bool {
        let bucket = |c: &TakeCharge| {
            let known = self.buckets.get(&c.bucket);
            known.is_some_and(|(_, shape, unseen)| (*shape, *unseen) != (c.shape, c.unseen))
        };
        let count = |c: &CountCharge| {
            let known = self.counts.get(&c.bucket);
            known.is_some_and(|(_, kind, allowance)| (*kind, *allowance) != (c.kind, c.allowance))
        };
        take.charges.iter().any(bucket) || take.counts.iter().any(count)
    }

    fn put_charge(&mut self, charge: &TakeCharge) {
        let next = u16::try_from(self.order.len() + 1).unwrap_or(u16::MAX);
        let number = match self.buckets.entry(charge.bucket) {
            Entry::Occupied(known) => known.get().0,
            Entry::Vacant(new) => {
                new.insert((next, charge.shape, charge.unseen));
                self.order.push(charge.bucket);
                put_shape(&mut self.shapes, charge.shape, charge.unseen);
                next
            }
        };
        self.requests.put_u16_le(number);
        self.requests.push(u8::from(charge.enforce));
        // A cost of 2^53 is still exact, and more than any bucket holds. What gives back twice as much is exact, too (it is even), and fills
        // a window's bucket however far below zero that is.
        put(&mut self.requests, charge.cost.0.clamp(-2 * EXACT_MAX, EXACT_MAX + 1));
    }

    fn put_count(&mut self, charge: &CountCharge) {
        let next = u16::try_from(self.count_order.len() + 1).unwrap_or(u16::MAX);
        let number = match self.counts.entry(charge.bucket) {
            Entry::Occupied(known) => known.get().0,
            Entry::Vacant(new) => {
                new.insert((next, charge.kind, charge.allowance));
                self.count_order.push(charge.bucket);
                put_allowance(&mut self.allowances, charge.kind, &charge.allowance);
                self.slices.extend(charge.allowance.lent.map(|_| charge.bucket));
                next
            }
        };
        let (act, lease) = charge.act.parts();
        self.requests.put_u16_le(number);
        self.requests.push(u8::from(charge.enforce));
        self.requests.push(act);
        put(&mut self.requests, counted::whole(charge.cost));
        self.requests.extend_from_slice(lease.map_or(&[], |lease| &lease.0[..]));
    }
}

/// The script that a [`Batch`] is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakeScript {
    /// `take.lua`
    Buckets,
    /// `take_counts.lua`
    Counts,
}

/// What a take batch was answered, in the order of its requests.
pub(super) fn taken(answer: Bytes, sizes: &[Size]) -> Result<Vec<Taken>, Fault> {
    let mut body = Body::open(answer)?;
    let now = Micros(body.number()?);
    let one = |(charges, counts): &Size| {
        let allowed = body.flag()?;
        let charges = (0..*charges).map(|_| {
            Ok(TakenCharge {
                fits: body.flag()?,
                level: Tokens(body.number()?),
                rate: Rate(body.number()?),
                cap: Tokens(body.number()?),
            })
        });
        let charges = charges.collect::<Result<_, Fault>>()?;
        let counts = (0..*counts).map(|_| {
            Ok(counted::Seen {
                fits: body.flag()?,
                left: body.number()?,
                wait: Some(Micros(body.number()?)).filter(|wait| *wait >= Micros::ZERO),
                reset: Micros(body.number()?),
                lasts: Micros(body.number()?),
            })
        });
        Ok(Taken { allowed, now, charges, counts: counts.collect::<Result<_, Fault>>()? })
    };
    sizes.iter().map(one).collect()
}

/// What `known.lua` answered about so many buckets: how many keys there are, and which of the buckets.
pub(super) fn known(answer: Bytes, count: usize) -> Result<(u64, Vec<bool>), Fault> {
    let mut body = Body::open(answer)?;
    let stored = u64::try_from(body.number()?).unwrap_or(0);
    Ok((stored, (0..count).map(|_| body.flag()).collect::<Result<_, _>>()?))
}

/// What `prepare.lua` answered to so many asks.
pub(super) fn prepared(answer: Bytes, count: usize) -> Result<(Micros, Vec<Prepared>), Fault> {
    let mut body = Body::open(answer)?;
    let now = Micros(body.number()?);
    let one = |_| {
        Ok(Prepared {
            leased: body.flag()?,
            level: Tokens(body.number()?),
            returned: Tokens(body.number()?),
            burst: Tokens(body.number()?),
            rate: Rate(body.number()?),
            lent: Rate(body.number()?),
        })
    };
    Ok((now, (0..count).map(one).collect::<Result<_, Fault>>()?))
}

/// The same of `prepare_permits.lua`.
pub(super) fn prepared_permits(answer: Bytes, count: usize) -> Result<(Micros, Vec<Prepared>), Fault> {
    let mut body = Body::open(answer)?;
    let now = Micros(body.number()?);
    let one = |_| {
        let (leased, level) = (body.flag()?, Tokens(body.number()?));
        Ok(Prepared { leased, level, burst: Tokens(body.number()?), ..Prepared::default() })
    };
    Ok((now, (0..count).map(one).collect::<Result<_, Fault>>()?))
}

/// What `install.lua` (or `install_permits.lua`) answered to so many records.
pub(super) fn installed(answer: Bytes, count: usize) -> Result<Vec<Tokens>, Fault> {
    let mut body = Body::open(answer)?;
    body.number()?;
    (0..count).map(|_| body.number().map(Tokens)).collect()
}

/// What a call of `beat.lua` says of the generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Say {
    Nothing,
    /// See [`Generation::full`](crate::quota::bucket::Generation::full).
    Full,
    /// See [`Generation::known`](crate::quota::bucket::Generation::known).
    Known,
}

/// What `beat.lua` answered: its time, and what has been said of this generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Beaten {
    pub(super) time: Micros,
    pub(super) full: bool,
    pub(super) known: bool,
}

/// Reads an answer of `beat.lua`.
pub(super) fn beaten(answer: Bytes) -> Result<Beaten, Fault> {
    let mut body = Body::open(answer)?;
    let (time, said) = (Micros(body.number()?), body.byte()?);
    Ok(Beaten { time, full: said == 1, known: said == 2 })
}

/// An answer of `attach.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttachAnswer {
    /// `A`, `R`, `L` or `H`.
    pub(super) kind: u8,
    pub(super) time: Micros,
    pub(super) session: u64,
    pub(super) generation: u64,
    pub(super) start: Micros,
    pub(super) full: bool,
    pub(super) known: bool,
}

/// What this daemon says when it attaches.
#[derive(Clone, Debug)]
pub(super) struct AttachCall<'a> {
    pub(super) mine: u64,
    pub(super) new_session: u64,
    pub(super) new_generation: u64,
    pub(super) run_id: &'a str,
    pub(super) replication: &'a str,
    pub(super) replication_may_change: bool,
    pub(super) lost: bool,
    pub(super) yields: bool,
    pub(super) recent: Micros,
    pub(super) life: Micros,
    pub(super) grace: Micros,
}

impl AttachCall<'_> {
    pub(super) fn call(&self, keys: &Keys) -> Call {
        let flag = |on| Bytes::from_static(if on { b"1" } else { b"0" });
        let args = vec![
            doubles(&[exact_u64(self.mine), exact_u64(self.new_session), exact_u64(self.new_generation)]),
            Bytes::copy_from_slice(self.run_id.as_bytes()),
            Bytes::copy_from_slice(self.replication.as_bytes()),
            flag(self.replication_may_change),
            flag(self.lost),
            flag(self.yields),
            doubles(&[self.recent.0, self.life.0, self.grace.0]),
        ];
        Call { keys: vec![keys.meta()], args }
    }
}

/// Reads an answer of `attach.lua`.
pub(super) fn attached(answer: Bytes) -> Result<AttachAnswer, Fault> {
    let kind = answer.first().copied().unwrap_or(0);
    let mut body = Body(answer.slice(answer.len().min(1)..));
    let time = Micros(body.number()?);
    let session = u64::try_from(body.number()?).unwrap_or(0);
    let generation = u64::try_from(body.number()?).unwrap_or(0);
    let (start, said) = (Micros(body.number()?), body.byte()?);
    Ok(AttachAnswer { kind, time, session, generation, start, full: said == 1, known: said == 2 })
}

/// The body of an answer, read from its beginning.
struct Body(Bytes);

impl Body {
    fn open(mut answer: Bytes) -> Result<Self, Fault> {
        match answer.try_get_u8() {
            Ok(b'K') => Ok(Self(answer)),
            Ok(b'F') => Err(Fault::Fenced),
            Ok(b'C') => Err(Fault::Clock),
            _ => Err(nonsense()),
        }
    }

    fn flag(&mut self) -> Result<bool, Fault> {
        Ok(self.byte()? == 1)
    }

    fn byte(&mut self) -> Result<u8, Fault> {
        self.0.try_get_u8().map_err(|_| nonsense())
    }

    #[allow(clippy::cast_possible_truncation)]
    fn number(&mut self) -> Result<i64, Fault> {
        // Saturates, and NaN is 0; the scripts send integers below 2^53 only.
        self.0.try_get_f64_le().map(|x| x as i64).map_err(|_| nonsense())
    }
}

fn nonsense() -> Fault {
    Fault::Unknown("an answer is cut short or not one of its scripts'".to_owned())
}

/// As `load_counts` reads it.
fn put_allowance(to: &mut Vec<u8>, kind: Kind, allowance: &Allowance) {
    let Allowance { limit, span, until, held, life, lent } = *allowance;
    to.push(kind.number());
    [limit, span.0, until.0, held, life.0].iter().for_each(|x| put(to, exact(*x)));
    to.push(u8::from(lent.is_some()));
}

/// What [`put_shape`] writes.
const SHAPE_BYTES: usize = 32;

fn put_shape(to: &mut Vec<u8>, shape: Shape, unseen: Option<Unseen>) {
    let shape = shape.exact();
    put(to, shape.rate.0);
    put(to, shape.cap.0);
    put(to, unseen.map_or(-1, |u| exact(u.level.0)));
    put(to, unseen.map_or(0, |u| exact(u.at.0)));
}

/// `number` is at most 2^53 in size.
#[allow(clippy::cast_precision_loss)]
fn put(to: &mut Vec<u8>, number: i64) {
    to.put_f64_le(number as f64);
}

fn doubles(numbers: &[i64]) -> Bytes {
    let mut to = Vec::with_capacity(8 * numbers.len());
    for number in numbers {
        put(&mut to, (*number).clamp(-EXACT_MAX, EXACT_MAX));
    }
    to.into()
}

fn exact(x: i64) -> i64 {
    x.clamp(0, EXACT_MAX)
}

fn exact_u64(x: u64) -> i64 {
    i64::try_from(x).unwrap_or(EXACT_MAX).min(EXACT_MAX)
}
