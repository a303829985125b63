//! Sum of expert outputs in router-rank order, the shared expert last.

use crate::backend::Routed;
use crate::reference::math::sigmoid;

/// `to += Σ_rank weight·output + sigmoid(gate)·shared`, one row.
///
/// - `routes`: `[top_k]`; `outputs`: `[top_k, hidden]`; `to`: `[hidden]`
/// - `shared`: `[hidden]` and its gate logit
/// - `acc`: `[hidden]`
/// - `set`: `to =` that instead
#[inline(always)]
pub(crate) fn combine(
    routes: &[Routed],
    outputs: &[f32],
    shared: Option<(&[f32], f32)>,
    acc: &mut [f32],
    (to, set): (&mut [f32], bool),
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
    if set {
        to.copy_from_slice(acc);
        return;
    }
    for (to, acc) in to.iter_mut().zip(acc.iter()) {
        *to += acc;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "every number is exact")]

    use units::ExpertIndex;

    use super::*;

    fn routes(weights: &[f32]) -> Vec<Routed> {
        let routed = |(i, weight): (usize, &f32)| Routed {
            expert: ExpertIndex(9 - i as u32),
            weight: *weight,
        };
        weights.iter().enumerate().map(routed).collect()
    }

    #[test]
    fn outputs_are_weighted_and_added_to_the_stream() {
        let outputs = [1.0, -2.0, 3.0, 10.0, 20.0, 30.0];
        let shared = [100.0, 200.0, -300.0];
        let (mut acc, mut to) = ([7.0; 3], [0.5, 0.25, -1.0]);
        combine(&routes(&[0.75, 0.25]), &outputs, Some((&shared, 0.0)), &mut acc, (&mut to, false));
        // The gate of logit 0 is one half; every number here is exact.
        assert_eq!(
            to,
            [0.5 + 0.75 + 2.5 + 50.0, 0.25 - 1.5 + 5.0 + 100.0, -1.0 + 2.25 + 7.5 - 150.0]
        );
        let mut set = [f32::NAN; 3];
        let shared: Option<(&[f32], f32)> = Some((&shared, 0.0));
        combine(&routes(&[0.75, 0.25]), &outputs, shared, &mut acc, (&mut set, true));
        assert_eq!(set, [0.75 + 2.5 + 50.0, -1.5 + 5.0 + 100.0, 2.25 + 7.5 - 150.0]);
    }

    #[test]
    fn ranks_are_added_in_order_before_the_stream_and_the_shared_expert_last() {
        // 2^24 absorbs a 1 that is added to it: every other order gives another sum.
        let large = 16_777_216.0;
        let (mut acc, mut to) = ([0.0], [1.0]);
        combine(&routes(&[1.0; 3]), &[large, 1.0, -large], None, &mut acc, (&mut to, false));
        assert_eq!(to, [1.0]);
        combine(&routes(&[1.0; 3]), &[large, -large, 1.0], None, &mut acc, (&mut to, false));
        assert_eq!(to, [2.0]);
        // The gate of logit 200 is 1.
        let shared: Option<(&[f32], f32)> = Some((&[-large], 200.0));
        combine(&routes(&[1.0; 2]), &[large, 1.0], shared, &mut acc, (&mut to, false));
        assert_eq!(to, [2.0]);
    }
}
