//! One file of a prefix: the rows of a block, or the recurrent state behind it.
//!
//! All numbers are little-endian:
//!
//! ```text
//! 8 bytes   "SAKIAPFX"
//! u32       version, 1
//! u32       0 = rows of the last 64 tokens, 1 = the state behind the last token
//! u64       numerical identity: model files, KV type, activations, kernel contract
//! u64       tokens, a multiple of 64
//! u64       bytes of the content
//! u32 ...   all tokens from the beginning
//! ...       content
//! u64       XXH3 of everything before it
//! ```
//!
//! All tokens are in it, since what it keeps depends on all of them: a name is a hash, and a hash proves nothing.

use checkpoint::pack::Checksum;

const MAGIC: &[u8; 8] = b"SAKIAPFX";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 8 + 4 + 4 + 8 + 8 + 8;
const CHECKSUM_BYTES: usize = 8;

/// What a file keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Kind {
    Rows,
    State,
}

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error("it cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("it has {found} bytes, and {needed} are needed")]
    Length { found: u64, needed: u64 },
    #[error("it is no prefix of this program")]
    Magic,
    #[error("it has version {found}, and this program reads version {VERSION}")]
    Version { found: u32 },
    #[error("it is of another model or of other settings than its name says")]
    Foreign,
    #[error("it is of another text than its name says")]
    Text,
    #[error("its checksum does not fit its content")]
    Checksum,
}

/// What a file has to be.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) kind: Kind,
    pub(super) identity: u64,
    pub(super) tokens: &'a [u32],
    pub(super) content_bytes: usize,
}

impl Wanted<'_> {
    /// Its length.
    pub(super) const fn bytes(&self) -> u64 {
        (HEADER_BYTES + 4 * self.tokens.len() + self.content_bytes + CHECKSUM_BYTES) as u64
    }

    /// What comes before the content.
    fn head(&self) -> Vec<u8> {
        let mut head = Vec::with_capacity(HEADER_BYTES + 4 * self.tokens.len());
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(self.kind as u32).to_le_bytes());
        head.extend_from_slice(&self.identity.to_le_bytes());
        head.extend_from_slice(&(self.tokens.len() as u64).to_le_bytes());
        head.extend_from_slice(&(self.content_bytes as u64).to_le_bytes());
        head.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        head
    }

    /// Writes the file.
    pub(super) fn write(
        &self,
        out: &mut impl std::io::Write,
        content: &[u8],
    ) -> std::io::Result<()> {
        assert_eq!(content.len(), self.content_bytes, "the content that was said");
        let head = self.head();
        let mut sum = Checksum::new();
        sum.update(&head);
        sum.update(content);
        out.write_all(&head)?;
        out.write_all(content)?;
        out.write_all(&sum.value().to_le_bytes())
    }

    /// The content of a file that is what it has to be. `found` is its length.
    pub(super) fn read(
        &self,
        input: &mut impl std::io::Read,
        found: u64,
    ) -> Result<Vec<u8>, FileError> {
        let needed = self.bytes();
        if found != needed {
            return Err(FileError::Length { found, needed });
        }
        let mut head = vec![0; HEADER_BYTES + 4 * self.tokens.len()];
        input.read_exact(&mut head)?;
        self.check(&head)?;
        let mut content = vec![0; self.content_bytes];
        input.read_exact(&mut content)?;
        let mut written = [0; CHECKSUM_BYTES];
        input.read_exact(&mut written)?;
        let mut sum = Checksum::new();
        sum.update(&head);
        sum.update(&content);
        if sum.value() != u64::from_le_bytes(written) {
            return Err(FileError::Checksum);
        }
        Ok(content)
    }

    fn check(&self, head: &[u8]) -> Result<(), FileError> {
        let expected = self.head();
        let differs = |range: std::ops::Range<usize>| head[range.clone()] != expected[range];
        if differs(0..8) {
            return Err(FileError::Magic);
        }
        if differs(8..12) {
            let found = u32::from_le_bytes([head[8], head[9], head[10], head[11]]);
            return Err(FileError::Version { found });
        }
        if differs(16..24) {
            return Err(FileError::Foreign);
        }
        // The rest is what the length and the name say.
        if differs(12..16) || differs(24..head.len()) {
            return Err(FileError::Text);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: [u32; 64] = [7; 64];

    fn wanted() -> Wanted<'static> {
        Wanted { kind: Kind::Rows, identity: 42, tokens: &TOKENS, content_bytes: 100 }
    }

    fn file() -> Vec<u8> {
        let mut file = Vec::new();
        wanted().write(&mut file, &[9; 100]).unwrap();
        file
    }

    fn read(wanted: &Wanted<'_>, file: &[u8]) -> Result<Vec<u8>, FileError> {
        wanted.read(&mut &*file, file.len() as u64)
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(file().len() as u64, wanted().bytes());
        assert_eq!(read(&wanted(), &file()).unwrap(), [9; 100]);
    }

    #[test]
    fn a_cut_file_and_a_changed_byte_are_noticed_wherever_they_are() {
        let whole = file();
        for at in 0..whole.len() {
            assert!(read(&wanted(), &whole[..at]).is_err(), "cut at {at}");
            // The length is what it was, the bytes are not there.
            assert!(wanted().read(&mut &whole[..at], whole.len() as u64).is_err());
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert!(read(&wanted(), &changed).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_file_of_something_else_says_of_what() {
        let other = |wanted: Wanted<'_>| read(&wanted, &file()).unwrap_err().to_string();
        assert!(other(Wanted { identity: 43, ..wanted() }).contains("another model"));
        assert!(other(Wanted { kind: Kind::State, ..wanted() }).contains("another text"));
        let tokens = [8; 64];
        assert!(other(Wanted { tokens: &tokens, ..wanted() }).contains("another text"));
        assert!(other(Wanted { content_bytes: 99, ..wanted() }).contains("bytes"));
    }
}
