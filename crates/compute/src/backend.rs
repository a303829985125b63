//! The operations that a model is made of, and who owns the memory they work on.
//!
//! Five rules keep this honest for devices that run ahead of the host:
//!
//! 1. Operations are *recorded*; nothing waits except [`Backend::moe`], [`Backend::read_back`] and
//!    [`Backend::wait`]. There is at most one wait per layer: the router's choices.
//! 2. The expert operation takes a router handle and looks experts up in the backend's own residency table; the
//!    host never passes slots.
//! 3. Every operation works on the ragged rows of the pass; a row's bits depend on its own inputs, position and
//!    role only.
//! 4. The backend owns all memory that it computes on: weights, slots, KV cache, recurrent state, snapshots.
//! 5. There are always three implementations, one of them deliberately late ([`crate::deferred()`]).

use std::ops::Range;
use std::ptr::NonNull;

use quant::BlockType;
use quant::slot::ExpertMatrices;
use units::{Epoch, ExpertIndex, ExpertKey, LayerIndex, SlotIndex};

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub u32);
    };
}
handle! {
    /// A resident matrix or vector.
    WeightId
}
handle! {
    /// An activation buffer, `[max_rows, width]` f32.
    BufferId
}
handle! {
    /// Where one routing decision of a pass lives: choices, mixing weights, expert outputs.
    RouterHandle
}
handle! {
    /// One sequence: its KV cache and recurrent state.
    SequenceId
}
handle! {
    /// A copy of a sequence's recurrent state.
    SnapshotId
}
handle! {
    /// Rotary tables of one model, see [`Backend::alloc_rope`].
    RopeId
}

/// Which kernel forms a row takes; see the numerics contract in `ARCHITECTURE.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Given text: attention and delta rule on the absolute 64-token grid.
    Prompt,
    /// Sampled, forced or drafted: one-step forms.
    Generated,
}

/// One token of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The sequence that it extends.
    pub sequence: SequenceId,
    /// Its position in that sequence, from 0. Rows of one sequence in one pass are consecutive and ascending.
    pub position: u32,
    /// Prompt or generated. Rows of one sequence in one pass share a role.
    pub role: Role,
    /// The token id.
    pub token: u32,
}

/// A router's choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routed {
    /// The expert.
    pub expert: ExpertIndex,
    /// Its mixing weight.
    pub weight: f32,
}

/// Shape of a resident weight. A vector is one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixShape {
    /// Rows.
    pub n_out: usize,
    /// Values in a row.
    pub n_in: usize,
    /// Their storage.
    pub block_type: BlockType,
}

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// Half precision (round to nearest even on store).
    #[default]
    F16,
    /// Single precision, for parity with references.
    F32,
}

/// How activations meet quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// 8 bit per block, integer products.
    #[default]
    Q8,
    /// Float, for parity with references.
    F32,
}

/// Which key head a value head of the delta rule reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadOrder {
    /// `value head / (value heads / key heads)`.
    Grouped,
    /// `value head % key heads`.
    Tiled,
}

/// Recurrent state of the gated delta rule, per layer and sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecurrentShape {
    /// Layers that have such a state.
    pub layers: usize,
    /// Key (and query) heads, `nk`.
    pub key_heads: usize,
    /// Value heads, `nv`; a multiple of `key_heads`.
    pub value_heads: usize,
    /// `dk`.
    pub key_dim: usize,
    /// `dv`.
    pub value_dim: usize,
    /// Taps of the short convolution.
    pub conv_kernel: usize,
    /// Which key head belongs to which value head.
    pub order: HeadOrder,
}

impl RecurrentShape {
    /// Channels of the short convolution: queries, keys, values, `2·nk·dk + nv·dv`.
    pub const fn conv_channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// Short convolutions that stand outside of the gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvShape {
    /// How many there are, each with a state of its own.
    pub count: usize,
    /// Channels of one.
    pub channels: usize,
    /// Inputs that an output sees.
    pub taps: usize,
    /// Rows from one of them to the next.
    pub dilation: usize,
}

