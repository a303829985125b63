//! What hostile changes to a file do: an error or a model, never a panic.

use std::path::Path;

use checkpoint::{Audit, MemorySource, bind, parse};
use proptest::prelude::*;
use units::ExpertKey;

use crate::support::{Gguf, Value, tiny};

/// Reads a file and everything that can be asked of its model.
fn use_all(bytes: &[u8]) {
    let source = MemorySource(bytes);
    let Ok(mut checkpoint) = parse(Path::new("changed.gguf"), &source) else { return };
    for tensor in checkpoint.directory.iter() {
        assert!(tensor.offset + tensor.bytes <= bytes.len() as u64);
    }
    let Ok(model) = bind(&checkpoint) else { return };
    for layer in 0..model.config.n_layers {
        for expert in 0..model.config.n_experts {
            let record = model.records.record(ExpertKey::new(layer, expert));
            let matrices = record.matrices();
            for matrix in [matrices.gate, matrices.up, matrices.down] {
                assert!(matrix.place + matrix.bytes() as u64 <= record.slot_bytes);
            }
            for piece in record.pieces.iter() {
                assert!(piece.offset + piece.bytes <= bytes.len() as u64);
            }
        }
    }
    if let (Some(shape), Some(table)) = (&model.config.ngram, &model.ngram_table) {
        let mut rows = vec![0; shape.heads()];
        shape.rows(&[0, shape.eos, model.config.vocab - 1], &mut rows);
        for row in rows {
            let piece = table.pieces(row, 1).0[0];
            assert!(piece.offset + piece.bytes <= bytes.len() as u64);
        }
    }
    let audit = Audit::of(&checkpoint, &model);
    assert!(audit.resident_bytes() <= bytes.len() as u64);
    checkpoint.metadata.drop_vocabulary();
    bind(&checkpoint).expect("a vocabulary that was checked stays checked by its lengths");
}

/// Values that numbers in a header break on.
const EDGES: [u64; 10] = [0, 1, 2, 31, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, u64::MAX];

fn family() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec!["qwen3moe", "qwen3next", "qwen35moe", "qwen4exp"])
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u32>().prop_map(Value::U32),
        (0..200_u32).prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<u64>().prop_map(Value::U64),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        "[a-z]{0,8}".prop_map(Value::Str),
        prop::collection::vec(0..5_u32, 0..4).prop_map(Value::U32s),
        prop::collection::vec(any::<bool>(), 0..4).prop_map(Value::Bools),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn changed_bytes_never_panic(
        family in family(),
        changes in prop::collection::vec((0.0..1.0_f64, any::<u8>()), 1..8),
        cut in 0.0..1.0_f64,
    ) {
        let file = tiny(family);
        let (header, mut bytes) = (file.header().len(), file.write());
        for (at, value) in changes {
            bytes[(at * header as f64) as usize] = value;
        }
        if cut < 0.2 {
            bytes.truncate((cut * 5.0 * bytes.len() as f64) as usize);
        }
        use_all(&bytes);
    }

    #[test]
    fn numbers_at_their_edges_never_panic(
        family in family(),
        changes in prop::collection::vec((0.0..1.0_f64, 0..EDGES.len(), prop::bool::ANY), 1..3),
    ) {
        let file = tiny(family);
        let (header, mut bytes) = (file.header().len(), file.write());
        for (at, edge, wide) in changes {
            let at = (at * (header - 8) as f64) as usize;
            let edge = EDGES[edge].to_le_bytes();
            let len = if wide { 8 } else { 4 };
            bytes[at..at + len].copy_from_slice(&edge[..len]);
        }
        use_all(&bytes);
    }

    #[test]
    fn changed_keys_never_panic(
        family in family(),
        changes in prop::collection::vec((0.0..1.0_f64, value()), 1..4),
    ) {
        let mut file = tiny(family);
        for (at, value) in changes {
            let index = (at * file.keys.len() as f64) as usize;
            file.keys[index].1 = value;
        }
        use_all(&file.write());
    }

    #[test]
    fn changed_dimensions_never_panic(
        family in family(),
        changes in prop::collection::vec((0.0..1.0_f64, prop::collection::vec(1..9_u64, 1..5)), 1..3),
    ) {
        let mut file: Gguf = tiny(family);
        for (at, mut ne) in changes {
            let index = (at * file.tensors.len() as f64) as usize;
            ne[0] *= file.tensors[index].block_type.block_len() as u64;
            file.tensors[index].ne = ne;
        }
        use_all(&file.write());
    }
}
