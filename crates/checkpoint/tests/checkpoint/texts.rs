//! The text side of model folders: the same as a GGUF file says, or an error that names the file and the thing.

use std::fs::File;
use std::io::Read;

use checkpoint::{
    CheckpointError, MemorySource, MetaArray, MetaValue, Metadata, SPLIT_RULES, Source, parse_text,
};
use serde_json::{Value, json};

use crate::support::fixture;

fn contents(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(fixture(name)).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

/// Reads files by name.
fn read(files: &[(&str, &[u8])], rows: Option<u64>) -> Result<Metadata, CheckpointError> {
    let sources: Vec<_> = files.iter().map(|(name, bytes)| (*name, MemorySource(bytes))).collect();
    let sources: Vec<(&str, &dyn Source)> =
        sources.iter().map(|(name, source)| (*name, source as &dyn Source)).collect();
    parse_text(&sources, "qwen3moe", rows)
}

fn read_json(files: &[(&str, &Value)], rows: Option<u64>) -> Result<Metadata, CheckpointError> {
    let files: Vec<_> = files.iter().map(|(name, json)| (*name, json.to_string())).collect();
    let files: Vec<_> = files.iter().map(|(name, text)| (*name, text.as_bytes())).collect();
    read(&files, rows)
}

/// A tokenizer of three tokens and an added one.
fn tokenizer() -> Value {
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": 3, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": SPLIT_RULES[0].1 }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false },
        ] },
        "post_processor": null,
        "decoder": { "type": "ByteLevel" },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false,
            "vocab": { "b": 1, "ab": 2, "a": 0 },
            "merges": ["a b"]
        }
    })
}

fn changed(pointer: &str, value: Value) -> Value {
    let mut json = tokenizer();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    match json.pointer_mut(parent).unwrap() {
        Value::Object(map) => drop(map.insert(key.to_owned(), value)),
        Value::Array(list) => list[key.parse::<usize>().unwrap()] = value,
        _ => panic!("{pointer}"),
    }
    json
}

fn without(pointer: &str) -> Value {
    let mut json = tokenizer();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    json.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(key).unwrap();
    json
}

fn tokens(metadata: &Metadata) -> Vec<&str> {
    metadata.strings("tokenizer.ggml.tokens").unwrap().iter().collect()
}

fn kinds(metadata: &Metadata) -> Vec<u64> {
    numbers(metadata, "tokenizer.ggml.token_type")
}

fn numbers(metadata: &Metadata, key: &str) -> Vec<u64> {
    match metadata.array(key) {
        Some(MetaArray::U64s(values)) => values.clone(),
        Some(MetaArray::I64s(values)) => values.iter().map(|value| *value as u64).collect(),
        other => panic!("{key}: {other:?}"),
    }
}

/// The class of the error, whose message names the file and every one of `words`.
fn check_refused(result: Result<Metadata, CheckpointError>, class: &str, words: &[&str]) {
    let error = result.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.class().to_string(), class, "{text}");
    assert!(text.contains("found") && text.contains("\n\nhint: "), "{text}");
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

