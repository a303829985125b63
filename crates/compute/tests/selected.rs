//! The numerics contract for attention that is selected, for convolutions of their own and for uploads: a row's bits
//! depend on its text up to it, not on passes, roles, company or history.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod support;

use compute::backend::{Activations, Backend, KvType, Role};
use support::selected::{
    BLOCKS, Bed, Bits, CONTEXT, CONV, COUNT, DIM, INDEX_DIM, KV_HEADS, OUT, RATIO, SHAPE, WIDTHS,
    input, rows,
};
use support::{Random, backends};

fn all() -> Vec<(&'static str, Box<dyn Backend>)> {
    backends(Activations::Q8, KvType::F16)
}

fn scalar() -> Box<dyn Backend> {
    let (activations, kv) = (Activations::Q8, KvType::F16);
    compute::reference(compute::Options { threads: 1, activations, kv })
}

/// A text in one pass, by the definitions.
fn expected(text: u32) -> Bits {
    let mut bed = Bed::new(scalar());
    let sequence = bed.open();
    bed.pass(&rows(sequence, 0..CONTEXT, Role::Prompt, text))
}

#[track_caller]
fn assert_rows(found: &[Vec<u32>], expected: &[Vec<u32>], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (row, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found == expected, "{what}: row {row} differs");
    }
}

