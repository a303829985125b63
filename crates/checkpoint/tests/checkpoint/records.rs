//! Expert records of models with any sizes, types and alignment.

use std::collections::BTreeMap;

use checkpoint::{DIRECT_ALIGN, Model, Piece};
use proptest::prelude::*;
use quant::BlockType;
use units::{ExpertKey, FileIndex, LayerIndex};

use crate::support::{EXPERTS, Gguf, HIDDEN, Value, WIDTH, tiny};

/// Types whose blocks fit into the widths of the tiny models.
const TYPES: [BlockType; 9] = [
    BlockType::F32,
    BlockType::Bf16,
    BlockType::Q4_0,
    BlockType::Q4_1,
    BlockType::Q5_0,
    BlockType::Q5_1,
    BlockType::Q8_0,
    BlockType::Iq4Nl,
    BlockType::Mxfp4,
];

#[derive(Debug, Clone)]
struct Shape {
    family: &'static str,
    n_experts: u64,
    alignment: u32,
    /// Gate, up, down of both layers.
    types: [[usize; 3]; 2],
    fused: [bool; 2],
    /// Bytes in front of the experts, so that they start anywhere.
    lead: u64,
}

fn shape() -> impl Strategy<Value = Shape> {
    let types = || prop::array::uniform3(0..TYPES.len());
    (
        prop::sample::select(vec!["qwen3moe", "qwen3next", "qwen35moe", "qwen4exp"]),
        1..12_u64,
        3..14_u32,
        [types(), types()],
        any::<[bool; 2]>(),
        1..5000_u64,
    )
        .prop_map(|(family, n_experts, alignment, types, fused, lead)| Shape {
            family,
            n_experts,
            alignment: 1 << alignment,
            types,
            fused,
            lead,
        })
}

fn build(shape: &Shape) -> Gguf {
    let mut file = tiny(shape.family);
    let key = |name: &str| format!("{}.{name}", shape.family);
    file.set("general.alignment", Value::U32(shape.alignment));
    file.alignment = u64::from(shape.alignment);
    file.set(&key("expert_count"), Value::U32(shape.n_experts as u32));
    file.set(&key("expert_used_count"), Value::U32(1));
    // A draft block may hold anything, and stands first in the data.
    let name = "blk.2.nextn.padding.weight";
    file.set(&key("block_count"), Value::U32(3));
    file.set(&key("nextn_predict_layers"), Value::U32(1));
    file.tensor(name, &[shape.lead], BlockType::F16);
    let padding = file.tensors.pop().unwrap();
    file.tensors.insert(0, padding);
    for layer in 0..2 {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        file.find(&name("ffn_gate_inp")).ne[1] = shape.n_experts;
        for (part, ty) in ["gate", "up", "down"].into_iter().zip(shape.types[layer]) {
            let tensor = file.find(&name(&format!("ffn_{part}_exps")));
            tensor.ne[2] = shape.n_experts;
            tensor.block_type = TYPES[ty];
        }
        if shape.fused[layer] {
            file.remove_tensor(&name("ffn_up_exps"));
            let gate = file.find(&name("ffn_gate_exps"));
            gate.ne[1] = 2 * WIDTH;
            gate.name = name("ffn_gate_up_exps");
        }
    }
    file
}

/// Matrices of all experts of a layer tile its tensors: no byte is left out, none belongs to two.
fn assert_tiled(model: &Model, layer: u32) {
    let mut pieces: BTreeMap<(FileIndex, u64), u64> = BTreeMap::new();
    for expert in 0..model.config.n_experts {
        let record = model.records.record(ExpertKey::new(layer, expert));
        let matrices = record.matrices();
        for matrix in [matrices.gate, matrices.up, matrices.down] {
            let holds = |p: &&Piece| (p.place..p.place + p.bytes).contains(&matrix.place);
            let piece = record.pieces.iter().find(holds).expect("a matrix lies in a piece");
            let at = (piece.file, piece.offset + (matrix.place - piece.place));
            assert_eq!(pieces.insert(at, matrix.bytes() as u64), None);
        }
    }
    for tensor in model.records.layer(LayerIndex(layer)).tensors() {
        let mut at = tensor.offset;
        while at < tensor.offset + tensor.bytes {
            let bytes = pieces.remove(&(tensor.file, at)).expect("a piece begins here");
            at += bytes;
        }
        assert_eq!(at, tensor.offset + tensor.bytes, "{}", tensor.name);
    }
    assert!(pieces.is_empty(), "{pieces:?}");
}

