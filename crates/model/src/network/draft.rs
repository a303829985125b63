//! The draft head: a block behind the trunk that guesses the token after the next (multi-token prediction, Gloeckle et
//! al. 2024, arXiv:2404.19737, as DeepSeek-V3 and Qwen3-Next have it).
//!
//! Its row at position `p` takes the trunk's hidden state at `p` and the token at `p + 1`, and gives logits of the token
//! at `p + 2`. The block itself is one more layer: its keys lie in one more layer of a sequence's caches, its experts
//! are those of one more layer of the pool, and it runs through the same code. It shares embedding and head.
//!
//! Caches are addressed by position, so a draft is taken back by going on from a smaller one. What it cannot get back
//! is a hidden state that later rows of the trunk have replaced; snapshots of a sequence keep the last one.

use checkpoint::DraftTensors;
use compute::backend::{
    Backend, BufferId, Columns, ComputeError, Op, Row, SequenceId, SnapshotId, WeightId,
};
use units::LayerIndex;

use super::{ForwardError, Geometry, LogitRows, Network};
use crate::layer::{self, Pass};
use crate::load::{DraftProjection, DraftWeights, InputWeights, LoadError, Loader};
use crate::streams;

/// Where a draft takes its hidden states from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftFrom {
    /// The last pass of the trunk: a row at position `p` takes the trunk's at `p`.
    Trunk,
    /// The last draft, to guess one token more: a row at position `p` takes the draft's at `p - 1`.
    Draft,
}

/// A row of a buffer, by what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    sequence: SequenceId,
    position: u32,
}

impl Place {
    const fn of(row: &Row) -> Self {
        Self { sequence: row.sequence, position: row.position }
    }
}

/// What a snapshot of a sequence keeps of its draft.
#[derive(Debug)]
struct Saved {
    snapshot: SnapshotId,
    /// Positions that the draft's caches held.
    held: usize,
    /// The trunk's hidden state at the last position before the snapshot, `[streams·hidden]`.
    last: Option<(Place, Vec<f32>)>,
}

/// Most rows that the draft head reads late at once.
pub const LATE_ROWS: usize = 64;

/// Rows of a sequence that the draft head has yet to read.
#[derive(Debug)]
struct Late {
    sequence: SequenceId,
    rows: Vec<Row>,
    /// The trunk's hidden states, `[rows, streams·hidden]`.
    hidden: Vec<f32>,
}

/// The loaded block.
pub(super) struct Draft {
    weights: DraftWeights,
    /// Those of the trunk, but for the residual.
    buffers: layer::Buffers,
    inputs: Inputs,
    /// What the trunk's residual holds, by row.
    trunk: Vec<Place>,
    /// What the block's residual holds, by row.
    rows: Vec<Place>,
    /// Positions that the block's caches hold.
    held: Vec<(SequenceId, usize)>,
    late: Vec<Late>,
    saved: Vec<Saved>,
}

/// What becomes the block's input.
#[derive(Clone, Copy)]
struct Inputs {
    /// The normed hidden state, `[streams·hidden]`.
    hidden: BufferId,
    /// Embedding and one stream side by side, `[2·hidden]`; of a projection that takes them so.
    pair: Option<BufferId>,
}

/// Widths of the draft's own buffers.
pub(crate) const fn widths(geometry: &Geometry) -> [usize; 3] {
    let residual = geometry.residual_width();
    [residual, residual, 2 * geometry.hidden]
}

