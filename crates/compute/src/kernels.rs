//! What a host-side backend computes, one method per operation, on plain slices.
//!
//! [`crate::host::HostBackend`] owns memory, residency and the order of operations; an implementation of this trait
//! owns arithmetic and threads. The scalar definitions are `reference/`; `cpu/` must give the same bits.
//!
//! Rows of a call are independent of each other except where a method says otherwise, and every method gets all of
//! them at once, so that they can be spread over threads.

use quant::BlockType;
use quant::slot::ExpertMatrices;

use crate::backend::{Gate, Heads, RecurrentShape, Role, Routed};
use crate::interleave::{self, ROWS};

/// A resident matrix, row-major `[n_out, n_in]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) block_type: BlockType,
    pub(crate) n_in: usize,
    pub(crate) n_out: usize,
    /// Exactly `n_out` rows.
    pub(crate) bytes: &'a [u8],
    /// Whether rows are interleaved, see [`crate::interleave`].
    pub(crate) interleaved: bool,
}

impl<'a> Matrix<'a> {
    /// Bytes of one row.
    pub(crate) const fn row_bytes(&self) -> usize {
        self.block_type.row_bytes(self.n_in).expect("rows are made of whole blocks")
    }

    /// A matrix inside a slot, as it was read.
    pub(crate) fn in_slot(slot: &'a [u8], matrix: &quant::SlotMatrix) -> Self {
        let place = matrix.place as usize;
        Self {
            block_type: matrix.block_type,
            n_in: matrix.n_in as usize,
            n_out: matrix.n_out as usize,
            bytes: &slot[place..place + matrix.bytes()],
            interleaved: false,
        }
    }

    /// Decodes row `r`.
    pub(crate) fn decode_row(&self, r: usize, out: &mut [f32]) {
        let bytes = self.row_bytes();
        if self.interleaved {
            let group = r / ROWS * ROWS * bytes;
            let group = &self.bytes[group..group + ROWS * bytes];
            interleave::decode_row(self.block_type, group, r % ROWS, out);
        } else {
            quant::decode_row(self.block_type, &self.bytes[r * bytes..(r + 1) * bytes], out);
        }
    }
}

/// Keys or values of one layer and sequence, `[positions, kv_heads · dim]`.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KvRows<'a> {
    /// IEEE half.
    F16(&'a [u16]),
    /// IEEE single.
    F32(&'a [f32]),
}

impl KvRows<'_> {
    /// Values that there are.
    pub(crate) const fn len(&self) -> usize {
        match self {
            Self::F16(values) => values.len(),
            Self::F32(values) => values.len(),
        }
    }
}

/// Norm of every head by a shared weight, then rotation, in place.
pub(crate) struct HeadNormRope<'a> {
    /// `[rows, width]`.
    pub(crate) x: &'a mut [f32],
    pub(crate) width: usize,
    pub(crate) heads: Heads,
    /// `[dim]`.
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    /// `[rows, rotary_dim]`: `rotary_dim / 2` cosines, then as many sines, of the row's position.
    pub(crate) angles: &'a [f32],
    pub(crate) rotary_dim: usize,
}

/// Causal attention of consecutive rows of one sequence, whose keys and values are already in the cache.
pub(crate) struct Attend<'a> {
    /// `[rows, q_width]`.
    pub(crate) q: &'a [f32],
    pub(crate) q_width: usize,
    pub(crate) heads: Heads,
    /// Multiply head `h` by the sigmoid of the `dim` values that follow its query.
    pub(crate) gated: bool,
    pub(crate) kv_heads: usize,
    pub(crate) keys: KvRows<'a>,
    pub(crate) values: KvRows<'a>,
    /// Position of row 0; row `r` sees positions `0..=first_position + r`.
    pub(crate) first_position: usize,
    /// `[rows, heads · dim]`.
    pub(crate) out: &'a mut [f32],
}

/// [`Attend`] to the best blocks of each row, and to what comes after its complete ones.
pub(crate) struct AttendSelected<'a> {
    pub(crate) attend: Attend<'a>,
    /// `[rows, index_width]`.
    pub(crate) index_q: &'a [f32],
    pub(crate) index_width: usize,
    pub(crate) index_heads: Heads,
    /// Keys of complete blocks, `[blocks of the context, dim]`.
    pub(crate) index_keys: KvRows<'a>,
    /// Positions of a block.
    pub(crate) ratio: usize,
    /// Blocks that a row chooses at most.
    pub(crate) blocks: usize,
}

