//! Which files of a repository a model needs.
//!
//! Safetensors: all weight files of the root folder, and what says how to read them. GGUF: one quantisation, with all
//! of its parts. Never what another program would need: `.bin`, `.pt`, ONNX, pictures.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use units::Bytes;

use crate::digest::FileHash;
use crate::error::HubError;
use crate::glob;
use crate::listing::{Listed, Listing, unusable};
use crate::name::RepoName;
use crate::path::RepoPath;

/// What a model of safetensors files is read with.
const COMPANIONS: [&str; 14] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// Endings that are never fetched, also when a pattern matches them: nothing here reads them, and some can hold code.
const NEVER: [&str; 15] = [
    "bin", "ckpt", "gif", "h5", "jpeg", "jpg", "mp4", "msgpack", "onnx", "pickle", "pkl", "png",
    "pt", "pth", "webp",
];

/// A file that is to be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Where it lies in the repository and under the model's folder.
    pub path: RepoPath,
    /// Its bytes.
    pub size: u64,
    /// What it must hash to.
    pub hash: FileHash,
}

/// The files that a model needs: of its one form, of the quantisation `variant`, or those that a pattern in `include`
/// matches.
///
/// # Errors
///
/// [`HubError::Choice`] if there is more than one quantisation to choose from, with their sizes;
/// [`HubError::NoModel`], [`HubError::NoVariants`], [`HubError::NoMatch`], [`HubError::MissingParts`];
/// [`HubError::Listing`] if the host does not say how large a file is or what it hashes to.
pub(crate) fn select(
    listing: &Listing,
    variant: Option<&str>,
    include: &[String],
) -> Result<Vec<Wanted>, HubError> {
    let repo = &listing.repo;
    let paths: Vec<(&RepoPath, u64)> =
        listing.files.iter().map(|file| (&file.path, file.size.unwrap_or(0))).collect();
    let variants = Variants::of(repo, paths.iter().copied());
    let has_safetensors = paths.iter().any(|(path, _)| is_weights(path));
    let chosen: BTreeSet<&RepoPath> = if !include.is_empty() {
        matching(repo, &paths, &variants, include)?
    } else if variant.is_some() || (!has_safetensors && !variants.is_empty()) {
        variants.choose(variant)?.paths()?.collect()
    } else if has_safetensors {
        paths
            .iter()
            .map(|(path, _)| *path)
            .filter(|path| is_weights(path) || is_companion(path))
            .collect()
    } else {
        return Err(HubError::NoModel { repo: repo.to_string(), found: endings(&paths) });
    };
    let chosen = without_second_copy(chosen);
    no_clash(listing, &chosen)?;
    let files = listing.files.iter().filter(|file| chosen.contains(&file.path));
    files.map(|file| wanted(listing, file)).collect()
}

fn wanted(listing: &Listing, file: &Listed) -> Result<Wanted, HubError> {
    let (Some(size), Some(hash)) = (file.size, file.hash.clone()) else {
        let problem = format!("size or hash of {} is not in it", file.path.as_str());
        return Err(unusable(&listing.host, &listing.repo, problem));
    };
    Ok(Wanted { path: file.path.clone(), size, hash })
}

/// Files that the patterns match, whole splits, and what safetensors are read with.
fn matching<'a>(
    repo: &RepoName,
    paths: &[(&'a RepoPath, u64)],
    variants: &Variants<'a>,
    include: &[String],
) -> Result<BTreeSet<&'a RepoPath>, HubError> {
    let mut chosen = BTreeSet::new();
    for pattern in include {
        let pattern = if pattern.ends_with('/') { format!("{pattern}*") } else { pattern.clone() };
        let before = chosen.len();
        let hits = paths.iter().map(|(path, _)| *path);
        let hits: Vec<_> = hits
            .filter(|path| glob::matches(&pattern, path.as_str()) && !is_refused(path))
            .filter(|path| !chosen.contains(path))
            .collect();
        chosen.extend(hits);
        let known = chosen.iter().any(|path: &&RepoPath| glob::matches(&pattern, path.as_str()));
        if before == chosen.len() && !known {
            let (repo, found) = (repo.to_string(), endings(paths));
            return Err(HubError::NoMatch { repo, pattern, found });
        }
    }
    for group in &variants.groups {
        if group.parts.values().any(|path| chosen.contains(path)) {
            chosen.extend(group.paths(&variants.repo)?);
        }
    }
    if chosen.iter().any(|path| is_weights(path)) {
        chosen.extend(paths.iter().map(|(path, _)| *path).filter(|path| is_companion(path)));
    }
    Ok(chosen)
}

