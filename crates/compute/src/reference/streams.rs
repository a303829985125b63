//! Parallel residual streams: one row each of mixing, injecting and gating.

use quant::lanes;

use crate::reference::math::{sigmoid, silu};

/// Least square of a gate's size before its sign is put back.
const LEAST_GATE: f32 = 1e-6;

/// `x = silu(scale · x)`.
#[inline(always)]
pub(crate) fn scaled_silu(x: &mut [f32], scale: f32) {
    for x in x.iter_mut() {
        *x = silu(scale * *x);
    }
}

/// Columns from `first` on of `(Σ_s sigmoid(mix_s) ∘ n_s) / streams`, in order of streams of `hidden` values.
#[inline(always)]
pub(crate) fn mix(mix: &[f32], n: &[f32], (hidden, first): (usize, usize), out: &mut [f32]) {
    let streams = mix.len() / hidden;
    let columns = first..first + out.len();
    out.fill(0.0);
    for (mix, n) in mix.chunks_exact(hidden).zip(n.chunks_exact(hidden)) {
        for ((y, m), n) in out.iter_mut().zip(&mix[columns.clone()]).zip(&n[columns.clone()]) {
            *y = sigmoid(*m).mul_add(*n, *y);
        }
    }
    for y in out.iter_mut() {
        *y /= streams as f32;
    }
}

/// `to_s += 2·sigmoid(logits_s / streams) · y`.
#[inline(always)]
pub(crate) fn inject(logits: &[f32], y: &[f32], to: &mut [f32]) {
    for (logit, to) in logits.iter().zip(to.chunks_exact_mut(y.len())) {
        let weight = 2.0 * sigmoid(logit / logits.len() as f32);
        for (to, y) in to.iter_mut().zip(y) {
            *to = weight.mul_add(*y, *to);
        }
    }
}

/// `out_s = sigmoid(sign(g)·sqrt(max(|g|, 1e-6))) · v` with `g = (k_s · q_s) / sqrt(hidden)`.
#[inline(always)]
pub(crate) fn gated_value(k: &[f32], q: &[f32], v: &[f32], out: &mut [f32]) {
    let hidden = v.len();
    let streams = k.chunks_exact(hidden).zip(q.chunks_exact(hidden));
    for ((k, q), out) in streams.zip(out.chunks_exact_mut(hidden)) {
        let weight = sigmoid(signed_root(lanes::dot(k, q) / (hidden as f32).sqrt()));
        for (y, v) in out.iter_mut().zip(v) {
            *y = weight * v;
        }
    }
}

