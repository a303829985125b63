//! Models that are here, and what the planner gives each.

use std::path::{Path, PathBuf};

use hub::Store;
use serde::Serialize;
use session::{OpenModel, Unknown};
use units::{Bytes, ExpertKey};

use super::disks::Place;
use super::findings::Finding;
use crate::args::{DoctorArgs, Kv, MemoryArgs};
use crate::open::{self, Chosen};
use crate::{demo, report};

/// A model by the name that it is told under.
pub(super) struct Found {
    name: String,
    chosen: Chosen,
}

/// What is told of a model.
#[derive(Debug, Clone, Serialize)]
pub(super) struct ModelFacts {
    pub(super) name: String,
    pub(super) file_bytes: u64,
    /// Bytes of the experts that one token chooses.
    pub(super) expert_bytes_per_token: u64,
    /// Runs of bytes that an expert is read in.
    pub(super) pieces: usize,
    /// Whether experts are put together from bytes that lie apart.
    pub(super) put_together: bool,
    /// What it gets, if anything.
    pub(super) plan: Option<Planned>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Planned {
    pub(super) budget_bytes: u64,
    /// Less is impossible.
    pub(super) smallest_budget_bytes: u64,
    pub(super) context_tokens: u32,
    pub(super) pass_rows: u32,
    pub(super) slots: u64,
    pub(super) experts: u64,
    /// Share of the experts that fit, 0 to 1.
    pub(super) share: f64,
}

/// The model that is named; else the demo and those of the local store.
pub(super) fn find(args: &DoctorArgs, findings: &mut Vec<Finding>) -> Vec<Found> {
    let variable = std::env::var_os("SAKIA_MODEL").filter(|path| !path.is_empty());
    if args.model.model.is_some() || variable.is_some() {
        return match open::choose(&args.model) {
            Ok(chosen) => {
                vec![Found { name: name_of(args.model.model.as_deref(), &chosen.path), chosen }]
            }
            Err(error) => {
                let name = name_of(args.model.model.as_deref(), Path::new("the model"));
                findings.push(Finding::unknown(&format!("the model {name}"), "it cannot be found"));
                report::note(&format!("warning: {error}"));
                Vec::new()
            }
        };
    }
    let demo = demo::find().map(|path| Found {
        name: "demo model".to_owned(),
        chosen: Chosen { path, is_demo: true },
    });
    let mut found: Vec<Found> = demo.into_iter().collect();
    let Ok(store) = Store::from_environment(&|name| std::env::var_os(name)) else {
        findings.push(Finding::unknown("pulled models", "neither $SAKIA_HOME nor $HOME is set"));
        return found;
    };
    match store.list() {
        Ok((held, unreadable)) => {
            for broken in unreadable {
                findings.push(Finding::unknown(
                    &format!("the model {}", broken.repo),
                    "its record cannot be read",
                ));
            }
            for held in held {
                let path = held
                    .name
                    .parse::<hub::ModelName>()
                    .ok()
                    .and_then(|name| store.locate(&name).ok());
                match path {
                    Some(path) => found
                        .push(Found { name: held.name, chosen: Chosen { path, is_demo: false } }),
                    None => findings.push(Finding::unknown(
                        &format!("the model {}", held.name),
                        "its files cannot be found",
                    )),
                }
            }
        }
        Err(_) => findings.push(Finding::unknown("pulled models", "the store cannot be listed")),
    }
    found
}

/// `org/name` as given, or the last part of a path.
fn name_of(given: Option<&Path>, path: &Path) -> String {
    let given = given.filter(|given| !given.exists() && !given.is_absolute());
    let given =
        given.and_then(Path::to_str).filter(|given| given.parse::<hub::ModelName>().is_ok());
    let file = || path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    given.map_or_else(file, str::to_owned)
}

/// What each gets, and where each lies.
pub(super) fn plan(
    found: &[Found],
    memory: Option<Bytes>,
    findings: &mut Vec<Finding>,
) -> (Vec<ModelFacts>, Vec<Place>) {
    let (mut models, mut places) = (Vec::new(), Vec::new());
    for Found { name, chosen } in found {
        let opened = match OpenModel::open(&chosen.path) {
            Ok(opened) => opened,
            Err(error) => {
                let why = without_folders(&error.to_string(), &chosen.path, name);
                findings.push(Finding::unusable(name, &why));
                continue;
            }
        };
        let plan = planned(&opened, chosen, memory);
        let plan = plan.map_err(|error| {
            let why = without_folders(&error.to_string(), &chosen.path, name);
            findings.push(Finding::unusable(name, &why));
        });
        let record = opened.model.records.record(ExpertKey::default());
        let longest = record.pieces.iter().max_by_key(|piece| piece.bytes);
        if let Some(piece) = longest {
            let file = opened.checkpoint.files[piece.file.get()].path.clone();
            places.push(Place { name: name.clone(), file, piece_bytes: piece.bytes });
        }
        models.push(ModelFacts {
            name: name.clone(),
            file_bytes: opened.checkpoint.files.iter().map(|file| file.bytes).sum(),
            expert_bytes_per_token: record.bytes
                * u64::from(opened.model.config.n_layers)
                * u64::from(opened.model.config.top_k),
            pieces: record.pieces.len(),
            put_together: opened.model.records.are_put_together(),
            plan: plan.ok(),
        });
        drop(opened);
        memory_plan::release_free_memory();
    }
    (models, places)
}

fn planned(opened: &OpenModel, chosen: &Chosen, memory: Option<Bytes>) -> anyhow::Result<Planned> {
    let memory = MemoryArgs { memory, context: None, kv: Kv::F16, slots: None };
    let mut options = open::options(chosen, &memory, None)?;
    open::find_reads(opened, &mut options, Unknown::Default);
    let plan = opened.plan(&options)?;
    Ok(Planned {
        budget_bytes: plan.budget.bytes.0,
        smallest_budget_bytes: plan.floor.0,
        context_tokens: plan.context,
        pass_rows: plan.pass_rows,
        slots: plan.slots(),
        experts: plan.experts(),
        share: plan.share,
    })
}

/// Text of an error in which the model goes by its name and its files by theirs.
fn without_folders(text: &str, path: &Path, name: &str) -> String {
    let mut text = text.to_owned();
    let real: Option<PathBuf> = std::fs::canonicalize(path).ok();
    for path in [Some(path), real.as_deref()].into_iter().flatten() {
        text = text.replace(&path.display().to_string(), name);
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            text = text.replace(&format!("{}/", folder.display()), "");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_names_and_lose_folders() {
        let path = Path::new("/data/private/models/big.gguf");
        let text =
            "/data/private/models/big.gguf: no such file; beside /data/private/models/other.gguf";
        assert_eq!(
            without_folders(text, path, "big.gguf"),
            "big.gguf: no such file; beside other.gguf"
        );
        let folder = Path::new("/data/private/models/big");
        let text = "/data/private/models/big/config.json is broken";
        assert_eq!(without_folders(text, folder, "org/big"), "org/big/config.json is broken");
    }

    #[test]
    fn a_model_goes_by_its_name_or_the_end_of_its_path() {
        let name = |given, path| name_of(given, Path::new(path));
        assert_eq!(name(Some(Path::new("org/name:Q4")), "/store/x.gguf"), "org/name:Q4");
        assert_eq!(
            name(Some(Path::new("/somewhere/secret/x.gguf")), "/somewhere/secret/x.gguf"),
            "x.gguf"
        );
        assert_eq!(name(None, "/a/b.gguf"), "b.gguf");
    }
}
