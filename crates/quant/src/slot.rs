//! Where an expert's matrices lie inside its slot.

use std::ops::Range;

use crate::BlockType;

/// One matrix inside a slot, row-major `[n_out, n_in]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotMatrix {
    /// Byte offset in the slot.
    pub place: u64,
    /// Storage of its rows.
    pub block_type: BlockType,
    /// Values in a row.
    pub n_in: u32,
    /// Rows.
    pub n_out: u32,
}

impl SlotMatrix {
    /// Bytes of one row.
    ///
    /// # Panics
    /// If the row is not made of whole blocks, which the checkpoint reader rules out.
    pub const fn row_bytes(&self) -> usize {
        self.block_type.row_bytes(self.n_in as usize).expect("rows are made of whole blocks")
    }

    /// Bytes of the matrix.
    pub const fn bytes(&self) -> usize {
        self.row_bytes() * self.n_out as usize
    }

    /// Where it lies in the slot.
    pub const fn range(&self) -> Range<usize> {
        self.place as usize..self.place as usize + self.bytes()
    }
}

/// What a SwiGLU expert is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertMatrices {
    /// `[expert_width, hidden]`.
    pub gate: SlotMatrix,
    /// `[expert_width, hidden]`.
    pub up: SlotMatrix,
    /// `[hidden, expert_width]`.
    pub down: SlotMatrix,
}

impl ExpertMatrices {
    /// Gate, up, down.
    pub const fn all(&self) -> [SlotMatrix; 3] {
        [self.gate, self.up, self.down]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_is_n_out_rows_of_n_in_values() {
        let matrix = SlotMatrix { place: 4096, block_type: BlockType::Q6K, n_in: 768, n_out: 5 };
        assert_eq!((matrix.row_bytes(), matrix.bytes()), (3 * 210, 5 * 3 * 210));
    }
}
