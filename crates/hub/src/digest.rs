//! The two hashes that a host promises: SHA-256 of large files, git's SHA-1 of small ones.

use std::fmt;
use std::fs::File;
use std::io::Read;

use sha1::Sha1;
use sha2::{Digest, Sha256};

/// How much is read and hashed at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// What a file's content must hash to.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum FileHash {
    /// SHA-256 of the content: files in large file storage.
    Sha256([u8; 32]),
    /// SHA-1 of `blob LENGTH\0` and the content: git's own name of a small file.
    GitBlob([u8; 20]),
}

impl FileHash {
    /// The algorithm in words.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::GitBlob(_) => "git SHA-1",
        }
    }

    /// The hash in hexadecimal digits.
    pub fn hex(&self) -> String {
        match self {
            Self::Sha256(bytes) => hex(bytes),
            Self::GitBlob(bytes) => hex(bytes),
        }
    }

    /// Reads 64 hexadecimal digits.
    pub(crate) fn sha256(text: &str) -> Option<Self> {
        bytes(text).map(Self::Sha256)
    }

    /// Reads 40 hexadecimal digits.
    pub(crate) fn git_blob(text: &str) -> Option<Self> {
        bytes(text).map(Self::GitBlob)
    }

    /// The same kind of hash of a whole file, which has `size` bytes. `None` if `go_on` said no.
    pub(crate) fn of(
        &self,
        file: &mut File,
        size: u64,
        go_on: impl FnMut() -> bool,
    ) -> std::io::Result<Option<Self>> {
        Ok(match self {
            Self::Sha256(_) => {
                hash(Sha256::new(), file, go_on)?.map(|hash| Self::Sha256(hash.finalize().into()))
            }
            Self::GitBlob(_) => {
                let start = Sha1::new_with_prefix(format!("blob {size}\0"));
                hash(start, file, go_on)?.map(|hash| Self::GitBlob(hash.finalize().into()))
            }
        })
    }
}

fn hash<D: Digest>(
    mut hash: D,
    file: &mut File,
    mut go_on: impl FnMut() -> bool,
) -> std::io::Result<Option<D>> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        if !go_on() {
            return Ok(None);
        }
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Some(hash)),
            Ok(n) => hash.update(&buffer[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

impl fmt::Display for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Sha256(_) => "sha256",
            Self::GitBlob(_) => "git-sha1",
        };
        write!(f, "{kind}:{}", self.hex())
    }
}

impl From<FileHash> for String {
    fn from(hash: FileHash) -> Self {
        hash.to_string()
    }
}

impl TryFrom<String> for FileHash {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let hash = match text.split_once(':') {
            Some(("sha256", digits)) => Self::sha256(digits),
            Some(("git-sha1", digits)) => Self::git_blob(digits),
            _ => None,
        };
        hash.ok_or_else(|| "a hash is `sha256:` or `git-sha1:` and hexadecimal digits".to_owned())
    }
}

fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from(DIGITS[usize::from(digit)])).collect()
}

fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    let digits = digits?;
    if digits.len() != 2 * N {
        return None;
    }
    let pairs: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    pairs.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(hash: &FileHash, content: &[u8]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, content).unwrap();
        let mut file = File::open(path).unwrap();
        hash.of(&mut file, content.len() as u64, || true).unwrap().unwrap().to_string()
    }

    /// From `sha256sum` and `git hash-object`.
    #[test]
    fn hashes_are_those_of_other_software() {
        let (sha256, git) = (FileHash::Sha256([0; 32]), FileHash::GitBlob([0; 20]));
        assert_eq!(
            of(&sha256, b"hello\n"),
            "sha256:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
        );
        assert_eq!(of(&git, b"hello\n"), "git-sha1:ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(of(&git, b""), "git-sha1:e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
    }

    #[test]
    fn a_hash_is_read_back_and_nothing_else_is() {
        for text in [
            "sha256:5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
            "git-sha1:ce013625030ba8dba906f756967f9e9ca394464a",
        ] {
            assert_eq!(FileHash::try_from(text.to_owned()).unwrap().to_string(), text);
        }
        for bad in [
            "",
            "sha256:",
            "sha256:58",
            "md5:00",
            "git-sha1:zz013625030ba8dba906f756967f9e9ca394464a",
        ] {
            assert!(FileHash::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }
}
