//! Packs as a user makes and uses them: the same logits, the same bytes however often the program is killed, and damage
//! found.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;

fn root(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(name)
}

/// A file of the fixtures, or of the larger set that `SAKIA_FIXTURES` names.
fn fixtures() -> PathBuf {
    std::env::var_os("SAKIA_FIXTURES").map_or_else(|| root("testdata/fixtures"), PathBuf::from)
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.env("SAKIA_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.args(args).env_remove("SAKIA_MODEL");
    command
}

fn sakia(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run(args: &[&str]) -> String {
    let output = sakia(args);
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn refused(args: &[&str], words: &str) {
    let output = sakia(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}");
    let said = text(&output.stderr);
    assert!(said.contains(words) && !said.contains("panicked"), "{args:?}: {said}");
}

fn pack(model: &Path, out: &Path) -> Value {
    let json = run(&["pack", "-m", path(model), "--out", path(out), "--json"]);
    serde_json::from_str(&json).unwrap()
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn demo() -> PathBuf {
    root("models/sakia-demo-Q4_K_M.gguf")
}

/// One model of every container and family that is here.
fn models() -> Vec<PathBuf> {
    let models = [
        "models/qwen3_moe-a/b32.gguf",
        "models/qwen3_next-k/kq.gguf",
        "models/qwen3_next-a/b32-legacy-ssm_in.gguf",
        "models/qwen3_next-a/mlx-mixed-3-5-6bit",
        "models/qwen3_5_moe-a/b32-fused-gate_up.gguf",
        "models/qwen3_5_moe-k/kq-split-00001-of-00003.gguf",
        "models/qwen4_exp-a/split-b32-00001-of-00003.gguf",
        "bad/folders/ok",
        "bad/folders/ok_mlx",
        // Of the larger set.
        "models/qwen3_moe-a/hf",
        "models/qwen3_5_moe-a/hf",
        "models/qwen4_exp-a/hf",
        "models/qwen4_exp-a/mlx-4bit-g64",
    ];
    let here: Vec<PathBuf> =
        models.iter().map(|model| fixtures().join(model)).filter(|model| model.exists()).collect();
    assert!(here.len() >= 9, "the fixtures of the repository are there: {here:?}");
    here
}

fn logits(model: &Path, out: &Path) -> Vec<u8> {
    let ids = "1 5 9 13 2 7 7 3 11 30 31 32 8 1 5 9 20 21 22 23";
    let args = ["--ids", ids, "--memory", "1GiB", "--activations", "q8", "--threads", "2"];
    run(&[&["logits", "-m", path(model), "--out", path(out)], &args[..]].concat());
    std::fs::read(out).unwrap()
}

#[test]
fn a_pack_gives_the_logits_of_its_source_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let (packed, out) = (folder.path().join("x.sakia"), folder.path().join("x.npy"));
    for model in models() {
        let summary = pack(&model, &packed);
        assert_eq!(summary["bytes"], std::fs::metadata(&packed).unwrap().len());
        assert_eq!(logits(&packed, &out), logits(&model, &out), "{}", model.display());
        let inspect = |model: &Path| -> Value {
            serde_json::from_str(&run(&["inspect", "-m", path(model), "--json"])).unwrap()
        };
        let (ours, theirs) = (inspect(&packed), inspect(&model));
        for key in ["architecture", "name", "tensors", "vocabulary", "bytes", "expert_types"] {
            assert_eq!(ours[key], theirs[key], "{}: {key}", model.display());
        }
        let layers = ours["expert_layers"].as_array().unwrap();
        assert!(layers.iter().all(|layer| layer["pieces"] == 1), "{layers:?}");
        run(&["plan", "-m", path(&packed), "--memory", "1GiB"]);
        assert!(run(&["verify", "-m", path(&packed), "--deep"]).contains("whole pack"));
        assert!(run(&["verify", "-m", path(&model), "--deep"]).contains("whole checkpoint"));
        std::fs::remove_file(&packed).unwrap();
    }
}

#[test]
fn a_pack_speaks_without_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let packed = folder.path().join("demo.sakia");
    pack(&demo(), &packed);
    let args = ["What is a compiler?", "--temperature", "0", "-n", "24", "--quiet"];
    let answer = |model: &Path| run(&[&["run", "-m", path(model)], &args[..]].concat());
    assert_eq!(answer(&packed), answer(&demo()));
    let ids = |model: &Path| run(&["tokenize", "-m", path(model), "<|im_start|>user\nHello"]);
    assert_eq!(ids(&packed), ids(&demo()));
}

/// Ends a process as power loss would: without a chance to clean up.
fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Numbers that look random, the same every time: splitmix64.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[test]
fn twenty_kills_do_not_change_a_byte() {
    let folder = tempfile::tempdir().unwrap();
    let (once, killed) = (folder.path().join("once.sakia"), folder.path().join("killed.sakia"));
    let begun = std::time::Instant::now();
    pack(&demo(), &once);
    // Somewhere in a whole run, however fast the machine is.
    let whole = begun.elapsed().as_micros() as u64;
    let model = demo();
    let args = ["pack", "-m", path(&model), "--out", path(&killed)];
    let (mut state, mut left, mut finished) = (7, 0, 0);
    for _ in 0..20 {
        let child = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(random(&mut state) % whole));
        kill(child);
        // Under its name there is a whole pack or none.
        if killed.exists() {
            assert!(same(&once, &killed), "a finished pack is whole");
            std::fs::remove_file(&killed).unwrap();
            finished += 1;
        } else {
            left += u32::from(folder.path().join("killed.sakia.partial").exists());
        }
    }
    assert!(left > 0, "some were killed at work; {finished} had finished");
    pack(&model, &killed);
    assert!(same(&once, &killed), "after {left} kills at work and {finished} too late");
    let mut names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["killed.sakia", "once.sakia"], "nothing else is left");
}

