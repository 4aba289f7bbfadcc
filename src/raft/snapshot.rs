//! Snapshots of the pool: files that are complete or not there.
//!
//! A file is `QRSNAP`, a format byte (7, or what older members read for as long as all in the log is of their level: 5 where nothing has ever
//! been lent of reserves, 4 where besides there is no witness; 1, whose pool had no regions that come and go, 2, which knew no resets, and 3, which
//! knew no quotas, are still read), the length of the metadata (4 bytes, big-endian), the metadata and the pool (both postcard), and a CRC-32
//! of all that. It is written beside its place, synced, renamed, and the folder synced.

use super::types::SnapshotMeta;
use crate::quota::pool::{Pool, PoolV1, PoolV2, PoolV3, PoolV4, PoolV5};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A snapshot is never larger than this.
pub(super) const SNAPSHOT_BYTES_MAX: u64 = 4 * 1_024 * 1_024 * 1_024;
/// The newest, and the one before it, for the case that the newest cannot be read.
const KEPT: usize = 2;
const MAGIC: &[u8; 7] = b"QRSNAP\x07";
const MAGIC_5: &[u8; 7] = b"QRSNAP\x05";
const MAGIC_4: &[u8; 7] = b"QRSNAP\x04";
const MAGIC_3: &[u8; 7] = b"QRSNAP\x03";
const MAGIC_2: &[u8; 7] = b"QRSNAP\x02";
const MAGIC_1: &[u8; 7] = b"QRSNAP\x01";
const HEAD: usize = MAGIC.len() + 4;
const CHECKSUM: usize = 4;
const TEMPORARY: &str = "tmp";

/// The folder of one node's snapshots.
#[derive(Debug)]
pub(super) struct SnapshotDir {
    dir: PathBuf,
    serial: AtomicU64,
}

/// A complete snapshot file. It stays readable while someone holds this, also if it is replaced meanwhile.
#[derive(Clone, Debug)]
pub struct SnapshotFile {
    file: Arc<File>,
    bytes: u64,
    /// Received and not yet adopted: goes away with the last holder.
    temporary: Option<Arc<Temporary>>,
}

#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // It may have been renamed into place.
        let _ = fs::remove_file(&self.0);
    }
}

impl SnapshotFile {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads up to `buffer.len()` bytes at `offset`; 0 at the end.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file.read_at(buffer, offset)
    }

    /// Checks it and takes it apart.
    pub fn decode(&self) -> io::Result<(SnapshotMeta, Pool)> {
        if self.bytes > SNAPSHOT_BYTES_MAX {
            return Err(damaged("it is too large"));
        }
        let mut content = vec![0; usize::try_from(self.bytes).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut content, 0)?;
        take_apart(&content)
    }
}

/// Writes a snapshot file's content.
pub(super) fn write_to(out: impl Write, meta: &SnapshotMeta, pool: &Pool) -> io::Result<()> {
    let mut out = Summing { out, sum: crc32fast::Hasher::new() };
    let encoded = postcard::to_stdvec(meta).map_err(io::Error::other)?;
    let (v4, v5) = (pool.as_v4(), pool.as_v5());
    let magic = if v4.is_some() { MAGIC_4 } else { v5.as_ref().map_or(MAGIC, |_| MAGIC_5) };
    out.write_all(magic)?;
    out.write_all(&u32::try_from(encoded.len()).map_err(io::Error::other)?.to_be_bytes())?;
    out.write_all(&encoded)?;
    match (&v4, &v5) {
        (Some(older), _) => postcard::to_io(older, &mut out).map(drop),
        (None, Some(older)) => postcard::to_io(older, &mut out).map(drop),
        (None, None) => postcard::to_io(pool, &mut out).map(drop),
    }
    .map_err(io::Error::other)?;
    let checksum = out.sum.clone().finalize();
    out.out.write_all(&checksum.to_be_bytes())?;
    out.out.flush()
}

