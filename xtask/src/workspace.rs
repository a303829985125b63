//! What `cargo metadata` knows about this workspace and everything it depends on.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::shell::{capture, cargo};

/// The workspace and its resolved dependencies.
pub(crate) struct Workspace {
    /// The repository's root folder.
    pub(crate) root: PathBuf,
    /// The folder that the user stands in: relative paths on the command line start there.
    pub(crate) started_in: PathBuf,
    /// The folder that cargo builds into.
    pub(crate) target: PathBuf,
    /// Every package of the lock file, for every platform.
    pub(crate) packages: Vec<Package>,
}

/// One package of the lock file.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    /// The SPDX expression of its manifest.
    pub(crate) license: Option<String>,
    /// Where it comes from; `None` for a folder on disk.
    pub(crate) source: Option<String>,
    /// Whether it is one of ours.
    pub(crate) member: bool,
    /// What its manifest asks for, of every kind: normal, build and dev.
    pub(crate) dependencies: Vec<Dependency>,
}

/// A line in the `[dependencies]` of a package.
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// The version requirement, `*` if the manifest gives none.
    pub(crate) requirement: String,
    /// Whether it comes from a registry, not from a folder.
    pub(crate) external: bool,
    /// Whether only tests and benches use it.
    pub(crate) dev: bool,
}

impl Workspace {
    /// Asks cargo, without changing the lock file.
    pub(crate) fn load() -> Result<Self> {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
        let json = capture(cargo().args(["metadata", "--format-version=1", "--locked"]).args([
            "--all-features",
            "--manifest-path",
            manifest,
        ]))?;
        let json: Value = serde_json::from_str(&json).context("cargo metadata is no JSON")?;
        let members: Vec<&str> =
            list(&json, "workspace_members")?.filter_map(Value::as_str).collect();
        let packages = list(&json, "packages")?.map(|package| Package::read(package, &members));
        Ok(Self {
            root: text(&json, "workspace_root")?.into(),
            started_in: std::env::current_dir().context("cannot tell the current folder")?,
            target: text(&json, "target_directory")?.into(),
            packages: packages.collect::<Result<_>>()?,
        })
    }

    /// Our own packages.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| package.member)
    }

    /// Every file that git tracks or would offer to track, relative to the root.
    pub(crate) fn files(&self) -> Result<Vec<PathBuf>> {
        let mut git = Command::new("git");
        git.arg("-C").arg(&self.root).args(["ls-files", "-z", "--cached", "--others"]);
        let names = capture(git.arg("--exclude-standard"))?;
        let files = names.split_terminator('\0').map(PathBuf::from);
        // A file that was deleted but not yet committed is still in git's list.
        Ok(files.filter(|file| self.root.join(file).is_file()).collect())
    }

    /// A file of the repository as text.
    pub(crate) fn read(&self, file: impl AsRef<Path>) -> Result<String> {
        let path = self.root.join(file);
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }
}

impl Package {
    fn read(json: &Value, members: &[&str]) -> Result<Self> {
        let id = text(json, "id")?;
        let dependencies = list(json, "dependencies")?.map(|dependency| {
            Ok(Dependency {
                name: text(dependency, "name")?.to_owned(),
                requirement: text(dependency, "req")?.to_owned(),
                external: dependency["source"].is_string(),
                dev: dependency["kind"] == "dev",
            })
        });
        Ok(Self {
            name: text(json, "name")?.to_owned(),
            version: text(json, "version")?.to_owned(),
            license: json["license"].as_str().map(str::to_owned),
            source: json["source"].as_str().map(str::to_owned),
            member: members.contains(&id),
            dependencies: dependencies.collect::<Result<_>>()?,
        })
    }
}

fn text<'a>(json: &'a Value, key: &str) -> Result<&'a str> {
    json[key].as_str().with_context(|| format!("cargo metadata has no text `{key}`"))
}

fn list<'a>(json: &'a Value, key: &str) -> Result<impl Iterator<Item = &'a Value>> {
    Ok(json[key].as_array().with_context(|| format!("cargo metadata has no list `{key}`"))?.iter())
}
