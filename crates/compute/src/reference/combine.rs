//! Sum of expert outputs in router-rank order, the shared expert last.

use crate::backend::Routed;
use crate::reference::math::sigmoid;

/// `to += Σ_rank weight·output + sigmoid(gate)·shared`, one row.
///
/// - `routes`: `[top_k]`; `outputs`: `[top_k, hidden]`; `to`: `[hidden]`
/// - `shared`: `[hidden]` and its gate logit
/// - `acc`: `[hidden]`
#[inline(always)]
pub(crate) fn combine(
    routes: &[Routed],
    outputs: &[f32],
    shared: Option<(&[f32], f32)>,
    acc: &mut [f32],
    to: &mut [f32],
) {
    acc.fill(0.0);
    for (routed, output) in routes.iter().zip(outputs.chunks_exact(to.len())) {
        for (acc, y) in acc.iter_mut().zip(output) {
            *acc = routed.weight.mul_add(*y, *acc);
        }
    }
    if let Some((output, gate)) = shared {
        let weight = sigmoid(gate);
        for (acc, y) in acc.iter_mut().zip(output) {
            *acc = weight.mul_add(*y, *acc);
        }
    }
    for (to, acc) in to.iter_mut().zip(acc.iter()) {
        *to += acc;
    }
}