/// Reads a snapshot file's content.
pub(super) fn take_apart(content: &[u8]) -> io::Result<(SnapshotMeta, Pool)> {
    let (body, checksum) = content
        .split_at_checked(content.len().saturating_sub(CHECKSUM))
        .filter(|(body, _)| body.len() >= HEAD)
        .ok_or_else(|| damaged("it is too short"))?;
    if checksum != crc32fast::hash(body).to_be_bytes() {
        return Err(damaged("its checksum is wrong"));
    }
    let (head, rest) = body.split_at(HEAD);
    let (magic, length) = head.split_at(MAGIC.len());
    let length = u32::from_be_bytes(length.try_into().map_err(io::Error::other)?);
    let (meta, pool) = usize::try_from(length)
        .ok()
        .and_then(|length| rest.split_at_checked(length))
        .ok_or_else(|| damaged("its metadata is cut short"))?;
    let meta = postcard::from_bytes(meta).map_err(|e| damaged(&e.to_string()))?;
    let pool = match magic {
        magic if magic == MAGIC => postcard::from_bytes(pool),
        magic if magic == MAGIC_5 => postcard::from_bytes(pool).map(|pool: PoolV5| pool.into()),
        magic if magic == MAGIC_4 => postcard::from_bytes(pool).map(|pool: PoolV4| pool.into()),
        magic if magic == MAGIC_3 => postcard::from_bytes(pool).map(|pool: PoolV3| pool.into()),
        magic if magic == MAGIC_2 => postcard::from_bytes(pool).map(|pool: PoolV2| pool.into()),
        magic if magic == MAGIC_1 => postcard::from_bytes(pool).map(|pool: PoolV1| pool.into()),
        _ => return Err(damaged("it has another format; use the version that wrote it, or a newer one")),
    };
    Ok((meta, pool.map_err(|e| damaged(&e.to_string()))?))
}

impl SnapshotDir {
    /// Opens the folder, making it if need be, and removes what was never completed.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|ext| ext == TEMPORARY) {
                fs::remove_file(path)?;
            }
        }
        Ok(Self { dir, serial: AtomicU64::new(0) })
    }

    /// Its snapshots, newest first.
    pub fn list(&self) -> io::Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|ext| ext == "snapshot") {
                paths.push(path);
            }
        }
        // Names sort by the index of the last entry, which only grows: what is in a snapshot was committed.
        paths.sort_unstable_by(|a, b| b.cmp(a));
        Ok(paths)
    }

    /// Opens one of them.
    pub fn get(&self, path: &Path) -> io::Result<SnapshotFile> {
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        Ok(SnapshotFile { file: Arc::new(file), bytes, temporary: None })
    }

    /// Writes a snapshot; it is on disk, under its name, when this returns.
    pub fn write(&self, meta: &SnapshotMeta, pool: &Pool) -> io::Result<SnapshotFile> {
        let mut incoming = self.incoming()?;
        write_to(io::BufWriter::new(&mut incoming), meta, pool)?;
        let file = incoming.complete()?;
        self.adopt(&file, meta)
    }

    /// A file to write a snapshot into that comes from elsewhere. It goes away unless it is completed and adopted.
    pub fn incoming(&self) -> io::Result<Incoming> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!("incoming-{serial}.{TEMPORARY}"));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
        Ok(Incoming { file, bytes: 0, temporary: Arc::new(Temporary(path)) })
    }

    /// Gives a received snapshot its name, so that it is found at the next start, and forgets all but the newest two.
    pub fn adopt(&self, file: &SnapshotFile, meta: &SnapshotMeta) -> io::Result<SnapshotFile> {
        let place = self.dir.join(name(meta));
        let mut adopted = file.clone();
        match adopted.temporary.take().as_deref() {
            Some(Temporary(path)) => {
                fs::rename(path, place)?;
                File::open(&self.dir)?.sync_all()?;
            }
            // Its own, at a restart.
            None if place.exists() => (),
            None => return self.adopt(&self.copy(file)?, meta),
        }
        for old in self.list()?.iter().skip(KEPT) {
            fs::remove_file(old)?;
        }
        Ok(adopted)
    }

    fn copy(&self, file: &SnapshotFile) -> io::Result<SnapshotFile> {
        let mut incoming = self.incoming()?;
        let mut buffer = vec![0; 64 * 1_024];
        loop {
            let read = file.read_at(&mut buffer, incoming.bytes)?;
            if read == 0 {
                return incoming.complete();
            }
            incoming.write_all(buffer.get(..read).unwrap_or_default())?;
        }
    }
}

fn name(meta: &SnapshotMeta) -> String {
    let (term, node, index) =
        meta.last_log_id.map_or((0, 0, 0), |id| (id.leader_id.term, id.leader_id.node_id, id.index));
    format!("{index:020}-{term:020}-{node:05}.snapshot")
}

/// A snapshot that is being written or received.
#[derive(Debug)]
pub(super) struct Incoming {
    file: File,
    bytes: u64,
    temporary: Arc<Temporary>,
}

