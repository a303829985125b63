//! The model that ships with the project, and the budget it is shown under.

use std::path::PathBuf;

use units::Bytes;

/// File name in `models/`.
const FILE: &str = "sakia-demo-Q4_K_M.gguf";

/// A budget under which fewer than half of the demo model's experts fit, so that the first run really streams.
pub(crate) const MEMORY: Bytes = Bytes::mib(44);

/// Context under that budget.
pub(crate) const CONTEXT: u32 = 1024;

/// The demo model: beside the program, or in the source tree that it was built from.
pub(crate) fn find() -> Option<PathBuf> {
    let beside =
        std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("models").join(FILE)));
    let source = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models")).join(FILE);
    [Some(PathBuf::from("models").join(FILE)), beside, source.canonicalize().ok()]
        .into_iter()
        .flatten()
        .find(|p| p.is_file())
}
