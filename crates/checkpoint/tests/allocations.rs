//! What parsing takes from the heap, whatever the file says: at most 64 MiB at any moment.
//!
//! One test, because the allocator counts for the whole process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "checkpoint/support.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use checkpoint::{
    MemorySource, SPLIT_RULES, Source, Vocabulary, bind, open, parse, parse_folder, parse_parts,
    parse_text,
};
use quant::BlockType;

use self::support::{Gguf, Value, fixture, manifest, tiny};

const MIB: usize = 1 << 20;

/// The system allocator, which also knows how much it has given out.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code, reason = "an allocator is an unsafe trait; this one passes everything on")]
// SAFETY: every call is passed on to the system allocator unchanged; the counters do not touch the memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Most bytes that `work` had on the heap at once, and those that its result still has.
fn heap<T>(work: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = work();
    let (peak, after) = (PEAK.load(Ordering::Relaxed), LIVE.load(Ordering::Relaxed));
    (result, peak - before, after.saturating_sub(before))
}

/// Parses and binds; the class of error, and the peak.
fn outcome(file: &Gguf) -> (String, usize) {
    let bytes = file.write();
    let source = MemorySource(&bytes);
    let (result, peak, _) = heap(|| bind(&parse(Path::new("hostile.gguf"), &source)?));
    (result.err().map_or_else(|| "accept".to_owned(), |e| e.class().to_string()), peak)
}

fn every_file_of_the_manifest() {
    let manifest = manifest("bad/manifest.json");
    for case in manifest["cases"].as_array().unwrap() {
        let path = case["path"].as_str().unwrap();
        if path.starts_with("gguf/") {
            let path = fixture("bad").join(path);
            let (_, peak, _) =
                heap(|| open(&path).and_then(|checkpoint| bind(&checkpoint)).is_ok());
            assert!(peak < MIB, "{}: {peak} bytes", path.display());
        }
    }
}

/// A vocabulary as large as the largest that is known: 248,320 tokens, 247,587 merges.
fn a_large_vocabulary() {
    let (n_tokens, n_merges) = (248_320_u64, 247_587);
    let mut file = tiny("qwen35moe");
    file.set(
        "tokenizer.ggml.tokens",
        Value::Strings((0..n_tokens).map(|i| format!("Ġt{i:06}")).collect()),
    );
    file.set(
        "tokenizer.ggml.merges",
        Value::Strings((0..n_merges).map(|i| format!("Ġ t{i:06}")).collect()),
    );
    file.set("tokenizer.ggml.token_type", Value::I32s(vec![1; n_tokens as usize]));
    for name in ["token_embd.weight", "output.weight"] {
        file.find(name).ne[1] = n_tokens;
    }
    let bytes = file.write();
    let name = Path::new("large.gguf");
    let read = |vocabulary| parse_parts(&[(name, &MemorySource(&bytes))], vocabulary).unwrap();
    let (mut checkpoint, peak, kept) = heap(|| read(Vocabulary::Load));
    // Text, one u32 for each string's end, one i64 for each token's type; and no more than that at any moment.
    let text = (n_tokens * 9 + n_merges * 10) as usize;
    let needed = text + 4 * (n_tokens + n_merges) as usize + 8 * n_tokens as usize;
    eprintln!("large vocabulary: {needed} bytes needed, {kept} kept, {peak} at the peak");
    assert!(kept < needed + MIB / 4 && peak < needed + MIB / 4, "{kept} kept, {peak} at the peak");
    bind(&checkpoint).unwrap();
    let live = LIVE.load(Ordering::Relaxed);
    checkpoint.metadata.drop_vocabulary();
    let freed = live - LIVE.load(Ordering::Relaxed);
    assert!(freed + 1024 >= needed, "{freed} of {needed} bytes came back");
    let (_checkpoint, peak, _) = heap(|| read(Vocabulary::Skip));
    eprintln!("large vocabulary, skipped: {peak} at the peak");
    assert!(peak < MIB / 4, "{peak}");
}

