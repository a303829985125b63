//! A backend that is late on purpose.
//!
//! Recorded work and residency changes are queued and run by another thread some time after `submit`, in order, in
//! random portions. Epochs complete later still. What the host could look at too early is poisoned:
//!
//! - choices and results that it asks for, until it has waited for them
//! - the bytes of a slot that was unpublished, before the host may know that nothing uses it any more
//!
//! A model that computes the right bits on this backend follows the rules that a GPU needs.
#![allow(unsafe_code, reason = "addresses of slots cross threads, and slots are overwritten")]

mod slots;
mod worker;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use quant::slot::ExpertMatrices;
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use crate::backend::{
    Backend, BufferId, ComputeError, MatrixShape, Moe, Op, RopeId, RopeSpec, Routed, RouterHandle,
    RouterShape, Row, SequenceId, SequenceShape, SlotClass, SnapshotId, WeightId,
};
use slots::{Progress, Slots};
use worker::{Message, Work};

/// What the host reads where a choice is not there yet.
const NOT_YET: Routed = Routed { expert: ExpertIndex(u32::MAX), weight: f32::NAN };

/// Another backend, late.
pub(crate) struct Deferred {
    /// Nothing after the backend is dropped.
    sender: Option<Sender<Message>>,
    worker: Option<JoinHandle<()>>,
    progress: Arc<Progress>,
    submitted: Epoch,
    /// Recorded and not yet handed over.
    recorded: Vec<Work>,
    routers: Vec<Router>,
    slots: Slots,
}

/// Choices of the last wait.
struct Router {
    top_k: usize,
    /// Whether it has chosen since, or will have when what is recorded has run.
    routed: bool,
    routes: Vec<Routed>,
    /// Choices that are there.
    known: usize,
    /// Which of them an expert operation has been recorded for.
    run: Vec<bool>,
}

/// An address that crosses threads.
struct Address(NonNull<u8>, usize);

// SAFETY: only the address is carried; whoever uses it has a proof of its own.
unsafe impl Send for Address {}

impl Deferred {
    pub(crate) fn new(inner: Box<dyn Backend>, seed: u64) -> Self {
        let (sender, receiver) = channel();
        let progress = Arc::new(Progress::default());
        let done = Arc::clone(&progress);
        let worker = std::thread::Builder::new()
            .name("deferred".to_owned())
            .spawn(move || worker::run(inner, &receiver, &done, seed))
            .expect("the system gives one more thread");
        Self {
            sender: Some(sender),
            worker: Some(worker),
            progress,
            submitted: Epoch(0),
            recorded: Vec::new(),
            routers: Vec::new(),
            slots: Slots::default(),
        }
    }

    fn later(&mut self, work: impl FnOnce(&mut dyn Backend) + Send + 'static) {
        self.recorded.push(Box::new(work));
    }

    /// Hands over what is recorded, then `message`. Nobody listens after a panic of the worker, which `drop` shows.
    fn send(&mut self, message: Message) {
        let sender = self.sender.as_ref().expect("the sender lives until the backend is dropped");
        for work in self.recorded.drain(..) {
            let _ = sender.send(Message::Run(work));
        }
        let _ = sender.send(message);
    }

