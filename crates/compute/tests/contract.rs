//! The numerics contract and the rules of residency, through the trait: a row's bits depend on its own inputs, its
//! position and its role, whoever computes it, with whom, and whatever was resident.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod support;

use std::sync::LazyLock;

use compute::backend::{Activations, Backend, ComputeError, KvType, Role, SequenceId};
use support::{CONTEXT, Model, N_EXPERTS, N_LAYERS, Random, backends, rows};
use units::LayerIndex;

const PROMPT: usize = 134;
const GENERATED: usize = 6;
const ALL_SLOTS: usize = N_LAYERS * N_EXPERTS;

type Bits = Vec<Vec<u32>>;

fn scalar() -> Box<dyn Backend> {
    let (activations, kv) = (Activations::Q8, KvType::F16);
    compute::reference(compute::Options { threads: 1, activations, kv })
}

fn quantized() -> Vec<(&'static str, Box<dyn Backend>)> {
    backends(Activations::Q8, KvType::F16)
}

/// A prompt in one pass, then generated tokens one by one, by the scalar definitions with every expert resident.
static EXPECTED: LazyLock<[Bits; 2]> = LazyLock::new(|| {
    [1, 2].map(|text| {
        let mut model = Model::new(scalar(), ALL_SLOTS, 0, PROMPT);
        let sequence = model.open();
        let mut bits = model.bits(&rows(sequence, 0..PROMPT, Role::Prompt, text));
        for p in PROMPT..PROMPT + GENERATED {
            bits.extend(model.bits(&rows(sequence, p..p + 1, Role::Generated, text)));
        }
        bits
    })
});

#[track_caller]
fn assert_rows(got: &Bits, expected: &[Vec<u32>], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (row, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(got == expected, "{what}: row {row} differs");
    }
}

fn prompt_in_passes(model: &mut Model, sequence: SequenceId, cuts: &[usize]) -> Bits {
    let mut bits = Vec::new();
    for range in cuts.windows(2) {
        bits.extend(model.bits(&rows(sequence, range[0]..range[1], Role::Prompt, 1)));
    }
    bits
}

