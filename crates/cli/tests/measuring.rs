//! `sakia bench`, `sakia probe` and `sakia doctor` as a user runs them. No time that anything took is judged.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn root(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(name)
}

fn demo() -> String {
    root("models/sakia-demo-Q4_K_M.gguf").canonicalize().unwrap().to_str().unwrap().to_owned()
}

fn sakia(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    command.args(args).env_remove("SAKIA_MODEL").current_dir(root(""));
    // Nothing was pulled to there.
    command.env("SAKIA_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/measuring"));
    command.output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

/// A file of ids in a folder, and names of other files there.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ids: Vec<String> = (0..120).map(|i| (i * i * 37 % 8000).to_string()).collect();
        std::fs::write(folder.path().join("ids.txt"), ids.join(" ")).unwrap();
        Self(folder)
    }

    fn name(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn bench(&self, args: &[&str]) -> Output {
        sakia(&[&["bench", "--ids-file", &self.name("ids.txt")], args].concat())
    }
}

fn number(value: &Value, pointer: &str) -> f64 {
    let number = value.pointer(pointer).and_then(Value::as_f64);
    number.unwrap_or_else(|| panic!("no number at {pointer} in {value:#}"))
}

#[test]
fn one_run_is_a_receipt_with_what_bounds_it_and_stays_in_its_budget() {
    let folder = Folder::new();
    let run = folder.bench(&["-p", "70", "-n", "20", "--memory", "44MiB", "--roofline", "on"]);
    let receipt = json(&run);
    for path in ["/prefill/tokens_per_second", "/decode/tokens_per_second"] {
        assert!(number(&receipt, path) > 0.0);
    }
    assert_eq!(receipt["token_us"].as_array().unwrap().len(), 20);
    assert!(number(&receipt, "/bench/first_token_us") > number(&receipt, "/bench/load_us"));
    assert_eq!(receipt["bench"]["page_cache_dropped"], cfg!(target_os = "linux"));

    let of = |name: &str| number(&receipt, &format!("/roofline/{name}"));
    let read = number(&receipt, "/decode/read_bytes_per_token");
    assert!(read > 0.0, "the demo streams in 44 MiB");
    assert_eq!(of("read_bytes_per_token"), read);
    let best = of("disk_bytes_per_second").max(of("achieved_bytes_per_second"));
    assert!((of("disk_tokens_per_second") - best / read).abs() < 1e-6);
    assert!(of("achieved_bytes_per_second") > 0.0);
    let ceiling = of("disk_tokens_per_second").min(of("resident_tokens_per_second"));
    assert_eq!(of("ceiling_tokens_per_second"), ceiling);
    assert!((of("share") - number(&receipt, "/decode/tokens_per_second") / ceiling).abs() < 1e-9);
    let moved = of("weight_bytes_per_token") * of("tokens_per_second");
    assert!((of("memory_share") - moved / of("memory_bytes_per_second")).abs() < 1e-9);
    assert!(of("peak_rss_bytes") <= number(&receipt, "/budget_bytes"), "{receipt:#}");
    // Both are of the whole process; the system counts pages a little late.
    let counting = f64::from(1 << 20);
    assert!(of("peak_rss_bytes") + counting >= number(&receipt, "/peak_rss_bytes"));
}

#[test]
fn a_token_takes_the_weights_that_stay_and_those_of_its_experts() {
    let folder = Folder::new();
    let run = folder.bench(&["-p", "8", "-n", "8", "--memory", "300MiB", "--roofline", "on"]);
    let receipt = json(&run);
    let inspected = json(&sakia(&["inspect", "--json"]));
    let parts = inspected["bytes"].as_object().unwrap();
    let part = |name: &str| parts.get(name).and_then(Value::as_u64).unwrap_or(0);
    let all: u64 = parts.values().map(|bytes| bytes.as_u64().unwrap()).sum();
    // The embedding gives a row, unless it is the output head too.
    let looked_up = if part("output head") > 0 { part("token embedding") } else { 0 };
    let left_out = ["routed experts", "n-gram table (by row)", "draft layers (not loaded)"];
    let resident = all - left_out.map(part).iter().sum::<u64>() - looked_up;
    let experts = inspected["expert_bytes_per_token"].as_u64().unwrap();
    assert_eq!(receipt["roofline"]["weight_bytes_per_token"], resident + experts);
}