#[test]
fn a_folder_says_what_its_gguf_twin_says() {
    for name in ["qwen2", "qwen35"] {
        let twin = checkpoint::open(&fixture(&format!("models/tok-tiny/{name}.gguf"))).unwrap();
        let file = |file: &str| contents(&format!("models/tok-tiny/hf-{name}/{file}"));
        let rows = twin.metadata.array_len("tokenizer.ggml.tokens");
        let [config, template] = ["tokenizer_config.json", "chat_template.jinja"].map(file);
        let whole = read(
            &[
                ("tokenizer.json", &file("tokenizer.json")),
                ("tokenizer_config.json", &config),
                ("chat_template.jinja", &template),
            ],
            rows,
        );
        let [vocab, merges] = ["vocab.json", "merges.txt"].map(file);
        let two: [(&str, &dyn Source); 4] = [
            ("vocab.json", &MemorySource(&vocab)),
            ("merges.txt", &MemorySource(&merges)),
            ("tokenizer_config.json", &MemorySource(&config)),
            ("chat_template.jinja", &MemorySource(&template)),
        ];
        let family = if name == "qwen2" { "qwen3moe" } else { "qwen35moe" };
        for metadata in [whole.unwrap(), parse_text(&two, family, rows).unwrap()] {
            // The names of unused ids are up to whoever fills the vocabulary.
            let used = |metadata: &Metadata| -> Vec<(String, u64)> {
                let tokens = tokens(metadata).into_iter().map(str::to_owned);
                tokens.zip(kinds(metadata)).filter(|(_, kind)| *kind != 5).collect()
            };
            assert_eq!(used(&metadata), used(&twin.metadata));
            let merges = "tokenizer.ggml.merges";
            assert_eq!(metadata.strings(merges), twin.metadata.strings(merges));
            assert_eq!(kinds(&metadata), kinds(&twin.metadata));
            for key in ["model", "pre", "eos_token_id", "padding_token_id"] {
                let key = format!("tokenizer.ggml.{key}");
                assert_eq!(metadata.get(&key), twin.metadata.get(&key), "{key}");
            }
            let template = "tokenizer.chat_template";
            assert_eq!(metadata.str(template), twin.metadata.str(template));
        }
    }
}

#[test]
fn tokens_come_in_order_of_ids_and_holes_are_unused() {
    let read = |json: &Value, rows| read_json(&[("tokenizer.json", json)], rows);
    let metadata = read(&tokenizer(), None).unwrap();
    assert_eq!(
        (tokens(&metadata), kinds(&metadata)),
        (vec!["a", "b", "ab", "<|end|>"], vec![1, 1, 1, 3])
    );
    let merges = |metadata: &Metadata| -> Vec<String> {
        metadata.strings("tokenizer.ggml.merges").unwrap().iter().map(str::to_owned).collect()
    };
    assert_eq!(merges(&metadata), ["a b"]);
    assert_eq!(metadata.str("tokenizer.ggml.pre"), Some("qwen2"));
    let pairs = read(&changed("/model/merges", json!([["a", "b"], "b a"])), None).unwrap();
    assert_eq!(merges(&pairs), ["a b", "b a"]);
    let mut holes = changed("/added_tokens/0/id", json!(5));
    holes["added_tokens"][0]["special"] = json!(false);
    let holes = read(&holes, Some(8)).unwrap();
    let names = ["a", "b", "ab", "[PAD3]", "[PAD4]", "<|end|>", "[PAD6]", "[PAD7]"];
    assert_eq!((tokens(&holes), kinds(&holes)), (names.to_vec(), vec![1, 1, 1, 5, 5, 4, 5, 5]));
    // An added token that the vocabulary has too.
    let both = changed("/model/vocab", json!({ "a": 0, "b": 1, "ab": 2, "<|end|>": 3 }));
    assert_eq!(kinds(&read(&both, None).unwrap()), [1, 1, 1, 3]);
}

#[test]
fn equivalent_spellings_of_the_rules_are_understood() {
    let ok = |pointer: &str, value: Value| {
        read_json(&[("tokenizer.json", &changed(pointer, value))], None).unwrap()
    };
    let normalizer =
        |metadata: &Metadata| metadata.str("tokenizer.ggml.normalizer").unwrap().to_owned();
    assert_eq!(normalizer(&ok("/normalizer", json!({ "type": "NFC" }))), "nfc");
    let sequence = json!({ "type": "Sequence", "normalizers": [{ "type": "NFC" }] });
    assert_eq!(normalizer(&ok("/normalizer", sequence)), "nfc");
    assert_eq!(normalizer(&ok("/normalizer", Value::Null)), "none");
    let rule = json!({ "Regex": SPLIT_RULES[1].1 });
    let other = ok("/pre_tokenizer/pretokenizers/0/pattern", rule);
    assert_eq!(other.str("tokenizer.ggml.pre"), Some("qwen35"));
    ok("/post_processor", json!({ "type": "ByteLevel", "trim_offsets": false }));
    ok("/model/dropout", json!(0.0));
    ok("/model/ignore_merges", json!(false));
    ok("/truncation", json!({ "max_length": 8 }));
    let plain = json!({ "id": 3, "content": "x", "special": false, "normalized": true });
    let mut without_nfc = changed("/added_tokens/0", plain);
    without_nfc["normalizer"] = Value::Null;
    assert_eq!(kinds(&read_json(&[("tokenizer.json", &without_nfc)], None).unwrap()), [1, 1, 1, 4]);
}

