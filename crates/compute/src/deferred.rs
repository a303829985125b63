//! A backend that is late on purpose.
//!
//! Recorded work and residency changes are queued and run by another thread some time after `submit`, in order.
//! Epochs complete later still. Whatever the host could read too early is poisoned until it has waited. A model
//! that computes the right bits on this backend follows the rules that a GPU needs.
#![allow(unsafe_code, reason = "an address crosses threads; nothing is read through it here")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use quant::slot::ExpertMatrices;
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

use crate::backend::{
    Backend, BufferId, ComputeError, MatrixShape, Moe, Op, RopeId, RopeSpec, Routed, RouterHandle,
    RouterShape, Row, SequenceId, SequenceShape, SlotClass, SnapshotId, WeightId,
};

type Work = Box<dyn FnOnce(&mut dyn Backend) + Send>;

enum Message {
    Run(Work),
    /// The work before this belongs to the epoch.
    Epoch(Epoch),
}

pub(crate) struct Deferred {
    /// Nothing after the backend is dropped.
    sender: Option<Sender<Message>>,
    worker: Option<JoinHandle<()>>,
    completed: Arc<AtomicU64>,
    submitted: Epoch,
    /// Recorded and not yet submitted.
    recorded: Vec<Work>,
    /// Choices of the last waits, by router.
    routes: Vec<Vec<Routed>>,
    /// Where slots lie, known from the start.
    slots: Vec<SlotAddress>,
}

/// A slot's memory, which the host passes on to readers.
#[derive(Clone, Copy)]
struct SlotAddress(NonNull<u8>, usize);

// SAFETY: this type only carries the address; whoever uses it has its own proof.
unsafe impl Send for SlotAddress {}

impl Deferred {
    pub(crate) fn new(inner: Box<dyn Backend>, seed: u64) -> Self {
        let (sender, receiver) = channel();
        let completed = Arc::new(AtomicU64::new(0));
        let done = Arc::clone(&completed);
        let worker = std::thread::Builder::new()
            .name("deferred".to_owned())
            .spawn(move || work(inner, &receiver, &done, seed))
            .expect("the system gives one more thread");
        Self {
            sender: Some(sender),
            worker: Some(worker),
            completed,
            submitted: Epoch(0),
            recorded: Vec::new(),
            routes: Vec::new(),
            slots: Vec::new(),
        }
    }

    fn later(&mut self, work: impl FnOnce(&mut dyn Backend) + Send + 'static) {
        self.recorded.push(Box::new(work));
    }

    fn send(&self, message: Message) {
        let sender = self.sender.as_ref().expect("the worker runs until the backend is dropped");
        sender.send(message).expect("the worker runs until the backend is dropped");
    }

    /// Sends what is recorded, then runs `question` and waits for its answer.
    fn ask<T: Send + 'static>(
        &mut self,
        question: impl FnOnce(&mut dyn Backend) -> T + Send + 'static,
    ) -> T {
        for work in std::mem::take(&mut self.recorded) {
            self.send(Message::Run(work));
        }
        let (answer, answered) = channel();
        self.send(Message::Run(Box::new(move |backend| {
            // The asker waits below, so the receiver is there.
            let _ = answer.send(question(backend));
        })));
        answered.recv().expect("the worker answers every question")
    }
}

/// A short pause or none, by a linear congruential generator.
struct Dawdle(u64);

impl Dawdle {
    fn pause(&mut self) {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        match self.0 >> 61 {
            0 => std::thread::sleep(Duration::from_micros(self.0 >> 40 & 127)),
            1 | 2 => std::thread::yield_now(),
            _ => {}
        }
    }
}

