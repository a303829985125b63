//! What backends on the host share: memory, residency, and the order of operations.
//!
//! Recorded operations wait in a queue; `submit` runs it to its end on the caller's thread (and the kernels' own),
//! so an epoch is complete as soon as it is given out. Residency changes wait in the same queue: they never make the
//! caller wait, who has reads to put in flight while resident experts have yet to be computed.

mod execute;
mod index;
mod interleave;
pub(crate) mod memory;
mod residency;
mod rope;
mod sequence;
mod streams;

pub(crate) use memory::fill;

use std::ops::Range;
use std::ptr::NonNull;

use quant::BlockType;
use quant::slot::ExpertMatrices;
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use crate::backend::{
    Backend, BufferId, ComputeError, KvType, MatrixShape, Moe, Op, Role, RopeId, RopeSpec, Routed,
    RouterHandle, RouterShape, Row, SequenceId, SequenceShape, SlotClass, SnapshotId, WeightId,
};
use crate::kernels::{BadLogit, ExpertGroup, Kernels, Matrix, Pair};
use memory::{Floats, Region, SlotMemory};
use residency::{Residency, Resident};
use rope::Rope;
use sequence::{Recurrent, Sequence};

struct Weight {
    shape: MatrixShape,
    bytes: usize,
    region: Region,
    interleaved: bool,
}

impl Weight {
    fn matrix(&self) -> Matrix<'_> {
        let MatrixShape { n_out, n_in, block_type } = self.shape;
        let (bytes, interleaved) = (self.region.bytes(self.bytes), self.interleaved);
        Matrix { block_type, n_in, n_out, bytes, interleaved }
    }

    fn vector(&self) -> &[f32] {
        assert_eq!(self.shape.block_type, BlockType::F32, "vectors are kept as f32");
        self.region.f32s(self.shape.n_out * self.shape.n_in)
    }
}

struct Buffer {
    width: usize,
    data: Floats,
}

/// One routing decision: choices, which of them have been run, their outputs.
struct Router {
    shape: RouterShape,
    routes: Vec<Routed>,
    done: Vec<bool>,
    outputs: Floats,
    bad: Option<BadLogit>,
}

/// What the next submit runs, in order.
enum Queued {
    Op(Op),
    /// Staged values into rows of a buffer from the first on.
    Upload(BufferId, usize, Range<usize>),
    Publish(ExpertKey, Resident),
    Unpublish(ExpertKey),
}

/// Consecutive rows of one sequence.
#[derive(Clone)]
struct Run {
    sequence: SequenceId,
    rows: Range<usize>,
    first_position: usize,
    role: Role,
}

/// A state that the next pass is to leave in a snapshot.
struct Mark {
    sequence: SequenceId,
    snapshot: SnapshotId,
    position: usize,
}

/// A part of a run after whose rows a recurrent state may be wanted.
struct Stretch {
    run: Run,
    snapshot: Option<SnapshotId>,
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
    /// The same for what goes through rows one after the other, cut at marks.
    stretches: Vec<Stretch>,
    /// For the next pass.
    marks: Vec<Mark>,
    queue: Vec<Queued>,
    /// Values that uploads in the queue bring.
    staged: Vec<f32>,
    index: index::Scratch,
    /// Work space of the expert operation.
    pairs: Vec<Pair>,
    groups: Vec<ExpertGroup<'static>>,
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
            stretches: Vec::new(),
            marks: Vec::new(),
            queue: Vec::new(),
            staged: Vec::new(),
            index: index::Scratch::default(),
            pairs: Vec::new(),
            groups: Vec::new(),
            epoch: Epoch(0),
        }
    }

    fn run_queue(&mut self) {
        let mut queue = std::mem::take(&mut self.queue);
        for queued in queue.drain(..) {
            match queued {
                Queued::Op(op) => self.execute(&op),
                Queued::Upload(buffer, first_row, staged) => {
                    self.write_staged(buffer, first_row, staged);
                }
                Queued::Publish(key, resident) => self.residency.publish(key, resident),
                Queued::Unpublish(key) => self.residency.unpublish(key),
            }
        }
        // Nothing is recorded while the queue runs; its allocation is kept.
        self.queue = queue;
        self.staged.clear();
    }

    fn active_routes(&self, router: RouterHandle) -> &[Routed] {
        let router = &self.routers[router.0 as usize];
        &router.routes[..self.rows.len() * router.shape.top_k]
    }

    /// A sequence and a snapshot of it.
    fn saved(
        &mut self,
        sequence: SequenceId,
        snapshot: SnapshotId,
    ) -> (&mut Sequence, &mut Recurrent) {
        let saved = self.snapshots[snapshot.0 as usize].as_mut();
        let (owner, saved) = saved.expect("the snapshot is kept");
        assert_eq!(*owner, sequence, "a snapshot belongs to one sequence");
        let sequence = self.sequences[sequence.0 as usize].as_mut();
        (sequence.expect("the sequence is open"), saved)
    }

    fn open(&mut self, sequence: SequenceId) -> &mut Sequence {
        self.sequences[sequence.0 as usize].as_mut().expect("the sequence is open")
    }
}

