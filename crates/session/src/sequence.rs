//! One conversation's sequence: which tokens it holds, how a prompt enters it, how tokens follow.
//!
//! A prompt enters in passes that start on the absolute 64-token grid, so that its bits do not depend on where the
//! passes end. The recurrent state at the start of the last pass is remembered: the next turn begins there if its
//! text agrees so far, and reads everything after it, also the generated tokens, as prompt.

use std::time::{Duration, Instant};

use compute::backend::{Role, Row, SequenceId, SnapshotId};
use expert_store::NgramCounters;
use model::{DraftFrom, ExpertCounters, ForwardError, LogitRows, Network};

use crate::generate::PromptError;
use crate::speculate::{Choose, Speculation, SpeculationCounters};

/// Rows of a pass are a multiple of this, except for the last pass of a prompt.
pub const GRID: usize = 64;

/// Time and bytes of one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Phase {
    /// Tokens that were run through the network.
    pub tokens: u64,
    /// Wall time.
    pub elapsed: Duration,
    /// What moved.
    pub experts: ExpertCounters,
    /// Rows of the n-gram table; nothing if the model has none.
    pub ngrams: NgramCounters,
}

impl Phase {
    /// Tokens per second; 0 for an empty phase.
    pub fn rate(&self) -> f64 {
        let seconds = self.elapsed.as_secs_f64();
        if seconds > 0.0 { self.tokens as f64 / seconds } else { 0.0 }
    }

    /// Adds another phase.
    pub fn add(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.elapsed += other.elapsed;
        self.experts = self.experts.plus(&other.experts);
        self.ngrams = self.ngrams.plus(&other.ngrams);
    }
}

/// The beginning of a phase.
pub(crate) struct Mark {
    started: Instant,
    experts: ExpertCounters,
    ngrams: NgramCounters,
}

impl Mark {
    pub(crate) fn now(network: &Network) -> Self {
        Self {
            started: Instant::now(),
            experts: network.experts().counters(),
            ngrams: network.ngram_counters(),
        }
    }

    /// What happened since, while so many tokens were run.
    pub(crate) fn phase(&self, network: &Network, tokens: u64) -> Phase {
        Phase {
            tokens,
            elapsed: self.started.elapsed(),
            experts: network.experts().counters().minus(&self.experts),
            ngrams: network.ngram_counters().minus(&self.ngrams),
        }
    }
}

/// Tokens that the network has seen, and its state.
#[derive(Debug)]
pub struct Sequence {
    id: SequenceId,
    tokens: Vec<u32>,
    /// State at a position that a later prompt can start from.
    checkpoint: Option<(SnapshotId, usize)>,
    /// Set while the network may have stopped halfway.
    broken: bool,
    /// Who guesses ahead, if anyone.
    speculation: Option<Speculation>,
    /// Rows of a pass with guesses.
    guessed: Vec<Row>,
}

/// Takes the position and the logits `[vocab]` of a row.
type Sink<'a> = &'a mut dyn FnMut(usize, &[f32]);

impl Sequence {
    /// An empty sequence.
    ///
    /// # Errors
    /// Out of memory.
    pub fn open(network: &mut Network) -> Result<Self, ForwardError> {
        Ok(Self {
            id: network.open_sequence()?,
            tokens: Vec::new(),
            checkpoint: None,
            broken: false,
            speculation: None,
            guessed: Vec::new(),
        })
    }

    /// The same with guesses ahead. They change how long an answer takes, and nothing else.
    #[must_use]
    pub fn with_speculation(self, speculation: Speculation) -> Self {
        Self { speculation: Some(speculation), ..self }
    }

    /// What came of guesses so far.
    pub fn speculation_counters(&self) -> SpeculationCounters {
        self.speculation.as_ref().map(Speculation::counters).unwrap_or_default()
    }

    /// Its name in the network.
    pub const fn id(&self) -> SequenceId {
        self.id
    }