#[test]
fn rules_that_are_not_followed_are_refused_by_name() {
    let refused = |pointer: &str, value: Value, words: &[&str]| {
        let json = changed(pointer, value);
        let result = read_json(&[("tokenizer.json", &json)], None);
        check_refused(result, "unsupported", &[&["tokenizer.json", "supported"], words].concat());
    };
    let split = "/pre_tokenizer/pretokenizers/0";
    refused("/normalizer", json!({ "type": "NFKC" }), &["normalizer", "`NFKC`", "NFC"]);
    refused(
        "/normalizer",
        json!({ "type": "Sequence", "normalizers": [{ "type": "NFC" }, { "type": "Lowercase" }] }),
        &["normalizer"],
    );
    refused("/pre_tokenizer", json!({ "type": "Whitespace" }), &["pre_tokenizer", "`Whitespace`"]);
    refused("/pre_tokenizer", Value::Null, &["pre_tokenizer", "null"]);
    refused(
        &format!("{split}/pattern"),
        json!({ "Regex": r"\p{L}+" }),
        &["pattern", r"\p{L}+", "qwen2, qwen35"],
    );
    refused(&format!("{split}/pattern"), json!({ "String": " " }), &["pattern"]);
    refused(&format!("{split}/behavior"), json!("Removed"), &["behavior", "Removed"]);
    refused(&format!("{split}/invert"), json!(true), &["invert"]);
    refused("/pre_tokenizer/pretokenizers/1/add_prefix_space", json!(true), &["add_prefix_space"]);
    refused("/pre_tokenizer/pretokenizers/1/use_regex", json!(true), &["use_regex"]);
    refused("/pre_tokenizer/pretokenizers/1", json!({ "type": "Metaspace" }), &["`Metaspace`"]);
    refused(
        "/post_processor",
        json!({ "type": "TemplateProcessing" }),
        &["post_processor", "`TemplateProcessing`"],
    );
    refused("/decoder", json!({ "type": "WordPiece" }), &["decoder", "`WordPiece`"]);
    refused("/model/type", json!("Unigram"), &["model: type", "`Unigram`", "BPE"]);
    refused("/model/dropout", json!(0.1), &["dropout", "0.1"]);
    refused("/model/unk_token", json!("<unk>"), &["unk_token", "`<unk>`"]);
    refused("/model/byte_fallback", json!(true), &["byte_fallback"]);
    refused("/model/ignore_merges", json!(true), &["ignore_merges"]);
    refused("/model/continuing_subword_prefix", json!("##"), &["continuing_subword_prefix"]);
    refused("/model/novelty", json!(1), &["model: key `novelty`"]);
    refused("/novelty", json!(1), &["key `novelty`"]);
    for flag in ["single_word", "lstrip", "rstrip", "normalized"] {
        refused(&format!("/added_tokens/0/{flag}"), json!(true), &["<|end|>", flag]);
    }
}

