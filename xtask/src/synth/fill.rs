//! Bytes of a tensor: what each role's values look like, and a stream that makes them.
//!
//! Deviations are chosen so that a network of them behaves: normalised inputs give outputs near 1, routers prefer
//! some experts but not always the same, decays lie where trained ones do.

use super::rng::Rng;

/// Deviation of the codes 0 to 15, each as likely.
const CODE_DEVIATION: f32 = 4.609_772;
/// Mean of the codes.
const CODE_MEAN: f32 = 7.5;

/// What a tensor's values are.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fill {
    /// 4-bit codes, all as likely.
    Codes,
    /// bf16 scales of weights with this deviation, half of them negative.
    Scales(f32),
    /// The bf16 biases that bring those weights to mean 0.
    Biases(f32),
    /// bf16, nearly normal.
    Normal {
        /// What they lie around.
        mean: f32,
        /// How far.
        deviation: f32,
    },
    /// bf16 rows of this length, nearly normal, each with a deviation of its own: some experts are asked for more.
    Rows {
        /// Values of a row.
        len: u64,
        /// Of an average row.
        deviation: f32,
    },
    /// bf16, all as likely.
    Uniform {
        /// Least.
        from: f32,
        /// Not reached.
        to: f32,
    },
    /// These numbers, 64 bits each.
    Integers(Vec<u64>),
}

impl Fill {
    /// Bytes of one value as the stream makes them.
    const fn step(&self) -> usize {
        match self {
            Self::Codes | Self::Integers(_) => 8,
            _ => 2,
        }
    }
}

/// The bytes of one tensor, from the first to the last.
pub(super) struct Stream<'a> {
    fill: &'a Fill,
    rng: Rng,
    /// Values made so far.
    at: u64,
    /// What the current row's deviation is multiplied by.
    row: f32,
}

impl<'a> Stream<'a> {
    pub(super) fn new(fill: &'a Fill, seed: u64, name: &str) -> Self {
        // Scales and biases of a module come from one stream: a bias follows from its scale.
        let module = name.strip_suffix(".biases").or_else(|| name.strip_suffix(".scales"));
        let rng = module.map_or_else(
            || Rng::of(seed, name),
            |module| Rng::of(seed, &format!("{module}.scales")),
        );
        Self { fill, rng, at: 0, row: 1.0 }
    }

    /// Makes the next bytes.
    ///
    /// # Panics
    /// If the length is not a multiple of 8 where the values need it; a caller takes chunks of a multiple of 8.
    pub(super) fn next(&mut self, out: &mut [u8]) {
        let step = self.fill.step();
        assert!(out.len().is_multiple_of(step), "{} bytes are not whole values", out.len());
        for bytes in out.chunks_exact_mut(step) {
            match self.fill {
                Fill::Codes => bytes.copy_from_slice(&self.rng.next().to_le_bytes()),
                Fill::Integers(values) => {
                    bytes.copy_from_slice(&values[self.at as usize].to_le_bytes());
                }
                _ => {
                    let value = self.value();
                    bytes.copy_from_slice(&bf16(value).to_le_bytes());
                }
            }
            self.at += 1;
        }
    }

    fn value(&mut self) -> f32 {
        let rng = &mut self.rng;
        match *self.fill {
            Fill::Scales(deviation) => scale(rng, deviation),
            Fill::Biases(deviation) => -CODE_MEAN * widen(bf16(scale(rng, deviation))),
            Fill::Normal { mean, deviation } => mean + deviation * rng.normal(),
            Fill::Rows { len, deviation } => {
                if self.at.is_multiple_of(len) {
                    self.row = 0.6 + 0.8 * rng.unit();
                }
                self.row * deviation * rng.normal()
            }
            Fill::Uniform { from, to } => from + (to - from) * rng.unit(),
            Fill::Codes | Fill::Integers(_) => unreachable!("these are no bf16 values"),
        }
    }
}

fn scale(rng: &mut Rng, deviation: f32) -> f32 {
    let size = deviation / CODE_DEVIATION * (0.75 + 0.5 * rng.unit());
    if rng.next() >> 63 == 0 { size } else { -size }
}

/// Rounded to the nearest, ties to even; finite values only.
const fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

const fn widen(value: u16) -> f32 {
    f32::from_bits((value as u32) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(fill: &Fill, name: &str, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        Stream::new(fill, 1, name).next(&mut out);
        out
    }

    fn values(fill: &Fill, name: &str, n: usize) -> Vec<f32> {
        let bytes = bytes(fill, name, 2 * n);
        bytes.as_chunks::<2>().0.iter().map(|b| widen(u16::from_le_bytes(*b))).collect()
    }

    #[test]
    fn bf16_rounds_to_the_nearest_even() {
        // 1 + 2^-8 lies between 1 and 1 + 2^-7; a bit more goes up.
        assert_eq!(widen(bf16(1.0 + 1.0 / 256.0)), 1.0);
        assert_eq!(widen(bf16(1.004)), 1.007_812_5);
        assert_eq!(widen(bf16(-0.0)).to_bits(), (-0.0_f32).to_bits());
    }

    #[test]
    fn decoded_weights_have_mean_zero_and_the_deviation_asked_for() {
        let (n, group, deviation) = (64, 64, 0.25);
        let codes = bytes(&Fill::Codes, "m.weight", n * group / 2);
        let scales = values(&Fill::Scales(deviation), "m.scales", n);
        let biases = values(&Fill::Biases(deviation), "m.biases", n);
        let weight = |at: usize| {
            let code = codes[at / 2] >> (4 * (at % 2)) & 15;
            scales[at / group] * f32::from(code) + biases[at / group]
        };
        let count = (n * group) as f32;
        let mean = (0..n * group).map(weight).sum::<f32>() / count;
        let squares = (0..n * group).map(|at| weight(at).powi(2)).sum::<f32>() / count;
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((squares.sqrt() / deviation - 1.0).abs() < 0.05, "{}", squares.sqrt());
        let negative = scales.iter().filter(|scale| **scale < 0.0).count();
        assert!((n / 4..=3 * n / 4).contains(&negative), "{negative} of {n} scales are negative");
    }

    #[test]
    fn the_bytes_do_not_depend_on_the_pieces_they_are_made_in() {
        for fill in [
            Fill::Codes,
            Fill::Scales(0.1),
            Fill::Rows { len: 24, deviation: 1.0 },
            Fill::Uniform { from: -1.0, to: 2.0 },
            Fill::Integers((0..100).collect()),
        ] {
            let whole = bytes(&fill, "x.weight", 800);
            let mut pieces = vec![0; 800];
            let mut stream = Stream::new(&fill, 1, "x.weight");
            for piece in pieces.chunks_mut(56) {
                stream.next(piece);
            }
            assert_eq!(whole, pieces, "{fill:?}");
        }
    }

    #[test]
    fn rows_of_a_router_differ_in_length() {
        let len = 512;
        let values =
            values(&Fill::Rows { len: len as u64, deviation: 1.0 }, "gate.weight", 64 * len);
        let lengths = values.chunks(len).map(|row| row.iter().map(|x| x * x).sum::<f32>().sqrt());
        let lengths: Vec<f32> = lengths.collect();
        let (least, most) =
            lengths.iter().fold((f32::MAX, 0.0_f32), |(a, b), x| (a.min(*x), b.max(*x)));
        assert!(most > 1.7 * least && most < 2.7 * least, "{least} to {most}");
    }
}