impl ConvShape {
    /// Values that one of them remembers: `(taps - 1)·dilation` rows.
    pub const fn state_len(&self) -> usize {
        self.taps.saturating_sub(1) * self.dilation * self.channels
    }
}

/// Keys by which rows choose what they attend to, see [`Op::IndexAppend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexShape {
    /// Layers that have them, counted on their own.
    pub layers: usize,
    /// Values of a key.
    pub dim: usize,
    /// Positions of a block, which share a key.
    pub ratio: usize,
}

impl IndexShape {
    /// Blocks that end among these positions.
    pub const fn blocks(&self, positions: &Range<usize>) -> Range<usize> {
        positions.start / self.ratio..positions.end / self.ratio
    }

    /// Values of all layers: a key for each position, and one for each complete block.
    pub const fn values(&self, context_tokens: usize) -> usize {
        self.layers * self.dim * (context_tokens + context_tokens / self.ratio)
    }
}

/// What a sequence needs to remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceShape {
    /// Positions that the KV cache holds.
    pub context_tokens: usize,
    /// Layers with attention.
    pub kv_layers: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Values per head.
    pub head_dim: usize,
    /// Recurrent layers, if the model has any.
    pub recurrent: Option<RecurrentShape>,
    /// Convolutions apart from those layers.
    pub extra_conv: Option<ConvShape>,
    /// Keys of the index, where attention is selected. Their type is that of the KV cache.
    pub index: Option<IndexShape>,
}

/// What a sequence takes to be kept outside of its backend.
impl SequenceShape {
    /// Bytes of what the caches hold of consecutive positions, keys of index blocks that end among them included; see
    /// [`Backend::export_rows`].
    pub fn rows_bytes(&self, kv: KvType, positions: &Range<usize>) -> usize {
        let width = match kv {
            KvType::F16 => 2,
            KvType::F32 => 4,
        };
        let rows = 2 * self.kv_layers * self.kv_heads * self.head_dim * positions.len();
        let index = self.index.map_or(0, |index| {
            let keys = positions.len() + index.blocks(positions).len();
            index.layers * index.dim * keys
        });
        width * (rows + index)
    }

    /// Bytes of a recurrent state; see [`Backend::export_state`].
    pub fn state_bytes(&self) -> usize {
        let recurrent = self.recurrent.map_or(0, |shape| {
            let state = shape.value_heads * shape.key_dim * shape.value_dim;
            shape.layers * (state + (shape.conv_kernel - 1) * shape.conv_channels())
        });
        let extra = self.extra_conv.map_or(0, |shape| shape.count * shape.state_len());
        4 * (recurrent + extra)
    }
}

/// Rotary embedding: halves as in GPT-NeoX over the first `rotary_dim` values of a head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// Values of a head that rotate.
    pub rotary_dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Context extension.
    pub yarn: Option<Yarn>,
}

/// YaRN context extension (Peng et al. 2023, arXiv:2309.00071).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Extended over original context.
    pub factor: f64,
    /// Context of the original training.
    pub original_context: f64,
    /// Rotations above which a frequency is left alone.
    pub beta_fast: f64,
    /// Rotations below which a frequency is interpolated.
    pub beta_slow: f64,
    /// Multiplier of cos and sin; `0.1 ln(factor) + 1` when absent.
    pub attention_factor: Option<f64>,
}

/// Heads laid out in a row of a buffer: head `h` is `stride·h .. stride·h + dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// How many.
    pub count: usize,
    /// Values of one head.
    pub dim: usize,
    /// Distance between heads; larger than `dim` when a gate sits between them.
    pub stride: usize,
}

/// A short convolution, by the state that it continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvState {
    /// That of a recurrent layer, before its delta rule; not dilated.
    Recurrent(usize),
    /// One of [`SequenceShape::extra_conv`].
    Extra(usize),
}

