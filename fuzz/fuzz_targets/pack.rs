//! Any bytes as a GGUF file whose pack is made, read back, and read again with numbers changed by the last bytes of the
//! input: the same layout first, then an error or a model, never a panic, and no range outside the file.
#![no_main]

use std::path::Path;

use checkpoint::pack::{self, Checksum, Layout};
use checkpoint::{Checkpoint, CheckpointError, Piece, Source, Vocabulary, bind, parse};
use fuzz::{Hollow, Padded};
use libfuzzer_sys::fuzz_target;
use units::ExpertKey;

/// Where, and which value: 4 and 8 bytes.
const CHANGE: usize = 12;
const CHANGES: usize = 2;

fuzz_target!(|bytes: &[u8]| {
    let Ok(checkpoint) = parse(Path::new("fuzzed.gguf"), &Hollow(bytes)) else { return };
    let Ok(model) = bind(&checkpoint) else { return };
    let layout = Layout::of(&checkpoint, &model);
    let mut head = head(&checkpoint, &layout);
    let len = layout.file_bytes();
    match read(&Padded { bytes: &head, len }) {
        Ok((_, read)) => assert_eq!(read, layout),
        // A model that GGUF describes in fewer bytes may be beyond the limits of a pack.
        Err(CheckpointError::Limit { .. }) => return,
        Err(error) => panic!("{error}"),
    }
    let script = &bytes[bytes.len().saturating_sub(CHANGES * CHANGE)..];
    for change in script.chunks_exact(CHANGE) {
        let (at, value) = change.split_at(4);
        let at = u32::from_le_bytes(at.try_into().expect("four bytes")) as usize;
        let at = at % (layout.sums_start() as usize - value.len());
        head[at..at + value.len()].copy_from_slice(value);
    }
    mend(&mut head);
    use_all(&Padded { bytes: &head, len });
});

fn read(source: &dyn Source) -> Result<(Checkpoint, Layout), CheckpointError> {
    pack::parse(Path::new("fuzzed.sakia"), source, Vocabulary::Load)
}

/// Header and index; the checksums behind them are not looked at.
fn head(checkpoint: &Checkpoint, layout: &Layout) -> Vec<u8> {
    let mut head = vec![0; layout.index_start() as usize];
    layout.write_index(&checkpoint.metadata, &mut head).expect("memory takes it");
    let index = &head[layout.index_start() as usize..];
    let header = layout.header(Checksum::of(index), 0);
    head[..header.len()].copy_from_slice(&header);
    head.resize(layout.sums_start() as usize, 0);
    head
}

/// Makes the checksums of index and header right.
fn mend(head: &mut [u8]) {
    let number = |at: usize| {
        u64::from_le_bytes(*head[at..].first_chunk().expect("a number of the header")) as usize
    };
    let (start, len) = (number(24), number(32));
    let sum = start.checked_add(len).and_then(|end| head.get(start..end)).map(Checksum::of);
    if let Some(sum) = sum {
        head[40..48].copy_from_slice(&sum.to_le_bytes());
    }
    let sum = Checksum::of(&head[..88]);
    head[88..96].copy_from_slice(&sum.to_le_bytes());
}

fn use_all(source: &dyn Source) {
    let Ok((checkpoint, layout)) = read(source) else { return };
    let inside = |piece: &Piece| {
        let end = piece.offset.checked_add(piece.bytes);
        assert!(end.is_some_and(|end| end <= source.len()), "a piece lies in the file");
    };
    for tensor in checkpoint.directory.iter() {
        let pieces = tensor.pieces(0..tensor.bytes / tensor.row_bytes());
        let memory: u64 = pieces.inspect(inside).map(|piece| piece.memory_bytes()).sum();
        assert_eq!(memory, tensor.bytes, "{} is whole", tensor.name);
    }
    // As many as there may be: an input could describe more than can be walked in time.
    for unit in layout.units().take(1 << 12) {
        assert!(unit.offset + unit.bytes <= source.len(), "a unit lies in the file");
    }
    let Ok(model) = bind(&checkpoint) else { return };
    for layer in 0..model.config.n_layers {
        for expert in [0, model.config.n_experts - 1] {
            let record = model.records.record(ExpertKey::new(layer, expert));
            for piece in record.pieces.as_slice() {
                inside(piece);
                assert!(piece.place + piece.bytes <= record.slot_bytes, "and in its slot");
            }
        }
    }
}