fn work(
    mut inner: Box<dyn Backend>,
    receiver: &Receiver<Message>,
    completed: &AtomicU64,
    seed: u64,
) {
    let mut dawdle = Dawdle(seed);
    while let Ok(message) = receiver.recv() {
        dawdle.pause();
        match message {
            Message::Run(work) => work(&mut *inner),
            Message::Epoch(epoch) => {
                let done = inner.submit();
                inner.wait(done);
                dawdle.pause();
                completed.store(epoch.0, Ordering::Release);
            }
        }
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(worker) = self.worker.take() {
            // A panic of the worker has been seen by whoever asked it last.
            let _ = worker.join();
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
        let SlotAddress(base, len) = self.ask(move |backend| {
            let (base, len) = backend.weight_memory(weight);
            SlotAddress(base, len)
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
        let poison = Routed { expert: ExpertIndex(u32::MAX), weight: f32::NAN };
        self.routes.push(vec![poison; max_rows * shape.top_k]);
        Ok(router)
    }

    fn alloc_rope(&mut self, spec: RopeSpec) -> RopeId {
        self.ask(move |backend| backend.alloc_rope(spec))
    }

    fn alloc_slots(&mut self, classes: &[SlotClass]) -> Result<(), ComputeError> {
        let classes = classes.to_vec();
        let n_slots: usize = classes.iter().map(|class| class.slots).sum();
        self.slots = self.ask(move |backend| {
            backend.alloc_slots(&classes)?;
            let address = |slot| {
                let (base, len) = backend.slot_memory(SlotIndex(slot as u32));
                SlotAddress(base, len)
            };
            Ok((0..n_slots).map(address).collect())
        })?;
        Ok(())
    }

    fn slot_memory(&self, slot: SlotIndex) -> (NonNull<u8>, usize) {
        let SlotAddress(base, len) = self.slots[slot.get()];
        (base, len)
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

    fn rollback(&mut self, sequence: SequenceId, snapshot: SnapshotId) {
        self.later(move |backend| backend.rollback(sequence, snapshot));
    }

    fn reset(&mut self, sequence: SequenceId) {
        self.later(move |backend| backend.reset(sequence));
    }

    fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        // At once, so that its number can be given out again in order.
        self.ask(move |backend| backend.drop_snapshot(snapshot));
    }

    fn publish(&mut self, key: ExpertKey, slot: SlotIndex, matrices: &ExpertMatrices) {
        let matrices = *matrices;
        self.later(move |backend| backend.publish(key, slot, &matrices));
    }

    fn unpublish(&mut self, key: ExpertKey) {
        self.later(move |backend| backend.unpublish(key));
    }

    fn begin_pass(&mut self, rows: &[Row]) {
        let rows = rows.to_vec();
        self.later(move |backend| backend.begin_pass(&rows));
    }

    fn record(&mut self, op: Op) {
        if let Op::Route { router, .. } = &op {
            let poison = Routed { expert: ExpertIndex(u32::MAX), weight: f32::NAN };
            self.routes[router.0 as usize].fill(poison);
        }
        self.later(move |backend| backend.record(op));
    }

    fn moe(
        &mut self,
        layer: LayerIndex,
        x: BufferId,
        router: RouterHandle,
    ) -> Result<Moe, ComputeError> {
        let (outcome, routes) = self.ask(move |backend| {
            let outcome = backend.moe(layer, x, router);
            let routes = if outcome.is_ok() { backend.routes(router).to_vec() } else { Vec::new() };
            (outcome, routes)
        });
        self.routes[router.0 as usize][..routes.len()].copy_from_slice(&routes);
        outcome
    }

    fn routes(&self, router: RouterHandle) -> &[Routed] {
        let routes = &self.routes[router.0 as usize];
        let real =
            routes.iter().position(|routed| routed.expert.0 == u32::MAX).unwrap_or(routes.len());
        &routes[..real]
    }

    fn moe_more(&mut self, layer: LayerIndex, x: BufferId, router: RouterHandle) {
        self.later(move |backend| backend.moe_more(layer, x, router));
    }

    fn submit(&mut self) -> Epoch {
        for work in std::mem::take(&mut self.recorded) {
            self.send(Message::Run(work));
        }
        self.submitted.0 += 1;
        self.send(Message::Epoch(self.submitted));
        self.submitted
    }

    fn completed(&self) -> Epoch {
        Epoch(self.completed.load(Ordering::Acquire))
    }

    fn wait(&mut self, epoch: Epoch) {
        assert!(epoch <= self.submitted, "only what was submitted can be waited for");
        while self.completed() < epoch {
            std::thread::yield_now();
        }
    }

    fn read_back(&mut self, buffer: BufferId, row: usize, out: &mut [f32]) {
        out.fill(f32::NAN);
        let width = out.len();
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
