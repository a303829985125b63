//! Rotary angles of the rows of a pass, in double precision, by software that is the same everywhere.

use crate::backend::{RopeSpec, Row, Yarn};

/// Frequencies of a model, and the angles of the current pass.
#[derive(Debug)]
pub(crate) struct Rope {
    rotary_dim: usize,
    frequencies: Vec<f64>,
    /// Multiplier of cos and sin.
    magnitude: f64,
    /// `[rows, rotary_dim]`: cosines, then sines.
    angles: Vec<f32>,
}

impl Rope {
    pub(crate) fn new(spec: &RopeSpec) -> Self {
        let half = spec.rotary_dim / 2;
        let plain =
            (0..half).map(|j| libm::pow(spec.theta, -2.0 * j as f64 / spec.rotary_dim as f64));
        let frequencies = match &spec.yarn {
            None => plain.collect(),
            Some(yarn) => {
                let ramp = Ramp::of(spec, yarn);
                plain
                    .enumerate()
                    .map(|(j, f)| f / yarn.factor * ramp.at(j) + f * (1.0 - ramp.at(j)))
                    .collect()
            }
        };
        let magnitude = spec.yarn.map_or(1.0, |yarn| {
            yarn.attention_factor.unwrap_or_else(|| 0.1 * libm::log(yarn.factor) + 1.0)
        });
        Self { rotary_dim: spec.rotary_dim, frequencies, magnitude, angles: Vec::new() }
    }

    pub(crate) const fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    pub(crate) fn begin_pass(&mut self, rows: &[Row]) {
        let mut angles = std::mem::take(&mut self.angles);
        angles.clear();
        for row in rows {
            self.push_angles(row.position, &mut angles);
        }
        self.angles = angles;
    }

    /// Adds the `rotary_dim` angles of a position.
    pub(crate) fn push_angles(&self, position: u32, angles: &mut Vec<f32>) {
        let turned = |frequency: &f64| f64::from(position) * frequency;
        let cos = |frequency| (libm::cos(turned(frequency)) * self.magnitude) as f32;
        let sin = |frequency| (libm::sin(turned(frequency)) * self.magnitude) as f32;
        angles.extend(self.frequencies.iter().map(cos));
        angles.extend(self.frequencies.iter().map(sin));
    }

    pub(crate) fn angles(&self) -> &[f32] {
        &self.angles
    }
}

/// How much each frequency is interpolated: 0 at the fast end, 1 at the slow end.
///
/// Source: Peng et al. 2023 (arXiv:2309.00071), eq. 17 to 23.
struct Ramp {
    low: f64,
    high: f64,
}

impl Ramp {
    fn of(spec: &RopeSpec, yarn: &Yarn) -> Self {
        let dim = spec.rotary_dim as f64;
        // The pair that turns `turns` times over the original context.
        let pair = |turns: f64| {
            dim * libm::log(yarn.original_context / (turns * 2.0 * std::f64::consts::PI))
                / (2.0 * libm::log(spec.theta))
        };
        let low = libm::floor(pair(yarn.beta_fast)).clamp(0.0, dim - 1.0);
        let high = libm::ceil(pair(yarn.beta_slow)).clamp(0.0, dim - 1.0);
        // Equal ends would divide by zero.
        Self { low, high: if high > low { high } else { low + 0.001 } }
    }

    fn at(&self, j: usize) -> f64 {
        ((j as f64 - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Role, SequenceId};

    fn angles(spec: RopeSpec, position: u32) -> Vec<f32> {
        let mut rope = Rope::new(&spec);
        rope.begin_pass(&[Row { sequence: SequenceId(0), position, role: Role::Prompt, token: 0 }]);
        rope.angles().to_vec()
    }

    #[test]
    fn angles_are_position_times_theta_to_the_minus_2j_over_r() {
        let got = angles(RopeSpec { rotary_dim: 8, theta: 1e4, yarn: None }, 1234);
        for j in 0..4 {
            let angle = 1234.0 * 1e4_f64.powf(-2.0 * j as f64 / 8.0);
            assert!((f64::from(got[j]) - angle.cos()).abs() < 1e-6);
            assert!((f64::from(got[4 + j]) - angle.sin()).abs() < 1e-6);
        }
    }

    #[test]
    fn yarn_leaves_fast_frequencies_and_divides_slow_ones() {
        let yarn = Yarn {
            factor: 4.0,
            original_context: 32_768.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: Some(1.0),
        };
        let spec = RopeSpec { rotary_dim: 128, theta: 1e6, yarn: Some(yarn) };
        let (plain, scaled) = (Rope::new(&RopeSpec { yarn: None, ..spec }), Rope::new(&spec));
        assert_eq!(plain.frequencies[0].to_bits(), scaled.frequencies[0].to_bits());
        assert!((plain.frequencies[63] / scaled.frequencies[63] - 4.0).abs() < 1e-9);
        let default =
            Rope::new(&RopeSpec { yarn: Some(Yarn { attention_factor: None, ..yarn }), ..spec });
        assert!((default.magnitude - (0.1 * 4.0_f64.ln() + 1.0)).abs() < 1e-12);
    }
}
