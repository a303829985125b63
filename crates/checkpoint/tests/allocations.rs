//! What parsing takes from the heap, whatever the file says: at most 64 MiB at any moment.
//!
//! One test, because the allocator counts for the whole process.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "checkpoint/support.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use checkpoint::{MemorySource, Vocabulary, bind, open, parse, parse_parts};
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

#[test]
fn no_file_takes_more_than_64_mib_to_parse() {
    every_file_of_the_manifest();
    a_large_vocabulary();
    files_made_to_take_memory();
    many_parts();
}
