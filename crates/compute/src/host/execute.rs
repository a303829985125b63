//! Running one recorded operation.
#![allow(unsafe_code, reason = "published slots are viewed as slices while experts run")]

use std::ops::Range;

use units::LayerIndex;

use super::index::Selected;
use super::memory::{Floats, SlotMemory};
use super::residency::{Residency, Resident};
use super::sequence::Recurrent;
use super::{Buffer, HostBackend, Router, Run, Stretch};
use crate::backend::{
    BufferId, ConvState, DeltaParams, Gate, Heads, Op, RopeId, Routed, RouterHandle, SequenceId,
    SharedOutput, SnapshotId, WeightId,
};
use crate::kernels::{
    Attend, Combine, DeltaRule, ExpertGroup, Experts, GroupNorm, HeadNormRope, Kernels, Pair,
    ShortConv,
};

/// The inputs that a convolution remembers.
fn conv_state(recurrent: &mut Recurrent, state: ConvState) -> &mut [f32] {
    match state {
        ConvState::Recurrent(layer) => recurrent.conv(layer),
        ConvState::Extra(index) => recurrent.extra_conv(index),
    }
}

/// Where a state is to be left, if it is.
fn saved(
    snapshots: &mut [Option<(SequenceId, Recurrent)>],
    snapshot: Option<SnapshotId>,
) -> Option<&mut Recurrent> {
    let saved = snapshots[snapshot?.0 as usize].as_mut();
    Some(&mut saved.expect("a marked snapshot is kept").1)
}

/// Takes a buffer out, so that others can be read while it is written.
pub(super) fn take(buffers: &mut [Buffer], id: BufferId) -> Floats {
    std::mem::take(&mut buffers[id.0 as usize].data)
}

/// Marks the routed pairs of `n_rows` rows that can be run now and have not been, and lists them: pairs of an expert
/// stand together, in order.
fn claim(
    router: &mut Router,
    n_rows: usize,
    residency: &Residency,
    layer: LayerIndex,
    pairs: &mut Vec<Pair>,
) {
    let Router { shape, routes, done, .. } = router;
    pairs.clear();
    for output in 0..n_rows * shape.top_k {
        if !done[output] && residency.get(layer, routes[output].expert).is_some() {
            done[output] = true;
            pairs.push(Pair { row: output / shape.top_k, output });
        }
    }
    pairs.sort_unstable_by_key(|pair| (routes[pair.output].expert, pair.output));
}

/// One group for each expert of `pairs`, with the bytes of its slot.
fn group<'a>(
    pairs: &[Pair],
    routes: &[Routed],
    (slots, residency, layer): (&'a SlotMemory, &Residency, LayerIndex),
    groups: &mut Vec<ExpertGroup<'a>>,
) {
    let mut first_pair = 0;
    for pairs in pairs.chunk_by(|a, b| routes[a.output].expert == routes[b.output].expert) {
        let expert = routes[pairs[0].output].expert;
        let resident = residency.get(layer, expert).expect("only resident experts are claimed");
        // SAFETY: the expert is published: its read is complete, and nothing writes into its slot before it is
        // unpublished and every epoch that used it is complete, which is after this operation.
        let slot = unsafe { slots.published(resident.slot.get()) };
        let n_pairs = pairs.len();
        let Resident { matrices, interleaved, .. } = resident;
        groups.push(ExpertGroup { slot, matrices, interleaved, first_pair, n_pairs });
        first_pair += n_pairs;
    }
}

/// The allocation of a vector, for groups that borrow something else.
fn recycle<'b>(mut groups: Vec<ExpertGroup<'_>>) -> Vec<ExpertGroup<'b>> {
    groups.clear();
    // The standard library collects in place where the layouts agree, so this allocates nothing.
    groups.into_iter().map(|_| unreachable!("the vector is empty")).collect()
}

