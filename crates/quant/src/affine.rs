//! The storage types that a GGUF file cannot name: MLX's affine quantisation, and what FP8 checkpoints use.
//!
//! Their files keep codes and scales in separate tensors. In memory they are blocks like those of GGML, each with its
//! scale in front, so that a row is one run of bytes.

/// How a block stores its scale, and its bias if it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScaleType {
    /// Upper half of a single.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl ScaleType {
    /// Every type.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Bytes of a scale.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// MLX's affine quantisation: unsigned codes, with a scale and a bias for each group.
///
/// A block is a group: scale, bias, then `group · bits / 8` bytes of codes, one bit stream with the lowest bits first.
/// Value: `scale · code + bias`, rounded to f32 after the product and after the sum. (MLX itself rounds the result to
/// the type of the scales.) Scales may be negative; then the bias is the group's largest value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Affine {
    bits: u8,
    group: u8,
    scales: ScaleType,
}

/// The names of one width of codes: by group, then by type of scales.
macro_rules! names {
    ($bits:literal) => {
        [names!($bits, 32), names!($bits, 64), names!($bits, 128)]
    };
    ($bits:literal, $group:literal) => {
        [
            concat!("MLX", $bits, "/", $group),
            concat!("MLX", $bits, "/", $group, "-F16"),
            concat!("MLX", $bits, "/", $group, "-F32"),
        ]
    };
}

impl Affine {
    /// Widths of codes that exist.
    pub const BITS: [u32; 6] = [2, 3, 4, 5, 6, 8];
    /// Group sizes that exist.
    pub const GROUPS: [u32; 3] = [32, 64, 128];

    /// The format with codes of `bits` and groups of `group` values; nothing if MLX has none such.
    pub const fn new(bits: u32, group: u32, scales: ScaleType) -> Option<Self> {
        match (bits, group) {
            (2 | 3 | 4 | 5 | 6 | 8, 32 | 64 | 128) => {
                Some(Self { bits: bits as u8, group: group as u8, scales })
            }
            _ => None,
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> usize {
        self.bits as usize
    }

    /// Values in a group.
    pub const fn group(self) -> usize {
        self.group as usize
    }

    /// How scales and biases are stored.
    pub const fn scales(self) -> ScaleType {
        self.scales
    }

    /// Bytes of a group's codes.
    pub const fn code_bytes(self) -> usize {
        self.group() * self.bits() / 8
    }

    /// `MLX`, bits, group, and the type of the scales where it is not the usual BF16.
    pub(crate) const fn name(self) -> &'static str {
        const NAMES: [[[&str; 3]; 3]; 6] =
            [names!(2), names!(3), names!(4), names!(5), names!(6), names!(8)];
        let bits = if self.bits == 8 { 5 } else { self.bits as usize - 2 };
        NAMES[bits][self.group as usize / 64][self.scales as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_exist_for_the_widths_and_groups_of_mlx_and_no_others() {
        let mut names = Vec::new();
        for scales in ScaleType::ALL {
            for bits in 0..=300 {
                for group in 0..=300 {
                    let Some(affine) = Affine::new(bits, group, scales) else {
                        assert!(!Affine::BITS.contains(&bits) || !Affine::GROUPS.contains(&group));
                        continue;
                    };
                    assert_eq!(
                        (affine.bits() as u32, affine.group() as u32, affine.scales()),
                        (bits, group, scales)
                    );
                    assert_eq!(8 * affine.code_bytes() as u32, bits * group);
                    let name = format!("MLX{bits}/{group}");
                    match scales {
                        ScaleType::Bf16 => assert_eq!(affine.name(), name),
                        _ => assert_eq!(affine.name(), format!("{name}-{scales:?}")),
                    }
                    names.push(affine.name());
                }
            }
        }
        assert_eq!(names.len(), 54);
    }
}
