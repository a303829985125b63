//! Float sums in a fixed order: 16 virtual lanes, then a fixed tree.
//!
//! Every instruction set that we use can hold 16 lanes (one, two or four registers), so all give the same bits.

/// Virtual lanes of a float sum.
pub const LANES: usize = 16;

/// `Σ w·x`: element `i` is accumulated by a fused multiply-add into lane `i % 16`; then [`tree`].
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn dot(w: &[f32], x: &[f32]) -> f32 {
    assert_eq!(w.len(), x.len(), "a dot product takes equal lengths");
    let mut lanes = [0.0; LANES];
    accumulate(&mut lanes, w, x);
    tree(lanes)
}

/// Adds `Σ w·x` lane by lane; `w` starts at a multiple of 16.
#[inline(always)]
pub fn accumulate(lanes: &mut [f32; LANES], w: &[f32], x: &[f32]) {
    let (w_chunks, w_tail) = w.as_chunks::<LANES>();
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    for (w, x) in w_chunks.iter().zip(x_chunks) {
        for i in 0..LANES {
            lanes[i] = w[i].mul_add(x[i], lanes[i]);
        }
    }
    for (lane, (w, x)) in lanes.iter_mut().zip(w_tail.iter().zip(x_tail)) {
        *lane = w.mul_add(*x, *lane);
    }
}

/// `Σ f(x)` in the same order as [`dot`].
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            lanes[i] += chunk[i];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane += x;
    }
    tree(lanes)
}

/// Lane `i` plus lane `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
#[inline(always)]
pub fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "the sums are exact")]

    use super::*;

    #[test]
    fn elements_go_to_lanes_by_index_and_the_tree_halves() {
        // With one value per lane, the tree is ((0+8)+(4+12)) + ... : 2^24 absorbs 1.0 added to it, so the order shows.
        let mut lanes = [0.0; LANES];
        (lanes[0], lanes[8], lanes[4]) = (16_777_216.0, 1.0, -16_777_216.0);
        assert_eq!(tree(lanes), 0.0);
        (lanes[0], lanes[8], lanes[4]) = (16_777_216.0, -16_777_216.0, 1.0);
        assert_eq!(tree(lanes), 1.0);
        let x: Vec<f32> = (0..35).map(|i| i as f32).collect();
        assert_eq!(dot(&x, &[1.0; 35]), 595.0);
        assert_eq!(sum(&x), 595.0);
    }

    #[test]
    fn products_are_not_rounded_before_they_are_added() {
        // (1 + 2^-12)² = 1 + 2^-11 + 2^-24, whose last term is lost when the product is rounded to f32.
        let factor = 1.0 + 2.0_f32.powi(-12);
        let fused = 2.0_f32.powi(-11) + 2.0_f32.powi(-24);
        // The same lane takes -1 first: 16 elements later as part of a chunk, or of the tail.
        for n in [32, 20] {
            let (mut w, mut x) = (vec![0.0; n], vec![0.0; n]);
            (w[3], x[3]) = (-1.0, 1.0);
            (w[19], x[19]) = (factor, factor);
            assert_eq!(dot(&w, &x), fused, "{n}");
        }
    }

    #[test]
    #[should_panic(expected = "equal lengths")]
    fn unequal_lengths_are_refused() {
        dot(&[1.0; 3], &[1.0; 4]);
    }
}
