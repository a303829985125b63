//! Number formats: block layouts, decoding, and the scalar definition of every dot product.
//!
//! A weight row is a run of blocks. A block has one scale, sometimes one of minima or a bias, and integers: codes, and
//! sub-scales and minima of groups of 16 codes. What other containers keep in separate tensors is laid out in the same
//! way; see [`Affine`]. Products with 8-bit activations are exact inside a block and round once per block and scale; see
//! [`dot_q8`]. Kernels with SIMD live in `compute` and must give the same bits.
//!
//! Pure: no files, threads or clocks, and nothing here looks at what the CPU can do.
#![forbid(unsafe_code)]
#![allow(
    clippy::inline_always,
    reason = "`compute` instantiates these loops inside functions for one instruction set; a call out of such a \
              function would run code for the oldest CPU"
)]

mod affine;
mod block_type;
pub mod codebook;
mod dot;
mod float;
mod formats;
pub mod lanes;
mod q8;
pub mod slot;

pub use affine::{Affine, ScaleType};
pub use block_type::BlockType;
pub use dot::{code_offset, decode_row, dot_f32, dot_q8, has_minima, unpack_blocks, unpack_rows};
pub use float::{bf16_to_f32, f8_to_f32, f16_to_f32, f32_to_f16};
pub use formats::Unpacked;
pub use q8::{GROUP, Q8Row, Q8View, quantize_into};
pub use slot::{ExpertMatrices, SlotMatrix};
