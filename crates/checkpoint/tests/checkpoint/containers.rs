//! The GGUF container: values, arrays, tensors, limits.

use std::path::Path;

use checkpoint::{MemorySource, MetaArray, MetaValue, Vocabulary, bind, parse, parse_parts};
use quant::BlockType;

use crate::support::{Gguf, VOCAB, Value, tiny};

/// The class of error that reading `bytes` gives.
fn class_of(bytes: &[u8]) -> String {
    match parse(Path::new("tiny.gguf"), &MemorySource(bytes)) {
        Ok(_) => "accept".to_owned(),
        Err(error) => error.class().to_string(),
    }
}

/// An array value: element type, length, elements.
fn array(kind: u32, len: u64, elements: &[u8]) -> Value {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend(len.to_le_bytes());
    bytes.extend(elements);
    Value::Raw(9, bytes)
}

#[test]
fn every_value_type_is_read() {
    let mut file = Gguf::new();
    let raw: [(&str, u32, &[u8]); 6] = [
        ("u8", 0, &[200]),
        ("i8", 1, &[0x80]),
        ("u16", 2, &[0xff, 0xff]),
        ("i16", 3, &[0, 0x80]),
        ("i64", 11, &[0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
        ("f64", 12, &[0, 0, 0, 0, 0, 0, 0xf8, 0x3f]),
    ];
    for (key, kind, bytes) in raw {
        file.set(key, Value::Raw(kind, bytes.to_vec()));
    }
    file.set("u64", Value::U64(u64::MAX)).set("f32", Value::F32(0.1));
    file.set("text", Value::Str("Ġé".to_owned())).set("flag", Value::Bool(true));
    file.set("u8s", Value::U8s(vec![1, 255])).set("i32s", Value::I32s(vec![-1, 7]));
    file.set("f32s", Value::F32s(vec![0.5])).set("bools", Value::Bools(vec![true, false]));
    file.set("none", Value::Strings(Vec::new()));
    let metadata = file.open().unwrap().metadata;
    for (key, value) in [
        ("u8", MetaValue::U64(200)),
        ("i8", MetaValue::I64(-128)),
        ("u16", MetaValue::U64(65535)),
        ("i16", MetaValue::I64(-32768)),
        ("u64", MetaValue::U64(u64::MAX)),
        ("i64", MetaValue::I64(-2)),
        ("f32", MetaValue::F64(f64::from(0.1_f32))),
        ("f64", MetaValue::F64(1.5)),
        ("text", MetaValue::String("Ġé".to_owned())),
        ("flag", MetaValue::Bool(true)),
        ("u8s", MetaValue::Array(MetaArray::U64s(vec![1, 255]))),
        ("i32s", MetaValue::Array(MetaArray::I64s(vec![-1, 7]))),
        ("f32s", MetaValue::Array(MetaArray::F64s(vec![0.5]))),
        ("bools", MetaValue::Array(MetaArray::Bools(vec![true, false]))),
    ] {
        assert_eq!(metadata.get(key), Some(&value), "{key}");
    }
    assert_eq!(metadata.array_len("none"), Some(0));
}

#[test]
fn arrays_of_arrays_are_passed_over_up_to_a_depth() {
    let nested = |depth: u32| {
        // The innermost array holds one byte; each of the others holds one array.
        let mut bytes = Vec::new();
        for _ in 1..depth {
            bytes.extend(9_u32.to_le_bytes());
            bytes.extend(1_u64.to_le_bytes());
        }
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(1_u64.to_le_bytes());
        bytes.push(7);
        Value::Raw(9, bytes)
    };
    for (depth, expected) in
        [(1, "accept"), (2, "accept"), (4, "accept"), (5, "format"), (99, "format")]
    {
        let mut file = tiny("qwen3moe");
        file.set("unknown", nested(depth)).set("after", Value::U32(5));
        assert_eq!(file.class(), expected, "{depth}");
        if expected == "accept" {
            let metadata = file.open().unwrap().metadata;
            assert_eq!((metadata.array_len("unknown"), metadata.u64("after")), (Some(1), Some(5)));
        }
    }
}

#[test]
fn lengths_beyond_the_file_or_the_limits_are_refused() {
    for (what, value, expected) in [
        ("a byte more than there is", array(0, 1000, &[0; 10]), "format"),
        ("a product that wraps", array(10, 1 << 61, &[0; 16]), "format"),
        ("strings that cannot all be there", array(8, 1 << 40, &[0; 64]), "format"),
        ("an unknown element type", array(13, 1, &[0; 8]), "format"),
        ("an array element that is a bad boolean", array(7, 2, &[1, 2]), "format"),
        ("a string in an array that is too long", array(8, 1, &[0xff; 8]), "format"),
        (
            "a string in an array that is not UTF-8",
            array(8, 1, &[2, 0, 0, 0, 0, 0, 0, 0, 0xc3, 0x28]),
            "format",
        ),
        ("a boolean that is 2", Value::Raw(7, vec![2]), "format"),
        ("a string that is not UTF-8", Value::Raw(8, vec![1, 0, 0, 0, 0, 0, 0, 0, 0xff]), "format"),
    ] {
        let mut file = Gguf::new();
        file.set("key", value);
        assert_eq!(class_of(&file.write()), expected, "{what}");
    }
    let mut file = Gguf::new();
    file.set("key", Value::U8s(vec![0; (1 << 22) + 1]));
    assert_eq!(class_of(&file.write()), "limit");
    let mut file = Gguf::new();
    file.set(&"k".repeat(1 << 16), Value::U32(0));
    assert_eq!(class_of(&file.write()), "limit");
}

#[test]
fn alignment_is_a_power_of_two_in_its_range() {
    for (alignment, expected) in [
        (8, "accept"),
        (32, "accept"),
        (4096, "accept"),
        (4, "format"),
        (0, "format"),
        (48, "format"),
        (1 << 21, "format"),
    ] {
        let mut file = tiny("qwen3moe");
        file.set("general.alignment", Value::U32(alignment));
        file.alignment = u64::from(alignment).max(8).next_power_of_two();
        assert_eq!(file.class(), expected, "{alignment}");
    }
    // Tensors aligned to 8 in a file that promises 32.
    let mut file = tiny("qwen3moe");
    file.alignment = 8;
    assert_eq!(file.class(), "format");
}

#[test]
fn a_header_cut_anywhere_is_refused() {
    let mut file = tiny("qwen3next");
    file.set("unknown", array(9, 1, &[0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7]));
    let whole = file.write();
    let header = file.header().len();
    for end in 0..header {
        assert_eq!(class_of(&whole[..end]), "format", "cut at {end} of {header}");
    }
    assert_eq!(class_of(&whole[..whole.len() - 33]), "format");
    // Padding after the last tensor may be left out.
    let payload = whole.len() - 32;
    assert!((payload..=whole.len()).any(|end| class_of(&whole[..end]) == "accept"));
}

#[test]
fn tensors_may_touch_but_not_overlap() {
    let mut file = Gguf::new();
    file.tensor("a", &[8], BlockType::F32).tensor("b", &[8], BlockType::F32);
    let bytes = file.write();
    assert_eq!(class_of(&bytes), "accept");
    // Both at offset 0: the last 8 bytes of the header are the second offset.
    let mut same = bytes.clone();
    let end = file.header().len();
    same[end - 8..end].copy_from_slice(&0_u64.to_le_bytes());
    assert_eq!(class_of(&same), "format");
}

#[test]
fn tensor_numbers_and_names_have_limits() {
    let mut file = Gguf::new();
    file.tensor(&"n".repeat(1025), &[8], BlockType::F32);
    assert_eq!(class_of(&file.write()), "limit");
    let mut file = Gguf::new();
    file.tensor("", &[8], BlockType::F32);
    assert_eq!(class_of(&file.write()), "format");
    let mut file = Gguf::new();
    for index in 0..=1 << 16 {
        file.tensor(&format!("t{index}"), &[1], BlockType::F16);
    }
    assert_eq!(class_of(&file.write()), "limit");
    file.tensors.pop();
    assert_eq!(class_of(&file.write()), "accept");
}

#[test]
fn parts_share_the_limit_on_tensors() {
    let part = |number: u32, n_tensors: u32| {
        let mut file = Gguf::new();
        file.set("split.no", Value::U32(number)).set("split.count", Value::U32(2));
        for index in 0..n_tensors {
            file.tensor(&format!("{number}.{index}"), &[1], BlockType::F16);
        }
        file.write()
    };
    for (second, expected) in [(1 << 15, None), ((1 << 15) + 1, Some("limit"))] {
        let bytes = [part(0, 1 << 15), part(1, second)];
        let [first, second] = [MemorySource(&bytes[0]), MemorySource(&bytes[1])];
        let name = Path::new("part.gguf");
        let result = parse_parts(&[(name, &first), (name, &second)], Vocabulary::Load);
        let class = result.err().map(|error| error.class().to_string());
        assert_eq!(class.as_deref(), expected);
    }
}

#[test]
fn a_header_that_goes_on_for_too_long_is_refused() {
    use std::os::unix::fs::FileExt;
    // 80 arrays of 4 MiB of zeros in an array: 320 MiB, none of it on disk.
    let mut file = Gguf::new();
    file.set("long", array(9, 80, &[]));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.gguf");
    let header = file.header();
    let sparse = std::fs::File::create(&path).unwrap();
    sparse.write_all_at(&header, 0).unwrap();
    let mut at = header.len() as u64;
    for _ in 0..80 {
        sparse.write_all_at(&(1_u64 << 22).to_le_bytes(), at + 4).unwrap();
        at += 12 + (1 << 22);
    }
    sparse.set_len(at).unwrap();
    let error = checkpoint::open(&path).unwrap_err();
    assert_eq!(error.class().to_string(), "limit", "{error}");
}

#[test]
fn a_skipped_vocabulary_binds_all_the_same_and_is_checked() {
    let open = |file: &Gguf| {
        let bytes = file.write();
        parse_parts(&[(Path::new("tiny.gguf"), &MemorySource(&bytes))], Vocabulary::Skip)
    };
    let mut file = tiny("qwen3next");
    let checkpoint = open(&file).unwrap();
    assert_eq!(checkpoint.metadata.strings("tokenizer.ggml.tokens"), None);
    assert_eq!(checkpoint.metadata.array_len("tokenizer.ggml.tokens"), Some(VOCAB));
    assert_eq!(checkpoint.metadata.u64("tokenizer.ggml.eos_token_id"), Some(VOCAB - 1));
    bind(&checkpoint).unwrap();
    file.set("tokenizer.ggml.token_type", Value::I32s(vec![1; 3]));
    let error = bind(&open(&file).unwrap()).unwrap_err();
    assert_eq!(error.class().to_string(), "config");
    file.set("tokenizer.ggml.token_type", Value::Strings(vec![String::new(); VOCAB as usize]));
    let error = bind(&open(&file).unwrap()).unwrap_err();
    assert_eq!(error.class().to_string(), "config");
}

#[test]
fn names_from_the_file_cannot_steer_the_terminal() {
    let mut file = tiny("qwen3moe");
    file.tensor("evil\x1b[2J\n", &[8], BlockType::F32);
    let text = file.model().unwrap_err().to_string();
    assert!(text.contains("evil\\u{1b}[2J\\u{a}"), "{text}");
    let mut file = tiny("qwen3moe");
    file.set("general.architecture", Value::Str("\x1b]0;x\x07".repeat(1000)));
    let text = file.model().unwrap_err().to_string();
    assert!(!text.contains('\x1b') && text.len() < 1000, "{text}");
}
