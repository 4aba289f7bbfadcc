//! What Prometheus' client libraries tell of every process, from `/proc/self` (proc(5)). Where that is not there, nothing
//! is told.

use super::kinds::Reading;
use super::{
    PROCESS_CPU, PROCESS_FDS, PROCESS_FDS_MAX, PROCESS_MEMORY, PROCESS_START, add, add_bytes, add_seconds,
};
use prometheus_client::registry::Registry;
use rustix::process::{Resource, getrlimit};

#[derive(Debug)]
pub struct Process {
    start: Reading,
    cpu: Reading,
    memory: Reading,
    files: Reading,
    files_max: Reading,
}

impl Process {
    pub fn register(r: &mut Registry) -> Self {
        Self {
            start: add_seconds(r, PROCESS_START, Reading::gauge()),
            cpu: add_seconds(r, PROCESS_CPU, Reading::counter()),
            memory: add_bytes(r, PROCESS_MEMORY, Reading::gauge()),
            files: add(r, PROCESS_FDS, Reading::gauge()),
            files_max: add(r, PROCESS_FDS_MAX, Reading::gauge()),
        }
    }

    /// Takes new readings.
    pub fn read(&self) {
        let stat = std::fs::read_to_string("/proc/self/stat").ok().and_then(|text| Stat::parse(&text));
        self.start.set(stat.as_ref().and_then(|stat| Some(boot_time()? + stat.start)));
        self.cpu.set(stat.as_ref().map(|stat| stat.cpu));
        self.memory.set(stat.map(|stat| stat.resident_pages * rustix::param::page_size() as f64));
        self.files.set(std::fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as f64));
        self.files_max.set(getrlimit(Resource::Nofile).current.map(|limit| limit as f64));
    }
}

/// Of `/proc/self/stat`; times in seconds, the start since the machine booted.
#[derive(Debug, PartialEq)]
struct Stat {
    cpu: f64,
    start: f64,
    resident_pages: f64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The program's name is in brackets, and may have spaces and brackets in it. What follows begins with field 3.
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        Some(Self {
            cpu: (field(14)? + field(15)?) / ticks,
            start: field(22)? / ticks,
            resident_pages: field(24)?,
        })
    }
}

/// When the machine booted, in seconds since the Unix epoch.
fn boot_time() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_is_no_trouble() {
        let line = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 1 0 1000 9 33 184467\n";
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let expected = Stat { cpu: 300.0 / ticks, start: 1_000.0 / ticks, resident_pages: 33.0 };
        assert_eq!(Stat::parse(line), Some(expected));
        assert_eq!(Stat::parse("nonsense"), None);
    }

    #[test]
    fn this_process_has_used_something() {
        let stat = Stat::parse(&std::fs::read_to_string("/proc/self/stat").unwrap()).unwrap();
        assert!(stat.resident_pages > 0.0 && stat.start > 0.0 && boot_time().unwrap() > 1e9);
    }
}