    /// Runs `question` after everything that is recorded, and waits for its answer.
    fn ask<T: Send + 'static>(
        &mut self,
        question: impl FnOnce(&mut dyn Backend) -> T + Send + 'static,
    ) -> T {
        let (answer, answered) = channel();
        self.send(Message::Ask(Box::new(move |backend| {
            // The asker waits below, so the receiver is there.
            let _ = answer.send(question(backend));
        })));
        answered.recv().expect("the worker answers unless it panicked")
    }

    /// The same of bytes.
    fn ask_for(
        &mut self,
        len: usize,
        question: impl FnOnce(&mut dyn Backend, &mut [u8]) + Send + 'static,
    ) -> Vec<u8> {
        self.ask(move |backend| {
            let mut bytes = vec![0; len];
            question(backend, &mut bytes);
            bytes
        })
    }

    /// Experts that the operation recorded now will use are in use until the next epoch completes.
    fn mark_used(&mut self, layer: LayerIndex, router: RouterHandle) {
        let until = Epoch(self.submitted.0 + 1);
        let Router { routes, known, run, .. } = &mut self.routers[router.0 as usize];
        for (routed, run) in routes[..*known].iter().zip(run) {
            let key = ExpertKey { layer, expert: routed.expert };
            if !*run && self.slots.mark_used(key, until) {
                *run = true;
            }
        }
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        self.sender = None;
        let outcome = self.worker.take().map(JoinHandle::join);
        // What went wrong in work that nobody waited for.
        if let Some(Err(panic)) = outcome
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Backend for Deferred {
    fn name(&self) -> &'static str {
        "deferred"
    }

    fn alloc_weight(&mut self, shape: MatrixShape) -> Result<WeightId, ComputeError> {
        self.ask(move |backend| backend.alloc_weight(shape))
    }

    fn weight_memory(&mut self, weight: WeightId) -> (NonNull<u8>, usize) {
        let Address(base, len) = self.ask(move |backend| {
            let (base, len) = backend.weight_memory(weight);
            Address(base, len)
        });
        (base, len)
    }

    fn alloc_buffer(&mut self, max_rows: usize, width: usize) -> Result<BufferId, ComputeError> {
        self.ask(move |backend| backend.alloc_buffer(max_rows, width))
    }

    fn alloc_router(
        &mut self,
        max_rows: usize,
        shape: RouterShape,
    ) -> Result<RouterHandle, ComputeError> {
        let router = self.ask(move |backend| backend.alloc_router(max_rows, shape))?;
        let pairs = max_rows * shape.top_k;
        self.routers.push(Router {
            top_k: shape.top_k,
            routed: false,
            routes: vec![NOT_YET; pairs],
            known: 0,
            run: vec![false; pairs],
        });
        Ok(router)
    }

    fn alloc_rope(&mut self, spec: RopeSpec) -> RopeId {
        self.ask(move |backend| backend.alloc_rope(spec))
    }

    fn alloc_slots(&mut self, classes: &[SlotClass]) -> Result<(), ComputeError> {
        let classes = classes.to_vec();
        let n_slots: usize = classes.iter().map(|class| class.slots).sum();
        let addresses: Vec<Address> = self.ask(move |backend| {
            backend.alloc_slots(&classes)?;
            let address = |slot| {
                let (base, len) = backend.slot_memory(SlotIndex(slot as u32));
                Address(base, len)
            };
            Ok((0..n_slots).map(address).collect())
        })?;
        self.slots = Slots::new(addresses.into_iter().map(|Address(base, len)| (base, len)));
        Ok(())
    }

    fn slot_memory(&self, slot: SlotIndex) -> (NonNull<u8>, usize) {
        self.slots.memory(slot)
    }

    fn slot_copy(&mut self, key: ExpertKey) -> Vec<u8> {
        self.ask(move |backend| backend.slot_copy(key))
    }

    fn open_sequence(&mut self, shape: SequenceShape) -> Result<SequenceId, ComputeError> {
        self.ask(move |backend| backend.open_sequence(shape))
    }

    fn close_sequence(&mut self, sequence: SequenceId) {
        self.later(move |backend| backend.close_sequence(sequence));
    }

    fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, ComputeError> {
        self.ask(move |backend| backend.snapshot(sequence))
    }

    fn renew(&mut self, sequence: SequenceId, snapshot: SnapshotId) {
        self.later(move |backend| backend.renew(sequence, snapshot));
    }

    fn rollback(&mut self, sequence: SequenceId, snapshot: SnapshotId) {
        self.later(move |backend| backend.rollback(sequence, snapshot));
    }

    fn reset(&mut self, sequence: SequenceId) {
        self.later(move |backend| backend.reset(sequence));
    }

    fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        self.later(move |backend| backend.drop_snapshot(snapshot));
    }

    fn mark(&mut self, sequence: SequenceId, snapshot: SnapshotId, position: usize) {
        self.later(move |backend| backend.mark(sequence, snapshot, position));
    }

    fn export_rows(&mut self, sequence: SequenceId, positions: Range<usize>, out: &mut [u8]) {
        let bytes = self.ask_for(out.len(), move |backend, out| {
            backend.export_rows(sequence, positions, out);
        });
        out.copy_from_slice(&bytes);
    }

    fn import_rows(&mut self, sequence: SequenceId, positions: Range<usize>, bytes: &[u8]) {
        let bytes = bytes.to_vec();
        self.later(move |backend| backend.import_rows(sequence, positions, &bytes));
    }

    fn export_state(&mut self, snapshot: SnapshotId, out: &mut [u8]) {
        let bytes =
            self.ask_for(out.len(), move |backend, out| backend.export_state(snapshot, out));
        out.copy_from_slice(&bytes);
    }

    fn import_state(&mut self, sequence: SequenceId, bytes: &[u8]) {
        let bytes = bytes.to_vec();
        self.later(move |backend| backend.import_state(sequence, &bytes));
    }

    fn publish(&mut self, key: ExpertKey, slot: SlotIndex, matrices: &ExpertMatrices) {
        self.slots.publish(key, slot, &self.progress);
        let matrices = *matrices;
        self.later(move |backend| backend.publish(key, slot, &matrices));
    }

    fn unpublish(&mut self, key: ExpertKey) {
        self.slots.unpublish(key, &self.progress);
        self.later(move |backend| backend.unpublish(key));
    }

    fn begin_pass(&mut self, rows: &[Row]) {
        for router in &mut self.routers {
            router.forget();
        }
        let rows = rows.to_vec();
        self.later(move |backend| backend.begin_pass(&rows));
    }

    fn record(&mut self, op: Op) {
        if let Op::Route { router, .. } = &op {
            let router = &mut self.routers[router.0 as usize];
            router.forget();
            router.routed = true;
        }
        self.later(move |backend| backend.record(op));
    }

    fn upload(&mut self, buffer: BufferId, first_row: usize, values: &[f32]) {
        let values = values.to_vec();
        self.later(move |backend| backend.upload(buffer, first_row, &values));
    }

    fn moe(
        &mut self,
        layer: LayerIndex,
        x: BufferId,
        router: RouterHandle,
    ) -> Result<Moe, ComputeError> {
        let routed: Vec<RouterHandle> = (0..self.routers.len() as u32)
            .map(RouterHandle)
            .filter(|handle| self.routers[handle.0 as usize].routed)
            .collect();
        let (outcome, routes) = self.ask(move |backend| {
            let outcome = backend.moe(layer, x, router);
            let of = |handle: RouterHandle| (handle, backend.routes(handle).to_vec());
            let routes: Vec<_> =
                if outcome.is_ok() { routed.into_iter().map(of).collect() } else { Vec::new() };
            (outcome, routes)
        });
        for (handle, routes) in routes {
            let known = &mut self.routers[handle.0 as usize];
            known.routed = false;
            known.known = routes.len();
            known.routes[..routes.len()].copy_from_slice(&routes);
        }
        if outcome.is_ok() {
            self.mark_used(layer, router);
        }
        outcome
    }

    fn routes(&self, router: RouterHandle) -> &[Routed] {
        let Router { routes, known, top_k, .. } = &self.routers[router.0 as usize];
        // Somebody who has not waited gets poison, not nothing.
        &routes[..(*known).max(*top_k)]
    }

    fn moe_more(&mut self, layer: LayerIndex, x: BufferId, router: RouterHandle) {
        self.mark_used(layer, router);
        self.later(move |backend| backend.moe_more(layer, x, router));
    }

    fn submit(&mut self) -> Epoch {
        self.submitted.0 += 1;
        self.send(Message::Epoch(self.submitted));
        self.submitted
    }

    fn completed(&self) -> Epoch {
        self.progress.completed()
    }

    fn wait(&mut self, epoch: Epoch) {
        assert!(epoch <= self.submitted, "only what was submitted can be waited for");
        if self.completed() < epoch {
            // An answer comes after every epoch that was submitted before the question.
            self.ask(|_| ());
        }
    }

    fn read_back(&mut self, buffer: BufferId, row: usize, out: &mut [f32]) {
        out.fill(f32::NAN);
        let width = out.len();
        self.submit();
        let values = self.ask(move |backend| {
            let mut values = vec![f32::NAN; width];
            backend.read_back(buffer, row, &mut values);
            values
        });
        out.copy_from_slice(&values);
    }

    fn allocated_bytes(&mut self) -> u64 {
        self.ask(|backend| backend.allocated_bytes())
    }
}

impl Router {
    fn forget(&mut self) {
        self.routed = false;
        self.known = 0;
        self.routes.fill(NOT_YET);
        self.run.fill(false);
    }
}

#[cfg(test)]
mod tests;