/// What the output of the delta rule is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `z · sigmoid(z)`.
    Silu,
    /// `sigmoid(z)`.
    Sigmoid,
}

/// How rows choose the blocks that they attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selector {
    /// Index layer, see [`Op::IndexAppend`].
    pub layer: usize,
    /// Index queries, normed and rotated.
    pub q: BufferId,
    /// How they lie in a row; `dim` is that of the index.
    pub heads: Heads,
    /// Blocks that a row chooses at most, at least 1.
    pub blocks: usize,
}

/// Values of rows that are copied into other rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// The first of them where they come from.
    pub from: usize,
    /// Where it goes.
    pub to: usize,
    /// How many.
    pub width: usize,
}

/// One recorded operation.
///
/// Buffers are `[rows of the pass, width]`; all rows of the pass unless `rows` says less.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "the text of a variant says what its fields are")]
pub enum Op {
    /// `out[r] = table[token of r]`.
    Embed { table: WeightId, out: BufferId },
    /// `out[i] = x[rows.start + i] / sqrt(mean(x²) + eps) · weight`: reads `rows` of `x`, writes `out` from row 0.
    RmsNorm { x: BufferId, weight: WeightId, eps: f32, out: BufferId, rows: Range<usize> },
    /// `out[i] = weight · x[rows.start + i]`: reads `rows` of `x`, writes `out` from row 0 (a head on the last row
    /// needs one row of logits only).
    MatMul { weight: WeightId, x: BufferId, out: BufferId, rows: Range<usize> },
    /// RMS norm of each head by a shared weight, then rotation by the row's position; in place.
    HeadNormRope { x: BufferId, heads: Heads, weight: WeightId, eps: f32, rope: RopeId },
    /// Writes the rows' keys and values at their positions of KV layer `layer`.
    KvAppend { layer: usize, k: BufferId, v: BufferId },
    /// Causal grouped attention over KV layer `layer`: `softmax(q·k / sqrt(dim)) v`, online over key blocks of 64
    /// on the absolute grid. `gated`: multiply head `h` by the sigmoid of the `dim` values that follow its query.
    /// `out` is `[rows, count·dim]`.
    Attend { layer: usize, q: BufferId, heads: Heads, gated: bool, out: BufferId },
    /// Writes the rows' raw index keys `[rows, dim]` at their positions of index layer `layer`. Every block of
    /// `ratio` positions that they complete gets its key: the mean of its raw keys, RMS norm by `k_norm`, rotation by
    /// the position of its first token.
    IndexAppend { layer: usize, k: BufferId, k_norm: WeightId, eps: f32, rope: RopeId },
    /// As [`Op::Attend`], but a row at position `p` sees only the tokens of the `blocks` best of its
    /// `n = (p + 1) / ratio` complete blocks, and those after them, `ratio·n ..= p`. With `(p + 1) % ratio == 0` there
    /// are none after them, and its own token is seen only if its block is chosen.
    ///
    /// Block `b` scores `Σ_h max(0, q_h · key_b)`, in order of heads; a tie goes to the lower block. (A positive factor
    /// such as `1 / sqrt(dim)` would change no order.)
    ///
    /// The softmax goes over what is seen in ascending order, in the same blocks of 64 of the absolute grid as
    /// [`Op::Attend`], and passes over what is not. So a row's bits depend on its query and on what it sees, not on
    /// how rows were cut into passes nor on their role, and where everything is seen they are those of [`Op::Attend`].
    AttendSelected {
        layer: usize,
        q: BufferId,
        heads: Heads,
        gated: bool,
        selector: Selector,
        out: BufferId,
    },
    /// Causal depthwise convolution with state, then SiLU. `weight` is `[channels, taps]`, last tap = current row.
    ShortConv { state: ConvState, x: BufferId, weight: WeightId, out: BufferId },
    /// Gated delta rule over the convolved `[q | k | v]`; then RMS norm per value head by `norm`, times `gate(z)`.
    /// `ba` holds `[b(all value heads) | a(all value heads)]`. Prompt rows take the chunked form on the 64-token
    /// grid, generated rows the step form. Source: Yang et al. 2024 (arXiv:2412.06464).
    DeltaRule {
        layer: usize,
        conv: BufferId,
        z: BufferId,
        ba: BufferId,
        params: DeltaParams,
        gate: Gate,
        out: BufferId,
    },
    /// Softmax over `[n_experts]`, keep the `top_k` largest (ties to the lower index), rescale to sum 1 if
    /// `normalize`. Source: Shazeer et al. 2017 (arXiv:1701.06538).
    Route { logits: BufferId, router: RouterHandle, normalize: bool },
    /// `out = silu(gate) · up`.
    SiluMul { gate: BufferId, up: BufferId, out: BufferId },
    /// Runs every routed `(row, rank)` of `router` whose expert is resident and which has not been run yet.
    /// Recorded by [`Backend::moe`] and [`Backend::moe_more`], never directly.
    Experts { layer: LayerIndex, x: BufferId, router: RouterHandle },
    /// `to[r] += Σ_rank weight · expert output`, in rank order, then the shared expert times the sigmoid of its
    /// gate logit (`[rows, 1]`). Every `(row, rank)` must have been run. `set`: `to[r] = ` instead.
    Combine { router: RouterHandle, shared: Option<SharedOutput>, to: BufferId, set: bool },
    /// `to[r] += x[r]`.
    Add { x: BufferId, to: BufferId },
    /// `out[r] = [x[r], x[r], …]`: as many times as `out` is wider.
    Repeat { x: BufferId, out: BufferId },
    /// `out[i][to..to + width] = x[rows.start + i][from..from + width]`: reads `rows` of `x`, writes rows of `out` from
    /// row 0 and leaves their other values.
    Copy { x: BufferId, out: BufferId, columns: Columns, rows: Range<usize> },
    /// RMS norm of each of `groups` equal parts of a row, then times `weight`, `[width]`: reads `rows` of `x`, writes
    /// `out` from row 0.
    GroupNorm {
        x: BufferId,
        weight: WeightId,
        groups: usize,
        eps: f32,
        out: BufferId,
        rows: Range<usize>,
    },
    /// `x[r] = silu(scale · x[r])` for `rows`.
    ScaledSilu { x: BufferId, scale: f32, rows: Range<usize> },
    /// `out[r] = (Σ_s sigmoid(mix_s) · n_s) / streams` for `rows`, in order of streams. `mix` and `n` are
    /// `[rows, streams·hidden]`, `out` is `[rows, hidden]`.
    ///
    /// Source: hyper-connections, Zhu et al. 2024 (arXiv:2409.19606), as in Qwen3.8-Flash-Next; also of
    /// [`Op::Inject`].
    StreamMix { mix: BufferId, n: BufferId, out: BufferId, rows: Range<usize> },
    /// `to_s += 2·sigmoid(logits_s / streams) · y` for every stream: `logits` is `[rows, streams]`, `y` is
    /// `[rows, hidden]`, `to` is `[rows, streams·hidden]`.
    Inject { logits: BufferId, y: BufferId, to: BufferId },
    /// `out_s = sigmoid(sign(g)·sqrt(max(|g|, 1e-6))) · v` with `g = (k_s · q_s) / sqrt(hidden)`; the sign of 0 is 0.
    /// `k`, `q` and `out` are `[rows, streams·hidden]`, `v` is `[rows, hidden]`.
    GatedValue { k: BufferId, q: BufferId, v: BufferId, out: BufferId },
}