impl<K: Kernels> HostBackend<K> {
    pub(super) fn execute(&mut self, op: &Op) {
        match op {
            Op::Embed { table, out } => self.embed(*table, *out),
            Op::RmsNorm { x, weight, eps, out, rows } => {
                self.rms_norm(*x, *weight, *eps, *out, rows.clone());
            }
            Op::MatMul { weight, x, out, rows } => self.mat_mul(*weight, *x, *out, rows.clone()),
            Op::HeadNormRope { x, heads, weight, eps, rope } => {
                self.head_norm_rope(*x, *heads, (*weight, *eps), *rope);
            }
            Op::KvAppend { layer, k, v } => self.kv_append(*layer, *k, *v),
            Op::Attend { layer, q, heads, gated, out } => {
                self.attend(*layer, *q, *heads, *gated, *out);
            }
            Op::IndexAppend { layer, k, k_norm, eps, rope } => {
                self.index_append(*layer, *k, (*k_norm, *eps), *rope);
            }
            Op::AttendSelected { layer, q, heads, gated, selector, out } => {
                let (layer, q, heads, gated, out) = (*layer, *q, *heads, *gated, *out);
                self.attend_selected(&Selected { layer, q, heads, gated, out }, *selector);
            }
            Op::ShortConv { state, x, weight, out } => self.short_conv(*state, *x, *weight, *out),
            Op::DeltaRule { layer, conv, z, ba, params, gate, out } => {
                self.delta_rule(*layer, [*conv, *z, *ba], *params, *gate, *out);
            }
            Op::Route { logits, router, normalize } => self.route(*logits, *router, *normalize),
            Op::SiluMul { gate, up, out } => self.silu_mul(*gate, *up, *out),
            Op::Experts { layer, x, router } => self.experts(*layer, *x, *router),
            Op::Combine { router, shared, to, set } => self.combine(*router, *shared, *to, *set),
            Op::Add { x, to } => self.add(*x, *to),
            Op::Repeat { x, out } => self.repeat(*x, *out),
            Op::Copy { x, out, columns, rows } => self.copy(*x, *out, *columns, rows.clone()),
            Op::GroupNorm { x, weight, groups, eps, out, rows } => {
                let norm = GroupNorm { groups: *groups, eps: *eps };
                self.group_norm(*x, *weight, norm, *out, rows.clone());
            }
            Op::ScaledSilu { x, scale, rows } => self.scaled_silu(*x, *scale, rows.clone()),
            Op::StreamMix { mix, n, out, rows } => self.stream_mix(*mix, *n, *out, rows.clone()),
            Op::Inject { logits, y, to } => self.inject(*logits, *y, *to),
            Op::GatedValue { k, q, v, out } => self.gated_value([*k, *q, *v], *out),
        }
    }

    /// Values of the host, which wait in `staged`.
    pub(super) fn write_staged(
        &mut self,
        buffer: BufferId,
        first_row: usize,
        staged: Range<usize>,
    ) {
        let Buffer { width, data } = &mut self.buffers[buffer.0 as usize];
        assert!(staged.len().is_multiple_of(*width), "whole rows of the buffer");
        let start = first_row * *width;
        data[start..start + staged.len()].copy_from_slice(&self.staged[staged]);
    }

    pub(super) fn read(&self, buffer: BufferId, rows: Range<usize>) -> &[f32] {
        let Buffer { width, data } = &self.buffers[buffer.0 as usize];
        &data[rows.start * width..rows.end * width]
    }

    /// Runs `write` on `n_rows` rows of a buffer that is taken out meanwhile.
    pub(super) fn write(
        &mut self,
        buffer: BufferId,
        n_rows: usize,
        write: impl FnOnce(&mut Self, &mut [f32], usize),
    ) {
        let mut data = take(&mut self.buffers, buffer);
        let width = self.buffers[buffer.0 as usize].width;
        write(self, &mut data[..n_rows * width], width);
        self.buffers[buffer.0 as usize].data = data;
    }

    fn embed(&mut self, table: WeightId, out: BufferId) {
        self.write(out, self.rows.len(), |this, out, width| {
            let matrix = this.weights[table.0 as usize].matrix();
            for (row, out) in this.rows.iter().zip(out.chunks_exact_mut(width)) {
                let token = row.token as usize;
                assert!(token < matrix.n_out, "token {token} of {}", matrix.n_out);
                matrix.decode_row(token, out);
            }
        });
    }

    fn rms_norm(
        &mut self,
        x: BufferId,
        weight: WeightId,
        eps: f32,
        out: BufferId,
        rows: Range<usize>,
    ) {
        self.write(out, rows.len(), |this, out, width| {
            let Buffer { data, .. } = &this.buffers[x.0 as usize];
            let x = &data[rows.start * width..rows.end * width];
            this.kernels.rms_norm(x, this.weights[weight.0 as usize].vector(), eps, out);
        });
    }

