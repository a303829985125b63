//! Weights come from files and can be anything: no bytes may panic, overflow or leave a value unset.

mod outlined;

use outlined::{decode_row, dot_f32, dot_q8};
use proptest::prelude::*;
use quant::{BlockType, Q8Row};

fn block_type() -> impl Strategy<Value = BlockType> {
    proptest::sample::select(BlockType::ALL.to_vec())
}

/// Some blocks of any bytes, with activations of any bits or of ordinary size.
fn row() -> impl Strategy<Value = (BlockType, Vec<u8>, Vec<f32>)> {
    (block_type(), 1..4_usize).prop_flat_map(|(ty, blocks)| {
        let (bytes, n_in) = (blocks * ty.block_bytes(), blocks * ty.block_len());
        let bits = any::<u32>().prop_map(f32::from_bits);
        let x = prop_oneof![
            proptest::collection::vec(bits, n_in),
            proptest::collection::vec(-8.0_f32..8.0, n_in),
        ];
        (Just(ty), proptest::collection::vec(any::<u8>(), bytes), x)
    })
}

/// Equal bits, or both NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_bytes_decode_and_the_product_is_that_of_the_decoded_values((ty, row, x) in row()) {
        // A value that decoding cannot give: the payload of this NaN comes from no format.
        let unset = f32::from_bits(0x7f81_2345);
        let mut values = vec![unset; x.len()];
        decode_row(ty, &row, &mut values);
        if ty != BlockType::F32 {
            prop_assert!(values.iter().all(|v| v.to_bits() != unset.to_bits()), "{}", ty);
        }
        prop_assert!(same(dot_f32(ty, &row, &x), quant::lanes::dot(&values, &x)), "{}", ty);
    }

    #[test]
    fn blocks_decode_alike_alone_and_in_a_row((ty, row, x) in row()) {
        let mut values = vec![0.0; x.len()];
        decode_row(ty, &row, &mut values);
        let mut alone = vec![0.0; ty.block_len()];
        for (block, values) in row.chunks(ty.block_bytes()).zip(values.chunks(ty.block_len())) {
            decode_row(ty, block, &mut alone);
            prop_assert!(alone.iter().zip(values).all(|(a, b)| same(*a, *b)), "{}", ty);
        }
    }

    #[test]
    fn any_bytes_multiply_with_any_activations((ty, row, x) in row()) {
        if ty.is_float() {
            return Ok(());
        }
        let mut x8 = Q8Row::new();
        x8.quantize(&x, ty.activation_block());
        let product = dot_q8(ty, &row, x8.view());
        if x.iter().any(|v| !v.is_finite()) {
            prop_assert!(product.is_nan(), "{}: {}", ty, product);
        }
    }

    #[test]
    fn a_row_is_whole_blocks_of_addressable_bytes(ty in block_type(), n_in in any::<usize>()) {
        let exact = n_in as u128 / ty.block_len() as u128 * ty.block_bytes() as u128;
        let expected = usize::try_from(exact).ok().filter(|_| n_in % ty.block_len() == 0);
        prop_assert_eq!(ty.row_bytes(n_in), expected);
        let whole = n_in - n_in % ty.block_len();
        let exact = whole as u128 / ty.block_len() as u128 * ty.block_bytes() as u128;
        prop_assert_eq!(ty.row_bytes(whole), usize::try_from(exact).ok());
    }
}
