//! The byte alphabet of byte-level BPE: every byte is a printable character.
//!
//! Printable Latin-1 stands for itself; the other 68 bytes are numbered from U+0100 on. Source: the GPT-2 tokenizer.

/// The byte that a character stands for.
pub(super) const fn byte_of(c: char) -> Option<u8> {
    match c as u32 {
        n @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(n as u8),
        // In order: 0 to 32, 127 to 160, 173.
        n @ 0x100..=0x120 => Some((n - 0x100) as u8),
        n @ 0x121..=0x142 => Some((n - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The character that stands for a byte.
pub(super) fn char_of(byte: u8) -> char {
    match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        0..=0x20 => numbered(u32::from(byte)),
        0x7f..=0xa0 => numbered(u32::from(byte) - 0x7f + 0x21),
        0xad => numbered(0x43),
    }
}

fn numbered(n: u32) -> char {
    char::from_u32(0x100 + n).expect("U+0100 to U+0143 are characters")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_exactly_one_character() {
        let mut bytes: Vec<u8> =
            (0..0x400).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!((byte_of('Ġ'), byte_of('Ċ')), (Some(b' '), Some(b'\n')));
    }

    #[test]
    fn the_alphabet_reads_back() {
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
    }
}
