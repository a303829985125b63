//! Any bytes as a model folder: `config.json`, then the header of each safetensors file, with a zero byte between them.
//! An error or a model, never a panic, and no range outside a file.
#![no_main]

use std::path::{Path, PathBuf};

use checkpoint::{MemorySource, Piece, Source, bind, parse_folder};
use fuzz::{Padded, safetensors};
use libfuzzer_sys::fuzz_target;
use units::ExpertKey;

/// Files beside the configuration; more would only repeat what two show.
const FILES: usize = 3;

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.split(|byte| *byte == 0);
    let config = MemorySource(parts.next().unwrap_or_default());
    let headers: Vec<(PathBuf, (Vec<u8>, u64))> = parts
        .take(FILES)
        .enumerate()
        .map(|(i, header)| (format!("{i}.safetensors").into(), safetensors(header)))
        .collect();
    let sources: Vec<Padded<'_>> =
        headers.iter().map(|(_, (bytes, len))| Padded { bytes, len: *len }).collect();
    let files: Vec<(&Path, &dyn Source)> = headers
        .iter()
        .zip(&sources)
        .map(|((path, _), source)| (path.as_path(), source as &dyn Source))
        .collect();
    let Ok(checkpoint) = parse_folder((Path::new("config.json"), &config), &files, None) else {
        return;
    };
    let inside = |piece: &Piece| {
        let end = piece.offset.checked_add(piece.bytes).expect("an end in a file");
        assert!(end <= checkpoint.files[piece.file.get()].bytes, "a piece lies in its file");
    };
    for tensor in checkpoint.directory.iter() {
        let mut memory = 0;
        for piece in tensor.pieces(0..tensor.bytes / tensor.row_bytes()) {
            inside(&piece);
            memory += piece.memory_bytes();
        }
        assert_eq!(memory, tensor.bytes, "{} is whole", tensor.name);
    }
    let Ok(model) = bind(&checkpoint) else { return };
    for layer in 0..model.config.n_layers {
        for expert in [0, model.config.n_experts - 1] {
            let record = model.records.record(ExpertKey::new(layer, expert));
            for piece in record.pieces.as_slice() {
                inside(piece);
                assert!(piece.place + piece.memory_bytes() <= record.slot_bytes, "and in its slot");
            }
        }
    }
});