/// Leaves out `consolidated*.safetensors`, the same weights under a maker's own names, beside `model*.safetensors`.
fn without_second_copy(chosen: BTreeSet<&RepoPath>) -> BTreeSet<&RepoPath> {
    let has_model =
        chosen.iter().any(|path| path.as_str().starts_with("model") && is_weights(path));
    let second = |path: &&RepoPath| path.as_str().starts_with("consolidated") && is_weights(path);
    chosen.into_iter().filter(|path| !(has_model && second(path))).collect()
}

/// Two names that differ in case only would be one file on some systems.
fn no_clash(listing: &Listing, chosen: &BTreeSet<&RepoPath>) -> Result<(), HubError> {
    let mut folded = BTreeSet::new();
    match chosen.iter().find(|path| !folded.insert(path.as_str().to_lowercase())) {
        None => Ok(()),
        Some(path) => {
            let problem = format!("{} is in it twice but for upper and lower case", path.as_str());
            Err(unusable(&listing.host, &listing.repo, problem))
        }
    }
}

fn ending(path: &RepoPath) -> Option<String> {
    Some(path.file_name().rsplit_once('.')?.1.to_ascii_lowercase())
}

fn is_refused(path: &RepoPath) -> bool {
    NEVER.iter().any(|ending| path.has_ending(ending))
}

/// A weight file of safetensors in the root folder. In other folders lie other models.
fn is_weights(path: &RepoPath) -> bool {
    !path.as_str().contains('/') && path.has_ending("safetensors")
}

fn is_companion(path: &RepoPath) -> bool {
    let text = path.as_str();
    COMPANIONS.contains(&text)
        || (!text.contains('/') && text.ends_with(".safetensors.index.json"))
        || (text.starts_with("additional_chat_templates/") && path.has_ending("jinja"))
}

/// `3 .bin, 1 .json`: what there is, for messages.
fn endings(paths: &[(&RepoPath, u64)]) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (path, _) in paths {
        let ending = ending(path).map_or_else(|| "without ending".to_owned(), |e| format!(".{e}"));
        *counts.entry(ending).or_default() += 1;
    }
    let list: Vec<_> = counts.iter().take(12).map(|(ending, n)| format!("{n} {ending}")).collect();
    if list.is_empty() { "no file".to_owned() } else { list.join(", ") }
}

/// The quantisations of a repository, or of a model in the store.
pub(crate) struct Variants<'a> {
    repo: RepoName,
    groups: Vec<Variant<'a>>,
}

/// One model as GGUF: a file, or all parts of a split one.
pub(crate) struct Variant<'a> {
    /// What the user calls it: `Q4_K_M`, or the file's whole name without its ending.
    label: String,
    /// The name without part and ending, with its folder.
    stem: String,
    bytes: u64,
    /// By number, from 1; a file that is not split is part 1 of 1.
    parts: BTreeMap<u32, &'a RepoPath>,
    needed: u32,
}

