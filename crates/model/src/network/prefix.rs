//! What a sequence holds of a prompt, as bytes: so that it can be kept elsewhere and given to another sequence.
//!
//! Rows of a prompt depend on the tokens up to them and on nothing else, so what caches hold of positions may be copied
//! in any pieces. A recurrent state is that of one position: [`Network::mark`] has it kept while a pass runs through
//! there.

use std::ops::Range;

use compute::backend::{KvType, SequenceId, SnapshotId};

use super::Network;

impl Network {
    /// Whether sequences have a state besides what is addressed by position: then a prompt goes on only where the state
    /// was kept, else at any point of the grid.
    pub fn has_state(&self) -> bool {
        self.state_bytes() > 0
    }

    /// While the next pass runs, has a snapshot of this sequence hold the state before the row at `position`, which is on
    /// the grid, and behind the first prompt row of the sequence in that pass. Should the pass end early, the snapshot
    /// holds nothing of use. Its draft is not kept.
    pub fn mark(&mut self, sequence: SequenceId, snapshot: SnapshotId, position: usize) {
        self.backend.mark(sequence, snapshot, position);
    }

    /// Makes a snapshot of this sequence hold the state as it is now, in the memory that it has.
    pub fn renew(&mut self, sequence: SequenceId, snapshot: SnapshotId) {
        self.backend.renew(sequence, snapshot);
    }

    /// Bytes of [`Self::export_rows`].
    pub fn rows_bytes(&self, kv: KvType, positions: &Range<usize>) -> usize {
        self.geometry.sequence(self.options.context_tokens).rows_bytes(kv, positions)
    }

    /// Bytes of [`Self::export_state`]; 0 if sequences have none.
    pub fn state_bytes(&self) -> usize {
        self.geometry.sequence(self.options.context_tokens).state_bytes()
    }

    /// Copies what the caches of a sequence hold of positions.
    ///
    /// # Panics
    /// If `out` is not as long as that.
    pub fn export_rows(&mut self, sequence: SequenceId, positions: Range<usize>, out: &mut [u8]) {
        self.backend.export_rows(sequence, positions, out);
    }

    /// Copies a kept state.
    ///
    /// # Panics
    /// If `out` is not as long as that.
    pub fn export_state(&mut self, snapshot: SnapshotId, out: &mut [u8]) {
        self.backend.export_state(snapshot, out);
    }

    /// Puts back what [`Self::export_rows`] gave of the same tokens at the same positions.
    ///
    /// # Panics
    /// If it is of another length.
    pub fn import_rows(&mut self, sequence: SequenceId, positions: Range<usize>, bytes: &[u8]) {
        self.backend.import_rows(sequence, positions, bytes);
    }

    /// Puts a sequence behind `tokens`, whose rows its caches hold: the next one is at their end. `state` is what
    /// [`Self::export_state`] gave there, if sequences have a state.
    ///
    /// # Panics
    /// If the state is of another length.
    pub fn resume(&mut self, sequence: SequenceId, tokens: &[u32], state: Option<&[u8]>) {
        self.reset(sequence);
        if let Some(state) = state {
            self.backend.import_state(sequence, state);
        }
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.restore(sequence, tokens);
        }
    }
}
