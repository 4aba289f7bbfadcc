//! `quorate man`: the manual pages, for packages.

use super::Cli;
use anyhow::Context as _;
use clap::CommandFactory as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// What `--help` does not say, at the end of `quorate.1`: groff_man(7).
const MORE: &str = r#".SH "EXIT STATUS"
.TP
0
Done, or allowed.
.TP
1
A "no": denied, not ready, a file with faults, differences.
.TP
2
It could not be done: bad arguments, no answer.
.SH SIGNALS
.TP
SIGTERM, SIGINT
\fBquorate serve\fR answers what is in flight, gives its leases back and ends.
.TP
SIGHUP
\fBquorate serve\fR reads its log filter and TLS files again.
.SH ENVIRONMENT
Every single value of \fIregion.yaml\fR can be overridden: QUORATE_STORE__REDIS__URL is \fIstore.redis.url\fR.
.TP
QUORATE_LOG
The log filter, such as \fIinfo\fR or \fIquorate::raft=debug,info\fR.
.TP
NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID
Set by systemd: see \fBsd_notify\fR(3).
.SH FILES
.TP
/etc/quorate/region.yaml, /etc/quorate/policies.yaml
The region and the first policies. The files of the package name every key, with its default.
.TP
/var/lib/quorate
The replicated log.
.SH "SEE ALSO"
\fI/usr/share/doc/quorate\fR: guarantees, operations, metrics.
"#;

/// Write the manual pages: `quorate.1`, and `quorate-COMMAND.1` for each command
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder to write them to
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// The folder cannot be written to.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let write = || {
        std::fs::create_dir_all(&args.folder)?;
        clap_mangen::generate_to(Cli::command(), &args.folder)?;
        std::fs::File::options().append(true).open(args.folder.join("quorate.1"))?.write_all(MORE.as_bytes())
    };
    write().with_context(|| format!("{}: cannot be written to", args.folder.display()))?;
    Ok(ExitCode::SUCCESS)
}
