//! Packs in memory: what is written is what is read, and hostile changes give an error or a model, never a panic.

use std::path::Path;

use checkpoint::pack::{self, Checksum, HEADER_BYTES, Layout, RECORD_ALIGN};
use checkpoint::{
    Checkpoint, CheckpointError, ErrorClass, MemorySource, Piece, Vocabulary, bind, open,
};
use proptest::prelude::*;
use units::ExpertKey;

use crate::support::{fixture, tiny};

const PATH: &str = "tiny.sakia";
const FAMILIES: [&str; 4] = ["qwen3moe", "qwen3next", "qwen35moe", "qwen4exp"];

/// A pack with zeros for weights, and with the checksums that those have.
pub(crate) fn pack_of(checkpoint: &Checkpoint) -> (Vec<u8>, Layout) {
    let layout = Layout::of(checkpoint, &bind(checkpoint).unwrap());
    let mut index = Vec::new();
    layout.write_index(&checkpoint.metadata, &mut index).unwrap();
    let mut bytes = vec![0; layout.file_bytes() as usize];
    bytes[layout.index_start() as usize..][..index.len()].copy_from_slice(&index);
    let sums: Vec<u8> = layout
        .units()
        .flat_map(|unit| Checksum::of(&vec![0; unit.bytes as usize]).to_le_bytes())
        .collect();
    assert_eq!(sums.len() as u64, layout.sums_bytes());
    bytes[layout.sums_start() as usize..][..sums.len()].copy_from_slice(&sums);
    let header = layout.header(Checksum::of(&index), Checksum::of(&sums));
    bytes[..header.len()].copy_from_slice(&header);
    (bytes, layout)
}