    /// All tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Makes the sequence hold exactly `prompt`, and hands the logits of the wanted rows to `sink` as
    /// `(position, [vocab])`. Reads no more than is new, in whole passes of at most `pass_rows`.
    ///
    /// # Errors
    /// See [`ForwardError`]. The next prompt starts from nothing.
    pub fn prefill(
        &mut self,
        network: &mut Network,
        prompt: &Prompt<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Phase, ForwardError> {
        match self.speculation.take() {
            None => self.read(network, prompt, sink, None),
            Some(mut speculation) => {
                let mut unseen = |_: usize, _: &[f32]| {};
                let drafts: Option<Sink<'_>> =
                    if speculation.reads_prompts() { Some(&mut unseen) } else { None };
                let phase = self.read(network, prompt, sink, drafts);
                speculation.begin(&self.tokens);
                self.speculation = Some(speculation);
                phase
            }
        }
    }

    /// The same, and lets the draft head read along as far as the token that follows a row is known: `drafts` gets its
    /// logits of the same rows, or of the last of them. Those of position `p` are for the token at `p + 2`.
    ///
    /// # Errors
    /// See [`ForwardError`]. The next prompt starts from nothing.
    ///
    /// # Panics
    /// If the draft head is not loaded.
    pub fn prefill_with_draft(
        &mut self,
        network: &mut Network,
        prompt: &Prompt<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
        drafts: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<Phase, ForwardError> {
        self.read(network, prompt, sink, Some(drafts))
    }

    fn read(
        &mut self,
        network: &mut Network,
        prompt: &Prompt<'_>,
        sink: &mut dyn FnMut(usize, &[f32]),
        mut drafts: Option<Sink<'_>>,
    ) -> Result<Phase, ForwardError> {
        let mark = Mark::now(network);
        let first = self.rewind(network, prompt);
        let mut position = first;
        self.broken = true;
        if let (Some(last), Some(_)) = (first.checked_sub(1), &drafts) {
            // Its entry in the draft's caches has seen what followed in the turn before.
            let row = self.rows(&prompt.tokens[first..=first], last, Role::Prompt);
            network.draft(&row, DraftFrom::Trunk, LogitRows::None, &mut |_, _| {})?;
        }
        while position < prompt.tokens.len() {
            let end = prompt.tokens.len().min(position + prompt.pass_rows);
            let last = end == prompt.tokens.len();
            if last && position > first {
                self.remember(network, position)?;
            }
            let want = match (prompt.every_row, last) {
                (true, _) => LogitRows::All,
                (false, true) => LogitRows::Last,
                (false, false) => LogitRows::None,
            };
            let rows = self.rows(&prompt.tokens[position..end], position, Role::Prompt);
            network.forward(&rows, want, &mut |row, logits| sink(position + row, logits))?;
            if let Some(drafts) = &mut drafts {
                let next = &prompt.tokens[position + 1..prompt.tokens.len().min(end + 1)];
                let rows = self.rows(next, position, Role::Prompt);
                let sink = &mut |row, logits: &[f32]| drafts(position + row, logits);
                if !rows.is_empty() {
                    network.draft(&rows, DraftFrom::Trunk, want, sink)?;
                }
            }
            self.tokens.extend_from_slice(&prompt.tokens[position..end]);
            position = end;
            if !(prompt.progress)(position - first, prompt.tokens.len() - first) {
                break;
            }
        }
        self.broken = false;
        Ok(mark.phase(network, (position - first) as u64))
    }

    /// Appends one generated token and hands the logits after it to `sink`.
    ///
    /// # Errors
    /// See [`ForwardError`].
    pub fn step(
        &mut self,
        network: &mut Network,
        token: u32,
        sink: &mut dyn FnMut(&[f32]),
    ) -> Result<(), ForwardError> {
        let row = Row {
            sequence: self.id,
            position: self.tokens.len() as u32,
            role: Role::Generated,
            token,
        };
        self.broken = true;
        network.forward(&[row], LogitRows::Last, &mut |_, logits| sink(logits))?;
        self.broken = false;
        self.tokens.push(token);
        Ok(())
    }

    /// Runs `token`, with guesses of what follows it if anyone guesses, at most `room` rows. `choose` gets the logits
    /// of every row that stays; how many these are.
    ///
    /// # Errors
    /// See [`ForwardError`].
    pub(crate) fn advance(
        &mut self,
        network: &mut Network,
        token: u32,
        room: usize,
        choose: Choose<'_>,
    ) -> Result<usize, ForwardError> {
        let Some(mut speculation) = self.speculation.take() else {
            self.step(network, token, &mut |logits| {
                choose(0, logits);
            })?;
            return Ok(1);
        };
        // The rest of the context.
        let room = room.min(network.options().context_tokens.saturating_sub(self.tokens.len()));
        self.broken = true;
        let rows = speculation.advance(network, self, token, room.max(1), choose);
        self.broken = rows.is_err();
        self.speculation = Some(speculation);
        rows
    }

    /// Runs a token and guesses of those after it, and takes back what was not chosen; how many rows stay.
    pub(crate) fn verify(
        &mut self,
        network: &mut Network,
        tokens: &[u32],
        choose: Choose<'_>,
    ) -> Result<usize, ForwardError> {
        if let [token] = tokens {
            self.step(network, *token, &mut |logits| {
                choose(0, logits);
            })?;
            return Ok(1);
        }
        self.broken = true;
        let (id, start) = (self.id, self.tokens.len());
        let row = |(i, &token)| Row {
            sequence: id,
            position: (start + i) as u32,
            role: Role::Generated,
            token,
        };
        self.guessed.clear();
        self.guessed.extend(tokens.iter().enumerate().map(row));
        let mut kept = 1;
        network.verify(&self.guessed, &mut |row, logits| {
            // Rows after another choice have seen what was never said.
            if row + 1 == kept {
                let choice = choose(row, logits);
                kept += usize::from(choice.is_some() && choice.as_ref() == tokens.get(row + 1));
            }
        })?;
        network.keep(kept);
        self.broken = false;
        self.tokens.extend_from_slice(&tokens[..kept]);
        Ok(kept)
    }

    /// Goes back to the remembered state if the prompt agrees up to there, else to nothing; the position.
    fn rewind(&mut self, network: &mut Network, prompt: &Prompt<'_>) -> usize {
        let agrees = |at: usize| {
            !self.broken && at < prompt.tokens.len() && self.tokens[..at] == prompt.tokens[..at]
        };
        match self.checkpoint {
            Some((snapshot, at)) if agrees(at) && !prompt.from_nothing => {
                network.rollback(self.id, snapshot);
                self.tokens.truncate(at);
                at
            }
            _ => {
                self.forget(network);
                network.reset(self.id);
                self.tokens.clear();
                0
            }
        }
    }

    fn remember(&mut self, network: &mut Network, position: usize) -> Result<(), ForwardError> {
        self.forget(network);
        self.checkpoint = Some((network.snapshot(self.id)?, position));
        Ok(())
    }

    /// Gives this sequence up for measurements: the state as it is now, in the memory of the one that was remembered.
    pub(crate) fn abandon(&mut self, network: &mut Network) -> Result<SnapshotId, ForwardError> {
        self.forget(network);
        self.broken = true;
        Ok(network.snapshot(self.id)?)
    }

    fn forget(&mut self, network: &mut Network) {
        if let Some((snapshot, _)) = self.checkpoint.take() {
            network.drop_snapshot(snapshot);
        }
    }

    fn rows(&self, tokens: &[u32], start: usize, role: Role) -> Vec<Row> {
        let row =
            |(i, &token)| Row { sequence: self.id, position: (start + i) as u32, role, token };
        tokens.iter().enumerate().map(row).collect()
    }
}

/// A prompt and how to read it.
pub struct Prompt<'a> {
    /// All tokens from position 0, at least one.
    pub tokens: &'a [u32],
    /// Rows of a pass, a multiple of [`GRID`].
    pub pass_rows: usize,
    /// Logits of every row instead of the last.
    pub every_row: bool,
    /// Do not reuse a remembered state.
    pub from_nothing: bool,
    /// Called after each pass with tokens read and to read; `false` stops.
    pub progress: &'a dyn Fn(usize, usize) -> bool,
}

impl<'a> Prompt<'a> {
    /// As [`Self::new`], for tokens that may be none.
    ///
    /// # Errors
    /// [`PromptError::Empty`].
    pub fn new_checked(tokens: &'a [u32], pass_rows: usize) -> Result<Self, PromptError> {
        if tokens.is_empty() { Err(PromptError::Empty) } else { Ok(Self::new(tokens, pass_rows)) }
    }

    /// The usual: logits after the last token.
    ///
    /// # Panics
    /// If there is no token, or `pass_rows` is not on the grid.
    pub fn new(tokens: &'a [u32], pass_rows: usize) -> Self {
        assert!(!tokens.is_empty(), "a prompt has at least one token");
        assert!(
            pass_rows > 0 && pass_rows.is_multiple_of(GRID),
            "passes start on the 64-token grid"
        );
        Self { tokens, pass_rows, every_row: false, from_nothing: false, progress: &|_, _| true }
    }
}
