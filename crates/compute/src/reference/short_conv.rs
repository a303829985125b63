//! Causal depthwise convolution with state, then SiLU.

use std::ops::Range;

use crate::kernels::ShortConv;
use crate::reference::math::silu;

/// Channels `range` of all rows; `put` gets `(row, values of these channels)`. The state is left alone.
#[inline(always)]
pub(crate) fn channels(
    job: &ShortConv<'_>,
    range: Range<usize>,
    acc: &mut [f32],
    mut put: impl FnMut(usize, &[f32]),
) {
    let acc = &mut acc[..range.len()];
    for row in 0..job.x.len() / job.channels {
        acc.fill(0.0);
        for tap in 0..job.taps {
            let input = &input(job, row + tap * job.dilation)[range.clone()];
            let weights =
                job.weight[range.start * job.taps..range.end * job.taps].chunks_exact(job.taps);
            for ((y, u), w) in acc.iter_mut().zip(input).zip(weights) {
                *y = w[tap].mul_add(*u, *y);
            }
        }
        for y in acc.iter_mut() {
            *y = silu(*y);
        }
        put(row, acc);
    }
}

/// Input `index` of the line that the state begins and the rows continue.
#[inline(always)]
fn input<'a>(job: &'a ShortConv<'_>, index: usize) -> &'a [f32] {
    let before = (job.taps - 1) * job.dilation;
    match index.checked_sub(before) {
        None => &job.state[index * job.channels..(index + 1) * job.channels],
        Some(row) => &job.x[row * job.channels..(row + 1) * job.channels],
    }
}

/// Moves the last inputs into the state, as many as it holds.
pub(crate) fn advance(x: &[f32], state: &mut [f32]) {
    if x.len() >= state.len() {
        state.copy_from_slice(&x[x.len() - state.len()..]);
    } else {
        state.copy_within(x.len().., 0);
        let kept = state.len() - x.len();
        state[kept..].copy_from_slice(x);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "bits are the contract")]

    use super::*;

    fn run(x: &[f32], dilation: usize, state: &mut [f32]) -> Vec<f32> {
        let mut out = vec![0.0; x.len()];
        let weight = [1.0, 10.0, 100.0, -1.0, 0.5, 2.0];
        let (channels, taps, weight) = (2, 3, &weight[..]);
        let job = ShortConv { x, channels, weight, taps, dilation, state, out: &mut [] };
        super::channels(&job, 0..2, &mut [0.0; 2], |row, values| {
            out[2 * row..2 * row + 2].copy_from_slice(values);
        });
        advance(x, state);
        out
    }

    #[test]
    fn rows_one_by_one_equal_rows_at_once() {
        let x: Vec<f32> = (0..10).map(|i| i as f32 * 0.1 - 0.3).collect();
        let (mut state, mut stepped) = ([0.0; 4], [0.0; 4]);
        let whole = run(&x, 1, &mut state);
        let steps: Vec<f32> = x.chunks(2).flat_map(|row| run(row, 1, &mut stepped)).collect();
        assert_eq!((whole.clone(), state), (steps, stepped));
        // Row 2, channel 0: 1·x[0] + 10·x[1] + 100·x[2] of that channel.
        let exact = f64::from(x[0]) + 10.0 * f64::from(x[2]) + 100.0 * f64::from(x[4]);
        assert!((f64::from(whole[4]) - exact / (1.0 + (-exact).exp())).abs() < 1e-4);
    }

    #[test]
    fn a_dilated_tap_looks_so_many_rows_back() {
        let x: Vec<f32> = (0..26).map(|i| ((i * i) % 17) as f32 * 0.05 - 0.4).collect();
        // Rows before the first: two taps of three rows, the channels of the oldest first.
        let before: Vec<f32> = (0..12).map(|i| 0.3 - i as f32 * 0.04).collect();
        let mut state = before.clone();
        let whole = run(&x, 3, &mut state);
        let line = [before.clone(), x.clone()].concat();
        for row in 0..13 {
            for (channel, weight) in [[1.0, 10.0, 100.0], [-1.0, 0.5, 2.0]].iter().enumerate() {
                let tap = |j: usize| f64::from(line[2 * (row + 3 * j) + channel]) * weight[j];
                let sum = tap(0) + tap(1) + tap(2);
                let exact = sum / (1.0 + (-sum).exp());
                let found = f64::from(whole[2 * row + channel]);
                assert!((found - exact).abs() < 2e-5, "row {row}: {found}, not {exact}");
            }
        }
        assert_eq!(state, line[26..]);
        // In pieces shorter than the state, and longer.
        for pieces in [[1, 12], [5, 8], [7, 6]] {
            let mut state = before.clone();
            let (first, second) = x.split_at(2 * pieces[0]);
            let parts = [run(first, 3, &mut state), run(second, 3, &mut state)].concat();
            assert_eq!((&parts, &state[..]), (&whole, &line[26..]), "{pieces:?}");
        }
    }
}