/// The same vocabulary as a `tokenizer.json` of 16 MB, merges as pairs, ids backwards.
fn a_large_tokenizer() {
    let (n_tokens, n_merges) = (248_320_u64, 247_587);
    let vocab: Vec<String> =
        (0..n_tokens).map(|i| format!(r#""Ġt{i:06}":{}"#, n_tokens - 1 - i)).collect();
    let merges: Vec<String> = (0..n_merges).map(|i| format!(r#"["Ġ","t{i:06}"]"#)).collect();
    let rule = SPLIT_RULES[1].1.replace('\\', "\\\\");
    let text = format!(
        r#"{{"normalizer":{{"type":"NFC"}},"pre_tokenizer":{{"type":"Sequence","pretokenizers":[{{"type":"Split",
        "pattern":{{"Regex":"{rule}"}},"behavior":"Isolated"}},{{"type":"ByteLevel","add_prefix_space":false,
        "use_regex":false}}]}},"decoder":{{"type":"ByteLevel"}},"model":{{"type":"BPE","vocab":{{{}}},"merges":[{}]}}}}"#,
        vocab.join(","),
        merges.join(",\n      "),
    );
    drop((vocab, merges));
    let source = MemorySource(text.as_bytes());
    let files: [(&str, &dyn Source); 1] = [("tokenizer.json", &source)];
    let (metadata, peak, kept) = heap(|| parse_text(&files, "qwen35moe", Some(n_tokens)).unwrap());
    let needed = (n_tokens * 9 + n_merges * 10 + 4 * (n_tokens + n_merges) + 8 * n_tokens) as usize;
    let bytes = text.len();
    eprintln!("large tokenizer of {bytes} bytes: {needed} needed, {kept} kept, {peak} at the peak");
    assert_eq!(metadata.strings("tokenizer.ggml.tokens").unwrap().get(0), Some("Ġt248319"));
    assert!(kept < needed + MIB / 4, "{kept} kept");
    assert!(peak < 32 * MIB, "{peak} at the peak");
}

