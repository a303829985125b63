//! What a repository holds at one commit, by the host's word, which is checked before it is used.

use std::collections::BTreeSet;
use std::io::Read;
use std::time::Duration;

use serde::Deserialize;

use crate::client::{Client, Failure};
use crate::digest::FileHash;
use crate::error::HubError;
use crate::name::RepoName;
use crate::path::RepoPath;
use crate::retry::{LISTING_TRIES, Patience, Stop};

/// Most bytes of a list of files, and most files in one.
const LISTING_BYTES: u64 = 64 << 20;
const MOST_FILES: usize = 100_000;
/// Most bytes of one file. No file system that models lie on takes more.
const FILE_BYTES: u64 = 1 << 46;
/// Most bytes of a revision's name.
const REVISION_BYTES: usize = 256;

/// A repository at one commit.
#[derive(Debug, Clone)]
pub(crate) struct Listing {
    /// Who gave it.
    pub host: String,
    /// Which repository.
    pub repo: RepoName,
    /// The commit that a branch or tag stood for when the host was asked: 40 hexadecimal digits.
    pub commit: String,
    /// All files, in the host's order, no path twice.
    pub files: Vec<Listed>,
}

/// A file of a listing.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    /// Where it lies.
    pub path: RepoPath,
    /// Its bytes, if the host says.
    pub size: Option<u64>,
    /// What it hashes to, if the host says.
    pub hash: Option<FileHash>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: String,
    size: u64,
}

/// Asks the host what `revision` of a repository holds.
pub(crate) fn fetch(
    client: &Client,
    repo: &RepoName,
    revision: &str,
    first_pause: Duration,
    stop: &Stop,
) -> Result<Listing, HubError> {
    check_revision(revision)?;
    let segments = ["api", "models", repo.org(), repo.name(), "revision", revision];
    let url = client.host().at(segments, "?blobs=true");
    let what = format!("list of files of {repo} at {revision}");
    let host = url.authority();
    let mut patience = Patience::new(first_pause, LISTING_TRIES);
    loop {
        let tried = client.get(&url, None, &what).and_then(|answer| {
            let mut text = Vec::new();
            let body = answer.body.take(LISTING_BYTES + 1);
            read_all(body, &mut text).map_err(|error| Failure::Passing(error.to_string(), None))?;
            if text.len() as u64 > LISTING_BYTES {
                return Err(Failure::Final(unusable(&host, repo, "it has more than 64 MiB")));
            }
            Ok(text)
        });
        match tried {
            Ok(text) => return parse(&host, repo, &text),
            Err(failure) => {
                let pause = patience.after(failure, &host, &what)?;
                if !stop.pause(pause) {
                    let none = units::Bytes::ZERO;
                    return Err(HubError::Stopped { done: none, total: none });
                }
            }
        }
    }
}

fn read_all(mut body: impl Read, text: &mut Vec<u8>) -> std::io::Result<()> {
    body.read_to_end(text).map(|_| ())
}

fn check_revision(revision: &str) -> Result<(), HubError> {
    let problem = if revision.is_empty() || revision.len() > REVISION_BYTES {
        "it has 1 to 256 bytes"
    } else if revision.chars().any(|c| c.is_control() || c.is_whitespace()) {
        "it holds no white space"
    } else if revision.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
        "its parts between slashes are names"
    } else {
        return Ok(());
    };
    Err(HubError::Revision { found: revision.escape_debug().to_string(), problem })
}

pub(crate) fn unusable(host: &str, repo: &RepoName, problem: impl Into<String>) -> HubError {
    HubError::Listing { host: host.to_owned(), repo: repo.to_string(), problem: problem.into() }
}

/// Turns the host's JSON into a listing, or refuses it as a whole.
fn parse(host: &str, repo: &RepoName, text: &[u8]) -> Result<Listing, HubError> {
    let answer: Answer = serde_json::from_slice(text)
        .map_err(|error| unusable(host, repo, format!("it is not the JSON expected: {error}")))?;
    let commit = answer.sha;
    if commit.len() != 40 || !commit.bytes().all(|c| c.is_ascii_hexdigit()) {
        let found: String = commit.chars().take(60).flat_map(char::escape_debug).collect();
        return Err(unusable(host, repo, format!("`{found}` is no commit")));
    }
    if answer.siblings.len() > MOST_FILES {
        let found = answer.siblings.len();
        return Err(unusable(host, repo, format!("{found} files, at most {MOST_FILES} are read")));
    }
    let mut seen = BTreeSet::new();
    let mut files = Vec::with_capacity(answer.siblings.len());
    for sibling in answer.siblings {
        let file = listed(sibling).map_err(|error| match error {
            Unfit::Path(error) => error,
            Unfit::Value(problem) => unusable(host, repo, problem),
        })?;
        if !seen.insert(file.path.clone()) {
            let path = file.path.as_str();
            return Err(unusable(host, repo, format!("{path} is in it twice")));
        }
        files.push(file);
    }
    if let Some(path) = files.iter().find_map(|file| parents(file.path.as_str(), &seen)) {
        return Err(unusable(host, repo, format!("{path} is a file and a folder")));
    }
    let (host, repo, commit) = (host.to_owned(), repo.clone(), commit.to_ascii_lowercase());
    Ok(Listing { host, repo, commit, files })
}

