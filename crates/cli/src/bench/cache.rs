//! The page cache, for the model's files alone.

use std::path::PathBuf;

use crate::report;

/// What a run has to find.
pub(crate) struct Cold<'a> {
    /// Of the model.
    pub(crate) files: &'a [PathBuf],
    /// The files may stay where they are.
    pub(crate) keep: bool,
}

impl Cold<'_> {
    /// Takes the files out of the page cache; whether they are. Whoever has one mapped keeps its pages.
    pub(crate) fn drop(&self) -> bool {
        if self.keep {
            return false;
        }
        for path in self.files {
            if let Err(error) = drop_file(path) {
                report::note(&format!(
                    "warning: {} stays in the page cache ({error}); its headers are read from there",
                    path.display()
                ));
                return false;
            }
        }
        true
    }
}

#[cfg(target_os = "linux")]
fn drop_file(path: &std::path::Path) -> std::io::Result<()> {
    let file = std::fs::File::open(path)?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}

#[cfg(not(target_os = "linux"))]
fn drop_file(_path: &std::path::Path) -> std::io::Result<()> {
    Err(std::io::Error::other("this system has no call for that"))
}
