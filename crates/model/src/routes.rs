//! What every router chose, for parity checks and traces.

use compute::backend::Routed;
use units::LayerIndex;

/// Routing decisions of a run, `[n_tokens, n_layers, top_k]`, each token's experts in rank order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteLog {
    n_layers: usize,
    top_k: usize,
    /// Rows before the current pass.
    done: usize,
    experts: Vec<i32>,
    passes: Vec<LoggedPass>,
}

/// One pass of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedPass {
    /// Its tokens.
    pub rows: u32,
    /// Whether it is one generated token, and not part of a prompt.
    pub decodes: bool,
}

impl RouteLog {
    /// An empty log.
    pub const fn new(n_layers: usize, top_k: usize) -> Self {
        Self { n_layers, top_k, done: 0, experts: Vec::new(), passes: Vec::new() }
    }

    /// `[n_tokens, n_layers, top_k]`.
    pub const fn shape(&self) -> [usize; 3] {
        [self.done, self.n_layers, self.top_k]
    }

    /// Row-major values of [`Self::shape`].
    pub fn experts(&self) -> &[i32] {
        &self.experts
    }

    /// How the tokens came, one pass after the other.
    pub fn passes(&self) -> &[LoggedPass] {
        &self.passes
    }

    pub(crate) fn begin_pass(&mut self, rows: usize) {
        self.experts.resize((self.done + rows) * self.n_layers * self.top_k, 0);
    }

    pub(crate) fn end_pass(&mut self, rows: usize, decodes: bool) {
        self.done += rows;
        self.passes.push(LoggedPass { rows: rows as u32, decodes });
    }

    /// `routes`: `[rows of the pass, top_k]`.
    pub(crate) fn push(&mut self, layer: LayerIndex, routes: &[Routed]) {
        for (row, chosen) in routes.chunks_exact(self.top_k).enumerate() {
            let at = ((self.done + row) * self.n_layers + layer.get()) * self.top_k;
            for (place, routed) in self.experts[at..at + self.top_k].iter_mut().zip(chosen) {
                *place = i32::try_from(routed.expert.0)
                    .expect("expert counts are limited far below 2^31");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use units::ExpertIndex;

    #[test]
    fn passes_are_laid_end_to_end_with_layers_inside_a_token() {
        let routed = |expert| Routed { expert: ExpertIndex(expert), weight: 0.5 };
        let mut log = RouteLog::new(2, 1);
        for pass in 0..2 {
            log.begin_pass(2);
            log.push(LayerIndex(0), &[routed(10 * pass), routed(10 * pass + 1)]);
            log.push(LayerIndex(1), &[routed(10 * pass + 2), routed(10 * pass + 3)]);
            log.end_pass(2, false);
        }
        assert_eq!(log.passes(), [LoggedPass { rows: 2, decodes: false }; 2]);
        assert_eq!(log.shape(), [4, 2, 1]);
        assert_eq!(log.experts(), [0, 2, 1, 3, 10, 12, 11, 13]);
    }
}
