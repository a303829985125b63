//! Rows of a resident matrix, interleaved by eight: word `i` of eight rows stands together, so that a vector holds the
//! same values of eight rows.
//!
//! The bytes are the same ones in another order, so a matrix is interleaved where it lies. Which matrices are is up to
//! the kernels ([`crate::kernels::Kernels::interleaves`]); products do not change by a bit.

use quant::BlockType;

/// Weight rows of a group.
pub(crate) const ROWS: usize = 8;

/// Most bytes of a block that has an order.
const MOST_BYTES: usize = 210;

/// Whether blocks of this type have an order among interleaved ones.
pub(crate) const fn has_order(ty: BlockType) -> bool {
    matches!(ty, BlockType::Q4K | BlockType::Q6K)
}

/// Which word of a block stands at place `at` among the interleaved ones: in the order of use, as memory is read ahead
/// of one stream, not of several.
#[inline]
fn word_at(ty: BlockType, at: usize) -> usize {
    match ty {
        // Scales. Then what makes 16 codes: low bits of two runs, low bits of two more, high bits of all four.
        BlockType::Q6K => match at.checked_sub(4) {
            None => 48 + at,
            Some(at) => {
                let (n, w) = (at / 24, at % 24 / 3);
                [16 * n + w, 16 * n + 8 + w, 32 + 8 * n + w][at % 3]
            }
        },
        _ => at,
    }
}

/// Calls `copy(place in a row's block, place in the interleaved block, bytes)` for every part of row `r`'s block: its
/// words, then what is left.
#[inline]
fn parts(ty: BlockType, r: usize, mut copy: impl FnMut(usize, usize, usize)) {
    let (words, rest) = (ty.block_bytes() / 4, ty.block_bytes() % 4);
    for at in 0..words {
        copy(4 * word_at(ty, at), 4 * (ROWS * at + r), 4);
    }
    copy(4 * words, 4 * ROWS * words + rest * r, rest);
}

/// Interleaves a group of [`ROWS`] rows; `scratch` gets a copy of it.
///
/// # Panics
/// If blocks of `ty` have no order, or a row is not made of whole blocks.
pub(crate) fn interleave(ty: BlockType, group: &mut [u8], scratch: &mut Vec<u8>) {
    let (block, row_bytes) = (ty.block_bytes(), group.len() / ROWS);
    assert!(has_order(ty) && row_bytes.is_multiple_of(block), "rows of whole blocks of {ty}");
    scratch.clear();
    scratch.extend_from_slice(group);
    for (r, row) in scratch.chunks_exact(row_bytes).enumerate() {
        let blocks = row.chunks_exact(block).zip(group.chunks_exact_mut(ROWS * block));
        for (plain, mixed) in blocks {
            parts(ty, r, |from, to, n| mixed[to..to + n].copy_from_slice(&plain[from..from + n]));
        }
    }
}

/// Row `r` of an interleaved group.
pub(crate) fn row_of(ty: BlockType, group: &[u8], r: usize, out: &mut [u8]) {
    let block = ty.block_bytes();
    for (mixed, plain) in group.chunks_exact(ROWS * block).zip(out.chunks_exact_mut(block)) {
        parts(ty, r, |to, from, n| plain[to..to + n].copy_from_slice(&mixed[from..from + n]));
    }
}

/// Decodes row `r` of an interleaved group, without memory of its own: it happens for every token.
pub(crate) fn decode_row(ty: BlockType, group: &[u8], r: usize, out: &mut [f32]) {
    let block = ty.block_bytes();
    let mut plain = [0; MOST_BYTES];
    let blocks = group.chunks_exact(ROWS * block).zip(out.chunks_exact_mut(ty.block_len()));
    for (mixed, out) in blocks {
        row_of(ty, mixed, r, &mut plain[..block]);
        quant::decode_row(ty, &plain[..block], out);
    }
}

/// The blocks of [`ROWS`] rows, one after the other, of an interleaved block.
pub(crate) fn separate(ty: BlockType, mixed: &[u8]) -> [[u8; MOST_BYTES]; ROWS] {
    let mut rows = [[0; MOST_BYTES]; ROWS];
    for (r, row) in rows.iter_mut().enumerate() {
        row_of(ty, mixed, r, &mut row[..ty.block_bytes()]);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_block_has_one_place_and_finds_back() {
        for ty in BlockType::ALL.into_iter().filter(|ty| has_order(*ty)) {
            assert!(ty.block_bytes() <= MOST_BYTES);
            let row_bytes = 3 * ty.block_bytes();
            let plain: Vec<u8> = (0..ROWS * row_bytes).map(|i| (i * 31 % 251) as u8).collect();
            let mut mixed = plain.clone();
            interleave(ty, &mut mixed, &mut Vec::new());
            assert_ne!(mixed, plain, "{ty}");
            let mut row = vec![0; row_bytes];
            for (r, expected) in plain.chunks_exact(row_bytes).enumerate() {
                row_of(ty, &mixed, r, &mut row);
                assert_eq!(row, expected, "{ty}, row {r}");
                let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
                let mut found = vec![0.0; 3 * ty.block_len()];
                let mut wanted = found.clone();
                decode_row(ty, &mixed, r, &mut found);
                quant::decode_row(ty, expected, &mut wanted);
                let [found, wanted]: [Vec<u32>; 2] = [found, wanted].map(bits);
                assert_eq!(found, wanted, "{ty}, row {r}, decoded");
            }
        }
    }
}
