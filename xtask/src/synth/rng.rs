//! Random numbers that are the same on every machine: integer arithmetic and exact float steps only.

/// Odd constant of the golden ratio, by which `SplitMix64` steps.
pub(super) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// One output of `SplitMix64` (Steele et al. 2014) for the state `value`.
pub(super) const fn splitmix64(value: u64) -> u64 {
    let mut v = value.wrapping_add(GOLDEN);
    v = (v ^ (v >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    v = (v ^ (v >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    v ^ (v >> 31)
}

/// xoshiro256++ (Blackman and Vigna 2019).
pub(super) struct Rng([u64; 4]);

impl Rng {
    /// The stream that belongs to a name under a seed; streams do not depend on the order in which they are used.
    pub(super) fn of(seed: u64, name: &str) -> Self {
        let mut state = splitmix64(seed);
        for byte in name.bytes() {
            state = splitmix64(state ^ u64::from(byte));
        }
        Self([1, 2, 3, 4].map(|n: u64| splitmix64(state.wrapping_add(GOLDEN.wrapping_mul(n)))))
    }

    pub(super) const fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// From 0 up to but not 1.
    pub(super) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u32 << 24) as f32
    }

    /// Mean 0, deviation 1, nearly normal: the sum of four uniform numbers, never beyond 3.5.
    pub(super) fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: i32 = [0, 16, 32, 48].map(|shift| i32::from((bits >> shift) as u16)).iter().sum();
        // Four times the variance of a uniform number is a third; its root over 65536.
        (sum - 131_070) as f32 * 2.642_857e-5
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splitmix64_is_the_published_generator() {
        // First outputs of the reference implementation for seed 1234567.
        let outputs = [6_457_827_717_110_365_317_u64, 3_203_168_211_198_807_973];
        assert_eq!(splitmix64(1_234_567), outputs[0]);
        assert_eq!(splitmix64(1_234_567_u64.wrapping_add(GOLDEN)), outputs[1]);
    }

    #[test]
    fn a_stream_depends_on_its_name_and_on_the_seed() {
        let first = |seed, name| Rng::of(seed, name).next();
        assert_eq!(first(1, "a.weight"), first(1, "a.weight"));
        assert_ne!(first(1, "a.weight"), first(2, "a.weight"));
        assert_ne!(first(1, "a.weight"), first(1, "b.weight"));
    }

    #[test]
    fn normal_numbers_have_mean_zero_and_deviation_one() {
        let mut rng = Rng::of(7, "normal");
        let n = 100_000;
        let (mut sum, mut squares) = (0.0_f64, 0.0_f64);
        for _ in 0..n {
            let x = f64::from(rng.normal());
            assert!(x.abs() < 3.5);
            sum += x;
            squares += x * x;
        }
        let (mean, variance) = (sum / f64::from(n), squares / f64::from(n));
        // Four standard errors: 1/sqrt(n) of the mean, sqrt(1.7/n) of the variance (kurtosis 2.7).
        assert!(mean.abs() < 0.013 && (variance - 1.0).abs() < 0.017, "{mean} {variance}");
    }
}
