//! The storage types of weights.

use std::fmt;

use crate::affine::{Affine, ScaleType};

macro_rules! block_types {
    ($($(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $len:literal, $bytes:literal;)*) => {
        /// How the values of a weight are stored: the GGML types that people ship, and those of MLX and FP8
        /// checkpoints.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum BlockType {
            $($(#[$doc])* $variant,)*
            /// MLX's affine quantisation; see [`Affine`].
            Affine(Affine),
            /// Blocks of 128 8-bit floats (E4M3) behind a scale of this type. Value: `scale · float`.
            Fp8(ScaleType),
            /// 8-bit floats (E4M3) alone: rows of a table that has one scale beside it.
            E4m3,
        }

        impl BlockType {
            /// The types that GGUF files can name.
            pub const GGML: [Self; 23] = [$(Self::$variant,)*];

            /// The type's number in GGUF files, if it has one.
            pub const fn ggml_id(self) -> Option<u32> {
                match self {
                    $(Self::$variant => Some($id),)*
                    Self::Affine(_) | Self::Fp8(_) | Self::E4m3 => None,
                }
            }

            /// The type with this number in GGUF files, if it is one of ours.
            pub const fn from_ggml(id: u32) -> Option<Self> {
                match id { $($id => Some(Self::$variant),)* _ => None }
            }

            /// The name that GGML gives it, or ours: `MLX4/64` is MLX's 4 bit in groups of 64.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                    Self::Affine(affine) => affine.name(),
                    Self::Fp8(ScaleType::Bf16) => "FP8-BF16",
                    Self::Fp8(ScaleType::F16) => "FP8-F16",
                    Self::Fp8(ScaleType::F32) => "FP8-F32",
                    Self::E4m3 => "E4M3",
                }
            }

            /// Values in a block.
            pub const fn block_len(self) -> usize {
                match self {
                    $(Self::$variant => $len,)*
                    Self::Affine(affine) => affine.group(),
                    Self::Fp8(_) => 128,
                    Self::E4m3 => 1,
                }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(Self::$variant => $bytes,)*
                    Self::Affine(affine) => 2 * affine.scales().bytes() + affine.code_bytes(),
                    Self::Fp8(scales) => scales.bytes() + 128,
                    Self::E4m3 => 1,
                }
            }
        }
    };
}

block_types! {
    /// IEEE single.
    F32 = 0, "F32", 1, 4;
    /// IEEE half.
    F16 = 1, "F16", 1, 2;
    /// Upper half of a single.
    Bf16 = 30, "BF16", 1, 2;
    /// 4 bit, scale.
    Q4_0 = 2, "Q4_0", 32, 18;
    /// 4 bit, scale and minimum.
    Q4_1 = 3, "Q4_1", 32, 20;
    /// 5 bit, scale.
    Q5_0 = 6, "Q5_0", 32, 22;
    /// 5 bit, scale and minimum.
    Q5_1 = 7, "Q5_1", 32, 24;
    /// 8 bit, scale.
    Q8_0 = 8, "Q8_0", 32, 34;
    /// 2 bit, 4-bit scales and minima of 16.
    Q2K = 10, "Q2_K", 256, 84;
    /// 3 bit, 6-bit scales of 16.
    Q3K = 11, "Q3_K", 256, 110;
    /// 4 bit, 6-bit scales and minima of 32.
    Q4K = 12, "Q4_K", 256, 144;
    /// 5 bit, 6-bit scales and minima of 32.
    Q5K = 13, "Q5_K", 256, 176;
    /// 6 bit, 8-bit scales of 16.
    Q6K = 14, "Q6_K", 256, 210;
    /// Codebook of 2,048 ternary vectors of 8.
    Iq1S = 19, "IQ1_S", 256, 50;
    /// The same with finer scales.
    Iq1M = 29, "IQ1_M", 256, 56;
    /// Codebook of 256 vectors of 8, 7-bit signs.
    Iq2Xxs = 16, "IQ2_XXS", 256, 66;
    /// Codebook of 512 vectors of 8, 7-bit signs.
    Iq2Xs = 17, "IQ2_XS", 256, 74;
    /// Codebook of 1,024 vectors of 8, 8-bit signs.
    Iq2S = 22, "IQ2_S", 256, 82;
    /// Codebook of 256 vectors of 4, 7-bit signs.
    Iq3Xxs = 18, "IQ3_XXS", 256, 98;
    /// Codebook of 512 vectors of 4, 8-bit signs.
    Iq3S = 21, "IQ3_S", 256, 110;
    /// 4-bit codes into 16 uneven levels.
    Iq4Nl = 20, "IQ4_NL", 32, 18;
    /// The same with 6-bit scales of 32.
    Iq4Xs = 23, "IQ4_XS", 256, 136;
    /// 4-bit floats (E2M1) with a power-of-two scale.
    Mxfp4 = 39, "MXFP4", 32, 17;
}

