//! Beginnings of prompts that are kept, so that they need not be read again.
//!
//! What is kept is what sequences hold, copied out of one and into another: rows of caches by block of the 64-token
//! grid, and the recurrent state at some points. Only what was read as prompt is kept: a generated row has other bits
//! than the same row of a prompt. So a prompt that goes on from a point gives the bits of one that was read whole.
//!
//! First `tree.rs` (memory), then `disk.rs` (files, which go through the tree).

mod disk;
mod file;
mod tree;

use std::collections::VecDeque;
use std::ops::Range;

use checkpoint::pack::Checksum;
use compute::backend::{Activations, KvType, SequenceId, SnapshotId};
use model::Network;

use super::seat::common;
use super::stats::PrefixCounters;
use super::{SchedulerOptions, StartError};
use crate::engine::Engine;
use crate::sequence::GRID;
use disk::Disk;
use file::Kind;
use tree::{NodeId, Tree};

/// Texts of which something is to be written. Should there be more, the oldest are not.
const UNWRITTEN: usize = 16;

/// A text that is not on disk yet, or not all of it.
struct Unwritten {
    text: Vec<u32>,
    /// How much of it the disk was given: its blocks, then the state behind it.
    done: usize,
}

/// Prefixes in memory and on disk.
pub(super) struct Prefixes {
    tree: Tree,
    disk: Option<Disk>,
    unwritten: VecDeque<Unwritten>,
    kv: KvType,
    state_bytes: usize,
    counters: PrefixCounters,
}

/// Positions of a block.
const fn positions(block: usize) -> Range<usize> {
    block * GRID..(block + 1) * GRID
}

/// What bits depend on besides tokens.
fn identity(engine: &Engine) -> u64 {
    let mut sum = Checksum::new();
    sum.update(&crate::hot_set::files_identity(&engine.checkpoint).to_le_bytes());
    let kv = u8::from(engine.options.kv == KvType::F32);
    let activations = u8::from(engine.options.activations == Activations::F32);
    sum.update(&[kv, activations]);
    sum.update(&compute::CONTRACT.to_le_bytes());
    // A draft head has rows of its own.
    let network = &engine.network;
    let sizes = [network.rows_bytes(engine.options.kv, &(0..GRID)), network.state_bytes()];
    sizes.iter().for_each(|size| sum.update(&(*size as u64).to_le_bytes()));
    sum.value()
}

impl Prefixes {
    pub(super) fn open(engine: &Engine, options: &SchedulerOptions) -> Result<Self, StartError> {
        let kv = engine.options.kv;
        let state_bytes = engine.network.state_bytes();
        let mut budget = engine.options.serving.prefix.0;
        let disk = match &options.disk {
            None => None,
            Some(_) if budget == 0 => return Err(StartError::DiskWithoutMemory),
            Some(disk) => {
                // What is held for writing may have left the tree.
                let rows_bytes = engine.network.rows_bytes(kv, &(0..GRID));
                let held = disk::HELD * rows_bytes.max(state_bytes) as u64;
                let texts = 4 * (UNWRITTEN as u64 + disk::HELD) * u64::from(engine.plan.context);
                budget = budget.saturating_sub(held + texts + disk::INDEX_BYTES);
                let opened = Disk::open(disk, identity(engine), options.notice);
                let folder = || disk.folder.clone();
                Some(opened.map_err(|source| StartError::Folder { folder: folder(), source })?)
            }
        };
        let tree = Tree::new(budget, state_bytes > 0);
        let counters = PrefixCounters::default();
        Ok(Self { tree, disk, unwritten: VecDeque::new(), kv, state_bytes, counters })
    }

    /// Tokens of a prompt that need not be read, as far as memory knows.
    pub(super) fn reusable(&self, prompt: &[u32]) -> usize {
        GRID * self.tree.usable(&self.path(prompt))
    }

    /// Tokens of a prompt that are known, even if it cannot go on there: others began the same, and more may.
    pub(super) fn known(&self, prompt: &[u32]) -> usize {
        GRID * self.path(prompt).len()
    }

    /// The nodes that a prompt can begin with: a row is left to give logits.
    fn path(&self, prompt: &[u32]) -> Vec<NodeId> {
        self.tree.path(&prompt[..common(prompt, prompt)])
    }

    /// Brings what disk knows of a prompt into memory, if that is more than `held` tokens of it; how many tokens that
    /// adds to those that can be reused.
    pub(super) fn load(&mut self, network: &Network, prompt: &[u32], held: usize) -> usize {
        let before = self.reusable(prompt).max(held);
        let added = |this: &Self| this.reusable(prompt).saturating_sub(before);
        let prompt = &prompt[..common(prompt, prompt)];
        let Some(disk) = &self.disk else { return 0 };
        let mut path = self.tree.path(prompt);
        let known = path.len();
        let is_there = |blocks: &usize| disk.has(&prompt[..blocks * GRID], Kind::Rows);
        let last = (known + 1..=prompt.len() / GRID).take_while(is_there).last().unwrap_or(known);
        let useful = |blocks: &usize| {
            self.state_bytes == 0 || disk.has(&prompt[..blocks * GRID], Kind::State)
        };
        let Some(last) = (1..=last).rev().find(useful).filter(|last| last * GRID > before) else {
            return 0;
        };
        self.tree.touch(&path);
        for blocks in known + 1..=last {
            let text = &prompt[..blocks * GRID];
            let bytes = self.rows_bytes(network, blocks - 1);
            let Some(id) = self.load_block(text, path.last().copied(), bytes) else { break };
            path.push(id);
        }
        let is_whole = path.len() >= last;
        if let (Some(disk), true, true) = (&self.disk, is_whole, self.state_bytes > 0)
            && self.tree.reserve(self.state_bytes)
            && let Some(state) = disk.read(&prompt[..last * GRID], Kind::State, self.state_bytes)
        {
            self.tree.keep_state(path[last - 1], state);
        }
        added(self)
    }