/// Per-layer constants of the gated delta rule, all f32 vectors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaParams {
    /// `-exp(A_log)`, `[nv]`.
    pub a: WeightId,
    /// `[nv]`.
    pub dt_bias: WeightId,
    /// `[dv]`.
    pub norm: WeightId,
    /// Of the output norm.
    pub eps: f32,
}

/// The always-on expert's output and its gate logit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedOutput {
    /// `[rows, hidden]`.
    pub y: BufferId,
    /// `[rows, 1]`.
    pub gate_logit: BufferId,
}

/// What [`Backend::moe`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moe {
    /// Everything that the router chose is resident and recorded.
    AllResident,
    /// Something is not; [`Backend::routes`] tells all choices, the residency is the host's to know.
    Missing,
}

/// One class of slots: all of one stride.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotClass {
    /// How many.
    pub slots: usize,
    /// Bytes of one, a multiple of 4096.
    pub stride: usize,
}

/// Shape of a routing decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterShape {
    /// Experts to choose from.
    pub n_experts: usize,
    /// Experts chosen per row.
    pub top_k: usize,
    /// Width of an expert's output.
    pub hidden: usize,
    /// Width of an expert's inside.
    pub expert_width: usize,
}

/// Why computing stopped.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum ComputeError {
    /// A router's logits hold NaN or infinity: a damaged checkpoint or a kernel bug.
    #[error(
        "the router of layer {layer} gave {value} for expert {expert} at position {position}; a damaged weight is the usual cause"
    )]
    RouterNotFinite { layer: LayerIndex, expert: u32, position: u32, value: f32 },
    /// Memory could not be had.
    #[error("{bytes} bytes for {what} could not be allocated")]
    OutOfMemory { what: &'static str, bytes: usize },
}

