//! The program as a user runs it: exit codes, output, and the memory promise in child processes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn root(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(name)
}

fn sakia(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.args(args).env_remove("SAKIA_MODEL").current_dir(root(""));
    command.env("SAKIA_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_demo_answers_by_streaming_and_stays_under_its_budget() {
    let folder = tempfile::tempdir().unwrap();
    let receipt = folder.path().join("run.json");
    let output = sakia(&[
        "run",
        "What is a compiler?",
        "--temperature",
        "0",
        "--receipt",
        receipt.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stdout(&output).contains("translates source code"), "{}", stdout(&output));
    assert!(!stdout(&output).contains("think"), "an empty think block is not shown");
    let receipt: Value = serde_json::from_slice(&std::fs::read(&receipt).unwrap()).unwrap();
    let number = |path: &str| receipt.pointer(path).and_then(Value::as_u64).unwrap();
    assert!(number("/prefill/hits") + number("/decode/hits") > 0);
    assert!(number("/prefill/misses") + number("/decode/misses") > 0);
    assert!(number("/decode/read_bytes") > 0);
    assert!(2 * number("/slots") < number("/experts"), "fewer than half of the experts fit");
    assert!(number("/peak_rss_bytes") <= number("/budget_bytes"), "{receipt:#}");
}

#[test]
fn a_long_prompt_stays_under_every_budget() {
    let ids: Vec<String> = (0..900).map(|i| (i * 37 % 8000).to_string()).collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ids.txt");
    std::fs::write(&file, ids.join(" ")).unwrap();
    for (memory, pass, lookahead) in
        [("36MiB", "64", "tap"), ("44MiB", "64", "off"), ("64MiB", "256", "last-token")]
    {
        let file = file.to_str().unwrap();
        let args = ["bench", "--memory", memory, "--pass", pass, "--ids-file", file];
        let args = [&args[..], &["--lookahead", lookahead]].concat();
        let output = sakia(&[&args[..], &["-p", "880", "-n", "20", "--context", "1024"]].concat());
        assert!(output.status.success(), "{memory}: {}", stderr(&output));
        let receipt: Value = serde_json::from_str(&stdout(&output)).unwrap();
        let (peak, budget) = (
            receipt["peak_rss_bytes"].as_u64().unwrap(),
            receipt["budget_bytes"].as_u64().unwrap(),
        );
        assert!(peak <= budget, "{memory}: peak {peak} of {budget}");
    }
}

#[test]
fn the_plan_sums_to_less_than_the_budget() {
    let output = sakia(&["plan", "--memory", "40MiB", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let plan: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let terms: u64 =
        plan["terms"].as_array().unwrap().iter().map(|term| term["bytes"].as_u64().unwrap()).sum();
    assert_eq!(terms, plan["total"].as_u64().unwrap());
    assert!(terms <= 40 << 20);
    let refused = sakia(&["plan", "--memory", "8MiB"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("hint: use"), "{}", stderr(&refused));
}

#[test]
fn a_broken_file_is_named_by_its_class() {
    for (file, class) in
        [("magic_wrong", "format"), ("arch_unknown", "unsupported"), ("topk_zero", "config")]
    {
        let path = root("testdata/fixtures/bad/gguf").join(format!("{file}.gguf"));
        let output = sakia(&["inspect", "--json", "-m", path.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1));
        let error: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(error["error"]["class"], class, "{file}");
        assert!(stderr(&output).contains(file), "the message names the file");
    }
}

#[test]
fn experts_pass_parity_and_kernels_their_selftest() {
    for kind in ["gate", "up", "down"] {
        let output =
            sakia(&["parity", "--layer", "3", "--expert", "7", "--kind", kind, "--rows", "5..77"]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stdout(&output).contains("bytes and products equal"), "{}", stdout(&output));
    }
    let output = sakia(&["selftest"]);
    assert!(output.status.success(), "{}", stdout(&output));
}

#[test]
fn text_goes_to_ids_and_back() {
    let output = sakia(&["tokenize", "<|im_start|>user\nHello"]);
    let ids = stdout(&output).trim().replace(' ', ",");
    assert!(output.status.success() && ids.split(',').count() > 2, "{ids}");
    assert_eq!(stdout(&sakia(&["tokenize", "--decode", &ids])), "<|im_start|>user\nHello\n");
}

#[test]
fn senseless_requests_are_refused_with_words() {
    for (args, words) in [
        (&["run", "x", "--temperature", "-1"][..], "temperature"),
        (&["run", "x", "--top-p", "2"][..], "top-p"),
        (&["run", "x", "--pass", "65"][..], "multiple of 64"),
        (&["run", "x", "--slots", "2"][..], "slots"),
        (&["run", "x", "-m", "/nowhere.gguf"][..], "/nowhere.gguf"),
        (&["logits", "--ids", "999999", "--out", "x.npy"][..], "999999"),
        (&["parity", "--layer", "99", "--expert", "0", "--kind", "up"][..], "layers 0..8"),
    ] {
        let output = sakia(args);
        assert!(!output.status.success(), "{args:?}");
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
        assert!(!stderr(&output).contains("panicked"), "{args:?}: {}", stderr(&output));
    }
    assert!(
        !root("x.npy").exists() && !root("x.npy.partial").exists(),
        "nothing half-written is left"
    );
}

#[test]
fn what_is_read_is_never_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(root("models/sakia-demo-Q4_K_M.gguf"), &model).unwrap();
    let ids = folder.path().join("ids.txt");
    std::fs::write(&ids, "1 2 3").unwrap();
    let (m, i) = (model.to_str().unwrap(), ids.to_str().unwrap());
    for args in [
        &["logits", "-m", m, "--ids", "1", "--out", m][..],
        &["logits", "-m", m, "--ids-file", i, "--out", i],
        &["run", "-m", m, "-n", "1", "hi", "--receipt", m],
    ] {
        let output = sakia(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(stderr(&output).contains("read by this very command"), "{}", stderr(&output));
    }
    assert_eq!(std::fs::metadata(&model).unwrap().len(), 58_118_816);
    assert_eq!(std::fs::read_to_string(&ids).unwrap(), "1 2 3");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing half-written");
}

#[test]
fn a_reader_that_leaves_ends_the_program_quietly() {
    for args in [&["inspect"][..], &["plan", "--json"], &["selftest"], &["tokenize", "a"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
        command.args(args).env_remove("SAKIA_MODEL").current_dir(root("")).stdout(writer);
        let output = command.stderr(std::process::Stdio::piped()).output().unwrap();
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn many_threads_stay_under_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    let receipt = folder.path().join("run.json");
    let path = receipt.to_str().unwrap();
    let args = ["run", "hi", "-n", "2", "--memory", "80MiB", "--threads", "512", "--receipt", path];
    let output = sakia(&args);
    assert!(output.status.success(), "{}", stderr(&output));
    let receipt: Value = serde_json::from_slice(&std::fs::read(&receipt).unwrap()).unwrap();
    let number = |name: &str| receipt[name].as_u64().unwrap();
    assert!(number("peak_rss_bytes") <= number("budget_bytes"), "{receipt:#}");
}

#[test]
fn a_draft_is_written_beside_the_logits_and_named_in_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (out, draft, alone) = (file("l.npy"), file("d.npy"), file("alone.npy"));
    let ids = ["logits", "--memory", "64MiB", "--ids", "5,6,7,8,9"];
    let output = sakia(&[&ids[..], &["--out", &out, "--draft", &draft]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let output = sakia(&[&ids[..], &["--out", &alone]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let read = |path: &str| std::fs::read(path).unwrap();
    assert!(read(&out) == read(&alone), "the trunk's logits are the same without a draft");
    let header = |path| String::from_utf8_lossy(&read(path)[10..80]).into_owned();
    assert!(header(&out).contains("'<f4'") && header(&out).contains("(5, 8192,)"));
    assert!(header(&draft).contains("'<f4'") && header(&draft).contains("(4, 8192,)"));
    assert_eq!(read(&draft).len() % 128, 0);
    let names = |extra: &[&str]| -> Vec<String> {
        let output = sakia(&[&["plan", "--memory", "64MiB", "--json"], extra].concat());
        let plan: Value = serde_json::from_str(&stdout(&output)).unwrap();
        let details = plan["details"].as_array().unwrap().iter();
        let names = details.map(|term| term["name"].as_str().unwrap().to_owned());
        names.filter(|name| name.contains("draft")).collect()
    };
    assert_eq!(names(&["--draft"]), ["draft head", "draft rows", "draft KV cache"]);
    assert!(names(&[]).is_empty());
}

#[test]
fn a_draft_that_cannot_be_is_refused_with_words() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (out, draft) = (file("l.npy"), file("d.npy"));
    let other = "testdata/fixtures/models/qwen3_moe-a/f32.gguf";
    for (args, words) in [
        (
            &["logits", "-m", other, "--ids", "1,2", "--out", &out, "--draft", &draft][..],
            "has no draft head",
        ),
        (&["plan", "-m", other, "--draft"], "has no draft head"),
        (&["logits", "--ids", "1,2", "--out", &out, "--draft", &out], "each needs its own file"),
        (
            &["logits", "--ids", "1,2", "--out", &out, "--routes", &draft, "--draft", &draft],
            "--routes and --draft are both",
        ),
    ] {
        let output = sakia(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing half-written");
}

#[test]
fn guesses_change_no_word_and_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let receipt = folder.path().join("run.json");
    let ask = |extra: &[&str]| {
        let ask = ["run", "Repeat three times: a wheel that lifts water.", "-n", "60"];
        let memory = ["--memory", "64MiB", "--context", "512", "--seed", "3"];
        let receipt = ["--receipt", receipt.to_str().unwrap()];
        let output = sakia(&[&ask[..], &memory, &receipt, extra].concat());
        assert!(output.status.success(), "{extra:?}: {}", stderr(&output));
        let record: Value = serde_json::from_slice(&std::fs::read(receipt[1]).unwrap()).unwrap();
        (stdout(&output), stderr(&output), record)
    };
    let (text, line, record) = ask(&[]);
    assert!(record.get("speculation").is_none() && !line.contains("guesses"), "{line}");
    for who in ["lookup", "draft", "auto"] {
        let (guessed, line, with) = ask(&["--speculate", who, "--draft-tokens", "3"]);
        assert_eq!(guessed, text, "{who}");
        assert_eq!(with["output_hash"], record["output_hash"], "{who}");
        assert_eq!(with["decode"]["tokens"], record["decode"]["tokens"], "{who}");
        assert!(line.contains("guesses: "), "{who}: {line}");
        let count = |name: &str| with["speculation"][name].as_u64().unwrap();
        let passes = count("verify_passes") + count("plain_passes");
        assert_eq!(count("accepted") + passes, with["decode"]["tokens"], "{who}");
        assert!(count("accepted") <= count("drafted"), "{who}");
        assert!(with["peak_rss_bytes"].as_u64() <= with["budget_bytes"].as_u64(), "{with:#}");
        assert_eq!(with.get("draft_bytes").is_some(), who != "lookup", "{who}");
    }
}

#[test]
fn guesses_that_cannot_be_are_refused_with_words() {
    let other = "testdata/fixtures/models/qwen3_moe-a/f32.gguf";
    for (args, words) in [
        (&["plan", "-m", other, "--speculate", "draft"][..], "has no draft head"),
        (&["plan", "--speculate", "lookup", "--draft-tokens", "16"], "1 to 15"),
        (&["plan", "--speculate", "lookup", "--draft-tokens", "0"], "1 to 15"),
        (&["plan", "--draft-tokens", "3"], "--speculate"),
        (&["run", "x", "--speculate", "psychic"], "psychic"),
    ] {
        let output = sakia(args);
        assert!(!output.status.success(), "{args:?}");
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
    }
    // Whoever there is: without a draft head that is the text.
    for (model, head) in [(other, false), ("models/sakia-demo-Q4_K_M.gguf", true)] {
        let output =
            sakia(&["plan", "-m", model, "--memory", "1GiB", "--speculate", "auto", "--json"]);
        let plan: Value = serde_json::from_str(&stdout(&output)).unwrap();
        let names: Vec<&str> = plan["details"].as_array().unwrap().iter().map(name_of).collect();
        assert_eq!(names.contains(&"draft head"), head, "{names:?}");
        assert!(names.contains(&"text for guesses"), "{names:?}");
        assert_eq!(names.contains(&"state before guesses"), head, "the other has no such state");
    }
}

fn name_of(term: &Value) -> &str {
    term["name"].as_str().unwrap()
}

#[test]
fn reads_may_go_to_copies_and_by_other_calls_without_changing_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let (ids, mirror) = (folder.path().join("ids.txt"), folder.path().join("mirror"));
    std::fs::write(&ids, "1 2 3 4 5 6 7 8 9 10 11 12").unwrap();
    std::fs::create_dir(&mirror).unwrap();
    let demo = "sakia-demo-Q4_K_M.gguf";
    std::fs::copy(root("models").join(demo), mirror.join(demo)).unwrap();
    let bench = |extra: &[&str]| {
        let usual = ["bench", "--memory", "44MiB", "--context", "64", "-p", "8", "-n", "4"];
        let output = sakia(&[&usual[..], &["--ids-file", ids.to_str().unwrap()], extra].concat());
        assert!(output.status.success(), "{extra:?}: {}", stderr(&output));
        serde_json::from_str::<Value>(&stdout(&output)).unwrap()
    };
    let usual = bench(&[]);
    assert_eq!(usual["reads"]["lanes"], 4);
    assert_eq!(usual["reads"].get("probed_bytes_per_second"), None, "too small to be measured");
    let mirror = mirror.to_str().unwrap();
    let mirrored = bench(&["--mirror", mirror, "--read-threads", "3"]);
    assert_eq!((&mirrored["reads"]["lanes"], &mirrored["reads"]["disks"]), (&6.into(), &2.into()));
    assert_eq!(mirrored["output_hash"], usual["output_hash"]);
    assert!(mirrored["peak_rss_bytes"].as_u64() <= mirrored["budget_bytes"].as_u64());
    let ring =
        sakia(&["parity", "--layer", "0", "--expert", "0", "--kind", "up", "--reader", "io_uring"]);
    if ring.status.success() {
        let ring = bench(&["--reader", "io_uring"]);
        assert_eq!(ring["output_hash"], usual["output_hash"]);
        assert_eq!(ring["reads"]["reader"], "io_uring");
    } else {
        // Refused by the system: said, with what to do.
        assert!(stderr(&ring).contains("--reader pread"), "{}", stderr(&ring));
    }
}

#[test]
fn a_folder_that_is_no_mirror_is_an_error_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let run = |args: &[&str]| {
        let output = sakia(&[&["run", "x", "--mirror", path][..], args].concat());
        assert_eq!(output.status.code(), Some(1));
        stderr(&output)
    };
    assert!(run(&[]).contains("no copy"), "{}", run(&[]));
    std::fs::write(folder.path().join("sakia-demo-Q4_K_M.gguf"), "another model").unwrap();
    let said = run(&[]);
    assert!(said.contains(path) && said.contains("is not a copy"), "{said}");
}
