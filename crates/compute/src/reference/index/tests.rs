#![allow(clippy::float_cmp, reason = "bits are the contract")]

use super::*;
use crate::reference::attention::{BLOCK, KvHead, attend};

fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn selected(scores: &[f32], blocks: usize) -> Vec<u32> {
    let mut list = vec![u32::MAX; blocks + 1];
    select(scores, &mut Vec::new(), &mut list);
    list
}

/// All positions of `seen`, in the groups in which they are taken.
fn groups(seen: Seen<'_>) -> Vec<Vec<usize>> {
    let (mut groups, mut positions) = (Vec::new(), [0; BLOCK]);
    let mut done = 0;
    loop {
        let n = seen.block(done, &mut positions);
        if n == 0 {
            return groups;
        }
        groups.push(positions[..n].to_vec());
        done += n;
    }
}

#[test]
fn the_best_blocks_are_chosen_in_ascending_order() {
    assert_eq!(selected(&[0.5, 3.0, 1.0, 2.0], 2), [1, 3, 4]);
    assert_eq!(selected(&[0.5, 3.0, 1.0, 2.0], 3), [1, 2, 3, 4]);
    assert_eq!(selected(&[1.0, f32::INFINITY, f32::INFINITY], 1), [1, 3]);
}

#[test]
fn a_tie_goes_to_the_lower_block() {
    assert_eq!(selected(&[0.0; 9], 4), [0, 1, 2, 3, 9]);
    assert_eq!(selected(&[0.0, 2.0, 1.0, 1.0, 2.0, 1.0], 4), [1, 2, 3, 4, 6]);
    assert_eq!(selected(&[0.0, 0.0, 0.0, 5.0, 0.0], 3), [0, 1, 3, 5]);
}

#[test]
fn the_choice_is_that_of_a_full_sort() {
    for (n, blocks) in [(2, 1), (40, 7), (700, 512), (3_000, 512), (513, 512)] {
        // Few values, so that many scores are equal; and a ReLU's zeros.
        let scores: Vec<f32> =
            noise(n, n as u32).iter().map(|x| positive((x * 20.0).floor())).collect();
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        let mut expected: Vec<u32> = order[..blocks].iter().map(|b| *b as u32).collect();
        expected.sort_unstable();
        expected.push(n as u32);
        assert_eq!(selected(&scores, blocks), expected, "{blocks} of {n}");
    }
}

#[test]
fn a_row_sees_its_best_blocks_and_what_follows_its_complete_ones() {
    // Blocks of 4, two of which are seen; position 9 has two complete blocks, position 11 three.
    let list = [0, 2, 3];
    assert_eq!(groups(seen(9, 4, &list)), [(0..10).collect::<Vec<_>>()]);
    assert_eq!(groups(seen(11, 4, &list)), [[0, 1, 2, 3, 8, 9, 10, 11]]);
    assert_eq!(groups(seen(13, 4, &list)), [[0, 1, 2, 3, 8, 9, 10, 11, 12, 13]]);
    // A position that completes its block sees itself only if that block is chosen.
    assert_eq!(groups(seen(11, 4, &[0, 1, 3])), [(0..8).collect::<Vec<_>>()]);
}

#[test]
fn what_is_seen_comes_in_blocks_of_the_absolute_grid() {
    // Blocks 15, 16 and 40 begin at positions 60, 64 and 160; the row is at position 170.
    let list = [15, 16, 40, 42];
    assert_eq!(
        groups(seen(170, 4, &list)),
        [vec![60, 61, 62, 63], vec![64, 65, 66, 67], vec![160, 161, 162, 163, 168, 169, 170]]
    );
    // Blocks of 24 lie across its lines.
    let list = [2, 9];
    let expected = [(48..64).collect::<Vec<_>>(), (64..72).collect()];
    assert_eq!(groups(seen(215, 24, &list)), expected);
}

#[test]
fn everything_in_blocks_is_everything() {
    let (dim, n) = (20, 203);
    let (keys, values, q) = (noise(n * dim, 1), noise(n * dim, 2), noise(dim, 3));
    let (keys, values) = (KvRows::F32(&keys), KvRows::F32(&values));
    let run = |seen| {
        let mut out = vec![f32::NAN; dim];
        attend(&q, KvHead { keys, values, width: dim, start: 0 }, seen, &mut out);
        out
    };
    let blocks: Vec<u32> = (0..=50).collect();
    assert_eq!(run(Seen::Blocks { blocks: &blocks, ratio: 4, n }), run(Seen::All(n)));
}

