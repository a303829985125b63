//! `sakia parity`: one expert, twice. Once through pool, store and backend; once read again from the file and
//! multiplied by the scalar definition. The bits must agree.

use std::process::ExitCode;

use anyhow::{Result, bail};
use session::{ExpertKind, Parity};
use units::ExpertKey;

use crate::args::{ExpertMatrix, ParityArgs};
use crate::{lookahead, open, report};

pub(crate) fn run(args: &ParityArgs) -> Result<ExitCode> {
    let chosen = open::choose(&args.model)?;
    let mut options = open::options(&chosen, &args.memory, Some(&args.speed))?;
    options.context = options.context.or(Some(64));
    let opened = open::open(&chosen)?;
    lookahead::attach(&args.speed, &opened, &mut options)?;
    let config = &opened.model.config;
    if args.layer >= config.n_layers || args.expert >= config.n_experts {
        bail!("the model has layers 0..{} of experts 0..{}", config.n_layers, config.n_experts);
    }
    let kind = match args.kind {
        ExpertMatrix::Gate => ExpertKind::Gate,
        ExpertMatrix::Up => ExpertKind::Up,
        ExpertMatrix::Down => ExpertKind::Down,
    };
    let records = opened.model.records.clone();
    let mut engine = open::load(opened, options)?;
    let parity =
        Parity { key: ExpertKey::new(args.layer, args.expert), kind, rows: args.rows.clone() };
    let result = parity.run(&mut engine, &records)?;
    report::data(&format!("{result}\n"));
    Ok(if result.equal() { ExitCode::SUCCESS } else { ExitCode::from(2) })
}
