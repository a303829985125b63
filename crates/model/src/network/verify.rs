//! Passes whose last rows may be taken back: a token and guesses of those after it.
//!
//! Caches are addressed by position, and so are the tokens that an n-gram table remembers: what rejected rows left
//! there is overwritten before anything looks at it. Recurrent state is not: it has seen every row. Keeping the state
//! after each row would cost as much memory as the state itself, a row. So one copy of the state before the pass is
//! kept, and of every row what its updates take: the input of a convolution, the input of a decay, some kilobytes a
//! layer. When rows are rejected, the copy is put back and the updates of the accepted ones are made again from those
//! inputs. No weight and no expert is needed for that, and the same operations on the same rows give the same bits.

use std::ops::ControlFlow;

use compute::backend::{Backend, BufferId, ComputeError, Role, Row, SequenceId, SnapshotId};

use super::{ForwardError, Geometry, How, LogitRows, Network};
use crate::load::MixerWeights;
use crate::{delta_net, ngram};

/// Where the rows of such a pass leave what recurrent updates take, by layer.
#[derive(Debug)]
pub(crate) struct Inputs {
    /// Of a layer's delta rule: `qkv` before its convolution, and `[b | a]`.
    delta_net: Vec<[BufferId; 2]>,
    /// Of the n-gram block's convolution.
    ngram: Option<BufferId>,
}

impl Inputs {
    /// As [`delta_net::Buffers`] has them, of one recurrent layer.
    pub(crate) fn delta_net(&self, layer: usize) -> [BufferId; 2] {
        self.delta_net[layer]
    }

    /// What the n-gram block's convolution takes.
    ///
    /// # Panics
    /// If the model has no n-gram table.
    pub(crate) const fn ngram(&self) -> BufferId {
        self.ngram.expect("the model has an n-gram table")
    }
}

/// Values of a row that [`Inputs`] hold, by buffer.
pub(crate) fn widths(geometry: &Geometry) -> Vec<usize> {
    let layer = |shape| {
        let [qkv, _, _, ba, _] = delta_net::widths(shape);
        [qkv, ba]
    };
    let layers = geometry.recurrent.iter().flat_map(|shape| vec![layer(shape); shape.layers]);
    layers.flatten().chain(geometry.ngram.map(|shape| shape.conv.channels)).collect()
}

/// What is needed to take rows back.
pub(super) struct Verify {
    inputs: Inputs,
    /// Most rows of such a pass.
    max_rows: usize,
    /// The state before the last such pass of a sequence, where there is any.
    before: Vec<(SequenceId, SnapshotId)>,
    /// Rows of the last pass, until it is decided which are kept.
    rows: Vec<Row>,
}

impl Verify {
    pub(super) fn alloc(
        backend: &mut dyn Backend,
        geometry: &Geometry,
        max_rows: usize,
    ) -> Result<Self, ComputeError> {
        let mut delta_net = Vec::new();
        if let Some(shape) = &geometry.recurrent {
            let [qkv, _, _, ba, _] = delta_net::widths(shape);
            for _ in 0..shape.layers {
                delta_net.push([
                    backend.alloc_buffer(max_rows, qkv)?,
                    backend.alloc_buffer(max_rows, ba)?,
                ]);
            }
        }
        let ngram = match &geometry.ngram {
            Some(shape) => Some(backend.alloc_buffer(max_rows, shape.conv.channels)?),
            None => None,
        };
        let rows = Vec::with_capacity(max_rows);
        Ok(Self { inputs: Inputs { delta_net, ngram }, max_rows, before: Vec::new(), rows })
    }

    pub(super) const fn inputs(&self) -> &Inputs {
        &self.inputs
    }

    /// Makes room for the state of a new sequence.
    pub(super) fn open_sequence(
        &mut self,
        backend: &mut dyn Backend,
        geometry: &Geometry,
        sequence: SequenceId,
    ) -> Result<(), ComputeError> {
        if geometry.recurrent.is_some() || geometry.ngram.is_some() {
            self.before.push((sequence, backend.snapshot(sequence)?));
        }
        Ok(())
    }

    fn before(&self, sequence: SequenceId) -> Option<SnapshotId> {
        let kept = self.before.iter().find(|(known, _)| *known == sequence);
        kept.map(|(_, snapshot)| *snapshot)
    }
}

/// Guesses under verification, of a network that has room for them.
impl Network {
    /// Most rows of a pass that [`Network::verify`] runs; 0 if it has no room for any.
    pub fn verify_rows(&self) -> usize {
        self.verify.as_ref().map_or(0, |verify| verify.max_rows)
    }

    /// Runs one pass over generated rows of one sequence, of which [`Network::keep`] must then say how many stay.
    /// `sink` gets the logits of every row, as of [`Network::forward`].
    ///
    /// # Errors
    /// See [`ForwardError`]; afterwards the sequence must be reset.
    ///
    /// # Panics
    /// If there are more rows than there is room for, or they are not generated rows of one sequence.
    pub fn verify(
        &mut self,
        rows: &[Row],
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        self.check(rows)?;
        let sequence = rows[0].sequence;
        let of_it = |row: &Row| row.sequence == sequence && row.role == Role::Generated;
        assert!(rows.iter().all(of_it), "generated rows of one sequence");
        let verify = self.verify.as_mut().expect("there is room for guesses");
        assert!(rows.len() <= verify.max_rows, "{} rows of {}", rows.len(), verify.max_rows);
        verify.rows.clear();
        verify.rows.extend_from_slice(rows);
        if let Some(before) = verify.before(sequence) {
            self.backend.renew(sequence, before);
        }
        let go_on = &mut |_| ControlFlow::Continue(());
        self.run(rows, LogitRows::All, How { verifying: true, go_on, taps: None }, sink)
    }

    /// Keeps the first `kept` rows of the last verified pass: the sequence is as if only they had been run.
    ///
    /// # Panics
    /// If that pass had fewer rows, or none of them is kept.
    pub fn keep(&mut self, kept: usize) {
        let verify = self.verify.as_mut().expect("there is room for guesses");
        assert!((1..=verify.rows.len()).contains(&kept), "{kept} of {} rows", verify.rows.len());
        let rejected = verify.rows.len() - kept;
        verify.rows.truncate(kept);
        if rejected == 0 {
            return;
        }
        if let Some(draft) = &mut self.draft {
            draft.forget_trunk(kept);
        }
        let sequence = verify.rows[0].sequence;
        if let Some(before) = verify.before(sequence) {
            self.backend.rollback(sequence, before);
            self.update_again();
        }
    }

    /// The recurrent updates of the kept rows, from their inputs. What they give besides goes nowhere.
    fn update_again(&mut self) {
        let verify = self.verify.as_ref().expect("the caller has it");
        let backend = &mut *self.backend;
        backend.begin_pass(&verify.rows);
        let mut layer = 0;
        for weights in &self.weights.layers {
            if let Some(weights) = &weights.ngram {
                ngram::record_conv(backend, &self.buffers, weights, verify.inputs.ngram());
            }
            if let MixerWeights::DeltaNet(weights) = &weights.mixer {
                let inputs = verify.inputs.delta_net(layer);
                let buffers = self.buffers.delta_net.expect("the model has DeltaNet layers");
                let gate = self.geometry.gate;
                delta_net::record_update(backend, &buffers.with(inputs), layer, weights, gate);
                layer += 1;
            }
        }
        backend.submit();
    }
}