fn read(bytes: &[u8]) -> Result<(Checkpoint, Layout), CheckpointError> {
    pack::parse(Path::new(PATH), &MemorySource(bytes), Vocabulary::Load)
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Makes the checksums of header and index right, so that what they cover is looked at.
pub(crate) fn mend(bytes: &mut [u8]) {
    if bytes.len() < HEADER_BYTES as usize {
        return;
    }
    let (start, len) = (number(bytes, 24) as usize, number(bytes, 32) as usize);
    if let Some(index) = start.checked_add(len).and_then(|end| bytes.get(start..end)) {
        let sum = Checksum::of(index);
        bytes[40..48].copy_from_slice(&sum.to_le_bytes());
    }
    let sum = Checksum::of(&bytes[..88]);
    bytes[88..96].copy_from_slice(&sum.to_le_bytes());
}

/// Reads a pack and everything that can be asked of it.
fn use_all(bytes: &[u8]) {
    let Ok((checkpoint, layout)) = read(bytes) else { return };
    let size = bytes.len() as u64;
    let inside = |piece: &Piece| {
        assert!(piece.offset.checked_add(piece.bytes).is_some_and(|end| end <= size));
    };
    for tensor in checkpoint.directory.iter() {
        let mut memory = 0;
        for piece in tensor.pieces(0..tensor.bytes / tensor.row_bytes()) {
            inside(&piece);
            memory += piece.memory_bytes();
        }
        assert_eq!(memory, tensor.bytes);
    }
    assert!(layout.units().all(|unit| unit.offset + unit.bytes <= size));
    let _ = pack::read_sums(Path::new(PATH), &MemorySource(bytes), &layout);
    let Ok(model) = bind(&checkpoint) else { return };
    for layer in 0..model.config.n_layers {
        for expert in 0..model.config.n_experts {
            let record = model.records.record(ExpertKey::new(layer, expert));
            record.pieces.iter().for_each(inside);
            let matrices = record.matrices();
            for matrix in [matrices.gate, matrices.up, matrices.down] {
                assert!(matrix.place + matrix.bytes() as u64 <= record.slot_bytes);
            }
        }
    }
    if let (Some(shape), Some(table)) = (&model.config.ngram, &model.ngram_table) {
        let mut rows = vec![0; shape.heads()];
        shape.rows(&[0, shape.eos, model.config.vocab - 1], &mut rows);
        rows.iter().for_each(|row| inside(&table.pieces(*row, 1).0[0]));
    }
}

#[test]
fn a_pack_says_what_its_source_says() {
    for family in FAMILIES {
        let source = tiny(family).open().unwrap();
        let (bytes, layout) = pack_of(&source);
        let (packed, read) = read(&bytes).unwrap();
        assert_eq!(read, layout, "{family}");
        assert_eq!(packed.metadata, source.metadata, "{family}");
        let (model, of_source) = (bind(&packed).unwrap(), bind(&source).unwrap());
        assert_eq!(model.config, of_source.config);
        assert_eq!(model.warnings, of_source.warnings);
        for (ours, theirs) in packed.directory.iter().zip(source.directory.iter()) {
            let facts = |t: &checkpoint::TensorInfo| {
                (t.name.clone(), t.spelling().to_owned(), t.map(), t.block_type, t.bytes)
            };
            assert_eq!(facts(ours), facts(theirs));
        }
        use_all(&bytes);
        let ends: Vec<_> = layout.units().map(|unit| (unit.offset, unit.bytes)).collect();
        assert!(ends.is_sorted(), "units are in the order of the file");
    }
}

#[test]
fn every_expert_is_one_read_and_lands_as_it_lies() {
    for family in FAMILIES {
        let source = tiny(family).open().unwrap();
        let of_source = bind(&source).unwrap();
        let model = bind(&read(&pack_of(&source).0).unwrap().0).unwrap();
        for layer in 0..model.config.n_layers {
            for expert in 0..model.config.n_experts {
                let key = ExpertKey::new(layer, expert);
                let record = model.records.record(key);
                let [piece] = record.pieces.as_slice() else { panic!("{key}: {record:?}") };
                assert_eq!((piece.place, piece.offset % RECORD_ALIGN), (0, 0), "{key}");
                let (ours, theirs) = (record.matrices(), of_source.records.record(key).matrices());
                for (ours, theirs) in
                    [(ours.gate, theirs.gate), (ours.up, theirs.up), (ours.down, theirs.down)]
                {
                    assert_eq!(ours.place % 64, 0);
                    assert_eq!(
                        (ours.block_type, ours.bytes()),
                        (theirs.block_type, theirs.bytes())
                    );
                }
                assert!(ours.gate.place < ours.up.place && ours.up.place < ours.down.place);
            }
        }
        if let Some(table) = &model.ngram_table {
            let (pieces, rows) = table.pieces(0, table.rows());
            assert_eq!((pieces.len(), rows), (1, table.rows()), "rows lie behind each other");
        }
    }
}

#[test]
fn a_folder_keeps_its_names_and_its_scales_come_between_the_codes() {
    for folder in ["ok", "ok_mlx", "ok_sharded"] {
        let source = open(&fixture("bad/folders").join(folder)).unwrap();
        let (bytes, layout) = pack_of(&source);
        let (packed, read) = read(&bytes).unwrap();
        assert_eq!(read, layout);
        for (ours, theirs) in packed.directory.iter().zip(source.directory.iter()) {
            assert_eq!((ours.spelling(), ours.map()), (theirs.spelling(), theirs.map()));
            let rows = ours.bytes / ours.row_bytes();
            assert!(ours.pieces(0..rows).all(|piece| piece.blocks.is_none()), "{}", ours.name);
        }
        assert_eq!(bind(&packed).unwrap().config, bind(&source).unwrap().config);
    }
}

fn refused(bytes: &[u8], class: ErrorClass, words: &str) {
    let error = read(bytes).unwrap_err();
    assert_eq!(error.class(), class, "{error}");
    assert!(error.to_string().contains(words), "{error}");
}

#[test]
fn damage_is_named() {
    let (bytes, layout) = pack_of(&tiny("qwen4exp").open().unwrap());
    for len in [0, 1, 8, 95, 96, 200, bytes.len() - 1] {
        assert_eq!(read(&bytes[..len]).unwrap_err().class(), ErrorClass::Format, "{len}");
    }
    refused(&bytes[..bytes.len() - 1], ErrorClass::Format, "the file's size");
    let longer: Vec<u8> = bytes.iter().copied().chain([0]).collect();
    refused(&longer, ErrorClass::Format, "the file's size");
    let changed = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x10;
        bytes
    };
    refused(&changed(0), ErrorClass::Format, "the magic number");
    refused(&changed(8), ErrorClass::Unsupported, "version 17");
    for at in (12..HEADER_BYTES as usize).step_by(7) {
        refused(&changed(at), ErrorClass::Format, "the header");
    }
    for at in (HEADER_BYTES..HEADER_BYTES + number(&bytes, 32)).step_by(101) {
        refused(&changed(at as usize), ErrorClass::Format, "the index: found checksum");
    }
    let sums = changed(layout.sums_start() as usize);
    let (_, layout) = read(&sums).unwrap();
    let error = pack::read_sums(Path::new(PATH), &MemorySource(&sums), &layout).unwrap_err();
    assert!(error.to_string().contains("the table of checksums"), "{error}");
}

