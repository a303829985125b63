//! The scalar definitions, compiled for each instruction set.
//!
//! The definitions are written in 16-lane loops and explicit fused multiply-adds; the compiler turns them into vector
//! instructions and may not change a bit, since it never reorders float arithmetic by itself.
#![allow(unsafe_code, reason = "one call per path into functions for detected instruction sets")]
#![allow(
    clippy::inline_always,
    reason = "a body must be compiled inside the function that calls it"
)]

use std::ops::Range;

use crate::backend::Routed;
use crate::kernels::{DeltaRule, KvRows, PoolKeys, ShortConv};
use crate::reference::attention::{self, KvHead, Seen};
use crate::reference::index::{self, IndexQueries};
use crate::reference::{self, delta_rule, norm, router, short_conv, streams};

use super::isa::Isa;

/// Defines `name(isa, arguments)`, which runs `body` as compiled for `isa`.
macro_rules! for_each_isa {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block
    )*) => {$(
        $(#[$doc])*
        pub(super) fn $name(isa: Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }

            match isa {
                Isa::Scalar => body($($arg),*),
                // SAFETY: `Isa::Avx2` is made only after AVX2, FMA and F16C were detected on this CPU.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2(_) => unsafe { avx2($($arg),*) },
                // The definitions use nothing that is not in the baseline.
                #[cfg(target_arch = "aarch64")]
                Isa::Dotprod(_) => body($($arg),*),
            }
        }
    )*};
}

for_each_isa! {
    /// `gate = silu(gate) ∘ up`.
    fn silu_mul(gate: &mut [f32], up: &[f32]) {
        reference::silu_mul(gate, up);
    }

    /// `out = out ∘ sigmoid(gate)`.
    fn gate(out: &mut [f32], gate: &[f32]) {
        reference::gate(out, gate);
    }

    /// One row and head; see [`attention::attend`].
    fn attend_head(q: &[f32], head: KvHead<'_>, seen: Seen<'_>, out: &mut [f32]) {
        attention::attend(q, head, seen, out);
    }

    /// Some blocks for one row; see [`index::scores`].
    fn index_scores(
        queries: IndexQueries<'_>,
        keys: KvRows<'_>,
        first: usize,
        scores: &mut [f32],
    ) {
        index::scores(queries, keys, first, scores);
    }

    /// One block; see [`index::pool`].
    fn pool_key(job: &PoolKeys<'_>, i: usize, out: &mut [f32]) {
        index::pool(job, i, out);
    }

    /// See [`streams::scaled_silu`].
    fn scaled_silu(x: &mut [f32], scale: f32) {
        streams::scaled_silu(x, scale);
    }

    /// Some columns of one row; see [`streams::mix`].
    fn mix(mix: &[f32], n: &[f32], place: (usize, usize), out: &mut [f32]) {
        streams::mix(mix, n, place, out);
    }

    /// One row; see [`streams::inject`].
    fn inject(logits: &[f32], y: &[f32], to: &mut [f32]) {
        streams::inject(logits, y, to);
    }

    /// One row; see [`streams::gated_value`].
    fn gated_value(k: &[f32], q: &[f32], v: &[f32], out: &mut [f32]) {
        streams::gated_value(k, q, v, out);
    }

    /// One row; see [`norm::rms_norm`].
    fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        norm::rms_norm(x, weight, eps, out);
    }

    /// One head: norm, then rotation.
    fn norm_rope(head: &mut [f32], weight: &[f32], eps: f32, angles: &[f32]) {
        norm::rms_norm_in_place(head, weight, eps);
        norm::rotate(head, angles);
    }

    /// One row; see [`router::route`].
    fn route(
        logits: &[f32],
        normalize: bool,
        e: &mut [f32],
        out: &mut [Routed],
    ) -> Result<(), usize> {
        router::route(logits, normalize, e, out)
    }

    /// One row; see [`reference::combine::combine`].
    fn combine(
        routes: &[Routed],
        outputs: &[f32],
        shared: Option<(&[f32], f32)>,
        acc: &mut [f32],
        to: (&mut [f32], bool),
    ) {
        reference::combine::combine(routes, outputs, shared, acc, to);
    }

    /// Some channels of all rows; see [`short_conv::channels`].
    fn conv_channels(
        job: &ShortConv<'_>,
        range: Range<usize>,
        acc: &mut [f32],
        put: impl FnMut(usize, &[f32]),
    ) {
        short_conv::channels(job, range, acc, put);
    }

    /// One value head of all rows; see [`delta_rule::head`].
    fn delta_head(
        job: &DeltaRule<'_>,
        head: usize,
        state: &mut [f32],
        scratch: &mut delta_rule::Scratch,
        put: impl FnMut(usize, &[f32]),
    ) {
        let n_rows = job.z.len() / (job.shape.value_heads * job.shape.value_dim);
        delta_rule::head(job, n_rows, head, state, scratch, put);
    }
}
