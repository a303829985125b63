//! Any bytes as a GGUF file: an error or a model, never a panic, and no range outside the file.
#![no_main]

use std::path::Path;

use checkpoint::{MemorySource, Source, bind, parse};
use fuzz::Hollow;
use libfuzzer_sys::fuzz_target;
use units::ExpertKey;

fuzz_target!(|bytes: &[u8]| {
    read_all(&MemorySource(bytes));
    read_all(&Hollow(bytes));
});

fn read_all(source: &dyn Source) {
    let Ok(checkpoint) = parse(Path::new("fuzzed.gguf"), source) else { return };
    let inside =
        |offset: u64, bytes: u64| offset.checked_add(bytes).is_some_and(|end| end <= source.len());
    for tensor in checkpoint.directory.iter() {
        assert!(inside(tensor.offset, tensor.bytes), "{} lies in the file", tensor.name);
    }
    let Ok(model) = bind(&checkpoint) else { return };
    for layer in 0..model.config.n_layers {
        for expert in [0, model.config.n_experts - 1] {
            let record = model.records.record(ExpertKey::new(layer, expert));
            for piece in record.pieces.as_slice() {
                assert!(inside(piece.offset, piece.bytes), "a piece lies in the file");
                assert!(piece.place + piece.bytes <= record.slot_bytes, "and in its slot");
            }
        }
    }
}