#[test]
fn attention_to_a_selection_is_the_softmax_over_it() {
    let (dim, ratio, position) = (24, 4, 402);
    let n = position + 1;
    let (keys, values, q) = (noise(n * dim, 4), noise(n * dim, 5), noise(dim, 6));
    let list = [3, 15, 16, 17, 60, 99, 100];
    let seen = seen(position, ratio, &list);
    let mut out = vec![f32::NAN; dim];
    let rows = (KvRows::F32(&keys), KvRows::F32(&values));
    attend(&q, KvHead { keys: rows.0, values: rows.1, width: dim, start: 0 }, seen, &mut out);

    let visible: Vec<usize> = (0..n)
        .filter(|p| list[..6].contains(&((p / ratio) as u32)) || *p >= n / ratio * ratio)
        .collect();
    let wide = |x: &[f32], p: usize, j: usize| f64::from(x[p * dim + j]);
    let score = |p: &usize| {
        let dot: f64 = (0..dim).map(|j| wide(&keys, *p, j) * f64::from(q[j])).sum();
        (dot / (dim as f64).sqrt()).exp()
    };
    let weights: Vec<f64> = visible.iter().map(score).collect();
    let total: f64 = weights.iter().sum();
    for (j, y) in out.iter().enumerate() {
        let terms = visible.iter().zip(&weights).map(|(p, w)| wide(&values, *p, j) * w / total);
        let exact: f64 = terms.sum();
        // 27 positions of values below 1, scores below 5: roundings of a few times 2^-24 each.
        assert!((f64::from(*y) - exact).abs() < 2e-6, "value {j}: {y}, not {exact}");
    }
}

#[test]
fn scores_add_what_is_positive_in_each_head() {
    let heads = Heads { count: 3, dim: 40, stride: 50 };
    let (q, keys) = (noise(150, 7), noise(30 * 40, 8));
    let mut found = vec![f32::NAN; 25];
    scores(IndexQueries { q: &q, heads }, KvRows::F32(&keys), 5, &mut found);
    for (i, score) in found.iter().enumerate() {
        let product = |h: usize| -> f64 {
            let key = &keys[(5 + i) * 40..][..40];
            key.iter().zip(&q[h * 50..]).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
        };
        let exact: f64 = (0..3).map(|h| product(h).max(0.0)).sum();
        // Products of 40 terms below 1, a chain of three in each lane.
        assert!((f64::from(*score) - exact).abs() < 120.0 * 8.0 / f64::from(1 << 24), "{i}");
    }
}

#[test]
fn a_score_is_never_nan_or_negative() {
    let heads = Heads { count: 2, dim: 2, stride: 2 };
    for key in [[f32::NAN, 0.0], [f32::INFINITY, f32::NEG_INFINITY], [-1.0, -1.0]] {
        let mut found = [f32::NAN];
        scores(IndexQueries { q: &[1.0; 4], heads }, KvRows::F32(&key), 0, &mut found);
        assert_eq!(found[0].to_bits(), 0.0_f32.to_bits(), "{key:?}");
    }
}

#[test]
fn the_key_of_a_block_is_the_normed_and_turned_mean() {
    let (dim, rotary_dim, ratio, eps) = (32, 16, 4, 1e-6);
    let raw = noise(40 * dim, 9);
    let weight: Vec<f32> = noise(dim, 10).iter().map(|w| 1.0 + 0.3 * w).collect();
    let angle = |i: usize, j: usize| 0.3 * i as f64 + 0.7 * j as f64;
    let angles: Vec<f32> = (0..2)
        .flat_map(|i| {
            let half = (0..rotary_dim / 2).map(move |j| angle(i, j));
            half.clone().map(|a| a.cos() as f32).chain(half.map(|a| a.sin() as f32))
        })
        .collect();
    let job = PoolKeys {
        raw: KvRows::F32(&raw),
        first_block: 7,
        ratio,
        weight: &weight,
        eps,
        angles: &angles,
        rotary_dim,
        out: &mut [],
    };
    for i in 0..2 {
        let mut out = vec![f32::NAN; dim];
        pool(&job, i, &mut out);
        let token = |t: usize, j: usize| f64::from(raw[((7 + i) * ratio + t) * dim + j]);
        let mean: Vec<f64> =
            (0..dim).map(|j| (0..ratio).map(|t| token(t, j)).sum::<f64>() / 4.0).collect();
        let square = mean.iter().map(|x| x * x).sum::<f64>() / dim as f64;
        let normed: Vec<f64> = mean
            .iter()
            .zip(&weight)
            .map(|(x, w)| x / (square + f64::from(eps)).sqrt() * f64::from(*w))
            .collect();
        let half = rotary_dim / 2;
        for (j, y) in out.iter().enumerate() {
            let exact = if j < half {
                normed[j] * angle(i, j).cos() - normed[j + half] * angle(i, j).sin()
            } else if j < rotary_dim {
                normed[j] * angle(i, j - half).cos() + normed[j - half] * angle(i, j - half).sin()
            } else {
                normed[j]
            };
            assert!((f64::from(*y) - exact).abs() < 2e-6, "value {j}: {y}, not {exact}");
        }
    }
}
