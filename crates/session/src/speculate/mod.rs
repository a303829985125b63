//! Speculative decoding: tokens are guessed ahead, and one pass verifies them all.
//!
//! The pass runs the current token and the guesses after it, as generated rows that share every expert that is read.
//! Then tokens are chosen as ever, row by row, each from the logits of the row before. As long as a choice is what
//! had been guessed, its row is there already; the rows after the first other choice are taken back. So a token is
//! chosen from the same bits in the same order, by any sampler, as if nothing had been guessed, and random numbers
//! are used up alike. Guesses decide how long it takes, and nothing else.
//!
//! Guesses come from a [`Drafter`]; how many are worth their time is measured in `pace.rs`.

mod head;
mod lookup;
mod pace;

use std::fmt::Debug;
use std::time::Instant;

use model::{ForwardError, Network};
use serde::Serialize;

use crate::sequence::Sequence;
use head::Head;
use lookup::Lookup;
use pace::Pace;

/// Most guesses of a pass: with the token before them they give the logits that are computed at once.
pub const MOST_GUESSES: u32 = 15;

/// Who guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpeculationOptions {
    /// The text itself, where it repeats.
    pub lookup: bool,
    /// The model's draft head.
    pub draft: bool,
    /// Most guesses of a pass.
    pub most: u32,
}

impl SpeculationOptions {
    /// Whether anybody guesses.
    pub const fn is_on(self) -> bool {
        self.lookup || self.draft
    }

    /// Rows of a pass that may be taken back; 0 if there are never guesses.
    pub const fn rows(self) -> u32 {
        if self.is_on() { self.most.saturating_add(1) } else { 0 }
    }

    /// Memory of the text and of what is found in it.
    pub(crate) fn bytes(self, context_tokens: u32) -> u64 {
        let context = context_tokens as usize;
        let lookup = if self.lookup { Lookup::bytes(context) } else { 0 };
        if self.is_on() { 4 * (context as u64 + 1) + lookup } else { 0 }
    }
}

/// Guesses what comes next.
pub trait Drafter: Debug + Send {
    /// What it is called in messages.
    fn name(&self) -> &'static str;

    /// A prompt of `read` tokens has been read; nothing that came before counts.
    fn begin(&mut self, read: usize);

    /// Adds at most `most` guesses of the tokens that follow `text`. Its last token was chosen and has not been run;
    /// all others have. Called before every pass, also with 0, so that it can follow.
    ///
    /// # Errors
    /// See [`ForwardError`].
    fn propose(
        &mut self,
        network: &mut Network,
        sequence: &Sequence,
        text: &[u32],
        most: usize,
        guesses: &mut Vec<u32>,
    ) -> Result<(), ForwardError>;
}

/// What came of guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct SpeculationCounters {
    /// Tokens that were guessed and run.
    pub drafted: u64,
    /// Of those, chosen.
    pub accepted: u64,
    /// Passes that had guesses.
    pub verify_passes: u64,
    /// Passes that had none.
    pub plain_passes: u64,
}

impl SpeculationCounters {
    /// What happened since `earlier`.
    #[must_use]
    pub const fn minus(&self, earlier: &Self) -> Self {
        Self {
            drafted: self.drafted - earlier.drafted,
            accepted: self.accepted - earlier.accepted,
            verify_passes: self.verify_passes - earlier.verify_passes,
            plain_passes: self.plain_passes - earlier.plain_passes,
        }
    }
}

/// How many guesses a pass gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// As many as there is room for.
    Most,
    /// As many as pay, by what was measured.
    Measured,
}

/// Drafters of a sequence, and what is known about them.
#[derive(Debug)]
pub struct Speculation {
    drafters: Vec<Box<dyn Drafter>>,
    /// Whether one of them is the draft head, which reads prompts too.
    reads_prompts: bool,
    most: usize,
    depth: Depth,
    pace: Pace,
    /// The sequence's tokens and the one that was chosen after them.
    text: Vec<u32>,
    /// The token to be run and the guesses after it.
    pass: Vec<u32>,
    guesses: Vec<u32>,
    counters: SpeculationCounters,
}

