//! Prefixes in memory: a tree of blocks of the grid.
//!
//! A path from a root spells the beginning of a prompt, 64 tokens a node; prompts that begin the same share nodes. A node
//! keeps what a sequence's caches hold of its positions, and perhaps the recurrent state behind its last token. Of a
//! model that has such a state, a prompt can go on only behind nodes that keep one.
//!
//! Bytes are bounded. What has to leave is the least recently used end of a path, or state in the middle of one: so what
//! is left always begins at a root.

use std::sync::Arc;

use crate::sequence::GRID;

/// Tokens of a block.
pub(super) type Block = [u32; GRID];

/// Bytes of a node apart from what it keeps: its tokens, its place in tables, the allocator's share.
const NODE_BYTES: u64 = 640;

/// A node of a tree, until it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct NodeId(usize);

/// Something that is kept, and when it was used last.
struct Kept {
    bytes: Arc<Vec<u8>>,
    used: u64,
}

struct Node {
    tokens: Block,
    parent: Option<NodeId>,
    children: Vec<NodeId>,
    rows: Kept,
    state: Option<Kept>,
}

impl Node {
    fn bytes(&self) -> u64 {
        let state = self.state.as_ref().map_or(0, |state| state.bytes.len());
        NODE_BYTES + (self.rows.bytes.len() + state) as u64
    }
}

/// What can leave at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    State(NodeId),
    Leaf(NodeId),
}

/// The tree.
pub(super) struct Tree {
    budget: u64,
    /// Whether a path is of use only up to a state.
    needs_state: bool,
    nodes: Vec<Option<Node>>,
    roots: Vec<NodeId>,
    clock: u64,
    bytes: u64,
    evicted_bytes: u64,
}

impl Tree {
    pub(super) fn new(budget: u64, needs_state: bool) -> Self {
        let (nodes, roots) = (Vec::new(), Vec::new());
        Self { budget, needs_state, nodes, roots, clock: 0, bytes: 0, evicted_bytes: 0 }
    }

    /// Bytes that are kept, and bytes that have left.
    pub(super) const fn bytes(&self) -> (u64, u64) {
        (self.bytes, self.evicted_bytes)
    }

    /// Nodes and states.
    pub(super) fn count(&self) -> (u64, u64) {
        let nodes = self.nodes.iter().flatten();
        nodes.fold((0, 0), |(n, states), node| (n + 1, states + u64::from(node.state.is_some())))
    }

    fn node(&self, id: NodeId) -> &Node {
        self.nodes[id.0].as_ref().expect("a node that has not left")
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        self.nodes[id.0].as_mut().expect("a node that has not left")
    }

    /// The nodes that a text begins with.
    pub(super) fn path(&self, text: &[u32]) -> Vec<NodeId> {
        let (mut path, mut level) = (Vec::new(), &self.roots);
        for block in text.as_chunks::<GRID>().0 {
            let Some(id) = level.iter().find(|id| self.node(**id).tokens == *block) else { break };
            path.push(*id);
            level = &self.node(*id).children;
        }
        path
    }

    /// How many nodes of a path a prompt can go on behind.
    pub(super) fn usable(&self, path: &[NodeId]) -> usize {
        let last = |id: &NodeId| !self.needs_state || self.node(*id).state.is_some();
        path.iter().rposition(last).map_or(0, |last| last + 1)
    }

    pub(super) fn rows(&self, id: NodeId) -> &Arc<Vec<u8>> {
        &self.node(id).rows.bytes
    }

    pub(super) fn state(&self, id: NodeId) -> Option<&Arc<Vec<u8>>> {
        self.node(id).state.as_ref().map(|state| &state.bytes)
    }

    /// A path is in use now. Of its states, the last one is.
    pub(super) fn touch(&mut self, path: &[NodeId]) {
        self.clock += 1;
        let now = self.clock;
        for id in path {
            self.node_mut(*id).rows.used = now;
        }
        if let Some(state) = path.last().and_then(|id| self.node_mut(*id).state.as_mut()) {
            state.used = now;
        }
    }

    /// Whether `bytes` more than a path takes could be kept beside it.
    pub(super) fn has_room(&self, path: &[NodeId], blocks: usize, bytes: u64) -> bool {
        let rows = |id: &NodeId| NODE_BYTES + self.node(*id).rows.bytes.len() as u64;
        let path: u64 = path.iter().map(rows).sum();
        path + bytes + blocks as u64 * NODE_BYTES <= self.budget
    }

