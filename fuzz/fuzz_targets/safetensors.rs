//! Any bytes as a safetensors file, and any bytes as its header: an error or tensors, never a panic, and no range
//! outside the file or shared by two.
#![no_main]

use std::path::Path;

use checkpoint::{MemorySource, Source, parse_safetensors};
use fuzz::{Padded, safetensors};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    read_all(&MemorySource(bytes));
    // The header of a file that fits it: changes of its length are not what ends it.
    let text = bytes.get(8..).unwrap_or_default();
    let header = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let (bytes, len) = safetensors(header);
    read_all(&Padded { bytes: &bytes, len });
});

fn read_all(source: &dyn Source) {
    let Ok(mut tensors) = parse_safetensors(Path::new("fuzzed.safetensors"), source) else {
        return;
    };
    tensors.sort_by_key(|tensor| tensor.offset);
    let mut end = None;
    for tensor in &tensors {
        assert!(end.is_none_or(|end| end == tensor.offset), "{} follows the last", tensor.name);
        let elements: u64 = tensor.shape.iter().product();
        assert_eq!(tensor.bytes, elements * tensor.dtype.bytes(), "{}", tensor.name);
        end = Some(tensor.offset + tensor.bytes);
    }
    assert!(end.is_none_or(|end| end == source.len()), "tensors fill the file");
}