fn same(a: &Path, b: &Path) -> bool {
    std::fs::read(a).unwrap() == std::fs::read(b).unwrap()
}

#[test]
fn what_an_interrupted_run_left_is_used_and_not_trusted() {
    /// Journal of 8 bytes a part, behind 16.
    const HEAD: usize = 16;
    let folder = tempfile::tempdir().unwrap();
    let (once, out) = (folder.path().join("once.sakia"), folder.path().join("out.sakia"));
    let [partial, journal] =
        ["partial", "partial.journal"].map(|end| folder.path().join(format!("out.sakia.{end}")));
    let summary = pack(&demo(), &once);
    let parts = summary["checksums"].as_u64().unwrap();
    let model = demo();
    // A run that was killed when it had written a part, and not yet all.
    let recorded = loop {
        let args = ["pack", "-m", path(&model), "--out", path(&out), "--force"];
        let child = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let length = || std::fs::metadata(&journal).map_or(0, |there| there.len() as usize);
        while length() < HEAD + 8 * 4 && !out.exists() {
            std::thread::sleep(Duration::from_micros(200));
        }
        kill(child);
        let recorded = length().saturating_sub(HEAD) / 8;
        if partial.exists() && recorded > 0 && (recorded as u64) < parts {
            break recorded as u64;
        }
        let _ = std::fs::remove_file(&out);
    };
    let left = [&partial, &journal].map(|file| std::fs::read(file).unwrap());
    let start = u64::from_le_bytes(std::fs::read(&once).unwrap()[72..80].try_into().unwrap());
    for damaged in [false, true] {
        let mut partial_bytes = left[0].clone();
        if damaged {
            partial_bytes[start as usize] ^= 1;
        }
        std::fs::write(&partial, partial_bytes).unwrap();
        std::fs::write(&journal, &left[1]).unwrap();
        let summary = pack(&model, &out);
        assert!(same(&once, &out), "damaged: {damaged}");
        let resumed = if damaged { 0 } else { recorded };
        assert_eq!(summary["resumed"], resumed, "{summary}");
        std::fs::remove_file(&out).unwrap();
    }
}

#[test]
fn nothing_is_overwritten_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    std::fs::copy(fixtures().join("models/qwen3_moe-a/b32.gguf"), &model).unwrap();
    let source = std::fs::read(&model).unwrap();
    let out = folder.path().join("out.sakia");
    std::fs::write(&out, "precious").unwrap();
    let (m, o) = (path(&model), path(&out));
    refused(&["pack", "-m", m, "--out", o], "exists already");
    refused(&["pack", "-m", m, "--out", m, "--force"], "read by this very command");
    refused(&["pack", "-m", m, "--out", path(folder.path()), "--force"], "a folder");
    refused(&["pack", "-m", m, "--out", "/dev/null", "--force"], "a device");
    let other = folder.path().join("other.sakia");
    std::fs::write(folder.path().join("other.sakia.partial"), "precious").unwrap();
    refused(&["pack", "-m", m, "--out", path(&other)], "in the way");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious");
    run(&["pack", "-m", m, "--out", o, "--force"]);
    run(&["pack", "-m", m, "--out", path(&other), "--force"]);
    assert!(same(&out, &other), "the same source gives the same bytes");
    assert_eq!(std::fs::read(&model).unwrap(), source, "the source is as it was");
    // A pack is a source like any other.
    let again = folder.path().join("again.sakia");
    run(&["pack", "-m", o, "--out", path(&again)]);
    assert!(same(&out, &again), "a pack of a pack is the pack");
}