impl Draft {
    /// Loads the block. `trunk` are the trunk's buffers, which the block uses too.
    pub(super) fn load(
        loader: &mut Loader<'_>,
        tensors: &DraftTensors,
        trunk: &layer::Buffers,
        geometry: &Geometry,
        max_rows: usize,
    ) -> Result<Self, LoadError> {
        let weights = loader.draft(tensors)?;
        let [residual, hidden, pair] = widths(geometry);
        let backend = &mut *loader.backend;
        let h = backend.alloc_buffer(max_rows, residual)?;
        let hidden = backend.alloc_buffer(max_rows, hidden)?;
        let pair = match weights.project {
            DraftProjection::Joined(_) => Some(backend.alloc_buffer(max_rows, pair)?),
            DraftProjection::Apart { .. } => None,
        };
        Ok(Self {
            weights,
            buffers: layer::Buffers { h, ..*trunk },
            inputs: Inputs { hidden, pair },
            trunk: Vec::with_capacity(max_rows),
            rows: Vec::with_capacity(max_rows),
            held: Vec::new(),
            late: Vec::new(),
            saved: Vec::new(),
        })
    }

    /// The trunk is about to compute: what its residual held is gone.
    pub(super) fn begin_trunk(&mut self) {
        self.trunk.clear();
    }

    /// The trunk's residual holds these rows.
    pub(super) fn end_trunk(&mut self, rows: &[Row]) {
        self.trunk.extend(rows.iter().map(Place::of));
    }

    /// Rows of the trunk's last pass from `kept` on were taken back.
    pub(super) fn forget_trunk(&mut self, kept: usize) {
        self.trunk.truncate(kept);
    }

    pub(super) fn open_sequence(&mut self, sequence: SequenceId) {
        self.held.push((sequence, 0));
        self.late.push(Late { sequence, rows: Vec::new(), hidden: Vec::new() });
    }

    pub(super) fn reset(&mut self, sequence: SequenceId) {
        self.cut(sequence, 0);
        self.trunk.clear();
    }

    /// Forgets what the caches hold from position `held` on.
    fn cut(&mut self, sequence: SequenceId, held: usize) {
        let known = self.held_by(sequence);
        *known = held.min(*known);
        self.rows.clear();
        let late = self.late_of(sequence);
        late.rows.clear();
        late.hidden.clear();
    }

    fn late_of(&mut self, sequence: SequenceId) -> &mut Late {
        let late = self.late.iter_mut().find(|late| late.sequence == sequence);
        late.expect("the sequence is open")
    }

    fn held_by(&mut self, sequence: SequenceId) -> &mut usize {
        let known = self.held.iter_mut().find(|(known, _)| *known == sequence);
        &mut known.expect("the sequence is open").1
    }

    pub(super) fn save(
        &mut self,
        backend: &mut dyn Backend,
        trunk: BufferId,
        width: usize,
        (sequence, snapshot): (SequenceId, SnapshotId),
    ) {
        let last = self.trunk.iter().rposition(|place| place.sequence == sequence).map(|row| {
            let mut values = vec![0.0; width];
            backend.read_back(trunk, row, &mut values);
            (self.trunk[row], values)
        });
        let held = *self.held_by(sequence);
        self.saved.push(Saved { snapshot, held, last });
    }

    pub(super) fn restore(
        &mut self,
        backend: &mut dyn Backend,
        trunk: BufferId,
        (sequence, snapshot): (SequenceId, SnapshotId),
    ) {
        let saved = self.saved.iter().position(|saved| saved.snapshot == snapshot);
        let Saved { held, ref last, .. } = self.saved[saved.expect("the snapshot is kept")];
        self.trunk.clear();
        if let Some((place, values)) = last {
            backend.upload(trunk, 0, values);
            self.trunk.push(*place);
        }
        self.cut(sequence, held);
    }

    pub(super) fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        self.saved.retain(|saved| saved.snapshot != snapshot);
    }

    /// The first row of the buffer that `rows` take their hidden states from.
    fn source(&self, rows: &[Row], from: DraftFrom) -> Option<usize> {
        let (known, back) = match from {
            DraftFrom::Trunk => (&self.trunk, 0),
            DraftFrom::Draft => (&self.rows, 1),
        };
        let gives = |known: &Place, row: &Row| {
            known.sequence == row.sequence && Some(known.position) == row.position.checked_sub(back)
        };
        let first = known.iter().position(|known| gives(known, &rows[0]))?;
        let known = known.get(first..first + rows.len())?;
        known.iter().zip(rows).all(|(known, row)| gives(known, row)).then_some(first)
    }
}

