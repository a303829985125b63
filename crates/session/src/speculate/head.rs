//! Guesses of the model's own draft head.
//!
//! It reads along: its row at position `p` takes the trunk's hidden state there and the token that follows. Tokens
//! further ahead come from its own states, which are taken back when the trunk has spoken. While its guesses do not pay
//! it reads dozens of rows at a time: then even following costs little.

use compute::backend::{Role, Row};
use model::{DraftFrom, ForwardError, LATE_ROWS, LogitRows, Network};

use super::{Drafter, MOST_GUESSES};
use crate::sequence::Sequence;

/// A reader of the draft head.
#[derive(Debug, Default)]
pub(super) struct Head {
    /// Positions whose entries in the draft's caches are of the text and of the trunk's states.
    read: usize,
    rows: Vec<Row>,
}

/// The likeliest token; of equals the lower.
fn likeliest(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().reduce(|a, b| if b.1 > a.1 { b } else { a });
    best.map_or(0, |(token, _)| token as u32)
}

impl Drafter for Head {
    fn name(&self) -> &'static str {
        "draft head"
    }

    fn begin(&mut self, read: usize) {
        // The row of the prompt's last token waits for the one that follows.
        self.read = read.saturating_sub(1);
    }

    fn propose(
        &mut self,
        network: &mut Network,
        sequence: &Sequence,
        text: &[u32],
        most: usize,
        guesses: &mut Vec<u32>,
    ) -> Result<(), ForwardError> {
        let row = |position: usize, token| Row {
            sequence: sequence.id(),
            position: position as u32,
            role: Role::Generated,
            token,
        };
        self.rows.clear();
        self.rows.extend((self.read..text.len() - 1).map(|at| row(at, text[at + 1])));
        let waiting = network.put_off_draft(&self.rows);
        self.read = text.len() - 1;
        // Where nothing is to be guessed, nothing is read before there is much of it.
        let full = waiting + MOST_GUESSES as usize >= LATE_ROWS;
        let want = match most {
            0 if full => LogitRows::None,
            0 => return Ok(()),
            _ => LogitRows::Last,
        };
        let mut guess = 0;
        network.draft_late(sequence.id(), want, &mut |_, row| guess = likeliest(row))?;
        for ahead in 1..=most {
            guesses.push(guess);
            if ahead == most {
                break;
            }
            let next = row(self.read - 1 + ahead, guess);
            let sink = &mut |_, row: &[f32]| guess = likeliest(row);
            network.draft(&[next], DraftFrom::Draft, LogitRows::Last, sink)?;
        }
        Ok(())
    }
}