impl Write for Incoming {
    fn write(&mut self, chunk: &[u8]) -> io::Result<usize> {
        let written = self.file.write(chunk)?;
        self.bytes = self.bytes.saturating_add(u64::try_from(written).map_err(io::Error::other)?);
        if self.bytes > SNAPSHOT_BYTES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("a snapshot may have {SNAPSHOT_BYTES_MAX} bytes at most"),
            ));
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Incoming {
    /// All of it is here and on disk.
    pub fn complete(self) -> io::Result<SnapshotFile> {
        self.file.sync_all()?;
        Ok(SnapshotFile { file: Arc::new(self.file), bytes: self.bytes, temporary: Some(self.temporary) })
    }
}

/// Sums up what passes.
struct Summing<W> {
    out: W,
    sum: crc32fast::Hasher,
}

impl<W: Write> Write for Summing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.sum.update(bytes.get(..written).unwrap_or(bytes));
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a snapshot is damaged: {what}"))
}

#[cfg(test)]
mod tests {
    use super::super::types::{LeaderId, LogId};
    use super::*;
    use crate::quota::amount::Micros;
    use crate::quota::policy::BucketId;
    use crate::quota::pool::{AddRegion, Ask, Entry, Lend, Op, RegionId, ResetBucket, Stamp, TimeOfDay};

    fn meta(index: u64) -> SnapshotMeta {
        let last_log_id = Some(LogId { leader_id: LeaderId { term: 2, node_id: 1 }, index });
        SnapshotMeta { last_log_id, ..SnapshotMeta::default() }
    }

    fn pool(tau: i64) -> Pool {
        let mut pool = Pool::default();
        pool.apply(7, &Entry { stamp: Stamp { term: 7, tau: Micros(tau) }, ops: vec![] });
        pool
    }

    #[test]
    fn the_newest_two_are_kept_and_read_back() {
        let temp = tempfile::tempdir().unwrap();
        let dir = SnapshotDir::open(temp.path().join("snapshots")).unwrap();
        let first = dir.write(&meta(9), &pool(9)).unwrap();
        for index in 10..13 {
            dir.write(&meta(index), &pool(5)).unwrap();
        }
        let paths = dir.list().unwrap();
        assert_eq!(paths.len(), 2);
        assert_eq!(dir.get(&paths[0]).unwrap().decode().unwrap(), (meta(12), pool(5)));
        assert_eq!(first.decode().unwrap(), (meta(9), pool(9)), "whoever holds one can read it");
    }