/// Cuts the rows of a pass into runs, one per sequence.
///
/// # Panics
/// If the rows of a sequence are not consecutive, or do not share a role.
fn split_runs(rows: &[Row], runs: &mut Vec<Run>) {
    runs.clear();
    for (index, row) in rows.iter().enumerate() {
        let position = row.position as usize;
        match runs.last_mut() {
            Some(run) if run.sequence == row.sequence => {
                assert!(run.role == row.role, "rows of a sequence share a role");
                assert_eq!(
                    run.first_position + run.rows.len(),
                    position,
                    "rows of a sequence are consecutive"
                );
                run.rows.end = index + 1;
            }
            _ => {
                let seen = runs.iter().any(|run| run.sequence == row.sequence);
                assert!(!seen, "rows of a sequence stand together");
                runs.push(Run {
                    sequence: row.sequence,
                    rows: index..index + 1,
                    first_position: position,
                    role: row.role,
                });
            }
        }
    }
}

/// Cuts runs at marks.
///
/// # Panics
/// If a mark is not in or behind the prompt rows of its sequence.
fn split_stretches(runs: &[Run], marks: &mut Vec<Mark>, stretches: &mut Vec<Stretch>) {
    stretches.clear();
    // Of one sequence in order.
    marks.sort_unstable_by_key(|mark| mark.position);
    let mut found = 0;
    for run in runs {
        let mut rest = run.clone();
        for mark in marks.iter().filter(|mark| mark.sequence == run.sequence) {
            let rows = mark.position.checked_sub(rest.first_position);
            let rows = rows.filter(|rows| (1..=rest.rows.len()).contains(rows));
            let rows = rows.expect("a mark is among the rows of its sequence, one at a position");
            let cut = rest.rows.start + rows;
            let last = cut == run.rows.end || mark.position.is_multiple_of(64);
            assert!(last && run.role == Role::Prompt, "states are kept of prompts, on the grid");
            let run = Run { rows: rest.rows.start..cut, ..rest.clone() };
            stretches.push(Stretch { run, snapshot: Some(mark.snapshot) });
            rest = Run { rows: cut..rest.rows.end, first_position: mark.position, ..rest };
            found += 1;
        }
        if !rest.rows.is_empty() {
            stretches.push(Stretch { run: rest, snapshot: None });
        }
    }
    assert_eq!(found, marks.len(), "sequences with marks are in the pass");
    marks.clear();
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
        self.weights.push(Weight { shape, bytes, region, interleaved: false });
        Ok(WeightId(self.weights.len() as u32 - 1))
    }

    fn weight_memory(&mut self, weight: WeightId) -> (NonNull<u8>, usize) {
        let Weight { region, interleaved, .. } = &self.weights[weight.0 as usize];
        assert!(!interleaved, "weights are filled before their first product");
        (region.base(), region.len())
    }

    fn alloc_buffer(&mut self, max_rows: usize, width: usize) -> Result<BufferId, ComputeError> {
        let data = Floats::zeroed("activations", max_rows.saturating_mul(width))?;
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
            routes: vec![Routed { expert: ExpertIndex(0), weight: 0.0 }; pairs],
            done: vec![false; pairs],
            outputs: Floats::zeroed("expert outputs", pairs.saturating_mul(shape.hidden))?,
            bad: None,
        });
        Ok(RouterHandle(self.routers.len() as u32 - 1))
    }

    fn alloc_rope(&mut self, spec: RopeSpec) -> RopeId {
        let mut rope = Rope::new(&spec);
        // The current pass may use it.
        rope.begin_pass(&self.rows);
        self.ropes.push(rope);
        RopeId(self.ropes.len() as u32 - 1)
    }

    fn alloc_slots(&mut self, classes: &[SlotClass]) -> Result<(), ComputeError> {
        assert!(self.residency.is_untouched(), "slots are allocated before anything is published");
        self.slots = SlotMemory::new(classes.iter().map(|class| (class.slots, class.stride)))?;
        Ok(())
    }

    fn slot_memory(&self, slot: SlotIndex) -> (NonNull<u8>, usize) {
        self.slots.memory(slot.get())
    }

    fn slot_copy(&mut self, key: ExpertKey) -> Vec<u8> {
        self.run_queue();
        let resident = self.residency.get(key.layer, key.expert).expect("the expert is published");
        self.as_read(&resident)
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
        let copy = self.open(sequence).recurrent.copy()?;
        Ok(SnapshotId(insert(&mut self.snapshots, (sequence, copy))))
    }

    fn renew(&mut self, sequence: SequenceId, snapshot: SnapshotId) {
        self.run_queue();
        let (sequence, saved) = self.saved(sequence, snapshot);
        saved.copy_from(&sequence.recurrent);
    }

    fn rollback(&mut self, sequence: SequenceId, snapshot: SnapshotId) {
        self.run_queue();
        let (sequence, saved) = self.saved(sequence, snapshot);
        sequence.recurrent.copy_from(saved);
    }

    fn reset(&mut self, sequence: SequenceId) {
        self.run_queue();
        self.open(sequence).recurrent.clear();
    }

    fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        self.snapshots[snapshot.0 as usize] = None;
    }

    fn mark(&mut self, sequence: SequenceId, snapshot: SnapshotId, position: usize) {
        let saved = self.snapshots[snapshot.0 as usize].as_ref();
        let (owner, _) = saved.expect("the snapshot is kept");
        assert_eq!(*owner, sequence, "a snapshot belongs to one sequence");
        self.marks.push(Mark { sequence, snapshot, position });
    }

    fn export_rows(&mut self, sequence: SequenceId, positions: Range<usize>, out: &mut [u8]) {
        self.run_queue();
        self.open(sequence).export(&positions, out);
    }

    fn import_rows(&mut self, sequence: SequenceId, positions: Range<usize>, bytes: &[u8]) {
        self.run_queue();
        self.open(sequence).import(&positions, bytes);
    }

    fn export_state(&mut self, snapshot: SnapshotId, out: &mut [u8]) {
        self.run_queue();
        let saved = self.snapshots[snapshot.0 as usize].as_ref();
        saved.expect("the snapshot is kept").1.export(out);
    }

    fn import_state(&mut self, sequence: SequenceId, bytes: &[u8]) {
        self.run_queue();
        self.open(sequence).recurrent.import(bytes);
    }

    fn publish(&mut self, key: ExpertKey, slot: SlotIndex, matrices: &ExpertMatrices) {
        self.queue.push(Queued::Publish(key, Resident::new(slot, *matrices)));
    }

    fn unpublish(&mut self, key: ExpertKey) {
        self.queue.push(Queued::Unpublish(key));
    }

    fn begin_pass(&mut self, rows: &[Row]) {
        self.run_queue();
        self.rows.clear();
        self.rows.extend_from_slice(rows);
        split_runs(rows, &mut self.runs);
        split_stretches(&self.runs, &mut self.marks, &mut self.stretches);
        for rope in &mut self.ropes {
            rope.begin_pass(rows);
        }
    }

    fn record(&mut self, op: Op) {
        self.queue.push(Queued::Op(op));
    }

    fn upload(&mut self, buffer: BufferId, first_row: usize, values: &[f32]) {
        let start = self.staged.len();
        self.staged.extend_from_slice(values);
        self.queue.push(Queued::Upload(buffer, first_row, start..self.staged.len()));
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
            .all(|routed| self.residency.get(layer, routed.expert).is_some());
        self.queue.push(Queued::Op(Op::Experts { layer, x, router }));
        Ok(if all { Moe::AllResident } else { Moe::Missing })
    }

    fn routes(&self, router: RouterHandle) -> &[Routed] {
        self.active_routes(router)
    }

    fn moe_more(&mut self, layer: LayerIndex, x: BufferId, router: RouterHandle) {
        self.queue.push(Queued::Op(Op::Experts { layer, x, router }));
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
        let buffers: u64 = self.buffers.iter().map(|b| b.data.bytes()).sum();
        let routers: u64 =
            self.routers.iter().map(|r| r.outputs.bytes() + 9 * r.routes.len() as u64).sum();
        let sequences: u64 = self.sequences.iter().flatten().map(Sequence::bytes).sum();
        let snapshots: u64 = self.snapshots.iter().flatten().map(|(_, s)| s.bytes()).sum();
        let host = 4 * self.staged.capacity() as u64 + self.index.bytes();
        weights + buffers + routers + sequences + snapshots + host + self.kernels.allocated_bytes()
    }
}
