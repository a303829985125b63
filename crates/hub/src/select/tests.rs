use super::*;

fn listing(names: &[&str]) -> Listing {
    let files = names.iter().enumerate().map(|(index, name)| Listed {
        path: RepoPath::try_from((*name).to_owned()).unwrap(),
        size: Some(1000 + index as u64),
        hash: Some(FileHash::GitBlob([0; 20])),
    });
    let (host, repo) = ("host".to_owned(), "org/name".parse().unwrap());
    Listing { host, repo, commit: "0".repeat(40), files: files.collect() }
}

fn pick(names: &[&str], variant: Option<&str>, include: &[&str]) -> Result<Vec<String>, String> {
    let include: Vec<String> = include.iter().map(|pattern| (*pattern).to_owned()).collect();
    match select(&listing(names), variant, &include) {
        Ok(files) => Ok(files.into_iter().map(|file| String::from(file.path)).collect()),
        Err(error) => Err(error.to_string()),
    }
}

const HF: [&str; 14] = [
    ".gitattributes",
    "LICENSE",
    "README.md",
    "config.json",
    "figure.png",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "onnx/model.onnx",
    "original/model.safetensors",
    "pytorch_model.bin",
    "tokenizer.json",
    "training_args.pt",
];

const GGUF: [&str; 8] = [
    "README.md",
    "BF16/M-BF16-00001-of-00002.gguf",
    "BF16/M-BF16-00002-of-00002.gguf",
    "M-Q4_K_M.gguf",
    "M-UD-Q4_K_XL.gguf",
    "M-UD-Q4_K_M.gguf",
    "mmproj-F16.gguf",
    "imatrix_unsloth.gguf",
];

#[test]
fn safetensors_come_with_what_they_are_read_with_and_nothing_else() {
    assert_eq!(
        pick(&HF, None, &[]).unwrap(),
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]
    );
}

#[test]
fn a_quantisation_comes_with_all_of_its_parts() {
    let parts = ["BF16/M-BF16-00001-of-00002.gguf", "BF16/M-BF16-00002-of-00002.gguf"];
    assert_eq!(pick(&GGUF, Some("bf16"), &[]).unwrap(), parts);
    assert_eq!(pick(&GGUF, None, &["*BF16-00002*"]).unwrap(), parts);
    assert_eq!(pick(&GGUF, Some("Q4_K_M"), &[]).unwrap(), ["M-Q4_K_M.gguf"]);
    assert_eq!(pick(&GGUF, Some("UD-Q4_K_M"), &[]).unwrap(), ["M-UD-Q4_K_M.gguf"]);
    assert_eq!(pick(&GGUF, Some("Q4_K_XL"), &[]).unwrap(), ["M-UD-Q4_K_XL.gguf"]);
    let error = pick(&GGUF[..2], Some("BF16"), &[]).unwrap_err();
    assert!(error.contains("1 of the 2 parts"), "{error}");
}

#[test]
fn an_open_choice_lists_all_with_their_sizes() {
    for error in [pick(&GGUF, None, &[]).unwrap_err(), pick(&GGUF, Some("Q8_0"), &[]).unwrap_err()]
    {
        for label in
            ["Q4_K_M ", "UD-Q4_K_XL", "BF16", "in 2 files", "KiB", "hint: sakia pull org/name:"]
        {
            assert!(error.contains(label), "{label}: {error}");
        }
        assert!(!error.contains("mmproj") && !error.contains("imatrix"), "{error}");
    }
    assert_eq!(pick(&["a.gguf", "x.md"], None, &[]).unwrap(), ["a.gguf"]);
}

#[test]
fn two_models_of_one_quantisation_go_by_their_names() {
    let names = ["base-Q8_0.gguf", "chat-Q8_0.gguf"];
    let error = pick(&names, Some("Q8_0"), &[]).unwrap_err();
    assert!(error.contains("base-Q8_0") && error.contains("chat-Q8_0"), "{error}");
    assert_eq!(pick(&names, Some("chat-q8_0"), &[]).unwrap(), ["chat-Q8_0.gguf"]);
}

#[test]
fn a_pattern_never_brings_what_is_refused() {
    let error = pick(&HF, None, &["*.bin"]).unwrap_err();
    assert!(error.contains("*.bin") && error.contains("1 .bin"), "{error}");
    assert_eq!(pick(&HF, None, &["original/"]).unwrap(), ["original/model.safetensors"]);
    assert_eq!(pick(&HF, None, &["README*", "*.md"]).unwrap(), ["README.md"]);
    assert_eq!(pick(&HF, None, &["*00001-of*"]).unwrap().len(), 4, "with index, config, tokenizer");
}

#[test]
fn a_repository_without_weights_says_what_it_has() {
    let error = pick(&["pytorch_model.bin", "config.json"], None, &[]).unwrap_err();
    assert!(error.contains("1 .bin") && error.contains("1 .json"), "{error}");
}

#[test]
fn a_quantisation_of_safetensors_is_an_error_with_words() {
    let error = pick(&HF, Some("Q4_K_M"), &[]).unwrap_err();
    assert!(error.contains("no GGUF file, so no Q4_K_M"), "{error}");
}

#[test]
fn names_that_differ_in_case_only_are_refused() {
    let error = pick(&["config.json", "model.safetensors", "Model.safetensors"], None, &[]);
    assert!(error.unwrap_err().contains("upper and lower case"));
}

#[test]
fn labels_are_found_in_names_as_makers_write_them() {
    for (stem, expected) in [
        ("Qwen3-30B-A3B-Instruct-2507-Q4_K_M", "Q4_K_M"),
        ("Q8_0/Qwen3-Q8_0", "Q8_0"),
        ("model.Q5_K_S", "Q5_K_S"),
        ("x-UD-IQ2_XXS", "UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4", "mxfp4"),
        ("Meta-Llama-3-8B.fp16", "fp16"),
        ("x-Q4_0_4_4", "Q4_0_4_4"),
        ("Qwen3-Next", "Qwen3-Next"),
        ("x-Q4_K_M-imat", "Q4_K_M"),
    ] {
        assert_eq!(label(stem), expected, "{stem}");
    }
    assert_eq!(split_part("m-00002-of-00003"), ("m", 2, 3));
    assert_eq!(split_part("m-2-of-3"), ("m-2-of-3", 1, 1));
}
