//! Numbers for tests.

use quant::{BlockType, ScaleType};

/// Bytes without a short period (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }

    /// Uneven magnitudes, both signs.
    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        let float = |bits: u64| {
            let unit = (bits >> 40) as f32 / 8_388_608.0 - 1.0;
            unit * ((bits & 7) as f32).exp2()
        };
        (0..n).map(|_| float(self.next())).collect()
    }
}

/// Where a block keeps float scales, and their type; `IQ1_M` spreads its scale over the upper nibbles of four words.
pub(crate) fn scale_places(ty: BlockType) -> (&'static [usize], ScaleType) {
    let places: &[usize] = match ty {
        BlockType::Affine(affine) => {
            let places: &[usize] = if affine.scales().bytes() == 4 { &[0, 4] } else { &[0, 2] };
            return (places, affine.scales());
        }
        BlockType::Fp8(scales) => return (&[0], scales),
        BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => &[0, 2],
        BlockType::Q2K => &[80, 82],
        BlockType::Q3K => &[108],
        BlockType::Q6K => &[208],
        BlockType::F32
        | BlockType::F16
        | BlockType::Bf16
        | BlockType::E4m3
        | BlockType::Iq1M
        | BlockType::Mxfp4 => &[],
        _ => &[0],
    };
    (places, ScaleType::F16)
}

/// Sets every float scale of a block to 1.
pub(crate) fn set_scales_to_one(ty: BlockType, block: &mut [u8]) {
    let (places, scales) = scale_places(ty);
    let one = match scales {
        ScaleType::Bf16 => &[0x80, 0x3f][..],
        ScaleType::F16 => &[0x00, 0x3c],
        ScaleType::F32 => &[0, 0, 0x80, 0x3f],
    };
    for place in places {
        block[*place..*place + one.len()].copy_from_slice(one);
    }
}

/// Makes every scale finite and of a size that keeps sums finite, by changing bits of its exponent, and NaN numbers.
pub(crate) fn tame(ty: BlockType, rows: &mut [u8]) {
    let (places, scales) = scale_places(ty);
    for block in rows.chunks_exact_mut(ty.block_bytes()) {
        for place in places {
            match scales {
                ScaleType::F16 => block[place + 1] &= 0xbf,
                ScaleType::Bf16 => block[place + 1] = block[place + 1] & 0x80 | 0x3f,
                ScaleType::F32 => block[place + 3] = block[place + 3] & 0x80 | 0x3f,
            }
        }
        match ty {
            BlockType::Iq1M => block[55] &= 0xbf,
            BlockType::Mxfp4 => block[0] = 100 + block[0] % 60,
            BlockType::F32 => block[3] = block[3] & 0x80 | 0x3f,
            BlockType::F16 => block[1] &= 0xbf,
            BlockType::Bf16 => block[1] = block[1] & 0x80 | 0x3f,
            BlockType::Fp8(_) => {
                let codes = &mut block[scales.bytes()..];
                codes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code -= 1);
            }
            BlockType::E4m3 if block[0] & 0x7f == 0x7f => block[0] -= 1,
            _ => {}
        }
    }
}

/// Random rows of a type, with scales that keep sums finite.
pub(crate) fn weights(random: &mut Random, ty: BlockType, n_out: usize, n_in: usize) -> Vec<u8> {
    let mut rows = random.bytes(n_out * ty.row_bytes(n_in).unwrap());
    tame(ty, &mut rows);
    rows
}
