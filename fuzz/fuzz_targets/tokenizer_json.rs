//! Any bytes as a model folder's `tokenizer.json`: an error or a tokenizer that works, never a panic.
#![no_main]

use checkpoint::{MemorySource, Source, parse_text};
use libfuzzer_sys::fuzz_target;
use session::{Specials, Tokenizer};

/// Letters, digits, white space, a control token, a combining mark, and a character outside the basic plane.
const TEXT: &str = "Hello, wörld!  12345\n\n\t<|im_start|>user e\u{301} 漢字 🦀 don't";

fuzz_target!(|bytes: &[u8]| {
    let files: [(&str, &dyn Source); 1] = [("tokenizer.json", &MemorySource(bytes))];
    let Ok(metadata) = parse_text(&files, "qwen35moe", None) else { return };
    let tokenizer = Tokenizer::from_metadata(&metadata);
    for specials in [Specials::Parse, Specials::AsText] {
        let Ok(ids) = tokenizer.encode(TEXT, specials) else { continue };
        for id in &ids {
            tokenizer.token_bytes(*id).expect("an id that encoding gave exists");
        }
        tokenizer.decode(&ids).expect("ids that encoding gave decode");
    }
});
