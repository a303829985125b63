//! `sakia probe`: what the disk gives at many lengths and depths of reads, and how fast the slot pool decides.

mod disk;
mod pool;

use std::process::ExitCode;

use anyhow::Result;
use serde_json::json;

use crate::args::{PoolOrDisk, ProbeArgs};
use crate::{machine, report};

/// Version of the JSON's layout.
const VERSION: u32 = 1;

pub(crate) fn run(args: &ProbeArgs) -> Result<ExitCode> {
    let disk = match args.only {
        Some(PoolOrDisk::Pool) => None,
        Some(PoolOrDisk::Disk) | None => Some(disk::measure(args)?),
    };
    let pool = match args.only {
        Some(PoolOrDisk::Disk) => None,
        Some(PoolOrDisk::Pool) | None => Some(pool::measure(args)?),
    };
    if args.json {
        let value = json!({
            "version": VERSION, "machine": machine::brief(),
            "disk": disk.as_ref().map(disk::Disk::as_json), "pool": pool.as_ref().map(pool::Pool::as_json),
        });
        report::data(&format!("{value:#}\n"));
    } else {
        let parts = [disk.map(|disk| disk.as_text()), pool.map(|pool| pool.as_text())];
        report::text(&parts.into_iter().flatten().collect::<Vec<_>>().join("\n"));
    }
    Ok(ExitCode::SUCCESS)
}