#[test]
fn bits_do_not_depend_on_the_length_of_passes() {
    for (name, backend) in quantized() {
        let mut model = Model::new(backend, ALL_SLOTS, 1, PROMPT);
        for cuts in [&[0, PROMPT][..], &[0, 64, 128, PROMPT], &[0, 128, PROMPT]] {
            let sequence = model.open();
            let bits = prompt_in_passes(&mut model, sequence, cuts);
            assert_rows(&bits, &EXPECTED[0][..PROMPT], &format!("{name}, passes {cuts:?}"));
            // Generated rows: as a draft of four is verified, then two more.
            for range in [PROMPT..PROMPT + 4, PROMPT + 4..PROMPT + GENERATED] {
                let bits = model.bits(&rows(sequence, range.clone(), Role::Generated, 1));
                assert_rows(&bits, &EXPECTED[0][range], &format!("{name}, a draft"));
            }
            model.backend.close_sequence(sequence);
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_other_sequences_of_a_pass() {
    for (name, backend) in quantized() {
        let mut model = Model::new(backend, ALL_SLOTS, 2, 2 * PROMPT);
        let (a, b) = (model.open(), model.open());
        // Prompt beside prompt, then generated rows of one beside prompt rows of the other.
        let pass = [rows(b, 0..64, Role::Prompt, 2), rows(a, 0..PROMPT, Role::Prompt, 1)].concat();
        let bits = model.bits(&pass);
        assert_rows(&bits[..64].to_vec(), &EXPECTED[1][..64], name);
        assert_rows(&bits[64..].to_vec(), &EXPECTED[0][..PROMPT], name);
        let generated = PROMPT..PROMPT + 3;
        let pass =
            [rows(a, generated.clone(), Role::Generated, 1), rows(b, 64..PROMPT, Role::Prompt, 2)]
                .concat();
        let bits = model.bits(&pass);
        assert_rows(&bits[..3].to_vec(), &EXPECTED[0][generated], name);
        assert_rows(&bits[3..].to_vec(), &EXPECTED[1][64..PROMPT], name);
    }
}

#[test]
fn bits_do_not_depend_on_what_is_resident_or_on_the_order_of_arrivals() {
    for (i, n_slots) in [1, 2, 4, 9].into_iter().enumerate() {
        for (name, backend) in quantized() {
            let mut model = Model::new(backend, n_slots, 10 + i as u64, PROMPT);
            let sequence = model.open();
            let mut bits = prompt_in_passes(&mut model, sequence, &[0, 128, PROMPT]);
            for p in PROMPT..PROMPT + GENERATED {
                bits.extend(model.bits(&rows(sequence, p..p + 1, Role::Generated, 1)));
            }
            assert_rows(&bits, &EXPECTED[0], &format!("{name}, {n_slots} slots"));
        }
    }
}

#[test]
fn float_activations_and_a_float_cache_keep_the_contract_too() {
    let mut expected: Option<Bits> = None;
    for (i, (name, backend)) in backends(Activations::F32, KvType::F32).into_iter().enumerate() {
        let mut model = Model::new(backend, 3 + i, i as u64, 70);
        let sequence = model.open();
        let cuts: &[usize] = if i % 2 == 0 { &[0, 70] } else { &[0, 64, 70] };
        let mut bits = prompt_in_passes(&mut model, sequence, cuts);
        bits.extend(model.bits(&rows(sequence, 70..73, Role::Generated, 1)));
        assert_ne!(bits[1], EXPECTED[0][1], "floats are not the quantised numbers");
        assert_rows(&bits, expected.get_or_insert_with(|| bits.clone()), name);
    }
}

#[test]
fn a_rolled_back_draft_leaves_no_trace() {
    for (name, backend) in quantized() {
        let mut model = Model::new(backend, 5, 3, PROMPT);
        let sequence = model.open();
        prompt_in_passes(&mut model, sequence, &[0, PROMPT]);
        let snapshot = model.backend.snapshot(sequence).unwrap();
        for draft in 1..4 {
            let positions = PROMPT..PROMPT + draft;
            model.bits(&rows(sequence, positions, Role::Generated, 99));
            model.backend.rollback(sequence, snapshot);
        }
        model.backend.drop_snapshot(snapshot);
        let positions = PROMPT..PROMPT + GENERATED;
        let bits = model.bits(&rows(sequence, positions.clone(), Role::Generated, 1));
        assert_rows(&bits, &EXPECTED[0][positions], name);
    }
}

#[test]
fn a_snapshot_holds_what_was_recorded_before_it() {
    for (name, backend) in quantized() {
        let mut model = Model::new(backend, ALL_SLOTS, 3, PROMPT);
        let sequence = model.open();
        prompt_in_passes(&mut model, sequence, &[0, 64]);
        let at_64 = model.backend.snapshot(sequence).unwrap();
        prompt_in_passes(&mut model, sequence, &[64, 128]);
        let at_128 = model.backend.snapshot(sequence).unwrap();
        // Other text after position 64, then back to the first.
        model.backend.rollback(sequence, at_64);
        model.bits(&rows(sequence, 64..PROMPT, Role::Prompt, 2));
        model.backend.rollback(sequence, at_64);
        let bits = prompt_in_passes(&mut model, sequence, &[64, 128]);
        assert_rows(&bits, &EXPECTED[0][64..128], name);
        model.bits(&rows(sequence, 128..130, Role::Generated, 2));
        model.backend.rollback(sequence, at_128);
        let bits = prompt_in_passes(&mut model, sequence, &[128, PROMPT]);
        assert_rows(&bits, &EXPECTED[0][128..PROMPT], name);
    }
}

#[test]
fn a_sequence_that_was_reset_or_takes_a_closed_ones_place_is_new() {
    for (name, backend) in quantized() {
        let mut model = Model::new(backend, ALL_SLOTS, 4, 64);
        let first = model.open();
        model.bits(&rows(first, 0..64, Role::Prompt, 2));
        model.backend.reset(first);
        let bits = model.bits(&rows(first, 0..64, Role::Prompt, 1));
        assert_rows(&bits, &EXPECTED[0][..64], name);
        model.backend.close_sequence(first);
        let second = model.open();
        let bits = model.bits(&rows(second, 0..64, Role::Prompt, 1));
        assert_rows(&bits, &EXPECTED[0][..64], name);
    }
}

#[test]
fn a_router_that_is_not_finite_is_named_and_the_backend_lives_on() {
    for (name, backend) in quantized() {
        let mut model = Model::new(backend, 4, 5, 64);
        model.damage_router(1, 6, f32::INFINITY);
        let sequence = model.open();
        let error = model.forward(&rows(sequence, 0..64, Role::Prompt, 1)).unwrap_err();
        let ComputeError::RouterNotFinite { layer, expert, position, value } = error else {
            panic!("{name}: {error}");
        };
        assert_eq!((layer, expert, position), (LayerIndex(1), 6, 0), "{name}");
        assert!(!value.is_finite());
        model.damage_router(1, 6, 0.25);
        model.backend.reset(sequence);
        model.bits(&rows(sequence, 0..64, Role::Prompt, 1));
    }
}

#[test]
fn memory_is_counted_and_comes_back() {
    for (name, backend) in quantized() {
        let mut model = Model::new(backend, ALL_SLOTS, 6, 64);
        let before = model.backend.allocated_bytes();
        let sequence = model.open();
        let opened = model.backend.allocated_bytes();
        // Keys and values of 2 heads of 32 halves for each position are a part of it.
        assert!(opened - before >= 2 * 2 * 64 * CONTEXT as u64, "{name}");
        let snapshot = model.backend.snapshot(sequence).unwrap();
        assert!(model.backend.allocated_bytes() > opened, "{name}");
        model.backend.drop_snapshot(snapshot);
        assert_eq!(model.backend.allocated_bytes(), opened, "{name}");
        model.backend.snapshot(sequence).unwrap();
        model.backend.close_sequence(sequence);
        assert_eq!(model.backend.allocated_bytes(), before, "{name}");
    }
}

/// What two sequences do, decided by a seed: prompts in pieces, drafts, rollbacks, resets.
struct Story {
    random: Random,
    sequences: [Line; 2],
}

struct Line {
    id: SequenceId,
    position: usize,
    /// Only prompt rows so far, and on the grid.
    prompt: bool,
    text: u64,
}

impl Story {
    fn new(model: &mut Model, seed: u64) -> Self {
        let line = |text| Line { id: model.open(), position: 0, prompt: true, text };
        Self { random: Random(seed), sequences: [1, 2].map(line) }
    }

    /// One pass, and what comes before and after it.
    fn step(&mut self, model: &mut Model) -> Bits {
        let Self { random, sequences } = self;
        let mut pass = Vec::new();
        let mut drafts = Vec::new();
        for line in sequences.iter_mut() {
            if line.position + 130 > CONTEXT || random.below(20) == 0 {
                model.backend.reset(line.id);
                (line.position, line.prompt, line.text) = (0, true, line.text + 2);
            }
            let (role, n) = match random.below(4) {
                0 => continue,
                _ if !line.prompt => (Role::Generated, 1 + random.below(4)),
                1 => (Role::Prompt, 64 * (1 + random.below(2))),
                _ => (Role::Prompt, 1 + random.below(80)),
            };
            if role == Role::Generated && random.below(2) == 0 {
                let snapshot = model.backend.snapshot(line.id).unwrap();
                drafts.push((line.id, snapshot, line.position));
            }
            let end = line.position + n;
            pass.extend(rows(line.id, line.position..end, role, line.text));
            line.position = end;
            line.prompt &= end.is_multiple_of(64);
        }
        let bits = if pass.is_empty() { Vec::new() } else { model.bits(&pass) };
        for (id, snapshot, position) in drafts {
            model.backend.rollback(id, snapshot);
            model.backend.drop_snapshot(snapshot);
            let line = sequences.iter_mut().find(|line| line.id == id).unwrap();
            (line.position, line.text) = (position, line.text + 2);
        }
        bits
    }
}

#[test]
fn every_backend_tells_the_same_story() {
    for seed in 0..3 {
        let mut expected: Vec<Bits> = Vec::new();
        for (i, (name, backend)) in quantized().into_iter().enumerate() {
            let n_slots = [ALL_SLOTS, 3, 7, 2, 5][i];
            let mut model = Model::new(backend, n_slots, 100 * seed + i as u64, 2 * 130);
            let mut story = Story::new(&mut model, seed);
            for step in 0..12 {
                let bits = story.step(&mut model);
                if i == 0 {
                    expected.push(bits);
                } else {
                    assert_rows(&bits, &expected[step], &format!("{name}, story {seed}.{step}"));
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "prompt rows start on the 64-token grid")]
fn prompt_rows_off_the_grid_are_refused() {
    let mut model = Model::new(scalar(), ALL_SLOTS, 0, 64);
    let sequence = model.open();
    prompt_in_passes(&mut model, sequence, &[0, 10, 20]);
}
