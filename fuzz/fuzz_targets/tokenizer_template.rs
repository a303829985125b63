//! Any bytes as a model file's vocabulary and chat template: an error or an answer, never a panic or an endless loop.
#![no_main]

use std::path::Path;

use checkpoint::parse;
use fuzz::Hollow;
use libfuzzer_sys::fuzz_target;
use serde_json::json;
use session::{ChatTemplate, RenderOptions, Specials, Tokenizer};

/// Letters, digits, white space, a control token, a combining mark, and a character outside the basic plane.
const TEXT: &str = "Hello, wörld!  12345\n\n\t<|im_start|>user e\u{301} 漢字 🦀 don't";

fuzz_target!(|bytes: &[u8]| {
    let Ok(checkpoint) = parse(Path::new("fuzzed.gguf"), &Hollow(bytes)) else { return };
    let Ok(tokenizer) = Tokenizer::from_checkpoint(&checkpoint) else { return };
    for specials in [Specials::Parse, Specials::AsText] {
        let Ok(ids) = tokenizer.encode(TEXT, specials) else { continue };
        for id in &ids {
            tokenizer.token_bytes(*id).expect("an id that encoding gave exists");
        }
        tokenizer.decode(&ids).expect("ids that encoding gave decode");
    }
    let spelled = |id| String::from_utf8(tokenizer.token_bytes(id).ok()?.to_vec()).ok();
    let Ok(template) = ChatTemplate::from_metadata(&checkpoint.metadata, spelled) else { return };
    let messages = json!([
        { "role": "system", "content": "Be brief." },
        { "role": "user", "content": TEXT },
        { "role": "assistant", "content": "", "tool_calls": [{ "name": "f", "arguments": { "x": 1 } }] },
        { "role": "tool", "content": "2" },
    ]);
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    // The template may refuse these messages; it must come back.
    let _ = template.render(&messages, &options);
});