/// Records what makes the block's input of the rows' tokens and of hidden states, into its residual. Goes through `x`
/// and `y`, which hold nothing between blocks.
///
/// - `source`: a residual and its first row
/// - `norm`: of that residual where it is one stream, which the head's input is the norm of
fn record_input(
    pass: &mut Pass<'_>,
    draft: &Draft,
    table: WeightId,
    (source, first): (BufferId, usize),
    norm: &InputWeights,
) {
    let Pass { n_rows, geometry, .. } = *pass;
    let (hidden, eps, all) = (geometry.hidden, geometry.rms_eps, 0..n_rows);
    let layer::Buffers { h, x, y, .. } = draft.buffers;
    let Inputs { hidden: g, pair } = draft.inputs;
    let DraftWeights { embed_norm, hidden_norm, project, .. } = &draft.weights;
    let backend = &mut *pass.backend;
    let rms_norm =
        |x, weight: &WeightId, out, rows| Op::RmsNorm { x, weight: *weight, eps, out, rows };
    let mat_mul =
        |weight: &WeightId, x, out| Op::MatMul { weight: *weight, x, out, rows: all.clone() };
    let copy = |x, out, from, to| {
        let columns = Columns { from, to, width: hidden };
        Op::Copy { x, out, columns, rows: all.clone() }
    };
    // The source may be the residual that is written below.
    let rows = first..first + n_rows;
    match norm {
        InputWeights::Norm(norm) => {
            backend.record(rms_norm(source, norm, x, rows));
            backend.record(rms_norm(x, hidden_norm, g, all.clone()));
        }
        InputWeights::Streams(_) => backend.record(rms_norm(source, hidden_norm, g, rows)),
    }
    let streams = geometry.streams.map_or(1, |shape| shape.count);
    backend.record(Op::Embed { table, out: x });
    backend.record(rms_norm(x, embed_norm, y, all.clone()));
    match project {
        DraftProjection::Joined(project) => {
            let pair = pair.expect("a joined projection has its buffer");
            backend.record(copy(y, pair, 0, 0));
            for stream in (0..streams).map(|stream| stream * hidden) {
                backend.record(copy(g, pair, stream, hidden));
                backend.record(mat_mul(project, pair, y));
                backend.record(copy(y, h, 0, stream));
            }
        }
        DraftProjection::Apart { embed, hidden: project } => {
            backend.record(mat_mul(embed, y, x));
            backend.record(Op::Repeat { x, out: h });
            for stream in (0..streams).map(|stream| stream * hidden) {
                backend.record(copy(g, x, stream, 0));
                backend.record(mat_mul(project, x, y));
                backend.record(copy(y, g, 0, stream));
            }
            backend.record(Op::Add { x: g, to: h });
        }
    }
}

/// Drafts, of a network that was loaded with its draft head.
impl Network {
    /// Whether the draft head is loaded.
    pub const fn has_draft(&self) -> bool {
        self.draft.is_some()
    }

