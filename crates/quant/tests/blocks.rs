//! Every format against values decoded by other software (`testdata/fixtures/blocks`).

use std::collections::BTreeMap;
use std::path::PathBuf;

use quant::{BlockType, Q8Row, decode_row, dot_f32, dot_q8};

struct Vectors {
    header: serde_json::Value,
    data: Vec<u8>,
}

impl Vectors {
    fn load() -> Self {
        let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/fixtures/blocks/ggml.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        Self { header: serde_json::from_slice(&bytes[8..8 + n]).unwrap(), data: bytes[8 + n..].to_vec() }
    }

    fn bytes(&self, name: &str) -> Option<(&[u8], Vec<usize>)> {
        let entry = self.header.get(name)?;
        let number = |v: &serde_json::Value| v.as_u64().unwrap() as usize;
        let [start, end] = [0, 1].map(|i| number(&entry["data_offsets"][i]));
        Some((&self.data[start..end], entry["shape"].as_array().unwrap().iter().map(number).collect()))
    }

    fn floats(&self, name: &str) -> Option<Vec<f32>> {
        let (bytes, _) = self.bytes(name)?;
        Some(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

/// Distance in representable values.
fn ulps(a: f32, b: f32) -> u64 {
    let order = |v: f32| {
        let bits = i64::from(v.to_bits().cast_signed());
        if bits < 0 { i64::from(i32::MIN) - bits } else { bits }
    };
    order(a).abs_diff(order(b))
}

fn types() -> impl Iterator<Item = BlockType> {
    BlockType::ALL.into_iter().filter(|ty| *ty != BlockType::F32)
}

#[test]
fn every_format_decodes_to_the_reference_values() {
    let vectors = Vectors::load();
    let mut worst = BTreeMap::new();
    for ty in types() {
        let mut checked = 0;
        for part in ["random", "matrix"] {
            let Some((raw, _)) = vectors.bytes(&format!("{ty}.{part}.raw")) else { continue };
            let expected = vectors.floats(&format!("{ty}.{part}.f32")).unwrap();
            let mut values = vec![0.0; expected.len()];
            decode_row(ty, raw, &mut values);
            for (i, (value, expected)) in values.iter().zip(&expected).enumerate() {
                let distance = ulps(*value, *expected);
                assert!(distance <= 1, "{ty} {part} value {i}: {value:e}, expected {expected:e}");
                let entry = worst.entry(ty.name()).or_insert(0);
                *entry = distance.max(*entry);
            }
            checked += values.len();
        }
        assert!(checked >= 1000, "{ty} has only {checked} reference values");
    }
    assert_eq!(worst.len(), 22);
    let inexact: Vec<_> = worst.iter().filter(|(_, ulps)| **ulps > 0).collect();
    assert!(inexact.is_empty(), "the reference is met bit for bit so far: {inexact:?}");
}

#[test]
fn products_with_float_activations_are_within_rounding_of_the_exact_sum() {
    let vectors = Vectors::load();
    for ty in types() {
        let Some((raw, shape)) = vectors.bytes(&format!("{ty}.matrix.raw")) else { continue };
        let (decoded, xs) =
            (vectors.floats(&format!("{ty}.matrix.f32")).unwrap(), vectors.floats(&format!("{ty}.matrix.x")).unwrap());
        let n_in = decoded.len() / shape[0];
        for x in xs.chunks_exact(n_in) {
            for (row, weights) in raw.chunks_exact(shape[1]).zip(decoded.chunks_exact(n_in)) {
                let products = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                let (exact, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
                let tolerance = n_in as f64 / 16.0 * f64::from(f32::EPSILON) * magnitude;
                let got = f64::from(dot_f32(ty, row, x));
                assert!((got - exact).abs() <= tolerance, "{ty}: {got} {exact} {tolerance}");
            }
        }
    }
}

#[test]
fn products_with_8_bit_activations_equal_the_exact_product_of_what_they_stand_for() {
    let vectors = Vectors::load();
    for ty in types().filter(|ty| !ty.is_float()) {
        let (raw, shape) = vectors.bytes(&format!("{ty}.matrix.raw")).unwrap();
        let (decoded, xs) =
            (vectors.floats(&format!("{ty}.matrix.f32")).unwrap(), vectors.floats(&format!("{ty}.matrix.x")).unwrap());
        let n_in = decoded.len() / shape[0];
        let mut q8 = Q8Row::new();
        for x in xs.chunks_exact(n_in) {
            q8.quantize(x, ty.activation_block());
            let view = q8.view();
            let stands_for = |i: usize| f64::from(view.scales[i / view.block]) * f64::from(view.quants[i]);
            for (row, weights) in raw.chunks_exact(shape[1]).zip(decoded.chunks_exact(n_in)) {
                let products = weights.iter().enumerate().map(|(i, w)| f64::from(*w) * stands_for(i));
                let (exact, magnitude) = products.fold((0.0, 0.0), |(s, m), p| (s + p, m + p.abs()));
                // Minima cancel against codes: their terms are larger than the sum of both.
                let tolerance = 16.0 * f64::from(f32::EPSILON) * magnitude * if ty.block_len() == 32 { 4.0 } else { 8.0 };
                let got = f64::from(dot_q8(ty, row, view));
                assert!((got - exact).abs() <= tolerance, "{ty}: {got} {exact} {tolerance}");
            }
        }
    }
}
