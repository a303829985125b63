//! Which slots a model's experts need, and the pool that a plan's slots make.

use checkpoint::Records;
use memory_plan::{PlannedClass, RecordClass};
use slot_pool::{ClassSpec, PoolSpec};
use units::ExpertKey;

/// By layer, the largest slot that any of its experts needs: alignment in the file differs from expert to expert.
pub(crate) fn needed(records: &Records) -> Vec<u64> {
    let layer = |layer| {
        (0..records.n_experts())
            .map(|expert| records.slot_bytes(ExpertKey::new(layer, expert)))
            .max()
            .expect("a model has at least one expert")
    };
    (0..records.n_layers() as u32).map(layer).collect()
}

/// Layers with records of the same size are one class of records.
pub(crate) fn record_classes(needed: &[u64], n_experts: u32) -> Vec<RecordClass> {
    let mut classes: Vec<RecordClass> = Vec::new();
    for &slot_bytes in needed {
        let records = u64::from(n_experts);
        match classes.iter_mut().find(|class| class.slot_bytes == slot_bytes) {
            Some(class) => class.records += records,
            None => classes.push(RecordClass { slot_bytes, records }),
        }
    }
    classes
}

/// Each layer in the smallest class whose slots it fits in.
///
/// The pair: experts of a layer, and those that it usually needs for a pass.
pub(crate) fn pool_spec(
    needed: &[u64],
    (n_experts, usual_selection): (u32, u32),
    classes: &[PlannedClass],
) -> PoolSpec {
    let class_of = |needed: &u64| {
        let fitting = classes.iter().enumerate().filter(|(_, class)| class.slot_bytes >= *needed);
        fitting
            .min_by_key(|(_, class)| class.slot_bytes)
            .expect("the plan has a class for every record")
            .0 as u32
    };
    let class = |class: &PlannedClass| ClassSpec {
        slots: class.slots as u32,
        slot_bytes: class.slot_bytes,
    };
    PoolSpec {
        n_layers: needed.len() as u32,
        n_experts,
        usual_selection,
        classes: classes.iter().map(class).collect(),
        class_of_layer: needed.iter().map(class_of).collect(),
    }
}