/// `sign(g)·sqrt(max(|g|, 1e-6))`; 0 and NaN stay what they are.
#[inline(always)]
fn signed_root(g: f32) -> f32 {
    if g == 0.0 {
        return g;
    }
    let size = if g.abs() < LEAST_GATE { LEAST_GATE } else { g.abs() };
    size.sqrt().copysign(g)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 * 6.0 - 3.0
        };
        (0..n).map(|_| next()).collect()
    }

    fn wide(x: &[f32]) -> Vec<f64> {
        x.iter().map(|x| f64::from(*x)).collect()
    }

    fn logistic(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    #[track_caller]
    fn close(found: &[f32], exact: &[f64], size: f64) {
        assert_eq!(found.len(), exact.len());
        for (i, (y, exact)) in found.iter().zip(exact).enumerate() {
            // Ten roundings of terms no larger than `size`.
            let tolerance = 10.0 * size / f64::from(1 << 24);
            assert!((f64::from(*y) - exact).abs() <= tolerance, "value {i}: {y}, not {exact}");
        }
    }

    #[test]
    fn streams_are_mixed_by_their_own_gates() {
        for (streams, hidden) in [(4, 37), (1, 16), (3, 5)] {
            let (m, n) = (noise(streams * hidden, 1), noise(streams * hidden, 2));
            let mut out = vec![f32::NAN; hidden];
            // In two parts of its columns.
            let (left, right) = out.split_at_mut(hidden / 3);
            mix(&m, &n, (hidden, 0), left);
            mix(&m, &n, (hidden, hidden / 3), right);
            let (m, n) = (wide(&m), wide(&n));
            let value = |i: usize| {
                let stream = |s: usize| logistic(m[s * hidden + i]) * n[s * hidden + i];
                (0..streams).map(stream).sum::<f64>() / streams as f64
            };
            close(&out, &(0..hidden).map(value).collect::<Vec<_>>(), 3.0);
        }
    }

    #[test]
    fn a_value_goes_into_each_stream_with_its_weight() {
        let (streams, hidden) = (4, 37);
        let (logits, y, to) = (noise(streams, 3), noise(hidden, 4), noise(streams * hidden, 5));
        let mut found = to.clone();
        inject(&logits, &y, &mut found);
        let value = |i: usize| {
            let weight = 2.0 * logistic(f64::from(logits[i / hidden]) / streams as f64);
            f64::from(to[i]) + weight * f64::from(y[i % hidden])
        };
        close(&found, &(0..streams * hidden).map(value).collect::<Vec<_>>(), 9.0);
        // A logit of 0 is the plain residual.
        let mut found = [1.0, 2.0, 3.0, 4.0];
        inject(&[0.0, 0.0], &[10.0, 20.0], &mut found);
        assert_eq!(found.map(f32::to_bits), [11.0_f32, 22.0, 13.0, 24.0].map(f32::to_bits));
    }

    #[test]
    fn the_scale_comes_before_the_gate() {
        let x = noise(35, 6);
        let mut found = x.clone();
        scaled_silu(&mut found, 0.25);
        let exact: Vec<f64> = wide(&x).iter().map(|x| x / 4.0 * logistic(x / 4.0)).collect();
        close(&found, &exact, 1.0);
    }

    #[test]
    fn a_gate_is_the_signed_root_of_the_scaled_product() {
        let (streams, hidden) = (3, 50);
        let (k, q, v) = (noise(streams * hidden, 7), noise(streams * hidden, 8), noise(hidden, 9));
        let mut found = vec![f32::NAN; streams * hidden];
        gated_value(&k, &q, &v, &mut found);
        let (k, q) = (wide(&k), wide(&q));
        let gate = |s: usize| {
            let part = s * hidden..(s + 1) * hidden;
            let dot: f64 = k[part.clone()].iter().zip(&q[part]).map(|(k, q)| k * q).sum();
            let g = dot / (hidden as f64).sqrt();
            assert!(g.abs() > 0.1, "a product whose root is well conditioned: {g}");
            logistic(g.signum() * g.abs().max(1e-6).sqrt())
        };
        let gates: Vec<f64> = (0..streams).map(gate).collect();
        let value = |i: usize| gates[i / hidden] * f64::from(v[i % hidden]);
        // The product's terms sum to `Σ|k·q| / sqrt(hidden) < 9·sqrt(hidden)`; its root has twice the slope below 1/4.
        let size = 9.0 * (hidden as f64).sqrt() * 3.0;
        close(&found, &(0..streams * hidden).map(value).collect::<Vec<_>>(), size);
    }

    #[test]
    fn small_gates_have_a_least_size_and_zero_has_no_sign() {
        let root = |g: f32| f64::from(signed_root(g));
        for (g, exact) in [(1e-9, 1e-3), (-1e-9, -1e-3), (4.0, 2.0), (-0.25, -0.5)] {
            assert!((root(g) - exact).abs() < 1e-9, "{g}");
        }
        assert_eq!((root(0.0), root(-0.0)), (0.0, 0.0));
        assert!(signed_root(f32::NAN).is_nan());
        let mut out = [f32::NAN; 2];
        gated_value(&[0.0, 0.0], &[1.0, 1.0], &[3.0, -5.0], &mut out);
        assert_eq!(out.map(f32::to_bits), [1.5_f32, -2.5].map(f32::to_bits));
    }
}
