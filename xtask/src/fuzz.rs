//! Fuzzing.

use anyhow::{Result, bail};

use crate::shell::Outcome;
use crate::workspace::Workspace;

pub(crate) fn run(_: &Workspace, _: &[String]) -> Result<Outcome> {
    bail!("not yet")
}
