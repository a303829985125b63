//! MLX's groups: scale, bias, and one bit stream of codes.

use super::{Format, Unpacked, f16_at, part, u16_at};
use crate::affine::ScaleType;
use crate::float::bf16_to_f32;
use crate::q8::GROUP;

/// A scale, and what follows it.
#[inline(always)]
pub(crate) fn split_scale(scales: ScaleType, block: &[u8]) -> (f32, &[u8]) {
    let scale = match scales {
        ScaleType::Bf16 => bf16_to_f32(u16_at(block, 0)),
        ScaleType::F16 => f16_at(block, 0),
        ScaleType::F32 => f32::from_le_bytes(*part(block, 0)),
    };
    (scale, &block[scales.bytes()..])
}

/// Bytes: scale, bias, an eighth of `group · BITS` of codes, the lowest bits first. Value: `scale · q + bias`.
///
/// Groups of 32, 64 and 128 share their code, which is compiled into every caller.
#[derive(Clone, Copy)]
pub(crate) struct Affine<const BITS: usize>(pub(crate) crate::Affine);

impl<const BITS: usize> Format for Affine<BITS> {
    const LARGEST: i32 = (1 << BITS) - 1;
    const LARGEST_MIN: i32 = 1;
    const OFFSET: i16 = if BITS == 8 { 128 } else { 0 };

    #[inline(always)]
    fn unpack(self, block: &[u8], out: &mut Unpacked) {
        let (scale, rest) = split_scale(self.0.scales(), block);
        let (bias, codes) = split_scale(self.0.scales(), rest);
        (out.scale, out.min_scale) = (scale, bias);
        let groups = self.0.group() / GROUP;
        out.scales[..groups].fill(1);
        out.mins[..groups].fill(1);
        let eights = codes.as_chunks::<BITS>().0.iter();
        for (packed, codes) in eights.zip(out.codes.as_chunks_mut().0) {
            *codes = eight_codes(packed);
        }
    }
}

/// Eight codes take exactly `BITS` bytes. Those of 8 bit come less their [`Format::OFFSET`].
#[inline(always)]
fn eight_codes<const BITS: usize>(packed: &[u8; BITS]) -> [i8; 8] {
    if BITS == 8 {
        return std::array::from_fn(|j| (packed[j] ^ 0x80).cast_signed());
    }
    let mut word = [0; 8];
    word[..BITS].copy_from_slice(packed);
    let word = u64::from_le_bytes(word);
    std::array::from_fn(|j| (word >> (BITS * j)) as i8 & ((1 << BITS) - 1) as i8)
}