#[test]
fn bits_do_not_depend_on_passes_or_roles() {
    let expected = expected(1);
    let singles: Vec<usize> = (0..=CONTEXT).collect();
    for (name, backend) in all() {
        let mut bed = Bed::new(backend);
        for cuts in [
            &[0, CONTEXT][..],
            &[0, 64, 128, 192, CONTEXT],
            // Cuts at every place of a block.
            &[0, 1, 34, 35, 36, 37, 99, 101, 118, CONTEXT],
            &singles,
        ] {
            for role in [Role::Prompt, Role::Generated] {
                let sequence = bed.open();
                let found = bed.passes(sequence, 1, cuts, role);
                assert_rows(&found, &expected, &format!("{name}, {role:?} passes at {cuts:?}"));
                bed.backend.close_sequence(sequence);
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_other_sequences() {
    let expected = [expected(1), expected(2)];
    for (name, backend) in all() {
        let mut bed = Bed::new(backend);
        let (a, b) = (bed.open(), bed.open());
        bed.pass(&rows(a, 0..90, Role::Prompt, 1));
        let parts = [rows(b, 0..71, Role::Prompt, 2), rows(a, 90..150, Role::Generated, 1)];
        let found = bed.pass(&parts.concat());
        assert_rows(&found[..71], &expected[1][..71], name);
        assert_rows(&found[71..], &expected[0][90..150], name);
    }
}

#[test]
fn what_is_seen_whole_is_plain_attention() {
    for (name, backend) in all() {
        let mut bed = Bed::new(backend);
        let sequence = bed.open();
        let n = 60;
        let found = bed.pass(&rows(sequence, 0..n, Role::Prompt, 3));
        let last_whole = (BLOCKS + 1) * RATIO - 2;
        for (position, bits) in found.iter().enumerate() {
            let plain = bed.bits(bed.everything, OUT, position);
            let whole = position <= last_whole;
            assert_eq!(bits[..OUT] == plain[..], whole, "{name}, position {position}");
        }
    }
}

#[test]
fn a_sequence_that_is_cut_forgets_what_came_after() {
    let text = [expected(1), expected(2)];
    for (name, backend) in all() {
        let mut bed = Bed::new(backend);
        // Every place of a block, and before the selection begins.
        for cut in [20, 96, 97, 98, 99] {
            let sequence = bed.open();
            bed.passes(sequence, 1, &[0, cut], Role::Prompt);
            let snapshot = bed.backend.snapshot(sequence).unwrap();
            // Another text from there on, in one pass and token by token.
            for n in [50, 1, 3] {
                bed.pass(&rows(sequence, cut..cut + n, Role::Generated, 9));
                bed.backend.rollback(sequence, snapshot);
            }
            let found = bed.passes(sequence, 1, &[cut, cut + 3, CONTEXT], Role::Generated);
            assert_rows(&found, &text[0][cut..], &format!("{name}, cut at {cut}"));
            // A new text from the start.
            bed.backend.reset(sequence);
            let found = bed.passes(sequence, 2, &[0, 130, CONTEXT], Role::Prompt);
            assert_rows(&found, &text[1], &format!("{name}, after a reset"));
            bed.backend.close_sequence(sequence);
        }
    }
}

#[test]
fn a_float_cache_keeps_the_contract_too() {
    let mut first: Option<Bits> = None;
    for (i, (name, backend)) in backends(Activations::F32, KvType::F32).into_iter().enumerate() {
        let mut bed = Bed::new(backend);
        let sequence = bed.open();
        let cuts: &[usize] = if i % 2 == 0 { &[0, 150] } else { &[0, 66, 67, 150] };
        let found = bed.passes(sequence, 1, cuts, Role::Prompt);
        assert_rows(&found, first.get_or_insert_with(|| found.clone()), name);
    }
}

#[test]
fn the_selection_is_the_best_blocks_in_double_precision() {
    let mut bed = Bed::new(backends(Activations::F32, KvType::F32).remove(0).1);
    let sequence = bed.open();
    let found = bed.pass(&rows(sequence, 0..CONTEXT, Role::Prompt, 5));
    let exact = Exact::new(5);
    let mut without_itself = 0;
    for (position, bits) in found.iter().enumerate() {
        let (seen, gap) = exact.seen(position);
        // Too near a tie to be told in single precision.
        if gap < 1e-4 {
            continue;
        }
        without_itself += usize::from(!seen.contains(&position));
        for (j, (y, exact)) in bits.iter().zip(exact.attend(position, &seen)).enumerate() {
            let y = f64::from(f32::from_bits(*y));
            assert!((y - exact).abs() < 2e-5, "position {position}, value {j}: {y}, not {exact}");
        }
    }
    assert!(without_itself > 5, "a token that completes its block may not be seen by itself");
}

/// The text's inputs, and the formulas in double precision.
struct Exact {
    inputs: [Vec<Vec<f64>>; 5],
    /// Of the norm of index queries and keys.
    weight: Vec<f64>,
}

impl Exact {
    fn new(text: u32) -> Self {
        let inputs = std::array::from_fn(|i| {
            let row = |p: usize| {
                let values = input(text << 16 | p as u32, i, WIDTHS[i]);
                values.into_iter().map(f64::from).collect()
            };
            (0..CONTEXT).map(row).collect()
        });
        let mut random = Random(1);
        let weight = (0..INDEX_DIM).map(|_| f64::from(1.0 + 0.3 * random.float())).collect();
        Self { inputs, weight }
    }

    /// Norm and rotation of an index query or key.
    fn turned(&self, x: &[f64], position: usize) -> Vec<f64> {
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-6).sqrt();
        let x: Vec<f64> = x.iter().zip(&self.weight).map(|(x, w)| x / rms * w).collect();
        let mut y = x.clone();
        for j in 0..4 {
            let (sin, cos) = (position as f64 * 1e4_f64.powf(-2.0 * j as f64 / 8.0)).sin_cos();
            y[j] = x[j] * cos - x[j + 4] * sin;
            y[j + 4] = x[j + 4] * cos + x[j] * sin;
        }
        y
    }

    /// Positions that a row sees, and how far the last chosen block is from the first that is not.
    fn seen(&self, position: usize) -> (Vec<usize>, f64) {
        let [_, _, _, queries, keys] = &self.inputs;
        let complete = (position + 1) / RATIO;
        let score = |block: usize| -> f64 {
            let mean: Vec<f64> = (0..INDEX_DIM)
                .map(|j| (0..RATIO).map(|t| keys[block * RATIO + t][j]).sum::<f64>() / RATIO as f64)
                .collect();
            let key = self.turned(&mean, block * RATIO);
            let head = |query: &[f64]| {
                let query = self.turned(query, position);
                query.iter().zip(&key).map(|(q, k)| q * k).sum::<f64>().max(0.0)
            };
            queries[position].chunks(INDEX_DIM).map(head).sum()
        };
        let mut scores: Vec<(f64, usize)> = (0..complete).map(|b| (score(b), b)).collect();
        scores.sort_by(|a, b| b.0.total_cmp(&a.0));
        let gap = scores.get(BLOCKS).map_or(f64::INFINITY, |next| scores[BLOCKS - 1].0 - next.0);
        scores.truncate(BLOCKS);
        let mut seen: Vec<usize> =
            scores.iter().flat_map(|(_, b)| b * RATIO..(b + 1) * RATIO).collect();
        seen.extend(complete * RATIO..=position);
        (seen, gap)
    }

    fn attend(&self, position: usize, seen: &[usize]) -> Vec<f64> {
        let [queries, keys, values, ..] = &self.inputs;
        let head = |h: usize| {
            let kv = h / (COUNT / KV_HEADS) * DIM;
            let query = &queries[position][h * DIM..(h + 1) * DIM];
            let weight = |p: &usize| {
                let key = &keys[*p][kv..kv + DIM];
                let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                (dot / (DIM as f64).sqrt()).exp()
            };
            let weights: Vec<f64> = seen.iter().map(weight).collect();
            let total: f64 = weights.iter().sum();
            let value = move |j: usize| {
                let terms = seen.iter().zip(&weights).map(|(p, w)| values[*p][kv + j] * w / total);
                terms.sum::<f64>()
            };
            (0..DIM).map(value).collect::<Vec<_>>()
        };
        (0..COUNT).flat_map(head).collect()
    }
}

#[test]
fn memory_of_the_index_is_counted() {
    for (name, backend) in all() {
        let mut bed = Bed::new(backend);
        let before = bed.backend.allocated_bytes();
        let sequence = bed.open();
        let opened = bed.backend.allocated_bytes();
        let kv = 2 * 2 * 2 * KV_HEADS * DIM * CONTEXT;
        let index = 2 * SHAPE.index.unwrap().values(CONTEXT);
        let conv = 4 * CONV.state_len();
        let least = (kv + index + conv) as u64;
        // Each of the four KV caches, the two of the index and the state is made of whole pages.
        let found = opened - before;
        assert!(least <= found && found < least + 7 * 4096, "{name}: {found} of {least}");
        bed.backend.close_sequence(sequence);
        assert_eq!(bed.backend.allocated_bytes(), before, "{name}");
    }
}
