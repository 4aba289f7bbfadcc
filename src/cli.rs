//! The commands, one file each. Exit codes: 0 done (or allowed), 1 a "no" (denied, faults found), 2 could not do it.

pub mod bench;
pub mod bucket;
pub mod check;
pub mod client;
pub mod dev;
pub mod import;
pub mod man;
pub mod notify;
pub mod policies;
pub mod region;
pub mod schema;
pub mod screen;
pub mod serve;
pub mod snapshot;
pub mod status;
pub mod top;
pub mod validate;

use clap::{Parser, Subcommand};

/// Exit code of a "no": denied, a faulty file, differences.
pub const NO: u8 = 1;
/// Exit code where it could not be done: bad arguments, unreachable.
pub const COULD_NOT: u8 = 2;

/// One API quota, enforced across regions, that stays true when the network does not.
#[derive(Debug, Parser)]
#[command(name = "quorate", version, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run one region's daemon until SIGTERM or SIGINT
    Serve(serve::Args),
    /// Run a whole multi-region cluster on this machine, in one process
    Dev(dev::Args),
    /// Ask for one decision and print it
    Check(check::Args),
    /// Put load on rate limit services and measure them
    Bench(bench::Args),
    /// Check region and policy files, and say what each policy guarantees
    Validate(validate::Args),
    /// Show or change the policies of a running cluster
    Policies(policies::Args),
    /// Show a bucket, or give it back what it has spent
    Bucket(bucket::Args),
    /// Show or change which regions are in the cluster, and which of them vote
    Region(region::Args),
    /// Save the pool to a file, and begin anew from one when a majority of the regions is lost
    Snapshot(snapshot::Args),
    /// Write a policy file from another rate limiter's configuration
    Import(import::Args),
    /// Print the JSON Schema of region or policy files, for editors
    Schema(schema::Args),
    /// Print a shell's completion script
    Completions(schema::Completions),
    /// Show a region's view of the cluster
    Status(status::Args),
    /// Show the hottest buckets of all regions, live
    Top(top::Args),
    /// Write the manual pages
    #[command(hide = true)]
    Man(man::Args),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::env::NOT_SETTINGS;
    use clap::CommandFactory as _;

    /// Else `serve` takes a variable that is meant for another command for a misspelt setting.
    #[test]
    fn variables_that_commands_read_are_no_settings() {
        fn variables(command: &clap::Command) -> Vec<String> {
            let own = command.get_arguments().filter_map(|arg| arg.get_env()?.to_str());
            let own: Vec<String> = own.map(str::to_owned).collect();
            command.get_subcommands().flat_map(variables).chain(own).collect()
        }
        let all = variables(&Cli::command());
        assert!(all.len() > 3, "{all:?}");
        let file = include_str!("../config/region.yaml");
        for variable in all {
            assert!(NOT_SETTINGS.contains(&&*variable) && file.contains(&variable), "{variable}");
        }
    }
}