    /// Runs the draft head over `rows` and hands the logits of the wanted rows to `sink` as `(row, [vocab])`.
    ///
    /// A row's position is that of the hidden state, its token the one that *follows* there; its logits are for the
    /// token after that. Rows are consecutive rows of the last pass of the trunk ([`DraftFrom::Trunk`]), in any pieces
    /// and any number of times until the next pass; or they follow rows of the last draft ([`DraftFrom::Draft`]).
    /// Entries of the draft's caches from the first row's position on are replaced, so a draft is taken back by going
    /// on from a smaller position. The trunk is not changed, whatever happens.
    ///
    /// # Errors
    /// See [`ForwardError`]. Rows that take the trunk's hidden states may be tried again.
    ///
    /// # Panics
    /// If the draft head is not loaded, a hidden state is not at hand, or a position is beyond the end of what the
    /// draft's caches hold.
    pub fn draft(
        &mut self,
        rows: &[Row],
        from: DraftFrom,
        want: LogitRows,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        self.check(rows)?;
        let draft = self.draft.as_mut().expect("the draft head is loaded");
        let first = draft.source(rows, from).expect("hidden states of all rows are at hand");
        for rows in rows.chunk_by(|a, b| a.sequence == b.sequence) {
            let (held, start) = (*draft.held_by(rows[0].sequence), rows[0].position);
            assert!(start as usize <= held, "position {start} of a draft that holds {held}");
        }
        draft.rows.clear();
        self.experts.end_idle(&mut *self.backend);
        self.backend.begin_pass(rows);
        self.draft_layer(rows.len(), from, first)?;
        let draft = self.draft.as_mut().expect("it was there above");
        for row in rows {
            *draft.held_by(row.sequence) = row.position as usize + 1;
        }
        draft.rows.extend(rows.iter().map(Place::of));
        let (buffers, input) = (draft.buffers, draft.weights.head_input);
        self.heads(rows, want, (&buffers, &input), sink)
    }

    /// Keeps rows of the trunk's last pass, which the draft head is to read later: many at once read fewer experts
    /// than one by one. How many rows of the sequence wait.
    ///
    /// # Panics
    /// If the draft head is not loaded, a hidden state is not at hand, the rows are not of one sequence, or more than
    /// [`LATE_ROWS`] would wait.
    pub fn put_off_draft(&mut self, rows: &[Row]) -> usize {
        let width = self.geometry.residual_width();
        let draft = self.draft.as_mut().expect("the draft head is loaded");
        let first = draft.source(rows, DraftFrom::Trunk).expect("hidden states are at hand");
        let late = draft.late_of(rows[0].sequence);
        assert!(rows.iter().all(|row| row.sequence == late.sequence), "rows of one sequence");
        assert!(late.rows.len() + rows.len() <= LATE_ROWS, "no more than may wait");
        for (row, source) in rows.iter().zip(first..) {
            late.rows.push(*row);
            let start = late.hidden.len();
            late.hidden.resize(start + width, 0.0);
            self.backend.read_back(self.buffers.h, source, &mut late.hidden[start..]);
        }
        late.rows.len()
    }

    /// Runs the draft head over the rows that wait, as [`Network::draft`] does. The hidden states of the trunk's last
    /// pass are no longer at hand then, but for those that waited.
    ///
    /// # Errors
    /// See [`ForwardError`].
    ///
    /// # Panics
    /// If the draft head is not loaded, or no row of the sequence waits.
    pub fn draft_late(
        &mut self,
        sequence: SequenceId,
        want: LogitRows,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), ForwardError> {
        let draft = self.draft.as_mut().expect("the draft head is loaded");
        let Late { rows, hidden, .. } = draft.late_of(sequence);
        let (mut rows, hidden) = (std::mem::take(rows), hidden);
        self.backend.upload(self.buffers.h, 0, hidden);
        hidden.clear();
        draft.trunk.clear();
        draft.trunk.extend(rows.iter().map(Place::of));
        let outcome = self.draft(&rows, DraftFrom::Trunk, want, sink);
        rows.clear();
        // Its allocation is used again.
        self.draft.as_mut().expect("it was there above").late_of(sequence).rows = rows;
        outcome
    }