/// Memory and arithmetic of one device.
pub trait Backend: Send {
    /// `reference`, `cpu`, `deferred`.
    fn name(&self) -> &'static str;

    // Memory.

    /// Memory for a weight, zeroed; fill it through [`Self::weight_memory`] before the first pass.
    ///
    /// # Errors
    /// [`ComputeError::OutOfMemory`].
    fn alloc_weight(&mut self, shape: MatrixShape) -> Result<WeightId, ComputeError>;
    /// Where the bytes of a weight go, before its first product. Page-aligned, at least the weight's bytes rounded up to 4096.
    fn weight_memory(&mut self, weight: WeightId) -> (NonNull<u8>, usize);
    /// An activation buffer for passes of up to `max_rows` rows.
    ///
    /// # Errors
    /// [`ComputeError::OutOfMemory`].
    fn alloc_buffer(&mut self, max_rows: usize, width: usize) -> Result<BufferId, ComputeError>;
    /// Room for the choices and the expert outputs of `max_rows` rows.
    ///
    /// # Errors
    /// [`ComputeError::OutOfMemory`].
    fn alloc_router(
        &mut self,
        max_rows: usize,
        shape: RouterShape,
    ) -> Result<RouterHandle, ComputeError>;
    /// Rotary tables.
    fn alloc_rope(&mut self, spec: RopeSpec) -> RopeId;
    /// Memory for the slots of the pool, class after class, committed lazily. Once per backend.
    ///
    /// # Errors
    /// [`ComputeError::OutOfMemory`].
    fn alloc_slots(&mut self, classes: &[SlotClass]) -> Result<(), ComputeError>;
    /// Where the bytes of a slot go.
    fn slot_memory(&self, slot: SlotIndex) -> (NonNull<u8>, usize);
    /// A copy of a published expert's slot, as it was read.
    ///
    /// # Panics
    /// If the expert is not published.
    fn slot_copy(&mut self, key: ExpertKey) -> Vec<u8>;
    /// A new sequence at position 0. All sequences of a backend share a shape.
    ///
    /// # Errors
    /// [`ComputeError::OutOfMemory`].
    fn open_sequence(&mut self, shape: SequenceShape) -> Result<SequenceId, ComputeError>;
    /// Frees a sequence and its snapshots.
    fn close_sequence(&mut self, sequence: SequenceId);
    /// Copies the recurrent state as it is after everything recorded so far. (The KV cache needs no copy: a
    /// sequence is cut by giving its next row a smaller position.)
    ///
    /// # Errors
    /// [`ComputeError::OutOfMemory`].
    fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, ComputeError>;
    /// Makes a snapshot of this sequence hold the state as it is now, in the memory that it has.
    fn renew(&mut self, sequence: SequenceId, snapshot: SnapshotId);
    /// Puts a snapshot back; it stays usable.
    fn rollback(&mut self, sequence: SequenceId, snapshot: SnapshotId);
    /// Sets the recurrent state to that of an empty sequence.
    fn reset(&mut self, sequence: SequenceId);
    /// Frees a snapshot.
    fn drop_snapshot(&mut self, snapshot: SnapshotId);
    /// While the next pass runs, makes a snapshot of this sequence hold the state as it is between the rows at
    /// `position - 1` and `position`. The pass reads up to there as prompt, and `position` is on the 64-token grid or
    /// the pass ends with it.
    fn mark(&mut self, sequence: SequenceId, snapshot: SnapshotId, position: usize);

