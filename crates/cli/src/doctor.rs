//! `sakia doctor`: what this machine has, what each model gets of it, what would be slow and why.
//!
//! A probe that fails is a finding, never the end. Models are named, folders are not: the text is for bug reports.

mod disks;
mod facts;
mod findings;
mod models;
mod text;

use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::args::DoctorArgs;
use crate::report;
use disks::Disk;
use facts::Facts;
use findings::Finding;
use models::ModelFacts;

/// Version of the JSON's layout.
const VERSION: u32 = 1;

/// Everything that is told.
#[derive(Serialize)]
struct Report {
    version: u32,
    #[serde(flatten)]
    facts: Facts,
    disks: Vec<Disk>,
    models: Vec<ModelFacts>,
    findings: Vec<Finding>,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let mut findings = Vec::new();
    let facts = Facts::gather(!args.no_probe, &mut findings);
    let found = models::find(args, &mut findings);
    let (models, places) = models::plan(&found, args.memory, &mut findings);
    let disks = if args.no_probe { Vec::new() } else { disks::probe(&places, &mut findings) };
    findings::judge(&facts, &disks, &models, &mut findings);
    let told = Report { version: VERSION, facts, disks, models, findings };
    if args.json {
        report::data(&format!("{:#}\n", serde_json::to_value(&told)?));
    } else {
        report::text(&text::of(&told));
    }
    Ok(ExitCode::SUCCESS)
}