impl<'a> Variants<'a> {
    pub(crate) fn of(
        repo: &RepoName,
        files: impl IntoIterator<Item = (&'a RepoPath, u64)>,
    ) -> Self {
        let mut groups: BTreeMap<(String, u32), Variant<'a>> = BTreeMap::new();
        for (path, size) in files {
            let Some(stem) = model_stem(path) else { continue };
            let (stem, part, needed) = split_part(stem);
            let variant = groups.entry((stem.to_owned(), needed)).or_insert_with(|| Variant {
                label: label(stem),
                stem: stem.to_owned(),
                bytes: 0,
                parts: BTreeMap::new(),
                needed,
            });
            variant.bytes = variant.bytes.saturating_add(size);
            variant.parts.insert(part, path);
        }
        let mut groups: Vec<_> = groups.into_values().collect();
        groups.sort_by(|a, b| (a.bytes, &a.stem).cmp(&(b.bytes, &b.stem)));
        let mut this = Self { repo: repo.clone(), groups };
        this.tell_apart();
        this
    }

    /// Variants of one label (one model in two folders, two models in one repository) go by their names.
    fn tell_apart(&mut self) {
        let labels: Vec<String> = self.groups.iter().map(|g| g.label.to_lowercase()).collect();
        for group in &mut self.groups {
            let same = labels.iter().filter(|label| **label == group.label.to_lowercase()).count();
            if same > 1 {
                group.label = file_name(&group.stem).to_owned();
            }
        }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The one that is meant: the only one, or the one of that name without regard to case.
    pub(crate) fn choose(&self, wanted: Option<&str>) -> Result<Chosen<'_, 'a>, HubError> {
        let hits: Vec<&Variant> = match wanted {
            None => self.groups.iter().collect(),
            Some(wanted) => self.named(wanted),
        };
        match (hits.as_slice(), wanted) {
            ([one], _) => Ok(Chosen { repo: &self.repo, variant: one }),
            ([], None) => Err(HubError::NoModel {
                repo: self.repo.to_string(),
                found: "no GGUF file".to_owned(),
            }),
            ([], Some(wanted)) if self.is_empty() => Err(HubError::NoVariants {
                repo: self.repo.to_string(),
                variant: wanted.to_owned(),
            }),
            ([], Some(wanted)) => {
                Err(self.ask(&self.groups, format!("no quantisation is {wanted}")))
            }
            (_, Some(wanted)) => Err(self.ask(hits, format!("{wanted} may be several of them"))),
            (_, None) => {
                let count = self.groups.len();
                Err(self.ask(&self.groups, format!("one of {count} quantisations must be chosen")))
            }
        }
    }

    /// Whether that names one of them, or several.
    pub(crate) fn has(&self, wanted: &str) -> bool {
        !self.named(wanted).is_empty()
    }

    /// What they are called.
    pub(crate) fn labels(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().map(|group| group.label.as_str())
    }

    /// By label; else by label without the maker's prefix; else by the end of the file's name.
    fn named(&self, wanted: &str) -> Vec<&Variant<'a>> {
        let wanted = wanted.to_ascii_lowercase();
        let tests: [&dyn Fn(&Variant) -> bool; 3] = [
            &|v| v.label.to_ascii_lowercase() == wanted,
            &|v| v.label.to_ascii_lowercase().strip_prefix("ud-") == Some(wanted.as_str()),
            &|v| {
                let name = file_name(&v.stem).to_ascii_lowercase();
                let before = name.strip_suffix(wanted.as_str());
                before.is_some_and(|rest| rest.is_empty() || rest.ends_with(['-', '.', '_']))
            },
        ];
        let hits =
            tests.iter().map(|test| self.groups.iter().filter(|v| test(v)).collect::<Vec<_>>());
        hits.into_iter().find(|hits| !hits.is_empty()).unwrap_or_default()
    }

    fn ask<'b>(&self, hits: impl IntoIterator<Item = &'b Variant<'a>>, problem: String) -> HubError
    where
        'a: 'b,
    {
        let hits: Vec<_> = hits.into_iter().collect();
        let width = hits.iter().map(|v| v.label.chars().count()).max().unwrap_or(0);
        let mut choices = String::new();
        for variant in &hits {
            let _ = write!(choices, "  {:width$}  {:>10}", variant.label, Bytes(variant.bytes));
            if variant.needed > 1 {
                let _ = write!(choices, "  in {} files", variant.parts.len());
            }
            choices.push('\n');
        }
        choices.pop();
        let example = hits.first().map_or_else(String::new, |variant| variant.label.clone());
        let (repo, command) = (self.repo.to_string(), "sakia pull");
        HubError::Choice { repo, problem, choices, command, example }
    }
}

/// A variant that was chosen.
pub(crate) struct Chosen<'v, 'a> {
    repo: &'v RepoName,
    variant: &'v Variant<'a>,
}

impl<'a> Chosen<'_, 'a> {
    /// All of its files.
    pub(crate) fn paths(&self) -> Result<impl Iterator<Item = &'a RepoPath> + use<'a>, HubError> {
        Ok(self.variant.paths(self.repo)?.collect::<Vec<_>>().into_iter())
    }
}

