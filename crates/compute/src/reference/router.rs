//! Softmax over all experts, the largest few, rescaled.

use quant::lanes;
use units::ExpertIndex;

use crate::backend::Routed;
use crate::reference::math::exp;

/// Picks one row's experts, largest weight first; a tie goes to the lower index.
///
/// - `logits`: `[n_experts]`
/// - `out`: `[top_k]`
///
/// # Errors
/// The first expert whose logit is not finite.
///
/// Source: Shazeer et al. 2017 (arXiv:1701.06538).
#[inline(always)]
pub(crate) fn route(
    logits: &[f32],
    normalize: bool,
    e: &mut [f32],
    out: &mut [Routed],
) -> Result<(), usize> {
    if let Some(bad) = logits.iter().position(|logit| !logit.is_finite()) {
        return Err(bad);
    }
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, l| if *l > max { *l } else { max });
    for (e, logit) in e.iter_mut().zip(logits) {
        *e = exp(logit - max);
    }
    let total = lanes::sum(&e[..logits.len()]);
    for rank in 0..out.len() {
        let (chosen, rest) = out.split_at_mut(rank);
        let mut best: Option<usize> = None;
        for (expert, logit) in logits.iter().enumerate() {
            let taken = chosen.iter().any(|routed| routed.expert.get() == expert);
            if !taken && best.is_none_or(|best| *logit > logits[best]) {
                best = Some(expert);
            }
        }
        let expert = best.expect("top_k is at most the number of experts");
        rest[0] = Routed { expert: ExpertIndex(expert as u32), weight: e[expert] / total };
    }
    if normalize {
        let sum = out.iter().fold(0.0, |sum, routed| sum + routed.weight);
        for routed in out.iter_mut() {
            routed.weight /= sum;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::float_cmp, reason = "bits are the contract")]

    use super::*;

    fn routed(logits: &[f32], k: usize, normalize: bool) -> Result<Vec<(u32, f32)>, usize> {
        let mut out = vec![Routed { expert: ExpertIndex(0), weight: 0.0 }; k];
        route(logits, normalize, &mut vec![0.0; logits.len()], &mut out)?;
        Ok(out.iter().map(|r| (r.expert.0, r.weight)).collect())
    }

    #[test]
    fn the_largest_come_first_and_ties_go_to_the_lower_index() {
        let chosen = routed(&[1.0, 3.0, 3.0, 0.0, 3.0], 4, false).unwrap();
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [1, 2, 4, 0]);
        assert_eq!(
            routed(&[0.0; 7], 7, true).unwrap().iter().map(|c| c.0).collect::<Vec<_>>(),
            [0, 1, 2, 3, 4, 5, 6]
        );
    }

    #[test]
    fn weights_are_the_softmax_and_sum_to_one_when_asked() {
        let logits = [0.3, -1.2, 2.0, 0.7];
        let total: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        for (expert, weight) in routed(&logits, 2, false).unwrap() {
            let exact = f64::from(logits[expert as usize]).exp() / total;
            assert!((f64::from(weight) - exact).abs() < 1e-6);
        }
        let sum: f32 = routed(&logits, 2, true).unwrap().iter().map(|c| c.1).sum();
        assert!((sum - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_logit_that_is_not_finite_is_named() {
        assert_eq!(routed(&[0.0, f32::NAN, 1.0], 1, true), Err(1));
        assert_eq!(routed(&[0.0, 0.0, f32::INFINITY], 1, true), Err(2));
    }
}