/// An affine type that exists, or the constant that asks for it does not compile.
const fn affine(bits: u32, group: u32, scales: ScaleType) -> BlockType {
    BlockType::Affine(Affine::new(bits, group, scales).expect("a width and a group of MLX"))
}

impl BlockType {
    /// Every GGML type, every affine type with BF16 scales, some with others, and every FP8 type.
    pub const ALL: [Self; 51] = {
        let mut all = [Self::F32; 51];
        let mut n = 0;
        while n < Self::GGML.len() {
            all[n] = Self::GGML[n];
            n += 1;
        }
        let mut i = 0;
        while i < 18 {
            all[n] = affine(Affine::BITS[i / 3], Affine::GROUPS[i % 3], ScaleType::Bf16);
            (n, i) = (n + 1, i + 1);
        }
        let others = [
            affine(4, 64, ScaleType::F16),
            affine(5, 32, ScaleType::F16),
            affine(8, 128, ScaleType::F16),
            affine(3, 128, ScaleType::F32),
            affine(4, 32, ScaleType::F32),
            affine(8, 64, ScaleType::F32),
            Self::Fp8(ScaleType::Bf16),
            Self::Fp8(ScaleType::F16),
            Self::Fp8(ScaleType::F32),
            Self::E4m3,
        ];
        i = 0;
        while i < others.len() {
            all[n] = others[i];
            (n, i) = (n + 1, i + 1);
        }
        assert!(n == all.len());
        all
    };

    /// Bytes of a row of `n_in` values; nothing if the row is not made of whole blocks, or too long to address.
    pub const fn row_bytes(self, n_in: usize) -> Option<usize> {
        if !n_in.is_multiple_of(self.block_len()) {
            return None;
        }
        (n_in / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether products are taken in float whatever the activations are.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16 | Self::Fp8(_) | Self::E4m3)
    }

    /// Values that share an activation scale in a product with 8-bit activations: the weight's own block.
    pub const fn activation_block(self) -> usize {
        self.block_len()
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_of_ggml_is_found_by_its_number_and_others_have_none() {
        for ty in BlockType::ALL {
            assert_eq!(
                ty.ggml_id().and_then(BlockType::from_ggml).is_some(),
                BlockType::GGML.contains(&ty)
            );
        }
        for ty in BlockType::GGML {
            assert_eq!(ty.ggml_id().and_then(BlockType::from_ggml), Some(ty));
        }
        assert_eq!(BlockType::from_ggml(4), None);
        assert_eq!(BlockType::from_ggml(200), None);
    }

    #[test]
    fn types_and_names_are_distinct() {
        let types: std::collections::BTreeSet<_> = BlockType::ALL.into_iter().collect();
        let names: std::collections::BTreeSet<_> = BlockType::ALL.map(BlockType::name).into();
        assert_eq!((types.len(), names.len()), (BlockType::ALL.len(), BlockType::ALL.len()));
        assert_eq!(affine(4, 64, ScaleType::Bf16).to_string(), "MLX4/64");
    }

    #[test]
    fn a_row_is_made_of_whole_blocks() {
        assert_eq!(BlockType::Q4K.row_bytes(512), Some(288));
        assert_eq!(BlockType::Q4K.row_bytes(16), None);
        assert_eq!(BlockType::F32.row_bytes(usize::MAX), None);
        assert_eq!(BlockType::Q8_0.row_bytes(usize::MAX - 31), None);
        assert_eq!(affine(4, 64, ScaleType::Bf16).row_bytes(128), Some(2 * (4 + 32)));
        assert_eq!(affine(3, 32, ScaleType::F32).row_bytes(64), Some(2 * (8 + 12)));
        assert_eq!(affine(3, 128, ScaleType::F16).row_bytes(64), None);
        assert_eq!(BlockType::Fp8(ScaleType::F32).row_bytes(256), Some(2 * (4 + 128)));
        assert_eq!(BlockType::Fp8(ScaleType::Bf16).row_bytes(64), None);
        assert_eq!(BlockType::E4m3.row_bytes(160), Some(160));
    }
}
