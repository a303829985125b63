//! Blocks of 256 with integer sub-scales: the "K" formats.

use super::{Format, Unpacked, f16_at, part};

/// 2-bit codes: 32 bytes hold four runs of 32 values, the lowest bits the first.
#[inline(always)]
fn crumbs(packed: &[u8; 64], out: &mut Unpacked) {
    let runs = out.codes.as_chunks_mut::<128>().0;
    for (runs, bytes) in runs.iter_mut().zip(packed.as_chunks::<32>().0) {
        // A copy, so that the compiler sees that the codes do not overlap it.
        let bytes = *bytes;
        for (i, byte) in bytes.iter().enumerate() {
            runs[i] = (byte & 3) as i8;
            runs[32 + i] = (byte >> 2 & 3) as i8;
            runs[64 + i] = (byte >> 4 & 3) as i8;
            runs[96 + i] = (byte >> 6) as i8;
        }
    }
}

/// 4-bit codes: 32 bytes hold two runs of 32 values, low nibbles the first.
#[inline(always)]
fn run_nibbles(packed: &[u8; 128], out: &mut Unpacked) {
    let runs = out.codes.as_chunks_mut::<64>().0;
    for (runs, bytes) in runs.iter_mut().zip(packed.as_chunks::<32>().0) {
        // A copy, so that the compiler sees that the codes do not overlap it.
        let bytes = *bytes;
        for (i, byte) in bytes.iter().enumerate() {
            runs[i] = (byte & 15) as i8;
            runs[32 + i] = (byte >> 4) as i8;
        }
    }
}

/// Adds `value` to code `i` where bit `i / 32` of byte `i % 32` is set, and `offset` to all.
#[inline(always)]
fn add_high_bits(mut bytes: [u8; 32], value: i8, offset: i8, out: &mut Unpacked) {
    for run in out.runs_of_32() {
        // One bit a run: vectors of bytes have no shifts by a variable.
        for (code, byte) in run.iter_mut().zip(&mut bytes) {
            *code += (*byte & 1) as i8 * value + offset;
            *byte >>= 1;
        }
    }
}

/// Bytes: 16 sub-scales (low nibble) and minima (high), 64 of codes, `d` f16, `dmin` f16.
/// Value: `d · sc · q - dmin · mn`.
#[derive(Clone, Copy)]
pub(crate) struct Q2K;

impl Format for Q2K {
    const LARGEST: i32 = 15 * 3;
    const LARGEST_MIN: i32 = 15;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        (out.scale, out.min_scale) = (f16_at(block, 80), -f16_at(block, 82));
        out.scales = part(block, 0).map(|b| (b & 15) as i8);
        out.mins = part(block, 0).map(|b| (b >> 4) as i8);
        crumbs(part(block, 16), out);
    }
}

/// Bytes: 32 of high bits, 64 of low codes, 12 of 6-bit sub-scales, `d` f16.
/// Value: `d · (sc - 32) · (q - 4)`, bit `i / 32` of high byte `i % 32` being bit 2 of `q`.
#[derive(Clone, Copy)]
pub(crate) struct Q3K;

impl Format for Q3K {
    const LARGEST: i32 = 32 * 4;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 108);
        let s: &[u8; 12] = part(block, 96);
        for (j, scale) in out.scales.iter_mut().enumerate() {
            let low = (s[j % 8] >> (4 * (j / 8))) & 15;
            let high = (s[8 + j % 4] >> (2 * (j / 4))) & 3;
            *scale = (low | high << 4) as i8 - 32;
        }
        crumbs(part(block, 32), out);
        add_high_bits(*part(block, 0), 4, -4, out);
    }
}

/// What `Q4_K` and `Q5_K` begin with: `d` f16, `dmin` f16, 12 bytes of eight 6-bit sub-scales and minima.
#[inline(always)]
fn unpack_head(block: &[u8], out: &mut Unpacked) {
    (out.scale, out.min_scale) = (f16_at(block, 0), -f16_at(block, 2));
    // Four numbers of a word at once. Those of the last four runs are nibbles of the third word; their two upper bits
    // are the upper bits of the others' bytes.
    let word = |at| u32::from_le_bytes(*part(block, at));
    let [first, second, third] = [word(4), word(8), word(12)];
    let (six, four, upper) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x3030_3030);
    let scales = [first & six, third & four | first >> 2 & upper];
    let mins = [second & six, third >> 4 & four | second >> 2 & upper];
    for (groups, words) in [(&mut out.scales, scales), (&mut out.mins, mins)] {
        for (groups, word) in groups.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            for (pair, number) in groups.as_chunks_mut::<2>().0.iter_mut().zip(word.to_le_bytes()) {
                pair.fill(number.cast_signed());
            }
        }
    }
}

/// Bytes: head, 128 of codes. Value: `d · sc · q - dmin · mn`.
#[derive(Clone, Copy)]
pub(crate) struct Q4K;

impl Format for Q4K {
    const LARGEST: i32 = 63 * 15;
    const LARGEST_MIN: i32 = 63;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        unpack_head(block, out);
        run_nibbles(part(block, 16), out);
    }
}

/// Bytes: head, 32 of high bits, 128 of low codes. Value: `d · sc · q - dmin · mn`, bit `i / 32` of high byte
/// `i % 32` being bit 4 of `q`.
#[derive(Clone, Copy)]
pub(crate) struct Q5K;

impl Format for Q5K {
    const LARGEST: i32 = 63 * 31;
    const LARGEST_MIN: i32 = 63;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        unpack_head(block, out);
        run_nibbles(part(block, 48), out);
        add_high_bits(*part(block, 16), 16, 0, out);
    }
}

/// Bytes: 128 of low codes, 64 of high codes, 16 signed sub-scales, `d` f16. Value: `d · sc · (q - 32)`.
#[derive(Clone, Copy)]
pub(crate) struct Q6K;

impl Format for Q6K {
    const LARGEST: i32 = 128 * 32;

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        out.scale = f16_at(block, 208);
        out.scales = part(block, 192).map(u8::cast_signed);
        for (j, run) in out.runs_of_32().enumerate() {
            let (n, c) = (j / 4, j % 4);
            // Two runs share their bytes' nibbles, four share those of the high codes.
            let low: &[u8; 32] = part(block, 64 * n + 32 * (c % 2));
            let high: &[u8; 32] = part(block, 128 + 32 * n);
            for (code, (low, high)) in run.iter_mut().zip(low.iter().zip(high)) {
                *code = (low >> (4 * (c / 2)) & 15 | (high >> (2 * c) & 3) << 4) as i8 - 32;
            }
        }
    }
}
