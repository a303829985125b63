//! Files with the exact shapes of published models, whose data is holes: what `inspect` and `plan` say about them.
//!
//! Expected numbers are those that others published for the same files.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use xtask::synth;

const IQ2_XS_RECORD: u64 = 909_312;
const IQ1_M_RECORD: u64 = 688_128;

fn sakia(args: &[&str], model: &Path) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    let output = command.args(args).arg("--json").arg("-m").arg(model).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn gguf(folder: &Path) -> PathBuf {
    let path = folder.join("next.gguf");
    synth::write_sparse_gguf(&path, &synth::iq2_layout(32)).unwrap();
    path
}

#[test]
fn a_file_of_two_record_sizes_is_inspected_layer_by_layer() {
    let folder = tempfile::tempdir().unwrap();
    let report = sakia(&["inspect"], &gguf(folder.path()));
    assert_eq!(report["tensors"], 843);
    assert_eq!(report["bytes"]["routed experts"], 18_157_142_016_u64);
    // Ten experts in each of 48 layers: 338 MiB.
    let layers = [11, 37].map(|n: u64| 10 * n);
    let per_token = layers[0] * IQ2_XS_RECORD + layers[1] * IQ1_M_RECORD;
    assert_eq!(
        (report["expert_bytes_per_token"].as_u64(), per_token >> 20),
        (Some(per_token), 338)
    );
    let matrices = 3 * 512;
    assert_eq!(report["expert_types"]["IQ2_XS"], 11 * matrices);
    assert_eq!(report["expert_types"]["IQ1_M"], 37 * matrices);
    for layer in report["expert_layers"].as_array().unwrap() {
        let outer = !(6..=42).contains(&layer["layer"].as_u64().unwrap());
        let bytes = if outer { IQ2_XS_RECORD } else { IQ1_M_RECORD };
        assert_eq!(layer["record_bytes"], bytes, "{layer}");
        assert_eq!(layer["pieces"], 3);
    }
}

#[test]
fn the_plan_keeps_48_kib_a_position_and_the_state_of_36_layers() {
    let folder = tempfile::tempdir().unwrap();
    let args = ["plan", "--memory", "8GiB", "--context", "4096", "--kv", "f32"];
    let plan = sakia(&args, &gguf(folder.path()));
    let term = |name: &str| {
        let terms = plan["terms"].as_array().unwrap();
        terms.iter().find(|term| term["name"] == name).unwrap()["bytes"].as_u64().unwrap()
    };
    assert_eq!(term("KV cache"), 4096 * (48 << 10));
    // Two states (running, and where the next turn begins) of 32 heads of 128 x 128 and 3 inputs of 8192 channels.
    let layer = 4 * (32 * 128 * 128 + 3 * 8192);
    assert_eq!(term("recurrent state"), 2 * 36 * layer);
    let slots: u64 = plan["classes"].as_array().unwrap().iter().map(bytes_of_slots).sum();
    assert_eq!(term("slots"), slots);
}

fn bytes_of_slots(class: &Value) -> u64 {
    class["slots"].as_u64().unwrap() * class["slot_bytes"].as_u64().unwrap()
}