    // What a sequence holds, as bytes: little-endian, of the same meaning for every backend. These wait.

    /// Copies what the caches hold of positions: [`SequenceShape::rows_bytes`] bytes.
    fn export_rows(&mut self, sequence: SequenceId, positions: Range<usize>, out: &mut [u8]);
    /// Puts back what [`Self::export_rows`] copied, of any sequence of the same shape and type.
    fn import_rows(&mut self, sequence: SequenceId, positions: Range<usize>, bytes: &[u8]);
    /// Copies a snapshot: [`SequenceShape::state_bytes`] bytes.
    fn export_state(&mut self, snapshot: SnapshotId, out: &mut [u8]);
    /// Makes what [`Self::export_state`] copied the recurrent state of a sequence.
    fn import_state(&mut self, sequence: SequenceId, bytes: &[u8]);

    // Residency, in order with recorded operations.

    /// From here on `key` is found in `slot`, whose bytes are complete.
    fn publish(&mut self, key: ExpertKey, slot: SlotIndex, matrices: &ExpertMatrices);
    /// From here on `key` is not resident.
    fn unpublish(&mut self, key: ExpertKey);

    // Passes.

    /// Starts a pass over these rows; the previous pass must have been submitted.
    fn begin_pass(&mut self, rows: &[Row]);
    /// Adds an operation to the pass.
    fn record(&mut self, op: Op);
    /// Writes values of the host into whole rows of a buffer, in order with recorded operations. They are copied
    /// before this returns.
    fn upload(&mut self, buffer: BufferId, first_row: usize, values: &[f32]);
    /// Waits for the router's choices (this is the layer's one read-back), then records the experts that are
    /// resident. Choices of other routers that were recorded before come with it.
    ///
    /// Only `router` is checked for logits that are not finite. The choices of another one are guesses: whatever they
    /// are then, they name experts.
    ///
    /// # Errors
    /// [`ComputeError::RouterNotFinite`].
    fn moe(
        &mut self,
        layer: LayerIndex,
        x: BufferId,
        router: RouterHandle,
    ) -> Result<Moe, ComputeError>;
    /// The choices that the last [`Self::moe`] waited for, `[rows, top_k]`, each row in rank order.
    fn routes(&self, router: RouterHandle) -> &[Routed];
    /// Records the routed experts that became resident since.
    fn moe_more(&mut self, layer: LayerIndex, x: BufferId, router: RouterHandle);
    /// Hands everything recorded to the device; complete when the returned epoch is.
    fn submit(&mut self) -> Epoch;
    /// The newest epoch that is complete.
    fn completed(&self) -> Epoch;
    /// Blocks until `epoch` is complete.
    fn wait(&mut self, epoch: Epoch);
    /// Submits, waits, and copies row `row` of a buffer.
    fn read_back(&mut self, buffer: BufferId, row: usize, out: &mut [f32]);
    /// Bytes that this backend holds, apart from slots: weights, buffers, sequences, snapshots, staging.
    fn allocated_bytes(&mut self) -> u64;
}
