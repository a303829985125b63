//! An n-gram table of FP8 values with one scale for all shards: folders that have it, and folders and packs that have
//! something like it and are refused.

use std::path::Path;

use checkpoint::{
    Checkpoint, CheckpointError, ErrorClass, MemorySource, Vocabulary, bind, pack, parse_folder,
};
use quant::BlockType;
use serde_json::{Map, Value, json};

use crate::packs::{mend, pack_of};
use crate::support::tiny;

const ROWS: &str = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";

/// Tensors of a folder: name, type, shape.
type Tensors = Vec<(String, &'static str, Vec<u64>)>;

/// Reads a folder of these tensors and an embedding, all zeros.
fn read(tensors: &Tensors) -> Result<Checkpoint, CheckpointError> {
    let config = json!({
        "model_type": "qwen4_exp", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 40,
        "num_experts": 4, "tie_word_embeddings": true, "output_gate_type": "sigmoid",
    });
    let config = config.to_string();
    let (mut header, mut end) = (Map::new(), 0);
    let embedding = ("model.language_model.embed_tokens.weight".to_owned(), "BF16", vec![40, 64]);
    for (name, dtype, shape) in [&embedding].into_iter().chain(tensors) {
        let start = end;
        let width = match *dtype {
            "F8_E4M3" | "F8_E5M2" => 1,
            "BF16" | "F16" => 2,
            "F64" | "I64" => 8,
            _ => 4,
        };
        end += width * shape.iter().product::<u64>();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        assert!(header.insert(name.clone(), entry).is_none(), "{name} twice");
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + end as usize, 0);
    let files: [(&Path, &dyn checkpoint::Source); 1] =
        [(Path::new("m.safetensors"), &MemorySource(&file))];
    parse_folder((Path::new("config.json"), &MemorySource(config.as_bytes())), &files, None)
}

/// Two shards of rows of 160 values, as they are called in one naming or the other.
fn shards(naming: &str, dtype: &'static str) -> Tensors {
    let shard =
        |(number, rows)| (format!("{ROWS}.{naming}{number}.weight"), dtype, vec![rows, 160]);
    [(0, 7), (1, 6)].map(shard).into()
}

fn scale(dtype: &'static str, shape: &[u64]) -> (String, &'static str, Vec<u64>) {
    (format!("{ROWS}.weight_scale"), dtype, shape.to_vec())
}

#[test]
fn one_scale_belongs_to_all_shards_of_either_naming() {
    for naming in ["shard_", "shards."] {
        for (dtype, block_type) in
            [("F32", BlockType::F32), ("BF16", BlockType::Bf16), ("F16", BlockType::F16)]
        {
            for shape in [&[][..], &[1]] {
                let mut tensors = shards(naming, "F8_E4M3");
                // Wherever it stands among them.
                tensors.insert(shape.len(), scale(dtype, shape));
                let checkpoint = read(&tensors).unwrap();
                let table = checkpoint.directory.get("per_layer_token_embd.weight").unwrap();
                assert_eq!((table.block_type, &table.shape[..]), (BlockType::E4m3, &[13, 160][..]));
                assert_eq!((table.bytes, table.row_bytes()), (13 * 160, 160));
                let places: Vec<_> =
                    table.pieces(6..8).map(|piece| (piece.bytes, piece.place)).collect();
                assert_eq!(places, [(160, 0), (160, 160)], "rows of both shards, as they lie");
                let scale = checkpoint.directory.get("per_layer_token_embd.scale").unwrap();
                assert_eq!((scale.block_type, &scale.shape[..]), (block_type, &[1][..]));
                assert_eq!(scale.spelling(), format!("{ROWS}.weight_scale"));
                let pieces: Vec<_> = scale.pieces(0..1).collect();
                assert_eq!(pieces.len(), 1);
                assert_eq!(pieces[0].bytes, scale.bytes);
            }
        }
    }
}

fn refused(tensors: &Tensors, class: ErrorClass, words: &[&str]) {
    let error = read(tensors).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.class(), class, "{text}");
    assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
}