/// Keys of complete blocks: mean of the raw keys, norm, rotation.
pub(crate) struct PoolKeys<'a> {
    /// `[positions, dim]`.
    pub(crate) raw: KvRows<'a>,
    pub(crate) first_block: usize,
    /// Positions of a block.
    pub(crate) ratio: usize,
    /// `[dim]`.
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    /// `[blocks, rotary_dim]`, of the first position of each block.
    pub(crate) angles: &'a [f32],
    pub(crate) rotary_dim: usize,
    /// `[blocks, dim]`.
    pub(crate) out: &'a mut [f32],
}

/// Gates of streams: how well each one's key meets its query.
pub(crate) struct GatedValue<'a> {
    /// `[rows, streams·hidden]`.
    pub(crate) k: &'a [f32],
    pub(crate) q: &'a [f32],
    /// `[rows, hidden]`.
    pub(crate) v: &'a [f32],
    pub(crate) hidden: usize,
    /// `[rows, streams·hidden]`.
    pub(crate) out: &'a mut [f32],
}

/// Causal depthwise convolution of consecutive rows of one sequence, then SiLU.
pub(crate) struct ShortConv<'a> {
    /// `[rows, channels]`.
    pub(crate) x: &'a [f32],
    pub(crate) channels: usize,
    /// `[channels, taps]`, last tap = current row.
    pub(crate) weight: &'a [f32],
    pub(crate) taps: usize,
    /// Rows from one tap to the next.
    pub(crate) dilation: usize,
    /// Inputs before row 0, oldest first, `[(taps - 1)·dilation, channels]`; afterwards those before the next row.
    pub(crate) state: &'a mut [f32],
    /// `[rows, channels]`.
    pub(crate) out: &'a mut [f32],
}

/// Gated delta rule of consecutive rows of one sequence.
pub(crate) struct DeltaRule<'a> {
    pub(crate) shape: RecurrentShape,
    pub(crate) role: Role,
    /// Position of row 0; on the 64-token grid for prompt rows.
    pub(crate) first_position: usize,
    /// `[rows, q | k | v]`.
    pub(crate) conv: &'a [f32],
    /// `[rows, nv·dv]`.
    pub(crate) z: &'a [f32],
    /// `[rows, b(nv) | a(nv)]`.
    pub(crate) ba: &'a [f32],
    /// `-exp(A_log)`, `[nv]`.
    pub(crate) a: &'a [f32],
    /// `[nv]`.
    pub(crate) dt_bias: &'a [f32],
    /// `[dv]`.
    pub(crate) norm: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) gate: Gate,
    /// `[nv, dk, dv]`.
    pub(crate) state: &'a mut [f32],
    /// `[rows, nv·dv]`.
    pub(crate) out: &'a mut [f32],
}

/// A logit that is NaN or infinite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BadLogit {
    pub(crate) row: usize,
    pub(crate) expert: usize,
    pub(crate) value: f32,
}

/// One resident expert and the rows that chose it.
#[derive(Clone, Copy)]
pub(crate) struct ExpertGroup<'a> {
    pub(crate) slot: &'a [u8],
    pub(crate) matrices: ExpertMatrices,
    /// Whether matrices that [`Kernels::interleaves`] names are interleaved.
    pub(crate) interleaved: bool,
    /// Its pairs in [`Experts::pairs`].
    pub(crate) first_pair: usize,
    pub(crate) n_pairs: usize,
}

/// A row that chose an expert, and where its output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pair {
    /// Row of `x`.
    pub(crate) row: usize,
    /// Row of `outputs`: `row · top_k + rank`. Each occurs once in a call.
    pub(crate) output: usize,
}

/// SwiGLU experts: `down · (silu(gate · x) ∘ (up · x))` for every pair.
pub(crate) struct Experts<'a> {
    /// `[rows, hidden]`.
    pub(crate) x: &'a [f32],
    pub(crate) hidden: usize,
    pub(crate) width: usize,
    pub(crate) groups: &'a [ExpertGroup<'a>],
    pub(crate) pairs: &'a [Pair],
    /// `[rows · top_k, hidden]`.
    pub(crate) outputs: &'a mut [f32],
}