/// A copy of a small model folder, with texts.
fn copied_folder(to: &Path) {
    for file in std::fs::read_dir(fixtures().join("models/qwen4_exp-a/mlx-4bit-g64")).unwrap() {
        let file = file.unwrap().path();
        std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
    std::fs::write(to.join("generation_config.json"), "{}").unwrap();
    std::fs::write(to.join("chat_template.jinja"), "{{ messages }}").unwrap();
}

#[test]
fn no_file_of_a_model_folder_is_written_to() {
    let folder = tempfile::tempdir().unwrap();
    copied_folder(folder.path());
    let m = path(folder.path());
    let names = |folder: &Path| -> Vec<(PathBuf, Vec<u8>)> {
        let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        let mut files: Vec<_> =
            files.map(|file| (file.clone(), std::fs::read(file).unwrap())).collect();
        files.sort();
        files
    };
    let before = names(folder.path());
    for (file, _) in &before {
        let words = "read by this very command";
        refused(&["logits", "-m", m, "--ids", "1,2", "--out", path(file)], words);
        refused(&["pack", "-m", m, "--out", path(file), "--force"], words);
    }
    assert!(before.len() >= 8 && names(folder.path()) == before, "{} files", before.len());
}

#[test]
fn names_that_are_no_unicode_are_shown_in_json_and_on_the_terminal() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let odd = folder.path().join(std::ffi::OsStr::from_bytes(b"bad\xff\x1b[31m\xe2\x80\xae\x7f"));
    std::fs::create_dir(&odd).unwrap();
    let (model, out) = (odd.join("x.gguf"), odd.join("x.sakia"));
    std::fs::copy(fixtures().join("models/qwen3_moe-a/b32.gguf"), &model).unwrap();
    let said = |words: &[&str], json: bool| {
        let mut command = command(words);
        if words[0] == "pack" {
            command.arg("--out").arg(&out).arg("--force");
        }
        command.arg("-m").arg(&model).args(json.then_some("--json"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    for words in [&["inspect"][..], &["verify"], &["verify", "--deep"], &["pack"]] {
        let json: Value = serde_json::from_str(&said(words, true)).unwrap();
        assert!(json.to_string().contains("bad\u{fffd}"), "{json}");
        let shown = said(words, false);
        assert!(!shown.contains(['\x1b', '\u{202e}', '\x7f']), "{words:?}: {shown:?}");
    }
}

#[test]
fn deep_checks_name_what_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixtures().join("models/qwen4_exp-a/split-b32-00001-of-00003.gguf");
    let out = folder.path().join("x.sakia");
    pack(&model, &out);
    let bytes = std::fs::read(&out).unwrap();
    let start = u64::from_le_bytes(bytes[72..80].try_into().unwrap()) as usize;
    let mut changed = bytes.clone();
    for at in [start, usize::midpoint(start, bytes.len()), bytes.len() - 1] {
        changed[at] ^= 1;
    }
    std::fs::write(&out, changed).unwrap();
    assert!(run(&["verify", "-m", path(&out)]).contains("whole pack"), "structure alone is whole");
    let output = sakia(&["verify", "-m", path(&out), "--deep", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let verdict: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&verdict["ok"], &verdict["fault_count"]), (&false.into(), &3.into()), "{verdict}");
    for fault in verdict["faults"].as_array().unwrap() {
        assert_eq!(fault["file"], path(&out));
        assert!(fault["offset"].as_u64().unwrap() >= start as u64, "{fault}");
    }
    std::fs::write(&out, &bytes[..bytes.len() - 4096]).unwrap();
    refused(&["verify", "-m", path(&out)], "the file's size");
    let nan = fixtures().join("bad/folders/router_nan");
    let output = sakia(&["verify", "-m", path(&nan), "--deep"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("NaN at row") && said.contains("mlp.gate.weight"), "{said}");
}
