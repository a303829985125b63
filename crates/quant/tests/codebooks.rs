//! The grids are those that `codebooks/generate.py` took from the package: the tables, not just the file, have the
//! hash that it printed.

use quant::codebook::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};

/// SHA-256 (FIPS 180-4). Constants are the leading bits of roots of the first primes.
fn sha256(message: &[u8]) -> Vec<u8> {
    let primes: Vec<u64> = (2..312).filter(|n| (2..*n).all(|d| n % d != 0)).collect();
    let fraction = |root: f64| ((root - root.floor()) * 4_294_967_296.0) as u32;
    let k: Vec<u32> = primes.iter().map(|p| fraction((*p as f64).cbrt())).collect();
    let mut hash: Vec<u32> = primes[..8].iter().map(|p| fraction((*p as f64).sqrt())).collect();
    let mut padded = message.to_vec();
    padded.push(0x80);
    padded.resize(padded.len().next_multiple_of(64), 0);
    if padded.len() - message.len() < 9 {
        padded.extend([0; 64]);
    }
    let end = padded.len() - 8;
    padded[end..].copy_from_slice(&(8 * message.len() as u64).to_be_bytes());
    for chunk in padded.as_chunks::<64>().0 {
        let mut w: Vec<u32> = chunk.as_chunks().0.iter().map(|b| u32::from_be_bytes(*b)).collect();
        for i in 16..64 {
            let (a, b): (u32, u32) = (w[i - 15], w[i - 2]);
            let a = a.rotate_right(7) ^ a.rotate_right(18) ^ (a >> 3);
            let b = b.rotate_right(17) ^ b.rotate_right(19) ^ (b >> 10);
            w.push(w[i - 16].wrapping_add(a).wrapping_add(w[i - 7]).wrapping_add(b));
        }
        let mut v = hash.clone();
        for (k, w) in k.iter().zip(&w) {
            let (a, e): (u32, u32) = (v[0], v[4]);
            let mix = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let choice = e & v[5] ^ !e & v[6];
            let t1 = [mix, choice, *k, *w].into_iter().fold(v[7], u32::wrapping_add);
            let mix = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let majority = a & v[1] ^ a & v[2] ^ v[1] & v[2];
            v.rotate_right(1);
            v[4] = v[4].wrapping_add(t1);
            v[0] = t1.wrapping_add(mix).wrapping_add(majority);
        }
        hash.iter_mut().zip(v).for_each(|(h, v)| *h = h.wrapping_add(v));
    }
    hash.into_iter().flat_map(u32::to_be_bytes).collect()
}

fn hex(digits: &str) -> Vec<u8> {
    let digit = |c: char| c.to_digit(16).expect("a hexadecimal digit") as u8;
    let digits: Vec<u8> = digits.chars().map(digit).collect();
    digits.as_chunks().0.iter().map(|[high, low]| high << 4 | low).collect()
}

#[test]
fn the_hash_function_gives_published_digests() {
    // FIPS 180-2, appendix B: one block, two blocks.
    assert_eq!(
        sha256(b"abc"),
        hex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    );
    assert_eq!(
        sha256(b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
        hex("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1")
    );
}

#[test]
fn tables_are_the_grids_of_the_package() {
    let wide = IQ2_XXS.iter().chain(&IQ2_XS).chain(&IQ2_S).flatten();
    let narrow = IQ3_XXS.iter().chain(&IQ3_S).flatten();
    let values = wide.chain(narrow).chain(IQ1.iter().flatten());
    let bytes: Vec<u8> = values.map(|v| v.cast_unsigned()).collect();
    let line = include_str!("../codebooks/codebooks.bin.sha256");
    assert_eq!(sha256(&bytes), hex(line.split_whitespace().next().expect("a digest")));
}
