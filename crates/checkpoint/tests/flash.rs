//! The folder of a published 104 GB model in its exact shape, whose data is holes.
//!
//! Expected numbers are those that others published for the files of the conversion to MLX.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use checkpoint::{Checkpoint, LayerKind, Model, Role, Vocabulary, bind, open_with};
use units::{ExpertKey, FileIndex};
use xtask::synth::{self, Geometry};

/// Codes, then scales, then biases of one matrix of an expert.
const SLICES: [u64; 3] = [819_200, 51_200, 51_200];

fn open(folder: &Path) -> (Checkpoint, Model) {
    let folder = folder.join("flash");
    synth::sparse_folder(&folder, &Geometry::published()).unwrap();
    let checkpoint = open_with(&folder, Vocabulary::Skip).unwrap();
    let model = bind(&checkpoint).unwrap();
    (checkpoint, model)
}

#[test]
fn a_folder_of_104_gb_has_the_published_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let (checkpoint, model) = open(folder.path());
    assert_eq!(checkpoint.files.len(), 11);
    let config = &model.config;
    assert_eq!((config.n_layers, config.hidden, config.vocab), (48, 2560, 248_320));
    assert_eq!((config.n_experts, config.top_k, config.expert_width), (512, 10, 640));
    let attention = (0..48).filter(|layer| config.layers[*layer] == LayerKind::Attention);
    assert_eq!(attention.collect::<Vec<_>>(), (3..48).step_by(4).collect::<Vec<_>>());
    assert_eq!(model.records.payload_bytes(), 67_947_724_800);
    let table = model.ngram_table.as_ref().unwrap();
    assert_eq!((table.rows(), table.row_width(), table.row_bytes()), (320_001_536, 160, 100));
    assert_eq!(table.tensor.bytes, 32_000_153_600);
    // What is left of the text: 2,924,005,400 bytes, of which 280 are the constants of the hash.
    let mut resident = 0;
    model.tensors.each(&mut |_: Role, tensor| resident += tensor.bytes);
    assert_eq!(resident, 2_924_005_400 - 280);
    assert!(model.draft.is_none());
}

#[test]
fn an_expert_is_nine_slices_of_the_published_lengths_and_places() {
    let folder = tempfile::tempdir().unwrap();
    let (_, model) = open(folder.path());
    for (layer, torn) in [(0, false), (8, true), (47, false)] {
        let [first, later] = [0, 300].map(|e| model.records.record(ExpertKey::new(layer, e)));
        assert_eq!((later.bytes, later.slot_bytes), (2_764_800, 2_764_800));
        assert_eq!(later.pieces.len(), 3, "each takes its scales and biases along");
        let mut files: Vec<FileIndex> = Vec::new();
        for (piece, origin) in later.pieces.iter().zip(first.pieces.iter()) {
            let (blocks, origins) = (piece.blocks.unwrap(), origin.blocks.unwrap());
            assert_eq!(piece.bytes, SLICES[0]);
            assert_eq!((blocks.codes, blocks.scale, blocks.stride()), (32, 2, 36));
            assert_eq!(piece.offset - origin.offset, 300 * SLICES[0]);
            assert_eq!(blocks.scales.offset - origins.scales.offset, 300 * SLICES[1]);
            let (bias, origin) = (blocks.biases.unwrap(), origins.biases.unwrap());
            assert_eq!(bias.offset - origin.offset, 300 * SLICES[2]);
            files.extend([piece.file, blocks.scales.file, bias.file]);
        }
        // Only the weights of layer 8's down projection lie in another file than its scales and biases.
        let down = &files[6..];
        assert_eq!(down[0] != down[1], torn, "layer {layer}: {files:?}");
        assert_eq!(down[1], down[2]);
        assert!(files[..6].chunks(3).all(|matrix| matrix.iter().all(|file| *file == matrix[0])));
    }
}