    fn head_norm_rope(
        &mut self,
        x: BufferId,
        heads: Heads,
        (weight, eps): (WeightId, f32),
        rope: RopeId,
    ) {
        self.write(x, self.rows.len(), |this, x, width| {
            let rope = &this.ropes[rope.0 as usize];
            this.kernels.head_norm_rope(HeadNormRope {
                x,
                width,
                heads,
                weight: this.weights[weight.0 as usize].vector(),
                eps,
                angles: rope.angles(),
                rotary_dim: rope.rotary_dim(),
            });
        });
    }

    fn add(&mut self, x: BufferId, to: BufferId) {
        let n_rows = self.rows.len();
        self.write(to, n_rows, |this, to, _| {
            for (to, x) in to.iter_mut().zip(this.read(x, 0..n_rows)) {
                *to += x;
            }
        });
    }

    fn mat_mul(&mut self, weight: WeightId, x: BufferId, out: BufferId, rows: Range<usize>) {
        self.interleave_weight(weight);
        self.write(out, rows.len(), |this, out, _| {
            let Buffer { width, data } = &this.buffers[x.0 as usize];
            let x = &data[rows.start * width..rows.end * width];
            this.kernels.mat_mul(this.weights[weight.0 as usize].matrix(), x, out);
        });
    }

    fn kv_append(&mut self, layer: usize, k: BufferId, v: BufferId) {
        for Run { sequence, rows, first_position, .. } in &self.runs {
            let part = |buffer: BufferId| {
                let Buffer { width, data } = &self.buffers[buffer.0 as usize];
                &data[rows.start * width..rows.end * width]
            };
            let sequence =
                self.sequences[sequence.0 as usize].as_mut().expect("the sequence is open");
            sequence.append(layer, *first_position, part(k), part(v));
        }
    }

    fn attend(&mut self, layer: usize, q: BufferId, heads: Heads, gated: bool, out: BufferId) {
        self.write(out, self.rows.len(), |this, out, out_width| {
            let Buffer { width, data } = &this.buffers[q.0 as usize];
            for Run { sequence, rows, first_position, .. } in &this.runs {
                let sequence =
                    this.sequences[sequence.0 as usize].as_ref().expect("the sequence is open");
                this.kernels.attend(Attend {
                    q: &data[rows.start * width..rows.end * width],
                    q_width: *width,
                    heads,
                    gated,
                    kv_heads: sequence.shape.kv_heads,
                    keys: sequence.keys(layer),
                    values: sequence.values(layer),
                    first_position: *first_position,
                    out: &mut out[rows.start * out_width..rows.end * out_width],
                });
            }
        });
    }

    fn short_conv(&mut self, which: ConvState, x: BufferId, weight: WeightId, out: BufferId) {
        self.write(out, self.rows.len(), |this, out, channels| {
            let x = &this.buffers[x.0 as usize].data;
            let weight = this.weights[weight.0 as usize].vector();
            for Stretch { run: Run { sequence, rows, .. }, snapshot } in &this.stretches {
                let sequence =
                    this.sequences[sequence.0 as usize].as_mut().expect("the sequence is open");
                let range = rows.start * channels..rows.end * channels;
                let dilation = match which {
                    ConvState::Recurrent(_) => 1,
                    ConvState::Extra(_) => {
                        sequence.shape.extra_conv.expect("the model has such").dilation
                    }
                };
                let state = conv_state(&mut sequence.recurrent, which);
                this.kernels.short_conv(ShortConv {
                    x: &x[range.clone()],
                    channels,
                    weight,
                    taps: weight.len() / channels,
                    dilation,
                    state,
                    out: &mut out[range],
                });
                if let Some(saved) = saved(&mut this.snapshots, *snapshot) {
                    let state = conv_state(&mut sequence.recurrent, which);
                    conv_state(saved, which).copy_from_slice(state);
                }
            }
        });
    }