/// Sums expert outputs into the residual stream.
pub(crate) struct Combine<'a> {
    /// `[rows, top_k]`.
    pub(crate) routes: &'a [Routed],
    pub(crate) top_k: usize,
    /// `[rows · top_k, hidden]`.
    pub(crate) outputs: &'a [f32],
    /// The shared expert's output `[rows, hidden]` and gate logit `[rows]`.
    pub(crate) shared: Option<(&'a [f32], &'a [f32])>,
    pub(crate) hidden: usize,
    /// Overwrites instead of adding.
    pub(crate) set: bool,
    /// `[rows, hidden]`.
    pub(crate) to: &'a mut [f32],
}

/// A norm of equal parts of a row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupNorm {
    pub(crate) groups: usize,
    pub(crate) eps: f32,
}

/// The arithmetic of a host-side backend.
pub(crate) trait Kernels: Send {
    /// The backend's name.
    fn name(&self) -> &'static str;

    /// Whether products with `n_out` resident rows of this type are faster when those are interleaved.
    fn interleaves(&self, ty: BlockType, n_out: usize) -> bool;

    /// Interleaves the rows, of `row_bytes` each, of a matrix for which [`Self::interleaves`] holds.
    fn interleave(&mut self, ty: BlockType, row_bytes: usize, rows: &mut [u8]);

    /// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) ∘ weight`; rows are as wide as `weight`.
    fn rms_norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);

    /// `out[r] = w · x[r]`: `x` is `[rows, n_in]`, `out` is `[rows, n_out]`.
    fn mat_mul(&mut self, w: Matrix<'_>, x: &[f32], out: &mut [f32]);

    /// See [`HeadNormRope`].
    fn head_norm_rope(&mut self, job: HeadNormRope<'_>);

    /// See [`Attend`].
    fn attend(&mut self, job: Attend<'_>);

    /// See [`AttendSelected`].
    fn attend_selected(&mut self, job: AttendSelected<'_>);

    /// See [`PoolKeys`].
    fn pool_keys(&mut self, job: PoolKeys<'_>);

    /// See [`ShortConv`]; rows depend on the rows before them.
    fn short_conv(&mut self, job: ShortConv<'_>);

    /// See [`DeltaRule`]; rows depend on the rows before them.
    fn delta_rule(&mut self, job: DeltaRule<'_>);

    /// Softmax of each row of `logits` `[rows, n_experts]`, the `top_k` largest into `out` `[rows, top_k]`.
    ///
    /// # Errors
    /// The first logit that is not finite.
    fn route(
        &mut self,
        logits: &[f32],
        n_experts: usize,
        normalize: bool,
        out: &mut [Routed],
    ) -> Result<(), BadLogit>;

    /// `gate = silu(gate) ∘ up`.
    fn silu_mul_in_place(&mut self, gate: &mut [f32], up: &[f32]);

    /// See [`Experts`].
    fn experts(&mut self, job: Experts<'_>);

    /// See [`Combine`].
    fn combine(&mut self, job: Combine<'_>);

    /// [`Self::rms_norm`] of each of `groups` equal parts of a row; rows are as wide as `weight`.
    fn group_norm(&mut self, x: &[f32], weight: &[f32], norm: GroupNorm, out: &mut [f32]);

    /// `x = silu(scale · x)`.
    fn scaled_silu(&mut self, x: &mut [f32], scale: f32);

    /// `out[r] = (Σ_s sigmoid(mix_s) ∘ n_s) / streams`: `mix` and `n` are `[rows, streams·hidden]`, `out` is
    /// `[rows, hidden]`.
    fn stream_mix(&mut self, mix: &[f32], n: &[f32], hidden: usize, out: &mut [f32]);

    /// `to_s += 2·sigmoid(logits_s / streams) · y`: `logits` is `[rows, streams]`, `y` is `[rows, hidden]`, `to` is
    /// `[rows, streams·hidden]`.
    fn inject(&mut self, logits: &[f32], y: &[f32], hidden: usize, to: &mut [f32]);

    /// See [`GatedValue`].
    fn gated_value(&mut self, job: GatedValue<'_>);

    /// Bytes of scratch that it holds.
    fn allocated_bytes(&self) -> u64;
}