    /// Makes room for so many bytes of a node or of a state before they are taken from anywhere. Whether there is, beside
    /// what is in use now.
    pub(super) fn reserve(&mut self, bytes: usize) -> bool {
        self.make_room(NODE_BYTES + bytes as u64)
    }

    /// Adds a node behind `parent`; nothing if there is no room beside what is in use now.
    pub(super) fn insert(
        &mut self,
        parent: Option<NodeId>,
        tokens: Block,
        rows: Vec<u8>,
    ) -> Option<NodeId> {
        let rows = Kept { bytes: Arc::new(rows), used: self.clock };
        let node = Node { tokens, parent, children: Vec::new(), rows, state: None };
        if !self.make_room(node.bytes()) {
            return None;
        }
        self.bytes += node.bytes();
        let free = self.nodes.iter().position(Option::is_none).unwrap_or(self.nodes.len());
        if free == self.nodes.len() {
            self.nodes.push(None);
        }
        self.nodes[free] = Some(node);
        let id = NodeId(free);
        match parent {
            Some(parent) => self.node_mut(parent).children.push(id),
            None => self.roots.push(id),
        }
        Some(id)
    }

    /// Keeps the state behind a node, if there is room beside what is in use now.
    pub(super) fn keep_state(&mut self, id: NodeId, state: Vec<u8>) {
        let now = self.clock;
        if self.node(id).state.is_none() && self.make_room(state.len() as u64) {
            self.bytes += state.len() as u64;
            self.node_mut(id).state = Some(Kept { bytes: Arc::new(state), used: now });
        }
    }

    fn make_room(&mut self, bytes: u64) -> bool {
        while self.bytes + bytes > self.budget {
            let Some(victim) = self.victim() else { return false };
            match victim {
                Victim::State(id) => self.drop_state(id),
                Victim::Leaf(id) => self.drop_leaf(id),
            }
        }
        true
    }

    /// The least recently used of all that can leave, and that is not in use now.
    fn victim(&self) -> Option<Victim> {
        let (now, nodes) = (self.clock, self.nodes.iter().enumerate());
        let of = |(at, node): (usize, &Option<Node>)| {
            let (id, node) = (NodeId(at), node.as_ref()?);
            let (used, victim) = match &node.state {
                _ if node.children.is_empty() => (node.rows.used, Victim::Leaf(id)),
                Some(state) => (state.used, Victim::State(id)),
                None => return None,
            };
            (used < now).then_some((used, victim))
        };
        nodes.filter_map(of).min().map(|(_, victim)| victim)
    }

    fn drop_state(&mut self, id: NodeId) {
        let state = self.node_mut(id).state.take().expect("a state is there");
        self.forget(state.bytes.len() as u64);
    }

    /// Drops a leaf, and what before it is of no use without it.
    fn drop_leaf(&mut self, leaf: NodeId) {
        let mut next = Some(leaf);
        while let Some(id) = next.take() {
            let node = self.nodes[id.0].take().expect("a node that has not left");
            self.forget(node.bytes());
            let Some(parent) = node.parent else {
                self.roots.retain(|root| *root != id);
                return;
            };
            let now = self.clock;
            let left = self.node_mut(parent);
            left.children.retain(|child| *child != id);
            let of_no_use =
                left.children.is_empty() && left.state.is_none() && left.rows.used < now;
            next = (self.needs_state && of_no_use).then_some(parent);
        }
    }