#[test]
fn places_outside_or_of_others_are_refused() {
    let (bytes, layout) = pack_of(&tiny("qwen3moe").open().unwrap());
    let find = |value: u64| {
        let index = &bytes[..layout.sums_start() as usize];
        (0..index.len() - 8).find(|at| number(index, *at) == value).unwrap()
    };
    let with = |at: usize, value: u64| {
        let mut bytes = bytes.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        mend(&mut bytes);
        bytes
    };
    let embed = layout.tensors().find(|t| t.name == "token_embd.weight").unwrap();
    let norm = layout.tensors().find(|t| t.name == "output_norm.weight").unwrap();
    for (value, words) in [
        (norm.offset, "bytes of its own"),
        (0, "bytes of its own"),
        (layout.file_bytes(), "bytes of its own"),
        (1 << 63, "bytes of its own"),
        (embed.offset + 1, "a multiple of 64"),
    ] {
        refused(&with(find(embed.offset), value), ErrorClass::Format, words);
    }
    let tables = layout.tables();
    let (first, second) = (&tables[0], &tables[1]);
    // The index ends with the tables, of three matrices each.
    let end = (HEADER_BYTES + number(&bytes, 32)) as usize;
    let base = |table: usize| end - (tables.len() - table) * (3 * 4 + 3 * 8 + 3 * 12) + 12;
    assert_eq!([0, 1].map(|table| number(&bytes, base(table))), [first.base, second.base]);
    for value in [first.base, first.base + 1, second.base + (1 << 40), u64::MAX - 16383] {
        let error = read(&with(base(1), value)).unwrap_err();
        assert_eq!(error.class(), ErrorClass::Format, "{error}");
        assert!(error.to_string().contains("records of block 1"), "{error}");
    }
    let stride = base(0) + 8;
    for value in [0, 64, first.bytes - 1, 1 << 40, u64::MAX] {
        refused(&with(stride, value), ErrorClass::Format, "records of block 0");
    }
    refused(&with(stride + 8, first.stride + 1), ErrorClass::Format, "records of block 0");
    refused(&with(stride + 8, 64), ErrorClass::Format, "inside 64 bytes");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn changed_packs_never_panic(
        family in 0..FAMILIES.len(),
        changes in prop::collection::vec((0.0..1.0_f64, any::<u8>()), 1..8),
        cut in 0.0..1.0_f64,
    ) {
        let (mut bytes, layout) = pack_of(&tiny(FAMILIES[family]).open().unwrap());
        for (at, value) in changes {
            bytes[(at * layout.data_start() as f64) as usize] = value;
        }
        if cut < 0.2 {
            bytes.truncate((cut * 5.0 * bytes.len() as f64) as usize);
        }
        use_all(&bytes);
        mend(&mut bytes);
        use_all(&bytes);
    }

    #[test]
    fn numbers_of_packs_at_their_edges_never_panic(
        family in 0..FAMILIES.len(),
        changes in prop::collection::vec((0.0..1.0_f64, 0..12_usize, prop::bool::ANY), 1..3),
    ) {
        const EDGES: [u64; 12] = [
            0, 1, 2, 64, 255, 1 << 14, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, u64::MAX,
        ];
        let (mut bytes, layout) = pack_of(&tiny(FAMILIES[family]).open().unwrap());
        for (at, edge, wide) in changes {
            // Of the header and of the index.
            let end = layout.sums_start() as f64 - 8.0;
            let at = (at * end) as usize;
            let len = if wide { 8 } else { 4 };
            bytes[at..at + len].copy_from_slice(&EDGES[edge].to_le_bytes()[..len]);
        }
        mend(&mut bytes);
        use_all(&bytes);
    }
}
