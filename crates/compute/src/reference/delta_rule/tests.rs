use super::*;
use crate::backend::RecurrentShape;

const SHAPE: RecurrentShape = RecurrentShape {
    layers: 1,
    key_heads: 2,
    value_heads: 4,
    key_dim: 16,
    value_dim: 24,
    conv_kernel: 4,
    order: HeadOrder::Grouped,
};

struct Case {
    conv: Vec<f32>,
    z: Vec<f32>,
    ba: Vec<f32>,
    rows: usize,
    gate: Gate,
}

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

impl Case {
    fn new(rows: usize) -> Self {
        let width = SHAPE.conv_channels();
        let values = SHAPE.value_heads * SHAPE.value_dim;
        Self {
            conv: noise(rows * width, 1),
            z: noise(rows * values, 2),
            ba: noise(rows * 2 * SHAPE.value_heads, 3),
            rows,
            gate: Gate::Silu,
        }
    }

    /// Output `[rows, nv·dv]` and state of all heads.
    fn run(
        &self,
        rows: std::ops::Range<usize>,
        role: Role,
        order: HeadOrder,
        state: &mut [f32],
    ) -> Vec<f32> {
        let shape = RecurrentShape { order, ..SHAPE };
        let values = shape.value_heads * shape.value_dim;
        let cut = |data: &[f32]| {
            let width = data.len() / self.rows;
            data[rows.start * width..rows.end * width].to_vec()
        };
        let (conv, z, ba) = (cut(&self.conv), cut(&self.z), cut(&self.ba));
        let mut out = vec![0.0; rows.len() * values];
        let job = DeltaRule {
            shape,
            role,
            first_position: rows.start,
            conv: &conv,
            z: &z,
            ba: &ba,
            a: &[-0.5, -1.0, -0.2, -2.0],
            dt_bias: &[0.1, -0.3, 0.5, 0.0],
            norm: &[1.1; 24],
            eps: 1e-6,
            gate: self.gate,
            state: &mut [],
            out: &mut [],
        };
        let mut scratch = Scratch::default();
        for (h, state) in state.chunks_exact_mut(shape.key_dim * shape.value_dim).enumerate() {
            head(&job, rows.len(), h, state, &mut scratch, |row, o| {
                out[row * values + h * shape.value_dim..][..shape.value_dim].copy_from_slice(o);
            });
        }
        out
    }
}

fn empty_state() -> Vec<f32> {
    vec![0.0; SHAPE.value_heads * SHAPE.key_dim * SHAPE.value_dim]
}

/// The recurrence as it is defined, in double precision.
fn exact(case: &Case, order: HeadOrder) -> Vec<f64> {
    let (dk, dv, nk, nv) = (SHAPE.key_dim, SHAPE.value_dim, SHAPE.key_heads, SHAPE.value_heads);
    let (a, dt) = ([-0.5, -1.0, -0.2, -2.0], [0.1, -0.3, 0.5, 0.0]);
    let at = |data: &[f32], i: usize| f64::from(data[i]);
    let mut out = vec![0.0; case.rows * nv * dv];
    for head in 0..nv {
        let key_head = if order == HeadOrder::Grouped { head / (nv / nk) } else { head % nk };
        let mut s = vec![0.0; dk * dv];
        for row in 0..case.rows {
            let base = row * SHAPE.conv_channels();
            let unit = |start: usize, scale: f64| -> Vec<f64> {
                let x: Vec<f64> = (0..dk).map(|i| at(&case.conv, base + start + i)).collect();
                let norm = (x.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(|v| v / norm * scale).collect()
            };
            let q = unit(key_head * dk, 1.0 / (dk as f64).sqrt());
            let k = unit((nk + key_head) * dk, 1.0);
            let beta = 1.0 / (1.0 + (-at(&case.ba, row * 2 * nv + head)).exp());
            let decay =
                (a[head] * (at(&case.ba, row * 2 * nv + nv + head) + dt[head]).exp().ln_1p()).exp();
            for s in &mut s {
                *s *= decay;
            }
            let mut o = vec![0.0; dv];
            for j in 0..dv {
                let read: f64 = (0..dk).map(|i| k[i] * s[i * dv + j]).sum();
                let d = beta * (at(&case.conv, base + 2 * nk * dk + head * dv + j) - read);
                (0..dk).for_each(|i| s[i * dv + j] += k[i] * d);
                o[j] = (0..dk).map(|i| q[i] * s[i * dv + j]).sum();
            }
            let rms = (o.iter().map(|v| v * v).sum::<f64>() / dv as f64 + 1e-6).sqrt();
            for j in 0..dv {
                let z = at(&case.z, (row * nv + head) * dv + j);
                let factor = if case.gate == Gate::Silu { z } else { 1.0 };
                out[(row * nv + head) * dv + j] =
                    o[j] / rms * f64::from(1.1_f32) * factor / (1.0 + (-z).exp());
            }
        }
    }
    out
}

#[test]
fn both_forms_follow_the_recurrence() {
    for (order, gate) in [
        (HeadOrder::Grouped, Gate::Silu),
        (HeadOrder::Tiled, Gate::Silu),
        (HeadOrder::Grouped, Gate::Sigmoid),
    ] {
        let case = Case { gate, ..Case::new(150) };
        let exact = exact(&case, order);
        for role in [Role::Generated, Role::Prompt] {
            let out = case.run(0..case.rows, role, order, &mut empty_state());
            let worst =
                out.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
            assert!(worst < 2e-5, "{role:?} {order:?} {gate:?}: {worst}");
        }
    }
}

#[test]
fn a_row_of_a_chunk_does_not_depend_on_what_follows() {
    let case = Case::new(150);
    let whole = case.run(0..150, Role::Prompt, HeadOrder::Grouped, &mut empty_state());
    for cut in [1, 40, 64, 65, 127] {
        let part = case.run(0..cut, Role::Prompt, HeadOrder::Grouped, &mut empty_state());
        assert_eq!(part[..], whole[..part.len()], "{cut} rows");
    }
    let mut state = empty_state();
    let mut pieces = case.run(0..64, Role::Prompt, HeadOrder::Grouped, &mut state);
    pieces.extend(case.run(64..150, Role::Prompt, HeadOrder::Grouped, &mut state));
    assert_eq!(pieces, whole);
}

#[test]
fn the_state_after_a_chunk_continues_in_steps() {
    let case = Case::new(100);
    let mut state = empty_state();
    case.run(0..70, Role::Prompt, HeadOrder::Grouped, &mut state);
    let steps = case.run(70..100, Role::Generated, HeadOrder::Grouped, &mut state);
    let exact = exact(&case, HeadOrder::Grouped);
    let tail = &exact[exact.len() - steps.len()..];
    let worst = steps.iter().zip(tail).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    assert!(worst < 2e-5, "{worst}");
}