/// Texts that hold as much as they can of what is kept, or of what is looked at once.
fn tokenizers_made_to_take_memory() {
    let list = |start: &str, item: &str, bytes: usize| {
        let items = vec![item; bytes / (item.len() + 1)].join(",");
        format!(r#"{{"{start}":[{items}]}}"#)
    };
    let numbered =
        |n: usize, item: &dyn Fn(usize) -> String| (0..n).map(item).collect::<Vec<_>>().join(",");
    let added =
        numbered(600_000, &|i| format!(r#"{{"id":{i},"content":"{i}","normalized":false}}"#));
    let vocab = numbered(3_000_000, &|i| format!(r#""{i}":{i}"#));
    let long = numbered(900, &|i| format!(r#""{i:0>60000}":{i}"#));
    let cases = [
        ("padding", list("padding", "0", 60 * MIB)),
        (
            "nested",
            list(
                "padding",
                &"[".repeat(100).chars().chain("]".repeat(100).chars()).collect::<String>(),
                60 * MIB,
            ),
        ),
        ("added tokens", format!(r#"{{"added_tokens":[{added}]}}"#)),
        ("tokens", format!(r#"{{"model":{{"vocab":{{{vocab}}}}}}}"#)),
        ("long tokens", format!(r#"{{"model":{{"vocab":{{{long}}}}}}}"#)),
        ("merges", format!(r#"{{"model":{{{}"#, &list("merges", r#""a b""#, 60 * MIB)[1..])),
    ];
    for (what, text) in cases {
        let source = MemorySource(text.as_bytes());
        let files: [(&str, &dyn Source); 1] = [("tokenizer.json", &source)];
        let (result, peak, _) = heap(|| parse_text(&files, "qwen35moe", None));
        let class = result.unwrap_err().class().to_string();
        eprintln!("{what}: {} bytes, {peak} bytes at the peak, {class}", text.len());
        assert_eq!(class, "limit", "{what}");
        assert!(peak <= 64 * MIB, "{what}: {peak} bytes");
    }
}

fn files_made_to_take_memory() {
    let text = |mib: usize| Value::Str("x".repeat(mib * MIB));
    let mut strings = Gguf::new();
    let mut widened = Gguf::new();
    let mut keys = Gguf::new();
    let mut short_keys = Gguf::new();
    let mut names = Gguf::new();
    let mut tensors = Gguf::new();
    for index in 0..8 {
        strings.set(&format!("s{index}"), text(15));
        widened.set(&format!("w{index}"), Value::U8s(vec![7; 4 * MIB]));
    }
    for index in 0..1 << 16 {
        keys.keys.push((format!("{index:0>1000}"), Value::U32(0)));
        // 37 MiB of keys; what each costs beside its bytes counts too.
        short_keys.keys.push((format!("{index:0>600}"), Value::U32(0)));
        names.tensor(&format!("{index:0>1000}"), &[1], BlockType::F16);
        tensors.tensor(&format!("{index}"), &[1, 1, 1, 1], BlockType::F16);
    }
    let mut empty_strings = Gguf::new();
    empty_strings.set("e", Value::Strings(vec![String::new(); 4 * MIB]));
    let cases = [
        ("strings", &strings, "limit"),
        ("widened bytes", &widened, "limit"),
        ("keys", &keys, "limit"),
        ("shorter keys", &short_keys, "limit"),
        ("names", &names, "limit"),
        ("empty strings", &empty_strings, "config"),
        ("tensors", &tensors, "config"),
    ];
    for (what, file, expected) in cases {
        let (class, peak) = outcome(file);
        eprintln!("{what}: {peak} bytes at the peak, {class}");
        assert_eq!(class, expected, "{what}");
        assert!(peak <= 64 * MIB, "{what}: {peak} bytes");
    }
}

/// Many parts, each with as many tensors as all may have together, and with metadata that is not kept.
fn many_parts() {
    let parts: Vec<Vec<u8>> = (0..64_u32)
        .map(|part| {
            let mut file = Gguf::new();
            file.set("split.no", Value::U32(part)).set("split.count", Value::U32(64));
            file.set("junk", Value::Str("x".repeat(2 * MIB)));
            for index in 0..1000 {
                file.tensor(&format!("{part}.{index:0>100}"), &[1], BlockType::F16);
            }
            file.write()
        })
        .collect();
    let sources: Vec<MemorySource<'_>> = parts.iter().map(|bytes| MemorySource(bytes)).collect();
    let named: Vec<(&Path, &dyn checkpoint::Source)> = sources
        .iter()
        .map(|source| (Path::new("part.gguf"), source as &dyn checkpoint::Source))
        .collect();
    let (result, peak, _) = heap(|| parse_parts(&named, Vocabulary::Load));
    eprintln!("many parts: {peak} bytes at the peak");
    assert_eq!(result.unwrap().directory.len(), 64_000);
    assert!(peak <= 64 * MIB, "{peak} bytes");
}

/// Parses and binds a folder of a configuration and safetensors headers with data behind them that nobody reads; the
/// class of error, and the peak.
fn folder(config: &str, headers: &[String]) -> (String, usize) {
    let files: Vec<Hollow> = headers.iter().map(|header| Hollow::new(header)).collect();
    let named: Vec<(&Path, &dyn checkpoint::Source)> = files
        .iter()
        .map(|file| (Path::new("m.safetensors"), file as &dyn checkpoint::Source))
        .collect();
    let config = MemorySource(config.as_bytes());
    let config: (&Path, &dyn checkpoint::Source) = (Path::new("config.json"), &config);
    let (result, peak, _) = heap(|| bind(&parse_folder(config, &named, None)?));
    (result.err().map_or_else(|| "accept".to_owned(), |e| e.class().to_string()), peak)
}

/// A header with zeros behind it.
struct Hollow {
    header: Vec<u8>,
    len: u64,
}

impl Hollow {
    /// `header` without data offsets is none; its data ends where the last tensor does.
    fn new(header: &str) -> Self {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        let end = header.rsplit_once(',').map_or("0", |(_, end)| end.trim_end_matches(['}', ']']));
        let len = bytes.len() as u64 + end.parse::<u64>().unwrap_or(0);
        Self { header: bytes, len }
    }
}

impl checkpoint::Source for Hollow {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        let start = self.header.len().min(offset as usize);
        let present = out.len().min(self.header.len() - start);
        out.fill(0);
        out[..present].copy_from_slice(&self.header[start..start + present]);
        Ok(())
    }
}

/// A header of tensors one behind the other.
fn header(tensors: impl Iterator<Item = (String, &'static str, u64, u64, u64)>) -> String {
    let (mut text, mut at) = (String::from("{"), 0);
    for (name, dtype, bytes, rows, cols) in tensors {
        let end = at + bytes * rows * cols;
        let comma = if at == 0 { "" } else { "," };
        let entry = format!(
            r#"{comma}"{name}":{{"dtype":"{dtype}","shape":[{rows},{cols}],"data_offsets":[{at},{end}]}}"#
        );
        text.push_str(&entry);
        at = end;
    }
    text + "}"
}

/// Every expert with FP8 values and scales of its own: 60 layers of 512, as the largest that is known.
fn experts_in_tensors_of_their_own() {
    let layers = (0..60_u32).map(|layer| {
        let expert = move |expert: u32| {
            let name = move |part: &str, plane: &str| {
                let front = "model.language_model.layers";
                format!("{front}.{layer}.mlp.experts.{expert}.{part}_proj.{plane}")
            };
            ["gate", "up", "down"].into_iter().flat_map(move |part| {
                let weight = (name(part, "weight"), "F8_E4M3", 1, 128, 128);
                [weight, (name(part, "weight_scale_inv"), "F32", 4, 1, 1)]
            })
        };
        header((0..512).flat_map(expert))
    });
    let headers: Vec<String> = layers.collect();
    let config = r#"{"model_type": "qwen3_5_moe", "num_experts": 512, "hidden_size": 128,
        "moe_intermediate_size": 128, "num_hidden_layers": 60, "tie_word_embeddings": true,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#;
    let (class, peak) = folder(config, &headers);
    eprintln!("184,320 tensors of experts: {peak} bytes at the peak, {class}");
    // All experts are there; what is missing is everything else.
    assert_eq!(class, "config");
    assert!(peak <= 64 * MIB, "{peak} bytes");
}

fn folders_made_to_take_memory() {
    let config = |more: &str| format!(r#"{{"model_type": "qwen3_moe"{more}}}"#);
    let many =
        |name: &dyn Fn(u64) -> String, n: u64| header((0..n).map(|i| (name(i), "BF16", 2, 1, 1)));
    let module = |i: u64| format!("model.layers.{}.self_attn.q_proj.weight", i % 1024);
    let expert =
        |i: u64| format!("model.layers.{}.mlp.experts.{}.up_proj.weight", i % 1024, i / 1024);
    let text = "x".repeat(3 * MIB);
    let overrides: String =
        (0..60_000).fold(String::new(), |text, i| text + &format!(r#","m{i}":false"#));
    let cases = [
        ("experts", config(""), many(&expert, 1 << 19), "limit"),
        ("more experts", config(""), many(&expert, (1 << 19) + 1), "limit"),
        ("modules", config(""), many(&module, 1024), "missing"),
        ("unknown names", config(""), many(&|i| format!("{i:0>1000}"), 1 << 15), "unsupported"),
        (
            "a long string",
            config(&format!(r#", "hidden_act": "{text}""#)),
            "{}".into(),
            "unsupported",
        ),
        ("a long name", config(""), format!(r#"{{"{}": 1}}"#, "x".repeat(8 * MIB)), "limit"),
        ("a long value", config(&format!(r#", "num_experts": "{text}""#)), "{}".into(), "missing"),
        (
            "a long list",
            config(&format!(r#", "a": [{}0]"#, "0,".repeat(MIB))),
            "{}".into(),
            "limit",
        ),
        (
            "overrides",
            config(&format!(r#", "quantization": {{"bits": 4, "group_size": 64{overrides}}}"#)),
            "{}".into(),
            "missing",
        ),
    ];
    for (what, config, header, expected) in cases {
        let (class, peak) = folder(&config, &[header]);
        eprintln!("{what}: {peak} bytes at the peak, {class}");
        assert_eq!(class, expected, "{what}");
        assert!(peak <= 64 * MIB, "{what}: {peak} bytes");
    }
}

#[test]
fn no_file_takes_more_than_64_mib_to_parse() {
    every_file_of_the_manifest();
    a_large_vocabulary();
    a_large_tokenizer();
    tokenizers_made_to_take_memory();
    files_made_to_take_memory();
    many_parts();
    experts_in_tensors_of_their_own();
    folders_made_to_take_memory();
}