    #[test]
    fn damage_is_found() {
        let temp = tempfile::tempdir().unwrap();
        let dir = SnapshotDir::open(temp.path().to_owned()).unwrap();
        dir.write(&meta(3), &pool(9)).unwrap();
        let path = dir.list().unwrap().remove(0);
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            fs::write(&path, &bad).unwrap();
            let error = dir.get(&path).unwrap().decode().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "byte {at}: {error}");
            fs::write(&path, &good[..at]).unwrap();
            assert!(dir.get(&path).unwrap().decode().is_err(), "cut at {at}");
        }
    }

    /// Files as they were written before regions could come and go. They must be readable for ever.
    #[test]
    fn former_formats_are_read() {
        let temp = tempfile::tempdir().unwrap();
        let dir = SnapshotDir::open(temp.path().to_owned()).unwrap();
        let path = temp.path().join("1.snapshot");
        fs::write(&path, include_bytes!("../../tests/formats/pool-1.snapshot")).unwrap();
        let (read, pool) = dir.get(&path).unwrap().decode().unwrap();
        assert_eq!(read, meta(5));
        // The log that led there, in its own frozen bytes, leads to the same pool.
        let entries: Vec<Entry> =
            postcard::from_bytes(include_bytes!("../../tests/formats/entries-1.bin")).unwrap();
        let mut replayed = Pool::default();
        for entry in &entries {
            assert!(!replayed.apply(65_537, entry).refused);
        }
        assert_eq!(pool, replayed);
        assert_eq!((pool.regions().len(), pool.version(), pool.settled()), (2, 2, false));
        let nodes: Vec<u64> = pool.members().map(|member| member.node).collect();
        assert_eq!(nodes, [1, 2]);
        assert_eq!(pool.epoch(RegionId(1)), (1, 1 << 50));
        assert_eq!(pool.record(BucketId([7; 16]), RegionId(1)).map(|record| record.seq), Some(9));

        // Format 2: a region more, and no time of day.
        let add = Op::AddRegion(AddRegion { name: "c".into(), previous: 0 });
        let stamp = Stamp { term: 65_537, tau: replayed.tau() };
        assert!(!replayed.apply(65_537, &Entry { stamp, ops: vec![add] }).refused);
        fs::write(&path, include_bytes!("../../tests/formats/pool-2.snapshot")).unwrap();
        let (read, pool) = dir.get(&path).unwrap().decode().unwrap();
        assert_eq!((read, &pool), (meta(6), &replayed));
        assert_eq!((pool.regions().len(), pool.wall(pool.tau())), (3, None));

        // Format 3: a reset besides, and no windows, which format 4 has at the end.
        let bucket = BucketId([7; 16]);
        let reset = ResetBucket { policy: 0, bucket, by: "ops".into(), reason: "ticket 4711".into() };
        assert!(!replayed.apply(65_537, &Entry { stamp, ops: vec![Op::ResetBucket(reset)] }).refused);
        let of_format_3 = || {
            let pool = postcard::to_stdvec(&replayed.as_v4().unwrap()).unwrap();
            let (pool, windows) = pool.split_at(pool.len() - 6);
            assert_eq!(windows, [0; 6], "nobody has said what time it is");
            file(MAGIC_3, &meta(7), pool)
        };
        let frozen = sample("pool-3.snapshot", of_format_3);
        let (read, pool) = take_apart(&frozen).unwrap();
        assert_eq!((read, &pool), (meta(7), &replayed));
        assert_eq!(pool.resets().next().map(|(bucket, reset)| (bucket, &*reset.by)), Some((bucket, "ops")));

        // Format 4: the time of day; it is written as it was for as long as the log has nothing that is newer.
        let says =
            |region| Op::TimeOfDay(TimeOfDay { region: RegionId(region), wall: Micros::seconds(1 << 30) });
        let ops = (0..3).map(says).collect();
        assert!(!replayed.apply(65_537, &Entry { stamp, ops }).refused);
        let written = |pool: &Pool, index| {
            let mut content = Vec::new();
            write_to(&mut content, &meta(index), pool).unwrap();
            content
        };
        let frozen = sample("pool-4.snapshot", || written(&replayed, 8));
        assert_eq!(take_apart(&frozen).unwrap(), (meta(8), replayed.clone()));
        assert_eq!(written(&replayed, 8), frozen, "an older member does not read what is written now");

        // Format 5: a witness.
        let add = AddRegion { name: "tie".into(), previous: 0 };
        let ops = vec![Op::Level(2), Op::AddWitness(add)];
        assert!(!replayed.apply(65_537, &Entry { stamp, ops }).refused);
        let frozen = sample("pool-5.snapshot", || written(&replayed, 9));
        let (_, pool) = take_apart(&frozen).unwrap();
        assert_eq!((&pool, written(&pool, 9)), (&replayed, frozen));
        assert!(pool.members().any(|member| member.witness));

        // Format 7: a loan of idle reserve, which is void already.
        let loan = Lend { ask: Ask { policy: 0, bucket, seq: 1, ..Ask::default() }, ..Lend::default() };
        assert!(!replayed.apply(65_537, &Entry { stamp, ops: vec![Op::Lend(loan)] }).refused);
        let frozen = sample("pool-7.snapshot", || written(&replayed, 10));
        let (_, pool) = take_apart(&frozen).unwrap();
        assert_eq!((&pool, written(&pool, 10)), (&replayed, frozen));
        assert_eq!(pool.level(), Lend::LEVEL);
    }

    fn file(magic: &[u8], meta: &SnapshotMeta, pool: &[u8]) -> Vec<u8> {
        let meta = postcard::to_stdvec(meta).unwrap();
        let length = u32::try_from(meta.len()).unwrap().to_be_bytes();
        let body = [magic, &length, &meta, pool].concat();
        [&body, &crc32fast::hash(&body).to_be_bytes()[..]].concat()
    }

    /// A frozen file; WRITE_SAMPLES writes those that are not there.
    fn sample(name: &str, now: impl FnOnce() -> Vec<u8>) -> Vec<u8> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/formats").join(name);
        if !path.exists() && std::env::var_os("WRITE_SAMPLES").is_some() {
            fs::write(&path, now()).unwrap();
        }
        fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    #[test]
    fn what_is_not_complete_goes_away() {
        let temp = tempfile::tempdir().unwrap();
        let dir = SnapshotDir::open(temp.path().to_owned()).unwrap();
        let mut incoming = dir.incoming().unwrap();
        incoming.write_all(b"half").unwrap();
        let received = incoming.complete().unwrap();
        assert!(received.decode().is_err());
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
        drop(received);
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0);
        fs::write(temp.path().join("incoming-7.tmp"), b"crashed").unwrap();
        SnapshotDir::open(temp.path().to_owned()).unwrap();
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0);
    }
}
