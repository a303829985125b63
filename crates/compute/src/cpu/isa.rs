//! Which instructions the kernels may use.

/// An instruction set. Made only by detection, so owning one proves that this CPU has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Portable code, compiled for the target's baseline.
    Scalar,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// NEON, which every 64-bit ARM has, with `sdot`.
    #[cfg(target_arch = "aarch64")]
    Dotprod(Dotprod),
}

/// Proof that AVX2, FMA and F16C were detected.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

/// Proof that `sdot` was detected.
#[cfg(target_arch = "aarch64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dotprod(());

#[cfg(target_arch = "aarch64")]
impl Dotprod {
    fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("dotprod").then_some(Self(()))
    }
}

impl Isa {
    /// Every instruction set of this CPU, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let faster = Avx2::detect().map(Self::Avx2);
        #[cfg(target_arch = "aarch64")]
        let faster = Dotprod::detect().map(Self::Dotprod);
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let faster = None;
        std::iter::once(Self::Scalar).chain(faster)
    }

    /// The fastest instruction set of this CPU.
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self::Scalar)
    }

    /// `scalar`, `avx2`, `dotprod`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Dotprod(_) => "dotprod",
        }
    }
}

/// Instructions of this CPU that matter to kernels like these, and whether it has them; also those that no kernel here
/// uses.
pub fn features() -> Vec<(&'static str, bool)> {
    #[cfg(target_arch = "x86_64")]
    return vec![
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avxvnni", is_x86_feature_detected!("avxvnni")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    #[cfg(target_arch = "aarch64")]
    return vec![
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("dotprod", std::arch::is_aarch64_feature_detected!("dotprod")),
        ("i8mm", std::arch::is_aarch64_feature_detected!("i8mm")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return Vec::new();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalar_is_always_there_and_the_best_is_available() {
        assert_eq!(Isa::available().next(), Some(Isa::Scalar));
        assert!(Isa::available().any(|isa| isa == Isa::best()));
    }

    #[test]
    fn what_the_fastest_kernels_need_is_among_the_features() {
        let has = |name| features().into_iter().any(|(feature, has)| feature == name && has);
        match Isa::best().name() {
            "avx2" => assert!(has("avx2") && has("fma") && has("f16c")),
            "dotprod" => assert!(has("dotprod")),
            _ => assert!(!(has("dotprod") || has("avx2") && has("fma") && has("f16c"))),
        }
    }
}