    const fn forget(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.evicted_bytes += bytes;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROWS: usize = 1000;
    const STATE: usize = 3000;

    fn text(of: &[u32]) -> Vec<u32> {
        of.iter().flat_map(|block| [*block; GRID]).collect()
    }

    /// Adds what is missing of a text, with a state at its end.
    fn add(tree: &mut Tree, of: &[u32], with_state: bool) {
        let text = text(of);
        let mut path = tree.path(&text);
        tree.touch(&path);
        for block in &text.as_chunks::<GRID>().0[path.len()..] {
            let Some(id) = tree.insert(path.last().copied(), *block, vec![block[0] as u8; ROWS])
            else {
                return;
            };
            path.push(id);
        }
        if let Some(last) = path.last().filter(|_| with_state) {
            tree.keep_state(*last, vec![of[of.len() - 1] as u8; STATE]);
        }
    }

    fn usable(tree: &Tree, of: &[u32]) -> usize {
        tree.usable(&tree.path(&text(of)))
    }

    fn check(tree: &Tree) {
        let live = |id: &NodeId| tree.nodes[id.0].is_some();
        let nodes = tree.nodes.iter().enumerate().filter_map(|(i, node)| Some((i, node.as_ref()?)));
        let mut bytes = 0;
        for (i, node) in nodes {
            bytes += node.bytes();
            let siblings = node.parent.map_or(&tree.roots, |parent| &tree.node(parent).children);
            assert!(siblings.contains(&NodeId(i)) && node.children.iter().all(live));
            let same = siblings.iter().filter(|id| tree.node(**id).tokens == node.tokens);
            assert_eq!(same.count(), 1, "a text has one path");
            assert!(node.rows.bytes.iter().all(|byte| u32::from(*byte) == node.tokens[0] % 256));
        }
        assert_eq!(bytes, tree.bytes);
        assert!(tree.bytes <= tree.budget, "{} of {}", tree.bytes, tree.budget);
    }

    #[test]
    fn texts_that_begin_the_same_share_blocks() {
        let mut tree = Tree::new(1 << 20, false);
        add(&mut tree, &[1, 2, 3], false);
        add(&mut tree, &[1, 2, 4], false);
        assert_eq!(tree.count(), (4, 0));
        for (of, expected) in
            [(&[1, 2, 4, 5][..], 3), (&[1, 2, 9], 2), (&[2, 2], 0), (&[], 0), (&[1], 1)]
        {
            assert_eq!(usable(&tree, of), expected, "{of:?}");
        }
        let odd = [text(&[1, 2]), vec![3; GRID - 1]].concat();
        assert_eq!(tree.path(&odd).len(), 2, "a block that is not complete is none");
        check(&tree);
    }

    #[test]
    fn a_state_is_what_makes_a_path_usable_where_there_are_states() {
        let mut tree = Tree::new(1 << 20, true);
        add(&mut tree, &[1, 2], true);
        add(&mut tree, &[1, 2, 3, 4], true);
        assert_eq!(usable(&tree, &[1, 2, 3, 4, 5]), 4);
        assert_eq!(usable(&tree, &[1, 2, 3, 9]), 2);
        assert_eq!(usable(&tree, &[1, 9]), 0);
        check(&tree);
    }

    #[test]
    fn what_was_used_least_recently_leaves_from_its_end() {
        let block = NODE_BYTES + ROWS as u64;
        let mut tree = Tree::new(4 * block, false);
        add(&mut tree, &[1, 2], false);
        add(&mut tree, &[3, 4], false);
        let used = tree.path(&text(&[1, 2]));
        tree.touch(&used);
        add(&mut tree, &[5], false);
        assert_eq!(
            (usable(&tree, &[1, 2]), usable(&tree, &[3, 4]), usable(&tree, &[5])),
            (2, 1, 1)
        );
        // A text that is longer than the budget keeps its beginning.
        add(&mut tree, &[6, 7, 8, 9, 10], false);
        assert_eq!(usable(&tree, &[6, 7, 8, 9, 10]), 4);
        assert_eq!(tree.bytes(), (4 * block, 5 * block));
        check(&tree);
    }

    #[test]
    fn states_in_the_middle_leave_alone_and_blocks_without_use_with_their_end() {
        let block = NODE_BYTES + ROWS as u64;
        let mut tree = Tree::new(3 * block + 2 * STATE as u64, true);
        add(&mut tree, &[1], true);
        add(&mut tree, &[1, 2, 3], true);
        assert_eq!(tree.count(), (3, 2));
        add(&mut tree, &[1, 2, 3], true);
        // The state behind the first block was used least recently.
        add(&mut tree, &[4], true);
        assert_eq!((usable(&tree, &[1]), usable(&tree, &[4])), (0, 1));
        check(&tree);
    }

    proptest! {
        #[test]
        fn the_budget_holds_and_paths_stay_whole(
            texts in prop::collection::vec((prop::collection::vec(1..4_u32, 1..6), any::<bool>()), 1..40),
            budget in 0..30_000_u64,
            needs_state: bool,
        ) {
            let mut tree = Tree::new(budget, needs_state);
            for (of, with_state) in texts {
                add(&mut tree, &of, with_state);
                check(&tree);
            }
        }
    }
}