#[test]
fn a_scale_that_is_missing_misplaced_or_no_number_is_refused_by_name() {
    use ErrorClass::{Format, Missing, Shape, Unsupported};
    let with = |tensors: Tensors, more: &[(String, &'static str, Vec<u64>)]| -> Tensors {
        tensors.into_iter().chain(more.iter().cloned()).collect()
    };
    for naming in ["shard_", "shards."] {
        let fp8 = || shards(naming, "F8_E4M3");
        let shard = format!("`{ROWS}.{naming}0.weight`");
        let name = format!("`{ROWS}.weight_scale`");
        refused(&fp8(), Missing, &[&name, &shard, "FP8"]);
        for dtype in ["BF16", "F16", "F32"] {
            let plain = with(shards(naming, dtype), &[scale("F32", &[])]);
            refused(&plain, Unsupported, &[&name, &shard, dtype, "F8_E4M3"]);
        }
        for shape in [&[2][..], &[1, 1], &[13]] {
            refused(&with(fp8(), &[scale("F32", shape)]), Shape, &[&name, "one number"]);
        }
        for dtype in ["I64", "U32", "F64", "F8_E4M3"] {
            refused(&with(fp8(), &[scale(dtype, &[1])]), Unsupported, &[&name, dtype]);
        }
        // Scales of each shard beside the one of all.
        let own = (format!("{ROWS}.{naming}1.weight_scale_inv"), "F32", vec![1, 2]);
        refused(&with(fp8(), &[scale("F32", &[]), own]), Unsupported, &[&name, "second scale"]);
        // One shard of another type.
        let mut mixed = with(fp8(), &[scale("F32", &[])]);
        mixed[1].1 = "BF16";
        refused(&mixed, Unsupported, &[&name, &format!("{naming}1.weight"), "BF16"]);
        // Of another layer, and of two.
        let (mut other, dtype, shape) = scale("F32", &[]);
        other = other.replace("layers.1", "layers.0");
        let other = (other, dtype, shape);
        refused(
            &with(fp8(), std::slice::from_ref(&other)),
            Unsupported,
            &["layers.0", "layers.1", &name],
        );
        refused(&with(fp8(), &[other, scale("F32", &[])]), Format, &["another name"]);
    }
    // What is not known stays unknown.
    for name in ["weight_scale_inv", "weight_scale_2", "shard_0.weight_scale", "input_scale"] {
        let odd = (format!("{ROWS}.{name}"), "F32", vec![1]);
        let tensors = with(shards("shard_", "F8_E4M3"), &[scale("F32", &[]), odd]);
        refused(&tensors, Unsupported, &[name]);
    }
}

#[test]
fn a_gguf_table_has_no_scale() {
    let mut file = tiny("qwen4exp");
    file.tensor("per_layer_token_embd.scale", &[1], BlockType::F32);
    let error = file.model().unwrap_err();
    assert_eq!(error.class(), ErrorClass::Unsupported, "{error}");
    let text = error.to_string();
    let words = ["`per_layer_token_embd.scale`", "`per_layer_token_embd.weight`", "Q4_0", "E4M3"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

/// Binds a pack of a tiny model whose tensor `name` is said to be E4M3, for which there is room where it lies.
fn pack_with_e4m3(name: &str) -> Result<(), CheckpointError> {
    let (mut bytes, layout) = pack_of(&tiny("qwen4exp").open().unwrap());
    let index = &bytes[..layout.sums_start() as usize];
    let text = [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
    let found: Vec<usize> =
        (0..index.len() - text.len()).filter(|at| index[*at..].starts_with(&text)).collect();
    let [at] = found[..] else { panic!("{name} is there once: {found:?}") };
    // Behind the name an empty spelling and the kind.
    let at = at + text.len() + 8 + 4;
    bytes[at..at + 8].copy_from_slice(&[2, 0, 1, 0, 0, 0, 0, 0]);
    mend(&mut bytes);
    let read = pack::parse(Path::new("tiny.sakia"), &MemorySource(&bytes), Vocabulary::Load);
    bind(&read?.0).map(|_| ())
}

#[test]
fn a_pack_has_bare_e4m3_in_its_table_alone_and_with_its_scale() {
    for (name, class, words) in [
        ("blk.0.ssm_alpha.weight", ErrorClass::Unsupported, "in the n-gram table only"),
        ("output.weight", ErrorClass::Unsupported, "in the n-gram table only"),
        ("per_layer_token_embd.weight", ErrorClass::Missing, "`per_layer_token_embd.scale`"),
    ] {
        let error = pack_with_e4m3(name).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.class(), class, "{text}");
        assert!(text.contains(&format!("`{name}`")) && text.contains(words), "{text}");
    }
}