/// The span of a slot that a direct read of a piece writes.
const fn widened(piece: &Piece) -> (u64, u64) {
    let begin = piece.place / DIRECT_ALIGN * DIRECT_ALIGN;
    (begin, (piece.place + piece.bytes).next_multiple_of(DIRECT_ALIGN))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn pieces_tile_the_tensors_and_land_in_place(shape in shape()) {
        let model = build(&shape).model().unwrap();
        for layer in 0..2 {
            assert_tiled(&model, layer);
            for expert in 0..model.config.n_experts {
                let key = ExpertKey::new(layer, expert);
                let record = model.records.record(key);
                let mut free = 0;
                for piece in record.pieces.iter() {
                    prop_assert_eq!(piece.place % DIRECT_ALIGN, piece.offset % DIRECT_ALIGN);
                    let (begin, end) = widened(piece);
                    prop_assert!(begin >= free);
                    free = end;
                }
                prop_assert_eq!(free, record.slot_bytes);
                // Neighbours are one piece, and between two pieces lies a page that nobody needs.
                for (first, second) in record.pieces.iter().zip(record.pieces.iter().skip(1)) {
                    let free = (first.offset + first.bytes).next_multiple_of(DIRECT_ALIGN);
                    prop_assert!(first.file != second.file || free < second.offset / DIRECT_ALIGN * DIRECT_ALIGN);
                }
                prop_assert_eq!(record.slot_bytes, model.records.slot_bytes(key));
                prop_assert_eq!(record.bytes, model.records.layer(LayerIndex(layer)).record_bytes());
            }
        }
    }

    #[test]
    fn matrices_are_the_bytes_of_their_own_expert(shape in shape()) {
        let file = build(&shape);
        let model = file.model().unwrap();
        for layer in 0..2 {
            for expert in 0..model.config.n_experts {
                let record = model.records.record(ExpertKey::new(layer, expert));
                // Where a byte of the slot comes from.
                let source = |place: u64| {
                    let piece = record.pieces.iter().find(|p| (p.place..p.place + p.bytes).contains(&place));
                    let piece = piece.expect("a matrix lies in a piece");
                    piece.offset + (place - piece.place)
                };
                let stack = model.records.layer(LayerIndex(layer));
                let matrices = record.matrices();
                let (w, h) = (WIDTH as u32, HIDDEN as u32);
                let fused = shape.fused[layer as usize];
                let up = stack.up.as_ref().unwrap_or(&stack.gate);
                // Row of the stacked tensor at which each matrix begins, by the layout: experts one behind the
                // other, and in a fused tensor the gate's rows before the up's.
                let rows = if fused { 2 * w } else { w };
                for (matrix, tensor, row, n_in, n_out) in [
                    (matrices.gate, &stack.gate, expert * rows, h, w),
                    (matrices.up, up, expert * rows + if fused { w } else { 0 }, h, w),
                    (matrices.down, &stack.down, expert * h, w, h),
                ] {
                    prop_assert_eq!((matrix.n_in, matrix.n_out), (n_in, n_out));
                    prop_assert_eq!(matrix.block_type, tensor.block_type);
                    let row_bytes = tensor.block_type.row_bytes(n_in as usize).unwrap() as u64;
                    let begin = tensor.offset + u64::from(row) * row_bytes;
                    prop_assert_eq!(source(matrix.place), begin);
                    let last = matrix.place + matrix.bytes() as u64 - 1;
                    prop_assert_eq!(source(last), begin + u64::from(n_out) * row_bytes - 1);
                }
            }
        }
    }
}

#[test]
fn the_tiny_models_have_the_experts_that_the_tests_count_on() {
    let model = tiny("qwen3moe").model().unwrap();
    // Q4_0: 18 bytes for 32 values; Q5_1: 24; Q8_0: 34.
    let matrix = WIDTH * HIDDEN / 32;
    assert_eq!(model.records.payload_bytes(), 2 * EXPERTS * matrix * (18 + 24 + 34));
}