    fn delta_rule(
        &mut self,
        layer: usize,
        inputs: [BufferId; 3],
        params: DeltaParams,
        gate: Gate,
        out: BufferId,
    ) {
        self.write(out, self.rows.len(), |this, out, out_width| {
            let vector = |weight: WeightId| this.weights[weight.0 as usize].vector();
            for Stretch { run, snapshot } in &this.stretches {
                let Run { sequence, rows, first_position, role } = run;
                let [conv, z, ba] = inputs.map(|id| {
                    let Buffer { width, data } = &this.buffers[id.0 as usize];
                    &data[rows.start * width..rows.end * width]
                });
                let sequence =
                    this.sequences[sequence.0 as usize].as_mut().expect("the sequence is open");
                this.kernels.delta_rule(DeltaRule {
                    shape: sequence.shape.recurrent.expect("the model has a recurrent state"),
                    role: *role,
                    first_position: *first_position,
                    conv,
                    z,
                    ba,
                    a: vector(params.a),
                    dt_bias: vector(params.dt_bias),
                    norm: vector(params.norm),
                    eps: params.eps,
                    gate,
                    state: sequence.recurrent.state(layer),
                    out: &mut out[rows.start * out_width..rows.end * out_width],
                });
                if let Some(saved) = saved(&mut this.snapshots, *snapshot) {
                    saved.state(layer).copy_from_slice(sequence.recurrent.state(layer));
                }
            }
        });
    }

    fn route(&mut self, logits: BufferId, router: RouterHandle, normalize: bool) {
        let n_rows = self.rows.len();
        let router = &mut self.routers[router.0 as usize];
        let pairs = n_rows * router.shape.top_k;
        let Buffer { width, data } = &self.buffers[logits.0 as usize];
        let logits = &data[..n_rows * width];
        let outcome = self.kernels.route(logits, *width, normalize, &mut router.routes[..pairs]);
        router.bad = outcome.err();
        router.done[..pairs].fill(false);
    }

    fn silu_mul(&mut self, gate: BufferId, up: BufferId, out: BufferId) {
        let n_rows = self.rows.len();
        if gate == out {
            // In place: the gate moves through the kernel's own output.
            self.write(out, n_rows, |this, out, width| {
                let up = &this.buffers[up.0 as usize].data[..n_rows * width];
                this.kernels.silu_mul_in_place(out, up);
            });
            return;
        }
        self.write(out, n_rows, |this, out, width| {
            let [gate, up] =
                [gate, up].map(|id| &this.buffers[id.0 as usize].data[..n_rows * width]);
            out.copy_from_slice(gate);
            this.kernels.silu_mul_in_place(out, up);
        });
    }

    /// Runs every routed pair whose expert is resident and that was not run yet, expert by expert.
    fn experts(&mut self, layer: LayerIndex, x: BufferId, router: RouterHandle) {
        let n_rows = self.rows.len();
        claim(
            &mut self.routers[router.0 as usize],
            n_rows,
            &self.residency,
            layer,
            &mut self.pairs,
        );
        if self.pairs.is_empty() {
            return;
        }
        self.interleave_experts(layer, router);
        let router = &mut self.routers[router.0 as usize];
        let mut groups = recycle(std::mem::take(&mut self.groups));
        group(&self.pairs, &router.routes, (&self.slots, &self.residency, layer), &mut groups);
        let Buffer { width: hidden, data } = &self.buffers[x.0 as usize];
        self.kernels.experts(Experts {
            x: &data[..n_rows * hidden],
            hidden: *hidden,
            width: router.shape.expert_width,
            groups: &groups,
            pairs: &self.pairs,
            outputs: &mut router.outputs,
        });
        self.groups = recycle(groups);
    }

    fn combine(
        &mut self,
        router: RouterHandle,
        shared: Option<SharedOutput>,
        to: BufferId,
        set: bool,
    ) {
        let n_rows = self.rows.len();
        self.write(to, n_rows, |this, to, hidden| {
            let router = &this.routers[router.0 as usize];
            let pairs = n_rows * router.shape.top_k;
            assert!(
                router.done[..pairs].iter().all(|done| *done),
                "every routed expert has been run"
            );
            let shared = shared.map(|SharedOutput { y, gate_logit }| {
                let y = &this.buffers[y.0 as usize].data[..n_rows * hidden];
                (y, &this.buffers[gate_logit.0 as usize].data[..n_rows])
            });
            this.kernels.combine(Combine {
                routes: &router.routes[..pairs],
                top_k: router.shape.top_k,
                outputs: &router.outputs[..pairs * hidden],
                shared,
                hidden,
                set,
                to,
            });
        });
    }
}