impl<'a> Variant<'a> {
    fn paths(&self, repo: &RepoName) -> Result<impl Iterator<Item = &'a RepoPath>, HubError> {
        let found = self.parts.len() as u32;
        let in_range = self.parts.keys().all(|part| (1..=self.needed).contains(part));
        match self.parts.first_key_value() {
            Some((_, first)) if found != self.needed || !in_range => Err(HubError::MissingParts {
                repo: repo.to_string(),
                path: first.as_str().to_owned(),
                found,
                needed: self.needed,
            }),
            _ => Ok(self.parts.values().copied()),
        }
    }
}

/// The path without `.gguf`, unless it is a part of another kind: a vision tower, an importance matrix.
fn model_stem(path: &RepoPath) -> Option<&str> {
    let text = path.as_str();
    let stem = text.get(..text.len().checked_sub(5)?)?;
    if !text[stem.len()..].eq_ignore_ascii_case(".gguf") {
        return None;
    }
    let name = file_name(stem).to_ascii_lowercase();
    (!name.contains("mmproj") && !name.contains("imatrix")).then_some(stem)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// `x-00002-of-00003` is part 2 of 3 of `x`; anything else is whole.
fn split_part(stem: &str) -> (&str, u32, u32) {
    let parts = || {
        let (rest, total) = stem.rsplit_once("-of-")?;
        let (rest, part) = rest.rsplit_once('-')?;
        let number = |text: &str| {
            let digits = text.len() == 5 && text.bytes().all(|c| c.is_ascii_digit());
            digits.then(|| text.parse().ok()).flatten()
        };
        Some((rest, number(part)?, number(total)?))
    };
    parts().unwrap_or((stem, 1, 1))
}

/// The last piece of a file's name that looks like a quantisation, with the maker's prefix `UD-`; else the whole name.
fn label(stem: &str) -> String {
    let name = file_name(stem);
    let starts: Vec<usize> = std::iter::once(0)
        .chain(name.char_indices().filter(|(_, c)| matches!(c, '-' | '.')).map(|(at, _)| at + 1))
        .collect();
    for &start in starts.iter().rev() {
        let piece = name[start..].split(['-', '.']).next().unwrap_or_default();
        if is_quantisation(piece) {
            let prefix = name[..start].to_ascii_lowercase();
            let from = if prefix.ends_with("ud-") { start - 3 } else { start };
            return name[from..start + piece.len()].to_owned();
        }
    }
    name.to_owned()
}

fn is_quantisation(piece: &str) -> bool {
    let piece = piece.to_ascii_uppercase();
    if ["F16", "BF16", "F32", "FP16", "FP32", "FP8"].contains(&piece.as_str()) {
        return true;
    }
    let kinds = ["IQ", "TQ", "Q", "MXFP", "NVFP"];
    let rest = kinds.iter().find_map(|kind| piece.strip_prefix(kind));
    let digit = rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    digit && piece.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests;
