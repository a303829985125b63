//! Files with the exact shapes of published models, whose data is holes: what `inspect` and `plan` say about them.
//!
//! Expected numbers are those that others published for the same files.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use checkpoint::Vocabulary;
use memory_plan::{Budget, Limit, Plan, PlanInput, RecordClass, Term};
use serde_json::Value;
use units::{Bytes, ExpertKey};
use xtask::synth;

const IQ2_XS_RECORD: u64 = 909_312;
const IQ1_M_RECORD: u64 = 688_128;

fn sakia(args: &[&str], model: &Path) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sakia"));
    let output = command.args(args).arg("--json").arg("-m").arg(model).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn gguf(folder: &Path, alignment: u64) -> std::path::PathBuf {
    let path = folder.join(format!("next-{alignment}.gguf"));
    synth::write_sparse_gguf(&path, &synth::iq2_layout(alignment)).unwrap();
    path
}

#[test]
fn a_file_of_two_record_sizes_is_inspected_layer_by_layer() {
    let folder = tempfile::tempdir().unwrap();
    let report = sakia(&["inspect"], &gguf(folder.path(), 32));
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
    let plan = sakia(&args, &gguf(folder.path(), 32));
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

/// The slots that `bytes` give when they are for nothing else.
fn slots_for(classes: &[RecordClass], bytes: u64) -> Plan {
    // What the planner keeps as its margin comes on top: 4 MiB, and one byte for 256 of the slots.
    let budget = bytes + bytes.div_ceil(256) + (4 << 20);
    let unlimited = Limit { name: "a test".to_owned(), bytes: Bytes(u64::MAX) };
    memory_plan::plan(&PlanInput {
        model: "synthetic".to_owned(),
        budget: Budget::of(Some(Bytes(budget)), &[unlimited]),
        process_base: Bytes::ZERO,
        resident: Vec::new(),
        kv_bytes_per_token: Bytes::ZERO,
        state: Bytes::ZERO,
        context: 1,
        context_is_default: false,
        scratch: &|_| vec![Term::new("nothing", Bytes::ZERO)],
        passes: &[64],
        records: classes.to_vec(),
        top_k: 10,
        slots: None,
    })
    .unwrap()
}

/// Record sizes as they are planned for, smallest first, with how many experts have them.
fn record_classes(path: &Path) -> Vec<RecordClass> {
    let checkpoint = checkpoint::open_with(path, Vocabulary::Skip).unwrap();
    let model = checkpoint::bind(&checkpoint).unwrap();
    let mut classes: Vec<RecordClass> = Vec::new();
    for key in (0..48).flat_map(|layer| (0..512).map(move |expert| ExpertKey::new(layer, expert))) {
        let slot_bytes = model.records.slot_bytes(key);
        match classes.iter_mut().find(|class| class.slot_bytes == slot_bytes) {
            Some(class) => class.records += 1,
            None => classes.push(RecordClass { slot_bytes, records: 1 }),
        }
    }
    classes.sort_unstable_by_key(|class| class.slot_bytes);
    classes
}

#[test]
fn aligned_records_give_the_published_slot_counts() {
    let folder = tempfile::tempdir().unwrap();
    let classes = record_classes(&gguf(folder.path(), 4096));
    let sizes: Vec<(u64, u64)> = classes.iter().map(|c| (c.slot_bytes, c.records)).collect();
    assert_eq!(sizes, [(IQ1_M_RECORD, 37 * 512), (IQ2_XS_RECORD, 11 * 512)]);
    let uniform = [RecordClass { slot_bytes: IQ2_XS_RECORD, records: 48 * 512 }];
    let quarter = 1_u64 << 28;
    for (quarters, published) in [(1, 295), (2, 590), (4, 1180), (8, 2361), (16, 4723), (32, 9446)]
    {
        assert_eq!(
            slots_for(&uniform, quarters * quarter).slots(),
            published,
            "{quarters} / 4 GiB"
        );
    }
    // Everything resident: 21,312 MiB in uniform slots, 17,316 MiB by size.
    for (classes, mib) in [(&uniform[..], 21_312_u64), (&classes, 17_316)] {
        assert_eq!(slots_for(classes, mib << 20).slots(), 24_576);
        assert_eq!(slots_for(classes, (mib << 20) - 1).slots(), 24_575);
    }
}

#[test]
fn size_classes_give_as_many_slots_as_published_and_what_was_left_over() {
    let folder = tempfile::tempdir().unwrap();
    let classes = record_classes(&gguf(folder.path(), 4096));
    let slots = |bytes: u64| {
        let plan = slots_for(&classes, bytes);
        let slots: Vec<u64> = plan.classes.iter().map(|class| class.slots).collect();
        assert_eq!(slots.len(), 2, "one class for each size");
        slots
    };
    // Published: 121 slots for each of 37 and of 11 layers, 5808 in all and 1331 of the smaller class. Equal shares
    // leave 3.7 MiB over, which slot after slot uses up.
    let [small, large] = slots(4 << 30)[..] else { panic!("two classes") };
    assert_eq!((small, large), (4477 + 4, 1331 + 1));
    let left = (4 << 30) - (small * IQ1_M_RECORD + large * IQ2_XS_RECORD);
    assert!(left < IQ2_XS_RECORD, "{left} bytes are left over");
    // Published: at 2 GiB classes are switched off, since 660 slots of the larger are fewer than 2 x 512 + 64.
    // Here a class needs no more than one token's choice, so both stay: 60 for each layer, and the rest.
    let [small, large] = slots(2 << 30)[..] else { panic!("two classes") };
    assert!(large >= 660 && small >= 37 * 60, "{small} and {large}");
    assert!(small + large > 2361, "more than uniform slots");
}

#[test]
fn tensors_that_begin_between_pages_cost_a_page_for_each_piece() {
    let folder = tempfile::tempdir().unwrap();
    let classes = record_classes(&gguf(folder.path(), 32));
    let sizes: Vec<(u64, u64)> = classes.iter().map(|c| (c.slot_bytes, c.records)).collect();
    let page = 4096;
    assert_eq!(sizes, [(IQ1_M_RECORD + 3 * page, 37 * 512), (IQ2_XS_RECORD + 3 * page, 11 * 512)]);
}