/// The first folder above a path that is a file by the same list.
fn parents<'a>(path: &'a str, files: &BTreeSet<RepoPath>) -> Option<&'a str> {
    let folders = path.match_indices('/').map(|(end, _)| &path[..end]);
    let is_file = |folder: &&str| {
        RepoPath::try_from((*folder).to_owned()).is_ok_and(|folder| files.contains(&folder))
    };
    folders.into_iter().find(is_file)
}

enum Unfit {
    Path(HubError),
    Value(String),
}

fn listed(sibling: Sibling) -> Result<Listed, Unfit> {
    let path = RepoPath::try_from(sibling.rfilename).map_err(Unfit::Path)?;
    let value = |problem: &str| Unfit::Value(format!("{}: {problem}", path.as_str()));
    let (size, hash) = if let Some(lfs) = sibling.lfs {
        if sibling.size.is_some_and(|size| size != lfs.size) {
            return Err(value("two different sizes"));
        }
        let digits = lfs.sha256.strip_prefix("sha256:").unwrap_or(&lfs.sha256);
        let hash = FileHash::sha256(digits).ok_or_else(|| value("a hash that is none"))?;
        (Some(lfs.size), Some(hash))
    } else {
        let hash = sibling
            .blob_id
            .map(|id| FileHash::git_blob(&id).ok_or_else(|| value("a git hash that is none")));
        (sibling.size, hash.transpose()?)
    };
    if size.is_some_and(|size| size > FILE_BYTES) {
        return Err(value("a size that no file has"));
    }
    Ok(Listed { path, size, hash })
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn read(siblings: &str) -> Result<Listing, HubError> {
        let text = format!(r#"{{"sha": "{COMMIT}", "siblings": [{siblings}], "other": 1}}"#);
        parse("host", &"a/b".parse().unwrap(), text.as_bytes())
    }

    #[test]
    fn sizes_and_hashes_come_from_lfs_or_git() {
        let sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let listing = read(&format!(
            r#"{{"rfilename": "m.gguf", "size": 6, "blobId": "{COMMIT}",
                "lfs": {{"sha256": "{sha256}", "size": 6, "pointerSize": 130}}}},
               {{"rfilename": "c.json", "size": 2, "blobId": "{COMMIT}"}},
               {{"rfilename": "bare"}}"#
        ));
        let listing = listing.unwrap();
        let hashes: Vec<_> =
            listing.files.iter().map(|file| file.hash.as_ref().map(ToString::to_string)).collect();
        assert_eq!(
            hashes,
            [Some(format!("sha256:{sha256}")), Some(format!("git-sha1:{COMMIT}")), None]
        );
        assert_eq!(listing.files[0].size, Some(6));
    }

    #[test]
    fn a_list_that_lies_is_refused_as_a_whole() {
        for (siblings, words) in [
            (r#"{"rfilename": "../../etc/cron.d/x"}"#, "leave the folder"),
            (r#"{"rfilename": "a"}, {"rfilename": "a"}"#, "twice"),
            (r#"{"rfilename": "a"}, {"rfilename": "a/b/c"}"#, "a file and a folder"),
            (r#"{"rfilename": "a", "size": 18446744073709551615}"#, "no file has"),
            (r#"{"rfilename": "a", "size": -1}"#, "JSON"),
            (r#"{"rfilename": "a", "size": 1e3}"#, "JSON"),
            (r#"{"rfilename": "a", "size": 1, "blobId": "xyz"}"#, "hash"),
            (r#"{"rfilename": "a", "size": 1, "lfs": {"sha256": "00", "size": 1}}"#, "hash"),
            (r#"{"size": 1}"#, "JSON"),
            (r#"{"rfilename": "a"}"#, ""),
        ] {
            let result = read(siblings).map_err(|error| error.to_string());
            match result {
                Ok(_) => assert!(words.is_empty(), "{siblings}"),
                Err(error) => assert!(!words.is_empty() && error.contains(words), "{error}"),
            }
        }
        let empty = parse("host", &"a/b".parse().unwrap(), br#"{"sha": "main", "siblings": []}"#);
        assert!(empty.unwrap_err().to_string().contains("no commit"));
        assert!(parse("host", &"a/b".parse().unwrap(), b"<html>").is_err());
    }

    #[test]
    fn revisions_stay_inside_their_place_in_the_address() {
        for good in ["main", "refs/pr/1", COMMIT, "v1.0"] {
            assert!(check_revision(good).is_ok());
        }
        for bad in ["", "a b", "../..", "a//b", "a\n", "/a", &"x".repeat(300)] {
            assert!(check_revision(bad).is_err(), "{bad:?}");
        }
    }
}