#[test]
fn malformed_tokenizers_are_refused() {
    let refused = |json: &Value, words: &[&str]| {
        let result = read_json(&[("tokenizer.json", json)], Some(8));
        check_refused(result, "config", &[&["tokenizer.json", "needed"], words].concat());
    };
    for pointer in
        ["/model", "/model/vocab", "/model/merges", "/model/type", "/decoder", "/pre_tokenizer"]
    {
        refused(&without(pointer), &[&pointer[1..].replace('/', ".")]);
    }
    for (pointer, value) in [
        ("/model", json!([])),
        ("/model/vocab", json!(["a"])),
        ("/model/vocab", json!({ "a": -1 })),
        ("/model/vocab", json!({ "a": 1.5 })),
        ("/model/vocab", json!({ "a": "0" })),
        ("/model/vocab", json!({ "a": 4_294_967_296_u64 })),
        ("/model/vocab", json!({ "a": 0, "b": 0 })),
        ("/model/vocab", json!({ "a": 8 })),
        ("/model/vocab", json!({ "a": 3 })),
        ("/model/vocab", json!({ "<|end|>": 2 })),
        ("/model/merges", json!({})),
        ("/model/merges", json!(["ab"])),
        ("/model/merges", json!(["a b c"])),
        ("/model/merges", json!([" "])),
        ("/model/merges", json!([["a"]])),
        ("/model/merges", json!([["a", "b", "c"]])),
        ("/model/merges", json!([["a b", "c"]])),
        ("/model/merges", json!([["", "b"]])),
        ("/model/merges", json!([1])),
        ("/added_tokens", json!({})),
        ("/added_tokens", json!([{ "id": 3 }])),
        ("/added_tokens", json!([{ "content": "x" }])),
        ("/added_tokens", json!([{ "id": 3, "content": "" }])),
        ("/added_tokens", json!([{ "id": -3, "content": "x" }])),
        ("/added_tokens", json!([{ "id": 9, "content": "x" }])),
        ("/added_tokens", json!([{ "id": 3, "content": "x", "special": 1 }])),
        ("/added_tokens", json!([{ "id": 3, "content": "x" }, { "id": 3, "content": "y" }])),
        ("/added_tokens", json!([{ "id": 3, "content": "x" }, { "id": 4, "content": "x" }])),
        ("/added_tokens", json!([{ "id": 3, "content": "ab" }])),
        ("/added_tokens", json!([{ "id": 0, "content": "x" }])),
    ] {
        // Without this the flag would be what is refused.
        let mut json = changed(pointer, value);
        json["normalizer"] = Value::Null;
        refused(&json, &[]);
    }
    let text = tokenizer().to_string();
    let twice = [
        text.replace(r#""b":1"#, r#""a":1"#),
        text.replace(r#""padding":null"#, r#""padding":null,"padding":null"#),
        text.replace(r#""type":"BPE""#, r#""type":"BPE","type":"BPE""#),
        text.replace(r#""merges""#, r#""vocab":{},"merges""#),
    ];
    for text in twice.iter().map(String::as_str).chain(["", "{", "[]", "\"x\"", "nul", "{} {}"]) {
        check_refused(
            read(&[("tokenizer.json", text.as_bytes())], Some(8)),
            "config",
            &["tokenizer.json"],
        );
    }
    for end in 0..text.len() {
        read(&[("tokenizer.json", &text.as_bytes()[..end])], Some(8)).unwrap_err();
    }
    let broken = text.replace("<|end|>", "\u{1}");
    read(&[("tokenizer.json", broken.replace("\\u0001", "\u{1}").as_bytes())], None).unwrap_err();
    read(&[("tokenizer.json", b"{\"model\": {\"vocab\": {\"\xff\": 1}}}")], None).unwrap_err();
}

#[test]
fn files_that_are_too_much_are_refused() {
    let limit =
        |files: &[(&str, &[u8])], rows| check_refused(read(files, rows), "limit", &[files[0].0]);
    let deep = format!(r#"{{"padding": {}"#, "[".repeat(60_000));
    check_refused(
        read(&[("tokenizer.json", deep.as_bytes())], None),
        "config",
        &["tokenizer.json"],
    );
    let long = changed("/model/vocab", json!({ "x".repeat(1 << 17): 0 })).to_string();
    limit(&[("tokenizer.json", long.as_bytes())], None);
    let far = changed("/model/vocab", json!({ "a": 4_294_967_295_u64 })).to_string();
    limit(&[("tokenizer.json", far.as_bytes())], None);
    limit(&[("tokenizer.json", tokenizer().to_string().as_bytes())], Some(1 << 40));
    limit(&[("tokenizer.json", &vec![b' '; (64 << 20) + 1])], None);
    let list = changed("/padding", json!(vec![0; 2_000_000])).to_string();
    limit(&[("tokenizer.json", list.as_bytes())], None);
    limit(&[("chat_template.jinja", &vec![b'x'; (1 << 20) + 1])], None);
    let vocab = json!({ "a": 0 }).to_string();
    limit(&[("merges.txt", &vec![b'a'; 1 << 17]), ("vocab.json", vocab.as_bytes())], None);
    let ends = json!({ "eos_token_id": vec![0; 100] }).to_string();
    check_refused(
        read(&[("generation_config.json", ends.as_bytes())], None),
        "config",
        &["eos_token_id"],
    );
}

#[test]
fn a_folder_without_text_has_no_vocabulary() {
    let metadata = read(&[], Some(8)).unwrap();
    assert_eq!(metadata.iter().count(), 1, "the architecture alone");
}

#[test]
fn two_files_stand_in_for_one() {
    let vocab = json!({ "b": 1, "ab": 2, "a": 0 });
    let vocab = vocab.to_string();
    let config =
        json!({ "added_tokens_decoder": { "3": { "content": "<|end|>", "special": true } } });
    let config = config.to_string();
    let files = |merges: &'static str| {
        [
            ("vocab.json", vocab.as_bytes()),
            ("merges.txt", merges.as_bytes()),
            ("tokenizer_config.json", config.as_bytes()),
        ]
        .to_vec()
    };
    for merges in ["#version: 0.2\na b\n", "a b", "\r\na b\r\n\n"] {
        let metadata = read(&files(merges), None).unwrap();
        assert_eq!(
            (tokens(&metadata), kinds(&metadata)),
            (vec!["a", "b", "ab", "<|end|>"], vec![1, 1, 1, 3])
        );
        assert_eq!(metadata.array_len("tokenizer.ggml.merges"), Some(1));
    }
    check_refused(read(&files("a b\nab\n"), None), "config", &["merges.txt", "line 2", "`ab`"]);
    check_refused(read(&files("a b c\n"), None), "config", &["merges.txt", "line 1"]);
    check_refused(read(&[("vocab.json", vocab.as_bytes())], None), "missing", &["merges.txt"]);
    let mut legacy = files("a b");
    legacy[2] = ("added_tokens.json", br#"{"<|end|>": 3}"#);
    check_refused(read(&legacy, None), "unsupported", &["added_tokens.json"]);
    let mut class = files("a b");
    class[2] = ("tokenizer_config.json", br#"{"tokenizer_class": "LlamaTokenizer"}"#);
    check_refused(read(&class, None), "unsupported", &["tokenizer_class", "`LlamaTokenizer`"]);
    let sources: [(&str, &dyn Source); 2] =
        [("vocab.json", &MemorySource(vocab.as_bytes())), ("merges.txt", &MemorySource(b"a b"))];
    check_refused(parse_text(&sources, "mystery", None), "unsupported", &["`mystery`"]);
    assert_eq!(
        parse_text(&sources, "qwen4exp", None).unwrap().str("tokenizer.ggml.pre"),
        Some("qwen35")
    );
}

#[test]
fn settings_beside_the_tokenizer_are_read() {
    let with = |config: Value| {
        read_json(&[("tokenizer.json", &tokenizer()), ("tokenizer_config.json", &config)], Some(8))
    };
    let metadata = with(json!({
        "eos_token": { "content": "<|end|>" }, "bos_token": "a", "pad_token": null, "add_bos_token": true,
        "added_tokens_decoder": { "3": { "content": "<|end|>" }, "5": { "content": "<t>", "normalized": false } }
    }))
    .unwrap();
    let id = |name: &str| metadata.u64(&format!("tokenizer.ggml.{name}_token_id"));
    assert_eq!([id("eos"), id("bos"), id("padding")], [Some(3), Some(0), None]);
    assert_eq!(metadata.bool("tokenizer.ggml.add_bos_token"), Some(true));
    assert_eq!(kinds(&metadata), [1, 1, 1, 3, 5, 4, 5, 5], "the tokenizer's own flags count");
    let no_bos = with(json!({ "bos_token": null, "add_bos_token": true })).unwrap();
    assert_eq!(no_bos.bool("tokenizer.ggml.add_bos_token"), Some(false));
    for (config, class, word) in [
        (json!({ "eos_token": "<gone>" }), "config", "`<gone>`"),
        (json!({ "eos_token": 3 }), "config", "eos_token"),
        (json!({ "add_bos_token": "yes" }), "config", "add_bos_token"),
        (json!({ "add_eos_token": true }), "unsupported", "add_eos_token"),
        (json!({ "split_special_tokens": true }), "unsupported", "split_special_tokens"),
        (json!({ "added_tokens_decoder": [] }), "config", "added_tokens_decoder"),
        (json!({ "added_tokens_decoder": { "x": { "content": "y" } } }), "config", "id"),
        (json!({ "added_tokens_decoder": { "3": { "content": "y" } } }), "config", "<|end|>"),
        (
            json!({ "added_tokens_decoder": { "5": { "content": "y", "lstrip": true } } }),
            "unsupported",
            "lstrip",
        ),
        (json!([]), "config", "the file"),
        (json!({ "chat_template": 1 }), "config", "chat_template"),
        (json!({ "chat_template": [{ "name": "x" }] }), "config", "chat_template"),
        (json!({ "chat_template": [{ "name": "x", "template": "" }] }), "unsupported", "`default`"),
        (json!({ "chat_template": [{ "name": "a b", "template": "" }] }), "config", "`a b`"),
    ] {
        check_refused(with(config), class, &[word]);
    }
}

#[test]
fn a_template_of_a_file_of_its_own_counts() {
    let config = json!({ "chat_template": [
        { "name": "default", "template": "one" }, { "name": "tool_use", "template": "tools" }
    ] });
    let config = config.to_string();
    let beside = json!({ "chat_template": "two" }).to_string();
    let files: [(&str, &[u8]); 3] = [
        ("tokenizer_config.json", config.as_bytes()),
        ("chat_template.json", beside.as_bytes()),
        ("chat_template.jinja", b"three\n"),
    ];
    for (count, expected) in [(1, "one"), (2, "two"), (3, "three\n")] {
        let metadata = read(&files[..count], None).unwrap();
        assert_eq!(metadata.str("tokenizer.chat_template"), Some(expected));
        assert_eq!(metadata.str("tokenizer.chat_template.tool_use"), Some("tools"));
    }
    let empty = json!({}).to_string();
    let result = read(&[("chat_template.json", empty.as_bytes())], None);
    check_refused(result, "config", &["chat_template.json", "nothing"]);
    check_refused(read(&[("chat_template.jinja", b"\xff")], None), "config", &["UTF-8"]);
}

#[test]
fn generation_settings_name_all_end_tokens_and_how_to_sample() {
    let with = |config: Value| read_json(&[("generation_config.json", &config)], Some(8));
    let metadata = with(json!({
        "eos_token_id": [7, 3], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": true,
        "repetition_penalty": 1.05, "transformers_version": "5"
    }))
    .unwrap();
    assert_eq!(numbers(&metadata, "tokenizer.ggml.eos_token_ids"), [7, 3]);
    assert_eq!(metadata.u64("tokenizer.ggml.eos_token_id"), Some(7));
    let sampling = |name: &str| metadata.f64(&format!("general.sampling.{name}"));
    let names = ["temp", "top_k", "top_p", "penalty_repeat", "min_p"];
    assert_eq!(names.map(sampling), [Some(0.6), Some(20.0), Some(0.95), Some(1.05), None]);
    let greedy =
        with(json!({ "eos_token_id": 2, "do_sample": false, "temperature": 0.6 })).unwrap();
    assert_eq!(numbers(&greedy, "tokenizer.ggml.eos_token_ids"), [2]);
    assert_eq!(greedy.get("general.sampling.temp"), Some(&MetaValue::F64(0.0)));
    for (config, word) in [
        (json!({ "eos_token_id": 8 }), "below 8"),
        (json!({ "eos_token_id": [-1] }), "eos_token_id"),
        (json!({ "eos_token_id": "7" }), "eos_token_id"),
        (json!({ "temperature": "hot" }), "temperature"),
        (json!({ "do_sample": 1 }), "do_sample"),
        (json!([1]), "the file"),
    ] {
        check_refused(with(config), "config", &["generation_config.json", word]);
    }
}

#[test]
fn the_malformed_folder_gives_its_class() {
    let bytes = contents("bad/folders/tokenizer_bad/tokenizer.json");
    check_refused(read(&[("tokenizer.json", &bytes)], None), "config", &["tokenizer.json"]);
}