    /// Bytes of the rows of a block.
    fn rows_bytes(&self, network: &Network, block: usize) -> usize {
        network.rows_bytes(self.kv, &positions(block))
    }

    fn load_block(&mut self, text: &[u32], parent: Option<NodeId>, bytes: usize) -> Option<NodeId> {
        if !self.tree.reserve(bytes) {
            return None;
        }
        let rows = self.disk.as_ref()?.read(text, Kind::Rows, bytes)?;
        self.tree.insert(parent, *text.last_chunk::<GRID>()?, rows)
    }

    /// Gives a sequence the first `at` tokens of a prompt, which are reusable; it holds the first `held` of them.
    pub(super) fn restore(
        &mut self,
        network: &mut Network,
        sequence: SequenceId,
        prompt: &[u32],
        (held, at): (usize, usize),
    ) {
        let mut path = self.path(prompt);
        path.truncate(at / GRID);
        self.tree.touch(&path);
        for (block, id) in path.iter().enumerate().skip(held / GRID) {
            network.import_rows(sequence, positions(block), self.tree.rows(*id));
        }
        let state = path.last().and_then(|id| self.tree.state(*id));
        network.resume(sequence, &prompt[..at], state.map(|state| &state[..]));
    }

    /// Keeps what a sequence holds of `text`, which ends on the grid, with the state there, of a model that has one.
    pub(super) fn keep(
        &mut self,
        network: &mut Network,
        sequence: SequenceId,
        text: &[u32],
        state: Option<SnapshotId>,
    ) {
        let mut path = self.tree.path(text);
        self.tree.touch(&path);
        let blocks = text.len() / GRID;
        let missing = path.len()..blocks;
        let needs_state = path.len() < blocks || self.tree.usable(&path) < blocks;
        let state = state.filter(|_| needs_state);
        let rows: usize = missing.clone().map(|block| self.rows_bytes(network, block)).sum();
        let needed = rows + state.map_or(0, |_| self.state_bytes);
        if self.state_bytes > 0 && !self.tree.has_room(&path, missing.len(), needed as u64) {
            // Without its end it is of no use.
            return;
        }
        for block in missing {
            let bytes = self.rows_bytes(network, block);
            if !self.tree.reserve(bytes) {
                break;
            }
            let mut rows = vec![0; bytes];
            network.export_rows(sequence, positions(block), &mut rows);
            let tokens = text.as_chunks::<GRID>().0[block];
            let Some(id) = self.tree.insert(path.last().copied(), tokens, rows) else { break };
            path.push(id);
        }
        if let (Some(snapshot), Some(last)) = (state, path.get(blocks.wrapping_sub(1)))
            && self.tree.reserve(self.state_bytes)
        {
            let mut state = vec![0; self.state_bytes];
            network.export_state(snapshot, &mut state);
            self.tree.keep_state(*last, state);
        }
        if self.disk.is_some() {
            self.unwritten.truncate(UNWRITTEN - 1);
            self.unwritten.push_front(Unwritten { text: text.to_vec(), done: 0 });
        }
    }

    /// Hands over what is to be written, as much as the disk takes; with `wait` one thing, whatever it takes. Whether
    /// there is more.
    pub(super) fn write_some(&mut self, wait: bool) -> bool {
        while let (Some(next), Some(disk)) = (self.unwritten.front_mut(), &self.disk) {
            let blocks = next.text.len() / GRID;
            if next.done > blocks {
                self.unwritten.pop_front();
                continue;
            }
            let (kind, end) = if next.done < blocks {
                (Kind::Rows, next.done + 1)
            } else {
                (Kind::State, blocks)
            };
            let text = &next.text[..end * GRID];
            let path = self.tree.path(text);
            let last = path.get(end - 1);
            let content = last.and_then(|id| match kind {
                Kind::Rows => Some(self.tree.rows(*id)),
                Kind::State => self.tree.state(*id),
            });
            // What has left memory by now is not written, nor what is there.
            let content = content.filter(|_| !disk.has(text, kind));
            if let Some(content) = content
                && !disk.write(text, kind, content, wait)
            {
                return true;
            }
            next.done += 1;
            if wait && content.is_some() {
                break;
            }
        }
        !self.unwritten.is_empty()
    }

    /// A prompt was looked up, and so many tokens of it were not read again: held by its sequence, or from here, of which
    /// some came from disk.
    pub(super) fn count(&mut self, held: usize, restored: usize, from_disk: usize) {
        let counters = &mut self.counters;
        let from_disk = from_disk.min(restored);
        counters.lookups += 1;
        counters.hits += u64::from(held + restored > 0);
        counters.held_rows += held as u64;
        counters.memory_rows += (restored - from_disk) as u64;
        counters.disk_rows += from_disk as u64;
    }

    pub(super) fn counters(&self) -> PrefixCounters {
        let disk = self.disk.as_ref().map(Disk::counters).unwrap_or_default();
        let ((bytes, evicted_bytes), (blocks, states)) = (self.tree.bytes(), self.tree.count());
        PrefixCounters {
            blocks,
            states,
            bytes,
            evicted_bytes,
            disk_bytes: disk.bytes,
            disk_files: disk.files,
            disk_written_bytes: disk.written_bytes,
            disk_read_bytes: disk.read_bytes,
            disk_dropped: disk.dropped,
            disk_failed: disk.failed,
            ..self.counters
        }
    }
}