    fn draft_layer(
        &mut self,
        n_rows: usize,
        from: DraftFrom,
        first: usize,
    ) -> Result<(), ForwardError> {
        let draft = self.draft.as_ref().expect("the caller has it");
        let mut pass = Pass {
            backend: &mut *self.backend,
            experts: &mut self.experts,
            ngrams: None,
            geometry: &self.geometry,
            buffers: &draft.buffers,
            rope: self.rope,
            n_rows,
            routes: None,
            verify: None,
            n_layers: self.config.n_layers,
            sweep: false,
            guesser: None,
            recording: None,
        };
        let (source, norm) = match from {
            DraftFrom::Trunk => (self.buffers.h, &self.weights.head_input),
            DraftFrom::Draft => (draft.buffers.h, &draft.weights.head_input),
        };
        record_input(&mut pass, draft, self.weights.embed, (source, first), norm);
        // Its caches are the last of all layers with attention.
        let state = self.geometry.kv_layers - 1;
        pass.layer(LayerIndex(self.config.n_layers), state, &draft.weights.layer, None)
    }

    /// The residual of a row of the last draft: all streams, `[streams·hidden]`.
    ///
    /// # Panics
    /// If the last draft had no such row.
    pub fn draft_residual(&mut self, row: usize) -> Vec<f32> {
        let draft = self.draft.as_ref().expect("the draft head is loaded");
        assert!(row < draft.rows.len(), "row {row} of {}", draft.rows.len());
        let mut values = vec![0.0; self.geometry.residual_width()];
        self.backend.read_back(draft.buffers.h, row, &mut values);
        values
    }

    /// What the head takes from a row of the last draft, `[hidden]`.
    ///
    /// # Panics
    /// If the last draft had no such row, or the trunk has computed since.
    pub fn draft_head_input(&mut self, row: usize) -> Vec<f32> {
        let draft = self.draft.as_ref().expect("the draft head is loaded");
        assert!(row < draft.rows.len(), "row {row} of {}", draft.rows.len());
        let (buffers, weights) = (&draft.buffers, &draft.weights.head_input);
        streams::record_input(&mut *self.backend, &self.geometry, buffers, weights, row..row + 1);
        let mut values = vec![0.0; self.geometry.hidden];
        self.backend.read_back(buffers.x, 0, &mut values);
        values
    }

    /// Forgets what the draft's caches hold of a sequence from position `held` on.
    ///
    /// # Panics
    /// If the draft head is not loaded.
    pub fn cut_draft(&mut self, sequence: SequenceId, held: usize) {
        self.draft.as_mut().expect("the draft head is loaded").cut(sequence, held);
    }

    /// Positions that the draft's caches hold of a sequence.
    ///
    /// # Panics
    /// If the draft head is not loaded.
    pub fn draft_len(&mut self, sequence: SequenceId) -> usize {
        *self.draft.as_mut().expect("the draft head is loaded").held_by(sequence)
    }
}

/// A sequence with what its draft needs.
impl Network {
    /// Remembers the recurrent state of a sequence as it is now; with a draft head, also the trunk's last hidden state
    /// if that is of this sequence.
    ///
    /// # Errors
    /// [`ComputeError::OutOfMemory`].
    pub fn snapshot(&mut self, sequence: SequenceId) -> Result<SnapshotId, ComputeError> {
        let snapshot = self.backend.snapshot(sequence)?;
        if let Some(draft) = &mut self.draft {
            let width = self.geometry.residual_width();
            draft.save(&mut *self.backend, self.buffers.h, width, (sequence, snapshot));
        }
        Ok(snapshot)
    }

    /// Puts a remembered state back; the next row continues at the position where it was taken.
    ///
    /// With a draft head, the hidden state before that position is at hand again: the draft's entry there depends on
    /// the token that follows, and is made anew before those of later rows.
    pub fn rollback(&mut self, sequence: SequenceId, snapshot: SnapshotId) {
        self.backend.rollback(sequence, snapshot);
        if let Some(draft) = &mut self.draft {
            draft.restore(&mut *self.backend, self.buffers.h, (sequence, snapshot));
        }
    }

    /// Frees a remembered state.
    pub fn drop_snapshot(&mut self, snapshot: SnapshotId) {
        self.backend.drop_snapshot(snapshot);
        if let Some(draft) = &mut self.draft {
            draft.drop_snapshot(snapshot);
        }
    }
}
