//! What backends on the host share: memory, residency, and the order of operations.
//!
//! Recorded operations wait in a queue; `submit` runs it to its end on the caller's thread (and the kernels' own),
//! so an epoch is complete as soon as it is given out.

mod execute;
pub(crate) mod memory;
mod rope;
mod sequence;

pub(crate) use memory::fill;

use std::ops::Range;
use std::ptr::NonNull;

use quant::BlockType;
use quant::slot::ExpertMatrices;
use units::{Epoch, ExpertKey, LayerIndex, SlotIndex};

use crate::backend::{
    Backend, BufferId, ComputeError, KvType, MatrixShape, Moe, Op, Role, RopeId, RopeSpec, Routed,
    RouterHandle, RouterShape, Row, SequenceId, SequenceShape, SlotClass, SnapshotId, WeightId,
};
use crate::kernels::{BadLogit, Kernels, Matrix, Pair};
use memory::{Region, SlotMemory};
use rope::Rope;
use sequence::{Recurrent, Sequence};

struct Weight {
    shape: MatrixShape,
    bytes: usize,
    region: Region,
}

impl Weight {
    fn matrix(&self) -> Matrix<'_> {
        let MatrixShape { n_out, n_in, block_type } = self.shape;
        Matrix { block_type, n_in, n_out, bytes: self.region.bytes(self.bytes) }
    }

    fn vector(&self) -> &[f32] {
        assert_eq!(self.shape.block_type, BlockType::F32, "vectors are kept as f32");
        self.region.f32s(self.shape.n_out * self.shape.n_in)
    }
}

struct Buffer {
    width: usize,
    data: Vec<f32>,
}

/// One routing decision: choices, which of them have been run, their outputs.
struct Router {
    shape: RouterShape,
    routes: Vec<Routed>,
    done: Vec<bool>,
    outputs: Vec<f32>,
    bad: Option<BadLogit>,
}

#[derive(Clone, Copy)]
struct Resident {
    slot: SlotIndex,
    matrices: ExpertMatrices,
}

/// Consecutive rows of one sequence.
#[derive(Clone)]
struct Run {
    sequence: SequenceId,
    rows: Range<usize>,
    first_position: usize,
    role: Role,
}

/// Where every published expert is, by layer and expert.
#[derive(Default)]
struct Residency(Vec<Vec<Option<Resident>>>);

impl Residency {
    fn get(&self, layer: LayerIndex, routed: &Routed) -> Option<Resident> {
        *self.0.get(layer.get())?.get(routed.expert.get())?
    }
}

/// A backend on host memory with the arithmetic of `K`.
pub(crate) struct HostBackend<K> {
    kernels: K,
    kv: KvType,
    weights: Vec<Weight>,
    buffers: Vec<Buffer>,
    routers: Vec<Router>,
    ropes: Vec<Rope>,
    slots: SlotMemory,
    residency: Residency,
    sequences: Vec<Option<Sequence>>,
    snapshots: Vec<Option<(SequenceId, Recurrent)>>,
    rows: Vec<Row>,
    runs: Vec<Run>,
    queue: Vec<Op>,
    /// Work space of the expert operation.
    pairs: Vec<Pair>,
    epoch: Epoch,
}

impl<K: Kernels> HostBackend<K> {
    pub(crate) fn new(kernels: K, kv: KvType) -> Self {
        Self {
            kernels,
            kv,
            weights: Vec::new(),
            buffers: Vec::new(),
            routers: Vec::new(),
            ropes: Vec::new(),
            slots: SlotMemory::none(),
            residency: Residency::default(),
            sequences: Vec::new(),
            snapshots: Vec::new(),
            rows: Vec::new(),
            runs: Vec::new(),
            queue: Vec::new(),
            pairs: Vec::new(),
            epoch: Epoch(0),
        }
    }

    fn run_queue(&mut self) {
        let mut queue = std::mem::take(&mut self.queue);
        for op in queue.drain(..) {
            self.execute(&op);
        }
        // Nothing is recorded while the queue runs; its allocation is kept.
        self.queue = queue;
    }

    fn active_routes(&self, router: RouterHandle) -> &[Routed] {
        let router = &self.routers[router.0 as usize];
        &router.routes[..self.rows.len() * router.shape.top_k]
    }

    fn open(&mut self, sequence: SequenceId) -> &mut Sequence {
        self.sequences[sequence.0 as usize].as_mut().expect("the sequence is open")
    }
}

