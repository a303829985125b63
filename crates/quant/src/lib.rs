//! Number formats: block layouts, decoding, and the scalar definition of every dot product.
//!
//! A weight row is a run of blocks. A block has one f32 scale and integers (sub-scales and codes multiplied out),
//! so a product with 8-bit activations is exact inside a block and rounds once per block; see [`dot_q8`].
//! Kernels with SIMD live in `compute` and must give the same bits.
#![forbid(unsafe_code)]

mod block_type;
pub mod codebook;
mod dot;
mod float;
mod formats;
pub mod lanes;
mod q8;
pub mod slot;

pub use block_type::BlockType;
pub use dot::{decode_row, dot_f32, dot_q8};
pub use float::{bf16_to_f32, f16_to_f32, f32_to_f16};
pub use formats::scale_min_k4;
pub use q8::{GROUP, Q8Row, Q8View, quantize_into};
