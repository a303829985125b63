//! House rules that neither rustfmt nor clippy knows: sizes, the register of unsafe code, leftovers, test data, decisions.

mod lexer;
mod repository;
mod source;

use std::path::Path;

use anyhow::{Result, bail};

use crate::shell::Outcome;
use crate::workspace::Workspace;

/// Endings of the files whose text is ours to keep tidy; `testdata/` and models are other software's words.
const TEXT: [&str; 10] = ["rs", "md", "toml", "py", "sh", "json", "html", "css", "js", "wgsl"];

/// Checks every rule and lists all that is wrong, not only the first.
pub(crate) fn run(workspace: &Workspace, _: &[String]) -> Result<Outcome> {
    let files = workspace.files()?;
    let mut problems = repository::check(workspace, &files)?;
    for file in files.iter().filter(|file| is_ours(file)) {
        let text = workspace.read(file)?;
        let mut found = source::text(&text);
        if file.extension().is_some_and(|ending| ending == "rs") {
            found.extend(source::rust(file, &text));
        }
        problems.extend(found.into_iter().map(|problem| format!("{}{problem}", file.display())));
    }
    if !problems.is_empty() {
        bail!("{} untidy:\n  {}", problems.len(), problems.join("\n  "));
    }
    eprintln!("{} files are tidy", files.len());
    Ok(Outcome::Done)
}

fn is_ours(file: &Path) -> bool {
    let foreign = file.starts_with("testdata") && file.extension().is_none_or(|e| e != "md");
    let text = match file.extension() {
        Some(ending) => TEXT.iter().any(|text| ending == *text),
        None => file.starts_with(".ci"),
    };
    text && !foreign
}