/// Puts a value into the first free place.
fn insert<T>(places: &mut Vec<Option<T>>, value: T) -> u32 {
    let index = places.iter().position(Option::is_none).unwrap_or_else(|| {
        places.push(None);
        places.len() - 1
    });
    places[index] = Some(value);
    index as u32
}

/// A zeroed vector, or an error instead of an abort.
fn zeroed(what: &'static str, len: usize) -> Result<Vec<f32>, ComputeError> {
    let error = ComputeError::OutOfMemory { what, bytes: len.saturating_mul(4) };
    if len.checked_mul(4).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
        return Err(error);
    }
    // Zeroed by the allocator, so pages are committed when they are first used.
    Ok(vec![0.0; len])
}

impl<K: Kernels> Backend for HostBackend<K> {
    fn name(&self) -> &'static str {
        self.kernels.name()
    }

    fn alloc_weight(&mut self, shape: MatrixShape) -> Result<WeightId, ComputeError> {
        let row = shape.block_type.row_bytes(shape.n_in).expect("rows are made of whole blocks");
        let bytes = row
            .checked_mul(shape.n_out)
            .ok_or(ComputeError::OutOfMemory { what: "a weight", bytes: usize::MAX })?;
        let region = Region::new("a weight", bytes)?;
        self.weights.push(Weight { shape, bytes, region });
        Ok(WeightId(self.weights.len() as u32 - 1))
    }

    fn weight_memory(&mut self, weight: WeightId) -> (NonNull<u8>, usize) {
        let region = &self.weights[weight.0 as usize].region;
        (region.base(), region.len())
    }

    fn alloc_buffer(&mut self, max_rows: usize, width: usize) -> Result<BufferId, ComputeError> {
        let data = zeroed("activations", max_rows.saturating_mul(width))?;
        self.buffers.push(Buffer { width, data });
        Ok(BufferId(self.buffers.len() as u32 - 1))
    }

    fn alloc_router(
        &mut self,
        max_rows: usize,
        shape: RouterShape,
    ) -> Result<RouterHandle, ComputeError> {
        let pairs = max_rows.saturating_mul(shape.top_k);
        self.routers.push(Router {
            shape,
            routes: vec![Routed { expert: units::ExpertIndex(0), weight: 0.0 }; pairs],
            done: vec![false; pairs],
            outputs: zeroed("expert outputs", pairs.saturating_mul(shape.hidden))?,
            bad: None,
        });
        Ok(RouterHandle(self.routers.len() as u32 - 1))
    }

    fn alloc_rope(&mut self, spec: RopeSpec) -> RopeId {
        self.ropes.push(Rope::new(&spec));
        RopeId(self.ropes.len() as u32 - 1)
    }

    fn alloc_slots(&mut self, classes: &[SlotClass]) -> Result<(), ComputeError> {
        assert!(self.residency.0.is_empty(), "slots are allocated before anything is published");
        self.slots = SlotMemory::new(classes.iter().map(|class| (class.slots, class.stride)))?;
        Ok(())
    }

    fn slot_memory(&self, slot: SlotIndex) -> (NonNull<u8>, usize) {
        self.slots.memory(slot.get())
    }

    fn open_sequence(&mut self, shape: SequenceShape) -> Result<SequenceId, ComputeError> {
        let sequence = Sequence::new(shape, self.kv)?;
        Ok(SequenceId(insert(&mut self.sequences, sequence)))
    }

    fn close_sequence(&mut self, sequence: SequenceId) {
        self.run_queue();
        self.sequences[sequence.0 as usize] = None;
        for snapshot in &mut self.snapshots {
            snapshot.take_if(|(owner, _)| *owner == sequence);
        }
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, ComputeError> {
        self.run_queue();
        let copy = self.open(sequence).recurrent.clone();
        Ok(SnapshotId(insert(&mut self.snapshots, (sequence, copy))))
    }

    fn rollback(&mut self, sequence: SequenceId, snapshot: SnapshotId) {
        self.run_queue();
        let (owner, saved) =
            self.snapshots[snapshot.0 as usize].as_ref().expect("the snapshot is kept");
        assert_eq!(*owner, sequence, "a snapshot belongs to one sequence");
        let sequence = self.sequences[sequence.0 as usize].as_mut().expect("the sequence is open");
        sequence.recurrent.copy_from(saved);
    }

    fn reset(&mut self, sequence: SequenceId) {
        self.run_queue();
        self.open(sequence).recurrent.clear();
    }

    fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        self.snapshots[snapshot.0 as usize] = None;
    }

    fn publish(&mut self, key: ExpertKey, slot: SlotIndex, matrices: &ExpertMatrices) {
        self.run_queue();
        let (layer, expert) = (key.layer.get(), key.expert.get());
        let layers = &mut self.residency.0;
        if layers.len() <= layer {
            layers.resize_with(layer + 1, Vec::new);
        }
        let experts = &mut layers[layer];
        if experts.len() <= expert {
            experts.resize(expert + 1, None);
        }
        experts[expert] = Some(Resident { slot, matrices: *matrices });
    }

    fn unpublish(&mut self, key: ExpertKey) {
        self.run_queue();
        let place = self
            .residency
            .0
            .get_mut(key.layer.get())
            .and_then(|layer| layer.get_mut(key.expert.get()));
        *place.expect("only what was published is unpublished") = None;
    }

    fn begin_pass(&mut self, rows: &[Row]) {
        self.run_queue();
        self.rows.clear();
        self.rows.extend_from_slice(rows);
        self.runs.clear();
        for (index, row) in rows.iter().enumerate() {
            let position = row.position as usize;
            match self.runs.last_mut() {
                Some(run) if run.sequence == row.sequence => {
                    assert!(run.role == row.role, "rows of a sequence share a role");
                    assert_eq!(
                        run.first_position + run.rows.len(),
                        position,
                        "rows of a sequence are consecutive"
                    );
                    run.rows.end = index + 1;
                }
                _ => self.runs.push(Run {
                    sequence: row.sequence,
                    rows: index..index + 1,
                    first_position: position,
                    role: row.role,
                }),
            }
        }
        for rope in &mut self.ropes {
            rope.begin_pass(rows);
        }
    }

    fn record(&mut self, op: Op) {
        self.queue.push(op);
    }

    fn moe(
        &mut self,
        layer: LayerIndex,
        x: BufferId,
        router: RouterHandle,
    ) -> Result<Moe, ComputeError> {
        self.run_queue();
        if let Some(BadLogit { row, expert, value }) = self.routers[router.0 as usize].bad {
            let position = self.rows[row].position;
            return Err(ComputeError::RouterNotFinite {
                layer,
                expert: expert as u32,
                position,
                value,
            });
        }
        let all = self
            .active_routes(router)
            .iter()
            .all(|routed| self.residency.get(layer, routed).is_some());
        self.queue.push(Op::Experts { layer, x, router });
        Ok(if all { Moe::AllResident } else { Moe::Missing })
    }

    fn routes(&self, router: RouterHandle) -> &[Routed] {
        self.active_routes(router)
    }

    fn moe_more(&mut self, layer: LayerIndex, x: BufferId, router: RouterHandle) {
        self.queue.push(Op::Experts { layer, x, router });
    }

    fn submit(&mut self) -> Epoch {
        self.run_queue();
        self.epoch.0 += 1;
        self.epoch
    }

    fn completed(&self) -> Epoch {
        self.epoch
    }

    fn wait(&mut self, epoch: Epoch) {
        assert!(epoch <= self.epoch, "only what was submitted can be waited for");
    }

    fn read_back(&mut self, buffer: BufferId, row: usize, out: &mut [f32]) {
        self.run_queue();
        let Buffer { width, data } = &self.buffers[buffer.0 as usize];
        out.copy_from_slice(&data[row * width..(row + 1) * width]);
    }

    fn allocated_bytes(&mut self) -> u64 {
        let weights: u64 = self.weights.iter().map(|w| w.region.len() as u64).sum();
        let buffers: u64 = self.buffers.iter().map(|b| 4 * b.data.len() as u64).sum();
        let routers: u64 = self
            .routers
            .iter()
            .map(|r| 4 * r.outputs.len() as u64 + 9 * r.routes.len() as u64)
            .sum();
        let sequences: u64 = self.sequences.iter().flatten().map(Sequence::bytes).sum();
        let snapshots: u64 = self.snapshots.iter().flatten().map(|(_, s)| s.bytes()).sum();
        weights + buffers + routers + sequences + snapshots + self.kernels.allocated_bytes()
    }
}