/// Takes the number of a row and its logits, and gives the token to be run next, if any is.
pub(crate) type Choose<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Option<u32>;

impl Speculation {
    /// As the options say.
    pub fn new(options: SpeculationOptions, context_tokens: usize) -> Self {
        let mut drafters: Vec<Box<dyn Drafter>> = Vec::new();
        if options.lookup {
            drafters.push(Box::new(Lookup::new(context_tokens)));
        }
        if options.draft {
            drafters.push(Box::<Head>::default());
        }
        let new = Self::of(drafters, options.most as usize, Depth::Measured, context_tokens);
        Self { reads_prompts: options.draft, ..new }
    }

    /// Of any drafters; the first one that has guesses is heard.
    pub fn of(
        drafters: Vec<Box<dyn Drafter>>,
        most: usize,
        depth: Depth,
        context_tokens: usize,
    ) -> Self {
        Self {
            pace: Pace::new(drafters.len(), most),
            drafters,
            reads_prompts: false,
            most,
            depth,
            text: Vec::with_capacity(context_tokens + 1),
            pass: Vec::with_capacity(most + 1),
            guesses: Vec::with_capacity(most),
            counters: SpeculationCounters::default(),
        }
    }

    /// The same with another depth.
    #[must_use]
    pub fn with_depth(self, depth: Depth) -> Self {
        Self { depth, ..self }
    }

    /// Since it began.
    pub const fn counters(&self) -> SpeculationCounters {
        self.counters
    }

    /// Whether the draft head reads prompts along.
    pub(crate) const fn reads_prompts(&self) -> bool {
        self.reads_prompts
    }

    /// A prompt was read.
    pub(crate) fn begin(&mut self, prompt: &[u32]) {
        self.text.clear();
        self.text.extend_from_slice(prompt);
        for drafter in &mut self.drafters {
            drafter.begin(prompt.len());
        }
    }

    /// Runs `token` with what is guessed to follow, at most `room` rows. `choose` gets the logits of every row that
    /// stays; how many these are.
    pub(crate) fn advance(
        &mut self,
        network: &mut Network,
        sequence: &mut Sequence,
        token: u32,
        room: usize,
        choose: Choose<'_>,
    ) -> Result<usize, ForwardError> {
        let started = Instant::now();
        self.text.push(token);
        let most = self.most.min(room - 1).min(network.verify_rows().saturating_sub(1));
        let drafter = self.propose(network, sequence, most)?;
        self.pass.clear();
        self.pass.push(token);
        self.pass.extend_from_slice(&self.guesses);
        let rows = sequence.verify(network, &self.pass, choose)?;
        self.text.extend_from_slice(&self.pass[1..rows]);
        let (drafted, accepted) = (self.guesses.len(), rows - 1);
        self.pace.record(drafter, drafted, accepted, started.elapsed().as_secs_f64());
        self.counters.drafted += drafted as u64;
        self.counters.accepted += accepted as u64;
        let passes = match drafted {
            0 => &mut self.counters.plain_passes,
            _ => &mut self.counters.verify_passes,
        };
        *passes += 1;
        Ok(rows)
    }

    /// Fills `guesses`; the drafter that they are of. The others only follow.
    fn propose(
        &mut self,
        network: &mut Network,
        sequence: &Sequence,
        most: usize,
    ) -> Result<usize, ForwardError> {
        self.guesses.clear();
        let mut heard = 0;
        for (index, drafter) in self.drafters.iter_mut().enumerate() {
            let wanted = match self.depth {
                _ if !self.guesses.is_empty() => 0,
                Depth::Most => most,
                Depth::Measured => self.pace.depth(index).min(most),
            };
            drafter.propose(network, sequence, &self.text, wanted, &mut self.guesses)?;
            if wanted > 0 && !self.guesses.is_empty() {
                heard = index;
            }
        }
        assert!(self.guesses.len() <= most, "a drafter gives no more than it is asked for");
        Ok(heard)
    }
}
