//! Ids and sizes as types, so that a layer is never taken for an expert, nor a slot for either.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u32);

        impl $name {
            /// The value as an index into a slice.
            pub const fn get(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index! {
    /// A trunk layer, counted from 0.
    LayerIndex
}
index! {
    /// A routed expert inside its layer, counted from 0.
    ExpertIndex
}
index! {
    /// A slot of the pool, counted over all size classes.
    SlotIndex
}
index! {
    /// A file of a checkpoint: 0 unless the checkpoint is split.
    FileIndex
}

/// One routed expert of the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ExpertKey {
    /// The layer that routes to it.
    pub layer: LayerIndex,
    /// Its number inside that layer.
    pub expert: ExpertIndex,
}

impl ExpertKey {
    /// Expert `expert` of layer `layer`.
    pub const fn new(layer: u32, expert: u32) -> Self {
        Self { layer: LayerIndex(layer), expert: ExpertIndex(expert) }
    }
}

impl fmt::Display for ExpertKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} expert {}", self.layer, self.expert)
    }
}

/// A point in a backend's stream of submitted work; work is complete up to some epoch.
///
/// Epoch 0 is complete from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Epoch(pub u64);

/// A number of bytes. Prints in binary units; parses `8GiB`, `512 MiB`, `8G`, `1.5GB`, `1073741824`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `n` KiB.
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// The count as a float, for ratios.
    pub const fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// `self - other`, or nothing when `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl std::ops::Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, n: u64) -> Self {
        Self(self.0 * n)
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        Self(iter.map(|b| b.0).sum())
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            n if n >= 1 << 40 => format!("{:.2} TiB", n as f64 / (1u64 << 40) as f64),
            n if n >= 1 << 30 => format!("{:.2} GiB", n as f64 / (1u64 << 30) as f64),
            n if n >= 1 << 20 => format!("{:.1} MiB", n as f64 / (1u64 << 20) as f64),
            n if n >= 1 << 10 => format!("{:.1} KiB", n as f64 / (1u64 << 10) as f64),
            n => format!("{n} B"),
        };
        f.pad(&text)
    }
}

/// Why a size could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseBytesError(String);

impl fmt::Display for ParseBytesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is not a size; write for example 8GiB, 512MiB or a number of bytes", self.0)
    }
}

impl std::error::Error for ParseBytesError {}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseBytesError(text.to_owned());
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let scale: u64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            _ => return Err(error()),
        };
        if !number.contains('.') {
            let count: u64 = number.parse().map_err(|_| error())?;
            return count.checked_mul(scale).map(Self).ok_or_else(error);
        }
        let value = number.parse::<f64>().map_err(|_| error())? * scale as f64;
        if value.is_finite() && value < 9e18 { Ok(Self(value as u64)) } else { Err(error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_in_binary_and_decimal_units() {
        for (text, bytes) in [
            ("8GiB", 8 << 30),
            ("8g", 8 << 30),
            ("1.5 MiB", 3 << 19),
            ("2GB", 2_000_000_000),
            ("123", 123),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
    }

    #[test]
    fn nonsense_sizes_are_refused() {
        for text in [
            "",
            "GiB",
            "8 apples",
            "-1",
            "1e9",
            "99999999999999999999",
            "8.8.8",
            "1e400g",
            "20000000T",
        ] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_print_in_binary_units() {
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes::gib(8).to_string(), "8.00 GiB");
    }
}