#[test]
fn guesses_leave_no_rate_with_everything_in_memory_and_say_so() {
    let folder = Folder::new();
    let args = ["-p", "20", "-n", "8", "--memory", "60MiB", "--speculate", "lookup"];
    let run = folder.bench(&[&args[..], &["--roofline", "on"]].concat());
    let roofline = &json(&run)["roofline"];
    assert!(roofline["resident_tokens_per_second"].is_null() && roofline["share"].is_null());
    assert!(roofline["notes"][0].as_str().unwrap().contains("guesses"), "{roofline:#}");
}

#[test]
fn a_warm_run_reads_less_than_the_cold_one_before_it() {
    let folder = Folder::new();
    let args = ["-p", "40", "-n", "10", "--memory", "300MiB", "--warm"];
    let receipt = json(&folder.bench(&args));
    assert!(number(&receipt, "/prefill/misses") > 0.0);
    assert_eq!(number(&receipt, "/warm/prefill/misses"), 0.0, "all experts fit");
    assert_eq!(receipt["warm"]["decode"]["tokens"], receipt["decode"]["tokens"]);
    assert_eq!(receipt["warm"]["token_us"].as_array().unwrap().len(), 10);
    assert!(receipt.get("roofline").is_none());
}

#[test]
fn a_series_has_every_setting_every_time_and_its_medians() {
    let folder = Folder::new();
    let (file, one) = (folder.name("series.json"), folder.name("one.json"));
    let args = ["-p", "16,40", "-n", "6", "--memory", "44MiB,60MiB", "--repeat", "2"];
    let table = folder.bench(&[&args[..], &["--roofline", "off", "-o", &file]].concat());
    let said = stderr(&table);
    assert!(said.contains("run 1 of 8") && said.contains("run 8 of 8"), "{said}");
    let table = stdout(&table);
    assert_eq!(table.matches("medians of 2 runs").count(), 4, "{table}");
    let receipt: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let series = receipt["series"].as_array().unwrap();
    let settings: Vec<(u64, u64)> = series
        .iter()
        .map(|of| {
            (of["budget_bytes"].as_u64().unwrap() >> 20, of["prompt_tokens"].as_u64().unwrap())
        })
        .collect();
    assert_eq!(settings, [(44, 16), (44, 40), (60, 16), (60, 40)]);
    for of in series {
        let runs = of["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 2);
        assert_eq!(runs[0]["output_hash"], runs[1]["output_hash"]);
        let spread = &of["medians"]["decode.tokens_per_second"];
        let rates = [0, 1].map(|run| number(&runs[run], "/decode/tokens_per_second"));
        assert_eq!(number(spread, "/min"), rates[0].min(rates[1]));
        assert_eq!(number(spread, "/max"), rates[0].max(rates[1]));
        assert!(number(&runs[0], "/peak_rss_bytes") <= number(of, "/budget_bytes"));
    }

    let same = json(&sakia(&["bench", "--compare", &file, &file, "--json"]));
    assert_eq!(same["pairs"].as_array().unwrap().len(), 4);
    for pair in same["pairs"].as_array().unwrap() {
        let mut ratios = pair["ratios"].as_array().unwrap().iter();
        let rate = ratios.find(|r| r["metric"] == "decode.tokens_per_second").unwrap();
        assert!(rate["ratio"] == 1.0 && rate["overlap"] == true, "{rate}");
    }
    let args = ["-p", "40", "-n", "6", "--memory", "60MiB", "--roofline", "off", "-o", &one];
    stdout(&folder.bench(&args));
    let compared = stdout(&sakia(&["bench", "--compare", &one, &file]));
    assert!(compared.contains("60.0 MiB") && compared.contains("1 and 2 runs"), "{compared}");
    assert!(!compared.contains("note: other"), "{compared}");
}

#[test]
fn a_run_that_fails_ends_a_series_with_its_reason() {
    let folder = Folder::new();
    let file = folder.name("series.json");
    let args = ["-p", "8", "-n", "4", "--memory", "60MiB,8MiB", "--repeat", "2", "-o", &file];
    let output = folder.bench(&[&args[..], &["--roofline", "off"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("too little memory"), "{}", stderr(&output));
    assert!(!Path::new(&file).exists(), "there is no half receipt");
}

#[test]
fn senseless_benches_are_refused_with_words() {
    let folder = Folder::new();
    let junk = folder.name("junk.json");
    std::fs::write(&junk, "{\"series\": 1}").unwrap();
    let ids = folder.name("ids.txt");
    for (args, code, words) in [
        (&["--ids-file", &ids, "-p", "0", "-n", "4"][..], 1, "-p needs at least 1"),
        (&["--ids-file", &ids, "-p", "8,200", "-n", "4"], 1, "holds 120 ids"),
        (&["--ids-file", &ids, "-p", "8", "-n", "4", "--repeat", "0"], 2, "repeat"),
        (&["--ids-file", &ids, "-p", "8", "-n", "4", "-o", &ids], 1, "read by this very command"),
        (
            &["--ids-file", &ids, "-p", "8", "-n", "4", "-o", "/nowhere/x.json"],
            1,
            "/nowhere/x.json",
        ),
        (&["-p", "8", "-n", "4"], 2, "--ids-file"),
        (&["--compare", &junk], 2, "2 values required"),
        (&["--compare", &junk, &junk], 1, "no receipt"),
        (&["--compare", &ids, &junk], 1, "ids.txt"),
        (&["--compare", "/nowhere.json", &junk], 1, "/nowhere.json"),
    ] {
        let output = sakia(&[&["bench"], args].concat());
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
    }
    let broken = sakia(&["bench", "--compare", &junk, &junk, "--json"]);
    assert_eq!(
        serde_json::from_slice::<Value>(&broken.stdout).unwrap()["error"]["class"],
        "config"
    );
}

#[test]
fn a_probe_reads_every_length_at_every_depth() {
    let args = ["--sizes", "4KiB,100KiB", "--depths", "1,3", "--seconds", "1", "--json"];
    let found =
        json(&sakia(&[&["probe", "--only", "disk", "--reader", "pread"], &args[..]].concat()));
    assert!(found["pool"].is_null());
    let disk = &found["disk"];
    assert_eq!(disk["file"], "sakia-demo-Q4_K_M.gguf");
    assert!(number(disk, "/expert_piece_bytes") > 0.0);
    let spots = disk["spots"].as_array().unwrap();
    let places: Vec<(u64, u64)> = spots
        .iter()
        .map(|spot| (spot["read_bytes"].as_u64().unwrap(), spot["at_once"].as_u64().unwrap()))
        .collect();
    assert_eq!(places, [(4096, 1), (4096, 3), (102_400, 1), (102_400, 3)]);
    for spot in spots {
        assert!(number(spot, "/bytes_per_second") > 0.0 && number(spot, "/reads") > 0.0);
        assert!(number(spot, "/p50_us") <= number(spot, "/p99_us"), "{spot}");
    }
}

#[test]
fn a_probe_takes_a_folder_or_a_file_and_names_what_it_cannot_read() {
    let folder = Folder::new();
    std::fs::write(folder.name("small.bin"), vec![1; 9000]).unwrap();
    std::fs::write(folder.name("large.bin"), vec![1; 70_000]).unwrap();
    let path = folder.name("");
    let usual = ["probe", "--only", "disk", "--seconds", "1", "--depths", "2"];
    let table = stdout(&sakia(&[&usual[..], &[&path]].concat()));
    assert!(table.contains("large.bin (68.4 KiB)") && table.contains("pread: MB/s"), "{table}");
    assert!(table.contains("64.0 KiB") && !table.contains("256.0 KiB"), "what fits: {table}");
    let empty = folder.name("empty");
    std::fs::create_dir(&empty).unwrap();
    let (small, ids) = (folder.name("small.bin"), folder.name("ids.txt"));
    for (args, words) in [
        (&[&empty[..]][..], "holds no file"),
        (&[&small[..], "--sizes", "1MiB"], "small.bin has 9000 bytes"),
        (&[&small[..], "--sizes", "0"], "reads of 0"),
        (&[&ids[..]], "too few for reads of 4096"),
        (&["/nowhere.bin"], "/nowhere.bin"),
        (&["/dev/null"], "a regular file is needed"),
    ] {
        let output = sakia(&[&usual[..], args].concat());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
    }
}

#[test]
fn a_probe_of_the_pool_runs_made_and_recorded_routing() {
    let args = ["--synthetic", "olmoe,layers=4,tokens=20", "--slots", "40", "--json"];
    let found = json(&sakia(&[&["probe", "--only", "pool"], &args[..]].concat()));
    assert!(found["disk"].is_null());
    let pool = &found["pool"];
    let policies = pool["policies"].as_array().unwrap();
    assert_eq!(policies.len(), 7);
    for policy in policies {
        assert!(number(policy, "/lookups_per_second") > 0.0);
        let simulated = ["--policy", policy["policy"].as_str().unwrap(), "--json"];
        let made = ["simulate", "--synthetic", "olmoe,layers=4,tokens=20", "--slots", "40"];
        let replay = &json(&sakia(&[&made[..], &simulated].concat()))["replays"][0];
        let misses = number(replay, "/prefill/misses") + number(replay, "/decode/misses");
        assert_eq!(number(policy, "/misses"), misses, "it is the engine's pool");
    }
    let folder = Folder::new();
    let trace = folder.name("demo.trace");
    stdout(&sakia(&["trace", "The wheel", "-n", "4", "-o", &trace]));
    let table = stdout(&sakia(&["probe", "--only", "pool", "--trace", &trace, "--policy", "lru"]));
    assert!(table.lines().nth(2).unwrap().starts_with("lru"), "{table}");
    let refused = sakia(&["probe", "--only", "pool", "--trace", &folder.name("ids.txt")]);
    assert!(stderr(&refused).contains("does not begin with"), "{}", stderr(&refused));
    let refused = sakia(&["probe", "--only", "pool", "--slots", "3"]);
    assert!(stderr(&refused).contains("too few"), "{}", stderr(&refused));
}

#[test]
fn the_doctor_plans_what_it_finds_and_tells_no_folder() {
    let told = json(&sakia(&["doctor", "--no-probe", "--json"]));
    let [model] = &told["models"].as_array().unwrap()[..] else { panic!("{told:#}") };
    assert_eq!(model["name"], "demo model");
    let plan = json(&sakia(&["plan", "--json"]));
    let slots: u64 =
        plan["classes"].as_array().unwrap().iter().map(|c| c["slots"].as_u64().unwrap()).sum();
    assert_eq!(model["plan"]["budget_bytes"], plan["budget"]["bytes"]);
    // The process is a little larger where more was asked of the machine before.
    assert!((number(model, "/plan/slots") - slots as f64).abs() < 0.2 * slots as f64, "{model}");
    assert!(
        told["disks"].as_array().unwrap().is_empty()
            && told["memory"]["bytes_per_second"].is_null()
    );

    let model = demo();
    let text = stdout(&sakia(&["doctor", "-m", &model, "--memory", "60MiB"]));
    for words in [
        "processor",
        "kernels",
        "io_uring",
        "sakia-demo-Q4_K_M.gguf",
        "60.0 MiB",
        "GB/s with 4 at once",
    ] {
        assert!(text.contains(words), "no `{words}` in {text}");
    }
    let folder = Path::new(&model).parent().unwrap().to_str().unwrap();
    assert!(!text.contains(folder), "{text}");
}

#[test]
fn what_is_wrong_with_a_model_is_a_finding_and_no_failure() {
    let folder = Folder::new();
    let broken = folder.name("broken.gguf");
    std::fs::write(&broken, "GGUF").unwrap();
    let model = demo();
    for (args, name) in [
        (&["-m", &broken[..]][..], "broken.gguf cannot run"),
        (&["-m", &model, "--memory", "8MiB"], "sakia-demo-Q4_K_M.gguf cannot run"),
        (&["-m", "no-org/no-model"], "no-org/no-model"),
    ] {
        let output = sakia(&[&["doctor", "--no-probe", "--json"], args].concat());
        let told = stdout(&output);
        let findings = serde_json::from_str::<Value>(&told).unwrap()["findings"].clone();
        let all = findings.as_array().unwrap();
        assert!(all.iter().any(|f| f["what"].as_str().unwrap().contains(name)), "{findings:#}");
        assert!(!told.contains(&folder.name("")), "{told}");
    }
}

#[test]
fn every_help_ends_with_examples() {
    for verb in ["bench", "probe", "doctor", "trace"] {
        let help = stdout(&sakia(&[verb, "--help"]));
        assert!(help.contains("Example") && help.contains(&format!("sakia {verb}")), "{help}");
        assert!(!help.contains("--only <ONLY>"), "{help}");
    }
}
